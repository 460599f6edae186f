"""A rule that all recipes keep is one test, which names every recipe that breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Subject = TypeVar("Subject")


def each(subjects: Iterable[Subject]) -> Callable[[Callable[[Subject], None]], Callable[[], None]]:
    """Turn a test of one subject into a test of all: it fails once, with all that are wrong."""
    found = [*subjects]

    def looping(test: Callable[[Subject], None]) -> Callable[[], None]:
        def look_at_all() -> None:
            wrong = []
            for subject in found:
                try:
                    test(subject)
                except Exception as error:
                    wrong.append(f"{subject}: {type(error).__name__}: {error}")
            assert found, "the rule was kept by nobody"
            assert not wrong, "\n".join(wrong)

        look_at_all.__name__, look_at_all.__doc__ = test.__name__, test.__doc__
        look_at_all.__module__ = test.__module__
        return look_at_all

    return looping

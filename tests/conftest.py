"""What every test file shares."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

#: Files of many tests that take a minute together.
LONG = {"test_amplification.py", "test_interrupts.py", "test_pages.py", "test_recipes.py"}


def _marks(item: pytest.Item) -> set[str]:
    return {mark.name for mark in item.iter_markers()}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files, and skip the tests marked ``gpu`` on a machine that has no accelerator."""
    # The longest first: else the last one keeps one worker, and the others have nothing to do.
    long = {item.path for item in items if {"slow", "distributed"} & _marks(item)}
    items.sort(key=lambda item: item.path not in long and item.path.name not in LONG)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.accelerator.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no accelerator on this machine"))


@pytest.fixture(autouse=True, scope="session")
def interrupts_are_heard() -> Iterator[None]:
    """Ctrl-C raises, as at a terminal: a shell lets what it starts in the background ignore it."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, signal.SIG_IGN)

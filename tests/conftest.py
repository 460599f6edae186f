"""What every test file shares."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator

import pytest

#: From this number of ranks on a world is of the slow lane, but those marked ``every_world``.
MANY = 4


def is_slow(item: pytest.Item) -> bool:
    """Whether a test is of `make slow`: it is marked, or starts many ranks."""
    ranks = item.callspec.params.get("ranks", 1) if hasattr(item, "callspec") else 1
    many = isinstance(ranks, int) and ranks >= MANY
    return bool(item.get_closest_marker("slow")) or (
        many and not item.get_closest_marker("every_world")
    )


def pytest_collection_finish() -> None:
    """Let no collection look again at what was imported: tests of `preflight` take a third."""
    gc.collect()
    gc.freeze()


#: The names of the marks of all tests that were collected, before a lane was chosen.
MARKS = pytest.StashKey[dict[str, set[str]]]()


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the slow lane, order the files, and skip tests that need an accelerator without one."""
    for item in filter(is_slow, items):
        item.add_marker("slow")
    config.stash[MARKS] = {item.nodeid: {m.name for m in item.iter_markers()} for item in items}
    # The longest first: else the last one keeps one worker, and the others have nothing to do.
    long = {
        item.path for item in items if any(map(item.get_closest_marker, ("distributed", "long")))
    }
    items.sort(key=lambda item: item.path not in long)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.accelerator.is_available():
        for item in marked:
            item.add_marker(
                pytest.mark.skip(reason="no accelerator here: run them where torch finds one")
            )


@pytest.fixture(scope="session")
def marks(request: pytest.FixtureRequest) -> dict[str, set[str]]:
    """The names of the marks of every test of the suite, whichever lane runs."""
    if request.config.args != request.config.getini("testpaths"):
        pytest.skip("not all tests were collected")
    return request.config.stash[MARKS]


@pytest.fixture(autouse=True, scope="session")
def interrupts_are_heard() -> Iterator[None]:
    """Ctrl-C raises, as at a terminal: a shell lets what it starts in the background ignore it."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, signal.SIG_IGN)

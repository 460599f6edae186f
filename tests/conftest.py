"""What every test file shares."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked ``gpu`` on a machine that has no accelerator."""
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

"""Holds Ctrl-C back while a model is half changed. Standard library only."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[Callable[[], None]]:
    """Deliver a SIGINT at the end of the block, or where the block calls what it is given.

    A second one is delivered at once. Only the main thread receives signals, so in other threads
    the block is as it is.
    """
    handler = signal.getsignal(signal.SIGINT)
    held: list[tuple[int, FrameType | None]] = []

    def deliver() -> None:
        if held and callable(handler):
            handler(*held.pop())

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            deliver()
        held.append((number, frame))

    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield deliver
        return
    signal.signal(signal.SIGINT, hold)
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, handler)
        deliver()

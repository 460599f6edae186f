"""Hold Ctrl-C back while a change is half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

#: Calls that deliver the SIGINTs that are held back. Only the main thread gets any.
_interrupts: list[Callable[[], object]] = []


class _Hold:
    """A handler of signals that leaves them to another one, for later; of a second, at once."""

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        deliver_interrupt()
        _interrupts.append(partial(self.handler, number, frame))


@contextmanager
def uninterrupted() -> Iterator[Callable[[], None]]:
    """Deliver a SIGINT at the end of the block, or where the block calls what it is given.

    A second one is delivered at once. Of blocks inside of each other the outermost one counts. Only
    the main thread receives signals, so in other threads the block is as it is.
    """
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Hold) or not callable(handler) or not _is_main_thread():
        yield deliver_interrupt
        return
    signal.signal(signal.SIGINT, _Hold(handler))
    try:
        yield deliver_interrupt
    finally:
        signal.signal(signal.SIGINT, handler)
        deliver_interrupt()


class Interruptible:
    """Delivers a SIGINT at once inside its block, which is inside one of `uninterrupted`."""

    # No generator: one that an interrupt has left would hold back others when it is collected.
    def __enter__(self) -> None:
        self._hold = signal.getsignal(signal.SIGINT) if _is_main_thread() else None
        if isinstance(self._hold, _Hold):
            deliver_interrupt()
            signal.signal(signal.SIGINT, self._hold.handler)

    def __exit__(self, *_: object) -> None:
        if isinstance(self._hold, _Hold):
            signal.signal(signal.SIGINT, self._hold)


def deliver_interrupt() -> None:
    """Deliver the SIGINT that `uninterrupted` holds back, if there is one.

    What waits for others calls it: a lock may be theirs for as long as they like.
    """
    if _interrupts and _is_main_thread():
        _interrupts.pop()()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()

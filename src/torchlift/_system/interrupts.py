"""Hold Ctrl-C back while a change is half done."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Running:
    """A call that may end without a word, by an interrupt of what it does about interrupts.

    A notebook keeps the traceback, and with that all that the call had: no destructor runs. The
    frame is known by its number alone: whatever has this object would keep it, too.

    Attributes:
        thread: in which it runs.
    """

    def __init__(self, frame: FrameType) -> None:
        self.thread = threading.get_ident()
        self._process, self._frame = os.getpid(), id(frame)

    @classmethod
    def of_block(cls, frame: FrameType) -> Running:
        """Return the call that contains the block of a context manager.

        Args:
            frame: The context manager's. A generator is not on the stack while its block runs.
        """
        while frame.f_back and (
            frame.f_code.co_flags & inspect.CO_GENERATOR
            or frame.f_code.co_filename == contextlib.__file__
        ):
            frame = frame.f_back
        return cls(frame)

    def is_over(self) -> bool:
        """Return whether it has ended. In a fork it never has: the other process runs it."""
        frame = sys._current_frames().get(self.thread)
        while frame is not None and id(frame) != self._frame:
            frame = frame.f_back
        return frame is None and os.getpid() == self._process


class _Hold:
    """A signal handler that passes the first signal to another one later, and the second at once.

    An interrupt may keep the block from removing it. It therefore ends with its block all the same,
    or it would hold back a Ctrl-C an hour later.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self.handler = handler
        self.block = Running.of_block(sys._getframe(1))

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.block.is_over():
            signal.signal(signal.SIGINT, self.handler)
            self.handler(number, frame)
            return
        deliver_interrupt()
        _interrupts.append((self, number, frame))


#: The SIGINTs that are held back, and by what. Only the main thread gets any.
_interrupts: list[tuple[_Hold, int, FrameType | None]] = []


@contextmanager
def uninterrupted() -> Iterator[Callable[[], None]]:
    """Hold back a SIGINT until the block ends or calls the function that it receives.

    A second SIGINT is delivered at once. If blocks are nested, the outermost one delivers it. In
    other threads than the main one this does nothing, because they receive no signals.
    """
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Hold) and handler.block.is_over():
        handler = handler.handler
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

    Code that waits for another process calls it, because that may hold a lock for any time.
    """
    if _interrupts and _is_main_thread():
        hold, number, frame = _interrupts.pop()
        if not hold.block.is_over():
            hold.handler(number, frame)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()

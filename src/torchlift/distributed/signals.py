"""Signals that ask a program to stop, such as a scheduler's before it takes the machine away."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torchlift.errors import CheckpointError

#: The signals that schedulers send, if the system has them.
STOPS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


class StopSignals:
    """Records signals until it is closed, and calls the former handlers.

    Attributes:
        received: Whether a signal was received.

    Example:
        >>> import os, signal
        >>> from torchlift.distributed.signals import StopSignals
        >>> signals = StopSignals([signal.SIGUSR1])
        >>> os.kill(os.getpid(), signal.SIGUSR1)
        >>> signals.received
        True
        >>> signals.close()
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        """Install the handlers.

        Raises:
            CheckpointError: If this is not the main thread, or a former handler was not installed
                by Python, and so could not be restored.
        """
        self.received = False
        self._process = os.getpid()
        self._former: dict[int, Any] = {}
        for number in numbers:
            former = signal.getsignal(number)
            if not _is_main_thread() or former is None:
                self.close()
                raise CheckpointError(
                    "the keeper cannot handle a signal",
                    entry=signal.Signals(number).name,
                    expected="a first call in the main thread, and a handler installed by Python",
                    hint="Call should_stop() once in the main thread, before the loop.",
                )
            self._former[number] = former
            signal.signal(number, self._record)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A forked child inherits this handler, but never calls should_stop. It would ignore
            # SIGTERM, and a parent that ends its daemon children would wait forever.
            signal.signal(number, self._former[number])
            os.kill(os.getpid(), number)
            return
        self.received = True
        former = self._former.get(number)
        if callable(former):
            former(number, frame)

    def close(self) -> None:
        """Restore the former handlers, except where the program has installed another one since."""
        for number, former in self._former.items():
            if _is_main_thread() and signal.getsignal(number) == self._record:
                signal.signal(number, former)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()

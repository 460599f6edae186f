"""Signals that ask a program to stop, such as a scheduler's before it takes the machine away."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torchlift.errors import CheckpointError

#: What schedulers send, where there are such signals.
STOPS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


class StopSignals:
    """Notes signals until it is closed, and calls the handlers that were there before.

    Attributes:
        met: whether there was one.

    Example:
        >>> import os, signal
        >>> from torchlift.distributed.signals import StopSignals
        >>> signals = StopSignals([signal.SIGUSR1])
        >>> os.kill(os.getpid(), signal.SIGUSR1)
        >>> signals.met
        True
        >>> signals.close()
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        """Install the handlers.

        Raises:
            CheckpointError: it is not the main thread, or a handler could not be restored.
        """
        self.met = False
        self._former: dict[int, Any] = {}
        for number in numbers:
            former = signal.getsignal(number)
            if not _is_main_thread() or former is None:
                self.close()
                raise CheckpointError(
                    "the keeper cannot listen to a signal",
                    entry=signal.Signals(number).name,
                    expected="to be asked in the main thread first, of a signal whose handler is "
                    "one of Python's",
                    hint="Call should_stop() once there, before the loop.",
                )
            self._former[number] = former
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.met = True
        former = self._former.get(number)
        if callable(former):
            former(number, frame)

    def close(self) -> None:
        """Restore the former handlers, but where somebody has installed another one since."""
        for number, former in self._former.items():
            if _is_main_thread() and signal.getsignal(number) == self._note:
                signal.signal(number, former)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()

"""A device that is memory of this process: it fetches in order, at its own time and speed.

What is queued is executed by a thread of the device, so what a test sees of order, or of memory
that is used again too early, is what a real one would do.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch


class FakeDevice:
    """Executes what is queued, one after the other.

    Args:
        rate: bytes that it fetches in a second; None: at once.
        full: whether it has no memory left.
    """

    def __init__(self, rate: float | None = None, full: bool = False) -> None:
        self.rate, self.full = rate, full
        self.busy = 0.0
        self.fetched = 0
        self.waited = 0
        self._queue: deque[Callable[[], object]] = deque()
        self._some = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="fake-device")
        self._thread.start()

    def record_event(self) -> FakeDevice._Event:
        """Return what happens when all that is queued now is executed."""
        event = FakeDevice._Event(self)
        self.put(event.set)
        return event

    def put(self, call: Callable[[], object]) -> None:
        """Queue a call."""
        with self._some:
            self._queue.append(call)
            self._some.notify()

    def fetch(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy, as long as that takes."""
        start = time.perf_counter()
        target.copy_(source)
        self.fetched += source.nbytes
        if self.rate is not None:
            time.sleep(max(0.0, source.nbytes / self.rate - (time.perf_counter() - start)))
        self.busy += time.perf_counter() - start

    def close(self) -> None:
        """End the thread, when it has executed everything."""
        with self._some:
            self._ended = True
            self._some.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._some:
                self._some.wait_for(lambda: self._queue or self._ended)
                if not self._queue:
                    return
                call = self._queue.popleft()
            call()

    class _Event(threading.Event):
        def __init__(self, device: FakeDevice) -> None:
            super().__init__()
            self._device = device

        def query(self) -> bool:
            """Whether it has happened."""
            return self.is_set()

        def synchronize(self) -> None:
            """Wait until it has happened."""
            self._device.waited += 1
            assert self.wait(60)


class OnDevice(torch.Tensor):
    """A tensor whose values are in a device's memory, and which only it writes to."""

    memory: torch.Tensor
    at: FakeDevice

    @staticmethod
    def __new__(cls, memory: torch.Tensor, at: FakeDevice) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, memory.shape, strides=memory.stride(), dtype=memory.dtype, device="cuda:0"
        )
        made.memory, made.at = memory, at
        return made

    def __getitem__(self, place: Any) -> OnDevice:
        """Return a view: torch itself would look for the device."""
        return OnDevice(self.memory[place], self.at)

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> OnDevice:
        """Queue a copy, of which the device does not say when it is done."""
        values = source.memory if isinstance(source, OnDevice) else source
        self.at.put(lambda: self.at.fetch(values, self.memory))
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty_like:
            (like,) = args
            if like.at.full:
                raise torch.OutOfMemoryError("no memory left")
            return OnDevice(func(like.memory, **kwargs), like.at)
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} on the fake device")


class Pinned(torch.Tensor):
    """Memory that the device fetches from by itself."""

    def is_pinned(self, device: object = None) -> bool:
        """Whether that is so."""
        return True

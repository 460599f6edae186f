"""Reads that fail, for tests of what a load leaves behind then."""

from __future__ import annotations

import os
import threading


def failing(error: BaseException, nth: int):
    """An os.preadv whose nth call fails."""
    true, lock, calls = os.preadv, threading.Lock(), []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        with lock:
            calls.append(1)
            count = len(calls)
        if count == nth:
            raise error
        return true(descriptor, buffers, offset)

    return preadv


def readers() -> list[str]:
    """Names of the reader threads that still run."""
    return [t.name for t in threading.enumerate() if t.name.startswith("torchlift-read")]

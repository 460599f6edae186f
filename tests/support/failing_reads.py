"""Files opened as a checkpoint's are, and reads of them that fail, for tests of the transfer."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from torchlift._store.files import FileStamp
from torchlift._transfer.files import Files


def opened(*paths: Path) -> Files:
    """Files with the stamps that they have now."""
    return Files({str(path): FileStamp.of(str(path)) for path in paths})


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

"""Let the nth call into the file system or `torch.distributed` fail: it only raises, or dies."""

from __future__ import annotations

import builtins
import fcntl
import itertools
import mmap
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

#: How a call fails. An interrupt is one of the process, and the call goes on.
KINDS = ("error", "memory", "interrupt", "death")
#: Not ``close``: what it raises about, the system has closed.
FILES = [
    *("open", "read", "readv", "pread", "preadv", "write", "writev", "pwrite", "pwritev", "fsync"),
    *("fdatasync", "truncate", "ftruncate", "replace", "rename", "link", "unlink", "remove"),
    *("mkdir", "rmdir", "listdir", "scandir", "stat", "lstat", "fstat", "chmod", "utime", "access"),
    *("readlink", "symlink", "posix_fallocate", "copy_file_range", "sendfile", "statvfs"),
]
GROUPS = ["all_gather_object", "all_gather", "gather_object", "broadcast_object_list", "broadcast",
          "all_reduce", "barrier", "destroy_process_group"]  # fmt: skip
_TORCH = (dist, distributed_c10d)
PLACES = [
    *((os, name) for name in FILES),
    (builtins, "open"),
    (mmap, "mmap"),
    (fcntl, "flock"),
    *((module, name) for name in GROUPS for module in _TORCH),
    # Of new_group what may fail on one rank: before that it only counts, on each rank alike.
    (distributed_c10d, "_new_process_group_helper"),
]


class Fault:
    """Counts calls, and lets one fail.

    Args:
        kind: one of `KINDS`.
        nth: the number of that call, from 1 on; 0 for none.
    """

    def __init__(self, kind: str, nth: int) -> None:
        self.kind, self.nth, self.count, self.at = kind, nth, 0, ""
        self._lock = threading.Lock()
        self._inside = threading.local()

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Count the calls of all threads inside the block."""
        true = [(module, name, getattr(module, name)) for module, name in PLACES]
        for module, name, function in true:
            setattr(module, name, self._counted(name, function, module))
        try:
            yield
        finally:
            for module, name, function in true:
                setattr(module, name, function)

    def _counted(self, name: str, function: Any, module: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            # all_gather_object gathers twice. A rank that fails in between is torch's to mend: no
            # caller can know that the others wait for the second half.
            if getattr(self._inside, "torch", False):
                return function(*args, **options)
            with self._lock:
                self.count += 1
                fails = self.count == self.nth
            if fails:
                own = [f"{f.filename}:{f.lineno}" for f in traceback.extract_stack()]
                own = [place for place in own if "/torchlift/" in place]
                self.at = f"{name} {'; '.join(itertools.islice(reversed(own), 3))}"
                self._fail(module)
            self._inside.torch = module in _TORCH
            try:
                return function(*args, **options)
            finally:
                self._inside.torch = False

        return call

    def _fail(self, module: Any) -> None:
        if self.kind == "death":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if self.kind == "memory":
            raise MemoryError("no room")
        if self.kind == "error":
            raise (RuntimeError("no luck") if module in _TORCH else OSError(5, "no luck"))

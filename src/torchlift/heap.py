"""Gives memory that was freed back to the system, where the C library keeps it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache


def trim() -> None:
    """Release what the process has freed and still owns.

    glibc keeps a freed block of up to 32 MiB for the next request, but torch asks for aligned
    memory, for which a hole of the same size is too small: sixteen temporaries of 16 MiB, one after
    the other, took 257 MiB, and 17 MiB with this between them. Elsewhere it does nothing.
    """
    _malloc_trim()(0)


@cache
def _malloc_trim() -> Callable[[int], object]:
    if not sys.platform.startswith("linux"):
        return _nothing
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):  # another C library
        return _nothing


def _nothing(_: int) -> None:
    return None

"""The garbage collector, freed memory and the C library."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the collector inside the block; nothing is lost, it only runs later.

    A hundred thousand records make it walk everything a dozen times for nothing, and importing
    torch leaves a full collection due: 50 ms that would fall on the first load, which takes 4.

    Example:
        >>> import gc
        >>> with collection_paused():
        ...     gc.isenabled()
        False
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def trim() -> None:
    """Release what the process has freed and still owns.

    glibc keeps a freed block of up to 32 MiB for the next request, but torch asks for aligned
    memory, for which a hole of the same size is too small: sixteen temporaries of 16 MiB, one after
    the other, took 257 MiB, and 17 MiB with this between them. Elsewhere it does nothing.
    """
    c_function("malloc_trim")(0)


@cache
def c_function(name: str) -> Callable[..., object]:
    """Return a function of the C library, or one that does nothing where it has none."""
    import ctypes  # 2 ms, which reading an index does without

    try:
        found: Callable[..., object] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # another C library, or another system
        return lambda *_: None
    return found

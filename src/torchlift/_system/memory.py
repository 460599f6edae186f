"""The garbage collector, freed memory, free memory and the C library."""

from __future__ import annotations

import gc
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import chain, compress, repeat, tee
from typing import TypeVar

T = TypeVar("T")

#: Of cgroups, versions 2 and 1: controllers -> folder, files of the limit and of the use, and the
#: prefix of the counters in ``memory.stat`` that include the groups inside.
_CGROUPS = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current", ""),
    "memory": (
        "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_",
    ),
}  # fmt: skip


#: What `tee` still holds at the end of a list, in place of objects: up to 57 items.
_PADDING = [None] * 256


@contextmanager
def collection_paused(*, in_any_thread: bool = False) -> Iterator[None]:
    """Pause the collector inside the block. It runs later.

    A hundred thousand records would make it walk over everything a dozen times for nothing. The
    import of torch leaves a full collection due, which takes 50 ms. A first load takes 4 ms.

    The collector is that of all threads. So only the main thread pauses it. While a Keeper writes,
    training would collect nothing, and a ``gc.disable()`` of its own would be undone.

    Args:
        in_any_thread: Whether to pause it in other threads, too.

    Example:
        >>> import gc
        >>> with collection_paused():
        ...     gc.isenabled()
        False
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main and not in_any_thread:
        yield
        return
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def live_instances(base: type[T]) -> list[T]:
    """Return the live objects of a class, and of the classes that inherit from it.

    A list of all objects would hold tuples that other threads are still filling. CPython fills only
    tuples that nobody else holds, so their ``tuple(...)``, or the next step of their training,
    would raise ``SystemError``. So one call of C code, in which no other thread can run, lists and
    selects the objects. Python code would let other threads run. So the call hashes the address
    of a class, because a metaclass can have a hash of its own. An audit hook runs between two lists
    only.

    Example:
        >>> class Base: ...
        >>> class Derived(Base): ...
        >>> kept = Derived()
        >>> live_instances(Base) == [kept]
        True
    """
    address = object.__hash__  # not id(), which every audit hook would see
    kinds, left = dict[int, type](), [base]
    while left:
        kind = left.pop()
        if address(kind) not in kinds:
            kinds[address(kind)] = kind
            left.extend(type.__subclasses__(kind))
    with collection_paused(in_any_thread=True):
        gc.collect(0)
        # Without the youngest generation, which now is that of `tee`: it would hold itself.
        lists = map(list.__add__, map(gc.get_objects, (1, 2)), repeat(_PADDING))
        items, same = tee(chain.from_iterable(lists))
        # By type(): isinstance() would run the __class__ property of somebody's proxy.
        return list(compress(items, map(kinds.__contains__, map(address, map(type, same)))))


def trim() -> None:
    """Return freed memory to the system.

    glibc keeps a freed block of up to 32 MiB for the next request. torch requests aligned memory,
    for which a hole of the same size is too small. Sixteen temporaries of 16 MiB, one after the
    other, took 257 MiB, and 17 MiB with this between them. Other C libraries need nothing.
    """
    c_function("malloc_trim")(0)


def free_memory(root: str = "/") -> int | None:
    """Return how many bytes this process can allocate before the kernel kills one, or None.

    A container or a batch job has the limit of its cgroup. ``MemAvailable`` is that of the machine:
    a job with a limit of 16 GB on a machine with 512 GB would seem to fit.

    Args:
        root: The folder that has ``proc`` and ``sys``.

    Returns:
        The lowest number of the machine and of each cgroup around this process. Pages of files in
        the page cache count as free. None if the system does not report it, as on macOS.
    """
    available = _number(os.path.join(root, "proc/meminfo"), "MemAvailable:")
    if available is None:
        return None
    rooms = [available * 1024]
    for line in _text(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in _CGROUPS:
            continue
        folder, limit, use, prefix = _CGROUPS[controllers]
        # A limit of an outer group holds, too. In a container the path may be the host's, and the
        # folder is the container's own: what is not there is passed over.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for count in range(len(parts) + 1):
            group = os.path.join(root, folder, *parts[:count])
            most, used = (_number(os.path.join(group, name)) for name in (limit, use))
            if most is not None and used is not None:
                stat = os.path.join(group, "memory.stat")
                cached = [_number(stat, f"{prefix}{kind}_file") for kind in ("active", "inactive")]
                rooms.append(max(0, most - used + sum(number or 0 for number in cached)))
    return min(rooms)


def _number(path: str, label: str = "") -> int | None:
    """Return the first number of a file, or the one after a label, or None."""
    found = re.search(rf"(?m)^{label}\s*(\d+)", _text(path))
    return None if found is None else int(found[1])


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError:  # another system, or a cgroup without this controller
        return ""


@cache
def c_function(name: str) -> Callable[..., object]:
    """Return a function of the C library, or one that does nothing if it does not exist."""
    import ctypes  # 2 ms, which reading an index does without

    try:
        found: Callable[..., object] = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):  # another C library, or another system
        return lambda *_: None
    return found

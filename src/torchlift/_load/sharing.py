"""What several ranks of one machine need of URLs: fetched once, passed on through shared memory.

Replicas need the same bytes, and so do shards of columns, between whose rows lie those of others.
Each rank fetches some of that into memory of its own, out of which the others take what they need.
"""

from __future__ import annotations

import mmap
import os
import pickle
import platform
import secrets
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import groupby
from typing import Self

import torch

from torchlift._model import RankGroup
from torchlift._store import UrlStamp
from torchlift._transfer import Files, Request, read
from torchlift.errors import CheckpointError

#: Bytes that are fetched as one, and how many of them a rank has in memory before the others take
#: them. While they do, it fetches the next ones into the other half of its memory.
_SLOT, _SLOTS = 8 << 20, 4
_HALF = _SLOT * _SLOTS
_START = mmap.PAGESIZE  # before it stand what a rank has done, and a token
_NEAR = 1 << 20  # bytes between two ranges that are fetched with them
_LARGEST = 4 << 20  # bytes from row to row
_PAUSE = 0.0005  # seconds between two looks at what the others have done

#: What a rank has done: it has listed what it needs, and read what the others do; then how many
#: rounds it has fetched, too. Or it goes on alone, or it has failed.
_LISTED, _MET, _ALONE, _FAILED = 1, 2, -1, -2

#: Of a rank: its machine, its process, the descriptor of its memory, and the token in there.
About = tuple[str, int, int, bytes]
#: What a file is called on every rank: its text, size, version and time of change.
_File = tuple[str, int, str, str]
#: A file; first byte and end of what is needed of it; bytes from row to row, or 0, of a row, and of
#: an element.
_Span = tuple[_File, int, int, int, int, int]


@dataclass(slots=True, eq=False)
class _Slot:
    """Bytes of a file that one rank fetches for others, too.

    Attributes:
        file, start, end: where they are.
        owner: which of the ranks fetches them.
        number: how many it fetches before them.
        takes: (first byte, end, request) of what this rank needs of them.
    """

    file: _File
    start: int
    end: int
    owner: int = 0
    number: int = 0
    takes: list[tuple[int, int, Request]] = field(default_factory=list)


class Neighbours:
    """The ranks of a load that run on one machine, and fetch together.

    Args:
        ranks: all ranks of the load.
        is_away: whether this rank reads anything of URLs; else it takes no part.
    """

    def __init__(self, ranks: RankGroup, is_away: bool) -> None:
        self._ranks = ranks
        self.about: About | None = None
        self._own: _Memory | None = None
        self._all: list[_Memory] = []
        if is_away and hasattr(os, "memfd_create"):
            with suppress(OSError):
                token, descriptor = secrets.token_bytes(16), os.memfd_create("torchlift")
                self._own = _Memory(descriptor, os.getpid(), token, is_own=True)
                self.about = _machine(), os.getpid(), descriptor, token

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._own is not None and kind is not None:
            self._own.done = _FAILED  # the others may wait for it

    def meet(self, told: Mapping[int, About | None]) -> None:
        """Take note of who is on this machine, given what all ranks tell of themselves."""
        own, about = self._own, self.about
        here = [each for _, each in sorted(told.items()) if each and about and each[0] == about[0]]
        if own is None or len(here) < 2:
            return
        try:
            for _, process, descriptor, token in here:
                if token == own.token:
                    self._all.append(own)
                else:
                    opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
                    self._all.append(_Memory(opened, process, token))
        except (OSError, ValueError):  # it runs in another container, or may not be looked into
            self._all.clear()
            own.done = _ALONE

    def read(
        self, requests: Sequence[Request], files: Files, advance: Callable[[int], object]
    ) -> None:
        """Execute requests, all ranks of the machine together; each calls this once.

        Raises:
            CheckpointError: a request failed, here or on another rank.
        """
        spans = dict[_Span, list[Request]]()
        alone = list[Request]()
        for request in requests:
            span = _span_of(request, files)
            (alone if span is None else spans.setdefault(span, [])).append(request)
        everybody = self._listed([*spans])
        slots = _slots_of(everybody, spans)
        shared = {id(request) for slot in slots for *_, request in slot.takes}
        alone += [r for some in spans.values() for r in some if id(r) not in shared]
        read(alone, files, advance=advance)
        # Of all: what a rank fetches for others may be none of what it shares itself.
        own, names = self._own, {_file_of(r.file, files): r.file for r in requests if slots}
        rounds = defaultdict[int, list[_Slot]](list)
        for slot in slots:
            rounds[slot.number // _SLOTS].append(slot)
        for number, now in sorted(rounds.items()):
            assert own is not None
            mine = [slot for slot in now if self._all[slot.owner] is own]
            read([_fetching(names[slot.file], slot, own) for slot in mine], files)
            own.done = _MET + 1 + number
            self._wait(own.done)
            for slot in now:
                memory = _bytes_of(self._all[slot.owner], slot)
                for start, end, request in slot.takes:
                    advance(_take(memory, slot.start, start, end, request))

    def _listed(self, spans: list[_Span]) -> list[list[_Span]]:
        """Return what each rank of the machine needs; nothing where each goes on alone."""
        own = self._own
        if own is None or not self._all:
            return []
        listed = pickle.dumps(spans)
        if len(listed) > 2 * _HALF - 8:
            own.done = _ALONE
        else:
            own.map[_START : _START + 8 + len(listed)] = struct.pack("q", len(listed)) + listed
            own.done = _LISTED
        if self._wait(_LISTED) < 0:
            return []
        found = []
        for memory in self._all:
            (length,) = struct.unpack("q", memory.map[_START : _START + 8])
            found.append(pickle.loads(memory.map[_START + 8 : _START + 8 + length]))
        own.done = _MET
        self._wait(_MET)  # what was listed is written over from here on
        return found

    def _wait(self, done: int) -> int:
        """Wait until all ranks have done something; return the least that one has."""
        end, own = time.monotonic() + self._ranks.patience, self._own
        while True:
            found = [memory.done for memory in self._all]
            late = [
                memory
                for memory, at in zip(self._all, found, strict=True)
                if at < done and at != _ALONE
            ]
            if _FAILED not in found and not late:
                return min(found)
            is_over = _FAILED in found or time.monotonic() > end
            if is_over or not late[0].is_alive():
                # Before the ranks talk: one that is ahead may be waiting for this one here.
                assert own is not None
                own.done = _FAILED
                self._ranks.run(lambda: (None, None))  # which raises what has happened there
                raise CheckpointError("another rank of this machine has stopped")
            time.sleep(_PAUSE)


class _Memory:
    """Memory of a rank, which the others of its machine map, too."""

    def __init__(
        self, descriptor: int, process: int, token: bytes, *, is_own: bool = False
    ) -> None:
        self.token, self._process = token, process
        try:
            if is_own:
                os.ftruncate(descriptor, _START + 2 * _HALF)
            self.map = mmap.mmap(descriptor, _START + 2 * _HALF)
        except BaseException:
            os.close(descriptor)
            raise
        if is_own:
            self._descriptor = descriptor  # open as long as others may come
            self.map[8:24] = token
        else:
            os.close(descriptor)
            if self.map[8:24] != token:
                raise ValueError("another process")

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    @property
    def done(self) -> int:
        """What the rank has done."""
        found: int = struct.unpack("q", self.map[:8])[0]
        return found

    @done.setter
    def done(self, value: int) -> None:
        self.map[:8] = struct.pack("q", value)

    def is_alive(self) -> bool:
        """Return whether its process runs: it does not while it only waits to be buried."""
        with suppress(OSError), open(f"/proc/{self._process}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] not in b"ZX"
        return False


def _machine() -> str:
    """Return what ranks on one machine have in common."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read()
    return platform.node()


def _file_of(file: str, files: Files) -> _File | None:
    """Return what a URL is called on every rank; None: of a file, or where that is not sure."""
    stamp = files.stamps[file]
    if not isinstance(stamp, UrlStamp) or not (stamp.version or stamp.modified):
        return None
    # Without a version, one date may be that of two files, which what is not shown tells apart.
    version = stamp.version or sha256(getattr(file, "target", file).encode()).hexdigest()
    return str(file), stamp.size, version, stamp.modified


def _span_of(request: Request, files: Files) -> _Span | None:
    """Return which bytes a request needs; None: of a file, or of rows that lie far apart."""
    row, file = request.nbytes // request.rows, _file_of(request.file, files)
    step = request.step if request.rows > 1 else 0
    if file is None or not request.nbytes or step > _LARGEST:
        return None
    return file, request.offset, request.end, step, row, request.dtype.itemsize


def _slots_of(
    everybody: Sequence[Sequence[_Span]], own: Mapping[_Span, Sequence[Request]]
) -> list[_Slot]:
    """Divide what several ranks need to slots, alike on all of them."""
    slots, counts = list[_Slot](), Counter[int]()
    spans = sorted((span, who) for who, some in enumerate(everybody) for span in some)
    readers = defaultdict[_File, set[int]](set)
    for span, who in spans:
        readers[span[0]].add(who)
    for file, of_file in groupby(spans, lambda item: item[0][0]):
        owners = sorted(readers[file])
        slot: _Slot | None = None
        for cluster in _clusters(of_file):
            mine = [request for span, _ in cluster for request in own.get(span, ())]
            takes = dict.fromkeys(mine)
            for start, end in _divided([span for span, _ in cluster]):
                if slot is None or start - slot.end > _NEAR or end - slot.start > _SLOT:
                    owner = owners[len(slots) % len(owners)]
                    slot = _Slot(file, start, end, owner, counts[owner])
                    slots.append(slot)
                    counts[owner] += 1
                slot.end = end
                slot.takes += [(start, end, r) for r in takes if r.offset < end and r.end > start]
    return slots


def _clusters(
    spans: Iterable[tuple[_Span, int]],
) -> Iterator[list[tuple[_Span, int]]]:
    """Yield spans that overlap together, where several ranks need some of the bytes."""
    cluster, end = list[tuple[_Span, int]](), 0
    for item in (*spans, None):
        if item is None or item[0][1] >= end:
            if len({who for _, who in cluster}) > 1 and _divided([span for span, _ in cluster]):
                yield cluster
            cluster, end = [], 0
        if item is not None:
            cluster.append(item)
            end = max(end, item[0][2])


def _divided(spans: Sequence[_Span]) -> list[tuple[int, int]]:
    """Divide what spans are together, but no row and no element of any; none where that fails."""
    start, end = spans[0][1], max(span[2] for span in spans)
    steps = {step for *_, step, _, _ in spans if step}
    step = max(steps, default=16)
    for _, first, _, own, row, itemsize in spans:
        at = (first - start) % (step if own else itemsize)
        if len(steps) > 1 or at + (row if own else 0) > (step if own else 0) or step % itemsize:
            return []
    length = _SLOT // step * step
    return [(at, min(at + length, end)) for at in range(start, end, length)]


def _fetching(file: str, slot: _Slot, own: _Memory) -> Request:
    into = _bytes_of(own, slot)
    return Request(file, slot.start, slot.end - slot.start, into, torch.uint8)


def _bytes_of(memory: _Memory, slot: _Slot) -> torch.Tensor:
    at = _START + slot.number % (2 * _SLOTS) * _SLOT
    return torch.frombuffer(memory.map, dtype=torch.uint8, count=slot.end - slot.start, offset=at)


def _take(memory: torch.Tensor, first: int, start: int, end: int, request: Request) -> int:
    """Copy what a request needs out of a part of its file; return how many bytes.

    Args:
        memory: bytes of the file.
        first: the place of the first of them there.
        start: the first byte of the part.
        end: the first byte behind it.
        request: what is needed.
    """
    row, target = request.nbytes // request.rows, request.destination
    if request.rows == 1:
        start, end = max(start, request.offset), min(end, request.end)
        source, at = memory[start - first : end - first], start - request.offset
        target = target[at // request.dtype.itemsize :][: (end - start) // request.dtype.itemsize]
    else:
        step = request.step
        number = max(0, -(-(start - request.offset) // step))
        stop = min(request.rows, -(-(end - request.offset) // step))
        at = request.offset + number * step - first
        source = memory.as_strided((stop - number, row), (step, 1), memory.storage_offset() + at)
        target = (target if target.dim() > 1 else target.view(request.rows, -1))[number:stop]
    if source.data_ptr() % 16 or source.dim() > 1:
        source = source.clone(memory_format=torch.contiguous_format)
    target.copy_(source.view(request.dtype))
    return source.nbytes

"""Reads byte ranges of files into tensors, with several threads.

This is the one seam between the plan and the bytes. It knows files, ranges, dtypes and tensors,
never models or formats, so that direct I/O or a remote store can replace its inside without a
caller noticing.

Measured on 2 cores, 2.1 GB in the page cache: one thread of `read()` into fresh memory 0.9-1.4 s,
two threads of `preadv` into memory from `torchlift._transfer.pages` 0.14-0.35 s. To an H100 beside
16 cores, 2.1 GB: staged in pageable memory 0.30 s, in 4 pinned pieces of 8 MiB 0.18, in 8 of 4 MiB
0.13; cast on the device instead of the host 0.51 -> 0.20. Copying pinned memory alone takes 0.04.
`torchlift._transfer.pinned` has the measurements of today's 12 pieces.

From a server on the same 2 cores, 2.1 GB of safetensors into new memory, medians of three: 1.42 s;
ranges of http.client into one map 1.33, obstore's copied into one map 2.04 (left where it has put
them 1.2), huggingface_hub's download to a disk and safetensors' load of that 10.9.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter

import torch

from torchlift._store.files import Opened
from torchlift._store.places import in_parallel
from torchlift._store.url import Store, Url
from torchlift._transfer.direct import DEPTH, MOST, OpenFile, OwnStage
from torchlift._transfer.files import Files, Place
from torchlift._transfer.pages import HugePages, allocate
from torchlift._transfer.pinned import COUNT, STAGE, THREADS, Stages, allocate_pinned
from torchlift.errors import IntegrityError
from torchlift.formats.boxes import rows, rows_count, shortest_run
from torchlift.formats.index import TensorEntry

#: Anonymous memory, in bytes, that a transfer may use beyond the destinations themselves.
BUDGET = 64 << 20
#: Bytes per read of what is staged, or of what small tensors are read together. Larger gains
#: nothing on a warm cache; smaller costs calls.
BLOCK = 8 << 20
# Times that of a large tensor at once: setting up fresh memory costs the same for any size.
_WHOLE = 4
_COLD = 16 << 20  # the same, where a disk is what takes long: all threads should end together
_STAGES = 4  # staging buffers of BLOCK bytes each: half the budget, the rest is slack
# Below torch's grain of 32,768 elements a copy is not split over torch's own threads. Every reader
# would start a team of them, and on a busy machine these wait for each other: 2.1 GB cast to
# bfloat16, alternated beside other work, took 1.8 s in the median like this and 4.3 s with them.
_SERIAL = 32_704
#: Anonymous memory, in bytes, that `read` takes at most to stage what is cast or moved.
STAGING = min(_STAGES, THREADS) * BLOCK
#: Bytes of a range of a URL. Of 2.1 GB by HTTP over the loopback 4, 8 and 32 at a time take 1.3 s
#: each: what is far away answers late, and needs more of them.
_RANGE = 8 << 20
#: Bytes of all stages together, when the source is a URL or the target is on a device.
RING = COUNT * STAGE
#: The process in which torch's pool of threads is ready.
_process = os.getpid()
_SOON = 0.02  # seconds until what is still running is ended again
#: Bytes between two ranges of a URL that are here sooner than the answer to another request.
_NEAR = 1 << 20


def read(
    requests: Iterable[Request],
    files: Files,
    *,
    advance: Callable[[int], object] | None = None,
    stages: list[torch.Tensor] | None = None,
) -> int:
    """Execute the requests with parallel positional reads; return the bytes asked for.

    Peak anonymous memory is the destinations plus at most `BUDGET` bytes.

    Args:
        requests: what to read; small neighbours in a file are read together.
        files: the checkpoint's open files.
        advance: called with a number of bytes as they arrive, from the calling thread.
        stages: memory of an earlier call to stage in, to which this one adds what it needs more;
            None: all of it is given back at the end.

    Raises:
        IntegrityError: a read failed, came back short, or the file has changed. Destinations then
            hold undefined bytes.
    """
    todo = sorted(requests, key=lambda request: (request.file, request.offset))
    kinds = {request.destination.device.type for request in todo}
    total = sum(request.nbytes for request in todo)
    away = list[Job]()
    if remote := [request for request in todo if isinstance(request.file, Url)]:
        todo = [request for request in todo if not isinstance(request.file, Url)]
        for direct in True, False:
            away += _ranges_of([each for each in remote if each.direct is direct], direct)
    block, most = BLOCK, min(_STAGES, THREADS)
    if away or kinds - {"cpu"}:
        block, most = STAGE, COUNT
    jobs = [
        job
        for direct in (True, False)
        for job in _jobs_of([request for request in todo if request.direct is direct], block)
    ]
    asked: Counter[str] = Counter()
    for request in todo:
        asked[request.file] += request.nbytes
    own, left = OwnStage(), total

    def report(nbytes: int) -> None:
        """Tell of bytes that were asked for: what is read with them is more than all."""
        nonlocal left
        nbytes = min(nbytes, left)
        left -= nbytes
        if advance is not None:
            advance(nbytes)

    free = [] if stages is None else stages
    with ExitStack() as stack:
        here = {
            file: stack.enter_context(OpenFile(file, files.descriptor(file), nbytes, own))
            for file, nbytes in asked.items()
        }
        warm, cold = _by_place(jobs, here)
        opened: dict[str, OpenFile | Opened] = {**here}
        opened |= {file: files.open(file) for file in {job.file for job in away}}
        depth = DEPTH
        if cold and kinds - {"cpu"}:
            # Each thread that reads past the page cache holds one more stage of its own.
            depth, most = DEPTH // 2, min(most, BUDGET // STAGE - DEPTH // 2)
        # One read alone is not worth setting up memory that CUDA can fetch from by itself.
        fetched = len(warm) + len(cold) + len(away) > 1 and "cuda" in kinds
        while len(free) < min(sum(job.staged for job in (*warm, *cold, *away)), most):
            # Not from the C library, which holds on to some of what is given back.
            host = torch.device("cpu")
            free.append(allocate_pinned(block) if fetched else allocate(block, torch.uint8, host))
        pages = HugePages()
        stores = [job.file.store for job in away if isinstance(job.file, Url)]
        far = min((store.transport.at_once for store in stores), default=1)
        for some, threads in (cold, depth), (warm, THREADS), (away, far):
            if len(some) == 1:  # on this thread: starting others takes longer than reading a little
                (job,) = some
                stage = free[0] if job.staged else None
                _fetch(job, opened[job.file], stage, pages)
                _deliver(job, stage, pages)
                report(job.asked)
            elif some:
                _read_parallel(some, opened, pages, report, Stages(free), threads)
    if urls := sorted({job.file for job in away}):
        in_parallel(urls[0], lambda file: files.open(file).check(), urls)
    return total


def read_values(
    files: Files, file: str, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8
) -> torch.Tensor:
    """Return bytes of a file as a flat tensor: over its map, or those of a URL in memory.

    Raises:
        IntegrityError: the file is not the one that was indexed, or cannot be read.
    """
    if not isinstance(file, Url):
        return files.map(file, offset, nbytes, dtype)
    place = Place(file, offset, nbytes)
    found = files.ahead.pop(place, None)
    return (_in_memory(files, [place])[place] if found is None else found).view(dtype)


def read_ahead(files: Files, places: Iterable[Place]) -> None:
    """Read bytes of URLs in one transfer, before `read_values` is asked for them."""
    files.ahead.update(_in_memory(files, places))


def _in_memory(files: Files, places: Iterable[Place]) -> dict[Place, torch.Tensor]:
    host = torch.device("cpu")
    into = {place: allocate(place[2], torch.uint8, host) for place in places}
    read([Request(*place, memory, torch.uint8) for place, memory in into.items()], files)
    return into


def _by_place(jobs: Iterable[Job], opened: Mapping[str, OpenFile]) -> tuple[list[Job], list[Job]]:
    """Divide jobs into those of the page cache and those that the disk is asked for."""
    warm: list[Job] = []
    cold: list[Job] = []
    for job in jobs:
        # Of what lies between rows nothing is needed, and another rank may need it.
        apart = job.slices[0][2].rows > 1
        is_cold = not apart and opened[job.file].is_cold(job.offset, job.end - job.offset)
        (cold if is_cold else warm).append(job)
    share = sum(job.asked for job in cold) // DEPTH // MOST * MOST
    most = min(max(share, MOST), _COLD)
    return warm, [stage for job in cold for stage in _in_stages(job, most)]


def _read_parallel(
    jobs: Sequence[Job],
    opened: Mapping[str, OpenFile | Opened],
    pages: HugePages,
    report: Callable[[int], object],
    stages: Stages,
    threads: int,
) -> None:
    global _process
    if os.getpid() != _process:
        # In a forked child, the first threads that copy renew torch's pool of threads, all at once:
        # one of them then finds none ("Invalid thread pool!"). This thread renews it before.
        torch.set_num_threads(torch.get_num_threads())
        _process = os.getpid()
    running: dict[Future[None], tuple[Job, torch.Tensor | None]] = {}
    busy = _Busy()
    waiting = iter(jobs)
    following: Job | None = next(waiting, None)
    with ThreadPoolExecutor(min(threads, len(jobs)), "torchlift-read") as pool:
        try:
            while following is not None or running:
                # Readers cast what stays on the host; what goes to a device is sent from here, so
                # that it uses the caller's stream.
                while following is not None and len(running) < 4 * threads:
                    job = following
                    stage = stages.take(wait=not running) if job.staged else None
                    if job.staged and stage is None:
                        break
                    file = opened[job.file]
                    future = pool.submit(_read_one, job, file, stage, pages, busy)
                    running[future] = (job, stage)
                    following = next(waiting, None)
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    job, stage = running.pop(future)
                    future.result()
                    if stage is not None:
                        if not job.on_host:
                            _deliver(job, stage, pages)
                        stages.put_back(stage, job.cuda_devices)
                    report(job.asked)
            stages.wait()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            busy.end({job.file.store for job in jobs if isinstance(job.file, Url)})
            pool.shutdown(wait=True)
            stages.wait()  # the caller frees what devices fetch from, and what they write to
            raise


class _Busy:
    """The jobs that threads are at.

    An interrupt while a thread starts leaves one that its pool does not know of.
    """

    def __init__(self) -> None:
        self._jobs: set[int] = set()
        self._is_over = False

    def end(self, stores: Collection[Store]) -> None:
        """Wait until nothing is read any more, which a silent host does not hold up."""
        self._is_over = True
        while self._jobs:
            for store in stores:  # again and again: a thread may be about to ask
                store.cancel()
            time.sleep(_SOON)

    @contextmanager
    def at(self, job: Job) -> Iterator[bool]:
        """Note a job that a thread is at; yield whether it is still to be done."""
        self._jobs.add(id(job))
        try:
            yield not self._is_over
        finally:
            self._jobs.discard(id(job))


def _read_one(
    job: Job,
    file: OpenFile | Opened,
    stage: torch.Tensor | None,
    pages: HugePages,
    busy: _Busy,
) -> None:
    """One job on a reader thread."""
    with busy.at(job) as needed:
        if needed:
            _fetch(job, file, stage, pages)
            if job.on_host:
                _deliver(job, stage, pages)


def _fetch(job: Job, file: OpenFile | Opened, stage: torch.Tensor | None, pages: HugePages) -> None:
    """Fill the stage, or the destinations of the job's requests, from the file."""
    if not isinstance(file, OpenFile):
        _fetch_range(job, file, stage, pages)
    elif job.cold:
        _fetch_cold(job, file, stage, pages)
    else:
        _fill(job, file, stage, pages)


def _fetch_range(job: Job, file: Opened, stage: torch.Tensor | None, pages: HugePages) -> None:
    """Fetch a range of a URL, with what lies between the slices of it that requests asked for."""
    buffers = [] if stage is None else [_buffer(stage, 0, job.end - job.offset)]
    at = job.offset
    for start, end, request in job.slices if stage is None else ():
        if start > at:
            buffers.append(_NOWHERE[: start - at])
        buffers.append(_buffer(request.destination, start - request.offset, end - start))
        pages.back(request.destination.data_ptr() + start - request.offset, end - start)
        at = end
    _read_run(job, file, buffers, job.offset, job.end)


def _fetch_cold(job: Job, file: OpenFile, stage: torch.Tensor | None, pages: HugePages) -> None:
    """Read a job's range into this thread's own memory, and copy it from there."""
    if len(job.slices) == 1 and job.slices[0][2].direct:
        ((start, end, request),) = job.slices

        address = request.destination.data_ptr() + start - request.offset
        pages.back(address, end - start)
        for first in range(start, end, MOST):
            arrived = _arrived(job, file, first, min(first + MOST, end))
            ctypes.memmove(address + first - start, arrived.data_ptr(), arrived.nbytes)
        return
    arrived = _arrived(job, file, job.offset, job.end)
    if stage is None:
        _deliver(job, arrived, pages)
    else:
        ctypes.memmove(stage.data_ptr(), arrived.data_ptr(), arrived.nbytes)


def _arrived(job: Job, file: OpenFile, start: int, end: int) -> torch.Tensor:
    """Return bytes of a job's range, read into this thread's own memory."""
    nbytes = end - start
    try:
        lead = file.read_direct(start, nbytes)
    except OSError as error:
        raise _failed(job, f"reading failed ({error.strerror})") from error
    if lead is None:
        lead = 0
        _read_run(job, file.descriptor, [_buffer(file.own.memory, 0, nbytes)], start, end)
        file.forget(start, nbytes)
    return file.own.memory[lead : lead + nbytes]


def _fill(job: Job, file: OpenFile, stage: torch.Tensor | None, pages: HugePages) -> None:
    if len(job.slices) == 1:
        ((start, end, request),) = job.slices
        within, target = start - request.offset, request.destination
        if stage is None and target.dim() > 1:
            apart = target.stride(0) * target.itemsize
            whole_span = _buffer(target, 0, (request.rows - 1) * apart + target[0].nbytes)
            _read_rows(job, file, whole_span, 0, apart)
        elif stage is None:
            pages.back(target.data_ptr() + within, end - start)
            _read_rows(job, file, _buffer(target, within, end - start), within)
        else:
            _read_rows(job, file, _buffer(stage, 0, end - start), within)
        return
    buffers: list[memoryview] = []
    first = at = job.offset
    for start, end, request in job.slices:
        if _is_far(start - at, end - start):
            _read_run(job, file.descriptor, buffers, first, at)
            buffers, first, at = [], start, start
        if stage is not None:
            buffers = [_buffer(stage, first - job.offset, end - first)]
        else:
            if start > at:
                buffers.append(memoryview(bytearray(start - at)))
            buffers.append(_buffer(request.destination, start - request.offset, end - start))
        at = end
    _read_run(job, file.descriptor, buffers, first, at)


def _read_rows(
    job: Job, file: OpenFile, buffer: memoryview, first: int, apart: int | None = None
) -> None:
    """Fill the buffer with the bytes of the job's only request, from number `first` on.

    A request for each row takes longer than its bytes: 235 MB on each of 2 ranks, rows of 28 KiB,
    0.19 s like that, and 0.086 s like this, which is what whole rows take. So does a call for each
    where little lies between them: of 256 MiB, every second 4 KiB 44 ms one by one, 31 in few calls
    that read that, too. Short rows are copied out of a map, where there can be one.

    Args:
        job: what is read.
        file: its file.
        buffer: receives them.
        first: the first byte of those that the request asks for.
        apart: bytes from row to row in the buffer, which is then for all of them; None: no gaps.
    """
    request = job.slices[0][2]
    row, step = request.nbytes // request.rows, request.step
    gap = step - row
    together = _MAX_BUFFERS // 2 if 0 <= gap <= _MAX_THROUGH else 1
    between = memoryview(bytearray(gap if together > 1 else 0))
    at_once = _MAPPED // step if row < _SHORT and row < step <= _CLOSE else 1
    number, within = divmod(first, row)
    at, apart = 0, apart or row
    while at < len(buffer):
        start = request.offset + number * step + within
        many = 1 if within else max(1, (len(buffer) - at + apart - row) // apart)
        mapped = None
        if many > 1 and at_once > 1:
            mapped = file.mapped(start, (min(many, at_once) - 1) * step + row)
        if mapped is not None:
            many = min(many, at_once)
            into = torch.frombuffer(buffer, dtype=torch.uint8, offset=at)
            _copy_rows(mapped.as_strided((many, row), (step, 1)), into, apart)
        else:
            many = min(many, together)
            buffers = [between] * (2 * many - 1)
            ends = range(at, at + many * apart, apart)
            buffers[::2] = [buffer[place : place + row - within] for place in ends]
            end = start + (many - 1) * step + len(buffers[-1])
            _read_run(job, file.descriptor, buffers, start, end)
        at, number, within = at + many * apart - within, number + many, 0


def _copy_rows(source: torch.Tensor, target: torch.Tensor, apart: int) -> None:
    """Copy rows of bytes, some distance apart in the target, as the longest numbers that fit."""
    target = target.as_strided(source.shape, (apart, 1))
    places = (source.data_ptr(), target.data_ptr(), source.storage_offset())
    size = math.gcd(8, source.shape[1], source.stride(0), target.stride(0), *places)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    source, target = source.view(kind), target.view(kind)
    # In the processor's cache 35 GB/s, and 14 as bytes: where torch has several threads, only a
    # copy of few numbers stays on this one.
    most = max(1, _SERIAL // source.shape[1]) if torch.get_num_threads() > 1 else len(source)
    for at in range(0, len(source), most):
        target[at : at + most].copy_(source[at : at + most])


def _read_run(
    job: Job, file: int | Opened, buffers: list[memoryview], start: int, end: int
) -> None:
    """Read one contiguous range into the buffers."""
    while start < end:
        got = _read_some(job, file, buffers, start)
        start += got
        if start == end:  # most often: to take 500 out of a list takes as long as to read them
            break
        while buffers and got >= len(buffers[0]):
            got -= len(buffers.pop(0))
        if got:
            buffers[0] = buffers[0][got:]


def _read_some(job: Job, file: int | Opened, buffers: list[memoryview], start: int) -> int:
    """Read what one call reads, at least a byte; returns how many."""
    if not isinstance(file, int):
        return file.read_into(buffers, start)
    try:
        got = os.preadv(file, buffers, start)
    except OSError as error:
        raise _failed(job, f"reading failed ({error.strerror})") from error
    if got == 0:
        raise _failed(job, "the file ends early", found=f"end at byte {start}")
    return got


def _deliver(job: Job, stage: torch.Tensor | None, pages: HugePages) -> None:
    """Cast and copy what was staged."""
    if stage is None:
        return
    for start, end, request in job.slices:
        if request.rows > 1 and isinstance(job.file, Url):
            _spread(stage, request)
            continue
        source = stage[start - job.offset : end - job.offset]
        first = (start - request.offset) // request.dtype.itemsize
        target = request.destination
        if target.dim() == 1:
            target = target[first:][: source.nbytes // request.dtype.itemsize]
        if request.direct:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
            continue
        if source.storage_offset() % request.dtype.itemsize:
            source = source.clone()
        source = source.view(request.dtype).view(target.shape)
        if target.device.type == "cuda" and source.is_pinned():
            if source.dtype != target.dtype:
                # torch would cast on the host, on this thread, into memory that is not pinned: as
                # it does where the device has no room left, in the middle of a live model, too.
                with suppress(torch.OutOfMemoryError):
                    landing = torch.empty_like(target, dtype=source.dtype)
                    source = landing.copy_(source, non_blocking=True)
            target.copy_(source, non_blocking=True)
        elif target.device.type != "cpu":
            target.copy_(source)
        elif target.dim() > 1:
            for row, into in zip(source, target, strict=True):
                _copy_serially(row, into)
        else:
            pages.back(target.data_ptr(), target.nbytes)
            _copy_serially(source, target)


def _spread(stage: torch.Tensor, request: Request) -> None:
    """Cast and copy rows out of a stage that also has what lies between them."""
    rows, row = request.rows, request.nbytes // request.rows
    source = stage.as_strided((rows, row), (request.step, 1)).view(request.dtype)
    target = request.destination.view(rows, -1) if request.destination.dim() == 1 else None
    target = request.destination if target is None else target
    some = max(1, _SERIAL // source.shape[1]) if target.device.type == "cpu" else rows
    for at in range(0, rows, some):
        _copy(source[at : at + some], target[at : at + some])


def _copy_serially(source: torch.Tensor, target: torch.Tensor) -> None:
    for at in range(0, len(source), _SERIAL):
        _copy(source[at : at + _SERIAL], target[at : at + _SERIAL])


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if target.data_ptr() % target.itemsize == 0:
        target.copy_(source)
    else:
        # A caller's own memory. torch crashes on it: its complex128 wants multiples of 16.
        aligned = source.to(target.dtype)
        ctypes.memmove(target.data_ptr(), aligned.data_ptr(), aligned.nbytes)


def _failed(job: Job, reason: str, found: str | None = None) -> IntegrityError:
    return IntegrityError(
        reason,
        file=job.file,
        expected=f"bytes {job.offset} to {job.end}",
        found=found,
        hint="Check the disk and that nobody writes to the file, then load again.",
    )


def _buffer(tensor: torch.Tensor, start: int, length: int) -> memoryview:
    # The buffer protocol over a tensor without NumPy. The caller keeps the tensor alive.
    return memoryview((ctypes.c_char * length).from_address(tensor.data_ptr() + start)).cast("B")


#: Where bytes of a URL go that lie between others; whatever threads write there at a time.
_NOWHERE = memoryview(bytearray(_NEAR))
_MAX_BUFFERS = 512  # below the kernel's limit of 1024 buffers in one preadv
_WORTH_A_REQUEST = 4096  # bytes
_MAX_GAP = 4096  # padding between two small tensors that is cheaper to read than to skip
#: What lies between the rows of one request up to which they are read in one call: it is copied to
#: nowhere in the time of a call, which Python takes 0.7 us for.
_MAX_THROUGH = 12 << 10
#: Shorter rows, at most so far apart, are copied out of a map instead of being read. Of 1.05 GiB
#: under `dcp.load`, a half of each row by each of 2 ranks: 109 to 128 ms, 145 to 151 where what
#: lies between the rows was read, too; a quarter by each of 4: 163 to 256, and 275 to 314; whole
#: rows 80 to 88, and 102 to 149. That is where the page cache has the file in huge pages. In small
#: ones a half took 402 ms in place of 340, a quarter as long in either way; and rows of 16 KiB,
#: which calls of their own read in 104, 310 in a loop in C.
_SHORT, _CLOSE = 8 << 10, 64 << 10
_MAPPED = 32 << 20  # bytes of one map, which what lies between the rows is a share of
_MAX_WASTE = 0.01  # but no more of what is asked for than this, once it is more than a header


@dataclass(frozen=True, slots=True)
class Request:
    """One byte range of a file, or several of one length, and the tensor that receives them.

    Attributes:
        file: absolute path.
        offset: first byte in the file.
        nbytes: bytes to read, of all rows together; a row is a multiple of `dtype`'s item size.
        destination: one-dimensional contiguous tensor of ``nbytes / itemsize`` elements, on any
            device; or a two-dimensional one of the rows, which may lie apart. A dtype that differs
            from `dtype` asks for a cast on the way.
        dtype: what the bytes in the file are.
        rows: into how many ranges of one length the bytes are divided.
        step: bytes in the file from the start of one row to the start of the next.
    """

    file: str
    offset: int
    nbytes: int
    destination: torch.Tensor
    dtype: torch.dtype
    rows: int = 1
    step: int = 0

    @property
    def end(self) -> int:
        """The first byte behind it in the file."""
        return self.offset + (self.rows - 1) * self.step + self.nbytes // self.rows

    @property
    def direct(self) -> bool:
        """Whether the file's bytes can land in the destination's memory as they are."""
        return self.destination.dtype == self.dtype and self.destination.device.type == "cpu"


@dataclass(slots=True)
class Job:
    """One contiguous range of a file and the slices of requests that it serves."""

    file: str
    offset: int
    staged: bool
    end: int
    #: (start in the file, end in the file, request); the end as if its rows followed each other
    slices: list[tuple[int, int, Request]] = field(default_factory=list)
    #: whether a thread reads it into memory of its own
    cold: bool = False

    @property
    def asked(self) -> int:
        """Bytes that the requests asked for; padding between them does not count."""
        return sum(end - start for start, end, _ in self.slices)

    @property
    def cuda_devices(self) -> set[torch.device]:
        """Those that something goes to."""
        devices = {request.destination.device for *_, request in self.slices}
        return {device for device in devices if device.type == "cuda"}

    @property
    def on_host(self) -> bool:
        """Whether everything goes to the CPU's memory."""
        return all(request.destination.device.type == "cpu" for *_, request in self.slices)


def _jobs_of(requests: Iterable[Request], block: int) -> Iterator[Job]:
    """Divide and join requests to what is worth one read: in file order, all direct or none."""
    job: Job | None = None
    for request in requests:
        if not request.nbytes:
            continue
        stop = request.offset + request.nbytes
        if job is not None and (request.rows > 1 or not _joins(job, request, block)):
            yield job
            job = None
        if request.rows > 1:
            yield from _jobs_of_rows(request, block)
        elif job is None and request.nbytes > block:
            step = _WHOLE * block if request.direct else block
            for start in range(request.offset, stop, step):
                end = min(start + step, stop)
                yield Job(request.file, start, not request.direct, end, [(start, end, request)])
        else:
            if job is None:
                job = Job(request.file, request.offset, not request.direct, request.offset)
            job.slices.append((request.offset, stop, request))
            job.end = stop
    if job is not None:
        yield job


def count_ranges(wanted: Iterable[tuple[TensorEntry, bool]]) -> int:
    """Return how many ranges of URLs `read` asks for, given entries and whether they are `direct`.

    What is no run of numbers, such as quantised blocks, is read whole.
    """
    requests: dict[bool, list[Request]] = {True: [], False: []}
    for entry, direct in wanted:
        if is_readable(entry):
            nowhere = torch.empty(entry.shape, dtype=torch.uint8, device="meta")
            requests[direct] += requests_for(entry, nowhere, getattr(torch, entry.dtype))
        else:
            places = ((each.file, each.offset, each.nbytes) for each in entry.chunks)
            nowhere = torch.empty(0, dtype=torch.uint8, device="meta")
            requests[True] += [Request(*place, nowhere, torch.uint8) for place in places]
    return sum(1 for direct, some in requests.items() for _ in _ranges_of(some, direct))


def _ranges_of(requests: Iterable[Request], direct: bool) -> Iterator[Job]:
    """Divide and join requests to ranges of URLs that are worth an answer each."""
    job: Job | None = None
    most = _RANGE if direct else STAGE
    todo = sorted(requests, key=attrgetter("file", "offset"))
    for request in (one for whole in todo for one in _near(whole)):
        if request.rows > 1:
            slices = [(request.offset, request.offset + request.nbytes, request)]
            yield Job(request.file, request.offset, True, request.end, slices)
            continue
        start, stop = request.offset, request.end
        while start < stop:
            end = start
            if job is not None and job.file == request.file and 0 <= start - job.end <= _NEAR:
                end = min(stop, job.offset + most)
                end -= (end - request.offset) % request.dtype.itemsize
            if job is None or end <= start or len(job.slices) == _MAX_BUFFERS:
                if job is not None:
                    yield job
                job, end = Job(request.file, start, not direct, start), min(stop, start + most)
            job.slices.append((start, end, request))
            job.end = start = end
    if job is not None:
        yield job


def _near(request: Request) -> Iterator[Request]:
    """Divide the rows of a request to those that one stage holds, with what lies between them."""
    row = request.nbytes // request.rows
    if request.rows == 1:
        yield request
    elif row + request.step > STAGE or request.step - row > _NEAR:
        yield from _in_rows(request, 1)
    else:
        yield from _in_rows(request, 1 + (STAGE - row) // request.step)


def _jobs_of_rows(request: Request, block: int) -> Iterator[Job]:
    """Make jobs of as many rows as are worth one read, or of slices of a long row."""
    row = request.nbytes // request.rows
    for some in _in_rows(request, max(1, block // row)):
        if some.rows == 1:
            yield from _jobs_of([some], block)
        else:
            start, stop = some.offset, some.offset + some.nbytes
            yield Job(request.file, start, not request.direct, some.end, [(start, stop, some)])


def _in_rows(request: Request, together: int) -> Iterator[Request]:
    """Divide a request to some of its rows each."""
    row, size = request.nbytes // request.rows, request.dtype.itemsize
    for first in range(0, request.rows, together):
        rows = min(together, request.rows - first)
        start, nbytes = request.offset + first * request.step, rows * row
        target = request.destination
        if target.dim() > 1:
            target = target[first : first + rows] if rows > 1 else target[first]
        else:
            target = target[first * row // size :][: nbytes // size]
        yield replace(request, offset=start, nbytes=nbytes, destination=target, rows=rows)


def _in_stages(job: Job, most: int) -> Iterator[Job]:
    """Make jobs of what the disk is asked for, each of which a thread's own memory holds.

    What goes to one place as it is, a thread reads in parts: `most` bytes of it.
    """
    one: Job | None = None
    if len(job.slices) > 1 or job.staged:
        most = MOST
    for first, stop, request in job.slices:
        for start in range(first, stop, most):
            end = min(start + most, stop)
            if one is None or end - one.offset > most or _is_far(start - one.end, end - start):
                if one is not None:
                    yield one
                one = Job(job.file, start, not job.on_host, end, cold=True)
            one.slices.append((start, end, request))
            one.end = end
    if one is not None:
        yield one


def _joins(job: Job, request: Request, block: int) -> bool:
    return (
        request.file == job.file
        and request.offset >= job.end
        and request.offset + request.nbytes - job.offset <= block
        and len(job.slices) < _MAX_BUFFERS
        # A staged slice is viewed as its dtype, which needs its place in the buffer aligned.
        and (request.direct or (request.offset - job.offset) % request.dtype.itemsize == 0)
    )


def _is_far(gap: int, nbytes: int) -> bool:
    """Whether to skip the bytes before a range of `nbytes` instead of reading them too."""
    # The rows of a shard that is sliced along an inner dimension lie as far apart as they are long.
    return gap > min(_MAX_GAP, 256 + nbytes * _MAX_WASTE)


#: Shorter runs, in bytes, are copied as the numbers that they are, in whatever order suits torch.
SMALL_RUN = 64


def is_readable(entry: TensorEntry, stride: Sequence[int] | None = None) -> bool:
    """Whether a tensor's runs of bytes are its values, and few or long enough to be read.

    Args:
        entry: the tensor.
        stride: as in `rows`.
    """
    if entry.kind is not None or entry.encoding:
        return False
    # There is no map of a URL, and its rows come with what lies between them.
    is_away = bool(entry.chunks) and isinstance(entry.chunks[0].file, Url)
    return (
        (is_away or shortest_run(entry, stride) >= min(SMALL_RUN, entry.nbytes or 1))
        # Of many dimensions, each with a request: one takes 10 us, as long as to copy 100 KB.
        and rows_count(entry, stride) <= len(entry.chunks) + entry.nbytes // _WORTH_A_REQUEST
    )


def requests_for(entry: TensorEntry, target: torch.Tensor, dtype: torch.dtype) -> Iterator[Request]:
    """Yield a request for each run of bytes, or for all rows of a matrix that are sliced alike.

    Args:
        entry: what to read.
        target: receives it; of its shape, with any strides, on any device.
        dtype: what the bytes in the file are.

    Example:
        >>> from torchlift.formats.index import Chunk
        >>> half = Chunk("f", 8, 12, (0, 0), (2, 1), (2, 1))
        >>> entry = TensorEntry("w", "float32", (2, 1), (1, 1), 8, "cpu", "", (half,))
        >>> found = requests_for(entry, torch.empty(2, 1), torch.float32)
        >>> [(request.offset, request.rows, request.step) for request in found]
        [(8, 2, 8)]
    """
    start = target.storage_offset()
    for (file, offset, at, numel), many, step, apart in rows(entry, target.stride()):
        if apart == numel or many == 1:
            place = target.as_strided((numel * many,), (1,), start + at)
        else:
            place = target.as_strided((many, numel), (apart, 1), start + at)
        nbytes = numel * many * entry.itemsize
        yield Request(file, offset, nbytes, place, dtype, many, step)

"""Read byte ranges of files and URLs into tensors, with several threads.

The plan says which bytes go where, and this file moves them. It knows files, ranges, dtypes and
tensors, but no models or formats. Other ways to read can replace its inside without a change of
its callers.

Measured for 2.1 GB in the page cache on 2 cores: one thread of `read()` into new memory took 0.9 to
1.4 s, and two threads of `preadv` into memory from `torchlift._transfer.pages` took 0.14 to 0.35 s.

To an H100 with 16 cores, 2.1 GB took 0.30 s through pageable stages, 0.18 s through 4 pinned pieces
of 8 MiB, and 0.13 s through 8 pieces of 4 MiB. A cast on the device instead of the host took 0.20 s
instead of 0.51 s. The copy of pinned memory alone takes 0.04 s. `torchlift._transfer.pinned` has
the measurements of today's 12 pieces.

From a server on the same 2 cores, 2.1 GB of safetensors into new memory took 1.42 s (medians of
three). Ranges of http.client into one map took 1.33 s, and ranges of obstore copied into one map
2.04 s (1.2 s without the copy). A download by huggingface_hub, and a load by safetensors after it,
took 10.9 s.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch

from torchlift._store.files import Opened, read_error
from torchlift._store.places import in_parallel
from torchlift._store.url import Store, Url
from torchlift._transfer.direct import DEPTH, MOST, OpenFile, borrowed, buffer
from torchlift._transfer.files import MOST_OPEN, Files, Place
from torchlift._transfer.pages import HUGE_PAGE, HugePages, allocate
from torchlift._transfer.pinned import COUNT, STAGE, THREADS, Stages, allocate_pinned
from torchlift.errors import CheckpointError, IntegrityError
from torchlift.formats.boxes import rows, runs_of
from torchlift.formats.index import TensorEntry

#: Bytes of anonymous memory that a transfer may use in addition to the destinations.
BUDGET = 64 << 20
#: Bytes of one read of values that are cast or moved. Larger reads gain nothing from a warm cache.
_STAGED = MOST
#: Bytes of one read straight into the destinations, at most, so that all threads end together. It
#: is a multiple of a huge page, because a page that two reads share does not become a huge one.
_DIRECT = 16 << 20
_STAGES = 4  # stages for casts of local files. Threads that read past the page cache need the rest.
# Torch splits a copy of more than 32,768 elements over threads of its own. Each reader would start
# a team of them, which wait for each other on a busy machine. 2.1 GB cast to bfloat16, alternated
# with other work, took 1.8 s (median) in copies of this size, and 4.3 s in larger copies.
_SERIAL = 32_704
#: Bytes of anonymous memory that `read` uses at most to stage values that are cast.
STAGING = min(_STAGES, THREADS) * STAGE
#: Bytes in one range of a URL. 2.1 GB by HTTP over the loopback took 1.3 s with 4, 8 and 32 ranges
#: in parallel. A server that is far away answers late, and needs more of them.
_RANGE = 8 << 20
#: Bytes of all stages together if the source is a URL or the target is on a device.
RING = COUNT * STAGE
#: The process in which torch's pool of threads is ready.
_process = os.getpid()
_SOON = 0.02  # seconds until running reads are cancelled again
#: Bytes between two ranges of one job. In a URL they arrive sooner than the answer to another
#: request. In a file, the bytes between two runs of slices are skipped. See `_is_far`.
_NEAR = 1 << 20


class _Transfer(NamedTuple):
    """The tools of all jobs of one `read`.

    Attributes:
        opened: File -> the open file or URL.
        ring: Stages for values that are cast or moved.
        own: Free stages of threads that read past the page cache.
        pages: Backs the destinations with huge pages.
        report: Called with the number of bytes of each job that is done.
    """

    opened: Mapping[str, OpenFile | Opened]
    ring: Stages
    own: list[torch.Tensor]
    pages: HugePages
    report: Callable[[int], object]


def read(
    requests: Iterable[Request],
    files: Files,
    *,
    advance: Callable[[int], object] | None = None,
    stages: list[torch.Tensor] | None = None,
) -> int:
    """Read all requests in parallel. Return the number of bytes requested.

    The anonymous memory is the destinations plus at most `BUDGET` bytes.

    Args:
        requests: The ranges to read. Small neighbours in a file are read together.
        files: The open files of the checkpoint.
        advance: Called with a number of bytes as they arrive, from the calling thread.
        stages: Stages of an earlier call, for reuse. New stages are added to the list. None frees
            all stages at the end.

    Raises:
        IntegrityError: If a read failed or was too short, or if the file changed. The destinations
            then hold undefined bytes.
    """
    wanted = list(requests)
    left = total = sum(request.nbytes for request in wanted)
    free, own, pages = [] if stages is None else stages, list[torch.Tensor](), HugePages()

    def report(nbytes: int) -> None:
        """Report bytes that were requested, but not those that were read between them."""
        nonlocal left
        nbytes = min(nbytes, left)
        left -= nbytes
        if advance is not None:
            advance(nbytes)

    for some in _split_by_files(wanted):
        _read_files(some, files, free, own, pages, report)
    return total


def _split_by_files(requests: Sequence[Request]) -> Iterator[list[Request]]:
    """Split requests so that each part needs at most `MOST_OPEN` files of this machine."""
    by_file: dict[str, list[Request]] = {}
    for request in requests:
        is_local = request.memory is None and not isinstance(request.file, Url)
        by_file.setdefault(request.file if is_local else "", []).append(request)
    names = sorted(by_file)
    for first in range(0, len(names), MOST_OPEN):
        yield [each for name in names[first : first + MOST_OPEN] for each in by_file[name]]


def _read_files(
    wanted: Sequence[Request],
    files: Files,
    free: list[torch.Tensor],
    own: list[torch.Tensor],
    pages: HugePages,
    report: Callable[[int], object],
) -> None:
    """Read requests whose files may all be open at once. The arguments are those of `_Transfer`."""
    jobs = [
        job
        for direct in (True, False)
        for job in _make_jobs([each for each in wanted if each.direct is direct], direct)
    ]
    in_memory = [job for job in jobs if job.memory is not None]
    away = [job for job in jobs if isinstance(job.file, Url)]
    here = [job for job in jobs if job.memory is None and not isinstance(job.file, Url)]
    requested: Counter[str] = Counter()
    for job in here:
        requested[job.file] += job.nbytes
    with ExitStack() as stack:
        kept = [files.open(file) for file in requested]  # other threads open files, too
        local = {
            file: stack.enter_context(OpenFile(file, files.descriptor(file), nbytes))
            for file, nbytes in requested.items()
        }
        for job in here:
            # A direct read of rows would read all bytes between them too, perhaps on each rank.
            job.is_cold = job.slices[0].request.rows == 1 and local[job.file].is_cold(
                job.offset, job.end - job.offset
            )
        cold = [job for job in here if job.is_cold]
        staged = [job for job in jobs if job.needs_stage]
        is_sent = any(not job.on_host for job in staged)
        most = COUNT if away or is_sent else min(_STAGES, THREADS)
        # Each thread that reads past the page cache has one more stage. Stay in the budget.
        depth = DEPTH // 2 if cold and is_sent else DEPTH
        most = min(len(staged), most, BUDGET // STAGE - depth if cold else most)
        # Pinned memory takes long to set up: it does not pay for a single read.
        is_pinned = len(jobs) > 1 and any(job.cuda_devices for job in staged)
        while len(free) < most:
            # Not by malloc, which can keep freed memory.
            host = torch.device("cpu")
            free.append(allocate_pinned(STAGE) if is_pinned else allocate(STAGE, torch.uint8, host))
        ring = Stages(free)
        stack.callback(ring.wait)  # the caller frees memory that devices still read or write
        opened: dict[str, OpenFile | Opened] = {**local}
        opened |= {job.file: files.open(job.file) for job in away}
        transfer = _Transfer(opened, ring, own, pages, report)
        stores = [job.file.store for job in away if isinstance(job.file, Url)]
        far = min((store.transport.at_once for store in stores), default=1)
        _run_all(cold, depth, transfer)
        # Threads that wait for a network are more than the cores.
        warm = DEPTH if any(file.is_far for file in local.values()) else THREADS
        _run_all([job for job in here if not job.is_cold], warm, transfer)
        _run_all(away, far, transfer)
        _run_all(in_memory, THREADS, transfer)
        for each in kept:
            files.stamps[each.place].check(each.place, each.descriptor)
    if urls := sorted({job.file for job in away}):
        in_parallel(urls[0], lambda file: files.open(file).check(), urls)


def read_values(files: Files, file: str, offset: int, nbytes: int) -> torch.Tensor:
    """Return bytes as a flat tensor: over the map of a file, or in memory for a URL.

    Raises:
        IntegrityError: If the file changed or cannot be read.
    """
    if not isinstance(file, Url):
        return files.map(file, offset, nbytes)
    place = Place(file, offset, nbytes)
    found = files.ahead.pop(place, None)
    return _read_places(files, [place])[place] if found is None else found


def read_ahead(files: Files, places: Iterable[Place]) -> None:
    """Read bytes of URLs in one transfer, for later calls of `read_values`."""
    files.ahead.update(_read_places(files, places))


def _read_places(files: Files, places: Iterable[Place]) -> dict[Place, torch.Tensor]:
    host = torch.device("cpu")
    into = {place: allocate(place.nbytes, torch.uint8, host) for place in places}
    read([Request(*place, memory, torch.uint8) for place, memory in into.items()], files)
    return into


def _run_all(jobs: Sequence[Job], threads: int, transfer: _Transfer) -> None:
    if len(jobs) == 1:  # on this thread, because a thread takes longer than a small read
        (job,) = jobs
        stage = transfer.ring.take(wait=True) if job.needs_stage else None
        _fetch(job, stage, transfer)
        _finish(job, stage, transfer)
    elif jobs:
        _run_parallel(jobs, threads, transfer)


def _run_parallel(jobs: Sequence[Job], threads: int, transfer: _Transfer) -> None:
    global _process
    if os.getpid() != _process:
        # In a forked child, the first copies on several threads renew torch's pool of threads at
        # once, and one of them fails ("Invalid thread pool!"). Renew the pool here, on one thread.
        torch.set_num_threads(torch.get_num_threads())
        _process = os.getpid()
    running: dict[Future[None], tuple[Job, torch.Tensor | None]] = {}
    tracker, waiting = _Tracker(), deque(jobs)
    with ThreadPoolExecutor(min(threads, len(jobs)), "torchlift-read") as pool:
        try:
            while waiting or running:
                while waiting and len(running) < 4 * threads:
                    stage = None
                    if waiting[0].needs_stage:
                        stage = transfer.ring.take(wait=not running)
                        if stage is None:
                            break
                    job = waiting.popleft()
                    running[pool.submit(tracker.run, job, stage, transfer)] = (job, stage)
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    job, stage = running.pop(future)
                    future.result()
                    _finish(job, stage, transfer)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            tracker.stop({job.file.store for job in jobs if isinstance(job.file, Url)})
            pool.shutdown(wait=True)
            raise


class _Tracker:
    """The jobs that threads run.

    `ThreadPoolExecutor.shutdown` is not enough: an interrupt while a thread starts leaves a thread
    that its pool does not know.
    """

    def __init__(self) -> None:
        self._jobs: set[int] = set()
        self._is_stopped = False

    def stop(self, stores: Collection[Store]) -> None:
        """Cancel the reads of URLs, and wait until no job runs."""
        self._is_stopped = True
        while self._jobs:
            for store in stores:  # in each round, because a thread may start one more request
                store.cancel()
            time.sleep(_SOON)

    def run(self, job: Job, stage: torch.Tensor | None, transfer: _Transfer) -> None:
        """Run one job on a reader thread, unless the jobs are stopped."""
        self._jobs.add(id(job))
        try:
            if not self._is_stopped:
                _fetch(job, stage, transfer)
        finally:
            self._jobs.discard(id(job))


def _finish(job: Job, stage: torch.Tensor | None, transfer: _Transfer) -> None:
    """Send the values of a job to devices, on the calling thread, so that its stream is used."""
    if stage is not None:
        if not job.on_host:
            _deliver(job, job.slices, stage, job.offset, transfer.pages)
        transfer.ring.put_back(stage, job.cuda_devices)
    transfer.report(job.nbytes)


def _fetch(job: Job, stage: torch.Tensor | None, transfer: _Transfer) -> None:
    """Read a job into the stage, or into its destinations if the stage is None.

    Values for a device stay in the stage. Readers cast values that stay on the host.
    """
    if job.memory is not None:
        assert stage is not None  # its destination is on a device
        ctypes.memmove(stage.data_ptr(), job.memory.data_ptr() + job.offset, job.nbytes)
        return
    file, pages = transfer.opened[job.file], transfer.pages
    is_here, is_rows = isinstance(file, OpenFile), job.slices[0].request.rows > 1
    if stage is None and (job.is_cold or is_rows or not is_here):
        for part in filter(_is_large, job.slices):
            into = part.request.destination
            pages.back(into.data_ptr() + part.start - part.request.offset, part.nbytes)
    if job.is_cold and isinstance(file, OpenFile):
        _fetch_cold(job, file, stage, transfer)
        return
    if isinstance(file, OpenFile) and is_rows:
        _fetch_rows(job, file, stage)
    else:
        for run in _split_at_gaps(job):
            start, stop = run[0].start, run[-1].end
            if stage is not None:
                buffers = [buffer(stage.data_ptr() + start - job.offset, stop - start)]
                _read_run(job, file, buffers, start, stop)
            elif isinstance(file, OpenFile):
                _read_direct(job, file, run, pages)
            else:
                _read_run(job, file, _destinations(run), start, stop)
    if stage is not None and job.on_host:
        _deliver(job, job.slices, stage, job.offset, pages)


def _split_at_gaps(job: Job) -> Iterator[list[Slice]]:
    """Split a job into runs of slices, between which to skip the gap is faster than to read it."""
    if isinstance(job.file, Url):  # to skip a gap would take another request
        yield job.slices
        return
    run: list[Slice] = []
    for part in job.slices:
        if run and _is_far(part.start - run[-1].end, part.end - part.start):
            yield run
            run = []
        run.append(part)
    yield run


def _is_large(part: Slice) -> bool:
    """Return whether a part is worth pages of its own. No other bytes are read into its memory."""
    into = part.request.destination
    return part.request.direct and part.nbytes >= HUGE_PAGE and into.is_contiguous()


def _read_direct(job: Job, file: OpenFile, run: Sequence[Slice], pages: HugePages) -> None:
    """Read a run into its destinations. Large slices are prepared, and perhaps filled, by `pages`.

    A slice that is filled is copied once, out of a map of the file.
    """
    for is_large, parts in groupby(run, _is_large):
        if not is_large:
            small = list(parts)
            _read_run(job, file, _destinations(small), small[0].start, small[-1].end)
            continue
        for start, end, request in parts:
            into, at = request.destination, request.offset
            for first, last in pages.fill(into, start - at, end - at, file.map, start):
                room = buffer(into.data_ptr() + first, last - first)
                _read_run(job, file, [room], at + first, at + last)


def _destinations(run: Sequence[Slice]) -> list[memoryview]:
    """Return the memory that receives a run, with a place for the bytes between its slices."""
    buffers, at = list[memoryview](), run[0].start
    for start, end, request in run:
        if start > at:
            buffers.append(_NOWHERE[: start - at])
        address = request.destination.data_ptr() + start - request.offset
        buffers.append(buffer(address, end - start))
        at = end
    return buffers


def _fetch_cold(job: Job, file: OpenFile, stage: torch.Tensor | None, transfer: _Transfer) -> None:
    """Read a job past the page cache into a stage of this thread, and copy it from there."""
    with borrowed(transfer.own) as own:
        for run in _split_at_gaps(job):
            for start in range(run[0].start, run[-1].end, MOST):
                end = min(start + MOST, run[-1].end)
                values = _read_cold(job, file, own, start, end)
                if stage is None:
                    _deliver(job, run, values, start, transfer.pages)
                else:
                    address = stage.data_ptr() + start - job.offset
                    ctypes.memmove(address, values.data_ptr(), values.nbytes)


def _read_cold(job: Job, file: OpenFile, own: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Read a range into a stage, and return that part of the stage."""
    nbytes = end - start
    try:
        lead = file.read_direct(own, start, nbytes)
    except OSError as error:
        raise _system_error(job, error) from error
    if lead is None:
        lead = 0
        _read_run(job, file, [buffer(own.data_ptr(), nbytes)], start, end)
    return own[lead : lead + nbytes]


def _fetch_rows(job: Job, file: OpenFile, stage: torch.Tensor | None) -> None:
    """Read the rows of a job's only request, without the bytes between them.

    Rows in a stage follow each other. A system call for each short row takes longer than its bytes,
    so close rows are copied out of a map. Others are read one by one, and so are close rows that
    cannot be mapped, as on a network file system.
    """
    request = job.slices[0].request
    count, row, target, apart = request.rows, request.row, request.destination, request.row
    if stage is not None:
        target = stage
    elif target.dim() > 1:
        apart = target.stride(0) * target.itemsize
    span = file.map(job.offset, job.end - job.offset) if request.is_mappable else None
    if span is not None:
        area = buffer(target.data_ptr(), (count - 1) * apart + row)
        received = torch.frombuffer(area, dtype=torch.uint8).as_strided((count, row), (apart, 1))
        _copy_bytes(span.as_strided((count, row), (request.step, 1)), received)
        return
    for number in range(count):
        start = request.offset + number * request.step
        _read_run(job, file, [buffer(target.data_ptr() + number * apart, row)], start, start + row)


def _copy_bytes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy rows of bytes, as the longest numbers that fit.

    In the processor's cache this reaches 35 GB/s, and 14 GB/s as bytes.
    """
    places = (source.data_ptr(), target.data_ptr(), source.storage_offset())
    size = math.gcd(8, source.shape[1], source.stride(0), target.stride(0), *places)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    _copy_on_host(source.view(kind), target.view(kind))


def _read_run(
    job: Job, file: OpenFile | Opened, buffers: list[memoryview], start: int, end: int
) -> None:
    """Read one contiguous range into the buffers."""
    while start < end:
        try:
            got = file.read_into(buffers, start)
        except CheckpointError:  # some of these are an OSError too, such as NotFound
            raise
        except OSError as error:
            raise _system_error(job, error) from error
        if got == 0:
            raise IntegrityError(
                "the file ends early",
                file=job.file,
                expected=f"bytes {job.offset} to {job.end}",
                found=f"end at byte {start}",
                hint=_READ_HINT,
            )
        start += got
        if start == end:  # the usual case: to remove 500 buffers takes as long as to read them
            break
        while buffers and got >= len(buffers[0]):
            got -= len(buffers.pop(0))
        if got:
            buffers[0] = buffers[0][got:]


def _deliver(
    job: Job, slices: Iterable[Slice], values: torch.Tensor, at: int, pages: HugePages
) -> None:
    """Copy and cast bytes of a file to the destinations of slices.

    Args:
        job: The job.
        slices: The slices.
        values: The bytes. They may be a part of the slices.
        at: The offset of these bytes in the file.
        pages: Backs the destinations with huge pages.
    """
    for start, end, request in slices:
        target, step = request.destination, request.row
        if request.rows > 1:
            if isinstance(job.file, Url):
                step = request.step  # the stage also has the bytes between the rows
            source = values.as_strided((request.rows, request.row), (step, 1))
            target = target.view(request.rows, -1) if target.dim() == 1 else target
        else:
            first = max(start, at)
            source = values[first - at : max(min(end - at, len(values)), first - at)]
            if request.direct:
                address = target.data_ptr() + first - request.offset
                ctypes.memmove(address, source.data_ptr(), source.nbytes)
                continue
            target = target[0] if target.dim() > 1 else target  # a matrix of one row
            target = target[(first - request.offset) // request.dtype.itemsize :]
            target = target[: source.nbytes // request.dtype.itemsize]
        if source.storage_offset() % request.dtype.itemsize:
            source = source.clone()  # a view as another dtype needs an aligned offset
        source = source.view(request.dtype)
        # torch copies rows with gaps to pageable memory first, which gains nothing from `landing`.
        if target.device.type == "cuda" and source.is_contiguous() and source.is_pinned():
            if source.dtype != target.dtype:
                # torch would cast on the host, on this thread, into pageable memory. It still does
                # if the device has no room for the values before the cast.
                with suppress(torch.OutOfMemoryError):
                    landing = torch.empty_like(target, dtype=source.dtype)
                    source = landing.copy_(source, non_blocking=True)
            target.copy_(source, non_blocking=True)
        elif target.device.type != "cpu":
            target.copy_(source)
        else:
            if target.is_contiguous():
                pages.back(target.data_ptr(), target.nbytes)
            _copy_on_host(source, target)


def _copy_on_host(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy and cast on this thread only, in parts that torch does not split over its threads."""
    is_aligned = target.data_ptr() % target.itemsize == 0
    if source.dim() > 1 and (source.shape[1] > _SERIAL or not is_aligned):
        for row, into in zip(source, target, strict=True):
            _copy_on_host(row, into)
        return
    some = _SERIAL if source.dim() == 1 else max(1, _SERIAL // source.shape[1])
    if is_aligned and torch.get_num_threads() == 1:
        some = max(1, len(source))  # torch cannot split it
    for at in range(0, len(source), some):
        part, into = source[at : at + some], target[at : at + some]
        if is_aligned:
            into.copy_(part)
        else:  # memory of the caller: torch crashes if complex128 is not a multiple of 16
            cast = part.to(into.dtype)
            ctypes.memmove(into.data_ptr(), cast.data_ptr(), cast.nbytes)


#: Receives the bytes between two ranges. Several threads write here at once.
_NOWHERE = memoryview(bytearray(_NEAR))
_MAX_BUFFERS = 512  # a gap needs a buffer too, and the kernel accepts 1024 in one preadv
_WORTH_A_REQUEST = 4096  # bytes
_MAX_GAP = 4096  # bytes between two small tensors that are faster to read than to skip
#: Rows that start at most so many bytes apart are copied out of a map, and others are read one by
#: one. Half of each row of 256 MiB in the page cache, alternated on 2 busy cores (medians of five):
#: rows of 16 KiB took 0.17 s from the map and 0.22 s by reads. Rows of 8 KiB took 0.17 and 0.21 s.
#: From a cold disk they took 0.37 and 0.79 s, and 0.50 and 1.28 s. On tmpfs, whose pages are small,
#: both took 0.11 s of CPU time.
_CLOSE = 64 << 10
_MAPPED = 32 << 20  # bytes of one map, with the bytes between the rows
_MAX_WASTE = 0.01  # the largest share of gaps in what is read, once it is more than a header


@dataclass(frozen=True, slots=True)
class Request:
    """A byte range of a file, or several rows of equal length, and the tensor that receives them.

    Attributes:
        file: The absolute path, or the URL. A name for memory.
        offset: The first byte in the file.
        nbytes: Bytes to read, of all rows together. A row is a multiple of `dtype`'s item size.
        destination: A one-dimensional contiguous tensor of ``nbytes / itemsize`` elements on any
            device, or a two-dimensional one whose rows may have gaps. Values are cast to its dtype.
        dtype: The dtype of the bytes in the file.
        rows: The number of rows.
        step: Bytes in the file from the start of one row to the start of the next.
        memory: A contiguous tensor in place of a file. Its destination must be on a device.
    """

    file: str
    offset: int
    nbytes: int
    destination: torch.Tensor
    dtype: torch.dtype
    rows: int = 1
    step: int = 0
    memory: torch.Tensor | None = None

    @property
    def end(self) -> int:
        """Return the offset after the last byte in the file."""
        return self.offset + (self.rows - 1) * self.step + self.row

    @property
    def row(self) -> int:
        """Return the number of bytes in a row."""
        return self.nbytes // self.rows

    @property
    def direct(self) -> bool:
        """Return whether the bytes can be read into the destination without a stage."""
        return self.destination.dtype == self.dtype and self.destination.device.type == "cpu"

    @property
    def is_mappable(self) -> bool:
        """Return whether a copy from a map is faster than a read for each row."""
        return self.row <= self.step <= _CLOSE


class Slice(NamedTuple):
    """The part of a request that a job reads. The end includes the bytes between rows."""

    start: int  # offset in the file
    end: int  # offset in the file
    request: Request

    @property
    def nbytes(self) -> int:
        """Return the number of requested bytes, without those between rows."""
        return self.request.nbytes if self.request.rows > 1 else self.end - self.start


@dataclass(slots=True)
class Job:
    """One range of a file that one thread reads.

    Attributes:
        file: The path or URL.
        offset: The first byte.
        end: The offset after the last byte.
        slices: The parts of requests that the job reads. All are direct, or none is.
        is_cold: Whether to read past the page cache.
    """

    file: str
    offset: int
    end: int
    slices: list[Slice] = field(default_factory=list)
    is_cold: bool = False

    @property
    def nbytes(self) -> int:
        """Return the number of requested bytes, without gaps."""
        return sum(part.nbytes for part in self.slices)

    @property
    def memory(self) -> torch.Tensor | None:
        """Return the tensor in place of a file."""
        return self.slices[0].request.memory

    @property
    def needs_stage(self) -> bool:
        """Return whether the bytes go to a stage of the ring before their destinations."""
        request = self.slices[0].request
        if request.rows > 1 and isinstance(self.file, Url):
            return True  # the rows arrive together with the bytes between them
        return not (request.direct or (self.is_cold and self.on_host))

    @property
    def cuda_devices(self) -> set[torch.device]:
        """Return the CUDA devices of the destinations."""
        devices = {each.request.destination.device for each in self.slices}
        return {device for device in devices if device.type == "cuda"}

    @property
    def on_host(self) -> bool:
        """Return whether all destinations are in memory of the CPU."""
        return all(each.request.destination.device.type == "cpu" for each in self.slices)


def _make_jobs(requests: Collection[Request], direct: bool) -> Iterator[Job]:
    """Split and join requests to jobs, in file order. A job of a URL is one range of it.

    Args:
        requests: The requests.
        direct: Whether they are read into their destinations.
    """
    share = sum(request.nbytes for request in requests) // DEPTH // HUGE_PAGE * HUGE_PAGE
    share = min(max(share, 2 * HUGE_PAGE), _DIRECT)
    job: Job | None = None
    for whole in sorted(requests, key=attrgetter("file", "offset")):
        is_url = isinstance(whole.file, Url)
        most = (_RANGE if direct else STAGE) if is_url else (share if direct else _STAGED)
        for request in _split_rows(whole, most):
            # A large tensor starts a job, because its memory starts at a huge page.
            is_alone = request.rows > 1 or (request.nbytes >= most and not is_url)
            if job is not None and is_alone:
                yield job
                job = None
            if request.rows > 1:
                part = Slice(request.offset, request.end, request)
                yield Job(request.file, request.offset, request.end, [part])
                continue
            start, stop = request.offset, request.end
            while start < stop:
                end = start
                if job is not None and _is_near(job, request.file, start):
                    end = min(stop, job.offset + most)
                    end -= (end - request.offset) % request.dtype.itemsize
                if job is None or end <= start:
                    if job is not None:
                        yield job
                    job, end = Job(request.file, start, start), min(stop, start + most)
                job.slices.append(Slice(start, end, request))
                job.end = start = end
    if job is not None:
        yield job


def _is_near(job: Job, file: str, start: int) -> bool:
    """Return whether a range that starts here may be read together with a job."""
    gap = start - job.end
    return job.file == file and 0 <= gap <= _NEAR and len(job.slices) < _MAX_BUFFERS


def _split_rows(request: Request, most: int) -> Iterator[Request]:
    """Split a request into requests of at most `most` bytes, but of at least one row.

    The bytes between the rows count if they are read or mapped, too.
    """
    count, row, size = request.rows, request.row, request.dtype.itemsize
    if count == 1:
        if request.nbytes:
            yield request
        return
    together = most // row
    if isinstance(request.file, Url):
        is_near = request.step - row <= _NEAR
        together = 1 + (_STAGED - row) // max(1, request.step) if is_near else 1
    elif request.is_mappable:
        together = min(together, _MAPPED // request.step)
    together = max(1, together)
    for first in range(0, count, together):
        some = min(together, count - first)
        target = request.destination
        if target.dim() > 1:
            target = target[first : first + some] if some > 1 else target[first]
        else:
            target = target[first * row // size :][: some * row // size]
        start = request.offset + first * request.step
        yield replace(request, offset=start, nbytes=some * row, destination=target, rows=some)


def count_ranges(wanted: Iterable[tuple[TensorEntry, bool]]) -> int:
    """Return the number of ranges of URLs that `read` requests.

    Args:
        wanted: Pairs of an entry and whether it is read without a stage. Entries that are not plain
            numbers, such as quantised blocks, are read completely.
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
    return sum(1 for direct, some in requests.items() for _ in _make_jobs(some, direct))


def _is_far(gap: int, nbytes: int) -> bool:
    """Return whether to skip the bytes before a range of `nbytes` instead of reading them."""
    # In a shard of an inner dimension the gaps are as long as the rows: do not read all of them.
    return gap > min(_MAX_GAP, 256 + nbytes * _MAX_WASTE)


_READ_HINT = "Check the disk and that nobody writes to the file, then load again."


def _system_error(job: Job, cause: OSError) -> CheckpointError:
    error = read_error("reading failed", cause, job.file, _READ_HINT)
    error.expected = f"bytes {job.offset} to {job.end}"
    return error


#: Shorter runs of bytes are copied as numbers by torch, in any order.
SMALL_RUN = 64


def is_readable(entry: TensorEntry, stride: Sequence[int] | None = None) -> bool:
    """Return whether a tensor's bytes are its values, in few or in long runs.

    Args:
        entry: The tensor.
        stride: The strides of the target, as in `rows`.
    """
    if entry.kind is not None or entry.encoding:
        return False
    # A URL cannot be mapped. Short rows arrive together with the bytes between them.
    is_away = bool(entry.chunks) and isinstance(entry.chunks[0].file, Url)
    runs = runs_of(entry, stride)
    return (
        (is_away or runs.shortest >= min(SMALL_RUN, entry.nbytes or 1))
        # A request takes 10 us, which is as long as a copy of 100 KB.
        and runs.number <= len(entry.chunks) + entry.nbytes // _WORTH_A_REQUEST
    )


def requests_for(entry: TensorEntry, target: torch.Tensor, dtype: torch.dtype) -> Iterator[Request]:
    """Yield one request for each run of bytes, or for all rows of a matrix.

    Args:
        entry: The tensor to read.
        target: Receives the values. It has the entry's shape, any strides and any device.
        dtype: The dtype of the bytes in the file.

    Example:
        >>> from torchlift.formats.index import Chunk
        >>> half = Chunk("f", 8, 12, (0, 0), (2, 1), (2, 1))
        >>> entry = TensorEntry("w", "float32", (2, 1), (1, 1), 8, "cpu", "", (half,))
        >>> found = requests_for(entry, torch.empty(2, 1), torch.float32)
        >>> [(request.offset, request.rows, request.step) for request in found]
        [(8, 2, 8)]
    """
    start = target.storage_offset()
    for file, offset, at, numel, many, step, apart in rows(entry, target.stride()):
        if apart == numel or many == 1:
            place = target.as_strided((numel * many,), (1,), start + at)
        else:
            place = target.as_strided((many, numel), (apart, 1), start + at)
        nbytes = numel * many * entry.itemsize
        yield Request(file, offset, nbytes, place, dtype, many, step)

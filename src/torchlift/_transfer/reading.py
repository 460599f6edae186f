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
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

import torch

from torchlift._store.files import Opened
from torchlift._store.places import in_parallel
from torchlift._store.url import Store, Url
from torchlift._transfer.direct import DEPTH, MOST, OpenFile, OwnStage, buffer
from torchlift._transfer.files import Files, Place
from torchlift._transfer.pages import HUGE_PAGE, HugePages, allocate
from torchlift._transfer.pinned import COUNT, STAGE, THREADS, Stages, allocate_pinned
from torchlift.errors import CheckpointError, IntegrityError
from torchlift.formats.boxes import rows, runs_of
from torchlift.formats.index import TensorEntry

#: Bytes of anonymous memory that a transfer may use in addition to the destinations.
BUDGET = 64 << 20
#: Bytes of one staged read, or of one read of several small tensors. Larger reads gain nothing from
#: a warm cache, and smaller reads cost more system calls.
BLOCK = 8 << 20
# A large tensor is read in this many blocks at once: new memory costs the same for any size.
_WHOLE = 4
_COLD = 16 << 20  # at most this many bytes from a disk at once, so that all threads end together
_STAGES = 4  # stages of BLOCK bytes. They use half of the budget, and the other half is a reserve.
# Torch splits a copy of more than 32,768 elements over threads of its own. Each reader would start
# a team of them, which wait for each other on a busy machine. 2.1 GB cast to bfloat16, alternated
# with other work, took 1.8 s (median) in copies of this size, and 4.3 s in larger copies.
_SERIAL = 32_704
#: Bytes of anonymous memory that `read` uses at most to stage values that are cast or moved.
STAGING = min(_STAGES, THREADS) * BLOCK
#: Bytes in one range of a URL. 2.1 GB by HTTP over the loopback took 1.3 s with 4, 8 and 32 ranges
#: in parallel. A server that is far away answers late, and needs more of them.
_RANGE = 8 << 20
#: Bytes of all stages together if the source is a URL or the target is on a device.
RING = COUNT * STAGE
#: The process in which torch's pool of threads is ready.
_process = os.getpid()
_SOON = 0.02  # seconds until running reads are cancelled again
#: Bytes between two ranges of a URL that arrive sooner than the answer to another request.
_NEAR = 1 << 20


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
    local = sorted(requests, key=lambda request: (request.file, request.offset))
    kinds = {request.destination.device.type for request in local}
    total = sum(request.nbytes for request in local)
    away = list[Job]()
    if remote := [request for request in local if isinstance(request.file, Url)]:
        local = [request for request in local if not isinstance(request.file, Url)]
        for direct in True, False:
            away += _make_url_jobs([each for each in remote if each.direct is direct], direct)
    block, most = BLOCK, min(_STAGES, THREADS)
    if away or kinds - {"cpu"}:
        block, most = STAGE, COUNT
    jobs = [
        job
        for direct in (True, False)
        for job in _make_jobs([request for request in local if request.direct is direct], block)
    ]
    requested: Counter[str] = Counter()
    for request in local:
        requested[request.file] += request.nbytes
    own, left = OwnStage(), total

    def report(nbytes: int) -> None:
        """Report bytes that were requested, but not those that were read between them."""
        nonlocal left
        nbytes = min(nbytes, left)
        left -= nbytes
        if advance is not None:
            advance(nbytes)

    free = [] if stages is None else stages
    with ExitStack() as stack:
        here = {
            file: stack.enter_context(OpenFile(file, files.descriptor(file), nbytes, own))
            for file, nbytes in requested.items()
        }
        warm, cold = _split_by_cache(jobs, here)
        opened: dict[str, OpenFile | Opened] = {**here}
        opened |= {file: files.open(file) for file in {job.file for job in away}}
        depth = DEPTH
        if cold and kinds - {"cpu"}:
            # Each thread that reads past the page cache has one more stage. Stay in the budget.
            depth, most = DEPTH // 2, min(most, BUDGET // STAGE - DEPTH // 2)
        # Pinned memory takes long to set up: it does not pay for a single read.
        is_pinned = len(warm) + len(cold) + len(away) > 1 and "cuda" in kinds
        while len(free) < min(sum(job.staged for job in (*warm, *cold, *away)), most):
            # Not by malloc, which can keep freed memory.
            host = torch.device("cpu")
            free.append(allocate_pinned(block) if is_pinned else allocate(block, torch.uint8, host))
        pages = HugePages()
        stores = [job.file.store for job in away if isinstance(job.file, Url)]
        far = min((store.transport.at_once for store in stores), default=1)
        for some, threads in (cold, depth), (warm, THREADS), (away, far):
            if len(some) == 1:  # on this thread, because a thread takes longer than a small read
                (job,) = some
                stage = free[0] if job.staged else None
                _fetch(job, opened[job.file], stage, pages)
                _deliver(job, stage, pages)
                report(job.nbytes)
            elif some:
                _read_parallel(some, opened, pages, report, Stages(free), threads)
    if urls := sorted({job.file for job in away}):
        in_parallel(urls[0], lambda file: files.open(file).check(), urls)
    return total


def read_values(
    files: Files, file: str, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8
) -> torch.Tensor:
    """Return bytes as a flat tensor: over the map of a file, or in memory for a URL.

    Raises:
        IntegrityError: If the file changed or cannot be read.
    """
    if not isinstance(file, Url):
        return files.map(file, offset, nbytes, dtype)
    place = Place(file, offset, nbytes)
    found = files.ahead.pop(place, None)
    return (_read_places(files, [place])[place] if found is None else found).view(dtype)


def read_ahead(files: Files, places: Iterable[Place]) -> None:
    """Read bytes of URLs in one transfer, for later calls of `read_values`."""
    files.ahead.update(_read_places(files, places))


def _read_places(files: Files, places: Iterable[Place]) -> dict[Place, torch.Tensor]:
    host = torch.device("cpu")
    into = {place: allocate(place.nbytes, torch.uint8, host) for place in places}
    read([Request(*place, memory, torch.uint8) for place, memory in into.items()], files)
    return into


def _split_by_cache(
    jobs: Iterable[Job], opened: Mapping[str, OpenFile]
) -> tuple[list[Job], list[Job]]:
    """Return the jobs in the page cache, and the jobs to read past it."""
    warm: list[Job] = []
    cold: list[Job] = []
    for job in jobs:
        # A direct read of rows would read all bytes between them too, perhaps on each rank.
        has_gaps = job.slices[0].request.rows > 1
        is_cold = not has_gaps and opened[job.file].is_cold(job.offset, job.end - job.offset)
        (cold if is_cold else warm).append(job)
    share = sum(job.nbytes for job in cold) // DEPTH // MOST * MOST
    most = min(max(share, MOST), _COLD)
    return warm, [part for job in cold for part in _split_cold(job, most)]


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
        # In a forked child, the first copies on several threads renew torch's pool of threads at
        # once, and one of them fails ("Invalid thread pool!"). Renew the pool here, on one thread.
        torch.set_num_threads(torch.get_num_threads())
        _process = os.getpid()
    running: dict[Future[None], tuple[Job, torch.Tensor | None]] = {}
    tracker = _Tracker()
    waiting = iter(jobs)
    following: Job | None = next(waiting, None)
    with ThreadPoolExecutor(min(threads, len(jobs)), "torchlift-read") as pool:
        try:
            while following is not None or running:
                # Readers cast values that stay on the host. This thread sends to devices, so that
                # the caller's stream is used.
                while following is not None and len(running) < 4 * threads:
                    job = following
                    stage = stages.take(wait=not running) if job.staged else None
                    if job.staged and stage is None:
                        break
                    file = opened[job.file]
                    future = pool.submit(_run_job, job, file, stage, pages, tracker)
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
                    report(job.nbytes)
            stages.wait()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            tracker.stop({job.file.store for job in jobs if isinstance(job.file, Url)})
            pool.shutdown(wait=True)
            stages.wait()  # the caller frees memory that devices still read or write
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

    @contextmanager
    def track(self, job: Job) -> Iterator[bool]:
        """Track a job while it runs. Yield False if it should not run any more."""
        self._jobs.add(id(job))
        try:
            yield not self._is_stopped
        finally:
            self._jobs.discard(id(job))


def _run_job(
    job: Job,
    file: OpenFile | Opened,
    stage: torch.Tensor | None,
    pages: HugePages,
    tracker: _Tracker,
) -> None:
    """Run one job on a reader thread."""
    with tracker.track(job) as is_needed:
        if is_needed:
            _fetch(job, file, stage, pages)
            if job.on_host:
                _deliver(job, stage, pages)


def _fetch(job: Job, file: OpenFile | Opened, stage: torch.Tensor | None, pages: HugePages) -> None:
    """Read a job's bytes into the stage, or into the destinations if there is no stage."""
    if isinstance(file, OpenFile) and job.cold:
        _fetch_cold(job, file, stage, pages)
        return
    if isinstance(file, OpenFile) and job.slices[0].request.rows > 1:
        _fetch_rows(job, file, stage, pages)
        return
    # To skip a gap in a URL would take another request.
    for run in _split_at_gaps(job.slices) if isinstance(file, OpenFile) else [job.slices]:
        start = at = run[0].start
        stop = run[-1].end if isinstance(file, OpenFile) else job.end
        if stage is not None:
            into = buffer(stage.data_ptr() + start - job.offset, stop - start)
            _read_run(job, file, [into], start, stop)
            continue
        buffers: list[memoryview] = []
        for first, end, request in run:
            if first > at:
                buffers.append(_NOWHERE[: first - at])
            address, nbytes = request.destination.data_ptr() + first - request.offset, end - first
            if nbytes >= HUGE_PAGE:
                pages.back(address, nbytes)
            buffers.append(buffer(address, nbytes))
            at = end
        _read_run(job, file, buffers, start, stop)


def _split_at_gaps(slices: Iterable[Slice]) -> Iterator[list[Slice]]:
    """Split slices into runs, between which skipping the gap is faster than reading it."""
    run: list[Slice] = []
    for part in slices:
        if run and _is_far(part.start - run[-1].end, part.end - part.start):
            yield run
            run = []
        run.append(part)
    yield run


def _fetch_cold(job: Job, file: OpenFile, stage: torch.Tensor | None, pages: HugePages) -> None:
    """Read a job past the page cache into this thread's stage, and copy it from there."""
    if len(job.slices) == 1 and job.slices[0].request.direct:
        ((start, end, request),) = job.slices
        address = request.destination.data_ptr() + start - request.offset
        pages.back(address, end - start)
        for first in range(start, end, MOST):
            values = _read_cold(job, file, first, min(first + MOST, end))
            ctypes.memmove(address + first - start, values.data_ptr(), values.nbytes)
        return
    values = _read_cold(job, file, job.offset, job.end)
    if stage is None:
        _deliver(job, values, pages)
    else:
        ctypes.memmove(stage.data_ptr(), values.data_ptr(), values.nbytes)


def _read_cold(job: Job, file: OpenFile, start: int, end: int) -> torch.Tensor:
    """Read a range into this thread's stage, and return that part of the stage."""
    nbytes = end - start
    try:
        lead = file.read_direct(start, nbytes)
    except OSError as error:
        raise _read_error(job, f"reading failed ({error.strerror})") from error
    if lead is None:
        lead = 0
        _read_run(job, file, [buffer(file.own.memory.data_ptr(), nbytes)], start, end)
        file.forget(start, nbytes)
    return file.own.memory[lead : lead + nbytes]


def _fetch_rows(job: Job, file: OpenFile, stage: torch.Tensor | None, pages: HugePages) -> None:
    """Read the rows of a job's only request, without the bytes between them.

    Rows in a stage follow each other. A system call for each short row takes longer than its bytes,
    so short rows are copied out of a map. If they cannot be mapped, as on a network file system,
    they are read together with the bytes between them. Long rows are read one by one.
    """
    request = job.slices[0].request
    count, row, target = request.rows, request.row, request.destination
    apart = row
    if stage is not None:
        target = stage
    elif target.dim() > 1:
        apart = target.stride(0) * target.itemsize
    if stage is None and apart == row:
        pages.back(target.data_ptr(), target.nbytes)
    span = file.map(job.offset, job.end - job.offset) if request.is_mappable else None
    together = count if span is not None else 1
    if span is None and request.is_mappable and request.step - row <= _MAX_THROUGH:
        together = MOST // request.step
    for first in range(0, count, together):
        some = min(together, count - first)
        start, address = request.offset + first * request.step, target.data_ptr() + first * apart
        area = buffer(address, (some - 1) * apart + row)
        if together == 1:
            _read_run(job, file, [area], start, start + row)
            continue
        values = span
        if values is None:
            values = file.own.memory[: (some - 1) * request.step + row]
            into = [buffer(values.data_ptr(), values.nbytes)]
            _read_run(job, file, into, start, start + values.nbytes)
        received = torch.frombuffer(area, dtype=torch.uint8).as_strided((some, row), (apart, 1))
        _copy_bytes(values.as_strided((some, row), (request.step, 1)), received)


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
            raise _read_error(job, f"reading failed ({error.strerror})") from error
        if got == 0:
            raise _read_error(job, "the file ends early", found=f"end at byte {start}")
        start += got
        if start == end:  # the usual case: to remove 500 buffers takes as long as to read them
            break
        while buffers and got >= len(buffers[0]):
            got -= len(buffers.pop(0))
        if got:
            buffers[0] = buffers[0][got:]


def _deliver(job: Job, stage: torch.Tensor | None, pages: HugePages) -> None:
    """Cast and copy the values of a stage to their destinations."""
    if stage is None:
        return
    for start, end, request in job.slices:
        target, step = request.destination, request.row
        if request.rows > 1:
            if isinstance(job.file, Url):
                step = request.step  # the stage also has the bytes between the rows
            source = stage.as_strided((request.rows, request.row), (step, 1))
            target = target.view(request.rows, -1) if target.dim() == 1 else target
        else:
            source = stage[start - job.offset : end - job.offset]
            first = (start - request.offset) // request.dtype.itemsize
            target = target[0] if target.dim() > 1 else target  # a matrix of one row
            target = target[first:][: source.nbytes // request.dtype.itemsize]
            if request.direct:
                ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
                continue
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


def _read_error(job: Job, reason: str, found: str | None = None) -> IntegrityError:
    return IntegrityError(
        reason,
        file=job.file,
        expected=f"bytes {job.offset} to {job.end}",
        found=found,
        hint="Check the disk and that nobody writes to the file, then load again.",
    )


#: Receives the bytes between two ranges. Several threads write here at once.
_NOWHERE = memoryview(bytearray(_NEAR))
_MAX_BUFFERS = 512  # a gap needs a buffer too, and the kernel accepts 1024 in one preadv
_WORTH_A_REQUEST = 4096  # bytes
_MAX_GAP = 4096  # bytes between two small tensors that are faster to read than to skip
#: Rows shorter than `_SHORT` bytes, at most `_CLOSE` bytes apart, are copied out of a map. Measured
#: for 1.05 GiB under `dcp.load`: 2 ranks with a half of each row took 109 to 128 ms, and 145 to 151
#: with reads that included the bytes between the rows. 4 ranks with a quarter took 163 to 256 ms,
#: and 275 to 314 with reads. The file was in the page cache in huge pages. In small pages a map is
#: slower for long rows: rows of 16 KiB took 310 ms in a C loop, and 104 ms with a call for each.
#: One call for 256 rows gained nothing: half of 512 MiB in rows of 8 KiB took 212 to 250 ms of CPU
#: time (medians of nine), and 220 to 237 ms with a call for each row.
_SHORT, _CLOSE = 8 << 10, 64 << 10
_MAPPED = 32 << 20  # bytes of one map, with the bytes between the rows
_MAX_THROUGH = 12 << 10  # bytes between rows that are faster to read than one more system call
_MAX_WASTE = 0.01  # the largest share of gaps in what is read, once it is more than a header


@dataclass(frozen=True, slots=True)
class Request:
    """A byte range of a file, or several rows of equal length, and the tensor that receives them.

    Attributes:
        file: The absolute path or the URL.
        offset: The first byte in the file.
        nbytes: Bytes to read, of all rows together. A row is a multiple of `dtype`'s item size.
        destination: A one-dimensional contiguous tensor of ``nbytes / itemsize`` elements on any
            device, or a two-dimensional one whose rows may have gaps. Values are cast to its dtype.
        dtype: The dtype of the bytes in the file.
        rows: The number of rows.
        step: Bytes in the file from the start of one row to the start of the next.
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
        return self.row < _SHORT and self.row <= self.step <= _CLOSE


class Slice(NamedTuple):
    """The part of a request that a job reads."""

    start: int  # offset in the file
    end: int  # offset in the file, as if the rows of the request had no gaps
    request: Request


@dataclass(slots=True)
class Job:
    """One contiguous range of a file that one thread reads.

    Attributes:
        file: The path or URL.
        offset: The first byte.
        staged: Whether the bytes go to a stage before their destinations.
        end: The offset after the last byte.
        slices: The parts of requests that the job reads.
        cold: Whether to read past the page cache.
    """

    file: str
    offset: int
    staged: bool
    end: int
    slices: list[Slice] = field(default_factory=list)
    cold: bool = False

    @property
    def nbytes(self) -> int:
        """Return the number of requested bytes, without gaps."""
        return sum(end - start for start, end, _ in self.slices)

    @property
    def cuda_devices(self) -> set[torch.device]:
        """Return the CUDA devices of the destinations."""
        devices = {each.request.destination.device for each in self.slices}
        return {device for device in devices if device.type == "cuda"}

    @property
    def on_host(self) -> bool:
        """Return whether all destinations are in memory of the CPU."""
        return all(each.request.destination.device.type == "cpu" for each in self.slices)


def _make_jobs(requests: Iterable[Request], block: int) -> Iterator[Job]:
    """Split and join requests to jobs, in file order. All requests are direct, or none is."""
    job: Job | None = None
    for request in requests:
        if not request.nbytes:
            continue
        stop = request.offset + request.nbytes
        if job is not None and (request.rows > 1 or not _joins(job, request, block)):
            yield job
            job = None
        if request.rows > 1:
            yield from _make_row_jobs(request, block)
        elif job is None and request.nbytes > block:
            step = _WHOLE * block if request.direct else block
            for start in range(request.offset, stop, step):
                end = min(start + step, stop)
                part = Slice(start, end, request)
                yield Job(request.file, start, not request.direct, end, [part])
        else:
            if job is None:
                job = Job(request.file, request.offset, not request.direct, request.offset)
            job.slices.append(Slice(request.offset, stop, request))
            job.end = stop
    if job is not None:
        yield job


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
    return sum(1 for direct, some in requests.items() for _ in _make_url_jobs(some, direct))


def _make_url_jobs(requests: Iterable[Request], direct: bool) -> Iterator[Job]:
    """Split and join requests to jobs, each of which is one range of a URL."""
    job: Job | None = None
    most = _RANGE if direct else STAGE
    in_order = sorted(requests, key=attrgetter("file", "offset"))
    for request in (part for each in in_order for part in _split_url_rows(each)):
        if request.rows > 1:
            part = Slice(request.offset, request.offset + request.nbytes, request)
            yield Job(request.file, request.offset, True, request.end, [part])
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
            job.slices.append(Slice(start, end, request))
            job.end = start = end
    if job is not None:
        yield job


def _split_url_rows(request: Request) -> Iterator[Request]:
    """Split a request so that a stage holds the rows of each part and the bytes between them."""
    row = request.row
    if request.rows == 1:
        yield request
    elif row + request.step > STAGE or request.step - row > _NEAR:
        yield from _split_rows(request, 1)
    else:
        yield from _split_rows(request, 1 + (STAGE - row) // request.step)


def _make_row_jobs(request: Request, block: int) -> Iterator[Job]:
    """Make jobs of several rows each, or of parts of a long row."""
    together = block // request.row
    if request.is_mappable:
        together = min(together, _MAPPED // request.step)
    for some in _split_rows(request, max(1, together)):
        if some.rows == 1:
            yield from _make_jobs([some], block)
        else:
            part = Slice(some.offset, some.offset + some.nbytes, some)
            yield Job(request.file, some.offset, not request.direct, some.end, [part])


def _split_rows(request: Request, together: int) -> Iterator[Request]:
    """Split a request into requests of at most `together` rows."""
    row, size = request.row, request.dtype.itemsize
    for first in range(0, request.rows, together):
        count = min(together, request.rows - first)
        start, nbytes = request.offset + first * request.step, count * row
        target = request.destination
        if target.dim() > 1:
            target = target[first : first + count] if count > 1 else target[first]
        else:
            target = target[first * row // size :][: nbytes // size]
        yield replace(request, offset=start, nbytes=nbytes, destination=target, rows=count)


def _split_cold(job: Job, most: int) -> Iterator[Job]:
    """Split a job that reads past the page cache, so that a thread's stage holds each part.

    A part with one direct slice may have `most` bytes: the thread reads it in several steps.
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
            one.slices.append(Slice(start, end, request))
            one.end = end
    if one is not None:
        yield one


def _joins(job: Job, request: Request, block: int) -> bool:
    return (
        request.file == job.file
        and request.offset >= job.end
        and request.offset + request.nbytes - job.offset <= block
        and len(job.slices) < _MAX_BUFFERS
        # A staged slice is viewed as its dtype, which needs an aligned place in the stage.
        and (request.direct or (request.offset - job.offset) % request.dtype.itemsize == 0)
    )


def _is_far(gap: int, nbytes: int) -> bool:
    """Return whether to skip the bytes before a range of `nbytes` instead of reading them."""
    # In a shard of an inner dimension the gaps are as long as the rows: do not read all of them.
    return gap > min(_MAX_GAP, 256 + nbytes * _MAX_WASTE)


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

"""What is worth one read: requests for byte ranges, cut where long and joined where short."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch

_MAX_BUFFERS = 512  # below the kernel's limit of 1024 buffers in one preadv
_MAX_GAP = 4096  # padding between two small tensors that is cheaper to read than to skip
_MAX_WASTE = 0.01  # but no more of what is asked for than this, once it is more than a header


@dataclass(frozen=True, slots=True)
class Request:
    """One byte range of a file, or several of one length, and the tensor that receives them.

    Attributes:
        file: absolute path.
        offset: first byte in the file.
        nbytes: bytes to read, of all rows together; a row is a multiple of `dtype`'s item size.
        destination: one-dimensional contiguous tensor of ``nbytes / itemsize`` elements, on any
            device. A dtype that differs from `dtype` asks for a cast on the way.
        dtype: what the bytes in the file are.
        fresh: whether the destination is memory of `torchlift.pages` that nobody else knows of yet.
            Live memory must never be out of the reach of other threads, not even for a while.
        rows: into how many ranges of one length the bytes are divided.
        step: bytes in the file from the start of one row to the start of the next.
    """

    file: str
    offset: int
    nbytes: int
    destination: torch.Tensor
    dtype: torch.dtype
    fresh: bool = False
    rows: int = 1
    step: int = 0

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
    parts: list[tuple[int, int, Request]] = field(default_factory=list)

    @property
    def asked(self) -> int:
        """Bytes that the requests asked for; padding between them does not count."""
        return sum(end - start for start, end, _ in self.parts)

    @property
    def on_host(self) -> bool:
        """Whether everything goes to the CPU's memory."""
        return all(request.destination.device.type == "cpu" for *_, request in self.parts)


def jobs_of(requests: Iterable[Request], piece: int, whole: int) -> Iterator[Job]:
    """Requests cut and joined to what is worth one read.

    Args:
        requests: in the order of their files and offsets; all direct, or none.
        piece: bytes per read of what is staged, or of what small tensors are read together.
        whole: bytes per read of a large tensor.
    """
    job: Job | None = None
    for request in requests:
        if not request.nbytes:
            continue
        stop = request.offset + request.nbytes
        if job is not None and (request.rows > 1 or not _joins(job, request, piece)):
            yield job
            job = None
        if request.rows > 1:
            yield from _jobs_of_rows(request, piece, whole)
            continue
        if job is None and request.nbytes > piece:
            step = whole if request.direct else piece
            for start in range(request.offset, stop, step):
                end = min(start + step, stop)
                yield Job(request.file, start, not request.direct, end, [(start, end, request)])
            continue
        if job is None:
            job = Job(request.file, request.offset, not request.direct, request.offset)
        job.parts.append((request.offset, stop, request))
        job.end = stop
    if job is not None:
        yield job


def _jobs_of_rows(request: Request, piece: int, whole: int) -> Iterator[Job]:
    """Jobs of as many rows as are worth one read, or of parts of a long row."""
    row = request.nbytes // request.rows
    together = max(1, piece // row)
    for first in range(0, request.rows, together):
        rows = min(together, request.rows - first)
        start, nbytes = request.offset + first * request.step, rows * row
        numel = nbytes // request.dtype.itemsize
        at = first * row // request.dtype.itemsize
        some = replace(
            request,
            offset=start,
            nbytes=nbytes,
            destination=request.destination[at : at + numel],
            rows=rows,
        )
        if rows == 1:
            yield from jobs_of([some], piece, whole)
        else:
            end = start + (rows - 1) * request.step + row
            yield Job(request.file, start, not request.direct, end, [(start, start + nbytes, some)])


def _joins(job: Job, request: Request, piece: int) -> bool:
    return (
        request.file == job.file
        and request.offset >= job.end
        and request.offset + request.nbytes - job.offset <= piece
        and len(job.parts) < _MAX_BUFFERS
        # A staged slice is viewed as its dtype, which needs its place in the buffer aligned.
        and (request.direct or (request.offset - job.offset) % request.dtype.itemsize == 0)
    )


def is_far(gap: int, nbytes: int) -> bool:
    """Whether to skip the bytes before a range of `nbytes` instead of reading them too."""
    # The rows of a shard that is cut along an inner dimension lie as far apart as they are long.
    return gap > min(_MAX_GAP, 256 + nbytes * _MAX_WASTE)

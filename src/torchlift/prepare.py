"""Turns the steps of a plan into tensors, through the transfer engine; places nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from torchlift import transfer
from torchlift.checkpoint import MappedViews, dtype_of
from torchlift.errors import MismatchError
from torchlift.formats import TensorEntry
from torchlift.match import Candidate
from torchlift.steps import Step

Transform = Callable[[str, torch.Tensor], torch.Tensor]
Advance = Callable[[int], object]

#: Bytes of untransformed tensors in memory at a time; the rest of the budget is for staging.
_BATCH = transfer.BUDGET // 4


def prepare(
    steps: Sequence[Step], views: MappedViews, transform: Transform | None, advance: Advance
) -> Iterator[tuple[Step, torch.Tensor]]:
    """Yield each step with the tensor that will be placed; read in as few rounds as possible."""
    for step in steps:
        _check_rivals(step, views)
    if transform is None:
        tensors = _fetch(steps, views, advance)
        yield from zip(steps, tensors, strict=True)
        return
    for batch in _batches(steps):
        # Popped one by one, so that an untransformed tensor is freed as soon as it is used.
        raw = _fetch([step.untransformed(views.index.path) for step in batch], views, advance)
        for step in batch:
            yield step, _transformed(step, transform, raw.pop(0), views.index.path)


def _fetch(steps: Sequence[Step], views: MappedViews, advance: Advance) -> list[torch.Tensor]:
    """The tensors of the steps: mapped, copied out of the map, or read in one parallel transfer."""
    tensors: list[torch.Tensor] = []
    requests: list[transfer.Request] = []
    for step in steps:
        entry = step.entry
        if entry is None:
            assert step.candidate.value is not None
            tensors.append(step.candidate.value)
        elif not step.owned:
            tensors.append(views.view(entry))
        elif step.source == "read" and step.dense and entry.chunks:
            tensor, request = _request(step, entry, views)
            tensors.append(tensor)
            requests.append(request)
        else:
            view = views.view(entry)
            flat = transfer.allocate(view.numel(), step.dtype, step.host_or_device)
            tensors.append(flat.view(view.shape).copy_(view))
            advance(entry.nbytes)
    transfer.read(requests, views.files, advance=advance)
    return tensors


def _request(
    step: Step, entry: TensorEntry, views: MappedViews
) -> tuple[torch.Tensor, transfer.Request]:
    (chunk,) = entry.chunks
    flat = transfer.allocate(entry.numel, step.dtype, step.host_or_device)
    file_dtype = dtype_of(entry, views.index.path)
    request = transfer.Request(chunk.file, chunk.offset, chunk.nbytes, flat, file_dtype)
    # Dense, so the file's own order of the dimensions fits the same number of elements.
    return flat.as_strided(entry.shape, entry.stride), request


def _batches(steps: Sequence[Step]) -> Iterator[list[Step]]:
    batch: list[Step] = []
    size = 0
    for step in steps:
        nbytes = step.entry.nbytes if step.entry else 0
        if batch and size + nbytes > _BATCH:
            yield batch
            batch, size = [], 0
        batch.append(step)
        size += nbytes
    if batch:
        yield batch


def _transformed(step: Step, transform: Transform, raw: torch.Tensor, path: str) -> torch.Tensor:
    made = transform(step.key, raw)
    if not isinstance(made, torch.Tensor):
        raise TypeError(f"transform({step.key!r}, ...) returned {type(made).__name__}, no tensor")
    if made.shape != step.group.tensor.shape:
        raise MismatchError(
            "transform returned another shape than the model has",
            file=path,
            entry=step.key,
            expected=list(step.group.tensor.shape),
            found=list(made.shape),
        )
    if step.in_place:
        return made.detach()
    floating = made.is_floating_point() and step.dtype.is_floating_point
    dtype = step.dtype if step.dtype_is_fixed and floating else made.dtype
    return made.detach().to(step.device, dtype)


def _check_rivals(step: Step, views: MappedViews) -> None:
    """Two names of one tensor may both be in the file, but only with the same values."""
    for rival in step.rivals:
        if not _same_bytes(step.candidate, rival, views):
            raise MismatchError(
                "the model ties two keys that have different values in the checkpoint",
                file=views.index.path,
                entry=step.candidate.key,
                expected=f"the values of {rival.key!r}: {_glimpse(rival, views)}",
                found=_glimpse(step.candidate, views),
                hint="Pass rename= to drop the one that is wrong, or untie the model.",
            )


def _same_bytes(one: Candidate, two: Candidate, views: MappedViews) -> bool:
    a, b = one.entry, two.entry
    if a is not None and b is not None:
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        if a.chunks == b.chunks and a.stride == b.stride:
            return True
    left, right = _tensor(one, views), _tensor(two, views)
    # As bytes, so that a NaN equals itself.
    return torch.equal(
        left.contiguous().flatten().view(torch.uint8),
        right.contiguous().flatten().view(torch.uint8),
    )


def _tensor(candidate: Candidate, views: MappedViews) -> torch.Tensor:
    if candidate.entry is not None:
        return views.view(candidate.entry)
    assert candidate.value is not None
    return candidate.value


def _glimpse(candidate: Candidate, views: MappedViews) -> str:
    tensor = _tensor(candidate, views)
    first = ", ".join(f"{value:.4g}" for value in tensor.flatten()[:3].tolist())
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} [{first}, ...]"

"""Turns the steps of a plan into tensors, through the transfer engine; places nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import torch

from torchlift import _transfer as transfer
from torchlift._checkpoint import MappedViews, dtype_of
from torchlift._model.commit import is_plain
from torchlift._model.dtensor import dressed, is_sharded, undressed
from torchlift._model.handlers import handles
from torchlift._model.slots import is_lazy
from torchlift._plan.decide import Step, apply
from torchlift._plan.hooks import same_bits
from torchlift._plan.match import Candidate
from torchlift._system import trim
from torchlift._transfer import allocate, is_readable, requests_for
from torchlift.errors import MismatchError, PlacementError
from torchlift.formats import TensorEntry
from torchlift.formats.boxes import is_pieced

Transform = Callable[[str, torch.Tensor], torch.Tensor]
Advance = Callable[[int], object]

#: Bytes of untransformed tensors in memory at a time; the rest of the budget is for staging.
_BATCH = transfer.BUDGET // 4


def prepare(
    steps: Sequence[Step], views: MappedViews, transform: Transform | None, advance: Advance
) -> Iterator[tuple[Step, torch.Tensor]]:
    """Yield each step with the tensor that will be placed; read in as few rounds as possible."""
    path = views.index.path
    for step in steps:
        _check_rivals(step, views)
        if transform is None:
            _check_cast(step, _file_dtype(step, path), path)
    if transform is None:
        plain = [step for step in steps if not step.handled]
        for step, tensor in zip(plain, _fetch(plain, views, advance), strict=True):
            yield step, _worn(step, _fitted(step, tensor))
        steps = [step for step in steps if step.handled]
    own = _overlapping(steps)
    for batch in _batches(steps):
        raw_steps = [step.untransformed(path) for step in batch]
        raw_steps = [replace(s, owned=True) if s.key in own else s for s in raw_steps]
        # Popped one by one, so that an untransformed tensor is freed as soon as it is used.
        raw = _fetch(raw_steps, views, lambda _: None)
        for step in batch:
            yield _placeable(step, transform, raw.pop(0), path)
            advance(step.span if step.owned else 0)
        trim()  # what a transform or a handler took and freed


def _fetch(steps: Sequence[Step], views: MappedViews, advance: Advance) -> list[torch.Tensor]:
    """The tensors of the steps: mapped, copied out of the map, or read in one parallel transfer."""
    tensors: list[torch.Tensor] = []
    requests: list[transfer.Request] = []
    bases: dict[object, torch.Tensor] = {}
    for step in steps:
        entry = step.entry
        if entry is None:
            tensors.append(_computed(step))
        elif not step.owned:
            tensors.append(views.view(entry))
        elif step.base is not None:
            key = (step.base.entry.storage, step.base.entry.chunks, step.dtype, step.device)
            if key not in bases:
                bases[key], request = _request(step, step.base.entry, views)
                requests.append(request)
            tensors.append(step.base.view(bases[key], entry))
        elif step.source == "read" and step.dense and entry.chunks:
            tensor, request = _request(step, entry, views)
            tensors.append(tensor)
            requests.append(request)
        elif is_pieced(entry):
            flat = allocate(entry.numel, step.dtype, step.host_or_device)
            tensors.append(flat.view(entry.shape))
            if step.source == "read" and is_readable(entry):
                dtype = _file_dtype(step, views.index.path)
                requests += requests_for(entry, flat, dtype, fresh=True)
            else:
                views.fill(tensors[-1], entry)
                advance(step.span)
        else:
            view = views.view(entry)
            flat = allocate(view.numel(), step.dtype, step.host_or_device)
            shaped = (
                flat.as_strided(view.shape, view.stride()) if step.dense else flat.view_as(view)
            )
            tensors.append(shaped.copy_(view))
            advance(step.span)
    transfer.read(requests, views.files, advance=advance)
    return tensors


def _computed(step: Step) -> torch.Tensor:
    """A value that a hook made, in memory that nothing else uses: it may be a slice of the map."""
    value = step.candidate.value
    assert value is not None
    if not step.owned:
        return value.detach()
    return value.detach().to(step.host_or_device, step.dtype, copy=True)


def _request(
    step: Step, entry: TensorEntry, views: MappedViews
) -> tuple[torch.Tensor, transfer.Request]:
    (chunk,) = entry.chunks
    flat = allocate(entry.numel, step.dtype, step.host_or_device)
    file_dtype = _file_dtype(step, views.index.path)
    request = transfer.Request(chunk.file, chunk.offset, chunk.nbytes, flat, file_dtype, fresh=True)
    # Dense, so the file's own order of the dimensions fits the same number of elements.
    return flat.as_strided(entry.shape, entry.stride), request


def _worn(step: Step, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it will be placed: a DTensor's successor, where a new one is to be made."""
    like = step.group.tensor
    return dressed(like, tensor) if is_sharded(like) and not step.in_place else tensor


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


def _placeable(
    step: Step, transform: Transform | None, raw: torch.Tensor, path: str
) -> tuple[Step, torch.Tensor]:
    """What a transform and the class of the model's tensor make of one tensor of the checkpoint."""
    like = step.group.tensor
    if is_sharded(like) and not step.handled:
        # A transform sees one tensor of the model, so that what it computes means the same on any
        # mesh: a DTensor, whose local shard is all that was read.
        assert transform is not None
        whole = _transformed(step, transform, dressed(like, raw), path)
        local = undressed(whole, like, step.key).contiguous()
        return step, _worn(step, _settled(step, local, path))
    made = raw if transform is None else _transformed(step, transform, raw, path)
    if step.handled or handles(type(step.group.tensor), type(made)):
        step, made = apply(step, made, path)
        if not is_plain(made):
            return step, made if made.device == step.device else made.to(step.device)
    return step, _settled(step, made, path)


def _settled(step: Step, made: torch.Tensor, path: str) -> torch.Tensor:
    """What a transform made, with the dtype and on the device that it is to have."""
    if step.in_place:
        _check_cast(step, made.dtype, path)
        return made.detach()
    floating = made.is_floating_point() and step.dtype.is_floating_point
    dtype = step.dtype if step.dtype_is_fixed and floating else made.dtype
    return made.detach().to(step.device, dtype)


def _transformed(step: Step, transform: Transform, raw: torch.Tensor, path: str) -> torch.Tensor:
    made = transform(step.key, raw)
    if not isinstance(made, torch.Tensor):
        raise TypeError(f"transform({step.key!r}, ...) returned {type(made).__name__}, no tensor")
    # Found out while placing, these would leave the model half loaded.
    if made.is_meta or made.layout != torch.strided or made.is_quantized:
        raise PlacementError(
            "transform returned a tensor that cannot be placed",
            file=path,
            entry=step.key,
            expected="a dense tensor with values",
            found=f"{made.layout}, {made.dtype}, on {made.device}",
        )
    made = _fitted(step, made)
    if not is_lazy(step.group.tensor) and made.shape != step.group.tensor.shape:
        raise MismatchError(
            "transform returned another shape than the model has",
            file=path,
            entry=step.key,
            expected=list(step.group.tensor.shape),
            found=list(made.shape),
        )
    return made


def _fitted(step: Step, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, without the dimension that torch < 0.4 gave to scalars."""
    scalar = (
        not is_lazy(step.group.tensor) and step.group.tensor.dim() == 0 and tensor.shape == (1,)
    )
    return tensor.view(()) if scalar else tensor


def _file_dtype(step: Step, path: str) -> torch.dtype:
    if step.entry is not None:
        return dtype_of(step.entry, path)
    assert step.candidate.value is not None
    return step.candidate.value.dtype


def _check_cast(step: Step, dtype: torch.dtype, path: str) -> None:
    if dtype.is_complex and not step.dtype.is_complex:
        raise PlacementError(
            "complex values cannot become real without losing their imaginary part",
            file=path,
            entry=step.key,
            expected=step.dtype,
            found=dtype,
            hint="Pass transform= to say what to keep, such as tensor.real or tensor.abs().",
        )
    if dtype != step.dtype and not _can_cast(dtype, step.dtype):
        raise PlacementError(
            "torch cannot cast between these dtypes",
            file=path,
            entry=step.key,
            expected=step.dtype,
            found=dtype,
            hint='Load without dtype=, and with mode="assign" if the model is live.',
        )


@cache
def _can_cast(source: torch.dtype, target: torch.dtype) -> bool:
    # Tried, because nothing in torch says it: packed 4-bit floats are one case that cannot.
    try:
        one = torch.zeros(16, dtype=torch.uint8, device="cpu")[: source.itemsize].view(source)
        torch.empty(1, dtype=target, device="cpu").copy_(one)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _overlapping(steps: Sequence[Step]) -> set[str]:
    """Keys whose bytes in the file are partly those of another key.

    A transform may write to what it gets. Two views of one map would each see what became of the
    other, depending on the order.
    """
    found: set[str] = set()
    file, end, holder = "", 0, ""
    ranges = [(step.entry.chunks[0], step) for step in steps if step.entry and step.entry.chunks]
    for chunk, step in sorted(ranges, key=lambda item: (item[0].file, item[0].offset)):
        if chunk.file == file and chunk.offset < end:
            found |= {holder, step.key}
        if chunk.file != file or chunk.offset + chunk.nbytes > end:
            file, end, holder = chunk.file, chunk.offset + chunk.nbytes, step.key
    return found


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
    return same_bits(left, right)


def _tensor(candidate: Candidate, views: MappedViews) -> torch.Tensor:
    if candidate.entry is not None:
        return views.view(candidate.entry)
    assert candidate.value is not None
    return candidate.value


def _glimpse(candidate: Candidate, views: MappedViews) -> str:
    tensor = _tensor(candidate, views)
    first = ", ".join(f"{value:.4g}" for value in tensor.flatten()[:3].tolist())
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} [{first}, ...]"

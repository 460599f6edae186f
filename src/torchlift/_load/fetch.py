"""Fetch the values of a plan, each by its route. The model does not change here."""

from __future__ import annotations

import copyreg
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from torchlift._checkpoint.kinds import dense_of
from torchlift._model.commit import ordinary_tensors
from torchlift._model.dtensor import (
    everything,
    is_dtensor,
    local_shape,
    local_tensor,
    unwrap,
    wrap,
)
from torchlift._model.handlers import (
    apply,
    bytes_of,
    clone_of,
    handles,
    is_plain,
    is_wrapper,
    oddity,
)
from torchlift._model.slots import is_lazy
from torchlift._plan.decide import Decided, Making, Step
from torchlift._plan.rules import Advance, Transform, can_cast
from torchlift._skeleton.construction import make, strided
from torchlift._sources.opening import Origin
from torchlift._sources.tensors import (
    Copy,
    FileTensor,
    MemoryTensor,
    SourceTensor,
    Values,
    copy_values,
    count_cast,
    is_dense,
    is_in_place,
    whole_copy,
)
from torchlift._system.memory import trim
from torchlift._transfer.pages import allocate
from torchlift._transfer.reading import BUDGET
from torchlift.errors import MismatchError, PlacementError, note
from torchlift.formats.index import TensorEntry

#: Bytes of tensors that wait for their transform. The rest of the budget is for staging.
_BATCH = BUDGET // 4

#: A step and its values. Values that are joined from several tensors can only be copied in place.
Prepared = tuple[Step, Values]


class Fetched(NamedTuple):
    """All values of a plan.

    Attributes:
        path: The path of the source.
        plain: Each plain step of the plan with its tensor.
        steps: Each other step with its values.
        made: The tensors without values in the source.
        overflowed: Key of a step -> the number of values that overflowed in its cast.
    """

    path: str
    plain: list[tuple[Step, torch.Tensor]]
    steps: list[Prepared]
    made: list[tuple[Making, torch.Tensor]]
    overflowed: dict[str, int]


def fetch_all(
    decided: Decided,
    origin: Origin,
    transform: Transform | None,
    advance: Advance,
) -> Fetched:
    """Prepare every tensor of a load, with as few reads as possible. The model does not change.

    Args:
        decided: The decisions of the load.
        origin: The source of the values.
        transform: The caller's transform, or None.
        advance: Called with a number of bytes as they arrive.

    Raises:
        MismatchError: If two tied names have different values, or a transform made another shape.
        PlacementError: If a value cannot be cast or placed, or a device runs out of memory.
        IntegrityError: If a file changed or could not be read.
    """
    steps, path = decided.steps, origin.path
    with ordinary_tensors(), _explain_full_device(path):
        others = [step for step in steps if not step.plain]
        for step in others:
            _check_ties(step, origin)
            if transform is None:
                _check_cast(step, step.one.dtype, path)
        plain = [(step, step.one.tensor()) for step in steps if step.plain]
        found: list[Prepared] = []
        ready = [step for step in others if not step.is_raw]
        overflowed = dict[str, int]()
        values = _by_route(ready, origin, advance, overflowed)
        for step, value in zip(ready, values, strict=True):
            if isinstance(value, torch.Tensor):
                value = _wrap_like_target(step, _restride(step, _drop_old_dim(step, value)))
            _require_plain(step, value, path)
            found.append((step, value))
        rest = [step for step in others if step.is_raw]
        for batch in _split_into_batches(rest):
            # Popped one by one, so that an untransformed tensor is freed as soon as it is used.
            raw = _by_route(batch, origin, lambda _: None, overflowed)
            for step in batch:
                tensor = raw.pop(0)
                assert isinstance(tensor, torch.Tensor)
                found.append(_make_value(step, transform, tensor, path, overflowed))
                advance(step.span if step.owned else 0)
            trim()  # memory that a transform or a handler freed
        made = _make([item for item in decided.makings if item.last is None])
        every: list[Step | Making] = [*decided.makings, *steps]
        if any(one.last is not None for one in every):  # in few models
            of: dict[int, Values] = {id(item): value for item, value in (*plain, *found, *made)}
            made += [(item, _alias(item, of)) for item in decided.makings if item.last is not None]
            plain = [(s, v if s.last is None else _alias(s, of)) for s, v in plain]
            found = [(s, v if s.last is None else _alias(s, of)) for s, v in found]
        return Fetched(path, plain, found, made, overflowed)


def _alias(one: Step | Making, values: Mapping[int, Values]) -> torch.Tensor:
    """Return the value of the tensor whose memory this one gets, as another object."""
    value = values[id(one.last)]
    assert isinstance(value, torch.Tensor)  # only values for a copy in place are not joined yet
    return value.detach()


@contextmanager
def _explain_full_device(path: str) -> Iterator[None]:
    """Turn an out-of-memory error of the process or a device into one that names the way out."""
    try:
        yield
    except MemoryError as error:
        raise PlacementError(
            "the process does not have enough memory for the tensors",
            file=path,
            found=str(error) or None,
            hint='Pass a smaller dtype, such as dtype="bfloat16", or raise the limit of the '
            "process (ulimit -v).",
        ) from error
    except torch.OutOfMemoryError as error:
        raise PlacementError(
            "a device does not have enough memory for its tensors",
            file=path,
            found=str(error).partition("\n")[0],
            hint="Free memory there, pass a smaller dtype=, or pass a device= that spreads the "
            "tensors, for example torchlift.remap.fit(...).",
        ) from error


def _make(makings: Sequence[Making]) -> list[tuple[Making, torch.Tensor]]:
    """Construct tensors on meta, and move live tensors to their device."""
    lacking = [item for item in makings if item.is_constructed]
    live = [item for item in makings if not item.is_constructed]
    made = make([item.group for item in lacking], [item.device for item in lacking])
    tensors = [*made, *(item.group.tensor.detach() for item in live)]
    return [
        (item, tensor.to(item.device, item.dtype))
        for item, tensor in zip([*lacking, *live], tensors, strict=True)
    ]


def _by_route(
    steps: Sequence[Step], origin: Origin, advance: Advance, overflowed: dict[str, int]
) -> list[Values]:
    """Return the tensors of the steps. Those that are read or copied are so all together.

    Args:
        steps: The steps.
        origin: The source of the values.
        advance: Called with a number of bytes as they arrive.
        overflowed: Receives the number of values that overflow, by the key of a step.
    """
    tensors: list[Values] = []
    reads, copies = list[Copy](), list[Copy]()
    cast: list[tuple[Step, Copy]] = []
    for step in steps:
        one = step.one
        if step.route == "view":
            tensors.append(one.values())
        elif isinstance(one, FileTensor):
            reads.append(Copy(one, _new(step, one.entry), everything(one.shape)))
            tensors.append(reads[-1].target)
            cast.append((step, reads[-1]))
        else:
            value = one.value if isinstance(one, MemoryTensor) and not step.spans else None
            if value is not None and (is_wrapper(value) or oddity(value)):
                device, dtype = step.fetched_as
                tensors.append(_to(clone_of(value, device), device, dtype))
            else:
                copies.append(_copy(step))
                tensors.append(copies[-1].target)
                cast.append((step, copies[-1]))
            advance(step.span)
    copy_values(reads, advance)
    copy_values(copies)
    for step, copy in cast:
        if count := count_cast(copy):
            overflowed[step.key] = count
    return tensors


def _new(step: Step, entry: TensorEntry) -> torch.Tensor:
    """Return new memory for a tensor of a file. A dense one keeps its strides."""
    device, dtype = step.fetched_as
    flat, stride = allocate(entry.numel, dtype, device), step.stride
    if stride is not None and not step.is_raw and entry.numel:
        span = 1 + sum((size - 1) * n for size, n in zip(entry.shape, stride, strict=True))
        if span == entry.numel:  # without gaps: read straight into the strides of the model
            return flat.as_strided(entry.shape, stride)
    if is_dense(entry):  # the same number of elements
        return flat.as_strided(entry.shape, entry.stride)
    return flat.view(entry.shape)


def _copy(step: Step) -> Copy:
    """Return a copy of a value in memory, or of this rank's slice of it, into new memory."""
    one, (device, dtype) = step.one, step.fetched_as
    if step.spans is None and isinstance(one, MemoryTensor):  # its strides are kept
        made = torch.empty_like(one.value, dtype=dtype, device=device, requires_grad=False)
        return Copy(one.value, made, everything(one.shape))
    spans = everything(one.shape) if step.spans is None else step.spans
    return Copy(one.values(), torch.empty(local_shape(spans), dtype=dtype, device=device), spans)


def _restride(step: Step, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the strides of the step."""
    return tensor if step.stride is None else strided(tensor, step.stride)


def _wrap_like_target(step: Step, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as it will be placed: a new DTensor around its local tensor."""
    like = step.group.tensor
    return wrap(like, tensor) if is_dtensor(like) and not step.in_place else tensor


def _split_into_batches(steps: Sequence[Step]) -> Iterator[list[Step]]:
    batch: list[Step] = []
    size = 0
    for step in steps:
        if batch and size + step.one.nbytes > _BATCH:
            yield batch
            batch, size = [], 0
        batch.append(step)
        size += step.one.nbytes
    if batch:
        yield batch


def _make_value(
    step: Step,
    transform: Transform | None,
    raw: torch.Tensor,
    path: str,
    overflowed: dict[str, int],
) -> Prepared:
    """Apply the transform, and the handler of the class, to one tensor."""
    like = step.group.tensor
    if is_dtensor(like) and not step.is_handled:
        # The transform gets a DTensor, so its result is the same on any mesh. Only the local
        # tensor was read.
        assert transform is not None
        whole = _transform_step(step, transform, wrap(like, raw), path)
        local = unwrap(whole, like, step.key).contiguous()
        return step, _wrap_like_target(step, _cast(step, local, path, overflowed))
    made = raw if transform is None else _transform_step(step, transform, raw, path)
    registered = handles(type(like), type(made))
    if step.is_handled or registered:
        made = _convert(step, made, path)
        if not is_plain(made):
            return step, made if made.device == step.device else made.to(step.device)
    made = _restride(step, _cast(step, made, path, overflowed))
    if step.in_place or not registered:  # a caller's handler may return a plain tensor
        _require_plain(step, made, path)
    return step, made


def _convert(step: Step, value: torch.Tensor, path: str) -> torch.Tensor:
    """Return what the handler of a class, or the class itself, makes of a value.

    Raises:
        PlacementError: If the class does not take the value, or the result cannot be placed.
    """
    like = step.group.tensor
    try:
        made = apply(like, value, assign=step.mode == "assign" or like.is_meta)
    except PlacementError as error:
        raise PlacementError(error.reason, file=path, entry=step.key) from error
    except Exception as error:
        if handles(type(like), type(value)):
            raise
        raise not_taken_error(step, value, path, error) from error
    if is_plain(made):
        return made
    if step.in_place and not step.is_handled:
        raise PlacementError(
            "transform returned a tensor of another class for a live one, which keeps its own",
            file=path,
            entry=step.key,
            expected="a plain tensor",
            found=type(made).__name__,
            hint='Load with mode="swap" or "assign", or into a model on meta.',
        )
    expected, found = _slots(like), _slots(made)
    if step.mode == "swap" and found != expected:
        raise PlacementError(
            "a handler returned a class with other slots than the model's tensor has, so the two "
            "cannot be exchanged",
            file=path,
            entry=step.key,
            expected=f"{type(like).__name__} with slots {expected}",
            found=f"{type(made).__name__} with slots {found}",
            hint='Load with mode="assign".',
        )
    return made


def _require_plain(step: Step, value: Values, path: str) -> None:
    """Refuse a plain tensor for a wrapper that would be replaced.

    Raises:
        PlacementError: If the class of the live tensor keeps its values in tensors of its own.
    """
    live = local_tensor(step.group.tensor)
    if step.in_place or is_lazy(live) or not is_wrapper(live):
        return
    if isinstance(value, torch.Tensor) and not is_wrapper(local_tensor(value)):
        kind = type(live).__name__
        raise PlacementError(
            f"its class {kind} holds its values in tensors of its own and does not say how a "
            "plain tensor becomes one",
            file=path,
            entry=step.key,
            hint="Load into the plain model, and convert that. Or pass transform=..., or a handler "
            f"that converts each tensor: swap.module_load({kind}, handler).",
        )


def not_taken_error(step: Step, value: Values, path: str, error: Exception) -> PlacementError:
    """Return the error for values that a class does not take."""
    return PlacementError(
        "its class does not take such values",
        file=path,
        entry=step.key,
        expected=type(local_tensor(step.group.tensor)).__name__,
        found=f"{type(value).__name__} ({str(error).partition(chr(10))[0][:200]})",
        hint="Save it from a model of the same classes, or load into a plain model and convert "
        "that. Or convert each tensor: transform=..., or swap.module_load(...).",
    )


def _slots(tensor: torch.Tensor) -> list[str]:
    return sorted(set(copyreg._slotnames(type(tensor))))  # type: ignore[attr-defined]


def _cast(step: Step, made: torch.Tensor, path: str, overflowed: dict[str, int]) -> torch.Tensor:
    """Return the result of a transform with the dtype and on the device of its step."""
    if step.in_place:
        _check_cast(step, made.dtype, path)
        return made.detach()
    floating = made.is_floating_point() and step.dtype.is_floating_point
    dtype = step.dtype if step.is_fixed and floating else made.dtype
    moved = _to(made.detach(), step.device, dtype)
    count = count_cast(whole_copy(made.detach(), moved)) if is_plain(moved) else 0
    if count:
        overflowed[step.key] = count
    return moved


def _to(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    # torchao's NF4Tensor is dequantised by any dtype that is passed to it, even its own.
    return tensor.to(device) if tensor.dtype == dtype else tensor.to(device, dtype)


def apply_transform(
    transform: Transform, name: str, raw: torch.Tensor, path: str, key: str | None = None
) -> torch.Tensor:
    """Call a transform on one tensor.

    Args:
        transform: The caller's transform.
        name: The name that the transform gets.
        raw: The tensor. The transform may write to it.
        path: The path of the source.
        key: The name in the source, if it differs.

    Raises:
        TypeError: If it did not return a tensor.
    """
    try:
        made = transform(name, raw)
    except Exception as error:
        note(error, f"transform was called with {name!r}, {key or name!r} in {path}")
        raise
    if not isinstance(made, torch.Tensor):
        raise TypeError(f"transform({name!r}, ...) returned {type(made).__name__}, not a tensor")
    return made


def _transform_step(step: Step, transform: Transform, raw: torch.Tensor, path: str) -> torch.Tensor:
    made = apply_transform(transform, step.key, raw, path, step.one.key)
    if step.needs_scale and made.dtype == raw.dtype:
        raise PlacementError(
            "transform returned the codes of a quantised tensor, which are not its values",
            file=path,
            entry=step.one.key,
            expected="values that are multiplied by their scales",
            found=made.dtype,
            hint="Let transform apply the scales of this tensor.",
        )
    # Such a tensor would raise while it is placed, with the model half loaded.
    if odd := oddity(made):
        raise PlacementError(
            "transform returned a tensor that cannot be placed",
            file=path,
            entry=step.key,
            expected="a dense tensor with values",
            found=odd,
        )
    made = _drop_old_dim(step, made)
    if not is_lazy(step.group.tensor) and made.shape != step.group.tensor.shape:
        raise MismatchError(
            "transform returned another shape than the model has",
            file=path,
            entry=step.key,
            expected=list(step.group.tensor.shape),
            found=list(made.shape),
        )
    return made


def _drop_old_dim(step: Step, tensor: torch.Tensor) -> torch.Tensor:
    """Return a scalar that torch < 0.4 saved with shape [1] as a scalar."""
    like = step.group.tensor
    return tensor.view(()) if not is_lazy(like) and like.dim() == 0 == tensor.dim() - 1 else tensor


def _check_cast(step: Step, dtype: torch.dtype, path: str) -> None:
    if dtype.is_complex and not step.dtype.is_complex:
        reason = "complex values cannot become real without losing their imaginary part"
        hint = "Pass transform= to say what to keep, such as tensor.real or tensor.abs()."
    elif dtype != step.dtype and not can_cast(dtype, step.dtype):
        reason = "torch cannot cast between these dtypes"
        hint = 'Load without dtype=, and with mode="assign" if the model is live.'
    else:
        return
    raise PlacementError(
        reason, file=path, entry=step.key, expected=step.dtype, found=dtype, hint=hint
    )


def _check_ties(step: Step, origin: Origin) -> None:
    """Refuse tied names with different values in the source."""
    for other in step.others:
        if not _same_values(step.one, other):
            raise MismatchError(
                "the model ties two keys that have different values in the checkpoint",
                file=origin.path,
                entry=step.one.key,
                expected=f"the values of {other.key!r}",
                hint="Pass rename= to drop the one that is wrong, or untie the model.",
            )


def _same_values(one: SourceTensor, two: SourceTensor) -> bool:
    a, b = (item.entry and _content(item.entry) for item in (one, two))
    if a and a == b:
        return True
    left, right = one.tensor(), two.tensor()
    if left is right or is_in_place(left, right):
        return True
    if (left.dtype, left.shape, left.layout) != (right.dtype, right.shape, right.layout):
        return False
    # As bytes: a NaN equals itself. A sparse tensor has several parts.
    parts, others = ([*map(bytes_of, dense_of(each))] for each in (left, right))
    return len(parts) == len(others) and all(map(torch.equal, parts, others))


def _content(entry: TensorEntry) -> tuple[object, ...]:
    return entry.type_name, entry.shape, entry.stride, entry.chunks, entry.encoding

"""Model state dicts under canonical names: checked as a whole, then put into a wrapped model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from torchlift._model.dtensor import dressed, held, home, is_dtensor, local_shape, spans_of
from torchlift._model.names import Names, Slot
from torchlift.distributed.custom import is_custom
from torchlift.distributed.model_state import own
from torchlift.distributed.moves import Move, Sent, whole_move
from torchlift.distributed.options import StateDictMismatch, StateDictOptions

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

#: Name -> (shape in the model, shape in the state dict).
Shapes = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


@dataclass
class ModelPlan:
    """What loading a model will do; nothing has changed while there is only a plan.

    Attributes:
        missing, unexpected: canonical names.
        moves: whole tensors on their way into tensors of the model.
        handed: canonical name -> what ``load_state_dict`` of the model receives for it.
        assign: whether it must put tensors in place instead of copying, as meta tensors need.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    handed: dict[str, Any] = field(default_factory=dict)
    assign: bool = False
    metadata: OrderedDict[str, Any] | None = None


def plan_model(
    names: Names,
    offered: Mapping[str, Any],
    options: StateDictOptions,
    device: torch.device,
    alone: bool = True,
) -> ModelPlan:
    """Match a state dict with a model.

    Args:
        names: of the model.
        offered: canonical name -> value; on ranks that rank 0 sends to, `Sent` for tensors.
        options: how to load.
        device: where a meta tensor that is not a DTensor comes to live.
        alone: False where a key that this model lacks may be meant for another rank's.

    Raises:
        StateDictMismatch: a shape does not fit, or with ``strict`` keys do not.
    """
    plan = ModelPlan(assign=any(s.tensor is not None and s.tensor.is_meta for s in names.slots))
    known = {slot.fqn for slot in names.slots}
    plan.unexpected = [k for k in offered if k not in known and not is_custom(names, k)]
    shapes: Shapes = {}
    new: dict[int, torch.Tensor] = {}
    for slot in names.slots:
        if slot.fqn not in offered:
            if not _excused(names, slot, offered) and not _left_out(slot, options):
                plan.missing.append(slot.fqn)
            continue
        value = offered[slot.fqn]
        if not _fits(slot, value, names):
            assert slot.tensor is not None
            shapes[slot.fqn] = (tuple(slot.tensor.shape), tuple(value.shape))
            continue
        plan.handed[slot.fqn] = _prepare(slot, value, plan, new, names, options, device)
    for name in offered:
        if name not in known and is_custom(names, name):
            plan.handed[name] = _arriving(offered[name], plan, device)
    _hand_to_twins(plan, names, new)
    _refuse(plan, shapes, options.strict, alone)
    return plan


def _hand_to_twins(plan: ModelPlan, names: Names, new: dict[int, torch.Tensor]) -> None:
    """Give a tied name that is not offered what its twin got."""
    for slot in names.slots:
        if slot.fqn not in plan.handed and id(slot.tensor) in new:
            plan.handed[slot.fqn] = new[id(slot.tensor)]


def _refuse(plan: ModelPlan, shapes: Shapes, strict: bool, alone: bool) -> None:
    missing = plan.missing if strict else []
    unexpected = plan.unexpected if strict and alone else []
    if shapes or missing or unexpected:
        raise mismatch(missing, unexpected, shapes)


def mismatch(
    missing: list[str],
    unexpected: list[str],
    shapes: Shapes,
) -> StateDictMismatch:
    """The one error that lists everything that does not fit.

    Example:
        >>> print(mismatch(["a"], [], {}))
        the state dict does not fit the model: missing 'a'. Pass strict=False to load what fits.
    """
    parts = []
    if missing:
        parts.append(f"missing {some(missing)}")
    if unexpected:
        parts.append(f"unexpected {some(unexpected)}")
    if shapes:
        listed = [f"{k}: model {list(a)}, state dict {list(b)}" for k, (a, b) in shapes.items()]
        parts.append(f"shapes differ for {some(listed)}")
    return StateDictMismatch(
        f"the state dict does not fit the model: {'; '.join(parts)}",
        missing_keys=missing,
        unexpected_keys=unexpected,
        mismatched=shapes,
        hint=None if shapes else "Pass strict=False to load what fits.",
    )


def some(items: list[str], limit: int = 8) -> str:
    """The first of many names, in quotes.

    Example:
        >>> some(["a", "b", "c"], limit=2)
        "'a', 'b' and 1 more"
    """
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(map(repr, items[:limit])) + more


def _excused(names: Names, slot: Slot, offered: Mapping[str, Any]) -> bool:
    """Whether a name may be absent: its tensor comes under another name, or its module decides."""
    if slot.tensor is None:
        return is_custom(names, slot.fqn)
    if any(other in offered for other in names.fqns(slot.tensor)):
        return True
    old_norm = isinstance(slot.module, _NormBase) and slot.fqn.endswith("num_batches_tracked")
    return old_norm or is_custom(names, slot.fqn)


def _left_out(slot: Slot, options: StateDictOptions) -> bool:
    """Whether what was read with the same options lacks it; a meta tensor has no value to keep."""
    chosen = options.strict and options.ignore_frozen_params and slot.is_frozen
    return chosen and slot.tensor is not None and not slot.tensor.is_meta


def _fits(slot: Slot, value: Any, names: Names) -> bool:
    live = slot.tensor
    if live is None or is_lazy(live) or not hasattr(value, "shape"):
        return True
    # torch loads a vector of one element into a scalar, for files older than scalars.
    scalar = isinstance(value, torch.Tensor) and live.shape == () and value.shape == (1,)
    return value.shape == live.shape or scalar or is_custom(names, slot.fqn)


def _prepare(
    slot: Slot,
    value: Any,
    plan: ModelPlan,
    new: dict[int, torch.Tensor],
    names: Names,
    options: StateDictOptions,
    device: torch.device,
) -> Any:
    """What ``load_state_dict`` is to receive for one slot, and the moves that fill it."""
    live = slot.tensor
    if live is None or is_lazy(live) or is_custom(names, slot.fqn):
        if options.full_state_dict and is_dtensor(live) and _is_whole(value, live):
            made = _empty(live, value, options, device).detach()
            plan.moves.append(Move(value, held(made), spans_of(live)))
            return made
        return _arriving(value, plan, device)
    if not isinstance(value, (torch.Tensor, Sent)):
        raise _no_tensor(slot.fqn, value)
    if live.is_meta:
        if id(live) not in new:
            new[id(live)] = _empty(live, value, options, device)
        live = new[id(live)]
    elif not plan.assign and not options.full_state_dict:
        if is_dtensor(live) != is_dtensor(value) or not _same_mesh(value, live):
            raise _layout_error(slot.fqn, value, live)
        return value
    if is_dtensor(value):
        if is_dtensor(live) and _same_layout(value, live):
            plan.moves.append(whole_move(value.to_local().detach(), live.to_local().detach()))
        elif not plan.assign and is_dtensor(live) and _same_mesh(value, live):
            return value  # load_state_dict redistributes it
        else:
            raise _layout_error(slot.fqn, value, live)
    else:
        whole = live.to_local() if is_dtensor(live) else live
        if live.shape == () and isinstance(value, torch.Tensor) and value.shape != ():
            value = value.reshape(())
        plan.moves.append(Move(value, whole.detach(), spans_of(live)))
    return live


def _is_whole(value: Any, live: DTensor) -> bool:
    """Whether a value is all of a tensor of which a module's own code gets its rank's part."""
    plain = isinstance(value, (torch.Tensor, Sent)) and not is_dtensor(value)
    return plain and value.shape == live.shape


def _same_layout(value: DTensor, live: DTensor) -> bool:
    return (value.device_mesh, value.placements) == (live.device_mesh, live.placements)


def _no_tensor(fqn: str, value: object) -> StateDictMismatch:
    return StateDictMismatch(
        "the state dict holds no tensor where the model has one",
        entry=fqn,
        found=type(value).__name__,
    )


def _same_mesh(value: object, live: object) -> bool:
    """Whether torch can copy one into the other, as far as meshes are concerned."""
    return not (is_dtensor(value) and is_dtensor(live)) or value.device_mesh == live.device_mesh


def _layout_error(fqn: str, value: torch.Tensor | Sent, live: torch.Tensor) -> StateDictMismatch:
    def layout(tensor: object) -> str:
        if not is_dtensor(tensor):
            return "a plain tensor"
        return f"{tensor.placements} on {tensor.device_mesh}"

    return StateDictMismatch(
        "the state dict has another layout than the model",
        entry=fqn,
        expected=layout(live),
        found=layout(value),
        hint="Pass whole tensors and full_state_dict=True: each rank takes its own part.",
    )


def _empty(
    live: torch.Tensor, value: Any, options: StateDictOptions, device: torch.device
) -> torch.Tensor:
    """A tensor with memory in place of a meta one; ties stay ties because it is made once."""
    if is_dtensor(live):
        where = torch.device("cpu") if options.cpu_offload else home(live)
        local = torch.empty(local_shape(spans_of(live)), dtype=value.dtype, device=where)
        made: torch.Tensor = dressed(live, local)
    else:
        made = torch.empty(live.shape, dtype=value.dtype, device=device)
    if isinstance(live, nn.Parameter):
        return nn.Parameter(made, requires_grad=live.requires_grad)
    return made


def _arriving(value: Any, plan: ModelPlan, device: torch.device) -> Any:
    """A value that the module's own code will look at: whole, wherever it comes from."""
    if not isinstance(value, Sent):
        return value
    target = torch.empty(value.shape, dtype=value.dtype, device=device)
    plan.moves.append(Move(value, target, spans_of(target)))
    return target


def apply_model(model: nn.Module, plan: ModelPlan, names: Names, strict: bool) -> None:
    """Give the model its state dict, after the moves are done, so that all its hooks run.

    Raises:
        StateDictMismatch: a module's own loading code reported keys.
    """
    raw: OrderedDict[str, Any] = OrderedDict(
        (names.key(name), value) for name, value in plan.handed.items()
    )
    if plan.metadata is not None:
        raw._metadata = plan.metadata  # type: ignore[attr-defined]
    more: dict[str, Any] = {"assign": True} if plan.assign else {}
    result = own(model, "load_state_dict")(raw, strict=False, **more)
    if result is None:
        return
    known = {slot.fqn for slot in names.slots}
    missing = [names.canonical(key) for key in result.missing_keys]
    missing = [
        m for m in missing if m not in plan.handed and (is_custom(names, m) or m not in known)
    ]
    unexpected = [names.canonical(key) for key in result.unexpected_keys]
    plan.missing += [name for name in missing if name not in plan.missing]
    plan.unexpected += [name for name in unexpected if name not in plan.unexpected]
    if strict and (plan.missing or plan.unexpected):
        raise mismatch(plan.missing, plan.unexpected, {})

"""Where each tensor of an optimizer's state goes: its device, dtype, and part of a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torchlift._model.dtensor import dressed, is_dtensor, local_shape, spans_of
from torchlift._plan.sources import whole_copy
from torchlift._plan.steps import Copy, Sent
from torchlift.distributed.fresh import FreshStates, adopt
from torchlift.distributed.options import StateDictMismatch, StateDictOptions


@dataclass(frozen=True, slots=True)
class Target:
    """The parameter whose state is being loaded.

    Attributes:
        name: its canonical name.
        param: the parameter.
        group: its group in the optimizer.
        live: the state it has now, perhaps none.
        fresh: what it would start with, asked only when the live state does not tell.
        options: how to load.
    """

    name: str
    param: torch.Tensor
    group: dict[str, Any]
    live: dict[Any, Any]
    fresh: FreshStates
    options: StateDictOptions


def place(target: Target, saved: Any, moves: list[Copy]) -> dict[Any, Any]:
    """The new state of one parameter, and the moves that will fill it.

    Tensors keep their saved dtype. Where the optimizer already has a tensor like the new one, it
    is filled in place, so that whoever holds it (a captured graph, say) keeps seeing it.
    """
    if not isinstance(saved, dict):
        raise StateDictMismatch(
            "the state of a parameter is not a dict", entry=target.name, found=type(saved).__name__
        )
    kept = {} if target.options.strict else dict(target.live)
    return kept | {key: _place(target, saved[key], (key,), moves) for key in saved}


def _place(target: Target, value: Any, path: tuple[Any, ...], moves: list[Copy]) -> Any:
    if isinstance(value, dict):
        return {key: _place(target, item, (*path, key), moves) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_place(target, item, (*path, i), moves) for i, item in enumerate(value)]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, (torch.Tensor, Sent)):
        return _tensor(target, value, path, moves)
    return value


def _tensor(
    target: Target, value: torch.Tensor | Sent, path: tuple[Any, ...], moves: list[Copy]
) -> torch.Tensor:
    live = _at(target.live, path)
    like = _like(target, value, live, path)
    _check(target, value, like, path)
    device, dtype = _device(target, value, live, path)
    if _same(live, like, value.shape, device, dtype) and live is not None:
        if live is not value:
            moves.append(_move(value, live))
        return live
    if isinstance(value, torch.Tensor) and _alike(value, like, device, dtype) and adopt(value):
        return value
    made = _empty(value, like, device, dtype)
    moves.append(_move(value, made))
    return made


def _like(
    target: Target, value: torch.Tensor | Sent, live: torch.Tensor | None, path: tuple[Any, ...]
) -> torch.Tensor | None:
    """The DTensor whose layout the new tensor takes over, or None for a plain tensor."""
    if is_dtensor(value):
        return value
    if not is_dtensor(target.param) or len(value.shape) == 0:
        return None
    if live is not None:
        return live if is_dtensor(live) else None
    if not target.options.full_state_dict and value.shape != target.param.shape:
        return None
    # Factored moments (Adafactor) have a shape of their own, so only their maker knows how they
    # are laid out; what has the parameter's shape is laid out as it is.
    if value.shape == target.param.shape:
        return target.param
    made = _at(target.fresh.of(target.param), path)
    return made if is_dtensor(made) else None


def _check(
    target: Target, value: torch.Tensor | Sent, like: torch.Tensor | None, path: tuple[Any, ...]
) -> None:
    where = ".".join(map(str, (target.name, *path)))
    if like is not None and like.shape != value.shape:
        raise StateDictMismatch(
            "a saved state has another shape than the optimizer's",
            entry=where,
            expected=list(like.shape),
            found=list(value.shape),
            mismatched={where: (tuple(like.shape), tuple(value.shape))},
        )
    if like is None and len(value.shape) > 0 and not is_dtensor(target.param):
        expected = _at(target.live, path)
        if expected is None and value.shape != target.param.shape:
            expected = _at(target.fresh.of(target.param), path)
        if expected is not None and expected.shape != value.shape:
            _check(target, value, expected, path)
    if like is not None and not target.options.full_state_dict and not is_dtensor(value):
        raise StateDictMismatch(
            "a whole tensor was saved, and the parameter is sharded",
            entry=where,
            found=f"a plain tensor of shape {list(value.shape)}",
            hint="Pass full_state_dict=True: each rank takes its own part.",
        )


def _device(
    target: Target,
    value: torch.Tensor | Sent,
    live: torch.Tensor | None,
    path: tuple[Any, ...],
) -> tuple[torch.device, torch.dtype]:
    """As `torch.optim.Optimizer.load_state_dict` has it, except that no dtype is changed."""
    param = target.param.device
    if path[-1] == "step":
        if target.group.get("capturable") or target.group.get("fused"):
            return param, torch.float32
        return torch.device("cpu"), value.dtype
    if len(value.shape) == 0 and live is not None:
        return live.device, value.dtype
    return param, value.dtype


def _at(state: Any, path: tuple[Any, ...]) -> torch.Tensor | None:
    for key in path:
        try:
            state = state[key]
        except (KeyError, IndexError, TypeError):
            return None
    return state if isinstance(state, torch.Tensor) else None


def _same(
    live: torch.Tensor | None,
    like: torch.Tensor | None,
    shape: torch.Size,
    device: torch.device,
    dtype: torch.dtype,
) -> bool:
    return live is not None and live.shape == shape and _alike(live, like, device, dtype)


def _alike(
    tensor: torch.Tensor, like: torch.Tensor | None, device: torch.device, dtype: torch.dtype
) -> bool:
    if (tensor.device, tensor.dtype) != (device, dtype) or tensor.layout is not torch.strided:
        return False
    if like is None or not is_dtensor(like):
        return not is_dtensor(tensor)
    if not is_dtensor(tensor):
        return False
    return (tensor.device_mesh, tensor.placements) == (like.device_mesh, like.placements)


def _empty(
    value: torch.Tensor | Sent, like: torch.Tensor | None, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    if like is None or not is_dtensor(like):
        if isinstance(value, torch.Tensor):
            return torch.empty_like(value, device=device, dtype=dtype, requires_grad=False)
        return torch.empty(value.shape, device=device, dtype=dtype)
    return dressed(like, torch.empty(local_shape(spans_of(like)), device=device, dtype=dtype))


def _move(value: torch.Tensor | Sent, into: torch.Tensor) -> Copy:
    local = into.to_local().detach() if is_dtensor(into) else into.detach()
    if is_dtensor(value):
        return whole_copy(value.to_local().detach(), local)
    source = value.detach() if isinstance(value, torch.Tensor) else value
    return Copy(source, local, spans_of(into))

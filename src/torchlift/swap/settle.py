"""Where the plan of a load meets live modules: who is in the way, and what a class has to say."""

from __future__ import annotations

import copyreg
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from torchlift.content import is_plain, is_wrapper
from torchlift.errors import PlacementError
from torchlift.slots import is_lazy
from torchlift.swap import handlers
from torchlift.swap.blockers import Blocker, find, refusal
from torchlift.swap.holders import REDUCER

if TYPE_CHECKING:
    from torchlift.rules import AnyMode
    from torchlift.steps import Step

_RELEASE = (
    'Release what holds it (swap.preflight lists all of it), or load with mode="auto", which '
    "takes for each tensor a way that keeps the references."
)


def settle(steps: Iterable[Step], asked: AnyMode) -> Iterator[Step]:
    """Check everything that is to be swapped; say no, or find another way for each tensor.

    Raises:
        PlacementError: with ``mode="swap"``, a tensor that cannot be swapped; in any mode, one
            for which no way keeps what holds it.
    """
    steps = list(steps)
    swapped = [step for step in steps if step.mode == "swap"]
    for step in steps:
        if step.mode == "swap" or (step.mode == "copy" and not step.in_place):
            _require_handler(step)
    found = find([step.group for step in swapped])
    if found and asked == "swap":
        raise refusal(found, hint=_RELEASE)
    blocked = {item.key: item for item in found}
    for step in steps:
        if step.mode == "swap":
            step = _fallback(step, blocked.get(step.group.fqn))
        yield step


def apply(step: Step, source: torch.Tensor, path: str) -> tuple[Step, torch.Tensor]:
    """Ask the handler, or the class itself, what is to be placed.

    Raises:
        PlacementError: what it made cannot be placed.
    """
    destination = step.group.tensor
    assign = step.mode == "assign" or destination.is_meta
    try:
        made = handlers.apply(destination, source, assign=assign)
    except PlacementError as error:
        raise PlacementError(error.reason, file=path, entry=step.key) from error
    if step.in_place and not is_plain(made) and not step.handled:
        # Found out only now: a transform returned a subclass for a plain, live tensor.
        found = find([step.group])
        if found:
            raise refusal(found, hint=_RELEASE)
        step = replace(step, mode="swap")
    slots = _slots(made), _slots(destination)
    if step.mode == "swap" and not is_plain(made) and slots[0] != slots[1]:
        raise PlacementError(
            "a handler returned a class whose slots differ from those of the model's tensor, "
            "so that the two cannot be exchanged",
            file=path,
            entry=step.key,
            expected=f"{type(destination).__name__} with slots {sorted(slots[1])}",
            found=f"{type(made).__name__} with slots {sorted(slots[0])}",
            hint='Load with mode="assign".',
        )
    return step, made


def _slots(tensor: torch.Tensor) -> set[str]:
    return set(copyreg._slotnames(type(tensor)))  # type: ignore[attr-defined]


def _require_handler(step: Step) -> None:
    tensor = step.group.tensor
    kind = type(tensor)
    if not is_wrapper(tensor) or step.handled or kind.__module__.startswith("torch.distributed"):
        return
    raise PlacementError(
        f"its class {kind.__name__} holds its values in tensors of its own and does not say how a "
        "plain tensor becomes one",
        entry=step.group.fqn,
        hint=f"Register a handler: swap.module_load({kind.__name__}, handler).",
    )


def _fallback(step: Step, blocker: Blocker | None) -> Step:
    """The step as it will be done, with a word about what is lost."""
    tensor = step.group.tensor
    if is_lazy(tensor):
        return step
    stays = (step.device, step.dtype) == (tensor.device, tensor.dtype)
    notes = [] if step.note is None else [step.note]
    if blocker is not None:
        held = f" (held by {'; '.join(blocker.holders)})" if blocker.holders else ""
        why = f"{blocker.reason}{held}"
        if tensor.is_meta or (step.handled and not stays):
            step, way = replace(step, mode="assign"), f"assigned, not swapped: {why}"
        elif step.handled or stays:
            step, way = replace(step, mode="copy"), f"copied in place, not swapped: {why}"
        else:
            if REDUCER in blocker.holders:
                raise PlacementError(
                    "cannot change its dtype or device inside DistributedDataParallel, whose hooks "
                    "would no longer see its gradient",
                    entry=step.group.fqn,
                    expected=f"{tensor.dtype} on {tensor.device}",
                    found=f"{step.dtype} on {step.device} asked for",
                    hint="Load before wrapping the module, or keep its dtype and device.",
                )
            way = f"content set through .data, not exchanged: {why}"
            if "memory" in blocker.reason or "view" in blocker.reason:
                way += "; what shares its memory keeps the old values"
        notes.append(way)
    if step.mode == "swap" and not step.handled and not stays and not tensor.is_meta:
        grad = tensor.grad if tensor.is_leaf else None
        if grad is not None and (grad.dtype, grad.device) != (step.dtype, step.device):
            name = str(grad.dtype).removeprefix("torch.")
            notes.append(f"its .grad is dropped: it is {name} on {grad.device}")
    return replace(step, note="; ".join(notes) or None) if notes else step

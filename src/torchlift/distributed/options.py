"""The arguments of the state dict functions, and the error that they raise."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from enum import Flag, auto
from typing import Any, NamedTuple

import torch
from torch import nn

from torchlift._model.dtensor import is_dtensor, layout_of, local_tensor
from torchlift._model.handlers import oddity
from torchlift._plan.suggest import empty_hint, suggest_rename
from torchlift._system.containers import leaves
from torchlift._system.text import clipped_list
from torchlift.errors import Hint
from torchlift.errors import StateDictMismatch as StateDictMismatch

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


@dataclass
class StateDictOptions:
    """Options of `get_state_dict` and `set_state_dict`, as in torch.

    Attributes:
        full_state_dict: Gather every tensor. For a load: the state dict holds complete tensors, and
            every rank copies its own slices. It must be equal on every rank.
        cpu_offload: Move tensors to the CPU. With `full_state_dict`, only the first rank gets the
            result, and the others get an empty dict. If the model has DTensors, call it on all
            ranks. For pipeline stages, pass ``process_group=`` with the ranks of each stage.
        ignore_frozen_params: Leave out parameters that do not require gradients. A strict load does
            not miss them.
        keep_submodule_prefixes: With ``submodules=``, keep the full name of every key.
        strict: Raise an error if the state dict lacks a key or, for the model, has another one.
        broadcast_from_rank0: Only rank 0 has the state dict. It sends one tensor at a time, and
            every rank keeps its slices. Needs `full_state_dict`.
        flatten_optimizer_state_dict: Return one flat dict with keys such as
            ``state.layer.weight.exp_avg`` and ``param_groups.layer.weight.lr``. As in torch, nested
            state is an error.
        dsd_fqn_modifiers: Name of the method in which a module lists the attributes that its state
            dict hooks leave out of the keys.

    Example:
        >>> from torchlift.distributed import StateDictOptions
        >>> StateDictOptions(full_state_dict=True).cpu_offload
        False
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    dsd_fqn_modifiers: str = "_fqn_modifiers"


def validate_options(options: Any) -> StateDictOptions:
    """Return a valid copy of the options.

    Args:
        options: A `StateDictOptions`, torch's class of that name, or None for the defaults.

    Raises:
        TypeError: If the object lacks a field of `StateDictOptions`.
        ValueError: If `broadcast_from_rank0` is set without `full_state_dict`.

    Example:
        >>> validate_options(None) == StateDictOptions()
        True
    """
    if options is None:
        return StateDictOptions()
    try:
        copy = StateDictOptions(*(getattr(options, f.name) for f in fields(StateDictOptions)))
    except AttributeError as error:
        raise TypeError(f"options must be a StateDictOptions, not {options!r}") from error
    if copy.broadcast_from_rank0 and not copy.full_state_dict:
        raise ValueError("broadcast_from_rank0=True needs full_state_dict=True")
    return copy


class Part(Flag):
    """The part of a training state that a call reads or loads."""

    MODEL = auto()
    OPTIMIZERS = auto()
    BOTH = MODEL | OPTIMIZERS


class States(NamedTuple):
    """The state dicts of a model and of its optimizers, each empty if it was not requested."""

    model: dict[str, Any]
    optimizer: dict[str, Any]


def to_tuple(optimizers: Any) -> tuple[Any, ...]:
    """Return one or several optimizers as a tuple. A dict would give its keys."""
    is_several = isinstance(optimizers, Iterable) and not isinstance(optimizers, Mapping)
    return tuple(optimizers) if is_several else (optimizers,)


def require_optimizers(optimizers: Any, part: Part) -> tuple[torch.optim.Optimizer, ...]:
    """Return one or several optimizers as a tuple, if each of them has a state.

    Raises:
        TypeError: If one of them is not an optimizer.
        StateDictMismatch: If one only holds other optimizers.
        RuntimeError: If there is none, and the call is about optimizers only, as in torch.

    Example:
        >>> len(require_optimizers(torch.optim.SGD([torch.ones(1)]), Part.BOTH))
        1
    """
    found = to_tuple(optimizers)
    for each in found:
        require_groups(each)
        # Not by the class: a wrapper of an optimizer may be of another class.
        if not hasattr(each, "param_groups"):
            kind = type(each).__name__  # the text of a whole model would be pages long
            way = ": pass its values()" if isinstance(each, Mapping) else ""
            raise TypeError(
                f"optimizers must be an optimizer or an iterable of them, not {kind}{way}"
            )
    if part is Part.OPTIMIZERS and not found:
        raise RuntimeError(
            "the state dict of optimizers was requested, but no optimizer was passed"
        )
    return found


def require_groups(optimizer: object) -> None:
    """Refuse an optimizer that has no groups or state, and only steps others that it holds.

    Raises:
        StateDictMismatch: If it is one. The error names those that it holds.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    needed = ["param_groups", "state"]
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
        needed.append("defaults")  # torch's method needs what torch's constructor makes
    if not all(hasattr(optimizer, name) for name in needed):
        raise holder_error(
            optimizer, "the optimizer does not have parameter groups or state of its own"
        )


def inner_optimizers(optimizer: object) -> list[torch.optim.Optimizer]:
    """Return the optimizers in the attributes of an optimizer, or in containers there."""
    held = leaves(getattr(optimizer, "__dict__", {})).values()
    return [value for value in held if isinstance(value, torch.optim.Optimizer)]


def holder_error(optimizer: object, reason: str) -> StateDictMismatch:
    """Return the error for an optimizer whose state is in others that it holds."""
    kinds = dict.fromkeys(type(each).__name__ for each in inner_optimizers(optimizer))
    return StateDictMismatch(
        reason,
        entry=type(optimizer).__name__,
        expected="an optimizer whose state dict contains all of its state",
        found=f"an optimizer that holds {clipped_list(kinds)}" if kinds else None,
        hint="Pass the optimizers that it holds instead.",
    )


def require_module(model: object) -> None:
    """Refuse an object that is not a module.

    Raises:
        TypeError: If it is not.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")


@dataclass(frozen=True)
class LoadCall:
    """The arguments of a load, as the caller passed them.

    Attributes:
        part: The part to load. With both, there may be no optimizer.
        model: The model, wrapped or not.
        optimizers: Its optimizers, if any.
        model_state: Values by canonical name or by module.
        optim_state: Any form that `normalise` accepts.
        options: How to load.
        collective: See `RankGroup.of_model`.
        process_group: See `RankGroup.of_model`.
        include, exclude: Patterns of the parameters whose optimizer state is loaded.
        allow_missing: Patterns of parameters that may lack optimizer state, and of names that the
            model's state dict may lack.
        must_match: Whether it is an error if no optimizer state matches.
        leaves_model: Whether an empty state dict leaves the model as it is, as in torch. Not for a
            stage of a pipeline that has nothing to load, while the other stages load.
    """

    part: Part
    model: nn.Module
    optimizers: Any
    model_state: Any
    optim_state: Any
    options: Any
    collective: bool | None = None
    process_group: Any = None
    include: Collection[str] = ("*",)
    exclude: Collection[str] = ()
    allow_missing: Collection[str] = ()
    must_match: bool = False
    leaves_model: bool = True

    def model_dict(self) -> Mapping[Any, Any] | None:
        """Return the model's state dict, or None if the model stays as it is."""
        given = self.model_state
        is_left = self.part is Part.BOTH and given in (None, {}) and self.leaves_model
        if self.part is Part.OPTIMIZERS or is_left:
            return None
        return _require_dict(given, "model_state_dict")

    def optim_dict(self) -> Mapping[Any, Any]:
        """Return the state dict of the optimizers."""
        return _require_dict(self.optim_state, "optim_state_dict")


def _require_dict(state: Any, argument: str) -> Mapping[Any, Any]:
    """Return a state dict as it was passed. As in torch, None is an empty one.

    Raises:
        TypeError: If it is not a mapping.
    """
    if state is not None and not isinstance(state, Mapping):
        way = ": pass what its state_dict() returns" if hasattr(state, "state_dict") else ""
        raise TypeError(f"{argument} must be a dict, not {type(state).__name__}{way}")
    return {} if state is None else state


def mismatch_error(
    missing: list[str],
    unexpected: list[str],
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
) -> StateDictMismatch:
    """Return one error that lists everything in a state dict that does not match the model.

    Args:
        missing: Names that the state dict lacks. Five are shown.
        unexpected: Names that the model lacks. Five are shown.
        shapes: Name -> (shape in the model, shape in the state dict).

    Example:
        >>> print(mismatch_error([], ["a"], {}))
        the state dict does not fit the model: Unexpected key(s) 'a'. Pass strict=False to load...
    """
    wrong = [f"{n}: model {list(a)}, state dict {list(b)}" for n, (a, b) in shapes.items()]
    # Programs look for these words, with which torch's errors begin their lists.
    lists = {"Missing key(s)": missing, "Unexpected key(s)": unexpected, "size mismatch for": wrong}
    texts = [f"{word} {clipped_list(map(repr, names))}" for word, names in lists.items() if names]
    hint = empty_hint(shapes) if shapes else "Pass strict=False to load what fits."
    if missing and unexpected and not shapes:
        # strict=False would skip keys that were renamed, so it is not the way out here.
        hint = "Rename the keys that have another name in the model."
        if rule := suggest_rename(missing, unexpected):
            hint = Hint("Call torchlift.load(model, state_dict) instead. ", rule)
    return StateDictMismatch(
        f"the state dict does not fit the model: {'; '.join(texts)}",
        hint=hint,
        missing_keys=missing,
        unexpected_keys=unexpected,
        mismatched=shapes,
    )


def bad_value(name: str, found: str) -> StateDictMismatch:
    """Return the error for a value that no tensor of a model can take."""
    return StateDictMismatch(
        "a value of the state dict cannot be copied",
        entry=name,
        expected="a dense tensor with values",
        found=found,
        hint="Make it one (torch.as_tensor, to_dense, dequantize, to_padded_tensor).",
    )


def check_value(
    name: str, expected: torch.Tensor | None, value: object, options: StateDictOptions
) -> None:
    """Refuse a value that would fail, or leave a tensor without values, in the middle of a load.

    Raises:
        StateDictMismatch: If the value cannot be copied, or if a complete one is for a sharded
            tensor, and the options do not permit that.
    """
    odd = oddity(local_tensor(value)) if isinstance(value, torch.Tensor) else None
    like = None if expected is None or expected.is_meta else oddity(expected)
    if odd and odd != like:  # a tensor of the same kind can copy it
        raise bad_value(name, f"a tensor that is {odd}")
    if is_dtensor(expected) and not is_dtensor(value) and not options.full_state_dict:
        raise StateDictMismatch(
            "the state dict has another layout than the model",
            entry=name,
            expected=layout_of(expected),
            found="a plain tensor",
            hint="Pass full_state_dict=True: each rank takes its own slice.",
        )

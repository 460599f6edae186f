"""The arguments of the state dict functions, and the error that they raise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import Flag, auto
from typing import Any

import torch
from torch import nn

from torchlift.errors import MismatchError

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


class StateDictMismatch(MismatchError, RuntimeError):
    """A state dict does not fit the model or the optimizer.

    It is a `RuntimeError` too, because that is what ``torch.distributed.checkpoint.state_dict``
    raises: a program that catches it keeps working after the import is changed.
    """


@dataclass
class StateDictOptions:
    """What `get_state_dict` returns and how `set_state_dict` loads it.

    Attributes:
        full_state_dict: gather every tensor; no DTensor is left in the result. For a load: the
            state dict holds whole tensors, of which every rank takes its own slice. Must be the
            same on every rank: one that does not gather talks to nobody, and others wait for it.
        cpu_offload: move tensors to the CPU. With `full_state_dict` only rank 0 gets the result,
            the other ranks get an empty dict.
        ignore_frozen_params: leave parameters out whose ``requires_grad`` is False; a strict load
            does not miss them then.
        keep_submodule_prefixes: with ``submodules=``, keep the full name of every key.
        strict: a load raises when the state dict lacks a key or, for the model, has one too many.
        broadcast_from_rank0: only rank 0 has the state dict to load; the others receive it in
            bounded buckets and keep their slices. Needs `full_state_dict`.
        flatten_optimizer_state_dict: one flat dict with keys such as
            ``state.layer.weight.exp_avg`` and ``param_groups.layer.weight.lr``.
        dsd_fqn_modifiers: name of the method in which a module lists the attributes that its
            state dict hooks leave out of the keys.

    Example:
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


def checked(options: Any) -> StateDictOptions:
    """Return a private, valid copy of what the caller passed; torch's own class is welcome.

    Args:
        options: a `StateDictOptions`, torch's class of that name, or None for the defaults.

    Raises:
        TypeError: the object lacks a field of `StateDictOptions`.
        ValueError: `broadcast_from_rank0` without `full_state_dict`.

    Example:
        >>> checked(None) == StateDictOptions()
        True
    """
    if options is None:
        return StateDictOptions()
    try:
        copy = StateDictOptions(*(getattr(options, f.name) for f in fields(StateDictOptions)))
    except AttributeError as error:
        raise TypeError(f"options must be a StateDictOptions, not {options!r}") from error
    if copy.broadcast_from_rank0 and not copy.full_state_dict:
        raise ValueError(
            "broadcast_from_rank0=True sends whole tensors: full_state_dict must be True as well"
        )
    return copy


class Part(Flag):
    """What a call reads or loads."""

    MODEL = auto()
    OPTIMIZERS = auto()
    BOTH = MODEL | OPTIMIZERS


def several(optimizers: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """Return one or several optimizers as a tuple.

    Raises:
        TypeError: something in there is no optimizer.

    Example:
        >>> len(several(torch.optim.SGD([torch.ones(1)])))
        1
    """
    found = tuple(optimizers) if isinstance(optimizers, Iterable) else (optimizers,)
    for each in found:
        # Not by their class: wrappers of optimizers need not be optimizers.
        if not hasattr(each, "param_groups"):
            raise TypeError(f"optimizers must be an optimizer or an iterable of them, not {each!r}")
    return found


def checked_model(model: Any) -> nn.Module:
    """Return the model.

    Raises:
        TypeError: it is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {model!r}")
    return model


def require(optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
    """Check that there is an optimizer.

    Raises:
        RuntimeError: there is none; torch raises that too.
    """
    if not optimizers:
        raise RuntimeError("the state dict of optimizers was asked for, and none was passed")

"""Objects whose own ``state_dict`` and ``load_state_dict`` speak canonical names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torchlift.distributed.model_state import PATCHED
from torchlift.distributed.options import Optimizers, StateDictOptions, checked, several
from torchlift.distributed.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


def patch_model_state_dict(model: nn.Module, *, options: StateDictOptions | None = None) -> None:
    """Make ``model.state_dict()`` and ``model.load_state_dict()`` use canonical names.

    A library that only knows those two methods then saves what loads into any other wrapping.
    The object is patched, not its class; ``del model.state_dict`` undoes it.

    Args:
        model: the model, wrapped or not.
        options: see `StateDictOptions`.

    Example:
        >>> model = torch.compile(nn.Linear(2, 1), backend="eager")
        >>> patch_model_state_dict(model)
        >>> sorted(model.state_dict())
        ['bias', 'weight']
    """
    chosen = checked(options)

    def state_dict() -> dict[str, Any]:
        return get_model_state_dict(model, options=chosen)

    def load_state_dict(state_dict: Mapping[str, Any]) -> Any:
        return set_model_state_dict(model, dict(state_dict), options=chosen)

    _patch(model, state_dict, load_state_dict)


def patch_optimizer_state_dict(
    model: nn.Module, *, optimizers: Optimizers, options: StateDictOptions | None = None
) -> None:
    """Make ``state_dict()`` and ``load_state_dict()`` of optimizers use canonical names.

    Each of several optimizers then gives and takes the state of all of them, so a program calls
    one of them only.

    Args:
        model: the model whose parameters the optimizers hold.
        optimizers: one or several.
        options: see `StateDictOptions`.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> patch_optimizer_state_dict(model, optimizers=optimizer)
        >>> list(optimizer.state_dict()["state"])
        ['weight', 'bias']
    """
    chosen, found = checked(options), several(optimizers)

    def state_dict() -> dict[str, Any]:
        return get_optimizer_state_dict(model, found, options=chosen)

    def load_state_dict(state_dict: Mapping[str, Any]) -> Any:
        return set_optimizer_state_dict(model, found, dict(state_dict), options=chosen)

    for optimizer in found:
        _patch(optimizer, state_dict, load_state_dict)


def _patch(obj: nn.Module | torch.optim.Optimizer, state_dict: Any, load_state_dict: Any) -> None:
    PATCHED.update((state_dict, load_state_dict))
    obj.state_dict = state_dict  # type: ignore[method-assign]
    obj.load_state_dict = load_state_dict  # type: ignore[method-assign]

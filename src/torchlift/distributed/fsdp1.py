"""``FullyShardedDataParallel`` models: torch's own functions know their flat parameters best."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as own
from torch.nn.modules.module import _IncompatibleKeys

from torchlift.distributed.optimizer_load import OptimizerReport
from torchlift.distributed.options import StateDictOptions

Optimizers = tuple[torch.optim.Optimizer, ...]


def _torch(options: StateDictOptions) -> own.StateDictOptions:
    return own.StateDictOptions(**vars(options))


def get_model(
    model: nn.Module, submodules: set[nn.Module] | None, options: StateDictOptions
) -> dict[str, Any]:
    """`torch.distributed.checkpoint.state_dict.get_model_state_dict`."""
    return own.get_model_state_dict(model, submodules=submodules, options=_torch(options))


def get_optimizer(
    model: nn.Module,
    optimizers: Optimizers,
    submodules: set[nn.Module] | None,
    options: StateDictOptions,
) -> dict[str, Any]:
    """`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`."""
    return own.get_optimizer_state_dict(
        model, optimizers, submodules=submodules, options=_torch(options)
    )


def set_model(model: nn.Module, state: Any, options: StateDictOptions) -> _IncompatibleKeys:
    """`torch.distributed.checkpoint.state_dict.set_model_state_dict`, on a copy of the dict."""
    return own.set_model_state_dict(model, _copied(state), options=_torch(options))


def set_optimizer(
    model: nn.Module, optimizers: Optimizers, state: Any, options: StateDictOptions
) -> OptimizerReport:
    """`torch.distributed.checkpoint.state_dict.set_optimizer_state_dict`, on a copy."""
    own.set_optimizer_state_dict(model, optimizers, _copied(state), options=_torch(options))
    return OptimizerReport(loaded=sorted(map(str, state.get("state", ()))))


def set_both(
    model: nn.Module,
    optimizers: Optimizers,
    model_state: Any,
    optim_state: Any,
    options: StateDictOptions,
) -> _IncompatibleKeys:
    """`torch.distributed.checkpoint.state_dict.set_state_dict`, on copies."""
    return own.set_state_dict(
        model,
        optimizers,
        model_state_dict=_copied(model_state),
        optim_state_dict=_copied(optim_state),
        options=_torch(options),
    )


def _copied(tree: Any) -> Any:
    """New containers around the same tensors: torch pops keys from what it is given."""
    if isinstance(tree, dict):
        copy = type(tree)() if type(tree) in (dict, OrderedDict) else {}
        copy.update({key: _copied(value) for key, value in tree.items()})
        return copy
    return [_copied(value) for value in tree] if isinstance(tree, list) else tree

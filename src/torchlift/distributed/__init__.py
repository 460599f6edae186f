"""State dicts of wrapped and sharded models, and checkpoints on any mesh.

The names, arguments and defaults of ``torch.distributed.checkpoint.state_dict``; see there for the
idea. What torch gets wrong is listed in the docstring of each function.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchlift.distributed.optimizer_load import OptimizerReport
    from torchlift.distributed.options import StateDictMismatch, StateDictOptions
    from torchlift.distributed.ranks import on_ranks
    from torchlift.distributed.reader import CheckpointReader
    from torchlift.distributed.save import save_consolidated
    from torchlift.distributed.simulation import Simulation, simulate
    from torchlift.distributed.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
        get_state_dict,
        patch_model_state_dict,
        patch_optimizer_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
        set_state_dict,
    )

__all__ = [
    "CheckpointReader",
    "OptimizerReport",
    "Simulation",
    "StateDictMismatch",
    "StateDictOptions",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "on_ranks",
    "patch_model_state_dict",
    "patch_optimizer_state_dict",
    "save_consolidated",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
    "simulate",
]

# Where each public name lives: imported when first used, since torch.distributed is slow to import.
_HOMES = {
    "CheckpointReader": "reader",
    "Simulation": "simulation",
    "OptimizerReport": "optimizer_load",
    "StateDictMismatch": "options",
    "StateDictOptions": "options",
    "on_ranks": "ranks",
    "save_consolidated": "save",
    "simulate": "simulation",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in __all__ and name not in _HOMES:
        raise AttributeError(f"module 'torchlift.distributed' has no attribute {name!r}")
    try:
        home = import_module(f"torchlift.distributed.{_HOMES.get(name, 'state_dict')}")
    except ModuleNotFoundError as error:
        raise AttributeError(f"{name} is not available: {error}") from error
    value = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

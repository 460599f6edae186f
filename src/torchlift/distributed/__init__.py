"""State dicts of wrapped and sharded models, and checkpoints on any mesh.

The names, arguments and defaults are those of ``torch.distributed.checkpoint.state_dict``. The
docstring of each function lists its differences from torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlift._lazy import lazy

if TYPE_CHECKING:
    from torchlift.distributed.folder import Kept as Kept
    from torchlift.distributed.folder import RunFolder as RunFolder
    from torchlift.distributed.generators import Generators as Generators
    from torchlift.distributed.optimizer_slots import OptimizerReport as OptimizerReport
    from torchlift.distributed.options import StateDictOptions as StateDictOptions
    from torchlift.distributed.ranks import on_ranks as on_ranks
    from torchlift.distributed.reader import CheckpointReader as CheckpointReader
    from torchlift.distributed.save import save_consolidated as save_consolidated
    from torchlift.distributed.simulation import simulate as simulate
    from torchlift.distributed.state_dict import get_model_state_dict as get_model_state_dict
    from torchlift.distributed.state_dict import (
        get_optimizer_state_dict as get_optimizer_state_dict,
    )
    from torchlift.distributed.state_dict import get_state_dict as get_state_dict
    from torchlift.distributed.state_dict import load_optimizer as load_optimizer
    from torchlift.distributed.state_dict import patch_model_state_dict as patch_model_state_dict
    from torchlift.distributed.state_dict import (
        patch_optimizer_state_dict as patch_optimizer_state_dict,
    )
    from torchlift.distributed.state_dict import set_model_state_dict as set_model_state_dict
    from torchlift.distributed.state_dict import (
        set_optimizer_state_dict as set_optimizer_state_dict,
    )
    from torchlift.distributed.state_dict import set_state_dict as set_state_dict
    from torchlift.distributed.writer import CheckpointWriter as CheckpointWriter
    from torchlift.errors import StateDictMismatch as StateDictMismatch

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "folder": "Kept RunFolder",
        "generators": "Generators",
        "optimizer_slots": "OptimizerReport",
        "options": "StateDictMismatch StateDictOptions",
        "ranks": "on_ranks",
        "reader": "CheckpointReader",
        "save": "save_consolidated",
        "simulation": "simulate",
        "state_dict": "get_model_state_dict get_optimizer_state_dict get_state_dict "
        "load_optimizer patch_model_state_dict patch_optimizer_state_dict "
        "set_model_state_dict set_optimizer_state_dict set_state_dict",
        "writer": "CheckpointWriter",
    },
)

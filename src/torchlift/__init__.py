"""Load, remap, reshard, convert and save PyTorch checkpoints in the memory of one copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlift._lazy import lazy

if TYPE_CHECKING:
    from torchlift import bench as bench
    from torchlift import distributed as distributed
    from torchlift import errors as errors
    from torchlift import measure as measure
    from torchlift import remap as remap
    from torchlift import swap as swap
    from torchlift._checkpoint.checkpoint import Checkpoint as Checkpoint
    from torchlift._checkpoint.checkpoint import open as open
    from torchlift._checkpoint.comparison import CheckpointDiff as CheckpointDiff
    from torchlift._checkpoint.comparison import diff as diff
    from torchlift._convert import convert as convert
    from torchlift._digest import digest as digest
    from torchlift._load.loading import load as load
    from torchlift._plan.planner import LoadPlan as LoadPlan
    from torchlift._plan.planner import plan as plan
    from torchlift._plan.report import LoadReport as LoadReport
    from torchlift._save.saving import SaveReport as SaveReport
    from torchlift._save.saving import save as save
    from torchlift._skeleton.construction import materialize as materialize
    from torchlift._skeleton.construction import skeleton as skeleton
    from torchlift.distributed.keeper import Keeper as Keeper
    from torchlift.distributed.state_dict import load_optimizer as load_optimizer
    from torchlift.errors import CheckpointError as CheckpointError
    from torchlift.errors import FormatError as FormatError
    from torchlift.errors import IntegrityError as IntegrityError
    from torchlift.errors import MismatchError as MismatchError
    from torchlift.errors import PlacementError as PlacementError
    from torchlift.errors import UnsafeError as UnsafeError
    from torchlift.formats.index import TensorEntry as TensorEntry
    from torchlift.formats.integrity import VerifyReport as VerifyReport
    from torchlift.formats.integrity import verify as verify

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "_checkpoint.checkpoint": "Checkpoint open",
        "_checkpoint.comparison": "CheckpointDiff diff",
        "_convert": "convert",
        "_digest": "digest",
        "_load.loading": "load",
        "_plan.planner": "LoadPlan plan",
        "_plan.report": "LoadReport",
        "_save.saving": "SaveReport save",
        "_skeleton.construction": "materialize skeleton",
        "bench": "bench",
        "distributed": "distributed",
        "distributed.keeper": "Keeper",
        "distributed.state_dict": "load_optimizer",
        "errors": "errors CheckpointError FormatError IntegrityError MismatchError "
        "PlacementError UnsafeError",
        "formats.index": "TensorEntry",
        "formats.integrity": "VerifyReport verify",
        "measure": "measure",
        "remap": "remap",
        "swap": "swap",
    },
    with_torch="load skeleton",
)

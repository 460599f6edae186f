"""Load, remap, reshard, convert and save PyTorch checkpoints in the memory of one copy."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchlift import bench, distributed, errors, measure, remap, swap
    from torchlift._checkpoint import Checkpoint, TensorEntry, open
    from torchlift._load import load
    from torchlift._plan import LoadPlan, LoadReport, plan
    from torchlift._skeleton.skeleton import materialize, skeleton
    from torchlift.errors import (
        CheckpointError,
        FormatError,
        IntegrityError,
        MismatchError,
        PlacementError,
        UnsafeError,
    )
    from torchlift.formats.verify import VerifyReport, verify

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "FormatError",
    "IntegrityError",
    "LoadPlan",
    "LoadReport",
    "MismatchError",
    "PlacementError",
    "TensorEntry",
    "UnsafeError",
    "VerifyReport",
    "bench",
    "distributed",
    "errors",
    "load",
    "materialize",
    "measure",
    "open",
    "plan",
    "remap",
    "skeleton",
    "swap",
    "verify",
]

# Where each public name lives. They are imported when first used (PEP 562), so that
# `import torchlift` costs nothing and `torchlift inspect` never loads torch.
_MODULES = {
    "Checkpoint": "_checkpoint",
    "CheckpointError": "errors",
    "FormatError": "errors",
    "IntegrityError": "errors",
    "LoadPlan": "_plan",
    "LoadReport": "_plan",
    "MismatchError": "errors",
    "PlacementError": "errors",
    "TensorEntry": "formats",
    "UnsafeError": "errors",
    "VerifyReport": "formats.verify",
    "load": "_load",
    "materialize": "_skeleton.skeleton",
    "open": "_checkpoint",
    "plan": "_plan",
    "skeleton": "_skeleton.skeleton",
    "verify": "formats.verify",
}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _MODULES:
        value = getattr(import_module(f"torchlift.{_MODULES[name]}"), name)
    elif name in __all__:
        value = import_module(f"torchlift.{name}")
    elif name == "__version__":
        from importlib.metadata import version

        value = version("torchlift")
    else:
        raise AttributeError(f"module 'torchlift' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


if "torch" in sys.modules:
    # Who has torch is about to load something: these imports cost 45 ms, which belong here beside
    # torch's own 700 and not inside the first load, which takes 4.
    for _name in ("load", "skeleton"):
        __getattr__(_name)

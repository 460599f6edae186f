"""Load, remap, reshard, convert and save PyTorch checkpoints in the memory of one copy."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchlift import bench as bench
    from torchlift import distributed as distributed
    from torchlift import errors as errors
    from torchlift import measure as measure
    from torchlift import remap as remap
    from torchlift import swap as swap
    from torchlift._checkpoint import Checkpoint as Checkpoint
    from torchlift._checkpoint import open as open
    from torchlift._load import load as load
    from torchlift._plan import LoadPlan as LoadPlan
    from torchlift._plan import LoadReport as LoadReport
    from torchlift._plan import plan as plan
    from torchlift._skeleton.skeleton import materialize as materialize
    from torchlift._skeleton.skeleton import skeleton as skeleton
    from torchlift.errors import CheckpointError as CheckpointError
    from torchlift.errors import FormatError as FormatError
    from torchlift.errors import IntegrityError as IntegrityError
    from torchlift.errors import MismatchError as MismatchError
    from torchlift.errors import PlacementError as PlacementError
    from torchlift.errors import UnsafeError as UnsafeError
    from torchlift.formats import TensorEntry as TensorEntry
    from torchlift.formats.verify import VerifyReport as VerifyReport
    from torchlift.formats.verify import verify as verify

# Where each public name lives. They are imported when first used (PEP 562), so that
# `import torchlift` costs nothing and `torchlift inspect` never loads torch.
_MODULES = {
    "_checkpoint": "Checkpoint open",
    "_load": "load",
    "_plan": "LoadPlan LoadReport plan",
    "_skeleton.skeleton": "materialize skeleton",
    "errors": "CheckpointError FormatError IntegrityError MismatchError PlacementError UnsafeError",
    "formats": "TensorEntry",
    "formats.verify": "VerifyReport verify",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}
_ROOMS = ("bench", "distributed", "errors", "measure", "remap", "swap")
__all__ = sorted([*_MODULE_OF, *_ROOMS])


def __getattr__(name: str) -> object:
    from importlib import import_module, metadata

    if name in _MODULE_OF:
        value = getattr(import_module(f"torchlift.{_MODULE_OF[name]}"), name)
    elif name in _ROOMS:
        value = import_module(f"torchlift.{name}")
    elif name == "__version__":
        value = metadata.version("torchlift")
    else:
        raise AttributeError(f"module 'torchlift' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


if "torch" in sys.modules:
    # Who has torch is about to load something: these imports cost 45 ms, which belong here beside
    # torch's own 700 and not inside the first load, which takes 4.
    for _name in ("load", "skeleton"):
        __getattr__(_name)

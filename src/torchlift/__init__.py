"""Load, remap, reshard, convert and save PyTorch checkpoints in the memory of one copy."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchlift import bench, distributed, errors, measure, remap, swap
    from torchlift.checkpoint import Checkpoint, TensorEntry, open
    from torchlift.errors import (
        CheckpointError,
        FormatError,
        IntegrityError,
        MismatchError,
        PlacementError,
        UnsafeError,
    )
    from torchlift.load import load
    from torchlift.plan import LoadPlan, plan
    from torchlift.report import LoadReport
    from torchlift.skeleton import materialize, skeleton
    from torchlift.verify import VerifyReport, verify

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
_HOMES = {
    "Checkpoint": "checkpoint",
    "CheckpointError": "errors",
    "FormatError": "errors",
    "IntegrityError": "errors",
    "LoadPlan": "plan",
    "LoadReport": "report",
    "MismatchError": "errors",
    "PlacementError": "errors",
    "TensorEntry": "formats",
    "UnsafeError": "errors",
    "VerifyReport": "verify",
    "load": "load",
    "materialize": "skeleton",
    "open": "checkpoint",
    "plan": "plan",
    "skeleton": "skeleton",
    "verify": "verify",
}
_ROOMS = ("bench", "distributed", "errors", "measure", "remap", "swap")


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _HOMES:
        value = getattr(import_module(f"torchlift.{_HOMES[name]}"), name)
    elif name in _ROOMS:
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


class _Package(ModuleType):
    """Keeps `torchlift.load` the function: importing the module of that name would replace it."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[object, ...]:
        # cloudpickle sends a plain module by its name, and refuses one of a class of its own. With
        # it every function that says `torchlift.load` could not be sent to another process.
        return __import__, (self.__name__,)


sys.modules[__name__].__class__ = _Package

if "torch" in sys.modules:
    # Who has torch is about to load something: these imports cost 45 ms, which belong here beside
    # torch's own 700 and not inside the first load, which takes 4.
    for _name in ("load", "skeleton"):
        __getattr__(_name)

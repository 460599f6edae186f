"""Ways to load a checkpoint, compared on one's own file, each in a fresh process.

Importing this does not import torch: the comparison runs in child processes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from torchlift.bench.comparison import Comparison, Result, compare
from torchlift.bench.drawing import figure_of
from torchlift.bench.ways import WAYS, Way

if TYPE_CHECKING:
    from torchlift.bench.generate import Stack, make_checkpoint
    from torchlift.bench.growth import Growth, grow

__all__ = [
    "WAYS", "Comparison", "Growth", "Result", "Stack", "Way", "compare", "figure_of", "grow",
    "make_checkpoint",
]  # fmt: skip

_WITH_TORCH = {
    "Stack": "generate", "make_checkpoint": "generate", "Growth": "growth", "grow": "growth",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name in _WITH_TORCH:
        return getattr(import_module(f"torchlift.bench.{_WITH_TORCH[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Compare the ways to load a checkpoint on your own file, each in a new process.

Importing this does not import torch: the comparison runs in child processes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from torchlift.bench.comparison import Comparison, Result, compare
from torchlift.bench.ways import WAYS, Way

if TYPE_CHECKING:
    from torchlift.bench.generate import Stack, make_checkpoint

__all__ = ["WAYS", "Comparison", "Result", "Stack", "Way", "compare", "make_checkpoint"]

_WITH_TORCH = {"Stack", "make_checkpoint"}


def __getattr__(name: str) -> object:
    if name in _WITH_TORCH:
        return getattr(import_module("torchlift.bench.generate"), name)
    moved = name in ("grow", "Growth", "figure_of")
    hint = ". tools/bench.py in torchlift's repository measures and draws growth" if moved else ""
    raise AttributeError(f"module {__name__!r} does not define {name!r}{hint}")

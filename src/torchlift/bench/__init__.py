"""Ways to load a checkpoint, compared on one's own file, each in a fresh process.

Importing this does not import torch: the comparison runs in child processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchlift.bench.comparison import WAYS, Comparison, Result, Way, compare

if TYPE_CHECKING:
    from torchlift.bench.generate import Stack, make_checkpoint

__all__ = ["WAYS", "Comparison", "Result", "Stack", "Way", "compare", "make_checkpoint"]


def __getattr__(name: str) -> object:
    if name in ("Stack", "make_checkpoint"):
        from torchlift.bench import generate

        return getattr(generate, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Compare the ways to load a checkpoint on your own file, each in a new process.

Importing this does not import torch: the comparison runs in child processes.
"""

from __future__ import annotations

from torchlift.bench.comparison import Comparison, Result, compare
from torchlift.bench.ways import WAYS, Way

__all__ = ["WAYS", "Comparison", "Result", "Way", "compare"]

"""Measure time and memory: anonymous (owned) and file-backed (mapped) memory separately."""

from __future__ import annotations

from torchlift.measure.child import ChildError, ChildResult, in_child
from torchlift.measure.meter import Mark, MemoryUse, mark, memory
from torchlift.measure.sampling import Sample

__all__ = [
    "ChildError", "ChildResult", "Mark", "MemoryUse", "Sample", "in_child", "mark", "memory",
]  # fmt: skip

"""How much code a load runs through: one walk over the modules, and few files."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from small_models import Two, saved

import torchlift
from torchlift._model.slots import walk

PACKAGE = Path(torchlift.__file__).parent
#: Files of the package in which a function runs while two tensors are loaded, at most. Two only
#: answer that a zip archive is not theirs, and one each is there for keywords of other loaders,
#: classes that are allowed, hooks of the model, and classes with a `load_state_dict` of their own.
FILES = 40


def traced(path: Path) -> tuple[dict[str, set[str]], Counter[CodeType]]:
    """Load into a live model; return file -> its functions that ran, and how often each ran."""
    functions: dict[str, set[str]] = {}
    calls: Counter[CodeType] = Counter()
    frames: set[FrameType] = set()  # a generator is called again each time that it goes on

    def profile(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in file.parents and frame not in frames:
            frames.add(frame)
            calls[frame.f_code] += 1
            functions.setdefault(str(file.relative_to(PACKAGE)), set()).add(frame.f_code.co_name)

    model = Two()
    sys.setprofile(profile)
    try:
        torchlift.load(model, path)
    finally:
        sys.setprofile(None)
    return functions, calls


def test_a_load_walks_over_the_modules_once_and_through_few_files(tmp_path):
    """What a reader must open to follow a load of two tensors."""
    path = saved({"a": torch.ones(2, 3), "b": torch.zeros(2, 3)}, tmp_path)
    torchlift.load(Two(), path)  # what the first load of a process imports is not of interest
    functions, calls = traced(path)
    assert calls[walk.__code__] == 1
    assert len(functions) <= FILES, "\n".join(sorted(functions))

"""The functions that take a checkpoint, and the one error that all of them raise."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchlift
from torchlift.errors import FormatError

#: Name -> a call with a checkpoint and a folder to write into.
DOORS: dict[str, Callable[[Any, Path], Any]] = {
    "open": lambda given, to: torchlift.open(given),
    "verify": lambda given, to: torchlift.verify(given),
    "digest": lambda given, to: torchlift.digest(given),
    "diff": lambda given, to: torchlift.diff(given, given),
    "load": lambda given, to: torchlift.load(torch.nn.Linear(1, 1), given),
    "convert": lambda given, to: torchlift.convert(given, to / "to.safetensors"),
}


def refused_by_all(given: Any, to: Path, words: str | None = None) -> FormatError:
    """Return the error that all functions raise."""
    errors = []
    for door in DOORS.values():
        with pytest.raises(FormatError, match=words) as caught:
            door(given, to)
        errors.append(caught.value)
    assert len({(error.reason, error.found, str(error.hint)) for error in errors}) == 1
    assert not (to / "to.safetensors").exists()
    return errors[0]

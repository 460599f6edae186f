"""How long a read from the page cache takes, compared with other libraries in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from generated import Stack, make_checkpoint
from safetensors.torch import load_file

import torchlift


@pytest.mark.timed
def test_a_warm_read_is_as_fast_as_the_clones_of_other_libraries(tmp_path: Path) -> None:
    """If huge pages are slow, it took longer than both when each small page cost a fault."""
    stored, zipped = tmp_path / "x.safetensors", tmp_path / "x.pt"
    make_checkpoint(zipped, nbytes=512 << 20, tensors=16)
    size = make_checkpoint(stored, nbytes=512 << 20, tensors=16, format="safetensors")

    def read() -> object:
        with torch.device("meta"):
            model = Stack(*size)
        torchlift.load(model, stored, source="read")
        return model

    ways: dict[str, Callable[[], object]] = {
        "ours": read,
        "safetensors": lambda: {key: each.clone() for key, each in load_file(stored).items()},
        "torch": lambda: {key: each.clone() for key, each in torch.load(zipped, mmap=True).items()},
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(7):
        for name, way in ways.items():
            start = time.perf_counter()
            kept = way()
            seconds[name].append(time.perf_counter() - start)
            del kept
    medians = {name: statistics.median(each[1:]) for name, each in seconds.items()}
    print({name: f"{median:.3f} s" for name, median in medians.items()})
    assert medians["ours"] < 1.1 * medians["safetensors"]
    assert medians["ours"] < 1.1 * medians["torch"]

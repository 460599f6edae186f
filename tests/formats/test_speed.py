"""How long an index takes: printed for whoever looks (pytest -s), not asserted."""

from __future__ import annotations

import time

import pytest
import torch
from safetensors.torch import save_file

from torchlift.formats.detect import read_index


@pytest.mark.timed
@pytest.mark.parametrize("count", [64, 20_000])
def test_the_time_of_an_index_is_printed(tmp_path, count):
    """Both formats are indexed completely, and the best of five times is shown."""
    state = {f"layer.{i}.weight": torch.zeros(16, 16) for i in range(count)}
    torch.save(state, tmp_path / "x.pt")
    save_file(state, tmp_path / "x.safetensors")
    for name in ("x.pt", "x.safetensors"):
        times = []
        for _ in range(5):
            start = time.perf_counter()
            index = read_index(tmp_path / name)
            times.append(time.perf_counter() - start)
        assert len(index.entries) == count
        print(f"{index.format}: {count} tensors in {1e3 * min(times):.2f} ms")

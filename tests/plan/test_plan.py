"""`plan`: what a load would do, said in advance, with nothing changed."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from checkpoint_files import write_safetensors
from small_models import Mixed, randomised, saved, tensors_of
from torch import nn

import torchlift
from torchlift._plan.report import LoadReport
from torchlift._system.text import human
from torchlift.errors import PlacementError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of `Mixed` with other values."""
    return saved(randomised(Mixed()), tmp_path)


@pytest.fixture(params=["live", "meta"])
def model(request) -> nn.Module:
    """`Mixed`, built or as a skeleton."""
    return Mixed() if request.param == "live" else torchlift.skeleton(Mixed)


@pytest.mark.parametrize("source", ["mmap", "read", "auto"])
@pytest.mark.parametrize("mode", ["assign", "copy", "swap", "auto"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["kept", "cast"])
def test_a_plan_is_what_the_load_then_does(model, path, mode, source, dtype):
    """Every field that plan and report share is the same."""
    options = {"mode": mode, "source": source, "dtype": dtype}
    if mode == "copy" and dtype is not None and not model.scale.is_meta:
        with pytest.raises(PlacementError, match="cannot be copied in place"):
            torchlift.plan(model, path, **options)
        return
    made = torchlift.plan(model, path, **options)
    report = torchlift.load(model, path, **options)
    for item in fields(LoadReport):
        if item.name not in ("seconds", "bytes_read"):
            assert getattr(made, item.name) == getattr(report, item.name), item.name
    assert made.bytes_to_read == report.bytes_read
    assert (made.bytes, made.mode, made.source) == (report.bytes, report.mode, report.source)
    for key, said in report.loaded.items():
        found = tensors_of(model)[key]
        assert str(found.dtype) == f"torch.{said.dtype}"
        assert str(found.device) == said.device


def test_automatic_mode_keeps_references_and_memory(path):
    """A live tensor is written in place, one on meta or of another dtype keeps its object."""
    assert set(torchlift.plan(Mixed(), path).mode.values()) == {"copy"}
    assert set(torchlift.plan(torchlift.skeleton(Mixed), path).mode.values()) == {"swap"}
    modes = torchlift.plan(Mixed(), path, dtype=torch.bfloat16).mode
    assert modes.pop("steps") == modes.pop("inner.1.num_batches_tracked") == "copy"
    assert set(modes.values()) == {"swap"}


def test_bytes_to_read_counts_what_is_copied_out_of_the_file(path):
    """Nothing for a map that stays, the file's bytes for everything else."""
    meta = torchlift.skeleton(Mixed)
    size = torchlift.open(path).nbytes
    assert torchlift.plan(meta, path, source="mmap").bytes_to_read == 0
    assert torchlift.plan(meta, path, source="read").bytes_to_read == size
    assert torchlift.plan(meta, path, mode="copy").bytes_to_read == 0
    assert torchlift.plan(Mixed(), path).bytes_to_read == size
    cast = torchlift.plan(meta, path, dtype=torch.float16).bytes_to_read
    assert cast == size - 16


def test_a_plan_that_does_not_fit_says_so_and_names_a_way_that_does(tmp_path):
    """A file of 1 TiB with a hole in it: only mapped it leaves the memory alone."""
    rows, columns = 2**20, 2**18
    entry = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, 4 * rows * columns]}
    large = write_safetensors(tmp_path / "large.safetensors", {"weight": entry})
    try:
        os.truncate(large, large.stat().st_size + 4 * rows * columns)
    except OSError as error:
        pytest.skip(f"no file of this size: {error}")
    with torch.device("meta"):
        model = nn.Linear(columns, rows, bias=False)
    for options in {"source": "read"}, {"dtype": "bfloat16"}:
        made = torchlift.plan(model, large, **options)
        if made.free_bytes is None:
            pytest.skip("the system does not say what is free")
        assert made.to_dict()["free_bytes"] == made.free_bytes < made.peak_bytes
        (line,) = [x for x in str(made).splitlines() if x.startswith("  does not fit: only ")]
        assert human(made.free_bytes) in line
        assert 'source="mmap" without dtype=' in line
        assert "it fits" not in str(made)
    assert "it fits into the free memory" in str(torchlift.plan(model, large, source="mmap"))
    torchlift.load(model, large, source="mmap")
    assert model.weight[-1, -1] == 0


def test_a_forgotten_prefix_is_pointed_out_even_without_strict(tmp_path):
    """A load that loads nothing must not look like success."""
    path = tmp_path / "wrapped.pt"
    torch.save({f"module.{k}": v for k, v in nn.Linear(3, 2).state_dict().items()}, path)
    with pytest.raises(torchlift.MismatchError, match="nothing in the checkpoint fits") as caught:
        torchlift.plan(nn.Linear(3, 2), path, strict=False)
    assert "remap.strip('module.')" in caught.value.hint
    made = torchlift.plan(nn.Linear(3, 2), path, strict=False, allow_missing=["*"])
    assert f"hint: {made.hint}" in str(made)
    assert torchlift.plan(nn.Linear(3, 2), path, strict=False, rename=lambda k: k[7:]).hint is None


def test_a_plan_for_an_absent_device_takes_what_can_be_one() -> None:
    """A number is an accelerator; a slip of the pen is an error as on a machine that has them."""
    model = nn.Linear(2, 2)
    seven = torch.device("cuda", 7)
    by_name = torchlift.remap.by_key({"": "cuda:7"})
    asked_and_found = [(0, "cuda:0"), ("cuda:7", "cuda:7"), ("hpu", "hpu"), (seven, "cuda:7")]
    asked_and_found += [(lambda entry: seven, "cuda:7"), (by_name, "cuda:7")]
    for asked, found in asked_and_found:
        plan = torchlift.plan(model, model.state_dict(), device=asked, present=False)
        assert {report.device for report in plan.loaded.values()} == {found}
    for wrong in ("gpu", "cuda:abc", "cudaa", -1):
        with pytest.raises(PlacementError, match="is not a device"):
            torchlift.plan(model, model.state_dict(), device=wrong, present=False)

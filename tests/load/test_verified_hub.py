"""`load` and `convert` verify files of a hub's cache by what the hub records, as `verify` does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from hub_files import damage, hub_cache, hub_files

import torchlift
from torchlift.errors import IntegrityError

NUMEL = 5000


Two = partial(zoo.Two, NUMEL)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """Two shards and their index, in a cache."""
    return hub_cache(tmp_path, hub_files(tmp_path, NUMEL))


WRONG = "the checksum of the whole file, as the hub records it, is wrong; expected sha256 "
WAYS = [{}, {"source": "mmap"}, {"mode": "assign"}, {"transform": lambda _, t: t}]


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("words", WAYS, ids=", ".join)
def test_a_load_compares_what_the_hub_records(snapshot, words, meta):
    """All bytes count as checked; a damaged file is named, and nothing changes."""
    model = torchlift.skeleton(Two) if meta else Two()
    report = torchlift.load(Two(), snapshot, verify=True, **words)
    assert report.unchecked_nbytes == 0
    path = snapshot / "model-00002-of-00002.safetensors"
    damage(path)
    assert not torchlift.verify(snapshot).ok
    with pytest.raises(IntegrityError) as caught:
        torchlift.load(model, snapshot, verify=True, **words)
    assert (caught.value.file, caught.value.entry) == (str(path), None)
    assert WRONG in str(caught.value)
    assert all(p.is_meta if meta else not p.any() for p in model.parameters())
    torchlift.load(model, snapshot)


@pytest.mark.parametrize("words", [{}, {"dtype": "bfloat16"}, {"transform": lambda _, t: t}])
def test_a_conversion_compares_what_the_hub_records(tmp_path, snapshot, words):
    """Before a new file appears; a shard of which nothing is taken may be what it is."""
    target = tmp_path / "new.safetensors"
    torchlift.convert(snapshot, target, **words)
    damage(snapshot / "model-00001-of-00002.safetensors")
    several: list[Any] = [snapshot, {"c": torch.ones(2)}]
    for given in (snapshot, several):
        with pytest.raises(IntegrityError, match=WRONG):
            torchlift.convert(given, tmp_path / "other.safetensors", **words)
    assert not (tmp_path / "other.safetensors").exists()
    if "transform" not in words:
        torchlift.convert(snapshot, tmp_path / "other.safetensors", include=["b"], **words)
    torchlift.convert(snapshot, target, verify=False, overwrite=True, **words)

"""`load(verify=True)` verifies a file, then loads it; of several ranks each verifies a part."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import bytes_read, on
from torch import nn

import torchlift

TENSORS, NBYTES = 8, 16 << 20


def build() -> nn.Module:
    return nn.ParameterList([torch.empty(NBYTES // 4) for _ in range(TENSORS)])


#: Replicas whose weights stay in the file.
TOGETHER: dict[str, Any] = {"source": "mmap", "collective": True}


@pytest.mark.slow
@on(2)
def test_each_rank_verifies_its_part_and_all_end_the_same_way(folder: Path) -> None:
    """Half of the file each; all of it where one rank asks alone; a wrong sum stops every rank."""
    path, last, total = folder / "model.pt", dist.get_rank() == 1, TENSORS * NBYTES
    if last:
        torch.save({str(n): torch.rand(NBYTES // 4) for n in range(TENSORS)}, path)
    dist.barrier()
    for verify, least, most in ((True, 0.4, 0.6), (last, 0.9 * last, 0.1 + last)):
        before = bytes_read()
        torchlift.load(torchlift.skeleton(build), path, verify=verify, **TOGETHER)
        assert least * total <= bytes_read() - before < most * total
    dist.barrier()
    if last:
        with open(path, "r+b") as file:
            file.seek(path.stat().st_size // 3)
            file.write(b"\1")
    dist.barrier()
    for verify in (True, last):
        model = torchlift.skeleton(build)
        with pytest.raises(torchlift.IntegrityError, match="checksums are wrong in 1 of "):
            torchlift.load(model, path, verify=verify, **TOGETHER)
        assert all(param.is_meta for param in model.parameters())


@pytest.mark.parametrize("words", [{}, {"dtype": torch.bfloat16}, {"include": ["0", "5"]}], ids=str)
def test_all_of_a_file_is_verified_before_any_of_it_is_loaded(
    tmp_path: Path, words: dict[str, Any]
) -> None:
    """Whole tensors, cast ones, and some of many, with the rest of the file; a damaged one too."""
    path, total = tmp_path / "model.pt", TENSORS * NBYTES
    torch.save({str(n): torch.full((NBYTES // 4,), float(n)) for n in range(TENSORS)}, path)
    model, before = torchlift.skeleton(build), bytes_read()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # parameters of which the caller leaves the keys out
        torchlift.load(model, path, source="read", verify=True, **words)
    assert total <= bytes_read() - before < 2.1 * total
    assert all(model[n][-1].tolist() == n for n in (0, 5))
    damage = {"tensor 5": 0.7 * total, "tensor 3": 0.45 * total, "the end": total - 1.0}
    for what, place in damage.items():
        with open(path, "r+b") as file:
            file.seek(int(place))
            (byte,) = file.read(1)
            file.seek(int(place))
            file.write(bytes([byte ^ 1]))
            file.flush()
            model = torchlift.skeleton(build)
            with pytest.raises(torchlift.IntegrityError, match="checksums are wrong in 1 of"):
                torchlift.load(model, path, source="read", verify=True, **words)
            assert all(param.is_meta for param in model.parameters()), what
            file.seek(int(place))
            file.write(bytes([byte]))

"""`load(verify=True)` verifies a file, then loads it; of several ranks each verifies a part."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hub_files import damage, hub_cache, hub_files
from torch import nn

import torchlift
from torchlift.distributed import on_ranks

TENSORS, NBYTES = 8, 16 << 20


def build() -> nn.Module:
    return nn.ParameterList([torch.empty(NBYTES // 4) for _ in range(TENSORS)])


def bytes_read() -> int:
    """What this process has asked the kernel to read, in bytes."""
    (line,) = (x for x in Path("/proc/self/io").read_text().splitlines() if x.startswith("rchar:"))
    return int(line.split()[1])


def read_by(path: str, verify: bool) -> int:
    """Load a replica whose weights stay in the file, and return how much was read for it."""
    before = bytes_read()
    torchlift.load(torchlift.skeleton(build), path, source="mmap", verify=verify, collective=True)
    return bytes_read() - before


def on_a_rank(path: str) -> list[Any]:
    """Return what is read where all ranks verify, and where one does; then of a damaged file."""
    last = dist.get_rank() == dist.get_world_size() - 1
    found: list[Any] = [read_by(path, True), read_by(path, last)]
    dist.barrier()
    if last:
        with open(path, "r+b") as file:
            file.seek(os.path.getsize(path) // 3)
            file.write(b"\1")
    dist.barrier()
    for verify in (True, last):
        model = torchlift.skeleton(build)
        with pytest.raises(torchlift.IntegrityError) as caught:
            torchlift.load(model, path, verify=verify, collective=True)
        found.append(caught.value.reason)
        assert all(param.is_meta for param in model.parameters())
    return found


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="bytes read are from /proc")
def test_each_rank_verifies_its_part_and_all_end_the_same_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the file each; all of it where one rank asks alone; a wrong sum stops every rank."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    torch.manual_seed(0)
    state = {str(n): torch.randint(1, 99, (NBYTES // 4,)).float() for n in range(TENSORS)}
    torch.save(state, tmp_path / "model.pt")
    quiet = {"PYTHONWARNINGS": "ignore"}
    one, two = on_ranks(2, on_a_rank, str(tmp_path / "model.pt"), environment=quiet)
    total = TENSORS * NBYTES
    for together, *_ in (one, two):
        assert 0.4 * total < together < 0.6 * total, (together, total)
    assert one[1] < 0.1 * total < 0.9 * total < two[1]
    wrong = "checksums are wrong in 1 of "
    assert wrong in one[2] == two[2], (one, two)
    assert wrong in one[3], one
    assert wrong in two[3], two


class Two(nn.Module):
    """A model of the tensors of two shards."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(NBYTES // 4)) for _ in range(2))


def on_a_rank_of_a_hub(path: str) -> list[Any]:
    """Return what is read of two shards of a hub's cache; then of damaged ones."""
    before = bytes_read()
    words: dict[str, Any] = {"source": "mmap", "verify": True, "collective": True}
    report = torchlift.load(torchlift.skeleton(Two), path, **words)
    found: list[Any] = [bytes_read() - before, report.unchecked_nbytes]
    dist.barrier()
    if dist.get_rank() == 0:
        damage(Path(path) / "model-00002-of-00002.safetensors")
    dist.barrier()
    with pytest.raises(torchlift.IntegrityError) as caught:
        torchlift.load(torchlift.skeleton(Two), path, **words)
    return [*found, caught.value.reason]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="bytes read are from /proc")
def test_each_rank_hashes_some_of_the_files_of_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One shard each, of two; what is wrong in the other's stops a rank, too."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "support")
    snapshot = hub_cache(tmp_path, hub_files(tmp_path, NBYTES // 4))
    quiet = {"PYTHONWARNINGS": "ignore"}
    one, two = on_ranks(2, on_a_rank_of_a_hub, str(snapshot), environment=quiet)
    for count, unchecked, reason in (one, two):
        assert 0.9 * NBYTES < count < 1.2 * NBYTES
        assert unchecked == 0
        assert "the checksum of the whole file" in reason


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="bytes read are from /proc")
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

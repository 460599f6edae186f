"""What is saved into one file: odd views and names, arrays, objects; and wrong arguments."""

from __future__ import annotations

import os
import random
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from limits import limits
from ranks import cpu_mesh, on
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from zoo import same as same_bits

import torchlift
from torchlift import measure
from torchlift.distributed import save_consolidated
from torchlift.errors import CheckpointError, PlacementError


@limits(written=40, at_once=0)
def test_blocks_of_odd_views_are_put_together_right(tmp_path: Path) -> None:
    """Wherever a block of what is written at a time begins and ends in their dimensions."""
    cube = torch.randn(3, 5, 7)
    odd = torch.randn(4, 3, dtype=torch.complex64)
    state = {
        "turned": cube.permute(2, 0, 1),
        "stepped": cube[:, ::2, 1::3],
        "wide": torch.randn(5, 1, 3).expand(5, 4, 3),
        "conjugate": odd.conj().t(),
        "negative": odd.conj().imag,
        "half": cube.bfloat16().permute(1, 2, 0),
        "bits": torch.randn(5, 4).to(torch.float8_e4m3fn).t(),
        "none": torch.empty(0, 3, 2).permute(2, 0, 1),
        "scalar": odd.conj()[0, 0].imag,
    }
    for name in ("x.pt", "x.safetensors"):
        save_consolidated(state, tmp_path / name)
        with torchlift.open(tmp_path / name) as found:
            for key, value in state.items():
                assert same_bits(found[key], value.resolve_conj().resolve_neg()), key
        assert torchlift.verify(tmp_path / name).ok


def memory_of_saves(path: str) -> list[int]:
    """Save 192 MiB in views of any strides; the bytes that each save takes."""
    numel, found = 48 << 20, []
    for make in (
        lambda: torch.ones(numel),
        lambda: torch.ones(6 << 10, 8 << 10).t(),
        lambda: torch.ones(1).expand(numel),
        lambda: torch.ones(numel // 2, dtype=torch.complex64).conj(),
    ):
        state = {"w": make()}
        with measure.memory() as use:
            save_consolidated(state, path)
        found.append(use.added_anonymous)
        del state
    return found


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="owned memory is from /proc")
def test_a_save_copies_a_block_at_a_time_whatever_the_strides(tmp_path: Path) -> None:
    """192 MiB are saved within 40, where a copy of the whole would be 192."""
    found = measure.in_child(memory_of_saves, str(tmp_path / "x.pt")).value
    assert max(found) < 40 * (1 << 20), found


class _Text(str):
    pass


class _Choice(StrEnum):
    A = "a"


@pytest.mark.parametrize("key", [_Text("a"), _Choice.A, ("a", 1), "\ud800"])
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_name_that_readers_cannot_read_is_refused(tmp_path: Path, key: Any, suffix: str) -> None:
    """The message has it in a form that can be printed."""
    with pytest.raises(
        PlacementError, match=r"['\"]: cannot be the name of a tensor in a file"
    ) as met:
        save_consolidated({key: torch.ones(2)}, tmp_path / f"x.{suffix}")
    assert str(met.value).isprintable()
    assert os.listdir(tmp_path) == []


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    """In words, whatever the format."""
    for suffix in ("pt", "safetensors"):
        path = tmp_path / f"x.{suffix}"
        with pytest.raises(TypeError, match="metadata: expected a mapping, found a list"):
            save_consolidated({}, path, metadata=["a"])
        with pytest.raises(TypeError, match="not a int"):
            save_consolidated({}, 3)
    with pytest.raises(TypeError, match=r"metadata\['epoch'\] = 3: .* text only"):
        save_consolidated({}, path, metadata={"epoch": 3})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("generator", "expression"),
    [
        (numpy.random.default_rng(1), "generator.bit_generator.state"),
        (numpy.random.RandomState(1), "generator.get_state(legacy=False)"),
        (torch.Generator(), "generator.get_state()"),
        (random.Random(1), "generator.getstate()"),
    ],
    ids=["numpy", "numpy before 1.17", "torch", "random"],
)
def test_a_generator_is_saved_by_its_state(generator: Any, expression: str, tmp_path: Path) -> None:
    """The hint was to make a tensor of it, or to remove it."""
    with pytest.raises(torchlift.PlacementError, match="cannot be stored") as caught:
        torchlift.save({"generator": generator}, tmp_path / "run.pt")
    assert caught.value.hint == f"Save its state, which is plain data: {expression}."
    state = eval(expression, {"generator": generator})
    torchlift.save({"generator": state}, tmp_path / "run.pt")
    found = torchlift.open(tmp_path / "run.pt").tree()["generator"]
    assert same_bits(found, listed(state))


def listed(value: Any) -> Any:
    """Lists in place of arrays, as a file has them."""
    if isinstance(value, dict):
        return {key: listed(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, numpy.ndarray) else value


class _Stateful:
    """An object whose DTensor is seen only in its state dict."""

    def __init__(self, rows: int) -> None:
        mesh = cpu_mesh()
        whole = torch.arange(3.0 * rows).view(rows, 3)
        self.weight = distribute_tensor(whole, mesh, [Shard(0)])

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.weight, "rows": len(self.weight)}


@on(2, rows=(1, 4, 5))
def test_an_object_with_dtensors_in_its_state_is_saved_by_all_ranks(
    rows: int, folder: Path
) -> None:
    """Nobody passes a process group; one rank may hold no row; no temporary file stays."""
    state = {"app": _Stateful(rows)}
    torchlift.save(state, folder / "x.pt")
    torchlift.save(state, folder / "dcp", format="dcp")
    dist.barrier()
    assert sorted(os.listdir(folder)) == ["dcp", "x.pt"]
    for name in ("x.pt", "dcp"):
        with torchlift.open(folder / name) as found:
            assert torch.equal(found["app.weight"], torch.arange(3.0 * rows).view(rows, 3))
            assert found.objects["app.rows"] == rows
        assert torchlift.verify(folder / name).ok


@on(2)
def test_a_rank_that_saves_dtensors_alone_is_told_who_is_missing(folder: Path) -> None:
    """While another one saves to the same path. With its own group it need not wait."""
    path, group = folder / "x.pt", dist.new_group(timeout=timedelta(seconds=3))
    mesh = DeviceMesh("cpu", [dist.get_rank()])
    if dist.get_rank():
        torchlift.save({"w": torch.ones(2)}, path)
    else:
        state = {"w": distribute_tensor(torch.zeros(2), mesh, [Shard(0)])}
        with pytest.raises(CheckpointError, match=r"the same call on the ranks 0, 1; found"):
            torchlift.save(state, path, process_group=group)
        torchlift.save(state, folder / "alone.pt", process_group=mesh.get_group())
    dist.barrier()
    assert torch.load(path)["w"].tolist() == [1, 1]
    assert torch.load(folder / "alone.pt")["w"].tolist() == [0, 0]
    assert sorted(os.listdir(folder)) == ["alone.pt", "x.pt"]

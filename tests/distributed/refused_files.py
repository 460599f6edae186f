"""One rank cannot read its file, or its caller's code refuses what is in it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from refusals import SHARDED, check, is_last, last, unchanged
from safetensors.torch import save_file
from torch.nn.parallel import DistributedDataParallel
from wrapped_models import WRAPPERS, fsdp, net

import torchlift
import torchlift.distributed as ours
from torchlift._model.ranks import RankGroup
from torchlift.errors import CheckpointError


def files() -> Path:
    """A folder with a file that rank 0 wrote."""
    folder = Path(sys.argv[1]) / "files"
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        torch.save(net(5).state_dict(), folder / "net.pt")
    dist.barrier()
    return folder


@check
def a_file_that_one_rank_cannot_read() -> None:
    """A shard that is missing, or cut: every rank names the rank."""
    folder = files()
    mine = folder / f"net-{dist.get_rank()}"
    mine.mkdir(exist_ok=True)
    state = net(5).state_dict()
    shards = [mine / f"{key}.safetensors" for key in state]
    for shard, (key, value) in zip(shards, state.items(), strict=True):
        save_file({key: value}, shard)
    index = {"weight_map": {key: f"{key}.safetensors" for key in state}}
    (mine / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    for how in ("cut", "missing"):
        if is_last():
            if how == "cut":
                shards[-1].write_bytes(shards[-1].read_bytes()[:-8])
            else:
                shards[-1].unlink()
        for wrap in SHARDED:
            for source in ("mmap", "read"):
                model = WRAPPERS[wrap](net())
                with unchanged(model) as caught:
                    torchlift.load(model, mine, source=source)
                assert f"on rank {last()}: " in str(caught.value), str(caught.value)
        with unchanged(DistributedDataParallel(net()).module) as caught:
            torchlift.load(net(), mine, collective=True)


@check
def an_error_that_is_raised_again_before_anything_is_exchanged() -> None:
    """The others hear of it again; so they do of one that has the place of one that is gone."""
    again = ValueError("no")

    def go_on() -> None:
        with RankGroup.of_all().together() as agree:
            if is_last():
                raise again
            agree(False)

    for _ in range(2):
        with pytest.raises((ValueError, CheckpointError), match="no"):
            go_on()
        dist.barrier()


@check
def a_transform_that_raises_on_one_rank() -> None:
    """Half-way through the tensors; what it raises stays what it is where it was raised."""
    path, calls = files() / "net.pt", [0]

    def transform(key: str, tensor: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if is_last() and calls[0] % 4 == 0:
            raise ValueError("no")
        return tensor * 2

    for wrap in SHARDED:
        for mode in ("copy", "assign", "swap"):
            model = WRAPPERS[wrap](net())
            with unchanged(model) as caught:
                torchlift.load(model, path, transform=transform, mode=mode)
            assert is_last() == isinstance(caught.value, ValueError)
            assert is_last() or f"on rank {last()}: ValueError: no" in str(caught.value)


@check
def a_strict_load_of_a_file_that_does_not_fit() -> None:
    path = files() / "net.pt"
    for wrap in SHARDED:
        model = WRAPPERS[wrap](net())
        with unchanged(model) as caught:
            torchlift.load(
                model,
                path,
                strict=is_last(),
                rename=lambda key: None if key == "inp.weight" else key,
            )
        assert "inp.weight" in str(caught.value)


@check
def other_names_for_one_rank() -> None:
    path = files() / "net.pt"
    model = fsdp(net())
    with unchanged(model):
        torchlift.load(model, path, rename=(lambda key: f"x.{key}") if is_last() else None)


@check
def a_reader_that_one_rank_cannot_open() -> None:
    """It says so when all ranks listen, and not while the others wait in a collective."""
    path = files() / "net.pt"
    if is_last():
        path = path.with_name("nowhere.pt")
    model = fsdp(net())
    state = model.state_dict()
    with unchanged(model) as caught:
        dcp.load(state, storage_reader=ours.CheckpointReader(path))
    # Before pytorch#177739 torch drops what the reader has said.
    assert "nowhere.pt" in str(caught.value) or str(caught.value).endswith("metadata is None\n")


@check
def a_reader_whose_file_is_cut_on_one_rank() -> None:
    mine = files() / f"cut-{dist.get_rank()}.pt"
    torch.save(net(5).state_dict(), mine)
    if is_last():
        mine.write_bytes(mine.read_bytes()[:-700])
    model = fsdp(net())
    state = model.state_dict()
    with unchanged(model):
        dcp.load(state, storage_reader=ours.CheckpointReader(mine))

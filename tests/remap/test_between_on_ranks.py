"""Renames between worlds on two ranks: each reads the rows of its own shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gguf_files import small_model, write_gguf
from ranks import cpu_mesh, on
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import torchlift
from torchlift import remap
from torchlift.errors import FormatError


def _file(folder: Path, name: str, **words: Any) -> Path:
    path = folder / name
    if dist.get_rank() == 0:
        write_gguf(small_model("LlamaForCausalLM"), path, **words)
    dist.barrier()
    return path


def _sharded(dim: int) -> nn.Module:
    """The same model with other values, whose matrices are cut along a dimension."""
    model: nn.Module = small_model("LlamaForCausalLM")
    for module in model.modules():
        for name, one in list(module.named_parameters(recurse=False)):
            if one.dim() == 2:
                shards = distribute_tensor(torch.zeros_like(one), cpu_mesh(), [Shard(dim)])
                setattr(module, name, nn.Parameter(shards))
    return model


def _assert_equal(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, one in model.state_dict().items():
        whole = one.full_tensor() if hasattr(one, "full_tensor") else one
        assert torch.equal(whole, expected[name]), name


@on(2)
def test_shards_have_the_rows_of_transformers(folder: Path) -> None:
    """Whichever dimension is cut, of a file of floats."""
    path = _file(folder, "floats.gguf")
    expected = small_model("LlamaForCausalLM").state_dict()
    for dim in (0, 1):
        model = _sharded(dim)
        rule = remap.from_to("gguf->transformers", model)
        report = torchlift.load(model, path, rename=rule)
        _assert_equal(model, expected)
        matrices = sum(one.nbytes for name, one in expected.items() if one.dim() == 2)
        assert report.bytes_read < matrices * 0.6  # not those of the other rank


@on(2)
def test_shards_of_blocks_are_computed_apart(folder: Path) -> None:
    """Whole rows of blocks are a shard's own; a block that two ranks would share is refused."""
    path = _file(folder, "blocks.gguf", kind="Q8_0")
    rule = remap.from_to("gguf->transformers", small_model("LlamaForCausalLM"))
    whole = small_model("LlamaForCausalLM")
    torchlift.load(whole, path, rename=rule)
    model = _sharded(0)
    torchlift.load(model, path, rename=rule)
    _assert_equal(model, whole.state_dict())
    with pytest.raises(FormatError, match="a slice would cut blocks of quantised values"):
        torchlift.load(_sharded(1), path, rename=rule)

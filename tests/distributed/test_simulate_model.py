"""What a mesh would read of a checkpoint that is loaded into a given model."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import transformers as hf
from checkpoint_files import write_safetensors
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import torchlift
from torchlift import remap
from torchlift.distributed import simulate
from torchlift.errors import MismatchError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.zeros(3), persistent=False)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """A checkpoint of `Tied` with a prefix, an optimizer's state beside it and a key too many."""
    model = {f"module.{key}": value for key, value in Tied().state_dict().items()}
    model["module.extra"] = torch.zeros(100)
    torch.save({"model": model, "moments": torch.zeros(1000)}, tmp_path / "tied.pt")
    return tmp_path / "tied.pt"


def _unwrap(key: str) -> str | None:
    return None if "extra" in key else key.removeprefix("module.")


def test_with_a_model_only_what_it_loads_is_read(tied: Path) -> None:
    """A tie once, dropped keys and other containers never; what no file has is held, not read."""
    model = torchlift.skeleton(Tied)
    found = simulate(tied, "fsdp=2", model=model, root="model", rename=_unwrap)
    weights = 160 + 32
    assert found.nbytes == sum(found.bytes) == weights
    assert found.local_bytes == (weights // 2 + 12,) * 2
    assert found.plan is not None
    assert found.plan.tied == (("embed.weight", "head.weight"),)
    assert found.plan.replayed == ["mask"]
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert found.to_dict()["plan"] == {
        "loaded": 4, "missing_keys": [], "unexpected_keys": [], "dropped": [], "mismatched": {},
        "replayed": ["mask"], "deferred": [], "tied": [["embed.weight", "head.weight"]],
        "renamed": {f"module.{k}": k for k in Tied().state_dict()}, "merged": {}, "split": {},
    }  # fmt: skip
    assert "each rank holds 108 B to 108 B once 4 tensors are loaded" in str(found)


def test_a_dtype_changes_what_is_held_and_not_what_is_read(tied: Path) -> None:
    """The bytes of the file are those of the file; casting happens on the rank."""
    given = {"root": "model", "rename": _unwrap, "dtype": torch.float16}
    found = simulate(tied, "dp=1", model=torchlift.skeleton(Tied), **given)
    assert (found.bytes, found.local_bytes) == ((192,), (96 + 12,))
    assert simulate(tied, "dp=1", **given).local_bytes == (96,)
    assert simulate(Tied(), "dp=1", dtype=torch.float16).local_bytes == (96 + 12,)


def test_names_and_shapes_that_do_not_fit_are_reported_as_ever(tied: Path) -> None:
    """Strictly in one error; else in the plan, and what is not loaded costs nothing."""
    model = torchlift.skeleton(Tied)
    with pytest.raises(MismatchError, match=r"remap\.strip") as caught:
        simulate(tied, "fsdp=2", model=model, root="model")
    assert caught.value.missing_keys == ["embed.weight", "head.weight", "norm.weight", "norm.bias"]
    strip = remap.strip("module")
    found = simulate(tied, "dp=2", model=model, root="model", rename=strip, strict=False)
    assert found.bytes == (192, 192)
    assert found.plan is not None
    assert found.plan.unexpected_keys == ["extra"]

    class Wider(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(6)

    wider = torchlift.skeleton(Wider)
    with pytest.raises(MismatchError, match="mismatched"):
        simulate(tied, "dp=2", model=wider, root="model", rename=_unwrap)
    found = simulate(
        tied, "dp=2", model=wider, root="model", rename=_unwrap, strict=False,
        ignore_mismatched=True,
    )  # fmt: skip
    assert found.bytes == (160, 160)
    assert found.local_bytes == (160 + 48 + 12,) * 2
    assert found.plan is not None
    assert list(found.plan.mismatched) == ["norm.weight", "norm.bias"]


def test_arguments_that_would_be_ignored_are_refused(tied: Path) -> None:
    """Names are matched between a checkpoint and a model, and nowhere else."""
    model = torchlift.skeleton(Tied)
    for words in ({"root": "model"}, {"rename": _unwrap}, {"model": model}):
        with pytest.raises(ValueError, match="are for a checkpoint, not for a module"):
            simulate(model, "fsdp=2", **words)
    for words in ({"strict": False}, {"ignore_mismatched": True}):
        with pytest.raises(ValueError, match="need the model"):
            simulate(tied, "fsdp=2", **words)


def test_without_a_model_keys_can_be_dropped_and_aliases_count_once(tied: Path) -> None:
    """As in `torchlift plan` of a file alone."""
    found = simulate(tied, "fsdp=2", root="model", rename=_unwrap)
    assert found.nbytes == sum(found.bytes) == 192
    assert simulate(tied, "fsdp=2", root="model").nbytes == 192 + 400


def parallelize_llama(model, mesh) -> None:
    """What torchtitan does with one: columns, rows and the vocabulary, a stage, FSDP per layer."""
    dims = mesh.mesh_dim_names
    layers = model.model.layers
    if "pp" in dims:
        stage, depth = mesh["pp"].get_local_rank(), mesh["pp"].size()
        for n in range(len(layers)):
            if n * depth // len(layers) != stage:
                layers[n] = None
        if stage > 0:
            del model.model.embed_tokens
        if stage < depth - 1:
            del model.model.norm, model.lm_head
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    shard = {"mesh": mesh["replicate", "fsdp"] if "replicate" in dims else mesh["fsdp"]}
    for layer in filter(None, layers):
        fully_shard(parallelize_module(layer, mesh["tp"], plan), **shard)
    if hasattr(model.model, "embed_tokens"):
        parallelize_module(model, mesh["tp"], {"model.embed_tokens": RowwiseParallel()})
    if hasattr(model, "lm_head"):
        parallelize_module(model, mesh["tp"], {"lm_head": ColwiseParallel()})
    fully_shard(model, **shard)


@pytest.mark.slow
def test_seventy_billion_parameters_on_eight_thousand_ranks_take_seconds(tmp_path: Path) -> None:
    """A transformers model, and a file of its names and shapes with a hole instead of weights."""
    config = hf.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    model = torchlift.skeleton(hf.LlamaForCausalLM, config)
    header, at = {}, 0
    for key, tensor in sorted(model.state_dict().items()):
        end = at + 2 * tensor.numel()
        header[key] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    path = write_safetensors(tmp_path / "llama.safetensors", header)
    os.truncate(path, path.stat().st_size + at)
    norms = sum(2 * t.numel() for k, t in model.state_dict().items() if "norm" in k)
    start = time.process_time()
    for mesh in ("fsdp=1024,tp=8", "pp=4,fsdp=256,tp=8", "replicate=2,fsdp=512,tp=8"):
        found = simulate(path, mesh, model=model, parallelize=parallelize_llama)
        assert found.ranks == 8192
        assert found.nbytes == at
        copies = 2 if "replicate" in mesh else 1
        assert sum(found.bytes) == copies * (at + 7 * norms)
    assert time.process_time() - start < 30

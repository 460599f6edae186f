"""transformers' own checkpoints, each compared with what ``from_pretrained`` makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import torchlift

BERT = BertConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=24, max_position_embeddings=20,
)  # fmt: skip
GPT2 = GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=20)
LLAMA = LlamaConfig(
    vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=20,
)  # fmt: skip
MODELS = {BertModel: BERT, GPT2LMHeadModel: GPT2, LlamaForCausalLM: LLAMA}
IDS = torch.arange(10).view(2, 5)


def same(one: nn.Module, two: nn.Module, but: tuple[str, ...] = ()) -> None:
    """Parameters, buffers of every kind, and dtypes."""
    for kind in ("named_parameters", "named_buffers"):
        found, expected = (dict(getattr(model, kind)()) for model in (one, two))
        assert found.keys() == expected.keys()
        for name in expected.keys() - set(but):
            assert found[name].dtype == expected[name].dtype, name
            assert torch.equal(found[name], expected[name]), name
    if not but:
        with torch.no_grad():
            torch.testing.assert_close(one.eval()(IDS)[0], two.eval()(IDS)[0])


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("size", "dtype"), [("1GB", None), ("10KB", "bfloat16")])
def test_a_saved_model_loads_as_from_pretrained(kind, size, dtype, tmp_path):
    """One file or shards, tied weights, the file's dtype or another."""
    torch.manual_seed(1)
    kind(MODELS[kind]).save_pretrained(tmp_path, max_shard_size=size)
    expected = kind.from_pretrained(tmp_path, dtype=dtype or torch.float32)
    model = torchlift.skeleton(kind, MODELS[kind])
    torchlift.load(model, tmp_path, dtype=dtype)
    same(model, expected)


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((kind, "job.pt") for kind in MODELS),
     *((GPT2LMHeadModel, name) for name in ("folder", "model.safetensors", "URL"))],
)  # fmt: skip
def test_from_pretrained_takes_an_open_checkpoint(kind: Any, name: str, tmp_path: Path) -> None:
    """A torch file, a DCP folder, safetensors and a URL are the model that was saved, mapped."""
    torch.manual_seed(1)
    expected = kind(MODELS[kind])
    state = {"model": expected.state_dict(), "step": 7}
    if name == "URL":
        with fsspec.open(f"memory://{tmp_path.name}/job.pt", "wb") as file:
            torch.save(state, file)
        path, root = f"memory://{tmp_path.name}/job.pt", "model"
    elif name == "job.pt":
        torch.save(state, tmp_path / name)
        path, root = str(tmp_path / name), "model"
    elif name == "folder":
        torchlift.save(state, tmp_path / name, format="dcp")
        path, root = str(tmp_path / name), "model"
    else:
        torchlift.save(expected.state_dict(), tmp_path / name)
        path, root = str(tmp_path / name), None
    with torchlift.open(path, root=root) as ckpt:
        model = kind.from_pretrained(None, config=MODELS[kind], state_dict=ckpt)
        one = next(iter(ckpt))
        if name != "URL":
            first = ckpt[one].untyped_storage().data_ptr()
            assert any(p.untyped_storage().data_ptr() == first for p in model.parameters())
    same(model, expected)


def test_from_pretrained_converts_what_is_mapped(tmp_path: Path) -> None:
    """Experts one by one in a folder of DCP become transformers' one tensor of them."""
    config = MixtralConfig(
        hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, vocab_size=50,
    )  # fmt: skip
    torch.manual_seed(1)
    expected = MixtralForCausalLM(config)
    expected.save_pretrained(tmp_path / "hf")
    torchlift.convert(tmp_path / "hf", tmp_path / "dcp", format="dcp")
    with torchlift.open(tmp_path / "dcp") as ckpt:
        assert any("experts.1.w2" in key for key in ckpt)
        model = MixtralForCausalLM.from_pretrained(None, config=config, state_dict=ckpt)
    same(model, expected)

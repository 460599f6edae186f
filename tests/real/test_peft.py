"""PEFT's adapters: a base and an adapter in one call, as PEFT's own loader puts them together."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlift

pytest.importorskip("peft")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
)  # fmt: skip
TARGETS = ("q_proj", "v_proj")
IDS = torch.arange(12).view(2, 6)


def lora() -> Any:
    return LoraConfig(r=4, target_modules=list(TARGETS), init_lora_weights=False)


def adapted() -> Any:
    return get_peft_model(LlamaForCausalLM(CONFIG), lora())


def in_peft(key: str) -> str:
    """The name that PEFT's wrapper has for a key of a base or of an adapter."""
    if key.startswith("base_model."):
        return re.sub(r"(lora_[AB])\.weight$", r"\1.default.weight", key)
    layer = next((name for name in TARGETS if f".{name}." in key), None)
    key = key.replace(f".{layer}.", f".{layer}.base_layer.") if layer else key
    return f"base_model.model.{key}"


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    """A base and an adapter, each saved by its library."""
    torch.manual_seed(1)
    LlamaForCausalLM(CONFIG).save_pretrained(tmp_path / "base")
    torch.manual_seed(2)
    adapted().save_pretrained(tmp_path / "adapter")
    return tmp_path / "base", tmp_path / "adapter"


def same(one: nn.Module, two: nn.Module) -> None:
    states = one.state_dict(), two.state_dict()
    assert states[0].keys() == states[1].keys()
    for key, value in states[1].items():
        assert torch.equal(states[0][key], value), key
    with torch.no_grad():
        assert torch.equal(one.eval()(IDS).logits, two.eval()(IDS).logits)


@pytest.mark.parametrize("make", [adapted, lambda: torchlift.skeleton(adapted)])
def test_a_base_and_an_adapter_load_in_one_call(make: Any, saved: tuple[Path, Path]) -> None:
    """As PeftModel.from_pretrained over a base of from_pretrained."""
    base, adapter = saved
    expected = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), adapter)
    model = make()
    report = torchlift.load(model, [base, adapter], rename=in_peft)
    same(model, expected)
    for key, item in report.loaded.items():
        assert Path(item.path).is_relative_to(adapter if ".lora_" in key else base), key
    assert not report.missing_keys
    assert not report.unexpected_keys


def test_an_adapter_alone_goes_into_a_live_model(saved: tuple[Path, Path]) -> None:
    """The base's weights may be missing by name; nothing of them changes."""
    base, adapter = saved
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base), lora())
    torchlift.load(model, adapter, rename=in_peft, allow_missing=["*"])
    same(model, PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), adapter))
    with pytest.raises(torchlift.MismatchError, match=r"missing \(\d+\).*base_model\.model\."):
        torchlift.load(model, adapter, rename=in_peft)

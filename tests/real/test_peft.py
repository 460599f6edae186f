"""PEFT's adapters: a base and an adapter in one call, as PEFT's own loader puts them together."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlift
from torchlift.errors import MismatchError, PlacementError

pytest.importorskip("peft")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
    )

    from torchlift.integrations.peft import merge_lora, peft_names

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


def test_peft_itself_says_which_names_are_the_adapter_s(saved: tuple[Path, Path]) -> None:
    """The mapping of `peft_names` loads both, and the adapter alone."""
    base, adapter = saved
    expected = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), adapter)
    model = torchlift.skeleton(adapted)
    report = torchlift.load(model, [base, adapter], rename=peft_names(model))
    same(model, expected)
    assert not report.missing_keys
    live = adapted()
    torchlift.load(live, adapter, rename=peft_names(live), allow_missing=["*"])
    own = get_peft_model_state_dict(expected)
    assert own.keys() == get_peft_model_state_dict(live).keys()
    for key, value in get_peft_model_state_dict(live).items():
        assert torch.equal(value, own[key]), key


PADDED = LlamaConfig(**{**CONFIG.to_dict(), "pad_token_id": 0})


def classifier() -> Any:
    config = LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"], init_lora_weights=False)
    return get_peft_model(LlamaForSequenceClassification(PADDED), config)


def test_a_head_of_the_adapter_is_beside_that_of_the_base(tmp_path: Path) -> None:
    """What PEFT keeps twice, as ``modules_to_save``, is found under both names."""
    torch.manual_seed(1)
    base = LlamaForSequenceClassification(PADDED)
    base.save_pretrained(tmp_path / "base")
    torch.manual_seed(2)
    classifier().save_pretrained(tmp_path / "adapter")
    expected = PeftModel.from_pretrained(base, tmp_path / "adapter")
    model = torchlift.skeleton(classifier)
    sources = [tmp_path / "base", tmp_path / "adapter"]
    torchlift.load(model, sources, rename=peft_names(model))
    same(model, expected)
    plain = torchlift.skeleton(LlamaForSequenceClassification, PADDED)
    merge = merge_lora(tmp_path / "adapter", plain)
    torchlift.load(plain, tmp_path / "base", transform=merge)
    same(plain, expected.merge_and_unload())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True, "lora_alpha": 3},
        {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 5}},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": "all-linear", "bias": "all"},
    ],
)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_an_adapter_is_merged_as_peft_merges_it(options: Any, dtype: Any, tmp_path: Path) -> None:
    """To the bit, while a model is loaded and while a file is converted."""
    config = lora()
    for name, value in options.items():
        setattr(config, name, set(value) if isinstance(value, list) else value)
    torch.manual_seed(1)
    LlamaForCausalLM(CONFIG).to(dtype).save_pretrained(tmp_path / "base")
    torch.manual_seed(2)
    model = get_peft_model(LlamaForCausalLM(CONFIG), config)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    base = LlamaForCausalLM.from_pretrained(tmp_path / "base")
    assert base.dtype == dtype
    expected = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    found = torchlift.skeleton(LlamaForCausalLM, CONFIG)
    merge = merge_lora(tmp_path / "adapter", found)
    torchlift.load(found, tmp_path / "base", transform=merge)
    name = "model.embed_tokens.weight"
    if dtype == torch.bfloat16 and "embed_tokens" in config.target_modules:
        close = found.get_parameter(name)
        torch.testing.assert_close(close, expected.get_parameter(name), rtol=0.02, atol=0.02)
        expected.get_parameter(name).data = close
    same(found, expected)
    merge = merge_lora(tmp_path / "adapter", tmp_path / "base")
    torchlift.convert(tmp_path / "base", tmp_path / "merged.safetensors", transform=merge)
    assert torchlift.diff(tmp_path / "merged.safetensors", expected.state_dict()).equal


def test_an_adapter_of_turned_weights_is_merged(tmp_path: Path) -> None:
    """GPT-2 has the sides of its matrices exchanged."""
    small = GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=20)
    torch.manual_seed(1)
    base = GPT2LMHeadModel(small)
    base.save_pretrained(tmp_path / "base")
    config = LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    get_peft_model(GPT2LMHeadModel(small), config).save_pretrained(tmp_path / "adapter")
    found = torchlift.skeleton(GPT2LMHeadModel, small)
    merge = merge_lora(tmp_path / "adapter", found)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    assert repr(merge) == f"merge_lora({str(file)!r})"
    torchlift.load(found, tmp_path / "base", transform=merge)
    same(found, PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload())


def test_what_only_peft_can_merge_is_refused(saved: tuple[Path, Path]) -> None:
    """Another method, a base that is not the adapter's, and a name that no layer has."""
    base, adapter = saved
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text())
    for change, shown in (({"use_dora": True}, "use_dora=True"),
                          ({"init_lora_weights": "pissa"}, "'pissa'"),
                          ({"target_parameters": ["w"]}, "target_parameters"),
                          ({"peft_type": "IA3"}, "IA3")):  # fmt: skip
        kept = config if "peft_type" not in change else {"target_modules": None}
        file.write_text(json.dumps({**kept, **change}))
        with pytest.raises(PlacementError, match=rf"a plain LoRA.*{shown}.*merge_and_unload"):
            merge_lora(adapter, base)
    file.write_text(json.dumps(config))
    with pytest.raises(MismatchError, match=r"q_proj\.weight.*no such weight"):
        merge_lora(adapter, nn.Linear(2, 2))
    other = LlamaConfig(**{**CONFIG.to_dict(), "hidden_size": 32})
    with pytest.raises(MismatchError, match=r"\(16, 16\); found \(16, 32\)") as error:
        merge_lora(adapter, LlamaForCausalLM(other))
    assert error.value.mismatched


def test_an_adapter_that_torchlift_saves_is_peft_s(
    saved: tuple[Path, Path], tmp_path: Path
) -> None:
    """PEFT's names and PEFT's configuration: its own loader reads the folder."""
    base, _ = saved
    torch.manual_seed(3)
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base), lora())
    folder = tmp_path / "mine"
    model.peft_config["default"].save_pretrained(folder)
    torchlift.save(get_peft_model_state_dict(model), folder / "adapter_model.safetensors")
    same(PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), folder), model)

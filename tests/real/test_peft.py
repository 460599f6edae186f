"""PEFT's adapters: a base and an adapter in one call, as PEFT's own loader puts them together."""

from __future__ import annotations

import copy
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
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
    )

    from torchlift.integrations.peft import peft_names

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


@pytest.mark.parametrize("source", ["adapter", "both", "whole"])
def test_a_plain_model_is_not_advised_to_leave_the_adapter_out(saved, source, tmp_path):
    """What the hint says, step by step, gives the plain model that computes what PEFT's does."""
    expected = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(saved[0]), saved[1])
    torchlift.save(expected, tmp_path / "whole.pt")
    given = {"adapter": saved[1], "both": [*saved], "whole": tmp_path / "whole.pt"}[source]
    with pytest.raises(torchlift.MismatchError) as caught:
        torchlift.load(LlamaForCausalLM(CONFIG), given)
    hint = str(caught.value.hint)
    assert "strip" not in hint
    assert "allow_unexpected" not in hint
    assert "rename=torchlift.integrations.peft.peft_names(model)" in hint
    model = adapted()
    given = [*saved] if source == "adapter" else given  # "needs the base before it"
    torchlift.load(model, given, rename=peft_names(model))
    plain = model.merge_and_unload()
    assert type(plain) is LlamaForCausalLM
    with torch.no_grad():
        torch.testing.assert_close(plain.eval()(IDS).logits, expected.eval()(IDS).logits)


BIASED = LlamaConfig(
    **{**CONFIG.to_dict(), "attention_bias": True, "mlp_bias": True, "pad_token_id": 0}
)
GPT2 = GPT2Config(
    n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0
)  # fmt: skip
PARTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "biases": (LlamaForCausalLM, BIASED, {"bias": "all"}),
    "biases of its layers": (LlamaForCausalLM, BIASED, {"bias": "lora_only"}),
    "a module": (LlamaForCausalLM, BIASED, {"modules_to_save": ["mlp"]}),
    "both": (LlamaForCausalLM, BIASED, {"bias": "all", "modules_to_save": ["mlp", "lm_head"]}),
    "a head": (
        LlamaForSequenceClassification, BIASED,
        {"bias": "all", "modules_to_save": ["k_proj"], "task_type": "SEQ_CLS"},
    ),
    "a part with a bias": (
        GPT2LMHeadModel, GPT2,
        {"target_modules": ["c_attn"], "bias": "all", "modules_to_save": ["c_fc", "ln_f"],
         "fan_in_fan_out": True},
    ),
    "DoRA": (LlamaForCausalLM, BIASED, {"bias": "all", "use_dora": True}),
    "tokens": (LlamaForCausalLM, BIASED, {"bias": "all", "trainable_token_indices": [0, 3]}),
    "embeddings": (LlamaForCausalLM, BIASED, {"target_modules": ["embed_tokens", "q_proj"]}),
    "the last layer": (LlamaForCausalLM, BIASED, {"target_modules": ["lm_head"]}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"), [*((kind, "default") for kind in PARTS), ("both", "other")]
)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_every_value_of_an_adapter_is_loaded_as_peft_loads_it(kind, name, tmp_path):
    """Biases, whole modules and both, with a base and alone: PEFT's loader has the same values."""
    model_class, config, options = PARTS[kind]
    options = {"target_modules": ["q_proj"], "init_lora_weights": False, **options}

    def adapted_model(base: Any) -> Any:
        # PEFT keeps what it is given: a list of its own for each model.
        return get_peft_model(base, LoraConfig(r=2, **copy.deepcopy(options)), name)

    def scrambled(model: Any, seed: int) -> Any:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape))
        return model

    base, folder = tmp_path / "base", tmp_path / "adapter"
    scrambled(model_class(config), 1).save_pretrained(base)
    scrambled(adapted_model(model_class(config)), 2).save_pretrained(folder)
    adapter = folder if name == "default" else folder / name
    expected = PeftModel.from_pretrained(model_class.from_pretrained(base), adapter, name)
    wanted = expected.state_dict()
    for model in (
        adapted_model(model_class(config)),
        torchlift.skeleton(lambda: adapted_model(model_class(config))),
    ):
        report = torchlift.load(model, [base, adapter], rename=peft_names(model, name))
        assert not {*report.missing_keys, *report.unexpected_keys}
        found = model.state_dict()
        assert found.keys() == wanted.keys()
        assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []
    model = adapted_model(model_class.from_pretrained(base))
    torchlift.load(model, adapter, rename=peft_names(model, name), allow_missing=["*"])
    found = model.state_dict()
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []


def test_an_adapter_that_torchlift_saves_is_peft_s(saved, tmp_path):
    """PEFT's names and PEFT's configuration: its own loader reads the folder."""
    base, _ = saved
    torch.manual_seed(3)
    model = get_peft_model(LlamaForCausalLM.from_pretrained(base), lora())
    folder = tmp_path / "mine"
    model.peft_config["default"].save_pretrained(folder)
    torchlift.save(get_peft_model_state_dict(model), folder / "adapter_model.safetensors")
    same(PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), folder), model)

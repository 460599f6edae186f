"""PEFT's adapters: a base and an adapter in one call, as PEFT's own loader puts them together."""

from __future__ import annotations

import copy
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


def test_the_error_for_a_base_names_the_rename_that_loads_it(saved: tuple[Path, Path]) -> None:
    """One prefix is not enough: PEFT also renames the layers that it adapts."""
    with pytest.raises(torchlift.MismatchError) as caught:
        torchlift.load(adapted(), [*saved])
    assert "rename=torchlift.integrations.peft.peft_names(model)" in str(caught.value.hint)
    model = adapted()
    torchlift.load(model, [*saved], rename=torchlift.integrations.peft.peft_names(model))


@pytest.mark.parametrize("source", ["adapter", "both", "whole"])
def test_a_plain_model_is_not_advised_to_leave_the_adapter_out(
    saved: tuple[Path, Path], source: str, tmp_path: Path
) -> None:
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


def test_a_wrapper_without_an_adapter_is_a_prefix(tmp_path: Path) -> None:
    """Only what would be lost needs more than a rename."""
    model = nn.Linear(2, 2)
    torchlift.save(
        {f"base_model.model.{k}": v for k, v in model.state_dict().items()}, tmp_path / "m.pt"
    )
    with pytest.raises(torchlift.MismatchError, match=r"remap\.strip"):
        torchlift.load(nn.Linear(2, 2), tmp_path / "m.pt")


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
}  # fmt: skip


@pytest.mark.parametrize("name", ["default", "other"])
@pytest.mark.parametrize("kind", PARTS)
def test_every_value_of_an_adapter_is_loaded_as_peft_loads_it(
    kind: str, name: str, tmp_path: Path
) -> None:
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


def changed(base: nn.Module, folder: Path, **options: Any) -> Any:
    """Save an adapter of a base with values of all kinds, and return what PEFT merges."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what PEFT thinks of it
        model = get_peft_model(copy.deepcopy(base), LoraConfig(r=2, **options))
        torch.manual_seed(3)
        for param in model.parameters():
            if param.requires_grad:
                param.data.normal_()
        model.save_pretrained(folder)
        return PeftModel.from_pretrained(copy.deepcopy(base), folder).merge_and_unload()


LORA = [
    (lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), {"target_modules": ["0"], **more})
    for more in ({"bias": "all"}, {"bias": "lora_only"}, {"modules_to_save": ["1"]})
] + [
    (lambda: LlamaForCausalLM(CONFIG), {"target_modules": targets})
    for targets in (["embed_tokens", "q_proj"], ["lm_head"])
]


@pytest.mark.parametrize(("make", "options"), LORA)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_what_an_adapter_has_of_its_base_takes_the_place_of_that(
    make: Any, options: Any, tmp_path: Path
) -> None:
    """Biases and embeddings beside the base, as PEFT loads them; the base alone has its own."""
    base = make()
    changed(make(), tmp_path / "adapter", **options)
    expected = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter").state_dict()
    model = get_peft_model(make(), LoraConfig(r=2, **options))
    names = peft_names(model)
    torchlift.load(model, [base.state_dict(), tmp_path / "adapter"], rename=names)
    assert torchlift.diff(model.state_dict(), expected).equal
    torchlift.load(model, base.state_dict(), rename=names, allow_missing=["*"])
    for key, value in base.state_dict().items():
        assert torch.equal(model.state_dict()[names(key)], value), key


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

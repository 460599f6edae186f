"""PEFT's adapters: a base and an adapter in one call, as PEFT's own loader puts them together."""

from __future__ import annotations

import copy
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
    from transformers.pytorch_utils import Conv1D

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


TIED = GPT2Config(
    vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=20, bos_token_id=0, eos_token_id=1,
)  # fmt: skip
HEAD = "lm_head.weight"
EMBEDDING = "transformer.wte.weight"


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


def gpt2(**options: Any) -> Any:
    torch.manual_seed(1)
    return GPT2LMHeadModel(GPT2Config(**{**TIED.to_dict(), **options}))


@pytest.mark.parametrize("kept", [HEAD, EMBEDDING, None])
@pytest.mark.parametrize("targets", [["wte"], ["lm_head"], ["wte", "lm_head", "c_proj"]])
def test_a_tied_weight_gets_every_change_under_any_of_its_names(
    targets: Any, kept: str | None, tmp_path: Path
) -> None:
    """The model says what is tied; of the file it does not matter which name it has."""
    base = gpt2()
    expected = changed(base, tmp_path / "adapter", target_modules=targets)
    state = base.state_dict()
    left = {
        key: state[key] for key in state if kept is None or key not in {HEAD, EMBEDDING} - {kept}
    }
    torch.save(left, tmp_path / "base.pt")
    found = torchlift.skeleton(GPT2LMHeadModel, TIED)
    merge = merge_lora(tmp_path / "adapter", found)
    torchlift.load(found, tmp_path / "base.pt", transform=merge)
    same(found, expected)
    torchlift.convert(tmp_path / "base.pt", tmp_path / "merged.pt", transform=merge)
    merged = {key: value for key, value in expected.state_dict().items() if key in left}
    assert torchlift.diff(tmp_path / "merged.pt", merged).equal
    if kept is None and "c_proj" not in targets:  # one storage: the file says it, too
        merge = merge_lora(tmp_path / "adapter", tmp_path / "base.pt")
        torchlift.convert(tmp_path / "base.pt", tmp_path / "again.pt", transform=merge)
        assert torchlift.diff(tmp_path / "again.pt", merged).equal


def test_a_change_that_would_find_no_weight_is_refused(tmp_path: Path) -> None:
    """Names that begin otherwise than those that it was looked up for, and a name of a tie."""
    base = nn.Sequential(nn.Linear(2, 3))
    changed(base, tmp_path / "adapter", target_modules=["0"])
    merge = merge_lora(tmp_path / "adapter", base)
    wrapped = nn.DataParallel(copy.deepcopy(base))
    with pytest.raises(MismatchError, match=r"'module\.0\.weight'.*expected 0\.weight.*merge_lora"):
        torchlift.load(wrapped, base.state_dict(), transform=merge)
    torch.save({"model": base.state_dict()}, tmp_path / "job.pt")
    with pytest.raises(MismatchError, match="would change nothing"):
        torchlift.convert(tmp_path / "job.pt", tmp_path / "out.pt", transform=merge)
    torchlift.convert(tmp_path / "job.pt", tmp_path / "out.pt", root="model", transform=merge)
    with torchlift.open(tmp_path / "job.pt", root="model") as inside:
        again = merge_lora(tmp_path / "adapter" / "adapter_model.safetensors", inside)
    torchlift.convert(tmp_path / "job.pt", tmp_path / "2.pt", root="model", transform=again)
    assert torchlift.diff(tmp_path / "2.pt", tmp_path / "out.pt").equal


def test_what_is_no_folder_of_an_adapter_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT would take it for a name on the hub."""
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("asks the hub"))
    base = nn.Sequential(nn.Linear(2, 3))
    torch.save(base.state_dict(), tmp_path / "base.pt")
    for wrong in (tmp_path, tmp_path / "nothing", tmp_path / "base.pt", "org/adapter"):
        with pytest.raises(torchlift.FormatError, match=r"a folder of.*adapter_config") as caught:
            merge_lora(wrong, base)
        assert isinstance(caught.value, FileNotFoundError)


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


def test_one_new_value_for_two_tied_names_is_refused(tmp_path: Path) -> None:
    """PEFT unties them, which a tied model cannot hold; one that is not tied takes it."""
    base, options = gpt2(), {"target_modules": ["c_fc"], "modules_to_save": ["lm_head"]}
    expected = changed(base, tmp_path / "adapter", **options)
    with pytest.raises(
        PlacementError, match=r"lm_head\.weight.*unties.*one tensor.*merge_and_unload"
    ):
        merge_lora(tmp_path / "adapter", base)
    found = gpt2(tie_word_embeddings=False)
    merge = merge_lora(tmp_path / "adapter", found)
    torchlift.load(found, base.state_dict(), transform=merge)
    same(found, expected)


class Mixed(nn.Module):
    """A Linear and a Conv1D, both square, and one of another shape."""

    def __init__(self, first: Any, last: Any) -> None:
        super().__init__()
        self.first, self.last, self.wide = first(), last(), nn.Linear(4, 8)


KINDS = {
    "Conv1D": lambda: Conv1D(4, 4),
    "Linear": lambda: nn.Linear(4, 4),
    "no bias": lambda: nn.Linear(4, 4, bias=False),
}


@pytest.mark.parametrize("last", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_a_square_weight_is_turned_as_its_layer_is(first: str, last: str, tmp_path: Path) -> None:
    """PEFT saves what the last layer had; what a checkpoint does not show is refused."""
    torch.manual_seed(1)
    base = Mixed(KINDS[first], KINDS[last])
    expected = changed(base, tmp_path / "adapter", target_modules=["first", "last"]).state_dict()
    found, state = copy.deepcopy(base), base.state_dict()
    torchlift.load(found, state, transform=merge_lora(tmp_path / "adapter", found))
    assert torchlift.diff(found.state_dict(), expected).equal
    biased = {"first.bias", "last.bias"} & state.keys()
    square = {name: value for name, value in state.items() if not name.startswith("wide")}
    for shown, file in (True, tmp_path / "whole.pt"), (False, tmp_path / "square.pt"):
        torch.save(state if shown else square, file)
        if biased and (last == "Conv1D" or not shown):
            with pytest.raises(PlacementError, match=r"is square.*fan_in_fan_out.*skeleton"):
                merge_lora(tmp_path / "adapter", file)
        elif first != "Conv1D":
            merge, out = merge_lora(tmp_path / "adapter", file), tmp_path / f"merged-{file.name}"
            torchlift.convert(file, out, transform=merge)
            merged = {name: expected[name] for name in (state if shown else square)}
            assert torchlift.diff(out, merged).equal


def test_the_shapes_of_a_file_show_what_a_conv1d_has(tmp_path: Path) -> None:
    """GPT-2's square matrices are turned as its others are, unless a Linear is changed, too."""
    base = gpt2()
    base.save_pretrained(tmp_path / "base")
    expected = changed(base, tmp_path / "adapter", target_modules=["c_proj", "c_attn"])
    merge = merge_lora(tmp_path / "adapter", tmp_path / "base")
    torchlift.convert(tmp_path / "base", tmp_path / "out.pt", transform=merge)
    merged = {k: v for k, v in expected.state_dict().items() if k != HEAD}
    assert torchlift.diff(tmp_path / "out.pt", merged).equal
    apart = gpt2(tie_word_embeddings=False)
    apart.save_pretrained(tmp_path / "apart")
    changed(apart, tmp_path / "both", target_modules=["attn.c_proj", "lm_head"])
    with pytest.raises(PlacementError, match=r"attn\.c_proj\.weight'.*is square"):
        merge_lora(tmp_path / "both", tmp_path / "apart")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Conv1d(16, 24, 3),
        lambda: nn.Conv1d(24, 24, 1),
        lambda: nn.Conv2d(16, 24, 3, stride=2, padding=1),
        lambda: nn.Conv2d(16, 16, 1),
        lambda: nn.Conv2d(16, 24, (1, 3)),
        lambda: nn.Conv3d(16, 24, 3),
    ],
)
def test_a_convolution_is_merged_as_peft_merges_it(make: Any, dtype: Any, tmp_path: Path) -> None:
    """To the bit, for kernels of any size."""
    base = nn.Sequential(make()).to(dtype)
    expected = changed(base, tmp_path / "adapter", target_modules=["0"], lora_alpha=3)
    found, state = nn.Sequential(make()).to(dtype), base.state_dict()
    torchlift.load(found, state, transform=merge_lora(tmp_path / "adapter", found))
    assert torchlift.diff(found.state_dict(), expected.state_dict()).equal


def test_a_convolution_that_peft_cannot_merge(tmp_path: Path) -> None:
    """One in groups is refused by name; a kernel of 1 in three dimensions is what it computes."""
    base = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2))
    with pytest.raises(NotImplementedError, match="groups > 1"):
        changed(base, tmp_path / "adapter", target_modules=["0"])
    with pytest.raises(PlacementError, match="'0': a convolution in groups"):
        merge_lora(tmp_path / "adapter", base)
    cube = nn.Sequential(nn.Conv3d(4, 8, 1, bias=False))
    with pytest.raises(RuntimeError):  # of PEFT's own
        changed(cube, tmp_path / "cube", target_modules=["0"])
    found, x = copy.deepcopy(cube), torch.randn(1, 4, 2, 2, 2)
    merge = merge_lora(tmp_path / "cube", found)
    torchlift.load(found, cube.state_dict(), transform=merge)
    torch.testing.assert_close(found(x), PeftModel.from_pretrained(cube, tmp_path / "cube")(x))


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_of_the_layers_that_are_changed_are_the_adapter_s(bias: Any, tmp_path: Path) -> None:
    """PEFT saves them under the name of what it wrapped."""
    base = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    expected = changed(base, tmp_path / "adapter", target_modules=["0"], bias=bias)
    found = copy.deepcopy(base)
    torchlift.load(found, base.state_dict(), transform=merge_lora(tmp_path / "adapter", found))
    assert torchlift.diff(found.state_dict(), expected.state_dict()).equal
    assert torch.equal(found[1].bias, base[1].bias) == (bias == "lora_only")


def test_a_head_that_is_changed_brings_its_base(tmp_path: Path) -> None:
    """PEFT saves the embeddings that it wrapped: they replace the base's, and are changed."""
    base = gpt2(tie_word_embeddings=False)
    other = gpt2(tie_word_embeddings=False)
    other.lm_head.weight.data += 1
    changed(other, tmp_path / "adapter", target_modules=["lm_head"])
    peft = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter")
    found = copy.deepcopy(base)
    torchlift.load(found, base.state_dict(), transform=merge_lora(tmp_path / "adapter", found))
    same(found, peft.merge_and_unload())


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

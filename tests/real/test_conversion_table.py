"""Every architecture in transformers' table that builds small, loaded as from_pretrained does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from model_families import FAMILIES
from safetensors.torch import load_file, save_file
from small_configs import small_config
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from zoo import same

import torchlift
from torchlift import remap
from torchlift.errors import MismatchError, PlacementError

State = dict[str, torch.Tensor]


def classes(names: dict[str, str]) -> list[str]:
    """Names of classes, by what they end with."""
    return [name + end for end, starts in names.items() for name in starts.split()]


#: Classes whose tensors are divided otherwise in files.
CONVERTED = classes(
    {
        "ForConditionalGeneration": 
        "Glm4vMoe Kimi_K25 MiniMaxM3Sparse MistralLarge4 QianfanOCR Qwen3_5Moe Qwen3VLMoe "
        "Qwen4Exp Step3p7",
        "ForImageClassification": "Dinov2 Dinov2WithRegisters",
        "ForCausalLM": 
        "Afmoe AXK1 AXK2 BailingHybrid Beam Cohere2Moe DeepseekV2 DeepseekV3 DeepseekV32 "
        "DeepseekV4 Ernie4_5_Moe ExaoneMoe FlexOlmo Flint Glm4Moe Glm4MoeLite GlmMoeDsa "
        "HrmText HunYuanMoEV1 HYV3 Inkling2 Jamba Kolibri1 Laguna Mellum MiMoV2Flash MiniMax "
        "MiniMaxM2 Mixtral NemotronH OlmoHybrid Olmoe Phimoe Qwen2Moe Qwen3_5Moe Qwen3Moe "
        "Qwen3Next Qwen4Exp SolarOpen",
        "ForMaskedLM": "Gte JinaEmbeddingsV3 NomicBert",
        "VisionModel": "Tipsv2",
        "TextModel": "MistralLarge4 Molmo2 Tipsv2",
        "Model": "Radio Sapiens2 Tipsv2",
        "": "RfDetrForObjectDetection",
    }
)  # fmt: skip
#: Classes of which files have other names.
RENAMED = classes(
    {
        "ForConditionalGeneration": 
        "Aria AyaVision CohereAsr Cosmos3Edge Cosmos3Omni DeepseekVL Gemma3 GotOcr2 HunYuanVL "
        "HyperCLOVAXVisionV2 InternVL Lfm2Vl Lfm3Vl Llava LlavaNext LlavaNextVideo "
        "LlavaOnevision MiniCPMOcr MiniCPMV4_6 MiniCPMV4_7 Mistral3 Mllama PaddleOCRVL "
        "PaliGemma PI0 Qwen2_5OmniThinker Qwen2_5_VL Qwen2VL Qwen3_5 T5Gemma2 VideoLlava "
        "VipLlava Voxtral VoxtralRealtime",
        "ForImageClassification": "Beit CLIP DeiT IJepa MetaClip2 Siglip Siglip2 ViT ViTMSN",
        "ForCausalLM": "AriaText Fuyu GPTNeoX GraniteMoe GraniteMoeShared HYV4 Lfm3 Qwen3_5",
        "ForMaskedLM": "Esm ModernVBert Ultrabert UltraVBert",
        "VisionModel": "ChineseCLIP CLIP Lfm3Vl Siglip2 Siglip",
        "TextModel": "CLIP",
        "Model": 
        "AltCLIP AST AudioFlamingo3 ChineseCLIP CLIPSeg DINOv3ViT GlmAsr MusicFlamingo Pixio "
        "Qwen2Audio Sam3 Sam3Tracker TimesFm2_5 VideoMAE VisionEncoderDecoder "
        "VisionTextDualEncoder ViTMAE Vivit",
    }
)  # fmt: skip
#: Loaded without ``-m slow``, too.
QUICK = {"Qwen3MoeForCausalLM", "Molmo2TextModel", "MistralLarge4ForConditionalGeneration"}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No bars and no advice about tokens."""
    hf.utils.logging.disable_progress_bar()
    before = hf.utils.logging.get_verbosity()
    hf.utils.logging.set_verbosity_error()
    yield
    hf.utils.logging.set_verbosity(before)
    hf.utils.logging.enable_progress_bar()


def saved(cls: Any, config: Any, folder: Path) -> nn.Module:
    """A model with random weights, saved as transformers saves it."""
    torch.manual_seed(0)
    model: Any = cls(config)
    model.save_pretrained(folder)
    return model


def state_of(model: nn.Module) -> State:
    return {name: value for name, value in model.state_dict().items() if hasattr(value, "shape")}


def assert_like_from_pretrained(cls: Any, config: Any, folder: Path) -> Any:
    """A skeleton that torchlift loads has bit for bit what transformers loads; the report."""
    expected = state_of(cls.from_pretrained(folder))
    model = torchlift.skeleton(cls, config)
    report = torchlift.load(model, folder, rename=remap.transformers(model))
    found = state_of(model)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert same(found[name], value), name
    assert report.missing_keys == report.unexpected_keys == []
    return report


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
        for name in [*CONVERTED, *RENAMED]
    ],
)
def test_it_is_loaded_as_from_pretrained_loads_it(name: str, tmp_path: Path) -> None:
    """``save_pretrained`` writes the layout of old files."""
    cls: Any = getattr(hf, name)
    config = small_config(cls.config_class)
    saved(cls, config, tmp_path)
    report = assert_like_from_pretrained(cls, config, tmp_path)
    if name == "Qwen3MoeForCausalLM":
        assert len(report.merged["model.layers.0.mlp.experts.gate_up_proj"]) == 2 * 4
        assert len(report.merged) == 4


def rewrite(folder: Path, rename: Any) -> None:
    """Give the tensors of a saved model other names."""
    file = folder / "model.safetensors"
    state = {rename(key): value for key, value in load_file(file).items()}
    save_file(state, file, metadata={"format": "pt"})


def test_names_of_old_files_are_those_of_today(tmp_path: Path) -> None:
    """``gamma`` and ``beta`` of BERT, and weight norms before parametrisations."""
    cls, config, _ = FAMILIES["bert"]
    saved(cls, config, tmp_path / "bert")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    rewrite(tmp_path / "bert", lambda key: next(
        (key.replace(new, name) for new, name in old.items() if new in key), key
    ))  # fmt: skip
    report = assert_like_from_pretrained(cls, config, tmp_path / "bert")
    assert sum(key.endswith("gamma") for key in report.renamed) == 6
    cls, config, _ = FAMILIES["wav2vec2"]
    saved(cls, config, tmp_path / "speech")
    at = "parametrizations.weight.original"
    rewrite(tmp_path / "speech", lambda key: key.replace(f"{at}0", "weight_g").replace(
        f"{at}1", "weight_v"
    ))  # fmt: skip
    report = assert_like_from_pretrained(cls, config, tmp_path / "speech")
    assert any(key.endswith("weight_g") for key in report.renamed)


def test_a_head_takes_the_file_of_its_base_model_and_the_other_way_round(tmp_path: Path) -> None:
    """The prefix of the base model is added and taken off; what is missing is said as ever."""
    cls, config, _ = FAMILIES["mixtral"]
    whole: Any = saved(cls, config, tmp_path / "whole")
    whole.model.save_pretrained(tmp_path / "base")
    model = torchlift.skeleton(cls, config)
    rename = remap.transformers(model)
    torchlift.load(model, tmp_path / "base", rename=rename, allow_missing=["lm_head.*"])
    base = torchlift.skeleton(hf.MixtralModel, config)
    rename = remap.transformers(base)
    torchlift.load(base, tmp_path / "whole", rename=rename)
    for name, value in whole.model.state_dict().items():
        assert same(model.model.state_dict()[name], value), name
        assert same(base.state_dict()[name], value), name


@pytest.mark.parametrize("tower", ["vision", "text"])
def test_a_tower_takes_its_part_of_a_whole_clip(tower: str, tmp_path: Path) -> None:
    """As from_pretrained; what the file lacks of it, and what is too much in it, are errors."""
    config = small_config(hf.CLIPConfig)
    cls: Any = {"vision": hf.CLIPVisionModel, "text": hf.CLIPTextModel}[tower]
    part = getattr(config, f"{tower}_config")
    saved(hf.CLIPModel, config, tmp_path)
    report = assert_like_from_pretrained(cls, part, tmp_path)
    assert report.renamed
    assert all(key.startswith(f"{tower}_model.") for key in report.renamed)
    model = torchlift.skeleton(cls, part)
    state = load_file(tmp_path / "model.safetensors")
    more = {**state, f"{tower}_model.more": torch.ones(1)}
    with pytest.raises(MismatchError, match=r"unexpected \(1\): more"):
        torchlift.load(model, more, rename=remap.transformers(model))
    lost = next(key for key in state if key.startswith(f"{tower}_model."))
    with pytest.raises(MismatchError, match=r"missing \(1\)"):
        torchlift.load(
            model, {k: v for k, v in state.items() if k != lost}, rename=remap.transformers(model)
        )


def test_a_file_in_the_layout_of_the_model_is_left_as_it_is(tmp_path: Path) -> None:
    """And so stays mapped; the configuration that names its class says as much as the model."""
    cls, config, _ = FAMILIES["mixtral"]
    model = cls(config)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    config.architectures = ["MixtralForCausalLM"]
    for given in (model, config):
        found = torchlift.skeleton(cls, config)
        rename = remap.transformers(given)
        report = torchlift.load(found, tmp_path / "model.pt", rename=rename)
        assert (report.bytes_read, report.renamed, report.merged) == (0, {}, {})
        assert repr(rename) == "transformers(MixtralForCausalLM)"


def test_it_composes_and_a_missing_expert_is_named(tmp_path: Path) -> None:
    """transformers would take three experts for four; a wrapper's prefix comes off before."""
    cls, config, _ = FAMILIES["mixtral"]
    saved(cls, config, tmp_path)
    rewrite(tmp_path, lambda key: f"module.{key}")
    model = torchlift.skeleton(cls, config)
    rename = remap.strip("module.")
    with pytest.raises(MismatchError, match=r"pass rename=remap\.transformers\(model\)"):
        torchlift.load(model, {rename(key): value for key, value in load_file(
            tmp_path / "model.safetensors"
        ).items()})  # fmt: skip
    rename = rename | remap.transformers(model)
    torchlift.load(model, tmp_path, rename=rename)
    state = load_file(tmp_path / "model.safetensors")
    lost = next(key for key in state if key.endswith("experts.1.w3.weight"))
    fewer = {key: value for key, value in state.items() if key != lost}
    with pytest.raises(MismatchError, match="Missing: ") as error:
        torchlift.load(model, fewer, rename=rename)
    assert error.value.missing_keys == [lost]
    # Names are counted as far as an error tells them, and what has more digits is no number.
    for number in ("99999999", "9" * 5000):
        more = lost.replace("experts.1.", f"experts.{number}.")
        with pytest.raises(MismatchError, match="Missing: ") as error:
            torchlift.plan(model, fewer | {more: state[lost]}, rename=rename)
        assert len(error.value.missing_keys) <= 100
    for name in ("w1", "w3"):
        fewer = {key: value for key, value in state.items() if f".{name}." not in key}
        with pytest.raises(MismatchError, match=rf"Missing: \.experts\.\*\.{name}"):
            torchlift.load(model, fewer, rename=rename)


class Own(ConversionOps):
    """An operation that nobody else has."""

    def __init__(self, does: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.does = does

    def convert(self, input_dict: Any, **_: Any) -> Any:
        return {key: self.does(*tensors) for key, tensors in input_dict.items()}


def swapped(rows: torch.Tensor) -> torch.Tensor:
    """The halves of a matrix's rows, exchanged; and its columns, in another order."""
    rows = torch.cat(rows.chunk(chunks=2, dim=0)[::-1])
    return rows.view(len(rows), -1, 2).transpose(1, 2).reshape(rows.shape)


def test_an_operation_of_somebody_s_own_moves_values_or_is_named(tmp_path: Path) -> None:
    """Registered by a user, say: it is run as it is; where it computes, an error and no guess."""
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    cls, config, _ = FAMILIES["llama"]
    original = saved(cls, config, tmp_path)
    rule = WeightConverter("down_proj.weight", "down_proj.weight", [Own(torch.neg)])
    assert get_checkpoint_conversion_mapping("LlamaForCausalLM") is None
    register_checkpoint_conversion_mapping("LlamaForCausalLM", [rule])
    try:
        model = torchlift.skeleton(cls, config)
        rename = remap.transformers(model)
        with pytest.raises(PlacementError, match=r"operations that compute new values \(neg\)"):
            torchlift.load(model, tmp_path, rename=rename)
        name = "model.layers.1.mlp.down_proj.weight"
        rule = WeightConverter("down_proj.weight", "down_proj.weight", [Own(swapped)])
        register_checkpoint_conversion_mapping("LlamaForCausalLM", [rule], overwrite=True)
        torchlift.load(model, tmp_path, rename=remap.transformers(model))
        expected = swapped(original.get_parameter(name))
        assert same(model.get_parameter(name), expected)
    finally:
        register_checkpoint_conversion_mapping("LlamaForCausalLM", [], overwrite=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (nn.Linear(2, 2), "expected a model of transformers, or its configuration, not a Linear"),
        (hf.LlamaConfig(), "does not name a class of transformers as its architecture .none."),
    ],
)  # fmt: skip
def test_what_has_no_table_is_refused(given: Any, message: str) -> None:
    """A module of nobody, and a configuration that does not say what it is of."""
    with pytest.raises(TypeError, match=message):
        remap.transformers(given)

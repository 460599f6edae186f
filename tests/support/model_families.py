"""Real architectures at sizes that train in milliseconds, and the inputs that each one takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers as hf
from small_configs import small_config
from torch import nn

Inputs = dict[str, torch.Tensor]


def _ids() -> torch.Tensor:
    return torch.randint(3, 128, (2, 12))


def _text() -> Inputs:
    return {"input_ids": _ids(), "labels": _ids()}


def _image() -> Inputs:
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def _image_and_text() -> Inputs:
    return {"input_ids": _ids(), "pixel_values": torch.randn(2, 3, 32, 32)}


def _sound() -> Inputs:
    return {"input_values": torch.randn(2, 400)}


def _spectrogram() -> Inputs:
    return {"input_features": torch.randn(2, 8, 64), "labels": _ids()}


def _syllables() -> Inputs:
    return {"input_ids": torch.randint(1, 32, (1, 6))}


#: name -> model class, inputs, and what its configuration has besides small sizes
_TABLE: dict[str, tuple[Any, Callable[[], Inputs], dict[str, Any]]] = {
    "llama": (hf.LlamaForCausalLM, _text, {}),
    "llama-tied": (hf.LlamaForCausalLM, _text, {"tie_word_embeddings": True}),
    "llama-yarn": (
        hf.LlamaForCausalLM, _text,
        {"rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32
        }},
    ),
    "mixtral": (hf.MixtralForCausalLM, _text, {}),
    "deepseek-v3": (hf.DeepseekV3ForCausalLM, _text, {"num_key_value_heads": 4}),
    "gpt2": (hf.GPT2LMHeadModel, _text, {}),
    "gpt-neox": (hf.GPTNeoXForCausalLM, _text, {}),
    "bert": (hf.BertForMaskedLM, _text, {}),
    "deberta-v2": (
        hf.DebertaV2ForMaskedLM, _text,
        {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "t5": (
        hf.T5ForConditionalGeneration, _text,
        {"d_ff": 64, "d_kv": 8, "decoder_start_token_id": 0},
    ),
    "whisper": (hf.WhisperForConditionalGeneration, _spectrogram, {}),
    "wav2vec2": (
        hf.Wav2Vec2ForCTC, _sound,
        {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
         "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
         "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0},
    ),
    "vits": (
        hf.VitsModel, _syllables,
        {"num_attention_heads": 2, "ffn_dim": 32, "flow_size": 32, "spectrogram_bins": 9,
         "upsample_initial_channel": 32, "upsample_rates": [2, 2], "upsample_kernel_sizes": [4, 4],
         "wavenet_dilation_rate": 1, "prior_encoder_num_flows": 2,
         "posterior_encoder_num_wavenet_layers": 2, "prior_encoder_num_wavenet_layers": 2,
         "depth_separable_num_layers": 2, "duration_predictor_num_flows": 2},
    ),
    "swin": (
        hf.SwinForImageClassification, _image,
        {"patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
    ),
    "resnet": (
        hf.ResNetForImageClassification, _image,
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1]},
    ),
    "clip": (hf.CLIPModel, _image_and_text, {}),
    "mamba": (hf.MambaForCausalLM, _text, {"state_size": 8}),
}  # fmt: skip
#: name -> (model class, configuration, inputs)
FAMILIES: dict[str, tuple[type[nn.Module], Any, Callable[[], Inputs]]] = {
    name: (kind, small_config(kind.config_class, **changes), inputs)
    for name, (kind, inputs, changes) in _TABLE.items()
}


def floating_outputs(output: Any) -> Iterator[torch.Tensor]:
    """Every floating-point tensor in what a model returns, however deeply nested."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for item in output.values():
            yield from floating_outputs(item)
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from floating_outputs(item)

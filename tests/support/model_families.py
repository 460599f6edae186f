"""Real architectures at sizes that train in milliseconds, and the inputs that each one takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers as hf
from torch import nn

Inputs = dict[str, torch.Tensor]

_VOCABULARY, _LENGTH = 128, 12
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_hidden_layers": 2}
_WIDTH: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, **_HEADS}
_ENCODER: dict[str, Any] = {**_WIDTH, "vocab_size": _VOCABULARY, "max_position_embeddings": 64}
_DECODER: dict[str, Any] = {**_ENCODER, "num_key_value_heads": 2}
_GPT: dict[str, Any] = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": _VOCABULARY,
}  # fmt: skip
_SEQ2SEQ: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "vocab_size": _VOCABULARY, "pad_token_id": 0,
}  # fmt: skip
_SPEECH: dict[str, Any] = {
    **_WIDTH, "vocab_size": 32, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
}  # fmt: skip
_IMAGE: dict[str, Any] = {"image_size": 32, "patch_size": 8}
_STATE_SPACE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": _VOCABULARY, "state_size": 8,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def _ids() -> torch.Tensor:
    return torch.randint(3, _VOCABULARY, (2, _LENGTH))


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


#: name -> (model class, configuration, inputs)
FAMILIES: dict[str, tuple[type[nn.Module], Any, Callable[[], Inputs]]] = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**_DECODER), _text),
    "llama-tied": (
        hf.LlamaForCausalLM,
        hf.LlamaConfig(**_DECODER, tie_word_embeddings=True),
        _text,
    ),
    "llama-yarn": (hf.LlamaForCausalLM, hf.LlamaConfig(**_DECODER, rope_scaling=_YARN), _text),
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig(**_DECODER, num_local_experts=4), _text),
    "deepseek-v3": (
        hf.DeepseekV3ForCausalLM,
        hf.DeepseekV3Config(
            **{**_DECODER, "num_key_value_heads": 4}, moe_intermediate_size=16, n_routed_experts=4,
            num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16,
            kv_lora_rank=16, qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8,
        ),
        _text,
    ),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config(**_GPT), _text),
    "gpt-neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**_ENCODER), _text),
    "bert": (hf.BertForMaskedLM, hf.BertConfig(**_ENCODER), _text),
    "deberta-v2": (
        hf.DebertaV2ForMaskedLM,
        hf.DebertaV2Config(**_ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"]),
        _text,
    ),
    "t5": (
        hf.T5ForConditionalGeneration,
        hf.T5Config(
            d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8, vocab_size=_VOCABULARY,
            decoder_start_token_id=0,
        ),
        _text,
    ),
    "whisper": (
        hf.WhisperForConditionalGeneration,
        hf.WhisperConfig(
            **_SEQ2SEQ, num_mel_bins=8, max_source_positions=32, max_target_positions=32,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        ),
        _spectrogram,
    ),
    "wav2vec2": (hf.Wav2Vec2ForCTC, hf.Wav2Vec2Config(**_SPEECH), _sound),
    "vits": (
        hf.VitsModel,
        hf.VitsConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32, vocab_size=32,
            flow_size=32, spectrogram_bins=9, upsample_initial_channel=32, upsample_rates=[2, 2],
            upsample_kernel_sizes=[4, 4], wavenet_dilation_rate=1, prior_encoder_num_flows=2,
            posterior_encoder_num_wavenet_layers=2, prior_encoder_num_wavenet_layers=2,
            depth_separable_num_layers=2, duration_predictor_num_flows=2,
        ),
        _syllables,
    ),
    "swin": (
        hf.SwinForImageClassification,
        hf.SwinConfig(
            image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 4],
            window_size=4,
        ),
        _image,
    ),
    "resnet": (
        hf.ResNetForImageClassification,
        hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]),
        _image,
    ),
    "clip": (
        hf.CLIPModel,
        hf.CLIPConfig(text_config=dict(_ENCODER), vision_config={**_WIDTH, **_IMAGE}),
        _image_and_text,
    ),
    "mamba": (hf.MambaForCausalLM, hf.MambaConfig(**_STATE_SPACE), _text),
}  # fmt: skip


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

"""GGUF files of small models of transformers, laid out as llama.cpp's converter lays them out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers as hf
from checkpoint_files import finish
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from torch import nn
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

_TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_LINEAR: dict[str, Any] = {
    "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2,
}  # fmt: skip
_T5: dict[str, Any] = {
    "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 96,
    "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0,
}  # fmt: skip
#: Name of a class -> what its small configuration has.
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _TINY,
    "MistralForCausalLM": _TINY,
    "Qwen2ForCausalLM": _TINY,
    "Qwen2MoeForCausalLM": {**_TINY, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "Qwen3ForCausalLM": {**_TINY, "head_dim": 16},
    "Qwen3MoeForCausalLM": {**_TINY, **_EXPERTS, "head_dim": 16},
    "Phi3ForCausalLM": _TINY,
    "FalconForCausalLM": {**_TINY, "multi_query": True, "new_decoder_architecture": False},
    "BloomForCausalLM": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 96},
    "GPT2LMHeadModel": {
        "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 96,
    },
    "StableLmForCausalLM": {**_TINY, "use_qkv_bias": True},
    "Starcoder2ForCausalLM": _TINY,
    "MambaForCausalLM": {
        "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 96, "state_size": 8,
        "time_step_rank": 4,
    },
    "NemotronForCausalLM": _TINY,
    "Gemma2ForCausalLM": {**_TINY, "head_dim": 16},
    "Gemma3ForCausalLM": {**_TINY, "head_dim": 16},
    "T5ForConditionalGeneration": _T5,
    "UMT5ForConditionalGeneration": _T5,
    "MiniMaxM2ForCausalLM": {
        **_TINY, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16,
        "rotary_dim": 8,
    },
    "Lfm2ForCausalLM": {
        **_TINY, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
        "block_auto_adjust_ff_dim": False,
    },
    "Qwen3_5ForCausalLM": {**_TINY, **_LINEAR},
    "Qwen3_5MoeForCausalLM": {
        **_TINY, **_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 32,
    },
}  # fmt: skip
_NAMES = {
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
    "mistral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3",
    "umt5": "t5", "minimax_m2": "minimax-m2",
}  # fmt: skip


def small_model(name: str, **changes: Any) -> Any:
    """A small model of this class, with numbers that differ everywhere."""
    kind = getattr(hf, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**MODELS[name], "architectures": [name], **changes})).eval()
    for parameter in model.parameters():
        parameter.data.uniform_(-1, 1)
    for key, parameter in model.named_parameters():
        if key.endswith("A_log"):
            parameter.data.abs_()
    return model


def _rotated(rows: np.ndarray, heads: int) -> np.ndarray:
    """``LlamaModel.permute`` of llama.cpp."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def _changed(arch: str, config: Any, key: str, value: np.ndarray) -> Iterator[tuple[str, Any]]:
    """What llama.cpp makes of a tensor, as its converter does it for each architecture."""
    value = _ordered(arch, config, key, value)
    if arch == "llama" and ".attn_q." in key:
        value = _rotated(value, config.num_attention_heads)
    elif arch == "llama" and ".attn_k." in key:
        value = _rotated(value, config.num_key_value_heads)
    elif arch == "bloom" and ".attn_qkv." in key:
        of_heads = value.reshape(config.n_head, 3, -1, *value.shape[1:])
        value = np.concatenate([of_heads[:, at].reshape(-1, *value.shape[1:]) for at in range(3)])
    elif arch == "falcon" and ".attn_qkv." in key and config.new_decoder_architecture:
        heads, groups = config.num_attention_heads, config.num_kv_heads
        grouped = value.reshape(groups, heads // groups + 2, -1, value.shape[-1])
        slices = grouped[:, :-2], grouped[:, [-2]], grouped[:, [-1]]
        value = np.concatenate([each.reshape(-1, value.shape[-1]) for each in slices])
    elif arch == "gpt2" and key.endswith(
        ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
    ):
        value = value.T
    elif (arch in ("gemma2", "gemma3", "nemotron") and key.endswith("norm.weight")) or (
        arch in ("qwen35", "qwen35moe") and re.search(r"(?<!ssm)_norm\.weight$", key)
    ):
        value = value + 1
    elif key.endswith("ssm_a"):
        value = -np.exp(value)
    elif key.endswith(("ssm_conv1d.weight", "shortconv.conv.weight")):
        value = value.squeeze(1)
    elif key.endswith("ffn_gate_inp_shexp.weight"):
        value = value.squeeze(0)
    elif "ffn_gate_up_exps" in key:
        for name, half in zip(("gate", "up"), np.split(value, 2, axis=1), strict=True):
            yield key.replace("gate_up", name), half
        return
    yield key, value


def _ordered(arch: str, config: Any, key: str, value: np.ndarray) -> np.ndarray:
    """Heads of v by their number in a group, as ``_LinearAttentionVReorderBase`` has them."""
    if arch not in ("qwen35", "qwen35moe"):
        return value
    groups = config.linear_num_key_heads
    each = config.linear_num_value_heads // groups

    def tiled(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(groups, each, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    if key.endswith(
        ("ssm_a", "ssm_dt.bias", "ssm_alpha.weight", "ssm_beta.weight", "attn_gate.weight")
    ):
        return tiled(value)
    if key.endswith(("attn_qkv.weight", "ssm_conv1d.weight")):
        first = 2 * groups * config.linear_key_head_dim
        return np.concatenate([value[:first], tiled(value[first:])])
    return tiled(value.T).T if key.endswith("ssm_out.weight") else value


def _key(table: Any, name: str) -> str | None:
    name = name.replace("dt_bias", "dt_proj.bias")
    base, dot, end = name.rpartition(".")
    if end not in ("weight", "bias"):
        base, dot, end = name, "", ""
    if base.endswith(".experts.gate_up_proj"):
        return f"{table.get_name(base.replace('gate_up', 'down'))}.weight".replace(
            "down", "gate_up"
        )
    if base.endswith("e_score_correction_bias"):
        return f"blk.{base.split('.')[2]}.exp_probs_b.bias"
    found = table.get_name(base) or table.get_name(base.removeprefix("transformer."))
    if found is None:
        return None
    return found + (".weight" if found.endswith("_exps") else dot + end)


def write_gguf(
    model: nn.Module, path: Path, *, kind: str = "F32", head: bool | None = None,
) -> Path:  # fmt: skip
    """Write a model as llama.cpp does.

    Args:
        model: of transformers.
        path: of the file.
        kind: of matrices; all else is F32.
        head: whether there is an output.weight; None: where it is not tied.
    """
    config: Any = model.config
    arch = _NAMES.get(config.model_type, config.model_type)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(f"tiny {config.model_type}")
    known = GGUF_CONFIG_MAPPING.get(config.model_type.removesuffix("_text"), {})
    written = {f"{arch}.{key}": getattr(config, name, None) for key, name in known.items() if name}
    if arch == "gemma3" or arch == "gemma2":
        written[f"{arch}.attention.key_length"] = config.head_dim
    for key, value in written.items():
        if isinstance(value, (int, float)):
            (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(key, value)
    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = _key(table, name)
        if key is None and id(parameter) in seen:  # tied, and without a name in GGUF
            continue
        assert key is not None, name
        if key == "output.weight" and head is not True and id(parameter) in seen:
            continue
        if id(parameter) in seen and key == seen[id(parameter)]:
            continue
        seen[id(parameter)] = key
        for one, value in _changed(arch, config, key, parameter.detach().numpy()):
            _add(writer, one, value, kind)
    for name, buffer in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            _add(writer, str(_key(table, name)), buffer.numpy(), kind)
    if arch == "llama":
        writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))
    finish(writer)
    return path


def _add(writer: Any, key: str, value: np.ndarray, kind: str) -> None:
    value = np.ascontiguousarray(value)
    width = gguf.GGML_QUANT_SIZES[Kind[kind]][0]
    if value.ndim < 2 or value.shape[-1] % width or kind == "F32":
        writer.add_tensor(key, value)
    else:
        writer.add_tensor(key, quants.quantize(value, Kind[kind]), raw_dtype=Kind[kind])

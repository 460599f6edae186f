"""Small configurations of any class of transformers: its own defaults, with fewer of everything."""

from __future__ import annotations

from typing import Any

import transformers as hf

#: What a configuration may call a size -> how large it is here.
_SIZES: dict[str, Any] = {
    "hidden_size": 32, "d_model": 32, "embed_dim": 32, "n_embd": 32, "out_hidden_size": 32,
    "projection_dim": 32, "head_dim": 8, "vocab_size": 128, "max_position_embeddings": 64,
    "intermediate_size": 64, "ffn_dim": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "mlp_dim": 64, "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "depth": 2,
    "encoder_layers": 2, "decoder_layers": 2, "num_attention_heads": 4, "num_heads": 4, "n_head": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4,
    "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "top_k_experts": 2, "moe_k": 2, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "qk_nope_head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "mamba_num_heads": 4, "n_groups": 2,
    "mamba_head_dim": 8, "ssm_state_size": 8, "image_size": 32, "patch_size": 8,
    "num_mel_bins": 8, "max_source_positions": 32, "max_target_positions": 32, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "image_token_id": 5,
    "image_token_index": 5, "audio_token_id": 6, "video_token_id": 7,
}  # fmt: skip
#: What a class may refuse together with the rest, and is left at its default then.
_REFUSED = ((), ("head_dim",), ("num_heads", "patch_size"), ("num_hidden_layers", "num_layers"))


def small_config(kind: Any, **changes: Any) -> Any:
    """A configuration of this class, and of what is inside of it, with small sizes."""
    known = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}
    try:
        default = kind()
    except Exception:  # some have no defaults; their sizes are known by name all the same
        default = None
    words: dict[str, Any] = {}
    for name in known & _SIZES.keys():
        own = getattr(default, name, None)
        words[name] = [_SIZES[name]] * len(own) if isinstance(own, list) else _SIZES[name]
    for name, declared in (getattr(kind, "sub_configs", None) or {}).items():
        given = getattr(default, name, None)
        inner = type(given) if isinstance(given, hf.PretrainedConfig) else declared
        if inner.__name__ != "AutoConfig":
            words[name] = small_config(inner)
    for names in _REFUSED:
        try:
            left = {name: value for name, value in words.items() if name not in names}
            return kind(**{**left, **changes})
        except Exception as error:
            refused = error
    raise refused

"""How the layers of the well-known transformers are cut by tensor parallelism, by their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fnmatch import translate
from functools import lru_cache

Shape = tuple[int, ...]

# The first group with a pattern that fits counts. Patterns see names as ".layers.0.mlp.up_proj.":
# without what ends in weight or bias, with a dot at both ends. The tests hold this table against
# the plan of every configuration in transformers; Megatron and vLLM cut the rest that is here.
_GROUPS: tuple[tuple[str | int, str], ...] = (
    # Norms, routers, latents and positions are whole on purpose.
    ("replicate", "*norm* *Norm* *.lm_head.dense. *.predictions.transform.*"),
    ("colwise", "*.indexer.index_qk_proj. *.linear_attn.out_proj. *.lm_head.*"),
    ("replicate", """
        *.router.* *.mlp.gate. *.block_sparse_moe.gate. *.feed_forward.gate.
        *.mixer.gate. *.shared_expert_gate. *.indexer.* *.compressor.* *.q_a_proj.
        *.kv_a_proj_with_mqa. *.wq_a. *.wkv_a. *.wpe. *.position_embedding* *.embed_positions.
        *.positional_embedding* *.position_ids. *.token_type_embeddings. *.pooler.*
        *.experts.down_proj_bias.
     """),
    (-1, "*.experts.gate_up_proj_bias."),
    ("packed_colwise", "*.experts.gate_up_proj."),
    ("rowwise", """
        *.o_proj.* *.out_proj.* *.down_proj.* *.fc2.* *.c_proj.* *.w2.* *.wo.* *.Wo.*
        *.attn.proj. *attention.dense. *.self_attn.dense. *.output.dense. *.dense_4h_to_h.
        *.fc_out. *.ffn_output. *.output_dense. *.out_lin. *.lin2. *Attention.o. *.linear_fc2.
        *.linear_proj. *.self_attn.dt_proj. *.pre_expert_proj. *.post_expert_proj.
        *.input_mix_weight_down. *.encoder.fc.
     """),
    ("colwise", """
        *.q_proj.* *.k_proj.* *.v_proj.* *qkv* *.query_key_value.* *.q_b_proj. *.kv_b_proj.
        *.wq_b. *.wkv_b. *.q_gate_proj. *.gate_proj.* *.up_proj.* *.gate_up_proj.* *.fc1.*
        *.c_fc.* *.c_attn. *.q_attn. *.w1.* *.w3.* *.w[qkv].* *.Wi. *.wi. *.wi_[01].
        *attention.query. *attention.key. *attention.value. *.self.query. *.self.key. *.self.value.
        *.query_proj. *.key_proj. *.value_proj. *.[qkv]_lin. *.lin1. *Attention.[qkv].
        *.intermediate.dense. *.intermediate_dense. *.dense_h_to_4h. *.fc_in. *_layers.*.ffn.
        *.linear_fc1. *.self_attn.g_proj. *.self_attn.sinks. *.self_attn.gate_bias.
        *.in_proj_a. *.in_proj_b. *.in_proj_ba. *.in_proj_z. *.router_gate. *.embed_out. *.output.
        *.predictions.decoder.
        *.multi_modal_projector.linear_1. *.vision_projection. *.patch_embedding.linear.
        *.patch_embedder.patch_embedding.
     """),
    ("embedding_rowwise", """
        *.embed_tokens.* *.wte.* *.tok_embeddings.* *.word_embeddings. *.token_embedding.
        *.embed_in. *.embeddings. *.shared. *.embed_tokens_per_layer. *.down_embed. *.up_embed.
     """),
    ("embedding_colwise", "*.ngram_embedding."),
)  # fmt: skip
_USUAL = [
    (style, re.compile("|".join(map(translate, patterns.split())))) for style, patterns in _GROUPS
]
_NUMBER = re.compile(r"\.[0-9]+(?=\.)")
# Convolutions of width one in GPT-2, linear layers in the models that took its names.
_CONV1D = re.compile(r"\.(?:c_attn|q_attn|c_fc|c_proj)\.$")
_EXPERTS = re.compile(r"\.experts\.(?:gate_up_proj|down_proj)\.$")


def usual(key: str, shape: Shape) -> str | int | None:
    """The style of a tensor in the well-known models; None where its name is not known.

    Example:
        >>> usual("model.layers.3.mlp.down_proj.weight", (8, 32)), usual("bottleneck", (8, 8))
        ('rowwise', None)
    """
    found = _of_name(_NUMBER.sub(".0", _dotted(key)))
    # No model cuts the kernel of a convolution that is called as a linear layer elsewhere.
    return found if len(shape) < 4 or found == "replicate" else None


@lru_cache(4096)  # a model has many layers and few names in one
def _of_name(name: str) -> str | int | None:
    return next((style for style, pattern in _USUAL if pattern.match(name)), None)


def _dotted(key: str) -> str:
    return f".{key.removesuffix('.weight').removesuffix('.bias')}."


def lies_turned(shapes: Mapping[str, Shape]) -> Callable[[str], bool]:
    """Which matrices are stored with their inputs first, contrary to a linear layer's.

    Neither a name nor a square shape tells: the shapes beside it do, and a model is all of one
    kind.

    Example:
        >>> gpt2 = {"h.0.attn.c_attn.weight": (8, 24), "h.0.attn.c_proj.weight": (8, 8)}
        >>> lies_turned(gpt2)("h.0.attn.c_proj.weight")
        True
    """
    kinds = []
    if any(_is_conv1d(key, shape) for key, shape in shapes.items()):
        kinds.append(_CONV1D)
    if any(_are_turned_experts(key, shapes) for key in shapes):
        kinds.append(_EXPERTS)
    return lambda key: any(kind.search(_dotted(key)) for kind in kinds)


def _is_conv1d(key: str, shape: Shape) -> bool:
    wide = key.endswith(("c_attn.weight", "c_fc.weight"))
    return wide and len(shape) == 2 and shape[0] < shape[1]


def _are_turned_experts(key: str, shapes: Mapping[str, Shape]) -> bool:
    if not key.endswith("experts.gate_up_proj"):
        return False
    both, down = shapes[key], shapes.get(f"{key.removesuffix('gate_up_proj')}down_proj", ())
    if len(both) != 3 or len(down) != 3:
        return False
    return both[2] == 2 * down[1] and both[1] != 2 * down[2]

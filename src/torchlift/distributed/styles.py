"""How tensor parallelism cuts the layers of the usual models, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Protocol

#: How a tensor is cut across the tensor-parallel dimension: along this tensor dimension, or not.
Style = int | None
#: Patterns of names with a style each, as model configurations write them.
TensorParallel = Mapping[str, str | Style] | Callable[[str, tuple[int, ...]], Style]

_STYLES: dict[str, Style] = {
    "colwise": 0, "colwise_rep": 0, "colwise_gather_output": 0, "packed_colwise": 0,
    "rowwise": -1, "rowwise_rep": -1, "rowwise_split_input": -1, "packed_rowwise": -1,
    "embedding_rowwise": 0, "embedding_colwise": -1,
    "replicate": None, "replicated_with_grad_allreduce": None, "sequence_parallel": None,
}  # fmt: skip
# An embedding's weight lies the other way round than a linear layer's: torch's RowwiseParallel cuts
# its vocabulary, which is its first dimension.
_TURNED = {"colwise": -1, "colwise_rep": -1, "rowwise": 0, "rowwise_rep": 0}

#: The layers of the usual transformers, by the names that their authors gave them.
MEGATRON: dict[str, str | Style] = {
    "*norm*": None,
    **dict.fromkeys(
        ["*o_proj.*", "*out_proj.*", "*down_proj.*", "*fc2.*", "*c_proj.*", "*.w2.*", "*.wo.*"],
        "rowwise",
    ),
    **dict.fromkeys(
        [
            "*q_proj.*", "*k_proj.*", "*v_proj.*", "*qkv*", "*gate_proj.*", "*up_proj.*",
            "*fc1.*", "*c_fc.*", "*.w1.*", "*.w3.*", "*.w[qkv].*", "*lm_head.*", "output.*",
        ],
        "colwise",
    ),
    **dict.fromkeys(["*embed_tokens.*", "*wte.*", "*tok_embeddings.*"], "embedding_rowwise"),
}  # fmt: skip


class StyleOf(Protocol):
    """From a tensor's name and shape to the dimension that tensor parallel cuts."""

    def __call__(self, key: str, shape: tuple[int, ...], embedding: bool = False, /) -> Style:
        """`embedding`: whether it is known to belong to an embedding."""


def style_of(tp: TensorParallel | None) -> StyleOf:
    """A function from a tensor's name and shape to the dimension that tensor parallel cuts.

    Args:
        tp: patterns or a function; None for `MEGATRON`.

    Raises:
        ValueError: a style that nobody knows.

    Example:
        >>> style = style_of({"layers.*.down": "rowwise", "embed": "rowwise"})
        >>> style("layers.3.down.weight", (8, 32)), style("layers.3.down.bias", (8,))
        (1, None)
        >>> style("embed.weight", (100, 8), True)
        0
    """
    if callable(tp):
        own = tp
        return lambda key, shape, embedding=False, /: _within(own(key, shape), shape)
    patterns = [(p, s, _named(s)) for p, s in (MEGATRON if tp is None else tp).items()]

    def style(key: str, shape: tuple[int, ...], embedding: bool = False, /) -> Style:
        name = key.removesuffix(".weight").removesuffix(".bias")
        for pattern, text, found in patterns:
            if fnmatchcase(key, pattern) or fnmatchcase(name, pattern):
                if embedding and text in _TURNED:
                    found = _TURNED[str(text)]
                # Only a matrix is cut along its columns: its bias is added once, by every rank.
                return None if found == -1 and len(shape) < 2 else _within(found, shape)
        return None

    return style


def _within(found: Style, shape: tuple[int, ...]) -> Style:
    """A dimension counted from the front; None where the tensor lacks it, which stays whole."""
    if found is None or not -len(shape) <= found < len(shape):
        return None
    return found % len(shape)


def _named(style: str | Style) -> Style:
    if not isinstance(style, str):
        return style
    if style not in _STYLES:
        raise ValueError(f"{style!r} is not a tensor-parallel style: {', '.join(_STYLES)}")
    return _STYLES[style]

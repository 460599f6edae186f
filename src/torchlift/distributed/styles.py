"""Along which dimension tensor parallelism cuts each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from torchlift.distributed.usual import Shape, lies_turned, usual

#: How a tensor is cut across the tensor-parallel dimension: along this tensor dimension, or not.
Style = int | None
#: Patterns of names with a style each, as model configurations write them.
TensorParallel = Mapping[str, str | Style] | Callable[[str, Shape], Style]

_COLUMNS = ("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise")
_ROWS = ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise")
# Two matrices in one, such as a gate and what it gates: a rank has a part of each.
_PACKED = ("packed_colwise", "packed_rowwise")
_OTHER: dict[str, Style] = {
    "embedding_rowwise": 0, "embedding_colwise": -1,
    "replicate": None, "replicated_with_grad_allreduce": None, "sequence_parallel": None,
    # What transformers' plans say of a module beside what they say of its parameters.
    "mla_kv_a_proj": None, "all_reduce": None, "local_params": None, "moe_tp_experts": None,
    "moe_identity_expert": None,
}  # fmt: skip
# An embedding's weight lies the other way round than a linear layer's: torch's RowwiseParallel cuts
# its vocabulary, which is its first dimension.
_TURNED = ("colwise", "colwise_rep", "rowwise", "rowwise_rep")
#: The style that asks the names of the well-known models.
USUAL = "usual"
STYLES = (*_COLUMNS, *_ROWS, *_OTHER, USUAL)


class Found(NamedTuple):
    """How a tensor is cut.

    Attributes:
        known: whether somebody said so.
        dim: the dimension, or None.
        packed: matrices that lie one after the other along it.
    """

    known: bool
    dim: Style = None
    packed: int = 1


def fits(key: str, pattern: str) -> bool:
    """Whether a pattern is about a tensor: about its name, or that of the module it is in.

    Example:
        >>> fits("layers.3.down.bias", "layers.*.down"), fits("layers.3.down.bias", "down")
        (True, False)
    """
    name = key.removesuffix(".weight").removesuffix(".bias")
    return fnmatchcase(key, pattern) or fnmatchcase(name, pattern)


class Styles:
    """From a tensor's name and shape to the dimension that tensor parallel cuts.

    Args:
        tp: patterns or a function; None for the names of the well-known models.
        shapes: of all the tensors: those beside it tell how one lies.

    Raises:
        ValueError: a style that nobody knows.

    Example:
        >>> style = Styles({"layers.*.down": "rowwise", "embed": "rowwise"})
        >>> style("layers.3.down.weight", (8, 32)), style("layers.3.down.bias", (8,))
        (1, None)
        >>> style("embed.weight", (100, 8), True)
        0
        >>> style.find("other", (8, 8)), style.unused
        (Found(known=False, dim=None, packed=1), ())
    """

    def __init__(
        self, tp: TensorParallel | None, shapes: Mapping[str, Shape] | None = None
    ) -> None:
        self._function = tp if callable(tp) else None
        self._patterns = {} if callable(tp) else dict({"*": USUAL} if tp is None else tp)
        for style in self._patterns.values():
            _check(style)
        self._unused = {p: None for p, style in self._patterns.items() if style != USUAL}
        self._turned = lies_turned(shapes or {})

    @property
    def unused(self) -> tuple[str, ...]:
        """The patterns that no tensor so far had a name, and a dimension, for."""
        return tuple(self._unused)

    def __call__(self, key: str, shape: Shape, embedding: bool = False) -> Style:
        """The dimension; `embedding`: whether it is known to belong to an embedding."""
        return self.find(key, shape, embedding).dim

    def find(self, key: str, shape: Shape, embedding: bool = False) -> Found:
        """The same, and whether anything is known of this tensor."""
        if self._function is not None:
            return Found(True, _within(self._function(key, shape), shape))
        for pattern, style in self._patterns.items():
            if not fits(key, pattern):
                continue
            turned = embedding and style in _TURNED
            if style == USUAL:
                style, turned = usual(key, shape), self._turned(key)
                if style is None:
                    return Found(False)
            if not isinstance(style, int) or -len(shape) <= style < len(shape):
                self._unused.pop(pattern, None)
            # transformers cuts a packed bias as if it were one.
            packed = 2 if style in _PACKED and len(shape) > 1 else 1
            return Found(True, _dimension(style, shape, turned), packed)
        return Found(False)


def _check(style: object) -> None:
    if isinstance(style, str) and style not in STYLES:
        raise ValueError(f"{style!r} is not a tensor-parallel style: {', '.join(STYLES)}")


def _dimension(style: str | Style, shape: Shape, turned: bool) -> Style:
    if style in _COLUMNS:
        # Of a stack of matrices, such as experts, each one is cut.
        outputs = 1 if len(shape) == 3 else 0
        return _within(-1 if turned and len(shape) > 1 else outputs, shape)
    found = (-2 if turned else -1) if style in _ROWS else style
    if isinstance(found, str):
        found = _OTHER[found]
    # Only a matrix is cut along its columns: its bias is added once, by every rank.
    return None if found == -1 and len(shape) < 2 else _within(found, shape)


def _within(found: Style, shape: Shape) -> Style:
    """A dimension counted from the front; None where the tensor lacks it, which stays whole."""
    if found is None or not -len(shape) <= found < len(shape):
        return None
    return found % len(shape)


def largest(sizes: Mapping[str, int], most: int = 3) -> list[str]:
    """The names with the largest sizes, those of the layers together as one pattern.

    Example:
        >>> largest({"layers.0.w": 4, "layers.1.w": 4, "x": 6, "y": 1}, 2)
        ['layers.*.w (2)', 'x', '1 more']
    """
    groups: dict[str, list[int]] = {}
    for name, size in sizes.items():
        groups.setdefault(_without_numbers(name.split(".")), []).append(size)
    ordered = sorted(groups, key=lambda name: -sum(groups[name]))
    told = [f"{n} ({len(groups[n])})" if len(groups[n]) > 1 else n for n in ordered[:most]]
    return [*told, f"{len(ordered) - most:,} more"] if len(ordered) > most else told


def _without_numbers(parts: Iterable[str]) -> str:
    return ".".join("*" if part.isdecimal() else part for part in parts)

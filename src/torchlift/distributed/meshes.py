"""The mesh that nobody has yet: what its dimensions do, and where a rank stands in it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

#: Cut the first dimension of every parameter. Several of them are one, as for ``fully_shard``.
SHARDED = ("fsdp", "dp_shard", "shard", "cp", "ep")
#: Every rank along these reads the same.
REPLICATED = ("dp", "ddp", "dp_replicate", "replicate", "hsdp")
_KINDS = (*SHARDED, *REPLICATED, "tp", "pp")
_MOST = 1 << 20
_LAYER = re.compile(r"(?:^|\.)([0-9]+)\.")
# A safetensors file is in alphabetical order: the head before the first layer, in GPT-2 the
# embeddings after the last.
_FIRST = re.compile(r"(?:^|\.)(?:wte|wpe|shared|(?!embed_out)\w*embed\w*)(?:\.|$)")
_LAST = re.compile(
    r"(?:^|\.)(?:lm_head|head|embed_out|output|norm|final_\w+|ln_f|score|classifier)(?:\.|$)"
)


class Cell(NamedTuple):
    """What tells ranks apart that read differently.

    Attributes:
        stage: which of the pipeline's stages.
        shard: which of FSDP's parts.
        part: which of the tensor-parallel parts.
    """

    stage: int
    shard: int
    part: int


def parse_mesh(text: str) -> dict[str, int]:
    """Dimensions and sizes from text.

    Raises:
        ValueError: not such a text.

    Example:
        >>> parse_mesh("fsdp=1024,tp=8")
        {'fsdp': 1024, 'tp': 8}
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = map(str.strip, part.partition("="))
        digits = size.removeprefix("-")
        if not name or not equals or not (digits.isascii() and digits.isdecimal()):
            raise ValueError(f"{part.strip()[:80]!r} is not a mesh dimension such as fsdp=8")
        if name in found:
            raise ValueError(f"mesh dimension {name!r} is given twice")
        found[name] = int(size[:20])  # longer ones are too many ranks in any case
    return checked(found)


def checked(mesh: Mapping[str, int]) -> dict[str, int]:
    """The mesh as a dictionary of its own, once every dimension makes sense.

    Raises:
        ValueError: one does not.
    """
    if not mesh:
        raise ValueError("a mesh needs at least one dimension, such as fsdp=8")
    for name, size in mesh.items():
        if name not in _KINDS:
            known = ", ".join(_KINDS)
            raise ValueError(f"{str(name)[:80]!r} is not a mesh dimension; known are {known}")
        given: object = size
        if not isinstance(given, int) or given < 1:
            raise ValueError(f"mesh dimension {name!r} has size {size!r}: expected 1 or more")
    if math.prod(mesh.values()) > _MOST:
        raise ValueError(f"a mesh of more than {_MOST:,} ranks")
    return dict(mesh)


def extents(mesh: Mapping[str, int]) -> Cell:
    """How many stages, shards and tensor-parallel parts the mesh has.

    Example:
        >>> extents({"pp": 2, "dp_shard": 4, "cp": 2, "tp": 8})
        Cell(stage=2, shard=8, part=8)
    """
    shards = math.prod(size for name, size in mesh.items() if name in SHARDED)
    return Cell(mesh.get("pp", 1), shards, mesh.get("tp", 1))


def cells(mesh: Mapping[str, int]) -> Iterator[Cell]:
    """The cell of each rank, ranks in row-major order.

    Example:
        >>> [cell.shard for cell in cells({"fsdp": 2, "replicate": 2})]
        [0, 0, 1, 1]
    """
    # FSDP over several dimensions is FSDP over the one that they flatten to: what counts for
    # sizes that do not divide evenly.
    for place in itertools.product(*map(range, mesh.values())):
        stage = shard = part = 0
        for (name, size), at in zip(mesh.items(), place, strict=True):
            if name in SHARDED:
                shard = shard * size + at
            elif name == "tp":
                part = at
            elif name == "pp":
                stage = at
        yield Cell(stage, shard, part)


def layer_of(key: str) -> int | None:
    """The number of the layer that a tensor belongs to.

    Example:
        >>> layer_of("model.layers.3.experts.0.w"), layer_of("norm.weight")
        (3, None)
    """
    found = _LAYER.search(key)
    return int(found[1][:18]) if found else None


def stages(keys: Iterable[str], count: int) -> list[int]:
    """The pipeline stage of each tensor: runs of layers, and the ends for what has none.

    Example:
        >>> stages(["embed.weight", "layers.0.w", "layers.1.w", "norm.weight"], 2)
        [0, 0, 1, 1]
    """
    keys = list(keys)
    layers = [layer_of(key) for key in keys]
    depth = max((layer for layer in layers if layer is not None), default=0) + 1
    found: list[int] = []
    seen = False
    for key, layer in zip(keys, layers, strict=True):
        seen = seen or layer is not None
        if layer is not None:
            found.append(layer * count // depth)
        elif _FIRST.search(key):
            found.append(0)
        else:
            found.append(count - 1 if seen or _LAST.search(key) else 0)
    return found

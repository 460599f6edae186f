"""How each tensor is shared out: along which dimensions, and among which pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torchlift.distributed.meshes import SHARDED, extents, layer_of, stages
from torchlift.distributed.shares import Cut, Want, length
from torchlift.distributed.styles import Found, Styles, TensorParallel, fits
from torchlift.distributed.usual import Shape

#: Patterns of names with the dimension that FSDP cuts, or a function from name and shape to it.
ShardDims = Mapping[str, int] | Callable[[str, Shape], int | None]


@dataclass(slots=True)
class Cuts:
    """How every tensor is cut, and what nobody said.

    Attributes:
        all: one per tensor.
        unstyled: matrices that tensor parallel leaves whole because no style is known -> bytes.
        unused: patterns of the tensor-parallel plan that cut nothing and match nothing.
    """

    all: list[Cut] = field(default_factory=list)
    unstyled: dict[str, int] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


def cuts_of(
    wants: Sequence[Want],
    mesh: Mapping[str, int],
    tp: TensorParallel | None,
    shard: ShardDims | None,
    ignored: Iterable[str],
) -> Cuts:
    """Say along which dimensions each tensor is cut.

    Raises:
        ValueError: a style, a pattern or a dimension that means nothing here.
    """
    fsdp = _FSDP(mesh, shard, [ignored] if isinstance(ignored, str) else list(ignored))
    styles = Styles(tp, {want.name: want.shape for want in wants if want.parameter})
    made = Cuts()
    for want in wants:
        found = Found(True)
        if want.parameter and "tp" in mesh:
            found = styles.find(want.name, want.shape, want.embedding)
        # A vector is whole, or goes with its matrix.
        if not found.known and len(want.shape) > 1 and mesh["tp"] > 1:
            made.unstyled[want.name] = _nbytes(want)
        made.all.append(Cut(found.dim, fsdp.dim(want, found.dim), found.packed))
    made.unused = styles.unused if tp is not None and "tp" in mesh else ()
    fsdp.check()
    return made


def _nbytes(want: Want) -> int:
    return want.entry.nbytes if want.entry else math.prod(want.shape) * want.itemsize


class _FSDP:
    """The dimension that FSDP cuts of each parameter: the first where nobody says otherwise."""

    def __init__(
        self, mesh: Mapping[str, int], shard: ShardDims | None, ignored: Sequence[str]
    ) -> None:
        self._size, self._on = extents(mesh), any(name in SHARDED for name in mesh)
        if not self._on and (shard is not None or ignored):
            raise ValueError("shard= and ignored= are for a mesh with a dimension such as fsdp=8")
        self._function = shard if callable(shard) else None
        self._dims = {} if callable(shard) or shard is None else dict(shard)
        self._ignored = ignored
        self._unused = dict.fromkeys((*self._dims, *ignored))

    def dim(self, want: Want, tp: int | None) -> int | None:
        """The dimension of one tensor that tensor parallel has cut along `tp`."""
        if not (self._on and want.parameter and want.shape):
            return None
        for pattern in self._ignored:
            if fits(want.name, pattern):
                self._unused.pop(pattern, None)
                return None
        found = self._given(want)
        return self._checked(want, tp, found) if found is not None else 0

    def check(self) -> None:
        """Refuse patterns that no parameter had a name for."""
        if self._unused:
            listed = ", ".join(map(repr, self._unused))
            raise ValueError(f"shard= and ignored=: no parameter matches {listed}")

    def _given(self, want: Want) -> int | None:
        if self._function is not None:
            return self._function(want.name, want.shape)
        for pattern, dim in self._dims.items():
            if fits(want.name, pattern):
                self._unused.pop(pattern, None)
                return dim
        return None

    def _checked(self, want: Want, tp: int | None, given: object) -> int:
        rank = len(want.shape)
        if not isinstance(given, int) or not -rank <= given < rank:
            shape = list(want.shape)
            raise ValueError(f"shard=: {want.name} of shape {shape} has no dimension {given!r}")
        dim, parts = given % rank, self._size.part if tp == given % rank else 1
        sizes = {length(want.shape[dim], parts, part) for part in range(parts)}
        if dim > 0 and any(size % self._size.shard for size in sizes):
            raise ValueError(
                f"shard=: {want.name} of shape {list(want.shape)} is not cut evenly along "
                f"dimension {dim}: FSDP cuts only dimension 0 unevenly"
            )
        return dim


def places_of(wants: Sequence[Want], count: int) -> list[Collection[int]]:
    """The pipeline stages that hold each tensor.

    A tied tensor is in the stage of each of its names. What no file provides and no layer owns,
    such as rotary tables, is in all.

    Example:
        >>> tied = Want("embed.weight", (4, 2), 4, None, 0, others=("head.weight",))
        >>> places_of([tied, Want("layers.0.w", (2,), 4, None, 0)], 2)
        [{0, 1}, {0}]
    """
    others = [other for want in wants for other in want.others]
    # The second name of a tie comes late in a model, if its name does not say where.
    found = stages([*(want.name for want in wants), *others], count)
    late: Iterator[int] = iter(found[len(wants) :])
    places: list[Collection[int]] = []
    for want, stage in zip(wants, found, strict=False):
        if not want.parameter and want.entry is None and layer_of(want.name) is None:
            places.append(range(count))
        else:
            places.append({stage, *(next(late) for _ in want.others)})
    return places

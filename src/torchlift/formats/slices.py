"""Read one rank's part of a tensor from the pickle of a DTensor, without its class.

Facts: torch, ``distributed/tensor/_dtensor_spec.py``, ``placement_types.py``, ``device_mesh.py``
and ``_mesh_layout.py``, from 2.2 on: ``mesh`` is a tensor of ranks until 2.9, and a layout since.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torchlift.formats.boxes import Placement, Ranges, placed_spans, shape_of_spans
from torchlift.formats.torch_pickle import Blocked, KindRef, TensorRef, attributes_of
from torchlift.formats.unpickle import STEP, Budget

_SHARDS = "Shard", "_StridedShard"
#: Most dimensions of a tensor and of a mesh, and the price of checking them.
_MOST, _COST = 64, 128 * STEP


class _Unknown(Exception):
    """A layout cannot be read. The argument says what it lacks."""


def located(ref: KindRef, budget: Budget) -> TensorRef:
    """Return the place of a DTensor's local tensor in the whole tensor.

    Call this when the pickle has been read to its end. A pickle can change a list after it was
    passed to a call, and torch sees the list as it is at the end.

    Args:
        ref: A DTensor, whose facts are its attributes.
        budget: Budget of the file.

    Returns:
        The local tensor itself, if it is a replica of the whole tensor. Else a slice with two
        facts: its ranges (or None), and the reason why they are unknown (or None).
    """
    budget.spend(_COST)
    (local,), (attributes,) = ref.tensors, ref.facts
    try:
        spans = _spans(ref.size, local.size, attributes.get("_spec"), budget)
    except _Unknown as error:
        return replace(ref, facts=(None, str(error)))
    if spans is None:
        return replace(local, requires_grad=ref.requires_grad)
    return replace(ref, facts=(spans, None))


def _spans(shape: object, local: object, spec: object, budget: Budget) -> Ranges | None:
    """Return the ranges of a rank, or None if it has the whole tensor."""
    sizes, own = _sizes(shape, "its shape"), _sizes(local, "the shape of its local tensor")
    layout = attributes_of(spec)
    mesh, at = _mesh(layout.get("mesh"))
    placements = [_placement(each, len(sizes)) for each in _items(layout, "placements")]
    _require(len(placements) == len(mesh), "its placements, one for each dimension of its mesh")
    axes = [axis for axis, placement in enumerate(placements) if placement.dim is not None]
    if all(mesh[axis] == 1 for axis in axes):
        _require(own == sizes, f"a local tensor of its shape, {list(sizes)}: not {list(own)}")
        return None
    # Each block of a strided shard is a range, and each combination of ranges is a box.
    budget.spend(4 * STEP * math.prod(placements[axis].factor for axis in axes))
    order = list(_order(layout, axes))
    spans = placed_spans(sizes, mesh, placements, at, order) if at else tuple(() for _ in sizes)
    budget.spend(4 * STEP * math.prod(map(len, spans)))
    wanted = shape_of_spans(spans)
    fits = own == wanted or (0 in own and 0 in wanted)
    _require(fits, f"a local tensor of shape {list(wanted)}: not {list(own)}")
    return spans


class _Mesh(NamedTuple):
    """The shape of a mesh, and the coordinates of the rank, which are empty outside of it."""

    shape: tuple[int, ...]
    at: tuple[int, ...]


def _mesh(mesh: object) -> _Mesh:
    """Return the mesh of a DTensor."""
    state, what = attributes_of(mesh), "the shape of its mesh"
    ranks = state.get("mesh")
    if isinstance(ranks, TensorRef):
        shape = _sizes(ranks.size, what)
    else:
        layout = attributes_of(state.get("_layout"))
        axes = layout.get("axes", layout.get("shape"))
        axes = axes if isinstance(axes, tuple) else (axes,)
        _require(len(axes) <= _MOST, what)
        found = [
            attributes_of(axis).get("shape") if isinstance(axis, Blocked) else axis for axis in axes
        ]
        # A dimension that was flattened from several ones has a tuple.
        each = [axis if isinstance(axis, tuple) else (axis,) for axis in found]
        shape = tuple([math.prod(_sizes(axis, what)) for axis in each])
    at = state.get("_coordinate_on_dim")
    place = _sizes(tuple(at) if isinstance(at, list) else at or (), "the place of its rank")
    is_inside = len(place) == len(shape) and all(map(int.__lt__, place, shape))
    _require(is_inside or (at is None and all(shape)), "the place of its rank in the mesh")
    return _Mesh(shape, place)


def _placement(placement: object, dims: int) -> Placement:
    name = placement.name.rpartition(".")[2] if isinstance(placement, Blocked) else ""
    if name == "Replicate":
        return Placement()
    known = f"placements that are shards or replicas: not {name or type(placement).__name__}"
    _require(name in _SHARDS, known)
    found = attributes_of(placement)
    dim, factor = _sizes((found.get("dim"), found.get("split_factor", 1)), known)
    _require(dim < dims and factor > 0, known)
    return Placement(dim, factor)


def _order(layout: dict[Any, Any], axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the mesh dimensions that shard each tensor dimension, in their order."""
    left, what = {*axes}, "the order of its shards"
    # Until torch 2.9, and with strided shards, the order is not recorded.
    for entry in _items(layout, "shard_order") if layout.get("shard_order") is not None else ():
        given: Any = entry.inside[0] if isinstance(entry, Blocked) and entry.inside else None
        _require(isinstance(given, tuple) and len(given) == 2, what)
        sharding = _sizes(given[1], what)
        _require(len({*sharding}) == len(sharding) and left.issuperset(sharding), what)
        left -= {*sharding}
        yield sharding


def _items(state: dict[Any, Any], name: str) -> Sequence[Any]:
    found = state.get(name)
    if not isinstance(found, (tuple, list)) or len(found) > _MOST:
        raise _Unknown(f"its {name}")
    return found


def _sizes(values: object, what: str) -> tuple[int, ...]:
    """Return a short tuple of whole numbers from 0, or refuse the layout."""
    if not isinstance(values, tuple) or len(values) > _MOST:
        raise _Unknown(what)
    _require(all(type(size) is int and 0 <= size < 1 << 62 for size in values), what)
    return values


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise _Unknown(what)

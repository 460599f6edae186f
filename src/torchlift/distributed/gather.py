"""What ranks do with their DTensors together: the same on all of them, and then they gather.

A collective takes part in whatever the other ranks do at that time. A rank that asks for other
tensors, or for the same ones in another order, waits for ever, or takes shards of two for one.
State dicts without DTensors are made of them, or sent to the CPU, one tensor at a time.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch

from torchlift._model.dtensor import (
    Slices,
    Spans,
    blocks,
    everything,
    is_dtensor,
    local_tensor,
    overlaps,
    placed,
    shard_of_value,
    shard_spans,
    spread_of,
    wrap,
)
from torchlift._model.handlers import is_wrapper
from torchlift._model.ranks import RankGroup, rank, ranks_of
from torchlift._model.torch_private import shard_order
from torchlift._system.containers import leaves, map_leaves
from torchlift.distributed.broadcast import BUDGET, carrier, wire
from torchlift.distributed.options import StateDictMismatch, StateDictOptions

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

#: The ranks of a mesh -> what they do with the tensors on it, in order.
Sequence = dict[str, list[str]]


def sequence(tree: Any, shared: Iterable[torch.Tensor] = ()) -> Sequence:
    """Return the DTensors of a state dict, described in order, for every mesh.

    Args:
        tree: nested dicts, lists and tuples.
        shared: tensors of the model, whose meshes are there even when `tree` has nothing on them.

    Example:
        >>> sequence({"weight": torch.ones(2)})
        {}
    """
    named = [(path, leaf) for path, leaf in leaves(tree).items() if is_dtensor(leaf)]
    meshes = [tensor.device_mesh for tensor in shared if is_dtensor(tensor)]
    meshes += [tensor.device_mesh for _, tensor in named]
    ranks = {
        mesh: _digest(str(sorted(mesh.mesh.flatten().tolist())))
        for mesh in dict.fromkeys(meshes)
        if mesh.get_coordinate() is not None  # this rank is in it
    }
    found: Sequence = {text: [] for text in ranks.values()}
    for path, tensor in named:
        if tensor.device_mesh in ranks:
            what = f"{'.'.join(map(str, path))} {list(tensor.shape)} of {tensor.dtype}"
            found[ranks[tensor.device_mesh]].append(f"{what} placed {placed(tensor)}")
    return found


def digests(steps: Sequence) -> dict[str, str]:
    """Return what ranks tell of what they are about to do: names take room."""
    return {mesh: _digest("\n".join(lines)) for mesh, lines in steps.items()}


def require_alike(group: RankGroup, mine: Sequence, told: Iterable[dict[str, str]]) -> None:
    """Check that ranks of one mesh are about to do the same; all of the group call this.

    Args:
        group: the processes.
        mine: what this rank is about to do.
        told: the `digests` of all ranks.

    Raises:
        StateDictMismatch: on every rank, when two differ.
    """
    first: dict[str, str] = {}
    items = [item for each in told for item in each.items()]
    if not all(first.setdefault(mesh, digest) == digest for mesh, digest in items):
        raise _difference(group.run(lambda: (None, mine))[1])


def _difference(known: dict[int, Sequence]) -> StateDictMismatch:
    """Return the error that names the first two ranks which differ, and in what."""
    first: dict[str, int] = {}
    for who, each in sorted(known.items()):
        for mesh, steps in each.items():
            other = first.setdefault(mesh, who)
            for expected, found in itertools.zip_longest(
                known[other][mesh], steps, fillvalue="nothing"
            ):
                if expected != found:
                    return StateDictMismatch(
                        "the ranks do not ask for the same tensors in the same order",
                        expected=f"{expected} as on rank {other}",
                        found=f"{found} on rank {who}",
                        hint="Pass the same options, submodules and optimizers on every rank.",
                    )
    raise AssertionError("digests differ, and what they were made of does not")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def finish(
    state: dict[str, Any],
    options: StateDictOptions,
    all_offload: bool = True,
    group: RankGroup | None = None,
) -> dict[str, Any]:
    """Gather and offload what `state` holds, as the options say.

    Args:
        state: nested dicts, lists and tuples; it is not changed.
        options: `full_state_dict` and `cpu_offload` are looked at.
        all_offload: whether all ranks that gather have the same `cpu_offload` as this one; where
            one keeps its result, all gather every tensor, and those on other ranks drop it.
        group: the ranks that gather, by default all of the process group.

    Returns:
        With both options a complete dict on the first rank and an empty one elsewhere; the memory
        this takes is the result there plus a fixed budget, and the latter elsewhere. Ranks that
        have names of their own, as the stages of a pipeline, add them.

    Raises:
        StateDictMismatch: on every rank, when two hold unlike things under one name.
    """
    group = group or RankGroup.of_all(StateDictMismatch)
    full, offload = options.full_state_dict, options.cpu_offload
    if full and offload and all_offload and group.groups:
        return _to_first(state, group)
    drops = full and offload and rank() != ranks_of(*group.groups[:1])[0]

    def finished(tensor: torch.Tensor) -> torch.Tensor | None:
        whole = _whole(tensor) if full else tensor
        if drops:
            return None
        return whole.to("cpu") if offload else whole

    found: dict[str, Any] = map_tensors(state, finished) if full or offload else state
    return {} if drops else found


def relaid(value: DTensor, like: DTensor) -> DTensor:
    """Return a DTensor as another one on its mesh is laid out; the ranks of the mesh take part."""
    made = value.redistribute(placements=like.placements)
    if spread_of(made) == spread_of(like):
        return made
    # It cannot be asked for another order in which mesh dimensions shard.
    return wrap(like, shard_of_value(value.full_tensor(), like, "a value"))


def map_tensors(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Copy nested containers with every tensor replaced; other leaves stay as they are.

    Example:
        >>> map_tensors({"a": [torch.zeros(2), 3]}, lambda tensor: tensor.numel())
        {'a': [2, 3]}
    """
    return map_leaves(tree, lambda leaf, _: change(leaf) if torch.is_tensor(leaf) else leaf)


def require_within(state: Any) -> None:
    """Refuse to gather on a rank that is not in the mesh of a tensor: it would have no values.

    Raises:
        StateDictMismatch: there is such a tensor.
    """
    for path, leaf in leaves(state).items():
        if is_dtensor(leaf) and leaf.device_mesh.get_coordinate() is None:
            raise StateDictMismatch(
                "this rank is not in the mesh of a tensor that it is to have as a whole",
                entry=".".join(map(str, path)),
                found=f"rank {rank()}, and {leaf.device_mesh}",
                hint="Pass cpu_offload=True, which gathers on rank 0 from any mesh.",
            )


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if not is_dtensor(tensor):
        return tensor
    kind = tensor.device_mesh.device_type
    here = tensor if tensor.device.type == kind else tensor.to(kind)
    assert is_dtensor(here)
    try:
        return here.full_tensor()
    # A ValueError: strided shards of a mesh of one dimension, which torch 2.11 does not know.
    except (NotImplementedError, ValueError) as error:
        raise StateDictMismatch(
            "the shards of a tensor cannot be put together, which its class does not know",
            expected="shards of its first dimension, or a plain tensor",
            found=f"{type(local_tensor(tensor)).__name__} placed {placed(tensor)}",
            hint="Leave full_state_dict out: each rank then has its shard.",
        ) from error


@dataclass(frozen=True)
class TensorLayout:
    """A tensor of a state dict, as ranks tell each other of it.

    Attributes:
        shape: of the whole tensor.
        dtype: of its elements.
        path: in the state dict of the rank that tells.
        who: that rank.
        ranks: those of its mesh in row-major order; none for a plain tensor.
        sizes: of its mesh.
        placements: one per dimension of the mesh.
        order: see `shard_spans`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    path: tuple[Any, ...] = field(compare=False)
    who: int = field(compare=False)
    ranks: tuple[int, ...] = field(default=(), compare=False)
    sizes: tuple[int, ...] = ()
    placements: tuple[Any, ...] = ()
    order: tuple[tuple[int, ...], ...] = ()

    def owners(self, first: int) -> Iterator[tuple[int, Spans]]:
        """Yield ranks that hold every value once together, and what each holds.

        Of replicas those of the first rank of all are preferred.
        """
        if not self.ranks:
            yield self.who, everything(self.shape)
            return
        grid = torch.tensor(self.ranks).view(self.sizes)
        nearest = (grid == first).nonzero().tolist() or [[0] * len(self.sizes)]
        axes = [
            [nearest[0][axis]] if placement.is_replicate() else range(self.sizes[axis])
            for axis, placement in enumerate(self.placements)
        ]
        for at in itertools.product(*axes):
            spans = shard_spans(self.shape, self.sizes, self.placements, at, self.order)
            yield int(grid[at]), spans


def _described(tensor: torch.Tensor, path: tuple[Any, ...]) -> TensorLayout:
    found = TensorLayout(tuple(tensor.shape), tensor.dtype, path, rank())
    if not is_dtensor(tensor):
        return found
    mesh = tensor.device_mesh
    ranks, sizes = tuple(mesh.mesh.flatten().tolist()), tuple(mesh.shape)
    order = shard_order(tensor)
    return replace(found, ranks=ranks, sizes=sizes, placements=tensor.placements, order=order)


def _to_first(state: dict[str, Any], group: RankGroup) -> dict[str, Any]:
    """Return the whole state dict on the CPU of the first rank; an empty one elsewhere."""
    process_group = group.groups[0]
    first = ranks_of(process_group)[0]
    tensors: dict[tuple[Any, ...], torch.Tensor] = {}

    def describe(leaf: Any, path: tuple[Any, ...]) -> Any:
        if not torch.is_tensor(leaf):
            return leaf
        tensor, plain = _in_blocks(leaf)
        if not plain:
            return tensor.to("cpu")
        tensors[path] = tensor
        return _described(tensor, path)

    def begin() -> tuple[Any, tuple[str, str, str]]:
        tree = map_leaves(state, describe)
        found = leaves(tree)
        told = [leaf for leaf in found.values() if isinstance(leaf, TensorLayout)]
        same = [(i.path, i.shape, i.dtype, i.sizes, i.placements, i.order) for i in told]
        kinds = {local_tensor(tensor).device.type for tensor in tensors.values()} - {"cpu"}
        where = _digest(repr([item.ranks for item in told]))
        # Texts too: which parameters a group has is said by their names alone.
        names = [(path, leaf if isinstance(leaf, str) else None) for path, leaf in found.items()]
        return tree, (_digest(repr((names, same))), where, min(kinds, default="cpu"))

    tree, known = group.run(begin)
    # A rank tells few bytes: names take room, and are exchanged only where they differ, by one
    # rank of those that have the same.
    if len({(names, where) for names, where, _ in known.values()}) > 1:
        tellers = {names: who for who, (names, *_) in sorted(known.items(), reverse=True)}.values()
        mine = tree if rank() in tellers else None
        _, sent = group.run(lambda: (None, mine and pickle.dumps(mine)))
        trees = [sent[who] for who in sorted(tellers)]
        tree, _ = group.run(lambda: (reduce(_merged, map(pickle.loads, trees)), None))
    else:
        tree = map_leaves(tree, lambda leaf, _: _told_by(first, leaf))
    chosen = [leaf for leaf in leaves(tree).values() if isinstance(leaf, TensorLayout)]
    device = wire(max(kind for *_, kind in known.values()), carrier(process_group))
    local = [
        local_tensor(tensors[item.path]).detach() if item.path in tensors else None
        for item in chosen
    ]

    def reserve() -> tuple[tuple[list[torch.Tensor], torch.Tensor], None]:
        receives = chosen if rank() == first else ()
        most = max((item.dtype.itemsize * math.prod(item.shape) for item in chosen), default=0)
        stage = torch.empty(min(most, BUDGET), dtype=torch.uint8, device=device)
        return ([torch.empty(item.shape, dtype=item.dtype) for item in receives], stage), None

    # All memory is there before the ranks go on: one that has none would leave others waiting.
    (filled, stage), _ = group.run(reserve)
    _fill(filled, chosen, local, stage, first, carrier(process_group))
    if rank() != first:
        return {}
    whole = {id(item): tensor for item, tensor in zip(chosen, filled, strict=True)}
    found: dict[str, Any] = map_leaves(tree, lambda leaf, _: whole.get(id(leaf), leaf))
    return found


def _in_blocks(tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Return a tensor, whole if only its class knows how, and whether blocks of it can be sent."""
    local = local_tensor(tensor)
    if is_dtensor(tensor) and (is_wrapper(local) or any(p.is_partial() for p in tensor.placements)):
        tensor = local = _whole(tensor)
    plain = local.layout is torch.strided and not (local.is_quantized or local.is_meta)
    return tensor, plain and not is_wrapper(local)


def _told_by(who: int, leaf: Any) -> Any:
    return replace(leaf, who=who) if isinstance(leaf, TensorLayout) else leaf


def _merged(one: Any, two: Any, path: tuple[Any, ...] = ()) -> Any:
    """Return what two ranks have; of what both have, the first one's.

    Raises:
        StateDictMismatch: they have unlike tensors under one name.
    """
    if isinstance(one, dict) and isinstance(two, dict):
        both = {key: _merged(one[key], two[key], (*path, key)) for key in one if key in two}
        return {**one, **two, **both}
    if isinstance(one, list) and isinstance(two, list) and path[-1:] == ("param_groups",):
        return [*one, *(group for group in two if group not in one)]
    if isinstance(one, TensorLayout) and isinstance(two, TensorLayout) and one != two:
        raise StateDictMismatch(
            "two ranks hold unlike tensors under one name",
            entry=".".join(map(str, path)),
            expected=f"{_text(one)}, as on rank {one.who}",
            found=f"{_text(two)} on rank {two.who}",
            hint="Give what is not the same other names, or make the shards DTensors.",
        )
    return one


def _text(item: TensorLayout) -> str:
    where = f" placed ({', '.join(map(str, item.placements))})" if item.sizes else ""
    return f"{item.dtype} {list(item.shape)}{where}"


#: Messages of one rank at once that need no memory beside the tensors: small ones wait for none.
_IN_FLIGHT = 64


def _fill(
    whole: Many[torch.Tensor],
    chosen: Many[TensorLayout],
    local: Many[torch.Tensor | None],
    stage: torch.Tensor,
    first: int,
    process_group: Any,
) -> None:
    """Fill the whole tensors of the first rank, a block at a time; all ranks take part.

    Args:
        whole: the tensors, on the first rank.
        chosen: what they are.
        local: what this rank has of them.
        stage: memory for one block, where the process group takes it.
        first: number of the first rank.
        process_group: the ranks.
    """
    dist = torch.distributed
    # All make the communicator, also who sends nothing: under NCCL a send makes one for two ranks.
    dist.all_reduce(torch.zeros(1, device=stage.device), group=process_group)
    on_their_way: deque[Any] = deque()
    for number, item in enumerate(chosen):
        here = local[number]
        for owner, spans in item.owners(first):
            if rank() not in (first, owner):
                continue
            for part, block in _local_blocks(spans, max(1, stage.numel() // item.dtype.itemsize)):
                if rank() == owner:
                    assert here is not None
                    values = here[part]
                if owner == first:
                    whole[number][block].copy_(values)
                    continue
                if rank() == first:
                    values = whole[number][block]
                way, peer = (dist.irecv, owner) if rank() == first else (dist.isend, first)
                sent, is_staged = values, values.device != stage.device or not _is_dense(values)
                if is_staged:
                    sent = stage[: values.nbytes].view(item.dtype).view(values.shape)
                if is_staged and rank() == owner:
                    sent.copy_(values)
                operation = dist.P2POp(way, sent.view(-1).view(torch.uint8), peer, process_group)
                on_their_way += dist.batch_isend_irecv([operation])
                while len(on_their_way) > (0 if is_staged else _IN_FLIGHT):
                    on_their_way.popleft().wait()
                if is_staged and rank() == first:
                    values.copy_(sent)
    while on_their_way:
        on_their_way.popleft().wait()


def _is_dense(values: torch.Tensor) -> bool:
    return values.is_contiguous() and not (values.is_conj() or values.is_neg())


def _local_blocks(spans: Spans, limit: int) -> Iterator[tuple[Slices, Slices]]:
    """Yield, for blocks of at most `limit` elements, the index in the local and the whole tensor.

    The same on every rank, so that what one sends is what another receives.
    """
    for box in itertools.product(*spans):
        for block in blocks([stop - start for start, stop in box], limit):
            offsets = zip(box, block, strict=True)
            part = [(low + start, low + stop) for (low, _), (start, stop) in offsets]
            for local, _ in overlaps(spans, part):
                yield local, tuple(slice(*span) for span in part)

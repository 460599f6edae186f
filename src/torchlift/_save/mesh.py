"""Save from a mesh: each rank writes its own files, and all ranks end the same way.

Ranks exchange digests of their keys and layouts. Only the first rank of each digest sends its keys,
so that the stages of a pipeline know each other. Each rank then computes the boxes of all ranks. A
list of all boxes would be large: those of 7,200 keys on 1,024 ranks have 0.4 GB.
"""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, product
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from torchlift._checkpoint.checkpoint import MappedViews
from torchlift._model.dtensor import (
    Spans,
    is_dtensor,
    local_tensor,
    placed,
    shard_spans,
    spans_of,
    spread_of,
)
from torchlift._model.holders import find_buffers
from torchlift._model.ranks import Exchange, RankGroup, StepResult, rank, ranks_of
from torchlift._model.torch_private import shard_order
from torchlift._save.blocks import Workspace
from torchlift._save.files import (
    Files,
    Objects,
    new_files,
    remove_files,
    require_sizes,
    write_errors,
    write_own_files,
)
from torchlift._save.layouts import Box, Output, Written, end_of, name_of_rank
from torchlift._save.pickling import Rebuilt
from torchlift._save.replicas import (
    TAKE_FIRST,
    Checksum,
    checksum_of,
    difference_error,
    find_differences,
)
from torchlift._save.values import (
    State,
    Value,
    explain_untied,
    find_untied_keys,
    stored_as,
    ties_of,
)
from torchlift._store.files import FileStamp
from torchlift._system.interrupts import Running, deliver_interrupt
from torchlift._system.text import progress_bar
from torchlift._transfer.write import SetKind
from torchlift.errors import PlacementError
from torchlift.formats.boxes import row_major
from torchlift.formats.index import Chunk, Index, Leaf, Storage, TensorEntry
from torchlift.formats.layout import Stored
from torchlift.formats.runs import MAGIC

#: Fields of a `State` that are dicts, of which several ranks may have items.
_BY_KEY = (
    "tensors", "objects", "paths", "containers", "lost", "made_of_others", "parts", "versions",
)  # fmt: skip

T = TypeVar("T")
M = TypeVar("M")
Held = TypeVar("Held", bound=Hashable)


class Spread(NamedTuple):
    """How a DTensor is divided among ranks.

    Attributes:
        mesh: position of its mesh among the meshes of the rank that describes it.
        sizes: of the mesh.
        placements: torch's, one for each dimension of the mesh.
        order: see `shard_spans`.
    """

    mesh: int
    sizes: tuple[int, ...]
    placements: tuple[Any, ...]
    order: tuple[tuple[int, ...], ...]


class Described(NamedTuple):
    """A tensor as all ranks know it.

    Attributes:
        stored: the complete tensor in a file.
        kind: text for errors. It is equal on all ranks that hold the tensor.
        spread: how it is divided. None: each rank has all of it.
    """

    stored: Stored
    kind: str
    spread: Spread | None


class Structure(NamedTuple):
    """What a rank holds, without the values of tensors.

    Attributes:
        state: its tensors are `Described`.
        same: key -> an earlier key of the same tensor here.
        buffers: keys of buffers of a live module.
    """

    state: State
    same: dict[str, str]
    buffers: list[str]


class Message(NamedTuple):
    """The message of a rank about its state.

    Attributes:
        arguments: those that must be equal on all ranks.
        digest: of its `Structure`, without the values of plain data.
        meshes: the ranks of each of its meshes.
        own: The part that no other rank holds. See `LocalState.of`.
    """

    arguments: Mapping[str, object]
    digest: bytes
    meshes: tuple[Sequence[int], ...]
    own: State


class _Group(NamedTuple):
    """Ranks that hold tensors of equal keys and layouts.

    Attributes:
        structure: of each of them.
        meshes: the ranks of each of their meshes.
        ranks: their numbers, in order.
    """

    structure: Structure
    meshes: tuple[Sequence[int], ...]
    ranks: tuple[int, ...]


Place = tuple[tuple[int, ...], tuple[int, ...]]
#: Ranks by the first index and the sizes of a box.
Holders = Mapping[Place, Sequence[int]]


@dataclass(frozen=True, slots=True)
class LocalState:
    """The state of this rank.

    Attributes:
        state: that was taken apart.
        structure: of the state, for other ranks.
        meshes: the ranks of each of its meshes.
        values: Box of a tensor -> its values.
        own: The part that no other rank holds. The structure lacks it.
    """

    state: State
    structure: Structure
    meshes: tuple[Sequence[int], ...]
    values: Mapping[Box, torch.Tensor]
    own: State

    @classmethod
    def of(cls, state: State, *, compare: bool, sends_objects: bool, prefix: str) -> LocalState:
        """Describe a state that was taken apart.

        Args:
            state: The state of this rank.
            compare: Whether values that several ranks hold must be equal, except for buffers.
            sends_objects: Whether the first rank needs plain data of others.
            prefix: The name of a Keeper's item. This rank alone has it, and the names below it.
                In the structure they would differ, and each rank would send its own to all.

        Raises:
            PlacementError: If a tensor is not stored as a dense tensor, or holds partial sums.
        """
        local, meshes = state.tensors, dict[Any, Sequence[int]]()
        tensors = {key: _describe(key, tensor, meshes) for key, tensor in local.items()}
        plain = [Value.of_tensor(key, local_tensor(each)) for key, each in local.items()]
        # Statistics that each rank has of its own data: the first rank's count, as in torch.
        others = {key: each for key, each in local.items() if compare and not is_dtensor(each)}
        buffers = sorted(find_buffers(others)) if others else []
        lost = {**state.lost, **explain_untied(find_untied_keys(plain, None))}
        objects = state.objects
        if not sends_objects:  # an empty dict may be nothing, see `_merge_states`
            objects = {key: {} if _is_empty(each) else None for key, each in objects.items()}
        described = replace(state, tensors=tensors, objects=objects, lost=lost, metadata={})
        # Of a Keeper alone: a module may have such a name, too.
        is_item = prefix in local and _is_item(local[prefix])
        common, own = _split(described, prefix) if is_item else _Parts(described, State({}))
        same = {k: v for k, v in _find_same(local, plain).items() if k not in own.tensors}
        values = {box: part for key in local for box, part in _boxes_of(key, local[key])}
        return cls(state, Structure(common, same, buffers), (*meshes.values(),), values, own)

    def message(self, arguments: Mapping[str, object]) -> Message:
        """Return the message to other ranks."""
        state, same, buffers = self.structure
        facts = replace(state, objects=dict.fromkeys(state.objects)), same, buffers
        digest = hashlib.sha256(pickle.dumps(facts)).digest()
        return Message(arguments, digest, self.meshes, self.own)


@dataclass(frozen=True, slots=True)
class SharedState:
    """The state of all ranks together, and what this rank holds of it.

    Attributes:
        state: the containers. Its tensors are `Described`.
        tied: key -> the first key of the same tensor.
        buffers: keys of buffers of a live module. They may differ between ranks.
        holders: key -> the ranks that hold each box.
        values: box of this rank -> its values.
        objects: key -> plain data that this rank writes.
    """

    state: State
    tied: Mapping[str, str]
    buffers: set[str]
    holders: Mapping[str, Holders]
    values: Mapping[Box, torch.Tensor]
    objects: Mapping[str, object]

    @property
    def stored(self) -> dict[str, Stored]:
        """Return key -> the complete tensor."""
        return {key: each.stored for key, each in self.state.tensors.items()}

    def own_values(
        self, who: int, *, compare: bool, skipped: Container[str]
    ) -> Iterator[tuple[Box, Value]]:
        """Yield what a rank writes: each box is written by one of its holders.

        Args:
            who: this rank.
            compare: whether all holders must have the same values. If not, the first one writes.
            skipped: keys that no rank writes.
        """
        turns = {key: turn for turn, key in enumerate(self.state.tensors)}
        for box, values in self.values.items():
            holders = self.holders[box.key][box.start, box.shape]
            # In turn: else the first rank would write all replicas.
            turn = turns[box.key] if compare and box.key not in self.buffers else 0
            if box.key not in skipped and holders[turn % len(holders)] == who:
                yield box, Value.of_tensor(box.key, values)

    def sum_up(self) -> dict[Box, Checksum]:
        """Return the checksums of values that several ranks hold and that must be equal."""
        work = Workspace()
        return {
            box: checksum_of(values, work)
            for box, values in self.values.items()
            if len(self.holders[box.key][box.start, box.shape]) > 1
            and box.key not in self.buffers
            and box.key not in self.tied
        }


class SavingRanks:
    """The ranks that save a checkpoint together, or one process alone.

    Attributes:
        group: How they exchange messages. It is empty for one process alone.
        rank: number of this one.
        ranks: all numbers.
        leader: the first rank. It creates the files and makes them appear.
    """

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.rank = rank()
        self.ranks = ranks_of(group.groups[0]) if group.groups else [self.rank]
        self.leader = self.ranks[0]

    @property
    def leads(self) -> bool:
        """Return whether this is the first rank."""
        return self.rank == self.leader

    @property
    def number(self) -> int:
        """Return the number of this rank among those that save."""
        return self.ranks.index(self.rank)

    def run(
        self,
        path: str,
        step: Callable[[], tuple[T, M]],
        validate: Callable[[dict[int, M]], None] = lambda _: None,
    ) -> Exchange[T, M]:
        """Run a step that touches files on all ranks. An error of the system names `path`.

        The steps of a caller's objects do not run here: a lost connection of theirs is not an error
        of the file.
        """

        def guarded() -> tuple[T, M]:
            with write_errors(path):
                return step()

        return self.group.run(guarded, validate)


def share_state(
    ranks: SavingRanks, local: LocalState, messages: Mapping[int, Message]
) -> SharedState:
    """Return the state of all ranks together. Ranks may have keys of their own.

    Of plain data the first rank that has the key counts, of metadata the first rank.

    Args:
        ranks: those that save.
        local: the state of this rank.
        messages: of all ranks about their states.

    Raises:
        PlacementError: If two ranks hold different things under one key, or their arguments differ.
    """
    # All ranks know the same, so all of them raise.
    require_alike({who: each.arguments for who, each in messages.items()})
    state = local.structure.state
    alike = find_holders({who: [each.digest] for who, each in messages.items()})
    structures = dict.fromkeys(alike, local.structure)
    if len(alike) > 1:
        is_first = ranks.rank in (who[0] for who in alike.values())
        sent = ranks.group.run(lambda: StepResult(None, local.structure if is_first else None))
        for digest, who in alike.items():
            structures[digest] = sent.by_rank[who[0]] or local.structure
        _require_same_kinds({who[0]: structures[each].state for each, who in alike.items()})
        state = _merge_states([each.state for each in structures.values()])
    groups = [
        _Group(structures[digest], meshes, (*who,))
        for (digest, meshes), who in find_holders(
            {who: [(each.digest, each.meshes)] for who, each in messages.items()}
        ).items()
    ]
    holders = {key: _holders_of(key, groups) for key in state.tensors}
    owns = {who: each.own for who, each in messages.items() if each.own.tensors}
    for number, own in owns.items():
        alone = _Group(Structure(own, {}, []), (), (number,))
        for key in own.tensors:
            if key in state.tensors:
                raise PlacementError(
                    "this name is of one rank alone, and other ranks have it, too",
                    entry=key,
                    found=f"it is of rank {number}",
                    hint="Give what several ranks hold another name.",
                )
            holders[key] = _holders_of(key, [alone])
    if owns:
        state = _merge_states([state, _merge_states([*owns.values()])])
    _require_complete(state, holders)
    writers = dict[str, int]()
    for each in reversed(groups):
        writers |= dict.fromkeys(each.structure.state.objects, each.ranks[0])
    return SharedState(
        replace(state, metadata=local.state.metadata),
        _find_ties(groups, holders),
        {key for each in structures.values() for key in each.buffers},
        holders,
        local.values,
        {key: local.state.objects[key] for key in state.objects if writers[key] == ranks.rank},
    )


def _describe(key: str, tensor: torch.Tensor, meshes: dict[Any, Sequence[int]]) -> Described:
    """Describe a tensor for other ranks, and add its mesh to `meshes`.

    Raises:
        PlacementError: If it is not stored as a dense tensor.
    """
    stored, kind, spread = stored_as(key, tensor), "a plain tensor", None
    if is_dtensor(tensor):
        mesh, sizes = tensor.device_mesh, tuple(tensor.device_mesh.shape)
        if mesh not in meshes:
            members = mesh.mesh.flatten().tolist()
            line = range(members[0], members[0] + len(members))
            meshes[mesh] = line if members == [*line] else (*members,)  # a range is short
        kind = f"a DTensor, {placed(tensor)} over {'x'.join(map(str, sizes))} ranks"
        number = [*meshes].index(mesh)
        spread = Spread(number, sizes, tuple(tensor.placements), shard_order(tensor))
    return Described(stored, f"{kind}, {stored.dtype} {list(stored.shape)}", spread)


def _holders_of(key: str, groups: Iterable[_Group]) -> Holders:
    """Return the ranks that hold each box of a tensor."""
    found = [(each, each.structure.state.tensors.get(key)) for each in groups]
    tensors = [(each, tensor) for each, tensor in found if tensor is not None]
    return _find_boxes(
        tensors[0][1].stored.shape,
        tuple(
            (tensor.spread, each.meshes[tensor.spread.mesh] if tensor.spread else (), each.ranks)
            for each, tensor in tensors
        ),
    )


@lru_cache(maxsize=1024)  # a model has many tensors, but few shapes
def _find_boxes(
    shape: tuple[int, ...],
    parts: tuple[tuple[Spread | None, Sequence[int], tuple[int, ...]], ...],
) -> Holders:
    """Return the ranks that hold each box of a tensor of this shape.

    Args:
        shape: of the complete tensor.
        parts: how it is divided, the ranks of that mesh, and those that save.
    """
    holders: dict[Place, list[int]] = {}
    for spread, mesh, ranks in parts:
        if spread is None:
            holders.setdefault(((0,) * len(shape), shape), []).extend(ranks)
            continue
        saving = {*ranks}
        for who, at in zip(mesh, product(*map(range, spread.sizes)), strict=True):
            spans = shard_spans(shape, spread.sizes, spread.placements, at, spread.order)
            for place in _places_of(shape, spans) if who in saving else ():
                holders.setdefault(place, []).append(who)
    return {place: sorted(who) for place, who in holders.items()}


def _places_of(shape: tuple[int, ...], spans: Spans) -> Iterator[Place]:
    """Yield the first index and the sizes of each box with values, in order."""
    if 0 in shape:  # one box, on all ranks, says that there are no values
        yield (0,) * len(shape), shape
        return
    for box in product(*spans):
        sizes = tuple(stop - start for start, stop in box)
        if 0 not in sizes:
            yield tuple(start for start, _ in box), sizes


def _boxes_of(key: str, tensor: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield the boxes of a tensor that this rank holds, with their values.

    Raises:
        PlacementError: If it is a DTensor that holds partial sums.
    """
    if is_dtensor(tensor) and tensor.device_mesh.get_coordinate() is None:
        return
    spans, values = spans_of(tensor, key), local_tensor(tensor).detach()
    if not tensor.numel():  # one box, on all ranks, says that there are no values
        none = torch.empty(tensor.shape, dtype=values.dtype, device="cpu")
        yield Box(key, (0,) * tensor.dim(), tuple(tensor.shape)), none
        return
    ends = [[*accumulate((b - a for a, b in dim), initial=0)] for dim in spans]
    for box in product(*map(enumerate, spans)):
        local_box = (slice(e[n], e[n + 1]) for e, (n, _) in zip(ends, box, strict=True))
        inside = values[tuple(local_box)]
        if inside.numel():
            yield Box(key, tuple(first for _, (first, _) in box), tuple(inside.shape)), inside


def find_holders(by_rank: Mapping[int, Iterable[Held]]) -> dict[Held, list[int]]:
    """Return which ranks hold each of what the ranks hold, in the order of ranks."""
    holders: dict[Held, list[int]] = {}
    for who, held in by_rank.items():
        for each in held:
            holders.setdefault(each, []).append(who)
    return holders


def _require_complete(state: State, holders: Mapping[str, Holders]) -> None:
    """Refuse tensors with values that are in no box of a rank, or in two different boxes.

    Raises:
        PlacementError: If there is one.
    """
    for key, described in state.tensors.items():
        expected = math.prod(described.stored.shape)
        found = sum(math.prod(sizes) for _, sizes in holders[key])
        if found != expected:
            raise PlacementError(
                "no rank that saves holds some of its values, or ranks divide it in unlike ways",
                entry=key,
                expected=f"{expected} values",
                found=f"{found} values",
                hint="Call it on all ranks that hold tensors, or pass their process_group=.",
            )


# ---- write together


class Saved(NamedTuple, Generic[T]):
    """The end of a save.

    Attributes:
        result: of the function that finished it on the first rank.
        nbytes: of tensors that this rank wrote.
    """

    result: T
    nbytes: int


class _Created(NamedTuple):
    """The files of this rank, and of all ranks.

    Attributes:
        output: what this rank writes.
        files: those of all ranks. None on all ranks but the first.
    """

    output: Output
    files: Files | Objects | None


def write_together(
    ranks: SavingRanks,
    head: str,
    kind: SetKind | None,
    lay_out: Callable[[], Output],
    finish: Callable[[Output, Files | Objects, Sequence[Written]], T],
    add_up: Callable[[], dict[Box, Checksum]] = dict,
    *,
    progress: bool,
) -> Saved[T]:
    """Write the files of this rank. When all ranks have done so, the first one finishes.

    Args:
        ranks: those that save.
        head: path of the only file, or of the file that lists the others.
        kind: of the set of files, or None.
        lay_out: returns what this rank writes: on a mesh, one file with the rank's number.
        finish: called on the first rank with its output, the files of all ranks, and what is in
            them. Files that it does not commit are removed.
        add_up: returns the checksums of what other ranks hold, too.
        progress: whether to show a bar of the bytes that the first rank writes.

    Raises:
        CheckpointError: If a rank fails or dies. The old checkpoint is unchanged, unless the
            message says that the new one is in place.
    """
    running = Running(sys._getframe(1))
    created: Mapping[str, str] | None = None
    with ExitStack() as stack:

        def create() -> StepResult[_Created, Mapping[str, str] | None]:
            output = lay_out()
            deliver_interrupt()  # here, where the other ranks learn of it
            if not ranks.leads:
                return StepResult(_Created(output, None), None)
            own = [*output.files]
            names = own if len(ranks.ranks) == 1 else map(name_of_rank, range(len(ranks.ranks)))
            made = new_files(head, [*names], kind, running)
            stack.callback(made.close)
            made.create()
            return StepResult(_Created(output, made), made.temporary)

        def write() -> StepResult[Written, None]:
            assert created is not None
            objects = files if isinstance(files, Objects) else None
            shown = progress_bar(progress and ranks.leads, output.nbytes, "save")
            with shown as advance:
                write_own_files(head, kind, created, output.files, advance, objects)
            sizes = [end_of(sections) for sections in output.files.values()]
            return StepResult(Written(sizes, output.items, add_up()), None)

        def end() -> StepResult[None, T | PlacementError | None]:
            # Only to the first rank: the items of all ranks are many.
            written = ranks.group.gather(own)
            if files is None:
                return StepResult(None, None)
            sums = (each.checksums for each in written)
            if unlike := find_unequal(dict(zip(ranks.ranks, sums, strict=True)), head):
                return StepResult(None, unlike)  # raised here, it would be an error of this rank
            return StepResult(None, finish(output, files, written))

        try:
            (output, files), by_rank = ranks.run(head, create)
            created = by_rank[ranks.leader]
            own = ranks.run(head, write).value
            result = ranks.run(head, end).by_rank[ranks.leader]
            if isinstance(result, PlacementError):
                raise result
        except BaseException:
            if created is not None:  # the first rank may be the one that died
                remove_files(head, created.values(), kind)
            raise
    assert result is not None
    return Saved(result, output.nbytes)


def commit(output: Output, files: Files | Objects, written: Sequence[Written]) -> list[str]:
    """Make the files of all ranks appear. Return their paths."""
    content = None if output.content is None else output.content(files.names, written)
    return files.commit([size for each in written for size in each.sizes], content)


def find_unequal(by_rank: Mapping[int, Mapping[Box, Checksum]], path: str) -> PlacementError | None:
    """Return the error for values that differ between ranks, or None."""
    found = find_differences(by_rank)
    if not found:
        return None
    return difference_error({box.key: each for box, each in found.items()}, TAKE_FIRST, path)


def read_parts(
    shared: SharedState, path: str, temporary: Iterable[str], written: Sequence[Written]
) -> MappedViews:
    """Return the tensors that are in the temporary files of all ranks.

    Args:
        shared: what all ranks save.
        path: of the file that the first rank makes of them.
        temporary: names of the files, in the order of ranks.
        written: what is in them.

    Raises:
        PlacementError: If a file is not complete on this machine.
    """
    folder, stamps = os.path.dirname(os.path.realpath(path)), dict[str, FileStamp]()
    chunks: dict[str, list[Chunk]] = {key: [] for key in shared.stored}
    for name, each in zip(temporary, written, strict=True):
        # A network file system can show a file before all of its bytes.
        require_sizes(folder, {name: each.sizes[0]})
        file = os.path.join(folder, name)
        stamps[file] = FileStamp.of(file)
        for item in each.items:
            nbytes = Stored("", shared.stored[item.key].dtype, item.shape).nbytes
            if item.start is not None and nbytes:
                place = item.payload, nbytes, item.start, item.shape
                chunks[item.key].append(Chunk(file, *place))
    entries = {}
    for key, stored in shared.stored.items():
        kept = shared.tied.get(key, key)
        entries[key] = TensorEntry(
            key, stored.dtype, stored.shape, row_major(stored.shape), stored.nbytes, "cpu", kept,
            tuple(chunks[kept]),
        )  # fmt: skip
    return MappedViews(Index(path, "dcp", entries, dict[str, Storage](), stamps))


# ---- what all ranks have


def require_alike(by_rank: Mapping[int, Mapping[str, object]]) -> None:
    """Refuse ranks whose arguments differ.

    Raises:
        PlacementError: If some do.
    """
    first, expected = next(iter(by_rank.items()))
    for who, each in by_rank.items():
        for name, value in each.items():
            if value != expected[name]:
                raise PlacementError(
                    f"the ranks do not save with the same {name}=",
                    expected=f"{expected[name]!r}, as on rank {first}",
                    found=f"{value!r} on rank {who}",
                )


def _require_same_kinds(by_rank: Mapping[int, State]) -> None:
    """Refuse ranks that have different things under one key.

    Raises:
        PlacementError: If two of them do.
    """
    kinds: dict[str, tuple[int, str]] = {}
    for who, each in by_rank.items():
        found = dict.fromkeys(each.objects, "plain data")
        found |= {key: described.kind for key, described in each.tensors.items()}
        for key, kind in found.items():
            if len(each.paths[key]) > 1:
                kind += f" in {len(each.paths[key]) - 1} containers"
            other, expected = kinds.setdefault(key, (who, kind))
            if kind != expected:
                raise PlacementError(
                    "the ranks do not hold the same under one name",
                    entry=key,
                    expected=f"{expected}, as on rank {other}",
                    found=f"rank {who} differs from rank {other}: {kind}",
                    hint="Give shards as DTensors, and what is not the same another name.",
                )


def _find_same(local: Mapping[str, torch.Tensor], values: Iterable[Value]) -> dict[str, str]:
    """Return key -> an earlier key of the same tensor here.

    Args:
        local: key -> tensor.
        values: what this rank holds of these tensors.
    """

    def with_spread(value: Value) -> Value:
        tensor = local[value.key]
        return replace(value, memory=(value.memory, tensor.shape, spread_of(tensor)))

    return ties_of(map(with_spread, values))


def _find_ties(groups: Sequence[_Group], holders: Mapping[str, Holders]) -> dict[str, str]:
    """Return key -> the first key that is the same tensor on every rank that holds some of it.

    A rank sees by their memory that two keys are one tensor, but only if it holds values.
    """
    tied = {}
    for key in dict.fromkeys(key for each in groups for key in each.structure.same):
        held = {who for ranks in holders[key].values() for who in ranks}
        seen = {each.structure.same.get(key) for each in groups if not held.isdisjoint(each.ranks)}
        if len(seen) == 1 and None not in seen:
            tied[key] = str(*seen)
    return tied


class _Parts(NamedTuple):
    """A state in two parts.

    Attributes:
        common: what other ranks may hold, too.
        own: what this rank alone holds.
    """

    common: State
    own: State


def _split(state: State, prefix: str) -> _Parts:
    """Split off the tensors at the top that have this name, or one below it."""
    own = {key for key in state.tensors if f"{key}.".startswith(f"{prefix}.")}
    return _Parts(_keep(state, lambda key: key not in own), _keep(state, own.__contains__))


def _is_item(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has the bytes of an item of a Keeper."""
    if is_dtensor(tensor) or tensor.dtype != torch.uint8 or tensor.dim() != 1:
        return False
    return bytes(tensor[: len(MAGIC)].tolist()) == MAGIC


def _keep(state: State, is_kept: Callable[[str], bool]) -> State:
    """Return a state with some of its keys at the top."""
    made = replace(state, template={n: each for n, each in state.template.items() if is_kept(n)})
    for field in _BY_KEY:
        kept = {key: each for key, each in getattr(state, field).items() if is_kept(key)}
        setattr(made, field, kept)
    return made


def _is_empty(value: object) -> bool:
    return isinstance(value, dict) and not value


def _merge_states(states: Sequence[State]) -> State:
    """Return the states of several ranks as one. The first rank that has a key counts.

    Raises:
        PlacementError: If their containers differ in kind.
    """
    paths = {path for each in states for path in each.paths.values()}
    dicts = {path[:at] for path in paths for at, name in enumerate(path) if isinstance(name, str)}
    # An empty dict is one value. It is nothing here if another rank has items of it, as for a stage
    # of a pipeline without optimizer state.
    empty = {
        key
        for each in states
        for key, value in each.objects.items()
        if _is_empty(value) and each.paths[key] in dicts
    }
    template = _merge_templates([each.template for each in states], "", empty)
    made = State(template, metadata=states[0].metadata)
    for each in states:
        # In the order of the ranks, and with the value of the first.
        for name in _BY_KEY:
            known_items = getattr(made, name)
            for key, item in getattr(each, name).items():
                known_items.setdefault(key, item)
    for key in empty:
        del made.objects[key], made.paths[key]
    return made


def _merge_templates(templates: Sequence[Any], key: str, empty: Container[str]) -> Any:
    templates = [each for each in templates if not isinstance(each, Leaf) or each.key not in empty]
    first = templates[0]
    if all(isinstance(each, dict) for each in templates):
        ordered = [each for each in templates if isinstance(each, OrderedDict)]
        made: Any = type((ordered or templates)[0])()
        names = dict.fromkeys(name for each in templates for name in each)
        for name in names:
            inner = [each[name] for each in templates if name in each]
            made[name] = _merge_templates(inner, f"{key}.{name}".removeprefix("."), empty)
        notes: OrderedDict[str, Any] = OrderedDict()
        for each in ordered:
            for name, note in getattr(each, "_metadata", {}).items():
                notes.setdefault(name, note)
        if any(hasattr(each, "_metadata") for each in ordered):
            made._metadata = notes
        return made
    alike = len({type(each) for each in templates}) == 1
    if alike and isinstance(first, (Leaf, Rebuilt)):
        return first
    if alike and len({len(each) for each in templates}) == 1:
        rows = zip(*templates, strict=True)
        return type(first)(
            _merge_templates(row, f"{key}.{at}", empty) for at, row in enumerate(rows)
        )
    raise PlacementError(
        "the ranks do not hold the same containers under one name",
        entry=key or None,
        hint="Give what is not the same another name.",
    )

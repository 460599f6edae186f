"""Save from a mesh: each rank writes its own files, and all ranks end the same way."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, product
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch

from torchlift._checkpoint.checkpoint import MappedViews, dtype_of
from torchlift._model.dtensor import (
    everything,
    first_rank,
    is_dtensor,
    local_tensor,
    spans_of,
    spread_of,
)
from torchlift._model.holders import find_buffers
from torchlift._model.ranks import Exchange, RankGroup, StepResult, rank, ranks_of
from torchlift._save.files import (
    Advance,
    Files,
    Objects,
    new_files,
    remove_files,
    require_sizes,
    write_errors,
    write_own_files,
)
from torchlift._save.layouts import (
    Box,
    Item,
    Output,
    OwnFile,
    Section,
    add_objects,
    require_complete,
)
from torchlift._save.pickling import Rebuilt
from torchlift._save.replicas import (
    TAKE_FIRST,
    Checksum,
    HeldPart,
    checksums_of,
    difference_error,
    find_differences,
)
from torchlift._save.target import Target
from torchlift._save.values import State, Value, explain_untied, find_untied_keys, stored_as
from torchlift._store.files import FileStamp
from torchlift._system.interrupts import Running, deliver_interrupt
from torchlift.errors import PlacementError
from torchlift.formats.boxes import row_major
from torchlift.formats.index import Chunk, Index, Leaf, Storage, TensorEntry
from torchlift.formats.layout import Stored

#: Fields of a `State` that are dicts, of which several ranks may have items.
_BY_KEY = ("objects", "paths", "containers", "lost", "made_of_others", "parts", "versions")

T = TypeVar("T")
M = TypeVar("M")


class Described(NamedTuple):
    """A tensor as all ranks know it.

    Attributes:
        stored: the complete tensor in a file.
        first: the first rank of its mesh; None for a plain tensor.
        kind: what it is, and how a DTensor is laid out.
    """

    stored: Stored
    first: int | None
    kind: str


class _Summary(NamedTuple):
    """The message of a rank about its state.

    Attributes:
        arguments: those that must be equal on all ranks.
        digest: of its state without the values of tensors.
        same: see `_find_same`.
        buffers: keys of buffers of a live module.
    """

    arguments: Mapping[str, object]
    digest: bytes
    same: dict[str, str | None]
    buffers: set[str]


@dataclass(frozen=True, slots=True)
class SharedState:
    """The state of all ranks together. All but `lost` is the same on each of them.

    Attributes:
        state: the containers. Its tensors are `Described`.
        tied: key -> the first key of the same tensor.
        buffers: keys of buffers of a live module. They may differ between ranks.
        holders: key -> the ranks that have it; empty if all ranks have all keys.
        several: keys of DTensors that are on several meshes side by side.
        lost: key of this rank -> what the files do not keep of its tensor.
    """

    state: State
    tied: Mapping[str, str] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    holders: Mapping[str, list[int]] = field(default_factory=dict)
    several: set[str] = field(default_factory=set)
    lost: Mapping[str, str] = field(default_factory=dict)

    @property
    def stored(self) -> dict[str, Stored]:
        """Return key -> the complete tensor."""
        return {key: each.stored for key, each in self.state.tensors.items()}


class SavingRanks:
    """The ranks that save a checkpoint together, or one process alone.

    Attributes:
        group: how they exchange messages.
        rank: number of this one.
        ranks: all numbers.
        leader: the first rank. It creates the files and makes them appear.
    """

    def __init__(self, process_group: Any = None, *, alone: bool = False) -> None:
        self.group = RankGroup([]) if alone else RankGroup.of_all(process_group=process_group)
        self.rank = rank()
        self.ranks = [self.rank] if alone else ranks_of(process_group)
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
    ranks: SavingRanks, state: State, compared: Mapping[str, object], *, compare: bool
) -> SharedState:
    """Tell the other ranks what this rank saves. Ranks may have keys of their own.

    Of plain data the first rank that has the key counts, of metadata the first rank.

    Args:
        ranks: those that save.
        state: of this rank.
        compared: arguments that must be equal on all ranks.
        compare: whether values that several ranks hold must be equal, except for buffers.

    Raises:
        PlacementError: If two ranks hold different things under one key, or their arguments differ.
    """
    local = state.tensors

    def describe() -> StepResult[State, _Summary]:
        tensors = {key: _describe(key, tensor) for key, tensor in local.items()}
        own = replace(state, tensors=tensors, metadata=dict(state.metadata))
        digest = hashlib.sha256(pickle.dumps(own)).digest()
        # Statistics that each rank has of its own data: the first rank's count, as in torch.
        plain = {key: each for key, each in local.items() if compare and not is_dtensor(each)}
        buffers = find_buffers(plain) if plain else set()
        return StepResult(own, _Summary(compared, digest, _find_same(local), buffers))

    own, by_rank = ranks.group.run(describe)
    # All ranks know the same, so all of them raise.
    require_alike({who: each.arguments for who, each in by_rank.items()})
    holders, several = dict[str, list[int]](), set[str]()
    if len({each.digest for each in by_rank.values()}) > 1:
        states = ranks.group.run(lambda: StepResult(None, own)).by_rank
        holders, own = _find_holders(states), _merge_states([*states.values()])
        for key, who in holders.items():
            if len({states[each].tensors[key].first for each in who}) > 1:
                several.add(key)
    tied = _find_ties(own, {who: each.same for who, each in by_rank.items()}, holders)
    buffers = set[str]().union(*(each.buffers for each in by_rank.values()))
    values = [Value.of_tensor(key, local_tensor(tensor)) for key, tensor in local.items()]
    lost = explain_untied(find_untied_keys(values, None))
    return SharedState(own, tied, buffers, holders, several, lost)


def _describe(key: str, tensor: torch.Tensor) -> Described:
    """Describe a tensor for other ranks.

    Raises:
        PlacementError: If it is not stored as a dense tensor.
    """
    stored, kind = stored_as(key, tensor), "a plain tensor"
    if is_dtensor(tensor):
        kind = f"a DTensor, {list(tensor.placements)} over {tensor.device_mesh.size()} ranks"
    kind += f", {stored.dtype} {list(stored.shape)}"
    return Described(stored, first_rank(tensor), kind)


def find_own_boxes(
    ranks: SavingRanks,
    shared: SharedState,
    local: Mapping[str, torch.Tensor],
    *,
    compare: bool,
    skipped: Container[str],
) -> Iterator[Box]:
    """Yield what this rank writes.

    Args:
        ranks: those that save.
        shared: what all ranks save.
        local: the tensors of this rank.
        compare: whether values that several ranks hold must be equal; else the first rank's count.
        skipped: keys that no rank writes.

    Raises:
        PlacementError: If a tensor holds partial sums.
    """
    for turn, (key, described) in enumerate(shared.state.tensors.items()):
        if key not in local or key in skipped:
            continue
        tensor, part, number, copies = local[key], 0, 0, 1
        if not is_dtensor(tensor):
            holders = shared.holders.get(key, ranks.ranks)
            spans, number = everything(tensor.shape), holders.index(ranks.rank)
            copies = len(holders)
        else:
            mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
            if coordinate is None or described.first != first_rank(tensor):
                continue  # of several meshes side by side that hold the same, the first one writes
            spans = spans_of(tensor, key)
            for axis, placement in enumerate(tensor.placements):
                if placement.is_replicate():
                    number = number * mesh.size(axis) + coordinate[axis]
                    copies *= mesh.size(axis)
                else:
                    part = part * mesh.size(axis) + coordinate[axis]
        # In turn: else the first rank would write all replicas.
        if number != (turn % copies if compare and key not in shared.buffers else 0):
            continue
        values = local_tensor(tensor).detach()
        if not described.stored.nbytes and part == 0:  # one box says that there are no values
            none = torch.empty(described.stored.shape, dtype=values.dtype, device="cpu")
            yield Box((0,) * none.dim(), Value.of_tensor(key, none))
        ends = [[*accumulate((b - a for a, b in dim), initial=0)] for dim in spans]
        for box in product(*map(enumerate, spans)):
            local_box = (slice(e[n], e[n + 1]) for e, (n, _) in zip(ends, box, strict=True))
            inside = values[tuple(local_box)]
            if inside.numel():
                start = tuple(first for _, (first, _) in box)
                yield Box(start, Value.of_tensor(key, inside))


def sum_up_shared(
    ranks: SavingRanks, shared: SharedState, local: Mapping[str, torch.Tensor]
) -> dict[HeldPart, Checksum]:
    """Return the checksums of values that several ranks hold and that must be equal."""
    own = {
        key: tensor
        for key, tensor in local.items()
        if key not in shared.buffers
        and key not in shared.tied
        and len(shared.holders.get(key, ranks.ranks)) > 1
    }
    return checksums_of(own, shared.several)


# ---- the files of all ranks


class _LaidOut(NamedTuple):
    """The file of one rank, as all ranks know it.

    Attributes:
        name: of the file.
        nbytes: of the file.
        items: of the file.
    """

    name: str
    nbytes: int
    items: list[Item]


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of all ranks before they are written.

    Attributes:
        own: name -> sections, of the file of this rank.
        sizes: name of each file of all ranks -> its bytes.
        items: of the files of all ranks.
    """

    own: Mapping[str, Sequence[Section]]
    sizes: Mapping[str, int]
    items: Sequence[Item]


def lay_out_files(
    ranks: SavingRanks,
    shared: SharedState,
    local: Mapping[str, torch.Tensor],
    target: Target,
    *,
    checksum: bool,
    compare: bool,
) -> RankFiles:
    """Lay out the files of all ranks. Plain data is in a DCP folder only.

    Args:
        ranks: those that save.
        shared: what all ranks save.
        local: the tensors of this rank.
        target: the DCP folder, or the file that the first rank makes of these files.
        checksum: whether to record checksums.
        compare: whether values that several ranks hold must be equal; else the first rank's count.

    Raises:
        PlacementError: If no rank writes some values, or a tensor holds partial sums.
        CheckpointError: If the folder contains another checkpoint.
    """
    is_folder = target.format == "dcp"
    skipped = {} if is_folder else shared.tied  # of one tensor in a file the first key is written

    def lay_out() -> StepResult[OwnFile, _LaidOut]:
        if is_folder:
            target.require_free_place(target.head)
        made = OwnFile(ranks.number)
        for box in find_own_boxes(ranks, shared, local, compare=compare, skipped=skipped):
            made.add_box(box, checksum and is_folder)
        if ranks.leads and is_folder:
            add_objects(made, shared.state)
        deliver_interrupt()  # here, where the other ranks learn of it
        return StepResult(made, _LaidOut(made.name, made.nbytes, made.items))

    file, by_rank = ranks.run(target.head, lay_out)
    items = [item for each in by_rank.values() for item in each.items]
    require_complete({k: s for k, s in shared.stored.items() if k not in skipped}, items)
    sizes = {each.name: each.nbytes for each in by_rank.values()}
    return RankFiles({file.name: file.sections}, sizes, items)


def write_together(
    ranks: SavingRanks,
    output: Output,
    sizes: Mapping[str, int],
    advance: Advance,
    finish: Callable[[Files | Objects], T],
    add_up: Callable[[], dict[HeldPart, Checksum]] = dict,
) -> T:
    """Write the files of this rank. When all ranks have done so, the first one finishes.

    Args:
        ranks: those that save.
        output: what this rank writes.
        sizes: name of each file of all ranks -> its bytes.
        advance: called with a number of bytes as this rank reads them.
        finish: called on the first rank with the files of all ranks. Those that it does not commit
            are removed.
        add_up: returns the checksums of what other ranks hold, too.

    Returns:
        The result of `finish` on the first rank.

    Raises:
        CheckpointError: If a rank fails or dies. The old checkpoint is unchanged, unless the
            message says that the new one is in place.
    """
    head, kind, running = output.head, output.kind, Running(sys._getframe(1))
    created: Mapping[str, str] | None = None
    with ExitStack() as stack:

        def create() -> StepResult[Files | Objects | None, Mapping[str, str] | None]:
            if not ranks.leads:
                return StepResult(None, None)
            made = new_files(head, [*sizes], kind, running)
            stack.callback(made.close)
            made.create()
            return StepResult(made, made.temporary)

        def write() -> StepResult[None, dict[HeldPart, Checksum]]:
            assert created is not None
            objects = files if isinstance(files, Objects) else None
            write_own_files(head, kind, created, output.files, advance, objects)
            return StepResult(None, add_up())

        def end() -> StepResult[None, T | None]:
            return StepResult(None, None if files is None else finish(files))

        try:
            files, by_rank = ranks.run(head, create)
            created = by_rank[ranks.leader]
            ranks.run(head, write, partial(require_equal, path=head))
            result = ranks.run(head, end).by_rank[ranks.leader]
        except BaseException:
            if created is not None:  # the first rank may be the one that died
                remove_files(head, created.values(), kind)
            raise
    assert result is not None
    return result


def commit(output: Output, sizes: Mapping[str, int], files: Files | Objects) -> list[str]:
    """Make the files of all ranks appear. Return their paths."""
    content = None if output.content is None else output.content(files.names)
    return files.commit([*sizes.values()], content)


def require_equal(by_rank: Mapping[int, Mapping[HeldPart, Checksum]], path: str) -> None:
    """Refuse values that differ between ranks.

    Raises:
        PlacementError: If there are some.
    """
    wrong = {part.key: each for part, each in find_differences(by_rank).items()}
    if wrong:
        raise difference_error(wrong, TAKE_FIRST, path)


# ---- one file, or shards, which the first rank makes of the files of all ranks


def read_parts(
    shared: SharedState, files: RankFiles, path: str, temporary: Mapping[str, str]
) -> MappedViews:
    """Return the tensors that are in the temporary files of all ranks.

    Args:
        shared: what all ranks save.
        files: the temporary files as they were laid out.
        path: of the file that is saved.
        temporary: name of each file as it was laid out -> its name.

    Raises:
        PlacementError: If a file is not complete on this machine.
    """
    folder = os.path.dirname(os.path.realpath(path))
    # A network file system can show a file before all of its bytes.
    require_sizes(folder, {temporary[name]: size for name, size in files.sizes.items()})
    paths = {name: os.path.join(folder, each) for name, each in temporary.items()}
    chunks: dict[str, list[Chunk]] = {key: [] for key in shared.stored}
    for item in files.items:
        nbytes = Stored("", shared.stored[item.key].dtype, item.shape).nbytes
        if item.start is not None and nbytes:
            place = item.payload, nbytes, item.start, item.shape
            chunks[item.key].append(Chunk(paths[item.file], *place))
    entries = {}
    for key, stored in shared.stored.items():
        kept = shared.tied.get(key, key)
        entries[key] = TensorEntry(
            key, stored.dtype, stored.shape, row_major(stored.shape), stored.nbytes, "cpu", kept,
            tuple(chunks[kept]),
        )  # fmt: skip
    stamps = {file: FileStamp.of(file) for file in paths.values()}
    return MappedViews(Index(path, "dcp", entries, dict[str, Storage](), stamps))


def state_of(shared: SharedState, views: MappedViews) -> State:
    """Return a state whose values are in files."""
    becomes = partial(dtype_of, path=views.index.path)
    entries = views.index.entries
    values = [Value.of_entry(key, entry, views, becomes) for key, entry in entries.items()]
    return replace(shared.state, values=values)


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


def _find_holders(by_rank: Mapping[int, State]) -> dict[str, list[int]]:
    """Return key -> the ranks that have it.

    Raises:
        PlacementError: If two of them have different things under one key.
    """
    holders: dict[str, list[int]] = {}
    kinds: dict[str, tuple[int, str]] = {}
    for who, each in by_rank.items():
        found = dict.fromkeys(each.objects, "plain data")
        for key, described in each.tensors.items():
            found[key] = described.kind
            holders.setdefault(key, []).append(who)
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
    return holders


def _find_same(local: Mapping[str, torch.Tensor]) -> dict[str, str | None]:
    """Return key -> an earlier key of the same tensor here; None if this rank holds no values."""
    first: dict[object, str] = {}
    found: dict[str, str | None] = {}
    for key, tensor in local.items():
        values = local_tensor(tensor)
        if not values.numel():
            found[key] = None
            continue
        # A conjugate or negative view has the memory of its base, and other values.
        facts = (values.dtype, values.is_conj(), values.is_neg(), values.shape, values.stride())
        memory = (values.device, values.data_ptr(), *facts, tensor.shape, spread_of(tensor))
        if first.setdefault(memory, key) != key:
            found[key] = first[memory]
    return found


def _find_ties(
    state: State,
    by_rank: Mapping[int, Mapping[str, str | None]],
    holders: Mapping[str, Sequence[int]],
) -> dict[str, str]:
    """Return key -> the first key that is the same tensor on every rank that holds some of it.

    A rank sees by their memory that two keys are one tensor, but only if it holds values. All
    ranks draw the same conclusion from what all of them see.
    """
    first: dict[tuple[str | None, ...], str] = {}
    tied = {}
    for key in state.tensors:
        own = holders.get(key, by_rank)
        seen = tuple(same.get(key, key if who in own else None) for who, same in by_rank.items())
        has_values = any(each is not None for each in seen)
        if has_values and first.setdefault(seen, key) != key:
            tied[key] = first[seen]
    return tied


def _merge_states(states: Sequence[State]) -> State:
    """Return the states of several ranks as one. The first rank that has a key counts.

    Raises:
        PlacementError: If their containers differ in kind.
    """
    tensors: dict[str, Described] = {}
    template = _merge_templates([each.template for each in states], "")
    made = State(states[0].plain, template, tensors, metadata=states[0].metadata)
    for each in states:
        for key, described in each.tensors.items():
            known = tensors.setdefault(key, described)
            if known.first is not None and described.first is not None:
                tensors[key] = min(known, described, key=attrgetter("first"))
        # In the order of the ranks, and with the value of the first.
        for name in _BY_KEY:
            known_items = getattr(made, name)
            setattr(made, name, {**known_items, **getattr(each, name), **known_items})
    return made


def _merge_templates(templates: Sequence[Any], key: str) -> Any:
    first = templates[0]
    if all(isinstance(each, dict) for each in templates):
        ordered = [each for each in templates if isinstance(each, OrderedDict)]
        made: Any = type((ordered or templates)[0])()
        names = dict.fromkeys(name for each in templates for name in each)
        for name in names:
            inner = [each[name] for each in templates if name in each]
            made[name] = _merge_templates(inner, f"{key}.{name}".removeprefix("."))
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
        return type(first)(_merge_templates(row, f"{key}.{at}") for at, row in enumerate(rows))
    raise PlacementError(
        "the ranks do not hold the same containers under one name",
        entry=key or None,
        hint="Give what is not the same another name.",
    )

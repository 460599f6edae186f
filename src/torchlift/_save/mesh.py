"""Save from a mesh: each rank writes its own files, and all ranks end the same way."""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, product
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
from torchlift._save.blocks import Workspace
from torchlift._save.files import (
    Advance,
    CreatedFiles,
    Files,
    Objects,
    make_folders,
    new_files,
    remove_empty,
    remove_files,
    require_same_place,
    require_sizes,
    write_errors,
    write_file,
    write_own_files,
)
from torchlift._save.layouts import (
    Box,
    Item,
    Output,
    OwnFiles,
    add_objects,
    dcp_content,
    end_of,
    require_complete,
)
from torchlift._save.pickling import Rebuilt
from torchlift._save.replicas import (
    TAKE_FIRST,
    Checksum,
    HeldPart,
    checksum_of,
    difference_error,
    find_differences,
)
from torchlift._save.target import Target
from torchlift._save.values import State, Value, explain_untied, find_untied_keys, stored_as
from torchlift._store.files import FileStamp
from torchlift._store.places import is_url
from torchlift._system.interrupts import Running, deliver_interrupt
from torchlift._transfer.write import AtomicFile, remove_debris
from torchlift.errors import PlacementError
from torchlift.formats.boxes import row_major
from torchlift.formats.index import Chunk, Index, Leaf, Storage, TensorEntry
from torchlift.formats.layout import Stored

T = TypeVar("T")
M = TypeVar("M")


class Described(NamedTuple):
    """A tensor as all ranks know it.

    Attributes:
        stored: the complete tensor in a file.
        first: the first rank of its mesh; None for a plain tensor.
    """

    stored: Stored
    first: int | None


class _Own(NamedTuple):
    """The state of a rank, without the values of tensors.

    Attributes:
        state: its tensors are `Described`.
        metadata: text for the headers of safetensors.
    """

    state: State
    metadata: dict[str, str]


class _OwnTies(NamedTuple):
    """The tensors of a rank, by their memory.

    Attributes:
        same: see `_find_same`.
        buffers: keys of buffers of a live module.
    """

    same: array[int]
    buffers: set[str]


@dataclass(frozen=True, slots=True)
class SharedState:
    """The state of all ranks together. All but `lost` is the same on each of them.

    Attributes:
        state: the containers. Its tensors are `Described`.
        metadata: text for the headers of safetensors.
        tied: key -> the first key of the same tensor.
        buffers: keys of buffers of a live module. They may differ between ranks.
        holders: key -> the ranks that have it; empty if all ranks have all keys.
        lost: key of this rank -> what the files do not keep of its tensor.
    """

    state: State
    metadata: Mapping[str, str]
    tied: Mapping[str, str] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    holders: Mapping[str, list[int]] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)

    @property
    def stored(self) -> dict[str, Stored]:
        """Return key -> the complete tensor."""
        return {key: each.stored for key, each in self.state.tensors.items()}


@dataclass(frozen=True, slots=True)
class OwnParts:
    """The tensors that this rank holds and writes.

    Attributes:
        boxes: those that it writes.
        replicas: what other ranks hold, too, and must be equal.
    """

    boxes: list[Box]
    replicas: dict[HeldPart, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Return the bytes of tensors that this rank writes."""
        return sum(box.value.stored.nbytes for box in self.boxes)

    def checksums(self) -> dict[HeldPart, Checksum]:
        """Return the checksums of what other ranks hold, too."""
        work = Workspace()
        return {part: checksum_of(tensor, work) for part, tensor in self.replicas.items()}


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
    ranks: SavingRanks, state: State, metadata: Mapping[str, str], compared: Mapping[str, object]
) -> SharedState:
    """Tell the other ranks what this rank saves. Ranks may have keys of their own.

    Of plain data the first rank that has the key counts, of metadata the first rank.

    Args:
        ranks: those that save.
        state: of this rank.
        metadata: text for the headers of safetensors.
        compared: arguments that must be equal on all ranks.

    Raises:
        PlacementError: If two ranks hold different things under one key, or their arguments differ.
    """
    local = state.tensors
    kind = "torch-zip" if state.plain else "safetensors"

    def describe() -> StepResult[_Own, tuple[Mapping[str, object], bytes]]:
        tensors = {
            key: Described(stored_as(key, tensor, kind), first_rank(tensor))
            for key, tensor in local.items()
        }
        own = _Own(replace(state, tensors=tensors, values=()), dict(metadata))
        digest = hashlib.sha256(pickle.dumps(own)).digest()
        return StepResult(own, (compared, digest))

    own, by_rank = ranks.group.run(describe)
    # All ranks know the same, so all of them raise.
    require_alike({who: arguments for who, (arguments, _) in by_rank.items()})
    holders: dict[str, list[int]] = {}
    if len({digest for _, digest in by_rank.values()}) > 1:
        each_own = ranks.group.run(lambda: StepResult(None, own)).by_rank
        states = {who: each.state for who, each in each_own.items()}
        holders = _find_holders(states)
        own = _Own(_merge_states([*states.values()]), each_own[ranks.leader].metadata)

    def find_ties() -> StepResult[dict[str, str], _OwnTies]:
        values = [Value.of_tensor(key, local_tensor(tensor), kind) for key, tensor in local.items()]
        plain = {key: tensor for key, tensor in local.items() if not is_dtensor(tensor)}
        ties = _OwnTies(_find_same(own.state, local), find_buffers(plain))
        return StepResult(explain_untied(find_untied_keys(values, None)), ties)

    lost, ties = ranks.group.run(find_ties)
    tied = _find_ties(own.state, [each.same for each in ties.values()])
    # Statistics that each rank has of its own data: the first rank's count, as in torch.
    buffers = set[str]().union(*(each.buffers for each in ties.values()))
    return SharedState(own.state, own.metadata, tied, buffers, holders, lost)


def find_own_parts(
    ranks: SavingRanks,
    shared: SharedState,
    local: Mapping[str, torch.Tensor],
    *,
    compare: bool,
    skip_tied: bool,
) -> OwnParts:
    """Return what this rank writes, and what it compares with others.

    Args:
        ranks: those that save.
        shared: what all ranks save.
        local: the tensors of this rank.
        compare: whether values that several ranks hold must be equal; else the first rank's count.
        skip_tied: whether keys of one tensor are written once.

    Raises:
        PlacementError: If a tensor holds partial sums.
    """
    kind = "torch-zip" if shared.state.plain else "safetensors"
    found = OwnParts([], {})
    for turn, (key, described) in enumerate(shared.state.tensors.items()):
        if key not in local or (skip_tied and key in shared.tied):
            continue
        tensor, part, number, copies = local[key], 0, 0, 1
        if not is_dtensor(tensor):
            holders = shared.holders.get(key, ranks.ranks)
            spans, number, copies = (
                everything(tensor.shape),
                holders.index(ranks.rank),
                len(holders),
            )
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
        values, is_compared = local_tensor(tensor).detach(), compare and key not in shared.buffers
        if is_compared and copies > 1:
            found.replicas[HeldPart(key, spans if is_dtensor(tensor) else None)] = values
        # In turn: else the first rank would write all replicas.
        if number != (turn % copies if is_compared else 0):
            continue
        if not described.stored.nbytes and part == 0:  # one box says that there are no values
            none = torch.empty(described.stored.shape, dtype=values.dtype, device="cpu")
            found.boxes.append(Box((0,) * none.dim(), Value.of_tensor(key, none, kind)))
        ends = [[*accumulate((b - a for a, b in dim), initial=0)] for dim in spans]
        for box in product(*map(enumerate, spans)):
            local_box = (slice(e[n], e[n + 1]) for e, (n, _) in zip(ends, box, strict=True))
            inside = values[tuple(local_box)]
            if inside.numel():
                start = tuple(first for _, (first, _) in box)
                found.boxes.append(Box(start, Value.of_tensor(key, inside, kind)))
    return found


# ---- a folder of DCP


class Written(NamedTuple):
    """The result of a save on all ranks.

    Attributes:
        output: the files.
        files: their paths.
    """

    output: Output
    files: list[str]


class _LaidOut(NamedTuple):
    """The files of one rank, as all ranks know them.

    Attributes:
        sizes: name of each file -> its bytes.
        items: of the files.
    """

    sizes: dict[str, int]
    items: list[Item]


def write_folder(
    ranks: SavingRanks,
    shared: SharedState,
    own: OwnParts,
    target: Target,
    checksum: bool,
    advance: Advance,
) -> Written:
    """Write a DCP folder, in which each rank has its own files.

    Args:
        ranks: those that save.
        shared: what all ranks save.
        own: what this rank writes.
        target: the folder.
        checksum: whether to record checksums.
        advance: called with a number of bytes as this rank reads them.

    Raises:
        CheckpointError: If a rank fails or dies. The old checkpoint is unchanged, unless the
            message says that the new one is in place.
    """

    def lay_out() -> StepResult[OwnFiles, _LaidOut]:
        target.require_free_folder()
        made = OwnFiles(ranks.number, target.limit)
        for box in own.boxes:
            made.add_box(box, checksum)
        if ranks.leads:
            add_objects(made, shared.state)
        sizes = {name: end_of(sections) for name, sections in made.files.items()}
        deliver_interrupt()  # here, where the other ranks learn of it
        return StepResult(made, _LaidOut(sizes, made.items))

    head = target.folder_output(shared.state)
    files, by_rank = ranks.run(target.head, lay_out)
    items = [item for each in by_rank.values() for item in each.items]
    require_complete(shared.stored, items)
    sizes = {name: size for each in by_rank.values() for name, size in each.sizes.items()}
    content = partial(dcp_content, target.path, shared.state, shared.stored, [*sizes], items)
    output = replace(head, files=files.files, content=content, untied=shared.tied)
    return Written(output, write_together(ranks, output, sizes, advance, own.checksums))


def write_together(
    ranks: SavingRanks,
    output: Output,
    sizes: Mapping[str, int],
    advance: Advance,
    add_up: Callable[[], dict[HeldPart, Checksum]] = dict,
    check: Callable[[], None] = lambda: None,
) -> list[str]:
    """Write the files of this rank, and make the files of all ranks appear. Return their paths.

    Args:
        ranks: those that save.
        output: what this rank writes.
        sizes: name of each file of all ranks -> its bytes.
        advance: called with a number of bytes as this rank reads them.
        add_up: returns the checksums of what other ranks hold, too.
        check: called before the checkpoint appears. It raises if the checkpoint must not.

    Raises:
        CheckpointError: See `write_folder`.
    """
    head, kind, running = output.head, output.kind, Running(sys._getframe(1))
    created: CreatedFiles | None = None
    with ExitStack() as stack:

        def create() -> StepResult[Files | Objects | None, CreatedFiles | None]:
            if not ranks.leads:
                return StepResult(None, None)
            made = new_files(head, [*sizes], kind, output.replaces, running)
            stack.callback(made.close)
            return StepResult(made, made.create())

        def write() -> StepResult[None, dict[HeldPart, Checksum]]:
            assert created is not None
            objects = files if isinstance(files, Objects) else None
            write_own_files(head, kind, created, output.files, advance, objects)
            return StepResult(None, add_up())

        def commit() -> StepResult[None, list[str]]:
            check()
            if files is None:
                return StepResult(None, [])
            files.complete([*sizes.values()])
            content = None if output.content is None else output.content(files.names)
            return StepResult(None, files.commit(content))

        try:
            files, by_rank = ranks.run(head, create)
            created = by_rank[ranks.leader]
            ranks.run(head, write, partial(require_equal, path=head))
            return ranks.run(head, commit).by_rank[ranks.leader]
        except BaseException:
            if created is not None:  # the first rank may be the one that died
                remove_files(head, created.temporary.values(), kind)
            raise


def require_equal(by_rank: Mapping[int, Mapping[HeldPart, Checksum]], path: str) -> None:
    """Refuse values that differ between ranks.

    Raises:
        PlacementError: If there are some.
    """
    wrong = {part.key: each for part, each in find_differences(by_rank).items()}
    if wrong:
        raise difference_error(wrong, TAKE_FIRST, path)


# ---- one file, or shards, which the first rank makes of the files of all ranks


class _PartFile(NamedTuple):
    """The temporary file of one rank.

    Attributes:
        place: path of the file that is saved, links followed.
        name: of the temporary file, in the same folder.
    """

    place: str
    name: str


class _PartWritten(NamedTuple):
    """The content of the temporary file of a rank.

    Attributes:
        nbytes: of the file.
        items: of the file.
        checksums: of what other ranks hold, too.
    """

    nbytes: int
    items: list[Item]
    checksums: dict[HeldPart, Checksum]


def write_in_parts(
    ranks: SavingRanks,
    shared: SharedState,
    own: OwnParts,
    head: str,
    advance: Advance,
    make: Callable[[State], T],
) -> T:
    """Let each rank write its parts to a temporary file. The first rank makes one file of them.

    Args:
        ranks: those that save.
        shared: what all ranks save.
        own: what this rank writes.
        head: path of the file to make, next to which the temporary files are.
        advance: called with a number of bytes as this rank reads them.
        make: called on the first rank with the state, whose values are in the temporary files.

    Returns:
        The result of `make` on the first rank.

    Raises:
        CheckpointError: See `write_folder`.
    """
    if is_url(head) and len(ranks.ranks) > 1:
        raise PlacementError(
            "several ranks cannot write into one object of a store",
            file=head,
            expected="a DCP folder, to which each rank writes objects of its own",
            found=f"{len(ranks.ranks)} ranks",
            hint='Pass format="dcp"; torchlift.convert makes one file of that.',
        )
    running, folder, made = Running(sys._getframe()), os.path.dirname(head), list[str]()
    with ExitStack() as stack:
        if ranks.leads:
            stack.callback(remove_empty, made)

        def make_folder() -> StepResult[None, None]:
            if ranks.leads:
                make_folders(folder, made)
            return StepResult(None, None)

        def create_part() -> StepResult[AtomicFile, _PartFile]:
            # A locked temporary file: if this rank dies, the next save removes it.
            file = AtomicFile(head, running=running)
            stack.callback(file.close)
            name = os.path.basename(file.temporary)
            return StepResult(file, _PartFile(os.path.realpath(head), name))

        def write_part() -> StepResult[None, _PartWritten]:
            place = os.path.realpath(head)
            # A relative path can mean another folder on another rank or machine.
            for who, each in parts.items() if ranks.leads else ():
                exists = os.path.exists(os.path.join(os.path.dirname(place), each.name))
                require_same_place(place, each.place, exists, ranks.leader, who)
            # Without checksums: the first rank computes those of the file that it makes.
            files = OwnFiles(ranks.number)
            for box in own.boxes:
                files.add_box(box, checksum=False)
            ((_, sections),) = files.files.items()

            def advance_or_stop(nbytes: int) -> None:
                # Ctrl-C in a long write: this rank raises, and the exchange tells the others.
                deliver_interrupt()
                advance(nbytes)

            write_file(part.temporary, sections, advance_or_stop)
            deliver_interrupt()
            written = _PartWritten(end_of(sections), files.items, own.checksums())
            return StepResult(None, written)

        def validate(by_rank: Mapping[int, _PartWritten]) -> None:
            require_equal({who: each.checksums for who, each in by_rank.items()}, head)
            require_complete(
                {k: s for k, s in shared.stored.items() if k not in shared.tied},
                [item for each in by_rank.values() for item in each.items],
            )

        def make_file() -> StepResult[None, T | None]:
            if not ranks.leads:
                return StepResult(None, None)
            where = os.path.dirname(part.temporary)
            # A network file system can show a file before all of its bytes.
            require_sizes(where, {parts[who].name: each.nbytes for who, each in written.items()})
            paths = {who: os.path.join(where, each.name) for who, each in parts.items()}
            items = [(paths[who], item) for who, each in written.items() for item in each.items]
            views = _view_parts(shared, head, [*paths.values()], items)
            with views.files:
                return StepResult(None, make(_state_of(shared, views)))

        try:
            ranks.run(head, make_folder)
            part, parts = ranks.run(head, create_part)
            written = ranks.run(head, write_part, validate).by_rank
            result = ranks.run(head, make_file).by_rank[ranks.leader]
        except BaseException:
            with suppress(OSError):  # a rank that died cannot remove its files
                remove_debris(os.path.realpath(head))
            raise
        assert result is not None
        return result


def _view_parts(
    shared: SharedState, path: str, files: Sequence[str], items: Sequence[tuple[str, Item]]
) -> MappedViews:
    """Return the tensors that are in the temporary files of ranks.

    Args:
        shared: what all ranks save.
        path: of the file that is saved.
        files: the temporary files.
        items: with the path of the file that each is in.
    """
    chunks: dict[str, list[Chunk]] = {key: [] for key in shared.stored}
    for file, item in items:
        nbytes = Stored("", shared.stored[item.key].dtype, item.shape).nbytes
        if item.start is not None and nbytes:
            chunks[item.key].append(Chunk(file, item.payload, nbytes, item.start, item.shape))
    entries = {}
    for key, stored in shared.stored.items():
        kept = shared.tied.get(key, key)
        entries[key] = TensorEntry(
            key, stored.dtype, stored.shape, row_major(stored.shape), stored.nbytes, "cpu", kept,
            tuple(chunks[kept]),
        )  # fmt: skip
    stamps = {file: FileStamp.of(file) for file in files}
    return MappedViews(Index(path, "dcp", entries, dict[str, Storage](), stamps))


def _state_of(shared: SharedState, views: MappedViews) -> State:
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
        for key, (stored, first) in each.tensors.items():
            kind = "a plain tensor" if first is None else "a DTensor"
            found[key] = f"{kind}, {stored.dtype} {list(stored.shape)}"
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


def _find_same(state: State, local: Mapping[str, torch.Tensor]) -> array[int]:
    """Return for each tensor the number of an earlier one that is the same here, or its own.

    It is -1 if this rank holds no values of the tensor.
    """
    first: dict[object, int] = {}
    found = array("i")
    for number, key in enumerate(state.tensors):
        tensor = local.get(key)
        values = None if tensor is None else local_tensor(tensor)
        if tensor is None or values is None or not values.numel():
            found.append(-1)
            continue
        # A conjugate or negative view has the memory of its base, and other values.
        facts = (values.dtype, values.is_conj(), values.is_neg(), values.shape, values.stride())
        memory = (values.device, values.data_ptr(), *facts, tensor.shape, spread_of(tensor))
        found.append(first.setdefault(memory, number))
    return found


def _find_ties(state: State, by_rank: Sequence[array[int]]) -> dict[str, str]:
    """Return key -> the first key that is the same tensor on every rank that holds some of it.

    A rank sees by their memory that two keys are one tensor, but only if it holds values. All
    ranks draw the same conclusion from what all of them see.
    """
    first: dict[tuple[int, ...], str] = {}
    same = {}
    for key, *seen in zip(state.tensors, *by_rank, strict=True):
        if max(seen) >= 0 and first.setdefault(tuple(seen), key) != key:
            same[key] = first[tuple(seen)]
    return same


def _merge_states(states: Sequence[State]) -> State:
    """Return the states of several ranks as one. The first rank that has a key counts.

    Raises:
        PlacementError: If their containers differ in kind.
    """
    tensors: dict[str, Described] = {}
    template = _merge_templates([each.template for each in states], "")
    made = State(states[0].plain, template, tensors)
    for each in states:
        for key, (stored, first) in each.tensors.items():
            _, known = tensors.get(key, (stored, first))
            lowest = first if known is None or first is None else min(known, first)
            tensors[key] = Described(stored, lowest)
        # In the order of the ranks, and with the value of the first.
        for name in ("objects", "paths", "containers", "lost", "made_of_others", "parts"):
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

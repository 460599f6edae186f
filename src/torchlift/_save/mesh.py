"""Save from a mesh: all ranks write their own byte ranges of the same files, or nothing changes.

Here is who does what when, and how it is undone. What the files are like is what one process makes
of the same state.
"""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product
from typing import Any, Self, TypeVar

import torch

from torchlift._model.dtensor import (
    Spans,
    everything,
    first_rank,
    is_dtensor,
    local_tensor,
    spans_of,
    spread_of,
)
from torchlift._model.holders import find_buffers
from torchlift._model.ranks import RankGroup, rank, ranks_of
from torchlift._save.blocks import Workspace, tensor_blocks
from torchlift._save.files import (
    Advance,
    Begun,
    Files,
    Objects,
    Output,
    Sums,
    nobodys,
    on_their_way,
    place_of,
    remove_unnamed,
    require_one_writer,
    write_errors,
    write_files,
)
from torchlift._save.pickling import Rebuilt
from torchlift._save.replicas import TAKE_FIRST, Difference, difference_error
from torchlift._save.values import Taken, Value, apart, stored_as, untied
from torchlift._store.places import is_url, parent
from torchlift._system.interrupts import Running, deliver_interrupt
from torchlift.errors import CheckpointError, PlacementError
from torchlift.formats.boxes import narrowed, row_major, runs
from torchlift.formats.index import Chunk, Leaf, TensorEntry
from torchlift.formats.layout import Stored

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Share(Value):
    """A tensor that several processes save, and what this one has of it.

    Attributes:
        local: its values here.
        spans: the ranges of the whole tensor that these are.
        part: the number of these ranges from 0 on, the same for all ranks that hold the same.
        number: of this rank among those; they write one block each in turn.
        copies: how many they are; 0 where this rank writes nothing.
        turn: a number that is the same on all ranks and differs from tensor to tensor.
        step: how far the turn is from one block to the next; 0: one rank writes all of them.
        places: numbers of ranks, and the ranges that each of them alone writes; empty where all
            write one file.
    """

    local: torch.Tensor | None = None
    spans: Spans = ()
    part: int = 0
    number: int = 0
    copies: int = 0
    turn: int = 0
    step: int = 1
    places: tuple[tuple[int, Spans], ...] = ()

    @classmethod
    def of(cls, stored: Stored, same: object, turn: int = 0) -> Self:
        """Return a tensor of which this process has nothing.

        Args:
            stored: the whole tensor.
            same: what is equal for two that are one tensor.
            turn: see the class.
        """
        dtype = getattr(torch, stored.dtype)
        whole = torch.empty(stored.shape, dtype=dtype, device="meta")
        stride = row_major(stored.shape)
        # As one that shares its memory with its ties alone, and lies dense in it.
        place = dtype, stored.shape, stride, ("tensor", same), 0, 0, False
        return cls(stored.key, whole, *place, turn=turn)

    def with_values(
        self, tensor: torch.Tensor, spans: Spans, part: int = 0, number: int = 0, copies: int = 1
    ) -> Share:
        """Return it with what this process has of it."""
        return replace(self, local=tensor, spans=spans, part=part, number=number, copies=copies)

    @property
    def here(self) -> int:
        """Return how many of its bytes this process has."""
        return self.local.nbytes if self.local is not None and self.copies else 0

    @property
    def share(self) -> int:
        """Return the number of what others should hold, too; 0 where they hold none of it."""
        return self.part + 1 if self.copies > 1 else 0

    def runs(self, work: Workspace) -> Iterator[tuple[memoryview, list[tuple[int, memoryview]]]]:
        """Yield what this process has of its bytes, and which of that it writes where.

        A whole tensor is never copied, however it lies in memory. No byte is written by two ranks.
        What others hold too is read from beginning to end, to be compared.
        """
        local = self.local
        if local is None or not self.copies or not local.numel():
            return
        shape, size = self.shape, local.itemsize
        stored = self.stored
        chunk = Chunk("", 0, stored.nbytes, (0,) * len(shape), shape)
        whole = TensorEntry(
            self.key, stored.dtype, shape, self.stride, stored.nbytes, "cpu", "", (chunk,)
        )
        part = narrowed(whole, self.spans)
        for at, (block, view) in enumerate(tensor_blocks(local, local.dtype, work)):
            places = []
            if (self.turn + at * self.step) % self.copies == self.number:
                found = runs(narrowed(part, [[span] for span in block]))
                places = [(r.offset, view[r.at * size : (r.at + r.numel) * size]) for r in found]
            yield view, places

    def few(self) -> None:
        """Return nothing: what this process has of it comes in blocks."""

    @property
    def begins(self) -> bool:
        """Return whether this process writes the first block of what it has."""
        return self.copies > 0 and self.turn % self.copies == self.number

    def chunks(self) -> list[tuple[int, tuple[int, ...], Value]]:
        """Return the number of a rank, a place in the tensor, and what that rank writes there.

        Raises:
            PlacementError: some of the tensor is no rank's.
        """
        if not self.places:
            return super(Share, self).chunks()
        found: list[tuple[int, tuple[int, ...], Value]] = []
        for who, spans in self.places:
            is_here = spans == self.spans and self.copies > 0
            ends = [[*accumulate((b - a for a, b in dim), initial=0)] for dim in spans]
            for box in product(*map(enumerate, spans)):
                shape = tuple(stop - start for _, (start, stop) in box)
                stored = Stored(self.key, self.stored.dtype, shape)
                if not math.prod(shape) and (self.numel or found):
                    continue
                part = replace(Share.of(stored, self.key, self.turn), step=0)
                if is_here:
                    assert self.local is not None
                    inside = [slice(e[n], e[n + 1]) for e, (n, _) in zip(ends, box, strict=True)]
                    local = self.local[tuple(inside)]
                    spread = everything(shape), self.part, self.number, self.copies
                    part = part.with_values(local, *spread)
                found.append((who, tuple(start for _, (start, _) in box), part))
        if sum(part.numel for *_, part in found) != self.numel:
            raise nobodys(self.key, self.stored.nbytes, sum(p.stored.nbytes for *_, p in found))
        return found


#: What one rank is to save, without the values of tensors: of each what is stored, and the first
#: rank of its mesh (None if it has none); and text for the headers of safetensors.
_Described = tuple[Taken, dict[str, str]]


class Mesh:
    """The processes that save a checkpoint together, or one alone.

    Attributes:
        path: where to, for messages.
        leads: whether this one is the first.
        written: bytes of tensors that this one has written.
    """

    def __init__(self, process_group: Any = None, *, alone: bool = False, path: str = "") -> None:
        self.path = path
        self.group = RankGroup([]) if alone else RankGroup.of_all(process_group=process_group)
        self.rank = rank()
        self.ranks = [self.rank] if alone else ranks_of(process_group)
        self.leads = self.rank == self.ranks[0]
        self.written = 0

    def run(self, step: Callable[[], tuple[T, Any]]) -> tuple[T, dict[int, Any]]:
        """Take a step on all ranks, of which an error of the system says what became of the files.

        Only where it touches them: a caller's objects have such errors, too, of a lost connection.
        """

        def take() -> tuple[T, Any]:
            with write_errors(self.path):
                return step()

        return self.group.run(take)

    def laid_out(self, step: Callable[[], Output]) -> Output:
        """Lay the files out on all ranks.

        Raises:
            PlacementError: not all lay them out alike, and would write over each other's bytes.
        """

        def lay_out() -> tuple[Output, bytes]:
            output = step()
            require_one_writer(output, len(self.ranks))
            return output, output.digest if len(self.ranks) > 1 else b""

        output, digests = self.run(lay_out)
        for who, digest in digests.items():
            if digest != digests[self.ranks[0]]:
                raise PlacementError(
                    "the ranks do not lay the files out alike",
                    file=self.path,
                    expected=f"tensors at the same bytes as on rank {self.ranks[0]}",
                    found=f"others on rank {who}",
                    hint="Let all ranks have the same versions of Python, torch and torchlift.",
                )
        return output

    def merged(
        self, taken: Taken, metadata: Mapping[str, str], asked: Mapping[str, object]
    ) -> tuple[Taken, Sequence[Value], Mapping[str, str], dict[str, str]]:
        """Tell each other what there is to save, of which ranks may have names of their own.

        Of plain data the first rank that has the name counts, and rank 0's metadata.

        Args:
            taken: what this process has.
            metadata: text for the headers of safetensors.
            asked: the arguments that have to be the same on all ranks.

        Returns:
            What all have, the same on each of them: containers, values and metadata; and key ->
            what is lost of this rank's.

        Raises:
            PlacementError: two ranks hold unlike things under one name, or ask for unlike things.
        """
        local = taken.tensors
        kind = "torch-zip" if taken.plain else "safetensors"

        def describe() -> tuple[tuple[_Described, dict[str, str]], tuple[Any, bytes]]:
            values = [
                Value.of_tensor(key, local_tensor(tensor), kind) for key, tensor in local.items()
            ]
            tensors = {
                key: (stored_as(key, tensor, kind), first_rank(tensor))
                for key, tensor in local.items()
            }
            own = replace(taken, tensors=tensors), dict(metadata)
            return (own, untied(apart(values, None))), (asked, _digest(own))

        ((own, texts), lost), by_rank = self.group.run(describe)
        # All ranks know the same, so they raise together without another exchange.
        require_alike({who: asked for who, (asked, _) in by_rank.items()})
        holders: dict[str, list[int]] = {}
        if len({digest for _, digest in by_rank.values()}) > 1:
            _, each_own = self.group.run(lambda: (None, (own, texts)))
            holders = self._holders({who: each for who, (each, _) in each_own.items()})
            texts = each_own[self.ranks[0]][1]
            own = _merged([each for each, _ in each_own.values()])

        def list_ties() -> tuple[None, tuple[array[int], set[str]]]:
            plain = {key: tensor for key, tensor in local.items() if not is_dtensor(tensor)}
            compares = asked["replicated"] == "equal" and len(self.ranks) > 1
            return None, (_same_as(own, local), find_buffers(plain) if compares else set())

        _, listed = self.group.run(list_ties)
        same = _ties(own, [ties for ties, _ in listed.values()])
        # Statistics that each rank has of its own data: the first rank's count, as in torch.
        buffers = set[str]().union(*(found for _, found in listed.values()))

        def share(turn: int, key: str, stored: Stored, first: int | None) -> Share:
            made = Share.of(stored, same.get(key, key), turn)
            if key not in local:
                return made
            is_equal = asked["replicated"] == "equal" and key not in buffers
            return self._share_of(made, local[key], holders.get(key, self.ranks), first, is_equal)

        is_apart = asked["format"] == "dcp" and len(self.ranks) > 1

        def shares() -> tuple[list[Share], dict[str, Spans]]:
            found = enumerate(own.tensors.items())
            made = [share(turn, key, *each) for turn, (key, each) in found]
            deliver_interrupt()  # here, where the others are told of it
            return made, {each.key: each.spans for each in made if is_apart and each.begins}

        values, placed = self.group.run(shares)
        if is_apart:  # of two machines that write one file, one may undo what the other has done
            spans = [placed[who] for who in self.ranks]
            values = [
                replace(v, places=tuple((n, s[v.key]) for n, s in enumerate(spans) if v.key in s))
                for v in values
            ]
        return own, values, texts, lost

    def _holders(self, told: Mapping[int, Taken]) -> dict[str, list[int]]:
        """Return name -> the ranks that have it.

        Raises:
            PlacementError: two have unlike things of that name.
        """
        holders: dict[str, list[int]] = {}
        kinds: dict[str, tuple[int, str]] = {}
        for who, each in told.items():
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
                        file=self.path,
                        expected=f"{expected}, as on rank {other}",
                        found=f"rank {who} differs from rank {other}: {kind}",
                        hint="Give shards as DTensors, and what is not the same another name.",
                    )
        return holders

    def _share_of(
        self,
        whole: Share,
        tensor: torch.Tensor,
        holders: Sequence[int],
        first: int | None,
        is_equal: bool,
    ) -> Share:
        """Return what this rank holds and writes of a tensor.

        Raises:
            PlacementError: it holds partial sums.
        """
        part, number, copies = 0, 0, 1
        if not is_dtensor(tensor):
            spans, number = everything(tensor.shape), holders.index(self.rank)
            copies = len(holders)
        else:
            mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
            if coordinate is None or first != first_rank(tensor):
                # Of several meshes side by side that hold the same, the first one writes.
                return whole
            for axis, placement in enumerate(tensor.placements):
                if placement.is_replicate():
                    number = number * mesh.size(axis) + coordinate[axis]
                    copies *= mesh.size(axis)
                else:
                    part = part * mesh.size(axis) + coordinate[axis]
            spans = spans_of(tensor, whole.key)
        if not is_equal:
            copies = 1 if number == 0 else 0
        return whole.with_values(local_tensor(tensor).detach(), spans, part, number, copies)

    def write(self, output: Output, advance: Advance, check: Callable[[], None]) -> list[str]:
        """Write all files; return their paths.

        Args:
            output: what to write.
            advance: called with a number of bytes as this process reads them.
            check: called before the checkpoint appears; raises where it must not.

        Raises:
            CheckpointError: a rank could not, or died; the old ones are untouched, unless it says
                that the new ones are in place.
        """
        begun: Begun | None = None
        if len(self.ranks) == 1:
            output = replace(output, owners=dict.fromkeys(output.files, 0))
        running = Running(sys._getframe())
        with ExitStack() as stack:

            def begin() -> tuple[Files | Objects | None, Begun | None]:
                if not self.leads:
                    return None, None
                made = on_their_way(output, running)
                stack.callback(made.close)
                return made, made.begin()

            def commit() -> tuple[None, list[str]]:
                check()
                if files is None:
                    return None, []
                files.complete([*written.values()])
                return None, files.commit()

            try:
                files, by_rank = self.run(begin)
                begun, number = by_rank[self.ranks[0]], self.ranks.index(self.rank)
                write = partial(write_files, output, begun, number, advance, files)
                _, written = self.run(lambda: (None, write()))
                self.written = written[self.rank].nbytes
                _require_equal(written, output, self.path)
                paths: list[str] = self.run(commit)[1][self.ranks[0]]
                return paths
            except BaseException:
                # The first rank may be the one that died, and cannot remove what it has created.
                folder, names = parent(place_of(output)), begun.temporary if begun else []
                if is_url(folder):
                    with suppress(CheckpointError):
                        if begun and output.kind:
                            remove_unnamed(folder, names, output.kind)
                    raise
                for name in names:
                    with suppress(OSError):
                        os.unlink(os.path.join(folder, name))
                raise


def _digest(own: _Described) -> bytes:
    """Return what is equal where two would be pickled alike, down to what is named twice.

    So the files are laid out alike, which have a pickle of it.
    """
    return hashlib.sha256(pickle.dumps(own)).digest()


def require_alike(asked: Mapping[int, Mapping[str, object]]) -> None:
    """Refuse ranks that ask for other formats, or for other values of what they share."""
    first, expected = next(iter(asked.items()))
    for who, each in asked.items():
        for name, value in each.items():
            if value != expected[name]:
                raise PlacementError(
                    f"the ranks do not save with the same {name}=",
                    expected=f"{expected[name]!r}, as on rank {first}",
                    found=f"{value!r} on rank {who}",
                )


def _same_as(own: Taken, local: Mapping[str, torch.Tensor]) -> array[int]:
    """Return for each tensor the number of an earlier one that is the same here, or its own.

    It is -1 where this rank holds no values of it.
    """
    first: dict[object, int] = {}
    found = array("i")
    for number, key in enumerate(own.tensors):
        tensor = local.get(key)
        values = None if tensor is None else local_tensor(tensor)
        if tensor is None or values is None or not values.numel():
            found.append(-1)
            continue
        # A conjugate or negative view has the memory of its whole, and other values.
        facts = (values.dtype, values.is_conj(), values.is_neg(), values.shape, values.stride())
        memory = (values.device, values.data_ptr(), *facts, tensor.shape, spread_of(tensor))
        found.append(first.setdefault(memory, number))
    return found


def _ties(own: Taken, told: Sequence[array[int]]) -> dict[str, str]:
    """Return name -> the first name that is the same tensor on every rank which holds some of it.

    A rank sees that two names are one tensor by their memory, but only where it holds values. All
    ranks draw the same conclusion from what all of them see.
    """
    first: dict[tuple[int, ...], str] = {}
    same = {}
    for key, *seen in zip(own.tensors, *told, strict=True):
        if max(seen) >= 0 and first.setdefault(tuple(seen), key) != key:
            same[key] = first[tuple(seen)]
    return same


def _merged(told: Sequence[Taken]) -> Taken:
    """Return what several ranks have, as one; the first that has a name counts.

    Raises:
        PlacementError: their containers do not fit into each other.
    """
    tensors: dict[str, tuple[Stored, int | None]] = {}
    template = _merged_template([each.template for each in told], "")
    made = Taken(told[0].plain, template, tensors)
    for each in told:
        for key, (stored, first) in each.tensors.items():
            _, known = tensors.get(key, (stored, first))
            tensors[key] = stored, first if known is None or first is None else min(known, first)
        # In the order of the ranks, and with the value of the first.
        made.objects = {**made.objects, **each.objects, **made.objects}
        made.paths = {**made.paths, **each.paths, **made.paths}
        made.containers = {**made.containers, **each.containers, **made.containers}
        made.kinds = {**made.kinds, **each.kinds, **made.kinds}
        others = made.made_of_others
        made.made_of_others = {**others, **each.made_of_others, **others}
        made.parts = {**made.parts, **each.parts, **made.parts}
    return made


def _merged_template(templates: Sequence[Any], key: str) -> Any:
    first = templates[0]
    if all(isinstance(each, dict) for each in templates):
        ordered = [each for each in templates if isinstance(each, OrderedDict)]
        made: Any = type((ordered or templates)[0])()
        names = dict.fromkeys(name for each in templates for name in each)
        for name in names:
            inner = [each[name] for each in templates if name in each]
            made[name] = _merged_template(inner, f"{key}.{name}".removeprefix("."))
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
        return type(first)(_merged_template(row, f"{key}.{at}") for at, row in enumerate(rows))
    raise PlacementError(
        "the ranks do not hold the same containers under one name",
        entry=key or None,
        hint="Give what is not the same another name.",
    )


def _require_equal(written: Mapping[int, Sums], output: Output, path: str) -> None:
    """Refuse values that are not the same on ranks which should hold the same.

    They were written in turns: of two that differ, the file has some of each.
    """
    wrong: dict[str, Difference] = {}
    for at, stored in enumerate(output.stored):
        seen: dict[int, tuple[int, int]] = {}
        for who, each in written.items():
            share, crc = divmod(each.shares[at], 1 << 32)
            if share:
                other, expected = seen.setdefault(share, (who, crc))
                if crc != expected:
                    wrong[stored.key] = Difference(other, who)
                    break
    if wrong:
        raise difference_error(wrong, TAKE_FIRST, path)

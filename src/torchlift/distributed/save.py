"""Save one consolidated file from a mesh, every rank writing its own byte ranges of it.

Here is who does what when, and how it is undone. What the file holds is for `torchlift._save`,
where things lie in it for `torchlift.formats`, how it appears whole for `torchlift._transfer`.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple
from zlib import crc32

import torch
from torch import nn

from torchlift._model.dtensor import (
    Spans,
    everything,
    first_rank,
    held,
    is_dtensor,
    reshard,
    spans_of,
    spread_of,
)
from torchlift._model.names import Names
from torchlift._model.ranks import RankGroup, rank, ranks_of
from torchlift._model.slots import ModuleTree
from torchlift._save import BLOCK, Contents, Described, Workspace, tensor_blocks, write_error
from torchlift._transfer.write import AtomicFile, write_at, write_runs
from torchlift.distributed.model_state import read_model
from torchlift.distributed.options import StateDictOptions
from torchlift.errors import CheckpointError, PlacementError
from torchlift.formats import Chunk, TensorEntry
from torchlift.formats.boxes import cut, row_major, runs
from torchlift.formats.crc import PartialCrc, whole_crc
from torchlift.formats.layout import Stored

_REPLICATED = ("equal", "rank0")
_BLOCK = BLOCK


def save_consolidated(
    obj: nn.Module | Mapping[str, torch.Tensor],
    path: str | bytes | os.PathLike[str],
    *,
    format: str | None = None,
    metadata: Mapping[str, str] | None = None,
    replicated: Literal["equal", "rank0"] = "equal",
    process_group: torch.distributed.ProcessGroup | None = None,
) -> int:
    """Write a sharded model to one file that any program reads as an ordinary one.

    All ranks call it. Each writes the bytes of its own shards into one file; of what several ranks
    hold they take turns, 16 MiB at a time. Ranks may have names of their own, as the stages of a
    pipeline do: the file has the names of all, in the order of the ranks. Values of one name that
    several ranks hold, plain tensors or replicated DTensors, must be equal, by their checksums:
    nothing in the file is some of one rank and some of another. No weight travels between ranks
    and none is put together in memory: beside them a rank needs some 32 MiB, whatever their
    strides. The folder of the path must be the same one on every rank.

    **A torch file** is what ``torch.save`` would write: ``torch.load`` reads it with
    ``weights_only=True`` and with ``mmap=True``. Each rank sums up its own ranges, and from the
    sums comes the checksum of every storage. Names that are one tensor share a storage in the file,
    and after ``torch.load``. ``_metadata`` of a module's state dict is kept, and so are values that
    are plain data instead of tensors, as rank 0 has them. Tensors are stored dense, without
    ``requires_grad``, and as being on the CPU: nobody needs the mesh to load them. What these
    readers could not read is refused: names that are no plain text, values that contain themselves.

    **A safetensors file** has no sharing: each name gets bytes of its own, a tied weight twice. It
    holds tensors only.

    **Faults.** The file appears under its name, replacing an older one, when every rank has written
    everything and the disk has it. Until then it is called ``.NAME.torchlift-RANDOM.part``, in the
    same folder. Ranks that survive an error remove it. When all are killed at once (``kill -9``, a
    crash of the machine), it stays until the next save to the same path removes it, since nobody
    holds its lock (``flock``) any more. A rank that dies is noticed when the process group notices:
    at once where connections break, else after its timeout. Two faults can come when the new file
    is in place: a rank dies before it has heard so, and the folder cannot be flushed to the disk
    (``fsync``). The message says so.

    Args:
        obj: a module, whose state dict is saved under canonical names, whatever it is wrapped in;
            or a mapping from name to tensor.
        path: of the file; one that exists is replaced and passes its mode on. Of a link, the file
            that it leads to is replaced.
        format: ``"safetensors"`` or ``"torch-zip"``. None: the suffix says, ``.safetensors`` the
            one and ``.pt``, ``.pth``, ``.bin`` or ``.ckpt`` the other.
        metadata: text to record in the header of a safetensors file; a torch file has no place.
            Rank 0's is recorded; that of the others may differ, or be None.
        replicated: what to save of values that several ranks hold under one name. ``"equal"``: they
            must be equal, for which every rank reads all of its own. ``"rank0"``: those of the
            first rank that has the name, unread on the others; for statistics that each rank has
            of its own data, such as BatchNorm's.
        process_group: the ranks that save, which all call this; by default all. What they agree on
            travels over it: over gloo, rank 0's ``fsync`` may take longer than NCCL would wait.

    Returns:
        Bytes of tensors that this rank wrote.

    Raises:
        CheckpointError: a rank failed, and every rank raises that. The previous file is untouched
            and nothing is left behind, unless the message says that the new one is, or may be,
            in its place.
        PlacementError: the format cannot hold a name or a value, a tensor holds partial sums or
            lies where no rank can write it, ranks hold different shapes or values under one name,
            or do not save to one path.
        TypeError: an object that is no module and no mapping, or metadata that is not text.
        ValueError: a format or a word for `replicated` that is not known, no format and a suffix
            that does not tell, or metadata for a torch file.

    Example:
        >>> import torch, torchlift, tempfile, os
        >>> from torchlift.distributed import save_consolidated
        >>> folder = tempfile.mkdtemp()
        >>> save_consolidated(torch.nn.Linear(3, 2), os.path.join(folder, "model.safetensors"))
        32
        >>> torchlift.open(os.path.join(folder, "model.safetensors")).entries["weight"].shape
        (2, 3)
        >>> save_consolidated(torch.nn.Linear(3, 2), os.path.join(folder, "model.pt"))
        32
        >>> torch.load(os.path.join(folder, "model.pt"), mmap=True)["weight"].shape
        torch.Size([2, 3])
    """
    given = metadata if metadata is not None else {}

    def contents(where: str) -> Contents:
        state: Any = obj
        if isinstance(obj, nn.Module):
            tree = ModuleTree(obj)
            reshard(tree.modules)
            state = read_model(obj, Names(tree), None, StateDictOptions())
        return Contents(state, where, format, given)

    return _Saver(path, contents, replicated, process_group).run()


class _RankSummary(NamedTuple):
    """What one rank sees of a state dict, in a few bytes.

    Attributes:
        asked: the format, and what is to be done with values that ranks share.
        digest: of all names, kinds, whole shapes and first ranks of meshes, in order.
        same_as: for each tensor the number of an earlier one that is the same here, or its own;
            or -1 where this rank holds no values of it.
    """

    asked: tuple[str, str]
    digest: bytes
    same_as: array[int]


class _Begun(NamedTuple):
    """What rank 0 tells of the file that it has created."""

    path: str  # of the file to be, links followed
    temporary: str  # path of the temporary one
    length: int  # see `Contents.lay_out`


class _Written(NamedTuple):
    """What a rank reports when it has written its byte ranges.

    Attributes:
        nbytes: how many they are.
        sums: for each payload the checksum of these ranges, where the layout asks for them.
        copies: for each payload 0, or where other ranks should hold the same: which part of the
            tensor that is, counted from 1, times 2**32, plus the checksum of all of it.
    """

    nbytes: int
    sums: array[int]
    copies: array[int]


class _Turn(NamedTuple):
    """Which part of a tensor this rank holds, and what it writes of it.

    Attributes:
        spans: what it holds.
        part: the number of that part, the same for all ranks that hold the same.
        number: of this rank among those; they write one block each in turn.
        copies: how many they are; 0 where this rank writes nothing.
    """

    spans: Spans
    part: int = 0
    number: int = 0
    copies: int = 0


class _Saver:
    def __init__(
        self,
        path: str | bytes | os.PathLike[str],
        make: Callable[[str], Contents],
        replicated: str,
        process_group: Any,
    ) -> None:
        self.given = path
        self.make = make
        self.replicated = replicated
        self.path = ""
        self.group = RankGroup.of_all(process_group=process_group)
        self.ranks = ranks_of(process_group)
        self.rank = rank()
        self.leads = self.rank == self.ranks[0]
        self.temporary = ""  # path of the temporary file on this rank
        self.file: AtomicFile | None = None  # on the first rank

    def run(self) -> int:
        """Take the steps; after each of them every rank knows whether all ranks are well."""
        try:
            summaries = self._together(self._describe)
            # All ranks know the same, so they raise together without another exchange.
            _require_alike(self.ranks, [summary.asked for summary in summaries])
            self.holders: Mapping[str, list[int]] = {}
            self.firsts: Mapping[str, int] = {}
            if any(summary.digest != summaries[0].digest for summary in summaries):
                self._merge(self._together(self.contents.describe))
                summaries = self._together(self._summary)
            self.owners = _owners(self.contents, summaries)
            begun = self._together(self._begin)[0]
            self._together(partial(self._join, begun))
            written = self._together(partial(self._write, begun.length))
            _require_equal(self.ranks, self.layout.payloads, written, self.path)
            self._together(partial(self._commit, written))
        except BaseException:
            # The first rank may be the one that died, and cannot remove what it has created.
            if self.temporary:
                with suppress(OSError):
                    os.unlink(self.temporary)
            raise
        finally:
            if self.file is not None:
                self.file.close()
        return int(written[self.ranks.index(self.rank)].nbytes)

    def _together(self, step: Callable[[], Any]) -> list[Any]:
        """Run one step on all ranks; return what each got, or raise what any of them met."""
        error: BaseException | None = None
        value: Any = None
        try:
            value = step()
        except OSError as failure:
            error = write_error(self.path, failure)
        except BaseException as failure:
            error = failure
        try:
            values = self.group.agree(error, value)
        except RuntimeError as failure:
            if failure is error:
                raise
            hint = "The file is the old one, or the complete new one if that rank was last."
            reason = "another rank died or does not answer"
            found = str(failure).partition("\n")[0]
            raise CheckpointError(reason, file=self.path, found=found, hint=hint) from failure
        return [values[who] for who in self.ranks]

    def _describe(self) -> _RankSummary:
        """Check the arguments here, where the other ranks learn of an error."""
        self.path = os.fsdecode(self.given)  # for an error, if there is no current folder any more
        self.path = os.path.abspath(self.path)
        if self.replicated not in _REPLICATED:
            raise ValueError(
                f"replicated must be one of {', '.join(map(repr, _REPLICATED))}, "
                f"not {self.replicated!r}"
            )
        self.contents = self.make(self.path)
        return self._summary()

    def _summary(self) -> _RankSummary:
        return _summary(self.contents, self.replicated)

    def _merge(self, told: list[Described]) -> None:
        """Add what other ranks have under names of their own, as the stages of a pipeline do.

        Raises:
            PlacementError: two ranks hold unlike things under one name.
        """
        holders: dict[str, list[int]] = {}
        kinds: dict[str, tuple[int, str]] = {}
        firsts: dict[str, int] = {}
        for who, each in zip(self.ranks, told, strict=True):
            found = dict.fromkeys(each.plain, "plain data")
            for key, (stored, first) in each.tensors.items():
                kind = "a plain tensor" if first is None else "a DTensor"
                found[key] = f"{kind}, {stored.dtype} {list(stored.shape)}"
                holders.setdefault(key, []).append(who)
                if first is not None:
                    firsts[key] = min(first, firsts.get(key, first))
            for key, kind in found.items():
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
        self.contents.merge(told)
        self.holders, self.firsts = holders, firsts

    def _begin(self) -> _Begun | None:
        """Let the first rank lay the file out and create it."""
        if not self.leads:
            return None
        self.layout, length = self.contents.lay_out(self.owners)
        self.file = AtomicFile(self.path)
        os.truncate(self.file.descriptor, self.layout.nbytes)
        return _Begun(os.path.realpath(self.path), self.file.temporary, length)

    def _join(self, begun: _Begun) -> None:
        """Look for the temporary file beside this rank's path.

        Nobody else has its random name: a rank that sees it is in the same folder, whatever that is
        called here and on whichever machine it is.
        """
        own = os.path.realpath(self.path)
        folder, name = os.path.split(own)
        self.temporary = os.path.join(folder, os.path.basename(begun.temporary))
        if name != os.path.basename(begun.path) or not os.path.exists(self.temporary):
            raise PlacementError(
                "the ranks do not save to the same path",
                expected=f"{begun.path}, as on rank 0",
                found=f"{own} on rank {self.rank}",
                hint="Pass one path on all ranks, on a file system that all machines share; a "
                "relative path depends on the current folder.",
            )

    def _write(self, length: int) -> _Written:
        """Write this rank's byte ranges of every payload, and sum them up where sums are needed."""
        if not self.leads:
            self.layout, _ = self.contents.lay_out(self.owners, length)
        nbytes, sums, copies = 0, array("I"), array("Q")
        descriptor = os.open(self.temporary, os.O_WRONLY)
        try:
            for turn, (stored, start) in enumerate(self.layout.payloads):
                total, whole = PartialCrc(stored.nbytes), 0
                tensor = self.contents.state[stored.key]
                mine = _Turn(()) if tensor is None else self._turn(stored.key, tensor)
                compared = mine.copies > 1
                for data, places in _blocks_of(tensor, stored, mine, turn):
                    if compared:
                        whole = crc32(data, whole)
                    nbytes += write_runs(
                        descriptor, start, places, total if self.layout.checked else None
                    )
                sums.append(total.value())
                copies.append((mine.part + 1 << 32) + whole if compared else 0)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return _Written(nbytes, sums, copies)

    def _turn(self, key: str, tensor: torch.Tensor) -> _Turn:
        """Return what this rank holds and writes of a tensor.

        Raises:
            PlacementError: it holds partial sums.
        """
        part, number, copies = 0, 0, 1
        if not is_dtensor(tensor):
            holders = self.holders.get(key, self.ranks)
            spans, number, copies = everything(tensor.shape), holders.index(self.rank), len(holders)
        else:
            mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
            if coordinate is None or self.firsts.get(key, first_rank(tensor)) != first_rank(tensor):
                # Of several meshes side by side that hold the same, the first one writes.
                return _Turn(())
            for axis, placement in enumerate(tensor.placements):
                if placement.is_replicate():
                    number = number * mesh.size(axis) + coordinate[axis]
                    copies *= mesh.size(axis)
                else:
                    part = part * mesh.size(axis) + coordinate[axis]
            spans = spans_of(tensor, key)
        if self.replicated == "rank0":
            copies = 1 if number == 0 else 0
        return _Turn(spans, part, number, copies)

    def _commit(self, written: list[_Written]) -> None:
        """Let rank 0 write what is not weights, and let the file appear."""
        if self.file is None:
            return
        tensors = [stored for stored, _ in self.layout.payloads]
        expected, found = sum(t.nbytes for t in tensors), sum(of_rank.nbytes for of_rank in written)
        if found != expected:
            raise PlacementError(
                "some values are nobody's to write: a DTensor's mesh has ranks that do not save",
                file=self.path,
                expected=f"{expected} bytes of tensors",
                found=f"{found} bytes",
                hint="Call it on all ranks that hold tensors, or name their process_group=.",
            )
        sums = zip(tensors, *(of_rank.sums for of_rank in written), strict=True)
        whole = [whole_crc(tensor.nbytes, of_ranks) for tensor, *of_ranks in sums]
        for offset, data in self.layout.frame(whole if self.layout.checked else []):
            write_at(self.file.descriptor, data, offset)
        self.file.commit()


def _summary(contents: Contents, replicated: str) -> _RankSummary:
    """Describe a state dict to the other ranks."""
    state, tensors = contents.state, contents.tensors
    numbers = {key: number for number, key in enumerate(tensors)}
    described = [
        (key, tensors[key], first_rank(value)) if key in tensors and value is not None else key
        for key, value in state.items()
    ]
    digest = hashlib.sha256(repr(described).encode()).digest()
    first: dict[object, str] = {}
    same_as = array("i")
    for key in tensors:
        tensor = state[key]
        local = None if tensor is None else held(tensor)
        if local is None or not local.numel():
            same_as.append(-1)
            continue
        # A conjugate or negative view has the memory of its whole, and other values.
        values = (local.dtype, local.is_conj(), local.is_neg(), local.shape, local.stride())
        memory = (local.device, local.data_ptr(), *values, tensor.shape, spread_of(tensor))
        same_as.append(numbers[first.setdefault(memory, key)])
    return _RankSummary((contents.format, replicated), digest, same_as)


def _require_alike(ranks: Sequence[int], asked: Sequence[tuple[str, str]]) -> None:
    """Refuse ranks that ask for other formats, or for other values of what they share."""
    for who, each in zip(ranks, asked, strict=True):
        if each != asked[0]:
            raise PlacementError(
                "the ranks do not save with the same format= and replicated=",
                expected=f"{' and '.join(map(repr, asked[0]))}, as on rank {ranks[0]}",
                found=f"{' and '.join(map(repr, each))} on rank {who}",
            )


def _require_equal(
    ranks: Sequence[int],
    payloads: Sequence[tuple[Stored, int]],
    written: Sequence[_Written],
    path: str,
) -> None:
    """Refuse values that are not the same on ranks which should hold the same.

    They were written in turns: of two that differ, the file has some of each.
    """
    wrong: list[tuple[str, int, int]] = []
    for at, (stored, _) in enumerate(payloads):
        seen: dict[int, tuple[int, int]] = {}
        for who, each in zip(ranks, written, strict=True):
            part, crc = divmod(each.copies[at], 1 << 32)
            if part:
                other, expected = seen.setdefault(part, (who, crc))
                if crc != expected:
                    wrong.append((stored.key, other, who))
                    break
    if wrong:
        key, other, who = wrong[0]
        more = f" (and so do {len(wrong) - 1} more names)" if len(wrong) > 1 else ""
        raise PlacementError(
            "the ranks hold different values under one name",
            entry=key,
            file=path,
            expected="the same on every rank, or a DTensor for what is sharded",
            found=f"the values of rank {who} differ from those of rank {other}{more}",
            hint='Pass replicated="rank0" to save those of the first rank that has the name.',
        )


def _owners(contents: Contents, summaries: Sequence[_RankSummary]) -> dict[str, str]:
    """Return name -> the first name that is the same tensor on every rank which holds some of it.

    A rank sees that two names are one tensor by their memory, but only where it holds values. All
    ranks draw the same conclusion from what all of them see.
    """
    first: dict[tuple[int, ...], str] = {}
    owners = {}
    for key, *seen in zip(contents.tensors, *(each.same_as for each in summaries), strict=True):
        if max(seen) >= 0 and first.setdefault(tuple(seen), key) != key:
            owners[key] = first[tuple(seen)]
    return owners


def _blocks_of(
    tensor: torch.Tensor, stored: Stored, mine: _Turn, turn: int
) -> Iterator[tuple[memoryview, list[tuple[int, memoryview]]]]:
    """Read what this rank holds of a tensor, and say what of it goes where in the file.

    A whole tensor is never copied, however it lies in memory. No byte is written by two ranks. What
    others hold too is read from beginning to end, to be compared; else only what is written.

    Args:
        tensor: a DTensor, or a plain tensor.
        stored: the whole tensor.
        mine: what this rank holds and writes.
        turn: a number that is the same on all ranks and differs from tensor to tensor.

    Yields:
        (bytes, [(offset in the tensor's bytes, some of these bytes), ...]), which are valid until
        the next are asked for.
    """
    if not mine.copies:
        return
    local = held(tensor).detach()
    if not local.numel():
        return
    shape, size = stored.shape, local.itemsize
    chunk = Chunk("", 0, stored.nbytes, (0,) * len(shape), shape)
    whole = TensorEntry(
        stored.key, stored.dtype, shape, row_major(shape), stored.nbytes, "cpu", "", (chunk,)
    )
    part = cut(whole, mine.spans)
    for at, (block, view) in enumerate(tensor_blocks(local, local.dtype, Workspace(_BLOCK))):
        places = []
        if (turn + at) % mine.copies == mine.number:
            found = runs(cut(part, [[span] for span in block]))
            places = [(r.offset, view[r.at * size : (r.at + r.numel) * size]) for r in found]
        yield view, places

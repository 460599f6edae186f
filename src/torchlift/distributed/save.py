"""Save one consolidated file from a mesh, every rank writing its own byte ranges of it.

Here is who does what when, and how it is undone. What the file holds is for `torchlift._save`,
where things lie in it for `torchlift.formats`, how it appears whole for `torchlift._transfer`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from torchlift._model.dtensor import (
    Spans,
    blocks,
    everything,
    held,
    is_dtensor,
    spans_of,
    spread_of,
)
from torchlift._model.ranks import RankGroup, rank, world_of
from torchlift._save import Contents
from torchlift._transfer.write import AtomicFile, NotDurable, write_at
from torchlift.errors import CheckpointError, PlacementError
from torchlift.formats import Chunk, TensorEntry
from torchlift.formats.boxes import cut, row_major, runs
from torchlift.formats.crc import PartialCrc, whole_crc
from torchlift.formats.layout import Stored

_BLOCK = 16 << 20  # bytes that are copied from an accelerator, or made dense, at a time


def save_consolidated(
    obj: nn.Module | Mapping[str, torch.Tensor],
    path: str | bytes | os.PathLike[str],
    *,
    format: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write a sharded model to one file that any program reads as an ordinary one.

    All ranks call it with the same names. Each writes the bytes of its own shards into one file;
    of what several ranks hold they take turns, 16 MiB at a time. No weight travels between ranks
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
        obj: a module, whose ``state_dict`` is saved, or a mapping from name to tensor.
        path: of the file; one that exists is replaced and passes its mode on. Of a link, the file
            that it leads to is replaced.
        format: ``"safetensors"`` or ``"torch-zip"``. None: the suffix says, ``.safetensors`` the
            one and ``.pt``, ``.pth``, ``.bin`` or ``.ckpt`` the other.
        metadata: text to record in the header of a safetensors file; a torch file has no place.
            Rank 0's is recorded; that of the others may differ, or be None.

    Returns:
        Bytes of tensors that this rank wrote.

    Raises:
        CheckpointError: a rank failed, and every rank raises that. The previous file is untouched
            and nothing is left behind, unless the message says that the new one is, or may be,
            in its place.
        PlacementError: the format cannot hold a name or a value, a tensor holds partial sums or
            lies where no rank can write it, or the ranks do not save the same names to one path.
        TypeError: an object that is no module and no mapping, or metadata that is not text.
        ValueError: a format that is not known, no format and a suffix that does not tell, or
            metadata for a torch file.

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
    return _Saver(path, partial(Contents, obj, format=format, metadata=given)).run()


class _RankSummary(NamedTuple):
    """What one rank sees of a state dict, in a few bytes.

    Attributes:
        digest: of the format and of all names, kinds and whole shapes, in order.
        same_as: name -> an earlier name that is the same tensor here, or None where this rank holds
            no values of it. Names that are in neither case are left out.
    """

    digest: bytes
    same_as: dict[str, str | None]


class _Begun(NamedTuple):
    """What rank 0 tells of the file that it has created."""

    path: str  # of the file to be, links followed
    temporary: str  # path of the temporary one
    length: int  # see `Contents.lay_out`


class _Written(NamedTuple):
    """What a rank reports when it has written its byte ranges."""

    nbytes: int
    sums: array[int]  # for each payload, where the layout asks for them


class _Saver:
    def __init__(
        self, path: str | bytes | os.PathLike[str], make: Callable[[str], Contents]
    ) -> None:
        self.given = path
        self.make = make
        self.path = ""
        self.rank = rank()
        self.temporary = ""  # path of the temporary file on this rank
        self.file: AtomicFile | None = None  # on rank 0

    def run(self) -> int:
        """Take the steps; after each of them every rank knows whether all ranks are well."""
        try:
            summaries = self._together(self._describe)
            # All ranks know the same, so they raise together without another exchange.
            self.owners = _owners(self.contents, summaries)
            begun = self._together(self._begin)[0]
            self._together(partial(self._join, begun))
            written = self._together(partial(self._write, begun.length))
            self._together(partial(self._commit, written))
        except BaseException:
            # Rank 0 may be the one that died, and cannot remove what it has created.
            if self.temporary:
                with suppress(OSError):
                    os.unlink(self.temporary)
            raise
        finally:
            if self.file is not None:
                self.file.close()
        return int(written[self.rank].nbytes)

    def _together(self, step: Callable[[], Any]) -> list[Any]:
        """Run one step on all ranks; return what each got, or raise what any of them met."""
        error: BaseException | None = None
        value: Any = None
        try:
            value = step()
        except NotDurable as failure:
            reason = "the new file is in place, but its folder is not durable"
            hint = "Save again: a crash of the machine may bring the older file back."
            error = self._error(reason, failure, hint)
        except OSError as failure:
            error = self._error("the file cannot be written", failure)
        except BaseException as failure:
            error = failure
        try:
            values = RankGroup.of_all().agree(error, value)
        except RuntimeError as failure:
            if failure is error:
                raise
            hint = "The file is the old one, or the complete new one if that rank was last."
            raise self._error("another rank died or does not answer", failure, hint) from failure
        return [values[who] for who in sorted(values)]

    def _error(self, reason: str, cause: Exception, hint: str | None = None) -> CheckpointError:
        found = str(cause).partition("\n")[0]
        error = CheckpointError(reason, file=self.path, found=found, hint=hint)
        error.__cause__ = cause
        return error

    def _describe(self) -> _RankSummary:
        """Check the arguments here, where the other ranks learn of an error."""
        self.path = os.fsdecode(self.given)  # for an error, if there is no current folder any more
        self.path = os.path.abspath(self.path)
        self.contents = self.make(self.path)
        return _summary(self.contents)

    def _begin(self) -> _Begun | None:
        """Let rank 0 lay the file out and create it."""
        if self.rank != 0:
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
        if self.rank != 0:
            self.layout, _ = self.contents.lay_out(self.owners, length)
        nbytes, sums = 0, array("I")
        descriptor = os.open(self.temporary, os.O_WRONLY)
        try:
            for turn, (stored, start) in enumerate(self.layout.payloads):
                total = PartialCrc(stored.nbytes)
                for offset, data in _own_bytes(self.contents.state[stored.key], stored, turn):
                    write_at(descriptor, data, start + offset)
                    nbytes += len(data)
                    if self.layout.checked:
                        total.add(offset, data)
                sums.append(total.value())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return _Written(nbytes, sums)

    def _commit(self, written: list[_Written]) -> None:
        """Let rank 0 write what is not weights, and let the file appear."""
        if self.file is None:
            return
        tensors = [stored for stored, _ in self.layout.payloads]
        expected, found = sum(t.nbytes for t in tensors), sum(of_rank.nbytes for of_rank in written)
        if found != expected:
            raise PlacementError(
                "a DTensor's mesh leaves out rank 0, so that some values are nobody's to write",
                file=self.path,
                expected=f"{expected} bytes of tensors",
                found=f"{found} bytes",
                hint="Put the tensors on a mesh that all ranks are in.",
            )
        sums = zip(tensors, *(of_rank.sums for of_rank in written), strict=True)
        whole = [whole_crc(tensor.nbytes, of_ranks) for tensor, *of_ranks in sums]
        for offset, data in self.layout.frame(whole if self.layout.checked else []):
            write_at(self.file.descriptor, data, offset)
        self.file.commit()


def _summary(contents: Contents) -> _RankSummary:
    """Describe a state dict to the other ranks."""
    described = [(key, contents.tensors.get(key)) for key in contents.state]
    digest = hashlib.sha256(repr((contents.format, described)).encode()).digest()
    first: dict[object, str] = {}
    same_as: dict[str, str | None] = {}
    for key in contents.tensors:
        tensor = contents.state[key]
        local = held(tensor)
        if not local.numel():
            same_as[key] = None
            continue
        # A conjugate or negative view has the memory of its whole, and other values.
        values = (local.dtype, local.is_conj(), local.is_neg(), local.shape, local.stride())
        memory = (local.device, local.data_ptr(), *values, tensor.shape, spread_of(tensor))
        if first.setdefault(memory, key) != key:
            same_as[key] = first[memory]
    return _RankSummary(digest, same_as)


def _owners(contents: Contents, summaries: Sequence[_RankSummary]) -> dict[str, str]:
    """Return name -> the first name that is the same tensor on every rank which holds some of it.

    A rank sees that two names are one tensor by their memory, but only where it holds values. All
    ranks draw the same conclusion from what all of them see.

    Raises:
        PlacementError: the ranks do not save the same names.
    """
    for who, summary in enumerate(summaries):
        if summary.digest != summaries[0].digest:
            raise PlacementError(
                "the ranks do not save the same tensors to the same format",
                expected="names, dtypes and whole shapes equal and in the same order on all ranks",
                found=f"rank {who} differs from rank 0",
                hint="Give every rank the state dict of the whole model, with DTensors for its "
                "shards.",
            )
    first: dict[tuple[str | None, ...], str] = {}
    owners = {}
    for key in contents.tensors:
        seen = tuple(summary.same_as.get(key, key) for summary in summaries)
        if any(name is not None for name in seen) and first.setdefault(seen, key) != key:
            owners[key] = first[seen]
    return owners


def _own_bytes(tensor: torch.Tensor, stored: Stored, turn: int) -> Iterator[tuple[int, memoryview]]:
    """Read the bytes of a tensor that this rank writes; no byte of it is another rank's, too.

    A whole tensor is never copied, however it lies in memory.

    Args:
        tensor: a DTensor, or a plain tensor that every rank has.
        stored: the whole tensor.
        turn: a number that is the same on all ranks and differs from tensor to tensor; ranks that
            hold the same values take turns.

    Yields:
        (offset in the tensor's bytes, bytes), which are valid until the next are asked for.

    Raises:
        PlacementError: it holds partial sums.
    """
    local = held(tensor).detach()
    ranges, number, copies = _copies(stored.key, tensor)
    if not local.numel() or not copies:
        return
    shape, size = stored.shape, local.itemsize
    chunk = Chunk("", 0, stored.nbytes, (0,) * len(shape), shape)
    whole = TensorEntry(
        stored.key, stored.dtype, shape, row_major(shape), stored.nbytes, "cpu", "", (chunk,)
    )
    mine = cut(whole, ranges)
    limit = max(1, _BLOCK // size)
    # One for all blocks: the C library would hold on to five that are made in a row.
    buffer = torch.empty(0, dtype=local.dtype, device=local.device)
    for at, block in enumerate(blocks(local.shape, limit)):
        if (turn + at) % copies != number:
            continue
        values = local[tuple(slice(*span) for span in block)]
        if not values.is_contiguous() or values.is_conj() or values.is_neg():
            if not buffer.numel():
                buffer.resize_(min(limit, local.numel()))
            values = buffer[: values.numel()].view(values.shape).copy_(values)
        values = values.cpu()
        data = (ctypes.c_char * values.nbytes).from_address(values.data_ptr())
        view = memoryview(data).cast("B")  # through NumPy it would need NumPy
        for run in runs(cut(mine, [[span] for span in block])):
            yield run.offset, view[run.at * size : (run.at + run.numel) * size]


def _copies(key: str, tensor: torch.Tensor) -> tuple[Spans, int, int]:
    """Return what this rank holds, its number among the ranks that hold the same, and their count.

    The count is 0 where another mesh holds the same and writes.
    """
    if not is_dtensor(tensor):
        return everything(tensor.shape), *world_of()
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None or 0 not in mesh.mesh.flatten().tolist():
        # Of several meshes side by side that hold the same, the one with the first rank writes.
        return (), 0, 0
    number, copies = 0, 1
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            number = number * mesh.size(axis) + coordinate[axis]
            copies *= mesh.size(axis)
    return spans_of(tensor, key), number, copies

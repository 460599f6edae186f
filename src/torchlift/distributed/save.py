"""One consolidated file from a mesh, every rank writing its own byte ranges of it.

Here is who does what when, and how it is undone; where things lie in the file is for `layouts`, and
how a file is written in secret for `unfinished`.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from torchlift._model.ranks import Circle, rank, settle
from torchlift._transfer.write import Address, NotDurable, Unfinished, write_at
from torchlift.distributed.contents import Contents
from torchlift.distributed.destination import Destination, require_one
from torchlift.distributed.outline import Outline
from torchlift.distributed.parts import parts_of
from torchlift.errors import CheckpointError, PlacementError
from torchlift.formats.crc import PartialCrc, whole_crc


def save_consolidated(
    obj: nn.Module | Mapping[str, torch.Tensor],
    path: str | bytes | os.PathLike[str],
    *,
    format: str | None = None,
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write a sharded model to one file that any program reads as an ordinary one.

    All ranks call it with the same names. Each writes the bytes of its own shards into one file,
    and of what several ranks hold each writes a part; no weight travels between ranks and none is
    put together in memory: beside them a rank needs some 32 MiB, whatever their strides. The folder
    of the path must be the same one on every rank.

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
    everything and the disk has it. Until then it has no name where all ranks run on one machine
    and the file system knows ``O_TMPFILE``: whatever kills them, the kernel frees it. Elsewhere,
    and for the moment in which it is renamed, it is called ``.NAME.torchlift-RANDOM.part``. Ranks
    that survive an error remove it; when all are killed at once, the next save to the same path
    does, since nobody holds its lock (``flock``) any more. A rank that dies is noticed when the
    process group notices: at once where connections break, else after its timeout. Two faults can
    come when the new file is in place: a rank dies before it has heard so, and the folder cannot be
    flushed to the disk (``fsync``). The message says so.

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
    return _Saver(path, lambda target: Contents(obj, target, format, given)).run()


class _Written(NamedTuple):
    """What a rank reports when it has written its parts."""

    nbytes: int
    sums: array[int]  # for each payload, where the layout asks for them


class _Saver:
    def __init__(
        self, path: str | bytes | os.PathLike[str], make: Callable[[str], Contents]
    ) -> None:
        self.given = path
        self.make = make
        self.path: str | None = None
        self.rank = rank()
        self.file: Unfinished | None = None  # on rank 0
        self.address: Address | None = None  # on all

    def run(self) -> int:
        """The steps, after each of which every rank knows whether all are well."""
        try:
            described = self._together(self._describe)
            # From what all know, all draw one conclusion: they raise together without a word more.
            require_one([destination for _, destination in described])
            self.contents.agree([outline for outline, _ in described])
            length = self._together(self._lay_out)[0]
            self._open()
            written = self._together(partial(self._write, length))
            self._together(lambda: self._commit(written))
        except BaseException:
            # Rank 0 may be the one that died, and cannot remove what it has created.
            if self.address is not None and not self.address.machine:
                with suppress(OSError):
                    os.unlink(self.address.path)
            raise
        finally:
            if self.file is not None:
                self.file.close()
        return int(written[self.rank].nbytes)

    def _describe(self) -> tuple[Outline, Destination]:
        """Whatever this rank's arguments may make fail is here, where the others learn of it."""
        self.path = os.fsdecode(self.given)  # for an error, if there is no current folder any more
        self.path = os.path.abspath(self.path)
        self.contents = self.make(self.path)
        return self.contents.describe(), Destination.of(self.path)

    def _together(self, step: Callable[[], Any]) -> list[Any]:
        """Run one step on all ranks; return what each got, or raise what any of them met."""
        error: BaseException | None = None
        value: Any = None
        try:
            value = step()
        except NotDurable as failure:
            error = self._error("the new file is in place, but its folder is not durable", failure)
            error.hint = "Save again: a crash of the machine may bring the older file back."
        except OSError as failure:
            error = self._error("the file cannot be written", failure)
        except BaseException as failure:
            error = failure
        try:
            known, values = Circle.of_all().exchange(error, value)
        except RuntimeError as failure:
            lost = self._error("another rank died or does not answer", failure)
            lost.hint = "The file is the old one, or the complete new one if that rank was last."
            raise lost from (error or failure)
        settle(known, error)
        if error is not None:
            raise error
        return [values[who] for who in sorted(values)]

    def _error(self, reason: str, cause: Exception) -> CheckpointError:
        error = CheckpointError(reason, file=self.path, found=str(cause).partition("\n")[0])
        error.__cause__ = cause
        return error

    def _lay_out(self) -> int:
        """On rank 0, which makes the frame; the others need to know how long the pickle is."""
        if self.rank != 0:
            return 0
        self.layout, length = self.contents.lay_out()
        return length

    def _open(self) -> None:
        """Let rank 0 create the file, with a name if some rank does not reach it without."""
        for named in (False, True):
            self.address = self._together(partial(self._create, named))[0]
            if all(self._together(self._is_in_reach)):
                return
        raise CheckpointError(
            "the folder is not the same on all ranks",
            file=self.path,
            hint="Save to a file system that all machines share.",
        )

    def _create(self, named: bool) -> Address | None:
        if self.rank != 0:
            return None
        if self.file is not None:
            self.file.close()
        assert self.path is not None
        self.file = Unfinished(self.path, named=named)
        os.truncate(self.file.descriptor, self.layout.nbytes)
        return self.file.address()

    def _is_in_reach(self) -> bool:
        assert self.address is not None
        try:
            os.close(self.address.open())
        except OSError:
            return False
        return True

    def _write(self, length: int) -> _Written:
        """Write this rank's parts of every payload, and sum them up where sums are wanted."""
        assert self.address is not None
        if self.rank != 0:
            self.layout, _ = self.contents.lay_out(length)
        nbytes, sums = 0, array("I")
        descriptor = self.address.open()
        try:
            for turn, (stored, start) in enumerate(self.layout.payloads):
                tensor = self.contents.state[stored.key]
                assert isinstance(tensor, torch.Tensor)
                total = PartialCrc(stored.nbytes)
                for offset, piece in parts_of(tensor, stored, turn):
                    view = _view(piece)
                    write_at(descriptor, view, start + offset)
                    nbytes += len(view)
                    if self.layout.checked:
                        total.add(offset, view)
                if self.layout.checked:
                    sums.append(total.value())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return _Written(nbytes, sums)

    def _commit(self, written: list[_Written]) -> None:
        """Write what is not weights, and let the file appear."""
        if self.file is None:
            return
        tensors = [stored for stored, _ in self.layout.payloads]
        expected, found = sum(t.nbytes for t in tensors), sum(part.nbytes for part in written)
        if found != expected:
            raise PlacementError(
                "a DTensor's mesh leaves out rank 0, so that some values are nobody's to write",
                file=self.path,
                expected=f"{expected} bytes of tensors",
                found=f"{found} bytes",
                hint="Put the tensors on a mesh that all ranks are in.",
            )
        sums = (
            [
                whole_crc(tensor.nbytes, parts)
                for tensor, *parts in zip(tensors, *(part.sums for part in written), strict=True)
            ]
            if self.layout.checked
            else []
        )
        for offset, data in self.layout.frame(sums):
            write_at(self.file.descriptor, data, offset)
        self.file.commit()


def _view(data: torch.Tensor) -> memoryview:
    """The tensor's memory; through NumPy it would need NumPy."""
    return memoryview((ctypes.c_char * data.numel()).from_address(data.data_ptr())).cast("B")

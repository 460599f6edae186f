"""One consolidated safetensors file from a mesh, every rank writing its own byte ranges of it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from torchlift.boxes import cut, row_major, runs
from torchlift.distributed.layout import Spans, everything, is_dtensor
from torchlift.distributed.shards import held, spans
from torchlift.distributed.status import exchange, settle, world_of
from torchlift.errors import CheckpointError, PlacementError
from torchlift.formats import Chunk, TensorEntry
from torchlift.formats.safetensors import DTYPES

_ALIGNMENT = 64
_PIECE = 16 << 20  # bytes that are moved from an accelerator at a time


def save_consolidated(
    obj: nn.Module | Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
) -> int:
    """Write a sharded model to one safetensors file that any program reads as an ordinary one.

    All ranks call it with the same names. Each writes the bytes of its own shards into one file,
    and of what several ranks hold each writes a part; no weight travels between ranks and none is
    put together in memory. The file appears under its name when every rank has written everything.
    The path must mean the same file on every rank.

    Args:
        obj: a module, whose ``state_dict`` is saved, or a mapping from name to tensor.
        path: of the file; one that exists is replaced.
        metadata: text to record in the header.

    Returns:
        Bytes that this rank wrote.

    Raises:
        CheckpointError: a rank failed, and every rank raises that; the previous file is untouched
            and nothing is left behind.
        PlacementError: a tensor holds partial sums, or its dtype has no name in the format.

    Example:
        >>> import torch, torchlift, tempfile, os
        >>> from torchlift.distributed import save_consolidated
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> save_consolidated(torch.nn.Linear(3, 2), path)
        32
        >>> torchlift.open(path).entries["weight"].shape
        (2, 3)
    """
    state = obj.state_dict() if isinstance(obj, nn.Module) else obj
    return _Saver(state, os.path.abspath(os.fspath(path)), dict(metadata or {})).run()


class _Saver:
    def __init__(
        self, state: Mapping[str, torch.Tensor], path: str, metadata: dict[str, str]
    ) -> None:
        self.state = dict(state)
        self.path = path
        self.part = f"{path}.part"
        self.metadata = metadata
        self.rank, self.world = world_of()

    def run(self) -> int:
        """The steps, after each of which every rank knows whether all are well."""
        try:
            header, entries = self._together(self._layout)
            # The name of the unfinished file comes from one rank: another save may be going on.
            self.part = self._together(lambda: self._create(header), shared=True)
            wrote = self._together(lambda: self._write(header, entries))
            self._together(self._commit)
        except BaseException:
            if self.rank == 0:
                with suppress(OSError):
                    os.unlink(self.part)
            raise
        return int(wrote)

    def _together(self, step: Callable[[], Any], *, shared: bool = False) -> Any:
        """Run one step on all ranks; raise on all what any of them met."""
        error: BaseException | None = None
        value = None
        try:
            value = step()
        except OSError as failure:
            error = CheckpointError(
                "the file cannot be written", file=self.path, found=str(failure)
            )
            error.__cause__ = failure
        except BaseException as failure:
            error = failure
        if self.world > 1:
            known, values = exchange(error, value if shared else None)
            settle(known, error)
            value = values[0] if shared else value
        if error is not None:
            raise error
        return value

    def _layout(self) -> tuple[bytes, dict[str, TensorEntry]]:
        """The header and the entries of the file, the same on every rank."""
        described: dict[str, Any] = {"__metadata__": self.metadata} if self.metadata else {}
        entries: dict[str, TensorEntry] = {}
        at = 0
        # Wide items first, so that every tensor is aligned to its item size.
        for key in sorted(self.state, key=lambda key: (-self.state[key].itemsize, key)):
            tensor = self.state[key]
            name = str(tensor.dtype).removeprefix("torch.")
            code = _CODES.get(name)
            if code is None or tensor.is_meta or tensor.layout != torch.strided:
                raise PlacementError(
                    "cannot be stored in a safetensors file",
                    entry=key,
                    expected="a dense tensor with values",
                    found=f"{name}, {tensor.layout}, on {tensor.device}",
                )
            shape = tuple(tensor.shape)
            nbytes = math.prod(shape) * tensor.itemsize
            chunk = Chunk(self.path, at, nbytes, (0,) * len(shape), shape)
            entries[key] = TensorEntry(
                key, name, shape, row_major(shape), nbytes, "cpu", key, (chunk,) if nbytes else ()
            )
            described[key] = {"dtype": code, "shape": shape, "data_offsets": [at, at + nbytes]}
            at += nbytes
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % _ALIGNMENT)
        return len(text).to_bytes(8, "little") + text, entries

    def _create(self, header: bytes) -> str:
        if self.rank != 0:
            return ""
        import tempfile

        folder, name = os.path.split(self.path)
        descriptor, part = tempfile.mkstemp(prefix=f".{name}.", suffix=".part", dir=folder)
        self.part = part
        with os.fdopen(descriptor, "wb") as file:
            file.write(header)
            total = sum(tensor.numel() * tensor.itemsize for tensor in self.state.values())
            file.truncate(len(header) + total)
        os.chmod(part, 0o666 & ~_umask())
        return part

    def _write(self, header: bytes, entries: Mapping[str, TensorEntry]) -> int:
        wrote = 0
        descriptor = os.open(self.part, os.O_WRONLY | getattr(os, "O_CLOEXEC", 0))
        try:
            for number, (key, entry) in enumerate(entries.items()):
                tensor = self.state[key].detach()
                local = held(tensor).contiguous().view(-1)
                for offset, piece in self._pieces(number, key, tensor, entry, local):
                    data = piece.cpu().contiguous().view(torch.uint8)
                    _pwrite(descriptor, data, len(header) + offset)
                    wrote += data.numel()
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return wrote

    def _pieces(
        self, number: int, key: str, tensor: torch.Tensor, entry: TensorEntry, local: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """(position in the data, values) of what this rank writes of a tensor."""
        if local.numel() == 0:
            return
        mine, replica, replicas = self._share(key, tensor)
        for at, run in enumerate(runs(cut(entry, mine))):
            step = max(1, _PIECE // entry.itemsize)
            for block, first in enumerate(range(0, run.numel, step)):
                if (number + at + block) % replicas == replica:
                    count = min(step, run.numel - first)
                    start = run.at + first
                    yield run.offset + first * entry.itemsize, local[start : start + count]

    def _share(self, key: str, tensor: torch.Tensor) -> tuple[Spans, int, int]:
        """(this rank's part, its number among those that hold the same part, how many they are)."""
        if not is_dtensor(tensor):
            return everything(tensor.shape), self.rank, self.world
        mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        if coordinate is None or 0 not in mesh.mesh.flatten().tolist():
            # Of several meshes side by side that hold the same, the one with the first rank writes.
            return tuple(() for _ in tensor.shape), 0, 1
        replica, replicas = 0, 1
        for axis, placement in enumerate(tensor.placements):
            if placement.is_replicate():
                replica = replica * mesh.size(axis) + coordinate[axis]
                replicas *= mesh.size(axis)
        return spans(tensor, key), replica, replicas

    def _commit(self) -> None:
        if self.rank != 0:
            return
        os.replace(self.part, self.path)
        if hasattr(os, "O_DIRECTORY"):
            descriptor = os.open(os.path.dirname(self.path), os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


_CODES = {name: code for code, name in DTYPES.items()}


def _pwrite(descriptor: int, data: torch.Tensor, offset: int) -> None:
    import ctypes

    view = memoryview((ctypes.c_char * data.numel()).from_address(data.data_ptr())).cast("B")
    while view:
        done = os.pwrite(descriptor, view, offset)
        view, offset = view[done:], offset + done


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

"""`open` and `Checkpoint`: an index as a lazy mapping of tensors.

This room knows torch tensors and byte ranges. It does not know models.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import TypeVar, overload

import torch

from torchlift._system import printable
from torchlift._transfer import Files
from torchlift.errors import CheckpointError, FormatError, UnsafeError, did_you_mean
from torchlift.formats import Chunk, Index, TensorEntry, read_index, steps_in_file, under
from torchlift.formats.gguf import BLOCKS
from torchlift.formats.summary import to_html, to_text

#: Values that are computed of quantised blocks at a time; the temporaries take some 16 MiB.
_DEQUANTIZED = 1 << 20

__all__ = ["Checkpoint", "TensorEntry", "open"]

_T = TypeVar("_T")


class Checkpoint(Mapping[str, torch.Tensor]):
    """A checkpoint as a read-only mapping from key to tensor; nothing is read until it is touched.

    Made by `torchlift.open`. A tensor taken from it is a view of a private memory map: it costs no
    anonymous memory until it is written to, and writing never changes the file.

    Attributes:
        path: the file or directory, absolute.
        format: ``"torch-zip"``, ``"torch-legacy"``, ``"torchscript"``, ``"pt2"``,
            ``"safetensors"``, ``"sharded"``, ``"dcp"``, ``"gguf"`` or ``"npz"``.
        entries: key -> `TensorEntry`, in file order.
        objects: key -> leaf that is not a tensor.
        metadata: what the format itself records.
        blocked: names of globals that only unpickling could rebuild; listed, never imported.

    Example:
        >>> import torch, torchlift, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> torch.save({"model": {"weight": torch.arange(6.0).view(2, 3)}, "step": 7}, path)
        >>> with torchlift.open(path) as ckpt:
        ...     print(list(ckpt), ckpt["model.weight"].shape, ckpt.objects["step"])
        ['model.weight'] torch.Size([2, 3]) 7
    """

    def __init__(self, index: Index, *, root: str | None = None) -> None:
        self._index = index if root is None else _select(index, root)
        self.root = root
        self.path = index.path
        self.format = index.format
        self.entries: Mapping[str, TensorEntry] = MappingProxyType(self._index.entries)
        self.objects: Mapping[str, object] = MappingProxyType(dict(self._index.objects))
        self.metadata: Mapping[str, str] = MappingProxyType(dict(self._index.metadata))
        self.blocked = tuple(self._index.blocked)
        self._views: MappedViews | None = MappedViews(self._index)

    def __getitem__(self, key: str) -> torch.Tensor:
        entry = self.entries.get(key)
        if entry is None:
            if key in self._index.blocked_keys:
                raise self.refusal(key)
            raise KeyError(_no_such_key(key, self.entries))
        return self.view(entry)

    @overload
    def get(self, key: str, /) -> torch.Tensor | None: ...
    @overload
    def get(self, key: str, /, default: torch.Tensor | _T) -> torch.Tensor | _T: ...
    def get(self, key: str, /, default: object = None) -> object:
        """Return the tensor of `key`, or `default`, without looking for names that are alike."""
        return self[key] if key in self.entries or key in self._index.blocked_keys else default

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, key: object) -> bool:
        return key in self.entries  # Mapping's would map the tensor to find out

    # By identity: a mapping would compare tensors, whose truth value is an error.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        root = "" if self.root is None else f", root={self.root!r}"
        return (
            f"<Checkpoint {self.path!r}{root}: {self.format}, "
            f"{len(self)} tensors, {self.nbytes} bytes>"
        )

    def __str__(self) -> str:
        return to_text(self._index)

    def _repr_html_(self) -> str:
        return to_html(self._index)

    @cached_property
    def nbytes(self) -> int:
        """Return the bytes of unique storage that the entries use."""
        return self._index.nbytes

    @cached_property
    def aliases(self) -> tuple[tuple[str, ...], ...]:
        """Return the groups of keys that share a storage, in file order."""
        return self._index.aliases

    @property
    def index(self) -> Index:
        """Return the index behind this mapping, restricted to `root`."""
        return self._index

    def view(self, entry: TensorEntry) -> torch.Tensor:
        """Return the tensor of `entry` as a view of this checkpoint's memory map.

        Entries with an equal ``storage`` come out as views of one torch storage, so that aliases
        stay aliases. A storage that is not aligned to its element size is copied to memory.

        Raises:
            IntegrityError: the file is gone, or not the one that was opened.
            CheckpointError: the checkpoint was closed.
        """
        if self._views is None:
            raise CheckpointError(
                "the checkpoint is closed",
                file=self.path,
                hint="Take what you need inside the with block, or open it again.",
            )
        return self._views.view(entry)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return all tensors as a plain dict of mapped views; aliases stay aliases."""
        return {key: self.view(entry) for key, entry in self.entries.items()}

    def refusal(self, key: str) -> UnsafeError:
        """Return the error that says why `key` cannot be had."""
        name = self._index.blocked_keys.get(key, "")
        return UnsafeError(
            f"only unpickling could rebuild it, through {name}, and that can run code",
            file=self.path,
            entry=key,
            hint="Pass root= to take a part of the file without it, or save it as plain tensors.",
        )

    @property
    def blocked_keys(self) -> Mapping[str, str]:
        """Return key -> name of the global that its value would have needed."""
        return self._index.blocked_keys

    def close(self) -> None:
        """Close the files. Tensors already taken stay valid; taking new ones is an error."""
        if self._views is not None:
            self._views.close()
            self._views = None


class MappedViews:
    """Tensors over private memory maps of a checkpoint's files, one torch storage per storage.

    Two of these over one index share nothing: writing to a tensor of one never shows in the other.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self.files = Files(index.files)
        self._bases: dict[tuple[str, torch.dtype | None], torch.UntypedStorage] = {}
        self._lock = threading.Lock()

    def view(self, entry: TensorEntry) -> torch.Tensor:
        """Return the tensor of `entry`; see `Checkpoint.view`."""
        dtype = dtype_of(entry, self.index.path)
        if not entry.chunks:
            return torch.empty_strided(entry.shape, entry.stride, dtype=dtype, device="cpu")
        if len(entry.chunks) > 1 or entry.is_quantized:
            made = torch.empty(entry.shape, dtype=dtype, device="cpu")
            return self.fill(made, entry)
        (chunk,) = entry.chunks
        if entry.storage not in self.index.storages:
            return self._box(entry, chunk, dtype)
        base = self._base(entry, dtype)
        first = (chunk.offset - self.index.storages[entry.storage].offset) // dtype.itemsize
        # set_ on a new tensor instead of view().as_strided(): storage sizes need not be a
        # multiple of the item size when entries of several dtypes share one. The device is named,
        # because a caller may have set another default.
        empty = torch.empty(0, dtype=dtype, device="cpu")
        return _shown(entry, empty.set_(base, first, entry.shape, entry.stride))

    def fill(self, target: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
        """Copy every chunk of `entry` out of the map into its box of `target`, which is returned.

        Casts and moves as `Tensor.copy_` does; no second copy of the tensor is made.
        """
        if entry.is_quantized:
            return self._dequantized(target, entry)
        dtype = dtype_of(entry, self.index.path)
        for chunk in entry.chunks:
            box = target
            for dim, (start, size) in enumerate(zip(chunk.start, chunk.shape, strict=True)):
                box = box.narrow(dim, start, size)
            steps = steps_in_file(entry, chunk)
            whole_rows = box.dim() and box.stride(-1) == steps[-1] == 1
            as_it_is = box.dtype == dtype and not entry.encoding
            if whole_rows and as_it_is and chunk.offset % dtype.itemsize:
                # As bytes, which may lie anywhere: as numbers, they would have to be cloned first.
                size = dtype.itemsize
                raw = self.files.mapped(chunk.file, chunk.offset, chunk.nbytes)
                shape = (*chunk.shape[:-1], chunk.shape[-1] * size)
                strides = (*(step * size for step in steps[:-1]), 1)
                box.view(torch.uint8).copy_(raw.as_strided(shape, strides))
            else:
                box.copy_(self._box(entry, chunk, dtype))
        return target

    def _dequantized(self, target: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
        """Write what blocks of quantised values stand for, some blocks at a time."""
        (name,), (chunk,) = entry.encoding, entry.chunks
        try:
            from gguf import GGMLQuantizationType, dequantize
        except ImportError as error:
            raise FormatError(
                f"quantised to {name}, and the package that knows how is not installed",
                file=self.index.path,
                entry=entry.key,
                hint="pip install gguf",
            ) from error
        flat = target if target.is_contiguous() else torch.empty_like(target).contiguous()
        flat = flat.view(-1)
        values, size = next(block[1:] for block in BLOCKS.values() if block[0] == name)
        raw = self.files.mapped(chunk.file, chunk.offset, chunk.nbytes).numpy().reshape(-1, size)
        step = max(1, _DEQUANTIZED // values)
        for start in range(0, len(raw), step):
            try:
                made = dequantize(raw[start : start + step], GGMLQuantizationType[name])
            except NotImplementedError as error:
                raise FormatError(
                    f"quantised to {name}, which the installed gguf cannot compute",
                    file=self.index.path,
                    entry=entry.key,
                ) from error
            part = torch.from_numpy(made).view(-1)
            flat[start * values :][: part.numel()].copy_(part)
        return target if target.is_contiguous() else target.copy_(flat.view(target.shape))

    def _box(self, entry: TensorEntry, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        """Return the box of a chunk as a view of the map, in a storage that is its run of bytes."""
        raw = self.files.mapped(chunk.file, chunk.offset, chunk.nbytes).untyped_storage()
        empty = torch.empty(0, dtype=dtype, device="cpu")
        steps = steps_in_file(entry, chunk)
        return _shown(entry, empty.set_(_usable(raw, entry, dtype), 0, chunk.shape, steps))

    def _base(self, entry: TensorEntry, dtype: torch.dtype) -> torch.UntypedStorage:
        # Of bytes in another order, each dtype has a copy of its own.
        key = (entry.storage, dtype if "big-endian" in entry.encoding else None)
        with self._lock:
            base = self._bases.get(key)
            if base is None:
                where = self.index.storages[entry.storage]
                raw = self.files.mapped(where.file, where.offset, where.nbytes).untyped_storage()
                base = self._bases[key] = _usable(raw, entry, dtype)
            elif base.data_ptr() % dtype.itemsize:  # a smaller dtype was the first to ask
                base = self._bases[key] = _usable(base, entry, dtype)
            return base

    def close(self) -> None:
        """Close the files; tensors already made stay valid."""
        self.files.close()
        self._bases.clear()


def _usable(
    raw: torch.UntypedStorage, entry: TensorEntry, dtype: torch.dtype
) -> torch.UntypedStorage:
    """Return stored bytes as numbers of this machine: as they are, or else a copy."""
    swapped = "big-endian" in entry.encoding
    # Loads at odd addresses are undefined behaviour in C++ and a fault on some CPUs.
    if raw.data_ptr() % dtype.itemsize or swapped:
        raw = raw.clone()  # type: ignore[no-untyped-call]
    if swapped:
        raw.byteswap(dtype)  # type: ignore[no-untyped-call]
    return raw


def _shown(entry: TensorEntry, stored: torch.Tensor) -> torch.Tensor:
    """Return the values of an entry, given the stored numbers."""
    if "conjugate" in entry.encoding:
        stored = stored.conj()
    # Not as a view, unlike in torch: what makes one is private.
    return stored.neg() if "negative" in entry.encoding else stored


def open(path: str | os.PathLike[str], *, root: str | None = None) -> Checkpoint:
    """Read the index of a checkpoint; run no code from it and read no weights.

    Args:
        path: a file or a directory; the format is found from the content. Files of ``torch.save``:
            zip files, the stream from before torch 1.6 and the older tar; TorchScript archives and
            exported programs (``.pt2``), of which only the weights are read; safetensors, Hugging
            Face's sharded ``*.index.json`` or a directory holding one; directories of
            ``torch.distributed.checkpoint`` (DCP); GGUF; numpy's npz and npy. Of a program, the
            state dict has its own names; what the program's text refers to comes below
            ``CONSTANTS``, and other attributes of TorchScript modules below ``ATTRIBUTES``.
        root: keep only what is under this container and strip it: ``root="model"`` turns
            ``model.layer.weight`` into ``layer.weight``. None keeps everything.

    Returns:
        The checkpoint, a lazy mapping and a context manager.

    Raises:
        FormatError: not a checkpoint, malformed, or `root` names nothing in it.
        UnsafeError: it reaches outside its directory, or is a pickled object instead of tensors.

    Example:
        >>> import torch, torchlift, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> torch.save({"model": torch.nn.Linear(3, 2).state_dict()}, path)
        >>> torchlift.open(path, root="model").entries["weight"].shape
        (2, 3)
    """
    return Checkpoint(read_index(path), root=root)


def dtype_of(entry: TensorEntry, path: str) -> torch.dtype:
    """Return the torch dtype of `entry`.

    Raises:
        FormatError: this version of torch has no such dtype.
    """
    found = getattr(torch, entry.dtype, None)
    if not isinstance(found, torch.dtype):
        raise FormatError(
            "its dtype is unknown to the installed torch",
            file=path,
            entry=entry.key,
            found=entry.dtype,
            hint="A newer torch may know it.",
        )
    return found


def _select(index: Index, root: str) -> Index:
    selected = under(index, root)
    if selected is None:
        if root in index.entries or root in index.objects:
            raise FormatError(
                "it is a leaf of the checkpoint, not a container",
                file=index.path,
                entry=root,
                hint="Leave root= out, or pass rename= to choose among the keys.",
            )
        tops = sorted({key.split(".", 1)[0] for key in [*index.entries, *index.objects]})
        raise FormatError(
            "there is no such container",
            file=index.path,
            entry=root,
            found="at the top: " + (", ".join(tops) or "nothing"),
            hint=did_you_mean(root, tops) or "Pass one of these as root=, or leave root out.",
        )
    return selected


def _no_such_key(key: object, keys: Iterable[str]) -> str:
    return f"{printable(repr(key), 300)}. {did_you_mean(str(key), keys)}".rstrip(". ")

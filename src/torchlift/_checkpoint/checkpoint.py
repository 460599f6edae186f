"""`open` and `Checkpoint`: an index as a lazy mapping of tensors.

This room knows torch tensors and byte ranges. It does not know models.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, BinaryIO, TypeVar, overload

import torch

from torchlift._checkpoint.kinds import (
    COMPUTED,
    Allow,
    classes,
    compute,
    made_of,
    values_of,
    with_arrays,
)
from torchlift._checkpoint.stats import TensorStats, stats_of
from torchlift._checkpoint.tree import Tree
from torchlift._model.dtensor import blocks
from torchlift._model.state import versioned
from torchlift._store.places import Stamp, place_of
from torchlift._store.url import Url, UrlStamp
from torchlift._system.memory import collection_paused
from torchlift._system.text import clipped_list, printable
from torchlift._transfer.files import Files, Place
from torchlift._transfer.reading import read_ahead, read_values
from torchlift.errors import (
    CheckpointError,
    FormatError,
    IntegrityError,
    did_you_mean,
    explain_calls,
)
from torchlift.formats.boxes import at_indices, grain, squeezed, steps_in_file
from torchlift.formats.dcp import resolved
from torchlift.formats.detect import read_index
from torchlift.formats.file_object import index_of_object
from torchlift.formats.flattening import MISSING, ROOT_OBJECT, below, blocked_error, select
from torchlift.formats.index import (
    UNRESOLVED,
    Chunk,
    Index,
    Record,
    Records,
    Storage,
    TensorEntry,
    allowing,
)
from torchlift.formats.summary import to_html, to_text

#: Elements that are compared or summed up at a time: they stay in the processor's cache in between,
#: which took 0.6 s for 87 MiB where blocks of a million took 1.1 s.
_BLOCK = 1 << 17

__all__ = ["Checkpoint", "TensorEntry", "open"]

#: A look-up takes 0.02 us, and asking torch for each tensor 0.2.
_DTYPES = {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}

_T = TypeVar("_T")


class Checkpoint(Mapping[str, torch.Tensor]):
    """A checkpoint: a read-only mapping from key to tensor.

    `torchlift.open` returns it. A tensor is read from the file when you first use its values. It
    is a view of a private memory map: it takes no allocated memory until you write to it, and
    writing never changes the file. Two kinds of tensors take allocated memory: compressed ones,
    and those that torch makes of others (sparse or quantised).

    As in a dict of tensors, a value that you write shows in the next ``ckpt[key]`` and
    ``state_dict()``. Clone a tensor first to avoid this. All other functions that get the
    checkpoint, such as `load`, `convert`, `save` and `diff`, use the values of the file.

    Do not overwrite the file in place while its tensors are mapped. A checkpoint that was opened
    by a path can be pickled: the other process opens that path again and checks the files.

    Attributes:
        path: Absolute path of the file or directory, or a name for a file object.
        format: ``"torch-zip"``, ``"torch-legacy"``, ``"torchscript"``,
            ``"safetensors"``, ``"sharded"``, ``"dcp"``, ``"gguf"``, ``"npz"`` or ``"zero"``.
        entries: Key -> `TensorEntry`, in file order.
        objects: Key -> value that is not a tensor.
        metadata: The text metadata of the format.
        blocked: Names of globals that only unpickling could rebuild. They are never imported.

    Example:
        >>> import torch, torchlift, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> torch.save({"model": {"weight": torch.arange(6.0).view(2, 3)}, "step": 7}, path)
        >>> with torchlift.open(path) as ckpt:
        ...     print(list(ckpt), ckpt["model.weight"].shape, ckpt.objects["step"])
        ['model.weight'] torch.Size([2, 3]) 7
    """

    def __init__(
        self, index: Index, *, root: str | None = None, allowed: Mapping[str, type] | None = None
    ) -> None:
        index = index if root is None else select(index, root)
        self._allowed = {} if allowed is None else allowed
        self._index = allowing(index, self._allowed)
        self.root = root
        self.path = index.path
        self.format = index.format
        self.entries: Mapping[str, TensorEntry] = MappingProxyType(self._index.entries)
        self.metadata: Mapping[str, str] = MappingProxyType(dict(self._index.metadata))
        self.blocked = tuple(self._index.blocked)
        self._views: MappedViews | None = MappedViews(self._index)
        self._kept = ExitStack()
        self._given: str | None = None  # the path that `open` was given

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._view(self._entry(key))

    def _entry(self, key: str) -> TensorEntry:
        """Return the entry of a tensor."""
        entry = self.entries.get(key)
        if entry is None:
            if key in self._index.blocked_keys:
                raise self._refusal(key)
            raise NoSuchKey(self._no_such_key(key))
        return entry

    @overload
    def get(self, key: str, /) -> torch.Tensor | None: ...
    @overload
    def get(self, key: str, /, default: torch.Tensor | _T) -> torch.Tensor | _T: ...
    def get(self, key: str, /, default: object = None) -> object:
        """Return the tensor of `key`, or `default` if the checkpoint lacks this key.

        Raises:
            UnsafeError, FormatError: If the key has a value that cannot be rebuilt.
        """
        # Without the search for similar names: it takes long, and the caller has a default.
        return self[key] if key in self.entries or key in self._index.blocked_keys else default

    def _no_such_key(self, key: object) -> str:
        index, name = self._index, printable(repr(key), 300)
        if key in index.objects:
            return f"{name} is not a tensor. Use ckpt.objects[{name}]"
        if any(k.startswith(f"{key}.") for k in (*index.entries, *index.objects)):
            return f"{name} is a container. Use ckpt.tree({name})"
        return f"{name}. {did_you_mean(str(key), self.entries)}".rstrip(". ")

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, key: object) -> bool:
        return key in self.entries  # Mapping's would map the tensor to find out

    # By identity: a mapping would compare tensors, whose truth value is an error.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[object, ...]:
        self._mapped()
        if self._given is None:
            raise CheckpointError(
                "the checkpoint cannot be pickled: it was opened from a file object",
                file=self.path,
                hint="Save the bytes to a file, and open its path.",
            )
        files = {**self._index.files, **self._index.guides}
        return _opened_again, (self._given, self.root, self._allowed, files)

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
        """Return the size of all storages, in bytes. A shared storage counts once."""
        return self._index.nbytes

    @cached_property
    def aliases(self) -> tuple[tuple[str, ...], ...]:
        """Return the groups of keys that share a storage, in file order."""
        return self._index.aliases

    @cached_property
    def objects(self) -> Mapping[str, object]:
        """Return key -> value that is not a tensor.

        Dtypes and devices are text here, unlike in `tree`. NumPy scalars are Python numbers.
        """
        arrays: dict[int, object] = {}
        return Records(self._index.objects, lambda key, value: with_arrays(value, arrays))

    def _mapped(self) -> MappedViews:
        """Return the tensors over this checkpoint's memory map.

        Raises:
            CheckpointError: If the checkpoint is closed.
        """
        if self._views is None:
            raise CheckpointError(
                "the checkpoint is closed",
                file=self.path,
                hint="Take what you need inside the with block, or open it again.",
            )
        return self._views

    def _anew(self) -> Checkpoint:
        """Return the same checkpoint over maps of its own, which have the values of the files.

        The caller may have written to tensors of this one.

        Raises:
            CheckpointError: If the checkpoint is closed.
        """
        self._mapped()
        return Checkpoint(self._index, allowed=self._allowed)

    def _view(self, entry: TensorEntry) -> torch.Tensor:
        return self._mapped().view(entry)

    def stats(self, key: str) -> TensorStats:
        """Compute statistics of a tensor's values in the file, block by block.

        Args:
            key: Key of a tensor of any dtype.

        Raises:
            FormatError: If the package that computes quantised blocks is not installed.
            IntegrityError: If the file was deleted or replaced.

        Example:
            >>> import torch, torchlift, tempfile, os
            >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
            >>> torch.save({"w": torch.tensor([1.0, 3.0, float("nan")])}, path)
            >>> torchlift.open(path).stats("w")
            TensorStats(min=1.0, max=3.0, mean=2.0, std=1.0, nan=1, inf=0)
        """
        entry = self._entry(key)
        with self._anew() as ckpt:
            return stats_of(ckpt._mapped().blocks(entry))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return all tensors as a dict of mapped views. Aliases still share their storage.

        Its ``_metadata`` has the versions of modules, as in torch, if the file has them.
        """
        view, found = self._mapped().view, dict[str, torch.Tensor]()
        made: dict[object, torch.Tensor] = {}
        with collection_paused():
            if self._mapped().is_away:
                self._mapped().ahead(self._index.entries.values())
            for key, entry in self._index.entries.items():
                # Joined in memory. Once for all keys: two copies would not be aliases.
                if len(entry.chunks) > 1:
                    spot = entry.storage, entry.chunks
                    made[spot] = made[spot] if spot in made else view(entry)
                    found[key] = made[spot]
                else:
                    found[key] = view(entry)
        return versioned(found, self._index.module_versions or None)

    def tree(self, root: str | None = None) -> Any:
        """Return the containers as they were saved: integer keys, lists, dtypes, devices.

        Args:
            root: Name of one container or value to return. None: everything.
                See :ref:`arg-root`.

        Returns:
            The object that was saved, with mapped tensors. Formats without containers, such as
            safetensors, give a flat dict. DCP stores integer keys as text.

        Raises:
            FormatError: If `root` does not exist in the checkpoint.
            UnsafeError: If only running code could rebuild one of the values.

        Example:
            >>> import torch, torchlift, tempfile, os
            >>> path = os.path.join(tempfile.mkdtemp(), "training.pt")
            >>> torch.save({"groups": [{"params": [0, 1], "lr": 0.1}], "type": torch.half}, path)
            >>> torchlift.open(path).tree()
            {'groups': [{'params': [0, 1], 'lr': 0.1}], 'type': torch.float16}
        """
        return self._tree(root, self._view)

    def _tree(self, root: str | None, view: Callable[[TensorEntry], object]) -> Any:
        """Return the containers, with the result of `view` for each entry of a tensor."""
        tree = self._index.tree
        if tree is not None and (root is None or below(*tree, root, self.path) is not MISSING):
            refusal = partial(self._refusal, loading=False)
            return Tree(self._index, view, refusal).rebuild(root)
        index = self._index if root is None else select(self._index, root)
        return {**{key: view(e) for key, e in index.entries.items()}, **index.objects}

    def _refusal(self, key: str, *, loading: bool = True, several: bool = False) -> CheckpointError:
        """Return the error that explains why the value of a key cannot be rebuilt.

        Args:
            key: The key. An empty key means the whole file.
            loading: Whether the hint may name arguments of a load.
            several: Whether the load has to leave out several such values.
        """
        return blocked_error(self._index, key or ROOT_OBJECT, loading=loading, several=several)

    @property
    def blocked_keys(self) -> Mapping[str, str]:
        """Return key -> the reason why its value cannot be rebuilt.

        The reason is the name of a global that only unpickling could call, or a text.
        ``"a name of its own"``: two values have this key. ``"the slices of the other ranks"``:
        the file holds one rank's slice. ``"one value on all ranks"``: the ranks saved different
        values.
        """
        return self._index.blocked_keys

    @property
    def blocked_tensors(self) -> Mapping[str, int]:
        """Return key -> number of tensors in a value that cannot be rebuilt.

        A tensor in several values counts for the first one. Values without tensors are not listed.
        """
        return self._index.blocked_tensors

    def close(self) -> None:
        """Close the files. Tensors that you have stay valid. Taking another one is an error."""
        if self._views is not None:
            self._views.close()
            self._views = None
            self._kept.close()


class NoSuchKey(KeyError):
    """A key that the checkpoint lacks. Unlike `KeyError`, it shows its text without quotes."""

    __str__ = Exception.__str__


class MappedViews:
    """Tensors over private memory maps of a checkpoint's files, one torch storage per storage.

    Two of these over one index share nothing: writing to a tensor of one never shows in the other.

    Attributes:
        is_away: Whether a file is behind a URL. Its tensors are in allocated memory.
    """

    def __init__(self, index: Index) -> None:
        self.index = index
        self.files, self._storages = Files(index.files), index.storages
        self.is_away = any(isinstance(file, Url) for file in index.files)
        self._bases: dict[str, torch.UntypedStorage] = {}
        self._resolved: dict[tuple[str, tuple[Chunk, ...]], TensorEntry] = {}
        self._last: tuple[Record, bytearray] | None = None
        self._lock = threading.Lock()

    def view(self, entry: TensorEntry) -> torch.Tensor:
        """Return the tensor of `entry` as a view of the map.

        Entries with an equal ``storage`` become views of one torch storage, so that aliases
        stay aliases. A storage that is not aligned to its element size is copied to memory.

        Raises:
            IntegrityError: If the file was deleted or replaced.
        """
        dtype = _DTYPES.get(entry.dtype) or dtype_of(entry, self.index.path)
        if entry.encoding and UNRESOLVED in entry.encoding:
            (entry,) = self.resolved([entry])
        if entry.kind is not None:
            inner = [self.view(item) for item in entry.kind.tensors]
            return made_of(entry, dtype, inner, self.index.path)
        if not entry.chunks:
            return torch.empty_strided(entry.shape, entry.stride, dtype=dtype, device="cpu")
        if len(entry.chunks) > 1 or (entry.encoding and not entry.is_plain):
            return self.fill(torch.empty(entry.shape, dtype=dtype, device="cpu"), entry)
        (chunk,) = entry.chunks
        storage = self._storages.get(entry.storage) if entry.storage else None
        if storage is None:
            return self._box(entry, chunk, dtype)
        if not entry.encoding and (made := self._map_first(entry, storage, dtype)) is not None:
            return made
        base = self._base(entry, storage, dtype)
        first = (chunk.offset - storage.offset) // dtype.itemsize
        # set_ on a new tensor instead of view().as_strided(): storage sizes need not be a
        # multiple of the item size when entries of several dtypes share one. The device is named,
        # because a caller may have set another default.
        empty = torch.empty(0, dtype=dtype, device="cpu")
        return _shown(entry, empty.set_(base, first, entry.shape, entry.stride))

    def _map_first(
        self, entry: TensorEntry, where: Storage, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return the first tensor over a storage. None if it is not the first, or not aligned.

        It takes half as many calls of torch as a later one, which counts for 90,000 tensors.
        """
        key, size = entry.storage, dtype.itemsize
        if key in self._bases or where.offset % size or where.nbytes % size or where.packed:
            return None
        if isinstance(where.file, Url):
            return None
        made = self.files.map(where.file, where.offset, where.nbytes, dtype)
        base = made.untyped_storage()
        if self._bases.setdefault(key, base) is not base:  # another thread was faster
            return None
        if entry.stride == (1,) and entry.shape == made.shape:  # a bias
            return made
        first = (entry.chunks[0].offset - where.offset) // size
        return made.as_strided_(entry.shape, entry.stride, first)

    def fill(self, target: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
        """Copy every chunk of `entry` from the map into its box of `target`. Return `target`.

        Casts and moves as `Tensor.copy_` does, without a second copy of the tensor.
        """
        if not entry.is_plain:
            for chunk in entry.chunks:
                spans = zip(chunk.start, chunk.shape, strict=True)
                box = target[tuple(slice(start, start + size) for start, size in spans)]
                raw = read_values(self.files, chunk.file, chunk.offset, chunk.nbytes)
                compute(box, entry, chunk, raw, self.index.path)
            return target
        dtype = dtype_of(entry, self.index.path)
        for chunk in entry.chunks:
            box = target
            for dim, (start, size) in enumerate(zip(chunk.start, chunk.shape, strict=True)):
                box = box.narrow(dim, start, size)
            steps = steps_in_file(entry, chunk)
            in_rows = box.dim() and box.stride(-1) == 1
            as_it_is = box.dtype == dtype and not entry.encoding
            if in_rows and as_it_is and chunk.offset % dtype.itemsize:
                # As bytes, which may lie anywhere: as numbers, they would have to be cloned first,
                # those between the rows of a transposed matrix too.
                size = dtype.itemsize
                raw = read_values(self.files, chunk.file, chunk.offset, chunk.nbytes)
                shape, strides = (*chunk.shape, size), (*(step * size for step in steps), 1)
                raw_box = box.view(torch.uint8)
                spread = raw_box.view((*raw_box.shape[:-1], *shape[-2:]))
                spread.copy_(raw.as_strided(shape, strides))
            else:
                box.copy_(self._box(entry, chunk, dtype))
        return target

    def blocks(self, entry: TensorEntry) -> Iterator[torch.Tensor]:
        """Yield the elements of `entry` in blocks, in any order. Nothing is kept in memory."""
        if UNRESOLVED in entry.encoding:
            (entry,) = self.resolved([entry])
        if entry.kind is not None:
            for part in values_of(entry, self.view(entry), self.index.path):
                yield from blocks_of(part)
            return
        if not entry.is_plain:
            yield from self._computed(entry)
            return
        dtype = dtype_of(entry, self.index.path)
        for chunk in entry.chunks:
            box = self._box(entry, chunk, dtype, anew=True)
            # As the bytes lie: read across its columns, a transposed one took 20 times as long.
            dims = sorted(range(box.dim()), key=box.stride, reverse=True)
            yield from blocks_of(box.permute(dims))
            self.files.check([chunk.file])

    def _computed(self, entry: TensorEntry) -> Iterator[torch.Tensor]:
        """Yield the elements of an entry that is not plain in flat blocks, in order."""
        size, together = (entry.shape[0], grain(entry, 0)) if entry.shape else (1, 1)
        if entry.numel <= COMPUTED or 1 < together >= size:
            yield self.view(entry).view(-1)
        elif size == 1:
            yield from self._computed(squeezed(entry, 0))
        else:
            rows = COMPUTED * size // entry.numel // together * together or together
            for start in range(0, size, rows):
                some = range(start, min(start + rows, size))
                yield from self._computed(at_indices(entry, 0, some))

    def _box(
        self, entry: TensorEntry, chunk: Chunk, dtype: torch.dtype, *, anew: bool = False
    ) -> torch.Tensor:
        """Return the box of a chunk as a view of the map, in a storage that is its run of bytes."""
        raw = self._stored(chunk, anew=anew)
        empty = torch.empty(0, dtype=dtype, device="cpu")
        steps = steps_in_file(entry, chunk)
        return _shown(entry, empty.set_(_usable(raw, entry, dtype), 0, chunk.shape, steps))

    def _base(self, entry: TensorEntry, where: Storage, dtype: torch.dtype) -> torch.UntypedStorage:
        key = entry.storage
        with self._lock:
            base = self._bases.get(key)
            if base is None:
                base = _usable(self._stored(where, anew=True), entry, dtype)
                if self._is_kept(entry, where):
                    self._bases[key] = base
            elif base.data_ptr() % dtype.itemsize:  # a smaller dtype was the first to ask
                base = self._bases[key] = _usable(base, entry, dtype)
            return base

    def _stored(self, place: Chunk | Storage, *, anew: bool) -> torch.UntypedStorage:
        """Return stored bytes as a storage: of the map, or of memory that they are inflated into.

        Args:
            place: The place of the bytes.
            anew: Whether the record is inflated again. If False, a slice shares the memory of the
                slice before it.
        """
        record = place.packed
        if record is None:
            return read_values(self.files, place.file, place.offset, place.nbytes).untyped_storage()
        last = self._last
        if last is not None and last[0] == record and not anew:
            whole = last[1]
        else:
            self._last = last = None  # before there is another one
            whole = self.files.inflate(place.file, record)
            if not anew:
                self._last = record, whole
        count, at = place.nbytes, place.offset
        return torch.frombuffer(whole, dtype=torch.uint8, count=count, offset=at).untyped_storage()

    def _is_kept(self, entry: TensorEntry, where: Storage) -> bool:
        """Return whether other entries use the storage that was made for an entry."""
        # A compressed array belongs to one entry, and each request inflates it again.
        is_mapped = where.packed is None and not isinstance(where.file, Url)
        return is_mapped or self._counts[entry.storage] > 1

    @cached_property
    def _counts(self) -> Counter[str]:
        return Counter(each.storage for each in plain_parts(self.index.entries.values()))

    def resolved(self, entries: Iterable[TensorEntry]) -> list[TensorEntry]:
        """Return entries whose chunks say where their numbers are, as `formats.dcp.resolved` does.

        Args:
            entries: Entries of the index, with all of their chunks or with some.

        Raises:
            CheckpointError: If an item cannot be read, or differs from the index.
        """
        entries, known = [*entries], self._resolved
        todo = {
            entry.key: entry
            for entry in entries
            if UNRESOLVED in entry.encoding and (entry.key, entry.chunks) not in known
        }
        if todo:
            found = resolved(replace(self.index, tensors=todo, hidden={}, storages={}))
            with self._lock:
                self.files.stamps = {**self.files.stamps, **found.files}
                self._storages = {**self._storages, **found.storages}
                known.update({(e.key, e.chunks): found.entries[e.key] for e in todo.values()})
        return [known.get((entry.key, entry.chunks), entry) for entry in entries]

    def ahead(self, entries: Iterable[TensorEntry]) -> None:
        """Read the bytes of several tensors behind URLs in one parallel transfer."""
        wanted = set[Place]()
        for entry in self.resolved(plain_parts(entries)):
            where = self._storages.get(entry.storage) if len(entry.chunks) == 1 else None
            places: Sequence[Chunk | Storage] = entry.chunks
            if where is not None and (entry.is_plain or not entry.encoding):
                # Several entries may look into it, and the first of them has it made.
                places = [] if entry.storage in self._bases else [where]
            wanted |= {
                Place(place.file, place.offset, place.nbytes)
                for place in places
                if isinstance(place.file, Url) and place.packed is None and place.nbytes
            }
        read_ahead(self.files, wanted - self.files.ahead.keys())

    def close(self) -> None:
        """Close the files. Tensors that were made stay valid."""
        self.files.close()
        self._bases.clear()
        self._last = None


def plain_parts(entries: Iterable[TensorEntry]) -> Iterator[TensorEntry]:
    """Yield the entries that have bytes: an entry itself, or those that it is made of."""
    for entry in entries:
        if entry.kind is None:
            yield entry
        else:
            yield from plain_parts(entry.kind.tensors)


def _usable(
    raw: torch.UntypedStorage, entry: TensorEntry, dtype: torch.dtype
) -> torch.UntypedStorage:
    """Return stored bytes as aligned numbers in this machine's byte order, copied if necessary."""
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
    # A copy, unlike in torch: the function that makes such a view is private.
    return stored.neg() if "negative" in entry.encoding else stored


def blocks_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor in order, in flat blocks.

    The shape alone decides where a block ends, so two tensors of one shape give equal blocks.
    At most one block is copied, whatever the strides are.

    Example:
        >>> [block.tolist() for block in blocks_of(torch.arange(6).view(2, 3).T)]
        [[0, 3, 1, 4, 2, 5]]
    """
    for block in blocks(tensor.shape, _BLOCK):
        yield tensor[tuple(slice(*span) for span in block)].reshape(-1)


@explain_calls
def open(
    path: str | os.PathLike[str] | BinaryIO,
    *,
    root: str | None = None,
    allow_classes: Allow = (),
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Open a checkpoint without running its code or reading its weights.

    The content of the file selects the format, not its suffix. torchlift reads files of
    ``torch.save``, TorchScript, safetensors, Hugging Face indexes, GGUF and NumPy files. It also
    reads folders of DCP, of DeepSpeed ZeRO (weights only) and of FSDP ranks, whose slices it
    joins. See :doc:`/formats`.

    Do not overwrite the file in place while its tensors are mapped. See "How loading works".

    Args:
        path: A file, a directory, a URL, or a seekable binary file object, which is read from its
            current position.
        root: Name of the container to keep. ``"model"`` turns ``model.weight`` into ``weight``.
            None keeps everything. See :ref:`arg-root`.
        allow_classes: Tensor subclasses that may be rebuilt, such as ``[Int8Tensor]``.
            See :ref:`arg-allow-classes`.
        storage_options: Options for the URL, such as ``headers`` and ``timeout``.
            See :ref:`arg-storage-options`.

    Returns:
        The checkpoint: a lazy mapping, and a context manager that closes it.

    Raises:
        FormatError: If the file is malformed, is not a checkpoint, or lacks `root`.
        UnsafeError: If a file leads out of its directory, or holds a pickled object only.

    Example:
        >>> import torch, torchlift, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> torch.save({"model": torch.nn.Linear(3, 2).state_dict()}, path)
        >>> torchlift.open(path, root="model").entries["weight"].shape
        (2, 3)
    """
    if isinstance(path, bytes) and (0 in path or len(path) > 4096):
        raise TypeError("path is the content of a file. Pass its path, or io.BytesIO(content)")
    allowed = classes(allow_classes)
    if isinstance(path, (str, bytes, os.PathLike)):
        place = place_of(path, storage_options) if path else ""
        # The path as it was passed: the hint for a missing file depends on its spelling.
        index = read_index(place if isinstance(place, Url) else path)
        made = Checkpoint(index, root=root, allowed=allowed)
        made._given = place
        return made
    if not hasattr(path, "read"):
        kind = type(path).__name__
        way = f". Use the state_dict() of this {kind}" if hasattr(path, "state_dict") else ""
        raise TypeError(f"expected a path or a binary file object, not {kind}{way}")
    with ExitStack() as stack:
        made = Checkpoint(stack.enter_context(index_of_object(path)), root=root, allowed=allowed)
        made._kept = stack.pop_all()
    return made


def _opened_again(
    path: str, root: str | None, allowed: Mapping[str, type], files: Mapping[str, Stamp]
) -> Checkpoint:
    """Open a checkpoint that another process has pickled.

    Raises:
        IntegrityError: If a file was deleted or replaced since.
    """
    # Before the index is read: a replaced file may not be a checkpoint any more.
    for file, stamp in files.items():
        if isinstance(stamp, UrlStamp):
            stamp.check(file)
            continue
        with Files({file: stamp}) as one:
            one.descriptor(file)
    made = open(path, root=root, allow_classes=[(kind, name) for name, kind in allowed.items()])
    found = {**made._index.files, **made._index.guides}
    # HTTP lists no folders: a size below 0 means that one side has not looked at the file yet.
    both = found.keys() & files.keys()
    pairs = [(found[file], files[file]) for file in both]
    is_other = any(a != b and min(a.size, b.size) >= 0 for a, b in pairs)
    if is_other or len(both) < max(len(found), len(files)):
        raise IntegrityError(
            "the checkpoint consists of other files than when it was opened",
            file=path,
            expected=clipped_list(files),
            found=clipped_list(found),
            hint="Open the checkpoint again once nobody writes to it.",
        )
    return made


def dtype_of(entry: TensorEntry, path: str) -> torch.dtype:
    """Return the torch dtype of `entry`.

    Raises:
        FormatError: If the installed torch lacks this dtype.
    """
    found = _DTYPES.get(entry.dtype)
    if found is None:
        raise FormatError(
            "the installed torch lacks the dtype of this tensor",
            file=path,
            entry=entry.key,
            found=entry.dtype,
            hint="Install a newer torch.",
        )
    return found

"""Let ``torch.distributed.checkpoint`` load what `torchlift.open` reads: `CheckpointReader`."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from torchlift._checkpoint.checkpoint import Checkpoint, MappedViews, dtype_of
from torchlift._checkpoint.checkpoint import open as open_checkpoint
from torchlift._model.dtensor import Spans
from torchlift._model.ranks import portable, world_of
from torchlift._sources.tensors import Copy, FileTensor, copy_values, resolve
from torchlift._store.places import is_url, place_of
from torchlift._system.containers import leaves
from torchlift.errors import CheckpointError, PlacementError
from torchlift.formats.index import TensorEntry


class CheckpointReader(StorageReader):
    """Read a checkpoint of any format for ``torch.distributed.checkpoint.load``.

    The checkpoint may be a ``.pt`` file, sharded safetensors, or a DCP folder that was saved on
    another number of ranks. Each rank reads the byte ranges of its own shards, on any mesh. No code
    in the checkpoint runs. Each rank fetches its bytes of a URL by itself.

    Args:
        path: A path or URL that `torchlift.open` reads, or the checkpoint itself.
        root: The container to load, whose name is removed from the keys. See :ref:`arg-root`.
        storage_options: Options of a URL. See :ref:`arg-storage-options`.

    Raises:
        FormatError: If `path` is not a checkpoint. In a process group, ``load`` raises it on every
            rank as torch's ``CheckpointException``.

    Example:
        >>> import torch, torch.distributed.checkpoint as dcp, tempfile, os, warnings
        >>> from torchlift.distributed import CheckpointReader
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> torch.save({"model": {"weight": torch.arange(4.0)}}, path)
        >>> state = {"weight": torch.zeros(4)}
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # torch warns if there is no process group
        ...     dcp.load(state, storage_reader=CheckpointReader(path, root="model"))
        >>> state["weight"]
        tensor([0., 1., 2., 3.])
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Checkpoint,
        root: str | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.root, self._options = root, storage_options
        self._open(path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start again, with another checkpoint if one is passed."""
        if checkpoint_id is not None:
            self._open(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return DCP's description of the checkpoint.

        Raises:
            CheckpointError: If it cannot be opened.
        """
        if self._problem is not None:
            raise self._problem
        described: dict[str, Any] = {
            key: TensorStorageMetadata(
                TensorProperties(dtype=dtype_of(entry, self.path)),
                torch.Size(entry.shape),
                [
                    ChunkStorageMetadata(torch.Size(start), torch.Size(shape))
                    for start, shape in _boxes(entry)
                ],
            )
            for key, entry in self._ckpt.entries.items()
            if entry.kind is None and hasattr(torch, entry.dtype)
        }
        # These are listed, so that a plan that needs one is refused by name, and not as missing.
        rest = [key for key in self._ckpt.entries if key not in described]
        objects = self._ckpt.objects
        # torch looks for the values of a list, or for the list, as its version 2.3 saved it.
        plain = (*objects, *self._lists(), *self._ckpt.blocked_keys, *rest)
        described.update({key: BytesStorageMetadata() for key in plain})
        return Metadata(
            described,
            planner_data={key: (key,) for key in described},
            storage_data={},
            storage_meta=StorageMeta(checkpoint_id=self.path),
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing. The index is enough."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is, before anything is read.

        Raises:
            UnsafeError: If it needs a value that only unpickling could rebuild.
            FormatError: If it needs a tensor whose dtype the installed torch lacks.
            PlacementError: If it needs a tensor that is sparse, quantised, nested or on meta.
        """
        for item in plan.items:
            key = item.storage_index.fqn
            entry = self._ckpt.entries.get(key)
            if key in self._ckpt.blocked_keys:
                raise self._ckpt._refusal(key)
            if entry is not None and entry.kind is not None:
                raise PlacementError(
                    f"the file has a {entry.kind} tensor, which DCP cannot load",
                    file=self.path,
                    entry=key,
                    expected="a dense tensor with values",
                    hint="Read it with torchlift.open(path)[key], and set it yourself.",
                )
            if entry is not None:
                dtype_of(entry, self.path)  # which raises where torch has none
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items in one parallel transfer, and pass them to the planner.

        Raises:
            IntegrityError: If a file changed or could not be read.
            KeyError: If a planner ignores the metadata and needs a missing key.
        """
        views = MappedViews(self._ckpt._index)
        targets: list[tuple[ReadItem, Copy]] = []
        try:
            for item in plan.items:
                key = item.storage_index.fqn
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, self._object(key))
                    continue
                source = FileTensor(key, self._ckpt.entries[key], views)
                target = planner.resolve_tensor(item).detach()
                targets.append((item, Copy(source, target, _spans_of(item))))
            copies = [copy for _, copy in targets]
            resolve((copy.source, copy.spans) for copy in copies)
            copy_values(copies)
        finally:
            views.close()
        for item, copy in targets:
            planner.commit_tensor(item, copy.target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether the file or folder exists. A URL is only checked when it is opened."""
        return is_url(checkpoint_id) or os.path.exists(place_of(checkpoint_id))

    def _open(self, path: str | os.PathLike[str] | Checkpoint) -> None:
        self._problem: CheckpointError | None = None
        self._parts: dict[str, str] | None = None
        self._read: tuple[str | None, dict[str, object]] = None, {}  # the last list
        self.path = path.path if isinstance(path, Checkpoint) else os.fspath(path)
        try:
            if isinstance(path, Checkpoint):
                self._ckpt = Checkpoint(path._index, root=self.root)
            else:
                self._ckpt = open_checkpoint(path, root=self.root, storage_options=self._options)
            self.path = self._ckpt.path
        except CheckpointError as error:
            if world_of()[1] == 1:
                raise
            # read_metadata raises it, where torch sends errors to all ranks. Here it would leave
            # the other ranks waiting.
            self._problem = portable(error)

    def _lists(self) -> dict[str, str]:
        """Return part of a list -> the key of the list."""
        if self._parts is None:
            objects = self._ckpt.objects.items()
            self._parts = {
                part: key for key, value in objects for part in take_apart_list(key, value)
            }
        return self._parts

    def _object(self, key: str) -> io.BytesIO:
        name = key if key in self._ckpt.objects else self._lists().get(key, key)
        if name != self._read[0]:
            value = self._ckpt.objects[name]
            if self._ckpt._index.tree is not None and str in map(type, leaves([value]).values()):
                # The objects of an index have text in place of dtypes.
                value = self._ckpt._tree(name, self._ckpt._view)
            self._read = name, {**take_apart_list(name, value), name: value}
        if key not in self._read[1]:  # in an OrderedDict, which is a dict in the index
            self._read[1][key] = self._ckpt._tree(key, self._ckpt._view)
        stream = io.BytesIO()
        torch.save(self._read[1][key], stream)
        stream.seek(0)
        return stream


def _spans_of(item: ReadItem) -> Spans:
    """Return the slice of a tensor that an item needs."""
    # Offsets count from the chunk that the item names.
    start = item.storage_index.offset or (0,) * len(item.lengths)
    first = [a + b for a, b in zip(start, item.storage_offsets, strict=True)]
    return tuple(((a, a + n),) for a, n in zip(first, item.lengths, strict=True))


def _boxes(entry: TensorEntry) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (offset, shape) of each chunk of a tensor."""
    if len(entry.chunks) > 1:
        return [(chunk.start, chunk.shape) for chunk in entry.chunks]
    return [((0,) * len(entry.shape), entry.shape)]


class _ListItem(NamedTuple):
    """A plain value in a list.

    Attributes:
        path: its path below the list.
        value: the value.
    """

    path: tuple[str | int, ...]
    value: object


def take_apart_list(key: str, value: object) -> dict[str, object]:
    """Return the values in a plain list with dicts by their keys, as torch's DCP looks for them.

    Another value has its own key. So has a list whose values would not have keys of their own.
    Parts would lose the class of a dict and names that are not text, so such a list is one value.

    Example:
        >>> [*take_apart_list("groups", [{"lr": 0.1, "betas": (0.5, 0.9)}])]
        ['groups.0.lr', 'groups.0.betas']
    """
    named: dict[str, object] = {}
    size, known = 0, dict[int, bool]()
    for item in _items_in((), value, known):
        name = ".".join(map(str, (key, *item.path)))
        size += len(name)
        # A small file can hold one list a million times. Its names would fill the memory.
        is_long = size > _NAMES or len(named) >= _PARTS
        is_other_dict = isinstance(item.value, dict) and bool(item.value)
        if name in named or is_long or is_other_dict or len(item.path) > _DEPTH:
            return {key: value}
        named[name] = item.value
    return named


#: Characters of the names of a list that is taken apart, and how deep its values may be.
_NAMES, _DEPTH = 1 << 24, 50
#: Values of such a list. A list with more of them, such as the losses of each step, is one value.
_PARTS = 1 << 13


def _items_in(
    path: tuple[str | int, ...], value: object, known: dict[int, bool]
) -> Iterator[_ListItem]:
    items: Iterable[tuple[str | int, object]] = ()
    if len(path) > _DEPTH:
        pass
    elif isinstance(value, list) and _has_dict(value, known):
        items = enumerate(value)
    elif path and type(value) is dict and all(type(name) is str for name in value):
        items = value.items()
    if not items:
        yield _ListItem(path, value)
    for name, item in items:
        yield from _items_in((*path, name), item, known)


def _has_dict(value: object, known: dict[int, bool]) -> bool:
    """Return whether a list contains a dict, perhaps in a list. Each list is searched once."""
    if not isinstance(value, list):
        return isinstance(value, dict)
    if id(value) not in known:
        known[id(value)] = False  # a list may contain itself
        known[id(value)] = any(_has_dict(item, known) for item in value)
    return known[id(value)]

"""Let ``torch.distributed.checkpoint`` load what `torchlift.open` reads: `CheckpointReader`."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

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
from torchlift._sources.tensors import Copy, FileTensor, copy_values
from torchlift._store.places import is_url
from torchlift.errors import CheckpointError, PlacementError
from torchlift.formats.index import TensorEntry


class CheckpointReader(StorageReader):
    """Read a checkpoint of any format for ``torch.distributed.checkpoint.load``.

    The state dict may be laid out over any mesh. Each rank reads the byte ranges of its own shards,
    whether the checkpoint is one ``.pt`` file, sharded safetensors, or a DCP directory that was
    saved on another number of ranks; nothing in it is executed. Of a URL, ranks that need the same
    bytes fetch them each: DCP leaves no place for them to agree on one.

    Args:
        path: a path that `torchlift.open` reads, or the checkpoint itself.
        root: keep only what is under this container of the checkpoint, and strip it.
        storage_options: of a URL, as for `torchlift.open`.

    Raises:
        FormatError: `path` is not a checkpoint. In a process group ``load`` raises that, on every
            rank, as torch's ``CheckpointException``: a rank that failed here would leave the others
            waiting for it.

    Example:
        >>> import torch, torch.distributed.checkpoint as dcp, tempfile, os, warnings
        >>> from torchlift.distributed import CheckpointReader
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> torch.save({"model": {"weight": torch.arange(4.0)}}, path)
        >>> state = {"weight": torch.zeros(4)}
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # torch says that there is no process group
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
        """Start over, with another checkpoint where one is named."""
        if checkpoint_id is not None:
            self._open(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Describe what the checkpoint holds in the terms of DCP.

        Raises:
            CheckpointError: it could not be opened.
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
        # What is refused is there, and not missing: a plan that asks for it is refused by name.
        rest = [key for key in self._ckpt.entries if key not in described]
        plain = (*self._ckpt.objects, *self._ckpt.blocked_keys, *rest)
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
        """Do nothing: the index is all that is needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is, before anything is read.

        Raises:
            UnsafeError: it asks for what only unpickling could rebuild.
            FormatError: it asks for a tensor of a dtype that the installed torch does not have.
            PlacementError: it asks for a tensor that is sparse, quantised, nested or on meta.
        """
        for item in plan.items:
            key = item.storage_index.fqn
            entry = self._ckpt.entries.get(key)
            if key in self._ckpt.blocked_keys:
                raise self._ckpt._refusal(key)
            if entry is not None and entry.kind is not None:
                raise PlacementError(
                    f"the file has a {entry.kind} tensor for it",
                    file=self.path,
                    entry=key,
                    expected="a dense tensor with values",
                    hint="Take it out of the checkpoint by its key, and set what you make of it.",
                )
            if entry is not None:
                dtype_of(entry, self.path)  # which raises where torch has none
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items in one parallel transfer, and hand them to the planner.

        Raises:
            IntegrityError: a file changed or could not be read.
            KeyError: a planner that does not look at the metadata asks for what is not there.
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
            copy_values([copy for _, copy in targets])
        finally:
            views.close()
        for item, copy in targets:
            planner.commit_tensor(item, copy.target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether there is such a file or directory; of a URL, that is seen by opening."""
        return is_url(checkpoint_id) or os.path.exists(checkpoint_id)

    def _open(self, path: str | os.PathLike[str] | Checkpoint) -> None:
        self._problem: CheckpointError | None = None
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
            # To be raised where torch lets the ranks hear of each other's errors.
            self._problem = portable(error)

    def _object(self, key: str) -> io.BytesIO:
        stream = io.BytesIO()
        torch.save(self._ckpt.objects[key], stream)
        stream.seek(0)
        return stream


def _spans_of(item: ReadItem) -> Spans:
    """Return the slice of a tensor that an item asks for."""
    # Offsets count from the chunk that the item names.
    start = item.storage_index.offset or (0,) * len(item.lengths)
    first = [a + b for a, b in zip(start, item.storage_offsets, strict=True)]
    return tuple(((a, a + n),) for a, n in zip(first, item.lengths, strict=True))


def _boxes(entry: TensorEntry) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (offset, shape) of each chunk of a tensor."""
    if len(entry.chunks) > 1:
        return [(chunk.start, chunk.shape) for chunk in entry.chunks]
    return [((0,) * len(entry.shape), entry.shape)]

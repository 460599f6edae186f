"""Let ``torch.distributed.checkpoint`` save all or nothing: `CheckpointWriter`.

The ranks exchange messages over torch's own collectives. The first rank creates the files, each
rank writes its own file, and the first rank makes them appear.
"""

from __future__ import annotations

import os
import pickle
import weakref
from collections.abc import Container, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from torchlift._model.holders import find_buffers
from torchlift._model.ranks import portable, raise_first, rank
from torchlift._save.blocks import Workspace
from torchlift._save.files import (
    Files,
    Objects,
    new_files,
    write_errors,
    write_own_files,
)
from torchlift._save.layouts import (
    DCP_FILES,
    DCP_VERSION,
    Box,
    OwnFile,
    Written,
    end_of,
    name_of_rank,
    storage_data,
)
from torchlift._save.mesh import find_holders, find_unequal, require_alike
from torchlift._save.replicas import (
    Checksum,
    checksum_of,
    difference_error,
    find_differences,
)
from torchlift._save.target import Target
from torchlift._save.values import Value
from torchlift._store.places import place_of
from torchlift._system.interrupts import uninterrupted
from torchlift.errors import CheckpointError
from torchlift.formats.layout import FORMATS, SETS, Layout, format_for


class _Assignment(NamedTuple):
    """The message of the first rank to another rank.

    Attributes:
        number: of that rank among those that save.
        temporary: name of each file of all ranks -> its name until it appears.
        arguments: rank -> the arguments that must be equal on all ranks.
        shared: tensors, or parts of them, that several ranks hold.
    """

    number: int
    temporary: Mapping[str, str]
    arguments: Mapping[int, Mapping[str, object]]
    shared: frozenset[MetadataIndex]


class _Failed(NamedTuple):
    """The report of a rank that could not write.

    Attributes:
        rank: its number.
        error: what it raised.
    """

    rank: int
    error: CheckpointError


class CheckpointWriter(StorageWriter):
    """Write DCP folders with ``torch.distributed.checkpoint.save`` and ``async_save``, atomically.

    Each rank writes its own file. The old checkpoint stays in place until the new one is complete
    on the disk. The files contain checksums, which `torchlift.verify` compares. If a rank fails,
    all ranks raise torch's ``CheckpointException``.

    To get one file, let one process call `torchlift.convert` on the folder afterwards. Ranks that
    pass different paths or arguments are an error on all ranks.

    torch does not report errors outside of the writer, such as in a planner. The files of that save
    are removed by the next save of this writer, by `reset`, or with the writer.

    Args:
        path: The folder or its URL. Default: ``checkpoint_id=`` of ``save``.
        checksum: Record a CRC-32 of every tensor.
        replicated: ``"equal"`` or ``"rank0"``, as in `torchlift.save`. Pass ``"rank0"`` if buffers
            differ between ranks and ``async_save`` saves copies of them.
        storage_options: Options of a URL. See `torchlift.open`.

    Example:
        >>> import torch, torch.distributed.checkpoint as dcp, torchlift, tempfile, os, warnings
        >>> from torchlift.distributed import CheckpointWriter
        >>> path = os.path.join(tempfile.mkdtemp(), "step-1")
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # torch warns that there is no process group
        ...     saved = dcp.save({"weight": torch.ones(3)}, storage_writer=CheckpointWriter(path))
        >>> torchlift.open(path)["weight"], torchlift.verify(path).ok
        (tensor([1., 1., 1.]), True)
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        checksum: bool = True,
        replicated: Literal["equal", "rank0"] = "equal",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if replicated not in ("equal", "rank0"):
            raise ValueError(f'replicated={replicated!r}: expected "equal" or "rank0"')
        self.path = None if path is None else os.fspath(path)
        self.checksum, self.replicated, self._options = checksum, replicated, storage_options
        # What this rank holds, before DCP leaves values of several ranks to one.
        self._items: dict[MetadataIndex, WriteItem] = {}
        self._files: Files | Objects | None = None  # on the first rank
        self._close_files: Any = None

    @property
    def checkpoint_id(self) -> str | None:
        """Return the path."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Remove the files of a save that did not end, and set another path if one is given."""
        self._close()
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """Return the path as the metadata records it."""
        # Of a URL no more than may be shown: the files contain it.
        return StorageMeta(checkpoint_id=None if self.path is None else str(place_of(self.path)))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check the arguments.

        Raises:
            ValueError: If the path is missing, or it is the path of a file.
        """
        if not kwargs.get("use_collectives", True):
            raise ValueError("use_collectives=False: the ranks must know the files of each other")
        if self.path is None:
            raise ValueError("no path: pass one to CheckpointWriter, or as checkpoint_id=")
        try:
            format_for(self.path, None, (*FORMATS, *SETS))
        except ValueError:  # not the suffix of a file
            self._target = Target.of(self.path, "dcp", None, self._options)
        else:
            raise ValueError(
                f"{self.path}: a CheckpointWriter writes folders. Save to a folder, and let one "
                "process make the file with torchlift.convert(folder, file)"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Note what this rank holds: DCP leaves what several ranks hold to one of them."""
        self._items = {item.index: item for item in plan.items if item.tensor_data is not None}
        forms = {index: _form_of(item) for index, item in self._items.items()}
        return replace(plan, storage_data=forms)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the files of all ranks.

        Raises:
            CheckpointError: If the files cannot be created.
            ValueError: If the planner has kept a plan of an earlier save.
        """
        if not all(getattr(plan, "usable", True) for plan in plans):
            raise ValueError(
                "a plan of an earlier save does not fit the files of this one: pass "
                "DefaultSavePlanner(enable_plan_caching=False)"
            )
        self._close()
        try:
            with uninterrupted(), write_errors(self._target.head):
                self._target.require_free_place(self._target.head)
                return self._assign(plans)
        except BaseException:
            self._close()  # torch does not call the writer again
            raise

    def _assign(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the files, and add to each plan what its rank must know."""
        head = self._target.head
        held = {number: plan.storage_data or {} for number, plan in enumerate(plans)}
        if unlike := find_differences(held):
            hint = "Give each its own name, or make them shards of a DTensor."
            raise difference_error({i.fqn: each for i, each in unlike.items()}, hint, head)
        shared = {index: who for index, who in find_holders(held).items() if len(who) > 1}
        if self.replicated == "rank0":
            plans, shared = _leave_to_first(plans, shared), {}
        names = [*map(name_of_rank, range(len(plans)))]
        self._files = files = new_files(head, names, DCP_FILES)
        # A save that the death of another rank ends does not call the writer again.
        self._close_files = weakref.finalize(self, files.close)
        files.create()
        made, arguments = files.temporary, {rank(): self._arguments}
        return [
            replace(plan, storage_data=_Assignment(number, made, arguments, frozenset(shared)))
            for number, plan in enumerate(plans)
        ]

    @property
    def _arguments(self) -> dict[str, object]:
        return {"checksum": self.checksum, "replicated": self.replicated}

    def _close(self) -> None:
        if self._close_files is not None:
            self._close_files()
        self._files = self._close_files = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the file of this rank. An error is raised on all ranks in the end."""
        written: Written | _Failed
        try:
            with uninterrupted(), write_errors(self._target.head):
                written = self._write(plan.storage_data, plan.items, planner)
        except BaseException as error:  # torch, too, would tell the others, but not the writer
            written = _Failed(rank(), portable(error))
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(""), 0, written)])
        return done

    def _write(self, assigned: _Assignment, plan: list[WriteItem], planner: SavePlanner) -> Written:
        require_alike({**assigned.arguments, rank(): self._arguments})
        own = OwnFile(assigned.number)
        for item in plan:
            key, data = item.index.fqn, planner.resolve_data(item)
            if isinstance(data, torch.Tensor):
                own.add_box(item.index.offset, Value.of_tensor(key, data), self.checksum)
            else:
                own.add_value(key, _bytes_layout(data.getvalue()))
        files = {own.name: own.sections}
        write_own_files(self._target.head, DCP_FILES, assigned.temporary, files, lambda _: None)
        checksums = self._sum_up(assigned.shared, planner)
        return Written([end_of(own.sections)], own.items, checksums)

    def _sum_up(
        self, shared: Container[MetadataIndex], planner: SavePlanner
    ) -> dict[Box, Checksum]:
        """Return the checksums of what other ranks hold, too, but for buffers of a module."""
        held = {index: item for index, item in self._items.items() if index in shared}
        values: dict[Box, torch.Tensor] = {}
        for index, item in held.items():
            tensor = planner.resolve_data(item)
            if isinstance(tensor, torch.Tensor):
                box = Box(index.fqn, tuple(index.offset or ()), tuple(tensor.shape))
                values[box] = tensor.detach()
        # Statistics that each rank has of its own data: one rank's count, as in torch.
        buffers, work = find_buffers(values) if values else set(), Workspace()
        return {box: checksum_of(each, work) for box, each in values.items() if box not in buffers}

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the checkpoint appear.

        Raises:
            CheckpointError: If a rank failed, or the checkpoint cannot appear.
        """
        files = self._files
        assert files is not None
        reports = [result.storage_data for each in results for result in each]
        with write_errors(files.head), ExitStack() as stack:
            stack.callback(self._close)
            raise_first(
                {each.rank: each.error for each in reports if isinstance(each, _Failed)}, None
            )
            sums = {who: each.checksums for who, each in enumerate(reports)}
            if unlike := find_unequal(sums, files.head):
                raise unlike
            metadata.storage_data = storage_data(files.names, reports)
            metadata.storage_meta, metadata.version = self.storage_meta(), DCP_VERSION
            with uninterrupted():
                files.commit([each.sizes[0] for each in reports], pickle.dumps(metadata))
                self._close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a path, or a URL that can be written to."""
        return not os.fspath(checkpoint_id).startswith(("http://", "https://"))


def _form_of(item: WriteItem) -> object:
    """Return what must be equal on all ranks that hold a part of a tensor."""
    data = item.tensor_data
    return data and (data.size, data.chunk, data.properties.dtype)


def _leave_to_first(
    plans: list[SavePlan], shared: Mapping[MetadataIndex, list[int]]
) -> list[SavePlan]:
    """Return plans in which the first rank writes what several hold: DCP takes any of them."""
    items: list[list[WriteItem]] = [[] for _ in plans]
    for number, plan in enumerate(plans):
        for item in plan.items:
            items[shared.get(item.index, [number])[0]].append(item)
    return [replace(plan, items=own) for plan, own in zip(plans, items, strict=True)]


def _bytes_layout(data: bytes) -> Layout:
    """Return a layout of bytes as they are."""
    return Layout(len(data), (), False, lambda _: iter([(0, data)]))

"""Let ``torch.distributed.checkpoint`` save all or nothing: `CheckpointWriter`.

Torch's own exchanges carry what the ranks of `torchlift.save` tell each other: the first rank makes
the files, each writes what is its own, and the first one lets them appear.
"""

from __future__ import annotations

import os
import pickle
import weakref
from collections.abc import Container, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from torchlift._model.holders import find_buffers
from torchlift._model.ranks import portable, raise_first, rank
from torchlift._model.torch_private import dcp_item
from torchlift._save.blocks import Workspace
from torchlift._save.files import (
    DCP_FILES,
    Begun,
    Files,
    Objects,
    Output,
    Section,
    Sums,
    behind,
    dcp_layout,
    on_their_way,
    require_one_writer,
    write_errors,
    write_files,
)
from torchlift._save.mesh import Share, require_alike
from torchlift._save.replicas import (
    TAKE_FIRST,
    Checksum,
    Difference,
    checksum_of,
    difference_error,
    find_differences,
)
from torchlift._save.saving import Target
from torchlift._save.values import Taken, Value
from torchlift._store.places import place_of
from torchlift._system.interrupts import uninterrupted
from torchlift.errors import PlacementError
from torchlift.formats.dcp import DCP_SUFFIX
from torchlift.formats.index import ITEMSIZE
from torchlift.formats.layout import FORMATS, SETS, Layout, Stored, format_for

#: Of the files that DCP writes; it says how names were joined.
_VERSION = "1.0.0"


class _Told(NamedTuple):
    """What the first rank tells another one.

    Attributes:
        number: of that rank.
        begun: the files that it writes.
        asked: rank -> the arguments that all have to have in common.
        taken: what all of them save to these files; None: each to a file of its own.
        shared: tensors, or parts of them, that several ranks hold.
    """

    number: int
    begun: Begun
    asked: Mapping[int, Mapping[str, object]]
    taken: Taken | None
    shared: frozenset[MetadataIndex]


class _Written(NamedTuple):
    """What a rank tells of what it has written; of an error, it tells (rank, error) instead.

    Attributes:
        sums: of the files of all.
        items: the place and length of each in its own file.
        checksums: of what other ranks hold, too.
    """

    sums: Sums
    items: Mapping[MetadataIndex, tuple[int, int]]
    checksums: Mapping[MetadataIndex, Checksum]


@dataclass(slots=True, eq=False)
class _Planned(Share):
    """A tensor of which this rank has as many boxes as its plan says."""

    boxes: tuple[Share, ...] = ()

    def runs(self, work: Any) -> Any:
        """Yield those of each box."""
        for box in self.boxes:
            yield from box.runs(work)


class CheckpointWriter(StorageWriter):
    """Write with ``torch.distributed.checkpoint.save`` and ``async_save``, all or nothing.

    A path that ends in ``.safetensors`` or ``.index.json`` becomes one checkpoint of whole tensors,
    of which each rank writes the bytes of its own shards: what other programs load. Any other path
    becomes a directory in DCP's own format, of which each rank writes a file; `torchlift.convert`
    makes a torch file of it. Until the last of it is on the disk the older checkpoint is in place;
    checksums are recorded, which `torchlift.verify` knows. In one file, too, each name has values
    of its own: a plan of DCP does not tell ties. Ranks that name another path, or pass other
    arguments here, are an error on all.

    Torch does not tell a writer of an error elsewhere in a save, such as in a planner. What the
    save has begun then goes with the next save of this writer, with `reset`, or with the writer.

    Args:
        path: of the file or directory, or its URL: on several ranks that of a directory; None:
            ``checkpoint_id=`` of ``save`` says it.
        format: ``"safetensors"``, ``"sharded"`` or ``"dcp"``; None: the suffix says.
        max_shard_size: bytes of tensors in a file of safetensors; see `torchlift.save`.
        checksum: whether to record the CRC-32 of every tensor.
        replicated: ``"equal"`` or ``"rank0"``, as in `torchlift.save`. Default: values that several
            ranks hold under one name must be equal, except for buffers of a live module. Pass
            ``"rank0"`` if buffers differ and ``async_save`` saves copies of them.
        storage_options: of a URL, as in `torchlift.open`.

    Raises:
        CheckpointError: ``save`` could not write; it raises that as torch's
            ``CheckpointException``, on every rank.

    Example:
        >>> import torch, torch.distributed.checkpoint as dcp, torchlift, tempfile, os, warnings
        >>> from torchlift.distributed import CheckpointWriter
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # torch says that there is no process group
        ...     saved = dcp.save({"weight": torch.ones(3)}, storage_writer=CheckpointWriter(path))
        >>> torchlift.open(path)["weight"], torchlift.verify(path).ok
        (tensor([1., 1., 1.]), True)
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        format: str | None = None,
        max_shard_size: int | str | None = None,
        checksum: bool = True,
        replicated: Literal["equal", "rank0"] = "equal",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if replicated not in ("equal", "rank0"):
            raise ValueError(f'replicated={replicated!r}: expected "equal" or "rank0"')
        self.replicated = replicated
        # What this rank holds, before DCP leaves values of several ranks to one; and their source.
        self._items: dict[MetadataIndex, WriteItem] = {}
        self._planner: SavePlanner | None = None
        self._options = storage_options
        self.path = None if path is None else os.fspath(path)
        self.format, self.max_shard_size, self.checksum = format, max_shard_size, checksum
        self._begun: tuple[Files | Objects, Taken | None] | None = None  # on the first rank
        self._end: Any = None

    @property
    def checkpoint_id(self) -> str | None:
        """Return the path."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Remove what a save has begun, and start over, at another path where one is named."""
        self._close()
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """Return what the metadata says of where it is."""
        # Of a URL no more than may be shown: it stands in the files.
        return StorageMeta(checkpoint_id=None if self.path is None else str(place_of(self.path)))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check the arguments.

        Raises:
            ValueError: they make no sense.
        """
        if not kwargs.get("use_collectives", True):
            raise ValueError("use_collectives=False: the ranks have to know of each other's files")
        if self.path is None:
            raise ValueError("no path: pass one to CheckpointWriter, or as checkpoint_id=")
        format = self.format
        if format is None:
            try:
                format = format_for(self.path, None, (*FORMATS, *SETS))
            except ValueError:  # no suffix of a file
                format = "dcp"
        if format == "dcp" and self.max_shard_size is not None:
            raise ValueError(
                f"max_shard_size={self.max_shard_size!r}: in a directory of DCP each rank writes "
                "one file; name a path such as model.safetensors"
            )
        if format == "torch-zip":
            raise ValueError(
                f"{self.path}: a CheckpointWriter does not write torch files. Save to a directory, "
                "and let one process make the file of it with torchlift.convert"
            )
        self._target = Target.of(self.path, format, self.max_shard_size, self._options)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Note what this rank holds: DCP leaves what several ranks hold to one of them."""
        self._items = {item.index: item for item in plan.items if item.tensor_data is not None}
        return replace(plan, storage_data=self._items)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lay the files out, and create them.

        Raises:
            CheckpointError: the format cannot hold something, or the files cannot be created.
            ValueError: the plans are not there.
        """
        if not all(getattr(plan, "usable", True) for plan in plans):
            raise ValueError(
                "a plan that was kept from an earlier save does not fit the files of this one: "
                "pass DefaultSavePlanner(enable_plan_caching=False)"
            )
        self._close()
        try:
            with uninterrupted(), write_errors(self._target.head):
                self._target.check_folder()
                return self._begin(plans)
        except BaseException:
            self._close()  # torch does not call the writer again
            raise

    def _begin(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the files, and tell each rank of them."""
        shared = _shared_items([plan.storage_data or {} for plan in plans], self._target.head)
        if self.replicated == "rank0":
            plans, shared = _left_to_first(plans, shared), {}
        taken, names = None, [f"__{number}_0{DCP_SUFFIX}" for number in range(len(plans))]
        if self._target.format == "dcp":
            owners = {name: number for number, name in enumerate(names)}
            output = Output(self._target.head, dict.fromkeys(names, ()), None, DCP_FILES, owners)
        else:
            taken = _taken(plans)
            self._target.check_objects(taken)
            output = self._laid_out(taken)
            require_one_writer(output, len(plans))
        files = on_their_way(output)
        self._begun = files, taken
        # A save that another rank's death ends tells the writer nothing.
        self._end = weakref.finalize(self, files.close)
        begun, asked = files.begin(), {rank(): self._asked}
        each = [begun] * len(plans)
        if taken is None:
            each = [begun._replace(temporary=[name]) for name in begun.temporary]
        return [
            replace(plan, storage_data=_Told(number, own, asked, taken, frozenset(shared)))
            for number, (plan, own) in enumerate(zip(plans, each, strict=True))
        ]

    @property
    def _asked(self) -> dict[str, object]:
        found = self._target
        return {
            "format": found.format, "max_shard_size": found.limit, "checksum": self.checksum,
            "replicated": self.replicated,
        }  # fmt: skip

    def _laid_out(self, taken: Taken, boxes: Mapping[str, list[Share]] | None = None) -> Output:
        """Lay out what all ranks write together, with what this one has of it."""
        values = [
            replace(_Planned.of(stored, key), boxes=tuple((boxes or {}).get(key, ())))
            for key, stored in taken.tensors.items()
        ]
        return self._target.lay_out(taken, values, {}, self.checksum)

    def _close(self) -> None:
        if self._end is not None:
            self._end()
        self._begun = self._end = self._planner = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what is this rank's; what goes wrong is raised on all in the end."""
        told: _Written | tuple[int, Exception]
        if self._begun is not None:  # the first rank, which compares; others would keep the state
            self._planner = planner
        try:
            with uninterrupted(), write_errors(self._target.head):
                told = self._write(plan.storage_data, plan.items, planner)
        except BaseException as error:  # torch, too, would tell the others, but not the writer
            told = rank(), portable(error)
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(MetadataIndex(""), 0, told)])
        return done

    def _write(self, told: _Told, plan: list[WriteItem], planner: SavePlanner) -> _Written:
        require_alike({**told.asked, rank(): self._asked})
        work = Workspace()
        shared = self._values_of(told.shared, planner)
        checksums = {index: checksum_of(tensor, work) for index, tensor in shared.items()}
        items: dict[MetadataIndex, tuple[int, int]] = {}
        sections: list[Section] = []
        boxes: dict[str, list[Share]] = {}
        for item in plan:
            key, data = item.index.fqn, planner.resolve_data(item)
            if told.taken is None:
                section = _section(sections, key, data, self.checksum)
                sections.append(section)
                items[item.index] = section.base, section.layout.nbytes
            else:
                assert isinstance(data, torch.Tensor)
                boxes.setdefault(key, []).append(_share(item, told.taken.tensors[key], data))
        if told.taken is None:
            (name,) = told.begun.temporary
            owners = {name: told.number}
            output = Output(self._target.head, {name: sections}, None, DCP_FILES, owners)
        else:
            output = self._laid_out(told.taken, boxes)
        own = self._begun[0] if self._begun is not None else None
        sums = write_files(output, told.begun, told.number, lambda _: None, own)
        return _Written(sums, items, checksums)

    def _values_of(
        self, indexes: Container[MetadataIndex], planner: SavePlanner
    ) -> dict[MetadataIndex, torch.Tensor]:
        """Return what this rank holds of some tensors, or of parts of them."""
        values = {
            index: planner.resolve_data(item)
            for index, item in self._items.items()
            if index in indexes
        }
        return {i: each.detach() for i, each in values.items() if isinstance(each, torch.Tensor)}

    def _require_equal(self, written: list[_Written]) -> None:
        """Refuse values that differ between ranks, unless they are buffers of a module.

        Raises:
            PlacementError: If there are some.
        """
        found = find_differences({number: each.checksums for number, each in enumerate(written)})
        if self._planner is not None and found:
            for index in find_buffers(self._values_of(found, self._planner)):
                del found[index]
        if found:
            names = {index.fqn: each for index, each in found.items()}
            raise difference_error(names, TAKE_FIRST, self._target.head)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Let the checkpoint appear, when all ranks have written theirs.

        Raises:
            CheckpointError: a rank could not, or the checkpoint cannot appear.
        """
        assert self._begun is not None
        files, taken = self._begun
        told = [result.storage_data for each in results for result in each]
        with write_errors(files.output.head), ExitStack() as stack:
            stack.callback(self._close)
            raise_first(dict(each for each in told if not isinstance(each, _Written)), None)
            self._require_equal(told)
            if taken is None:
                found = dict(zip(files.output.files, told, strict=True))
                places = [each.items.items() for each in told]
                metadata.storage_data = {
                    index: dcp_item(name, *place)
                    for name, own in zip(files.names, places, strict=True)
                    for index, place in own
                }
                metadata.storage_meta, metadata.version = self.storage_meta(), _VERSION
                content = pickle.dumps(metadata)
                ends = {name: [_end_of(each)] for name, each in found.items()}
                files.output = replace(files.output, files=ends, content=lambda _: content)
                files.complete([])
            else:
                files.complete([each.sums for each in told])
            with uninterrupted():
                files.commit()
                self._close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a path, or a URL that can be written to."""
        return not os.fspath(checkpoint_id).startswith(("http://", "https://"))


def _shared_items(
    by_rank: list[dict[MetadataIndex, WriteItem]], path: str
) -> dict[MetadataIndex, int]:
    """Return what several ranks hold -> the number of the first of them.

    Raises:
        PlacementError: If they hold tensors of other shapes or dtypes under one name.
    """
    first: dict[MetadataIndex, tuple[int, WriteItem]] = {}
    shared: dict[MetadataIndex, int] = {}
    for number, items in enumerate(by_rank):
        for index, item in items.items():
            other, expected = first.setdefault(index, (number, item))
            if other == number:
                continue
            if _form(item) != _form(expected):
                hint = "Give each its own name, or make them shards of a DTensor."
                raise difference_error({index.fqn: Difference(other, number)}, hint, path)
            shared[index] = other
    return shared


def _form(item: WriteItem) -> object:
    data = item.tensor_data
    return data and (data.size, data.chunk, data.properties.dtype)


def _left_to_first(plans: list[SavePlan], shared: dict[MetadataIndex, int]) -> list[SavePlan]:
    """Return plans in which the first rank writes what several hold: DCP takes any of them."""
    items: list[list[WriteItem]] = [[] for _ in plans]
    for number, plan in enumerate(plans):
        for item in plan.items:
            items[shared.get(item.index, number)].append(item)
    return [replace(plan, items=own) for plan, own in zip(plans, items, strict=True)]


def _taken(plans: list[SavePlan]) -> Taken:
    """Return what the ranks have together; of a tensor what is stored."""
    taken = Taken(plain=False)
    for item in (item for plan in plans for item in plan.items):
        key = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            taken.objects[key] = b""  # its value is known when it is written
        elif key not in taken.tensors:
            taken.tensors[key] = _stored(item)
    return taken


def _stored(item: WriteItem) -> Stored:
    """Describe the whole tensor of which an item is some.

    Raises:
        PlacementError: no file holds such values.
    """
    assert item.tensor_data is not None
    name = str(item.tensor_data.properties.dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise PlacementError(
            "cannot be stored in a file",
            entry=item.index.fqn,
            expected="a dense tensor",
            found=name,
        )
    return Stored(item.index.fqn, name, tuple(item.tensor_data.size))


def _share(item: WriteItem, stored: Stored, local: torch.Tensor) -> Share:
    """Return what this rank has of a tensor."""
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    box = tuple(((o, o + n),) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
    return Share.of(stored, stored.key).with_values(local.detach(), box)


def _section(sections: list[Section], key: str, data: Any, checksum: bool) -> Section:
    """Return the next section of a rank's own file: a tensor, or bytes as they are."""
    if isinstance(data, torch.Tensor):
        value = Value.of_tensor(key, data, "torch-zip")
        return behind(sections, dcp_layout(value.stored, checksum), [value])
    raw: bytes = data.getvalue()
    return behind(sections, Layout(len(raw), (), False, lambda _: iter([(0, raw)])), [])


def _end_of(told: _Written) -> Section:
    """Return a section as long as what a rank has written to its own file."""
    nbytes = max((base + length for base, length in told.items.values()), default=0)
    return Section(0, Layout(nbytes, (), False, lambda _: iter(())), [])

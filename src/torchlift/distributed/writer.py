"""Let ``torch.distributed.checkpoint`` save all or nothing: `CheckpointWriter`."""

from __future__ import annotations

import io
import os
import pickle
import weakref
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from torchlift._model import dcp_item, portable, raise_first, rank
from torchlift._save import (
    DCP_FILES,
    Files,
    Output,
    Section,
    Share,
    Sums,
    Taken,
    Target,
    Value,
    behind,
    dcp_layout,
    require_plain,
    require_sizes,
    torch_output,
    write_error,
    write_frames,
    write_sections,
)
from torchlift._system import deliver_interrupt, uninterrupted
from torchlift._transfer import AtomicFile, LockedFile
from torchlift.errors import CheckpointError, PlacementError
from torchlift.formats import (
    DCP_SUFFIX,
    FORMATS,
    ITEMSIZE,
    SETS,
    Layout,
    Leaf,
    Payload,
    Stored,
    format_for,
)

#: Of the files that DCP writes; it says how names were joined.
_VERSION = "1.0.0"


class _Part(NamedTuple):
    """What the first rank tells another one of the files that it has made.

    Attributes:
        folder: where they are.
        name: of the file that is this rank's own, in a directory of DCP.
        token: name of a file that the first rank has made there, in a directory of DCP.
        places: tensor -> the temporary file that all write, and what is to be stored where in it.
        checked: whether these need checksums.
    """

    folder: str
    name: str
    token: str
    places: Mapping[str, tuple[str, Payload]]
    checked: bool


class _Failed(NamedTuple):
    """What a rank tells of its error; `CheckpointWriter.finish` raises it on all."""

    rank: int
    error: CheckpointError


class CheckpointWriter(StorageWriter):
    """Write with ``torch.distributed.checkpoint.save`` and ``async_save``, all or nothing.

    A path with a suffix of `torchlift.save` (``.safetensors``, ``.index.json``, ``.pt`` and the
    like) becomes one checkpoint of whole tensors, of which each rank writes the bytes of its own
    shards: what other programs load. Any other path becomes a directory in DCP's own format, of
    which each rank writes a file. Until the last of it is on the disk the older checkpoint is in
    place; checksums are recorded, which `torchlift.verify` knows. In one file, too, each name has
    values of its own: a plan of DCP does not tell ties.

    Torch does not tell a writer of an error elsewhere in a save, such as in a planner. What the
    save has begun then goes with the next save of this writer, with `reset`, or with the writer.

    Args:
        path: of the file or directory; None: ``checkpoint_id=`` of ``save`` says it.
        format: see `torchlift.save`; None: the suffix says.
        max_shard_size: bytes of tensors in a file of safetensors; see `torchlift.save`.
        checksum: whether to record the CRC-32 of every tensor.

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
    ) -> None:
        super().__init__()
        self.path = None if path is None else os.fspath(path)
        self.format, self.max_shard_size, self.checksum = format, max_shard_size, checksum
        self._begun: tuple[Files, Taken, list[Value]] | None = None  # on the first rank
        self._created: dict[str, AtomicFile] = {}  # there, too, of several files of all ranks
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
        return StorageMeta(checkpoint_id=self.path)

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
        self._target = Target.of(self.path, format, self.max_shard_size)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Lay the files out, and create them where several ranks write one.

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
        self._target.check_folder()
        try:
            with uninterrupted():
                begin = self._begin_directory if self._target.format == "dcp" else self._begin_files
                return begin(plans)
        except BaseException as error:
            self._close()  # torch does not call the writer again
            if isinstance(error, OSError):
                raise write_error(self._target.head, error) from error
            raise

    def _begin_directory(self, plans: list[SavePlan]) -> list[SavePlan]:
        files = {f"__{at}_0{DCP_SUFFIX}": [] for at, plan in enumerate(plans)}  # type: dict[str, list[Section]]
        made, stack = self._hold(Output(self._target.head, files, None, DCP_FILES), Taken(True), [])
        token = AtomicFile(made.place)
        stack.callback(token.close)
        folder, seen = os.path.split(token.temporary)
        return [
            replace(plan, storage_data=_Part(folder, name, seen, {}, self.checksum))
            for plan, name in zip(plans, made.names, strict=True)
        ]

    def _begin_files(self, plans: list[SavePlan]) -> list[SavePlan]:
        taken = Taken(not self._target.only_tensors)
        paths = {key: path for plan in plans for key, path in (plan.planner_data or {}).items()}
        stored: dict[str, Stored] = {}
        for item in (item for plan in plans for item in plan.items):
            key = item.index.fqn
            if item.type == WriteItemType.BYTE_IO:
                taken.objects[key] = b""  # known when it is written
            else:
                stored.setdefault(key, _stored(item))
        order = dict.fromkeys([*paths, *stored, *taken.objects])
        found = [key for key in order if key in stored or key in taken.objects]
        taken.paths = {key: paths.get(key, (key,)) for key in found}
        taken.tensors = {key: stored[key] for key in found if key in stored}
        taken.template = _template(taken.paths)
        self._target.check_objects(taken)
        values: list[Value] = [Share.of(each, key) for key, each in taken.tensors.items()]
        made, _ = self._hold(self._lay_out(taken, values), taken, values)
        places: dict[str, tuple[str, Payload]] = {}
        checked = False
        for name, sections in made.output.files.items():
            file = made.create(name)
            temporary = os.path.basename(file.temporary)
            if made.output.kind is not None:
                # A process may not have as many descriptors as there are shards. Without the locks
                # of these, that of their set keeps other writers off.
                LockedFile.close(file)
                self._created[name] = file
            for base, layout, own in sections:
                checked = layout.checked
                for (each, start), value in zip(layout.payloads, own, strict=True):
                    places[value.key] = temporary, Payload(each, base + start)
        folder = os.path.dirname(made.place)
        return [
            replace(
                plan,
                storage_data=_Part(
                    folder,
                    "",
                    "",
                    {i.index.fqn: places[i.index.fqn] for i in plan.items if i.index.fqn in places},
                    checked,
                ),
            )
            for plan in plans
        ]

    def _lay_out(self, taken: Taken, values: Sequence[Value]) -> Output:
        if self._target.format == "torch-zip":
            # What the pickle says is known at the end.
            return torch_output(self._target.path, taken, values, self.checksum, pickle_last=True)
        return self._target.lay_out(taken, values, {}, self.checksum)

    def _hold(self, output: Output, taken: Taken, values: list[Value]) -> tuple[Files, ExitStack]:
        files, stack = Files(output), ExitStack()
        stack.callback(files.close)
        self._begun = files, taken, values
        # A save that another rank's death ends tells the writer nothing.
        self._end = weakref.finalize(self, stack.close)
        return files, stack

    def _close(self) -> None:
        if self._end is not None:
            self._end()
        self._begun = self._end = None
        self._created = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what is this rank's; what goes wrong is raised on all in the end."""
        try:
            part = plan.storage_data
            with uninterrupted():
                results = (self._write_own if part.name else self._write_shares)(plan, planner)
        except BaseException as error:  # torch, too, would tell the others, but not the writer
            known = write_error(part.folder, error) if isinstance(error, OSError) else error
            results = [WriteResult(MetadataIndex(""), 0, _Failed(rank(), portable(known)))]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_own(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write this rank's file of a directory."""
        part, sections, results = plan.storage_data, [], []  # type: _Part, list[Section], list[WriteResult]
        _require_seen(part, [part.token])
        for item in plan.items:
            data = planner.resolve_data(item)
            if isinstance(data, io.BytesIO):
                section = behind(sections, _raw(data.getvalue()), [])
            else:
                value = Value.of_tensor(item.index.fqn, data, "torch-zip")
                section = behind(sections, dcp_layout(value.stored, self.checksum), [value])
            sections.append(section)
            nbytes = section.layout.nbytes
            place = dcp_item(part.name, section.base, nbytes)
            results.append(WriteResult(item.index, nbytes, place))
        file = AtomicFile(os.path.join(part.folder, part.name))
        try:
            sums = write_sections(file.descriptor, sections, _interruptible)
            write_frames(file.descriptor, sections, [sums])
            file.commit()
        finally:
            file.close()
        return results

    def _write_shares(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write this rank's byte ranges of the files of all."""
        part, results = plan.storage_data, []  # type: _Part, list[WriteResult]
        found: dict[str, list[tuple[WriteItem, Payload]]] = {}
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                data: Any = planner.resolve_data(item)
                results.append(WriteResult(item.index, 0, data.getvalue()))
                continue
            name, payload = part.places[item.index.fqn]
            found.setdefault(name, []).append((item, payload))
        _require_seen(part, found)
        for name, items in found.items():
            shares = [_share(item, stored, planner) for item, (stored, _) in items]
            payloads = tuple(payload for _, payload in items)
            layout = Layout(0, payloads, part.checked, lambda _: iter(()))
            descriptor = os.open(os.path.join(part.folder, name), os.O_WRONLY)
            try:
                sums = write_sections(descriptor, [Section(0, layout, shares)], _interruptible)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            for (item, _), share, crc in zip(items, shares, sums.crcs, strict=True):
                results.append(WriteResult(item.index, share.here, crc))
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Let the checkpoint appear, when all ranks have written theirs.

        Raises:
            CheckpointError: a rank could not, or the checkpoint cannot appear.
        """
        assert self._begun is not None
        files, taken, values = self._begun
        told = [result for each in results for result in each]
        try:
            ends = [result.storage_data for result in told]
            raise_first(dict(end for end in ends if isinstance(end, _Failed)), None)
            if self._target.format == "dcp":
                sizes = dict.fromkeys(files.names, 0)
                for place in ends:
                    stop = place.offset + place.length
                    sizes[place.relative_path] = max(sizes[place.relative_path], stop)
                require_sizes(os.path.dirname(files.place), sizes)
                metadata.storage_data = {result.index: result.storage_data for result in told}
                metadata.storage_meta, metadata.version = self.storage_meta(), _VERSION
                content = pickle.dumps(metadata)
                files.output = replace(files.output, content=lambda _: content)
            else:
                self._complete(files, taken, values, told)
            with uninterrupted():
                files.commit()
                self._close()
        except OSError as error:
            raise write_error(files.output.head, error) from error
        finally:
            self._close()

    def _complete(
        self, files: Files, taken: Taken, values: list[Value], told: Sequence[WriteResult]
    ) -> None:
        """Write what is not weights.

        Raises:
            PlacementError: some values were not written, or one cannot be stored.
            OSError: it cannot be written.
        """
        crcs = dict.fromkeys(taken.tensors, 0)
        missing = {key: stored.nbytes for key, stored in taken.tensors.items()}
        for result in told:
            key = result.index.fqn
            if key in crcs:
                crcs[key] ^= result.storage_data  # the sums of ranges are those of a whole
                missing[key] -= result.size_in_bytes
            else:
                taken.objects[key] = _object(key, result.storage_data)
        for key, nbytes in missing.items():
            if nbytes:
                raise PlacementError(
                    "some values are nobody's to write", entry=key, found=f"{nbytes} bytes missing"
                )
        if self._target.format == "torch-zip":
            files.output = self._lay_out(taken, values)
        for name, sections in files.output.files.items():
            keys = [value.key for section in sections for value in section.values]
            if name in self._created:
                file = self._created[name]
                file.open(file.temporary, os.O_RDWR)
            files.complete(name, [Sums(0, array("I", [crcs[key] for key in keys]), array("Q"))])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a path."""
        return "://" not in os.fspath(checkpoint_id)


def _interruptible(_: int) -> None:
    """Let an interrupt through between two blocks."""
    deliver_interrupt()


def _require_seen(part: _Part, names: Iterable[str]) -> None:
    """Refuse a folder that has the first rank's path but not its files.

    Raises:
        PlacementError: it is on another disk.
    """
    if not all(os.path.exists(os.path.join(part.folder, name)) for name in names):
        raise PlacementError(
            "the ranks do not save to the same folder",
            file=part.folder,
            expected="the files that the first rank has made there",
            found=f"another folder of that name, or none, on rank {rank()}",
            hint="Pass a path on a file system that all machines share.",
        )


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


def _share(item: WriteItem, stored: Stored, planner: SavePlanner) -> Share:
    """Return what this rank has of a tensor."""
    assert item.tensor_data is not None
    local: Any = planner.resolve_data(item)
    chunk = item.tensor_data.chunk
    box = tuple(((o, o + n),) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
    return Share.of(stored, stored.key).with_values(local.detach(), box)


def _raw(data: bytes) -> Layout:
    """Lay out bytes as they are."""
    return Layout(len(data), (), False, lambda _: iter([(0, data)]))


def _object(key: str, data: bytes) -> object:
    """Return a value that is no tensor.

    Raises:
        PlacementError: no reader would read it without running code.
    """
    try:
        value = torch.load(io.BytesIO(data), weights_only=True)
    except pickle.UnpicklingError as error:
        raise PlacementError(
            "cannot be stored in a torch file so that it can be read back without running code",
            entry=key,
            expected="plain data",
            hint="Save it apart, or into a directory of DCP.",
        ) from error
    require_plain(key, value)
    return value


def _template(paths: Mapping[str, tuple[str | int, ...]]) -> Any:
    """Return the containers that DCP took apart: lists where names are numbers."""
    root: dict[str | int, Any] = {}
    for key, path in paths.items():
        inner = root
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = Leaf(key)

    def made(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if value and all(isinstance(name, int) for name in value):
            return [made(value[name]) for name in sorted(value)]
        return {name: made(item) for name, item in value.items()}

    return made(root)

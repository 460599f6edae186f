"""`save`: any state to any format, all or nothing."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import IO, Any, Literal

import torch
from torch import nn

from torchlift._checkpoint.checkpoint import Checkpoint, dtype_of
from torchlift._checkpoint.tree import Tree, gathered
from torchlift._model.dtensor import is_dtensor, local_tensor
from torchlift._model.names import is_flattened
from torchlift._model.ranks import tensors_of
from torchlift._model.state import call_state_dict, versioned
from torchlift._save.files import (
    Output,
    dcp_output,
    safetensors_output,
    sharded_output,
    torch_output,
    write_errors,
)
from torchlift._save.mesh import Mesh
from torchlift._save.pickling import AS_TENSOR
from torchlift._save.values import (
    Becomes,
    Loss,
    Part,
    Taken,
    Value,
    apart,
    compacted,
    dense_by,
    take_apart,
    untied,
)
from torchlift._store.places import inside, is_folder, is_url, name_of, names_in, parent, place_of
from torchlift._store.uploads import require_writable
from torchlift._system.interrupts import deliver_interrupt, uninterrupted
from torchlift._system.memory import collection_paused
from torchlift._system.text import (
    Facts,
    Summary,
    clipped_list,
    count_of,
    human,
    parse_size,
    printable,
    progress_bar,
)
from torchlift.errors import (
    Argument,
    CheckpointError,
    Hint,
    NotFound,
    PlacementError,
    explain_calls,
    wrong_call,
)
from torchlift.formats.dcp import DCP_METADATA, metadata_files
from torchlift.formats.flattening import Containers, flatten_state
from torchlift.formats.index import OF_RANKS, Leaf, TensorEntry
from torchlift.formats.layout import FORMATS, INDEX_SUFFIX, SETS, format_for
from torchlift.formats.sharded import is_index
from torchlift.formats.source import errors_name

#: As in Hugging Face's libraries.
_SHARD = 5 * 10**9
_IN_FOLDER = "model.safetensors"
_REPLICATED = ("equal", "rank0")
_BLOCK = 1 << 24  # bytes that go to a file object at a time
_SHOWN = 10  # of what is listed in a summary


@dataclass(frozen=True, slots=True, repr=False)
class SaveReport(Summary):
    """What `save` or `convert` wrote, and what the format could not hold.

    Attributes:
        path: of the file; of several, of the one that names the others.
        format: ``"torch-zip"``, ``"safetensors"``, ``"sharded"`` or ``"dcp"``.
        files: all that were written.
        tensors: how many names of tensors there are.
        nbytes: bytes of tensors that were written.
        tied: key -> the key that has its values in the file, once for both.
        lost: key -> what the file does not say of it any more.
        compacted: keys of views, of whose memory only what they show was written.
        left_out: bytes of that memory that were not written.
        cast: key -> (dtype before, dtype in the file).
        seconds: how long it took.
        written: of `nbytes`, those that this process wrote: of a mesh, this rank.
        blocked: of a `Keeper`, the seconds until its `save` returned on this rank.
        hint: what the reader of the file may stumble over, with the way out, or None.
    """

    path: str
    format: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    tied: Mapping[str, str]
    lost: Mapping[str, str]
    compacted: tuple[str, ...]
    left_out: int
    cast: Mapping[str, tuple[str, str]]
    seconds: float
    written: int = 0
    blocked: float = 0.0
    hint: str | None = None

    def _summary(self) -> tuple[str, Facts]:
        facts: Facts = [("format", self.format)]
        if len(self.files) > 1:
            facts.append(("files", f"{len(self.files):,}"))
        if self.cast:
            facts.append(("cast", count_of(len(self.cast), "tensor")))
        for label, found in (("tied", self.tied), ("not kept", self.lost)):
            rows = list(found.items())
            facts += [(label, f"{printable(key, 80)}: {text}") for key, text in rows[:_SHOWN]]
            if len(rows) > _SHOWN:
                facts.append((label, f"and {len(rows) - _SHOWN:,} more"))
        if self.compacted:
            count = count_of(len(self.compacted), "view")
            facts.append(("compact", f"{count}, without {human(self.left_out)} around them"))
        if self.blocked:
            facts.append(("blocked", f"{self.blocked:.2g} s; written in {self.seconds:.2g} s"))
        if self.hint:
            facts.append(("hint", self.hint))
        size = f"{count_of(self.tensors, 'tensor')}, {human(self.nbytes)}"
        return f"{self.path}: {size}", facts


@explain_calls
def save(
    obj: nn.Module | Mapping[str, Any] | Sequence[Any] | torch.Tensor | Checkpoint,
    path: str | bytes | os.PathLike[str] | IO[bytes],
    *,
    format: str | None = None,
    max_shard_size: int | str | None = None,
    checksum: bool = True,
    progress: bool = False,
    metadata: Mapping[str, str] | None = None,
    replicated: Literal["equal", "rank0"] = "equal",
    process_group: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> SaveReport:
    """Save a state so that the older file is there until the new one is whole.

    Everything is written beside the target, flushed to the disk and then renamed. Whatever goes
    wrong before, an error, a full disk, ``kill -9``, leaves the older file as it was; what a killed
    process has left, the next save to the same path removes. So you may save onto the file from
    which the tensors are mapped. ``x.safetensors`` and the shards of ``x.safetensors.index.json``
    are one checkpoint: the one that is saved later replaces the other.
    Two saves to one folder of several files take turns. A save that waits for ten seconds warns,
    and names the process that it waits for.

    ============================================  =================================================
    path                                          format
    ============================================  =================================================
    ``.pt``, ``.pth``, ``.bin``, ``.ckpt``        ``"torch-zip"``: what ``torch.load`` reads, also
                                                  with ``weights_only=True`` and ``mmap=True``
    ``.safetensors``                              ``"safetensors"``; with `max_shard_size`, and
                                                  more bytes than that, ``"sharded"``; of a folder
                                                  that is there, ``model.safetensors`` in it
    ``.index.json``, or ``format="sharded"``      ``"sharded"``: safetensors with Hugging Face's
                                                  index; of a folder, ``model.safetensors.*`` in it
    a folder, with ``format="dcp"``               ``"dcp"``: what ``torch.distributed.checkpoint``
                                                  loads
    ============================================  =================================================

    **What is kept.** A torch file keeps containers as they are, plain data, strides, and which
    tensors share memory: ties stay ties. It keeps sparse and quantised tensors, and those of
    classes that are made of others, such as torchao's, as ``torch.save`` does; who loads it allows
    the classes. Save a nested tensor as a list of its rows. DCP keeps plain data, and
    gives each key values of its own. safetensors have tensors only: plain data is an error. Values
    of both lie in rows, those in ``channels_last``, too. Keys of containers are joined by dots; of
    tied names the first has the values and the metadata (``torchlift.ties``) names it for the
    others, from where `torchlift.open` gives all of them. Tensors that share memory in another way
    have values of their own. Tuples with tensors are lists in DCP. No file keeps devices,
    ``requires_grad`` and other subclasses of tensors; mappings of other classes become dicts, named
    tuples tuples, numpy's numbers Python's and its arrays lists, as in the states of random
    generators, which take them back. What a format does not keep of this state is in the report.

    **To a URL** (``s3://``, ``gs://``, ``az://``, ``memory://`` and what else fsspec writes to, not
    ``http://``) it is sent in parts, in the memory of some of them, and is there when it is whole;
    of a set the file that names the others comes last. Files of safetensors have their checksums in
    front: what is not read from a file that records them is read twice. What fails, or is
    interrupted, deletes its parts; what a killed process leaves, only the store can: let the bucket
    abort unfinished uploads after some days. Two that save to one URL at once mix nothing: the
    later head counts, whole.

    A small view of a large memory is saved as what it shows; ``torch.save`` writes all of it.

    **From a mesh.** Where the state has DTensors, or ``process_group=`` is passed, all ranks call
    it, and each writes the bytes of its own shards; no weight travels between ranks, and none is
    put together in memory. The files are those that one process would write of whole, dense
    tensors, so that nobody needs the mesh to load them. Ranks may have names of their own, as the
    stages of a pipeline do: pass ``process_group=`` then, since nothing tells a stage of plain
    tensors from a replica. The files have the names of all, in the order of the ranks; of plain
    data the first rank's counts. Of what several ranks hold, plain tensors or replicated DTensors,
    each writes 16 MiB in turn, and it must be equal, by its checksums. To a URL they save as DCP,
    each to objects of its own: no store lets several write one. All ranks return, or all
    raise, and then the older checkpoint is in place; ranks that survive another's death remove what
    was begun. They notice it when the process group does: at once where connections break, else
    after its timeout.

    Args:
        obj: a module, a state dict, nested containers of tensors and plain data, a tensor, or a
            `Checkpoint`, which is read and written a block at a time. What has a ``state_dict``
            stands for that, inside of containers, too; a module's has canonical names, whatever it
            is wrapped in.
        path: of the file or folder; one that exists is replaced and passes its mode on. Folders
            that are missing are made. Or a binary file object, which is written from its position,
            out of a temporary file that is whole by then; after an error one that is seekable has
            its former length and position. It takes one file, ``"torch-zip"`` where `format` is
            None.
        format: one of the four, or None: the suffix says.
        max_shard_size: bytes of tensors in a shard, or text such as ``"5GB"``, which is the default
            of ``"sharded"``; a larger tensor has a shard of its own.
        checksum: whether to record the CRC-32 of every storage, which `torchlift.verify` and
            ``torchlift.load(verify=True)`` compute again: in a torch file and DCP where zip files
            have it, in safetensors in the metadata, where other readers pass over it.
        progress: show a bar of bytes on stderr; of a mesh, of what its first rank has.
        metadata: text for the header of safetensors; of a mesh rank 0's. Other formats have no
            place for any.
        replicated: what a mesh saves of values that several ranks hold under one name. ``"equal"``:
            they must be equal, for which every rank reads all of its own. Buffers of a live module,
            such as BatchNorm's statistics, need not be: the first rank's are saved. ``"rank0"``:
            those of the first rank that has the name, unread on the others.
        process_group: the ranks that save, which all call this; by default, where there are
            DTensors, all. What they agree on travels over it: over gloo, rank 0's ``fsync`` may
            take longer than NCCL would wait.
        storage_options: of a URL, as in `torchlift.open`.

    Returns:
        What was written, and what was not kept.

    Raises:
        PlacementError: the format cannot hold a name or a value; or a tensor holds partial sums, an
            optimizer is one of FullyShardedDataParallel, of which no rank has the whole, ranks hold
            unlike values under one name, or do not save to one path.
        CheckpointError: the folder holds a checkpoint of another format, which readers would take;
            or the file cannot be written. The older one is untouched and nothing is left
            behind, unless the message says that the new one is in its place.
        TypeError: a path that is none, or metadata that is not text.
        ValueError: a format that is not known, no format and a suffix that does not tell, or
            `max_shard_size` or metadata for a torch file.

    Example:
        >>> import torch, torchlift, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "training.pt")
        >>> state = {"model": {"weight": torch.ones(2)}, "groups": [{"lr": 0.1}], "step": 7}
        >>> torchlift.save(state, path).nbytes
        8
        >>> torch.load(path, weights_only=True)["groups"]
        [{'lr': 0.1}]
    """
    is_alone = process_group is None and not _has_dtensors(obj)
    if is_alone and hasattr(path, "write"):
        return _save_to(
            path, obj, format, max_shard_size, checksum=checksum, progress=progress,
            metadata=metadata, replicated=replicated,
        )  # fmt: skip
    texts: Mapping[str, str] = metadata if metadata is not None else {}
    mesh = Mesh(process_group, alone=is_alone)

    @collection_paused()
    def prepare() -> tuple[tuple[Target, Taken, Sequence[Value]], None]:
        if hasattr(path, "write"):
            raise TypeError("ranks save together to a path: a file object is one process's own")
        _check_order(obj, path)
        if replicated not in _REPLICATED:
            known = ", ".join(map(repr, _REPLICATED))
            raise ValueError(f"replicated must be one of {known}, not {replicated!r}")
        target = Target.of(path, format, max_shard_size, storage_options)
        mesh.path = target.path
        target.check_metadata(texts)
        _check_whole(obj, mesh.path)
        values: Sequence[Value] = []
        if not isinstance(obj, Checkpoint):
            taken = take_apart(obj, plain=not target.only_tensors)
        elif is_alone:
            taken, values = from_files(obj, target)
        else:
            raise TypeError(
                "a Checkpoint is saved by one process: call it there, without process_group="
            )
        target.check_objects(taken)
        deliver_interrupt()  # here, where the others are told of it
        return (target, taken, values), None

    with ExitStack() as stack:
        if not is_alone:
            # An interrupt comes where the ranks are about to agree, or the others would wait.
            stack.enter_context(uninterrupted())
        (target, taken, values), _ = mesh.group.run(prepare)
        if is_alone and any(map(is_dtensor, taken.tensors.values())):
            # Those of an object with a state, which was not asked for it before.
            stack.enter_context(uninterrupted())
            is_alone, mesh = False, Mesh(None, path=mesh.path)
        lost: Mapping[str, str] = {}
        if not is_alone:
            stack.enter_context(errors_name(mesh.path))
            asked = {
                "format": target.format, "max_shard_size": target.limit, "checksum": checksum,
                "replicated": replicated,
            }  # fmt: skip
            taken, values, texts, lost = mesh.merged(taken, texts, asked)
        elif not isinstance(obj, Checkpoint):
            with collection_paused():
                values = [target.value_of(key, tensor) for key, tensor in taken.tensors.items()]
        check = partial(unchanged, obj) if isinstance(obj, Checkpoint) else lambda: None
        return finish(
            target, taken, values, metadata=texts, checksum=checksum, lost=lost, check=check,
            progress=progress, mesh=mesh,
        )  # fmt: skip


def _save_to(
    file: Any,
    obj: Any,
    format: str | None,
    max_shard_size: int | str | None,
    **options: Any,
) -> SaveReport:
    """Save to a file object: all of it, or what was there before.

    Args:
        file: what the caller passed.
        obj: what is saved.
        format: see `save`.
        max_shard_size: see `save`.
        options: the other arguments of it.

    Raises:
        TypeError: it is open for text.
        ValueError: a set of files was asked for.
        CheckpointError: it cannot be written.
    """
    _check_order(obj, file)
    if format in SETS or max_shard_size is not None:
        raise ValueError("a file object is one file: save shards and DCP to a path")
    name = getattr(file, "name", None)
    shown = name if isinstance(name, str) and name else f"a {type(file).__name__}"
    try:
        file.write(b"")
    except TypeError as error:
        what = "a file that is open for text cannot be saved to: open it with mode 'wb'"
        raise TypeError(what) from error
    except Exception as error:
        raise _not_written(shown, error) from error
    with TemporaryDirectory() as folder:
        whole = os.path.join(folder, "saved")
        report = save(obj, whole, format=format or "torch-zip", **options)
        start, end = _extent(file)
        try:
            with open(whole, "rb") as source:
                if start is not None:
                    file.seek(start)
                while data := source.read(_BLOCK):
                    left = memoryview(data)
                    while left:  # a raw file may take less at a time
                        left = left[file.write(left) or len(left) :]
                if hasattr(file, "flush"):
                    file.flush()
        except BaseException as error:
            if start is not None:
                with suppress(Exception):  # of a file that nothing can be written to
                    file.truncate(end)
                with suppress(Exception):
                    file.seek(start)
            if isinstance(error, Exception):
                raise _not_written(shown, error) from error
            raise
    return replace(report, path=shown, files=(shown,))


def _extent(file: Any) -> tuple[int | None, int | None]:
    """Return where a file object is and where it ends; None if it cannot go back, as in gzip."""
    with suppress(Exception):  # each class that compresses raises something else
        start = file.tell()
        file.seek(0, os.SEEK_END)
        return start, file.tell()
    return None, None


def _not_written(file: str, error: Exception) -> CheckpointError:
    """Return our error for one of a file object, which may raise anything."""
    return CheckpointError(
        "the file object cannot be written",
        file=file,
        found=f"{type(error).__name__}: {error}".partition("\n")[0],
        hint="Open it for writing, with room for the file.",
    )


def _inside(obj: object) -> Iterator[object]:
    """Yield what a state has inside, as far as objects tell without being asked for theirs."""
    seen: dict[int, object] = {}
    left = [obj]
    while left:
        item = left.pop()
        yield item
        if isinstance(item, nn.Module):
            left.extend(tensors_of(item))
        elif isinstance(item, torch.optim.Optimizer):
            left.extend(param for group in item.param_groups for param in group["params"])
        elif isinstance(item, (dict, list, tuple)) and id(item) not in seen:
            seen[id(item)] = item
            left.extend(item.values() if isinstance(item, dict) else item)


def _has_dtensors(obj: object) -> bool:
    """Return whether a state has DTensors."""
    return "torch.distributed.tensor" in sys.modules and any(map(is_dtensor, _inside(obj)))


def _check_order(obj: object, path: object) -> None:
    """Refuse arguments that are swapped, and a path where the state should be.

    Raises:
        TypeError: If `obj` is a path, or `path` is not.
    """
    if isinstance(obj, (str, bytes, os.PathLike)):
        copying = " To copy or convert a file, call torchlift.convert(source, destination)"
        both = isinstance(path, (str, bytes, os.PathLike)) or hasattr(path, "write")
        problem = "expected a model or a state first, found a path"
        raise wrong_call("save", f"{problem}.{copying}" if both else problem)
    if not isinstance(path, (str, bytes, os.PathLike)) and not hasattr(path, "write"):
        raise wrong_call("save", f"expected a path or a file object, not a {type(path).__name__}")


def _check_whole(obj: object, path: str) -> None:
    """Refuse an optimizer of which this rank has a flat piece only, before any rank goes on.

    Raises:
        PlacementError: If its parameters are those of a FullyShardedDataParallel.
        StateDictMismatch: If it is a ZeroRedundancyOptimizer whose state is on other ranks.
    """
    for item in _inside(obj) if "torch.distributed" in sys.modules else ():
        if hasattr(item, "consolidate_state_dict") and isinstance(item, torch.optim.Optimizer):
            call_state_dict(item)
        params = item.param_groups if isinstance(item, torch.optim.Optimizer) else ()
        if any(is_flattened(param) for group in params for param in group["params"]):
            raise PlacementError(
                "each rank has a flat piece of its state, under FullyShardedDataParallel, and no "
                "rank the whole",
                file=path,
                entry=type(item).__name__,
                expected="an optimizer of whole parameters or of DTensors",
                hint="Save what torchlift.distributed.get_optimizer_state_dict(model, optimizer, "
                "options=StateDictOptions(full_state_dict=True, cpu_offload=True)) returns, or "
                "shard the model with fully_shard.",
            )


@dataclass(frozen=True, slots=True)
class Target:
    """Where to save, and in which format.

    Attributes:
        path: absolute, as the caller named it.
        format: one of the four.
        limit: bytes of a shard, where they are limited.
    """

    path: str
    format: str
    limit: int | None

    @classmethod
    def of(
        cls,
        path: str | bytes | os.PathLike[str],
        format: str | None,
        size: int | str | None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Target:
        """Return what a caller asks for.

        Raises:
            PlacementError: it is a URL that nothing can be written to.
            ValueError: it makes no sense.
        """
        given = os.fsdecode(path)
        if is_url(given):
            given = place_of(given, storage_options)
            require_writable(given)
        found = format_for(given, format, (*FORMATS, *SETS))
        limit = None if size is None else parse_size(size)
        if limit is not None and (found == "torch-zip" or limit < 1):
            raise ValueError(
                f"max_shard_size={size!r}: a torch file is one file; save as safetensors or as DCP"
                if found == "torch-zip"
                else f"max_shard_size={size!r}: expected a size such as '5GB'"
            )
        with write_errors(given):  # there may be no current folder
            given = place_of(given)
        if found == "safetensors" and _is_folder(given):
            given = inside(given, _IN_FOLDER)  # as save_pretrained does
        if found == "sharded" and not given.lower().endswith(INDEX_SUFFIX):
            is_file = given.lower().endswith(".safetensors") and not _is_folder(given)
            given = _with_suffix(given if is_file else inside(given, _IN_FOLDER))
        return cls(given, found, limit)

    @property
    def head(self) -> str:
        """Return the path of the one file, or of the one that names the others."""
        return inside(self.path, DCP_METADATA) if self.format == "dcp" else self.path

    @property
    def heads(self) -> list[str]:
        """Return the paths of all heads that this one may write or supersedes."""
        if self.format == "safetensors":
            return [self.path, _with_suffix(self.path)]
        if self.format == "sharded" and self.path.endswith(".safetensors" + INDEX_SUFFIX):
            # transformers looks for the one file first.
            one = name_of(self.path)[: -len(INDEX_SUFFIX)]
            return [self.path, inside(parent(self.path), one)]
        return [self.head]

    def check_folder(self) -> None:
        """Refuse a folder of which readers would go on to take a checkpoint of another format.

        Raises:
            CheckpointError: it has such a one.
        """
        folder, name = parent(self.head), name_of(self.head)
        if not (self.format in SETS or name == _IN_FOLDER) or not _is_folder(folder):
            return
        names = names_in(folder)
        other = metadata_files(names)
        if self.format == "dcp":
            other = [name for name in names if is_index(name) or name == _IN_FOLDER]
        if other:
            raise CheckpointError(
                "the folder holds a checkpoint of another format, which readers may take instead",
                file=inside(folder, other[0]),
                hint="Save into another folder, or remove that checkpoint first.",
            )

    @property
    def only_tensors(self) -> bool:
        """Return whether the format has no place for anything else."""
        return self.format in ("safetensors", "sharded")

    def check_objects(self, taken: Taken) -> None:
        """Refuse what is no dense tensor where the format has no place for it.

        Raises:
            PlacementError: there is such a value.
        """
        if self.only_tensors and taken.objects:
            key, value = next(iter(taken.objects.items()))
            raise PlacementError(
                "cannot be stored in a safetensors file",
                entry=key,
                expected="a dense tensor with values",
                found=taken.kinds.get(key, type(value).__name__),
                hint="Save as a torch file or as DCP, which hold plain data, or leave it out; "
                f"{AS_TENSOR}",
            )

    def check_metadata(self, metadata: object) -> None:
        """Refuse text where the format has no place for it.

        Raises:
            TypeError: it is no mapping.
            ValueError: there is some.
        """
        if not isinstance(metadata, Mapping):
            raise TypeError(f"metadata: expected a mapping, found a {type(metadata).__name__}")
        if metadata and not self.only_tensors:
            raise ValueError(
                "a torch file has no place for metadata: save as safetensors, or put the text into "
                "the state dict"
            )

    def value_of(self, key: str, tensor: torch.Tensor) -> Value:
        """Return the value of a tensor in memory."""
        return Value.of_tensor(key, tensor, "safetensors" if self.only_tensors else "torch-zip")

    def lay_out(
        self,
        taken: Taken,
        values: Sequence[Value],
        metadata: Mapping[str, str],
        checksum: bool,
    ) -> Output:
        """Lay the files out.

        Raises:
            PlacementError: the format cannot hold a name or a value.
        """
        made = self._laid_out(taken, values, metadata, checksum)
        return replace(made, replaces=[head for head in self.heads if head != made.head])

    def _laid_out(
        self, taken: Taken, values: Sequence[Value], metadata: Mapping[str, str], checksum: bool
    ) -> Output:
        if self.format == "torch-zip":
            return torch_output(self.path, taken, values, checksum)
        if self.format == "dcp":
            for key, what in taken.made_of_others.items():
                raise PlacementError(
                    "cannot be stored in a directory of DCP",
                    entry=key,
                    expected="a dense tensor with values",
                    found=what,
                    hint=f"Save as a torch file, which keeps it{dense_by(what) and ', or save '}"
                    f"{dense_by(what)}.",
                )
            return dcp_output(self.path, taken, values, self.limit, checksum)
        if self.format == "sharded":
            return sharded_output(self.path, values, self.limit or _SHARD, metadata, checksum)
        one = safetensors_output(self.path, values, metadata, checksum)
        if self.limit is None or one.nbytes <= self.limit:
            return one
        return sharded_output(_with_suffix(self.path), values, self.limit, metadata, checksum)


def _with_suffix(path: str) -> str:
    """Return the place of the index of a file's shards."""
    return inside(parent(path), name_of(path) + INDEX_SUFFIX)


def _is_folder(place: str) -> bool:
    try:
        return is_folder(place)
    except NotFound:
        return False


def require_savable(obj: object, path: str) -> Output:
    """Refuse a state that a torch file cannot hold so that torchlift reads it back.

    Returns:
        The file that it would be.

    Raises:
        PlacementError: it has such a value.
    """
    target, taken, values = _savable(obj, path)
    with errors_name(target.path):
        return target.lay_out(taken, values, {}, False)


def savable_names(obj: object, path: str) -> object:
    """Return the names in a state and the kinds of its values, none of which is to be refused.

    Where these are equal `require_savable` takes both states, or neither; it takes twice as long.

    Raises:
        PlacementError: a torch file cannot hold a value.
    """
    _, taken, _ = _savable(obj, path)
    return tuple(taken.paths.items()), tuple(map(type, taken.objects.values()))


def _savable(obj: object, path: str) -> tuple[Target, Taken, list[Value]]:
    target = Target.of(path, "torch-zip", None)
    taken = take_apart(obj)
    tensors = {key: local_tensor(tensor) for key, tensor in taken.tensors.items()}
    return target, taken, [target.value_of(key, tensor) for key, tensor in tensors.items()]


def unchanged(ckpt: Checkpoint) -> None:
    """Refuse files of a checkpoint that are not those that were opened any more.

    Raises:
        IntegrityError: there is such a file.
    """
    for file, stamp in ckpt._index.files.items():
        stamp.check(file)


def from_files(
    ckpt: Checkpoint,
    target: Target,
    becomes: Becomes | None = None,
    dropped: Collection[str] = (),
    made: Callable[[str, TensorEntry], torch.Tensor | None] | None = None,
    containers: Any = None,
) -> tuple[Taken, list[Value]]:
    """Take apart what a checkpoint's files hold; nothing of a tensor is read.

    Args:
        ckpt: the checkpoint, which stays open until it is written.
        target: where it goes.
        becomes: the dtype that a tensor is saved with; None: its own.
        dropped: keys that are left out.
        made: the tensor that is saved in place of what the file has; None: that.
        containers: those that renamed leaves are in, if they are all there; None: the file's.

    Raises:
        UnsafeError: something in it could only be had by running code.
        PlacementError: something in it has no place in a file.
    """
    blocked = [key for key in ckpt.blocked_keys if key not in dropped]
    if blocked:
        error = ckpt._refusal(blocked[0])
        if ckpt.blocked_keys[blocked[0]] not in OF_RANKS:
            this = Argument("exclude", f"[{blocked[0]!r}]", (blocked[0],))
            error.hint = Hint("Leave it out: ", this, ".")
        raise error
    index, views = ckpt._index, ckpt._mapped()
    entries = dict(index.entries.items())
    leaves = {**entries, **index.objects}
    if index.tree is not None:
        tree: Any = Tree(index, lambda entry: entry, ckpt._refusal, dropped).rebuild(None)
    else:
        kept_leaves = {key: value for key, value in leaves.items() if key not in dropped}
        kept_leaves = gathered(kept_leaves, index.templates)
        tree = versioned(kept_leaves, index.module_versions or None)
    if containers is not None:
        found = take_apart(containers, plain=False)
        if {*found.tensors, *found.objects} == leaves.keys() - set(dropped):
            tree = containers
    taken = take_apart(tree, plain=not target.only_tensors, replaced=made)
    # The containers and the keys of an index are two accounts of one content.
    assert {*map(taken.name_of, taken.tensors)} == entries.keys() - dropped
    becomes = becomes or partial(dtype_of, path=index.path)
    values = []
    for key, source in taken.tensors.items():
        part, entry = taken.parts.get(key), entries[taken.name_of(key)]
        rule = becomes
        if part is not None:
            rule = partial(_dtype_of_part, becomes, entry, part, index.path)
        if isinstance(source, TensorEntry):
            values.append(Value.of_entry(key, source, views, rule))
            continue
        seen = entry._replace(dtype=str(source.dtype).removeprefix("torch."))
        values.append(replace(target.value_of(key, source), dtype=rule(seen)))
    return taken, values


def _dtype_of_part(
    becomes: Becomes, whole: TensorEntry, part: Part, path: str, entry: TensorEntry
) -> torch.dtype:
    """Return the dtype that a part of a tensor gets: of indices and numbers of codes their own."""
    return becomes(whole) if part.has_values else dtype_of(entry, path)


def finish(
    target: Target,
    taken: Taken,
    values: Sequence[Value],
    *,
    metadata: Mapping[str, str] | None = None,
    checksum: bool = True,
    lost: Mapping[str, str] | None = None,
    check: Callable[[], None] = lambda: None,
    progress: bool = False,
    written: bool = True,
    mesh: Mesh | None = None,
) -> SaveReport:
    """Lay out, write and report.

    Args:
        target: where to.
        taken: the containers.
        values: the tensors in them.
        metadata: text for the headers of safetensors.
        checksum: whether to record checksums.
        lost: what is known not to be kept.
        check: called before a file appears; raises where it must not.
        progress: show a bar of bytes on stderr.
        written: whether to write; else the report says what would be.
        mesh: the processes that write together; None: this one alone.
    """
    start = time.perf_counter()
    mesh = mesh or Mesh(alone=True)
    mesh.path = target.head

    @collection_paused()
    def lay_out() -> Output:
        target.check_folder()
        return target.lay_out(taken, values, metadata or {}, checksum)

    output = mesh.laid_out(lay_out)
    format = target.format if output.content is None or target.format == "dcp" else "sharded"
    gone = {**taken.kinds, **(lost or {})}
    for key, what in taken.containers.items():
        if target.only_tensors or (format == "dcp" and what is Loss.TEXT):
            gone.setdefault(key or "(all)", what.value)
        elif format == "dcp" and what is Loss.TUPLE:
            gone[key or "(all)"] = f"{gone.get(key or '(all)', 'a tuple')}, which becomes a list"
    with collection_paused():
        if format != "torch-zip":
            gone |= _versions_in(taken)
        name = taken.name_of
        pairs = {**apart(values, output.shared), **output.untied}
        gone |= untied({name(key): name(other) for key, other in pairs.items()})
        keys, left_out = compacted(values)
        cast = {name(v.key): (v.source_dtype, v.stored.dtype) for v in values if v.is_cast}
    folder = parent(output.head)
    files = [inside(folder, name) for name in output.files]
    files += [output.head] if output.content is not None else []
    if written:
        total = sum(value.here for value in output.values)
        # An interrupt comes between two blocks, and never to what makes files or removes them.
        with uninterrupted(), progress_bar(progress and mesh.leads, total, "save") as advance:
            files = mesh.write(output, advance, check)
    return SaveReport(
        # Of URLs the text: a report that is kept or sent has no credentials.
        path=str(output.head if format != "dcp" else folder),
        format=format,
        files=tuple(map(str, files)),
        tensors=len({name(value.key) for value in values}),
        nbytes=output.nbytes,
        tied=taken.tied_names(output.tied) if taken.parts else dict(output.tied),
        lost=gone,
        compacted=tuple(dict.fromkeys(map(name, keys))),
        left_out=left_out,
        cast=cast,
        seconds=time.perf_counter() - start,
        written=mesh.written,
    )


def _versions_in(taken: Taken) -> dict[str, str]:
    """Return, under one key, which modules would take values without a version for old."""
    if not _is_noted(taken.template):
        return {}
    noted = flatten_state(taken.template, Containers((Leaf,))).versions
    versions = {path: version for path, told in noted.items() if (version := told.get("version"))}
    # Version 2 of BatchNorm says that there is this tensor, which its name says as well.
    telling = [
        f"{path or 'the whole'} has {version}"
        for path, version in versions.items()
        if version != 1
        and (version != 2 or f"{path}.num_batches_tracked".removeprefix(".") not in taken.tensors)
    ]
    what = f"versions of modules, by which they know older values: {clipped_list(telling)}"
    return {"(versions)": what} if telling else {}


def _is_noted(template: Any) -> bool:
    """Return whether a container in a template has metadata of modules."""
    if type(template) is Leaf or not isinstance(template, (dict, list, tuple)):
        return False
    inside = template.values() if isinstance(template, dict) else template
    return hasattr(template, "_metadata") or any(map(_is_noted, inside))

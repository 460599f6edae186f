"""`save`: take a state apart, lay it out, write it, and report."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from tempfile import TemporaryFile
from typing import IO, Any, Literal

import torch
from torch import nn

from torchlift._checkpoint.checkpoint import Checkpoint, dtype_of
from torchlift._checkpoint.tree import Tree, gathered
from torchlift._model.dtensor import is_dtensor, local_tensor
from torchlift._model.names import is_flattened
from torchlift._model.ranks import RankGroup, StepResult, tensors_of
from torchlift._model.state import call_state_dict, versioned
from torchlift._save.blocks import Block
from torchlift._save.files import Files, Objects, with_sums, write_errors, write_sections
from torchlift._save.layouts import (
    DCP_FILES,
    Output,
    OwnFile,
    Written,
    add_objects,
    dcp_output,
    end_of,
)
from torchlift._save.mesh import (
    LocalState,
    Message,
    SavingRanks,
    SharedState,
    commit,
    read_parts,
    share_state,
    write_together,
)
from torchlift._save.pickling import require_readable
from torchlift._save.target import Target
from torchlift._save.values import (
    LIST,
    Arrays,
    Becomes,
    Part,
    State,
    Value,
    explain_untied,
    find_untied_keys,
    require_stored,
    stored_as,
    take_apart,
)
from torchlift._store.places import inside, is_url, name_of, parent
from torchlift._system.interrupts import uninterrupted
from torchlift._system.memory import collection_paused
from torchlift._system.text import (
    Facts,
    Summary,
    clipped_list,
    count_of,
    human,
    printable,
    progress_bar,
)
from torchlift._transfer.write import Runs
from torchlift.errors import (
    Argument,
    CheckpointError,
    Hint,
    PlacementError,
    explain_calls,
    wrong_call,
)
from torchlift.formats.index import OF_RANKS, Leaf, TensorEntry
from torchlift.formats.layout import SETS, format_for
from torchlift.formats.runs import item_key
from torchlift.formats.source import errors_name

_REPLICATED = ("equal", "rank0")
_BLOCK = 1 << 24  # bytes that a file object gets at a time
_SHOWN = 10  # rows of a list in a summary


@dataclass(frozen=True, slots=True, repr=False)
class SaveReport(Summary):
    """The result of `save` or `convert`: the files, and the values that the format does not keep.

    Attributes:
        path: Path of the file. Of several files, the path of the file that lists the others.
        format: ``"torch-zip"``, ``"safetensors"``, ``"sharded"`` or ``"dcp"``.
        files: Paths of all files that were written.
        tensors: Number of tensor keys.
        nbytes: Bytes of tensors in the files.
        tied: Key -> the key that holds its values in the file.
        lost: Key -> what the files do not keep of it.
        cast: Key -> (dtype before, dtype in the file).
        seconds: Duration of the call.
        written: Bytes of tensors that this process wrote. On a mesh, this rank.
        blocked: Seconds until `Keeper.save` returned on this rank.
        hint: A problem that readers of the file may have, and its fix, or None.
        overflowed: Key -> the number of finite values that its cast made infinite or NaN.
        quantised: Key -> keys of its scales, of quantised tensors. ``convert(dtype=)`` leaves both
            as they are.
    """

    path: str
    format: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    tied: Mapping[str, str]
    lost: Mapping[str, str]
    cast: Mapping[str, tuple[str, str]]
    seconds: float
    written: int = 0
    blocked: float = 0.0
    hint: str | None = None
    overflowed: Mapping[str, int] = field(default_factory=dict)
    quantised: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def _summary(self) -> tuple[str, Facts]:
        facts: Facts = [("format", self.format)]
        if len(self.files) > 1:
            facts.append(("files", f"{len(self.files):,}"))
        if self.cast:
            facts.append(("cast", count_of(len(self.cast), "tensor")))
        if self.overflowed:
            some = count_of(sum(self.overflowed.values()), "value")
            where = clipped_list(self.overflowed)
            facts.append(("overflowed in the cast", f"{some} of {where}"))
        if self.quantised:
            some = count_of(len(self.quantised), "tensor")
            facts.append(("quantised", f"{some}, left as they are with their scales"))
        for label, found in (("tied", self.tied), ("not kept", self.lost)):
            rows = list(found.items())
            facts += [(label, f"{printable(key, 80)}: {text}") for key, text in rows[:_SHOWN]]
            if len(rows) > _SHOWN:
                facts.append((label, f"and {len(rows) - _SHOWN:,} more"))
        if self.blocked:
            facts.append(("blocked", f"{self.blocked:.2g} s; written in {self.seconds:.2g} s"))
        if self.hint:
            facts.append(("hint", self.hint))
        size = f"{count_of(self.tensors, 'tensor')}, {human(self.nbytes)}"
        return f"{self.path}: {size}", facts


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a state is written.

    Attributes:
        checksum: whether to record checksums.
        progress: whether to show a bar of bytes on stderr.
        lost: key -> what is already known not to be kept.
        check: called before the checkpoint appears. It raises if the checkpoint must not.
        dry_run: whether to report only.
    """

    checksum: bool = True
    progress: bool = False
    lost: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[], None] = lambda: None
    dry_run: bool = False


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
    """Save a model, a state dict or a training state to a file, a folder or a URL.

    The save is atomic: data is written to a temporary file next to `path`, flushed to disk, then
    renamed. If the save fails or is killed, the old file is unchanged. You can therefore save to
    the same file that the weights are mapped from. A file object that can be read and can seek gets
    its old content back if the save fails.

    The suffix selects the format: ``.pt``, ``.pth``, ``.bin`` and ``.ckpt`` for a torch file,
    ``.safetensors``, and ``.index.json`` for sharded safetensors. Pass ``format="dcp"`` for a DCP
    folder. Safetensors files store tensors only, so any other value raises an error.

    If the state contains DTensors, call this on every rank. Each rank writes its own shards. The
    first rank then makes one file of them, unless you save a DCP folder. See "Saving" in the guide
    for formats, ties, meshes and object stores.

    Args:
        obj: A module, a state dict, a tensor, a `Checkpoint`, or nested containers of tensors and
            plain data. An object with a ``state_dict`` method is replaced by its state dict.
        path: A file, a folder, a URL, or a binary file object. Missing folders are created.
        format: ``"torch-zip"``, ``"safetensors"``, ``"sharded"`` or ``"dcp"``. Default: by suffix.
        max_shard_size: Maximum size of a safetensors shard in bytes, or text such as ``"5GB"``.
        checksum: Record a CRC-32 of every tensor. `torchlift.verify` compares them.
        progress: Show a bar of bytes on stderr.
        metadata: Text for the header of safetensors. On a mesh, the text of the first rank counts.
        replicated: ``"equal"``: values that several ranks hold under one key must be equal, except
            for buffers. ``"rank0"``: save the values of the first rank, and do not compare.
        process_group: The ranks that save. Default: all ranks if the state contains DTensors.
        storage_options: Options of a URL. See `torchlift.open`.

    Returns:
        The files that were written, and the values that the format does not keep.

    Raises:
        PlacementError: If the format does not store a value, or ranks hold different values.
        CheckpointError: If the file cannot be written. The message says which file is in place.
        TypeError, ValueError: If the arguments contradict each other.

    Example:
        >>> import torch, torchlift, tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "training.pt")
        >>> state = {"model": {"weight": torch.ones(2)}, "step": 7}
        >>> torchlift.save(state, path).nbytes, torch.load(path)["step"]
        (8, 7)
    """
    is_file = hasattr(path, "write")
    is_alone = process_group is None and not any(map(is_dtensor, _inside(obj)))

    @collection_paused()
    def prepare() -> tuple[Target, State]:
        if is_file and not is_alone:
            raise TypeError("ranks save together to a path: a file object is one process's own")
        _require_order(obj, path)
        if replicated not in _REPLICATED:
            known = ", ".join(map(repr, _REPLICATED))
            raise ValueError(f"replicated must be one of {known}, not {replicated!r}")
        if process_group is not None and isinstance(obj, Checkpoint):
            raise TypeError(
                "a Checkpoint is saved by one process: call it there, without process_group="
            )
        if is_file:
            target = _target_of_file(given, format, max_shard_size)
        else:
            target = Target.of(given, format, max_shard_size, storage_options)
        _require_complete_optimizers(obj, target.path)
        if isinstance(obj, Checkpoint):
            state = take_apart_files(obj, target)
        else:
            state = take_apart(obj, plain=not target.only_tensors)
        target.require_storable(state, metadata)
        state.metadata = metadata or {}
        return target, state

    given: Any = path
    started = time.perf_counter()
    if is_alone:
        target, state = prepare()
        # An object may hold DTensors that only its state_dict() returns.
        if not any(map(is_dtensor, state.tensors.values())):
            options = SaveOptions(checksum, progress)
            if isinstance(obj, Checkpoint):
                options = replace(options, check=partial(require_unchanged, obj))
            else:
                with collection_paused():
                    state.values = [Value.of_tensor(*each) for each in state.tensors.items()]
            if is_file:
                report = _write_to_file(given, target, state, options)
            else:
                report = write_state(target, state, options)
            return replace(report, seconds=time.perf_counter() - started)

        if is_file:
            raise TypeError("ranks save together to a path: a file object is one process's own")

        def prepare() -> tuple[Target, State]:
            return target, state

    # Ctrl-C arrives where the ranks exchange messages. Else the others would wait.
    with uninterrupted():
        options = SaveOptions(checksum, progress)
        ranks = SavingRanks(RankGroup.of_all(process_group=process_group))
        return save_together(ranks, prepare, options, replicated)


def write_state(target: Target, state: State, options: SaveOptions) -> SaveReport:
    """Lay out a state, write it with this process alone, and report.

    Raises:
        PlacementError: If the format does not store a key or a value.
        CheckpointError: If the files cannot be written.
    """
    started = time.perf_counter()
    with write_errors(target.head), collection_paused():
        output = target.lay_out(state, options.checksum)
        target.require_free_place(output.head)
    folder = parent(output.head)
    files = [inside(folder, name) for name in output.files]
    files += [output.head] if output.content is not None else []
    if not options.dry_run:

        def appear(_: Output, made: Files | Objects, written: Sequence[Written]) -> list[str]:
            options.check()
            return commit(output, made, written)

        # Ctrl-C arrives between two blocks, never where files are created or removed.
        with uninterrupted():
            files = write_together(
                SavingRanks(RankGroup([])), output.head, output.kind, lambda: output, appear,
                progress=options.progress,
            ).result  # fmt: skip
    report = _report(target, state, output, files, options.lost)
    return replace(report, written=output.nbytes, seconds=time.perf_counter() - started)


def save_together(
    ranks: SavingRanks,
    prepare: Callable[[], tuple[Target, State]],
    options: SaveOptions,
    replicated: str,
) -> SaveReport:
    """Save from a mesh. All ranks call this.

    Args:
        ranks: The ranks that save.
        prepare: Returns what this rank saves, and where. Its error is raised on all ranks.
        options: How to write.
        replicated: See `save`.

    Raises:
        PlacementError: If ranks hold different things under one key.
        CheckpointError: If a rank fails or dies.
    """
    compare, started = replicated == "equal", time.perf_counter()

    def describe() -> StepResult[tuple[Target, LocalState], Message]:
        target, state = prepare()
        is_folder = target.format == "dcp"
        arguments = {
            "format": target.format, "max_shard_size": target.limit, "checksum": options.checksum,
            "replicated": replicated, "name": name_of(target.head),
        }  # fmt: skip
        with errors_name(target.path):
            if not is_folder and is_url(target.head):
                raise PlacementError(
                    "several ranks cannot write into one object of a store",
                    expected="a DCP folder, to which each rank writes objects of its own",
                    found=f"{len(ranks.ranks)} ranks",
                    hint='Pass format="dcp". torchlift.convert makes one file of that.',
                )
            own = item_key(ranks.number)
            local = LocalState.of(state, compare=compare, sends_objects=not is_folder, prefix=own)
            return StepResult((target, local), local.message(arguments))

    (target, local), messages = ranks.group.run(describe)
    with errors_name(target.path):
        shared = share_state(ranks, local, messages)
        report = _write_shared(ranks, target, shared, options, compare=compare)
    return replace(report, seconds=time.perf_counter() - started)


def _write_shared(
    ranks: SavingRanks, target: Target, shared: SharedState, options: SaveOptions, *, compare: bool
) -> SaveReport:
    """Write what all ranks hold, to a folder or to one file that the first rank makes."""
    head, is_folder = target.head, target.format == "dcp"

    def lay_out() -> Output:
        own = OwnFile(ranks.number)
        skipped = {} if is_folder else shared.tied  # one file has the values of the first key
        for box, value in shared.own_values(ranks.rank, compare=compare, skipped=skipped):
            own.add_box(box.start, value, options.checksum and is_folder)
        if not is_folder:
            return Output(head, {own.name: own.sections}, items=own.items)
        if ranks.leads:
            target.require_free_place(head)
        add_objects(own, shared.objects)
        return dcp_output(target.path, shared.state, shared.stored, own, shared.tied)

    def make_file(_: Output, parts: Files | Objects, written: Sequence[Written]) -> SaveReport:
        views = read_parts(shared, head, parts.temporary.values(), written)
        becomes = partial(dtype_of, path=head)
        with views.files:
            entries = views.index.entries.items()
            values = [Value.of_entry(key, entry, views, becomes) for key, entry in entries]
            made = replace(shared.state, values=values)
            return write_state(target, made, replace(options, progress=False))

    def appear(output: Output, made: Files | Objects, written: Sequence[Written]) -> SaveReport:
        paths = commit(output, made, written)
        nbytes = sum(stored.nbytes for stored in shared.stored.values())
        return replace(_report(target, shared.state, output, paths, {}), nbytes=nbytes)

    saved = write_together(
        ranks, head, DCP_FILES if is_folder else None, lay_out,
        appear if is_folder else make_file, shared.sum_up if compare else dict,
        progress=options.progress,
    )  # fmt: skip
    return replace(saved.result, written=saved.nbytes)


def _report(
    target: Target,
    state: State,
    output: Output,
    files: Sequence[str],
    lost: Mapping[str, str],
) -> SaveReport:
    """Report what was written.

    Args:
        target: where it was saved.
        state: what was saved.
        output: the files.
        files: their paths.
        lost: what is already known not to be kept.
    """
    name = state.name_of
    format = target.format if output.content is None or target.format == "dcp" else "sharded"
    gone = {**state.lost, **lost}
    if format != "torch-zip":
        for key, what in state.containers.items():
            if format != "dcp" or what != LIST:  # DCP records which keys are positions
                gone.setdefault(key or "(all)", what)
        gone |= _versions_in(state)
    pairs = {**find_untied_keys(state.values, output.shared), **output.untied}
    gone |= explain_untied({name(key): name(other) for key, other in pairs.items()})
    cast = {name(v.key): (v.source_dtype, v.stored.dtype) for v in state.values if v.is_cast}
    return SaveReport(
        # A URL as text: a report that is kept or sent must not contain credentials.
        path=str(output.head if format != "dcp" else parent(output.head)),
        format=format,
        files=tuple(map(str, files)),
        tensors=len({name(key) for key in state.tensors}),
        nbytes=output.nbytes,
        tied=state.tied_names(output.tied) if state.parts else dict(output.tied),
        lost=gone,
        cast=cast,
        seconds=0.0,
    )


def _target_of_file(file: Any, format: str | None, max_shard_size: int | str | None) -> Target:
    """Return the target of a save to a file object, which must be open for bytes.

    Raises:
        TypeError: If the file is open for text.
        ValueError: If several files were requested.
        CheckpointError: If it cannot be written.
    """
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
    return Target(shown, format_for(shown, format or "torch-zip"), None)


def _write_to_file(file: Any, target: Target, state: State, options: SaveOptions) -> SaveReport:
    """Write a state to a file object in order. See `_restoring` for its content if that fails.

    Raises:
        PlacementError: If the format does not store a key or a value.
        CheckpointError: If the file cannot be written.
    """
    try:
        with errors_name(target.path), collection_paused():
            output = target.lay_out(state, options.checksum)
    except OSError as error:
        raise _not_written(target.path, error) from error
    ((*sections,),) = output.files.values()
    if target.only_tensors and options.checksum:  # the header contains the checksums
        sections = [*map(with_sums, sections)]
    try:
        with (
            _restoring(file, end_of(sections)) as to,
            progress_bar(options.progress, output.nbytes, "save") as advance,
        ):
            write_sections(Runs(-1, lambda data, _: _put(data, to)), sections, advance)
            options.check()
    except CheckpointError:
        raise
    except Exception as error:
        raise _not_written(target.path, error) from error
    report = _report(target, state, output, [target.path], options.lost)
    return replace(report, path=target.path, written=output.nbytes)


@contextmanager
def _restoring(file: Any, nbytes: int) -> Iterator[Any]:
    """Yield an object that writes at the position of a file object. An error undoes what it wrote.

    Args:
        file: the file object. If it cannot seek, nothing is undone. If it cannot be read, what was
            overwritten stays so.
        nbytes: number of bytes that will be written.
    """
    start, end = _extent(file)
    raw = getattr(file, "raw", None)
    # A buffer would keep bytes for which there is no room, and try again at each later call.
    to = raw if start is not None and isinstance(raw, io.FileIO) else file
    with TemporaryFile() if start is not None and start < end else io.BytesIO() as old:
        try:
            if start is not None:
                to.seek(start)
                while data := _read(to, min(nbytes - old.tell(), end - start - old.tell(), _BLOCK)):
                    old.write(data)
                to.seek(start)
            yield to
            if hasattr(to, "flush"):
                to.flush()
        except BaseException:
            if start is None:
                raise
            with uninterrupted():
                with suppress(Exception):  # it cannot be written
                    old.seek(0)
                    to.seek(start)
                    while data := old.read(_BLOCK):
                        _put(data, to)
                with suppress(Exception):
                    to.truncate(end)
                with suppress(Exception):
                    file.seek(0, os.SEEK_END)
                    file.seek(start)
            raise
    if to is not file:
        position = to.tell()
        file.seek(0, os.SEEK_END)  # its buffer is empty, and it asks where the raw file is
        file.seek(position)


def _put(data: Block, to: Any) -> None:
    left = memoryview(data)
    while left:  # a raw file may write a part of it
        left = left[to.write(left) or len(left) :]


def _read(file: Any, nbytes: int) -> bytes:
    with suppress(Exception):  # it is open for writing only
        return bytes(file.read(nbytes))
    return b""


def _extent(file: Any) -> tuple[int | None, int]:
    """Return the position and the end of a file object. None if it cannot seek, as in gzip."""
    with suppress(Exception):  # each class that compresses raises another error
        start = file.tell()
        file.seek(0, os.SEEK_END)
        return start, file.tell()
    return None, 0


def _not_written(file: str, error: Exception) -> CheckpointError:
    """Return our error for an error of a file object, which may raise any class."""
    return CheckpointError(
        "the file object cannot be written",
        file=file,
        found=f"{type(error).__name__}: {error}".partition("\n")[0],
        hint="Open it for writing, with room for the file.",
    )


def _inside(obj: object) -> Iterator[object]:
    """Yield the objects inside of a state, without calling any ``state_dict``."""
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


def _require_order(obj: object, path: object) -> None:
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


def _require_complete_optimizers(obj: object, path: str) -> None:
    """Refuse an optimizer whose state is flat pieces on all ranks.

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
                "each rank has a flat piece of its state under FullyShardedDataParallel, and no "
                "rank has all of it",
                file=path,
                entry=type(item).__name__,
                expected="an optimizer of complete parameters or of DTensors",
                hint="Save what torchlift.distributed.get_optimizer_state_dict(model, optimizer, "
                "options=StateDictOptions(full_state_dict=True, cpu_offload=True)) returns, or "
                "shard the model with fully_shard.",
            )


def require_savable(obj: object, path: str, arrays: Arrays | None = None) -> State:
    """Take a state apart, and refuse one that torchlift could not read back from a checkpoint.

    Plain data is pickled and read back. Tensors are not: that would take longer than their copy.

    Args:
        obj: the state.
        path: of the checkpoint, for errors.
        arrays: see `take_apart`.

    Raises:
        PlacementError: If there is such a value.
    """
    state = take_apart(obj, arrays=arrays)
    for key, tensor in state.tensors.items():
        stored_as(key, tensor)
        local = local_tensor(tensor)
        if 0 in local.stride():  # a broadcast view, such as an expanded mask
            value = Value.of_tensor(key, local)
            require_stored(value, value.span)
    with errors_name(path):
        require_readable({key: Leaf(key) for key in state.objects}, state.objects)
    return state


def require_unchanged(ckpt: Checkpoint) -> None:
    """Refuse a checkpoint whose files have changed since it was opened.

    Raises:
        IntegrityError: If one has.
    """
    for file, stamp in ckpt._index.files.items():
        stamp.check(file)


def take_apart_files(
    ckpt: Checkpoint,
    target: Target,
    becomes: Becomes | None = None,
    dropped: Collection[str] = (),
    made: Callable[[str, TensorEntry], torch.Tensor | None] | None = None,
    containers: Any = None,
) -> State:
    """Take apart a checkpoint in files. No tensor is read.

    Args:
        ckpt: the checkpoint. It stays open until it is written.
        target: where it is saved.
        becomes: returns the dtype that a tensor is saved with; None: its own.
        dropped: keys of its containers that it does not have, because they are left out.
        made: returns the tensor to save in place of the one in the file, or None.
        containers: those of renamed keys, if they contain all keys; None: those of the file.

    Raises:
        UnsafeError: If a value could only be rebuilt by running code.
        PlacementError: If a file cannot store a value.
    """
    for key, why in ckpt.blocked_keys.items():
        error = ckpt._refusal(key)
        if why not in OF_RANKS:
            this = Argument("exclude", f"[{key!r}]", (key,))
            error.hint = Hint("Leave it out: ", this, ".")
        raise error
    # The caller may have written to tensors of this checkpoint: a map of its own has the file's.
    index, views = ckpt._index, ckpt._anew()._mapped()
    entries = dict(index.entries.items())
    leaves = {**entries, **index.objects}
    if index.tree is not None:
        tree: Any = Tree(index, lambda entry: entry, ckpt._refusal, dropped).rebuild(None)
    else:
        tree = versioned(gathered(leaves, index.templates), index.module_versions or None)
    if containers is not None:
        found = take_apart(containers, plain=False)
        if {*found.tensors, *found.objects} == leaves.keys():
            tree = containers
    state = take_apart(tree, plain=not target.only_tensors, replaced=made)
    # The containers and the keys of an index describe the same content.
    assert {*map(state.name_of, state.tensors)} == entries.keys()
    becomes = becomes or partial(dtype_of, path=index.path)
    values = list[Value]()
    for key, source in state.tensors.items():
        part, entry = state.parts.get(key), entries[state.name_of(key)]
        rule = becomes
        if part is not None:
            rule = partial(_dtype_of_part, becomes, entry, part, index.path)
        if isinstance(source, TensorEntry):
            values.append(Value.of_entry(key, source, views, rule))
            continue
        seen = entry._replace(dtype=str(source.dtype).removeprefix("torch."))
        values.append(replace(Value.of_tensor(key, source), dtype=rule(seen)))
    state.values = values
    return state


def _dtype_of_part(
    becomes: Becomes, whole: TensorEntry, part: Part, path: str, entry: TensorEntry
) -> torch.dtype:
    """Return the dtype for a part of a tensor. Indices and codes keep their own."""
    return becomes(whole) if part.has_values else dtype_of(entry, path)


def _versions_in(state: State) -> dict[str, str]:
    """Return, under one key, the modules that would treat values without a version as old."""
    # Version 2 of BatchNorm says that this tensor exists, as its key does.
    needed = [
        f"{path or 'the whole'} has {version}"
        for path, version in state.versions.items()
        if version != 1
        and (version != 2 or f"{path}.num_batches_tracked".removeprefix(".") not in state.tensors)
    ]
    what = f"versions of modules, by which they know older values: {clipped_list(needed)}"
    return {"(versions)": what} if needed else {}

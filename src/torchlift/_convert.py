"""`convert`: a checkpoint of any format to another one, in the memory of some blocks."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Container, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryFile
from typing import IO, Any, Literal

import torch

from torchlift._checkpoint.checkpoint import Checkpoint, dtype_of
from torchlift._checkpoint.kinds import Allow, call_of
from torchlift._checkpoint.tree import Tree, arranged, gathered, objects_as_saved
from torchlift._load.checks import not_finite_error, require_intact
from torchlift._load.fetch import apply_transform
from torchlift._model.dtensor import is_dtensor
from torchlift._plan.names import (
    Rewriting,
    rename_objects,
    rewrite_entries,
    templates_by_name,
    versions_by_name,
)
from torchlift._plan.rules import (
    DtypeRule,
    Options,
    Patterns,
    Rename,
    Transform,
    check_rename,
    check_rule,
    same_name_error,
    stored_dtype,
)
from torchlift._save.blocks import memory_of
from torchlift._save.files import write_errors
from torchlift._save.pickling import AS_TENSOR, is_array
from torchlift._save.saving import (
    SaveOptions,
    SaveReport,
    require_unchanged,
    take_apart_files,
    write_state,
)
from torchlift._save.target import Target
from torchlift._save.values import Becomes, State, explain_untied, stored_as
from torchlift._sources.opening import (
    Given,
    index_of,
    is_state,
    open_layers,
    state_hint,
    tensors_in,
)
from torchlift._sources.tensors import FileTensor, tensor_of
from torchlift._store.places import exists, is_url, place_of
from torchlift._system.memory import collection_paused, trim
from torchlift._transfer.casting import Checked, NotFinite, count_overflows, is_narrower
from torchlift.errors import (
    Argument,
    CheckpointError,
    Hint,
    MismatchError,
    PlacementError,
    explain_calls,
    wrong_call,
)
from torchlift.formats.flattening import select, state_dicts_in
from torchlift.formats.index import (
    OF_RANKS,
    Index,
    TensorEntry,
    lacking,
    left_out,
    of_model,
    renamed,
    used_by,
)
from torchlift.formats.scales import Quantised, find_quantised
from torchlift.formats.source import errors_name

#: Why safetensors do not keep a value.
_NOT_A_TENSOR = "it is not a tensor"
#: Formats whose metadata was written by the author of the file.
_TEXTS = ("safetensors", "sharded", "gguf")
#: Metadata about the files, which new files must not repeat.
_BYTES_ONLY = ("format", "total_size")
#: Bytes of results between two releases of freed memory.
_BETWEEN = 16 * 2**20
#: Bytes of results that are mapped at once, at most and as a multiple, and the alignment of one.
_AREA, _STEP, _ALIGNED = 256 * 2**20, mmap.ALLOCATIONGRANULARITY, 64
_NOT_OF_MODEL = "it does not belong to the model: convert it by itself with root="


@explain_calls
def convert(
    src: Given | Sequence[Given],
    dst: str | os.PathLike[str],
    *,
    format: str | None = None,
    root: str | None = None,
    include: Patterns = ("*",),
    exclude: Patterns = (),
    rename: Rename | None = None,
    dtype: DtypeRule = None,
    transform: Transform | None = None,
    allow_classes: Allow = (),
    max_shard_size: int | str | None = None,
    overwrite: bool = False,
    progress: bool = False,
    checksum: bool = True,
    verify: bool = True,
    dry_run: bool = False,
    check: Literal["finite"] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> SaveReport:
    """Convert a checkpoint to another format, dtype or naming, without loading all of it.

    The conversion needs about 32 MiB of memory for any size. The destination appears when it is
    complete, as with `torchlift.save`. The source is only read.

    Safetensors hold tensors only, with keys joined by dots. Other values are left out and listed in
    the report. See "Convert" in the guide.

    Args:
        src: A path, a URL, an open `Checkpoint`, a state dict in memory, or a list of these. In a
            list, a later source wins.
        dst: A file, a folder or a URL. Its suffix selects the format, as in `torchlift.save`.
        format: ``"torch-zip"``, ``"safetensors"``, ``"sharded"`` or ``"dcp"``. Default: by suffix.
        root: Key prefix to select and remove. See `torchlift.open`.
        include: Glob patterns of keys to convert, below `root` and before `rename`.
        exclude: Glob patterns of keys to skip.
        rename: A dict of keys, a callable from a key to a new key or None, or a rule of
            `torchlift.remap`.
        dtype: A dtype or its name for all floating-point tensors, or a callable from `TensorEntry`.
            Scales of quantised tensors keep theirs.
        transform: A callable from (new key, tensor) to a tensor, called once for each key. Results
            wait in a temporary file next to `dst`. Tied keys are not tied any more.
        allow_classes: Tensor subclasses that may be rebuilt. See `torchlift.open`.
        max_shard_size: Maximum size of a safetensors shard in bytes, or text such as ``"5GB"``.
        overwrite: Replace an existing destination, which may be the source.
        progress: Show a bar of bytes on stderr.
        checksum: Record checksums in the destination.
        verify: Compare the checksums of the source before the destination appears.
        dry_run: Report what would be written, and write nothing.
        check: ``"finite"`` refuses NaN and infinite values after the cast. Default: no check.
        storage_options: Options of URLs. See `torchlift.open`.

    Raises:
        MismatchError: If a pattern matches nothing, two keys get one name, or no tensor is left.
        PlacementError, UnsafeError: If the format does not store a value, a cast would separate
            codes from their scales, or code would run.
        FormatError, IntegrityError: If the source is damaged, or `check` finds a value.
        CheckpointError: If the destination exists without `overwrite`, or cannot be written.

    Example:
        >>> import torch, torchlift, tempfile, os
        >>> folder = tempfile.mkdtemp()
        >>> src, dst = os.path.join(folder, "old.pth"), os.path.join(folder, "new.safetensors")
        >>> torch.save({"model": {"weight": torch.ones(2)}, "epoch": 3}, src)
        >>> torchlift.convert(src, dst, root="model", dtype="bfloat16").tensors
        1
    """
    options = Options(
        rename=rename, dtype=dtype, include=include, exclude=exclude, transform=transform,
        check=check,
    )  # fmt: skip
    if dtype == "model":  # which would leave everything as it is
        raise ValueError("dtype='model': a conversion has no model. Pass the name of a dtype.")
    if not isinstance(dst, (str, bytes, os.PathLike)):
        raise wrong_call("convert", f"expected a path to write to, not a {type(dst).__name__}")
    target = Target.of(dst, format, max_shard_size, storage_options)
    given = _to_list(src, storage_options)
    with ExitStack() as stack:
        planning = stack.enter_context(ExitStack())
        if transform is None:  # a transform may make cycles of large tensors
            planning.enter_context(collection_paused())
        # One checkpoint is opened with what is not below `root`. Else the records of its other
        # tensors would count as data without a name, and would have to be intact, too.
        above = None if len(given) == 1 and not is_state(given[0]) else root
        layers = stack.enter_context(open_layers(given, above, allow_classes, whole=True))
        index = index_of(layers)
        source = _Source(given, layers, index if root == above else select(index, str(root)))
        _require_free(target, overwrite)
        table = _make_table(source, options, root, target)
        index, lost = table.index, {**table.lost}
        ckpt = stack.enter_context(Checkpoint(index if verify else _without_checksums(index)))
        read = {key: source.index.entries[key] for keys in table.keys.values() for key in keys}
        quantised = find_quantised(source.index.entries)
        if transform is None:
            lost |= _find_scales_left_out(quantised, read)
        quantised = Quantised() if dtype is None else quantised.renamed(table.keys)
        becomes = partial(_stored_dtype, options.dtype, quantised, path=ckpt.path)
        results = _Results(ckpt, transform, becomes, target, stack)
        if verify and not dry_run and transform is not None:
            require_intact(source.checkpoints)  # before the transform gets their values
        replaced = results.of if transform is not None or tensors_in(layers) else None
        dropped = _keys_of(source.index) - _keys_of(index)
        state = take_apart_files(ckpt, target, becomes, dropped, replaced, table.containers)
        if verify and not dry_run and transform is None:
            _require_intact_rest(state, read, source)
        if transform is not None:
            lost |= _find_untied(ckpt.entries, state.tensors)
        if target.only_tensors:
            lost |= dict.fromkeys(state.objects, _NOT_A_TENSOR)
        texts = _metadata_of(source.checkpoints)
        formats = {one.format for one in source.checkpoints}
        if target.only_tensors and formats.isdisjoint(_TEXTS[2:]):  # their metadata is not text
            state.metadata = texts
        elif texts:
            lost["(metadata)"] = f"the format has no place for {', '.join(sorted(texts))}"
        hint = _root_hint(source, root, target, state.tensors)
        for value in state.values:
            stored = getattr(torch, value.source_dtype)
            if check is not None or is_narrower(stored, value.dtype):
                value.checked = Checked()

        def check_written() -> None:
            require_unchanged(ckpt)
            # Another program may have made it in the meantime.
            _require_free(target, overwrite)
            if check is not None and (found := _find_not_finite(state)):
                raise not_finite_error(found, ckpt.path, "convert")

        planning.close()
        written = SaveOptions(checksum, progress, lost=lost, check=check_written, dry_run=dry_run)
        made = write_state(target, state, written)
        left = quantised.scales if transform is None else {}
        left = {key: left[key] for key in state.tensors if key in left}
        overflowed = {**results.overflowed, **_count_overflows(state)}
        return replace(made, hint=hint, quantised=left, overflowed=overflowed)


@dataclass(frozen=True, slots=True)
class _Source:
    """What is converted.

    Attributes:
        given: what the caller passed.
        layers: the same, open.
        index: of all of it, below `root`.
    """

    given: Sequence[Any]
    layers: Sequence[Any]
    index: Index

    @property
    def is_one_file(self) -> bool:
        """Return whether it is one checkpoint."""
        return len(self.given) == 1 and not is_state(self.given[0])

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints among the layers."""
        return [layer for layer in self.layers if isinstance(layer, Checkpoint)]


@dataclass(frozen=True, slots=True)
class _Table:
    """The keys that are kept, and the reason for each other key.

    Attributes:
        index: The kept keys, under their new names.
        keys: New name -> the keys of the source that its tensor is made of.
        lost: Key, or container that is not a model -> why it is not kept. Keys that the caller
            leaves out are not in it.
        containers: The containers with renamed keys, if the new file keeps them.
    """

    index: Index
    keys: Mapping[str, tuple[str, ...]]
    lost: Mapping[str, str]
    containers: Any = None


def _to_list(src: Given | Sequence[Given], storage_options: Mapping[str, Any] | None) -> list[Any]:
    """Return the sources, URLs with their options."""
    given: Sequence[Any] = src if isinstance(src, (list, tuple)) else [src]
    return [place_of(one, storage_options) if is_url(one) else one for one in given]


def _keys_of(index: Index) -> set[str]:
    return {*index.entries, *index.objects, *index.blocked_keys}


def _without(index: Index, keys: Collection[str]) -> Index:
    """Return an index without some keys. Its containers stay as they are."""
    return renamed(index, lambda key: None if key in keys else key) if keys else index


def _make_table(source: _Source, options: Options, root: str | None, target: Target) -> _Table:
    """Decide which keys are kept, and under which names.

    Raises:
        MismatchError: If a pattern or a rename matches nothing, two keys get one name, or no
            tensor is left.
        PlacementError: If a state in memory contains an object that is not plain data, or an array
            where only tensors are stored.
        UnsafeError: If every value could only be rebuilt by running code.
    """
    index, lost, containers = source.index, dict[str, str](), None
    others = [*index.objects, *index.blocked_keys]
    dropped = left_out(index.entries, others, options.include, options.exclude, index.path)
    index = _without(index, dropped)
    _require_plain(index, source, target)
    if target.only_tensors:
        for name in index.aside:
            refusal = lacking(index.path, name, index.blocked_keys.get(name))
            lost[name] = refusal.reason if refusal else _NOT_OF_MODEL
        index = of_model(index)
    keys: Mapping[str, tuple[str, ...]] = {key: (key,) for key in index.entries}
    if options.rename is not None:
        if isinstance(options.rename, Rewriting):
            for one in source.checkpoints:
                options.rename.check(one._index.metadata, one.path)
        # Containers are taken apart: their values must be those that were in them.
        before = replace(index, objects={**index.objects, **objects_as_saved(index)})
        index, keys = _rename_keys(before, options.rename)
        if before.tree is not None and not target.only_tensors:
            containers = _rename_containers(before, index, _keys_of(source.index))
    with Checkpoint(index) as ckpt:
        check_rule(options.dtype, list(ckpt.entries), present=False)
        _require_something(ckpt, source, root, target)
        # Values that contain tensors stay, and so do all if the new file stores plain data.
        blocked = ckpt.blocked_keys.keys() - ckpt.blocked_tensors.keys()
        left = blocked if target.only_tensors else set()
        lost |= {key: ckpt._refusal(key).reason for key in left}
    return _Table(_without(index, left), keys, lost, containers)


def _require_plain(index: Index, source: _Source, target: Target) -> None:
    """Refuse objects and arrays of a state in memory that the new file does not store.

    Raises:
        PlacementError: If there is one.
    """
    hint = state_hint(index.objects) if any(map(is_state, source.given)) else None
    if hint:
        raise PlacementError("an object cannot be converted", file=index.path, hint=hint)
    arrays: dict[str, Any] = {k: value for k, value in index.objects.items() if is_array(value)}
    if target.only_tensors and arrays:  # of memory: those of a file are records
        key, value = arrays.popitem()
        raise PlacementError(
            "an array of NumPy is not a tensor",
            file=index.path,
            entry=key,
            expected="a tensor",
            found=f"a numpy array of {value.dtype} {list(value.shape)}",
            hint=AS_TENSOR,
        )


def _find_scales_left_out(quantised: Quantised, kept: Container[str]) -> dict[str, str]:
    """Return the scales that are left out although their tensors are kept, with the reason."""
    return {
        scale: f"the values of {codes}, which is kept, are wrong without it"
        for codes, scales in quantised.scales.items()
        if codes in kept
        for scale in scales
        if scale not in kept
    }


def _stored_dtype(
    rule: DtypeRule, quantised: Quantised, entry: TensorEntry, *, path: str
) -> torch.dtype:
    """Return the dtype that a rule gives a tensor, which may be quantised or be a scale.

    Raises:
        PlacementError: If the rule would cast codes without their scales.
    """
    stored, made = dtype_of(entry, path), stored_dtype(rule, entry, path)
    if made != stored and entry.key in quantised.of_scales:
        return stored
    # A transform that applies the scales returns other numbers than codes.
    if made != stored and quantised.needs_scale(entry.key, entry.dtype):
        raise quantised.cast_error(entry.key, entry.dtype, path)
    return made


def _count_overflows(state: State) -> dict[str, int]:
    """Return key -> the number of its values that overflowed in the cast."""
    found = ((state.name_of(value.key), value.checked) for value in state.values)
    return {key: checked.overflowed for key, checked in found if checked and checked.overflowed}


def _find_not_finite(state: State) -> dict[str, NotFinite]:
    """Return key -> the numbers of its values that are not finite."""
    found = ((state.name_of(value.key), value.checked) for value in state.values)
    return {
        key: checked.not_finite for key, checked in found if checked and any(checked.not_finite)
    }


def _without_checksums(index: Index) -> Index:
    bare = {name: found._replace(crc32=None) for name, found in index.storages.items()}
    return replace(index, storages=bare)


def _require_intact_rest(state: State, read: Mapping[str, TensorEntry], source: _Source) -> None:
    """Compare the checksums of bytes that are not compared while they are written.

    Args:
        state: what is written.
        read: the entries of the source that are converted.
        source: the source.

    Raises:
        IntegrityError: If one is wrong.
    """
    sources = (value.source for value in state.values if value.crc32 is not None)
    compared = {entry.storage for entry in sources if isinstance(entry, TensorEntry)}
    storages = source.index.storages
    only = used_by(read, storages).keys() - compared if source.is_one_file else None
    require_intact(source.checkpoints, only=only)


def _metadata_of(checkpoints: Iterable[Checkpoint]) -> dict[str, str]:
    """Return the metadata of the author, which a safetensors file keeps."""
    texts = [one for one in checkpoints if one.format in _TEXTS]
    return {k: v for one in texts for k, v in one.metadata.items() if k not in _BYTES_ONLY}


class _Results:
    """Results of the transform, and tensors of memory, that replace tensors of the files.

    Args:
        ckpt: the files.
        transform: the caller's transform, or None.
        becomes: returns the dtype of a tensor in the new file.
        target: where it is saved. Results wait in a file without a name in the same folder; for a
            URL, in the folder of temporary files.
        stack: closes that file.
    """

    def __init__(
        self,
        ckpt: Checkpoint,
        transform: Transform | None,
        becomes: Becomes,
        target: Target,
        stack: ExitStack,
    ) -> None:
        self._ckpt, self._transform, self._becomes = ckpt, transform, becomes
        self._head, self._format, self._stack = target.head, target.format, stack
        self._file: IO[bytes] | None = None
        self._area: mmap.mmap | None = None  # a part of that file, from `_start` on
        self._start = self._at = 0
        self._passed = 0  # bytes of results since freed memory was last released
        self.overflowed = dict[str, int]()  # key -> values that overflowed in the cast

    def of(self, key: str, entry: TensorEntry) -> torch.Tensor | None:
        """Return the tensor to save under a key, or None for the one in the file.

        Raises:
            TypeError: If the transform did not return a tensor.
            PlacementError: If its result cannot be saved.
        """
        one = tensor_of(entry, (key,), self._ckpt._mapped())
        if self._transform is None and isinstance(one, FileTensor):
            return None
        made = one.tensor()
        if self._transform is not None:  # which may write to what it gets
            made = apply_transform(self._transform, key, made.detach().clone(), self._ckpt.path)
        if is_dtensor(made):
            raise PlacementError(
                "has its values on several ranks, but one process converts",
                file=self._ckpt.path,
                entry=key,
                found=f"a {type(made).__name__}",
                hint="Save it on all ranks with torchlift.save, and convert that file.",
            )
        if self._format == "torch-zip" and call_of(made) is not None:
            return made.detach()
        with errors_name(self._ckpt.path):
            stored_as(key, made)
        if self._transform is None:
            return made
        seen = entry._replace(key=key, dtype=str(made.dtype).removeprefix("torch."))
        before, made = made, made.detach().to("cpu", self._becomes(seen)).contiguous()
        if count := count_overflows(before.detach(), made):
            self.overflowed[key] = count
        with write_errors(self._head):
            return self._kept(made)

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor in a file on disk, mapped: it does not take memory of this process."""
        tensor = tensor.resolve_conj().resolve_neg()
        if not tensor.numel():
            return tensor
        if self._file is None:
            folder = None if is_url(self._head) else os.path.dirname(self._head)
            while folder and not os.path.isdir(folder):
                folder = os.path.dirname(folder)
            self._file = self._stack.enter_context(TemporaryFile(dir=folder))  # noqa: SIM115
        if self._area is None or self._at + tensor.nbytes > len(self._area):
            # Each map has a descriptor: one for each tensor would be too many. A first map of a
            # fixed size would need a limit on file sizes above it, whatever the results need.
            self._start += len(self._area or ())
            size = max(tensor.nbytes, min(_AREA, self._start // 4))
            size = -(-size // _STEP) * _STEP
            self._file.truncate(self._start + size)  # it takes space on the disk when it is written
            self._area, self._at = mmap.mmap(self._file.fileno(), size, offset=self._start), 0
        self._file.seek(self._start + self._at)
        self._file.write(memory_of(tensor))
        self._file.flush()
        self._passed += tensor.nbytes
        if self._passed > _BETWEEN:
            trim()  # memory that the transform has freed
            self._passed = 0
        values = torch.frombuffer(
            self._area, dtype=torch.uint8, count=tensor.nbytes, offset=self._at
        )
        self._at += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        return values.view(tensor.dtype).view(tensor.shape)


def _root_hint(
    source: _Source, root: str | None, target: Target, tensors: Iterable[str]
) -> Hint | None:
    """Return which root selects the model of a training's file, if its container is now a prefix.

    Readers of the new file would get keys such as ``model.weight``, which match no model.
    """
    if not target.only_tensors or root is not None or len(source.given) != 1:
        return None
    tree = source.index.tree
    saved = source.given[0] if is_state(source.given[0]) else tree[0] if tree else None
    keys = source.index.entries.keys() & {*tensors}
    names = [name for name in state_dicts_in(saved) if any(k.startswith(f"{name}.") for k in keys)]
    if not names:
        return None
    return Hint(
        f"Keys of the new file start with {names[0] + '.'!r}, the name of a container. Pass ",
        Argument("root", repr(names[0]), (names[0],)),
        " to write only that container, without the prefix.",
    )


def _require_something(ckpt: Checkpoint, source: _Source, root: str | None, target: Target) -> None:
    """Refuse to write a file without tensors, unless it is a torch file or DCP of plain data.

    Raises:
        UnsafeError: If every value could only be rebuilt by running code.
        MismatchError: If the source does not contain a tensor, or all are left out.
    """
    is_plain = root is None and not source.index.entries and not target.only_tensors
    left = ckpt.entries or (is_plain and ckpt.objects)
    for key in () if left else ckpt.blocked_keys:
        error = ckpt._refusal(key)
        if ckpt.blocked_keys[key] not in OF_RANKS:
            error.hint = "Nothing else can be written. Ask for a file that contains tensors."
        raise error
    if left or (is_plain and not source.index.objects):  # an empty file stays an empty file
        return
    raise MismatchError(
        "nothing to write: no tensor is left",
        file=ckpt.path,
        expected="root=, include=, exclude= and rename= that keep a tensor",
        hint="List the keys with torchlift inspect, and select some of them. A torch file (.pt) "
        "keeps a checkpoint of plain data, too.",
    )


def _require_free(target: Target, overwrite: bool) -> None:
    """Refuse to replace a file, which may be the source, without `overwrite`.

    Raises:
        CheckpointError: If the destination exists.
    """
    for path in () if overwrite else target.heads:
        if (exists if is_url(path) else os.path.lexists)(path):
            way_out = Argument("overwrite", "True")
            raise CheckpointError(
                "there is something of this name",
                file=path,
                hint=Hint("Name another path, or pass ", way_out, " to replace it.")
                if path == target.heads[0]
                # Shards next to one file, or the reverse: a save refuses to replace these.
                else "Name a path in another folder, or remove it first.",
            )


def _rename_keys(index: Index, rename: Rename) -> tuple[Index, dict[str, tuple[str, ...]]]:
    """Return an index under its new names, without containers, and new name -> its keys.

    Raises:
        MismatchError: If two keys get one name.
        TypeError: If a new name is not text.
    """
    check_rename(rename, _keys_of(index), index.path)
    made = rewrite_entries(index.entries, rename, index.path)
    names = rename_objects([*index.objects, *index.blocked_keys], rename, index.path, made)
    for key, name in names.items():
        if name in made:
            raise same_name_error(name, made[name].keys[0], key, index.path)
    new_names = {key: name for name, item in made.items() for key in item.keys} | names
    renamed = replace(
        index,
        tensors={name: item.entry._replace(key=name) for name, item in made.items()},
        objects=_select(index.objects, names),
        blocked_keys=_select(index.blocked_keys, names),
        blocked_tensors=_select(index.blocked_tensors, names),
        module_versions=versions_by_name(index.module_versions, new_names),
        templates=templates_by_name(index.templates, new_names),
        tree=None,
    )
    return renamed, {name: item.keys for name, item in made.items()}


def _rename_containers(before: Index, index: Index, saved: set[str]) -> Any:
    """Return the containers of a file with the renamed values of an index.

    Args:
        before: the index before it was renamed.
        index: the renamed index.
        saved: all keys of the containers.
    """
    leaves: dict[str, object] = {**index.entries, **index.objects}
    known = {**before.entries, **before.objects}
    same = {
        key
        for key in leaves.keys() & known.keys()
        if leaves[key] is known[key]
        or (key in index.entries and index.entries[key] == before.entries.get(key))
    }
    with Checkpoint(before) as ckpt:
        tree = Tree(before, lambda entry: entry, ckpt._refusal, saved - _keys_of(before))
        new = {key: value for key, value in leaves.items() if key not in same}
        new = gathered(new, index.templates)
        return arranged(tree, before, known.keys() - same, new, index.module_versions)


def _find_untied(entries: Mapping[str, TensorEntry], keys: Iterable[str]) -> dict[str, str]:
    """Return key -> the reason, for tied keys whose tensors a transform has made separate."""
    first: dict[Hashable, str] = {}
    kept = {
        key: first.setdefault((entry.storage, entry.chunks), key)
        for key, entry in ((key, entries[key]) for key in keys if key in entries)
        if entry.chunks
    }
    return explain_untied({key: other for key, other in kept.items() if key != other})


def _select(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names[key]: value for key, value in values.items() if key in names}

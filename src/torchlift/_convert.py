"""`convert`: a checkpoint of any format to another one, in the memory of some blocks."""

from __future__ import annotations

import mmap
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from tempfile import TemporaryFile
from typing import IO, Any

import torch

from torchlift._checkpoint.checkpoint import Checkpoint
from torchlift._checkpoint.kinds import Allow, call_of
from torchlift._checkpoint.tree import Tree, arranged, gathered, objects_as_saved
from torchlift._load.fetch import transformed
from torchlift._load.loading import require_intact
from torchlift._model.dtensor import is_dtensor
from torchlift._model.hooks import templates_by_name, versions_by_name
from torchlift._plan.names import Rewriting, others, rewritten
from torchlift._plan.rules import (
    DtypeRule,
    Options,
    Patterns,
    check_rename,
    check_rule,
    same_name,
    stored_dtype,
)
from torchlift._plan.steps import Rename, Transform
from torchlift._save.blocks import memory_of
from torchlift._save.saving import (
    SaveOptions,
    SaveReport,
    require_unchanged,
    take_apart_files,
    write_state,
)
from torchlift._save.target import Target
from torchlift._save.values import Becomes, stored_as, untied
from torchlift._sources.opening import Given, index_of, is_state, opened, state_hint, tensors_in
from torchlift._sources.tensors import FileTensor, SourceTensor, tensor_of
from torchlift._store.files import FileStamp
from torchlift._store.places import exists, is_url, place_of
from torchlift._system.containers import map_leaves
from torchlift._system.memory import collection_paused, trim
from torchlift.errors import (
    Argument,
    CheckpointError,
    Hint,
    NotFound,
    PlacementError,
    explain_calls,
    wrong_call,
)
from torchlift.formats.flattening import select, state_dicts_in
from torchlift.formats.index import (
    OF_RANKS,
    Index,
    Leaf,
    TensorEntry,
    lacking,
    left_out,
    of_model,
    require_kept,
    used_by,
)
from torchlift.formats.source import errors_name

#: What a format without a place for it does not keep.
_AN_OBJECT = "it is no tensor"
#: Formats in which metadata is the author's, and not the format's own.
_TEXTS = ("safetensors", "sharded", "gguf")
#: What metadata says of the files, and not of what is in them.
_BYTES_ONLY = ("format", "total_size")
#: Bytes of results between two releases of freed memory.
_BETWEEN = 16 * 2**20
#: Bytes of results that are mapped at once, and where one may begin, for every dtype.
_AREA, _ALIGNED = 256 * 2**20, 64
_ASIDE = "it holds no model; convert it by itself with root="


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
    storage_options: Mapping[str, Any] | None = None,
) -> SaveReport:
    """Convert a checkpoint into another format, dtype, layout or naming, without loading it.

    It is read and written a block at a time: some 32 MiB of memory, whatever its size. A tensor
    that the source has compressed (``numpy.savez_compressed``, a zip that was deflated) is the
    exception: it is inflated whole. Of a `transform`, one tensor is in memory, and what becomes of
    it; the results wait on the disk beside `dst`, in a file without a name. The new files appear
    when they are whole, as with `torchlift.save`; the old ones are only read.

    A torch file keeps the sparse and quantised tensors of another one; other formats need a
    `transform` that makes them dense. What a `transform` returns of such a kind waits in memory.

    Aliases and ties stay where the format can have them. Files of PyTorch and DCP keep their
    containers (lists, plain data and, of files, integer keys) in a torch file; what `rename` leaves
    below a dict of a file stays in it, but for names inside of lists: then all are flat.
    safetensors hold what belongs to the model only, by its dotted names; the report lists what they
    do not keep.

    Args:
        src: what `torchlift.open` reads, a checkpoint that is open, a state dict in memory, or a
            list of these, of which a later one wins; but for one file, names are flat.
        dst: the file or folder to write, or its URL; see `torchlift.save` for what its suffix says,
            and how it writes to a store.
        format: ``"torch-zip"``, ``"safetensors"``, ``"sharded"`` or ``"dcp"``. None: the suffix.
        root: keep only what is under this container, and strip it. Without it the keys of a
            training's file begin with ``model.`` in safetensors: ``report.hint`` names the root.
        include: patterns of keys, below `root` and before they are renamed; ``*`` stands for any
            text, dots included.
        exclude: patterns of keys to leave out, of those.
        rename: a dict of names, or a callable from a key to its new name, or to None to drop it, as
            `torchlift.remap.strip` and `torchlift.remap.rules` do; or a rule that merges and
            splits, such as `torchlift.remap.merge`, whose ``reversed()`` is the way back.
        dtype: a floating-point dtype or its name, for all tensors of floating-point numbers; or a
            callable from `TensorEntry` to one or None, such as `torchlift.remap.by_pattern`.
        transform: callable from (new name, a tensor of its own) to a tensor, called once for each,
            before anything is written; its result may have another shape and dtype, and is cast.
            Of tied names each has its own: they are tied no more, which of files the report says.
        allow_classes: tensor subclasses that may be rebuilt, for a transform that makes plain
            tensors of them; see `torchlift.open`.
        max_shard_size: bytes of tensors in a shard, or text such as ``"5GB"``.
        overwrite: whether to replace what is there, be it the source itself.
        progress: show a bar of bytes on stderr.
        checksum: whether to record checksums.
        verify: compare the checksums that the source has of what is converted, before a new file
            appears: a damaged file would become one whose checksums are right. Of a local file
            without any, it is the one that a hub records of it, as in `torchlift.load`.
        dry_run: write nothing, and report what would be written.
        storage_options: of URLs, `src` and `dst`, as in `torchlift.open`.

    Returns:
        What was written, and what the format does not keep.

    Raises:
        UnsafeError: a value that the format could hold can only be had by running code; leave it
            out by `exclude`. safetensors hold tensors: there a value without any is ``lost``.
        MismatchError: patterns fit nothing, two keys get one name, or nothing is left of all the
            tensors that the source has.
        PlacementError: the format cannot hold a name or a value, or there is none to write.
        FormatError, IntegrityError: the source is damaged, or changes meanwhile.
        CheckpointError: there is something at `dst`, or it is the source, and not `overwrite`; or
            the files cannot be written, see `torchlift.save`.

    Example:
        >>> import torch, torchlift, tempfile, os
        >>> folder = tempfile.mkdtemp()
        >>> src, dst = os.path.join(folder, "old.pth"), os.path.join(folder, "new.safetensors")
        >>> state = {"model": {"module.weight": torch.ones(2)}, "epoch": 3}
        >>> torch.save(state, src, _use_new_zipfile_serialization=False)
        >>> strip = torchlift.remap.strip("module.")
        >>> report = torchlift.convert(src, dst, root="model", rename=strip, dtype="bfloat16")
        >>> torchlift.open(dst)["weight"]
        tensor([1., 1.], dtype=torch.bfloat16)
    """
    options = Options(
        rename=rename, dtype=dtype, include=include, exclude=exclude, transform=transform
    )
    if dtype == "model":  # which would leave everything as it is
        raise ValueError("dtype='model': a conversion has no model; expected the name of a dtype")
    if not isinstance(dst, (str, bytes, os.PathLike)):
        raise wrong_call("convert", f"expected a path to write to, not a {type(dst).__name__}")
    target = Target.of(dst, format, max_shard_size, storage_options)
    with ExitStack() as stack:
        planning = stack.enter_context(ExitStack())
        if transform is None:  # which may make cycles of large tensors
            planning.enter_context(collection_paused())
        # Of one checkpoint all is opened, so that what the root leaves out is seen.
        given: Sequence[Any] = src if isinstance(src, (list, tuple)) else [src]
        given = [place_of(one, storage_options) if is_url(one) else one for one in given]
        alone = len(given) == 1 and not is_state(given[0])
        try:
            layers = stack.enter_context(
                opened(given, None if alone else root, allow_classes, whole=True)
            )
        except NotFound as error:
            if exists(target.path):
                error.hint = "The source comes first: torchlift.convert(source, destination)."
            raise
        whole, checkpoints = index_of(layers), [x for x in layers if isinstance(x, Checkpoint)]
        _check_apart(whole, target, overwrite)
        index = whole
        if alone and root is not None:
            index = select(whole, root)
        every = whole.entries
        if root is not None and not (alone or every):
            with opened(given, None, allow_classes, whole=True) as found:
                every = index_of(found).entries
        tensors = (every, ()), (index.entries, ())
        require_kept(index.path, *tensors, "the root leaves out", f"root={root!r}")
        lost: dict[str, str] = {}
        containers: Any = None
        others = [*index.objects, *index.blocked_keys]
        dropped = left_out(index.entries, others, options.include, options.exclude, index.path)
        if any(map(is_state, given)):
            kept = {key: value for key, value in index.objects.items() if key not in dropped}
            if hint := state_hint(kept):
                raise PlacementError("an object cannot be converted", file=index.path, hint=hint)
        read = {key: entry for key, entry in index.entries.items() if key not in dropped}
        if target.only_tensors and index.aside:
            for name in index.aside:
                refusal = lacking(index.path, name, index.blocked_keys.get(name))
                lost[name] = refusal.reason if refusal else _ASIDE
            model = of_model(index)
            beside = {*index.entries, *index.objects, *index.blocked_keys}
            dropped |= beside - {*model.entries, *model.objects, *model.blocked_keys}
            before, read = read, {key: entry for key, entry in read.items() if key not in dropped}
            what = f"format={target.format!r} is for what belongs to a model"
            require_kept(index.path, (before, ()), (read, ()), "the format leaves out", what)
        if isinstance(options.rename, Rewriting):
            for one in checkpoints:
                options.rename.check(one._index.plain, one.path)
        if options.rename is not None:
            # Containers are taken apart: their values are to be what they were in them.
            index = replace(index, objects={**index.objects, **objects_as_saved(index)})
            before_names, without = index, dropped
            index, dropped = _renamed(index, options.rename, dropped), set()
            if index.tree is None and before_names.tree is not None and not target.only_tensors:
                containers = _containers(before_names, index, without)
        if not verify:
            bare = {name: found._replace(crc32=None) for name, found in index.storages.items()}
            index = replace(index, storages=bare)
        ckpt = stack.enter_context(Checkpoint(index))
        check_rule(options.dtype, list(ckpt.entries), present=False)
        becomes = partial(stored_dtype, options.dtype, path=ckpt.path)
        _check_some(ckpt, target, dropped)
        if target.only_tensors:
            left = ckpt.blocked_keys.keys() - ckpt.blocked_tensors.keys()
            lost |= {key: ckpt._refusal(key).reason for key in left if key not in dropped}
            dropped |= left
        memory = tensors_in(layers)
        results = _Results(ckpt, memory, transform, becomes, target, stack)
        replaces = results.of if transform is not None or memory else None
        if verify and not dry_run and transform is not None:
            require_intact(checkpoints)  # before their values are somebody's
        state = take_apart_files(ckpt, target, becomes, dropped, replaces, containers)
        lost |= {} if transform is None else _untied(ckpt.entries, state.tensors)
        if verify and not dry_run and transform is None:
            # What is written as it is gets compared on the way: it is not read twice.
            sources = (value.source for value in state.values if value.crc32 is not None)
            compared = {entry.storage for entry in sources if isinstance(entry, TensorEntry)}
            used = used_by(read, whole.storages).keys() - compared if alone else None
            require_intact(checkpoints, only=used)
        texts = [one for one in checkpoints if one.format in _TEXTS]
        keeps_metadata = target.only_tensors and all(one.format in _TEXTS[:2] for one in texts)
        metadata = {k: v for one in texts for k, v in one.metadata.items() if k not in _BYTES_ONLY}
        if target.only_tensors:
            lost |= dict.fromkeys(state.objects, _AN_OBJECT)
        if metadata and not keeps_metadata:
            lost["(metadata)"] = f"the format has no place for {', '.join(sorted(metadata))}"
        saved: object = None
        if target.only_tensors and root is None and len(given) == 1:
            saved = given[0] if is_state(given[0]) else whole.tree[0] if whole.tree else None
        hint = _root_hint(saved, state.tensors.keys() & whole.entries.keys())

        def check() -> None:
            require_unchanged(ckpt)
            # Somebody may have made it in the meantime.
            _check_apart(whole, target, overwrite)

        planning.close()
        written = SaveOptions(
            metadata if keeps_metadata else {}, checksum, progress, lost, check, dry_run
        )
        report = write_state(target, state, written)
        return replace(report, hint=hint)


class _Results:
    """The tensors that are saved in place of those of the files.

    Args:
        ckpt: the files.
        memory: key -> tensor in memory.
        transform: what the caller passed.
        becomes: which dtype a tensor gets.
        target: what is written: results wait beside it, in a file that has no name; of a URL, where
            temporary files are.
        stack: closes that file.
    """

    def __init__(
        self,
        ckpt: Checkpoint,
        memory: Mapping[str, SourceTensor],
        transform: Transform | None,
        becomes: Becomes,
        target: Target,
        stack: ExitStack,
    ) -> None:
        self._ckpt, self._memory, self._transform, self._becomes = ckpt, memory, transform, becomes
        self._head, self._format, self._stack = target.head, target.format, stack
        self._file: IO[bytes] | None = None
        self._area: mmap.mmap | None = None  # a part of that file, from `_start` on
        self._start = self._at = 0
        self._passed = 0  # bytes of results since freed memory was last released

    def of(self, key: str, entry: TensorEntry) -> torch.Tensor | None:
        """Return what is saved under a name; None: what the file has.

        Raises:
            TypeError: the transform returned no tensor.
            PlacementError: what it returned cannot be saved.
        """
        one = tensor_of(entry, (key,), self._memory, self._ckpt._mapped())
        if self._transform is None and isinstance(one, FileTensor):
            return None
        made = one.tensor()
        if self._transform is not None:  # which may write to what it gets
            made = transformed(self._transform, key, made.detach().clone(), self._ckpt.path)
        if is_dtensor(made):
            raise PlacementError(
                "has its values on several ranks, and a conversion is of one process",
                file=self._ckpt.path,
                entry=key,
                found=f"a {type(made).__name__}",
                hint="Save it from all of them with torchlift.save, and convert that file.",
            )
        if self._format == "torch-zip" and call_of(made) is not None:
            return made.detach()
        with errors_name(self._ckpt.path):
            stored_as(key, made, self._format)
        if self._transform is None:
            return made
        seen = entry._replace(key=key, dtype=str(made.dtype).removeprefix("torch."))
        return self._kept(made.detach().to("cpu", self._becomes(seen)).contiguous())

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same values that is no memory of this process."""
        tensor = tensor.resolve_conj().resolve_neg()
        if not tensor.numel():
            return tensor
        if self._file is None:
            folder = None if is_url(self._head) else os.path.dirname(self._head)
            while folder and not os.path.isdir(folder):
                folder = os.path.dirname(folder)
            self._file = self._stack.enter_context(TemporaryFile(dir=folder))  # noqa: SIM115
        if self._area is None or self._at + tensor.nbytes > len(self._area):
            # A map has a descriptor of its own, so that one for each tensor would be too many.
            self._start += len(self._area or ())
            size = max(_AREA, -(-tensor.nbytes // _AREA) * _AREA)
            self._file.truncate(self._start + size)  # takes no room on the disk until it is written
            self._area, self._at = mmap.mmap(self._file.fileno(), size, offset=self._start), 0
        self._file.seek(self._start + self._at)
        self._file.write(memory_of(tensor))
        self._file.flush()
        self._passed += tensor.nbytes
        if self._passed > _BETWEEN:
            trim()  # what a transform took and freed
            self._passed = 0
        values = torch.frombuffer(
            self._area, dtype=torch.uint8, count=tensor.nbytes, offset=self._at
        )
        self._at += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        return values.view(tensor.dtype).view(tensor.shape)


def _root_hint(saved: object, keys: Iterable[str]) -> Hint | None:
    """Return which root takes a model out of a training's file, if its container is now a prefix.

    Whoever gets the new file would have keys such as ``model.weight``, which fit no model.

    Args:
        saved: the object in the source.
        keys: names of tensors that are written under the names that they had.
    """
    names = [name for name in state_dicts_in(saved) if any(k.startswith(f"{name}.") for k in keys)]
    if not names:
        return None
    return Hint(
        f"Keys of the new file start with {names[0] + '.'!r}, the name of a container. Pass ",
        Argument("root", repr(names[0]), (names[0],)),
        " to write only that container, without the prefix.",
    )


def _check_some(ckpt: Checkpoint, target: Target, dropped: set[str]) -> None:
    """Refuse to write a file that nothing of the source would be in.

    Raises:
        UnsafeError: all there is could only be had by running code.
        PlacementError: the format holds tensors only, and there are none.
    """
    if {*ckpt.entries, *(() if target.only_tensors else ckpt.objects)} - dropped:
        return
    for key in ckpt.blocked_keys.keys() - dropped:
        error = ckpt._refusal(key)
        if ckpt.blocked_keys[key] not in OF_RANKS:
            error.hint = "There is nothing else to write: ask for a file with tensors in it."
        raise error
    if target.only_tensors:
        raise PlacementError(
            "there is no tensor to write",
            file=ckpt.path,
            hint="The format holds tensors only; a torch file (.pt) keeps plain data, too.",
        )


def _check_apart(index: Index, target: Target, overwrite: bool) -> None:
    """Refuse to replace what is there, and the source above all, unless that is asked for."""
    if overwrite:
        return
    paths = {index.path, *index.files}
    source = paths | {os.path.realpath(path) for path in paths if not is_url(path)}
    stamps = [stamp for stamp in index.files.values() if isinstance(stamp, FileStamp)]
    inodes = {(stamp.device, stamp.inode) for stamp in stamps}
    for path in target.heads:
        if (exists if is_url(path) else os.path.lexists)(path):
            is_source = (path if is_url(path) else os.path.realpath(path)) in source
            replaces = Argument("overwrite", "True")
            if not is_url(path) and os.path.exists(path):
                found = os.stat(path)
                is_source |= (found.st_dev, found.st_ino) in inodes
            raise CheckpointError(
                "it is the source itself" if is_source else "there is something of this name",
                file=path,
                hint=Hint("Name another path, or pass ", replaces, " to replace it."),
            )


def _renamed(index: Index, rename: Rename, dropped: set[str]) -> Index:
    """Return an index with other names, and without what is dropped; its containers are gone.

    Raises:
        MismatchError: two keys get one name, or all are dropped.
        TypeError: a name is no text.
    """
    check_rename(rename, {*index.entries, *index.objects, *index.blocked_keys}, index.path)
    kept = {key: entry for key, entry in index.entries.items() if key not in dropped}
    made = rewritten(kept, rename, index.path)
    rest = [key for key in (*index.objects, *index.blocked_keys) if key not in dropped]
    names = others(rest, rename, index.path, made)
    for key, name in names.items():
        if name in made:
            raise same_name(name, made[name].keys[0], key, index.path)
    require_kept(index.path, (kept, rest), (made, names), "rename drops", f"rename={rename!r}")
    new_names = {key: name for name, item in made.items() for key in item.keys} | names
    return replace(
        index,
        entries={name: item.entry._replace(key=name) for name, item in made.items()},
        objects=_of(index.objects, names),
        blocked_keys=_of(index.blocked_keys, names),
        blocked_tensors=_of(index.blocked_tensors, names),
        module_versions=versions_by_name(new_names, index.module_versions),
        templates=_renamed_templates(index.templates, new_names),
        tree=None,
    )


def _containers(before: Index, index: Index, dropped: set[str]) -> Any:
    """Return the containers of a file with the leaves of an index that has other names for some."""
    leaves: dict[str, object] = {**index.entries, **index.objects}
    known = {**before.entries, **before.objects}
    same = {
        key
        for key in leaves.keys() & known.keys()
        if leaves[key] is known[key]
        or (key in index.entries and index.entries[key] == before.entries.get(key))
    }
    with Checkpoint(before) as ckpt:
        tree = Tree(before, lambda entry: entry, ckpt._refusal, dropped)
        new = {key: value for key, value in leaves.items() if key not in same}
        new = gathered(new, index.templates)
        return arranged(tree, before, known.keys() - same, new, index.module_versions)


def _renamed_templates(
    templates: Mapping[str, object], names: Mapping[str, str]
) -> dict[str, object]:
    """Return the containers of lists and extra states by what their values are called now."""
    found = templates_by_name(templates, names)
    return {
        name: map_leaves(tree, partial(_renamed_leaf, name, len(key)))
        for name, (key, tree) in found.items()
    }


def _renamed_leaf(name: str, start: int, leaf: Leaf, _: object) -> Leaf:
    return Leaf(name + leaf.key[start:])


def _untied(entries: Mapping[str, TensorEntry], taken: Iterable[str]) -> dict[str, str]:
    """Return what is lost of names that were one tensor, of which a transform makes one each."""
    first: dict[Hashable, str] = {}
    kept = {
        key: first.setdefault((entry.storage, entry.chunks), key)
        for key, entry in ((key, entries[key]) for key in taken if key in entries)
        if entry.chunks
    }
    return untied({key: other for key, other in kept.items() if key != other})


def _of(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names[key]: value for key, value in values.items() if key in names}

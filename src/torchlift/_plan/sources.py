"""Where the values of a load come from: a checkpoint's files, or a state dict in memory."""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, BinaryIO

import torch

from torchlift._checkpoint import Allow, Checkpoint, MappedViews, classes
from torchlift._checkpoint import open as open_checkpoint
from torchlift._checkpoint.tree import objects_as_saved
from torchlift._model.dtensor import (
    Span,
    everything,
    is_sharded,
    overlaps,
    shard_of_value,
    wrap,
)
from torchlift._model.handlers import (
    clone_of,
    has_memory,
    inner_tensors,
    is_wrapper,
    slice_of,
)
from torchlift._plan.steps import Candidate, Copy, Joined, Sent, Value
from torchlift._system import leaves
from torchlift._transfer import Sender
from torchlift.errors import CheckpointError, FormatError
from torchlift.formats import left_out, of_model, put_together
from torchlift.formats.flatten import (
    MISSING,
    Containers,
    Flat,
    below,
    flat_under,
    flatten_state,
    items_of,
    name_text,
    no_container,
)
from torchlift.formats.source import errors_name

#: What a caller may pass as a checkpoint.
Given = Checkpoint | str | os.PathLike[str] | BinaryIO | Mapping[str, Any]

_EXTRA_STATE = "_extra_state"
#: What messages and reports call a state dict.
IN_MEMORY = "the state dict"


@contextmanager
def sources(
    given: Given | Sequence[Given], root: str | None, allow_classes: Allow = ()
) -> Iterator[Origin]:
    """Open what a caller passed: a checkpoint, a state dict, or several, of which later ones win.

    Args:
        given: what the caller passed.
        root: the container to take.
        allow_classes: classes that may be rebuilt.

    Raises:
        CheckpointError: one cannot be opened.
        TypeError: something else was passed.
    """
    with ExitStack() as stack:
        layers: Sequence[Given] = given if isinstance(given, (list, tuple)) else [given]  # type: ignore[list-item]
        if not layers:
            raise TypeError("an empty list of checkpoints")
        origin = _layered([stack.enter_context(opened(one, root, allow_classes)) for one in layers])
        origin.root = root
        stack.callback(origin.close)
        yield origin


@contextmanager
def opened(
    given: Given, root: str | None, allow_classes: Allow = (), *, whole: bool = False
) -> Iterator[Checkpoint | StateSource]:
    """Open one of the sources that a caller passed; for the arguments, see `checkpoint`."""
    if isinstance(given, Mapping) and not isinstance(given, Checkpoint):
        yield StateSource.of_flat(flat_state(given, root))
        return
    with checkpoint(given, root, whole=whole, allow_classes=allow_classes) as ckpt:
        yield ckpt


@contextmanager
def checkpoint(
    given: Given, root: str | None, *, whole: bool = False, allow_classes: Allow = ()
) -> Iterator[Checkpoint]:
    """Open a checkpoint for one call, or restrict one that the caller has opened.

    Args:
        given: what the caller passed.
        root: the container to take.
        whole: whether what holds no model is taken, too.
        allow_classes: classes that may be rebuilt.

    Raises:
        CheckpointError: it was closed.
    """
    if isinstance(given, Checkpoint):
        given.mapped()  # or else some loads of a closed one would go on, and others not
        yield _chosen(given, root, whole, allow_classes)
        return
    if isinstance(given, Mapping):
        raise TypeError("a checkpoint is expected here, and this is a state dict in memory")
    with open_checkpoint(given) as found:
        yield _chosen(found, root, whole, allow_classes)


def _chosen(ckpt: Checkpoint, root: str | None, whole: bool, allow_classes: Allow) -> Checkpoint:
    """Return what is to be loaded: what is under `root`, or else all that is of a model."""
    index = of_model(ckpt.index) if root is None and not whole else ckpt.index
    allowed = (*ckpt.allow_classes, *classes(allow_classes))
    if root is None and index is ckpt.index and allowed == ckpt.allow_classes:
        return ckpt
    return Checkpoint(index, root=root, allow_classes=allowed)


def container(state: Any, root: str | None) -> Any:
    """Return what a state in memory has below a root, in its containers.

    Raises:
        FormatError: `root` names nothing in it.
    """
    found = state if root is None else below(state, root)
    if found is MISSING:
        names = [name_text(name) for name, _ in items_of(state)]
        raise no_container(IN_MEMORY, str(root), names)
    return found


def flat_state(state: Mapping[str, Any], root: str | None) -> Flat[Any]:
    """Return a state dict's leaves by dotted key, as a file of it would have them.

    Raises:
        FormatError: `root` names nothing in it, or it contains itself.
    """
    with errors_name(IN_MEMORY):
        flat = flatten_state(state, Containers((torch.Tensor, Sent), Mapping))
    return flat if root is None else flat_under(flat, root, IN_MEMORY)


def _layered(layers: Sequence[Checkpoint | StateSource]) -> Origin:
    """Return one source of several; where two have one key, the later one counts."""
    if len(layers) == 1:
        return layers[0] if isinstance(layers[0], StateSource) else FileSource(layers[0])
    owner = owners(layers)
    paths = {key: layers[int(name)].path for key, name in owner.items()}
    indexes = {str(n): item.index for n, item in enumerate(layers) if isinstance(item, Checkpoint)}
    path = ", ".join(dict.fromkeys(layer.path for layer in layers))
    # Each entry has the classes that were allowed for its own checkpoint.
    merged = Checkpoint(put_together(path, indexes, owner, {}))
    return _Layers(merged, layers, owner, paths)


def owners(layers: Sequence[Checkpoint | StateSource]) -> dict[str, str]:
    """Return key -> the number, as text, of the layer whose value counts: the last that has it."""
    owner: dict[str, str] = {}
    for number, layer in enumerate(layers):
        keys = layer.candidates if isinstance(layer, StateSource) else layer.entries
        blocked = layer.blocked if isinstance(layer, StateSource) else layer.blocked_keys
        owner |= dict.fromkeys((*keys, *layer.objects, *blocked), str(number))
    # The extra state of a module is one value, however many keys it has in each.
    last: dict[str, str] = {}
    for key, name in owner.items():
        if whole := extra_state(key):
            last[whole] = max(last.get(whole, name), name, key=int)
    return {key: last.get(extra_state(key), name) for key, name in owner.items()}


def extra_state(key: str) -> str:
    """Return the name of the extra state that a key is of, or an empty text.

    Example:
        >>> extra_state("a._extra_state.scale.0"), extra_state("a.weight")
        ('a._extra_state', '')
    """
    at = f".{key}.".find(f".{_EXTRA_STATE}.")
    return key[: at + len(_EXTRA_STATE)] if at >= 0 else ""


class Origin:
    """Where the values of a load come from.

    Attributes:
        path: for errors and reports.
        root: the container that was asked for.
        paths: key -> the one of several sources that it comes from.
        checkpoints: whose files it reads.
        candidates: key -> where its values are.
        objects: key -> leaf that is no tensor.
        blocked: key -> global that its value would need: only unpickling could rebuild it.
        versions: path of a module -> what its state dict says of it (``_metadata``).
        templates: key of a nested extra state, of a list or of a tuple -> its containers as saved.
        collective: whether other ranks take part in `fill`.
        views: tensors over the files, where there are any.
    """

    views: MappedViews
    path = IN_MEMORY
    root: str | None = None
    paths: Mapping[str, str] = {}
    checkpoints: Sequence[Checkpoint] = ()
    blocked: Mapping[str, str] = {}
    templates: Mapping[str, object] = {}
    collective = False

    def __init__(
        self,
        candidates: Mapping[str, Candidate],
        objects: Mapping[str, object],
        versions: Mapping[str, Mapping[str, object]],
    ) -> None:
        self.candidates = candidates
        self.objects = objects
        self.versions = versions

    def leave_out(
        self, include: Collection[str], exclude: Collection[str]
    ) -> Mapping[str, Candidate | None]:
        """Leave out the keys that patterns do not choose; an extra state whole, or not at all.

        Returns:
            What was left out: key -> candidate, or None of what is no tensor.

        Raises:
            MismatchError: a pattern fits nothing, or nothing is left.
        """
        others = [*self.objects, *self.blocked]
        gone = left_out(self.candidates, others, include, exclude, self.path)
        if not gone:
            return {}
        extra = {whole for key in gone if (whole := extra_state(key))}
        if extra:
            gone |= {key for key in (*self.candidates, *others) if extra_state(key) in extra}
        found = {key: self.candidates.get(key) for key in gone}
        self.candidates = {k: v for k, v in self.candidates.items() if k not in gone}
        self.objects = {k: self.objects[k] for k in self.objects if k not in gone}
        self.blocked = {k: v for k, v in self.blocked.items() if k not in gone}
        return found

    def tensor(self, candidate: Candidate, like: torch.Tensor | None = None) -> torch.Tensor:
        """Return a candidate's tensor, for code that looks at values.

        Args:
            candidate: of this source, or one that the model's own code made.
            like: the model's tensor that it is for, where there is one.
        """
        value = candidate.value
        if isinstance(value, Joined):
            return value.whole()
        assert isinstance(value, torch.Tensor)
        return value

    def receive(self, keys: Sequence[str]) -> None:
        """Have the tensors of these keys at hand, for code that looks at values."""

    def reserve(self) -> None:
        """Take the memory that `fill` needs beside its targets."""

    def fill(self, copies: Sequence[Copy]) -> None:
        """Execute the copies."""
        copy_values(apart(copies))

    def refusal(self, key: str) -> CheckpointError:
        """Return the error that says why `key` cannot be had."""
        raise NotImplementedError

    def close(self) -> None:
        """Close files, where there are any; tensors over them stay valid."""


class FileSource(Origin):
    """The tensors and objects of a checkpoint's files."""

    def __init__(self, ckpt: Checkpoint) -> None:
        candidates = {key: Candidate(key, entry) for key, entry in ckpt.entries.items()}
        super().__init__(candidates, _objects_of(ckpt), ckpt.index.module_versions)
        self.path = ckpt.path
        self.checkpoints = (ckpt,)
        self.blocked = ckpt.blocked_keys
        self.templates = ckpt.index.templates
        self.views = ckpt.views()
        self._ckpt = ckpt

    def tensor(self, candidate: Candidate, like: torch.Tensor | None = None) -> torch.Tensor:
        if candidate.value is not None:
            return super().tensor(candidate)
        assert candidate.entry is not None
        return self.views.view(candidate.entry)

    def refusal(self, key: str) -> CheckpointError:
        return self._ckpt.refusal(key)

    def close(self) -> None:
        self.views.close()


def _objects_of(ckpt: Checkpoint) -> Mapping[str, object]:
    """Return the leaves of a checkpoint, as they were saved where a module's code may take them."""
    saved = _saved_objects(ckpt)
    return ChainMap(saved, ckpt.objects) if saved else ckpt.objects  # type: ignore[arg-type]


def _saved_objects(ckpt: Checkpoint) -> dict[str, object]:
    """Return key -> leaf of an extra state, or one that the index has as a text, as a dtype."""
    index = ckpt.index
    keys = [k for k, v in index.objects.items() if type(v) is str or _EXTRA_STATE in k]
    saved = objects_as_saved(index) if keys else {}
    return {key: saved[key] for key in keys if key in saved}


class _Layers(FileSource):
    """Several sources, of which a later one wins.

    Args:
        merged: the files among them.
        layers: all of them.
        owner: key -> the number of the one that counts.
        paths: key -> its path.
    """

    def __init__(
        self,
        merged: Checkpoint,
        layers: Sequence[Checkpoint | StateSource],
        owner: Mapping[str, str],
        paths: Mapping[str, str],
    ) -> None:
        super().__init__(merged)
        self.paths = paths
        self.checkpoints = [layer for layer in layers if isinstance(layer, Checkpoint)]
        candidates, objects = dict(self.candidates), dict[str, object]()
        self.blocked, self.templates = dict(self.blocked), dict(self.templates)
        for number, layer in enumerate(layers):
            me = str(number)
            if isinstance(layer, Checkpoint):
                found = _saved_objects(layer)
                objects |= {k: v for k, v in found.items() if owner[k] == me}
            if isinstance(layer, StateSource):
                candidates |= {k: v for k, v in layer.candidates.items() if owner[k] == me}
                objects |= {k: v for k, v in layer.objects.items() if owner[k] == me}
                self.blocked |= {k: v for k, v in layer.blocked.items() if owner[k] == me}
                self.templates |= {
                    key: tree
                    for key, tree in layer.templates.items()
                    if all(owner[leaf.key] == me for leaf in leaves(tree).values())
                }
        self.versions = {
            name: version
            for layer in layers
            for name, version in (
                layer.versions if isinstance(layer, StateSource) else layer.index.module_versions
            ).items()
        }
        self.candidates = {key: candidates[key] for key in owner if key in candidates}
        self.objects = ChainMap(objects, self.objects)  # type: ignore[arg-type]


class StateSource(Origin):
    """The values of a state dict in memory, which stays as it is.

    Args:
        state: key -> tensor, or a value that is none.
        versions: path of a module -> its version and the like (``_metadata``).
        whole: whether plain tensors stand for DTensors, of which each rank takes its own slice.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        versions: Mapping[str, Mapping[str, object]] | None = None,
        *,
        whole: bool = False,
    ) -> None:
        tensors = {
            key: value for key, value in state.items() if isinstance(value, (torch.Tensor, Sent))
        }
        candidates = {key: Candidate(key, value=value) for key, value in tensors.items()}
        objects = {key: value for key, value in state.items() if key not in tensors}
        super().__init__(candidates, objects, versions or {})
        self._whole = whole

    @classmethod
    def of_flat(cls, flat: Flat[Any]) -> StateSource:
        """Return the source of whole tensors that a caller passed, in whatever containers."""
        made = cls({**flat.tensors, **flat.objects}, flat.versions, whole=True)
        made.blocked, made.templates = flat.blocked, flat.templates
        return made

    def refusal(self, key: str) -> CheckpointError:
        what = "two values have this key once containers are joined by dots"
        hint = "Rename one of them, or pass the container that is meant."
        return FormatError(what, file=self.path, entry=key, hint=hint)

    def tensor(self, candidate: Candidate, like: torch.Tensor | None = None) -> torch.Tensor:
        value = super().tensor(candidate)
        if not self._whole or like is None or not is_sharded(like):
            return value
        if is_sharded(value) or value.shape != like.shape:
            return value
        # As in torch: a module's own code gets a DTensor where the model has one.
        return wrap(like, shard_of_value(value, like, candidate.key))


def copy_values(copies: Sequence[Copy]) -> None:
    """Fill every target from tensors in memory; each rank touches only its own slices."""
    targets = [item.target for item in copies if item.target.is_cuda]
    cast = (item.target for item in copies if item.source.dtype != item.target.dtype)
    with torch.no_grad(), Sender(targets, cast) if targets else nullcontext() as sender:
        for item in copies:
            source = item.source
            assert not isinstance(source, Sent)
            whole = tuple((0, size) for size in source.shape)
            for values, block in source.slices if isinstance(source, Joined) else [(source, whole)]:
                place(values, block, item, sender)


def place(
    values: torch.Tensor, block: Sequence[Span], item: Copy, sender: Sender | None = None
) -> None:
    """Copy what `values` (the `block` of the whole tensor) and the target have in common."""
    target, copy = item.target, _copy if sender is None else sender.copy
    # A scalar may have been saved with shape [1]; and a slice of a subclass need not be a view.
    if target.dim() != values.dim() or (
        target.shape == values.shape and item.spans == tuple((span,) for span in block)
    ):
        # Not reshaped where it need not be: a subclass may not know how.
        if values.shape != target.shape:
            values = values.reshape(target.shape)
        copy(values, target)
        return
    for into, out_of in overlaps(item.spans, block):
        part = slice_of(values, out_of)
        copy(part, target if target.shape == part.shape else target[into])


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)


def whole_copy(source: Any, target: torch.Tensor) -> Copy:
    """Return a copy into a plain tensor of the same shape."""
    return Copy(source, target, everything(target.shape))


def apart(copies: Iterable[Copy]) -> list[Copy]:
    """Return the copies, where none reads from memory that another one writes to.

    Two states may trade places: the second would otherwise read what the first has written. What is
    in its place already is left out.
    """
    needed: list[tuple[set[int], Copy]] = []
    written: set[int] = set()
    for item in copies:
        read, into = _memory(item.source), _memory(item.target)
        if not read or read != into or not is_in_place(item.source, item.target):
            needed.append((read, item))
            written |= into
    return [
        item
        if isinstance(item.source, Sent) or written.isdisjoint(read)
        else item._replace(source=_copied(item.source))
        for read, item in needed
    ]


def _copied(source: torch.Tensor | Joined) -> torch.Tensor:
    return source.whole() if isinstance(source, Joined) else clone_of(source)


def _memory(source: Value) -> set[int]:
    """Return what tells the memory of values from that of others; of a wrapper, what it has."""
    if isinstance(source, Joined):
        return {memory for values, _ in source.slices for memory in _memory(values)}
    if not isinstance(source, torch.Tensor) or not source.numel():
        return set()
    if is_wrapper(source):
        return {memory for inner in inner_tensors(source) for memory in _memory(inner)}
    return {source.untyped_storage().data_ptr()} if has_memory(source) else set()


def is_in_place(one: Value, two: torch.Tensor) -> bool:
    """Return whether the numbers of one are, in its memory, already those of the other."""
    if not isinstance(one, torch.Tensor):
        return False
    if is_wrapper(one) or is_wrapper(two):
        pairs = zip(inner_tensors(one), inner_tensors(two), strict=False)
        return type(one) is type(two) and all(is_in_place(a, b) for a, b in pairs)
    return (
        one.data_ptr() == two.data_ptr()
        and (one.dtype, one.device, one.shape, one.stride())
        == (two.dtype, two.device, two.shape, two.stride())
        and (one.is_conj(), one.is_neg()) == (two.is_conj(), two.is_neg())
    )

"""Open files, a state dict in memory, or several of these as one source of a load."""

from __future__ import annotations

import os
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, BinaryIO, TypeGuard

import torch

from torchlift._checkpoint.checkpoint import Checkpoint, MappedViews
from torchlift._checkpoint.checkpoint import open as open_checkpoint
from torchlift._checkpoint.kinds import Allow, classes
from torchlift._checkpoint.tree import objects_as_saved
from torchlift._model.dtensor import Spans, is_dtensor, shard_of_value, spans_of, wrap
from torchlift._sources.tensors import (
    FileTensor,
    MemoryTensor,
    SourceTensor,
    describe,
    resolve,
)
from torchlift._store.places import place_of
from torchlift._store.url import Url
from torchlift._system.containers import leaves
from torchlift.errors import CheckpointError, FormatError
from torchlift.formats.flattening import (
    EXTRA_STATE,
    MISSING,
    Containers,
    Flat,
    below,
    extra_state,
    flatten_state,
    items_of,
    name_text,
    no_container,
)
from torchlift.formats.folders import refuse_slice
from torchlift.formats.index import Index, left_out, of_model
from torchlift.formats.scales import Quantised, find_quantised
from torchlift.formats.sharded import put_together
from torchlift.formats.source import errors_name
from torchlift.formats.torchscript import CONSTANTS

#: The types that a caller may pass as a checkpoint.
Given = Checkpoint | str | os.PathLike[str] | BinaryIO | Mapping[str, Any]

#: The path of a state dict in messages and reports.
IN_MEMORY = "the state dict"


@contextmanager
def open_source(
    given: Given | Sequence[Given],
    root: str | None,
    allow_classes: Allow = (),
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[Origin]:
    """Open the argument of a caller as the source of a load. See `open_layers`."""
    with (
        open_layers(given, root, allow_classes, storage_options=storage_options) as layers,
        ExitStack() as stack,
    ):
        source: Origin
        if len(layers) > 1:
            source = _Layers(layers)
        else:
            source = layers[0] if isinstance(layers[0], StateSource) else FileSource(layers[0])
        stack.callback(source.close)
        source.opened_with = source.requests
        yield source


@contextmanager
def open_layers(
    given: Given | Sequence[Given],
    root: str | None,
    allow_classes: Allow = (),
    *,
    whole: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[list[Layer]]:
    """Open the argument of a caller: a checkpoint, a state dict, or a list of these.

    Args:
        given: The argument.
        root: The container to use.
        allow_classes: Classes that may be rebuilt.
        whole: Whether to keep values that do not belong to a model.
        storage_options: As for `torchlift.open`.

    Raises:
        CheckpointError: If a checkpoint cannot be opened.
        TypeError: If the argument has another type.
    """
    layers: Sequence[Given] = given if isinstance(given, (list, tuple)) else [given]  # type: ignore[list-item]
    if not layers:
        raise TypeError("the list of checkpoints is empty")
    with ExitStack() as stack:
        found: list[Layer] = []
        for one in layers:
            if is_state(one):
                found.append(StateSource.of_flat(flat_state(one, root)))
            else:
                ckpt = checkpoint(
                    one, root, whole=whole, allow_classes=allow_classes,
                    storage_options=storage_options,
                )  # fmt: skip
                found.append(stack.enter_context(ckpt))
        yield found


def is_state(given: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a source is a state dict in memory."""
    return isinstance(given, Mapping) and not isinstance(given, Checkpoint)


@contextmanager
def checkpoint(
    given: Given,
    root: str | None,
    *,
    whole: bool = False,
    allow_classes: Allow = (),
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[Checkpoint]:
    """Open a checkpoint for one call, or restrict one that the caller has opened.

    Args:
        given: The argument of the caller.
        root: The container to use.
        whole: Whether to keep values that do not belong to a model.
        allow_classes: Classes that may be rebuilt.
        storage_options: As for `torchlift.open`.

    Raises:
        CheckpointError: If it was closed, or is the path of one slice of a model.
    """
    if isinstance(given, Checkpoint):
        with given._anew() as own:
            yield _chosen(own, root, whole, allow_classes)
        return
    if isinstance(given, Mapping):
        raise TypeError("expected a checkpoint, not a state dict in memory")
    if isinstance(given, (str, os.PathLike)):
        refuse_slice(place_of(given))
    with open_checkpoint(given, storage_options=storage_options) as found:
        yield _chosen(found, root, whole, allow_classes)


def _chosen(ckpt: Checkpoint, root: str | None, whole: bool, allow_classes: Allow) -> Checkpoint:
    """Return the part to load: the content of `root`, or all that belongs to a model."""
    index = of_model(ckpt._index) if root is None and not whole else ckpt._index
    allowed = {**ckpt._allowed, **classes(allow_classes)}
    if root is None and index is ckpt._index and allowed == ckpt._allowed:
        return ckpt
    return Checkpoint(index, root=root, allowed=allowed)


def container(state: Any, root: str | None) -> Any:
    """Return what a state in memory contains below a root.

    Raises:
        FormatError: If `root` does not exist in it.
    """
    found = state if root is None else below(state, root, IN_MEMORY)
    if found is MISSING:
        names = [name_text(name) for name, _ in items_of(state)]
        raise no_container(IN_MEMORY, str(root), names)
    return found


def flat_state(state: Mapping[str, Any], root: str | None) -> Flat[Any]:
    """Return the leaves of a state dict by dotted key, as a file of it has them.

    Raises:
        FormatError: If `root` does not exist in it, or it contains itself.
    """
    rule = Containers((torch.Tensor,), Mapping)
    with errors_name(IN_MEMORY):
        found = container(state, root)
        if root is not None and rule.items(found) is None:
            error = no_container(IN_MEMORY, root, [root, *map(name_text, state)])
            error.hint = state_hint({root: found}) or error.hint
            raise error
        return flatten_state(found, rule)


def state_hint(objects: Mapping[str, object]) -> str | None:
    """Return the way out if an object with a ``state_dict`` method was passed, or None.

    Args:
        objects: Key -> non-tensor value of a state dict in memory.

    Example:
        >>> print(state_hint({"epoch": 3, "model": torch.nn.ReLU()}))
        'model' is a ReLU. Pass what its state_dict() returns in its place.
    """
    for key, value in objects.items():
        for path, leaf in leaves(value).items():
            if callable(getattr(leaf, "state_dict", None)) and not isinstance(leaf, type):
                name = ".".join(filter(None, [key, *map(str, path)]))
                kind = type(leaf).__name__
                return f"{name!r} is a {kind}. Pass what its state_dict() returns in its place."
    return None


def index_of(layers: Sequence[Layer]) -> Index:
    """Return one index of all layers. A tensor in memory is described as if it were a file."""
    indexes = [one._index if isinstance(one, Checkpoint) else one.index() for one in layers]
    if len(layers) == 1:
        return indexes[0]
    indexes = [
        replace(index, objects={**index.objects, **objects_as_saved(index)}) for index in indexes
    ]
    path = ", ".join(dict.fromkeys(index.path for index in indexes))
    named = {str(number): index for number, index in enumerate(indexes)}
    aside = tuple(dict.fromkeys(name for index in indexes for name in index.aside))
    return replace(put_together(path, named, _owners(layers), {}), aside=aside)


def tensors_in(layers: Sequence[Layer]) -> dict[str, SourceTensor]:
    """Return key -> tensor in memory, without keys that a later layer has, too."""
    owner = _owners(layers)
    return {
        key: one
        for number, layer in enumerate(layers)
        if isinstance(layer, StateSource)
        for key, one in layer.candidates.items()
        if owner[key] == str(number)
    }


def _owners(layers: Sequence[Layer]) -> dict[str, str]:
    """Return key -> the number, as text, of the last layer that has the key."""
    owner: dict[str, str] = {}
    for number, layer in enumerate(layers):
        keys = layer.candidates if isinstance(layer, StateSource) else layer.entries
        blocked = layer.blocked if isinstance(layer, StateSource) else layer.blocked_keys
        owner |= dict.fromkeys((*keys, *layer.objects, *blocked), str(number))
    # The extra state of a module is one value, even if it has several keys.
    last: dict[str, str] = {}
    for key, name in owner.items():
        if whole := extra_state(key):
            last[whole] = max(last.get(whole, name), name, key=int)
    return {key: last.get(extra_state(key), name) for key, name in owner.items()}


class Origin:
    """The source of the values of a load.

    Attributes:
        path: The path for errors and reports.
        paths: Key -> the checkpoint that it comes from, if there are several.
        checkpoints: The checkpoints whose files it reads.
        candidates: Key -> its tensor.
        objects: Key -> non-tensor value.
        blocked: Key -> the global that only unpickling could call for its value.
        versions: Path of a module -> its entry in ``_metadata``.
        templates: Key of a nested extra state, a list or a tuple -> its containers as saved.
        views: Tensors over the files, if there are any.
        noted: Name that a file leaves out -> key of its values. See `Index`.
        of_program: Keys that a program has besides the state of its modules: constants, and
            attributes that are not tensors. None: the source is not a program.
        opened_with: How many requests to URLs it took to open the source.
    """

    views: MappedViews | None = None
    path = IN_MEMORY
    opened_with = 0
    paths: Mapping[str, str] = {}
    checkpoints: Sequence[Checkpoint] = ()
    blocked: Mapping[str, str] = {}
    templates: Mapping[str, object] = {}
    noted: Mapping[str, str] = {}
    of_program: Collection[str] | None = None

    def __init__(
        self,
        candidates: Mapping[str, SourceTensor],
        objects: Mapping[str, object],
        versions: Mapping[str, Mapping[str, object]],
    ) -> None:
        self.candidates = candidates
        self.objects = objects
        self.versions = versions

    def find_quantised(self) -> Quantised:
        """Return the quantised tensors of the source, with their scales."""
        return find_quantised(
            {
                key: one.value if isinstance(one, MemoryTensor) else one.entry or one
                for key, one in self.candidates.items()
            }
        )

    def leave_out(
        self, include: Collection[str], exclude: Collection[str]
    ) -> Mapping[str, SourceTensor | None]:
        """Drop the keys that patterns do not choose. An extra state is kept or dropped as a unit.

        Returns:
            The dropped keys: key -> candidate, or None for a non-tensor value.

        Raises:
            MismatchError: If a pattern matches nothing, or no key is left.
        """
        others = [*self.objects, *self.blocked, *self.noted]
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
        self.noted = {name: key for name, key in self.noted.items() if name not in gone}
        return found

    #: Whether a plain tensor is the complete value of a DTensor, of which a rank takes its slice.
    is_whole = True

    def shown(self, one: SourceTensor, like: torch.Tensor | None) -> torch.Tensor:
        """Return a tensor for the model's own loading code: a DTensor if the model has one.

        Args:
            one: A tensor of this source.
            like: The model's tensor of that name, if there is one.
        """
        value = one.tensor()
        if not self.is_whole or like is None or not is_dtensor(like):
            return value
        if is_dtensor(value) or value.shape != like.shape:
            return value
        spans = spans_of(like, one.key)
        if all(len(runs) == 1 for runs in spans):
            local = value[tuple(slice(*runs[0]) for runs in spans)]
            if local.is_contiguous():  # it stays a view of the map
                return wrap(like, local)
        return wrap(like, shard_of_value(value, like, one.key))

    @property
    def is_away(self) -> bool:
        """Whether some of the files are behind URLs."""
        return self.views is not None and self.views.is_away

    @property
    def requests(self) -> int:
        """How many requests to URLs were made since the source was opened."""
        files = (file for ckpt in self.checkpoints for file in ckpt._index.files)
        stores = {file.store for file in files if isinstance(file, Url)}
        return sum(store.requests for store in stores) - self.opened_with

    def resolve(self, wanted: Mapping[str, Spans | None]) -> None:
        """Find where the values of these keys are, of each tensor or of a slice."""
        if self.is_away:
            resolve((self.candidates.get(key), spans) for key, spans in wanted.items())

    def receive(self, keys: Sequence[str]) -> None:
        """Fetch the tensors of these keys, for code that looks at values."""

    def refusal(self, key: str, *, several: bool = False) -> CheckpointError:
        """Return the error for a blocked key, perhaps one of several."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the files. Tensors over their maps stay valid."""


class FileSource(Origin):
    """The tensors and objects of a checkpoint's files."""

    views: MappedViews

    def __init__(self, ckpt: Checkpoint) -> None:
        self.views = views = MappedViews(ckpt._index)
        candidates = {key: FileTensor(key, entry, views) for key, entry in ckpt.entries.items()}
        super().__init__(candidates, _objects_of(ckpt), ckpt._index.module_versions)
        self.path = ckpt.path
        self.checkpoints = (ckpt,)
        self.blocked = ckpt.blocked_keys
        self.templates = ckpt._index.templates
        self.noted = ckpt._index.noted
        self.of_program = _keys_of_program(ckpt)
        self._ckpt = ckpt

    def receive(self, keys: Sequence[str]) -> None:
        found = map(self.candidates.get, keys)
        self.views.ahead(one.entry for one in found if isinstance(one, FileTensor))

    def refusal(self, key: str, *, several: bool = False) -> CheckpointError:
        return self._ckpt._refusal(key, several=several)

    def close(self) -> None:
        self.views.close()


def _keys_of_program(ckpt: Checkpoint) -> set[str] | None:
    """Return the keys of a TorchScript archive that are not the state of a module, or None."""
    if ckpt.format != "torchscript":
        return None
    return {*ckpt.objects, *(key for key in ckpt.entries if key.startswith(f"{CONSTANTS}."))}


def _objects_of(ckpt: Checkpoint) -> Mapping[str, object]:
    """Return the non-tensor values, as saved if a module's own code may get them."""
    # An index has text in place of dtypes, and flattens an extra state. All else is as saved.
    keys = [k for k, v in ckpt.objects.items() if type(v) is str or EXTRA_STATE in k]
    saved = objects_as_saved(ckpt._index) if keys else {}
    saved = {key: saved[key] for key in keys if key in saved}
    return ChainMap(saved, ckpt.objects) if saved else ckpt.objects  # type: ignore[arg-type]


class _Layers(FileSource):
    """Several sources. The last one with a key counts."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        # An entry keeps the classes that its own checkpoint allows.
        super().__init__(Checkpoint(index_of(layers)))
        self.candidates = {**self.candidates, **tensors_in(layers)}
        owners = _owners(layers)
        self.paths = {key: layers[int(name)].path for key, name in owners.items()}
        # A tie that a file notes replaces a tensor of that name in an earlier file.
        noted = dict[str, str]()
        for number, layer in enumerate(layers):
            ties = layer._index.noted if isinstance(layer, Checkpoint) else {}
            for name, key in ties.items():
                one, other = self.candidates.get(key), self.candidates.get(name)
                is_last = owners.get(key) == str(number) and int(owners.get(name, 0)) <= number
                if one and is_last and (other is None or other.shape == one.shape):
                    noted[name] = key
        self.noted = noted
        programs = {
            str(number): keys
            for number, layer in enumerate(layers)
            if isinstance(layer, Checkpoint) and (keys := _keys_of_program(layer)) is not None
        }
        if programs:
            self.of_program = {k for n, keys in programs.items() for k in keys if owners[k] == n}
        self.candidates = {k: one for k, one in self.candidates.items() if k not in noted}
        self.checkpoints = [layer for layer in layers if isinstance(layer, Checkpoint)]


class StateSource(Origin):
    """The values of a state dict in memory. The state dict does not change.

    Args:
        state: Key -> tensor, in memory or in one file, or a non-tensor value.
        versions: Path of a module -> its entry in ``_metadata``.
        whole: Whether a plain tensor is the complete value of a DTensor. Each rank then takes its
            own slice.
        is_new: Whether nobody else uses the tensors, so that they may be placed into a model.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        versions: Mapping[str, Mapping[str, object]] | None = None,
        *,
        whole: bool = False,
        is_new: bool = False,
    ) -> None:
        self.is_whole = whole
        candidates: dict[str, SourceTensor] = {}
        objects: dict[str, object] = {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                candidates[key] = MemoryTensor(key, value, is_new=is_new)
            elif isinstance(value, FileTensor):
                candidates[key] = replace(value, key=key)
                self.views = value.views  # the views of the one file that values are read from
            else:
                objects[key] = value
        super().__init__(candidates, objects, versions or {})

    @classmethod
    def of_flat(cls, flat: Flat[Any]) -> StateSource:
        """Return the source of complete tensors, from the containers that a caller passed."""
        made = cls({**flat.tensors, **flat.objects}, flat.versions, whole=True)
        made.blocked, made.templates = flat.blocked, flat.templates
        return made

    def refusal(self, key: str, *, several: bool = False) -> CheckpointError:
        what = "two values have this key once containers are joined by dots"
        hint = "Rename one of them, or pass one of the containers."
        return FormatError(what, file=self.path, entry=key, hint=hint)

    def index(self) -> Index:
        """Return an index of the state dict, with each tensor as if it were a file."""
        entries = {key: describe(one) for key, one in self.candidates.items()}
        return Index(
            self.path, "memory", entries, {}, {},
            objects=self.objects, blocked_keys=self.blocked,
            module_versions=self.versions, templates=self.templates,
        )  # fmt: skip


#: One of several sources.
Layer = Checkpoint | StateSource

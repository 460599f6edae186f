"""Nested containers -> dotted keys, and the keys below a root: one rule for files and for memory.

Mappings are flattened. An empty mapping stays as the object ``{}``. A list or tuple is flattened by
position if it contains a tensor. Otherwise it is one object, such as an optimizer's
``param_groups``. A storage is a tensor of all its numbers. A bare tensor has the key ``tensor``,
and a bare object has the key ``object``.

A root is a dotted prefix of these keys. It may be the name of a container, the names of nested
containers, or the beginning of names with dots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from torchlift._system.text import clipped_list, count_of
from torchlift.errors import Argument, CheckpointError, FormatError, Hint, UnsafeError, did_you_mean
from torchlift.formats.index import Index, Lack, Leaf, lacking, renamed
from torchlift.formats.unpickle import STEP, Budget

#: The keys of a file whose top-level object is not a container.
ROOT_TENSOR, ROOT_OBJECT = "tensor", "object"
#: Stands for a value that does not exist.
MISSING = object()

_MAX_DEPTH = 100
EXTRA_STATE = "_extra_state"

_Tensor = TypeVar("_Tensor")


@dataclass(slots=True)
class Flat(Generic[_Tensor]):
    """The values of nested containers by dotted key, in order.

    Attributes:
        tensors: Every tensor, including blocked ones of subclasses.
        objects: Values that are not tensors.
        blocked: Key -> why its value cannot be rebuilt, as in `Index.blocked_keys`.
        inside: Key of such a value -> the number of tensors in it.
        versions: torch's per-module ``_metadata``.
        templates: The same as `Index.templates`.
    """

    tensors: dict[str, _Tensor] = field(default_factory=dict)
    objects: dict[str, object] = field(default_factory=dict)
    blocked: dict[str, str] = field(default_factory=dict)
    inside: dict[str, int] = field(default_factory=dict)
    versions: dict[str, dict[str, object]] = field(default_factory=dict)
    templates: dict[str, object] = field(default_factory=dict)


class Containers:
    """The rule that decides whether a value is a container or one value.

    Args:
        tensors: Types of tensors.
        mappings: Types of mappings.
    """

    def __init__(self, tensors: tuple[type, ...], mappings: type | tuple[type, ...] = dict) -> None:
        self.tensors, self.mappings = tensors, mappings
        # Keeps the container alive: another object could get its identity otherwise.
        self._tensors_inside: dict[int, tuple[object, bool]] = {}

    def items(self, value: Any, depth: int = 0) -> Iterable[tuple[Any, Any]] | None:
        """Return (name, item) pairs of a container, or None for one value."""
        if isinstance(value, self.mappings):
            return value.items() if value else None  # type: ignore[attr-defined]
        if isinstance(value, (list, tuple)) and self.has_tensor(value, depth):
            return enumerate(value)
        return None

    def has_tensor(self, value: Any, depth: int) -> bool:
        """Return whether a value contains a tensor. Each container is searched once."""
        if isinstance(value, self.tensors):
            return True
        is_mapping = isinstance(value, self.mappings)
        if not (is_mapping or isinstance(value, (list, tuple))):
            return False
        if id(value) not in self._tensors_inside:
            check_depth(depth)
            # False until known: a container may contain itself.
            self._tensors_inside[id(value)] = value, False
            # Each class once: a list of a million numbers has one.
            kinds = (self.tensors, self.mappings, list, tuple)
            items = value.values() if is_mapping else value
            found = any(issubclass(kind, kinds) for kind in {*map(type, items)}) and any(
                self.has_tensor(item, depth + 1) for item in items
            )
            self._tensors_inside[id(value)] = value, found
        return self._tensors_inside[id(value)][1]


class NotPlain(Exception):
    """A value cannot be rebuilt without running code. The argument names the global."""


def flatten_state(state: object, containers: Containers) -> Flat[Any]:
    """Flatten a state in memory by the rule for files. Other values than tensors are kept.

    Raises:
        FormatError: If it nests too deep, or contains itself.

    Example:
        >>> flat = flatten_state({"a": [1, b"t"], 2: {"b": [3]}}, Containers((bytes,)))
        >>> flat.tensors, flat.objects
        ({'a.1': b't'}, {'a.0': 1, '2.b': [3]})
    """
    return Flattener(containers, _Unpriced()).run(state)


class _Unpriced(Budget):
    """A budget without a limit, for values that are in memory already."""

    def spend(self, amount: int, entry: str | None = None) -> None:
        """Do nothing."""


class Flattener:
    """The walk through containers, for values that stay as they are."""

    def __init__(self, containers: Containers, budget: Budget) -> None:
        self.flat: Flat[Any] = Flat()
        self.containers, self.budget = containers, budget

    def run(self, root: Any) -> Flat[Any]:
        """Return the values below the root."""
        items = self.containers.items(root)
        if items is not None or isinstance(root, self.containers.mappings):
            self._children(items or (), "", 0)
            self._versions(root, "")
        else:
            is_tensor = isinstance(root, self.containers.tensors)
            self._visit(ROOT_TENSOR if is_tensor else ROOT_OBJECT, root, 0)
        return self.flat

    def _children(self, items: Iterable[tuple[object, object]], prefix: str, depth: int) -> None:
        """Visit (name, value) pairs below a key."""
        check_depth(depth, prefix)
        tensors, blocked, objects = self.flat.tensors, self.flat.blocked, self.flat.objects
        for name, value in items:
            key = prefix + (name if type(name) is str else self._text(name, prefix))
            self.budget.spend(len(key) + STEP, key)
            is_known = key in tensors or key in objects or key in blocked
            # Items of a container have longer keys: two containers of one name are no conflict.
            if is_known and self.containers.items(value, depth) is None:
                # Two values have this key: a caller who asks for it could mean either.
                for known in (tensors, objects, self.flat.inside):
                    known.pop(key, None)
                blocked[key] = Lack.AMBIGUOUS
            else:
                self._visit(key, value, depth)

    def _visit(self, key: str, value: Any, depth: int) -> None:
        """File one value under its key, or descend into it."""
        items = self.containers.items(value, depth)
        is_mapping = isinstance(value, Mapping)
        # Loading code of a module may expect the list or tuple, as torch.ao's int8 layers do.
        if items is not None and (not is_mapping or key.endswith(EXTRA_STATE)):
            with suppress(NotPlain):
                self.flat.templates[key] = self._template(key, "", value, depth)
        if items is not None:
            self._children(items, key + ".", depth + 1)
            self._versions(value, key)
        else:
            self._file(key, value, depth)

    def _file(self, key: str, value: Any, depth: int) -> None:
        """File one value under its key."""
        is_tensor = isinstance(value, self.containers.tensors)
        (self.flat.tensors if is_tensor else self.flat.objects)[key] = value

    def _template(self, top: str, rest: str, value: Any, depth: int) -> object:
        """Return the containers of the value at ``top + rest``, with a `Leaf` for each value."""
        inner, key = depth + 1, top + rest
        self.budget.spend(len(key) + STEP, key)
        check_depth(inner, key)
        items = self.containers.items(value, depth)
        if items is None:
            return Leaf(rest)
        if isinstance(value, self.containers.mappings):
            return {
                self._plain(name, key, inner): self._template(
                    top,
                    f"{rest}.{name if type(name) is str else self._text(name, key)}",
                    item,
                    inner,
                )
                for name, item in items
            }
        kind = list if isinstance(value, list) else tuple
        return kind([self._template(top, f"{rest}.{at}", item, inner) for at, item in items])

    def _plain(self, value: Any, key: str, depth: int) -> Any:
        """Return the value that is kept for a plain one."""
        return value

    def _versions(self, container: Any, prefix: str) -> None:
        """Collect the per-module metadata of a state dict."""
        for name, local in _metadata_of(container).items():
            if type(name) is str and isinstance(local, Mapping):
                path = f"{prefix}.{name}" if prefix and name else prefix or name
                self.budget.spend(len(path) + STEP, path)
                with suppress(NotPlain):
                    plain = {
                        k if type(k) is str else self._text(k, path): self._plain(v, path, 1)
                        for k, v in local.items()
                    }
                    self.flat.versions[path] = plain

    def _text(self, name: object, prefix: str) -> str:
        """Return the text of a dictionary key that is not a string."""
        return name_text(name)


def check_depth(depth: int, key: str | None = None) -> None:
    """Refuse containers below a number of others."""
    if depth > _MAX_DEPTH:
        raise FormatError(
            "containers nest too deep, or contain themselves",
            entry=key,
            expected=f"at most {_MAX_DEPTH} levels",
        )


def name_text(name: object) -> str:
    """Return the text of a name, of a file's records or in memory, where it may be of any class.

    Example:
        >>> name_text("a"), name_text(1), name_text((1, "b"))
        ('a', '1', "(1, 'b')")
    """
    if type(name) is int and name.bit_length() > 64:
        return hex(name)  # Python refuses to print more than 4,300 decimal digits
    return name if type(name) is str else str(name)


def items_of(value: object) -> list[tuple[Any, Any]]:
    """Return (name or position, item) pairs of a plain container, or an empty list."""
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (list, tuple)) else []


# -- the keys below a root


def under(index: Index, root: str) -> Index | None:
    """Return the index of the container `root`, with that prefix removed, or None.

    Storages that only other keys use are left out, so that sizes count the container only.

    Raises:
        FormatError: If the root could mean more than one container.
        TypeError: If `root` is not text.
    """
    _require_text(root)
    prefix = f"{root}."
    found = renamed(index, lambda key: key.removeprefix(prefix) if key.startswith(prefix) else None)
    if not (found.entries or found.objects or found.blocked_keys):
        return None
    inner = MISSING if index.tree is None else below(index.tree[0], root, index.path)
    return replace(
        found,
        noted={
            name: key.removeprefix(prefix)
            for name, key in _inside(index.noted, root).items()
            if key.startswith(prefix)
        },
        templates=_inside(index.templates, root),
        module_versions=paths_inside(index.module_versions, root),
        aside=(),
        tree=None if inner is MISSING else (inner,),
    )


def select(index: Index, root: str) -> Index:
    """Return the index of the container `root`, with that prefix removed.

    Raises:
        FormatError: If the container does not exist, or two values have this key.
        UnsafeError: If only unpickling could rebuild it.
    """
    selected = under(index, root)
    if selected is None and root in index.blocked_keys:
        raise blocked_error(index, root)
    if selected is None:
        raise no_container(index.path, root, (*index.entries, *index.objects))
    return selected


def below(saved: object, root: str, path: str = "") -> Any:
    """Return the container that a root names, or `MISSING`.

    If names with dots begin with the root, the result is a dict of their values.

    Args:
        saved: The containers.
        root: Name of the container.
        path: Name of the containers in errors.

    Raises:
        FormatError: If the root could mean more than one container.

    Example:
        >>> below({"a.b": 1, "a.c.d": 2}, "a"), below({"a": {"b.c": [3]}}, "a.b")
        ({'b': 1, 'c.d': 2}, {'c': [3]})
    """
    _require_text(root)
    found = dict(_candidates(saved, root, ""))
    # A leaf of this name is not a container, so it does not compete with one.
    found = {place: value for place, value in found.items() if items_of(value)} or found
    if len(found) > 1:
        raise FormatError(
            "this root could mean more than one container",
            file=path,
            entry=root,
            found=" and ".join(list(found)[:3]),
            hint=Hint(
                "Leave ",
                Argument("root"),
                " out, and choose by keys: ",
                Argument("include", f"[{f'{root}.*'!r}]", (f"{root}.*",)),
                " and ",
                Argument("rename", f"torchlift.remap.strip({f'{root}.'!r})", (f"{root}.",)),
                ".",
            ),
        )
    return next(iter(found.values()), MISSING)


class _Part(dict[str, object]):
    """The values of a state dict below a dotted name, with torch's metadata of these modules."""

    _metadata: Mapping[str, Any]


def _candidates(value: object, root: str, place: str) -> Iterator[tuple[str, object]]:
    """Yield each place that a root could mean, and what is there."""
    dotted: dict[str, object] = {}
    for name, item in items_of(value):
        key = name_text(name)
        if key == root:
            yield f"{place}[{name!r}]", item
        elif root.startswith(f"{key}."):
            yield from _candidates(item, root[len(key) + 1 :], f"{place}[{name!r}]")
        elif key.startswith(f"{root}."):
            dotted[key[len(root) + 1 :]] = item
    if dotted:
        part = _Part(dotted)
        part._metadata = paths_inside(_metadata_of(value), root)
        yield f"{place}[{f'{root}.*'!r}]", part


def state_dicts_in(saved: object) -> list[str]:
    """Return the names of containers that are state dicts of modules.

    torch attaches metadata to a module's state dict, and its keys have dots. Nested containers
    whose names lack dots are the structure of a model (flax) and not meant as a root.

    Example:
        >>> weight = object()
        >>> optimizer = {"state": {}, "param_groups": []}
        >>> state_dicts_in({"model": {"a.weight": weight}, "optimizer": optimizer, "a.b": 1})
        ['model']
    """
    if not isinstance(saved, Mapping) or _is_state(saved):
        return []
    return [name_text(name) for name, item in saved.items() if _is_state(item)]


def _is_state(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    # Names of numbers and texts may have dots anywhere: {"config.yaml": "...", "model": {...}}.
    others = (Mapping, list, str, bytes, int, float, type(None))
    leaves = (name for name, item in value.items() if not isinstance(item, others))
    return bool(_metadata_of(value)) or any("." in name for name in leaves if type(name) is str)


def _metadata_of(container: Any) -> Mapping[Any, Any]:
    """Return the metadata that torch attaches to a state dict, of a file or in memory."""
    found = getattr(container, "_metadata", None)
    return found if isinstance(found, Mapping) else {}


def _inside(values: Mapping[str, Any], root: str) -> dict[str, Any]:
    """Return the values whose keys are below a root, without that prefix."""
    prefix = f"{root}."
    return {k.removeprefix(prefix): v for k, v in values.items() if k.startswith(prefix)}


def _require_text(root: object) -> None:
    if not isinstance(root, str):
        raise TypeError(f"root={root!r}: expected the dotted name of a container, or None")


def paths_inside(versions: Mapping[str, Any], root: str) -> dict[str, Any]:
    """Return the versions of a module and its submodules. The module's path becomes empty."""
    own = {"": versions[root]} if root in versions else {}
    return {**own, **_inside(versions, root)}


def no_container(path: str, root: str, keys: Collection[str]) -> FormatError:
    """Return the error for a container that does not exist."""
    this = Argument("root")
    is_value = root in keys
    tops = sorted({key.split(".", 1)[0] for key in keys})
    return FormatError(
        "this key is a value, not a container"
        if is_value
        else "the checkpoint does not contain this container",
        file=path,
        entry=root,
        found="at the top: " + (clipped_list(tops) or "nothing"),
        hint=Hint("Leave ", this, " out.")
        if is_value
        else did_you_mean(root, tops)
        or Hint("Pass one of these as ", this, ", or leave ", this, " out."),
    )


#: Format -> the call that unpickles everything in a file of it, if that is not torch.load.
_UNPICKLERS = {
    "npz": "numpy.load(path, allow_pickle=True)",
    "dcp": "torch.distributed.checkpoint.format_utils.dcp_to_torch_save(path, file)",
}
_MOST_CLASSES = 5  # that a hint names: more are those of a program, not of data


def _if_data(index: Index) -> str:
    """Return the hint for a torch file of classes that may hold data only, or an empty text."""
    names = [name.split(".") for name in index.blocked]
    # Functions have small letters: a call of one may do anything.
    are_classes = all(all(map(str.isidentifier, n)) and n[-1][0].isupper() for n in names)
    if not are_classes or len(names) > _MOST_CLASSES or not index.format.startswith("torch-"):
        return ""
    return (
        "If you know these classes, and that they hold data only: with torch.serialization."
        f"safe_globals([{', '.join(index.blocked)}]): torch.load(path). "
    )


def blocked_error(
    index: Index, key: str, *, loading: bool = False, several: bool = False
) -> CheckpointError:
    """Return the error that explains why the value of a key cannot be rebuilt.

    Args:
        index: The index.
        key: The key. It may be inside of such a value.
        loading: Whether the hint may name arguments of a load.
        several: Whether the load has to leave out several such values.
    """
    if error := lacking(index.path, key, index.blocked_keys.get(key)):
        return error
    while key not in index.blocked_keys and "." in key:  # inside of a value
        key = key.rpartition(".")[0]
    if key not in index.blocked_keys:  # of a file that is blocked whole
        key = ROOT_OBJECT
    name, count = index.blocked_keys.get(key, ""), index.blocked_tensors.get(key)
    module, _, kind = name.rpartition(".")
    if key in index.tensors:
        allow = Argument("allow_classes", f"[{kind}]")
        hint = Hint("If you know the class, name it: ", allow, f", from {module}.")
    else:
        hint = Hint("The file contains nothing else. ")
        if index.entries or index.objects:
            them, names = ("them", "their names") if several else ("it", "its name")
            left_out = Argument("allow_unexpected", f"[...] with {names}")
            without = Hint(f"Load without {them}: ", left_out)
            without = without if loading else Hint("Take the tensors by their keys")
            hint = Hint(without, ", or ", Argument("root"), " for a part of the file. ")
        hint = Hint(
            hint,
            _if_data(index),
            f"{_UNPICKLERS.get(index.format, 'torch.load(path, weights_only=False)')} rebuilds it "
            "and can run any code. Call that only if you trust the author of the file.",
        )
    return UnsafeError(
        f"only unpickling could rebuild it, through {name}, and that can run code",
        file=index.path,
        entry=key,
        found=f"{count_of(count, 'tensor')} in it" if count else None,
        hint=hint,
    )


def extra_state(key: str) -> str:
    """Return the name of the extra state that a key belongs to, or an empty text.

    Example:
        >>> extra_state("a._extra_state.scale.0"), extra_state("a.weight")
        ('a._extra_state', '')
    """
    at = f".{key}.".find(f".{EXTRA_STATE}.")
    return key[: at + len(EXTRA_STATE)] if at >= 0 else ""

"""Nested containers -> dotted keys.

Dicts are always flattened, and an empty one stays as the object ``{}``. Lists and tuples are
flattened by position when a tensor is anywhere inside; otherwise the whole list is one object, so
that an optimizer's ``param_groups`` stay what they are. A storage is a tensor of all its numbers.
A file that holds a bare tensor has the key ``tensor``; one that holds a bare object, ``object``.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from torchlift.errors import FormatError
from torchlift.formats.index import AMBIGUOUS, QUANTIZED, SUBCLASS, Leaf
from torchlift.formats.torch_pickle import (
    ArrayRef,
    Blocked,
    Global,
    NumpyDtype,
    OrderedRecord,
    RebuiltRef,
    StorageRef,
    TensorRef,
)
from torchlift.formats.unpickle import ENTRY, STEP, Budget, check_key

#: The keys of a file whose top-level object is not a container.
ROOT_TENSOR, ROOT_OBJECT = "tensor", "object"

_MAX_DEPTH = 100
_EXTRA_STATE = "_extra_state"
_CONTAINERS = (dict, list, tuple, set, frozenset)
_TENSORS = (TensorRef, StorageRef)
_HOLDING = (TensorRef, Blocked)
_TEXTS = (str, bytes, bytearray)
_SCALARS = (bool, int, float, complex, *_TEXTS)


@dataclass(slots=True)
class Flat:
    """What a checkpoint's object tree holds, by dotted key, in file order.

    Attributes:
        tensors: every tensor, those of subclasses, too.
        objects, templates: see `Index`.
        blocked: key -> the name of the global that its value would have needed; of a key that
            several paths give, `AMBIGUOUS`.
        inside: key of such a value -> the number of tensors in it, where there are any; each tensor
            counts for the first one that it is in.
        subclasses: key of such a value -> how it is made, where it is a tensor of a subclass.
        versions: torch's per-module ``_metadata``.
    """

    tensors: dict[str, TensorRef] = field(default_factory=dict)
    objects: dict[str, object] = field(default_factory=dict)
    blocked: dict[str, str] = field(default_factory=dict)
    inside: dict[str, int] = field(default_factory=dict)
    subclasses: dict[str, TensorRef] = field(default_factory=dict)
    versions: dict[str, dict[str, object]] = field(default_factory=dict)
    templates: dict[str, object] = field(default_factory=dict)


class _NotPlain(Exception):
    """A value that cannot be rebuilt without running code; the argument names what it needs."""


def flatten(root: object, budget: Budget) -> Flat:
    """Flatten an object tree.

    Args:
        root: what a `Machine` returned.
        budget: what the file may still cost. Containers that share their items can have far more
            paths than there are atoms.

    Raises:
        FormatError: the tree nests too deep, contains itself, or unfolds to far more than was
            stored.
    """
    return _Flattener(budget).run(root)


class _Flattener:
    def __init__(self, budget: Budget) -> None:
        self.flat = Flat()
        self.budget = budget
        self._tensors_inside: dict[int, bool] = {}
        self._counted: dict[int, object] = {}

    def run(self, root: object) -> Flat:
        if isinstance(root, dict):
            self._children(root.items(), "", 0)
            self._versions(root, "")
        elif isinstance(root, (list, tuple)) and self._has_tensor(root, 0):
            self._children(enumerate(root), "", 0)
        else:
            self._visit(ROOT_TENSOR if isinstance(root, _TENSORS) else ROOT_OBJECT, root, 0)
        return self.flat

    def _children(self, items: Iterable[tuple[object, object]], prefix: str, depth: int) -> None:
        """Visit (name, value) pairs below a key."""
        _check_depth(depth, prefix)
        tensors, blocked, objects = self.flat.tensors, self.flat.blocked, self.flat.objects
        cost = 0
        for name, value in items:
            key = prefix + (name if type(name) is str else self._text(name, prefix))
            if key in tensors or key in objects or key in blocked:
                # Neither is the one that is meant; what has a name of its own is not in doubt.
                for known in (tensors, objects, self.flat.inside, self.flat.subclasses):
                    known.pop(key, None)
                self.budget.spend(len(key) + STEP, key)
                blocked[key] = AMBIGUOUS
                continue
            if type(value) is TensorRef:
                tensors[key] = value
                cost += len(key) + ENTRY
            else:
                self.budget.spend(len(key) + STEP, key)
                self._visit(key, value, depth)
        self.budget.spend(cost, prefix)

    def _visit(self, key: str, value: object, depth: int) -> None:
        """File one value under its key, or descend into it."""
        if key.endswith(_EXTRA_STATE) and isinstance(value, (dict, list, tuple)):
            with suppress(_NotPlain):
                self.flat.templates[key] = self._template(key, value, depth)
        if isinstance(value, StorageRef) and value.dtype not in QUANTIZED:
            numel = value.view[1] if value.view else value.numel
            value = TensorRef(value, value.dtype or "uint8", 0, (numel,), (1,))
        if isinstance(value, RebuiltRef):
            numbers = sum(len(fact) for fact in value.facts if isinstance(fact, tuple))
            cost = ENTRY * (len(value.tensors) + value.weight) + STEP * numbers
            self.budget.spend(cost, key)
        if isinstance(value, RebuiltRef) and value.kind == SUBCLASS:
            self.flat.tensors[key] = self.flat.subclasses[key] = value
            self.flat.blocked[key] = str(value.facts[0])
            if count := self._count(value):
                self.flat.inside[key] = count
        elif isinstance(value, TensorRef):
            self.budget.spend(ENTRY, key)
            self.flat.tensors[key] = value
        elif isinstance(value, dict) and value:
            self._children(value.items(), key + ".", depth + 1)
            self._versions(value, key)
        elif isinstance(value, (list, tuple)) and self._has_tensor(value, depth):
            self._children(enumerate(value), key + ".", depth + 1)
        else:
            try:
                self.flat.objects[key] = self._plain(value, key, depth)
            except _NotPlain as error:
                self.flat.blocked[key] = str(error)
                if count := self._count(value):
                    self.flat.inside[key] = count

    def _count(self, value: object) -> int:
        """Count the tensors in a value that is blocked; each object is looked at once."""
        count, left = 0, [value]
        while left:
            item = left.pop()
            if id(item) in self._counted or not isinstance(item, (*_CONTAINERS, *_HOLDING)):
                continue
            self._counted[id(item)] = item
            inner = item.tensors if isinstance(item, RebuiltRef) and item.kind == SUBCLASS else ()
            count += isinstance(item, TensorRef) and not inner
            left += inner
            if isinstance(item, dict):
                left += item.values()
            elif not isinstance(item, TensorRef):
                left += item.inside if isinstance(item, Blocked) else item
        return count

    def _template(self, key: str, value: object, depth: int) -> object:
        """Return the containers of a value, with a `Leaf` for what has a key of its own."""
        inner = depth + 1
        self.budget.spend(len(key) + STEP, key)
        _check_depth(inner, key)
        if isinstance(value, dict) and value:
            return {
                self._plain(name, key, inner): self._template(
                    f"{key}.{name if type(name) is str else self._text(name, key)}", item, inner
                )
                for name, item in value.items()
            }
        if isinstance(value, (list, tuple)) and self._has_tensor(value, depth):
            kind = list if isinstance(value, list) else tuple
            return kind(
                [self._template(f"{key}.{at}", item, inner) for at, item in enumerate(value)]
            )
        return Leaf(key)

    def _has_tensor(self, value: object, depth: int) -> bool:
        """Return whether a tensor is anywhere inside; each container is looked at once."""
        if not isinstance(value, (dict, list, tuple)):
            return isinstance(value, _TENSORS)
        known = self._tensors_inside.get(id(value))
        if known is None:
            _check_depth(depth)
            # No until known: a container that contains itself must not be followed for ever.
            self._tensors_inside[id(value)] = False
            items = value.values() if isinstance(value, dict) else value
            known = any(self._has_tensor(item, depth + 1) for item in items)
            self._tensors_inside[id(value)] = known
        return known

    def _plain(self, value: object, key: str, depth: int) -> object:
        """Return a copy of a value made of plain Python objects only."""
        # A text is shown each time that it is named, and so are a number's digits.
        self.budget.spend(STEP + (len(value) if isinstance(value, _TEXTS) else 0), key)
        if value is None or type(value) in _SCALARS:
            return value
        if isinstance(value, str):  # of a device or a slice
            return str(value)
        if isinstance(value, Global):
            return value.name
        if isinstance(value, NumpyDtype):
            return f"numpy.dtype({value.code})"
        if isinstance(value, ArrayRef) and value.array is not None:
            return value.array
        if isinstance(value, ArrayRef):
            raise _NotPlain("numpy.ndarray")
        if isinstance(value, Blocked):
            raise _NotPlain(value.name)
        if not isinstance(value, _CONTAINERS):
            what = "torch.Tensor" if isinstance(value, TensorRef) else "torch.UntypedStorage"
            raise _NotPlain(what)
        _check_depth(depth, key)
        self.budget.spend(STEP, key)
        if isinstance(value, dict):
            return {
                self._plain(k, key, depth + 1): self._plain(v, key, depth + 1)
                for k, v in value.items()
            }
        kind = next(kind for kind in _CONTAINERS[1:] if isinstance(value, kind))
        return kind([self._plain(item, key, depth + 1) for item in value])

    def _versions(self, container: object, prefix: str) -> None:
        """Collect the per-module metadata of a state dict."""
        if not isinstance(container, OrderedRecord) or not isinstance(container.metadata, dict):
            return
        for name, local in container.metadata.items():
            if type(name) is str and isinstance(local, dict):
                path = f"{prefix}.{name}" if prefix and name else prefix or name
                self.budget.spend(len(path) + STEP, path)
                with suppress(_NotPlain):
                    plain = {
                        k if type(k) is str else self._text(k, path): self._plain(v, path, 1)
                        for k, v in local.items()
                    }
                    self.flat.versions[path] = plain

    def _text(self, name: object, prefix: str) -> str:
        """Return the text of a dictionary key that is not a string."""
        if isinstance(name, (bytes, tuple)):
            self.budget.spend(STEP * check_key(name), prefix)
        return key_text(name, prefix)


def _check_depth(depth: int, key: str | None = None) -> None:
    if depth > _MAX_DEPTH:
        raise FormatError(
            "containers nest too deep, or contain themselves",
            entry=key,
            expected=f"at most {_MAX_DEPTH} levels",
        )


def key_text(name: object, prefix: str) -> str:
    """Return the text of a dictionary key that is not a string."""
    if name is None or isinstance(name, (int, float)):
        return str(name)
    if isinstance(name, (Global, Blocked)):
        return name.name
    if isinstance(name, (bytes, tuple)) and len(name) < 1000:
        return repr(name)
    raise FormatError(
        "a dictionary key that cannot be part of a name",
        entry=prefix.removesuffix("."),
        expected="a string or a number",
        found=f"a {'storage' if isinstance(name, StorageRef) else type(name).__name__}",
    )

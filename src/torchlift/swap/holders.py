"""Who holds on to a tensor, in words, as far as Python's garbage collector knows.

The cost is bounded: one walk over all objects for the tensors among them, and one per level for who
refers to what, however many tensors are asked about. Nothing found here is kept.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

#: How far from a tensor the object with a name may be: reference, dict, weak dict, its owner.
_LEVELS = 5
_WIDTH = 24  # objects looked at per level
_GRAPH = 50_000  # nodes of recorded graphs looked at
_LOCAL = "a local variable of a running function"
_FLAT = "_flat_weight_refs"  # a recurrent layer's own, and no obstacle

_CONTAINERS = (dict, list, tuple, set, frozenset, weakref.ref, types.MethodType, partial)
_COMPILER = "a guard of torch.compile"
_COMPILERS = ("torch._dynamo", "torch._C._dynamo", "torch._guards", "torch._subclasses")

REDUCER = "the gradient hooks of a DistributedDataParallel module"


class Search:
    """What refers to some tensors. Answers are words, never objects."""

    def __init__(self, targets: Sequence[torch.Tensor], known: set[int]) -> None:
        """Walk over everything.

        Args:
            targets: the tensors.
            known: identities of tensors that are the module's own and hold nothing back.
        """
        tensors, reducers = _live_tensors()
        self._reduced = {id(p) for ddp in reducers for p in ddp.module.parameters()}
        self._views: dict[int, list[torch.Tensor]] = {id(tensor): [] for tensor in targets}
        self._others: dict[int, list[torch.Tensor]] = {id(tensor): [] for tensor in targets}
        by_memory: dict[int | None, list[int]] = {}
        for tensor in targets:
            by_memory.setdefault(memory_of(tensor), []).append(id(tensor))
        by_memory.pop(None, None)
        asked: list[object] = [ref for tensor in targets for ref in weakref.getweakrefs(tensor)]
        for other in tensors:
            if id(other) in known:
                continue
            base = id(other._base) if other._is_view() else None
            if base in self._views:
                self._views[base].append(other)
                asked.append(other)
            elif by_memory and (memory := memory_of(other)) in by_memory:
                for target in by_memory[memory]:
                    self._others[target].append(other)
                asked.append(other)
        recorded = {id(tensor) for tensor in targets if tensor.requires_grad}
        self._graphs = _graphs(tensors, recorded) if recorded else {}
        ours = [tensors, asked, *self._views.values(), *self._others.values()]
        self._words = _Referrers(asked, ours).words()

    def weak(self, tensor: torch.Tensor) -> list[str]:
        """Who has weak references to the tensor."""
        words: list[str] = []
        if id(tensor) in self._views:
            for reference in weakref.getweakrefs(tensor):
                words += self._words.get(id(reference), [])
        return words

    def sharing(self, tensor: torch.Tensor) -> tuple[list[str], list[str]]:
        """Views of the tensor, and other tensors over some of the same bytes."""
        views = [
            f"{_shaped('a view', other)}{_made_by(other)} in {self._place(other)}"
            for other in self._views.get(id(tensor), [])
        ]
        others = [
            f"{_shaped('a tensor', other)} in {self._place(other)}"
            for other in self._others.get(id(tensor), [])
        ]
        return views, others

    def recorders(self, tensor: torch.Tensor) -> list[str]:
        """What keeps the node that accumulates the tensor's gradient."""
        if id(tensor) in self._reduced:
            return [REDUCER]
        return self._graphs.get(id(tensor), [])

    def _place(self, other: torch.Tensor) -> str:
        return " and ".join(self._words.get(id(other), [])) or _LOCAL


def _shaped(what: str, tensor: torch.Tensor) -> str:
    return f"{what} of shape {list(tensor.shape)}"


def _made_by(tensor: torch.Tensor) -> str:
    return "" if tensor.grad_fn is None else f" made by {tensor.grad_fn.name()}"


def _live_tensors() -> tuple[list[torch.Tensor], list[Any]]:
    """All tensors, and all modules that reduce gradients, that the collector knows."""
    everything = gc.get_objects()
    kinds = set(map(type, everything))
    tensor_kinds = {kind for kind in kinds if issubclass(kind, torch.Tensor)}
    wanted = tensor_kinds | {kind for kind in kinds if issubclass(kind, DistributedDataParallel)}
    found = [item for item in everything if type(item) in wanted]
    tensors = [item for item in found if type(item) in tensor_kinds and _is_ordinary(item)]
    return tensors, [item for item in found if type(item) not in tensor_kinds]


def _is_ordinary(tensor: torch.Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def state_dict_tensors() -> list[torch.Tensor]:
    """The tensors in all dicts that `torch.nn.Module.state_dict` made and that are still there."""
    dicts = [item for item in gc.get_objects() if type(item) is OrderedDict]
    taken = [item for item in dicts if hasattr(item, "_metadata")]
    return [value for item in taken for value in item.values() if isinstance(value, torch.Tensor)]


def memory_of(tensor: torch.Tensor) -> int | None:
    """What identifies the memory that a tensor and others may share, or None without any."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError, ValueError):
        return None  # sparse, lazy


def _graphs(tensors: list[torch.Tensor], wanted: set[int]) -> dict[int, list[str]]:
    """Tensor -> whose recorded graphs lead to it. Each node is visited once, for the first."""
    found: dict[int, list[str]] = {}
    seen: set[Any] = set()
    for tensor in tensors:
        todo: list[Any] = [tensor.grad_fn]
        while todo and len(seen) < _GRAPH:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if id(leaf) in wanted:
                words = f"{_shaped('the graph behind a tensor', tensor)}{_made_by(tensor)}"
                found.setdefault(id(leaf), []).append(words)
            todo += [edge for edge, _ in node.next_functions]
    return found


class _Referrers:
    """Chains of references from some objects up to things that have a name."""

    def __init__(self, asked: list[object], ours: Iterable[object]) -> None:
        self._asked = asked
        self._parents: dict[int, list[object]] = {}
        self._ours = {id(item) for item in ours} | {id(self.__dict__), id(self._parents)}
        level = asked
        seen: set[int] = set()
        for _ in range(_LEVELS):
            level = self._climb(level[:_WIDTH], seen)
            if not level:
                break

    def _climb(self, level: list[object], seen: set[int]) -> list[object]:
        self._ours.add(id(level))
        ids = {id(item) for item in level}
        seen |= ids
        above: list[object] = []
        self._ours.add(id(above))
        for referrer in gc.get_referrers(*level):
            if id(referrer) in self._ours or _is_ours(referrer):
                continue
            for child in gc.get_referents(referrer):
                if id(child) in ids:
                    into = self._parents.setdefault(id(child), [])
                    self._ours.add(id(into))
                    into.append(referrer)
            if id(referrer) not in seen and _is_nameless(referrer):
                above.append(referrer)
        return above

    def words(self) -> dict[int, list[str]]:
        """What holds each object that was asked about."""
        return {id(item): self._words(item, 0) or [_LOCAL] for item in self._asked}

    def _words(self, item: object, depth: int) -> list[str]:
        found: list[str] = []
        if depth < _LEVELS:
            for parent in self._parents.get(id(item), [])[:4]:
                found += self._named(parent, item, depth)
        return list(dict.fromkeys(found))

    def _named(self, parent: Any, item: object, depth: int) -> list[str]:
        kind = type(parent)
        if _is_compiler(kind):
            return [_COMPILER]
        if isinstance(parent, types.FrameType):
            return [f"a local variable of {parent.f_code.co_name}()"]
        if isinstance(parent, dict):
            return self._in_dict(parent, item, depth)
        if isinstance(parent, types.CellType):
            return ["a closure"]
        if not _is_nameless(parent):
            name = _attribute(parent, item)
            return [] if name == f"attribute {_FLAT!r}" else [f"{name} of {_a(kind)}"]
        plain = kind.__module__ == "builtins"
        above = self._words(parent, depth + 1)
        if plain:
            # Held by what is no obstacle, and by nothing else.
            return above or ([] if id(parent) in self._parents else [_a(kind)])
        return [_within(_a(kind), text) for text in above] or [_a(kind)]

    def _in_dict(self, parent: dict[Any, Any], item: object, depth: int) -> list[str]:
        key = next((key for key, value in list(parent.items()) if value is item), None)
        if "__name__" in parent and "__builtins__" in parent:
            return [f"the global variable {key!r} of {parent['__name__']}"]
        for owner in self._parents.get(id(parent), []):
            if _dict_of(owner) is parent:
                if _is_compiler(type(owner)):
                    return [_COMPILER]
                if key == _FLAT:
                    return []
                if _is_nameless(owner):
                    return self._named(owner, parent, depth + 1)
                return [f"attribute {key!r} of {_a(type(owner))}"]
        inside = "a dict" if key is None or not isinstance(key, str) else f"item {key!r} of a dict"
        above = self._words(parent, depth + 1)
        return [_within(inside, text, key) for text in above] or [inside]


def _within(what: str, above: str, key: object = None) -> str:
    """What holds something, and what holds that, as people call it."""
    if above == _COMPILER:
        return above
    for registry, name in (("_buffers", "buffer"), ("_parameters", "parameter")):
        prefix = f"attribute {registry!r} of "
        if above.startswith(prefix):
            return f"{name} {key!r} of {above.removeprefix(prefix)}"
    return f"{what}, {above}"


def _is_nameless(item: object) -> bool:
    """Whether only what holds this object can say what it is for."""
    if isinstance(item, nn.Module):
        return False
    return isinstance(item, _CONTAINERS) or type(item).__module__ in ("weakref", "torch.utils.weak")


def _is_ours(item: object) -> bool:
    if isinstance(item, types.FrameType):
        return str(item.f_globals.get("__name__", "")).startswith("torchlift.")
    return False


def _is_compiler(kind: type) -> bool:
    return str(kind.__module__).startswith(_COMPILERS)


def _dict_of(item: object) -> object:
    try:
        return object.__getattribute__(item, "__dict__")
    except AttributeError:
        return None


def _attribute(owner: object, item: object) -> str:
    own = _dict_of(owner)
    names = own.items() if isinstance(own, dict) else ()
    return next((f"attribute {name!r}" for name, value in names if value is item), "a part")


def _a(kind: type) -> str:
    name = kind.__qualname__.rpartition(".")[2]
    vowels = "AEFHILMNORSX" if name.isupper() else "AEIOUaeiou"  # an LSTM, a GRU
    return f"{'an' if name[:1] in vowels else 'a'} {name}"

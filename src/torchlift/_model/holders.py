"""`preflight`: which tensors of a module cannot change their content, why, and who is in the way.

Counting references is cheap and done for every tensor. Looking for who holds them is not, and done
for the first few that are blocked.
"""

from __future__ import annotations

import copyreg
import gc
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchlift._model import handlers
from torchlift._model.commit import flat_references, is_plain
from torchlift._model.slots import Group, collect, is_lazy
from torchlift.errors import PlacementError

#: Tensors whose holders are looked for. Comparing every reference of a process with 8 objects takes
#: 50 ms, at each of a few levels; with 10,000 it would take minutes.
_NAMED = 8


class Hold(Enum):
    """What keeps a tensor's content from being exchanged."""

    WEAK_REFERENCE = auto()
    VIEW = auto()
    MEMORY = auto()
    GRAPH = auto()
    REDUCER = auto()
    FOREIGN = auto()
    CLASS = auto()


@dataclass(frozen=True, slots=True)
class Blocker:
    """A tensor that cannot be swapped.

    Attributes:
        key: its name in the module.
        reason: what forbids it.
        holders: who is in the way, in words; empty where nobody was looked for or found.
    """

    key: str
    reason: str
    holders: tuple[str, ...] = ()
    kinds: frozenset[Hold] = field(default=frozenset(), compare=False, repr=False)

    def __str__(self) -> str:
        held = f" (held by {'; '.join(self.holders)})" if self.holders else ""
        return f"{self.key}: {self.reason}{held}"


@dataclass(slots=True)
class Facts:
    """What counting found out about one tensor: how many, besides the module, hold what."""

    group: Group
    weak: int
    uses: int
    owners: int

    @property
    def is_free(self) -> bool:
        """Whether nobody else holds anything."""
        return self.weak <= 0 and self.uses <= 0 and self.owners <= 0


def preflight(module: nn.Module) -> list[Blocker]:
    """Find every parameter and persistent buffer that ``load(mode="swap")`` would refuse to swap.

    In the way are weak references, views and other tensors over the same memory (they would keep
    the old values), a graph that a forward pass recorded or a gradient hook of
    ``DistributedDataParallel``, classes with slots, and a ``__torch_function__`` that returns its
    own input from ``module_load``. An optimizer is not: it holds the object, which stays. Nor are
    the weak references that a recurrent layer keeps to its own weights, which are released, nor a
    dict that ``state_dict`` returned, which goes on holding the values it was taken for.

    The conditions are those of ``torch.utils.swap_tensors`` and stricter in one point: torch does
    not look for other tensors over the same memory.

    Args:
        module: the module; it is not changed.

    Returns:
        One `Blocker` for each tensor that is blocked, in the order of ``state_dict``; empty when
        all can be swapped.

    Example:
        >>> import torch, torchlift
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> torchlift.swap.preflight(model)
        []
        >>> window = model.weight[:1]
        >>> [(item.key, item.reason) for item in torchlift.swap.preflight(model)]
        [('weight', 'a view of it is alive')]
    """
    return blocked_by(
        [group for group in collect(module) if group.persistent or group.is_parameter]
    )


def blocked_by(groups: Sequence[Group]) -> list[Blocker]:
    """The blockers among these tensors, in their order."""
    facts = count(groups)
    suspects = [item for item in facts if not item.is_free]
    if suspects:
        # What only garbage holds is not held. Unreachable cycles are common after an exception.
        if gc.collect():
            facts = count(groups)
        suspects = [item for item in facts if not item.is_free]
    known = {id(group.tensor) for group in groups}
    if any(item.owners > 0 for item in suspects):
        known |= _discount_state_dicts(suspects, known)
        suspects = [item for item in suspects if not item.is_free]
    search = Search([item.group.tensor for item in suspects[:_NAMED]], known) if suspects else None
    returning: dict[type, str | None] = {}
    found = []
    for item in facts:
        reasons, held = _referenced(item, search) if not item.is_free else ([], [])
        reasons += _by_class(item.group.tensor, returning)
        if reasons:
            text = "; ".join(reasons)
            kinds = {Hold.REDUCER} if REDUCER in held else set()
            kinds |= {Hold.VIEW} if "view" in text else set()
            kinds |= {Hold.MEMORY} if "memory" in text else set()
            found.append(
                Blocker(item.group.fqn, text, tuple(dict.fromkeys(held)), frozenset(kinds))
            )
    return found


def refusal(found: Sequence[Blocker], *, hint: str) -> PlacementError:
    """The error for tensors that were to be swapped and cannot be."""
    first = found[0]
    others = "" if len(found) == 1 else f", as {len(found) - 1} more of the module's tensors"
    listed = "".join(f"; {item}" for item in found[1:4])
    return PlacementError(
        f"cannot be swapped{others}: {first.reason}{listed}. Nothing was changed",
        entry=first.key,
        found=f"held by {'; '.join(first.holders)}" if first.holders else None,
        hint=hint,
    )


def count(groups: Iterable[Group]) -> list[Facts]:
    """Count who else holds each tensor, its content and its memory."""
    facts = [_count(group) for group in groups if not is_lazy(group.tensor)]
    storages: dict[int, list[Facts]] = {}
    spare: dict[int, int] = {}
    bases: set[int] = set()
    for item in facts:
        tensor = item.group.tensor
        # Values on meta do not exist, so that nobody can keep old ones.
        if tensor.is_meta or tensor.layout != torch.strided or not is_plain(tensor):
            continue
        storage = tensor.untyped_storage()
        key = storage._cdata
        storages.setdefault(key, []).append(item)
        # One for the Python object of the storage, one for each tensor that we know.
        spare.setdefault(key, torch._C._storage_Use_Count(key) - 1)
        spare[key] -= 1
        # The full tensor behind an expanded buffer, which nobody but the view holds.
        if tensor._is_view() and sys.getrefcount(tensor._base) <= _lonely():
            base = id(tensor._base)
            spare[key] -= base not in bases
            bases.add(base)
    for key, items in storages.items():
        for item in items:
            item.owners = spare[key]
    return facts


@cache
def _lonely() -> int:
    """Python's reference count for the base of a view that nobody else holds."""
    view = torch.zeros(1).expand(2)
    return sys.getrefcount(view._base)


def _count(group: Group) -> Facts:
    tensor = group.tensor
    weak = weakref.getweakrefcount(tensor)
    if weak:
        weak -= _own_references(group)
    return Facts(group, weak, tensor._use_count() - 1, 0)  # type: ignore[attr-defined]


def _discount_state_dicts(suspects: Sequence[Facts], known: set[int]) -> set[int]:
    """Forgive what a state dict holds, which was taken to keep values; return those tensors."""
    by_memory: dict[int | None, list[Facts]] = {}
    for item in suspects:
        by_memory.setdefault(memory_of(item.group.tensor), []).append(item)
    by_memory.pop(None, None)
    forgiven: set[int] = set()
    for tensor in state_dict_tensors():
        if id(tensor) not in known | forgiven and memory_of(tensor) in by_memory:
            forgiven.add(id(tensor))
            for item in by_memory[memory_of(tensor)]:
                item.owners -= 1
    return forgiven


def _own_references(group: Group) -> int:
    """Weak references that only the group's recurrent layer holds."""
    own = [refs[at] for refs, at in flat_references(group)]
    if not own:
        return 0
    # Python gives everybody the same object for a reference without callback, so only its own
    # count tells whether somebody else has it too: `own`, the layers' lists and the call hold it.
    return 1 if sys.getrefcount(own[0]) <= 2 * len(own) + 1 else 0


def _referenced(item: Facts, search: Search | None) -> tuple[list[str], list[str]]:
    """Reasons and holders for a tensor that somebody else holds."""
    assert search is not None
    tensor = item.group.tensor
    reasons: list[str] = []
    held: list[str] = []
    if item.weak > 0:
        reasons.append(
            "a weak reference to it exists"
            if item.weak == 1
            else f"{item.weak} weak references to it exist"
        )
        held += search.weak(tensor)
    views, others = search.sharing(tensor)
    recorded = item.uses > 0 and _is_recorded(tensor)
    unexplained = item.uses - len(views) - recorded
    if views or (unexplained > 0 and item.owners > 0):
        reasons.append("a view of it is alive")
        held += views
    elif item.owners > 0 and not (recorded and not others):
        reasons.append("another tensor shares its memory")
    held += others
    if recorded and not views:
        words = search.recorders(tensor)
        reasons.append("its AccumulateGrad node is alive")
        held += words or ["a graph that a forward pass recorded"]
    elif item.uses > 0 and not reasons:
        reasons.append("code outside of Python holds its content")
    return reasons, held


def _is_recorded(tensor: torch.Tensor) -> bool:
    """Whether a node that accumulates its gradient exists already.

    Asking for the node makes one, which goes again; only the count before tells the two apart.
    """
    if not tensor.requires_grad or not tensor.is_leaf:
        return False
    before = tensor._use_count()  # type: ignore[attr-defined]
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    exists = tensor._use_count() == before  # type: ignore[attr-defined]
    del node
    return bool(exists)


def _by_class(tensor: torch.Tensor, returning: dict[type, str | None]) -> list[str]:
    """What the tensor's class says against it."""
    kind = type(tensor)
    if is_plain(tensor) or is_lazy(tensor):
        return []
    if kind not in returning:
        returning[kind] = _about(kind, tensor)
    reason = returning[kind]
    return [] if reason is None else [reason]


def _about(kind: type, tensor: torch.Tensor) -> str | None:
    if handlers.handles(kind, torch.Tensor):
        return None  # what it returns is seen before anything is swapped
    if handlers.has_own_loading(kind):
        if handlers.returns_own_input(tensor):
            return f"the __torch_function__ of {kind.__name__} returns its own input"
        return None
    slots = copyreg._slotnames(kind)  # type: ignore[attr-defined]
    # A class of plain tensors passes itself on to the new one; torch makes a plain parameter.
    if slots and nn.Parameter in kind.__mro__:
        return f"its class {kind.__name__} has slots that a plain tensor lacks: {', '.join(slots)}"
    return None


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

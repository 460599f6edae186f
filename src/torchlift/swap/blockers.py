"""`preflight`: which tensors of a module cannot change their content, why, and who is in the way.

Counting references is cheap and done for every tensor. Looking for who holds them is not, and done
for the first few that are blocked.
"""

from __future__ import annotations

import copyreg
import gc
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from torchlift.content import flat_references, is_plain
from torchlift.errors import PlacementError
from torchlift.slots import Group, collect, is_lazy
from torchlift.swap import handlers
from torchlift.swap.holders import Search, memory_of, state_dict_tensors

#: Tensors whose holders are looked for. Comparing every reference of a process with 8 objects takes
#: 50 ms, at each of a few levels; with 10,000 it would take minutes.
_NAMED = 8


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
    return find([group for group in collect(module) if group.persistent or group.is_parameter])


def find(groups: Sequence[Group]) -> list[Blocker]:
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
            found.append(Blocker(item.group.fqn, "; ".join(reasons), tuple(dict.fromkeys(held))))
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

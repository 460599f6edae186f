"""Find holders that forbid a swap of a tensor's content, and guard torch's own swap path.

References are counted for every tensor, which is cheap. If a tensor has too many, one walk over
all live objects looks for views, tensors over the same memory, graphs and replicas.
"""

from __future__ import annotations

import copyreg
import gc
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchlift._model.handlers import handles, has_own_loading, is_plain, is_wrapper
from torchlift._model.slots import Group, collect, is_lazy, read_tree
from torchlift._model.torch_private import (
    FLAT_REFERENCES,
    FLAT_WEIGHTS,
    memory_of,
    storage_key,
    storage_uses,
    use_count,
)
from torchlift._system.memory import live_instances
from torchlift.errors import PlacementError

Key = TypeVar("Key", bound=Hashable)


class Hold(Enum):
    """A reason that forbids an exchange. The value is its text."""

    WEAK_REFERENCE = "a weak reference to it exists"
    VIEW = "a view of it is alive"
    MEMORY = "another tensor shares its memory"
    GRAPH = "its AccumulateGrad node is alive, in the graph of what was computed from it"
    REDUCER = "the hooks of a DistributedDataParallel module keep its AccumulateGrad node alive"
    FOREIGN = "code outside of Python holds its content"
    CLASS = "its class forbids it"


@dataclass(frozen=True, slots=True)
class Blocker:
    """A tensor that cannot be swapped.

    Attributes:
        key: The name of the tensor in the module.
        reason: Text that says why the tensor cannot be swapped.
        holders: Texts that describe views and other tensors over its memory.
        kinds: The reasons as values, so that a program need not read the text.
    """

    key: str
    reason: str
    holders: tuple[str, ...] = ()
    kinds: frozenset[Hold] = field(default=frozenset(), compare=False, repr=False)

    def __str__(self) -> str:
        shown = f" (held by {'; '.join(self.holders)})" if self.holders else ""
        return f"{self.key}: {self.reason}{shown}"


@dataclass(slots=True, eq=False)
class Holders:
    """The holders of one tensor in addition to its module.

    Attributes:
        group: The tensor and its slots.
        weak: Number of weak references to the object.
        uses: Number of references in C++ to its content, such as views and AccumulateGrad.
        owners: Number of other tensors over its memory.
        kinds: Reasons that forbid an exchange, after a search.
        words: Texts that describe the holders, for a message.
    """

    group: Group
    weak: int
    uses: int
    owners: int = 0
    # Immutable: 30,000 more containers for 10,000 tensors would set off the garbage collector.
    kinds: frozenset[Hold] = frozenset()
    words: tuple[str, ...] = ()

    @property
    def is_free(self) -> bool:
        """Whether nobody else holds anything."""
        return self.weak <= 0 and self.uses <= 0 and self.owners <= 0

    def add(self, kind: Hold, what: str, tensor: torch.Tensor) -> None:
        """Note a tensor that a search found."""
        self.kinds |= {kind}
        self.words += (_described(what, tensor),)


def preflight(module: nn.Module) -> list[Blocker]:
    """Find the tensors of a module that ``load(mode="swap")`` cannot swap.

    Weak references, views, and other tensors over the same memory block a swap, because they would
    keep the old values. A graph of a forward pass and a gradient hook of
    ``DistributedDataParallel`` block it, too, and so do classes with slots.

    Optimizers do not block a swap: they hold the Python object, which stays. Neither does a dict
    that ``state_dict`` returned. The conditions are those of ``torch.utils.swap_tensors``, which
    does not look for other tensors over the same memory.

    Args:
        module: A module. It is not changed.

    Returns:
        One `Blocker` for each blocked tensor, in the order of ``state_dict``. The list is empty if
        all parameters and persistent buffers can be swapped.

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


def has_holders(tensor: torch.Tensor) -> bool:
    """Say whether anybody holds a tensor, or its content, in a way that may forbid an exchange."""
    return weakref.getweakrefcount(tensor) > 0 or use_count(tensor) > 1


def blocked_by(groups: Sequence[Group]) -> list[Blocker]:
    """Return the tensors among these that cannot be swapped, in their order."""
    counts = count(groups)
    # What only garbage holds is not held. Unreachable cycles are common after an exception.
    if not all(item.is_free for item in counts) and gc.collect():
        counts = count(groups)
    suspects = [item for item in counts if not item.is_free]
    if suspects:
        _search(suspects, {id(group.tensor) for group in groups})
    found = []
    for item in counts:
        words = {} if item.is_free else {h: h.value for h in Hold if h in item.kinds}
        if reason := _class_reason(item.group.tensor):
            words[Hold.CLASS] = reason
        if words:
            reason, holders = "; ".join(words.values()), tuple(dict.fromkeys(item.words))
            found.append(Blocker(item.group.fqn, reason, holders, frozenset(words)))
    return found


def find_unswappable(groups: Iterable[Group]) -> set[str]:
    """Return the names of blank tensors, and those of a class, that torch refuses to exchange."""
    suspects = [
        group
        for group in groups
        if not is_plain(group.tensor) or (group.tensor.is_meta and has_holders(group.tensor))
    ]
    found = blocked_by(suspects) if suspects else []
    # torch exchanges what other tensors share, or what a graph was computed from.
    refused = {Hold.WEAK_REFERENCE, Hold.VIEW, Hold.FOREIGN, Hold.CLASS}
    return {blocker.key for blocker in found if blocker.kinds & refused}


def refusal(found: Sequence[Blocker], *, hint: str) -> PlacementError:
    """Return the error for tensors that were to be swapped and cannot be."""
    first = found[0]
    others = "" if len(found) == 1 else f", as {len(found) - 1} more of the module's tensors"
    listed = "".join(f"; {item}" for item in found[1:4])
    return PlacementError(
        f"cannot be swapped{others}: {first.reason}{listed}. Nothing was changed",
        entry=first.key,
        found=f"held by {'; '.join(first.holders)}" if first.holders else None,
        hint=hint,
    )


def count(groups: Iterable[Group]) -> list[Holders]:
    """Count what else holds each tensor, its content and its memory."""
    counts = [
        Holders(group, _weak_references(group), uses=use_count(group.tensor) - 1)
        for group in groups
        if not is_lazy(group.tensor)
    ]
    by_storage: dict[int, list[Holders]] = {}
    for item in counts:
        tensor = item.group.tensor
        # Values on meta do not exist, so that nobody can keep old ones.
        if not tensor.is_meta and tensor.layout == torch.strided and is_plain(tensor):
            by_storage.setdefault(storage_key(tensor), []).append(item)
    # The full tensor behind an expanded buffer, as long as nobody but the view holds it.
    expanded = torch.zeros(1).expand(2)
    unreferenced = sys.getrefcount(expanded._base)
    for key, items in by_storage.items():
        tensors = [item.group.tensor for item in items]
        views = [tensor for tensor in tensors if tensor._is_view()]
        bases = {id(view._base) for view in views if sys.getrefcount(view._base) <= unreferenced}
        # One for the Python object of the storage, one for each tensor that we know.
        owners = storage_uses(key) - 1 - len(tensors) - len(bases)
        for item in items:
            item.owners = owners
    return counts


def flat_references(group: Group) -> list[tuple[list[Any], int]]:
    """Find where recurrent layers keep weak references to this tensor, which is their weight."""
    found = []
    for slot in group.slots:
        references = vars(slot.module).get(FLAT_REFERENCES, [])
        for position, reference in enumerate(references):
            if reference is not None and reference() is group.tensor:
                found.append((references, position))
    return found


def _weak_references(group: Group) -> int:
    """Count the weak references to a tensor without those that only its recurrent layer holds."""
    found = weakref.getweakrefcount(group.tensor)
    own = [references[position] for references, position in flat_references(group)] if found else []
    # Python gives everybody the same object for a reference without callback, so only its own
    # count tells whether somebody else has it too: `own`, the layers' lists and the call hold it.
    return found - 1 if own and sys.getrefcount(own[0]) <= 2 * len(own) + 1 else found


def _is_recorded(tensor: torch.Tensor) -> bool:
    """Return whether a node that accumulates the tensor's gradient exists already.

    The call that returns the node makes one if needed, so the count before it decides.
    """
    if not tensor.requires_grad or not tensor.is_leaf:
        return False
    before = use_count(tensor)
    _node = torch.autograd.graph.get_gradient_edge(tensor).node
    return use_count(tensor) == before


def _class_reason(tensor: torch.Tensor) -> str | None:
    """Return why no tensor of this one's class can be exchanged, or None."""
    kind = type(tensor)
    if is_plain(tensor) or handles(kind, torch.Tensor) or has_own_loading(kind):
        return None  # what its code returns is seen before anything is swapped
    slots = copyreg._slotnames(kind)  # type: ignore[attr-defined]
    # A class of plain tensors passes itself on to the new one; torch makes a plain parameter.
    if slots and nn.Parameter in kind.__mro__:
        return f"its class {kind.__name__} has slots that a plain tensor lacks: {', '.join(slots)}"
    return None


def find_buffers(tensors: Mapping[Key, torch.Tensor]) -> set[Key]:
    """Return the keys of tensors that lie in the memory of a live module's buffer.

    A state dict does not distinguish buffers from parameters.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> sorted(find_buffers(norm.state_dict()))
        ['num_batches_tracked', 'running_mean', 'running_var']
    """
    modules = live_instances(nn.Module)
    buffers = (b for module in modules for b in vars(module).get("_buffers", {}).values())
    found = {memory_of(buffer) for buffer in buffers if buffer is not None} - {None}
    return {key for key, tensor in tensors.items() if memory_of(tensor) in found}


def _search(suspects: Sequence[Holders], own: set[int]) -> None:
    """Find what holds each suspect, note it there and decide what of it forbids an exchange.

    A tensor in a dict that `torch.nn.Module.state_dict` made holds nothing back: the dict was taken
    to keep values. It is taken off the owners. Nor does a tensor of `own`, which are identities.
    """
    tensors = [item for item in live_instances(torch.Tensor) if not is_wrapper(item)]
    replicas = live_instances(DistributedDataParallel)
    dicts = [item for item in live_instances(OrderedDict) if hasattr(item, "_metadata")]
    forgiven = {id(value) for state in dicts for value in state.values()}
    by_tensor = {id(item.group.tensor): item for item in suspects}
    by_memory: dict[int | None, list[Holders]] = {}
    for item in suspects:
        if item.owners > 0:
            by_memory.setdefault(memory_of(item.group.tensor), []).append(item)
    for tensor in tensors:
        if id(tensor) in own:
            continue
        sharing = by_memory.get(memory_of(tensor), [])
        if id(tensor) in forgiven:
            for item in sharing:
                item.owners -= 1
        elif not is_lazy(tensor) and tensor._is_view() and id(tensor._base) in by_tensor:
            by_tensor[id(tensor._base)].add(Hold.VIEW, "view", tensor)
        else:
            for item in sharing:
                item.add(Hold.MEMORY, "tensor", tensor)
    reduced = {id(parameter) for replica in replicas for parameter in replica.module.parameters()}
    for key, item in by_tensor.items():
        recorded = item.uses > 0 and _is_recorded(item.group.tensor)
        if recorded and key in reduced:
            item.kinds |= {Hold.REDUCER}
        elif recorded and Hold.VIEW not in item.kinds:  # the graph of a view includes the node
            item.kinds |= {Hold.GRAPH}
        if item.owners > 0 and not item.kinds:  # tensors that only C++ knows
            item.kinds |= {Hold.VIEW if item.uses > 0 else Hold.MEMORY}
        if item.weak > 0:
            item.kinds |= {Hold.WEAK_REFERENCE}
        item.kinds = item.kinds or frozenset({Hold.FOREIGN})


def _described(what: str, tensor: torch.Tensor) -> str:
    made_by = "" if tensor.grad_fn is None else f" made by {tensor.grad_fn.name()}"
    return f"a {what} of shape {list(tensor.shape)}{made_by}"


_lock = threading.Lock()
_inside = 0
_before = False


@contextmanager
def preserving_references(*, check: nn.Module | None = None) -> Iterator[None]:
    """Keep every parameter the same Python object while torch converts a module.

    Inside the block, ``module.to()``, ``.half()``, ``.cuda()``, ``.to_empty()`` and
    ``load_state_dict`` exchange the content of parameters with ``torch.utils.swap_tensors``. An
    optimizer that was made before therefore updates the converted parameters.

    torch stops at the first parameter that it cannot exchange, which leaves the module half
    converted. Pass `check` to find such a parameter before anything changes.

    The block sets ``torch.__future__.set_swap_module_params_on_conversion`` for the whole process,
    so other threads see it. The last block to end restores the flag.

    Args:
        check: A module to examine first, as `preflight` does. Do not load into it in other threads
            meanwhile, because its recurrent layers release their weak references to weights.

    Raises:
        PlacementError: If a tensor of `check` cannot be exchanged. The error names its holders.

    Example:
        >>> import torch, torchlift
        >>> model = torch.nn.Linear(3, 2)
        >>> held = model.weight
        >>> with torchlift.swap.preserving_references():
        ...     model = model.double()
        >>> model.weight is held, held.dtype
        (True, torch.float64)
    """
    global _inside, _before
    if check is not None:
        found = blocked_by(read_tree(check).groups)
        if found:
            raise refusal(found, hint="Release them first.")
    with _lock:
        if _inside == 0:
            _before = torch.__future__.get_swap_module_params_on_conversion()
        _inside += 1
        torch.__future__.set_swap_module_params_on_conversion(True)
    modules = [] if check is None else check.modules()
    recurrent = [module for module in modules if isinstance(module, nn.RNNBase)]
    for layer in recurrent:
        setattr(layer, FLAT_REFERENCES, [None] * len(getattr(layer, FLAT_WEIGHTS)))
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                torch.__future__.set_swap_module_params_on_conversion(_before)
        for layer in recurrent:
            weights = getattr(layer, FLAT_WEIGHTS)
            references = [None if weight is None else weakref.ref(weight) for weight in weights]
            setattr(layer, FLAT_REFERENCES, references)

"""Copies that loading code of a model gets in place of live tensors, and the check on the others.

A load is decided after this code has run, so the code sees copies in the slots of its module. It
may reach other live tensors through a closure. These are compared before and after.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from torchlift._model.commit import Commit, successor_of
from torchlift._model.dtensor import local_tensor
from torchlift._model.handlers import clone_of, has_memory, inner_tensors, is_wrapper
from torchlift._model.slots import ModuleTree, is_lazy
from torchlift._model.torch_private import memory_of, version_of
from torchlift.errors import PlacementError


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the module's own parameters and buffers."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tensor


#: Identity of a module, and the name of one of its tensors in it.
Slot = tuple[int, str]


@dataclass(slots=True)
class Change:
    """A live tensor whose stand-in was changed.

    Attributes:
        name: the tensor's name in the model.
        live: the tensor of the model.
        stand_in: what the code made of its copy.
        is_written: whether the code wrote values into the copy.
    """

    name: str
    live: torch.Tensor
    stand_in: torch.Tensor
    is_written: bool

    def apply(self, commit: Commit, *, values: bool) -> None:
        """Change the live tensor in the same way.

        Args:
            commit: undoes this if the load fails.
            values: whether to copy the values, because the checkpoint has none for it.

        Raises:
            PlacementError: If values would be copied to meta.
        """
        live, made = self.live, self.stand_in
        if isinstance(live, nn.Parameter) and live.requires_grad is not made.requires_grad:
            live.requires_grad_(made.requires_grad)
        if _layout(live) != _layout(made):
            blank = torch.empty(made.shape, dtype=made.dtype, device=made.device)
            commit.set_data(live, blank, self.name)
        if not (values and self.is_written):
            return
        if live.is_meta:
            raise written_on_meta(self.name)
        commit.keep_values(live, self.name)
        with torch.no_grad():
            local_tensor(live).copy_(local_tensor(made))


class StandIns:
    """Copies of modules' own tensors, for loading code to write to.

    Tensors on meta have no values to protect, so their stand-ins share their memory: code that
    passes on a tensor of the model's own is recognised by that.

    Args:
        modules: prefixes of names and modules, which have the copies in their slots from `put_on`
            to `take_off`.

    Attributes:
        live: identity of a module and name in it -> its tensor.
        made: the same -> the copy. A tied tensor has one copy.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._modules = {id(module): (prefix, module) for prefix, module in modules}
        self.live: dict[Slot, torch.Tensor] = {}
        self.made: dict[Slot, torch.Tensor] = {}
        self._versions: dict[int, int] = {}
        self._written: set[int] = set()

    def put_on(self) -> None:
        """Put the copies into the slots. One that was there before is put there again."""
        known = {id(self.live[slot]): made for slot, made in self.made.items()}
        for _, module in self._modules.values():
            attributes = ((k, v) for k, v in vars(module).items() if isinstance(v, torch.Tensor))
            for name, tensor in (*own_tensors(module), *attributes):
                # The shape of a lazy one is not known, and placing it does all that is left.
                if is_lazy(tensor) or self.live.get((id(module), name)) is tensor:
                    continue
                made = known.get(id(tensor))
                if made is None:
                    copy = tensor.data if tensor.is_meta else clone_of(tensor)
                    made = known[id(tensor)] = successor_of(tensor, copy)
                    self._versions[id(made)] = version_of(made)
                self.live[id(module), name], self.made[id(module), name] = tensor, made
        self._exchange(self.live, self.made)

    def take_off(self) -> dict[Slot, Change]:
        """Put the live tensors back into the slots. Return the changes of the copies."""
        there = self._exchange(self.made, self.live)
        changes = {}
        for slot, made in self.made.items():
            live = self.live[slot]
            # `.data` and NumPy leave no trace in the version.
            if version_of(made) != self._versions[id(made)] or not has_same_bytes(live, made):
                self._written.add(id(made))
            is_written = id(made) in self._written
            trains = made.requires_grad is not live.requires_grad
            if id(made) in there and (is_written or trains or _layout(live) != _layout(made)):
                prefix, _ = self._modules[slot[0]]
                changes[slot] = Change(prefix + slot[1], live, made, is_written)
        return changes

    def _exchange(self, old: dict[Slot, torch.Tensor], new: dict[Slot, torch.Tensor]) -> set[int]:
        """Replace tensors wherever the modules have them. Return identities of those found."""
        others = {id(tensor): new[slot] for slot, tensor in old.items()}
        found = set()
        for _, module in self._modules.values():
            registries: tuple[Any, ...] = module._parameters, module._buffers, vars(module)
            for registry in registries:
                for key, value in list(registry.items()):
                    if id(value) in others:
                        registry[key] = others[id(value)]
                        found.add(id(value))
        return found


class _Before(NamedTuple):
    """A tensor before code ran. Its `facts` differ if it was written to."""

    name: str
    tensor: torch.Tensor
    values: bool
    facts: tuple[Any, ...]


class Untouched:
    """Live tensors that no code may write to until the load is decided.

    Args:
        named: names and tensors.
    """

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]] = ()) -> None:
        self._before: dict[int, _Before] = {}
        self.add(named)

    @classmethod
    def of(cls, tree: ModuleTree) -> Untouched:
        """Take every parameter, buffer, tensor attribute and gradient of a model."""
        named = [(g.fqn, g.tensor) for g in [*tree.groups, *tree.attributes]]
        leafs = [(name, tensor) for name, tensor in named if tensor.is_leaf]
        return cls([*named, *((f"{n}.grad", t.grad) for n, t in leafs if t.grad is not None)])

    def add(self, named: Iterable[tuple[str, torch.Tensor]], *, values: bool = True) -> None:
        """Let nobody write to these, either, from here on.

        Args:
            named: names and tensors.
            values: whether to compare bytes, too. `.data` and NumPy leave no trace otherwise.
        """
        for name, tensor in named:
            if id(tensor) not in self._before:
                self._before[id(tensor)] = _Before(name, tensor, values, _facts(tensor, values))

    def has_changed(self, tensor: torch.Tensor) -> bool:
        """Say whether one of them was written to."""
        before = self._before[id(tensor)]
        return _facts(tensor, before.values) != before.facts

    def check(self, code: str, hint: str) -> None:
        """Refuse what was written. Nothing can take that back.

        Args:
            code: whose code may have done it, for the message.
            hint: the way out.

        Raises:
            PlacementError: If a tensor changed.
        """
        known = self._before.values()
        if found := [each.name for each in known if self.has_changed(each.tensor)]:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise PlacementError(
                f"{code} writes into this tensor{more} before the load is decided, so its values "
                "may have changed",
                entry=found[0],
                hint=hint,
            )


def written_on_meta(name: str, file: str | None = None) -> PlacementError:
    """Return the error for code that writes into a tensor on meta."""
    return PlacementError(
        "its module's own loading code writes into it, and on meta nothing can be written",
        file=file,
        entry=name,
        hint=f"Call torchlift.materialize(model, names=[{name!r}]) before you load.",
    )


def has_same_bytes(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Say whether two tensors have the same values, bit by bit, if they lie in one memory.

    Example:
        >>> has_same_bytes(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
        True
    """
    one, two = local_tensor(one), local_tensor(two)
    if is_wrapper(one):
        return all(map(has_same_bytes, inner_tensors(one), inner_tensors(two)))
    if one.is_meta or two.is_meta or _layout(one) != _layout(two):
        return _layout(one) == _layout(two)
    # torch cannot compare sparse tensors; of these, writes that it counts are known.
    return not has_memory(one) or torch.equal(_words_of(one), _words_of(two))


def fingerprint(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return numbers that change with the bytes of a tensor's values.

    Each four bytes are multiplied by a random number of their place in a row. Each row is summed on
    the tensor's device, 2.5 GB/s on a core. A copy would take the model's memory again.

    Example:
        >>> fingerprint(torch.tensor([1.0, 2.0])) == fingerprint(torch.tensor([2.0, 1.0]))
        False
    """
    # One thread: two, with a row each in turn, take twice as long for the same bytes.
    words, factors = _words_of(tensor), row_factors(tensor.device)
    # Products of eight bytes: in four, the flipped signs of two values would cancel.
    products = torch.empty(min(len(words), len(factors)), dtype=torch.int64, device=words.device)
    sums = []
    for row in torch.split(words, len(factors)):
        count = len(row)
        sums.append(torch.mul(row, factors[:count], out=products[:count]).sum())
    return tuple(int(each) for each in sums)


@cache
def row_factors(device: torch.device) -> torch.Tensor:
    """Return a number for each word of a row."""
    # A processor's cache holds a short row; an accelerator has a launch to pay for each.
    count = 1 << (15 if device.type == "cpu" else 23)
    # Of a generator of its own: the caller's random numbers stay as they are.
    own = torch.Generator().manual_seed(0)
    made = torch.randint(-(2**61), 2**61, (count,), generator=own, device="cpu")
    return (made * 2 + 1).to(device)


def _facts(tensor: torch.Tensor, values: bool) -> tuple[Any, ...]:
    """Return values that differ if a tensor was written to, or got other memory."""
    tensor = local_tensor(tensor)
    if is_lazy(tensor):
        return ()
    if is_wrapper(tensor):
        return tuple(_facts(inner, values) for inner in inner_tensors(tensor))
    values = values and not tensor.is_meta and has_memory(tensor)
    content = fingerprint(tensor) if values else ()
    return version_of(tensor), memory_of(tensor), *_layout(tensor), *content


def _words_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's values as words of four bytes: a view if they lie in a row."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    flat = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    if flat.numel() % 4:
        flat = nn.functional.pad(flat, (0, -flat.numel() % 4))
    if flat.storage_offset() % 4:  # torch views aligned memory only as words
        flat = flat.clone()
    return flat.view(torch.int32)


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.device

"""`skeleton` and `materialize`: a module without storage that can still make itself."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from torchlift.calls import SCALARS
from torchlift.collector import collection_paused
from torchlift.distributed.shards import dressed, is_sharded, shard_of_value
from torchlift.errors import PlacementError, did_you_mean
from torchlift.inference import ordinary_tensors
from torchlift.patches import recordable
from torchlift.place import Commit, exchange, successor_of
from torchlift.recipes import Recipe, forget, remember, require_recipes
from torchlift.replay import replay_all
from torchlift.rules import usable_device
from torchlift.slots import Group, Slot, collect, is_lazy, walk
from torchlift.tape import Tape

M = TypeVar("M", bound=nn.Module)


def skeleton(factory: Callable[..., M], *args: Any, **kwargs: Any) -> M:
    """Build a module on the meta device that remembers how each of its tensors is made.

    Construction is recorded instead of executed, so it takes no memory for weights and no time for
    initialising them. What a checkpoint does not hold (non-persistent buffers, a new head) can be
    made later by `materialize`, or by `load`, with the values that normal construction gives.

    Args:
        factory: a module class, or a callable that returns a module.
        args: passed to `factory`.
        kwargs: passed to `factory`.

    Returns:
        The module, with every parameter and buffer on meta.

    Raises:
        TypeError: `factory` did not return a module.

    Example:
        >>> import torch, torchlift
        >>> model = torchlift.skeleton(torch.nn.Linear, 20_000, 20_000)  # 1.6 GB, not allocated
        >>> model.weight.device
        device(type='meta')
    """
    if isinstance(factory, nn.Module) or not callable(factory):
        raise TypeError(
            f"skeleton() takes a class or a function that makes a module, not {type(factory)!r}: "
            "write skeleton(Model, config) instead of skeleton(Model(config))"
        )
    home = torch.get_default_device()
    # On meta by default is how people spare the memory that a skeleton spares them anyway.
    tape = Tape(torch.device("cpu") if home.type == "meta" else home)
    with collection_paused(), recordable(), tape:
        model = factory(*args, **kwargs)
    if not isinstance(model, nn.Module):
        raise TypeError(f"{factory!r} returned {type(model).__name__}, not a module")
    groups = collect(model)
    for group in [*groups, *strays(model, groups)]:
        _remember(tape, group)
    return model


def materialize(
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    names: Iterable[str] | str | None = None,
) -> list[str]:
    """Replay construction for what is still on meta, directly on its device.

    Deterministic tensors get the values of normal construction. Random ones get the same
    distribution, and with the same seed and nothing left out the same values too.

    Args:
        model: a skeleton, or a module that contains one.
        device: where to make the tensors; None means the CPU.
        names: fully qualified names of tensors, or of submodules for all of theirs, or one such
            name; None means all.

    Returns:
        The names of the tensors that were made, in the order of ``state_dict``.

    Raises:
        PlacementError: a tensor on meta was not made by `skeleton`, a name is not one of the
            module's, or the device does not exist. Nothing has changed then.

    Example:
        >>> import torch, torchlift
        >>> model = torchlift.skeleton(torch.nn.Linear, 3, 2)
        >>> torchlift.materialize(model)
        ['weight', 'bias']
    """
    groups = unmade(model)
    if names is not None:
        groups = _named(groups, [names] if isinstance(names, str) else list(names), model)
    where = usable_device("cpu" if device is None else device, "materialize")
    with ordinary_tensors():
        made = make(groups, [where] * len(groups))
    with Commit() as commit:
        for group, tensor in zip(groups, made, strict=True):
            commit.put(group, tensor)
    forget(model)
    return [name for group in groups for name in group.names]


def unmade(model: nn.Module) -> list[Group]:
    """Everything in the module that is on meta: parameters, buffers and plain attributes."""
    groups = collect(model)
    return [group for group in [*groups, *strays(model, groups)] if group.tensor.is_meta]


def make(groups: Sequence[Group], devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """Replay the groups' construction, each on its device.

    Raises:
        PlacementError: a tensor was not made by `skeleton`.
    """
    recipes = require_recipes(groups)
    made: dict[int, torch.Tensor] = {}
    batches: dict[tuple[int, int, torch.device], list[int]] = {}
    for position, (recipe, device) in enumerate(zip(recipes, devices, strict=True)):
        batches.setdefault((id(recipe.tape), id(recipe.copy), device), []).append(position)
    for (_, _, device), positions in batches.items():
        refs = [recipes[position].ref for position in positions]
        for at, tensor in replay_all(recipes[positions[0]].tape, refs, device):
            like = groups[positions[at]].tensor
            if is_sharded(like):  # the rest is freed at once: one whole tensor exists at a time
                tensor = dressed(like, shard_of_value(tensor, like, groups[positions[at]].fqn))
            made[positions[at]] = tensor
    return [made[position] for position in range(len(groups))]


def strays(model: nn.Module, groups: Iterable[Group] | None = None) -> list[Group]:
    """Tensors on meta that modules hold as plain attributes or in lists, tuples and dicts.

    Args:
        model: the module.
        groups: its parameters and buffers, where the caller has collected them already.
    """
    known = {id(group.tensor) for group in (collect(model) if groups is None else groups)}
    found: list[Group] = []
    for prefix, module in walk(model):
        for name, value in vars(module).items():
            # Most attributes are flags, numbers and empty dicts of hooks: told apart by their type
            # alone, since this runs over every attribute of every module of every load.
            kind = type(value)
            if kind in SCALARS:
                continue
            if kind in _CONTAINERS:
                if not value or name in _REGISTRIES:
                    continue
            elif not issubclass(kind, (torch.Tensor, dict, list, tuple)):
                continue
            for tensor in _meta_tensors(value, 0):
                if id(tensor) not in known:
                    known.add(id(tensor))
                    found.append(Group(tensor, (Slot(prefix + name, module, name, False),)))
    return found


_CONTAINERS = frozenset({dict, OrderedDict, list, tuple})
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})


def _meta_tensors(value: object, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            yield value
    elif depth < 4 and isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _meta_tensors(item, depth + 1)


def _remember(tape: Tape, group: Group) -> None:
    tensor = group.tensor
    if is_lazy(tensor):
        # It has no storage to save, and its first input decides where it goes.
        kind: Any = type(tensor)
        with torch._C.DisableTorchFunctionSubclass():
            exchange(tensor, kind(tensor.requires_grad, device="cpu", dtype=tensor.dtype))
        return
    ref = tape.ref(tensor)
    if not tensor.is_meta:
        if len(group.slots) == 0:
            return
        # Made by a call that bypasses the torch API (`torch.Tensor(3, 4)`): the tape keeps it.
        stand_in = tape.adopt(tensor)
        ref = tape.ref(stand_in)
        exchange(tensor, successor_of(tensor, stand_in))
    if tensor.grad_fn is not None and not tensor._is_view():
        # A graph over meta tensors (the weight that weight_norm computes) leads nowhere, and it
        # would hold on to parameters that are about to get their content.
        tensor.detach_()
    if ref is not None:
        remember(group, Recipe(tape, ref))
        tape.tensors += 1


def _named(groups: list[Group], names: list[str], model: nn.Module) -> list[Group]:
    known = [name for group in [*collect(model), *strays(model)] for name in group.names]
    for name in names:
        if not any(_is_under(full, name) for full in known):
            modules = [prefix[:-1] for prefix, _ in walk(model) if prefix]
            raise PlacementError(
                "the module has no such tensor or submodule",
                entry=name,
                hint=did_you_mean(name, [*known, *modules]) or None,
            )
    return [
        group
        for group in groups
        if any(_is_under(full, name) for full in group.names for name in names)
    ]


def _is_under(full: str, name: str) -> bool:
    return full == name or full.startswith(name + ".") or not name

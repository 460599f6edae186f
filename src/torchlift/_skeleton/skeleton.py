"""`skeleton` and `materialize`: a module without storage that can still make itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from torchlift._model.commit import RECIPE, Commit, exchange, successor_of
from torchlift._model.devices import ordinary_tensors, usable_device
from torchlift._model.dtensor import dressed, is_sharded, shard_of_value
from torchlift._model.slots import Group, ModuleTree, is_lazy
from torchlift._skeleton.recorder import Tape, recordable
from torchlift._skeleton.recording import Recording, Ref
from torchlift._skeleton.replay import replay_all
from torchlift._system import collection_paused
from torchlift.errors import PlacementError, did_you_mean

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
    tree = ModuleTree(model)
    for group in [*tree.groups, *tree.meta_attributes]:
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
    tree = ModuleTree(model)
    groups = tree.on_meta
    if names is not None:
        groups = _named(groups, [names] if isinstance(names, str) else list(names), tree)
    where = usable_device("cpu" if device is None else device, "materialize")
    with ordinary_tensors():
        made = make(groups, [where] * len(groups))
    with Commit() as commit:
        for group, tensor in zip(groups, made, strict=True):
            commit.put(group, tensor)
    forget(tree)
    return [name for group in groups for name in group.names]


def make(groups: Sequence[Group], devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """Replay the groups' construction, each on its device.

    Raises:
        PlacementError: a tensor was not made by `skeleton`.
    """
    recipes = require_recipes(groups)
    made: dict[int, torch.Tensor] = {}
    batches: dict[tuple[int, int, torch.device], list[int]] = {}
    for position, (recipe, device) in enumerate(zip(recipes, devices, strict=True)):
        batches.setdefault((id(recipe.recording), id(recipe.copy), device), []).append(position)
    for (_, _, device), positions in batches.items():
        refs = [recipes[position].ref for position in positions]
        for at, tensor in replay_all(recipes[positions[0]].recording, refs, device):
            like = groups[positions[at]].tensor
            if is_sharded(like):  # the rest is freed at once: one whole tensor exists at a time
                tensor = dressed(like, shard_of_value(tensor, like, groups[positions[at]].fqn))
            made[positions[at]] = tensor
    return [made[position] for position in range(len(groups))]


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
        remember(group, Recipe(tape.recording, ref))
        tape.recording.tensors += 1


def _named(groups: list[Group], names: list[str], tree: ModuleTree) -> list[Group]:
    known = [name for group in [*tree.groups, *tree.meta_attributes] for name in group.names]
    for name in names:
        if not any(_is_under(full, name) for full in known):
            modules = [prefix[:-1] for prefix, _ in tree.paths if prefix]
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


class Recipe:
    """How one tensor of a skeleton is made: a place on a tape.

    Attributes:
        recording: the recorded construction.
        ref: which of its tensors.
        copy: what tells the tensors of a deep copy from the original's, which are made from the
            same place on the same tape but must not share memory.
    """

    __slots__ = ("copy", "recording", "ref")

    def __init__(self, recording: Recording, ref: Ref, copy: object = None) -> None:
        self.recording = recording
        self.ref = ref
        self.copy = copy

    def __deepcopy__(self, memo: dict[Any, Any]) -> Recipe:
        return Recipe(self.recording, self.ref, memo.setdefault(RECIPE, object()))

    def __reduce__(self) -> tuple[object, ...]:
        # A pickled skeleton is a plain module on meta: calls cannot be written to a file.
        return (type(None), ())


class _Kept:
    """The recipes of a module's parameters, by name.

    A deep copy of a parameter loses what hangs on the tensor, unlike one of a buffer
    (`torch.nn.Parameter.__deepcopy__` calls the class); a copy of its module keeps this.
    """

    __slots__ = ("recipes",)

    def __init__(self, recipes: dict[str, Recipe]) -> None:
        self.recipes = recipes

    def __deepcopy__(self, memo: dict[Any, Any]) -> _Kept:
        return _Kept(copy.deepcopy(self.recipes, memo))

    def __reduce__(self) -> tuple[object, ...]:
        return (type(None), ())


def remember(group: Group, recipe: Recipe) -> None:
    """Attach a recipe to a tensor, and to the modules that hold it as a parameter."""
    group.tensor.__dict__[RECIPE] = recipe
    if isinstance(group.tensor, nn.Parameter):
        for slot in group.slots:
            kept = vars(slot.module).get(RECIPE)
            if not isinstance(kept, _Kept):
                kept = vars(slot.module)[RECIPE] = _Kept({})
            kept.recipes[slot.name] = recipe


def forget(tree: ModuleTree) -> None:
    """Let go of the recipes of parameters that have been made, and of the tapes behind them."""
    for module in tree.modules:
        kept = vars(module).get(RECIPE)
        if kept is None:
            continue
        parameters = module._parameters
        if not any(weight is not None and weight.is_meta for weight in parameters.values()):
            del vars(module)[RECIPE]


def recipe_of(group: Group) -> Recipe | None:
    """The recorded construction of a tensor, or None if no skeleton made it."""
    own = group.tensor.__dict__.get(RECIPE)
    if isinstance(own, Recipe):
        return own
    for slot in group.slots:
        kept = vars(slot.module).get(RECIPE)
        recipe = kept.recipes.get(slot.name) if isinstance(kept, _Kept) else None
        if recipe is not None and _describes(recipe.ref, group.tensor):
            return recipe
    return None


def _describes(ref: Ref, tensor: torch.Tensor) -> bool:
    # Not so when the parameter has been replaced by another one of the user's on meta.
    return (ref.dtype, ref.shape) == (tensor.dtype, tuple(tensor.shape))


def require_recipes(groups: Iterable[Group]) -> list[Recipe]:
    """The recipes of tensors on meta.

    Raises:
        PlacementError: nothing knows how to make some of them; names them all.
    """
    found: list[Recipe] = []
    lost: list[str] = []
    for group in groups:
        recipe = recipe_of(group)
        if recipe is None:
            lost += group.names
        else:
            found.append(recipe)
    if lost:
        are = "tensor is" if len(lost) == 1 else "tensors are"
        raise PlacementError(
            f"{len(lost)} {are} on meta and nothing says how they are made: {', '.join(lost)}",
            entry=lost[0],
            expected="a value in the checkpoint, or a module built by torchlift.skeleton",
            hint="Build the model with torchlift.skeleton(Model, ...) instead of on meta.",
        )
    return found

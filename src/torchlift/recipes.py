"""How the tensors of a skeleton remember their construction, and how copies of them still do."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torchlift.calls import Ref
from torchlift.errors import PlacementError
from torchlift.place import RECIPE
from torchlift.slots import Group, modules_of
from torchlift.tape import Tape


class Recipe:
    """How one tensor of a skeleton is made: a place on a tape.

    Attributes:
        tape: the recorded construction.
        ref: which of its tensors.
        copy: what tells the tensors of a deep copy from the original's, which are made from the
            same place on the same tape but must not share memory.
    """

    __slots__ = ("copy", "ref", "tape")

    def __init__(self, tape: Tape, ref: Ref, copy: object = None) -> None:
        self.tape = tape
        self.ref = ref
        self.copy = copy

    def __deepcopy__(self, memo: dict[Any, Any]) -> Recipe:
        return Recipe(self.tape, self.ref, memo.setdefault(RECIPE, object()))

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


def forget(model: nn.Module) -> None:
    """Let go of the recipes of parameters that have been made, and of the tapes behind them."""
    for module in modules_of(model):
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

"""What rules choose of a checkpoint for `Keeper.resume`, and what it is called in the models."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torchlift._model import versioned
from torchlift._plan import Options, check_rename, renamed
from torchlift.errors import MismatchError
from torchlift.formats import allowed, left_out

#: What rules call the states of the random number generators.
GENERATORS = "rng"


class Choice(NamedTuple):
    """What rules choose of a checkpoint.

    Attributes:
        states: name of an object -> its state; those of models and optimizers by names in the
            model, without what is left out.
        gone: name of a model -> the names in it of what is left out.
        stays: names of objects that stay as they are.
    """

    states: dict[str, Any]
    gone: dict[str, set[str]]
    stays: set[str]

    def excused(self, rules: Options, model: str, names: Collection[str]) -> set[str]:
        """Return those names of a model that the checkpoint may lack."""
        if model in self.stays:
            return {*names}
        full = {f"{model}.{name}": name for name in names}
        return {full[name] for name in allowed(full, rules.allow_missing)} | self.gone[model]


def choose(
    rules: Options,
    objects: Collection[str],
    modules: Collection[str],
    owners: Mapping[str, Collection[str]],
    saved: Mapping[str, Any],
    path: str,
) -> Choice:
    """Return what rules choose of the states of a checkpoint.

    Args:
        rules: patterns and a rename for names such as ``model.layer.weight`` and ``optimizer``.
        objects: names of all objects that are to be resumed.
        modules: names of those that are models.
        owners: name of an optimizer -> those of the models that it has parameters of.
        saved: states by the names of objects.
        path: of the checkpoint, for errors.

    Raises:
        MismatchError: a pattern fits nothing or nothing is left, or a new name is that of another
            object or of two tensors.
    """
    stays = allowed([name for name in objects if name not in saved], rules.allow_missing)
    keys = [f"{model}.{key}" for model in modules for key in saved.get(model, ())]
    others = [name for name in objects if name not in modules] + [GENERATORS]
    check_rename(rules.rename, keys, path)
    out = left_out([*keys, *others], (), rules.include, rules.exclude, path)
    # In two steps: a new head may have the name of the old one, which is left out.
    kept = renamed([key for key in keys if key not in out], rules.rename, path)
    left = renamed([key for key in keys if key in out], rules.rename, path)
    taken = {*kept.values()}
    names = {**kept, **{key: name for key, name in left.items() if name not in taken}}
    states, gone = {**saved}, {model: set[str]() for model in modules}
    inside: dict[str, dict[str, str]] = {}
    for model in modules:
        own, new = saved.get(model, {}), dict[str, str]()
        for key in own:
            full = f"{model}.{key}"
            new[key] = _inside(model, names.get(full), full, path)
            if full in out and new[key]:
                gone[model].add(new[key])
        found = {name: own[key] for key, name in new.items() if f"{model}.{key}" in kept}
        states[model] = versioned(found, getattr(own, "_metadata", None))
        inside[model] = new
    for optimizer, of in owners.items() if rules.rename is not None else ():
        if optimizer in saved:  # of several models its names have those of the models before them
            new = {
                key if len(of) == 1 else f"{model}.{key}": name
                if len(of) == 1 or not name
                else f"{model}.{name}"
                for model in of
                for key, name in inside[model].items()
            }
            states[optimizer] = _renamed_optimizer(saved[optimizer], new)
    return Choice(states, gone, stays | {name for name in others if name in out})


def _inside(model: str, name: str | None, key: str, path: str) -> str:
    """Return a new name without that of its model; an empty one where the tensor is dropped.

    Raises:
        MismatchError: it is a name of another object.
    """
    if name is not None and not name.startswith(f"{model}."):
        raise MismatchError(
            "rename gives a name outside of the object",
            file=path,
            entry=key,
            expected=f"a name that begins with {f'{model}.'!r}",
            found=name,
        )
    return "" if name is None else name.removeprefix(f"{model}.")


def _renamed_optimizer(saved: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the state of an optimizer by the new names of its parameters."""
    state, groups = saved.get("state", {}), saved["param_groups"]
    return {
        "state": {new: each for key, each in state.items() if (new := names.get(key, key))},
        "param_groups": [
            {**group, "params": [new for key in group["params"] if (new := names.get(key, key))]}
            for group in groups
        ],
    }

"""Suggest the rename or the root that matches the names of a checkpoint and of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torchlift._model.names import WRAPPERS, bare_name
from torchlift.errors import Argument, Hint

#: Names of each side from which rules are guessed. All names count for their effect.
_LOOKED_AT = 2000
#: The shape of a tensor in the model, and in the checkpoint.
Shapes = tuple[tuple[int, ...], tuple[int, ...]]
#: The way out for weights of shape [0].
_NO_VALUES = (
    "Weights of shape [0] contain no values: each rank of DeepSpeed ZeRO-3 saved its part "
    "elsewhere. Pass the folder of the DeepSpeed checkpoint that contains zero_to_fp32.py, or the "
    "output of that script. Or save again with stage3_gather_16bit_weights_on_model_save."
)
#: The names of a model that PEFT wrapped.
_PEFT = "base_model.model."


def find_patterns(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return patterns that match all of the names, and none of the others.

    Example:
        >>> find_patterns(["head.weight", "head.bias", "body.scale"], ["body.weight"])
        ['head.*', 'body.scale']
    """
    taken = {name[:at] for name in others for at, sign in enumerate(name) if sign == "."}
    found = dict[str, None]()
    for name in names:
        parents = (name[:at] for at, sign in enumerate(name) if sign == ".")
        top = next((parent for parent in parents if parent not in taken), None)
        found[name if top is None else f"{top}.*"] = None
    return list(found)


def suggest_rename(
    missing: Iterable[str], unexpected: Iterable[str], root: str | None = None
) -> Hint | None:
    r"""Return the rename or the root that matches the two lists, or None.

    Args:
        missing: Names of the model.
        unexpected: Names of the checkpoint, below `root`.
        root: The container that the caller passed.

    Example:
        >>> print(suggest_rename(["fc.weight"], ["module.fc.weight"]))
        The checkpoint's names start with 'module.': pass rename=remap.strip('module.').
        >>> print(suggest_rename(["fc.bias"], ["fc._orig_mod.bias"]).partition(": ")[2])
        pass rename=remap.rules([('(?<![^.])_orig_mod[.]', '')]).
    """
    lacking, extra = list(missing), list(unexpected)
    drop, dropped = _prefix(lacking, extra)
    add, added = _prefix(extra, lacking)
    if add and added > dropped:
        return Hint(
            f"The model's names start with {add!r} and the checkpoint's do not: pass ",
            Argument("rename", f"lambda key: {add!r} + key", (("^", add),)),
            ".",
        )
    if not drop:  # wrappers in the middle of the names may hide it
        drop, _ = _prefix(lacking, [bare_name(name) for name in extra])
    inner = _wrappers_in(lacking, [name.removeprefix(drop) for name in extra])
    if not dropped and not inner:
        return None
    if drop:
        strip = _rename(inner, drop)
        if all(name.startswith(drop) for name in extra):
            return Hint(f"The checkpoint's names start with {drop!r}: pass ", strip, ".")
        below = f"{root}.{drop[:-1]}" if root else drop[:-1]
        alone = Argument("root", repr(below), (below,))
        way = (" and ", _rename(inner)) if inner else (" to load these alone, or ", strip)
        return Hint(f"Some of the checkpoint's names start with {drop!r}: pass ", alone, *way, ".")
    reasons = ", ".join(f"{name!r} is in the checkpoint's names only" for name in inner)
    return Hint(f"{reasons}: pass ", _rename(inner), ".")


def hint_of_computed(lacking: Sequence[str], extra: Sequence[str]) -> Hint | None:
    """Return the way out if another library computes weights of the model from several tensors.

    No rename can do that: it would leave out what was trained, such as an adapter, or a mask.
    """
    missing, found = {*lacking}, {*extra}
    peft = [name for name in extra if name.startswith(_PEFT)]
    if peft and any(name.removeprefix(_PEFT) not in missing for name in peft):
        return Hint(
            "PEFT wrote these names, with weights of an adapter. Load into the model that "
            "peft.get_peft_model(model, config) returns, and pass ",
            Argument("rename", "torchlift.integrations.peft.peft_names(model)"),
            ". An adapter's own file needs the base before it: [base, adapter]. After the load, "
            "merge_and_unload() returns the plain model.",
        )
    for name in lacking:
        module, _, tensor = name.rpartition(".")
        of = f"model.get_submodule({module!r}), {tensor!r}"
        if {f"{name}_orig", f"{name}_mask"} <= found:
            return Hint(
                f"The checkpoint is of a pruned model. Call torch.nn.utils.prune.identity({of}) "
                f"before the load and torch.nn.utils.prune.remove({of}) after it, for each "
                "tensor with a mask."
            )
        if any(
            other.startswith(f"{module}.parametrizations.{tensor}.".lstrip(".")) for other in extra
        ):
            return Hint(
                "The checkpoint is of a model with parametrizations. Register the same ones "
                "before the load. After it, call torch.nn.utils.parametrize."
                f"remove_parametrizations({of}), for each tensor with one."
            )
    return None


def is_empty(expected: tuple[int, ...], found: tuple[int, ...]) -> bool:
    """Return whether a checkpoint has an empty tensor for a tensor of the model with values."""
    return 0 in found and 0 not in expected


def empty_hint(mismatched: Mapping[str, Shapes]) -> str | None:
    """Return the way out if a checkpoint has names without values.

    Args:
        mismatched: Name -> (shape in the model, shape in the checkpoint).
    """
    return _NO_VALUES if any(is_empty(*both) for both in mismatched.values()) else None


def _prefix(short: list[str], long: list[str]) -> tuple[str, int]:
    """Return the prefix that turns most of `short` into names of `long`, and how many."""
    names = set(short)
    votes: Counter[str] = Counter()
    for other in long[:: len(long) // _LOOKED_AT + 1]:
        at = other.find(".") + 1
        while at:
            if other[at:] in names:
                votes[other[:at]] += 1
            at = other.find(".", at) + 1
    best = max(votes, key=votes.__getitem__, default="")
    count = sum(name.startswith(best) and name[len(best) :] in names for name in long)
    # A prefix that helps a minority is a coincidence (two heads of one name), not a mistake.
    return (best, count) if best and 2 * count > min(len(short), len(long)) else ("", 0)


def _wrappers_in(lacking: list[str], extra: list[str]) -> list[str]:
    """Return the wrappers without which most of `extra` are names of `lacking`."""
    here, there = (
        {part for name in names[:_LOOKED_AT] for part in name.split(".")}
        for names in (lacking, extra)
    )
    found = [name for name in WRAPPERS if name in there - here]
    known = set(lacking)
    others = [name for name in extra if name not in known] if found else []
    made = {".".join(part for part in name.split(".") if part not in found) for name in others}
    # Two names that become one show that the rule is wrong.
    fits = 2 * len(known & made) > min(len(known), len(others)) and len(made) == len(others)
    return found if fits else []


def _rename(inner: Sequence[str], drop: str = "") -> Argument:
    # Complete components, which may contain any character but a dot. \b would end at a hyphen.
    pairs = [(f"(?<![^.]){name}[.]", "") for name in inner]
    steps = [f"remap.strip({drop!r})"] * bool(drop) + [f"remap.rules({pairs!r})"] * bool(pairs)
    return Argument("rename", " | ".join(steps), (*[drop] * bool(drop), *pairs))

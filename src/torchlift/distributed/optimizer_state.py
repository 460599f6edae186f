"""Optimizer state dicts under canonical names: read, flattened, and brought into one form."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from torchlift._model.dtensor import is_dtensor, spread_of
from torchlift._model.names import Names
from torchlift._model.state import call_state_dict
from torchlift._system.containers import leaves
from torchlift.distributed.options import (
    StateDictMismatch,
    StateDictOptions,
    holder_error,
    inner_optimizers,
)
from torchlift.formats.index import left_out

T = TypeVar("T")

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"
#: Key in a group of a state dict: texts such as "GG.0 plain" or "rows S0,R". Each is a path in the
#: state of a DTensor and its layout there. State with the layout of its parameter is not listed.
_LAYOUTS = "state_layouts"
#: The layout of a tensor that is no DTensor.
PLAIN = "plain"
#: What a parameter is called that is in no model: by its place in its optimizer, one of several.
PLACE = re.compile(rf"(\d+\.)?{_GROUPS}\.\d+\.{_PARAMS}\.\d+")


def read_optimizers(
    names: Names, optimizers: Iterable[torch.optim.Optimizer], options: StateDictOptions
) -> dict[str, Any]:
    """Return the state of `optimizers` by canonical name, not gathered, on their devices.

    A trainable parameter without state gets its initial one, so that every rank and every moment
    gives the same keys. The optimizers are not changed.

    Raises:
        StateDictMismatch: an optimizer is of another model, two hold one parameter, or the state
            dict of one lacks some of its state.
    """
    state: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = []
    holder: dict[str, torch.optim.Optimizer] = {}
    optimizers = name_by_place(names, optimizers)
    for optimizer in optimizers:
        packed = _own_state(optimizer)
        # By position: after a parameter that is listed twice torch leaves a number out.
        by_number = {
            number: first_name(param, names)
            for numbers, group in zip(packed[_GROUPS], optimizer.param_groups, strict=True)
            for number, param in zip(numbers[_PARAMS], group[_PARAMS], strict=True)
        }
        for name in by_number.values():
            if holder.setdefault(name, optimizer) is not optimizer:
                raise StateDictMismatch(
                    "two optimizers hold one parameter, and a state dict has one state for it",
                    entry=name,
                    hint="Read the state dict of each of them in a call of its own.",
                )
        for key, value in packed[_STATE].items():
            state[by_number.get(key, key) if isinstance(key, int) else key] = value
        for group in optimizer.param_groups:
            for param in group[_PARAMS]:
                name = first_name(param, names)
                if not state.get(name) and (initial := initial_state(optimizer, group, param)):
                    state[name] = initial
        for group, live in zip(packed[_GROUPS], optimizer.param_groups, strict=True):
            named = [by_number[number] for number in once(group[_PARAMS])]
            made = {**group, _PARAMS: named}
            made.pop(_LAYOUTS, None)  # torch's functions leave what they loaded in a group
            layouts = {
                f"{path_text(path)} {_layout_text(leaf)}"
                for param in filter(is_dtensor, once(live[_PARAMS]))
                for path, leaf in leaves(state.get(first_name(param, names), {})).items()
                if torch.is_tensor(leaf) and (leaf.dim() or is_dtensor(leaf))
                if leaf.shape != param.shape or spread_of(leaf) != spread_of(param)
            }
            # One with this method shows the layout again when its state is loaded, as torch's do.
            if layouts and not hasattr(type(optimizer), "_init_group"):
                made[_LAYOUTS] = sorted(layouts)
            groups.append(made)
    found = {_STATE: state, _GROUPS: groups}
    return _flatten(found) if options.flatten_optimizer_state_dict else found


def _own_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what the ``state_dict`` of an optimizer returns, if that is all of its state.

    Raises:
        StateDictMismatch: If it is not, or is on another rank.
    """
    kind = type(optimizer).__name__
    packed: Any = call_state_dict(optimizer)
    if not isinstance(packed, dict) or not {_STATE, _GROUPS} <= packed.keys():
        raise holder_error(optimizer, f"a state dict without {_STATE!r} and {_GROUPS!r}")
    if more := packed.keys() - {_STATE, _GROUPS}:
        raise StateDictMismatch(
            "an optimizer keeps more than the state and the groups of its parameters",
            entry=kind,
            found=", ".join(map(repr, sorted(more))),
            hint="Save optimizer.state_dict() as it is, and load that with its load_state_dict.",
        )
    numbers = {
        id(param): number
        for group, live in zip(packed[_GROUPS], optimizer.param_groups, strict=True)
        for number, param in zip(group[_PARAMS], live[_PARAMS], strict=True)
    }
    for inner in inner_optimizers(optimizer):
        for param, state in getattr(inner.optimizer, "state", {}).items():
            if set(state) - set(packed[_STATE].get(numbers.get(id(param)), ())):
                raise holder_error(optimizer, "the state dict lacks state of an optimizer inside")
    found: dict[str, Any] = packed
    return found


def _layout_text(tensor: torch.Tensor) -> str:
    """Write the layout of a tensor: "S0,R" is sharded by rows on the first mesh dimension only."""
    if not is_dtensor(tensor):
        return PLAIN
    from torch.distributed.tensor import Replicate, Shard

    # A shard of another class, such as FSDP's over tensor parallel, is not rebuilt from a text.
    found = (
        f"S{each.dim}" if type(each) is Shard else "R" if type(each) is Replicate else "?"
        for each in tensor.placements
    )  # fmt: skip
    return ",".join(found)


def path_text(path: tuple[Any, ...]) -> str:
    """Write the path of a tensor in the state of a parameter as in a flat state dict.

    Example:
        >>> path_text(("GG", 0, "left"))
        'GG.0.left'
    """
    return ".".join(map(_flat_key, path))


def once(items: Iterable[T]) -> list[T]:
    """Return the items, each one once, told apart by what they are: a parameter listed twice.

    Example:
        >>> once([1, 2, 1])
        [1, 2]
    """
    return list({id(item): item for item in items}.values())


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group[_PARAMS]]


def name_by_place(
    names: Names, optimizers: Iterable[torch.optim.Optimizer]
) -> tuple[torch.optim.Optimizer, ...]:
    """Name what optimizers hold and the model does not, such as a temperature, by its place.

    Returns:
        The optimizers.

    Raises:
        StateDictMismatch: of all that they hold the model has nothing: they are of another one.
    """
    found = tuple(optimizers)
    params = [param for optimizer in found for param in _params(optimizer)]
    known = any(isinstance(tensor, torch.nn.Parameter) for tensor in names.tensors.values())
    if known and params and not any(map(names.fqns, params)):
        first_name(params[0], names)
    for number, optimizer in enumerate(found):
        prefix = f"{number}." if len(found) > 1 else ""
        for at, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group[_PARAMS]):
                if not names.fqns(param):
                    names.add(param, f"{prefix}{_GROUPS}.{at}.{_PARAMS}.{index}")
    return found


def first_name(param: torch.Tensor, names: Names) -> str:
    """Return the name under which the state of a parameter is kept: of tied ones, the first.

    Raises:
        StateDictMismatch: the model does not have the parameter.
    """
    found = names.fqns(param)
    if not found:
        raise _of_another(param)
    return found[0]


def require_known(
    names: Names, optimizers: Iterable[torch.optim.Optimizer], saved: Collection[str]
) -> None:
    """Refuse a parameter of another model: one that was rebuilt after its optimizer was made.

    By itself it looks like one that is in no model. But of that the place was saved, and nothing is
    left over that was saved by a name of the model.

    Args:
        names: of the model, and by place of what only the optimizers hold.
        optimizers: all that are loaded.
        saved: names of the parameters that the state dict has.

    Raises:
        StateDictMismatch: there is one.
    """
    own = {name: param for each in optimizers for param in _params(each)
            for name in names.fqns(param)}  # fmt: skip
    strange = next((own[n] for n in own if PLACE.fullmatch(n) and n not in saved), None)
    if strange is not None and any(n not in own and not PLACE.fullmatch(n) for n in saved):
        raise _of_another(strange)


def require_same_groups(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], name: str
) -> None:
    """Refuse another number of parameter groups than was saved, where a scheduler is loaded, too.

    It keeps a learning rate for each group. With fewer or more it fails in its next step.

    Args:
        optimizer: the scheduler's.
        saved: the optimizer's saved state, nested.
        name: what an error calls the optimizer.

    Raises:
        StateDictMismatch: If the numbers differ.
    """
    expected, found = len(optimizer.param_groups), len(saved.get(_GROUPS, ()))
    if expected != found:
        raise StateDictMismatch(
            "the optimizer of a scheduler was saved with another number of parameter groups",
            entry=f"{name}.{_GROUPS}",
            expected=expected,
            found=found,
            hint="Give the optimizer the parameter groups it was saved with.",
        )


def _of_another(param: torch.Tensor) -> StateDictMismatch:
    return StateDictMismatch(
        "the optimizer holds a parameter that the model does not have",
        found=f"{type(param).__name__} of shape {list(param.shape)}",
        hint="Make the optimizer from the parameters of this model, after wrapping it.",
    )


@torch.no_grad()
def initial_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], param: torch.Tensor
) -> dict[Any, Any] | None:
    """Make the state that `param` has before its first step, without a step.

    torch takes a step with zero gradients for it, which leaves Adam's counter at 1 and every later
    update wrong (pytorch/pytorch#164929); and a step of an optimizer that holds another one trains
    the model. Here ``_init_group`` is called on a copy of the optimizer that holds a copy of the
    parameter only: state may start from the weights (a copy in float32).

    Returns:
        New tensors; an empty dict where the optimizer has no state to start with; None where only a
        step could tell.
    """
    if not param.requires_grad:
        return {}
    moment = torch.zeros_like(param, requires_grad=False)
    # Two of torch's make their state in step() only.
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer": moment} if group.get("momentum") else {}
    if isinstance(optimizer, torch.optim.SparseAdam):
        return {"step": 0, "exp_avg": moment, "exp_avg_sq": moment.clone()}
    # Not the instance's: one that forwards what it lacks has that of the optimizer it holds.
    init: Any = getattr(type(optimizer), "_init_group", None)
    if init is None:
        return None
    stand_in = param.detach().clone().requires_grad_()
    stand_in.grad = moment
    state: dict[torch.Tensor, dict[Any, Any]] = defaultdict(dict)
    shadow = object.__new__(type(optimizer))
    vars(shadow).update(vars(optimizer), state=state, param_groups=[{**group, _PARAMS: [stand_in]}])
    if shadow.state is not state:  # a property: this class shows the state of another optimizer
        return None
    try:
        lists = list(inspect.signature(init).parameters)[2:]
        init(shadow, shadow.param_groups[0], *([] for _ in lists))
    except (AttributeError, LookupError, TypeError):  # not the lists that torch's take
        return None
    return dict(state[stand_in]) or None


def _flatten(found: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}

    def visit(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                visit(f"{prefix}.{_flat_key(key)}", item)
        else:
            flat[prefix] = value

    for name, state in found[_STATE].items():
        visit(f"{_STATE}.{name}", state)
    for group in found[_GROUPS]:
        hyper = {key: value for key, value in group.items() if key != _PARAMS}
        for name in group[_PARAMS]:
            flat.update({f"{_GROUPS}.{name}.{key}": value for key, value in hyper.items()})
    return flat


def _flat_key(key: object) -> str:
    """Write a key, and one that is text and reads like a number as 'text'."""
    return repr(key) if isinstance(key, str) and _NUMBER.fullmatch(key) else str(key)


def _unflat_key(text: str) -> int | str:
    if _NUMBER.fullmatch(text):
        return int(text)
    return text[1:-1] if _NUMBER.fullmatch(text[1:-1]) and text[0] == text[-1] == "'" else text


#: How ``str`` writes an integer, no other text.
_NUMBER = re.compile(r"0|-?[1-9][0-9]*")


@dataclass
class Saved:
    """An optimizer state dict in the one form that loading works with.

    Attributes:
        state: canonical name -> state.
        hyper: canonical name -> the hyperparameters of its group.
        empty: the hyperparameters of groups without parameters, in order.
        other: state under keys that are no parameter.
        gone: canonical names that the caller left out.
        allow_missing: patterns of names that may be missing.
        by_order: whether only numbers told parameters apart: each is of one in the same place.
        layouts: canonical name -> path in its state -> its layout, where that was not the layout of
            the parameter, a DTensor. Only of groups of which it is recorded.
    """

    state: dict[str, Any] = field(default_factory=dict)
    hyper: dict[str, dict[str, Any]] = field(default_factory=dict)
    empty: list[dict[str, Any]] = field(default_factory=list)
    other: dict[Any, Any] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    allow_missing: Collection[str] = ()
    by_order: bool = False
    layouts: dict[str, dict[str, str]] = field(default_factory=dict)

    def add_layouts(self, name: str, texts: Iterable[str]) -> None:
        """Add the layouts that a group has for a parameter. Two for one path tell nothing."""
        found: dict[str, str] = {}
        for path, _, layout in (text.rpartition(" ") for text in texts):
            found[path] = layout if found.get(path, layout) == layout else "?"
        self.layouts[name] = found

    def leave_out(
        self, include: Collection[str], exclude: Collection[str], allow_missing: Collection[str]
    ) -> None:
        """Leave out the parameters that patterns do not choose, with their hyperparameters.

        Raises:
            MismatchError: a pattern fits nothing, or nothing is left.
        """
        names = dict.fromkeys((*self.state, *self.hyper))
        self.gone = left_out(names, (), include, exclude, "")  # which file, the caller adds
        self.allow_missing = allow_missing
        self.state = {name: value for name, value in self.state.items() if name not in self.gone}
        self.hyper = {name: value for name, value in self.hyper.items() if name not in self.gone}


def normalise(
    saved: Mapping[str, Any], optimizers: Iterable[torch.optim.Optimizer], names: Names
) -> Saved:
    """Bring any of the three forms of an optimizer state dict into that of `Saved`.

    Args:
        saved: nested under canonical names, flat, or an optimizer's own with numbers for
            parameters, which then must be in the order of each optimizer, unless it has their names
            (``param_names``), as one that was made of ``model.named_parameters()`` does.
        optimizers: only looked at for the last form and for nested flat states.
        names: of the model.

    Raises:
        StateDictMismatch: it is none of them.
    """
    if not saved:
        return Saved()
    if _STATE not in saved or _GROUPS not in saved:
        return _unflatten(saved, optimizers, names)
    state, groups = saved[_STATE], saved[_GROUPS]
    fits = isinstance(state, Mapping) and isinstance(groups, (list, tuple))
    if not fits or not all(isinstance(g, Mapping) and _PARAMS in g for g in groups):
        raise StateDictMismatch(
            "not an optimizer state dict",
            expected=f"a dict under {_STATE!r}, and under {_GROUPS!r} dicts with {_PARAMS!r}",
        )
    numbered, by_order = _numbered(groups, optimizers, names)
    found = Saved(by_order=by_order)
    for key, value in state.items():
        name = numbered.get(key, key)
        (found.state if isinstance(name, str) else found.other)[name] = value
    for name in numbered.values():
        # An optimizer has no entry for what it never stepped: none is missing here.
        found.state.setdefault(name, {})
    for group in groups:
        hyper = {key: value for key, value in group.items() if key not in (_PARAMS, _LAYOUTS)}
        for key in group[_PARAMS]:
            found.hyper[numbered.get(key, key)] = hyper
            if _LAYOUTS in group:
                found.add_layouts(numbered.get(key, key), group[_LAYOUTS])
        if not group[_PARAMS]:
            found.empty.append(hyper)
    return found


def _numbered(
    groups: Any, optimizers: Iterable[torch.optim.Optimizer], names: Names
) -> tuple[dict[Any, str], bool]:
    """Return the names of the parameters that an optimizer's own state dict numbers.

    And whether their order alone told them apart.
    """
    keys = [key for group in groups for key in group[_PARAMS]]
    if not keys or not all(isinstance(key, int) for key in keys):
        return {}, False
    told = [name for group in groups for name in group.get("param_names") or ()]
    for optimizer in optimizers:
        params = _params(optimizer)
        if len(params) == len(keys):
            mine = {fqn: first_name(param, names) for param in params for fqn in names.fqns(param)}
            named = len(told) == len(keys) and mine.keys() >= set(told)
            order = (
                [mine[name] for name in told] if named else [first_name(p, names) for p in params]
            )
            found = dict(zip(keys, order, strict=True))
            # DCP makes text of every key, and leaves the numbers in the groups' lists alone.
            return {**found, **{str(k): name for k, name in found.items()}}, not named
    raise StateDictMismatch(
        "the optimizer state dict numbers its parameters, and no optimizer has as many",
        found=f"{len(keys)} parameters",
        hint="Save it with get_optimizer_state_dict, which names them.",
    )


def _unflatten(
    flat: Mapping[str, Any], optimizers: Iterable[torch.optim.Optimizer], names: Names
) -> Saved:
    found = Saved()
    live = {
        name: optimizer.state.get(param, {})
        for optimizer in optimizers
        for param in _params(optimizer)
        for name in names.fqns(param)
    }
    for key, value in flat.items():
        section, _, rest = str(key).partition(".")
        if section == _GROUPS:
            name, _, hyper = rest.rpartition(".")
            if hyper == _LAYOUTS:
                found.add_layouts(name, value)
            else:
                found.hyper.setdefault(name, {})[hyper] = value
        elif section == _STATE:
            name = _owner(rest, live)
            _insert(found.state.setdefault(name, {}), rest[len(name) + 1 :], value, live.get(name))
        else:
            raise StateDictMismatch(
                "not a key of an optimizer state dict",
                entry=key,
                expected="'state' and 'param_groups', or keys that begin with them and a dot",
            )
    return found


def _owner(rest: str, known: Mapping[str, Any]) -> str:
    """Return the parameter that a flat key belongs to: the longest name it begins with."""
    name = rest
    while "." in name:
        name = name.rpartition(".")[0]
        if name in known:
            return name
    return rest.rpartition(".")[0]


def _insert(state: dict[Any, Any], path: str, value: Any, live: Any) -> None:
    """Rebuild nesting from dots, and keys that are integers, or whatever the live state has."""
    like = live if isinstance(live, Mapping) else {}
    head, _, rest = (path, "", "") if path in like else path.partition(".")
    key: Any = next((k for k in like if _flat_key(k) == head), _unflat_key(head))
    if rest:
        _insert(state.setdefault(key, {}), rest, value, like.get(key))
    else:
        state[key] = value

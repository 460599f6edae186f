"""Read, flatten and normalise optimizer state dicts with canonical names."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torchlift._model.dtensor import is_dtensor, local_tensor, spread_of
from torchlift._model.handlers import is_wrapper
from torchlift._model.names import Names, bare_name
from torchlift._model.slots import is_lazy
from torchlift._model.state import call_state_dict
from torchlift._system.containers import leaves, map_leaves
from torchlift.distributed.options import (
    StateDictMismatch,
    StateDictOptions,
    holder_error,
    inner_optimizers,
)
from torchlift.formats.index import left_out

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"
#: Key in a group of a state dict: texts such as "GG.0 plain" or "rows S0,R". Each is a path in the
#: state of a DTensor and its layout there. State with the layout of its parameter is not listed.
_LAYOUTS = "state_layouts"
#: The layout of a tensor that is no DTensor.
PLAIN = "plain"
#: The name of a parameter that no model has: the number of its optimizer, and its place there.
PLACE = re.compile(rf"(\d+\.)?{_GROUPS}\.\d+\.{_PARAMS}\.\d+")


@dataclass(frozen=True)
class Held:
    """A parameter that an optimizer holds.

    Attributes:
        fqns: Its canonical names, several if it is tied. The first one is used to save it.
        param: The parameter.
        group: Its parameter group.
        optimizer: The optimizer.
    """

    fqns: list[str]
    param: torch.Tensor
    group: dict[str, Any]
    optimizer: torch.optim.Optimizer

    @property
    def name(self) -> str:
        """The name under which its state is saved."""
        return self.fqns[0]

    @property
    def state(self) -> dict[Any, Any]:
        """Its live state, which is empty before the first step."""
        found: dict[Any, Any] = self.optimizer.state.get(self.param, {})
        return found

    def name_in(self, saved: Container[str]) -> str | None:
        """Return the first of its names that was saved."""
        return next((name for name in self.fqns if name in saved), None)


@dataclass(frozen=True)
class Holder:
    """An optimizer and what it holds.

    Attributes:
        optimizer: The optimizer.
        groups: The parameters of each group. One that is listed twice is here once.
    """

    optimizer: torch.optim.Optimizer
    groups: list[list[Held]]

    @property
    def params(self) -> list[Held]:
        """The parameters of all groups."""
        return [held for group in self.groups for held in group]


def name_parameters(names: Names, optimizers: Sequence[torch.optim.Optimizer]) -> list[Holder]:
    """Return the parameters of optimizers by name, after FSDP2 has put back its shards.

    Parameters that the model lacks, such as a temperature, are named by their place.

    Raises:
        StateDictMismatch: If the model has none of the parameters, or see `require_current`.
    """
    require_current(names, optimizers)
    params = [param for each in optimizers for param in params_of(each)]
    known = any(isinstance(tensor, nn.Parameter) for tensor in names.tensors.values())
    if known and params and not any(map(names.fqns, params)):
        raise _foreign_error("the optimizer holds a parameter that the model does not have", params)
    found: list[Holder] = []
    for number, optimizer in enumerate(optimizers):
        prefix = f"{number}." if len(optimizers) > 1 else ""
        groups: list[list[Held]] = []
        for at, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group[_PARAMS]):
                names.add(param, f"{prefix}{_GROUPS}.{at}.{_PARAMS}.{index}")
            unique = dict.fromkeys(group[_PARAMS])
            groups.append([Held(names.fqns(p), p, group, optimizer) for p in unique])
        found.append(Holder(optimizer, groups))
    return found


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of an optimizer."""
    return [param for group in optimizer.param_groups for param in group[_PARAMS]]


def require_current(names: Names, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse optimizers of parameters that a model does not use any more, or that have no shape.

    A parameter that the model lacks may be a temperature, which belongs to no module. It was
    replaced if its memory is gone, or if the model has one of its shape that no optimizer holds.

    Args:
        names: The tensors of the model, after FSDP2 has put back its shards.
        optimizers: All optimizers that are read or loaded together.

    Raises:
        StateDictMismatch: If an optimizer holds such a parameter.
    """
    held = {id(param) for each in optimizers for param in params_of(each)}
    free = [
        tensor
        for tensor in names.tensors.values()
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad
        if id(tensor) not in held and not is_lazy(tensor)
    ]
    for optimizer in optimizers:
        params = params_of(optimizer)
        if any(map(is_lazy, params)):
            raise StateDictMismatch(
                "the optimizer holds a parameter of a lazy layer, which does not have a shape yet",
                entry=type(optimizer).__name__,
                hint="Run the model once on a batch first.",
            )
        others = [param for param in params if not names.fqns(param)]
        if gathered := [param for param in others if _is_freed(param)]:
            raise _foreign_error(
                "the optimizer holds parameters that FSDP2 gathered for a forward pass", gathered
            )
        # A temperature may have the shape of some parameter by chance, so all shapes must match.
        shapes = {each.shape for each in free}
        shards = {each.shape for each in free if is_dtensor(each)}
        if len(others) == len(params) > 1 and all(param.shape in shapes for param in params):
            shards = shapes
        for param in others:
            if param.numel() > 1 and param.shape in shards and not is_dtensor(param):
                raise _foreign_error(
                    "the optimizer holds a parameter that the model does not have any more", [param]
                )


def _is_freed(param: torch.Tensor) -> bool:
    """Return whether the memory of a parameter is gone. Reading it would end the process."""
    if param.is_meta or param.layout is not torch.strided or is_wrapper(local_tensor(param)):
        return False
    param = local_tensor(param)
    return bool(param.numel()) and not param.untyped_storage().size()


def _foreign_error(reason: str, params: Sequence[torch.Tensor]) -> StateDictMismatch:
    return StateDictMismatch(
        reason,
        found=f"{type(params[0]).__name__} of shape {list(params[0].shape)}",
        hint="Make the optimizer from the parameters of this model, after wrapping it and before "
        "the first forward pass.",
    )


def read_optimizers(
    holders: Iterable[Holder], options: StateDictOptions, *, exact: bool = False
) -> dict[str, Any]:
    """Return the state of optimizers by canonical name, not gathered, on their devices.

    A trainable parameter without state gets its initial state. So the keys are the same on every
    rank, before and after the first step. The optimizers are not changed.

    Args:
        holders: The optimizers.
        options: Whether the result is flat.
        exact: Return None for the momentum that SGD with dampening makes in its first step.
            That step takes the gradient as it is, and later ones ``1 - dampening`` of it.
            Default: zeros, because ``dcp.load`` needs a tensor to load into.

    Raises:
        StateDictMismatch: If two optimizers hold one parameter.
        StateDictMismatch: If the state dict of an optimizer lacks some of its state.
    """
    state: dict[Any, Any] = {}
    groups: list[dict[str, Any]] = []
    owners: dict[str, torch.optim.Optimizer] = {}
    for holder in holders:
        optimizer = holder.optimizer
        packed = _own_state(optimizer)
        named = {held.param: held.name for held in holder.params}
        others = (key for key in packed[_STATE] if not isinstance(key, int))
        for name in (*named.values(), *others):
            if owners.setdefault(name, optimizer) is not optimizer:
                raise StateDictMismatch(
                    "two optimizers hold the same parameter, or other state of the same name",
                    entry=name,
                    hint="Read the state dict of each optimizer in a separate call.",
                )
        # By position, because torch skips a number after a parameter that is listed twice.
        by_number = {
            number: named[param]
            for numbers, group in zip(packed[_GROUPS], optimizer.param_groups, strict=True)
            for number, param in zip(numbers[_PARAMS], group[_PARAMS], strict=True)
        }
        for key, value in packed[_STATE].items():
            # New containers: dcp.load writes into those of the result, before anything is checked.
            owner: Any = by_number.get(key, key) if isinstance(key, int) else key
            state[owner] = map_leaves(value, lambda leaf, _: leaf)
        for inner in inner_optimizers(optimizer):
            for param, its_state in getattr(inner, "state", {}).items():
                if set(its_state) - set(state.get(named.get(param), ())):
                    raise holder_error(
                        optimizer, "its state dict lacks state of an inner optimizer"
                    )
        for group, params in zip(packed[_GROUPS], holder.groups, strict=True):
            for held in params:
                if not state.get(held.name) and (initial := initial_state(held)):
                    state[held.name] = initial
                    if exact and isinstance(optimizer, torch.optim.SGD) and group.get("dampening"):
                        initial["momentum_buffer"] = None
            made = {**group, _PARAMS: [held.name for held in params]}
            made.pop(_LAYOUTS, None)  # torch's functions load this key into the live group
            layouts = {
                f"{path_text(path)} {_layout_text(leaf)}"
                for held in params
                if is_dtensor(held.param)
                for path, leaf in leaves(state.get(held.name, {})).items()
                if torch.is_tensor(leaf) and (leaf.dim() or is_dtensor(leaf))
                if leaf.shape != held.param.shape or spread_of(leaf) != spread_of(held.param)
            }
            # An optimizer with this method shows the layout when its state is loaded.
            if layouts and not hasattr(type(optimizer), "_init_group"):
                made[_LAYOUTS] = sorted(layouts)
            groups.append(made)
    found = {_STATE: state, _GROUPS: groups}
    return _flatten(found) if options.flatten_optimizer_state_dict else found


def _own_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the result of ``optimizer.state_dict()``, if it has the state and groups alone.

    Raises:
        StateDictMismatch: If it does not, or has state of another parameter.
    """
    kind = type(optimizer).__name__
    held: set[Any] = {*params_of(optimizer)}
    is_torchs = getattr(type(optimizer), "state_dict", None) is torch.optim.Optimizer.state_dict
    keys: Iterable[Any] = optimizer.state if is_torchs else ()
    for key in keys:
        if isinstance(key, torch.Tensor) and key not in held:
            raise StateDictMismatch(
                "the optimizer has state of a parameter that is in none of its groups",
                entry=kind,
                found=f"{type(key).__name__} of shape {list(key.shape)}",
                hint="Remove it with optimizer.state.pop(parameter). Or make the optimizer after "
                "the model is wrapped.",
            )
    packed: Any = call_state_dict(optimizer)
    if not isinstance(packed, dict) or not {_STATE, _GROUPS} <= packed.keys():
        raise holder_error(optimizer, f"its state dict lacks {_STATE!r} or {_GROUPS!r}")
    if more := packed.keys() - {_STATE, _GROUPS}:
        raise StateDictMismatch(
            "the state dict of an optimizer has more than the state and groups of its parameters",
            entry=kind,
            found=", ".join(map(repr, sorted(more))),
            hint="Save optimizer.state_dict() as it is, and load it with load_state_dict.",
        )
    found: dict[str, Any] = packed
    return found


def _layout_text(tensor: torch.Tensor) -> str:
    """Return the layout of a tensor as text, such as "S0,R": rows on the first mesh dimension."""
    if not is_dtensor(tensor):
        return PLAIN
    from torch.distributed.tensor import Replicate, Shard

    # Shards of other classes, such as FSDP's over tensor parallel, cannot be rebuilt from a text.
    found = (
        f"S{each.dim}" if type(each) is Shard else "R" if type(each) is Replicate else "?"
        for each in tensor.placements
    )  # fmt: skip
    return ",".join(found)


def path_text(path: tuple[Any, ...]) -> str:
    """Return the path of a tensor in the state of a parameter, as in a flat state dict.

    Example:
        >>> path_text(("GG", 0, "left"))
        'GG.0.left'
    """
    return ".".join(map(_flat_key, path))


@torch.no_grad()
def initial_state(held: Held) -> dict[Any, Any] | None:
    """Return the state of a parameter before its first step, without a step.

    torch takes a step with zero gradients. That leaves Adam's counter at 1, and every later update
    wrong (pytorch/pytorch#164929). If an optimizer holds another one, that step trains the model.
    Here a copy of the optimizer calls ``_init_group`` with a copy of the parameter, because the
    state may start from the weights.

    Returns:
        New tensors, or an empty dict if there is no initial state. None if only a step makes it.
    """
    optimizer, group, param = held.optimizer, held.group, held.param
    if not param.requires_grad:
        return {}
    moment = torch.zeros_like(param, requires_grad=False)
    # These two of torch's optimizers make their state in step().
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer": moment} if group.get("momentum") else {}
    if isinstance(optimizer, torch.optim.SparseAdam):
        return {"step": 0, "exp_avg": moment, "exp_avg_sq": moment.clone()}
    # The class's: an instance may forward a missing attribute to an optimizer that it holds.
    init: Any = getattr(type(optimizer), "_init_group", None)
    if init is None:
        return None
    stand_in = param.detach().clone().requires_grad_()
    stand_in.grad = moment
    if param.is_meta:  # a fused optimizer refuses this device
        group = {**group, "fused": False}
    state: dict[torch.Tensor, dict[Any, Any]] = defaultdict(dict)
    shadow = object.__new__(type(optimizer))
    vars(shadow).update(vars(optimizer), state=state, param_groups=[{**group, _PARAMS: [stand_in]}])
    if shadow.state is not state:  # a property: this class shows the state of another optimizer
        return None
    try:  # torch's methods take the group and one list for each kind of state
        lists = list(inspect.signature(init).parameters)[2:]
        init(shadow, shadow.param_groups[0], *([] for _ in lists))
    except (AttributeError, LookupError, TypeError):
        return None
    return dict(state[stand_in]) or None


def _flatten(found: dict[str, Any]) -> dict[str, Any]:
    """Return the flat form of a state dict. Nested dicts of a state are flattened, as in torch.

    Raises:
        StateDictMismatch: If there is state beside that of parameters, which would be lost.
    """
    flat: dict[str, Any] = {}

    def visit(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                visit(f"{prefix}.{_flat_key(key)}", item)
        else:
            flat[prefix] = value

    for name, state in found[_STATE].items():
        if not isinstance(state, Mapping):
            raise StateDictMismatch(
                "this state of an optimizer does not have a flat form",
                entry=f"{_STATE}.{name}",
                expected="the state of a parameter",
                hint="Leave flatten_optimizer_state_dict out.",
            )
        visit(f"{_STATE}.{name}", state)
    for group in found[_GROUPS]:
        hyper = {key: value for key, value in group.items() if key != _PARAMS}
        for name in group[_PARAMS]:
            flat.update({f"{_GROUPS}.{name}.{key}": value for key, value in hyper.items()})
    return flat


def _flat_key(key: object) -> str:
    """Return a key as text. A text that looks like a number is put in quotes."""
    return repr(key) if isinstance(key, str) and _NUMBER.fullmatch(key) else str(key)


def _unflat_key(text: str) -> int | str:
    if _NUMBER.fullmatch(text):
        return int(text)
    return text[1:-1] if _NUMBER.fullmatch(text[1:-1]) and text[0] == text[-1] == "'" else text


#: An integer, as ``str`` writes it.
_NUMBER = re.compile(r"0|-?[1-9][0-9]*")


@dataclass
class Saved:
    """An optimizer state dict in the form that loading uses.

    Attributes:
        state: Canonical name -> state.
        hyper: Canonical name -> the hyperparameters of its group.
        empty: The hyperparameters of groups without parameters, in order.
        other: State under keys that are not parameters.
        gone: Canonical names that the caller left out.
        allow_missing: Patterns of names that may be missing.
        must_match: Whether some of it must match, however much may be missing.
        layouts: Canonical name -> path in its state -> its recorded layout. Only layouts that
            differ from that of the parameter are recorded.
    """

    state: dict[str, Any] = field(default_factory=dict)
    hyper: dict[str, dict[str, Any]] = field(default_factory=dict)
    empty: list[dict[str, Any]] = field(default_factory=list)
    other: dict[Any, Any] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    allow_missing: Collection[str] = ()
    must_match: bool = False
    layouts: dict[str, dict[str, str]] = field(default_factory=dict)

    def add_layouts(self, name: str, texts: Iterable[str]) -> None:
        """Add the recorded layouts of a group for a parameter. Two for one path are unknown."""
        found: dict[str, str] = {}
        for path, _, layout in (text.rpartition(" ") for text in texts):
            found[path] = layout if found.get(path, layout) == layout else "?"
        self.layouts[name] = found

    def leave_out(
        self, include: Collection[str], exclude: Collection[str], allow_missing: Collection[str]
    ) -> None:
        """Leave out the parameters that patterns do not select, with their hyperparameters.

        Raises:
            MismatchError: If a pattern matches nothing, or nothing is left.
        """
        names = dict.fromkeys((*self.state, *self.hyper))
        self.gone = left_out(names, (), include, exclude, "")  # the caller adds the file
        self.allow_missing = allow_missing
        self.state = {name: value for name, value in self.state.items() if name not in self.gone}
        self.hyper = {name: value for name, value in self.hyper.items() if name not in self.gone}


def normalise(saved: Mapping[str, Any], holders: Sequence[Holder]) -> Saved:
    """Bring any of three forms of an optimizer state dict into the form of `Saved`.

    Args:
        saved: Nested under canonical names, flat, or an optimizer's own. The last form numbers
            parameters in the order of the optimizer, unless it has their names (``param_names``).
        holders: The optimizers, for the last form and for nested flat states.

    Raises:
        StateDictMismatch: If it has another form.
    """
    if not saved:
        return Saved()
    if _STATE not in saved or _GROUPS not in saved:
        saved = _unflatten(saved, holders)
    state, groups = saved[_STATE], saved[_GROUPS]
    fits = isinstance(state, Mapping) and isinstance(groups, (list, tuple))
    if not fits or not all(isinstance(g, Mapping) and _lists_names(g) for g in groups):
        raise StateDictMismatch(
            "not an optimizer state dict",
            expected=f"a dict under {_STATE!r}, and under {_GROUPS!r} dicts with {_PARAMS!r}, a "
            "list of names or numbers",
        )
    numbered = _name_numbers(groups, holders)
    found = Saved()
    params = {numbered.get(key, key) for group in groups for key in group[_PARAMS]}
    params |= {fqn for each in holders for held in each.params for fqn in held.fqns}
    named = {numbered.get(key, key): value for key, value in state.items()}
    listed = (named[name] for name in params & named.keys())
    kinds = {frozenset(each) for each in listed if isinstance(each, Mapping) and each}
    for name, value in named.items():
        is_param = name in params
        if not is_param and isinstance(name, str) and isinstance(value, Mapping):
            # The parameter of a group that a program cut off has the values of the other ones.
            is_param = any(kind <= value.keys() for kind in kinds)
        # A counter of all steps, for example, has a name that is not a parameter's.
        (found.state if is_param else found.other)[name] = value
    for name in numbered.values():
        # An optimizer lacks an entry for a parameter that never stepped. It is not missing.
        found.state.setdefault(name, {})
    for group in groups:
        hyper = {key: value for key, value in group.items() if key not in (_PARAMS, _LAYOUTS)}
        for key in group[_PARAMS]:
            name = numbered.get(key, key)
            found.hyper[name] = hyper
            if _LAYOUTS in group:
                found.add_layouts(name, group[_LAYOUTS])
        if not group[_PARAMS]:
            found.empty.append(hyper)
    return found


def _lists_names(group: Mapping[str, Any]) -> bool:
    keys = group.get(_PARAMS)
    if not isinstance(keys, (list, tuple, range)):
        return False
    return all(isinstance(key, (str, int)) for key in keys)


def _name_numbers(groups: Any, holders: Sequence[Holder]) -> dict[Any, str]:
    """Return the names for the numbers in the groups of a state dict, if it has numbers.

    Raises:
        StateDictMismatch: If only the order could tell which parameter a number means, and the
            groups of no optimizer, or of several, have these sizes.
    """
    numbers = [list(dict.fromkeys(group[_PARAMS])) for group in groups]
    keys = [key for group in numbers for key in group]
    if not any(isinstance(key, int) for key in keys):
        return {}
    written = {
        number: name
        for group in groups
        for number, name in zip(group[_PARAMS], group.get("param_names") or (), strict=False)
        if isinstance(name, str)
    }
    known = _find_names(written, holders) if len(written) == len(keys) else {}
    # Without empty groups: DCP and torch's functions lose them.
    sizes = [len(group) for group in numbers if group]
    fitting = [
        [held.name for held in each.params]
        for each in holders
        if [len(group) for group in each.groups if group] == sizes
    ]
    # torch goes by the order alone. With names, groups may have another one.
    by_order = dict(zip(keys, fitting[0], strict=True)) if len(fitting) == 1 else {}
    found = by_order
    if any(by_order.get(number) != name for number, name in known.items()):
        found = {number: known.get(number, name) for number, name in written.items()}
    if not found:
        hint = "Load each optimizer in a separate call."
        if not fitting:
            hint = "Give the optimizer the parameter groups it was saved with, in the same order. "
            hint += "Or save it with get_optimizer_state_dict, which names the parameters."
        which = "several optimizers have" if fitting else "no optimizer has"
        raise StateDictMismatch(
            f"the optimizer state dict numbers its parameters, and {which} groups of these sizes",
            found=f"groups of {', '.join(map(str, sizes))} parameters",
            hint=hint,
        )
    # DCP turns every key into text, but not the numbers in the groups' lists.
    return {**found, **{str(key): name for key, name in found.items()}}


def _find_names(written: Mapping[int, str], holders: Iterable[Holder]) -> dict[int, str]:
    """Return the canonical names for the names that an optimizer was made with.

    These may be the names of another wrapper, such as ``module.weight`` of DDP.
    """
    names = {fqn: held.name for each in holders for held in each.params for fqn in held.fqns}
    bare: dict[str, set[str]] = {}
    for fqn, name in names.items():
        bare.setdefault(bare_name(fqn), set()).add(name)
    found: dict[int, str] = {}
    for number, name in written.items():
        alike = {names[name]} if name in names else bare.get(bare_name(name), set())
        if len(alike) == 1:
            found[number] = next(iter(alike))
    return found


def _unflatten(flat: Mapping[str, Any], holders: Iterable[Holder]) -> dict[str, Any]:
    """Return a flat state dict as a nested one, with a group for each parameter."""
    live = {fqn: held.state for each in holders for held in each.params for fqn in held.fqns}
    state: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        section, _, rest = str(key).partition(".")
        name = rest.rpartition(".")[0]
        while name and name not in live:  # a state may be nested, and a key may have dots
            name = name.rpartition(".")[0]
        name = name or rest.rpartition(".")[0]  # no optimizer has this parameter
        if section == _GROUPS:
            groups.setdefault(name, {_PARAMS: [name]})[rest[len(name) + 1 :]] = value
        elif section == _STATE and "." in rest:
            _insert(state.setdefault(name, {}), rest[len(name) + 1 :], value, live.get(name))
        else:
            raise StateDictMismatch(
                "not a key of an optimizer state dict",
                entry=str(key),
                expected="'state' and 'param_groups', or keys that begin with them and a dot",
            )
    return {_STATE: state, _GROUPS: list(groups.values())}


def _insert(state: dict[Any, Any], path: str, value: Any, live: Any) -> None:
    """Rebuild nesting from dots. Keys become integers, or those of the live state."""
    like = live if isinstance(live, Mapping) else {}
    head, _, rest = (path, "", "") if path in like else path.partition(".")
    key: Any = next((k for k in like if _flat_key(k) == head), _unflat_key(head))
    if rest:
        _insert(state.setdefault(key, {}), rest, value, like.get(key))
    else:
        state[key] = value

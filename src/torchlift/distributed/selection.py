"""The part of a checkpoint that a `torchlift.Keeper` resumes, and how it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from glob import escape
from hashlib import sha256
from itertools import chain
from typing import Any, NamedTuple

import torch

from torchlift._checkpoint.checkpoint import Checkpoint
from torchlift._checkpoint.comparison import diff
from torchlift._model.commit import Commit
from torchlift._model.names import Names
from torchlift._model.ranks import StepResult
from torchlift._model.slots import ModuleTree
from torchlift._model.state import versioned
from torchlift._plan.rules import Options, check_rename, rename_keys
from torchlift._system.containers import leaves
from torchlift.distributed.agreements import SelectionMessage
from torchlift.distributed.generators import Generators
from torchlift.distributed.optimizer_state import (
    PLACE,
    name_parameters,
    require_same_groups,
)
from torchlift.distributed.options import (
    LoadCall,
    Part,
    StateDictMismatch,
    StateDictOptions,
)
from torchlift.distributed.run_state import (
    CONTAINERS,
    DIFFERING,
    GENERATORS,
    GROUPS,
    RESERVED,
    RunObjects,
    copy_state,
    load_values,
    params_of,
    read_model_state,
    restore_container,
    unpack,
)
from torchlift.distributed.state_dict import load_states, slices_of
from torchlift.errors import FormatError, MismatchError, PlacementError
from torchlift.formats.index import allowed, left_out
from torchlift.formats.source import errors_name

OnOtherRanks = Mapping[str, Callable[[list[Any]], Any]]


class _StandIn(NamedTuple):
    """A value of other ranks that this rank does not read.

    Attributes:
        path: Its place in the checkpoint.
        value: An empty tensor in its place.
    """

    path: list[Any]
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a checkpoint that rules select for some objects.

    A full name is that of the object and of the tensor in it: ``model.0.weight``.

    Attributes:
        path: The path of the checkpoint.
        run: The objects.
        rules: The rules.
        step: The step that was saved.
        tensors: Full name -> saved value, with the versions of modules.
        optimizers: Name -> state, by full names of parameters.
        groups: Name of an optimizer -> its parameter groups, as the rank saved them.
        others: Name of another object, or of plain data -> its state.
        generators: States of the random number generators, or None if they stay as they are.
        left_out: Full names of tensors that stay as they are.
        stays: Names of objects that stay as they are.
        changed: Names of plain data that was saved with another value. It stays as it is.
    """

    path: str
    run: RunObjects
    rules: Options
    step: int
    tensors: dict[str, Any]
    optimizers: dict[str, dict[str, Any]]
    groups: dict[str, dict[str, Any]]
    others: dict[str, Any]
    generators: Any
    left_out: set[str]
    stays: set[str]
    changed: list[str]

    def message(self) -> SelectionMessage:
        """Return its match with the models of this rank."""
        known = read_model_state(self.run.holder())
        unexpected = sum(1 << at for at, name in enumerate(self.tensors) if name not in known)
        selected = sha256(repr([[*self.tensors], sorted(self.stays)]).encode()).digest()
        # One load has one state for each name. Two optimizers may share a parameter, or each have
        # one that no model has. Then the name is the place in the optimizer. Or each has state that
        # is not a parameter's.
        separate, used, is_one = list[str](), set[object](), len(self.optimizers) == 1
        tensors = self.run.tensors()
        for name, state in self.optimizers.items():
            params = _parameters_of(state)
            is_loose = any(PLACE.match(str(param)) for param in params)
            is_loose = (is_loose or params != _parameters_in_groups(state)) and not is_one
            # An encoder in two models has two names.
            each = {id(tensors[param]) if param in tensors else param for param in params}
            if each & used or is_loose or not self.run.owners[name]:
                separate.append(name)
            used |= each
        return SelectionMessage(selected, unexpected, tuple(separate))

    def require_none_of(self, stand_ins: list[_StandIn], before: int, now: int) -> None:
        """Refuse names of this rank whose values each rank saved for itself, but not this one.

        Raises:
            PlacementError: If one of them is selected.
        """
        known = read_model_state(self.run.holder()) if stand_ins else {}
        here: list[Any] = [value for name, value in self.tensors.items() if name in known]
        for each in self.optimizers.values():
            here.append(each["param_groups"])
            here += [v for k, v in each["state"].items() if k in known or PLACE.match(str(k))]
        selected = {*map(id, leaves(here).values())}
        paths = [each.path for each in stand_ins if id(each.value) in selected]
        if paths:
            # An optimizer's state of one parameter has no name for patterns.
            names = {".".join(path) if path[0] in self.run.modules else path[0] for path in paths}
            cause = "this rank saved none" if before == now else "the number of ranks differs"
            raise PlacementError(
                f"each rank saved its own values under one name, and {cause}",
                file=self.path,
                entry=".".join(map(str, paths[0])),
                expected="the models of this rank" if before == now else f"{before} ranks",
                found="those of another rank" if before == now else now,
                hint=f"Pass exclude={sorted(names)} to keep the current values.",
            )

    def require_groups_of_schedulers(self) -> None:
        """Refuse other parameter groups than those that a scheduler was saved with.

        Raises:
            StateDictMismatch: If they differ.
        """
        for name, obj in self.run.stateful.items():
            for optimizer, groups in self.groups.items() if name in self.others else ():
                if getattr(obj, "optimizer", None) is self.run.optimizers[optimizer]:
                    names = Names(ModuleTree(self.run.holder(self.run.owners[optimizer])))
                    (holder,) = name_parameters(names, [obj.optimizer])
                    require_same_groups(holder, groups, optimizer)

    def require_holders(self) -> None:
        """Refuse optimizer state of a parameter of this rank that its optimizer does not hold.

        Raises:
            StateDictMismatch: If there is some. It would be lost.
        """
        if not self.optimizers:
            return
        held = {
            id(param) for each in self.optimizers for param in params_of(self.run.optimizers[each])
        }
        names = self.run.tensors()
        lost = [
            name
            for each in self.optimizers.values()
            for name, state in each["state"].items()
            if state and name in names and id(names[name]) not in held and name not in self.left_out
        ]
        free = allowed(lost, self.rules.allow_unexpected)
        if lost := [name for name in lost if name not in free]:
            raise StateDictMismatch(
                "the checkpoint has optimizer state of parameters that no loaded optimizer holds",
                file=self.path,
                entry=lost[0],
                found=f"{len(lost)} parameters",
                hint="Give the optimizer the parameters it was saved with. Or pass "
                f"allow_unexpected={lost if len(lost) < 9 else [lost[0], '...']} to load the rest.",
                unexpected_keys=lost,
            )

    def load_optimizer(self, name: str, commit: Commit, group: Any) -> None:
        """Load one optimizer alone, and keep a copy of its state for the undo. All ranks call it.

        Raises:
            CheckpointError: If its state does not fit.
        """
        if any(param.is_meta for param in params_of(self.run.optimizers[name])):
            raise PlacementError(
                "an optimizer that is loaded alone has parameters on meta",
                file=self.path,
                entry=name,
                hint="Call torchlift.materialize(model) before resume.",
            )
        self._load([name], None, group, commit)

    def load_objects(self, commit: Commit) -> list[str]:
        """Load the generators, and all other objects whose current state can be restored.

        Returns:
            The names of the objects whose current state cannot be read.
        """
        now, before, last = Generators().state_dict(), dict[str, Any](), list[str]()
        # In the order of the caller, which is equal on all ranks: a state may need an exchange.
        for name in (name for name in self.run.stateful if name in self.others):
            try:
                before[name] = copy_state(self.run.stateful[name].state_dict())
            except Exception:  # a loader may have a state only after its start
                last.append(name)
        Generators().load_state_dict(now)  # the state_dict of a loader draws random numbers
        commit.when_undone(partial(Generators().load_state_dict, now), GENERATORS)
        for name, state in before.items():
            obj = self.run.stateful[name]
            if hasattr(obj, "__dict__"):  # a load may add attributes, which would stay
                commit.keep_attributes([obj])
            commit.when_undone(partial(obj.load_state_dict, state), name)
            self._load_object(name)
        try:
            self._load_generators()
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise FormatError(
                "the states of the random number generators are not valid",
                file=self.path,
                entry=GENERATORS,
                found=str(error),
            ) from error
        return last

    def load_models(
        self, unexpected: int, unused: int, separate: Collection[str], group: Any
    ) -> None:
        """Load all models and their optimizers, or nothing. All ranks call it.

        Args:
            unexpected: A bit for each saved name that this rank does not have.
            unused: A bit for each saved name that no rank has.
            separate: The optimizers that were loaded alone.
            group: The process group of the ranks, or None.

        Raises:
            CheckpointError: If a name, a shape or a state does not fit.
        """
        free = allowed(self.tensors, self.rules.allow_unexpected)
        # The stages of a pipeline share one checkpoint: other ranks have other names.
        tensors = {
            name: value
            for at, (name, value) in enumerate(self.tensors.items())
            if not unexpected >> at & 1 or (unused >> at & 1 and name not in free)
        }
        state = versioned(tensors, getattr(self.tensors, "_metadata", None))
        names = [name for name in self.optimizers if name not in separate]
        self._load(names, state, group)

    def load_last(self, names: Iterable[str]) -> StepResult[None, None]:
        """Load the objects whose current state could not be read, and the generators again.

        Raises:
            PlacementError: If one refuses its state. All other objects are loaded then.
        """
        try:
            for name in names:
                try:
                    self._load_object(name)
                except Exception as error:
                    raise PlacementError(
                        "the object refused its state. All other objects are loaded. The former "
                        "state of this object could not be read, so its state is unknown",
                        file=self.path,
                        entry=name,
                        found=f"{type(error).__name__}: {error}",
                        hint=f"Pass exclude=[{name!r}] to leave it as it is.",
                    ) from error
        finally:  # code of an object, a model or an optimizer may draw numbers when it loads
            self._load_generators()
        return StepResult(None, None)

    def _load_generators(self) -> None:
        if self.generators is not None:
            Generators().load_state_dict(self.generators)

    def _load_object(self, name: str) -> None:
        # A copy: the object may keep the tensors, and the keeper may remove the file.
        self.run.stateful[name].load_state_dict(copy_state(load_values(self.others[name])))

    def _load(self, names: list[str], state: Any, group: Any, commit: Commit | None = None) -> None:
        """Load the models, and the optimizers with some names. Without a state, one optimizer."""
        states = [self.optimizers[name] for name in names]
        saved = {
            "state": {key: each for one in states for key, each in one["state"].items()},
            "param_groups": [each for one in states for each in one["param_groups"]],
        }
        call = LoadCall(
            Part.OPTIMIZERS if state is None else Part.BOTH,
            self.run.holder(self.run.owners[names[0]] if state is None else None),
            [self.run.optimizers[name] for name in names],
            self.tensors if state is None else state,
            saved if names else {},
            StateDictOptions(full_state_dict=True),
            process_group=group,
            exclude=[*map(escape, self.left_out & _parameters_of(saved))],
            allow_missing=[
                *self.rules.allow_missing,
                *map(escape, self.left_out),
                *(f"{escape(name)}.*" for name in self.stays),
            ],
            leaves_model=not self.tensors,
        )
        try:
            load_states(call, commit)
        except StateDictMismatch as error:
            error.file = error.file or self.path
            self._name_way_out(error, names)
            raise

    def _name_way_out(self, error: StateDictMismatch, optimizers: list[str]) -> None:
        """Name the argument of `Keeper.resume` that permits the load."""
        keys = [*error.mismatched], error.missing_keys, error.unexpected_keys
        ways = ("exclude", "allow_missing", "allow_unexpected")
        texts = [f"{way}=[{of[0]!r}, ...]" for way, of in zip(ways, keys, strict=True) if of]
        skip = f"Pass exclude={optimizers} to keep the current state."
        if error.entry == "param_groups":
            error.hint = f"Make an optimizer of the kind that was saved. {skip}"
        elif any(key not in self.tensors for key in keys[0]) or any(map(PLACE.match, keys[1])):
            error.hint = skip  # optimizer state, which no pattern of model names can match
        elif texts:  # resume has no strict=False: the caller lists each exception
            error.hint = f"Pass {', '.join(texts)} or rename=."


def read_selection(
    ckpt: Checkpoint,
    run: RunObjects,
    rules: Options,
    on_other_ranks: OnOtherRanks,
    rank: int,
    count: int,
) -> Selection:
    """Select the states in a checkpoint for some objects on this rank. Nothing changes.

    Args:
        ckpt: The checkpoint.
        run: The objects.
        rules: The names to load, and their names in the models.
        on_other_ranks: See `Keeper.resume`.
        rank: This rank.
        count: The number of ranks.

    Raises:
        CheckpointError: If a state of an object is missing, or was saved for other ranks only.
        MismatchError: If a rule matches nothing.
    """
    path, saved = ckpt.path, ckpt._tree(None, partial(slices_of, ckpt))
    _require(saved, ["step", "ranks"], path)
    # DCP drops empty dicts, such as the state dict of a model without tensors.
    saved = {**{n: {} for n, each in run.modules.items() if not each.state_dict()}, **saved}
    try:
        by_rank, common = saved.pop("ranks"), saved.pop("packed", {})
        saved |= {name: unpack(common, name) for name in common}
        is_same, own = len(by_rank) == count, by_rank.get(str(rank), {})
        each_own = [by_rank[number] for number in sorted(by_rank, key=int)]
        # Values that differed between ranks go back under their names, which are complete on all
        # ranks. A value of other ranks is a stand-in here. It is refused if it is selected.
        holder = own if is_same else each_own[0]
        differing = unpack(holder, DIFFERING) if DIFFERING in holder else []
        stand_ins = list[_StandIn]()
        lists = [unpack(each, CONTAINERS) for each in each_own if CONTAINERS in each]
        # The outer ones last, because the paths have the changed keys.
        for place, keys in sorted(chain(*lists), key=lambda one: -len(one[0])):
            restore_container(saved, place, keys)
        for (*places, last), kept in differing:
            if kept is None and is_same:
                continue
            if not kept or not is_same:
                kept = [torch.empty(0)]
                stand_ins.append(_StandIn([*places, last], *kept))
            (reduce(_item_of, places, saved)[last],) = kept
        generators = unpack(own, GENERATORS) if GENERATORS in own else None
        groups = unpack(holder, GROUPS) if GROUPS in holder else {}
        if is_same:
            objects = own.keys() - {*RESERVED, GROUPS, CONTAINERS}
            saved |= {name: unpack(own, name) for name in objects}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise FormatError(
            "the states of the ranks are not those that a Keeper saves",
            file=path,
            entry="ranks",
            found=f"{type(error).__name__}: {error}",
        ) from error
    for name in (name for name in on_other_ranks if not is_same and name not in saved):
        states = [unpack(states, name) for states in each_own if name in states]
        saved[name] = on_other_ranks[name](copy_state(load_values(states)))
    with errors_name(path):
        selection = _select(path, run, rules, saved, generators, groups)
    selection.require_none_of(stand_ins, len(by_rank), count)
    selection.require_groups_of_schedulers()
    selection.require_holders()
    needed_names = [name for name in run.names if name not in selection.stays]
    lost = [name for name in needed_names if name not in saved]
    lost = [name for name in lost if any(name in states for states in each_own)]
    if lost and not is_same:
        raise PlacementError(
            "each rank saved its own state of some objects, and the number of ranks differs",
            file=path,
            entry=", ".join(lost),
            expected=f"{len(by_rank)} ranks",
            found=count,
            hint=f"Pass on_other_ranks={{{lost[0]!r}: function}}. The function gets the list of "
            "all saved states, and returns the state of this rank.",
        )
    _require(saved, needed_names, path)
    return selection


def _item_of(container: Any, key: Any) -> Any:
    """Return an item of a list, or of a dict: DCP drops a dict that is empty."""
    return container[key] if isinstance(container, list) else container.setdefault(key, {})


def _require(saved: Mapping[str, object], names: Iterable[str], path: str) -> None:
    for name in names:
        if name not in saved:
            raise FormatError(
                "the checkpoint does not have a state for an object",
                file=path,
                entry=name,
                expected=f"one of {', '.join(map(repr, saved))}",
            )


def _select(
    path: str,
    run: RunObjects,
    rules: Options,
    saved: Mapping[str, Any],
    generators: Any,
    groups: Mapping[str, Any],
) -> Selection:
    """Apply the rules to the states of a checkpoint.

    Args:
        path: The path of the checkpoint.
        run: The objects.
        rules: The rules.
        saved: The states by name.
        generators: States of the random number generators.
        groups: Name of an optimizer -> its groups on this rank, if they differ from those saved.

    Raises:
        FormatError: If a state is of another kind than its object.
        MismatchError: If a pattern matches nothing, or nothing is left.
        MismatchError: If a new name is that of another object or of two tensors.
    """
    step = saved["step"]
    if type(step) is not int or step < 0:
        raise FormatError("the step is not valid", entry="step", found=repr(step))
    states, versions = dict[str, Any](), dict[str, Any]()
    for name in (name for name in run.models if name in saved):
        state = saved[name]
        if not isinstance(state, dict) or (name in run.optimizers and "param_groups" not in state):
            raise FormatError("the saved state is of another kind of object", entry=name)
        if name in run.modules:
            states |= {f"{name}.{key}": value for key, value in state.items()}
            for inside, version in getattr(state, "_metadata", {}).items():
                versions[f"{name}.{inside}".removesuffix(".")] = version
    # Patterns match the names of tensors, and those of all other objects as they are.
    others = [*run.optimizers, *run.stateful, GENERATORS]
    check_rename(rules.rename, states, path)
    out = left_out([*states, *others], (), rules.include, rules.exclude, path)
    # The kept names first: a new head may have the name of an old one that is left out.
    kept = rename_keys([name for name in states if name not in out], rules.rename, path)
    left = rename_keys([name for name in states if name in out], rules.rename, path)
    taken = {*kept.values()}
    names = {**kept, **{old: new for old, new in left.items() if new not in taken}}
    for old, new in names.items():
        owner = old.partition(".")[0] + "."
        if not new.startswith(owner):
            raise MismatchError(
                "rename= moves a tensor to another object",
                entry=old,
                expected=f"a name that begins with {owner!r}",
                found=new,
            )
    # Objects that the rules leave out, or that the checkpoint may lack.
    stays = {name for name in others if name in out}
    stays |= allowed([name for name in run.names if name not in saved], rules.allow_missing)
    found = {name: saved[name] for name in saved if name not in stays}
    new_names = {name: names.get(name) for name in states}
    plain = {name: value for name, value in run.plain.items() if name in found}

    def rename_all(name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        return _full_names(state, run.owners[name], new_names)

    optimizers = {name: found[name] for name in run.optimizers if name in found}
    own = {
        name: {"param_groups": groups.get(name, optimizers[name]["param_groups"])}
        for name in optimizers
    }
    return Selection(
        path,
        run,
        rules,
        step,
        versioned({new: states[old] for old, new in kept.items()}, versions or None),
        {name: rename_all(name, state) for name, state in optimizers.items()},
        {name: rename_all(name, state) for name, state in own.items()},
        {name: found[name] for name in (*run.stateful, *run.plain) if name in found},
        None if GENERATORS in stays else load_values(generators),
        {names[name] for name in out if name in names},
        stays,
        [n for n in plain if not diff({n: plain[n]}, {n: load_values(found[n])}).equal],
    )


def _full_names(
    saved: Mapping[str, Any], owners: list[str], names: Mapping[str, str | None]
) -> dict[str, Any]:
    """Return the state of an optimizer by new and full names of parameters.

    Args:
        saved: By the names of parameters in their model. With several models, by full names.
        owners: The models.
        names: Full name -> new name, or None for a tensor that is dropped.
    """

    def rename(key: Any) -> Any:
        if not isinstance(key, str) or PLACE.fullmatch(key):
            return key  # a parameter that no model has
        full = f"{owners[0]}.{key}" if len(owners) == 1 else key
        return names.get(full, full)

    # DCP drops an empty state. State that is not a parameter's has a key of its own.
    known = _parameters_in_groups(saved)
    state = {rename(k) if k in known else k: v for k, v in saved.get("state", {}).items()}
    groups = [
        {**group, "params": [new for key in group["params"] if (new := rename(key)) is not None]}
        for group in saved["param_groups"]
    ]
    return {"state": {k: v for k, v in state.items() if k is not None}, "param_groups": groups}


def _parameters_of(state: Mapping[str, Any]) -> set[str]:
    """Return the names of parameters in the state of an optimizer, and those of other state."""
    return _parameters_in_groups(state) | {*state["state"]}


def _parameters_in_groups(state: Mapping[str, Any]) -> set[str]:
    return {key for group in state["param_groups"] for key in group["params"]}

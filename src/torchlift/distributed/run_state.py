"""What the state of a run contains: objects by name, what each of them gives, and takes back."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Set, ValuesView
from dataclasses import dataclass, field
from functools import partial, reduce
from glob import escape
from hashlib import sha256
from operator import getitem
from typing import Any

import torch
from torch import nn

from torchlift._checkpoint.checkpoint import Checkpoint
from torchlift._checkpoint.checkpoint import open as open_checkpoint
from torchlift._checkpoint.comparison import diff
from torchlift._checkpoint.kinds import array_of
from torchlift._model.commit import Commit
from torchlift._model.dtensor import is_dtensor
from torchlift._model.names import Names, uses_fsdp1
from torchlift._model.own_loading import ModuleHolder
from torchlift._model.ranks import StepResult
from torchlift._model.slots import ModuleTree
from torchlift._model.state import versioned
from torchlift._plan.rules import Options, check_rename, rename_keys
from torchlift._save.blocks import memory_of
from torchlift._save.pickling import is_array
from torchlift._save.saving import require_savable
from torchlift._sources.tensors import FileTensor
from torchlift._system.containers import leaves, map_leaves
from torchlift.distributed.agreements import FitMessage
from torchlift.distributed.generators import Generators
from torchlift.distributed.optimizer_state import PLACE, require_same_groups
from torchlift.distributed.options import (
    LoadCall,
    Part,
    StateDictMismatch,
    StateDictOptions,
    require_groups,
)
from torchlift.distributed.state_dict import load_states, read_states, slices_of
from torchlift.errors import CheckpointError, FormatError, MismatchError, PlacementError
from torchlift.formats.index import Array, allowed, left_out
from torchlift.formats.source import errors_name

#: What rules call the states of the random number generators.
GENERATORS = "rng"
#: Names that a checkpoint needs for itself. In a DCP folder, plain data is packed.
_RESERVED = ("step", "metrics", GENERATORS, "ranks", "packed", "differing")
#: Where a rank has the values that differ from those of other ranks under one name.
DIFFERING = "differing"
#: The key of a dict that stands for an array of numpy. Its value is the array's dtype and shape.
_ARRAY = "numpy.ndarray"

OnOtherRanks = Mapping[str, Callable[[list[Any]], Any]]


# ---- the objects of a run


@dataclass(frozen=True, slots=True)
class RunObjects:
    """The objects of a run by name.

    Attributes:
        modules: the models.
        optimizers: the optimizers of their parameters.
        owners: name of an optimizer -> the models that have its parameters.
        stateful: other objects with ``state_dict`` and ``load_state_dict``.
        plain: plain data and tensors.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    owners: dict[str, list[str]] = field(default_factory=dict)
    stateful: dict[str, Any] = field(default_factory=dict)
    plain: dict[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, objects: Mapping[Any, object]) -> RunObjects:
        """Sort objects by what they are.

        Raises:
            PlacementError: If `Keeper.resume` could not put an object back.
            ValueError: If a name is reserved, or an optimizer has no model.
        """
        run = cls()
        for name, obj in objects.items():
            if not isinstance(name, str) or not name or "." in name or name in _RESERVED:
                known = ", ".join(_RESERVED)
                raise ValueError(f"{name!r} cannot name an object: expected a word, not {known}")
            try:
                _require_resumable(obj)
            except CheckpointError as error:
                error.entry = name
                raise
            if isinstance(obj, nn.Module):
                run.modules[name] = obj
            elif isinstance(obj, torch.optim.Optimizer):
                run.optimizers[name] = obj
            else:
                (run.stateful if _gives_state(obj) else run.plain)[name] = obj
        ids = {name: set(map(id, module.parameters())) for name, module in run.modules.items()}
        for name, optimizer in run.optimizers.items():
            if not run.modules:
                raise ValueError(f"{name}: no module among the objects has its parameters")
            params = set(map(id, _params(optimizer)))
            # Of tied ones the first that has all of them; or several, or none, have some.
            whole = [each for each in ids if params and params <= ids[each]][:1]
            run.owners[name] = whole or [each for each in ids if params & ids[each]]
        return run

    @property
    def names(self) -> list[str]:
        """Return the names of all objects that have a state."""
        return [*self.modules, *self.optimizers, *self.stateful]

    @property
    def models(self) -> tuple[str, ...]:
        """Return the names of models and optimizers, in whose states all ranks have a part."""
        return tuple(sorted([*self.modules, *self.optimizers]))

    def holder(self, names: Iterable[str] | None = None) -> nn.Module:
        """Return a module that has all models, or those of some names."""
        return ModuleHolder(self.modules if names is None else {n: self.modules[n] for n in names})

    def read_models(self) -> dict[str, Any]:
        """Return the states of models and optimizers by the objects' names. No rank is asked."""
        states: dict[str, Any] = {name: _read(each) for name, each in self.modules.items()}
        for name, optimizer in self.optimizers.items():
            owners = self.owners[name]
            # Of one model the names are those in it, as `load_optimizer` expects them.
            holder = self.modules[owners[0]] if len(owners) == 1 else self.holder(owners)
            states[name] = read_states(holder, optimizer, part=Part.OPTIMIZERS)[1]
        return states

    def find_plain(self, states: Mapping[str, Any]) -> dict[tuple[Any, ...], torch.Tensor]:
        """Return path -> a parameter or optimizer state that is no DTensor, out of the states.

        Ranks may have other values for it, such as experts under one name, or 8-bit moments of
        their shards (bitsandbytes#1840). Of buffers the first rank's count, as in torch.
        """
        found = leaves({name: states[name] for name in self.optimizers})
        for name, module in self.modules.items():
            for key, tensor in Names(ModuleTree(module)).tensors.items():
                if isinstance(tensor, nn.Parameter) and key in states[name]:
                    found[name, key] = states[name][key]
        return {
            path: leaf
            for path, leaf in found.items()
            if isinstance(leaf, torch.Tensor)
            and not is_dtensor(leaf)
            and isinstance(reduce(getitem, path[:-1], states), dict)
        }

    def read_others(self) -> dict[str, Any]:
        """Return the states of all other objects, and the plain data, by name."""
        states = {name: obj.state_dict() for name, obj in self.stateful.items()}
        return {name: _arrays_to_tensors(state) for name, state in {**states, **self.plain}.items()}

    def groups(self, states: Mapping[str, Any]) -> dict[tuple[str, tuple[str, ...]], Any]:
        """Return (optimizer, names of its parameters) -> the parameter group, out of its state."""
        return {
            (name, tuple(group["params"])): group
            for name in self.optimizers
            for group in states[name]["param_groups"]
        }


def _read(module: nn.Module) -> dict[str, Any]:
    return read_states(module, part=Part.MODEL)[0]


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _require_resumable(obj: Any) -> None:
    """Refuse an object that `Keeper.resume` could not put back.

    Raises:
        CheckpointError: If it is one. The caller adds its name.
    """
    require_groups(obj)
    problem = hint = ""
    if uses_fsdp1(obj):
        problem = (
            "a Keeper does not keep a FullyShardedDataParallel, of whose state each rank has flat "
            "pieces"
        )
        hint = (
            "Shard the model with fully_shard; or torchlift.save what "
            "torchlift.distributed.get_state_dict returns with full_state_dict=True."
        )
    elif _gives_state(obj) and not callable(getattr(obj, "load_state_dict", None)):
        problem = "has state_dict, but not load_state_dict"
        hint = "Add that method, or pass what state_dict() returns: plain data."
    elif _holds_state(obj, set()):
        problem = "a container of objects that have a state, which resume would not find"
        hint = "Pass each under a name: **{f'model_{n}': each for n, each in enumerate(models)}."
    if problem:
        raise PlacementError(problem, found=type(obj).__name__, hint=hint)


def _holds_state(obj: object, above: set[int]) -> bool:
    """Return whether a container holds an object with a state, at any depth."""
    kinds = (Mapping, ValuesView, Set, list, tuple, deque)
    if not isinstance(obj, kinds) or id(obj) in above:
        return False
    items: Iterable[object] = obj.values() if isinstance(obj, Mapping) else obj
    above = above | {id(obj)}  # a container may be inside of itself
    return any(_gives_state(item) or _holds_state(item, above) for item in items)


def _gives_state(obj: object) -> bool:
    return not isinstance(obj, type) and callable(getattr(obj, "state_dict", None))


# ---- how states are stored


def digest_of(state: Mapping[str, Any], path: str, *, compare: bool) -> bytes:
    """Return a digest that is equal on ranks with the same state of an object.

    Args:
        state: name -> state.
        path: where it is to be saved, for errors.
        compare: whether there are other ranks; else the state is only checked.

    Raises:
        PlacementError: If it cannot be saved so that it can be resumed.
    """
    output, made = require_savable(state, path), sha256()
    for place, data in output.data() if compare else ():
        made.update(b"%d" % place)
        made.update(data)
    return made.digest()


def pack(states: Mapping[str, Any], path: str) -> torch.Tensor:
    """Return states as a torch file in the bytes of a tensor: names in a DCP folder are text."""
    output = require_savable(states, path)
    ((section,),) = output.files.values()
    packed = torch.empty(section.layout.nbytes, dtype=torch.uint8)
    room = memory_of(packed)
    for place, data in output.data():
        room[place : place + len(data)] = data
    return packed


def _unpack(packed: Any) -> dict[str, Any]:
    values = packed.tensor() if isinstance(packed, FileTensor) else packed
    with open_checkpoint(io.BytesIO(memory_of(values.contiguous()))) as ckpt:
        found: dict[str, Any] = ckpt.tree()
    return found


def _arrays_to_tensors(state: Any) -> Any:
    """Return a state with tensors of bytes for numpy's arrays, which files store as lists."""

    def store(leaf: Any, _: object) -> Any:
        if not is_array(leaf):
            return leaf
        values = torch.frombuffer(bytearray(leaf.tobytes() or b"0"), dtype=torch.uint8)
        return {_ARRAY: [leaf.dtype.str, list(leaf.shape)], "bytes": values[: leaf.nbytes]}

    return map_leaves(state, store) if any(map(is_array, leaves(state).values())) else state


def _load_values(state: Any) -> Any:
    """Return a state with the arrays that `_arrays_to_tensors` stored, and tensors for slices."""
    if isinstance(state, FileTensor):
        return state.tensor()
    if isinstance(state, dict) and _ARRAY in state:
        (code, shape), values = state[_ARRAY], _load_values(state["bytes"])
        return array_of(Array(code, tuple(shape), False, bytes(memory_of(values.contiguous()))))
    if type(state) in (dict, OrderedDict):
        return type(state)((name, _load_values(item)) for name, item in state.items())
    if type(state) in (list, tuple):
        return type(state)(map(_load_values, state))
    return state


# ---- what a checkpoint has for the objects


@dataclass(frozen=True, slots=True)
class Selection:
    """What rules select of a checkpoint for some objects. Full names: ``model.0.weight``.

    Attributes:
        path: of the checkpoint.
        run: the objects.
        rules: what selects.
        step: that was saved.
        tensors: full name -> saved value, with the versions of modules.
        optimizers: name -> state, by full names of parameters.
        others: name of another object, or of plain data -> its state.
        generators: states of the random number generators, or None if they stay.
        left_out: full names of tensors that stay as they are.
        stays: names of objects that stay as they are.
    """

    path: str
    run: RunObjects
    rules: Options
    step: int
    tensors: dict[str, Any]
    optimizers: dict[str, dict[str, Any]]
    others: dict[str, Any]
    generators: Any
    left_out: set[str]
    stays: set[str]

    def fit(self) -> FitMessage:
        """Return how it fits the models of this rank."""
        known = _read(self.run.holder())
        unexpected = sum(1 << at for at, name in enumerate(self.tensors) if name not in known)
        selected = sha256(repr([[*self.tensors], sorted(self.stays)]).encode()).digest()
        # One load knows one state for each parameter's name. Two optimizers may share a parameter,
        # or have one that no model has, whose name is its place in the optimizer.
        apart, taken = list[str](), set[str]()
        for name, state in self.optimizers.items():
            params = _parameters_of(state)
            is_loose = any(PLACE.match(str(param)) for param in params) and len(self.optimizers) > 1
            if params & taken or is_loose or not self.run.owners[name]:
                apart.append(name)
            taken |= params
        return FitMessage(selected, unexpected, tuple(apart))

    def require_none_of(self, differing: list[Any], before: int, now: int) -> None:
        """Refuse values of which each rank that saved has its own, on another number of ranks.

        Raises:
            PlacementError: If one of them is selected.
        """
        selected = {*map(id, leaves([self.tensors, self.optimizers]).values())}
        paths = [path for path, value in differing if id(value) in selected]
        if paths:
            # An optimizer's state of one parameter has no name for patterns.
            names = {".".join(path) if path[0] in self.run.modules else path[0] for path in paths}
            raise PlacementError(
                "each rank that saved has values of its own under one name, and now there are "
                "other ranks",
                file=self.path,
                entry=".".join(map(str, paths[0])),
                expected=f"{before} ranks",
                found=now,
                hint=f"Pass exclude={sorted(names)} to leave them as they are.",
            )

    def require_groups_of_schedulers(self) -> None:
        """Refuse another number of parameter groups than a scheduler was saved with.

        Raises:
            StateDictMismatch: If one was.
        """
        for name, obj in self.run.stateful.items():
            for optimizer, state in self.optimizers.items() if name in self.others else ():
                if getattr(obj, "optimizer", None) is self.run.optimizers[optimizer]:
                    require_same_groups(obj.optimizer, state, optimizer)

    def load_optimizer(self, name: str, commit: Commit, group: Any) -> None:
        """Load one optimizer by itself. A copy of its state is kept, to undo it. All ranks call it.

        Raises:
            CheckpointError: If its state does not fit.
        """
        if any(param.is_meta for param in _params(self.run.optimizers[name])):
            raise PlacementError(
                "an optimizer that is loaded by itself has parameters on meta",
                file=self.path,
                entry=name,
                hint="Call torchlift.materialize(model) before resume.",
            )
        self._load([name], None, group, commit)

    def load_objects(self, commit: Commit) -> list[str]:
        """Load the generators, and all other objects whose own state can be given back.

        Returns:
            The names of those whose own state cannot be read.
        """
        now, before, last = Generators().state_dict(), dict[str, Any](), list[str]()
        for name in self.run.stateful.keys() & self.others.keys():
            try:
                before[name] = copy.deepcopy(self.run.stateful[name].state_dict())
            except Exception:  # a loader may have a state only after its start
                last.append(name)
        Generators().load_state_dict(now)  # a loader draws numbers when it is asked for its state
        commit.when_undone(partial(Generators().load_state_dict, now), GENERATORS)
        for name, state in before.items():
            obj = self.run.stateful[name]
            if hasattr(obj, "__dict__"):  # a load may add attributes, which would stay
                commit.keep_attributes([obj])
            commit.when_undone(partial(obj.load_state_dict, state), name)
            self._load_object(name)
        if self.generators is not None:
            Generators().load_state_dict(self.generators)
        return last

    def load_models(self, nobodys: int, apart: Collection[str], group: Any) -> None:
        """Load all models and their optimizers: all or nothing, on all ranks, which call it.

        Args:
            nobodys: a bit for each saved name that no rank has.
            apart: the optimizers that were loaded by themselves.
            group: the process group of the ranks, or None.

        Raises:
            CheckpointError: If a name, a shape or a state does not fit.
        """
        known, tensors = _read(self.run.holder()), dict[str, Any]()
        free = allowed(self.tensors, self.rules.allow_unexpected)
        for at, (name, value) in enumerate(self.tensors.items()):
            # The stages of a pipeline share one checkpoint: other ranks have other names.
            if name in known or (nobodys >> at & 1 and name not in free):
                tensors[name] = value
        state = versioned(tensors, getattr(self.tensors, "_metadata", None))
        names = [name for name in self.optimizers if name not in apart]
        self._load(names, state, group)

    def load_last(self, names: Iterable[str]) -> StepResult[None, None]:
        """Load the objects whose own state could not be read.

        Raises:
            PlacementError: If one refuses its state. All other objects are loaded by then.
        """
        for name in names:
            try:
                self._load_object(name)
            except Exception as error:
                raise PlacementError(
                    "the object refuses its state. All others are loaded. Its own state could not "
                    "be read before, so it is in doubt",
                    file=self.path,
                    entry=name,
                    found=f"{type(error).__name__}: {error}",
                    hint=f"Pass exclude=[{name!r}]: it stays as it is.",
                ) from error
        return StepResult(None, None)

    def changed_plain_data(self) -> list[str]:
        """Return the names of plain data that was saved with another value. It stays what it is."""
        return [
            name
            for name, value in self.run.plain.items()
            if name in self.others
            and not diff({name: value}, {name: _load_values(self.others[name])}).equal
        ]

    def _load_object(self, name: str) -> None:
        # The object may keep what it gets, and a sweep removes the file: no maps.
        self.run.stateful[name].load_state_dict(copy.deepcopy(_load_values(self.others[name])))

    def _load(self, names: list[str], state: Any, group: Any, commit: Commit | None = None) -> None:
        """Load all models and optimizers of some names; without a state, one optimizer alone."""
        states = [self.optimizers[name] for name in names]
        saved = {
            "state": {key: each for one in states for key, each in one["state"].items()},
            "param_groups": [each for one in states for each in one["param_groups"]],
        }
        call = LoadCall(
            Part.OPTIMIZERS if state is None else Part.BOTH,
            self.run.holder(self.run.owners[names[0]] if state is None else None),
            [self.run.optimizers[name] for name in names],
            state,
            saved if names else {},
            StateDictOptions(full_state_dict=True),
            process_group=group,
            exclude=[*map(escape, self.left_out & _parameters_of(saved))],
            allow_missing=[
                *self.rules.allow_missing,
                *map(escape, self.left_out),
                *(f"{escape(name)}.*" for name in self.stays),
            ],
        )
        try:
            load_states(call, commit)
        except StateDictMismatch as error:
            error.file = error.file or self.path
            self._name_way_out(error, names)
            raise

    def _name_way_out(self, error: StateDictMismatch, optimizers: list[str]) -> None:
        """Name the argument of `Keeper.resume` with which the rest can be loaded."""
        keys = [*error.mismatched], error.missing_keys, error.unexpected_keys
        ways = ("exclude", "allow_missing", "allow_unexpected")
        texts = [f"{way}=[{of[0]!r}, ...]" for way, of in zip(ways, keys, strict=True) if of]
        anew = (
            f"Pass exclude={optimizers} to leave {'it' if len(optimizers) == 1 else 'them'} as is."
        )
        if error.entry == "param_groups":
            error.hint = f"Make an optimizer of the kind that was saved. {anew}"
        elif any(key not in self.tensors for key in keys[0]) or any(map(PLACE.match, keys[1])):
            error.hint = anew  # the state of an optimizer: no pattern of names in a model fits it
        elif texts:  # not strict=False: all names must fit, but those that the caller lists
            error.hint = f"Pass {', '.join(texts)} or rename=."


def read_selection(
    ckpt: Checkpoint,
    run: RunObjects,
    rules: Options,
    on_other_ranks: OnOtherRanks,
    rank: int,
    count: int,
) -> Selection:
    """Read what a checkpoint has for some objects on this rank. Nothing changes.

    Args:
        ckpt: the checkpoint.
        run: the objects.
        rules: which names to load, and what these are in the models.
        on_other_ranks: see `Keeper.resume`.
        rank: this one.
        count: how many ranks there are.

    Raises:
        CheckpointError: If it has no state for an object, or not for this number of ranks.
        MismatchError: If a rule fits nothing.
    """
    path, saved = ckpt.path, ckpt._tree(None, partial(slices_of, ckpt))
    _require(saved, ["step", "ranks"], path)
    by_rank, own_number = saved.pop("ranks"), str(rank)
    is_same = len(by_rank) == count
    if "packed" in saved:
        saved |= _unpack(saved.pop("packed"))
        needed = {own_number} & {*by_rank} if is_same else {*by_rank}
        by_rank |= {number: _unpack(by_rank[number]) for number in needed}
    # DCP leaves out what is empty.
    saved = {**{n: {} for n, each in run.modules.items() if not each.state_dict()}, **saved}
    mine, each_own = by_rank.get(own_number, {}), [by_rank[n] for n in sorted(by_rank, key=int)]
    differing = (mine if is_same else each_own[0]).get(DIFFERING, [])
    for (*places, last), value in differing:
        # DCP leaves out what is empty.
        reduce(lambda inside, key: inside.setdefault(key, {}), places, saved)[last] = value
    if is_same:
        saved |= mine
    else:
        for name in on_other_ranks.keys() - saved.keys():
            states = [states[name] for states in each_own if name in states]
            saved[name] = on_other_ranks[name](copy.deepcopy(_load_values(states)))
    with errors_name(path):
        selection = _select(path, run, rules, saved, mine.get(GENERATORS))
    if not is_same:
        selection.require_none_of(differing, len(by_rank), count)
    selection.require_groups_of_schedulers()
    needed_names = [name for name in run.names if name not in selection.stays]
    lost = [name for name in needed_names if name not in saved]
    lost = [name for name in lost if any(name in states for states in each_own)]
    if lost:
        raise PlacementError(
            "each rank that saved has a state of its own for some objects, and now there are "
            "other ranks",
            file=path,
            entry=", ".join(lost),
            expected=f"{len(by_rank)} ranks",
            found=count,
            hint=f"Pass on_other_ranks={{{lost[0]!r}: function}}, which makes the state of a "
            "rank out of the list of theirs.",
        )
    _require(saved, needed_names, path)
    return selection


def _require(saved: Mapping[str, object], names: Iterable[str], path: str) -> None:
    for name in names:
        if name not in saved:
            raise FormatError(
                "has no state for an object",
                file=path,
                entry=name,
                expected=f"one of {', '.join(map(repr, saved))}",
            )


def _select(
    path: str, run: RunObjects, rules: Options, saved: Mapping[str, Any], generators: Any
) -> Selection:
    """Return what rules select of the states of a checkpoint.

    Raises:
        FormatError: If a state is not one of its object.
        MismatchError: If a pattern fits nothing or nothing is left, or a new name is that of
            another object or of two tensors.
    """
    step = saved["step"]
    if type(step) is not int or step < 0:
        raise FormatError("has no step", entry="step", found=repr(step))
    states, versions = dict[str, Any](), dict[str, Any]()
    for name in (name for name in run.models if name in saved):
        state = saved[name]
        if not isinstance(state, dict) or (name in run.optimizers and "param_groups" not in state):
            raise FormatError("has the state of another kind of object", entry=name)
        if name in run.modules:
            states |= {f"{name}.{key}": value for key, value in state.items()}
            for inside, version in getattr(state, "_metadata", {}).items():
                versions[f"{name}.{inside}".removesuffix(".")] = version
    others = [*run.optimizers, *run.stateful, GENERATORS]
    check_rename(rules.rename, states, path)
    out = left_out([*states, *others], (), rules.include, rules.exclude, path)
    # In two steps: a new head may have the name of the old one, which is left out.
    kept = rename_keys([name for name in states if name not in out], rules.rename, path)
    left = rename_keys([name for name in states if name in out], rules.rename, path)
    taken = {*kept.values()}
    names = {**kept, **{old: new for old, new in left.items() if new not in taken}}
    for old, new in names.items():
        owner = old.partition(".")[0] + "."
        if not new.startswith(owner):
            raise MismatchError(
                "rename gives a name outside of the object",
                entry=old,
                expected=f"a name that begins with {owner!r}",
                found=new,
            )
    stays = {name for name in others if name in out}
    stays |= allowed([name for name in run.names if name not in saved], rules.allow_missing)
    found = {name: saved[name] for name in saved if name not in stays}
    generators = None if GENERATORS in stays else _load_values(generators)
    try:
        if generators is not None:
            Generators().check(generators)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FormatError(
            "no states of random number generators", entry=GENERATORS, found=str(error)
        ) from error
    new_names = {name: names.get(name) for name in states}
    return Selection(
        path,
        run,
        rules,
        step,
        versioned({new: states[old] for old, new in kept.items()}, versions or None),
        {n: _full_names(found[n], run.owners[n], new_names) for n in run.optimizers if n in found},
        {name: found[name] for name in (*run.stateful, *run.plain) if name in found},
        generators,
        {names[name] for name in out if name in names},
        stays,
    )


def _full_names(
    saved: Mapping[str, Any], owners: list[str], names: Mapping[str, str | None]
) -> dict[str, Any]:
    """Return the state of an optimizer by new and full names of parameters.

    Args:
        saved: by the names of parameters in their model; of several models by full names.
        owners: the models.
        names: full name -> new name, or None for a tensor that is dropped.
    """

    def rename(key: Any) -> Any:
        if not isinstance(key, str) or PLACE.fullmatch(key):
            return key  # of a parameter that no model has
        full = f"{owners[0]}.{key}" if len(owners) == 1 else key
        return names.get(full, full)

    state = {rename(key): each for key, each in saved.get("state", {}).items()}  # DCP: if not empty
    groups = [
        {**group, "params": [new for key in group["params"] if (new := rename(key)) is not None]}
        for group in saved["param_groups"]
    ]
    return {"state": {k: v for k, v in state.items() if k is not None}, "param_groups": groups}


def _parameters_of(state: Mapping[str, Any]) -> set[str]:
    """Return the names of parameters in the state of an optimizer."""
    listed = {key for group in state["param_groups"] for key in group["params"]}
    return listed | {*state["state"]}

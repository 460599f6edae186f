"""The state of a run in a checkpoint, for one rank, and its load: all objects or none."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from torchlift._checkpoint.checkpoint import Checkpoint
from torchlift._checkpoint.comparison import diff
from torchlift._checkpoint.kinds import Values, array_of
from torchlift._model.commit import Commit
from torchlift._model.names import Names
from torchlift._model.ranks import StepResult
from torchlift._model.slots import ModuleTree, read_tree
from torchlift._model.state import versioned
from torchlift._save.blocks import memory_of
from torchlift._save.pickling import holds_numbers
from torchlift._sources.tensors import FileTensor
from torchlift._system.containers import leaves
from torchlift._system.memory import collection_paused
from torchlift.distributed.generators import Generators
from torchlift.distributed.optimizer_state import (
    PLACE,
    Holder,
    name_parameters,
    params_of,
)
from torchlift.distributed.options import (
    LoadCall,
    Part,
    StateDictMismatch,
    StateDictOptions,
)
from torchlift.distributed.run_state import (
    ARRAY,
    GENERATORS,
    HEAD,
    RunObjects,
    read_model_state,
)
from torchlift.distributed.state_dict import Job, prepare, slices_of
from torchlift.errors import CheckpointError, FormatError, PlacementError
from torchlift.formats.index import Array
from torchlift.formats.runs import RankItem, item_key, read_item
from torchlift.formats.torch_pickle import Blocked, OrderedRecord

#: Name of an object -> the function that makes the state of this rank of those of other ranks.
OnOtherRanks = Mapping[str, Callable[[list[Any]], Any]]

#: What a damaged checkpoint raises in code that expects another content.
_DAMAGE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError)


@contextmanager
def _damage_named(path: str, entry: str) -> Iterator[None]:
    """Raise a `FormatError` in place of what a state of another form raises."""
    try:
        yield
    except CheckpointError as error:
        error.file, error.entry = error.file or path, error.entry or entry
        raise
    except _DAMAGE as error:
        raise FormatError(
            "the saved state is not one that a Keeper saves for this object",
            file=path,
            entry=entry,
            found=f"{type(error).__name__}: {error}",
        ) from error


class _Records(Values):
    """The states in the item of a rank. A tensor is read when it is used."""

    def __init__(self, ckpt: Checkpoint) -> None:
        super().__init__(ckpt.path)
        self._ckpt, index = ckpt, ckpt._index
        self._entries = {**index.entries, **index.hidden}

    def tensor(self, record: Any, key: str | None) -> object:
        return slices_of(self._ckpt, self._entries[record.key])

    def blocked(self, record: Blocked, key: str | None) -> object:
        raise FormatError("the state has an object of a class", found=record.name)


@dataclass(frozen=True)
class SavedRun:
    """The states in a checkpoint of a Keeper.

    Attributes:
        ckpt: The checkpoint.
        rank: The number of this rank.
        count: The number of ranks now.
    """

    ckpt: Checkpoint
    rank: int
    count: int
    _items: dict[int, RankItem] = field(default_factory=dict)

    def item(self, rank: int) -> RankItem:
        """Return what a rank saved, with records in place of values.

        Raises:
            FormatError: If the checkpoint lacks it.
        """
        index, key, path = self.ckpt._index, item_key(rank), self.ckpt.path
        if rank in self._items:
            return self._items[rank]
        if self.ckpt.format != "dcp":
            saved = self.ckpt._tree(None, partial(slices_of, self.ckpt))
            (own,) = saved.pop("ranks").values()
            found = RankItem(1, {}, own[GENERATORS], saved)
        elif key in index.hidden:
            view = self.ckpt._view(index.hidden[key])
            found = read_item(bytes(memory_of(view.contiguous())))
        else:
            raise FormatError(
                "the folder does not have the item of a rank, as those of a Keeper have",
                file=path,
                entry=key,
                hint=f"Load a model with torchlift.load(model, {path!r}, root='model'), and its "
                "optimizer with torchlift.distributed.load_optimizer(model, optimizer, "
                f"{path!r}, root='optimizer').",
            )
        self._items[rank] = found
        return found

    @property
    def ranks(self) -> int:
        """Return the number of ranks that saved."""
        return self.item(0).ranks

    @property
    def is_same(self) -> bool:
        """Return whether as many ranks saved as there are now."""
        return self.ranks == self.count

    def values(self, records: Any) -> Any:
        """Return the values of records."""
        return records if self.ckpt.format != "dcp" else _Records(self.ckpt).made(records, None)

    def parts(self, name: str) -> dict[int, Any]:
        """Return the states that ranks saved of an object, by rank, as records.

        Ranks with the state of the first rank are left out.

        Raises:
            FormatError: If no rank saved one.
        """
        ranks = [0, *self.item(0).own.get(name, [])]
        found = {n: self.item(n).saved[name] for n in ranks if name in self.item(n).saved}
        if not found:
            raise self._lacking(name)
        return found

    def _lacking(self, name: str) -> FormatError:
        known = [each for each in self.item(0).saved if each not in HEAD]
        return FormatError(
            "the checkpoint does not have a state for an object",
            entry=name,
            expected=f"one of {', '.join(map(repr, known))}",
            hint=f"Resume without {name}.",
        )

    def own_part(self, name: str) -> list[Any]:
        """Return the states that this rank saved of an object, as a list of one or none."""
        if not self.is_same:
            return []
        is_own = self.rank in self.item(0).own.get(name, [])
        found = self.item(self.rank if is_own else 0).saved
        return [found[name]] if name in found else []

    def read_object(self, name: str, obj: object, on_other_ranks: OnOtherRanks) -> Any:
        """Return the state of an object that is not a model.

        Raises:
            PlacementError: If it was saved on another number of ranks, and may depend on that.
        """
        parts, others = self.parts(name), self.item(0).own.get(name, [])
        if self.is_same:
            for own in self.own_part(name):
                return load_values(self.values(own))
            raise self._lacking(name)
        if name in on_other_ranks:
            found = {n: load_values(self.values(part)) for n, part in parts.items()}
            every = [n if n in others else 0 for n in range(self.ranks)]
            return on_other_ranks[name]([copy_state(found[n]) for n in every if n in found])
        first, *rest = parts.values()
        is_equal = len(parts) == 1 + len(others) and all(_are_equal(first, each) for each in rest)
        if is_equal and _fits_any_ranks(obj):
            return load_values(self.values(first))
        raise PlacementError(
            "the state of this object may depend on the number of ranks, which differs"
            if is_equal
            else "each rank saved its own state of this object, and the number of ranks differs",
            entry=name,
            expected=f"{self.ranks} ranks",
            found=self.count,
            hint=f"Pass on_other_ranks={{{name!r}: function}}. The function gets the list of all "
            "saved states, and returns the state of this rank. If the state means the same on any "
            f"number of ranks: on_other_ranks={{{name!r}: lambda states: states[0]}}.",
        )

    def read_model(self, name: str, live: Mapping[str, Any]) -> _Joined:
        """Return the state of a model, also of parts of it that this rank does not have."""
        parts, own = self.parts(name), self.own_part(name)
        if not all(isinstance(each, dict) for each in parts.values()):
            raise FormatError("the saved state is of another kind of object", entry=name)
        joined = _join(own[0] if own else {}, parts.values())
        made = OrderedRecord()
        made.update(joined.state)
        metadata = [
            each._metadata for each in (*own, *parts.values()) if hasattr(each, "_metadata")
        ]
        made._metadata = {k: v for each in reversed(metadata) for k, v in (each or {}).items()}
        return _Joined(self.values(made), [f"{name}.{key}" for key in joined.unlike if key in live])

    def read_optimizer(self, name: str, live: Holder) -> _Joined:
        """Return the state of an optimizer, with the groups of all ranks, such as of stages."""
        own, parts = self.own_part(name), [*self.parts(name).values()]
        for part in parts:
            _require_optimizer(part, name)
        joined = _join(own[0]["state"] if own else {}, [each["state"] for each in parts])
        groups, unlike = dict[tuple[Any, ...], Any](), dict.fromkeys(joined.unlike)
        for group in (group for each in (*own, *parts) for group in each["param_groups"]):
            known = groups.setdefault(tuple(group["params"]), group)
            if not own and known is not group and not _are_equal(known, group):
                unlike["param_groups"] = None
        # A parameter of this rank may lack a state that it has elsewhere: an expert without
        # gradients.
        stateless = {param for each in own for g in each["param_groups"] for param in g["params"]}
        stateless -= {param for each in own for param in each["state"]}
        state = {key: each for key, each in joined.state.items() if key not in stateless}
        elsewhere = {param for params in groups for param in params if not PLACE.match(str(param))}
        elsewhere -= {fqn for held in live.params for fqn in held.fqns}
        return _Joined(
            self.values({"state": state, "param_groups": [*groups.values()]}),
            [f"{name}.{key}" for key in unlike if key not in elsewhere],
            (own or parts)[0]["param_groups"],
        )


class _Joined(NamedTuple):
    """The states that ranks saved of one model or optimizer.

    Attributes:
        state: Name -> state. For an optimizer: its state dict, with the groups of all ranks.
        unlike: Names whose states differ between ranks, and that this rank did not save.
        groups: The groups that this rank saved of an optimizer, or the first one.
    """

    state: dict[Any, Any]
    unlike: list[Any]
    groups: Sequence[dict[str, Any]] = ()


def _join(own: Mapping[Any, Any], parts: Iterable[Mapping[Any, Any]]) -> _Joined:
    """Join the states that ranks saved under names. Those of this rank count."""
    made, unlike = dict(own), dict[Any, None]()
    for part in parts:
        for name, state in part.items():
            known = made.setdefault(name, state)
            if name not in own and known is not state and not _are_equal(known, state):
                unlike[name] = None
    return _Joined({key: each for key, each in made.items() if key not in unlike}, [*unlike])


def _are_equal(one: Any, other: Any) -> bool:
    return bool(one == other) or repr(one) == repr(other)  # NaN does not equal itself


def _fits_any_ranks(obj: object) -> bool:
    """Return whether the state of an object means the same on any number of ranks.

    A position in data does not: each rank would skip as many samples as before.
    """
    is_schedule = callable(getattr(obj, "get_last_lr", None))
    return is_schedule or isinstance(obj, torch.amp.GradScaler)


def _require_optimizer(state: Any, name: str) -> None:
    """Refuse a state that is not one of an optimizer.

    Raises:
        FormatError: If it is not.
    """
    is_dict = isinstance(state, dict) and isinstance(state.get("state"), dict)
    groups = state.get("param_groups") if is_dict else None
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    ):
        raise FormatError("the saved state is of another kind of object", entry=name)


# ---- the load


@dataclass(frozen=True, slots=True)
class RunToLoad:
    """The states for the objects of a run on this rank.

    Attributes:
        path: The path of the checkpoint.
        run: The objects.
        names: All full names in the saved models, in the same order on all ranks.
        live: Full names in the models of this rank.
        step: The step that was saved.
        models: Name of a model -> its state.
        optimizers: Name of an optimizer -> its state, with the groups of all ranks.
        objects: Name of another object -> its state.
        generators: States of the random number generators, or None if there are none for this rank.
        changed: Names of plain data that was saved with another value. It stays as it is.
    """

    path: str
    run: RunObjects
    names: list[str]
    live: set[str]
    step: int
    models: dict[str, Any]
    optimizers: dict[str, Any]
    objects: dict[str, Any]
    generators: Any
    changed: list[str]

    @classmethod
    def of(cls, saved: SavedRun, run: RunObjects, on_other_ranks: OnOtherRanks) -> RunToLoad:
        """Read the states for some objects. Nothing changes.

        Raises:
            FormatError: If a state is missing, or is not one that a Keeper saves.
            PlacementError: If a state was saved for other ranks only.
        """
        path, unlike, generators = saved.ckpt.path, list[str](), None
        with _damage_named(path, "ranks"):
            step = saved.item(0).saved.get("step")
            if saved.rank < saved.ranks:  # a new rank keeps its own
                generators = load_values(saved.values(saved.item(saved.rank).generators))
        if type(step) is not int or step < 0:
            raise FormatError("the step is not valid", file=path, entry="step", found=repr(step))
        models, optimizers, objects = dict[str, Any](), dict[str, Any](), dict[str, Any]()
        groups = dict[str, tuple[Holder, Sequence[dict[str, Any]]]]()
        every, live = set[str](), set[str]()
        for name, module in run.modules.items():
            with _damage_named(path, name):
                state = read_model_state(module)
                models[name], others, _ = saved.read_model(name, state)
                unlike += others
                parts = saved.parts(name).values()
                every |= {f"{name}.{key}" for each in parts for key in each}
                live |= {f"{name}.{key}" for key in state}
        for name, optimizer in run.optimizers.items():
            with _damage_named(path, name):
                names_of = Names(ModuleTree(run.model_of(name)))
                (holder,) = name_parameters(names_of, [optimizer])
                optimizers[name], others, own = saved.read_optimizer(name, holder)
                groups[name] = holder, own
                unlike += others
        for name, obj in run.stateful.items():
            with _damage_named(path, name):
                objects[name] = saved.read_object(name, obj, on_other_ranks)
                _require_same_groups(name, obj, objects[name], groups)
        changed, first = list[str](), saved.item(0).saved
        for name, value in run.plain.items():
            with _damage_named(path, name):
                for each in saved.own_part(name) or [first[n] for n in [name] if n in first]:
                    known = load_values(saved.values(each))
                    changed += [name] * (not diff({name: value}, {name: known}).equal)
        made = cls(
            path, run, sorted(every), live, step, models, optimizers, objects, generators, changed
        )
        made._require_known(saved, unlike)
        made._require_holders()
        return made

    def find_unexpected(self) -> int:
        """Return a bit for each of `names`, in order, that no model of this rank has."""
        return sum(1 << at for at, name in enumerate(self.names) if name not in self.live)

    def _require_known(self, saved: SavedRun, unlike: list[str]) -> None:
        """Refuse names of models and optimizers that other ranks saved with different values.

        Raises:
            PlacementError: If there are some.
        """
        if not unlike:
            return
        objects = dict.fromkeys(name.partition(".")[0] for name in unlike)
        lines = [
            self._line(each, [], [n.partition(".")[2] for n in unlike if n.startswith(f"{each}.")])
            for each in objects
            if each in self.models
        ]
        rest = f", and then {', '.join(lines)}" if lines else ""
        raise PlacementError(
            "each rank saved its own values under one name, and "
            + ("this rank saved none" if saved.is_same else "the number of ranks differs"),
            file=self.path,
            entry=unlike[0],
            expected="the models of this rank" if saved.is_same else f"{saved.ranks} ranks",
            found="those of another rank" if saved.is_same else saved.count,
            hint=f"Resume without {' and '.join(objects)}{rest}.",
        )

    def _require_holders(self) -> None:
        """Refuse optimizer state of a parameter of this rank that no optimizer would hold.

        Raises:
            StateDictMismatch: If there is some. It would be lost.
        """
        held = {id(param) for each in self.run.optimizers.values() for param in params_of(each)}
        for name, saved in self.optimizers.items():
            names = Names(ModuleTree(self.run.model_of(name))).tensors
            lost = [
                key
                for key, state in saved["state"].items()
                if state and key in names and id(names[key]) not in held
            ]
            if lost:
                call = self._line(name, [], [])
                raise StateDictMismatch(
                    "the checkpoint has optimizer state of parameters that no loaded optimizer "
                    "holds",
                    file=self.path,
                    entry=f"{name}.{lost[0]}",
                    found=f"{len(lost)} parameters",
                    hint="Give the optimizer the parameters it was saved with. To load the state "
                    f"of the others: resume without {name}, then {call}.",
                    unexpected_keys=lost,
                )

    def put_states(self, unused: int, commit: Commit) -> StepResult[None, None]:
        """Load all models and optimizers. The ranks do not communicate.

        The commit undoes it. Live tensors get their values when it finishes.

        Args:
            unused: A bit for each of `names` that no rank has.
            commit: The commit of the resume.

        Raises:
            CheckpointError: If a name, a shape or a value does not fit.
        """
        # First: code of a model may draw numbers, and an object may refuse its state later.
        now = Generators().state_dict()
        commit.when_undone(partial(Generators().load_state_dict, now), GENERATORS)
        tensors, versions = dict[str, Any](), dict[str, Any]()
        for name, state in self.models.items():
            tensors |= {f"{name}.{key}": each for key, each in state.items()}
            for inside, version in getattr(state, "_metadata", {}).items():
                versions[f"{name}.{inside}".removesuffix(".")] = version
        # The stages of a pipeline share one checkpoint. Names of other stages are not unexpected.
        own = self.live | {name for at, name in enumerate(self.names) if unused >> at & 1}
        calls = dict[str, LoadCall]()
        whole = StateDictOptions(full_state_dict=True)
        if self.run.modules:
            found = {key: each for key, each in tensors.items() if key in own}
            state, model = versioned(found, versions or None), self.run.holder(self.run.modules)
            calls[""] = LoadCall(Part.MODEL, model, (), state, None, whole)
        for name, optimizer in self.run.optimizers.items():
            owners, saved = self.run.owners[name], self.optimizers[name]
            weights = self.models[owners[0]] if len(owners) == 1 else tensors
            model = self.run.model_of(name)
            calls[name] = LoadCall(Part.OPTIMIZERS, model, [optimizer], weights, saved, whole)
        jobs = dict[str, Job]()
        with collection_paused(), torch.no_grad():
            for name, call in calls.items():
                with self._naming(name):
                    jobs[name] = prepare(call, read_tree(call.model))
            for name, job in jobs.items():
                with self._naming(name):
                    job.plan(commit)
            # Models come last: their new tensors may be those that an optimizer holds on meta.
            for name, job in reversed(jobs.items()):
                with self._naming(name):
                    job.put_new(commit)
                    if job.runs_own_code:  # it may refuse the state
                        job.copy_last(commit, backup=True)
                    else:
                        commit.when_finished(partial(job.copy_last, commit, backup=False))
        return StepResult(None, None)

    @contextmanager
    def _naming(self, optimizer: str) -> Iterator[None]:
        """Name the way out in an error of an optimizer, or of the models."""
        try:
            with _damage_named(self.path, optimizer) if optimizer else nullcontext():
                yield
        except StateDictMismatch as error:
            error.file = error.file or self.path
            if optimizer:
                error.hint = f"{error.hint or ''} Or resume without {optimizer}.".strip()
            else:
                self._name_way_out(error)
            raise

    def load_objects(
        self, commit: Commit, deliver: Callable[[], None]
    ) -> StepResult[list[str], None]:
        """Load the generators, and all other objects whose current state can be restored.

        Args:
            commit: The commit of the resume.
            deliver: Delivers an interrupt.

        Returns:
            The names of the objects whose current state cannot be read.
        """
        now, before, last = Generators().state_dict(), dict[str, Any](), list[str]()
        # In the order of the caller, which is equal on all ranks: a state may need an exchange.
        for name, obj in self.run.stateful.items():
            try:
                before[name] = copy_state(obj.state_dict())
            except Exception:  # a loader may have a state only after its start
                last.append(name)
        Generators().load_state_dict(now)  # the state_dict of a loader draws random numbers
        for name, state in before.items():
            obj = self.run.stateful[name]
            if hasattr(obj, "__dict__"):  # a load may add attributes, which would stay
                commit.keep_attributes([obj])
            commit.when_undone(partial(obj.load_state_dict, state), name)
            self._load_object(name)
        with _damage_named(self.path, GENERATORS):
            self._load_generators()
        deliver()  # the last moment at which an interrupt changes nothing
        return StepResult(last, None)

    def load_last(self, names: Iterable[str]) -> None:
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
                        hint=f"Resume without {name}.",
                    ) from error
        finally:  # code of an object, a model or an optimizer may draw numbers when it loads
            self._load_generators()

    def _load_generators(self) -> None:
        if self.generators is not None:
            Generators().load_state_dict(self.generators)

    def _load_object(self, name: str) -> None:
        # A copy: the object may keep the tensors, and the keeper may remove the file.
        self.run.stateful[name].load_state_dict(copy_state(self.objects[name]))

    # ---- errors

    def _name_way_out(self, error: StateDictMismatch) -> None:
        """Name the lines that load a part of the checkpoint instead."""
        left, lines = [*error.mismatched, *error.unexpected_keys], list[str]()
        owners = {name: [name] for name in self.models}
        for name, models in {**owners, **self.run.owners}.items():
            prefix = f"{models[0]}." if len(models) == 1 else ""
            own, missing = (
                [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
                for keys in (left, error.missing_keys)
            )
            if name in self.optimizers:  # a pattern must match something
                groups = self.optimizers[name]["param_groups"]
                known = {param for group in groups for param in group["params"]}
                own = [key for key in own if key in known]
            if own or missing or (lines and name in self.optimizers):
                lines.append(self._line(name, own, missing))
        if lines:
            error.hint = f"To load a part: {', '.join(lines)}."

    def _line(self, name: str, left: list[str], missing: list[str]) -> str:
        """Return a call that loads a part of a model or of an optimizer."""
        call, first = "load", name
        if name in self.optimizers:
            models = self.run.owners[name]
            call = "distributed.load_optimizer"
            inside = ", ".join(f"{each!r}: {each}" for each in models)
            first = models[0] if len(models) == 1 else f"torch.nn.ModuleDict({{{inside}}})"
            first += f", {name}"
        rules = {"exclude": left, "allow_missing": missing}
        texts = [f"{rule}={_patterns(names)}" for rule, names in rules.items() if names]
        arguments = ", ".join([first, repr(self.path), f"root={name!r}", *texts])
        return f"torchlift.{call}({arguments})"


#: Names that a message lists one by one.
_SHOWN = 4


def _patterns(names: list[str]) -> list[str]:
    """Return names, or patterns of the modules of many names."""
    if len(names) <= _SHOWN:
        return names
    return [*dict.fromkeys(f"{name.rpartition('.')[0]}.*".lstrip(".") for name in names)]


def _require_same_groups(
    name: str, obj: object, state: Any, saved: Mapping[str, tuple[Holder, Sequence[dict[str, Any]]]]
) -> None:
    """Refuse other parameter groups than those that a schedule was saved with.

    A schedule keeps a learning rate for each group, by its place.

    Args:
        name: The name of the object, which may be a schedule.
        obj: The object.
        state: Its saved state.
        saved: Name of an optimizer -> the optimizer, and its saved groups.

    Raises:
        StateDictMismatch: If their number differs, or a parameter is in another group.
    """
    optimizer: Any = getattr(obj, "optimizer", None)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    count = len(optimizer.param_groups)
    hint = "Make the optimizer with the groups it was saved with, in the same order."
    for key in ("base_lrs", "_last_lr", "min_lrs"):
        rates = state.get(key) if isinstance(state, dict) else None
        if isinstance(rates, list) and len(rates) != count:
            raise StateDictMismatch(
                "the schedule was saved for another number of parameter groups than its optimizer "
                "has",
                entry=f"{name}.{key}",
                expected=f"{count} groups",
                found=len(rates),
                hint=hint,
            )
    for each, (holder, groups) in saved.items():
        places = {param: at for at, group in enumerate(groups) for param in group["params"]}
        for at, group in enumerate(holder.groups if holder.optimizer is optimizer else ()):
            for param in filter(None, (held.name_in(places) for held in group)):
                if places[param] != at:
                    raise StateDictMismatch(
                        "the optimizer of a schedule was saved with this parameter in another "
                        "group",
                        entry=f"{each}.param_groups: {param}",
                        expected=f"group {at}",
                        found=f"group {places[param]}",
                        hint=hint,
                    )


# ---- values


def load_values(state: Any) -> Any:
    """Return a state with its arrays again, and with tensors in memory."""
    if isinstance(state, FileTensor):
        return state.tensor()
    if isinstance(state, dict) and state.keys() == {ARRAY, "bytes"}:
        facts, values = state[ARRAY], load_values(state["bytes"])
        is_array = isinstance(facts, list) and [*map(type, facts)] == [str, list]
        if is_array and isinstance(values, torch.Tensor):
            (code, shape), data = facts, bytes(memory_of(values.contiguous()))
            return array_of(Array(code, tuple(shape), False, data))
    if type(state) in (dict, OrderedDict):
        return type(state)((name, load_values(item)) for name, item in state.items())
    if type(state) in (list, tuple) and not holds_numbers(state):
        return type(state)(map(load_values, state))
    return state


def copy_state(state: Any) -> Any:
    """Return a deep copy, also of compressed sparse tensors, which torch does not copy deeply."""
    found = [each for each in leaves(state).values() if isinstance(each, torch.Tensor)]
    odd = {id(each): each.clone() for each in found if each.layout is not torch.strided}
    return copy.deepcopy(state, odd)

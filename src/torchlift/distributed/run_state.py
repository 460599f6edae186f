"""The objects of a run, how their states are stored, and the part of a checkpoint to load."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set, ValuesView
from dataclasses import dataclass, field
from functools import partial, reduce
from glob import escape
from hashlib import sha256
from itertools import chain
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import nn

from torchlift._checkpoint.checkpoint import Checkpoint
from torchlift._checkpoint.checkpoint import open as open_checkpoint
from torchlift._checkpoint.comparison import diff
from torchlift._checkpoint.kinds import array_of
from torchlift._model.commit import Commit
from torchlift._model.dtensor import Spans, is_dtensor, local_tensor, spans_of
from torchlift._model.names import Names, uses_fsdp1
from torchlift._model.own_loading import ModuleHolder
from torchlift._model.ranks import RankGroup, StepResult, world_of
from torchlift._model.slots import ModuleTree
from torchlift._model.state import versioned
from torchlift._plan.rules import Options, check_rename, rename_keys
from torchlift._save.blocks import Block, Workspace, memory_of
from torchlift._save.files import pass_bytes
from torchlift._save.layouts import Output, end_of
from torchlift._save.pickling import is_array
from torchlift._save.replicas import (
    checksum_of,
    difference_error,
    find_differences,
)
from torchlift._save.saving import lay_out_one_file, require_savable
from torchlift._sources.tensors import FileTensor
from torchlift._system.containers import leaves, map_leaves
from torchlift.distributed.agreements import Groups, SelectionMessage, merge_groups
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
    require_groups,
)
from torchlift.distributed.staging import Staging
from torchlift.distributed.state_dict import load_states, read_states, slices_of
from torchlift.errors import CheckpointError, FormatError, MismatchError, PlacementError
from torchlift.formats.flattening import name_text
from torchlift.formats.index import Array, allowed, left_out
from torchlift.formats.source import errors_name

#: The name of the states of the random number generators, for patterns.
GENERATORS = "rng"
#: Names that a checkpoint uses itself. In a DCP folder, plain data is packed. Names with a dot need
#: not be here, because no object has one.
_RESERVED = ("step", "metrics", GENERATORS, "ranks", "packed", "differing")
#: The key of the values of a rank that differ from those of other ranks under the same name.
DIFFERING = "differing"
#: The key of the parameter groups of a rank, if those of other ranks have other parameters.
_GROUPS = "parameter.groups"
#: The key of the containers of models and optimizers that a DCP folder changes.
_CONTAINERS = "changed.containers"
#: The key of a dict that stands for an array of numpy. Its value is the array's dtype and shape.
_ARRAY = "numpy.ndarray"

_Path = tuple[Any, ...]  # a tuple of names, which a message has once, is shorter than a text

OnOtherRanks = Mapping[str, Callable[[list[Any]], Any]]


# ---- the objects of a run


@dataclass(frozen=True, slots=True)
class RunObjects:
    """The objects of a run by name.

    Attributes:
        modules: The models.
        optimizers: The optimizers of their parameters.
        owners: Name of an optimizer -> the models that have its parameters.
        stateful: Other objects with ``state_dict`` and ``load_state_dict``.
        plain: Plain data and tensors.
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
            # The first model with all parameters, or else every model with some of them.
            whole = [each for each in ids if params and params <= ids[each]][:1]
            run.owners[name] = whole or [each for each in ids if params & ids[each]]
        return run

    @property
    def names(self) -> list[str]:
        """Return the names of all objects that have a state."""
        return [*self.modules, *self.optimizers, *self.stateful]

    @property
    def models(self) -> tuple[str, ...]:
        """Return the names of models and optimizers. Each rank has a part of their states."""
        return tuple(sorted([*self.modules, *self.optimizers]))

    def holder(self, names: Iterable[str] | None = None) -> nn.Module:
        """Return a module that contains all models, or those with some names."""
        return ModuleHolder(self.modules if names is None else {n: self.modules[n] for n in names})

    def read_models(self) -> dict[str, Any]:
        """Return the states of models and optimizers by name. The ranks do not communicate."""
        states: dict[str, Any] = {name: _read(each) for name, each in self.modules.items()}
        for name, optimizer in self.optimizers.items():
            owners = self.owners[name]
            # With one model, parameters have their names in it, as `load_optimizer` expects.
            holder = self.modules[owners[0]] if len(owners) == 1 else self.holder(owners)
            states[name] = read_states(Part.OPTIMIZERS, holder, optimizer, compare=False).optimizer
        return states

    def find_plain(self, states: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Return the paths of the values that every rank holds completely, except buffers.

        They may differ between ranks: experts under one name, 8-bit moments of each rank's shard
        (bitsandbytes#1840), a counter or a learning rate. Buffers are those of the first rank, as
        in torch. A list without shards is one value, such as the matrices that SOAP keeps for a
        parameter.
        """
        found = _values_in({name: states[name] for name in self.optimizers})
        for name, module in self.modules.items():
            tensors = Names(ModuleTree(module)).tensors
            for key, value in states[name].items():
                if isinstance(tensors.get(key), (nn.Parameter, type(None))):
                    found[name, key] = value
        return [(*path, *inner) for path, value in found.items() for inner in _find_complete(value)]

    def read_others(self) -> dict[str, Any]:
        """Return the states of all other objects, and the plain data, by name."""
        states = {name: obj.state_dict() for name, obj in self.stateful.items()}
        return {name: _arrays_to_tensors(state) for name, state in {**states, **self.plain}.items()}


def _read(module: nn.Module) -> dict[str, Any]:
    return read_states(Part.MODEL, module, compare=False).model


def _values_in(tree: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Return everything in dicts, and in the groups of an optimizer, by its path."""
    if path[1::2] == ("param_groups", "params"):
        return {}  # the names of parameters, which may differ
    is_groups = path[1:] == ("param_groups",)
    if not is_groups and not isinstance(tree, dict):
        return {path: tree}
    found: dict[tuple[Any, ...], Any] = {}
    for key, item in enumerate(tree) if is_groups else tree.items():
        found |= _values_in(item, (*path, key))
    return found


def _listed(value: Any) -> Iterable[Any]:
    return leaves([value]).values()


def _find_complete(value: Any) -> list[tuple[Any, ...]]:
    """Return the path of a value itself, or of the values in it that are beside shards."""
    found = leaves(value)
    if not any(map(_is_part, found.values())):
        return [()]
    return [path for path, leaf in found.items() if not _is_part(leaf)]


def _is_part(value: object) -> bool:
    """Return whether a value is a DTensor that is divided between ranks."""
    return is_dtensor(value) and not all(each.is_replicate() for each in value.placements)


def _is_on_some_ranks(tensor: Any) -> bool:
    """Return whether other ranks may have another mesh, and this is a first replica on its own."""
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None or mesh.size() == world_of()[1]:
        return False
    pairs = zip(tensor.placements, place, strict=True)
    return not any(each.is_partial() or (each.is_replicate() and at) for each, at in pairs)


def _sum_of(value: Any, work: Workspace) -> bytes:
    """Return a digest that is equal for equal values, in every process."""

    def sum_leaf(leaf: Any, _: object) -> Any:
        if isinstance(leaf, torch.Tensor):
            return checksum_of(local_tensor(leaf).detach(), work)
        if is_array(leaf):  # its text lacks the values in the middle
            return leaf.dtype.str, leaf.tolist()
        return sorted(map(repr, leaf)) if isinstance(leaf, set) else leaf

    return sha256(repr(_in_order(map_leaves(value, sum_leaf))).encode()).digest()[:16]


def _in_order(tree: Any) -> Any:
    """Return containers whose text does not depend on the order of the keys of a dict."""
    if isinstance(tree, dict):
        return {key: _in_order(tree[key]) for key in sorted(tree, key=repr)}
    return [type(tree), *map(_in_order, tree)] if isinstance(tree, (list, tuple)) else tree


def _name_of(path: _Path) -> str:
    return ".".join(map(str, path))


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _require_resumable(obj: Any) -> None:
    """Refuse an object that `Keeper.resume` could not load.

    Raises:
        CheckpointError: If it could not. The caller adds the name.
    """
    require_groups(obj)
    problem = hint = ""
    if uses_fsdp1(obj):
        problem = (
            "a Keeper cannot save a FullyShardedDataParallel, which gives each rank flat pieces"
        )
        hint = (
            "Shard the model with fully_shard. Or pass the result of torchlift.distributed."
            "get_state_dict with full_state_dict=True to torchlift.save."
        )
    elif _gives_state(obj) and not callable(getattr(obj, "load_state_dict", None)):
        problem = "the object has state_dict, but not load_state_dict"
        hint = "Add that method, or pass the result of state_dict(), which is plain data."
    elif _holds_state(obj, set()):
        problem = "resume cannot load objects inside of a container"
        hint = "Pass each by its name: **{f'model_{n}': each for n, each in enumerate(models)}."
    if problem:
        raise PlacementError(problem, found=type(obj).__name__, hint=hint)


def _holds_state(obj: object, above: set[int]) -> bool:
    """Return whether a container holds an object with a state, at any depth."""
    kinds = (Mapping, ValuesView, Set, list, tuple, deque)
    if not isinstance(obj, kinds) or id(obj) in above:
        return False
    items: Iterable[object] = obj.values() if isinstance(obj, Mapping) else obj
    above = above | {id(obj)}  # a container may contain itself
    return any(_gives_state(item) or _holds_state(item, above) for item in items)


def _gives_state(obj: object) -> bool:
    return not isinstance(obj, type) and callable(getattr(obj, "state_dict", None))


# ---- the state of a run, and how it is stored


class Head(NamedTuple):
    """The first entries of a checkpoint."""

    step: int
    metrics: dict[str, float]


class _Facts(NamedTuple):
    """The facts about the state of one rank that ranks compare.

    Attributes:
        sums: Path of a value in models and optimizers -> its `_sum_of`.
        parts: Path and ranges of a shard on a mesh of some of the ranks -> its `_sum_of`. Without
            ranges, it is a value in a list with shards.
        groups: The parameter groups of all optimizers.
    """

    sums: dict[_Path, bytes]
    parts: dict[tuple[_Path, Spans | None], bytes]
    groups: Groups

    @property
    def params(self) -> list[Any]:
        """Return the names of the parameters of each group."""
        return [[name, *(one["params"] for one in each)] for name, each in self.groups.items()]


class _Summary(NamedTuple):
    """The message of a rank that is about to write.

    Attributes:
        others: Name of an object that is not a model -> digest of its state.
        facts: Digest of all other facts, and of the containers that a DCP folder changes. The facts
            are sent if this differs between ranks.
    """

    others: dict[str, bytes]
    facts: bytes


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies of the states of a run on this rank, which `Keeper.resume` can load.

    Attributes:
        head: The step and its metrics.
        models: States of models and optimizers by name.
        others: States of all other objects, and plain data, by name.
        generators: States of the random number generators.
        plain: Paths of the values in `models` that every rank holds completely.
        groups: The parameter groups of all optimizers.
    """

    head: Head
    models: dict[str, Any]
    others: dict[str, Any]
    generators: dict[str, Any]
    plain: list[tuple[Any, ...]]
    groups: Groups

    @classmethod
    def of(
        cls, head: Head, run: RunObjects, staging: Staging, path: str, *, is_alone: bool
    ) -> Snapshot:
        """Copy all states to the host. The ranks do not communicate.

        Raises:
            PlacementError: If `Keeper.resume` could not load a state.
        """
        models, others = run.read_models(), run.read_others()
        for name, state in others.items():
            if not is_alone and any(map(is_dtensor, leaves(state).values())):
                raise PlacementError(
                    "only models and optimizers may contain DTensors",
                    entry=name,
                    hint="Pass the module itself, or full tensors.",
                )
        require_savable({**models, **others}, path)  # it names the value that cannot be copied
        copies = staging.copy({"models": models, "others": others})
        models, others = copies["models"], copies["others"]
        groups = {name: models[name]["param_groups"] for name in run.optimizers}
        generators, plain = Generators().state_dict(), run.find_plain(models)
        return cls(head, models, others, generators, plain, groups)

    def for_one_process(self) -> dict[str, Any]:
        """Return the state to write without other ranks."""
        own = {"0": {GENERATORS: self.generators}}
        return {**self.head._asdict(), **self.models, **self.others, "ranks": own}

    def for_rank(self, ranks: RankGroup, number: int) -> dict[str, Any]:
        """Return the state that this rank writes. All ranks call this.

        The first rank writes the other objects that are equal on all ranks. Each rank writes its
        own states of the others. It also writes plain values that differ, because DCP would keep
        those of one rank.
        """

        def summarise() -> StepResult[tuple[dict[str, Output], _Facts], _Summary]:
            files = {name: lay_out_one_file({name: state}) for name, state in self.others.items()}
            work = Workspace()
            sums, parts = dict[_Path, bytes](), dict[tuple[_Path, Spans | None], bytes]()
            for path in self.plain:
                holder: Any = reduce(getitem, path[:-1], self.models)
                summed = _sum_of(holder[path[-1]], work)
                if isinstance(holder, dict):
                    sums[path] = summed
                else:
                    parts[path, None] = summed
            parts |= {
                (path, spans_of(leaf, _name_of(path))): _sum_of(leaf, work)
                for path, leaf in leaves(self.models).items()
                if _is_part(leaf) and _is_on_some_ranks(leaf)
            }
            facts = _Facts(sums, parts, self.groups)
            changed = [*_changed_containers(self.models, [])]
            known = repr([facts.sums, facts.parts, facts.params, changed]).encode()
            digests = {name: _digest_of(file) for name, file in files.items()}
            return StepResult((files, facts), _Summary(digests, sha256(known).digest()))

        (files, facts), by_rank = ranks.run(summarise)
        summaries, different = by_rank.values(), list[list[Any]]()
        own = dict[str, torch.Tensor]()
        is_equal = len({each.facts for each in summaries}) == 1
        if not is_equal:
            params = {
                name: [{"params": one["params"]} for one in groups]
                for name, groups in self.groups.items()
            }
            own[_GROUPS] = _pack(lay_out_one_file({_GROUPS: params}))
            different = self._settle(ranks.run(lambda: StepResult(None, facts)).by_rank, number)
        equal = set.intersection(*({*each.others.items()} for each in summaries))
        common = {name for name, _ in equal}
        # Only the files that this rank writes: a copy of weights, such as an EMA, may be large.
        own |= {name: _pack(file) for name, file in files.items() if name not in common}
        own[GENERATORS] = _pack(lay_out_one_file({GENERATORS: self.generators}))
        # A resume reads those of all ranks, so ranks with equal ones write them once.
        is_writer = number == 0 or not is_equal
        if is_writer and (changed := [*_changed_containers(self.models, [])]):
            own[_CONTAINERS] = _pack(lay_out_one_file({_CONTAINERS: changed}))
        if different:
            own[DIFFERING] = _pack(lay_out_one_file({DIFFERING: different}))
        state: dict[str, Any] = {**self.models, "ranks": {str(number): own}}
        if number == 0:
            packed = {name: _pack(files[name]) for name in common}
            state |= {**self.head._asdict(), "packed": packed}
        return state

    def _settle(self, by_rank: Mapping[int, _Facts], number: int) -> list[list[Any]]:
        """Give `models` the groups of all ranks. Remove the values that differ.

        Returns:
            The path of each such value, in the same order on all ranks, and the value of this rank
            in a list. The list is empty if this rank does not have the parameter, as in a pipeline.
            It is None if its parameter does not have this state.

        Raises:
            PlacementError: If shards on several meshes differ under one name, or values in a list
                with shards.
        """
        every, different = by_rank.values(), list[list[Any]]()
        unlike = find_differences({rank: each.parts for rank, each in by_rank.items()})
        if unlike:  # experts of a group of ranks: a DCP folder has one tensor of each name
            hint = "Name the modules of each group of ranks, such as f'expert_{number}'."
            if next(iter(unlike))[1] is None:
                hint = "Put it into a dict. A list with DTensors cannot have values of each rank."
            raise difference_error({_name_of(path): d for (path, _), d in unlike.items()}, hint)
        # The ranks of a pipeline have different groups, and a checkpoint has those of all ranks.
        is_merged = any(each.params != by_rank[0].params for each in every)
        if is_merged:
            for name, groups in merge_groups(each.groups for each in every).items():
                if name in self.models:
                    self.models[name] = {**self.models[name], "param_groups": groups}
        paths = dict.fromkeys(path for each in every for path in each.sums)
        held = {
            rank: {
                (name, "state", param) for name, *groups in each.params for param in chain(*groups)
            }
            for rank, each in by_rank.items()
        }
        # An optimizer may have state of a parameter on one rank only: an expert without gradients.
        facts = {
            rank: {
                path: each.sums.get(path)
                for path in paths
                if path in each.sums or path[:3] in held[rank]
            }
            for rank, each in by_rank.items()
        }
        for path in find_differences(facts):
            # Merged groups are equal on all ranks, and have other places.
            if not (is_merged and "param_groups" in path[1:2]):
                *places, last = path
                kept: list[Any] | None = None if path[:3] in held[number] else []
                if path in by_rank[number].sums:
                    kept = [reduce(getitem, places, self.models).pop(last)]
                different.append([[*path], map_leaves(kept, _local)])
        return different


def _changed_containers(tree: Any, path: list[Any]) -> Iterator[list[Any]]:
    """Yield the path of each container that a DCP folder changes, and the keys of a dict.

    Keys become text, as in the path, and a tuple with tensors becomes a list.
    """
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(tree, dict):
        items = [(name_text(key), item) for key, item in tree.items()]
        if any(type(key) is not str for key in tree):
            yield [path, [*tree]]
    elif any(isinstance(leaf, torch.Tensor) for leaf in _listed(tree)):
        items = enumerate(tree if isinstance(tree, (list, tuple)) else ())
        if isinstance(tree, tuple):
            yield [path, None]
    for key, item in items:
        yield from _changed_containers(item, [*path, key])


def _restore_container(saved: Any, path: list[Any], keys: list[Any] | None) -> None:
    """Undo the change of a container, if it is among the states."""
    *places, last = path
    try:
        holder = reduce(getitem, places, saved)
        found = holder[last]
    except LookupError:  # of another stage of a pipeline, or each rank has its own
        return
    by_text = {name_text(key): key for key in keys or ()}
    new = tuple(found) if keys is None else {by_text.get(k, k): v for k, v in found.items()}
    holder[last] = new


def _local(leaf: Any, _: object) -> Any:
    return local_tensor(leaf) if is_dtensor(leaf) else leaf


def _digest_of(file: Output) -> bytes:
    """Return a digest that is equal on ranks with the same state of an object."""
    (sections,) = file.files.values()
    made = sha256()
    pass_bytes(sections, lambda data, _: made.update(data))
    return made.digest()


def _pack(file: Output) -> torch.Tensor:
    """Return a torch file in the bytes of a tensor. DCP folders have text keys only."""
    (sections,) = file.files.values()
    packed = torch.empty(end_of(sections), dtype=torch.uint8)
    room = memory_of(packed)

    def put(data: Block, place: int) -> None:
        room[place : place + len(data)] = data

    pass_bytes(sections, put)
    return packed


def _unpack(states: Mapping[str, Any], name: str) -> Any:
    """Return a state by its name, whether it is packed, as in a DCP folder, or not."""
    state = states[name]
    if isinstance(state, FileTensor):
        state = state.tensor()
    if not isinstance(state, torch.Tensor):
        return state
    with open_checkpoint(io.BytesIO(memory_of(state.contiguous()))) as ckpt:
        return ckpt.tree()[name]


def _arrays_to_tensors(state: Any) -> Any:
    """Return a state with numpy's arrays as tensors of bytes. A file would store them as lists."""

    def store(leaf: Any, _: object) -> Any:
        if not is_array(leaf):
            return leaf
        values = torch.frombuffer(bytearray(leaf.tobytes() or b"0"), dtype=torch.uint8)
        return {_ARRAY: [leaf.dtype.str, list(leaf.shape)], "bytes": values[: leaf.nbytes]}

    return map_leaves(state, store) if any(map(is_array, leaves(state).values())) else state


def _load_values(state: Any) -> Any:
    """Return a state with its arrays again, and with tensors in memory."""
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


def _copy(state: Any) -> Any:
    """Return a deep copy, also of compressed sparse tensors, which torch does not copy deeply."""
    found = [each for each in leaves(state).values() if isinstance(each, torch.Tensor)]
    odd = {id(each): each.clone() for each in found if each.layout is not torch.strided}
    return copy.deepcopy(state, odd)


# ---- what a checkpoint has for the objects


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
        known = _read(self.run.holder())
        unexpected = sum(1 << at for at, name in enumerate(self.tensors) if name not in known)
        selected = sha256(repr([[*self.tensors], sorted(self.stays)]).encode()).digest()
        # One load has one state for each name. Two optimizers may share a parameter, or each have
        # one that no model has. Then the name is the place in the optimizer. Or each has state that
        # is not a parameter's.
        separate, used, is_one = list[str](), set[object](), len(self.optimizers) == 1
        tensors = Names(ModuleTree(self.run.holder())).tensors
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
        known = _read(self.run.holder()) if stand_ins else {}
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
            id(param) for each in self.optimizers for param in _params(self.run.optimizers[each])
        }
        names = Names(ModuleTree(self.run.holder())).tensors
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
        if any(param.is_meta for param in _params(self.run.optimizers[name])):
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
                before[name] = _copy(self.run.stateful[name].state_dict())
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
        self.run.stateful[name].load_state_dict(_copy(_load_values(self.others[name])))

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
        saved |= {name: _unpack(common, name) for name in common}
        is_same, own = len(by_rank) == count, by_rank.get(str(rank), {})
        each_own = [by_rank[number] for number in sorted(by_rank, key=int)]
        # Values that differed between ranks go back under their names, which are complete on all
        # ranks. A value of other ranks is a stand-in here. It is refused if it is selected.
        holder = own if is_same else each_own[0]
        differing = _unpack(holder, DIFFERING) if DIFFERING in holder else []
        stand_ins = list[_StandIn]()
        lists = [_unpack(each, _CONTAINERS) for each in each_own if _CONTAINERS in each]
        # The outer ones last, because the paths have the changed keys.
        for place, keys in sorted(chain(*lists), key=lambda one: -len(one[0])):
            _restore_container(saved, place, keys)
        for (*places, last), kept in differing:
            if kept is None and is_same:
                continue
            if not kept or not is_same:
                kept = [torch.empty(0)]
                stand_ins.append(_StandIn([*places, last], *kept))
            (reduce(_item_of, places, saved)[last],) = kept
        generators = _unpack(own, GENERATORS) if GENERATORS in own else None
        groups = _unpack(holder, _GROUPS) if _GROUPS in holder else {}
        if is_same:
            objects = own.keys() - {*_RESERVED, _GROUPS, _CONTAINERS}
            saved |= {name: _unpack(own, name) for name in objects}
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise FormatError(
            "the states of the ranks are not those that a Keeper saves",
            file=path,
            entry="ranks",
            found=f"{type(error).__name__}: {error}",
        ) from error
    for name in (name for name in on_other_ranks if not is_same and name not in saved):
        states = [_unpack(states, name) for states in each_own if name in states]
        saved[name] = on_other_ranks[name](_copy(_load_values(states)))
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
        None if GENERATORS in stays else _load_values(generators),
        {names[name] for name in out if name in names},
        stays,
        [n for n in plain if not diff({n: plain[n]}, {n: _load_values(found[n])}).equal],
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

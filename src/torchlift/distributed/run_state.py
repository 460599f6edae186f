"""The objects of a run, and how their states are stored in a checkpoint."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Set, ValuesView
from dataclasses import dataclass, field
from functools import reduce
from hashlib import sha256
from itertools import chain
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import nn

from torchlift._checkpoint.checkpoint import open as open_checkpoint
from torchlift._checkpoint.kinds import array_of
from torchlift._model.dtensor import Spans, is_dtensor, local_tensor, spans_of
from torchlift._model.names import Names, uses_fsdp1
from torchlift._model.ranks import RankGroup, StepResult
from torchlift._model.slots import ModuleTree, read_tree
from torchlift._model.state import ModuleHolder
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
from torchlift.distributed.agreements import Groups, merge_groups
from torchlift.distributed.gather import is_on_some_ranks
from torchlift.distributed.generators import Generators
from torchlift.distributed.optimizer_state import params_of as params_of
from torchlift.distributed.optimizer_state import require_current
from torchlift.distributed.options import (
    Part,
    require_groups,
)
from torchlift.distributed.staging import Staging
from torchlift.distributed.state_dict import read_states
from torchlift.errors import CheckpointError, PlacementError
from torchlift.formats.flattening import name_text
from torchlift.formats.index import Array

#: The name of the states of the random number generators, for patterns.
GENERATORS = "rng"
#: Names that a checkpoint uses itself. In a DCP folder, plain data is packed. Names with a dot need
#: not be here, because no object has one.
RESERVED = ("step", "metrics", GENERATORS, "ranks", "packed", "differing")
#: The key of the values of a rank that differ from those of other ranks under the same name.
DIFFERING = "differing"
#: The key of the parameter groups of a rank, if those of other ranks have other parameters.
GROUPS = "parameter.groups"
#: The key of the containers of models and optimizers that a DCP folder changes.
CONTAINERS = "changed.containers"
#: The key of a dict that stands for an array of numpy. Its value is the array's dtype and shape.
_ARRAY = "numpy.ndarray"

_Path = tuple[Any, ...]  # a tuple of names, which a message has once, is shorter than a text


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
            if not isinstance(name, str) or not name or "." in name or name in RESERVED:
                known = ", ".join(RESERVED)
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
        # FSDP2 replaces parameters in a forward pass, so these are put back before they are named.
        names = Names(read_tree(run.holder()))
        require_current(names, [*run.optimizers.values()])
        ids = {name: set(map(id, module.parameters())) for name, module in run.modules.items()}
        for name, optimizer in run.optimizers.items():
            if not run.modules:
                raise ValueError(f"{name}: no module among the objects has its parameters")
            params = set(map(id, params_of(optimizer)))
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

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return all tensors of the models by full name."""
        return Names(ModuleTree(self.holder())).tensors

    def read_models(self) -> dict[str, Any]:
        """Return the states of models and optimizers by name. The ranks do not communicate."""
        states: dict[str, Any] = {
            name: read_model_state(each) for name, each in self.modules.items()
        }
        for name, optimizer in self.optimizers.items():
            owners = self.owners[name]
            # With one model, parameters have their names in it, as `load_optimizer` expects.
            holder = self.modules[owners[0]] if len(owners) == 1 else self.holder(owners)
            states[name] = read_states(Part.OPTIMIZERS, holder, optimizer, exact=True).optimizer
        return states

    def find_plain(self, states: Mapping[str, Any]) -> list[_Path]:
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


def read_model_state(module: nn.Module) -> dict[str, Any]:
    """Return the state of a model. The ranks do not communicate."""
    return read_states(Part.MODEL, module).model


def _values_in(tree: Any, path: _Path = ()) -> dict[_Path, Any]:
    """Return everything in dicts, and in the groups of an optimizer, by its path."""
    if path[1::2] == ("param_groups", "params"):
        return {}  # the names of parameters, which may differ
    is_groups = path[1:] == ("param_groups",)
    if not is_groups and not isinstance(tree, dict):
        return {path: tree}
    found: dict[_Path, Any] = {}
    for key, item in enumerate(tree) if is_groups else tree.items():
        found |= _values_in(item, (*path, key))
    return found


def _listed(value: Any) -> Iterable[Any]:
    return leaves([value]).values()


def _find_complete(value: Any) -> list[_Path]:
    """Return the path of a value itself, or of the values in it that are beside shards."""
    found = leaves(value)
    if not any(map(_is_part, found.values())):
        return [()]
    return [path for path, leaf in found.items() if not _is_part(leaf)]


def _is_part(value: object) -> bool:
    """Return whether a value is a DTensor that is divided between ranks."""
    return is_dtensor(value) and not all(each.is_replicate() for each in value.placements)


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
        if isinstance(obj, Mapping):
            hint = "Pass each by its name: **models."
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
    plain: list[_Path]
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
                if _is_part(leaf) and is_on_some_ranks(leaf)
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
            own[GROUPS] = _pack(lay_out_one_file({GROUPS: params}))
            different = self._settle(ranks.run(lambda: StepResult(None, facts)).by_rank, number)
        equal = set.intersection(*({*each.others.items()} for each in summaries))
        common = {name for name, _ in equal}
        # Only the files that this rank writes: a copy of weights, such as an EMA, may be large.
        own |= {name: _pack(file) for name, file in files.items() if name not in common}
        own[GENERATORS] = _pack(lay_out_one_file({GENERATORS: self.generators}))
        # A resume reads those of all ranks, so ranks with equal ones write them once.
        is_writer = number == 0 or not is_equal
        if is_writer and (changed := [*_changed_containers(self.models, [])]):
            own[CONTAINERS] = _pack(lay_out_one_file({CONTAINERS: changed}))
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


def restore_container(saved: Any, path: list[Any], keys: list[Any] | None) -> None:
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


def unpack(states: Mapping[str, Any], name: str) -> Any:
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


def load_values(state: Any) -> Any:
    """Return a state with its arrays again, and with tensors in memory."""
    if isinstance(state, FileTensor):
        return state.tensor()
    if isinstance(state, dict) and _ARRAY in state:
        (code, shape), values = state[_ARRAY], load_values(state["bytes"])
        return array_of(Array(code, tuple(shape), False, bytes(memory_of(values.contiguous()))))
    if type(state) in (dict, OrderedDict):
        return type(state)((name, load_values(item)) for name, item in state.items())
    if type(state) in (list, tuple):
        return type(state)(map(load_values, state))
    return state


def copy_state(state: Any) -> Any:
    """Return a deep copy, also of compressed sparse tensors, which torch does not copy deeply."""
    found = [each for each in leaves(state).values() if isinstance(each, torch.Tensor)]
    odd = {id(each): each.clone() for each in found if each.layout is not torch.strided}
    return copy.deepcopy(state, odd)

"""The objects of a run, the snapshot of their states, and how it is written."""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Container, Iterable, Mapping, Set, ValuesView
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import nn

from torchlift._model.dtensor import is_dtensor, local_tensor, spans_of
from torchlift._model.names import Names, uses_fsdp1
from torchlift._model.ranks import RankGroup, StepResult
from torchlift._model.slots import ModuleTree, read_tree
from torchlift._model.state import ModuleHolder
from torchlift._save.blocks import Workspace
from torchlift._save.mesh import SavingRanks
from torchlift._save.pickling import holds_numbers
from torchlift._save.replicas import (
    Checksum,
    HeldPart,
    checksum_of,
    difference_error,
    find_differences,
)
from torchlift._save.saving import (
    SaveOptions,
    SaveReport,
    require_savable,
    save_together,
    write_state,
)
from torchlift._save.target import Target
from torchlift._save.values import State, Value, kind_error, take_apart
from torchlift.distributed.gather import is_on_some_ranks
from torchlift.distributed.generators import Generators
from torchlift.distributed.optimizer_state import params_of, require_current
from torchlift.distributed.options import Part, require_groups
from torchlift.distributed.staging import Staging
from torchlift.distributed.state_dict import read_states
from torchlift.errors import CheckpointError, PlacementError
from torchlift.formats.flattening import name_text
from torchlift.formats.index import Leaf
from torchlift.formats.runs import MAGIC, RankItem, item_key

#: The name of the states of the random number generators.
GENERATORS = "rng"
#: The first entries of a checkpoint, and all names that it uses itself.
HEAD = ("step", "metrics")
RESERVED = (*HEAD, GENERATORS, "ranks")
#: The key of a dict that stands for an array of numpy. Its value is the array's dtype and shape.
ARRAY = "numpy.ndarray"


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
        head: The step and the metrics, for a save.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    owners: dict[str, list[str]] = field(default_factory=dict)
    stateful: dict[str, Any] = field(default_factory=dict)
    plain: dict[str, object] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, objects: Mapping[Any, object], head: dict[str, Any] | None = None) -> RunObjects:
        """Sort objects by what they are.

        Raises:
            PlacementError: If `Keeper.resume` could not put an object back.
            ValueError: If a name is reserved, or an optimizer has no model.
        """
        run = cls(head=head or {})
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
        names = Names(read_tree(run.holder(run.modules)))
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
    def models(self) -> tuple[str, ...]:
        """Return the names of models and optimizers. Each rank has a part of their states."""
        return tuple(sorted([*self.modules, *self.optimizers]))

    def holder(self, names: Iterable[str]) -> nn.Module:
        """Return a module that contains the models with these names."""
        return ModuleHolder({name: self.modules[name] for name in names})

    def model_of(self, optimizer: str) -> nn.Module:
        """Return the model of an optimizer, or a module that contains its models."""
        owners = self.owners[optimizer]
        # With one model, parameters have their names in it, as `load_optimizer` expects.
        return self.modules[owners[0]] if len(owners) == 1 else self.holder(owners)

    def read(self) -> dict[str, Any]:
        """Return the states of all objects by name. The ranks do not communicate."""
        states: dict[str, Any] = {
            name: read_model_state(each) for name, each in self.modules.items()
        }
        for name, optimizer in self.optimizers.items():
            read = read_states(Part.OPTIMIZERS, self.model_of(name), optimizer, exact=True)
            states[name] = read.optimizer
        return {**states, **{n: obj.state_dict() for n, obj in self.stateful.items()}, **self.plain}

    def find_buffers(self) -> set[str]:
        """Return the names of the buffers of all models. The first rank's values count."""
        return {
            f"{name}.{key}"
            for name, module in self.modules.items()
            for key, tensor in Names(ModuleTree(module)).tensors.items()
            if not isinstance(tensor, nn.Parameter)
        }


def read_model_state(module: nn.Module) -> dict[str, Any]:
    """Return the state of a model. The ranks do not communicate."""
    return read_states(Part.MODEL, module).model


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
    if not isinstance(obj, kinds) or id(obj) in above or holds_numbers(obj):
        return False
    items: Iterable[object] = obj.values() if isinstance(obj, Mapping) else obj
    above = above | {id(obj)}  # a container may contain itself
    return any(_gives_state(item) or _holds_state(item, above) for item in items)


def _gives_state(obj: object) -> bool:
    return not isinstance(obj, type) and callable(getattr(obj, "state_dict", None))


# ---- the state of a run, and how it is written


class _Summary(NamedTuple):
    """The message of a rank that is about to write.

    Attributes:
        tensors: Digest of the checksums of its tensors, which are sent if it differs.
        objects: Name of an object -> digest of everything in its state but tensors.
    """

    tensors: bytes
    objects: dict[str, bytes]


class _Summed(NamedTuple):
    """The ranks that save, the states by name without tensors, and the checksums of tensors."""

    ranks: SavingRanks
    saved: dict[str, Any]
    sums: dict[HeldPart, Checksum]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of the states of a run on this rank.

    Attributes:
        state: The step, the metrics and the states of all objects, taken apart.
        generators: States of the random number generators.
        buffers: Names of the buffers of models.
    """

    state: State
    generators: dict[str, Any]
    buffers: set[str]

    @classmethod
    def of(cls, run: RunObjects, staging: Staging, path: str, *, is_alone: bool) -> Snapshot:
        """Copy all states to the host. The ranks do not communicate.

        Raises:
            PlacementError: If `Keeper.resume` could not load a state.
        """
        states, generators = run.read(), Generators().state_dict()
        own = {"ranks": {"0": {GENERATORS: generators}}} if is_alone else {}
        arrays = partial(_store_array, run.models)
        state = require_savable({**run.head, **states, **own}, path, arrays)
        for key, tensor in state.tensors.items():
            if is_alone and local_tensor(tensor).shape == tensor.shape:
                continue
            if state.made_of_others:
                raise kind_error(*next(iter(state.made_of_others.items())))
            if is_dtensor(tensor) and (is_alone or state.paths[key][0] not in run.models):
                raise PlacementError(
                    "only models and optimizers may contain DTensors, on the ranks that save",
                    entry=key,
                    hint="Pass the module itself, or full tensors.",
                )
        # A list of a million numbers takes 60 ms so, and 2 s by `copy.deepcopy`.
        objects = pickle.loads(pickle.dumps(state.objects))
        state = replace(state, tensors=staging.copy(state.tensors), objects=objects)
        return cls(state, generators, run.find_buffers() if not is_alone else set())

    def write(self, path: str, ranks: RankGroup, number: int, count: int) -> SaveReport:
        """Write the snapshot: a torch file of one process, or a DCP folder of all ranks."""
        if count == 1:
            # A mesh of one rank has complete tensors.
            tensors = {key: local_tensor(each) for key, each in self.state.tensors.items()}
            values = [Value.of_tensor(*each) for each in tensors.items()]
            state = replace(self.state, tensors=tensors, values=values)
            return write_state(Target.of(path, None, None), state, SaveOptions())
        state = self.state

        # What may fail is inside of a step. Outside, the other ranks would wait.
        def summarise() -> StepResult[_Summed, _Summary]:
            # This group has looked up how to exchange, which may fail.
            saving = SavingRanks(ranks)
            saved, sums = fill_in(state.template, state.objects), self._sum_up()
            objects = {name: _digest(pickled(each)) for name, each in saved.items()}
            message = _Summary(_digest(repr(sums).encode()), objects)
            return StepResult(_Summed(saving, saved, sums), message)

        (saving, saved, sums), by_rank = ranks.run(summarise)
        differ = len({each.tensors for each in by_rank.values()}) > 1
        known = ranks.run(lambda: StepResult(None, sums)).by_rank if differ else {}

        def prepare() -> tuple[Target, State]:
            unlike = self._find_unlike(known)
            # An object whose tensors differ counts as one that differs. Other ranks may have more.
            own = _find_own(by_rank, {state.paths[name][0] for name in unlike & {*state.paths}})
            written = {n: s for n, s in saved.items() if not number or number in own.get(n, ())}
            item = RankItem(count, {} if number else own, self.generators, written)
            renamed = {name: f"{item_key(number)}.{name}" for name in unlike}
            content = bytearray(MAGIC + pickled(item._asdict(), renamed))
            nested = self._nest_tensors(renamed)
            nested[item_key(number)] = torch.frombuffer(content, dtype=torch.uint8)
            return Target.of(path, "dcp", None, None), take_apart(nested, plain=True)

        return save_together(saving, prepare, SaveOptions(), "rank0")

    def _find_unlike(self, sums: Mapping[int, Mapping[HeldPart, Checksum]]) -> set[str]:
        """Return the names of tensors whose values differ between ranks.

        Raises:
            PlacementError: If shards on several meshes differ under one name.
        """
        found = find_differences(sums)
        parts = {part.key: each for part, each in found.items() if part.spans is not None}
        if parts:  # experts of a group of ranks: a DCP folder has one tensor of each name
            hint = "Name the modules of each group of ranks, such as f'expert_{number}'."
            raise difference_error(parts, hint)
        return {part.key for part in found}

    def _nest_tensors(self, renamed: Mapping[str, str]) -> dict[str, Any]:
        """Return the tensors in nested dicts, and those of this rank alone under other names."""
        nested: dict[str, Any] = {}
        for name, tensor in self.state.tensors.items():
            if name in renamed:
                nested[renamed[name]] = local_tensor(tensor)
                continue
            *places, last = map(name_text, self.state.paths[name])
            inside = nested
            for place in places:
                inside = inside.setdefault(place, {})
            inside[last] = tensor
        return nested

    def _sum_up(self) -> dict[HeldPart, Checksum]:
        """Return the checksums of tensors that ranks may have under one name, but for buffers."""
        work, found = Workspace(), dict[HeldPart, Checksum]()
        for name, tensor in self.state.tensors.items():
            is_whole = not is_dtensor(tensor) or all(p.is_replicate() for p in tensor.placements)
            if name not in self.buffers if is_whole else is_on_some_ranks(tensor):
                part = HeldPart(name, None if is_whole else spans_of(tensor, name))
                found[part] = checksum_of(local_tensor(tensor).detach(), work)
        return found


def _find_own(by_rank: Mapping[int, _Summary], apart: Container[object]) -> dict[str, list[int]]:
    """Return name of an object -> the ranks whose state differs from that of the first rank.

    Args:
        by_rank: The message of each rank.
        apart: Names of objects whose tensors differ.
    """
    first, *others = (each.objects for each in by_rank.values())
    own = dict[str, list[int]]()
    for at, each in enumerate(others, 1):
        for name in dict.fromkeys((*first, *each)):
            if name in apart or each.get(name) != first.get(name):
                own.setdefault(name, []).append(at)
    return own


class _Pickler(pickle.Pickler):
    """Pickles containers of plain data, and a `Leaf` for each tensor.

    Without its memo, so that equal data gives equal bytes: which equal strings are one object
    differs between processes.
    """

    def __init__(self, file: io.BytesIO, renamed: Mapping[str, str]) -> None:
        super().__init__(file, 2)
        self.fast, self._renamed = True, renamed

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Leaf:
            return Leaf, (self._renamed.get(obj.key, obj.key),)
        value = obj.item() if type(obj).__module__ == "numpy" else obj  # a scalar: no array is left
        return NotImplemented if value is obj else (type(value), (value,))


def pickled(tree: Any, renamed: Mapping[str, str] | None = None) -> bytes:
    """Return containers as the bytes of a pickle.

    Args:
        tree: Plain data, and a `Leaf` for each tensor.
        renamed: Key of a tensor -> the key that this rank gives it.
    """
    file = io.BytesIO()
    _Pickler(file, renamed or {}).dump(tree)
    return file.getvalue()


def fill_in(template: Any, objects: Mapping[str, object]) -> Any:
    """Return containers with their plain data. A `Leaf` stands for each tensor."""
    if type(template) is Leaf:
        return objects.get(template.key, template)
    if not isinstance(template, dict):
        return type(template)(fill_in(item, objects) for item in template)
    made: Any = type(template)()
    for name, item in template.items():
        made[name] = fill_in(item, objects)
    if hasattr(template, "_metadata"):
        made._metadata = template._metadata
    return made


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _store_array(models: tuple[str, ...], key: str, array: Any) -> Any:
    """Return containers with the bytes of an array of numpy. A file would store it as a list.

    It is a list in models and optimizers, as in every file that `load` reads.
    """
    if key.partition(".")[0] in models:
        return array.tolist()
    values = torch.frombuffer(bytearray(array.tobytes() or b"0"), dtype=torch.uint8)
    return {ARRAY: [array.dtype.str, list(array.shape)], "bytes": values[: array.nbytes]}

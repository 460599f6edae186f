"""The state of optimizers as slots, which are matched by canonical names and filled like models."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from torchlift._model.commit import Commit, repeats
from torchlift._model.dtensor import (
    default_device,
    is_dtensor,
    layout_of,
    local_shape,
    local_tensor,
    overlaps,
    spans_of,
    spread_of,
    wrap,
)
from torchlift._model.handlers import clone_of, is_wrapper, slice_of
from torchlift._model.state import own
from torchlift._model.torch_private import IncompatibleKeys
from torchlift._plan.match import Match
from torchlift._plan.report import list_names
from torchlift._plan.rules import AnySource, Options, allowed
from torchlift._sources.tensors import FileTensor
from torchlift._system.containers import leaves, map_leaves
from torchlift._system.text import Facts, Summary, clipped_list
from torchlift.distributed.broadcast import Inbox, Sent
from torchlift.distributed.optimizer_state import (
    PLAIN,
    Held,
    Holder,
    Saved,
    initial_state,
    params_of,
    path_text,
)
from torchlift.distributed.options import (
    StateDictMismatch,
    StateDictOptions,
    check_value,
)

#: A saved tensor: in memory, in files, or on rank 0.
Stored = torch.Tensor | FileTensor | Sent
#: The path of a value in the state of a parameter.
Path = tuple[Any, ...]


@dataclass(frozen=True, repr=False)
class OptimizerReport(Summary):
    """The result of a load of optimizer state. Every list holds canonical names.

    Attributes:
        loaded: Parameters that received a saved state.
        missing_keys: Parameters without a saved state or saved hyperparameters. They keep those
            that they had.
        unexpected_keys: Parameters that no optimizer holds. Optimizers and pipeline stages may
            share one state dict, so these are never an error.
        left_out: Parameters without a saved state that are frozen, or of an optimizer that makes
            its state in ``step`` only. They start without a state, and are never an error.

    Example:
        >>> from torchlift.distributed import OptimizerReport
        >>> print(OptimizerReport(loaded=["a", "b"], missing_keys=["c"]))
        loaded the state of 2 parameters
          missing (1): c
    """

    loaded: list[str] = field(default_factory=list)
    missing_keys: list[str] = field(default_factory=list)
    unexpected_keys: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def _summary(self) -> tuple[str, Facts]:
        return f"loaded the state of {len(self.loaded)} parameters", [
            *list_names("missing", self.missing_keys),
            *list_names("unexpected", self.unexpected_keys),
            *list_names("without a state, which the first step makes", self.left_out),
        ]


class LoadedKeys(IncompatibleKeys):
    """Missing and unexpected keys by canonical name, as `set_state_dict` returns them.

    It is a tuple of these two lists, as in torch.

    Attributes:
        optimizer: The `OptimizerReport`.
    """

    optimizer: OptimizerReport

    def __new__(
        cls, missing: list[str], unexpected: list[str], report: OptimizerReport | None = None
    ) -> LoadedKeys:
        """Return the result of a load."""
        made = super().__new__(cls, missing, unexpected)
        made.optimizer = report or OptimizerReport()
        return made


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands in a new state for the tensor that a slot will hold.

    Attributes:
        key: the name of the slot.
    """

    key: str


@dataclass
class NewState:
    """The state of an optimizer after the load. The optimizer has not changed yet.

    Attributes:
        optimizer: The optimizer.
        state: Parameter -> its new state, with a `Slot` for each tensor.
        other: State under keys that are not parameters.
        hyper: For each group, the hyperparameters that change.
    """

    optimizer: torch.optim.Optimizer
    state: dict[torch.Tensor, dict[Any, Any]] = field(default_factory=dict)
    other: dict[Any, Any] = field(default_factory=dict)
    hyper: list[dict[str, Any]] = field(default_factory=list)


class OptimizerSlots:
    """The slots of some optimizers, as buffers of a module that one plan fills.

    A slot holds the optimizer's own tensor if the values can be copied into it. A captured graph
    that uses this tensor then sees the new values. Other slots hold a tensor on meta.

    Attributes:
        module: A module with a buffer for each slot.
        buffers: Name of a slot -> its tensor.
        values: Name of a slot -> saved tensor.
        states: The new state of each optimizer.
        report: One report for all optimizers.

    Args:
        holders: The optimizers. They are not changed.
        saved: Their saved state.
        options: How to load.
        device: The device for the state of a parameter on meta.
        weights: The weights that were saved beside the state, by canonical name, if they are known.
        undecided: The ids of parameters on meta that get the dtype of the checkpoint.

    Raises:
        StateDictMismatch: If a shape or a layout does not match. With ``strict``, also if a
            trainable parameter has no saved state or is of another model, or if the parameters
            of one group come from groups that differ.
    """

    def __init__(
        self,
        holders: Sequence[Holder],
        saved: Saved,
        options: StateDictOptions,
        device: torch.device,
        weights: Mapping[str, Any],
        undecided: Container[int],
    ) -> None:
        self.module = nn.Module()
        self.buffers: dict[str, Any] = self.module._buffers
        self.values: dict[str, Stored] = {}
        self._devices: dict[str, torch.device] = {}
        self._holders, self._saved, self._options, self._device = holders, saved, options, device
        self._weights, self._undecided = weights, undecided
        self.report, self._left_alone = OptimizerReport(), set[str]()
        self.states = [self._match(each) for each in holders]
        known = {fqn for each in holders for held in each.params for fqn in held.fqns}
        self.report.unexpected_keys.extend(name for name in saved.state if name not in known)
        self._require_all()

    @cached_property
    def _of_each_element(self) -> dict[Path, bool]:
        """Path in a state -> whether its tensor has the shape of its parameter.

        Parameters that are not square show it: a moment has the shape of each, a matrix for one
        side does not. A path that only square parameters have is left out.
        """
        found: dict[Path, bool] = {}
        for held in (held for each in self._holders for held in each.params):
            name = held.name_in(self._saved.state)
            if name is None or _is_square(held.param):
                continue
            for path, leaf in leaves(self._saved.state[name]).items():
                if isinstance(leaf, Stored) and leaf.shape:
                    found[path] = found.get(path, True) and leaf.shape == held.param.shape
        return found

    @property
    def options(self) -> Options:
        """Return the options of the load into the slots."""
        # Live buffers are copied out of the map. New ones are read: training writes to them.
        source: AnySource = "read" if any(b.is_meta for b in self.buffers.values()) else "auto"
        return Options(device=lambda entry: self._devices[entry.key], strict=False, source=source)

    def make_room(self, inbox: Inbox) -> None:
        """Replace the descriptions of the tensors of rank 0 by memory for them."""
        for key, value in self.values.items():
            if isinstance(value, Sent):
                like = self.buffers[key]
                self.values[key] = inbox.room_for(value, like, self._devices[key])

    def filled(self, tree: Any) -> Any:
        """Return a new state with the tensors in its slots."""
        found = self.buffers
        return map_leaves(tree, lambda leaf, _: found[leaf.key] if type(leaf) is Slot else leaf)

    def _match(self, holder: Holder) -> NewState:
        """Match saved state with one optimizer, parameter by parameter and by canonical name."""
        saved, strict, report = self._saved, self._options.strict, self.report
        other = {key: each for key, each in saved.other.items() if holder in self._find_owners(key)}
        new = NewState(holder.optimizer, other=copy.deepcopy(present(other)))
        stateless: list[Held] = []
        for group, params in zip(holder.optimizer.param_groups, holder.groups, strict=True):
            new.hyper.append(self._match_group(group, params))
            if strict and new.hyper[-1] and params:
                _require_kind(holder.optimizer, group, new.hyper[-1])
            if new.hyper[-1]:
                new.hyper[-1].update(_fill_in(holder.optimizer, group, new.hyper[-1]))
            loaded, needs = {**group, **new.hyper[-1]}, dict[Any, dict[Any, int]]()
            for held in params:
                name = held.name_in(saved.state)
                if name is not None:
                    owner = _Owner(name, replace(held, group=loaded), needs)
                    new.state[held.param] = self._slots_of(owner)
                    report.loaded.append(name)
                elif not saved.gone.isdisjoint(held.fqns):
                    self._left_alone.add(held.name)
                    report.missing_keys.append(held.name)
                else:
                    stateless.append(held)
        stepped = bool(new.state)
        for held in stateless:
            initial = initial_state(held)
            if initial is None and not (held.state and stepped):
                report.left_out.append(held.name)
                if strict:
                    # No state of this optimizer was saved, so it had not taken a step.
                    new.state[held.param] = {}
            elif not held.param.requires_grad:
                if held.state and strict and not allowed([held.name], saved.allow_missing):
                    # It was never trained, so what this optimizer has is from another run.
                    report.left_out.append(held.name)
                    new.state[held.param] = {}
            elif held.state or initial:
                # A frozen parameter that was never trained has no state to miss.
                report.missing_keys.append(held.name)
        return new

    def _find_owners(self, key: Any) -> Sequence[Holder]:
        """Return the optimizers that have state under a key that is not a parameter.

        New ones do not have it yet. Then these are the optimizers with a step of their own, because
        torch's optimizers do not make such state.
        """
        live = [each for each in self._holders if key in each.optimizer.state]
        own_step = [each for each in self._holders if not _is_torchs(each.optimizer, "step")]
        return live or own_step or self._holders

    def _match_group(self, group: dict[str, Any], params: Sequence[Held]) -> dict[str, Any]:
        """Return the saved hyperparameters of a group, which its parameters identify in any order.

        They are copies, so the optimizer and the caller's dict share no mutable object.
        """
        saved = self._saved
        named = [(held, held.name_in(saved.hyper)) for held in params]
        self.report.missing_keys.extend(held.name for held, name in named if name is None)
        found = {name: saved.hyper[name] for _, name in named if name is not None}
        source = next(iter(found), "")
        for name, other in found.items():
            if other is not found[source]:
                _require_same(found[source], other, source, name)
        chosen = found.get(source, {})
        if saved.empty and not params:
            chosen = saved.empty.pop(0)  # the next group without parameters
        # An optimizer has its own names.
        hyper = {key: copy.deepcopy(each) for key, each in chosen.items() if key != "param_names"}
        for key, value in hyper.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                hyper[key] = value.to(group[key].device)
        return hyper

    def _require_all(self) -> None:
        names, saved = list(dict.fromkeys(self.report.missing_keys)), self._saved
        self.report.missing_keys[:] = names
        excused = allowed(names, saved.allow_missing) | self._left_alone
        missing = [name for name in names if name not in excused]
        is_empty = not self.report.loaded and not any(
            hyper for new in self.states for hyper in new.hyper
        )
        if saved.must_match and is_empty and names:
            raise StateDictMismatch(
                "nothing in the optimizer state matches the optimizer",
                expected=clipped_list(names),
                found=clipped_list([*saved.state, *saved.hyper]),
            )
        if self._options.strict and missing:
            raise StateDictMismatch(
                f"missing the optimizer state of {clipped_list(map(repr, missing))}",
                hint="Pass strict=False to load what fits.",
                missing_keys=missing,
            )

    def _slots_of(self, owner: _Owner) -> dict[Any, Any]:
        """Add the slots of one parameter, and return its new state with the slots.

        It shares no mutable object with the saved state.
        """
        saved = self._saved.state[owner.name]
        if not isinstance(saved, dict):
            raise StateDictMismatch(
                "the state of a parameter is not a dict",
                entry=owner.name,
                found=type(saved).__name__,
            )
        live = owner.held.state
        tensors = _tensors(live)
        needed = owner.needed if saved else {}
        if lacks := needed.keys() - (saved if self._options.strict else {**live, **saved}).keys():
            if self._options.strict:
                kind = type(owner.held.optimizer).__name__
                raise StateDictMismatch(
                    f"the saved state lacks values that {kind} needs",
                    entry=owner.name,
                    expected=clipped_list(needed),
                    found=clipped_list(map(str, saved)),
                    hint="Make an optimizer of the kind that was saved. Or pass strict=False: "
                    "missing values then stay as they are, or start as in a new optimizer.",
                )
            live = {**{key: owner.first[key] for key in lacks}, **live}

        for key, value in saved.items():
            if isinstance(value, (dict, list, tuple)):  # an empty one has no leaf
                _require_no_tensor(owner, value, tensors, (key,))

        def put_slot(value: Any, path: Path) -> Any:
            if isinstance(value, Stored):
                return self._slot(owner, value, tensors.get(path), path)
            _require_no_tensor(owner, value, tensors, path)
            return copy.deepcopy(value)

        new: dict[Any, Any] = map_leaves(saved, put_slot)
        return new if self._options.strict else {**live, **new}

    def _slot(
        self, owner: _Owner, value: Stored, live: torch.Tensor | None, path: Path
    ) -> Slot | torch.Tensor:
        """Add a slot for a saved tensor, and return what stands for it in the new state."""
        key = owner.entry(path)
        like = self._layout(owner, value, live, path)
        check_value(key, like, value, self._options)
        device, dtype = _goal(owner, value, live, path, self._device)
        if path[-1] != "step":
            dtype = self._dtype_of(owner, value, live, path)
        if isinstance(value, torch.Tensor) and is_wrapper(local_tensor(value)):
            if value is live:
                return live
            # The live tensor is replaced: its class may not permit copies into slices.
            value, live = _sliced(key, value, like), None
        needed = tuple(value.shape), device, dtype, spread_of(like)
        if live is not None and _can_take(live) and _form(live) == needed:
            slot = live
        else:
            shape = local_shape(spans_of(like)) if is_dtensor(like) else value.shape
            # On meta a tensor gets the saved dtype.
            where = "meta" if dtype == value.dtype else device
            slot = torch.empty(shape, dtype=dtype, device=where)
            slot = wrap(like, slot) if is_dtensor(like) else slot
        while key in self.values:  # a dict may have the keys 0 and "0"
            key += "'"
        self.buffers[key] = slot
        self.values[key], self._devices[key] = value, device
        return Slot(key)

    def _dtype_of(
        self, owner: _Owner, value: Stored, live: torch.Tensor | None, path: Path
    ) -> torch.dtype:
        """Return the dtype for a state: the parameter's, unless the optimizer keeps another one."""
        saved, goal = value.dtype, owner.param.dtype
        if saved == goal or not (saved.is_floating_point and goal.is_floating_point):
            return saved
        if id(owner.param) in self._undecided or not _is_plain(owner.held.optimizer):
            return saved  # or a method of the optimizer decides it
        # Other optimizers than torch's may make state in float32 for parameters of any dtype.
        own = owner.initial.get(path, live)
        if own is not None:
            return own.dtype
        # Only a step can make it, and it was made in this dtype for a weight of the same dtype.
        weight = self._weights.get(owner.held.name_in(self._weights) or "")
        return saved if getattr(weight, "dtype", None) == goal else goal

    def _layout(
        self, owner: _Owner, value: Stored, live: torch.Tensor | None, path: Path
    ) -> torch.Tensor | None:
        """Return a tensor with the layout for a saved one, or None for a complete plain tensor.

        Raises:
            StateDictMismatch: If the shape differs from the optimizer's, or the layout is unknown.
        """
        recorded = None
        if is_dtensor(owner.param):
            recorded = self._saved.layouts.get(owner.name, {}).get(path_text(path))
        is_scalar = len(path) > 1 or not owner.needed.get(path[0])
        if not value.shape and recorded is None and is_scalar:
            return value if is_dtensor(value) else None
        expected = live
        if live is None:
            expected = self._expected(owner, value, path, recorded)
        if expected is not None and expected.shape != value.shape:
            where = owner.entry(path)
            raise StateDictMismatch(
                "the saved state has another shape than the optimizer's",
                entry=where,
                expected=list(expected.shape),
                found=list(value.shape),
                mismatched={where: (tuple(expected.shape), tuple(value.shape))},
                hint="Give the optimizer the parameters it was saved with, in the same order. One "
                "rank's part of a sharded optimizer cannot be loaded.",
            )
        return expected

    def _expected(
        self, owner: _Owner, value: Stored, path: Path, recorded: str | None
    ) -> torch.Tensor | None:
        """Return a tensor with the layout of a state that the optimizer lacks, or None if plain.

        Raises:
            StateDictMismatch: If the layout is unknown.
        """
        param, is_alike = owner.param, value.shape == owner.param.shape
        if not is_dtensor(param):
            return param if is_alike else owner.initial.get(path)
        if is_alike and spread_of(value) == spread_of(param):
            return param
        if recorded is not None:
            return None if recorded == PLAIN else _blank(recorded, owner, value, path)
        if is_dtensor(value):
            expected = owner.initial.get(path)
            if expected is None and (is_alike or value.device_mesh != param.device_mesh):
                raise _unknown_layout(owner, value, path)
            # State with another shape than its parameter may have any layout on its mesh.
            return value if expected is None else expected
        # Several ranks wrote this tensor, so it was a DTensor.
        is_sharded = isinstance(value, FileTensor) and len(value.entry.chunks) > 1
        # SOAP and Shampoo keep a square matrix for each side of a weight. If the weight is square,
        # such a matrix has its shape, but every rank has all of it.
        is_sure = owner.name in self._saved.layouts or is_sharded or not _is_square(param)
        if is_alike and (is_sure or self._of_each_element.get(path)):
            return param
        # Factored moments (Adafactor) have another shape, so only the optimizer shows the layout.
        expected = owner.initial.get(path)
        is_unknown = path not in self._of_each_element if is_alike else is_sharded
        if expected is None and is_unknown:
            raise _unknown_layout(owner, value, path)
        return expected


def _blank(layout: str, owner: _Owner, value: Stored, path: Path) -> torch.Tensor:
    """Return a DTensor on meta, on the mesh of a parameter, in a recorded layout.

    Raises:
        StateDictMismatch: If the layout does not match this mesh.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    assert is_dtensor(owner.param)
    mesh, texts = owner.param.device_mesh, layout.split(",")
    if set(texts) == {"R"}:
        texts = ["R"] * mesh.ndim
    if len(texts) != mesh.ndim or not all(text == "R" or text[1:].isdecimal() for text in texts):
        raise _unknown_layout(owner, value, path)
    placements = [Replicate() if text == "R" else Shard(int(text[1:])) for text in texts]
    whole = torch.empty(value.shape, dtype=value.dtype, device="meta")
    # Without a rank as the source, this does not communicate.
    made: torch.Tensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return made


def _unknown_layout(owner: _Owner, value: Stored, path: Path) -> StateDictMismatch:
    return StateDictMismatch(
        "the layout of an optimizer state on the mesh is unknown",
        entry=owner.entry(path),
        expected="a layout in the checkpoint, or in the optimizer's own state",
        found=f"shape {list(value.shape)}, {(is_dtensor(value) and layout_of(value)) or 'whole'}",
        hint="Take steps with the optimizer until it has this state, then load the model and the "
        "optimizer. The load uses the layout of the optimizer's own tensors and replaces their "
        "values.",
    )


def _is_square(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 1 and len(set(tensor.shape)) == 1


@dataclass(frozen=True)
class _Owner:
    """The parameter of a state that is loaded.

    Attributes:
        name: The name under which the state was saved.
        held: The parameter, with its group as it will be after the load.
        needs: Dimensions and dtype -> the result of `needed`, shared by its group.
    """

    name: str
    held: Held
    needs: dict[Any, dict[Any, int]] = field(default_factory=dict)

    @property
    def param(self) -> torch.Tensor:
        """The parameter."""
        return self.held.param

    @property
    def needed(self) -> dict[Any, int]:
        """The values without which a step of torch's optimizers fails: key -> dimensions."""
        key = self.param.dim(), self.param.dtype
        if key not in self.needs:
            self.needs[key] = _needed_by(self.held)
        return self.needs[key]

    @cached_property
    def first(self) -> dict[Any, Any]:
        """The optimizer's initial state, empty if it is unknown."""
        return initial_state(self.held) or {}

    @cached_property
    def initial(self) -> dict[Path, torch.Tensor]:
        """The tensors of the optimizer's initial state."""
        return _tensors(self.first)

    def entry(self, path: Path) -> str:
        """Return the name of the state at a path, for errors."""
        return ".".join(map(str, (self.name, *path)))


def _tensors(state: Any) -> dict[Path, torch.Tensor]:
    return {path: leaf for path, leaf in leaves(state).items() if torch.is_tensor(leaf)}


def _is_torchs(optimizer: torch.optim.Optimizer, method: str) -> bool:
    """Return whether torch defines a method of the optimizer's class, or the class lacks it."""
    found = getattr(type(optimizer), method, torch.optim.Optimizer)
    return str(found.__module__).startswith("torch.optim.")


def _needed_by(held: Held) -> dict[Any, int]:
    """Return the keys of the initial state, if the optimizer runs torch's own code.

    Other code may add missing values itself, as the SGD of torch does with its momentum. A
    subclass may do so in ``_init_group``.
    """
    optimizer = held.optimizer
    is_torchs = _is_torchs(optimizer, "step") and _is_torchs(optimizer, "_init_group")
    if not is_torchs or runs_own_code(optimizer) or isinstance(optimizer, torch.optim.SGD):
        return {}
    dtype = held.param.dtype
    if not (dtype.is_floating_point or dtype.is_complex):  # it takes no step
        return {}
    # On meta, where it takes no memory.
    like = torch.empty(held.param.shape, dtype=dtype, device="meta")
    found = initial_state(replace(held, param=like.requires_grad_())) or {}
    return {key: value.dim() if torch.is_tensor(value) else 0 for key, value in found.items()}


def _can_take(live: torch.Tensor) -> bool:
    """Return whether values can be written into a tensor of an optimizer."""
    local = local_tensor(live)
    if local.layout is not torch.strided or local.is_meta or is_wrapper(local):
        return False
    is_locked = local.is_inference() and not torch.is_inference_mode_enabled()
    return not (is_locked or repeats(local.shape, local.stride()))


def _form(live: torch.Tensor) -> tuple[Any, ...]:
    return tuple(live.shape), live.device, live.dtype, spread_of(live)


def _sliced(where: str, value: torch.Tensor, like: torch.Tensor | None) -> torch.Tensor:
    """Return this rank's slice of a wrapper tensor, such as low-bit state.

    Raises:
        StateDictMismatch: If its class cannot be sliced like the parameter.
    """
    if is_dtensor(value) or not is_dtensor(like):
        return value
    whole = [(0, size) for size in value.shape]
    try:
        ((_, out_of),) = overlaps(spans_of(like), whole)
        return wrap(like, clone_of(slice_of(value, out_of)))
    except Exception as error:
        raise StateDictMismatch(
            f"a complete {type(value).__name__} cannot be sliced like its parameter",
            entry=where,
            found=f"{type(error).__name__}: {error}",
            hint="Save it without full_state_dict, and load it on the same mesh.",
        ) from error


def _goal(
    owner: _Owner,
    value: Stored,
    live: torch.Tensor | None,
    path: Path,
    blank: torch.device,
) -> tuple[torch.device, torch.dtype]:
    """Return device and dtype as `torch.optim.Optimizer.load_state_dict` does, without a cast.

    ``step`` stays on its device, except in groups that need it on the parameter's device.

    Args:
        owner: The parameter.
        value: The saved tensor.
        live: The optimizer's tensor.
        path: The path of both.
        blank: The device for the state of a parameter on meta.
    """
    param = owner.param
    device = param.device
    if param.is_meta:
        device = default_device(param) if is_dtensor(param) else blank
    if path[-1] == "step":
        if owner.held.group.get("capturable") or owner.held.group.get("fused"):
            return device, torch.float32
        here = value if isinstance(value, torch.Tensor) else live
        return torch.device("cpu") if here is None else here.device, value.dtype
    return (live.device if live is not None and not value.shape else device), value.dtype


def _require_no_tensor(
    owner: _Owner, value: object, tensors: Mapping[Path, torch.Tensor], path: Path
) -> None:
    """Refuse a plain value for a tensor with dimensions. The next step would fail.

    Raises:
        StateDictMismatch: If the optimizer has such a tensor.
    """
    if value is None and isinstance(owner.held.optimizer, torch.optim.SGD):
        return  # older versions saved None for no momentum
    for end in range(1, len(path) + 1):  # a list may stand in the place of a tensor
        part = path[:end]
        expected = tensors[part] if part in tensors else owner.initial.get(part)
        if expected is not None and expected.dim():
            raise StateDictMismatch(
                "the saved state is not a tensor",
                entry=owner.entry(part),
                expected=f"a tensor of shape {list(expected.shape)}",
                found=type(value).__name__,
            )


# ---- groups


def _require_kind(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], saved: dict[str, Any]
) -> None:
    """Refuse the group of another kind of optimizer.

    New versions of an optimizer add switches, and schedulers add numbers to groups. So a group is
    of another kind only if it lacks a number of this kind and has an additional one.

    Raises:
        StateDictMismatch: If it is of another kind.
    """
    lacks = [
        key
        for key, default in getattr(optimizer, "defaults", {}).items()
        if key not in saved and not isinstance(default, (bool, type(None)))
    ]
    more = [str(key) for key in saved if key not in group]
    if lacks and more:
        kind = type(optimizer).__name__
        raise StateDictMismatch(
            f"saved by another kind of optimizer than {kind}",
            entry="param_groups",
            expected=f"{clipped_list(lacks)} in each group",
            found=clipped_list(more),
            hint="Make an optimizer of the kind that was saved, or pass strict=False.",
        )


def _fill_in(optimizer: Any, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Return the options that a saved group lacks, with the values of the optimizer's own code.

    A file may be older than an option. ``__setstate__`` then adds what the optimizer did before it
    had the option, not what the caller selected. It is called on a copy without parameters.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or group.keys() <= {*saved, "params"}:
        return {}
    copied, made = object.__new__(type(optimizer)), {**saved, "params": []}
    vars(copied).update(vars(optimizer), defaults={**optimizer.defaults})  # torch adds to it
    try:
        copied.__setstate__({"state": defaultdict(dict), "param_groups": [made]})
    except Exception:  # the load calls it again, and raises the error there
        return {}
    return {key: made[key] for key in made.keys() - saved.keys() - {"params"}}


def _require_same(a: dict[str, Any], b: dict[str, Any], first: str, second: str) -> None:
    for key in sorted((a.keys() & b.keys()) - {"param_names"}, key=str):
        same = a[key] is b[key] or bool(torch.as_tensor(a[key] == b[key]).all())
        if not same:
            raise StateDictMismatch(
                f"parameters of one group were saved with different values of {key!r}",
                entry=second,
                expected=f"{a[key]!r}, as for {first!r}",
                found=repr(b[key]),
                hint="Give the optimizer the parameter groups it was saved with.",
            )


# ---- the optimizer itself


def require_matched(matched: Match, *_: object) -> None:
    """Check that the plan has a step for each slot. The shapes were compared before."""
    assert not matched.unmatched


def is_left_to_us(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer loads without hooks and with torch's ``load_state_dict``.

    Example:
        >>> is_left_to_us(torch.optim.SGD([torch.ones(1)]))
        True
    """
    return _is_plain(optimizer) and not (
        optimizer._optimizer_load_state_dict_pre_hooks
        or optimizer._optimizer_load_state_dict_post_hooks
    )


def runs_own_code(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether code outside of torch may refuse the state, or write into it.

    Example:
        >>> runs_own_code(torch.optim.SGD([torch.ones(1)]))
        False
    """
    return not (is_left_to_us(optimizer) and _is_torchs(optimizer, "__setstate__"))


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    # A wrapper of an optimizer may be of another class, and forward what it lacks.
    method = getattr(type(optimizer), "load_state_dict", None)
    return method is torch.optim.Optimizer.load_state_dict


def set_states(slots: OptimizerSlots, commit: Commit, *, own_code: bool) -> None:
    """Set the new state of the optimizers that run code of their own, or of all other ones.

    Raises:
        StateDictMismatch: If an optimizer of torch cannot use the state.
    """
    for new in slots.states:
        optimizer = new.optimizer
        if runs_own_code(optimizer) != own_code:
            continue
        commit.keep_optimizer(optimizer, values=own_code)
        filled = {param: slots.filled(state) for param, state in new.state.items()}
        state = {**optimizer.state, **filled, **new.other}
        held = set(params_of(optimizer))  # as in torch, state of former parameters is dropped
        state = {
            key: each
            for key, each in state.items()
            if key in held or not isinstance(key, torch.Tensor)
        }
        # Without empty entries: some optimizers read the first entry, whichever it is.
        state = {key: each for key, each in state.items() if not isinstance(each, dict) or each}
        if not is_left_to_us(optimizer):
            _let_load(new, slots, state)
            continue
        # Optimizer.load_state_dict would cast state that the optimizer keeps in float32 for
        # bfloat16 weights (pytorch/pytorch#43706).
        for group, hyper in zip(optimizer.param_groups, new.hyper, strict=True):
            group.update(hyper)
        kept = {"state": defaultdict(dict, state), "param_groups": optimizer.param_groups}
        try:
            optimizer.__setstate__(kept)
        except Exception as error:
            if own_code:
                raise
            raise StateDictMismatch(
                f"{type(optimizer).__name__} cannot use this state: {type(error).__name__}: "
                f"{error}",
                hint="Make an optimizer of the kind that was saved.",
            ) from error


def _let_load(new: NewState, slots: OptimizerSlots, state: dict[Any, Any]) -> None:
    """Call the ``load_state_dict`` of an optimizer that has one of its own, or hooks."""
    optimizer = new.optimizer
    ids: dict[int, int] = {}
    groups = [
        {**group, **hyper, "params": [ids.setdefault(id(p), len(ids)) for p in group["params"]]}
        for group, hyper in zip(optimizer.param_groups, new.hyper, strict=True)
    ]
    numbered = {ids.get(id(key), key): value for key, value in state.items()}
    own(optimizer, "load_state_dict")({"state": numbered, "param_groups": groups})
    if not _is_plain(optimizer):
        return
    for param, given in new.state.items():
        # Undo the casts of the base class to the parameter's dtype, but no change of a hook.
        live = optimizer.state[param]
        for key, value in slots.filled(given).items():
            now = live.get(key)
            both = isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor)
            if both and now.dtype == param.dtype != value.dtype:
                live[key] = value


def present(tree: Any) -> Any:
    """Return nested containers with tensors in memory instead of tensors of files."""
    return map_leaves(tree, lambda leaf, _: leaf.tensor() if isinstance(leaf, FileTensor) else leaf)

"""`dispatch`: a module that is spread over devices runs, with the hooks of ``accelerate``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from torchlift._model.commit import Commit
from torchlift._model.devices import DISK, usable_device
from torchlift._model.slots import Group, Slot, collect, is_lazy, walk
from torchlift.errors import PlacementError
from torchlift.remap.devices import Device, is_accelerator, spelled
from torchlift.remap.fitting import Fit
from torchlift.remap.maps import ByKey, by_key

M = TypeVar("M", bound=nn.Module)

#: Modules whose forward reads the weights of submodules that it never calls.
READERS: tuple[type[nn.Module], ...] = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


def dispatch(
    module: M,
    device_map: Mapping[str, Device] | None = None,
    *,
    main_device: Device | None = None,
    whole: Iterable[type[nn.Module]] = READERS,
    skip_keys: Sequence[str] | None = None,
) -> M:
    """Make a module run whose tensors are on several devices.

    Hooks of the ``accelerate`` library move the inputs of each module to where its weights are, and
    the output back to where the input came from. What the map leaves on the host or on disk runs on
    the main device: its weights go there for the time of the call, straight from the file where
    `torchlift.load` has left them mapped. Without an accelerator in the map everything runs on the
    host, and what is on disk is paged in by the system as it is used.

    For inference: gradients of weights that are moved for a call are lost. To take the hooks off
    again, call ``accelerate.hooks.remove_hook_from_module(module, recurse=True)``.

    Args:
        module: a loaded module; tensors that are elsewhere than the map says are moved.
        device_map: dotted prefix -> device, as from `fit` or `by_key`, the same that
            `torchlift.load` got as ``device=``. None takes the devices the tensors are on.
        main_device: where layers run that are kept on the host or on disk. None: as `fit` chose, or
            the first accelerator of the map. ``"cpu"`` runs them on the host.
        whole: classes whose weights are moved all at once for a call, because their forward uses
            weights of submodules without calling these: to torch they are on meta otherwise.
        skip_keys: keyword arguments that are not moved; None: what a transformers model declares.

    Returns:
        The same module.

    Raises:
        ModuleNotFoundError: ``accelerate`` is needed and not installed.
        PlacementError: a tensor is on meta, a prefix matches nothing, a device is not there, or a
            module holds tensors that would run on different devices.

    Example:
        >>> import torch
        >>> from torchlift import remap
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
        >>> remap.dispatch(model, {"0": "cpu", "1": "disk"})(torch.ones(1, 3)).shape
        torch.Size([1, 2])
    """
    groups = [group for group in collect(module) if not is_lazy(group.tensor)]
    _require_values(groups)
    rule = by_key({}) if device_map is None else by_key(device_map)
    rule.check([name for group in groups for name in group.names])
    homes = {id(group): _home(rule, group) for group in groups}
    if main_device is None:
        main = _main(device_map, homes.values())
    else:
        main = spelled(usable_device(main_device, "main_device"))
    spread = Spread(groups, homes, main)
    if skip_keys is None:
        skip_keys = getattr(module, "_skip_keys_device_placement", None)
    run(module, spread, tuple(whole), skip_keys)
    return module


def run(
    module: nn.Module,
    spread: Spread,
    whole: tuple[type[nn.Module], ...] = READERS,
    skip_keys: Sequence[str] | None = None,
) -> None:
    """Move the tensors and attach the hooks; nothing has changed when it raises."""
    if len(spread.devices) < 2 and not any(map(spread.is_away, spread.groups)):
        spread.move()
        return
    _accelerate()
    needed = stops(module, spread, whole)
    spread.move()
    attach(module, needed, [group for group in spread.groups if len(group.slots) > 1], skip_keys)


class Spread:
    """Where every tensor is kept and where it runs.

    Args:
        groups: the tensors.
        homes: identity of a group -> device it is kept on, or ``"disk"``.
        main: the device on which what is kept on the host or on disk runs.
    """

    def __init__(self, groups: Sequence[Group], homes: Mapping[int, str], main: str) -> None:
        self.groups = groups
        self._homes = homes
        self.main = main
        self.owned: dict[int, list[tuple[Slot, Group]]] = {}
        for group in groups:
            for slot in group.slots:
                self.owned.setdefault(id(slot.module), []).append((slot, group))

    @property
    def devices(self) -> set[str]:
        """All devices on which something runs."""
        return {self.runs_on(group) for group in self.groups}

    def runs_on(self, group: Group) -> str:
        """The device on which the tensor is used."""
        home = self._homes[id(group)]
        return home if is_accelerator(home) else self.main

    def is_away(self, group: Group) -> bool:
        """Whether the tensor is kept elsewhere than where it is used."""
        return not is_accelerator(self._homes[id(group)]) and is_accelerator(self.main)

    def move(self) -> None:
        """Put the tensors where they are kept; hidden buffers, where they are used."""
        with Commit() as commit:
            for group in self.groups:
                home = self.runs_on(group) if not group.persistent else self._homes[id(group)]
                device = torch.device("cpu" if home == DISK else home)
                if group.tensor.device != device:
                    commit.put(group, group.tensor.detach().to(device))


@dataclass(frozen=True, slots=True)
class Stop:
    """A submodule that needs a hook.

    Attributes:
        module: the submodule.
        device: where its inputs go.
        weights: what is moved there for a call, by name in the submodule; None for nothing.
        deep: whether the weights of its submodules are among them.
    """

    module: nn.Module
    device: str
    weights: Mapping[str, torch.Tensor] | None = None
    deep: bool = False


def attach(
    module: nn.Module, stops: Mapping[str, Stop], ties: Iterable[Group], skip: Sequence[str] | None
) -> None:
    """Attach accelerate's hooks: one per stop, and one that brings the output of `module` back."""
    hooks = _accelerate()
    # A weight under two names is moved for a call once: accelerate keys them by address.
    tied: dict[int, Any] = {group.tensor.data_ptr(): {} for group in ties}
    for prefix, stop in stops.items():
        hook = hooks.AlignDevicesHook(
            execution_device=torch.device(stop.device),
            offload=stop.weights is not None,
            io_same_device=not prefix,
            weights_map=stop.weights,
            offload_buffers=True,
            place_submodules=stop.deep,
            skip_keys=skip,
            tied_params_map=tied,
        )
        hooks.add_hook_to_module(stop.module, hook)
    if "" not in stops:
        back = hooks.AlignDevicesHook(io_same_device=True, skip_keys=skip)
        hooks.add_hook_to_module(module, back)


def stops(module: nn.Module, spread: Spread, whole: tuple[type[nn.Module], ...]) -> dict[str, Stop]:
    """Prefix -> what its hook must do, for the submodules that need one.

    These are the ones that hold tensors, and the ones where a part of the module begins that runs
    on one device, so that what such a part adds up, a residual say, is on that device.

    Raises:
        PlacementError: a module cannot run as it is spread.
    """
    below = _below(module, spread)
    found: dict[str, Stop] = {}
    seen: set[int] = set()
    deep: str | None = None
    for prefix, submodule in walk(module):
        if id(submodule) in seen or (deep is not None and prefix.startswith(deep)):
            continue
        seen.add(id(submodule))
        devices = {spread.runs_on(group) for group in below[prefix]}
        parent = prefix[: prefix[:-1].rfind(".") + 1]
        begins = not prefix or len({spread.runs_on(group) for group in below[parent]}) > 1
        own = spread.owned.get(id(submodule), [])
        if len(devices) == 1 and isinstance(submodule, whole):
            deep = prefix
            away = any(map(spread.is_away, below[prefix]))
            weights = _named(below[prefix], prefix) if away else None
            found[prefix] = Stop(submodule, next(iter(devices)), weights, deep=away)
        elif own:
            away = any(spread.is_away(group) for _, group in own)
            _check_runnable(prefix, submodule, away)
            weights = {slot.name: group.tensor for slot, group in own} if away else None
            found[prefix] = Stop(submodule, _own_device(prefix, own, spread), weights)
        elif len(devices) == 1 and begins:
            found[prefix] = Stop(submodule, next(iter(devices)))
    return found


def _below(module: nn.Module, spread: Spread) -> dict[str, list[Group]]:
    """Prefix -> the tensors of the module there and of those below it."""
    below: dict[str, list[Group]] = {}
    for prefix, submodule in reversed(list(walk(module))):
        below[prefix] = [group for _, group in spread.owned.get(id(submodule), [])]
        for name, child in submodule._modules.items():
            if child is not None:
                below[prefix] += below[f"{prefix}{name}."]
    return below


def _named(groups: Iterable[Group], prefix: str) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(prefix): group.tensor
        for group in groups
        for name in group.names
        if name.startswith(prefix)
    }


def _own_device(prefix: str, own: Sequence[tuple[Slot, Group]], spread: Spread) -> str:
    devices = {spread.runs_on(group): slot.name for slot, group in own}
    if len(devices) > 1:
        raise PlacementError(
            "a module cannot run with its own tensors on several devices",
            entry=prefix.removesuffix(".") or "(the module itself)",
            expected="one device",
            found=", ".join(f"{name} on {device}" for device, name in devices.items()),
            hint="Map the module's name instead of the names of its tensors.",
        )
    return next(iter(devices))


def _check_runnable(prefix: str, module: nn.Module, away: bool) -> None:
    if away and isinstance(module, nn.RNNBase):
        raise PlacementError(
            "a recurrent layer holds on to its weights, which cannot be moved for a call",
            entry=prefix.removesuffix(".") or "(the module itself)",
            hint='Map it to an accelerator, or pass main_device="cpu".',
        )


def _home(rule: ByKey[Device], group: Group) -> str:
    """Where the map keeps a tensor: what it says about its first known name; else where it is."""
    asked = next((a for name in group.names if (a := rule.at(name)) is not None), None)
    if asked is None:
        return str(group.tensor.device)
    return DISK if asked == DISK else str(usable_device(asked, group.fqn))


def _main(device_map: Mapping[str, Device] | None, homes: Iterable[str]) -> str:
    if isinstance(device_map, Fit):
        return device_map.main or "cpu"
    return next(filter(is_accelerator, homes), "cpu")


def _require_values(groups: Iterable[Group]) -> None:
    blank = [group.fqn for group in groups if group.tensor.is_meta]
    if blank:
        raise PlacementError(
            f"{len(blank)} tensors are on meta and have no values to run with",
            entry=blank[0],
            hint="Load the module first: torchlift.load(module, path, device=device_map).",
        )


def _accelerate() -> ModuleType:
    try:
        from accelerate import hooks
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "remap.dispatch moves inputs between devices with accelerate's hooks, and accelerate "
            "is not installed: pip install 'torchlift[accelerate]'",
            name="accelerate",
        ) from error
    module: ModuleType = hooks
    return module

"""`dispatch`: a module that is spread over devices runs, with the hooks of ``accelerate``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from torchlift._model.commit import Commit
from torchlift._model.devices import DISK, usable_device
from torchlift._model.slots import Group, Slot, collect, is_lazy, walk
from torchlift.errors import PlacementError
from torchlift.remap.fitting import Fit
from torchlift.remap.maps import ByKey, Device, by_key, is_accelerator, spelled

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
    blank = [group.fqn for group in groups if group.tensor.is_meta]
    if blank:
        raise PlacementError(
            f"{len(blank)} tensors are on meta and have no values to run with",
            entry=blank[0],
            hint="Load the module first: torchlift.load(module, path, device=device_map).",
        )
    rule = by_key({} if device_map is None else device_map)
    rule.check([name for group in groups for name in group.names])
    kept = {id(group): _kept_on(rule, group) for group in groups}
    if main_device is not None:
        main = spelled(usable_device(main_device, "main_device"))
    elif isinstance(device_map, Fit):
        main = device_map.main or "cpu"
    else:
        main = next(filter(is_accelerator, kept.values()), "cpu")
    if skip_keys is None:
        skip_keys = getattr(module, "_skip_keys_device_placement", None)
    run(module, Spread(groups, kept, main), tuple(whole), skip_keys)
    return module


def _kept_on(rule: ByKey[Device], group: Group) -> str:
    """Return where the first name that the map knows keeps a tensor; else where it is."""
    asked = next((a for name in group.names if (a := rule.at(name)) is not None), None)
    if asked is None:
        return str(group.tensor.device)
    return DISK if asked == DISK else str(usable_device(asked, group.fqn))


@dataclass(frozen=True)
class Spread:
    """Where every tensor is kept and where it runs.

    Attributes:
        groups: the tensors.
        kept: identity of a group -> device it is kept on, or ``"disk"``.
        main: the device on which what is kept on the host or on disk runs.
    """

    groups: Sequence[Group]
    kept: Mapping[int, str]
    main: str

    def runs_on(self, group: Group) -> str:
        """Return the device on which the tensor is used."""
        kept = self.kept[id(group)]
        return kept if is_accelerator(kept) else self.main

    def is_away(self, group: Group) -> bool:
        """Return whether the tensor is kept elsewhere than where it is used."""
        return is_accelerator(self.main) and not is_accelerator(self.kept[id(group)])

    def place(self) -> None:
        """Put the tensors where they are kept; hidden buffers, where they are used."""
        with Commit() as commit:
            for group in self.groups:
                kept = self.kept[id(group)] if group.persistent else self.runs_on(group)
                device = torch.device("cpu" if kept == DISK else kept)
                if group.tensor.device != device:
                    commit.put(group, group.tensor.detach().to(device))


def run(
    module: nn.Module,
    spread: Spread,
    whole: tuple[type[nn.Module], ...] = READERS,
    skip_keys: Sequence[str] | None = None,
) -> None:
    """Place the tensors and attach accelerate's hooks; nothing has changed when it raises."""
    devices = set(map(spread.runs_on, spread.groups))
    if len(devices) < 2 and not any(map(spread.is_away, spread.groups)):
        spread.place()
        return
    try:
        from accelerate import hooks
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "remap.dispatch moves inputs between devices with accelerate's hooks, and accelerate "
            "is not installed: pip install 'torchlift[accelerate]'",
            name="accelerate",
        ) from error
    needed = stops(module, spread, whole)
    spread.place()
    # A weight under two names is moved for a call once: accelerate keys them by address.
    tied: dict[int, Any] = {
        group.tensor.data_ptr(): {} for group in spread.groups if len(group.slots) > 1
    }
    for prefix, stop in needed.items():
        hook = hooks.AlignDevicesHook(
            execution_device=torch.device(stop.device),
            offload=stop.weights is not None,
            io_same_device=not prefix,
            weights_map=stop.weights,
            offload_buffers=True,
            place_submodules=stop.deep,
            skip_keys=skip_keys,
            tied_params_map=tied,
        )
        hooks.add_hook_to_module(stop.module, hook)
    if "" not in needed:  # the output of the module comes back all the same
        back = hooks.AlignDevicesHook(io_same_device=True, skip_keys=skip_keys)
        hooks.add_hook_to_module(module, back)


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


def stops(module: nn.Module, spread: Spread, whole: tuple[type[nn.Module], ...]) -> dict[str, Stop]:
    """Return what each hook must do, by prefix, for the submodules that need one.

    These are the ones that hold tensors, and the outermost ones that run on one device, so that
    what such a submodule adds up, a residual say, is on that device.

    Raises:
        PlacementError: a module cannot run as it is spread.
    """
    own: dict[str, list[tuple[Slot, Group]]] = {prefix: [] for prefix, _ in walk(module)}
    for group in spread.groups:
        for slot in group.slots:
            own[slot.fqn.removesuffix(slot.name)].append((slot, group))
    below = {prefix: list(tensors) for prefix, tensors in own.items()}
    for prefix in reversed(below):  # children come before their parents
        if prefix:
            below[_parent(prefix)] += below[prefix]
    devices = {at: {spread.runs_on(group) for _, group in below[at]} for at in below}
    found: dict[str, Stop] = {}
    seen: set[int] = set()
    deep: str | None = None
    for prefix, submodule in walk(module):
        if id(submodule) in seen or (deep is not None and prefix.startswith(deep)):
            continue
        seen.add(id(submodule))
        if len(devices[prefix]) == 1 and isinstance(submodule, whole):
            deep = prefix
            found[prefix] = _stop(prefix, submodule, below[prefix], spread, deep=True)
        elif own[prefix]:
            found[prefix] = _stop(prefix, submodule, own[prefix], spread)
        elif len(devices[prefix]) == 1 and (not prefix or len(devices[_parent(prefix)]) > 1):
            found[prefix] = Stop(submodule, next(iter(devices[prefix])))
    return found


def _parent(prefix: str) -> str:
    return prefix[: prefix[:-1].rfind(".") + 1]


def _stop(
    prefix: str,
    module: nn.Module,
    tensors: Sequence[tuple[Slot, Group]],
    spread: Spread,
    *,
    deep: bool = False,
) -> Stop:
    """Return what the hook of a module must do that uses these tensors."""
    entry = prefix.removesuffix(".") or "(the module itself)"
    devices = {spread.runs_on(group): slot.name for slot, group in tensors}
    if len(devices) > 1:
        raise PlacementError(
            "a module cannot run with its own tensors on several devices",
            entry=entry,
            expected="one device",
            found=", ".join(f"{name} on {device}" for device, name in devices.items()),
            hint="Map the module's name instead of the names of its tensors.",
        )
    (device,) = devices
    if not any(spread.is_away(group) for _, group in tensors):
        return Stop(module, device)
    if isinstance(module, nn.RNNBase):
        raise PlacementError(
            "a recurrent layer holds on to its weights, which cannot be moved for a call",
            entry=entry,
            hint='Map it to an accelerator, or pass main_device="cpu".',
        )
    weights = {slot.fqn.removeprefix(prefix): group.tensor for slot, group in tensors}
    return Stop(module, device, weights, deep)

"""`skeleton` and `materialize`: a module without storage that can still make itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from torchlift._model.commit import Commit, exchange, ordinary_tensors, successor_of
from torchlift._model.devices import usable_device
from torchlift._model.dtensor import is_dtensor, shard_of_value, wrap
from torchlift._model.handlers import clone_of, has_memory, inner_tensors
from torchlift._model.slots import CONSTRUCTION, Group, ModuleTree, is_lazy, read_tree
from torchlift._model.torch_private import without_subclasses
from torchlift._skeleton.recorder import Recorder
from torchlift._skeleton.recording import META, Construction, Ref
from torchlift._skeleton.replay import lost_error, replay, seeded_error, state_of
from torchlift._system.interrupts import uninterrupted
from torchlift._system.memory import collection_paused
from torchlift._system.text import clipped_list
from torchlift.errors import PlacementError, did_you_mean

P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)


def skeleton(factory: Callable[P, M], *args: P.args, **kwargs: P.kwargs) -> M:
    """Build a module on the meta device that remembers how each of its tensors is made.

    torchlift records the construction and does not execute it. Weights therefore take no memory,
    and their initialisation takes no time. Later, `materialize` or `load` can replay the recording
    for tensors that a checkpoint does not contain, such as non-persistent buffers or a new head.
    They get the values of normal construction.

    The recording does not include writes through NumPy, ``apply_``, a storage or an address. See "A
    skeleton cannot replay the constructor" in the guide for the limits.

    Args:
        factory: A module class, or a callable that returns a module.
        args: Positional arguments of `factory`.
        kwargs: Keyword arguments of `factory`.

    Returns:
        The module. Every parameter and buffer is on meta, except sparse ones.

    Raises:
        TypeError: If `factory` does not return a module.
        PlacementError: If the constructor quantises a tensor.
        PlacementError: If the constructor reads a random number after it seeded torch.
        PlacementError: If it reads a tensor after it wrote to that memory without torch.

    Example:
        >>> import torch, torchlift
        >>> model = torchlift.skeleton(torch.nn.Linear, 20_000, 20_000)  # 1.6 GB, not allocated
        >>> model.weight.device
        device(type='meta')
    """
    if isinstance(factory, nn.Module) or not callable(factory):
        raise TypeError(
            f"skeleton() takes a class or a function that makes a module, not {type(factory)!r}: "
            "write skeleton(Model, config) instead of skeleton(Model(config))"
        )
    device = torch.get_default_device()
    # On meta by default is how people spare the memory that a skeleton spares them anyway.
    recorder = Recorder(torch.device("cpu") if device.type == "meta" else device)
    # Until all is written down: walks over the calls in memory were 45 % of the time of 20,000
    # small layers, which take 1.4 s (2.5 if the collector ran after construction; plain ones 1.0).
    with collection_paused():
        with recorder:
            model = factory(*args, **kwargs)
        recorder.finish()
        if not isinstance(model, nn.Module):
            raise TypeError(f"{factory!r} returned {type(model).__name__}, not a module")
        tree = ModuleTree(model)
        for group in [*tree.groups, *tree.meta_attributes]:
            _remember(recorder, group)
        recorder.find_lost()
    return model


def materialize(
    model: nn.Module,
    *,
    device: torch.device | str | None = None,
    names: Iterable[str] | str | None = None,
) -> list[str]:
    """Replay the construction of a skeleton's tensors that are still on meta.

    Deterministic tensors get the values of normal construction. Random tensors get the same
    distribution. They get the same values, too, if the seed is the same and you make all tensors.
    If an error occurs, the module is unchanged.

    Args:
        model: A skeleton, or a module that contains one.
        device: A device for the new tensors. Default: the CPU.
        names: A name, or several, of tensors or submodules. Default: every tensor on meta.

    Returns:
        Names of the new tensors, in the order of ``state_dict``.

    Raises:
        TypeError: If `model` is not a module.
        PlacementError: If `skeleton` did not make one of the tensors.
        PlacementError: If a name does not exist in the module, or the device does not exist.
        PlacementError: If the constructor seeds torch before it draws random values for a tensor,
            or writes to the memory of a tensor without torch.

    Example:
        >>> import torch, torchlift
        >>> model = torchlift.skeleton(torch.nn.Linear, 3, 2)
        >>> torchlift.materialize(model)
        ['weight', 'bias']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"materialize() takes a module that torchlift.skeleton made, not {type(model).__name__}"
        )
    where = usable_device("cpu" if device is None else device, "materialize")
    tree = read_tree(model)
    groups = tree.on_meta
    if names is not None:
        groups = _named(groups, [names] if isinstance(names, str) else list(names), tree)
    with ordinary_tensors():
        made = make(groups, [where] * len(groups))
    with uninterrupted() as deliver, Commit() as commit:
        for group, tensor in zip(groups, made, strict=True):
            commit.put(group, tensor)
        deliver()  # an interrupt takes it back; one that comes later finds all of it done
        commit.finish()
        forget(tree)
    return [name for group in groups for name in group.names]


def make(groups: Sequence[Group], devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """Replay the groups' construction, each on its device.

    Raises:
        PlacementError: If `skeleton` did not make a tensor, or a tensor is random and the
            constructor seeds torch.
    """
    constructions = constructions_of(groups)
    made: dict[int, torch.Tensor] = {}
    batches: dict[tuple[int, int, torch.device], list[int]] = {}
    for position, (one, device) in enumerate(zip(constructions, devices, strict=True)):
        batches.setdefault((id(one.recording), id(one.copy), device), []).append(position)
    for (_, _, device), positions in batches.items():
        refs = [constructions[position].ref for position in positions]
        recording = constructions[positions[0]].recording
        before = state_of(device) if recording.is_seeded else None
        for at, tensor in replay(recording, refs, device):
            group = groups[positions[at]]
            if before is not None and not torch.equal(before, state_of(device)):
                raise seeded_error(group.fqn)
            if is_dtensor(group.tensor):  # the rest is freed at once: one whole tensor at a time
                tensor = shard_of_value(tensor, group.tensor, group.fqn)
                tensor = wrap(group.tensor, tensor)
            tensor = tensor.to(group.tensor.dtype)  # it may have been cast on meta
            if not is_dtensor(tensor):
                tensor = strided(tensor, group.tensor.stride())
            made[positions[at]] = tensor
    return [made[position] for position in range(len(groups))]


def strided(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor, or a copy of it where it has other strides, in elements, than these."""
    if tensor.stride() == stride:
        return tensor
    made = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def _remember(recorder: Recorder, group: Group) -> None:
    """Attach its construction to a tensor and to the modules that hold it.

    A deep copy of a parameter loses attributes of the tensor (`torch.nn.Parameter.__deepcopy__`
    calls the class), and so does a buffer that is cast. The module keeps them.
    """
    tensor, is_meta = group.tensor, group.tensor.is_meta
    inner = [] if is_meta else inner_tensors(tensor)
    if inner and all(one.is_meta for one in inner):
        # torchao's NF4Tensor says that it is where the tensor that it was made of seemed to be.
        exchange(tensor, successor_of(tensor, clone_of(tensor, META)))
        return
    lazy = is_lazy(tensor)
    if not (is_meta or lazy or has_memory(tensor)):
        return  # a sparse one, say, which is made at once and stays
    if lazy:
        # It has no storage to save, and its first input decides where it goes.
        kind: Any = type(tensor)
        with without_subclasses():
            exchange(tensor, kind(tensor.requires_grad, device="cpu", dtype=tensor.dtype))
        return
    ref = recorder.ref(tensor)
    if not is_meta:
        # Made by a call that bypasses the torch API (`torch.Tensor(3, 4)`): the recording keeps it.
        stand_in = recorder.adopt(tensor)
        ref = recorder.ref(stand_in)
        exchange(tensor, successor_of(tensor, stand_in))
    if tensor.grad_fn is not None and not tensor._is_view():
        # A graph over meta tensors (the weight that weight_norm computes) leads nowhere, and it
        # would hold on to parameters that are about to get their content.
        tensor.detach_()
    if ref is None:
        return
    construction = Construction(recorder.recording, ref)
    recorder.recording.tensors += 1
    tensor.__dict__[CONSTRUCTION] = construction
    for slot in group.slots:
        vars(slot.module).setdefault(CONSTRUCTION, {})[slot.name] = construction


def _named(groups: list[Group], names: list[str], tree: ModuleTree) -> list[Group]:
    known = [name for g in [*tree.groups, *tree.meta_attributes] for name in g.names]
    for name in names:
        if not any(_is_under(full, name) for full in known):
            modules = [prefix[:-1] for prefix, _ in tree.paths if prefix]
            raise PlacementError(
                "the module does not have a tensor or submodule of this name",
                entry=name,
                hint=did_you_mean(name, [*known, *modules]) or None,
            )
    return [
        group
        for group in groups
        if any(_is_under(full, name) for full in group.names for name in names)
    ]


def _is_under(full: str, name: str) -> bool:
    return full == name or full.startswith(name + ".") or not name


def forget(tree: ModuleTree) -> None:
    """Drop the recordings of modules whose tensors are all made."""
    for module in tree.modules:
        if CONSTRUCTION in module.__dict__:
            tensors = [*module._parameters.values(), *module._buffers.values()]
            if not any(t is not None and t.is_meta for t in tensors):
                del module.__dict__[CONSTRUCTION]


def construction_of(group: Group) -> Construction | None:
    """Return how a tensor is made, or None if no skeleton made it."""
    own = group.tensor.__dict__.get(CONSTRUCTION)
    if isinstance(own, Construction):
        return own
    for slot in group.slots:
        kept: Construction | None = vars(slot.module).get(CONSTRUCTION, {}).get(slot.name)
        # Not if the parameter has been replaced by another one of the user's on meta.
        if kept is not None and _describes(kept.ref, group.tensor):
            return kept
    return None


def _describes(ref: Ref, tensor: torch.Tensor) -> bool:
    is_cast = ref.dtype.is_floating_point and tensor.dtype.is_floating_point
    return ref.shape == tuple(tensor.shape) and (is_cast or ref.dtype == tensor.dtype)


def changed_on_meta(group: Group) -> tuple[bool, tuple[int, ...] | None]:
    """Return what a tensor of a skeleton became after it was made.

    Returns:
        Whether it has another dtype (``.half()``), and its strides if they are others (channels
        last), else None.
    """
    made = construction_of(group) if group.tensor.is_meta else None
    if made is None:
        return False, None
    strides = tuple(group.tensor.stride())
    return made.ref.dtype != group.tensor.dtype, None if made.ref.stride == strides else strides


def constructions_of(groups: Iterable[Group]) -> list[Construction]:
    """Return how tensors on meta are made.

    Raises:
        PlacementError: If `skeleton` did not make some of them, or one of them was made of memory
            that has changed since.
    """
    found = [(group, construction_of(group)) for group in groups]
    lost = [name for group, made in found if made is None for name in group.names]
    if lost:
        are = "tensor is" if len(lost) == 1 else "tensors are"
        raise PlacementError(
            f"{len(lost)} {are} on meta without a recorded construction: {clipped_list(lost)}",
            entry=lost[0],
            expected="a value in the checkpoint, or a module built by torchlift.skeleton",
            hint="Build the model with torchlift.skeleton(Model, ...) instead of on meta.",
        )
    for group, made in found:
        if made is not None and made.recording.lost_behind(made.ref.key):
            raise lost_error(group.fqn)
    return [made for _, made in found if made is not None]

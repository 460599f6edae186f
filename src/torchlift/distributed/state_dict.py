"""State dicts of wrapped and sharded models: the functions that a program calls.

Names, arguments and defaults are those of ``torch.distributed.checkpoint.state_dict``, and so are
the results wherever torch's are right: a program that changes the import keeps working.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from torchlift._checkpoint import Allow, Checkpoint
from torchlift._model import (
    PATCH,
    IncompatibleKeys,
    ModuleTree,
    Names,
    RankGroup,
    is_dtensor,
    locked,
    read_model,
    reshard,
    tensors_of,
    uses_fsdp1,
    versioned,
)
from torchlift._plan import Options, Patterns
from torchlift._sources import IN_MEMORY, FileTensor, Given, checkpoint, container, is_state
from torchlift._system import collection_paused
from torchlift.distributed.gather import (
    Sequence,
    digests,
    finish,
    require_alike,
    require_within,
    sequence,
)
from torchlift.distributed.loading import load
from torchlift.distributed.optimizer_load import OptimizerReport
from torchlift.distributed.optimizer_state import read_optimizers
from torchlift.distributed.options import (
    LoadCall,
    Optimizers,
    Part,
    StateDictMismatch,
    StateDictOptions,
    checked,
    require_module,
    several,
)
from torchlift.errors import FormatError
from torchlift.formats import TensorEntry, errors_name, items_of


class LoadedKeys(IncompatibleKeys):
    """Missing and unexpected keys by canonical name, as `set_state_dict` returns them.

    A tuple of those two lists, as torch's is; what happened to the optimizers is beside it.

    Attributes:
        optimizer: the `OptimizerReport`.
    """

    optimizer: OptimizerReport

    def __init__(self, *_: Iterable[str]) -> None:
        self.optimizer = OptimizerReport()


def get_model_state_dict(
    model: nn.Module,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the state dict of a model under canonical names, whatever the model is wrapped in.

    Args:
        model: the model: plain, compiled, DDP, FSDP2, tensor parallel, or any nesting of these.
        submodules: return only what lies under these modules.
        options: whether to gather, move to the CPU, leave frozen parameters out.
        process_group: the ranks that call this, over which they agree. By default, where DTensors
            are gathered, those of the meshes, and with ``cpu_offload`` all; else nobody waits for
            another. Stages of a pipeline without DTensors need it to be gathered on one rank.

    Returns:
        Canonical name -> tensor (sharing memory with the model unless gathered) or extra state.

    Raises:
        StateDictMismatch: two keys have one canonical name; or, where ranks gather, another rank
            met an error or asks for other tensors.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torchlift.distributed import get_model_state_dict
        >>> model = torch.compile(nn.Sequential(nn.Linear(2, 3)), backend="eager")
        >>> sorted(model.state_dict())
        ['_orig_mod.0.bias', '_orig_mod.0.weight']
        >>> sorted(get_model_state_dict(model))
        ['0.bias', '0.weight']
    """
    return _read(Part.MODEL, model, (), submodules, options, process_group)[0]


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the state of one or more optimizers, under the canonical names of their parameters.

    The optimizers are not changed, and no step is taken: an optimizer that never stepped gives
    the state that its first step would start from, so Adam's ``step`` is 0, not 1
    (pytorch/pytorch#164929). That state is what its ``_init_group`` makes from the weights. One
    without that method (LBFGS, or an optimizer that holds another one) gives no state before its
    first step; `set_optimizer_state_dict` then does not miss it, and says so in its report.

    A parameter that is nowhere in the model, such as a temperature, is named by its place in its
    optimizer: ``param_groups.1.params.0``; of several optimizers, after their numbers.

    Args:
        model: the model whose parameters the optimizers hold; of several, a ``ModuleDict``.
        optimizers: one or several.
        submodules: accepted as torch accepts it; the state of every parameter is returned.
        options: whether to gather, move to the CPU, flatten.
        process_group: the ranks that call this, over which they agree. By default, where DTensors
            are gathered, those of the meshes, and with ``cpu_offload`` all; else nobody waits for
            another. Stages of a pipeline without DTensors need it to be gathered on one rank.

    Returns:
        ``{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}``, or one flat
        dict with ``flatten_optimizer_state_dict``.

    Raises:
        RuntimeError: no optimizer was passed.
        StateDictMismatch: the optimizers are of another model, or two hold one parameter; or,
            where ranks gather, another rank met an error or asks for other tensors.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torchlift.distributed import get_optimizer_state_dict
        >>> model = nn.Linear(2, 1, bias=False)
        >>> found = get_optimizer_state_dict(model, torch.optim.Adam(model.parameters()))
        >>> found["state"]["weight"]["step"], found["param_groups"][0]["params"]
        (tensor(0.), ['weight'])
    """
    return _read(Part.OPTIMIZERS, model, optimizers, None, options, process_group)[1]


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dicts of a model and of its optimizers, read together.

    Args:
        model: the model, wrapped or not.
        optimizers: one, several or none.
        submodules: return only the model state under these modules.
        options: see `StateDictOptions`.
        process_group: the ranks that call this, over which they agree. By default, where DTensors
            are gathered, those of the meshes, and with ``cpu_offload`` all; else nobody waits for
            another. Stages of a pipeline without DTensors need it to be gathered on one rank.

    Returns:
        The model's and the optimizers' state dict; the latter is empty without optimizers.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torchlift.distributed import get_state_dict
        >>> model = nn.Linear(2, 1)
        >>> found = get_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> sorted(found[0]), found[1]["param_groups"][0]["lr"]
        (['bias', 'weight'], 0.1)
    """
    state, optimizer_state = _read(Part.BOTH, model, optimizers, submodules, options, process_group)
    return state, optimizer_state


def set_model_state_dict(
    model: nn.Module,
    model_state_dict: dict[str, Any] | dict[nn.Module, dict[str, Any]],
    *,
    options: StateDictOptions | None = None,
    collective: bool | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> IncompatibleKeys:
    """Load a state dict with canonical names into a model, whatever it is wrapped in.

    Everything is checked before anything changes. Where a process group and a mesh or DDP tie
    processes together, an error on one is an error on all. `model_state_dict` is not changed.
    Hooks and loading code of modules run while torch writes: what they refuse is taken back on
    every rank, for which this rank's shards of the model are in memory twice. Three things stay:
    what a hook changed inside an object (a list, a tensor of the state dict), extra state of a
    module that cannot be asked for what it has, and what torch did to a
    ``FullyShardedDataParallel``.

    Args:
        model: the model, wrapped or not; its tensors may be on meta.
        model_state_dict: by canonical name, or by submodule.
        options: with ``full_state_dict`` the values are whole tensors and each rank copies its own
            slice, without communication; with ``broadcast_from_rank0`` too, only rank 0 needs them.
        collective: None: the ranks that a mesh or DDP ties to this model load together, an error
            on one being an error on all. True: so do replicas that nothing ties. False: this rank
            loads alone, such as one that starts again from a replica.
        process_group: the ranks that load together instead; over gloo, what they agree on travels
            beside NCCL.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, by canonical name.

    Raises:
        StateDictMismatch: keys or shapes do not fit, a value cannot be copied (on meta, sparse),
            nothing says how a tensor on meta that no state dict has is made, there is no state dict
            (None), or another rank met an error; it is a `RuntimeError` as well.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torchlift.distributed import set_model_state_dict
        >>> model = torch.compile(nn.Linear(2, 1), backend="eager")
        >>> set_model_state_dict(model, nn.Linear(2, 1).state_dict())
        <All keys matched successfully>
    """
    call = Part.MODEL, model, (), model_state_dict, None, options
    return load_states(LoadCall(*call, collective, process_group))


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: dict[str, Any],
    *,
    options: StateDictOptions | None = None,
    collective: bool | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> OptimizerReport:
    """Load optimizer state by the canonical names of parameters, groups in any order.

    No step is taken, tensors keep the dtype they were saved with (pytorch/pytorch#43706), state
    of frozen parameters is loaded too (pytorch/pytorch#192202), and with ``strict=False`` what is
    there is loaded and the rest stays as it was (pytorch/pytorch#34660, pytorch/pytorch#132628).

    Args:
        model: the model whose parameters the optimizers hold.
        optimizers: one or several; each takes what it holds.
        optim_state_dict: as `get_optimizer_state_dict` returns it, nested or flat, or an
            optimizer's own ``state_dict()``. It is not changed.
        options: see `StateDictOptions`.
        collective: None: the ranks that a mesh or DDP ties to this model load together, an error
            on one being an error on all. True: so do replicas that nothing ties. False: this rank
            loads alone, such as one that starts again from a replica.
        process_group: the ranks that load together instead; over gloo, what they agree on travels
            beside NCCL.

    Returns:
        What was loaded, missing, unexpected and left out. torch returns None.

    Raises:
        RuntimeError: no optimizer was passed.
        StateDictMismatch: state is missing, has another shape or another mesh, or cannot be copied.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torchlift.distributed import StateDictOptions
        >>> from torchlift.distributed import get_optimizer_state_dict, set_optimizer_state_dict
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> saved = get_optimizer_state_dict(model, optimizer)
        >>> del saved["state"]["bias"]
        >>> print(set_optimizer_state_dict(
        ...     model, optimizer, saved, options=StateDictOptions(strict=False)))
        loaded the state of 1 parameters
          missing (1): bias
    """
    call = Part.OPTIMIZERS, model, optimizers, None, optim_state_dict, options
    return load_states(LoadCall(*call, collective, process_group)).optimizer


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: dict[str, Any] | dict[nn.Module, dict[str, Any]],
    optim_state_dict: dict[str, Any],
    options: StateDictOptions | None = None,
    collective: bool | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> IncompatibleKeys:
    """Load a model and its optimizers together: both, or neither if anything does not fit.

    Args:
        model: the model, wrapped or not.
        optimizers: one, several or none.
        model_state_dict: by canonical name or by submodule; an empty one leaves the model alone.
        optim_state_dict: see `set_optimizer_state_dict`.
        options: see `StateDictOptions`.
        collective: None: the ranks that a mesh or DDP ties to this model load together, an error
            on one being an error on all. True: so do replicas that nothing ties. False: this rank
            loads alone, such as one that starts again from a replica.
        process_group: the ranks that load together instead; over gloo, what they agree on travels
            beside NCCL.

    Returns:
        ``missing_keys`` and ``unexpected_keys`` of the model; its attribute ``optimizer`` is the
        `OptimizerReport`.

    Raises:
        StateDictMismatch: something does not fit; nothing has changed then.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torchlift.distributed import get_state_dict, set_state_dict
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> states = get_state_dict(model, optimizer)
        >>> done = set_state_dict(
        ...     model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
        >>> done, done.optimizer.loaded
        (<All keys matched successfully>, ['weight', 'bias'])
    """
    call = Part.BOTH, model, optimizers, model_state_dict, optim_state_dict, options
    return load_states(LoadCall(*call, collective, process_group))


def load_optimizer(
    model: nn.Module,
    optimizer: Optimizers,
    ckpt: Given,
    *,
    root: str | None = None,
    include: Patterns = ("*",),
    exclude: Patterns = (),
    allow_missing: Patterns = (),
    allow_classes: Allow = (),
    strict: bool = True,
    collective: bool | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> OptimizerReport:
    """Load optimizer state from a checkpoint, whatever form it was saved in.

    Each rank reads its own slices, and nothing is in memory beside the optimizer's own state but
    a fixed budget; and, of files that several ranks wrote, what a state that is there already is
    to become. For what is kept and checked, see
    `torchlift.distributed.set_optimizer_state_dict`.

    Args:
        model: the model whose parameters the optimizer holds, plain or sharded.
        optimizer: one, or several that share one saved state.
        ckpt: a checkpoint, a path, a file object, or a training state in memory. Its optimizer
            state may be an optimizer's own ``state_dict()``, one under canonical names, flat, or a
            list with one of these, as Lightning keeps it.
        root: the container that holds it, such as ``"optimizer"`` or ``"optimizer_states.0"``.
        include: patterns of canonical names of parameters, also where the file has numbers for
            them; ``*`` stands for any text, dots included. One that fits nothing is an error.
        exclude: patterns of those to leave out: their state, and the hyperparameters of groups of
            which no other parameter is taken, stay as they are.
        allow_missing: patterns of parameters that may have no saved state under `strict`.
        allow_classes: tensor subclasses that may be rebuilt, such as torchao's low-bit states; see
            `torchlift.open`.
        strict: raise where a parameter that is trained has no saved state.
        collective: see `torchlift.distributed.set_optimizer_state_dict`.
        process_group: see `torchlift.distributed.set_optimizer_state_dict`.

    Returns:
        What was loaded, missing, unexpected and left out.

    Raises:
        FormatError: `root` names nothing, or there is no optimizer state.
        StateDictMismatch: it does not fit, or a pattern fits nothing; nothing has changed then.

    Example:
        >>> import os, tempfile, torch
        >>> from torchlift.distributed import load_optimizer
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> path = os.path.join(tempfile.mkdtemp(), "training.pt")
        >>> torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        >>> load_optimizer(model, optimizer, path, root="optimizer").missing_keys
        []
    """
    # Refuses what `load` refuses: text in place of a list of patterns.
    Options(include=include, exclude=exclude, allow_missing=allow_missing, strict=strict)
    options = StateDictOptions(strict=strict, full_state_dict=True)
    chosen = collective, process_group, include, exclude, allow_missing
    with ExitStack() as stack:
        if is_state(ckpt):
            path, saved = IN_MEMORY, container(ckpt, root)
        else:
            opened = stack.enter_context(
                checkpoint(ckpt, None, whole=True, allow_classes=allow_classes)
            )
            path, saved = opened.path, opened._tree(root, partial(slices_of, opened))
        with errors_name(path):
            saved = _optimizer_state(saved)
            call = Part.OPTIMIZERS, model, optimizer, None, saved, options
            return load_states(LoadCall(*call, *chosen)).optimizer


def slices_of(ckpt: Checkpoint, entry: TensorEntry) -> torch.Tensor | FileTensor:
    """Return a view of a tensor, or what a rank reads its slice of, where a view takes a copy."""
    if len(entry.chunks) > 1 and entry.is_plain and "param_groups" not in entry.key.split("."):
        return FileTensor(entry.key, entry, ckpt._mapped())
    return ckpt._view(entry)


def _optimizer_state(saved: Any) -> Any:
    """Return the state out of a list with one, and refuse what has none.

    Raises:
        FormatError: there is none here, or one of several is to be chosen.
    """
    if isinstance(saved, list) and len(saved) == 1:
        (saved,) = saved
    if isinstance(saved, Mapping):
        if _is_optimizer_state(saved):
            return {"state": {}, **saved}
        if any(isinstance(key, str) and key.startswith(_FLAT) for key in saved):
            return saved
    found = [
        str(key)
        for key, value in items_of(saved)
        if _is_optimizer_state(value)
        or (isinstance(value, list) and value and all(map(_is_optimizer_state, value)))
    ]
    raise FormatError(
        "no optimizer state here",
        expected="a dict with 'state' and 'param_groups', or a flat one of those",
        found=f"a {type(saved).__name__}",
        hint=f"Pass root={found[0]!r}." if found else "Pass the container that holds it as root=.",
    )


#: How the names of a flat state begin.
_FLAT = "state.", "param_groups."


def _is_optimizer_state(value: object) -> bool:
    # DCP leaves empty dicts out: of SGD without momentum it keeps the groups alone.
    return isinstance(value, Mapping) and "param_groups" in value


def patch_model_state_dict(model: nn.Module, *, options: StateDictOptions | None = None) -> None:
    """Make ``model.state_dict()`` and ``model.load_state_dict()`` use canonical names.

    A library that only knows those two methods then saves what loads into any other wrapping.
    The object is patched, not its class; ``del model.state_dict`` undoes it.

    Args:
        model: the model, wrapped or not.
        options: see `StateDictOptions`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torchlift.distributed import patch_model_state_dict
        >>> model = torch.compile(nn.Linear(2, 1), backend="eager")
        >>> patch_model_state_dict(model)
        >>> sorted(model.state_dict())
        ['bias', 'weight']
    """
    require_module(model)
    chosen = checked(options)

    def load_state_dict(state_dict: dict[str, Any]) -> Any:
        return set_model_state_dict(model, state_dict, options=chosen)

    _patch(model, partial(get_model_state_dict, model, options=chosen), load_state_dict)


def patch_optimizer_state_dict(
    model: nn.Module, *, optimizers: Optimizers, options: StateDictOptions | None = None
) -> None:
    """Make ``state_dict()`` and ``load_state_dict()`` of optimizers use canonical names.

    Each of several optimizers then gives and takes the state of all of them, so a program calls
    one of them only.

    Args:
        model: the model whose parameters the optimizers hold.
        optimizers: one or several.
        options: see `StateDictOptions`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torchlift.distributed import patch_optimizer_state_dict
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> patch_optimizer_state_dict(model, optimizers=optimizer)
        >>> list(optimizer.state_dict()["state"])
        ['weight', 'bias']
    """
    require_module(model)
    chosen, found = checked(options), several(optimizers)

    def load_state_dict(state_dict: dict[str, Any]) -> Any:
        return set_optimizer_state_dict(model, found, state_dict, options=chosen)

    state_dict = partial(get_optimizer_state_dict, model, found, options=chosen)
    for optimizer in found:
        _patch(optimizer, state_dict, load_state_dict)


def _patch(obj: nn.Module | torch.optim.Optimizer, state_dict: Any, load_state_dict: Any) -> None:
    for function in (state_dict, load_state_dict):
        setattr(function, PATCH, True)
    obj.state_dict = state_dict  # type: ignore[method-assign]
    obj.load_state_dict = load_state_dict  # type: ignore[method-assign]


# ---- one call on every rank


def _read(
    part: Part,
    model: nn.Module,
    optimizers: Any,
    submodules: Any,
    options: Any,
    process_group: torch.distributed.ProcessGroup | None,
) -> list[dict[str, Any]]:
    """Return the state dicts of a model and its optimizers; empty where they are not asked for.

    Ranks that gather do so when all have read theirs and are about to gather the same. Those that
    do not gather do not talk: then every rank may ask for what it likes, or not ask at all.
    """
    require_module(model)
    chosen, found = checked(options), several(optimizers)
    inside = set(submodules or ()) & set(model.modules())

    def check() -> None:
        several(found, part)
        if submodules and not inside:
            raise StateDictMismatch("none of the submodules is part of the model")

    if uses_fsdp1(model):
        from torchlift.distributed import fsdp1

        return fsdp1.read(part, model, found, inside, chosen, check, process_group)
    if submodules:
        warnings.warn(
            "Getting submodules only model/optim state_dict is deprecated, as in torch: pick the "
            "keys you need from the whole state dict",
            FutureWarning,
            stacklevel=3,
        )
    shared: list[torch.Tensor] = []
    if chosen.full_state_dict:
        # Submodules may have nothing to gather, and then not every rank need ask for them.
        only = inside if inside and not found else {model}
        shared = [tensor for module in only for tensor in tensors_of(module)]

    def read() -> tuple[tuple[list[dict[str, Any]], Sequence], tuple[dict[str, str], bool]]:
        check()
        tree = ModuleTree(model)
        reshard(tree.modules)
        names = Names(tree, chosen.dsd_fqn_modifiers)
        state = [
            read_model(
                model,
                names,
                inside,
                frozen=not chosen.ignore_frozen_params,
                prefixed=chosen.keep_submodule_prefixes,
            )
            if Part.MODEL in part
            else {},
            read_optimizers(names, found, chosen) if found else {},
        ]
        if chosen.full_state_dict and not chosen.cpu_offload:
            require_within(state)
        steps = sequence({"model": state[0], "optimizer": state[1]}, shared) if group.groups else {}
        return (state, steps), (digests(steps), chosen.cpu_offload)

    group = RankGroup.of_model(shared, kind=StateDictMismatch, process_group=process_group)
    if chosen.cpu_offload and process_group is None and any(map(is_dtensor, shared)):
        # Ranks that no mesh ties to this one may have other stages, which would be lost.
        group = RankGroup.of_all(StateDictMismatch)
    with collection_paused(), torch.no_grad():
        (state, steps), told = group.run(read)
        require_alike(group, steps, (each for each, _ in told.values()))
        every = all(offloads for _, offloads in told.values())
        return [
            versioned(finish(each, chosen, every, group), getattr(each, "_metadata", None))
            for each in state
        ]


def load_states(call: LoadCall) -> LoadedKeys:
    """Load what a call is about, or nothing at all, on every rank."""
    require_module(call.model)
    with locked(call.model):
        if uses_fsdp1(call.model):
            from torchlift.distributed import fsdp1

            *keys, report = fsdp1.write(call)
        else:
            given = call.model_state
            if isinstance(given, Mapping) and any(isinstance(key, nn.Module) for key in given):
                warnings.warn(
                    "Passing model_state_dict as a dict of modules is deprecated, as in torch: put "
                    "the module's name before the keys",
                    FutureWarning,
                    stacklevel=3,
                )
            with collection_paused():
                *keys, report = load(call)
    done = LoadedKeys(*keys)
    done.optimizer = report
    return done

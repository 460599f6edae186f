"""State dicts of wrapped and sharded models: the functions that a program calls.

Names, arguments and defaults are those of ``torch.distributed.checkpoint.state_dict``, so a program
that changes the import keeps working. A load of a model is `torchlift.load` with a state dict as
its source. This file adds canonical names, and the exchanges between ranks.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import nn

from torchlift._checkpoint.checkpoint import Checkpoint
from torchlift._checkpoint.kinds import Allow
from torchlift._load.fetch import fetch_all
from torchlift._load.place import InPlace, copy_in_place, put_new
from torchlift._model.commit import Commit
from torchlift._model.dtensor import (
    default_device,
    is_dtensor,
    local_tensor,
    refresh_shards,
    spans_of,
    spread_of,
)
from torchlift._model.loading_code import find_loading_code
from torchlift._model.names import Names, uses_fsdp1
from torchlift._model.ranks import RankGroup, StepResult, portable, rank, ranks_of
from torchlift._model.slots import ModuleTree, read_tree
from torchlift._model.state import PATCH, by_name, read_model, versioned, versions_of
from torchlift._model.torch_private import IncompatibleKeys
from torchlift._plan.decide import Decided
from torchlift._plan.match import Match
from torchlift._plan.planner import make_plan
from torchlift._plan.rules import Options, Patterns, allowed, require_model
from torchlift._save.blocks import Workspace
from torchlift._save.replicas import (
    Checksum,
    HeldPart,
    checksum_of,
    difference_error,
    find_differences,
)
from torchlift._skeleton.construction import changed_on_meta
from torchlift._sources.opening import (
    IN_MEMORY,
    Given,
    StateSource,
    checkpoint,
    container,
    flat_state,
    is_state,
    state_hint,
)
from torchlift._sources.tensors import FileTensor, MemoryTensor
from torchlift._store.url import Url
from torchlift._system.containers import leaves
from torchlift._system.interrupts import Interruptible, uninterrupted
from torchlift._system.memory import collection_paused
from torchlift._system.text import clipped_list
from torchlift.distributed.broadcast import Inbox, Sent, sendable
from torchlift.distributed.gather import (
    Gathering,
    Relayout,
    digests,
    is_on_some_ranks,
    map_tensors,
    require_same_steps,
    require_within,
    steps_of,
)
from torchlift.distributed.optimizer_slots import (
    LoadedKeys,
    OptimizerReport,
    OptimizerSlots,
    require_matched,
    runs_own_code,
    set_states,
)
from torchlift.distributed.optimizer_state import (
    Holder,
    Saved,
    name_parameters,
    normalise,
    read_optimizers,
)
from torchlift.distributed.options import (
    LoadCall,
    Optimizers,
    Part,
    StateDictMismatch,
    StateDictOptions,
    States,
    bad_value,
    check_value,
    mismatch_error,
    require_module,
    require_optimizers,
    to_tuple,
    validate_options,
)
from torchlift.errors import (
    Argument,
    CheckpointError,
    FormatError,
    Hint,
    PlacementError,
    explain_calls,
    wrong_call,
)
from torchlift.formats.index import TensorEntry
from torchlift.formats.source import errors_name


def get_model_state_dict(
    model: nn.Module,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the state dict of a model under canonical names, in any wrapper.

    Args:
        model: A plain, compiled, DDP, FSDP2 or tensor parallel model, or any nesting of these.
        submodules: Return only the keys under these modules.
        options: See `StateDictOptions`.
        process_group: The ranks that call this and agree. Default: the ranks of the model's meshes
            if they gather. If the first rank alone gets the result, all ranks.

    Returns:
        Tensors and extra state by canonical name. Tensors share memory with the model, unless they
        were gathered.

    Raises:
        StateDictMismatch: If two keys have one canonical name.
        StateDictMismatch: If ranks gather, and another rank raised or selects other tensors.
        StateDictMismatch: If the first rank's dict stands for all, and ranks have other values.

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
    return read_states(Part.MODEL, model, (), submodules, options, process_group).model


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Return the state of one or more optimizers, under the canonical names of their parameters.

    No step is taken. An optimizer that never stepped gives the state that its first step would
    start from, so Adam's ``step`` is 0, not 1 (pytorch/pytorch#164929). An optimizer that makes its
    state in ``step`` only, such as LBFGS, gives no state before that.

    A parameter that the model lacks is named by its place: ``param_groups.1.params.0``. A group's
    ``"state_layouts"`` records state that has another layout than its parameter, such as SOAP's
    square matrices.

    Args:
        model: The model whose parameters the optimizers hold. Pass several as a ``ModuleDict``.
        optimizers: One or several optimizers.
        submodules: Accepted as in torch. The state of every parameter is returned.
        options: See `StateDictOptions`.
        process_group: The ranks that call this and agree. Default: the ranks of the model's meshes
            if they gather. If the first rank alone gets the result, all ranks.

    Returns:
        ``{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}``, or a flat dict
        with ``flatten_optimizer_state_dict``.

    Raises:
        RuntimeError: If no optimizer was passed.
        StateDictMismatch: If an optimizer is of another model, or two hold one parameter.
        StateDictMismatch: If the state dict of an optimizer lacks some of its state.
        StateDictMismatch: If the first rank's dict stands for all, and ranks have other values.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torchlift.distributed import get_optimizer_state_dict
        >>> model = nn.Linear(2, 1, bias=False)
        >>> found = get_optimizer_state_dict(model, torch.optim.Adam(model.parameters()))
        >>> found["state"]["weight"]["step"], found["param_groups"][0]["params"]
        (tensor(0.), ['weight'])
    """
    states = read_states(Part.OPTIMIZERS, model, optimizers, None, options, process_group)
    return states.optimizer


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dicts of a model and of its optimizers, read together.

    See `get_model_state_dict` and `get_optimizer_state_dict` for what each contains.

    Args:
        model: The model, wrapped or not.
        optimizers: One optimizer, several or none.
        submodules: Return only the model's keys under these modules.
        options: See `StateDictOptions`.
        process_group: The ranks that call this and agree. Default: the ranks of the model's meshes
            if they gather. If the first rank alone gets the result, all ranks.

    Returns:
        The state dict of the model, and that of the optimizers. The latter is empty without
        optimizers.

    Raises:
        StateDictMismatch: As in `get_model_state_dict` and `get_optimizer_state_dict`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torchlift.distributed import get_state_dict
        >>> model = nn.Linear(2, 1)
        >>> found = get_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> sorted(found[0]), found[1]["param_groups"][0]["lr"]
        (['bias', 'weight'], 0.1)
    """
    states = read_states(Part.BOTH, model, optimizers, submodules, options, process_group)
    return states.model, states.optimizer  # a plain tuple, which any program can unpickle


def set_model_state_dict(
    model: nn.Module,
    model_state_dict: dict[str, Any] | dict[nn.Module, dict[str, Any]],
    *,
    options: StateDictOptions | None = None,
    collective: bool | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> IncompatibleKeys:
    """Load a state dict with canonical names into a model, in any wrapper.

    Everything is checked before anything changes, and an error on one rank is an error on all ranks
    that load together. An error of the model's own loading code is undone. This keeps a second copy
    of this rank's shards during the load. Three things cannot be undone: changes that a hook makes
    inside an object, extra state of a module without ``get_extra_state``, and a load into a
    ``FullyShardedDataParallel``.

    Args:
        model: The model, wrapped or not. Its tensors may be on meta.
        model_state_dict: Values by canonical name, or by submodule. It is not changed.
        options: See `StateDictOptions`. With ``full_state_dict``, each rank copies its own slices
            of complete tensors.
        collective: None: the ranks of a mesh or of DDP load together. True: replicas do, too.
            False: this rank loads alone. See :ref:`arg-collective`.
        process_group: The ranks that load together instead.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, by canonical name.

    Raises:
        StateDictMismatch: If keys or shapes do not match, or a value cannot be copied. It is a
            `RuntimeError`, too.

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
    """Load optimizer state by the canonical names of parameters, with groups in any order.

    No step is taken. Floating-point state gets the dtype of its parameter as in torch, unless the
    optimizer keeps it in another one (pytorch/pytorch#43706). Options that the saved groups lack
    get the values of the optimizer's ``__setstate__``. The state of frozen parameters is loaded,
    too (pytorch/pytorch#192202). With ``strict=False``, state that is missing stays as it was
    (pytorch/pytorch#34660, pytorch/pytorch#132628).

    Args:
        model: The model whose parameters the optimizers hold.
        optimizers: One or several optimizers. Each one loads the state of its parameters.
        optim_state_dict: The result of `get_optimizer_state_dict`, nested or flat, or an
            optimizer's own ``state_dict()``. It is not changed.
        options: See `StateDictOptions`.
        collective: None: the ranks of a mesh or of DDP load together. True: replicas do, too.
            False: this rank loads alone. See :ref:`arg-collective`.
        process_group: The ranks that load together instead.

    Returns:
        The names that were loaded, missing, unexpected and left out. torch returns None.

    Raises:
        RuntimeError: If no optimizer was passed.
        StateDictMismatch: If state is missing, or has another shape or mesh.
        StateDictMismatch: If the layout of a state on the mesh is unknown.

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
    """Load a model and its optimizers together: both, or neither if something does not match.

    Args:
        model: The model, wrapped or not.
        optimizers: One optimizer, several or none.
        model_state_dict: Values by canonical name or by submodule. An empty one leaves the model
            as it is.
        optim_state_dict: See `set_optimizer_state_dict`.
        options: See `StateDictOptions`.
        collective: None: the ranks of a mesh or of DDP load together. True: replicas do, too.
            False: this rank loads alone. See :ref:`arg-collective`.
        process_group: The ranks that load together instead.

    Returns:
        ``missing_keys`` and ``unexpected_keys`` of the model. The attribute ``optimizer`` is an
        `OptimizerReport`.

    Raises:
        StateDictMismatch: If something does not match. Nothing has changed then.

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


@explain_calls
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
    storage_options: Mapping[str, Any] | None = None,
) -> OptimizerReport:
    """Load optimizer state from a checkpoint, in any form that it was saved in.

    Each rank reads its own slices. Besides the optimizer's state, this takes a fixed amount of
    memory. See `torchlift.distributed.set_optimizer_state_dict` for what is kept and checked.

    Args:
        model: The model whose parameters the optimizer holds, plain or sharded.
        optimizer: One optimizer, or several that share one saved state.
        ckpt: A checkpoint, a path, a file object, or a training state in memory.
        root: The container of the optimizer state, such as ``"optimizer"``. Default: the only one.
            See :ref:`arg-root`.
        include: Patterns of parameter names to load. See :ref:`arg-include`.
        exclude: Patterns of parameter names to skip. Their state stays as it is.
        allow_missing: Patterns of parameters that may lack a saved state. See :ref:`arg-strict`.
        allow_classes: Tensor subclasses that may be rebuilt. See :ref:`arg-allow-classes`.
        strict: Raise an error if a trained parameter has no saved state. See :ref:`arg-strict`.
        collective: Which ranks load together. See :ref:`arg-collective`.
        process_group: The ranks that load together instead.
        storage_options: Options of a URL. See :ref:`arg-storage-options`.

    Returns:
        The names that were loaded, missing, unexpected and left out.

    Raises:
        FormatError: If `root` does not exist, or no or several optimizer states are found.
        StateDictMismatch: If the state does not match the optimizer. Nothing has changed then.
        MismatchError: If a pattern matches nothing.

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
    require_model(model, "load_optimizer")
    if isinstance(optimizer, (nn.Module, Mapping, str, os.PathLike)):
        raise wrong_call("load_optimizer", f"{type(optimizer).__name__} is not an optimizer")
    # Raises if a pattern is a text and not a list, as `load` does.
    Options(include=include, exclude=exclude, allow_missing=allow_missing, strict=strict)
    options = StateDictOptions(strict=strict, full_state_dict=True)
    chosen = collective, process_group, include, exclude, allow_missing
    with ExitStack() as stack:
        if is_state(ckpt):
            if root is None:
                flat = flat_state(ckpt, None)
                keys = (*flat.tensors, *_keys_in(flat.objects), *flat.blocked)
                root = _root_in(keys, IN_MEMORY)
            path, saved = IN_MEMORY, container(ckpt, root)
        else:
            opened = stack.enter_context(
                checkpoint(
                    ckpt,
                    None,
                    whole=True,
                    allow_classes=allow_classes,
                    storage_options=storage_options,
                )
            )
            path = opened.path
            keys = (*opened.entries, *_keys_in(opened.objects), *opened.blocked_keys)
            keys += tuple(f"{name}.param_groups" for name in opened._index.aside)
            root = _root_in(keys, path) if root is None else root
            saved = opened._tree(root, partial(slices_of, opened))
        with errors_name(path):
            saved = _optimizer_state(saved)
            call = Part.OPTIMIZERS, model, optimizer, None, saved, options
            return load_states(LoadCall(*call, *chosen, must_match=True)).optimizer


def _keys_in(objects: Mapping[str, object]) -> Iterator[str]:
    """Return the keys of plain values, and of groups in a list of optimizers without tensors."""
    for key, value in objects.items():
        yield key
        for at, item in enumerate(value if isinstance(value, list) else ()):
            if isinstance(item, Mapping) and "param_groups" in item:
                yield f"{key}.{at}.param_groups"


def _root_in(keys: Iterable[str], path: str) -> str | None:
    """Return the only container that holds an optimizer's groups, or None for the root or no one.

    Args:
        keys: The keys of all values.
        path: The path of the checkpoint.

    Raises:
        FormatError: If several containers do.
    """
    ends = ((key, f".{key}.".find(".param_groups.")) for key in keys)
    roots = list(dict.fromkeys(key[: max(0, at - 1)] for key, at in ends if at >= 0))
    if len(roots) < 2 or "" in roots:
        return None if "" in roots else next(iter(roots), None)
    ways = [f for root in roots[:5] for f in (" or ", Argument("root", repr(root), (root,)))]
    raise FormatError(
        "the checkpoint has several optimizer states",
        file=path,
        found=clipped_list(roots),
        hint=Hint("Pass ", *ways[1:], "."),
    )


def slices_of(ckpt: Checkpoint, entry: TensorEntry) -> torch.Tensor | FileTensor:
    """Return a view of a tensor, or a `FileTensor` if a view would copy it."""
    is_away = bool(entry.chunks) and isinstance(entry.chunks[0].file, Url)
    is_copied = is_away or len(entry.chunks) > 1
    if is_copied and entry.is_plain and "param_groups" not in entry.key.split("."):
        return FileTensor(entry.key, entry, ckpt._mapped())
    return ckpt._view(entry)


def _optimizer_state(saved: Any) -> Any:
    """Return the state, also out of a list with one state.

    Raises:
        FormatError: If there is none, or one of several is to be chosen.
    """
    if isinstance(saved, list) and len(saved) == 1:
        (saved,) = saved
    if isinstance(saved, Mapping):
        is_flat = any(str(key).startswith(("state.", "param_groups.")) for key in saved)
        # With one container of two there would be no state, and no error. DCP drops empty dicts,
        # and SGD without momentum then has groups alone.
        if is_flat != ("param_groups" in saved):
            return saved if is_flat else {"state": {}, **saved}
    raise FormatError(
        "it does not contain an optimizer state",
        expected="a dict with 'state' and 'param_groups', or a flat one",
        found=f"a {type(saved).__name__}",
        hint=state_hint({"": saved})
        or "Pass the container that holds it as root=, or the path of its own file.",
    )


def patch_model_state_dict(model: nn.Module, *, options: StateDictOptions | None = None) -> None:
    """Make ``model.state_dict()`` and ``model.load_state_dict()`` use canonical names.

    A library that calls these two methods then saves a state that loads into any other wrapper.
    The object is patched, not its class. ``del model.state_dict`` undoes it.

    Args:
        model: The model, wrapped or not.
        options: See `StateDictOptions`.

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
    chosen = validate_options(options)

    def load_state_dict(state_dict: dict[str, Any]) -> Any:
        return set_model_state_dict(model, state_dict, options=chosen)

    _patch(model, partial(get_model_state_dict, model, options=chosen), load_state_dict)


def patch_optimizer_state_dict(
    model: nn.Module, *, optimizers: Optimizers, options: StateDictOptions | None = None
) -> None:
    """Make ``state_dict()`` and ``load_state_dict()`` of optimizers use canonical names.

    Each of several optimizers then returns and loads the state of all of them, so call these
    methods on one of them only.

    Args:
        model: The model whose parameters the optimizers hold.
        optimizers: One or several optimizers.
        options: See `StateDictOptions`.

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
    chosen, found = validate_options(options), to_tuple(optimizers)

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


def read_states(
    part: Part,
    model: nn.Module,
    optimizers: Any = (),
    submodules: Any = None,
    options: Any = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    *,
    exact: bool = False,
) -> States:
    """Return the state dicts of a model and its optimizers, each empty if it is not requested.

    Ranks that do not gather exchange nothing. Other ranks gather after all have read their state,
    have the memory, and are about to gather the same tensors.

    Args:
        part: The part to read.
        model: See `get_state_dict`.
        optimizers: See `get_state_dict`.
        submodules: See `get_state_dict`.
        options: See `get_state_dict`.
        process_group: See `get_state_dict`.
        exact: See `read_optimizers`.
    """
    require_module(model)
    chosen, found = validate_options(options), to_tuple(optimizers)
    inside = set(submodules or ()) & set(model.modules())

    def validate_arguments() -> None:
        require_optimizers(found, part)
        if submodules and not inside:
            raise StateDictMismatch("none of the submodules is part of the model")

    if uses_fsdp1(model):
        from torchlift.distributed import fsdp1

        return fsdp1.read(part, model, found, inside, chosen, validate_arguments)
    tree = read_tree(model)
    tensors = [each.tensor for each in tree.groups]
    offloads = chosen.full_state_dict and chosen.cpu_offload
    if offloads and process_group is None and any(map(is_dtensor, tensors)):
        # The names of ranks that no mesh ties to this one are compared, too.
        group = RankGroup.of_all(StateDictMismatch)
    else:
        shared = tensors if chosen.full_state_dict else ()
        group = RankGroup.of_model(shared, kind=StateDictMismatch, process_group=process_group)
    keeps = not offloads or rank() == ranks_of(*group.groups[:1])[0]

    def read_state() -> StepResult[tuple[States, Gathering], _ReadMessage]:
        validate_arguments()
        names = Names(tree, chosen.dsd_fqn_modifiers)
        states = States({}, {})
        if Part.MODEL in part:
            frozen, prefixed = not chosen.ignore_frozen_params, chosen.keep_submodule_prefixes
            model_state = read_model(model, names, inside, frozen=frozen, prefixed=prefixed)
            states = states._replace(model=model_state)
        if found:
            states = states._replace(
                optimizer=read_optimizers(name_parameters(names, found), chosen, exact=exact)
            )
        for state in states if chosen.full_state_dict else ():
            require_within(state)
        steps = steps_of(states._asdict(), tensors) if group.groups else {}
        checksums = dict[HeldPart, Checksum]()
        if group.groups and offloads:  # the first rank's values stand for those of all ranks
            steps["names"] = [repr(path) for path in leaves(states)]
            checksums = _sum_up(states, names)
        gathering = Gathering(states, chosen, keeps=keeps)
        return StepResult((states, gathering), _ReadMessage(digests(steps), checksums))

    def validate(by_rank: Mapping[int, _ReadMessage]) -> None:
        require_same_steps({who: each.digests for who, each in by_rank.items()})
        differing = find_differences({who: each.checksums for who, each in by_rank.items()})
        if differing:
            names = {part.key: each for part, each in differing.items()}
            raise difference_error(names, OWN_GROUPS)

    try:
        with collection_paused(), torch.no_grad(), uninterrupted():
            read, gathering = group.run(read_state, validate).value
            made = gathering.finish()
    except PlacementError as error:
        raise portable(error, StateDictMismatch) from error
    if made is None:
        return States({}, {})
    return States(*(
        versioned(each, getattr(before, "_metadata", None))
        for each, before in zip(made, read, strict=True)
    ))  # fmt: skip


class _ReadMessage(NamedTuple):
    """The message of a rank that has read its state.

    Attributes:
        digests: The digests of the steps in which it will gather.
        checksums: The checksums of values that other ranks may have, too.
    """

    digests: dict[str, str]
    checksums: dict[HeldPart, Checksum]


def _sum_up(states: States, names: Names) -> dict[HeldPart, Checksum]:
    """Return the checksums of parameters and optimizer state that must be equal on all ranks.

    These are plain tensors, and DTensors on a mesh of some of the ranks, such as experts.
    """
    parameters = {
        name
        for name, tensor in names.tensors.items()
        if isinstance(tensor, nn.Parameter) and name in states.model
    }
    found = {".".join(map(str, path)): leaf for path, leaf in leaves(states.optimizer).items()}
    found |= {name: value for name, value in states.model.items() if name in parameters}
    work = Workspace()
    return {
        HeldPart(name, spans_of(value, name) if is_dtensor(value) else None): checksum_of(
            local_tensor(value).detach(), work
        )
        for name, value in found.items()
        if torch.is_tensor(value) and not value.is_meta
        if not is_dtensor(value) or is_on_some_ranks(value)
    }


#: The hint for values of one group of ranks under the name of those of another group.
OWN_GROUPS = (
    "Pass process_group= with the ranks of each group. The first rank of each then gets its values."
)


# ---- a load of model and optimizers together: checked as a whole, on every rank, then done


@dataclass
class _State:
    """The state to load. Rank 0 sends it with ``broadcast_from_rank0``.

    Attributes:
        kind: Device type of the model that has the state dict.
        model: Canonical name -> value, or None if the model is not to be loaded.
        versions: Module versions (``_metadata``) of the model's state dict.
        optimizer: The optimizers' state, or None if they are not to be loaded.
    """

    kind: str
    model: dict[str, Any] | None = None
    versions: Any = None
    optimizer: Saved | None = None


@dataclass
class Job:
    """A load on this rank, with valid arguments: plan it, put what is new, then copy in place.

    Attributes:
        call: The arguments.
        options: A valid copy of the options.
        tree: The model.
        names: The canonical names of the model and of the optimizers' parameters.
        holders: The optimizers.
        state: The values to load.
        planned: The plan of the model, if there are values for it.
        slots: The slots of the optimizers, if there is state for them.
        last: The copies that come last.
    """

    call: LoadCall
    options: StateDictOptions
    tree: ModuleTree
    names: Names
    holders: list[Holder]
    state: _State
    planned: Decided | None = None
    slots: OptimizerSlots | None = None
    last: list[InPlace] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """The device of new tensors, with its number."""
        kind = "cpu" if self.options.cpu_offload else self.state.kind
        return torch.empty(0, device=kind).device

    def make_slots(self) -> None:
        """Match the optimizers' state with the optimizers, once. Nothing changes."""
        if self.slots is None and self.state.optimizer is not None:
            saved = self.state.optimizer
            weights = self.call.model_state if self.state.model is None else self.state.model
            blank = (group for group in self.tree.groups if group.tensor.is_meta)
            undecided = {id(group.tensor) for group in blank if not changed_on_meta(group)[0]}
            self.slots = OptimizerSlots(
                self.holders, saved, self.options, self.device, weights or {}, undecided
            )

    @cached_property
    def _source(self) -> StateSource:
        values = {self.names.key(name): each for name, each in (self.state.model or {}).items()}
        return self._source_of(values, self.state.versions)

    def _source_of(self, values: Mapping[str, Any], versions: Any = None) -> StateSource:
        chosen = self.options
        is_new = chosen.broadcast_from_rank0
        return StateSource(values, versions, whole=chosen.full_state_dict, is_new=is_new)

    @property
    def runs_own_code(self) -> bool:
        """Whether an optimizer's own code may still end the load after live tensors change."""
        return self.slots is not None and any(
            runs_own_code(each.optimizer) for each in self.holders
        )

    def plan(self, commit: Commit) -> None:
        """Plan the load of the model, then match the optimizers' state. Nothing changes."""
        if self.state.model is not None:
            options, check = _engine_options(self), partial(_check, self)
            self.planned = make_plan(self.tree, self._source, options, commit, check=check)
        self.make_slots()  # later, because another model is the cause of another state

    def put_new(self, commit: Commit) -> None:
        """Fetch all values, and put new tensors in their places. The commit undoes it."""
        fetched, moments, slots = None, None, self.slots
        with Interruptible():
            if self.planned is not None:
                fetched = fetch_all(self.planned, self._source, None, _ignore)
            if slots is not None:
                saved, buffers = self._source_of(slots.values), ModuleTree(slots.module)
                part = make_plan(buffers, saved, slots.options, commit, check=require_matched)
                moments = fetch_all(part, saved, None, _ignore)
        if slots is not None and moments is not None:
            self.last.append(put_new(moments, commit))
            set_states(slots, commit, own_code=False)
        if fetched is not None:
            commit.when_undone(partial(refresh_shards, self.tree.modules))
            self.last.append(put_new(fetched, commit))

    def copy_last(self, commit: Commit, *, backup: bool) -> None:
        """Copy values into live tensors, and let optimizers run their own code.

        Args:
            commit: Undoes it with a backup.
            backup: Whether something may fail after this.
        """
        for each in self.last:
            copy_in_place(each, commit, backup=backup, advance=_ignore)
        refresh_shards(self.tree.modules)
        if self.slots is not None:
            set_states(self.slots, commit, own_code=True)


def load_states(call: LoadCall) -> LoadedKeys:
    """Load a model and optimizers on every rank, or nothing.

    Each check of an argument is inside a step of the group. A rank that raised before such a step
    would leave the others waiting.

    Raises:
        StateDictMismatch: If something does not match, on this rank or on another.
    """
    require_module(call.model)
    if uses_fsdp1(call.model):
        from torchlift.distributed import fsdp1

        return fsdp1.write(call)
    tree = read_tree(call.model)
    group = RankGroup.of_model(
        [each.tensor for each in tree.groups], tree.modules, StateDictMismatch,
        collective=call.collective, process_group=call.process_group,
    )  # fmt: skip
    # If one rank broadcasts, the others take part too, and then raise: rank 0 sends to all.
    broadcasts = bool(getattr(call.options, "broadcast_from_rank0", False))
    by_rank = group.run(lambda: StepResult(None, broadcasts)).by_rank
    try:
        with collection_paused(), torch.no_grad():
            if not any(by_rank.values()):
                return _load(_prepare_alike(call, tree, group), group)
            if call.collective is False:
                raise ValueError("broadcast_from_rank0=True is not for a rank that loads alone")
            group = RankGroup.of_all(StateDictMismatch, call.process_group)
            return _load(_receive_job(call, tree, group, all(by_rank.values())), group)
    except StateDictMismatch:
        raise
    except CheckpointError as error:
        raise portable(error, StateDictMismatch) from error


def prepare(call: LoadCall, tree: ModuleTree) -> Job:
    """Validate the arguments of this rank, and bring the state dicts into one form."""
    chosen = validate_options(call.options)
    optimizers = require_optimizers(call.optimizers, call.part)
    names = Names(tree, chosen.dsd_fqn_modifiers)
    holders = name_parameters(names, optimizers)
    state = _State(_device_type(tree))
    job = Job(call, chosen, tree, names, holders, state)
    if chosen.broadcast_from_rank0 and rank() != 0:
        return job
    model_state = call.model_dict()
    if model_state is not None:
        state.model = by_name(model_state, names)
        state.versions = versions_of(state.model, names.key)
    if optimizers:
        state.optimizer = normalise(call.optim_dict(), holders)
        state.optimizer.leave_out(call.include, call.exclude, call.allow_missing)
        state.optimizer.must_match = call.must_match
    moments = state.optimizer.state if state.optimizer else {}
    for (_, *path), value in leaves([state.model or {}, moments]).items():
        if isinstance(value, torch.Tensor) and value.is_nested:
            # A nested tensor has no shape to compare, and torch fails if it is asked for one.
            raise bad_value(".".join(map(str, path)), "a tensor that is nested")
    return job


def _prepare_alike(call: LoadCall, tree: ModuleTree, group: RankGroup) -> Job:
    """Validate the arguments of all ranks, and lay out values like the tensors they are for."""
    tensors = [each.tensor for each in tree.groups]

    def describe() -> StepResult[tuple[Job, Relayout], dict[str, str]]:
        job = prepare(call, tree)
        loaded = {"model": job.state.model, "optimizers": job.state.optimizer}
        loading = [f"to load {name}" for name, state in loaded.items() if state is not None]
        others = _find_other_layouts(job.state.model or {}, job.names.tensors)
        steps = digests({"call": loading, **steps_of(others, tensors)})
        others = {} if call.collective is False else others
        return StepResult((job, Relayout(others, job.names.tensors)), steps)

    job, relayout = group.run(describe, require_same_steps).value
    # This communicates. It is done now, while no module's own code can stop one of the ranks.
    if job.state.model is not None:
        job.state.model |= relayout.finish()
    return job


def _find_other_layouts(values: Mapping[str, Any], targets: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that have another layout than their target, on its mesh, by name."""
    return {
        name: value
        for name, live in targets.items()  # in the same order on every rank
        if is_dtensor(live) and is_dtensor(value := values.get(name))
        if value.device_mesh == live.device_mesh and spread_of(value) != spread_of(live)
    }


def _load(job: Job, group: RankGroup) -> LoadedKeys:
    """Plan, fetch and put a valid job, or change nothing.

    Args:
        job: The job of this rank.
        group: The ranks that load together.
    """
    # The commit is the inner one: an interrupt while it undoes changes would leave half of them.
    with uninterrupted() as deliver, Commit() as commit:

        def plan() -> StepResult[Relayout, dict[str, str]]:
            job.plan(commit)
            others, shared = dict[str, Any](), [each.tensor for each in job.tree.groups]
            if job.slots is not None:
                others = _find_other_layouts(job.slots.values, job.slots.buffers)
                shared += job.slots.buffers.values()
            steps = digests(steps_of(others, shared))
            others = {} if job.call.collective is False else others
            relayout = Relayout(others, job.slots.buffers if job.slots else {})
            deliver()  # an interrupt here is reported to the other ranks
            return StepResult(relayout, steps)

        relayout = group.run(plan, require_same_steps).value
        if job.slots is not None:
            job.slots.values |= relayout.finish()
        with group.together() as agree:
            job.put_new(commit)
            deliver()
            # If something can fail after the first change, the ranks agree again, and keep old
            # values.
            again = agree(job.runs_own_code)
            job.copy_last(commit, backup=again)
            if again:
                agree(False)
            commit.finish()
    missing, unexpected = list[str](), list[str]()
    if job.planned is not None:
        left_out, unexpected = _frozen_names(job), job.planned.matched.unexpected
        missing = [name for name in job.planned.matched.missing if name not in left_out]
    return LoadedKeys(missing, unexpected, job.slots.report if job.slots is not None else None)


def _ignore(_: int) -> None:
    return None


# ---- the model


def _engine_options(job: Job) -> Options:
    """Return the options of the load: live tensors stay on their devices."""
    offload, where = job.options.cpu_offload, job.device
    device = {
        name: where
        for group in job.tree.groups
        if group.tensor.is_meta and (offload or not is_dtensor(group.tensor))
        for name in group.names
    }
    return Options(
        device=lambda entry: device.get(entry.key),
        strict=job.options.strict,
        allow_missing=job.call.allow_missing,
    )


def _check(job: Job, matched: Match, options: Options) -> None:
    """Refuse names and shapes that do not match, and values with another layout."""
    values, missing, unexpected = job.state.model or {}, list[str](), list[str]()
    extra = {*matched.unexpected}
    for name in filter(extra.__contains__, matched.missing):
        # As in torch, strict=False permits missing names, not wrong values.
        raise bad_value(name, f"a {type(values.get(name)).__name__}")
    for group, name, (candidate, *_) in matched.pairs:
        value = candidate.value if isinstance(candidate, MemoryTensor) else candidate
        check_value(name, group.tensor, value, job.options)
    if options.strict:
        excused = allowed(matched.missing, job.call.allow_missing) | _frozen_names(job)
        missing = [name for name in matched.missing if name not in excused]
        unexpected = matched.unexpected
    shapes = {key: (item.expected, item.found) for key, item in matched.mismatched.items()}
    if missing or unexpected or shapes:
        error = mismatch_error(missing, unexpected, shapes)
        if missing and (hint := state_hint({name: values.get(name) for name in unexpected})):
            error.hint = hint
        raise error


def _frozen_names(job: Job) -> set[str]:
    """Return the names that a state dict lacks which was read without frozen parameters."""
    chosen, names = job.options, job.names
    if not (chosen.strict and chosen.ignore_frozen_params):
        return set()
    # On meta there is no value to keep.
    return {name for name in names.frozen if not names.tensors[name].is_meta}


# ---- steps of all ranks


def _device_type(tree: ModuleTree) -> str:
    """Return the device type of a model, on which ranks receive the values of rank 0."""
    for group in tree.groups:
        if is_dtensor(group.tensor):
            return group.tensor.device_mesh.device_type
        if not group.tensor.is_meta:
            return group.tensor.device.type
    return "cpu"


class _Packed(NamedTuple):
    """The job of a rank. On rank 0, also its state as bytes, and the tensors that it sends."""

    job: Job
    state: bytes | None = None
    tensors: Sequence[torch.Tensor] = ()


def _receive_job(call: LoadCall, tree: ModuleTree, group: RankGroup, all_broadcast: bool) -> Job:
    """Return the job of this rank with the state of rank 0.

    Raises:
        StateDictMismatch: If only some of the ranks broadcast.
    """

    def pack() -> StepResult[_Packed, bool]:
        job = prepare(call, tree)  # first, because it validates the options
        if 0 not in ranks_of(call.process_group):
            raise ValueError("broadcast_from_rank0=True needs rank 0 in process_group=")
        if not torch.distributed.is_initialized():
            raise StateDictMismatch(
                "broadcast_from_rank0=True needs a process group",
                hint="Call torch.distributed.init_process_group first, or leave the option out.",
            )
        return StepResult(_pack(job) if rank() == 0 else _Packed(job), all_broadcast)

    (job, packed, tensors), by_rank = group.run(pack)
    if not all(by_rank.values()):
        raise StateDictMismatch("broadcast_from_rank0 must be the same on every rank")
    box = [packed]
    torch.distributed.broadcast_object_list(box, src=0, group=group.groups[0])

    def make_room() -> StepResult[Inbox, int]:
        job.state, sent = pickle.loads(box[0] or b"")  # this process may not know a class
        inbox = Inbox(tensors or sent, job.state.kind, call.process_group)
        return StepResult(inbox, _make_room(job, inbox))

    # A rank without memory stops all ranks here.
    inbox, needed = group.run(make_room)
    with uninterrupted():  # an interrupt would leave the other ranks waiting
        inbox.receive()
    # The stages of a pipeline share one state dict. Names of other stages are not unexpected.
    model, others = job.state.model or {}, reduce(or_, needed.values()) & ~needed[rank()]
    for at, name in enumerate([*model]):
        if others >> at & 1:
            del model[name]
    return job


def _make_room(job: Job, inbox: Inbox) -> int:
    """Replace the descriptions of the tensors of rank 0 by memory for those that this rank needs.

    Code of the model may need names that the model lacks.

    Returns:
        A bit for each name of the model's state dict, the first one lowest: whether it is needed.
        All ranks send this to all ranks.
    """
    model, names = job.state.model or {}, job.names
    keys = [names.key(name) for name in model]
    code = find_loading_code(job.tree, keys, inside=False)
    needed = 0
    for at, (name, key) in enumerate(zip([*model], keys, strict=True)):
        value, like = model[name], names.tensors.get(name)
        if like is None and not (code is not None and code.covers(key)):
            continue
        needed |= 1 << at
        if isinstance(value, Sent):
            device = job.device
            if like is not None and not like.is_meta:
                device = like.device
            elif is_dtensor(like) and not job.options.cpu_offload:
                device = default_device(like)
            model[name] = inbox.room_for(value, like, device)
    job.make_slots()
    if job.slots is not None:
        job.slots.make_room(inbox)
    return needed


def _pack(job: Job) -> _Packed:
    """Return the state of a job as it is sent, with a description in place of each tensor."""
    tensors: list[torch.Tensor] = []
    sent: dict[int, Sent] = {}

    def describe(tensor: torch.Tensor, name: str = "a tensor of the state dict") -> Sent:
        if id(tensor) not in sent:
            sent[id(tensor)] = Sent(len(tensors), tensor.shape, tensor.dtype)
            tensors.append(sendable(tensor, name))
        return sent[id(tensor)]

    model, optimizer = job.state.model, job.state.optimizer
    if model is not None:
        model = {
            name: describe(value, name) if isinstance(value, torch.Tensor) else value
            for name, value in model.items()
        }
    if optimizer is not None:
        # Tensors of groups, such as a learning rate, are small and needed on every rank.
        rest = map_tensors({**vars(optimizer), "state": {}}, lambda tensor: tensor.detach().cpu())
        optimizer = Saved(**{**rest, "state": map_tensors(optimizer.state, describe)})
    described = replace(job.state, model=model, optimizer=optimizer)
    # Packed here, and not by the broadcast: there an error would stop rank 0 alone.
    try:
        return _Packed(job, pickle.dumps((described, list(sent.values()))), tensors)
    except Exception as error:
        raise StateDictMismatch(
            "an object in the state dict cannot be sent to other processes",
            found=f"{type(error).__name__}: {error}",
        ) from error

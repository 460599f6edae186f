"""State dicts of wrapped and sharded models: the functions that a program calls.

Names, arguments and defaults are those of ``torch.distributed.checkpoint.state_dict``, and so are
the results wherever torch's are right: a program that changes the import keeps working.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from torchlift._model.names import uses_fsdp1
from torchlift._system import collection_paused
from torchlift.distributed.loading import load
from torchlift.distributed.optimizer_load import OptimizerReport
from torchlift.distributed.options import Optimizers, Part, StateDictOptions
from torchlift.distributed.reading import read


class LoadedKeys(_IncompatibleKeys):
    """The result of `set_state_dict`: missing and unexpected keys, by canonical name.

    It is a tuple of those two lists, as torch's is; what happened to the optimizers is beside it.

    Attributes:
        optimizer: the `OptimizerReport`.
    """

    optimizer: OptimizerReport = OptimizerReport()


def get_model_state_dict(
    model: nn.Module,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """The state dict of a model under canonical names, whatever the model is wrapped in.

    Args:
        model: the model: plain, compiled, DDP, FSDP2, tensor parallel, or any nesting of these.
        submodules: return only what lies under these modules.
        options: whether to gather, move to the CPU, leave frozen parameters out.

    Returns:
        Canonical name -> tensor (sharing memory with the model unless gathered) or extra state.

    Raises:
        StateDictMismatch: two keys have one canonical name; or, where ranks gather, another rank
            met an error or asks for other tensors.

    Example:
        >>> model = torch.compile(nn.Sequential(nn.Linear(2, 3)), backend="eager")
        >>> sorted(model.state_dict())
        ['_orig_mod.0.bias', '_orig_mod.0.weight']
        >>> sorted(get_model_state_dict(model))
        ['0.bias', '0.weight']
    """
    return _read(Part.MODEL, model, (), submodules, options)[0]


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """The state of one or more optimizers, under the canonical names of their parameters.

    The optimizers are not changed, and no step is taken: an optimizer that never stepped gives
    the state that its first step would start from, so Adam's ``step`` is 0, not 1
    (pytorch/pytorch#164929).

    Args:
        model: the model whose parameters the optimizers hold.
        optimizers: one or several.
        submodules: accepted as torch accepts it; the state of every parameter is returned.
        options: whether to gather, move to the CPU, flatten.

    Returns:
        ``{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}``, or one flat
        dict with ``flatten_optimizer_state_dict``.

    Raises:
        RuntimeError: no optimizer was passed.
        StateDictMismatch: an optimizer holds a parameter that the model does not; or, where ranks
            gather, another rank met an error or asks for other tensors.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> found = get_optimizer_state_dict(model, torch.optim.Adam(model.parameters()))
        >>> found["state"]["weight"]["step"], found["param_groups"][0]["params"]
        (tensor(0.), ['weight'])
    """
    return _read(Part.OPTIMIZERS, model, optimizers, None, options)[1]


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dicts of a model and its optimizers: `get_model_state_dict` and the other one.

    Args:
        model: the model, wrapped or not.
        optimizers: one, several or none.
        submodules: return only the model state under these modules.
        options: see `StateDictOptions`.

    Returns:
        The model's and the optimizers' state dict; the latter is empty without optimizers.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> found = get_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> sorted(found[0]), found[1]["param_groups"][0]["lr"]
        (['bias', 'weight'], 0.1)
    """
    state, optimizer_state = _read(Part.BOTH, model, optimizers, submodules, options)
    return state, optimizer_state


def _read(
    part: Part, model: nn.Module, optimizers: Any, submodules: Any, options: Any
) -> list[dict[str, Any]]:
    if uses_fsdp1(model):
        from torchlift.distributed import fsdp1

        return fsdp1.read(part, model, optimizers, submodules, options)
    with collection_paused(), torch.no_grad():
        return read(part, model, optimizers, submodules, options)


def set_model_state_dict(
    model: nn.Module,
    model_state_dict: dict[str, Any] | dict[nn.Module, dict[str, Any]],
    *,
    options: StateDictOptions | None = None,
) -> _IncompatibleKeys:
    """Load a state dict with canonical names into a model, whatever it is wrapped in.

    Everything is checked before anything changes. Where a process group and a mesh or DDP tie
    processes together, an error on one is an error on all. `model_state_dict` is not changed.
    Hooks and loading code of modules run while torch writes: what they refuse is taken back on
    every rank, for which this rank's part of the model is in memory twice. Three things stay: what
    a hook changed inside an object (a list, a tensor of the state dict), extra state of a module
    that cannot be asked for what it has, and what torch did to a ``FullyShardedDataParallel``.

    Args:
        model: the model, wrapped or not; its tensors may be on meta.
        model_state_dict: by canonical name, or by submodule.
        options: with ``full_state_dict`` the values are whole tensors and each rank copies its own
            part, without communication; with ``broadcast_from_rank0`` too, only rank 0 needs them.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, by canonical name.

    Raises:
        StateDictMismatch: keys or shapes do not fit, there is no state dict (None), or another
            rank met an error; it is a `RuntimeError` as well.

    Example:
        >>> model = torch.compile(nn.Linear(2, 1), backend="eager")
        >>> set_model_state_dict(model, nn.Linear(2, 1).state_dict())
        <All keys matched successfully>
    """
    if uses_fsdp1(model):
        from torchlift.distributed import fsdp1

        return fsdp1.set_model(model, model_state_dict, options)
    with collection_paused():
        plan, _ = load(Part.MODEL, model, (), model_state_dict, None, options)
    return LoadedKeys(plan.missing, plan.unexpected)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: dict[str, Any],
    *,
    options: StateDictOptions | None = None,
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

    Returns:
        What was loaded, what was missing and what nobody wanted. torch returns None.

    Raises:
        RuntimeError: no optimizer was passed.
        StateDictMismatch: state is missing or has another shape.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> saved = get_optimizer_state_dict(model, optimizer)
        >>> del saved["state"]["bias"]
        >>> print(set_optimizer_state_dict(
        ...     model, optimizer, saved, options=StateDictOptions(strict=False)))
        loaded the state of 1 parameters
          missing (1): bias
    """
    if uses_fsdp1(model):
        from torchlift.distributed import fsdp1

        return fsdp1.set_optimizer(model, optimizers, optim_state_dict, options)
    with collection_paused():
        return load(Part.OPTIMIZERS, model, optimizers, None, optim_state_dict, options)[1]


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: dict[str, Any] | dict[nn.Module, dict[str, Any]],
    optim_state_dict: dict[str, Any],
    options: StateDictOptions | None = None,
) -> _IncompatibleKeys:
    """Load a model and its optimizers together: both, or neither if anything does not fit.

    Args:
        model: the model, wrapped or not.
        optimizers: one, several or none.
        model_state_dict: by canonical name or by submodule; an empty one leaves the model alone.
        optim_state_dict: see `set_optimizer_state_dict`.
        options: see `StateDictOptions`.

    Returns:
        ``missing_keys`` and ``unexpected_keys`` of the model; its attribute ``optimizer`` is the
        `OptimizerReport`.

    Raises:
        StateDictMismatch: something does not fit; nothing has changed then.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> states = get_state_dict(model, optimizer)
        >>> done = set_state_dict(
        ...     model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
        >>> done, done.optimizer.loaded
        (<All keys matched successfully>, ['weight', 'bias'])
    """
    if uses_fsdp1(model):
        from torchlift.distributed import fsdp1

        return fsdp1.set_both(model, optimizers, model_state_dict, optim_state_dict, options)
    with collection_paused():
        plan, report = load(
            Part.BOTH, model, optimizers, model_state_dict, optim_state_dict, options
        )
    done = LoadedKeys(plan.missing, plan.unexpected)
    done.optimizer = report
    return done

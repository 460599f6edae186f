"""What a module's or an optimizer's own code makes of a load, taken back when anybody refuses.

``load_state_dict`` runs that code while it writes, and what it decides shows only afterwards: here,
or on another rank. So where there is such code, what is about to be written is kept until all ranks
are done, which takes the memory of a second copy of what this rank holds. A model without any is
not kept: what can go wrong with it is known before anything changes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from torchlift._model.commit import Commit, is_plain, repeats
from torchlift._model.dtensor import held, is_dtensor
from torchlift._model.fsdp import take_note
from torchlift._model.ranks import tensors_of
from torchlift._model.slots import is_lazy
from torchlift._plan.hooks import has_post_hooks
from torchlift.distributed.custom import has_code
from torchlift.distributed.gather import map_tensors
from torchlift.distributed.optimizer_load import is_left_to_us


def may_refuse(model: nn.Module) -> bool:
    """Whether a load of the model may end in an error that no plan foresees.

    Example:
        >>> may_refuse(nn.Linear(1, 1)), may_refuse(nn.LazyLinear(1))
        (False, True)
    """
    if type(model).load_state_dict is not nn.Module.load_state_dict or has_post_hooks(model):
        return True
    if any(has_code(module) or _takes_extra(module) for module in model.modules()):
        return True
    return any(map(_is_odd, tensors_of(model)))


def _takes_extra(module: nn.Module) -> bool:
    return type(module).set_extra_state is not nn.Module.set_extra_state


def _is_odd(tensor: torch.Tensor) -> bool:
    """Whether torch may fail to write to it; it then goes on with the next."""
    if is_lazy(tensor):
        return True
    local = held(tensor)
    frozen = tensor.is_inference() and not torch.is_inference_mode_enabled()
    return frozen or not is_plain(local) or repeats(local.shape, local.stride())


def optimizer_may_refuse(optimizer: torch.optim.Optimizer) -> bool:
    """Whether code that is not torch's runs when the optimizer is loaded."""
    return not is_left_to_us(optimizer)


def keep_model(model: nn.Module, commit: Commit) -> None:
    """Note how to give the model back its tensors, their values, and extra state.

    Plain attributes are for `torchlift._model.commit` to give back.
    """
    commit.when_undone(lambda: take_note(model))
    for tensor in dict.fromkeys(tensors_of(model)):
        commit.when_undone(_values_of(tensor))
    for module in model.modules():
        for registry in (module._parameters, module._buffers):
            for name, now in registry.items():
                commit.when_undone(partial(_put_back, module, name, now))
        if _takes_extra(module) and type(module).get_extra_state is not nn.Module.get_extra_state:
            before = copy.deepcopy(module.get_extra_state())
            commit.when_undone(partial(module.set_extra_state, before))


def _put_back(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    # setattr, because recurrent layers keep a list of their weights up to date in it.
    if getattr(module, name, None) is not tensor:
        setattr(module, name, tensor)


def _values_of(tensor: torch.Tensor) -> Callable[[], None]:
    """What gives a tensor back its memory and the values in it, whatever was done to it."""
    if is_lazy(tensor):
        kind, empty = type(tensor), tensor.data

        def forget() -> None:
            tensor.data = empty
            tensor.__class__ = kind

        return forget
    local = held(tensor)
    memory, dress = local.detach(), _dress_of(tensor)
    written = _once(memory)
    before = None if local.is_meta else written.clone()

    def undo() -> None:
        if is_dtensor(tensor):
            tensor._local_tensor = local
        elif is_plain(tensor) and not _is_same_memory(tensor, memory):
            tensor.data = memory
        dress()
        if before is not None:
            written.copy_(before)

    return undo


def _once(memory: torch.Tensor) -> torch.Tensor:
    """Every element that an expanded tensor repeats, once: torch refuses to write to the others."""
    for dim, stride in enumerate(memory.stride()) if memory.layout is torch.strided else ():
        if stride == 0 and memory.shape[dim] > 1:
            memory = memory.narrow(dim, 0, 1)
    return memory


def _dress_of(tensor: torch.Tensor) -> Callable[[], None]:
    """What gives a tensor back all that is not its content.

    A load that swaps what is inside of parameters (torch.__future__) leaves all of it with the
    tensor that the content came from, which nobody holds.
    """
    kind, attributes, needs_grad = type(tensor), dict(vars(tensor)), tensor.requires_grad
    grad = tensor.grad if tensor.is_leaf else None
    hooks = {name: found for name in _HOOKS if (found := getattr(tensor, name)) is not None}

    def undo() -> None:
        if type(tensor) is not kind:
            tensor.__class__ = kind
        vars(tensor).clear()
        vars(tensor).update(attributes)
        if tensor.requires_grad != needs_grad:
            tensor.requires_grad_(needs_grad)
        for name, before in hooks.items():
            # A swap leaves these attributes, and takes away what calls them; setting them adds it.
            setattr(tensor, name, before)
        if tensor.is_leaf and tensor.grad is not grad:
            tensor.grad = grad

    return undo


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def _is_same_memory(one: torch.Tensor, two: torch.Tensor) -> bool:
    if one.is_meta or two.is_meta:
        return one.is_meta == two.is_meta and one.shape == two.shape
    same = one.data_ptr() == two.data_ptr() and one.dtype == two.dtype
    return same and (one.shape, one.stride()) == (two.shape, two.stride())


def keep_optimizer(optimizer: torch.optim.Optimizer, commit: Commit) -> None:
    """Note how to give an optimizer back its state, values included, and its groups."""
    attributes = dict(vars(optimizer))
    groups = [(group, dict(group), list(group["params"])) for group in optimizer.param_groups]
    state, order = optimizer.state, list(optimizer.param_groups)
    inner = {key: (part, _containers(part)) for key, part in state.items()}

    def undo() -> None:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        optimizer.param_groups[:] = order
        for group, content, params in groups:
            content["params"][:] = params
            group.clear()
            group.update(content)
        state.clear()
        for key, (part, content) in inner.items():
            if isinstance(part, dict):
                part.clear()
                part.update(content)
            state[key] = part

    commit.when_undone(undo)
    map_tensors({key: part for key, (part, _) in inner.items()}, partial(_keep_one, commit))


def _keep_one(commit: Commit, tensor: torch.Tensor) -> None:
    commit.when_undone(_values_of(tensor))


def _containers(part: Any) -> Any:
    return map_tensors(part, lambda tensor: tensor)

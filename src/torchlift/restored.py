"""Takes back what the hooks of modules change in their modules, besides the values of tensors.

torch gives a hook the live module. Some resize a parameter there, or register a buffer, so that
what comes next fits; some count their calls. A plan must leave no trace of it, nor must a load that
fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from torchlift.distributed.fsdp import is_fsdp
from torchlift.slots import modules_of

_REGISTRIES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


@contextmanager
def restored(model: nn.Module, *, always: bool, every: bool = False) -> Iterator[None]:
    """Give the modules back their tensors, children and attributes if the block fails.

    Only the objects: who changed the inside of one has to take that back. Nothing is kept for a
    model without hooks.

    Args:
        model: the module whose hooks are about to be called.
        always: also where the block succeeds.
        every: also of a model without hooks.
    """
    modules = modules_of(model)
    every = every or any(map(_has_hooks, modules))
    kept = [_state_of(module) for module in modules] if every else []
    try:
        yield
    except BaseException:
        always = True
        raise
    finally:
        if always:
            for module, state in zip(modules, kept, strict=False):
                _restore(module, state)


def _has_hooks(module: nn.Module) -> bool:
    for registry in (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks):
        if registry and not all(map(is_fsdp, registry.values())):
            return True
    return False


def _state_of(module: nn.Module) -> tuple[dict[str, Any], list[Any]]:
    attributes = dict(vars(module))
    return attributes, [attributes[name].copy() for name in _REGISTRIES]


def _restore(module: nn.Module, state: tuple[dict[str, Any], list[Any]]) -> None:
    attributes, registries = state
    for name in vars(module).keys() - attributes.keys():
        del vars(module)[name]
    vars(module).update(attributes)
    for name, content in zip(_REGISTRIES, registries, strict=True):
        registry = attributes[name]
        registry.clear()
        registry.update(content)

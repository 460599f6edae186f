"""Which modules have a say in what they are loaded from."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from torchlift._model.names import Names


def is_custom(names: Names, fqn: str) -> bool:
    """Whether a module on the way to `fqn` has loading code that may want other keys.

    Example:
        >>> is_custom(Names(nn.Linear(1, 1)), "weight")
        False
    """
    path = fqn
    while path:
        path = path.rpartition(".")[0]
        module = names.modules.get(path)
        if module is not None and has_code(module):
            return True
    return False


def has_code(module: nn.Module) -> bool:
    """Whether a module changes what it is loaded from, or loads itself.

    Example:
        >>> has_code(nn.Linear(1, 1))
        False
    """
    loads_itself = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    if loads_itself and not isinstance(module, _NormBase):
        return True
    hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    # FSDP2 and activation checkpointing register hooks that leave keys and values alone.
    return not all(getattr(h, "__module__", "").startswith("torch.distributed.") for h in hooks)

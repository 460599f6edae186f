"""FSDP2's own hooks: they look after its shards, and never at a state dict."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from torchlift._model.slots import walk


def is_fsdp(hook: Any) -> bool:
    """Whether it is one that ``fully_shard`` registered.

    Example:
        >>> is_fsdp(print)
        False
    """
    function = getattr(hook, "hook", hook)
    return getattr(function, "__module__", "").startswith("torch.distributed.fsdp._fully_shard.")


def reshard(model: nn.Module) -> None:
    """Have FSDP2 put the sharded parameters back into their slots, as it does before any load.

    A forward pass outside of training may have left whole ones there.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return
    for _, module in walk(model):
        for hook in module._load_state_dict_pre_hooks.values():
            if is_fsdp(hook):
                hook(None, "", {}, True, [], [], [])


def take_note(model: nn.Module) -> None:
    """Have FSDP2 look at its shards again, after they were put back by somebody else.

    It gathers from references of its own to their memory, so that a load that was undone would
    otherwise live on in the next forward pass.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return
    for _, module in walk(model):
        for hook in module._load_state_dict_post_hooks.values():
            if is_fsdp(hook):
                hook(module, None)

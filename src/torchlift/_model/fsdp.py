"""FSDP2: its sharded parameters in their slots, and its hooks, which look after shards alone."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn


def is_fsdp(hook: Any) -> bool:
    """Say whether it is a hook that ``fully_shard`` registered; none of them reads a state dict.

    Example:
        >>> is_fsdp(print)
        False
    """
    loaded: Any = sys.modules.get("torch.distributed.fsdp")
    if loaded is None:
        return False
    # The package in which FSDP2 lies is private; wherever it moves, a public method moves along.
    package = loaded.FSDPModule.reshard.__module__.rpartition(".")[0]
    function = getattr(hook, "hook", hook)
    return str(getattr(function, "__module__", "")).startswith(f"{package}.")


def reshard(modules: Iterable[nn.Module]) -> None:
    """Put FSDP2's sharded parameters back into their slots.

    A forward pass outside of training may have left whole ones there, which are not those that the
    optimizer and the state dict know. torch does this in hooks of ``state_dict``.
    """
    loaded: Any = sys.modules.get("torch.distributed.fsdp")
    if loaded is not None:
        for module in modules:
            if isinstance(module, loaded.FSDPModule):
                module.reshard()


def refresh_shards(modules: Iterable[nn.Module]) -> None:
    """Have FSDP2 look at its shards again, after they were put back.

    It gathers from references of its own to their memory: a load that was undone would otherwise
    live on in the next forward pass.
    """
    for module in modules:
        for hook in module._load_state_dict_post_hooks.values():
            if is_fsdp(hook):
                hook(module, None)

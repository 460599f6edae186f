"""What every check has in common in which one rank cannot or will not load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from wrapped_models import cloned, containers, same

from torchlift.errors import CheckpointError

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def last() -> int:
    return dist.get_world_size() - 1


def is_last() -> bool:
    return dist.get_rank() == last()


@contextmanager
def unchanged(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[Any]:
    """Every rank raises in the block, and everything is as it was."""

    def now() -> Any:
        state = optimizer.state_dict() if optimizer else None
        return cloned((containers(model.state_dict()), state))

    before = now()
    with pytest.raises((CheckpointError, RuntimeError, ValueError, CheckpointException)) as caught:
        yield caught
    same(now(), before)
    dist.barrier()

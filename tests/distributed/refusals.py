"""What every check has in common in which one rank cannot or will not load."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from wrapped_models import cloned, containers, same

import torchlift.distributed as ours
from torchlift.errors import CheckpointError

Options = ours.StateDictOptions
WHOLE = Options(full_state_dict=True)
FROM_0 = Options(full_state_dict=True, broadcast_from_rank0=True)
Call = Callable[..., object]
#: Four ranks show those that neither refuse nor are rank 0: which does not depend on the wrapping.
TWO = os.environ["WORLD_SIZE"] == "2"
SHARDED = ("fsdp blocks", "tensor parallel") if TWO else ("fsdp blocks",)
WRAPS = ("ddp", *SHARDED) if TWO else SHARDED

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


def everybody_raises(call: Callable[[], object], own: type[Exception], says: str) -> None:
    """The last rank its own error, and all others that one, at once."""
    with pytest.raises((own, ours.StateDictMismatch)) as caught:
        call()
    assert says in str(caught.value), str(caught.value)
    if is_last():
        assert isinstance(caught.value, own), repr(caught.value)
    else:
        assert f"on rank {last()}: {own.__name__}: " in str(caught.value), str(caught.value)
    dist.barrier()


def one_of(wrong: Any, right: Any) -> Any:
    return wrong if is_last() else right


def setters(model: nn.Module, optimizer: Any, states: Any) -> dict[str, Call]:
    """Every function that loads, called with options only."""
    both = {"model_state_dict": states[0], "optim_state_dict": states[1]}
    return {
        "model": partial(ours.set_model_state_dict, model, states[0]),
        "optimizer": partial(ours.set_optimizer_state_dict, model, optimizer, states[1]),
        "both": partial(ours.set_state_dict, model, optimizer, **both),
    }


def getters(model: nn.Module, optimizer: Any) -> list[Call]:
    return [
        partial(ours.get_model_state_dict, model),
        partial(ours.get_optimizer_state_dict, model, optimizer),
        partial(ours.get_state_dict, model, optimizer),
    ]


@contextmanager
def all_differ(says: str, *kept: Any) -> Iterator[None]:
    """Every rank raises the same; a model and an optimizer are as they were."""
    with unchanged(*kept) if kept else pytest.raises(ours.StateDictMismatch) as caught:
        yield
    assert isinstance(caught.value, ours.StateDictMismatch)
    assert says in str(caught.value), str(caught.value)
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert len(set(texts)) == 1, texts


def whole(model: nn.Module) -> dict[str, Any]:
    return ours.get_model_state_dict(model, options=WHOLE)

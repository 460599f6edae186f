"""A class that refuses its values says so when they are copied. Then nothing is loaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchlift
from torchlift.distributed import on_ranks


class Picky(torch.Tensor):
    """Takes no value of 2 on the last rank."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        if func is torch.Tensor.copy_ and args[1].flatten()[0] == 2 and is_last:
            raise RuntimeError("no twos")
        return super().__torch_function__(func, types, args, kwargs or {})


def model_of(kind: type[torch.Tensor]) -> nn.Module:
    """Two parameters of a plain class and of another one, in both orders."""
    model = nn.Module()
    for name in "abc":
        value = torch.ones(2, 2)
        value = value if name != "b" else value.as_subclass(kind)
        model.register_parameter(name, nn.Parameter(value))
    return model


def load_on_a_rank() -> list[Any]:
    model, state = model_of(Picky), {name: torch.full((2, 2), 2.0) for name in "abc"}
    with pytest.raises(torchlift.CheckpointError) as caught:
        torchlift.load(model, state, collective=True)
    found: list[Any] = [caught.value.entry, "does not take such values" in str(caught.value)]
    return [*found, *({*param.detach().flatten().tolist()} for param in model.parameters())]


@pytest.mark.distributed
def test_a_class_that_refuses_values_on_one_rank_stops_all_ranks() -> None:
    """Its code runs before the ranks agree, and is undone."""
    assert on_ranks(2, load_on_a_rank) == [["b", True, {1.0}, {1.0}, {1.0}]] * 2

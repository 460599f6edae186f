"""A recording beside other threads: the functions of torch are theirs."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from int8_weights import Int8
from torch import nn

import torchlift


class Sees(torch.Tensor):
    """Lists the functions that it is asked about."""

    seen: list[Any]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def while_recording(work: Callable[[], Any]) -> Any:
    """Return what another thread makes of it while this one is in a constructor."""
    results: list[Any] = []

    class Waits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)
            thread = threading.Thread(target=lambda: results.append(work()))
            thread.start()
            thread.join()
            self.second = nn.Linear(2, 2)

    model = torchlift.skeleton(Waits)
    assert all(parameter.is_meta for parameter in model.parameters())
    return results[0]


def the_functions() -> Any:
    """All that a module names."""
    return [
        dict(vars(holder))
        for holder in (torch, torch.random, torch.serialization, nn.init, torch.Tensor)
    ]


def warned_of_bounds() -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        nn.init.trunc_normal_(torch.empty(3), mean=9.0)
    return [(str(one.message), one.filename) for one in caught]


def seen_by_a_subclass() -> Any:
    Sees.seen = []
    same = torch.Generator().manual_seed(0)  # it draws again what is outside of its bounds
    nn.init.trunc_normal_(torch.empty(3).as_subclass(Sees), generator=same)
    return [function.__name__ for function in Sees.seen]


def a_wrapper() -> Any:
    return Int8.blank((2, 3), device="cpu").device


def seeded() -> Any:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(5)
        made = nn.Linear(3, 3)
        return [made.weight.tolist(), made.weight.device]


@pytest.mark.parametrize(
    "work", [the_functions, warned_of_bounds, seen_by_a_subclass, a_wrapper, seeded]
)
def test_another_thread_notices_nothing(work: Callable[[], Any]) -> None:
    """What it calls is torch's own, and does what it does without a recording."""
    assert while_recording(work) == work()

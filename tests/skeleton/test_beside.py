"""A recording beside other threads: the functions of torch are theirs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from int8_weights import Int8
from torch import nn

import torchlift


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


def a_wrapper() -> Any:
    return Int8.blank((2, 3), device="cpu").device


def seeded() -> Any:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(5)
        made = nn.Linear(3, 3)
        return [made.weight.tolist(), made.weight.device]


@pytest.mark.parametrize("work", [the_functions, a_wrapper, seeded])
def test_another_thread_notices_nothing(work: Callable[[], Any]) -> None:
    """What it calls is torch's own, and does what it does without a recording."""
    assert while_recording(work) == work()

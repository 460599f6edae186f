"""A replay beside other threads: default dtype and warnings of the process are theirs."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from zoo import Holder

import torchlift


class Tables(nn.Module):
    """Buffers whose dtype is that of torch's default, in each way that gives it."""

    def __init__(self) -> None:
        super().__init__()
        steps = torch.arange(0, 8, 2)
        for name, value in {
            "factory": torch.linspace(0, 1, 5),
            "filled": torch.full((2,), 0.1),
            "window": torch.hann_window(5),
            "divided": 1.0 / (10000 ** (steps / 7)),
            "true_divided": torch.true_divide(steps, 3),
            "root": torch.sqrt(steps),
            "power": torch.pow(2.1, steps),
            "scaled": steps * 0.3,
            "truth": (steps > 2) / 3,
            "chosen": torch.where(steps > 2, 0.1, 0.7),
            "complex": steps * 0.3j,
        }.items():
            self.register_buffer(name, value)
        self.random = nn.Parameter(torch.rand(3))
        self.layer = nn.Linear(3, 2)


@pytest.fixture
def other_default():
    """Another thread's choice, as far as a replay is concerned."""
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_values_are_those_of_the_default_dtype_of_the_construction(other_default) -> None:
    """Nothing is computed in another precision: it is an error, whose way out works."""
    torch.set_default_dtype(torch.float32)
    wanted, made = Tables(), torchlift.skeleton(Tables)
    torch.set_default_dtype(torch.bfloat16)
    with pytest.raises(torchlift.PlacementError, match="default dtype") as caught:
        torchlift.materialize(made)
    assert (caught.value.expected, caught.value.found) == (torch.float32, torch.bfloat16)
    torchlift.load(made, wanted.state_dict())  # which needs no value of the constructor
    made = torchlift.skeleton(Tables)
    torch.set_default_dtype(torch.float32)
    made = torchlift.skeleton(Tables)
    torchlift.materialize(made)
    for name, buffer in wanted.named_buffers():
        found = made.get_buffer(name)
        assert found.dtype == buffer.dtype, name
        assert torch.equal(found, buffer), name
    assert {p.dtype for p in made.parameters()} == {torch.float32}


def test_threads_that_replay_leave_default_dtype_and_filters_alone() -> None:
    """Also while they run."""
    filters, seen = list(warnings.filters), set()
    made = [torchlift.skeleton(Tables) for _ in range(24)]
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.add((torch.get_default_dtype(), tuple(map(id, warnings.filters))))

    threads = [threading.Thread(target=watch)]
    threads += [threading.Thread(target=torchlift.materialize, args=(one,)) for one in made]
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join()
    done.set()
    threads[0].join()
    assert seen == {(torch.float32, tuple(map(id, filters)))}


def test_a_sparse_buffer_of_a_constructor_stays() -> None:
    """No file has it, as that of openai-whisper."""

    def make() -> nn.Module:
        model = Holder({"weight": torch.rand(2)})
        model.register_buffer("heads", torch.eye(2).to_sparse(), persistent=False)
        return model

    torchlift.load(made := torchlift.skeleton(make), {"weight": torch.ones(2)})
    assert made.heads.is_sparse
    assert torch.equal(made.heads.to_dense(), torch.eye(2))


class Table(OrderedDict[str, Any]):
    """A table that runs code when somebody walks over it, as the lazy tables of transformers do."""

    def values(self) -> Any:
        raise ValueError("would import every model")

    items = __iter__ = keys = values


TABLE = Table()


class Named(nn.Module):
    """Looks its layer up in a table."""

    table = TABLE

    def __init__(self) -> None:
        super().__init__()
        self.layer = TABLE.get("linear", nn.Linear)(2, 2)


def test_no_code_of_a_table_runs_that_the_constructor_uses() -> None:
    """Nobody walks over the tables of other libraries."""
    assert torchlift.skeleton(Named).layer.weight.is_meta

"""Objects whose state is an object again: followed to a dict, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import torchlift
from torchlift.distributed import get_model_state_dict
from torchlift.errors import PlacementError, StateDictMismatch


class Stateful:
    """An object whose ``state_dict`` returns what a function makes of the object."""

    def __init__(self, make: Callable[[Stateful], Any]) -> None:
        self.make = make

    def state_dict(self) -> Any:
        return self.make(self)

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError(state)


def _endless() -> Stateful:
    return Stateful(lambda _: _endless())


ENDLESS: dict[str, Callable[[], Any]] = {
    "itself": lambda: Stateful(lambda own: own),
    "always a new one": _endless,
    "a mock": Mock,
    "itself in a list": lambda: Stateful(lambda own: [own]),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_state_without_an_end_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """Where it stands, at the top too. It was followed without end."""
    made = ENDLESS[name]()
    for state in (made, {"w": torch.ones(1), "x": {"y": made}}):
        calls: list[Callable[[], Any]] = [
            partial(torchlift.save, state, tmp_path / "x.pt"),
            partial(torchlift.save, state, tmp_path / "dcp", format="dcp"),
        ]
        if not isinstance(state, Mock):  # which looks like a file object
            calls.append(partial(torchlift.digest, state))
        for call in calls:
            with pytest.raises(PlacementError) as caught:
                call()
            assert state is made or str(caught.value.entry).startswith("x.y")
    with torchlift.Keeper(tmp_path / "run", background=False) as keeper:
        with pytest.raises(PlacementError) as caught:
            keeper.save(1, x=made, model=nn.Linear(1, 1))
        assert str(caught.value.entry).startswith("x")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_module_whose_state_dict_is_not_a_dict_is_refused(tmp_path: Path) -> None:
    """By its class: it does not have names."""

    class Own(nn.Linear):
        def state_dict(self, *_: Any, **__: Any) -> Any:
            return self

    for call in (
        lambda: torchlift.save(Own(1, 1), tmp_path / "x.pt"),
        lambda: torchlift.digest(Own(1, 1)),
        lambda: get_model_state_dict(Own(1, 1)),
    ):
        with pytest.raises(StateDictMismatch) as caught:
            call()
        assert caught.value.entry == "Own"

"""The modules' own loading code: hooks, overrides, extra state, lazy modules; what plan says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from same_model import all_tensors, scrambled
from small_models import saved, unchanged
from torch import nn
from torch.nn.utils import weight_norm as old_weight_norm

import torchlift

live_or_not = pytest.mark.parametrize("live", [False, True], ids=["skeleton", "live"])


def target(factory: Callable[[], nn.Module], live: bool) -> Any:
    """A model to load into."""
    return factory() if live else torchlift.skeleton(factory)


# -- _load_from_state_dict --------------------------------------------------------------------


class Configured(nn.Linear):
    """Keeps a dict of tensors and plain values in its state dict."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.cfg: Any = {"scale": torch.ones(2), "sizes": [1, 2], "name": "one"}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "cfg"] = self.cfg

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.cfg = state_dict.pop(prefix + "cfg")
        super()._load_from_state_dict(state_dict, prefix, *rest)


@live_or_not
@pytest.mark.parametrize("prefix", ["", "0."], ids=["root", "nested"])
def test_code_that_asks_for_a_container_is_an_error_with_a_way_out(prefix, live, tmp_path):
    """A file's containers are taken apart: the error names file and entry, and torch loads it."""

    def build() -> nn.Module:
        return nn.Sequential(Configured()) if prefix else Configured()

    wanted = build()
    path = saved(wanted.state_dict(), tmp_path)
    model = target(build, live)
    refused = pytest.raises(torchlift.PlacementError, match="asks for a container")
    with unchanged(model), refused as caught:
        torchlift.load(model, path)
    assert (caught.value.file, caught.value.entry) == (str(path), prefix + "cfg")
    assert "model.load_state_dict(torch.load(path))" in str(caught.value)
    (plain := build()).load_state_dict(torch.load(path))
    (inner,) = [module for module in plain.modules() if isinstance(module, Configured)]
    assert inner.cfg["name"] == "one"
    assert all(torch.equal(one, all_tensors(wanted)[n]) for n, one in all_tensors(plain).items())
    torch.save({prefix + "weight": torch.ones(2, 2)}, path)
    with pytest.raises(KeyError, match=f"^'{prefix}cfg'$"):  # a file that has no such values
        torchlift.load(target(build, live), path)


def test_an_error_that_an_override_reports_refuses_the_load(tmp_path: Path) -> None:
    """error_msgs of torch become a MismatchError that names the module."""

    class Refusing(nn.Linear):
        def _load_from_state_dict(self, *args: Any) -> None:
            args[-1].append("made for another tokenizer")

    path = saved(nn.Sequential(nn.Linear(2, 2)).state_dict(), tmp_path)
    model = nn.Sequential(Refusing(2, 2))
    says = r"'0': .*made for another tokenizer"
    with unchanged(model), pytest.raises(torchlift.MismatchError, match=says):
        torchlift.load(model, path)


# -- modules of torch that load in their own way ----------------------------------------------


def lazy() -> nn.Module:
    """Modules that learn their shape from their first input."""
    return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 2))


@live_or_not
def test_lazy_modules_without_values_stay_lazy(live: bool, tmp_path: Path) -> None:
    """strict=False leaves them to their first input, on the CPU."""
    model = target(lazy, live)
    path = saved({"2.bias": torch.ones(2)}, tmp_path)
    report = torchlift.load(model, path, strict=False, allow_missing=["*"])
    assert "0.weight" in report.missing_keys
    assert model(torch.randn(5, 3)).shape == (5, 2)
    assert model[0].weight.shape == (4, 3)
    assert model[0].weight.device.type == "cpu"
    assert (model[2].bias == 1).all()


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@live_or_not
def test_the_old_weight_norm_computes_its_weight_from_what_was_loaded(live, tmp_path):
    """The weight that it keeps as a plain attribute follows at the next forward pass."""
    wanted = scrambled(old_weight_norm(nn.Linear(3, 4)))
    model = target(lambda: old_weight_norm(nn.Linear(3, 4)), live)
    torchlift.load(model, saved(wanted.state_dict(), tmp_path))
    inputs = torch.randn(2, 3)
    assert torch.equal(model(inputs), wanted(inputs))
    model(inputs).sum().backward()
    assert model.weight_v.grad is not None

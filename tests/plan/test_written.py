"""Loading code that writes where torch does not count it: the values must be those it made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import saved
from torch import nn

import torchlift
from torchlift.errors import PlacementError

CHANGES: dict[str, Callable[[dict[str, Any], str], None]] = {
    "in place": lambda state, key: state[key].mul_(2),
    "through .data": lambda state, key: state[key].data.mul_(2),
    "through NumPy": lambda state, key: state[key].numpy().__imul__(2),
    "of an alias": lambda state, key: state["alias"].data.mul_(2),
    "another tensor": lambda state, key: state.update({key: state[key] * 2}),
    "a conjugate": lambda state, key: state.update({key: state[key].conj()}),
    "nothing": lambda state, key: None,
}


class Hooked(nn.Module):
    """Two parameters, and a hook that changes what is loaded."""

    def __init__(self, change: Callable[[dict[str, Any], str], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5000, dtype=torch.complex64))
        self.alias = nn.Parameter(torch.zeros(5000, dtype=torch.complex64))
        self.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: change(state, prefix + "weight")
        )


@pytest.mark.parametrize("source", ["mmap", "read"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_hook_writes_is_what_is_loaded(tmp_path, change, source):
    """However it writes, also where nothing counts it. The file stays what it is."""
    values = torch.full((5000,), 1 + 1j)
    path = saved({"weight": values, "alias": values}, tmp_path)
    content = path.read_bytes()
    expected, loaded = Hooked(CHANGES[change]), Hooked(CHANGES[change])
    expected.load_state_dict(torch.load(path))
    report = torchlift.load(loaded, path, source=source)
    assert torch.equal(loaded.weight, expected.weight)
    assert torch.equal(loaded.alias, expected.alias)
    assert path.read_bytes() == content
    if change == "nothing":
        assert report.loaded["weight"].entry in ("weight", "alias")


def data_copy(module: Any, value: torch.Tensor) -> None:
    module.weight.data.copy_(value)


def copy(module: Any, value: torch.Tensor) -> None:
    with torch.no_grad():
        module.weight.copy_(value)


def data_set(module: Any, value: torch.Tensor) -> None:
    module.weight.data = value


def numpy_copy(module: Any, value: torch.Tensor) -> None:
    module.weight.detach().numpy()[:] = value.numpy()


class Own(nn.Module):
    """A module that loads twice the values by itself."""

    def __init__(self, how: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 7.0))
        self.how = how

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self.how(self, state.pop(prefix + "weight") * 2)


@pytest.mark.parametrize("how", [data_copy, copy, data_set, numpy_copy])
def test_what_an_override_writes_is_what_is_loaded(tmp_path, how):
    """Once and again: the second time, it writes what is there already."""
    path = saved({"weight": torch.arange(3.0)}, tmp_path)
    model = Own(how)
    for _ in range(2):
        torchlift.load(model, path)
        assert model.weight.tolist() == [0, 2, 4]
    assert torchlift.plan(model, path).missing_keys == []
    assert model.weight.tolist() == [0, 2, 4]


@pytest.mark.parametrize("how", [data_copy, copy])
def test_an_override_that_writes_to_meta_is_refused(tmp_path, how):
    """Its values would be lost; the constructor's would be loaded in their place."""
    path = saved({"weight": torch.arange(3.0)}, tmp_path)
    model = torchlift.skeleton(Own, how)
    with pytest.raises(
        PlacementError, match=r"'weight': its module's own .*torchlift\.materialize\(model"
    ):
        torchlift.load(model, path)
    assert model.weight.is_meta
    torchlift.materialize(model, names="weight")
    torchlift.load(model, path)
    assert model.weight.tolist() == [0, 2, 4]


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="the kernel does not tell")
def test_what_a_hook_only_reads_stays_mapped(tmp_path):
    """It costs no memory that the module has loading code of its own."""
    path = saved({"weight": torch.ones(5000, dtype=torch.complex64)}, tmp_path)
    model = Hooked(lambda state, key: state[key].sum())
    del model.alias
    report = torchlift.load(model.to("meta"), path)
    assert (report.loaded["weight"].route, report.bytes_read) == ("view", 0)
    assert model.weight.sum() == 5000

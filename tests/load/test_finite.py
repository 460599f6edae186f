"""`load(check="finite")`: values that are NaN or infinite are refused before anything changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from in_code import in_code
from small_models import unchanged
from torch import nn
from zoo import Bag

import torchlift
from torchlift.errors import IntegrityError

NAN, INF = float("nan"), float("inf")


def broken() -> dict[str, torch.Tensor]:
    """A state for two layers with three tensors that are not finite."""
    torch.manual_seed(0)
    state = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).state_dict()
    state["0.weight"][1, 2] = NAN
    state["0.weight"][0, 1] = -INF
    state["1.weight"][0] = INF
    state["1.running_var"].fill_(NAN)
    return state


def net(where: str) -> nn.Module:
    """The model, live or on meta."""
    torch.manual_seed(1)
    if where == "live":
        return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    return torchlift.skeleton(lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))


@pytest.mark.parametrize("where", ["live", "meta"])
@pytest.mark.parametrize("given_as", ["file", "memory", "safetensors", "dcp"])
@pytest.mark.parametrize("mode", ["auto", "assign", "swap"])
def test_all_tensors_are_listed_and_nothing_changes(tmp_path, where, given_as, mode):
    """One error has each name with its numbers; the model is what it was."""
    source: object = broken()
    if given_as != "memory":
        name = {"file": "m.pt", "safetensors": "m.safetensors", "dcp": "m"}[given_as]
        torchlift.save(broken(), tmp_path / name, format="dcp" if given_as == "dcp" else None)
        source = tmp_path / name
    model = net(where)
    refused = pytest.raises(IntegrityError, match="3 tensors to load with NaN or infinite")
    with unchanged(model), refused as got:
        torchlift.load(model, source, mode=mode, check="finite")
    assert got.value.not_finite == {"0.weight": (1, 1), "1.weight": (0, 1), "1.running_var": (2, 0)}
    assert "\n  0.weight: 1 NaN, 1 infinite\n  1.weight: 0 NaN, 1 infinite\n" in str(got.value)
    torchlift.load(model, source, mode=mode)
    assert model.state_dict()["0.weight"].isnan().any()


@pytest.mark.parametrize("mode", ["copy", "assign"])
@pytest.mark.parametrize(
    ("values", "dtype", "bad"),
    [
        (torch.tensor([10**6, 1]), torch.float16, (0, 1)),
        (torch.tensor([7e4, 1.0]), torch.float16, (0, 1)),
        (torch.tensor([7e4, 1.0]), torch.bfloat16, None),
        (torch.tensor([10**6, 1], dtype=torch.int32), torch.float8_e5m2, (0, 1)),
        (torch.tensor([1e300 + 0j, -1e300j], dtype=torch.complex128), torch.complex64, (0, 2)),
        (torch.tensor([1e300, 1.0], dtype=torch.float64), torch.complex64, (0, 1)),
        (torch.tensor([NAN, 1]).to(torch.float8_e4m3fn), torch.float8_e4m3fn, (1, 0)),
        (torch.tensor([[NAN, 1], [-INF, INF]]).bfloat16().T[0], torch.bfloat16, (1, 1)),
        (torch.tensor([1, complex(1, INF)]), torch.complex64, (0, 1)),
        (torch.tensor([10**6, 1]), torch.int32, None),
        (torch.tensor([NAN, INF]), torch.bool, None),
    ],
)
def test_what_counts_is_what_a_cast_makes_of_any_dtype(tmp_path, mode, values, dtype, bad):
    """Integers and complex numbers become infinite, too; of a file and of memory, in any mode."""
    torchlift.save({"w": values}, tmp_path / "m.pt")
    for state in ({"w": values}, tmp_path / "m.pt"):
        model = Bag({"w": torch.zeros(2, dtype=dtype)})
        if bad is None:
            torchlift.load(model, state, mode=mode, check="finite")
            continue
        with pytest.raises(IntegrityError) as caught:
            torchlift.load(model, state, mode=mode, check="finite")
        assert caught.value.not_finite == {"w": bad}
        assert not model.w.any()


def test_the_result_of_a_transform_is_looked_at(tmp_path: Path) -> None:
    """A transform may mend what the file has, or break it."""
    path = tmp_path / "m.pt"
    torch.save(broken(), path)
    torchlift.load(net("meta"), path, transform=lambda _, t: t.nan_to_num(0, 1, 1), check="finite")
    torch.save(net("live").state_dict(), path)
    with pytest.raises(IntegrityError, match="6 tensors"):
        torchlift.load(net("meta"), path, transform=broken_by, check="finite")


def broken_by(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Divide by nothing."""
    return tensor / 0 if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("check", ["nan", "Finite", True, False, 1, lambda key, tensor: None])
def test_another_check_says_what_there_is(check: object) -> None:
    """A word that means nothing would look like one that finds nothing."""
    with pytest.raises(ValueError, match='expected "finite" or None'):
        torchlift.load(nn.Linear(1, 1), {}, check=check)


def test_mapped_weights_stay_mapped(tmp_path: Path) -> None:
    """They are looked at where they are: 128 MiB of them take a few of memory."""
    path = tmp_path / "m.safetensors"
    torchlift.save({"weight": torch.ones(8192, 4096)}, path)
    setup = "import torch, torchlift; from torch import nn\n"
    setup += "model = torchlift.skeleton(nn.Linear, 4096, 8192, bias=False)"
    code = "result = torchlift.load(model, args[0], check='finite').source"
    child = in_code(code, str(path), setup=setup)
    assert child.value == {"weight": "mmap"}
    assert child.memory.added_anonymous < 48 << 20

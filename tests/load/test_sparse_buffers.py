"""Sparse and quantised buffers of live models, also of two layers: their values and their ties."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zoo import same

import torchlift
from torchlift.distributed import get_model_state_dict, set_model_state_dict
from torchlift.errors import PlacementError

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse", "ignore:torch.quantize_per", "ignore:TypedStorage"
)

KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": torch.Tensor.to_sparse,
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
    "bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
    "quantised": lambda dense: torch.quantize_per_tensor(dense, 1.0, 0, torch.qint8),
    "by channel": lambda dense: torch.quantize_per_channel(
        dense, torch.ones(4), torch.zeros(4, dtype=torch.int64), 0, torch.qint8
    ),
}


class Layer(nn.Module):
    """A buffer, and perhaps a hook, which gets to see what is loaded."""

    def __init__(self, mask: torch.Tensor, hooked: bool = False) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        if hooked:
            self.register_load_state_dict_pre_hook(lambda *_: None)


class Net(nn.Module):
    """Two layers with a mask, perhaps the same one."""

    def __init__(self, kind: str, value: float, tied: bool) -> None:
        super().__init__()
        made = [KINDS[kind](torch.eye(4) * value) for _ in range(2)]
        self.a = Layer(made[0])
        self.b = Layer(made[0 if tied else 1])


def dense_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dequantize() if tensor.is_quantized else tensor.to_dense()


def shown(model: Any) -> tuple[Any, ...]:
    """Return the values of both masks, and whether they are one tensor."""
    masks = model.a.mask, model.b.mask
    return *(dense_of(each).tolist() for each in masks), masks[0] is masks[1]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_live_buffer_gets_the_values_and_keeps_its_tie(tmp_path, kind, tied):
    """From a file and from memory. torch sets ``.data`` of a compressed tensor without effect."""
    source = Net(kind, 3.0, tied)
    state, expected = source.state_dict(), shown(source)
    torch.save(state, tmp_path / "x.pt")
    given: list[Any] = [state, tmp_path / "x.pt", torchlift.open(tmp_path / "x.pt").state_dict()]
    for one in given:
        for mode in ("auto", "assign", "copy", "swap"):
            model = Net(kind, 1.0, tied)
            torchlift.load(model, one, mode=mode)  # type: ignore[arg-type]
            assert shown(model) == expected
    model = Net(kind, 1.0, tied)
    set_model_state_dict(model, get_model_state_dict(source))
    assert shown(model) == expected
    assert shown(source) == expected


@pytest.mark.parametrize("hooked", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_dense_buffer_on_meta_becomes_what_the_checkpoint_has(tmp_path, kind, hooked):
    """Mapped or read, from a file and from memory; loading code of the model sees it as it is."""
    value = KINDS[kind](torch.eye(4) * 3)
    torch.save({"mask": value}, tmp_path / "x.pt")
    for given in (tmp_path / "x.pt", {"mask": value}):
        for source in ("auto", "read"):
            model = torchlift.skeleton(Layer, torch.zeros(4, 4), hooked)
            torchlift.plan(model, given, source=source)
            torchlift.load(model, given, source=source)
            assert same(model.mask, value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_live_dense_buffer_takes_what_a_transform_makes_dense(tmp_path: Path, kind: str) -> None:
    """The transform gets the tensor as it is. The error without it says so, and changes nothing."""
    value, seen = KINDS[kind](torch.eye(4) * 3), []
    torch.save({"mask": value}, tmp_path / "x.pt")

    def make_dense(key: str, tensor: torch.Tensor) -> torch.Tensor:
        seen.append((key, tensor.layout, tensor.dtype))
        return dense_of(tensor)

    live, blank = Layer(torch.zeros(4, 4)), torchlift.skeleton(Layer, torch.zeros(4, 4))
    for call in (torchlift.plan, torchlift.load):
        with pytest.raises(PlacementError, match=r"'mask': the value .* transform=lambda"):
            call(live, tmp_path / "x.pt")
    assert not live.mask.any()
    for model in (live, blank):
        torchlift.load(model, tmp_path / "x.pt", transform=make_dense)
        assert torch.equal(model.mask, torch.eye(4) * 3)
    assert seen == [("mask", value.layout, value.dtype)] * 2

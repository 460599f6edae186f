"""Views of one memory: they share it after a load, wherever they go and whatever they become."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_models import saved, tensors_of
from torch import nn
from zoo import same

import torchlift
from torchlift import remap


class Views(nn.Module):
    """Buffers that look into one memory: a matrix, a row, the transposed rest."""

    def __init__(self) -> None:
        super().__init__()
        full = torch.arange(12.0).view(3, 4)
        self.register_buffer("full", full)
        self.register_buffer("row", full[1])
        self.register_buffer("rest", full[1:].t())
        self.other = nn.Parameter(torch.ones(2))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """`Views` with other values, as torch.save stores it: one storage for three keys."""
    model = Views()
    model.full += 100
    return saved(model.state_dict(), tmp_path)


def memories(model: nn.Module) -> int:
    """Number of memories behind the three buffers."""
    return len({model.get_buffer(n).untyped_storage().data_ptr() for n in ("full", "row", "rest")})


@pytest.mark.parametrize("kind", ["live", "meta"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"source": "read"},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float64, "source": "mmap"},
        {"mode": "assign"},
        {"mode": "assign", "dtype": torch.float16},
        {"mode": "copy"},
        {"device": remap.by_key({"": "disk"})},
    ],
    ids=str,
)
def test_views_have_their_values_after_every_kind_of_load(path, kind, options) -> None:
    """Copied in place they still share their memory; as new tensors each has its own."""
    model = Views() if kind == "live" else torchlift.skeleton(Views)
    report = torchlift.load(model, path, **options)
    in_place = kind == "live" and {report.mode[n] for n in ("full", "row", "rest")} == {"copy"}
    assert memories(model) == (1 if in_place else 3)
    expected = (torch.arange(12.0).view(3, 4) + 100).to(model.full.dtype)
    assert same(model.full, expected)
    assert same(model.rest, expected[1:].t())
    assert same(model.row, expected[1])


def test_a_transform_gets_and_gives_each_view_by_itself(path) -> None:
    """What it returns has no memory in common with anything."""
    model = torchlift.skeleton(Views)
    torchlift.load(model, path, transform=lambda key, value: value * 2)
    assert tensors_of(model)["row"].tolist() == [208, 210, 212, 214]
    assert memories(model) == 3

"""`remap` with an accelerator: real tags, maps that cross devices, weights that come for a call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_models import Mixed, randomised, saved, tensors_of
from torch import nn
from zoo import same

import torchlift
from torchlift import remap

pytestmark = pytest.mark.gpu


@pytest.fixture
def path(tmp_path: Path, accelerator: torch.device) -> Path:
    """A checkpoint of `Mixed` that was saved from the accelerator."""
    state = {key: value.to(accelerator) for key, value in randomised(Mixed()).items()}
    return saved(state, tmp_path)


def test_a_real_tag_is_read_and_not_obeyed(path, accelerator) -> None:
    """torch.load puts it back; a load without an argument goes to the CPU."""
    with torchlift.open(path) as ckpt:
        assert {entry.location for entry in ckpt.entries.values()} == {str(accelerator)}
    assert torch.load(path)["scale"].device == accelerator
    model = torchlift.skeleton(Mixed)
    torchlift.load(model, path)
    assert all(same(tensors_of(model)[k], v) for k, v in randomised(Mixed()).items())


@pytest.mark.parametrize("spelling", ["type", "whole", "number", "device"])
def test_every_spelling_means_the_current_device(path, accelerator, spelling) -> None:
    """As torch.load's map_location does."""
    device = {
        "type": accelerator.type, "whole": str(accelerator), "number": accelerator.index,
        "device": accelerator,
    }[spelling]  # fmt: skip
    model = torchlift.skeleton(Mixed)
    rules = (device, remap.by_key({"": device}), remap.by_location({accelerator.type: device}))
    for rule in rules:
        torchlift.load(model, path, device=rule)
        for key, value in torch.load(path, map_location=accelerator).items():
            found = tensors_of(model)[key]
            assert found.device == accelerator
            assert same(found.cpu(), value.cpu())


def test_an_index_that_does_not_exist_is_refused_before_anything_happens(path, accelerator) -> None:
    """The error names the entry of the map."""
    model = torchlift.skeleton(Mixed)
    device = f"{accelerator.type}:{torch.accelerator.device_count()}"
    with pytest.raises(torchlift.PlacementError, match=f"'inner': .*{device}"):
        torchlift.load(model, path, device=remap.by_key({"inner": device}))
    assert model.scale.is_meta


class Shared(nn.Module):
    """Two buffers over one memory."""

    def __init__(self) -> None:
        super().__init__()
        full = torch.arange(12.0).view(3, 4)
        self.register_buffer("full", full)
        self.register_buffer("row", full[1])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_views_get_a_memory_each_on_the_accelerator(tmp_path, accelerator, dtype) -> None:
    """With and without a cast, as on the host: a tie is one tensor with two names."""
    path = saved(Shared().state_dict(), tmp_path)
    model = torchlift.skeleton(Shared)
    torchlift.load(model, path, device=accelerator, dtype=dtype)
    assert model.full.device == model.row.device == accelerator
    model.full[1] = 7
    assert model.row.tolist() == [4, 5, 6, 7]


class Block(nn.Module):
    """A residual around two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc(self.norm(x))


def blocks(count: int = 4, width: int = 1024) -> nn.Module:
    """Four blocks of 4 MiB."""
    return nn.Sequential(*(Block(width) for _ in range(count)))


@pytest.mark.parametrize("rest", ["cpu", "disk"])
def test_a_module_that_is_partly_elsewhere_runs_on_the_accelerator(tmp_path, accelerator, rest):
    """Within its budget: the weights that are elsewhere come for their call and go again."""
    accelerate = pytest.importorskip("accelerate")
    original = blocks().eval()
    path = saved(original.state_dict(), tmp_path)
    x = torch.randn(2, 1024)
    expected = original(x)
    model = torchlift.skeleton(blocks).eval()
    budget = sum(p.nbytes for p in original.parameters()) // 2
    device_map = remap.fit(model, {str(accelerator): budget, rest: None})
    assert set(device_map.values()) == {str(accelerator), rest}
    torchlift.load(model, path, device=device_map)
    _ = x.to(accelerator) @ x.to(accelerator).T  # libraries take workspaces of their own
    before = torch.accelerator.memory_allocated()
    devices = {name: "cpu" if at == "disk" else at for name, at in device_map.items()}
    accelerate.dispatch_model(model, devices, main_device=device_map.main)
    with torch.no_grad():
        found = model(x)
    assert found.device == x.device
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert any(parameter.is_meta for parameter in model.parameters())
    assert torch.accelerator.memory_allocated() <= before + (1 << 20)

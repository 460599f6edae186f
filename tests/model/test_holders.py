"""Loading a model that others follow: averages, scalers, compilers, parametrizations, replicas."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on
from small_models import saved
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torchlift
from torchlift import PlacementError, swap
from torchlift._model.holders import Hold


def network() -> nn.Sequential:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture
def wanted(tmp_path):
    """A model with the weights of the file, and the file."""
    model = network()
    return model, saved(model.state_dict(), tmp_path)


# Importing the compiler of torch 2.13 warns about torch.jit, which it uses itself.
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_a_compiled_model_computes_with_the_loaded_weights(wanted, backend, dtype):
    """The one from before the load; a changed dtype is compiled again."""
    if backend == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler on this machine")
    if backend == "inductor" and " " in torch.__path__[0]:
        pytest.skip("torch's compiler does not quote the path of torch, which has a space here")
    reference, path = wanted
    model = network()
    compiled = torch.compile(model, backend=backend)
    inputs = torch.linspace(-1, 1, 12).reshape(3, 4)
    compiled(inputs)
    torchlift.load(model, path, dtype=dtype)
    inputs = inputs.to(dtype or torch.float32)
    found, expected = compiled(inputs), reference.to(dtype or torch.float32)(inputs)
    assert torch.allclose(found, expected, atol=1e-6)
    torch._dynamo.reset()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """A few steps on inputs that differ between the ranks."""
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.full((2, 4), float(dist.get_rank() + step))
        model(inputs).square().sum().backward()
        optimizer.step()


def agree(model: nn.Module) -> bool:
    """Whether all ranks have the same parameters."""
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return all(torch.equal(mine, other) for other in everyones)


@on(1, 2)
def test_replicas_stay_replicas(folder: Path) -> None:
    """Under DistributedDataParallel: load with every mode under the wrapper, and train on."""
    torch.manual_seed(5)
    path = folder / "model.pt"
    if dist.get_rank() == 0:
        saved(network().state_dict(), folder)
    dist.barrier()
    model = network()
    reference = copy.deepcopy(model)
    reference.load_state_dict(torch.load(path))
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=0.01)
    train(replica, optimizer, 2)
    blockers = swap.preflight(model)
    assert {item.key for item in blockers} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for item in blockers:
        assert item.kinds == {Hold.REDUCER}, item
    with pytest.raises(PlacementError, match="hooks of a DistributedDataParallel module"):
        torchlift.load(model, path, mode="swap")
    with pytest.raises(PlacementError, match="Load before you wrap the module"):
        torchlift.load(model, path, dtype=torch.float64)
    # Something else that holds a parameter does not hide the hooks.
    view = model[2].bias.view(1, 2)
    assert swap.preflight(model)[3].kinds == {Hold.VIEW, Hold.REDUCER}
    last = {"2.bias": "2.bias"}.get
    with pytest.raises(PlacementError, match="Load before you wrap the module"):
        torchlift.load(model, path, rename=last, dtype=torch.float64, strict=False)
    assert view._base is model[2].bias
    del view
    report = torchlift.load(replica, path, rename=lambda key: "module." + key)
    assert set(report.mode.values()) == {"copy"}
    other = DistributedDataParallel(reference)
    train(replica, optimizer, 5)
    train(other, torch.optim.SGD(other.parameters(), lr=0.01), 5)
    for mine, wanted in zip(replica.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, wanted)
    assert agree(replica)

"""Loading under what holds on to parameters: optimizers, averages, scalers, compiled graphs."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from small_models import Two, randomised, saved
from torch import nn

import torchlift

OPTIMIZERS = {
    "SGD": {"lr": 0.1},
    "SGD momentum": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True},
    "Adam": {"amsgrad": True, "foreach": False}, "AdamW fused": {"fused": True},
    "LBFGS": {"lr": 0.1, "max_iter": 3}, "SparseAdam": {},
}  # fmt: skip


class Net(nn.Module):
    """A small network; with a sparse embedding alone, where asked."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8, sparse=kind == "SparseAdam")
        self.head = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        if kind == "SparseAdam":
            self.head.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean square of what comes out."""
        return (self.head(self.embed(tokens)) - 1).square().mean()


def optimizer_for(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer, with two groups of parameters where it takes more than one."""
    kind = name.split()[0]
    options = OPTIMIZERS[name]
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[:1]}, {"params": trained[1:], "lr": 0.01}]
    one = kind in ("LBFGS", "SparseAdam")
    return getattr(torch.optim, kind)(trained if one else groups, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """The losses of some steps over the same tokens."""
    tokens = torch.arange(12).reshape(3, 4)
    losses = []

    def closure():
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        return loss

    for _ in range(steps):
        losses.append(optimizer.step(closure).item())
    return losses


@pytest.mark.parametrize("mode", ["auto", "copy", "swap"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_from_a_model_built_with_those_weights(tmp_path, name, mode):
    """Ten steps, equal to the last bit: the optimizer sees the new values and keeps its state."""
    torch.manual_seed(0)
    kind = name.split()[0]
    model, fresh = Net(kind), Net(kind)
    path = saved(Net(kind).state_dict(), tmp_path)
    optimizer = optimizer_for(name, model)
    train(model, optimizer, 3)
    moments = copy.deepcopy(optimizer.state_dict())
    held = list(model.parameters())
    torchlift.load(model, path, mode=mode)
    assert all(now is then for now, then in zip(model.parameters(), held, strict=True))
    fresh.load_state_dict(torch.load(path))
    other = optimizer_for(name, fresh)
    other.load_state_dict(moments)
    assert train(model, optimizer, 10) == train(fresh, other, 10)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW fused"])
def test_assign_makes_a_ghost_of_the_optimizer(tmp_path, name):
    """It promises new objects: the loss stays what it is, step after step."""
    model = Net("")
    optimizer = optimizer_for(name, model)
    torchlift.load(model, saved(Net("").state_dict(), tmp_path), mode="assign")
    assert len(set(train(model, optimizer, 10))) == 1


@pytest.mark.parametrize("mode", ["auto", "swap"])
def test_another_dtype_under_an_optimizer(tmp_path, mode):
    """An in-place copy could not do it; the curve is that of a fresh model of that dtype."""
    model, fresh = Net(""), Net("").double()
    path = saved(Net("").state_dict(), tmp_path)
    optimizer = optimizer_for("SGD", model)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    report = torchlift.load(model, path, mode=mode, dtype=torch.float64)
    assert {item.note for item in report.loaded.values()} == {None}
    fresh.load_state_dict(torch.load(path))
    assert train(model, optimizer, 10) == train(fresh, optimizer_for("SGD", fresh), 10)


def test_hooks_attributes_and_gradients_stay(tmp_path):
    """A gradient of another dtype cannot, and the report says so."""
    model = Two()
    seen = []
    model.a.register_hook(lambda grad: seen.append("tensor"))
    model.a.register_post_accumulate_grad_hook(lambda tensor: seen.append("accumulated"))
    model.a.tag = "mine"
    path = saved(randomised(model), tmp_path)
    for mode, dtype in [("swap", None), ("auto", None), ("auto", torch.float64)]:
        (model.a + model.b).sum().backward()
        gradient = model.a.grad
        seen.clear()
        report = torchlift.load(model, path, mode=mode, dtype=dtype)
        kept = dtype is None
        assert (model.a.grad is gradient) == kept
        note = None if kept else "its .grad is dropped: it is float32 on cpu"
        assert report.loaded["a"].note == note
        model.a.sum().backward()
        assert seen == ["tensor", "accumulated"]
        assert model.a.tag == "mine"


def test_auto_finds_another_way_for_what_cannot_be_swapped(tmp_path):
    """Same dtype: copied in place, so that even a view sees it. Another one: through .data."""
    model = Two()
    view, shadow = model.a.view(-1), weakref.ref(model.b)
    path = saved({"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, tmp_path)
    report = torchlift.load(model, path)
    assert report.mode == {"a": "copy", "b": "copy"}
    assert view.eq(1).all()
    report = torchlift.load(model, path, dtype=torch.float64)
    assert report.mode == {"a": "swap", "b": "swap"}
    assert report.loaded["b"].note == (
        "content set through .data, not exchanged: a weak reference to it exists"
    )
    note = report.loaded["a"].note
    assert note.startswith("content set through .data, not exchanged: a view of it is alive")
    assert note.endswith("what shares its memory keeps the old values")
    assert shadow() is model.b
    assert "note: content set through .data" in str(report)


def test_a_graph_recorded_before_does_not_go_backward_with_new_values(tmp_path):
    """Its gradients would be wrong; torch says that something was modified."""
    path = saved(randomised(Two()), tmp_path)
    for dtype in (None, torch.float64):
        model = Two()
        loss = (model.a * model.a * model.b).sum()
        torchlift.load(model, path, dtype=dtype)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        (model.a * model.b).sum().backward()
        assert torch.equal(model.a.grad, model.b.detach())


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("mode", ["auto", "swap"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers(tmp_path, kind, mode, dtype):
    """They list their weights a second time, and have weak references to them."""
    model, fresh = kind(3, 4, num_layers=2), kind(3, 4, num_layers=2).to(dtype or torch.float32)
    path = saved(fresh.state_dict(), tmp_path)
    model(torch.ones(1, 3))[0].sum().backward()
    model.zero_grad()
    torchlift.load(model, path, mode=mode, dtype=dtype)
    inputs = torch.ones(1, 3, dtype=dtype)
    assert torch.equal(model(inputs)[0], fresh(inputs)[0])
    for listed, reference in zip(model._flat_weights, model._flat_weight_refs, strict=True):
        assert reference() is listed
    assert torch.equal(copy.deepcopy(model)(inputs)[0], fresh(inputs)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["auto", "swap"])
def test_another_device_under_an_optimizer(tmp_path, mode):
    """From the CPU to an accelerator, gradients dropped, and the same losses from then on."""
    device = torch.accelerator.current_accelerator()
    model, fresh = Net(""), Net("").to(device)
    path = saved(Net("").state_dict(), tmp_path)
    optimizer = optimizer_for("SGD", model)
    train(model, optimizer, 2)
    report = torchlift.load(model, path, mode=mode, device=device)
    assert {p.device.type for p in model.parameters()} == {device.type}
    assert all("its .grad is dropped" in item.note for item in report.loaded.values())
    fresh.load_state_dict(torch.load(path))
    tokens = torch.arange(12, device=device).reshape(3, 4)
    others = optimizer_for("SGD", fresh)
    for _ in range(10):
        losses = []
        for trained, stepped in [(model, optimizer), (fresh, others)]:
            stepped.zero_grad()
            loss = trained(tokens)
            loss.backward()
            stepped.step()
            losses.append(loss.item())
        assert losses[0] == losses[1]

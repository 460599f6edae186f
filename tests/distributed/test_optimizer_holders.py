"""Optimizers whose state is not in their own state dict: refused by name, with a way out."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on
from state_models import same, set_both, step, two_layers
from torch.nn.parallel import DistributedDataParallel

import torchlift
import torchlift.distributed as ours


class Both(torch.optim.Optimizer):
    """Steps two optimizers and has nothing of its own, as Muon beside AdamW is often written."""

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        self.muon, self.adamw = muon, adamw

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.muon.step()
        self.adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.muon.zero_grad()
        self.adamw.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}


class Torchs(Both):
    """The same, with the groups of both, a state that nobody fills, and torch's own state dict."""

    def __init__(self, muon: torch.optim.Optimizer, adamw: torch.optim.Optimizer) -> None:
        super().__init__(muon, adamw)
        self._optimizer_state_dict_pre_hooks = self._optimizer_state_dict_post_hooks = {}

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return [*self.muon.param_groups, *self.adamw.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        return defaultdict(dict)

    state_dict = torch.optim.Optimizer.state_dict


def pair(model: Any) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Muon([model[0].weight, model[1].weight], lr=0.1),
        torch.optim.AdamW([model[0].bias, model[1].bias], lr=0.1),
    ]


@pytest.mark.parametrize("kind", [Both, Torchs])
def test_an_optimizer_that_holds_others_is_refused_with_their_names(kind: Any) -> None:
    """Each of them is kept when it is passed in its place: that is the way out."""
    model = two_layers()
    holder = kind(*pair(model))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    holder.step()
    with pytest.raises(ours.StateDictMismatch) as caught:
        ours.get_optimizer_state_dict(model, holder)
    assert caught.value.entry == kind.__name__
    assert caught.value.found == "an optimizer that holds Muon, AdamW"
    assert caught.value.hint == "Pass the optimizers that it holds instead."
    held = [holder.muon, holder.adamw]
    saved = copy.deepcopy(ours.get_state_dict(model, held))
    other = two_layers(1)
    fresh = pair(other)
    set_both(other, fresh, saved)
    assert same([each.state_dict() for each in fresh], [each.state_dict() for each in held])
    before = copy.deepcopy([each.state_dict() for each in fresh])
    with pytest.raises(ours.StateDictMismatch, match="optimizers that it holds instead"):
        ours.set_optimizer_state_dict(other, kind(*fresh), saved[1] | {"state": {}})
    assert same([each.state_dict() for each in fresh], before)


class Lookahead(torch.optim.Optimizer):
    """Has a state beside that of the optimizer that it holds, under a key of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "slow": self.slow}

    def load_state_dict(self, state_dict: Any) -> None:
        self.slow = state_dict["slow"]
        self.inner.load_state_dict({k: state_dict[k] for k in ("state", "param_groups")})


class Outer(Lookahead):
    """Returns its own state only, and that of the other one is lost."""

    state_dict = torch.optim.Optimizer.state_dict


def test_what_an_optimizer_keeps_beside_its_parameters_is_not_dropped(tmp_path: Path) -> None:
    """It is refused by name; its own state dict goes into a file and back."""
    model = two_layers()
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    step(model, optimizer, 2)
    with pytest.raises(ours.StateDictMismatch, match="has more than the state") as caught:
        ours.get_optimizer_state_dict(model, optimizer)
    assert caught.value.found == "'slow'"
    torchlift.save(optimizer.state_dict(), tmp_path / "saved.pt")
    other = two_layers(1)
    loaded = Lookahead(torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
    with torchlift.open(tmp_path / "saved.pt") as ckpt:
        loaded.load_state_dict(ckpt.tree())
    assert same(loaded.state_dict(), optimizer.state_dict())
    lost = Outer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    ours.get_optimizer_state_dict(model, lost)  # nothing is lost yet
    step(model, lost)
    with pytest.raises(ours.StateDictMismatch, match="lacks state of an inner optimizer"):
        ours.get_optimizer_state_dict(model, lost)


@on(2)
def test_optimizers_whose_state_is_on_other_ranks_are_refused_with_a_way_out(folder: Path) -> None:
    """ZeroRedundancyOptimizer's state is on one rank after consolidating, and goes on from it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, which torch imports for it
        from torch.distributed.optim import ZeroRedundancyOptimizer
    torch.manual_seed(0)
    model = DistributedDataParallel(two_layers())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    step(model, optimizer, 2)
    path = folder / "zero.pt"
    for call in (
        partial(ours.get_optimizer_state_dict, model, optimizer),
        partial(torchlift.save, {"optim": optimizer}, path, process_group=dist.group.WORLD),
    ):
        with pytest.raises(torchlift.CheckpointError, match="state of some of the opt") as caught:
            call()
        assert "optimizer.consolidate_state_dict(to=0) on every rank" in str(caught.value)
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        torchlift.save(optimizer.state_dict(), path)
    dist.barrier()
    other = DistributedDataParallel(two_layers())
    other.load_state_dict(model.state_dict())
    loaded = ZeroRedundancyOptimizer(other.parameters(), torch.optim.Adam, lr=0.1)
    with torchlift.open(path) as ckpt:
        loaded.load_state_dict(ckpt.tree())
    for each, stepped in ((model, optimizer), (other, loaded)):
        step(each, stepped, 2)
    assert same(dict(other.state_dict()), dict(model.state_dict()))

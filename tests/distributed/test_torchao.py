"""torchao's tensor subclasses, as a model's weights and as an optimizer's state."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import cpu_mesh, on
from state_models import FLAT, FROM_0, WHOLE
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torchlift
import torchlift.distributed as ours
from torchlift._model.handlers import clone_of
from torchlift._system.containers import map_leaves
from torchlift.distributed import StateDictOptions

pytest.importorskip("torchao")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
    from torchao.optim.subclass_8bit import OptimState8bit
    from torchao.quantization import Int8Tensor, Int8WeightOnlyConfig, quantize_, to_nf4
    from torchao.quantization.quantize_.workflows import NF4Tensor

OPTIONS = [
    StateDictOptions(full_state_dict=full, cpu_offload=offload)
    for full in (False, True)
    for offload in (False, True)
]
X = torch.linspace(-1, 1, 384).view(3, 128)


def two(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128))


def quantised(seed: int, kind: type = Int8Tensor) -> nn.Sequential:
    model = two(seed)
    if kind is Int8Tensor:
        quantize_(model, Int8WeightOnlyConfig())
        return model
    for layer in model:
        layer.weight = nn.Parameter(to_nf4(layer.weight.detach()), requires_grad=False)
    return model


def codes(weight: torch.Tensor) -> torch.Tensor:
    """What the first of the tensors holds that a class keeps its values in."""
    return getattr(weight, weight.__tensor_flatten__()[0][0])  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [Int8Tensor, NF4Tensor])
@pytest.mark.parametrize("options", OPTIONS, ids=range(4))
def test_quantised_weights_go_from_model_to_model(options: StateDictOptions, kind: type) -> None:
    """Into live ones in place, onto meta as new ones, and into themselves."""
    source, target = quantised(1, kind), quantised(2, kind)
    expected = source(X)
    state = ours.get_model_state_dict(source, options=options)
    assert isinstance(state["0.weight"], kind)
    weight, memory = target[0].weight, codes(target[0].weight).data_ptr()
    assert ours.set_model_state_dict(target, state, options=options) == ([], [])
    assert torch.equal(target(X), expected)
    assert target[0].weight is weight
    assert codes(weight).data_ptr() == memory
    assert ours.set_model_state_dict(target, ours.get_model_state_dict(target)) == ([], [])
    with torch.device("meta"):
        blank = two(0)
    ours.set_model_state_dict(blank, state, options=options)
    assert isinstance(blank[0].weight, kind)
    assert torch.equal(blank(X), expected)
    codes(blank[0].weight).zero_()
    assert torch.equal(source(X), expected)


def test_nf4_quantises_what_is_loaded_into_it(tmp_path: Path) -> None:
    """From a state dict and a file, and on meta by a transform; asked for a dtype, it is lost."""
    plain, expected = two(1), quantised(1, NF4Tensor)(X)
    torch.save(plain.state_dict(), tmp_path / "x.pt")
    models = [quantised(2, NF4Tensor) for _ in range(2)]
    ours.set_model_state_dict(models[0], plain.state_dict())
    torchlift.load(models[1], tmp_path / "x.pt")
    with torch.device("meta"):
        models.append(two(0))

    def quantise(key: str, value: torch.Tensor) -> torch.Tensor:
        return to_nf4(value) if key.endswith("weight") else value

    torchlift.load(models[2], tmp_path / "x.pt", transform=quantise)
    for model in models:
        assert isinstance(model[0].weight, NF4Tensor)
        assert torch.equal(model(X), expected)
    live, before = two(3), two(3)(X)
    with pytest.raises(torchlift.PlacementError, match=r"'0\.weight'.*does not take such values"):
        torchlift.load(live, tmp_path / "x.pt", transform=quantise)
    assert torch.equal(live(X), before)


@pytest.mark.parametrize(
    ("turned", "kind"), [(False, Int8Tensor), (True, Int8Tensor), (False, NF4Tensor)]
)
def test_values_that_a_class_does_not_take_change_nothing(turned: bool, kind: type) -> None:
    """Found out on a copy: the class itself only says so when values are written."""
    source, target = quantised(1, kind), two(2)
    if turned:
        source, target = target, source
    expected = target(X)
    state = dict(reversed(source.state_dict().items()))
    says = rf"'0\.weight'.*does not take such values.*{kind.__name__}"
    with pytest.raises(ours.StateDictMismatch, match=says):
        ours.set_model_state_dict(target, state)
    assert torch.equal(target(X), expected)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    with torch.compiler.set_stance("force_eager"):  # its step is compiled, for half a minute
        for number in range(steps):
            for param in model.parameters():
                param.grad = torch.linspace(-1, 1 + number, param.numel()).view(param.shape)
            optimizer.step()


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of a class of torchao, or plain ones, have one type and one content."""
    if type(a) is not type(b) or not hasattr(a, "__tensor_flatten__"):
        return type(a) is type(b) and torch.equal(a, b)
    return all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in a.__tensor_flatten__()[0]
    )


def same_state(one: torch.optim.Optimizer, two: torch.optim.Optimizer) -> bool:
    pairs = zip(one.state.values(), two.state.values(), strict=True)
    return all(alike(a[key], b[key]) for a, b in pairs for key in a)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((AdamW8bit, options) for options in (*OPTIONS, FLAT)),
        (AdamW4bit, OPTIONS[0]),
        (AdamWFp8, OPTIONS[0]),
    ],
    ids=str,
)
def test_low_bit_moments_go_from_optimizer_to_optimizer(kind: Any, options: Any) -> None:
    """To one that has not stepped, to one that has, and back; the dict stays as it was."""
    model = nn.Linear(64, 64, bias=False)
    source = kind(model.parameters())
    train(model, source)
    assert type(source.state[model.weight]["exp_avg"]).__name__.startswith("OptimState")
    found = ours.get_optimizer_state_dict(model, source, options=options)
    # Not with deepcopy, for which these classes would have to know how to clone.
    saved = map_leaves(found, lambda leaf, _: clone_of(leaf) if torch.is_tensor(leaf) else leaf)
    for stepped in (0, 3):
        target = kind(model.parameters())
        train(model, target, stepped)
        ours.set_optimizer_state_dict(model, target, saved, options=options)
        assert same_state(target, source)
        train(model, target, 1)
        assert not same_state(target, source)
    ours.set_optimizer_state_dict(model, source, saved, options=options)
    kept = source.state[model.weight]["exp_avg"]
    ours.set_optimizer_state_dict(model, source, ours.get_optimizer_state_dict(model, source))
    assert source.state[model.weight]["exp_avg"] is kept


@pytest.mark.parametrize("kind", [AdamW8bit, AdamW4bit, AdamWFp8])
def test_a_keeper_resumes_low_bit_states_of_classes_that_are_named(
    kind: Any, tmp_path: Path
) -> None:
    """Their error names the class, and the argument that it names loads them bit by bit."""

    def run_of(seed: int) -> dict[str, Any]:
        model = two(seed)
        return {"model": model, "optimizer": kind(model.parameters(), lr=0.01)}

    def losses(run: dict[str, Any]) -> list[float]:
        found = []
        for _ in range(3):
            loss = run["model"](X).square().mean()
            loss.backward()
            with torch.compiler.set_stance("force_eager"):
                run["optimizer"].step()
            run["optimizer"].zero_grad()
            found.append(loss.item())
        return found

    run, again = run_of(0), run_of(1)
    losses(run)
    classes = {type(run["optimizer"].state[p]["exp_avg"]) for p in run["model"].parameters()}
    with torchlift.Keeper(tmp_path) as keeper:
        keeper.save(3, run)
        expected = losses(run)
        with pytest.raises(torchlift.UnsafeError, match="name it: allow_classes="):
            keeper.resume(again)
        allowed = [each for each in classes if each is not torch.Tensor]
        assert allowed
        assert keeper.resume(again, allow_classes=allowed) == 3
    assert losses(again) == expected


# ---- on ranks


class Moments(torch.optim.Optimizer):
    """Keeps 8-bit moments laid out as the parameters, as torchao's optimizers do."""

    def __init__(self, params, value: int) -> None:
        super().__init__(params, {"lr": 0.1})
        for param in self.param_groups[0]["params"]:
            local = OptimState8bit.zeros(param.to_local().shape, True, 256, "cpu")
            local.codes.copy_(torch.arange(local.codes.numel()).view_as(local.codes) % 100 + value)
            moment = DTensor.from_local(local, param.device_mesh, param.placements)
            self.state[param]["exp_avg"] = moment


def made(value: int):
    model = fully_shard(nn.Linear(64, 64, bias=False), mesh=cpu_mesh())
    return model, Moments(model.parameters(), value)


def moment_codes(optimizer) -> torch.Tensor:
    (state,) = optimizer.state.values()
    return state["exp_avg"].to_local().codes


@on(2)
def test_moments_go_from_mesh_to_mesh() -> None:
    for options in ({}, {"full_state_dict": True}):
        chosen = ours.StateDictOptions(**options)
        model, source = made(1)
        saved = ours.get_optimizer_state_dict(model, source, options=chosen)
        found = saved["state"]["weight"]["exp_avg"]
        assert isinstance(found, OptimState8bit if options else DTensor), type(found)
        other, target = made(7)
        assert not torch.equal(moment_codes(target), moment_codes(source))
        ours.set_optimizer_state_dict(other, target, saved, options=chosen)
        assert torch.equal(moment_codes(target), moment_codes(source))


@on(2)
def test_nf4_weights_are_read_and_set_as_shards_and_as_a_whole() -> None:
    whole = quantised(1, NF4Tensor)
    sharded, *others = (fully_shard(quantised(n, NF4Tensor), mesh=cpu_mesh()) for n in (1, 2, 3))
    local = sharded[0].weight.to_local()
    gathered = ours.get_model_state_dict(sharded, options=WHOLE)
    assert alike(gathered["0.weight"], whole[0].weight.detach())
    for state, options in ((ours.get_model_state_dict(sharded), None), (gathered, WHOLE)):
        target = others.pop()
        assert ours.set_model_state_dict(target, state, options=options) == ([], [])
        assert alike(target[0].weight.to_local(), local)


@on(2)
def test_rank_0_sends_plain_values_and_each_class_takes_or_refuses_them() -> None:
    """All values at once: a class may have no slices to write to."""
    plain = two(1).state_dict() if dist.get_rank() == 0 else {}
    target = quantised(2, NF4Tensor)
    ours.set_model_state_dict(target, plain, options=FROM_0)
    assert alike(target[0].weight.detach(), quantised(1, NF4Tensor)[0].weight.detach())
    target = quantised(2, Int8Tensor)
    with pytest.raises(ours.StateDictMismatch, match=r"'0\.weight'.*does not take such values"):
        ours.set_model_state_dict(target, plain, options=FROM_0)
    assert alike(target[0].weight.detach(), quantised(2, Int8Tensor)[0].weight.detach())


@on(2)
def test_rank_0_sends_no_wrapper() -> None:
    """Only its class could slice it for the others, and each would have to have all of it."""
    state = quantised(1, NF4Tensor).state_dict() if dist.get_rank() == 0 else {}
    target = quantised(2, NF4Tensor)
    with pytest.raises(
        ours.StateDictMismatch, match=r"'0\.weight'.*can send complete plain tensors only; fo"
    ):
        ours.set_model_state_dict(target, state, options=FROM_0)
    assert alike(target[0].weight.detach(), quantised(2, NF4Tensor)[0].weight.detach())

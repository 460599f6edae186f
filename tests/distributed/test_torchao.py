"""torchao's tensor subclasses, as a model's weights and as an optimizer's state."""

from __future__ import annotations

import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from ranks import run_workers
from state_models import FLAT
from torch import nn

import torchlift
import torchlift.distributed as ours
from torchlift._model.handlers import clone_of
from torchlift._system.containers import map_leaves
from torchlift.distributed import StateDictOptions

pytest.importorskip("torchao")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8
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
    return nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))


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


def test_a_copy_on_another_device_says_so() -> None:
    """Also of a class that keeps the device in what it flattens to."""
    for kind in (Int8Tensor, NF4Tensor):
        copy = clone_of(quantised(1, kind)[0].weight.detach(), torch.device("meta"))
        assert copy.device.type == codes(copy).device.type == "meta"


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


def same_state(one: torch.optim.Optimizer, two: torch.optim.Optimizer) -> bool:
    pairs = zip(one.state.values(), two.state.values(), strict=True)
    return all(
        type(a[key]) is type(b[key])
        and torch.equal(getattr(a[key], "codes", a[key]), getattr(b[key], "codes", b[key]))
        and torch.equal(getattr(a[key], "scale", a[key]), getattr(b[key], "scale", b[key]))
        for a, b in pairs
        for key in a
    )


@pytest.mark.parametrize("options", [*OPTIONS, FLAT], ids=range(5))
@pytest.mark.parametrize("kind", [AdamW8bit, AdamW4bit, AdamWFp8])
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


def test_a_refused_optimizer_gets_its_low_bit_moments_back() -> None:
    """They cannot be cloned, so what they hold is."""
    model = nn.Linear(64, 64, bias=False)
    optimizer, source = (AdamW8bit(model.parameters()) for _ in range(2))
    train(model, optimizer, 1)
    train(model, source, 3)
    kept = optimizer.state_dict()["state"][0]["exp_avg"].codes.clone()

    def refuse(optimizer: Any) -> None:
        for state in optimizer.state.values():
            state["exp_avg"].codes.zero_()
        raise ValueError("no")

    optimizer.register_load_state_dict_post_hook(refuse)
    with pytest.raises(ValueError, match="no"):
        ours.set_optimizer_state_dict(
            model, optimizer, ours.get_optimizer_state_dict(model, source)
        )
    assert torch.equal(optimizer.state[model.weight]["exp_avg"].codes, kept)


def test_a_file_loads_into_int8_weights_as_a_state_dict_does(tmp_path: Path) -> None:
    """The class has no word for plain tensors: both say so, and change nothing."""
    target = quantised(2)
    expected = target(X)
    torch.save(two(1).state_dict(), tmp_path / "x.pt")
    with pytest.raises(torchlift.PlacementError, match="does not take such values"):
        torchlift.load(target, tmp_path / "x.pt")
    assert torch.equal(target(X), expected)


@pytest.mark.distributed
def test_low_bit_moments_of_sharded_parameters_travel() -> None:
    """As shards, gathered, and as slices of whole ones."""
    with TemporaryDirectory() as out:
        found = run_workers(Path(__file__).with_name("workers_torchao.py"), 2, Path(out))
    assert found == dict.fromkeys(found, "")

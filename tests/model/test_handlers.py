"""A tensor subclass says how it is loaded, to torch and to torchlift alike."""

from __future__ import annotations

import pytest
import torch
from in_code import in_code
from int8_weights import Int8, load_int8, quantise_linear, registered
from small_models import Two, saved, unchanged
from torch import nn

import torchlift
from torchlift import PlacementError, swap


def network() -> nn.Sequential:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


@pytest.fixture
def path(tmp_path):
    """A full-precision checkpoint of `network`."""
    return saved(network().state_dict(), tmp_path)


def assert_quantised(model: nn.Module, path) -> None:
    """Weights are int8 with a scale, biases are the floats of the file."""
    state = torchlift.open(path).state_dict()
    for at in (0, 2):
        weight = model[at].weight
        wanted = Int8.quantised(state[f"{at}.weight"])
        assert type(weight) is Int8
        assert isinstance(weight, nn.Parameter)
        assert torch.equal(weight.values_int8, wanted.values_int8)
        assert torch.equal(weight.scale, wanted.scale)
        assert torch.equal(model[at].bias, state[f"{at}.bias"])


@pytest.mark.parametrize("mode", ["auto", "swap", "assign", "copy"])
@pytest.mark.parametrize("source", ["mmap", "read"])
@pytest.mark.parametrize("live", [False, True], ids=["meta", "live"])
def test_quantised_on_load(path, mode, source, live):
    """The weights of the model are int8, the file's are float; objects stay where that is asked."""
    model = network() if live else torchlift.skeleton(network)
    quantise_linear(model, "cpu" if live else "meta")
    held = model[0].weight
    with registered():
        report = torchlift.load(model, path, mode=mode, source=source)
    assert_quantised(model, path)
    assert (model[0].weight is held) == (mode != "assign")
    if mode == "auto":
        assert report.mode["0.weight"] == "swap"
        assert report.mode["0.bias"] == ("copy" if live else "swap")


def test_without_a_handler_a_wrapper_on_meta_is_not_filled_with_floats(path):
    """It would be a model that is no longer quantised, in silence."""
    model = quantise_linear(torchlift.skeleton(network))
    with pytest.raises(PlacementError) as caught:
        torchlift.load(model, path)
    assert str(caught.value) == (
        f"{path}: '0.weight': its class Int8 holds its values in tensors of its own and does not "
        "say how a plain tensor becomes one. Load into the plain model, and convert that. Or "
        "pass transform=..., or a handler that converts each tensor: "
        "swap.module_load(Int8, handler)."
    )


@pytest.mark.parametrize("mode", ["auto", "swap", "assign"])
@pytest.mark.parametrize("live", [False, True], ids=["meta", "live"])
def test_de_quantised_on_load(path, mode, live):
    """A transform makes the subclass of what the file has, the handler makes floats of it."""
    model = network() if live else torchlift.skeleton(network)
    wanted = quantise_linear(network(), None)
    with registered():
        torchlift.load(wanted, path)
        torchlift.load(
            model, path, mode=mode,
            transform=lambda key, t: Int8.quantised(t) if key.endswith("weight") else t,
        )  # fmt: skip
    assert type(model[0].weight) is nn.Parameter
    assert torch.equal(model[0].weight, wanted[0].weight.dequantised())


@pytest.mark.parametrize("mode", ["auto", "copy"])
def test_a_subclass_is_not_copied_over_a_live_plain_tensor(path, mode):
    """The plan says "copy", which would lose the class. The modes that the error names keep it."""

    def quantise(key, tensor):
        return Int8.quantised(tensor) if key.endswith("weight") else tensor

    with swap.module_load(Int8, lambda old, new, assign: new.detach()):
        model = network()
        with (
            unchanged(model),
            pytest.raises(PlacementError, match='mode="swap" or "assign"') as caught,
        ):
            torchlift.load(model, path, mode=mode, transform=quantise)
        assert (caught.value.entry, caught.value.found) == ("0.weight", "Int8")
        for way in ("swap", "assign"):
            model = network()
            report = torchlift.load(model, path, mode=way, transform=quantise)
            assert report.mode["0.weight"] == way
            assert_quantised(model, path)
        model = torchlift.skeleton(network)
        torchlift.load(model, path, mode=mode, transform=quantise)
        assert_quantised(model, path)


def test_torch_asks_the_same_handlers(path):
    """Plain into subclass, subclass into plain, subclass into subclass, and both assigned."""
    state = torchlift.open(path).state_dict()
    with registered(), swap.preserving_references():
        for assign in (False, True):
            int8, plain, again = quantise_linear(network(), None), network(), network()
            held = int8[0].weight
            quantise_linear(again, "cpu")
            int8.load_state_dict(state, assign=assign)
            assert int8[0].weight is held
            assert_quantised(int8, path)
            plain.load_state_dict(int8.state_dict(), assign=assign)
            assert type(plain[0].weight) is nn.Parameter
            assert torch.equal(plain[0].weight, int8[0].weight.dequantised())
            again.load_state_dict(int8.state_dict(), assign=assign)
            assert_quantised(again, path)


class Base(torch.Tensor):
    """A plain subclass."""


MISTAKES = {
    "int": (lambda d, s, assign: 3, "It returned int"),
    "destination": (lambda d, s, assign: d, "must return a new tensor with values"),
    "source": (lambda d, s, assign: s, "must return a new tensor with values"),
    "shape": (lambda d, s, assign: s[:1].clone(), "It returned Tensor of shape [1, 3] on cpu"),
    "meta": (lambda d, s, assign: s.to("meta"), "It returned Tensor of shape [2, 3] on meta"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_a_handler_is_explained(tmp_path, mistake):
    """By torch with its own words around it, by torchlift with the key, and nothing changes."""
    handler, words = MISTAKES[mistake]
    model = Two()
    model.b = nn.Parameter(torch.zeros(2, 3).as_subclass(Base))
    state = {"a": torch.ones(2, 3), "b": torch.ones(2, 3)}
    with swap.module_load(Base, handler):
        with unchanged(model), pytest.raises(PlacementError) as caught:
            torchlift.load(model, saved(state, tmp_path))
        with swap.preserving_references(), pytest.raises(RuntimeError) as torchs:
            model.load_state_dict(state)
    assert caught.value.entry == "b"
    assert words in str(caught.value)
    assert words in str(torchs.value)


def test_a_handler_is_refused_for_every_tensor_there_is():
    """Only a class that somebody wrote can have one."""
    for wrong in (torch.Tensor, nn.Parameter, int, "Int8", torch.ones(1)):
        with pytest.raises(TypeError, match=r"takes a subclass of torch\.Tensor"):
            swap.module_load(wrong, load_int8)
    with pytest.raises(TypeError, match=r"a callable, not .* and 3"):
        swap.module_load(Int8, 3)


def test_the_full_precision_model_is_never_in_memory(tmp_path):
    """256 MiB of floats become 64 MiB of int8, one tensor of 16 MiB at a time."""
    path = tmp_path / "wide.pt"
    torch.save({f"{i}.weight": torch.ones(2048, 2048) for i in range(16)}, path)
    code = """
with registered():
    torchlift.load(model, args[0], source=args[1])
result = sum(type(layer.weight).__name__ == "Int8" for layer in model)
"""
    setup = """
import torch, torchlift
from int8_weights import quantise_linear, registered
def build():
    return torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(16)])
model = quantise_linear(torchlift.skeleton(build))
torch.ones(2048, 2048).abs().amax(1)
"""
    for source in ("mmap", "read"):
        child = in_code(code, str(path), source, setup=setup)
        assert child.value == 16
        assert child.memory.added_anonymous / 2**20 < 64 + 16 + 64


# ---- which handler is called


class Derived(Base):
    """One that inherits from it."""


class Unrelated(torch.Tensor):
    """And one that does not."""


def loaded(destination, source, *, assign=False):
    """What torch's load_state_dict would exchange."""
    return destination.module_load(source, assign=assign)


def marking(name, calls, answer=True):
    """A handler that says it was called."""

    def handler(destination, source, assign):
        calls.append(name)
        return source.detach().clone() if answer else NotImplemented

    return handler


def test_the_handler_of_the_most_derived_class_is_called():
    """Of several for one class the newest; the destination's before the source's."""
    calls = []
    plain, base, derived = torch.ones(2), torch.ones(2).as_subclass(Base), torch.ones(2)
    derived, other = derived.as_subclass(Derived), torch.ones(2).as_subclass(Unrelated)
    with (
        swap.module_load(Base, marking("base", calls)),
        swap.module_load(Derived, marking("derived", calls)),
        swap.module_load(Derived, marking("newer", calls)),
        swap.module_load(Unrelated, marking("unrelated", calls)),
    ):
        for destination, source, wanted in [
            (derived, plain, ["newer"]),
            (plain, derived, ["newer"]),
            (base, plain, ["base"]),
            (base, derived, ["newer"]),
            (other, base, ["unrelated"]),
            (base, other, ["base"]),
            (plain, torch.zeros(2), []),
        ]:
            calls.clear()
            loaded(destination, source)
            assert calls == wanted
    calls.clear()
    loaded(derived, plain)
    assert calls == []
    with swap.module_load(Base, marking("never answers", calls, False)):
        assert loaded(derived, torch.ones(2)).eq(1).all()
    assert calls == ["never answers"]


def test_torch_is_as_it_was_when_the_last_handler_is_gone():
    """Also when one is removed twice, or out of order."""
    original = torch.Tensor.module_load
    one = swap.module_load(Base, load_int8)
    two = swap.module_load(Derived, load_int8)
    assert torch.Tensor.module_load is not original
    one.remove()
    one.remove()
    assert torch.Tensor.module_load is not original
    two.remove()
    assert torch.Tensor.module_load is original

"""`preserving_references` sets torch's flag for a while, and restores it whatever happens."""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
from small_models import Mixed, Two, randomised, state_of, tensors_of
from torch import nn

from torchlift import PlacementError, swap


def flag() -> bool:
    """The flag of torch."""
    return torch.__future__.get_swap_module_params_on_conversion()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_the_flag_is_what_it_was_after_any_exit(before, error):
    """Also where it was set already."""
    torch.__future__.set_swap_module_params_on_conversion(before)
    try:
        failing = pytest.raises(error) if error else nullcontext()
        with failing, swap.preserving_references():
            assert flag()
            if error:
                raise error
        assert flag() is before
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_blocks_of_threads_may_overlap():
    """The first to end leaves the flag to the others; the last one restores it."""
    entered, leave = threading.Event(), threading.Event()

    def other():
        with swap.preserving_references():
            entered.set()
            assert leave.wait(30)

    thread = threading.Thread(target=other)
    with swap.preserving_references():
        thread.start()
        assert entered.wait(30)
    assert flag()
    leave.set()
    thread.join(30)
    assert not flag()


@pytest.mark.parametrize(
    "convert",
    [
        lambda model: model.half(),
        lambda model: model.to_empty(device="cpu"),
        lambda model: model.load_state_dict(randomised(model), assign=True),
    ],
    ids=["half", "to_empty", "assign"],
)
def test_parameters_stay_the_same_objects(convert):
    """Where torch by itself would have made new ones for some conversions."""
    model = Mixed()
    held = dict(model.named_parameters())
    with swap.preserving_references():
        convert(model)
    assert all(parameter is held[name] for name, parameter in model.named_parameters())


def test_a_module_that_is_checked_is_not_left_half_converted():
    """torch stops at the parameter that is held, with those before it converted."""
    model = Two()
    held = weakref.ref(model.b)
    with swap.preserving_references(), pytest.raises(RuntimeError, match=r"Couldn't swap Two\.b"):
        model.double()
    assert [p.dtype for p in model.parameters()] == [torch.float64, torch.float32]
    model.a.data = model.a.data.float()
    before = state_of(model)
    refused = pytest.raises(PlacementError, match="'b': cannot be swapped: a weak reference to it")
    with refused, swap.preserving_references(check=model):
        model.double()
    assert state_of(model) == before
    assert not flag()
    assert held() is model.b


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrent_layer_that_is_checked_can_be_loaded(kind):
    """torch refuses by itself, because the layer has weak references to its own weights."""
    model = kind(2, 3)
    state = randomised(model)
    held = dict(model.named_parameters())
    with swap.preserving_references(), pytest.raises(RuntimeError, match="has weakref"):
        model.load_state_dict(state)
    with swap.preserving_references(check=model):
        model.load_state_dict(state)
    for name, tensor in tensors_of(model).items():
        assert tensor is held[name]
        assert torch.equal(tensor, state[name])
    assert [reference() for reference in model._flat_weight_refs] == list(model.parameters())
    assert model(torch.ones(1, 2))[0].shape == (1, 3)
    with swap.preserving_references(check=model):
        model.double()
    assert [reference() for reference in model._flat_weight_refs] == list(model.parameters())

"""Handlers for loading tensor subclasses come, combine and go."""

from __future__ import annotations

import torch
from int8_weights import load_int8

from torchlift import swap


class Base(torch.Tensor):
    """A plain subclass."""


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

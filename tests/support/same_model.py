"""Two modules compared tensor by tensor: values, layout, kind and ties."""

from __future__ import annotations

import torch
from small_models import tensors_of as all_tensors
from torch import nn
from zoo import same

from torchlift._model.slots import ModuleTree


def ties_of(model: nn.Module) -> set[tuple[str, ...]]:
    """The groups of names that are one tensor object."""
    names: dict[int, list[str]] = {}
    for name, tensor in all_tensors(model).items():
        names.setdefault(id(tensor), []).append(name)
    return {tuple(group) for group in names.values() if len(group) > 1}


def assert_same_tensors(model: nn.Module, wanted: nn.Module) -> None:
    """Parameters, buffers of both kinds and their ties; and nothing is left on meta."""
    found, expected = all_tensors(model), all_tensors(wanted)
    assert list(found) == list(expected)
    assert list(model.state_dict()) == list(wanted.state_dict())
    for name, tensor in expected.items():
        assert not found[name].is_meta, name
        assert same(found[name], tensor), name
        assert found[name].stride() == tensor.stride(), name
        assert found[name].requires_grad == tensor.requires_grad, name
        assert found[name].is_leaf == tensor.is_leaf, name
        assert type(found[name]) is type(tensor), name
        assert found[name].device == tensor.device, name
    assert ties_of(model) == ties_of(wanted)
    assert ModuleTree(model).on_meta == []


def scrambled(model: nn.Module, seed: int = 5) -> nn.Module:
    """`model` with other weights than its constructor gives, so that none passes for a replayed
    one.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in {id(t): t for t in model.state_dict().values()}.values():
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=generator)
                tensor.add_(noise.to(tensor.dtype) / 64)
    return model

"""`remap.fit` over random modules, and on a model of 70 billion parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from device_files import used
from hypothesis import given, settings
from hypothesis import strategies as st
from in_code import in_code
from torch import nn

from torchlift import remap
from torchlift._model.slots import collect
from torchlift.errors import PlacementError


@st.composite
def modules(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    """A tree of modules with tensors of their own, ties, and numbered lists."""
    module = nn.Module()
    for name in draw(st.lists(st.sampled_from(["a", "b"]), unique=True)):
        tensor = torch.empty(draw(st.integers(1, 40)), device="meta")
        module.register_parameter(name, nn.Parameter(tensor))
    if depth:
        count = draw(st.integers(0, 3))
        children = [draw(modules(depth=depth - 1)) for _ in range(count)]
        names = [str(i) for i in range(count)] if draw(st.booleans()) else ["x", "y", "z"]
        for name, child in zip(names, children, strict=False):
            module.add_module(name, child)
        weights = [p for child in children for p in child.parameters()]
        if len(weights) > 1 and draw(st.booleans()):
            module.register_parameter("tie", draw(st.sampled_from(weights)))
    return module


budgets = st.dictionaries(
    st.sampled_from(["cuda:0", "cuda:1", "xpu:0", "cpu", "disk"]),
    st.one_of(st.integers(0, 2000), st.none()),
    min_size=1,
)


@settings(max_examples=200, deadline=None)
@given(modules(), budgets, st.sampled_from([(), ("*",), ("x.*", "0.*")]))
def test_no_device_gets_more_than_its_budget(module, budgets, no_split) -> None:
    """Or the error says that it does not fit, and with everything on one device it would not."""
    try:
        found = remap.fit(module, budgets, no_split)
    except PlacementError as error:
        if "no_split matches no" in str(error):
            return
        total = sum(group.tensor.nbytes for group in collect(module))
        assert all(size is not None and size < total for size in budgets.values())
        return
    assert {d: n for d, n in found.used.items() if n} == used(module, found)
    for device, size in budgets.items():
        assert size is None or found.used[device] + found.reserved.get(device, 0) <= size
    away = [device for device in ("cpu", "disk") if found.used.get(device)]
    if away and found.main:
        assert found.reserved[found.main] > 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is told by /proc")
def test_seventy_billion_parameters_are_fitted_in_200_mib() -> None:
    """Construction, which allocates nothing, included."""
    setup = """
import torch, torchlift
from torchlift import remap
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=128256, hidden_size=8192, intermediate_size=28672,
                     num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8)
"""
    code = """
model = torchlift.skeleton(LlamaForCausalLM, config)
found = remap.fit(model, {"cuda:0": "80GiB", "cuda:1": "40GiB", "cpu": "64GiB"},
                  dtype=torch.bfloat16)
result = [found.nbytes, found.used["cuda:0"], sorted(set(found.values()))]
"""
    child = in_code(code, setup=setup)
    nbytes, first, devices = child.value
    assert nbytes == 2 * 70_553_706_496 + 512  # the rotary frequencies stay float32
    assert first <= 80 * 2**30
    assert devices == ["cpu", "cuda:0", "cuda:1"]
    assert child.memory.added_anonymous < 200 * 2**20

"""`remap.fit` over random modules, and on a model of 70 billion parameters."""

from __future__ import annotations

import torch
from device_files import used
from hypothesis import given, settings
from hypothesis import strategies as st
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

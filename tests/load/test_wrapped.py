"""One naming: what a wrapped model saves loads into it, other wrappers and the bare model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import torchlift
from torchlift.errors import MismatchError


class Inner(nn.Module):
    """Has a child of the name that wrappers give to theirs, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.module = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("step", torch.zeros(3), persistent=False)
        self.tied = self.weight


def compiled(model: nn.Module) -> nn.Module:
    """The model as `torch.compile` wraps it."""
    made: nn.Module = torch.compile(model, backend="eager")  # type: ignore[assignment]
    return made


def with_compiled_child() -> nn.Module:
    """A model of which one module is compiled, and another one checkpointed."""
    model = Inner()
    model.module = compiled(model.module)  # type: ignore[assignment]
    model.norm = checkpoint_wrapper(model.norm)
    return model


WAYS: dict[str, Callable[[], nn.Module]] = {
    "bare": Inner,
    "compiled": lambda: compiled(Inner()),
    "parallel": lambda: nn.DataParallel(Inner()),
    "parallel-compiled": lambda: nn.DataParallel(compiled(Inner())),
    "compiled-parallel": lambda: compiled(nn.DataParallel(Inner())),
    "child": with_compiled_child,
    "parallel-child": lambda: nn.DataParallel(with_compiled_child()),
}
KEYS = list(Inner().state_dict())


def values_of(model: nn.Module) -> list[torch.Tensor]:
    """The values of a model on the CPU, in the order of the bare model.

    DataParallel moves its module to a GPU if the machine has one.
    """
    return [value.cpu() for value in model.state_dict().values()]


@pytest.mark.parametrize("saved", WAYS)
@pytest.mark.parametrize("loaded", WAYS)
def test_what_one_wrapper_saves_any_other_one_loads(tmp_path, saved, loaded):
    """And plan and report name everything as the bare model does."""
    source, target, path = WAYS[saved](), WAYS[loaded](), tmp_path / "x.safetensors"
    torchlift.save(source, path)
    plan = torchlift.plan(target, path)
    report = torchlift.load(target, path)
    assert all(map(torch.equal, values_of(source), values_of(target)))
    assert list(plan.loaded) == list(report.loaded)
    assert {*report.loaded} == {*KEYS}
    assert report.tied == (("weight", "tied"),)
    assert all(item.key in KEYS for item in report.loaded.values())


@pytest.mark.parametrize("way", WAYS)
def test_a_file_with_the_wrapper_s_own_names_loads_into_it(tmp_path: Path, way: str) -> None:
    """As torch's load_state_dict does, from a file and from memory."""
    source, path = WAYS[way](), tmp_path / "x.pt"
    torch.save(source.state_dict(), path)
    for given in (path, source.state_dict()):
        target = WAYS[way]()
        assert {*torchlift.load(target, given).loaded} == {*KEYS}
        assert all(map(torch.equal, values_of(source), values_of(target)))


@pytest.mark.parametrize("way", ["compiled", "parallel", "parallel-child"])
def test_errors_and_warnings_name_what_the_bare_model_has(way: str) -> None:
    """Missing, unexpected and mismatched, and a pattern that allows one of them."""
    state = {**Inner().state_dict(), "more": torch.ones(1), "module.bias": torch.ones(7)}
    del state["norm.weight"]
    with pytest.raises(MismatchError) as caught:
        torchlift.load(WAYS[way](), state)
    assert caught.value.missing_keys == ["norm.weight"]
    assert caught.value.unexpected_keys == ["more"]
    assert list(caught.value.mismatched) == ["module.bias"]
    with pytest.warns(UserWarning, match=r"2 parameters got no value .*: norm.weight, norm.bias"):
        torchlift.load(
            WAYS[way](),
            {k: v for k, v in Inner().state_dict().items() if not k.startswith("norm")},
            strict=False,
        )
    report = torchlift.load(
        WAYS[way](), state, allow_missing=["norm.*", "module.*"], allow_unexpected=["mo*"],
        ignore_mismatched=True,
    )  # fmt: skip
    assert report.missing_keys == ["norm.weight", "module.bias"]

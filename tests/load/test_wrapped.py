"""One naming: what a wrapped model saves loads into it, other wrappers and the bare model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import torchlift
from torchlift._model.names import bare_name
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


# ---- rules, transforms and errors


NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def two() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def wrap_two(name: str) -> Any:
    """Two layers in a wrapper, or with wrapped children."""
    model = two()
    if name == "child":
        model[0], model[1] = checkpoint_wrapper(model[0]), compiled(model[1])
        return model
    return compiled(model if name == "compiled" else nn.DataParallel(compiled(model)))


class Seen:
    """Callables that record the names that they get."""

    def __init__(self) -> None:
        self.device_names, self.dtype_names = list[str](), list[str]()
        self.transform_names = list[str]()

    def device(self, entry: torchlift.TensorEntry) -> str:
        self.device_names.append(entry.key)
        return "cpu"

    def dtype(self, entry: torchlift.TensorEntry) -> str | None:
        self.dtype_names.append(entry.key)
        return "bfloat16" if entry.key == "0.weight" else None

    def transform(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        self.transform_names.append(key)
        return tensor + 1 if key == "1.bias" else tensor


@pytest.mark.parametrize("lacking", [False, True])
@pytest.mark.parametrize("given", ["file", "memory"])
@pytest.mark.parametrize("name", ["compiled", "child", "compiled-parallel"])
def test_callables_get_the_names_of_the_report(name, given, lacking, tmp_path):
    """Also for tensors that the checkpoint lacks, live or on meta."""
    state = dict(two().state_dict())
    if lacking:
        del state["1.weight"]
    ckpt: Any = state
    if given == "file":
        ckpt = tmp_path / "model.safetensors"
        torchlift.save(state, ckpt)
    for on_meta in (False, True):
        model: Any = torchlift.skeleton(wrap_two, name) if on_meta else wrap_two(name)
        seen = Seen()
        words: Any = {"device": seen.device, "dtype": seen.dtype, "strict": not lacking}
        words |= {"allow_missing": ["1.weight"] if lacking else []}
        planned = torchlift.plan(model, ckpt, **words)
        report = torchlift.load(model, ckpt, transform=seen.transform, **words)
        assert report.loaded.keys() == planned.loaded.keys() == {*state}
        assert {*seen.device_names} == {*NAMES}
        assert {*state} <= {*seen.dtype_names} <= {*NAMES}
        assert {*seen.transform_names} == {*state}
        found = {bare_name(k): v for k, v in model.state_dict().items()}
        assert found["0.weight"].dtype == torch.bfloat16
        assert torch.equal(found["1.bias"], state["1.bias"] + 1)


def test_a_child_with_the_name_of_a_wrapper_keeps_it() -> None:
    """Only the first ``module`` is of the wrapper."""
    inner, seen = nn.ModuleDict({"module": nn.Linear(2, 2, bias=False)}), Seen()
    model = nn.DataParallel(inner)
    report = torchlift.load(model, inner.state_dict(), device=seen.device, transform=seen.transform)
    assert list(report.loaded) == seen.device_names == seen.transform_names == ["module.weight"]


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
def test_names_may_have_the_parts_of_some_wrappers(prefix: str) -> None:
    """A model trained in DDP is compiled now. Batch norm reads its own entries."""
    right, inner = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    nn.init.uniform_(right.weight)
    state = {prefix + key: value for key, value in right.state_dict().items()}
    torchlift.load(nn.DataParallel(compiled(inner)), state)
    assert torch.equal(inner.weight, right.weight)

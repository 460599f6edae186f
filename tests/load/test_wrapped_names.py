"""Rules, transforms and errors of a wrapped model have the names of the report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import torchlift
from torchlift import remap
from torchlift._model.names import bare_name
from torchlift.distributed import on_ranks

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def two() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def inner_compiled(model: nn.Sequential) -> nn.Module:
    model[1] = compiled(model[1])
    return model


def checkpointed(model: nn.Sequential) -> nn.Module:
    model[0] = checkpoint_wrapper(model[0])
    return model


WRAPPERS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "compiled": compiled,
    "a compiled child": inner_compiled,
    "activation checkpoints": checkpointed,
    "DataParallel": nn.DataParallel,
    "all": lambda model: compiled(nn.DataParallel(compiled(checkpointed(model)))),
}


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
@pytest.mark.parametrize("name", WRAPPERS)
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
        model = torchlift.skeleton(lambda: WRAPPERS[name](two())) if on_meta else None
        model, seen = WRAPPERS[name](two()) if model is None else model, Seen()
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


@pytest.mark.parametrize("name", WRAPPERS)
def test_rules_of_remap_are_written_from_the_report(name: str) -> None:
    """A prefix of a wrapper matches nothing, so it is refused."""
    state, model = two().state_dict(), WRAPPERS[name](two())
    rule = remap.by_key({"0": "bfloat16", "1.bias": "float64"})
    report = torchlift.load(model, state, dtype=rule)
    dtypes = {name: one.dtype for name, one in report.loaded.items()}
    assert dtypes == dict(zip(NAMES, ["bfloat16", "bfloat16", "float32", "float64"], strict=True))
    for prefix in ("_orig_mod.0", "module.0", "_checkpoint_wrapped_module"):
        with pytest.raises(torchlift.PlacementError) as caught:
            torchlift.load(model, state, device=remap.by_key({prefix: "cpu"}))
        assert caught.value.entry == prefix


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


def names_on_a_mesh() -> dict[str, list[str]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, seen = two(), Seen()
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    wrapped = compiled(fully_shard(model))
    torchlift.load(wrapped, two().state_dict(), device=seen.device, transform=seen.transform)
    ddp, more = nn.parallel.DistributedDataParallel(two()), Seen()
    torchlift.load(ddp, two().state_dict(), device=more.device, dtype=lambda entry: None)
    return {"fsdp": seen.device_names + seen.transform_names, "ddp": more.device_names}


@pytest.mark.distributed
def test_callables_get_the_names_of_the_report_on_a_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    for found in on_ranks(2, names_on_a_mesh):
        assert {*found["fsdp"]} == {*found["ddp"]} == {*NAMES}

"""Values on meta, and what a caller's default device or default dtype must not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kinds import KINDS
from torch import nn

import torchlift
from torchlift.cli import main
from torchlift.errors import PlacementError

pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per", "ignore:Sparse")


# ---- on meta


def on_meta(kind: str) -> dict[str, torch.Tensor]:
    """Return a state in which a tensor is on meta."""
    made = torch.empty(2, 3, device="meta")
    if kind == "sparse":
        made = torch.sparse_coo_tensor(size=(2, 3), device="meta")
    return {"v": torch.ones(2), "w": made} if kind == "some" else {"w": made}


@pytest.mark.parametrize("kind", ["all", "some", "sparse"])
def test_a_tensor_without_values_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    """Success over nothing would be a copy without weights, or two models that are never equal."""
    state = on_meta(kind)
    torch.save(state, tmp_path / "meta.pt")
    given: tuple[Any, ...] = (state, tmp_path / "meta.pt")
    for one in given:
        doors: dict[str, Callable[..., Any]] = {
            "diff": lambda x: torchlift.diff(x, x),
            "diff the other way": lambda x: torchlift.diff({"x": torch.ones(1)}, x),
            "digest": torchlift.digest,
            "load": lambda x: torchlift.load(Holder(torch.ones(2, 3)), x, strict=False),
        }
        for file, format in (("a.pt", None), ("a.safetensors", None), ("dcp", "dcp")):
            doors[f"convert {file}"] = lambda x, to=tmp_path / file, format=format: (
                torchlift.convert(x, to, format=format)
            )
            doors[f"save {file}"] = lambda x, to=tmp_path / file, format=format: torchlift.save(
                torchlift.open(x) if isinstance(x, Path) else x, to, format=format
            )
        for door in doors.values():
            with pytest.raises(PlacementError) as caught:
                door(one)
            assert caught.value.entry == "w"
            assert "meta" in str(caught.value.found)
    keeper = torchlift.Keeper(tmp_path / "run", background=False)
    with pytest.raises(PlacementError) as caught:
        keeper.save(1, state=state)
    keeper.close()
    assert caught.value.entry == "w"
    assert main(["diff", str(tmp_path / "meta.pt"), str(tmp_path / "meta.pt")]) == 2
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["meta.pt"]


# ---- defaults


class Holder(nn.Module):
    """A module with one buffer."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("w", value)


DENSE = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).relu()
TENSORS = {
    "dense": DENSE, "scalar": torch.tensor(2.5), "complex": torch.complex(DENSE, DENSE),
    **{name: KINDS[name] for name in ("coo", "uncoalesced", "hybrid", "csr", "csc", "bsr",
                                      "tensor", "channels")},
}  # fmt: skip


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _shown(value: torch.Tensor) -> Any:
    """Return what a tensor consists of."""
    if not value.is_quantized:
        return value.dtype, value.layout, value.device, value.to_dense().tolist()
    if value.qscheme() == torch.per_tensor_affine:
        return value.dtype, value.q_scale(), value.q_zero_point(), value.int_repr().tolist()
    channels = value.q_per_channel_scales().tolist(), value.q_per_channel_zero_points().tolist()
    return value.dtype, value.qscheme(), channels, value.int_repr().tolist()


def _outcome(call: Callable[[], Any]) -> Any:
    """Return the result of a call as text, or its error. An error of torch itself fails."""
    try:
        return str(call())
    except torchlift.CheckpointError as error:
        return type(error), error.entry, error.found


def _results(given: Path, state: Mapping[str, torch.Tensor], folder: Path) -> dict[str, Any]:
    """Return the result of each door for a file and the same state in memory."""
    found: dict[str, Any] = {
        "tree": lambda: _shown(torchlift.open(given).tree()["w"]),
        "stats": lambda: torchlift.open(given).stats("w"),
        "diff": lambda: torchlift.diff(given, state),
    }
    for name, source in (("file", given), ("memory", state)):

        def load(source: Any = source) -> Any:
            model = Holder(state["w"].clone())
            torchlift.load(model, source, mode="copy", source="read")
            return _shown(model.w)  # type: ignore[arg-type]

        def convert(source: Any = source, kind: Any = None) -> Any:
            to = folder / f"to {kind}"
            torchlift.convert(source, to, format=kind, dtype="float16", overwrite=True)
            return _shown(torchlift.open(to)["w"])

        found |= {f"digest {name}": partial(torchlift.digest, source), f"load {name}": load}
        for kind in ("torch-zip", "safetensors", "dcp"):
            found[f"convert {name} {kind}"] = partial(convert, kind=kind)
    return {name: _outcome(call) for name, call in found.items()}


@pytest.mark.parametrize("kind", TENSORS)
def test_defaults_of_the_caller_change_nothing(tmp_path: Path, kind: str) -> None:
    """A default device and a default dtype, as in code that builds a skeleton."""
    state = {"w": TENSORS[kind]}
    torch.save(state, tmp_path / "x.pt")
    expected = _results(tmp_path / "x.pt", state, tmp_path / "plain")
    with torch.device("meta"):
        assert _results(tmp_path / "x.pt", state, tmp_path / "meta") == expected
    for dtype in (torch.float64, torch.float16):
        with _default_dtype(dtype):
            assert _results(tmp_path / "x.pt", state, tmp_path / str(dtype)) == expected


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_in_memory_is_refused_by_name(tmp_path: Path, layout: torch.layout) -> None:
    """It does not have one shape. It is compared and digested, and the rest is loaded."""
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)], layout=layout)
    state = {"w": nested, "v": torch.ones(2)}
    for value in (torch.zeros(3), nested.clone()):
        model = Holder(value)
        model.register_buffer("v", torch.zeros(2))
        doors: list[Callable[[], Any]] = [
            lambda model=model: torchlift.load(model, state),  # type: ignore[misc]
            lambda model=model: torchlift.plan(model, state),  # type: ignore[misc]
            lambda: torchlift.convert(state, tmp_path / "x.pt"),
        ]
        for door in doors:
            with pytest.raises(PlacementError) as caught:
                door()
            assert caught.value.entry == "w"
        torchlift.load(model, state, exclude=["w"])
        assert model.v.tolist() == [1, 1]  # type: ignore[operator, union-attr]
    assert torchlift.diff(state, state).equal
    assert torchlift.digest(state) == torchlift.digest(dict(state))

"""Every dtype of torch, through every door: what torch reads is read, or refused by an own error.

A tensor of each dtype is made of the same bytes. torch can store some dtypes only (`torch.uint4`),
and some of them in memory only. An error of torch itself is never the answer.
"""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from zoo import same

import torchlift
from torchlift.errors import CheckpointError, PlacementError
from torchlift.formats.index import ITEMSIZE, QUANTIZED

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:ComplexHalf", "ignore:torch.quantize_per"
)

DTYPES = {
    str(found).removeprefix("torch."): found
    for found in vars(torch).values()
    if isinstance(found, torch.dtype) and not str(found).startswith("torch.quint")
}
PLAIN = [name for name in DTYPES if name in ITEMSIZE]
#: Doors that each dtype of a plain tensor passes. A safetensors file stores most of them.
FORMATS = {"x.pt": "torch-zip", "x.safetensors": "safetensors", "dcp": "dcp"}
REFUSED = {("x.safetensors", name) for name in ("complex32", "complex128")}


def tensor_of(name: str) -> torch.Tensor:
    """Return four rows of two numbers of a dtype."""
    dtype = DTYPES[name]
    if name in QUANTIZED:
        return torch.quantize_per_tensor(torch.arange(8.0).view(4, 2), 0.1, 0, dtype)
    raw = torch.arange(8 * dtype.itemsize, dtype=torch.uint8) * 3 % 120
    return ((raw[:8] % 2 == 0) if name == "bool" else raw.view(dtype)).view(4, 2)


class Holder(nn.Module):
    """A module with one buffer."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("w", value)


def loaded(source: Any, value: torch.Tensor, mode: Any) -> torch.Tensor:
    model = Holder(torch.zeros_like(value.view(torch.uint8)).view(value.dtype))
    torchlift.load(model, source, mode=mode)
    found: torch.Tensor = model.w  # type: ignore[assignment]
    return found


@pytest.mark.parametrize("name", PLAIN)
def test_each_dtype_passes_each_door(tmp_path: Path, name: str) -> None:
    """Saved, converted, opened, loaded, digested and compared, its bytes stay as they are."""
    value = tensor_of(name)
    state, given = {"w": value}, tmp_path / "given.pt"
    torch.save(state, given)
    assert same(torch.load(given)["w"], value)
    expected = torchlift.digest(state)
    for source in (given, state):
        for mode in ("assign", "copy"):
            assert same(loaded(source, value, mode), value)
        for file, kind in FORMATS.items():
            path = tmp_path / f"{type(source).__name__}-{file}"
            if (file, name) in REFUSED:
                with pytest.raises(CheckpointError) as caught:
                    torchlift.convert(source, path, format=kind)
                assert caught.value.entry == "w"
                continue
            torchlift.convert(source, path, format=kind)
            if kind != "dcp":
                read = torch.load if kind == "torch-zip" else load_file
                assert same(read(path)["w"], value)
            found = torchlift.open(path)
            assert same(found["w"], value)
            assert same(found.tree()["w"], value)
            assert torchlift.digest(path) == expected
            assert torchlift.diff(path, given).equal
    keeper = torchlift.Keeper(tmp_path / "run", background=False)
    keeper.save(1, model=Holder(value))
    model = Holder(torch.zeros_like(value.view(torch.uint8)).view(value.dtype))
    keeper.resume(model=model)
    keeper.close()
    assert same(model.w, value)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", DTYPES)
def test_each_dtype_is_compared_with_each_other_one(name: str) -> None:
    """Also those that torch only stores, and uint64 with complex numbers."""
    value = tensor_of(name)
    for other in DTYPES:
        found = torchlift.diff({"w": value}, {"w": tensor_of(other)})
        assert found.equal == (name == other)
        if name != other:
            assert found.changed["w"].dtype == (name, other)
    if name not in QUANTIZED:
        changed = tensor_of(name)
        changed.view(torch.uint8)[3, 0] ^= 1
        assert torchlift.diff({"w": value}, {"w": changed}).changed["w"].value is not None
        assert torchlift.digest({"w": value}) != torchlift.digest({"w": changed})
    assert torchlift.diff({"w": value}, {"v": tensor_of(name)}).renamed == {"w": "v"}


@pytest.mark.parametrize("name", sorted(DTYPES.keys() - {*PLAIN}))
def test_a_dtype_that_no_file_stores_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """Or stored, as a torch file stores quantised tensors."""
    state = {"w": tensor_of(name)}
    for file, kind in FORMATS.items():
        if name in QUANTIZED and kind == "torch-zip":
            torchlift.save(state, tmp_path / file)
            assert torchlift.diff(tmp_path / file, state).equal
            continue
        for write in (torchlift.save, torchlift.convert):
            with pytest.raises(PlacementError) as caught:
                write(state, tmp_path / file, format=kind)
            assert caught.value.entry == "w"
    try:
        torch.save(state, tmp_path / "theirs.pt")
    except KeyError:  # torch has no name for a storage of this dtype
        return
    if name not in QUANTIZED:
        with pytest.raises(CheckpointError) as caught_reading:
            torchlift.open(tmp_path / "theirs.pt")["w"]
        assert caught_reading.value.entry == "w"


def test_one_storage_may_hold_several_dtypes(tmp_path: Path) -> None:
    """As torch saves uint8 and its views as dtypes without a storage class of their own."""
    names = [
        *("uint8", "uint16", "uint32", "uint64", "complex32", "float8_e4m3fn", "float8_e5m2"),
        "float4_e2m1fn_x2",
    ]
    raw = torch.arange(16, dtype=torch.uint8)
    for one, two in permutations(names, 2):
        state = {"a": raw.view(DTYPES[one]), "b": raw.view(DTYPES[two])[1:]}
        torch.save(state, tmp_path / "x.pt")
        expected = torch.load(tmp_path / "x.pt")
        with torchlift.open(tmp_path / "x.pt") as ckpt:
            found = ckpt.state_dict()
            assert ckpt.aliases == (("a", "b"),)
        assert same(dict(found), dict(expected))
        places = {value.untyped_storage().data_ptr() for value in found.values()}
        assert len(places) == 1
        assert torchlift.diff(tmp_path / "x.pt", state).equal


def test_packed_numbers_are_not_cast(tmp_path: Path) -> None:
    """torch cannot cast them, and the callable that the hint asks for leaves them as they are."""
    state = {"w": tensor_of("float4_e2m1fn_x2"), "v": torch.ones(2)}
    torch.save(state, tmp_path / "x.pt")
    for source in (tmp_path / "x.pt", state):
        new = tmp_path / f"{type(source).__name__}.safetensors"
        with pytest.raises(PlacementError) as caught:
            torchlift.convert(source, new, dtype="float16")
        assert (caught.value.entry, caught.value.found) == ("w", torch.float4_e2m1fn_x2)

        def cast(entry: torchlift.TensorEntry) -> str | None:
            return None if entry.dtype == "float4_e2m1fn_x2" else "float16"

        torchlift.convert(source, new, dtype=cast)
        found = torchlift.open(new)
        assert same(found["w"], state["w"])
        assert found["v"].dtype == torch.float16

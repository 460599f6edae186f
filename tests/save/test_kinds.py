"""Sparse, quantised and nested tensors: kept as torch.save keeps them, or refused with a fix."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from hub_files import damage
from kinds import KINDS
from zoo import same

import torchlift
from torchlift.errors import FormatError, IntegrityError, PlacementError

#: Of torch.load, where it makes a quantised tensor.
pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")

SPARSE = [name for name, tensor in KINDS.items() if not tensor.is_quantized]


def require_kept(path: Path, kinds: dict[str, torch.Tensor]) -> None:
    """All readers give what torch.save and torch.load make of these tensors."""
    file = io.BytesIO()
    torch.save(kinds, file)
    file.seek(0)
    expected = torch.load(file, weights_only=True)
    with torchlift.open(path) as ckpt:
        found = [torch.load(path, weights_only=True), torch.load(path, mmap=True)]
        for each in (*found, ckpt.state_dict()):
            assert each.keys() == expected.keys()
            for name, tensor in expected.items():
                assert same(tensor, each[name]), name
    assert torchlift.verify(path).ok


def test_a_torch_file_keeps_them(tmp_path: Path) -> None:
    """From memory, from a file as torch.save wrote it, and from one that is open."""
    theirs, ours = tmp_path / "theirs.pt", tmp_path / "ours.pt"
    torch.save(KINDS, theirs)
    report = torchlift.save(KINDS, ours)
    assert report.tensors == len(KINDS)
    assert not report.lost
    require_kept(ours, KINDS)
    for source in (theirs, ours, KINDS):
        assert torchlift.convert(source, ours, overwrite=True).tensors == len(KINDS)
        require_kept(ours, KINDS)
    with torchlift.open(theirs) as ckpt:
        torchlift.save(ckpt, ours)
    require_kept(ours, KINDS)
    # A transform gets a clone, which torch makes contiguous, and of zero points of floats none.
    odd = ["float zeros", "turned"]
    torchlift.convert(theirs, ours, transform=lambda _, t: t, exclude=odd, overwrite=True)
    require_kept(ours, {name: tensor for name, tensor in KINDS.items() if name not in odd})


@pytest.mark.parametrize("name", KINDS)
def test_one_is_kept_wherever_it_is(tmp_path: Path, name: str) -> None:
    """Alone, in lists, tied, beside a dense view of its values, and as a buffer of a module."""
    tensor, path = KINDS[name], tmp_path / "x.pt"
    torchlift.save(tensor, path)
    assert same(torch.load(path, weights_only=True), tensor)
    torchlift.save({"a": [tensor, {3: tensor}], "step": 3}, path)
    found = torch.load(path, weights_only=True)
    assert found["step"] == 3
    assert same(found["a"][0], tensor)
    assert same(found["a"][1][3], tensor)
    model = torch.nn.Linear(2, 2)
    model.register_buffer("kind", tensor)
    torchlift.save(model, path)
    assert same(torch.load(path, weights_only=True)["kind"], tensor)
    report = torchlift.save({"one": tensor, "two": tensor, "one.0": torch.ones(2)}, path)
    assert report.tied == ({"two": "one"} if name != "nothing" else {})
    with torchlift.open(path) as ckpt:
        assert same(ckpt["two"], tensor)


def test_a_cast_is_of_values_alone(tmp_path: Path) -> None:
    """Indices, integers, flags and quantised numbers stay what they are."""
    torch.save(KINDS, tmp_path / "x.pt")
    report = torchlift.convert(tmp_path / "x.pt", tmp_path / "y.pt", dtype="float16")
    found = torch.load(tmp_path / "y.pt", weights_only=True)
    floats = {name for name in SPARSE if KINDS[name].is_floating_point()}
    assert report.cast.keys() == floats
    for name, tensor in KINDS.items():
        assert same(found[name], tensor.half() if name in floats else tensor), name


def test_the_memory_of_a_conversion_does_not_grow_with_them(tmp_path: Path) -> None:
    """Their values go a block at a time, as those of dense ones do."""
    count = 10_000_000
    rows = torch.arange(count)
    big = torch.sparse_coo_tensor(rows[None], torch.ones(count), (count,), is_coalesced=True)
    torch.save({"w": big}, tmp_path / "x.pt")
    found = torchlift.measure.in_child(torchlift.convert, tmp_path / "x.pt", tmp_path / "y.pt")
    assert found.memory.added_anonymous < 64 << 20
    found = torch.load(tmp_path / "y.pt", mmap=True)["w"]
    assert torch.equal(found._indices()[0], rows)


@pytest.mark.parametrize("format", ["safetensors", "sharded", "dcp"])
@pytest.mark.parametrize("name", ["coo", "bsr", "tensor", "channels"])
def test_other_formats_name_what_keeps_them(tmp_path: Path, format: str, name: str) -> None:
    """A torch file does; and what a transform makes dense is written there."""
    tensor, source, path = KINDS[name], tmp_path / "x.pt", tmp_path / "out"
    torch.save({"w": tensor, "v": torch.ones(2)}, source)
    fix = "dequantize" if tensor.is_quantized else "to_dense"
    with pytest.raises(PlacementError) as caught:
        torchlift.save({"w": tensor}, path, format=format)
    assert caught.value.entry == "w"
    assert caught.value.hint == f"Save as a torch file, which keeps it, or save tensor.{fix}()."
    with pytest.raises(PlacementError, match=rf"'w'.*found a .*(torch file.*{fix}|{fix})"):
        torchlift.convert(source, path, format=format)
    assert not path.exists()
    torchlift.convert(
        source, path, format=format,
        transform=lambda key, tensor: getattr(tensor, fix)() if key == "w" else tensor,
    )  # fmt: skip
    with torchlift.open(path) as ckpt:
        assert torch.equal(ckpt["w"], getattr(tensor, fix)())
        assert torch.equal(ckpt["v"], torch.ones(2))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("format", ["torch-zip", "safetensors", "dcp"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_a_nested_tensor_is_refused_and_its_rows_are_saved(
    tmp_path: Path, layout: torch.layout, format: str
) -> None:
    """The message has the call that gives its rows; and that of a conversion, how to go on."""
    rows, path = [torch.ones(2, 3), torch.zeros(4, 3)], tmp_path / "x"
    tensor = torch.nested.nested_tensor(rows, layout=layout)
    with pytest.raises(PlacementError, match=r"'w'.*found a nested tensor of float32") as caught:
        torchlift.save({"w": tensor}, path, format=format)
    assert "Save its rows, [*tensor.unbind()]" in str(caught.value.hint)
    assert "torch.nested.as_nested_tensor" in str(caught.value.hint)
    torchlift.save({"w": [*tensor.unbind()]}, path, format=format)
    with torchlift.open(path) as ckpt:
        made = torch.nested.as_nested_tensor([ckpt["w.0"], ckpt["w.1"]], layout=layout)
    assert all(map(torch.equal, made.unbind(), rows))
    torch.save({"w": tensor, "v": torch.ones(1)}, tmp_path / "in.pt")
    with pytest.raises(FormatError, match=r"does not read nested tensors.*exclude=\['w'\]"):
        torchlift.convert(tmp_path / "in.pt", tmp_path / "y", format=format)


def test_numbers_of_two_bits_are_refused_with_a_fix(tmp_path: Path) -> None:
    """torchlift reads no file with them either."""
    scales = torch.ones(4), torch.zeros(4)
    tensor = torch.quantize_per_channel(torch.ones(4, 8), *scales, 0, torch.quint4x2)
    with pytest.raises(PlacementError, match=r"Save tensor\.dequantize\(\)\."):
        torchlift.save({"w": tensor}, tmp_path / "x.pt")
    torchlift.save({"w": tensor.dequantize()}, tmp_path / "x.pt")


def test_damage_in_one_stops_a_conversion(tmp_path: Path) -> None:
    """The error names the tensor that the source has."""
    path = tmp_path / "x.pt"
    torchlift.save(KINDS, path)
    with torchlift.open(path) as ckpt:
        kind = ckpt.entries["csr"].kind
        assert kind is not None
        at = kind.tensors[-1].chunks[0].offset
    damage(path, at)
    with pytest.raises(IntegrityError) as caught:
        torchlift.convert(path, tmp_path / "y.pt")
    assert caught.value.entry == "csr"
    assert [each.name for each in tmp_path.iterdir()] == ["x.pt"]

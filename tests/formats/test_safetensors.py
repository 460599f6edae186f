"""safetensors files, right and wrong."""

from __future__ import annotations

import json
import shlex
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_files import write_safetensors
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.torch import load_file, save_file
from zoo import same

import torchlift
from torchlift.errors import FormatError, PlacementError
from torchlift.formats.detect import read_index
from torchlift.formats.layout import Stored
from torchlift.formats.safetensors import safetensors_layout


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def described(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("ties", ['{"b": "a", "c": 3, "d": ["a"], "e": "x"}', '{"b": "a"}'])
def test_ties_name_tensors_that_are_there(path, ties):
    """Whatever else an entry of that name holds; no record is made until it is asked for."""
    header = {"__metadata__": {"torchlift.ties": ties, "f": "a"}, "a": described()}
    index = read_index(write_safetensors(path, header, bytes(8)))
    assert type(index.entries).__name__ == "Records"
    assert (list(index.entries), index.aliases) == (["a", "b"], (("a", "b"),))
    assert index.metadata == {"f": "a"}


def test_pairs_of_four_bits_are_those_of_the_library(path):
    """Two of the file's elements are one of torch's, whichever of the two wrote the file."""
    pairs = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4).view(torch.float4_e2m1fn_x2)
    save_file({"w": pairs, "none": pairs[:, :0]}, path)
    ckpt = torchlift.open(path)
    assert same(ckpt["w"], pairs)
    assert (ckpt["none"].shape, ckpt["none"].dtype) == ((2, 0, 4), pairs.dtype)
    torchlift.save({"w": pairs}, path)
    with safe_open(path, "pt") as file:
        assert same(file.get_tensor("w"), pairs)
    with pytest.raises(PlacementError, match=r"'w': a safetensors file cannot store this tensor"):
        torchlift.save({"w": pairs[0, 0, 0]}, path)


@pytest.mark.parametrize(
    ("code", "shape", "nbytes", "dtype"),
    [("F6_E2M3", (4,), 3, "float6_e2m3fn"), ("F6_E3M2", (2, 8), 12, "float6_e3m2fn"),
     ("F4", (2, 3), 3, "float4_e2m1fn"), ("F6_E2M3", (0, 5), 0, "float6_e2m3fn")],
)  # fmt: skip
def test_what_torch_has_no_type_for_is_listed_and_refused(path, code, shape, nbytes, dtype):
    """With its type and size; the tensors beside it can be had."""
    beside = described(offsets=(nbytes, nbytes + 8))
    header = {"w": described(code, shape, (0, nbytes)), "v": beside}
    ckpt = torchlift.open(write_safetensors(path, header, bytes(nbytes + 8)))
    entry = ckpt.entries["w"]
    assert (entry.dtype, entry.shape, entry.nbytes) == (dtype, shape, nbytes)
    assert ckpt["v"].tolist() == [0, 0]
    model = torch.nn.ParameterDict({"w": torch.ones(shape)})
    for door in lambda: ckpt["w"], lambda: torchlift.load(model, path, strict=False):
        with pytest.raises(FormatError, match=f"'w': .* torch lacks the dtype.*found {dtype}"):
            door()


def _follow(hint: str, path: Path) -> None:
    """Run the command of a hint."""
    program, option, code, _ = shlex.split(hint.partition(": ")[2])
    assert program == "python"
    subprocess.run([sys.executable, option, code, str(path)], check=True)


@pytest.mark.parametrize("zeros", [1, 7, 64])
def test_a_header_that_is_padded_with_zeros_is_named(path, zeros):
    """As safetensors refuses it. The command of the hint repairs it, and keeps the values."""
    header = json.dumps({"w": described()}).encode() + bytes(zeros)
    data = torch.tensor([1.0, 2.0]).numpy().tobytes()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    with pytest.raises(SafetensorError):
        load_file(path)
    for call in torchlift.open, torchlift.verify, lambda path: torchlift.convert(path, "new.pt"):
        with pytest.raises(FormatError) as caught:
            call(path)
        assert (caught.value.expected, caught.value.found) == ("spaces", f"{zeros} zero bytes")
    _follow(caught.value.hint, path)
    assert load_file(path)["w"].tolist() == torchlift.open(path)["w"].tolist() == [1, 2]


#: Headers as programs write them, and how many bytes are behind them.
FORMS: dict[str, tuple[object, int]] = {
    "spaces around": (b" \n" + json.dumps({"a": described()}, indent=2).encode() + b"\t  ", 8),
    "fields in another order": (
        b'{"a": {"data_offsets": [0, 8], "more": "text", "shape": [2], "dtype": "F32"}}', 8),
    "tensors in another order": ({"b": described(offsets=(8, 16)), "a": described()}, 16),
    "escapes": ({"\xe9\U0001f600\x7f": described()}, 8),
    "letters": (json.dumps({"\xe9\U0001f600": described()}, ensure_ascii=False).encode(), 8),
    "no metadata": ({"__metadata__": None}, 0),
    "texts": ({"__metadata__": {"a": "b"}}, 0),
    "a scalar and nothing": (
        {"s": described(shape=(), offsets=(0, 4)), "e": described("I16", (0, 3), (4, 4)),
         "m": described("BOOL", (4,), (4, 8))}, 8),
    "parts of bytes": (
        {"a": described("F4", (4,), (0, 2)), "b": described("F6_E3M2", (4,), (2, 5)),
         "c": described("C64", (1,), (5, 13))}, 13),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_header_of_any_form_is_taken_as_the_library_takes_it(path, name):
    """The same tensors, bytes and metadata."""
    header, nbytes = FORMS[name]
    write_safetensors(path, header, bytes(range(nbytes)))
    expected, index = dict(deserialize(path.read_bytes())), read_index(path)
    assert {*index.entries} == {*expected}
    with safe_open(path, "pt") as file:
        assert index.metadata == (file.metadata() or {})
    for key, value in expected.items():
        entry = index.entries[key]
        pair = (*entry.shape[:-1], 2 * entry.shape[-1]) if entry.dtype.endswith("_x2") else None
        assert list(pair or entry.shape) == value["shape"]
        data = path.read_bytes()
        found = b"".join(data[c.offset : c.offset + c.nbytes] for c in entry.chunks)
        assert found == bytes(value["data"])


def test_every_tensor_of_a_new_file_is_aligned() -> None:
    """Whatever the order of names and the odd sizes are, so that each of them can be mapped."""
    names = ["uint8", "float64", "bfloat16", "complex64", "int32"]
    tensors = [Stored(f"{at}", name, (3,)) for at, name in enumerate(names)]
    layout = safetensors_layout(tensors, {}, checked=True)
    assert len(layout.payloads) == len(names)
    for place in layout.payloads:
        assert place.offset % (place.tensor.nbytes // 3) == 0, place


@pytest.mark.parametrize("others", [{}, {"a.__metadata__": described(offsets=(8, 16))}])
def test_a_tensor_of_the_name_of_the_texts_is_named(path, others):
    """The library writes such a file, and refuses to read it. Both ways out work."""
    header = json.dumps({**others, "__metadata__": described()}, separators=(",", ":")).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8 + 8 * len(others)))
    with pytest.raises(SafetensorError):
        load_file(path)
    with pytest.raises(FormatError) as caught:
        torchlift.open(path)
    assert (caught.value.entry, caught.value.expected) == ("__metadata__", "another name")
    _follow(caught.value.hint, path)
    assert {*load_file(path)} == {*torchlift.open(path)} == {*others, "metadata____"}

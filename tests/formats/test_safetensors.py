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
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.torch import load_file, save_file
from zoo import same

import torchlift
from torchlift.errors import CheckpointError, FormatError, PlacementError
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


_BITS = {"BOOL": 8, "U8": 8, "I16": 16, "F32": 32, "C64": 64, "F4": 4, "F6_E3M2": 6, "X9": 8}
_WHITE = st.text(" \n\t\r", max_size=3)


@st.composite
def _headers(draw):
    """The text of a header, and the number of bytes behind it, most of them right."""
    tensors, at = {}, 0
    for name in draw(st.lists(st.sampled_from("abcdé\x7f\U0001f600"), unique=True, max_size=4)):
        code = draw(st.sampled_from(list(_BITS)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        bits = _BITS[code]
        for extent in shape:
            bits *= extent
        stop = at + -(-bits // 8)
        item = {"dtype": code, "shape": shape, "data_offsets": [at, stop], "more": "text"}
        kept = draw(st.permutations(["dtype", "shape", "data_offsets"]))
        kept += ["more"] * draw(st.booleans())
        if draw(st.integers(0, 9)) == 0:
            field = draw(st.sampled_from(kept))
            odd = [None, [], [1], -1, [0, 8], [0.5], [True], "F32", [8, 0], [0, 1 << 64], {}]
            item[field] = draw(st.sampled_from(odd))
        if draw(st.integers(0, 9)) == 0:
            kept.remove(draw(st.sampled_from(kept)))
        tensors[name] = {field: item[field] for field in kept}
        at = stop if draw(st.integers(0, 19)) else at + draw(st.integers(0, 3))
    names = draw(st.permutations(list(tensors)))
    header = {name: tensors[name] for name in names}
    notes = draw(st.sampled_from(["none", "none", None, {}, {"a": "b"}, {"a": 1}, [], "x", False]))
    if notes != "none":
        header["__metadata__"] = notes
    escaped = draw(st.booleans())
    text = draw(_WHITE) + json.dumps(header, ensure_ascii=escaped) + draw(_WHITE)
    if draw(st.integers(0, 19)) == 0:
        cut = draw(st.integers(0, len(text)))
        text = text[:cut] + draw(st.sampled_from(["", "}", ",", "\0", " "])) + text[cut + 1 :]
    return text.encode(), max(0, at + (draw(st.integers(0, 9)) == 0) * draw(st.integers(-2, 2)))


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


@settings(max_examples=300, deadline=None)
@given(described=_headers())
def test_a_header_is_taken_as_the_library_takes_it(tmp_path_factory, described):
    """The same files are read and refused, and hold the same tensors and metadata.

    Not made here is what is refused although the library takes it (one name twice, more than 64
    dimensions, a tensor as a list) and the other way round (a minus before zero).
    """
    header, nbytes = described
    path = tmp_path_factory.getbasetemp() / "header.safetensors"
    write_safetensors(path, header, bytes(at % 251 for at in range(nbytes)))
    try:
        expected = dict(deserialize(path.read_bytes()))
    except SafetensorError:
        expected = None
    try:
        index = read_index(path)
    except CheckpointError:
        assert expected is None
        return
    assert expected is not None
    assert set(index.entries) == set(expected)
    with safe_open(path, "pt") as file:
        assert index.metadata == (file.metadata() or {})
    data = path.read_bytes()
    for key, value in expected.items():
        entry = index.entries[key]
        pair = (*entry.shape[:-1], 2 * entry.shape[-1]) if entry.dtype.endswith("_x2") else None
        assert list(pair or entry.shape) == value["shape"]
        found = b"".join(data[c.offset : c.offset + c.nbytes] for c in entry.chunks)
        assert (found, entry.nbytes) == (bytes(value["data"]), len(value["data"]))


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

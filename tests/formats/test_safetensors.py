"""safetensors files, right and wrong."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from checkpoint_files import read_tensor, same_bits, write_safetensors
from safetensors.torch import load_file, save_file

from torchlift.errors import FormatError
from torchlift.formats import read_index
from torchlift.formats.safetensors import DTYPES

_NAMES = [name for name in DTYPES.values() if "fnuz" not in name]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def described(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def refused(path, match):
    with pytest.raises(FormatError, match=match) as caught:
        read_index(path)
    assert caught.value.file == str(path)
    return caught.value


def test_byte_ranges_reproduce_the_tensors_of_the_library(path):
    """Bytes cut out of the file with the index are what safetensors loads, for every dtype."""
    state = {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "matrix": torch.randn(3, 4)}
    for name in _NAMES:
        dtype = getattr(torch, name)
        raw = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8)
        state[name] = raw.view(dtype).reshape(2, 3)
    save_file(state, path, metadata={"format": "pt", "ü": "ü"})
    index = read_index(path)
    loaded = load_file(path)
    assert set(index.entries) == set(state)
    for key, entry in index.entries.items():
        assert same_bits(read_tensor(entry), loaded[key])
        assert entry.stride == loaded[key].stride()
        assert entry.is_contiguous
    assert index.format == "safetensors"
    assert index.metadata == {"format": "pt", "ü": "ü"}
    assert index.nbytes == sum(value.nbytes for value in state.values())
    assert index.aliases == ()


def test_entries_are_in_the_order_of_their_data(path):
    """Reading the entries in order reads the file from front to back."""
    header = {"b": described(offsets=(8, 16)), "a": described(offsets=(0, 8))}
    index = read_index(write_safetensors(path, header, bytes(16)))
    assert list(index.entries) == ["a", "b"]


def test_a_file_without_tensors_is_read(path):
    """An empty header is an empty checkpoint."""
    assert read_index(write_safetensors(path, {"__metadata__": {"a": "b"}})).entries == {}


def test_padding_after_the_header_is_allowed(path):
    """Writers align the data by spaces at the end of the header."""
    text = json.dumps({"w": described()}).encode() + b"   "
    assert read_index(write_safetensors(path, text, bytes(8))).entries["w"].shape == (2,)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 100_000_001, 200])
def test_an_impossible_header_length_is_refused(path, length):
    """A length past the file or past the format's limit is refused before it is read."""
    path.write_bytes(struct.pack("<Q", length) + b'{"w":' + bytes(50))
    assert "bytes" in refused(path, "header's length is impossible").expected


@pytest.mark.parametrize(
    ("offsets", "match"),
    [
        (((0, 8), (4, 12)), "overlap"),
        (((0, 8), (0, 8)), "overlap"),
        (((0, 8), (12, 20)), "hole"),
        (((4, 12), (12, 20)), "hole"),
    ],
)
def test_overlaps_and_holes_are_refused(path, offsets, match):
    """Data follows data without gap."""
    header = {f"w{i}": described(offsets=pair) for i, pair in enumerate(offsets)}
    size = max(end for _, end in offsets)
    write_safetensors(path, header, bytes(size))
    assert refused(path, match).entry in ("w0", "w1")


@pytest.mark.parametrize(
    ("nbytes", "match"), [(9, "belong to no tensor"), (7, "truncated"), (0, "truncated")]
)
def test_trailing_and_short_data_are_refused(path, nbytes, match):
    """The data ends where the file ends."""
    write_safetensors(path, {"w": described()}, bytes(nbytes))
    refused(path, match)


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ([2.0], "impossible shape"),
        ([-2], "impossible shape"),
        ([True, 2], "impossible shape"),
        ([2**63], "impossible shape"),
        (["2"], "impossible shape"),
        ([None], "impossible shape"),
        ([1] * 65, "at most 64"),
        (2, "not a list"),
        ([3], "bytes are not what"),
        ([2**62, 2**62], "bytes are not what"),
    ],
)
def test_impossible_shapes_are_refused(path, shape, match):
    """Dimensions are whole numbers whose product is the tensor's bytes."""
    write_safetensors(path, {"w": described() | {"shape": shape}}, bytes(8))
    assert refused(path, match).entry == "w"


@pytest.mark.parametrize(
    "offsets", [[8, 0], [0], [0, 4, 8], [-8, 0], [0.0, 8], [0, 2**70], None, "08"]
)
def test_impossible_offsets_are_refused(path, offsets):
    """Data offsets are two whole numbers, the end behind the start."""
    write_safetensors(path, {"w": described() | {"data_offsets": offsets}}, bytes(8))
    assert refused(path, "offsets|bytes are not what").entry == "w"


@pytest.mark.parametrize("dtype", ["F4", "f32", "", 4, None, ["F32"]])
def test_an_unknown_dtype_is_refused(path, dtype):
    """A dtype nobody knows is an error that names it and the tensor."""
    write_safetensors(path, {"w": described() | {"dtype": dtype}}, bytes(8))
    error = refused(path, "dtype that torchlift does not know")
    assert (error.entry, error.found) == ("w", repr(dtype))


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (b"{", "not valid JSON"),
        (b"{\xff}", "not valid JSON"),
        (b'{"w": NaN}', "not valid JSON"),
        (b'{"a": {"a":' * 50_000 + b"1" + b"}}" * 50_000, "nests too deep|not described"),
        (b"{" + b'"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nests too deep"),
        (b'{"w":1,"w":2}', "name occurs twice"),
        (b'{"w":{"dtype":"F32","dtype":"F32"}}', "name occurs twice"),
        (b'{"w":1}', "not described"),
        (b'{"w":{}}', "not described"),
        (b'{"w":{"dtype":"F32","shape":[1e400],"data_offsets":[0,8]}}', "impossible shape"),
        (b'{"__metadata__":{"\\ud800":"x"}}', "not valid JSON"),
        (b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1}}', "not described"),
        (b'{"__metadata__":{"a":1}}', "not a map from text to text"),
        (b'{"__metadata__":[]}', "not a map from text to text"),
        (b'{"w":' + b"1" * 10_000 + b"}", "not valid JSON|not described"),
    ],
)
def test_a_malformed_header_is_refused(path, header, match):
    """JSON that is broken, ambiguous, too deep or of another shape is an error."""
    refused(write_safetensors(path, header), match)


def test_a_truncated_download_is_refused(path):
    """Wherever a file is cut, there is an error."""
    save_file({f"w{i}": torch.ones(5) for i in range(5)}, path)
    data = path.read_bytes()
    for size in range(0, len(data), 7):
        path.write_bytes(data[:size])
        with pytest.raises(FormatError):
            read_index(path)

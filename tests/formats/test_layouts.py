"""Where things go in files that are yet to be written."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from save_states import expected_state

import torchlift
from torchlift._save.pickling import Shared, lay_out_torch_file
from torchlift.errors import FormatError, PlacementError
from torchlift.formats.layout import Layout, Stored
from torchlift.formats.safetensors import safetensors_layout
from torchlift.formats.torch_zip import archive_layout


def _described(state: dict[str, torch.Tensor]) -> list[Stored]:
    return [
        Stored(key, str(value.dtype).removeprefix("torch."), tuple(value.shape))
        for key, value in state.items()
    ]


def _laid_out(state: dict[str, torch.Tensor]) -> Layout:
    tensors = _described(state)
    values = {key: Shared(number) for number, key in enumerate(state)}
    return lay_out_torch_file(values, tensors).layout


@pytest.mark.parametrize("count", [0, 1, 30])
def test_a_torch_file_is_that_of_torch_but_for_its_hash(count: int) -> None:
    """Every dtype, empty tensors and scalars."""
    if count == 30:
        state = expected_state()
    else:
        state = {f"k{i}": torch.full((i % 5,), i % 251, dtype=torch.uint8) for i in range(count)}
    ours, theirs = io.BytesIO(), io.BytesIO()
    torchlift.save(state, ours)
    torch.save(state, theirs)
    name = "archive/.data/serialization_id"
    hashes = [zipfile.ZipFile(file).read(name) for file in (ours, theirs)]
    crcs = [zlib.crc32(data).to_bytes(4, "little") for data in hashes]
    other = theirs.getvalue().replace(hashes[1], hashes[0]).replace(crcs[1], crcs[0])
    assert ours.getvalue() == other
    assert zipfile.ZipFile(ours).testzip() is None


def test_files_beyond_four_gib_have_their_64_bit_numbers(tmp_path: Path) -> None:
    """A storage that is too large, and others that lie too far, in a file that is mostly a hole."""
    sizes = {"a": 3, "large": 5 << 30, "far": 7, "none": 0, "edge": (1 << 32) - 1, "last": 2}
    state = {
        key: torch.empty(size, dtype=torch.uint8, device="meta") for key, size in sizes.items()
    }
    layout = _laid_out(state)
    sums = {
        key: zlib.crc32(bytes(size)) if size < 10 else 0xFEDCBA98 for key, size in sizes.items()
    }
    path = tmp_path / "x.pt"
    with open(path, "wb") as file:
        file.truncate(layout.nbytes)
        for start, data in layout.frame(sums.values()):
            file.seek(start)
            file.write(data)
    with zipfile.ZipFile(path) as archive:
        found = {i.filename: (i.file_size, i.CRC) for i in archive.infolist()}
        assert found["archive/data/1"] == (5 << 30, sums["large"])
        assert archive.read("archive/data/5") == b"\0\0"
    loaded = torch.load(path, mmap=True, weights_only=True)
    with torchlift.open(path) as opened:
        for number, (key, size) in enumerate(sizes.items()):
            assert loaded[key].shape == (size,)
            assert opened.entries[key].nbytes == size
            if size:
                assert opened.entries[key].chunks[0].offset == layout.payloads[number].offset
                assert opened.entries[key].chunks[0].offset % 64 == 0
                assert loaded[key][-1] == 0


@pytest.mark.parametrize("wrong", ["no hole", "another size", "another order"])
def test_a_torch_that_leaves_other_holes_is_noticed(wrong: str) -> None:
    """Bytes would go to the wrong places without an error."""
    tensors = [Stored("w", "int8", (2,)), Stored("v", "float32", (3,))]
    whole = bytearray(_laid_out({"w": torch.ones(2, dtype=torch.int8), "v": torch.ones(3)}).nbytes)
    layout = lay_out_torch_file({"w": Shared(0), "v": Shared(1)}, tensors).layout
    for start, data in layout.frame([]):
        whole[start : start + len(data)] = data
    gaps = [*layout.frame([])]
    if wrong == "no hole":
        gaps = [(0, bytes(whole))]
    if wrong == "another size":
        tensors[0] = Stored("w", "int8", (3,))
    if wrong == "another order":
        tensors.reverse()
    with pytest.raises(FormatError, match="lays out files in an unknown way"):
        archive_layout(gaps, tensors, checked=True)


def test_what_is_not_text_is_no_metadata() -> None:
    """The message names it."""
    tensors = [Stored("w", "int8", (2,)), Stored("v", "float32", (3,))]
    for metadata in ({"epoch": 3}, {"epoch": None}, {3: "epoch"}):
        with pytest.raises(TypeError, match=r"metadata\[.*: a safetensors file stores text only"):
            safetensors_layout(tensors, metadata)
    for metadata in ({"epoch": "\ud800"}, {"\ud800": "epoch"}):
        with pytest.raises(ValueError, match=r"metadata\[.*: lone surrogates are not text"):
            safetensors_layout(tensors, metadata)


def test_safetensors_refuses_what_it_has_no_word_for() -> None:
    """A dtype, a name that the header needs, more names than the header may be long."""
    for stored in (Stored("w", "complex128", (1,)), Stored("__metadata__", "int8", (1,))):
        with pytest.raises(PlacementError, match=r"format=\"torch-zip\""):
            safetensors_layout([stored], {})
    with pytest.raises(PlacementError, match="too many tensors"):
        safetensors_layout([Stored("x" * 100_000_000, "int8", (1,))], {})

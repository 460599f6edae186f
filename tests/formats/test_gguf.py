"""GGUF files, written by the gguf package and read by ours: every value is the one it computes."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from checkpoint_files import gguf_writer
from gguf import GGMLQuantizationType as Kind
from gguf import quants
from range_server import serving
from torch import nn

import torchlift
from torchlift.errors import FormatError
from torchlift.formats.detect import read_index
from torchlift.formats.gguf import GGUF_BLOCKS

VALUES = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
#: Those that the package can also make.
MADE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"]


def write(path: Path, *kinds: str) -> Path:
    """A file with one tensor per type, a vocabulary and a long text."""
    with gguf_writer(path) as writer:
        writer.add_name("tiny")
        writer.add_custom_alignment(128)  # not the usual one, so the file's own must be used
        writer.add_array("tokenizer.ggml.tokens", ["a", "bb", ""] * 10)
        writer.add_array("tokenizer.ggml.scores", [0.5] * 30)
        writer.add_chat_template("x" * 5000)
        writer.add_tensor("f32", VALUES)
        writer.add_tensor("f16", VALUES.astype(np.float16))
        writer.add_tensor("ids", np.arange(7, dtype=np.int32))
        for kind in kinds:
            writer.add_tensor(kind, quants.quantize(VALUES, Kind[kind]), raw_dtype=Kind[kind])
    return path


def test_the_table_of_block_types_is_the_package_s():
    """Names and sizes, of every type that is known here."""
    for number, (name, values, nbytes) in GGUF_BLOCKS.items():
        assert Kind(number).name == name
        assert gguf.GGML_QUANT_SIZES[Kind(number)] == (values, nbytes)


def test_every_value_is_what_the_package_reads(tmp_path):
    """Plain types are mapped, blocks are computed; shapes are torch's way round."""
    path = write(tmp_path / "m.gguf", "BF16", *MADE)
    with torchlift.open(path) as ckpt:
        assert ckpt.format == "gguf"
        assert ckpt.metadata["general.name"] == "tiny"
        assert ckpt.metadata["tokenizer.ggml.tokens"] == "30 values"
        assert ckpt.metadata["tokenizer.chat_template"] == "x" * 1000 + "... (5000 bytes)"
        for found in gguf.GGUFReader(path).tensors:
            expected = torch.from_numpy(
                quants.dequantize(found.data, found.tensor_type)
                if found.name in ("BF16", *MADE)
                else found.data.copy()
            )
            assert torch.equal(ckpt[found.name].to(expected.dtype), expected), found.name
        assert ckpt["f32"].shape == (4, 512)
        text = str(ckpt)
        for key in "f32", "Q4_0":
            sums = ckpt.stats(key)
            assert (sums.min, sums.max) == (ckpt[key].min().item(), ckpt[key].max().item())
    assert "Q4_0   1.1 KiB  Q4_0      4 x 512" in text
    assert read_index(path).entries["Q4_0"].encoding == ("Q4_0",)


def test_a_model_is_loaded_from_blocks(tmp_path):
    """Into meta and live tensors, cast on the way, as the plan says."""
    path = write(tmp_path / "m.gguf", "Q8_0")
    expected = torch.from_numpy(quants.dequantize(quants.quantize(VALUES, Kind.Q8_0), Kind.Q8_0))
    for model in (torchlift.skeleton(nn.Linear, 512, 4, bias=False), nn.Linear(512, 4, bias=False)):
        report = torchlift.load(model, path, rename={"Q8_0": "weight"}.get)
        assert torch.equal(model.weight, expected)
        assert report.loaded
    half = torchlift.skeleton(nn.Linear, 512, 4, bias=False)
    torchlift.load(half, path, rename={"Q8_0": "weight"}.get, dtype=torch.float16)
    assert torch.equal(half.weight, expected.half())
    transposed = nn.Linear(4, 512, bias=False)
    transposed.weight = nn.Parameter(torch.zeros(512, 4).t())
    torchlift.load(transposed, path, rename={"Q8_0": "weight"}.get, mode="copy")
    assert torch.equal(transposed.weight, expected)


def test_without_the_package_the_error_says_which(tmp_path, monkeypatch):
    """Plain tensors of the same file load all the same."""
    path = write(tmp_path / "m.gguf", "Q4_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with torchlift.open(path) as ckpt:
        assert torch.equal(ckpt["f32"], torch.from_numpy(VALUES))
        with pytest.raises(
            FormatError, match=r"'Q4_0': the values are quantised to Q4_0.*pip install gguf"
        ):
            ckpt["Q4_0"]


# -- a model in parts


def write_parts(folder: Path, name: str = "m", **options: bool) -> list[Path]:
    """Three parts, as the package of llama.cpp cuts a model."""
    with gguf_writer(folder / f"{name}.gguf", split_max_tensors=2, **options) as writer:
        writer.add_name("tiny")
        for at in range(5):
            writer.add_tensor(f"w{at}", VALUES[:1] + at)
    return sorted(folder.glob(f"{name}-*.gguf"))


@pytest.mark.parametrize("options", [{}, {"small_first_shard": True}])
def test_the_first_part_s_path_is_the_model(tmp_path: Path, options: dict[str, bool]) -> None:
    """As for llama.cpp, and as the folder of all parts, by every function."""
    parts = write_parts(tmp_path, **options)
    whole = {f"w{at}": torch.from_numpy(VALUES[:1]) + at for at in range(5)}
    assert len(parts) > 2
    for place in (parts[0], tmp_path):
        with torchlift.open(place) as ckpt:
            assert (ckpt.format, ckpt.path) == ("gguf", str(place))
            assert not [name for name in ckpt.metadata if name.startswith("split.")]
        assert torchlift.diff(place, whole).equal
        assert torchlift.verify(place).ok
        torchlift.convert(place, tmp_path / "out" / "x.safetensors", overwrite=True)
        assert torchlift.digest(tmp_path / "out" / "x.safetensors") == torchlift.digest(whole)
    with serving(tmp_path) as server:
        assert torchlift.diff(server.url(parts[0].name), whole).equal


def test_another_part_of_a_model_is_named_and_the_hint_leads_to_the_first(tmp_path: Path) -> None:
    """By path, as bytes, and under another name; a missing part is named."""
    parts = write_parts(tmp_path)
    (tmp_path / "x").mkdir()
    renamed = tmp_path / "x" / "first.gguf"
    renamed.write_bytes(parts[0].read_bytes())
    for place, number in (parts[1], 2), (io.BytesIO(parts[2].read_bytes()), 3), (renamed, 1):
        for door in (torchlift.open, lambda x: torchlift.convert(x, tmp_path / "x.pt")):
            with pytest.raises(FormatError) as caught:
                door(place)
            assert f"part {number} of 3" in caught.value.reason
            first = re.findall(r"\S+-00001-of-00003\.gguf", str(caught.value.expected))[0]
    start = first.partition("-")[0]
    for part in parts:  # as the hint says
        name = part.name.replace("m-", f"{start}-")
        (renamed.parent / name).write_bytes(part.read_bytes())
    assert len(torchlift.open(renamed.parent / first)) == 5
    for part in parts:
        part.rename(tmp_path / "away")
        with pytest.raises(FormatError) as caught:
            torchlift.open(tmp_path)
        assert caught.value.entry == part.name
        (tmp_path / "away").rename(part)


def test_parts_of_two_models_are_not_joined(tmp_path: Path) -> None:
    """A part under another one's name, and a complete model in its place."""
    parts = write_parts(tmp_path)
    good = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    for place in (parts[0], tmp_path):
        with pytest.raises(FormatError) as caught:
            torchlift.open(place)
        assert caught.value.entry in (parts[0].name, parts[1].name)
    parts[1].write_bytes(good)
    assert len(torchlift.open(tmp_path)) == 5
    write(parts[1], "Q8_0")
    with pytest.raises(FormatError) as caught:
        torchlift.open(parts[0])
    assert caught.value.entry in (parts[0].name, parts[1].name)

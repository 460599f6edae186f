"""`save` to a binary file object: from its position, all of it or nothing."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

import torchlift
from torchlift import CheckpointError, PlacementError

STATE = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(3)}


def test_it_is_written_from_the_position_of_the_file(tmp_path: Path) -> None:
    """In memory and on the disk, buffered or raw; what is before it stays."""
    file = io.BytesIO(b"head")
    file.seek(0, 2)
    report = torchlift.save(STATE, file, format="safetensors")
    assert file.getvalue()[:4] == b"head"
    assert torch.equal(load(file.getvalue()[4:])["w"], STATE["w"])
    assert (report.tensors, report.nbytes, report.path) == (2, 36, "a BytesIO")
    for buffering in (0, -1):
        with (tmp_path / "x.pt").open("wb", buffering=buffering) as raw:
            torchlift.save({**STATE, "step": 3}, raw)
        found = torch.load(tmp_path / "x.pt", weights_only=True)
        assert found["step"] == 3
        assert torch.equal(found["b"], STATE["b"])


class Full(io.BytesIO):
    """Takes ten bytes."""

    def write(self, data: object) -> int:
        if self.tell() > 10:
            raise OSError(28, "No space left on device")
        return super().write(bytes(data)[:10])  # type: ignore[call-overload]


def test_after_an_error_it_has_its_former_length_and_position() -> None:
    """Where the file is full, and where the state is refused before a byte is written."""
    file = Full(b"headtail")
    file.seek(4)
    with pytest.raises(CheckpointError, match=r"a Full.*No space left"):
        torchlift.save(STATE, file)
    assert (len(file.getvalue()), file.getvalue()[:4], file.tell()) == (8, b"head", 4)
    plain = io.BytesIO(b"headtail")
    with pytest.raises(PlacementError, match="step"):
        torchlift.save({**STATE, "step": 3}, plain, format="safetensors")
    assert (plain.getvalue(), plain.tell()) == (b"headtail", 0)


def test_text_and_sets_of_files_are_refused() -> None:
    """By name, before anything is written."""
    with pytest.raises(TypeError, match="open for text"):
        torchlift.save(STATE, io.StringIO())  # type: ignore[arg-type]
    for words in ({"format": "dcp"}, {"format": "sharded"}, {"max_shard_size": "1GB"}):
        with pytest.raises(ValueError, match="a file object is one file"):
            torchlift.save(STATE, io.BytesIO(), **words)  # type: ignore[arg-type]


def test_it_takes_the_arguments_that_a_path_takes() -> None:
    """Text for the header, and what is refused of it."""
    file = io.BytesIO()
    torchlift.save(STATE, file, format="safetensors", metadata={"by": "me"})
    assert torchlift.open(io.BytesIO(file.getvalue())).metadata["by"] == "me"
    for wrong in ({"metadata": {"by": "me"}}, {"replicated": "no"}):  # for a torch file; at all
        with pytest.raises(ValueError, match=next(iter(wrong))):
            torchlift.save(STATE, io.BytesIO(), **wrong)


def test_a_file_that_only_goes_on_or_takes_nothing(tmp_path: Path) -> None:
    """One that compresses cannot look for its end; one that is open for reading says so."""
    with gzip.open(tmp_path / "x.gz", "wb") as file:
        torchlift.save(STATE, file)
    with gzip.open(tmp_path / "x.gz", "rb") as file:
        assert torch.equal(torch.load(io.BytesIO(file.read()))["b"], STATE["b"])
    (tmp_path / "r").write_bytes(b"12345")
    with (tmp_path / "r").open("rb") as file, pytest.raises(CheckpointError, match="be written"):
        torchlift.save(STATE, file)

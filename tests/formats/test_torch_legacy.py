"""Torch files from before 1.6: what is read of them is what torch.load reads."""

from __future__ import annotations

import warnings

import pytest
import torch
from checkpoint_files import (
    MAGIC,
    PROTOCOL,
    legacy_tensor,
    pickled,
    same_as,
    write_legacy,
)

import torchlift


@pytest.fixture
def path(tmp_path):
    return tmp_path / "old.pt"


def save(obj, path, **options):
    torch.save(obj, path, _use_new_zipfile_serialization=False, **options)
    return torchlift.open(path)


def load(path, weights_only=True):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the types that such files name are deprecated
        return torch.load(path, weights_only=weights_only)


def equal(path, expected, weights_only=True):
    """Whether every tensor of a file is torch.load's."""
    loaded = load(path, weights_only)
    ckpt = torchlift.open(path)
    assert list(ckpt) == expected
    assert ckpt.format == "torch-legacy"
    return all(same_as(loaded[key], ckpt[key]) for key in expected)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_is_recognised(path, protocol):
    """The magic number is found, whichever protocol wrote it."""
    save({"w": torch.ones(2)}, path, pickle_protocol=protocol)
    # With weights_only=True torch knows the opcodes of protocol 2 only.
    assert equal(path, ["w"], weights_only=False)


@pytest.mark.parametrize("is_zip", [False, True])
def test_pickles_of_text_are_refused_and_torch_saves_them_again(path, is_zip):
    """Protocol 1 writes truth, long integers and the magic number as text."""
    state = {"w": torch.ones(2), "done": True, "seed": 2**40}
    torch.save(state, path, pickle_protocol=1, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(
        torchlift.FormatError,
        match=r"an opcode that torch\.save does not write in protocols 2 to 5",
    ) as caught:
        torchlift.open(path)
    assert "load it with torch.load(path, weights_only=False), and save" in caught.value.hint
    torch.save(load(path, weights_only=False), path)
    assert torchlift.open(path).objects == {"done": True, "seed": 2**40}


def test_bytes_are_little_endian_whatever_the_machine_was(path):
    """Torch converts them when it writes, and never looks at what the file says of it."""
    write_legacy(path, {"w": legacy_tensor()}, head=(MAGIC, PROTOCOL, {"little_endian": False}))
    assert equal(path, ["w"])
    ckpt = torchlift.open(path)
    assert ckpt["w"].tolist() == [[1, 2], [3, 4]]
    assert ckpt.metadata["little_endian"] == "False"


def test_the_first_of_several_objects_counts(path):
    """What was saved behind it into the same file is left alone, as torch leaves it."""
    write_legacy(path, {"w": legacy_tensor()}, behind=pickled(MAGIC) + b"more")
    assert equal(path, ["w"])

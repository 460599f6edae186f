"""TorchScript archives that lie: an error that names the entry."""

from __future__ import annotations

import zipfile

import pytest
from checkpoint_files import (
    Script,
    tensor,
    write_script,
)

import torchlift


@pytest.fixture
def path(tmp_path):
    return tmp_path / "bad.pt"


# ---- TorchScript


def test_a_script_made_by_hand_is_read(path):
    """The helper of these tests writes what torch writes."""
    state = {"w": tensor(), "b": tensor(), "other": tensor(), "n": 5, "training": True}
    inner = Script("Model", {"w": tensor(), "plain": Script("Plain", {"w": tensor()})})
    ckpt = torchlift.open(write_script(path, Script("Model", {**state, "inner": inner})))
    assert list(ckpt) == ["w", "b", "other", "inner.w", "inner.plain.w"]
    assert ckpt.objects == {"n": 5}


@pytest.mark.parametrize("code", [b"", b"class Model(Module):\n", bytes(1 << 26), b"\xff\n"])
def test_the_text_of_the_classes_is_not_read(path, code):
    """Whatever it says, or inflates to, every tensor comes by its path."""
    state = {"w": tensor(), "0": tensor(), "undeclared": tensor(), "odd name": 2}
    write_script(path, Script("Model", state), code=code, method=zipfile.ZIP_DEFLATED)
    ckpt = torchlift.open(path)
    assert (list(ckpt), dict(ckpt.objects)) == (["w", "0", "undeclared"], {"odd name": 2})

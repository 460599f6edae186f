"""TorchScript archives that lie: an error that names the entry."""

from __future__ import annotations

import os
import time
import zipfile

import pytest
from checkpoint_files import (
    Call,
    Script,
    script_opcodes,
    tensor,
    write_script,
)
from damaged_files import refused

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


@pytest.mark.parametrize("root", [{}, [1], 5, tensor(), None])
def test_a_script_without_a_module_is_refused(path, root):
    """Its pickle must hold one."""
    assert refused(write_script(path, root), "does not contain a module").entry == "m/data.pkl"


def test_a_global_in_a_script_is_listed_and_never_called(path):
    """Only the archive's own classes have a meaning."""
    evil = Call(os.system, "touch /tmp/torchlift-was-here")
    write_script(path, Script("Model", {"w": tensor(), "x": evil}), constants=(evil,))
    ckpt = torchlift.open(path)
    assert ckpt.blocked == ("posix.system",)
    assert dict(ckpt.blocked_keys) == {
        "CONSTANTS.c0": "posix.system", "x": "posix.system",
    }  # fmt: skip
    assert list(ckpt) == ["w"]
    assert not os.path.exists("/tmp/torchlift-was-here")


@pytest.mark.parametrize("depth", [150, 5000])
def test_modules_that_nest_too_deep_are_refused(path, depth):
    """Before Python's own stack ends."""
    opcodes = b"\x80\x02" + b"c__torch__\nModel\n)\x81}X\1\0\0\0m" * depth
    opcodes += b"c__torch__\nModel\n)\x81" + script_opcodes({"w": tensor()}) + b"b"
    write_script(path, None, data=opcodes + b"sb" * depth + b".")
    refused(path, "nest")


def test_a_module_inside_itself_is_refused(path):
    """Its names would never end."""
    weights = script_opcodes({"w": tensor()})
    opcodes = b"\x80\x02c__torch__\nModel\n)\x81q\xc8" + weights + b"X\1\0\0\0mh\xc8sb."
    write_script(path, None, data=opcodes)
    refused(path, "contain themselves")


def test_shared_modules_do_not_unfold(path):
    """Sixty levels, each of which holds the one below twice: 2**60 names."""
    opcodes = b"\x80\x02c__torch__\nModel\n)\x81" + script_opcodes({"w": tensor()}) + b"bq\xc8"
    for _ in range(60):
        pair = b"}(X\1\0\0\0ah\xc8X\1\0\0\0bh\xc8u"
        opcodes += b"0c__torch__\nModel\n)\x81" + pair + b"bq\xc8"
    start = time.process_time()
    refused(
        write_script(path, None, data=opcodes + b"."),
        "expands to far more|storage of a tensor is missing",
    )
    assert time.process_time() - start < 5


def test_a_module_named_as_what_torchlift_names_is_refused(path):
    """Its tensors could not be told from constants."""
    inner = Script("Model", {"w": tensor()})
    write_script(path, Script("Model", {"CONSTANTS": inner}), constants=(1,))
    assert refused(path, "the name of the program's constants").entry == "CONSTANTS"


@pytest.mark.parametrize(
    ("bad", "match"),
    [(tensor((5,), (1,)), "outside its storage"), (tensor(storage="9"), "storage of a tensor"),
     (tensor((-1,), (1,)), "invalid size"), (tensor(numel=2**40), "the size of a storage differs")],
)  # fmt: skip
def test_the_tensors_of_a_script_are_checked(path, bad, match):
    """As those of any torch file."""
    refused(write_script(path, Script("Model", {"w": bad})), match)


def test_constants_that_are_no_tuple_are_refused(path):
    """They are named by their place."""
    write_script(path, Script("Model", {}), constants={"a": 1})
    assert refused(path, "constants are not a tuple").entry == "m/constants.pkl"

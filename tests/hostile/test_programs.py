"""TorchScript archives and exported programs that lie: an error that names the entry."""

from __future__ import annotations

import json
import os
import time
import zipfile

import pytest
import torch
from checkpoint_files import (
    Call,
    Script,
    pickled,
    script_opcodes,
    tensor,
    weight,
    write_program,
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


# ---- exported programs


def test_a_program_made_by_hand_is_read(path):
    """The helper of these tests writes what torch writes."""
    write_program(path, {"w": weight(), "v": weight((2,), (1,), storage_offset={"as_int": 2})})
    ckpt = torchlift.open(path)
    assert ckpt.aliases == (("w", "v"),)
    assert ckpt.entries["w"].is_parameter


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        (weight((5,), (1,)), "outside its storage"),
        (weight((-1,), (1,)), "invalid size"),
        (weight((2,), (-1,)), "invalid stride"),
        (weight((2,), (1, 1)), "numbers of strides and dimensions"),
        (weight((2.0,), (1,)), "invalid size"),
        (weight((True,), (1,)), "invalid size"),
        (weight(("s0",), (1,)), "invalid size"),
        (weight((2**40,), (0,)), "far larger"),
        (weight(storage_offset={"as_int": -1}), "invalid storage offset"),
        (weight(storage_offset={"as_expr": "s0"}), "invalid storage offset"),
        (weight(storage_offset=0), "wrong 'storage_offset'"),
        (weight(dtype=99), "torchlift does not know this dtype"),
        (weight(dtype="7"), "wrong 'dtype'"),
        (weight(dtype=True), "wrong 'dtype'"),
        (weight(device={}), "wrong 'type'"),
        (weight(tensor_meta={**weight()["tensor_meta"], "sizes": None}), "wrong 'sizes'"),
        (weight(path_name="weight_9"), "record of a tensor is missing"),
        (weight(path_name="../weight_0"), "record of a tensor is missing"),
        (weight(path_name=5), "wrong 'path_name'"),
        (weight(tensor_meta=[1]), "wrong 'layout'"),
        (weight(use_pickle="yes"), "wrong 'use_pickle'"),
        (5, "wrong 'path_name'"),
        (weight(use_pickle=True), "lacks its directory"),
    ],
)
def test_an_impossible_weight_is_refused(path, bad, match):
    """Every number and name is checked against the archive, and the error names the weight."""
    write_program(path, {"v": weight(), "w": bad})
    assert refused(path, match).entry in ("w", "m/data/weights/weight_0")


@pytest.mark.parametrize(
    ("listed", "match"),
    [(b"", "not valid JSON"), (b"[]", "not a JSON object"), (b"{}", "lacks its config"),
     (b'{"config": []}', "lacks its config"), (b'{"config": {"a": 1, "a": 2}}', "twice"),
     (b"[" * 100_000, "nests too deep")],
)  # fmt: skip
def test_a_list_of_weights_that_is_none_is_refused(path, listed, match):
    """The record is named."""
    refused(write_program(path, listed), match)


def test_a_sparse_weight_is_listed_and_blocked(path):
    """The record does not say how its indices and values lie in it."""
    write_program(path, {"w": weight(), "sparse": weight(layout=1)})
    ckpt = torchlift.open(path)
    assert list(ckpt) == ["w"]
    assert dict(ckpt.blocked_keys) == {"sparse": "torch._utils._rebuild_sparse_tensor"}
    assert dict(ckpt.blocked_tensors) == {"sparse": 1}


def test_a_weight_that_is_not_described_is_refused(path):
    """An object of a class has no shape, and is not a weight."""
    write_program(path, {"w": weight(), "object": weight(tensor_meta=None)})
    error = refused(path, "layout")
    assert (error.entry, error.expected) == ("object", "int")


def test_a_weight_that_was_not_saved_is_refused(path):
    """Of a program that was exported with fake tensors, torch makes zeros."""
    empty = {"data/weights/weight_1": b""}
    write_program(path, {"w": weight(), "fake": weight(path_name="weight_1")}, empty)
    assert refused(path, "was not saved.*instead of fake tensors").entry == "fake"
    write_program(path, {"none": weight((0, 2), path_name="weight_1")}, empty)
    assert torchlift.open(path)["none"].shape == (0, 2)


def test_a_pickled_weight_cannot_be_read_a_thousand_times(path, tmp_path):
    """One file under many names would be read for each of them."""
    torch.save(torch.ones(2), tmp_path / "one")
    one = {"data/weights/weight_1": (tmp_path / "one").read_bytes()}
    pickled_weight = weight(path_name="weight_1", use_pickle=True)
    write_program(path, {"w": pickled_weight}, one)
    assert torchlift.open(path)["w"].tolist() == [1, 1]
    write_program(path, {f"w{i}": pickled_weight for i in range(1000)}, one)
    assert refused(path, "two tensors use one pickled file").entry == "w1"


def test_a_global_in_a_pickled_weight_is_listed(path, tmp_path):
    """It is read as any torch file is."""
    with zipfile.ZipFile(tmp_path / "evil", "w") as archive:
        archive.writestr("a/data.pkl", pickled(Call(os.system, "true")))
        archive.writestr("a/version", "3")
    evil = {"data/weights/weight_1": (tmp_path / "evil").read_bytes()}
    write_program(path, {"w": weight(path_name="weight_1", use_pickle=True)}, evil)
    assert torchlift.open(path).blocked == ("posix.system",)


def test_a_package_without_programs_says_what_it_is(path):
    """Weights of compiled programs are inside the programs."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/archive_format", "pt2")
        archive.writestr("m/version", "6")
        archive.writestr("m/data/aotinductor/model/x.so", b"\x7fELF")
    refused(path, r"compiled programs.*torch\.export\.save")


def test_a_program_without_its_weights_is_refused(path):
    """The list of weights is missing."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/archive_format", "pt2")
        archive.writestr("m/version", "6")
        archive.writestr("m/models/model.json", json.dumps({}))
    refused(path, "weights of a program are missing")


def test_two_dtypes_in_one_record_are_refused(path):
    """torch reads the record as the first, and gives both tensors that dtype."""
    write_program(path, {"a": weight((2,), (1,)), "b": weight((4,), (1,), dtype=6)})
    assert refused(path, "two dtypes, and torch reads one").entry == "b"


def test_a_record_that_is_no_whole_number_of_elements_is_refused(path):
    """As torch refuses it."""
    write_program(path, {"a": weight((2,), (1,))}, {"data/weights/weight_0": bytes(15)})
    assert refused(path, "not a multiple of the element size").entry == "a"


def test_a_program_of_a_big_endian_machine_is_refused(path):
    """torch takes its numbers as they are."""
    write_program(path, {"a": weight()}, {"byteorder": b"big"})
    assert refused(path, "big-endian machine").entry == "m/byteorder"


def test_a_version_of_programs_that_torch_does_not_read_is_refused(path):
    """It could mean something else by the same words."""
    write_program(path, {"a": weight()}, {"archive_version": b"0"})
    assert list(torchlift.open(path)) == ["a"]
    write_program(path, {"a": weight()}, {"archive_version": b"9"})
    refused(path, "torch does not read")


@pytest.mark.parametrize("record", ["data.pkl", "constants.pkl"])
def test_a_file_of_two_formats_is_refused(path, record):
    """torch.load would read another content than torch.export.load."""
    write_program(path, {"a": weight()}, {record: pickled({"w": 1}), "version": b"3"})
    refused(path, "the archive has two contents")

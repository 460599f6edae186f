"""What a path is, found from its content, with nothing but the standard library."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import shlex
import shutil
import subprocess
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_files import pickled, write_safetensors
from damaged_files import refused
from torch.package import PackageExporter, PackageImporter

import torchlift
from torchlift.errors import CheckpointError, FormatError, NotFound, UnsafeError
from torchlift.formats.detect import read_index

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"
SKLEARN = b"\x80\x04\x95\x99\0\0\0\0\0\0\0\x8c\x0bsklearn.svm\x94\x8c\x03SVC\x94\x93\x94)\x81"
HTML = b"<!DOCTYPE html><html>Sign in"
#: (content, words of the error, name of the file)
OTHERS = [
    (b"", "an empty file", "x.pth"),
    (bytes(1000), "zeros only", "x.pt"),
    (b"hello world\n" * 50, "a text file.*found hello world", "x.pt"),
    ("ü".encode() * 600, "a text file", "x.pt"),
    (b"a" + "ü".encode() * 600, "a text file", "x.pt"),
    (HTML, "web page.*login or error page", "x.ckpt"),
    (LFS, "git lfs pull", "pytorch_model.bin"),
    (b"\x89HDF\r\n\x1a\n" + bytes(99), "HDF5.*h5py", "x.h5"),
    (gzip.compress(b"x", mtime=0), "gzip.* archive.*Decompress", "x.pt"),
    (b"\xfd7zXZ\0" + bytes(9), "xz.* archive.*Decompress", "x.pt"),
    (b"\x28\xb5\x2f\xfd" + bytes(9), "zstd archive.*Decompress", "x.pt"),
    (b"Rar!\x1a\x07\x01\0" + bytes(99), "7z or rar", "x.rar"),
    (b"7z\xbc\xaf\x27\x1c" + bytes(99), "7z or rar", "x.7z"),
    (b"\x08\x08\x12\x07pytorch\x1a\x032.1:\x90", "an ONNX model.*numpy_helper", "x.pt"),
    (b"\x08\x0e:H\n\x0e\n\x01x\n\x01w", "an ONNX model", "x.pt"),
    (b"\x08\x01\x12\xf0\x8d\x02\n\x8f", "SavedModel.*tf.train.load_checkpoint", "x.pt"),
    (SKLEARN, r"a pickle that torch.save did not write.*found sklearn\.svm\.SVC", "x.pt"),
    (b"\x80\x03csklearn.svm\nSVC\nq\0)\x81", r"found sklearn\.svm\.SVC", "x.pt"),
    (pickled({"a": 1}), "a pickle that torch.save did not write", "x.pt"),
    (pickled({"a": 1}, 4), "a pickle that torch.save did not write", "x.pt"),
    (b"tjgg" + bytes(99), "ggml", "ggml-model.bin"),
    (b"algg" + bytes(99), "ggml", "adapter.bin"),
    (bytes(4) + b"ET12" + bytes(99), "ExecuTorch", "x.pte"),
    (b"@\0\0\0FT01FH01" + bytes(99), "ExecuTorch", "x.ptd"),
    (b"ptrt" + bytes(99), "TensorRT", "x.engine"),
    (b"ftrt" + bytes(99), "TensorRT", "x.plan"),
    (bytes(4) + b"TFL3" + bytes(99), "TensorFlow Lite", "x.tflite"),
    (b"\x81\xa1w\xc7\x11\x01\x93\x91\x01\xa7float32\xc4\4" + bytes(4), "msgpack", "x.msgpack"),
    (b"\xde\0\2\xa6params" + bytes(40), "msgpack", "params.msgpack"),
    (b"\xde\xad\xbe\xef" * 9, "not a checkpoint that torchlift reads", "x.pt"),
]


@pytest.mark.parametrize(("content", "match", "name"), OTHERS)
def test_a_file_of_another_program_is_named_by_its_path_and_in_its_folder(
    tmp_path: Path, content: bytes, match: str, name: str
) -> None:
    """By every door it is one error, with the path of the file and what to do with it."""
    (tmp_path / name).write_bytes(content)
    (tmp_path / "README.md").write_text("read me")
    kind = UnsafeError if b"sklearn" in content else FormatError  # it would call what it names
    texts = set()
    for path in (tmp_path / name, tmp_path):
        for call in (torchlift.open, torchlift.verify, lambda p: torchlift.convert(p, p / "x.pt")):
            with pytest.raises(kind, match=match) as caught:
                call(path)
            assert caught.value.file == str(tmp_path / name)
            assert caught.value.hint
            texts.add(str(caught.value))
    assert len(texts) == 1


def archive(*records: str) -> bytes:
    """A zip archive with these records."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        for record in records:
            made.writestr(record, "x")
    return file.getvalue()


#: A file that no folder counts as weights, or a name in a folder that says what the folder is.
NAMED = [
    ("x.pt", b'{"architectures": []}',
     "not an index.*'architectures'.*Pass the path of the weights"),
    ("x.pt", b'{"epoch": 3}', "the JSON file is not an index.*found {'epoch': 3}"),
    ("x.pt", b'{"error":"Invalid password.\\u001b[2J"}', r"not an index.*'Invalid password\.\\x1b"),
    ("x.pt", b"\0\5\x16\7\0\2\0\0Mac OS X" + bytes(99), r"notes of macOS \(AppleDouble\)"),
    ("x.zip", archive("config.json", "model.weights.h5"), "a Keras model.*h5py"),
    ("x.zip", archive("config.json", "x/saved_model.pb"), "a TensorFlow SavedModel"),
    ("x.zip", archive("weights/model.safetensors"),
     "an archive with a checkpoint in it; .*Unpack it first"),
    ("x.zip", archive("config.json", "notes.txt"), "torch.save did not write this zip archive"),
    ("x.zip", archive("serialized_exported_program.json", "serialized_state_dict.pt"),
     "an exported program"),
    ("x.zip", archive("m/archive_format", "m/models/model.json", "m/data.pkl"),
     "an exported program"),
    ("x.zip", archive("m/archive_format", "m/data/aotinductor/model/x.so"),
     "a compiled program.*state dict"),
    ("saved_model.pb", b"x", "a TensorFlow SavedModel"),
    ("variables.data-00000-of-00001", b"x", "a TensorFlow checkpoint"),
    ("_CHECKPOINT_METADATA", b"x", "a checkpoint of orbax"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "match"), NAMED)
def test_a_file_or_a_folder_of_another_program_says_what_it_is(tmp_path, name, content, match):
    """A configuration, notes of a system, an archive by its records, a folder by its names."""
    (tmp_path / name).write_bytes(content)
    refused(tmp_path / name if name in ("x.pt", "x.zip") else tmp_path, match)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("items", [1, 2])
def test_a_part_of_a_distributed_checkpoint_names_the_folder(tmp_path, items):
    """Its torch files in a row would pass for the last of them: one tensor, and no error."""
    state = {f"w{number}": torch.ones(4) for number in range(items)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    assert read_index(tmp_path).entries.keys() == state.keys()
    (tmp_path / "__0.metadata").write_bytes((tmp_path / ".metadata").read_bytes())
    for name in ("__0_0.distcp", "__0.metadata"):
        with pytest.raises(FormatError) as caught:
            read_index(tmp_path / name)
        assert caught.value.reason == "this is one file of a DCP checkpoint"
        assert caught.value.hint == f"Open {str(tmp_path)!r}."
        assert caught.value.file == str(tmp_path / name)


def test_an_empty_path_is_not_the_current_directory(tmp_path, monkeypatch):
    """A setting that nobody set must not load what happens to lie there."""
    write_safetensors(tmp_path / "model.safetensors", {})
    monkeypatch.chdir(tmp_path)
    assert read_index(".").entries == {}
    for name in ("", b""):
        with pytest.raises(FormatError, match="the path is empty"):
            read_index(name)


def test_paths_may_be_text_bytes_or_objects(tmp_path):
    """Everything that names a file is accepted, and the index holds its absolute path."""
    path = write_safetensors(tmp_path / "x", {})
    for name in (path, str(path), os.fsencode(path), os.path.relpath(path)):
        assert read_index(name).path == str(path)


# ---- what people's machines leave


def test_a_set_of_shards_is_whole_beside_the_notes_of_macos(tmp_path: Path) -> None:
    """Each shard has a file of notes, and so has the index."""
    state = {f"w{n}": torch.ones(64) for n in range(3)}
    torchlift.save(state, tmp_path / "model.safetensors.index.json", max_shard_size=300)
    names = os.listdir(tmp_path)
    assert len(names) == 4
    for name in names:
        (tmp_path / f"._{name}").write_bytes(b"\0\5\x16\7" + bytes(40))
    assert len(torchlift.open(tmp_path)) == 3
    assert torchlift.verify(tmp_path).ok


@pytest.mark.parametrize("top", ["m", "it's $HOME", "x" * 150])
def test_a_torch_file_that_was_unpacked_is_named_and_its_way_back_works(
    top: str, tmp_path: Path
) -> None:
    """As an unpacker of a browser does without being asked; also from the folder around it."""
    torch.save({"w": torch.arange(9.0)}, tmp_path / f"{top}.pt")
    with zipfile.ZipFile(tmp_path / f"{top}.pt") as archive:
        archive.extractall(tmp_path / "x")
    parts = [tmp_path / "x" / top / name for name in ("", "data.pkl", "version", "data", "data/0")]
    for place in (tmp_path / "x", *parts):
        for call in (torchlift.open, torchlift.verify):
            with pytest.raises(FormatError, match="unpacked into a folder") as caught:
                call(place)
    assert caught.value.file == str(tmp_path / "x" / top)
    if not shutil.which("zip"):
        pytest.skip("no zip on this machine, which the hint names")
    command = shlex.split(str(caught.value.hint).partition(": ")[2])
    subprocess.run([*command, "-q"], cwd=tmp_path / "x", check=True)
    for read in torchlift.open, torch.load:
        assert read(tmp_path / "x" / "model.pt")["w"].tolist() == [*range(9)]


def test_the_file_of_a_save_that_raised_is_named(tmp_path: Path) -> None:
    """torch.save leaves it where the checkpoint of before was."""

    class Refuses:
        def __reduce__(self) -> str:
            raise RuntimeError("not me")

    with pytest.raises(RuntimeError, match="not me"):
        torch.save({"w": torch.ones(3), "x": Refuses()}, tmp_path / "m.pt")
    with pytest.raises(FormatError, match=r"data\.pkl is missing: the torch\.save .* raised"):
        torchlift.open(tmp_path / "m.pt")


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_the_pickle_of_a_torch_file_alone_is_named(tmp_path: Path, protocol: int) -> None:
    """Taken out of its archive, it has no values. The file that it is from has."""
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt", pickle_protocol=protocol)
    with zipfile.ZipFile(tmp_path / "m.pt") as archive:
        (tmp_path / "x").write_bytes(archive.read("m/data.pkl"))
    with pytest.raises(CheckpointError, match=r"the data\.pkl of a torch file") as caught:
        torchlift.open(tmp_path / "x")
    assert str(caught.value.hint).startswith("Open the torch file itself.")
    assert len(torchlift.open(tmp_path / "m.pt")) == 1


def test_a_checkpoint_of_tensorflow_is_named_by_its_prefix(tmp_path: Path) -> None:
    """Which is what TensorFlow's users pass, and no file. So are its files, and its folder."""
    for name in "ckpt-1[a].index", "ckpt-1[a].data-00000-of-00001", "checkpoint":
        (tmp_path / name).write_bytes(b"\0\0\6\x08\1\x1a\2\x08\1" + bytes(99))
    for name in "ckpt-1[a]", "ckpt-1[a].index", "ckpt-1[a].data-00000-of-00001", "":
        for call in (torchlift.open, torchlift.verify, torchlift.digest):
            with pytest.raises(FormatError, match="a TensorFlow checkpoint") as caught:
                call(tmp_path / name)
            assert "tf.train.load_checkpoint" in str(caught.value.hint)
            assert caught.value.file == str(tmp_path / name).rstrip("/")
    with pytest.raises(NotFound):
        torchlift.open(tmp_path / "ckpt")


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("form", ["dict", "array", "nested"])
def test_a_pickle_of_arrays_is_named_and_its_way_out_works(
    tmp_path: Path, protocol: int, form: str
) -> None:
    """Nothing of it is unpickled by us."""
    array, path = np.arange(3.0), tmp_path / "m.pkl"
    state = {"dict": {"w": array}, "array": array, "nested": {"model": {"w": array}, "n": 1}}[form]
    path.write_bytes(pickle.dumps(state, protocol))
    with pytest.raises(UnsafeError, match="a pickle of NumPy arrays") as caught:
        torchlift.open(path)
    assert all(name in str(caught.value.hint) for name in ("pickle.load", "torch.from_numpy"))
    torchlift.save({"w": torch.from_numpy(array)}, tmp_path / "m.safetensors")


def test_a_package_of_torch_is_named(tmp_path: Path) -> None:
    """It is a zip archive of another kind; the function that its hint names reads it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.package uses storages that torch itself deprecates
        with PackageExporter(tmp_path / "p.pt") as package:
            package.save_pickle("a", "b.pkl", {"w": torch.ones(2)})
        with pytest.raises(FormatError, match=r"a package of torch\.package") as caught:
            torchlift.open(tmp_path / "p.pt")
        assert "torch.package.PackageImporter" in str(caught.value.hint)
        assert PackageImporter(tmp_path / "p.pt").load_pickle("a", "b.pkl")["w"].sum() == 2


@pytest.mark.filterwarnings("ignore")  # of torch.export, about its own use of torch
def test_an_exported_program_is_named_and_its_way_out_works(tmp_path: Path) -> None:
    """torch reads the program, and `torchlift.load` takes its state dict."""
    saved, model = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
    path = tmp_path / "m.pt2"
    torch.export.save(torch.export.export(saved, (torch.ones(2),)), path)
    error = refused(path, r"an exported program \(torch\.export\.save\)")
    line = str(error.hint).partition(": ")[2]
    assert line == "torchlift.load(model, torch.export.load(path).state_dict)"
    eval(line, {"torchlift": torchlift, "torch": torch, "model": model, "path": path})
    assert torch.equal(model.weight, saved.weight)
    assert torch.equal(model.bias, saved.bias)


def test_a_null_character_in_a_path_is_a_format_error():
    """What the operating system refuses as a path is no other kind of exception."""
    with pytest.raises(FormatError):
        read_index("a\0b")

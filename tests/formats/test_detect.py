"""What a path is, found from its content, with nothing but the standard library."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tarfile
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_files import pickled, write_safetensors
from damaged_files import refused

from torchlift.errors import FormatError, UnsafeError
from torchlift.formats import read_index


def test_formats_load_without_torch(tmp_path):
    """Importing the readers and reading a file loads neither torch nor an unpickler."""
    torch.save({"w": torch.ones(1)}, tmp_path / "x.pt")
    code = (
        "import sys, torchlift.formats, torchlift.formats.summary as s\n"
        "index = torchlift.formats.read_index(sys.argv[1])\n"
        "s.to_text(index), s.to_html(index), s.to_json(index)\n"
        "heavy = {'torch', 'numpy', 'safetensors', 'pickle', '_pickle', 'zipfile'}\n"
        "loaded = heavy & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x.pt")], check=True, env=environment
    )


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "an empty file"),
        (bytes(1000), "zeros only"),
        (b"hello world\n" * 50, "a text file.*found hello world"),
        (b"<!DOCTYPE html><html>", "web page.*login or error page"),
        (b'{"architectures": []}', "a model's configuration.*Give the path of the weights"),
        (b'{"epoch": 3}', "a JSON text that is no index.*found the names epoch"),
        (
            b'{"error":"Invalid username or password.\\u001b[2J"}',
            r"an error page in JSON.*found error: Invalid username or password\.\\x1b.*a token",
        ),
        (b'{"message":"Not Found","status":"404"}', "an error page in JSON.*found message: Not"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "git lfs pull"),
        (b"\x89HDF\r\n\x1a\n" + bytes(64), "HDF5.*h5py"),
        (gzip.compress(b"x", mtime=0), "gzip.* archive.*Decompress"),
        (b"\xfd7zXZ\0" + bytes(9), "xz.* archive.*Decompress"),
        (b"\x28\xb5\x2f\xfd" + bytes(9), "zstd archive.*Decompress"),
        (b"\x08\x08\x12\x07pytorch\x1a\x032.1:\x90", "an ONNX model.*numpy_helper"),
        (b"\x08\x0e:H\n\x0e\n\x01x\n\x01w", "an ONNX model"),
        (b"\x08\x01\x12\xf0\x8d\x02\n\x8f", "a TensorFlow SavedModel.*tf.train.load_checkpoint"),
        (
            b"\x80\x04\x95\x99\0\0\0\0\0\0\0\x8c\x0bsklearn.svm\x94\x8c\x03SVC\x94\x93\x94)\x81",
            r"a pickle that torch.save did not write.*found sklearn\.svm\.SVC",
        ),
        (b"\x80\x03csklearn.svm\nSVC\nq\0)\x81", r"found sklearn\.svm\.SVC"),
        (pickled({"a": 1}), "a pickle that torch.save did not write"),
        (pickled({"a": 1}, 4), "a pickle that torch.save did not write"),
        (b"\xde\xad\xbe\xef" * 9, "not a checkpoint that torchlift reads"),
        ("ü".encode() * 600, "a text file"),
        (b"a" + "ü".encode() * 600, "a text file"),
    ],
)
def test_other_files_say_what_they_are(tmp_path, content, match):
    """The error names the kind of file and what to do with it."""
    path = tmp_path / "x.pt"
    path.write_bytes(content)
    kind = UnsafeError if b"sklearn" in content else FormatError  # it would call what it names
    assert refused(path, match, kind).hint or content[:1] == b"{"


def test_a_tar_archive_says_what_it_is(tmp_path):
    """Archives around a checkpoint are to be unpacked."""
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(os.path.dirname(__file__), "folder", filter=_named_py)
    refused(path, r"tar archive that torch\.save did not write.*Unpack it first")


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ("model.weights.h5", "a Keras model.*h5py"),
        ("x/saved_model.pb", "a TensorFlow SavedModel"),
        ("weights/model.safetensors", "an archive with a checkpoint in it; .*Unpack it first"),
        ("notes.txt", "a zip archive that torch.save did not write"),
    ],
)
def test_a_zip_archive_says_what_it_is(tmp_path, record, match):
    """The names of its records tell."""
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("config.json", "{}")
        archive.writestr(record, "x")
    refused(path, match)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("saved_model.pb", "a TensorFlow SavedModel"),
        ("variables.data-00000-of-00001", "a TensorFlow checkpoint"),
        ("_CHECKPOINT_METADATA", "a checkpoint of orbax"),
    ],
)
def test_a_directory_of_another_program_says_what_it_is(tmp_path, name, match):
    """The names of its files tell."""
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(FormatError, match=match):
        read_index(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("items", [1, 2])
def test_a_part_of_a_distributed_checkpoint_names_the_folder(tmp_path, items):
    """Its torch files in a row would pass for the last of them: one tensor, and no error."""
    state = {f"w{number}": torch.ones(4) for number in range(items)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    assert read_index(tmp_path).entries.keys() == state.keys()
    for name in ("__0_0.distcp", ".metadata"):
        with pytest.raises(FormatError) as caught:
            read_index(tmp_path / name)
        assert caught.value.reason == "a part of a distributed checkpoint (DCP)"
        assert caught.value.hint == f"Open the folder, {str(tmp_path)!r}."
        assert caught.value.file == str(tmp_path / name)


def test_a_truncated_download_says_how_many_bytes_are_missing(tmp_path):
    """Where the header tells; of a zip archive, whose directory is at the end, nothing does."""
    header = {"w": {"dtype": "F32", "shape": [100], "data_offsets": [0, 400]}}
    path = write_safetensors(tmp_path / "x", header, bytes(400))
    os.truncate(path, path.stat().st_size - 150)
    refused(path, "the file is truncated: 150 bytes are missing")
    torch.save({"w": torch.ones(100)}, path)
    os.truncate(path, 900)
    refused(path, "without its directory.*truncated: an interrupted save or download")


def _named_py(info):
    return info if info.isdir() or info.name.endswith(".py") else None


def test_a_missing_path_is_a_format_error(tmp_path):
    """A path that does not exist is named like every other problem."""
    error = refused(tmp_path / "none.pt", "does not exist")
    assert isinstance(error.__cause__, FileNotFoundError)


def test_an_empty_path_is_not_the_current_directory(tmp_path, monkeypatch):
    """A setting that nobody set must not load what happens to lie there."""
    write_safetensors(tmp_path / "model.safetensors", {})
    monkeypatch.chdir(tmp_path)
    assert read_index(".").entries == {}
    for name in ("", b""):
        with pytest.raises(FormatError, match="an empty path"):
            read_index(name)


def test_a_tilde_is_not_expanded_and_the_error_says_so(monkeypatch, tmp_path):
    """As everywhere in Python."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FormatError, match=r"A ~ stands for nothing here: expand it\."):
        read_index("~/model.pt")


def test_a_pipe_is_refused_without_waiting(tmp_path):
    """Opening a named pipe would block for ever."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    refused(path, "not a regular file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path):
    """The operating system's reason is in the message."""
    path = tmp_path / "x.pt"
    path.write_bytes(b"")
    path.chmod(0)
    refused(path, "cannot be read.*Permission denied")


def test_paths_may_be_text_bytes_or_objects(tmp_path):
    """Everything that names a file is accepted, and the index holds its absolute path."""
    path = write_safetensors(tmp_path / "x", {})
    for name in (path, str(path), os.fsencode(path), os.path.relpath(path)):
        assert read_index(name).path == str(path)


def test_a_null_character_in_a_path_is_a_format_error():
    """What the operating system refuses as a path is no other kind of exception."""
    with pytest.raises(FormatError):
        read_index("a\0b")

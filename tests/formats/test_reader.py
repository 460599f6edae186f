"""Formats that other packages add: asked last, checked as ours are, named where they are wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torchlift
from torchlift.errors import CheckpointError

#: A format of one float32 vector behind four bytes; what else it claims, the environment says.
CODE = """
import json, os
from dataclasses import replace
from torchlift.formats import Chunk, Content, Index, Reader, Storage, TensorEntry

assert "torch" not in __import__("sys").modules or os.environ.get("TORCH")

def fits(content):
    if os.environ.get("BREAK") == "fits":
        raise OverflowError("no such head")
    known = content.head[:4] == b"MINE" or "mine" in content.names
    return known or (content.records and "mine" in content.records) or os.environ.get("GREEDY")

def read(content):
    path = os.path.join(content.path, "mine") if content.names else content.path
    if content.names:
        return replace(content.read_file(path, content.budget), path=content.path)
    source, claims = content.source, json.loads(os.environ.get("CLAIMS", "{}"))
    start = content.records["mine"].offset if content.records else 4
    nbytes = source.size - 4 if not content.records else 8
    shape = (nbytes // 4,)
    chunk = Chunk(path, **{"offset": start, "nbytes": nbytes, "start": (0,), "shape": shape,
                           **{k: tuple(v) if isinstance(v, list) else v
                              for k, v in claims.get("chunk", {}).items()}})
    entry = TensorEntry(**{"key": "w", "dtype": "float32", "shape": shape, "stride": (1,),
                           "nbytes": nbytes, "location": "cpu", "storage": "w", "chunks": (chunk,),
                           **{k: tuple(v) if isinstance(v, list) else v
                              for k, v in claims.get("entry", {}).items()}})
    storage = Storage(path, start, claims.get("stored", nbytes), "cpu", claims.get("crc32"))
    files = {claims.get("file", path): source.stamp}
    objects = {claims.get("object", "step"): 3}
    made = Index(path, "torch-zip", {"w": entry}, {"w": storage}, files, objects, {"by": "them"},
                 **{k: tuple(v) for k, v in claims.get("more", {}).items()})
    return claims.get("instead", made)

READER = Reader(fits, read) if os.environ.get("BREAK") != "kind" else fits
"""


def installed(folder: Path, *names: str) -> Path:
    """Lay out a package as an installer does, with entry points of these names; its folder."""
    site = folder / "site"
    made = site / "their_formats-1.0.dist-info"
    made.mkdir(parents=True)
    (site / "their_formats.py").write_text(CODE)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: their-formats\nVersion: 1.0\n")
    points = "".join(f"{name} = their_formats:READER\n" for name in names)
    (made / "entry_points.txt").write_text(f"[torchlift.formats]\n{points}")
    return site


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder that has a package with one format."""
    return installed(tmp_path, "mine")


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A file of the format."""
    path = tmp_path / "weights.mine"
    path.write_bytes(b"MINE" + torch.tensor([1.0, 2.0]).numpy().tobytes())
    return path


def in_child(site: Path, code: str, *arguments: object, **environment: str) -> Any:
    """Run a script in a process that has the package; what it prints, as JSON."""
    paths = os.pathsep.join([str(site), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


LOOK = """
import sys, json
from torchlift.formats import read_index
from torchlift.errors import CheckpointError
try:
    index = read_index(sys.argv[1])
    found = [index.format, list(index.entries), dict(index.objects), dict(index.metadata)]
except CheckpointError as error:
    found = [type(error).__name__, error.reason, error.file, str(error)]
loaded = [name for name in ("torch", "importlib.metadata", "their_formats") if name in sys.modules]
print(json.dumps([found, loaded]))
"""


def test_a_package_adds_a_format(site: Path, mine: Path) -> None:
    """Its values are had like those of any other; the format has the entry point's name."""
    code = """
import sys, json, torch, torchlift
ckpt = torchlift.open(sys.argv[1])
print(json.dumps([ckpt.format, ckpt["w"].tolist(), dict(ckpt.objects), repr(ckpt["w"].dtype)]))
"""
    assert in_child(site, code, mine, TORCH="1") == [
        "mine", [1.0, 2.0], {"step": 3}, "torch.float32"
    ]  # fmt: skip


def test_a_folder_and_an_archive_can_be_of_a_format_too(
    site: Path, mine: Path, tmp_path: Path
) -> None:
    """A reader is shown the names in a folder, and the records of an archive."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "mine").write_bytes(mine.read_bytes())
    import zipfile

    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("mine", bytes(8))
    for path in (folder, tmp_path / "x.zip"):
        found, _ = in_child(site, LOOK, path)
        assert found == ["mine", ["w"], {"step": 3}, {"by": "them"}]


def test_the_command_looks_at_such_a_file_without_torch(site: Path, mine: Path) -> None:
    """Both `inspect` and `verify`, which computes the checksum that the reader found."""
    import zlib

    crc = zlib.crc32(mine.read_bytes()[4:])
    for command, right in (("inspect", crc), ("verify", crc), ("verify", crc + 1)):
        code = f"""
import sys, json, contextlib, io
from torchlift.cli import main
with contextlib.redirect_stdout(io.StringIO()) as printed:
    status = main([{command!r}, sys.argv[1], "--json"])
print(json.dumps([status, "torch" in sys.modules, json.loads(printed.getvalue())]))
"""
        claims = json.dumps({"crc32": right})
        status, has_torch, found = in_child(site, code, mine, CLAIMS=claims)
        assert not has_torch
        assert bool(status) is (right != crc)
        if command == "inspect":
            assert found["format"] == "mine"


def test_what_ours_know_is_not_asked_for(site: Path, tmp_path: Path) -> None:
    """A reader that takes everything overrides none of ours, and nothing looks for it."""
    torch.save({"w": torch.zeros(2)}, tmp_path / "x.pt")
    found, loaded = in_child(site, LOOK, tmp_path / "x.pt", GREEDY="1")
    assert found[0] == "torch-zip"
    assert loaded == []


def test_a_file_that_nobody_knows_is_what_it_was(site: Path, tmp_path: Path) -> None:
    """The error says what the file is, as without the package."""
    (tmp_path / "x.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    found, loaded = in_child(site, LOOK, tmp_path / "x.h5")
    assert found[:2] == ["FormatError", "an HDF5 file, such as Keras writes (.h5)"]
    assert loaded == ["importlib.metadata", "their_formats"]


def test_a_format_has_a_name_of_its_own(tmp_path: Path, mine: Path) -> None:
    """The name of one of ours is refused, and so are two readers of one file."""
    found, _ = in_child(installed(tmp_path / "a", "gguf"), LOOK, mine)
    assert found[0] == "FormatError"
    assert "'gguf'" in found[1]
    found, _ = in_child(installed(tmp_path / "b", "mine", "yours"), LOOK, mine)
    assert found[:2] == ["FormatError", "several entry points know this format"]


@pytest.mark.parametrize("broken", ["fits", "kind"])
def test_a_reader_that_fails_is_named(site: Path, mine: Path, broken: str) -> None:
    """Its own exceptions, and an object that is no reader, are one error of ours."""
    found, _ = in_child(site, LOOK, mine, BREAK=broken)
    assert found[0] == "FormatError"
    assert "'mine'" in found[1]
    assert found[2] == str(mine)


@pytest.mark.parametrize(
    "claims",
    [
        {"chunk": {"offset": 8}},
        {"stored": 4},
        {"more": {"blocked": ["os.system"]}},
        {"more": {"aside": ["w"]}},
        {"chunk": {"offset": -4}},
        {"chunk": {"nbytes": 4}},
        {"chunk": {"start": [1]}},
        {"chunk": {"shape": [1]}},
        {"chunk": {"shape": [1, 2]}},
        {"chunk": {"stride": [4]}},
        {"entry": {"shape": [3]}},
        {"entry": {"shape": [-2]}},
        {"entry": {"shape": [1 << 40], "nbytes": 1 << 42, "stride": [0]}},
        {"entry": {"stride": [2]}},
        {"entry": {"stride": []}},
        {"entry": {"nbytes": 4}},
        {"entry": {"dtype": "float63"}},
        {"entry": {"encoding": ["Q4_0"]}},
        {"entry": {"key": "v"}},
        {"entry": {"storage": "v"}},
        {"entry": {"chunks": None}},
        {"entry": {"chunks": []}},
        {"stored": 12},
        {"object": "w"},
        {"instead": 7},
        {"file": "/etc/passwd"},
    ],
    ids=json.dumps,
)
def test_a_reader_that_lies_is_named(site: Path, mine: Path, claims: dict[str, Any]) -> None:
    """Every claim about bytes is compared with the file, as those of files are."""
    found, _ = in_child(site, LOOK, mine, CLAIMS=json.dumps(claims))
    assert found[0] == "FormatError"
    assert "'mine'" in found[1]
    assert found[2] == str(mine)


def test_without_a_package_the_file_is_refused(mine: Path) -> None:
    """The format is nobody's then."""
    with pytest.raises(CheckpointError, match="not a checkpoint that torchlift reads"):
        torchlift.open(mine)


def test_the_file_may_be_a_link_to_anywhere(site: Path, mine: Path, tmp_path: Path) -> None:
    """As in a cache of downloads; the caller named it."""
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "elsewhere" / "link.mine"
    link.symlink_to(mine)
    found, _ = in_child(site, LOOK, link)
    assert found[:2] == ["mine", ["w"]]

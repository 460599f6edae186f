"""What a file calls things, and what lies where a file should be: told, escaped, clipped."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import socket
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_files import Call, npy_bytes, tensor, write_safetensors, write_zip
from rank_files import Era
from torch import nn
from zero_files import Zero

import torchlift
from torchlift import errors
from torchlift.errors import (
    FormatError,
    MismatchError,
    UnsafeError,
)
from torchlift.formats.detect import read_index

EVIL = "\x1b[2J\x07\r\n\u202e" + "n" * 5_000


def _is_clean(text: str) -> bool:
    lines = text.splitlines()
    return all(line.isprintable() and len(line) < 3_000 for line in lines) and len(lines) < 30


def test_names_of_a_file_are_escaped_and_clipped_in_what_is_printed(tmp_path: Path) -> None:
    """Reports, plans, verification, a checkpoint, a mistyped key and a key that is refused."""
    model = nn.Linear(2, 2)
    state = {**model.state_dict(), EVIL: torch.ones(2)}
    torch.save(state, tmp_path / "x.pt")
    with torchlift.open(tmp_path / "x.pt") as ckpt:
        texts = [
            str(torchlift.plan(model, ckpt, strict=False)),
            str(torchlift.load(model, ckpt, strict=False)),
            str(torchlift.load(model, ckpt, rename=lambda key: key if len(key) < 10 else None)),
            repr(ckpt), str(ckpt), str(torchlift.verify(tmp_path / "x.pt")),
        ]  # fmt: skip
        with pytest.raises(KeyError) as missing:
            ckpt[EVIL[:-1]]
        with pytest.raises(MismatchError) as mismatch:
            torchlift.load(model, ckpt)
        texts += [str(missing.value), str(mismatch.value)]
    for text in texts:
        assert _is_clean(text), text[:200]


def test_the_cause_of_a_broken_record_is_told(tmp_path: Path) -> None:
    """Never that the file is damaged, where it is known how."""
    path = tmp_path / "x.npz"
    header = "{'descr': '<f4', 'fortran_order': False, 'shape': (99,)}"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w.npy", npy_bytes(header, bytes(396)))
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("w.npy")
    start = info.header_offset + 30 + len(info.filename)
    data[start : start + 8] = b"\xff" * 8
    path.write_bytes(bytes(data))
    with pytest.raises(FormatError, match=r"w\.npy': a compressed record is damaged; found Error"):
        read_index(path)


# What is no file ----------------------------------------------------------------------------------


def _pipe(path: Path) -> str:
    os.mkfifo(path)
    return "a named pipe"


def _socket(path: Path) -> str:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket may have a hundred characters
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)
    return "a socket"


def _folder(path: Path) -> str:
    path.mkdir()
    return "a directory"


def _loop(path: Path) -> str:
    path.symlink_to(path.name)
    return ""


def _in_set(directory: Path) -> Path:
    torch.save({"w": torch.ones(1)}, directory / "a.pt")
    (directory / "x.index.json").write_text(json.dumps({"weight_map": {"w": "a.pt"}}))
    return directory / "a.pt"


def _in_dcp(name: str) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        dcp.save({"w": torch.ones(1)}, checkpoint_id=directory, no_dist=True)
        return directory / name

    return make


def _in_zero(name: str) -> Callable[[Path], Path]:
    def make(directory: Path) -> Path:
        return Zero(2, 2, [{"w": torch.ones(3)}]).write(directory) / name

    return make


def _set_of_two(directory: Path) -> Path:
    for at in (1, 2):
        torch.save({f"w{at}": torch.ones(1)}, directory / f"a-0000{at}-of-00002.safetensors")
    return directory / "a-00002-of-00002.safetensors"


PLACES: dict[str, Callable[[Path], Path]] = {
    "a shard": _in_set,
    "a shard of a set": _set_of_two,
    "an index": lambda d: (_in_set(d), d / "x.index.json")[1],
    "the only file": lambda d: d / "a.safetensors",
    "metadata": _in_dcp(".metadata"),
    "metadata of a rank": lambda d: _in_dcp(".metadata")(d).rename(d / "__0.metadata"),
    "an item file": _in_dcp("__0_0.distcp"),
    "a rank's optimizer": _in_zero("zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    "a rank's model": _in_zero("mp_rank_00_model_states.pt"),
    "a rank's slices": lambda d: (
        Era().save_rows(d, torch.zeros(2)) / "model_world_size_2_rank_1.pt"
    ),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("place", "kind"),
    [*((place, _pipe) for place in PLACES),
     *(("a shard", kind) for kind in (_socket, _folder, _loop)),
     *(("metadata", kind) for kind in (_socket, _folder, _loop))],
)  # fmt: skip
def test_what_is_no_file_is_refused_without_waiting(
    tmp_path: Path, place: str, kind: Callable[[Path], str]
) -> None:
    """Opening a pipe waits for a writer; a folder, a socket or a loop is an error at once."""
    (tmp_path / "d").mkdir()
    path = PLACES[place](tmp_path / "d")
    path.unlink(missing_ok=True)
    found = kind(path)
    with pytest.raises(FormatError) as caught:
        torchlift.open(path.parent)
    if found:
        assert str(caught.value).endswith(f"not a regular file; found {found}")
    if found and place != "a shard":
        with pytest.raises(FormatError, match=r"not a regular file|directory is empty"):
            torchlift.open(path)


def test_a_device_is_refused_at_once() -> None:
    """Reading one may never end."""
    with pytest.raises(FormatError, match="not a regular file; found a device"):
        torchlift.open("/dev/zero")


def test_a_directory_that_contains_itself_is_read_once(tmp_path: Path) -> None:
    """A link to its own directory is one name more for the same file."""
    _in_set(tmp_path)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "x.index.json").write_text(json.dumps({"weight_map": {"w": "loop/" * 20 + "a.pt"}}))
    assert list(read_index(tmp_path).entries) == ["w"]


# Sizes --------------------------------------------------------------------------------------------


def _empty_file(path: Path, shape: tuple[int, ...]) -> Path:
    described = {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 0]}
    return write_safetensors(path, {"w": described})


_HUGE = [(0, 2**62, 2**62), (2**62, 0, 4), (0, 2**63 - 1), (2**40, 2**40, 0), (0, 2**62, 4), (0, 7)]


@pytest.mark.parametrize("shape", _HUGE)
def test_an_empty_tensor_of_huge_sizes_is_as_torch_has_it_or_refused(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    """Never a TypeError or an overflow, when it is opened or when it is taken."""
    strides = torch.empty([min(size, 9) for size in shape]).stride()
    paths = [_empty_file(tmp_path / "x", shape),
             write_zip(tmp_path / "y", {"w": tensor(shape, strides)})]  # fmt: skip
    for path in paths:
        if math.prod(filter(None, shape)) >= 2**63:
            with pytest.raises(FormatError, match=r"'w': .*strides below 2\*\*63"):
                torchlift.open(path)
            continue
        with torchlift.open(path) as ckpt:
            made = ckpt["w"]
        assert made.shape == shape
        theirs = torch.empty(shape) if path.name == "x" else torch.load(path)["w"]
        assert made.stride() == theirs.stride()


@pytest.mark.parametrize("offset", [10**9, 2**62, 2**63 - 1])
def test_an_empty_view_may_lie_anywhere(tmp_path: Path, offset: int) -> None:
    """It has no bytes, so torch reads it, and so does this."""
    path = write_zip(tmp_path / "x", {"w": tensor((0,), (1,), offset)})
    assert torch.load(path)["w"].shape == (0,)
    with torchlift.open(path) as ckpt:
        assert ckpt["w"].shape == (0,)


# Keys and stamps ----------------------------------------------------------------------------------


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that difflib is given."""
    seen: list[str] = []

    def counting(word: str, names: list[str], **options: int) -> list[str]:
        seen.extend(names)
        return true(word, names, **options)

    true = difflib.get_close_matches
    monkeypatch.setattr(errors.difflib, "get_close_matches", counting)
    return seen


def _many(tmp_path: Path) -> Path:
    header = {
        f"model.layers.{at // 10}.experts.{at % 10}.weight": {
            "dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
        for at in range(20_000)
    }  # fmt: skip
    return write_safetensors(tmp_path / "many", header)


def test_a_mistyped_key_compares_few_names(tmp_path: Path, compared: list[str]) -> None:
    """Two hundred of twenty thousand, and the right one is among them; get compares none."""
    with torchlift.open(_many(tmp_path)) as ckpt:
        for typo in ("model.layers.1234.experts.5.wieght", "layers.1234.experts.5.weight",
                     "model.layer.1234.experts.5.weight"):  # fmt: skip
            compared.clear()
            with pytest.raises(KeyError, match=re.escape("model.layers.1234.experts.5.weight")):
                ckpt[typo]
            assert 0 < len(compared) <= 200
        compared.clear()
        assert ckpt.get("model.layers.1234.experts.5.wieght") is None
        assert ckpt.get("nothing", 5) == 5
        assert ckpt.get("model.layers.0.experts.0.weight") is not None
        assert not compared
        with pytest.raises(KeyError):
            ckpt["x" * 100_000]
        assert not compared


def test_get_says_why_a_key_is_refused(tmp_path: Path) -> None:
    """What only unpickling could rebuild is not taken for a key that does not exist."""
    path = write_zip(tmp_path / "x", {"e": Call(os.getenv, "HOME")})
    with torchlift.open(path) as ckpt, pytest.raises(UnsafeError, match=r"os\.getenv"):
        ckpt.get("e")


@pytest.fixture(autouse=True)
def _nothing_waits() -> Iterator[None]:
    """A net: what should be refused at once and waits instead is killed with its cause."""
    import faulthandler

    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()

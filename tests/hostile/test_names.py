"""What a file calls things, and what lies where a file should be: told, escaped, clipped."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_files import tensor, write_safetensors, write_zip
from rank_files import Era
from torch import nn
from zero_files import Zero

import torchlift
from torchlift.errors import (
    FormatError,
    MismatchError,
)

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


# What is no file ----------------------------------------------------------------------------------


def _pipe(path: Path) -> str:
    os.mkfifo(path)
    return "a named pipe"


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
     *product(("a shard", "metadata"), (_folder, _loop))],
)  # fmt: skip
def test_what_is_no_file_is_refused_without_waiting(
    tmp_path: Path, place: str, kind: Callable[[Path], str]
) -> None:
    """Opening a pipe waits for a writer; a folder or a loop is an error at once."""
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


# Keys and stamps ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _nothing_waits() -> Iterator[None]:
    """A net: what should be refused at once and waits instead is killed with its cause."""
    import faulthandler

    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()

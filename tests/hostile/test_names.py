"""What a file calls things, and what lies where a file should be: told, escaped, clipped."""

from __future__ import annotations

import faulthandler
import math
import os
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from checkpoint_files import tensor, write_safetensors, write_zip
from valid_files import write_valid

import torchlift
from torchlift.errors import FormatError


@pytest.fixture(autouse=True)
def _nothing_waits() -> Iterator[None]:
    """A net: what should be refused at once and waits instead is killed with its cause."""
    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


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


#: The format of a folder, and a file of it.
PLACES = [
    ("sharded", "b.pt"), ("sharded", "x"), ("dcp", ".metadata"), ("dcp", "__0_0.distcp"),
    ("zero", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ("zero", "zero_pp_rank_0_mp_rank_00_model_states.pt"),
    ("fsdp", "model_world_size_2_rank_1.pt"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("place", "kind"),
    [*product(PLACES, [_pipe]), *product([PLACES[0], PLACES[2]], (_folder, _loop))],
)
def test_what_is_no_file_is_refused_without_waiting(
    tmp_path: Path, place: tuple[str, str], kind: Callable[[Path], str]
) -> None:
    """Opening a pipe waits for a writer; a folder or a loop is an error at once."""
    opened, path = write_valid(tmp_path / "d", place[0]), tmp_path / "d" / place[1]
    path.unlink()
    found = kind(path)
    with pytest.raises(FormatError) as caught:
        torchlift.open(opened)
    assert str(caught.value).endswith(f"not a regular file; found {found}" if found else "")


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

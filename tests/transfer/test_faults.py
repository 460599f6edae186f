"""Faults: files that change, disks that fail, interrupts, hooks that refuse; all or nothing."""

from __future__ import annotations

import errno
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from damaged_files import damage, flip
from failing_reads import failing, readers
from limits import limits
from pairwise import pairwise
from safetensors.torch import save_file
from small_models import Two, assert_holds, randomised, saved, unchanged
from torch import nn

import torchlift
from torchlift.errors import IntegrityError


@pytest.fixture(params=["live", "meta"])
def model(request) -> nn.Module:
    """`Two` with values, or as a skeleton."""
    return Two(40, 50) if request.param == "live" else torchlift.skeleton(Two, 40, 50)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of that model with other values."""
    return saved(randomised(Two(40, 50)), tmp_path)


# --- files that change ------------------------------------------------------------------------


@pairwise(
    how=["shorter", "replaced", "overwritten", "gone"], source=["mmap", "read"],
    mode=["auto", "assign", "copy", "swap"],
)  # fmt: skip
def test_a_file_that_changed_since_it_was_opened_is_not_loaded(model, path, mode, source, how):
    """The index describes another file, so nothing of this one is used."""
    ckpt = torchlift.open(path)
    damage(path, how)
    with unchanged(model), pytest.raises(IntegrityError) as caught:
        torchlift.load(model, ckpt, mode=mode, source=source)
    assert caught.value.file == str(path)
    assert caught.value.hint is not None


@pytest.mark.parametrize("source", ["mmap", "read"])
def test_one_bad_shard_spoils_the_whole_load(tmp_path, model, source):
    """When the second of two files is not the one that was opened, the first one is not used."""
    state = randomised(Two(40, 50))
    for key, value in state.items():
        save_file({key: value}, tmp_path / f"{key}.safetensors")
    weights = {key: f"{key}.safetensors" for key in state}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    ckpt = torchlift.open(tmp_path)
    damage(tmp_path / "b.safetensors", "shorter")
    with unchanged(model), pytest.raises(IntegrityError, match=r"b\.safetensors: the file changed"):
        torchlift.load(model, ckpt, source=source)


@limits(together=1)
def test_a_file_that_changes_during_the_load_is_noticed(model, path):
    """Every round of reading looks at the file's stamp again."""

    def spoil(key: str, value: torch.Tensor) -> torch.Tensor:
        damage(path, "overwritten")
        return value

    with (
        unchanged(model),
        pytest.raises(IntegrityError, match="the file changed after it was opened"),
    ):
        torchlift.load(model, path, source="read", transform=spoil)


@pytest.mark.parametrize("source", ["mmap", "read"])
def test_removing_the_file_during_the_load_is_harmless(model, path, source):
    """An open file stays readable without its name, and a mapped model stays whole."""
    state = torch.load(path)

    def remove(key: str, value: torch.Tensor) -> torch.Tensor:
        path.unlink(missing_ok=True)
        return value

    torchlift.load(model, path, source=source, transform=remove)
    assert not path.exists()
    assert_holds(model, state)


def test_a_damaged_payload_is_found_by_verify_and_by_nothing_else(model, path):
    """One wrong bit is an error with verify=True; without it, it would be loaded."""
    flip(path, "b", 11)
    with unchanged(model), pytest.raises(IntegrityError) as caught:
        torchlift.load(model, path, verify=True)
    assert str(caught.value).startswith(
        f"{path}: 'data/1': checksums are wrong in 1 of 8 records; expected crc32 "
    )
    assert caught.value.hint.startswith("The file is damaged")
    torchlift.load(model, path)
    assert_holds(model, torch.load(path))


# --- disks that fail --------------------------------------------------------------------------


@limits(staged=1024, direct=1024)
@pytest.mark.parametrize("nth", [1, 15])
@pytest.mark.parametrize("options", [{}, {"mode": "assign"}, {"transform": lambda key, t: t * 2}])
def test_a_disk_error_on_any_piece_changes_nothing(model, path, monkeypatch, nth, options):
    """Everything is read before anything is placed."""
    ckpt = torchlift.open(path)
    monkeypatch.setattr(os, "preadv", failing(OSError(errno.EIO, "Input/output error"), nth))
    says = r"reading failed \(Input/output error\).*expected bytes .*Check the disk"
    with unchanged(model), pytest.raises(IntegrityError, match=says):
        torchlift.load(model, ckpt, source="read", **options)
    assert not readers()


# --- interrupts and code of others ------------------------------------------------------------


class Sabotage:
    """Does something the first time that it is called."""

    def __init__(self, action) -> None:
        self.action, self.done = action, False

    def __call__(self) -> None:
        if not self.done:
            self.done = True
            self.action()


class Refusing(Two):
    """A module in which the assignment of a parameter does something."""

    def __init__(self, action) -> None:
        super().__init__()
        self.__dict__["action"] = action

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "b" and "action" in self.__dict__:
            self.__dict__["action"]()


class Acting(nn.Parameter):
    """A parameter that does something when it is written to."""

    action = staticmethod(lambda: None)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        made = super().__torch_function__(function, types, args, kwargs or {})
        if function is torch.Tensor.copy_:
            args[0].action()
        return made


def acting(action) -> Two:
    """A model whose second parameter acts when it is written to."""
    model = Two()
    model.b = Acting(torch.zeros(2, 3))
    model.b.action = action
    return model


def interrupt() -> None:
    """What Ctrl-C does."""
    os.kill(os.getpid(), signal.SIGINT)


def fail() -> None:
    """A program's own error."""
    raise ValueError("no")


@pytest.mark.parametrize(
    ("make", "mode", "action", "error"),
    [
        (Refusing, "assign", interrupt, KeyboardInterrupt),
        (Refusing, "assign", fail, ValueError),
        (acting, "auto", interrupt, KeyboardInterrupt),
    ],
    ids=["interrupted assignment", "failed assignment", "interrupted copy to a subclass"],
)
def test_what_ends_a_commit_takes_all_back(tmp_path, make, mode, action, error):
    """Ctrl-C, or an error of the module's own code, whether tensors are assigned or written."""
    act, handler = Sabotage(action), signal.getsignal(signal.SIGINT)
    model = make(act)
    with unchanged(model), pytest.raises(error):
        torchlift.load(model, saved(randomised(Two()), tmp_path), mode=mode)
    assert act.done
    assert signal.getsignal(signal.SIGINT) is handler

"""The exceptions: one family, messages that say where, what and what to do, attributes besides."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torchlift
from torchlift._system.text import printable
from torchlift.errors import (
    CheckpointError,
    FormatError,
    IntegrityError,
    MismatchError,
    PlacementError,
    UnsafeError,
)

KINDS = [FormatError, UnsafeError, MismatchError, PlacementError, IntegrityError]


@pytest.mark.parametrize("kind", [CheckpointError, *KINDS])
def test_a_message_has_file_entry_reason_expected_found_and_hint(kind):
    """The parts come in one order, and are attributes too."""
    error = kind(
        "is wrong", file=Path("dir/x.pt"), entry="a.b", expected=(2, 3), found=[4], hint="Do this."
    )
    assert str(error) == "dir/x.pt: 'a.b': is wrong; expected (2, 3); found [4]. Do this."
    assert (error.reason, error.file, error.entry) == ("is wrong", "dir/x.pt", "a.b")
    assert (error.expected, error.found, error.hint) == ((2, 3), [4], "Do this.")


def test_an_error_travels_between_processes():
    """Pickling keeps the message, every attribute, and what a mismatch lists."""
    error = MismatchError(
        "does not fit",
        file="x.pt",
        hint="Look.",
        missing_keys=["a"],
        unexpected_keys=["b"],
        mismatched={"c": ((1,), (2,))},
    )
    error.__dict__["rank"] = 3
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is MismatchError
    assert (str(copy), copy.__dict__) == (str(error), error.__dict__)


def test_hostile_text_is_cut_to_a_readable_length():
    """A name or value of a megabyte does not fill the screen."""
    error = FormatError("is wrong", entry="k" * 1_000_000, found="v" * 1_000_000)
    assert len(str(error)) < 700
    assert "(1000000 characters)" in str(error)
    assert printable("short", 300) == "short"


@pytest.mark.parametrize("door", ["open", "load", "convert", "diff", "verify"])
def test_a_missing_file_is_python_s_error_with_its_fields(door: str, tmp_path: Path) -> None:
    """What a program prints of a FileNotFoundError, also after it travelled to another process."""
    path = str(tmp_path / "nothing.pt")
    calls: dict[str, Callable[[], object]] = {
        "open": lambda: torchlift.open(path),
        "load": lambda: torchlift.load(torch.nn.Linear(1, 1), path),
        "convert": lambda: torchlift.convert(path, tmp_path / "to.pt"),
        "diff": lambda: torchlift.diff(path, {}),
        "verify": lambda: torchlift.verify(path),
    }
    with pytest.raises(FileNotFoundError) as caught:
        calls[door]()
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.filename, error.errno) == (path, errno.ENOENT)
        assert error.strerror == "no such file or directory"
        assert isinstance(error, torchlift.CheckpointError)

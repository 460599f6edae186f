"""A new format is one file and one row, and gets its tests for nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from contract import Contract, State, name_of

from torchlift.formats.table import FILES, Format

MINE = Format(
    "mine",
    "the magic number ``MINE``",
    "imaginary_format.read_mine",
    lambda head: head.startswith(b"MINE"),
)


@pytest.fixture(autouse=True)
def _row(monkeypatch: pytest.MonkeyPatch) -> None:
    import imaginary_format  # noqa: F401 - else the guard would see the import

    monkeypatch.setattr("torchlift.formats.table.FILES", [*FILES, MINE])


class TestMine(Contract):
    """The exercise."""

    format = "mine"
    readers: ClassVar[set[str]] = set()
    setup = (
        "from torchlift.formats.table import FILES, Format\n"
        "FILES.append(Format('mine', '', 'imaginary_format.read_mine', "
        "lambda head: head.startswith(b'MINE')))\n"
    )

    def write(self, folder: Path, state: State) -> None:
        header = {key: [name_of(value), *value.shape] for key, value in state.items()}
        text = json.dumps(header).encode()
        data = [
            bytes(v.contiguous().reshape(-1).view(torch.uint8).tolist()) for v in state.values()
        ]
        content = b"MINE" + len(text).to_bytes(8, "little") + text + b"".join(data)
        (folder / "x").write_bytes(content)

    def read(self, folder: Path) -> State:
        content = (folder / "x").read_bytes()
        at = 12 + int.from_bytes(content[4:12], "little")
        found = State()
        for key, (dtype, *shape) in json.loads(content[12:at]).items():
            kind = getattr(torch, dtype)
            count = torch.Size(shape).numel()
            raw = bytearray(content[at : at + count * kind.itemsize])
            found[key] = (
                torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)
            ).view(shape)
            at += len(raw)
        return found

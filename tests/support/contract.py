"""What every reader of a format keeps. A format's class says how its owner writes and reads it.

`tests/formats/test_contract.py` has a class for each format, and the tests of a format's own file
are those that only this format has.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from checkpoint_files import assert_in_bounds
from guarded import guard, look
from hub_files import damage
from range_server import facts
from zoo import same

import torchlift
from torchlift.errors import CheckpointError
from torchlift.formats.dcp import resolved
from torchlift.formats.detect import read_index
from torchlift.formats.file_object import index_of_object

State = dict[str, torch.Tensor]


def values() -> State:
    """Return tensors of some dtypes: a matrix, without elements, without dimensions."""
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(4, 3),
        "a.bias": torch.randn(4).to(torch.float16),
        "b.weight": torch.randn(2, 2).to(torch.bfloat16),
        "b.steps": torch.arange(5),
        "b.mask": torch.tensor([True, False, True]),
        "c.empty": torch.zeros(0, 3),
        "c.scalar": torch.tensor(2.5),
        "c.bytes": torch.arange(7, dtype=torch.uint8),
    }


#: Names that a program may give, and a terminal, a path or JSON may not bear.
ODD = ["with space", "\u00fc.\u2202", "x" * 300, "line\nbreak", "\x1b[2J", "..", "a..b", "0", '"']


class Contract:
    """The tests of every format.

    Attributes:
        format: the value of ``ckpt.format``.
        opened: the name to open in the folder. Empty: the folder itself.
        readers: the files of readers that ``inspect`` may import.
        has_sums: whether the file has a checksum of each tensor.
        has_views: whether tensors of one storage stay so.
        written: whether `torchlift.convert` writes the format.
        odd: names of `ODD` that the format takes.
        exclude: keys that no conversion keeps.
        is_padded: whether bytes may follow the last value, and nothing is missing without them.
    """

    format: ClassVar[str]
    opened: ClassVar[str] = "x"
    readers: ClassVar[set[str]]
    has_sums: ClassVar[bool] = False
    has_views: ClassVar[bool] = False
    written: ClassVar[bool] = False
    odd: ClassVar[list[str]] = ODD
    exclude: ClassVar[list[str]] = []
    is_padded: ClassVar[bool] = False

    # What a format says of itself.

    def state(self) -> State:
        """Return the tensors to write: those of `values` that the format can hold."""
        return values()

    def write(self, folder: Path, state: State) -> None:
        """Write tensors with the library that owns the format."""
        raise NotImplementedError

    def read(self, folder: Path) -> State:
        """Read them with that library."""
        raise NotImplementedError

    # What it has of that.

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """A folder with a checkpoint."""
        (tmp_path / "d").mkdir()
        self.write(tmp_path / "d", self.state())
        return tmp_path / "d"

    @pytest.fixture
    def path(self, folder: Path) -> Path:
        """What is opened."""
        return folder / self.opened

    def test_the_index_and_each_value_are_the_owners(self, folder: Path, path: Path) -> None:
        """Names, dtypes, shapes and bits, of empty tensors and scalars, too."""
        theirs = self.read(folder)
        assert {*theirs} >= {*self.state()}
        with torchlift.open(path) as ckpt:
            assert ckpt.format == self.format
            assert {*ckpt} == {*theirs}
            for key, tensor in theirs.items():
                entry = ckpt.entries[key]
                assert (entry.dtype, entry.shape) == (name_of(tensor), tuple(tensor.shape)), key
                assert same(ckpt[key], tensor), key
            assert all(map(same, ckpt.state_dict().values(), map(theirs.get, ckpt)))

    def test_a_view_stays_one(self, tmp_path: Path) -> None:
        """Strides and offsets are the owner's, and two names of one memory are aliases."""
        if not self.has_views:
            pytest.skip("the format stores each tensor by itself")
        base = torch.randn(4, 6)
        self.write(tmp_path, {"base": base, "turned": base.t(), "part": base[1:, ::2]})
        theirs = self.read(tmp_path)
        with torchlift.open(tmp_path / self.opened) as ckpt:
            assert [*map(sorted, ckpt.aliases)] == [["base", "part", "turned"]]
            assert ckpt.nbytes == base.nbytes
            for key, tensor in theirs.items():
                assert ckpt.entries[key].stride == ckpt[key].stride() == tensor.stride()
                assert same(ckpt[key], tensor)
            assert (
                ckpt["part"].untyped_storage().data_ptr()
                == ckpt["base"].untyped_storage().data_ptr()
            )

    def test_an_odd_name_is_read_and_printed_harmlessly(self, tmp_path: Path) -> None:
        """Whatever a name holds, it moves no cursor."""
        for number, name in enumerate(self.odd):
            (folder := tmp_path / str(number)).mkdir()
            self.write(folder, {name: torch.ones(2, 2), "other": torch.zeros(2, 2)})
            path = folder / self.opened
            with guard(folder):
                look(str(path))
            with torchlift.open(path) as ckpt:
                assert {*ckpt} == {*self.read(folder)}
                assert same(ckpt[name], self.read(folder)[name])

    def test_nothing_of_it_runs(self, folder: Path, path: Path) -> None:
        """Reading opens its own files, and does nothing else that Python can see."""
        with guard(folder):
            index = look(str(path))
        assert index is not None
        assert_in_bounds(resolved(index))

    def test_a_file_that_ends_early_is_refused(self, folder: Path, path: Path) -> None:
        """At the start and the end of each record, one byte later, and a byte before the end."""
        for file in files_of(path):
            content, last = file.read_bytes(), max([0, *(stop for _, stop in runs(file, path))])
            most = last if self.is_padded else len(content)
            for size in sorted(n for n in {*cuts(file, path), 0, most - 1} if n < most):
                file.write_bytes(content[:size])
                with pytest.raises(CheckpointError) as caught:
                    torchlift.open(path)
                assert caught.value.file is not None
            file.write_bytes(content)
        assert look(str(path)) is not None

    def test_of_a_file_object_its_bytes_count(self, folder: Path, path: Path) -> None:
        """A file object of memory, at a position, is what the file is."""
        if len([*folder.iterdir()]) > 1:
            pytest.skip("a file object is one file")
        file = io.BytesIO(b"before" + path.read_bytes())
        file.seek(6)
        with index_of_object(file) as index:
            assert facts(index) == facts(read_index(path))
        with torchlift.open(file) as ckpt:
            assert all(same(ckpt[key], t) for key, t in self.read(folder).items())
        assert file.tell() == 6

    def test_a_wrong_bit_of_a_value_fails_its_checksum(self, folder: Path, path: Path) -> None:
        """If the format has checksums. Else the tensor is listed as not checked."""
        report = torchlift.verify(path)
        chunk = resolved(read_index(path)).entries["a.weight"].chunks[-1]
        assert report.ok
        assert bool(report.checked) is self.has_sums
        assert self.has_sums or report.unchecked
        damage(Path(chunk.file), chunk.offset)
        report = torchlift.verify(path)
        assert report.ok is not self.has_sums
        assert len(report.failed) == self.has_sums
        with torchlift.open(path) as ckpt:
            assert not same(ckpt["a.weight"], self.state()["a.weight"])

    def test_a_difference_is_found(self, folder: Path, path: Path) -> None:
        """None from what the owner reads, and one that is made."""
        theirs = self.read(folder)
        mine = torchlift.open(path).state_dict() if self.exclude else path
        assert torchlift.diff(mine, theirs).equal
        changed = {**theirs, "a.weight": theirs["a.weight"] + 1}
        assert [*torchlift.diff(mine, changed).changed] == ["a.weight"]

    def test_a_conversion_there_and_back_keeps_each_bit(self, folder: Path, path: Path) -> None:
        """To both files that torchlift writes, and to the format itself if it is written."""
        theirs = self.read(folder)
        for name in ("there.safetensors", "there.pt"):
            torchlift.convert(path, folder.parent / name, exclude=self.exclude)
            with torchlift.open(folder.parent / name) as ckpt:
                assert {*ckpt} == {*theirs}
                assert all(same(ckpt[key], tensor) for key, tensor in theirs.items())
        if self.written:
            (back := folder.parent / "back").mkdir()
            there = folder.parent / "there.safetensors"
            torchlift.convert(there, back / self.opened, format=self.format, overwrite=True)
            found = self.read(back)
            assert found.keys() == theirs.keys()
            assert all(same(found[key], tensor) for key, tensor in theirs.items())

    def test_the_command_imports_no_torch_and_no_other_reader(self, path: Path) -> None:
        """To inspect and to verify. A reader is imported when its format is met."""
        code = (
            "import contextlib, io, sys, torchlift.cli as cli\n"
            "with contextlib.redirect_stdout(io.StringIO()):\n"
            "    status = [cli.main([word, sys.argv[1]]) for word in ('inspect', 'verify')]\n"
            "print(*(name for name in sys.modules if name.startswith('torchlift.formats.')))\n"
            "print(*{'torch', 'numpy', 'safetensors', 'pickle', 'zipfile', 'urllib3'}"
            " & sys.modules.keys())\n"
            "sys.exit(any(status))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        loaded, heavy = done.stdout.splitlines()
        names = {name.rpartition(".")[2] for name in loaded.split()}
        assert names & READERS == self.readers
        assert heavy == ""


#: The files of `formats` that read one format, or a part of some formats.
READERS = {
    "dcp", "folders", "gguf", "npz", "ranks", "safetensors", "sharded", "torch_legacy",
    "torch_pickle", "torch_zip", "torchscript", "zero", "zip_archive",
}  # fmt: skip


def name_of(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


def files_of(path: Path) -> list[Path]:
    """Return the files that a checkpoint is read from."""
    index = resolved(read_index(path))
    return sorted({*map(Path, (*index.files, *index.guides))})


def runs(file: Path, path: Path) -> list[tuple[int, int]]:
    """Return the start and end of each storage in a file, in order."""
    index = resolved(read_index(path))
    places = [*index.storages.values()]
    return sorted(
        (place.offset, place.offset + place.nbytes) for place in places if place.file == str(file)
    )


def cuts(file: Path, path: Path) -> Iterator[int]:
    """Yield sizes at which a file may end: around each storage, and in the midst of it."""
    size = file.stat().st_size
    for start, stop in runs(file, path):
        yield from (n for n in (start - 1, start, start + 1, (start + stop) // 2) if 0 < n < size)
        yield from (n for n in (stop,) if n < size)

"""`verify`: every checksum that a file records is computed again."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_files import tensor, write_zip
from damaged_files import flip
from hub_files import damage, hub_cache, hub_files
from safetensors.torch import save_file
from small_models import saved

import torchlift
from torchlift.cli import main
from torchlift.errors import IntegrityError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with two storages, one of them larger than a block of reading."""
    return saved({"big": torch.arange(1_500_000.0), "w": torch.ones(3)}, tmp_path)


@pytest.mark.parametrize("at", [0, 4 << 20, 5_999_999])
def test_one_wrong_bit_is_found_and_named(path, at):
    """First, middle or last byte: the storage is named with both sums."""
    flip(path, "big", at)
    report = torchlift.verify(path)
    (failure,) = report.failed
    assert failure.name == "data/0"
    sums = f"data/0: expected crc32 {failure.expected:08x}, found {failure.found:08x}"
    assert failure.expected != failure.found
    assert str(report).startswith(f"{path}: damaged: 1 of 8 checksums wrong\n  checked: 2 storages")
    assert sums in str(report)


def test_what_has_no_checksum_is_said_to_be_unchecked(tmp_path):
    """Neither safetensors nor a torch file without sums is reported as good."""
    save_file({"w": torch.ones(3)}, tmp_path / "m.safetensors")
    torch.serialization.set_crc32_options(False)
    try:
        plain = saved({"w": torch.ones(3)}, tmp_path)
    finally:
        torch.serialization.set_crc32_options(True)
    for path, name in ((tmp_path / "m.safetensors", "w"), (plain, "data/0")):
        report = torchlift.verify(path)
        assert (report.ok, report.checked, report.unchecked) == (True, (), (name,))
        assert (report.nbytes, report.unchecked_nbytes) == (0, 12)
        assert str(report) == (
            f"{path}: the structure is right, and there are no checksums to compare\n"
            "  not checked: 1 storage, 12 B: the file records no checksum of these bytes"
        )


def test_a_wrong_bit_in_the_code_of_a_program_is_found(tmp_path):
    """Records that hold no tensor have checksums, too, and opening does not read all of them."""
    path = write_zip(tmp_path / "m.pt", {"w": tensor()})
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/code/one.py", "pass  # stored")
        archive.writestr("archive/code/two.py", "pass" * 100, zipfile.ZIP_DEFLATED)
    data = path.read_bytes()
    assert torchlift.verify(path).ok
    at, packed = data.find(b"pass  # stored"), data.find(b"code/two.py") + len("code/two.py")
    for place, name in ((at, "archive/code/one.py"), (packed, "archive/code/two.py")):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        report = torchlift.verify(path)
        assert [failure.name for failure in report.failed] == [name]
        assert len(report.records) == 5


def test_a_record_with_the_name_of_a_storage_does_not_hide_damage(path, tmp_path):
    """The storage is ``data/0`` of an archive that has the top folder ``data``."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "n.pt", "w") as new:
        for info in old.infolist():
            new.writestr(info.filename.replace("model/", "data/"), old.read(info))
        new.writestr("data/0", b"another record")
    flip(tmp_path / "n.pt", "big", 0)
    report = torchlift.verify(tmp_path / "n.pt")
    assert [failure.name for failure in report.failed] == ["data/0"]


@pytest.mark.parametrize("at", [300, 5_000, -4])
def test_a_wrong_bit_in_a_compressed_array_is_found(tmp_path, at):
    """The sum is of the numbers, whether the deflated bytes can still be inflated or not."""
    path = tmp_path / "m.npz"
    np.savez_compressed(path, big=np.arange(1_500_000.0), w=np.ones(3))
    assert torchlift.verify(path).checked == ("big", "w")
    assert torchlift.verify(path).ok
    record = torchlift.open(path).entries["big"].chunks[0].packed
    damage(path, record.offset + at % record.nbytes)
    report = torchlift.verify(path)
    assert [failure.name for failure in report.failed] == ["big"]
    with pytest.raises(IntegrityError, match=r"m\.npz: 'big\.npy': "):
        torchlift.open(path)["big"]


@pytest.mark.parametrize("number", [0, 1])
def test_files_of_a_hub_cache_are_compared_with_what_the_hub_records(
    tmp_path: Path, number: int
) -> None:
    """The name of a blob is the SHA-256 of a large file. A damaged one is named with both sums."""
    files = hub_files(tmp_path)
    snapshot = hub_cache(tmp_path, files)
    report = torchlift.verify(snapshot)
    shards = {name: content for name, content in files.items() if not name.endswith(".json")}
    assert report.ok
    assert report.records == tuple(str(snapshot / name) for name in shards)
    assert (len(report.checked), report.unchecked, report.unchecked_nbytes) == (2, (), 0)
    path = snapshot / [*files][number]
    expected = os.path.basename(os.readlink(path))
    damage(path, path.stat().st_size // 2)
    (failure,) = torchlift.verify(snapshot).failed
    assert failure.name == str(path)
    assert failure.right == f"sha256 {expected}"
    assert failure.what == f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"


def test_a_file_of_a_hub_cache_with_checksums_of_its_own_is_compared_too(tmp_path: Path) -> None:
    """Another intact file in its place is found. A record says which tensor is damaged."""
    content = saved({"w": torch.ones(3), "v": torch.zeros(2)}, tmp_path).read_bytes()
    path = hub_cache(tmp_path, {"model.bin": content}) / "model.bin"
    report = torchlift.verify(path)
    assert (report.ok, report.unchecked) == (True, ())
    flip(path.resolve(), "w", 1)
    assert [one.algorithm for one in torchlift.verify(path).failed] == ["crc32", "sha256"]
    torch.save({"w": torch.zeros(3), "v": torch.zeros(2)}, path.resolve())
    assert [one.algorithm for one in torchlift.verify(path).failed] == ["sha256"]


def test_only_links_into_blobs_name_their_checksum(tmp_path: Path) -> None:
    """A file in a folder of that name, or with a name that is no checksum, is nobody's record."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for name in ("0" * 64, "x" * 64):
        save_file({"w": torch.ones(3)}, blobs / name)
        (tmp_path / name).symlink_to(blobs / name)
    for path in (*blobs.iterdir(), tmp_path / ("x" * 64)):
        report = torchlift.verify(path)
        assert (report.ok, report.records, len(report.unchecked)) == (True, (), 1)
    assert not torchlift.verify(tmp_path / ("0" * 64)).ok


@pytest.mark.parametrize("door", ["path", "object", "command"])
def test_a_published_number_finds_a_flipped_byte(tmp_path: Path, door: str) -> None:
    """Also in a file that records no checksum, where the structure alone looks right."""
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.arange(4.0)}, path)
    right = hashlib.sha256(path.read_bytes()).hexdigest()

    def is_right(number: str) -> bool:
        if door == "command":
            return main(["verify", str(path), "--sha256", number]) == 0
        with path.open("rb") as file:
            return torchlift.verify(file if door == "object" else path, sha256=number).ok

    assert is_right(right)
    assert is_right(f"sha256:{right.upper()}")
    assert not is_right("0" * 64)
    damage(path)
    assert not is_right(right)
    assert torchlift.verify(path).ok


def test_a_number_that_is_not_one_file_s_sha256_is_refused(tmp_path: Path) -> None:
    """The command returns 2: its option is wrong."""
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.ones(1)}, path)
    for number in ("abc", "z" * 64, ""):
        with pytest.raises(ValueError, match="64 hexadecimal digits"):
            torchlift.verify(path, sha256=number)
        assert main(["verify", str(path), "--sha256", number]) == 2
    index = tmp_path / "set.safetensors.index.json"
    torchlift.save({"a": torch.ones(1000), "b": torch.ones(1000)}, index, max_shard_size=5000)
    with pytest.raises(ValueError, match="one file"):
        torchlift.verify(index, sha256="0" * 64)


def test_no_damaged_bit_of_a_header_makes_its_checksums_disappear(tmp_path: Path) -> None:
    """Each is found: in the name of our metadata, too, and in what is no digit any more."""
    path = tmp_path / "m.safetensors"
    torchlift.save({"a": torch.arange(4.0), "b": torch.ones(3)}, path)
    right = path.read_bytes()
    stop = right.rindex(b"}") + 1
    for at in range(8, stop):
        for bit in range(8):
            path.write_bytes(right[:at] + bytes([right[at] ^ (1 << bit)]) + right[at + 1 :])
            try:
                report = torchlift.verify(path)
            except torchlift.CheckpointError:
                continue
            assert not report.ok, (at, bit)
    path.write_bytes(right)
    assert torchlift.verify(path).checked == ("a", "b")

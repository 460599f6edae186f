"""Saving and converting to URLs: the bytes of a file, whole or not there, and no debris."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from damaged_files import flip
from stores import Bucket, S3Server, memory_bucket, s3_server

import torchlift
from torchlift._store.places import place_of
from torchlift._store.uploads import remove
from torchlift.errors import CheckpointError, IntegrityError, PlacementError


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as made:
        yield made


@pytest.fixture(params=["memory", "s3fs", "obstore"])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    if request.param == "memory":
        return memory_bucket()
    made: Bucket = request.getfixturevalue("server").bucket(request.param)
    return made


@pytest.fixture(params=["s3fs", "obstore"])
def s3(request: pytest.FixtureRequest, server: S3Server) -> Bucket:
    return server.bucket(request.param)


def _state() -> dict[str, Any]:
    torch.manual_seed(0)
    big = torch.randn(3_000, 1_500)  # 18 MB: three parts
    return {"model": {"a": big, "few": torch.arange(7), "b": big.t()[:5].bfloat16()}}


NAMES = {
    "x.pt": {}, "x.safetensors": {}, "folder": {"format": "dcp"},
    "x.safetensors.index.json": {"max_shard_size": "10MB"},
}  # fmt: skip


@pytest.mark.parametrize(("name", "checksum"), [("x.pt", False), *((name, True) for name in NAMES)])
def test_what_is_saved_to_a_url_is_what_a_file_would_be(
    bucket: Bucket, name: str, checksum: bool, tmp_path: Path
) -> None:
    """With the same sums if these follow the values, and nothing beside it."""
    options: Any = {**NAMES[name], "checksum": checksum}
    report = torchlift.save(_state(), bucket / name, storage_options=bucket.options, **options)
    checksum = checksum and "safetensors" not in name
    options["checksum"] = checksum
    local = torchlift.save(_state(), str(tmp_path / "local" / name), **options)
    # Objects of a set have names of their own; else all is the same.
    assert len(report.files) == len(local.files)
    assert sorted(bucket.url + "/" + each for each in bucket.names()) == sorted(report.files)
    there = bucket.fetched(name, tmp_path)
    for each in report.files:
        bucket.fetched(each.removeprefix(bucket.url + "/"), tmp_path)
    assert torchlift.verify(there).failed == ()
    assert bool(torchlift.verify(there).checked) == checksum
    assert torchlift.diff(there, local.path).equal
    if len(report.files) == 1:
        assert Path(there).read_bytes() == Path(local.path).read_bytes()
    assert (report.nbytes, report.format) == (local.nbytes, local.format)
    assert bucket.unfinished() == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", ["", "partNumber=2", "partNumber=3"])
def test_a_server_that_refuses_in_the_middle_leaves_the_older_checkpoint(
    s3: Bucket, name: str, part: str
) -> None:
    """No part of an upload stays, and no object that no head names."""
    options: Any = NAMES[name]
    torchlift.save({"old": torch.ones(3)}, s3 / name, storage_options=s3.options, **options)
    before = {each: s3.data(each) for each in s3.names()}
    s3.requests.clear()
    s3.broken = lambda method, query, sent: method == "PUT" and part in query
    with pytest.raises(CheckpointError) as caught:
        torchlift.save(_state(), s3 / name, storage_options=s3.options, **options)
    assert isinstance(caught.value, PermissionError)
    assert "secret" not in str(caught.value)
    s3.broken = lambda *_: False
    assert {each: s3.data(each) for each in s3.names()} == before
    assert s3.unfinished() == []


@pytest.mark.parametrize("name", NAMES)
def test_an_interrupt_while_bytes_are_sent_ends_the_upload(
    bucket: Bucket, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older checkpoint stays, without parts or objects of the new one."""
    options: Any = NAMES[name]
    torchlift.save({"old": torch.ones(3)}, bucket / name, storage_options=bucket.options, **options)
    before = {each: bucket.data(each) for each in bucket.names()}
    state = _state()

    calls = 0
    real = torch.Tensor.cpu

    def cpu(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return real(tensor, *args)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    with pytest.raises(KeyboardInterrupt):
        torchlift.save(state, bucket / name, storage_options=bucket.options, **options)
    monkeypatch.undo()
    assert calls
    assert {each: bucket.data(each) for each in bucket.names()} == before
    assert bucket.unfinished() == []
    assert not [each for each in threading.enumerate() if each.name == "torchlift-upload"]


def test_a_set_replaces_the_objects_of_the_older_one(bucket: Bucket) -> None:
    """What no head names any more goes; what others have put beside it stays."""
    options: Any = {"format": "dcp", "storage_options": bucket.options}
    torchlift.save(_state(), bucket / "folder", **options)
    bucket.put("folder/__9_0.distcp", b"somebody's")
    first = bucket.names()
    torchlift.save(_state(), bucket / "folder", **options)
    assert len(bucket.names()) == len(first) == 3
    assert len({*bucket.names()} & {*first}) == 2  # the head, and somebody's


def test_shards_and_one_file_of_a_name_are_not_saved_side_by_side(bucket: Bucket) -> None:
    """A reader that looks for the other one would take older weights."""
    options: Any = {"storage_options": bucket.options}
    one, index = bucket / "x.safetensors", bucket / "x.safetensors.index.json"
    for first, second in ((one, index), (index, one)):
        torchlift.save(_state(), first, **options)
        before = bucket.names()
        with pytest.raises(CheckpointError, match="a checkpoint of another format"):
            torchlift.save(_state(), second, **options)
        assert bucket.names() == before
        for name in before:
            remove(place_of(bucket / name, bucket.options))


def test_the_head_comes_last(s3: Bucket) -> None:
    """A reader never finds a head whose objects are not there."""
    options: Any = {"max_shard_size": "1MB", "storage_options": s3.options}
    state = {str(n): torch.full((200_000,), n) for n in range(6)}
    torchlift.save(state, s3 / "x.safetensors.index.json", **options)
    assert len(s3.names()) == 7
    sizes = [nbytes for method, _, nbytes in s3.requests if method == "PUT"]
    assert sizes[-1] == len(s3.data("x.safetensors.index.json"))


def test_conversion_to_a_url_replaces_nothing_unless_asked(bucket: Bucket, tmp_path: Path) -> None:
    """And then all of it, or nothing."""
    source = str(tmp_path / "x.pt")
    torchlift.save(_state(), source)
    options: Any = {"storage_options": bucket.options}
    report = torchlift.convert(source, bucket / "x.safetensors", dtype="bfloat16", **options)
    assert report.path == bucket / "x.safetensors"
    assert torchlift.verify(bucket.fetched("x.safetensors", tmp_path)).ok
    with pytest.raises(CheckpointError, match=r"something of this name.*overwrite=True"):
        torchlift.convert(source, bucket / "x.safetensors", **options)
    torchlift.convert(source, bucket / "x.safetensors", overwrite=True, **options)
    assert torchlift.diff(bucket.fetched("x.safetensors", tmp_path), source).equal
    assert torchlift.convert(source, bucket / "y.pt", dry_run=True, **options).nbytes
    assert bucket.names() == ["x.safetensors"]


def test_a_transform_makes_values_for_a_url(bucket: Bucket, tmp_path: Path) -> None:
    """They wait in a temporary file, since the places of all depend on them."""
    source = str(tmp_path / "x.pt")
    torchlift.save(_state(), source)
    options: Any = {"storage_options": bucket.options}
    torchlift.convert(source, bucket / "x.pt", transform=lambda key, t: t[:2] * 2, **options)
    with torchlift.open(bucket.fetched("x.pt", tmp_path)) as found:
        assert torch.equal(found["model.a"], _state()["model"]["a"][:2] * 2)


def test_a_damaged_source_does_not_become_an_object(bucket: Bucket, tmp_path: Path) -> None:
    """Its sum is compared on the way: what was sent is given up."""
    source = tmp_path / "x.pt"
    torchlift.save(_state(), str(source))
    flip(source, "model.a", 5)
    with pytest.raises(IntegrityError, match=r"model\.a.*checksum"):
        torchlift.convert(str(source), bucket / "x.safetensors", storage_options=bucket.options)
    assert bucket.names() == []
    assert bucket.unfinished() == []


@pytest.mark.parametrize("url", ["http://127.0.0.1/x.pt", "https://me:pass@127.0.0.1/x.pt?token=1"])
def test_nothing_is_written_over_http(url: str) -> None:
    """It has no upload that is whole or not there; and says so before anything happens."""
    with pytest.raises(PlacementError, match="over HTTP") as caught:
        torchlift.save({"w": torch.ones(1)}, url)
    assert "token" not in str(caught.value)
    assert "pass@" not in str(caught.value)


def test_a_scheme_that_fsspec_does_not_know_is_an_error_of_ours() -> None:
    """Before anything happens."""
    with pytest.raises(CheckpointError, match="nowhere"):
        torchlift.save({"w": torch.ones(1)}, "nowhere://x/y.pt")


def test_the_command_converts_to_a_bucket_with_credentials_of_the_environment(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """They are never arguments, and stand in nothing that it prints."""
    from torchlift.cli import main

    bucket, source = server.bucket(), str(tmp_path / "x.pt")
    torchlift.save(_state(), source)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", bucket.options["key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", bucket.options["secret"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    assert main(["convert", source, bucket / "x.safetensors"]) == 0
    assert main(["convert", source, bucket / "x.safetensors"]) == 1
    printed = capsys.readouterr()
    assert bucket / "x.safetensors" in printed.out
    assert "overwrite" in printed.err
    assert bucket.options["secret"] not in printed.out + printed.err
    assert torchlift.verify(bucket.fetched("x.safetensors", tmp_path)).ok


def test_small_tensors_of_a_url_are_converted_with_few_requests(s3: Bucket) -> None:
    """Those that lie beside each other are read together, however many they are."""
    options: Any = {"storage_options": s3.options}
    state = {f"layers.{n}.weight": torch.full((n % 7 + 1, 100), float(n)) for n in range(100)}
    torchlift.save(state, s3 / "x.safetensors", **options)
    for name in ("x.safetensors", "folder"):
        torchlift.save(state, s3 / name, **options, format="dcp" if name == "folder" else None)
        s3.requests.clear()
        torchlift.convert(s3 / name, s3 / "y.pt", overwrite=True, **options)
        asked = [each for each in s3.requests if each[0] == "GET"]
        assert len(asked) < (20 if name == "x.safetensors" else 120)  # of DCP, one for each item
    assert torchlift.diff(torchlift.open(s3 / "y.pt", **options), state).equal


def _converted(source: str, url: str, options: dict[str, Any]) -> int:
    torchlift.save(
        {"w": torch.ones(3)}, f"{url}.first", format="torch-zip", storage_options=options
    )
    with torchlift.measure.memory() as used:
        torchlift.convert(source, url, storage_options=options)
    return int(used.added_anonymous)


def test_a_version_of_an_object_is_read_and_never_written(s3: Bucket) -> None:
    """The query names it, and is no part of the key."""
    s3._fs[0].make_bucket_versioned(s3.url.split("/")[2], True)
    for number in 1.0, 2.0:
        torchlift.save({"w": torch.full((3,), number)}, s3 / "x.pt", storage_options=s3.options)
    aware = fsspec.filesystem("s3", **s3.options, version_aware=True)
    versions = aware.object_version_info(s3 / "x.pt")
    urls = {each["IsLatest"]: f"{s3 / 'x.pt'}?versionId={each['VersionId']}" for each in versions}
    for is_latest, url in urls.items():
        with torchlift.open(url, storage_options=s3.options) as ckpt:
            assert ckpt["w"].tolist() == [1.0 + is_latest] * 3
            assert ckpt.path == s3 / "x.pt"
    with pytest.raises(PlacementError, match="a version of an object"):
        torchlift.save({"w": torch.ones(3)}, urls[True], storage_options=s3.options)
    assert s3.names() == ["x.pt"]


@pytest.mark.slow
def test_a_conversion_to_a_bucket_takes_the_memory_of_some_parts(
    s3: Bucket, tmp_path: Path
) -> None:
    """However large the file is: it waits for nothing, on no disk and in no memory."""
    source = str(tmp_path / "x.pt")
    torchlift.save({str(n): torch.full((10_000_000,), float(n)) for n in range(8)}, source)
    child = torchlift.measure.in_child(_converted, source, s3 / "x.safetensors", s3.options)
    assert child.value < 160 << 20 < os.path.getsize(source)


def test_a_name_with_signs_of_a_pattern_is_a_name() -> None:
    """fsspec's move takes the one it gets for a pattern, and the other for a folder."""
    bucket = memory_bucket()
    names = ["model[1].safetensors", "a*b.pt"]
    for number, name in enumerate(names):
        torchlift.save({"w": torch.full((3,), float(number))}, bucket / name)
    assert sorted(bucket.names()) == sorted(names)
    for number, name in enumerate(names):
        assert float(torchlift.open(bucket / name)["w"][0]) == number

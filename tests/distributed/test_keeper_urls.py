"""`torchlift.Keeper` on a URL: what is kept, found and resumed, and what dead writers leave."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zoo
from stores import Bucket, S3Server, memory_bucket, s3_server
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from zoo import same, trained

import torchlift
from torchlift.distributed import CheckpointWriter, RunFolder
from torchlift.errors import CheckpointError, PlacementError

pytestmark = pytest.mark.slow


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


def _saved(keeper: torchlift.Keeper, step: int, model: nn.Module) -> None:
    keeper.save(step, model=model)
    keeper.wait()


def test_a_run_on_a_url_goes_on_bit_by_bit(bucket: Bucket) -> None:
    """Saved in the background, found by another keeper, and seen by who looks into its folder."""
    (model, optimizer), options = trained(), bucket.options
    run = {"model": model, "optimizer": optimizer}
    with torchlift.Keeper(bucket.url, storage_options=options) as keeper:
        assert keeper.resume(run) is None
        assert (keeper.steps(), keeper.latest()) == ([], None)
        zoo.step(model, optimizer, 3)
        assert keeper.save(3, run, epoch=1)
        zoo.step(model, optimizer, 3)  # while it is being sent
        keeper.wait()
        assert keeper.latest() == bucket / "step-000000003.pt"
    other, loaded = trained(1)
    again = {"model": other, "optimizer": loaded}
    with torchlift.Keeper(bucket.url, storage_options=options) as keeper:
        assert keeper.resume(again, epoch=1) == 3
        zoo.step(other, loaded, 3)
        assert same(other, model)
    folder = RunFolder(bucket.url, storage_options=options)
    assert folder.steps() == [3]
    latest = folder.latest()
    assert latest is not None
    with torchlift.open(latest) as ckpt:  # with the options that its folder was given
        assert ckpt.objects["epoch"] == 1
    assert bucket.names() == ["step-000000003.pt"]
    assert bucket.unfinished() == []


def test_the_last_ones_every_nth_and_the_best_are_kept_in_a_store(bucket: Bucket) -> None:
    """Nothing else stays."""
    model, options = nn.Linear(2, 1), bucket.options
    with torchlift.Keeper(
        bucket.url, keep=2, every=4, best="loss", storage_options=options
    ) as keeper:
        for step in range(1, 9):
            keeper.save(step, model=model, metrics={"loss": abs(step - 3)})
        keeper.wait()
        assert keeper.steps() == [3, 4, 7, 8]
        assert keeper.best() == bucket / "step-000000003.pt"
    assert bucket.names() == [f"step-00000000{n}.pt" for n in (3, 4, 7, 8)]


def test_a_url_has_no_lock(bucket: Bucket) -> None:
    """Nothing in a store tells a dead job from a slow one: the docs say to give each its own."""
    with (
        torchlift.Keeper(bucket.url, storage_options=bucket.options) as keeper,
        torchlift.Keeper(bucket.url, storage_options=bucket.options) as other,
    ):
        _saved(keeper, 1, nn.Linear(2, 1))
        assert other.steps() == [1]
    assert bucket.names() == ["step-000000001.pt"]


def test_what_a_killed_job_left_is_removed_by_the_next_one(bucket: Bucket) -> None:
    """A folder without its marker: by the first save after a resume."""
    model, options = nn.Linear(2, 1), bucket.options
    bucket.put("step-000000007/__0_0-1234abcd.distcp", b"half")
    bucket.put("notes.txt", b"somebody's")
    with torchlift.Keeper(bucket.url, storage_options=options) as keeper:
        assert keeper.resume(model=model) is None
        keeper.save(1, model=model)
        keeper.wait()
    assert bucket.names() == ["notes.txt", "step-000000001.pt"]


def test_a_save_that_a_server_refuses_is_raised_and_the_last_one_stays(server: S3Server) -> None:
    """By the next call; and a later save is as if that had not been."""
    bucket = server.bucket()
    model = nn.Linear(2, 1)
    with torchlift.Keeper(bucket.url, storage_options=bucket.options) as keeper:
        keeper.save(1, model=model)
        keeper.wait()
        bucket.broken = lambda method, query, sent: method == "PUT"
        with pytest.raises(CheckpointError) as caught:
            _saved(keeper, 2, model)
        assert "secret" not in str(caught.value)
        bucket.broken = lambda *_: False
        assert keeper.steps() == [1]
        keeper.save(3, model=model)
        keeper.wait()
        assert keeper.steps() == [1, 3]
    assert bucket.names() == ["step-000000001.pt", "step-000000003.pt"]


def test_a_keeper_of_http_is_an_error_at_once() -> None:
    """Nothing can be written there."""
    with pytest.raises(PlacementError, match="over HTTP"):
        torchlift.Keeper("https://127.0.0.1/run")


_KILLED = """
import os, signal, torch, torchlift
from torchlift._store import uploads
real = uploads._send_by_commit

def killed(fs, path, parts, size, is_small):
    def some():
        yield next(parts)
        os.kill(os.getpid(), signal.SIGKILL)
    real(fs, path, parts if is_small else some(), size, is_small)

uploads._send_by_commit = killed
with torchlift.Keeper({url!r}, storage_options={options!r}, background=False) as keeper:
    keeper.save(1, weights=torch.zeros(10))
    keeper.save(2, weights=torch.zeros(6_000_000))
"""


def test_a_job_that_is_killed_while_it_sends_has_its_last_complete_checkpoint(
    server: S3Server,
) -> None:
    """The parts of what it was sending show nowhere. Only a rule of the bucket can delete them."""
    bucket = server.bucket()
    code = _KILLED.format(url=bucket.url, options=bucket.options)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert bucket.unfinished() == ["run/step-000000002.pt"]
    with torchlift.Keeper(bucket.url, storage_options=bucket.options) as keeper:
        assert keeper.steps() == [1]
        assert keeper.resume(weights=torch.zeros(10)) == 1
        keeper.save(2, weights=torch.ones(10))
        keeper.wait()
        assert keeper.steps() == [1, 2]
    assert all(name.startswith("step-") for name in bucket.names())


def _on_two_ranks(url: str, options: dict[str, Any]) -> list[Any]:
    model = fully_shard(nn.Linear(4, 6), mesh=init_device_mesh("cpu", (2,)))
    nn.init.constant_(model.weight, 7)
    found: list[Any] = []
    with torchlift.Keeper(url, keep=2, storage_options=options) as keeper:
        found.append(keeper.resume(model=model))
        for step in (1, 2, 3):
            nn.init.constant_(model.bias, step)
            keeper.save(step, model=model, place=dist.get_rank())
        keeper.wait()
        found.append(keeper.steps())
    for param in model.parameters():
        nn.init.zeros_(param)
    with torchlift.Keeper(url, storage_options=options) as keeper:
        found.append(keeper.resume(model=model))
    found.append([param.full_tensor().unique().tolist() for param in model.parameters()])
    try:
        torchlift.save(model, f"{url}/one.safetensors", storage_options=options)
    except PlacementError as error:
        found.append("several ranks cannot write into one object" in str(error))
    report = torchlift.save(model, f"{url}/dcp", format="dcp", storage_options=options)
    found.append((len(report.files), report.written))
    writer = CheckpointWriter(f"{url}/torch", storage_options=options)
    dcp.save({"model": model.state_dict(), "n": 7}, storage_writer=writer)
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("by", ["s3fs", "obstore"])
def test_two_ranks_keep_a_run_in_a_bucket(server: S3Server, by: str, tmp_path: Any) -> None:
    """Each sends objects of its own; the marker is last; one object for both is refused."""
    bucket = server.bucket(by)
    results = torchlift.distributed.on_ranks(2, _on_two_ranks, bucket.url, bucket.options)
    for found in results:
        assert found[:5] == [None, [2, 3], 3, [[7.0], [3.0]], True]
        assert found[5] == (3, 60)
    names = bucket.names()
    assert [name for name in names if name.endswith(".metadata")] == [
        "dcp/.metadata", "step-000000002/.metadata", "step-000000003/.metadata", "torch/.metadata",
    ]  # fmt: skip
    assert len(names) == 12
    assert bucket.unfinished() == []
    for name in ("dcp", "torch", "step-000000003"):
        assert torchlift.verify(bucket.fetched(name, tmp_path)).ok
        assert all(b"secret" not in bucket.data(each) for each in names)
    with torchlift.open(str(tmp_path / "torch")) as ckpt:
        assert ckpt["model.bias"].tolist() == [3.0] * 6
        assert ckpt.objects["n"] == 7


def _save_and_resume(url: str, options: dict[str, Any], first: int) -> list[int]:
    model = nn.Linear(4, 6)
    with torchlift.Keeper(url, keep=None, storage_options=options) as keeper:
        keeper.resume(model=model)
        for step in range(first, first + 3):
            keeper.save(step, model=model)
        keeper.wait()
        return keeper.steps()


@pytest.mark.distributed
@pytest.mark.parametrize("by", ["s3fs", "obstore"])
def test_each_folder_is_listed_once_by_two_ranks(server: S3Server, by: str) -> None:
    """Not at each save, for its name, for the sweep and for steps, by each rank."""
    bucket, on_ranks = server.bucket(by), torchlift.distributed.on_ranks
    for found in on_ranks(2, _save_and_resume, bucket.url, bucket.options, 101):
        assert found == [101, 102, 103]
    steps = range(1, 41)
    for step in steps:
        bucket.put(f"step-{step:09d}/.metadata", b"")
    bucket.requests.clear()
    for found in on_ranks(2, _save_and_resume, bucket.url, bucket.options, 104):
        assert found == [*steps, *range(101, 107)]
    queries = [unquote(query) for method, query, _ in bucket.requests if method == "GET"]
    listed = Counter(
        f"step-{step:09d}" for step in (*steps, 101, 102) for query in queries
        if f"prefix=run/step-{step:09d}/" in query
    )  # fmt: skip
    assert len(listed) == 42
    # By the first rank, and for its own `steps` by the second one.
    assert {*listed.values()} == {2}, listed
    assert sum("prefix=run/&" in f"{query}&" for query in queries) <= 20

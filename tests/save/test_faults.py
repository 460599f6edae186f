"""What a save that fails leaves: the old checkpoint or the new one, and nothing else."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from failing_reads import failing
from forked import PIPE, Forked
from full_disk import file_size_limit
from save_states import number_of
from save_states import state_of as small_state_of

import torchlift
from torchlift.errors import CheckpointError, IntegrityError

#: How many processes are killed; 200 show what the documentation promises, and take minutes.
KILLS = int(os.environ.get("TORCHLIFT_KILLS", "24"))

#: What to write -> the name to write, and arguments.
WAYS = {
    "torch-zip": ("x.pt", {}),
    "safetensors": ("x.safetensors", {}),
    "sharded": ("x.safetensors.index.json", {"max_shard_size": 100_000}),
    "dcp": ("x", {"format": "dcp"}),
}
each_way = pytest.mark.parametrize("way", WAYS)
COUNT, SIZE = 6, 20_000
state_of = partial(small_state_of, count=COUNT, size=SIZE)


def contents(path: Path) -> dict[str, bytes]:
    """Every file in a folder."""
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@each_way
@pytest.mark.parametrize("there", [True, False])
def test_a_file_size_limit_leaves_what_was_there(tmp_path: Path, way: str, there: bool) -> None:
    """Byte for byte, and no folder either where there was none; then a save succeeds."""
    name, options = WAYS[way]
    path = tmp_path / name
    if there:
        torchlift.save(state_of(1), path, **options)
    before = contents(tmp_path)
    for limit in (30_000, 70_000):
        with (
            file_size_limit(limit),
            pytest.raises(CheckpointError, match=r"the file cannot be written; found .*too large"),
        ):
            torchlift.save(state_of(2), path, **options)
        assert contents(tmp_path) == before
        assert there or os.listdir(tmp_path) == []
    torchlift.save(state_of(3), path, **options)
    assert number_of(path) == 3


class Stopped(BaseException):
    """What no code of ours expects, like an interrupt."""


def fails(true: Any, calls: list[object], nth: int, error: BaseException, *args: Any) -> Any:
    """A function of the system whose nth call fails."""
    calls.append(args)
    if len(calls) == nth:
        raise error
    return true(*args)


@each_way
@pytest.mark.parametrize("name", ["pwrite", "fsync", "replace", "truncate"])
def test_every_step_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, name: str
) -> None:
    """With an error of the system or any exception: the old state or, at last, the new one."""
    target, options = WAYS[way]
    path = tmp_path / target
    torchlift.save(state_of(1), path, **options)
    true = getattr(os, name)
    for error in (OSError(5, "Input/output error"), Stopped()):
        for nth in range(1, 100):
            calls: list[object] = []
            before = contents(tmp_path)
            with monkeypatch.context() as patch:
                patch.setattr(os, name, partial(fails, true, calls, nth, error))
                met = None
                try:
                    torchlift.save(state_of(2), path, **options)
                except (CheckpointError, Stopped) as raised:
                    met = raised
            if isinstance(met, Stopped):
                assert number_of(path) in (1, 2)
            elif met is not None and "in place" in str(met):
                assert number_of(path) == 2
            elif met is not None:
                assert contents(tmp_path) == before
                assert "Input/output error" in str(met)
            leftover = [file for file in contents(tmp_path) if file.endswith(".part")]
            assert not leftover
            if len(calls) < nth:
                break
            if number_of(path) == 2:
                torchlift.save(state_of(1), path, **options)
        else:
            pytest.fail("it never succeeds")
    count = len(contents(tmp_path))
    torchlift.save(state_of(3), path, **options)
    assert len(contents(tmp_path)) == count
    assert number_of(path) == 3


@each_way
def test_an_exception_while_values_are_read_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Of a source that fails while it is converted."""
    name, options = WAYS[way]
    source, path = tmp_path / "source.safetensors", tmp_path / "to" / name
    torchlift.save(state_of(2), source)
    torchlift.save(state_of(1), path, **options)
    before = contents(path.parent)
    for error in (OSError(5, "Input/output error"), MemoryError()):
        with monkeypatch.context() as patch, torchlift.open(source) as ckpt:
            patch.setattr(os, "preadv", failing(error, nth=3))
            with pytest.raises((IntegrityError, MemoryError)):
                torchlift.convert(ckpt, path, overwrite=True, **options)
        assert contents(path.parent) == before


def test_where_no_thread_can_be_started_sums_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while Python shuts down, or where a process has as many as it may."""

    def denied(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", denied)
        torchlift.save({"w": torch.ones(1 << 20)}, tmp_path / "x.pt")
    report = torchlift.verify(tmp_path / "x.pt")
    assert report.ok
    assert not report.unchecked_nbytes


_WRITER = """
import json, sys, torch, torchlift
path, options, source = json.loads(sys.argv[1])
for number in map(float, sys.argv[2:]):
    state = {f"t{at}": torch.full((%d,), number) for at in range(%d)}
    if source:
        torchlift.convert(source, path, overwrite=True, **options)
    else:
        torchlift.save(state, path, **options)
""" % (SIZE, COUNT)  # noqa: UP031 - braces


def writer(path: Path, way: str, numbers: Iterable[int], source: str = "") -> Forked:
    """A process that writes one state after the other."""
    return Forked(_WRITER, json.dumps([str(path), WAYS[way][1], source]), *numbers, stderr=PIPE)


def ended(saver: Forked) -> str:
    """What it complained of."""
    with saver:
        assert saver.stderr is not None
        return saver.stderr.read()


@each_way
def test_of_two_savers_at_once_one_wins_whole(tmp_path: Path, way: str) -> None:
    """At every moment what is there is complete and all of it is one writer's; nothing is left."""
    path = tmp_path / WAYS[way][0]
    torchlift.save(state_of(1), path, **WAYS[way][1])
    files = len(contents(tmp_path))
    looks = 0
    savers = [writer(path, way, [number] * 8) for number in (1, 2)]
    try:
        while any(saver.poll() is None for saver in savers):
            # What is replaced while it is read is an error, and never a mixture.
            with suppress(CheckpointError, FileNotFoundError):
                assert number_of(path) in (1, 2)
                looks += 1
    finally:
        errors = [ended(saver) for saver in savers]
    assert errors == ["", ""]
    assert looks
    assert number_of(path) in (1, 2)
    assert len(contents(tmp_path)) == files


@pytest.mark.slow
def test_kill_9_at_random_moments_loses_nothing(tmp_path: Path) -> None:
    """Of saves and conversions: the old state or the new one, and no debris after the next save."""
    chance = random.Random(7)
    source = tmp_path / "source.safetensors"
    torchlift.save(state_of(2), source)
    partial = 0
    for number in range(KILLS):
        way = list(WAYS)[number % len(WAYS)]
        name, options = WAYS[way]
        path = tmp_path / "to" / way / name
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
            torchlift.save(state_of(1), path, **options)
        files = len(contents(path.parent))
        converts = number // 4 % 2
        moment = chance.uniform(0.001, 0.2)
        with writer(path, way, [1, 2] * 500, str(source) if converts else "") as child:
            time.sleep(moment)
            child.kill()
        assert number_of(path) in (1, 2), (way, moment)
        partial += len(contents(path.parent)) != files
        if converts:  # which goes on with the shards that were finished
            torchlift.convert(source, path, overwrite=True, **options)
            assert number_of(path) == 2
            assert len(contents(path.parent)) == files, (way, os.listdir(path.parent))
        torchlift.save(state_of(1), path, **options)
        assert number_of(path) == 1
        assert len(contents(path.parent)) == files, (way, os.listdir(path.parent))
    print(f"{KILLS} killed, {partial} of them with files of theirs in the folder; 0 lost")
    assert partial

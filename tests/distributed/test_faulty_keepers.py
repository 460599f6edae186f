"""Whatever fails on one rank of a Keeper ends it on all; what is complete stays, nothing is left.

One rank meets an error, runs out of memory, is interrupted or dies at its nth call into the file
system or `torch.distributed`, in a save with its retention, a resume or a close. CI takes a sample
of the n; ``TORCHLIFT_FAULT_EVERY=1`` takes every one, which is some thousand trials. Or the whole
job is killed, at ``TORCHLIFT_KILLS`` random moments.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

pytestmark = pytest.mark.slow


FAULTY, KILLED = (Path(__file__).with_name(f"{name}_keepers.py") for name in ("faulty", "killed"))
SUPPORT = Path(__file__).parent.with_name("support")
EVERY = int(os.environ.get("TORCHLIFT_FAULT_EVERY", "101"))
KILLS = int(os.environ.get("TORCHLIFT_KILLS", "0"))


def run(script: Path, *arguments: object) -> list[str]:
    """The lines that a script prints."""
    paths = [str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.splitlines()


@cache
def trials() -> list[tuple[str, str, str]]:
    """What came of all trials: way, what is wrong, and the call that failed."""
    with TemporaryDirectory() as folder:
        return [tuple(json.loads(line)) for line in run(FAULTY, folder, EVERY)]


@pytest.mark.distributed
@pytest.mark.parametrize("way", ["start", "save", "resume", "close"])
def test_a_fault_of_one_rank_ends_a_keeper_on_all(way: str) -> None:
    """None waits for it; the older checkpoint resumes, and the next save leaves itself alone."""
    found = [trial for trial in trials() if trial[0] == way]
    print(f"{len(found)} trials, {sum(bool(at) for *_, at in found)} raised, the others died")
    assert not "".join(wrong for *_, wrong, _ in found), "\n".join(w for *_, w, _ in found if w)
    assert len(found) > 1, "only the one without a fault"


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "kills"), [(1, 3), (2, 3), (4, 1)])
def test_a_job_that_is_killed_goes_on_where_it_was(ranks: int, kills: int, tmp_path: Path) -> None:
    """The latest complete checkpoint has all its values, and the next save leaves nothing else."""
    done = run(KILLED, tmp_path, KILLS or kills, ranks)
    ((wrong, partial),) = map(json.loads, done)
    assert not wrong, wrong
    print(f"{KILLS or kills} jobs killed, {partial} of them with files that were begun; 0 lost")

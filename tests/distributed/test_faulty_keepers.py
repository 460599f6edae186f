"""Whatever fails on one rank of a Keeper ends it on all; what is complete stays, nothing is left.

One rank meets an error, runs out of memory, is interrupted or dies at its nth call into the file
system or `torch.distributed`, in a save with its retention, a resume or a close. CI takes a sample
of the n; ``TORCHLIFT_FAULT_EVERY=1`` takes every one, which is some thousand trials.
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


FAULTY = Path(__file__).with_name("faulty_keepers.py")
SUPPORT = Path(__file__).parent.with_name("support")
EVERY = int(os.environ.get("TORCHLIFT_FAULT_EVERY", "101"))


@cache
def trials() -> list[tuple[str, str, str]]:
    """What came of all trials: way, what is wrong, and the call that failed."""
    paths = [str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    with TemporaryDirectory() as folder:
        lines = subprocess.run(
            [sys.executable, FAULTY, folder, str(EVERY)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.splitlines()
    return [tuple(json.loads(line)) for line in lines]


@pytest.mark.distributed
@pytest.mark.parametrize("way", ["start", "save", "resume", "close"])
def test_a_fault_of_one_rank_ends_a_keeper_on_all(way: str) -> None:
    """None waits for it; the older checkpoint resumes, and the next save leaves itself alone."""
    found = [trial for trial in trials() if trial[0] == way]
    print(f"{len(found)} trials, {sum(bool(at) for *_, at in found)} raised, the others died")
    assert not "".join(wrong for *_, wrong, _ in found), "\n".join(w for *_, w, _ in found if w)
    assert len(found) > 1, "only the one without a fault"

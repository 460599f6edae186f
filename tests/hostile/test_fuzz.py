"""Valid files of every format with something changed: an index, or an error that has a cause."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_files import assert_in_bounds
from guarded import answers, guard, look
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from valid_files import FORMATS, Parts, changed, write_valid

#: A folder of a test is used for all examples: each writes all files again.
_often = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Parts]]:
    """For each format some files, as their parts."""
    folder = tmp_path_factory.mktemp("valid")
    return {name: list(seeds(folder / name)) for name, (_, _, seeds) in FORMATS.items()}


def examine(path: Path) -> None:
    """Read a file that may be damaged under guard, and list all of it."""
    with guard(path if path.is_dir() else path.parent):
        index = look(str(path))
    if index is not None:
        assert_in_bounds(index)


@pytest.mark.parametrize("name", FORMATS)
def test_what_was_not_changed_is_read(
    valid: dict[str, list[Parts]], tmp_path: Path, name: str
) -> None:
    """The files that are changed below are valid ones, and most have tensors."""
    found = [write_valid(tmp_path / str(at), name, parts) for at, parts in enumerate(valid[name])]
    indexes = [look(str(path)) for path in found]
    assert sum(bool(index and index.entries) for index in indexes) >= len(found) / 2


@pytest.mark.parametrize("name", FORMATS)
@settings(_often, max_examples=150)
@given(seed=st.integers(0, 2**32), parts=st.data())
def test_changed_files_are_read_or_refused(
    valid: dict[str, list[Parts]], tmp_path: Path, name: str, seed: int, parts: st.DataObject
) -> None:
    """A pickle, a header, a name or the data, whose lengths fit again; or bytes of a whole file."""
    drawn, draw = list(parts.draw(st.sampled_from(valid[name]))), random.Random(seed)
    for _ in range(draw.randint(0, 3)):
        at = draw.randrange(len(drawn))
        drawn[at] = changed(drawn[at], draw)
    path = write_valid(tmp_path / "d", name, drawn)
    if draw.random() < 0.4:
        file = draw.choice(sorted(path.iterdir())) if path.is_dir() else path
        file.write_bytes(changed(file.read_bytes(), draw))
    examine(path)


def test_damaged_files_take_neither_memory_nor_time(
    valid: dict[str, list[Parts]], tmp_path: Path
) -> None:
    """A child counts what a few hundred damaged files cost."""
    draw, paths = random.Random(0), []
    for at in range(30):
        for name, files in valid.items():
            parts = [changed(part, draw) if draw.random() < 0.2 else part
                     for part in draw.choice(files)]  # fmt: skip
            paths.append(write_valid(tmp_path / f"{name}{at}", name, parts))
    assert len(answers(*paths)) == len(paths)


@pytest.mark.slow
def test_a_fuzzer_finds_nothing_at_once(tmp_path: Path) -> None:
    """A short run, of every format, of what has run for millions of inputs: fuzz_targets.py."""
    pytest.importorskip("atheris")
    target, prefix = Path(__file__).with_name("fuzz_targets.py"), f"-artifact_prefix={tmp_path}/"
    done = subprocess.run(
        [sys.executable, target, "every", "-runs=300", "-seed=1", prefix],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("Done 300 runs") == len(FORMATS)

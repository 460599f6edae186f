"""Recipes are executed in several processes, and what measures seconds runs alone."""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import notebooks
import pytest
import recipe_workers
from rules import each
from sphinx_gallery.py_source_parser import split_code_and_text_blocks

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="nothing forks elsewhere"),
    # Python 3.12 warns of a fork beside threads, which torch's tests have started by now.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]
CLOCKED = "from time import perf_counter\n"
MEASURING = "start = perf_counter()"


@pytest.fixture
def scripts(tmp_path: Path) -> list[Path]:
    """Eight recipes in two chapters; the odd ones use a clock."""
    made = []
    for number in range(8):
        script = tmp_path / "recipes" / f"0{number // 4}_chapter" / f"plot_{number}.py"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(CLOCKED if number % 2 else "", encoding="utf-8")
        made.append(script)
    return made


def test_no_cell_runs_beside_one_that_measures_seconds(scripts: list[Path], tmp_path: Path) -> None:
    """And cells that do not measure run at the same time."""
    log = os.open(tmp_path / "log", os.O_CREAT | os.O_APPEND | os.O_RDWR)

    def execute(compiler: object, block: Any, names: object, script: dict[str, Any]) -> str:
        name = f"{Path(script['src_file']).stem}.{block.content}"
        os.write(log, f"begins {name}\n".encode())
        time.sleep(0.02)
        os.write(log, f"ends {name}\n".encode())
        return ""

    waits = recipe_workers.with_tokens(execute, 2)

    def generate(name: str, target: Path, source: Path, conf: object) -> str:
        for content in "x = 1", MEASURING, "print()":
            block = SimpleNamespace(type="code", content=content)
            waits(None, block, None, {"src_file": str(source / name), "execute_script": True})
        return name

    run = recipe_workers.in_workers(generate, 2)
    for script in scripts:
        pages = tmp_path / "pages" / script.parent.name
        assert run(script.name, pages, script.parent, {}) == script.name
    lines = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    os.close(log)
    assert len(lines) == 2 * 3 * len(scripts)
    measuring = [n for n, line in enumerate(lines) if re.match(r"begins plot_[1357]\.start", line)]
    assert len(measuring) == 4
    assert all(lines[n + 1] == lines[n].replace("begins", "ends") for n in measuring)
    assert any(one[:6] == other[:6] == "begins" for one, other in itertools.pairwise(lines))


@each(notebooks.scripts())
def test_a_cell_that_prints_seconds_is_executed_alone(script: Path) -> None:
    """Work in the other process would make the numbers on the page larger."""
    text = script.read_text(encoding="utf-8")
    _, blocks = split_code_and_text_blocks(script)
    cells = [block.content for block in blocks if block.type == "code"]
    printed = [cell for cell in cells if re.search(r"f\} s\b", cell)]
    assert all(recipe_workers.measures_seconds(text, cell) for cell in printed)

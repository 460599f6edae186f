"""Each test is of one lane: `make test`, which everyone runs on each change, or `make slow`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from _pytest.mark.expression import Expression

ROOT = Path(__file__).resolve().parent.parent
MAKEFILE = ROOT.joinpath("Makefile").read_text(encoding="utf-8")


def lanes() -> dict[str, Expression]:
    """The expressions of the Makefile that choose tests by their marks."""
    found = re.findall(r"^(\w+)_LANE := (.+)$", MAKEFILE, re.MULTILINE)
    return {name: Expression.compile(text) for name, text in found}


def test_every_test_is_in_one_lane(marks: dict[str, set[str]]) -> None:
    """None in neither, none in two; and each lane has some."""
    counts: Counter[str] = Counter()
    for name, known in marks.items():
        chosen = [lane for lane, rule in lanes().items() if rule.evaluate(known.__contains__)]
        assert len(chosen) == 1, f"{name} is in the lanes {chosen}"
        counts[chosen[0]] += 1
    assert set(counts) == {"FAST", "SLOW"}


def test_both_lanes_run_all_that_they_choose() -> None:
    """What the README, the CI and a lane's target name is what runs the tests of that lane."""
    goals = dict(re.findall(r"^([a-z-]+):(.*?)(?:##.*)?$", MAKEFILE, re.MULTILINE))
    for target, lane in ("unit", "FAST"), ("unit-slow", "SLOW"):
        recipe = MAKEFILE.partition(f"\n{target}: ")[2].partition("\n\n")[0]
        assert f'-m "$({lane}_LANE)"' in recipe
    assert goals["slow"].split() == ["unit-slow", "nbval"]
    assert goals["test"].split() == ["lint", "$(WHEEL)", "$(APART)"]
    test = MAKEFILE.partition("\ntest: ")[2].partition("\n\n")[0]
    made = re.findall(r"^\t.*\$\(MAKE\) --no-print-directory ([a-z ]+)", test, re.MULTILINE)
    assert " ".join(made).split() == ["site", "doctest", "types", "touched", "unit", "skipped"]
    ci = ROOT.joinpath(".ci", "run").read_text(encoding="utf-8")
    assert "\nexec make test slow" in ci


def test_worlds_of_four_ranks_are_slow_but_those_of_loading(marks: dict[str, set[str]]) -> None:
    """And what is marked so by hand is, too."""
    loading = {name: known for name, known in marks.items() if "every_world" in known}
    assert loading
    assert not [name for name, known in loading.items() if "slow" in known]
    keepers = [
        name for name in marks if "distributed/test_keeper_ranks.py" in name and "[4" in name
    ]
    assert keepers
    assert all("slow" in marks[name] for name in keepers)


# ---- what was skipped

SKIPS = """
import pytest

@pytest.mark.parametrize("number", [1, 2, 3])
def test_one(number):
    if number > 1:
        pytest.skip("no tool here: install the tool")

@pytest.mark.skip(reason="no machine: use another one")
def test_two():
    pass
"""


def test_make_test_ends_with_what_was_skipped(tmp_path: Path) -> None:
    """Each reason once, with the number of tests. It says how to get the checks."""
    tmp_path.joinpath("test_a.py").write_text(SKIPS + "pytest.importorskip('no_such_module')")
    tmp_path.joinpath("test_b.py").write_text(SKIPS)
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "test_b.py"]
    runs = [
        subprocess.run([*command, *more], cwd=tmp_path, check=True, stdout=subprocess.PIPE).stdout
        for more in ([], ["test_a.py"])
    ]
    logs = tmp_path / "one.log", tmp_path / "two.log"
    for log, printed in zip(logs, runs, strict=True):
        log.write_bytes(printed)
    skipped = ["make", "--no-print-directory", "skipped", f"LOGS={' '.join(map(str, logs))}"]
    lines = subprocess.check_output(skipped, cwd=ROOT, text=True).splitlines()
    assert lines[:2] == [
        "4 skipped: no tool here: install the tool",
        "2 skipped: no machine: use another one",
    ]
    assert lines[2].startswith("1 skipped: could not import 'no_such_module'")
    assert not lines[3:]
    recipe = MAKEFILE.partition("\ntest: ")[2].partition("\n\n")[0]
    assert "skipped LOGS=" in recipe.splitlines()[-1]
    assert '"-ra"' in ROOT.joinpath("pyproject.toml").read_text("utf-8"), "else pytest lists none"

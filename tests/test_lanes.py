"""Each test is of one lane: `make test`, which everyone runs on each change, or `make slow`."""

from __future__ import annotations

import re
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

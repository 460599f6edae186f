"""The hand-written pages say what is true: every block of code on them runs as it stands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(path for path in ROOT.glob("docs/*.rst") if path.name != "sg_execution_times.rst"),
    *sorted(ROOT.glob("docs/_includes/*.rst")),
    ROOT / "docs" / "api" / "index.rst",
    *sorted(ROOT.glob("recipes/**/README.md")),
    *sorted(ROOT.glob("recipes/**/GALLERY_HEADER.rst")),
]
MARKDOWN = re.compile(r"^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
RST = re.compile(
    r"^(?P<indent> *)\.\. code-block:: (?P<language>\w+)\n(?: +:.*\n)*\n"
    r"(?P<code>(?:(?P=indent)   .*\n|\n)+)",
    re.MULTILINE,
)
#: Blocks that show what is no code.
TEXT = {"text"}

# One interpreter for all the blocks of a page: a later one uses what an earlier one made.
RUNNER = """
import json, subprocess, sys

names = {"__name__": "__main__"}
for language, code in json.loads(sys.stdin.read()):
    if language == "python":
        exec(compile(code, "page", "exec"), names)
    else:
        subprocess.run(["bash", "-euc", code], stdin=subprocess.DEVNULL, check=True)
"""

each_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(ROOT)).replace("/", "-")
)


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """(language, code) of every block, with the prompts of a console taken off."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in (MARKDOWN if page.suffix == ".md" else RST).finditer(text):
        language, code = match["language"], textwrap.dedent(match["code"])
        if not language:  # a picture
            assert re.match(r" *[^\n]*-->", code), f"{page.name}: what is this block?\n{code}"
            continue
        if language == "console":
            lines = code.strip().splitlines()
            assert all(line.startswith("$ ") for line in lines), code
            language, code = "bash", "\n".join(line.removeprefix("$ ") for line in lines)
        found.append((language, code))
    return found


def is_for_a_clone(command: str) -> bool:
    """Whether it installs, or is one of the Makefile's: checked by name, not run."""
    return command.startswith(("make ", "pip install "))


@each_page
def test_every_block_of_a_page_runs_as_it_stands(page: Path, tmp_path: Path) -> None:
    """In order, in one new interpreter and an empty folder."""
    found = []
    for language, code in blocks_of(page):
        assert language in {"python", "bash"} | TEXT, f"{page.name}: {language}"
        lines = code.splitlines()
        kept = lines if language == "python" else [x for x in lines if not is_for_a_clone(x)]
        if kept and language not in TEXT:
            found.append((language, "\n".join(kept)))
    if found:
        run = run_blocks(found, tmp_path)
        assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"


def run_blocks(blocks: list[tuple[str, str]], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run blocks in order, as a reader in this folder would."""
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    env = {**os.environ, "PATH": os.pathsep.join(path), "PYTHONWARNINGS": "error"}
    for name in "PYTHONPATH", "TORCHLIFT_SITE":  # as absolute paths: the folder is another one
        if name in env:
            env[name] = os.pathsep.join(map(os.path.abspath, env[name].split(os.pathsep)))
    return subprocess.run(
        [sys.executable, "-u", "-c", RUNNER],
        cwd=folder,
        env=env,
        input=json.dumps(blocks),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@each_page
def test_page_names_targets_extras_and_functions_that_exist(page: Path) -> None:
    """What a page tells a reader to type, or speaks of as ours, is there."""
    text = page.read_text(encoding="utf-8")
    makefile = ROOT.joinpath("Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    typed = re.findall(r"^ *\$ make ([a-z-]+)|`make ([a-z-]+)", text, re.MULTILINE)
    assert {one or two for one, two in typed} <= targets

    project = ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8")
    extras = set(re.findall(r"^([a-z]+) = \[", project, re.MULTILINE))
    assert set(re.findall(r'pip install "?[.\w]*\[(\w+)\]', text)) <= extras

    import torchlift

    for name in re.findall(r"`~?torchlift((?:\.[A-Za-z_]\w*)+)", text):
        if name.endswith((".md", ".py")):
            continue
        found: object = torchlift
        for part in name[1:].split("."):
            assert hasattr(found, part), f"torchlift{name}"
            found = getattr(found, part)


def test_pages_do_not_promise_what_is_not_there() -> None:
    """The summary in the package, in its metadata and on the first page is one."""
    import torchlift

    project = ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8")
    readme = ROOT.joinpath("README.md").read_text(encoding="utf-8")
    (summary,) = re.findall(r'^description = "(.*)"$', project, re.MULTILINE)
    assert torchlift.__doc__ == summary
    assert summary.removesuffix(".") in readme.replace("**", "")
    for verb in ("convert", "save"):
        assert hasattr(torchlift, verb) or verb not in summary


def test_the_page_of_formats_has_a_row_for_each() -> None:
    """In the order in which `Checkpoint.format` lists them."""
    import torchlift

    page = ROOT.joinpath("docs/formats.rst").read_text(encoding="utf-8")
    rows = re.findall(r"^   \* - ``([a-z0-9-]+)``$", page, re.MULTILINE)
    (listed,) = re.findall(r"^ *format: (.*?)\.$", torchlift.Checkpoint.__doc__ or "", re.M | re.S)
    assert rows == re.findall(r'``"([a-z0-9-]+)"``', listed)


def test_what_pages_show_of_a_run_is_what_it_prints(tmp_path: Path) -> None:
    """A block of text on the site is the end of what the blocks before it print."""
    shown = 0
    for name in "commands", "formats", "security":
        blocks = blocks_of(ROOT / "docs" / f"{name}.rst")
        for at, (language, code) in enumerate(blocks):
            if language in TEXT:
                run = run_blocks([block for block in blocks[:at] if block[0] not in TEXT], tmp_path)
                assert run.stdout.endswith(code.strip() + "\n"), f"{run.stdout}\n{run.stderr}"
                shown += 1
    assert shown == 7

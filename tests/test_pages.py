"""The hand-written pages say what is true: every block of code on them runs as it stands."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from contextlib import chdir
from pathlib import Path

import pytest
from forked import run

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(path for path in ROOT.glob("docs/*.rst") if path.name != "sg_execution_times.rst"),
    *sorted(ROOT.glob("docs/guide/*.rst")),
    *sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("docs/guide/*.md")]),
    *sorted(ROOT.glob("docs/_includes/*.rst")),
    ROOT / "docs" / "api" / "index.rst",
    *sorted(ROOT.glob("recipes/**/README.md")),
    *sorted(ROOT.glob("recipes/**/GALLERY_HEADER.rst")),
]
MARKDOWN = re.compile(
    r"^(?:<!-- class: (?P<class>[\w-]+) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
RST = re.compile(
    r"^(?P<indent> *)\.\. code-block:: (?P<language>\w+)\n(?: +:class: (?P<class>.*)\n)?\n"
    r"(?P<code>(?:(?P=indent)   .*\n|\n)+)",
    re.MULTILINE,
)
#: Blocks that show what is no code: on the site, the end of what the blocks before print.
TEXT = {"text"}
#: Pages of which a reader copies one block.
ALONE = {"troubleshooting.md", "migration.rst"}

# One process for all the blocks of a page. A later one uses what an earlier one made, unless
# each is to run alone: in an empty folder, with no names.
RUNNER = """
import json, os, pathlib, subprocess, sys

alone, *blocks = json.loads(sys.argv[1])
names = {"__name__": "__main__"}
top = pathlib.Path.cwd()
for number, (language, code) in enumerate(blocks):
    if alone:
        names = {"__name__": "__main__"}
        os.chdir(top)
        os.mkdir(str(number))
        os.chdir(str(number))
    if language == "python":
        exec(compile(code, f"block {number}", "exec"), names)
    else:
        subprocess.run(["bash", "-euc", code], stdin=subprocess.DEVNULL, check=True)
    print(end=chr(30), flush=True)
"""

each_page = pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: str(page.relative_to(ROOT)).replace("/", "-")
)
pytestmark = pytest.mark.long


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """(language, code) of every block, with the prompts of a console taken off."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in (MARKDOWN if page.suffix == ".md" else RST).finditer(text):
        language, code = match["language"], textwrap.dedent(match["code"])
        if match["class"] == "tl-command":  # of a scheduler or a server, which no test starts
            continue
        if not language:  # a picture
            assert re.match(r" *[^\n]*-->", code), f"{page.name}: what is this block?\n{code}"
            continue
        if language == "console":
            lines = code.strip().splitlines()
            assert all(line.startswith("$ ") for line in lines), code
            language, code = "bash", "\n".join(line.removeprefix("$ ") for line in lines)
        found.append((language, code))
    return found


@each_page
def test_a_line_of_code_fits_the_page(page: Path) -> None:
    """On a laptop, this many columns fit between the sidebars. Output wraps by itself."""
    code = [text for language, text in blocks_of(page) if language not in TEXT]
    scripts = re.findall(r"^\[`?(cluster\w*\.py)`?\]", page.read_text("utf-8"), re.MULTILINE)
    code += [page.with_name(script).read_text(encoding="utf-8") for script in scripts]
    lines = [line for text in code for line in text.splitlines()]
    # A forge has more room, so the README may be wider.
    assert page.parent == ROOT or [line for line in lines if len(line) > 96] == []


def is_for_a_clone(command: str) -> bool:
    """Whether it installs, or is one of the Makefile's: checked by name, not run."""
    return command.startswith(("make ", "pip install "))


@each_page
def test_every_block_of_a_page_runs_and_prints_what_is_shown(page: Path, tmp_path: Path) -> None:
    """In order, as it stands, in one new process and an empty folder."""
    blocks: list[tuple[str, str]] = []
    shown: list[tuple[int, str]] = []
    for language, code in blocks_of(page):
        assert language in {"python", "bash"} | TEXT, f"{page.name}: {language}"
        lines = code.splitlines()
        kept = lines if language == "python" else [x for x in lines if not is_for_a_clone(x)]
        if language in TEXT:
            shown.append((len(blocks), code.strip()))
        elif kept:
            blocks.append((language, "\n".join(kept)))
    if blocks:
        done = run_blocks(blocks, tmp_path, alone=page.name in ALONE)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        folder = rf"{re.escape(str(tmp_path))}/(\d+/)?"  # a page shows no path of this machine
        printed = re.sub(folder, "", done.stdout).split(chr(30))
        for ran, text in shown if page.parent != ROOT else []:
            lines = "".join(printed[:ran]).splitlines()
            before = "\n".join(line.expandtabs(4).rstrip() for line in lines)
            assert before.endswith(text), f"{page.name} shows\n{text}\nafter\n{before[-4000:]}"


def run_blocks(
    blocks: list[tuple[str, str]], folder: Path, alone: bool
) -> subprocess.CompletedProcess[str]:
    """Run blocks in order, as a reader in this folder would; a warning is an error."""
    path = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    env = {"PATH": os.pathsep.join(path), "PYTHONWARNINGS": "error"}
    for name in "PYTHONPATH", "TORCHLIFT_SITE":  # as absolute paths: the folder is another one
        if name in os.environ:
            env[name] = os.pathsep.join(map(os.path.abspath, os.environ[name].split(os.pathsep)))
    with chdir(folder):
        return run(RUNNER, json.dumps([alone, *blocks]), env=env)


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
        if name.startswith(".integrations"):  # imported by their own names, with their frameworks
            assert importlib.util.find_spec(f"torchlift{name}"), name
            continue
        found: object = torchlift
        for part in name[1:].split("."):
            assert hasattr(found, part), f"torchlift{name}"
            found = getattr(found, part)


def test_the_summary_is_one() -> None:
    """The summary in the package, in its metadata and on the first page is one."""
    import torchlift

    project = ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8")
    readme = ROOT.joinpath("README.md").read_text(encoding="utf-8")
    (summary,) = re.findall(r'^description = "(.*)"$', project, re.MULTILINE)
    assert torchlift.__doc__ == summary
    assert summary.removesuffix(".") in readme.replace("**", "")


#: A number with a unit, as a measurement has one.
NUMBER = re.compile(
    r"\b\d[\d.,]*\s+(?:(?:[mµ]?s|[KMGT]i?B|times)\b|%|(?:milli|micro)?seconds?\b|minutes?\b|hours?\b)"
    r"|\b(?:two|three|four|five|ten) times\b|(?<![\d.])\d\.\d+ \(\d"
)
#: What is decided, computed or cited, and so may be typed: page -> number -> the reason.
DEFINED = {
    "": {
        "13 GB": "the example of memory.md, in its title",
        "16 GB": "the example of memory.md, in its title",
        "32 MiB": "what a conversion may use, which a test measures",
        "64 MiB": "what a load may use for buffers, and the size of an example",
    },
    "cluster.md": {"10 minutes": "the timeout of torch for NCCL"},
    "compared.rst": {
        "40 %": "cited from Orbax's page, which is linked",
        "85 %": "cited from Orbax's page, which is linked",
        "97 %": "cited from Orbax's page, which is linked",
    },
    "memory.md": {
        "8 GB": "less than the file of the example",
        "26 GB": "twice the file of the example",
        "52 GB": "four times the file of the example",
        "four times": "counted in the table: gradients, two averages, changed weights",
    },
    "performance.rst": {
        "4 MiB": "the size of a pinned block",
        "16 MiB": "the part of the buffers that a cast may use",
        "1 KB": "the size of the tensors of a chart",
        "ten times": "what linear means",
    },
    "remote.rst": {
        "30 seconds": "the longest wait for a server that asks for one",
        "60 seconds": "the time after which a range fails",
        "64 KiB": "the size of the first request",
        "4 KiB": "the size of a request for the header of an item",
        "8 MiB": "the size of a range",
        "4 MiB": "the size of a range that is cast",
        "1 MiB": "the gap that is read with its neighbours",
    },
}


NUMBERED = ROOT / "docs", ROOT / "docs" / "guide"


def typed_numbers(page: Path) -> list[str]:
    """The numbers with a unit that were typed into the prose of a page."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".md":
        text = re.sub(r"<!-- measured table: start.*?table: end -->", "", text, flags=re.DOTALL)
        text = re.sub(r"(?ms)^```.*?^```|<!--.*?-->", "", text)
    else:
        text = re.sub(r"(?s)\.\. Measured elsewhere: .*?\.\. End of what was", "", text)
        code = r"(?:code-block|code|parsed-literal|raw|meta)"
        text = re.sub(rf"(?m)^( *)\.\. {code}::.*\n((\1 +.*)?\n)*", "", text)
    text = re.sub(r"(?s)``.*?``|`[^`]*`", "", text)
    return [" ".join(match[0].split()) for match in NUMBER.finditer(text)]


def test_every_measured_number_of_a_page_comes_from_a_run() -> None:
    """It is in a file that a tool writes, or is no measurement and stands above with its reason.

    The one place that no tool here can repeat is marked: the tables of a GPU.
    """
    pages = [page for page in PAGES if page.parent in NUMBERED or page.name == "README.md"]
    found = {page.name: set(typed_numbers(page)) for page in pages}
    allowed = {name: {*DEFINED[""], *DEFINED.get(name, ())} for name in found}
    typed = {name: [*numbers - allowed[name]] for name, numbers in found.items()}
    assert {name: numbers for name, numbers in typed.items() if numbers} == {}
    stale = {name: [*{*DEFINED[name]} - found[name]] for name in DEFINED if name}
    assert not any(stale.values()), stale
    marked = [page.name for page in pages if ".. Measured elsewhere:" in page.read_text("utf-8")]
    assert marked == ["compared.rst"]


def test_every_include_says_which_tool_wrote_it() -> None:
    """`tools/measured_pages.py` writes all files of a folder, and a test writes them again."""
    for page in ROOT.glob("docs/_includes/*.rst"):
        first = page.read_text(encoding="utf-8").partition("\n")[0]
        (tool,) = re.findall(r"^\.\. Written by (tools/\w+\.py)\.$", first)
        assert ROOT.joinpath(tool).exists()


def test_the_page_of_formats_has_a_row_for_each() -> None:
    """In the order in which `Checkpoint.format` lists them."""
    import torchlift

    page = ROOT.joinpath("docs/formats.rst").read_text(encoding="utf-8")
    rows = re.findall(r"^   \* - ``([a-z0-9-]+)``$", page, re.MULTILINE)
    (listed,) = re.findall(r"^ *format: (.*?)\.$", torchlift.Checkpoint.__doc__ or "", re.M | re.S)
    assert rows == re.findall(r'``"([a-z0-9-]+)"``', listed)


def test_cheat_sheet_has_every_function_and_its_pdf_is_of_this_text() -> None:
    """What is on the sheet runs, as on any page; here: nothing is left out, nothing is older."""
    import torchlift

    sheet = ROOT / "docs/guide/cheatsheet.rst"
    words = set(re.findall(r"\w+", sheet.read_text(encoding="utf-8")))
    rooms = (torchlift, torchlift.remap, torchlift.swap)
    functions = {name for room in rooms for name in room.__all__ if name.islower()}
    assert functions - words == set()

    pdf = ROOT.joinpath("docs/_static/cheatsheet.pdf").read_bytes()
    assert re.findall(rb"/Count (\d+)", pdf) == [b"1"], "pages"
    digest = hashlib.sha256(sheet.read_bytes()).hexdigest().encode()
    assert pdf.splitlines()[-1].startswith(b"% " + digest), "make cheatsheet"

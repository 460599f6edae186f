"""What holds the repository together: packaging, public names, the recipes that show them."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import typing
import warnings
from importlib import metadata
from pathlib import Path

import pytest
from rules import each

import torchlift

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((ROOT / "recipes").glob("[0-9]*/plot_*.py"))


each_recipe = each(SCRIPTS)


# ---- the package


@pytest.mark.skipif("TORCHLIFT_SITE" not in os.environ, reason="not run by make unit")
def test_tests_run_against_the_built_wheel() -> None:
    """A file that the wheel lacks must fail here, not on a user's machine."""
    site = Path(os.environ["TORCHLIFT_SITE"]).resolve()
    assert Path(torchlift.__file__).resolve().is_relative_to(site)
    assert site.joinpath("torchlift", "py.typed").exists()
    assert {path.name for path in site.iterdir()} <= {
        "torchlift",
        "bin",
        f"torchlift-{metadata.version('torchlift')}.dist-info",
    }


def test_import_is_cheap() -> None:
    """A name loads what it needs when it is first used; the import alone loads no torch."""
    code = "import sys, torchlift; dir(torchlift); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_star_import_leaves_open_alone() -> None:
    """Python's own, with which the rest of a program writes its files."""
    scope: dict[str, object] = {}
    exec("from torchlift import *", scope)
    assert {"load", "save", "Checkpoint", "remap"} <= scope.keys()
    assert "open" not in scope
    assert "open" in dir(torchlift)


@pytest.mark.parametrize(
    ("call", "words", "answer"),
    [
        ("load", {"map_location": "cpu"}, r"load\(\) does not take map_location=: .*pass device="),
        ("plan", {"device_map": "auto"}, r"does not take device_map=: pass device=.*remap\.fit"),
        ("load", {"max_memory": {}}, r"pass device=remap\.fit\(model, max_memory\)"),
        ("open", {"weights_only": True}, r"open\(\) does not take weights_only=: leave it out"),
        ("open", {"mmap": True}, r"pass source="),
        ("save", {"overwrite": True}, r"save\(\) does not take overwrite=: leave it out"),
        ("save", {"_use_new_zipfile_serialization": False}, r"is the zip archive"),
        ("load", {"no_such": 1}, r"unexpected keyword argument 'no_such'"),
    ],
)
def test_keywords_of_other_loaders_are_answered_with_ours(
    call: str, words: dict[str, object], answer: str
) -> None:
    """A program that changes the import is told what to write."""
    with pytest.raises(TypeError, match=answer):
        getattr(torchlift, call)(None, "x.pt", **words)


def test_a_name_imports_no_more_than_it_needs() -> None:
    """Beside torch itself: no framework, and not DCP, whose classes are bases of two names."""
    bases = ("CheckpointReader", "CheckpointWriter")
    code = (
        "import sys, torch, torchlift, torchlift.integrations\n"
        "for room in (torchlift, torchlift.distributed):\n"
        f"    for name in set(dir(room)) - {set(bases)}:\n"
        "        getattr(room, name)\n"
        "costly = {'sympy', 'torch._dynamo', 'torch.distributed.checkpoint', 'numpy.testing'}\n"
        "costly |= {'accelerate', 'lightning_fabric', 'torchtitan', 'transformers', 'vllm'}\n"
        "sys.exit(str(costly & set(sys.modules)) if costly & set(sys.modules) else 0)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_public_names_survive_the_import_of_every_submodule() -> None:
    """Importing ``torchlift.load`` the module must not replace ``torchlift.load`` the function."""
    before = {name: type(getattr(torchlift, name)) for name in torchlift.__all__}
    for module in pkgutil.walk_packages(torchlift.__path__, "torchlift."):
        # An integration loads a framework, which need not be here, and its name is its own.
        if not module.name.endswith("__main__") and ".integrations." not in module.name:
            importlib.import_module(module.name)
    after = {name: type(getattr(torchlift, name)) for name in torchlift.__all__}
    assert after == before


# ---- the site


def test_annotations_of_public_names_resolve() -> None:
    """A reader's tools, and the API pages, find the types that a signature names."""
    rooms = [torchlift, *(getattr(torchlift, name) for name in ("swap", "remap", "distributed"))]
    for room in rooms:
        for name in room.__all__:
            found = getattr(room, name)
            if callable(found):
                typing.get_type_hints(found)


def test_api_index_lists_every_public_name() -> None:
    """A name without a page would be found by nobody."""
    index = ROOT.joinpath("docs/api/index.rst").read_text(encoding="utf-8")
    blocks = re.findall(r"\.\. autosummary::\n(?:   :.*\n)+\n((?:   \S+\n)+)", index)
    listed = [name for block in blocks for name in block.split() if "." not in name]
    without_page = {"errors"}  # the room of the errors, each of which has its own page
    assert sorted(listed) == sorted(set(dir(torchlift)) - without_page)


@each_recipe
def test_recipe_uses_the_public_api_only(script: Path) -> None:
    """A reader can copy every line."""
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "torchlift":
                assert node.attr in dir(torchlift), node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchlift"):
            # One module for each framework, which is imported by its own name.
            public = node.module in PUBLIC_MODULES
            assert public or node.module.startswith("torchlift.integrations."), node.module


PUBLIC_MODULES = {"torchlift", "torchlift.distributed"} | {
    f"torchlift.{name}" for name in ("bench", "errors", "measure", "remap", "swap")
}


# ---- the files around the code


def test_warnings_are_errors() -> None:
    """A warning that nobody reads becomes a failure that somebody does."""
    with pytest.raises(UserWarning, match="loud"):
        warnings.warn("loud", UserWarning, stacklevel=1)


def test_pins_are_exact_and_name_no_place() -> None:
    """The same versions everywhere, from wherever pip is told to look."""
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert line.startswith("#") or re.fullmatch(r"[\w.-]+==[\w.]+", line), line


def test_ci_runs_the_test_command_of_the_readme() -> None:
    """What is checked before a change is accepted is what a reader can run."""
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8")
    assert "make test" in ROOT.joinpath("README.md").read_text(encoding="utf-8")


MARKDOWN = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/guide/*.md")]


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    """A renamed file takes its links with it, and a heading the links to its anchor."""
    for link in re.findall(r"\]\((?!https?://)([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent.joinpath(path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors_of(target), link


def anchors_of(page: Path) -> set[str]:
    """The anchors that a forge gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_pages_that_the_readme_links_read_well_on_a_forge() -> None:
    """They are Markdown or notebooks: a role or a directive would be shown as text."""
    text = ROOT.joinpath("README.md").read_text(encoding="utf-8")
    links = [ROOT / link for link in re.findall(r"\]\((?!https?://|#)([^)#]+)", text)]
    assert {link.suffix for link in links} <= {".md", ".ipynb", ""}
    for page in (link for link in links if link.suffix == ".md"):
        page_text = page.read_text(encoding="utf-8")
        assert not re.search(r"^```\{|^:::|:[a-z]+:`|^\.\. \w+::|^\(\w+\)=", page_text, re.M), page

"""The form of the tutorial: one path of seven pages, with exercises whose solutions are folded."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import notebooks
import pytest
from rules import each
from sphinx_gallery.py_source_parser import Block, split_code_and_text_blocks

PAGES = [script for script in notebooks.scripts() if script.parent.name == "00_tutorial"]

each_page = each(PAGES)


def blocks_of(page: Path) -> list[Block]:
    return list(split_code_and_text_blocks(page)[1])


def title_of(page: Path) -> str:
    return (ast.get_docstring(ast.parse(page.read_text(encoding="utf-8"))) or "").split("\n")[0]


@each_page
def test_two_exercises_have_a_solution_that_is_folded_and_checks_itself(page: Path) -> None:
    """The notebook folds what it prints, too."""
    asked = []
    for text, code in itertools.pairwise(blocks_of(page)):
        if code.type == "code" and code.content.strip().startswith(notebooks.SOLUTION):
            asked.append(re.findall(r"^\*\*(\d)\.\*\* ", text.content, re.MULTILINE)[-1])
            assert code.content.strip().startswith(f"# fold: Solution of exercise {asked[-1]}\n")
            nodes = [type(node) for node in ast.walk(ast.parse(code.content))]
            assert ast.Assert in nodes
            assert ast.Call in nodes
    assert asked == ["1", "2"]


@pytest.mark.parametrize(
    ("page", "after"), list(itertools.pairwise(PAGES)), ids=lambda page: page.stem
)
def test_a_page_ends_with_a_link_to_the_next(page: Path, after: Path) -> None:
    """By its title, of which the site makes a link."""
    assert blocks_of(page)[-1].content.rstrip().endswith(f"*{title_of(after)}*.")


def test_the_last_page_leads_to_recipes_that_exist() -> None:
    """By titles that are theirs."""
    named = re.findall(r"^- \*(.+)\*$", blocks_of(PAGES[-1])[-1].content, re.MULTILINE)
    assert len(named) >= 3
    assert set(named) <= {title_of(script) for script in notebooks.scripts()}


def definitions(page: Path) -> dict[str, str]:
    """The classes of a page, and the functions outside of them, as their code."""
    tree = ast.parse(page.read_text(encoding="utf-8"))
    defined = ast.ClassDef, ast.FunctionDef
    return {node.name: ast.unparse(node) for node in tree.body if isinstance(node, defined)}


def test_the_model_is_the_same_on_every_page() -> None:
    """Each page makes it anew, so that its notebook runs by itself."""
    model = {name: set() for name in ("Layer", "make_output", "add", "MiniLM", "Sorter", "begin")}
    for page in PAGES:
        found = definitions(page)
        for name, codes in model.items():
            codes |= {found[name]} if name in found else set()
    assert {name: len(codes) for name, codes in model.items()} == dict.fromkeys(model, 1)
    assert all("MiniLM" in definitions(page) for page in PAGES[2:])

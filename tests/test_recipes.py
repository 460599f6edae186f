"""What a recipe must have for the site to show it right, and for a reader to copy it."""

from __future__ import annotations

import ast
import itertools
import re
import sys
from pathlib import Path

import nbformat
import notebooks
import pytest
import recipe_workers
from forked import run
from rules import each
from sphinx_gallery.py_source_parser import Block, split_code_and_text_blocks

#: The pages of the tutorial have a form of their own: tests/test_tutorial.py.
SCRIPTS = [script for script in notebooks.scripts() if script.parent.name != "00_tutorial"]

each_recipe = each(SCRIPTS)
each_page = each(notebooks.scripts())


def blocks_of(script: Path) -> list[Block]:
    """The texts and the cells of a recipe, its docstring first, as the gallery divides it."""
    _, blocks = split_code_and_text_blocks(script)
    return list(blocks)


def code_of(script: Path) -> list[str]:
    return [block.content for block in blocks_of(script) if block.type == "code"]


def outputs_of(script: Path) -> list[tuple[str, list[nbformat.NotebookNode]]]:
    """The source and the outputs of every code cell of the committed notebook."""
    notebook = nbformat.read(notebooks.path_of(script), as_version=4)
    return [(cell.source, cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_first_cell_runs_alone_and_prints_something(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader who copies it, and nothing else, has something that works, without a warning."""
    monkeypatch.chdir(tmp_path)
    # The packages that only tests see, beside .venv, take transformers 10 s to import.
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "apart" not in path])
    done = run(code_of(script)[0], env={"PYTHONWARNINGS": "error", "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@each_recipe
def test_the_question_has_a_folded_answer_that_checks_itself(script: Path) -> None:
    """A reader thinks first: the code and what it prints are one click away."""
    *_, question, answer = blocks_of(script)
    asked = question.content.partition("Question\n--------\n")[2].strip()
    assert asked.endswith("?"), asked
    assert answer.content.strip().startswith(notebooks.ANSWER + "\n# ")
    assert [code for code in code_of(script) if notebooks.ANSWER in code] == [answer.content]
    nodes = [*ast.walk(ast.parse(answer.content))]
    assert any(isinstance(node, ast.Assert) for node in nodes)
    (output,) = outputs_of(script)[-1][1]
    assert output.output_type == "stream", "it prints what it found, and the site folds that"


@each_page
def test_code_is_at_most_80_columns_wide(script: Path) -> None:
    """So many fit between the sidebars of a page; ruff divides no string and no comment."""
    lines = [line for code in code_of(script) for line in code.splitlines()]
    assert [line for line in lines if len(line) > 80] == []


@each_page
def test_the_figure_has_a_caption(script: Path) -> None:
    """A paragraph in italics without other markup: it becomes the text for who cannot see."""
    blocks = blocks_of(script)
    (after,) = (
        following
        for block, following in itertools.pairwise(blocks)
        if block.type == "code" and "plt.show()" in block.content
    )
    caption = after.content.strip().split("\n\n")[0]
    assert after.type == "text"
    assert re.fullmatch(r"\*[^*`]+\*", caption), caption


@each_recipe
def test_a_table_has_a_plain_form_that_is_compared(script: Path) -> None:
    """What a recipe shows as HTML has words in a terminal, too: an address says nothing."""
    shown = [output.get("data", {}) for _, outputs in outputs_of(script) for output in outputs]
    plain = [data["text/plain"] for data in shown if "<table" in data.get("text/html", "")]
    assert [text for text in plain if " object at 0x" in text] == []
    assert ("_repr_html_" not in script.read_text(encoding="utf-8")) or plain


@each_page
def test_a_cell_that_prints_seconds_is_executed_alone(script: Path) -> None:
    """Work in the other process would make the numbers on the page larger."""
    text = script.read_text(encoding="utf-8")
    printed = [cell for cell in code_of(script) if re.search(r"f\} s\b", cell)]
    assert all(recipe_workers.measures_seconds(text, cell) for cell in printed)

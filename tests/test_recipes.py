"""The form of a recipe: the answer first, the proof after it, and no machinery on the page."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import notebooks
import pytest
from forked import run
from rules import each
from sphinx_gallery.py_source_parser import Block, split_code_and_text_blocks

#: The pages of the tutorial have a form of their own: tests/test_tutorial.py.
SCRIPTS = [script for script in notebooks.scripts() if script.parent.name != "00_tutorial"]
HEADING = re.compile(r"^(.+)\n([-=~])\2{2,}$", re.MULTILINE)
TEMPORARY = re.compile(r"/tmp|/(tmp|torchlift-)[a-z0-9_]{8}\b")
STYLE = re.compile(
    r"import matplotlib\.pyplot as plt\n+plt\.style\.use\(\"torchlift\.measure\.figures\"\)\n"
)

each_recipe = each(SCRIPTS)
each_page = each(notebooks.scripts())


def blocks_of(script: Path) -> list[Block]:
    """The texts and the cells of a recipe, its docstring first, as the gallery divides it."""
    _, blocks = split_code_and_text_blocks(script)
    return list(blocks)


def code_of(script: Path) -> list[str]:
    return [block.content for block in blocks_of(script) if block.type == "code"]


def tree_of(script: Path) -> ast.Module:
    return ast.parse(script.read_text(encoding="utf-8"))


def outputs_of(script: Path) -> list[tuple[str, list[nbformat.NotebookNode]]]:
    """The source and the outputs of every code cell of the committed notebook."""
    notebook = nbformat.read(notebooks.path_of(script), as_version=4)
    return [(cell.source, cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]


# ---- the answer comes first


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
def test_the_first_cell_is_the_answer(script: Path) -> None:
    """At most twelve lines under the heading *In short*, right below the question."""
    blocks = blocks_of(script)
    assert [block.type for block in blocks[:3]] == ["text", "text", "code"]
    assert HEADING.findall(blocks[1].content) == [("In short", "-")]
    assert len(blocks[0].content.strip().splitlines()) <= 12
    assert sum(bool(line.strip()) for line in blocks[2].content.splitlines()) <= 12


@each_recipe
def test_the_first_cell_calls_torchlift(script: Path) -> None:
    """Not in a string, and not after the imports of a measurement."""
    cell = ast.parse(code_of(script)[0])
    imported = {
        alias.asname or alias.name
        for node in ast.walk(cell)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchlift")
        for alias in node.names
    }
    calls = [ast.unparse(node.func) for node in ast.walk(cell) if isinstance(node, ast.Call)]
    assert any(call.startswith("torchlift.") or call in imported for call in calls), calls


@each_recipe
def test_sections_come_in_order(script: Path) -> None:
    """The answer first; last what to remember, what to use when, and a question."""
    blocks = blocks_of(script)
    text = "\n\n".join(block.content for block in blocks[1:] if block.type == "text")
    headings = [match[1] for match in HEADING.finditer(text)]
    assert headings[0] == "In short"
    assert headings[-3:] == ["Remember", "Use this when", "Question"]
    remember = text[text.index("\nRemember\n-") : text.index("\nUse this when\n-")]
    assert len(re.findall("^- ", remember, re.MULTILINE)) == 3


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


@each_recipe
def test_the_first_output_can_be_read_by_a_newcomer(script: Path) -> None:
    """No temporary path, and no words of a report that only a later section explains."""
    printed = "".join(output.get("text", "") for output in outputs_of(script)[1][1])
    assert not TEMPORARY.search(printed), printed
    assert not re.search(r"^ *how: \d+ (mapped|read|from memory), ", printed, re.M), printed


# ---- the code is code


def is_code(text: str) -> bool:
    """Whether a string is Python that does something: prose, shell commands and JSON are not."""
    if len(text) <= 40:
        return False
    try:
        tree = ast.parse(inspect.cleandoc(text))
    except (SyntaxError, ValueError):
        return False
    doing = ast.Call, ast.Assign, ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef
    return any(isinstance(node, doing) for node in ast.walk(tree))


def strings_of(tree: ast.Module) -> Iterator[str]:
    """Every string but the docstrings; what an f-string fills in counts as a name."""
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    passed: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            passed.add(node.body[0].value)  # type: ignore[attr-defined]
        elif isinstance(node, ast.JoinedStr):
            passed.update(node.values)
            texts = (part.value if isinstance(part, ast.Constant) else "x" for part in node.values)
            yield "".join(map(str, texts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in passed:
            yield node.value


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("model = build()\nstate = torch.load(path)\nmodel.load_state_dict(state)", True),
        ("torchlift.load(torchlift.skeleton(build), path)", True),
        ("\n    import torch\n    result = torch.load(args[0]).keys()\n", True),
        ("torch.load(path)", False),
        ("torchlift convert old.pth new.safetensors --root model", False),
        ("The package (it has not arrived) is on its way to you.", False),
        ('{"model": "model.safetensors", "format": "safetensors"}', False),
    ],
)
def test_code_in_a_string_is_found(text: str, verdict: bool) -> None:
    """And a sentence, a command or a record is not taken for code."""
    assert is_code(text) is verdict


@each_page
def test_no_code_is_in_a_string(script: Path) -> None:
    """A reader can copy it, an editor can colour it, and a linter checks it."""
    assert [text for text in strings_of(tree_of(script)) if is_code(text)] == []


@each_page
def test_no_code_is_made_from_text(script: Path) -> None:
    """Neither evaluated nor taken from a source file: a function is passed as what it is."""
    nodes = list(ast.walk(tree_of(script)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    assert names & {"eval", "exec", "compile"} == set()
    assert "getsource" not in {node.attr for node in nodes if isinstance(node, ast.Attribute)}


# ---- what it prints and draws


@each_recipe
def test_one_cell_draws_and_does_nothing_else(script: Path) -> None:
    """The site folds it, so that it may hold nothing that a reader needs."""
    (cell,) = (code for code in code_of(script) if "plt." in code or "matplotlib" in code)
    assert STYLE.match(cell.strip()), cell
    assert cell.count("plt.show()") == 1
    assert "rcParams" not in cell
    constants = [node for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.Constant)]
    colors = [c.value for c in constants if re.fullmatch("#[0-9a-fA-F]{3,8}", str(c.value))]
    assert colors == [], "colours are those of the style, C0 to C3"
    (outputs,) = (outputs for source, outputs in outputs_of(script) if "plt.show()" in source)
    assert [output.output_type for output in outputs] == ["display_data"]


@each_recipe
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
    assert "navy" not in caption.lower(), "a dark figure has another colour there: name the line"
    assert not re.search(r"from above|\bearlier\b|\bsections?\b", caption), (
        "the site shows it first"
    )


@each_recipe
def test_a_table_has_a_plain_form_that_is_compared(script: Path) -> None:
    """What a recipe shows as HTML has words in a terminal, too: an address says nothing."""
    shown = [output.get("data", {}) for _, outputs in outputs_of(script) for output in outputs]
    plain = [data["text/plain"] for data in shown if "<table" in data.get("text/html", "")]
    assert [text for text in plain if " object at 0x" in text] == []
    assert ("_repr_html_" not in script.read_text(encoding="utf-8")) or plain

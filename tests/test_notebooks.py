"""The committed notebooks are the recipes, executed, and carry nothing else."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
import notebooks
import pytest
from rules import each

SCRIPTS = notebooks.scripts()
RST_LEFT_OVER = re.compile(r"^\.\. \w|:\w+:`|`__?\b|::$", re.MULTILINE)

each_recipe = each(SCRIPTS)


def committed(script: Path) -> nbformat.NotebookNode:
    path = notebooks.path_of(script)
    assert path.exists(), f"{path.relative_to(notebooks.ROOT)} is missing: run 'make notebooks'"
    return nbformat.read(path, as_version=4)


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@each_recipe
def test_notebook_has_the_cells_of_its_recipe(script: Path) -> None:
    """A script that changed without its notebook is found here: run ``make notebooks``."""

    def sources(notebook: nbformat.NotebookNode) -> list[tuple[str, str, str]]:
        return [(cell.id, cell.cell_type, cell.source) for cell in notebook.cells]

    assert sources(committed(script)) == sources(notebooks.derive(script))


@each_recipe
def test_every_cell_was_executed_once_in_order(script: Path) -> None:
    """A cell without an execution count is one that nbval never compares."""
    counts = [cell.execution_count for cell in code_cells(committed(script))]
    assert counts == list(range(1, len(counts) + 1))


@each_recipe
def test_notebook_shows_no_error_and_no_warning(script: Path) -> None:
    """Errors that a recipe wants to show are caught and printed; stderr stays empty."""
    for cell in code_cells(committed(script)):
        for output in cell.outputs:
            assert output.output_type != "error", cell.source
            assert output.get("name") != "stderr", output.text


@each_recipe
def test_notebook_names_no_path_of_the_machine_that_ran_it(script: Path) -> None:
    """Not the checkout, the home folder nor the environment."""
    text = notebooks.path_of(script).read_text(encoding="utf-8")
    for path in (str(notebooks.ROOT), str(Path.home()), sys.prefix, "site-packages"):
        assert path not in text


@each_recipe
def test_first_cell_names_what_the_recipe_imports(script: Path) -> None:
    """And what it looks for; never torchlift by its name, which an index may give to anybody."""
    text = script.read_text(encoding="utf-8")
    first = code_cells(committed(script))[0].source
    assert first == notebooks.first_cell(text).strip()
    for name in re.findall(r'find_spec\("(\w+)"\)', text):
        assert name in notebooks.BY_NAME
        assert notebooks.BY_NAME[name] in first
    assert not re.search(r"pip install.*\btorchlift\b", first)


@each_recipe
def test_notebook_prose_is_markdown(script: Path) -> None:
    """Directives and roles have no meaning in a notebook: a recipe's prose does without them."""
    for cell in committed(script).cells:
        if cell.cell_type == "markdown":
            prose = re.sub(r"```.*?```|``.*?``", "", cell.source, flags=re.DOTALL)
            assert not RST_LEFT_OVER.search(prose), cell.source


def test_every_notebook_has_a_recipe() -> None:
    """No notebook outlives its script."""
    found = set(notebooks.NOTEBOOKS.glob("*/*.ipynb"))
    assert found == {notebooks.path_of(script) for script in SCRIPTS}


SANITIZED = [
    ("<Tensor at 0x7f3a12bc9d00>", "<Tensor at ADDRESS>"),
    ("/tmp/tmpab12_x9z/model.pt", "TEMPORARY/model.pt"),
    ("load:   12.3 ms", "load:TIME"),
    ("load: 1.25 s", "load:TIME"),
    ("1,234.5x faster", "RATIO faster"),
    ("read at 3.4 GB/s", "read atRATE"),
    ("anonymous peak: 512.0 MiB", "anonymous peak: MEMORY"),
    ("file-backed   90.1 MB", "file-backed MEMORY"),
    ("  3.1 MiB anonymous", "MEMORY anonymous"),
    ("grew by ~12.0 MiB", "grew byMEASURED"),
    ("checkpoint: 90.9 MB in 103 tensors", "checkpoint: 90.9 MB in 103 tensors"),
    ("peak below 1.2x the checkpoint: True", "peak below 1.2x the checkpoint: True"),
    ("(384, 1536) float32 2359296 bytes", "(384, 1536) float32 2359296 bytes"),
]


@pytest.mark.parametrize(("printed", "compared"), SANITIZED, ids=lambda text: text.strip())
def test_only_what_varies_is_sanitized(printed: str, compared: str) -> None:
    """Times, addresses, temporary paths and measured memory go; sizes and verdicts stay."""
    from nbval.plugin import get_sanitize_patterns

    config = notebooks.RECIPES.joinpath("nbval_sanitize.cfg").read_text(encoding="utf-8")
    patterns = get_sanitize_patterns(config)
    assert len(patterns) == config.count("\nregex: ")
    for pattern, replacement in patterns:
        printed = re.sub(pattern, replacement, printed)
    assert printed == compared

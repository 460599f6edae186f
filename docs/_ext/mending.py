"""The page of errors: below each the lines that mend it, and folded what makes it happen.

An entry has one block of code that runs alone, with its output. What mends are its last lines,
after the last empty one. Its title is a main entry of the index: the search lists it first.
"""

from __future__ import annotations

from docutils import nodes
from recipe_pages import block_of, following
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util.typing import ExtensionMetadata

PAGE = "guide/troubleshooting"
OPENING = '<details class="tl-fold"><summary>Reproduce the error, then mend it</summary>'


class Mending(SphinxTransform):
    """Show the last lines of each block, and fold the whole of it."""

    default_priority = 450

    def apply(self, **kwargs: object) -> None:
        if self.env.docname != PAGE:
            return
        for title in list(self.document.findall(nodes.title)):
            entry = ("single", title.astext(), title.parent["ids"][0], "main", None)
            title.parent.insert(1, addnodes.index(entries=[entry]))
        blocks = list(self.document.findall(nodes.literal_block))
        for code in (block for block in blocks if block["language"] == "python"):
            _, _, mends = code.astext().rpartition("\n\n")
            folded: list[nodes.Node] = [code]
            if rest := following(code):
                folded += [rest[0]] if isinstance(rest[0], nodes.literal_block) else []
            parent, at = code.parent, code.parent.index(code)
            parent[at : at + len(folded)] = [
                block_of(code, mends),
                nodes.raw("", OPENING, format="html"),
                *folded,
                nodes.raw("", "</details>", format="html"),
            ]


def setup(app: Sphinx) -> ExtensionMetadata:
    """Sphinx calls this."""
    app.add_transform(Mending)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

"""``.. markdown:: ../../CHANGELOG.md``: a file of the repository as a page of the site.

Headings, paragraphs, lists, fenced and indented code, emphasis, code and links are what these files
use. Each is rewritten as reStructuredText, which Sphinx then reads.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

_BLOCK = re.compile(
    r"<!--[^>]*-->"
    r"|^```(?P<language>\w*)\n(?P<fenced>.*?)^```$"
    r"|^(?P<marks>#+) (?P<title>[^\n]*)$"
    r"|(?<=\n\n)(?P<indented>(?: {4}[^\n]*\n)+)"
    r"|(?P<text>(?:(?!```|#|<!--)[^\n]+\n)+|\n)",
    re.MULTILINE | re.DOTALL,
)
_INLINE = re.compile(
    r"(?P<ticks>`+)(?P<code>[^`]+)(?P=ticks)|\[(?P<text>[^]]+)\]\((?P<url>https?:[^)]+)\)"
)
# What a line of Markdown may hold as it is and reStructuredText takes for its own.
_SPECIAL = re.compile(r"(?<!\*)\*(?![\s*])|(?<=\w)_(?=\W)|\|")


def to_rst(markdown: str) -> str:
    """Return the same page as reStructuredText."""
    return "".join(_block(match) for match in _BLOCK.finditer(markdown))


def _block(match: re.Match[str]) -> str:
    if match["fenced"] is not None:
        language = match["language"] or "text"
        return f".. code-block:: {language}\n\n{textwrap.indent(match['fenced'], '   ')}\n"
    if match["title"] is not None:
        title = _inline(match["title"])
        return f"{title}\n{'=-~'[len(match['marks']) - 1] * len(title)}\n"
    if match["indented"] is not None:
        return f".. code-block:: text\n\n{match['indented']}\n"
    return _inline(match["text"] or "")


def _inline(text: str) -> str:
    found, end = "", 0
    for match in _INLINE.finditer(text):
        found += _SPECIAL.sub(r"\\\g<0>", text[end : match.start()])
        if match["code"]:
            found += f"``{' '.join(match['code'].split())}``"
        else:
            found += f"`{match['text']} <{match['url']}>`__"
        end = match.end()
    return found + _SPECIAL.sub(r"\\\g<0>", text[end:])


class Markdown(SphinxDirective):
    """A Markdown file, its path relative to the page's."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        path = self.env.relfn2path(self.arguments[0])[1]
        self.env.note_dependency(path)
        text = to_rst(Path(path).read_text(encoding="utf-8"))
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def setup(app: Sphinx) -> ExtensionMetadata:
    """Sphinx calls this."""
    app.add_directive("markdown", Markdown)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

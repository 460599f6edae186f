"""Mend what Sphinx and its theme write that a screen reader, a phone, or HTML itself cannot take.

Each of these was found by the checks in ``tests/test_site.py``, which fail without it. That a phone
breaks long names after a dot, and not anywhere, was seen in pictures.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

SIGNATURE = re.compile(r"<dt class=\"sig[^>]*>.*?</dt>", re.DOTALL)
#: What may hold a name that is longer than a line: code in a sentence, a heading, a card's title.
NAMES = re.compile(
    r'(?<=<span class="pre">)[^<]+|<h[1-6].*?</h[1-6]>|<p class="tl-card-title">.*?</p>', re.DOTALL
)
#: A long word outside of tags, and the places in it where it may go on in the next line.
WORD = re.compile(r"<[^>]*>|[^\s<>]{12,}")
JOINT = re.compile(r"(?<=[^\W_])([._/=(]+)(?=[^\W_]|&)")
BRANCH = re.compile(r"(<a [^>]*>)\s*([^<]*?)\s*(</a>\s*<details[^>]*>\s*)<summary>")


def without_lists(signature: re.Match[str]) -> str:
    """Set the parameters of a signature in lines: Sphinx writes a list whose items name nothing."""
    text = signature[0]
    for tag, name in ("dl", "tl-parameters"), ("dd", "tl-parameter"):
        text = text.replace(f"<{tag}>", f'<span class="{name}">').replace(f"</{tag}>", "</span>")
    return text


def with_breaks(html: str) -> str:
    """Let a long name go on in the next line after a dot, an underscore and the like."""
    return WORD.sub(lambda w: w[0] if w[0][0] == "<" else JOINT.sub(r"\1<wbr>", w[0]), html)


def with_names(navigation: str) -> str:
    """Name what opens a branch of the sidebar: the theme shows an arrow alone."""
    return BRANCH.sub(r'\1\2\3<summary aria-label="Pages of \2">', navigation)


def mend(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: object
) -> None:
    """Change the page before it is written."""
    if "body" in context:
        body = SIGNATURE.sub(without_lists, context["body"])
        context["body"] = NAMES.sub(lambda names: with_breaks(names[0]), body)
    make = context.get("generate_toctree_html")
    if make is not None:

        def mended(kind: str, *args: Any, **named: Any) -> Any:
            made = make(kind, *args, **named)
            # raw: a tree, for the theme
            return made if kind == "raw" else with_breaks(with_names(str(made)))

        context["generate_toctree_html"] = mended


def setup(app: Sphinx) -> ExtensionMetadata:
    """Sphinx calls this."""
    app.connect("html-page-context", mend, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

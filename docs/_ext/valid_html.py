"""Mend what Sphinx and its theme write that a screen reader, or HTML itself, cannot take.

Each of these was found by the checks in ``tests/test_site.py``, which fail without it.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

SIGNATURE = re.compile(r"<dt class=\"sig[^>]*>.*?</dt>", re.DOTALL)
BRANCH = re.compile(r"(<a [^>]*>)\s*([^<]*?)\s*(</a>\s*<details[^>]*>\s*)<summary>")


def without_lists(signature: re.Match[str]) -> str:
    """Set the parameters of a signature in lines: Sphinx writes a list whose items name nothing."""
    text = signature[0]
    for tag, name in ("dl", "tl-parameters"), ("dd", "tl-parameter"):
        text = text.replace(f"<{tag}>", f'<span class="{name}">').replace(f"</{tag}>", "</span>")
    return text


def with_names(navigation: str) -> str:
    """Name what opens a branch of the sidebar: the theme shows an arrow alone."""
    return BRANCH.sub(r'\1\2\3<summary aria-label="Pages of \2">', navigation)


def mend(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: object
) -> None:
    """Change the page before it is written."""
    if "body" in context:
        context["body"] = SIGNATURE.sub(without_lists, context["body"])
    make = context.get("generate_toctree_html")
    if make is not None:

        def mended(kind: str, *args: Any, **named: Any) -> Any:
            made = make(kind, *args, **named)
            return made if kind == "raw" else with_names(str(made))  # raw: a tree, for the theme

        context["generate_toctree_html"] = mended


def setup(app: Sphinx) -> ExtensionMetadata:
    """Sphinx calls this."""
    app.connect("html-page-context", mend, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

"""Read pages of Markdown, which look right on a forge, too: no roles, no directives.

The README links these pages where they lie in the repository. There a link leads to a notebook, a
script or a heading, and a comment or an anchor is invisible. The site makes of them what it has:

- a link to a notebook: the page of that recipe
- a link to a word of the glossary: that word
- a link to a script, alone in its paragraph: the script, with a link to download it
- the name of something public in code: a link to its page
- ``<!-- class: name -->``: a class of the next block, as ``keywords`` and ``index`` are of the page
- ``<a id="name"></a>``: the target of ``:ref:`name```
"""

from __future__ import annotations

import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode
from sphinx.util.typing import ExtensionMetadata

COMMENT = re.compile(r"<!-- (class|index|keywords): (.*?) -->\s*", re.DOTALL)
ANCHOR = re.compile(r'<a id="([\w-]+)"></a>')
NOTEBOOK = re.compile(r"(?:\.\./)+recipes/notebooks/(?:(.+)\.ipynb)?")
QUOTE = re.compile("['\"]")
NAME = re.compile(r"torchlift(\.\w+)+")
SCRIPTS = {".py": "python", ".sbatch": "bash"}


class MarkdownPage(SphinxTransform):
    """Replace what a forge shows, before targets are resolved and downloads are collected."""

    default_priority = 100

    def apply(self, **kwargs: object) -> None:
        if Path(self.document["source"]).suffix != ".md":
            return
        for raw in list(self.document.findall(nodes.raw)):
            if comment := COMMENT.fullmatch(raw.astext()):
                self._obey(raw, *comment.groups())
        for paragraph in list(self.document.findall(nodes.paragraph)):
            if anchor := ANCHOR.fullmatch("".join(node.astext() for node in paragraph.children)):
                target = nodes.target("", "", names=[anchor[1]])
                self.document.note_explicit_target(target)
                paragraph.replace_self(target)
        for link in list(self.document.findall(addnodes.download_reference)):
            self._show_target(link)
        for title in self.document.findall(nodes.title):
            for text in list(title.findall(nodes.Text)):  # a message keeps the quotes that it has
                text.parent.replace(text, nodes.Text(QUOTE.sub("\0\\g<0>", text)))
        for code in list(self.document.findall(nodes.literal)):
            if NAME.fullmatch(code.astext()) and not isinstance(code.parent, nodes.reference):
                code["classes"] += ["xref", "py", "py-obj"]
                code.replace_self(self._link("py", "obj", code.astext(), code.deepcopy()))

    def _obey(self, raw: nodes.raw, what: str, value: str) -> None:
        """Do what a comment says."""
        if what == "class":
            following = raw.parent[raw.parent.index(raw) + 1]
            following["classes"] += value.split()
            raw.parent.remove(raw)
        elif what == "keywords":
            raw.replace_self(nodes.meta(name="keywords", content=value))
        else:
            raw.replace_self(addnodes.index(entries=[("single", value, "", "main", None)]))

    def _show_target(self, link: addnodes.download_reference) -> None:
        """Lead to the page of a recipe, or show a script that has a paragraph of its own."""
        target, alone = link["reftarget"], len(link.parent) == 1
        if notebook := NOTEBOOK.fullmatch(target):
            page = f"/auto_recipes/{notebook[1] or 'index'}"
            link.replace_self(self._link("std", "doc", page, *link.children))
        elif alone and (language := SCRIPTS.get(Path(target).suffix)):
            relative, path = self.env.relfn2path(target, self.env.docname)
            self.env.note_dependency(relative)
            text = Path(path).read_text(encoding="utf-8")
            shown = nodes.container(literal_block=True, classes=["literal-block-wrapper"])
            shown += nodes.caption("", "", link.deepcopy())
            shown += nodes.literal_block(text, text, language=language)
            link.parent.replace_self(shown)

    def _link(self, domain: str, kind: str, target: str, *content: nodes.Node) -> nodes.Element:
        return addnodes.pending_xref(
            "",
            *content,
            refdomain=domain,
            reftype=kind,
            reftarget=target,
            refdoc=self.env.docname,
            refexplicit=True,
            refwarn=True,
        )


class GlossaryLinks(SphinxPostTransform):
    """Resolve links to words of the glossary, which are no headings, before MyST warns of them."""

    default_priority = 1

    def run(self, **kwargs: object) -> None:
        objects = self.env.domains.standard_domain.objects
        places = {place for (kind, _), place in objects.items() if kind == "term"}
        for link in list(self.document.findall(addnodes.pending_xref)):
            place = link["reftarget"], link.get("reftargetid")
            if place in places:
                here = link["refdoc"]
                link.replace_self(make_refnode(self.app.builder, here, *place, link[0].deepcopy()))


def keep_chapters(app: Sphinx) -> None:
    """Keep sphinx-gallery from making a chapter of each folder with a ``README.md``."""
    app.config.sphinx_gallery_conf["source_suffix"] = {".rst": "restructuredtext"}


def setup(app: Sphinx) -> ExtensionMetadata:
    """Sphinx calls this."""
    app.add_transform(MarkdownPage)
    app.add_post_transform(GlossaryLinks)
    app.connect("builder-inited", keep_chapters, priority=20)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

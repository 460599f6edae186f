"""What the site adds to the page of a recipe, and the recipe itself does without.

The code that only draws is folded, and a cell that begins with ``# fold: what it does``. The figure
stands below what the first cell printed, with its caption, which is also its text alternative; so
does a table of HTML that a caption follows. Titles of other pages are links. One row below the
title leads to the notebook and the script, and one line at the end says what the numbers on the
page were measured with.
"""

from __future__ import annotations

import ast
import datetime
import os
import re
import shutil
import sys
from functools import cache
from html import escape
from pathlib import Path

import torch
from docutils import nodes
from recipe_cards import GALLERY, keywords_of
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging
from sphinx.util.typing import ExtensionMetadata

import torchlift

_logger = logging.getLogger(__name__)
DRAWS = "import matplotlib.pyplot as plt"
FOLD = "# fold: "
ANSWER = "In short"
PATH = "The path: "  # begins the line of a tutorial's page that names all of them
#: The first heading of a page of Markdown, or of reStructuredText.
HEADING = re.compile(r"^# (.+)$|^(.+)\n===+$", re.MULTILINE)
FITS = 88  # characters of an output that the page shows in one line, beside both sidebars


class RecipePage(SphinxTransform):
    """Rearrange what sphinx-gallery wrote, before Sphinx collects images and downloads."""

    default_priority = 450

    def apply(self, **kwargs: object) -> None:
        filters = [raw for raw in self.document.findall(nodes.raw) if "sg-tag-list" in raw.astext()]
        for raw in filters[self.env.docname == GALLERY :]:  # once a chapter, with the same id
            raw.parent.remove(raw)
        if not is_recipe(self.env.docname):
            return
        for comment in list(self.document.findall(nodes.comment)):
            comment.parent.remove(comment)  # "GENERATED FROM ..." stands between the blocks
        for code in list(self.document.findall(nodes.literal_block)):
            if "plt.show()" in code.astext():
                fold_drawing(code)
            elif code.astext().startswith(FOLD):
                summary, _, rest = code.astext().removeprefix(FOLD).partition("\n")
                code.parent.replace(code, shown := block_of(code, rest.lstrip("\n")))
                fold(shown, summary)
        for output in self.document.findall(is_output):
            if max(map(len, output.astext().splitlines()), default=0) > FITS:
                output["classes"].append("tl-wrap")
        show_below_answer(self.document, self.env.docname)
        words = keywords_of(self.env.docname.removeprefix("auto_recipes/"))
        single = dict.fromkeys(word for text in words for word in text.split())  # as it is indexed
        self.document.insert(0, nodes.meta(name="keywords", content=", ".join(single)))
        phrases = [("single", text, "", "main", None) for text in words if " " in text]
        self.document.insert(0, addnodes.index(entries=phrases))  # found first, by their own words
        for paragraph in self.document.findall(nodes.paragraph):
            if paragraph.astext().startswith(PATH):
                paragraph["classes"].append("tl-path")
        titles = titles_of(Path(self.app.srcdir))
        for emphasis in list(self.document.findall(nodes.emphasis)):
            link(emphasis, titles, self.env.docname)
        self._set_downloads()
        script = script_of(self.app, self.env.docname)
        if script.with_suffix(".py.md5").exists():  # it was executed
            (section,) = [n for n in self.document.children if isinstance(n, nodes.section)]
            section += nodes.paragraph("", made_with(script.parent), classes=["tl-made-with"])

    def _set_downloads(self) -> None:
        """Replace the note at the top and the footer at the end with one row below the title."""
        for only in list(self.document.findall(addnodes.only)):
            if any(True for _ in only.findall(is_sphinx_gallery_s)):
                only.parent.remove(only)
        row = nodes.paragraph(classes=["tl-downloads"])
        name = self.env.docname.rpartition("/")[2]
        for label, suffix in ("Notebook, executed", ".ipynb"), ("Script", ".py"):
            row += addnodes.download_reference(
                "", "", nodes.Text(label), reftarget=name + suffix, refdoc=self.env.docname
            )
        install = nodes.inline("", "Install torchlift")
        row += addnodes.pending_xref(
            "",
            install,
            refdomain="std",
            reftype="doc",
            reftarget="/installation",
            refexplicit=True,
            refwarn=True,
        )
        for title in self.document.findall(nodes.title):
            title.parent.insert(title.parent.index(title) + 1, row)
            break


def is_recipe(docname: str) -> bool:
    return docname.startswith("auto_recipes/") and "/plot_" in docname


def script_of(app: Sphinx, docname: str) -> Path:
    """The copy of a recipe's script beside its page."""
    return Path(app.srcdir, f"{docname}.py")


def is_figure(node: nodes.Node) -> bool:
    return isinstance(node, nodes.container) and "tl-figure" in node["classes"]


def is_output(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Element) and "sphx-glr-script-out" in node.get("classes", ())


def is_table(node: nodes.Node) -> bool:
    """Whether it is the HTML that the last value of a cell has of itself, with a table in it."""
    text = node.astext() if isinstance(node, nodes.raw) else ""
    return "output_html" in text and "<table" in text


def is_captioned_table(node: nodes.Node) -> bool:
    return is_table(node) and any(map(begins_in_italics, following(node)[:1]))


def is_sphinx_gallery_s(node: nodes.Node) -> bool:
    names = {"sphx-glr-download-link-note", "sphx-glr-footer"}
    return isinstance(node, nodes.Element) and bool(names & set(node.get("classes", ())))


def following(node: nodes.Element) -> list[nodes.Node]:
    siblings = node.parent.children
    return siblings[siblings.index(node) + 1 :]


def block_of(code: nodes.literal_block, text: str) -> nodes.literal_block:
    """Return a block of code like another one, with a text of its own."""
    block = nodes.literal_block("", text)
    block.attributes.update({**code.attributes, "ids": [], "names": []})
    block.rawsource, block.source, block.line = text, code.source, code.line
    return block


def fold(code: nodes.literal_block, summary: str) -> None:
    """Put a block of code into a ``<details>``; of a solution or an answer also what it prints."""
    at, rest = code.parent.index(code), following(code)
    solves = summary.startswith(("Solution", "Answer"))
    end = at + 2 if solves and rest and is_output(rest[0]) else at + 1
    code.parent.insert(end, nodes.raw("", "</details>", format="html"))
    opening = f'<details class="tl-fold"><summary>{escape(summary)}</summary>'
    code.parent.insert(at, nodes.raw("", opening, format="html"))


def fold_drawing(code: nodes.literal_block) -> None:
    """Fold the part of a cell that draws."""
    before, begins, after = code.astext().partition(DRAWS)
    if begins and before.strip():
        first, drawing = block_of(code, before.rstrip() + "\n"), block_of(code, begins + after)
        code.parent.replace(code, [first, drawing])
        code = drawing
    fold(code, "Code of the figure")


def put_output_above(figure: nodes.container) -> None:
    """Set what the cell printed before the code that draws, where it was printed."""
    rest = following(figure)
    if not rest or not is_output(rest[0]):
        return
    output = rest[0]
    figure.parent.remove(output)
    at = figure.parent.index(figure)
    while not (
        isinstance(figure.parent[at], nodes.raw) and "<details" in figure.parent[at].astext()
    ):
        at -= 1
    figure.parent.insert(at, output)


def show_below_answer(document: nodes.document, docname: str) -> None:
    """Put figures, and tables that a caption follows, below what the first cell printed."""
    answer = next(filter(is_answer, document.findall(nodes.section)), None)
    end = end_of_answer(answer) if answer else 0
    for shown in list(document.findall(is_figure)) + list(document.findall(is_captioned_table)):
        if is_figure(shown):
            put_output_above(shown)
        frame = framed(shown, docname)
        parent, at = (answer, end) if answer else (shown.parent, shown.parent.index(shown))
        shown.parent.remove(shown)
        parent[at:at] = frame
        end += len(frame)


def end_of_answer(answer: nodes.section) -> int:
    """Where in its section the output of the first cell ends."""
    at = 1 + answer.first_child_matching_class(nodes.literal_block)
    while at < len(answer) and (is_output(answer[at]) or is_table(answer[at])):
        at += 1
    return at


def framed(shown: nodes.Element, docname: str) -> list[nodes.Node]:
    """Return a figure or a table in a frame, with the italic paragraph that follows as caption."""
    rest = following(shown)
    if not rest or not begins_in_italics(rest[0]):
        _logger.warning("no caption, a paragraph in *...*, follows the figure", location=docname)
        return [shown.deepcopy()]
    paragraph = rest[0]
    paragraph.parent.remove(paragraph)
    text = " ".join(paragraph.astext().split())
    for image in shown.findall(nodes.image):
        image["alt"] = text
    caption = nodes.inline("", "", classes=["tl-caption-text"])
    for child in paragraph.children:
        caption += child.children if isinstance(child, nodes.emphasis) else child
    if is_table(shown):
        table = "<table" + shown.astext().partition("<table")[2].partition("</table>")[0]
        content: nodes.Node = nodes.raw("", f"<div>{table}</table></div>", format="html")
    else:
        content = shown.deepcopy()
    return [
        nodes.raw("", '<figure class="tl-framed">', format="html"),
        content,
        nodes.raw("", "<figcaption>", format="html"),
        caption,
        nodes.raw("", "</figcaption></figure>", format="html"),
    ]


def is_answer(section: nodes.section) -> bool:
    """Whether it is the section that begins with the answer."""
    return section[0].astext() == ANSWER


@cache
def titles_of(pages: Path) -> dict[str, str]:
    """Title of each recipe, and of each page of the guide -> its page."""
    found = {}
    for page in (*pages.glob("*.rst"), *pages.glob("*.md"), *pages.glob("guide/*.*")):
        title = HEADING.search(page.read_text(encoding="utf-8"))
        if title is not None:
            found[title[1] or title[2]] = f"/{page.relative_to(pages).with_suffix('')}"
    for script in pages.glob("auto_recipes/*/plot_*.py"):
        title = (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").split(
            "\n"
        )[0]
        found[title] = f"/{script.relative_to(pages).with_suffix('')}"
    return found


def link(emphasis: nodes.emphasis, titles: dict[str, str], docname: str) -> None:
    """Let a title, or the beginning of one, lead to its page."""
    text = " ".join(emphasis.astext().split()).rstrip(".,")
    found = [page for title, page in titles.items() if len(text) > 10 and title.startswith(text)]
    if len(found) == 1:
        named = nodes.inline("", emphasis.astext(), classes=["xref", "std", "std-doc"])
        where = {"refdomain": "std", "reftype": "doc", "refexplicit": True, "refwarn": True}
        emphasis.parent.replace(
            emphasis,
            addnodes.pending_xref("", named, reftarget=found[0], refdoc=docname, **where),
        )


def begins_in_italics(node: nodes.Node) -> bool:
    return isinstance(node, nodes.paragraph) and isinstance(node.children[0], nodes.emphasis)


def made_with(folder: Path) -> str:
    """The machine and the versions behind the numbers of a page."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    python = ".".join(map(str, sys.version_info[:3]))
    cores = len(os.sched_getaffinity(0))
    stamp = os.environ.get("SOURCE_DATE_EPOCH")
    now = datetime.datetime.now(datetime.UTC)
    day = (datetime.datetime.fromtimestamp(int(stamp), datetime.UTC) if stamp else now).date()
    return (
        f"Made with torchlift {torchlift.__version__}, torch {torch.__version__} and "
        f"Python {python} on {cores} cores with {memory:.0f} GiB of memory, files on "
        f"{file_system()}, {day}."
    )


def file_system() -> str:
    """The kind of file system that temporary files are on, which is where recipes write."""
    import tempfile

    folder = Path(tempfile.gettempdir()).resolve()
    kinds = {}
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, point, kind = line.split()[:3]
        if folder.is_relative_to(point):
            kinds[len(point)] = kind  # a later mount hides an earlier one at the same point
    return kinds[max(kinds)]


def use_executed_notebooks(app: Sphinx) -> None:
    """Put the committed notebooks, which are executed, where sphinx-gallery wrote empty ones."""
    pages = Path(app.srcdir, "auto_recipes")
    for notebook in Path(app.confdir, "recipes", "notebooks").glob("*/*.ipynb"):
        target = pages / notebook.parent.name / notebook.name
        if target.exists():
            shutil.copyfile(notebook, target)


def setup(app: Sphinx) -> ExtensionMetadata:
    """Sphinx calls this."""
    app.add_transform(RecipePage)
    app.connect("builder-inited", use_executed_notebooks, priority=900)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

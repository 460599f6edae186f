"""Cards that lead to recipes: the question, how hard, how long, and what it is about.

``recipe-card`` takes the place of sphinx-gallery's thumbnail, in the gallery and wherever recipes
are listed; the gallery filters its cards by sphinx-gallery's own script. ``chapters`` lists the
chapters above them. ``recipes-using`` ends an API page with the recipes that use a name most. The
question and the minutes come from the script, level and tags from ``recipes/cards.toml``.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

import sphinx_gallery.backreferences
from docutils import nodes
from figures_twice import card_path
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

ROOT = Path(__file__).resolve().parent.parent.parent
MOST = 4  # recipes that an API page names
GALLERY = "auto_recipes/index"
LEVELS = "Beginner", "Intermediate", "Advanced"
#: What the gallery can be filtered by beside levels and tags: the minutes that a recipe takes.
TIMES = {5: "up to 5 min", 10: "6 to 10 min", 99: "longer"}


class Recipe(NamedTuple):
    """What a card says of a recipe."""

    title: str
    question: str
    level: str
    tags: list[str]
    minutes: int


@functools.cache
def facts() -> dict[str, dict[str, str | list[str]]]:
    """Level and tags of every recipe, by chapter and name."""
    return tomllib.loads(ROOT.joinpath("recipes", "cards.toml").read_text(encoding="utf-8"))


@functools.cache
def recipe(name: str) -> Recipe:
    """Read a recipe's card, ``name`` as in ``01_loading/plot_09_resume``."""
    text = ROOT.joinpath("recipes", f"{name}.py").read_text(encoding="utf-8")
    title, _, rest = (ast.get_docstring(ast.parse(text)) or "").partition("\n")
    question = " ".join(rest.partition("\n\n")[2].partition("\n\n")[0].split())
    known = facts().get(name, {})
    level, tags = known.get("level", ""), known.get("tags", [])
    assert isinstance(level, str)
    assert isinstance(tags, list)
    return Recipe(title, re.sub(r"(?<!`)`(?!`)|\*", "", question), level, tags, minutes_of(text))


def minutes_of(script: str) -> int:
    """Minutes to read a recipe: 200 words of prose, or 40 lines of code, a minute."""
    lines = script.splitlines()
    code = [line for line in lines if line.strip() and not line.startswith("#")]
    words = sum(len(line.split()) for line in lines if line.startswith("#"))
    return math.ceil(words / 200 + len(code) / 40)


def keywords_of(name: str) -> list[str]:
    """What the search finds a recipe by, beside its text: tags, and words that it does not say."""
    fact = facts().get(name, {})
    return [*fact.get("tags", ()), *fact.get("keywords", ())]


def filters_of(name: str) -> list[str]:
    """What finds a recipe in the gallery: level, time, tags that it shares with another one."""
    known = recipe(name)
    time = next(label for most, label in TIMES.items() if known.minutes <= most)
    return [known.level, time, *(tag for tag in known.tags if tag in shared_tags())]


@functools.cache
def shared_tags() -> list[str]:
    """The tags of two recipes or more, those of most recipes first."""
    counts = Counter(tag for fact in facts().values() for tag in fact["tags"])
    return [tag for tag, count in counts.most_common() if count > 1]


def with_filters(filters: list[str], card: nodes.Node | None = None) -> list[nodes.Node]:
    """What sphinx-gallery's script looks for, around a card, or alone: the order of its buttons."""
    kind = "hidden" if card is None else 'class="sphx-glr-thumbcontainer"'
    opening = f"<div {kind} data-sgtags='{escape(json.dumps(filters), quote=False)}'>"
    inside = [] if card is None else [card]
    return [
        nodes.raw("", opening, format="html"),
        *inside,
        nodes.raw("", "</div>", format="html"),
    ]


class RecipeCard(SphinxDirective):
    """A card for the recipe whose page is named."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0].strip("/")
        card = make_card(name, Path(self.env.srcdir))
        if self.env.docname != GALLERY:
            return [card]
        return with_filters(filters_of(name.removeprefix("auto_recipes/")), card)


class Chapters(SphinxDirective):
    """The chapters of the gallery in one line, each with the number of its recipes."""

    def run(self) -> list[nodes.Node]:
        line = nodes.container(classes=["tl-chapters"])
        for header in sorted(ROOT.glob("recipes/*/GALLERY_HEADER.rst")):
            title = header.read_text(encoding="utf-8").partition("\n")[0]
            count = len(list(header.parent.glob("plot_*.py")))
            link = nodes.reference("", title, refuri=f"#{nodes.make_id(title)}", internal=True)
            line += nodes.paragraph("", "", link, nodes.inline("", f" {count}"))
        order = [*LEVELS, *TIMES.values(), *shared_tags()]
        return [line, *with_filters(order)]


def make_card(docname: str, source: Path) -> nodes.container:
    """The card of the recipe with this page, its title the one link."""
    known = recipe(docname.removeprefix("auto_recipes/"))
    script = source / f"{docname}.py"
    card = nodes.container(classes=["tl-card"])
    for suffix in "light", "dark":
        path = card_path(script.parent / "images", script, suffix)
        if path.exists():  # it was executed
            uri = "/" + path.relative_to(source).as_posix()
            card += nodes.image(uri=uri, alt="", classes=[f"only-{suffix}"], loading="lazy")
    link = addnodes.pending_xref(
        "",
        nodes.inline("", known.title),
        refdomain="std",
        reftype="doc",
        reftarget=f"/{docname}",
        refexplicit=True,
        refwarn=True,
    )
    card += nodes.paragraph("", "", link, classes=["tl-card-title"])
    asked = nodes.paragraph(classes=["tl-card-question"])
    for number, part in enumerate(known.question.split("``")):
        asked += nodes.literal("", part) if number % 2 else nodes.Text(part)
    card += asked
    words = [known.level, f"{known.minutes} min", *known.tags]
    last = nodes.paragraph(classes=["tl-card-facts"])
    last += [nodes.inline("", word, classes=["tl-tag"]) for word in words if word]
    card += last
    return card


class RecipesUsing(SphinxDirective):
    """At most four recipes that use any of the names given, those first that use them most."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        source = Path(self.env.srcdir)
        found = source / "api" / "generated" / "backreferences" / "backreferences_all.json"
        known = json.loads(found.read_text(encoding="utf-8")) if found.exists() else {}
        names = [name for line in self.content for name in line.split()]
        using = {
            f"{Path(path[1]).name}/{Path(path[0]).stem}" for n in names for path in known.get(n, ())
        }
        chosen = sorted(using, key=lambda recipe: (-uses(recipe, names), recipe))[:MOST]
        if not chosen:
            return []
        heading = nodes.rubric("", "Recipes that use it")
        heading["heading-level"] = 2
        grid = nodes.container(classes=["sphx-glr-thumbnails"])
        grid += [make_card(f"auto_recipes/{name}", source) for name in chosen]
        return [heading, grid]


def uses(name: str, symbols: list[str]) -> int:
    """How often a recipe says one of these names; its docstring and first cell count double."""
    text = ROOT.joinpath("recipes", f"{name}.py").read_text(encoding="utf-8")
    first = text[: text.find("# %%", text.find("# %%") + 1)]

    def occurrences() -> Iterator[int]:
        for symbol in symbols:
            pattern = rf"\b{re.escape(symbol.rpartition('.')[2])}\b"
            yield len(re.findall(pattern, text)) + len(re.findall(pattern, first))

    return sum(occurrences())


def setup(app: Sphinx) -> ExtensionMetadata:
    """Sphinx calls this."""
    app.add_directive("recipe-card", RecipeCard)
    app.add_directive("recipes-using", RecipesUsing)
    app.add_directive("chapters", Chapters)
    # sphinx-gallery's own card cannot be given words of ours by any setting.
    for name in "THUMBNAIL_TEMPLATE", "BACKREF_THUMBNAIL_TEMPLATE":
        assert "{doc_name}" in getattr(sphinx_gallery.backreferences, name)
        setattr(sphinx_gallery.backreferences, name, "\n.. recipe-card:: {doc_name}\n\n")
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

"""Where the site and its sources are: what each page says of that, for people and for machines.

The addresses are those of ``[project.urls]`` in ``pyproject.toml``: *Documentation*, where the site
is, and *Repository*. What needs one that is not there is left out: the canonical address, the
sitemap and the card that a link to a page shows; the links to edit a page, and those that open a
notebook on Colab and Binder.
"""

from __future__ import annotations

import re
from html import escape
from importlib.metadata import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

BRANCH = "main"
CARD = "_static/card.png"
LONGEST = 200  # characters of a description
TITLE, CLAIM = "torchlift", "PyTorch checkpoints in the memory of one copy"


def addresses() -> dict[str, str]:
    """The project's addresses by their names in lower case, without a slash at the end."""
    pairs = (line.split(",", 1) for line in metadata("torchlift").get_all("Project-URL") or ())
    return {name.strip().lower(): url.strip().rstrip("/") for name, url in pairs}


def source_of(docname: str) -> str | None:
    """The file in the repository that a page is made from; None for one that has none."""
    if "api/generated" in docname or docname in ("genindex", "py-modindex", "search"):
        return None
    if docname.startswith("auto_recipes/"):
        recipe = docname.removeprefix("auto_recipes/")
        if recipe.endswith("index"):
            return f"recipes/{recipe.removesuffix('index')}GALLERY_HEADER.rst"
        return f"recipes/{recipe}.py"
    return f"docs/{docname}.rst"


def edit_link(docname: str, urls: dict[str, str]) -> str:
    """Where somebody can propose a change of this page, or ""."""
    source, repository = source_of(docname), urls.get("repository")
    return f"{repository}/edit/{BRANCH}/{source}" if source and repository else ""


def runner_links(docname: str, urls: dict[str, str]) -> dict[str, str]:
    """Where the notebook of a recipe's page runs without installing anything; both know GitHub."""
    where = urlsplit(urls.get("repository", ""))
    if where.hostname != "github.com":
        return {}
    project = where.path.strip("/").removesuffix(".git")
    notebook = f"recipes/notebooks/{docname.removeprefix('auto_recipes/')}.ipynb"
    return {
        "Colab": f"https://colab.research.google.com/github/{project}/blob/{BRANCH}/{notebook}",
        "Binder": f"https://mybinder.org/v2/gh/{project}/{BRANCH}?labpath={notebook}",
    }


def described(doctree: nodes.Node | None) -> str:
    """The first sentences of a page, for those who list it."""
    for paragraph in doctree.findall(nodes.paragraph) if doctree else ():
        if "tl-downloads" in paragraph["classes"] or not paragraph.astext().strip():
            continue
        text = " ".join(paragraph.astext().split())
        if len(text) <= LONGEST:
            return text
        return text[:LONGEST].rsplit(" ", 1)[0].rstrip(",;:") + " …"
    return CLAIM


def head_tags(docname: str, title: str, description: str, urls: dict[str, str]) -> str:
    """What the head of a page tells a search engine, and whoever shows a link to it."""
    named = {} if not description else {"description": description}
    shown = {"og:title": title, "og:type": "article", "og:site_name": TITLE}
    site = urls.get("documentation")
    if site:
        shown |= {"og:url": f"{site}/{docname}.html", "og:image": f"{site}/{CARD}"}
        shown |= {"og:description": description or CLAIM}
        named |= {"twitter:card": "summary_large_image"}
    tags = [f'<meta name="{key}" content="{escape(text)}" />' for key, text in named.items()]
    if site:
        tags += [
            f'<meta property="{key}" content="{escape(text)}" />' for key, text in shown.items()
        ]
    if site and docname == "404":  # it answers for addresses at any depth
        tags.insert(0, f'<base href="{site}/" />')
    return "\n".join(tags)


def sitemap(docnames: list[str], site: str) -> str:
    """Every page once, in the format of sitemaps.org."""
    pages = "".join(
        f"<url><loc>{escape(f'{site}/{name}.html')}</loc></url>\n"
        for name in sorted(docnames)
        if name not in ("404", "search", "genindex")
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n{pages}</urlset>\n'
    )


def draw_card(path: Path) -> None:
    """The picture that is shown with a link to the site: 1200 x 630, as its readers ask for."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 6.3), dpi=100, facecolor="#14181e")
    figure.text(0.08, 0.6, TITLE, size=64, weight="bold", color="#ff9068")
    figure.text(0.08, 0.42, CLAIM, size=30, color="#e4e9ee")
    figure.text(0.08, 0.3, "load · remap · reshard · convert · save", size=24, color="#84d4db")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def add_to_page(
    app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: nodes.document
) -> None:
    """Set what the templates show."""
    urls = addresses()
    title = re.sub("<.*?>", "", str(context.get("title", TITLE)))
    known = 'name="description"' in context.get("metatags", "")
    tags = head_tags(pagename, title, "" if known else described(doctree), urls)
    context["metatags"] = context.get("metatags", "") + tags
    context["edit_link"] = edit_link(pagename, urls) if doctree else ""


def write_for_machines(app: Sphinx, error: Exception | None) -> None:
    """Write the sitemap, and the card."""
    site = addresses().get("documentation")
    if site and not error:
        out = Path(app.outdir)
        text = sitemap(sorted(app.env.found_docs), site)
        out.joinpath("sitemap.xml").write_text(text, encoding="utf-8")
        out.joinpath("robots.txt").write_text(f"Sitemap: {site}/sitemap.xml\n", encoding="utf-8")
        draw_card(out / CARD)


def setup(app: Sphinx) -> ExtensionMetadata:
    """Sphinx calls this."""
    app.connect("html-page-context", add_to_page)
    app.connect("build-finished", write_for_machines)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

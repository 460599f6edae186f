"""The built site: every link leads somewhere, every picture is told, every reader can use it.

``make site`` builds it and names its folder in ``TORCHLIFT_HTML``.
"""

from __future__ import annotations

import difflib
import functools
import http.server
import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import html5lib
import notebooks
import pytest
import recipe_outputs
from browser import PROGRAM, Browser
from nbval.plugin import get_sanitize_patterns

pytestmark = pytest.mark.skipif("TORCHLIFT_HTML" not in os.environ, reason="not run by make site")
SITE = Path(os.environ.get("TORCHLIFT_HTML", ".")).resolve()
KINDS = {
    "landing": "index.html",
    "gallery": "auto_recipes/index.html",
    "recipe": "auto_recipes/06_writing/plot_01_power_cut.html",
    "table": "auto_recipes/01_loading/plot_03_by_hand.html",
    "api": "api/generated/torchlift.load.html",
    "guide": "guide/migration.html",
    "tutorial": "auto_recipes/00_tutorial/plot_02_into_a_model.html",
    "stepper": "guide/how_loading_works.html",
    "calculator": "guide/calculator.html",
    "search": "search.html",
    "modules": "py-modindex.html",
}
WIDTHS = 390, 1280, 1440
#: Where axe looks: every width and both themes, without looking twice at what it has seen.
CHECKED = {(390, "light"), (390, "dark"), (1280, "light"), (1440, "dark")}
each_kind = pytest.mark.parametrize("kind", KINDS)


#: What somebody types -> a part of the address of the page that answers.
FOUND = {
    "OOM": "plot_01_memory_twice",
    "EMA": "auto_recipes/",
    "cheatsheet": "guide/cheatsheet",
    "quantization": "plot_04_quantise_while_loading",
    "optimizer not learning": "plot_01_ghost",
    "timm": "guide/frameworks",
    "diffusers": "guide/frameworks",
    "vLLM": "guide/frameworks",
    "LoRA": "plot_02_lora",
    "untrusted": "plot_01_is_it_safe",
    "corrupt": "guide/troubleshooting",
    "number of classes": "plot_07_new_head",
    "unified memory": "guide/memory",
    "prefetch": "plot_13_mapped_or_read",
}


class Page(HTMLParser):
    """What a page names: its ids, where its links lead, its pictures, the files it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.ids: list[str] = []
        self.links: list[str] = []
        self.files: set[str] = set()
        self.images: list[dict[str, str | None]] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if values.get("id"):
            self.ids.append(values["id"] or "")
        if tag == "a" and values.get("href"):
            self.links.append(values["href"] or "")
        loaded = values.get("href") if tag == "link" else values.get("src")
        if loaded and values.get("rel") not in ("next", "prev", "index", "search", "canonical"):
            self.files.add(loaded)
        if tag == "img":
            self.images.append(values)

    handle_startendtag = handle_starttag

    def target(self, link: str) -> tuple[Path, str] | None:
        """The file and the anchor that a link of this page leads to, None outside of the site."""
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            return None
        file = self.path.parent.joinpath(unquote(parts.path)) if parts.path else self.path
        return Path(os.path.normpath(file)), unquote(parts.fragment)


@functools.cache
def pages() -> dict[Path, Page]:
    """Every page of the site, read once."""
    found = [path for path in SITE.rglob("*.html") if "_static" not in path.parts]
    return {path: Page(path) for path in sorted(found)}


def name(path: Path) -> str:
    return str(path.relative_to(SITE))


def test_every_link_of_the_site_leads_to_a_page_and_an_anchor_that_exist() -> None:
    """Also those to downloads, styles and pictures."""
    broken = []
    assert len(pages()) > 60
    for path, page in pages().items():
        for link in [*page.links, *page.files]:
            target = page.target(link)
            if target is None or link == "#":
                continue
            file, anchor = target
            there = pages().get(file)
            if not file.exists() or (anchor and there and anchor not in there.ids):
                broken.append(f"{name(path)}: {link}")
    assert not broken


def test_every_picture_has_a_text_alternative_that_is_no_file_name() -> None:
    """Only a card's, and the mark, may have none: the link beside them says the same in words."""
    wrong = []
    for path, page in pages().items():
        for image in page.images:
            alt, source = image.get("alt"), image.get("src") or ""
            on_card = re.search(r"_(light|dark)\d*\.png$|_static/mark.svg$", source)
            is_name = alt and (re.search(r"\.\w{3,4}$|^plot \d", alt) or alt in source)
            if alt is None or is_name or (not alt and not on_card):
                wrong.append(f"{name(path)}: {source}: {alt!r}")
    assert not wrong


def test_no_id_is_given_twice_on_a_page() -> None:
    """A link would lead to the first one only."""
    twice = {
        name(path): again
        for path, page in pages().items()
        if (again := [id for id, count in Counter(page.ids).items() if count > 1])
    }
    assert not twice


def test_api_pages_call_nothing_by_a_private_module() -> None:
    """Nobody can import it from there: titles, signatures, links and the index name the record."""
    shown = []
    for path in [SITE / "genindex.html", *SITE.joinpath("api").rglob("*.html")]:
        text = path.read_text(encoding="utf-8")
        titles = " ".join(re.findall(r'title="([^"]*)"', text))
        seen = titles + re.sub(r"<script.*?</script>|<[^>]*>", "", text, flags=re.DOTALL)
        shown += [(name(path), found) for found in re.findall(r"\btorchlift\._[a-z][\w.]*", seen)]
    assert not shown


@each_kind
def test_html_is_valid(kind: str) -> None:
    """A browser that has to guess what was meant guesses differently from the next one."""
    parser = html5lib.HTMLParser()
    parser.parse(SITE.joinpath(KINDS[kind]).read_bytes())
    assert [(place, error) for place, error, _ in parser.errors] == []


def test_recipes_fold_the_code_of_their_figures() -> None:
    """A reader sees figure and caption; the code of a figure opens on demand."""
    for path in SITE.glob("auto_recipes/*/plot_*.html"):
        text = path.read_text(encoding="utf-8")
        outside = re.sub(r"<details.*?</details>", "", text, flags=re.DOTALL)
        assert "plt.show" not in re.sub(r"<.*?>", "", outside), path.name
        assert text.count('<figure class="tl-framed">') == text.count("<figcaption>") >= 1


def test_the_site_shows_what_the_notebooks_store() -> None:
    """One execution serves the site and this comparison, which is nbval's: `make slow` runs that.

    What a cell printed and showed is equal, but for addresses, temporary paths, times and measured
    memory.
    """
    config = notebooks.RECIPES.joinpath("nbval_sanitize.cfg").read_text(encoding="utf-8")
    patterns = get_sanitize_patterns(config)

    def sanitized(text: str) -> str:
        for pattern, replacement in patterns:
            text = re.sub(pattern, replacement, text)
        return text.strip("\n")

    different = []
    for script in notebooks.scripts():
        path = recipe_outputs.record_of(str(script), notebooks.ROOT / "docs" / "auto_recipes")
        shown = json.loads(path.read_text(encoding="utf-8"))
        stored = [recipe_outputs.stored(cell) for cell in notebooks.code_cells(script)[1:]]
        assert len(shown) == len(stored), script
        for number, (one, other) in enumerate(zip(shown, stored, strict=True), 1):
            for kind in one.keys() | other.keys():
                site, notebook = (sanitized(outputs.get(kind, "")) for outputs in (one, other))
                if site != notebook:
                    lines = difflib.unified_diff(
                        notebook.splitlines(), site.splitlines(), "notebook", "site", lineterm=""
                    )
                    different.append("\n".join([f"{script.stem}, cell {number}, {kind}:", *lines]))
    assert not different, "\n\n".join(different)


def test_first_page_can_be_read_without_scripts() -> None:
    """Its claim, symptoms, code, report and table are in the file itself."""
    text = SITE.joinpath("index.html").read_text(encoding="utf-8")
    for words in "Killed while loading", "loaded 2 tensors", "Silently wrong", "<svg viewBox":
        assert words in text


# ---- in a browser


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("no browser on this machine: apt-get install chromium")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@functools.cache
def axe() -> str:
    """Deque's checker, from the package that brings it along."""
    spec = find_spec("axe_playwright_python")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("axe-playwright-python is not installed")
    return Path(spec.submodule_search_locations[0], "axe.min.js").read_text(encoding="utf-8")


CHECK = """
axe.run(document, {
  runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"], resultTypes: ["violations"], preload: false
}).then(found => found.violations.map(rule => [
  rule.id, rule.nodes.slice(0, 4).map(node => node.target.join(" ") + ": " + node.failureSummary)
]))
"""
WIDE = """
[...document.querySelectorAll("body *")].filter(
  node => node.getBoundingClientRect().right > innerWidth + 1 && node.offsetParent
).slice(0, 5).map(node => node.tagName + "." + node.className)
"""


#: Headings that the page's edge cuts, which makes it no wider.
CUT = """
[...document.querySelectorAll("article :is(h1, h2, h3, h4)")].filter(
  node => node.scrollWidth > node.clientWidth + 1
).map(node => node.textContent)
"""


@each_kind
def test_page_is_accessible_and_fits_at_every_width_and_theme(
    kind: str, browser: Browser, address: str
) -> None:
    """No violation of WCAG A and AA, no error in the console, nothing cut, or wider than a page."""
    browser.open(address + KINDS[kind])
    browser.run(axe() + ";0")
    found: dict[str, Any] = {}
    for width in WIDTHS:
        for theme in "light", "dark":
            browser.show(width, theme)
            browser.wait_for(f"document.documentElement.dataset.theme === '{theme}'")
            if browser.run("document.documentElement.scrollWidth > innerWidth"):
                found[f"wider than {width}"] = browser.run(WIDE)
            if cut := browser.run(CUT):
                found[f"cut at {width}"] = cut
            if (width, theme) in CHECKED:
                for rule, nodes in browser.run(CHECK):
                    found[f"{rule} at {width}, {theme}"] = nodes
    assert not found, json.dumps(found, indent=1)
    assert not browser.errors


#: What a page hides on purpose: what is folded, what a card of the gallery has no room for, the
#: types of a signature, the steps that buttons tell, and the heading that search engines read on
#: the first page.
HIDDEN = ", ".join(
    [
        "details:not([open]) > :not(summary)",
        "dt.tl-plain",
        ".sphx-glr-thumbcontainer :is(.tl-card-question, .tl-tag)",
        ".sphx-glr-tag-list, .sphx-glr-tag-label",
        ".tl-steps, .tl-step-panel, .search-button__kbd-shortcut",
        "[hidden], noscript, script, style, svg",
    ]
)
#: Words that somebody sees of an article, words that it has, the height of its title, its overflow.
SEEN = f"""{{
  const article = document.querySelector("article, .bd-search-container");
  const copy = article.cloneNode(true);
  for (const node of copy.querySelectorAll({json.dumps(HIDDEN)})) node.remove();
  const words = text => (text.match(/[\\w.]+/g) || []).length;
  const title = article.querySelector("h1, .tl-claim");
  const found = [];
  for (const theme of ["light", "dark"]) {{
    document.documentElement.dataset.theme = theme;
    const ink = getComputedStyle(title).color, page = getComputedStyle(document.body);
    found.push([
      theme, words(article.innerText), words(copy.textContent),
      ink === page.backgroundColor ? 0 : title.getBoundingClientRect().height,
      document.documentElement.scrollWidth - innerWidth,
    ]);
  }}
  found;
}}"""


def test_every_page_shows_its_title_and_its_words(browser: Browser, address: str) -> None:
    """A rule of the style sheet can blank a page that nobody opened, and the HTML is still valid.

    Nine tenths of the words of each article are seen, but what is hidden on purpose, and nothing is
    wider than the window: on a screen and on a phone, light and dark.
    """
    wrong = []
    for path in pages():
        browser.open(address + name(path))
        for width in 1400, 420:
            browser.resize(width)
            for theme, seen, there, height, over in browser.run(SEEN):
                where = f"{name(path)} at {width}, {theme}"
                if not height:
                    wrong.append(f"{where}: its title is not seen")
                if seen < 0.9 * there:
                    wrong.append(f"{where}: {seen} of {there} words are seen")
                if over > 0:
                    wrong.append(f"{where}: {over} pixels wider than the window")
    assert not wrong, "\n".join(wrong)


def test_search_finds_the_page_of_an_error_with_names_of_its_own(
    browser: Browser, address: str
) -> None:
    """What is pasted names files and layers that no page has."""
    error = "ModuleNotFoundError: No module named 'ultralytics'"
    browser.open(address + "search.html?q=" + quote(error))
    browser.wait_for("document.querySelector('#search-results li a[href*=troubleshooting]')")


@pytest.mark.parametrize(("words", "page"), FOUND.items())
def test_search_finds_the_page_by_the_words_of_those_who_have_the_problem(
    words: str, page: str, browser: Browser, address: str
) -> None:
    """Among the first five, also where the page says it in other words."""
    browser.open(address + "search.html?q=" + quote(words))
    results = "[...document.querySelectorAll('#search-results li > a')].map(link => link.href)"
    browser.wait_for(
        f"({results}).length && !document.querySelector('#search-progress')?.offsetParent"
    )
    browser.wait_for(f"({results}).slice(0, 5).some(link => link.includes('{page}'))")


def press(browser: Browser, key: str, number: int) -> None:
    """Press a key. Enter is the only one that writes something."""
    pressed: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": number}
    kind = "rawKeyDown"
    if key == "Enter":
        kind, pressed["text"] = "keyDown", "\r"
    browser.call("Input.dispatchKeyEvent", type=kind, **pressed)
    browser.call("Input.dispatchKeyEvent", type="keyUp", **pressed)


def test_gallery_is_filtered_from_the_keyboard(browser: Browser, address: str) -> None:
    """By a level, then by a level and a tag; a chapter of which nothing is left goes, too."""
    browser.show(1440, "light")
    browser.open(address + KINDS["gallery"])
    shown = "[...document.querySelectorAll('.tl-card-facts')].filter(card => card.offsetParent)"
    everything = browser.run(f"{shown}.length")
    browser.run("document.querySelector('.tl-filters').open = true")

    def press_tag(label: str) -> None:
        browser.run(f"""[...document.querySelectorAll('.sphx-glr-tag')]
          .find(tag => tag.textContent === '{label}').focus()""")
        press(browser, "Enter", 13)

    press_tag("Advanced")
    advanced = browser.run(f"{shown}.map(card => card.textContent)")
    assert 0 < len(advanced) < everything
    assert all("Advanced" in facts for facts in advanced)
    assert browser.run("document.querySelector('.sphx-glr-tag.active').ariaPressed") == "true"
    press_tag("optimizer")
    assert 0 < browser.run(f"{shown}.length") < len(advanced)
    assert browser.run("[...document.querySelectorAll('article h2')].some(h => !h.offsetParent)")
    press_tag("Advanced")
    press_tag("optimizer")
    assert browser.run(f"{shown}.length") == everything


@pytest.mark.parametrize("place", [0, 1], ids=["one process", "two ranks"])
def test_a_picture_is_told_step_by_step(place: int, browser: Browser, address: str) -> None:
    """By its buttons and by the arrow keys: text, picture and bars go along, and the page stays."""
    browser.show(1280, "light")
    browser.open(address + KINDS["stepper"])
    figure = f"document.querySelectorAll('[data-stepper]')[{place}]"
    widths = f"""[...{figure}.querySelectorAll('.tl-bar')].map(
      bar => Number(bar.style.getPropertyValue('--tl-share')))"""
    back, forward = (f"{figure}.querySelectorAll('button')[{number}]" for number in (0, 1))

    def told() -> tuple[str, int]:
        later = browser.run(f"{figure}.querySelectorAll('.tl-later').length")
        return browser.run(f"{figure}.querySelector('.tl-step-told').textContent")[:11], later

    assert told() == ("All 5 steps", 0)
    assert browser.run(f"{back}.getAttribute('aria-disabled')") == "true"
    browser.run(f"{forward}.focus(); {forward}.click(); {forward}.click()")
    assert told() == ("Step 2 of 5", 3)
    assert max(browser.run(widths)) < 0.01  # the table
    for _ in range(5):
        press(browser, "ArrowRight", 39)
    assert told() == ("Step 5 of 5", 0)
    assert max(browser.run(widths)) == 1
    assert browser.run(f"{forward}.getAttribute('aria-disabled')") == "true"
    assert browser.run(f"document.activeElement === {forward}")
    press(browser, "ArrowLeft", 37)
    browser.run(f"{back}.click()")
    assert told() == ("Step 3 of 5", 2)
    assert not browser.errors


def test_the_calculator_has_the_numbers_of_the_page_on_memory(
    browser: Browser, address: str
) -> None:
    """A file of 13 GB: 26 GB if it is loaded as usual in bfloat16, 52 GB to train with AdamW."""
    browser.show(1280, "light")
    browser.open(address + KINDS["calculator"])
    rows = "[...document.querySelectorAll('[data-calculator] tbody tr')]"

    def enter(name: str, value: str) -> list[list[str]]:
        field = f"document.querySelector('[data-calculator] [name={name}]')"
        browser.run(f"{field}.value = '{value}'")
        browser.run(f"{field}.dispatchEvent(new Event('input', {{bubbles: true}}))")
        found: list[list[str]] = browser.run(
            f"{rows}.map(row => [...row.children].slice(1).map(cell => cell.textContent))"
        )
        return found

    assert enter("billions", "6.5") == [
        ["26.0 GB", "2.00", "no"], ["0.00 GB", "0.00", "yes"], ["13.1 GB", "1.01", "yes"],
        ["52.0 GB", "4.00", "no"],
    ]  # fmt: skip
    assert enter("ranks", "4")[3] == ["13.0 GB", "1.00", "yes"]
    assert enter("memory", "4")[1] == ["6.57 GB", "0.51", "yes"]
    assert enter("billions", "")[1][0] == "6.57 GB", "an empty field changes nothing"
    assert not browser.errors


def test_a_solution_is_folded_with_what_it_prints() -> None:
    """An exercise is not solved by its own page."""
    for path in SITE.glob("auto_recipes/00_tutorial/plot_*.html"):
        text = path.read_text(encoding="utf-8")
        solutions = re.findall(r"<summary>Solution of exercise \d.*?</details>", text, re.DOTALL)
        assert len(solutions) == 2, path.name
        assert all("sphx-glr-script-out" in s for s in solutions if "print" in s), path.name

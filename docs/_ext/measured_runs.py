"""Runs of ``torchlift bench`` on a page: what was measured, as a chart and as a table.

The numbers are the committed ones of ``docs/_includes/runs``, which are what the command prints
with ``--json``: none on a page was typed by hand.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from figures_twice import RST, darken, save
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

from torchlift.bench import figure_of

RUNS = Path(__file__).resolve().parent.parent / "_includes" / "runs"
NAMES = {"runai_model_streamer": "Run:ai model streamer"}


class MeasuredRun(SphinxDirective):
    """A run by its name, as a ``:chart:`` or a ``:table:``; the content is the chart's caption."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar = dict.fromkeys(
        ("chart", "table", "conditions", "machine"), directives.flag
    )

    def run(self) -> list[nodes.Node]:
        path = RUNS / f"{self.arguments[0]}.json"
        self.env.note_dependency(str(path))
        data = json.loads(path.read_text(encoding="utf-8"))
        lines: list[str] = []
        if "chart" in self.options:
            lines += self._chart(data).splitlines()
        if "table" in self.options:
            lines += growth_table(data) if "sizes" in data else ways_table(data)
        said = {"conditions": conditions, "machine": machine}
        found = [tell(data) for option, tell in said.items() if option in self.options]
        lines += ["", " ".join(found)]
        box = nodes.container()
        self.state.nested_parse(StringList(lines, source=str(path)), self.content_offset, box)
        if "chart" not in self.options:
            return box.children
        caption = nodes.inline("", "", classes=["tl-caption-text"])
        self.state.nested_parse(self.content, self.content_offset, caption)
        for image in box.findall(nodes.image):
            image["alt"] = " ".join(caption.astext().split())
        caption.children = [child for line in caption.children for child in line.children]
        return [
            nodes.raw("", '<figure class="tl-framed">', format="html"),
            *box.children,
            nodes.raw("", "<figcaption>", format="html"),
            caption,
            nodes.raw("", "</figcaption></figure>", format="html"),
        ]

    def _chart(self, data: dict[str, Any]) -> str:
        """Draw it twice, and return what shows the one that fits the page."""
        folder = Path(self.env.srcdir) / "_build" / "runs"
        folder.mkdir(parents=True, exist_ok=True)
        figure, name = figure_of(data), self.arguments[0]
        width = round(figure.get_figwidth() * 100)
        save(figure, folder / f"{name}.png")
        darken(figure)
        figure.patch.set_facecolor("#14181e")
        save(figure, folder / f"{name}_dark.png")
        return RST.format(
            light=f"_build/runs/{name}.png", dark=f"_build/runs/{name}_dark.png", width=width
        )


def ways_table(data: dict[str, Any]) -> list[str]:
    """Return the rows of a comparison: seconds with their spread, beside the limit, and memory."""
    results = data["results"]
    limit = median(results["limit-plain"]["seconds"])
    lines = table_head(52, 24, 12, 12)
    lines += row("Way", "Seconds", "Of the limit", "Memory, GB")
    order = sorted(results.items(), key=lambda item: median(item[1]["seconds"] or [math.inf]))
    for name, found in order:
        if found["error"]:
            continue
        middle = median(found["seconds"])
        mapped = "" if found["bytes_per_second"] else ", mapped"
        summary = f"``{found['summary']}``" if "(" in found["summary"] else found["summary"]
        lines += row(
            f"*{summary}*" if name.startswith("limit") else summary + mapped,
            f"{short(middle)} ({short(min(found['seconds']))} to {short(max(found['seconds']))})",
            f"{middle / limit:.2f}",
            f"{max(found['added_anonymous']) / 1e9:.1f}",
        )
    return lines


def growth_table(data: dict[str, Any]) -> list[str]:
    """Return the rows of a growth: the median at each size, and the power of the number."""
    sizes = data["sizes"]
    lines = table_head(40, *[48 // len(sizes)] * len(sizes), 12)
    lines += row("Seconds", *(f"{size:,}" for size in sizes), "Grows with")
    for way, seconds in data["seconds"].items():
        cells = [short(median(rounds)) for rounds in seconds]
        cells += ["not run"] * (len(sizes) - len(cells))
        power = data["exponents"][way]
        grows = "not run" if power is None else f"n\\ :sup:`{power:.1f}`"
        lines += row(f"``{way}``" if "(" in way else way, *cells, grows)
    return lines


def conditions(data: dict[str, Any]) -> str:
    """Return how it was measured: rounds, what the page cache held, what the limit is."""
    if "sizes" in data:
        rounds = max(len(rounds) for sizes in data["seconds"].values() for rounds in sizes)
        return f"Medians of {rounds} rounds, each run in a process of its own."
    rounds = max(len(result["seconds"]) for result in data["results"].values())
    cached = [n for row in data["results"].values() for n in row["cached"] if n is not None]
    cache = (
        "Before each run the file was dropped from the page cache (fsync, then posix_fadvise); at "
        f"most {max(cached) / 1e6:.0f} MB of it were there as the clock began."
        if data["cold"]
        else "The file was in the page cache."
    )
    return (
        f"{data['nbytes'] / 1e9:.1f} GB in {data['tensors']} tensors, {data['format']}; {rounds} "
        "rounds in which all take turns, each run in a process of its own: the median, with the "
        f"lowest and the highest. {cache} The limit is the best of sixteen plain readers into new "
        f"memory, here {data['results']['limit-plain']['best_reader']}."
    )


def machine(data: dict[str, Any]) -> str:
    """Return what it was measured on."""
    found = data["machine"]
    versions = ", ".join(
        f"{NAMES.get(name, name)} {version.partition('+')[0]}"
        for name, version in found["versions"].items()
    )
    return (
        f"Measured on a virtual machine with {found['cores']} cores and "
        f"{found['memory'] / 1e9:.0f} GB, {found['system']}: {versions}."
    )


def table_head(*widths: int) -> list[str]:
    options = f":widths: {' '.join(map(str, widths))}"
    return [
        "",
        ".. list-table::",
        "   :header-rows: 1",
        f"   {options}",
        "   :class: tl-figures",
        "",
    ]


def row(*cells: str) -> list[str]:
    return [f"   {'* -' if number == 0 else '  -'} {cell}" for number, cell in enumerate(cells)]


def short(seconds: float) -> str:
    """Return two significant digits, three from a second on."""
    return f"{seconds:.2f}" if seconds >= 0.1 else f"{seconds:.2g}"


def setup(app: Sphinx) -> ExtensionMetadata:
    """Sphinx calls this."""
    app.add_directive("measured-run", MeasuredRun)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

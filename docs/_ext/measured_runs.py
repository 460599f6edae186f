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
    option_spec: ClassVar = dict.fromkeys(("chart", "table", "machine"), directives.flag)

    def run(self) -> list[nodes.Node]:
        path = RUNS / f"{self.arguments[0]}.json"
        self.env.note_dependency(str(path))
        data = json.loads(path.read_text(encoding="utf-8"))
        lines: list[str] = []
        if "chart" in self.options:
            lines += self._chart(data).splitlines()
        if "table" in self.options:
            lines += growth_table(data) if "sizes" in data else ways_table(data)
        if "machine" in self.options:
            lines += ["", machine(data)]
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
    for _, found in order:
        if found["error"]:
            continue
        middle = median(found["seconds"])
        mapped = "" if found["bytes_per_second"] else ", mapped"
        lines += row(
            f"``{found['summary']}``{mapped}"
            if "(" in found["summary"]
            else found["summary"] + mapped,
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


def machine(data: dict[str, Any]) -> str:
    """Return a sentence: rounds, what was measured, on what, and what the page cache held."""
    found = data["machine"]
    versions = ", ".join(
        f"{NAMES.get(name, name)} {version.partition('+')[0]}"
        for name, version in found["versions"].items()
    )
    where = (
        f"a virtual machine with {found['cores']} cores and {found['memory'] / 1e9:.0f} GB, "
        f"{found['system']}; {versions}"
    )
    if "sizes" in data:
        rounds = max(len(rounds) for sizes in data["seconds"].values() for rounds in sizes)
        return f"Medians of {rounds} rounds, each run in a process of its own, on {where}."
    rounds = max(len(result["seconds"]) for result in data["results"].values())
    cached = [n for row in data["results"].values() for n in row["cached"] if n is not None]
    cache = (
        f"Before each run the file was dropped from the page cache (fsync, then posix_fadvise); "
        f"at most {max(cached) / 1e6:.0f} MB of it were there as the clock began."
        if data["cold"]
        else "The file was in the page cache."
    )
    reader = data["results"]["limit-plain"]["best_reader"]
    return (
        f"{data['nbytes'] / 1e9:.1f} GB in {data['tensors']} tensors, {data['format']}; {rounds} "
        "rounds in which all take turns, each run in a process of its own: the median, with the "
        f"lowest and the highest. {cache} The limit is the best of sixteen plain readers into new "
        f"memory, here {reader}. Measured on {where}."
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

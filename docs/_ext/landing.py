"""The first page: what was measured, as a picture and a table.

The numbers are the committed ones of ``tools/measured.py``.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

import measured
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

WIDTH, HEIGHT = 640, 330
LEFT, RIGHT, TOP, BOTTOM = 8, 8, 26, 34


class MeasuredTable(SphinxDirective):
    """The measured table, with the conditions above it."""

    def run(self) -> list[nodes.Node]:
        head = ["Way", "Seconds", "Memory at the peak", "Silently wrong"]
        lines = [measured.conditions(), "", ".. list-table::", "   :header-rows: 1", ""]
        for row in [head, *measured.rows()]:
            cells = [cell.replace("`", "``") for cell in row]
            lines += [f"   * - {cells[0]}", *(f"     - {cell}" for cell in cells[1:])]
        box = nodes.container(classes=["tl-measured"])
        source = StringList(lines, source=str(measured.BENCH))
        self.state.nested_parse(source, self.content_offset, box)
        self.env.note_dependency(str(measured.BENCH))
        return [box]


class MemoryOverTime(SphinxDirective):
    """The picture: memory that a process owns while it loads, one line for each way."""

    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(measured.TIMELINE))
        run = json.loads(measured.TIMELINE.read_text(encoding="utf-8"))
        return [nodes.raw("", picture(run), format="html")]


def picture(run: dict[str, Any]) -> str:
    """Draw the lines as SVG, whose colours are those of the page's theme."""
    lines, copy = run["lines"], run["nbytes"]
    end = max(points[-1][0] for points in lines.values())
    top = max(2.15 * copy, *(height for points in lines.values() for _, height in points))

    def x(seconds: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * seconds / end, 1)

    def y(nbytes: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * nbytes / top, 1)

    drawn = []
    for number, label in (1, "the memory of one copy"), (2, "two copies"):
        drawn.append(f'<path class="tl-grid" d="M{LEFT} {y(number * copy)}H{WIDTH - RIGHT}"/>')
        drawn.append(f'<text x="{WIDTH - RIGHT}" y="{y(number * copy) - 7}">{label}</text>')
    drawn.append(f'<path class="tl-axis" d="M{LEFT} {y(0)}H{WIDTH - RIGHT}"/>')
    drawn.append(f'<text class="tl-first" x="{LEFT}" y="{HEIGHT - 8}">0 s</text>')
    drawn.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}">{end:.1f} s</text>')
    legend, told = [], []
    for number, (name, points) in enumerate(lines.items()):
        path = " ".join(f"{x(seconds)},{y(height)}" for seconds, height in points)
        last = points[-1]
        drawn.append(f'<polyline class="tl-line tl-line-{number}" points="{path}"/>')
        drawn.append(f'<circle class="tl-dot-{number}" cx="{x(last[0])}" cy="{y(last[1])}" r="5"/>')
        most = max(height for _, height in points)
        legend.append(
            '<li><svg viewBox="0 0 34 8" aria-hidden="true">'
            f'<path class="tl-line tl-line-{number}" d="M0 4H34"/></svg>'
            f"<span><code>{name}</code> {last[0]:.2g} s, {most / 2**20:.0f} MiB</span></li>"
        )
        told.append(f"{name}: {last[0]:.2g} seconds, at most {most / copy:.1f} copies")
    return (
        f'<figure class="tl-picture"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Memory that a process owns while it loads a file. {escape("; ".join(told))}">'
        f"{''.join(drawn)}</svg><figcaption>Memory that a process owns while it loads a file of "
        f"{copy / 1e9:.1f} GB, over time, in one run of each way. A dot is a model that is ready. "
        "Mapped weights are the file's memory, not the process's.</figcaption>"
        f"<ul>{''.join(legend)}</ul></figure>"
    )


def setup(app: Sphinx) -> ExtensionMetadata:
    """Sphinx calls this."""
    app.add_directive("measured-table", MeasuredTable)
    app.add_directive("memory-over-time", MemoryOverTime)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

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
#: The label of each line that is drawn, and its name among those that were measured.
DRAWN = {
    "build, torch.load, copy": "build, torch.load, load_state_dict",
    "torchlift, read": 'torchlift.load(source="read")',
    "torchlift, mapped": 'torchlift.load(source="mmap")',
}


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
    """Draw three of the lines as SVG, whose colours are those of the page's theme."""
    copy = run["nbytes"]
    lines = {label: run["lines"][name] for label, name in DRAWN.items()}
    end = max(points[-1][0] for points in lines.values())
    top = max(2.15 * copy, *(height for points in lines.values() for _, height in points))

    def x(seconds: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * seconds / end, 1)

    def y(nbytes: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * nbytes / top, 1)

    drawn = []
    for number, label in (1, "one copy"), (2, "two copies"):
        drawn.append(f'<path class="tl-grid" d="M{LEFT} {y(number * copy)}H{WIDTH - RIGHT}"/>')
        at, kind, up = (WIDTH - RIGHT - 10, "", 19) if number == 1 else (LEFT, "tl-first", -7)
        drawn.append(f'<text class="{kind}" x="{at}" y="{y(number * copy) + up}">{label}</text>')
    drawn.append(f'<path class="tl-axis" d="M{LEFT} {y(0)}H{WIDTH - RIGHT}"/>')
    drawn.append(f'<text class="tl-first" x="{LEFT}" y="{HEIGHT - 8}">0 s</text>')
    drawn.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}">{end:.1f} s</text>')
    told = []
    for number, (label, points) in enumerate(lines.items()):
        seconds, kept = points[-1]
        path = " ".join(f"{x(at)},{y(height)}" for at, height in points)
        most, peak = max((height, at) for at, height in points)
        # What is ready early goes on to the edge with what it keeps: the model is in use.
        drawn.append(
            f'<path class="tl-kept tl-kept-{number}" d="M{x(seconds)} {y(kept)}H{x(end)}"/>'
        )
        drawn.append(f'<polyline class="tl-line tl-line-{number}" points="{path}"/>')
        drawn.append(f'<circle class="tl-dot-{number}" cx="{x(seconds)}" cy="{y(kept)}" r="6"/>')
        # Beside what it does: where it is ready, or at its peak; what owns nothing, at the edge.
        at, up, kind = (seconds, -9, " tl-first") if seconds < end else (peak, 20, "")
        if most < copy / 10:
            at, kind = end, ""
        drawn.append(
            f'<text class="tl-name tl-name-{number}{kind}" x="{x(at) + (12 if kind else -36)}" '
            f'y="{y(most) + up}">{label}: {seconds:.2g} s</text>'
        )
        told.append(f"{label}: {seconds:.2g} seconds, at most {most / copy:.1f} copies")
    before, read, _ = (max(h for _, h in points) / copy for points in lines.values())
    slow, fast, mapped = (points[-1][0] for points in lines.values())
    return (
        f'<figure class="tl-picture"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Memory that a process owns while it loads a file. {escape("; ".join(told))}">'
        f"{''.join(drawn)}</svg><figcaption><strong>{slow / fast:.0f} times as fast with "
        f"{read / before:.0%} of the memory; mapped, ready in {1000 * mapped:.0f} milliseconds "
        f"with none.</strong> What a process owns while it loads {copy / 1e9:.1f} GB, in one "
        "run of each way; a dot is a model that is ready. The table below has torch's other ways."
        "</figcaption></figure>"
    )


def setup(app: Sphinx) -> ExtensionMetadata:
    """Sphinx calls this."""
    app.add_directive("measured-table", MeasuredTable)
    app.add_directive("memory-over-time", MemoryOverTime)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}

"""Write what was measured as pages include it: pictures, charts, tables, conditions.

    python tools/measured_pages.py

The numbers are the committed ones: `tools/measured.py` measures those of the first page,
`tools/frameworks.py` those of the frameworks, and the files in ``docs/_includes/runs`` are what
``tools/bench.py --json`` prints. What is written here is
committed, too, so that the build of the site draws nothing; a test writes the texts again and
compares them.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

import charts
import frameworks
import measured

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "docs" / "_includes" / "runs"
#: Where pages include from.
TARGET = ROOT / "docs" / "_includes" / "measured"
NAMES = {"runai_model_streamer": "Run:ai model streamer"}

WIDTH, HEIGHT = 640, 364
LEFT, RIGHT, TOP, BOTTOM = 8, 8, 44, 34
#: The label of each line that is drawn, and its name among those that were measured.
DRAWN = {
    "build, torch.load, copy": "build, torch.load, load_state_dict",
    "torchlift, read": 'torchlift.load(source="read")',
    "torchlift, mapped": 'torchlift.load(source="mmap")',
}
#: Torch's best way: in the picture it has the place of ours, so it has a label alone.
BEST = "torch, mapped, meta, assign", "torch.load(mmap=True), meta, assign"
CHART = """\
.. image:: /_includes/measured/{name}.png
   :class: only-light
   :width: {width}px
   :alt: {alt}

.. image:: /_includes/measured/{name}_dark.png
   :class: only-dark
   :width: {width}px
   :alt: {alt}
"""


def texts() -> dict[str, str]:
    """Every text that a page includes, by the name of its file; what none includes is left out."""
    timeline = json.loads(measured.TIMELINE.read_text(encoding="utf-8"))
    found = {"first_page.html": picture(timeline), "first_page.rst": "\n".join(first_table())}
    found["frameworks.rst"] = "\n".join(frameworks_table())
    for name, data in runs().items():
        table = growth_table(data) if "sizes" in data else ways_table(data)
        found[f"{name}-table.rst"] = "\n".join(table)
        found[f"{name}-conditions.rst"] = conditions_of(data)
        found[f"{name}-machine.rst"] = machine_of(data)
        found[f"{name}-chart.rst"] = CHART.format(name=name, width=width_of(data), alt=told(data))
    pages = "".join(
        path.read_text(encoding="utf-8")
        for path in (*ROOT.glob("docs/*.rst"), *ROOT.glob("docs/guide/*.rst"))
    )
    return {
        name: text.strip("\n") + "\n"
        for name, text in found.items()
        if f"_includes/measured/{name}" in pages
    }


def runs() -> dict[str, dict[str, Any]]:
    """Return what ``tools/bench.py --json`` printed, by the names of the runs."""
    paths = sorted(RUNS.glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


# ---- the first page


def first_table() -> Iterator[str]:
    """The measured table, with the conditions above it."""
    yield from (measured.conditions(), "", ".. list-table::", "   :header-rows: 1", "")
    for cells in [["Way", "Seconds", "Memory at the peak", "Silently wrong"], *measured.rows()]:
        yield from row(*(cell.replace("`", "``") for cell in cells))


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
    drawn.append(f'<text class="tl-middle" x="{WIDTH / 2}" y="{HEIGHT - 8}">time</text>')
    drawn.append(f'<text class="tl-first" x="{LEFT}" y="{TOP - 24}">memory of the process</text>')
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
        aside = 12 if kind else -36
        if most < copy / 10:
            at, kind, aside = end, "", 0
        drawn.append(
            f'<text class="tl-name tl-name-{number}{kind}" x="{x(at) + aside}" '
            f'y="{y(most) + up}">{label}: {seconds:.2g} s</text>'
        )
        told.append(f"{label}: {seconds:.2g} seconds, at most {most / copy:.1f} copies")
    name, key = BEST
    best = run["lines"][key][-1][0]
    drawn.append(
        f'<text class="tl-name tl-name-3" x="{WIDTH - RIGHT}" y="{y(0) - 36}">'
        f"{name}: {best:.2g} s</text>"
    )
    told.append(f"{name}: {best:.2g} seconds, almost nothing")
    before, read, _ = (max(h for _, h in points) / copy for points in lines.values())
    slow, fast, mapped = (points[-1][0] for points in lines.values())
    return (
        f'<figure class="tl-picture"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="Memory that a process owns while it loads a file. {escape("; ".join(told))}">'
        f"{''.join(drawn)}</svg><figcaption><strong>{slow / fast:.0f} times as fast with "
        f"{read / before:.0%} of the memory. Mapped: ready in {1000 * mapped:.0f} milliseconds, "
        f"with almost no memory.</strong> Torch's own way to map is as fast. The table below shows "
        "what it gets wrong. The lines are the memory that a process owns while it loads "
        f"{copy / 1e9:.1f} GB, in one run of each way. A dot is a model that is ready."
        "</figcaption></figure>"
    )


# ---- frameworks


def frameworks_table() -> Iterator[str]:
    """What the recipes on frameworks printed of both sides, with the conditions above it."""
    data = json.loads(frameworks.FOUND.read_text(encoding="utf-8"))
    runs = max(len(taken) for ways in data["results"].values() for taken in ways.values())
    rounds = "One round." if runs == 1 else f"Medians of {runs} rounds, and the lowest and highest."
    yield (
        f"{rounds} Each way ran in a new process."
        f" MiB is the peak of anonymous memory, RAM that the process owns. {machine_of(data)}"
    )
    yield from table_head(36, 36, 18, 10)
    yield from row("Job", "Way", "Seconds", "MiB")
    for recipe, ways in data["results"].items():
        job, names = frameworks.JOBS[recipe]
        shown = f":doc:`{job} </auto_recipes/07_frameworks/{recipe}>`"
        for way, taken in ways.items():
            seconds = [each for each, _ in taken]
            memory = max(peak or 0 for _, peak in taken)
            spread = f" ({short(min(seconds))} to {short(max(seconds))})" if runs > 1 else ""
            time = f"{short(median(seconds))}{spread}"
            yield from row(shown, names[way], time, str(memory or "not measured"))
            shown = ""


# ---- runs of ``tools/bench.py``


def draw(name: str, data: dict[str, Any]) -> None:
    """Draw a chart twice, for the light page and the dark one."""
    from figures_twice import NIGHT, darken, save

    figure = charts.figure_of(data)
    save(figure, TARGET / f"{name}.png")
    darken(figure)
    figure.patch.set_facecolor(NIGHT)
    save(figure, TARGET / f"{name}_dark.png")


def width_of(data: dict[str, Any]) -> int:
    """The width of a chart in pixels of a page."""
    return round(charts.figure_of(data).get_figwidth() * 100)


def told(data: dict[str, Any]) -> str:
    """What a chart shows, in words."""
    if "sizes" in data:
        rows = {way: rounds[-1] for way, rounds in data["seconds"].items() if rounds}
    else:
        rows = {r["summary"]: r["seconds"] for r in data["results"].values() if r["seconds"]}
    shown = "; ".join(f"{way}: {short(median(seconds))} s" for way, seconds in rows.items())
    return f"A chart of medians. {shown}."


def ways_table(data: dict[str, Any]) -> list[str]:
    """Return the rows of a comparison: seconds with their spread, beside the limit, and memory."""
    results = data["results"]
    limit = median(results["limit-plain"]["seconds"])
    lines = table_head(46, 30, 12, 12)
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


def conditions_of(data: dict[str, Any]) -> str:
    """Return how it was measured: rounds, what the page cache held, what the limit is."""
    if "sizes" in data:
        rounds = max(len(rounds) for sizes in data["seconds"].values() for rounds in sizes)
        return f"Medians of {rounds} rounds. Each run had a process of its own."
    rounds = max(len(result["seconds"]) for result in data["results"].values())
    cached = [n for row in data["results"].values() for n in row["cached"] if n is not None]
    cache = (
        "Before each run the file was dropped from the page cache (fsync, then posix_fadvise). At "
        f"most {max(cached) / 1e6:.0f} MB of it were there when the clock started."
        if data["cold"]
        else "The file was in the page cache."
    )
    return (
        f"{data['nbytes'] / 1e9:.1f} GB in {data['tensors']} tensors, {data['format']}. All ways "
        f"took turns in {rounds} rounds, each run in a process of its own. Numbers are the median, "
        f"with the lowest and the highest. {cache} The limit is the best of sixteen plain readers "
        f"into new memory, here {data['results']['limit-plain']['best_reader']}."
    )


def machine_of(data: dict[str, Any]) -> str:
    """Return what it was measured on."""
    found = data["machine"]
    versions = ", ".join(
        f"{NAMES.get(name, name)} {version.partition('+')[0]}"
        for name, version in found["versions"].items()
    )
    return (
        f"Measured on a virtual machine with {found['cores']} cores and "
        f"{found['memory'] / 1e9:.0f} GB, {found['system']}. Versions: {versions}."
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
    return [
        f"   {'* -' if number == 0 else '  -'} {cell}".rstrip() for number, cell in enumerate(cells)
    ]


def short(seconds: float) -> str:
    """Return two significant digits, three from a second on."""
    return f"{seconds:.2f}" if seconds >= 0.1 else f"{seconds:.2g}"


def main() -> int:
    """Write everything."""
    sys.path.append(str(ROOT / "docs" / "_ext"))
    TARGET.mkdir(exist_ok=True)
    for name, text in texts().items():
        TARGET.joinpath(name).write_text(text, encoding="utf-8")
    for name, data in runs().items():
        draw(name, data)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Charts of what was measured, in the look of the recipes; the numbers are those of the JSON."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES = {"limit-plain": ("best plain reader", "--"), "limit-copy": ("memcpy", ":")}
_MEANINGS = {
    "C1": "torchlift, mapped",
    "C2": "torchlift, read",
    "C3": "fastest other that reads",
    "C0": "others",
}


def figure_of(data: Mapping[str, Any]) -> Figure:
    """Return the chart of a comparison or of a growth, whose ``savefig`` writes it.

    Colours mean what they do in ``torchlift.measure.figures``: torchlift mapped orange, torchlift
    read teal, the fastest of the others navy, the rest gray.

    Args:
        data: what ``tools/bench.py --json`` prints.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context("torchlift.measure.figures"):
        figure = Figure()
        draw_it = _draw_growth if "sizes" in data else _draw_ways
        draw_it(figure, data)
    return figure


def _draw_ways(figure: Figure, data: Mapping[str, Any]) -> None:
    """Draw a bar for each way, from the lowest to the highest a line, and the limits across."""
    from matplotlib.colors import to_hex

    ran = {name: row for name, row in data["results"].items() if row["seconds"]}
    limits = {name: ran.pop(name) for name in list(ran) if name.startswith("limit")}
    shown = sorted(ran.items(), key=lambda item: median(item[1]["seconds"]))
    read = [name for name, row in shown if row["bytes_per_second"] and "torchlift" not in name]
    figure.set_size_inches(6.8, 1.5 + 0.42 * len(shown))
    axes = figure.subplots()
    labels = []
    for place, (name, row) in enumerate(shown):
        middle, low, high = median(row["seconds"]), min(row["seconds"]), max(row["seconds"])
        labels.append(str(row["summary"]) + ("" if row["bytes_per_second"] else " (mapped)"))
        axes.barh(
            place,
            middle,
            xerr=[[middle - low], [high - middle]],
            color=_colour(name, read),
            error_kw={"ecolor": "black", "elinewidth": 1.2, "capsize": 2.5},
            height=0.66,
        )
    longest = max((max(row["seconds"]) for _, row in shown), default=1.0)
    for name, (label, look) in _LINES.items():
        if name in limits:
            seconds = median(limits[name]["seconds"])
            axes.axvline(seconds, color="black", linestyle=look, linewidth=1.2, label=label)
    axes.set_yticks(range(len(shown)), labels, fontsize=10.5)
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, 1.05 * longest), ylim=(len(shown) - 0.5, -0.5), xlabel="seconds")
    for colour, meaning in _MEANINGS.items():
        axes.barh([0], [0], color=to_hex(colour), label=meaning)
    figure.legend(loc="outside upper center", ncols=3, fontsize=10.5)


def _colour(name: str, others: list[str]) -> str:
    from matplotlib.colors import to_hex

    # Made a colour here, where the style is: of a line, "C1" is looked up as it is drawn.
    if name.startswith("torchlift"):
        return to_hex("C1" if name.endswith("mmap") else "C2")
    return to_hex("C3" if name in others[:1] else "C0")


def _draw_growth(figure: Figure, data: Mapping[str, Any]) -> None:
    """Draw a line for each way over the number, both axes logarithmic."""
    from matplotlib.colors import to_hex
    from matplotlib.ticker import NullLocator

    axes: Axes = figure.subplots()
    ours = iter([("C1", "-", "o"), ("C2", "--", "s")])
    others = iter([("C0", "-", "o"), ("C3", "-.", "s")])
    for way, rounds in data["seconds"].items():
        if not rounds:
            continue
        colour, look, mark = next(ours if "torchlift" in way else others)
        sizes, took = data["sizes"][: len(rounds)], [median(seconds) for seconds in rounds]
        axes.loglog(sizes, took, color=to_hex(colour), linestyle=look, marker=mark, label=way)
    axes.set(xlabel=f"number of {data['what']}", ylabel="seconds")
    axes.set_xticks(data["sizes"], [f"{size:,}" for size in data["sizes"]])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    figure.legend(loc="outside upper left", fontsize=11)

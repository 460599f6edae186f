"""Draw each figure of a recipe twice: for a light page, and for a dark one.

A recipe draws once, in the colours of ``torchlift.measure.figures``. Here its artists are given the
colours of the dark page that mean the same, and the figure is saved again. The cards of the gallery
get a small picture of each, drawn for their width and without letters, which nobody could read.
"""

from __future__ import annotations

import colorsys
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy
from matplotlib.artist import Artist
from matplotlib.collections import Collection
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Annotation, Text
from matplotlib.ticker import NullFormatter
from PIL import Image

DPI = 200
CARD = 3.0, 1.875  # inches: 300 pixels of a page, 8 to 5
NIGHT, INK = "#14181e", "#e4e9ee"  # the theme's dark page, and letters on it
#: The cycle of figures.mplstyle. The one that is darkest on white is brightest on the dark page, so
#: that the same two stay furthest apart.
DARK = {"#8a939e": "#87919c", "#c8441b": "#ff9068", "#17565e": "#84d4db", "#12294a": "#dce6ff"}
RST = """
.. container:: tl-figure

   .. image:: /{light}
      :class: only-light
      :width: {width}px
      :alt:

   .. image:: /{dark}
      :class: only-dark
      :width: {width}px
      :alt:

"""


def scrape(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Save what a cell drew (an image scraper of sphinx-gallery)."""
    text = ""
    for number, name in zip(plt.get_fignums(), block_vars["image_path_iterator"], strict=False):
        figure, light = plt.figure(number), Path(name)
        dark = light.with_name(f"{light.stem}_dark.png")
        save(figure, light)
        is_first = len(block_vars["image_path_iterator"]) == 1
        for suffix in "light", "dark":
            if suffix == "dark":
                darken(figure)
                save(figure, dark)
            if is_first:
                card = card_path(light.parent, Path(block_vars["src_file"]), suffix)
                card.parent.mkdir(parents=True, exist_ok=True)
                with as_card(figure):
                    save(figure, card)
        folder = light.relative_to(Path(gallery_conf["src_dir"]).resolve()).parent.as_posix()
        text += RST.format(
            light=f"{folder}/{light.name}",
            dark=f"{folder}/{dark.name}",
            width=round(figure.get_figwidth() * 100),
        )
    plt.close("all")
    return text


def card_path(images: Path, script: Path, suffix: str) -> Path:
    """Where the small picture of a recipe is kept."""
    return images / "thumb" / f"{script.stem}_{suffix}.png"


def save(figure: Figure, path: Path) -> None:
    """Write a picture of few colours, which is what a chart is: a third of the bytes."""
    pixels = io.BytesIO()
    figure.savefig(pixels, dpi=DPI, facecolor=figure.get_facecolor(), format="rgba")
    size = [int(side * DPI) for side in figure.get_size_inches()]
    image = Image.frombuffer("RGBA", size, pixels.getvalue()).convert("RGB")
    image.quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)


@contextmanager
def as_card(figure: Figure) -> Iterator[None]:
    """Give a figure the size of a card, and hide its letters, while this is entered."""
    size = figure.get_size_inches().copy()
    shown = [a for a in figure.findobj(lambda a: isinstance(a, Text | Legend)) if a.get_visible()]
    axes = [axis for part in figure.axes for axis in (part.xaxis, part.yaxis)]
    formatters = [axis.get_major_formatter() for axis in axes]
    for artist in shown:
        artist.set(visible=False, in_layout=False)
    for axis in axes:
        axis.set_major_formatter(NullFormatter())
    figure.set_size_inches(CARD)
    try:
        yield
    finally:
        figure.set_size_inches(size)
        for artist in shown:
            artist.set(visible=True, in_layout=True)
        for axis, formatter in zip(axes, formatters, strict=True):
            axis.set_major_formatter(formatter)


def dark_colour(colour: Any) -> Any:
    """Return the colour of equal meaning on the dark page; what is no colour is left alone."""
    if isinstance(colour, str) and colour in ("none", "auto", "face"):
        return colour
    red, green, blue, alpha = to_rgba(colour)
    known = DARK.get(to_hex((red, green, blue)))
    if known:
        return to_rgba(known, alpha)
    hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    if saturation < 0.15:
        night, ink = numpy.array(to_rgba(NIGHT)), numpy.array(to_rgba(INK))
        red, green, blue, _ = ink + (night - ink) * lightness
    else:
        lightness = min(0.82, max(0.6, 1 - lightness))
        red, green, blue = colorsys.hls_to_rgb(hue, lightness, saturation)
    return float(red), float(green), float(blue), alpha


def darken(figure: Figure) -> None:
    """Give every artist of a figure its colour on the dark page."""
    # A card has room for fewer ticks. Without a new layout, those that it left out stay dark.
    figure.draw_without_rendering()
    for artist in artists_of(figure):
        if isinstance(artist, Line2D):
            names = "color", "markerfacecolor", "markeredgecolor"
            # All of them first: a marker without a colour of its own has that of the line.
            artist.set(**{name: dark_colour(getattr(artist, f"get_{name}")()) for name in names})
        elif isinstance(artist, Patch):
            face, edge = artist.get_facecolor(), artist.get_edgecolor()
            artist.set(facecolor=dark_colour(face), edgecolor=dark_colour(edge))
        elif isinstance(artist, Collection):
            faces, edges = artist.get_facecolors(), artist.get_edgecolors()
            artist.set_array(None)
            artist.set_facecolor([dark_colour(face) for face in faces])
            artist.set_edgecolor([dark_colour(edge) for edge in edges])
        elif isinstance(artist, Text):
            artist.set_color(dark_colour(artist.get_color()))


def artists_of(figure: Figure) -> Iterator[Artist]:
    """Every artist once, with the boxes and arrows of texts, which matplotlib does not list."""
    found: dict[int, Artist] = {}
    for artist in figure.findobj(include_self=True):
        found[id(artist)] = artist
        if isinstance(artist, Text) and artist.get_bbox_patch():
            found[id(artist.get_bbox_patch())] = artist.get_bbox_patch()
        if isinstance(artist, Annotation) and artist.arrow_patch:
            found[id(artist.arrow_patch)] = artist.arrow_patch
    yield from found.values()

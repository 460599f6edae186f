"""What the site's own code makes of recipes and addresses, without building it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import figures_twice
import matplotlib.pyplot as plt
import numpy
import pytest
import recipe_cards
import torch
from matplotlib.colors import to_rgb

import torchlift

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted(
    str(path.relative_to(ROOT / "recipes").with_suffix(""))
    for path in ROOT.glob("recipes/[0-9]*/plot_*.py")
)


def luminance(colour: object) -> float:
    """Relative luminance, as WCAG defines it."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return float(numpy.dot(linear, [0.2126, 0.7152, 0.0722]))


def contrast(one: object, other: object) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


# ---- figures


def test_every_colour_of_the_style_has_one_of_equal_meaning_on_the_dark_page() -> None:
    """It can be told from the page, and the order of contrast is kept."""
    with plt.style.context("torchlift.measure.figures"):
        cycle = ["#" + str(c).strip("#") for c in plt.rcParams["axes.prop_cycle"].by_key()["color"]]
    assert cycle == list(figures_twice.DARK)
    dark = [contrast(figures_twice.dark_colour(colour), figures_twice.NIGHT) for colour in cycle]
    assert min(dark) > 4.5
    assert dark == sorted(dark)
    light = [contrast(colour, "white") for colour in cycle]
    assert min(light) > 3
    assert light == sorted(light)


# ---- pages


# ---- cards


def test_each_recipe_has_a_card_and_each_card_a_recipe() -> None:
    """No entry outlives its recipe."""
    assert set(recipe_cards.facts()) == set(RECIPES)


# ---- pictures that are told step by step


class Net(torch.nn.Module):
    """The model of the page *How loading works*."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(1024, 1024)
        self.head = torch.nn.Linear(1024, 512)
        self.register_buffer("table", torch.arange(1024.0), persistent=False)


def owned_and_mapped(path: str, is_sharded: bool) -> tuple[int, int, int]:
    """Load it with ``head`` in bfloat16: bytes mapped, owned at the peak, owned in the end."""
    model = torchlift.skeleton(Net)
    if is_sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    rule = torchlift.remap.by_pattern({"^head": "bfloat16"})
    how: dict[str, Any] = {"dtype": rule, "allow_unexpected": ["old"]}
    peak = torchlift.plan(model, path, **how).peak_bytes
    report = torchlift.load(model, path, **how)
    sizes = {
        name: (tensor.to_local() if is_sharded else tensor).nbytes
        for name, tensor in model.named_parameters()
    }
    mapped = sum(size for name, size in sizes.items() if report.source[name] == "mmap")
    # The table is real before, too.
    return mapped, peak + model.table.nbytes, sum(sizes.values()) - mapped + model.table.nbytes


def steps_of(picture: str) -> list[tuple[int, ...]]:
    """The bytes that each step of a picture shows."""
    text = ROOT.joinpath("docs", "_includes", f"{picture}_steps.html").read_text(encoding="utf-8")
    return [tuple(map(int, found.split())) for found in re.findall(r'data-memory="(.*?)"', text)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_picture_s_bars_are_what_the_library_does(ranks: int, tmp_path: Path) -> None:
    """Mapped and owned bytes of each process while it fetches, and when it has committed."""
    path = str(tmp_path / "model.pt")
    torch.save({**Net().state_dict(), "old": torch.zeros(512, 1024)}, path)
    if ranks == 1:
        found = [owned_and_mapped(path, False)]
    else:
        found = torchlift.distributed.on_ranks(ranks, owned_and_mapped, path, True)
    before = (0, Net().table.nbytes) * ranks
    fetch = tuple(size for mapped, peak, _ in found for size in (mapped, peak))
    commit = tuple(size for mapped, _, owned in found for size in (mapped, owned))
    assert steps_of("flow" if ranks == 1 else "mesh") == [before] * 3 + [fetch, commit]


# ---- examples


@pytest.mark.parametrize("room", ["", "swap", "remap", "distributed", "measure", "bench"])
def test_an_example_begins_with_what_it_imports(room: str) -> None:
    """So that a reader of one API page can copy it."""
    module = getattr(torchlift, room) if room else torchlift
    for name in module.__all__:
        found = getattr(module, name)
        _, _, example = (inspect.getdoc(found) or "").partition(">>> ")
        if example and not inspect.ismodule(found):
            assert "import " in example.partition("\n")[0], f"{name}: {example[:60]}"


# ---- what Sphinx and the theme write

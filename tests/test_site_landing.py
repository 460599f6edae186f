"""What pages claim in the tables that tools write, and the first page in its eight lines."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import frameworks
import measured
import measured_pages
import notebooks
import pytest
import torch
from forked import run
from torch import nn

import torchlift

ROOT = Path(__file__).resolve().parent.parent
EIGHT_LINES = ROOT / "docs" / "_includes" / "eight_lines.py"


class Tied(nn.Module):
    """Two names for one weight, and a table that no file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens) * self.scale)


def _on_meta() -> Tied:
    with torch.device("meta"):
        return Tied()


def _copied(model: nn.Module, path: Path) -> None:
    model.load_state_dict(torch.load(path))


def _assigned(model: nn.Module, path: Path) -> None:
    model.load_state_dict(torch.load(path), assign=True)


def _mapped(model: nn.Module, path: Path) -> None:
    model.load_state_dict(torch.load(path, mmap=True), assign=True)


def _skeleton() -> nn.Module:
    return torchlift.skeleton(Tied)


LOADS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Path], object]]] = {
    "torch-build": (Tied, _copied),
    "torch-assign": (_on_meta, _assigned),
    "torch-mmap": (_on_meta, _mapped),
    "torchlift-mmap": (_skeleton, lambda m, path: torchlift.load(m, path, source="mmap")),
    "torchlift-read": (_skeleton, lambda m, path: torchlift.load(m, path, source="read")),
    "torchlift-bf16": (_skeleton, lambda m, path: torchlift.load(m, path, dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("way", measured.WAYS)
def test_a_way_does_wrong_what_the_table_says(way: str, tmp_path: Path) -> None:
    """Without an error: ties come apart, the optimizer trains nothing, a buffer is another."""
    path = tmp_path / "tied.pt"
    torch.save(Tied().state_dict(), path)
    build, load = LOADS[way]
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(model, path)
    wrong = []
    if model.embed.weight is not model.head.weight:
        wrong.append("ties")
    if model.scale.is_meta:
        with pytest.raises(RuntimeError, match=r"meta"):  # loud, as the page says
            model(torch.tensor([1, 2]))
        model.scale = torch.full((4,), 2.0)
    elif model.scale.tolist() != [2.0] * 4:
        wrong.append("buffers")
    before = model.embed.weight.detach().clone()
    model.scale = model.scale.to(before.dtype)
    model(torch.tensor([1, 2])).square().sum().backward()
    optimizer.step()
    if torch.equal(model.embed.weight, before):
        wrong.append("optimizer")
    assert measured.WAYS[way][1] == (", ".join(wrong) or "nothing")


def test_readme_has_the_measured_table() -> None:
    """One measurement, told twice; `tools/measured.py --table` writes it."""
    assert measured.markdown() in ROOT.joinpath("README.md").read_text(encoding="utf-8")


def test_pages_include_what_was_measured() -> None:
    """Run ``python tools/measured_pages.py`` after a measurement."""
    texts = measured_pages.texts()
    for name, text in texts.items():
        assert measured_pages.TARGET.joinpath(name).read_text(encoding="utf-8") == text, name
    charts = {f"{name}{suffix}.png" for name in measured_pages.runs() for suffix in ("", "_dark")}
    assert {path.name for path in measured_pages.TARGET.iterdir()} == {*texts, *charts}


def test_table_and_picture_tell_of_one_size() -> None:
    """Every way of the table was measured, and memory is that of no copy, one copy or two."""
    results = measured.json.loads(measured.BENCH.read_text(encoding="utf-8"))
    assert list(results["results"]) == list(measured.WAYS)
    assert not any(row["error"] for row in results["results"].values())
    assert not results["different"]
    lines = measured.json.loads(measured.TIMELINE.read_text(encoding="utf-8"))
    assert abs(lines["nbytes"] / results["nbytes"] - 1) < 0.01
    copies = [max(h for _, h in points) / lines["nbytes"] for points in lines["lines"].values()]
    assert [round(copy) for copy in copies] == [2, 1, 1, 0, 0]


def test_the_eight_lines_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight statements, in an empty folder, with warnings as errors."""
    text = EIGHT_LINES.read_text(encoding="utf-8")
    code = [line for line in text.splitlines() if line.strip()]
    assert len(code) == 8
    monkeypatch.chdir(tmp_path)
    done = run(text, env={"PYTHONWARNINGS": "error"})
    assert done.returncode == 0, done.stderr
    assert "loaded 2 tensors, 64.0 MiB" in done.stdout


@pytest.mark.parametrize("recipe", frameworks.JOBS)
def test_numbers_of_frameworks_are_found_in_what_the_recipes_print(recipe: str) -> None:
    """In the executed notebooks, of each way that the table has."""
    script = frameworks.RECIPES / f"{recipe}.py"
    outputs = [each for cell in notebooks.code_cells(script) for each in cell.outputs]
    printed = "".join(each.get("text", "") for each in outputs)
    for way in frameworks.JOBS[recipe][1]:
        seconds, mebibytes = frameworks.read_line(printed, way)
        assert 0 < seconds < 60
        assert mebibytes is None or 0 < mebibytes < 1000

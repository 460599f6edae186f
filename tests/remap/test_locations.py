"""Location tags: information about where a checkpoint comes from, never a trap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device_files import TAGS, write_tagged
from small_models import Holder, on_meta, tensors_of
from zoo import same

import torchlift
from torchlift import remap
from torchlift.formats.summary import to_json


def blank(path: Path) -> Holder:
    """A model on meta with the tensors of a file."""
    with torchlift.open(path) as ckpt:
        return on_meta({key: torch.empty(entry.shape) for key, entry in ckpt.entries.items()})


def destinations(path: Path, rule: Any) -> dict[str, str]:
    """Key -> the device that a plan gives it, on a machine that has them all."""
    with torchlift.open(path) as ckpt:
        made = torchlift.plan(blank(path), ckpt, device=rule, present=False)
    return {key: report.device for key, report in made.loaded.items()}


@pytest.fixture
def everywhere(tmp_path: Path) -> Path:
    """A file with tensors from every kind of backend."""
    return write_tagged(tmp_path / "tagged.pt", *TAGS)


def test_tags_of_every_backend_are_listed_and_counted(everywhere) -> None:
    """In the entries, in what is printed, and in the JSON of inspect."""
    ckpt = torchlift.open(everywhere)
    assert [entry.location for entry in ckpt.entries.values()] == list(TAGS)
    assert to_json(ckpt._index)["locations"] == Counter(TAGS)
    text = str(ckpt)
    assert all(f"{tag} (1)" in text for tag in TAGS[:10])


@pytest.mark.parametrize("options", [{}, {"source": "read"}, {"dtype": torch.bfloat16}])
def test_a_file_from_anywhere_loads_on_a_cpu_without_an_argument(everywhere, options) -> None:
    """And without a warning, which would be an error here."""
    model = blank(everywhere)
    torchlift.load(model, everywhere, **options)
    for i, tensor in enumerate(tensors_of(model).values()):
        assert tensor.device.type == "cpu"
        assert tensor.tolist() == [i] * 4


def test_the_most_specific_tag_wins(everywhere) -> None:
    """A kind without a number is about all of that kind; without an entry the default applies."""
    rule = remap.by_location({"cuda:1": "cuda:0", "cuda": "xpu:1", "npu": "cuda:3", "hpu:0": 4})
    found = dict(zip(TAGS, destinations(everywhere, rule).values(), strict=True))
    assert found["cuda:1"] == "cuda:0"
    assert found["cuda:0"] == found["cuda:7"] == "xpu:1"
    assert found["npu:3"] == "cuda:3"
    assert found["hpu"] == found["mps"] == found["meta"] == found["somebodys_chip:2"] == "cpu"
    rest = destinations(everywhere, remap.by_location({"cuda": "cpu", "": "cuda:0"})).values()
    assert all(
        (device == "cpu") == t.startswith("cuda") for t, device in zip(TAGS, rest, strict=True)
    )


def test_a_tag_that_the_file_lacks_is_no_mistake(tmp_path) -> None:
    """One map serves the files of many machines."""
    path = write_tagged(tmp_path / "one.pt", "cuda:0")
    torchlift.load(blank(path), path, device=remap.by_location({"cuda": "cpu", "npu:7": "cpu"}))


# ---- map_location in all its forms, and how the same is written here

Load = Callable[[Path], dict[str, torch.Tensor]]


def into_model(device: Any = None) -> Load:
    """Load into a blank model and give its tensors."""

    def load(path: Path) -> dict[str, torch.Tensor]:
        model = blank(path)
        torchlift.load(model, path, device=device)
        return tensors_of(model)

    return load


def stays(storage: torch.UntypedStorage, tag: str) -> torch.UntypedStorage:
    """The classic: every storage stays on the CPU, where it is read."""
    return storage


#: Form -> (tags in the file, map_location, the same with torchlift).
EQUIVALENTS: dict[str, tuple[tuple[str, ...], Any, Load]] = {
    "None": (("cpu", "cpu"), None, into_model()),
    "a string": (("cuda:0", "cpu"), "cpu", into_model()),
    "a dict": (
        ("cuda:0", "cuda:1", "cpu"),
        {"cuda:0": "cpu", "cuda:1": "cpu"},
        into_model(remap.by_location({"cuda:0": "cpu", "cuda:1": "cpu"})),
    ),
    "a callable": (("cuda:0", "mps", "cpu"), stays, into_model()),
    "a callable that looks at the tag": (
        ("cuda:0", "cpu"),
        lambda storage, tag: storage if tag.startswith("cuda") else None,
        into_model(lambda entry: "cpu" if entry.location.startswith("cuda") else None),
    ),
    "a plain dict of tensors": (
        ("cuda:0", "npu:1"), "cpu", lambda path: torchlift.open(path).state_dict(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", EQUIVALENTS)
def test_every_form_of_map_location_has_an_equivalent(tmp_path, form) -> None:
    """torch's own result is the reference: devices, dtypes and values."""
    tags, map_location, load = EQUIVALENTS[form]
    path = write_tagged(tmp_path / "model.pt", *tags)
    expected = torch.load(path, map_location=map_location)
    found = load(path)
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        assert found[key].device == tensor.device, key
        assert same(found[key], tensor), key

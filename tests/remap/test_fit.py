"""`remap.fit`: modules into budgets, without a device, and the error when they do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_files import write_safetensors
from device_files import used
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import Tied, saved
from torch import nn

import torchlift
from torchlift import remap
from torchlift._model.slots import collect
from torchlift.errors import PlacementError

KIB = 1024


class Block(nn.Module):
    """8 KiB: a parameter of its own and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(KIB // 4))
        self.up = nn.Linear(32, 32, bias=False)
        self.down = nn.Linear(32, 24, bias=False)


class Model(nn.Module):
    """4 KiB of embedding, four blocks, a head; the head may be the embedding."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(32, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_devices_are_filled_in_the_order_of_execution() -> None:
    """The map has the shortest prefixes, its numbers are those of the tensors."""
    model = torchlift.skeleton(Model)
    found = remap.fit(model, {"cuda:0": "21KiB", "cuda:1": 20 * KIB})
    assert found == {
        "embed": "cuda:0", "blocks.0": "cuda:0", "blocks.1": "cuda:0",
        "blocks.2": "cuda:1", "blocks.3": "cuda:1", "head": "cuda:1",
    }  # fmt: skip
    assert found.used == used(model, found) == {"cuda:0": 20 * KIB, "cuda:1": 20 * KIB}
    assert found.budgets == {"cuda:0": 21 * KIB, "cuda:1": 20 * KIB}
    assert "embed, blocks.0 to blocks.1" in str(found)


def test_ties_stay_together_and_are_counted_once() -> None:
    """A head that is the embedding takes no room, and goes where that goes."""
    found = remap.fit(Model(tied=True), {"cuda:0": "20KiB", "cuda:1": "16KiB"})
    assert found.at("head.weight") == "cuda:0"
    assert found.nbytes == 36 * KIB
    assert used(Model(tied=True), found) == {"cuda:0": 20 * KIB, "cuda:1": 16 * KIB}


def test_sizes_are_those_after_casting() -> None:
    """By the same rule that load gets; integers keep their size."""
    model = nn.BatchNorm1d(100)
    dtype = remap.by_key({"": torch.bfloat16, "weight": torch.float64})
    assert remap.fit(model, {"cpu": "1MiB"}, dtype=dtype).nbytes == 800 + 3 * 200 + 8


def test_blocks_stay_whole() -> None:
    """Members of numbered lists do so unasked, unless they are larger than every budget."""
    whole = remap.fit(Model(), {"cuda:0": "18KiB", "cuda:1": "1MiB"})
    assert whole.used["cuda:0"] == 12 * KIB
    split = remap.fit(Model(), {f"cuda:{n}": 7 * KIB for n in range(8)})
    assert split["blocks.1.up"] != split["blocks.1.down"]


@pytest.mark.parametrize("no_split", [[Block], ["Block"], "Block", ["blocks.*"], [nn.ModuleList]])
def test_what_must_not_be_split_is_not(no_split) -> None:
    """By class, by its name, or by path; a class means its subclasses too."""
    with pytest.raises(PlacementError, match=r"does not fit"):
        remap.fit(Model(), {"cuda:0": "18KiB", "cuda:1": "23KiB"}, no_split)
    found = remap.fit(Model(), {"cuda:0": "18KiB", "cuda:1": "1MiB"}, no_split)
    assert all(len({found.at(f"blocks.{i}.{n}") for n in ("up", "down")}) == 1 for i in range(4))


def test_a_module_s_own_tensors_are_never_separated() -> None:
    """It could not run."""
    with pytest.raises(PlacementError, match="does not fit"):
        remap.fit(nn.Linear(32, 32), {"cuda:0": "4KiB", "cuda:1": "4KiB"})


def test_room_is_left_for_the_largest_layer_that_is_kept_elsewhere() -> None:
    """On the first accelerator, which runs it; none where nothing is kept elsewhere."""
    found = remap.fit(Model(), {"cuda:0": "24KiB", "cpu": "1MiB"})
    assert (found.main, found.reserved) == ("cuda:0", {"cuda:0": 8 * KIB})
    assert found.used["cuda:0"] + 8 * KIB <= 24 * KIB
    assert remap.fit(Model(), {"cuda:0": "1MiB", "cpu": "1MiB"}).reserved == {}


def test_without_room_for_the_largest_layer_the_host_runs_what_it_keeps() -> None:
    """The devices are filled completely, and no accelerator is the main device."""
    found = remap.fit(Model(), {"cuda:0": "7KiB", "cpu": "40KiB"})
    assert (found.main, found.reserved) == (None, {})
    assert found.used == {"cuda:0": 4 * KIB, "cpu": 36 * KIB}


def test_disk_takes_what_fits_nowhere() -> None:
    """None is any number of bytes."""
    found = remap.fit(Model(), {"cuda:0": "20KiB", "cpu": "17KiB", "disk": None})
    assert found.used == {"cuda:0": 12 * KIB, "cpu": 16 * KIB, "disk": 12 * KIB}
    assert found["head"] == "disk"
    assert "disk: 12.0 KiB\n" in str(found)


@pytest.mark.parametrize(
    ("budgets", "no_split", "message"),
    [
        ({"cudaa": 1}, (), "'cudaa': the value for it is not a device.*'cuda'"),
        ({"cpu": "1MiB"}, ["Blok"], "'Blok': no_split .* Did you mean 'Block'"),
    ],
)
def test_a_budget_or_class_that_means_nothing_is_refused(budgets, no_split, message) -> None:
    """With the nearest name."""
    with pytest.raises(PlacementError, match=message):
        remap.fit(Model(), budgets, no_split)


@pytest.mark.parametrize("budgets", [{"cpu": "much"}, {"cpu": -1}, {"cpu": True}, {}])
def test_a_size_that_is_none_is_refused(budgets) -> None:
    """Before anything is computed."""
    with pytest.raises(ValueError, match="size"):
        remap.fit(Model(), budgets)


# ---- checkpoints


@pytest.mark.parametrize("root", [None, "net"])
def test_a_checkpoint_is_fitted_as_the_model_is(tmp_path: Path, root) -> None:
    """The tie is found in the file; a path does as well as an open checkpoint."""
    model = Model(tied=True)
    path = saved({root: model.state_dict()} if root else model.state_dict(), tmp_path)
    budgets = {"cuda:0": "20KiB", "cuda:1": "16KiB"}
    with torchlift.open(path, root=root) as ckpt:
        assert remap.fit(ckpt, budgets) == remap.fit(model, budgets)
    if root is None:
        assert remap.fit(path, budgets) == remap.fit(model, budgets)


def test_a_file_whose_weights_are_in_a_container_is_fitted_below_it(tmp_path: Path) -> None:
    """The opened checkpoint has the names of the model. A map of the complete file is refused."""
    path = tmp_path / "job.pt"
    torch.save({"net": Model().state_dict(), "epoch": 1}, path)
    budgets = {"cpu": "21KiB", "disk": None}
    with torchlift.open(path, root="net") as ckpt:
        found = remap.fit(ckpt, budgets)
    assert found == remap.fit(torchlift.skeleton(Model), budgets)
    report = torchlift.load(torchlift.skeleton(Model), path, root="net", device=found)
    assert len(report.loaded) == 14
    with pytest.raises(PlacementError, match=r"'net\.embed': .* Did you mean 'embed'"):
        torchlift.load(Model(), path, root="net", device=remap.fit(path, budgets))
    with pytest.raises(PlacementError, match="The top-level names are"):
        torchlift.load(Model(), path, root="net", device=remap.by_key({"qqq.x": "cpu"}))
    with pytest.raises(ValueError, match="rename= applies to a checkpoint"):
        remap.fit(Model(), budgets, rename=remap.strip("net"))


def test_numbered_lists_in_a_file_are_taken_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Alphabetical order, which safetensors files have, puts layer 10 before layer 2."""
    names = sorted(f"layers.{i}.w" for i in range(12))
    header = {
        name: {"dtype": "F32", "shape": [4], "data_offsets": [16 * i, 16 * i + 16]}
        for i, name in enumerate(names)
    }
    path = write_safetensors(tmp_path / "m.safetensors", header, bytes(16 * 12))
    found = remap.fit(path, {"cuda:0": 64, "cuda:1": 128})
    assert [name for name, device in found.items() if device == "cuda:0"] == [
        f"layers.{i}" for i in range(4)
    ]


def test_a_checkpoint_s_map_can_have_the_model_s_names(tmp_path: Path) -> None:
    """By the rename that load gets, so that the map is a device= for it."""
    path = saved({f"module.{k}": v for k, v in Tied().state_dict().items()}, tmp_path)
    rename = remap.strip("module.")
    found = remap.fit(path, {"cpu": "1MiB"}, rename=rename, dtype=torch.float16)
    assert found.nbytes == 5 * 3 * 2
    model = torchlift.skeleton(Tied)
    torchlift.load(model, path, rename=rename, device=found)
    assert model.head.weight is model.embed.weight


# ---- any modules, any budgets


@st.composite
def modules(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    """A tree of modules with tensors of their own, ties, and numbered lists."""
    module = nn.Module()
    for name in draw(st.lists(st.sampled_from(["a", "b"]), unique=True)):
        tensor = torch.empty(draw(st.integers(1, 40)), device="meta")
        module.register_parameter(name, nn.Parameter(tensor))
    if depth:
        count = draw(st.integers(0, 3))
        children = [draw(modules(depth=depth - 1)) for _ in range(count)]
        names = [str(i) for i in range(count)] if draw(st.booleans()) else ["x", "y", "z"]
        for name, child in zip(names, children, strict=False):
            module.add_module(name, child)
        weights = [p for child in children for p in child.parameters()]
        if len(weights) > 1 and draw(st.booleans()):
            module.register_parameter("tie", draw(st.sampled_from(weights)))
    return module


budgets = st.dictionaries(
    st.sampled_from(["cuda:0", "cuda:1", "xpu:0", "cpu", "disk"]),
    st.one_of(st.integers(0, 2000), st.none()),
    min_size=1,
)


@settings(max_examples=200, deadline=None)
@given(modules(), budgets, st.sampled_from([(), ("*",), ("x.*", "0.*")]))
def test_no_device_gets_more_than_its_budget(module, budgets, no_split) -> None:
    """Or the error says that it does not fit, and with everything on one device it would not."""
    try:
        found = remap.fit(module, budgets, no_split)
    except PlacementError as error:
        if "no_split matches no" in str(error):
            return
        total = sum(group.tensor.nbytes for group in collect(module))
        assert all(size is not None and size < total for size in budgets.values())
        return
    assert {d: n for d, n in found.used.items() if n} == used(module, found)
    for device, size in budgets.items():
        assert size is None or found.used[device] + found.reserved.get(device, 0) <= size
    away = [device for device in ("cpu", "disk") if found.used.get(device)]
    if away and found.main:
        assert found.reserved[found.main] > 0

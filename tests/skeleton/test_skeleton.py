"""Skeletons: what building one costs, what `materialize` makes, and what a load leaves behind."""

from __future__ import annotations

import copy
import pickle
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from constructions import FACTORIES
from in_code import in_code
from interrupting import Step
from same_model import all_tensors, assert_same_tensors, scrambled
from torch import nn
from zoo import same

import torchlift
from torchlift._model.commit import CONSTRUCTION
from torchlift._model.slots import ModuleTree

MIB = 2**20
MODES = ("assign", "copy", "swap", "auto")
SOURCES = ("mmap", "read")
old_ways = pytest.mark.filterwarnings("ignore:.*(weight_norm|spectral_norm).*:FutureWarning")


class Rotary(nn.Module):
    """A random layer, a table that no checkpoint holds, and a head."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(8.0) / 3, persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.head = nn.Linear(4, classes)


def pair() -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def saved(model: nn.Module, folder: Path, without: tuple[str, ...] = ()) -> Path:
    """The model's state dict in a file, some names left out."""
    state = {k: v for k, v in model.state_dict().items() if not k.startswith(without or ("\0",))}
    torch.save(state, folder / "model.pt")
    return folder / "model.pt"


# -- what can be built ------------------------------------------------------------------------


def test_what_is_no_factory_is_refused_with_the_way_to_write_it() -> None:
    """A module that exists has been built already. The error says what a function returned."""
    for given, message in (
        (nn.Linear(2, 2), r"skeleton\(Model, config\) instead of skeleton\(Model"),
        (3, "a class or a function that makes a module, not <class"),
        (dict, "dict.* returned dict, not a module"),
    ):
        with pytest.raises(TypeError, match=message):
            torchlift.skeleton(given)  # type: ignore[arg-type]


def test_a_skeleton_in_a_constructor_is_part_of_the_outer_one() -> None:
    """Nested skeletons are made with the outer one, whether they were made inside or not."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torchlift.skeleton(nn.Linear, 2, 3)
            self.done = torchlift.skeleton(nn.Linear, 2, 3)
            torchlift.materialize(self.done)

    model = torchlift.skeleton(Outer)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    torchlift.materialize(model)
    assert ModuleTree(model).on_meta == []
    assert model.done.weight.abs().max() < 1


def by_hand() -> nn.Module:
    """A model that its author builds on meta, to spare memory."""
    with torch.device("meta"):
        return pair()


def test_tensors_that_the_constructor_leaves_on_meta_are_loaded_or_refused() -> None:
    """The built model would not have a value for them either."""
    model = torchlift.skeleton(by_hand)
    with pytest.raises(torchlift.PlacementError, match="itself makes it on meta") as caught:
        torchlift.materialize(model)
    assert caught.value.entry == "0.weight"
    wanted = pair()
    torchlift.load(model, wanted.state_dict())
    assert_same_tensors(model, wanted)


# -- copies -----------------------------------------------------------------------------------


def test_a_deep_copy_is_made_like_the_original_and_shares_nothing_with_it() -> None:
    """A teacher copied from a student before either is loaded has its own memory."""
    student = torchlift.skeleton(Rotary)
    both = nn.ModuleDict({"student": student, "teacher": copy.deepcopy(student)})
    torchlift.materialize(both)
    for name, tensor in all_tensors(both["student"]).items():
        twin = all_tensors(both["teacher"])[name]
        assert tensor.data_ptr() != twin.data_ptr()
        assert twin.shape == tensor.shape
    assert same(both["teacher"].table, Rotary().table)
    with torch.no_grad():
        both["student"].body.weight.zero_()
    assert both["teacher"].body.weight.abs().max() > 0


def test_a_pickled_skeleton_is_a_plain_module_on_meta(tmp_path: Path) -> None:
    """The calls of a constructor are not written to files; a checkpoint fills the module."""
    wanted = scrambled(pair())
    model = pickle.loads(pickle.dumps(torchlift.skeleton(pair)))
    with pytest.raises(torchlift.PlacementError, match="4 tensors are on meta"):
        torchlift.materialize(model)
    torchlift.load(model, saved(wanted, tmp_path))
    assert_same_tensors(model, wanted)


# -- materialize ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "made"),
    [
        (["0.weight"], ["0.weight"]),
        (["1"], ["1.weight", "1.bias"]),
        ("1", ["1.weight", "1.bias"]),
        (["1.bias", "0.bias"], ["0.bias", "1.bias"]),
        (["0", "0.weight"], ["0.weight", "0.bias"]),
        ([""], ["0.weight", "0.bias", "1.weight", "1.bias"]),
        (None, ["0.weight", "0.bias", "1.weight", "1.bias"]),
        ([], []),
    ],
)
def test_names_are_of_tensors_or_of_submodules(names: Any, made: list[str]) -> None:
    """Exactly what is named is made, in the order of the state dict; the rest stays on meta."""
    model = torchlift.skeleton(pair)
    assert torchlift.materialize(model, names=names) == made
    assert {name for name, t in all_tensors(model).items() if not t.is_meta} == set(made)


@pytest.mark.parametrize(
    ("wrong", "near"), [("0.weigth", "'0.weight'"), ("hed", "'head'"), ("0weight", "'0.weight'")]
)
def test_an_unknown_name_is_an_error_that_offers_near_ones(wrong: str, near: str) -> None:
    """Nothing has been made then, not even what was named rightly."""
    model = torchlift.skeleton(lambda: nn.Sequential(pair()[0]).append(Rotary()))
    model.head = model[1].head
    with pytest.raises(torchlift.PlacementError) as caught:
        torchlift.materialize(model, names=["0.bias", wrong])
    assert str(caught.value).startswith(f"{wrong!r}: the module does not have a tensor or")
    assert f"Did you mean {near}" in str(caught.value)
    assert all(tensor.is_meta for tensor in model.state_dict().values())


@pytest.mark.parametrize("device", ["meta", "nonsense"])
def test_a_device_without_memory_is_refused(device: str) -> None:
    """Nothing is called made that is not."""
    model = torchlift.skeleton(pair)
    with pytest.raises(torchlift.PlacementError, match="cannot be moved to the selected device"):
        torchlift.materialize(model, device=device)
    assert len(ModuleTree(model).on_meta) == 4


def test_parameters_keep_their_identity_and_an_optimizer_keeps_its_hold() -> None:
    """Making a skeleton puts content into the objects that are there."""
    model = torchlift.skeleton(pair)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = {name: id(tensor) for name, tensor in all_tensors(model).items()}
    torchlift.materialize(model)
    assert {name: id(tensor) for name, tensor in all_tensors(model).items()} == before
    weight = model[1].weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(model[1].weight, weight)


# -- load -------------------------------------------------------------------------------------


@old_ways
@pytest.mark.parametrize("name", list(FACTORIES))
def test_a_loaded_skeleton_is_the_model_that_was_saved(name: str, tmp_path: Path) -> None:
    """Whatever the constructor does, in every mode, from every source."""
    torch.manual_seed(0)
    wanted = scrambled(FACTORIES[name]())
    path = saved(wanted, tmp_path)
    hidden = set(all_tensors(wanted)) - set(wanted.state_dict())
    for mode, source in product(MODES, SOURCES):
        model = torchlift.skeleton(FACTORIES[name])
        torch.manual_seed(0)
        report = torchlift.load(model, path, mode=mode, source=source)
        assert set(report.loaded) == set(wanted.state_dict())
        assert hidden & dict(wanted.named_buffers()).keys() <= set(report.replayed)
        found = model.state_dict()
        for key, tensor in wanted.state_dict().items():
            assert same(found[key], tensor), key
            assert found[key].stride() == tensor.stride(), key
        assert ModuleTree(model).on_meta == []


def test_missing_keys_are_replayed_as_the_constructor_would_have_made_them(tmp_path: Path) -> None:
    """A new head starts with its own initialisation; the report says so."""
    path = saved(Rotary(), tmp_path, without=("head.", "body.bias"))
    model = torchlift.skeleton(Rotary)
    torch.manual_seed(3)
    report = torchlift.load(model, path, allow_missing=["head.*", "body.bias"])
    assert report.missing_keys == ["body.bias", "head.weight", "head.bias"]
    assert sorted(report.replayed) == ["body.bias", "head.bias", "head.weight", "table"]
    other = torchlift.skeleton(Rotary)
    torch.manual_seed(3)
    torchlift.materialize(other, names=["body.bias", "head", "table"])
    assert same(model.head.weight, other.head.weight)
    assert same(model.body.bias, other.body.bias)
    assert model.head.weight.abs().max() <= 0.5  # uniform within 1 / sqrt(4)
    assert model.head.weight.unique().numel() == 12
    assert ModuleTree(model).on_meta == []
    assert "replayed (4)" in str(report)


def test_one_submodule_of_a_skeleton_can_be_loaded_alone(tmp_path: Path) -> None:
    """The rest stays a skeleton that can be made later."""
    wanted = scrambled(nn.Linear(3, 2))
    path = saved(wanted, tmp_path)
    model = torchlift.skeleton(pair)
    torchlift.load(model[1], path)
    assert_same_tensors(model[1], wanted)
    assert torchlift.materialize(model) == ["0.weight", "0.bias"]


# -- what constructors and callers do -----------------------------------------------------------


class Tuned(nn.Module):
    """Changes the module that it gets, as libraries for adapters do."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        base.fc = nn.Linear(2, 3)
        self.base, self.extra = base, nn.Linear(2, 2)


def test_a_factory_that_changes_a_live_module_runs_once() -> None:
    """Its tensors are real, and a load fills those of the model."""
    base = nn.ModuleDict({"fc": nn.Linear(2, 2)})
    model: Any = torchlift.skeleton(Tuned, base)
    saved = {name: torch.ones_like(one) for name, one in model.state_dict().items()}
    del saved["extra.bias"]
    torchlift.load(model, saved, strict=False, allow_missing=["extra.bias"])
    assert model.base is base
    assert base.fc.weight.eq(1).all()
    assert not model.extra.bias.is_meta


@pytest.mark.parametrize("own", [False, True])
def test_random_buffers_of_a_seed_are_those_of_the_built_model(own: bool) -> None:
    """No file has them, and the trained weights belong to them."""

    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            drawn = torch.Generator() if own else torch.default_generator
            torch.Generator.manual_seed(drawn, 7) if own else torch.manual_seed(7)
            self.layer = nn.Linear(3, 3)
            nn.init.normal_(self.layer.weight, generator=drawn if own else None)
            self.register_buffer("seen", torch.randn(3, generator=drawn), persistent=False)

    torch.manual_seed(1)
    model: Any = torchlift.skeleton(Projected)
    assert torch.equal(model.seen, Projected().seen)
    assert model.layer.weight.is_meta


def test_a_buffer_that_belongs_to_a_parameter_is_of_the_same_run() -> None:
    """A parameter that the file lacks is drawn again, and what was computed with it."""

    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            drawn = torch.randn(4)
            self.weight, self.head = nn.Parameter(drawn), nn.Linear(2, 2)
            self.register_buffer("twice", 2 * drawn, persistent=False)

    for way in "load", "materialize":
        model: Any = torchlift.skeleton(Doubles)
        if way == "load":
            saved = {f"head.{name}": one for name, one in nn.Linear(2, 2).state_dict().items()}
            torchlift.load(model, saved, allow_missing=["weight"])
        else:
            torchlift.materialize(model)
        assert torch.equal(model.twice, 2 * model.weight.detach())


# -- what it costs ----------------------------------------------------------------------------


@pytest.mark.slow
def test_materialize_needs_the_memory_of_what_it_makes() -> None:
    """Parameters that are not needed are gone before their pages are touched."""
    setup = """
import torch, torchlift
from torch import nn
torchlift.materialize(torchlift.skeleton(nn.Linear, 3, 3))
model = torchlift.skeleton(lambda: nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))))
"""
    part = 64
    code = "torchlift.materialize(model, names=args or None)"
    everything = in_code(code, setup=setup).memory.added_anonymous / MIB
    assert 8 * part <= everything < 8 * part + 8
    alone = in_code(code, "3", setup=setup).memory.added_anonymous / MIB
    assert part <= alone < part + 8


@pytest.mark.slow
def test_seventy_gigabytes_of_layers_are_built_under_a_limit_of_two() -> None:
    """Each parameter is on meta before the next one is made, also beside large buffers."""
    code = """
import resource
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16384, 16384)
        self.register_buffer("codes", torch.empty(256 << 20, dtype=torch.uint8))
now = int(next(line for line in open("/proc/self/status") if "VmData" in line).split()[1])
resource.setrlimit(resource.RLIMIT_DATA, (now * 1024 + (2 << 30), resource.RLIM_INFINITY))
model = torchlift.skeleton(lambda: nn.Sequential(*(Layer() for _ in range(64))))
result = sum(tensor.nbytes for tensor in model.state_dict().values())
"""
    child = in_code(code, setup="import torch, torchlift\nfrom torch import nn")
    assert child.value > 70 << 30
    assert child.memory.added_anonymous < 64 * MIB


@pytest.mark.parametrize("nth", range(1, 2000, 67))
def test_an_interrupt_leaves_all_of_a_skeleton_made_or_nothing(nth: int) -> None:
    """What is on meta can still be made, and what was made is no part of a skeleton any more."""
    model = torchlift.skeleton(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    files = "_model/commit.py", "_skeleton/construction.py"
    step = Step(nth, files, raw=False)
    met = step.run(lambda: torchlift.materialize(model))
    assert met is (step.count >= nth)
    on_meta = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    assert on_meta in ([], list(model.state_dict())), step.at
    remember = [CONSTRUCTION in vars(module) for module in model]
    assert remember == [bool(on_meta)] * 2, step.at
    assert torchlift.materialize(model) == on_meta


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("way", ["load", "materialize"])
def test_buffers_that_to_empty_has_emptied_get_their_values(way: str, half: bool) -> None:
    """torch's way to give a model on meta its memory leaves noise in what no file contains."""
    model: Any = torchlift.skeleton(Rotary)
    model = (model.half() if half else model).to_empty(device="cpu")
    model.table.data.fill_(torch.nan)  # noise is not a write that torch counts
    model.count.data.fill_(9)
    if way == "load":
        report = torchlift.load(model, Rotary().state_dict())
        assert report.replayed == ["table"]
    else:
        assert torchlift.materialize(model) == ["table", "count"]
    assert torch.equal(model.table, Rotary().table.to(model.table.dtype))


def test_what_is_made_already_is_left_alone() -> None:
    """Making a model twice is making it once; live values survive."""
    model = torchlift.skeleton(pair)
    assert torchlift.materialize(model, names=["0"]) == ["0.weight", "0.bias"]
    with torch.no_grad():
        model[0].weight.fill_(7)
    assert torchlift.materialize(model, names=["0"]) == []
    assert torchlift.materialize(model) == ["1.weight", "1.bias"]
    assert torchlift.materialize(model) == []
    assert (model[0].weight == 7).all()


def test_modules_from_several_skeletons_are_made_in_one_go() -> None:
    """Each tensor is made by the skeleton that recorded it; live ones are left alone."""
    live = nn.Linear(2, 2)
    model = nn.Sequential(torchlift.skeleton(nn.Linear, 2, 3), pair(), live)
    model[1] = torchlift.skeleton(pair)
    assert "0.weight" in torchlift.materialize(model)
    assert ModuleTree(model).on_meta == []
    assert model[2] is live


def test_values_that_torch_has_loaded_stay() -> None:
    """``assign=True`` puts tensors into a skeleton, and so may anybody."""
    trained = nn.BatchNorm1d(3)
    trained.running_mean.fill_(5)
    for way in torchlift.materialize, lambda m: torchlift.load(m, trained.state_dict()):
        model = torchlift.skeleton(nn.BatchNorm1d, 3)
        model.load_state_dict(trained.state_dict(), assign=True)
        way(model)
        assert model.running_mean.eq(5).all()


def test_a_buffer_that_the_caller_has_replaced_stays() -> None:
    """Other tables are put into a skeleton on purpose."""
    for way in "cast", "load":
        model: Any = torchlift.skeleton(Rotary)
        model.table = torch.full_like(model.table, 7)
        if way == "cast":
            model.half()
        torchlift.load(model, Rotary().state_dict())
        assert model.table.eq(7).all()


def test_parameters_that_share_memory_share_it_when_they_are_made() -> None:
    """Two parameters over one memory are two objects, as heads of old models are."""

    def old_head() -> nn.Module:
        model = nn.ModuleDict({"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)})
        model["two"].weight.data = model["one"].weight.data
        return model

    model: Any = torchlift.skeleton(old_head)
    assert torchlift.materialize(model, names="two.weight") == ["two.weight"]
    model = torchlift.skeleton(old_head)
    torchlift.materialize(model)
    assert model["one"].weight is not model["two"].weight
    assert model["one"].weight.data_ptr() == model["two"].weight.data_ptr()

"""Loading code of a model, run by torch's `load_state_dict`: each model ends as in torch."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlift

LOCAL, LOCK = threading.local(), threading.RLock()
STATE = dict[str, Any]


class ReadsItsThread(nn.Linear):
    """Scales by a number that the caller has set for this thread."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        scale = getattr(LOCAL, "scale", 1.0)
        scaled = {key: value * scale for key, value in state_dict.items()}
        return super().load_state_dict(scaled, strict)


class Computes(nn.Linear):
    """Multiplies matrices, which autocast changes."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        weight = state_dict["weight"]
        return super().load_state_dict({**state_dict, "weight": (weight @ weight).float()}, strict)


class TakesALock(nn.Linear):
    """Takes a lock that the caller has."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        with LOCK:
            return super().load_state_dict(state_dict, strict)


class DropsMetadata(nn.Module):
    """Passes a plain dict on, so that hooks hear of no version."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.seen = nn.BatchNorm1d(2), []
        self.norm.register_load_state_dict_pre_hook(
            lambda m, s, p, metadata, *_: self.seen.append(metadata.get("version"))
        )

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        return super().load_state_dict(dict(state_dict), strict)


class Assigns(nn.Linear):
    """Lets torch assign."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        return super().load_state_dict(state_dict, strict=strict, assign=True)


class OnlyInner(nn.Module):
    """Calls the method of a child, so that its own hooks do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.calls = nn.Linear(2, 2), 0
        self.register_load_state_dict_pre_hook(self.count)

    def count(self, *_: Any) -> None:
        self.calls += 1

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        inner = {key.removeprefix("module."): value for key, value in state_dict.items()}
        return self.module.load_state_dict(inner, strict)


class Aliases(nn.Module):
    """Gives one tensor two names, and writes to the first one afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        state = dict(state_dict)
        state["b"] = state["a"]
        found = super().load_state_dict(state, strict)
        with torch.no_grad():
            self.a.mul_(2)
        return found


class FillsAHead(nn.Module):
    """A pre-hook drops the keys of a head, which a hook after the load fills."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 3)
        self.register_load_state_dict_pre_hook(self.drop)
        self.register_load_state_dict_post_hook(self.fill)

    @staticmethod
    def drop(module: Any, state: STATE, prefix: str, *_: Any) -> None:
        for key in [key for key in state if key.startswith(prefix + "head.")]:
            del state[key]

    @staticmethod
    def fill(module: Any, keys: Any) -> None:
        keys.missing_keys[:] = [name for name in keys.missing_keys if "head" not in name]
        with torch.no_grad():
            module.head.weight.fill_(3)
            module.head.bias.zero_()


class ClearsItsOwn(nn.Module):
    """A hook of a child clears all names that are missing by then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.first.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.clear())


class ShapesItself(nn.Module):
    """Gets its shape in a pre-hook, as the lazy `Linear` of PyTorch Geometric does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.parameter.UninitializedParameter()
        self.register_load_state_dict_pre_hook(self.shape_it)

    def shape_it(self, module: Any, state: STATE, prefix: str, *_: Any) -> None:
        if nn.parameter.is_lazy(self.weight):
            self.channels = state[prefix + "weight"].size(-1)
            self.weight.materialize((3, self.channels))


@contextmanager
def setting() -> Iterator[None]:
    """What a caller may have set, which code of a model must find."""
    LOCAL.scale = 3.0
    with LOCK, torch.autocast("cpu", dtype=torch.bfloat16):
        yield
    del LOCAL.scale


MODELS: dict[str, tuple[Callable[[], nn.Module], STATE]] = {
    kind.__name__: (
        lambda kind=kind: kind(2, 2),
        {"weight": torch.rand(2, 2), "bias": torch.ones(2)},
    )  # type: ignore[misc]
    for kind in (ReadsItsThread, Computes, TakesALock, Assigns)
} | {
    "DropsMetadata": (DropsMetadata, DropsMetadata().state_dict()),
    "OnlyInner": (OnlyInner, OnlyInner().state_dict()),
    "Aliases": (Aliases, {"a": torch.ones(2), "b": torch.zeros(2)}),
    "FillsAHead": (FillsAHead, FillsAHead().state_dict()),
    "ClearsItsOwn": (ClearsItsOwn, ClearsItsOwn().state_dict()),
    "ShapesItself": (ShapesItself, {"weight": torch.rand(3, 5)}),
}


def look(model: nn.Module) -> list[Any]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    facts = {
        key: value for key, value in vars(model).items() if key in ("seen", "calls", "channels")
    }
    return [(name, tensor.dtype, tensor.tolist()) for name, tensor in tensors] + [facts]


@pytest.mark.parametrize("door", ["file", "memory"])
@pytest.mark.parametrize("live", [True, False], ids=["live", "skeleton"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_ends_as_in_torch(kind: str, live: bool, door: str, tmp_path: Path) -> None:
    """Its code runs in the thread of the caller, with everything that the caller has set."""
    make, state = MODELS[kind]
    given: Any = copy.deepcopy(state)
    if door == "file":
        torch.save(state, given := tmp_path / "model.pt")
    right, model = make(), make() if live else torchlift.skeleton(make)
    with setting():
        right.load_state_dict(copy.deepcopy(state))
        if kind == "FillsAHead" and not live:
            with pytest.raises(torchlift.PlacementError, match=r"head\.weight"):
                torchlift.load(model, given)
            torchlift.materialize(model, names="head")
        torchlift.load(model, given)
    assert look(model) == look(right)


@pytest.mark.parametrize("live", [True, False], ids=["live", "skeleton"])
def test_a_hook_that_clears_names_excuses_those_that_are_missing_by_then(live: bool) -> None:
    """Names of a later module are missing, as in torch."""
    make = ClearsItsOwn
    model = make() if live else torchlift.skeleton(make)
    with pytest.raises(torchlift.MismatchError, match=r"missing \(1\): second\.bias"):
        torchlift.load(model, {"first.weight": torch.ones(2, 2), "second.weight": torch.ones(2, 2)})
    state = {"first.weight": torch.ones(2, 2), **make().second.state_dict(prefix="second.")}
    report = torchlift.load(model, state)
    assert report.missing_keys == []
    assert model.first.weight.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("way", ["inference mode", "swap flag", "neither"])
@pytest.mark.parametrize(
    "kind", ["FillsAHead", "Aliases", "ReadsItsThread", "DropsMetadata", "ClearsItsOwn"]
)
@pytest.mark.parametrize("live", [True, False], ids=["live", "skeleton"])
def test_a_partial_load_ends_as_in_torch(way: str, kind: str, live: bool) -> None:
    """Also of a skeleton that was made in inference mode, or while torch swaps on conversion."""
    make, state = MODELS[kind]
    state = dict(state)
    state.pop(gone := next(reversed(state)))
    before = torch.__future__.get_swap_module_params_on_conversion()
    context: Any = torch.inference_mode() if way == "inference mode" else nullcontext()
    try:
        torch.__future__.set_swap_module_params_on_conversion(way == "swap flag")
        with context:
            model = make() if live else torchlift.skeleton(make)
            if not live and kind == "FillsAHead":
                torchlift.materialize(model, names="head")
            report = torchlift.load(model, state, strict=False, allow_missing=["*"])
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    (right := make()).load_state_dict(copy.deepcopy(state), strict=False)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    found, expected = model.state_dict(), right.state_dict()
    assert all(found[name].tolist() == expected[name].tolist() for name in report.loaded)
    # Of these, the code gives the missing name a value.
    assert gone not in report.loaded or kind in ("Aliases", "FillsAHead", "DropsMetadata")


class LoadsTwice(nn.Linear):
    """Loads, changes what it got, and loads again."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        super().load_state_dict(state_dict, strict)
        with torch.no_grad():
            self.weight.mul_(2)
        return super().load_state_dict(state_dict, strict)


class Halves(nn.Sequential):
    """Halves the model that it has loaded."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        found = super().load_state_dict(state_dict, strict)
        self.half()
        return found


class LooksAtNames(nn.Linear):
    """Fills a bias of its own if torch says that it is missing."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        found = super().load_state_dict(state_dict, strict=False)
        if "bias" in found.missing_keys:
            nn.init.constant_(self.bias, 5)
        return found


class TiesItself(nn.Module):
    """Ties its head in a hook after the load."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(2, 2), nn.Linear(2, 2, bias=False)
        self.register_load_state_dict_post_hook(self.tie)

    @staticmethod
    def tie(module: Any, _: Any) -> None:
        module.head.weight = module.emb.weight


class Grows(nn.Module):
    """Makes as many layers as the state has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.register_load_state_dict_pre_hook(self.grow)

    @staticmethod
    def grow(module: Any, state: STATE, prefix: str, *_: Any) -> None:
        count = sum(name.startswith(f"{prefix}layers.") for name in state)
        module.layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(count)])


class WritesOneOfTwo(nn.Module):
    """Changes one of two parameters over one memory after the load."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        self.two.data = self.one.data
        self.register_load_state_dict_post_hook(self.write)

    @staticmethod
    def write(module: Any, _: Any) -> None:
        module.one.data.add_(1)


class WritesAChild(nn.Sequential):
    """Adds to what a child of its first child has loaded, before the next child is loaded."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(2, 2, bias=False)), nn.Linear(2, 2, bias=False))
        self.register_load_state_dict_pre_hook(lambda *_: None)
        self[0].register_load_state_dict_post_hook(self.write)

    @staticmethod
    def write(module: Any, _: Any) -> None:
        module[0].weight.data.add_(1)


WEIGHT: STATE = {"weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
TWO = {"one": torch.tensor([1.0, 2.0]), "two": torch.tensor([3.0, 4.0])}
ONE = torch.eye(2)
SAME = {"0.0.weight": ONE, "1.weight": ONE}
EYES = {"emb.weight": torch.eye(2), "head.weight": torch.eye(2)}
LAYERS = {
    **nn.Linear(2, 2).state_dict(prefix="first."),
    **{f"layers.{n}.weight": torch.full((2, 2), float(n)) for n in range(3)},
}


@pytest.mark.parametrize("door", ["file", "memory"])
@pytest.mark.parametrize(
    ("make", "state"),
    [
        (partial(LoadsTwice, 2, 2, bias=False), WEIGHT),
        (lambda: Halves(nn.Linear(2, 2, bias=False)), {"0.weight": torch.eye(2)}),
        (partial(LooksAtNames, 2, 2), WEIGHT),
        (TiesItself, EYES),
        (Grows, LAYERS),
        (WritesOneOfTwo, TWO),
        (WritesAChild, SAME),
    ],
    ids=[
        "loads twice", "halves", "looks at names", "ties itself", "grows", "writes one of two",
        "writes a child",
    ],
)  # fmt: skip
def test_a_live_model_ends_as_in_torch(make: Any, state: STATE, door: str, tmp_path: Path) -> None:
    """Values, dtypes and ties."""
    given: Any = copy.deepcopy(state)
    if door == "file":
        torch.save(state, given := tmp_path / "model.pt")
    (right := make()).load_state_dict(copy.deepcopy(state))
    report = torchlift.load(model := make(), given, allow_missing=["*"])
    assert look(model) == look(right)
    if isinstance(model, Grows):
        assert {*report.loaded} == {*state}
    if isinstance(model, TiesItself):
        assert model.head.weight is model.emb.weight


def test_a_skeleton_that_loads_twice_is_refused_with_a_way_out() -> None:
    """What it wrote is in the map of the file, so that the second load would get it."""
    make = partial(LoadsTwice, 2, 2, bias=False)
    model = torchlift.skeleton(make)
    with pytest.raises(torchlift.PlacementError, match=r"torchlift\.materialize\(model\)"):
        torchlift.load(model, WEIGHT)
    torchlift.materialize(model)
    torchlift.load(model, WEIGHT)
    assert torch.equal(model.weight, WEIGHT["weight"])


def test_a_file_of_which_code_drops_every_key_fits_nothing(tmp_path: Path) -> None:
    """An attribute that the code sets does not mean that it has kept a tensor."""

    class Drops(nn.Linear):
        loads = 0

        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
            self.loads += 1
            own = self.state_dict()
            known = {key: value for key, value in state_dict.items() if key in own}
            return super().load_state_dict(known, strict=False)

    torch.save({"junk": torch.ones(2), "other": torch.ones(2)}, path := tmp_path / "model.pt")
    for model in (Drops(2, 2), torchlift.skeleton(Drops, 2, 2)):
        with pytest.raises(torchlift.MismatchError, match="nothing in the checkpoint fits"):
            torchlift.load(model, path)
        assert model.loads == 0


def test_a_dtype_of_the_caller_is_not_rounded_through_the_models() -> None:
    """The live model is in float16, which has no 70000."""
    model = nn.Linear(2, 1, bias=False).half()
    model.register_load_state_dict_post_hook(lambda *_: None)
    value = torch.tensor([[70000.0, 1e-9]])
    report = torchlift.load(model, {"weight": value}, dtype=torch.float32, check="finite")
    assert torch.equal(model.weight, value)
    assert report.overflowed == {}


def test_values_that_overlap_in_the_state_are_apart_in_a_skeleton() -> None:
    """A hook that writes to one of them does not change the other."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
            self.register_load_state_dict_post_hook(lambda m, _: (m.a.detach().mul_(2), None)[1])

    whole = torch.tensor([1.0, 2.0, 3.0])
    for model in (Both(), torchlift.skeleton(Both)):
        torchlift.load(model, {"a": whole, "b": whole[1:]})
        assert (model.a.tolist(), model.b.tolist()) == ([2, 4, 6], [2, 3])


@pytest.mark.parametrize("where", ["", "emb", "head"])
@pytest.mark.parametrize("live", [True, False], ids=["live", "skeleton"])
def test_one_name_of_a_tie_is_enough_beside_a_hook(where: str, live: bool) -> None:
    """As without one: safetensors writes one name of a tie."""

    def make() -> nn.Module:
        model = nn.ModuleDict({"emb": nn.Embedding(2, 2), "head": nn.Linear(2, 2, bias=False)})
        model["head"].weight = model["emb"].weight
        model.get_submodule(where).register_load_state_dict_post_hook(lambda *_: None)
        return model

    model = make() if live else torchlift.skeleton(make)
    report = torchlift.load(model, {"emb.weight": torch.eye(2)})
    assert report.missing_keys == []
    assert model["head"].weight.tolist() == [[1, 0], [0, 1]]
    with pytest.raises(torchlift.MismatchError):
        torchlift.load(model, {"other": torch.eye(2)})


def test_a_copy_that_code_makes_of_a_module_has_no_part_in_the_load() -> None:
    """A target network is copied while the model loads. It can be loaded and saved afterwards."""

    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 2, bias=False)
            self.register_load_state_dict_post_hook(self.copy_it)

        @staticmethod
        def copy_it(module: Any, _: Any) -> None:
            object.__setattr__(module, "target", copy.deepcopy(module.net))

    torchlift.load(model := Copies(), {"net.weight": torch.eye(2)})
    assert model.target.weight.tolist() == [[1, 0], [0, 1]]
    with pytest.raises(RuntimeError, match="junk"):
        model.target.load_state_dict({"weight": torch.ones(2, 2), "junk": torch.ones(1)})
    copied = pickle.loads(pickle.dumps(model.target))
    torchlift.load(copied, {"weight": torch.zeros(2, 2)})
    assert copied.weight.tolist() == [[0, 0], [0, 0]]


def test_attributes_of_modules_inside_are_given_back() -> None:
    """A hook of the model writes to a table that a child keeps as a plain tensor."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    model[0].table = torch.zeros(2)
    model.register_load_state_dict_post_hook(lambda m, _: (m[0].table.add_(1), None)[1])
    torchlift.plan(model, {"0.weight": torch.eye(2)})
    with pytest.raises(torchlift.MismatchError):
        torchlift.load(model, {"0.weight": torch.eye(2), "junk": torch.ones(1)})
    assert model[0].table.tolist() == [0, 0]
    torchlift.load(model, {"0.weight": torch.eye(2)})
    assert model[0].table.tolist() == [1, 1]

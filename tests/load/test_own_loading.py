"""A `load_state_dict` that a class overrides: torchlift makes of a model what torch makes of it."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchlift
from torchlift.distributed import get_model_state_dict, set_model_state_dict


class Permuting(nn.Module):
    """Saves the rows of one weight in the order of an older release."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 6), nn.Linear(6, 2)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        found["qkv.weight"] = found["qkv.weight"].flip(0)
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        found = OrderedDict(state_dict)
        found["qkv.weight"] = found["qkv.weight"].flip(0)
        return super().load_state_dict(found, strict, assign)


class Table(nn.Module):
    """Takes the size of its table from the state, and sums the table up at the end."""

    def __init__(self, rows: int = 2) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(rows * 3.0).view(rows, 3))
        self.register_buffer("ends", torch.arange(float(rows)))
        self.total = 0.0

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        self.table = nn.Parameter(torch.empty_like(state_dict["table"]))
        self.ends.resize_(state_dict["ends"].shape)
        found = nn.Module.load_state_dict(self, state_dict, strict=strict)
        self.total = float(self.table.detach().sum())
        return found


class Renaming(nn.Module):
    """Tries the names of an older release when the new ones do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Linear(2, 2)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        try:
            return super().load_state_dict(state_dict, strict)
        except RuntimeError:
            old = {key.replace("old.", "new."): value for key, value in state_dict.items()}
            return super().load_state_dict(old, strict)


class Delegating(nn.Module):
    """Has the state of the module inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Permuting(), nn.Linear(2, 2)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return self.inner.load_state_dict(state_dict, *args, **kwargs)


class Extra(nn.Module):
    """Drops a key, reads the module versions, and has an extra state that is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.seen, self.versions = nn.BatchNorm1d(3), {}, {}

    def get_extra_state(self) -> Any:
        return {"steps": 3, "scale": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        self.versions = dict(state_dict._metadata)
        assert isinstance(state_dict["_extra_state"], dict)
        return super().load_state_dict(
            {key: value for key, value in state_dict.items() if key != "stale"}, strict
        )


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]
    }


def same(one: nn.Module, two: nn.Module) -> bool:
    first, second = values_of(one), values_of(two)
    return first.keys() == second.keys() and all(map(torch.equal, first.values(), second.values()))


def with_rows(rows: int) -> Table:
    made = Table(rows)
    nn.init.normal_(made.table)
    return made


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "permutes": (Permuting, Permuting),
    "resizes": (partial(with_rows, 5), Table),
    "renames": (nn.Linear, Renaming),
    "delegates": (Delegating, Delegating),
    "extra": (Extra, Extra),
}


def saved_state(kind: str) -> Mapping[str, Any]:
    if kind == "renames":
        return {"old.weight": torch.randn(2, 2), "old.bias": torch.randn(2)}
    state: Mapping[str, Any] = MODELS[kind][0]().state_dict()
    return state


@pytest.mark.parametrize("door", ["pt", "safetensors", "memory", "dcp"])
@pytest.mark.parametrize("start", ["live", "skeleton", "meta"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_what_torch_makes_of_it(
    tmp_path: Path, kind: str, start: str, door: str
) -> None:
    """Values, shapes and what the method computes at the end are those of `load_state_dict`."""
    state = saved_state(kind)
    given: Any = state
    if door == "pt":
        torch.save(state, given := tmp_path / "a.pt")
    elif door == "safetensors":
        if kind == "extra":
            pytest.skip("safetensors holds tensors only")
        torchlift.save(dict(state), given := tmp_path / "a.safetensors")
    elif door == "dcp":
        torchlift.save(state, given := tmp_path / "a", format="dcp")
    right = MODELS[kind][1]()
    right.load_state_dict(copy.deepcopy(state))
    if start == "live":
        model = MODELS[kind][1]()
    elif start == "skeleton":
        model = torchlift.skeleton(MODELS[kind][1])
    else:
        with torch.device("meta"):
            model = MODELS[kind][1]()
    # The head of a model that delegates has no value in the file.
    inner = "inner" if kind == "delegates" else ""
    if inner and start == "meta":
        with pytest.raises(torchlift.PlacementError, match=r"head\.weight"):
            torchlift.load(model, given)
        return
    torchlift.load(model, given, allow_missing=["head.*"] if inner and start != "live" else [])
    model, right = model.get_submodule(inner), right.get_submodule(inner)
    assert same(model, right)
    for name in ("total", "seen"):
        assert str(getattr(model, name, 0)) == str(getattr(right, name, 0))
    assert "load_state_dict" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("kind", MODELS)
def test_a_plan_and_a_failed_load_change_nothing(kind: str, tmp_path: Path) -> None:
    """Parameters, buffers, attributes and the caller's state are as before."""
    torch.save(saved_state(kind), path := tmp_path / "a.pt")
    model = MODELS[kind][1]()
    objects, values = [id(p) for p in model.parameters()], values_of(model)
    attributes = {name: id(value) for name, value in vars(model).items()}
    plan = torchlift.plan(model, path)
    assert plan.loaded
    with pytest.raises(torchlift.MismatchError, match="odd"):
        torchlift.load(model, [path, {"odd": torch.ones(1)}])
    assert objects == [id(p) for p in model.parameters()]
    assert attributes == {name: id(value) for name, value in vars(model).items()}
    after = values_of(model)
    assert all(torch.equal(after[name], value) for name, value in values.items())
    assert "load_state_dict" not in [thread.name for thread in threading.enumerate()]


def test_a_state_in_memory_stays_as_it_is_after_a_failed_load() -> None:
    """A method that writes into the caller's tensors is undone with the rest."""

    class Scaling(nn.Linear):
        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
            state_dict["weight"].mul_(2)
            return super().load_state_dict(state_dict, strict)

    state = {"weight": torch.ones(2, 2), "wrong": torch.ones(2)}
    with pytest.raises(torchlift.MismatchError):
        torchlift.load(Scaling(2, 2), state)
    assert state["weight"].sum() == 4
    model = Scaling(2, 2, bias=False)
    torchlift.load(model, {"weight": torch.ones(2, 2)})
    assert float(model.weight.detach().sum()) == 8


@pytest.mark.parametrize("source", ["mmap", "read", "auto"])
@pytest.mark.parametrize("door", ["pt", "safetensors", "memory"])
def test_what_a_method_writes_without_a_trace_is_what_is_loaded(
    tmp_path: Path, door: str, source: Any
) -> None:
    """Torch counts no write through `.data` and NumPy. The file does not have the new values."""

    class Doubling(nn.Linear):
        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
            state_dict["weight"].data.mul_(2)
            state_dict["bias"].numpy()[:] = 5
            return super().load_state_dict(state_dict, strict)

    state = nn.Linear(2000, 3).state_dict()
    given: Any = state
    if door != "memory":
        torchlift.save(state, given := tmp_path / f"a.{door}")
    for model in (Doubling(2000, 3), torchlift.skeleton(Doubling, 2000, 3)):
        torchlift.load(model, given, source=source)
        assert torch.equal(model.weight, state["weight"] * 2)
        assert model.bias.eq(5).all()


def test_unchanged_tensors_still_come_from_the_file(tmp_path: Path) -> None:
    """Only what the method changed is in memory: a skeleton maps the rest."""
    torchlift.save(Permuting(), path := tmp_path / "a.safetensors")
    report = torchlift.load(torchlift.skeleton(Permuting), path)
    assert {key: report.source[key] for key in report.loaded} == {
        "qkv.weight": "memory", "qkv.bias": "mmap", "out.weight": "mmap", "out.bias": "mmap",
    }  # fmt: skip


def test_what_fails_after_the_values_are_placed_is_undone() -> None:
    """The second half of the method raises, and writes before: the model is as it was."""

    class Failing(nn.Linear):
        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
            super().load_state_dict(state_dict, strict)
            self.weight.data.zero_()
            raise ValueError("the table is too old")

    model = Failing(2, 2)
    before = values_of(model)
    with pytest.raises(ValueError, match="too old"):
        torchlift.load(model, nn.Linear(2, 2).state_dict())
    assert all(torch.equal(before[name], value) for name, value in values_of(model).items())


def test_a_method_that_loads_by_itself_is_believed(tmp_path: Path) -> None:
    """It never calls the method of nn.Module. On meta its values would be lost."""

    class Manual(nn.Linear):
        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
            with torch.no_grad():
                for name, parameter in self.named_parameters():
                    parameter.copy_(state_dict[name])

    torchlift.save(other := nn.Linear(2, 2), path := tmp_path / "a.pt")
    model = Manual(2, 2)
    before, objects = values_of(model), [*model.parameters()]
    assert [*torchlift.plan(model, path).loaded] == ["weight", "bias"]
    assert all(torch.equal(before[name], value) for name, value in values_of(model).items())
    torchlift.load(model, path)
    assert same(model, other)
    assert all(one is two for one, two in zip(objects, model.parameters(), strict=True))
    skeleton = torchlift.skeleton(Manual, 2, 2)
    with pytest.raises(torchlift.PlacementError, match=r"torchlift\.materialize\(model"):
        torchlift.load(skeleton, path)
    torchlift.materialize(skeleton)
    torchlift.load(skeleton, path)
    assert same(skeleton, other)


def test_a_method_may_write_to_what_its_state_dict_returns(tmp_path: Path) -> None:
    """Into tied modules inside of it, too, as many old recipes do."""

    class Copying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.tied = nn.Linear(2, 2), nn.Linear(2, 2)
            self.tied.weight = self.one.weight

        def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:  # type: ignore[override]
            own = self.state_dict()
            for name, value in state_dict.items():
                own[name].copy_(value)
                own[name].data.add_(1)

    torchlift.save(Copying(), path := tmp_path / "a.pt")
    model, right = Copying(), Copying()
    objects = [*model.parameters()]
    right.load_state_dict(torch.load(path))
    torchlift.load(model, path)
    assert same(model, right)
    assert model.tied.weight is model.one.weight
    assert all(one is two for one, two in zip(objects, model.parameters(), strict=True))


@pytest.mark.parametrize("write", ["copy_", "data", "resize_"])
def test_what_a_method_writes_itself_is_kept_in_a_module_inside_too(write: str) -> None:
    """It passes on the rest; the parameter is the same object."""

    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
            self.register_buffer("bank", torch.zeros(1))

        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
            rest = dict(state_dict)
            value = rest.pop("inner.weight")
            if write == "resize_":
                self.bank.resize_(rest["bank"].shape)
            target = self.inner.weight.data if write == "data" else self.inner.weight.detach()
            target.copy_(value * 2)
            return super().load_state_dict(rest, strict=False)

    ours, theirs = Partly(), Partly()
    state = {key: torch.rand(value.shape) for key, value in ours.state_dict().items()}
    if write == "resize_":
        state["bank"] = torch.rand(3)
    weight, bank = ours.inner.weight, ours.bank
    torchlift.load(ours, state)
    theirs.load_state_dict(state)
    assert same(ours, theirs)
    assert ours.inner.weight is weight
    assert ours.bank is bank


@pytest.mark.parametrize("start", ["live", "skeleton"])
def test_a_method_may_load_its_parts_one_by_one(tmp_path: Path, start: str) -> None:
    """It calls the method of nn.Module more than once, each time for a child."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

        def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:  # type: ignore[override]
            for name, child in self.named_children():
                part = {k[4:]: v for k, v in state_dict.items() if k.startswith(name)}
                child.load_state_dict(part, strict)

    torchlift.save(other := Twice(), path := tmp_path / "a.pt")
    model = Twice() if start == "live" else torchlift.skeleton(Twice)
    report = torchlift.load(model, path)
    assert same(model, other)
    assert report.missing_keys == []
    del (state := other.state_dict())["two.bias"]
    with pytest.raises(torchlift.MismatchError, match=r"missing \(1\): two\.bias"):
        torchlift.load(model, state)


class Two(nn.Module):
    """Saves and loads a dict of two state dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: child.state_dict() for name, child in self.named_children()}

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:  # type: ignore[override]
        for name, child in self.named_children():
            child.load_state_dict(state_dict[name], strict)


def test_the_error_of_a_method_says_what_it_got_and_the_way_out(tmp_path: Path) -> None:
    """It expects containers, and gets dotted names; or it lacks what was left out."""
    torchlift.save(other := Two(), path := tmp_path / "a.pt")
    model = Two()
    with pytest.raises(KeyError, match="one") as caught:
        torchlift.load(model, path)
    (note,) = caught.value.__notes__
    assert "load_state_dict of Two raised this. It got one.weight, one.bias, two.weight" in note
    assert "model.load_state_dict(torchlift.open(path).tree())" in note
    model.load_state_dict(torchlift.open(path).tree())
    assert same(model, other)


class Writing(nn.Module):
    """Writes one parameter by itself, and passes on the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Parameter(torch.zeros(3)), nn.Linear(2, 2)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        rest = dict(state_dict)
        with torch.no_grad():
            self.table.copy_(rest.pop("table"))
        return super().load_state_dict(rest, strict=False)


@pytest.mark.parametrize("way", ["copy", "data", "made of one"])
def test_what_is_written_on_meta_is_refused_with_a_way_out(tmp_path: Path, way: str) -> None:
    """On meta nothing is written, so that the first values of the constructor would come back."""

    class Other(Writing):
        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
            if way == "copy":
                return super().load_state_dict(state_dict, strict)
            rest = dict(state_dict)
            value = rest.pop("table")
            if way == "data":
                self.table.data.copy_(value)
            else:
                rest["table"] = self.table + 1
            return nn.Module.load_state_dict(self, rest, strict=False)

    (state := Other().state_dict())["table"] = torch.arange(3.0)
    torch.save(state, path := tmp_path / "a.pt")
    (right := Other()).load_state_dict(torch.load(path))
    torchlift.load(live := Other(), path)
    assert same(live, right)
    skeleton = torchlift.skeleton(Other)
    with pytest.raises(torchlift.PlacementError, match=r"table.*torchlift\.materialize\(model"):
        torchlift.load(skeleton, path)
    assert skeleton.table.is_meta
    torchlift.materialize(skeleton)
    torchlift.load(skeleton, path)
    assert same(skeleton, right)


def test_what_a_method_passes_on_of_the_model_s_own_stays_as_it_is(tmp_path: Path) -> None:
    """It updates its own state dict with what fits: a skeleton makes the rest as its class does."""

    class Updating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(2, 2), nn.Parameter(torch.full((3,), 7.0))

        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
            own = self.state_dict()
            own.update({k: v for k, v in state_dict.items() if own[k].shape == v.shape})
            return super().load_state_dict(own, strict)

    (state := Updating().state_dict())["head"] = torch.zeros(9)
    torch.save(state, path := tmp_path / "a.pt")
    (right := Updating()).load_state_dict(torch.load(path))
    torchlift.load(live := Updating(), path)
    with pytest.warns(UserWarning, match="head"):
        torchlift.load(skeleton := torchlift.skeleton(Updating), path)
    assert same(live, right)
    assert same(skeleton, right)


def test_two_loads_of_one_model_at_once_are_refused(tmp_path: Path) -> None:
    """The second names the first; neither waits for the other's events."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow(nn.Linear):
        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
            inside.set()
            assert go_on.wait(60)
            return super().load_state_dict(state_dict, strict)

    torchlift.save(other := nn.Linear(2, 2), path := tmp_path / "a.pt")
    model = Slow(2, 2)
    first = threading.Thread(target=torchlift.load, args=(model, path))
    first.start()
    assert inside.wait(60)
    with pytest.raises(torchlift.PlacementError, match="another load"):
        torchlift.load(model, path)
    go_on.set()
    first.join()
    assert same(model, other)
    torchlift.load(model, path)


def test_a_method_that_calls_load_is_refused_with_a_way_out(tmp_path: Path) -> None:
    """It would call itself; the method of nn.Module is what it has to call."""

    class Calling(nn.Linear):
        through: Any = staticmethod(torchlift.load)

        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
            return self.through(self, state_dict)

    torchlift.save(other := nn.Linear(2, 2), path := tmp_path / "a.pt")
    model = Calling(2, 2)
    with pytest.raises(torchlift.PlacementError, match=r"super\(\)\.load_state_dict"):
        torchlift.load(model, path)
    Calling.through = staticmethod(nn.Module.load_state_dict)
    torchlift.load(model, path)
    assert same(model, other)


def test_a_method_may_load_in_a_thread_of_its_own(tmp_path: Path) -> None:
    """It waits there, wherever it called the method of nn.Module."""

    class Pooled(nn.Linear):
        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(super().load_state_dict, state_dict, strict).result()

    torchlift.save(other := nn.Linear(2, 2), path := tmp_path / "a.pt")
    model = Pooled(2, 2)
    torchlift.load(model, path)
    assert same(model, other)


def test_a_method_may_be_more_lenient_than_the_call() -> None:
    """It passes strict=False on: what it drops stays, and a warning names it."""

    class Lenient(nn.Linear):
        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
            found = super().load_state_dict({"weight": state_dict["weight"]}, strict=False)
            self.lacking = list(found.missing_keys)
            return found

    model, other = Lenient(2, 2), nn.Linear(2, 2)
    bias = model.bias.detach().clone()
    with pytest.warns(UserWarning, match="bias"):
        torchlift.load(model, other.state_dict())
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, bias)
    assert model.lacking == ["bias"]


def test_hooks_and_submodules_see_what_torch_lets_them_see() -> None:
    """Hooks run once, after the method's first half; the method of a child does not run."""
    calls: list[str] = []

    class Child(nn.Linear):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("child")
            return super().load_state_dict(*args, **kwargs)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Child(2, 2)
            self.child.register_load_state_dict_post_hook(lambda *_: calls.append("post"))
            self.child.register_load_state_dict_pre_hook(lambda *_: calls.append("pre"))

        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
            calls.append("first half")
            found = super().load_state_dict(state_dict, strict)
            calls.append("second half")
            return found

    model, state = Root(), Root().state_dict()
    model.load_state_dict(state)
    by_torch = [*calls]
    calls.clear()
    torchlift.load(model, state)
    assert calls == by_torch == ["first half", "pre", "post", "second half"]
    assert len(model.child._load_state_dict_post_hooks) == 1


def test_wrapped_models_use_the_method_of_what_they_wrap(tmp_path: Path) -> None:
    """A compiled model loads the file of a bare one; under its own names it loads as in torch."""
    torchlift.save(right := Permuting(), path := tmp_path / "a.pt")
    compiled = torch.compile(Permuting(), backend="eager")
    torchlift.load(compiled, path)
    assert same(compiled._orig_mod, right)
    state = {f"_orig_mod.{name}": value for name, value in right.state_dict().items()}
    torchlift.load(one := torch.compile(Permuting(), backend="eager"), state)
    (two := torch.compile(Permuting(), backend="eager")).load_state_dict(state)
    assert same(one, two)


def test_the_distributed_functions_call_it_as_torch_s_do() -> None:
    """What `get_model_state_dict` gives, `set_model_state_dict` takes back."""
    right, model = Permuting(), Permuting()
    set_model_state_dict(model, get_model_state_dict(right))
    assert same(model, right)

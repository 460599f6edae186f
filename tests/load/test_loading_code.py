"""Loading code of a model, a `load_state_dict` of its class included: it ends as in torch."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import zoo
from pairwise import pairwise
from small_models import tensors_of
from torch import nn
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import weight_norm
from zoo import same

import torchlift

# ---- what a model's code may be


def own_method(base: Any, load: Callable[[Any, Any, Any], Any]) -> Any:
    """A class whose `load_state_dict` is this function of the model, the state and torch's."""

    class Own(base):
        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
            return load(self, state_dict, partial(super().load_state_dict, strict=strict))

    return Own


def hooked(model: Any, before: Any = None, after: Any = None) -> Any:
    """A model with a hook before the load (model, state, prefix), or after it (model, names)."""
    if before is not None:
        model.register_load_state_dict_pre_hook(lambda m, s, p, *_: (before(m, s, p), None)[1])
    if after is not None:
        model.register_load_state_dict_post_hook(lambda m, keys: (after(m, keys), None)[1])
    return model


def layers(**modules: nn.Module) -> Any:
    return nn.ModuleDict(modules)


def square() -> nn.Linear:
    return nn.Linear(2, 2, bias=False)


# ---- methods


def loads_twice(model: Any, state: Any, load: Any) -> Any:
    load(state)
    with torch.no_grad():
        model.weight.mul_(2)
    return load(state)


def halves(model: Any, state: Any, load: Any) -> Any:
    found = load(state)
    model.half()
    return found


def looks_at_names(model: Any, state: Any, load: Any) -> Any:
    found = load(state, strict=False)
    if "bias" in found.missing_keys:
        nn.init.constant_(model.bias, 5)
    return found


def sizes_its_table(model: Any, state: Any, load: Any) -> Any:
    """The sizes are those of the state, and the table is summed up at the end."""
    model.table = nn.Parameter(torch.empty_like(state["table"]))
    model.ends.resize_(state["ends"].shape)
    found = load(state)
    model.total = float(model.table.detach().sum())
    return found


def tries_old_names(model: Any, state: Any, load: Any) -> Any:
    try:
        return load(state)
    except RuntimeError:
        return load({key.replace("old.", "new."): value for key, value in state.items()})


def drops_a_key(model: Any, state: Any, load: Any) -> Any:
    model.versions = dict(state._metadata)
    assert isinstance(state["_extra_state"], dict)
    return load({key: value for key, value in state.items() if key != "stale"})


def writes_without_a_trace(model: Any, state: Any, load: Any) -> Any:
    """torch counts no write through `.data` and NumPy."""
    state["weight"].data.mul_(2)
    state["bias"].numpy()[:] = 5
    return load(state)


def copies_by_itself(model: Any, state: Any, load: Any) -> None:
    own = model.state_dict()
    for name, value in state.items():
        own[name].copy_(value)
        own[name].data.add_(1)


def loads_part_by_part(model: Any, state: Any, load: Any) -> None:
    for name, child in model.named_children():
        child.load_state_dict({k[4:]: v for k, v in state.items() if k.startswith(name)})


def updates_its_own(model: Any, state: Any, load: Any) -> Any:
    own = model.state_dict()
    return load(own | {k: v for k, v in state.items() if own[k].shape == v.shape})


def writes_a_part() -> Any:
    """Writes one weight by itself, resizes a buffer, and passes on the rest."""

    def load(model: Any, state: Any, load: Any) -> Any:
        rest = dict(state)
        model.inner.weight.data.copy_(rest.pop("inner.weight") * 2)
        model.bank.resize_(rest["bank"].shape)
        return load(rest, strict=False)

    model = own_method(nn.Module, load)()
    model.inner, model.head = nn.Linear(2, 2), nn.Linear(2, 2)
    model.register_buffer("bank", torch.zeros(1))
    return model


class Permuting(nn.Module):
    """Saves the rows of one weight in the order of an older release."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 6), nn.Linear(6, 2)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        found["qkv.weight"] = found["qkv.weight"].flip(0)
        return found

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        found = OrderedDict(state_dict)
        found["qkv.weight"] = found["qkv.weight"].flip(0)
        return super().load_state_dict(found, strict, assign)


def drops_metadata() -> Any:
    """A plain dict is passed on, so that hooks hear of no version."""
    model = own_method(nn.Sequential, lambda m, s, load: load(dict(s)))(nn.BatchNorm1d(2))
    model.seen = []
    model[0].register_load_state_dict_pre_hook(
        lambda m, s, p, metadata, *_: model.seen.append(metadata.get("version"))
    )
    return model


def table(rows: int = 2) -> Any:
    model = own_method(nn.Module, sizes_its_table)()
    model.table = nn.Parameter(torch.arange(rows * 3.0).view(rows, 3))
    model.register_buffer("ends", torch.arange(float(rows)))
    return model


def ties_two() -> Any:
    model = own_method(nn.ModuleDict, copies_by_itself)(layers(one=square(), tied=square()))
    model["tied"].weight = model["one"].weight
    return model


def with_a_head() -> Any:
    model = own_method(nn.Module, updates_its_own)()
    model.body, model.head = nn.Linear(2, 2), nn.Parameter(torch.full((3,), 7.0))
    return model


# ---- hooks, and code of a part


def fills_a_head() -> Any:
    """A hook drops the keys of a head, which another one fills after the load."""

    def drop(module: Any, state: Any, prefix: str) -> None:
        for key in [key for key in state if key.startswith(prefix + "head.")]:
            del state[key]

    def fill(module: Any, keys: Any) -> None:
        keys.missing_keys[:] = [name for name in keys.missing_keys if "head" not in name]
        with torch.no_grad():
            module["head"].weight.fill_(3)
            module["head"].bias.zero_()

    return hooked(layers(body=nn.Linear(2, 2), head=nn.Linear(2, 3)), drop, fill)


def clears_names() -> Any:
    model = layers(first=nn.Linear(2, 2), second=nn.Linear(2, 2))
    hooked(model["first"], after=lambda _, keys: keys.missing_keys.clear())
    return model


def shapes_itself() -> Any:
    """As the lazy `Linear` of PyTorch Geometric does."""

    def shape_it(module: Any, state: Any, prefix: str) -> None:
        if nn.parameter.is_lazy(module.weight):
            module.channels = state[prefix + "weight"].size(-1)
            module.weight.materialize((3, module.channels))

    model = nn.Module()
    model.weight = nn.parameter.UninitializedParameter()
    return hooked(model, shape_it)


def ties_itself() -> Any:
    def tie(module: Any, _: Any) -> None:
        module["head"].weight = module["emb"].weight

    return hooked(layers(emb=nn.Embedding(2, 2), head=square()), after=tie)


def grows() -> Any:
    def grow(module: Any, state: Any, prefix: str) -> None:
        count = sum(name.startswith(f"{prefix}layers.") for name in state)
        module["layers"] = nn.ModuleList([square() for _ in range(count)])

    return hooked(layers(first=nn.Linear(2, 2)), grow)


class Versioned(nn.Module):
    """Reads files of its first version, in which the weight had another name and half the size."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("offset", torch.zeros(2))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.seen = metadata.get("version")
        if (self.seen or 1) < 2 and prefix + "kernel" in state:
            state[prefix + "weight"] = state.pop(prefix + "kernel") * 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Stated(nn.Module):
    """Derives something where it gets its extra state."""

    def __init__(self, take: Any, filled: bool = False) -> None:
        super().__init__()
        self.weight, self.take = nn.Parameter(torch.ones(2)), take
        if filled:
            self.register_buffer("derived", torch.zeros(2), persistent=False)

    def get_extra_state(self) -> Any:
        return {"factor": 3}

    def set_extra_state(self, state: Any) -> None:
        self.take(self, state["factor"])


def registers(module: Any, factor: int) -> None:
    module.register_buffer("derived", module.weight.detach() * factor, persistent=False)


def fills(module: Any, factor: int) -> None:
    module.derived.copy_(module.weight.detach() * factor)


def prepares_a_buffer(module: Any, *_: Any) -> None:
    module.register_buffer("derived", torch.zeros_like(module.weight), persistent=False)


def weighted() -> Any:
    return zoo.Holder({"weight": torch.ones(2)})


def prepares() -> Any:
    """A hook gives the module what the checkpoint needs: a size, a tensor, a child, a number."""

    def prepare(module: Any, state: Any, prefix: str) -> None:
        module.weight = nn.Parameter(torch.zeros(state[prefix + "weight"].shape))
        module.scale = torch.zeros_like(state[prefix + "scale"])
        module.child = square()
        module.calls += 1

    model = zoo.Holder({"weight": torch.zeros(3), "other": torch.zeros(2)})
    model.register_buffer("scale", None)
    model.calls = 0
    return hooked(model, prepare)


def changing(change: Callable[[Any, str], Any]) -> Any:
    """Two parameters, and a hook that changes what is loaded."""
    zeros = {name: torch.zeros(5000, dtype=torch.complex64) for name in ("weight", "alias")}
    return hooked(
        zoo.Holder(zeros), lambda m, state, prefix: (change(state, prefix + "weight"), 0)[1]
    )


CHANGES: dict[str, Callable[[Any, str], Any]] = {
    "in place": lambda state, key: state[key].mul_(2),
    "through .data": lambda state, key: state[key].data.mul_(2),
    "through NumPy": lambda state, key: state[key].numpy().__imul__(2),
    "of an alias": lambda state, key: state["alias"].data.mul_(2),
    "another tensor": lambda state, key: state.update({key: state[key] * 2}),
    "a conjugate": lambda state, key: state.update({key: state[key].conj()}),
    "nothing": lambda state, key: None,
}


# ---- the cases


class Case(NamedTuple):
    """A model with loading code, and what is loaded.

    Attributes:
        make: Makes the model.
        state: What is loaded. None: The state of such a model.
        lacks: Names of the model that the state may lack.
        on_meta: Whether a skeleton is loaded. If not, the error names `torchlift.materialize`, and
            that works. None: A skeleton is not tried.
    """

    make: Callable[[], Any]
    state: Mapping[str, Any]
    lacks: tuple[str, ...] = ()
    on_meta: bool | None = True


def _own(make: Callable[[], Any], on_meta: bool | None = True, **changes: Any) -> Case:
    """The state of such a model, with changes."""
    state = make().state_dict()
    state.update(changes)
    return Case(make, state, on_meta=on_meta)


def _of_version_1() -> Any:
    state: Any = OrderedDict({"0.kernel": torch.arange(3.0), "0.offset": torch.ones(2)})
    state._metadata = OrderedDict({"": {"version": 1}, "0": {"version": 1}})
    return state


def _old_weight_norm() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return old_weight_norm(nn.Linear(3, 4)).state_dict()


def _part(rows: int) -> Case:
    values = {key: torch.rand(value.shape) for key, value in writes_a_part().state_dict().items()}
    return Case(writes_a_part, {**values, "bank": torch.rand(rows)}, on_meta=False)


EYE, FIVES = torch.eye(2), torch.tensor([5.0, 7.0])
LINEAR = {"weight": torch.rand(2, 2), "bias": torch.ones(2)}
WEIGHT = {"weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}

CASES: dict[str, Case] = {
    **{
        kind: Case(partial(own_method(nn.Linear, method), 2, 2), LINEAR)
        for kind, method in {
            "assigns": lambda m, s, load: load(s, assign=True),
            "writes without a trace": writes_without_a_trace,
        }.items()
    },
    "drops metadata": _own(drops_metadata),
    "clears names": _own(clears_names),
    "permutes": _own(Permuting),
    "drops a key": _own(
        partial(own_method(zoo.Stated, drops_a_key), {"steps": 3, "scale": torch.ones(2)})
    ),
    "loads part by part": _own(
        lambda: own_method(nn.ModuleDict, loads_part_by_part)(layers(one=square(), two=square()))
    ),
    "fills a head": _own(fills_a_head, on_meta=False),
    "copies by itself": _own(ties_two, on_meta=False),
    "shapes itself": Case(shapes_itself, {"weight": torch.rand(3, 5)}),
    "loads twice": Case(
        partial(own_method(nn.Linear, loads_twice), 2, 2, bias=False), WEIGHT, on_meta=False
    ),
    "halves": Case(
        lambda: own_method(nn.Sequential, halves)(square()), {"0.weight": EYE}, on_meta=None
    ),
    "looks at names": Case(
        partial(own_method(nn.Linear, looks_at_names), 2, 2), WEIGHT, ("bias",), on_meta=None
    ),
    "ties itself": Case(ties_itself, {"emb.weight": EYE, "head.weight": EYE}, on_meta=None),
    "grows": _own(
        grows, None, **{f"layers.{n}.weight": torch.full((2, 2), float(n)) for n in range(3)}
    ),
    "sizes its table": Case(table, table(5).state_dict()),
    "tries old names": Case(
        lambda: own_method(nn.ModuleDict, tries_old_names)(layers(new=nn.Linear(2, 2))),
        {f"old.{key}": value for key, value in LINEAR.items()},
    ),
    "updates its own": Case(
        with_a_head, {**with_a_head().state_dict(), "head": torch.zeros(9)}, ("head",)
    ),
    **{
        f"keeps {kind}": Case(
            lambda: nn.Sequential(nn.Linear(2, 2), zoo.Stated()),
            nn.Sequential(nn.Linear(2, 2), zoo.Stated(extra)).state_dict(),
        )
        for kind, extra in {
            "a dict": {"step": 3, "name": "x", "deep": {"rate": 0.5}},
            "a tensor": torch.arange(4.0),
            "tensors": {"scale": torch.ones(2), "amax": {"history": torch.zeros(3)}},
            "nothing": None,
            "odd keys": {"l": [1, torch.arange(3)], "a.b": {0: torch.ones(1), "x": (2, {})}},
        }.items()
    },
    "a version before": Case(lambda: nn.Sequential(Versioned()), _of_version_1()),
    "a version of today": _own(lambda: nn.Sequential(Versioned())),
    "a version that is lost": Case(
        lambda: nn.Sequential(Versioned()), {**nn.Sequential(Versioned()).state_dict()}
    ),
    "prepares a buffer": Case(
        lambda: hooked(weighted(), prepares_a_buffer), {"weight": FIVES}, on_meta=False
    ),
    "integers": Case(
        lambda: nn.Sequential(Versioned()), {"0.weight": torch.arange(3), "0.offset": FIVES},
        on_meta=None,
    ),
    "old weight_norm": Case(lambda: weight_norm(nn.Linear(3, 4)), _old_weight_norm()),
    "old batch norm": Case(
        lambda: nn.Sequential(nn.BatchNorm1d(3)),
        {f"0.{key}": value + 2 for key, value in nn.BatchNorm1d(3).state_dict().items()
         if key != "num_batches_tracked"},
    ),
    "prepares all": Case(
        prepares,
        {"weight": torch.arange(5.0), "other": torch.ones(2), "scale": torch.ones(1),
         "child.weight": torch.ones(2, 2)},
    ),
    "extra state registers": _own(partial(Stated, registers), weight=FIVES),
    "extra state fills": _own(partial(Stated, fills, True), weight=FIVES),
    **{
        f"a hook writes {how}": Case(
            partial(changing, change),
            dict.fromkeys(["weight", "alias"], torch.full((5000,), 1 + 1j)),
        )
        for how, change in CHANGES.items()
    },
    "writes a part": _part(1),
    "writes a part and resizes": _part(3),
}  # fmt: skip


def look(model: nn.Module) -> list[Any]:
    """Values and dtypes, ties, and what the code has noted."""
    tensors = tensors_of(model)
    noted = ("seen", "calls", "channels", "total", "derived", "extra")
    facts = [
        (name, key, vars(module)[key])
        for name, module in model.named_modules()
        for key in noted
        if key in vars(module)
    ]
    ties = [[at is each for at in tensors.values()] for each in tensors.values()]
    return [[(name, t.dtype, t.tolist()) for name, t in tensors.items()], ties, str(facts)]


def given_by(door: str, state: Mapping[str, Any], folder: Path) -> Any:
    """The state in memory, or in a file or folder."""
    if door == "memory":
        return copy.deepcopy(state)
    if door == "pt":
        torch.save(state, folder / "a.pt")
    elif door == "safetensors":
        torchlift.save(dict(state), folder / "a.safetensors")
    else:
        torchlift.save(state, folder / "a.dcp", format="dcp")
    return folder / f"a.{door}"


@pairwise(
    kind=CASES,
    start=["live", "skeleton", "meta"],
    door=["pt", "safetensors", "memory", "dcp"],
    mode=["auto", "assign", "copy", "swap"],
)
def test_a_model_ends_as_in_torch(kind, start, door, mode, tmp_path):
    """Values, dtypes, ties and what its code notes, from each source in each mode."""
    case = CASES[kind]
    if not all(isinstance(value, torch.Tensor) for value in case.state.values()):
        door = door.replace("safetensors", "pt")
    if kind.startswith(("a hook writes", "a version", "keeps")) and door != "memory":
        door = "pt"  # others store neither shared memory nor versions nor each kind of key
    # What only a constructor gives a value is not in a model that is made on meta.
    lacks = case.lacks or not case.on_meta or kind == "extra state fills"
    if case.on_meta is None or (start == "meta" and lacks):
        start = "live"
    given = given_by(door, case.state, tmp_path)
    torch.manual_seed(0)
    right = case.make()
    torch.manual_seed(0)
    with torch.device("meta") if start == "meta" else nullcontext():
        model = torchlift.skeleton(case.make) if start == "skeleton" else case.make()
    held = tensors_of(model)
    right.load_state_dict(copy.deepcopy(case.state))
    if start == "skeleton" and not case.on_meta:
        with pytest.raises(torchlift.PlacementError, match=r"\.materialize\(model|'head\.weight'"):
            torchlift.load(model, given)
        torchlift.materialize(model)
    torchlift.load(model, given, allow_missing=case.lacks, mode=mode)
    assert look(model) == look(right)
    assert door != "memory" or same(given, case.state)  # what the caller has stays the caller's
    if start == "live" and kind in (
        "copies by itself",
        "writes a part",
        "writes a part and resizes",
    ):
        assert all(now is held[name] for name, now in tensors_of(model).items())


@pytest.mark.parametrize("kind", CASES)
def test_a_plan_and_a_failed_load_change_nothing(kind: str) -> None:
    """Parameters, buffers, attributes and the caller's state are as before."""
    case = CASES[kind]
    model, state = case.make(), copy.deepcopy(case.state)
    tensors = {
        name: (id(t), None if nn.parameter.is_lazy(t) else t.clone())
        for name, t in tensors_of(model).items()
    }
    attributes = {name: id(value) for name, value in vars(model).items()}
    assert torchlift.plan(model, state, allow_missing=case.lacks).loaded

    def fails(key: str, _: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"no {key}")

    with pytest.raises(ValueError, match="no "):
        torchlift.load(model, state, allow_missing=case.lacks, transform=fails)
    now = tensors_of(model)
    assert now.keys() == tensors.keys()
    for name, (identity, value) in tensors.items():
        assert id(now[name]) == identity
        assert value is None or same(now[name].detach(), value.detach()), name
    assert attributes == {name: id(value) for name, value in vars(model).items()}
    assert same(state, case.state)


def either(make: Callable[[], Any]) -> tuple[Any, Any]:
    """A live model and a skeleton."""
    return make(), torchlift.skeleton(make)


def test_a_hook_that_clears_names_excuses_those_that_are_missing_by_then() -> None:
    """Names of a later module are missing, as in torch."""
    for model in either(clears_names):
        weights = dict.fromkeys(["first.weight", "second.weight"], torch.ones(2, 2))
        with pytest.raises(torchlift.MismatchError, match=r"missing \(1\): second\.bias"):
            torchlift.load(model, weights)
        report = torchlift.load(model, {**weights, "second.bias": torch.ones(2)})
        assert report.missing_keys == []
        assert model["first"].weight.tolist() == [[1, 1], [1, 1]]


def test_a_file_of_which_code_drops_every_key_fits_nothing() -> None:
    """An attribute that the code sets does not mean that it has kept a tensor."""

    def drops(model: Any, state: Any, load: Any) -> Any:
        model.loads = 1
        own = model.state_dict()
        return load({key: value for key, value in state.items() if key in own}, strict=False)

    for model in either(partial(own_method(nn.Linear, drops), 2, 2)):
        with pytest.raises(torchlift.MismatchError, match="nothing in the checkpoint fits"):
            torchlift.load(model, {"junk": torch.ones(2), "other": torch.ones(2)})
        assert not hasattr(model, "loads")


def test_a_dtype_of_the_caller_is_not_rounded_through_the_models() -> None:
    """The live model is in float16, which has no 70000."""
    model = hooked(nn.Linear(2, 1, bias=False).half(), after=lambda *_: None)
    value = torch.tensor([[70000.0, 1e-9]])
    report = torchlift.load(model, {"weight": value}, dtype=torch.float32, check="finite")
    assert torch.equal(model.weight, value)
    assert report.overflowed == {}


@pytest.mark.parametrize("where", ["", "embed", "head"])
def test_one_name_of_a_tie_is_enough_beside_a_hook(where: str) -> None:
    """As without one: safetensors writes one name of a tie."""

    def make() -> Any:
        hooked((model := zoo.Tied(2, 2)).get_submodule(where), after=lambda *_: None)
        return model

    for model in either(make):
        report = torchlift.load(model, {"embed.weight": EYE})
        assert report.missing_keys == []
        assert model.head.weight.tolist() == [[1, 0], [0, 1]]
        with pytest.raises(torchlift.MismatchError):
            torchlift.load(model, {"other": EYE})


def test_unchanged_tensors_still_come_from_the_file(tmp_path: Path) -> None:
    """Only what the method changed is in memory: a skeleton maps the rest."""
    torchlift.save(Permuting(), path := tmp_path / "a.safetensors")
    report = torchlift.load(torchlift.skeleton(Permuting), path)
    assert {key: report.source[key] for key in report.loaded} == {
        "qkv.weight": "memory", "qkv.bias": "mmap", "out.weight": "mmap", "out.bias": "mmap",
    }  # fmt: skip


# ---- what is of `load_state_dict` alone


def test_what_fails_after_the_values_are_placed_is_undone() -> None:
    """The second half of the method raises, and writes before: the model is as it was."""

    def fails(model: Any, state: Any, load: Any) -> None:
        load(state)
        model.weight.data.zero_()
        raise ValueError("the table is too old")

    model = own_method(nn.Linear, fails)(2, 2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="too old"):
        torchlift.load(model, nn.Linear(2, 2).state_dict())
    assert same(model.state_dict(), before)


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


def test_two_loads_of_one_model_at_once_are_refused() -> None:
    """The second names the first; neither waits for the other's events."""
    inside, go_on = threading.Event(), threading.Event()

    def slow(model: Any, state: Any, load: Any) -> Any:
        inside.set()
        assert go_on.wait(60)
        return load(state)

    model = own_method(nn.Linear, slow)(2, 2)
    first = threading.Thread(target=torchlift.load, args=(model, LINEAR))
    first.start()
    assert inside.wait(60)
    with pytest.raises(torchlift.PlacementError, match="another load"):
        torchlift.load(model, LINEAR)
    go_on.set()
    first.join()
    assert same(dict(model.state_dict()), LINEAR)
    torchlift.load(model, LINEAR)


def test_a_method_that_calls_load_is_refused_with_a_way_out() -> None:
    """It would call itself; the method of nn.Module is what it has to call."""
    model = own_method(nn.Linear, lambda m, state, load: torchlift.load(m, state))(2, 2)
    with pytest.raises(torchlift.PlacementError, match=r"super\(\)\.load_state_dict"):
        torchlift.load(model, LINEAR)
    torchlift.load(model := own_method(nn.Linear, lambda m, state, load: load(state))(2, 2), LINEAR)
    assert same(dict(model.state_dict()), LINEAR)


def test_a_method_may_be_more_lenient_than_the_call() -> None:
    """It passes strict=False on: what it drops stays, and a warning names it."""

    def lenient(model: Any, state: Any, load: Any) -> Any:
        found = load({"weight": state["weight"]}, strict=False)
        model.lacking = list(found.missing_keys)
        return found

    model = own_method(nn.Linear, lenient)(2, 2)
    bias = model.bias.detach().clone()
    with pytest.warns(UserWarning, match="bias"):
        torchlift.load(model, LINEAR)
    assert same(dict(model.state_dict()), {**LINEAR, "bias": bias})
    assert model.lacking == ["bias"]


def test_hooks_and_submodules_see_what_torch_lets_them_see() -> None:
    """Hooks run once, after the method's first half; the method of a child does not run."""
    calls: list[str] = []

    def around(model: Any, state: Any, load: Any) -> Any:
        calls.append("first half")
        found = load(state)
        calls.append("second half")
        return found

    child = own_method(nn.Linear, lambda m, s, load: calls.append("child") or load(s))(2, 2)
    hooked(child, lambda *_: calls.append("pre"), lambda *_: calls.append("post"))
    model = own_method(nn.Sequential, around)(child)
    model.load_state_dict(state := model.state_dict())
    by_torch = [*calls]
    calls.clear()
    torchlift.load(model, state)
    assert calls == by_torch == ["first half", "pre", "post", "second half"]
    assert len(child._load_state_dict_post_hooks) == 1


def test_wrapped_models_use_the_method_of_what_they_wrap(tmp_path: Path) -> None:
    """A compiled model loads the file of a bare one; under its own names it loads as in torch."""
    torchlift.save(right := Permuting(), path := tmp_path / "a.pt")
    compiled = torch.compile(Permuting(), backend="eager")
    torchlift.load(compiled, path)
    assert same(compiled._orig_mod, right)
    state = {f"_orig_mod.{name}": value for name, value in right.state_dict().items()}
    torchlift.load(one := torch.compile(Permuting(), backend="eager"), state)
    (two := torch.compile(Permuting(), backend="eager")).load_state_dict(state)
    assert same(one._orig_mod, two._orig_mod)


def test_a_copy_that_code_makes_of_a_module_has_no_part_in_the_load() -> None:
    """A target network is copied while the model loads. It can be loaded and saved afterwards."""

    def copy_it(module: Any, _: Any) -> None:
        object.__setattr__(module, "target", copy.deepcopy(module["net"]))

    torchlift.load(model := hooked(layers(net=square()), after=copy_it), {"net.weight": EYE})
    assert model.target.weight.tolist() == [[1, 0], [0, 1]]
    with pytest.raises(RuntimeError, match="junk"):
        model.target.load_state_dict({"weight": torch.ones(2, 2), "junk": torch.ones(1)})
    copied = pickle.loads(pickle.dumps(model.target))
    torchlift.load(copied, {"weight": torch.zeros(2, 2)})
    assert copied.weight.tolist() == [[0, 0], [0, 0]]

"""What `load` takes as a checkpoint, and what it takes for the model."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from int8_weights import quantise_linear
from small_models import unchanged
from torch import nn
from zoo import Stated

import torchlift
from torchlift._model.handlers import clone_of


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def state(value: float) -> dict[str, torch.Tensor]:
    return {key: torch.full_like(tensor, value) for key, tensor in build().state_dict().items()}


class Model(nn.Module):
    """A backbone and a head, with a buffer that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 2)
        self.register_buffer("inverse", 1 / torch.arange(1.0, 3.0), persistent=False)


def test_a_state_dict_in_memory_is_copied_in(tmp_path):
    """What the caller has stays the caller's, and nested containers have dotted names."""
    given_, model = state(1), torchlift.skeleton(build)
    report = torchlift.load(model, {"model": given_, "step": 3}, root="model")
    with torch.no_grad():
        model[0].weight.add_(1)
    assert given_["0.weight"].eq(1).all()
    assert {item.path for item in report.loaded.values()} == {"the state dict"}
    nested = {"0": {"weight": torch.zeros(4, 3), "bias": torch.zeros(4)}, "1": nn.Linear(4, 2)}
    nested["1"] = nested["1"].state_dict()
    torchlift.load(model, nested)
    assert model[0].weight.eq(0).all()
    with pytest.raises(torchlift.FormatError, match="does not contain this container"):
        torchlift.load(model, {"model": given_}, root="modle")


@pytest.mark.parametrize("live", [True, False])
def test_a_later_checkpoint_wins_and_the_report_says_which(tmp_path, live):
    """A base, an adapter's file and a tensor in memory, each over what came before."""
    base, adapter = tmp_path / "base.pt", tmp_path / "adapter.pt"
    torch.save(state(1), base)
    torch.save({"1.weight": torch.full((2, 4), 2.0), "1.bias": torch.full((2,), 2.0)}, adapter)
    model = build() if live else torchlift.skeleton(build)
    layers = [str(base), torchlift.open(adapter), {"1.bias": torch.full((2,), 3.0)}]
    planned = torchlift.plan(model, layers)
    report = torchlift.load(model, layers, verify=True)
    assert {key: item.path for key, item in report.loaded.items()} == {
        "0.weight": str(base), "0.bias": str(base), "1.weight": str(adapter),
        "1.bias": "the state dict",
    }  # fmt: skip
    assert planned.source == report.source
    values = {key: tensor.unique().tolist() for key, tensor in model.state_dict().items()}
    assert values == {"0.weight": [1], "0.bias": [1], "1.weight": [2], "1.bias": [3]}
    assert f"from {base}: 2" in str(report)
    with pytest.raises(TypeError, match="list of checkpoints is empty"):
        torchlift.load(model, [])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [(3, "a path or a binary file object, not int"), (bytes(999), "io.BytesIO")],
)
def test_what_is_neither_a_path_nor_a_file_is_refused(wrong, says):
    """The content of a file is not printed."""
    with pytest.raises(TypeError, match=says) as caught:
        torchlift.open(wrong)
    assert len(str(caught.value)) < 100


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_a_skeleton_keeps_the_dtype_that_it_was_cast_to(cast):
    """Buffers that are replayed, a new head and what is loaded end as a cast model has them."""
    source = Model()
    saved = {key: value for key, value in source.state_dict().items() if key.startswith("body")}
    model = getattr(torchlift.skeleton(Model), cast)()
    torchlift.load(model, saved, allow_missing=["head.*"])
    expected = getattr(Model(), cast)()
    for name, tensor in [*expected.named_parameters(), *expected.named_buffers()]:
        assert model.get_buffer(name).dtype == tensor.dtype if name == "inverse" else True
        assert dict(model.named_parameters()).get(name, tensor).dtype == tensor.dtype
    assert torch.equal(model.inverse, expected.inverse)
    assert torch.equal(model.body.weight, getattr(source.body.weight, cast)())


def test_a_replayed_head_has_the_dtype_of_what_is_around_it():
    """As transformers does: a half precision checkpoint makes no model of two precisions."""
    saved = {key: value.bfloat16() for key, value in Model().body.state_dict().items()}
    model = torchlift.skeleton(Model)
    torchlift.load(model, {"body": saved}, allow_missing=["head.*"])
    assert model.head.weight.dtype == torch.bfloat16
    assert model.inverse.dtype == torch.float32


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("bfloat16", torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("torch.float16", torch.float16),
        ("model", torch.float32),
    ],
)
def test_a_dtype_may_be_a_name(dtype, expected):
    """Of torch's, or the model's own."""
    model = torchlift.skeleton(Model)
    torchlift.load(model, Model().double().state_dict(), dtype=dtype)
    assert model.body.weight.dtype == expected
    model = torchlift.skeleton(Model)
    torchlift.load(model, Model().double().state_dict(), dtype=lambda entry: dtype)
    assert model.body.weight.dtype == expected
    with pytest.raises(ValueError, match='expected a name such as "bfloat16", or "model"'):
        torchlift.load(model, {}, dtype="fp17")


def test_stages_leave_to_a_later_load_what_is_not_theirs():
    """Nothing of the other stage is loaded or replayed."""
    model = torchlift.skeleton(Model)
    saved = Model().state_dict()
    late = lambda entry: "meta" if entry.key.startswith("head") else None  # noqa: E731
    report = torchlift.load(model, saved, device=late)
    assert report.deferred == ["head.weight", "head.bias"]
    assert model.head.weight.is_meta
    assert "left for later (2): head.weight, head.bias" in str(report)
    del saved["head.bias"]
    report = torchlift.load(torchlift.skeleton(Model), saved, device=late, strict=False)
    assert report.replayed == ["inverse"]


@pytest.mark.parametrize("mode", ["auto", "assign", "swap", "copy"])
@pytest.mark.parametrize("live", [True, False])
def test_a_transform_never_gets_or_places_the_callers_own_tensor(mode, live):
    """One that writes in place writes to a copy, and the model has memory of its own."""
    saved, model = state(1), build() if live else torchlift.skeleton(build)
    torchlift.load(model, saved, mode=mode, transform=lambda key, tensor: tensor.mul_(2))
    assert all(tensor.eq(1).all() for tensor in saved.values())
    assert all(tensor.eq(2).all() for tensor in model.state_dict().values())
    ours = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert ours.isdisjoint(tensor.data_ptr() for tensor in saved.values())


def test_what_the_model_needs_is_refused_if_only_unpickling_could_rebuild_it(tmp_path):
    """What it does not need can be left out by its name, beside a flat state dict, too."""
    torch.save({**state(1), "args": re.compile("a")}, tmp_path / "x.pt")
    assert torchlift.load(build(), tmp_path / "x.pt", strict=False).unexpected_keys == ["args"]
    torch.save({**state(1), "1.bias": re.compile("a")}, tmp_path / "x.pt")
    with pytest.raises(torchlift.UnsafeError, match=r"'1\.bias'"):
        torchlift.load(build(), tmp_path / "x.pt", strict=False)


@pytest.mark.parametrize("inside", [True, False])
def test_all_that_only_unpickling_could_rebuild_is_in_one_error(tmp_path, inside):
    """One at a time, the way out that leaves out all of it came last."""
    odd = {"args": SimpleNamespace(lr=0.1), "cfg": re.compile("a"), "best": 0.9}
    torch.save({"model": state(1), **odd} if inside else {**state(1), **odd}, tmp_path / "x.pt")
    with pytest.raises(torchlift.UnsafeError, match="'args'") as caught:
        torchlift.load(build(), tmp_path / "x.pt")
    assert caught.value.lists == ["blocked (2): args, cfg"]
    hint = caught.value.hint
    assert "Load without them: allow_unexpected=[...] with their names" in hint
    first = "The model's names are in a container: pass root='model' for that alone. "
    assert hint.startswith(first) == inside
    ways = {"root": "model"} if inside else {"allow_unexpected": ["args", "cfg", "best"]}
    assert not torchlift.load(build(), tmp_path / "x.pt", **ways).missing_keys


def test_a_counter_that_batch_norm_makes_up_is_no_sign_that_anything_fits():
    """Nothing of the checkpoint is in the model."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(torchlift.MismatchError, match="nothing in the checkpoint fits"):
        torchlift.load(model, {"other": torch.ones(1)}, strict=False)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("door", ["memory", "file"])
def test_what_is_no_tensor_is_named_once(tmp_path, door, strict):
    """Neither as missing nor as unexpected, with advice about names; and never passed over."""
    given = {**state(1), "0.bias": 3}
    if door == "file":
        torch.save(given, tmp_path / "x.pt")
        given = tmp_path / "x.pt"
    model = build()
    refused = pytest.raises(torchlift.MismatchError, match="not a tensor in the checkpoint")
    with unchanged(model), refused as caught:
        torchlift.load(model, given, strict=strict)
    assert "unexpected" not in str(caught.value)


@pytest.mark.parametrize("later", ["file", "memory"])
@pytest.mark.parametrize("name", ["", "net."])
def test_the_extra_state_of_a_later_checkpoint_wins_as_a_whole(tmp_path, later, name):
    """Not key by key: what only the earlier one has is not in it."""
    first = {"a": torch.ones(1), "old": torch.ones(1), "list": [torch.ones(1), 1], "n": 1}
    second = {"a": torch.zeros(1), "list": (torch.zeros(1), 2), "n": 2}

    def model(extra):
        made = Stated(extra)
        return nn.ModuleDict({"net": made}) if name else made

    states = [{**model(extra).state_dict()} for extra in (first, second)]
    for number, one in enumerate(states):
        torch.save(one, tmp_path / f"{number}.pt")
    layers = [tmp_path / "0.pt", tmp_path / "1.pt" if later == "file" else states[1]]
    for order, expected in ((layers, second), (layers[::-1], first)):
        target = model(None)
        torchlift.load(target, order)
        found = (target["net"] if name else target).extra
        assert str(found) == str(expected)
    only = {name + "weight": torch.ones(2)}
    target = model(None)
    torchlift.load(target, [*layers, only])
    assert str((target["net"] if name else target).extra) == str(second)


@pytest.mark.parametrize("make", [Stated, lambda: torchlift.skeleton(Stated)])
def test_extra_state_in_memory_stays_the_callers(make):
    """A module keeps a copy, of the containers, of what they hold, and of tensors."""
    weird = SimpleNamespace(rows=[1, 2])
    extra = {"table": [torch.zeros(2)], "scales": {"x": 1}, "weird": weird}
    state = {"weight": torch.ones(2), "_extra_state": extra}
    model = make()
    torchlift.load(model, state)
    model.extra["table"][0].add_(1)
    model.extra["table"].append(3)
    model.extra["scales"]["y"] = 2
    model.extra["weird"].rows.append(3)
    assert state["_extra_state"] is extra
    assert (len(extra["table"]), extra["scales"], weird.rows) == (1, {"x": 1}, [1, 2])
    assert not extra["table"][0].any()


def test_a_module_that_changes_its_extra_state_leaves_an_open_checkpoint_as_it_is(tmp_path):
    """Loaded from twice, it gives the same twice."""
    torch.save(Stated({"calls": [1]}).state_dict(), tmp_path / "x.pt")
    ckpt = torchlift.open(tmp_path / "x.pt")
    for _ in range(2):
        model = Stated()
        torchlift.load(model, ckpt)
        assert model.extra == {"calls": [1]}
        model.extra["calls"].append(2)


# ---- calls in another order, and objects in place of their state dicts


LOAD, SAVE, CONVERT = (
    "torchlift.load(model, path)", "torchlift.save(model, path)",
    "torchlift.convert(source, destination)",
)  # fmt: skip
OPTIMIZER = "torchlift.load_optimizer(model, optimizer, path)"
#: Calls of a model and a path -> the call that the error names.
CALLS: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "a path alone": (lambda m, p: torchlift.load(p), LOAD),
    "a path first": (lambda m, p: torchlift.load(p, m), LOAD),
    "a class": (lambda m, p: torchlift.load(type(m), p), "torchlift.skeleton(Sequential, ...)"),
    "a plan of a path": (lambda m, p: torchlift.plan(p), "torchlift.plan(model, path)"),
    "saved to a state": (lambda m, p: torchlift.save(p, m.state_dict()), SAVE),
    "a path saved": (lambda m, p: torchlift.save(p, p.with_name("y.pt")), CONVERT),
    "converted to nothing": (lambda m, p: torchlift.convert(p), CONVERT),
    "one side of a diff": (lambda m, p: torchlift.diff(p), "torchlift.diff(a, b)"),
    "the optimizer left out": (lambda m, p: torchlift.load_optimizer(m, p), OPTIMIZER),
    "the optimizer last": (lambda m, p: torchlift.load_optimizer(m, p, sgd(m)), OPTIMIZER),
}


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters())


@pytest.mark.parametrize("name", CALLS)
def test_a_call_with_arguments_in_another_order_names_the_right_call(name, tmp_path):
    """Nothing was read or written."""
    path, model = tmp_path / "x.pt", build()
    torch.save(state(1), path)
    before = path.read_bytes()
    call, way = CALLS[name]
    with pytest.raises(TypeError, match=re.escape(way)):
        call(model, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("make", [lambda m: {"a": m}, lambda m: {"0": m[0]}, lambda m: {"a": [m]}])
def test_a_module_inside_of_a_dict_is_named(make, tmp_path):
    """The way out is the module's state dict; what comes of it says how the names are matched."""
    model, given = build(), make(build())
    for call in (torchlift.load, torchlift.plan):
        with pytest.raises(torchlift.MismatchError, match=r"Pass what its state_dict\(\) returns"):
            call(model, given)
    with pytest.raises(torchlift.PlacementError, match=r"Pass what its state_dict\(\) returns"):
        torchlift.convert(given, tmp_path / "new.pt")
    assert not list(tmp_path.iterdir())


def test_an_optimizer_in_place_of_its_state_is_named():
    """Alone, in a dict, and below a root."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for root in (None, "optimizer"):
        with pytest.raises(torchlift.FormatError, match=r"Pass what its state_dict\(\) returns"):
            torchlift.load_optimizer(model, optimizer, {"optimizer": optimizer}, root=root)
        torchlift.load_optimizer(model, optimizer, {"optimizer": optimizer.state_dict()}, root=root)
    with pytest.raises(TypeError, match=r"Use the state_dict\(\) of this SGD"):
        torchlift.load_optimizer(model, optimizer, optimizer)


@pytest.mark.parametrize("kind", ["plain", "subclass", "wrappers"])
@pytest.mark.parametrize("mode", ["copy", "auto"])
def test_values_trade_places(kind, mode):
    """Also of a plain parameter and one of a subclass, which are copied one after the other."""
    model = pair(kind)
    before = {key: clone_of(value) for key, value in model.state_dict().items()}
    other = {"a": "b", "b": "a"}
    state = {f"{other[key[0]]}{key[1:]}": value for key, value in model.state_dict().items()}
    torchlift.load(model, state, mode=mode)
    for key, value in model.state_dict().items():
        expected = before[f"{other[key[0]]}{key[1:]}"]
        if kind == "wrappers" and key.endswith("weight"):
            value, expected = value.dequantised(), expected.dequantised()
        assert torch.equal(value.as_subclass(torch.Tensor), expected.as_subclass(torch.Tensor)), key


class Marked(torch.Tensor):
    """A subclass with memory of its own."""


def pair(kind: str) -> nn.Module:
    model = nn.Module()
    torch.manual_seed(0)
    model.a, model.b = nn.Linear(4, 4), nn.Linear(4, 4)
    if kind == "subclass":
        model.b.weight = nn.Parameter(model.b.weight.detach().as_subclass(Marked))
    if kind == "wrappers":
        quantise_linear(model, None)
    return model

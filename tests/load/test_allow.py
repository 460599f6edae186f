"""`allow_classes=`, and what `torch.load` makes of other tensors: rebuilt, nothing run."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from int8_weights import Int8, quantise_linear
from torch import nn
from zoo import Bag

import torchlift
from torchlift import UnsafeError

RAN: list[str] = []


class Marked(torch.Tensor):
    """A subclass with memory of its own, and attributes."""


class Way(enum.Enum):
    FAST = "fast"
    SLOW = "slow"


@dataclass(frozen=True)
class Grain:
    size: int
    way: Way


class Grained(Int8):
    """A wrapper with more than tensors in its state."""

    def __init__(self, values: Any, scale: Any, dtype: Any = torch.float32) -> None:
        super().__init__(values, scale, dtype)
        self.grain = Grain(32, Way.SLOW)
        self.notes = {"shape": values.shape, "dtype": torch.int8, "layout": torch.strided}


class Told(Int8):
    """A wrapper that takes its state itself."""

    def __setstate__(self, state: Any) -> None:
        self.told = True
        self.values_int8, self.scale = state["values_int8"], state["scale"]


class Canary:
    """Notes that it was made."""

    def __init__(self) -> None:
        RAN.append("init")

    def __new__(cls) -> Canary:
        RAN.append("new")
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        RAN.append("state")


def weights(kind: type, rows: int = 4) -> Any:
    values = torch.arange(rows * 3, dtype=torch.int8).view(rows, 3)
    return kind(values, torch.linspace(0.5, 2, rows).view(rows, 1))


def same(one: Any, two: Any) -> None:
    assert type(one) is type(two)
    assert (one.shape, one.dtype, one.requires_grad) == (two.shape, two.dtype, two.requires_grad)
    assert zoo.same(vars(one), vars(two))
    if not isinstance(one, Int8):
        assert zoo.same(one.as_subclass(torch.Tensor), two.as_subclass(torch.Tensor))


def saved(path: Any, **values: Any) -> Any:
    torch.save(values, path)
    return path


@pytest.fixture
def path(tmp_path: Any) -> Any:
    return tmp_path / "model.pt"


CLASSES = [Int8, Marked, Grained, Told, Grain, Way]


@pytest.mark.parametrize("legacy", [False, True])
def test_classes_that_the_caller_names_are_rebuilt_as_torch_does(path: Any, legacy: bool) -> None:
    """With their attributes, over the file's map; what else there is stays as it was."""
    marked = torch.arange(4.0).as_subclass(Marked)
    marked.note = {"of": [1, "x"]}
    state = {
        "int8": weights(Int8), "marked": marked, "deep": {"grained": weights(Grained)},
        "told": weights(Told), "list": [torch.ones(1), weights(Int8, 2)], "plain": torch.ones(2),
    }  # fmt: skip
    torch.save(state, path, _use_new_zipfile_serialization=not legacy)
    with torch.serialization.safe_globals([*CLASSES, torch.Size]):
        expected = torch.load(path, weights_only=True)
    with torchlift.open(path) as closed:
        assert set(closed.blocked_keys) == {"int8", "marked", "deep.grained", "told", "list.1"}
        with pytest.raises(
            UnsafeError, match=r"'int8': .* name it: allow_classes=\[Int8\], from int8_wei"
        ):
            closed["int8"]
        with pytest.raises(UnsafeError, match="'int8': "):  # it is there: no default stands for it
            closed.get("int8", None)
        assert closed.get("int", None) is None
    ckpt = torchlift.open(path, allow_classes=CLASSES)
    assert (ckpt.blocked, dict(ckpt.blocked_keys), dict(ckpt.blocked_tensors)) == ((), {}, {})
    same(ckpt["int8"], expected["int8"])
    same(ckpt["marked"], expected["marked"])
    same(ckpt["deep.grained"], expected["deep"]["grained"])
    same(ckpt["told"], expected["told"])
    same(ckpt["list.1"], expected["list"][1])
    assert ckpt["told"].told
    kind = ckpt.entries["int8"].kind
    assert kind is not None
    assert (kind.name, len(kind.tensors)) == ("subclass", 2)
    assert ckpt.entries["int8"].nbytes == 12 + 16
    same(ckpt.tree()["list"][1], expected["list"][1])
    same(
        torchlift.open(path, root="deep", allow_classes=CLASSES)["grained"],
        expected["deep"]["grained"],
    )


def test_a_class_may_have_another_name_in_files(path: Any) -> None:
    """As in torch.serialization.safe_globals: a pair of the class and that name."""
    saved(path, w=weights(Int8))
    name = f"{Int8.__module__}.Int8"
    same(torchlift.open(path, allow_classes=[(Int8, name)])["w"], weights(Int8))
    assert torchlift.open(path, allow_classes=[(Int8, "other.Name")]).blocked_keys


@pytest.mark.parametrize("allow", [Int8, "int8_weights.Int8", ["int8_weights.Int8"], [len], [1]])
def test_only_classes_can_be_allowed(path: Any, allow: Any) -> None:
    """A name is no class: nothing is imported for a file."""
    saved(path, w=weights(Int8))
    with pytest.raises(TypeError, match=r"expected .*classes of tensors"):
        torchlift.open(path, allow_classes=allow)
    with pytest.raises(TypeError, match=r"expected .*classes of tensors"):
        torchlift.load(nn.Linear(2, 2), path, allow_classes=allow)


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4))


#: How a model starts that takes tensors of a class.
STARTS = {
    "skeleton": lambda: torchlift.skeleton(linear),
    "quantised on meta": lambda: quantise_linear(linear()),
    "quantised": lambda: quantise_linear(linear(), None),
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("source", ["mmap", "read"])
def test_models_take_tensors_of_allowed_classes(path: Any, start: str, source: Any) -> None:
    """Plan and load; from a path, an open checkpoint, and a list."""
    expected = quantise_linear(linear(), None)
    torch.save(expected.state_dict(), path)
    for given in (path, torchlift.open(path), [path]):
        target = STARTS[start]()
        with pytest.raises(UnsafeError, match=r"'0\.weight'.*allow_classes=\[Int8\]"):
            torchlift.plan(target, given)
        plan = torchlift.plan(target, given, allow_classes=[Int8], source=source)
        report = torchlift.load(target, given, allow_classes=[Int8], source=source)
        assert plan.mode == report.mode
        same(target[0].weight.data, expected[0].weight.data)
        assert isinstance(target[0].weight, nn.Parameter)
        assert torch.equal(target[0].bias, expected[0].bias)
        if start == "skeleton":
            nbytes = 12 + 4 * 4 + 4 * 4 if source == "read" else 0
            assert report.bytes_read == plan.bytes_to_read == nbytes


ARRAYS = {
    "c": np.arange(6.0).reshape(2, 3), "f": np.arange(6, dtype="<i2").reshape(2, 3).T,
    "big": np.arange(3, dtype=">f4"), "scalar": np.array(5), "empty": np.zeros((0, 3), "float16"),
    "text": np.array(["x", "yy"]), "bytes": np.array([b"ab", b"c"]), "flags": np.array([True]),
    "complex": np.array([1 + 2j]), "one": np.float32(2.5),
}  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("legacy", [False, True])
def test_arrays_of_numpy_come_back_as_they_were(path: Any, protocol: int, legacy: bool) -> None:
    """As objects, also inside of others, in the tree, and in the extra state of a module."""
    state = {**ARRAYS, "in": {"list": [1, np.ones(2)]}, "w": torch.ones(2)}
    torch.save(state, path, pickle_protocol=protocol, _use_new_zipfile_serialization=not legacy)
    ckpt = torchlift.open(path)
    tree = ckpt.tree()
    assert not ckpt.blocked
    for key, array in ARRAYS.items():
        for found in (ckpt.objects[key], tree[key]):
            np.testing.assert_array_equal(found, array)
            assert getattr(found, "dtype", array.dtype) == array.dtype
            assert np.asarray(found).flags.writeable
    assert tree["f"].flags.f_contiguous
    np.testing.assert_array_equal(ckpt.objects["in.list"][1], np.ones(2))
    assert "numpy array <f8 [2, 3]" in str(ckpt)
    assert torchlift.diff(path, path).equal


def test_arrays_over_the_same_bytes_are_paid_for(path: Any) -> None:
    """Each is written to by itself, and needs memory of its own."""
    base = np.zeros(1 << 17)
    state = (1, (1 << 17,), np.dtype("f8"), False, base.tobytes())

    class Again:
        def __reduce__(self) -> Any:
            return (*np.zeros(1).__reduce__()[:2], state)

    saved(path, w=torch.ones(2), refs=[Again() for _ in range(300)])
    with pytest.raises(torchlift.FormatError, match="far more data than it stores"):
        torchlift.open(path)


class Described:
    """Pickles as an array whose dtype, shape and bytes are what the writer of a file chose."""

    def __init__(self, code: str, shape: Any, data: bytes) -> None:
        self.code, self.state = code, (shape, data)

    def __reduce__(self) -> Any:
        shape, data = self.state
        made = np.zeros(1).__reduce__()
        return (*made[:2], (1, shape, Coded(self.code), False, data))


class Coded:
    """Pickles as a dtype of numpy's by its code."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> Any:
        return np.dtype, (self.code, False, True), (3, "<", None, None, None, -1, -1, 0)


@pytest.mark.parametrize("code", ["i5", "f3", "b3", "c3", "f0", "u16", "?8", "S", "U", "S0", None])
def test_an_array_of_what_numpy_has_not_stays_blocked(path: Any, code: str | None) -> None:
    """Its bytes say nothing to anybody, and elements that are objects are pickled themselves."""
    odd: Any = np.array([{}, 1], dtype=object)
    if code is not None:
        odd = Described(code, (2,), bytes(2 * int(code[1:] or 0)))
    saved(path, o=odd, w=torch.ones(1))
    ckpt = torchlift.open(path)
    assert set(ckpt.blocked_keys) == {"o"}
    assert dict(ckpt.objects) == {}


@pytest.mark.parametrize(
    ("code", "shape", "fits"),
    [("S1", (0,), True), ("U3", (2, 0), True), ("f8", (0, 3), True), ("b1", (0,), True),
     ("f8", (0,) * 32, True), ("f8", (0, 1 << 61, 1 << 61), False), ("f8", (1 << 61, 0), False),
     ("S9", (1 << 61, 0), False), ("f8", (1,) * 64 + (0,), False), ("U1", (0, 1 << 61, 8), False)],
)  # fmt: skip
def test_an_empty_array_comes_back_if_numpy_takes_its_size(path, code, shape, fits):
    """Or the file is refused as it is opened, like a tensor of such a shape."""
    saved(path, o=Described(code, shape, b""), w=torch.ones(1))
    if not fits:
        with pytest.raises(torchlift.FormatError, match="the size of an array does not match its"):
            torchlift.open(path)
        return
    ckpt = torchlift.open(path)
    for found in (ckpt.objects["o"], ckpt.tree()["o"]):
        assert found.shape == shape
        assert found.dtype == np.dtype(code)


class Holder(Int8):
    """A wrapper that has others among its attributes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.inside: Any = None


def test_a_subclass_inside_of_another_is_made_too(path: Any) -> None:
    """Where both are allowed."""
    value = weights(Holder)
    value.inside = {"list": [weights(Int8), torch.ones(3)]}
    saved(path, w=value)
    found = torchlift.open(path, allow_classes=[Holder, Int8])["w"]
    same(found.inside["list"][0], weights(Int8))
    assert torch.equal(found.inside["list"][1], torch.ones(3))


def shared_lists() -> Any:
    value, inside = weights(Holder, 1), [1]
    for _ in range(45):
        inside = [inside, inside]
    value.inside = inside
    return value


def shared_tensors() -> Any:
    value = weights(Holder, 1)
    for _ in range(45):
        pair = [weights(Holder, 1), weights(Holder, 1)]
        pair[0].inside = pair[1].inside = value
        value = weights(Holder, 1)
        value.inside = pair
    return value


def a_loop() -> Any:
    value, inside = weights(Holder, 1), []
    inside.append(inside)
    value.inside = inside
    return value


@pytest.mark.parametrize("make", [shared_lists, shared_tensors, a_loop])
def test_what_unfolds_to_more_than_was_stored_is_refused(path: Any, make: Any) -> None:
    """Before anything is made, and whether or not the class is allowed."""
    saved(path, w=make())
    for allow in ([], [Holder]):
        with pytest.raises(torchlift.CheckpointError):
            torchlift.open(path, allow_classes=allow)


class Stated:
    """Pickles as a tensor of a class whose attributes are what the writer of a file chose."""

    def __init__(self, tensor: Any, state: Any) -> None:
        self.tensor, self.state = tensor, state

    def __reduce_ex__(self, protocol: Any) -> Any:
        function, (rebuild, kind, arguments, _) = self.tensor.__reduce_ex__(2)
        return function, (rebuild, kind, arguments, self.state)


def marked(*shape: int) -> Any:
    return torch.zeros(*shape).as_subclass(Marked)


def inside(**changes: Any) -> dict[str, Any]:
    """What an Int8 of four rows has, and changes of it; None takes an attribute out."""
    values = {"values_int8": torch.ones(4, 3, dtype=torch.int8), "scale": torch.ones(4, 1)}
    return {name: value for name, value in (values | changes).items() if value is not None}


STATES = {
    "other numbers": (marked(2, 3), {"data": torch.ones(3, 2)}, "'data'"),
    "more of them": (marked(2, 3), {"data": torch.ones(7)}, "'data'"),
    "of another dtype": (marked(2, 3), {"data": torch.ones(2, 3, dtype=torch.int32)}, "'data'"),
    "a gradient": (marked(2), {"grad": torch.ones(2)}, "'grad'"),
    "a method": (marked(2), {"detach": Way}, "'detach'"),
    "no method": (marked(2), {"detach": 1}, "'detach'"),
    "a tensor for a method": (marked(2), {"detach": torch.ones(2)}, "'detach'"),
    "a method of its own": (weights(Int8), inside(dequantised=Way), "'dequantised'"),
    "another class": (marked(2), {"__class__": Way}, "'__class__'"),
    "in slots": (marked(2), ({}, {"data": torch.ones(3)}), "'data'"),
    "no scale": (weights(Int8), inside(scale=None), "no attribute 'scale'"),
    "a number": (weights(Int8), inside(scale=1.0), "'scale' is a float"),
    "of another shape": (weights(Int8), inside(values_int8=torch.ones(3, 4).to(torch.int8)),
                         r"float32 \[3, 4\], and the file says float32 \[4, 3\]"),
}  # fmt: skip


@pytest.mark.parametrize("what", STATES)
def test_attributes_cannot_make_a_tensor_something_else(path: Any, what: str) -> None:
    """Neither other values, nor another class, nor one that lacks what its class needs."""
    tensor, state, says = STATES[what]
    saved(path, w=Stated(tensor, state))
    model = Bag({"w": torch.zeros(tensor.shape)})
    allow = [Int8, Marked, Way]
    with pytest.raises(torchlift.FormatError, match=rf"'w': (Int8|Marked) rejects .*{says}"):
        torchlift.open(path, allow_classes=allow)["w"]
    for call in (torchlift.plan, torchlift.load):
        with pytest.raises(torchlift.FormatError, match=says):
            call(model, path, allow_classes=allow, mode="assign")
    assert type(model.w) is torch.Tensor


class Restated:
    """Pickles as a member of an enum that is given a state."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Way, ("slow",), {"_value_": "changed"}


def changed(kind: type, **attributes: Any) -> Any:
    """A wrapper with other attributes; None takes one away."""
    value = weights(kind)
    vars(value).update(attributes)
    for name in [name for name, each in attributes.items() if each is None]:
        del vars(value)[name]
    return value


def another_class() -> Grain:
    grain = Grain(1, Way.SLOW)
    vars(grain)["__class__"] = Canary
    return grain


GRAINS, UNLISTED = [Grained, Grain, Way], "'w': .*made of a class that allow_classes.*"
#: What is wrong -> a value, classes that are allowed, and what is said.
WRONG: dict[str, tuple[Any, list[type], Any, str]] = {
    "a class inside": (weights(Grained), [Grained], UnsafeError, UNLISTED + "(Grain|Way)"),
    "a foreign one inside": (
        changed(Grained, grain=Canary()), GRAINS, UnsafeError, UNLISTED + "Canary"
    ),
    "a subclass inside": (
        changed(Holder, inside=[weights(Int8)]), [Holder], UnsafeError, UNLISTED + "Int8"
    ),
    "a state that its class refuses": (
        changed(Told, scale=None), [Told], torchlift.FormatError,
        "'w': Told rejects the stored values.*KeyError: 'scale'",
    ),
    "an object of another class": (
        changed(Grained, grain=another_class()), [*GRAINS, Canary], torchlift.FormatError,
        "the state replaces '__class__'",
    ),
    "a member of an enum": (
        changed(Grained, grain=Restated()), [Grained, Way], torchlift.FormatError,
        "'w': Grained rejects",
    ),
    "a member of an enum that torch was told": (
        changed(Grained, grain=Restated()), [Grained], torchlift.FormatError,
        "'w': Grained rejects",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_not_what_the_caller_allowed_is_refused(path: Any, what: str) -> None:
    """With the entry; nothing runs, and the process keeps its own members of enums."""
    value, allow, error, says = WRONG[what]
    saved(path, w=value)
    RAN.clear()
    with (
        torch.serialization.safe_globals([Way] if "told" in what else []),
        pytest.raises(error, match=says),
    ):
        torchlift.open(path, allow_classes=allow)["w"]
    assert RAN == []
    assert (Way.SLOW.value, Way("slow")) == ("slow", Way.SLOW)


def test_of_what_a_library_told_torch_only_members_of_enums_are_taken(path: Any) -> None:
    """Looked up, where nothing is called; what else is lacking is listed at once."""
    value = weights(Grained)
    saved(path, w=value, way=Way.FAST)
    with torch.serialization.safe_globals([Grain, Way]):
        with pytest.raises(UnsafeError, match=r"allow_classes does not list.*found [\w.]*Grain\. "):
            torchlift.open(path, allow_classes=[Grained])["w"]
        ckpt = torchlift.open(path, allow_classes=[Grained, Grain])
        same(ckpt["w"], value)
        assert list(ckpt.blocked_keys) == ["way"]
        assert list(torchlift.open(path).blocked_keys) == ["w", "way"]
    value.notes = {"canary": Canary()}
    saved(path, w=value)
    RAN.clear()
    with (
        torch.serialization.safe_globals([Canary]),
        pytest.raises(UnsafeError, match=r"found [\w.]*Grain, [\w.]*Way, [\w.]*Canary\. "),
    ):
        torchlift.open(path, allow_classes=[Grained])["w"]
    assert RAN == []


def test_a_class_is_allowed_for_the_checkpoint_that_it_was_allowed_for(tmp_path: Any) -> None:
    """Of several, each has its own; what `load` allows holds for all of them."""
    one = saved(tmp_path / "a.pt", a=weights(Grained), b=torch.ones(1))
    two = saved(tmp_path / "b.pt", b=weights(Grained))
    blank = partial(torchlift.skeleton, Bag, dict.fromkeys("ab", torch.zeros(4, 3)))
    allow = [Grained, Grain, Way]
    first = torchlift.open(one, allow_classes=allow)
    for second in (two, torchlift.open(two)):
        with pytest.raises(UnsafeError, match=r"'b'.*allow_classes=\[Grained\]"):
            torchlift.load(blank(), [first, second])
    with pytest.raises(
        UnsafeError, match=r"'b': .*allow_classes does not list.*found [\w.]*Grain, "
    ):
        torchlift.load(blank(), [first, torchlift.open(two, allow_classes=[Grained])])
    for given, more in (
        ([first, torchlift.open(two, allow_classes=allow)], []),
        ([first, two], allow),
        ([first, torchlift.open(two, allow_classes=[Grained])], [Grain, Way]),
    ):
        model = blank()
        torchlift.load(model, given, allow_classes=more)
        same(model.a, weights(Grained))
        same(model.b, weights(Grained))

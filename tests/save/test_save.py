"""What `torchlift.save` writes, as torch, safetensors, transformers and DCP read it."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hub_files import damage
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from limits import limits
from safetensors import safe_open
from safetensors.torch import load_file
from save_states import TYPES
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from zoo import Tied, same

import torchlift
from torchlift.errors import FormatError, IntegrityError, PlacementError

#: format -> the name to save under.
NAMES = {
    "torch-zip": "x.pt",
    "safetensors": "x.safetensors",
    "sharded": "x.safetensors.index.json",
    "dcp": "x",
}
each_format = pytest.mark.parametrize("format", NAMES)


@each_format
@pytest.mark.parametrize("checksum", [True, False])
def test_a_report_says_what_was_saved_and_verify_what_can_be_checked(
    tmp_path: Path, format: str, checksum: bool
) -> None:
    """With checksums everything is checked, without them nothing."""
    state, path = {"a": torch.ones(3, 2), "b": torch.arange(5), "c": torch.empty(0)}, tmp_path / "x"
    report = torchlift.save(state, path, format=format, checksum=checksum)
    assert (report.format, report.tensors, report.nbytes) == (format, 3, 64)
    assert all(os.path.isfile(file) for file in report.files)
    checked = torchlift.verify(path)
    assert checked.ok
    assert (checked.unchecked_nbytes == 0) is checksum


_ONLY_TENSORS = ("safetensors", "sharded")
_PLAIN = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats(width=32)


@st.composite
def views(draw: st.DrawFn, types: list[torch.dtype]) -> torch.Tensor:
    """A tensor of any dtype, which may be a view of a larger memory, in any layout."""
    dtype = draw(st.sampled_from(types))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    numel = torch.Size(shape).numel()
    count = (numel + 3) * dtype.itemsize
    raw = torch.arange(count, dtype=torch.uint8) % (2 if dtype == torch.bool else 251)
    base = raw.view(dtype)
    kind = draw(st.sampled_from(["dense", "offset", "turned", "stepped", "wide", "conjugate"]))
    made = base[3:] if kind == "offset" else base[:numel]
    made = made.view(shape)
    if kind == "turned":
        made = made.permute(list(reversed(range(made.dim()))))
    elif kind == "stepped" and made.dim():
        made = made[::2]
    elif kind == "wide":
        made = made.unsqueeze(0).expand(3, *shape)
    elif kind == "conjugate" and dtype.is_complex:
        made = made.conj()
    return made


@st.composite
def ways(draw: st.DrawFn) -> tuple[dict[str, Any], bool, tuple[str, str]]:
    """A nested state, whether it is in a file from before torch 1.6, and two formats."""
    formats = draw(st.tuples(st.sampled_from(sorted(NAMES)), st.sampled_from(sorted(NAMES))))
    not_there = (torch.complex128, torch.complex32) if {*formats} & {*_ONLY_TENSORS} else ()
    types = [dtype for dtype in _EVERY if dtype not in not_there]
    is_old = draw(st.booleans())
    if is_old:  # its storages have types of their own, which others have not
        types = [t for t in types if str(t).removeprefix("torch.") in _OLD]
    tensor = views(types)
    nested = st.recursive(
        tensor | _PLAIN,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["a", "A", "b.c", "é"]), inner, max_size=3)
        ),
        max_leaves=6,
    )
    model = {f"k.{at}": value for at, value in enumerate(draw(st.lists(tensor, max_size=3)))}
    if model and model["k.0"].numel() and draw(st.booleans()):
        model["tied"] = model["k.0"]
    return {"model": model, "rest": draw(nested)}, is_old, formats


_EVERY = (*TYPES, torch.complex32, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
#: dtypes with a class of storage of their own, the only ones of old files.
_OLD = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8",
        "bool", "complex64", "complex128")  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@settings(max_examples=60, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@pytest.mark.parametrize("few", [-1, 64 << 10], ids=["in blocks", "at once"])
@given(way=ways())
def test_a_state_comes_through_any_two_formats(
    tmp_path_factory: pytest.TempPathFactory,
    few: int,
    way: tuple[dict[str, Any], bool, tuple[str, str]],
) -> None:
    """Whatever its dtypes, shapes, layouts, ties and containers; what is lost is in the report."""
    state, is_old, formats = way
    with limits(at_once=few):
        path = tmp_path_factory.mktemp("x") / "first.pt"
        if is_old:
            torch.save(state, path, _use_new_zipfile_serialization=False)
        else:
            torchlift.save(state, path)
        # What would keep nothing at all is refused.
        assume(torchlift.open(path).entries or {*formats}.isdisjoint(_ONLY_TENSORS))
        paths, lost = [path], dict[str, str]()
        for at, format in enumerate(formats):
            path = path.parent / str(at) / NAMES[format]
            path.parent.mkdir()
            lost |= torchlift.convert(paths[-1], path, format=format).lost
            paths.append(path)
            assert torchlift.verify(path).ok
            assert torchlift.verify(path).unchecked_nbytes == 0
        no_objects = not {*formats}.isdisjoint(_ONLY_TENSORS)
        with torchlift.open(paths[0]) as first, torchlift.open(paths[-1]) as last:
            assert last.keys() == first.keys()
            assert all(same(last[key].resolve_conj(), first[key].resolve_conj()) for key in first)
            objects = {key for key in first.objects if key not in last.objects}
            assert objects == (set(first.objects) if no_objects else set())
            assert objects <= lost.keys()
            if "tied" in state["model"]:
                tied = {"model.k.0", "model.tied"}
                assert any(tied <= {*alias} for alias in last.aliases) is ("dcp" not in formats)
                assert ("model.tied" in lost) == ("dcp" in formats)
        found = torchlift.diff(*(paths[at] for at in (0, -1)))
        assert not found.changed
        assert not found.added
        assert set(found.removed) == objects
        if formats[-1] == "torch-zip" and not no_objects:
            assert same(state, torch.load(paths[-1], weights_only=True), kinds=True)


def test_a_tie_is_in_a_torch_file_once(tmp_path: Path) -> None:
    """And after torch.load and torchlift.open both names are one storage."""
    report = torchlift.save(Tied(10, 4, norm=True), tmp_path / "x.pt")
    assert report.tied == {"head.weight": "embed.weight"}
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()
    assert found._metadata["norm"] == {"version": 2}
    assert os.path.getsize(tmp_path / "x.pt") < 4000
    assert torchlift.open(tmp_path / "x.pt").aliases == (("embed.weight", "head.weight"),)


def test_a_tie_is_in_safetensors_under_its_first_name(tmp_path: Path) -> None:
    """The metadata tells the other one, by an entry of torchlift's, and it comes back."""
    model, path = Tied(10, 4, norm=True), tmp_path / "x.safetensors"
    torchlift.save(model, path)
    with safe_open(path, "pt") as file:
        assert "head.weight" not in file.keys()  # noqa: SIM118 - not a dict
        ties = json.loads(file.metadata()["torchlift.ties"])
        assert ties == {"head.weight": "embed.weight"}
        assert file.metadata()["format"] == "pt"
    with torchlift.open(path) as ckpt:
        assert ckpt.aliases == (("embed.weight", "head.weight"),)
        assert dict(ckpt.metadata) == {"format": "pt"}
    untied = nn.ModuleDict({"embed": nn.Embedding(10, 4), "norm": nn.BatchNorm1d(4),
                            "head": nn.Linear(4, 10, bias=False)})  # fmt: skip
    torchlift.load(untied, path)
    assert torch.equal(untied["head"].weight, model.head.weight)
    torchlift.convert(path, tmp_path / "back.pt")
    found = torch.load(tmp_path / "back.pt", weights_only=True)
    assert found["head.weight"].data_ptr() == found["embed.weight"].data_ptr()


def test_views_that_overlap_share_a_storage_in_a_torch_file(tmp_path: Path) -> None:
    """Where a format has no sharing, the report says which keys do not share any more."""
    whole = torch.arange(12.0).view(3, 4)
    state = {"q": whole[:1], "whole": whole, "turned": whole.t(), "apart": torch.ones(3)}
    assert not torchlift.save(state, tmp_path / "x.pt").lost
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    found["whole"][0, 1] = 70
    assert found["q"][0, 1] == found["turned"][1, 0] == 70
    assert found["turned"].stride() == (1, 4)
    report = torchlift.save(state, tmp_path / "x.safetensors")
    assert report.lost.keys() == {"whole", "turned"}
    assert report.lost["whole"] == "shares no memory with q any more"
    for key, value in load_file(tmp_path / "x.safetensors").items():
        assert torch.equal(value, state[key])


def test_a_tiny_view_of_a_large_memory_is_written_compactly(tmp_path: Path) -> None:
    """A torch file and safetensors have its values only. torch.save writes all of the memory."""
    large = torch.arange(100_000.0)
    state = {
        "rows": large[10:13],
        "column": large[7::100],
        "wide": large[:1].expand(9),
    }
    for name in ("x.pt", "x.safetensors"):
        torchlift.save(state, tmp_path / name)
        assert os.path.getsize(tmp_path / name) < 9_000
        with torchlift.open(tmp_path / name) as ckpt:
            assert all(torch.equal(ckpt[key], value) for key, value in state.items())
    torchlift.save({"wide": state["wide"]}, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt")["wide"].stride() == (0,)


def training() -> dict[str, Any]:
    """A nested state with everything that a training has."""
    model = Tied(10, 4, norm=True)
    optimizer = torch.optim.AdamW(model.parameters())
    model.norm(model.embed(torch.arange(10))).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "rng": torch.get_rng_state(),
        "step": 7,
        "history": [0.5, None, "text", b"raw", (1, 2.5j)],
        "lists": [torch.ones(2), {"inner": (torch.zeros(3), 4)}],
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
        "seen": {1, 2},
        "empty": {},
    }


@pytest.mark.parametrize("format", ["torch-zip", "dcp"])
def test_numbers_of_numpy_are_numbers(tmp_path: Path, format: str) -> None:
    """A best loss or a history of them."""
    path = tmp_path / NAMES[format]
    history = [np.float32(0.5), {"hits": np.int64(3)}, (np.bool_(True), np.complex64(1j))]
    state = {"weight": torch.ones(2), "best": np.float64(0.25), "history": history}
    torchlift.save(state, path, format=format)
    with torchlift.open(path) as ckpt:
        found = dict(ckpt.objects)
    assert found == {"best": 0.25, "history": [0.5, {"hits": 3}, (True, 1j)]}
    assert type(found["best"]) is float


def random_states() -> dict[str, Any]:
    """The states of generators, as numpy, Python and torch give them."""
    return {
        "legacy": np.random.RandomState(7).get_state(),
        "named": np.random.RandomState(7).get_state(legacy=False),
        "python": random.Random(7).getstate(),
        "torch": torch.Generator().manual_seed(7).get_state(),
    }


@pytest.mark.parametrize("format", ["torch-zip", "dcp"])
def test_arrays_and_random_states_are_plain_data(tmp_path: Path, format: str) -> None:
    """What weights_only=True reads; the report says what became of an array."""
    arrays = {
        "floats": np.arange(6, dtype=np.float32).reshape(2, 3),
        "turned": np.asfortranarray(np.arange(6, dtype=">i2").reshape(2, 3)),
        "flags": [np.array([True, False]), {"text": np.array(["a", "b"])}],
        "scalar": np.array(3.5),
        "none": np.zeros((0, 2), np.uint8),
        "waves": np.array([1j, 2]),
    }
    path = tmp_path / NAMES[format]
    report = torchlift.save({"arrays": arrays, "rng": random_states()}, path, format=format)
    assert report.lost["arrays.floats"] == "a numpy array of float32 [2, 3], which becomes a list"
    found = torchlift.open(path).tree() if format == "dcp" else torch.load(path, weights_only=True)
    assert found["arrays"] == {
        "floats": [[0, 1, 2], [3, 4, 5]], "turned": arrays["turned"].tolist(),
        "flags": [[True, False], {"text": ["a", "b"]}], "scalar": 3.5, "none": [],
        "waves": [1j, 2],
    }  # fmt: skip
    one, other = np.random.RandomState(), random.Random()
    for name in ("legacy", "named"):
        one.set_state(found["rng"][name])
        assert one.randint(1000) == np.random.RandomState(7).randint(1000)
    other.setstate(found["rng"]["python"])
    assert other.random() == random.Random(7).random()
    assert torch.equal(found["rng"]["torch"], random_states()["torch"])


def test_a_training_s_state_comes_back_as_it_was(tmp_path: Path) -> None:
    """Integer keys, lists and plain data, with weights_only; also what is saved once more."""
    state = training()
    assert not torchlift.save(state, tmp_path / "x.pt").lost
    torchlift.save(torchlift.open(tmp_path / "x.pt"), tmp_path / "again.pt")
    expected = {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in state.items()}
    for name in ("x.pt", "again.pt"):
        found = torch.load(tmp_path / name, weights_only=True)
        assert same(found, expected, kinds=name == "x.pt")
        assert found["model"]._metadata == expected["model"]._metadata
    state["optimizer"].load_state_dict(found["optimizer"])


def test_safetensors_hold_tensors_only(tmp_path: Path) -> None:
    """Plain data is an error that names it."""
    with pytest.raises(PlacementError, match=r"'step': cannot be stored in a safet.* found int"):
        torchlift.save({"model": {"w": torch.ones(2)}, "step": 7}, tmp_path / "x.safetensors")
    assert os.listdir(tmp_path) == []


class Moments(NamedTuple):
    """A named tuple, as optimizers in functional style have."""

    mean: torch.Tensor
    count: int


def other_views() -> dict[str, torch.Tensor]:
    """Tensors whose memory is one, and in a file it is not, since dtypes differ."""
    real, number = torch.ones(4), torch.ones(3, dtype=torch.complex64)
    return {
        "a": real, "tied": real, "bits": real.view(torch.int32), "apart": torch.ones(4),
        "c": number, "real": torch.view_as_real(number), "conj": number.conj(),
    }  # fmt: skip


def noted() -> dict[str, torch.Tensor]:
    """Tensors of classes and with attributes of their own; those of parameters are not lost."""
    one, wrapped, parameter = torch.ones(1), TwoTensor(ONE, ONE), nn.Parameter(ONE)
    for tensor in (one, wrapped, parameter):
        tensor.note = "x"  # type: ignore[attr-defined]
    other = torch.ones(1).as_subclass(type("Plain", (torch.Tensor,), {}))
    return {"a": one, "b": wrapped, "c": parameter, "d": other, "e": nn.Buffer(ONE)}


ONE = torch.ones(1)
TUPLE, NOTE = "a tuple, which becomes a list", "attributes, which are left out: note"
APART = {"bits": "a", "real": "c", "conj": "c"}
APART = {key: f"shares no memory with {kept} any more" for key, kept in APART.items()}
#: A state, and for formats what its report says at least. It says nothing if that is empty.
LOST: list[tuple[Callable[[], Any], dict[str, dict[str, str]]]] = [
    (other_views, {"torch-zip": APART, "safetensors": APART}),
    (noted, {"torch-zip": {"a": NOTE, "b": NOTE, "d": "a Plain, which becomes a Tensor"}}),
    (lambda: {"model": {0: ONE}, "list": [ONE]}, {
        "safetensors": {"model": "names that are not text become text",
                        "list": "a list, whose positions become names"}, "torch-zip": {}}),
    (lambda: {"t": (ONE, 2 * ONE)}, {"dcp": {"t": TUPLE}, "torch-zip": {}}),
    (lambda: (ONE, 2 * ONE), {"dcp": {"(all)": TUPLE}, "torch-zip": {}}),
    (lambda: MappingProxyType({"a": defaultdict(list, {"w": ONE}), "m": [ONE]}), {
        format: {"(all)": "a mappingproxy, which becomes a dict",
                 "a": "a defaultdict, which becomes a dict"} for format in NAMES}),
    (lambda: {"m": [Moments(ONE, 3)], "p": [defaultdict(int, {"x": 1})]}, {
        "torch-zip": {"m.0": "a Moments, which becomes a tuple"}}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "told"), LOST)
def test_what_a_format_changes_is_reported(
    tmp_path: Path, make: Callable[[], Any], told: dict[str, dict[str, str]]
) -> None:
    """Names, containers, classes, attributes and shared memory; the tensors are there."""
    for format, lost in told.items():
        report = torchlift.save(make(), tmp_path / format / NAMES[format], format=format)
        assert report.lost.items() >= lost.items()
        assert lost or not report.lost
        assert len(torchlift.open(report.path)) >= 1


class Opaque:
    """What only unpickling could rebuild."""


@pytest.mark.parametrize(
    ("state", "entry"),
    [
        ({"a": {"b": [1, Opaque()]}}, "a.b"),
        ({"a": [torch.ones(1), {"o": Opaque()}]}, "a.1.o"),
        ({"a": {Opaque: torch.ones(1)}}, "Opaque"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "a.b"),
        ({"a": torch.ones(1, device="meta")}, "a"),
        ({"m": nn.LazyLinear(2)}, "m.weight"),
    ],
)
@each_format
def test_what_no_file_can_hold_is_refused_by_name(
    tmp_path: Path, state: dict[str, Any], entry: str, format: str
) -> None:
    """Before anything is written."""
    with pytest.raises(PlacementError) as met:
        torchlift.save(state, tmp_path / NAMES[format], format=format)
    assert entry in str(met.value.entry)
    assert os.listdir(tmp_path) == []


#: Keys of dictionaries that a program may use, the limits of each format among them.
KEYS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["", ".", "__metadata__", "tensor", "_metadata", "param_groups", "a.b"]),
    st.sampled_from([2**63, 2**64 - 1, 2**64, -(2**63) - 1, 2**70, 10**5000, -(10**5000)]),
    st.integers(), st.floats(), st.booleans(), st.none(), st.complex_numbers(),
    st.binary(max_size=3),
    st.tuples(st.integers() | st.text(max_size=2)), st.just((2**70,)), st.just(torch.float32),
    st.frozensets(st.integers(), max_size=2),
)  # fmt: skip


@each_format
@settings(max_examples=60, deadline=None, suppress_health_check=[*HealthCheck])
@given(key=KEYS, inner=KEYS, nests=st.booleans())
def test_a_key_that_is_saved_can_be_read(
    tmp_path: Path, format: str, key: Any, inner: Any, nests: bool
) -> None:
    """Or nothing is written, and the error names it. What torch loads of it is the same."""
    path = tmp_path / NAMES[format]
    state: dict[Any, Any] = {key: {inner: torch.ones(2)} if nests else torch.ones(2)}
    if format in ("torch-zip", "dcp"):
        state = {"model": state, "plain": {inner: 1}, "list": [{key: {inner: 2}}]}
    try:
        torchlift.save(state, path, format=format)
    except PlacementError:
        assert os.listdir(tmp_path) == []
        return
    try:
        with torchlift.open(path) as ckpt:
            assert [tensor.tolist() for tensor in ckpt.values()] == [[1.0, 1.0]]
            assert not ckpt.blocked_keys
            assert len(ckpt.tree()) == len(state)
            assert str(ckpt)
            assert len(ckpt.objects) == 2 * ("list" in state)
        if format == "torch-zip":
            assert len(torch.load(path)) == len(state)
    finally:
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()


def _levels(count: int, inner: object = ()) -> object:
    for _ in range(count):
        inner = [inner]
    return inner


def _doubled(levels: int) -> list[Any]:
    """A list that unfolds to two to the power of its levels."""
    found: list[Any] = [1]
    for _ in range(levels):
        found = [found, found]
    return found


def _around_itself() -> list[Any]:
    made: list[Any] = [1, "x"]
    made.append({"back": made})
    return made


#: What no reader would read back, or no list could say -> words of the error.
UNREADABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "inside itself": (_around_itself, "contain themselves; expected at most 90 levels"),
    "91 levels": (lambda: _levels(90, []), "at most 90 levels"),
    "100,000 levels": (lambda: _levels(100_000), "at most 90 levels"),
    "shared lists": (lambda: _doubled(40), "expands to far more data than it stores"),
    "a long integer": (lambda: [1, -(2**2039)], "an integer is too long"),
    "a lone surrogate": (lambda: ["\ud800"], "a text is not valid UTF-8"),
    "a large key": (lambda: [{2**64: 1}], "integer of more than 64 bits"),
    "a large tuple": (lambda: [{(1,) * 65: 1}], "a large or deeply nested tuple"),
    "a huge view": (lambda: ONE.expand(10**10), "a broadcast view is absurdly larger"),
    "objects": (lambda: np.array([object()]), r"numpy.*torch\.from_numpy"),
    "a mask": (lambda: np.ma.masked_array([1], [True]), r"numpy.*torch\.from_numpy"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_value_that_no_reader_would_read_back_is_refused(tmp_path: Path, name: str) -> None:
    """Before there is a file that says nothing is wrong with it."""
    make, words = UNREADABLE[name]
    with pytest.raises(PlacementError, match=words):
        torchlift.save({"k": make(), "w": torch.ones(1)}, tmp_path / "x.pt")
    assert os.listdir(tmp_path) == []


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    """With the choices."""
    for name, options, words in [
        ("x.foo", {}, r"suffix '\.foo' .* 'torch-zip', 'sharded', 'dcp'"),
        ("folder", {}, r'pass format="sharded" \(safetensors\)'),
        ("x.pt", {"format": "zip"}, r"'zip': expected one of safetensors, torch-zip, sh"),
        ("x.pt", {"max_shard_size": "1GB"}, "only safetensors have shards"),
        ("x.safetensors", {"max_shard_size": "many"}, "not a size such as"),
    ]:
        with pytest.raises(ValueError, match=words):
            torchlift.save({"w": torch.ones(2)}, tmp_path / name, **options)
    assert os.listdir(tmp_path) == []


def test_nothing_of_the_caller_is_changed(tmp_path: Path) -> None:
    """Neither containers nor tensors, nor what asks for gradients."""
    inner = OrderedDict(w=nn.Parameter(torch.ones(2)))
    state = {"a": inner, "b": [torch.ones(1)]}
    torchlift.save(state, tmp_path / "x.pt")
    assert state["a"] is inner
    assert list(inner) == ["w"]
    assert inner["w"].requires_grad
    assert not torch.load(tmp_path / "x.pt")["a"]["w"].requires_grad


def test_shards_are_as_large_as_they_may_be(tmp_path: Path) -> None:
    """In the order of the state; what is larger has one of its own; few bytes are one file."""
    state = {name: torch.ones(size) for name, size in zip("abcd", (10, 10, 40, 5), strict=True)}
    report = torchlift.save(state, tmp_path / "m.safetensors", max_shard_size=100)
    assert report.format == "sharded"
    names = [f"m-0000{at}-of-00003.safetensors" for at in (1, 2, 3)]
    assert sorted(os.listdir(tmp_path)) == [*names, "m.safetensors.index.json"]
    index = json.loads((tmp_path / "m.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["metadata"] == {"total_size": 260}
    assert index["weight_map"] == {"a": names[0], "b": names[0], "c": names[1], "d": names[2]}
    report = torchlift.save(state, tmp_path / "n.safetensors", max_shard_size="5GB")
    assert report.format == "safetensors"
    folder = tmp_path / "folder"
    torchlift.save(state, folder, format="sharded")
    assert sorted(os.listdir(folder)) == [
        "model-00001-of-00001.safetensors", "model.safetensors.index.json"]  # fmt: skip


def test_transformers_reads_one_file_and_shards(tmp_path: Path) -> None:
    """With its tied head, which it finds by the model's own tie."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    for folder, size in ((tmp_path / "one", None), (tmp_path / "shards", "20kB")):
        config.save_pretrained(folder)
        torchlift.save(model, folder / "model.safetensors", max_shard_size=size)
        found = transformers.AutoModelForCausalLM.from_pretrained(folder)
        for key, value in model.state_dict().items():
            assert torch.equal(found.state_dict()[key], value), key


def test_a_flipped_bit_of_safetensors_is_found(tmp_path: Path) -> None:
    """By verify and by load; in the header, by open."""
    path = tmp_path / "x.safetensors"
    torchlift.save(nn.Linear(3, 2), path)
    before = path.read_bytes()
    damage(path, len(before) - 3)
    assert [item.name for item in torchlift.verify(path).failed] == ["weight"]
    with pytest.raises(IntegrityError, match="checksums are wrong in 1 of 2 records"):
        torchlift.load(nn.Linear(3, 2), path, verify=True)
    path.write_bytes(before.replace(b'"weight"', b'"Weight"'))
    with pytest.raises(FormatError, match="the checksum of the header is wrong"):
        torchlift.open(path)


def test_checksums_that_another_program_copied_count_no_more(tmp_path: Path) -> None:
    """Tools write other values with the metadata of the file that they read."""
    from safetensors.torch import save_file

    path = tmp_path / "x.safetensors"
    torchlift.save({"a": torch.ones(3), "b": torch.ones(2)}, path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert "torchlift.crc32" in metadata
    save_file({"a": torch.zeros(3), "b": torch.zeros(2)}, path, metadata)
    report = torchlift.verify(path)
    assert report.ok
    assert not report.checked


def test_a_torch_file_depends_on_values_alone(tmp_path: Path) -> None:
    """Not on which equal strings are one object, nor on the order that hashes give a set."""
    words = ["storage", "cpu", "latin1", "0", "a", "_metadata", "w"]
    again = [f"{word} "[:-1] if len(word) > 1 else word.upper().lower() for word in words]
    files = []
    for names in (words, again):
        inner = OrderedDict.fromkeys(names, b"a")
        inner._metadata = {names[0]: names[1]}  # type: ignore[attr-defined]
        # Of these integers the one that comes first is the first in the set.
        few = {names[0], *((8, 0) if names is words else (0, 8))}
        state = {"n": names, "i": [inner, inner], "w": torch.ones(2), "s": few, "c": [words[0]]}
        torchlift.save(state, tmp_path / "x.pt")
        files.append((tmp_path / "x.pt").read_bytes())
        found = torch.load(tmp_path / "x.pt")
        assert found["i"][0] is found["i"][1]
        assert found["i"][0]._metadata == inner._metadata
        assert found["s"] == few
    assert files[0] == files[1]


@pytest.mark.parametrize("format", list(NAMES))
def test_a_checkpoint_is_saved_onto_itself(tmp_path: Path, format: str) -> None:
    """As it was opened, out of tensors that are mapped from it, and converted in its place."""
    folder = tmp_path / "to"
    path = folder / NAMES[format]
    options: dict[str, Any] = {"format": format}
    if format == "sharded":
        options["max_shard_size"] = 8000
    state = {f"t{at}": torch.randn(1000) for at in range(5)}
    torchlift.save(state, path, **options)
    count = len(list(folder.rglob("*")))
    with torchlift.open(path) as ckpt:
        torchlift.save(ckpt, path, **options)
    with torchlift.open(path) as ckpt:
        mapped = ckpt.state_dict()
    torchlift.save(mapped, path, **options)
    assert all(torch.equal(mapped[key], value) for key, value in state.items())
    torchlift.convert(path, path, overwrite=True, transform=lambda _, t: t + 1, **options)
    assert torchlift.diff({key: value + 1 for key, value in state.items()}, path).equal
    assert torchlift.verify(path).ok
    assert len(list(folder.rglob("*"))) == count


def test_a_folder_is_listed_as_often_for_many_files_as_for_few(tmp_path, monkeypatch):
    """To save and to replace. A set of 2,000 files took 60 s to list."""
    listed, counts, list_names = list[object](), list[int](), os.listdir
    monkeypatch.setattr(os, "listdir", lambda path=".": listed.append(path) or list_names(path))
    for files in 3, 30:
        state = {f"w{number}": torch.zeros(16) for number in range(files)}
        for _ in range(2):
            torchlift.save(state, tmp_path / str(files), format="sharded", max_shard_size=64)
        counts.append(len(listed))
        listed.clear()
    assert counts[0] == counts[1]


def flagged(numel: int) -> dict[str, torch.Tensor]:
    """A conjugate view and a negative one, whose memory has other numbers."""
    number = torch.complex(torch.arange(float(numel)), torch.arange(float(numel)) + 1)
    return {"conjugate": number.conj(), "negative": number.conj().imag}


SQUARE = torch.arange(9.0).view(3, 3)
#: Views of one memory that only their strides or a flag tell apart.
VIEWS = {
    "transposed": {"a": SQUARE, "t": SQUARE.T}, "few with a flag": flagged(3),
    "many with a flag": flagged(20_000),
}  # fmt: skip


@each_format
@pytest.mark.parametrize("name", VIEWS)
def test_each_view_of_one_memory_is_saved_with_its_own_values(
    tmp_path: Path, format: str, name: str
) -> None:
    """A square matrix and its transpose have one size, and a flag is in no memory."""
    torchlift.save(VIEWS[name], tmp_path / NAMES[format], format=format)
    found = torchlift.open(tmp_path / NAMES[format])
    assert all(same(found[key], value) for key, value in VIEWS[name].items())

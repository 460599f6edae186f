"""`remap`: rules for names, devices and dtypes, what they answer and what they refuse."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import Mixed, entry, randomised, saved, tensors_of, unchanged
from torch import nn
from zoo import same

import torchlift
from torchlift import remap
from torchlift.errors import MismatchError, PlacementError

segments = st.lists(st.sampled_from(["a", "b", "layers", "1", "10"]), min_size=1, max_size=5)
names = segments.map(".".join)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of `Mixed` with other values."""
    return saved(randomised(Mixed()), tmp_path)


# ---- names


@pytest.mark.parametrize("prefix", ["module.", "module"])
def test_strip_takes_a_whole_name_off_and_nothing_else(prefix) -> None:
    """The dot may be left out; a longer word and a second occurrence are not touched."""
    rename = remap.strip(prefix)
    assert rename("module.fc.weight") == "fc.weight"
    assert rename("modules.fc.weight") == "modules.fc.weight"
    assert rename("net.module.weight") == "net.module.weight"
    assert rename("module.module.weight") == "module.weight"
    assert rename("module") == "module"
    for nothing in ("", "."):
        with pytest.raises(ValueError, match="the prefix is empty"):
            remap.strip(nothing)


@given(
    names,
    st.lists(st.tuples(st.sampled_from(["a", r"(\d+)", "^b", r"\."]), st.sampled_from("xy_"))),
)
def test_rules_do_what_re_sub_does_in_turn(name, pairs) -> None:
    """The reference is `re.sub`, pair by pair."""
    expected = name
    for pattern, replacement in pairs:
        expected = re.sub(pattern, replacement, expected)
    assert remap.rules(pairs)(name) == expected


_SHIFT = (re.compile(r"LAYERS\.(\d+)", re.I), lambda m: f"layers.{int(m[1]) + 1}")
_CHAIN = str.lower | remap.strip("module") | remap.rules([("^x", None)]) | (lambda k: k + "!")


@pytest.mark.parametrize(
    ("rename", "key", "name"),
    [
        (remap.rules([("^old", "new"), (r"^new\.head", None)]), "old.head.weight", None),
        (
            remap.rules([("^old", "new"), (r"^new\.head", None)]),
            "old.body.weight",
            "new.body.weight",
        ),
        (remap.rules([_SHIFT]), "layers.9.w", "layers.10.w"),
        (_CHAIN, "MODULE.A", "a!"),
        (_CHAIN, "module.x", None),
    ],
)
def test_rules_drop_call_and_compose_in_the_order_they_are_written(rename, key, name) -> None:
    """None as replacement drops, in its turn. Functions take part, as in `re.sub`."""
    assert rename(key) == name


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (("(", "x"), "'(' is not a regular expression: missing )"),
        (("[a", None), "'[a' is not a regular expression"),
        (("(a)", r"\2"), r"'(a)' cannot have the replacement '\\2': invalid group reference 2"),
        (("(?x) a # c", r"\g<b>"), "unknown group name 'b'"),
        (("a", 3), "'a' cannot have the replacement 3"),
    ],
)
def test_a_bad_rule_is_refused_at_once_and_named(pair, message) -> None:
    """Not when a key first matches it."""
    with pytest.raises(ValueError, match=re.escape(message)):
        remap.rules([("fine", "x"), pair])


# ---- by key, by pattern


@given(names, st.dictionaries(st.one_of(names, st.just("")), st.integers(0, 7)))
def test_the_longest_prefix_that_ends_at_a_dot_wins(name, mapping) -> None:
    """The reference compares lists of segments."""
    segments = name.split(".")
    matching = [
        key for key in mapping if not key or key.split(".") == segments[: key.count(".") + 1]
    ]
    expected = mapping[max(matching, key=len)] if matching else None
    assert remap.by_key(mapping)(entry(name)) == expected


_BY_PATTERN = remap.by_pattern(
    {r"norm\d?\.": torch.float32, "bias$": torch.float64, "": torch.half}
)
_FIRST = remap.first_of(remap.by_key({"a": "cuda:1"}), remap.by_location({"mps": 3}))


@pytest.mark.parametrize(
    ("rule", "key", "answer"),
    [
        (_BY_PATTERN, "layers.0.norm1.bias", torch.float32),
        (_BY_PATTERN, "layers.0.fc.bias", torch.float64),
        (_BY_PATTERN, "layers.0.fc.weight", torch.half),
        (_FIRST, "a.b", "cuda:1"),
        (_FIRST, "c", None),
        (remap.first_of(_FIRST, "cpu"), "c", "cpu"),
    ],
)
def test_the_first_that_has_an_answer_decides(rule, key, answer) -> None:
    """A pattern is found anywhere, and the empty one is about the rest; a value always answers."""
    assert rule(entry(key)) == answer


def test_devices_and_dtypes_by_name_in_one_pass(path) -> None:
    """Norms keep float32 while the rest is halved; integers are never cast."""
    model = torchlift.skeleton(Mixed)
    dtype = remap.by_key({"": "bfloat16", "inner.1": torch.float32})
    report = torchlift.load(model, path, device=remap.by_key({"inner": "cpu"}), dtype=dtype)
    assert model.inner[0].weight.dtype is torch.bfloat16
    assert model.inner[1].weight.dtype is torch.float32
    assert model.inner[1].num_batches_tracked.dtype is torch.int64
    assert report.loaded["scale"].cast_from == "float32"


def test_a_rule_without_an_answer_leaves_the_default(path) -> None:
    """A live tensor stays as it is, one on meta goes to the CPU with the file's dtype."""
    live, meta = Mixed().double(), torchlift.skeleton(Mixed)
    nothing = remap.by_location({"cuda": "cpu"})
    for model in (live, meta):
        torchlift.load(model, path, device=nothing, dtype=remap.by_pattern({"^$": torch.half}))
    assert (live.scale.dtype, live.scale.device.type) == (torch.float64, "cpu")
    assert (meta.scale.dtype, meta.scale.device.type) == (torch.float32, "cpu")


RULES = [
    remap.strip("module."),
    remap.rules([(r"^a\.(\d)", r"b.\1"), ("x", None)]),
    remap.strip("module.") | remap.rules([("a", "b")]),
    remap.by_key({"a": "cuda:0", "": torch.device("cpu")}),
    remap.by_key({"a": torch.float16}),
    remap.by_location({"cuda:1": "cuda:0", "cuda": "cpu", "": 0}),
    remap.by_pattern({"norm": torch.float32}),
    remap.first_of(remap.by_key({"a": "cpu"}), remap.by_location({"cuda": "cpu"}), "cuda"),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_rule_prints_as_the_call_that_makes_it_and_travels_between_processes(rule) -> None:
    """So that a log can be pasted, and ranks and workers can be sent one."""
    scope = {name: getattr(remap, name) for name in remap.__all__}
    scope |= {"torch": torch, "device": torch.device}
    again = eval(repr(rule), scope)
    assert repr(again) == repr(rule)
    assert again == rule
    assert pickle.loads(pickle.dumps(rule)) == rule


# ---- what is refused, before anything happens


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (remap.by_key({"inner": "cpu", "iner.0": "cpu"}), "'iner.0': .* Did you mean 'inner.0'"),
        (remap.by_key({"inner.1": "cpu", "inner.10": "cpu"}), "'inner.10': the map contains"),
        (remap.by_key({"scale": "maia:0"}), "'scale': cannot be moved .* 'maia:0'"),
        (remap.by_location({"cuda:1": "maia"}), "'cuda:1': cannot be moved .* 'maia'"),
        (remap.by_pattern({"^sc": "maia"}), r"'\^sc': cannot be moved .* 'maia'"),
        (remap.first_of(remap.by_key({"scal": "cpu"}), "cpu"), "'scal': .* Did you mean 'scale'"),
        ({"inner": "cpu"}, r"Wrap it: remap.by_key\(...\)"),
        (remap.by_key({"inner": torch.float16}), "torch.float16"),
    ],
)
def test_a_map_that_cannot_be_followed_is_one_error_that_names_its_entry(path, rule, message):
    """And the model is as it was."""
    model = Mixed()
    for act in (torchlift.plan, torchlift.load):
        with unchanged(model), pytest.raises(PlacementError, match=message):
            act(model, path, device=rule)


@pytest.mark.parametrize(
    "value", ["cdua", "cuda0", "cuda:x", "cuda:-1", "", None, 1.5, True, -1, ("cpu",)]
)
def test_what_can_be_no_device_is_refused_when_the_map_is_made(value) -> None:
    """As torch refuses it: a backend of another machine is known by its name."""
    with pytest.raises(PlacementError, match=r"'a\.b': the value for it is not a device"):
        remap.by_key({"a.b": value})
    with pytest.raises(PlacementError, match="'cuda:1'"):
        remap.by_location({"cuda:1": value})


@pytest.mark.parametrize("tag", ["cuda:x", "cuda:", "a b", ":0"])
def test_what_can_be_no_tag_is_refused(tag) -> None:
    """It would never be found in a file."""
    with pytest.raises(PlacementError, match="not a location tag"):
        remap.by_location({tag: "cpu"})


# ---- disk and ties


@pytest.mark.parametrize("source", ["auto", "read"])
@pytest.mark.parametrize("kind", ["live", "meta"])
def test_what_a_map_leaves_on_disk_stays_mapped(path, source, kind) -> None:
    """Nothing of it is read, also where the rest is."""
    model = Mixed() if kind == "live" else torchlift.skeleton(Mixed)
    report = torchlift.load(model, path, device=remap.by_key({"": "disk"}), source=source)
    assert report.bytes_read == 0
    assert set(report.source.values()) == {"mmap"}
    state = randomised(Mixed())
    assert all(same(tensors_of(model)[key], value) for key, value in state.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float16}, "'scale': cannot stay on disk and be cast"),
        ({"mode": "copy"}, "'scale': cannot stay on disk and be copied"),
    ],
)
def test_what_takes_memory_cannot_stay_on_disk(path, options, message) -> None:
    """The error comes from the plan."""
    with pytest.raises(PlacementError, match=message):
        torchlift.plan(
            torchlift.skeleton(Mixed), path, device=remap.by_key({"": "disk"}), **options
        )


# ---- a rename that matches nothing


def _through(door: str, rename: object, path: Path, folder: Path) -> None:
    """Use a rename behind one of the doors that take one."""
    state = torch.load(path)
    if door == "convert":
        torchlift.convert(path, folder / "to.safetensors", rename=rename)
    elif door == "convert memory":
        torchlift.convert(state, folder / "to.safetensors", rename=rename)
    else:
        model = nn.ModuleDict({"module": nn.Linear(2, 2)})
        source = state if door == "load memory" else path
        (torchlift.plan if door == "plan" else torchlift.load)(model, source, rename=rename)


IDLE = {
    "a prefix": remap.strip("modul."),
    "a rule": remap.rules([("^encoder", "body")]),
    "a rule that changes nothing": remap.rules([("module", "module")]),
    "the second of a chain": remap.strip("module.") | remap.strip("module."),
    "a rule before one that matches": remap.rules([("x", "y")]) | remap.strip("module."),
    "a merge": remap.merge("*.expertz.{e}", "*.ups", stack=0),
    "a split": remap.split("*.qkv", ["*.q", "*.k"], chunk=0),
    "a prefix after a split": remap.split("*.bias", ["*.q", "*.k"], chunk=0) | remap.strip("q"),
}


@pytest.mark.parametrize("door", ["load", "load memory", "plan", "convert", "convert memory"])
@pytest.mark.parametrize("idle", IDLE)
def test_a_rename_that_matches_no_key_is_an_error_that_names_it(door, idle, tmp_path):
    """The result would have the old names, and success. Without it the same call works."""
    path = tmp_path / "m.pt"
    torch.save(nn.ModuleDict({"module": nn.Linear(2, 2)}).state_dict(), path)
    with pytest.raises(MismatchError, match=r"rename .* matches no key") as caught:
        _through(door, IDLE[idle], path, tmp_path)
    assert "Correct it, or leave it out" in str(caught.value)
    assert not (tmp_path / "to.safetensors").exists()
    _through(door, None, path, tmp_path)


def test_a_rule_sees_a_tensor_that_the_file_lacks_as_the_model_has_it(path) -> None:
    """A rule that places by size needs its numbers."""
    seen = {}
    torchlift.load(
        nn.ModuleDict({"scale": nn.Conv2d(2, 3, 4).to(memory_format=torch.channels_last)}),
        {"scale.bias": torch.ones(3)},
        device=lambda entry: seen.update({entry.key: entry}),
        allow_missing=["scale.weight"],
    )
    entry = seen["scale.weight"]
    assert (entry.shape, entry.stride, entry.nbytes) == ((3, 2, 4, 4), (32, 1, 8, 2), 384)

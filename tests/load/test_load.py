"""`load`: a checkpoint into a model, live or on meta, by every mode from every source."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from small_models import (
    Holder,
    Mixed,
    Two,
    assert_holds,
    dense,
    on_meta,
    randomised,
    saved,
    tensors_of,
    unchanged,
)
from torch import nn
from zoo import same

import torchlift
from torchlift.errors import MismatchError, PlacementError

MODES = ["auto", "assign", "copy", "swap"]
SOURCES = ["auto", "mmap", "read"]


@pytest.fixture(params=["live", "meta"])
def kind(request) -> str:
    """Whether a model has values before the load."""
    return str(request.param)


def build(kind: str, model: type[nn.Module], *args: object) -> nn.Module:
    """A model with values, or its skeleton."""
    return model(*args) if kind == "live" else torchlift.skeleton(model, *args)


# --- every way gives the right values ---------------------------------------------------------


@st.composite
def problems(draw) -> dict[str, torch.Tensor]:
    """Tensors of any dtype, shape and layout, some of them views of others."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64,
              torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool, torch.uint16]  # fmt: skip
    found: dict[str, torch.Tensor] = {}
    for i in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from(dtypes))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
        value = raw.view(dtype).view(shape)
        how = draw(st.sampled_from(["plain", "transposed", "sliced", "expanded", "alias"]))
        if how == "transposed":
            value = value.permute(tuple(reversed(range(value.dim()))))
        elif how == "sliced":
            raw = torch.randint(0, 2, (*shape, 2, dtype.itemsize), dtype=torch.uint8)
            value = raw.view(dtype).view(*shape, 2)[..., 1]
        elif how == "expanded":
            value = value.unsqueeze(0).expand(3, *value.shape)
        elif how == "alias" and found:
            value = draw(st.sampled_from(list(found.values())))
        found[f"t{i}"] = value
    return found


def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies that share nothing and repeat nothing."""
    return {key: dense(value) for key, value in tensors.items()}


def holder(tensors: dict[str, torch.Tensor], kind: str) -> nn.Module:
    """A model for such tensors, with other values or none."""
    zeros = {key: torch.zeros_like(value) for key, value in apart(tensors).items()}
    return Holder(zeros) if kind == "live" else on_meta(zeros)


@settings(max_examples=120, deadline=None)
@given(
    tensors=problems(),
    kind=st.sampled_from(["live", "meta"]),
    mode=st.sampled_from(MODES),
    source=st.sampled_from(SOURCES),
)
def test_any_tensors_load_as_torch_loads_them(tmp_path_factory, tensors, kind, mode, source):
    """Whatever the dtypes, layouts and aliases, values equal torch's and memory is not shared."""
    path = saved(tensors, tmp_path_factory.mktemp("any"))
    model = holder(tensors, kind)
    torchlift.load(model, path, mode=mode, source=source)
    expected = apart(torch.load(path))
    assert_holds(model, expected)
    for key, value in tensors_of(model).items():
        with torch.no_grad():
            value.zero_()
        expected[key] = torch.zeros_like(expected[key])
        assert_holds(model, expected)


@settings(max_examples=40, deadline=None)
@given(
    tensors=problems(),
    wish=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    mode=st.sampled_from(["auto", "assign", "swap"]),
    source=st.sampled_from(SOURCES),
    kind=st.sampled_from(["live", "meta"]),
)
def test_any_cast_is_that_of_torch(tmp_path_factory, tensors, wish, mode, source, kind):
    """Floating-point tensors become what `Tensor.to` makes of them; others are left alone."""
    path = saved(tensors, tmp_path_factory.mktemp("cast"))
    model = holder(tensors, kind)
    torchlift.load(model, path, mode=mode, source=source, dtype=wish)
    assert_holds(
        model,
        {k: v.to(wish) if v.is_floating_point() else v for k, v in torch.load(path).items()},
    )


# --- devices and dtypes -----------------------------------------------------------------------


@pytest.mark.parametrize("device", [torch.device("meta"), lambda entry: "meta"])
def test_what_goes_to_meta_is_left_for_a_later_load(tmp_path, kind, device):
    """However it is asked for, nothing changes, and a second load finds everything to do."""
    model, state = build(kind, Two), randomised(Two())
    path = saved(state, tmp_path)
    for options in ({}, {"dtype": "bfloat16"}):
        with unchanged(model):
            report = torchlift.load(model, path, device=device, **options)
        assert (report.loaded, report.deferred, report.hint) == ({}, ["a", "b"], None)
    report = torchlift.load(model, saved(state, tmp_path))
    assert_holds(model, state)
    assert report.deferred == []


def test_complex_values_are_not_cut_to_real_ones(tmp_path, kind):
    """The imaginary part is not lost in silence; a transform says what is meant."""
    path = saved({"a": torch.full((2, 3), 3 + 4j), "b": torch.ones(2, 3)}, tmp_path)
    live = Two()
    with (
        unchanged(live),
        pytest.raises(PlacementError, match=r"'a': complex values cannot become real"),
    ):
        torchlift.load(live, path)
    torchlift.load(live, path, transform=lambda key, value: value.abs())
    assert live.a.eq(5).all()
    meta = torchlift.skeleton(Two)
    torchlift.load(meta, path)
    assert meta.a.dtype == torch.complex64


# --- names ------------------------------------------------------------------------------------


def test_a_strict_error_lists_everything_and_changes_nothing(tmp_path, kind):
    """Missing, unexpected and misshapen keys come in one error, as text and as attributes."""
    model = build(kind, Mixed)
    state = randomised(Mixed())
    del state["steps"]
    state["scale"] = torch.ones(4)
    state["inner.0.weight"] = torch.ones(3, 4)
    path = saved({**state, "extra": torch.ones(1), "epoch": 7}, tmp_path)
    with unchanged(model), pytest.raises(MismatchError) as caught:
        torchlift.load(model, path)
    error = caught.value
    assert error.missing_keys == ["steps"]
    assert error.unexpected_keys == ["extra", "epoch"]
    assert error.mismatched == {"scale": ((3,), (4,)), "inner.0.weight": ((4, 3), (3, 4))}
    assert str(error) == (
        f"{path}: the checkpoint does not fit the model. Pass rename= with the rule that brings "
        "the names together and ignore_mismatched=True and allow_missing=['scale', "
        "'inner.0.weight'] to skip what has another shape.\n"
        "  missing (1): steps\n"
        "  unexpected (2): extra, epoch\n"
        "  mismatched (2): scale: model [3], checkpoint [4]; "
        "inner.0.weight: model [4, 3], checkpoint [3, 4]"
    )


@pytest.mark.parametrize("argument", ["rename", "transform"])
def test_an_error_of_the_callers_own_function_arrives_with_the_key(tmp_path, argument):
    """Its type is the caller's, and a note says for which tensor it was raised."""
    key = list(Two().state_dict())[1]

    def fails(name, *tensor):
        if name == key:
            raise ZeroDivisionError("mine")
        return tensor[0] if tensor else name

    model = Two()
    with unchanged(model), pytest.raises(ZeroDivisionError, match="mine") as error:
        torchlift.load(model, saved(randomised(Two()), tmp_path), **{argument: fails})
    assert any(repr(key) in line for line in error.value.__notes__)


def test_a_verified_load_says_what_could_not_be_verified(tmp_path):
    """A file without checksums is no file whose checksums are right."""
    state = randomised(Two())
    report = torchlift.load(Two(), saved(state, tmp_path), verify=True)
    assert report.unchecked_nbytes == 0
    assert "not verified" not in str(report)
    save_file(state, tmp_path / "two.safetensors")
    report = torchlift.load(Two(), tmp_path / "two.safetensors", verify=True)
    assert report.unchecked_nbytes == 48
    assert "not verified: 48 B: the file records no checksum of these bytes" in str(report)
    report = torchlift.load(Two(), tmp_path / "two.safetensors")
    assert report.unchecked_nbytes == 0


def test_without_strict_what_is_missing_keeps_its_value_or_is_made(tmp_path, kind):
    """Nothing is left on meta: a skeleton makes what the file lacks."""
    model = build(kind, Mixed)
    path = saved({"steps": torch.tensor(3), "extra": torch.ones(1)}, tmp_path)
    with pytest.warns(UserWarning, match=r"5 parameters got no value.*: scale, inner\.0\.weight"):
        report = torchlift.load(model, path, strict=False)
    assert model.steps == 3
    assert torch.equal(model.scale, torch.full((3,), 0.5))
    assert not any(value.is_meta for value in tensors_of(model).values())
    # Batch norm supplies its counter itself to a file without version numbers, as for torch.
    given = {"steps", "inner.1.num_batches_tracked"}
    assert set(report.missing_keys) == model.state_dict().keys() - given
    assert report.unexpected_keys == ["extra"]
    made = set() if kind == "live" else tensors_of(Mixed()).keys() - given
    assert set(report.replayed) == made


def test_nothing_stays_on_meta_in_silence(tmp_path):
    """A module on meta that no skeleton recorded cannot be completed, and says so."""
    with torch.device("meta"):
        model = Mixed()
    with unchanged(model), pytest.raises(PlacementError) as caught:
        torchlift.load(model, saved({"steps": torch.tensor(3)}, tmp_path), strict=False)
    assert "8 tensors are on meta, and torchlift cannot construct them" in str(caught.value)
    assert ": scale, frequencies, inner.0.weight, " in str(caught.value)
    assert "torchlift.skeleton" in str(caught.value)
    with (
        unchanged(model),
        pytest.raises(PlacementError, match=r"1 tensors? (is|are) on meta.*frequencies"),
    ):
        torchlift.load(model, saved(randomised(Mixed()), tmp_path))


@pytest.mark.parametrize("ignore", [True, False])
def test_a_model_of_other_sizes_is_no_load_of_nothing(tmp_path, kind, ignore):
    """To skip each shape that differs would leave the whole model as it was made, and no error."""
    state = {name: torch.ones(9) for name in Mixed().state_dict()}
    path, model = saved(state, tmp_path), build(kind, Mixed)
    with unchanged(model), pytest.raises(MismatchError) as caught:
        torchlift.load(model, path, strict=False, ignore_mismatched=ignore)
    error = caught.value
    assert error.reason == "nothing in the checkpoint fits the model"
    assert "Build the model with the sizes of the checkpoint" in error.hint
    assert error.mismatched.keys() == state.keys()
    assert f"mismatched ({len(state)}): " in str(error)
    report = torchlift.load(model, path, ignore_mismatched=True, allow_missing=["*"])
    assert not report.loaded


# --- shapes, ties and shared memory -----------------------------------------------------------


@pytest.mark.parametrize(("has", "stored"), [((), (1, 1)), ((1,), ())])
def test_only_a_scalar_fits_another_number_of_dimensions(has, stored):
    """torch < 0.4 saved scalars with one dimension, and nothing else of another shape."""
    with pytest.raises(MismatchError) as caught:
        torchlift.load(Holder({"a": torch.zeros(has)}), {"a": torch.ones(stored)})
    assert caught.value.mismatched == {"a": (has, stored)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", SOURCES)
def test_two_models_from_one_checkpoint_share_nothing(tmp_path, mode, source):
    """Training one changes neither the other, nor the checkpoint's tensors, nor the file."""
    state = randomised(Two())
    path = saved(state, tmp_path)
    content = path.read_bytes()
    with torchlift.open(path) as ckpt:
        one, two = torchlift.skeleton(Two), torchlift.skeleton(Two)
        for model in (one, two):
            torchlift.load(model, ckpt, mode=mode, source=source)
        with torch.no_grad():
            one.a.zero_()
            one.b.zero_()
        assert_holds(two, state)
        assert same(ckpt["a"], state["a"])
    assert path.read_bytes() == content


@pytest.mark.parametrize("source", ["mmap", "read"])
def test_a_loaded_model_is_an_ordinary_one(tmp_path, source):
    """It can be saved without growing, copied, shared between processes and trained."""
    state = {"weight": torch.randn(600, 600), "bias": torch.randn(600)}
    path = saved(state, tmp_path)
    model = torchlift.skeleton(nn.Linear, 600, 600)
    torchlift.load(model, path, source=source)
    again = saved(model.state_dict(), tmp_path, "again.pt")
    assert abs(again.stat().st_size - path.stat().st_size) < 512
    assert_holds(copy.deepcopy(model), state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(600)).sum().backward()
    optimizer.step()
    assert torch.allclose(model.bias, state["bias"] - 0.1)
    model.share_memory()
    assert model.weight.is_shared()


NO_DEVICE = r"'a': cannot be moved to the selected device.*Choose a device of t"
NO_DTYPE = r"'a': dtype= must give a floating-point dtype; found"
REFUSED = [
    *(({"device": device}, NO_DEVICE) for device in ("cuda:97", "xpu:5", "no such", 97, object())),
    *(
        ({"dtype": dtype}, NO_DTYPE)
        for dtype in (torch.int8, torch.complex64, lambda _: torch.int8)
    ),
    ({"device": torchlift.remap.by_key({"": "cuda:97"})}, "^[^']*cannot be moved to the selected"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_nothing_can_become_is_refused_before_anything_happens(kind, options, message):
    """A device that is not there, and integers, which weights do not become by accident."""
    model = build(kind, Two)
    with unchanged(model), pytest.raises(PlacementError, match=message):
        torchlift.load(model, randomised(Two()), **options)


@pytest.mark.parametrize(
    "value", [torch.zeros(1, 3).expand(2, 3), torch.zeros(4).as_strided((2, 3), (1, 1))]
)
def test_a_live_tensor_that_repeats_elements_is_not_written_to(tmp_path, value):
    """An expanded parameter cannot hold the values; a new one can be assigned."""
    model = Two()
    model.b = nn.Parameter(value)
    state = randomised(Two())
    path = saved(state, tmp_path)
    with (
        unchanged(model),
        pytest.raises(PlacementError, match=r"'b': cannot be written in place.*mode=\"assign\""),
    ):
        torchlift.load(model, path)
    torchlift.load(model, path, mode="assign")
    assert_holds(model, state)


# --- transform --------------------------------------------------------------------------------


def test_a_transform_gets_every_tensor_once_in_the_order_of_the_model(tmp_path, kind):
    """The callable sees the model's name and the tensor as the checkpoint holds it."""
    state = {key: value.bfloat16() if value.is_floating_point() else value
             for key, value in reversed(randomised(Mixed()).items())}  # fmt: skip
    seen = []

    def double(key: str, value: torch.Tensor) -> torch.Tensor:
        seen.append((key, value.dtype, value.device.type, value.requires_grad))
        return value * 2

    model = build(kind, Mixed)
    torchlift.load(model, saved(state, tmp_path), transform=double)
    assert [key for key, *_ in seen] == list(Mixed().state_dict())
    assert {(device, grad) for *_, device, grad in seen} == {("cpu", False)}
    assert {dtype for _, dtype, *_ in seen} == {torch.bfloat16, torch.int64}
    dtype = torch.float32 if kind == "live" else torch.bfloat16
    assert_holds(
        model, {k: (v * 2).to(dtype) if v.is_floating_point() else v * 2 for k, v in state.items()}
    )


def test_a_transform_may_change_shapes(tmp_path, kind):
    """What the file holds transposed or in parts can be made to fit."""
    state = {"a": torch.arange(6.0).view(3, 2), "b": torch.arange(6.0)}
    model = build(kind, Two)
    torchlift.load(
        model,
        saved(state, tmp_path),
        transform=lambda key, value: value.t() if key == "a" else value.view(2, 3),
    )
    assert torch.equal(model.a, state["a"].t())
    assert torch.equal(model.b, state["b"].view(2, 3))


@pytest.mark.parametrize("source", ["mmap", "read"])
def test_a_transform_may_work_in_place(tmp_path, kind, source):
    """Writing to what it gets reaches neither another key that shares the bytes, nor the file."""
    base = torch.arange(9.0)
    state = {"a": base[:6].view(2, 3), "b": base[3:].view(2, 3)}
    path = saved(state, tmp_path)
    content = path.read_bytes()
    model = build(kind, Two)
    for _ in range(2):
        torchlift.load(model, path, source=source, transform=lambda key, value: value.mul_(2))
        assert_holds(model, {key: value * 2 for key, value in state.items()})
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("result", "error", "text"),
    [
        (lambda value: None, TypeError, r"transform\('b', ...\) returned NoneType, not a tensor"),
        (lambda value: value.tolist(), TypeError, r"transform\('b', ...\) returned list, not a"),
        (lambda value: value[0], MismatchError, r"'b': transform returned another shape than the "
                                                r"model has; expected \[2, 3\]; found \[3\]"),
        (lambda value: value.to("meta"), PlacementError, "'b': transform returned a tensor that"),
        (lambda value: value.to_sparse(), PlacementError, "expected a dense tensor with values"),
        (lambda value: 1 / 0, ZeroDivisionError, "division by zero"),
    ],
    ids=["none", "list", "shape", "meta", "sparse", "raises"],
)  # fmt: skip
@pytest.mark.parametrize("mode", MODES)
def test_a_bad_transform_leaves_the_model_as_it_was(tmp_path, kind, mode, result, error, text):
    """Whatever goes wrong on a later tensor, the earlier ones are untouched."""
    model = build(kind, Two)
    with unchanged(model), pytest.raises(error, match=text):
        torchlift.load(
            model,
            saved(randomised(Two()), tmp_path),
            mode=mode,
            transform=lambda key, value: value * 2 if key == "a" else result(value),
        )


# --- progress and report ----------------------------------------------------------------------


@pytest.mark.parametrize("source", ["mmap", "read"])
@pytest.mark.parametrize("options", [{}, {"transform": lambda key, value: value * 2}])
def test_progress_is_a_bar_on_stderr_that_reaches_the_end(tmp_path, capsys, source, options):
    """All bytes that are copied out of the file are counted, and nothing goes to stdout."""
    path = saved(randomised(Two(100, 100)), tmp_path)
    torchlift.load(Two(100, 100), path, source=source, progress=True, **options)
    out, err = capsys.readouterr()
    assert out == ""
    assert "load: 100%" in err.replace("\r", "\n").splitlines()[-1]
    assert "78.1k/78.1k" in err
    torchlift.load(Two(100, 100), path)
    assert capsys.readouterr() == ("", "")


def test_a_report_says_what_was_done(tmp_path):
    """Bytes, mode, source, device and dtype per key, the time, and a summary to print."""
    path = saved(randomised(Two()), tmp_path)
    report = torchlift.load(torchlift.skeleton(Two), path, source="read", dtype=torch.float64)
    assert report.path == str(path)
    assert report.bytes == {"a": 24, "b": 24}
    assert (report.nbytes, report.bytes_read) == (48, 48)
    assert report.mode == {"a": "swap", "b": "swap"}
    assert report.source == {"a": "read", "b": "read"}
    assert report.seconds > 0
    item = report.loaded["a"]
    assert (item.key, item.entry, item.device, item.dtype) == ("a", "a", "cpu", "float64")
    assert (item.cast_from, item.note) == ("float32", None)
    lines = str(report).splitlines()
    assert lines[0] == f"loaded 2 tensors, 48 B, from {path}"
    assert lines[1].endswith(" s, 48 B read")
    assert lines[2:] == ["  how: 2 read, kept as the same objects", "  cast float32 to float64: 2"]


# --- what a caller can get wrong --------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"mode": "replace"},
            ValueError,
            "mode='replace': expected one of auto, assign, copy",
        ),
        ({"source": "disk"}, ValueError, "source='disk': expected one of auto, mmap, read"),
        (
            {"dtype": 16},
            TypeError,
            "dtype=16: expected a torch.dtype, its name, a callable",
        ),
        ({"dtype": float}, TypeError, "dtype=<class 'float'>: expected a torch.dtype"),
        ({"allow_missing": "a.*"}, TypeError, "allow_missing='a.*': expected patterns such"),
        ({"allow_unexpected": [1]}, TypeError, "allow_unexpected=[1]: expected patterns"),
        ({"root": 1}, TypeError, "root=1: expected the dotted name of a container, or None"),
    ],
)
def test_arguments_of_the_wrong_kind_are_refused_by_name(tmp_path, options, error, message):
    """A number for a dtype or a root, a text for patterns, a word that does not exist."""
    for function in (torchlift.plan, torchlift.load):
        with pytest.raises(error, match=re.escape(message)):
            function(Two(), saved(randomised(Two()), tmp_path), **options)

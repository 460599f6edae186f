"""What torch promises of ``load_state_dict``, with its swap flag on and off, holds for ``load``."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict

import pytest
import torch
from small_models import Mixed, Tied, Two, randomised, saved, state_of
from torch import nn

import torchlift
from torchlift import MismatchError, swap

MODES = ["auto", "copy", "swap", "assign"]


@pytest.fixture(params=[False, True], ids=["flag off", "flag on"], autouse=True)
def _flag(request):
    """torch's own flag changes nothing here."""
    if not request.param:
        yield
        return
    with swap.preserving_references():
        yield


def nested() -> nn.Sequential:
    """Modules in modules, with buffers of both kinds."""
    return nn.Sequential(Mixed(), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("1.0.bias"), "missing (1): 1.0.bias"),
        (lambda state: state.update(extra=torch.ones(1)), "unexpected (1): extra"),
        (lambda state: state.update({"1.0.bias.x": torch.ones(1)}), "unexpected (1): 1.0.bias.x"),
        (lambda state: state.update({"1.0.bias": torch.ones(3)}), "mismatched (1): 1.0.bias"),
    ],
    ids=["missing", "unexpected", "below a tensor", "mismatched"],
)
def test_strictness(tmp_path, mode, change, words):
    """An error that names the key, and a model in which nothing has changed."""
    model = nested()
    state = randomised(model)
    change(state)
    before = state_of(model)
    with pytest.raises(MismatchError) as caught:
        torchlift.load(model, saved(state, tmp_path), mode=mode)
    assert words in str(caught.value)
    assert state_of(model) == before


@pytest.mark.parametrize("mode", MODES)
def test_what_fits_is_loaded_when_not_strict(tmp_path, mode):
    """The names that do not fit are in the report, as torch returns them."""
    model, torchs = nested(), nested()
    torchs.load_state_dict(model.state_dict())
    state = randomised(model)
    state["extra"] = state.pop("0.scale")
    with pytest.warns(UserWarning, match=r"1 parameter got no value.*: 0\.scale"):
        report = torchlift.load(model, saved(state, tmp_path), mode=mode, strict=False)
    keys = torchs.load_state_dict(state, strict=False)
    assert report.missing_keys == keys.missing_keys == ["0.scale"]
    assert report.unexpected_keys == keys.unexpected_keys == ["extra"]
    for name, tensor in torchs.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize("mode", MODES)
def test_identity(tmp_path, mode):
    """Assigning makes new objects, everything else keeps the old ones; both keep the order."""
    model = nested()
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    order = list(model.state_dict())
    torchlift.load(model, saved(randomised(model), tmp_path), mode=mode)
    now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert list(now) == list(held)
    assert list(model.state_dict()) == order
    for name, tensor in now.items():
        stays = mode != "assign" or name == "0.frequencies"  # which is not in the file
        assert (tensor is held[name]) == stays, name


@pytest.mark.parametrize("live", [True, False], ids=["live", "meta"])
@pytest.mark.parametrize("mode", MODES)
def test_requires_grad_and_class_are_the_models(tmp_path, mode, live):
    """Whatever the tensors in the file say, which may have been parameters themselves."""
    model = Mixed() if live else torchlift.skeleton(Mixed)
    state = OrderedDict(Mixed().state_dict(keep_vars=True))
    state["inner.0.bias"] = nn.Parameter(state["inner.0.bias"].detach())
    state["scale"] = nn.Parameter(state["scale"].detach(), requires_grad=False)
    torchlift.load(model, saved(state, tmp_path), mode=mode)
    assert model.scale.requires_grad
    assert not model.inner[0].bias.requires_grad
    assert isinstance(model.inner[0].bias, nn.Parameter)
    assert not isinstance(model.steps, nn.Parameter)
    assert all(tensor.is_leaf for tensor in model.state_dict(keep_vars=True).values())


@pytest.mark.parametrize("mode", MODES)
def test_ties_of_the_model_stay(tmp_path, mode):
    """Also where they are assigned, which torch unties (pytorch#188346)."""
    model = Tied()
    torchlift.load(model, saved(Tied().state_dict(), tmp_path), mode=mode)
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("mode", MODES)
def test_hooks_run_once_with_their_module(tmp_path, mode):
    """Before loading with the prefix, after loading with the keys, children first."""
    model = nested()
    calls = []

    def before(module, state, prefix, *rest):
        calls.append(("before", prefix))

    def after(module, keys):
        calls.append(("after", type(module).__name__, list(keys.missing_keys)))

    model[1].register_load_state_dict_pre_hook(before)
    model[1].register_load_state_dict_post_hook(after)
    model.register_load_state_dict_post_hook(after)
    torchlift.load(model, saved(randomised(model), tmp_path), mode=mode)
    assert calls == [("before", "1."), ("after", "Sequential", []), ("after", "Sequential", [])]


@pytest.mark.parametrize("mode", MODES)
def test_the_versions_of_the_file_reach_the_modules(tmp_path, mode):
    """What `state_dict` records in its metadata; the caller's is not changed."""

    class Versioned(nn.Linear):
        _version = 7
        seen = None

        def _load_from_state_dict(self, state, prefix, metadata, *rest):
            Versioned.seen = metadata.get("version")
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    model = nn.Sequential(Versioned(2, 2))
    state = model.state_dict()
    metadata = {name: dict(value) for name, value in state._metadata.items()}
    torchlift.load(model, saved(state, tmp_path), mode=mode)
    assert Versioned.seen == 7
    assert {name: dict(value) for name, value in state._metadata.items()} == metadata


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_kept_in_a_cycle(tmp_path, mode):
    """The model and the old tensors go as soon as nobody holds them, without a collection."""
    path = saved(randomised(Two()), tmp_path)
    gc.collect()
    gc.disable()
    try:
        model = Two()
        torchlift.load(model, path, mode=mode)
        gone = weakref.ref(model)
        del model
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("mode", ["auto", "swap", "assign"])
def test_a_module_on_meta_and_one_that_is_live_end_up_equal(tmp_path, mode):
    """Values, classes, dtypes and requires_grad."""
    path = saved(randomised(nested()), tmp_path)
    live, blank = nested(), torchlift.skeleton(nested)
    torchlift.load(live, path, mode=mode)
    torchlift.load(blank, path, mode=mode)
    for (name, one), two in zip(
        live.state_dict(keep_vars=True).items(),
        blank.state_dict(keep_vars=True).values(),
        strict=True,
    ):
        assert torch.equal(one, two), name
        assert (type(one), one.dtype, one.requires_grad) == (
            type(two),
            two.dtype,
            two.requires_grad,
        )


@pytest.mark.parametrize("mode", MODES)
def test_the_model_shares_nothing_with_the_file_or_the_checkpoint(tmp_path, mode):
    """Writing to a parameter changes neither the checkpoint nor another model loaded from it."""
    path = saved({"a": torch.ones(2, 3), "b": torch.ones(2, 3)}, tmp_path)
    content = path.read_bytes()
    one, two = Two(), Two()
    with torchlift.open(path) as checkpoint:
        torchlift.load(one, checkpoint, mode=mode)
        torchlift.load(two, checkpoint, mode=mode)
        with torch.no_grad():
            one.a.add_(5)
        assert checkpoint["a"].eq(1).all()
    assert two.a.eq(1).all()
    assert path.read_bytes() == content

"""The state dict functions in one process and without a process group."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict as theirs
from state_models import PARTIAL, Tied, same, step, trained, two_layers
from torch import nn

import torchlift
import torchlift.distributed as ours
from torchlift import MismatchError
from torchlift.distributed import StateDictOptions

FUNCTIONS = [name for name in ours.__all__ if name.startswith(("get_", "set_"))]


# ---- a drop-in


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_and_defaults_are_torch_s(name: str) -> None:
    """A program that changes the import keeps working."""
    mine, other = (inspect.signature(getattr(api, name)).parameters for api in (ours, theirs))
    assert list(mine)[: len(other)] == list(other)
    for key in list(mine)[len(other) :]:
        assert mine[key].kind is inspect.Parameter.KEYWORD_ONLY
        assert mine[key].default is None
    for key, parameter in other.items():
        assert (mine[key].kind, mine[key].default) == (parameter.kind, parameter.default)


def test_options_are_torch_s_and_either_class_is_accepted() -> None:
    """Fields and defaults are the same, so objects of one class serve the other library too."""
    assert dataclasses.asdict(StateDictOptions()) == dataclasses.asdict(theirs.StateDictOptions())
    model = torch.compile(two_layers(), backend="eager")
    found = ours.get_model_state_dict(model, options=theirs.StateDictOptions(cpu_offload=True))
    assert found.keys() == theirs.get_model_state_dict(model, options=StateDictOptions()).keys()


def test_options_that_contradict_each_other_are_an_error() -> None:
    """What rank 0 sends are whole tensors."""
    options = StateDictOptions(broadcast_from_rank0=True)
    with pytest.raises(ValueError, match="needs full_state_dict=True"):
        ours.get_model_state_dict(two_layers(), options=options)
    with pytest.raises(TypeError, match="must be a StateDictOptions"):
        ours.get_model_state_dict(two_layers(), options="full")  # type: ignore[arg-type]


def test_broadcast_without_a_process_group_says_so() -> None:
    """There is nobody to receive anything."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(ours.StateDictMismatch, match="needs a process group"):
        ours.set_model_state_dict(two_layers(), two_layers().state_dict(), options=options)


def test_no_optimizer_is_a_runtime_error() -> None:
    """As in torch."""
    with pytest.raises(RuntimeError, match="no optimizer was passed"):
        ours.get_optimizer_state_dict(two_layers(), ())
    assert ours.get_state_dict(two_layers(), ())[1] == {}


@pytest.mark.parametrize(
    "wrong", [None, "model", {}, [two_layers()]], ids=lambda w: type(w).__name__
)
def test_what_is_no_model_or_no_optimizer_is_named(wrong: Any) -> None:
    """By its type: of arguments that trade places the text would be a whole model."""
    model, optimizer = trained()
    states = ours.get_state_dict(model, optimizer)
    calls: list[Any] = [
        lambda: ours.get_model_state_dict(wrong),
        lambda: ours.get_optimizer_state_dict(wrong, optimizer),
        lambda: ours.set_model_state_dict(wrong, states[0]),
        lambda: ours.set_optimizer_state_dict(wrong, optimizer, states[1]),
        lambda: ours.patch_model_state_dict(wrong),
    ]
    for call in calls:
        with pytest.raises(
            TypeError, match=rf"model must be a torch.nn.Module, not {type(wrong).__name__}"
        ):
            call()
    with pytest.raises(TypeError, match=r"optimizers must be an optimizer .*, not Linear"):
        ours.get_optimizer_state_dict(model, model)


# ---- the model


@pytest.mark.parametrize("full", [False, True])
def test_a_strict_error_lists_everything_and_changes_nothing(full: bool) -> None:
    """It is a MismatchError of this library and a RuntimeError as torch's.

    Of a whole state dict torch reports no missing key (pytorch/pytorch#153350).
    """
    model, before = two_layers(), copy.deepcopy(two_layers().state_dict())
    state = {key: value + 1 for key, value in before.items()} | {"odd": torch.ones(1)}
    del state["1.bias"]
    says = r"Missing key\(s\) '1.bias'; Unexpected key\(s\) 'odd'"
    with pytest.raises(RuntimeError, match=says) as caught:
        ours.set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=full))
    assert isinstance(caught.value, MismatchError)
    assert caught.value.missing_keys == ["1.bias"]
    assert same(dict(model.state_dict()), dict(before))
    lenient = StateDictOptions(full_state_dict=full, strict=False)
    assert ours.set_model_state_dict(model, state, options=lenient) == (["1.bias"], ["odd"])


def test_an_error_names_the_call_that_renames() -> None:
    """`set_model_state_dict` has no rules, and `load` takes a state dict."""
    model = two_layers()
    state = {f"epoch.{key}": value + 1 for key, value in model.state_dict().items()}
    with pytest.raises(MismatchError, match=r"torchlift.load\(model, state_dict\)") as caught:
        ours.set_model_state_dict(model, state)
    assert "rename=remap.strip('epoch.')" in str(caught.value)
    torchlift.load(model, state, rename=torchlift.remap.strip("epoch."))
    assert same(dict(model.state_dict()), {k.removeprefix("epoch."): v for k, v in state.items()})


def test_the_caller_s_dict_stays_as_it_was() -> None:
    """torch renames its keys for a wrapped model (pytorch/torchtitan#971)."""
    model = torch.compile(two_layers(), backend="eager")
    state = two_layers(1).state_dict()
    metadata = copy.deepcopy(state._metadata)
    given = OrderedDict(state)
    given._metadata = state._metadata  # type: ignore[attr-defined]
    for full in (False, True):
        ours.set_model_state_dict(model, given, options=StateDictOptions(full_state_dict=full))
    assert list(given) == list(state)
    assert all(given[key] is state[key] for key in state)
    assert state._metadata == metadata


def test_tied_parameters_stay_tied_and_one_name_is_enough() -> None:
    """Also where they are made from meta tensors."""
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Tied()
        ours.set_model_state_dict(model, {"head.weight": torch.ones(4, 3)})
        assert model.head.weight is model.embed.weight
        assert torch.equal(model.embed.weight, torch.ones(4, 3))
        assert isinstance(model.embed.weight, nn.Parameter)


def test_submodules_and_modules_as_keys() -> None:
    """Whatever the model is wrapped in."""
    inner = two_layers()
    model = torch.compile(nn.ModuleDict({"a": inner, "b": nn.Linear(2, 2)}), backend="eager")
    short = StateDictOptions(keep_submodule_prefixes=False)
    for options, keys in ((None, {"a.0.weight", "a.0.bias"}), (short, {"weight", "bias"})):
        found = ours.get_model_state_dict(model, submodules={inner[0]}, options=options)
        assert set(found) == keys
    with pytest.raises(ours.StateDictMismatch, match="same canonical name"):
        ours.get_model_state_dict(model, submodules={inner[0], inner[1]}, options=short)
    ours.set_model_state_dict(model, {inner: two_layers(1).state_dict()}, options=PARTIAL)
    assert same(dict(inner.state_dict()), dict(two_layers(1).state_dict()))
    with pytest.raises(ours.StateDictMismatch, match="not part of the model"):
        ours.set_model_state_dict(model, {nn.Linear(1, 1): {}})


class FourBit(nn.Linear):
    """Writes names that it does not read, as a 4-bit layer of bitsandbytes does."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = torch.ones(2)


def test_names_that_a_layer_writes_and_does_not_read_have_a_way_in() -> None:
    """By the function's own option."""
    model = nn.Sequential(FourBit(2, 2))
    state = ours.get_model_state_dict(model)
    with pytest.raises(ours.StateDictMismatch, match=r"'0\.weight\.absmax'.*Pass strict=False"):
        ours.set_model_state_dict(model, state)
    lenient = ours.StateDictOptions(strict=False)
    found = ours.set_model_state_dict(model, state, options=lenient)
    assert found.unexpected_keys == ["0.weight.absmax"]


def test_a_dict_of_optimizers_has_its_values_passed() -> None:
    """It is not taken for one optimizer."""
    model, optimizer = trained()
    optimizers: Any = {"adam": optimizer}
    calls: list[Any] = [
        lambda: ours.get_optimizer_state_dict(model, optimizers),
        lambda: ours.set_optimizer_state_dict(model, optimizers, {}),
        lambda: ours.get_state_dict(model, optimizers),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"not dict: pass its values\(\)"):
            call()
    assert ours.get_optimizer_state_dict(model, optimizers.values())["state"]


def test_frozen_parameters_are_left_out_under_every_name() -> None:
    """torch leaves the second name of a tied one in; what is left out a load does not miss."""
    model = Tied()
    model.embed.weight.requires_grad_(False)
    options = StateDictOptions(ignore_frozen_params=True)
    assert ours.get_model_state_dict(model, options=options) == {}
    assert not any(ours.set_model_state_dict(model, {}, options=options))
    with pytest.raises(ours.StateDictMismatch, match=r"Missing key\(s\) 'embed"):
        ours.set_model_state_dict(model, {})


def test_modules_that_rename_their_keys_are_asked_what_they_hide() -> None:
    """By the method that `dsd_fqn_modifiers` names."""

    class Hiding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2, bias=False)
            self.register_state_dict_post_hook(self._rename)
            self.register_load_state_dict_pre_hook(self._restore)

        def _modifiers(self) -> dict[str, str]:
            return {"weight": "inner"}

        @staticmethod
        def _rename(module: Any, state: Any, prefix: str, _: Any) -> None:
            state[f"{prefix}weight"] = state.pop(f"{prefix}inner.weight")

        @staticmethod
        def _restore(module: Any, state: Any, prefix: str, *_: Any) -> None:
            state[f"{prefix}inner.weight"] = state.pop(f"{prefix}weight")

    model = torch.compile(nn.Sequential(Hiding()), backend="eager")
    optimizer = torch.optim.Adam(model.parameters())
    options = StateDictOptions(dsd_fqn_modifiers="_modifiers")
    states = ours.get_state_dict(model, optimizer, options=options)
    assert list(states[0]) == list(states[1]["state"]) == ["0.weight"]
    new = {"0.weight": torch.ones(2, 2)}
    assert ours.set_model_state_dict(model, new, options=options) == ([], [])
    assert torch.equal(model._orig_mod[0].inner.weight, torch.ones(2, 2))


def test_patched_objects_speak_canonical_names() -> None:
    """And the functions still see the methods of the class beneath."""
    model = torch.compile(two_layers(), backend="eager")
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    expected = ours.get_state_dict(model, optimizer)
    ours.patch_model_state_dict(model)
    ours.patch_optimizer_state_dict(model, optimizers=optimizer)
    assert same(model.state_dict(), expected[0])
    assert same(optimizer.state_dict(), expected[1])
    assert same(ours.get_state_dict(model, optimizer), expected)
    model.load_state_dict(two_layers(1).state_dict())
    optimizer.load_state_dict(ours.get_optimizer_state_dict(*trained(1)))
    assert same(dict(model.state_dict()), dict(two_layers(1).state_dict()))


EVERY = [
    StateDictOptions(full_state_dict=full, cpu_offload=offload, ignore_frozen_params=frozen)
    for full in (False, True)
    for offload in (False, True)
    for frozen in (False, True)
]


@pytest.mark.parametrize("options", EVERY, ids=str)
def test_module_versions_travel_under_every_option(options: Any) -> None:
    """torch drops them where it gathers, offloads or picks submodules (BatchNorm's is 2)."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.ReLU()))
    model = torch.compile(nn.ModuleDict({"a": inner}), backend="eager")
    found = ours.get_model_state_dict(model, options=options)
    assert found._metadata["a.1.0"] == {"version": 2}
    assert found._metadata[""] == found._metadata["a"] == {"version": 1}
    for keep in (True, False):
        chosen = dataclasses.replace(options, keep_submodule_prefixes=keep)
        some = ours.get_model_state_dict(model, submodules={inner[1]}, options=chosen)
        path = "a.1." if keep else ""
        assert dict(some._metadata) == {
            path[:-1]: {"version": 1},
            f"{path}0": {"version": 2},
            f"{path}1": {"version": 1},
        }
    seen: list[Any] = []
    inner[1][0].register_load_state_dict_pre_hook(lambda *rest: seen.append(rest[3]["version"]))
    ours.set_model_state_dict(model, found, options=dataclasses.replace(options, strict=False))
    ours.set_model_state_dict(
        model, {inner[1]: some}, options=dataclasses.replace(options, strict=False)
    )
    assert seen == [2, 2]


class Rotary(nn.Module):
    """Has a buffer that no state dict has, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), 3.0))
        self.register_buffer("table", torch.arange(4.0), persistent=False)


@pytest.mark.parametrize("strict", [True, False])
def test_what_a_state_dict_cannot_have_is_replayed_or_refused(strict: bool) -> None:
    """torch leaves it on meta, and the first forward pass fails."""
    options = StateDictOptions(strict=strict)
    state = Rotary().state_dict()
    with torch.device("meta"):
        lost = Rotary()
    with pytest.raises(ours.StateDictMismatch, match=r"1 tensor is on meta.*table.*skeleton"):
        ours.set_model_state_dict(lost, state, options=options)
    assert lost.scale.is_meta
    model = torchlift.skeleton(Rotary)
    ours.set_model_state_dict(model, state, options=options)
    assert same(model.table, torch.arange(4.0))
    if not strict:
        model = torchlift.skeleton(Rotary)
        found = ours.set_model_state_dict(model, {"odd": torch.ones(1)}, options=options)
        assert found == (["scale"], ["odd"])
        assert same(model.scale.detach(), torch.full((2,), 3.0))
        lost.table = torch.arange(4.0)
        with pytest.raises(ours.StateDictMismatch, match=r"1 tensor is on meta.*scale"):
            ours.set_model_state_dict(lost, {"odd": torch.ones(1)}, options=options)

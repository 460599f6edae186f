"""Optimizer state dicts in one process: partial loads, saved dtypes, any groups."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from state_models import (
    FLAT,
    ON_0,
    PARTIAL,
    Tied,
    refused,
    same,
    set_both,
    step,
    trained,
    two_layers,
)
from torch import nn

import torchlift
import torchlift.distributed as ours
from torchlift.distributed import StateDictOptions


@pytest.mark.parametrize("flat", [False, True])
def test_missing_state_is_an_error_or_a_report(flat: bool) -> None:
    """pytorch/pytorch#34660, #132628; torch's flat form crashes elsewhere (#192224)."""
    options = FLAT if flat else StateDictOptions()
    saved = copy.deepcopy(ours.get_optimizer_state_dict(*trained(1), options=options))
    if flat:
        saved = {k: v for k, v in saved.items() if not k.startswith("state.1.bias.")}
    else:
        del saved["state"]["1.bias"]
    saved_more = ours.get_optimizer_state_dict(*trained(1))["state"]["1.weight"]
    if not flat:
        saved["state"]["other.weight"] = saved_more
    model, optimizer = trained()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(RuntimeError, match=r"missing the optimizer state of '1.bias'"):
        ours.set_optimizer_state_dict(model, optimizer, saved, options=options)
    assert same(optimizer.state_dict(), before)
    report = ours.set_optimizer_state_dict(
        model, optimizer, saved, options=StateDictOptions(strict=False)
    )
    assert report.loaded == ["0.weight", "0.bias", "1.weight"]
    assert report.missing_keys == ["1.bias"]
    assert report.unexpected_keys == ([] if flat else ["other.weight"])
    assert same(optimizer.state_dict()["state"][3], before["state"][3])


@pytest.mark.parametrize("options", [StateDictOptions(), FLAT], ids=["nested", "flat"])
def test_the_state_of_frozen_parameters_is_kept(options: Any) -> None:
    """Those that were trained and then frozen (pytorch/pytorch#192202)."""
    model, optimizer = trained()
    model[0].requires_grad_(False)
    saved = copy.deepcopy(ours.get_optimizer_state_dict(model, optimizer, options=options))
    other = two_layers()
    other[0].requires_grad_(False)
    loaded = torch.optim.Adam(other.parameters())
    ours.set_optimizer_state_dict(other, loaded, saved, options=options)
    assert same(loaded.state_dict()["state"], optimizer.state_dict()["state"])


def groups(model: nn.Sequential, order: str) -> torch.optim.Optimizer:
    """An optimizer whose groups come in any order, some empty, with a learning rate each."""
    rates = {"0": 0.1, "1": 0.2}
    made = [
        {"params": list(model[int(name)].parameters()), "lr": rates[name]}
        if name in rates
        else {"params": [], "lr": 0.7}
        for name in order
    ]
    return torch.optim.Adam(made)


@pytest.mark.parametrize("order", ["01", "10", "e10", "0e1e"])
@pytest.mark.parametrize("options", [StateDictOptions(), FLAT], ids=["nested", "flat"])
def test_groups_are_found_by_their_parameters(order: str, options: Any) -> None:
    """In whatever order, beside empty ones of any number (pytorch/pytorch#143828)."""
    model = two_layers()
    saving = groups(model, "0e1")
    step(model, saving)
    saved = copy.deepcopy(ours.get_optimizer_state_dict(model, saving, options=options))
    loading = groups(model, order)
    for group in loading.param_groups:
        group["lr"] = 9.0
    ours.set_optimizer_state_dict(model, loading, saved, options=options)
    rates = {"0": 0.1, "1": 0.2}
    for name, group in zip(order, loading.param_groups, strict=True):
        if name in rates:
            assert group["lr"] == rates[name]
    for param, state in saving.state.items():
        assert same(loading.state[param], state)
    step(model, loading)


def test_groups_may_be_split_and_may_not_be_mixed() -> None:
    """Parameters that were saved with different values cannot share a group."""
    model = two_layers()
    one = torch.optim.Adam(model.parameters(), lr=0.3)
    step(model, one)
    split = groups(model, "10")
    ours.set_optimizer_state_dict(model, split, ours.get_optimizer_state_dict(model, one))
    assert [group["lr"] for group in split.param_groups] == [0.3, 0.3]
    saved = ours.get_optimizer_state_dict(model, groups(model, "01"))
    with pytest.raises(ours.StateDictMismatch, match="different values of 'lr'"):
        ours.set_optimizer_state_dict(model, one, saved)


def test_the_state_of_tied_parameters_is_found_by_any_name() -> None:
    """Also where they were not tied when they were saved."""
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    other = torch.optim.Adam(model.parameters())
    renamed = {
        "state": {"head.weight": optimizer.state[model.head.weight]},
        "param_groups": [{"lr": 0.1, "params": ["head.weight"]}],
    }
    assert ours.set_optimizer_state_dict(model, other, renamed).loaded == ["head.weight"]


class Odd(torch.optim.Optimizer):
    """State of every kind: nested, counted by integers, absent, text, and beside parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "names": ("a", "b")})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                state["blocks"] = {0: {"left": torch.ones(2)}, 1: {"left": torch.zeros(3)}}
                state["kind"], state["none"], state["flag"] = "dense", None, True
                state["history"] = [torch.ones(1), (2, 3)]
                # A text of digits stays a text.
                state["texts"] = {"0": torch.ones(1), "007": 2, "a": {-3: torch.zeros(1)}}


def test_the_optimizer_s_own_state_dict_loads_too() -> None:
    """Its numbers are matched by position, as the optimizer itself would."""
    model, optimizer = trained(1)
    other = torch.optim.Adam(model.parameters(), lr=0.5)
    ours.set_optimizer_state_dict(model, other, optimizer.state_dict())
    assert same(other.state_dict(), optimizer.state_dict())
    never_stepped = torch.optim.Adam(model.parameters(), lr=0.1).state_dict()
    never_stepped["param_groups"][0]["params"] = range(4)  # as torch permits
    ours.set_optimizer_state_dict(model, other, never_stepped)
    never_stepped["param_groups"][0]["params"] = [*range(4)]
    assert same(other.state_dict(), never_stepped)
    few = torch.optim.Adam(model[0].parameters())
    with pytest.raises(ours.StateDictMismatch, match="no optimizer has groups of these sizes"):
        ours.set_optimizer_state_dict(model, few, optimizer.state_dict())


def actor_and_alpha(seed: int) -> tuple[nn.Module, Any]:
    """An optimizer after a step of a model, and of parameters that are nowhere in it."""
    torch.manual_seed(seed)
    model = nn.Linear(2, 1)
    loose = [nn.Parameter(torch.randn(size)) for size in (1, 3, 3)]
    groups = [[*model.parameters(), loose[0]], loose[1:]]
    optimizer = torch.optim.Adam([{"params": params, "lr": seed + 1.0} for params in groups])
    for group in groups:
        for param in group:
            param.grad = torch.randn_like(param)
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("options", [StateDictOptions(), FLAT], ids=["nested", "flat"])
def test_what_belongs_to_nothing_has_a_name_by_its_place(tmp_path: Any, options: Any) -> None:
    """A temperature such as log_alpha, beside a model and alone, out of memory and of files."""
    expected = actor_and_alpha(1)
    saved = ours.get_optimizer_state_dict(*expected, options=options)
    if options is not FLAT:
        loose = ["param_groups.0.params.2", "param_groups.1.params.0", "param_groups.1.params.1"]
        assert list(saved["state"]) == ["weight", "bias", *loose]
        assert saved["param_groups"][1]["params"] == loose[1:]
    for given in (saved, expected[1].state_dict()):
        model, optimizer = actor_and_alpha(2)
        assert len(ours.set_optimizer_state_dict(model, optimizer, given).loaded) == 5
        assert same(optimizer.state_dict(), expected[1].state_dict())
        torch.save({"optimizer": given}, tmp_path / "saved.pt")
        model, optimizer = actor_and_alpha(2)
        torchlift.load_optimizer(model, optimizer, tmp_path / "saved.pt", root="optimizer")
        assert same(optimizer.state_dict(), expected[1].state_dict())
    one, two = (torch.optim.SGD([nn.Parameter(torch.ones(1))], momentum=0.9) for _ in "ab")
    one.param_groups[0]["params"][0].grad = torch.ones(1)
    one.step()
    alone = ours.get_optimizer_state_dict(nn.Module(), one, options=options)
    ours.set_optimizer_state_dict(nn.Module(), two, alone)
    assert same(two.state_dict(), one.state_dict())


def test_a_lazy_layer_needs_a_batch_before_its_optimizer_is_read_or_loaded(tmp_path: Any) -> None:
    """torch says only "Attempted to use an uninitialized parameter"."""
    model = nn.Sequential(nn.LazyLinear(3))
    optimizer = torch.optim.AdamW(model.parameters())
    ours.get_model_state_dict(model)
    empty = {"state": {}, "param_groups": []}
    calls: list[Any] = [
        lambda: ours.get_optimizer_state_dict(model, optimizer),
        lambda: ours.set_optimizer_state_dict(model, optimizer, empty),
        lambda: torchlift.Keeper(tmp_path).save(1, model=model, optimizer=optimizer),
    ]
    for call in calls:
        with pytest.raises(ours.StateDictMismatch, match=r"lazy layer.*Run the model once on a"):
            call()
    model(torch.ones(1, 2))
    assert list(ours.get_optimizer_state_dict(model, optimizer)["state"]) == ["0.weight", "0.bias"]


def test_state_beside_that_of_parameters_does_not_have_a_flat_form() -> None:
    """It came back under a wrong name, and was lost."""
    model, optimizer = trained()
    optimizer.state["seed"] = torch.tensor(3)  # type: ignore[index]
    with pytest.raises(ours.StateDictMismatch, match="does not have a flat form"):
        ours.get_optimizer_state_dict(model, optimizer, options=FLAT)


def test_no_momentum_of_an_older_sgd_is_no_momentum_yet() -> None:
    """It was saved as None."""
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saved = ours.get_optimizer_state_dict(model, optimizer)
    for state in saved["state"].values():
        state["momentum_buffer"] = None
    ours.set_optimizer_state_dict(model, optimizer, saved)
    step(model, optimizer)


def test_one_parameter_of_two_optimizers_is_an_error() -> None:
    """Of two states and two groups under one name, a dict would lose one in silence."""
    model = two_layers()
    optimizers = [
        torch.optim.Adam(model.parameters()),
        torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9),
    ]
    with pytest.raises(
        ours.StateDictMismatch, match=r"'1\.weight': two optimizers hold the same param"
    ):
        ours.get_optimizer_state_dict(model, optimizers)
    twice = ours.get_optimizer_state_dict(model, [optimizers[0], optimizers[0]])
    assert len(twice["state"]) == 4


def _frozen(model: nn.Module, *parts: nn.Module) -> nn.Module:
    for part in parts or (model,):
        part.requires_grad_(False)
    return model


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


#: A model, and an optimizer of it if it has anything to optimize.
SIMPLE: dict[str, tuple[Any, Any]] = {
    "nothing": (nn.Module, None),
    "no parameter": (lambda: nn.Sequential(nn.ReLU(), nn.Dropout()), None),
    "a buffer": (lambda: nn.BatchNorm1d(2, affine=False), None),
    "numbers for names": (lambda: nn.ParameterList([torch.ones(2), torch.tensor(1.0)]), _adam),
    "wrappers' names": (lambda: nn.ModuleDict({"module": nn.Linear(2, 2)}), _adam),
    "one module twice": (lambda: nn.Sequential(*[nn.Linear(2, 2)] * 2), _adam),
    "no element": (lambda: nn.ParameterDict({"a": torch.ones(0, 3)}), _adam),
    "a part": (two_layers, lambda model: _adam(model[1])),
    "two optimizers": (
        two_layers,
        lambda model: [_adam(model[1]), torch.optim.SGD(model[0].parameters(), momentum=0.9)],
    ),
    "frozen": (lambda: _frozen(two_layers()), _adam),
    "half frozen": (lambda: _frozen(model := two_layers(), model[0]), _adam),
    "empty group": (
        two_layers,
        lambda model: torch.optim.Adam([{"params": []}, {"params": model.parameters(), "lr": 3.0}]),
    ),
    "only an empty group": (two_layers, lambda _: torch.optim.Adam([{"params": []}], lr=3.0)),
    "tied": (Tied, _adam),
    "without a state": (two_layers, lambda model: torch.optim.SGD(model.parameters(), lr=0.1)),
    "a state of every kind": (two_layers, lambda model: Odd(model.parameters())),
}


@pytest.mark.parametrize(
    "options",
    [StateDictOptions(), FLAT, ON_0],
    ids=["nested", "flat", "whole"],
)
@pytest.mark.parametrize("name", SIMPLE)
def test_simple_models_and_optimizers_make_the_round_trip(name: str, options: Any) -> None:
    """Read, set into new ones and read again: the same, before a first step and after it."""
    make, optimize = SIMPLE[name]
    for times in (0, 2):
        model, target = make(), make()
        state = ours.get_model_state_dict(model, options=options)
        assert ours.set_model_state_dict(target, state, options=options) == ([], [])
        assert same(dict(ours.get_model_state_dict(target, options=options)), dict(state))
        if optimize is None:
            assert set_both(target, [], (state, {}), options=options) == ([], [])
            continue
        source, other = optimize(model), optimize(target)
        for optimizer in source if isinstance(source, list) else [source]:
            step(model, optimizer, times)
        saved = copy.deepcopy(ours.get_optimizer_state_dict(model, source, options=options))
        kept = copy.deepcopy(saved)
        ours.set_optimizer_state_dict(target, other, saved, options=options)
        assert same(ours.get_optimizer_state_dict(target, other, options=options), saved)
        assert name != "without a state" or not other.state
        for optimizer in other if isinstance(other, list) else [other]:
            step(target, optimizer)
        assert same(saved, kept), "the dict of the caller is not touched, nor by later steps"


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("options", [StateDictOptions(), FLAT], ids=["nested", "flat"])
def test_an_optimizer_of_another_kind_is_refused(options: Any) -> None:
    """SGD would keep Adam's moments beside its own, and `betas` in its groups, and train on."""
    model, adam = trained()
    saved = ours.get_optimizer_state_dict(model, adam, options=options)
    sgd = _sgd(model)
    text = "another kind of optimizer than SGD; expected momentum, dampening in each group; found"
    with refused(text, sgd) as caught:
        ours.set_optimizer_state_dict(model, sgd, saved, options=options)
    assert "betas, eps, amsgrad" in str(caught.value)
    with pytest.raises(ours.StateDictMismatch, match="another kind of optimizer than Adam"):
        ours.set_optimizer_state_dict(model, adam, sgd.state_dict())
    report = ours.set_optimizer_state_dict(model, sgd, saved, options=PARTIAL)
    assert len(report.loaded) == 4


def test_another_order_of_parameters_is_named_as_the_cause() -> None:
    """Where only numbers tell them apart, and shapes show that they are in another order."""
    model, adam = trained()
    turned = torch.optim.Adam(list(model.parameters())[::-1])
    with pytest.raises(ours.StateDictMismatch, match=r"in the same order\."):
        ours.set_optimizer_state_dict(model, turned, adam.state_dict())


def norms(seed: int) -> nn.Module:
    """Four parameters of one shape, so that only their order or their names tell them apart."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.LayerNorm(2), nn.LayerNorm(2))


def test_numbers_of_other_groups_are_refused() -> None:
    """As in torch. The order differs then, and the moments would go to other parameters."""
    model = norms(0)
    split = [{"params": [layer.weight for layer in model]}, {"params": [n.bias for n in model]}]
    saving = torch.optim.Adam(split)
    step(model, saving)
    for strict in (True, False):
        options = StateDictOptions(strict=strict)
        model = norms(1)
        loading = torch.optim.Adam(model.parameters())
        with pytest.raises(ours.StateDictMismatch, match=r"groups of these sizes.*2, 2 param"):
            ours.set_optimizer_state_dict(model, loading, saving.state_dict(), options=options)
        assert not loading.state
    halves = [torch.optim.Adam(layer.parameters()) for layer in model]
    other = torch.optim.Adam(norms(2)[1].parameters())
    with pytest.raises(ours.StateDictMismatch, match="several optimizers have groups of these"):
        ours.set_optimizer_state_dict(model, halves, other.state_dict(), options=PARTIAL)
    ours.set_optimizer_state_dict(model, halves[1], other.state_dict())


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")])
def test_names_of_another_wrapper_are_understood(wrap: Any) -> None:
    """By position, in other groups, learning rates would trade places without an error."""
    model = norms(0)
    wrapped = wrap(model)
    named = dict(wrapped.named_parameters())
    decayed = [(name, param) for name, param in named.items() if name.endswith("weight")]
    others = [(name, param) for name, param in named.items() if name.endswith("bias")]
    saving = torch.optim.Adam([{"params": decayed, "lr": 0.1}, {"params": others, "lr": 0.2}])
    step(model, saving)
    for target in (norms(1), wrap(norms(1))):
        weights, biases = ([p for n, p in target.named_parameters() if n.endswith(end)]
                           for end in ("weight", "bias"))  # fmt: skip
        loading = torch.optim.Adam([{"params": biases}, {"params": weights[::-1]}])
        ours.set_optimizer_state_dict(target, loading, saving.state_dict())
        assert [group["lr"] for group in loading.param_groups] == [0.2, 0.1]
        for param, saved in zip(target.parameters(), model.parameters(), strict=True):
            assert same(loading.state[param], saving.state[saved])


@pytest.mark.parametrize(("kind", "other"), [("Adam", "Adamax"), ("Adamax", "Adam")])
def test_a_state_without_values_that_a_step_needs_is_refused(kind: str, other: str) -> None:
    """The next step would end in a KeyError. The advice works when it is followed."""
    model = two_layers()
    saving = getattr(torch.optim, kind)(model.parameters())
    step(model, saving)
    cut = copy.deepcopy(ours.get_optimizer_state_dict(model, saving))
    del cut["state"]["1.bias"]["exp_avg"]
    for name, saved in ((other, saving.state_dict()), (kind, cut)):
        for times in (0, 2):
            loading = getattr(torch.optim, name)(model.parameters(), lr=0.5)
            step(model, loading, times)
            with refused(f"lacks values that {name} needs", loading):
                ours.set_optimizer_state_dict(model, loading, saved)
            ours.set_optimizer_state_dict(model, loading, saved, options=PARTIAL)
            step(model, loading)


class Counting(torch.optim.SGD):
    """Counts its steps in one place."""

    def step(self, closure: Any = None) -> Any:
        count = self.state.get("count") or 0
        # Typed as if every key were a tensor.
        self.state["count"] = count + 1  # type: ignore[index]
        return super().step(closure)


def test_one_of_several_optimizers_gets_state_beside_the_parameters_again() -> None:
    """Each would have its own otherwise, and the next state dict would be an error."""
    model = two_layers()

    def made() -> list[torch.optim.Optimizer]:
        first = Counting(model[0].parameters(), lr=0.1)
        return [torch.optim.Adam(model[1].parameters()), first]

    run = made()
    for each in run:
        step(model, each)
    saved = copy.deepcopy(ours.get_optimizer_state_dict(model, run))
    again = made()
    ours.set_optimizer_state_dict(model, again, saved)
    step(model, again[1])
    assert ours.get_optimizer_state_dict(model, again)["state"]["count"] == 2


def test_the_result_shares_no_container_with_the_optimizer() -> None:
    """dcp.load writes numbers into it, before anything is checked."""
    model, optimizer = trained()
    before = copy.deepcopy(optimizer.state_dict())
    saved = ours.get_optimizer_state_dict(model, optimizer)
    for state in saved["state"].values():
        state.clear()
    assert same(optimizer.state_dict(), before)


def test_a_frozen_parameter_that_was_saved_without_a_state_has_none() -> None:
    """The state of another run would move it as soon as it is trained."""
    model = two_layers()
    model[0].requires_grad_(False)
    saving = torch.optim.Adam(model.parameters())
    step(model, saving)
    saved = copy.deepcopy(ours.get_optimizer_state_dict(model, saving))
    other, loading = trained()
    other[0].requires_grad_(False)
    kept = copy.deepcopy(loading.state_dict()["state"][0])
    ours.set_optimizer_state_dict(other, loading, saved, options=PARTIAL)
    assert same(loading.state_dict()["state"][0], kept)
    report = ours.set_optimizer_state_dict(other, loading, saved)
    assert report.left_out == ["0.weight", "0.bias"]
    assert same(loading.state_dict()["state"], saving.state_dict()["state"])


def test_the_flags_of_the_saved_group_say_where_a_step_counts() -> None:
    """A fused optimizer needs its counter in float32 next to the parameter, as torch puts it."""
    model = two_layers()
    saving = torch.optim.AdamW(model.parameters(), fused=True)
    step(model, saving)
    saved = copy.deepcopy(saving.state_dict())
    for state in saved["state"].values():
        state["step"] = state["step"].double()
    loading = torch.optim.AdamW(model.parameters())
    ours.set_optimizer_state_dict(model, loading, saved)
    assert loading.param_groups[0]["fused"]
    assert all(state["step"].dtype is torch.float32 for state in loading.state.values())
    step(model, loading)


def in_group(key: Any, value: Any, without: str = "") -> Any:
    def change(saved: Any) -> Any:
        (group,) = saved["param_groups"]
        group.pop(without, None)
        return {**saved, "param_groups": [{**group, key: value}]}

    return change


def flat_and(key: Any) -> Any:
    return lambda _: {**ours.get_optimizer_state_dict(*trained(), options=FLAT), key: 1}


NOT_A_KEY = "not a key of an optimizer state dict"
#: What is wrong with a state -> how a good one becomes it, and what the error says.
MALFORMED: dict[str, tuple[Any, str]] = {
    "of a model": (lambda _: two_layers().state_dict(), NOT_A_KEY),
    "empty": (lambda _: {}, "missing"),
    "a flat name of no parameter": (lambda _: {"state.seed": torch.tensor(3)}, NOT_A_KEY),
    **{f"a flat state and {key!r}": (flat_and(key), NOT_A_KEY) for key in (7, None, (1, 2))},
    **{
        f"params={params!r}": (in_group("params", params), "a list of names or numbers")
        for params in (None, False, 3, torch.tensor(1.0), [{}], [[0]], [None, 1])
    },
    "a number for an option": (in_group(7, 0.1, without="eps"), r"another kind.*found 7"),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_state_is_refused_by_what_is_wrong(kind: str) -> None:
    """It ended in a TypeError or a KeyError of torch."""
    model, optimizer = trained()
    change, says = MALFORMED[kind]
    saved = change(copy.deepcopy(optimizer.state_dict()))
    with refused(says, model, optimizer):
        ours.set_optimizer_state_dict(model, optimizer, saved)

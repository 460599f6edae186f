"""Running a constructor again: what is made is what construction makes."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import MethodType
from typing import Any

import pytest
import torch
from constructions import FACTORIES, Made
from same_model import all_tensors, assert_same_tensors
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from zoo import same

import torchlift

Factory = Callable[[], nn.Module]

every_construction = pytest.mark.parametrize("name", list(FACTORIES))
# torch deprecates the old normalisations, but models are full of them.
old_ways = pytest.mark.filterwarnings(
    "ignore:.*(weight_norm|spectral_norm).*:FutureWarning",
    "ignore:Sparse invariant checks",  # of torch 2.11 also where they are asked for
)


def built(build: Callable[[Any], object]) -> Any:
    """A skeleton of a module whose constructor is `build`."""
    return torchlift.skeleton(Made, build)


def replayed(build: Callable[[Any], object], seed: int = 0) -> Any:
    """That skeleton, made with a seed."""
    model = built(build)
    torch.manual_seed(seed)
    torchlift.materialize(model)
    return model


@old_ways
@every_construction
def test_a_replay_with_a_seed_is_the_construction_with_that_seed(name: str) -> None:
    """All values, strides, kinds and ties are those of the constructor; random ones too."""
    factory = FACTORIES[name]
    torch.manual_seed(0)
    wanted = factory()
    torch.manual_seed(0)
    model = torchlift.skeleton(factory)
    assert all(parameter.is_meta for parameter in model.parameters())
    torch.manual_seed(0)
    torchlift.materialize(model)
    assert_same_tensors(model, wanted)


@old_ways
@every_construction
def test_every_tensor_replayed_alone_is_the_one_that_is_replayed_with_all(name: str) -> None:
    """The history of one tensor is complete: it needs nothing that was made for another."""
    factory = FACTORIES[name]
    wanted, other = factory(), factory()
    model = torchlift.skeleton(factory)
    random = {
        key
        for (key, one), two in zip(
            all_tensors(wanted).items(), all_tensors(other).values(), strict=True
        )
        if not same(one, two)
    }
    for key in reversed(list(all_tensors(model))):
        torchlift.materialize(model, names=[key])
        tensor = all_tensors(model)[key]
        assert not tensor.is_meta
        assert tensor.stride() == all_tensors(wanted)[key].stride()
        if key not in random:
            assert same(tensor, all_tensors(wanted)[key]), key


@pytest.mark.parametrize("name", ["every_sampler", "asks_item", "orthogonal", "Transformer"])
def test_a_skeleton_leaves_the_random_state_alone(name: str) -> None:
    """Nothing is drawn for a skeleton, not even to answer a constructor's questions."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    torchlift.skeleton(FACTORIES[name])
    assert torch.equal(torch.get_rng_state(), before)


def test_the_same_seed_gives_the_same_parts() -> None:
    """A partial replay is reproducible, though it draws fewer numbers than the constructor."""
    made = []
    for _ in range(2):
        model = torchlift.skeleton(FACTORIES["Transformer"])
        torch.manual_seed(4)
        names = torchlift.materialize(model, names=["decoder"])
        made.append([all_tensors(model)[name] for name in names])
    assert len(made[0]) > 10
    assert all(same(one, two) for one, two in zip(*made, strict=True))


def test_different_seeds_give_different_weights_of_the_same_distribution() -> None:
    """Random initialisers are replayed, not frozen at what was drawn while recording."""
    one, two = (
        replayed(lambda m: setattr(m, "w", nn.Parameter(torch.randn(10_000))), seed)
        for seed in (1, 2)
    )
    assert not torch.equal(one.w, two.w)
    assert all(abs(model.w.mean()) < 0.05 and abs(model.w.std() - 1) < 0.05 for model in (one, two))


def test_tensors_in_attributes_lists_and_dicts_are_made_too() -> None:
    """Nothing that a module holds stays on meta, and an alias of a parameter stays one."""
    factory = FACTORIES["plain_attributes"]
    torch.manual_seed(0)
    wanted: Any = factory()
    model: Any = torchlift.skeleton(factory)
    torch.manual_seed(0)
    torchlift.materialize(model)
    assert same(model.table, wanted.table)
    assert same(model.nested[0], wanted.nested[0])
    assert same(model.nested[1]["x"][0], wanted.nested[1]["x"][0])
    assert model.nested[1]["x"][1] == "text"
    assert same(model.derived, wanted.derived)
    assert model.alias is model.linear.weight


def test_views_of_one_storage_still_share_it() -> None:
    """Two buffers that are halves of one tensor are so after a replay."""
    model = replayed(lambda m: [m.register_buffer(*item) for item in _halves()])
    assert model.left.untyped_storage().data_ptr() == model.right.untyped_storage().data_ptr()
    assert model.right.storage_offset() == 4


def _halves() -> list[tuple[str, torch.Tensor]]:
    whole = torch.arange(8.0)
    return [("left", whole[:4]), ("right", whole[4:])]


def test_answers_about_data_are_those_of_real_data() -> None:
    """Python values that come out of tensors while recording are the real ones."""
    seen: dict[str, Any] = {}

    def build(m: Any) -> None:
        table = torch.arange(6.0).view(2, 3) + 1
        seen["item"] = table[1, 2].item()
        seen["list"] = table.tolist()
        seen["bool"] = bool((table > 5).any())
        seen["float"] = float(table.mean())
        seen["equal"] = torch.equal(table, table.clone())
        seen["array"] = table.numpy().sum()
        seen["count"] = len(table[table > 2])
        seen["loop"] = [int(value) for value in torch.tensor([3, 1])]
        seen["format"] = f"{table.max():.1f}"
        seen["index"] = [10, 20, 30][torch.tensor(1)]
        seen["shape"] = tuple(torch.zeros(int(table[0, 1]), 2).shape)

    built(build)
    assert seen == {
        "item": 6.0, "list": [[1, 2, 3], [4, 5, 6]], "bool": True, "float": 3.5, "equal": True,
        "array": 21.0, "count": 4, "loop": [3, 1], "format": "6.0", "index": 20, "shape": (2, 2),
    }  # fmt: skip


def test_an_answer_comes_from_the_values_of_that_moment() -> None:
    """A later write does not change what an earlier question saw."""
    seen: list[float] = []

    def build(m: Any) -> None:
        counter = torch.zeros(2)
        for step in range(3):
            counter[0] += step
            seen.append(counter[0].item())
            counter.view(-1)[1:] = counter[0] * 2
            seen.append(counter.sum().item())
        m.register_buffer("counter", counter)

    assert replayed(build).counter.tolist() == [3, 6]
    assert seen == [0, 0, 1, 3, 3, 9]  # the constructor ran once: there is no parameter


def test_a_call_without_a_meta_kernel_is_replayed_like_any_other() -> None:
    """Its result follows the random numbers of the replay, and takes no memory before it."""

    def build(m: Any) -> None:
        m.weight = nn.Parameter(torch.randn(4, 4))
        packed = torch.geqrf(m.weight.detach())
        m.register_buffer("packed", packed.a)
        m.register_buffer("tau", packed.tau)

    model = built(build)
    assert model.packed.is_meta
    torch.manual_seed(1)
    torchlift.materialize(model)
    wanted = torch.geqrf(model.weight.detach())
    assert torch.equal(model.packed, wanted.a)
    assert torch.equal(model.tau, wanted.tau)


def test_a_constructor_that_keeps_the_device_of_a_parameter_keeps_the_real_one() -> None:
    """A model that remembers meta would send its input there."""

    def build(m: Any) -> None:
        m.layer = nn.Linear(2, 2)
        m.device = m.layer.weight.device

    model = built(build)
    assert model.device == torch.device("cpu")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_addresses_tell_ties_from_strangers() -> None:
    """Constructors that compare data_ptr() get the answer of real memory."""
    seen: list[bool] = []

    def build(m: Any) -> None:
        one, two = torch.ones(3), torch.ones(3)
        seen.append(one.data_ptr() == two.data_ptr())
        seen.append(one.data_ptr() == one.view(3, 1).data_ptr())
        seen.append(one[1:].data_ptr() == one.data_ptr() + 4)

    built(build)
    assert seen == [False, True, True]


def test_python_data_is_taken_as_it_is_at_that_moment() -> None:
    """An array or a list that changes later does not change what was made of it."""
    import numpy as np

    array, listed = np.arange(3.0), [1.0, 2.0]

    def build(m: Any) -> None:
        m.register_buffer("array", torch.tensor(array))
        m.register_buffer("listed", torch.tensor(listed))

    model = built(build)
    array[:] = -1
    listed[0] = -1
    torchlift.materialize(model)
    assert model.array.tolist() == [0, 1, 2]
    assert model.listed.tolist() == [1, 2]


class Shares(nn.Module):
    """Takes over a weight and a layer of another model."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.weight, self.base, self.new = base.weight, base, nn.Linear(2, 2)


BASE = nn.Linear(2, 2)


@pytest.mark.parametrize("way", ["argument", "closure", "global", "partial", "method"])
def test_tensors_of_the_caller_stay_as_they_are(way: str) -> None:
    """They are live, before and after. The factory runs once, so the new layer is real."""
    base = BASE if way == "global" else nn.Linear(2, 2)
    before = base.weight.detach().clone()
    factory: Any = {
        "argument": lambda: Shares(base),
        "closure": lambda: Shares(base),
        "global": lambda: Shares(BASE),
        "partial": partial(Shares, base),
        "method": MethodType(Shares, base),
    }[way]
    model: Any = torchlift.skeleton(*((Shares, base) if way == "argument" else (factory,)))
    assert model.weight is model.base.weight is base.weight
    assert torch.equal(base.weight, before)
    assert torchlift.materialize(model) == []
    assert not model.new.weight.is_meta


def test_containers_of_arguments_are_taken_as_they_are_at_that_moment() -> None:
    """A constructor that takes options out of a dict finds them again, and so does the caller."""

    def build(options: dict[str, Any]) -> nn.Module:
        return nn.Linear(2, options.pop("width"))

    given = {"width": 3}
    model = torchlift.skeleton(build, given)
    assert given == {}  # as construction does
    torchlift.materialize(model)
    assert model.weight.shape == (3, 2)


def test_a_replay_gives_tensors_that_can_be_trained_whatever_mode_it_runs_in() -> None:
    """Recorded in inference mode, replayed without gradients: what is made is what the modes say
    when it is made, and parameters require their gradients.
    """
    with torch.inference_mode():
        model: Any = torchlift.skeleton(nn.Linear, 2, 3)
    with torch.no_grad():
        torchlift.materialize(model)
    assert not model.weight.is_inference()
    assert model.weight.requires_grad
    model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None


def test_an_initialiser_that_refuses_its_tensor_raises_in_the_skeleton_as_it_would_for_real() -> (
    None
):
    """A constructor that falls back on another initialiser takes the same path."""

    def build(m: Any) -> None:
        m.bias = nn.Parameter(torch.empty(4))
        try:
            nn.init.xavier_uniform_(m.bias)
        except ValueError:
            nn.init.constant_(m.bias, 0.25)

    assert replayed(build).bias.tolist() == [0.25] * 4


def test_a_write_that_autograd_refuses_is_refused_in_a_skeleton() -> None:
    """An in-place write to a leaf that requires grad is torch's error, not a surprise later."""

    def build(m: Any) -> None:
        m.weight = nn.Parameter(torch.empty(3))
        m.weight.normal_()

    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        built(build)


def test_an_error_in_the_constructor_arrives_unchanged_and_leaves_torch_clean() -> None:
    """The very exception object comes out, and no mode is left."""
    raised = KeyError("mine")

    def build(m: Any) -> None:
        m.linear = nn.Linear(2, 2)
        raise raised

    with pytest.raises(KeyError) as caught:
        built(build)
    assert caught.value is raised
    assert _get_current_function_mode_stack() == []
    assert torch.ones(1).device.type == "cpu"


def test_threads_that_build_at_once_do_not_see_each_other() -> None:
    """Each skeleton has its own history."""
    start, results, errors = threading.Barrier(4), [], []

    def work(width: int) -> None:
        try:
            start.wait()
            for _ in range(10):
                model: Any = torchlift.skeleton(nn.TransformerEncoderLayer, 8 * width, 2)
                torchlift.materialize(model, names=["norm1"])
                results.append((width, model.norm1.weight))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(width,)) for width in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(results) == 40
    assert all(torch.equal(weight, torch.ones(8 * width)) for width, weight in results)


def test_truncated_normal_values_lie_within_their_bounds() -> None:
    """The initialiser that samples until it fits is replayed as one call."""

    def build(m: Any) -> None:
        m.weight = nn.Parameter(torch.empty(1000))
        nn.init.trunc_normal_(m.weight, std=2.0, a=-1.0, b=0.5)

    weight = replayed(build).weight
    assert weight.min() >= -1
    assert weight.max() <= 0.5
    assert len(weight.unique()) > 900


def test_a_rotary_table_is_the_one_of_the_constructor() -> None:
    """The classic of plain meta construction: inverse frequencies that nobody computes."""

    def build(m: Any) -> None:
        inverse = 1.0 / (10000 ** (torch.arange(0, 8, 2, dtype=torch.int64).float() / 8))
        m.register_buffer("inv_freq", inverse, persistent=False)
        m.original = m.inv_freq

    model = replayed(build)
    expected = [1 / 10000 ** (step / 8) for step in (0, 2, 4, 6)]
    assert model.inv_freq.tolist() == pytest.approx(expected, rel=1e-6)
    assert model.original is model.inv_freq
    assert all(after < before for before, after in pairwise(model.inv_freq.tolist()))
    assert math.isfinite(model.inv_freq.sum())


class Filled(nn.Module):
    """Buffers of one number each, in the ways in which modules ask for them."""

    def __init__(self) -> None:
        super().__init__()
        self.zeros = nn.Buffer(torch.zeros(2, 3))
        self.ones = nn.Buffer(torch.ones((2,), dtype=torch.float64))
        self.by_name = nn.Buffer(torch.ones(size=(2,)))
        self.full = nn.Buffer(torch.full((2, 2), 7, dtype=torch.int32))
        self.guessed = nn.Buffer(torch.full((2,), True))
        self.counter = nn.Buffer(torch.tensor(0, dtype=torch.long))
        self.number = nn.Buffer(torch.tensor(127))
        self.scale = nn.Parameter(torch.tensor(3, dtype=torch.float32))
        self.is_counted = bool(torch.tensor(1) == 1)


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_what_is_filled_with_one_number_gets_it_when_it_is_made(default: torch.dtype) -> None:
    """With the dtype of the constructor."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        plain, model = Filled(), torchlift.skeleton(Filled)
        assert all(value.is_meta for value in model.state_dict().values())
        torchlift.materialize(model)
    finally:
        torch.set_default_dtype(before)
    assert model.is_counted
    for name, value in plain.state_dict().items():
        made = model.state_dict()[name]
        assert (made.dtype, made.tolist()) == (value.dtype, value.tolist()), name


def test_sizes_that_are_refused_raise_what_the_constructor_would_see() -> None:
    """Memory that is only claimed to be filled is refused in the words of what fills it."""
    for make in (lambda: torch.zeros(-1), lambda: torch.ones(2, memory_format=torch.strided)):
        found = []
        for run in (make, lambda make=make: torchlift.skeleton(make)):
            with pytest.raises((RuntimeError, TypeError)) as caught:
                run()
            found.append((type(caught.value), str(caught.value)))
        assert found[0] == found[1]

"""`match`: names of a checkpoint paired with tensors of a model."""

from __future__ import annotations

import pytest
import torch
from small_models import Mixed, Scalar, Tied, Two, saved
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.nn.utils.parametrize import remove_parametrizations

import torchlift
from torchlift import remap
from torchlift._model.slots import collect
from torchlift._plan.match import pair_tensors
from torchlift._plan.rules import rename_keys
from torchlift._plan.suggest import suggest_rename
from torchlift._sources.tensors import MemoryTensor
from torchlift.errors import MismatchError


def offers(**shapes: tuple[int, ...]) -> dict[str, MemoryTensor]:
    """Candidates by name, with a double underscore for a dot."""
    names = {key.replace("__", "."): shape for key, shape in shapes.items()}
    return {name: MemoryTensor(name, torch.empty(shape)) for name, shape in names.items()}


def test_tensors_are_grouped_by_identity_in_state_dict_order():
    """A tie is one group with all its names; hidden buffers are there but not persistent."""
    assert [group.names for group in collect(Tied())] == [("embed.weight", "head.weight")]
    groups = {group.fqn: group for group in collect(Mixed())}
    assert [name for name, group in groups.items() if group.persistent] == list(
        Mixed().state_dict()
    )
    assert not groups["frequencies"].persistent
    assert groups["scale"].is_parameter
    assert not groups["steps"].is_parameter


def test_a_module_at_two_paths_has_two_names_per_tensor():
    """Sharing a module ties everything in it."""
    inner = nn.Linear(1, 1)
    groups = collect(nn.ModuleList([inner, inner]))
    assert [group.names for group in groups] == [
        ("0.weight", "1.weight"),
        ("0.bias", "1.bias"),
    ]


def test_equal_names_and_shapes_match():
    """Every tensor finds its entry, and nothing is left over."""
    found = pair_tensors(collect(Two()), offers(a=(2, 3), b=(2, 3)), check_shapes=True)
    assert [(group.fqn, name) for group, name, _ in found.pairs] == [("a", "a"), ("b", "b")]
    assert (found.missing, found.unexpected, found.mismatched) == ([], [], {})


def test_what_does_not_match_is_sorted_into_three_lists():
    """Missing, unexpected and of another shape are told apart."""
    found = pair_tensors(collect(Two()), offers(a=(3, 2), c=(1,)), check_shapes=True)
    assert (found.missing, found.unexpected, found.pairs) == (["b"], ["c"], [])
    (wrong,) = found.mismatched.values()
    assert (wrong.key, wrong.expected, wrong.found) == ("a", (2, 3), (3, 2))
    assert str(wrong) == "a: model [2, 3], checkpoint [3, 2]"
    assert [group.fqn for group in found.unmatched] == ["a", "b"]


def test_shapes_are_left_alone_where_a_transform_may_change_them():
    """Without the check, only names count."""
    found = pair_tensors(collect(Two()), offers(a=(3, 2), b=(7,)), check_shapes=False)
    assert len(found.pairs) == 2


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_any_name_of_a_tie_will_do(name):
    """A checkpoint that stores a tied tensor once fits under either name, with nothing missing."""
    one = MemoryTensor(name, torch.empty((5, 3)))
    found = pair_tensors(collect(Tied()), {name: one}, check_shapes=True)
    assert [key for _, key, _ in found.pairs] == [name]
    assert (found.missing, found.unexpected) == ([], [])


def test_all_names_of_a_tie_are_missing_together():
    """A tie that gets nothing is listed as `load_state_dict` would list it."""
    assert pair_tensors(collect(Tied()), {}, check_shapes=True).missing == [
        "embed.weight",
        "head.weight",
    ]


def test_hidden_buffers_are_neither_missing_nor_expected():
    """A non-persistent buffer is no part of a checkpoint, even when a key has its name."""
    names = {key: tuple(value.shape) for key, value in Mixed().state_dict().items()}
    candidates = {key: MemoryTensor(key, torch.empty(shape)) for key, shape in names.items()}
    candidates["frequencies"] = MemoryTensor("frequencies", torch.empty(4))
    found = pair_tensors(collect(Mixed()), candidates, check_shapes=True)
    assert (found.missing, found.unexpected) == ([], ["frequencies"])


@pytest.mark.parametrize(("shape", "fits"), [((), True), ((1,), True), ((1, 1), False)])
def test_a_scalar_fits_a_shape_of_one(shape, fits):
    """torch < 0.4 saved scalars with one dimension."""
    found = pair_tensors(
        collect(Scalar()), {"a": MemoryTensor("a", torch.empty(shape))}, check_shapes=True
    )
    assert bool(found.pairs) is fits
    assert bool(found.mismatched) is not fits


def test_a_vector_of_one_does_not_fit_a_scalar():
    """The courtesy goes one way only."""
    found = pair_tensors(collect(Two(1)), offers(a=(), b=(1,)), check_shapes=True)
    assert list(found.mismatched) == ["a"]


def test_renaming_maps_keys_and_drops_those_that_become_none():
    """A rename that returns None leaves the key out."""
    names = rename_keys(["x.a", "x.b", "y"], lambda key: key[2:] or None, "f")
    assert names == {"x.a": "a", "x.b": "b"}
    assert rename_keys(["p", "q"], None, "f") == {"p": "p", "q": "q"}


def test_renaming_two_keys_to_one_name_is_an_error():
    """A collision names the file, both keys and the way out."""
    with pytest.raises(MismatchError) as caught:
        rename_keys(["a.w", "b.w"], lambda key: key[2:], "f.pt")
    assert str(caught.value) == (
        "f.pt: 'a.w': rename gives two keys one name, 'w'; found b.w. "
        "Return None for the key to drop."
    )


def test_renaming_to_something_that_is_no_name_is_a_type_error():
    """A callable that returns something else than text is the caller's mistake."""
    with pytest.raises(TypeError, match=r"rename\('a'\) returned 3, which is neither str nor None"):
        rename_keys(["a"], lambda key: 3, "f")


def test_a_prefix_of_the_checkpoint_is_recognised():
    """The names that data-parallel training leaves behind get the rename that removes them."""
    text = suggest_rename(["fc.weight", "fc.bias"], ["module.fc.weight", "module.fc.bias", "epoch"])
    assert "start with 'module.'" in text
    assert "remap.strip('module.')" in text


def test_a_prefix_of_the_model_is_recognised():
    """A checkpoint of a part of the model gets the rename that adds the prefix."""
    text = suggest_rename(["bert.w", "bert.b", "head.w"], ["w", "b"])
    assert "The model's names start with 'bert.'" in text
    assert "rename=lambda key: 'bert.' + key" in text


@pytest.mark.parametrize(
    ("missing", "unexpected"),
    [
        ([], ["a"]),
        (["a"], []),
        (["a", "b"], ["c", "d"]),
        (["w", "x", "y", "z"], ["old.w", "p", "q", "r"]),
    ],
)
def test_no_suggestion_is_better_than_a_wrong_one(missing, unexpected):
    """A prefix that would help few names is a coincidence."""
    assert suggest_rename(missing, unexpected) is None


@pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod.", "a.b.c."])
def test_the_suggested_prefix_works(prefix):
    """Any prefix is found, whatever its depth, and applying it removes every difference."""
    wanted = list(Mixed().state_dict())
    found = [prefix + key for key in wanted]
    text = suggest_rename(wanted, found)
    assert f"{prefix!r}" in text
    assert list(rename_keys(found, lambda key: key.removeprefix(prefix), "f").values()) == wanted


BERT = [
    f"bert.layer.{layer}.{name}.{kind}"
    for layer in range(3)
    for name in ("attention.query", "LayerNorm")
    for kind in ("weight", "bias")
]
AS_SAVED = {
    "DDP": lambda key: f"module.{key}",
    "a compiled model in DDP": lambda key: f"module._orig_mod.{key}",
    "a compiled child": lambda key: key.replace("bert.", "bert._orig_mod."),
    "a compiled child in DDP": lambda key: "module." + key.replace("bert.", "bert._orig_mod."),
    "two wrapped children": lambda key: key.replace("bert.", "bert.module.").replace(
        "query.", "query._orig_mod."
    ),
}


@pytest.mark.parametrize("name", AS_SAVED)
def test_the_rule_that_an_error_names_brings_all_names_together(name):
    """It is copied from the message, and then nothing is missing."""
    found = [AS_SAVED[name](key) for key in BERT]
    odd = [key for key in found if key not in BERT]
    text = suggest_rename([key for key in BERT if key not in found], odd)
    rename = eval(text.partition("pass rename=")[2].rstrip("."), {"remap": remap})
    assert list(rename_keys(found, rename, "f").values()) == BERT


def test_a_container_with_other_things_beside_it_is_a_root():
    """As Lightning saves: the weights of the module's child `model`, epoch and optimizer."""
    found = [f"state_dict.model.{key}" for key in BERT] + ["optimizer_states.0.state.0.exp_avg"]
    assert "pass root='state_dict.model' to load these alone" in suggest_rename(BERT, found)


@pytest.mark.parametrize("door", ["memory", "file", "several"])
def test_the_root_that_a_hint_names_counts_from_where_root_does(tmp_path, door):
    """Below ``root="ema"`` it is ``root="ema.module"``; of a checkpoint opened there, it is not."""
    model = nn.Linear(2, 2)
    given = {"ema": {"module": {**model.state_dict()}, "steps": torch.ones(1)}}
    path = saved(given, tmp_path)
    source = {"memory": given, "several": [path, given]}.get(door, path)
    with pytest.raises(MismatchError, match=r"pass root='ema\.module' to load these"):
        torchlift.load(model, source, root="ema")
    torchlift.load(model, source, root="ema.module")
    with torchlift.open(path, root="ema") as ckpt:
        with pytest.raises(MismatchError, match="pass root='module' to load these"):
            torchlift.load(model, ckpt)
        torchlift.load(model, ckpt, root="module")


@pytest.mark.parametrize(
    ("missing", "unexpected"),
    [
        (["net.1.weight", "net.3.weight"], ["net.0.weight", "net.2.weight"]),  # numbered otherwise
        (["fc.weight", "fc.bias"], ["fc_weight", "fc_bias"]),  # another separator
        (["norm.weight", "norm.bias"], ["norm.gamma", "norm.beta"]),  # somebody's own words
        (["a.x", "b.x"], ["a.module.x", "a._orig_mod.x"]),  # two names would become one
    ],
)
def test_a_rule_that_would_mix_names_up_is_not_named(missing, unexpected):
    """Numbers stand for layers, words may mean anything, and no two keys may get one name."""
    assert suggest_rename(missing, unexpected) is None


def test_a_hundred_thousand_names_without_a_common_rule_get_no_suggestion():
    """Rules are guessed from some of the names, and counted on all of them."""
    model = [f"layers.{n}.weight" for n in range(100_000)]
    assert suggest_rename(model, [f"blocks.{n}.inner.weight" for n in range(100_000)]) is None
    hint = suggest_rename(model, [f"net.{name}" for name in model])
    assert "rename=remap.strip('net.')" in str(hint)


def test_collecting_changes_nothing():
    """Reading a module leaves it alone."""
    model = Mixed()
    before = {key: (id(value), value._version) for key, value in model.state_dict().items()}
    tensors = dict(model.named_parameters())
    collect(model)
    assert {key: value._version for key, value in model.state_dict().items()} == {
        key: version for key, (_, version) in before.items()
    }
    assert all(tensors[key] is value for key, value in model.named_parameters())
    assert all(isinstance(value, torch.Tensor) for value in tensors.values())


def layers(*pruned: str) -> nn.Sequential:
    """Two layers, of which some tensors are pruned."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    for name in pruned:
        module, _, tensor = name.rpartition(".")
        prune.random_unstructured(model.get_submodule(module), tensor, 0.5)
    return model


@pytest.mark.parametrize("pruned", [("0.weight",), ("0.weight", "2.weight", "2.bias")])
def test_a_pruned_checkpoint_loads_by_its_hint(pruned):
    """The masks count: a rename of the values before them would bring the zeros back to life."""
    saved_one, model = layers(*pruned), layers()
    with pytest.raises(MismatchError) as caught:
        torchlift.load(model, saved_one.state_dict())
    for call in "identity", "remove":
        assert f"prune.{call}(model.get_submodule('0'), 'weight')" in str(caught.value.hint)
    parts = [(model.get_submodule(name[0]), name[2:]) for name in pruned]
    for part in parts:
        prune.identity(*part)
    torchlift.load(model, saved_one.state_dict())
    for part in parts:
        prune.remove(*part)
    x = torch.randn(4, 3)
    assert torch.equal(model(x), saved_one(x))
    assert model.state_dict().keys() == layers().state_dict().keys()


@pytest.mark.parametrize("parametrize", [weight_norm, spectral_norm, orthogonal])
def test_a_checkpoint_with_parametrizations_loads_by_its_hint(parametrize):
    """The weight is computed from several tensors, by a function that no name states."""
    saved_one, model = parametrize(nn.Linear(3, 3)).eval(), nn.Linear(3, 3)
    with pytest.raises(MismatchError) as caught:
        torchlift.load(model, saved_one.state_dict())
    call = "remove_parametrizations(model.get_submodule(''), 'weight')"
    assert call in str(caught.value.hint)
    parametrize(model).eval()
    torchlift.load(model, saved_one.state_dict())
    remove_parametrizations(model.get_submodule(""), "weight")
    torch.testing.assert_close(model.weight, saved_one.weight)

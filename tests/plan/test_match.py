"""`match`: names of a checkpoint paired with tensors of a model."""

from __future__ import annotations

import pytest
import torch
from small_models import saved
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.nn.utils.parametrize import remove_parametrizations

import torchlift
from torchlift import remap
from torchlift._plan.rules import rename_keys
from torchlift._plan.suggest import suggest_rename
from torchlift.errors import MismatchError


@pytest.mark.parametrize(
    ("missing", "unexpected"),
    [
        ([], ["a"]),
        (["a"], []),
        (["a", "b"], ["c", "d"]),
        (
            ["w", "x", "y", "z"],
            ["old.w", "p", "q", "r"],
        ),  # helps one alone
        (["net.1.weight", "net.3.weight"], ["net.0.weight", "net.2.weight"]),  # numbered otherwise
        (["fc.weight", "fc.bias"], ["fc_weight", "fc_bias"]),  # another separator
        (["norm.weight", "norm.bias"], ["norm.gamma", "norm.beta"]),  # somebody's own words
        (["a.x", "b.x"], ["a.module.x", "a._orig_mod.x"]),  # two names would become one
        (["a.x", "b.x"], ["net.a.module.x", "net.a._orig_mod.x"]),  # and below a prefix
    ],
)
def test_no_suggestion_is_better_than_a_wrong_one(missing, unexpected):
    """Numbers stand for layers, words may mean anything, and no two keys may get one name."""
    assert suggest_rename(missing, unexpected) is None


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
    "compiled children in a container": lambda key: (
        "model." + key.replace("query.", "query._orig_mod.").replace("Norm.", "Norm._orig_mod.")
    ),
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


def test_a_root_and_a_rule_that_a_hint_names_load_compiled_children(tmp_path):
    """As torchtitan saves: the optimizer lies beside the model, whose blocks are compiled."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    state = {f"{key[0]}._orig_mod{key[1:]}": value for key, value in model.state_dict().items()}
    path = saved({"model": state, "optimizer": {"lr": torch.ones(1)}}, tmp_path)
    with pytest.raises(MismatchError) as caught:
        torchlift.load(model, path)
    called = caught.value.hint.partition("pass ")[2].rstrip(".").replace(" and rename", ", rename")
    report = eval(f"load(model, path, {called})", {**vars(torchlift), "model": model, "path": path})
    assert {*report.loaded} == {*model.state_dict()}


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

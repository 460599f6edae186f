"""`Checkpoint.tree`, and the optimizer states that `load_optimizer` takes from it."""

import copy
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise
from torch import nn
from zoo import same, step, two_layers

import torchlift
from torchlift.errors import UnsafeError

KEYS = st.one_of(st.text("ab1_", max_size=3), st.integers(0, 5), st.booleans())
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-9, 9), st.text(max_size=3), st.floats(-1, 1),
    st.sampled_from([torch.float16, torch.device("cuda", 3), slice(1, None, 2), frozenset({1})]),
    st.builds(lambda n: Counter([n, n]), st.integers(0, 3)),
    st.builds(lambda n: torch.arange(n), st.integers(0, 3)),
)  # fmt: skip
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
    | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict),
    max_leaves=8,
)  # fmt: skip


@pytest.mark.parametrize("zipped", [True, False])
@settings(deadline=None)
@given(tree=TREES)
def test_a_tree_comes_back_as_it_was_saved(tmp_path_factory, zipped, tree):
    """Integer keys, lists, tuples, dtypes, devices and slices; tensors are mapped."""
    path = tmp_path_factory.mktemp("tree") / "x.pt"
    torch.save(tree, path, _use_new_zipfile_serialization=zipped)
    refused = None
    try:
        found = torchlift.open(path).tree()
    except torchlift.FormatError as error:
        refused = str(error)
    if refused is None:
        assert same(tree, found, kinds=True)
    else:
        assert "have this key after their containers are joined with dots" in refused


def test_a_container_of_a_tree_is_found_by_its_dotted_name(tmp_path):
    """Also one whose own names have dots, one in a list, and one of a checkpoint with a root."""
    state = {"a.b": [{"c": torch.ones(1), 3: "x"}, [1, 2]], "a.d": (1,)}
    torch.save({"outer": state}, tmp_path / "x.pt")
    ckpt = torchlift.open(tmp_path / "x.pt", root="outer")
    assert same(ckpt.tree(), state, kinds=True)
    assert same(ckpt.tree("a.b.0"), state["a.b"][0], kinds=True)
    assert ckpt.tree("a.b.1") == [1, 2]
    assert same(ckpt.tree("a"), {"b": state["a.b"], "d": (1,)}, kinds=True)
    with pytest.raises(torchlift.FormatError, match="does not contain this container"):
        ckpt.tree("nothing")


def test_what_cannot_be_had_is_refused_by_its_key(tmp_path):
    """Beside it everything is."""
    torch.save({"model": {"w": torch.ones(1)}, "args": {"x": re.compile("a")}}, tmp_path / "x.pt")
    ckpt = torchlift.open(tmp_path / "x.pt")
    with pytest.raises(torchlift.UnsafeError, match=r"'args\.x'.*by their keys, or root=") as e:
        ckpt.tree()
    assert "allow_unexpected" not in str(e.value)
    assert same(ckpt.tree("model"), {"w": torch.ones(1)}, kinds=True)


# -- load_optimizer -------------------------------------------------------------------------------


def trained(kind=torch.optim.Adam):
    model = two_layers(1)
    optimizer = kind(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def forms(model, optimizer):
    own = optimizer.state_dict()
    named = torchlift.distributed.get_optimizer_state_dict(model, optimizer)
    flat = torchlift.distributed.get_optimizer_state_dict(
        model, optimizer,
        options=torchlift.distributed.StateDictOptions(flatten_optimizer_state_dict=True),
    )  # fmt: skip
    return {
        "plain": ({"model": model.state_dict(), "optimizer": own}, "optimizer"),
        "the file itself": (own, None),
        "Lightning's list": ({"state_dict": {}, "optimizer_states": [own]}, "optimizer_states"),
        "one of a list": ({"optimizer_states": [own, {}]}, "optimizer_states.0"),
        "by name": ({"optim": named}, "optim"),
        "flat": ({"optim": flat}, "optim"),
    }


FORMS = ["plain", "the file itself", "Lightning's list", "one of a list", "by name", "flat"]


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")  # it is not, for dcp.save
@pairwise(
    where=["memory", "file", "dcp"], form=FORMS, kind=[torch.optim.Adam, torch.optim.SGD],
    is_found=[True, False],
)  # fmt: skip
def test_training_goes_on_from_any_form(tmp_path, kind, form, where, is_found):
    """Bit by bit as if it had never stopped, whatever saved the state.

    The only state that is there needs no root, however deep it lies, beside whatever else.
    """
    model, optimizer = trained(kind)
    saved, root = forms(model, optimizer)[form]
    if is_found:
        saved, root = {"epoch": 3, "trainer": {"a": saved, "b": [1, 2]}}, None
        if form == "one of a list":  # the other one is empty
            saved["trainer"]["a"]["optimizer_states"][1] = {"state": {}}
    given_ = saved
    if where == "file":
        given_ = tmp_path / "x.pt"
        torch.save({**saved, "when": timedelta(3)} if is_found else saved, given_)
    elif where == "dcp":
        given_ = tmp_path / "dcp"
        dcp.save(saved, checkpoint_id=given_, no_dist=True)
    other = copy.deepcopy(model)
    fresh = kind(other.parameters(), lr=0.5)
    report = torchlift.load_optimizer(other, fresh, given_, root=root)
    assert fresh.param_groups[0]["lr"] == 0.1
    assert not report.missing_keys
    for _ in range(2):
        step(model, optimizer)
        step(other, fresh)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_where_the_state_lies_is_pointed_out(tmp_path):
    """A root that is missing, or one too high, gets the ones to pass; nothing has changed."""
    model, optimizer = trained()
    before = copy.deepcopy(optimizer.state_dict())
    both = {"model": {}, "train": {"optim": before}, "optimizer_states": [before, before]}
    torch.save(both, tmp_path / "x.pt")
    ways = r"'train\.optim' or root='optimizer_states\.0' or root='optimizer_states\.1'"
    for given_ in (both, tmp_path / "x.pt"):
        with pytest.raises(torchlift.FormatError, match=f"several optimizer states.*root={ways}"):
            torchlift.load_optimizer(model, optimizer, given_)
    with pytest.raises(torchlift.FormatError, match=r"an optimizer state.*holds it as root="):
        torchlift.load_optimizer(model, optimizer, tmp_path / "x.pt", root="train")
    with pytest.raises(torchlift.FormatError, match="does not contain this container"):
        torchlift.load_optimizer(model, optimizer, tmp_path / "x.pt", root="optimizer")
    with pytest.raises(torchlift.FormatError, match="an optimizer state"):
        torchlift.load_optimizer(model, optimizer, {"step": 3})
    with pytest.raises(torchlift.FormatError, match=r"an optimizer state.*found a int"):
        torchlift.load_optimizer(model, optimizer, {"step": 3}, root="step")
    assert same(before, optimizer.state_dict(), kinds=True)


def test_a_name_that_is_no_value_of_torchs_stays_none(tmp_path: Path) -> None:
    """Classes and numpy's dtypes, which would become texts; `torch.load` refuses them, too."""
    values = {"n": np.dtype("f4"), "s": np.dtype([("a", "i4")]), "l": [1, np.dtype("i8")]}
    torch.save({**values, "w": torch.ones(1), "q": torch.per_tensor_affine}, tmp_path / "x.pt")
    with torchlift.open(tmp_path / "x.pt") as ckpt:
        assert ckpt.blocked_keys == dict.fromkeys("nsl", "numpy.dtype")
        assert ckpt.tree("q") is torch.per_tensor_affine
        for key in "nsl":
            with pytest.raises(UnsafeError, match=r"numpy\.dtype"):
                ckpt.tree(key)
    with pytest.raises(UnsafeError, match=r"numpy\.dtype"):
        torchlift.convert(tmp_path / "x.pt", tmp_path / "y.pt")


class Outer(nn.Module):
    """One whose names are all below one name."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = (nn.Parameter(torch.zeros(2)) for _ in range(2))


TWO_MEANINGS: dict[str, tuple[Any, str, str]] = {
    "a container and names": (
        {"a": {"x": torch.ones(2)}, "a.y": torch.ones(2)}, "a", r"\['a'\] and \['a\.\*'\]"),
    "two containers": (
        {"m": {"a": {"x": torch.ones(2)}}, "m.a": {"y": torch.ones(2)}}, "m.a",
        r"\['m'\]\['a'\] and \['m\.a'\]"),
    "a number and its text": (
        {0: {"x": torch.ones(2)}, "0": {"y": torch.ones(2)}}, "0", r"\[0\] and \['0'\]"),
    "names in two containers": (
        {"m": {"a.x": torch.ones(2)}, "m.a.y": torch.ones(2)}, "m.a",
        r"\['m'\]\['a\.\*'\] and \['m\.a\.\*'\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", TWO_MEANINGS)
@pytest.mark.parametrize("where", ["file", "old file", "memory"])
def test_a_root_that_could_mean_two_containers_is_an_error(
    tmp_path: Path, name: str, where: str
) -> None:
    """It names both, by every door; the way out loads what both have."""
    state, root, found = TWO_MEANINGS[name]
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=where == "file")
    given = state if where == "memory" else tmp_path / "x.pt"
    model = Outer()
    optimizer = torch.optim.SGD(model.parameters())
    doors: list[Callable[[], object]] = [
        lambda: torchlift.load(model, given, root=root),
        lambda: torchlift.plan(model, given, root=root),
        lambda: torchlift.convert(given, tmp_path / "x.safetensors", root=root),
        lambda: torchlift.load_optimizer(model, optimizer, given, root=root),
    ]
    if where != "memory":
        doors += [
            lambda: torchlift.open(given, root=root),
            lambda: torchlift.open(given).tree(root),
        ]
    for door in doors:
        with pytest.raises(torchlift.FormatError, match=f"more than one container; found {found}"):
            door()
    assert not model.x.any()
    chosen: dict[str, Any] = {"include": [f"{root}.*"], "rename": torchlift.remap.strip(f"{root}.")}
    torchlift.load(model, given, **chosen)
    assert torch.equal(model.x, torch.ones(2))
    assert torch.equal(model.y, torch.ones(2))


class _Unknown:
    """What no reader of plain data makes."""


def test_a_name_that_is_a_tuple_is_told_as_python_tells_it(tmp_path) -> None:
    """The address of what stands for a dtype or a class would be another one each time."""
    names = [(torch.half, 1), (_Unknown,), ((torch.int8,), "a")]
    torch.save({name: torch.ones(1) for name in names}, tmp_path / "a.pt")
    ckpt = torchlift.open(tmp_path / "a.pt")
    assert list(ckpt) == ["(torch.float16, 1)", f"({__name__}._Unknown,)", "((torch.int8,), 'a')"]
    with pytest.raises(UnsafeError, match=f"found {__name__}._Unknown"):
        ckpt.tree()
    torch.save({(torch.ones(1), 1): 3}, tmp_path / "a.pt")
    with pytest.raises(torchlift.FormatError, match="cannot be part of a tensor's name"):
        torchlift.open(tmp_path / "a.pt")

"""`diff`: what two checkpoints do not have in common, whatever their formats."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from device_files import write_tagged
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import torchlift
from torchlift._checkpoint.comparison import ValueChange
from torchlift.errors import PlacementError


def both(tmp_path: Path, one: Any, two: Any, **tolerances: float) -> torchlift.CheckpointDiff:
    """Save both as torch files and compare these."""
    torch.save(one, tmp_path / "one.pt")
    torch.save(two, tmp_path / "two.pt")
    return torchlift.diff(tmp_path / "one.pt", tmp_path / "two.pt", **tolerances)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_list_that_dcp_took_apart_is_the_list(tmp_path: Path) -> None:
    """Each number of an optimizer's group has a key there; a torch file has one list."""
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}, {"lr": 0.2, "params": []}]
    state = {"w": torch.ones(2), "optim": {"param_groups": groups, "empty": []}, "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save(state, tmp_path / "one.pt")
    for pair in [("dcp", "one.pt"), ("one.pt", "dcp")]:
        assert torchlift.diff(*(tmp_path / name for name in pair)).equal
    groups[1]["lr"] = 0.3
    torch.save(state, tmp_path / "two.pt")
    found = torchlift.diff(tmp_path / "dcp", tmp_path / "two.pt")
    assert list(found.changed) == ["optim.param_groups.1.lr"]
    assert list(torchlift.diff(tmp_path / "one.pt", tmp_path / "two.pt").changed) == [
        "optim.param_groups"
    ]


def test_each_kind_of_difference_is_named(tmp_path):
    """Added, removed, renamed, shape, dtype, value, and leaves that are no tensors."""
    one = {
        "same": torch.ones(2), "value": torch.tensor([1.0, 2.0, 3.0]), "shape": torch.ones(2, 3),
        "dtype": torch.ones(2), "old": torch.arange(6.0), "gone": torch.ones(7), "step": 7,
        "kind": 1,
    }  # fmt: skip
    two = {
        "same": torch.ones(2), "value": torch.tensor([1.0, 2.5, 2.0]), "shape": torch.ones(3, 2),
        "dtype": torch.ones(2, dtype=torch.bfloat16), "new": torch.arange(6.0),
        "more": torch.ones(8), "step": 8, "kind": torch.ones(1),
    }  # fmt: skip
    found = both(tmp_path, one, two)
    assert not found.equal
    assert (found.removed, found.added) == (("old", "gone"), ("new", "more"))
    assert found.renamed == {"old": "new"}
    assert list(found.changed) == ["value", "shape", "dtype", "step", "kind"]
    value = found.changed["value"].value
    assert (value.differing, value.numel, value.largest) == (2, 3, 1.0)
    assert found.changed["shape"].shape == ((2, 3), (3, 2))
    assert found.changed["dtype"].dtype == ("float32", "bfloat16")
    assert found.changed["dtype"].value is None
    assert found.changed["step"].object == (7, 8)
    assert found.changed["kind"].kind == ("object", "tensor")
    text = str(found)
    assert text.splitlines()[0] == "different: 1 of 4 tensors alike, 52 B"
    assert "  value: 2 of 3 values, by at most 1" in text
    assert "renamed (1)\n  old -> new\nremoved (1)\n  gone\nadded (1)\n  more" in text


def test_tensors_that_share_memory_are_counted_once_in_the_size(tmp_path: Path) -> None:
    """A tie has its bytes once, from a file and in memory. Two equal tensors have them twice."""
    table = torch.zeros(8, 4)
    tied = {"embed.weight": table, "head.weight": table, "norm": torch.ones(4)}
    torch.save(tied, tmp_path / "tied.pt")
    equal = {key: value.clone() for key, value in tied.items()}
    for first in tied, tmp_path / "tied.pt":
        found = torchlift.diff(first, equal)
        assert (found.compared, found.nbytes) == (3, 128 + 16)
    assert torchlift.diff(equal, tied).nbytes == 2 * 128 + 16


def test_tolerances_are_those_of_isclose(tmp_path):
    """Within them a tensor is equal; a cast is told from other weights."""
    one = {"w": torch.randn(1000) + 3}
    cast = {"w": one["w"].to(torch.bfloat16)}
    exact, near = both(tmp_path, one, cast), both(tmp_path, one, cast, rtol=2**-8)
    assert exact.changed["w"].value.differing > 900
    assert near.changed["w"].dtype == ("float32", "bfloat16")
    assert near.changed["w"].value is None
    assert both(tmp_path, {"w": torch.tensor([1.0])}, {"w": torch.tensor([1.1])}, atol=0.2).equal


@pytest.mark.parametrize("tolerance", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["rtol", "atol"])
def test_a_tolerance_that_is_none_is_refused(name: str, tolerance: float) -> None:
    """Also where everything is equal, and where nothing is a tensor."""
    with pytest.raises(ValueError, match=f"{name}={tolerance!r}: expected"):
        torchlift.diff({"n": 1}, {"n": 1}, **{name: tolerance})


def test_a_nan_is_equal_to_a_nan_and_to_nothing_else(tmp_path):
    """Infinities too, with their signs."""
    odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    assert both(tmp_path, {"w": odd}, {"w": odd.clone()}).equal
    assert torchlift.diff(
        {"w": odd}, {"w": torch.tensor([math.nan, math.inf, -math.inf, 0.0])}
    ).equal
    found = both(tmp_path, {"w": odd}, {"w": torch.tensor([0.0, math.inf, math.inf, 0.0])})
    value = found.changed["w"].value
    assert value.differing == 2
    assert math.isnan(value.largest)


@pytest.mark.parametrize(
    ("one", "two", "tolerance", "largest"),
    [
        (("uint64", 1), ("uint64", 2**64 - 1), {"atol": 5}, 2.0**64),
        (("uint64", 2**63), ("int64", -(2**63)), {}, 2.0**64),
        (("int64", 2**63 - 1), ("int64", -(2**63)), {"atol": 5}, 2.0**64),
        (("uint64", 7), ("uint64", 10), {"atol": 2}, 3.0),
        (("int64", 2**62), ("int64", 2**62 + 3), {"atol": 2}, 3.0),
        (("uint64", 2**64 - 1), ("uint64", 2**64 - 3), {}, 2.0),
        (("int32", -5), ("uint8", 250), {"atol": 254}, 255.0),
        (("uint64", 7), ("uint64", 9), {"atol": 2}, None),
        (("int64", 2**60), ("int64", 2**60 + 3), {"rtol": 1e-12}, None),
        (("uint64", 2**63), ("uint64", 2**63), {}, None),
    ],
)
def test_integers_are_compared_without_an_overflow(one, two, tolerance, largest) -> None:
    """A difference of two numbers of 64 bits has 65, and uint64 does not fit in int64."""
    a, b = (torch.tensor([value], dtype=getattr(torch, dtype)) for dtype, value in (one, two))
    found = torchlift.diff({"w": a}, {"w": b}, **tolerance)
    value = found.changed["w"].value if found.changed else None
    assert (None if value is None else value.largest) == largest
    assert found.equal is (largest is None and a.dtype == b.dtype)


def test_location_tags_are_listed_and_no_difference(tmp_path):
    """The same weights saved on another device are the same weights."""
    one = write_tagged(tmp_path / "one.pt", "cpu")
    two = write_tagged(tmp_path / "two.pt", "cuda:1")
    found = torchlift.diff(one, two)
    assert found.equal
    assert found.relocated == {"w0": ("cpu", "cuda:1")}
    assert "on another device (1)\n  w0: cpu -> cuda:1" in str(found)


class Custom:
    """What only unpickling could rebuild."""


def test_what_cannot_be_rebuilt_is_listed_as_not_compared(tmp_path):
    """And nothing of it runs."""
    found = both(
        tmp_path, {"w": torch.ones(2), "args": Custom()}, {"w": torch.ones(2), "args": Custom()}
    )
    assert found.blocked == ("args",)
    assert "not compared, since it cannot be rebuilt (1)\n  args" in str(found)


def kinds(values: torch.Tensor) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls its compressed layouts a beta
        return {
            "coo": values.to_sparse(), "rows": values.to_sparse(1), "csr": values.to_sparse_csr(),
            "csc": values.to_sparse_csc(), "bsr": values.to_sparse_bsr((2, 2)),
            "bsc": values.to_sparse_bsc((2, 3)), "dense": values,
        }  # fmt: skip


def test_sparse_tensors_are_compared_by_their_values(tmp_path):
    """Of all layouts, and with dense ones: an index is no value, and what is not stored is 0."""
    one = torch.zeros(4, 6)
    one[0, 1], one[2, 3] = 1, 2
    two = one.clone()
    two[2, 3], two[3, 3] = 2.5, -7
    torch.save(kinds(one), tmp_path / "one.pt")
    torch.save(kinds(two), tmp_path / "two.pt")
    found = torchlift.diff(tmp_path / "one.pt", tmp_path / "two.pt")
    assert len(found.changed) == len(kinds(one))
    for change in found.changed.values():
        assert change.value == ValueChange(2, 24, 7.0)
    assert torchlift.diff(tmp_path / "one.pt", dict.fromkeys(kinds(one), one)).equal
    assert torchlift.diff(tmp_path / "one.pt", kinds(two), atol=0.5).changed["csr"].value == (
        ValueChange(1, 24, 7.0)
    )


def test_tensors_made_of_others_are_compared_by_all_of_these(tmp_path: Path) -> None:
    """Here of a class that has two."""
    one, zero = torch.ones(3), torch.zeros(3)
    state = {"w": TwoTensor(one, zero)}
    torch.save(state, tmp_path / "w.pt")
    with torchlift.open(tmp_path / "w.pt", allow_classes=[TwoTensor]) as ckpt:
        assert torchlift.diff(ckpt, state).equal
        assert not torchlift.diff(ckpt, {"w": TwoTensor(one, one)}).equal
        assert not torchlift.diff(ckpt, {"w": one}).equal


def test_a_lazy_tensor_is_refused_by_name() -> None:
    """It has neither shape nor values."""
    with pytest.raises(PlacementError, match=r"'0.weight'.*lazy module"):
        torchlift.diff(nn.Sequential(nn.LazyLinear(2)).state_dict(), {})


NUMBERS = np.arange(5000.0)
VALUES = [
    (NUMBERS, NUMBERS + (NUMBERS == 2500), NUMBERS.copy()),
    (NUMBERS, NUMBERS.astype(np.float32), NUMBERS[::-1][::-1]),
    (np.array([1, np.nan]), np.array([1, 2.0]), np.array([1, np.nan])),
    (np.array(["a", "b"]), np.array(["a", "c"]), np.array(["a", "b"])),
    (np.array([2**62]), np.array([2**62 + 1]), np.array([2**62])),
    ([0.1, [2.0]], [0.1 + 1e-12, [2.0]], [0.1, [2.0]]),
    (math.nan, 0.0, float("nan")),
    (math.inf, -math.inf, float("inf")),
    (1, 1.0, 1),
    (1, True, 1),
    ((1, 2), [1, 2], (1, 2)),
    ([{"a": 1, "b": 2}], [{"a": 1, "b": 3}], [{"b": 2, "a": 1}]),
    ([{1: 2}], [{"1": 2}], [{1: 2}]),
    ([list(range(2000))], [[*range(1999), 0]], [list(range(2000))]),
    ({"x", "y", "z"}, {"x", "y"}, {"z", "y", "x"}),
    (2.5 + 1j, 2.5 - 1j, 2.5 + 1j),
    (torch.float16, torch.bfloat16, torch.float16),
    (torch.device("cuda:1"), torch.device("cuda"), torch.device("cuda", 1)),
    (np.float32(0.1), 0.1, float(np.float32(0.1))),
    (10**300, 10**300 + 1, 10**300),
]


@pytest.mark.parametrize("where", ["memory", "files", "both"])
@pytest.mark.parametrize(("value", "other", "same"), VALUES)
def test_values_that_are_no_tensors_are_compared_as_values(
    tmp_path: Path, value: Any, other: Any, same: Any, where: str
) -> None:
    """Not by their text, which is clipped for long arrays and has an order for sets."""

    def given(value: Any, name: str) -> Any:
        if where == "memory" or (where == "both" and name == "one"):
            return {"w": torch.ones(1), "v": value}
        torch.save({"w": torch.ones(1), "v": value}, tmp_path / name)
        return tmp_path / name

    one = given(value, "one")
    assert list(torchlift.diff(one, given(other, "two")).changed) == ["v"]
    assert torchlift.diff(one, given(same, "three")).equal


def test_tolerances_are_for_numbers_that_are_no_tensors_too() -> None:
    """In lists, dicts and arrays; what is infinite or no number is near to itself only."""
    one = {"a": [1.0, {"x": 100}], "n": np.array([1.0, np.inf]), "i": 7}
    two = {"a": [1.05, {"x": 101}], "n": np.array([1.05, np.inf]), "i": 7}
    assert list(torchlift.diff(one, two).changed) == ["a", "n"]
    assert torchlift.diff(one, two, rtol=0.1).equal
    assert not torchlift.diff({"a": 1.0}, {"a": math.inf}, rtol=0.5, atol=9.0).equal
    assert not torchlift.diff({"a": 1.0}, {"a": math.nan}, rtol=0.5, atol=9.0).equal


def _compared_with_dtensors(folder: str) -> str:
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    sharded = torch.distributed.tensor.distribute_tensor(torch.ones(4, 2), mesh)
    torchlift.save({"w": torch.ones(4, 2)}, f"{folder}/a.pt")
    with pytest.raises(
        torchlift.PlacementError, match="'w': this rank holds only its own slice"
    ) as e:
        torchlift.diff({"w": sharded}, f"{folder}/a.pt")
    return str(e.value.hint)


def test_dtensors_are_not_compared_with_what_is_whole(tmp_path: Path) -> None:
    """A rank would read beyond its slice, or end in an error of torch's own."""
    (hint,) = torchlift.distributed.on_ranks(1, _compared_with_dtensors, str(tmp_path))
    assert "compare the file" in hint


def test_a_container_that_only_one_of_them_has_is_named(tmp_path: Path) -> None:
    """People compare a training checkpoint with the weights that they exported from it."""
    weights = {"a.b": torch.ones(3), "c": torch.zeros(2)}
    torch.save({"model": weights, "epoch": 3}, path := tmp_path / "run.pt")
    two = {"a.c": torch.ones(1), "b.c": torch.ones(1)}
    assert "root='model', or pass --root-a model" in str(torchlift.diff(path, weights))
    assert "root=" not in str(torchlift.diff(two, {"c": torch.ones(1)})), "either could be meant"
    assert "root='model', or pass --root-b model" in str(torchlift.diff(weights, path))
    assert torchlift.diff(torchlift.open(path, root="model"), weights).equal
    for others in ({"c": torch.ones(1), "d": torch.ones(1)}, {"c": torch.ones(1), **two}):
        assert "root=" not in str(torchlift.diff(two, others))

"""TorchScript archives: the state dict that torch.jit.load gives, and nothing of the program."""

from __future__ import annotations

import enum

import pytest
import torch
from checkpoint_files import assert_as_loaded
from pairwise import pairwise
from torch import nn

import torchlift
from torchlift import MismatchError

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.jit, which is deprecated


class Color(enum.Enum):
    """An attribute that TorchScript stores by its class."""

    RED = 1


class Attributes(nn.Module):
    """Every kind of attribute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.plain = torch.full((2,), 7.0)
        self.many = [torch.ones(1), torch.zeros(2)]
        self.number, self.text, self.sizes = 5, "ü", [1, 2]
        self.point, self.color = (1, torch.ones(1)), Color.RED
        self.flags, self.rates = [True, False], {"a": 0.5}

    def forward(self, x):
        """Use every one, so that none is left out."""
        total = self.passing.sum() + self.plain.sum() + self.many[0]
        total = total + self.number + len(self.text) + self.sizes[0] + self.point[1]
        if self.flags[0] and self.color == Color.RED:
            total = total + self.rates["a"]
        return x + total


def test_other_attributes_come_by_their_paths(tmp_path):
    """Only the text of the program, which is not read, says that no state dict has them."""
    path = str(tmp_path / "m.pt")
    torch.jit.script(nn.Sequential(nn.ReLU(), Attributes())).save(path)
    ckpt = torchlift.open(path)
    assert {*ckpt} >= {"1.plain", "1.many.0", "1.many.1", "1.point.1"}
    assert ckpt["1.plain"].tolist() == [7, 7]
    objects = ckpt.objects
    assert not [key for key in objects if "training" in key or key == "0"]
    assert (objects["1.number"], objects["1.text"]) == (5, "ü")
    assert objects["1.sizes"] == [1, 2]
    assert objects["1.flags"] == [True, False]
    assert objects["1.rates.a"] == 0.5
    assert ckpt.blocked == ()


def test_the_constants_of_a_trace_are_numbered(tmp_path):
    """As the program refers to them."""
    path = str(tmp_path / "m.pt")
    torch.jit.trace(Constant(), X).save(path)
    ckpt = torchlift.open(path)
    named = [key for key in ckpt if key.startswith("CONSTANTS.c")]
    assert [2.0, 3.0, 4.0] in [ckpt[key].tolist() for key in named]
    assert {"inner.weight", "inner.bias"} <= {*ckpt}


class Constant(nn.Module):
    """A layer, with a tensor that tracing makes a constant of, and attributes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 3)
        self.table, self.size = torch.ones(3), 3

    def forward(self, x):
        """Use all of them."""
        return self.inner(x) * self.table + torch.tensor([2.0, 3.0, 4.0]) + self.size


class Others(nn.Module):
    """Buffers that torch makes of other tensors."""

    def __init__(self):
        super().__init__()
        self.register_buffer("per_tensor", torch.quantize_per_tensor(X, 0.1, 2, torch.quint8))
        scales, zeros = torch.rand(3), torch.arange(3)
        channels = torch.quantize_per_channel(X, scales, zeros, 0, torch.qint8)
        self.register_buffer("per_channel", channels)
        self.register_buffer("coo", torch.eye(3).to_sparse())
        self.register_buffer("csr", torch.eye(3).to_sparse_csr())
        self.register_buffer("plain", torch.randn(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what it is given."""
        return x + self.plain.sum()


X = torch.randn(3, 2)


def test_quantised_buffers_are_read_and_sparse_ones_are_listed_as_blocked(tmp_path):
    """The C++ pickler writes the arguments of sparse tensors in an order of its own."""
    path = tmp_path / "others.pt"
    torch.jit.script(Others()).save(path)
    ckpt, state = torchlift.open(path), torch.jit.load(path).state_dict()
    sparse = {key: state.pop(key) for key in ("coo", "csr")}
    assert list(ckpt) == list(state)
    assert_as_loaded(state, ckpt)
    assert dict(ckpt.blocked_keys) == dict.fromkeys(sparse, "torch._utils._rebuild_sparse_tensor")


@pairwise(
    compile=["script", "trace"],
    door=["file", "list", "checkpoint", "renamed"],
    is_live=[True, False],
)
def test_constants_and_attributes_are_not_unexpected(tmp_path, compile, door, is_live):
    """A program has them besides the state of its modules. The model need not have them."""
    path, made = tmp_path / "m.pt", Constant()
    make = torch.jit.script if compile == "script" else torch.jit.trace
    make(made, *[X] * (compile == "trace")).save(path)
    model = Constant() if is_live else torchlift.skeleton(Constant)
    given = {"list": [path], "checkpoint": torchlift.open(path)}.get(door, path)
    rename = (lambda key: key) if door == "renamed" else None
    report = torchlift.load(model, given, rename=rename)
    assert not report.unexpected_keys
    assert {"size", "CONSTANTS.c0"} & {*report.dropped}
    assert torch.equal(model.inner.weight, made.inner.weight)


def test_a_weight_that_the_model_lacks_is_still_unexpected(tmp_path):
    """A program does not say which of its tensors are weights."""
    path = tmp_path / "m.pt"
    torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))).save(path)
    with pytest.raises(MismatchError) as error:
        torchlift.load(nn.Sequential(nn.Linear(3, 4)), path)
    assert error.value.unexpected_keys == ["1.weight", "1.bias"]

"""What `inspect --stats` computes: the values of every dtype and layout, in little memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from in_code import in_code
from torch.testing._internal.two_tensor import TwoTensor

import torchlift
from torchlift._checkpoint.stats import TensorStats
from torchlift.errors import FormatError
from torchlift.formats.index import ITEMSIZE

FLOATS = st.floats(width=32, allow_subnormal=False)


def stats(path, key="w") -> TensorStats:
    """Those of one tensor of a file."""
    with torchlift.open(path) as ckpt:
        return ckpt.stats(key)


@settings(deadline=None, max_examples=40)
@given(values=st.lists(FLOATS, max_size=9), repeat=st.sampled_from([1, 60_000]))
def test_they_are_those_of_numpy_over_the_finite_values(tmp_path_factory, values, repeat) -> None:
    """Of one block or of several; NaN and infinities are counted, not taken in."""
    path = tmp_path_factory.mktemp("stats") / "m.pt"
    tensor = torch.tensor(values, dtype=torch.float32).repeat(repeat)
    torch.save({"w": tensor}, path)
    found = stats(path)
    finite = tensor[tensor.isfinite()].double().numpy()
    assert (found.nan, found.inf) == (int(tensor.isnan().sum()), int(tensor.isinf().sum()))
    if not finite.size:
        assert (found.min, found.max, found.mean, found.std) == (None,) * 4
        return
    scale = np.abs(finite).max()
    assert (found.min, found.max) == (finite.min(), finite.max())
    assert found.mean == pytest.approx(finite.mean(), abs=1e-9 * scale)
    assert found.std == pytest.approx(finite.std(), abs=1e-7 * scale)


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_blocks_are_joined_without_losing_digits(tmp_path, scale) -> None:
    """In one block and over several, of values whose squares float32 cannot hold."""
    for repeat in (1, 60_000):
        values = torch.tensor([1.0, -1.0, 0.25, 0.5], dtype=torch.float64).repeat(repeat)
        torch.save({"w": values * scale}, tmp_path / "m.pt")
        found, expected = stats(tmp_path / "m.pt"), values.numpy()
        assert found.mean == pytest.approx(expected.mean() * scale, rel=1e-9)
        assert found.std == pytest.approx(expected.std() * scale, rel=1e-9)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", list(ITEMSIZE))
def test_every_dtype_has_them(tmp_path, name) -> None:
    """0 and 1 are in all of them but one, which has powers of two only."""
    dtype = getattr(torch, name)
    if name == "float4_e2m1fn_x2":
        tensor = torch.tensor([0x20, 0x20], dtype=torch.uint8).view(dtype)  # 0 and 1, twice
    else:
        low = 0.5 if name == "float8_e8m0fnu" else 0
        tensor = torch.tensor([low, 1, low, 1]).to(dtype)
    torch.save({"w": tensor}, tmp_path / "m.pt")
    found = stats(tmp_path / "m.pt")
    low = 0.5 if name == "float8_e8m0fnu" else 0
    assert (found.min, found.max, found.nan, found.inf) == (low, 1, 0, 0)
    assert (found.mean, found.std) == ((low + 1) / 2, (1 - low) / 2)


def test_large_integers_and_complex_numbers_are_what_they_are(tmp_path) -> None:
    """int64 is not rounded; of complex numbers the absolute values count."""
    big = 2**62 + 1
    torch.save({"i": torch.tensor([big, -big]), "c": torch.tensor([3 + 4j, 0])}, tmp_path / "m.pt")
    found = stats(tmp_path / "m.pt", "i")
    assert (found.min, found.max, found.mean) == (-big, big, 0)
    found = stats(tmp_path / "m.pt", "c")
    assert (found.min, found.max, found.mean) == (0, 5, 2.5)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_they_are_the_same_for_every_layout_and_format(tmp_path) -> None:
    """Transposed, conjugate, in several chunks, of the other byte order."""
    tensor = torch.randn(300, 700)
    row = torch.tensor([1.0, 3.0])
    state = {"w": tensor, "t": tensor.T, "v": tensor[::2, 1:], "e": row.expand(512, 2)}
    torch.save(state, tmp_path / "m.pt")
    np.save(tmp_path / "m.npy", tensor.numpy().astype(">f4"))
    dcp.save({"w": tensor}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    found = stats(tmp_path / "m.pt")
    assert found.std == pytest.approx(tensor.double().std(correction=0).item(), rel=1e-12)
    assert stats(tmp_path / "m.npy", next(iter(torchlift.open(tmp_path / "m.npy")))) == found
    assert stats(tmp_path / "dcp") == found
    assert stats(tmp_path / "m.pt", "t").mean == pytest.approx(found.mean, rel=1e-9)
    assert stats(tmp_path / "m.pt", "v").max == tensor[::2, 1:].max().item()
    assert stats(tmp_path / "m.pt", "e") == TensorStats(1, 3, 2, 1, 0, 0)


def test_one_block_is_in_memory_at_a_time(tmp_path) -> None:
    """256 MiB of a file, transposed ones too, in less than 32 MiB of the process's own memory."""
    state = {"w": torch.ones(4096, 8192), "t": torch.ones(4096, 8192).T}
    torch.save(state, tmp_path / "m.pt")
    code = (
        "with torchlift.open(args[0]) as ckpt:\n    result = [ckpt.stats(key).std for key in ckpt]"
    )
    found = in_code(code, str(tmp_path / "m.pt"), setup="import torch, torchlift")
    assert found.value == [0, 0]
    assert found.memory.added_anonymous < 32 << 20


class Plain(torch.Tensor):
    """A tensor of another class, with numbers of its own."""


def test_a_subclass_is_summed_up_by_the_values_that_it_stands_for(tmp_path) -> None:
    """Not by the tensors that it is made of; one that does not tell its values is refused."""
    torch.save({"w": TwoTensor(torch.ones(2), torch.zeros(2))}, tmp_path / "m.pt")
    ckpt = torchlift.open(tmp_path / "m.pt", allow_classes=[TwoTensor])
    with ckpt, pytest.raises(FormatError, match=r"'w'.*TwoTensor does not dequantise"):
        ckpt.stats("w")
    torch.save({"w": torch.ones(2).as_subclass(Plain)}, tmp_path / "p.pt")
    with torchlift.open(tmp_path / "p.pt", allow_classes=[Plain]) as ckpt:
        assert ckpt.stats("w").mean == 1

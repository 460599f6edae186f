"""The copy of a state on the host: equal values, and ties that stay."""

from __future__ import annotations

import pytest
import torch

from torchlift.distributed.staging import Staging


class Named(torch.Tensor):
    """A subclass without behaviour of its own."""


def test_a_copy_has_the_values_and_no_memory_of_the_state() -> None:
    """Of any strides and dtype."""
    waves = torch.randn(3, dtype=torch.complex64)
    matrix = torch.randn(4, 6)
    tensors: dict[str, torch.Tensor] = {
        "matrix": matrix, "transposed": matrix.T, "column": matrix[:, 1], "number": torch.tensor(2),
        "empty": torch.ones(0, 3), "none": torch.ones(1).expand(0), "conj": waves.conj(),
        "negative": waves.conj().imag,
        "small": torch.ones(3).to(torch.float8_e4m3fn), "odd": matrix.as_subclass(Named),
    }  # fmt: skip
    copies = Staging().copy({**tensors, "other": tensors["column"]})
    for name, tensor in tensors.items():
        copied = copies[name]
        assert (copied.shape, copied.dtype, type(copied)) == (
            tensor.shape,
            tensor.dtype,
            type(tensor),
        )
        assert torch.equal(plain(copied), plain(tensor)), name
    assert torch.equal(copies["other"], matrix[:, 1])
    before = copies["matrix"].clone()
    matrix.zero_()
    assert torch.equal(copies["matrix"], before)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(torch.Tensor).to(torch.complex64)


def test_equal_views_share_their_copy_and_an_expanded_number_stays_one() -> None:
    """Tied weights are one tensor in the file; a mask of one number is no gigabyte."""
    weight = torch.randn(5)
    state = {"a": weight.detach(), "b": weight.detach(), "half": weight[:2]}
    state["mask"] = torch.ones(1).expand(1 << 40)
    copied = Staging().copy(state)
    assert copied["a"].data_ptr() == copied["b"].data_ptr() != weight.data_ptr()
    assert copied["half"].data_ptr() != copied["a"].data_ptr()
    assert (copied["mask"].shape, copied["mask"].untyped_storage().nbytes()) == ((1 << 40,), 4)


@pytest.mark.parametrize("nbytes", [0, 1])
def test_what_needs_gradients_is_copied_without_its_graph(nbytes: int) -> None:
    """The state of an object may hold a live parameter."""
    parameter = torch.nn.Parameter(torch.ones(nbytes))
    copied = Staging().copy({"p": parameter, "view": parameter * 2})
    assert not copied["view"].requires_grad
    assert copied["p"].tolist() == parameter.tolist()

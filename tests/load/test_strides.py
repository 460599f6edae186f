"""The strides of a loaded tensor: those of the model, or of the file if torch keeps these."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import torchlift


class Net(nn.Module):
    """A convolution, a matrix and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, bias=False)
        self.linear = nn.Linear(130, 70, bias=False)
        self.register_buffer("table", torch.zeros(5, 3))


def transposed(path: Path) -> dict[str, torch.Tensor]:
    """Save tensors whose dimensions lie in another order than in the model."""
    state = {
        "conv.weight": torch.randn(6, 4, 3, 3).contiguous(memory_format=torch.channels_last),
        "linear.weight": torch.randn(130, 70).t(), "table": torch.randn(3, 5).t(),
    }  # fmt: skip
    torch.save(state, path)
    return state


@pytest.mark.parametrize(
    ("is_live", "options"),
    [(True, {"mode": "assign"}), (False, {"mode": "assign"}), (False, {"source": "mmap"}),
     (True, {"mode": "assign", "source": "mmap"})],
)  # fmt: skip
def test_assigned_and_mapped_tensors_keep_the_strides_of_the_file(tmp_path, is_live, options):
    """As ``load_state_dict(assign=True)`` does. What the caller wants mapped stays in the file."""
    path = tmp_path / "m.pt"
    state = transposed(path)
    model, like = Net() if is_live else torchlift.skeleton(Net), Net()
    report = torchlift.load(model, path, **options)
    like.load_state_dict(torch.load(path), assign=True)
    for key, value in like.state_dict().items():
        assert model.state_dict()[key].stride() == value.stride() == state[key].stride()
    assert report.bytes_read == 0 or "source" not in options

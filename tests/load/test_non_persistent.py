"""What an older class had in its state dict and today's computes: non-persistent buffers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchlift
import torchlift.distributed as ours


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("position_ids", torch.arange(4), persistent=False)
        self.weight = nn.Parameter(torch.zeros(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Positions()


STATE = {
    "embeddings.position_ids": torch.arange(9).expand(1, -1),
    "embeddings.weight": torch.ones(2),
}


@pytest.mark.parametrize("options", [{}, {"strict": False}, {"rename": lambda key: key}])
@pytest.mark.parametrize("make", [Model, lambda: torchlift.skeleton(Model)])
def test_a_buffer_that_the_model_makes_itself_is_dropped_with_a_note(tmp_path, make, options):
    """It is not unexpected, whatever its shape, and keeps the value of the constructor."""
    torch.save(STATE, tmp_path / "x.pt")
    for given in (tmp_path / "x.pt", STATE):
        model = make()
        plan = torchlift.plan(model, given, **options)
        report = torchlift.load(model, given, **options)
        for told in (plan, report):
            assert told.dropped == ["embeddings.position_ids"]
            assert told.unexpected_keys == []
            assert "dropped, not a part of the model's state (1): embeddings.position_ids" in str(
                told
            )
        assert torch.equal(model.embeddings.position_ids, torch.arange(4))
        assert torch.equal(model.embeddings.weight, torch.ones(2))


def test_torchs_own_functions_call_it_unexpected_as_torch_does() -> None:
    """Their result is that of torch's."""
    with pytest.raises(ours.StateDictMismatch, match=r"Unexpected key.*position_ids"):
        ours.set_model_state_dict(Model(), STATE)


def test_a_buffer_alone_is_no_load() -> None:
    """Nothing of the model is in the checkpoint."""
    with pytest.raises(torchlift.MismatchError, match="nothing in the checkpoint fits the model"):
        torchlift.load(Model(), {"embeddings.position_ids": torch.arange(9)}, strict=False)

"""What every test on an accelerator shares."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def accelerator() -> torch.device:
    """This machine's, with the number of the current device."""
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    return torch.device(kind.type, torch.accelerator.current_device_index())

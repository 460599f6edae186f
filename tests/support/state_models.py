"""Options of state dicts, models of `zoo` under the names that these tests use, and refusals."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import zoo
from zoo import same, step, trained, two_layers

from torchlift.distributed import StateDictOptions, set_state_dict
from torchlift.errors import StateDictMismatch

__all__ = [
    "FLAT", "FROM_0", "ON_0", "PARTIAL", "WHOLE", "Tied", "refused", "same", "set_both", "step",
    "trained", "two_layers",
]  # fmt: skip

PARTIAL = StateDictOptions(strict=False)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
WHOLE = StateDictOptions(full_state_dict=True)
ON_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
Tied = partial(zoo.Tied, 4)


def set_both(model: Any, optimizers: Any, states: Any, **options: Any) -> Any:
    """Set a pair of states, as `get_state_dict` returns it."""
    return set_state_dict(
        model, optimizers, model_state_dict=states[0], optim_state_dict=states[1], **options
    )


@contextmanager
def refused(says: str, *kept: Any, error: Any = StateDictMismatch) -> Iterator[Any]:
    """What the block calls raises an error with this text, and changes none of these objects.

    Args:
        says: A pattern of the error's text.
        *kept: Models and optimizers.
        error: The class of the error.
    """
    before = copy.deepcopy([each.state_dict() for each in kept])
    with pytest.raises(error, match=says) as caught:
        yield caught
    assert same([each.state_dict() for each in kept], before)

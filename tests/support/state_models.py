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

from torchlift.distributed import StateDictOptions
from torchlift.errors import StateDictMismatch

__all__ = ["FLAT", "PARTIAL", "Tied", "refused", "same", "step", "trained", "two_layers"]

PARTIAL = StateDictOptions(strict=False)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
Tied = partial(zoo.Tied, 4)


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

"""Options of state dicts, and the models of `zoo` under the names that these tests use."""

from __future__ import annotations

from functools import partial

import zoo
from zoo import same as equal
from zoo import step, trained, two_layers

from torchlift.distributed import StateDictOptions

__all__ = ["FLAT", "PARTIAL", "Tied", "equal", "step", "trained", "two_layers"]

PARTIAL = StateDictOptions(strict=False)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
Tied = partial(zoo.Tied, 4)

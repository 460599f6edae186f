"""Memory: a load that renames, moves and casts obeys the bound of a plain one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from in_code import in_code

MIB = 1 << 20
SIZE = 192 * MIB
BUDGET = 64 * MIB

pytestmark = pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="owned and mapped are told apart by /proc"
)

MAKE = """
import torch
state = {f"module.layers.{i}.weight": torch.ones(1024, 4096) for i in range(12)}
torch.save(state, args[0])
data = open(args[0], "rb").read()
"""

SETUP = """
import torch, torchlift
from torch import nn
from torchlift import remap
import torchlift._load.loading
torch.set_num_threads(2)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4096, 1024, bias=False) for _ in range(12))

half = remap.by_pattern({r"layers\\.1\\d": torch.float32, "": torch.bfloat16})
moved = remap.first_of(remap.by_location({"cuda": "cpu"}), remap.by_key({"layers": "cpu"}))
disk = remap.fit(torchlift.skeleton(Model), {"cpu": "64MiB", "disk": None})
CASES = {
    "plain": {"source": "read"},
    "moved": {"source": "read", "device": moved},
    "moved, mapped": {"device": moved},
    "cast": {"dtype": half},
    "cast and moved": {"dtype": half, "device": moved},
    "partly on disk": {"source": "read", "device": disk},
}
"""

CODE = """
model = torchlift.skeleton(Model)
options = CASES[args[1]]
rename = remap.rules([("^module", "old")]) | remap.strip("old.")
planned = torchlift.plan(model, args[0], rename=rename, **options).peak_bytes
torchlift.load(model, args[0], rename=rename, **options)
result = [planned, [p.dtype.itemsize for p in model.parameters()]]
"""

#: Case -> MiB that the tensors own after the load; what is neither cast nor read stays mapped.
OWNED = {
    "plain": 192,
    "moved": 192,
    "moved, mapped": 0,
    "cast": 10 * 8,
    "cast and moved": 10 * 8,
    "partly on disk": 64,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """Twelve matrices of 16 MiB, saved by a wrapper."""
    path = tmp_path_factory.mktemp("memory") / "model.pt"
    in_code(MAKE, str(path))
    return path


@pytest.mark.parametrize("case", OWNED)
def test_a_remapped_load_takes_its_result_and_the_fixed_budget(path, case) -> None:
    """As much as a plain load of the same result, and what the plan estimated."""
    child = in_code(CODE, str(path), case, setup=SETUP)
    planned, itemsizes = child.value
    added = child.memory.added_anonymous
    assert added <= OWNED[case] * MIB + BUDGET
    assert OWNED[case] * MIB <= planned <= OWNED[case] * MIB + BUDGET
    assert added >= 0.9 * OWNED[case] * MIB
    assert itemsizes == [2] * 10 + [4] * 2 if "cast" in case else [4] * 12

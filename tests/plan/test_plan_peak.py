"""The planned peak of anonymous memory, against the one measured in fresh processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from in_code import in_code
from torch import nn

import torchlift

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.path.exists("/proc/self/status"), reason="owned and mapped are told apart by /proc"
    ),
]

MIB = 2**20

_SETUP = """
import torch, torchlift
from torch import nn

class Model(nn.Module):
    # 5 layers of 16 MiB, a table of 24 MiB that no file holds, a tied head of 16 MiB
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2048, 2048, bias=False) for _ in range(5)])
        self.register_buffer("table", torch.zeros(6 * 2**20), persistent=False)
        self.embed = nn.Embedding(2048, 2048)
        self.head = nn.Linear(2048, 2048, bias=False)
        self.head.weight = self.embed.weight

# What a first load takes once and for all: imports, thread stacks, staging buffers.
small = torchlift.skeleton(nn.Linear, 3, 2)
torchlift.load(small, args[1], source="read", dtype=torch.float16)
live, options = args[2], eval(args[3])
model = Model() if live else torchlift.skeleton(Model)
plan = torchlift.plan(model, args[0], **options)
"""
_LOAD = "report = torchlift.load(model, args[0], **options)"
_FINISH = "result = [plan.peak_bytes, plan.bytes_to_read, report.bytes_read]"

#: name -> (live, options, anonymous MiB that must be needed at least)
CASES: dict[str, tuple[bool, str, float]] = {
    "mapped": (False, "dict(source='mmap')", 0),
    "read": (False, "dict(source='read')", 96),
    "read and assigned": (False, "dict(source='read', mode='assign')", 96),
    "to be copied": (False, "dict(mode='copy')", 0),
    "cast": (False, "dict(dtype=torch.bfloat16)", 48),
    "cast out of the map": (False, "dict(dtype=torch.bfloat16, source='mmap')", 48),
    "live, in place": (True, "dict()", 0),
    "live, read": (True, "dict(source='read')", 90),
    "live, swapped": (True, "dict(mode='swap', source='read')", 90),
    "one layer missing": (
        False,
        "dict(strict=False, rename=lambda k: None if k == 'layers.2.weight' else k)",
        24 + 16,
    ),
    "widened": (False, "dict(dtype=torch.float64, source='read')", 192),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The checkpoint of the cases, and a small one."""
    folder = tmp_path_factory.mktemp("peak")
    weights = {f"layers.{i}.weight": torch.randn(2048, 2048) for i in range(5)}
    weights["embed.weight"] = torch.randn(2048, 2048)
    torch.save(weights, folder / "model.pt")
    torch.save(nn.Linear(3, 2).state_dict(), folder / "small.pt")
    return folder / "model.pt", folder / "small.pt"


@pytest.mark.parametrize("case", list(CASES))
def test_the_planned_peak_is_the_measured_one_within_a_tenth(
    case: str, files: tuple[Path, Path]
) -> None:
    """10 % and 16 MiB, in either direction; and the bytes to read are those that were read."""
    live, options, least = CASES[case]
    arguments = (*map(str, files), live, options)
    child = in_code(_LOAD, *arguments, setup=_SETUP, finish=_FINISH)
    planned, to_read, read = child.value
    measured = child.memory.added_anonymous
    assert abs(planned - measured) <= 0.1 * measured + 16 * MIB, (planned / MIB, measured / MIB)
    assert measured >= (least - 2) * MIB
    assert to_read == read


def test_planning_reads_no_weights_and_makes_none(files: tuple[Path, Path]) -> None:
    """What a plan itself takes is the index and the names."""
    setup = _SETUP.replace("plan = ", "")
    child = in_code(
        "plan = torchlift.plan(model, args[0])", *map(str, files), False, "dict()", setup=setup
    )
    assert child.memory.added_anonymous < 4 * MIB
    assert child.memory.added_file_backed < 4 * MIB


def test_the_plan_prints_its_peak_and_what_it_reads(files: tuple[Path, Path]) -> None:
    """Both numbers come before the ways in which the tensors go."""
    plan = torchlift.plan(torchlift.skeleton(nn.Linear, 3, 2), files[1], source="read")
    assert f"to read {plan.bytes_to_read} B, anonymous memory at the peak" in str(plan)

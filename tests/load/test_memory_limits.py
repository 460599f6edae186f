"""A process that may not have the memory: the file is intact, and the way out needs less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run

import torchlift

#: Bytes of the tensors.
SIZE = 512 << 20

PROGRAM = """
import resource, sys, torch, torchlift
path, kind, door = sys.argv[1:]
small = path.replace("large", "small")
def model(rows):
    return torch.nn.Linear(1 << 20, rows, bias=False, device="meta")
def load(rows, path, **options):
    return torchlift.load(model(rows), path, **options)
# Imports, threads and stages first: they need address space, too.
load(8, small, source="read", dtype="bfloat16")
load(8, small)
which = getattr(resource, kind)
with open("/proc/self/status") as status:
    lines = dict(line.split(":") for line in status)
used = int(lines["VmSize" if kind == "RLIMIT_AS" else "VmData"].split()[0]) << 10
resource.setrlimit(which, (used + (384 << 20), -1))
doors = {
    "map": lambda: load(128, path),
    "read": lambda: load(128, path, source="read"),
    "key": lambda: torchlift.open(path)["weight"],
    "digest": lambda: torchlift.digest(path),
}
try:
    doors[door]()
except torchlift.PlacementError as error:
    print(error.file, 'dtype="bfloat16"' in error.hint, error.found or error.reason)
else:
    print("no error")
report = load(128, path, source="read", dtype="bfloat16")
print(report.bytes_read)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("limits")
    for name, rows in (("large", 128), ("small", 8)):
        torchlift.save({"weight": torch.zeros(rows, 1 << 20)}, made / f"{name}.safetensors")
    return made


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
@pytest.mark.parametrize("door", ["map", "read", "key", "digest"])
def test_too_little_memory_is_not_damage_and_a_smaller_dtype_fits(folder, kind, door):
    """A map counts, too, because it can be written to."""
    path = folder / "large.safetensors"
    found: Any = run(PROGRAM, path, kind, door).stdout.splitlines()
    assert found[0].startswith(f"{path} True"), found
    assert int(found[1]) == SIZE

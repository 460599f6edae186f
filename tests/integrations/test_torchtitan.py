"""torchtitan's manager of checkpoints with torchlift's writer and reader, on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_workers

pytest.importorskip("torchtitan", reason="torchtitan is installed for Python 3.11 and newer")


@pytest.mark.distributed
def test_a_manager_saves_and_resumes_bit_by_bit(tmp_path: Path) -> None:
    """In each mode of saving, with FSDP2; what is kept, and what torchtitan or others saved."""
    found = run_workers(Path(__file__).with_name("workers_torchtitan.py"), 2, tmp_path)
    assert len(found) == 6
    assert not any(found.values()), found

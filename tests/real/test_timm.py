"""timm's models: checkpoints and skeletons, each as ``create_model`` makes them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

#: timm and the torchvision that it imports, apart from everything else: transformers would find
#: torchvision, whose compiled operators are for another torch, and use it in the tests of others.
FOLDER = Path(sys.prefix) / "vision"


def in_child(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python where timm is."""
    paths = filter(None, [os.environ.get("PYTHONPATH"), str(FOLDER)])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)


@pytest.mark.slow
def test_timms_models_load_as_timm_loads_them() -> None:
    """Four architectures: a whole checkpoint, and a skeleton's replay."""
    found = in_child(str(Path(__file__).with_name("worker_timm.py")))
    if found.returncode and "import timm" in found.stderr:
        reason = found.stderr.splitlines()[-1]
        pytest.skip(f"timm needs requirements/vision.txt, for Python 3.11: {reason}")
    assert found.returncode == 0, found.stderr
    checks = json.loads(found.stdout)
    assert len(checks) == 8
    assert not {name: trace for name, trace in checks.items() if trace}

"""timm's models: checkpoints and skeletons, each as ``create_model`` makes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: timm and the torchvision that it imports, apart from everything else: transformers would find
#: torchvision, whose compiled operators are for another torch, and use it in the tests of others.
FOLDER = Path(sys.prefix) / "vision"


@pytest.mark.slow
def test_timms_models_load_as_timm_loads_them() -> None:
    """Four architectures: a whole checkpoint, and a skeleton's replay."""
    support = Path(__file__).parents[1] / "support"
    paths = filter(None, [os.environ.get("PYTHONPATH"), str(FOLDER), str(support)])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("worker_timm.py"))]
    found = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    if found.returncode and "import timm" in found.stderr:
        reason = found.stderr.splitlines()[-1]
        pytest.skip(f"timm needs requirements/vision.txt, for Python 3.11: {reason}")
    assert found.returncode == 0, found.stderr

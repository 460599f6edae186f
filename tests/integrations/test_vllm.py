"""vLLM's load format of ours, found and driven as vLLM 0.33 does it, by a stand-in with its names.

vLLM pins another torch than the one that is tested here.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
STAND_IN = {
    "vllm/__init__.py": "",
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/model_loader/__init__.py": """
from abc import ABC, abstractmethod

LOADERS = {}


class BaseModelLoader(ABC):
    def __init__(self, load_config):
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config): ...

    @abstractmethod
    def load_weights(self, model, model_config): ...


def register_model_loader(load_format):
    def register(kind):
        assert issubclass(kind, BaseModelLoader)
        LOADERS[load_format] = kind
        return kind

    return register


def get_model_loader(load_config):
    return LOADERS[load_config.load_format](load_config)
""",
    "torchlift_for_vllm-0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torchlift_for_vllm\n"
    "Version: 0\n",
}


def test_vllm_loads_by_torchlift(tmp_path: Path) -> None:
    """A folder, a URL, slices, refusals; in a Python that has neither torch nor vLLM yet."""
    # Those of this checkout: the tests may run beside a build from before.
    declared = (HERE.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(r'entry-points."(vllm[^"]*)"\]\n(\w+) = "([^"]*)"', declared)
    assert match is not None
    entry = f"[{match[1]}]\n{match[2]} = {match[3]}\n"
    files = {**STAND_IN, "torchlift_for_vllm-0.dist-info/entry_points.txt": entry}
    tree, out = tmp_path / "vllm", tmp_path / "files"
    out.mkdir()
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text, encoding="utf-8")
    paths = [str(tree), str(HERE.parent / "support"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, HERE / "workers_vllm.py", out]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

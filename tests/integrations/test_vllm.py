"""vLLM's load format of ours, found and driven as vLLM 0.33 does it, by a stand-in with its names.

vLLM pins another torch than the one that is tested here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each check of the workers came to, in a Python that has neither torch nor vLLM yet."""
    tree = tmp_path_factory.mktemp("vllm")
    # Those of this checkout: the tests may run beside a build from before.
    declared = (HERE.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(r'entry-points."(vllm[^"]*)"\]\n(\w+) = "([^"]*)"', declared)
    assert match is not None
    entry = f"[{match[1]}]\n{match[2]} = {match[3]}\n"
    files = {**STAND_IN, "torchlift_for_vllm-0.dist-info/entry_points.txt": entry}
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text, encoding="utf-8")
    paths = [str(tree), str(HERE.parent / "support"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, HERE / "workers_vllm.py", tmp_path_factory.mktemp("files")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


CHECKS = {
    "the entry point": "It is found, and imports nothing before vLLM calls it, however often.",
    "dcp": "A DCP directory beside the configuration, saved as a training has it.",
    "training": "A training state in one file, of which root names the model.",
    "zero": "DeepSpeed's shards, whose optimizer is no weight.",
    "safetensors": "What vLLM reads itself.",
    "url": "A path of its own, which may be a URL, beside a folder with the configuration.",
    "rename": "Names of another project become those that vLLM expects.",
    "gguf": "GGUF, with a rule for its names.",
    "slices": "Tensors are maps of the file: ranks read their slices of it.",
    "memory": "One copy: of the file nothing is in memory of the process' own.",
    "missing": "Every parameter has to come, of a model that is not quantised, as in vLLM.",
    "unknown": "What a model says of a name that it does not know says where that is from.",
    "unsafe": "A tensor that would take code to rebuild is refused, and not left out.",
    "options": "An option that does not exist is refused with the ones that do.",
    "nothing there": "A folder without weights is an error before anything is loaded.",
    "older": "A vLLM without the function that registers goes on as before.",
}


@pytest.mark.parametrize("check", CHECKS)
def test_vllm_loads_by_torchlift(found: dict[str, str], check: str) -> None:
    """Each check says in a sentence what has to hold."""
    assert found[check] == "", CHECKS[check]


def test_every_check_is_looked_at(found: dict[str, str]) -> None:
    """None of the workers' is left out."""
    assert set(found) == set(CHECKS)

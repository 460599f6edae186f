"""The table of formats: one row claims a file, and only its reader is imported."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_files import gguf_writer
from safetensors.torch import save_file
from valid_files import FORMATS

import torchlift
from torchlift.errors import FormatError
from torchlift.formats.source import Source
from torchlift.formats.table import ARCHIVES, FILES, FOLDERS, HEAD
from torchlift.formats.zip_archive import read_directory


@pytest.mark.parametrize("name", FORMATS)
def test_one_row_claims_a_file(tmp_path: Path, name: str) -> None:
    """So the order of the rows does not matter."""
    opened, make, seeds = FORMATS[name]
    for parts in seeds(tmp_path / "made"):
        files = make(parts)
        if opened == "":
            assert sum(bool(row.is_one(files)) for row in FOLDERS) == 1
            continue
        content = files[opened]
        (row,) = [row for row in FILES if row.is_one(content[:HEAD])]
        if not row.name:
            path = tmp_path / "x"
            path.write_bytes(content)
            with Source(str(path)) as source:
                (row,) = [row for row in ARCHIVES if row.is_one(read_directory(source))]
        assert row.name == ("npz" if name == "npy" else name)


@pytest.mark.parametrize("count", [122, 123, 379])
def test_a_number_of_tensors_is_not_taken_for_the_start_of_json(tmp_path: Path, count: int) -> None:
    """123 is the code of the brace that begins the header of safetensors."""
    with gguf_writer(tmp_path / "x.gguf") as writer:
        for number in range(count):
            writer.add_tensor(f"t{number}", np.ones(1, np.float32))
    assert len(torchlift.open(tmp_path / "x.gguf")) == count


@pytest.mark.parametrize(
    "names",
    [
        (".metadata", "model_world_size_2_rank_0.pt"),
        (".metadata", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "model_world_size_2_rank_0.pt"),
        (".metadata", "shard-00001-model-00001-of-00001.safetensors"),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "pytorch_model.bin"),
        ("model_world_size_2_rank_0.pt", "model.safetensors.index.json"),
    ],
)
def test_a_folder_of_two_formats_is_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    """No order of readers decides which of the two counts."""
    for name in names:
        save_file({"w": torch.ones(1)}, tmp_path / name)
    with pytest.raises(FormatError, match="two checkpoints of one model") as caught:
        torchlift.open(tmp_path)
    assert set(str(caught.value.found).split(", ")) == set(names)

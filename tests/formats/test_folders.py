"""What a folder holds: pieces of one checkpoint, two checkpoints, or the cache of the Hub."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from doors import DOORS, refused_by_all
from hub_files import hub_cache, hub_files
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

import torchlift
from torchlift.errors import CheckpointError

STATE = {f"layers.{at}.weight": torch.full((2, 3), float(at)) for at in range(3)}
INDEX = ".index.json"


def require_state(found: Any, state: dict[str, torch.Tensor] = STATE) -> None:
    assert {*found} == {*state}
    for key, value in state.items():
        assert torch.equal(found[key], value), key


# -- pieces under other names


def save_pieces(folder: Path, *names: str) -> list[Path]:
    """Save one tensor of `STATE` in each file."""
    folder.mkdir(exist_ok=True)
    for name, (key, value) in zip(names, STATE.items(), strict=True):
        torchlift.save({key: value}, folder / name)
    return [folder / name for name in names]


@pytest.mark.parametrize(
    "name",
    ["hf_model_000{}_0.pt", "model0{}-mp3.safetensors", "layer_0{}-model_00-model_states.pt",
     "weights{}.pth", "part_{}.safetensors", "consolidated.0{}.pth"],
)  # fmt: skip
@pytest.mark.parametrize("first", [0, 1])
def test_files_that_count_up_with_tensors_of_their_own_are_one_checkpoint(
    tmp_path: Path, name: str, first: int
) -> None:
    """As a set with the names of Hugging Face is; a missing one is named."""
    folder = tmp_path / "d"
    files = save_pieces(folder, *(name.format(at) for at in range(first, first + 3)))
    require_state(torchlift.open(folder))
    assert torchlift.verify(folder).ok
    assert torchlift.digest(folder) == torchlift.digest(STATE)
    assert [*torchlift.open(files[1])] == ["layers.1.weight"]  # its own path is opened
    files[1].rename(tmp_path / "away")
    assert refused_by_all(folder, folder).entry == files[1].name


def test_files_of_several_saves_that_count_up_are_not_joined(tmp_path: Path) -> None:
    """Epochs have the same keys. The files of one epoch, as a list, are the way out."""
    for epoch in range(2):
        for at in range(3):
            key = f"layers.{at}.weight"
            torch.save({key: STATE[key] + epoch}, tmp_path / f"hf_model_000{at + 1}_{epoch}.pt")
    error = refused_by_all(tmp_path, tmp_path)
    assert "torchlift.load or torchlift.convert" in str(error.hint)
    named = re.findall(r"hf_model_\d+_\d\.pt", str(error.hint))
    torchlift.convert([tmp_path / name for name in named], tmp_path / "x.safetensors")
    require_state(torchlift.open(tmp_path / "x.safetensors"))


# -- two checkpoints


def save_set(folder: Path, name: str, state: dict[str, torch.Tensor]) -> Path:
    """Save an index and its shards with the names of Hugging Face."""
    stem, suffix = name.split(".", 1)
    save = save_file if suffix == "safetensors" else torch.save
    weight_map = {}
    for at, (key, value) in enumerate(state.items(), 1):
        weight_map[key] = f"{stem}-0000{at}-of-0000{len(state)}.{suffix}"
        save({key: value}, folder / weight_map[key])
    path = folder / f"{name}{INDEX}"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def test_of_a_file_and_an_index_the_one_is_read_that_transformers_reads(tmp_path: Path) -> None:
    """The new single file, not the older shards beside it; and so of every pair of names."""
    config = GPT2Config(n_embd=4, n_layer=1, n_head=1, vocab_size=5, n_positions=4)
    for at, (single, pair) in enumerate([
        ("model.safetensors", "model.safetensors"),
        ("pytorch_model.bin", "pytorch_model.bin"),
        ("model.safetensors", "pytorch_model.bin"),
        ("pytorch_model.bin", "model.safetensors"),
    ]):  # fmt: skip
        folder = tmp_path / str(at)
        models = []
        for seed in range(2):
            torch.manual_seed(seed)
            models.append(GPT2LMHeadModel(config))
        config.save_pretrained(folder)
        states = [
            {k: v for k, v in m.state_dict().items() if k != "lm_head.weight"} for m in models
        ]
        save_set(folder, pair, states[0])
        save = save_file if single.endswith("safetensors") else torch.save
        kwargs = {"metadata": {"format": "pt"}} if single.endswith("safetensors") else {}
        save(states[1], folder / single, **kwargs)
        theirs = GPT2LMHeadModel.from_pretrained(folder).state_dict()
        with torchlift.open(folder) as ckpt:
            for key in states[1]:
                assert torch.equal(ckpt[key], theirs[key]), (single, pair, key)
        require_state(torchlift.open(folder / f"{pair}{INDEX}"), states[0])


@pytest.mark.parametrize("name", ["diffusion_pytorch_model.safetensors", "mine.safetensors", "dcp"])
def test_two_checkpoints_are_refused_if_transformers_takes_neither(
    tmp_path: Path, name: str
) -> None:
    """The message names both. The path of one, or a folder without one, is the way out."""
    folder, new = tmp_path / "d", {key: value + 1 for key, value in STATE.items()}
    if name == "dcp":
        torchlift.save(STATE, folder, format="dcp")
        names = ["model.safetensors", ".metadata"]
    else:
        folder.mkdir()
        names = [name, save_set(folder, name, STATE).name]
    single = folder / name.replace("dcp", "model.safetensors")
    save_file(new, single)
    error = refused_by_all(folder, tmp_path)
    assert error.reason == "the directory holds two checkpoints of one model"
    assert str(error.found).split(", ") == names
    old = folder / next(name for name in names if name != single.name)
    assert str(folder / names[0]) in str(error.hint)
    require_state(torchlift.open(old), STATE)
    require_state(torchlift.open(single), new)


@pytest.mark.parametrize("name", ["model.safetensors", "mine.safetensors", "x.pt"])
def test_no_save_makes_a_folder_with_both(tmp_path: Path, name: str) -> None:
    """A file into the folder of its index, or the reverse; but the same target is replaced."""
    path = tmp_path / name
    save_set(tmp_path, name, STATE)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    saves: list[Callable[[], object]] = [
        lambda: torchlift.save(STATE, path),
        lambda: torchlift.convert(STATE, path, overwrite=True),
        lambda: torchlift.convert(STATE, path, overwrite=True, dry_run=True),
    ]
    for save in saves:
        with pytest.raises(CheckpointError) as caught:
            save()
        assert caught.value.file == f"{path}{INDEX}"
        assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before
    for each in tmp_path.glob("*.*"):
        each.unlink()
    for _ in range(2):
        torchlift.save(STATE, path)
    with pytest.raises(CheckpointError) as caught:
        torchlift.save(STATE, f"{path}{INDEX}", format="sharded")
    assert caught.value.file == str(path)
    path.unlink()  # as the hint says
    torchlift.save(STATE, f"{path}{INDEX}", format="sharded")
    require_state(torchlift.open(f"{path}{INDEX}"))


@pytest.mark.parametrize(
    "other",
    ["mine (1).safetensors", "last.ckpt", "x.gguf", "step_2/model.safetensors", "step_2/x.pt"],
)
def test_a_file_beside_another_checkpoint_is_refused(tmp_path: Path, other: str) -> None:
    """The message lists both, also if one is a folder. The path of one is the way out."""
    folder = tmp_path / "d"
    (folder / other).parent.mkdir(parents=True)
    save_file(STATE, folder / "mine.safetensors")
    if other.endswith("gguf"):
        (folder / other).write_bytes(b"GGUF")
    else:
        (save_file if other.endswith("safetensors") else torch.save)(STATE, folder / other)
    error = refused_by_all(folder, tmp_path)
    assert {*str(error.found).split(", ")} == {"mine.safetensors", other.partition("/")[0]}
    named = re.search(r"'(.*)'", str(error.hint))
    assert named is not None
    assert Path(named[1]).parent == folder
    require_state(torchlift.open(folder / "mine.safetensors"))


@pytest.mark.parametrize("name", ["x-0000{}-of-00003.safetensors", "x-0000{}-of-00003.pt"])
def test_the_only_set_is_read_beside_other_files(tmp_path: Path, name: str) -> None:
    """If it is complete. Of two sets, and of two files of one number, none is guessed."""
    folder = tmp_path / "d"
    files = save_pieces(folder, *map(name.format, (1, 2, 3)))
    torch.save({"step": 3}, folder / "trainer.pt")
    require_state(torchlift.open(folder))
    stale = folder / name.format(2).replace("00002", "000002")
    stale.write_bytes(files[1].read_bytes())
    error = refused_by_all(folder, tmp_path)
    assert error.found == f"{stale.name}, {files[1].name}"
    stale.unlink()
    torchlift.save(STATE, folder / name.format(1).replace("x-", "y-").replace("3", "1"))
    assert files[0].name in str(refused_by_all(folder, tmp_path).found)
    (folder / name.format(1).replace("x-", "y-").replace("3", "1")).unlink()
    files[2].rename(tmp_path / "away")
    assert refused_by_all(folder, tmp_path).entry == files[2].name


# -- the cache of the Hub


def test_the_root_of_the_hub_s_cache_is_its_current_revision(tmp_path: Path) -> None:
    """The only one, or that of refs/main; else the revisions are listed."""
    snapshot = hub_cache(tmp_path, hub_files(tmp_path, 4))
    root = tmp_path / "models--org--name"
    for door in ("open", "verify", "digest", "diff", "convert"):
        DOORS[door](root, tmp_path)
    assert torchlift.diff(tmp_path / "to.safetensors", snapshot).equal
    older = root / "snapshots" / "0ld"
    torchlift.save({"old": torch.ones(1)}, older / "model.safetensors")
    error = refused_by_all(root, tmp_path / "none")
    assert error.found == "0ld, abc"
    assert str(older) in str(error.hint)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("abc")
    assert torchlift.diff(root, snapshot).equal
    (root / "refs" / "main").write_text("../../elsewhere")
    refused_by_all(root, tmp_path / "none")


# -- files that were cut


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("x.safetensors", [f".part{at}of12" for at in range(1, 13)]),
        ("it's mine.pt", ["-split-a", "-split-b", "-split-c"]),
        ("x.bin", [".001", ".002"]),
        ("x.safetensors", [".partaa", ".partab"]),
    ],
)
def test_a_file_that_was_cut_is_named_and_the_line_that_joins_it_works(
    tmp_path: Path, name: str, pieces: list[str]
) -> None:
    """By the path of every piece, and by their folder."""
    torchlift.save(STATE, tmp_path / name)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    size = -(-len(content) // len(pieces))
    for at, piece in enumerate(pieces):
        (tmp_path / f"{name}{piece}").write_bytes(content[at * size : (at + 1) * size])
    for place in (*sorted(tmp_path.iterdir()), tmp_path):
        error = refused_by_all(place, tmp_path)
        assert error.reason == "the file is a piece of a file that was cut"
        assert error.expected == name
    if "of" in pieces[-1]:
        last = tmp_path / f"{name}{pieces[-1]}"
        last.rename(tmp_path / "away")
        assert str(refused_by_all(tmp_path, tmp_path).hint).startswith("Fetch the other pieces")
        (tmp_path / "away").rename(last)
    command = str(error.hint).partition(": ")[2]
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    require_state(torchlift.open(tmp_path / name))


def test_a_complete_file_with_the_name_of_a_piece_is_read(tmp_path: Path) -> None:
    """The name alone decides nothing."""
    torch.save(STATE, tmp_path / "x.pt.1")
    require_state(torchlift.open(tmp_path / "x.pt.1"))

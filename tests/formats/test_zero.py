"""DeepSpeed's ZeRO directories: the model's weights, put together; the rest is refused."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from zero_files import Zero

import torchlift
from torchlift.errors import FormatError, UnsafeError


class Model(nn.Module):
    """Tied and frozen parameters, buffers, and shapes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.layers = nn.ModuleList([nn.Linear(3, 7), nn.Linear(7, 3)])
        self.frozen = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)


def training(stage: int, world: int, **how: Any) -> tuple[Model, Zero]:
    torch.manual_seed(0)
    model = Model()
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    groups = [
        {name: value for name, value in trained.items() if (value.dim() > 1) is matrices}
        for matrices in (True, False)
    ]
    frozen = {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad}
    tied = {"head.weight": "embedding.weight"}
    return model, Zero(stage, world, groups, frozen, dict(model.named_buffers()), tied, **how)


WAYS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "stage 1": (1, 2, {}),
    "stage 1 in bfloat16": (1, 4, {"prefix": "bf16_"}),
    "stage 2": (2, 3, {"prefix": "bf16_"}),
    "stage 2, aligned": (2, 3, {"alignment": 8}),
    "stage 2 on more ranks than some have elements": (2, 40, {}),
    "stage 3": (3, 2, {}),
    "stage 3 on 3 ranks": (3, 3, {"prefix": "fp16_"}),
    "stage 3 on more ranks than some have elements": (3, 40, {}),
    "one rank": (3, 1, {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_those_of_the_training(tmp_path: Path, way: str) -> None:
    """Of every stage, without deepspeed: each value at its place, padding nowhere."""
    stage, world, how = WAYS[way]
    model, zero = training(stage, world, **how)
    path = zero.write(tmp_path / "run")
    with torchlift.open(path) as ckpt:
        assert ckpt.format == "zero"
        weights = zero.weights()
        for name, value in weights.items():
            assert torch.equal(ckpt[name], value), name
        assert len(ckpt) == len(weights)
        assert ("embedding.weight", "head.weight") in ckpt.aliases
        assert not ckpt.objects
        assert ckpt.blocked == ()
    assert not any(name.startswith("deepspeed") for name in sys.modules)
    loaded = Model()
    report = torchlift.load(loaded, path)
    assert set(report.loaded) | {"head.weight"} == set(weights)
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    skeleton = torchlift.skeleton(Model)
    with torchlift.open(path) as ckpt:
        torchlift.load(skeleton, ckpt, source="read", dtype=torch.bfloat16)
    assert torch.equal(skeleton.head.weight, model.head.weight.bfloat16())


@pytest.mark.parametrize("stage", [2, 3])
def test_the_state_of_the_optimizer_is_refused(tmp_path: Path, stage: int) -> None:
    """By every way to ask for it; the error names what DeepSpeed makes of the folder."""
    path, model = training(stage, 2)[1].write(tmp_path / "run"), Model()
    optimizer = torch.optim.Adam(model.parameters())
    doors: list[Callable[[], object]] = [
        lambda: torchlift.open(path)["optimizer"],
        lambda: torchlift.open(path, root="optimizer"),
        lambda: torchlift.open(path).tree("optimizer"),
        lambda: torchlift.load_optimizer(model, optimizer, path),
        lambda: torchlift.load_optimizer(model, optimizer, path, root="optimizer"),
    ]
    for door in doors:
        with pytest.raises(FormatError, match=r"universal.*ds_to_universal") as caught:
            door()
        assert caught.value.entry == "optimizer"
    assert not optimizer.state


@pytest.mark.parametrize("stage", [2, 3])
def test_a_conversion_keeps_the_weights_and_names_the_rest(tmp_path: Path, stage: int) -> None:
    """Tensors alone are converted with a note; a torch file needs what the error says."""
    _, zero = training(stage, 2)
    path = zero.write(tmp_path / "run")
    report = torchlift.convert(path, tmp_path / "x.safetensors")
    assert "weights of a DeepSpeed ZeRO checkpoint" in report.lost["optimizer"]
    with pytest.raises(FormatError, match=r"exclude=\['optimizer'\]"):
        torchlift.convert(path, tmp_path / "x.pt")
    torchlift.convert(path, tmp_path / "x.pt", exclude=["optimizer"])
    for made in (tmp_path / "x.safetensors", tmp_path / "x.pt"):
        with torchlift.open(made) as ckpt:
            assert all(torch.equal(ckpt[name], value) for name, value in zero.weights().items())


@settings(max_examples=60, deadline=None)
@given(
    stage=st.sampled_from([1, 2, 3]),
    world=st.integers(1, 7),
    shapes=st.lists(
        st.lists(st.lists(st.integers(1, 6), max_size=3).map(tuple), min_size=1, max_size=4),
        min_size=1, max_size=3,
    ),
    alignment=st.sampled_from([1, 4]),
)  # fmt: skip
def test_any_shapes_on_any_number_of_ranks(
    tmp_path_factory: pytest.TempPathFactory, stage: int, world: int, shapes: Any, alignment: int
) -> None:
    """Each element is found once, wherever the shares of the ranks begin and end."""
    groups = [
        {f"w{at}.{i}": torch.randn(shape) for i, shape in enumerate(group)}
        for at, group in enumerate(shapes)
    ]
    zero = Zero(stage, world, groups, alignment=alignment)
    with torchlift.open(zero.write(tmp_path_factory.mktemp("z") / "run")) as ckpt:
        for name, value in zero.weights().items():
            assert torch.equal(ckpt[name], value)


def _remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def _copy(name: str, other: str) -> Callable[[Path], object]:
    return lambda folder: (folder / other).write_bytes((folder / name).read_bytes())


def _link(folder: Path) -> None:
    os.rename(folder / RANK_1, folder.parent.parent / "elsewhere")
    os.symlink(folder.parent.parent / "elsewhere", folder / RANK_1)


RANK_1 = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
RANK_0, MODEL = RANK_1.replace("1", "0", 1), "mp_rank_00_model_states.pt"
FOLDERS: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "the last rank is missing": (_remove(RANK_1), FormatError,
        f"'{RANK_1}': a rank's file is missing; expected 2 files; found 1, without {RANK_1}"),
    "the first rank is missing": (_remove(RANK_0), FormatError, f"found 1, without {RANK_0}"),
    "the model is missing": (_remove(MODEL), FormatError,
        r"expected 1 file; found 0, without \*mp_rank_00_model_states.pt"),
    "parallel in other ways": (_copy(MODEL, "mp_rank_01_model_states.pt"), FormatError,
        "'mp_rank_01_model_states.pt': .*split by tensor or pipeline parallelism.*ds_to_univ"),
    "more ranks": (_copy(RANK_0, "zero_pp_rank_2_mp_rank_00_optim_states.pt"), FormatError,
        "split by expert parallelism"),
    "a link elsewhere": (_link, UnsafeError, "a link that leaves the directory"),
}  # fmt: skip


@pytest.mark.parametrize("what", FOLDERS)
def test_a_directory_that_is_not_complete_is_refused(tmp_path: Path, what: str) -> None:
    """With the files that are missing, or what else is wrong."""
    edit, kind, text = FOLDERS[what]
    _, zero = training(2, 2)
    path = zero.write(tmp_path / "run")
    edit(path)
    with pytest.raises(kind, match=f"(?s){text}"):
        torchlift.open(path)


def _set(*keys: Any, value: Any) -> Callable[[str, Any], None]:
    def edit(name: str, content: Any) -> None:
        try:
            for key in keys[:-1]:
                content = content[key]
            content[keys[-1]] = value
        except (KeyError, IndexError):
            pass

    return edit


_GROUPS = "optimizer_state_dict", "single_partition_of_fp32_groups"
CONTENTS: dict[str, tuple[int, Callable[[str, Any], None], str]] = {
    "no shapes": (2, _set("param_shapes", value=None), "the shapes of the parameters are missing"),
    "fewer groups": (2, _set("param_shapes", value=[{}]), "vectors differ.*expected 2; foun"),
    "a larger shape": (2, _set("param_shapes", 0, "embedding.weight", value=(50, 3)),
        "fp32_groups.0': the length of a vector does not match.*expected 150 elements"),
    "a larger share": (3, _set("param_shapes", 0, "embedding.weight", value=(50, 3)),
        "fp32_flat_groups.0': the length of a vector does not match"),
    "a vector that is missing": (2, _set(*_GROUPS, 0, value=None),
        "lacks its module or its weights"),
    "vectors of other dtypes": (2, lambda name, content: "rank_1" in name and _set(
        *_GROUPS, 0, value=torch.ones(28, dtype=torch.float64))(name, content),
        "the shares have several dtypes; found .'float32', 'float64'"),
    "frozen ones without values": (2, _set("frozen_param_fragments", value={}),
        r"'frozen\.weight': the values of a frozen parameter are missing"),
    "no module": (2, _set("module", value=None), "lacks its module"),
    "other partitions": (2, _set("optimizer_state_dict", "partition_count", value=[2, 1]),
        "also split by expert parallelism; found partitions in 1"),
}  # fmt: skip


@pytest.mark.parametrize("what", CONTENTS)
def test_files_that_do_not_fit_together_are_refused(tmp_path: Path, what: str) -> None:
    """Each names the entry, before anything is allocated for it."""
    stage, edit, text = CONTENTS[what]
    _, zero = training(stage, 2)
    path = zero.write(tmp_path / "run", edit)
    with pytest.raises(FormatError, match=f"(?s){text}"):
        torchlift.open(path)


def loads(path: Path) -> list[tuple[int, float]]:
    """Load in two ways. Return the memory that this takes, and a sum of values."""
    found = []
    for source in ("read", "mmap"):
        shapes = {f"w{at}": torch.empty(1021, 2049, device="meta") for at in range(8)}
        model = nn.ParameterDict(shapes)
        with torchlift.measure.memory() as use:
            torchlift.load(model, path, source=source)
        found.append((use.added_anonymous, float(model["w7"].sum())))
    return found


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is told by /proc")
def test_a_load_takes_the_memory_of_one_copy(tmp_path: Path) -> None:
    """Of 64 MiB in shares of three ranks: each part of a tensor goes to its place at once."""
    values = {f"w{at}": torch.full((1021, 2049), float(at)) for at in range(8)}
    path = Zero(3, 3, [values]).write(tmp_path / "run")
    for added, total in torchlift.measure.in_child(loads, path).value:
        assert total == 7 * 1021 * 2049
        assert added < sum(value.nbytes for value in values.values()) + (24 << 20)

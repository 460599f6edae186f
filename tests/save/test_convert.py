"""`torchlift.convert` and its command: any format to any, renamed, cast, filtered, divided."""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_files import Call, gguf_writer, tensor, write_zip
from damaged_files import flip
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from zoo import same

import torchlift
from torchlift import remap
from torchlift.cli import main
from torchlift.errors import (
    CheckpointError,
    IntegrityError,
    MismatchError,
    PlacementError,
    UnsafeError,
)


def legacy(path: Path) -> dict[str, Any]:
    """A training's file as PyTorch wrote them before 1.6, with what most of them have."""
    weight = torch.randn(4, 3)
    model = {"module.w": weight, "module.tied": weight, "module.t": torch.randn(5, 2).t()}
    state = {
        "model": {**model, "module.count": torch.tensor(3)},
        "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]},
        "args": argparse.Namespace(lr=0.1),
        "epoch": 3,
    }
    torch.save(state, path, _use_new_zipfile_serialization=False)
    return state


def test_a_legacy_file_becomes_safetensors(tmp_path: Path) -> None:
    """The case of most people: what is no tensor is listed, and never run."""
    state = legacy(tmp_path / "x.pth")
    report = torchlift.convert(tmp_path / "x.pth", tmp_path / "x.safetensors")
    assert report.lost.keys() == {"args", "epoch", "optimizer.param_groups", "optimizer.state"}
    assert report.lost["args"] == (
        "only unpickling could rebuild it, through argparse.Namespace, and that can run code"
    )
    assert report.tied == {"model.module.tied": "model.module.w"}
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == {"model.module.w", "model.module.t", "model.module.count",
                            "optimizer.state.0.exp_avg"}  # fmt: skip
    for key in ("w", "t", "count"):
        assert same(found[f"model.module.{key}"], state["model"][f"module.{key}"])


def net() -> nn.Module:
    """A module with a buffer, in a place that begins with the name of a container."""
    return nn.ModuleDict({"model": nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))})


def training_files(folder: Path) -> dict[str, tuple[Any, str]]:
    """Name -> a training's checkpoint, and the container of its model."""
    model = net()
    state = torch.optim.AdamW(model.parameters()).state_dict()
    both = {"optimizer": state, "model": model.state_dict(), "config.yaml": "a: 1"}
    lightning = {"epoch": 1, "state_dict": model.state_dict(), "loops": {"fit": {"a.b": 1}},
                 "callbacks": {}, "optimizer_states": [state]}  # fmt: skip
    torch.save(both, folder / "both.pt")
    torch.save(lightning, folder / "last.ckpt")
    torchlift.save(both, folder / "dcp", format="dcp")
    return {"both": (folder / "both.pt", "model"), "last": (folder / "last.ckpt", "state_dict"),
            "dcp": (folder / "dcp", "model"), "in memory": (both, "model")}  # fmt: skip


def test_keys_that_begin_with_a_container_are_told_with_the_root_that_mends_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipient of the file would have keys that fit no model; with the root they fit."""
    for name, (src, root) in training_files(tmp_path).items():
        for dst in tmp_path / "x.safetensors", tmp_path / "y.safetensors.index.json":
            report = torchlift.convert(src, dst, overwrite=True)
            assert report.hint is not None, name
            assert f"'{root}.'" in report.hint
            assert f"Pass root={root!r}" in report.hint
            assert f"  hint: {report.hint}" in str(report).splitlines()
            mended = torchlift.convert(src, dst, root=root, overwrite=True)
            assert mended.hint is None
            torchlift.load(net(), dst)
        if isinstance(src, Path):
            words = ["convert", str(src), str(tmp_path / "x.safetensors"), "--overwrite"]
            assert main(words) == 0
            assert f"Pass --root {root} to" in capsys.readouterr().out
            assert main([*words, "--json", "--root", root]) == 0
            assert json.loads(capsys.readouterr().out)["hint"] is None


@pytest.mark.parametrize("kind", ["state dict", "extra state", "nested", "flat"])
def test_keys_that_are_a_model_s_own_get_no_hint(tmp_path: Path, kind: str) -> None:
    """Dots alone make no container, nor does what is nested because the model is."""
    src, state = tmp_path / "x.pt", dict[str, Any](net().state_dict())
    if kind == "extra state":
        state["model.0._extra_state"] = {"scale.of": torch.ones(1)}
    elif kind == "nested":
        state = {"encoder": {"layer": {"kernel": torch.ones(1)}}, "head": {"bias": torch.ones(1)}}
    elif kind == "flat":
        src = tmp_path / "x.safetensors"
    torchlift.save(state, src)
    assert torchlift.convert(src, tmp_path / "y.safetensors").hint is None


def test_root_rename_dtype_and_filters_work_together(tmp_path: Path) -> None:
    """Patterns see the keys below the root; integers are never cast; a tie stays one."""
    state = legacy(tmp_path / "x.pth")
    report = torchlift.convert(
        tmp_path / "x.pth",
        tmp_path / "x.pt",
        root="model",
        rename=remap.strip("module.") | (lambda key: f"net.{key}"),
        dtype="bfloat16",
        exclude=["*.t"],
    )
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert list(found) == ["net.w", "net.tied", "net.count"]
    assert found["net.w"].data_ptr() == found["net.tied"].data_ptr()
    assert same(found["net.w"], state["model"]["module.w"].bfloat16())
    assert found["net.count"].dtype == torch.int64
    assert report.cast == dict.fromkeys(("net.w", "net.tied"), ("float32", "bfloat16"))


def test_containers_of_a_torch_file_stay(tmp_path: Path) -> None:
    """Integer keys, lists and plain data; what is left out takes its containers with it."""
    state = legacy(tmp_path / "x.pth")
    torchlift.convert(tmp_path / "x.pth", tmp_path / "x.pt", exclude=["args", "model.*.t"])
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert list(found) == ["model", "optimizer", "epoch"]
    assert found["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert list(found["optimizer"]["state"]) == [0]
    assert list(found["model"]) == ["module.w", "module.tied", "module.count"]
    torchlift.convert(tmp_path / "x.pth", tmp_path / "y.pt", include=["model.*"])
    assert list(torch.load(tmp_path / "y.pt")) == ["model"]
    torch.save({"list": [torch.ones(1), torch.ones(2)]}, tmp_path / "l.pt")
    with pytest.raises(PlacementError, match="'list': one item of a list cannot be left out"):
        torchlift.convert(tmp_path / "l.pt", tmp_path / "z.pt", exclude=["list.0"])


@pytest.mark.parametrize("dst", ["y.pt", "y.safetensors", "y"])
def test_tensors_that_only_code_could_rebuild_are_refused_by_name(tmp_path: Path, dst: str) -> None:
    """Never left out without being told, by a save neither; nothing of them is imported."""
    trap = Call(os.getenv, "HOME", tensor())
    src = write_zip(tmp_path / "x.pt", {"w": tensor(), "trap": trap})
    format = "dcp" if dst == "y" else None
    with torchlift.open(src) as ckpt:
        for write, source in (torchlift.convert, src), (torchlift.save, ckpt):
            with pytest.raises(UnsafeError, match=r"'trap': only .*getenv.* exclude=\['trap'\]"):
                write(source, tmp_path / dst, format=format)
    assert os.listdir(tmp_path) == ["x.pt"]
    torchlift.convert(src, tmp_path / dst, format=format, exclude=["trap"])
    assert list(torchlift.open(tmp_path / dst)) == ["w"]


def test_it_never_replaces_what_is_there_without_being_told(tmp_path: Path) -> None:
    """The source above all, whatever it is called; told to, it may be the source."""
    src = tmp_path / "x.safetensors"
    torchlift.save({"w": torch.ones(3)}, src)
    before = src.read_bytes()
    (tmp_path / "link.safetensors").symlink_to(src)
    for dst in (src, tmp_path / "link.safetensors", f"{tmp_path}/../{tmp_path.name}/x.safetensors"):
        with pytest.raises(CheckpointError, match=r"something of this name\. .* overwrite=True"):
            torchlift.convert(src, dst, dtype="float16")
    torchlift.save({"w": torch.ones(3)}, tmp_path / "y.index.json")
    with pytest.raises(CheckpointError, match="there is something of this name"):
        torchlift.convert(src, tmp_path / "y.index.json")
    with pytest.raises(CheckpointError, match="there is something of this name"):
        torchlift.convert(tmp_path / "y.index.json", tmp_path / "y-00001-of-00001.safetensors")
    assert src.read_bytes() == before
    torchlift.convert(src, src, dtype="float16", overwrite=True)
    assert load_file(src)["w"].dtype == torch.float16


@pytest.mark.parametrize("dst", ["y.safetensors", "y/y.index.json", "y.pt", "y"])
def test_a_dry_run_tells_the_files_and_makes_none(tmp_path: Path, dst: str) -> None:
    """Not even a folder; what cannot be converted is an error then, too."""
    src, path = tmp_path / "x.pt", tmp_path / dst
    options: dict[str, Any] = {"format": "dcp"} if dst == "y" else {}
    torchlift.save({"w": torch.ones(3)}, src)
    told = torchlift.convert(src, path, dry_run=True, **options)
    assert os.listdir(tmp_path) == ["x.pt"]
    made = torchlift.convert(src, path, **options)
    assert (told.files, told.nbytes, told.tensors) == (made.files, made.nbytes, made.tensors)
    with pytest.raises(CheckpointError, match="there is something of this name"):
        torchlift.convert(src, path, dry_run=True, **options)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("dst", ["y.safetensors", "y.index.json", "y.pt", "y"])
def test_a_damaged_file_does_not_become_one_that_is_right(
    tmp_path: Path, dst: str, dtype: str | None
) -> None:
    """Whether its checksums are compared on the way, or before what is cast."""
    src, path = tmp_path / "x.pt", tmp_path / "to" / dst
    path.parent.mkdir()
    torchlift.save({"a": torch.ones(100), "b": torch.ones(9)}, src)
    flip(src, "b")
    options: dict[str, Any] = {"format": "dcp"} if dst == "y" else {}
    match = r"'data/1': checksums are wrong in 1 of" if dtype else "'b': the checksum of its bytes"
    with pytest.raises(IntegrityError, match=match) as caught:
        torchlift.convert(src, path, dtype=dtype, checksum=False, **options)
    assert caught.value.file == str(src)
    if not dtype:
        with pytest.raises(IntegrityError, match=match):
            torchlift.save(torchlift.open(src), path, **options)
    assert os.listdir(path.parent) == []
    torchlift.convert(src, path, dtype=dtype, verify=False, **options)
    assert torchlift.verify(path).ok


def test_only_what_is_converted_has_to_be_whole(tmp_path: Path) -> None:
    """The model of a training checkpoint whose optimizer state is damaged can be saved."""
    src, dst = tmp_path / "x.pt", tmp_path / "y.safetensors"
    torchlift.save({"model": {"a": torch.ones(100)}, "optim": {"m": torch.ones(7)}}, src)
    flip(src, "optim.m")
    words = ["convert", str(src), str(dst), "--overwrite"]
    assert main(words) == 1
    assert main([*words, "--root", "model"]) == 0
    torchlift.convert(src, dst, exclude=["optim.*"], dtype="bfloat16", overwrite=True)
    assert main([*words, "--no-verify"]) == 0


@pytest.mark.parametrize("format", ["safetensors", "sharded", "torch-zip", "dcp"])
def test_what_appears_during_a_conversion_is_not_replaced(tmp_path: Path, format: str) -> None:
    """Only with overwrite=True is anything."""
    torchlift.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    dst = tmp_path / "y" if format == "dcp" else tmp_path / ("y.index.json" if format == "sharded"
                                                             else "y.other")  # fmt: skip
    head = dst / ".metadata" if format == "dcp" else dst

    def dtype(entry: torchlift.TensorEntry) -> None:
        head.parent.mkdir(exist_ok=True)
        head.write_text("theirs", encoding="utf-8")

    with pytest.raises(CheckpointError, match="there is something of this name"):
        torchlift.convert(tmp_path / "x.pt", dst, format=format, dtype=dtype)
    assert head.read_text(encoding="utf-8") == "theirs"
    assert len(os.listdir(head.parent)) == (1 if format == "dcp" else 2)


def test_two_keys_of_one_name_and_patterns_that_fit_nothing_are_errors(tmp_path: Path) -> None:
    """Before anything is written."""
    torchlift.save({"a.w": torch.ones(1), "b.w": torch.ones(1)}, tmp_path / "x.pt")
    for arguments, message in [
        (
            {"rename": lambda key: key[2:]},
            r"'a\.w': rename gives two keys one name, 'w'; found b\.w",
        ),
        ({"include": ["c.*"]}, r"no key fits the pattern 'c\.\*'"),
    ]:
        with pytest.raises(MismatchError, match=message):
            torchlift.convert(tmp_path / "x.pt", tmp_path / "y.pt", **arguments)
    with pytest.raises(TypeError, match=r"include='a\*': expected patterns such as"):
        torchlift.convert(tmp_path / "x.pt", tmp_path / "y.pt", include="a*")
    with pytest.raises(ValueError, match="dtype='model': a conversion does not know a model"):
        torchlift.convert(tmp_path / "x.pt", tmp_path / "y.pt", dtype="model")
    with pytest.raises(TypeError, match=r"rename\('a.w'\) returned 3, which is neither str"):
        torchlift.convert(tmp_path / "x.pt", tmp_path / "y.pt", rename=lambda key: 3)
    assert os.listdir(tmp_path) == ["x.pt"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"root": "config"}, "no tensor is left"),
        ({"include": ["epoch"]}, r"patterns leave out .* include=\['epoch'\]"),
        ({"exclude": ["m.*"]}, r"patterns leave out .* exclude=\['m\.\*'\]"),
        ({"rename": lambda key: None if "m." in key else key}, "no tensor is left"),
    ],
)
def test_a_filter_that_leaves_no_tensor_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    """Before anything is written, the source itself above all; a dry run says so, too."""
    state = {"m": {"w": torch.ones(2), "b": torch.ones(1)}, "epoch": 3, "config": {"lr": 0.1}}
    torch.save(state, src := tmp_path / "x.pt")
    before = src.read_bytes()
    for source in (src, state, [src, state]):
        for dry_run in (True, False):
            with pytest.raises(MismatchError, match=told):
                torchlift.convert(source, src, overwrite=True, dry_run=dry_run, **options)
    assert os.listdir(tmp_path) == ["x.pt"]
    assert src.read_bytes() == before


def test_of_a_source_without_tensors_what_there_is_is_kept(tmp_path: Path) -> None:
    """Nothing is lost of it."""
    torch.save({"config": {"lr": 0.1}, "epoch": 3}, tmp_path / "x.pt")
    torchlift.convert(tmp_path / "x.pt", tmp_path / "y.pt")
    assert torch.load(tmp_path / "y.pt") == {"config": {"lr": 0.1}, "epoch": 3}


def test_metadata_of_safetensors_stays_or_is_told(tmp_path: Path) -> None:
    """It is the author's."""
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors", {"format": "pt", "by": "me"})
    torchlift.convert(tmp_path / "x.safetensors", tmp_path / "y.safetensors")
    with safe_open(tmp_path / "y.safetensors", "pt") as file:
        assert file.metadata()["by"] == "me"
    report = torchlift.convert(tmp_path / "x.safetensors", tmp_path / "y.pt")
    assert report.lost == {"(metadata)": "the format has no place for by"}


@pytest.mark.slow
def test_a_conversion_takes_the_memory_of_some_blocks(tmp_path: Path) -> None:
    """Whatever the layout of its tensors, and however large one of them is."""
    state = {
        "large": torch.ones(40 << 20),
        "turned": torch.ones(6 << 10, 4 << 10).t(),
        "odd": torch.ones(6 << 10, 4 << 10)[:, 1:],
    }
    torch.save(state, tmp_path / "x.pth", _use_new_zipfile_serialization=False)
    torchlift.save(state, tmp_path / "x", format="dcp")
    for src, dst, options in [
        ("x.pth", "y.safetensors", {}),
        ("x.pth", "y.safetensors", {"dtype": "bfloat16"}),
        ("x.pth", "y.pt", {}),
        ("x", "y.index.json", {"max_shard_size": "100MB", "dtype": "float64"}),
        ("x.pth", "y", {"format": "dcp"}),
    ]:
        convert = partial(torchlift.convert, overwrite=True, **options)
        child = torchlift.measure.in_child(convert, tmp_path / src, tmp_path / dst)
        assert child.memory.added_anonymous < 64 << 20, (src, dst, options)


def test_a_transform_takes_the_memory_of_some_tensors(tmp_path: Path) -> None:
    """Not of all that it has made: what is freed goes back, tensor after tensor."""
    src, dst = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    torchlift.save({str(number): torch.ones(1 << 20) for number in range(40)}, src)
    convert = partial(torchlift.convert, transform=lambda _, tensor: tensor + 1)
    child = torchlift.measure.in_child(convert, src, dst)
    assert child.memory.added_anonymous < 64 << 20
    assert float(load_file(dst)["39"][0]) == 2


def test_the_command_says_what_it_would_write_and_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With names and dtypes as `plan` takes them; as JSON, too."""
    legacy(tmp_path / "x.pth")
    src, dst = str(tmp_path / "x.pth"), str(tmp_path / "y.safetensors")
    words = ["convert", src, dst, "--root", "model", "--strip", "module.", "--rename", "^t$=turned",
             "--drop", "count", "--dtype", "w$=float16", "--dtype", "bfloat16"]  # fmt: skip
    assert main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(f"would write {dst}: 3 tensors, 68 B\n")
    assert os.listdir(tmp_path) == ["x.pth"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["files"] == [dst]
    assert found["lost"] == {"tied": "shares no memory with w any more"}
    assert found["cast"]["turned"] == ["float32", "bfloat16"]
    assert load_file(dst)["w"].dtype == torch.float16
    assert main(["convert", src, dst]) == 1
    assert "there is something of this name" in capsys.readouterr().err
    assert main(["convert", src, dst, "--overwrite", "--include", "model.*"]) == 0
    assert main(["convert", src, str(tmp_path / "y.foo")]) == 2
    assert main(["convert", src, str(tmp_path / "y.pt"), "--max-shard-size", "3GB"]) == 2
    assert main(["convert", src, str(tmp_path / "y.pt")]) == 3
    assert "argparse.Namespace" in capsys.readouterr().err
    assert main(["convert", src, str(tmp_path / "d"), "--format", "dcp", "--exclude", "args"]) == 0
    assert torchlift.open(tmp_path / "d").format == "dcp"


@pytest.mark.parametrize("name", ["new.pt", "new.safetensors"])
def test_ties_that_a_transform_ends_are_in_the_report(tmp_path: Path, name: str) -> None:
    """It is called with each key, and gets the values of the file, also if it writes to them."""
    weight = torch.ones(4)
    torch.save({"a": weight, "b": weight}, source := tmp_path / "old.pt")
    report = torchlift.convert(source, tmp_path / name, transform=lambda _, value: value.mul_(2))
    assert report.lost == {"b": "shares no memory with a any more"}
    with torchlift.open(tmp_path / name) as ckpt:
        assert ckpt.aliases == ()
        assert torchlift.diff(ckpt, {"a": 2 * weight, "b": 2 * weight}).equal


@pytest.mark.parametrize("name", ["x.safetensors", "x.safetensors.index.json"])
def test_an_array_in_memory_is_not_left_out(tmp_path: Path, name: str) -> None:
    """Alone, beside tensors, and in place of a file's tensor. What the hint names works."""
    torchlift.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    array = np.zeros(2, "f4")
    for source in {"w": array}, {"w": array, "v": torch.ones(1)}, [tmp_path / "w.pt", {"w": array}]:
        with pytest.raises(PlacementError) as caught:
            torchlift.convert(source, tmp_path / name)  # type: ignore[arg-type]
        assert caught.value.entry == "w"
        assert "torch.from_numpy" in str(caught.value.hint)
    torchlift.convert([tmp_path / "w.pt", {"w": torch.from_numpy(array)}], tmp_path / name)
    assert torchlift.open(tmp_path / name)["w"].tolist() == [0, 0]
    # A torch file keeps it as a list, and the report says so, as that of a save does.
    assert [*torchlift.convert({"w": array, "v": torch.ones(1)}, tmp_path / "a.pt").lost] == ["w"]


@pytest.mark.parametrize("dst", ["x.pt", "x.safetensors"])
def test_parts_and_joined_tensors_are_not_reported_as_lost_ties(tmp_path: Path, dst: str) -> None:
    """Only keys that were one tensor in the source can lose their tie."""
    fused = torch.randn(12, 3)
    state = {"a.qkv": fused, "b.qkv": fused, "c.qkv": torch.randn(12, 3)}
    torch.save(state, tmp_path / "src.pt")
    cut = remap.split("*.qkv", ["*.q", "*.k", "*.v"], chunk=0)
    report = torchlift.convert(tmp_path / "src.pt", tmp_path / dst, rename=cut)
    assert not report.lost
    assert report.tied == {f"b.{name}": f"a.{name}" for name in "qkv"}
    joined = torchlift.convert(tmp_path / dst, tmp_path / "back.pt", rename=cut.reversed())
    assert not joined.lost
    assert joined.tied == {"b.qkv": "a.qkv"}
    assert torchlift.diff(tmp_path / "back.pt", state).equal


def test_a_transform_may_return_a_conjugate_view(tmp_path: Path) -> None:
    """Its memory has other numbers than the view."""
    number = torch.complex(torch.ones(3), torch.arange(3.0))
    torch.save({"w": number}, tmp_path / "x.pt")
    torchlift.convert(
        tmp_path / "x.pt", tmp_path / "x.safetensors", transform=lambda key, t: t.conj()
    )
    assert torch.equal(load_file(tmp_path / "x.safetensors")["w"], number.conj())


def test_blocks_of_gguf_are_computed_and_cast(tmp_path: Path) -> None:
    """The values that the blocks stand for."""
    import gguf

    blocks = gguf.quants.quantize(np.ones((2, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
    with gguf_writer(tmp_path / "x.gguf") as writer:
        writer.add_tensor("q", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    torchlift.convert(tmp_path / "x.gguf", tmp_path / "g.safetensors", dtype="bfloat16")
    assert torch.equal(load_file(tmp_path / "g.safetensors")["q"], torch.ones(2, 32).bfloat16())

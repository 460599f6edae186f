"""What `convert` takes beside one file: several, state dicts in memory, and a transform."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from zoo import same

import torchlift
from torchlift import MismatchError, PlacementError, remap


def state() -> dict[str, Any]:
    return {"a.w": torch.arange(6.0).view(2, 3), "a.b": torch.ones(3), "none": torch.empty(0),
            "scalar": torch.tensor(2.0), "step": 3}  # fmt: skip


def found(path: Path) -> dict[str, Any]:
    with torchlift.open(path) as ckpt:
        return {**{key: value.clone() for key, value in ckpt.items()}, **ckpt.objects}


@pytest.mark.parametrize("dst", ["x.pt", "x.safetensors", "x.index.json", "folder"])
def test_a_later_source_wins(dst: str, tmp_path: Path) -> None:
    """Files and memory, in any order, as in a load; into every format."""
    patch = {"a.b": torch.full((3,), 5.0), "new": torch.zeros(1)}
    torch.save(state(), tmp_path / "base.pt")
    torch.save(patch, tmp_path / "patch.pt")
    want = {**state(), **patch}
    if "x." in dst and dst != "x.pt":
        del want["step"]
    format = "dcp" if dst == "folder" else None
    for base in (tmp_path / "base.pt", state(), torchlift.open(tmp_path / "base.pt")):
        for other in (tmp_path / "patch.pt", patch):
            report = torchlift.convert([base, other], tmp_path / dst, format=format, overwrite=True)
            assert report.tensors == 5
            assert same(found(tmp_path / dst), want)
            assert ("step" in report.lost) == ("step" not in want)


def test_all_that_filters_a_file_filters_memory(tmp_path: Path) -> None:
    """The root, patterns, names, dtypes, merges; and nothing of the caller's changes."""
    given = {"model": state(), "epoch": 1}
    out = tmp_path / "x.pt"
    torchlift.convert(
        given, out, root="model", exclude=["none"], rename={"a.b": "bias"}, dtype="float16"
    )
    want = {"a.w": state()["a.w"].half(), "bias": torch.ones(3).half(),
            "scalar": torch.tensor(2.0).half(), "step": 3}  # fmt: skip
    assert same(found(out), want)
    parts = {f"l.{at}.w": torch.full((2,), float(at)) for at in range(3)}
    torch.save({"l.2.w": torch.ones(2)}, tmp_path / "last.pt")
    torchlift.convert(
        [parts, tmp_path / "last.pt"], out, rename=remap.merge("l.{i}.w", "w", stack=0),
        overwrite=True,
    )  # fmt: skip
    assert same(found(out), {"w": torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]])})
    assert given["model"].keys() == state().keys()
    with pytest.raises(MismatchError, match=r"no key fits the pattern 'b\.\*'"):
        torchlift.convert(given, out, include=["b.*"], overwrite=True)
    with pytest.raises(TypeError, match="list of checkpoints is empty"):
        torchlift.convert([], out, overwrite=True)


@pytest.mark.parametrize("dst", ["x.pt", "x.safetensors"])
def test_a_transform_gets_each_tensor_once_and_its_results_are_saved(
    dst: str, tmp_path: Path
) -> None:
    """By their new names; it may write to what it gets, and change shapes and dtypes."""
    torch.save(state(), tmp_path / "src.pt")
    before = (tmp_path / "src.pt").read_bytes()
    for src in (tmp_path / "src.pt", state(), [state(), tmp_path / "src.pt"]):
        seen: list[str] = []

        def transform(key: str, tensor: torch.Tensor, seen: list[str] = seen) -> torch.Tensor:
            seen.append(key)
            return tensor.mul_(2) if key == "A.w" else tensor[None].bfloat16()

        rename = remap.rules([("^a", "A")])
        out = tmp_path / dst
        report = torchlift.convert(src, out, rename=rename, transform=transform, overwrite=True)
        assert sorted(seen) == ["A.b", "A.w", "none", "scalar"]
        assert report.tensors == 4
        values = found(out)
        assert torch.equal(values["A.w"], state()["a.w"] * 2)
        assert torch.equal(values["A.b"], torch.ones(1, 3).bfloat16())
        assert (values["none"].shape, values["scalar"].shape) == ((1, 0), (1,))
        assert torchlift.verify(out).ok
    assert (tmp_path / "src.pt").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["src.pt", dst])


def test_a_transform_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """An error of its own says for which key; what cannot be saved is refused by name."""
    torch.save(state(), tmp_path / "one.pt")

    def fails(key: str, tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no")

    out = tmp_path / "new" / "x.pt"
    with pytest.raises(RuntimeError) as caught:
        torchlift.convert(tmp_path / "one.pt", out, transform=fails)
    assert any("'a.w'" in text for text in caught.value.__notes__)
    with pytest.raises(TypeError, match=r"transform\('a.w', \.\.\.\) returned int, not a tensor"):
        torchlift.convert(tmp_path / "one.pt", out, transform=lambda key, tensor: 3)  # type: ignore[arg-type,return-value]
    with pytest.raises(
        PlacementError, match=r"'a\.w': cannot be stored.* found a sparse coo tensor"
    ):
        torchlift.convert(
            tmp_path / "one.pt", out.with_suffix(".safetensors"),
            transform=lambda key, tensor: tensor.to_sparse(),
        )  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["one.pt"]


def test_what_is_renamed_stays_in_its_container(tmp_path: Path) -> None:
    """Of a training file, as far as its new name begins with the container's."""
    model = {"module.w": torch.ones(2), "module.sub": {"b": torch.zeros(1)}}
    training = {"model": model, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}, "step": 3}
    torch.save(training, tmp_path / "x.pt")
    rename = remap.rules([(r"^model\.module\.w", "net.w"), (r"^model\.module\.", "model.")])
    torchlift.convert(tmp_path / "x.pt", tmp_path / "y.pt", rename=rename)
    found = torch.load(tmp_path / "y.pt", weights_only=True)
    assert found.keys() == {"model", "optimizer", "step", "net.w"}
    assert found["model"].keys() == {"sub.b"}
    assert found["optimizer"]["state"][0]["exp_avg"].tolist() == [1, 1]
    assert found["step"] == 3


class Wrapped(torch.Tensor):
    """A tensor that has no memory of its own."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        return args[0]


def test_what_has_no_memory_of_its_own_is_refused_by_its_name(tmp_path: Path) -> None:
    """From memory, and as what a transform returns: its bytes would be read from nowhere."""
    wrapped = torch.Tensor._make_wrapper_subclass(Wrapped, (2,))  # type: ignore[attr-defined]
    given, made = {"w": wrapped}, tmp_path / "y.pt"
    for words in (
        {"src": given},
        {"src": {"w": torch.ones(2)}, "transform": lambda *_: wrapped},
    ):
        with pytest.raises(PlacementError, match=r"'w': cannot be stored.*found Wrapped"):
            torchlift.convert(dst=made, **words)
    with pytest.raises(PlacementError, match=r"'w': cannot be stored.*found Wrapped"):
        torchlift.save(given, made)
    assert not made.exists()

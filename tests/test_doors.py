"""The same content through every door gives the same result: one family of contents, all doors.

A door is a way to a content: a file of each format that can hold it, a file object, a folder, a
`Checkpoint`, a state dict in memory; and what is done with it there: `open`, `tree`, `load`,
`convert`, `save`, `diff`, the command, in one process and on two ranks. What a content is, by
dotted key, is said by `flat` below, which shares nothing with the package.
"""

from __future__ import annotations

import io
import json
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from zoo import Bag, Stated

import torchlift
from torchlift.cli import main
from torchlift.distributed import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

State = dict[Any, Any]


def _ramp(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + len(shape)


def _shared() -> State:
    base = _ramp(4, 6)
    return {"tied": base, "net": {"tied": base, "row": base[1], "t": base.t()}, "x": base[:, 2:4]}


def _odd() -> State:
    kinds = (torch.bool, torch.uint8, torch.uint16, torch.int64, torch.float16, torch.bfloat16,
             torch.float64, torch.complex64, torch.float8_e4m3fn)  # fmt: skip
    made = {f"in_{str(kind)[6:]}": torch.tensor([0, 1, 1]).to(kind) for kind in kinds}
    return {"d": made, "scalar": torch.tensor(2.5), "none": torch.empty(0, 3)}


def _versioned() -> State:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for tensor in model.parameters():
        nn.init.constant_(tensor, 0.5)
    return model.state_dict()


#: Name -> what makes a content, and roots that it is asked for with.
CONTENTS: dict[str, tuple[Callable[[], State], tuple[str, ...]]] = {
    "flat": (lambda: {"w": _ramp(2, 3), "b": _ramp(3)}, ()),
    "dotted": (
        lambda: {"encoder.0.w": _ramp(2), "encoder.0.b": _ramp(3), "encoder.1.w": _ramp(4),
                 "head.w": _ramp(5)},
        ("encoder", "encoder.0", "head"),
    ),
    "nested": (
        lambda: {"model": {"enc": {"w": _ramp(2)}, "dec": {"w": _ramp(3)}}, "epoch": 3,
                 "config": {"lr": 0.1, "name": "x", "nothing": None, "empty": {}}},
        ("model", "model.enc"),
    ),
    "both": (
        lambda: {"a": {"x": _ramp(2), "deep": {"w": _ramp(3)}}, "a.y": _ramp(4), "a.n": 5,
                 "a.deep.v": _ramp(5), "b": {"a.x": _ramp(6)}},
        ("b", "b.a"),
    ),
    "one name": (
        lambda: {"a": {"b": 1, "c": 2}, "a.b": {"x": _ramp(2)}, "a.c": [_ramp(3)]},
        ("a.b", "a.c"),
    ),
    "lists": (
        lambda: {"l": [_ramp(2), 1, "x", [_ramp(3)]], "t": (_ramp(4), 2), "p": [1, {"lr": 0.1}]},
        ("l", "t", "l.3"),
    ),
    "list of dicts": (
        lambda: {"layers": [{"w": _ramp(2), "b": _ramp(3)}, {"w": _ramp(4), "n": [1, 2]}]},
        ("layers", "layers.1"),
    ),
    "extra state": (
        lambda: {"my_extra_state": {"w": _ramp(2), "n": 1}, "m.w": _ramp(4),
                 "m._extra_state": {"scale": [_ramp(3), 2], 7: {"x": "y"}, "none": {}},
                 "plain_extra_state": {"step": 3}},
        ("my_extra_state", "m", "m._extra_state"),
    ),
    "numbers as names": (
        lambda: {0: {"w": _ramp(2)}, 1: {"w": _ramp(3), 2.5: True, None: _ramp(2)}}, ("0", "1")
    ),
    "ties and views": (_shared, ("net",)),
    "odd dtypes": (_odd, ("d",)),
    "numpy": (
        lambda: {"w": _ramp(2), "a": {"long": np.arange(3000.0), "b": np.array([True]),
                 "w": _ramp(1), "n": np.float32(0.1), "i": np.arange(6).reshape(2, 3)}}, ("a",),
    ),
    "plain data": (
        lambda: {"w": _ramp(2), "c": {"w": _ramp(3), "d": torch.float16, "nan": float("nan"),
                 "dev": torch.device("cuda:1"), "s": slice(1, None, 2), "set": {3, 1}, "b": b"x",
                 "count": Counter([1, 1]), "size": torch.Size([2, 3]), "o": OrderedDict(a=1),
                 "floats": [0.1, 1e300, -0.0]}}, ("c",),
    ),
    "versions": (_versioned, ("0", "1")),
    "empty": (dict, ()),
    "empty containers": (lambda: {"a": {}, "b": [], "c": {"d": ()}, "w": _ramp(2)}, ()),
}  # fmt: skip


# -- what a content is, said in the plainest way


def _has_tensor(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value
    is_tensor = isinstance(value, torch.Tensor)
    return is_tensor or (isinstance(value, (dict, list, tuple)) and any(map(_has_tensor, items)))


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Key -> leaf."""
    found: dict[str, Any] = {}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, item in items:
        is_dict = isinstance(item, dict) and item
        if is_dict or (isinstance(item, (list, tuple)) and _has_tensor(item)):
            found |= flat(item, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = item
    return found


def below(leaves: Mapping[str, Any], root: str | None) -> dict[str, Any]:
    """What is under a prefix of keys."""
    if root is None:
        return dict(leaves)
    return {key[len(root) + 1 :]: v for key, v in leaves.items() if key.startswith(f"{root}.")}


def tensors(leaves: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in leaves.items() if isinstance(value, torch.Tensor)}


def shown(value: Any) -> Any:
    """A leaf by its values, so that two can be compared by ==, and errors are short."""
    if isinstance(value, torch.Tensor):
        dense = value.detach().resolve_neg().contiguous().view(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), dense.tolist()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tolist()
    if isinstance(value, dict):
        return {shown(name): shown(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return ("list" if isinstance(value, list) else "tuple", [*map(shown, value)])
    if isinstance(value, (torch.dtype, torch.device, slice)):
        return "str", str(value)  # as `objects` shows them
    if isinstance(value, (np.generic, float)):
        return repr(value.item() if isinstance(value, np.generic) else value)
    return type(value).__name__, value


def facts(leaves: Mapping[str, Any]) -> dict[str, Any]:
    return {key: shown(value) for key, value in leaves.items()}


def of(ckpt: Mapping[str, Any]) -> dict[str, Any]:
    """All leaves of a checkpoint that is open."""
    return {**ckpt.state_dict(), **ckpt.objects}  # type: ignore[attr-defined]


# -- files


def _dcp(state: State, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(dict(state), checkpoint_id=path, no_dist=True)


def _numpy(state: State, path: Path) -> None:
    np.savez(path, **{key: value.numpy() for key, value in tensors(flat(state)).items()})


#: Format -> what writes it. Those of tensors hold these only, under their keys.
WRITERS: dict[str, Callable[[State, Path], object]] = {
    "zip": torch.save,
    "legacy": lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
    "our zip": partial(torchlift.save, format="torch-zip"),
    "dcp": _dcp,
    "our dcp": partial(torchlift.save, format="dcp"),
    "tensors": lambda state, path: save_file(
        {key: value.clone().contiguous() for key, value in tensors(flat(state)).items()}, path
    ),
    "our tensors": lambda state, path: torchlift.save(
        tensors(flat(state)), path, format="safetensors"
    ),
    "tensors in shards": lambda state, path: torchlift.save(
        tensors(flat(state)), path, format="sharded", max_shard_size=8
    ),
    "tensors of numpy": _numpy,
}
#: Format -> contents that it cannot hold, or that its writer does not keep.
LACKS = {
    "our zip": ("numpy", "plain data"),
    "our dcp": ("numpy", "plain data"),
    "tensors of numpy": ("odd dtypes", "empty"),
}


def written(name: str, folder: Path) -> dict[str, Path]:
    """The content in each format that can hold it: a file, or a folder."""
    make, paths = CONTENTS[name][0], {}
    for format, write in WRITERS.items():
        if name not in LACKS.get(format, ()):
            paths[format] = folder / format.replace(" ", "-")
            if "numpy" in format:
                paths[format] = paths[format].with_suffix(".npz")
            write(make(), paths[format])
    return paths


def expected(name: str, format: str, root: str | None) -> dict[str, Any]:
    """The content below a root, as far as a format holds it."""
    leaves = flat(CONTENTS[name][0]())
    if "tensors" in format:
        leaves = tensors(leaves)
    if format == "dcp":  # torch writes nothing of an empty dict
        leaves = {k: v for k, v in leaves.items() if not (isinstance(v, dict) and not v)}
    return below(leaves, root)


ROOTS = [(name, root) for name, (_, roots) in CONTENTS.items() for root in (None, *roots)]


class Files(dict[str, dict[str, Path]]):
    """Content -> format -> file or folder, written when one is asked for."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self.factory = factory

    def __missing__(self, name: str) -> dict[str, Path]:
        self[name] = written(name, self.factory.mktemp("doors"))
        return self[name]


@pytest.fixture(scope="module", name="files")
def _files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory)


@pytest.mark.parametrize(("name", "root"), ROOTS)
def test_every_way_to_open_it_shows_the_same(files: Files, name: str, root: str | None) -> None:
    """With a root or without; as an index, as containers, as a file object, by the command."""
    for format, path in files[name].items():
        want = facts(expected(name, format, root))
        with torchlift.open(path, root=root) as ckpt, torchlift.open(path) as whole:
            if format != "dcp" or name not in ("lists", "list of dicts"):  # it unfolds plain lists
                assert facts(of(ckpt)) == want, format
            assert facts(flat(ckpt.tree())) == want, format
            assert facts(flat(whole.tree(root))) == want, format
        if path.is_file():
            with path.open("rb") as file, torchlift.open(file, root=root) as ckpt:
                assert facts(flat(ckpt.tree())) == want, format
            with torchlift.open(io.BytesIO(path.read_bytes()), root=root) as ckpt:
                assert facts(flat(ckpt.tree())) == want, format


@pytest.mark.parametrize(("name", "root"), ROOTS)
def test_the_command_lists_the_same_keys(
    files: Files, name: str, root: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """`inspect --json --root`."""
    for format in ("zip", "tensors"):
        options = ["--root", root] if root is not None else []
        main(["inspect", str(files[name][format]), "--json", *options])
        found = json.loads(capsys.readouterr().out)
        want = expected(name, format, root)
        keys = [entry["key"] for entry in found["tensors"]]
        assert sorted(keys) == sorted(tensors(want)), format
        assert found["objects"].keys() == want.keys() - tensors(want).keys(), format


@pytest.mark.parametrize(("name", "root"), ROOTS)
def test_a_conversion_and_a_save_keep_the_same(
    files: Files, name: str, root: str | None, tmp_path: Path
) -> None:
    """`convert(root=)` and `save(open(root=))`, into every format; nothing is lost in silence."""
    for format in ("zip", "dcp", "tensors"):
        if format not in files[name] or name in LACKS["our zip"]:
            continue
        source, want = files[name][format], expected(name, format, root)
        for target in ("torch-zip", "dcp", "safetensors"):
            kept = facts(tensors(want) if target == "safetensors" else want)
            if target == "safetensors" and not kept:
                continue
            out = tmp_path / f"{format}-{target}"
            report = torchlift.convert(source, out, root=root, format=target)
            assert report.tensors == len(tensors(want))
            assert facts(flat(torchlift.open(out).tree())) == kept, (format, target)
            if target == "safetensors" and want.keys() != kept.keys():
                assert report.lost.keys() >= want.keys() - kept.keys()
                continue
            with torchlift.open(source, root=root) as ckpt:
                torchlift.save(ckpt, out, format=target)
            assert facts(flat(torchlift.open(out).tree())) == kept, (format, target)


@pytest.mark.parametrize(("name", "root"), ROOTS)
def test_all_are_equal_to_each_other(files: Files, name: str, root: str | None) -> None:
    """By `diff`: each file, and the state in memory; and one that is not is told."""
    state = expected(name, "zip", root)
    for format, path in files[name].items():
        with torchlift.open(path, root=root) as ckpt:
            memory = {
                key: value for key, value in state.items() if key in expected(name, format, root)
            }
            for pair in ((ckpt, memory), (memory, ckpt)):
                found = torchlift.diff(*pair)
                assert found.equal, f"{format}: {found}"
                assert not found.blocked
            other = {**memory, "one more": 1}
            assert torchlift.diff(ckpt, other).added == ("one more",)
    assert torchlift.diff(CONTENTS[name][0](), files[name]["zip"]).equal
    assert main(["diff", *(str(files[name][format]) for format in ("zip", "legacy"))]) == 0


# -- loads


def loaded(given: Any, name: str, root: str | None) -> tuple[Any, ...]:
    """What a load reports, what is in the model then, and what half of the model would not take."""
    want = tensors(expected(name, "zip", root))
    model, half = Bag(want), dict([*want.items()][::2])
    report = torchlift.load(model, given, root=root, allow_unexpected=["*"])
    plan = torchlift.plan(Bag({**half, "new": torch.ones(1)}), given, root=root, strict=False)
    values = facts(dict(model.named_buffers(remove_duplicate=False)))
    unexpected = sorted({*plan.unexpected_keys} & want.keys())
    return values, sorted(report.loaded), plan.missing_keys, unexpected


def unexpected(given: Any, root: str | None) -> list[str]:
    """What a model of one other tensor would not take."""
    try:
        torchlift.plan(Bag({"new": torch.ones(1)}), given, root=root)
    except torchlift.MismatchError as error:
        return sorted(error.unexpected_keys)
    raise AssertionError("it takes everything")


@pytest.mark.parametrize(("name", "root"), ROOTS)
def test_a_model_gets_the_same_from_everywhere(files: Files, name: str, root: str | None) -> None:
    """From each file, an open one, a file object and a state dict; the reports are the same."""
    state, whole = CONTENTS[name][0](), expected(name, "zip", root)
    want = tensors(whole)
    if not want:
        return
    values, *report = loaded(state, name, root)
    assert values == facts(want)
    for format, path in files[name].items():
        with torchlift.open(path) as ckpt:
            assert loaded(ckpt, name, root) == (values, *report), format
        assert loaded(path, name, root) == (values, *report), format
        if format in ("zip", "legacy", "our zip"):
            assert unexpected(path, root) == unexpected(state, root) == sorted(whole), format
        if path.is_file():
            with path.open("rb") as file:
                assert loaded(file, name, root) == (values, *report), format


def on_a_rank(paths: dict[str, str], folder: str) -> dict[str, Any]:
    """Load each content from a file and from memory, and save it from both ranks."""
    import test_doors as doors
    import torch.distributed as dist

    found: dict[str, Any] = {}
    for name, root in doors.ROOTS:
        if doors.tensors(doors.expected(name, "zip", root)):
            given = [paths[name], doors.CONTENTS[name][0]()]
            found[f"{name} {root}"] = [doors.loaded(each, name, root) for each in given]
    for name, (make, _) in doors.CONTENTS.items():
        if name not in doors.LACKS["our zip"]:
            for format in ("torch-zip", "dcp"):
                target = Path(folder, f"{name}-{format}")
                torchlift.save(make(), target, format=format, process_group=dist.group.WORLD)
    return found


@pytest.mark.distributed
def test_two_ranks_get_and_save_the_same(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one process does: values, reports, and what is in the files."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    paths = {name: str(files[name]["zip"]) for name in CONTENTS}
    one, two = on_ranks(
        2, on_a_rank, paths, str(tmp_path), environment={"PYTHONWARNINGS": "ignore"}
    )
    assert one == two
    for name, root in ROOTS:
        if tensors(expected(name, "zip", root)):
            assert one[f"{name} {root}"] == [loaded(CONTENTS[name][0](), name, root)] * 2, name
    for name in CONTENTS.keys() - {*LACKS["our zip"]}:
        for format in ("torch-zip", "dcp"):
            ckpt = torchlift.open(tmp_path / f"{name}-{format}")
            assert facts(flat(ckpt.tree())) == facts(expected(name, "zip", None)), (name, format)


def test_an_extra_state_is_the_same_from_a_file_and_from_memory(tmp_path: Path) -> None:
    """Containers, names and values of every class that a file of plain data has."""
    extra = {
        "kind": torch.float16, "on": torch.device("cuda:1"), "rows": slice(1, None, 2),
        3: [1, (2,)], "list": [_ramp(2), {"x": torch.int8, True: None}], "none": {},
        "array": np.arange(3),
    }  # fmt: skip
    state = {"net._extra_state": extra, "net.my_extra_state.w": _ramp(2)}
    torch.save(state, tmp_path / "x.pt")
    torch.save({"outer": state}, tmp_path / "nested.pt")
    givens: list[tuple[Any, str | None]] = [
        (tmp_path / "x.pt", None), (state, None), (tmp_path / "nested.pt", "outer"),
        ({"outer": state}, "outer"), ([{}, state], None), ([state, tmp_path / "x.pt"], None),
    ]  # fmt: skip
    for given, root in givens:
        model = nn.Module()
        model.net = Stated()
        model.net.my_extra_state = nn.Module()
        model.net.my_extra_state.register_buffer("w", torch.zeros(2))
        torchlift.load(model, given, root=root, allow_missing=["net.weight"])
        found = model.net.extra
        assert shown(found) == shown(extra)
        assert [*map(type, found.values())] == [*map(type, extra.values())], given
        assert torch.equal(model.net.my_extra_state.w, _ramp(2))

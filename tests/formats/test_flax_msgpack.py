"""flax's msgpack files, laid out as ``flax.serialization`` does: arrays are found in place."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import torchlift
from torchlift.errors import FormatError, UnsafeError
from torchlift.formats.boxes import flat_entry, runs

WEIGHT = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)


def array(value: np.ndarray, dtype: str = "", code: int = 1, shape: Any = None) -> msgpack.ExtType:
    """An array as an extension of msgpack (flax/serialization.py, ``_ndarray_to_bytes``)."""
    shape = value.shape if shape is None else shape
    return msgpack.ExtType(
        code, msgpack.packb((shape, dtype or value.dtype.name, value.tobytes("C")))
    )


def chunked(value: np.ndarray, numel: int) -> dict[str, Any]:
    """A large array as a map of flat runs (flax/serialization.py, ``_chunk``)."""
    flat = value.reshape(-1)
    chunks = [array(flat[at : at + numel]) for at in range(0, flat.size, numel)]
    return {
        "__msgpack_chunked_array__": True,
        "shape": {str(at): size for at, size in enumerate(value.shape)},
        "chunks": {str(at): chunk for at, chunk in enumerate(chunks)},
    }


def write(path: Path, tree: object) -> Path:
    path.write_bytes(msgpack.packb(tree))
    return path


def test_arrays_and_values_are_what_flax_restores(tmp_path: Path) -> None:
    """Nested maps become dotted keys; scalars of numpy are tensors without dimensions."""
    brain = torch.arange(5, dtype=torch.bfloat16)
    long = "k" * 40, "x" * 70_000
    tree = {
        "params": {"dense": {"kernel": array(WEIGHT), "bias": array(np.ones(3, np.float16))}},
        "brain": array(brain.view(torch.int16).numpy(), "bfloat16"),
        "count": array(np.asarray(7, np.int32)), "scalar": array(np.asarray(2.5), code=3),
        "empty": array(np.zeros((2, 0, 3))), "flags": array(np.array([True, False])),
        "step": 3, "lr": 1e-3, "big": 2**40, "less": -(2**40), "small": -7, "none": None,
        "z": msgpack.ExtType(2, msgpack.packb((1.0, -2.0))), "raw": b"bytes", "opt": {"0": {}},
        "list": [1, 2], "mixed": [array(np.ones(2)), "a"], long[0]: long[1],
        **{f"many{at}": at for at in range(20)},
    }  # fmt: skip
    with torchlift.open(write(tmp_path / "flax_model.msgpack", tree)) as ckpt:
        assert ckpt.format == "flax-msgpack"
        assert torch.equal(ckpt["params.dense.kernel"], torch.from_numpy(WEIGHT))
        assert torch.equal(ckpt["brain"], brain)
        assert ckpt["params.dense.bias"].dtype == torch.float16
        assert (ckpt["count"].item(), ckpt["scalar"].item()) == (7, 2.5)
        assert ckpt["scalar"].dtype == torch.float64
        assert ckpt["empty"].shape == (2, 0, 3)
        assert ckpt["flags"].tolist() == [True, False]
        assert ckpt["mixed.0"].tolist() == [1, 1]
        found = {key: ckpt.objects[key] for key in tree if key in ckpt.objects}
        assert found == {
            "step": 3, "lr": 1e-3, "big": 2**40, "less": -(2**40), "small": -7, "none": None,
            "z": 1 - 2j, "raw": b"bytes", "list": [1, 2], long[0]: long[1],
            **{f"many{at}": at for at in range(20)},
        }  # fmt: skip
        assert ckpt.objects["opt.0"] == {}
    with torchlift.open(write(tmp_path / "one", array(WEIGHT))) as ckpt:
        assert torch.equal(ckpt["tensor"], torch.from_numpy(WEIGHT))


def test_arrays_in_runs_are_put_together(tmp_path: Path) -> None:
    """Above 1 GiB flax stores flat runs, whose ends are anywhere in the array."""
    deep = np.arange(210, dtype=np.int16).reshape(5, 7, 3, 2)
    path = write(tmp_path / "x", {"a": {"w": chunked(WEIGHT, 5)}, "deep": chunked(deep, 11)})
    with torchlift.open(path) as ckpt:
        assert not ckpt.objects
        assert torch.equal(ckpt["a.w"], torch.from_numpy(WEIGHT))
        assert torch.equal(ckpt["deep"], torch.from_numpy(deep))
    with torchlift.open(write(tmp_path / "top", chunked(WEIGHT, 5))) as ckpt:
        assert torch.equal(ckpt["tensor"], torch.from_numpy(WEIGHT))


@given(
    shape=st.lists(st.integers(1, 5), max_size=4).map(tuple),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=40),
)
def test_flat_runs_become_the_boxes_that_they_fill(
    shape: tuple[int, ...], sizes: list[int]
) -> None:
    """Each element once and at its place, in at most two boxes less one for each dimension."""
    numel, places, at = math.prod(shape), [], 0
    for size in itertools.cycle(sizes):
        places.append(("f", at + 1000 * len(places), min(size, numel - at)))
        at += places[-1][2]
        if at == numel:
            break
    entry = flat_entry("w", "int8", shape, places, "w")
    expected = [offset + i for _, offset, count in places for i in range(count)]
    found = {run.at + i: run.offset + i for run in runs(entry) for i in range(run.numel)}
    assert [found[i] for i in range(numel)] == expected
    assert len(entry.chunks) <= len(places) * max(1, 2 * len(shape) - 1)


def test_what_is_no_array_of_torch_is_listed(tmp_path: Path) -> None:
    """Dtypes that torch has no bytes for, and other programs' extensions."""
    tree = {"i4": array(np.ones(4, np.int8), "int4"), "time": msgpack.ExtType(42, b"1234"), "a": 1}
    with torchlift.open(write(tmp_path / "x", tree)) as ckpt:
        assert ckpt.blocked == ("numpy.dtype(int4)", "msgpack extension type 42")
        assert dict(ckpt.objects) == {"a": 1}
        with pytest.raises(UnsafeError, match=r"'i4': .*numpy.dtype\(int4\)"):
            ckpt["i4"]


def nested(depth: int) -> Any:
    tree: Any = {}
    for _ in range(depth):
        tree = {"a": tree}
    return tree


_GOOD = msgpack.packb({"w": array(WEIGHT)})
REFUSED: dict[str, tuple[Callable[[], object] | bytes, str]] = {
    "short": (_GOOD[:-1], r"'w': the file ends early; expected 48 bytes more; found 47 bytes"),
    "long": (_GOOD + b"x", "bytes after the end of the map"),
    "too few bytes": (lambda: {"a": {"w": array(WEIGHT, shape=(4, 2))}},
                      r"'a\.w': an array's bytes are not what its shape.*expected 32 bytes"),
    "a negative size": (lambda: {"w": array(WEIGHT, shape=(-4, -3))}, "'w'.*impossible size"),
    "a huge size": (lambda: {"w": array(WEIGHT, shape=(0, 2**62, 4))}, "'w'.*impossible size"),
    "no shape": (lambda: {"w": array(WEIGHT, shape=5)}, "'w'.*size is not a list"),
    "not a triple": (lambda: {"w": msgpack.ExtType(1, b"\x92\x01\x02")}, "'w'.*not a shape"),
    "a length that lies": (b"\x81\xa1w\xc7\x05\x01" + msgpack.packb(((1,), "int8", b"x")),
                           "'w'.*an extension is not as long as it says"),
    "no complex number": (lambda: {"w": msgpack.ExtType(2, msgpack.packb("x"))}, "'w'.*complex"),
    "a name twice": (b"\x82\xa1w\x01\xa1w\x02", "'w': a name occurs twice"),
    "a list as a key": (b"\x82\xa1w\x01\x90\x02", "a name in a map is not text; found a list"),
    "a number as a key": (b"\x82\xa1w\x01\x05\x02", "a name in a map is not text; found a int"),
    "not UTF-8": (b"\x81\xa1\xff\x01", "a text that is not UTF-8"),
    "an unused byte": (b"\x81\xa1w\xc1", "'w': not an object of msgpack; found byte 0xc1"),
    "2**32 items": (b"\x81\xa1w\xdd\xff\xff\xff\xff\x01", "'w': the file ends early"),
    "2**32 bytes": (b"\x81\xa1w\xc6\xff\xff\xff\xff\x01", "'w': the file ends early"),
    "deep": (lambda: nested(200), "containers nest too deep"),
    "a run that is missing": (
        lambda: {"w": {**chunked(WEIGHT, 5), "chunks": {"0": array(WEIGHT.reshape(-1)[:5])}}},
        r"'w': an array in several runs that do not make up its shape; expected 12 elements"),
    "runs of two dtypes": (
        lambda: {"w": {**chunked(WEIGHT, 6), "chunks": {
            "0": array(np.ones(6, np.float32)), "1": array(np.ones(6))}}}, "float32.*float64"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_malformed_file_is_refused(tmp_path: Path, name: str) -> None:
    """Each names the entry and what is wrong with it."""
    content, text = REFUSED[name]
    path = tmp_path / "x"
    path.write_bytes(content if isinstance(content, bytes) else msgpack.packb(content()))
    with pytest.raises(FormatError, match=f"(?s){text}"):
        torchlift.open(path)

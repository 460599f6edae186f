"""`digest`: one number for the same weights in any wrapper and format, another for others."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from in_code import in_code
from range_server import serving
from torch import nn

import torchlift
from torchlift.errors import CheckpointError, FormatError, PlacementError, UnsafeError

any_time = settings(deadline=None)
DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8,
    torch.int16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16,
]  # fmt: skip


class Net(nn.Module):
    """Ties, a buffer that counts and one that is not saved, several dtypes, odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 7)
        self.body = nn.Sequential(nn.Linear(7, 5, dtype=torch.bfloat16), nn.BatchNorm1d(5))
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("cache", torch.arange(4.0), persistent=False)


FILES: dict[str, dict[str, Any]] = {
    "m.pt": {}, "m.safetensors": {}, "s.safetensors.index.json": {"max_shard_size": 400},
    "dcp": {"format": "dcp"},
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_model_and_its_file_have_one_number(tmp_path: Path, name: str) -> None:
    """In each format, by its path and open; and so has what loads it."""
    expected, path = torchlift.digest(Net()), tmp_path / name
    torchlift.save(Net(), path, **FILES[name])
    assert torchlift.digest(path) == expected == torchlift.digest(str(path))
    with torchlift.open(path) as ckpt:
        assert torchlift.digest(ckpt) == expected
        assert torchlift.digest(ckpt.state_dict()) == expected
    model = torchlift.skeleton(Net)
    torchlift.load(model, path)
    assert torchlift.digest(model) == expected
    assert len(expected) == 16
    assert int(expected, 16)


def test_wrappers_leave_no_trace() -> None:
    """What torch.compile and activation checkpointing put in front of names is not there."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    expected, model = torchlift.digest(Net()), Net()
    model.body = checkpoint_wrapper(model.body)
    assert torchlift.digest(model) == expected
    assert torchlift.digest(torch.compile(model, backend="eager")) == expected


def test_a_root_is_the_number_of_the_model(tmp_path: Path) -> None:
    """A checkpoint of a training has another one as a whole; objects in it do not count."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = {"model": model, "optimizer": optimizer, "epoch": 3}
    torchlift.save(whole, tmp_path / "t.pt")
    assert torchlift.digest(tmp_path / "t.pt", root="model") == torchlift.digest(model)
    assert torchlift.digest(whole, root="model") == torchlift.digest(model)
    assert torchlift.digest(tmp_path / "t.pt") != torchlift.digest(model)
    assert torchlift.digest({**whole, "epoch": 4}) == torchlift.digest(tmp_path / "t.pt")
    for source in (whole, tmp_path / "t.pt"):
        with pytest.raises(FormatError, match="modle"):
            torchlift.digest(source, root="modle")


def test_two_tied_names_are_two_equal_tensors() -> None:
    """As for `diff`: what is a tie in one file is a copy in another one."""
    tied = Net()
    apart = Net()
    apart.head.weight = nn.Parameter(apart.embed.weight.detach().clone())
    assert torchlift.digest(tied) == torchlift.digest(apart)
    state = tied.state_dict()
    del state["head.weight"]
    assert torchlift.digest(state) != torchlift.digest(tied)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any dtype and strides, with any bits."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 6), max_size=3))
    count = torch.Size(shape).numel() * dtype.itemsize
    data = bytearray(draw(st.binary(min_size=count, max_size=count)))
    if dtype == torch.bool:
        data = bytearray(byte & 1 for byte in data)
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    made = flat.view(shape)
    return made.mT if made.dim() > 1 and draw(st.booleans()) else made


@any_time
@given(st.lists(tensors(), min_size=1, max_size=3))
def test_the_number_is_the_hash_that_it_is_said_to_be(every: list[torch.Tensor]) -> None:
    """In plain Python, so that another program can compute it, too.

    The hash is a cryptographic one of all names, dtypes, shapes and bytes: no sum of them.
    """
    hashes = []
    for number, tensor in enumerate(every):
        raw = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
        dtype, shape = str(tensor.dtype), tuple(tensor.shape)
        text = repr((f"w{number}", dtype, "torch.strided", shape, [(dtype, shape)])).encode()
        content = hashlib.blake2b(raw, digest_size=16).digest()
        hashes.append(hashlib.blake2b(text + content, digest_size=16).digest())
    expected = hashlib.blake2b(b"".join(sorted(hashes)), digest_size=8).hexdigest()
    assert torchlift.digest({f"w{n}": tensor for n, tensor in enumerate(every)}) == expected


def test_what_is_not_a_tensor_does_not_count() -> None:
    """Numbers, texts, lists, and arrays of texts."""
    state = {"a": torch.zeros(2)}
    more = {"n": 1, "t": "text", "l": [np.ones(2)], "names": np.array(["x"])}
    assert torchlift.digest({**state, **more}) == torchlift.digest(state)


def test_what_has_no_tensor_has_no_number(tmp_path: Path) -> None:
    """It would be the same one for all of them."""
    torch.save({"step": 3}, tmp_path / "m.pt")
    nothing = [{}, {"a": 1, "b": "text"}, nn.ReLU(), {"n": np.array(["x"])}, tmp_path / "m.pt"]
    for each in nothing:
        with pytest.raises(FormatError, match=r"contains no tensors.*Pass a model"):
            torchlift.digest(each)
    with pytest.raises(FormatError, match="contains no tensors"):
        torchlift.digest({"model": Net(), "args": {"lr": 0.1}}, root="args")


def test_what_has_no_names_is_refused() -> None:
    """Iterators, which would be empty afterwards, several paths, and what is no container."""
    model = Net()
    iterators = model.parameters(), model.named_parameters()
    for each in (*iterators, ["a.pt", Path("b.pt")], [], 42, None, np.ones(3)):
        message = rf"expected a model.*not {type(each).__name__}\. .*dict\(model.named_parameters"
        with pytest.raises(TypeError, match=message):
            torchlift.digest(each)
    assert all(list(each) for each in iterators)


def test_an_array_of_numpy_counts_as_in_a_file(tmp_path: Path) -> None:
    """In .npz, in .pt, as a tensor: whatever its byte order and strides, and read-only or not."""
    arrays: dict[str, Any] = {
        "back": np.arange(6.0)[::-1], "big": np.arange(3, dtype=">f4"), "number": np.array(3.0),
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "none": np.zeros((0, 2), dtype=bool),
    }  # fmt: skip
    arrays["number"].flags.writeable = False
    tensors = {k: torch.from_numpy(a.astype(a.dtype.newbyteorder("="), "C"))
               for k, a in arrays.items()}  # fmt: skip
    np.savez(tmp_path / "m.npz", **arrays)
    torch.save(arrays, tmp_path / "m.pt")
    expected = torchlift.digest(tensors)
    for each in (arrays, tmp_path / "m.npz", tmp_path / "m.pt"):
        assert torchlift.digest(each) == expected
    assert torchlift.digest({**arrays, "number": np.zeros(3)}) != expected


def test_large_tensors_are_hashed_in_blocks(tmp_path: Path) -> None:
    """Wherever a block ends: 40 MB that no block divides, also behind a URL."""
    numbers = torch.arange(10_000_022) * 2_654_435_761 % 60_013
    values = numbers.to(torch.int16).view(5_000_011, 2)
    state = {"t": values.T, "v": values.view(-1)[1:], "w": values.view(-1).view(torch.bfloat16)}
    found = torchlift.digest(state)
    torchlift.save(state, tmp_path / "m.safetensors")
    assert torchlift.digest(tmp_path / "m.safetensors") == found
    with serving(tmp_path) as server:
        assert torchlift.digest(server.url("m.safetensors")) == found
    assert found == torchlift.digest({key: value.contiguous() for key, value in state.items()})
    values[4_000_000, 1] += 1
    assert torchlift.digest(state) != found


def test_what_has_no_values_is_refused_by_name(tmp_path: Path) -> None:
    """On meta, lazy, or only to be had by running code: no number is better than a wrong one."""
    with pytest.raises(PlacementError, match=r"'0\.weight': .*not have values.*on meta"):
        torchlift.digest(torchlift.skeleton(lambda: nn.Sequential(nn.Linear(2, 2))))
    with pytest.raises(CheckpointError, match=r"weight.*lazy"):
        torchlift.digest(nn.LazyLinear(2))
    with pytest.raises(PlacementError, match="'w': the values of a tensor cannot be read"):
        torchlift.digest({"w": torch.ones(3).to_mkldnn()})
    packed = torch.arange(8, dtype=torch.uint8).view(torch.bits8)
    for name, value in {"net": nn.Linear(2, 2), "packed": packed}.items():
        torch.save({"w": torch.ones(2), name: value}, tmp_path / "m.pt")
        with pytest.raises(UnsafeError, match=f"'{name}'"):
            torchlift.digest(tmp_path / "m.pt")


def test_a_large_file_takes_the_memory_of_some_blocks(tmp_path: Path) -> None:
    """256 MiB are read, or looked at in the map, in a fixed budget."""
    torchlift.save({"w": torch.ones(64 << 20)}, path := tmp_path / "m.safetensors")
    setup = "import torch, torchlift\ntorchlift.digest({'a': torch.ones(1)})"
    for source in "args[0]", "torchlift.open(args[0]).state_dict()":
        child = in_code(f"torchlift.digest({source})", str(path), setup=setup)
        assert child.memory.added_anonymous < 64 << 20

"""Valid files with bytes changed: an index that stays inside its file, or a CheckpointError."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys

import msgpack
import pytest
import torch
from checkpoint_files import (
    Call,
    Script,
    StorageId,
    TarId,
    assert_in_bounds,
    tar_members,
    tensor,
    weight,
    write_program,
    write_script,
    write_tar,
    write_zip,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from zero_files import Zero

from torchlift.errors import CheckpointError
from torchlift.formats import read_index
from torchlift.formats.summary import to_html, to_json, to_text


def _without_checksums(path):
    """Set every CRC32 of the directory to zero, so that changes reach the pickle."""
    data = bytearray(path.read_bytes())
    at = data.find(b"PK\x01\x02")
    while at >= 0:
        struct.pack_into("<I", data, at + 16, 0)
        at = data.find(b"PK\x01\x02", at + 4)
    path.write_bytes(bytes(data))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """One valid file of each kind, as bytes."""
    directory = tmp_path_factory.mktemp("corpus")
    base = torch.arange(12.0).reshape(3, 4)
    state = {"w": base, "t": base.t(), "n": {"e": [torch.zeros(0), 3]}, "o": {"lr": 0.1, "m": None}}
    torch.save(state, directory / "a.pt")
    torch.save({f"k{i}": torch.ones(i) for i in range(60)}, directory / "b.pt")
    torch.save(torch.nn.Linear(2, 2).state_dict(), directory / "c.pt", pickle_protocol=4)
    torch.save(state, directory / "d.pt")
    _without_checksums(directory / "b.pt")
    _without_checksums(directory / "c.pt")
    _without_checksums(directory / "d.pt")
    torch.save(state, directory / "f.pt", _use_new_zipfile_serialization=False)
    values = struct.pack("<4f", 1, 2, 3, 4)
    storages, tensors = [(1, "cpu", torch.FloatStorage, 4, values)], [(2, 1, (2, 2), (2, 1), 0)]
    write_tar(directory / "g.tar", tar_members({"w": TarId("2"), "n": 5}, storages, tensors))
    inner = Script("Model", {"w": tensor(), "b": tensor()})
    write_script(directory / "h.pt", Script("Model", {"w": tensor(), "inner": inner, "n": 5}))
    write_program(directory / "i.pt2", {"w": weight()})
    numbers = StorageId("storage", torch.QInt8Storage, "q", "cpu", 16)
    whole = tensor((2, 2), (2, 1), storage_type=torch.LongStorage, storage="i")
    schemes = (torch.per_tensor_affine, 0.1, 0), (torch.per_channel_affine, [0.1] * 4, [0] * 4, 0)
    others = {
        "s": Call(torch._utils._rebuild_sparse_tensor, "torch.sparse_coo",
                  (whole, tensor((2,), (1,)), (3, 3), True)),
        "n": Call(torch._utils._rebuild_nested_tensor, tensor((4,), (1,)), whole, whole, whole),
        "m": Call(torch._utils._rebuild_meta_tensor_no_storage, torch.float32, (2,), (1,), False),
        "q": [Call(torch._utils._rebuild_qtensor, numbers, 0, (4, 4), (4, 1), scheme, False, {})
              for scheme in schemes],
        "storage": numbers,
    }  # fmt: skip
    storages = {"0": bytes(16), "q": bytes(16), "i": bytes(32)}
    write_zip(directory / "j.pt", others, storages=storages)
    for name in ("h.pt", "i.pt2", "j.pt"):
        _without_checksums(directory / name)
    save_file({"w": base, "v": torch.ones(5)}, directory / "e.safetensors", {"format": "pt"})
    array = msgpack.ExtType(1, msgpack.packb(((2, 2), "float32", values)))
    flax = {"w": {"a": array, "n": [1, None, "x", 2.0]}, "s": array, "k": {"b": b"raw", "i": -9}}
    (directory / "j.msgpack").write_bytes(msgpack.packb(flax))
    return [path.read_bytes() for path in sorted(directory.iterdir())]


def _look(path):
    """Read a file that may be damaged, and everything that can be shown of it."""
    try:
        index = read_index(path)
    except CheckpointError as caught:
        refusal = caught
        index = None
    if index is None:
        assert refusal.file is not None
        assert str(refusal)
        return
    assert_in_bounds(index)
    to_text(index)
    to_html(index)
    to_json(index)
    assert index.aliases is not None


@settings(
    max_examples=300, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_changed_bytes_are_read_or_refused(corpus, tmp_path, data):
    """A few bytes replaced by others, anywhere in the file."""
    content = bytearray(data.draw(st.sampled_from(corpus)))
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(
            st.sampled_from([0, 1, 0x28, 0x52, 0x7F, 0x80, 0xFF, content[at] ^ 1])
        )
    path = tmp_path / "x"
    path.write_bytes(bytes(content))
    _look(path)


@settings(
    max_examples=150, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_cut_and_joined_bytes_are_read_or_refused(corpus, tmp_path, data):
    """A range removed from a file, or moved within it."""
    content = data.draw(st.sampled_from(corpus))
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, len(content)))
    inserted = data.draw(st.sampled_from([b"", content[start:end] * 2, bytes(7)]))
    path = tmp_path / "x"
    path.write_bytes(content[:start] + inserted + content[end:])
    _look(path)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A ZeRO checkpoint, whose files are put back after each change."""
    values = [{"w": torch.randn(3, 5), "b": torch.randn(3)}, {"e": torch.randn(4)}]
    zero = Zero(3, 2, values, {"f": torch.randn(5)}, {"n": torch.ones(2)}, {"t": "w"})
    path = zero.write(tmp_path_factory.mktemp("zero") / "run")
    for file in (path / "global_step3").iterdir():
        _without_checksums(file)
    return path


@settings(
    max_examples=300, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_changed_file_of_a_directory_is_read_or_refused(directory, data):
    """A few bytes of one rank's pickle, which the other ranks' files may not agree with then."""
    file = data.draw(st.sampled_from(sorted((directory / "global_step3").iterdir())))
    before = file.read_bytes()
    content = bytearray(before)
    first, last = content.index(b"data.pkl"), content.index(b".format_version")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(first, last))
        content[at] = data.draw(st.sampled_from([0, 1, 3, 0x28, 0x4B, 0x7F, 0x80, content[at] ^ 1]))
    file.write_bytes(bytes(content))
    try:
        _look(directory)
    finally:
        file.write_bytes(before)


_LIMITED = """
import resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, (300 << 20, 300 << 20))
from torchlift.errors import CheckpointError
from torchlift.formats import read_index
for path in sys.argv[1:]:
    start = time.perf_counter()
    try:
        read_index(path)
    except CheckpointError as error:
        assert not isinstance(error.__cause__, MemoryError), path
    assert time.perf_counter() - start < 3, path
"""


def test_damaged_files_take_neither_memory_nor_time(corpus, tmp_path):
    """In a process with little memory, a few hundred damaged files are read or refused at once."""
    generator = random.Random(0)
    paths = []
    for i in range(300):
        content = bytearray(generator.choice(corpus))
        for _ in range(generator.randint(1, 6)):
            content[generator.randrange(len(content))] = generator.choice([0, 0x7F, 0xFF])
        paths.append(tmp_path / str(i))
        paths[-1].write_bytes(bytes(content))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", _LIMITED, *map(str, paths)], check=True, env=environment)

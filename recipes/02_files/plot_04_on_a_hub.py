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

url = "memory://hub/model.pt"  # it stands for s3://, gs://, hf:// ...
with fsspec.open(url, "wb") as file:
    torch.save(torch.nn.Linear(2048, 2048).state_dict(), file)
print(torchlift.open(url).entries["weight"].dtype, "- from the index alone")

model = torchlift.skeleton(torch.nn.Linear, 2048, 2048)
plan = torchlift.plan(model, url)
print(f"a load takes {plan.bytes_to_read:,} bytes in {plan.requests} requests")

# %%
# The plan counts requests and bytes before any weight moves. ``torchlift.load(model, url)`` is the
# load. For a repository it is ``hf://org/name@revision``; in a terminal, ``torchlift inspect URL``.
#
# What whole files cost
# ---------------------
#
# Here is a hub: a server of this machine with two revisions of a model, which counts what it sends.

# fold: The server, two revisions of a model, and a counter
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
        sent[asking] += len(body)
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


def download(file):
    return load(urllib.request.urlopen(hub + file).read())


asking = "its dtypes", "downloaded"
state = download("v1.safetensors")
print(f"{state['3.weight'].dtype}, after {sent[asking]:,} bytes")

# %%
# By its index the same answer costs the header of the file:

asking = "its dtypes", "torchlift"
ckpt = torchlift.open(hub + "v1.safetensors")
print(f"{ckpt.entries['3.weight'].dtype}, after {sent[asking]:,} bytes")

# %%
# One layer of sixteen, into a module of its own:

asking = "one layer", "torchlift"
layer = torchlift.skeleton(torch.nn.Linear, 512, 512)
report = torchlift.load(layer, hub + "v1.safetensors", root="3")
assert torch.equal(layer.weight, state["3.weight"])
print(f"requests: {report.requests}, bytes: {sent[asking]:,}")

# %%
# And what did the second revision change?

asking = "what changed", "torchlift"
difference = torchlift.diff(hub + "v1.safetensors", hub + "v2.safetensors")
print(list(difference.changed), f"after {sent[asking]:,} bytes")

# %%
# The header alone tells names, dtypes and shapes apart. For values both have to come, one pair of
# tensors at a time: in memory there is never more than that.
#
# Proof
# -----
#
# What the server has sent for each question, with the last two asked by a download as well:

# fold: The same two questions, by a download
asking = "one layer", "downloaded"
assert torch.equal(download("v1.safetensors")["3.weight"], layer.weight)
asking = "what changed", "downloaded"
old, new = download("v1.safetensors"), download("v2.safetensors")
changed = [key for key in old if not torch.equal(old[key], new[key])]
assert changed == list(difference.changed)
server.shutdown()
server.server_close()

# %%

whole = (folder / "v1.safetensors").stat().st_size
for question in "its dtypes", "one layer", "what changed":
    by_download, by_index = (
        sent[question, "downloaded"],
        sent[question, "torchlift"],
    )
    print(f"{question:<13} {by_download:>12,} bytes, or {by_index:>12,}")

assert sent["its dtypes", "downloaded"] == sent["one layer", "downloaded"] == whole
assert sent["its dtypes", "torchlift"] <= 65536
needed = layer.weight.nbytes + layer.bias.nbytes
assert sent["one layer", "torchlift"] <= needed + 2 * 65536

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 3.2))
questions = dict.fromkeys(question for question, _ in sent)
for way, color, shift in ("downloaded", "C0", -0.2), ("torchlift", "C1", 0.2):
    for row, question in enumerate(questions):
        size = sent[question, way] / 2**20
        axes.barh(
            row + shift, size, 0.38, color=color, label=way if not row else None
        )
        axes.text(size, row + shift, f" {size:.2g} MiB", va="center")
axes.set_yticks(range(3), questions)
axes.invert_yaxis()
axes.set(xscale="log", xlim=(0.03, 300), xlabel="MiB that the server sent")
axes.tick_params(axis="y", length=0)
figure.legend(loc="outside upper center", ncols=2)
plt.show()

# %%
# *What a server sends for three questions about a model of 16 MiB with sixteen layers, on a
# logarithmic axis. Its dtypes are in the header, and one layer is its own bytes. To know which
# values changed between two revisions, both have to come, whoever asks.*
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

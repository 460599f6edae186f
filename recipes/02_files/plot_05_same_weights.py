"""
Are these the same weights? One number on any mesh and in any format
====================================================================

Two files, or a file and the model that runs on eight ranks: are the weights in them the same?
Hashes of the files differ although nothing has changed, and you do not want to gather a complete
model for a comparison.

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
# The three digests are equal. A digest covers names, dtypes, shapes and every bit of the values. It
# ignores the format and the prefixes that a wrapper adds to names.
#
# The hash of a file depends on its format
# ----------------------------------------
#
# The usual way is a hash of the file. It answers another question: are the bytes of the *file* the
# same, including its header and the order of its tensors?

import hashlib
from pathlib import Path

for name in ("model.pt", "model.safetensors"):
    content = Path(folder, name).read_bytes()
    print(hashlib.sha256(content).hexdigest()[:16], name)

# %%
# That is right for a download. A hub records such a hash, and `torchlift.verify` compares the files
# in its cache with it. For weights the hash is misleading: it differs although the weights are
# equal.
#
# Detect swapped rows and changes that cancel
# -------------------------------------------
#
# A sum of all values would miss two swapped values, or two changes that cancel. The digest is a
# cryptographic hash (BLAKE2b) of each name, dtype and shape, and of all bytes in their order:

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
# `torchlift.diff` shows which tensor changed and by how much, but it needs both sides. A digest
# needs only one. Write it into the log of a run, and compare a year later.
#
# A training file contains more than a model. The digest of its part ``model`` is the digest of the
# model:

training = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
torchlift.save(training, folder + "/training.pt")
print(torchlift.digest(folder + "/training.pt", root="model") == before)

# %%
# Proof
# -----
#
# On a mesh the digest gathers one tensor at a time, hashes it, and frees it. The other way gathers
# the model on every rank and hashes it there. Both run on two ranks, with 128 MiB in 32 layers:

# fold: How the memory of each rank is measured
from torchlift.distributed import get_model_state_dict, on_ranks


def compare(ways):
    """Return the digest and the memory of each way on this rank."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *[torch.nn.Linear(1024, 1024) for _ in range(32)]
    )
    fully_shard(model)
    found = {}
    for name, way in ways.items():
        with torchlift.measure.memory() as used:
            found[name] = way(model), used
    return {
        name: (value, used.added_anonymous)
        for name, (value, used) in found.items()
    }


def gathered(model):
    """Return a hash of the complete state dict."""
    from torchlift.distributed import StateDictOptions

    options = StateDictOptions(full_state_dict=True)
    total = hashlib.sha256()
    for value in get_model_state_dict(model, options=options).values():
        total.update(value.numpy())
    return total.hexdigest()


ways = {"torchlift.digest": torchlift.digest, "gather, then hash": gathered}
ranks = on_ranks(2, compare, ways)
torch.manual_seed(0)
alone = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(32)])
assert [rank["torchlift.digest"][0] for rank in ranks] == [
    torchlift.digest(alone)
] * 2
peaks = {name: max(rank[name][1] for rank in ranks) / 2**20 for name in ways}
assert 2 * peaks["torchlift.digest"] < peaks["gather, then hash"]
for name, peak in peaks.items():
    print(f"{name:<18} memory of a rank: ~{peak:.0f} MiB")

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 1.9))
bars = axes.barh(list(peaks), list(peaks.values()), color=("C1", "C0"))
axes.bar_label(bars, fmt="%.0f", padding=4)
axes.axvline(128, color="C2", linestyle="--", zorder=0)
axes.text(126, 0, "the complete model", ha="right", va="center")
axes.invert_yaxis()
axes.set(xlabel="MiB that a rank needs beside its shard", xlim=(0, 180))
plt.show()

# %%
# *The bars show the memory that each of two ranks needs to check a model of 128 MiB, in addition to
# its shard. The digest gathers one layer at a time. The hash gathers all of the model, up to the
# dashed line, so it fails for a model that one rank cannot hold.*
#
# Remember
# --------
#
# - A hash of a file covers the file. A digest covers the weights.
# - The digest is the same on a mesh, in one process and in any file.
# - It protects from mistakes, not from somebody who wants to deceive you.
#
# Use this when
# -------------
#
# - **After a conversion, a resharding, a broadcast:** the digest before equals the digest after.
# - **If the digests differ:** `torchlift.diff` lists the tensors that differ.
# - **After a download:** `torchlift.verify` compares the file with the hash of the hub.

# %%
# Question
# --------
#
# You cast the model to float64, and back to float32. Does its digest return?

# fold: Answer to the question
# Yes. The dtype counts, and this cast loses no bit on the way back.
wide = torchlift.digest(model.double())
back = torchlift.digest(model.float())
print("float64:", "another digest" if wide != before else "the same")
print("back in float32:", "the same" if back == before else "another digest")
assert wide != before == back

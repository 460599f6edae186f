"""
torch.load with mmap=True, assign=True and the meta device: what each one saves
===============================================================================

PyTorch has three switches against the second copy of a checkpoint. What does each of them remove,
which of them need each other, and is one of them enough?

Only all three together leave no copy. `torchlift.skeleton` and `torchlift.load` have them built in,
and go on working where the three alone do not.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

path = tempfile.mkdtemp() + "/linear.pt"
torch.save(torch.nn.Linear(4096, 4096).state_dict(), path)
with torch.device("meta"):
    model = torch.nn.Linear(4096, 4096)
model.load_state_dict(torch.load(path, mmap=True), assign=True)

same = torchlift.skeleton(torch.nn.Linear, 4096, 4096)
torchlift.load(same, path)
print(torchlift.diff(model.state_dict(), same.state_dict()))

# %%
# The two models are equal, and neither of them has copied a byte: their weights are views of the
# file.
#
# What each switch removes
# ------------------------
#
# - **meta**, ``with torch.device("meta")``: a model with shapes and no memory. It removes the
#   initialization, and the memory that is initialized.
# - **mmap**, ``torch.load(path, mmap=True)``: a state dict that is a view of the file. It removes
#   the copy that is the state dict, and puts off the reading until a weight is used.
# - **assign**, ``load_state_dict(state, assign=True)``: the tensors of the state dict become the
#   parameters. It removes the copying.
#
# Meta without assign loads nothing
# ---------------------------------
#
# Start with the combination that looks right and is not. A model on meta has no memory to copy to.
# PyTorch warns, once per tensor, and then reports success.

import warnings

with torch.device("meta"):
    model = torch.nn.Linear(4096, 4096)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(model.load_state_dict(torch.load(path)))
print(f"{len(caught)} warnings: {caught[0].message}")

try:
    model.to("cpu")
except NotImplementedError as error:
    print(type(error).__name__, str(error).split("! ")[0], sep=": ")

# %%
# The error comes later, and far from the line that caused it. So meta needs assign; the other two
# work alone.
#
# Proof: one at a time and together
# ---------------------------------
#
# Sixteen linear layers, 256 MiB, loaded by each combination in a new process. Afterwards each one
# uses the model once: this is where a mapped model pays for the reading that it put off. What it
# returns adds up the bits of all weights, to show that every way loads the same.

from torch import nn

from torchlift import load, skeleton
from torchlift.measure import in_child


def build():
    return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(16)])


def use(model):
    model(torch.ones(1, 2048))
    bits = (p.detach().view(torch.int64) for p in model.parameters())
    return sum(numbers.sum().item() for numbers in bits)


def by_torch(path, meta, mmap, assign):
    with torch.device("meta" if meta else "cpu"):
        model = build()
    model.load_state_dict(torch.load(path, mmap=mmap), assign=assign)
    return use(model)


def by_torchlift(path, source):
    model = skeleton(build)
    load(model, path, source=source)
    return use(model)


WAYS = {
    "no switch": (by_torch, False, False, False),
    "assign": (by_torch, False, False, True),
    "mmap": (by_torch, False, True, False),
    "mmap + assign": (by_torch, False, True, True),
    "meta + assign": (by_torch, True, False, True),
    "torchlift, read": (by_torchlift, "read"),
    "all three": (by_torch, True, True, True),
    "torchlift, mapped": (by_torchlift, "mmap"),
}

MIB = 2**20
path = tempfile.mkdtemp() + "/model.pt"
torch.save(build().state_dict(), path)
size = torchlift.open(path).nbytes

copies, sums = {}, set()
for name, (way, *switches) in WAYS.items():
    child = in_child(way, path, *switches)
    peak = child.memory.added_anonymous
    print(f"{name:<18} anonymous peak: {peak / MIB:4.0f} MiB")
    copies[name] = peak / size
    sums.add(child.value)

assert len(sums) == 1, "every way loads the same bits"
assert min(copies["no switch"], copies["assign"]) > 1.9
one = copies["mmap"], copies["mmap + assign"], copies["meta + assign"]
assert all(0.9 < n < 1.25 for n in (*one, copies["torchlift, read"]))
assert max(copies["all three"], copies["torchlift, mapped"]) < 0.1

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 4))
colors = ["C0"] * 5 + ["C2", "C3", "C1"]
owned = [size / MIB * n for n in copies.values()]
bars = axes.barh(list(copies), owned, color=colors)
axes.bar_label(bars, fmt="%.0f", padding=4)
axes.invert_yaxis()
axes.set(xlim=(0, 620), xticks=[0, 256, 512], xlabel="memory owned (MiB)")
plt.show()

# %%
# *The most memory that the process owns at one moment, for each combination of switches. Without
# meta and mmap there are two copies of 256 MiB. Two switches still leave one. All three leave none,
# and so does a skeleton that is mapped.*
#
# Assign alone saves nothing at the peak, because the random weights are freed only when the loaded
# ones are there. Its worth is that meta needs it.
#
# Where the three stop working
# ----------------------------
#
# A chain of linear layers is the best case. After an assign, an optimizer that exists already goes
# on with parameters that nobody uses; tied weights come apart; and a buffer that no file holds is
# left on meta:

with torch.device("meta"):
    model = nn.Sequential(nn.Linear(2048, 2048))
    model.register_buffer("scale", torch.ones(1), persistent=False)
first = {
    key: value for key, value in torch.load(path).items() if key.startswith("0.")
}
print(model.load_state_dict(first, assign=True), "scale is on", model.scale.device)

# %%
# `torchlift.load` looks at the model, too: it keeps the parameters and changes what is in them,
# keeps ties, and makes again what no file holds.
#
# Remember
# --------
#
# - Each switch removes one thing: meta the initialization, mmap the second copy, assign the
#   copying.
# - Meta needs assign: without it the load reports success, and the model stays empty.
# - Two switches leave one copy; it takes all three to leave none.
#
# Use this when
# -------------
#
# - **You have torchlift:** `torchlift.skeleton` and `torchlift.load`, whatever the model has.
# - **You have plain PyTorch, and a model of untied parameters only:** all three switches, and the
#   optimizer after them.
# - **The file may change while you run:** `torchlift.load` with ``source="read"``, or meta and
#   assign without mmap.

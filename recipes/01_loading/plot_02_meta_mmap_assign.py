"""
torch.load with mmap=True, assign=True and the meta device: what each one saves
===============================================================================

PyTorch has three switches against the second copy of a checkpoint. What does each of them remove,
which of them need each other, and is one of them enough?

Only all three together leave no copy. `torchlift.skeleton` and `torchlift.load` have them built in.
They also work for models that the three switches break.
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
# The two models are equal, and neither load copied a byte. Their weights are views of the file.
#
# Copies that each switch removes
# -------------------------------
#
# - **meta**, ``with torch.device("meta")``: a model with shapes and without memory. It removes the
#   initialization and the memory of the random weights.
# - **mmap**, ``torch.load(path, mmap=True)``: a state dict that is a view of the file. It removes
#   the copy in the state dict. Weights are read when they are first used.
# - **assign**, ``load_state_dict(state, assign=True)``: the tensors of the state dict become the
#   parameters. It removes the copying.
#
# Meta without assign loads nothing
# ---------------------------------
#
# Start with a combination that looks right and is wrong. A model on meta has nothing allocated that
# torch could copy to. PyTorch warns once per tensor and then reports success.

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
# The error comes later, far from the line that caused it. So meta needs assign. The other two
# switches work alone.
#
# Proof: one at a time and together
# ---------------------------------
#
# Each combination loads sixteen linear layers (256 MiB) in a new process. Afterwards it uses the
# model and adds up the bits of all weights. A mapped model pays for its reading in that sum. The
# sum also proves that every way loads the same values. By arithmetic, expect 512 MiB without meta
# and mmap, 256 MiB with one of them, and nothing with both.

from torch import nn

from torchlift import load, skeleton


def build():
    return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(16)])


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
    "torchlift": (by_torchlift, "mmap"),
}

# %%

# fold: How each way is measured
from itertools import pairwise
from time import perf_counter

from torchlift.measure import in_child, mark

MIB = 2**20
path = tempfile.mkdtemp() + "/model.pt"
torch.save(build().state_dict(), path)
size = torchlift.open(path).nbytes


def use(model):
    model(torch.ones(1, 2048))
    bits = (p.detach().view(torch.int64) for p in model.parameters())
    return sum(numbers.sum().item() for numbers in bits)


def three_times(way, *switches):
    values, times = set(), [perf_counter()]
    for _ in range(3):
        values.add(way(path, *switches))
        times.append(perf_counter())
        mark("a run has ended")
    taken = [end - start for start, end in pairwise(times)]
    return values, min(taken)


owned, seconds, sums = {}, {}, set()
for name, (way, *switches) in WAYS.items():
    child = in_child(three_times, way, *switches)
    values, seconds[name] = child.value
    sums |= values
    memory = child.memory
    rows = (s for s in memory.timeline if s.seconds < memory.marks[0].seconds)
    owned[name] = max(row.anonymous for row in rows) - memory.baseline.anonymous
    print(
        f"{name:<15} anonymous peak: {owned[name] / MIB:4.0f} MiB, "
        f"{seconds[name]:.3f} s"
    )

copies = {name: peak / size for name, peak in owned.items()}
assert len(sums) == 1, "every way loads the same bits"
assert min(copies["no switch"], copies["assign"]) > 1.9
one = copies["mmap"], copies["mmap + assign"], copies["meta + assign"]
assert all(0.9 < n < 1.25 for n in (*one, copies["torchlift, read"]))
assert max(copies["all three"], copies["torchlift"]) < 0.1

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, (left, right) = plt.subplots(1, 2, sharey=True, figsize=(5.6, 4))
colors = ["C0"] * 5 + ["C2", "C3", "C1"]
peaks = [peak / MIB for peak in owned.values()]
for axes, values in (left, peaks), (right, seconds.values()):
    form = "%.0f" if axes is left else "%.2f"
    bars = axes.barh(list(WAYS), values, color=colors)
    axes.bar_label(bars, fmt=form, padding=3)
    axes.set(xlim=(0, 1.35 * max(values)), xticks=[])
    axes.tick_params(axis="y", length=0)
left.invert_yaxis()
left.set_xlabel("memory owned (MiB)")
right.set_xlabel("load and use (s)")
plt.show()

# %%
# *Left, the bars show the most memory that a process owns while it loads 256 MiB with each
# combination of the three switches. Right, they show the seconds to load and use all weights once,
# the fastest of three runs. Without meta and mmap there are two copies, and two switches still
# leave one. All three switches leave none, and so does torchlift, in a fraction of the time.*
#
# Assign alone saves nothing at the peak. The random weights are freed only after the loaded ones
# exist. You still need assign, because meta needs it.
#
# Models that break the three switches
# ------------------------------------
#
# A chain of linear layers is the best case. An assign replaces the parameters, so an existing
# optimizer updates tensors that the model does not use. Tied weights become separate tensors. A
# buffer that the file does not contain stays on meta:

with torch.device("meta"):
    model = nn.Sequential(nn.Linear(2048, 2048))
    model.register_buffer("scale", torch.ones(1), persistent=False)
first = build()[:1].state_dict()
print(model.load_state_dict(first, assign=True))
print("scale is on", model.scale.device)

# %%
# `torchlift.load` looks at the model too. It keeps the parameter objects and changes their content.
# It keeps ties, and it computes the buffers that the file does not contain.
#
# Remember
# --------
#
# - Each switch removes one thing: meta the initialization, mmap the second copy, assign the
#   copying.
# - Meta needs assign. Without it the load reports success, and the model stays empty.
# - Two switches leave one copy. You need all three to leave none.
#
# Use this when
# -------------
#
# - **You have torchlift:** `torchlift.skeleton` and `torchlift.load`, for any model.
# - **You have plain PyTorch, and a model of untied parameters only:** all three switches. Create
#   the optimizer after them.
# - **The file may change while you run:** `torchlift.load` with ``source="read"``, or meta and
#   assign without mmap.

# %%
# Question
# --------
#
# You write to a tensor of ``torch.load(path, mmap=True)``. Does the file change?

# fold: Answer to the question
# No. The map is private: a page that you write to becomes your own.
small = tempfile.mkdtemp() + "/first.pt"
torch.save(first, small)
before = torchlift.digest(small)
state = torch.load(small, mmap=True)
state["0.weight"].zero_()
print("largest weight in memory:", state["0.weight"].max().item())
assert torchlift.digest(small) == before

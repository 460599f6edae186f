"""
Run a model that is larger than memory
======================================

The model needs more than your machine has, and you only need it to answer now and then. Can it run
with some layers on the GPU or in memory, and the others on disk?

`torchlift.remap.fit` makes a map within your budgets, and `torchlift.load` obeys it. On a CPU the
model then runs as it is; with a GPU, ``accelerate`` runs it by the same map.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift


def build():
    return torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])


path = tempfile.mkdtemp() + "/model.pt"
torch.save(build().state_dict(), path)
model = torchlift.skeleton(build)
device_map = torchlift.remap.fit(model, {"cpu": "13MiB", "disk": None})
print(device_map)
torchlift.load(model, path, device=device_map, source="read")
print(model(torch.ones(1, 1024)).shape)

# %%
# Three layers are read into memory that the process owns. The others stay in the file, mapped: the
# system reads their pages when they are used, and drops them when it needs the room.
#
# With a GPU, ``"cuda:0"`` comes first in the budgets, and after the load
# ``accelerate.dispatch_model(model, devices, main_device=device_map.main)`` has the other layers
# brought to it. Its ``devices`` are the map with ``"cpu"`` for ``"disk"``: what is mapped stays in
# your file then, where accelerate would write another one.
#
# Killed, in the middle of the load
# ---------------------------------
#
# *Killed* is all that Linux tells you without a map, and a GPU has *CUDA out of memory*. Here is a
# model of 128 MiB. Say that 48 MiB of it may be owned. Without a disk in the budgets you are told
# beforehand, with numbers:

from torch import nn

MIB = 2**20
WIDTH = 2048


def build():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)])


torch.manual_seed(0)
torch.save(build().state_dict(), path)
try:
    torchlift.remap.fit(path, {"cpu": "48MiB"})
except torchlift.PlacementError as error:
    print(str(error).replace(path, "model.pt"))

# %%
# What lies where
# ---------------
#
# Add the disk. ``source="read"`` is about the layers that are owned: they are copied out of the
# file at once, and stay when the file is gone. The report has the way of each:

model = torchlift.skeleton(build)
device_map = torchlift.remap.fit(model, {"cpu": "48MiB", "disk": None})
report = torchlift.load(model, path, device=device_map, source="read")
for name, item in report.loaded.items():
    if name.endswith("weight"):
        print(name, device_map.at(name), "by", item.source)

# %%
# What is on disk cannot change on the way, because then it would have to be owned:

try:
    torchlift.load(model, path, device=device_map, dtype=torch.bfloat16)
except torchlift.PlacementError as error:
    print(str(error).replace(path, "model.pt"))

# %%
# So cast the file first, with `torchlift.convert`, and map the result.
#
# Proof
# -----
#
# Does it keep to the budget, and compute the same? Three ways in new processes: plain torch;
# torch's best, all of it mapped; and the map. Each runs the model once.


def plain(path):
    model = build()
    model.load_state_dict(torch.load(path))
    return run(model)


def all_mapped(path):
    with torch.device("meta"):
        model = build()
    model.load_state_dict(torch.load(path, mmap=True), assign=True)
    return run(model)


def by_map(path):
    model = torchlift.skeleton(build)
    budgets = {"cpu": "48MiB", "disk": None}
    device_map = torchlift.remap.fit(model, budgets)
    torchlift.load(model, path, device=device_map, source="read")
    return run(model)


def run(model):
    with torch.inference_mode():
        return model(torch.ones(1, WIDTH))


runs = {}
for way, function in {
    "plain": plain,
    "all mapped": all_mapped,
    "map": by_map,
}.items():
    runs[way] = child = torchlift.measure.in_child(function, path)
    print(f"{way:<11} anonymous peak: {child.memory.added_anonymous / MIB:.1f} MiB")

in_plain, mapped, ours = runs.values()
assert torch.allclose(ours.value, in_plain.value, atol=1e-5)
assert torch.allclose(mapped.value, in_plain.value, atol=1e-5)
assert in_plain.memory.added_anonymous > 1.9 * 128 * MIB
assert ours.memory.added_anonymous < device_map.used["cpu"] + 10 * MIB

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 2.6))
labels = "plain torch", "torch, all mapped", "torchlift, by the map"
for y, child in enumerate(runs.values()):
    peak = child.memory.added_anonymous / MIB
    axes.barh(y, peak, color=("C0", "C3", "C1")[y])
    axes.text(peak + 10, y, f"{peak:.0f}", va="center", backgroundcolor="white")
for level, label in (128, "model"), (48, "budget"):
    axes.axvline(level, zorder=0, color="black", linewidth=1, linestyle=":")
    axes.text(level, -0.55, label, ha="center", va="bottom")
axes.set_yticks(range(3), labels)
axes.set(xlabel="memory owned (MiB)", xlim=(0, 300))
axes.invert_yaxis()
axes.tick_params(axis="y", length=0)
plt.show()

# %%
# *The most memory that the process owns while it loads the model and runs it once. Plain torch
# takes two models. All mapped, it owns nothing, and every layer waits for the disk when its pages
# were dropped. By the map it owns what the budget allows, and leaves the rest in the file.*
#
# Remember
# --------
#
# - What is mapped takes no memory of your own: pages come from the file as they are used.
# - A map decides which layers you own, in memory or on the GPU, and which wait in the file.
# - On a GPU machine the hooks of ``accelerate`` bring each layer to the GPU for its turn, and for
#   every pass anew.
#
# Use this when
# -------------
#
# - **It nearly fits:** `torchlift.remap.fit` with ``"disk": None`` last, and with a GPU
#   ``accelerate.dispatch_model``.
# - **You only have a CPU, and speed is no matter:** `torchlift.load` into a skeleton maps all of
#   it.
# - **It would fit in a smaller dtype:** *Load in bfloat16, and keep the norms in float32*.
# - **You look for a machine:** *Will this model fit on my GPUs?*

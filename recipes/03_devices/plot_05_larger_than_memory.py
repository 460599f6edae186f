"""
Run a model that is larger than memory
======================================

The model needs more than your machine has, and you only need an answer now and then. Can it run
with some layers on the GPU or in memory, and the others on disk?

`torchlift.remap.fit` makes a map within your budgets, and `torchlift.load` obeys it. On a CPU the
model then runs as it is. With a GPU, ``accelerate`` runs it by the same map.
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
# Three layers are read into memory that the process owns. The other layers stay mapped in the file.
# The system reads their pages when they are used, and drops them when it needs the memory.
#
# With a GPU, put ``"cuda:0"`` first in the budgets. After the load,
# ``accelerate.dispatch_model(model, devices, main_device=device_map.main)`` brings the other layers
# to the GPU. Its ``devices`` are the map with ``"cpu"`` in place of ``"disk"``. Then mapped layers
# stay in your file, and accelerate does not write a second one.
#
# Killed in the middle of the load
# --------------------------------
#
# Without a map, Linux prints only *Killed*, and a GPU raises *CUDA out of memory*. Here is a model
# of 128 MiB, and the process may own 72 MiB. Without a disk in the budgets, you get an error with
# numbers before the load:

# fold: A model of eight layers in a file
from torch import nn

MIB = 2**20
WIDTH = 2048


def build():
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(8)])


torch.manual_seed(0)
torch.save(build().state_dict(), path)

# %%

try:
    torchlift.remap.fit(path, {"cpu": "72MiB"})
except torchlift.PlacementError as error:
    print(str(error).replace(path, "model.pt"))

# %%
# Which layers are in memory, which on disk
# -----------------------------------------
#
# Add the disk. ``source="read"`` applies to the layers that the process owns. They are copied out
# of the file at once, and they stay valid if the file is deleted. The report lists the source of
# each layer:

model = torchlift.skeleton(build)
device_map = torchlift.remap.fit(model, {"cpu": "72MiB", "disk": None})
report = torchlift.load(model, path, device=device_map, source="read")
for name, item in report.loaded.items():
    if name.endswith("weight"):
        print(name, device_map.at(name), "by", item.source)

# %%
# A layer on disk cannot be cast, because a cast layer needs memory of its own:

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
# Does it keep to the budget, compute the same, and read less from the disk? Three ways run in new
# processes: plain torch, torch's best with all layers mapped, and the map. Each runs the model
# several times. After each pass its mapped pages are dropped, as Linux does when memory is short.


def plain(path):
    model = build()
    model.load_state_dict(torch.load(path))
    return model


def all_mapped(path):
    with torch.device("meta"):
        model = build()
    model.load_state_dict(torch.load(path, mmap=True), assign=True)
    return model


def by_map(path):
    model = torchlift.skeleton(build)
    torchlift.load(model, path, device=device_map, source="read")
    return model


# %%

# fold: Run each model, drop the pages of its file, and count the bytes
import ctypes
import re
import time
from pathlib import Path

PAGEOUT = 21  # madvise(2): reclaim these pages now


def drop(path):
    """Reclaim all pages of a file that this process maps."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(path):
            start, stop = (
                int(number, 16) for number in line.split()[0].split("-")
            )
            size = ctypes.c_size_t(stop - start)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), size, PAGEOUT)


def read_from_disk():
    return int(
        re.search(r"read_bytes: (\d+)", Path("/proc/self/io").read_text())[1]
    )


def run(way, path):
    """Return the output, and the MiB and seconds of a pass in short memory."""
    with open(path, "rb") as file:
        while file.read(MIB):
            pass  # put the file into the page cache first
    model, passes = way(path), []
    with torch.inference_mode():
        for _ in range(6):
            before, start = read_from_disk(), time.perf_counter()
            output = model(torch.ones(1, WIDTH))
            took = time.perf_counter() - start
            passes.append(((read_from_disk() - before) / MIB, took))
            drop(path)
    return output, *sorted(passes[1:])[2]


ways = {"plain torch": plain, "torch, all mapped": all_mapped}
ways["torchlift, by a map"] = by_map
runs = {way: torchlift.measure.in_child(run, ways[way], path) for way in ways}
owned = {way: child.memory.added_anonymous / MIB for way, child in runs.items()}
answer = runs["plain torch"].value[0]
assert all(torch.allclose(c.value[0], answer, atol=1e-5) for c in runs.values())
assert owned["plain torch"] > 1.9 * 128

# %%

for way, child in runs.items():
    _, again, seconds = child.value
    print(f"{way:<20} anonymous peak: {owned[way]:.1f} MiB,", end=" ")
    print(f"a pass reads ~{again:.0f} MiB, {seconds:.3f} s")
assert owned["torchlift, by a map"] < device_map.used["cpu"] / MIB + 10

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, panels = plt.subplots(1, 2, figsize=(5.6, 2.8), sharey=True)
drawn = {"memory owned (MiB)": list(owned.values())}
drawn["read for each pass (MiB)"] = [child.value[1] for child in runs.values()]
for axes, (label, sizes) in zip(panels, drawn.items(), strict=True):
    axes.barh(
        [way.replace(", ", ",\n") for way in runs],
        sizes,
        color=("C0", "C3", "C1"),
    )
    for y, size in enumerate(sizes):
        axes.text(size + 0.03 * max(sizes), y, f"{size:.0f}", va="center")
    axes.set(xlabel=label, xlim=(0, 1.25 * max(sizes)))
    axes.tick_params(axis="y", length=0)
panels[0].axvline(72, color="black", linewidth=1, linestyle=":", zorder=0)
panels[0].text(72, -0.55, "budget", ha="center", va="bottom")
panels[0].invert_yaxis()
plt.show()

# %%
# *A model of 128 MiB runs in a process that may own 72 MiB. Left, the bars show the memory that the
# process owns. Right, they show the bytes that each pass reads from the disk again when other
# programs need the memory. Plain torch takes two copies. All mapped, the process owns nothing and
# reads everything again. With a map, torchlift fills the budget and reads only the other layers
# from the disk.*
#
# Remember
# --------
#
# - A mapped layer takes no memory of your own. Its pages come from the file when they are used.
# - A map decides which layers you own, in memory or on the GPU, and which stay in the file.
# - On a GPU machine the hooks of ``accelerate`` copy each layer to the GPU in every pass.
#
# Use this when
# -------------
#
# - **It nearly fits:** `torchlift.remap.fit` with ``"disk": None`` last, and with a GPU
#   ``accelerate.dispatch_model``.
# - **You only have a CPU, and speed does not matter:** `torchlift.load` into a skeleton maps all of
#   it.
# - **It would fit in a smaller dtype:** *Load in bfloat16, and keep the norms in float32*.
# - **You look for a machine:** *Will this model fit on my GPUs?*

# %%
# Question
# --------
#
# How many layers stay on the disk if the weights are bfloat16?

# fold: Answer to the question
# None. Half of 128 MiB is 64 MiB, which is within the 72 MiB.
small = torchlift.remap.fit(
    torchlift.skeleton(build), {"cpu": "72MiB"}, dtype=torch.bfloat16
)
print(small)
assert small.used["cpu"] < 72 * MIB

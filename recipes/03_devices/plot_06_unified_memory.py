"""
Unified memory: one copy of a model on DGX Spark and Strix Halo
===============================================================

DGX Spark, Strix Halo and Apple silicon have one memory for the CPU and the GPU. A model of 70 GB
should fit into 128 GB, but the load ends with *out of memory*. What takes the memory twice?

It is the copy that the CPU keeps while the GPU gets its own, and the page cache beside both. Load
straight to the device, with `torchlift.load`: then there is one copy and a fixed 64 MiB.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

path = tempfile.mkdtemp() + "/model.safetensors"
torchlift.save(torch.nn.Linear(4096, 4096), path)
device = torch.accelerator.current_accelerator(check_available=True) or "cpu"

model = torchlift.skeleton(torch.nn.Linear, 4096, 4096)
report = torchlift.load(model, path, device=device, source="read")
print(f"{report.bytes_read:,} bytes read, straight to the device")
print(model(torch.ones(4096, device=device)).shape)

# %%
# ``device=`` makes the weights on the device at once, and ``source="read"`` does not map the file.
# This is the default for a GPU. This page was run without one. Here the memory of the process
# stands for the memory of the GPU, because both are the same memory if it is unified.
#
# Why the usual ways need more
# ----------------------------
#
# Three programs bring the same file of 256 MiB to the device. ``to(device, copy=True)`` does here
# what ``to("cuda")`` does on such a machine: it makes a second copy, while the first one is alive.

from safetensors.torch import load_file
from torch import nn

from torchlift import load, skeleton


def build():
    return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(16)])


def torch_load(path):
    state = torch.load(path)
    return {key: value.to(device, copy=True) for key, value in state.items()}


def safetensors_load(path):
    state = load_file(path)
    return {key: value.to(device, copy=True) for key, value in state.items()}


def torchlift_load(path):
    model = skeleton(build)
    load(model, path, device=device, source="read")
    return model.state_dict()


# %%
# Before you load, ask for the numbers. A plan reads no weights:

MIB = 2**20
folder = tempfile.mkdtemp()
files = {suffix: f"{folder}/model.{suffix}" for suffix in ("pt", "safetensors")}
weights = build().state_dict()
for file in files.values():
    torchlift.save(weights, file)
size = torchlift.open(file).nbytes

plan = torchlift.plan(skeleton(build), file, device=device, source="read")
print(f"weights: {size / MIB:.1f} MiB")
print(
    f"planned peak: {plan.peak_bytes / MIB:.1f} MiB, "
    f"and buffers of at most 64 MiB"
)

# %%
# Proof
# -----
#
# Each program runs in a new process, and the file is dropped from the page cache before, as after a
# boot. Two numbers count on unified memory. One is the peak of what the process owns, the other the
# bytes of the file that are in the page cache at the end.

# fold: Drop a file from the page cache, and count its bytes there
import ctypes
import mmap
import os
import sys

from torchlift.measure import in_child


def forget(file):
    """Drop a file from the page cache, if the system can do that."""
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cached(file):
    """Count the bytes of a file that are in the page cache, with mincore."""
    if sys.platform != "linux":
        return float("nan")
    with open(file, "rb") as opened:
        area = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    flags = (ctypes.c_ubyte * -(-len(area) // mmap.PAGESIZE))()
    start = ctypes.byref(ctypes.c_char.from_buffer(area))
    ctypes.CDLL(None).mincore(start, ctypes.c_size_t(len(area)), flags)
    return mmap.PAGESIZE * sum(flag & 1 for flag in flags)


def run(way, file):
    forget(file)
    before = cached(file)
    weights = way(file)
    return before, cached(file), torchlift.digest(weights)


# %%

# fold: Run the three programs, and check what they need
ways = {
    "torch.load, then to": (torch_load, files["pt"]),
    "safetensors, then to": (safetensors_load, files["safetensors"]),
    "torchlift.load": (torchlift_load, files["safetensors"]),
}
owned, kept, digests = {}, {}, set()
for name, (way, file) in ways.items():
    child = in_child(run, way, file)
    before, after, digest = child.value
    digests.add(digest)
    owned[name], kept[name] = child.memory.added_anonymous / MIB, after / MIB
    print(f"{name:<21} anonymous peak: {owned[name]:.0f} MiB,", end=" ")
    print(f"page cache: ~{kept[name]:.0f} MiB")
assert len(digests) == 1, "all of them have the same weights"
assert owned["torchlift.load"] < plan.peak_bytes / MIB + 64
assert owned["torch.load, then to"] > 1.9 * size / MIB
if before == 0:  # the system could drop the file
    assert kept["torchlift.load"] < 0.1 * size / MIB
    assert kept["safetensors, then to"] > 0.9 * size / MIB

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 2.6))
names = [name.replace(", ", ",\n") for name in ways]
own, cache = list(owned.values()), list(kept.values())
colors = ["C0", "C3", "C2"]
axes.barh(names, own, color=colors, label="owned by the process")
hatched = {"color": "none", "edgecolor": colors, "hatch": "////"}
axes.barh(names, cache, left=own, label="page cache", **hatched)
for y, total in enumerate(map(sum, zip(own, cache, strict=True))):
    axes.text(total + 10, y, f"{total / size * MIB:.1f}x", va="center")
axes.axvline(size / MIB, color="black", linewidth=1, linestyle=":")
axes.set(xlabel="memory (MiB)", xlim=(0, 3.6 * size / MIB))
axes.tick_params(axis="y", length=0)
axes.invert_yaxis()
figure.legend(loc="outside upper right", ncols=2)
plt.show()

# %%
# *The bars show the memory that a load of 256 MiB takes, in copies of the file. The dotted line is
# one copy. Memory that the process owns is gone for all others. The kernel can take the page cache
# back, but some drivers and tools count it as used. A cold file, which is not in the page cache, is
# read past it by torchlift, so that only the weights remain.*
#
# The page cache on DGX Spark
# ---------------------------
#
# A file that you have just downloaded, or that another program has read, is in the page cache
# already. Then torchlift reads it from there, because that is faster. If an allocation on the
# device fails although ``free`` shows memory as *available*, drop the file from the page cache as
# ``forget`` does above. With ``TORCHLIFT_DIRECT_IO=always`` in the environment, no load fills it.
#
# The doubled memory is known for `safetensors
# <https://github.com/safetensors/safetensors/issues/758>`__ and for `ComfyUI
# <https://github.com/Comfy-Org/ComfyUI/issues/10896>`__. A GPU adds the memory of its context. Its
# pinned buffers are a part of the 64 MiB.
#
# Remember
# --------
#
# - On unified memory, a copy on the CPU and its page cache compete with the weights on the GPU.
# - ``device=`` loads to the device at once, so that no copy for the CPU is made.
# - A plan says the peak before anything is read.
#
# Use this when
# -------------
#
# - **The weights go to the GPU:** `torchlift.load` with ``device=``, instead of ``.to("cuda")``
#   after a load.
# - **The CPU runs the model:** `torchlift.load` as it is. It maps the file, and there is no copy at
#   all.
# - **Even one copy does not fit:** *Load in bfloat16, and keep the norms in float32*, or *Run a
#   model that is larger than memory*.

# %%
# Question
# --------
#
# On the same machine the CPU runs the model. How much memory does the load own then?

# fold: Answer to the question
# Almost nothing: the weights are mapped, and the page cache is the only copy.
with torchlift.measure.memory() as use:
    on_cpu = skeleton(build)
    load(on_cpu, files["safetensors"])
print(f"anonymous peak: {use.added_anonymous / MIB:.0f} MiB")
assert use.added_anonymous < 16 * MIB

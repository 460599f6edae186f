"""
Load a DCP checkpoint on another number of GPUs, or on none
===========================================================

An FSDP2 job ran on four GPUs and left a folder of ``.distcp`` files. Today you get two, or you have
a notebook and no process group at all. Who puts the slices together?

`torchlift.load` does: each process reads the bytes of its own slices, from all files that contain
them. The call is the same on four ranks, on two and without ranks.
"""

# %%
# In short
# --------

import tempfile

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

import torchlift

folder, model = tempfile.mkdtemp(), torchlift.skeleton(nn.Linear, 1024, 1024)


def save():
    dcp.save(fully_shard(nn.Linear(1024, 1024)).state_dict(), checkpoint_id=folder)


def load(shard):
    return f"{torchlift.load(shard(model), folder).bytes_read} bytes"


torchlift.distributed.on_ranks(4, save)
print(torchlift.distributed.on_ranks(2, load, fully_shard), load(nn.Identity()))

# %%
# Four ranks save. Two ranks read half of the bytes each, and one process without a group reads all,
# with the same call. `torchlift.distributed.on_ranks` runs a function on processes of this machine.
#
# torch.load cannot read a .distcp file
# -------------------------------------
#
# Each file is a row of small archives. The file ``.metadata`` in the same folder records the
# tensor, the slice and the bytes of each:

import torch

try:
    torch.load(folder + "/__0_0.distcp")
except RuntimeError as error:
    print(f"{type(error).__name__}: {str(error).split('.')[0]}")

with torchlift.open(folder) as ckpt:
    for chunk in ckpt.entries["weight"].chunks:
        print(f"{chunk.file[-12:]}: {chunk.shape} from row {chunk.start[0]}")

# %%
# Load on two ranks with other slices
# -----------------------------------
#
# FSDP2 gave each of four ranks a quarter of the rows. Tensor parallel on two ranks takes halves,
# and it divides the second weight by columns. So each rank needs bytes of all four files.

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import parallel


def slice_up(model, mesh):
    plan = {"0": parallel.ColwiseParallel(), "1": parallel.RowwiseParallel()}
    return parallel.parallelize_module(model, mesh, plan)


def by_dcp(model, folder):
    state = model.to_empty(device="cpu").state_dict()
    dcp.load(state, checkpoint_id=folder)


def by_torchlift(model, folder):
    return torchlift.load(model, folder, source="read")


# %%
# Proof
# -----
#
# Both ways load the same numbers. How many bytes do they read? The checkpoint has two weights of 16
# MiB. For DCP the system counts the bytes, and torchlift reports its own. The times are medians of
# five.

# fold: How the bytes and the seconds are measured
import time
from pathlib import Path

import torch.distributed as dist

WAYS = {"dcp.load": by_dcp, "torchlift": by_torchlift}


def build():
    return nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048))


def save_both(folder):
    dcp.save(fully_shard(build()).state_dict(), checkpoint_id=folder)


def bytes_so_far():
    return int(Path("/proc/self/io").read_text().split()[1])


def once(way, mesh, folder):
    model = slice_up(torchlift.skeleton(build), mesh)
    dist.barrier()
    start, before = time.perf_counter(), bytes_so_far()
    report = way(model, folder)
    seconds, read = time.perf_counter() - start, bytes_so_far() - before
    assert report is None or read < report.bytes_read + 2**20
    shards = {name: one.to_local() for name, one in model.state_dict().items()}
    return (report.bytes_read if report else read) / 2**20, seconds, shards


def compare(folder):
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), []
    for way in WAYS.values():
        runs = [once(way, mesh, folder) for _ in range(6)][1:]
        found.append((runs[0][0], sorted(run[1] for run in runs)[2], runs[0][2]))
    (*_, shards), (*_, other) = found
    assert all(torch.equal(shards[name], other[name]) for name in shards)
    return found


torchlift.distributed.on_ranks(4, save_both, folder := tempfile.mkdtemp())
ranks = torchlift.distributed.on_ranks(2, compare, folder)
for rank, found in enumerate(ranks):
    for name, (mib, seconds, _) in zip(WAYS, found, strict=True):
        print(f"rank {rank}, {name:<9} reads ~{mib:.1f} MiB in {seconds:.3f} s")
    assert found[0][0] > 1.4 * found[1][0]

# %%
# DCP reads a complete stored slice and keeps half of it.

# %%
import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, panels = plt.subplots(1, 3, figsize=(5.6, 2.6), width_ratios=[1, 1, 1.3])
with torchlift.open(folder) as ckpt:
    chunks = ckpt.entries["1.weight"].chunks
files = [(f"file {n}", *c.start, *c.shape) for n, c in enumerate(chunks)]
rows, columns = ranks[0][1][2]["1.weight"].shape
halves = [(f"rank {n}", 0, n * columns, rows, columns) for n in range(2)]
for axes, boxes, color in zip(panels, (files, halves), ("C0", "C1"), strict=False):
    for name, y, x, height, width in boxes:
        axes.bar(x + width / 2, height, width, y, color=color, ec="white", lw=3)
        middle = x + width / 2, y + height / 2
        axes.text(*middle, name, color="white", ha="center", va="center", size=11)
    title = "four ranks\nsave rows" if boxes is files else "two ranks\nload columns"
    axes.set(ylim=(2048, 0), aspect="equal", title=title)
    axes.set_axis_off()
read = [mib for mib, *_ in ranks[0]]
bars = panels[2].bar(["dcp.load", "torchlift"], read, color=["C3", "C1"])
panels[2].bar_label(bars, [f"{mib:.0f}" for mib in read])
panels[2].set(title="a rank reads\n(MiB)", yticks=[], ylim=(0, 30))
panels[2].tick_params(axis="x", labelsize=11, length=0)
plt.show()

# %%
# *Left, the boxes show one weight: four ranks wrote a quarter of its rows each, one file a rank.
# Middle, two ranks need columns, so each takes half of every row, from all four files. Right, the
# bars show the MiB that one of the two ranks reads. With dcp.load it reads complete slices and
# drops half of them, with torchlift only the 16 MiB that it keeps.*
#
# Remember
# --------
#
# - A folder of shards is one checkpoint. Its index records the position of each box of each tensor.
# - The layout of the save does not limit the load. A rank reads only the bytes that it keeps.
# - ``dcp.load`` reads complete stored slices, `torchlift.load` only the bytes that stay.
#
# Use this when
# -------------
#
# - **You load shards on any number of ranks:** shard a `torchlift.skeleton`, then `torchlift.load`.
# - **The folder has a training run:** ``root="model"`` for the weights. For the optimizer see *FSDP
#   optimizer state dict: resume on another number of GPUs*.
# - **Others will read it:** `torchlift.save` on all ranks, or
#   `torchlift.distributed.save_consolidated`. They write one ordinary file, or shards with an
#   index.
# - **Your code calls** ``dcp.load`` **or** ``dcp.save``: pass them a
#   `torchlift.distributed.CheckpointReader` or a `torchlift.distributed.CheckpointWriter`.
# - **You want to know the bytes of FSDP beforehand:** `torchlift.distributed.simulate`.

"""
Load a DCP checkpoint on another number of GPUs, or on none
===========================================================

The job ran on four GPUs and left a folder of ``.distcp`` files. Today you get two, or you have a
notebook and no process group at all. Who puts the slices together?

`torchlift.load` does: each process reads the bytes that it is going to have, from whatever files
they are in. A run on four ranks, on two and on none are the same call.
"""

# %%
# In short
# --------

import tempfile

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

import torchlift


def build():
    return nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))


def save(folder):
    dcp.save(fully_shard(build()).state_dict(), checkpoint_id=folder)


folder = tempfile.mkdtemp()
torchlift.distributed.on_ranks(4, save, folder)  # four ranks, four files
print(torchlift.load(torchlift.skeleton(build), folder))  # one process

# %%
# `torchlift.distributed.on_ranks` runs a function on processes of this machine, over gloo. The
# skeleton has no memory, so the model is in memory once.
#
# One of the files is no checkpoint
# ---------------------------------
#
# ``torch.load`` makes nothing of them. Each is a row of small archives, and which bytes are which
# slice of which tensor stands in ``.metadata``, beside them:

import torch

try:
    torch.load(folder + "/__0_0.distcp")
except RuntimeError as error:
    print(f"{type(error).__name__}: {str(error).split('.')[0]}")

with torchlift.open(folder) as ckpt:
    print(f"{ckpt.format}, {len(ckpt)} tensors, {ckpt.nbytes} bytes")
    for chunk in ckpt.entries["1.weight"].chunks:
        print(f"    {chunk.file[-12:]}: {chunk.shape} from row {chunk.start[0]}")

# %%
# `torchlift.open` needs no process group either. It runs no unpickler: of the pickle in
# ``.metadata`` it understands what describes tensors, and nothing else.
#
# Two ranks, sliced in another way
# --------------------------------
#
# FSDP2 on four ranks gave each a quarter of the rows. Tensor parallel on two ranks takes halves,
# and of the second weight it takes columns: what a rank needs lies in all four files. ``dcp.load``
# reads a file of any format too, with a `torchlift.distributed.CheckpointReader`.

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import parallel

from torchlift.distributed import CheckpointReader, save_consolidated, simulate


def slice_up(model, mesh):
    plan = {"0": parallel.ColwiseParallel(), "1": parallel.RowwiseParallel()}
    return parallel.parallelize_module(model, mesh, plan)


def load(folder, damaged):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = slice_up(torchlift.skeleton(build), mesh)
    report = torchlift.load(model, folder, source="read")
    state = model.state_dict()
    shards = {name: tensor.to_local() for name, tensor in state.items()}
    save_consolidated(state, folder + "/whole.safetensors")

    other = slice_up(build(), mesh).state_dict()
    reader = CheckpointReader(folder + "/whole.safetensors")
    dcp.load(other, storage_reader=reader)
    assert all(torch.equal(other[n].to_local(), shards[n]) for n in shards)

    try:
        torchlift.load(model, damaged if dist.get_rank() == 1 else folder)
    except torchlift.CheckpointError as error:
        found = f"{type(error).__name__}: {error}"
    return report.bytes_read, shards, found


# %%
# `torchlift.distributed.save_consolidated` wrote one ordinary file, each rank its own bytes. The
# last lines play a fault: rank 1 sees a folder from which a file is missing.
#
# Proof
# -----
#
# Do the ranks have the right numbers, and did they read more than that?

import shutil
from pathlib import Path

damaged = shutil.copytree(folder, tempfile.mkdtemp() + "/damaged")
Path(damaged, "__2_0.distcp").unlink()
ranks = torchlift.distributed.on_ranks(2, load, folder, damaged)

model = torchlift.skeleton(build)
torchlift.load(model, folder)  # this process, no process group
whole = model.state_dict()
top, bottom = (shards["0.weight"] for _, shards, _ in ranks)
assert torch.equal(torch.cat([top, bottom]), whole["0.weight"])
left, right = (shards["1.weight"] for _, shards, _ in ranks)
assert torch.equal(torch.cat([left, right], dim=1), whole["1.weight"])
assert torchlift.diff(whole, folder + "/whole.safetensors").equal

read = [nbytes for nbytes, _, _ in ranks]
print("the ranks read", *read, "bytes; the checkpoint has", ckpt.nbytes)
both = ranks[0][2], ranks[1][2]
assert both[0] == both[1]
print(
    "and with a missing file, on both ranks:", both[0].replace(damaged, "damaged")
)

# %%
# The second bias is needed whole on both ranks; all else is read once. And a rank that cannot load
# tells the others before anything has changed: all raise the same error, with the rank and the
# file. You can know the bytes beforehand, without a cluster: `torchlift.distributed.simulate` runs
# your own function on a process group that only pretends.

model = torchlift.skeleton(build)
expected = simulate(folder, "tp=2", model=model, parallelize=slice_up)
print(expected)
assert list(expected.bytes) == read

# %%
import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, panels = plt.subplots(1, 3, figsize=(5.6, 2.9), sharey=True)
drawn = {
    "four ranks\nsave": [("C0", f"file {n}", 0, n / 4, 1, 1 / 4) for n in range(4)],
    "two ranks\nload": [
        ("C1", "rank 0", 0, 0, 0.5, 1),
        ("C2", "rank 1", 0.5, 0, 0.5, 1),
    ],
    "one process\nloads": [("C1", "all", 0, 0, 1, 1)],
}
for axes, (title, boxes) in zip(panels, drawn.items(), strict=True):
    for color, name, x, y, width, height in boxes:
        x, middle = x + width / 2, y + height / 2
        axes.bar(x, height, width, y, color=color, edgecolor="white", linewidth=3)
        axes.text(x, middle, name, color="white", ha="center", va="center")
    axes.set(title=title, xticks=[], ylim=(1, 0), aspect="equal")
panels[0].set(yticks=[0, 1], yticklabels=["row 0", "1024"])
plt.show()

# %%
# *One weight of 1024 rows and columns. Four ranks wrote a quarter of its rows each, one file a
# rank. Two ranks that need columns read half of every row, out of all four files; one process reads
# all of it. Nobody reads a byte that it does not keep.*
#
# Remember
# --------
#
# - A folder of shards is one checkpoint. Its index says which box of which tensor lies where, and
#   that is all that anybody needs to slice it anew.
# - Who saved does not matter for who loads: a rank reads the bytes that it is going to have.
# - If one rank cannot load, no rank does, and all of them say why.
#
# Use this when
# -------------
#
# - **You load shards on any number of ranks, or on one:** shard a `torchlift.skeleton`, then
#   `torchlift.load`.
# - **The folder has a training run:** ``root="model"`` for the weights, and the rest as in *FSDP
#   optimizer state dict: resume on another number of GPUs*.
# - **Others will read it:** `torchlift.save` on all ranks, one ordinary safetensors or torch file,
#   or shards with an index; `torchlift.distributed.save_consolidated` returns each rank's bytes.
# - **Your code calls** ``dcp.load`` **or** ``dcp.save``: a
#   `torchlift.distributed.CheckpointReader` as storage reader, a
#   `torchlift.distributed.CheckpointWriter` as storage writer.
# - **You want to know the bytes before you ask for the machines:**
#   `torchlift.distributed.simulate`.

"""
Save on four, load on two
=========================

The job ran on four GPUs and wrote a checkpoint in four parts. Today you get two, or you want to
look at the weights in a notebook, with no process group at all. Who puts the parts together?

You save a model on four processes, cut in one way, and load it on two, cut in another. Every rank
checks that it has the right numbers, and counts the bytes that it read.
"""

# %%
# The model, and two ways to cut it
# ---------------------------------
#
# Two layers are enough. Their sizes are odd, so that some ranks get less than others. Tensor
# parallel on four ranks cuts the first weight by rows and the second one by columns. FSDP2 on two
# ranks cuts both by rows. So hardly anything stays together.

import shutil
import tempfile
import textwrap
from collections import OrderedDict
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor, parallel

import torchlift
from torchlift.distributed import (
    CheckpointReader,
    on_ranks,
    save_consolidated,
    simulate,
)


def build():
    layers = {
        "up": nn.Linear(6, 10),
        "relu": nn.ReLU(),
        "down": nn.Linear(10, 7),
    }
    return nn.Sequential(OrderedDict(layers))


def trained():
    """The right numbers: the same in every process."""
    torch.manual_seed(0)
    return build()


def tensor_parallel(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
    return parallel.parallelize_module(model, mesh, plan)


# %%
# Four ranks save
# ---------------
#
# In three ways. First each rank saves what it has with `torch.save`, as you might do yourself. Then
# they save together. `torch.distributed.checkpoint`, DCP for short, writes a directory: one file
# per rank, and an index. `torchlift.distributed.save_consolidated` writes one ordinary file, into
# which each rank puts its own bytes: safetensors here, and what `torch.save` would write where the
# name ends in ``.pt``. Neither of the two puts a tensor together in memory.
#
# `torchlift.distributed.on_ranks` is known from the recipe before: it runs a function on several
# processes, and returns what they return, by rank.

scratch = tempfile.TemporaryDirectory(prefix="torchlift-")
folder = Path(scratch.name)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save(folder):
    state = tensor_parallel(trained()).state_dict()
    own = {name: local(tensor) for name, tensor in state.items()}
    torch.save(own, folder / f"own-{dist.get_rank()}.pt")
    dcp.save(state, checkpoint_id=folder / "parts")
    return save_consolidated(state, folder / "whole.safetensors")


wrote = on_ranks(4, save, folder)
own, parts, whole = (
    folder / "own-0.pt",
    folder / "parts",
    folder / "whole.safetensors",
)
print("parts:", sorted(path.name for path in parts.iterdir()))
print("whole:", " + ".join(map(str, wrote)), "=", sum(wrote), "bytes, by rank")

# %%
# Each for itself
# ---------------
#
# The first way ends here. The file of a rank holds pieces, and does not say of what.


def show(error):
    """Print the type and the message of an error, in short lines."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    text = textwrap.shorten(text.replace(f"{folder}/", ""), 300, placeholder=" ...")
    print(textwrap.fill(text, 76, subsequent_indent="  "))


try:
    torchlift.load(build(), own)
except torchlift.MismatchError as error:
    show(error)

# %%
# What lies in the parts
# ----------------------
#
# `torchlift.open` reads the index of the DCP directory. It needs no process group, and it runs no
# unpickler: the index is a pickle, and nothing of it is understood but what describes tensors.

with torchlift.open(parts) as ckpt:
    print(f"{ckpt.format}, {len(ckpt)} tensors, {ckpt.nbytes} bytes")
    entries = dict(ckpt.entries)
print("all that the ranks had:", ckpt.nbytes == sum(wrote))

for key in ("up.weight", "down.weight"):
    print(f"\n{key} {entries[key].shape}")
    for chunk in entries[key].chunks:
        box = f"{chunk.shape!s:<7} from {chunk.start}"
        print(f"    {Path(chunk.file).name}: {chunk.nbytes} bytes, {box}")

# %%
# A *chunk* is a box of a tensor, and the bytes of a file where it lies. The second weight was cut
# by columns, so each of its rows is spread over four files.
#
# Two ranks load
# --------------
#
# A skeleton has shapes and no memory, so each rank can cut the whole model without having it.
# `torchlift.load` then looks at what the rank has of each tensor, finds the boxes that overlap with
# it, and reads these bytes. Nobody sends weights to anybody.
#
# Each rank then compares its shards with its shards of the right numbers. And because things go
# wrong on one rank of many, the second half plays that: rank 1 finds a directory from which a file
# is missing.


def is_right(state):
    """Compare this rank's shards with its part of the right numbers."""
    for name, right in trained().state_dict().items():
        mesh, placements = state[name].device_mesh, state[name].placements
        own = distribute_tensor(right, mesh, placements, src_data_rank=None)
        if not torch.equal(state[name].to_local(), own.to_local()):
            return False
    return True


def load(parts, whole, damaged):
    model = fully_shard(torchlift.skeleton(build))
    report = torchlift.load(model, parts, source="read")
    state = model.state_dict()
    found = {
        "read": report.bytes_read,
        "rows": {name: len(value.to_local()) for name, value in state.items()},
        "right": is_right(state),
    }

    # The other door: DCP's own load, with torchlift as the reader.
    state = fully_shard(build()).state_dict()
    dcp.load(state, storage_reader=CheckpointReader(whole))
    found["right through DCP"] = is_right(state)

    try:
        torchlift.load(model, damaged if dist.get_rank() == 1 else parts)
    except torchlift.CheckpointError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    found["right after the error"] = is_right(model.state_dict())
    return found


damaged = folder / "damaged"
shutil.copytree(parts, damaged)
(damaged / "__2_0.distcp").unlink()
ranks = on_ranks(2, load, parts, whole, damaged)

for rank, found in enumerate(ranks):
    print(f"rank {rank} reads {found['read']} of {ckpt.nbytes} bytes")
    print("    bit-equal:", found["right"])
    print("    bit-equal through DCP:", found["right through DCP"])
print(
    "together, every byte once:",
    sum(found["read"] for found in ranks) == ckpt.nbytes,
)

# %%
# You need no cluster to know this beforehand. `torchlift.distributed.simulate` says what each rank
# of any mesh will read. FSDP it knows. What else you do to a model you show it: it runs your own
# function on a skeleton and on a process group of torch's that only pretends, and reads off the
# DTensors who gets what. Try it with the mesh that you will get next week.

expected = simulate(parts, "fsdp=2")
print(
    "the simulation says the same:",
    [found["read"] for found in ranks] == list(expected.bytes),
)


def both(model, mesh):
    plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
    parallel.parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["fsdp"])


model = torchlift.skeleton(build)
print(simulate(parts, "fsdp=2,tp=2", model=model, parallelize=both))

# %%
# And the rank without the file? It tells the others, before anything has changed anywhere. Both
# raise the same error, which names the rank and the file. Both models are as they were.

show(ranks[0]["error"])
print("the same on both ranks:", ranks[0]["error"] == ranks[1]["error"])
print("still bit-equal:", [found["right after the error"] for found in ranks])

# %%
# One process loads
# -----------------
#
# Now the notebook: no ranks, no process group. It is the same call. A tensor that lies in one piece
# is mapped; one that lies in several is put together.

model = torchlift.skeleton(build)
report = torchlift.load(model, parts)
right = trained().state_dict()
print(
    "bit-equal:",
    all(torch.equal(model.state_dict()[name], right[name]) for name in right),
)
print("with a process group:", dist.is_initialized())

model = torchlift.skeleton(build)
torchlift.load(model, whole)
print(
    "bit-equal:",
    all(torch.equal(model.state_dict()[name], right[name]) for name in right),
)

# %%
# The picture
# -----------
#
# The bytes of each weight, as they lie in a whole file: row by row. A rank's color is that of the
# file it wrote.

GRAY, TEAL, RUST, SAND = "#5b6470", "#2b6f77", "#b83a16", "#d9a441"
plt.rcParams.update({"figure.facecolor": "white", "font.size": 12})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
COLORS = [TEAL, RUST, SAND, GRAY]


def pieces(entry, first, last):
    """(file number, start, length) of what lies in these rows, in bytes."""
    width = entry.nbytes // entry.shape[0]
    for number, chunk in enumerate(entry.chunks):
        # A bias has one dimension: its rows are one number wide.
        (top, left), (height, across) = (
            (*chunk.start, 0)[:2],
            (*chunk.shape, 1)[:2],
        )
        for row in range(max(top, first), min(top + height, last)):
            yield number, row * width + left * 4, across * 4


def rows_of(key, rank):
    """The rows that FSDP2 gives to a rank."""
    counts = [found["rows"][key] for found in ranks]
    return sum(counts[:rank]), sum(counts[: rank + 1])


drawn = [
    sum(
        length
        for key in entries
        for _, _, length in pieces(entries[key], *rows_of(key, rank))
    )
    for rank in range(2)
]
print("the pieces are what was read:", drawn == [found["read"] for found in ranks])

figure, panels = plt.subplots(
    2, 1, figsize=(7.2, 5.2), layout="constrained", sharey=True
)
for axes, key in zip(panels, ("up.weight", "down.weight"), strict=True):
    entry = entries[key]
    for number, start, length in pieces(entry, 0, entry.shape[0]):
        axes.barh(
            [number, 6.6], length, left=start, height=0.8, color=COLORS[number]
        )
    for rank in range(2):
        for number, start, length in pieces(entry, *rows_of(key, rank)):
            axes.barh(
                4.3 + rank, length, left=start, height=0.8, color=COLORS[number]
            )
    axes.set_yticks(
        [0, 1, 2, 3, 4.3, 5.3, 6.6],
        [
            *(f"rank {rank} writes" for rank in range(4)),
            "rank 0 of 2 reads",
            "rank 1 of 2 reads",
            "one process",
        ],
    )
    axes.set(
        ylim=(7.2, -0.6),
        xlim=(0, entry.nbytes),
        xlabel=f"position in {key} (bytes)",
    )
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
plt.show()
scratch.cleanup()

# %%
# *Who wrote which bytes of a weight, and who reads them; each color is one file.* The first weight
# was cut by rows: long pieces, and rank 1 of the old job ends up divided. The second one was cut by
# columns: each reader picks small pieces out of all four files, and gets its rows.
#
# What to remember
# ----------------
#
# - A checkpoint in parts is one checkpoint. Its index says which box of which tensor lies where,
#   and that is all that anybody needs to cut it anew.
# - Who saved does not matter for who loads. Each rank reads the bytes that it is going to own, and
#   together they read every byte once.
# - What each rank saves for itself cannot be put together again by anybody but the same mesh.
# - If one rank cannot load, no rank does, and all of them say why.
#
# What to use when
# ----------------
#
# - **A job saves for itself, to go on later:** ``dcp.save``, with all ranks writing at once; with a
#   `torchlift.distributed.CheckpointWriter` as storage writer the directory appears whole or not at
#   all.
# - **Others will read it:** `torchlift.save`, which on a mesh all ranks call: one ordinary
#   safetensors or torch file, or shards with an index. `torchlift.distributed.save_consolidated` is
#   its name for programs that save plain tensors from all ranks, too.
# - **You load on any number of ranks, or on one:** cut a `torchlift.skeleton`, then
#   `torchlift.load`. It takes the directory and the file alike.
# - **Your code calls** ``dcp.load``: give it a `torchlift.distributed.CheckpointReader` as storage
#   reader, and it reads all the formats that `torchlift.open` does.
# - **You want to know before you ask for the machines:** `torchlift.distributed.simulate`.

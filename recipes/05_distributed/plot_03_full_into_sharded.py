"""
FSDP2: load a full checkpoint without every rank reading all of it
==================================================================

The model is sharded because no rank can have all of it, and the checkpoint is one ordinary file.
With ``torch.load`` every rank reads the whole file; with ``broadcast_from_rank0`` one rank does,
and needs three times its shards.

Shard a skeleton, and `torchlift.load` reads for each rank the bytes of its shards, and no others.
"""

# %%
# In short
# --------

import tempfile

import torch
from torch.distributed.fsdp import fully_shard

import torchlift

path = tempfile.mkdtemp() + "/full.pt"
torch.save(torch.nn.Linear(2048, 2048).state_dict(), path)


def load(path):
    model = fully_shard(torchlift.skeleton(torch.nn.Linear, 2048, 2048))
    return torchlift.load(model, path, source="read")


print(*torchlift.distributed.on_ranks(2, load, path), sep="\n")

# %%
# Each of the two ranks reads 8 of the 16 MiB. `torchlift.distributed.on_ranks` stands for
# ``torchrun`` here: it runs a function on processes of this machine.
#
# Six ways to the shards
# ----------------------
#
# The checkpoint has twelve weights of 16 MiB. Each way gets the same model: on meta, sharded over
# two ranks. The first four are plain PyTorch, and the fourth is the best that it has here.

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as torch_state_dict


def set_full(model, state, **options):
    options = torch_state_dict.StateDictOptions(full_state_dict=True, **options)
    torch_state_dict.set_model_state_dict(model, state, options=options)


def all_ranks_read_all(model, path):
    set_full(model, torch.load(path))


def rank_0_broadcasts(model, path):
    state = torch.load(path) if dist.get_rank() == 0 else {}
    set_full(model, state, broadcast_from_rank0=True)


def rank_0_broadcasts_a_map(model, path):
    state = torch.load(path, mmap=True) if dist.get_rank() == 0 else {}
    set_full(model, state, broadcast_from_rank0=True)


def all_ranks_map_all(model, path):
    set_full(model, torch.load(path, mmap=True))


def torchlift_reads(model, path):
    torchlift.load(model, path, source="read")


def torchlift_maps(model, path):
    torchlift.load(model, path, source="mmap")


# %%
# Proof
# -----
#
# Both ranks load at the same time, each way once, after a tiny file that pays for imports and
# connections. Then each rank adds up its weights, so that what was only mapped is read, too. The
# variable makes glibc give freed memory back, or one way would live on what another one left.

from torchlift import measure

BROADCASTS = rank_0_broadcasts, rank_0_broadcasts_a_map
TORCH = all_ranks_read_all, *BROADCASTS, all_ranks_map_all
WAYS = *TORCH, torchlift_reads, torchlift_maps


def build(layers, width):
    each = (torch.nn.Linear(width, width, bias=False) for _ in range(layers))
    return torch.nn.Sequential(*each)


def numbers(layer, width):
    """A weight in which every number says where it stands."""
    return layer + torch.arange(width**2, dtype=torch.float32).view(-1, width)


def once(way, path, layers, width):
    model = fully_shard(torchlift.skeleton(build, layers, width))
    dist.barrier()
    with measure.memory() as use:
        way(model, path)
        shards = [weight.to_local() for weight in model.parameters()]
        total = sum(shard.sum().item() for shard in shards)
    for layer, shard in enumerate(shards):
        right = numbers(layer, width).chunk(2)[dist.get_rank()]
        assert torch.equal(shard, right)
        assert total > 0
    return use.added_anonymous / 2**20


def compare(large, small):
    for way in WAYS:
        once(way, small, 2, 16)
    return [once(way, large, 12, 2048) for way in WAYS]


folder = tempfile.mkdtemp()
for name, layers, width in (("large", 12, 2048), ("small", 2, 16)):
    weights = {f"{n}.weight": numbers(n, width) for n in range(layers)}
    torch.save(weights, f"{folder}/{name}.pt")
at_once = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
paths = folder + "/large.pt", folder + "/small.pt"
ranks = torchlift.distributed.on_ranks(2, compare, *paths, environment=at_once)

print("the file has 192 MiB, the shards of a rank have 96 MiB")
peaks = {way.__name__: both for way, *both in zip(WAYS, *ranks, strict=True)}
for way, (zero, one) in peaks.items():
    print(f"{way:<24}rank 0: ~{zero:.0f} MiB, rank 1: ~{one:.0f} MiB")

assert min(peaks["all_ranks_read_all"]) > 2.5 * 96
assert peaks["rank_0_broadcasts"][0] > 2.5 * 96
assert max(peaks["all_ranks_map_all"]) < 1.2 * 96
assert max(peaks["torchlift_reads"]) < 1.2 * 96
assert max(peaks["torchlift_maps"]) < 0.1 * 96

# %%
# What is above the shards comes from the way that the bytes took. A rank that reads all has the
# file beside its shards; where rank 0 broadcasts, that is rank 0. ``mmap=True`` cures both. But
# then rank 0 still sends every slice, also where all ranks map the file. With torchlift no weight
# travels, and rows that stand together in the file need not even be read: a mapped shard is a
# place in the file, and its memory is the file's.

# %%
import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 4.2))
colors = {
    "all_ranks_map_all": "C3",
    "torchlift_reads": "C2",
    "torchlift_maps": "C1",
}
for row, (way, both) in enumerate(peaks.items()):
    places = [row - 0.2, row + 0.2]
    axes.barh(places, both, height=0.35, color=colors.get(way, "C0"))
    for rank, (place, peak) in enumerate(zip(places, both, strict=True)):
        text = axes.text(peak + 4, place, f"rank {rank}: {peak:.0f}", va="center")
        text.set(fontsize=11, bbox={"color": "white", "pad": 0})
axes.axvline(96, zorder=0, color="black", linewidth=1, linestyle=":")
axes.text(96, -0.6, "its shards", ha="center", va="bottom", fontsize=11)
axes.set_yticks(range(len(peaks)), [way.replace("_", " ") for way in peaks])
axes.set(ylim=(len(peaks) - 0.5, -0.6), xlim=(0, 420), xticks=[0, 96, 192, 288])
axes.set(xlabel="memory owned (MiB)")
plt.show()

# %%
# *The memory that each of two ranks owns while it loads 192 MiB into shards of 96 MiB. A rank that
# reads the whole file peaks at three times its shards. Where every rank reads its own bytes the
# peak is the shards, and mapped shards take no memory of the rank at all.*
#
# Remember
# --------
#
# - A rank that keeps a slice needs memory for that slice. What is above it is the way's.
# - A state dict that is read has all of the file; a mapped one takes no memory of the rank.
# - If every rank can see the file, nobody has to send anything.
#
# Use this when
# -------------
#
# - **All ranks see the file:** shard a `torchlift.skeleton`, then `torchlift.load`. On a network
#   drive with ``source="read"``.
# - **Only rank 0 has it:** `torchlift.distributed.set_model_state_dict` with ``full_state_dict``
#   and ``broadcast_from_rank0``. Give rank 0 a mapped state dict.
# - **You may not install anything:** ``torch.load(path, mmap=True)`` on each rank, and
#   ``full_state_dict=True`` without the broadcast.

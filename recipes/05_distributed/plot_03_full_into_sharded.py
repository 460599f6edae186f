"""
FSDP2: load a full checkpoint without every rank reading all of it
==================================================================

The model is sharded because it does not fit on one rank, and the checkpoint is one ordinary file.
With ``torch.load`` every rank reads the complete file. With ``broadcast_from_rank0`` only one rank
does, but it needs three times its shards.

Shard a skeleton, and `torchlift.load` reads for each rank only the bytes of its shards.
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
    return torchlift.load(model, path, source="read").bytes_read


read = torchlift.distributed.on_ranks(2, load, path)
print(read, "bytes are read by two ranks")
print(torchlift.open(path).nbytes, "bytes are in the file")

# %%
# `torchlift.distributed.on_ranks` takes the place of ``torchrun`` here. It runs a function on
# processes of this machine.
#
# Six ways to load the shards
# ---------------------------
#
# The checkpoint has twelve weights of 16 MiB. Each way gets the same model: on meta, sharded over
# two ranks. The first four are plain PyTorch, and the fourth is the best of them.

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
# By arithmetic, 12 x 2048 x 2048 numbers with 4 bytes are 192 MiB. The shards of a rank are half of
# that, 96 MiB. A rank that reads the file owns both, 288 MiB. If the file is mapped, a rank owns
# its shards only, and nothing if the shards are mapped, too.
#
# Both ranks load at the same time, each way three times. A tiny file comes first and pays for
# imports and connections. Afterwards each rank adds up its weights, so mapped weights are read too.

# fold: How memory and seconds are measured
import time

from torchlift import measure

BROADCASTS = rank_0_broadcasts, rank_0_broadcasts_a_map
TORCH = all_ranks_read_all, *BROADCASTS, all_ranks_map_all
WAYS = *TORCH, torchlift_reads, torchlift_maps


def build(layers, width):
    each = (torch.nn.Linear(width, width, bias=False) for _ in range(layers))
    return torch.nn.Sequential(*each)


def numbers(layer, width):
    """Make a weight whose numbers encode their position."""
    return layer + torch.arange(width**2, dtype=torch.float32).view(-1, width)


def once(way, path, layers, width):
    model = fully_shard(torchlift.skeleton(build, layers, width))
    dist.barrier()
    start = time.perf_counter()
    with measure.memory() as use:
        way(model, path)
        shards = [weight.to_local() for weight in model.parameters()]
        total = sum(shard.sum().item() for shard in shards)
    seconds = time.perf_counter() - start
    for layer, shard in enumerate(shards):
        right = numbers(layer, width).chunk(2)[dist.get_rank()]
        assert torch.equal(shard, right)
        assert total > 0
    return use.added_anonymous / 2**20, seconds


def compare(large, small):
    for way in WAYS:
        once(way, small, 2, 16)
    runs = [[once(way, large, 12, 2048) for way in WAYS] for _ in range(3)]
    # Keep the memory of the first run and the median of the seconds.
    each = [list(zip(*way, strict=True)) for way in zip(*runs, strict=True)]
    return [(memory[0], sorted(seconds)[1]) for memory, seconds in each]


folder = tempfile.mkdtemp()
for name, layers, width in (("large", 12, 2048), ("small", 2, 16)):
    weights = {f"{n}.weight": numbers(n, width) for n in range(layers)}
    torch.save(weights, f"{folder}/{name}.pt")
# glibc must return freed memory, or a way would reuse that of the one before.
at_once = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
paths = folder + "/large.pt", folder + "/small.pt"
ranks = torchlift.distributed.on_ranks(2, compare, *paths, environment=at_once)

expected = dict(zip(WAYS, (288, 288, 96, 96, 96, 0), strict=True))
peaks, waits = {}, {}
for way, zero, one in zip(WAYS, *ranks, strict=True):
    name = way.__name__.replace("_", " ")
    peaks[name], waits[name] = (
        max(pair) for pair in zip(zero, one, strict=True)
    )
    print(f"{name:<24}expected: {expected[way]:3} MiB", end=", ")
    print(f"anonymous: {peaks[name]:3.0f} MiB, {waits[name]:.2f} s")
    assert abs(peaks[name] - expected[way]) < 40, "two weights and a half"

# %%
# The memory above the shards depends on the path of the bytes. A rank that reads everything holds
# the file in addition to its shards. With a broadcast that is rank 0. ``mmap=True`` avoids this: a
# broadcast then adds only the weight that it sends, 16 MiB. But rank 0 still sends every slice,
# even if all ranks map the file. With torchlift no weight is sent. If the rows of a shard are
# contiguous in the file, torchlift maps them, and the rank owns no memory for them.

# %%
import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, panels = plt.subplots(1, 2, figsize=(5.6, 3), sharey=True)
colors = {
    "all ranks map all": "C3",
    "torchlift reads": "C2",
    "torchlift maps": "C1",
}
drawn = (peaks, "memory owned\n(MiB)", "%.0f"), (waits, "time (s)", "%.2f")
for axes, (numbers, label, digits) in zip(panels, drawn, strict=True):
    each = [colors.get(way, "C0") for way in numbers]
    bars = axes.barh(list(numbers), list(numbers.values()), color=each)
    axes.bar_label(bars, fmt=digits, padding=3, fontsize=11)
    axes.set(xlabel=label, xlim=(0, 1.3 * max(numbers.values())))
panels[0].axvline(96, zorder=0, color="black", linewidth=1, linestyle=":")
panels[0].invert_yaxis()
plt.show()

# %%
# *A file of 192 MiB is loaded into two ranks, and each keeps 96 MiB (the dotted line). Left, the
# bars show the memory of the rank that owns most, right the seconds of the slower rank. If torch
# maps the file on all ranks, it owns only the shards, but rank 0 still sends every slice. With
# torchlift no weight is sent, and mapped shards take no memory of a rank.*
#
# Remember
# --------
#
# - A rank that keeps a slice needs memory for that slice. All memory above that depends on the way
#   of loading.
# - A state dict that was read contains the complete file. A mapped one takes no memory of the rank.
# - If every rank can see the file, no rank has to send anything.
#
# Use this when
# -------------
#
# - **All ranks see the file:** shard a `torchlift.skeleton`, then `torchlift.load`. On a network
#   drive use ``source="read"``.
# - **Only rank 0 has it:** `torchlift.distributed.set_model_state_dict` with ``full_state_dict``
#   and ``broadcast_from_rank0``. Give rank 0 a mapped state dict.
# - **You may not install anything:** ``torch.load(path, mmap=True)`` on each rank, and
#   ``full_state_dict=True`` without the broadcast.

# %%
# Question
# --------
#
# Eight ranks load the same file of 192 MiB. How many bytes do they read together?

# fold: Answer to the question
# Each weight is read once: the bytes of the file, whatever the number of ranks.
eight = torchlift.distributed.simulate(paths[0], 8)
print(f"{sum(eight) / 2**20:.0f} MiB together")
assert sum(eight) == 192 * 2**20

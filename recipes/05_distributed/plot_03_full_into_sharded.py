"""
A full checkpoint into a sharded model
======================================

The model is sharded because no rank can hold all of it. The checkpoint is one ordinary file, all in
one piece. So rank 0 reads the file and sends the parts around, and rank 0 runs out of memory. Does
anybody have to hold it all?

You put 192 MiB into a model on two ranks in six ways, and measure time and memory on each rank.
"""

# %%
# The file and the model
# ----------------------
#
# Twelve weights of 16 MiB each. Every number says where it stands, so that a rank can tell whether
# it got the right ones. FSDP2 gives each of two ranks one half of the rows of every weight.

import tempfile
import textwrap
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.fsdp import fully_shard

import torchlift
from torchlift import measure
from torchlift.distributed import StateDictOptions, on_ranks, set_model_state_dict

MIB = 2**20


def numbers(layer, width, first, last):
    """Some rows of a weight."""
    counted = torch.arange(first * width, last * width, dtype=torch.float32)
    return counted.add_(layer).view(-1, width)


def build(layers, width):
    weights = [nn.Linear(width, width, bias=False) for _ in range(layers)]
    return nn.Sequential(*weights)


def make(path, layers, width):
    torch.save(
        {f"{n}.weight": numbers(n, width, 0, width) for n in range(layers)},
        path,
    )


scratch = tempfile.TemporaryDirectory(prefix="torchlift-")
folder = Path(scratch.name)
large, small = str(folder / "large.pt"), str(folder / "small.pt")
make(large, 12, 2048)
make(small, 2, 16)
with torchlift.open(large) as ckpt:
    whole = ckpt.nbytes
shard = whole // 2
print(f"checkpoint: {whole / MIB:.0f} MiB")
print(f"of it, each of two ranks keeps {shard / MIB:.0f} MiB")

# %%
# Six ways
# --------
#
# Each way gets a model on meta that is already cut. The first three are plain PyTorch:
#
# - **everybody reads all**: each rank loads the whole file, and takes its slices.
# - **rank 0 sends**: ``broadcast_from_rank0``, which is there so that not everybody has to.
# - **everybody maps**: the first way with ``mmap=True``. Only the slices are copied.
#
# The others are torchlift's. Two of them hand over the path, and let each rank read or map its own
# bytes. The last is for a file that only rank 0 can see.


def by_torch(model, state, **options):
    options = torch_state_dict.StateDictOptions(**options)
    torch_state_dict.set_model_state_dict(model, state, options=options)


def everybody_reads_all(model, path):
    by_torch(model, torch.load(path), full_state_dict=True)


def rank_0_sends(model, path):
    state = torch.load(path) if dist.get_rank() == 0 else {}
    by_torch(model, state, full_state_dict=True, broadcast_from_rank0=True)


def everybody_maps(model, path):
    by_torch(model, torch.load(path, mmap=True), full_state_dict=True)


def torchlift_read(model, path):
    return torchlift.load(model, path, source="read")


def torchlift_map(model, path):
    return torchlift.load(model, path, source="mmap")


def torchlift_sends(model, path):
    state = torch.load(path, mmap=True) if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)


WAYS = [
    everybody_reads_all,
    rank_0_sends,
    everybody_maps,
    torchlift_read,
    torchlift_map,
    torchlift_sends,
]

# %%
# The measurement runs on both ranks at once. Each way gets two rounds, after one with a tiny file
# that pays for imports and connections. The faster round counts, and its time is that of the slower
# rank. After the load each rank adds up its weights: what was only mapped is read then.


def once(way, path, layers, width):
    """Load once; return times, memory, and whether the numbers are right."""
    with torch.device("meta"):
        model = build(layers, width)
    fully_shard(model)
    dist.barrier()
    with measure.memory() as use:
        start = time.perf_counter()
        report = way(model, path)
        loaded = time.perf_counter() - start
        locals = [weight.to_local() for weight in model.parameters()]
        total = sum(weight.sum().item() for weight in locals)
        used = time.perf_counter() - start
    rows = width // dist.get_world_size()
    first = rows * dist.get_rank()
    right = all(
        torch.equal(weight, numbers(layer, width, first, first + rows))
        for layer, weight in enumerate(locals)
    )
    return {
        "loaded": loaded,
        "used": used,
        "anonymous": use.added_anonymous,
        "file-backed": use.added_file_backed,
        "read": report.bytes_read if report else None,
        "right": right and total > 0,
    }


def compare(large, small):
    found = {}
    for way in WAYS:
        once(way, small, 2, 16)
        found[way.__name__] = [once(way, large, 12, 2048) for _ in range(2)]
    return found


# %%
# `torchlift.distributed.on_ranks` is known from the recipes before. The variable is for glibc,
# which keeps freed memory for later: one way would live on what another one left. Now blocks from
# 1 MiB on go back to the system at once.

at_once = {"MALLOC_MMAP_THRESHOLD_": str(MIB)}
ranks = on_ranks(2, compare, large, small, environment=at_once)

best = {}
for way in (way.__name__ for way in WAYS):
    rounds = zip(*(rank[way] for rank in ranks), strict=True)
    best[way] = min(rounds, key=lambda both: max(one["loaded"] for one in both))
    loaded = 1000 * max(one["loaded"] for one in best[way])
    used = 1000 * max(one["used"] for one in best[way])
    print(f"{way:<20} loaded: {loaded:6.1f} ms   used: {used:6.1f} ms")
    for rank, one in enumerate(best[way]):
        owned, mapped = one["anonymous"] / MIB, one["file-backed"] / MIB
        print(f"    rank {rank}   anonymous: {owned:5.1f} MiB", end="   ")
        print(f"file-backed: {mapped:5.1f} MiB")

everything = [one for rank in ranks for rounds in rank.values() for one in rounds]
print(
    "\nthe right numbers on each rank, every time:",
    all(one["right"] for one in everything),
)

# %%
# Look at the memory that a rank *owns*. It needs its shards; all that is above is for the way.


def shards(way, rank):
    """The peak of a rank, as a multiple of its shards."""
    return best[way][rank]["anonymous"] / shard


every = range(2)
print(
    "everybody_reads_all, each rank above 2.5x its shards:",
    all(shards("everybody_reads_all", rank) > 2.5 for rank in every),
)
print(
    "rank_0_sends, rank 0 above 2.5x its shards:",
    shards("rank_0_sends", 0) > 2.5,
)
print("rank_0_sends, rank 1 below 2x:", shards("rank_0_sends", 1) < 2)
for way in ("everybody_maps", "torchlift_read"):
    print(
        f"{way}, each rank below 1.2x:",
        all(shards(way, rank) < 1.2 for rank in every),
    )
print(
    "torchlift_map, each rank below 0.1x:",
    all(shards("torchlift_map", r) < 0.1 for r in every),
)

# %%
# - **Everybody reads all** takes the whole file and the shards, on every rank. On a machine with
#   eight ranks that is nine copies of the model.
# - **Rank 0 sends** takes the same on rank 0, and on rank 0 only. It is still too much where you
#   need it: rank 0 has no more memory than the others. And all of them wait for it.
# - **Everybody maps** takes the shards and nothing else. It is plain PyTorch, and the best that it
#   has here.
# - **torchlift_read** takes the shards too, and reads them to where they stay.
# - **torchlift_map** takes nothing at all. Rows that stand together in the model stand together in
#   the file, so a shard *is* a place in the file.
#
# One number is odd. Where everybody maps, rank 1 has nothing mapped. It opened the file and never
# looked into it: without the broadcast, torch still lets rank 0 scatter the slices, one tensor
# after the other. With torchlift, each rank gets its bytes from the file, and no more than these.

mapped = [one["file-backed"] / whole for one in best["everybody_maps"]]
print("everybody_maps, rank 0 maps the file:", mapped[0] > 0.9)
print("everybody_maps, rank 1 maps less than 0.1x:", mapped[1] < 0.1)

for rank in every:
    nbytes = best["torchlift_read"][rank]["read"]
    print(
        f"rank {rank} reads {nbytes / MIB:.1f} MiB, {nbytes / shard:.2f}x its shards"
    )

sending = max(one["loaded"] for one in best["rank_0_sends"])
for way in ("torchlift_read", "torchlift_map"):
    faster = sending / max(one["loaded"] for one in best[way])
    print(f"{way}: loaded {faster:.0f}x faster than when rank 0 sends")
print("torchlift_map, at least 5x faster:", faster > 5)

# %%
# When only rank 0 can see the file
# ---------------------------------
#
# Then somebody has to send. `torchlift.distributed.set_model_state_dict` sends in buckets of a
# fixed size, from the map of the file. The peak is the shards and the buckets, on rank 0 as on the
# others, however large the model is.

most = max(one["anonymous"] for one in best["torchlift_sends"])
print("each rank below its shards and 70 MiB:", most < shard + 70 * MIB)

# %%
# The option does not come alone. What is sent are whole tensors, and each rank cuts its own part:

try:
    options = StateDictOptions(broadcast_from_rank0=True)
    set_model_state_dict(build(2, 16), {}, options=options)
except ValueError as error:
    text = f"{type(error).__name__}: {error}"
    print(textwrap.fill(text, 76, subsequent_indent="  "))

# %%
# The picture
# -----------

GRAY, TEAL, RUST = "#5b6470", "#2b6f77", "#b83a16"
plt.rcParams.update({"figure.facecolor": "white", "font.size": 12})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})

figure, (times, memory) = plt.subplots(
    1,
    2,
    figsize=(7.2, 4.8),
    width_ratios=[1, 1.3],
    sharey=True,
    layout="constrained",
)
for row, way in enumerate(best):
    loaded = 1000 * max(one["loaded"] for one in best[way])
    used = 1000 * max(one["used"] for one in best[way])
    times.barh(row, used, height=0.55, color=TEAL, alpha=0.35)
    times.barh(row, loaded, height=0.55, color=TEAL)
    for rank, color in enumerate((RUST, GRAY)):
        owned = best[way][rank]["anonymous"] / MIB
        label = f"rank {rank}" if row == 0 else None
        memory.barh(
            row - 0.17 + 0.34 * rank,
            owned,
            height=0.3,
            color=color,
            label=label,
        )
for copies, text in ((0.5, "its shards"), (1, "the file")):
    memory.axvline(
        copies * whole / MIB,
        ymax=0.92,
        color=GRAY,
        linewidth=1,
        linestyle=":",
        zorder=0,
    )
    memory.text(
        copies * whole / MIB, -0.75, text, color=GRAY, ha="center", fontsize=10
    )
times.set_yticks(range(len(best)), [way.replace("_", " ") for way in best])
times.set(
    xscale="log",
    xlim=(1, 2000),
    xlabel="time (ms, log scale)",
    ylim=(len(best) - 0.5, -1),
)
times.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
memory.set(xlabel="peak of anonymous memory (MiB)")
memory.set_xticks([n * whole / MIB / 2 for n in range(4)])
memory.legend(loc=(0.42, 0.16), frameon=False)
for axes in (times, memory):
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
plt.show()
scratch.cleanup()

# %%
# *Left: the time until the model is loaded, and in the lighter shade until every weight was used.
# Right: the memory that each rank owned at its peak.* Where rank 0 sends, its bar is three times
# what it keeps. What is mapped has no bar: those bytes are the file's.
#
# What to remember
# ----------------
#
# - A rank that keeps a part needs memory for that part. Whatever is above it comes from the way the
#   bytes took.
# - A broadcast makes one rank hold all of it, and makes the others wait.
# - If every rank can see the file, nobody has to send. Each one reads or maps the bytes that it is
#   going to keep.
# - Rows that are cut from a file are still in one piece there, and can be mapped. Columns are not;
#   they are copied.
#
# What to use when
# ----------------
#
# - **All ranks see the file:** cut the model on meta, then `torchlift.load`.
# - **It lies on a network drive, or every step must be equally fast from the first:** the same with
#   ``source="read"``.
# - **Only rank 0 has it:** `torchlift.distributed.set_model_state_dict` with ``full_state_dict``
#   and ``broadcast_from_rank0``.
# - **You may not install anything:** ``torch.load(path, mmap=True)`` on each rank, and
#   ``full_state_dict=True`` without the broadcast.

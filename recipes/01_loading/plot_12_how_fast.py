"""
How fast can a checkpoint load? Loaders against the limits of the machine
=========================================================================

torch.load takes seconds, and you do not know whether that is slow. How fast could your machine be,
which way of loading comes close, and where does the other time go?

The limit is one copy of the bytes. `torchlift.bench.compare` measures every way to load a file.
This page also measures the limits of a machine.
"""

# %%
# In short
# --------

import tempfile

import torch

from torchlift.bench import compare

path = tempfile.mkdtemp() + "/model.pt"
names = [f"layers.{number}.weight" for number in range(64)]
torch.save({name: torch.randn(512, 512) for name in names}, path)
ways = ["torch-load", "torchlift-read", "torchlift-mmap"]
comparison = compare(path, only=ways, repeat=1)
for result in comparison.results.values():
    print(f"{result.way.summary:<30} {result.median:.4f} s")

# %%
# Each line is a run in its own process, without the time of imports. On the command line, run
# ``torchlift bench model.pt`` on your own file.
#
# Costs that no loader can avoid
# ------------------------------
#
# A loader that brings weights into memory pays for four things. You can measure the speed of each
# without a loader.
#
# **The copy.** The bytes of a recently read file are in the page cache, which is memory. To own
# them you copy them. No read is faster than a copy from memory to memory.
#
# **New memory.** Allocated memory does not exist until you touch it. At the first touch of each
# page of 4 KiB the processor stops, and the kernel finds a page and fills it with zeros. That is a
# page fault. One fault per page often costs more than the copy itself.

import mmap
import resource
import time

MIB = 2**20
SIZE = 64 * MIB


def count_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def touch_each_page(area):
    start, before = time.perf_counter(), count_faults()
    for at in range(0, SIZE, mmap.PAGESIZE):
        area[at] = 1
    return count_faults() - before, time.perf_counter() - start


area = mmap.mmap(-1, SIZE, mmap.MAP_PRIVATE)
if hasattr(mmap, "MADV_NOHUGEPAGE"):
    area.madvise(mmap.MADV_NOHUGEPAGE)
for turn in "first", "second":
    faults, seconds = touch_each_page(area)
    print(f"{turn} touch of 64 MiB: ~{faults:,} page faults in {seconds:.4f} s")
    if turn == "first":
        assert faults >= SIZE / mmap.PAGESIZE
assert faults < 100, "the second touch finds all pages"

# %%
# With huge pages of 2 MiB, 16,384 faults become 32. torchlift requests them and times each one. If
# the machine is slow to provide them, torchlift stops using them.
#
# **The disk.** Bytes that are not in the page cache come from the disk. A disk answers many
# requests at once faster than one after the other. Drop the file from the cache, and read it:

cold = compare(path, only=["torchlift-read"], repeat=1, cold=True)
(read,) = cold.results.values()
print(f"read from the disk: {read.median:.4f} s")
print(f"in the page cache as the clock began: ~{read.cached[0] / MIB:.0f} MiB")

# %%
# **The bus.** Bytes reach a GPU over a bus. It is fastest from *pinned* memory, which the kernel
# may not move. ``torchlift bench FILE --device cuda`` measures every way to a GPU. This page was
# made without one.
#
# Proof: each way against the limits
# ----------------------------------
#
# Now the loaders run in turns, next to two limits: a copy in memory, and a reader that does nothing
# but read. You can add your own way as a function. It prepares its work outside the timed part and
# returns the call that is timed:

# fold: How the limits are measured
import os
from concurrent.futures import ThreadPoolExecutor

from torchlift.bench import WAYS, Way

BLOCK = 8 * MIB


def make_copy(job):
    source = torch.ones(job.nbytes, dtype=torch.uint8)
    target = torch.ones_like(source)

    def copy():
        target.copy_(source)

    return copy


def make_reader(job):
    file, kept = os.open(path, os.O_RDONLY), []

    def read():
        area = mmap.mmap(-1, os.path.getsize(path), mmap.MAP_PRIVATE)
        starts = range(0, len(area), BLOCK)
        parts = [[memoryview(area)[start : start + BLOCK]] for start in starts]
        with ThreadPoolExecutor(8) as pool:
            kept.extend(pool.map(os.preadv, [file] * len(parts), parts, starts))

    return read


# %%
limits = Way("read", "reading", make_reader), Way("copy", "a copy", make_copy)
ways = ["torch-build", "torch-load", "torch-mmap-clone", "torchlift-read"]
comparison = compare(
    path, only=[*ways, "read", "copy"], ways=[*WAYS, *limits], repeat=2
)
for result in comparison.results.values():
    lowest, highest = min(result.seconds), max(result.seconds)
    times = f"{result.median:.4f} s ({lowest:.4f} s to {highest:.4f} s)"
    print(f"{result.way.summary:<38} {times}")

copies = {
    name: max(comparison.results[name].added_anonymous) / SIZE for name in ways
}
assert comparison.different == [], "every way has loaded the same values"
assert 1.9 < copies["torch-build"] < 2.2
assert all(0.9 < copies[name] < 1.4 for name in ways[1:])

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots()
for name, color in zip(ways, ("C0", "C3", "C0", "C2"), strict=True):
    result = comparison.results[name]
    low, high = min(result.seconds), max(result.seconds)
    spread = [[result.median - low], [high - result.median]]
    label = result.way.summary.replace(" + ", " +\n", 1)
    axes.barh(label, result.median, xerr=spread, color=color, capsize=3)
for name, look in ("read", "--"), ("copy", ":"):
    result = comparison.results[name]
    label = {"read": "reading alone", "copy": "a copy in memory"}[name]
    axes.axvline(result.median, color="black", linestyle=look, label=label)
axes.invert_yaxis()
axes.tick_params(axis="y", labelsize=10, length=0)
axes.set(xlim=(0, None), xlabel="time to load 64 MiB (s)")
figure.legend(loc="outside upper right", ncols=2)
plt.show()

# %%
# *The bars show the seconds to load a file of 64 MiB from the page cache: the median, with the
# lowest and highest run. The dotted line is a copy of the same size in memory, and the dashed line
# is a program that only reads the file. Building a model and overwriting it costs several times as
# much as torch.load or torchlift, and copying out of a map is slower too. Those two stay within a
# few times of reading alone, so there is little left to gain.*
#
# In a file this small, much of each bar is overhead and not bytes. The guide has the same chart of
# two gigabytes, warm and cold, next to other libraries: *Performance*.
#
# Remember
# --------
#
# - The floor is a copy, the page faults of new memory, and on a cold file the disk.
# - Building a model and copying over it costs more than all reading. Remove that first.
# - Compare medians of fresh processes, in one state of the page cache, next to a limit. A number
#   alone means nothing.
#
# Use this when
# -------------
#
# - **You wonder whether loading could be faster:** `torchlift.bench.compare` on your file, or
#   ``torchlift bench``.
# - **You do not need the bytes at once:** *Mapped or read? What mmap=True puts off, and what it
#   saves*.
# - **Building the model takes most of the time:** `torchlift.skeleton`.

# %%
# Question
# --------
#
# Your checkpoint has 7 GB and is in the page cache. How long does it take at least on this machine?

# fold: Answer to the question
# Its bytes, divided by the bytes per second of a copy.
copied = comparison.results["copy"].median
speed = SIZE / copied
print(f"a copy runs at {speed / 1e9:.1f} GB/s")
print(f"7 GB take at least {7e9 / speed:.1f} s")
assert copied < comparison.results["torch-build"].median

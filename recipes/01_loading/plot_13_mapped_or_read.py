"""
Mapped or read? What mmap=True puts off, and what it saves
==========================================================

A mapped checkpoint of any size is loaded in milliseconds, and sometimes the first batch is slow. Is
mapping faster, or does it only postpone the reading?

Both: it saves the copy, and it postpones the disk to the first touch of each page. `torchlift.load`
can do either, with ``source="mmap"`` or ``source="read"``.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

path = tempfile.mkdtemp() + "/linear.pt"
torch.save(torch.nn.Linear(4096, 4096).state_dict(), path)
for source in "mmap", "read":
    model = torchlift.skeleton(torch.nn.Linear, 4096, 4096)
    report = torchlift.load(model, path, source=source)
    print(f"{source}: {report.bytes_read:,} bytes were read")

# %%
# Both models compute the same. One has its weights in memory. The other one has addresses that lead
# to the file.
#
# Measure the first touch
# -----------------------
#
# Load a model of 64 MiB, use all of its weights, and use them again. Each step is timed, and its
# page faults are counted. The first touch of a mapped page stops the processor until the kernel has
# put the page into your address space.

from torch import nn

from torchlift import load, skeleton


def build():
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(16)])


def use_all(model):
    return sum(p.detach().sum().item() for p in model.parameters())


def load_and_use(path, source, cold):
    model = skeleton(build)
    if cold:
        forget(path)
    _, *loading = timed(load, model, path, source=source)
    value, *first = timed(use_all, model)
    again, *second = timed(use_all, model)
    assert value == again
    return value, loading, first, second


# %%

# fold: How time and page faults are counted, and how a file is made cold
import os
import resource
import time

from torchlift.measure import in_child

MIB = 2**20


def timed(function, *arguments, **options):
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    start = time.perf_counter()
    value = function(*arguments, **options)
    seconds = time.perf_counter() - start
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return value, seconds, faults


def forget(path):
    """Drop a file from the page cache, if the system can do that."""
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


# %%

path = tempfile.mkdtemp() + "/model.pt"
torch.save(build().state_dict(), path)
for source in "mmap", "read":
    _, _, first, second = in_child(load_and_use, path, source, False).value
    print(
        f"{source}: first use ~{first[1]:,} page faults, second ~{second[1]:,}"
    )

# %%
# That is less than one fault for each page of 4 KiB. If a file is in the page cache, the kernel
# also maps neighbouring pages. A model that was read is already in memory.
#
# Proof: warm and cold
# --------------------
#
# The same runs in new processes with two files. A *warm* file is in the page cache. A *cold* file
# was just dropped from it, as after a boot. Use this table to decide:
#
# - You use every weight: add the first two columns.
# - You use few weights: look at the first column alone.
# - Memory is short, or several processes load one file: look at *anonymous*. Reading past the page
#   cache needs up to 48 MiB more, for any file size.

# fold: How the four are measured
size = torchlift.open(path).nbytes
table, sums = {}, set()
for cold in False, True:
    for source, way in ("mmap", "mapped"), ("read", "read"):
        child = in_child(load_and_use, path, source, cold)
        value, *phases = child.value
        sums.add(value)
        name = f"{way}, {'cold' if cold else 'warm'}"
        seconds = table[name] = [took for took, _ in phases]
        owned = child.memory.added_anonymous
        print(
            f"{name:<12}  load {seconds[0]:.4f} s  first {seconds[1]:.4f} s  "
            f"second {seconds[2]:.4f} s  anonymous: {owned / MIB:3.0f} MiB"
        )
        copy = 0 if source == "mmap" else size
        assert 0.9 * copy < owned < copy + 64 * MIB
assert len(sums) == 1, "all of them have loaded the same weights"

source = torch.ones(size // 4)
target = torch.ones_like(source)
copied = min(timed(target.copy_, source)[1] for _ in range(5))
print(f"a copy at {size / copied / 1e9:.1f} GB/s: {copied:.4f} s for the file")
ratio = table["read, warm"][0] / copied
print(f"reading the warm file takes ~{ratio:.1f} times as long")
assert ratio > 0.8

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 3))
looks = {"load": 1.0, "first use": 0.65, "second use": 0.3}
for name, seconds in table.items():
    color, left = ("C1" if name.startswith("mapped") else "C2"), 0.0
    for took, alpha in zip(seconds, looks.values(), strict=True):
        axes.barh(name, took, left=left, color=color, alpha=alpha, ec="white")
        left += took
axes.invert_yaxis()
axes.tick_params(axis="y", length=0)
axes.set(xlabel="time (s)")
boxes = [
    plt.Rectangle((0, 0), 1, 1, color="C0", alpha=a) for a in looks.values()
]
figure.legend(boxes, list(looks), loc="outside upper right", ncols=3)
plt.show()

# %%
# *The bars show the seconds to load a model of 64 MiB, to use all of it, and to use it again,
# mapped and read. A warm file is already in memory because it was read recently. A cold file comes
# from the disk. Mapping a warm file copies nothing, so it is the fastest. With a cold file somebody
# waits for the disk: at the first use if it is mapped, in the load if it is read.*
#
# The disk decides whether the two waits are equally long. A map requests the file page by page. A
# read requests large parts at once, on several threads.
#
# Memory, file and network: the other differences
# -----------------------------------------------
#
# - **Memory.** Mapped pages belong to the file. The kernel may drop them and read them again, and
#   ten processes share them. Read pages are yours. A mapped page that you write to becomes yours
#   too, so a model that trains ends up as one copy either way.
# - **The file.** Do not write into a mapped file. Replace it: rename another file over it.
#   `torchlift.save` does that.
# - **The network.** On NFS, Lustre or FUSE each fault is a round trip. There `torchlift.load` reads
#   by default. It also reads by default if bytes have to be cast or sent to a device.
#
# Remember
# --------
#
# - Mapping saves the copy. On a warm file it is the fastest way, including the first use.
# - On a cold file mapping postpones the reading to the first touch, and it reads only the pages
#   that you touch.
# - Mapped memory belongs to the file and is shared. Memory that was read belongs to the process.
#
# Use this when
# -------------
#
# - **You start often, look into a file, use a part of it, or share it:** `torchlift.load` as it is,
#   or with ``source="mmap"``.
# - **You train, or the first answer must come fast, or the file may be replaced:** `torchlift.load`
#   with ``source="read"``.
# - **You want to know what a load would do:** `torchlift.plan` has the bytes and the peak.
# - **You want to know what your machine could do:** *How fast can a checkpoint load? Loaders
#   against the limits of the machine*

# %%
# Question
# --------
#
# You need no model, only the tensors: ``for key in ckpt: state[key] = ckpt[key].to(...)``. How much
# memory does that loop own?


# fold: Answer to the question
# To the same device and dtype: nothing, because to() returns the mapped view.
# To another one: what you keep. bfloat16 is half of the file.
def cast_all(dtype):
    with torchlift.open(path) as ckpt:
        state = {}
        for key in ckpt:
            state[key] = ckpt[key].to(dtype)


owned = {}
for dtype in torch.float32, torch.bfloat16:
    child = in_child(cast_all, dtype)
    owned[dtype] = child.memory.added_anonymous / MIB
    print(f"{dtype}, anonymous peak: {owned[dtype]:.0f} MiB")
assert owned[torch.float32] < 4 < owned[torch.bfloat16] < 48

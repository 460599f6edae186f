"""
Mapped or read? What mmap=True puts off, and what it saves
==========================================================

A mapped checkpoint of any size is loaded in milliseconds, and sometimes the first batch is slow. Is
mapping faster, or does it only put the reading off?

Both: it saves the copy, and leaves the disk to the first touch of each page. `torchlift.load` does
either, with ``source="mmap"`` or ``source="read"``.
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
# Both models compute the same. One of them has its weights in memory; the other one knows where in
# the file they are.
#
# The first touch
# ---------------
#
# Load a model of 64 MiB, use all of its weights, and use them again. Each of these in turn is
# timed, with the page faults that it takes: a mapped page that you touch for the first time stops
# the processor, until the kernel has put it into your address space.

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

# fold: How time and page faults are counted, and a file made cold
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
    """Drop a file from the page cache, where the system can do that."""
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
    print(f"{source}: first use ~{first[1]:,} page faults, second ~{second[1]:,}")

# %%
# That is less than one fault for each page of 4 KiB: of a file that is in the page cache, the
# kernel maps the neighbours along. What was read is there, and has only to be used.
#
# Proof: warm and cold
# --------------------
#
# The same in new processes, of a file that is in the page cache (*warm*), and of one that was just
# dropped from it (*cold*), as after a boot. This is the table to decide by. Add the first two
# columns for a model of which every weight is used; look at the first alone for one of which you
# need little; look at *anonymous* where memory is short, or several processes load one file. What
# is read past the page cache goes through up to 48 MiB more, whatever the size of the file.

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
boxes = [plt.Rectangle((0, 0), 1, 1, color="C0", alpha=a) for a in looks.values()]
figure.legend(boxes, list(looks), loc="outside upper right", ncols=3)
plt.show()

# %%
# *Seconds to load a model of 64 MiB, to use all of it once, and once more, mapped and read. Warm is
# a file that is in memory already, because it was read lately: mapped, nothing of it is copied.
# Cold is a file that has to come from the disk: mapped, the load is short and the first use waits;
# read, the load waits and the first use does not.*
#
# Whether the two waits are equally long, the disk decides: a map asks for the file page by page, a
# read for much of it at once, on several threads.
#
# What the time does not show
# ---------------------------
#
# - **Memory.** Mapped pages are the file's: the kernel may drop them and read them again, and ten
#   processes have them once. Read pages are yours. A mapped page that you write to becomes yours
#   too, so a model that trains ends up as one copy either way.
# - **The file.** A mapped file has to stay as it is. Replace it by renaming another over it, never
#   by writing into it: `torchlift.save` does that.
# - **The network.** On NFS, Lustre or FUSE each fault is a round trip. There `torchlift.load` reads
#   unless you say otherwise, as it does where bytes have to be cast or sent to a device.
#
# Remember
# --------
#
# - Mapping saves the copy: of a warm file it is the fastest there is, the first use included.
# - On a cold file mapping puts the reading off, to the first touch, and reads only what you touch.
# - Mapped memory belongs to the file and is shared; memory that was read belongs to the process.
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

"""
Killed while loading: why a checkpoint takes its memory twice
=============================================================

Your checkpoint has 7 GB, the machine has 12 GB free, and the process is killed while it loads: out
of memory. Where does the memory go?

Into two copies, one in the model and one in the state dict. A `torchlift.skeleton` and
`torchlift.load` take one copy, or none: the weights stay in the file until you write to them.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

path = tempfile.mkdtemp() + "/linear.pt"
torch.save(torch.nn.Linear(4096, 4096).state_dict(), path)

model = torchlift.skeleton(torch.nn.Linear, 4096, 4096)
print(torchlift.load(model, path))

# %%
# The skeleton has shapes and no memory. The load gave each parameter its place in the file, mapped
# into the address space of your process: ready to use, and not a byte was copied.
#
# Killed between two lines
# ------------------------
#
# Take a model of 256 MiB and load it the usual way. To play the machine that is too small, the
# process may take one and a half copies and not a byte more; Linux can enforce that.

import sys
from pathlib import Path

from torch import nn

from torchlift import load, skeleton
from torchlift.measure import ChildError, in_child, mark

MIB = 2**20


def build():
    return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(16)])


def usual(path):
    model = build()
    mark("the model is built")
    state = torch.load(path)
    mark("the state dict is there")
    model.load_state_dict(state)
    mark("copied into the model")
    del state
    mark("the state dict is freed")


def torchlift_mapped(path):
    model = skeleton(build)
    load(model, path)
    mark("loaded")
    model(torch.ones(1, 2048))
    mark("used for the first time")
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    mark("one layer of 16 written to")


def in_a_small_machine(way, path, room):
    if sys.platform == "linux":
        import resource

        status = Path("/proc/self/status").read_text()
        room += 1024 * int(status.split("VmData:")[1].split()[0])
        resource.setrlimit(resource.RLIMIT_DATA, (room, room))
    way(path)
    return "loaded and used"


path = str(Path(path).with_name("model.pt"))
torch.save(build().state_dict(), path)
size = torchlift.open(path).nbytes

for way in usual, torchlift_mapped:
    try:
        ended = in_child(in_a_small_machine, way, path, size * 3 // 2).value
    except ChildError as error:
        ended = str(error).splitlines()[-1].replace(". ", "\n  ")
    print(f"{way.__name__}: {ended}")

# %%
# The usual way dies in ``torch.load``, with a whole model in memory that is of no use yet: random
# numbers, made to be overwritten. The skeleton loads and runs under the same limit.
#
# What torch.load does to the memory
# ----------------------------------
#
# Building takes one copy of the memory, for random numbers. `torch.load` takes a second one, and
# fills it from the file. ``load_state_dict`` copies the second over the first. Then you free the
# second. Every weight is written three times, and two of the three are for nothing.
#
# Proof
# -----
#
# Four ways, each in a new process without a limit: the two from above, ``read`` for weights that
# you own instead of map, and the best that torch does by itself, which is the next recipe.
#
# Look at *anonymous* memory: RAM that the process owns, and that nobody can take back. Pages of a
# file that it only maps are *file-backed*; the kernel drops them when it needs room.


def torchlift_read(path):
    model = skeleton(build)
    load(model, path, source="read")
    mark("loaded")


def torch_at_its_best(path):
    with torch.device("meta"):
        model = build()
    model.load_state_dict(torch.load(path, mmap=True), assign=True)
    mark("loaded")


uses = {}
for way in usual, torch_at_its_best, torchlift_read, torchlift_mapped:
    use = uses[way] = in_child(way, path).memory
    print(
        f"{way.__name__:<26} anonymous peak: {use.added_anonymous / MIB:4.0f} MiB"
    )
    for moment in use.marks:
        added = (moment.anonymous - use.baseline.anonymous) / MIB
        print(f"  {moment.label:<26} anonymous {added:4.0f} MiB")

copies = {way: use.added_anonymous / size for way, use in uses.items()}
assert 1.9 < copies[usual] < 2.2
assert 0.9 < copies[torchlift_read] < 1.25
assert copies[torch_at_its_best] < 0.1
assert copies[torchlift_mapped] < 0.15, (
    "the layer that was written to, and nothing else"
)

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots()
end = 1.05 * uses[usual].seconds
for (way, use), look in zip(
    uses.items(), ("C0-", "C3-.", "C2--", "C1-"), strict=True
):
    # Up to its last mark, and from there, with what it keeps, to the edge of the picture.
    shown = [s for s in use.timeline if s.seconds <= use.marks[-1].seconds]
    seconds = [*(sample.seconds for sample in shown), end]
    owned = [
        (s.anonymous - use.baseline.anonymous) / MIB for s in [*shown, shown[-1]]
    ]
    axes.plot(seconds, owned, look, label=way.__name__.replace("_", " "))
axes.set(xlim=(0, end), xlabel="time of one run (s)")
axes.set(ylim=(-20, 800), yticks=[0, 256, 512], ylabel="memory owned (MiB)")
axes.legend(loc="upper left", ncols=2, fontsize=11)
plt.show()

# %%
# *Memory that the process owns, over time. The usual way climbs to two copies of 256 MiB and falls
# back to one. The skeleton that is read climbs to one copy and stays there. The skeleton that is
# mapped, and torch at its best, stay at the bottom; the small step is the layer that was written
# to.*
#
# The reading has not vanished: it happens at the first use, page by page. And pages that you write
# to become yours, so a model that you train ends up as one copy. Until then the bytes are the
# file's. Replace such a file by renaming a new one over it; never overwrite it in place.
#
# Remember
# --------
#
# - The usual way takes two copies: a model full of random numbers, *and* a state dict to overwrite
#   them with. The peak decides whether your process survives.
# - Look at anonymous memory. One number for all memory mixes what you own with what you only map.
# - Mapped weights are read at the first use, and become yours where you write to them.
#
# Use this when
# -------------
#
# - **You load weights to run them or to train on:** `torchlift.skeleton`, then `torchlift.load`.
# - **The file may be replaced while you run, or every first use must be fast:** `torchlift.load`
#   with ``source="read"``.
# - **You want to know before you load:** `torchlift.plan` says what the load would cost.

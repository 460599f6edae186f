"""
Killed while loading: why a checkpoint takes its memory twice
=============================================================

Your checkpoint has 7 GB, the machine has 12 GB free, and the process is killed while it loads: out
of memory. Where does the memory go?

It goes into two copies: one in the model and one in the state dict. `torchlift.skeleton` and
`torchlift.load` need one copy or none. The weights stay in the file until you write to them.
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
report = torchlift.load(model, path)
print(f"{len(report.loaded)} tensors loaded, {report.bytes_read} bytes copied")
print(model(torch.ones(4096)).shape)

# %%
# The skeleton is the model with no weights allocated. The load mapped each parameter from the file
# into the address space of your process. The model is ready to use, and no byte was copied.
#
# Reproduce the kill
# ------------------
#
# Take a model of 256 MiB, load it the usual way, and use it. Then do the same with a skeleton.

from torch import nn

from torchlift import load, skeleton
from torchlift.measure import mark


def build():
    return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(16)])


def use_and_write(model):
    model(torch.ones(1, 2048))
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    mark("used, and one layer of 16 written to")


def usual(path):
    model = build()
    mark("the model is built")
    state = torch.load(path)
    mark("the state dict is there")
    model.load_state_dict(state)
    mark("copied into the model")
    del state
    mark("the state dict is freed")
    use_and_write(model)


def torchlift_mapped(path):
    model = skeleton(build)
    load(model, path)
    mark("loaded")
    use_and_write(model)


# %%
# The next cell simulates a machine that is too small. A process may take one and a half copies and
# not a byte more. Linux enforces that limit.

# fold: How the memory of a process is limited
import sys
from pathlib import Path

from torchlift.measure import ChildError, in_child

MIB = 2**20
path = str(Path(path).with_name("model.pt"))
torch.save(build().state_dict(), path)
size = torchlift.open(path).nbytes


def limit_and_run(way):
    if sys.platform == "linux":
        import resource

        status = Path("/proc/self/status").read_text()
        room = 1024 * int(status.split("VmData:")[1].split()[0]) + size * 3 // 2
        resource.setrlimit(resource.RLIMIT_DATA, (room, room))
    way(path)


def in_a_small_machine(way):
    try:
        in_child(limit_and_run, way)
    except ChildError as error:
        return str(error).splitlines()[-1].replace(". ", "\n  ")
    return "loaded and used"


# %%

print("usual:", in_a_small_machine(usual))
print("torchlift:", in_a_small_machine(torchlift_mapped))

# %%
# The usual way dies in ``torch.load``. By then a complete model is in memory, but it is useless: it
# holds random numbers that are about to be overwritten. The skeleton loads and runs under the same
# limit.
#
# How torch.load uses memory
# --------------------------
#
# Building the model takes one copy of the memory for random numbers. `torch.load` takes a second
# copy and fills it from the file. ``load_state_dict`` copies the second over the first. Then you
# free the second. Every weight is written three times, and two of these writes are wasted.
#
# Proof
# -----
#
# By arithmetic, 16 layers of 2048 x 2048 numbers with 4 bytes are 256 MiB. So two copies are 512
# MiB, one is 256, and the layer that you write to is 16.
#
# Four ways run here, each in a new process without a limit. Two are from above. ``read`` copies the
# weights into memory instead of mapping them. The fourth is the best that torch does by itself,
# which the next recipe explains. Each way uses the model afterwards and writes to one layer.
#
# Look at *anonymous* memory. It is RAM that the process owns and that the kernel cannot take back.
# Pages of a file that a process only maps are *file-backed*: the kernel drops them when it needs
# room.


def torchlift_read(path):
    model = skeleton(build)
    load(model, path, source="read")
    mark("loaded")
    use_and_write(model)


def torch_at_its_best(path):
    with torch.device("meta"):
        model = build()
    model.load_state_dict(torch.load(path, mmap=True), assign=True)
    mark("loaded")
    use_and_write(model)


# %%

# fold: How each way is measured
uses = {}
for way in usual, torch_at_its_best, torchlift_read, torchlift_mapped:
    use = uses[way] = in_child(way, path).memory
    print(
        f"{way.__name__} in {use.marks[-1].seconds:.3f} s, "
        f"anonymous peak: {use.added_anonymous / MIB:.0f} MiB"
    )
    for moment in use.marks:
        added = (moment.anonymous - use.baseline.anonymous) / MIB
        print(f"  {moment.label:<36} anonymous {added:4.0f} MiB")

copies = {way: use.added_anonymous / size for way, use in uses.items()}
assert 1.9 < copies[usual] < 2.2
assert 0.9 < copies[torchlift_read] < 1.25
for way in torch_at_its_best, torchlift_mapped:
    assert copies[way] < 0.15, "the layer that was written to, and nothing else"

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots()
looks = {
    "usual": "C0-",
    "torch at its best": "C3-.",
    "torchlift, read": "C2--",
    "torchlift": "C1-",
}
for (label, look), use in zip(looks.items(), uses.values(), strict=True):
    shown = [s for s in use.timeline if s.seconds <= use.marks[-1].seconds]
    seconds = [sample.seconds for sample in shown]
    owned = [(s.anonymous - use.baseline.anonymous) / MIB for s in shown]
    label = f"{label}: {seconds[-1]:.2f} s"
    wide = look == "C3-."  # seen on both sides of the line that covers it
    axes.plot(seconds, owned, look, label=label, linewidth=7 if wide else 2.5)
    axes.plot(seconds[-1:], owned[-1:], look[:2] + "o", ms=13 if wide else 7)
axes.axhline(1.5 * size / MIB, color="C0", linewidth=1, linestyle=":")
axes.text(0, 1.53 * size / MIB, " a machine with 384 MiB free", color="C0")
axes.set(xlim=(0, None), xlabel="time to load and use (s)")
axes.set(ylim=(-20, 560), yticks=[0, 256, 512], ylabel="memory owned (MiB)")
figure.legend(loc="outside upper center", ncols=2, fontsize=11)
plt.show()

# %%
# *The lines show the memory that a process owns while it loads a model of 256 MiB, uses it once and
# writes to one layer. A dot marks the end. The usual way climbs to two copies, and a machine with
# room for one and a half would kill it. With torchlift, read, it owns one copy. With torchlift and
# with torch at its best it owns only the layer that was written to, and both end early.*
#
# Mapped weights still have to be read. That happens page by page, at the first use. Pages that you
# write to become yours, so a model that you train ends up as one copy. All other pages belong to
# the file. Do not overwrite such a file in place. Rename a new file over it.
#
# Remember
# --------
#
# - The usual way takes two copies: a model full of random numbers and a state dict that overwrites
#   them. The peak decides whether your process survives.
# - Look at anonymous memory. One number for all memory mixes the pages that you own with the pages
#   that you only map.
# - Mapped weights are read at the first use. They become yours when you write to them.
#
# Use this when
# -------------
#
# - **You load weights to run them or to train them:** `torchlift.skeleton`, then `torchlift.load`.
# - **The file may be replaced while you run, or every first use must be fast:** `torchlift.load`
#   with ``source="read"``.
# - **You want to know before you load:** `torchlift.plan` estimates the memory of the load.

# %%
# Question
# --------
#
# You load two models from the same file, and use both. How many copies of the weights do you own?

# fold: Answer to the question
# None. Both map the same pages of the file, which belong to the kernel.
with torchlift.measure.memory() as use:
    models = [skeleton(build) for _ in range(2)]
    for model in models:
        load(model, path)
        model(torch.ones(1, 2048))
print(f"two models, anonymous peak: {use.added_anonymous / MIB:.0f} MiB")
assert use.added_anonymous < 0.1 * size

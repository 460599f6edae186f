"""
Why loading takes the memory twice
==================================

Your checkpoint has 7 GB, your machine has 12 GB free, and the process is killed while it loads.
Where does the memory go, and which part of it do you need?

You load one model step by step, watch the memory that the process owns, and find the waste. Then
you load the same file without it.
"""

# %%
# One model, one file
# -------------------
#
# The model is as plain as can be: sixteen linear layers of 16 MiB each. What follows holds for
# every model that is built first and loaded afterwards.
#
# Each measurement starts a fresh Python process, so that nothing that an earlier step left behind
# can hide a cost. ``SETUP`` is what such a process runs before the clock starts. Here the first
# one writes the checkpoint, into a temporary folder.

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

import torchlift

SETUP = """
import torch
from torch import nn
from torchlift import load, skeleton

def build():
    return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(16)])
"""

folder = tempfile.TemporaryDirectory(prefix="torchlift-")
path = str(Path(folder.name, "model.pt"))
torchlift.measure.in_child(
    "torch.save(build().state_dict(), args[0])",
    path,
    setup=SETUP,
)

MIB = 2**20
with torchlift.open(path) as ckpt:
    size = ckpt.nbytes
print(f"checkpoint: {size / MIB:.1f} MiB in {len(ckpt)} tensors")

# %%
# The usual way, step by step
# ---------------------------
#
# Four lines that you have written many times. ``use.mark`` notes the time and the memory after
# each of them.
#
# The number to watch is *anonymous* memory: RAM that your process owns, and that nobody can take
# back while it runs. Pages of a file that the process only maps are counted apart, because the
# kernel can drop them at any time and read them again.

USUAL = """
model = build()
use.mark("build the model")
state = torch.load(args[0])
use.mark("torch.load")
model.load_state_dict(state)
use.mark("load_state_dict")
del state
use.mark("free")
"""


def in_steps(code, runs=1):
    """Run code in a fresh process and print each step; of several runs, the middle."""
    children = [
        torchlift.measure.in_child(code, path, setup=SETUP) for _ in range(runs)
    ]
    children.sort(key=lambda child: child.seconds)
    child = children[runs // 2]
    if runs > 1:
        print("runs:", *(f"{1000 * child.seconds:.1f} ms" for child in children))
    seconds, owned, start = {}, {}, 0.0
    for mark in child.memory.marks:
        took, start = mark.seconds - start, mark.seconds
        added = mark.anonymous - child.memory.baseline.anonymous
        numbers = f"{1000 * took:6.1f} ms   anonymous {added / MIB:+7.1f} MiB"
        print(f"{mark.label:<19}{numbers}")
        seconds[mark.label], owned[mark.label] = took, added
    return child.memory, seconds, owned


usual, usual_seconds, usual_owned = in_steps(USUAL)
print()
print("peak above 1.9x the checkpoint:", usual.added_anonymous > 1.9 * size)
print("left at the end below 1.5x:", usual_owned["free"] < 1.5 * size)

# %%
# There it is. Your 7 GB need 14 GB, for the moment between ``torch.load`` and ``del``, although
# half of that is all you ever wanted.
#
# Which step is waste?
# --------------------
#
# Go through the steps with one question: what of its work is still there at the end?
#
# 1. **Build the model.** It takes memory and fills it with random numbers. The memory stays, the
#    numbers do not: ``load_state_dict`` overwrites every one of them. *The time is wasted.*
# 2. **Read the state dict.** `torch.load` takes the same amount of memory again and fills it from
#    the file. It is the only step that brings in what you came for, but to a place where it does
#    not stay. *The memory is wasted.*
# 3. **Copy.** ``load_state_dict`` reads the one copy and writes the other. *The time is wasted:*
#    the numbers were in memory already.
# 4. **Free.** You give back what you did not need.
#
# So you write every weight three times, and two of the three are for nothing.
#
# The same without the waste
# --------------------------
#
# `torchlift.skeleton` builds the model without memory for its weights: every parameter has its
# shape, and nothing behind it. `torchlift.load` then gives each parameter its place in the file,
# mapped into the address space of your process. Nothing is read until you use it, so the third
# step uses it, and the last one writes to one of the sixteen layers.

MAPPED = """
model = skeleton(build)
use.mark("skeleton")
load(model, args[0])
use.mark("load")
model(torch.ones(1, 2048))
use.mark("first use")
with torch.no_grad():
    model[0].weight.mul_(0.5)
use.mark("write to one layer")
"""

mapped, mapped_seconds, mapped_owned = in_steps(MAPPED)
build, skeleton = usual_seconds["build the model"], mapped_seconds["skeleton"]
usual_ready = sum(usual_seconds.values()) - usual_seconds["free"]
mapped_ready = skeleton + mapped_seconds["load"]
faster, sooner = build / skeleton, usual_ready / mapped_ready
print()
print(f"file-backed peak: {mapped.added_file_backed / MIB:.1f} MiB")
print("loaded and used, below 0.1x:", mapped_owned["first use"] < 0.1 * size)
print(f"the skeleton is built {faster:.0f}x faster than the model")
print(f"the model is ready {sooner:.0f}x faster than in the usual way")
print("both at least 3x faster:", min(faster, sooner) > 3)

# %%
# The reading has not vanished. It happens at the first use, page by page, and it shows as
# *file-backed* memory: the page cache of the kernel, mapped instead of copied.
#
# The last line shows the rule of a private mapping: pages that you write to become yours. The
# layer that you scaled takes its 16 MiB. The file stays as it is, and the other layers stay
# mapped. A model that you train becomes yours in this way, up to one copy.
#
# Until you write to them, the bytes belong to the file, and the report of a load says so. Never
# overwrite a file that somebody has mapped: the model changes with it, and if the file gets
# shorter, the process dies. Write the new file beside the old one and rename it.
#
# If you want to own the memory
# -----------------------------
#
# Sometimes a mapping is not what you want: the file lies on a network drive, or somebody may
# replace it while you run. ``source="read"`` reads every byte, once, to where it stays.
#
# For that the system must hand out a whole copy of fresh memory. How long it takes varies much
# from run to run, so you run it three times and look at the run in the middle.

READ = """
model = skeleton(build)
use.mark("skeleton")
load(model, args[0], source="read")
use.mark("load")
model(torch.ones(1, 2048))
use.mark("first use")
"""

read, read_seconds, read_owned = in_steps(READ, runs=3)
print()
print("peak below 1.25x the checkpoint:", read.added_anonymous < 1.25 * size)

# %%
# The picture
# -----------
#
# Two copies, one copy, no copy.

GRAY, TEAL, RUST = "#5b6470", "#2b6f77", "#b83a16"
plt.rcParams.update({"figure.facecolor": "white", "font.size": 12})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
plt.rcParams.update({"figure.constrained_layout.use": True})

copy = size / MIB
end = 1.06 * max(use.seconds for use in (usual, read, mapped))
figure, axes = plt.subplots(figsize=(7.2, 4.5))
for use, color, width in (usual, GRAY, 2.5), (read, TEAL, 2.5), (mapped, RUST, 4):
    before, samples = use.baseline.anonymous, use.timeline
    # What a process has at the end it keeps, to the edge of the picture.
    seconds = [sample.seconds for sample in samples] + [end]
    owned = [(s.anonymous - before) / MIB for s in [*samples, samples[-1]]]
    axes.plot(seconds, owned, color=color, linewidth=width)
    if use is usual:
        axes.fill_between(seconds, owned, color=color, alpha=0.12, linewidth=0)

start = 0.0
for number, mark in enumerate(usual.marks, 1):
    axes.axvline(mark.seconds, color=GRAY, linewidth=0.8, linestyle=":")
    middle, start = (start + mark.seconds) / 2, mark.seconds
    axes.text(middle, 2.12 * copy, number, color=GRAY, ha="center", weight="bold")
for x, y, text, color in (
    (0.02, 1.8, "the usual way:\ntwo copies", GRAY),
    (0.02, 1.05, "skeleton, read:\none copy", TEAL),
    (0.62, 0.11, "skeleton, mapped:\nno copy", RUST),
):
    axes.text(x * end, y * copy, text, color=color, weight="bold")
axes.set(
    xlim=(0, end),
    ylim=(-0.05 * copy, 2.25 * copy),
    yticks=[0, copy, 2 * copy],
    yticklabels=["0", f"{copy:.0f}", f"{2 * copy:.0f}"],
    xlabel="time since the start (s)",
    ylabel="anonymous memory added (MiB)",
)
plt.show()

# %%
# *Memory that the process owns, over time. The numbers are the four steps of the usual way: 1
# build, 2 torch.load, 3 load_state_dict, 4 free. The gray curve climbs to two copies and falls
# back to one. The skeleton that is read climbs to one copy and stays there. The skeleton that is
# mapped is ready while the usual way still makes up random numbers; its one small step is the
# layer that you wrote to.*
#
# When the memory is not there
# ----------------------------
#
# Now give a process room for one and a half copies, and not a byte more. Linux can enforce such a
# limit. The file and the code are those from above.

ONE_AND_A_HALF = """
import os

if os.path.exists("/proc/self/status"):
    import resource

    with open("/proc/self/status") as status:
        now = 1024 * int(status.read().split("VmData:")[1].split()[0])
    resource.setrlimit(resource.RLIMIT_DATA, (now + args[1], now + args[1]))

def usual():
    model = build()
    print("the model is built")
    state = torch.load(args[0])
    print("the state dict is there")
    model.load_state_dict(state)

try:
    usual()
except RuntimeError as error:
    print(f"{type(error).__name__}:", *str(error).split(". "), sep="\\n  ")

model = skeleton(build)
print(load(model, args[0]))
result = torch.isfinite(model(torch.ones(1, 2048))).all().item()
"""

child = torchlift.measure.in_child(
    ONE_AND_A_HALF,
    path,
    size * 3 // 2,
    setup=SETUP,
)
print(child.stdout)
print("the skeleton loads and runs:", child.value)
folder.cleanup()

# %%
# The usual way dies in its second step, with the whole model in memory and no use for it. The
# skeleton loads in the same process, under the same limit.
#
# What to remember
# ----------------
#
# - The usual way takes two copies, because it builds a model full of random numbers *and* a state
#   dict, and then copies one over the other.
# - The peak counts, not what is left: it decides whether your process survives.
# - Look at anonymous memory. A single number for memory mixes up what you own with what you only
#   map.
# - A mapping moves the reading to the first use. What you write to becomes yours, page by page.
#
# What to use when
# ----------------
#
# - **You load weights to run them or to train on:** `torchlift.skeleton`, then `torchlift.load`.
#   It maps a file on a local disk, and reads one on a network drive.
# - **The file may be replaced or deleted while you run, or every first use must be fast:** the
#   same with ``source="read"``.
# - **You want to know before you load:** `torchlift.plan` takes the same arguments and says what
#   the load would cost.

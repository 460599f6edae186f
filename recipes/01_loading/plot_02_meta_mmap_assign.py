"""
Meta, mmap, assign
==================

Plain PyTorch has three switches against the second copy. What does each of them remove, which of
them need each other, and what goes wrong when you turn them?

You turn them one at a time and together, measure every combination in a fresh process, and put
torchlift beside them.
"""

# %%
# The three switches
# ------------------
#
# - **meta**: ``with torch.device("meta"): model = build()``. The model has shapes and no memory.
#   Nothing is initialized.
# - **mmap**: ``torch.load(path, mmap=True)``. The state dict is a view of the file. Nothing is
#   read until it is used.
# - **assign**: ``model.load_state_dict(state, assign=True)``. The tensors of the state dict
#   become the parameters. Nothing is copied.
#
# The model is the one of the recipe before: sixteen linear layers of 16 MiB each. ``SETUP`` is
# what each measured process runs before the clock starts.

import tempfile
import textwrap
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import torchlift

SETUP = """
import torch
from torch import nn
from torchlift import load, skeleton

def build():
    return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(16)])
"""

MIB = 2**20
folder = tempfile.TemporaryDirectory(prefix="torchlift-")
path = str(Path(folder.name, "model.pt"))
torchlift.measure.in_child(
    "torch.save(build().state_dict(), args[0])",
    path,
    setup=SETUP,
)
with torchlift.open(path) as ckpt:
    size = ckpt.nbytes
print(f"checkpoint: {size / MIB:.1f} MiB in {len(ckpt)} tensors")

# %%
# Meta alone does nothing
# -----------------------
#
# Start with the combination that looks right and is not: a model on meta, loaded without assign.
# There is no memory to copy to. PyTorch warns, once per tensor, and then reports success.


def show(error):
    """Print the type and the message of an error or a warning, in short lines."""
    text = f"{type(error).__name__}: {error}"
    print(textwrap.fill(text, 76, subsequent_indent="  "))


small = str(Path(folder.name, "small.pt"))
torch.manual_seed(0)
torch.save(nn.Linear(3, 2).state_dict(), small)

with torch.device("meta"):
    model = nn.Linear(3, 2)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(model.load_state_dict(torch.load(small)))
for warning in caught:
    show(warning.message)

try:
    model.to("cpu")
except NotImplementedError as error:
    show(error)

# %%
# The error comes later, far from the line that caused it. So **meta needs assign**. The other two
# work alone.
#
# One at a time and together
# --------------------------
#
# ``LOAD`` is the usual way with three switches in it. Right after loading, each process uses the
# model once: this is where a mapped model pays for the reading that it put off. At the end, after
# the clock has stopped, it adds up the bits of all weights, so that you see that every way loads
# the same. A line gives the time until the model is loaded, the time until it was used, and the
# peak.

LOAD = """
path, meta, mmap, assign = args
with torch.device("meta" if meta else "cpu"):
    model = build()
state = torch.load(path, mmap=mmap)
use.mark("both are there")
model.load_state_dict(state, assign=assign)
del state
use.mark("loaded")
model(torch.ones(1, 2048))
use.mark("used")
"""

TORCHLIFT = """
model = skeleton(build)
load(model, args[0])
use.mark("loaded")
model(torch.ones(1, 2048))
use.mark("used")
"""

BITS = """
weights = [weight.detach() for weight in model.parameters()]
result = sum(weight.view(torch.int32).sum().item() for weight in weights)
"""

WAYS = {
    "no switch": (LOAD, False, False, False),
    "mmap": (LOAD, False, True, False),
    "assign": (LOAD, False, False, True),
    "mmap + assign": (LOAD, False, True, True),
    "meta + assign": (LOAD, True, False, True),
    "all three": (LOAD, True, True, True),
    "torchlift": (TORCHLIFT,),
}

loaded, used, peak, sums = {}, {}, {}, set()
for name, (code, *switches) in WAYS.items():
    child = torchlift.measure.in_child(
        code,
        path,
        *switches,
        setup=SETUP,
        finish=BITS,
    )
    *_, at_load, at_use = (1000 * mark.seconds for mark in child.memory.marks)
    loaded[name], used[name] = at_load, at_use
    peak[name] = child.memory.added_anonymous / MIB
    sums.add(child.value)
    print(
        f"{name:<13}{at_load:6.1f} ms {at_use:6.1f} ms   anonymous peak: {peak[name]:5.1f} MiB",
    )

# %%
# Now the verdicts: how many copies of the checkpoint each way takes at its peak, and whether the
# time went away.

copies = {name: peak[name] * MIB / size for name in WAYS}
for name in ("no switch", "assign"):
    print(f"{name}, two copies:", 1.9 < copies[name] < 2.25)
for name in ("mmap", "mmap + assign", "meta + assign"):
    print(f"{name}, one copy:", 0.9 < copies[name] < 1.25)
for name in ("all three", "torchlift"):
    print(f"{name}, no copy:", copies[name] < 0.1)
    faster = loaded["no switch"] / loaded[name]
    print(f"{name}, {faster:.0f}x faster than with no switch")
    print(f"{name}, at least 3x faster:", faster > 3)
for name, lacks in (("mmap + assign", "meta"), ("meta + assign", "mmap")):
    faster = loaded[name] / loaded["all three"]
    print(f"all three, {faster:.0f}x faster than without {lacks}")
print("every way loads the same values:", len(sums) == 1)

# %%
# The picture
# -----------

GRAY, TEAL, RUST = "#5b6470", "#2b6f77", "#b83a16"
plt.rcParams.update({"figure.facecolor": "white", "font.size": 12})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
plt.rcParams.update({"figure.constrained_layout.use": True})

names = list(WAYS)
colors = [GRAY] * 5 + [TEAL, RUST]
figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 4.5), sharey=True)
left.barh(names, used.values(), color=colors, alpha=0.35)
left.barh(names, loaded.values(), color=colors)
right.barh(names, peak.values(), color=colors)
for axes, values in ((left, used), (right, peak)):
    axes.set_xlim(0, 1.25 * max(values.values()))
    for row, value in enumerate(values.values()):
        label = f" {value:.0f}"
        axes.text(value, row, label, va="center", color=colors[row], weight="bold")
    axes.tick_params(axis="y", length=0)
left.invert_yaxis()
left.set_xlabel("time until used (ms)")
right.set(xlabel="anonymous peak (MiB)", xticks=[0, size / MIB, 2 * size / MIB])
right.xaxis.set_major_formatter("{x:.0f}")
plt.show()

# %%
# *Left: the time to load, and in the lighter shade the first use after it. Right: the most memory
# that the process owned at one moment; the ticks are no copy, one copy and two copies. No switch
# alone takes either picture to zero. With all three, what is left is the first use.*
#
# What each switch removes
# ------------------------
#
# - **meta** removes the initialization, and the memory that is initialized. Compare ``mmap +
#   assign`` with all three: nothing else differs.
# - **mmap** removes the copy that is the state dict, and puts off the reading. Compare ``meta +
#   assign`` with all three.
# - **assign** removes the copying. Alone it saves nothing at the peak, because the first weights
#   are freed only after the second ones are there. Its worth is that meta needs it.
#
# The same in torchlift
# ---------------------
#
# The last bar has the switches built in. Here it runs in this process, which takes no memory to
# speak of:


def build():
    return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(16)])


model = torchlift.skeleton(build)
print(torchlift.load(model, path))

# %%
# The line *mapped* says whose bytes the model has now: the file's. If somebody overwrites it in
# place, the model changes too, or the process dies. Whoever replaces it writes a new file and
# renames it.
#
# Both ways end in the same place here. The difference is in the cases that a chain of linear
# layers does not have: buffers that no checkpoint holds, weights that are tied, a name that is
# missing. The next recipe is about them.
#
# One tensor at a time
# --------------------
#
# A mapped state dict is also the cheapest way to *work* on a checkpoint. You want the weights in
# bfloat16. If you read them all and cast them all, you hold one copy and a half. If you map them
# and cast one tensor at a time, you hold what you keep, and nothing else.
#
# The second process does both. First it casts each tensor, looks at its smallest and largest
# value, and drops it. Then it casts each tensor again, and keeps it.
#
# One thing would blur the numbers: the C library may hold on to memory that was freed, for the
# next time. ``GIVE_BACK`` tells it to return every block above 1 MiB at once, so that you see
# what is in use.

CAST_ALL = """
whole = torch.load(args[0])
state = {key: tensor.to(torch.bfloat16) for key, tensor in whole.items()}
use.mark("both are there")
del whole
"""

CAST_ONE_BY_ONE = """
state = torch.load(args[0], mmap=True)
for tensor in state.values():
    smallest, largest = tensor.to(torch.bfloat16).aminmax()
use.mark("dropped")
for key, tensor in state.items():
    state[key] = tensor.to(torch.bfloat16)
use.mark("kept")
"""

CAST_TORCHLIFT = """
model = skeleton(build)
load(model, args[0], dtype=torch.bfloat16)
state = model.state_dict()
"""

BITS = """
result = sum(weight.view(torch.int16).sum().item() for weight in state.values())
"""

GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(MIB)}

at_once, one_by_one, by_torchlift = (
    torchlift.measure.in_child(code, path, setup=SETUP, finish=BITS, env=GIVE_BACK)
    for code in (CAST_ALL, CAST_ONE_BY_ONE, CAST_TORCHLIFT)
)
while_dropping = max(
    sample.anonymous - one_by_one.memory.baseline.anonymous
    for sample in one_by_one.memory.timeline
    if sample.seconds <= one_by_one.memory.marks[0].seconds
)
rows = {
    "all at once": at_once.memory.added_anonymous,
    "one by one, dropped": while_dropping,
    "one by one, kept": one_by_one.memory.added_anonymous,
    "torchlift": by_torchlift.memory.added_anonymous,
}
for name, added in rows.items():
    print(f"{name:<20} anonymous peak: {added / MIB:6.1f} MiB")
print("all at once, above 1.4x the checkpoint:", rows["all at once"] > 1.4 * size)
print("one by one, dropped, below 0.25x:", while_dropping < 0.25 * size)
print("one by one, kept, below 0.65x:", rows["one by one, kept"] < 0.65 * size)
above = rows["torchlift"] - size / 2
print("torchlift, at most 64 MiB above the result:", above < 64 * MIB)
print("same weights:", at_once.value == one_by_one.value == by_torchlift.value)

# %%
# You can ask for that number before you load. `torchlift.plan` takes the same arguments:

plan = torchlift.plan(torchlift.skeleton(build), path, dtype=torch.bfloat16)
print(f"the plan says ~{plan.peak_bytes / MIB:.1f} MiB")
measured = rows["torchlift"] / plan.peak_bytes
print("measured at most 1.1x the plan:", measured < 1.1)

# %%

figure, panels = plt.subplots(1, 3, figsize=(7.2, 4), sharey=True)
runs = (
    (at_once, GRAY, "all at once"),
    (one_by_one, TEAL, "one by one"),
    (by_torchlift, RUST, "torchlift"),
)
for axes, (child, color, title) in zip(panels, runs, strict=True):
    use = child.memory
    before, samples = use.baseline, use.timeline
    time = [1000 * s.seconds for s in samples]
    owned = [(s.anonymous - before.anonymous) / MIB for s in samples]
    mapped = [(s.file_backed - before.file_backed) / MIB for s in samples]
    axes.fill_between(time, owned, color=color, alpha=0.15, linewidth=0)
    axes.plot(time, owned, color=color, linewidth=2.5)
    axes.plot(time, mapped, color=color, linewidth=1.5, linestyle=":")
    axes.set_title(title, color=color, weight="bold", fontsize=12)
    axes.set(xlim=(0, time[-1]), xlabel="time (ms)")
    axes.locator_params(axis="x", nbins=3)
copy = size / MIB
panels[0].set_ylabel("memory added (MiB)")
panels[0].set_yticks([0, copy / 2, copy, 1.5 * copy])
panels[0].yaxis.set_major_formatter("{x:.0f}")
switched = 1000 * one_by_one.memory.marks[0].seconds
panels[1].axvline(switched, color=TEAL, linewidth=0.8)
panels[1].text(switched, 1.45 * copy, "dropped ", color=TEAL, ha="right")
panels[1].text(switched, 1.45 * copy, " kept", color=TEAL)
plt.show()

# %%
# *Solid: memory that the process owns. Dotted: pages of the file that it maps, which the kernel
# can take back at any time. One by one, the solid line stays flat, one tensor high, as long as
# every result is dropped, left of the thin line. Then it rises to the half copy that is kept.
# torchlift needs a few buffers on top of that.*
#
# Build the optimizer after an assign
# -----------------------------------
#
# Assign has a price that no picture of memory shows. An optimizer holds the parameters that it
# was given. After an assign the model has other ones. The optimizer goes on with those that
# nobody uses any more, and no error tells you.


def train_one_step(model, optimizer):
    """Take a step, count the weights that it changed, and refuse to change none."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    pairs = zip(before, model.parameters(), strict=True)
    changed = sum((old != new).sum().item() for old, new in pairs)
    if not changed:
        raise RuntimeError("the step changed no weight of the model")
    return changed


def holds_weight(optimizer, model):
    """Whether the optimizer's first parameter is the model's weight."""
    return optimizer.param_groups[0]["params"][0] is model.weight


model = nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.load_state_dict(torch.load(small), assign=True)
print("the optimizer holds the model's weight:", holds_weight(optimizer, model))
try:
    train_one_step(model, optimizer)
except RuntimeError as error:
    show(error)

# %%
# The check is our own; PyTorch says nothing, and the loss just never falls. The optimizer trains
# a ghost. So build it after the assign:

model = nn.Linear(3, 2)
model.load_state_dict(torch.load(small), assign=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("the optimizer holds the model's weight:", holds_weight(optimizer, model))
print("weights changed by the step:", train_one_step(model, optimizer))

# %%
# `torchlift.load` keeps the parameters and changes what is in them. Whoever holds a parameter
# goes on holding the right one. So the order does not matter, not even when the optimizer is
# built on a skeleton:

model = torchlift.skeleton(nn.Linear, 3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
report = torchlift.load(model, small)
print("how each was placed:", report.mode)
print("the optimizer holds the model's weight:", holds_weight(optimizer, model))
print("weights changed by the step:", train_one_step(model, optimizer))
folder.cleanup()

# %%
# What to remember
# ----------------
#
# - Meta needs assign. Without it, the load reports success and the model stays empty.
# - Every switch removes one thing: meta the initialization, mmap the reading, assign the copying.
#   Two of them still leave one copy; it takes all three to leave none.
# - A mapped file is read at its first use. Replace it by renaming; never overwrite it.
# - Work on a mapped checkpoint one tensor at a time, and you hold what you keep.
# - After an assign, build the optimizer. Before it, it trains a ghost.
#
# What to use when
# ----------------
#
# - **You load weights and have torchlift:** `torchlift.skeleton` and `torchlift.load`, in any
#   order with the optimizer.
# - **You have plain PyTorch, and the model is made of parameters only:** all three switches.
# - **The file may change while you run:** ``source="read"``, or meta and assign without mmap.
# - **You need another dtype:** `torchlift.load` with ``dtype=``, or cast one mapped tensor at a
#   time.

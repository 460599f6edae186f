"""
Load in bfloat16, and keep the norms in float32
===============================================

The file is float32, and the machine has room for half of it. Most weights may become bfloat16;
norms, routers or a head had better not. How do you load some in one dtype and the rest in another,
without all of it in float32 on the way?

``dtype=`` of `torchlift.load` takes a rule by name, and each tensor is cast as it is read.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

path = tempfile.mkdtemp() + "/model.pt"


def build():
    up, norm = torch.nn.Linear(1024, 4096), torch.nn.LayerNorm(4096)
    return torch.nn.ModuleDict({"up": up, "norm": norm})


torch.save(build().state_dict(), path)
model = torchlift.skeleton(build)
rule = torchlift.remap.by_pattern({"norm": torch.float32, "": torch.bfloat16})
torchlift.load(model, path, dtype=rule)
print({name: str(tensor.dtype) for name, tensor in model.named_parameters()})

# %%
# `torchlift.remap.by_pattern` goes by regular expression, and the first one that is found in the
# name wins; ``""`` is found in every name.
#
# What model.bfloat16() does to a norm
# ------------------------------------
#
# ``model.bfloat16()`` casts everything. A bfloat16 has eight binary digits: the next number after 1
# is 1.0078. The weights of a norm are numbers around 1, and all values pass through them. Here is a
# network whose norms learned a little, and what a cast makes of them:

# fold: Build the network and save it
from torch import nn

WIDTH, MIB = 2048, 2**20


def build():
    pairs = [(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(8)]
    return nn.ModuleList(
        nn.ModuleDict({"norm": norm, "linear": linear}) for norm, linear in pairs
    )


torch.manual_seed(0)
trained = build()
for name, parameter in trained.named_parameters():
    if "norm.weight" in name:
        nn.init.normal_(parameter, mean=1, std=0.002)
torch.save(trained.state_dict(), path)

# %%

with torchlift.open(path) as ckpt:
    norm = ckpt["0.norm.weight"]
    print("learned:  ", [round(value, 4) for value in norm[:5].tolist()])
    print("cast:     ", norm[:5].bfloat16().tolist())
    print(len(norm.unique()), "numbers become", len(norm.bfloat16().unique()))

    norms = sum(ckpt.entries[key].nbytes for key in ckpt if "norm" in key)
    print(f"norms: {norms / ckpt.nbytes:.2%} of {ckpt.nbytes / MIB:.0f} MiB")

# %%
# What the norms learned is gone, for a tenth of a percent of the bytes. Keep them:

model = torchlift.skeleton(build)
torchlift.load(model, path, dtype=rule)
for name, value in trained.state_dict().items():
    loaded = model.state_dict()[name]
    assert loaded.dtype == (torch.float32 if "norm" in name else torch.bfloat16)
    assert torch.equal(loaded, value.to(loaded.dtype))
normed = model[0]["norm"](torch.randn(2, WIDTH, dtype=torch.bfloat16))
print("output of a norm:", normed.dtype)

# %%
# The norms are those of the file, bit for bit, the others are what a cast gives, and the model
# runs: torch's layer norm takes an input in bfloat16 with weights in float32. A rule is asked about
# floating-point parameters and buffers. It never casts integers, nor buffers that no file holds.
#
# Proof
# -----
#
# The same file in four ways, each in a new process: load, and cast all; load, and cast the linear
# layers; torch's best, a mapped file whose tensors are cast one by one and assigned; and the rule.


def cast_later(path, everything):
    model = build()
    model.load_state_dict(torch.load(path))
    for block in model:
        (block if everything else block["linear"]).bfloat16()
    return model


def mapped_by_hand(path):
    with torch.device("meta"):
        model = build()
    state = torch.load(path, mmap=True)
    for name in state:
        if "norm" not in name:
            state[name] = state[name].bfloat16()
    model.load_state_dict(state, assign=True)
    return model


def by_rule(path):
    model = torchlift.skeleton(build)
    torchlift.load(model, path, dtype=rule)
    return model


# %%

# fold: Measure memory and time, and count the norm weights that changed
from functools import partial
from statistics import median
from timeit import repeat


def measured(way, path):
    """The memory owned, the median time, the norms that changed, and the other sums."""
    with torch.device("meta"):
        build()  # torch and torchlift import what they use
    torchlift.skeleton(build)
    with torchlift.measure.memory(sampler="process") as use:
        model = way(path)
    before, after = torch.load(path, mmap=True), model.state_dict()
    lost = sum(
        (after[k] != before[k]).sum().item() for k in before if "norm.w" in k
    )
    sums = [
        value.float().sum().item() for k, value in after.items() if "linear" in k
    ]
    seconds = median(repeat(lambda: way(path), number=1, repeat=7))
    return use.added_anonymous / MIB, seconds, lost, sums


ways = {"load, cast all": partial(cast_later, everything=True)}
ways["load, cast some"] = partial(cast_later, everything=False)
ways |= {"mapped, by hand": mapped_by_hand, "torchlift": by_rule}
found = {way: torchlift.measure.in_child(measured, ways[way], path) for way in ways}
found = {way: child.value for way, child in found.items()}
owned = {way: row[0] for way, row in found.items()}
assert all(row[3] == found["torchlift"][3] for row in found.values())
assert owned["load, cast some"] > 1.9 * 128 > 2.4 * owned["torchlift"]

# %%

for way, (memory, seconds, lost, _) in found.items():
    print(f"{way:<16} anonymous peak: {memory:.1f} MiB, {seconds:.3f} s,", end=" ")
    print(f"{lost:,} norm weights changed")

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, panels = plt.subplots(1, 3, figsize=(5.6, 2.8), sharey=True)
labels = "memory owned\n(MiB)", "time (ms)", "norm weights\nchanged"
for column, axes in enumerate(panels):
    scale = 1000 if column == 1 else 1
    sizes = [scale * row[column] for row in found.values()]
    axes.barh(list(found), sizes, color=("C0", "C0", "C3", "C1"))
    for y, size in enumerate(sizes):
        axes.text(size, y, f" {size:,.0f}", va="center", size=11)
    axes.set(xlabel=labels[column], xlim=(0, 1.7 * max(sizes)), xticks=[])
    axes.tick_params(axis="y", length=0)
panels[0].invert_yaxis()
plt.show()

# %%
# *A model of 128 MiB in float32 becomes bfloat16, in four ways. Whoever loads it and casts
# afterwards owns two copies; and a cast of all changes nearly every weight of the norms. Cast one
# tensor at a time, by hand over a mapped file or by torchlift's rule, it takes little more than the
# result, and the norms stay as they are.*
#
# By hand it is a loop over a dictionary, as good in memory and in time. The rule is one line, and
# takes care of missing names, of ties and of models that are live.
#
# Remember
# --------
#
# - A cast of everything rounds the norms to the next 1/128. They are a thousandth of the bytes.
# - A rule for ``dtype=`` answers by the model's name; what it says nothing about stays as it is.
# - Each tensor is cast as it is read: the peak is the result and a small buffer.
#
# Use this when
# -------------
#
# - **One dtype for all:** ``dtype=torch.bfloat16`` of `torchlift.load`.
# - **Some layers in another one:** `torchlift.remap.by_pattern`, or `torchlift.remap.by_key`.
# - **As the model is:** ``dtype="model"`` of `torchlift.load`.
# - **Smaller than that:** *Quantise to int8 while loading*.

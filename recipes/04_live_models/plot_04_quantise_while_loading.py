"""
Quantise to int8 while loading, without the float32 model in memory
===================================================================

Your weights are float32, and you serve them in int8, a quarter of the size. The code that you
write first loads the whole model and shrinks it afterwards, so it needs the memory that you meant
to save. Can the weights become small on the way in?

Yes: `torchlift.swap.module_load` says how a tensor subclass is loaded, one tensor at a time.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift


class Small(torch.Tensor): ...


def shrink(destination, source, assign):
    return (127 * source / source.abs().max()).round().char().as_subclass(Small)


path = tempfile.mkdtemp() + "/model.pt"
torch.save(torch.nn.Linear(1024, 1024).state_dict(), path)
model = torchlift.skeleton(torch.nn.Linear, 1024, 1024)
model.weight = torch.nn.Parameter(model.weight.char().as_subclass(Small), False)
with torchlift.swap.module_load(Small, shrink):
    print(torchlift.load(model, path).bytes_read, "bytes ->", model.weight.nbytes)

# %%
# The bytes of the file became a quarter of them. The handler gets the tensor that is in the model
# and the one that comes from the file, and returns what shall be in the model. Your class alone is
# asked; the bias loads as ever.
#
# A tensor subclass with int8 inside
# ----------------------------------
#
# Each row of a weight gets a scale, its largest number divided by 127. In torch such a weight is a
# *wrapper subclass*, which keeps its data in two tensors. About the smallest one that computes:

from torch import nn


class Int8(torch.Tensor):
    @staticmethod
    def __new__(cls, levels, scale):
        kind = {"dtype": scale.dtype, "device": scale.device}
        self = torch.Tensor._make_wrapper_subclass(cls, levels.shape, **kind)
        self.levels, self.scale = levels, scale
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.name() in ("aten::detach", "aten::clone"):
            return cls(func(args[0].levels), func(args[0].scale))
        args = [a.levels * a.scale if isinstance(a, cls) else a for a in args]
        return func(*args, **(kwargs or {}))


def quantise(weight):
    scale = weight.abs().amax(1, keepdim=True) / 127
    return Int8((weight / scale).round_().to(torch.int8), scale)


# %%


# fold: Eight layers in a file, and the same model with empty int8 weights
def int8_skeleton():
    model = torchlift.skeleton(build)
    for layer in model:
        levels = torch.empty(2048, 2048, dtype=torch.int8, device="meta")
        blank = Int8(levels, torch.empty(2048, 1, device="meta"))
        layer.weight = nn.Parameter(blank, requires_grad=False)
    return model


def build():
    return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)])


torch.save(build().state_dict(), path)

# %%
# torchlift cannot know what a float is to your class. It refuses, until you say how, in a handler
# of one line. What was rounded is off by half a level at most:

model = int8_skeleton()
try:
    torchlift.load(model, path)
except torchlift.PlacementError as error:
    print(str(error).replace(path, "model.pt"))


def load_int8(destination, source, assign):
    return quantise(source)


with torchlift.swap.module_load(Int8, load_int8):
    torchlift.load(model, path)
with torchlift.open(path) as ckpt:
    off = (model[0].weight.levels * model[0].weight.scale - ckpt["0.weight"]).abs()
    assert (off / model[0].weight.scale).max() <= 0.501

# %%
# What a handler returns is checked before anything changes. It is torch's own extension point,
# `torch.Tensor.module_load`: ``load_state_dict`` asks it, too, where it swaps.
#
# Proof
# -----
#
# Eight layers, 128 MiB in float32 and 32 MiB in int8, each way in a new process: quantise
# afterwards; torch's best, a loop over a mapped checkpoint; and while loading. How much memory
# does it take, and how long?

# fold: Quantise afterwards, over a mapped file and while loading, and measure
from statistics import median
from timeit import repeat


def quantise_layers(model):
    for layer in model:
        small = quantise(layer.weight.detach())
        layer.weight = nn.Parameter(small, requires_grad=False)
    return model


def afterwards(path):
    model = build()
    model.load_state_dict(torch.load(path))
    return quantise_layers(model)


def mapped_by_hand(path):
    with torch.device("meta"):
        model = build()
    model.load_state_dict(torch.load(path, mmap=True), assign=True)
    return quantise_layers(model)


def while_loading(path):
    model = int8_skeleton()
    with torchlift.swap.module_load(Int8, load_int8):
        torchlift.load(model, path)
    return model


def measured(way, path):
    int8_skeleton()  # torch and torchlift import what they use
    with torchlift.measure.memory(sampler="process") as use:
        model = way(path)
    sums = [layer.weight.levels.sum(dtype=torch.int64).item() for layer in model]
    seconds = median(repeat(lambda: way(path), number=1, repeat=5))
    return use.added_anonymous / MIB, seconds, sums


MIB, ways = (
    2**20,
    {"torch, afterwards": afterwards, "torch, by hand": mapped_by_hand},
)
ways["torchlift"] = while_loading
runs = {way: torchlift.measure.in_child(measured, ways[way], path) for way in ways}
rows = {way: child.value for way, child in runs.items()}
assert all(row[2] == rows["torch, afterwards"][2] for row in rows.values())

# %%

for way, (owned, seconds, _) in rows.items():
    print(f"{way:<17} anonymous peak: {owned:.1f} MiB, {seconds:.3f} s")
assert rows["torchlift"][0] < 32 + 80 < 1.8 * 128 < rows["torch, afterwards"][0]

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, panels = plt.subplots(1, 2, figsize=(5.6, 2.6), sharey=True)
labels = "memory owned (MiB)", "time (ms)"
for column, axes in enumerate(panels):
    sizes = [(1, 1000)[column] * row[column] for row in rows.values()]
    axes.barh(list(rows), sizes, color=("C0", "C3", "C1"))
    for y, size in enumerate(sizes):
        axes.text(size, y, f" {size:.0f}", va="center")
    axes.set(xlabel=labels[column], xlim=(0, 1.3 * max(sizes)))
    axes.tick_params(axis="y", length=0)
panels[0].invert_yaxis()
plt.show()

# %%
# *A model of 128 MiB in float32 becomes 32 MiB in int8, in three ways: the most memory that the
# process owns, and the time. Quantised afterwards, it takes two copies of what is thrown away. A
# loop by hand over a mapped file and torchlift's handler take the result, and a weight or two on
# the way.*
#
# For a model like this one the loop is as good. The handler also serves ties, missing names and a
# live model, and is all or nothing.
#
# Remember
# --------
#
# - A weight can be small before the model is there: its floats exist one tensor at a time.
# - ``__torch_dispatch__`` says how a subclass computes, ``module_load`` how it is loaded.
# - The handler is asked for your class only, and what it returns is checked.
#
# Use this when
# -------------
#
# - **A subclass of your own, from plain files:** `torchlift.swap.module_load`.
# - **Only another dtype:** ``dtype=`` of `torchlift.load`, *Load in bfloat16, and keep the norms*.
# - **Quantised tensors of a library:** try `torchlift.load` alone; a class may bring its handler.

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
    print(torchlift.load(model, path), "as", model.weight.dtype)

# %%
# The handler gets the tensor that is in the model and the one that comes from the file, and returns
# what shall be in the model. Your class alone is asked; the bias loads as ever.
#
# A tensor subclass with int8 inside
# ----------------------------------
#
# Each row of a weight gets a scale, its largest number divided by 127. In torch such a weight is a
# *wrapper subclass*, which keeps its data in two tensors. About the smallest one that computes:

from functools import partial

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
# afterwards, while loading, and, torch's best, the loop of the first way over a mapped checkpoint.


def afterwards(path, mapped=False):
    with torch.device("meta" if mapped else "cpu"):
        model = build()
    model.load_state_dict(torch.load(path, mmap=mapped), assign=mapped)
    return model


def while_loading(path):
    model = int8_skeleton()
    with torchlift.swap.module_load(Int8, load_int8):
        torchlift.load(model, path)
    return model


def measured(way, path):
    int8_skeleton()  # torch and torchlift import what they use
    torchlift.measure.mark("start")
    model = way(path)
    for layer in model:
        if not isinstance(layer.weight, Int8):
            small = quantise(layer.weight.detach())
            layer.weight = nn.Parameter(small, requires_grad=False)
    torchlift.measure.mark("ready")
    return [layer.weight.levels.sum(dtype=torch.int64).item() for layer in model]


ways = {"afterwards": afterwards, "while loading": while_loading}
ways["mapped by hand"] = partial(afterwards, mapped=True)
MIB, sums, times, owned = 2**20, [], {}, {}
for name, way in ways.items():
    child = torchlift.measure.in_child(measured, way, path)
    sums.append(child.value)
    start, end = child.memory.marks
    samples = [s for s in child.memory.timeline if start[0] <= s[0] <= end[0]]
    times[name] = [1000 * (s.seconds - start.seconds) for s in samples]
    owned[name] = [(s.anonymous - start.anonymous) / MIB for s in samples]
    print(f"{name:<15} anonymous peak: {max(owned[name]):.1f} MiB")

assert sums[0] == sums[1] == sums[2]
assert max(owned["while loading"]) < 32 + 80 < 1.8 * 128 < max(owned["afterwards"])

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots()
for way, look in zip(owned, ("C0-", "C1-", "C3-."), strict=True):
    axes.plot(times[way], owned[way], look, label=way)
for level, label in (128, "float32"), (32, "int8"):
    axes.axhline(level, color="black", linewidth=1, linestyle=":")
    axes.text(1, level + 3, label, ha="right", transform=axes.get_yaxis_transform())
axes.set_xlim(0, 1.2 * axes.get_xlim()[1])
axes.set(ylim=(0, None), xlabel="time of one run (ms)", ylabel="memory owned (MiB)")
figure.legend(loc="outside upper center", ncols=3, handlelength=1.5)
plt.show()

# %%
# *Memory that the process owns until the model is ready; dotted, the model in float32 and in int8.
# Afterwards takes two copies of what is thrown away; while loading, the result and a tooth for each
# tensor. By hand over a mapped file, dash-dot, takes about as much.*
#
# For a model like this one the loop is as good, and quicker. The handler also serves ties, missing
# names and a live model, and is all or nothing.
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

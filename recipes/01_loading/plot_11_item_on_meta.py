"""
RuntimeError: Tensor.item() cannot be called on meta tensors
============================================================

You build a model on the meta device to save its memory, and the constructor fails. It reads the
value of a tensor, and a tensor on meta lacks one. Must you change the model?

No. A `torchlift.skeleton` runs the constructor as it is. Only the weights go to meta, and each one
when a module registers it.
"""

# %%
# In short
# --------

import torch

import torchlift


def deep(device=None):
    model = torch.nn.Sequential()
    for rate in torch.linspace(0, 0.3, 4, device=device):
        model.append(torch.nn.Linear(4096, 4096))
        model.append(torch.nn.Dropout(rate.item()))
    return model


model = torchlift.skeleton(deep)
print("drop rates:", [round(layer.p, 1) for layer in model[1::2]])
print("weights on:", {str(weight.device) for weight in model.parameters()})

# %%
# The drop rates are numbers, and the weights take no memory yet. `torchlift.load` will fill them.
#
# .item() in a constructor
# ------------------------
#
# A rate that grows with the depth is the usual case, and ``torch.linspace`` is the usual way to
# write it. On the meta device the code fails at the first ``item``, as in `issue 43957
# <https://github.com/huggingface/transformers/issues/43957>`__ of transformers:

try:
    with torch.device("meta"):
        deep()
except RuntimeError as error:
    print(f"{type(error).__name__}: {error}")

# %%
# If the model is yours, you could change it and make the rates with ``device="cpu"``. In a skeleton
# all tensors but the weights are real, so the constructor can read their values. Other reads work
# in the same way:


class Curious(torch.nn.Module):
    def __init__(self):
        super().__init__()
        sizes = torch.tensor([3, 1, 2]).sort().values
        self.sizes = sizes.tolist()
        self.has_one = bool((sizes == 1).any())
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(n, 8) for n in self.sizes
        )


curious = torchlift.skeleton(Curious)
print(curious.sizes, curious.has_one)
print(curious.layers)

# %%
# Proof
# -----
#
# Each of three ways makes the model of the first cell in a new process, before its weights are
# loaded. They build it for real, change the code and build it on meta, or take a skeleton.

from torchlift import skeleton


def build():
    return deep()


def changed_on_meta():
    with torch.device("meta"):
        return deep(device="cpu")


def torchlift_skeleton():
    return skeleton(deep)


# %%

# fold: How each way is measured
from torchlift.measure import in_child, mark


def rates(way):
    torch.linspace(0, 1, 2, device="meta")  # the first imports many modules
    mark("start")
    model = way()
    mark("the model is there")
    return [layer.p for layer in model[1::2]]


added, seconds, answers = {}, {}, []
for way in build, changed_on_meta, torchlift_skeleton:
    child, name = in_child(rates, way), way.__name__
    start, end = child.memory.marks
    added[name] = (end.anonymous - start.anonymous) / 2**20
    seconds[name] = end.seconds - start.seconds
    answers.append(child.value)
    print(
        f"{name:<18} anonymous: {added[name]:4.0f} MiB, {seconds[name]:.4f} s"
    )

assert answers[0] == answers[1] == answers[2]
assert added["build"] > 250
assert added["torchlift_skeleton"] < 16

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, (left, right) = plt.subplots(1, 2, sharey=True, figsize=(5.6, 2.6))
names = [
    "built for real",
    "on meta",
    "on meta, with\nchanged code",
    "torchlift",
]
for axes, values, form in (left, added, ".0f"), (right, seconds, ".3f"):
    first, *others = values.values()
    texts = [format(value, form) for value in values.values()]
    bars = axes.barh(names, [first, 0, *others], color=["C0", "C0", "C3", "C1"])
    axes.bar_label(bars, [texts[0], "RuntimeError", *texts[1:]], padding=3)
    axes.set(xlim=(0, 1.4 * first), xticks=[])
    axes.tick_params(axis="y", length=0)
left.invert_yaxis()
left.set_xlabel("memory owned (MiB)")
right.set_xlabel("time (s)")
plt.show()

# %%
# *The bars show the cost of making the model of the first cell before anything is loaded. Left is
# the memory that the process owns, right the seconds. Built for real, the model takes a copy of the
# weights and the time to initialize them. On meta it fails, unless you change its code. With
# torchlift the code stays as it is, and the cost is about as small.*
#
# Before the measurement, each process makes one ``linspace`` on meta. For the first one torch
# imports sympy, about 30 MiB that do not grow with the model.
#
# Remember
# --------
#
# - On meta a tensor has a shape, but not a value. Any code that reads a value fails.
# - A skeleton runs the constructor for real, and moves each weight to meta when it is registered.
# - The weights stay on meta until a load fills them or `torchlift.materialize` makes them.
#
# Use this when
# -------------
#
# - **The constructor fails on meta, and the model is not yours:** `torchlift.skeleton`.
# - **It has buffers that the file does not contain:** `torchlift.skeleton` too. *Buffers missing
#   after loading on meta: rotary tables and masks are not in the file* explains why.
# - **The model is yours:** make such numbers with plain Python, or with ``device="cpu"``. Then
#   *torch.load with mmap=True, assign=True and the meta device: what each one saves* works too.

# %%
# Question
# --------
#
# A constructor reads the value of a *weight* that it has just registered. Does a skeleton get it?


# fold: Answer to the question
# Yes. The weight is on meta, so the read fails. torchlift then constructs once
# more with real weights, which takes their memory for a moment.
class Reads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.total = self.weight.sum().item()


reads = torchlift.skeleton(Reads)
print("the sum:", reads.total, "- the weight is on", reads.weight.device)
assert reads.total == 3
assert reads.weight.is_meta

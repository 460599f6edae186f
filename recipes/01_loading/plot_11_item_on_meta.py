"""
RuntimeError: Tensor.item() cannot be called on meta tensors
============================================================

You build a model on the meta device to save its memory, and the constructor fails: it asks a tensor
for its value, and a tensor on meta has none. Must you change the model?

No. A `torchlift.skeleton` answers the question: it computes that one tensor, and leaves the weights
on meta.
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
print(model)
print({str(parameter.device) for parameter in model.parameters()})

# %%
# The drop rates are numbers, and no weight takes any memory yet: `torchlift.load` will fill them.
#
# A question in a constructor
# ---------------------------
#
# A rate that grows with the depth is the usual case, and ``torch.linspace`` the usual way to write
# it. On the meta device the code fails at the first ``item``:

try:
    with torch.device("meta"):
        deep()
except RuntimeError as error:
    print(f"{type(error).__name__}: {error}")

# %%
# You could change the model, and make the rates with ``device="cpu"``, if the model is yours. A
# skeleton writes down each call that makes a tensor. When somebody asks for a value, it *replays*
# the calls that led to this one tensor, for real. Other questions are answered in the same way:


class Curious(torch.nn.Module):
    def __init__(self):
        super().__init__()
        sizes = torch.tensor([3, 1, 2]).sort().values
        self.sizes = sizes.tolist()
        self.has_one = bool((sizes == 1).any())
        self.layers = torch.nn.ModuleList(torch.nn.Linear(n, 8) for n in self.sizes)


curious = torchlift.skeleton(Curious)
print(curious.sizes, curious.has_one)
print(curious.layers)

# %%
# Proof
# -----
#
# Three ways to have the model of the first cell before its weights are loaded, each in a new
# process: build it for real, change the code and build it on meta, or take a skeleton.

from torchlift import skeleton
from torchlift.measure import in_child, mark


def rates(model):
    mark("the model is there")
    return [layer.p for layer in model[1::2]]


def build():
    return rates(deep())


def changed_on_meta():
    with torch.device("meta"):
        return rates(deep(device="cpu"))


def torchlift_skeleton():
    return rates(skeleton(deep))


MIB = 2**20
added, answers = {}, []
for way in build, changed_on_meta, torchlift_skeleton:
    child = in_child(way)
    added[way.__name__] = child.memory.added_anonymous / MIB
    answers.append(child.value)
    print(f"{way.__name__:<18} anonymous peak: {added[way.__name__]:4.0f} MiB")

assert answers[0] == answers[1] == answers[2]
assert added["build"] > 250
assert added["torchlift_skeleton"] < 64

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 2.4))
bars = axes.barh(list(added), added.values(), color=["C0", "C3", "C1"])
axes.bar_label(bars, [f"{size:.0f} MiB" for size in added.values()], padding=4)
axes.invert_yaxis()
axes.set(xlim=(0, 340), xlabel="memory owned (MiB)")
plt.show()

# %%
# *The anonymous memory that a process takes to have the model, before anything is loaded. Built for
# real it takes a copy of the weights. On meta with changed code it takes nothing, and as a skeleton
# of the code as it is a small part of a copy.*
#
# That part does not grow with the model, and no weight is in it: it is sympy, which torch imports
# when a process asks for its first ``linspace`` on meta.
#
# Remember
# --------
#
# - On meta a tensor has a shape and no value: whatever asks for one fails.
# - A skeleton replays the history of the tensor that is asked for, and of no other.
# - The weights stay on meta, until a load brings them or `torchlift.materialize` makes them.
#
# Use this when
# -------------
#
# - **The constructor fails on meta, and the model is not yours:** `torchlift.skeleton`.
# - **It has buffers that no file holds:** the same; *Buffers missing after loading on meta: rotary
#   tables and masks are not in the file* tells why.
# - **The model is yours:** make such numbers with plain Python, or with ``device="cpu"``; then
#   *torch.load with mmap=True, assign=True and the meta device: what each one saves* works, too.

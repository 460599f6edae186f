"""
0. Modules and state dicts
==========================

What does a model save, and under which names? The words *parameter*, *buffer*, *state dict* and
*meta* are on every page of this path. On this page you make a small model, look at each of them,
and find out what a state dict leaves out. If you know all that, go on with page 1.

The path: **0. Modules and state dicts** → *1. Look into the file* → *2. Load it into a model* →
*3. Train it, be killed, go on* → *4. Train it on two ranks* → *5. On three ranks, and back to one*
→ *6. Out into a bucket*.
"""

# %%
# A model is a tree of modules
# ----------------------------
#
# This one cleans a signal of eight numbers. It has two layers of PyTorch, and one of its own that
# adds a table of positions:

import torch
from torch import nn


class Positions(nn.Module):
    """Add a fixed wave, which shows the layers where a number stands."""

    def __init__(self):
        super().__init__()
        wave = torch.linspace(0, 3, 8).sin()
        self.register_buffer("wave", wave, persistent=False)

    def forward(self, x):
        return x + self.wave


class Cleaner(nn.Module):
    """Clean a signal of eight numbers."""

    def __init__(self):
        super().__init__()
        self.positions = Positions()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.body(self.positions(x))


torch.manual_seed(0)
model = Cleaner()
for name, module in model.named_modules():
    print(f"{name or '(the model)':<13}{type(module).__name__}")

# %%
# A name is the path of attributes that leads to a module. The names of weights begin with it, and
# this is how a load finds the place of a tensor: ``body.0.weight`` is ``model.body[0].weight``.
#
# Parameters learn, buffers do not
# --------------------------------
#
# A *parameter* is a tensor that the optimizer changes. A *buffer* is a tensor that belongs to the
# model, but is changed by the model's own code, or by nobody. Batch normalisation has three: it
# counts what it has seen. Training once changes both kinds:

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(16, 8)).square().sum().backward()
optimizer.step()

for name, tensor in model.named_parameters():
    print(f"parameter  {name:<27}{tuple(tensor.shape)}")
for name, tensor in model.named_buffers():
    print(f"buffer     {name:<27}{tuple(tensor.shape)}")

# %%
# The state dict: names and tensors
# ---------------------------------
#
# ``state_dict()`` joins them into one dict. Its tensors are not copies, but the memory of the model
# itself, so that a state dict costs nothing:

state = model.state_dict()
print(*state, sep="\n")
weight = state["body.0.weight"]
assert weight.data_ptr() == model.body[0].weight.data_ptr()

# %%
# Two things are missing. ``positions.wave`` was registered with ``persistent=False``, which means
# that the constructor can make it again. ``calls`` is a plain number, and a state dict holds what
# was registered only. The optimizer has a state dict of its own.

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
figure, axes = plt.subplots(figsize=(5.6, 3))
for name, tensor in tensors.items():
    learns, saved = isinstance(tensor, nn.Parameter), name in state
    color = "C1" if learns else "C2" if saved else "white"
    axes.barh(
        name, tensor.nbytes, color=color, edgecolor="C0" if not saved else color
    )
    axes.text(tensor.nbytes + 4, name, f"{tensor.nbytes}", va="center")
axes.set(xlabel="size (bytes)", xlim=(0, 300))
axes.tick_params(axis="y", length=0)
axes.invert_yaxis()
colors = [("C1", "C1"), ("C2", "C2"), ("white", "C0")]
boxes = [plt.Rectangle((0, 0), 1, 1, color=c, ec=edge) for c, edge in colors]
labels = ["parameter", "buffer", "buffer, not saved"]
figure.legend(boxes, labels, loc="outside upper right", ncols=3)
plt.show()

# %%
# *The bars show the bytes of each tensor of the model. Parameters and persistent buffers are in the
# state dict. The wave is part of the model, but the state dict leaves it out.*
#
# Save and load
# -------------
#
# ``torch.save`` writes the dict, and ``load_state_dict`` copies it into a model whose names match.
# If a name is missing, or one is left over, it raises an error that lists them:

import tempfile

path = tempfile.mkdtemp() + "/cleaner.pt"
torch.save(state, path)

again = Cleaner()
print(again.load_state_dict(torch.load(path)))
assert torch.equal(again.body[1].running_mean, model.body[1].running_mean)

try:
    nn.Sequential(nn.Linear(8, 8)).load_state_dict(torch.load(path))
except RuntimeError as error:
    print(str(error).splitlines()[1].strip())

# %%
# Meta: shapes without memory
# ---------------------------
#
# ``Cleaner()`` filled its weights with random numbers, and the load overwrote them. For a large
# model this takes its memory twice. On the device *meta* a tensor has everything but values:

with torch.device("meta"):
    empty = Cleaner()
weight = empty.body[0].weight
print("shape and stride:", tuple(weight.shape), weight.stride())
print("dtype and device:", weight.dtype, weight.device)
print("requires grad:", weight.requires_grad)
print("names are equal:", list(empty.state_dict()) == list(state))

try:
    weight.sum().item()
except RuntimeError as error:
    print(str(error).partition(";")[0])

# %%
# A load can then put tensors into the places, instead of copying values. But look at the buffer
# that no file contains: on meta it has lost its values, and ``assign=True`` does not bring them
# back.

empty.load_state_dict(torch.load(path), assign=True)
print(
    "weights:", empty.body[0].weight.device, "- wave:", empty.positions.wave.device
)

import torchlift

model = torchlift.skeleton(Cleaner)
torchlift.load(model, path)
print("with a skeleton:", model.positions.wave.device, model.positions.wave[:3])

# %%
# `torchlift.skeleton` makes a model on meta, too, and remembers how, so that `torchlift.load` can
# make what the file lacks. Page 2 does this with a real model.
#
# What you learned
# ----------------
#
# - A state dict maps names to tensors. A name is a path of attributes.
# - It contains parameters and persistent buffers. Other buffers, plain attributes and the
#   optimizer's state are not in it.
# - A tensor on meta has a shape, strides and a dtype, but no values.
#
# Exercises
# ---------
#
# **1.** ``calls`` is lost. Which method of ``Cleaner`` makes it a part of the state dict, without a
# buffer? PyTorch calls this *extra state*.

# fold: Solution of exercise 1


class Counter(Cleaner):
    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]


counter = Counter()
counter(torch.randn(16, 8))
torch.save(counter.state_dict(), path)
fresh = torchlift.skeleton(Counter)
torchlift.load(fresh, path)
assert fresh.calls == 1
print(
    "names of extra state:",
    [name for name in counter.state_dict() if "extra" in name],
)

# %%
# **2.** Cast the model with ``half()``. Which tensor of its state dict keeps its dtype, and why?

# fold: Solution of exercise 2

half = Cleaner().half().state_dict()
kept = [name for name, tensor in half.items() if tensor.dtype != torch.float16]
assert kept == ["body.1.num_batches_tracked"]
print(kept, half[kept[0]].dtype, "- a cast changes floating-point tensors only")

# %%
# Next
# ----
#
# Next you read such names and tensors from a file of somebody else: *1. Look into the file*.

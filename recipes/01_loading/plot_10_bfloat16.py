"""
Load a float32 checkpoint in bfloat16, without the float32 copy
===============================================================

The file is float32, you run the model in bfloat16, and it would fit. But it dies on the way: the
weights are loaded in float32 first. Can they shrink while they are loaded?

Yes: `torchlift.load` with ``dtype=`` casts one block at a time, straight out of the file.
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
print(torchlift.plan(model, path, dtype="bfloat16"))
torchlift.load(model, path, dtype="bfloat16")
print(model.weight.dtype)

# %%
# The plan comes first and reads no weights. It says how much memory the load takes at its peak.
#
# What model.to(torch.bfloat16) costs
# -----------------------------------
#
# A model of 256 MiB in float32, half of it in bfloat16. You know three ways without torchlift:
#
# - Load, then ``model.to(torch.bfloat16)``: two float32 copies, before anything gets smaller.
# - Cast the state dict: the whole file in float32, and beside it the half.
# - Map the file, cast one tensor after the other, and assign them to a model on meta. This is the
#   best that torch has.

from torch import nn

from torchlift import load, skeleton
from torchlift.measure import in_child


def build():
    return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(16)])


def bits(model):
    """Add up the bits of all weights, to see that every way makes the same."""
    weights = (p.detach().view(torch.int64) for p in model.parameters())
    return sum(numbers.sum().item() for numbers in weights)


def load_then_cast(path):
    model = build()
    model.load_state_dict(torch.load(path))
    return bits(model.to(torch.bfloat16))


def cast_the_state_dict(path):
    with torch.device("meta"):
        model = build()
    state = {key: tensor.bfloat16() for key, tensor in torch.load(path).items()}
    model.load_state_dict(state, assign=True)
    return bits(model)


def map_and_cast_each(path):
    with torch.device("meta"):
        model = build()
    state = torch.load(path, mmap=True)
    for key, tensor in state.items():
        state[key] = tensor.bfloat16()
    model.load_state_dict(state, assign=True)
    return bits(model)


def torchlift_dtype(path):
    model = skeleton(build)
    load(model, path, dtype="bfloat16")
    return bits(model)


# %%
# Proof
# -----
#
# Each way in a new process. *Anonymous* memory is what the process owns.

path = tempfile.mkdtemp() + "/model.pt"
torch.save(build().state_dict(), path)
size = torchlift.open(path).nbytes
MIB = 2**20

peaks, sums = {}, set()
for way in load_then_cast, cast_the_state_dict, map_and_cast_each, torchlift_dtype:
    child = in_child(way, path)
    peak = peaks[way.__name__] = child.memory.added_anonymous
    sums.add(child.value)
    print(f"{way.__name__:<19} anonymous peak: {peak / MIB:4.0f} MiB")

plan = torchlift.plan(torchlift.skeleton(build), path, dtype="bfloat16")
print(f"the plan:           anonymous peak: {plan.peak_bytes / MIB:4.0f} MiB")
assert len(sums) == 1, "every way makes the same bits"
assert peaks["load_then_cast"] > 1.9 * size
assert peaks["cast_the_state_dict"] > 1.4 * size
assert peaks["torchlift_dtype"] < size / 2 + 64 * MIB

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 2.8))
owned = [peak / MIB for peak in peaks.values()]
bars = axes.barh(list(peaks), owned, color=["C0", "C0", "C3", "C1"])
axes.bar_label(bars, fmt="%.0f", padding=4)
axes.axvline(size / MIB / 2, color="C0", linestyle=":")
axes.invert_yaxis()
axes.set(xlim=(0, 620), xticks=[0, 128, 256, 512])
axes.set_xlabel("memory owned (MiB)")
plt.show()

# %%
# *The most memory that a process owns while it loads a float32 file into a bfloat16 model. The
# dotted line is the model that is left at the end. Casting each mapped tensor takes just that,
# torchlift some buffers more, the two usual ways four and three times as much.*
#
# ``dtype`` also takes a rule: *Load in bfloat16, and keep the norms in float32*. It casts what the
# file has. A buffer that is in no file stays as its constructor makes it, since some have to be
# exact; where your model computes with one in bfloat16, ``model.to(torch.bfloat16)`` casts it, too.
#
# Any other work on each tensor
# -----------------------------
#
# A mapped file is the cheapest place to work on weights: one tensor at a time is in memory, and
# nothing else. ``transform`` gets each on its way into the model. Here it limits their size.


def clamp(key, tensor):
    return tensor.clamp(-0.01, 0.01)


model = torchlift.skeleton(build)
torchlift.load(model, path, transform=clamp)
print(
    f"largest weight in the file:  {torchlift.open(path)['0.weight'].abs().max():.2f}"
)
print(f"largest weight in the model: {model[0].weight.abs().max():.2f}")

# %%
# Remember
# --------
#
# - The peak decides, not what is left: a cast after the load comes too late.
# - Map, cast one tensor, keep the result: that takes the memory of the result.
# - `torchlift.plan` says before the load how much it will take.
#
# Use this when
# -------------
#
# - **You run a float32 checkpoint in half precision:** `torchlift.load` with ``dtype=``.
# - **Some tensors have to stay exact:** `torchlift.remap.by_pattern`.
# - **You load it again and again:** `torchlift.convert` writes the smaller file once.
# - **The weights should become int8:** `torchlift.swap.module_load` says how they are made.

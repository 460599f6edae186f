"""
Load a float32 checkpoint in bfloat16, without the float32 copy
===============================================================

The file is float32, you run the model in bfloat16, and it would fit. But the process dies on the
way, because the weights are loaded in float32 first. Can they shrink while they are loaded?

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
report = torchlift.load(model, path, dtype="bfloat16")
print(model.weight.dtype, f"{model.weight.nbytes / 2**20:.0f} MiB")
print(f"read from the file: {report.bytes_read / 2**20:.0f} MiB of float32")

# %%
# The float32 weights went through a small buffer. No complete float32 tensor was ever in memory.
#
# Memory that model.to(torch.bfloat16) needs
# ------------------------------------------
#
# The model takes 256 MiB in float32 and half of it in bfloat16. You know three ways without
# torchlift:
#
# - Load, then ``model.to(torch.bfloat16)``: two float32 copies exist before anything shrinks.
# - Cast the state dict: the complete file in float32, and the bfloat16 half in addition.
# - Map the file, cast one tensor after the other, and assign them to a model on meta. This is the
#   best that torch has.

from torch import nn

from torchlift import load, skeleton


def build():
    return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(16)])


def load_then_cast(path):
    model = build()
    model.load_state_dict(torch.load(path))
    return model.to(torch.bfloat16)


def cast_the_state_dict(path):
    with torch.device("meta"):
        model = build()
    state = {key: tensor.bfloat16() for key, tensor in torch.load(path).items()}
    model.load_state_dict(state, assign=True)
    return model


def map_and_cast_each(path):
    with torch.device("meta"):
        model = build()
    state = torch.load(path, mmap=True)
    for key, tensor in state.items():
        state[key] = tensor.bfloat16()
    model.load_state_dict(state, assign=True)
    return model


def torchlift_dtype(path):
    model = skeleton(build)
    load(model, path, dtype="bfloat16")
    return model


# %%
# Proof
# -----
#
# By arithmetic, two copies in float32 are 512 MiB, the state dict and its cast are 384 MiB, and the
# result alone is 128 MiB. Each way runs in a new process, three times. The seconds are those of the
# fastest run. *Anonymous* memory is RAM that the process owns. `torchlift.plan` predicts it.

# fold: How each way is measured
from time import perf_counter

from torchlift.measure import in_child, mark

path = tempfile.mkdtemp() + "/model.pt"
torch.save(build().state_dict(), path)
size = torchlift.open(path).nbytes
MIB = 2**20
WAYS = load_then_cast, cast_the_state_dict, map_and_cast_each, torchlift_dtype


def bits(model):
    """Add up the bits of all weights, to check that all ways are equal."""
    weights = (p.detach().view(torch.int64) for p in model.parameters())
    return sum(numbers.sum().item() for numbers in weights)


def three_times(way):
    taken = []
    for _ in range(3):
        start = perf_counter()
        model = way(path)
        taken.append(perf_counter() - start)
        mark("a run has ended")
        total = bits(model)
        del model
    return min(taken), total


peaks, times, sums = {}, {}, set()
for way in WAYS:
    child, name = in_child(three_times, way), way.__name__
    memory = child.memory
    rows = (s for s in memory.timeline if s.seconds < memory.marks[0].seconds)
    peaks[name] = max(row.anonymous for row in rows) - memory.baseline.anonymous
    times[name], total = child.value
    sums.add(total)
    print(f"{name:<19} anonymous peak: {peaks[name] / MIB:4.0f} MiB", end=", ")
    print(f"{times[name]:.3f} s")

plan = torchlift.plan(torchlift.skeleton(build), path, dtype="bfloat16")
print(f"the plan:           anonymous peak: {plan.peak_bytes / MIB:4.0f} MiB")
assert len(sums) == 1, "every way makes the same bits"
assert peaks["load_then_cast"] > 1.9 * size
assert peaks["cast_the_state_dict"] > 1.4 * size
assert peaks["torchlift_dtype"] < size / 2 + 64 * MIB

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, (left, right) = plt.subplots(1, 2, sharey=True, figsize=(5.6, 2.8))
owned = [peak / MIB for peak in peaks.values()]
names = [
    "load, then cast",
    "cast the\nstate dict",
    "map, cast each",
    "torchlift",
]
for axes, values in (left, owned), (right, times.values()):
    form = "%.0f" if axes is left else "%.2f"
    bars = axes.barh(names, values, color=["C0", "C0", "C3", "C1"])
    axes.bar_label(bars, fmt=form, padding=3)
    axes.set(xlim=(0, 1.35 * max(values)), xticks=[])
    axes.tick_params(axis="y", length=0)
left.axvline(size / MIB / 2, color="black", linewidth=1, linestyle=":")
left.invert_yaxis()
left.set_xlabel("memory owned (MiB)")
right.set_xlabel("time to load (s)")
plt.show()

# %%
# *A float32 file of 256 MiB is loaded into a bfloat16 model in four ways. Left, the bars show the
# most memory that the process owns, with a dotted line at the size of the final model. Right, they
# show the seconds of the fastest of three runs. A cast after the load takes four times the final
# size, and a cast of the state dict three times. With torchlift, one argument needs little more
# than the final size, as a loop of map and cast does.*
#
# ``dtype`` also takes a rule: *Load in bfloat16, and keep the norms in float32*.
#
# mat1 and mat2 must have the same dtype
# --------------------------------------
#
# ``dtype`` casts the tensors of the file. A buffer that the file does not contain stays in float32,
# because the constructor makes it, and some buffers have to be exact. If the model multiplies it by
# bfloat16 values, the forward pass fails with *mat1 and mat2 must have the same dtype*. Cast the
# skeleton before the load instead, ``torchlift.skeleton(build).bfloat16()``, and leave out
# ``dtype``: the load then keeps the types of the skeleton, for its buffers also.
#
# Change each tensor while it is loaded
# -------------------------------------
#
# A mapped file is the cheapest place to change weights, because only one tensor at a time is in
# memory. ``transform`` gets each tensor on its way into the model. Here it limits the size of the
# weights.


def clamp(key, tensor):
    return tensor.clamp(-0.01, 0.01)


model = torchlift.skeleton(build)
torchlift.load(model, path, transform=clamp)
print(
    f"largest weight in the file:  "
    f"{torchlift.open(path)['0.weight'].abs().max():.2f}"
)
print(f"largest weight in the model: {model[0].weight.abs().max():.2f}")

# %%
# Remember
# --------
#
# - The peak decides whether the load fits. A cast after the load comes too late.
# - Map the file, cast one tensor, keep the result. That takes only the memory of the result.
# - `torchlift.plan` predicts the memory before the load.
#
# Use this when
# -------------
#
# - **You run a float32 checkpoint in half precision:** `torchlift.load` with ``dtype=``.
# - **Some tensors have to stay exact:** `torchlift.remap.by_pattern`.
# - **You load it again and again:** `torchlift.convert` writes the smaller file once.
# - **The weights should become int8:** `torchlift.swap.module_load` registers how they are made.

# %%
# Question
# --------
#
# You save the bfloat16 model, and load it in float32 later. How far are the weights from the old
# ones?

# fold: Answer to the question
# By up to one part in 256. The eight binary digits do not grow again.
weight = torchlift.open(path)["0.weight"]
back = weight.bfloat16().float()
off = ((back - weight).abs() / weight.abs().clamp_min(1e-9)).max().item()
print(f"off by at most one part in {1 / off:.0f}")
assert off <= 2**-8

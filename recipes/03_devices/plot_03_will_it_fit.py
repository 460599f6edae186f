"""
Will this model fit on my GPUs?
===============================

The model has 70 billion parameters. You can have two GPUs with 80 GiB each, or one with 24 GiB and
a large host. Does it fit, in which dtype, and which layer goes where? You want to know before you
download 131 GiB and rent the machine.

`torchlift.remap.fit` needs only names, shapes and dtypes: no weights, no memory and no GPU.
"""

# %%
# In short
# --------

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import torchlift

shape = {"hidden_size": 8192, "intermediate_size": 28672}
shape |= {"num_hidden_layers": 80, "num_attention_heads": 64}
shape |= {"num_key_value_heads": 8, "vocab_size": 128256}
model = torchlift.skeleton(LlamaForCausalLM, LlamaConfig(**shape))
gpus = {"cuda:0": "80GiB", "cuda:1": "80GiB"}
two_gpus = torchlift.remap.fit(model, gpus, dtype=torch.bfloat16)
print(two_gpus)

# %%
# It fits. Devices are filled in the order in which you give them, with the layers in the order in
# which they run. The result is a rule for ``device=`` of `torchlift.load`.
#
# CUDA out of memory, after minutes
# ---------------------------------
#
# You can multiply: 70.6 billion parameters of four bytes are 263 GiB. The product does not show
# which layer goes where, or whether complete layers fit. A GPU fills up for minutes, and then the
# error is *CUDA out of memory*. Without a dtype, ``fit`` counts float32, as configured:


def why_not(model, budgets, **options):
    try:
        torchlift.remap.fit(model, budgets, **options)
    except torchlift.PlacementError as error:
        print(error)


why_not(model, gpus)

# %%
# The message lists the bytes to place, the bytes on each GPU, the bytes left over, and the next
# module.
#
# How many GPUs in float32, bfloat16, float8?
# -------------------------------------------
#
# ``dtype=`` is a dtype or a rule, as in `torchlift.load`. The last rule keeps the norms in
# bfloat16.

GIB, float8 = 2**30, {"norm": torch.bfloat16, "": torch.float8_e4m3fn}
float8 = torchlift.remap.by_pattern(float8)
eight = {f"cuda:{number}": "80GiB" for number in range(8)}
dtypes = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8": float8,
}
for name, dtype in dtypes.items():
    found = torchlift.remap.fit(model, eight, dtype=dtype)
    count = sum(nbytes > 0 for nbytes in found.used.values())
    print(f"{name:<9} {found.nbytes / GIB:6.1f} GiB on {count} of 8 GPUs")

# %%
# This counts memory alone. It does not check whether your kernels compute in float8.
#
# A budget is not the size of the GPU
# -----------------------------------
#
# A GPU holds more than weights. While the model writes text, each token adds a key and a value in
# every layer, two bytes for each number. They are stored on the GPU of that layer:

# fold: Count the layers on each GPU, and the tokens that fit in its free memory
from collections import Counter

width = shape["hidden_size"] // shape["num_attention_heads"]
token = (
    2 * 2 * width * shape["num_key_value_heads"] * shape["num_hidden_layers"]
)
homes = (two_gpus.at(f"model.layers.{n}.mlp.up_proj.weight") for n in range(80))
room = {}
for gpu, layers in Counter(homes).items():
    room[gpu] = (80 * GIB - two_gpus.used[gpu]) // (layers * token // 80)
    print(f"{gpu}: {layers} layers, room for {room[gpu]:,} tokens")
print(f"a token: {token / 1024:.0f} KiB; room for {min(room.values()):,}")

# %%
# The first GPU is nearly full, so there is room for a few thousand tokens, even if the second GPU
# has more left. Keep 16 GiB back on each for a batch of long texts, and the model does not fit:

why_not(model, {"cuda:0": "64GiB", "cuda:1": "64GiB"}, dtype=torch.bfloat16)

# %%
# One small GPU, the host, the disk
# ---------------------------------
#
# ``"disk"`` takes the layers that fit nowhere else. `torchlift.load` leaves them in the file,
# mapped.

budgets = {"cuda:0": "24GiB", "cpu": "64GiB", "disk": None}
small_gpu = torchlift.remap.fit(model, budgets, dtype=torch.bfloat16)
print(small_gpu)
away = (small_gpu.used["cpu"] + small_gpu.used["disk"]) / GIB
print(f"carried to the GPU for each token: {away:.1f} GiB")
print(f"at 25 GiB/s: {away / 25:.1f} seconds a token")

# %%
# It fits, but it is slow. Layers on the host or the disk are copied to the GPU to run, and removed
# again. The GPU keeps room free for the largest of these layers, here the head.
#
# Proof
# -----
#
# Does it really need so little memory and time? A new process runs it five times and prints the
# median, the least and the most. Then each device's bytes are counted again, from the names.

# fold: How it is measured, and counted again
from timeit import repeat


def fit():
    skeleton = torchlift.skeleton(LlamaForCausalLM, LlamaConfig(**shape))
    return torchlift.remap.fit(skeleton, gpus, dtype=torch.bfloat16).used


def fit_and_time():
    return fit(), sorted(repeat(fit, number=1, repeat=5))


child = torchlift.measure.in_child(fit_and_time)
answer, (least, _, middle, _, most) = child.value
assert answer == two_gpus.used
assert child.memory.added_anonymous < 200 * 2**20

one_gpu = torchlift.remap.fit(model, {"cuda:0": "80GiB"}, dtype=float8)
for found, nbytes in (two_gpus, 2), (small_gpu, 2), (one_gpu, 1):
    counted = dict.fromkeys(found.budgets, 0)
    for name, tensor in model.named_parameters():
        size = 2 if "norm" in name else nbytes
        counted[found.at(name)] += size * tensor.numel()
    for device, budget in found.budgets.items():
        # The rest is a buffer that the file does not contain.
        buffer = found.used[device] - counted[device]
        assert 0 <= buffer < 4096
        kept = found.reserved.get(device, 0)
        assert budget is None or counted[device] + kept <= budget

# %%

print(f"skeleton of {model.num_parameters():,} parameters, and fit:")
print(f"{middle:.3f} s ({least:.3f} s to {most:.3f} s)")
print(f"anonymous peak: {child.memory.added_anonymous / 2**20:.1f} MiB")

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 4.0))
machines = {"bfloat16": two_gpus, "float8": one_gpu, "bfloat16 ": small_gpu}
row, labels = 0.0, {}
for dtype, found in machines.items():
    for device, budget in found.budgets.items():
        used = found.used[device] / GIB
        kept = found.reserved.get(device, 0) / GIB
        size = used if budget is None else budget / GIB
        axes.barh(row, size, color="white", edgecolor="C0")
        axes.barh(row, used, color="C1")
        axes.barh(
            row, kept, left=size - kept, color="C0", hatch="////", ec="white"
        )
        note = f"{used:.0f} GiB" + ("" if budget is None else f" of {size:.0f}")
        axes.text(size + 1, row, note, va="center")
        labels[row] = f"{dtype.strip()}, {device}"
        row += 1
    row += 0.6
axes.set_yticks(list(labels), labels.values())
axes.set(xlim=(0, 110), xticks=range(0, 81, 20), xlabel="memory (GiB)")
axes.invert_yaxis()
axes.tick_params(axis="y", length=0)
plt.show()

# %%
# *Each bar is a device, for a model of 70 billion parameters. The machines have two large GPUs, one
# large GPU, and a small GPU with a host and a disk. The frame is the budget, orange are the
# weights, and hatched is the space that stays free for visiting layers. In bfloat16 two GPUs have
# room left, in float8 one is enough. With a small GPU most of the model is on the host and the
# disk.*
#
# Remember
# --------
#
# - Whether a model fits depends on names, shapes and dtypes. ``fit`` answers in a moment.
# - Count in the dtype that you will load, and keep memory free for the running model.
# - Layers, ties and shared memory stay together. Layers on the host or the disk are copied to the
#   GPU for each pass.
#
# Use this when
# -------------
#
# - **You choose a machine:** `torchlift.remap.fit` on a skeleton, with budgets of several.
# - **You have a file and no code:** ``torchlift plan FILE --budget cuda:0=24GiB --budget disk``.
# - **You have the machine:** pass the map as ``device=`` of `torchlift.load`. Then read *Run a
#   model that is larger than memory*.
# - **A block must stay on one device:** ``no_split=["LlamaDecoderLayer"]`` of
#   `torchlift.remap.fit`.

# %%
# Question
# --------
#
# Which of these single GPUs holds the weights in bfloat16: 96, 141 or 192 GiB?

# fold: Answer to the question
# 70.6 billion parameters of two bytes are 131 GiB, so the second one does.
for size in (96, 141, 192):
    try:
        budget = {"cuda:0": f"{size}GiB"}
        torchlift.remap.fit(model, budget, dtype=torch.bfloat16)
    except torchlift.PlacementError:
        print(f"{size} GiB: too small")
    else:
        print(f"{size} GiB: fits")
assert 96 < model.num_parameters() * 2 / GIB < 141

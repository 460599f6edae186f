"""
DeepSeek FP8 weights to bfloat16, without a GPU
===============================================

The weights are FP8, with a second tensor of scales, and your machine computes in bfloat16. A plain
cast gives other weights, and the usual script needs a GPU. How do you convert them on a laptop?

`torchlift.convert` hands one tensor at a time to a ``transform=``, which multiplies its codes by
their scales. It needs blocks of about 32 MiB and one tensor, whatever the size of the model.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

old, new = (f"{tempfile.mkdtemp()}/{n}.safetensors" for n in ("fp8", "bf16"))
codes = torch.full((256, 128), 2.0).to(torch.float8_e4m3fn)
torchlift.save({"weight": codes, "weight_scale_inv": torch.ones(2, 1) / 4}, old)


def apply_scale(key, codes):
    scale = torchlift.open(old)[f"{key}_scale_inv"].repeat_interleave(128, 0)
    return codes.float() * scale.repeat_interleave(128, 1)


options = {"exclude": ["*_scale_inv"], "dtype": "bfloat16"}
torchlift.convert(old, new, transform=apply_scale, **options)
print(torchlift.open(new)["weight"][0, :3])

# %%
# Each scale belongs to a block of 128 x 128 codes, so 2 x 0.25 becomes 0.5. ``exclude`` leaves the
# scales out of the new file, which does not need them any more.
#
# A plain cast of FP8 gives other weights
# ---------------------------------------
#
# Here is a set of shards with the names of DeepSeek-V3, smaller and with random weights. It is
# quantised as DeepSeek does: a scale maps the largest number of its block to 448, the largest
# number of FP8. The 576 rows of ``kv_a_proj_with_mqa`` end in the middle of a block.

# fold: Shards with the names of DeepSeek, and their blocks
from pathlib import Path

from torch.nn import functional

torch.manual_seed(0)
SHAPES = {
    "self_attn.kv_a_proj_with_mqa": (576, 1024),
    "mlp.gate_proj": (4096, 1024),
    "mlp.up_proj": (4096, 1024),
    "mlp.down_proj": (1024, 4096),
}


def quantise(weight):
    """Return codes, and a scale for each block of 128 x 128."""
    height, width = weight.shape
    padded = functional.pad(weight, (0, -width % 128, 0, -height % 128))
    blocks = padded.view(
        padded.shape[0] // 128, 128, padded.shape[1] // 128, 128
    )
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).view_as(padded)[:height, :width]
    return codes.to(torch.float8_e4m3fn).contiguous(), scales


folder = Path(tempfile.mkdtemp())
fp8 = folder / "fp8/model.safetensors.index.json"
bf16 = folder / "bf16.safetensors"
state, original = {}, {}
for layer in range(6):
    norm = torch.ones(1024, dtype=torch.bfloat16)
    state[f"model.layers.{layer}.input_layernorm.weight"] = norm
    for part, shape in SHAPES.items():
        key = f"model.layers.{layer}.{part}.weight"
        original[key] = torch.randn(shape) * torch.rand(shape[0], 1) / 16
        state[key], state[f"{key}_scale_inv"] = quantise(original[key])
report = torchlift.save(state, fp8, max_shard_size="40MB")

# %%
# A cast by hand works without an error. It turns the codes into numbers, and forgets the scales.
# `torchlift.convert` refuses it, and its error has the way out:

key = "model.layers.0.mlp.up_proj.weight"
for name, tensor in ("weight", original[key]), ("cast", state[key].bfloat16()):
    print(
        f"{name:<7}", *(f"{number:10.5f}" for number in tensor[0, :4].tolist())
    )
try:
    torchlift.convert(fp8, bf16, dtype="bfloat16")
except torchlift.PlacementError as error:
    print(error.reason, error.hint, sep="\n")

# %%
# Multiply one row of blocks after the other
# ------------------------------------------
#
# ``codes.float()`` of a large matrix takes four times its bytes. Here the transform multiplies 128
# rows at a time, which share a row of scales. It returns everything without scales unchanged. The
# scales may be in another shard than their codes, because ``ckpt`` is the complete set.


def apply_scales(ckpt):
    """Return a transform that multiplies codes by their blocks' scales."""

    def multiply(key, codes):
        if f"{key}_scale_inv" not in ckpt:
            return codes
        weight = torch.empty(codes.shape, dtype=torch.bfloat16)
        rows = zip(codes.split(128), weight.split(128), strict=True)
        for (part, to), scales in zip(
            rows, ckpt[f"{key}_scale_inv"], strict=True
        ):
            wide = scales.repeat_interleave(128)[: len(part[0])]
            to.copy_(part.float() * wide)
        return weight

    return multiply


def by_torchlift(src, dst):
    with torchlift.open(src) as ckpt:
        transform = apply_scales(ckpt)
        torchlift.convert(
            ckpt, dst, transform=transform, exclude=["*_scale_inv"]
        )


by_torchlift(fp8, bf16)

# %%
# The formula is short. The weight at row i and column j is its code, times a scale. Its row and
# column are i / 128 and j / 128, rounded down. Each new weight equals it, to the bit:

new = torchlift.open(bf16)
for key in original:
    i, j = (torch.arange(size) // 128 for size in state[key].shape)
    expected = state[key].float() * state[f"{key}_scale_inv"][i[:, None], j]
    assert torch.equal(new[key], expected.bfloat16())
assert not [key for key in new if "scale" in key]
print(f"{len(original)} weights equal the formula")

# %%
# Proof
# -----
#
# Three ways write the same weights, each in a new process. By hand you collect the results for
# ``save_file``: those of all shards, or, at best, of one shard after the other. ``load_file`` maps
# the codes, so they take no *anonymous* memory, which is RAM that the process owns.

# fold: Three ways to convert, and their memory
from safetensors.torch import load_file, save_file

shards = sorted(fp8.parent.glob("*.safetensors"))


def by_hand(names, dst):
    codes = {
        key: tensor
        for shard in shards
        for key, tensor in load_file(shard).items()
    }
    transform = apply_scales(codes)
    kept = [key for key in names if not key.endswith("_scale_inv")]
    save_file({key: transform(key, codes[key]) for key in kept}, dst)


def all_at_once(src, dst):
    by_hand([key for shard in shards for key in load_file(shard)], dst)


def shard_by_shard(src, dst):
    dst.mkdir()
    for shard in shards:
        by_hand(load_file(shard), dst / shard.name)


WAYS = {
    "by hand, one file": all_at_once,
    "by hand, in shards": shard_by_shard,
    "torchlift.convert": by_torchlift,
}
peaks = {}
for name, way in WAYS.items():
    written = folder / way.__name__
    in_one = written.with_suffix(".safetensors")
    dst = written if way is shard_by_shard else in_one
    child = torchlift.measure.in_child(way, fp8, dst)
    peaks[name] = child.memory.added_anonymous / 2**20
    print(f"{name:<18} anonymous peak: {peaks[name]:4.0f} MiB")
    assert torchlift.diff(bf16, dst).equal
assert peaks["torchlift.convert"] < 64
size = bf16.stat().st_size / 2**20
print(f"the new file: {size:.0f} MiB")

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 2.2))
bars = axes.barh(list(peaks), list(peaks.values()), color=["C0", "C3", "C1"])
axes.bar_label(bars, [f"{peak:.0f} MiB" for peak in peaks.values()], padding=4)
axes.axvline(size, color="black", linewidth=1, linestyle=":")
axes.invert_yaxis()
axes.set(
    xlabel="peak of anonymous memory (MiB)",
    xlim=(0, 1.25 * max(peaks.values())),
)
plt.show()

# %%
# *The bars show the most memory that a process owns while FP8 weights become bfloat16. The dotted
# line is the size of the new file. By hand you own all results of a file before you can save it. A
# real shard of DeepSeek-V3 has about 4 GB, and its results twice as much. With torchlift.convert
# you own one tensor and a few blocks, so the size of the model and of its shards does not matter.*
#
# Remember
# --------
#
# - FP8 codes mean nothing without their scales. A cast by hand drops them without an error.
# - ``transform=`` applies the scales, and ``exclude=["*_scale_inv"]`` leaves them out of the file.
# - A ``config.json`` beside the weights still has ``quantization_config``: remove that entry.
#
# Use this when
# -------------
#
# - **You want a file in bfloat16:** `torchlift.convert`. Results wait in a temporary file, so the
#   disk needs room for them twice.
# - **You want the model only:** `torchlift.load` takes the same ``transform`` and ``exclude``.
# - **You need int8:** *Quantise to int8 while loading, without the float32 model in memory*.
# - **They are GGUF:** *GGUF to transformers: right names, wrong attention*.

# %%
# Question
# --------
#
# By how much does the file grow when FP8 becomes bfloat16?

# fold: Answer to the question
# By a little less than two: two bytes in place of one, and the scales are gone.
ratio = torchlift.open(bf16).nbytes / torchlift.open(fp8).nbytes
print(f"{ratio:.3f} times the bytes")
assert 1.9 < ratio < 2

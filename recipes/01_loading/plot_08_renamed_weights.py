"""
My model renamed its weights
============================

The file holds every expert by itself, and the model has them all in one tensor. Or the file has q,
k and v in one matrix, and the model has three. How do you load what is only divided otherwise?

With a rename that merges or splits: ``rename=remap.transformers(model)`` where the library has such
a table, and ``remap.merge`` and ``remap.split`` for your own.
"""

# %%
# In short
# --------

import tempfile

import transformers

import torchlift

scratch = tempfile.TemporaryDirectory(prefix="torchlift-")
sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256}
moe = {"head_dim": 16, "moe_intermediate_size": 64, "num_experts": 8}
config = transformers.Qwen3MoeConfig(**sizes, **moe)
transformers.logging.disable_progress_bar()
transformers.Qwen3MoeForCausalLM(config).save_pretrained(scratch.name)
model = torchlift.skeleton(transformers.Qwen3MoeForCausalLM, config)
rename = torchlift.remap.transformers(model)
report = torchlift.load(model, scratch.name, rename=rename)
print(f"{len(report.merged)} tensors of", sum(map(len, report.merged.values())))

# %%
# Four tensors of the model were put together of 48 in the file.
#
# Why the names do not fit
# ------------------------
#
# Since version 5, ``transformers`` computes all experts of a layer in one product, from one tensor.
# Files stay as they always were: one matrix per expert, under its own name. So the file that the
# library has just written does not fit the model that it was written from.

import textwrap
from pathlib import Path

import torch

from torchlift import remap

folder = Path(scratch.name)
file = folder / "model.safetensors"


def show(error):
    """Print the type and the message of an error, in short lines."""
    text = " ".join(
        f"{type(error).__name__}: {error}".replace(f"{folder}/", "").split()
    )
    print(textwrap.fill(textwrap.shorten(text, 420), 76, subsequent_indent="  "))


with torchlift.open(file) as ckpt:
    in_file = [key for key in ckpt if "layers.0.mlp.experts" in key]
    print(
        "in the file: ",
        len(in_file),
        "such as",
        in_file[0],
        ckpt.entries[in_file[0]].shape,
    )
in_model = {
    name: p
    for name, p in model.named_parameters()
    if "layers.0.mlp.experts" in name
}
for name, parameter in in_model.items():
    print("in the model:", name, tuple(parameter.shape))
try:
    torchlift.load(
        torchlift.skeleton(transformers.Qwen3MoeForCausalLM, config), file
    )
except torchlift.MismatchError as error:
    show(error)
    print(error.hint)

# %%
# ``from_pretrained`` hides this: it has a table of such conversions, and applies it while it
# loads. `torchlift.remap.transformers` reads the same table, for the model that you give it. What
# comes out is the same, bit for bit.

reference = transformers.Qwen3MoeForCausalLM.from_pretrained(folder).state_dict()
loaded = model.state_dict()
same = [torch.equal(loaded[name], reference[name]) for name in reference]
print(f"equal to from_pretrained: {sum(same)} of {len(same)} tensors")
assert all(same)

# %%
# Your own rule: merge
# --------------------
#
# What the table says of this model, you can say yourself. In a pattern ``*`` stands for any text,
# and ``{...}`` for the number of a list's member. So one line covers all layers and all experts.
# The members are stacked, and what two patterns gave is concatenated behind each other.

experts = "*.experts.{expert}."
fuse = remap.merge(
    [experts + "gate_proj.weight", experts + "up_proj.weight"],
    "*.experts.gate_up_proj",
    stack=0,
    cat=1,
) | remap.merge(experts + "down_proj.weight", "*.experts.down_proj", stack=0)

by_hand = torchlift.skeleton(transformers.Qwen3MoeForCausalLM, config)
plan = torchlift.plan(by_hand, file, rename=fuse)
print("to read:", plan.bytes_to_read, "bytes")
report = torchlift.load(by_hand, file, rename=fuse)
for name in in_model:
    names = report.loaded[name].entries
    print(f"{name}: {len(names)} tensors")
    print(f"  {names[0]}\n  ... {names[-1]}")
weights = by_hand.state_dict()
print(
    "equal:", all(torch.equal(weights[name], reference[name]) for name in reference)
)
assert plan.bytes_to_read == report.bytes_read

# %%
# Every byte of an expert is read once, straight into its slice of the one tensor. What the rule
# leaves alone stays mapped from the file, and is not in this number.
#
# Your own rule: split
# --------------------
#
# The other direction is a file that has q, k and v in one matrix. With grouped attention they are
# not equally large: ``sizes`` are their proportions.

from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(64, 64, bias=False)
        self.k = nn.Linear(64, 32, bias=False)
        self.v = nn.Linear(64, 32, bias=False)


fused = torch.randn(128, 64)
torch.save({"qkv.weight": fused}, folder / "fused.pt")
divide = remap.split("qkv.*", ["q.*", "k.*", "v.*"], chunk=0, sizes=(2, 1, 1))

attention = torchlift.skeleton(Attention)
report = torchlift.load(attention, folder / "fused.pt", rename=divide)
print(report.split)
print("bytes read:", report.bytes_read)
rows = [layer.weight for layer in (attention.q, attention.k, attention.v)]
print("equal:", torch.equal(torch.cat(rows), fused))

# %%
# Nothing was read: rows that follow each other in the file are three views of its map. Every rule
# knows its way back, and rules compose with ``|``:

print(divide.reversed())
print(*str(fuse.reversed()).split(" | "), sep="\n| ")

# %%
# A merge that lacks a member says which one, before the model has changed:

with torchlift.open(file) as ckpt:
    lacking = {
        key: ckpt[key] for key in ckpt if "layers.1.mlp.experts.5.up" not in key
    }
try:
    torchlift.load(by_hand, lacking, rename=fuse)
except torchlift.MismatchError as error:
    show(error)

# %%
# What it costs
# -------------
#
# A model with 96 MiB in its experts, in a fresh process each: the library's own way, and with the
# table as a rename. Both own the merged experts afterwards, so nothing can take less than that.

from torchlift.distributed import on_ranks

MIB = 2**20
wide = {**sizes, **moe, "hidden_size": 512, "moe_intermediate_size": 1024}
config = transformers.Qwen3MoeConfig(**wide)
large = folder / "large"
big = transformers.Qwen3MoeForCausalLM(config)
big.save_pretrained(large)
merged = sum(p.nbytes for name, p in big.named_parameters() if "experts" in name)
del big


def measured(path, way):
    """Load the model in this process; return the bytes that it took at the peak."""
    import torch
    import transformers

    import torchlift
    from torchlift import measure, remap

    torch.set_num_threads(2)
    transformers.logging.disable_progress_bar()
    kind = transformers.Qwen3MoeForCausalLM
    config = transformers.Qwen3MoeConfig.from_pretrained(path)
    for _ in range(2):  # the first time also loads what the library imports
        with measure.memory() as use:
            if way == "from_pretrained":
                model = kind.from_pretrained(path)
            else:
                model = torchlift.skeleton(kind, config)
                torchlift.load(model, path, rename=remap.transformers(model))
        del model
    return use.added_anonymous


peaks = {
    way: on_ranks(1, measured, str(large), way)[0]
    for way in ("from_pretrained", "torchlift")
}
for way, nbytes in peaks.items():
    print(f"{way:<16} anonymous peak: {nbytes / MIB:.0f} MiB")
print(f"merged experts: {merged / MIB:.0f} MiB")
print("no second copy:", peaks["torchlift"] < merged + 64 * MIB)
assert peaks["torchlift"] < merged + 64 * MIB

# %%
# The picture
# -----------

import matplotlib.pyplot as plt

GRAY, TEAL, RUST = "#5b6470", "#2b6f77", "#b83a16"
plt.rcParams.update({"figure.facecolor": "white", "font.size": 12})
with torchlift.open(file) as ckpt:
    entries = [ckpt.entries[key] for key in in_file]
entries.sort(key=lambda entry: entry.chunks[0].offset)
names = list(in_model)
figure, axes = plt.subplots(figsize=(7.2, 5.2), layout="constrained")
STYLES = {"gate": (TEAL, ""), "up": (TEAL, "//"), "down": (RUST, "")}
nbytes = sum(entry.nbytes for entry in entries)
placed, at = {}, 0
for entry in entries:
    placed[entry.key] = (at, at + entry.nbytes)
    at += entry.nbytes
target, top = {}, 0
for name in names:
    for expert in range(8):
        kinds = ("gate", "up") if "gate_up" in name else ("down",)
        for kind in kinds:
            key = f"model.layers.0.mlp.experts.{expert}.{kind}_proj.weight"
            size = placed[key][1] - placed[key][0]
            target[key] = (top, top + size)
            top += size
    top += 0.06 * nbytes
curve = torch.linspace(0, 1, 40)
bend = (3 * curve**2 - 2 * curve**3).numpy()
for key, (low, high) in placed.items():
    color, hatch = STYLES[key.split(".")[-2].removesuffix("_proj")]
    low_to, high_to = target[key]
    for x, start, stop in ((0, low, high), (1, low_to, high_to)):
        axes.bar(x, stop - start, bottom=start, width=0.2, color=color, hatch=hatch,
                 edgecolor="white", linewidth=0.8)  # fmt: skip
    x = 0.1 + curve.numpy() * 0.8
    bottom, above = low + bend * (low_to - low), high + bend * (high_to - high)
    axes.fill_between(x, bottom, above, color=color, alpha=0.2, linewidth=0.3)
for label, place in (("gate_up_proj", 0.33), ("down_proj", 0.87)):
    axes.text(1.13, place * nbytes, label, va="center")
axes.set_xticks([0, 1], ["the file\n24 tensors", "the model\n2 tensors"])
axes.set(
    xlim=(-0.2, 1.5),
    yticks=[],
    ylabel=f"bytes ({nbytes / 1024:.0f} KiB, one layer)",
)
axes.invert_yaxis()
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plt.show()

# %%
# *The experts of one layer. Left, in the order of the file: down (rust), gate (teal) and up
# (hatched) of each expert. Right, in the order of the two tensors of the model. A band leads from a
# tensor's place in the file straight to its place in memory.*

scratch.cleanup()

# %%
# Remember
# --------
#
# - A merge or a split changes how tensors are divided, not their values: it is a rename.
# - Every source is read once, straight into place. What is split along rows stays mapped.
# - ``report.merged`` and ``report.split`` say which key gave what.
#
# Use this when
# -------------
#
# - **A model of transformers:** `torchlift.remap.transformers`.
# - **Many to one:** `torchlift.remap.merge`.
# - **One to many:** `torchlift.remap.split`.
# - **Other names only:** `torchlift.remap.strip` and `torchlift.remap.rules`.
# - **A part that the file lacks:** the recipe on a new head.

"""
Rename, split and merge the weights of a checkpoint, and back again
===================================================================

One project saves its experts one by one and q, k and v in one matrix; another fuses the experts and
keeps q, k and v apart. How does a checkpoint get from one layout to the other, and do you know that
nothing was lost?

By one rule for `torchlift.convert`; the rule's ``reversed()`` leads back, and `torchlift.diff` says
that both ends are equal.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift
from torchlift import remap

folder = tempfile.mkdtemp()
ours, theirs = folder + "/ours.safetensors", folder + "/theirs.safetensors"
torchlift.save({"blocks.0.qkv.weight": torch.randn(96, 32)}, ours)
rule = remap.split(
    "*.qkv.weight", ["*.q.weight", "*.k.weight", "*.v.weight"], chunk=0
)
torchlift.convert(ours, theirs, rename=rule)
print({key: entry.shape for key, entry in torchlift.open(theirs).entries.items()})
torchlift.convert(theirs, folder + "/back.safetensors", rename=rule.reversed())
print("equal:", torchlift.diff(ours, folder + "/back.safetensors").equal)

# %%
# ``*`` stands for any text, and is put into the new names. `torchlift.remap.merge` is the other
# direction: ``stack`` for the members of a list, ``cat`` for what follows each other.
#
# Why
# ---
#
# By hand this is a loop over all keys that holds both layouts in memory, with a regular expression
# for every kind of weight. Its mistakes are quiet: an expert that is not there, numbers sorted as
# text (``10`` before ``2``), a matrix concatenated along the wrong dimension of the right size.
#
# Here is a small mixture of experts, twelve of them to a layer, as one project saves it:

torch.manual_seed(0)
state = {}
for layer in range(2):
    name = f"model.layers.{layer}"
    state[f"{name}.attention.qkv.weight"] = torch.randn(96, 32)
    state[f"{name}.norm.gamma"] = torch.randn(32)
    for expert in range(12):
        for part, shape in {"w1": (64, 32), "w2": (32, 64), "w3": (64, 32)}.items():
            key = f"{name}.experts.{expert}.{part}.weight"
            state[key] = torch.randn(shape)
torchlift.save(state, ours)
print(len(state), "tensors")

# %%
# The other project has one tensor for all gate and up projections of a layer, one for all down
# projections, q, k and v apart, and another name for the norm. The rule says just that, joined by
# ``|``; ``{expert}`` stands for a number, and numbers are numbers:

gate_up = ["*.experts.{expert}.w1.weight", "*.experts.{expert}.w3.weight"]
down = "*.experts.{expert}.w2.weight"
qkv = [f"*.self_attn.{part}_proj.weight" for part in "qkv"]
rule = (
    remap.merge(gate_up, "*.experts.gate_up_proj", stack=0, cat=1)
    | remap.merge(down, "*.experts.down_proj", stack=0)
    | remap.split("*.attention.qkv.weight", qkv, chunk=0)
    | remap.merge("*.norm.gamma", "*.norm.weight", cat=0)
)
report = torchlift.convert(ours, theirs, rename=rule, overwrite=True)
for key, entry in torchlift.open(theirs).entries.items():
    if "layers.0" in key:
        print(f"{key:<40} {entry.shape}")

# %%
# An expert that is missing is an error that names it, before anything is written:

holes = {key: value for key, value in state.items() if "experts.10.w2" not in key}
torchlift.save(holes, folder + "/holes.safetensors")
try:
    torchlift.convert(
        folder + "/holes.safetensors", theirs, rename=rule, overwrite=True
    )
except torchlift.MismatchError as error:
    print(str(error).replace(folder, "FOLDER"))

# %%
# The same rule loads a file of the one layout into a model of the other, without a converted copy:
# ``torchlift.load(model, ours, rename=rule)``. Each value is read once, into its place.
#
# Proof
# -----
#
# Against torch's own operations, and then back, with the reversed rule:

with torchlift.open(theirs) as ckpt:
    for layer in range(2):
        name = f"model.layers.{layer}"
        pairs = [
            torch.cat(
                [
                    state[f"{name}.experts.{i}.{part}.weight"]
                    for part in ("w1", "w3")
                ]
            )
            for i in range(12)
        ]
        assert torch.equal(ckpt[f"{name}.experts.gate_up_proj"], torch.stack(pairs))
        q, k, v = state[f"{name}.attention.qkv.weight"].chunk(3)
        assert torch.equal(ckpt[f"{name}.self_attn.k_proj.weight"], k)

back = folder + "/back.pt"
torchlift.convert(theirs, back, rename=rule.reversed())
print(torchlift.diff(ours, back))
assert torchlift.diff(ours, back).equal

import matplotlib.pyplot as plt
from matplotlib.patches import ConnectionPatch

TEAL, AMBER, GREY = "#2b6f77", "#d9962b", "#8a9099"
plt.rcParams.update({"figure.facecolor": "white", "font.size": 12})
figure, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")


def color_of(key):
    return TEAL if "experts" in key else AMBER if "norm" not in key else GREY


places = []
for x, path in enumerate((ours, theirs)):
    entries = [
        entry
        for key, entry in torchlift.open(path).entries.items()
        if "layers.0" in key
    ]
    entries.sort(
        key=lambda entry: ("experts" in entry.key, color_of(entry.key), entry.key)
    )
    top, found = 0.0, {}
    for entry in entries:
        height = entry.nbytes / 1024
        axes.barh(
            top,
            0.34,
            height,
            left=x,
            align="edge",
            color=color_of(entry.key),
            edgecolor="white",
            linewidth=1.2,
        )
        found.setdefault(color_of(entry.key), []).append((top, top + height))
        top += height
    places.append((found, top))
for color in (TEAL, AMBER):
    for find in (min, max):
        ends = [
            find(y for pair in found[color] for y in pair) for found, _ in places
        ]
        line = ConnectionPatch(
            (0.35, ends[0]),
            (0.99, ends[1]),
            "data",
            "data",
            color=color,
            linestyle="--",
        )
        axes.add_patch(line)
axes.set(
    xlim=(0, 1.34), ylim=(max(top for _, top in places), 0), yticks=[],
    xticks=[0.17, 1.17], xticklabels=["one project: 38 tensors", "another: 6 tensors"],
)  # fmt: skip
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
middle = {"experts": (0.5, TEAL), "q, k, v": (0.019, "#8a5a10")}
for text, (y, color) in middle.items():
    y *= places[0][1]
    axes.text(0.67, y, text, color=color, ha="center", va="center", weight="bold")
plt.show()

# %%
# *One layer in both layouts, each block a tensor: 36 weights of 12 experts become two tensors, one
# matrix of q, k and v becomes three. The bytes are the same, only what they are called and how they
# are divided is not.*
#
# Remember
# --------
#
# - A merge or a split is an index with other entries: nothing is put together in memory.
# - Rules join with ``|``, and ``reversed()`` of the whole is the way back.
# - `torchlift.diff` of both ends is the proof.
#
# Use this when
# -------------
#
# - **The model is one of transformers':** `torchlift.remap.transformers` has the rules already.
# - **You load it once:** the same rule as ``rename=`` of `torchlift.load`.
# - **Others need the file:** `torchlift.convert`, with ``dtype=`` and ``max_shard_size=`` as you
#   go.

"""
Rename, split and merge the weights of a checkpoint, and back again
===================================================================

One project saves its experts one by one, and q, k and v in one matrix. Another fuses the experts
and keeps q, k and v apart. How do you convert a checkpoint from one layout to the other, and how do
you know that nothing was lost?

Write one rule for `torchlift.convert`. Its ``reversed()`` converts back, and `torchlift.diff`
compares both ends.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

folder = tempfile.mkdtemp()
ours, theirs, back = (f"{folder}/{name}.safetensors" for name in "abc")
torchlift.save({"blocks.0.qkv.weight": torch.randn(96, 32)}, ours)
rule = torchlift.remap.split("*.qkv.*", ["*.q.*", "*.k.*", "*.v.*"], chunk=0)
torchlift.convert(ours, theirs, rename=rule)
print({key: w.shape for key, w in torchlift.open(theirs).entries.items()})
torchlift.convert(theirs, back, rename=rule.reversed())
print(torchlift.diff(ours, back))

# %%
# ``*`` stands for any text, which is copied into the new names. `torchlift.remap.merge` is the
# other direction: ``stack`` joins the members of a list, ``cat`` concatenates tensors.
#
# Numbers sorted as text
# ----------------------
#
# By hand you write a loop over all keys, with both layouts in memory and a regular expression for
# every kind of weight. Its mistakes raise no error: a missing expert, a matrix concatenated along
# the wrong dimension, or numbers sorted as text. Here is a small mixture of experts with twelve
# experts per layer, and that last mistake:

# fold: A small mixture of experts
torch.manual_seed(0)
state = {}
for layer in range(2):
    name = f"model.layers.{layer}"
    state[f"{name}.attention.qkv.weight"] = torch.randn(96, 32)
    state[f"{name}.norm.gamma"] = torch.randn(32)
    for expert in range(12):
        shapes = {"w1": (64, 32), "w2": (32, 64), "w3": (64, 32)}
        for part, shape in shapes.items():
            key = f"{name}.experts.{expert}.{part}.weight"
            state[key] = torch.randn(shape)
_ = torchlift.save(state, ours)

# %%
members = sorted(
    key for key in state if "layers.0.experts" in key and "w2" in key
)
print("stacked by hand:", *(key.split(".")[4] for key in members))

# %%
# Many experts into one tensor
# ----------------------------
#
# The other project has one tensor for all gate and up projections of a layer, and one for all down
# projections. It keeps q, k and v apart and has another name for the norm. The rule lists these
# four changes, joined by ``|``. ``{expert}`` stands for a number, and numbers are sorted as
# numbers:

from torchlift import remap

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
# If an expert is missing, an error names it before anything is written:

holes = {
    key: value for key, value in state.items() if "experts.10.w2" not in key
}
torchlift.save(holes, folder + "/holes.safetensors")
try:
    torchlift.convert(
        folder + "/holes.safetensors", folder + "/new.pt", rename=rule
    )
except torchlift.MismatchError as error:
    print(str(error).replace(folder + "/", ""))

# %%
# The same rule loads a file of one layout into a model of the other, without a converted copy:
# ``torchlift.load(model, ours, rename=rule)``. Each value is read once, into its final position.
#
# Proof
# -----
#
# The result is compared with torch's own operations. Then it is converted back with the reversed
# rule:

# fold: Compare each tensor
with torchlift.open(theirs) as ckpt:
    for layer in range(2):
        name = f"model.layers.{layer}"
        each = [f"{name}.experts.{i}.{{}}.weight" for i in range(12)]
        pairs = [
            torch.cat([state[e.format(w)] for w in ("w1", "w3")]) for e in each
        ]
        fused = ckpt[f"{name}.experts.gate_up_proj"]
        assert torch.equal(fused, torch.stack(pairs))
        q, k, v = state[f"{name}.attention.qkv.weight"].chunk(3)
        assert torch.equal(ckpt[f"{name}.self_attn.k_proj.weight"], k)

# %%
torchlift.convert(theirs, folder + "/back.pt", rename=rule.reversed())
print(torchlift.diff(ours, folder + "/back.pt"))
assert torchlift.diff(ours, folder + "/back.pt").equal

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots()
kinds = {"experts": 60, "att": 30, "norm": 10}
top = 0
for kind, height in kinds.items():
    for x, (path, color) in enumerate(((ours, "C0"), (theirs, "C1"))):
        keys = [key for key in torchlift.open(path).entries if kind in key]
        keys = [key.split("layers.0.")[1] for key in keys if "layers.0." in key]
        each = height / len(keys)
        lows = [top + each * row for row in range(len(keys))]
        look = {"color": color, "edgecolor": "white"}
        axes.barh(lows, 0.5, each, x, align="edge", **look)
        labels = [key.removesuffix(".weight") for key in keys]
        if len(keys) == 36:
            labels = ["w1, w2, w3\nof 12 experts"]
        for row, label in enumerate(labels):
            y = top + height * (row + 0.5) / len(labels)
            look = {
                "color": "white",
                "fontsize": 10,
                "ha": "center",
                "va": "center",
            }
            axes.text(
                x + 0.25, y, label, bbox={"color": color, "pad": 1}, **look
            )
    look = {"facecolor": ("C1", 0.2), "edgecolor": "white", "linewidth": 3}
    axes.fill_between((0.5, 1), top, top + height, **look)
    top += height
axes.set_xticks(
    [0.25, 1.25], ["one project:\n38 tensors", "another:\n6 tensors"]
)
axes.set(xlim=(0, 1.5), ylim=(top, 0), yticks=[])
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plt.show()

# %%
# *Each block is a tensor of one layer, left in the layout of one project, right in the layout of
# the other. The 36 weights of 12 experts become two tensors, one matrix of q, k and v becomes
# three, and the norm gets another name. The values are the same, so the conversion can be reversed.
# Heights are not to scale.*
#
# Remember
# --------
#
# - A merge or a split is an index with other entries. torchlift does not build the tensors in
#   memory.
# - Rules join with ``|``, and ``reversed()`` of the joined rule converts back.
# - `torchlift.diff` of both ends is the proof.
#
# Use this when
# -------------
#
# - **The model is one of transformers':** `torchlift.remap.transformers` has the rules already.
# - **You load it once:** the same rule as ``rename=`` of `torchlift.load`.
# - **Others need the file:** `torchlift.convert`, with ``dtype=`` and ``max_shard_size=``.

# %%
# Question
# --------
#
# The pattern of a merge has a slip and matches nothing. How do you notice?

# fold: Answer to the question
# By an error that names the rule. Nothing is written.
slip = remap.merge("*.expertz.{expert}.w2.weight", "*.down_proj", stack=0)
found = None
try:
    torchlift.convert(ours, folder + "/slip.pt", rename=slip)
except torchlift.MismatchError as error:
    found = str(error)
assert "matches no key" in found
print(found.partition("; expected")[0].replace(ours, "ours.pt"))

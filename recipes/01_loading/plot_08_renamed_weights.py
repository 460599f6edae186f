"""
Fused experts, split q, k, v: load weights that were renamed
============================================================

``gate_up_proj`` is missing, and hundreds of ``experts.0.gate_proj`` are unexpected. The file has
one tensor per expert and matrix, the model has all experts in one tensor. How do you load values
that are only divided differently?

Use a rename that merges or splits. `torchlift.remap.transformers` has the library's table, and
`torchlift.remap.merge` and `torchlift.remap.split` are for your own.
"""

# %%
# In short
# --------

import tempfile

import transformers

from torchlift import load, remap, skeleton

transformers.logging.disable_progress_bar()
sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256}
moe = {"head_dim": 16, "moe_intermediate_size": 64, "num_experts": 8}
config = transformers.Qwen3MoeConfig(**sizes, **moe)
folder = tempfile.mkdtemp()
transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
model = skeleton(transformers.Qwen3MoeForCausalLM, config)
report = load(model, folder, rename=remap.transformers(model))
print("merged:", len(sum(report.merged.values(), ())), "->", len(report.merged))

# %%
# 48 tensors of the file became four of the model. Only ``rename`` differs from any other load.
#
# Missing gate_up_proj, unexpected experts
# ----------------------------------------
#
# Since version 5 ``transformers`` computes all experts of a layer in one product, from one tensor.
# Files are unchanged: one matrix per expert. So a file that the library has just written does not
# match the model that it came from:

import torch

import torchlift

file = folder + "/model.safetensors"
with torchlift.open(file) as ckpt:
    in_file = [key for key in ckpt.entries if "layers.0.mlp.experts" in key]
    print(len(in_file), "in the file:", in_file[0], ckpt[in_file[0]].shape)
for name, parameter in model.named_parameters():
    if "layers.0.mlp.experts" in name:
        print("in the model:", name, parameter.shape)
bare = torchlift.skeleton(transformers.Qwen3MoeForCausalLM, config)
try:
    torchlift.load(bare, file)
except torchlift.MismatchError as error:
    print(f"{type(error).__name__}: {error.hint}")

# %%
# ``from_pretrained`` hides this with a table of conversions. `torchlift.remap.transformers` reads
# the same table. The result is equal, bit for bit:

theirs = transformers.Qwen3MoeForCausalLM.from_pretrained(folder).state_dict()
assert torchlift.diff(model.state_dict(), theirs).equal

# %%
# Many to one: your own merge
# ---------------------------
#
# You can write the rules of the table yourself. In a pattern ``*`` stands for any text, and
# ``{expert}`` for a number. One line covers all layers and experts. Members of a pattern are
# stacked, and patterns are concatenated.

expert = "*.experts.{expert}."
gate_up = [expert + "gate_proj.weight", expert + "up_proj.weight"]
fuse = remap.merge(gate_up, "*.experts.gate_up_proj", stack=0, cat=1)
fuse |= remap.merge(expert + "down_proj.weight", "*.experts.down_proj", stack=0)

report = torchlift.load(bare, file, rename=fuse)
assert torchlift.diff(bare.state_dict(), theirs).equal
print(f"{report.bytes_read:,} bytes read")

# %%
# Every byte of an expert is read once, straight into its slice of the merged tensor. Tensors that
# no rule matches stay mapped. If a merge lacks a member, the error names it before the model has
# changed:

with torchlift.open(file) as ckpt:
    lacking = {k: ckpt[k] for k in ckpt if "1.mlp.experts.5.up" not in k}
try:
    torchlift.load(bare, lacking, rename=fuse)
except torchlift.MismatchError as error:
    print(f"{type(error).__name__}: {error}")

# %%
# One to many: split q, k and v
# -----------------------------
#
# Now the other direction. The file has q, k and v in one matrix, and ``sizes`` are their
# proportions.

fused = torch.randn(128, 64)
divide = remap.split("qkv.*", ["q.*", "k.*", "v.*"], chunk=0, sizes=(2, 1, 1))


def attention():
    q, k, v = (torch.nn.Linear(64, rows, bias=False) for rows in (64, 32, 32))
    return torch.nn.ModuleDict({"q": q, "k": k, "v": v})


torch.save({"qkv.weight": fused}, folder + "/fused.pt")
layers = torchlift.skeleton(attention)
report = torchlift.load(layers, folder + "/fused.pt", rename=divide)
assert torch.equal(torch.cat([layers[name].weight for name in "qkv"]), fused)
print(report.split, report.bytes_read, "bytes read")
print("and back:", divide.reversed())

# %%
# Nothing was read. The rows of each part are contiguous in the file, so each part is a view of the
# map.
#
# Proof
# -----
#
# A model has 96 MiB in its experts. One new process loads it in the library's own way, and another
# with the library's table as a rename. Both own the merged experts afterwards.

# fold: How both are measured
kind = transformers.Qwen3MoeForCausalLM
wide = {**sizes, **moe, "hidden_size": 512, "moe_intermediate_size": 1024}
kind(transformers.Qwen3MoeConfig(**wide)).save_pretrained(folder + "/large")


def load_twice(way, *paths):
    for path in paths:  # a small model first, so that imports do not count
        torchlift.measure.mark(path)
        if way == "from_pretrained":
            model = kind.from_pretrained(path)
        else:
            config = kind.config_class.from_pretrained(path)
            model = torchlift.skeleton(kind, config)
            torchlift.load(model, path, rename=remap.transformers(model))


peaks = {}
for way in ("from_pretrained", "torchlift.load"):
    both = folder, folder + "/large"
    child = torchlift.measure.in_child(load_twice, way, *both)
    start, rows = child.memory.marks[1], child.memory.timeline
    peak = max(row.anonymous for row in rows if row.seconds >= start.seconds)
    peaks[way] = (peak - start.anonymous) / 2**20
    print(f"{way:<16} anonymous peak: {peaks[way]:.0f} MiB")
assert peaks["torchlift.load"] < 96 + 64

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots()
looks = {"gate": ("C1", ""), "up": ("C1", "//"), "down": ("C0", "")}
kinds = [key.split(".")[-2].removesuffix("_proj") for key in in_file]
order = sorted(range(24), key=lambda i: (kinds[i] == "down", i // 3, kinds[i]))
curve = torch.linspace(0, 1, 40)
bend = 3 * curve**2 - 2 * curve**3
for low, i in enumerate(order):
    color, hatch = looks[kinds[i]]
    to = low + (1.5 if kinds[i] == "down" else 0)
    look = {"color": color, "hatch": hatch, "edgecolor": "white"}
    axes.bar((0, 1), 1, 0.2, (i, to), **look)
    y = i + bend * (to - i)
    x = 0.1 + 0.8 * curve
    axes.fill_between(x, y, y + 1, color=color, alpha=0.2, lw=0.3)
axes.text(1.13, 8, "gate_up_proj", va="center")
axes.text(1.13, 21.5, "down_proj", va="center")
axes.set_xticks([0, 1], ["the file\n24 tensors", "the model\n2 tensors"])
axes.set(xlim=(-0.15, 1.6), yticks=[], ylabel="bytes of one layer's experts")
axes.invert_yaxis()
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plt.show()

# %%
# *The bars show one layer of eight experts: left the 24 tensors of the file, right the two tensors
# of the model. Each expert has three matrices: gate, up (hatched) and down. A band leads from a
# tensor's place in the file to its place in memory. Each tensor is read once, straight to its
# target, so the merge needs no second copy.*
#
# Remember
# --------
#
# - A merge or a split changes how tensors are divided, not their values. It is a rename.
# - Every source is read once, straight into its target. A part that is split along rows stays
#   mapped.
# - ``report.merged`` and ``report.split`` list which keys gave which parameter.
#
# Use this when
# -------------
#
# - **The model is one of transformers':** `torchlift.remap.transformers`.
# - **Many to one, one to many:** `torchlift.remap.merge`, `torchlift.remap.split`.
# - **Other names only:** `torchlift.remap.strip` and `torchlift.remap.rules`.
# - **You want a file with the other division:** `torchlift.convert` with the same rule.

# %%
# Question
# --------
#
# You have the merged model only. How do you write a file with one matrix per expert again?

# fold: Answer to the question
# Convert with the reversed rule: a merge is a rename, so it has an inverse.
merged, apart = folder + "/merged.pt", folder + "/apart.pt"
torch.save(bare.state_dict(), merged)
torchlift.convert(merged, apart, rename=fuse.reversed())
print(len(torchlift.open(merged)), "->", len(torchlift.open(apart)), "tensors")
assert torchlift.diff(apart, file).equal

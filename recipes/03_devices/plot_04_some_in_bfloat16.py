"""
Load in bfloat16, and keep the norms in float32
===============================================

The file is float32, and the machine has room for half of it. Most weights may become bfloat16;
norms, routers or a head had better not. How do you load some in one dtype and the rest in another,
without all of it in float32 on the way?

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
print(torchlift.load(model, path, dtype=rule))
print({name: str(tensor.dtype) for name, tensor in model.named_parameters()})

# %%
# `torchlift.remap.by_pattern` goes by regular expression, and the first one that is found in the
# name wins; ``""`` is found in every name.
#
# What model.bfloat16() does to a norm
# ------------------------------------
#
# ``model.bfloat16()`` casts everything. A bfloat16 has eight binary digits: the next number after 1
# is 1.0078. The weights of a norm are numbers around 1, and all values pass through them. Here is a
# network whose norms learned a little, and what a cast makes of them:

from collections import OrderedDict

from torch import nn

WIDTH, MIB = 2048, 2**20


def block():
    return OrderedDict(norm=nn.LayerNorm(WIDTH), linear=nn.Linear(WIDTH, WIDTH))


def build():
    return nn.Sequential(*[nn.Sequential(block()) for _ in range(8)])


torch.manual_seed(0)
trained = build()
for name, parameter in trained.named_parameters():
    if "norm.weight" in name:
        nn.init.normal_(parameter, mean=1, std=0.002)
torch.save(trained.state_dict(), path)

with torchlift.open(path) as ckpt:
    norm = ckpt["0.norm.weight"]
    print("learned:  ", [round(value, 4) for value in norm[:5].tolist()])
    print("cast:     ", norm[:5].bfloat16().tolist())
    print(len(norm.unique()), "numbers become", len(norm.bfloat16().unique()))
    norms = sum(
        entry.nbytes for key, entry in ckpt.entries.items() if "norm" in key
    )
    print(
        f"the norms are {100 * norms / ckpt.nbytes:.2f} % of {ckpt.nbytes / MIB:.0f} MiB"
    )

# %%
# What the norms learned is gone, for a tenth of a percent of the bytes. Keep them:

model = torchlift.skeleton(build)
torchlift.load(model, path, dtype=rule)
for name, value in trained.state_dict().items():
    loaded = model.state_dict()[name]
    assert loaded.dtype == (torch.float32 if "norm" in name else torch.bfloat16)
    assert torch.equal(loaded, value.to(loaded.dtype))
with torch.inference_mode():
    print("output:", model(torch.randn(2, WIDTH, dtype=torch.bfloat16)).dtype)

# %%
# The norms are those of the file, bit for bit, the others are what a cast gives, and the model
# runs: torch's layer norm takes an input in bfloat16 with weights in float32. A rule is asked about
# floating-point parameters and buffers. It never casts integers, nor buffers that no file holds.
#
# Proof
# -----
#
# The same model in three ways, each in a new process: load, then cast; torch's best, a mapped file
# whose tensors are cast one by one and assigned; and the rule.


def cast_later(path):
    model = build()
    model.load_state_dict(torch.load(path))
    for name, module in model.named_modules():
        if name.endswith("linear"):
            module.bfloat16()
    return summary(model)


def mapped_by_hand(path):
    with torch.device("meta"):
        model = build()
    state = torch.load(path, mmap=True)
    for name in state:
        if "norm" not in name:
            state[name] = state[name].bfloat16()
    model.load_state_dict(state, assign=True)
    return summary(model)


def by_rule(path):
    model = torchlift.skeleton(build)
    torchlift.load(model, path, dtype=rule)
    return summary(model)


def summary(model):
    """A few values of each parameter, in its dtype."""
    torchlift.measure.mark("ready")
    return [(str(p.dtype), p.flatten()[::999].tolist()) for p in model.parameters()]


ways = {
    "load, then cast": cast_later,
    "mapped, by hand": mapped_by_hand,
    "rule": by_rule,
}
runs = {}
for way, function in ways.items():
    runs[way] = child = torchlift.measure.in_child(function, path)
    print(f"{way:<16} anonymous peak: {child.memory.added_anonymous / MIB:.1f} MiB")

later, by_hand, ruled = runs.values()
assert later.value == by_hand.value == ruled.value
assert later.memory.added_anonymous > 1.9 * 128 * MIB
assert ruled.memory.added_anonymous < 0.8 * 128 * MIB

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots()
for color, (way, child) in zip(("C0", "C3", "C1"), runs.items(), strict=True):
    line = "-." if color == "C3" else "-"
    start, ready = child.memory.baseline.anonymous, child.memory.marks[0].seconds
    samples = [
        sample for sample in child.memory.timeline if sample.seconds <= ready
    ]
    time = [1000 * sample.seconds for sample in samples]
    owned = [(sample.anonymous - start) / MIB for sample in samples]
    axes.plot(time, owned, color=color, linestyle=line, label=way)
for level, label in (128, "float32"), (64, "bfloat16"):
    axes.axhline(level, color="black", linewidth=1, linestyle=":")
    axes.text(1, level + 3, label, ha="right", transform=axes.get_yaxis_transform())
axes.set_xlim(0, 1.25 * axes.get_xlim()[1])
axes.set(xlabel="time of one run (ms)", ylabel="memory owned (MiB)", ylim=(0, None))
figure.legend(loc="outside upper center", ncols=3, columnspacing=1)
plt.show()

# %%
# *Memory that the process owns, until the model is ready. Loaded and cast afterwards, it climbs to
# two copies in float32. Cast one by one, by hand (dash-dot) or by the rule, it climbs to the model
# in bfloat16; torchlift reads ahead into a buffer, which is the tip of the rule's line.*
#
# By hand it is a loop over a dictionary, as good in memory. The rule is one line, and takes care of
# missing names, of ties and of models that are live.
#
# Remember
# --------
#
# - A cast of everything rounds the norms to the next 1/128. They are a thousandth of the bytes.
# - A rule for ``dtype=`` answers by the model's name; what it says nothing about stays as it is.
# - Each tensor is cast as it is read: the peak is the result and a small buffer.
#
# Use this when
# -------------
#
# - **One dtype for all:** ``dtype=torch.bfloat16`` of `torchlift.load`.
# - **Some layers in another one:** `torchlift.remap.by_pattern`, or `torchlift.remap.by_key`.
# - **As the model is:** ``dtype="model"`` of `torchlift.load`.
# - **Smaller than that:** *Quantise to int8 while loading*.

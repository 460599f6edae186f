"""
From eight GPUs to one, from one to a laptop
============================================

You trained on eight GPUs, with two layers on each. Now you have one GPU, or none. Where does each
tensor go, in which type, and why is every name off by a word?

You bring one file to three smaller machines: by where a tensor was, by what it is called, and with
a type for some and another for the rest. None of these machines has to be there.
"""

# %%
# The file
# --------
#
# A small language model with sixteen layers. Its training ran under DDP, which puts ``module.``
# in front of every name. The class has changed since: what is called ``layers`` today was
# ``blocks`` then. And every tensor carries the tag of one of eight GPUs.
#
# A fresh process writes these tags, as in the recipe before: it registers a function that says
# where a tensor is.

import re
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import torchlift
from torchlift import remap
from torchlift.measure import in_child

LAYERS, TOKENS, WIDTH = 16, 4096, 256


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.Sequential(*[Layer() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, token):
        return self.head(self.norm(self.layers(self.embed(token))))


def gpu_of(name):
    """Where the training had it: two layers per GPU, and the ends beside them."""
    layer = re.search(r"layers\.(\d+)", name)
    if layer:
        return int(layer[1]) // 2
    return 0 if name.startswith("embed") else 7


SAVE = """
import torch

path, tags = args
state = torch.load(path)
where = {tensor.data_ptr(): tags[name] for name, tensor in state.items()}

def tag(storage):
    return where.get(storage.data_ptr())

torch.serialization.register_package(0, tag, lambda storage, tag: None)
torch.save(state, path)
"""

scratch = tempfile.TemporaryDirectory(prefix="torchlift-")
folder = Path(scratch.name)
file = folder / "trained.pt"

torch.manual_seed(0)
trained = Language()
with torch.no_grad():
    for name, tensor in trained.named_parameters():
        if "norm" in name:  # as if trained: norms start as plain ones and zeros
            tensor.add_(0.1 * torch.randn_like(tensor))

state, tags = {}, {}
for name, tensor in trained.state_dict().items():
    old = "module." + name.replace("layers.", "blocks.")
    state[old], tags[old] = tensor, f"cuda:{gpu_of(name)}"
torch.save(state, file)
in_child(SAVE, str(file), tags)

MIB = 2**20
with torchlift.open(file) as ckpt:
    entries = list(ckpt.entries.values())
    print(f"{len(ckpt)} tensors, {ckpt.nbytes / MIB:.1f} MiB")

tensors, sizes = Counter(), Counter()
for entry in entries:
    tensors[entry.location] += 1
    sizes[entry.location] += entry.nbytes
for tag in sorted(tensors):
    print(f"{tag}: {tensors[tag]:2} tensors, {sizes[tag] / MIB:3.1f} MiB")
print("first:", entries[0].key)
print("last: ", entries[-1].key)

# %%
# First the names
# ---------------
#
# A file whose names do not fit loads nowhere, whatever the devices. The error lists every name.
# With a whole model off by a prefix that is much to read, so ask `torchlift.plan` for the lists.

model = torchlift.skeleton(Language)


def show(error):
    """Print the type and the message of an error, in short lines."""
    text = f"{type(error).__name__}: {error}".replace(f"{folder}/", "")
    # What torch says about a device that is not there depends on how it was built.
    text = re.sub(r" \(.*?\)(?=\. )", "", text)
    print(textwrap.fill(textwrap.shorten(text, 300), 76, subsequent_indent="  "))


def unmatched(**options):
    everything = {"allow_missing": ["*"], "allow_unexpected": ["*"]}
    plan = torchlift.plan(model, file, **everything, **options)
    print(f"missing    {len(plan.missing_keys):3}", *plan.missing_keys[:2])
    print(f"unexpected {len(plan.unexpected_keys):3}", *plan.unexpected_keys[:2])


try:
    torchlift.load(model, file)
except torchlift.MismatchError as error:
    show(error)
unmatched()

# %%
# `torchlift.remap.strip` takes a prefix off.

unmatched(rename=remap.strip("module."))

# %%
# `torchlift.remap.rules` rewrites by regular expression. The two compose with ``|``.

rename = remap.strip("module.") | remap.rules([(r"^blocks\.", "layers.")])
print(rename)
unmatched(rename=rename)

# %%
# Nothing is left over. A rename is a plain function, so you can try it on any name:

ddp, compiled = remap.strip("module."), remap.strip("_orig_mod.")
unwrap = compiled | ddp | compiled
for wrappers in "module._orig_mod", "_orig_mod.module", "modules":
    name = f"{wrappers}.fc.weight"
    print(f"{name:<26} -> {unwrap(name)}")

# %%
# This chain undoes DDP and ``torch.compile``, whichever came first. Only whole names match:
# ``modules`` is not ``module``.
#
# To a laptop: no argument
# ------------------------
#
# Tags are notes. What is on meta goes to the CPU.

torchlift.load(model, file, rename=rename)

source = dict(trained.named_parameters())
loaded = dict(model.named_parameters())
same = [torch.equal(loaded[name], source[name]) for name in source]
print(f"same weights: {sum(same)} of {len(same)} tensors")
print("devices:", {str(tensor.device) for tensor in loaded.values()})

token = torch.arange(64).view(4, 16)
with torch.inference_mode():
    print("same output:", torch.allclose(model(token), trained(token), atol=1e-5))

# %%
# To two GPUs: by where it was
# ----------------------------
#
# The layout was good, you only have fewer GPUs: the first four become one, the others another.
# `torchlift.remap.by_location` maps tags. The most specific entry wins, so ``"cuda"`` is about
# all those that are not named.
#
# Neither GPU is in this machine. But a rule is a function of a `torchlift.TensorEntry`, and a
# file is full of these. Give each entry the name that it has in the model, and ask.

two_gpus = remap.by_location(
    {
        "cuda:0": "cuda:0",
        "cuda:1": "cuda:0",
        "cuda:2": "cuda:0",
        "cuda:3": "cuda:0",
        "cuda": "cuda:1",
    }
)

named = [replace(entry, key=rename(entry.key)) for entry in entries]


def shares(rule):
    """Print the bytes per device, and return the device of every tensor."""
    where = {entry.key: rule(entry) for entry in named}
    for device in dict.fromkeys(where.values()):
        there = [entry.nbytes for entry in named if where[entry.key] == device]
        print(f"{device:<7} {len(there):2} tensors, {sum(there) / MIB:4.1f} MiB")
    return where


on_two = shares(two_gpus)
kept = all(on_two[name] == f"cuda:{gpu_of(name) // 4}" for name in on_two)
print("first half and second half:", kept)

# %%
# To one GPU: by what it is
# -------------------------
#
# Now the old layout is of no use. The embedding and the head may stay on the host, and the GPU
# takes ten layers. `torchlift.remap.by_key` maps dotted prefixes of the model's names. The
# longest one wins, whatever the order.

one_gpu = remap.by_key(
    {
        "": "cpu",
        "layers": "cuda:0",
        **{f"layers.{number}": "cpu" for number in range(10, LAYERS)},
    }
)
for name in "layers.1.up.weight", "layers.10.up.weight", "head.weight":
    print(f"{name:<19} {one_gpu.at(name)}")
on_one = shares(one_gpu)

# %%
# A prefix ends at a dot. ``layers.1`` says nothing about ``layers.10``.
#
# If that is too much to write: the next recipe lets `torchlift.remap.fit` find the map. And the
# rules combine. `torchlift.remap.first_of` takes the first answer: here the head goes to the
# host, and everything else where ``two_gpus`` says.

mixed = remap.first_of(remap.by_key({"head": "cpu"}), two_gpus)
on_mixed = shares(mixed)

# %%
# The picture
# -----------

GRAY, TEAL, RUST = "#5b6470", "#2b6f77", "#b83a16"
plt.rcParams.update({"figure.facecolor": "white", "font.size": 12})

on_eight = {entry.key: entry.location for entry in named}
on_laptop = {name: str(tensor.device) for name, tensor in loaded.items()}
machines = {
    "eight GPUs\nthe file's tags": on_eight,
    "two GPUs\nby_location": on_two,
    "one GPU\nby_key": on_one,
    "a laptop\nno argument": on_laptop,
}

# What moves together: the embedding, each layer, the norm and the head.
parts = {}
for entry in named:
    part = re.match(r"layers\.\d+|\w+", entry.key)[0]
    parts.setdefault(part, []).append(entry)
GAP, HALF = 0.9, 0.16  # between devices (MiB), half the width of a box


def stack(where):
    """Part -> its ends, and device -> its ends, in MiB; the host comes last."""
    boxes, devices, at = {}, {}, 0.0
    used = sorted(set(where.values()))
    used.sort(key="cpu".__eq__)  # the host comes last
    for device in used:
        start = at
        for part, members in parts.items():
            if where[members[0].key] == device:
                height = sum(entry.nbytes for entry in members) / MIB
                boxes[part] = (at, at + height)
                at += height
        devices[device] = (start, at)
        at += GAP
    middle = (at - GAP) / 2
    for ends in boxes, devices:
        ends.update({key: (a - middle, b - middle) for key, (a, b) in ends.items()})
    return boxes, devices


figure, axes = plt.subplots(figsize=(7.2, 5.2), layout="constrained")
total = sum(sizes.values()) / MIB
columns = [stack(where) for where in machines.values()]
curve = torch.linspace(0, 1, 40)
bend = (3 * curve**2 - 2 * curve**3).numpy()
for number, ((left, _), (right, _)) in enumerate(pairwise(columns)):
    x = number + HALF + curve.numpy() * (1 - 2 * HALF)
    target = list(machines.values())[number + 1]
    for part, members in parts.items():
        (low, high), (low_to, high_to) = left[part], right[part]
        color = GRAY if target[members[0].key] == "cpu" else TEAL
        bottom, top = low + bend * (low_to - low), high + bend * (high_to - high)
        axes.fill_between(x, bottom, top, color=color, alpha=0.28, linewidth=0.4)
for number, (_, devices) in enumerate(columns):
    for device, (low, high) in devices.items():
        color = GRAY if device == "cpu" else RUST if number == 0 else TEAL
        axes.bar(number, high - low, bottom=low, width=2 * HALF, color=color)
        text = axes.text(number, (low + high) / 2, device, color="white", size=11)
        text.set(ha="center", va="center")
axes.set_xticks(range(len(machines)), machines)
axes.set(xlim=(-0.25, 3.25), yticks=[], ylabel=f"bytes ({total:.0f} MiB in all)")
axes.invert_yaxis()
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plt.show()

# %%
# *The same tensors on four machines, first layers at the top. The height of a box is its share of
# the bytes. Each band is one layer, or one of the ends.* By location, neighbors stay neighbors.
# By key, the ends cross over to the host.
#
# The same question on the command line
# -------------------------------------
#
# ``torchlift plan`` answers it without any of the devices, and without reading a weight.

command = ["torchlift", "plan", "trained.pt"]
command += ["--strip", "module.", "--rename", r"^blocks\.=layers."]
command += ["--device-map", '{"layers": "cuda:0", "": "cpu"}']
run = subprocess.run(
    [sys.executable, "-m", *command],
    cwd=folder,
    capture_output=True,
    text=True,
    check=True,
)
print(run.stdout.replace(f"{folder}/", "").strip())

# %%
# A type for some, another for the rest
# -------------------------------------
#
# A smaller machine often wants a smaller type. But norms are a bad place to save: they are a
# thousandth of the bytes, and every value passes through them. `torchlift.remap.by_pattern` goes
# by regular expression, and ``dtype=`` takes rules as ``device=`` does. Both apply in one load.

keep_norms = remap.by_pattern({r"norm": torch.float32, "": torch.bfloat16})
print(keep_norms)

half = torchlift.skeleton(Language)
where = remap.by_key({"": "cpu"})
report = torchlift.load(half, file, rename=rename, device=where, dtype=keep_norms)

weights = dict(half.named_parameters())
nbytes = Counter()
for tensor in weights.values():
    nbytes[str(tensor.dtype)] += tensor.nbytes
for dtype, size in nbytes.items():
    print(f"{dtype:<14} {size / MIB:6.2f} MiB")

norms = [name for name in weights if "norm" in name]
exact = all(torch.equal(weights[name], source[name]) for name in norms)
losses = [(source[name].bfloat16() - source[name]).abs().max() for name in norms]
print(f"norms kept bit for bit: {exact}")
print(f"in bfloat16 they would be off by up to {max(losses).item():.4f}")
cast = all(
    torch.equal(tensor, source[name].to(torch.bfloat16))
    for name, tensor in weights.items()
    if name not in norms
)
print("the others are what a cast gives:", cast)

# %%
# What does "in one load" save? The other way loads everything in float32, and casts afterwards,
# tensor by tensor. Both in a fresh process, on a model of 128 MiB with a norm beside each layer.

SETUP = """
import torch
import torchlift
from torch import nn
from torchlift import remap

def build():
    pairs = [(nn.LayerNorm(2048), nn.Linear(2048, 2048)) for _ in range(8)]
    return nn.Sequential(*[part for pair in pairs for part in pair])

def keep(name):
    return int(name.partition(".")[0]) % 2 == 0

torchlift.load, torchlift.skeleton, remap.by_pattern
"""

MAKE = """
torch.save(build().state_dict(), args[0])
"""

LATER = """
model = torchlift.skeleton(build)
torchlift.load(model, args[0], source="read")
for name, part in model.named_children():
    if not keep(name):
        part.to(torch.bfloat16)
"""

AT_ONCE = r"""
model = torchlift.skeleton(build)
rule = remap.by_pattern({r"^\d*[02468]\.": torch.float32, "": torch.bfloat16})
torchlift.load(model, args[0], dtype=rule)
"""

CHECK = """
result = [str(p.dtype) for p in model.parameters()]
"""

large = str(folder / "large.pt")
in_child(MAKE, large, setup=SETUP)
with torchlift.open(large) as ckpt:
    size = ckpt.nbytes
later = in_child(LATER, large, setup=SETUP, finish=CHECK)
at_once = in_child(AT_ONCE, large, setup=SETUP, finish=CHECK)
peaks = later.memory.added_anonymous, at_once.memory.added_anonymous
for way, peak in zip(("load, then cast", "cast while loading"), peaks, strict=True):
    print(f"{way:<18} anonymous peak: {peak / MIB:5.1f} MiB")

print("same types in the end:", later.value == at_once.value)
print("load, then cast, above 0.95x the file:", peaks[0] > 0.95 * size)
print("cast while loading, below 0.8x the file:", peaks[1] < 0.8 * size)

# %%
# Casting afterwards starts from a whole copy in float32. Casting while loading takes the result,
# half the size of the file, and a buffer for what is on its way.
#
# What goes wrong
# ---------------
#
# Four slips, and what you read. Each is found before a byte is read, and the model stays as it
# is.

model = torchlift.skeleton(Language)
slips = {
    "a prefix that is nowhere": lambda: remap.by_key({"layer.3": "cpu"}),
    "a device that is not here": lambda: remap.by_key({"layers": "cuda:99"}),
    "no device at all": lambda: remap.by_key({"layers": "cdua:0"}),
    "a plain dict": lambda: {"layers": "cpu"},
}
for slip, make in slips.items():
    print(f"{slip}:")
    try:
        torchlift.load(model, file, rename=rename, device=make())
    except torchlift.PlacementError as error:
        show(error)
print("the model is as before:", all(p.is_meta for p in model.parameters()))
scratch.cleanup()

# %%
# What to remember
# ----------------
#
# - Names first, devices second: ``rename`` turns the file's names into the model's, and rules for
#   devices and types see the latter.
# - ``by_location`` goes by the old machine, ``by_key`` by the model. The most specific entry
#   wins, in both.
# - A rule is a function of an entry. You can ask it about every tensor of a file before you have
#   the machine.
# - Devices and types are two rules for one load. Nothing is loaded first and cast later.
#
# What to use when
# ----------------
#
# - **To one device:** no argument, or ``device="cuda:0"``.
# - **The same layout on fewer devices:** `torchlift.remap.by_location`.
# - **A layout of your own:** `torchlift.remap.by_key`. For the exceptions put
#   `torchlift.remap.first_of` in front.
# - **Types by kind of layer:** `torchlift.remap.by_pattern` as ``dtype=``.
# - **Names with a wrapper's prefix, or old names:** `torchlift.remap.strip` and
#   `torchlift.remap.rules`, joined with ``|``.
# - **You know the budgets but not the map:** `torchlift.remap.fit`, in the next recipe.

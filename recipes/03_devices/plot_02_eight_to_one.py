"""
From eight GPUs to one: load a checkpoint onto fewer devices
============================================================

The model was trained on eight GPUs, with some layers on each. Now you have two, or one, or none.
How do you say where each tensor goes, and can you check it before you have the machine?

``device=`` of `torchlift.load` takes a rule, by the old place or by the name; a rule can be asked
about every tensor of a file, and no device has to be there.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

path = tempfile.mkdtemp() + "/model.pt"
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)])
torch.save(model.state_dict(), path)
rule = torchlift.remap.by_key({"": "cuda:0", "2": "cuda:1", "3": "cpu"})
with torchlift.open(path) as ckpt:
    for key, entry in ckpt.entries.items():
        print(key, "->", rule(entry))
report = torchlift.load(model, path, device=torchlift.remap.by_key({"": "cpu"}))
print({item.device for item in report.loaded.values()})

# %%
# The keys of a rule are prefixes of names, up to a dot, and the longest one wins; ``""`` is for all
# the others. On the machine with two GPUs the last lines get ``device=rule``.
#
# What map_location cannot say
# ----------------------------
#
# The word that ``torch.load`` has for this is ``map_location``. A string sends everything to one
# device, which may be too small for it. A dict goes by the old place, each tag in full. A function
# is told where a tensor was, and not what it is:

seen = []
torch.load(path, map_location=lambda *what: seen.append(what) or what[0])
print([(type(storage).__name__, tag) for storage, tag in seen[:2]])

# %%
# A storage and a tag. "The embedding on the host, ten layers on the GPU" takes more than these.
#
# A file from eight GPUs
# ----------------------
#
# Here is a model with sixteen layers, two on each GPU.

# fold: Write the file with its tags, from a process of its own
import re
from collections import Counter
from itertools import groupby

from torch import nn

from torchlift import remap


def build():
    modules = {"embed": nn.Embedding(2048, 768)}
    modules["layers"] = nn.Sequential(*[nn.Linear(768, 768) for _ in range(16)])
    return nn.ModuleDict(modules | {"head": nn.Linear(768, 2048)})


def gpu_of(name):
    number = re.search(r"layers\.(\d+)", name)
    return int(number[1]) // 2 if number else 7 * ("head" in name)


def save_from_eight(state, path):
    where = {t.data_ptr(): f"cuda:{gpu_of(name)}" for name, t in state.items()}
    tag_of = lambda storage: where.get(storage.data_ptr())  # noqa: E731
    torch.serialization.register_package(0, tag_of, lambda *_: None)
    torch.save(state, path)


trained = build()
_ = torchlift.measure.in_child(save_from_eight, trained.state_dict(), path)

# %%
# Ask a rule about each tensor of the file. No device has to be there:


def ask(rule):
    where = {name: str(rule(entry)) for name, entry in entries.items()}
    used = Counter()
    for name, device in where.items():
        used[device] += entries[name].nbytes
    print(*[f"{device} {size / 2**20:.0f} MiB" for device, size in used.items()])
    return where


entries = dict(torchlift.open(path).entries)
on_eight = ask(lambda entry: entry.location)

# %%
# Eight GPUs to two: by where it was
# ----------------------------------
#
# The layout was good, there are only fewer of them: the first four become one, the others another.
# In `torchlift.remap.by_location` the most specific tag wins, and ``"cuda"`` is for the rest.

two = {f"cuda:{number}": "cuda:0" for number in range(4)} | {"cuda": "cuda:1"}
on_two = ask(remap.by_location(two))

# %%
# Eight GPUs to one: by what it is
# --------------------------------
#
# Now the old layout is of no use. The GPU takes ten layers; the others and both ends stay on the
# host. A prefix ends at a dot: ``layers.1`` says nothing about ``layers.10``.

last = {f"layers.{number}": "cpu" for number in range(10, 16)}
on_one = ask(remap.by_key({"": "cpu", "layers": "cuda:0"} | last))

# %%
# To a laptop: no argument
# ------------------------
#
# No rule is needed. A slip is found before a byte is read, and the model stays as it was:

model = torchlift.skeleton(build)
for slip in {"layer": "cpu"}, {"layers": "cuda:99"}:
    try:
        torchlift.load(model, path, device=remap.by_key(slip))
    except torchlift.PlacementError as error:
        print(f"- {error.entry}: {error.hint}")
assert all(parameter.is_meta for parameter in model.parameters())

report = torchlift.load(model, path)
on_laptop = {name: item.device for name, item in report.loaded.items()}

# %%
# Proof
# -----
#
# Every tensor goes where the layout demands, and what loaded is what was saved, to the last bit:

for name in on_eight:
    assert on_two[name] == f"cuda:{gpu_of(name) // 4}"
    on_host = gpu_of(name) >= 5 or name.startswith(("embed", "head"))
    assert on_one[name] == ("cpu" if on_host else "cuda:0")
same = torchlift.diff(model.state_dict(), trained.state_dict())
assert same.equal
print("on the laptop:", set(on_laptop.values()), "-", str(same).splitlines()[-1])

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 4.6))
map_location = dict.fromkeys(entries, "cuda:0")
layouts = on_eight, map_location, on_one, on_two, on_laptop
for x, where in enumerate(layouts):
    top, color = 0.0, ("C0", "C3", "C1", "C1", "C1")[x]
    for device, run in groupby(where, where.get):
        height = sum(entries[name].nbytes for name in run) / 2**20
        axes.bar(x, height, 0.9, top, color=color, edgecolor="white", linewidth=2)
        axes.text(
            x, top + height / 2, device, color="white", ha="center", va="center"
        )
        top += height
labels = "file from\n8 GPUs", "torch,\n1 GPU", "by name,\n1 GPU"
labels += "by place,\n2 GPUs", "no rule,\nno GPU"
axes.set_xticks(range(5), labels, size=10.5)
axes.set(ylim=(top, 0), ylabel="from the embedding to the head (MiB)")
axes.tick_params(axis="x", length=0)
axes.spines["bottom"].set_visible(False)
plt.show()

# %%
# *Where the same tensors go, from the embedding at the top to the head at the bottom. Gray, the
# eight GPUs that saved them. With a device as map_location torch puts all on one GPU, whether it
# fits or not. torchlift's rules, orange: by name you choose what stays on the host, by the old
# place neighbours stay neighbours, and without a rule all is on the CPU.*
#
# Remember
# --------
#
# - ``by_location`` goes by the old machine, ``by_key`` by the model. The most specific entry wins.
# - A rule is a function of an entry: ask it about a whole file before you have the machine.
# - A location tag is never obeyed by itself: without a rule, what is new goes to the CPU.
#
# Use this when
# -------------
#
# - **To one device:** no rule at all, or ``device="cuda:0"`` of `torchlift.load`.
# - **The same layout, fewer devices:** `torchlift.remap.by_location`.
# - **A layout of your own:** `torchlift.remap.by_key`; for exceptions put
#   `torchlift.remap.first_of` in front.
# - **The names differ, too:** `torchlift.remap.strip`, `torchlift.remap.rules`; a rule for devices
#   sees the model's names.
# - **You know the sizes of the GPUs, but no map:** *Will this model fit on my GPUs?*

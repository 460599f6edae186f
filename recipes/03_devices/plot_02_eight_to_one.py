"""
From eight GPUs to one: load a checkpoint onto fewer devices
============================================================

The model was trained on eight GPUs, with some layers on each. Now you have two, or one, or none.
How do you choose the device of each tensor, and can you check it before you have the machine?

``device=`` of `torchlift.load` takes a rule, by the old device or by the name. You can apply a rule
to every tensor of a file, and no device has to exist.
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
# The keys of a rule are prefixes of names, up to a dot. The longest one wins, and ``""`` matches
# all other names. On the machine with two GPUs, pass ``device=rule`` in the load.
#
# Limits of map_location
# ----------------------
#
# In ``torch.load`` the argument for this is ``map_location``. A string sends everything to one
# device, which may be too small. A dict maps the old tags, each in full. A function gets the old
# device of a tensor, but not its name:

seen = []
torch.load(path, map_location=lambda *what: seen.append(what) or what[0])
print([(type(storage).__name__, tag) for storage, tag in seen[:2]])

# %%
# It gets a storage and a tag. That is not enough for a rule such as "the embedding on the host, ten
# layers on the GPU".
#
# A file from eight GPUs
# ----------------------
#
# Here is a model with sixteen layers, two on each GPU.

# fold: Write the file with its tags, in a new process
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
# Apply a rule to each tensor of the file. No device has to exist:


def apply(rule):
    where = {name: str(rule(entry)) for name, entry in entries.items()}
    used = Counter()
    for name, device in where.items():
        used[device] += entries[name].nbytes
    print(
        *[f"{device} {size / 2**20:.0f} MiB" for device, size in used.items()]
    )
    return where


entries = dict(torchlift.open(path).entries)
on_eight = apply(lambda entry: entry.location)

# %%
# Eight GPUs to two: by the old device
# ------------------------------------
#
# The old layout was good, but you have fewer GPUs. The first four become one GPU, and the other
# four another. In `torchlift.remap.by_location` the most specific tag wins, and ``"cuda"`` matches
# all others.

two = {f"cuda:{number}": "cuda:0" for number in range(4)} | {"cuda": "cuda:1"}
on_two = apply(remap.by_location(two))

# %%
# Eight GPUs to one: by name
# --------------------------
#
# Now the old layout does not help. The GPU takes ten layers. The other layers, the embedding and
# the head stay on the host. A prefix ends at a dot: ``layers.1`` does not match ``layers.10``.

last = {f"layers.{number}": "cpu" for number in range(10, 16)}
on_one = apply(remap.by_key({"": "cpu", "layers": "cuda:0"} | last))

# %%
# Load on a laptop without a rule
# -------------------------------
#
# A laptop needs no rule. torchlift finds a wrong rule before it reads a byte, and the model does
# not change:

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
# Every tensor goes to the device of its layout. The loaded values equal the saved ones, to the last
# bit:

for name in on_eight:
    assert on_two[name] == f"cuda:{gpu_of(name) // 4}"
    on_host = gpu_of(name) >= 5 or name.startswith(("embed", "head"))
    assert on_one[name] == ("cpu" if on_host else "cuda:0")
same = torchlift.diff(model.state_dict(), trained.state_dict())
assert same.equal
print(
    "on the laptop:", set(on_laptop.values()), "-", str(same).splitlines()[-1]
)

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
        axes.bar(
            x, height, 0.9, top, color=color, edgecolor="white", linewidth=2
        )
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
# *Each column is one layout of the same tensors, from the embedding at the top to the head at the
# bottom. A box is a device. Gray are the eight GPUs that saved them. With a device as map_location,
# torch puts all tensors on one GPU, even if it is too small. The orange columns are torchlift's
# rules. By name you choose which layers stay on the host, by place neighbours stay together, and
# without a rule all tensors are on the CPU.*
#
# Remember
# --------
#
# - ``by_location`` goes by the old machine, ``by_key`` by the model. The most specific entry wins.
# - A rule is a function of an entry. Apply it to a complete file before you have the machine.
# - torchlift never obeys a location tag by itself. Without a rule, new tensors go to the CPU.
#
# Use this when
# -------------
#
# - **To one device:** ``device="cuda:0"`` of `torchlift.load`, or no rule for the CPU.
# - **The same layout, fewer devices:** `torchlift.remap.by_location`.
# - **A layout of your own:** `torchlift.remap.by_key`. For exceptions put
#   `torchlift.remap.first_of` in front.
# - **The names differ too:** `torchlift.remap.strip`, `torchlift.remap.rules`. A rule for devices
#   gets the model's names.
# - **You know the sizes of the GPUs, but not the map:** *Will this model fit on my GPUs?*

# %%
# Question
# --------
#
# A rule has an entry for ``layers.1``. Which device gets ``layers.10``?

# fold: Answer to the question
# The device of the shorter prefix, because a prefix ends at a dot.
where = apply(remap.by_key({"": "cpu", "layers.1": "cuda:0"}))
print({name: where[name] for name in ("layers.1.weight", "layers.10.weight")})
assert where["layers.10.weight"] == "cpu"

"""
"Attempting to deserialize object on a CUDA device": saved on a GPU, loaded on a CPU
====================================================================================

Somebody sends you a checkpoint, and ``torch.load`` fails because it wants a GPU. Why would a file
full of numbers need one, and how do you load it without?

`torchlift.load` needs no GPU and no argument. The file records the device of each tensor when it
was saved. torchlift reads that record and does not obey it.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

path = tempfile.mkdtemp() + "/sent.pt"
there = "cuda" if torch.cuda.is_available() else "cpu"
torch.save(torch.nn.Linear(1024, 1024, device=there).state_dict(), path)
model = torch.nn.Linear(1024, 1024)
torchlift.load(model, path)  # saved anywhere, loaded here
for key, entry in torchlift.open(path).entries.items():
    here = model.get_parameter(key).device
    print(f"{key}: saved on {entry.location}, loaded on {here}")

# %%
# The line that loads is the same for a file from any machine. To test it without a GPU, you need a
# file that was saved on one.
#
# Why torch.load wants a GPU
# --------------------------
#
# The next cell makes such files on this machine. `torch.serialization.register_package` registers a
# function that names the device of a tensor. ``torch.load`` reads each tensor into host memory and
# then moves it to that device:


# fold: Write files with tags such as cuda:3, without a GPU
def save_as_if_on(files, state):
    tags = []
    torch.serialization.register_package(0, lambda _: tags[-1], lambda *_: None)
    for tag, path in files.items():
        tags.append(tag)
        torch.save(state, path)


twin, TAGS = path, ("cpu", "cuda:0", "cuda:3", "mps", "xpu:0", "hpu", "npu:3")
files = {tag: f"{tempfile.mkdtemp()}/sent.pt" for tag in TAGS}
torch.save(model.state_dict(), twin)
torchlift.measure.in_child(save_as_if_on, files, torch.load(twin))
path = files["cuda:3"]

# %%

try:
    torch.load(path)
except RuntimeError as error:
    print(f"{type(error).__name__}: {error}")

# %%
# On a machine with one GPU the message complains about a device number that is too high.
#
# The contents of a location tag
# ------------------------------
#
# A ``.pt`` file is a zip archive with a pickle in it, and a pickle is a list of words. Compare the
# words of this file with the words of its twin, which was saved on the CPU:

import pickletools
from zipfile import ZipFile

pickles = [ZipFile(file).read("sent/data.pkl") for file in (path, twin)]
words = [
    [word for _, word, _ in pickletools.genops(pickle)] for pickle in pickles
]
differ = [
    (one, other) for one, other in zip(*words, strict=True) if one != other
]
print("words that differ:", differ)

# %%
# One word differs. It belongs to the first storage, and the next storage refers back to it. The
# numbers are the same. This word is the *location tag*. A safetensors file does not have such a
# tag, so it loads anywhere.
#
# map_location: two spellings that look right
# -------------------------------------------
#
# ``map_location`` overrules the tags. A string puts all tensors in one place. A dict has to contain
# every tag in full: ``"cuda"`` is not short for ``"cuda:3"``. If a function returns None, torch
# obeys the tag after all.

try:
    torch.load(path, map_location={"cuda": "cpu"})
except RuntimeError as error:
    print(str(error).split(" but ")[0])

# %%
# In torchlift, ``"cuda"`` means every GPU without an entry of its own. If a rule returns None,
# torchlift uses its default device, never the tag:

rule = torchlift.remap.by_location({"cuda": "cpu"})
report = torchlift.load(model, path, device=rule)
print(rule, "->", {item.device for item in report.loaded.values()})

# %%
# Proof
# -----
#
# Seven files contain the same numbers. Their tags name NVIDIA's and AMD's GPUs (both are ``cuda``),
# Apple's, Intel's, and two accelerators whose packages are not installed here. Each file is loaded
# in each way, and the values are compared.

# fold: Load each file in each way, compare, and show it as a table
from functools import partial


class Table(dict):
    """Rows by name: HTML on a page, text in a terminal."""

    def __repr__(self):
        return "\n".join(
            f"{key:<27}{'  '.join(row)}" for key, row in self.items()
        )

    def _repr_html_(self):
        html = ""
        for key, row in self.items():
            marks = {"yes": "✓&nbsp;yes", "no": "✗&nbsp;no"}
            cells = "".join(f"<td>{marks.get(c, c)}</td>" for c in row)
            html += f"<tr><th>{key}</th>{cells}</tr>"
        return f"<div style='overflow-x: auto'><table>{html}</table></div>"


def by_torchlift(path):
    loaded = torchlift.skeleton(torch.nn.Linear, 1024, 1024)
    torchlift.load(loaded, path)
    return loaded.state_dict()


def loads(load, path):
    try:
        return torchlift.diff(load(path), twin).equal
    except Exception:
        return False


ways = {"a function without return": lambda storage, tag: None}
ways |= {
    str(form): form for form in ({"cuda": "cpu"}, {"cuda:3": "cpu"}, "cpu")
}
ways["a function"] = lambda storage, tag: storage
ways = {
    way: partial(torch.load, map_location=form) for way, form in ways.items()
}
ways = {"torch.load": torch.load} | ways | {"torchlift.load": by_torchlift}
found = {way: [loads(ways[way], files[tag]) for tag in TAGS] for way in ways}
assert [sum(row) for row in found.values()] == [1, 1, 1, 2, 7, 7, 7]
table = {
    way: ["yes" if ok else "no" for ok in row] for way, row in found.items()
}

# %%

Table({"": TAGS} | table)

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 3.2))
colors = ["C3" if all(row) else "C0" for row in found.values()]
colors[-1] = "C1"
axes.barh(list(found), [sum(row) for row in found.values()], color=colors)
for y, row in enumerate(found.values()):
    axes.text(sum(row), y, f" {sum(row)}", va="center")
axes.set(xlim=(0, len(TAGS) + 0.7), xlabel="files that load, of 7")
axes.tick_params(axis="y", length=0)
axes.invert_yaxis()
plt.show()

# %%
# *Each bar counts how many of seven files load in one way, on a machine with a CPU only. The files
# hold the same numbers, and each has a tag of another device. Plain torch.load fails for six. The
# bars between the first and the last are values of map_location: three fail for most files, and two
# load all. With torchlift.load all files load without an argument.*
#
# Remember
# --------
#
# - A location tag records the device on which a tensor was saved. The numbers themselves need no
#   device.
# - ``torch.load`` obeys the tag by default, so the same line works on one machine and fails on
#   another.
# - A dict for ``map_location`` matches complete tags only. A function that returns None obeys the
#   tag.
#
# Use this when
# -------------
#
# - **Plain torch, any file:** `torch.load` with ``map_location="cpu"`` and ``mmap=True``.
# - **You have a model to load into:** `torchlift.load`, without an argument about devices.
# - **You want to know where a file comes from:** `torchlift.open`. Its entries have a ``location``.
# - **The tensors go to several devices:** *From eight GPUs to one*.

# %%
# Question
# --------
#
# You load to the CPU and call ``model.to("cuda:0")``, or you pass ``device="cuda:0"`` to the load.
# Do the weights differ, and which of the two needs a copy in the memory of the host?

# fold: Answer to the question
# They are equal. The first holds all weights on the host until they are moved,
# if they are not mapped. With device= a small buffer takes them to the GPU.
kept, device = "", "cpu"
if torch.cuda.is_available():
    device, kept = "cuda:0", "on the GPU"
moved = torchlift.skeleton(torch.nn.Linear, 1024, 1024)
torchlift.load(moved, path, source="read")
moved.to(device)
direct = torchlift.skeleton(torch.nn.Linear, 1024, 1024)
torchlift.load(direct, path, device=device)
assert torch.equal(moved.weight, direct.weight)
print("equal", kept or "- on the CPU, because this machine does not have a GPU")

"""
"Attempting to deserialize object on a CUDA device": saved on a GPU, loaded on a CPU
====================================================================================

Somebody sends you a checkpoint, and ``torch.load`` says that it needs a GPU. Why would a file full
of numbers need one, and how do you load it without?

`torchlift.load` needs no GPU and no argument: where a tensor was when it was saved is a note in the
file, and torchlift reads it as one.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

path = tempfile.mkdtemp() + "/sent.pt"
there = "cuda" if torch.cuda.is_available() else "cpu"  # what this machine has
torch.save(torch.nn.Linear(1024, 1024, device=there).state_dict(), path)
model = torch.nn.Linear(1024, 1024)
torchlift.load(model, path)  # saved anywhere, loaded here
for key, entry in torchlift.open(path).entries.items():
    here = model.get_parameter(key).device
    print(f"{key}: saved on {entry.location}, loaded on {here}")

# %%
# The line that loads is the same for a file from any machine. To see it work for one from a GPU
# where there is none, you need such a file.
#
# Why torch.load wants a GPU
# --------------------------
#
# The next cell makes such files on this machine: `torch.serialization.register_package` puts a
# function first that says where a tensor is. ``torch.load`` reads each tensor into host memory, as
# it must, and then puts it where it was:


# fold: Files that say cuda:3 and the like, written without a GPU
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
# On a machine with one GPU the message is about a device number that is too high.
#
# The note is one word
# --------------------
#
# A ``.pt`` file is a zip archive with a pickle in it, and a pickle is a list of words. Compare
# those of this file with those of its twin, which was saved on the CPU:

import pickletools
from zipfile import ZipFile

pickles = [ZipFile(file).read("sent/data.pkl") for file in (path, twin)]
words = [[word for _, word, _ in pickletools.genops(pickle)] for pickle in pickles]
differ = [(one, other) for one, other in zip(*words, strict=True) if one != other]
print("words that differ:", differ)

# %%
# It stands beside the first storage, and the next one refers back to it. The numbers are the same.
# This word is the *location tag*. A safetensors file has none, so it loads anywhere.
#
# map_location: two spellings that look right
# -------------------------------------------
#
# ``map_location`` overrules the tags. A string puts all tensors in one place. A dict has to name
# every tag in full: ``"cuda"`` is not short for ``"cuda:3"``. And where a function returns None,
# the tag is obeyed after all.

try:
    torch.load(path, map_location={"cuda": "cpu"})
except RuntimeError as error:
    print(str(error).split(" but ")[0])

# %%
# In torchlift, ``"cuda"`` means every GPU without an entry of its own, and a rule that says nothing
# leaves the choice to the default, never to the tag:

rule = torchlift.remap.by_location({"cuda": "cpu"})
report = torchlift.load(model, path, device=rule)
print(rule, "->", {item.device for item in report.loaded.values()})

# %%
# Proof
# -----
#
# Seven files with the same numbers, tagged as NVIDIA's and AMD's GPUs (both are ``cuda``), Apple's,
# Intel's, and two accelerators whose packages are not installed here. Each is loaded in each way,
# and the values are compared.

# fold: Load each file in each way, compare, and show it as a table
from functools import partial


class Table(dict):
    """Rows by name: HTML on a page, text in a terminal."""

    def __repr__(self):
        return "\n".join(f"{key:<27}{'  '.join(row)}" for key, row in self.items())

    def _repr_html_(self):
        html = ""
        for key, row in self.items():
            cells = "".join(f"<td>{cell}</td>" for cell in row)
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
ways |= {str(form): form for form in ({"cuda": "cpu"}, {"cuda:3": "cpu"}, "cpu")}
ways["a function"] = lambda storage, tag: storage
ways = {way: partial(torch.load, map_location=form) for way, form in ways.items()}
ways = {"torch.load": torch.load} | ways | {"torchlift.load": by_torchlift}
found = {way: [loads(ways[way], files[tag]) for tag in TAGS] for way in ways}
assert [sum(row) for row in found.values()] == [1, 1, 1, 2, 7, 7, 7]
table = {way: ["yes" if ok else "no" for ok in row] for way, row in found.items()}

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
# *Seven files with the same numbers, each with a note that names another device, loaded on a
# machine that has a CPU alone. Plain torch.load fails for six. Between the first bar and the last
# are values of its map_location: three fail for most of the files, two for none. torchlift.load
# needs none.*
#
# Remember
# --------
#
# - A location tag is a word beside the numbers: where they were. They need no device themselves.
# - ``torch.load`` obeys the tag unless you say otherwise, so the same line works on one machine and
#   fails on another.
# - A dict for ``map_location`` matches whole tags only; a function that returns None obeys the tag.
#
# Use this when
# -------------
#
# - **Plain torch, any file:** `torch.load` with ``map_location="cpu"`` and ``mmap=True``.
# - **You have a model to load into:** `torchlift.load`, without an argument about devices.
# - **You ask where a file comes from:** `torchlift.open`; its entries have a ``location``.
# - **The tensors go to several devices:** *From eight GPUs to one*.

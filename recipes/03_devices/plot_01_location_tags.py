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


def save_as_if_on_a_gpu(path):
    torch.serialization.register_package(0, lambda _: "cuda:3", lambda *_: None)
    torch.save(torch.nn.Linear(1024, 1024).state_dict(), path)


path = tempfile.mkdtemp() + "/from_gpu.pt"
torchlift.measure.in_child(save_as_if_on_a_gpu, path)  # a process of its own
print(torchlift.open(path))
model = torch.nn.Linear(1024, 1024)
print(torchlift.load(model, path), "on", model.weight.device)

# %%
# No GPU was needed to write this file either: `torch.serialization.register_package` puts a
# function first that says where a tensor is, and this one always says ``cuda:3``. The summary lists
# that as the *location* of each tensor, and the weights load on the CPU.
#
# Why torch.load wants a GPU
# --------------------------
#
# ``torch.load`` reads each tensor into host memory, as it must, and then puts it where it was:

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
# Make the same file once more, without the function in front. A ``.pt`` file is a zip archive;
# ``pickletools`` lists the words of the pickle in there and executes none.

import pickletools
import zipfile
from functools import partial


def words(path):
    with zipfile.ZipFile(path) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/data.pkl"))
        return [word for _, word, _ in pickletools.genops(archive.read(name))]


twin = path.replace("from_gpu", "from_cpu")
torch.save(model.state_dict(), twin)
pairs = list(zip(words(path), words(twin), strict=True))
print("words that differ:", [(a, b) for a, b in pairs if a != b])
assert torchlift.diff(path, twin).equal

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


def stay(storage, tag):
    return storage


def forget(storage, tag):
    """The same, without the return."""


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


TAGS = "cpu", "cuda:0", "cuda:3", "mps", "xpu:0", "hpu", "npu:3"
files = {tag: f"{tempfile.mkdtemp()}/tagged.pt" for tag in TAGS}


def save_with_tags(state):
    tags = []
    torch.serialization.register_package(0, lambda _: tags[-1], lambda *_: None)
    for tag, path in files.items():
        tags.append(tag)
        torch.save(state, path)


torchlift.measure.in_child(save_with_tags, model.state_dict())


def by_torchlift(path):
    loaded = torchlift.skeleton(torch.nn.Linear, 1024, 1024)
    torchlift.load(loaded, path)
    return loaded.state_dict()


ways = {"torch.load(file)": torch.load, "torchlift.load": by_torchlift}
for form in {"cuda": "cpu"}, {"cuda:3": "cpu"}, forget, stay, "cpu":
    label = "map_location=" + getattr(form, "__name__", repr(form))
    ways[label] = partial(torch.load, map_location=form)

loads = {}
for way, load in ways.items():
    loads[way] = []
    for path in files.values():
        try:
            loads[way].append(torchlift.diff(load(path), twin).equal)
        except Exception:
            loads[way].append(False)
    print(f"{way:<31} {sum(loads[way])} of {len(TAGS)}")

assert len([way for way in ways if all(loads[way])]) == 3
assert all(loads["torchlift.load"])

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 4.2))
rows = sorted(loads, key=lambda way: (sum(loads[way]), way))
for y, way in enumerate(rows):
    color = "C1" if "torchlift" in way else "C3" if all(loads[way]) else "C0"
    for x, good in enumerate(loads[way]):
        axes.barh(y, 0.9 * good, left=x - 0.45, color=color)
        ink = "white" if good else "black"
        axes.text(x, y, "yes" if good else "no", c=ink, ha="center", va="center")
axes.set_yticks(
    range(len(rows)), [way.replace("map_location=", "") for way in rows]
)
axes.set_xticks(range(len(TAGS)), TAGS, rotation=40)
axes.set_xlabel("Does a file with this tag load?")
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plt.show()

# %%
# *Seven files with the same numbers on a machine without accelerators; the row labels that do not
# end in load are values of map_location. Most work for some files. Those with yes everywhere ignore
# the tags: torchlift.load, and in plain torch two of the values.*
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

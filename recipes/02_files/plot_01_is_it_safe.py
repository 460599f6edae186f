"""
Is this checkpoint safe? A .pt file can run code
================================================

Somebody sends you a ``.pt`` file. Can you look at it, and take the weights out, without running
code that its author put in?

Yes: `torchlift.open` reads the index and the bytes of the weights, and calls nothing that the file
names. It cannot reach weights inside a pickled object, such as a complete module.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift


class Trap:
    """An object whose pickle is a call."""

    def __reduce__(self):
        return print, ("  this line was printed by the file",)


sent = tempfile.mkdtemp() + "/sent.pt"
torch.save({"weight": torch.eye(2), "config": Trap()}, sent)
print(str(torchlift.open(sent)).replace(sent, "sent.pt"))
print(torchlift.open(sent)["weight"])

# %%
# The summary lists the trap, ``builtins.print``, as *blocked*, and the other tensor is readable. In
# a terminal, ``torchlift inspect sent.pt`` prints the same without importing torch. It ends with
# status 3, because something in the file would have run code.
#
# Weights only load failed
# ------------------------
#
# A ``.pt`` file contains a pickle, and a pickle is a program. Loaded the old way, it runs:

torch.load(sent, weights_only=False)

# %%
# It printed a line. It could have removed your files. Since torch 2.6 the default refuses such a
# file, and you get nothing at all, not even the harmless weights:

try:
    torch.load(sent)
except Exception as error:
    print(f"{type(error).__name__}: {str(error).split('. ')[0]}")

# %%
# The message then suggests to run the file after all.
# ``torch.serialization.get_unsafe_globals_in_checkpoint`` lists the calls in it. torchlift needs
# neither. Its own reader of pickles knows a list of harmless names and records every other name as
# blocked. The weights are not in the pickle. They are next to it as plain bytes.
#
# Load the weights next to the trap
# ---------------------------------
#
# torchlift refuses each blocked object by its key. Name the keys that you do not need, and the
# others load:

with torchlift.open(sent) as ckpt:
    print("blocked:", ckpt.blocked)
    try:
        ckpt["config"]
    except torchlift.UnsafeError as error:
        print(str(error).replace(sent, "sent.pt"))

model = torchlift.skeleton(torch.nn.Linear, 2, 2, bias=False)
report = torchlift.load(model, sent, allow_unexpected=["config"])
print(list(report.loaded), model.weight.tolist())

# %%
# .. warning::
#
#    This does not protect you from weights that were trained to misbehave, nor from code that
#    comes with the file, such as a model class. A later ``torch.load(weights_only=False)`` of the
#    same file still runs its calls. Check a file again if somebody could have written to it.
#
# Proof
# -----
#
# This trap leaves a folder behind, so its calls can be counted. Each reader gets its own file with
# eight weights and three calls. Afterwards you count the folders and the weights.

# fold: How the traps are set, and how their effects are counted
import os
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path


class MakeFolder:
    """An object whose pickle makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def inspect(path):
    """Run the command in a new process. It returns no weights."""
    command = [sys.executable, "-m", "torchlift", "inspect", path]
    assert subprocess.run(command, capture_output=True).returncode == 3
    return {}


def count(read):
    """Return how many calls of the file ran, and how many weights were read."""
    folder = Path(tempfile.mkdtemp())
    sent = {f"weight {i}": torch.eye(2) for i in range(8)}
    sent |= {
        f"trap {i}": MakeFolder(str(folder / f"mark {i}")) for i in range(3)
    }
    torch.save(sent, folder / "sent.pt")
    try:
        found = read(str(folder / "sent.pt"))
    except pickle.UnpicklingError:
        found = {}
    weights = sum(isinstance(value, torch.Tensor) for value in found.values())
    return len(list(folder.glob("mark*"))), weights


# %%

READERS = {
    "torch.load(weights_only=False)": partial(torch.load, weights_only=False),
    "torch.load": torch.load,
    "torchlift inspect": inspect,
    "torchlift.open": lambda path: torchlift.open(path).state_dict(),
}
rows = {name: count(read) for name, read in READERS.items()}
for name, (calls, weights) in rows.items():
    print(f"{name:<30}  ran {calls} of 3 calls, gave {weights} of 8 weights")

assert list(rows.values()) == [(3, 8), (0, 0), (0, 0), (0, 8)]

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, panels = plt.subplots(1, 2, figsize=(5.6, 2.8), sharey=True)
names = [name.replace("(", "(\n") for name in rows]
titles = "calls of the file\nthat ran", "weights\nthat you get"
for axes, title, numbers in zip(
    panels, titles, zip(*rows.values(), strict=True), strict=True
):
    axes.barh(names, numbers, color=("C0", "C3", "C1", "C1"))
    for y, number in enumerate(numbers):
        axes.text(number, y, f" {number}", va="center")
    axes.set(title=title, xlim=(0, 1.25 * max(numbers)), xlabel="number")
    axes.tick_params(axis="y", length=0)
panels[0].invert_yaxis()
plt.show()

# %%
# *Left, the bars count how many of the file's three calls ran. Right, they count how many of its
# eight weights you get. The old torch.load runs all three calls. The torch.load of today runs none
# and gives you nothing. With torchlift inspect you see the contents, with torchlift.open you also
# get the weights, and neither runs a call.*
#
# Remember
# --------
#
# - A ``.pt`` file is a program with weights next to it. A full unpickler runs that program.
# - `torchlift.open` and ``torchlift inspect`` list the calls of the file and run none of them.
# - Weights next to a blocked object load: ``allow_unexpected=`` or ``root=`` leaves the object out.
#   Weights inside a pickled module do not load. Ask its author for the ``state_dict()``.
#
# Use this when
# -------------
#
# - **You were sent a file:** `torchlift.open`, or ``torchlift inspect FILE`` and its exit status.
# - **You only need its weights:** `torchlift.load` into your own model.
# - **You want to pass it on:** `torchlift.convert` it to safetensors.

# %%
# Question
# --------
#
# A safetensors file does not contain a pickle. Can a bad one make a reader return wrong bytes?

# fold: Answer to the question
# Its header may claim bytes that the file does not have. torchlift checks that.
import json

claim = {"w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}
header = json.dumps(claim).encode()
bad = Path(tempfile.mkdtemp(), "bad.safetensors")
bad.write_bytes(len(header).to_bytes(8, "little") + header)
refused = ""
try:
    torchlift.open(bad)
except torchlift.FormatError as error:
    refused = error.reason
print(refused)
assert refused

"""
Is this checkpoint safe? A .pt file can run code
================================================

Somebody sends you a ``.pt`` file. Can you look at it, and take the weights out, without running
what its author put in?

Yes: `torchlift.open` reads the index and the bytes of the weights, and calls nothing that the file
names. Only the weights inside of a pickled object, such as a whole module, stay where they are.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift


class Trap:
    """An object whose pickle is a call. Any call."""

    def __reduce__(self):
        return print, ("  this line was printed by the file",)


sent = tempfile.mkdtemp() + "/sent.pt"
torch.save({"weight": torch.eye(2), "config": Trap()}, sent)
print(str(torchlift.open(sent)).replace(sent, "sent.pt"))
print(torchlift.open(sent)["weight"])

# %%
# The summary names the trap, ``builtins.print``, as *blocked*, and the tensor beside it is there.
# In a terminal, ``torchlift inspect sent.pt`` prints the same without importing torch, and ends
# with status 3: something in the file would have run code.
#
# Weights only load failed
# ------------------------
#
# A ``.pt`` file holds a pickle, and a pickle is a program. Loaded the old way, it runs:

torch.load(sent, weights_only=False)

# %%
# It printed a line; it could have removed your files. Since torch 2.6 the default refuses such a
# file, and you get nothing at all, not even the weights that lie beside the trap:

try:
    torch.load(sent)
except Exception as error:
    print(f"{type(error).__name__}: {str(error).split('. ')[0]}")

# %%
# The way out that the message goes on to suggest is to run the file after all; what it would call,
# ``torch.serialization.get_unsafe_globals_in_checkpoint`` lists. torchlift needs no way out: it
# reads the pickle with a reader of its own that knows a list of harmless names and turns every
# other into a note. The weights are not in the pickle; they lie beside it as plain bytes.
#
# Load the weights beside the trap
# --------------------------------
#
# What is refused is refused by name; say which name you do without, and the others load:

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
#    This does not protect you from weights that were trained to misbehave; from code that
#    comes beside the file, such as a model class that you are asked to trust; from a later
#    ``torch.load(weights_only=False)`` of the same file. And nothing can be said about a file
#    after somebody could write to it: check it again.
#
# Proof
# -----
#
# A trap that leaves something behind can be counted. Each reader gets a file of its own, with eight
# weights and three calls that make a folder; afterwards you count the folders, and the weights.

# fold: How the traps are set, and what they did is counted
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
    """Run the command, in a process of its own. It gives no weights."""
    command = [sys.executable, "-m", "torchlift", "inspect", path]
    assert subprocess.run(command, capture_output=True).returncode == 3
    return {}


def count(read):
    """Return how many calls of the file ran, and how many weights came."""
    folder = Path(tempfile.mkdtemp())
    sent = {f"weight {i}": torch.eye(2) for i in range(8)}
    sent |= {f"trap {i}": MakeFolder(str(folder / f"mark {i}")) for i in range(3)}
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
# *Four ways to read a file that holds eight weights and three calls. The old torch.load runs all
# three; the torch.load of today runs none, and gives you nothing. torchlift inspect runs none and
# lists what is inside; torchlift.open gives you the weights as well, and runs none.*
#
# Remember
# --------
#
# - A ``.pt`` file is a program with weights beside it. Opening it with a full unpickler runs it.
# - `torchlift.open` and ``torchlift inspect`` list what they would have to run, and run none of it.
# - The weights beside a blocked object load: ``allow_unexpected=`` or ``root=`` leaves it out.
#   Those inside of one do not: ask whoever sent a whole module for its ``state_dict()``.
#
# Use this when
# -------------
#
# - **You were sent a file:** `torchlift.open`, or ``torchlift inspect FILE`` and its exit status.
# - **You only need its weights:** `torchlift.load` into your own model.
# - **You want to pass it on:** `torchlift.convert` it to safetensors.

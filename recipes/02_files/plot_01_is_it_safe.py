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
# The way out that the message goes on to suggest is to run the file after all. torchlift needs
# none: it reads the pickle with a reader of its own that knows a list of harmless names and turns
# every other into a note. The weights are not in the pickle; they lie beside it as plain bytes.
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
# A trap that leaves something behind can be counted. This one makes a folder. Four readers get a
# file of their own; afterwards you look for the folder, and for the weights.

import os
import subprocess
import sys
from pathlib import Path


class Mark:
    """An object whose pickle makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def inspect(path):
    """Run the command, in a process of its own."""
    command = [sys.executable, "-m", "torchlift", "inspect", path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 3
    return done.stdout


READERS = {
    "torch.load(weights_only=False)": lambda path: torch.load(
        path, weights_only=False
    ),
    "torch.load": torch.load,
    "torchlift inspect": inspect,
    "torchlift.open": lambda path: torchlift.open(path).state_dict(),
}
rows = {}
for name, read in READERS.items():
    folder = Path(tempfile.mkdtemp())
    path, mark = str(folder / "sent.pt"), folder / "mark"
    torch.save({"weight": torch.eye(2), "config": Mark(str(mark))}, path)
    try:
        found = read(path)
    except Exception:
        found = ()
    rows[name] = (
        not mark.exists(),
        bool(found),
        "weight" in found and name != "torchlift inspect",
    )

ran = [name for name, (safe, _, _) in rows.items() if not safe]
assert ran == ["torch.load(weights_only=False)"]
assert rows["torchlift.open"] == (True, True, True)
print("ran the file's code:", *ran)

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 3))
for y, (name, marks) in enumerate(rows.items()):
    color = "C1" if name.startswith("torchlift") else "C0"
    for x, good in enumerate(marks):
        text, ink, paper = (
            ("yes", "white", color) if good else ("no", color, "white")
        )
        box = {"boxstyle": "round", "facecolor": paper, "linewidth": 0}
        axes.text(x, y, text, color=ink, bbox=box, ha="center", va="center")
columns = "runs\nnothing", "says what\nis inside", "gives the\nweights"
names = [name.replace("(", "(\n") for name in rows]
axes.set(xlim=(-0.5, 2.5), ylim=(3.5, -0.5))
axes.set_xticks(range(3), columns)
axes.set_yticks(range(4), names)
axes.tick_params(length=0, top=True, labeltop=True, labelbottom=False)
axes.spines[:].set_visible(False)
plt.show()

# %%
# *Four readers and one booby-trapped file: only the old torch.load runs it, and only torchlift.open
# gives you the weights without running it.*
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

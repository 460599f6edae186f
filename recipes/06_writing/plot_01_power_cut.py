"""
Save a checkpoint so that a crash costs nothing
===============================================

The job was killed, or the disk was full, while it saved. Now the new checkpoint is damaged, and the
old one had the same name. How do you save so that a complete checkpoint always exists?

Use `torchlift.save`. It writes a temporary file next to the old one, and renames it when the disk
has all of it.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

path = tempfile.mkdtemp() + "/training.pt"
model = torch.nn.Linear(1000, 1000)
torchlift.save({"model": model, "step": 1}, path)
try:
    torchlift.save({"model": model, "step": object()}, path)
except torchlift.CheckpointError as error:
    print(error)
print("in the file: step", torchlift.open(path).objects["step"])

# %%
# The second save failed, and the first checkpoint is unchanged. `torchlift.save` checks first
# whether everything can be read back without running code. ``torch.load`` reads the file, with
# ``weights_only=True`` and ``mmap=True``.
#
# PytorchStreamReader failed
# --------------------------
#
# ``torch.save`` opens the file under its own name, which empties it, and then begins to write. From
# then on the old checkpoint is lost:

torch.save({"step": 1}, path)
try:
    torch.save({"step": 2, "hook": lambda: None}, path)
except Exception as error:
    print("torch.save:", type(error).__name__)
try:
    torch.load(path)
except Exception as error:
    print("torch.load:", type(error).__name__, "-", str(error).split(":")[0])

# %%
# Here one object that cannot be pickled was enough (`issue 48243
# <https://github.com/pytorch/pytorch/issues/48243>`__ of PyTorch). A full disk, a quota or the end
# of a job has the same effect. Writing to another name and renaming is only half of the answer. You
# must also flush the file, and then its folder, to the disk. Otherwise a power cut can leave the
# new name without content.
#
# Proof
# -----
#
# A process saves 8 MB over and over until a signal kills it at a random moment, without a chance to
# clean up. Then you check whether the file can be read, and whether all of it is from one step.
# Each way is killed twenty times, including a rename without a flush:

import os


def save_and_rename(state, path):
    torch.save(state, path + ".new")
    os.replace(path + ".new", path)


WAYS = {
    "torch.save": torch.save,
    "renamed by hand": save_and_rename,
    "torchlift.save": torchlift.save,
}

# %%

# fold: How the saves are killed, and how the files are checked
import random
import signal


def survive_kills(save, path, kills=20):
    """Count the complete and the damaged checkpoints that kills leave."""
    torch.set_num_threads(1)
    found = {"whole": 0, "damaged": 0}
    for number in range(kills):
        save({"step": torch.full((2_000_000,), -1.0)}, path)
        child = os.fork()
        if not child:
            random.seed(number)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process
            signal.setitimer(signal.ITIMER_REAL, 0.02 + random.random() / 10)
            for step in range(1_000_000):
                save({"step": torch.full((2_000_000,), float(step))}, path)
        os.waitpid(child, 0)
        try:
            values = torch.load(path)["step"]
            whole = bool((values == values[0]).all())
        except Exception:
            whole = False
        found["whole" if whole else "damaged"] += 1
    return found


rows = {}
for name, save in WAYS.items():
    path = tempfile.mkdtemp() + "/training.pt"
    rows[name] = torchlift.measure.in_child(survive_kills, save, path).value
    print(f"damaged by {name:<15} ~{rows[name]['damaged']} of 20")

assert (
    rows["torchlift.save"]
    == rows["renamed by hand"]
    == {"whole": 20, "damaged": 0}
)
assert rows["torch.save"]["damaged"] > 0

# %%
# A kill is not a power cut. After a rename without a flush, the time when the bytes reach the disk
# is a matter of chance. Flushing takes as long as the disk needs. If a disk reports a flush too
# early, no program can help. To train while the disk writes, use a `torchlift.Keeper`.
#
# A killed process cannot clean up, so its unfinished file stays behind, under a hidden name. The
# next save to the same path sees that its lock is free, and removes it:

torchlift.save({"step": 21}, path)
print("in the folder now:", os.listdir(os.path.dirname(path)))

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 2.8))
for name, color in zip(rows, ("C0", "C3", "C1"), strict=True):
    whole, damaged = rows[name].values()
    axes.barh(name, whole, color=color)
    axes.barh(
        name, damaged, left=whole, color="white", edgecolor=color, hatch="//"
    )
axes.set(
    xticks=range(0, 21, 5), xlim=(0, 20.2), xlabel="files found after 20 kills"
)
axes.set_title("filled: whole, hatched: damaged", fontsize=12)
axes.invert_yaxis()
plt.show()

# %%
# *Each bar shows the files that were found after twenty kills during repeated saves to one name.
# Filled parts are complete files, and hatched parts are damaged ones. Many files of torch.save are
# damaged, because it writes under the final name. If another name comes first, by hand or by
# torchlift, you can read every file.*
#
# Remember
# --------
#
# - ``torch.save`` empties the old file before it writes the new one.
# - `torchlift.save` writes a new file, flushes it, and renames it. A complete file of that name
#   always exists.
# - You can save to the file that your model is mapped from. The map keeps the old bytes.
#
# Use this when
# -------------
#
# - **You save to one name again and again:** `torchlift.save`.
# - **You keep the last few, or the best:** `torchlift.Keeper`.
# - **You want to know whether an old file is complete:** `torchlift.verify`.

# %%
# Question
# --------
#
# A tensor is mapped from the file to which you save. What does it hold after the save?

# fold: Answer to the question
# The old bytes: the save makes a new file, and the map keeps the old one.
path = tempfile.mkdtemp() + "/mapped.pt"
torchlift.save({"weight": torch.ones(4)}, path)
mapped = torchlift.open(path)["weight"]
torchlift.save({"weight": mapped + 1}, path)
print("mapped:", mapped.tolist())
print("in the file:", torchlift.open(path)["weight"].tolist())
assert mapped.tolist() == [1.0] * 4

"""
Save a checkpoint so that a crash costs nothing
===============================================

The job was killed, or the disk was full, while it saved. Now the new checkpoint is damaged, and the
old one had the same name. How do you save so that there is always a whole one?

With `torchlift.save`: it writes beside the old file, and the new one takes the name when the disk
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
# The second save failed, and the first one is still there: `torchlift.save` asks first whether
# everything can be read back without running code. The file is what ``torch.load`` reads, with
# ``weights_only=True`` and ``mmap=True``.
#
# PytorchStreamReader failed
# --------------------------
#
# ``torch.save`` opens the file under its own name, which empties it, and then begins to write.
# Whatever happens from there on, the old checkpoint is gone:

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
# An object that cannot be pickled was enough. So are a full disk, a quota, and a job that is ended
# by its scheduler. Writing to another name and renaming is half of the answer: without flushing the
# file and its folder to the disk, in this order, a power cut can leave the new name and no content.
#
# Proof
# -----
#
# A process saves 8 MB over and over, until a signal ends it, at a moment that nobody chose and
# without a chance to tidy up. Then you look whether the file can be read, and whether it is all
# of one step. Twenty times for each way, the one with another name and no flush among them:

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

# fold: How the kills are survived, or not
import random
import signal


def survive_kills(save, path, kills=20):
    """Count what is found after each kill: a whole checkpoint, or a damaged one."""
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
    rows["torchlift.save"] == rows["renamed by hand"] == {"whole": 20, "damaged": 0}
)
assert rows["torch.save"]["damaged"] > 0

# %%
# A kill is not a power cut: what the rename alone leaves to chance is when the bytes are on the
# disk. Flushing takes the time that the disk takes, and a disk that lies about it is beyond any
# program. To train on meanwhile, use a `torchlift.Keeper`.
#
# A process that is killed cannot tidy up, so its unfinished file stays behind, under a hidden name.
# The next save to the same path finds that nobody has its lock any more, and removes it:

torchlift.save({"step": 21}, path)
print("in the folder now:", os.listdir(os.path.dirname(path)))

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 2.8))
for name, color in zip(rows, ("C0", "C3", "C1"), strict=True):
    whole, damaged = rows[name].values()
    axes.barh(name, whole, color=color)
    axes.barh(name, damaged, left=whole, color="white", edgecolor=color, hatch="//")
axes.set(
    xticks=range(0, 21, 5), xlim=(0, 20.2), xlabel="files found after 20 kills"
)
axes.set_title("filled: whole, hatched: damaged", fontsize=12)
axes.invert_yaxis()
plt.show()

# %%
# *A process saves to one file name again and again, and is killed twenty times in the middle of it.
# Of the files that torch.save was writing under their own name many are damaged. With another name
# first, by hand or by torchlift, each can be read and is all of one step.*
#
# Remember
# --------
#
# - ``torch.save`` empties the old file before it writes the new one.
# - `torchlift.save` writes beside it, flushes, renames: there is always a whole file of that name.
# - The file that your model is mapped from can be saved onto: the map keeps the old bytes.
#
# Use this when
# -------------
#
# - **You save to one name again and again:** `torchlift.save`.
# - **You keep the last few, or the best:** `torchlift.Keeper`.
# - **You want to know whether an old file is whole:** `torchlift.verify`.

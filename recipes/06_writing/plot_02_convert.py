"""
Convert a .pth file to safetensors, or to bfloat16, without loading it
======================================================================

The checkpoint is an old ``.pth`` and somebody needs safetensors; or it is float32 and the server
takes bfloat16; and it is larger than the memory of your laptop. Can it be converted all the same?

Yes: `torchlift.convert` reads and writes it block by block, in some 32 MiB whatever its size.
(A tensor that the file has compressed is inflated whole.)
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

folder = tempfile.mkdtemp()
old, new = folder + "/old.pth", folder + "/new.safetensors"
torch.save({"model": torch.nn.Linear(1000, 500).state_dict(), "epoch": 3}, old)
torchlift.convert(old, new)
print("new file: ", *torchlift.open(new))
torchlift.convert(old, new, root="model", dtype="bfloat16", overwrite=True)
print("its model:", *torchlift.open(new), torchlift.open(new)["weight"].dtype)

# %%
# The first call changes the format and nothing else. The second takes the model out of its
# container and casts it; ``rename=`` gives other names. In a terminal it is ``torchlift convert
# old.pth new.safetensors --root model --dtype bfloat16``; with ``--dry-run`` it only says what it
# would do.
#
# Some tensors share memory
# -------------------------
#
# By hand you load the file, cast into a second copy, half as large, and give all of it to
# ``save_file``. Then you run into what the two formats do not share. safetensors have no
# containers, no numbers beside the tensors and no ties: ``save_file`` refuses tied weights, and
# what else the file had is gone without a word. `torchlift.convert` says what the new file does not
# keep:

from safetensors.torch import save_file

tied = torch.nn.Linear(256, 256, bias=False)
both = torch.nn.Sequential(tied, torch.nn.ReLU(), tied)
torch.save({"model": both.state_dict(), "epoch": 3}, folder + "/tied.pt")
try:
    save_file(both.state_dict(), folder + "/tied.safetensors")
except RuntimeError as error:
    print(f"{type(error).__name__}:", " ".join(str(error).split()).split(": [")[0])
report = torchlift.convert(folder + "/tied.pt", folder + "/tied.safetensors")
print(str(report).replace(folder + "/", ""))

# %%
# The tie is told in the metadata of the file, once for both, so that `torchlift.open` gives it
# back, and converting to a torch file again does too. (Without torchlift, ``load_model`` of
# safetensors ties again, and ``load_file`` has one of the two names.)

torchlift.convert(folder + "/tied.safetensors", folder + "/again.pt")
print(torchlift.open(folder + "/again.pt").aliases)

# %%
# What is there already is not overwritten unless you say so, and a conversion that is killed leaves
# the old files as they were.

try:
    torchlift.convert(folder + "/tied.pt", folder + "/again.pt")
except torchlift.CheckpointError as error:
    print(str(error).replace(folder + "/", ""))

# %%
# Proof
# -----
#
# A checkpoint of 512 MiB in float32 becomes bfloat16 in safetensors, in new processes: by hand, by
# hand with the file mapped, and by `torchlift.convert`. Their anonymous memory (what the process
# owns, and the system cannot drop) is watched from outside.

# fold: Three ways, and their memory
from pathlib import Path

from torchlift import convert  # imported before the measurement, like the others

large = folder + "/large.pt"
torch.save({f"layers.{i}.weight": torch.randn(2**22) for i in range(32)}, large)


def by_hand(src, dst):
    state = {k: v.bfloat16() for k, v in torch.load(src).items()}
    save_file(state, dst)


def by_hand_mapped(src, dst):
    state = {k: v.bfloat16() for k, v in torch.load(src, mmap=True).items()}
    save_file(state, dst)


def by_torchlift(src, dst):
    convert(src, dst, dtype=torch.bfloat16)


WAYS = {
    "load, cast, save_file": by_hand,
    "with mmap=True": by_hand_mapped,
    "torchlift.convert": by_torchlift,
}
uses, written = {}, {}
for name, way in WAYS.items():
    dst = f"{folder}/{way.__name__}.safetensors"
    child = torchlift.measure.in_child(way, large, dst)
    uses[name] = child.memory
    written[name] = dst
    peak = child.memory.added_anonymous / 2**20
    print(f"{name:<22} anonymous peak: {peak:6.0f} MiB")

assert torchlift.diff(written["with mmap=True"], dst).equal
assert uses["torchlift.convert"].added_anonymous < 64 * 2**20
for path in Path(folder).iterdir():
    path.unlink()

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots()
for (name, use), look in zip(uses.items(), ("C0-", "C3-.", "C1-"), strict=True):
    seconds = [sample.seconds for sample in use.timeline]
    mib = [(row.anonymous - use.baseline.anonymous) / 2**20 for row in use.timeline]
    axes.plot(seconds, mib, look, label=name)
axes.set(xlabel="seconds of one run", ylabel="memory owned (MiB)", ylim=(0, None))
figure.legend(loc="outside upper center", ncols=2)
plt.show()

# %%
# *The memory that a process owns while 512 MiB of float32 becomes 256 MiB of bfloat16. By hand that
# is the file and its cast copy, or the cast copy alone where the file is mapped (mmap=True).
# torchlift.convert owns the same few blocks from beginning to end; its seconds include that it
# compares checksums and flushes the new file to the disk, which the others do not.*
#
# Remember
# --------
#
# - A conversion needs the index, and a block of the weights at a time; never the weights.
# - Read what the report says the new format does not keep.
# - ``dtype=`` takes a rule too: `torchlift.remap.by_pattern` keeps the norms in float32.
#
# Use this when
# -------------
#
# - **You have .pth, .bin or .ckpt and need safetensors, or the other way:** `torchlift.convert`.
# - **The file was sent to you:** the same; nothing in it runs.
# - **You have the model in memory already:** `torchlift.save`.
# - **You want to know that nothing was lost:** `torchlift.diff` of the two files.

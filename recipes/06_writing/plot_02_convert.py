"""
Convert a .pth file to safetensors, or to bfloat16, without loading it
======================================================================

The checkpoint is an old ``.pth`` and somebody needs safetensors. Or it is float32 and the server
takes bfloat16. And it is larger than the memory of your laptop. Can you still convert it?

Yes: `torchlift.convert` reads and writes it in blocks, in about 32 MiB for any file size. (A tensor
that the file has compressed is inflated completely.)
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
# The first call changes only the format. The second takes the model out of its container and casts
# it. ``rename=`` gives other names. In a terminal, run ``torchlift convert old.pth new.safetensors
# --root model --dtype bfloat16``. With ``--dry-run`` it only prints the plan.
#
# Some tensors share memory
# -------------------------
#
# By hand you load the file, cast it into a second copy of half the size, and pass that to
# ``save_file``. Then the formats differ. Safetensors files store tensors only: no containers, no
# plain numbers, no ties. ``save_file`` refuses tied weights and silently drops everything else.
# `torchlift.convert` reports what the new file does not keep:

from safetensors.torch import save_file

tied = torch.nn.Linear(256, 256, bias=False)
both = torch.nn.Sequential(tied, torch.nn.ReLU(), tied)
torch.save({"model": both.state_dict(), "epoch": 3}, folder + "/tied.pt")
try:
    save_file(both.state_dict(), folder + "/tied.safetensors")
except RuntimeError as error:
    print(
        f"{type(error).__name__}:", " ".join(str(error).split()).split(": [")[0]
    )
report = torchlift.convert(folder + "/tied.pt", folder + "/tied.safetensors")
print(str(report).replace(folder + "/", ""))

# %%
# The file stores the tied tensor once, and its metadata records the tie. `torchlift.open` restores
# it, and so does a conversion back to a torch file. Without torchlift, ``load_model`` of
# safetensors ties again, but ``load_file`` returns only one of the two names.

torchlift.convert(folder + "/tied.safetensors", folder + "/again.pt")
print(torchlift.open(folder + "/again.pt").aliases)

# %%
# An existing file is an error unless you pass ``overwrite=True``. A conversion that is killed
# leaves the old files unchanged.

try:
    torchlift.convert(folder + "/tied.pt", folder + "/again.pt")
except torchlift.CheckpointError as error:
    print(str(error).replace(folder + "/", ""))

# %%
# Proof
# -----
#
# A small Llama, with layers as in SmolLM and 67 million parameters, has 256 MiB in float32. It
# becomes bfloat16 in safetensors in three ways: by hand, by hand with the file mapped, and by
# `torchlift.convert`. Each runs in a new process. Their anonymous memory (RAM that the process owns
# and the system cannot drop) is measured from outside.

# fold: Three ways to convert, and their memory
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

from torchlift import convert  # before the measurement, as the others are

shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 11}
shape |= {
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
llama = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True))
large = folder + "/large.pt"
torch.save(llama.state_dict(), large)


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
    size = Path(dst).stat().st_size / 2**20
    print(
        f"{name:<22} anonymous peak: {peak:4.0f} MiB, the file: {size:.0f} MiB"
    )

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
    mib = [
        (row.anonymous - use.baseline.anonymous) / 2**20 for row in use.timeline
    ]
    axes.plot(seconds, mib, look, label=name)
axes.set(
    xlabel="seconds of one run", ylabel="memory owned (MiB)", ylim=(0, None)
)
figure.legend(loc="outside upper center", ncols=2)
plt.show()

# %%
# *The lines show the memory that a process owns while a Llama of 256 MiB in float32 becomes
# bfloat16. By hand it owns the file and its cast copy, or only the cast copy if the file is mapped
# (mmap=True). With torchlift.convert it owns the same few blocks from beginning to end, so the size
# of the file does not matter. Its seconds include comparing checksums and flushing the new file to
# the disk, which the other two skip.*
#
# The Llama ties its head to its embedding. A cast by hand makes two tensors of them, so these files
# are 54 MiB larger. `torchlift.convert` keeps the tie.
#
# Remember
# --------
#
# - A conversion needs the index and one block of the weights at a time, never all weights.
# - Read the report. It lists what the new format does not keep.
# - ``dtype=`` takes a rule too: `torchlift.remap.by_pattern` keeps the norms in float32.
#
# Use this when
# -------------
#
# - **You have .pth, .bin or .ckpt and need safetensors, or the other way:** `torchlift.convert`.
# - **The file was sent to you:** `torchlift.convert` too. No code in the file runs.
# - **You have the model in memory already:** `torchlift.save`.
# - **You want to know that nothing was lost:** `torchlift.diff` of the two files.

# %%
# Question
# --------
#
# How many bytes would a conversion write, before you start it?

# fold: Answer to the question
# dry_run=True returns the report of a conversion that writes nothing.
torch.save(both.state_dict(), old)
planned = torchlift.convert(old, new, dtype="bfloat16", dry_run=True)
print(str(planned).replace(folder + "/", ""))
assert not Path(new).exists()

"""
What changed between two checkpoints?
=====================================

Two files should hold the same model: before and after a conversion, or a training step, or a copy
over the network. Do they?

`torchlift.diff` compares checkpoints of any formats, one pair of tensors at a time.
`torchlift.verify` checks whether a file has changed since it was written.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

folder = tempfile.mkdtemp()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 2))
torch.save(model.state_dict(), folder + "/before.pt")
model[1](torch.ones(64)).sum().backward()
torch.optim.SGD(model[1].parameters(), lr=0.01).step()
torch.save(model.state_dict(), folder + "/after.pt")
print(torchlift.diff(folder + "/before.pt", folder + "/after.pt"))

# %%
# The second layer was trained, the first was not. In a terminal, ``torchlift diff before.pt
# after.pt`` prints the same. Its exit status is 0 if the files are equal, as for ``diff``.
#
# Same weights under other names
# ------------------------------
#
# By hand you load both complete files and compare key by key. That takes the memory of two copies,
# and it fails at the first key that has another name:

from safetensors.torch import save_file

state = {f"net.{key}": value for key, value in model.state_dict().items()}
state["net.0.weight"] = state["net.0.weight"].bfloat16()
save_file(state, folder + "/renamed.safetensors")
after = torch.load(folder + "/after.pt")
try:
    print(all(torch.equal(after[key], state[key]) for key in after))
except KeyError as error:
    print("KeyError:", error)

# %%
# `torchlift.diff` compares all keys that match and lists the others. Here names, a dtype and a
# format differ at once:

print(torchlift.diff(folder + "/after.pt", folder + "/renamed.safetensors"))

# %%
# Three of the four keys are *renamed*: they have the same bytes under another name. The fourth was
# cast, so its bytes differ. The last line says how to compare equal names. Then only the rounding
# of the cast differs, and it is within a tolerance:

with torchlift.open(folder + "/renamed.safetensors", root="net") as net:
    print(torchlift.diff(after, net).changed["0.weight"])
    print(torchlift.diff(after, net, rtol=2**-8).changed["0.weight"])

# %%
# Proof
# -----
#
# A disk, a cable or a full quota can damage a file silently. ``torch.save`` writes a checksum for
# every tensor, and ``torch.load`` never reads it (`issue 126952
# <https://github.com/pytorch/pytorch/issues/126952>`__ of PyTorch). Flip one bit in the middle of a
# weight:

from pathlib import Path

damaged = Path(folder, "damaged.pt")
with torchlift.open(folder + "/after.pt") as ckpt:
    (chunk,) = ckpt.entries["0.weight"].chunks
data = bytearray(Path(folder, "after.pt").read_bytes())
data[chunk.offset + 4 * 2080 + 2] ^= 0x40
damaged.write_bytes(bytes(data))

torch.load(damaged)  # no error
report = torchlift.verify(damaged)
assert not report.ok
assert [failure.name for failure in report.failed] == ["data/0"]
change = torchlift.diff(folder + "/after.pt", damaged).changed["0.weight"]
assert change.value.differing == 1
print([failure.name for failure in report.failed], change)

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, (left, right) = plt.subplots(1, 2, sharey=True)
files = [folder + "/before.pt", folder + "/after.pt", str(damaged)]
both = [
    torch.cat([torch.load(f)[f"{i}.weight"] for i in (0, 1)]) for f in files
]
for axes, title, old, new in (
    (left, "one training step", both[0], both[1]),
    (right, "one flipped bit", both[1], both[2]),
):
    y, x = (old != new).nonzero().T
    axes.scatter(x, y, 6, "C1", marker="s")
    if len(x) == 1:
        axes.plot(
            x, y, "C1o", markersize=16, fillstyle="none", markeredgewidth=3
        )
    axes.set(title=title, xlabel="column", xlim=(-1, 64), ylim=(66, -1))
left.set_ylabel("row, both layers")
plt.show()

# %%
# *Each mark is a value that differs between two files of this model, at its row and column. Left, a
# training step of the second layer changes its two rows at the bottom. Right, one flipped bit in a
# damaged copy changes one value. Loading that file raises no error, so only a comparison or a
# checksum finds it.*
#
# Remember
# --------
#
# - A comparison needs no second copy in memory. The files are mapped and compared in blocks.
# - *Renamed* means the same bytes under another name. *Changed* lists how far the values differ.
# - torch writes checksums and does not read them. ``torchlift.verify`` and
#   ``torchlift.load(verify=True)`` do.
#
# Use this when
# -------------
#
# - **After a conversion:** `torchlift.diff` with the tolerance of the dtype.
# - **After a copy:** `torchlift.verify`, which needs no second file.
# - **In a test or a script:** ``equal`` of a `torchlift.CheckpointDiff`.

# %%
# Question
# --------
#
# NaN is not equal to NaN. Does a diff of two equal files with a NaN in them report a change?

# fold: Answer to the question
# No. A diff compares what the files hold, and both hold the same NaN.
broken = {"w": torch.tensor([1.0, float("nan")])}
print(torchlift.diff(broken, {"w": broken["w"].clone()}))
assert torchlift.diff(broken, {"w": broken["w"].clone()}).equal
assert not torch.equal(broken["w"], broken["w"].clone())

"""
What changed between two checkpoints?
=====================================

Two files should hold the same model: before and after a conversion, or a training step, or a copy
over the network. Do they?

`torchlift.diff` compares checkpoints of any formats, one pair of tensors at a time, and
`torchlift.verify` tells whether a file is still what was written.
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
# after.pt`` prints the same, and its exit status is that of ``diff``: 0 for equal.
#
# Why
# ---
#
# The usual way is to load both files whole and to compare key by key. It needs the memory of two
# copies, and it stumbles over the first key that has another name. `torchlift.diff` compares what
# can be compared and lists the rest: here names, a dtype and a format differ at once.

from safetensors.torch import save_file

state = {f"net.{key}": value for key, value in model.state_dict().items()}
state["net.0.weight"] = state["net.0.weight"].bfloat16()
save_file(state, folder + "/renamed.safetensors")
found = torchlift.diff(folder + "/after.pt", folder + "/renamed.safetensors")
print(found)

# %%
# Three of the four keys have the same bytes under another name: *renamed*. The fourth was cast, so
# no bytes are equal. Give it its name, and the difference is that of the cast, within a tolerance:

plain = {key.removeprefix("net."): value for key, value in state.items()}
print(torchlift.diff(model.state_dict(), plain).changed["0.weight"])
print(torchlift.diff(model.state_dict(), plain, rtol=2**-8).changed["0.weight"])

# %%
# Proof
# -----
#
# A disk, a cable or a full quota changes a file without asking. ``torch.save`` writes a checksum
# beside every tensor, and ``torch.load`` never reads it. Flip one bit in the middle of a weight:

from pathlib import Path

damaged = Path(folder, "damaged.pt")
with torchlift.open(folder + "/after.pt") as ckpt:
    (chunk,) = ckpt.entries["0.weight"].chunks
data = bytearray(Path(folder, "after.pt").read_bytes())
data[chunk.offset + 4 * 2080 + 2] ^= 0x40
damaged.write_bytes(bytes(data))

torch.load(damaged)  # not a word
report = torchlift.verify(damaged)
assert not report.ok
assert [failure.name for failure in report.failed] == ["data/0"]
change = torchlift.diff(folder + "/after.pt", damaged).changed["0.weight"]
assert change.value.differing == 1
print([failure.name for failure in report.failed], change)

import matplotlib.pyplot as plt
import numpy as np

plt.rcParams.update({"figure.facecolor": "white", "font.size": 12})
figure, (left, right) = plt.subplots(
    1, 2, figsize=(7.2, 3.4), layout="constrained", sharey=True
)
with (
    torchlift.open(folder + "/before.pt") as a,
    torchlift.open(folder + "/after.pt") as b,
):
    trained = (a["1.weight"] != b["1.weight"]).float()
with torchlift.open(folder + "/after.pt") as a, torchlift.open(damaged) as b:
    flipped = (a["0.weight"] != b["0.weight"]).float()
for axes, title, values in (
    (left, "one training step", torch.cat([torch.zeros(64, 64), trained])),
    (right, "one flipped bit", torch.cat([flipped, torch.zeros(2, 64)])),
):
    axes.imshow(
        values.numpy(),
        cmap="Greys",
        vmin=0,
        vmax=1,
        interpolation="nearest",
        aspect="auto",
    )
    for y, x in np.argwhere(values.numpy() == 1)[:1] if values.sum() == 1 else ():
        axes.plot(
            x,
            y,
            "o",
            markersize=14,
            fillstyle="none",
            color="#b83a16",
            markeredgewidth=2,
        )
    axes.set(title=title, xlabel="column")
left.set_ylabel("row, both layers")
plt.show()

# %%
# *Values that differ are black. A training step of the second layer changes its two rows at the
# bottom; a flipped bit changes one value, which only a checksum or a comparison finds.*
#
# Remember
# --------
#
# - A comparison needs no second copy in memory: the files are mapped, block by block.
# - *Renamed* means the same bytes under another name; *changed* says how far the values are apart.
# - torch writes checksums and does not read them. ``torchlift.verify`` does; so does
#   ``torchlift.load(verify=True)``.
#
# Use this when
# -------------
#
# - **After a conversion:** `torchlift.diff` with the tolerance of the dtype.
# - **After a copy:** ``torchlift verify FILE``, which needs no second file.
# - **In a test or a script:** ``.equal``, or the exit status of ``torchlift diff``.

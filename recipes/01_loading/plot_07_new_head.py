"""
Fine-tune with a new head: size mismatch and missing keys
=========================================================

The file has eight classes, your task has six. ``load_state_dict`` fails with *size mismatch*, even
with ``strict=False``. How do you load the part that matches, and what is in the other part?

Pass `torchlift.load` the names that may be missing. The body comes from the file, and the
constructor makes the new head.
"""

# %%
# In short
# --------

import tempfile

from torch import nn

import torchlift


def build(classes):
    return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, classes))


path = tempfile.mkdtemp() + "/old.pt"
torchlift.save(build(8), path)
model = torchlift.skeleton(build, 6)
new = {"allow_missing": ["1.*"], "ignore_mismatched": True}
report = torchlift.load(model, path, **new)
print("from the file:", list(report.loaded))
print("made now:", list(report.replayed))

# %%
# ``allow_missing`` names the tensors that may be new, and ``ignore_mismatched`` lets them have
# another shape in the file. Pass both: without names, ``ignore_mismatched`` skips **every** tensor
# of another shape, and only ``report.mismatched`` lists what was skipped.
#
# Size mismatch, although strict=False
# ------------------------------------
#
# The old network classifies stripes of eight directions. Every name in its file starts with
# ``module.``, a prefix of PyTorch's wrapper for several devices.

# fold: A network, images of stripes, and training
from collections import OrderedDict

import torch

torch.set_num_threads(1)  # more threads would only wait for tiny tensors
torch.manual_seed(0)


def network(classes):
    fine = nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)
    wide = nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
    body = nn.Sequential(*fine, *wide, nn.Flatten())
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(128, classes)))


def stripes(kinds, wave, noise):
    y, x = torch.meshgrid(*[torch.linspace(-1, 1, 16)] * 2, indexing="ij")
    angle = (torch.pi * kinds + 0.1 * torch.randn(len(kinds)))[:, None, None]
    across = x * angle.cos() + y * angle.sin()
    phase = 2 * torch.pi * torch.rand(len(kinds), 1, 1)
    clean = torch.sin(wave * across + phase)
    return (clean + noise * torch.randn(clean.shape))[:, None]


def train(model, optimizer, images, kinds, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), kinds).backward()
        optimizer.step()


old, kinds = network(8), torch.arange(8).repeat(64)
images = stripes(kinds / 8, wave=6, noise=0.8)
train(old, torch.optim.AdamW(old.parameters(), lr=0.003), images, kinds, 60)
state = {f"module.{key}": value for key, value in old.state_dict().items()}
torch.save(state, path)

# %%
# Load it into a network for six classes: with the prefix, without it, and without the old head.

with torch.device("meta"):
    model = network(6)
found = model.load_state_dict(torch.load(path), strict=False, assign=True)
print(len(found.missing_keys), "missing", end=", ")
print(len(found.unexpected_keys), "unexpected")

old = torch.load(path)
state = {key.removeprefix("module."): value for key, value in old.items()}
try:
    model.load_state_dict(state, strict=False, assign=True)
except RuntimeError as error:
    print(*(line.strip() for line in str(error).splitlines()), sep="\n    ")

body = {key: value for key, value in state.items() if key.startswith("body.")}
model.load_state_dict(body, strict=False, assign=True)
try:
    model.to("cpu")
except NotImplementedError as error:
    print(error)

# %%
# With the prefix nothing is loaded, and nothing is raised. ``strict=False`` ignores wrong names,
# but not wrong shapes. Without the head the load works, but the new head stays on meta. The error
# comes when you move the model. Its advice, ``to_empty``, would discard the weights that you have
# just loaded.
#
# Start strict, and read the list of mismatches
# ---------------------------------------------
#
# You may create the optimizer before the load. The load keeps the parameter objects.

model = torchlift.skeleton(network, 6)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)

try:
    torchlift.load(model, path)
except torchlift.MismatchError as error:
    print(error.hint)
rename = torchlift.remap.strip("module.")
try:
    torchlift.load(model, path, rename=rename)
except torchlift.MismatchError as error:
    print(str(error).replace(path, "old.pt"))

# %%
# Now the list is short, and it contains only the head. The plan reports the effect of the load:

new = {"allow_missing": ["head.*"], "ignore_mismatched": True, "rename": rename}
print(str(torchlift.plan(model, path, **new)).replace(path, "old.pt"))

# %%
# What is in the new head?
# ------------------------
#
# The new head has the initial values of its constructor. They are drawn during the load, so the
# seed of the load decides. The body comes from the file and draws no random numbers.

torch.manual_seed(7)
expected = nn.Linear(128, 6)
torch.manual_seed(7)
torchlift.load(model, path, **new)
assert torchlift.diff(model.head.state_dict(), expected.state_dict()).equal

# %%
# Proof
# -----
#
# The new task has more noise and only six images of each kind. Train the loaded model, one whose
# body you picked by hand, and one from scratch.

# fold: How the three are trained
torch.manual_seed(2)
kinds, answers = torch.arange(6).repeat(6), torch.arange(6).repeat(50)
images = stripes(kinds / 6 + 0.03, wave=8, noise=1.8)
tests = stripes(answers / 6 + 0.03, wave=8, noise=1.8)

by_hand, scratch = network(6), network(6)
by_hand.load_state_dict(body, strict=False)
by_hand.head = expected  # the same start for both
nets = {"from scratch": scratch, "by hand": by_hand, "torchlift": model}
losses = {way: [] for way in nets}
for way, net in reversed(nets.items()):
    if way != "torchlift":  # its optimizer already exists
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.003)
    for _ in range(41):
        loss = nn.functional.cross_entropy(net(tests), answers)
        losses[way].append(loss.item())
        train(net, optimizer, images, kinds)
    print(f"{way:<12}", [f"~{losses[way][step]:.2f}" for step in (0, 10, 40)])
assert losses["by hand"] == losses["torchlift"]
assert losses["torchlift"][40] < losses["from scratch"][40]
clear = stripes(torch.arange(6) / 6 + 0.03, wave=8, noise=0)  # to be drawn

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
names = "012345;abcdef;llllll"
figure, axes = plt.subplot_mosaic(names, height_ratios=(1, 1, 3))
for row, shown in ("012345", clear), ("abcdef", images):
    for kind, name in enumerate(row):
        axes[name].imshow(shown[kind, 0], cmap="gray")
        axes[name].set_axis_off()
for way, look in zip(losses, ("C0-", "C3-.", "C1-"), strict=True):
    axes["l"].plot(losses[way], look, label=way, lw=6 if "-." in look else 2.5)
axes["l"].set(xlim=(0, 40), ylim=(0, None), xlabel="step", ylabel="test loss")
figure.legend(loc="outside lower center", ncols=3)
plt.show()

# %%
# *Top, the six new classes: stripes in six directions, and below them as the network sees them, in
# noise. Bottom, the lines show the loss on test images while a network learns the classes. With a
# body that was trained on another task, a few steps are enough, whether torchlift or you loaded it.
# From scratch, six images of each class are too few.*
#
# Remember
# --------
#
# - ``strict=False`` ignores names, not shapes. With a wrong prefix it silently loads nothing.
# - Start strict. The error lists all mismatches and the rename that would fix them.
# - The constructor makes a missing tensor of a skeleton, with the seed of the load.
#
# Use this when
# -------------
#
# - **You want a new head:** `torchlift.load` with ``allow_missing`` and ``ignore_mismatched``.
# - **The old head has the shape of the new one:** it would be loaded. Add ``exclude=["head.*"]``,
#   with the names of the file, to skip it.
# - **Names come from a wrapper:** `torchlift.remap.strip`, or `torchlift.remap.rules` for several
#   rules.
# - **You do not have a file:** `torchlift.materialize`, for the complete model or for some names.

# %%
# Question
# --------
#
# The new task has eight classes too, but other ones. Which weights does the head get?

# fold: Answer to the question
# Those of the old head, because names and shapes match. Exclude them by name.
same = torchlift.skeleton(network, 8)
report = torchlift.load(same, path, rename=rename)
print("made now:", *report.replayed)
same = torchlift.skeleton(network, 8)
new = {"allow_missing": ["head.*"], "exclude": ["module.head.*"]}
report = torchlift.load(same, path, rename=rename, **new)
print("made now, with exclude:", *report.replayed)
assert set(report.replayed) == {"head.weight", "head.bias"}

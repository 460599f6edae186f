"""
My optimizer stopped learning after load_state_dict(assign=True)
================================================================

You load a checkpoint into a model that has an optimizer, and train through the night. In the
morning the loss is where it was, or it fell a little and stopped. No error, no warning. What did
the optimizer train?

It trained ghosts: parameters that are no longer in the model. `torchlift.load` gives new values to
the parameters that are there, in every mode but one.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

path = tempfile.mkdtemp() + "/model.pt"
model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.Adam(model.parameters())
torch.save(model.state_dict(), path)
params = set(optimizer.param_groups[0]["params"])
torchlift.load(model, path)
print("torchlift.load: ghosts:", len(params - set(model.parameters())))
model.load_state_dict(torch.load(path), assign=True)
print("assign=True:    ghosts:", len(params - set(model.parameters())))

# %%
# An optimizer has no model. It has a list of parameter *objects*, taken when it was built. Put
# another object into the model, and the model computes with one and the optimizer steps the other.
#
# The loss does not move
# ----------------------
#
# Three scripts build the model, then the optimizer, then load, then train. The first copies the
# values. The second has ``assign=True``, which somebody recommended because it saves memory. The
# third gives one layer a new weight: a new head, an adapter, a pruned layer.

# fold: A small model, what it learns, and the loop that trains it
from torch import nn

torch.set_num_threads(1)  # tiny tensors: more threads would only wait
torch.manual_seed(0)
points = 2 * torch.rand(512, 2) - 1
height = torch.sin(4 * points[:, :1]) * torch.cos(3 * points[:, 1:])


def build():
    ends = nn.Linear(2, 64), nn.Linear(64, 1)
    return nn.Sequential(ends[0], nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), ends[1])


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.002)


def train(model, steps, optimizer):
    """Return the loss and the norm of the gradient of each step."""
    history = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(points), height)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
        history.append((loss.item(), norm.item()))
    return history


model = build()
train(model, 150, adam(model))
torch.save(model.state_dict(), path)

# %%


def load(model, how):
    model.load_state_dict(torch.load(path), assign=how == "assigned")
    if how == "one replaced":
        model[2].weight = nn.Parameter(model[2].weight.detach().clone())


history, runs = {}, {}
for how in "copied", "assigned", "one replaced":
    model = build()
    optimizer = adam(model)
    load(model, how)
    history[how], runs[how] = train(model, 300, optimizer), (optimizer, model)
    losses = [loss for loss, _ in history[how]]
    print(f"{how:<13} loss from ~{losses[0]:.4f} to ~{losses[-1]:.4f}")

# %%
# The second run does not move. The third is the dangerous one: it falls, and looks like training.
#
# Why nobody complains
# --------------------
#
# No gradient reaches a ghost, and an optimizer skips a parameter that has none; that is how frozen
# layers work. ``zero_grad`` clears the ghosts, not the model, so the model's own gradients pile up,
# step after step. That is the symptom that a dashboard may show, and this is the check that finds
# it:


def ghosts(optimizer, model):
    """How many of the optimizer's parameters are not in the model."""
    alive = {id(parameter) for parameter in model.parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return sum(id(parameter) not in alive for parameter in params)


for how, steps in history.items():
    growth = steps[-1][1] / steps[0][1]
    print(f"{how:<13} ghosts: {ghosts(*runs[how])} of 6, gradient ~{growth:.1f}x")

# %%
# Who makes ghosts
# ----------------
#
# More lines than you think: `torchlift.load` with ``mode="assign"``, because new objects are what
# it is for, and torch's move off the meta device. Around torch's own lines,
# `torchlift.swap.preserving_references` exchanges the content of parameters instead.


# fold: Count the ghosts after a line has run
def count(line, device="cpu"):
    with torch.device(device):
        model = build()
    optimizer = adam(model)
    line(model)
    return ghosts(optimizer, model)


# %%

from functools import partial

to_empty = partial(nn.Module.to_empty, device="cpu")
print("to_empty, from meta:", count(to_empty, "meta"))
with torchlift.swap.preserving_references():
    print("to_empty, references preserved:", count(to_empty, "meta"))
for mode in "auto", "copy", "swap", "assign":
    line = partial(torchlift.load, ckpt=path, mode=mode)
    print(f"{mode:<6} live: {count(line)}, on meta: {count(line, 'meta')}")

# %%
# Proof
# -----
#
# The run that copied did nothing wrong. Here is `torchlift.load` in its place: every loss and every
# gradient is equal to the last bit.

model = build()
optimizer = adam(model)
torchlift.load(model, path, mode="swap")
expected = history["copied"]
loaded = train(model, 300, optimizer)
assert loaded == expected
assert history["one replaced"][-1][0] > 1.2 * expected[-1][0]
print("300 losses, equal to the last bit: True")

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, (above, below) = plt.subplots(2, 1, figsize=(5.6, 5.0), sharex=True)
curves = [("assign=True", history["assigned"], "C0-")]
curves += [("one new weight", history["one replaced"], "C0:")]
curves += [("torchlift.load", loaded, "C1-"), ("copied (torch)", expected, "C3-.")]
for label, steps, look in curves:
    losses, norms = zip(*steps, strict=True)
    width = 1.2 if look == "C3-." else 2.5  # two equal lines, one on the other
    above.plot(losses, look, lw=width, label=label)
    below.plot(norms, look, lw=width)
above.set(ylim=(0, None), ylabel="loss")
below.set(yscale="log", xlim=(0, 300), xlabel="step", ylabel="norm of the gradient")
figure.legend(
    loc="outside upper center", ncols=2, columnspacing=1, handlelength=2.2
)
plt.show()

# %%
# *The same training after four ways to load: above the loss, below the norm of the model's
# gradient, on a logarithmic scale. With assign=True the loss does not move, and the gradient grows.
# With one weight that is new to the optimizer, dotted, the loss falls slowly, and the gradient
# grows, too. After torchlift.load it falls as it should, on the line of torch's own copy,
# dash-dot.*
#
# Remember
# --------
#
# - An optimizer has objects, not names and not a model. Replace an object, and it goes on with the
#   old one.
# - No error tells you. The symptom is a gradient that grows and grows.
# - Values can change while the object stays. Then there is nothing to repair.
#
# Use this when
# -------------
#
# - **Any load into a model that something refers to:** `torchlift.load`.
# - **torch's own conversions:** `torchlift.swap.preserving_references` around them.
# - **Assign, because you must:** before the optimizer is built, never after it.
# - **Which mode for which case:** *assign=True, copy or swap*.

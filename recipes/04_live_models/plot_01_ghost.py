"""
My optimizer stopped learning after load_state_dict(assign=True)
================================================================

You load a checkpoint into a model that has an optimizer, and train through the night. In the
morning the loss is where it was, or it fell a little and stopped. No error, no warning. What did
the optimizer train?

It trained ghosts: parameters that are not in the model any more. `torchlift.load` changes the
values of the existing parameters, in every mode except ``assign``.
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
# An optimizer does not know the model. It has a list of parameter *objects* from the moment when it
# was built. If you put another object into the model, the model computes with the new one and the
# optimizer updates the old one.
#
# The loss does not move
# ----------------------
#
# Three scripts build the model, then the optimizer, then load, then train. The first copies the
# values. The second uses ``assign=True`` to save memory. The third gives one layer a new weight, as
# for a new head, an adapter or a pruned layer.

# fold: A small model, its data, and its training loop
from torch import nn

torch.set_num_threads(1)  # more threads would only wait for tiny tensors
torch.manual_seed(0)
points = 2 * torch.rand(512, 2) - 1
height = torch.sin(4 * points[:, :1]) * torch.cos(3 * points[:, 1:])


def build():
    ends = nn.Linear(2, 64), nn.Linear(64, 1)
    return nn.Sequential(
        ends[0], nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), ends[1]
    )


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
# The second run does not move. The third run is the dangerous one: its loss falls, so it looks like
# training.
#
# Why no error appears
# --------------------
#
# A ghost gets no gradient, and an optimizer skips a parameter without a gradient. Frozen layers
# rely on that rule. ``zero_grad`` clears the ghosts and not the model, so the model's own gradients
# grow with every step. A dashboard may show that symptom, and this check finds the cause:


def ghosts(optimizer, model):
    """Count the optimizer's parameters that are not in the model."""
    alive = {id(parameter) for parameter in model.parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return sum(id(parameter) not in alive for parameter in params)


for how, steps in history.items():
    growth = steps[-1][1] / steps[0][1]
    print(
        f"{how:<13} ghosts: {ghosts(*runs[how])} of 6, gradient ~{growth:.1f}x"
    )

# %%
# Lines that make ghosts
# ----------------------
#
# Two other lines make ghosts. `torchlift.load` with ``mode="assign"`` creates new objects by
# design, and torch creates them when it moves a model off the meta device. Put torch's lines inside
# `torchlift.swap.preserving_references`, which exchanges the content of the parameters instead.


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
# The run that copied is correct. Here is `torchlift.load` in its place. Every loss and every
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
curves += [
    ("torchlift.load", loaded, "C1-"),
    ("copied (torch)", expected, "C3-."),
]
for label, steps, look in curves:
    losses, norms = zip(*steps, strict=True)
    width = 1.2 if look == "C3-." else 2.5  # two equal lines, one on the other
    above.plot(losses, look, lw=width, label=label)
    below.plot(norms, look, lw=width)
above.set(ylim=(0, None), ylabel="loss")
below.set(
    yscale="log", xlim=(0, 300), xlabel="step", ylabel="norm of the gradient"
)
figure.legend(
    loc="outside upper center", ncols=2, columnspacing=1, handlelength=2.2
)
plt.show()

# %%
# *The lines show the same training after four ways to load: above the loss, below the norm of the
# model's gradient on a logarithmic scale. With assign=True the loss does not move, and the gradient
# grows. With one new weight, dotted, the loss falls slowly, and the gradient grows too. After
# torchlift.load both follow the line of torch's own copy, dash-dot. So watch the gradient: a norm
# that only grows is the sign of a ghost.*
#
# Remember
# --------
#
# - An optimizer has objects, not names and not a model. If you replace an object, the optimizer
#   updates the old one.
# - No error appears. The symptom is a gradient that grows and grows.
# - Change the values and keep the object. Then the optimizer stays correct.
#
# Use this when
# -------------
#
# - **Any load into a model that something refers to:** `torchlift.load`.
# - **torch's own conversions:** `torchlift.swap.preserving_references` around them.
# - **Assign, because you must:** before the optimizer is built, never after it.
# - **Which mode for which case:** *assign=True, copy or swap*.

# %%
# Question
# --------
#
# You build the optimizer *after* a load with ``assign=True``. Are there ghosts?

# fold: Answer to the question
# No. The optimizer gets the objects that the model computes with.
model = build()
load(model, "assigned")
found = ghosts(adam(model), model)
print("ghosts:", found)
assert found == 0

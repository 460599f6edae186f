"""
Adam starts at step 1: get_optimizer_state_dict before the first step
=====================================================================

You call PyTorch's function for the state dict of a new optimizer, to save step 0 or to load into
it. No weight moves. But from then on Adam's first real step is different. Who took a step?

PyTorch did, with a learning rate of zero, to create a state.
`torchlift.distributed.get_optimizer_state_dict` returns the state before the first step.
"""

# %%
# In short
# --------

import torch
from torch.distributed.checkpoint import state_dict as torch_state_dict

import torchlift

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
state = torchlift.distributed.get_optimizer_state_dict(model, optimizer)
print("torchlift reads: step", int(state["state"]["weight"]["step"]))
print("and the optimizer keeps", len(optimizer.state), "states")

state = torch_state_dict.get_optimizer_state_dict(model, optimizer)
print("torch reads:     step", int(state["state"]["weight"]["step"]))
print("and the optimizer keeps", len(optimizer.state), "states")

# %%
# After PyTorch's call Adam has counted one step that you never took.
#
# Why a wrong count moves the weights
# -----------------------------------
#
# Adam keeps a mean of the gradients and a mean of their squares. Both start at zero and are too
# small in the beginning, so Adam corrects them by their age. If the age is wrong, the correction is
# wrong too. PyTorch knows this as `issue 164929
# <https://github.com/pytorch/pytorch/issues/164929>`_. It happens if you save at step 0, or read
# the state of a new optimizer and train on.
#
# Proof
# -----
#
# The gradient is always the same here, so each step of Adam should move a weight by the learning
# rate. The three runs differ only before the first step: nothing reads the state, torch reads it,
# or torchlift reads it.


def read_nothing(model, optimizer):
    pass


def steps_after(read, count=20):
    """Return how far each step moves a weight, in learning rates."""
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    read(model, optimizer)
    moved = []
    for _ in range(count):
        before = model.weight.item()
        optimizer.zero_grad()
        model(torch.ones(1)).sum().backward()
        optimizer.step()
        moved.append((before - model.weight.item()) / 0.01)
    return moved


moved = {
    "no read": steps_after(read_nothing),
    "torch reads": steps_after(torch_state_dict.get_optimizer_state_dict),
    "torchlift reads": steps_after(
        torchlift.distributed.get_optimizer_state_dict
    ),
}
for name, steps in moved.items():
    print(f"{name:<16} first step {steps[0]:.3f}, all twenty {sum(steps):.2f}")
assert abs(moved["torchlift reads"][0] - 1) < 1e-3
assert moved["torch reads"][0] < 0.8

# %%
import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots()
looks = ("C0", 7, 0.4), ("C0", 2.5, 1), ("C1", 2.5, 1)
for (name, steps), (color, width, alpha) in zip(
    moved.items(), looks, strict=True
):
    axes.plot(range(1, 21), steps, color, lw=width, alpha=alpha, label=name)
axes.set(xlabel="step", ylabel="how far a weight moves\n(learning rates)")
axes.set(ylim=(0.6, 1.1), xticks=[1, 5, 10, 15, 20])
figure.legend(loc="outside upper center", ncols=3, fontsize=10)
plt.show()

# %%
# *The lines show how far each of Adam's first twenty steps moves a weight whose gradient is always
# the same. If torch has read the new optimizer's state dict, the first step is a quarter too short,
# and the error shrinks with each step. If torchlift has read it, the steps are unchanged. So a read
# before the first step can change your training.*
#
# Remember
# --------
#
# - A new optimizer does not have a state before its first step. A function that returns one must
#   create it.
# - The counter of Adam is a part of the mathematics, not a statistic.
# - Reading a state must not change it.
#
# Use this when
# -------------
#
# - **You save before the first step, or make a state dict to load into:**
#   `torchlift.distributed.get_optimizer_state_dict`. Only the import changes.
# - **You only load:** `torchlift.load_optimizer`. You do not create a state dict before it.
# - **You save while training:** `torchlift.Keeper`.

# %%
# Question
# --------
#
# Has plain SGD, without momentum, the same problem?

# fold: Answer to the question
# No. It keeps no counter and no mean, so a step of zero leaves nothing behind.
model = torch.nn.Linear(1, 1, bias=False)
sgd = torch.optim.SGD(model.parameters(), lr=0.01)
torch_state_dict.get_optimizer_state_dict(model, sgd)
before = model.weight.item()
model(torch.ones(1)).sum().backward()
sgd.step()
moved_by = (before - model.weight.item()) / 0.01
print(f"first step: {moved_by:.3f} learning rates")
assert abs(moved_by - 1) < 1e-3

"""
Optimizer state by name: a new head, or parameters in another order
===================================================================

You changed the model. The optimizer's state does not load, because it "contains a parameter group
that doesn't match the size of optimizer's group". Or it loads, and the loss jumps.

An optimizer counts its parameters. `torchlift.distributed.get_optimizer_state_dict` gives each
state the name of its parameter. A load by name returns each state to its own parameter.
"""

# %%
# In short
# --------

import torch

import torchlift

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
optimizer = torch.optim.Adam(model.parameters())
numbered = optimizer.state_dict()
named = torchlift.distributed.get_optimizer_state_dict(model, optimizer)

model.append(torch.nn.Linear(2, 1))  # a new head
optimizer = torch.optim.Adam(model.parameters())
print(torchlift.load_optimizer(model, optimizer, named, strict=False))

# %%
# The old layers keep their moments, and the new head starts without moments. Its parameters have
# their own step counter, so Adam corrects each parameter for its true age.
#
# ValueError: a parameter group that doesn't match the size
# ---------------------------------------------------------
#
# The optimizer's own state dict has numbers, and 4 of them do not match 6 (`issue 34660
# <https://github.com/pytorch/pytorch/issues/34660>`__ of PyTorch). By name, a strict load
# lists the missing parameters and changes nothing:

try:
    optimizer.load_state_dict(numbered)
except ValueError as error:
    print(f"{type(error).__name__}: {error}")
print(numbered["param_groups"][0]["params"], named["param_groups"][0]["params"])
try:
    torchlift.distributed.set_optimizer_state_dict(model, optimizer, named)
except torchlift.distributed.StateDictMismatch as error:
    print(f"{type(error).__name__}: {error}")

# %%
# The same number of parameters in another order
# ----------------------------------------------
#
# You tidy up a class, and two layers of one shape swap places in its constructor. The weights load,
# because they have names. The numbers match too, so no error appears. But each of the two layers
# gets the moments of the other one.

# fold: The network and its training
from torch import nn


class Net(nn.Module):
    def __init__(self, *order):
        super().__init__()
        for name in order:
            setattr(self, name, nn.Linear(64, 64))
        self.enter, self.leave = nn.Linear(2, 64), nn.Linear(64, 1)

    def forward(self, points):
        hidden = self.wave(torch.tanh(self.enter(points)))
        return self.leave(torch.relu(self.mix(torch.relu(hidden))))


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.002)


def train(model, optimizer, steps):
    """Train, and return the loss of each step."""
    numbers = torch.Generator().manual_seed(0)
    points = 2 * torch.rand(256, 2, generator=numbers) - 1
    height = torch.sin(5 * points[:, :1]) * torch.cos(4 * points[:, 1:])
    losses = []
    for _ in range(steps):
        losses.append((model(points) - height).square().mean())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    return [loss.item() for loss in losses]


# %%
# Here is the run that you stop after 100 steps. A copy of it continues at once, as the reference.

# fold: A run that is stopped, and a copy that continues
import copy

torch.manual_seed(0)
torch.set_num_threads(1)  # more threads would only wait for small tensors
net = Net("wave", "mix")
optimizer = adam(net)
straight = train(net, optimizer, 100)
named = torchlift.distributed.get_optimizer_state_dict(net, optimizer)
states = net.state_dict(), optimizer.state_dict(), named
# Copy each state, because the run continues in its memory.
weights, numbered, named = (copy.deepcopy(state) for state in states)
straight += train(net, optimizer, 100)

# %%
# Proof
# -----
#
# The tidy class resumes from the same weights by number, and by name. Torch's own function, which
# is as good here, is the third way.

from torch.distributed.checkpoint import state_dict as torch_state_dict


def load_numbers(model, optimizer):
    optimizer.load_state_dict(numbered)


def load_names(model, optimizer):
    torchlift.load_optimizer(model, optimizer, named)


def load_names_with_torch(model, optimizer):
    torch_state_dict.set_optimizer_state_dict(model, optimizer, named)


def resume(load):
    net = Net("mix", "wave")
    net.load_state_dict(weights)
    optimizer = adam(net)
    load(net, optimizer)
    return train(net, optimizer, 100)


# %%

# fold: How the losses are compared
by_number, by_name = resume(load_numbers), resume(load_names)
by_torch = resume(load_names_with_torch)
assert by_name == by_torch == straight[100:], "bit for bit"
assert by_number[0] == straight[100], "the weights are right"
assert max(by_number) > 5 * max(straight[100:]), "and the loss jumps"
print(f"the last loss before the stop: ~{straight[99]:.4f}")
print(f"the highest by name:           ~{max(by_name):.4f}")
print(f"the highest by number:         ~{max(by_number):.4f}")

# %%
import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots()
axes.plot(straight, "C0-", linewidth=7, alpha=0.4, label="never stopped")
axes.plot(range(100, 200), by_number, "C0-", label="by number")
axes.plot(
    range(100, 200), by_torch, "C3", lw=5, ls=(0, (2, 2)), label="name, torch"
)
axes.plot(range(100, 200), by_name, "C1-", label="name, torchlift")
axes.axvline(100, color="black", linewidth=1, linestyle=":")
axes.set(xlabel="step", ylabel="loss (squared height)", yscale="log")
axes.set(xlim=(50, 200), ylim=(min(straight) / 2, 3 * max(by_number)))
figure.legend(loc="outside upper center", ncols=2)
plt.show()

# %%
# *The lines show the loss of a run that stops at step 100 and resumes with two layers of one shape
# in another order. With the optimizer's state loaded by name, by torch or by torchlift, the loss
# follows the run that never stopped. By number each of the two layers gets the state of the other
# one, and the loss jumps without an error.*
#
# Remember
# --------
#
# - An optimizer knows its parameters by number, in the order in which it got them.
# - Matching numbers may be wrong, without an error. Names survive another order, another group and
#   another model.
# - A strict load lists the missing parameters and changes nothing.
#
# Use this when
# -------------
#
# - **You save an optimizer:** `torchlift.distributed.get_optimizer_state_dict`, or with the model
#   `torchlift.distributed.get_state_dict`.
# - **You changed the model:** `torchlift.load_optimizer` with ``strict=False``, and read the
#   `torchlift.distributed.OptimizerReport`.
# - **Your file has numbers only:** give the optimizer its parameters in the old order, call
#   `torchlift.load_optimizer`, and save it again by name.
# - **Somebody else's code calls** ``optimizer.state_dict()``: patch it once with
#   `torchlift.distributed.patch_optimizer_state_dict`.

# %%
# Question
# --------
#
# After a load by name, the new head does not have a state yet. Which step does Adam count for each
# parameter after the next step?


# fold: Answer to the question
# One more for the old layers, and the first one for the new head.
def count_steps(model, optimizer):
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    return [int(optimizer.state[p]["step"]) for p in model.parameters()]


model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
optimizer = adam(model)
count_steps(model, optimizer)
state = torchlift.distributed.get_optimizer_state_dict(model, optimizer)
model.append(nn.Linear(2, 1))
optimizer = adam(model)
torchlift.load_optimizer(model, optimizer, state, strict=False)
steps = count_steps(model, optimizer)
print("steps:", steps)
assert steps == [2, 2, 2, 2, 1, 1]

"""
What torch.utils.swap_tensors exchanges: a new dtype for a live parameter
=========================================================================

An optimizer, a tie or a logger has your parameter, and you need another dtype, shape or device in
it. PyTorch can exchange the content and keep the object. What exactly stays, and what goes?

Every reference to the object stays. Everything inside the object goes, including its gradient and
its hooks. `torchlift.load` with ``mode="swap"`` puts gradient and hooks back.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

path = tempfile.mkdtemp() + "/model.pt"
model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.save(model.state_dict(), path)
torchlift.load(model, path, mode="swap", dtype=torch.bfloat16)
weight = optimizer.param_groups[0]["params"][0]
same = "the model's own" if weight is model.weight else "another one"
print(f"the weight in the optimizer: {weight.dtype}, {same}")

# %%
# The parameter in the optimizer is bfloat16 now, and it is the same object.
#
# assign=True: a new dtype, another object
# ----------------------------------------
#
# The two usual ways do half of it. A copy in place keeps the object and its old dtype. With
# ``assign=True`` the dtype changes, but the optimizer keeps the old object:

half = {key: value.bfloat16() for key, value in torch.load(path).items()}
for assign in False, True:
    model = torch.nn.Linear(1024, 1024)
    weight = model.weight
    model.load_state_dict(half, assign=assign)
    same = "the same object" if weight is model.weight else "another object"
    print(f"assign={assign}: {model.weight.dtype}, {same}")

# %%
# `torch.utils.swap_tensors` is the third way.
#
# Compare two tensors before and after the swap
# ---------------------------------------------
#
# Take two tensors that differ in everything. The table shows both before and after the swap:

# fold: Two tensors that differ in everything, and the properties to compare
from torch import nn


class Old(nn.Parameter):
    """The class of the live weight."""


class New(nn.Parameter):
    """The class of the new tensor."""


class Table(dict):
    """Rows by name: HTML on a page, text in a terminal."""

    def __repr__(self):
        row = "{:<17}{:<14}{:<14}{:<14}{:<14}".format
        return "\n".join(
            row(key, *cells).rstrip() for key, cells in self.items()
        )

    def _repr_html_(self):
        html = ""
        for key, row in self.items():
            cells = "".join(f"<td>{cell}</td>" for cell in row)
            html += f"<tr><th>{key}</th>{cells}</tr>"
        return f"<div style='overflow-x: auto'><table>{html}</table></div>"


live, new = Old(torch.zeros(2, 3)), New(torch.ones(4, dtype=torch.bfloat16))
live.note, new.note, live.grad = "live", "new", torch.ones(2, 3)
optimizer = torch.optim.SGD([live], lr=0.1)
names = {id(live): "A", id(new): "B"}
places = {live.data_ptr(): "1", new.data_ptr(): "2"}
has = {True: "yes", False: "no"}
PROPERTIES = {
    "identity": lambda t: names[id(t)],
    "in the optimizer": lambda t: has[
        t is optimizer.param_groups[0]["params"][0]
    ],
    "class": lambda t: type(t).__name__,
    "attribute": lambda t: t.note,
    "memory": lambda t: places[t.data_ptr()],
    "value": lambda t: str(t.detach().flatten()[0].item()),
    "dtype": lambda t: str(t.dtype)[6:],
    "shape": lambda t: str(list(t.shape)),
    "gradient": lambda t: has[t.grad is not None],
}

# %%

before = {name: (read(live), read(new)) for name, read in PROPERTIES.items()}
torch.utils.swap_tensors(live, new)
after = {name: (read(live), read(new)) for name, read in PROPERTIES.items()}
assert all(
    after[name] == before[name] for name in ("identity", "in the optimizer")
)

table = {name: (*before[name], *after[name]) for name in PROPERTIES}
Table(
    {"": ("live, before", "new, before", "live, after", "new, after")} | table
)

# %%
# The references stay: the identity of the object, and its entry in the optimizer. Everything inside
# the object is exchanged. The swap copies no bytes, it exchanges addresses. So dtype and shape may
# differ.
#
# set_swap_module_params_on_conversion
# ------------------------------------
#
# ``torch.__future__.set_swap_module_params_on_conversion(True)`` is torch's switch for complete
# modules. While it is on, ``module.to``, ``module.half`` and ``load_state_dict`` swap. Otherwise
# they set ``.data``, assign or copy. `torchlift.swap.preserving_references` turns the switch on for
# a block and then restores it:

model = torch.nn.Linear(1024, 1024)
weight = model.weight
with torchlift.swap.preserving_references():
    model.load_state_dict(half, assign=True)
same = "the same object" if weight is model.weight else "another object"
print(f"assign=True: {model.weight.dtype}, {same}")

# %%
# Proof
# -----
#
# A swap exchanges the gradient and also the hooks, which you cannot list. A hook that clips
# gradients is not called any more, and no error appears. Train with a hook that clips at 1, and
# load a file after twenty steps in three ways:


def by_torch(model):
    for name, value in torch.load(path).items():
        torch.utils.swap_tensors(getattr(model, name), nn.Parameter(value))


def by_copy(model):
    model.load_state_dict(torch.load(path))


def by_torchlift(model):
    torchlift.load(model, path, mode="swap")


# %%

# fold: Train with a hook that clips, and load after twenty steps
torch.manual_seed(0)
points, levels = torch.randn(64, 1024), 5 * torch.randn(64, 1024)


def train(load):
    """Return the largest entries of gradients, and whether one survived."""
    model, largest = nn.Linear(1024, 1024), []
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(40):
        if step == 20:
            load(model)
            kept = model.weight.grad is not None
        optimizer.zero_grad()
        (model(points) - levels).square().sum().backward()
        optimizer.step()
        largest.append(model.weight.grad.abs().max().item())
    return largest, kept


runs = {
    load.__name__: train(load) for load in (by_torch, by_copy, by_torchlift)
}
assert runs["by_copy"][0] == runs["by_torchlift"][0] == 40 * [1.0]
assert min(runs["by_torch"][0][20:]) > 10

# %%

for name, (largest, kept) in runs.items():
    print(f"{name:<13} gradient {'kept' if kept else 'gone'},", end=" ")
    print(f"then clipped in {largest[20:].count(1)} of 20 steps")

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots()
looks = {
    "by_torch": ("C0-", 2.5),
    "by_torchlift": ("C1-", 4),
    "by_copy": ("C3-.", 1.5),
}
labels = "torch, swapped", "torchlift, swapped", "torch, copied"
for (name, (look, width)), label in zip(looks.items(), labels, strict=True):
    axes.plot(runs[name][0], look, lw=width, label=label)
axes.axvline(20, color="black", linewidth=1, linestyle=":", zorder=0)
axes.set(yscale="log", xlim=(0, 39), ylim=(0.5, None), xlabel="step")
axes.set_ylabel("largest entry of the gradient")
figure.legend(
    loc="outside upper center", ncols=3, columnspacing=1, handlelength=1.5
)
plt.show()

# %%
# *The lines show the largest entry of the gradient in a training whose hook clips at 1, on a
# logarithmic scale. At the dotted line a file is loaded. After a swap by torch the hook is lost,
# and large gradients pass unclipped. After torchlift's swap the hook still clips, as it does after
# a copy. But a copy keeps the old dtype.*
#
# Remember
# --------
#
# - ``swap_tensors`` exchanges class, attributes, memory, dtype, shape, gradient and hooks.
# - Code that holds the object keeps it and sees the new content.
# - The swap copies nothing, and it does not check the other holders of the two tensors.
#
# Use this when
# -------------
#
# - **A file, into a model that is live:** `torchlift.load`, with ``mode="swap"`` for a new dtype.
# - **torch's conversions, with an optimizer built:** `torchlift.swap.preserving_references`.
# - **One tensor, and you know all its holders:** `torch.utils.swap_tensors`.
# - **It refuses:** *Couldn't swap Linear.weight*.

# %%
# Question
# --------
#
# Torch's switch is on, and you call ``load_state_dict`` with bfloat16 values, but without
# ``assign=True``. Which dtype does the weight have, and is it the same object?

# fold: Answer to the question
# The same object with its own dtype. Without assign the values are cast to it,
# in a new tensor that is then swapped in.
model = torch.nn.Linear(1024, 1024)
weight = model.weight
with torchlift.swap.preserving_references():
    model.load_state_dict(half)
same = "the same object" if weight is model.weight else "another object"
print(f"assign=False: {model.weight.dtype}, {same}")
assert weight is model.weight
assert weight.dtype == torch.float32

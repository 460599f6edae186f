"""
Couldn't swap Linear.weight, Cannot swap t1: who refers to my tensor?
=====================================================================

You convert or load a model with torch's swapping, and it raises: *Cannot swap t1 because it has
weakref associated with it*, or *Expected use_count of t1 to be 1*. Who is it? And what does the
model look like after the error?

`torchlift.swap.preflight` names what is in the way of each tensor, before anything changes.
"""

# %%
# In short
# --------

import torch

import torchlift

model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
averages = {"copied too early": model[1].weight.detach()}
for blocker in torchlift.swap.preflight(model):
    print(blocker)
del averages
print("in the way now:", torchlift.swap.preflight(model))

# %%
# The optimizer is not in the way, nor is a list of parameters, a tie or a gradient. A second tensor
# over the same memory is: it would go on with the old values.
#
# Cannot swap t1
# --------------
#
# An exchange is right if everybody who has the *object* is to see the new content. Somebody may
# have something else: the memory, a weak reference, or a graph that was recorded with the old
# values.

import weakref
from functools import partial

from torch import nn

from torchlift import swap


class Owner:
    """Somebody who keeps something."""

    def __init__(self, what):
        self.kept = what


REFERENCES = {
    "a weak reference": lambda model: weakref.ref(model.weight),
    "a view": lambda model: model.weight[:1],
    "a detached tensor": lambda model: model.weight.detach(),
    "a loss": lambda model: model(torch.ones(1, 3)).sum(),
}


def attempt(action):
    """Run it; return what came of it, the first sentence."""
    try:
        action()
    except (RuntimeError, torchlift.PlacementError) as error:
        return f"{type(error).__name__}: {str(error).split('. ')[0]}"
    return "no error"


found = {}
for name, refer in REFERENCES.items():
    model = nn.Linear(3, 2)
    owner = Owner(refer(model))
    blocker, *_ = swap.preflight(model)
    new = nn.Parameter(torch.ones(2, 3))
    text = attempt(partial(torch.utils.swap_tensors, model.weight, new))
    found[name] = text, blocker
    print(f"{name}: {text}")

# %%
# Two of four are refused, and for the view you get a number and not a name. The other two pass. The
# detached tensor shows the old weights from now on, and the loss fails later, far away:

print(attempt(owner.kept.backward))

# %%
# Who is in the way
# -----------------
#
# `torchlift.swap.preflight` changes nothing, and returns a `torchlift.swap.Blocker` for each tensor
# that cannot be exchanged: its name, the reason, and the tensors that are in the way, by their
# shape and the function that made them.

for name, (_, blocker) in found.items():
    print(f"{name}: {blocker}")

# %%
# All of them, or half of them
# ----------------------------
#
# Torch exchanges one parameter after the other. Let the third of four refuse, and convert the
# model; `torchlift.swap.preserving_references` sets torch's own flag for this, while the block
# lasts:


def two_layers():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, Owner(weakref.ref(model[1].weight))


def convert(model, check):
    with swap.preserving_references(check=check):
        model.half()


halves = {}
for label in "torch", "checked":
    model, owner = two_layers()
    text = attempt(partial(convert, model, model if label == "checked" else None))
    halves[label] = {str(parameter.dtype)[6:] for parameter in model.parameters()}
    print(f"{label}: {text}")
    print("  after:", *sorted(halves[label]))

# %%
# Torch leaves a model of two dtypes. With ``check=model`` the block starts with a preflight;
# `torchlift.load` always does, or takes another way for a tensor that something refers to.
#
# Proof
# -----
#
# What torch refuses is a part of what `torchlift.swap.preflight` reports, and what is harmless is
# in neither: a tie, an optimizer with its state, a graph that went backward and is gone.

embed, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
head.weight = embed.weight
model = nn.Sequential(embed, nn.LSTM(4, 4), head)
everything = list(model.parameters())
optimizer = torch.optim.Adam(everything)
head(model[1](embed(torch.arange(5)))[0]).sum().backward()
optimizer.step()
assert swap.preflight(model) == []
found["a tie, an optimizer"] = "no error", None

rows = {
    name: (text != "no error", blocker is not None)
    for name, (text, blocker) in found.items()
}
for name, (by_torch, by_preflight) in rows.items():
    print(f"{name:<20} torch {'refuses' if by_torch else '-':<9}", end="")
    print("preflight reports" if by_preflight else "-")
assert [sum(column) for column in zip(*rows.values(), strict=True)] == [2, 4]
assert (halves["torch"], halves["checked"]) == ({"float16", "float32"}, {"float32"})

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 3.0))
for y, answers in enumerate(rows.values()):
    for x, answer in enumerate(answers):
        axes.barh(y, 0.94 * answer, 0.86, left=x - 0.47, color=("C0", "C1")[x])
        ink = "white" if answer else "black"
        late = "passes" if any(answers) else "fine"
        text = ("refuses", "reports")[x] if answer else late
        axes.text(x, y, text, color=ink, ha="center", va="center")
axes.set_yticks(range(len(rows)), rows)
axes.set_xticks(range(2), ["swap_tensors", "preflight"])
axes.set(xlim=(-0.5, 1.5), ylim=(len(rows) - 0.5, -0.5))
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plt.show()

# %%
# *Five things that may refer to a weight. torch's swap_tensors, left, refuses two of the four that
# lead to wrong values or a late error; preflight, right, reports all four. Ties and optimizers are
# in nobody's way.*
#
# Remember
# --------
#
# - An error of ``swap_tensors`` gives a count of references, and no name.
# - A second tensor over the same memory and a graph that is still to go backward pass without a
#   word.
# - Over a module torch stops half-way. Look first, and nothing changes.
#
# Use this when
# -------------
#
# - **Something refuses, and you ask who:** `torchlift.swap.preflight`.
# - **Converting, with an optimizer built:** `torchlift.swap.preserving_references`,
#   ``check=model``.
# - **Loading:** `torchlift.load`. It looks first, and changes all or nothing.
# - **What is exchanged when nobody is in the way:** *What torch.utils.swap_tensors exchanges*.

"""
Couldn't swap Linear.weight, Cannot swap t1: who refers to my tensor?
=====================================================================

You convert or load a model with torch's swapping, and it raises: *Cannot swap t1 because it has
weakref associated with it*, or *Expected use_count of t1 to be 1*. Who is it: an EMA, a view, a
graph? And what does the model look like after the error?

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
# have something else: a weak reference, as some EMAs keep them for the weights that they average,
# the memory, or a graph that was recorded with the old values.

import weakref

from torch import nn

REFERENCES = {
    "an EMA's weak reference": lambda model: weakref.ref(model.weight),
    "a view": lambda model: model.weight[:1],
    "a detached tensor": lambda model: model.weight.detach(),
    "a loss": lambda model: model(torch.ones(1, 3)).sum(),
}

# %%

# fold: Keep each of them, exchange the weight, and take down what comes of it
from functools import partial

from torchlift import swap


def attempt(action):
    """Run it; return what came of it, the first sentence."""
    try:
        action()
    except (RuntimeError, torchlift.PlacementError) as error:
        return f"{type(error).__name__}: {str(error).split('. ')[0]}"
    return "no error"


texts, blockers, kept = {}, {}, {}
for name, refer in REFERENCES.items():
    model = nn.Linear(3, 2)
    kept[name] = [refer(model)]  # in a list: no variable of this cell keeps it
    blockers[name], *_ = swap.preflight(model)
    new = nn.Parameter(torch.ones(2, 3))
    texts[name] = attempt(partial(torch.utils.swap_tensors, model.weight, new))

# %%

for name, text in texts.items():
    print(f"{name}: {text}")

# %%
# Two of four are refused, and for the view you get a number and not a name. The other two pass. The
# detached tensor shows the old weights from now on, and the loss fails later, far away:

print(attempt(kept["a loss"][0].backward))

# %%
# Who is in the way
# -----------------
#
# `torchlift.swap.preflight` changes nothing, and returns a `torchlift.swap.Blocker` for each tensor
# that cannot be exchanged: its name, the reason, and the tensors that are in the way, by their
# shape and the function that made them.

for name, blocker in blockers.items():
    print(f"{name}: {blocker}")

# %%
# Let go of it, exchange, and make it anew: an EMA made afterwards, or one that keeps the parameters
# themselves, follows. One that keeps weak references has to be made anew after each exchange.
#
# All of them, or half of them
# ----------------------------
#
# Torch exchanges one parameter after the other. Let something refer to the third weight of four,
# and convert the model. `torchlift.swap.preserving_references` sets torch's own switch for this,
# ``set_swap_module_params_on_conversion``, while the block lasts; with ``check=model`` it begins
# with a preflight:


def convert(model, check):
    with swap.preserving_references(check=check):
        model.double()


# %%


# fold: Convert while each of them is there, and count what has changed
def changed(refer, checked):
    """How many of eight parameters have changed, and what came of it."""
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    kept = [refer(model[2])]
    text = attempt(partial(convert, model, model if checked else None))
    dtypes = [parameter.dtype for parameter in model.parameters()]
    return dtypes.count(torch.float64), text, kept


REFERENCES["a tie, an optimizer"] = lambda layer: (
    nn.ParameterList([layer.weight]),
    torch.optim.Adam(layer.parameters()),
)
by_torch = {name: changed(refer, False) for name, refer in REFERENCES.items()}
looked = {name: changed(refer, True) for name, refer in REFERENCES.items()}
assert [count for count, *_ in by_torch.values()] == [4, 4, 8, 8, 8]
assert [count for count, *_ in looked.values()] == [0, 0, 0, 0, 8]

# %%

for name in REFERENCES:
    print(f"{name:<24} torch changes {by_torch[name][0]} of 8", end=", ")
    print(f"checked {looked[name][0]}")
print(looked["a view"][1])

# %%
# Torch leaves a model of two dtypes, or one that somebody sees the old values of. Checked, nothing
# has changed. `torchlift.load` always looks first, or takes another way for a tensor that something
# refers to.
#
# Proof
# -----
#
# What is harmless is not reported: a tie, an optimizer with its state, a graph that went backward
# and is gone.

embed, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
head.weight = embed.weight
model = nn.Sequential(embed, nn.LSTM(4, 4), head)
optimizer = torch.optim.Adam(list(model.parameters()))
head(model[1](embed(torch.arange(5)))[0]).sum().backward()
optimizer.step()
print("in the way:", swap.preflight(model))
assert swap.preflight(model) == []

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 3.6))
for shift, found, label in (
    (-0.2, by_torch, "torch"),
    (0.2, looked, "torchlift, checked"),
):
    sizes, color = (
        [count for count, *_ in found.values()],
        "C0" if shift < 0 else "C1",
    )
    rows = [row + shift for row in range(len(sizes))]
    axes.barh(rows, sizes, 0.38, color=color, label=label)
    for row, size in zip(rows, sizes, strict=True):
        axes.text(size, row, f" {size}", va="center")
axes.set_yticks(range(len(by_torch)), by_torch)
axes.set(xlabel="parameters that have changed, of 8", xlim=(0, 9))
axes.tick_params(axis="y", length=0)
axes.invert_yaxis()
figure.legend(loc="outside upper center", ncols=2)
plt.show()

# %%
# *A model of eight parameters is converted by swapping, while something refers to the fifth. torch
# changes four and raises, or changes all, and a detached tensor or a loss goes on with the old
# values. Checked first, nothing changes; with a tie or an optimizer, which are in nobody's way, all
# do.*
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

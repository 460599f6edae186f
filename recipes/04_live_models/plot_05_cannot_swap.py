"""
Couldn't swap Linear.weight, Cannot swap t1: who refers to my tensor?
=====================================================================

You load a model with torch's swapping, and it raises *Cannot swap t1 because it has weakref
associated with it*. Or it is *Expected use_count of t1 to be 1*. Is it an EMA, a view, a graph? And
which state is the model in after the error?

`torchlift.swap.preflight` lists what blocks the swap of each tensor, before anything changes.
"""

# %%
# In short
# --------

import torch

import torchlift

model = torch.nn.Sequential(
    torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 2)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
averages = {"copied too early": model[1].weight.detach()}
for blocker in torchlift.swap.preflight(model):
    print(blocker)
del averages
print("blockers now:", torchlift.swap.preflight(model))

# %%
# An optimizer, a list of parameters, a tie or a gradient does not block a swap. A second tensor
# over the same memory does, because it would keep the old values.
#
# Cannot swap t1
# --------------
#
# A swap is right if all code that holds the *object* should see the new content. But other code may
# hold something else: a weak reference to a weight (some EMAs do), its memory, or a graph with the
# old values.

import weakref

from torch import nn

REFERENCES = {
    "an EMA's weak reference": lambda model: weakref.ref(model.weight),
    "a view": lambda model: model.weight[:1],
    "a detached tensor": lambda model: model.weight.detach(),
    "a loss": lambda model: model(torch.ones(1, 3)).sum(),
}

# %%

# fold: Keep each reference, swap the weight, and record the result
from functools import partial

from torchlift import swap


def attempt(action):
    """Run the action, and return the first sentence of its error."""
    try:
        action()
    except (RuntimeError, torchlift.PlacementError) as error:
        return f"{type(error).__name__}: {str(error).split('. ')[0]}"
    return "no error"


texts, blockers, kept = {}, {}, {}
for name, refer in REFERENCES.items():
    model = nn.Linear(3, 2)
    kept[name] = [refer(model)]  # only the list keeps it alive
    blockers[name], *_ = swap.preflight(model)
    new = nn.Parameter(torch.ones(2, 3))
    texts[name] = attempt(partial(torch.utils.swap_tensors, model.weight, new))

# %%

for name, text in texts.items():
    print(f"{name}: {text}")

# %%
# Torch refuses two of four, and for the view the error contains a number and not a name. The other
# two pass. The detached tensor keeps the old weights from now on. The loss fails later, far away:

print(attempt(kept["a loss"][0].backward))

# %%
# List the blockers
# -----------------
#
# `torchlift.swap.preflight` changes nothing. It returns a `torchlift.swap.Blocker` for each tensor
# that cannot be swapped. A blocker has the name, the reason, and the tensors that block, by their
# shape and the function that made them.

for name, blocker in blockers.items():
    print(f"{name}: {blocker}")

# %%
# Delete the blocker, swap, and create it again. An EMA that keeps the parameters themselves follows
# the swap. An EMA with weak references must be created again after each swap.
#
# A failed conversion leaves two dtypes
# -------------------------------------
#
# Torch swaps one parameter after the other. Hold a reference to the third weight of four, and
# convert the model. `torchlift.swap.preserving_references` sets torch's own switch,
# ``set_swap_module_params_on_conversion``, for a block. With ``check=model`` it starts with a
# preflight:


def convert(model, check):
    with swap.preserving_references(check=check):
        model.double()


# %%


# fold: Convert with each reference alive, and count the changed parameters
def changed(refer, checked):
    """Return how many of eight parameters have changed, and the error."""
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
# Torch leaves a model with two dtypes, or other tensors with the old values. With the check,
# nothing has changed. `torchlift.load` always checks first. If something refers to a tensor, it
# uses another way for that tensor.
#
# Proof
# -----
#
# Harmless references are not reported: a tie, an optimizer with its state, a finished graph.

embed, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
head.weight = embed.weight
model = nn.Sequential(embed, nn.LSTM(4, 4), head)
optimizer = torch.optim.Adam(list(model.parameters()))
head(model[1](embed(torch.arange(5)))[0]).sum().backward()
optimizer.step()
print("blockers:", swap.preflight(model))
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
# *The bars count how many of eight parameters a conversion by swapping changes, while something
# refers to the fifth. Plain torch changes four and raises, or changes all, and then a detached
# tensor or a loss keeps the old values. With a check first, nothing changes. A tie or an optimizer
# does not block, so all eight change.*
#
# Remember
# --------
#
# - An error of ``swap_tensors`` gives a count of references, and not a name.
# - A second tensor over the same memory and an unfinished graph pass without an error.
# - Over a module torch stops half-way. Check first, and nothing changes.
#
# Use this when
# -------------
#
# - **A swap fails, and you look for the cause:** `torchlift.swap.preflight`.
# - **Converting, with an optimizer built:** `torchlift.swap.preserving_references`,
#   ``check=model``.
# - **Loading:** `torchlift.load`. It checks first, and changes all or nothing.
# - **The effect of a swap that works:** *What torch.utils.swap_tensors exchanges*.

# %%
# Question
# --------
#
# A view of a weight is alive, and you may not delete it. How do you load new values?

# fold: Answer to the question
# With mode="copy": it writes into the same memory, so the view follows.
model = nn.Linear(3, 2)
view = model.weight[:1]
state = nn.Linear(3, 2).state_dict()
print(attempt(partial(torchlift.load, model, state, mode="swap"))[:40])
torchlift.load(model, state, mode="copy")
print("the view has the new values:", view.equal(state["weight"][:1]))
assert view.equal(state["weight"][:1])

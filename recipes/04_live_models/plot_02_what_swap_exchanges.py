"""
What torch.utils.swap_tensors exchanges: a new dtype for a live parameter
=========================================================================

An optimizer, a tie or a logger has your parameter, and you need another dtype, shape or device in
it. PyTorch can exchange the content and keep the object. What exactly stays, and what goes?

Who has the object stays; all that the object *is* goes, its gradient and its hooks included.
`torchlift.load` with ``mode="swap"`` gives these two back.
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
print(torchlift.load(model, path, mode="swap", dtype=torch.bfloat16))
weight = optimizer.param_groups[0]["params"][0]
print(
    "in the optimizer:", weight.dtype, "- the model's own:", weight is model.weight
)

# %%
# The parameter that the optimizer has is bfloat16 now, and it is the same object.
#
# assign=True: a new dtype, another object
# ----------------------------------------
#
# The two ways that you know do half of it. A copy in place keeps the object and its dtype, whatever
# comes; with ``assign=True`` the dtype changes, and the optimizer goes on with the old object:

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
# What stays, and what goes
# -------------------------
#
# Take two tensors that differ in everything, and ask both the same questions, before and after:

from torch import nn


class Old(nn.Parameter):
    """The class of the live weight."""


class New(nn.Parameter):
    """The class of what comes."""


live, new = Old(torch.zeros(2, 3)), New(torch.ones(4, dtype=torch.bfloat16))
live.note, new.note, live.grad = "live", "new", torch.ones(2, 3)
optimizer = torch.optim.SGD([live], lr=0.1)
names, places = (
    {id(live): "A", id(new): "B"},
    {live.data_ptr(): "1", new.data_ptr(): "2"},
)
QUESTIONS = {
    "identity": lambda t: names[id(t)],
    "in the optimizer": lambda t: (
        "yes" if t is optimizer.param_groups[0]["params"][0] else "no"
    ),
    "class": lambda t: type(t).__name__,
    "attribute": lambda t: t.note,
    "memory": lambda t: places[t.data_ptr()],
    "value": lambda t: t.detach().flatten()[0].item(),
    "dtype": lambda t: str(t.dtype)[6:],
    "shape": lambda t: str(list(t.shape)),
    "gradient": lambda t: "no" if t.grad is None else "yes",
}
before = {name: (ask(live), ask(new)) for name, ask in QUESTIONS.items()}
torch.utils.swap_tensors(live, new)
after = {name: (ask(live), ask(new)) for name, ask in QUESTIONS.items()}

stayed = [name for name in QUESTIONS if after[name] == before[name]]
went = [name for name in QUESTIONS if after[name] == before[name][::-1]]
print("stayed:", ", ".join(stayed))
print("went:  ", ", ".join(went))
assert len(stayed) + len(went) == len(QUESTIONS)

# %%
# Nothing is copied: the address goes over, not the bytes. That is why dtype and shape may differ.
#
# Proof
# -----
#
# The gradient is in the second line, and so are hooks, which cannot be asked. A hook that clips or
# logs gradients is not called from then on, and nobody tells you. Load twice, with torch's function
# and with torchlift, into a model that has a gradient and a hook:


def by_torch(model):
    for name, value in torch.load(path).items():
        torch.utils.swap_tensors(getattr(model, name), nn.Parameter(value))


def by_torchlift(model):
    torchlift.load(model, path, mode="swap")


for load in by_torch, by_torchlift:
    model, calls = nn.Linear(1024, 1024), []
    weight = model.weight
    weight.register_hook(calls.append)
    model(torch.ones(1024)).sum().backward()
    load(model)
    gradient = "kept" if weight.grad is not None else "gone"
    model(torch.ones(1024)).sum().backward()
    print(
        f"{load.__name__:<13} gradient {gradient}, hook called {len(calls)} of 2 times"
    )
    assert model.weight is weight
    assert (gradient, len(calls)) == (("gone", 1), ("kept", 2))[
        load is by_torchlift
    ]

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, panels = plt.subplots(1, 2, figsize=(5.6, 4.0), sharey=True)
for axes, (title, answers) in zip(
    panels, {"before": before, "after": after}.items(), strict=True
):
    for y, name in enumerate(QUESTIONS):
        for x, answer in enumerate(answers[name]):
            color = "C0" if answer == before[name][0] else "C1"
            axes.barh(y, 0.94, 0.86, left=x - 0.47, color=color)
            axes.text(
                x, y, answer, color="white", ha="center", va="center", size=11
            )
    axes.axhline(len(stayed) - 0.5, color="black", linewidth=1, linestyle=":")
    axes.set(title=title, ylim=(len(QUESTIONS) - 0.5, -0.5), xticks=(0, 1))
    axes.set_xticklabels(["live", "new"])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
panels[0].set_yticks(range(len(QUESTIONS)), QUESTIONS)
plt.show()

# %%
# *The live weight and the new tensor, left before the swap and right after it. Above the dotted
# line is what others know of the object, and it stays in its column. All that the object is lies
# below, and changes places, down to the class and the gradient.*
#
# Remember
# --------
#
# - ``swap_tensors`` exchanges class, attributes, memory, dtype, shape, gradient and hooks.
# - Who has the object keeps it, and sees the new content.
# - Nothing is copied, and nobody who has one of the two is asked.
#
# Use this when
# -------------
#
# - **A file, into a model that is live:** `torchlift.load`, with ``mode="swap"`` for a new dtype.
# - **torch's conversions, with an optimizer built:** `torchlift.swap.preserving_references`.
# - **One tensor, and you know who has it:** `torch.utils.swap_tensors`.
# - **It refuses:** *Couldn't swap Linear.weight*.

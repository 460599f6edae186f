"""
assign=True, copy or swap: which one for load_state_dict?
=========================================================

There are three ways to get a value into a parameter, and torch and torchlift have all of them. Your
model is live: it has an optimizer, gradients, a tied weight. Which way keeps what?

Copy keeps everything and cannot change a dtype, assign keeps nothing, swap keeps the object. With
``mode="auto"`` `torchlift.load` takes, for each tensor, the way that keeps what is there.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

path = tempfile.mkdtemp() + "/model.pt"
model = torch.nn.Linear(1024, 1024)
torch.save(model.state_dict(), path)
for mode in "copy", "assign", "swap", "auto":
    weight = model.weight
    report = torchlift.load(model, path, mode=mode)
    kept = "the same object" if weight is model.weight else "a new object"
    print(f"{mode:<7} {kept}, placed by {report.mode['weight']}")

# %%
# **Copy** writes into the memory of the parameter. **Assign** puts a new parameter into the module.
# **Swap** gives the parameter, which stays the same object, the memory of a new one.
#
# What a load can break
# ---------------------
#
# Torch copies by default, assigns with ``assign=True``, and swaps where a flag is set, here by
# `torchlift.swap.preserving_references`. A small model has all that a load can break:

import warnings
from contextlib import nullcontext, suppress
from functools import partial

from torch import nn

from torchlift import swap


def live(device="cpu"):
    """Two names for one weight, gradients, and hooks that write into a list."""
    with torch.device(device):
        model = nn.Sequential(nn.Embedding(8, 4), nn.Tanh(), nn.Linear(4, 8))
    model[2].weight = model[0].weight
    if device == "cpu":
        model(torch.arange(8)).sum().backward()
    calls = []
    for parameter in model.parameters():
        parameter.register_hook(calls.append)
    return model, calls


def by_torch(model, path, *, assign=False, swapped=False, dtype=None):
    with swap.preserving_references() if swapped else nullcontext():
        model.load_state_dict(torch.load(path, mmap=True), assign=assign)


WAYS = {"torch copy": by_torch, "torch assign": partial(by_torch, assign=True)}
WAYS["torch swap"] = partial(by_torch, assign=True, swapped=True)
for mode in "copy", "assign", "swap", "auto":
    WAYS[f"torchlift {mode}"] = partial(torchlift.load, mode=mode)

# %%
# A way may *refuse* what you hope for, with an error and before it has changed anything; or it does
# something else, and you find out later.

state = live()[0].state_dict()
torch.save(state, path)
halved, broken = path.replace("model", "halved"), path.replace("model", "broken")
torch.save({name: value.bfloat16() for name, value in state.items()}, halved)
torch.save(state | {"2.bias": torch.zeros(5)}, broken)
REFUSALS = RuntimeError, torchlift.CheckpointError


def attempt(load, *args, **options):
    """Load; return True, or None where it refuses."""
    with warnings.catch_warnings(), suppress(*REFUSALS):
        warnings.simplefilter("ignore")  # torch warns of meta, and goes on
        load(*args, **options)
        return True


def check(load):
    found = {}
    model, calls = live()
    before = [id(parameter) for parameter in model.parameters()]
    load(model, path)
    found["same objects"] = before == [id(p) for p in model.parameters()]
    found["tie"] = model[2].weight is model[0].weight
    found["gradient"] = model[0].weight.grad is not None
    model(torch.arange(8)).sum().backward()
    found["hooks"] = len(calls) == len(before)
    model, _ = live()
    rows = model[0].weight.detach()[:3]
    loaded = attempt(load, model, path)
    found["view follows"] = loaded and torch.equal(rows, state["0.weight"][:3])
    model, _ = live()
    loaded = attempt(load, model, halved, dtype=torch.bfloat16)
    found["new dtype"] = loaded and model[0].weight.dtype == torch.bfloat16
    model = live("meta")[0]
    loaded = attempt(load, model, path)
    found["fills meta"] = loaded and not model[2].weight.is_meta
    model, _ = live()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert not attempt(load, model, broken)  # one shape in the file is wrong
    found["all or nothing"] = torchlift.diff(model.state_dict(), before).equal
    return found


table = {way: check(load) for way, load in WAYS.items()}
for way, found in table.items():
    no = [name for name, yes in found.items() if yes is False]
    no += [f"refuses {name}" for name, yes in found.items() if yes is None]
    print(f"{way:<18}", ", ".join(no) or "keeps all")

# %%
# Assign makes new objects, so all that hangs on an object is lost; torch's unties as well. Torch's
# swap loses gradient and hooks. And a load of torch that fails loads what fits, and raises at the
# end: the model is neither old nor new.
#
# Proof
# -----
#
# What is left in memory? 64 MiB in a mapped file, and a list of parameters as an optimizer has it,
# which keeps the old weights alive after an assign. Swapped weights are the file's.


def load_large(load, path):
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(4)])
    parameters = list(model.parameters())
    load(model, path)
    torchlift.measure.mark("loaded")
    return len(parameters)


large = path.replace("model", "large")
torch.save({f"{i}.weight": torch.full((2048, 2048), 0.5) for i in range(4)}, large)
loads = {way: WAYS[way] for way in ("torch copy", "torch assign")}
loads["torchlift swap"] = partial(torchlift.load, mode="swap", source="mmap")
left = {}
for way, load in loads.items():
    use = torchlift.measure.in_child(load_large, load, large).memory
    left[way] = (use.marks[0].anonymous - use.baseline.anonymous) / 2**26
    print(f"{way:<15} anonymous after: {max(0, left[way]) * 64:.1f} MiB")
    assert use.added_anonymous < 1.3 * 2**26  # none takes a second copy

assert all(table["torchlift auto"].values())
*by_torch_left, swapped_left = left.values()
assert min(by_torch_left) > 0.9 > 6 * swapped_left

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 4.0))
for y, found in enumerate(table.values()):
    for x, yes in enumerate(found.values()):
        color, ink = ("C1" if y > 2 else "C0"), ("white" if yes else "black")
        axes.barh(y, 0.92 * bool(yes), 0.86, left=x - 0.46, color=color)
        text = "error" if yes is None else "yes" if yes else "no"
        axes.text(x, y, text, color=ink, ha="center", va="center", size=11)
axes.set_xticks(range(8), found, rotation=40, ha="left", rotation_mode="anchor")
axes.xaxis.tick_top()
axes.set_yticks(range(len(table)), table)
axes.set(xlim=(-0.5, 8), ylim=(len(table) - 0.5, -0.5))
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plt.show()

# %%
# *Eight things to hope for in a load, seven ways to load, three of torch and four of torchlift.
# Error means that the way refuses and changes nothing. One row has yes everywhere: auto, which
# decides for each tensor.*
#
# Remember
# --------
#
# - Copy keeps everything, and cannot change a dtype or fill meta by itself.
# - Assign keeps nothing that hangs on an object. torchlift's swap keeps gradient and hooks, and
#   refuses while a view is alive; torch's loses them.
# - A load that fails must not change the model. Torch's does, in every variant.
#
# Use this when
# -------------
#
# - **You do not care which:** ``mode="auto"`` of `torchlift.load`, the default.
# - **Live, and a new dtype or memory to be freed:** ``mode="swap"``; it refuses what it must.
# - **A graph or another process has the address:** ``mode="copy"``.
# - **Nobody has the model yet:** ``mode="assign"``; else see *My optimizer stopped learning*.

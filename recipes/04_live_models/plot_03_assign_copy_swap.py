"""
assign=True, copy or swap: which one for load_state_dict?
=========================================================

There are three ways to get a value into a parameter, and torch and torchlift have all of them. Your
model is live: it has an optimizer, gradients, a tied weight. Which way keeps what?

Copy keeps everything and cannot change a dtype. Assign keeps nothing. Swap keeps the object. With
``mode="auto"`` `torchlift.load` chooses for each tensor the way that keeps the most.
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
# **Swap** keeps the parameter object and gives it the memory of a new one.
#
# References that a load can break
# --------------------------------
#
# Torch copies by default and assigns with ``assign=True``. It swaps if its switch
# ``set_swap_module_params_on_conversion`` is on, and `torchlift.swap.preserving_references` sets
# that switch for a block:

from contextlib import nullcontext
from functools import partial

from torchlift import swap


def by_torch(model, path, *, assign=False, swapped=False, dtype=None):
    with swap.preserving_references() if swapped else nullcontext():
        model.load_state_dict(torch.load(path, mmap=True), assign=assign)


WAYS = {"torch copy": by_torch, "torch assign": partial(by_torch, assign=True)}
WAYS["torch swap"] = partial(by_torch, assign=True, swapped=True)
for mode in "copy", "assign", "swap", "auto":
    WAYS[f"torchlift {mode}"] = partial(torchlift.load, mode=mode)

# %%
# A small model has everything that a load can break: two names for one weight, gradients, hooks,
# and a view. Further files have another dtype, or one wrong shape. The next cell checks which parts
# survive each load.

# fold: Load in each way, and check which properties are left
import warnings
from contextlib import suppress

from torch import nn


class Table(dict):
    """Rows by name: HTML on a page, text in a terminal."""

    def __repr__(self):
        row = ("{:<17}" + 7 * "{:<18}").format
        return "\n".join(
            row(key, *cells).rstrip() for key, cells in self.items()
        )

    def _repr_html_(self):
        html = ""
        for key, row in self.items():
            marks = {
                "yes": "✓&nbsp;",
                "no": "✗&nbsp;",
                "refuses": "&minus;&nbsp;",
            }
            cells = "".join(f"<td>{marks.get(c, '')}{c}</td>" for c in row)
            html += f"<tr><th>{key}</th>{cells}</tr>"
        return f"<div style='overflow-x: auto'><table>{html}</table></div>"


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


state = live()[0].state_dict()
torch.save(state, path)
halved = path.replace("model", "halved")
broken = path.replace("model", "broken")
torch.save({name: value.bfloat16() for name, value in state.items()}, halved)
torch.save(state | {"2.bias": torch.zeros(5)}, broken)
REFUSALS = RuntimeError, torchlift.CheckpointError


def attempt(load, *args, **options):
    """Load, and return True, or None if it refuses."""
    with warnings.catch_warnings(), suppress(*REFUSALS):
        warnings.simplefilter("ignore")  # torch warns of meta, and continues
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


found = {way: check(load) for way, load in WAYS.items()}
words = {True: "yes", False: "no", None: "refuses"}
table = {"": tuple(WAYS)}
for thing in found["torch copy"]:
    table[thing] = tuple(words[found[way][thing]] for way in WAYS)
assert all(found["torchlift auto"].values())

# %%

Table(table)

# %%
# *Each row is a property of a live model, and each column a way to load. The word "refuses" is an
# error before anything has changed. The row "fills meta" is about a model without storage. In the
# row "all or nothing", yes means that a failed load changes nothing.*
#
# Assign makes new objects, so every reference to the old object is lost. Torch's assign also breaks
# the tie. Torch's swap loses gradient and hooks. If a load of torch fails, it has already changed
# some tensors, and the model is neither old nor new.
#
# Proof
# -----
#
# How much memory does each load leave? A mapped file has 64 MiB. A list of parameters, as an
# optimizer has it, keeps the old weights alive after an assign. Swapped weights use the memory of
# the file.

# fold: Load 64 MiB in each way, in a new process
large = path.replace("model", "large")
torch.save(
    {f"{i}.weight": torch.full((2048, 2048), 0.5) for i in range(4)}, large
)


def load_large(load, path):
    model = nn.Sequential(
        *[nn.Linear(2048, 2048, bias=False) for _ in range(4)]
    )
    parameters = list(model.parameters())
    load(model, path)
    torchlift.measure.mark("loaded")
    return len(parameters)


left = {}
for way, load in WAYS.items():
    if way.startswith("torchlift"):
        load = partial(load, source="mmap")  # as torch, which maps the file
    use = torchlift.measure.in_child(load_large, load, large).memory
    left[way] = max(0, use.marks[0].anonymous - use.baseline.anonymous) / 2**20
assert (
    min(left["torch copy"], left["torch assign"])
    > 57
    > 5 * left["torchlift swap"]
)

# %%

kept = {way: list(things.values()).count(True) for way, things in found.items()}
for way in WAYS:
    print(f"{way:<17} {kept[way]} of 8, anonymous after: {left[way]:.1f} MiB")

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, panels = plt.subplots(1, 2, figsize=(5.6, 3.6), sharey=True)
best = max(kept[way] for way in WAYS if way.startswith("torch "))
colors = ["C1" if "lift" in way else "C0" for way in WAYS]
colors[list(kept.values()).index(best)] = "C3"
for axes, sizes, label in (
    (panels[0], kept, "kept, of 8"),
    (panels[1], left, "memory owned (MiB)"),
):
    axes.barh(list(WAYS), list(sizes.values()), color=colors)
    for y, size in enumerate(sizes.values()):
        axes.text(size, y, f" {size:.0f}", va="center")
    axes.set(xlabel=label, xlim=(0, 1.25 * max(sizes.values())))
    axes.tick_params(axis="y", length=0)
panels[0].invert_yaxis()
panels[0].set_xticks([0, 4, 8])
plt.show()

# %%
# *Seven ways load into a live model: three of torch and four of torchlift. Left, the bars count how
# many of eight properties each way keeps, such as the object, ties, gradients, hooks and views.
# Right, they show the memory that 64 MiB of weights take afterwards, while an optimizer has the
# parameters. The mode auto keeps everything, and a swap of mapped weights takes the least memory.*
#
# Remember
# --------
#
# - Copy keeps everything, and cannot change a dtype or fill meta by itself.
# - Assign keeps nothing that belongs to the object. torchlift's swap keeps gradient and hooks, and
#   refuses while a view is alive. Torch's swap loses them.
# - A failed load must not change the model. Torch's load does, in every variant.
#
# Use this when
# -------------
#
# - **Any of them would do:** ``mode="auto"`` of `torchlift.load`, the default.
# - **Live, and a new dtype or memory to be freed:** ``mode="swap"``. It raises an error if a swap
#   is unsafe.
# - **A graph or another process has the address:** ``mode="copy"``.
# - **Nothing refers to the model yet:** ``mode="assign"``. Otherwise see *My optimizer stopped
#   learning*.

# %%
# Question
# --------
#
# The file is bfloat16, the model is live in float32, and the mode is ``copy``. Which dtype does the
# weight have?

# fold: Answer to the question
# Its own: a copy writes into memory that exists, and casts each value.
model, _ = live()
torchlift.load(model, halved, mode="copy")
print(model[0].weight.dtype)
assert model[0].weight.dtype == torch.float32

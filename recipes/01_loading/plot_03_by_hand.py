"""
Load weights one by one with setattr: where the loop breaks
===========================================================

You read that loading needs no second copy. Put the model on the meta device, walk over the
checkpoint, and set one parameter after the other. It takes six lines and no library. Is that all?

For memory, yes. For ties, buffers, frozen layers and the optimizer, no. `torchlift.load` looks at
the model too, not only at the file.
"""

# %%
# In short
# --------

import tempfile

import torch
from torch import nn

import torchlift


def tied():
    model = nn.Sequential(nn.Embedding(5000, 256), nn.Linear(256, 5000, False))
    model[1].weight = model[0].weight
    return model


path = tempfile.mkdtemp() + "/tied.pt"
torch.save(tied().state_dict(), path)
model = torchlift.skeleton(tied)
print("one tensor:", *torchlift.load(model, path).tied[0])

# %%
# The file has two names for one weight. After the load the model still has one weight.
#
# The loop that everybody writes
# ------------------------------
#
# A key such as ``layers.3.weight`` is a path. The part before the last dot is the submodule that
# owns the tensor, and the part after it is the tensor's name. Here is the loop, next to the best
# way of torch and to torchlift.


def by_hand(make, path):
    model = make().to("meta")
    for key, tensor in torch.load(path, mmap=True).items():
        owner, _, name = key.rpartition(".")
        setattr(model.get_submodule(owner), name, nn.Parameter(tensor.clone()))
    return model


def by_torch(make, path):
    with torch.device("meta"):
        model = make()
    model.load_state_dict(torch.load(path, mmap=True), assign=True)
    return model


def by_torchlift(make, path):
    model = torchlift.skeleton(make)
    torchlift.load(model, path)
    return model


# %%

# fold: How the memory of each is measured
from torchlift.measure import in_child

WAYS = {
    "the loop": by_hand,
    "meta, mmap, assign": by_torch,
    "torchlift": by_torchlift,
}


def linear_layers():
    return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)])


def only_load(way, *arguments):
    way(*arguments)  # return nothing, so that the model stays in the child


torch.save(linear_layers().state_dict(), path)
for name, way in WAYS.items():
    child = in_child(only_load, way, linear_layers, path)
    copies = child.memory.added_anonymous / torchlift.open(path).nbytes
    print(f"{name:<18} anonymous peak: ~{copies:.1f} copies of 128 MiB")
    assert copies < 1.3

# %%
# The loop keeps its promise and never owns more than one copy. The other two ways map the file.
#
# Ties, buffers, frozen layers: one small model each
# --------------------------------------------------
#
# Each model has one property that real models have. The last two do not match their file: a weight
# is missing from it, or has another shape. There a way of loading is right if it raises an error.

from functools import partial

linear = partial(nn.Linear, 2, 2)


def with_buffer(persistent=True):
    model = linear()
    model.register_buffer("mean", torch.ones(2), persistent=persistent)
    return model


FITS = {
    "linear layer": linear,
    "buffer in the file": with_buffer,
    "buffer not in the file": partial(with_buffer, persistent=False),
    "integer tensor": partial(nn.BatchNorm1d, 2),
    "tied weights": tied,
    "frozen weights": lambda: linear().requires_grad_(False),
}
DOES_NOT_FIT = {
    "weight missing in the file": (with_buffer, linear()),
    "other shape in the file": (linear, nn.Linear(2, 3)),
}

# %%
# Proof
# -----
#
# Eight cases, three ways. After each load the model is compared with the one that was saved.

# fold: How a loaded model is compared, and how the table is made
from collections import Counter

RIGHT = "right"


def compare(model, saved):
    here, there = dict(model.named_parameters()), dict(saved.named_parameters())
    tensors = {**here, **dict(model.named_buffers())}
    if any(tensor.is_meta for tensor in tensors.values()):
        return "left on meta"
    if here.keys() != there.keys():
        return f"{len(here)} parameters, not {len(there)}"
    if any(
        here[name].requires_grad != there[name].requires_grad for name in here
    ):
        return "trains what was frozen"
    made = {**there, **dict(saved.named_buffers())}
    equal = all(
        torch.equal(tensor, made[name]) for name, tensor in tensors.items()
    )
    return RIGHT if equal else "other values"


def outcome(way, case, make, saved):
    torch.save(saved.state_dict(), path)
    try:
        found = compare(way(make, path), saved)
    except (RuntimeError, torchlift.MismatchError) as error:
        return RIGHT if case in DOES_NOT_FIT else type(error).__name__
    return "no error" if case in DOES_NOT_FIT and found == RIGHT else found


class Table(dict):
    def __repr__(self):
        rows = (f"{case}: {', '.join(cells)}" for case, cells in self.items())
        return "\n".join(rows)

    def _repr_html_(self):
        def row(tag, cells):
            return "<tr>" + "".join(f"<{tag}>{c}</{tag}>" for c in cells)

        table = "<table>" + row("th", ["case", *WAYS])
        for case, cells in self.items():
            marks = ("✓" if cell == RIGHT else "✗" for cell in cells)
            marked = map("{}&nbsp;{}".format, marks, cells)
            table += row("td", [case, *marked])
        return table + "</table>"


cases = {case: (make, make()) for case, make in FITS.items()} | DOES_NOT_FIT
table = Table(
    (case, [outcome(way, case, *models) for way in WAYS.values()])
    for case, models in cases.items()
)
counted = [Counter(cells) for cells in zip(*table.values(), strict=True)]
assert [counts[RIGHT] for counts in counted] == [1, 6, len(cases)]
table

# %%
# *Each row is a case, and each column a way to load. A way is right if the loaded model equals the
# saved one. If the file does not match the model, an error is right.*

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 2.2))
for way, counts, color in zip(WAYS, counted, ("C0", "C3", "C1"), strict=True):
    right, errors = counts[RIGHT], counts["RuntimeError"]
    wrong = len(cases) - right - errors
    white = {"color": "white", "edgecolor": color}
    axes.barh(way, right, color=color)
    axes.barh(way, errors, left=right, **white)
    bars = axes.barh(way, wrong, left=right + errors, hatch="///", **white)
    if wrong:
        box = {"color": "white", "pad": 2}
        axes.bar_label(bars, [f"{wrong} wrong"], label_type="center", bbox=box)
axes.set_title(
    "filled: right, empty: error, hatched: wrong without one",
    fontsize=11,
    loc="right",
)
axes.invert_yaxis()
axes.tick_params(axis="y", length=0)
axes.set(xlabel="cases (of 8)", xlim=(0, 8.1))
plt.show()

# %%
# *Each bar counts how many of eight small models one way loads right, stops with an error, or loads
# wrong without an error. The loop is right in one case, the three switches of torch in six, and
# torchlift in all eight. A wrong model without an error is the dangerous part, because nothing
# warns you.*
#
# All failures but one raise no error: the model runs and trains wrong.
#
# Remember
# --------
#
# - A loop over a mapped checkpoint takes the memory of one copy. That part is easy.
# - A checkpoint does not describe a complete model. Ties, ``requires_grad``, non-persistent buffers
#   and the list of parameters are in the code.
# - You can patch each case. All the patches together are a loader.
#
# Use this when
# -------------
#
# - **The model has untied parameters only, and the file contains all of them:** the loop, or
#   *torch.load with mmap=True, assign=True and the meta device: what each one saves*.
# - **Anything else:** `torchlift.skeleton` and `torchlift.load`. These two lines load everything or
#   nothing.
# - **You are not sure which case you have:** `torchlift.plan` lists names, ties and replayed
#   tensors.

# %%
# Question
# --------
#
# An optimizer exists before the loop runs. How many of its parameters are in the model afterwards?

# fold: Answer to the question
# None. Each new nn.Parameter leaves the old one to the optimizer.
model = linear()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for key, tensor in linear().state_dict().items():
    setattr(model, key, nn.Parameter(tensor))
ours = {id(parameter) for parameter in model.parameters()}
kept = [id(p) in ours for p in optimizer.param_groups[0]["params"]]
print(sum(kept), "of", len(kept), "parameters are in the model")
assert not any(kept)

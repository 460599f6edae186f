"""
Load weights one by one with setattr: where the loop breaks
===========================================================

You read somewhere that loading needs no second copy: put the model on the meta device, walk over
the checkpoint, and set one parameter after the other. Six lines, no library. Is that all there is?

For memory, yes. For ties, buffers, frozen layers and the optimizer, no: `torchlift.load` looks at
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
print(torchlift.load(torchlift.skeleton(tied), path))

# %%
# The file has two names for one weight. After the load the model still has one weight.
#
# The loop that everybody writes
# ------------------------------
#
# A key such as ``layers.3.weight`` is a path: before the last dot is the submodule that owns the
# tensor, after it the name. Here is the loop, and beside it the best that torch has, and torchlift.

from functools import partial

from torchlift import load, skeleton
from torchlift.measure import in_child


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
    model = skeleton(make)
    load(model, path)
    return model


def linear_layers():
    return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)])


def only_load(way, *arguments):
    way(*arguments)  # and return nothing: the model stays in the child


torch.save(linear_layers().state_dict(), path)
WAYS = by_hand, by_torch, by_torchlift
for way in WAYS:
    child = in_child(only_load, way, linear_layers, path)
    copies = child.memory.added_anonymous / torchlift.open(path).nbytes
    print(f"{way.__name__:<13} anonymous peak: ~{copies:.1f} copies of 128 MiB")
    assert copies < 1.3

# %%
# So the loop keeps its promise and never owns more than one copy; the other two map the file.
#
# Ties, buffers, frozen layers: one small model each
# --------------------------------------------------
#
# Each model has one property that real models have. The last two do not fit their file, which
# lacks a weight or has another shape. There a way of loading is right if it refuses.

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
    "missing weight": (with_buffer, linear()),
    "wrong shape": (linear, nn.Linear(2, 3)),
}


def what_is_wrong(model, saved):
    here, there = dict(model.named_parameters()), dict(saved.named_parameters())
    tensors = [*here.items(), *model.named_buffers()]
    on_meta = [name for name, tensor in tensors if tensor.is_meta]
    if on_meta:
        return f"left on meta: {', '.join(on_meta)}"
    if here.keys() != there.keys():
        return f"its parameters are {', '.join(here)}"
    if any(here[name].requires_grad != there[name].requires_grad for name in here):
        return "its frozen weights are trained"
    made = {**there, **dict(saved.named_buffers())}
    if not all(torch.equal(tensor, made[name]) for name, tensor in tensors):
        return "it has other values"
    return ""


# %%
# Proof
# -----
#
# Eight cases, three ways. Printed is what went wrong.

cases = {case: (make, make()) for case, make in FITS.items()} | DOES_NOT_FIT
results = {}
for case, (make, saved) in cases.items():
    torch.save(saved.state_dict(), path)
    for way in WAYS:
        try:
            wrong = what_is_wrong(way(make, path), saved)
            if case in DOES_NOT_FIT:
                wrong = wrong or "no error"
        except (RuntimeError, torchlift.MismatchError) as error:
            wrong = "" if case in DOES_NOT_FIT else str(error)
        results.setdefault(case, []).append(not wrong)
        if wrong:
            print(f"{case:<23} {way.__name__:<13} {wrong[:43]}")

for way, outcomes in zip(WAYS, zip(*results.values(), strict=True), strict=True):
    print(f"{way.__name__:<13} {sum(outcomes)} of {len(outcomes)} cases right")
assert all(outcomes), "torchlift is the last"

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 4))
for row, outcome in enumerate(results.values()):
    for column, right in enumerate(outcome):
        look = {"color": ("C0", "C3", "C1")[column], "size": 22}
        axes.text(
            column, row, "✓" if right else "✗", **look, ha="center", va="center"
        )
axes.set(xlim=(-0.5, 2.5), ylim=(len(results) - 0.5, -0.5))
axes.set_xticks(range(3), ["by hand", "meta, mmap,\nassign", "torchlift"])
axes.set_yticks(range(len(results)), results)
axes.xaxis.tick_top()
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plt.show()

# %%
# *What each way of loading does with each case. A check mark: the model is what it was when it was
# saved, or a file that does not fit is refused. A cross: it is not. The loop is right in one case
# of eight, the three switches of torch in six, torchlift in all.*
#
# Half of the failures raise no error: the model runs, and trains wrong.
#
# Remember
# --------
#
# - A loop over a mapped checkpoint takes the memory of one copy. That part is easy.
# - A checkpoint does not hold a whole model: ties, ``requires_grad``, non-persistent buffers and
#   who is a parameter are in the code.
# - Each case has a patch. All the patches together are a loader.
#
# Use this when
# -------------
#
# - **The model is of untied parameters only, and all of them are in the file:** the loop, or
#   *torch.load with mmap=True, assign=True and the meta device: what each one saves*.
# - **Anything else:** `torchlift.skeleton` and `torchlift.load`: two lines, all of it or nothing.
# - **You are not sure which it is:** `torchlift.plan` lists names, ties and what is replayed.

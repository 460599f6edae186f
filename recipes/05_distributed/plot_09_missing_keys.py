"""
Missing key in checkpoint state_dict: load what dcp.load finds, list the rest
=============================================================================

The model has changed since it was saved, and ``dcp.load`` stops at the first missing key. How do
you load the keys that match, and list the others?

`torchlift.load` reads the DCP folder into the model. It loads every tensor that matches, and its
report lists the rest.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

folder = tempfile.mkdtemp()
saved = {"0.weight": torch.ones(3, 3), "old": torch.ones(2)}
torchlift.save(saved, folder, format="dcp")
Linear = torch.nn.Linear
model = torch.nn.Sequential(Linear(3, 3, bias=False), Linear(3, 3, bias=False))
other = {"allow_missing": ["1.*"], "allow_unexpected": ["old"]}
report = torchlift.load(model, folder, **other)
print("loaded:", *report.loaded)
print("missing:", *report.missing_keys)

# %%
# A missing key keeps the value that it has in the model. ``allow_missing`` names the keys that may
# be missing, so any other missing key is still an error.
#
# See every key that does not match
# ---------------------------------
#
# A model of six layers was saved. Since then two layers were added, the head has another number of
# classes, and a layer has another name:

from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import nn

from torchlift.distributed import on_ranks

path = Path(tempfile.mkdtemp()) / "step-100"


def build(layers, classes, words):
    blocks = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(layers))
    head = nn.Linear(8, classes, bias=False)
    return nn.ModuleDict(
        {"layers": blocks, "head": head, words: nn.Embedding(16, 8)}
    )


def load_with_dcp(planner, prefix=""):
    state = {
        prefix + name: torch.zeros_like(t)
        for name, t in build(8, 4, "tokens").state_dict().items()
    }
    try:
        dcp.load(state, checkpoint_id=path, planner=planner)
    except dcp.CheckpointException as caught:
        ((error, _),) = caught.failures.values()
        return f"{type(error).__name__}: {error}"
    loaded = sum(bool(tensor.any()) for tensor in state.values())
    return f"no error, {loaded} of {len(state)} loaded"


def load_with_torchlift(model, **options):
    try:
        return torchlift.load(model, path, **options)
    except torchlift.MismatchError as error:
        return f"{type(error).__name__}: {error}".replace(str(path), "step-100")


old = build(6, 10, "embedding").state_dict()
on_ranks(1, lambda: dcp.save(old, checkpoint_id=path))
torchs = on_ranks(1, load_with_dcp, dcp.DefaultLoadPlanner())[0]
print(torchs)

# %%
# The error names one of four mismatches. You would fix it, start again, and hit the next one.
# torchlift compares all names before it reads a byte:

ours = load_with_torchlift(build(8, 4, "tokens"))
print(ours)

# %%
# Do not skip keys silently
# -------------------------
#
# torch's way out is ``allow_partial_load=True``. It does not report what it skips. With one prefix
# too many it loads nothing at all, and returns without an error. torchlift refuses that:

partial = dcp.DefaultLoadPlanner(allow_partial_load=True)
print("torch:", on_ranks(1, load_with_dcp, partial, "module.")[0])
wrapped = nn.ModuleDict({"module": build(8, 4, "tokens")})
refusal = load_with_torchlift(wrapped, strict=False)
print(refusal.splitlines()[0])

# %%
# A load in which no key matches is an error, even with ``strict=False``.
#
# Proof
# -----
#
# Two ranks load a model that is sharded over both. They get the same lists:


# fold: The function of the two ranks
def on_two():
    import warnings

    from torch.distributed.fsdp import fully_shard

    # A warning names the parameters that keep their values.
    warnings.simplefilter("ignore")
    model = build(8, 4, "tokens")
    for layer in [*model["layers"], model["head"], model["tokens"]]:
        fully_shard(layer)
    report = torchlift.load(model, path, strict=False, ignore_mismatched=True)
    return len(report.loaded), report.missing_keys, list(report.mismatched)


first, second = on_ranks(2, on_two)
loaded, missing, mismatched = first
print("loaded:", loaded, "tensors")
print("missing:", *missing)
print("other shape:", *mismatched)
assert first == second
names = ["tokens.weight", "layers.6.weight", "layers.7.weight", "head.weight"]
assert sorted(names) == sorted(missing)

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 2.0))
ways = {
    "dcp.load": sum(name in torchs for name in names),
    "torchlift.load": sum(name in ours for name in names),
}
axes.barh(list(ways), list(ways.values()), color=["C0", "C1"])
axes.axvline(len(names), color="black", linestyle=":", linewidth=1.2)
axes.invert_yaxis()
axes.set(
    xlabel="keys that the error names, of four that do not match", xlim=(0, 4.3)
)
plt.show()

# %%
# *The bars count the keys that one error names, when three are missing and one has another shape.
# The dotted line marks all four. dcp.load stops at the first, and torchlift.load names all four, so
# you fix them in one go.*
#
# Remember
# --------
#
# - `torchlift.load` is strict, and complete: before anything is loaded, one error lists every
#   missing key and every other shape.
# - ``allow_missing=["head.*"]`` lets these keys be missing. ``ignore_mismatched=True`` lets their
#   shapes differ, too, or all shapes if no key is named. ``strict=False`` lets any key be missing.
#   The report lists what was left.
# - On several ranks all of them load, or all raise the same error.
#
# Use this when
# -------------
#
# - **The checkpoint is a DCP folder, and the model has changed:** `torchlift.load`.
# - **Your code calls** ``dcp.load``: pass ``DefaultLoadPlanner(allow_partial_load=True)``, and
#   compare the names yourself. `torchlift.open` lists those of the folder.
# - **Names have changed:** `torchlift.load`, whose ``rename=`` brings them together.

# %%
# Question
# --------
#
# A pattern of ``allow_missing`` has a slip: ``"tokenz.*"``. Does the load go through?

# fold: Answer to the question
# No. The key that the pattern meant is still missing, and the error names it.
text = load_with_torchlift(build(6, 10, "tokens"), allow_missing=["tokenz.*"])
print(text.splitlines()[0])
assert text.startswith("MismatchError")

"""
Missing key in checkpoint state_dict: load what dcp.load finds, list the rest
=============================================================================

The model has changed since it was saved, and ``dcp.load`` ends at the first key that is missing.
How do you load what is there, and learn what is not?

With a planner: `torchlift.distributed.LenientPlanner` loads what fits, and lists everything else.
What may be missing you say by patterns, or with ``strict=False``.
"""

# %%
# In short
# --------

import tempfile

import torch
import torch.distributed.checkpoint as dcp

from torchlift.distributed import LenientPlanner, on_ranks


def load(path):
    dcp.save({"body": torch.ones(3), "old_head": torch.ones(2)}, checkpoint_id=path)
    state = {"body": torch.zeros(3), "new_head": torch.zeros(4)}
    planner = LenientPlanner(allow_missing=["new_head"])
    dcp.load(state, checkpoint_id=path, planner=planner)
    return planner


print(on_ranks(1, load, tempfile.mkdtemp())[0])

# %%
# ``dcp.load`` takes the planner on any number of ranks, with torch's own readers and with
# `torchlift.distributed.CheckpointReader`. A missing key keeps the value that it has in the state
# dict, and only one that a pattern allows may be missing.
#
# What torch's planner tells you
# ------------------------------
#
# A model of six layers was saved. Since then two layers were added, the head has other classes, and
# a layer has another name:

from pathlib import Path

path = Path(tempfile.mkdtemp()) / "step-100"


def saved():
    return {f"layers.{i}.weight": torch.ones(8, 8) for i in range(6)} | {
        "head.weight": torch.ones(10, 8),
        "embedding.weight": torch.ones(16, 8),
    }


def grown():
    return {f"layers.{i}.weight": torch.zeros(8, 8) for i in range(8)} | {
        "head.weight": torch.zeros(4, 8),
        "tokens.weight": torch.zeros(16, 8),
    }


def outcome(planner, path, prefix=""):
    state = {prefix + name: tensor for name, tensor in grown().items()}
    try:
        dcp.load(state, checkpoint_id=path, planner=planner)
    except dcp.CheckpointException as caught:
        ((error, _),) = caught.failures.values()
        return f"{type(error).__name__}: {error}"
    return f"no error, {sum(bool(t.any()) for t in state.values())} of {len(state)} loaded"


on_ranks(1, lambda: dcp.save(saved(), checkpoint_id=path))
torchs = on_ranks(1, outcome, dcp.DefaultLoadPlanner(), path)[0]
print(torchs)

# %%
# One name of four that do not fit: mend it, start again, meet the next. The lenient planner names
# all of them at once, before a byte is read:

ours = on_ranks(1, outcome, LenientPlanner(), path)[0]
print(ours.replace(str(path), "step-100"))

# %%
# Skipped without a word
# ----------------------
#
# torch's way out is ``allow_partial_load=True``. It says nothing of what it skips, so that with one
# prefix too many it loads nothing at all, and calls that a success:

partial = dcp.DefaultLoadPlanner(allow_partial_load=True)
print("torch:", on_ranks(1, outcome, partial, path, "module.")[0])
lenient = LenientPlanner(strict=False)
told = on_ranks(1, outcome, lenient, path, "module.")[0]
print(told.splitlines()[0].replace(str(path), "step-100"))

# %%
# A load in which nothing fits is an error of the lenient planner, whatever may be missing.
#
# Proof
# -----
#
# On two ranks, of which only one has another shape, both get the same lists; or the same error.


# fold: What two ranks are asked, and tell
def on_two(path):
    state = grown()
    if torch.distributed.get_rank() == 0:
        state["head.weight"] = torch.zeros(10, 8)
    planner = LenientPlanner(strict=False, ignore_mismatched=True)
    dcp.load(state, checkpoint_id=path, planner=planner)
    return planner, state["head.weight"].sum().item()


(first, kept), (second, untouched) = on_ranks(2, on_two, path)
print(first)
assert str(first) == str(second)
assert (kept, untouched) == (80, 0)
names = ["tokens.weight", "layers.6.weight", "layers.7.weight", "head.weight"]
assert sorted(names) == sorted([*first.missing_keys, *first.mismatched])

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 2.0))
ways = {
    "torch's planner": sum(name in torchs for name in names),
    "LenientPlanner": sum(name in ours for name in names),
}
axes.barh(list(ways), list(ways.values()), color=["C0", "C1"])
axes.axvline(len(names), color="black", linestyle=":", linewidth=1.2)
axes.invert_yaxis()
axes.set(xlabel="keys that the error names, of four that do not fit", xlim=(0, 4.3))
plt.show()

# %%
# *How many keys one error of dcp.load names, where three are missing and one has another shape.
# torch's planner ends at the first that it meets; the dotted line is all four, which the lenient
# planner names at once.*
#
# Remember
# --------
#
# - ``LenientPlanner()`` is strict, and complete: one error with every missing key and every other
#   shape, before anything is loaded.
# - ``allow_missing=["head.*"]`` lets these keys be missing, ``ignore_mismatched=True`` lets shapes
#   differ, and ``strict=False`` lets any key be missing. What was left is in ``missing_keys``,
#   ``unexpected_keys`` and ``mismatched``.
# - Ranks compare what does not fit, so that each has the same lists, or raises the same error.
#
# Use this when
# -------------
#
# - **You load with DCP, and the model has changed:** `torchlift.distributed.LenientPlanner`.
# - **The file is no DCP directory:** `torchlift.distributed.CheckpointReader` beside it.
# - **Names have changed, too:** `torchlift.load`, whose ``rename=`` brings them together.

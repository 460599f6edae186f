"""
Missing key in checkpoint state_dict: load what dcp.load finds, list the rest
=============================================================================

The model has changed since it was saved, and ``dcp.load`` stops at the first missing key. How do
you load the keys that match, and list the others?

Pass a planner: `torchlift.distributed.LenientPlanner` loads the keys that match, and lists all
others. Allow missing keys with patterns, or with ``strict=False``.
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
# `torchlift.distributed.CheckpointReader`. A missing key keeps its value in the state dict, and a
# pattern must allow it.
#
# dcp.load stops at the first mismatch
# ------------------------------------
#
# A model of six layers was saved. Since then two layers were added, the head has another number of
# classes, and a layer has another name:

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
# The error names one of four mismatches. You would fix it, start again, and hit the next one. The
# lenient planner lists all of them at once, before a byte is read:

ours = on_ranks(1, outcome, LenientPlanner(), path)[0]
print(ours.replace(str(path), "step-100"))

# %%
# allow_partial_load skips keys silently
# --------------------------------------
#
# Torch's own option is ``allow_partial_load=True``. It does not report the skipped keys. With a
# wrong prefix it loads nothing at all and reports success:

partial = dcp.DefaultLoadPlanner(allow_partial_load=True)
print("torch:", on_ranks(1, outcome, partial, path, "module.")[0])
lenient = LenientPlanner(strict=False)
text = on_ranks(1, outcome, lenient, path, "module.")[0]
print(text.splitlines()[0].replace(str(path), "step-100"))

# %%
# If no key matches, the lenient planner raises an error, even with ``strict=False``.
#
# Proof
# -----
#
# On two ranks, only one has another shape. Both get the same lists or the same error.


# fold: How two ranks load, and how their lists are compared
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
# *The bars count the keys that one error of dcp.load names, when three are missing and one has
# another shape. The dotted line marks all four. The planner of torch stops at the first, and the
# lenient planner names all four, so you fix them in one go.*
#
# Remember
# --------
#
# - ``LenientPlanner()`` is strict and complete. It raises one error with every missing key and
#   every other shape, before anything is loaded.
# - ``allow_missing=["head.*"]`` lets these keys be missing, ``ignore_mismatched=True`` lets shapes
#   differ, and ``strict=False`` lets any key be missing. The skipped keys are in ``missing_keys``,
#   ``unexpected_keys`` and ``mismatched``.
# - Ranks compare their mismatches, so each has the same lists or raises the same error.
#
# Use this when
# -------------
#
# - **You load with DCP, and the model has changed:** `torchlift.distributed.LenientPlanner`.
# - **The file is not a DCP folder:** add `torchlift.distributed.CheckpointReader`.
# - **Names have changed too:** `torchlift.load` with ``rename=``.

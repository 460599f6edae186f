"""
Keep the best checkpoints, delete the others
============================================

The disk is full of checkpoints. Or only the last three are kept, and the best one was deleted last
night. Which of them should stay, and how does an evaluation job find the next one?

Pass policies: a `torchlift.Keeper` combines several and removes in the background every checkpoint
that no policy keeps.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift
from torchlift.distributed import BestN, EveryNSteps, LatestN

folder = tempfile.mkdtemp()
policies = [LatestN(2), BestN(2, "loss"), EveryNSteps(4)]
losses = [0.9, 0.4, 0.2, 0.6, 0.3, 0.5, 0.7, 0.8, 0.6]
with torchlift.Keeper(folder, keep=policies) as keeper:
    for step, loss in enumerate(losses, 1):
        keeper.save(step, model=torch.nn.Linear(2, 1), metrics={"loss": loss})
print("kept:", keeper.steps(), "best:", keeper.best()[-17:])

# %%
# Steps 8 and 9 are the last two, 3 and 5 the best two, 4 and 8 are multiples of four. Step 2 was
# one of the best until step 5 was better. If the highest value is the best, pass
# ``best_is="highest"``. Orbax has the same names for its policies.
#
# The best checkpoint was deleted
# -------------------------------
#
# A plain number, such as ``keep=3`` or torchtitan's ``keep_latest_k``, counts from the end:

with torchlift.Keeper(tempfile.mkdtemp(), keep=3) as keeper:
    for step, loss in enumerate(losses, 1):
        keeper.save(step, model=torch.nn.Linear(2, 1), metrics={"loss": loss})
best = 1 + losses.index(min(losses))
print("kept:", keeper.steps(), "- the best of all was step", best)

# %%
# You can write your own rule as a function. It gets the kept checkpoints, oldest first, and returns
# the ones to keep. The newest checkpoint is always kept.


def good_enough(kept):
    return [one for one in kept if one.metrics["loss"] < 0.5]


with torchlift.Keeper(tempfile.mkdtemp(), keep=[good_enough, LatestN(1)]) as keeper:
    for step, loss in enumerate(losses, 1):
        keeper.save(step, model=torch.nn.Linear(2, 1), metrics={"loss": loss})
print("kept:", keeper.steps())

# %%
# No such file or directory
# -------------------------
#
# Another job evaluates the checkpoints of a run. It lists the folder, and opens a checkpoint that a
# Keeper has just removed, or an incomplete one. A `torchlift.distributed.RunFolder` lists complete
# checkpoints only, waits for the next one, and writes nothing. If a checkpoint is removed later,
# opening it raises one clear error:

from torchlift.distributed import RunFolder

run = RunFolder(folder, best="loss")
path = run.latest()
with torchlift.Keeper(folder, keep=1) as keeper:
    keeper.resume()
    keeper.save(10, model=torch.nn.Linear(2, 1), metrics={"loss": 0.1})
try:
    torchlift.open(path)
except torchlift.CheckpointError as error:
    print(path[-17:], "-", error.reason)
path = run.wait_for_new(path, timeout=60)
print("new:", path[-17:], "best:", run.best()[-17:])

# %%
# Let the Keeper keep the checkpoints that you evaluate, for example with ``EveryNSteps``. An open
# file stays readable after it is removed.
#
# Proof
# -----
#
# Each way saves 4 MB at each of 40 steps in a new process, with a loss that falls and rises again.
# How many megabytes are in the folder?

# fold: How much is in the folder after each step
import os


def megabytes_of(keep, folder):
    sizes = []
    with torchlift.Keeper(folder, keep=keep) as keeper:
        for step in range(1, 41):
            loss = abs(step - 25) / 25
            keeper.save(step, weights=torch.ones(1_000_000), metrics={"loss": loss})
            keeper.wait()
            sizes.append(
                sum(os.path.getsize(one.path) for one in RunFolder(folder).kept())
                / 1e6
            )
    return sizes


ways = {
    "all": None,
    "the last three": 3,
    "last, best two, every tenth": [LatestN(1), BestN(2, "loss"), EveryNSteps(10)],
}
sizes, best = {}, {}
for way, keep in ways.items():
    with tempfile.TemporaryDirectory() as place:
        sizes[way] = torchlift.measure.in_child(megabytes_of, keep, place).value
        best[way] = 25 in RunFolder(place).steps()
    print(
        f"{way:<28}{sizes[way][-1]:5.0f} MB",
        "with the best" if best[way] else "without the best",
    )

assert sizes["last, best two, every tenth"][-1] < sizes["all"][-1] / 5
assert best == {
    "all": True,
    "the last three": False,
    "last, best two, every tenth": True,
}

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots()
for look, (way, megabytes) in zip(
    ("C0:", "C3-.", "C1-"), sizes.items(), strict=True
):
    axes.plot(range(1, 41), megabytes, look, label=way)
    text = "with the best" if best[way] else "without the best"
    axes.text(41, megabytes[-1], text, va="center", fontsize=11)
axes.set(xlabel="step", ylabel="megabytes in the folder", ylim=(0, None))
figure.legend(loc="outside upper center", title="kept", ncols=2)
plt.show()

# %%
# *The lines show the megabytes of checkpoints in the folder after each of 40 steps. The text at the
# end of a line shows whether the best checkpoint still exists. All checkpoints grow to 161 MB. The
# last three stay at 12 MB, but the best one is lost. The last one, the best two and every tenth
# take 24 MB and include the best, so policies save space without losing it.*
#
# The Keeper renames an expired checkpoint first, and a background thread then deletes it. So no
# save waits, and a half-deleted folder is never used as a checkpoint. After a kill, the next Keeper
# removes the leftovers. A lock file keeps a second job out of the folder: its Keeper raises an
# error that names the first job.
#
# Remember
# --------
#
# - A checkpoint is kept if any policy keeps it. The newest is always kept.
# - ``best()``, ``latest()`` and ``steps()`` read only the folder. They need no other rank.
# - An evaluation job waits with `torchlift.distributed.RunFolder`, and writes nothing.
#
# Use this when
# -------------
#
# - **Some checkpoints should outlive the last few:** ``torchlift.Keeper(folder, keep=[...])``.
# - **A run may be killed and started again:** the recipe *Save while training goes on, and resume
#   after a kill*.
# - **You only need the weights of a kept checkpoint:** `torchlift.load` with ``root="model"``.

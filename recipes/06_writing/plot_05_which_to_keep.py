"""
Keep the best checkpoints, delete the others
============================================

The disk is full of checkpoints. Or only the last three are kept, and the best one was deleted last
night. Which of them should stay, and how does an evaluation job find the next one?

Pass ``keep``, ``best`` and ``every`` to a `torchlift.Keeper`. It removes in the background every
checkpoint that none of them keeps.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

folder = tempfile.mkdtemp()
losses = [0.9, 0.4, 0.2, 0.6, 0.3, 0.5, 0.7, 0.8, 0.6]
with torchlift.Keeper(folder, keep=2, best="loss", every=4) as keeper:
    for step, loss in enumerate(losses, 1):
        keeper.save(step, model=torch.nn.Linear(2, 1), metrics={"loss": loss})
print("kept:", keeper.steps(), "best:", keeper.best()[-17:])

# %%
# Steps 8 and 9 are the last two, 3 is the best one, 4 and 8 are multiples of four. Step 2 was the
# best until step 3 was better. If the highest value is the best, pass ``best_is="highest"``. A
# checkpoint that you save without ``metrics=`` is never the best.
#
# The best checkpoint was deleted
# -------------------------------
#
# ``keep=3`` alone, such as torchtitan's ``keep_latest_k``, counts from the end:

with torchlift.Keeper(tempfile.mkdtemp(), keep=3) as keeper:
    for step, loss in enumerate(losses, 1):
        keeper.save(step, model=torch.nn.Linear(2, 1), metrics={"loss": loss})
best = 1 + losses.index(min(losses))
print("kept:", keeper.steps(), "- the best of all was step", best)

# %%
# You can write your own rule as a function. It gets the kept checkpoints, the latest one last, and
# returns the ones to keep. Each has a ``step``, a ``path`` and ``metrics``. The newest checkpoint
# is always kept.


def last_and_best_two(kept):
    return [kept[-1], *sorted(kept, key=lambda one: one.metrics["loss"])[:2]]


with torchlift.Keeper(tempfile.mkdtemp(), keep=last_and_best_two) as keeper:
    for step, loss in enumerate(losses, 1):
        keeper.save(step, model=torch.nn.Linear(2, 1), metrics={"loss": loss})
print("kept:", keeper.steps())

# %%
# No such file or directory
# -------------------------
#
# Another job evaluates the checkpoints of a run. It lists the folder, and opens a checkpoint that a
# Keeper has just removed, or an incomplete one. A `torchlift.distributed.RunFolder` lists complete
# checkpoints only, and writes nothing. If a checkpoint is removed later, opening it raises one
# clear error. A loop waits for the next checkpoint:

import time

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
while run.latest() == path:
    time.sleep(10)
path = run.latest()
print("new:", path[-17:], "best:", run.best()[-17:])

# %%
# Let the Keeper keep the checkpoints that you evaluate, for example with ``every``. An open file
# stays readable after it is removed.
#
# Note ``keeper.resume()``. Without it, the first save into a folder with checkpoints is an error.
# They may be those of another run, which the Keeper would remove one by one:

other = torchlift.Keeper(folder, keep=1)
try:
    other.save(1, model=torch.nn.Linear(2, 1))
except torchlift.CheckpointError as error:
    print(error.reason, "-", error.hint)
other.close()

# %%
# The Keeper removes only checkpoints that a Keeper wrote. An export that you put next to them
# stays.
#
# Proof
# -----
#
# Each way saves 4 MB at each of 40 steps in a new process, with a loss that falls and rises again.
# How many megabytes are in the folder?

# fold: How much is in the folder after each step
import os


def megabytes_of(rules, folder):
    sizes = []
    with torchlift.Keeper(folder, **rules) as keeper:
        for step in range(1, 41):
            loss = abs(step - 25) / 25
            keeper.save(
                step, weights=torch.ones(1_000_000), metrics={"loss": loss}
            )
            keeper.wait()
            sizes.append(
                sum(
                    os.path.getsize(one.path)
                    for one in RunFolder(folder).kept()
                )
                / 1e6
            )
    return sizes


ways = {
    "all": {"keep": None},
    "the last three": {"keep": 3},
    "last, best, every tenth": {"keep": 1, "best": "loss", "every": 10},
}
sizes, best = {}, {}
for way, rules in ways.items():
    with tempfile.TemporaryDirectory() as place:
        sizes[way] = torchlift.measure.in_child(
            megabytes_of, rules, place
        ).value
        best[way] = 25 in RunFolder(place).steps()
    print(
        f"{way:<28}{sizes[way][-1]:5.0f} MB",
        "with the best" if best[way] else "without the best",
    )

assert sizes["last, best, every tenth"][-1] < sizes["all"][-1] / 5
assert best == {
    "all": True,
    "the last three": False,
    "last, best, every tenth": True,
}

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots()
looks = ("C0:", "center"), ("C3-.", "top"), ("C1-", "bottom")
for (look, place), way in zip(looks, sizes, strict=True):
    axes.plot(range(1, 41), sizes[way], look, label=way)
    text = "with the best" if best[way] else "without the best"
    axes.text(41, sizes[way][-1], text, va=place, fontsize=11)
axes.set(xlabel="step", ylabel="megabytes in the folder", ylim=(0, None))
figure.legend(loc="outside upper center", title="kept", ncols=2)
plt.show()

# %%
# *The lines show the megabytes of checkpoints in the folder after each of 40 steps. The text at the
# end of a line shows whether the best checkpoint still exists. All checkpoints grow to 161 MB. The
# last three stay at 12 MB, but the best one is lost. The last one, the best one and every tenth
# take 20 MB and include the best, so these rules save space without losing it.*
#
# A background thread deletes an expired checkpoint, so no save waits. In a folder it first deletes
# the file that makes the checkpoint complete, so that half of one is never used as a checkpoint.
# After a kill, the next Keeper removes the leftovers. A lock file keeps a second job out of the
# folder: its Keeper raises an error that names the first job.
#
# Remember
# --------
#
# - A checkpoint is kept if ``keep``, ``best`` or ``every`` keeps it. The newest is always kept.
# - Call ``resume()`` before the first save into a folder that contains checkpoints.
# - ``best()``, ``latest()`` and ``steps()`` read only the folder. An evaluation job has them from
#   `torchlift.distributed.RunFolder`, which writes nothing.
#
# Use this when
# -------------
#
# - **Some checkpoints should outlive the last few:** ``best=`` and ``every=`` of a
#   `torchlift.Keeper`.
# - **A run may be killed and started again:** the recipe *Save while training goes on, and resume
#   after a kill*.
# - **You only need the weights of a kept checkpoint:** `torchlift.load` with ``root="model"``.

# %%
# Question
# --------
#
# The first run of this page continues to step 12, and its loss gets worse. Which checkpoints stay?

# fold: Answer to the question
# The best, the multiples of four and the last two, which overlap at step 12.
with torchlift.Keeper(
    tempfile.mkdtemp(), keep=2, best="loss", every=4
) as keeper:
    for step, loss in enumerate([*losses, 0.7, 0.8, 0.9], 1):
        keeper.save(step, model=torch.nn.Linear(2, 1), metrics={"loss": loss})
print("kept:", keeper.steps())
assert list(keeper.steps()) == [3, 4, 8, 11, 12]

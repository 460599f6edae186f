"""
Keep the best checkpoints, delete the others
============================================

The disk is full of checkpoints; or only the last three are kept, and the best one was deleted last
night. Which of them should stay, and how does an evaluation job find the next one?

Say what may keep one: a `torchlift.Keeper` takes policies that combine, and removes in the
background what none of them keeps.
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
# one of the best until step 5 was better. Pass ``best_is="highest"`` if the highest metric is the
# best. Orbax calls its policies the same.
#
# The best one is gone
# --------------------
#
# A number alone, such as ``keep=3`` or torchtitan's ``keep_latest_k``, counts from the end:

with torchlift.Keeper(tempfile.mkdtemp(), keep=3) as keeper:
    for step, loss in enumerate(losses, 1):
        keeper.save(step, model=torch.nn.Linear(2, 1), metrics={"loss": loss})
best = 1 + losses.index(min(losses))
print("kept:", keeper.steps(), "- the best of all was step", best)

# %%
# A rule of your own is a function: it takes what is kept, oldest first, and returns what stays. The
# newest always does.


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
# Another job evaluates what the run keeps. It lists the folder, and opens what a keeper has removed
# meanwhile, or what is half there. A `torchlift.distributed.RunFolder` names complete checkpoints
# only, waits for the next one, and writes nothing. What is removed after that is one clear error:

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
# Let the keeper keep what you evaluate, with ``EveryNSteps`` for example. A file that is open stays
# readable when it is removed.
#
# Proof
# -----
#
# In a new process each, save 4 MB at each of 40 steps, with a loss that falls and rises again. How
# much is in the folder?

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
# *Megabytes of checkpoints in the folder after each of 40 steps, and whether the best one is still
# among them. Where all are kept they grow to 161; the last three stay at 12, and the best is gone;
# the last one, the best two and every tenth end at 24, with the best.*
#
# The keeper renames an expired checkpoint first, so half of one is never complete. Its background
# thread then deletes it. The next keeper removes what a killed one left. A lock file keeps a second
# job out of the folder: its keeper raises an error that names the first job.
#
# Remember
# --------
#
# - Whatever any policy keeps stays; the newest always does.
# - ``best()``, ``latest()`` and ``steps()`` read the folder alone: they need no other rank.
# - An evaluation job waits with `torchlift.distributed.RunFolder`, and writes nothing.
#
# Use this when
# -------------
#
# - **Some checkpoints should outlive the last few:** ``torchlift.Keeper(folder, keep=[...])``.
# - **A run may be killed and started again:** the recipe *Save while training goes on, and resume
#   after a kill*.
# - **You only need the weights of a kept checkpoint:** `torchlift.load` with ``root="model"``.

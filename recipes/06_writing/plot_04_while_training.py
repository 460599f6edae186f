"""
Save while training goes on, and resume after a kill
====================================================

Every save stops the training until the disk is done, and after a kill somebody has to find the last
checkpoint that is complete. Can both be one object's job?

Yes: a `torchlift.Keeper` takes a snapshot, writes it in the background, keeps the last few, and
resumes everything from the last complete one.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

model = torch.nn.Linear(512, 512)
optimizer = torch.optim.Adam(model.parameters())
state, folder = {"model": model, "optimizer": optimizer}, tempfile.mkdtemp()
with torchlift.Keeper(folder, keep=2) as keeper:
    for step in range(keeper.resume(state) or 0, 5):
        model(torch.randn(8, 512)).square().mean().backward()
        optimizer.step()
        keeper.save(step + 1, state)
print("kept:", keeper.steps())

# %%
# Start the same program again and it goes on after step 5: ``resume`` loads the model, the
# optimizer, whatever else is in ``state`` and the random number generators, and returns the step.
#
# Why
# ---
#
# A save has two halves. The copy of the state must be taken between two steps, and takes as long as
# memory takes. Writing it takes as long as the disk takes, and needs nothing of the training any
# more. The usual loop waits for both:
#
# .. code-block:: python
#
#    torch.save({"model": model.state_dict(), ...}, "last.pt")   # the next step waits for the disk
#
# And the usual resume is a line of shell: the newest file by date. It may be the one that was being
# written when the job was killed.
#
# A keeper's files get their names when they are complete, so that ``latest()`` never names another:

print(keeper.latest().replace(folder, "FOLDER"))
with torchlift.open(keeper.latest()) as ckpt:
    print(
        ckpt.objects["step"],
        [key for key in ckpt.entries if key.startswith("model.")],
    )

# %%
# Beside the last ones a keeper keeps what you name: every so many steps, and the best by a metric.

with torchlift.Keeper(folder, keep=1, every=4, best="loss") as keeper:
    for step, loss in enumerate([0.9, 0.2, 0.5, 0.4, 0.3, 0.6, 0.7], 6):
        keeper.save(step, state, metrics={"loss": loss})
print("kept:", keeper.steps(), "best:", keeper.best().replace(folder, "FOLDER"))
assert keeper.steps() == [4, 7, 8, 12]

# %%
# Proof
# -----
#
# First: is the run that goes on the run that never stopped? This model draws random numbers for its
# data and for its dropout, and its learning rate follows a schedule.


def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.Dropout(), torch.nn.Linear(64, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [20, 60])
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def train(run, steps):
    for _ in range(steps):
        run["model"](torch.randn(32, 16)).square().mean().backward()
        run["optimizer"].step()
        run["optimizer"].zero_grad()
        run["schedule"].step()


run, folder = build(), tempfile.mkdtemp()
train(run, 50)
with torchlift.Keeper(folder) as keeper:
    keeper.save(50, run)
    train(run, 50)  # never stopped, and the snapshot is not changed by it

again = build()
assert torchlift.Keeper(folder).resume(again) == 50
train(again, 50)
pairs = zip(run["model"].parameters(), again["model"].parameters(), strict=True)
equal = all(torch.equal(one, other) for one, other in pairs)
assert equal
print("resumed after 50 steps, equal after 100, bit by bit:", equal)

# %%
# Second: what does a save cost the loop? A child process trains a model of 36 MB, with moments of
# twice as much, and saves at every fifth step: not at all, by ``torch.save`` with a flush, and by a
# keeper.

import os
import time


def step_times(way, folder, steps=20):
    torch.manual_seed(0)
    model = torch.nn.Linear(3000, 3000, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    state, times = {"model": model, "optimizer": optimizer}, []
    keeper = torchlift.Keeper(folder, keep=2)
    keeper.save(0, state)  # the first one takes the memory of the snapshot
    keeper.wait()
    for step in range(1, steps + 1):
        start = time.perf_counter()
        model(torch.randn(64, 3000)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 and way == "Keeper":
            keeper.save(step, state)
        if step % 5 == 0 and way == "torch.save":
            with open(os.path.join(folder, f"{step}.pt"), "wb") as file:
                torch.save({n: obj.state_dict() for n, obj in state.items()}, file)
                file.flush()
                os.fsync(file.fileno())
        times.append(time.perf_counter() - start)
    keeper.close()
    return times


times = {}
for way in ("no saves", "torch.save", "Keeper"):
    with tempfile.TemporaryDirectory() as place:
        times[way] = torchlift.measure.in_child(step_times, way, place).value
for way, found in times.items():
    print(
        f"{way:<10} all steps took {sum(found):5.2f} s, the longest {max(found):5.2f} s"
    )

import matplotlib.pyplot as plt

TEAL, RUST, GREY = "#2b6f77", "#b83a16", "#8a9099"
plt.rcParams.update({"figure.facecolor": "white", "font.size": 12})
figure, axes = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
looks = {"no saves": (GREY, ":"), "torch.save": (RUST, "--"), "Keeper": (TEAL, "-")}
for way, found in times.items():
    color, line = looks[way]
    numbers = range(1, len(found) + 1)
    axes.plot(numbers, found, color=color, linestyle=line, label=way, linewidth=2)
axes.set(
    xlabel="step",
    ylabel="seconds of a step",
    xticks=range(0, 21, 5),
    ylim=(0, None),
)
axes.spines[["top", "right"]].set_visible(False)
figure.legend(loc="outside upper center", ncols=3, frameon=False)
plt.show()

# %%
# *Seconds of each training step, with a save at every fifth: a step that saves by* ``torch.save``
# *waits for the disk, one that saves by a keeper for a copy in memory; the steps that follow
# share the processor with the writing.*
#
# .. note::
#
#    The snapshot is a second copy of the state on the host, taken once and used again by every
#    save. From an accelerator it is pinned, and the training goes on as soon as the copy is done.
#
# On several ranks the same calls keep a folder for each step, in the format of
# ``torch.distributed.checkpoint``: each rank writes its own shards, and any number of ranks
# resumes.
#
# Remember
# --------
#
# - Training has to wait for the snapshot, never for the disk.
# - A complete checkpoint is one that has its name; ``latest()`` and ``resume()`` see no others.
# - To go on means model, optimizer, schedule, random numbers and the number of the step.
#
# Use this when
# -------------
#
# - **A run may be killed and started again:** `torchlift.Keeper`, with ``resume`` as its first
#   line.
# - **You save once, at the end:** `torchlift.save`.
# - **You only need the weights of a kept checkpoint:** `torchlift.load` with ``root="model"``.

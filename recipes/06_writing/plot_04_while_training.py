"""
Save while training goes on, and resume after a kill
====================================================

Every save stops the training until the disk is done. After a kill somebody has to find the last
complete checkpoint. Can one object do both?

Yes: a `torchlift.Keeper` takes a snapshot, writes it in the background, keeps the last few, and
resumes everything from the last complete one.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

folder, model = tempfile.mkdtemp(), torch.nn.Linear(512, 512)
state = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
with torchlift.Keeper(folder, keep=2) as keeper:
    for step in range(keeper.resume(state) or 0, 5):
        model(torch.randn(8, 512)).square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        keeper.save(step + 1, state)
print("kept:", keeper.steps())

# %%
# Use a folder that stays, such as ``"run"``, and start the same program again: it resumes after
# step 5. ``resume`` loads the model, the optimizer, the random number generators and everything
# else in ``state``, and returns the step. ``state`` may contain any object with ``state_dict`` and
# ``load_state_dict``: a schedule, a ``GradScaler``, an EMA (``AveragedModel``), or a data loader
# that knows its position.
#
# The newest file may be incomplete
# ---------------------------------
#
# After a kill, the newest file by date may be half a checkpoint:

import os
from pathlib import Path

torch.save(model.state_dict(), Path(folder) / "step-6.pt")
os.truncate(Path(folder) / "step-6.pt", 500_000)
newest = max(Path(folder).glob("*.pt"), key=os.path.getmtime)
try:
    torch.load(newest)
except RuntimeError as error:
    print(newest.name, "-", str(error).split(":")[0])

# %%
# The Keeper names a file only after it is complete, so ``latest()`` never returns an incomplete
# one.
#
# Resume bit for bit
# ------------------
#
# This model draws random numbers for its data and its dropout, and its learning rate follows a
# schedule. Does the resumed run equal the run that never stopped?


# fold: The model and its training
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


# %%
run, folder = build(), tempfile.mkdtemp()
train(run, 50)
with torchlift.Keeper(folder) as keeper:
    keeper.save(50, run)
    train(run, 50)  # never stopped, and this does not change the snapshot

again = build()
assert torchlift.Keeper(folder).resume(again) == 50
train(again, 50)
weights = run["model"].state_dict(), again["model"].state_dict()
assert torchlift.diff(*weights).equal
print("resumed after 50 steps, equal after 100, bit for bit")

# %%
# Proof
# -----
#
# A save has two halves. The snapshot must be taken between two steps and takes as long as memory
# takes. Writing takes as long as the disk takes. Each way trains a model of 16 MB in a new process,
# with Adam's moments of twice as much. It saves seven times, at every fourth step. The four ways
# are: never, flushed to the disk, by DCP, and by a Keeper.

# fold: How long steps and saves take
import time
import timeit
from statistics import median

from torch.distributed.checkpoint import async_save


def step_times(way, folder):
    torch.set_num_threads(1)  # the other core writes
    model = torch.nn.Linear(2000, 2000, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    keeper, writing, steps, saves = torchlift.Keeper(folder), None, [], []
    for step in range(-4, 28):  # the first save allocates, and does not count
        start = time.perf_counter()
        model(torch.randn(64, 2000)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        trained = time.perf_counter()
        if step % 4 == 0 and way == "Keeper":
            keeper.save(step + 4, state)
        elif step % 4 == 0 and way != "no saves":
            whole = {name: part.state_dict() for name, part in state.items()}
            if way == "async_save":
                if writing is not None:
                    writing.result()  # one at a time
                writing = async_save(whole, checkpoint_id=f"{folder}/{step}")
            else:
                with open(f"{folder}/{step}.pt", "wb") as file:
                    torch.save(whole, file)
                    file.flush()
                    os.fsync(file.fileno())
        steps.append(time.perf_counter() - start)
        saves.append(time.perf_counter() - trained)
    keeper.close()
    return steps[4:], saves[4::4]


copies = torch.ones(2, 12_000_000)  # two states: 16 MB, and twice as much
copied = min(timeit.repeat(lambda: copies[0].copy_(copies[1]), number=1))
print(f"expected: a copy of 48 MB in memory, which takes {copied:.3f} s")
times, waits = {}, {}
print("a step waits for its save: the median of seven, the least, the most")
for way in ("no saves", "torch.save", "async_save", "Keeper"):
    with tempfile.TemporaryDirectory() as place:
        child = torchlift.measure.in_child(step_times, way, place)
    times[way], waits[way] = child.value
    if way != "no saves":
        least, *_, most = sorted(waits[way])
        print(
            f"{way:<11} {median(waits[way]):.3f} s, {least:.3f} s, {most:.3f} s"
        )

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots()
looks = ("C0:", "C0-", "C3-.", "C1-")
for i, (way, steps) in enumerate(times.items()):
    x = [place + 0.08 * (i - 1.5) for place in range(4)]
    rounds = [sorted(steps[place::4]) for place in range(4)]
    least, *_, most = zip(*rounds, strict=True)
    axes.plot(x, list(map(median, rounds)), looks[i], label=way)
    axes.vlines(x, least, most, looks[i][:2], lw=1)
axes.set_xticks(range(4), ["saves", "next", "2nd", "3rd"])
axes.set(xlabel="step, counted from the save", ylabel="seconds", ylim=(0, None))
figure.legend(loc="outside upper center", ncols=2)
plt.show()

# %%
# *The lines show the median seconds of a training step by its distance from the save, with thin
# bars from the fastest to the slowest. Every fourth step saves. With torch.save and a flush, that
# step waits for the disk. With torch's async_save or a Keeper it only waits for a copy in memory.
# The next steps share the processor with the writing.*
#
# The snapshot is a second copy of the state on the host, and every save uses it again. From an
# accelerator it is pinned memory. ``keeper.report`` has the time that a save blocked and its total
# time. On a scheduler's signal the loop ``while not keeper.should_stop()`` ends on all ranks after
# the same step.
#
# Remember
# --------
#
# - Training has to wait for the snapshot, never for the disk.
# - A complete checkpoint has its final name. ``latest()`` and ``resume()`` ignore all other files.
# - A resume needs the model, the optimizer, the schedule, the random numbers and the step.
#
# Use this when
# -------------
#
# - **A run may be killed and started again:** `torchlift.Keeper`. Start with ``resume``.
# - **You save once, at the end:** `torchlift.save`.
# - **You want to keep more than the last few:** *Keep the best checkpoints, delete the others*.
# - **Many ranks, a scheduler, faults:** the page *On a cluster*. For state of each rank: *Resume on
#   another number of GPUs: where was each rank in its data?*
# - **You only need the weights of a kept checkpoint:** `torchlift.load` with ``root="model"``.

# %%
# Question
# --------
#
# A program draws a random number after a save. Which number does the resumed program draw?

# fold: Answer to the question
# The same: the state of the random numbers is a part of each checkpoint.
model = {"model": torch.nn.Linear(2, 2)}
with torchlift.Keeper(tempfile.mkdtemp()) as keeper:
    keeper.save(1, model)
    drawn = torch.rand(1)
    torch.manual_seed(99)  # another program
    keeper.resume(model)
print("drawn again:", "the same" if torch.rand(1) == drawn else "another one")
torch.manual_seed(99)
assert torch.rand(1) != drawn

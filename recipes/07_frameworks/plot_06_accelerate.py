"""
accelerate: save_state in the background, and go on in the middle of an epoch
=============================================================================

``accelerator.save_state`` waits for the disk, and after ``load_state`` and ``skip_first_batches``
the losses differ. Where do the runs part?

``AcceleratorKeeper`` saves all prepared objects through a `torchlift.Keeper`. Its ``remaining``
continues after the finished batches, with the random numbers as they were.
"""

# %%
# In short
# --------

import tempfile

import torch
from accelerate import Accelerator

from torchlift.integrations.accelerate import AcceleratorKeeper

job, model = Accelerator(cpu=True), torch.nn.Linear(4, 1)
model, optimizer = job.prepare(model, torch.optim.AdamW(model.parameters()))
with AcceleratorKeeper(job, tempfile.mkdtemp(), keep=2) as keeper:
    for step in range(keeper.resume() or 0, 3):
        job.backward(model(torch.randn(8, 4)).square().mean())
        optimizer.step()
        keeper.save(step + 1)
print("kept:", keeper.keeper.steps())

# %%
# With a folder that stays, start the same program again, and it resumes after step 3. Objects that
# you passed to ``register_for_checkpointing`` are kept too, for example an EMA of the weights
# (``torch.optim.swa_utils.AveragedModel``). In half precision the ``GradScaler`` is kept as
# ``scaler``.
#
# The loss after load_state and skip_first_batches
# ------------------------------------------------
#
# This program depends on the random numbers (a dropout), the order of a shuffled loader, and an
# average of the weights. It stops after step 10, in the middle of its second epoch of 8 batches.
# The order of its data survives with ``use_seedable_sampler``, which it does not have by default
# (`issue 2016 <https://github.com/huggingface/accelerate/issues/2016>`__).

from accelerate.utils import DataLoaderConfiguration
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Program:
    def __init__(self, seed):
        torch.manual_seed(seed)
        places = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
        self.accelerator = Accelerator(cpu=True, dataloader_config=places)
        rows = torch.linspace(-1, 1, 64 * 16).view(64, 16)
        data = torch.utils.data.DataLoader(rows.sin(), 8, shuffle=True)
        first, last = torch.nn.Linear(16, 256), torch.nn.Linear(256, 1)
        net = torch.nn.Sequential(first, torch.nn.Dropout(), last)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.003)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        prepared = self.accelerator.prepare(net, optimizer, schedule, data)
        self.model, self.optimizer, self.schedule, self.data = prepared
        self.ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.accelerator.register_for_checkpointing(self.ema)
        self.losses = []

    def train(self, batches):
        for batch in batches:
            target = batch.sum(1, keepdim=True)
            loss = (self.model(batch) - target).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.ema.update_parameters(self.model)
            self.losses.append(loss.item())
            yield len(self.losses)


# %%
# Proof
# -----
#
# Each way runs in a new process: a run that never stops, which saves at step 10, and a run that
# resumes from there. Their code differs only in the lines that save, load and finish the epoch.

# fold: How it is measured
import time

import torchlift


def resume(way, folder):
    torch.set_num_threads(1)
    first, again = Program(0), Program(5)
    keeper = AcceleratorKeeper(first.accelerator, folder, background=False)
    for epoch in range(4):
        first.data.set_epoch(epoch)
        for step in first.train(first.data):
            if step == 10 and way == "torchlift":
                keeper.save(10)
            elif step == 10:
                first.accelerator.save_state(f"{folder}/state")
    keeper.close()
    keeper = AcceleratorKeeper(again.accelerator, folder)
    start = time.perf_counter()
    if way == "torchlift":
        keeper.resume()
    else:
        again.accelerator.load_state(f"{folder}/state")
    seconds = time.perf_counter() - start
    again.data.set_epoch(1)
    if way == "torchlift":
        left = keeper.remaining(again.data, 2)
    else:
        left = again.accelerator.skip_first_batches(again.data, 2)
        left.set_epoch(1)
    list(again.train(left))
    for epoch in (2, 3):
        again.data.set_epoch(epoch)
        list(again.train(again.data))
    far = [
        abs(a - b) for a, b in zip(first.losses[10:], again.losses, strict=True)
    ]
    same = torchlift.diff(first.ema.state_dict(), again.ema.state_dict()).equal
    return seconds, far, same


far = {}
for way in ("accelerate", "torchlift"):
    with tempfile.TemporaryDirectory() as folder:
        child = torchlift.measure.in_child(resume, way, folder)
    seconds, far[way], same = child.value
    peak = child.memory.added_anonymous / 2**20
    print(
        f"{way:<10} losses differ by at most ~{max(far[way]):.4f}, "
        f"resumed in {seconds:.3f} s, anonymous peak: {peak:.0f} MiB"
    )
assert max(far["torchlift"]) == 0
assert same, "the average of the weights, too"
assert max(far["accelerate"]) > 0.001

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots()
for way, look in (("torchlift", "C1-"), ("accelerate", "C0:")):
    axes.plot(range(11, 33), far[way], look, label=way)
axes.set(xlabel="step", ylabel="distance of the losses")
figure.legend(loc="outside upper center", ncols=2)
plt.show()

# %%
# *The lines show the distance between the loss after a resume from step 10 and the loss of the run
# that never stopped. With AcceleratorKeeper it is zero, to the bit. With load_state and
# skip_first_batches the random numbers differ, so the resumed run is another one.*
#
# Remember
# --------
#
# - Call ``keeper.resume()`` first, and ``keeper.save(step)`` in the loop. They include all prepared
#   objects.
# - Use ``keeper.remaining(loader, batches)`` in place of ``skip_first_batches``. A
#   ``StatefulDataLoader`` knows its own position.
# - Pass an EMA, or any object with a ``state_dict``, to ``register_for_checkpointing``.
#
# Use this when
# -------------
#
# - **accelerate prepares your objects:** ``AcceleratorKeeper``.
# - **You prepare them yourself:** `torchlift.Keeper`, as in *Save while training goes on, and
#   resume after a kill*.
# - **Each rank has a position in its data:** *Resume on another number of GPUs: where was each rank
#   in its data?*

# %%
# Question
# --------
#
# An epoch has eight batches, and two are finished. How many does ``remaining`` yield?

# fold: Answer to the question
# Six, and they are those that the run would have read next.
program = Program(0)
with AcceleratorKeeper(program.accelerator, tempfile.mkdtemp()) as keeper:
    left = list(keeper.remaining(program.data, 2))
print(len(left), "batches")
assert len(left) == 6

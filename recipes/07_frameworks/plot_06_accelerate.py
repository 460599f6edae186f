"""
accelerate: save_state in the background, and go on in the middle of an epoch
=============================================================================

``accelerator.save_state`` waits for the disk, and after ``load_state`` and ``skip_first_batches``
the losses are others. Where do they part?

``AcceleratorKeeper`` saves all that the accelerator has prepared through a `torchlift.Keeper`, and
its ``remaining`` goes on behind the batches that are done, with the random numbers where they were.
"""

# %%
# In short
# --------

import tempfile

import torch
from accelerate import Accelerator

from torchlift.integrations.accelerate import AcceleratorKeeper

accelerator, model = Accelerator(cpu=True), torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
with AcceleratorKeeper(accelerator, tempfile.mkdtemp(), keep=2) as keeper:
    for step in range(keeper.resume() or 0, 3):
        accelerator.backward(model(torch.randn(8, 4)).square().mean())
        optimizer.step()
        keeper.save(step + 1)
print("kept:", keeper.keeper.steps())

# %%
# Start the same program again, with a folder that stays, and it goes on after step 3. What was
# passed to ``register_for_checkpointing`` is kept, too: an EMA of the weights
# (``torch.optim.swa_utils.AveragedModel``), say. In half precision the ``GradScaler`` is kept as
# ``scaler``.
#
# The loss after load_state and skip_first_batches
# ------------------------------------------------
#
# A program whose steps need the random numbers (a dropout), the order of a shuffled loader, and an
# average of the weights. It stops after step 10, in the middle of its second epoch of 8 batches.

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
# In a new process for each way: the run that never stops, which saves at step 10, and one that goes
# on from there. The rest of the epoch is all that differs in the code.

# fold: How it is measured
import time

import torchlift


def go_on(way, folder):
    torch.set_num_threads(1)
    first, again = Program(0), Program(5)
    keepers = [
        AcceleratorKeeper(each.accelerator, folder, background=False)
        for each in (first, again)
    ]
    for epoch in range(4):
        first.data.set_epoch(epoch)
        for step in first.train(first.data):
            if step == 10 and way == "torchlift":
                keepers[0].save(10)
            elif step == 10:
                first.accelerator.save_state(f"{folder}/state")
    keepers[0].close()
    start = time.perf_counter()
    if way == "torchlift":
        keepers[1].resume()
    else:
        again.accelerator.load_state(f"{folder}/state")
    seconds = time.perf_counter() - start
    again.data.set_epoch(1)
    if way == "torchlift":
        left = keepers[1].remaining(again.data, 2)
    else:
        left = again.accelerator.skip_first_batches(again.data, 2)
        left.set_epoch(1)
    list(again.train(left))
    for epoch in (2, 3):
        again.data.set_epoch(epoch)
        list(again.train(again.data))
    far = [abs(a - b) for a, b in zip(first.losses[10:], again.losses, strict=True)]
    same = torchlift.diff(first.ema.state_dict(), again.ema.state_dict()).equal
    return seconds, far, same


far = {}
for way in ("accelerate", "torchlift"):
    with tempfile.TemporaryDirectory() as folder:
        child = torchlift.measure.in_child(go_on, way, folder)
    seconds, far[way], same = child.value
    peak = child.memory.added_anonymous / 2**20
    print(
        f"{way:<10} at most ~{max(far[way]):.4f} away; resumed in {seconds:.3f} s,",
        end=" ",
    )
    print(f"anonymous peak: {peak:.0f} MiB")
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
# *How far the loss is from the one of the run that never stopped, after a resume from step 10. With
# AcceleratorKeeper the two are one run, to the bit; with load_state and skip_first_batches the
# random numbers are others.*
#
# Remember
# --------
#
# - ``keeper.resume()`` first, ``keeper.save(step)`` in the loop: all that was prepared, by itself.
# - ``keeper.remaining(loader, batches)`` in place of ``skip_first_batches``; a
#   ``StatefulDataLoader`` knows its own place.
# - An EMA and whatever else has a ``state_dict`` goes on by ``register_for_checkpointing``.
#
# Use this when
# -------------
#
# - **accelerate prepares your objects:** ``AcceleratorKeeper``.
# - **You prepare them yourself:** `torchlift.Keeper`, as in *Save while training goes on, and
#   resume after a kill*.
# - **The place of each rank in its data:** *Resume on another number of GPUs: where was each rank
#   in its data?*

"""
Resume training: model, optimizer, step and random state
========================================================

The run stopped at step 300. One file holds the model, the optimizer and the step. How do you resume
without three copies in memory and a dictionary that you take apart by hand?

`torchlift.load` takes the weights, `torchlift.load_optimizer` takes the optimizer's state, and
``objects`` contains the step. Each reads only its own entries. `torchlift.Keeper` does all of it
for you: *Save while training goes on, and resume after a kill*.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

path = tempfile.mkdtemp() + "/training.pt"
model = torch.nn.Linear(64, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model(torch.ones(64)).sum().backward()
optimizer.step()
torchlift.save({"model": model, "optimizer": optimizer, "step": 1}, path)

torchlift.load(model, path, root="model")
print(torchlift.load_optimizer(model, optimizer, path, root="optimizer"))
print("resume after step", torchlift.open(path).objects["step"])

# %%
# The loss jumps after a resume
# -----------------------------
#
# With plain PyTorch you hold the complete file in memory, next to the model and the optimizer. You
# pass on its entries one by one. If you forget one, no error appears. Here a small network learns a
# wavy surface from random batches. So the file also needs the state of the random numbers.

# fold: The network, its batches, and training
from pathlib import Path

from torch import nn

torch.set_num_threads(1)  # more threads would only wait for small tensors
folder = Path(tempfile.mkdtemp())


def build():
    first = nn.Linear(2, 64), nn.Tanh()
    second = nn.Linear(64, 64), nn.ReLU()
    net = nn.Sequential(*first, *second, nn.Linear(64, 1))
    return net, torch.optim.AdamW(net.parameters(), lr=0.005)


def train(net, optimizer, steps):
    losses = []
    for _ in range(steps):
        points = 2 * torch.rand(256, 2) - 1
        height = torch.sin(5 * points[:, :1]) * torch.cos(4 * points[:, 1:])
        loss = (net(points) - height).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %%

torch.manual_seed(0)
net, optimizer = build()
straight = train(net, optimizer, 300)
job = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
job |= {"random": torch.get_rng_state(), "step": 300}
torch.save(job, folder / "job.pt")
straight += train(net, optimizer, 100)  # the reference: a run that never stops

# %%
# Load the weights alone, and Adam starts with empty moments. Its first steps are as large as the
# learning rate allows, in the direction of a single batch:

forgetful, empty = build()
saved = torch.load(folder / "job.pt")
forgetful.load_state_dict(saved["model"])
torch.set_rng_state(saved["random"])
jumping = train(forgetful, empty, 100)
assert jumping[0] == straight[300], "the weights are right"
assert max(jumping[1:10]) > 2 * max(straight[301:310]), "and the loss jumps"
print(
    f"after step 300: ~{jumping[0]:.4f}, "
    f"within ten steps ~{max(jumping[1:10]):.4f}"
)

# %%
# So load the optimizer too. An optimizer's state is recognised by its parameter groups. If the file
# contains only one, you need no ``root``:

resumed, optimizer = build()
print(torchlift.load_optimizer(resumed, optimizer, folder / "job.pt"))

# %%
# Resume a Lightning checkpoint
# -----------------------------
#
# PyTorch Lightning keeps the weights under ``state_dict``, below the name of the network's
# attribute. It also keeps a list of optimizer states. You do not need Lightning to read the file.

# fold: A file as Lightning writes it
with torchlift.open(folder / "job.pt") as ckpt:
    job = ckpt.tree()  # as saved, because ``net`` has trained on
names = {f"net.{key}": value for key, value in job["model"].items()}
lightning = {
    "epoch": 2,
    "global_step": 300,
    "pytorch-lightning_version": "2.5.0",
    "state_dict": names,
    "optimizer_states": [job["optimizer"]],
    "lr_schedulers": [{"last_epoch": 2, "_last_lr": [0.005]}],
    "random": job["random"],
}
torch.save(lightning, folder / "last.ckpt")

# %%

with torchlift.open(folder / "last.ckpt") as ckpt:
    torchlift.load(resumed, ckpt, root="state_dict.net")
    torchlift.load_optimizer(resumed, optimizer, ckpt, root="optimizer_states")
    print("step", ckpt.objects["global_step"])
    print("scheduler", ckpt.tree("lr_schedulers")[0])

# %%
# If the file has several optimizers, choose one with ``root="optimizer_states.1"``. Counters are in
# ``objects``. ``tree`` returns containers as they were saved, ready for a ``load_state_dict``.
#
# GradScaler, EMA, and the position of the data loader
# ----------------------------------------------------
#
# A run may have more state, and the same file can contain it:
#
# - A schedule or a ``GradScaler``: save its ``state_dict()``, and load it with
#   ``scaler.load_state_dict(ckpt.tree("scaler"))``.
# - An average of the weights: an ``AveragedModel`` is a module. Load it with ``root="ema"``.
# - The position in the data: a ``StatefulDataLoader`` of torchdata has a state dict. With a plain
#   ``DataLoader``, count the batches and skip as many. If it shuffles, give each epoch its own
#   generator, ``torch.Generator().manual_seed(epoch)``. Otherwise the order differs.
#
# Proof
# -----
#
# Two new processes resume, one from each file, and train for 100 steps. Every loss and every weight
# must equal those of the run that never stopped, to the last bit.


def resume(path, weights, moments, counter):
    torch.set_num_threads(1)
    net, optimizer = build()
    with torchlift.open(path) as ckpt:
        torchlift.load(net, ckpt, root=weights)
        torchlift.load_optimizer(net, optimizer, ckpt, root=moments)
        torch.set_rng_state(ckpt["random"])
        step = ckpt.objects[counter]
    return step, train(net, optimizer, 400 - step), net.state_dict()


# %%

# fold: How they are started and compared
layouts = {
    "job.pt": ("model", "optimizer", "step"),
    "last.ckpt": ("state_dict.net", "optimizer_states", "global_step"),
}
for name, layout in layouts.items():
    child = torchlift.measure.in_child(resume, folder / name, *layout)
    step, resumed_losses, weights = child.value
    assert step == 300
    assert resumed_losses == straight[300:]
    assert torchlift.diff(weights, net.state_dict()).equal
    print(f"{name:<10} equal after {len(resumed_losses)} more steps")

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots()
after = range(300, 400)
axes.plot(straight, "C3-", linewidth=5, label="never stopped")
axes.plot(after, jumping, "C0-", label="weights alone")
axes.plot(after, resumed_losses, "C1-", linewidth=2, label="and the optimizer")
axes.axvline(300, color="C0", linewidth=1, linestyle=":")
axes.set(
    xlim=(250, 400), yscale="log", xlabel="step", ylabel="loss (mean square)"
)
axes.set_ylim(min(straight) / 2, 2 * max(jumping))
figure.legend(loc="outside upper center", ncols=3, fontsize=11)
plt.show()

# %%
# *The lines show the loss of a training that stops at step 300 and resumes. With the weights and
# the optimizer's state it follows the run that never stopped, to the last bit. With the weights
# alone the loss jumps, and the run needs many steps to recover.*
#
# Remember
# --------
#
# - Three things belong to a resume: the weights, the optimizer's state, and the counters. Add
#   random numbers, a ``GradScaler``, an EMA and the position in the data if you use them.
# - A run that forgets the optimizer's state raises no error. Its loss jumps.
# - ``root`` selects each part of the file, in your own layout or another program's.
#
# Use this when
# -------------
#
# - **One process resumes:** `torchlift.load`, `torchlift.load_optimizer`, and ``objects``.
# - **On another number of ranks:** the same lines with a sharded model. For a state dict in memory
#   use `torchlift.distributed.set_optimizer_state_dict`.
# - **You do not want to write these lines again:** `torchlift.Keeper` saves and resumes all of it.
# - **You are not sure what is in the file:** `torchlift.open`, or ``torchlift inspect FILE``.

# %%
# Question
# --------
#
# The new program creates the optimizer with another learning rate. Which one counts after the load?

# fold: Answer to the question
# That of the file, as in torch: it is a part of the optimizer's state.
resumed, optimizer = build()
optimizer.param_groups[0]["lr"] = 0.5
torchlift.load_optimizer(resumed, optimizer, folder / "job.pt")
print("learning rate:", optimizer.param_groups[0]["lr"])
assert optimizer.param_groups[0]["lr"] == 0.005

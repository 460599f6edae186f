"""
Resume training in three lines
==============================

The run stopped at step 300. One file holds the model, the optimizer and the step. How do you go on
as if nothing had happened, without three copies in memory and a dictionary that you take apart?

`torchlift.load` takes the weights, `torchlift.load_optimizer` the optimizer's state, and the step
is in ``ckpt.objects``. All three read the same open file.
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
states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
torch.save({**states, "step": 1}, path)

with torchlift.open(path) as ckpt:
    torchlift.load(model, ckpt, root="model")
    print(torchlift.load_optimizer(model, optimizer, ckpt, root="optimizer"))
    print("go on after step", ckpt.objects["step"])

# %%
# Why
# ---
#
# With plain PyTorch you call ``torch.load``, hold all of the file in memory beside the model and
# the optimizer, and hand out its entries one by one. Forget one of them, and nothing complains.
# Here is what that does. A small network learns a wavy surface from batches that are drawn at
# random, so the state of the random numbers belongs to the file, too.

from pathlib import Path

from torch import nn

torch.set_num_threads(1)  # small tensors: more threads would only wait
folder = Path(tempfile.mkdtemp())


def build():
    net = nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )
    return net, torch.optim.AdamW(net.parameters(), lr=0.005)


def train(net, optimizer, steps):
    """Take steps; return the loss of each."""
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


torch.manual_seed(0)
net, optimizer = build()
straight = train(net, optimizer, 300)
job = {
    "model": net.state_dict(),
    "optimizer": optimizer.state_dict(),
    "random": torch.get_rng_state(),
    "step": 300,
}
torch.save(job, folder / "job.pt")
straight += train(net, optimizer, 100)  # the run that never stops, to compare with

# %%
# Load the weights alone, and Adam starts with empty moments. Its first steps are as large as the
# learning rate allows, in directions that one batch suggests:

forgetful, fresh = build()
with torchlift.open(folder / "job.pt") as ckpt:
    torchlift.load(forgetful, ckpt, root="model")
    torch.set_rng_state(ckpt["random"])
jumping = train(forgetful, fresh, 100)
assert jumping[0] == straight[300], "the weights are right"
assert max(jumping[1:10]) > 2 * max(straight[301:310]), "and the loss jumps"
print(f"the loss before the next step: ~{jumping[0]:.4f}")
print("it rises to more than twice that of the run that went on: True")

# %%
# So bring the optimizer along. It is found where you say it is, and nowhere else. Leave ``root``
# out, and you are told which one it was:

resumed, optimizer = build()
try:
    torchlift.load_optimizer(resumed, optimizer, folder / "job.pt")
except torchlift.FormatError as error:
    print(error.hint)

# %%
# Lightning's layout
# ------------------
#
# PyTorch Lightning keeps the weights under ``state_dict``, with the name of the attribute that
# holds the network, and a list of optimizer states. This dictionary is laid out in the same way;
# Lightning itself is not needed, neither to write it here nor to read it.

with torchlift.open(folder / "job.pt") as ckpt:
    job = ckpt.tree()  # as it was saved; ``net`` and its optimizer have trained on
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

with torchlift.open(folder / "last.ckpt") as ckpt:
    torchlift.load(resumed, ckpt, root="state_dict.net")
    torchlift.load_optimizer(resumed, optimizer, ckpt, root="optimizer_states")
    print("step", ckpt.objects["global_step"])
    print("scheduler", ckpt.tree("lr_schedulers")[0])

# %%
# The list holds one optimizer; of several you choose with ``root="optimizer_states.1"``. Counters
# are leaves, in ``objects``. Containers come back from ``tree`` as they were saved, ready for a
# scheduler's ``load_state_dict``.
#
# Proof
# -----
#
# Two new processes go on, one from each file, and train for 100 steps. Every loss and every weight
# must be that of the run that never stopped, to the last bit.


def go_on(path, weights, moments, counter):
    net, optimizer = build()
    with torchlift.open(path) as ckpt:
        torchlift.load(net, ckpt, root=weights)
        torchlift.load_optimizer(net, optimizer, ckpt, root=moments)
        torch.set_rng_state(ckpt["random"])
        step = ckpt.objects[counter]
    return step, train(net, optimizer, 400 - step), net.state_dict()


from torchlift.distributed import on_ranks

wholes = "model", "optimizer", "step"
(plain,) = on_ranks(1, go_on, folder / "job.pt", *wholes)
layout = "state_dict.net", "optimizer_states", "global_step"
(from_lightning,) = on_ranks(1, go_on, folder / "last.ckpt", *layout)

for step, losses, weights in (plain, from_lightning):
    assert step == 300
    assert losses == straight[300:]
    assert torchlift.diff(weights, net.state_dict()).equal
print("100 steps later, losses and weights are equal to the last bit: True")

import matplotlib.pyplot as plt

GRAY, RUST, BLUE = "#9aa2ab", "#b83a16", "#1d4e89"
plt.rcParams.update({"figure.facecolor": "white", "font.size": 12})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
figure, axes = plt.subplots(figsize=(7.2, 4.0), layout="constrained")
axes.plot(range(400), straight, color=GRAY, linewidth=5, label="never stopped")
axes.plot(
    range(300, 400), plain[1], "--", color=BLUE, lw=2, label="all three lines"
)
axes.plot(range(300, 400), jumping, color=RUST, lw=2, label="weights alone")
axes.axvline(300, color="black", linewidth=1, linestyle=":")
axes.set(
    xlim=(200, 400), yscale="log", xlabel="step", ylabel="loss (mean squared error)"
)
axes.set_ylim(min(straight) / 2, 4 * max(jumping))
axes.legend(frameon=False, loc="upper left")
plt.show()

# %%
# *The loss around the stop at step 300. The run that takes the optimizer along lies on the one that
# never stopped. With the weights alone the loss jumps, and the run needs many steps to come back.*
#
# Remember
# --------
#
# - Three things go on: the weights, the optimizer's state, and the counters. The state of random
#   numbers is a fourth.
# - A run that forgets the optimizer's state raises no error. Its loss jumps.
# - ``root`` says where each of them is in the file, whoever wrote it.
#
# Use this when
# -------------
#
# - **One process goes on:** these three lines, `torchlift.load`, `torchlift.load_optimizer` and
#   ``ckpt.objects``.
# - **On another number of ranks:** the same lines, with a sharded model. Each rank reads its
#   slices. A state dict in memory goes to `torchlift.distributed.set_optimizer_state_dict`.
# - **You are not sure what is in the file:** ``torchlift inspect FILE``.

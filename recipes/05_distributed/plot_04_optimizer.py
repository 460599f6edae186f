"""
FSDP optimizer state dict: resume on another number of GPUs
===========================================================

You trained with FSDP2 on two GPUs and resume on one, or the other way round. The weights load, but
the optimizer does not. Its moments have the shapes of complete parameters, and a rank has slices.

`torchlift.load_optimizer` reads for each rank the slices of its parameters, from one file or from a
folder of shards. The loaded state is equal to the last bit. The run is too, if every rank computes
the same sums.
"""

# %%
# In short
# --------

import tempfile

import torch.distributed.fsdp

import torchlift

path, net = tempfile.mkdtemp() + "/job.pt", torch.nn.Linear(64, 2)
adam = torch.optim.Adam(net.parameters())
state = torchlift.distributed.get_optimizer_state_dict(net, adam)
torch.save(state, path)


def resume(path):
    model = torch.distributed.fsdp.fully_shard(torch.nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters())
    return torchlift.load_optimizer(model, optimizer, path)


print(*torchlift.distributed.on_ranks(2, resume, path), sep="\n")

# %%
# Save a run after 100 steps
# --------------------------
#
# A small network learns a wavy surface. After 100 steps of 200 you save the weights and Adam's
# moments in the format of plain PyTorch. This run then continues, as the reference.

# fold: The network and its training
from torch import nn


def build():
    torch.manual_seed(0)
    first, last = [nn.Linear(2, 64), nn.Tanh()], [nn.ReLU(), nn.Linear(64, 1)]
    return nn.Sequential(*first, nn.Linear(64, 64), *last)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.005)


def train(model, optimizer, steps, rank=0, ranks=1):
    """Train on one rank's share of the data, and return the losses."""
    numbers = torch.Generator().manual_seed(0)
    points = 2 * torch.rand(256, 2, generator=numbers) - 1
    height = torch.sin(5 * points[:, :1]) * torch.cos(4 * points[:, 1:])
    points, height = points.chunk(ranks)[rank], height.chunk(ranks)[rank]
    losses = []
    for _ in range(steps):
        losses.append((model(points) - height).square().mean())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    return [loss.item() for loss in losses]


torch.set_num_threads(1)  # as each rank has

# %%
model = build()
optimizer = adam(model)
straight = train(model, optimizer, 100)
states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
torch.save(states, path)
straight += train(model, optimizer, 100)

# %%
# RuntimeError: got mixed torch.Tensor and DTensor
# ------------------------------------------------
#
# Without torchlift you would call the optimizer's own ``load_state_dict`` on each rank:

from torch.distributed.fsdp import fully_shard

from torchlift.distributed import on_ranks


def without_names(path):
    model = fully_shard(build())
    optimizer = adam(model)
    optimizer.load_state_dict(torch.load(path)["optimizer"])
    try:
        train(model, optimizer, 1)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


print(on_ranks(2, without_names, path)[0])

# %%
# The moments have the shape of complete parameters, and the parameters are slices. The next
# function resumes from the file in the same way on two ranks and in one process:


def resume_and_train(path, steps, rank=0, ranks=1, wrap=lambda model: model):
    model = wrap(build())
    optimizer = adam(model)
    torchlift.load(model, path, root="model")
    torchlift.load_optimizer(model, optimizer, path, root="optimizer")
    return model, optimizer, train(model, optimizer, steps, rank, ranks)


# %%
# Proof
# -----
#
# How far is each run from the one that never stopped? Two ranks resume, once with all of the data
# on each and once with half of it, and save their shards with DCP. One process then runs the last
# 50 steps from the folder of the two ranks.

# fold: How the runs are compared
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from torchlift.distributed import StateDictOptions, get_state_dict


def on_two(path, later):
    _, _, half = resume_and_train(path, 50, dist.get_rank(), 2, fully_shard)
    model, optimizer, same = resume_and_train(path, 50, wrap=fully_shard)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, moments = get_state_dict(model, optimizer, options=flat)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=later)
    return same, half


later = tempfile.mkdtemp()
(same, half_0), (other, half_1) = on_ranks(2, on_two, path, later)
last, _, end = resume_and_train(later, 50)
assert same == other == straight[100:150], "two ranks, bit for bit"
assert end == straight[150:], "and one process after them"
assert torchlift.diff(last.state_dict(), model.state_dict()).equal

forgetful = build()
torchlift.load(forgetful, path, root="model")
half = [(a + b) / 2 for a, b in zip(half_0, half_1, strict=True)]


def off(losses):
    return [abs(a - b) for a, b in zip(losses, straight[100:], strict=False)]


runs = {
    "two ranks, then one process": off(same + end),
    "half of the data on each rank": off(half),
    "weights alone": off(train(forgetful, adam(forgetful), 100)),
}
for name, found in runs.items():
    print(f"{name:<30}off by at most ~{max(found):.7f}")
assert 0 < max(runs["half of the data on each rank"]) < 1e-5
assert max(runs["weights alone"]) > 0.01

# %%
import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots()
for (name, found), look in zip(
    runs.items(), ("C1-", "C2--", "C0-"), strict=True
):
    axes.plot(range(100, 100 + len(found)), found, look, label=name)
axes.axvline(150, color="black", linewidth=1, linestyle=":")
axes.set_yscale("symlog", linthresh=1e-9)
axes.set(yticks=[0, 1e-8, 1e-5, 1e-2], ylim=(-5e-10, 1), xlim=(100, 200))
axes.set(xlabel="step", ylabel="off the run that never\nstopped (loss)")
figure.legend(loc="outside upper center")
plt.show()

# %%
# *The lines show the distance between the loss of each resumed run and the loss of the run that
# never stopped. One run goes from one process to two ranks and back (at the dotted line), and its
# distance stays zero. With half of the data on each rank the difference is rounding, because its
# gradient is the mean of two means. With the weights alone, without the optimizer's state, the run
# is a different one.*
#
# Remember
# --------
#
# - A run consists of its weights, the optimizer's moments and counters, and the next data.
# - The loaded state is equal on any number of ranks. The run is equal if all ranks compute the same
#   sums.
# - Names of parameters do not depend on the number of ranks. Shapes of shards do.
#
# Use this when
# -------------
#
# - **You load from a path:** `torchlift.load` and `torchlift.load_optimizer`, on every rank.
# - **You save on many ranks:** `torchlift.Keeper`, or DCP as here.
# - **Both state dicts are in memory:** `torchlift.distributed.set_state_dict`, which loads both or
#   neither.

# %%
# Question
# --------
#
# Adam keeps three values for each parameter. Which of them do the ranks not divide?

# fold: Answer to the question
# The step: it is a single number, and equal on all ranks.
with torchlift.open(later, root="optimizer") as ckpt:
    for name in ("step", "exp_avg", "exp_avg_sq"):
        entry = ckpt.entries[f"state.2.weight.{name}"]
        print(f"{name:<11} {entry.shape}, in {len(entry.chunks)} parts")
    assert len(ckpt.entries["state.2.weight.step"].chunks) == 1

"""
The optimizer comes along
=========================

You resume from a checkpoint, the weights are right, and the loss jumps. What else has to come back,
and does it survive another number of ranks?

You stop a run in one process, go on with it on two ranks, and end it in one. You compare every step
with the run that never stopped, down to the last bit.
"""

# %%
# The run that never stops
# ------------------------
#
# A small network learns a wavy surface, with Adam and a learning rate that decays. It takes 200
# steps. After 100 of them you save what it takes to go on: the model, the optimizer, the scheduler,
# and the number of the step.

import copy
import tempfile
import textwrap
from collections import OrderedDict
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.fsdp import fully_shard

import torchlift
from torchlift.distributed import (
    StateDictMismatch,
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    on_ranks,
    set_optimizer_state_dict,
)

torch.set_num_threads(1)  # small tensors: more threads would only wait


def build():
    layers = {
        "up": nn.Linear(2, 64),
        "tanh": nn.Tanh(),
        "mix": nn.Linear(64, 64),
    }
    layers |= {"relu": nn.ReLU(), "head": nn.Linear(64, 1)}
    return nn.Sequential(OrderedDict(layers))


def make_adam(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


def train(model, optimizer, scheduler, steps, part=0, parts=1):
    """Take steps on one part of the data; return the loss of each."""
    generator = torch.Generator().manual_seed(0)
    points = 2 * torch.rand(256, 2, generator=generator) - 1
    height = torch.sin(5 * points[:, :1]) * torch.cos(4 * points[:, 1:])
    points, height = points.chunk(parts)[part], height.chunk(parts)[part]
    losses = []
    for _ in range(steps):
        loss = (model(points) - height).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


# %%
# This is the run, with the stop after 100 steps. It goes on at once, for you to compare with.

scratch = tempfile.TemporaryDirectory(prefix="torchlift-")
folder = Path(scratch.name)

torch.manual_seed(0)
model = build()
optimizer, scheduler = make_adam(model)
straight = train(model, optimizer, scheduler, 100)

weights, moments = get_state_dict(model, optimizer)
job = {
    "model": weights,
    "optimizer": moments,
    "scheduler": scheduler.state_dict(),
    "step": 100,
}
torch.save(job, folder / "job.pt")

straight += train(model, optimizer, scheduler, 100)
for step in (0, 100, 199):
    print(f"loss at step {step:3}: {straight[step]:.3f}")

# %%
# What is in the file
# -------------------
#
# `torchlift.distributed.get_state_dict` gives both state dicts, by the names of the parameters.
# Here is all that belongs to one of them.

with torchlift.open(folder / "job.pt") as ckpt:
    for key, entry in ckpt.entries.items():
        if "head.weight" in key:
            print(f"{key:<38} {entry.dtype} {entry.shape}")
    print("the step of Adam:", ckpt["optimizer.state.head.weight.step"].item())
    print("the step of the scheduler:", ckpt.objects["scheduler.last_epoch"])

# %%
# Beside its weight, Adam keeps a mean of the gradient and a mean of its square. Both start at zero
# and are too small in the beginning, so it also counts its steps, to correct for that.
#
# Weights alone
# -------------
#
# What if you load the weights, set the learning rate to where it was, and let Adam start anew?


def go_on(path, steps, part=0, parts=1, *, moments=True, shard=None):
    """Resume and train; return the model, its optimizer and the losses."""
    model = shard(build()) if shard else build()
    optimizer, scheduler = make_adam(model)
    torchlift.load(model, path, root="model")
    job = torch.load(path, mmap=True)
    if moments:
        # The file has whole tensors; of a sharded model, each rank takes its slices.
        whole, saved = StateDictOptions(full_state_dict=True), job["optimizer"]
        set_optimizer_state_dict(model, optimizer, saved, options=whole)
    scheduler.load_state_dict(job["scheduler"])
    optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
    return (
        model,
        optimizer,
        train(model, optimizer, scheduler, steps, part, parts),
    )


path = str(folder / "job.pt")
_, _, weights_alone = go_on(path, 100, moments=False)
_, _, with_optimizer = go_on(path, 100)

print(
    "with the optimizer, every loss bit-equal:",
    with_optimizer == straight[100:],
)
print(
    "weights alone, the first loss bit-equal:",
    weights_alone[0] == straight[100],
)
print(
    "weights alone, one step later above 1.5x:",
    weights_alone[1] > 1.5 * straight[101],
)
print("weights alone, at the end above 3x:", weights_alone[-1] > 3 * straight[-1])

# %%
# The first loss is right, since it comes from the weights. Then a fresh Adam takes a first step: by
# the full learning rate, in every weight at once, with no idea of which ones are sensitive. The run
# has not made up for it a hundred steps later.
#
# Two ranks go on
# ---------------
#
# Now the same file on two ranks, under FSDP2. Twice: once each rank sees all of the data, and once
# each sees half of it, which is what you would do to be faster. `torchlift.distributed.on_ranks`
# starts them, as in the first recipe of this chapter.
#
# After 50 more steps the two ranks save, with DCP, each its own shards. The optimizer's state is
# saved flat, one key for each tensor and each number.


def on_two(path, later):
    model, optimizer, same = go_on(path, 50, shard=fully_shard)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=later)
    steps = {moments[name].item() for name in moments if name.endswith(".step")}

    _, _, half = go_on(path, 50, dist.get_rank(), 2, shard=fully_shard)
    return {"same": same, "half": half, "steps": sorted(steps)}


later = folder / "later"
ranks = on_ranks(2, on_two, path, later)
for rank, found in enumerate(ranks):
    print(f"rank {rank}: Adam's steps {found['steps']}", end=", ")
    print("every loss bit-equal:", found["same"] == straight[100:150])

# Each rank has the loss of its half. The mean of the two is the loss of all.
halves = zip(ranks[0]["half"], ranks[1]["half"], strict=True)
half = [(a + b) / 2 for a, b in halves]
most = max(abs(a - b) for a, b in zip(half, straight[100:150], strict=True))
print("half of the data each, every loss bit-equal:", half == straight[100:150])
print("half of the data each, off by less than 0.00001:", most < 1e-5)

# %%
# The state that is loaded is the same, to the last bit, on any number of ranks. Whether the *run*
# is the same depends on the sums in it.
#
# - **All of the data on each rank:** the two gradients are equal, and their mean is the same number
#   again, without rounding. Adam works on each number alone, so it does not matter which rank does
#   it. Every bit is the same.
# - **Half of the data each:** the gradient is now the mean of two means. It has the same value in
#   mathematics, and in floating point it is rounded in other places. No checkpoint can help that.
#
# One process ends it
# -------------------
#
# The directory of the two ranks has everything for the last 50 steps. Here is one process, without
# a process group. `torchlift.load` reads the model. For the optimizer, open the directory, and hand
# over what it holds: tensors as a mapping, and numbers as ``objects``.

last = build()
last_optimizer, last_scheduler = make_adam(last)
torchlift.load(last, later, root="model")
with torchlift.open(later, root="optimizer") as ckpt:
    state = {**ckpt, **ckpt.objects}
    report = set_optimizer_state_dict(last, last_optimizer, state)
print(report)

last_scheduler.last_epoch = 150
end = train(last, last_optimizer, last_scheduler, 50)
print(
    "one process, two ranks, one process, every loss bit-equal:",
    end == straight[150:],
)

pairs = list(zip(last.parameters(), model.parameters(), strict=True))
print("every weight bit-equal:", all(torch.equal(a, b) for a, b in pairs))
for what in ("step", "exp_avg", "exp_avg_sq"):
    found = [last_optimizer.state[parameter][what] for parameter, _ in pairs]
    wanted = [optimizer.state[parameter][what] for _, parameter in pairs]
    print(f"every {what} bit-equal:", all(map(torch.equal, found, wanted)))

# %%
# The picture
# -----------

GRAY, TEAL, RUST, SAND = "#5b6470", "#2b6f77", "#b83a16", "#d8d2c8"
plt.rcParams.update({"figure.facecolor": "white", "font.size": 12})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})

figure, (top, bottom) = plt.subplots(
    2,
    1,
    figsize=(7.2, 5.4),
    sharex=True,
    height_ratios=[1.5, 1],
    layout="constrained",
)
top.plot(straight, color=SAND, linewidth=9, label="never stopped")
top.plot(range(100), straight[:100], color=TEAL, linewidth=2, label="one process")
top.plot(
    range(100, 150),
    ranks[0]["same"],
    color=RUST,
    linewidth=2,
    label="two ranks",
)
top.plot(range(150, 200), end, color=TEAL, linewidth=2)
top.plot(
    range(100, 200),
    weights_alone,
    color=GRAY,
    linewidth=1.5,
    linestyle=(0, (3, 2)),
    label="weights alone",
)
top.set(yscale="log", ylabel="loss (squared height)")
top.legend(loc="lower left", frameon=False)

resumed = ranks[0]["same"] + end
for losses, color, style in (
    (resumed, RUST, {"linewidth": 3}),
    (half, TEAL, {"linewidth": 2}),
    (weights_alone, GRAY, {"linewidth": 1.5, "linestyle": (0, (3, 2))}),
):
    off = [abs(a - b) for a, b in zip(losses, straight[100:], strict=False)]
    bottom.plot(range(100, 100 + len(off)), off, color=color, **style)
bottom.text(99, 1e-7, "half of the data each", color=TEAL, ha="right", va="center")
bottom.text(99, 0, "stopped and resumed", color=RUST, ha="right", va="center")
bottom.text(99, 3e-2, "weights alone", color=GRAY, ha="right", va="center")
bottom.set_yscale("symlog", linthresh=1e-9)
bottom.set_yticks([0, 1e-8, 1e-5, 1e-2])
bottom.set(
    ylim=(-7e-10, 0.3),
    xlim=(0, 200),
    xlabel="step",
    ylabel="difference in loss\n(squared height)",
)
for axes in (top, bottom):
    for step in (100, 150):
        axes.axvline(step, color=GRAY, linewidth=1, linestyle=":")
plt.show()

# %%
# *Above: the loss. The dotted lines are the two places where the run was stopped and resumed.
# Below: how far each resumed run is from the one that never stopped.* The run that changes from one
# process to two ranks and back stays at zero.
#
# A step that nobody took
# -----------------------
#
# A state dict of an optimizer that has never stepped needs tensors to load into, so somebody has to
# make them. PyTorch's own function takes a step with a learning rate of zero. No weight moves, but
# Adam has counted. You only looked, and the next step is another one:


def first_step(look):
    """Adam's counter after a look, and the size of the first real step."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    state = look(layer, optimizer)["state"]["weight"] if look else {"step": 0}
    counted = int(state["step"])
    before = layer.weight.detach().clone()
    layer(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return counted, (layer.weight.detach() - before).abs().max().item()


for name, look in (
    ("nobody looks", None),
    ("torch looks", torch_state_dict.get_optimizer_state_dict),
    ("torchlift looks", get_optimizer_state_dict),
):
    seen, moved = first_step(look)
    print(
        f"{name:<16} step {seen}, the first real step moves a weight by {moved:.4f}"
    )

# %%
# Adam corrects its young means for their age. If the age is wrong, so is the correction. With
# torchlift the counter says 0, and the optimizer is as it was. PyTorch knows this as `issue 164929
# <https://github.com/pytorch/pytorch/issues/164929>`_.
#
# By name, not by number
# ----------------------
#
# An optimizer's own state dict has no names. It numbers the parameters in the order in which its
# groups list them. Your new script has the same two groups, the biases first:


def two_groups(model, *, biases_first):
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    groups = [{"params": weights, "lr": 0.01}, {"params": biases, "lr": 0.1}]
    return torch.optim.Adam(groups[::-1] if biases_first else groups)


def show(error):
    """Print the type and the message of an error, in short lines."""
    text = f"{type(error).__name__}: {error}"
    print(textwrap.fill(text, 76, subsequent_indent="  "))


def backward(model):
    model(torch.ones(1, 2)).sum().backward()


torch.manual_seed(0)
model = build()
before = two_groups(model, biases_first=False)
backward(model)
before.step()
after = two_groups(model, biases_first=True)

after.load_state_dict(copy.deepcopy(before.state_dict()))  # says nothing
print("learning rate of the biases:", after.param_groups[0]["lr"])
try:
    after.step()
except RuntimeError as error:
    show(error)

# %%
# The biases have the learning rate of the weights, and moments of another shape. Here the shapes
# gave it away, at the first step. Where they are equal by chance, nothing does. By name, the order
# does not matter:

after = two_groups(model, biases_first=True)
saved = get_optimizer_state_dict(model, before)
set_optimizer_state_dict(model, after, saved)
print("learning rate of the biases:", after.param_groups[0]["lr"])
means = [
    (state["exp_avg"], after.state[p]["exp_avg"])
    for p, state in before.state.items()
]
print("every moment where it belongs:", all(torch.equal(*pair) for pair in means))

# %%
# A new head
# ----------
#
# You put another head on the model and want to keep what the optimizer knows about the rest. The
# names of the new head are in no file. A strict load says so, and changes nothing:


def with_new_head():
    layers = {
        name: child for name, child in build().named_children() if name != "head"
    }
    return nn.Sequential(OrderedDict(layers | {"answer": nn.Linear(64, 3)}))


saved = torch.load(path)["optimizer"]
tuned = with_new_head()
optimizer, _ = make_adam(tuned)
try:
    set_optimizer_state_dict(tuned, optimizer, saved)
except StateDictMismatch as error:
    show(error)
print("changed:", len(optimizer.state) > 0)

# %%
# With ``strict=False`` it loads what fits. The `torchlift.distributed.OptimizerReport` says what
# that was, and what was left.

partly = StateDictOptions(strict=False)
report = set_optimizer_state_dict(tuned, optimizer, saved, options=partly)
print(report)


def steps_of(model, optimizer):
    """The counter of each weight; 0 for one that Adam has not met."""
    return {
        name: int(optimizer.state.get(parameter, {}).get("step", 0))
        for name, parameter in model.named_parameters()
        if "weight" in name
    }


print("steps after loading:", steps_of(tuned, optimizer))
backward(tuned)
optimizer.step()
print("steps after one more:", steps_of(tuned, optimizer))
scratch.cleanup()

# %%
# The new head starts at the beginning, and the rest goes on. Each weight has a counter of its own,
# so both are corrected for their true age.
#
# What to remember
# ----------------
#
# - A run is its weights, the optimizer's moments and counters, the learning rate, the scheduler,
#   and which data comes next. Lose one, and you have another run.
# - What is loaded is bit-equal on any number of ranks. The run that follows is, too, if every rank
#   computes the same sums as before. If you cut the batch in another way, it differs by rounding.
# - The counter of Adam is part of the mathematics. Reading a state dict must not change it.
# - An optimizer counts its parameters. Names survive another order, another group, another model.
#
# What to use when
# ----------------
#
# - **You save or load all at once:** `torchlift.distributed.get_state_dict` and
#   `torchlift.distributed.set_state_dict`: both, or neither.
# - **You load the model from a path:** `torchlift.load`, and
#   `torchlift.distributed.set_optimizer_state_dict` for the rest.
# - **You changed the model:** the same with ``StateDictOptions(strict=False)``, and read the
#   report.
# - **You save on many ranks:** DCP, with ``flatten_optimizer_state_dict``. Any number of ranks can
#   read it, and one process can read it without any of them.

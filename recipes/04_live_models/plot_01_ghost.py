"""
The optimizer that trained a ghost
==================================

Your script loads a checkpoint and trains through the night. In the morning the loss is where it
was, or it fell a little and stopped. There was no error and no warning. What did the optimizer
train?

You replace parameters behind an optimizer's back, see what the loss curve shows of it, and write
the check that finds it. Then you load without replacing anything.
"""

# %%
# A model, a file, an optimizer
# -----------------------------
#
# A small network learns a wavy surface. It is trained for a while and saved: this is the checkpoint
# that you go on from.

import copy
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import torchlift

torch.set_num_threads(1)  # tiny tensors: more threads would only wait
torch.manual_seed(0)

points = 2 * torch.rand(512, 2) - 1
height = torch.sin(4 * points[:, :1]) * torch.cos(3 * points[:, 1:])


def build():
    return nn.Sequential(
        nn.Linear(2, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 1),
    )


def adam(model, lr=0.001):
    return torch.optim.Adam(model.parameters(), lr=lr)


def train(model, optimizer, steps):
    """Train; return the losses, and the norm of the gradient at each step."""
    losses, norms = [], []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(points), height)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        each = [p.grad.norm() for p in model.parameters()]
        norms.append(torch.stack(each).norm().item())
    return losses, norms


scratch = tempfile.TemporaryDirectory(prefix="torchlift-")
path = Path(scratch.name, "model.pt")

model = build()
losses, _ = train(model, adam(model, lr=0.003), steps=100)
torch.save(model.state_dict(), path)
print(f"saved at a loss of {losses[-1]:.2f}")

# %%
# Three scripts
# -------------
#
# All three build the model, then the optimizer, then load the file, then train. They differ in the
# line that loads. The first one copies the values into the parameters. The second one has
# ``assign=True``, which somebody recommended because it saves memory. The third one copies, and
# then gives one layer a new weight: a new head, an adapter, a layer that is pruned.


def copied(model):
    model.load_state_dict(torch.load(path))


def assigned(model):
    model.load_state_dict(torch.load(path), assign=True)


def one_replaced(model):
    model.load_state_dict(torch.load(path))
    model[2].weight = nn.Parameter(model[2].weight.detach().clone())


SCRIPTS = {"copied": copied, "assigned": assigned, "one replaced": one_replaced}
STEPS = 400
history, models, optimizers = {}, {}, {}

for name, load in SCRIPTS.items():
    models[name] = build()
    optimizers[name] = adam(models[name])
    load(models[name])
    history[name] = train(models[name], optimizers[name], STEPS)

first = {name: losses[0] for name, (losses, _) in history.items()}
last = {name: losses[-1] for name, (losses, _) in history.items()}
print("all start with the same loss:", len(set(first.values())) == 1)
print(
    "copied, the loss falls to less than 0.1x:",
    last["copied"] < 0.1 * first["copied"],
)
print("assigned, the loss changes:", len(set(history["assigned"][0])) > 1)
print(
    "one replaced, the loss falls to less than 0.5x:",
    last["one replaced"] < 0.5 * first["one replaced"],
)
print(
    "one replaced, it ends at least 3x above copied:",
    last["one replaced"] > 3 * last["copied"],
)

# %%
# The picture
# -----------

GRAY, TEAL, RUST = "#5b6470", "#2b6f77", "#b83a16"
COLORS = {"assigned": GRAY, "one replaced": TEAL, "copied": RUST}
plt.rcParams.update({"figure.facecolor": "white", "font.size": 12})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
plt.rcParams.update({"figure.constrained_layout.use": True})

figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 4.5))
for name, color in COLORS.items():
    losses, norms = history[name]
    steps = range(1, STEPS + 1)
    left.plot(steps, losses, color=color, linewidth=2.5, label=name)
    right.plot(steps, norms, color=color, linewidth=2.5)
for axes in (left, right):
    axes.set(xlim=(0, STEPS), xlabel="step", xticks=[0, STEPS // 2, STEPS])
left.set(ylim=(0, None), ylabel="loss (mean squared error)")
right.set(yscale="log", ylabel="norm of the gradient (loss per weight)")
figure.legend(loc="outside upper center", ncols=3, frameon=False)
plt.show()

# %%
# *Left: the loss of the three scripts. Right: the norm of the model's gradient, on a logarithmic
# scale.* The gray line is the ghost: it does not move in 400 steps. The teal line is the dangerous
# one. It falls, so it looks like training, and you would blame the learning rate.
#
# What happened
# -------------
#
# An optimizer does not hold a model. It holds a list of parameter *objects*, taken when it was
# built. If you put another object into the model, then the model computes with one and the
# optimizer steps with the other. The other one, which nothing uses any more, is the ghost.


def ghosts(optimizer, model):
    """How many of the optimizer's parameters are not in the model."""
    alive = {id(parameter) for parameter in model.parameters()}
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return sum(id(parameter) not in alive for parameter in held)


for name, optimizer in optimizers.items():
    total = len(optimizer.param_groups[0]["params"])
    print(f"{name:<13}{ghosts(optimizer, models[name])} of {total} are ghosts")

held = optimizers["assigned"].param_groups[0]["params"]
print("ghosts with a gradient:", sum(p.grad is not None for p in held))
unchanged = [
    torch.equal(value, models["assigned"].state_dict()[key])
    for key, value in torch.load(path).items()
]
print("assigned, the weights are those of the file:", all(unchanged))

# %%
# This is why nobody complains. No gradient reaches a ghost, and an optimizer skips a parameter
# without a gradient. That is a feature: it is how frozen layers work.
#
# ``zero_grad`` clears the ghosts too, and not the model. So the model's own gradients pile up, step
# after step. That is the line on the right, and the symptom that your dashboard may show:

for name in ("assigned", "one replaced"):
    norms = history[name][1]
    print(f"{name}, the gradient grew more than 50x:", norms[-1] > 50 * norms[0])
norms = history["copied"][1]
print("copied, the gradient is smaller at the end:", norms[-1] < norms[0])

# %%
# Put ``ghosts`` before your training loop. It is three lines, and it would have saved the night.
#
# Who makes ghosts
# ----------------
#
# More lines than you think, and not always the same ones. Each of these gets a fresh model with an
# optimizer.


def on_meta():
    with torch.device("meta"):
        return build()


def reparametrized(model):
    nn.utils.parametrizations.weight_norm(model[2])


LINES = {
    "load_state_dict(state)": (build, copied),
    "load_state_dict(state, assign=True)": (build, assigned),
    "layer.weight = nn.Parameter(...)": (build, one_replaced),
    "parametrizations.weight_norm(layer)": (build, reparametrized),
    "model.double()": (build, nn.Module.double),
    "model.to_empty(device=...), from meta": (
        on_meta,
        lambda model: model.to_empty(device="cpu"),
    ),
}


def count(make, line):
    model = make()
    optimizer = adam(model)
    line(model)
    return ghosts(optimizer, model)


for name, (make, line) in LINES.items():
    print(f"{name:<38} ghosts: {count(make, line)}")

# %%
# A cast keeps the objects, and a move off the meta device does not. The rule behind it is a detail
# of torch, and you should not have to know it. Only ``weight_norm`` has no choice: it makes two
# tensors out of one, and an optimizer has to be built after it.
#
# New values, same objects
# ------------------------
#
# `torchlift.load` gives the parameters that are there new content. Objects stay, whatever held them
# holds the right ones, and it does not matter whether the model is live or on meta. Only
# ``mode="assign"`` makes new objects, because that is what it is for.

for make in (build, on_meta):
    kind = "on meta" if make is on_meta else "live"
    for mode in ("auto", "swap", "copy", "assign"):

        def line(model, mode=mode):
            torchlift.load(model, path, mode=mode)

        print(f"{kind:<8} mode={mode:<7} ghosts: {count(make, line)}")

# %%
# For torch's own lines there is `torchlift.swap.preserving_references`. Inside the block, torch
# exchanges the content of parameters where it would have put new ones.

with torchlift.swap.preserving_references():
    for name in (
        "load_state_dict(state, assign=True)",
        "model.to_empty(device=...), from meta",
    ):
        print(f"{name:<38} ghosts: {count(*LINES[name])}")

# %%
# Does it train? As if nothing had happened. The reference builds the optimizer after the load, so
# that nothing can go wrong. Every loss has to be equal to the last bit.

reference = build()
copied(reference)
expected = train(reference, adam(reference), STEPS)

for mode in ("auto", "swap"):
    model = build()
    optimizer = adam(model)
    torchlift.load(model, path, mode=mode)
    print(f"mode={mode}, same losses:", train(model, optimizer, STEPS) == expected)

# %%
# The optimizer keeps what it learned
# -----------------------------------
#
# Building a new optimizer after each load is the usual advice, and at the start of a script it is
# good advice. In the middle of training it is not. Adam has two averages for each weight, and its
# schedule, its gradient scaler and your logger hold the optimizer as you held the parameters. You
# go back to the best checkpoint, and want to keep all of that.
#
# The reference does it the long way: a new model, a new optimizer, and the old one's state copied
# into it.

model = build()
optimizer = adam(model)
train(model, optimizer, steps=50)

fresh = build()
copied(fresh)
new = adam(fresh)
new.load_state_dict(copy.deepcopy(optimizer.state_dict()))
expected = train(fresh, new, STEPS)

torchlift.load(model, path, mode="swap")
print("averages that the optimizer kept:", len(optimizer.state))
print("same losses as the long way:", train(model, optimizer, STEPS) == expected)
scratch.cleanup()

# %%
# What to remember
# ----------------
#
# - An optimizer holds objects, not names and not a model. Replace an object, and it goes on with
#   the old one.
# - No error tells you. A flat loss is the lucky case. If only some parameters are ghosts, the loss
#   falls.
# - A gradient that grows and grows is the symptom, and ``ghosts`` is the check.
# - Values can change while the object stays. Then there is nothing to repair.
#
# What to use when
# ----------------
#
# - **Any load into a model that something holds:** `torchlift.load`. The default keeps the objects.
# - **torch's own conversions:** `torchlift.swap.preserving_references` around them.
# - **One parameter by hand:** ``parameter.copy_(values)`` under `torch.no_grad`, or
#   `torch.utils.swap_tensors` if dtype, shape or device change too.
# - **Assign, because you must:** before the optimizer is built, and never after.

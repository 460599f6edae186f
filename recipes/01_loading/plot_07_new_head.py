"""
Fine-tuning with a new head
===========================

You have a network for one task and want it for another. The file has sixteen classes, you have six.
How do you load the part that fits, and what is in the part that does not?

You see plain PyTorch refuse, and then accept too much. Then you load the body, let the head be made
as its constructor makes it, read what was done, and train.
"""

# %%
# A file from another task
# ------------------------
#
# The old task is to tell sixteen kinds of stripes apart: eight directions, narrow and wide, under
# noise. The network has a body, a head, and for its training a second head that guesses the width
# alone. Its file looks as if it had been trained on several devices at once: every name starts with
# ``module.``, which the wrapper of PyTorch puts there.

import math
import tempfile
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import torchlift

torch.set_num_threads(1)  # tiny tensors: more threads would only wait
PIXELS = 16


def stripes(directions, waves, count, noise):
    """Images of stripes, `count` of each kind, and their kinds."""
    y, x = torch.meshgrid(*[torch.linspace(-1, 1, PIXELS)] * 2, indexing="ij")
    images = []
    for direction, wave in zip(directions, waves, strict=True):
        phase = 2 * math.pi * torch.rand(count, 1, 1)
        angle = direction + 0.1 * torch.randn(count, 1, 1)
        across = x * angle.cos() + y * angle.sin()
        images.append(torch.sin(wave * across + phase))
    pixels = torch.stack(images).flatten(0, 1).unsqueeze(1)
    kinds = torch.arange(len(images)).repeat_interleave(count)
    return pixels + noise * torch.randn(pixels.shape), kinds


def make_body():
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    )


class Old(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = make_body()
        self.head = nn.Linear(128, 16)
        self.width = nn.Linear(128, 2)


torch.manual_seed(0)
directions = [math.pi * step / 8 for step in range(8)]
waves = [6] * 8 + [10] * 8
images, kinds = stripes(directions * 2, waves, count=64, noise=0.8)

old = Old()
optimizer = torch.optim.AdamW(old.parameters(), lr=0.003)
for _ in range(150):
    some = torch.randint(len(images), (128,))
    features = old.body(images[some])
    loss = nn.functional.cross_entropy(old.head(features), kinds[some])
    wide = kinds[some] // 8
    loss = loss + nn.functional.cross_entropy(old.width(features), wide)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

with torch.inference_mode():
    right = (old.head(old.body(images)).argmax(1) == kinds).float().mean()
print("the old network gets more than 3 of 4 right:", right.item() > 0.75)

scratch = tempfile.TemporaryDirectory(prefix="torchlift-")
folder = Path(scratch.name)
path = folder / "old.pt"
state = old.state_dict()
torch.save({f"module.{key}": state[key] for key in state}, path)
with torchlift.open(path) as ckpt:
    for key, entry in ckpt.entries.items():
        print(f"{key:<22} {entry.shape}")

# %%
# The new network has the same body, a head for six classes, and a scale that the old one lacks.


class New(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = make_body()
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(128, 6)

    def forward(self, images):
        return self.head(self.scale * self.body(images))


# %%
# What plain PyTorch does
# -----------------------
#
# You take off the prefix, and ask not to be strict.


def show(error):
    """Print the type and the message of an error, in short lines."""
    print_wrapped(" ".join(f"{type(error).__name__}: {error}".split()))


def print_wrapped(text):
    for line in str(text).replace(f"{folder}/", "").splitlines():
        print(textwrap.fill(line, 76, subsequent_indent="      "))


state = torch.load(path)
state = {key.removeprefix("module."): state[key] for key in state}
with torch.device("meta"):
    model = New()
try:
    model.load_state_dict(state, strict=False, assign=True)
except RuntimeError as error:
    show(error)

# %%
# ``strict=False`` forgives names, not shapes. So you drop the old head by hand. Now it loads.

body = {key: state[key] for key in state if not key.startswith("head.")}
found = model.load_state_dict(body, strict=False, assign=True)
print("missing:", found.missing_keys)
print("unexpected:", found.unexpected_keys)
print(
    "left on meta:",
    [name for name, weight in model.named_parameters() if weight.is_meta],
)
try:
    model.to("cpu")
except NotImplementedError as error:
    show(error)

# %%
# What the file lacks stays on meta. The error comes when you move the model, and names no tensor.
# If you follow its advice, ``to_empty`` takes away the weights that you have just loaded, and your
# head starts with whatever was in memory.
#
# It gets worse if you forget the prefix. Then nothing fits, and nothing is strict:

model = New()
before = [weight.detach().clone() for weight in model.parameters()]
found = model.load_state_dict(torch.load(path), strict=False)
pairs = zip(model.parameters(), before, strict=True)
print(
    "missing:",
    len(found.missing_keys),
    "unexpected:",
    len(found.unexpected_keys),
)
print("nothing was loaded:", all(torch.equal(new, old) for new, old in pairs))

# %%
# No error. You would fine-tune a network that has learned nothing.
#
# Names first
# -----------
#
# So start strict, and let the error tell you what does not fit. You build the skeleton, and the
# optimizer right away: the load keeps the parameters that it holds. The head is new, so it may
# learn faster than the body.

torch.manual_seed(1)
model = torchlift.skeleton(New)
new = [model.scale, *model.head.parameters()]
groups = [
    {"params": new, "lr": 0.01},
    {"params": list(model.body.parameters())},
]
optimizer = torch.optim.AdamW(groups, lr=0.001)

try:
    torchlift.load(model, path)
except torchlift.MismatchError as error:
    show(error)

# %%
# Everything is missing, and everything is unexpected. The last sentence says why, and what to do
# about it. `torchlift.remap.strip` makes the rename; any function from an old name to a new one
# would do.

rename = torchlift.remap.strip("module.")
try:
    torchlift.load(model, path, rename=rename)
except torchlift.MismatchError as error:
    show(error)
print("all still on meta:", all(p.is_meta for p in model.parameters()))

# %%
# Now the list is short, and it is what you meant: a scale that is new, a second head that you do
# not need, and a head of another shape. These are two decisions, and torchlift wants both of them:
#
# - ``allow_missing`` and ``allow_unexpected``: patterns of names that may be either.
# - ``ignore_mismatched=True``: a key of another shape counts as missing.
#
# Read the plan before you load. It touches nothing.

options = {
    "rename": rename,
    "allow_missing": ["scale", "head.*"],
    "allow_unexpected": ["*"],
    "ignore_mismatched": True,
}
plan = torchlift.plan(model, path, **options)
print_wrapped(plan)

# %%
# In a script you want to be sure without reading. Say what you expect to be new, and compare:

print(
    "just the new parts:",
    set(plan.missing_keys) == {"scale", "head.weight", "head.bias"},
)

# %%
# Load
# ----
#
# The body is mapped from the file. The scale and the head are *replayed*: made now, by the same
# calls as in the constructor. The report has the lines of the plan, and how long it took.

report = torchlift.load(model, path, **options)
print_wrapped(report)
print()
print(
    "left on meta:",
    [name for name, weight in model.named_parameters() if weight.is_meta],
)
for name, weight in model.body.named_parameters():
    print(
        f"body.{name:<8} bit-equal:",
        torch.equal(weight, old.body.get_parameter(name)),
    )

# %%
# What is in the head?
# --------------------
#
# What the constructor puts there, drawn when you load. So the seed of the load decides, and only
# what is replayed draws: the body, which comes from the file, uses up no random numbers.


def head_after(seed):
    model = torchlift.skeleton(New)
    torch.manual_seed(seed)
    torchlift.load(model, path, **options)
    return model


torch.manual_seed(7)
linear = nn.Linear(128, 6)
one, other = head_after(7), head_after(8)

print("scale is one:", one.scale.item() == 1)
print(
    "same seed, same head:",
    torch.equal(one.head.weight, head_after(7).head.weight),
)
print(
    "other seed, other head:",
    not torch.equal(one.head.weight, other.head.weight),
)
print(
    "weight as in a Linear of that seed:",
    torch.equal(one.head.weight, linear.weight),
)
print(
    "bias as in a Linear of that seed:  ",
    torch.equal(one.head.bias, linear.bias),
)

# %%
# Train
# -----
#
# The new task has six directions, another width, more noise, and only six images of each kind.
# Beside the loaded model you train one from scratch, with `torchlift.materialize` instead of a
# load. After each step both are tested on images that they never see in training.

torch.manual_seed(2)
directions = [0.1 + math.pi * step / 6 for step in range(6)]
images, kinds = stripes(directions, [8] * 6, count=6, noise=1.2)
tests, answers = stripes(directions, [8] * 6, count=50, noise=1.2)


def fine_tune(model, optimizer, steps=40):
    """Train; return the loss on the test images, before and after steps."""
    losses = []
    for step in range(steps + 1):
        with torch.inference_mode():
            loss = nn.functional.cross_entropy(model(tests), answers)
        losses.append(loss.item())
        if step < steps:
            loss = nn.functional.cross_entropy(model(images), kinds)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return losses


def accuracy(model):
    with torch.inference_mode():
        return (model(tests).argmax(1) == answers).float().mean().item()


held = {id(p) for group in optimizer.param_groups for p in group["params"]}
mine = {id(p) for p in model.parameters()}
print("the optimizer holds the model's parameters:", held == mine)

from_file = fine_tune(model, optimizer)

fresh = torchlift.skeleton(New)
torchlift.materialize(fresh)
from_scratch = fine_tune(fresh, torch.optim.AdamW(fresh.parameters(), lr=0.01))

for steps in (0, 10, 20, 40):
    one, other = from_file[steps], from_scratch[steps]
    print(f"{steps:>2} steps, loaded: ~{one:.2f}, from scratch: ~{other:.2f}")
print(
    "loaded, 10 steps are better than 40 from scratch:",
    from_file[10] < from_scratch[40],
)
print("loaded, more right at the end:", accuracy(model) > accuracy(fresh))

# %%

GRAY, RUST = "#5b6470", "#b83a16"
plt.rcParams.update({"figure.facecolor": "white", "font.size": 12})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})

figure = plt.figure(figsize=(7.2, 4.5), layout="constrained")
samples, curves = figure.subfigures(1, 2, width_ratios=(1, 2.2))
clean, _ = stripes(directions, [8] * 6, count=1, noise=0)
for kind, row in zip((0, 2, 4), samples.subplots(3, 2), strict=True):
    row[0].imshow(clean[kind, 0], cmap="gray")
    row[0].set_title(f"{math.degrees(directions[kind]):.0f}°", fontsize=12)
    noisy = clean[kind, 0] + 1.2 * torch.randn(PIXELS, PIXELS)
    row[1].imshow(noisy, cmap="gray")
    row[1].set_title("+ noise", fontsize=12)
    for axes in row:
        axes.set_axis_off()
axes = curves.subplots()
for losses, label, color in (
    (from_scratch, "from scratch", GRAY),
    (from_file, "body loaded, head replayed", RUST),
):
    axes.plot(losses, color=color, linewidth=2.5, label=label)
axes.set(
    xlim=(0, 40),
    ylim=(0, None),
    xlabel="step",
    ylabel="loss on test images (nats)",
)
axes.legend(frameon=False, loc="upper right")
plt.show()
scratch.cleanup()

# %%
# *Left: three of the six classes, by the direction of their stripes, and what the network gets to
# see of them. Right: the loss on test images.* Both start without knowing the classes. The loaded
# body knows what stripes are, so a few steps are enough. From scratch, six noisy images of each
# class are not.
#
# What to remember
# ----------------
#
# - ``strict=False`` in plain PyTorch forgives names, not shapes, and leaves what is missing on meta
#   or as it was. With a wrong prefix it loads nothing and says so to nobody.
# - Start strict. The error lists all that does not fit, and names the one rename that would fix it.
# - A missing tensor of a skeleton is made as its constructor makes it. ``torch.manual_seed`` before
#   the load decides which numbers it gets.
# - The optimizer may be built before the load. It goes on holding the right parameters.
#
# What to use when
# ----------------
#
# - **A new head:** ``load(..., allow_missing=["head.*"], ignore_mismatched=True)``: whatever else
#   is missing is still an error.
# - **Parts of the file that you do not need, and nothing else amiss:** keep ``strict=True``, and
#   let ``rename`` return None for them.
# - **Names from a wrapper:** `torchlift.remap.strip`. For more than a prefix there is
#   `torchlift.remap.rules`.
# - **No checkpoint at all:** `torchlift.materialize`, for the whole model or for some names.

"""
Shared weights stay shared
==========================

Your language model uses one matrix twice: to read tokens, and to predict them. After loading, it
has more parameters than before, and the optimizer takes more memory. What came apart?

You watch ``assign=True`` untie two weights, train the result beside a model that stays tied, and
see when the mistake shows: not in training, but at the next load.
"""

# %%
# One tensor, two names
# ---------------------
#
# The smallest language model that can be tied. It reads a token with ``embed``, mixes, and predicts
# the next token with ``head``. Both hold the *same* parameter, so that what it learns about reading
# a token helps to predict it. GPT-2 and Gemma do it like this.
#
# The task is as small: each of 96 tokens has one successor.

import re
import tempfile
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import torchlift

torch.set_num_threads(1)  # tiny tensors: more threads would only wait
TOKENS, WIDTH = 96, 32


class Language(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        nn.init.normal_(self.embed.weight, std=WIDTH**-0.5)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, token):
        x = self.embed(token)
        return self.head(x + torch.tanh(self.mix(x)))


torch.manual_seed(0)
token = torch.arange(TOKENS)
successor = torch.randperm(TOKENS)


def loss_of(model):
    return nn.functional.cross_entropy(model(token), successor)


def train(model, steps, optimizer=None):
    """Train; return the losses, and how far the two weights are apart (%)."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.003)
    losses, apart = [], []
    for _ in range(steps):
        loss = loss_of(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        embed, head = model.embed.weight.detach(), model.head.weight.detach()
        apart.append(100 * ((embed - head).norm() / embed.norm()).item())
    return losses, apart


scratch = tempfile.TemporaryDirectory(prefix="torchlift-")
folder = Path(scratch.name)

saved = Language()
train(saved, steps=20)
torch.save(saved.state_dict(), folder / "language.pt")

print("one object:", saved.embed.weight is saved.head.weight)
print("parameters:", [name for name, _ in saved.named_parameters()])
with torchlift.open(folder / "language.pt") as ckpt:
    print("in the file:", list(ckpt))
    print("of these, one storage:", ckpt.aliases)

# %%
# The model lists three parameters and the file four names. Two of the names are the same bytes.
# That they belong together in the *model* is a fact of its code; no file format holds it.
#
# What assign makes of it
# -----------------------
#
# Build on meta, map, assign. Then look at the model and take one step with Adam. Its very first
# step moves every weight by the learning rate, 0.001, whatever the gradient. So you can see how
# often a weight was moved.


def by_assign(path):
    with torch.device("meta"):
        model = Language()
    model.load_state_dict(torch.load(path, mmap=True), assign=True)
    return model


def by_torchlift(path, **options):
    model = torchlift.skeleton(Language)
    torchlift.load(model, path, **options)
    return model


def inspect(way, model):
    """Print how the model is tied, and how far one step of Adam moves it."""
    embed, head = model.embed.weight, model.head.weight
    count = len(list(model.parameters()))
    one_place = embed.data_ptr() == head.data_ptr()
    before = embed.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    loss_of(model).backward()
    optimizer.step()
    moved = (embed.detach() - before).abs().max().item()
    print(f"{way}: {count} parameters")
    print(f"    one object: {embed is head}, same memory: {one_place}")
    print(f"    one step moves a weight by up to {moved:.3f}")


inspect("never saved", Language())
inspect("assign", by_assign(folder / "language.pt"))
inspect("torchlift", by_torchlift(folder / "language.pt"))

# %%
# Assign gives each name a parameter of its own, on the same bytes of the file. The optimizer sees
# two parameters, so it steps through one memory twice. Each step goes up to twice as far as you
# asked for, and weight decay is applied twice. It is known to PyTorch as
# `issue 188346 <https://github.com/pytorch/pytorch/issues/188346>`_.
#
# Two tensors that drift
# ----------------------
#
# The shared memory lasts until something copies the parameters one by one: a move to a GPU, a cast.
# Or the file has two copies from the start, like this one. It is a release in bfloat16, cast tensor
# by tensor, and you train it in float32.

state = saved.state_dict()
release = {key: tensor.to(torch.bfloat16) for key, tensor in state.items()}
torch.save(release, folder / "release.pt")
with torchlift.open(folder / "release.pt") as ckpt:
    print("names on one storage in the release:", ckpt.aliases)

apart = by_assign(folder / "release.pt").to(torch.float32)
tied = by_torchlift(folder / "release.pt", dtype=torch.float32)
print(
    "both start with the same loss:",
    loss_of(apart).item() == loss_of(tied).item(),
)

STEPS = 150
history = {"assign": train(apart, STEPS), "torchlift": train(tied, STEPS)}
for way, (losses, distances) in history.items():
    print(f"{way}: loss below 0.2 after {STEPS} steps: {losses[-1] < 0.2}")
    print(f"{way}: the two weights are equal: {distances[-1] == 0}")
print(
    "assign, apart by more than half their size:",
    history["assign"][1][-1] > 50,
)

# %%
# Both learn the task. The untied model even learns it a bit faster, because it has more parameters
# to do it with. No number of the training tells you that anything is wrong.
#
# The bill comes at the next load
# -------------------------------
#
# You save both models, and somebody loads them: you tomorrow, an evaluation, a server. They build
# the model from its class, and the class says: tied.

torch.save(apart.state_dict(), folder / "apart.pt")
torch.save(tied.state_dict(), folder / "tied.pt")

reloaded = {}
for way, name in (("assign", "apart.pt"), ("torchlift", "tied.pt")):
    reloaded[way] = Language()
    print(f"{name}:", reloaded[way].load_state_dict(torch.load(folder / name)))

again = {way: loss_of(model).item() for way, model in reloaded.items()}
print("torchlift, loss after loading below 0.2:", again["torchlift"] < 0.2)
print("assign, loss after loading below 0.2:", again["assign"] < 0.2)
print(
    "assign, more than 5 times the loss of the last step:",
    again["assign"] > 5 * history["assign"][0][-1],
)

# %%
# ``load_state_dict`` copied both names into the one tensor, one after the other. The second name
# won, the embedding that you trained is gone, and all keys matched.
#
# `torchlift.load` compares the values before it changes anything. Two names that are one tensor in
# the model cannot have two values:


def show(error):
    """Print the type and the message of an error, with rounded numbers."""
    text = f"{type(error).__name__}: {error}".replace(f"{folder}/", "")
    text = re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.2f}", text)
    print(textwrap.fill(text, 76, subsequent_indent="  "))


model = torchlift.skeleton(Language)
try:
    torchlift.load(model, folder / "apart.pt")
except torchlift.MismatchError as error:
    show(error)

# %%
# The message shows both values and two ways out. This model was trained untied, and only the second
# way keeps all that it learned:

model = torchlift.skeleton(Language, tied=False)
torchlift.load(model, folder / "apart.pt")
print(
    "untied, the loss is that of the training:",
    loss_of(model).item() == loss_of(apart).item(),
)

# %%
# The picture
# -----------
#
# Both go on training after the second load.

after = {way: train(model, STEPS // 2) for way, model in reloaded.items()}

GRAY, TEAL, RUST = "#5b6470", "#2b6f77", "#b83a16"
plt.rcParams.update({"figure.facecolor": "white", "font.size": 12})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})

plt.rcParams.update({"figure.constrained_layout.use": True})
figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 4.5))
for way, color in (("assign", TEAL), ("torchlift", RUST)):
    for axes, part in ((left, 0), (right, 1)):  # the losses, the distances
        values = history[way][part] + after[way][part]
        axes.plot(
            range(1, len(values) + 1),
            values,
            color=color,
            linewidth=2.5,
            label=way,
        )
for axes in (left, right):
    axes.axvline(STEPS + 0.5, color=GRAY, linewidth=1, linestyle=":")
    axes.set(
        xlim=(0, 1.5 * STEPS),
        xlabel="step",
        xticks=[0, STEPS // 2, STEPS, 3 * STEPS // 2],
    )
left.set(ylabel="loss (nats)", ylim=(0, None))
right.set(ylabel="distance of embedding and head (%)", ylim=(-4, 110))
left.text(
    STEPS,
    left.get_ylim()[1],
    "saved, loaded ",
    color=GRAY,
    ha="right",
    va="top",
)
figure.legend(
    *left.get_legend_handles_labels(),
    loc="outside upper center",
    ncols=2,
    frameon=False,
)
plt.show()

# %%
# *Left: the loss. Right: how far embedding and head are apart, as a share of the size of the
# embedding.* Until the dotted line, nothing on the left says that the model of assign has come
# apart. Then it is saved and loaded, and half of what it learned is overwritten. The other one goes
# on as if nothing had happened.
#
# One tensor, in every mode
# -------------------------
#
# A file may hold both names, or one of them: a safetensors file for example holds shared bytes
# once, under either name. torchlift takes any of these files, into a live model or a skeleton, and
# leaves one tensor.

files = {
    "both names": (),
    "embed only": ("head.weight",),
    "head only": ("embed.weight",),
}
kinds = {"live": Language, "skeleton": lambda: torchlift.skeleton(Language)}


def stays_tied(make, path, mode):
    model = make()
    torchlift.load(model, path, mode=mode)
    one = model.embed.weight is model.head.weight
    return one and torch.equal(model.embed.weight, saved.embed.weight)


for label, without in files.items():
    path = folder / "names.pt"
    torch.save({key: state[key] for key in state if key not in without}, path)
    for kind, make in kinds.items():
        modes = ("assign", "copy", "swap")
        good = (f"{mode}: {stays_tied(make, path, mode)}" for mode in modes)
        print(f"{label:<10} {kind:<8}", *good)


# %%
# And training goes on bit for bit as if the model had never been in a file:

loaded = by_torchlift(folder / "language.pt")
print("same losses, 50 steps:", train(loaded, 50) == train(saved, 50))

# %%
# What it costs to untie
# ----------------------
#
# Now with a matrix that is worth sharing: 16,384 tokens, 32 MiB. Each way runs in a fresh process:
# load, one step of Adam, and a look at the memory that the process owns.

SETUP = """
import torch
import torchlift
from torch import nn

def build():
    embed = nn.Embedding(16384, 512)
    head = nn.Linear(512, 16384, bias=False)
    head.weight = embed.weight
    return nn.Sequential(embed, head)

def step(model):
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.arange(2)).sum().backward()
    optimizer.step()
    return optimizer

step(nn.Embedding(2, 2))  # the first optimizer of a process imports much
"""

WAYS = {
    "assign": """
        with torch.device("meta"):
            model = build()
        model.load_state_dict(torch.load(args[0], mmap=True), assign=True)
    """,
    "torchlift": """
        model = torchlift.skeleton(build)
        torchlift.load(model, args[0])
    """,
}

STEP = """
optimizer = step(model)
use.mark("one step")
"""

MIB = 2**20
matrix = torch.zeros(16384, 512)
path = str(folder / "large.pt")
torch.save({"0.weight": matrix, "1.weight": matrix}, path)

copies = {}
for way, load in WAYS.items():
    code = textwrap.dedent(load) + STEP
    use = torchlift.measure.in_child(code, path, setup=SETUP).memory
    owned = use.marks[0].anonymous - use.baseline.anonymous
    copies[way] = owned / matrix.nbytes
    print(f"{way:<9} anonymous memory after: {owned / MIB:5.1f} MiB")

print(f"the matrix: {matrix.nbytes / MIB:.0f} MiB")
print("torchlift owns it four times:", 3.8 < copies["torchlift"] < 4.5)
print(
    "assign owns it three times more:",
    2.8 < copies["assign"] - copies["torchlift"] < 3.2,
)

# %%
# Four times is what training with Adam takes: the weight, its gradient, and two moments. Assign
# adds a second gradient and two more moments.
#
# The other way round
# -------------------
#
# A file can also share what your model does not. You load the tied release into a model whose head
# shall be free. With assign, both parameters lie on the same bytes, and training one changes the
# other. `torchlift.load` copies, and says so.

with torch.device("meta"):
    model = Language(tied=False)
state = torch.load(folder / "language.pt", mmap=True)
model.load_state_dict(state, assign=True)


def head_follows(model):
    """Change the embedding, and see whether the head changes with it."""
    before = model.head.weight.detach().clone()
    with torch.no_grad():
        model.embed.weight.add_(1)
    return not torch.equal(model.head.weight, before)


print("assign, the head follows the embedding:", head_follows(model))

model = torchlift.skeleton(Language, tied=False)
report = torchlift.load(model, folder / "language.pt")
print("torchlift, the head follows the embedding:", head_follows(model))
for key, item in report.loaded.items():
    if item.note:
        print(f"{key}: {item.note}")
scratch.cleanup()

# %%
# What to remember
# ----------------
#
# - Which names are one tensor is written in the model's code, and in no file. Whoever loads has to
#   look at the model.
# - ``assign=True`` makes one parameter per name. On shared bytes the optimizer steps twice; on
#   copies the two drift apart.
# - You do not see it in the loss. You see it in the number of parameters, in the memory of the
#   optimizer, and in the next load.
# - Where two names of one tensor have two values, one of them is lost. That should be an error.
#
# What to use when
# ----------------
#
# - **A tied model:** `torchlift.load`, in any mode. `torchlift.plan` lists the ties beforehand.
# - **Plain assign, because you must:** tie again afterwards, ``head.weight = embed.weight``, and
#   build the optimizer only then.
# - **A file whose two values differ:** find out whether the model was trained untied. If so, build
#   it untied. If not, drop the wrong name with ``rename``.
# - **You want a free head from a tied file:** load it into the untied class; the bytes are copied.

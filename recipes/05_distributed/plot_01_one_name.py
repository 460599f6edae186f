"""
One name for every parameter
============================

You trained under DDP, and every key of the checkpoint starts with ``module.``. You compiled the
model, and the keys say ``_orig_mod.``. Now the file loads into nothing else. What is a parameter
called, whatever its model is wrapped in?

You wrap one model in nine ways on two processes, compare the keys, and let each of the nine load
what each other one saved.
"""

# %%
# One model, nine ways
# --------------------
#
# The model is two blocks and a head. You will follow one of its parameters, the weight
# ``blocks.0.up.weight``.

import tempfile
import textwrap
from collections import OrderedDict
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, parallel
from torch.nn.parallel import DistributedDataParallel

import torchlift
from torchlift.distributed import (
    StateDictMismatch,
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    on_ranks,
    patch_model_state_dict,
    set_model_state_dict,
)


def block():
    layers = {
        "up": nn.Linear(8, 32),
        "relu": nn.ReLU(),
        "down": nn.Linear(32, 8),
    }
    return nn.Sequential(OrderedDict(layers))


def build():
    blocks = nn.Sequential(block(), block())
    return nn.Sequential(OrderedDict(blocks=blocks, head=nn.Linear(8, 4)))


# %%
# A wrapper is a module that has your module inside, and the names of the modules on the way make up
# the key. So `torch.compile` and DDP put a word of their own in front, or into the middle where you
# wrapped the blocks. FSDP2 and tensor parallel change no names. They change the values: each
# parameter becomes a DTensor, of which a process holds a part.


def compiled(model):
    return torch.compile(model, backend="eager")


def compile_blocks(model):
    for number, block in enumerate(model.blocks):
        model.blocks[number] = compiled(block)
    return model


def shard(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def tensor_parallel(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
    for block in model.blocks:
        parallel.parallelize_module(block, mesh, plan)
    return model


def wrap(model, way):
    """From the inside out: "compiled blocks, FSDP2" shards last."""
    steps = {
        "plain": lambda model: model,
        "compiled": compiled,
        "compiled blocks": compile_blocks,
        "DDP": DistributedDataParallel,
        "FSDP2": shard,
        "TP": tensor_parallel,
    }
    for step in way.split(", "):
        model = steps[step](model)
    return model


WAYS = [
    "plain",
    "compiled",
    "compiled blocks",
    "DDP",
    "compiled, DDP",
    "FSDP2",
    "compiled blocks, FSDP2",
    "TP",
    "TP, compiled",
]

# %%
# Nothing is compiled here. `torch.compile` compiles when the model is first called, and you only
# look at names.
#
# Two processes
# -------------
#
# Most of these wrappers want a process group. `torchlift.distributed.on_ranks` starts as many
# processes as you ask for, with ``gloo`` on the CPU, and calls a function on each. You may define
# it right here, in a cell: it is sent with all that it refers to. You get back what each rank
# returned, in the order of the ranks.
#
# Here is what runs on every rank. First it wraps a model in each way, and looks at two state dicts:
# the one that the wrapped model gives you, and the one of
# `torchlift.distributed.get_model_state_dict`. Then each of the nine saves and each of the nine
# loads, once with raw keys and once with canonical names.


def look(model):
    """Both kinds of keys, and what this rank holds of the first value."""
    canonical = get_model_state_dict(model)
    value = canonical["blocks.0.up.weight"]
    held = value.to_local() if isinstance(value, DTensor) else value
    return {
        "raw": list(model.state_dict()),
        "canonical": list(canonical),
        "held": tuple(held.shape),
    }


def load_raw(model, saved):
    """Load the other model's own state_dict(); return the error, if any."""
    try:
        model.load_state_dict(saved.state_dict())
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def load_canonical(model, saved):
    """Load whole tensors by canonical names, and compare every bit."""
    whole = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(saved, options=whole)
    set_model_state_dict(model, state, options=whole)
    now = get_model_state_dict(model, options=whole)
    return all(torch.equal(now[name], value) for name, value in state.items())


def compare(ways, path):
    saved, loaded = {}, {}
    for seed, way in enumerate(ways):
        torch.manual_seed(seed)
        saved[way], loaded[way] = wrap(build(), way), wrap(build(), way)

    def each_pair(load):
        return [[load(loaded[b], saved[a]) for b in ways] for a in ways]

    found = {
        "looks": {way: look(model) for way, model in saved.items()},
        "raw": each_pair(load_raw),
        "canonical": each_pair(load_canonical),
    }
    # On rank 0 whole tensors on the CPU, on the others an empty dict.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model = saved["compiled blocks, FSDP2"]
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        torch.save(state, path)
    return found | {"to save": len(state)}


scratch = tempfile.TemporaryDirectory(prefix="torchlift-")
folder = Path(scratch.name)
path = str(folder / "model.pt")
ranks = on_ranks(2, compare, WAYS, path)
looks = ranks[0]["looks"]

# %%
# What they are called
# --------------------
#
# The first key of the model in each wrapping, and what rank 0 holds of that weight. It has 32 rows.

print(f"{'':<24}{'first raw key':<37}rank 0 holds")
for way, found in looks.items():
    print(f"{way:<24}{found['raw'][0]:<37}{found['held']}")

plain = looks["plain"]["raw"]
print("\nraw keys that are those of the plain model:")
for way, found in looks.items():
    common = set(plain) & set(found["raw"])
    print(f"    {way:<24}{len(common):2} of {len(plain)}")
print("canonical names, in every way and on both ranks:")
everyone = [found for rank in ranks for found in rank["looks"].values()]
everywhere = [found["canonical"] for found in everyone]
print(f"    {everywhere[0][0]}, ...")
print("    those of the plain model:", all(names == plain for names in everywhere))

# %%
# There are five spellings of one name. With compiled blocks the word stands in the middle, and only
# in some of the keys. The canonical name is the one that the plain model has: the path through the
# modules that *you* wrote.
#
# What loads into what
# --------------------
#
# Nine ways to save and nine to load are 81 pairs.

raw, canonical = ranks[0]["raw"], ranks[0]["canonical"]
every = range(len(WAYS))
fits = [(a, b) for a in every for b in every if raw[a][b] is None]
print(f"by raw keys:        {len(fits):2} of 81 pairs load")
equal = sum(map(sum, canonical))
print(f"by canonical names: {equal} of 81 pairs load, bit for bit")
print("raw keys load into the same wrapping only:", all(a == b for a, b in fits))
print("the other rank agrees:", ranks[1]["canonical"] == canonical)

# %%
# Raw keys fail for two reasons. Either the names differ, or the names are the same and the values
# are of two kinds: a whole tensor on one side, a DTensor on the other.


def show(text, width=340):
    """Print an error in short lines."""
    text = textwrap.shorten(text, width, placeholder=" ...")
    print(textwrap.fill(text, 76, subsequent_indent="  "))


for before, after in (("DDP", "plain"), ("plain", "FSDP2")):
    print(f"{before} -> {after}:")
    show(raw[WAYS.index(before)][WAYS.index(after)])

# %%
# ``full_state_dict=True`` takes care of the second kind. The state dict then has whole tensors.
# They are put together when you get it, and each rank takes its own slice when you set it. A model
# that is too large for that keeps its DTensors and is saved with DCP, as in the next recipe.
#
# The picture
# -----------

INK, GRAY, TEAL, RUST = "#20262e", "#5b6470", "#2b6f77", "#b83a16"
plt.rcParams.update({"figure.facecolor": "white", "font.size": 12})

COLORS = {"module": RUST, "_orig_mod": TEAL}
figure, (keys, pairs) = plt.subplots(
    1,
    2,
    figsize=(7.2, 4.6),
    width_ratios=[1.35, 1],
    sharey=True,
    layout="constrained",
)
for row, found in enumerate(looks.values()):
    start = 0
    for word in found["raw"][0].split("."):
        end = start + len(word)
        color, alpha = (COLORS[word], 1) if word in COLORS else (GRAY, 0.3)
        keys.barh(
            row, end - start, left=start, height=0.55, color=color, alpha=alpha
        )
        start = end + 1  # the dot
legend = {"compile: _orig_mod": TEAL, "DDP: module": RUST}
for label, color in legend.items():
    keys.barh(0, 0, color=color, label=label)
keys.barh(0, 0, color=GRAY, alpha=0.3, label="your own words")
keys.set_yticks(
    range(len(WAYS)), [f"{way}   {row}" for row, way in enumerate(WAYS, 1)]
)
keys.set(ylim=(len(WAYS) - 0.4, -0.6), xticks=range(0, 40, 10))
keys.set(xlabel="position in the raw key\n(characters)", ylabel="saved from")

for by, color, size in (
    ("canonical names", TEAL, 120),
    ("raw keys too", RUST, 30),
):
    cells = [
        (b, a)
        for a in range(len(WAYS))
        for b in range(len(WAYS))
        if (canonical[a][b] if by == "canonical names" else (a, b) in fits)
    ]
    pairs.scatter(
        *zip(*cells, strict=True),
        s=size,
        color="white" if size == 120 else color,
        edgecolor=color,
        linewidth=1.8,
        label=f"loads by {by}",
    )
pairs.set_xticks(range(len(WAYS)), range(1, len(WAYS) + 1))
pairs.set(xlim=(-0.6, len(WAYS) - 0.4), xlabel="loaded into\n(number of the row)")
for axes in (keys, pairs):
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
figure.legend(loc="outside lower center", ncols=2, frameon=False)
plt.show()

# %%
# *Left: the first key of the state dict in each wrapping, one bar per word. The colored words are
# not yours. Right: which wrapping loads what another one saved.* By raw keys you stay on the
# diagonal.
#
# Why not strip the prefixes yourself?
# ------------------------------------
#
# Many scripts do, with a ``replace`` on every key. But a key is only text. It does not say which of
# its words is a wrapper. Here somebody called a layer ``module``, a good name for a layer:

model = nn.Sequential(OrderedDict(module=nn.Linear(2, 1), head=nn.Linear(1, 1)))
print("in the model:  ", [name for name, _ in model.named_parameters()])
print(
    "with replace:  ",
    [name.replace("module.", "") for name in model.state_dict()],
)
print("canonical:     ", list(get_model_state_dict(compiled(model))))

# %%
# The canonical name comes from the modules themselves. A word is left out when the module it leads
# to sits in a wrapper, and only then.
#
# What loads it here
# ------------------
#
# Rank 0 has saved the model with compiled blocks under FSDP2. The other rank had nothing to save.
# With ``cpu_offload`` beside ``full_state_dict``, only rank 0 gets the tensors.

print("tensors to save, by rank:", [rank["to save"] for rank in ranks])

# %%
# This process has no process group. The file has canonical names and whole tensors. A plain model
# takes it as it is, and a compiled one takes it by name.

torch.manual_seed(0)
plain_model, compiled_model = build(), compiled(build())
torchlift.load(plain_model, path)
print(set_model_state_dict(compiled_model, torch.load(path)))
both = zip(plain_model.parameters(), compiled_model.parameters(), strict=True)
print("both have the same weights:", all(torch.equal(a, b) for a, b in both))

# %%
# `torchlift.load` goes by the names that the model itself has. Given the compiled model, it tells
# you so, with a way out. Better: load first and wrap afterwards.

try:
    torchlift.load(compiled_model, path)
except torchlift.MismatchError as error:
    text = f"{type(error).__name__}: {error}".replace(f"{folder}/", "")
    show(
        text[: text.index("missing")]
        + "... "
        + text[text.index("The model's names") :]
    )

# %%
# A name that is really wrong is still an error, under the name that you know. It is raised before
# anything has changed, and on every rank if there are several.

state = torch.load(path)
state["head.wieght"] = state.pop("head.weight")
try:
    set_model_state_dict(compiled_model, state)
except StateDictMismatch as error:
    show(f"{type(error).__name__}: {error}")

# %%
# Optimizers, and code that you cannot change
# -------------------------------------------
#
# An optimizer has no names at all. Its state dict counts parameters in the order in which they were
# passed, so a state dict from a model that lists them in another order fits, and is wrong.
# `torchlift.distributed.get_optimizer_state_dict` gives each state its parameter's name.

optimizer = torch.optim.SGD(compiled_model.parameters(), lr=0.1)
print("raw:      ", optimizer.state_dict()["param_groups"][0]["params"][:3])
named = get_optimizer_state_dict(compiled_model, optimizer)
print("canonical:", named["param_groups"][0]["params"][:3])

# %%
# And if somebody else's trainer calls ``model.state_dict()``, patch the object once. It then speaks
# canonical names by itself.

patch_model_state_dict(compiled_model)
print(next(iter(compiled_model.state_dict())))
print(compiled_model.load_state_dict(torch.load(path)))
scratch.cleanup()

# %%
# What to remember
# ----------------
#
# - A wrapper adds its word to the keys, in front or in the middle. FSDP2 and tensor parallel leave
#   the keys alone and change the values.
# - The canonical name is the path through your own modules. It is the same in every wrapping, so it
#   is the one to save under.
# - Raw keys load into the same wrapping only. Canonical names load into all.
# - Do not cut words out of keys. Text does not say which of them is a wrapper.
#
# What to use when
# ----------------
#
# - **You save from a wrapped model:** `torchlift.distributed.get_model_state_dict`; with
#   ``full_state_dict`` and ``cpu_offload`` for one file that everybody can read.
# - **You load into a wrapped model:** `torchlift.distributed.set_model_state_dict`. Or
#   `torchlift.load` first, and compile or DDP afterwards.
# - **You have an old file with raw keys:** ``rename=remap.strip("module.")``, from
#   `torchlift.remap`.
# - **Your script uses** ``torch.distributed.checkpoint.state_dict``: names and arguments are the
#   same. Change the import.

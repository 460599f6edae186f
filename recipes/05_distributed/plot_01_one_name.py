"""
Keys that start with module. or _orig_mod.: DDP, torch.compile, FSDP
====================================================================

You trained under DDP, and every key of the checkpoint starts with ``module.``. Or you compiled the
model, and the keys contain ``_orig_mod.``. Now the file loads into no other model.

Load an old file with `torchlift.remap.strip`. From now on save with
`torchlift.distributed.get_model_state_dict`. It returns the names of your own modules, in every
wrapper.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift
from torchlift.distributed import get_model_state_dict

path, plain = tempfile.mkdtemp() + "/model.pt", torch.nn.Linear(8, 4)
model = torch.compile(plain, backend="eager")
torch.save(get_model_state_dict(model), path)  # from now on
torchlift.load(plain, path)
print("new file:", *torchlift.open(path))
torch.save(model.state_dict(), path)  # an old file, with the wrapper's prefix
torchlift.load(plain, path, rename=torchlift.remap.strip("_orig_mod."))
print("old file:", *torchlift.open(path))

# %%
# Wrappers add module. and _orig_mod. to the keys
# -----------------------------------------------
#
# A wrapper is a module that contains yours. The names of all modules on the path form the key.
# `torch.compile` and DDP add their word to the front of a key. If you wrapped only a part, the word
# is in the middle:

try:
    plain.load_state_dict(torch.load(path))
except RuntimeError as error:
    print(f"{type(error).__name__}: {error}")

# %%
# FSDP2 and tensor parallel change the values: a parameter becomes a DTensor, and each process holds
# a slice of it.
#
# Load each wrapper's checkpoint into each wrapper
# ------------------------------------------------
#
# One model has seven wrappings, on two ranks. Each wrapping saves and loads in three ways. With
# ``full_state_dict`` a state dict has complete tensors, and each rank takes its slices when it is
# loaded.

# fold: The model and its seven wrappings
from collections import OrderedDict
from functools import partial, reduce

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

compiled = partial(torch.compile, backend="eager")


def build(steps):
    body = nn.Sequential(
        OrderedDict(up=nn.Linear(8, 32), down=nn.Linear(32, 8))
    )
    model = nn.Sequential(OrderedDict(body=body, head=nn.Linear(8, 4)))
    return reduce(lambda model, step: step(model), steps, model)


def compile_body(model):
    model.body = compiled(model.body)
    return model


WAYS = {
    "plain": [],
    "compiled": [compiled],
    "compiled body": [compile_body],
    "DDP": [DistributedDataParallel],
    "DDP, compiled inside": [compiled, DistributedDataParallel],
    "FSDP2": [fully_shard],
    "FSDP2, compiled body": [compile_body, fully_shard],
}

# %%
from torch.distributed.checkpoint import state_dict as torch_s

from torchlift import distributed as torchlift_s

whole = torchlift_s.StateDictOptions(full_state_dict=True)


def by_keys(model, saved):
    model.load_state_dict(saved.state_dict())


def by_names(functions, model, saved):
    state = functions.get_model_state_dict(saved, options=whole)
    functions.set_model_state_dict(model, state, options=whole)


# %%

# fold: How the 49 pairs are tried
LOADS = {
    "raw keys": by_keys,
    "torch's names": partial(by_names, torch_s),
    "torchlift's names": partial(by_names, torchlift_s),
}


def loads(load, model, saved):
    try:
        load(model, saved)
    except (RuntimeError, ValueError):
        return False
    now, then = (get_model_state_dict(m, options=whole) for m in (model, saved))
    return all(torch.equal(now[name], value) for name, value in then.items())


def compare():
    torch.manual_seed(0)
    saved, found = {way: build(steps) for way, steps in WAYS.items()}, {}
    for way, load in LOADS.items():
        into = [build(steps) for steps in WAYS.values()]
        found[way] = [
            [loads(load, m, one) for m in into] for one in saved.values()
        ]
    keys = {way: next(iter(model.state_dict())) for way, model in saved.items()}
    names = {
        next(iter(get_model_state_dict(model))) for model in saved.values()
    }
    return keys, names, found


(keys, names, found), other = torchlift_s.on_ranks(2, compare)
for wrapping, key in keys.items():
    print(f"{wrapping:<24}{key}")
pairs = {way: sum(map(sum, each)) for way, each in found.items()}
for way, count in pairs.items():
    print(f"{way:<18}{count:>2} of 49 pairs load")
assert names == {"body.up.weight"}
assert list(pairs.values()) == [7, 49, 49]
assert found["raw keys"] == [[a == b for a in range(7)] for b in range(7)]
assert other == (keys, names, found), "the other rank agrees"

# %%
import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 2))
bars = axes.barh(list(pairs), list(pairs.values()), color=["C0", "C3", "C1"])
axes.bar_label(bars, padding=4)
axes.invert_yaxis()
axes.set(
    xlabel="pairs of wrappings that load (of 49)", xticks=[0, 7, 21, 35, 49]
)
plt.show()

# %%
# *Each bar counts how many of 49 pairs load, among seven wrappings of one model (plain, compiled,
# DDP, FSDP2 and mixtures of them). By raw keys only the same wrapping loads. By the names of your
# own modules all pairs load, with torch's functions and with torchlift's, so save by these names.*
#
# A layer that is really called module
# ------------------------------------
#
# ``replace`` removes that name too. The canonical name leaves out a word only if it belongs to a
# wrapper.

model = nn.Sequential(OrderedDict(module=nn.Linear(2, 1), head=nn.Linear(1, 1)))
print("replace:  ", [key.replace("module.", "") for key in model.state_dict()])
print("canonical:", list(get_model_state_dict(compiled(model))))

# %%
# Save only what trains, or only one module
# -----------------------------------------
#
# With LoRA most weights are frozen. ``ignore_frozen_params`` leaves them out, and a load with it
# does not miss them. For one module, call the function on that module. ``submodules=`` is
# deprecated in torch.

model.module.requires_grad_(False)
lora = torchlift_s.StateDictOptions(ignore_frozen_params=True)
state = get_model_state_dict(model, options=lora)
torchlift_s.set_model_state_dict(model, state, options=lora)  # no missing keys
print("only what trains:", list(state))
print("only one module: ", list(get_model_state_dict(model.module)))

# %%
# FSDP1, one file from rank 0, and code that calls state_dict
# -----------------------------------------------------------
#
# With ``full_state_dict`` and ``cpu_offload``, rank 0 alone gets the complete tensors, in the
# memory of the host, and other ranks get an empty dict. ``patch_model_state_dict`` makes
# ``state_dict()`` do the same, for code that you cannot change. Here FSDP2 saves one file, and
# FSDP1 loads it:


def from_fsdp2_to_fsdp1(path):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

    torch.manual_seed(0)
    once = torchlift_s.StateDictOptions(full_state_dict=True, cpu_offload=True)
    torchlift_s.patch_model_state_dict(
        new := fully_shard(build([])), options=once
    )
    if state := new.state_dict():
        torch.save(state, path)
    torch.distributed.barrier()
    old = FSDP1(build([]), device_id=torch.device("cpu"))
    torchlift_s.set_model_state_dict(old, torch.load(path), options=whole)
    back = get_model_state_dict(old, options=whole)
    return len(state), torchlift.diff(back, path).equal


found = torchlift_s.on_ranks(2, from_fsdp2_to_fsdp1, path)
counts, equal = zip(*found, strict=True)
print("tensors that each rank saves:", *counts)
assert all(equal)

# %%
# Remember
# --------
#
# - A wrapper adds its word to the keys. FSDP2 and tensor parallel change only the values.
# - The canonical name is the path through your own modules, the same in every wrapping.
# - The text of a key does not show which word belongs to a wrapper. The modules do.
#
# Use this when
# -------------
#
# - **A file has a wrapper's keys:** `torchlift.remap.strip`, as ``rename=`` of `torchlift.load`.
# - **You save from a wrapped model:** `torchlift.distributed.get_model_state_dict`. For one
#   ordinary file add ``full_state_dict`` and ``cpu_offload``.
# - **You load into one:** `torchlift.distributed.set_model_state_dict`.
# - **Somebody else's code calls** ``model.state_dict()``: patch it once with
#   `torchlift.distributed.patch_model_state_dict`.

# %%
# Question
# --------
#
# A checkpoint has the weights of one layer, under ``0.weight`` and ``0.bias``. Why do they not load
# into that layer alone, and which option saves them without the prefix?

# fold: Answer to the question
# With submodules= a key is the path from the model, unless you pass
# keep_submodule_prefixes=False.
net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
for keep in True, False:
    options = torchlift_s.StateDictOptions(keep_submodule_prefixes=keep)
    state = get_model_state_dict(net, submodules={net[0]}, options=options)
    print(f"keep_submodule_prefixes={keep}:", *state)
assert torchlift.load(net[0], state).loaded.keys() == {"weight", "bias"}

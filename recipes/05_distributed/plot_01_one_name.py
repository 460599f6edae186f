"""
Keys that start with module. or _orig_mod.: DDP, torch.compile, FSDP
====================================================================

You trained under DDP, and every key of the checkpoint starts with ``module.``. You compiled the
model, and the keys say ``_orig_mod.``. Now the file loads into nothing else.

Load an old file with `torchlift.remap.strip`. From now on save by
`torchlift.distributed.get_model_state_dict`: the names of your own modules, in every wrapping.
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
torch.save(model.state_dict(), path)  # an old file: _orig_mod.weight
print(torchlift.load(plain, path, rename=torchlift.remap.strip("_orig_mod.")))

torch.save(get_model_state_dict(model), path)  # from now on: weight
print(torchlift.load(plain, path))

# %%
# Two words in front of a key
# ---------------------------
#
# A wrapper is a module that has your module inside, and the names of the modules on the way make up
# the key. `torch.compile` and DDP put a word of their own in front, or into the middle where you
# wrapped a part. Without torchlift that is an error:

torch.save(model.state_dict(), path)
try:
    plain.load_state_dict(torch.load(path))
except RuntimeError as error:
    print(f"{type(error).__name__}: {error}")

# %%
# FSDP2 and tensor parallel change no names. They change the values: each parameter becomes a
# DTensor, of which a process holds a slice. Here is one model in seven wrappings:

from collections import OrderedDict

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def build():
    up, down = nn.Linear(8, 32), nn.Linear(32, 8)
    body = nn.Sequential(OrderedDict(up=up, relu=nn.ReLU(), down=down))
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(8, 4)))


def compiled(model):
    return torch.compile(model, backend="eager")


def compile_body(model):
    model.body = compiled(model.body)
    return model


def shard(model):
    fully_shard(model.body)
    return fully_shard(model)


WAYS = {
    "plain": [],
    "compiled": [compiled],
    "compiled body": [compile_body],
    "DDP": [DistributedDataParallel],
    "DDP, compiled inside": [compiled, DistributedDataParallel],
    "FSDP2": [shard],
    "FSDP2, compiled body": [compile_body, shard],
}

# %%
# What loads into what
# --------------------
#
# Each of the seven saves, and each of the seven loads: 49 pairs, once by raw keys and once by
# canonical names. With ``full_state_dict`` a state dict has whole tensors, and each rank takes its
# slices when it is set. `torchlift.distributed.on_ranks` calls a function on two processes.

from functools import reduce

from torchlift.distributed import StateDictOptions, on_ranks, set_model_state_dict

whole = StateDictOptions(full_state_dict=True)


def wrap(steps):
    return reduce(lambda model, step: step(model), steps, build())


def first(state):
    return next(iter(state))


def raw(model, saved):
    try:
        model.load_state_dict(saved.state_dict())
    except (RuntimeError, ValueError):
        return False
    return True


def canonical(model, saved):
    state = get_model_state_dict(saved, options=whole)
    set_model_state_dict(model, state, options=whole)
    now = get_model_state_dict(model, options=whole)
    return all(torch.equal(now[name], value) for name, value in state.items())


def compare():
    torch.manual_seed(0)
    saved = {way: wrap(steps) for way, steps in WAYS.items()}
    loaded = [wrap(steps) for steps in WAYS.values()]
    return {
        "keys": {way: first(model.state_dict()) for way, model in saved.items()},
        "names": {first(get_model_state_dict(model)) for model in saved.values()},
        "raw": [[raw(m, s) for m in loaded] for s in saved.values()],
        "canonical": [[canonical(m, s) for m in loaded] for s in saved.values()],
    }


found, other = on_ranks(2, compare)
for way, key in found["keys"].items():
    print(f"{way:<24}{key}")
print("\ncanonical, in all: ", *found["names"])
print("pairs that load by raw keys:       ", sum(map(sum, found["raw"])))
print("pairs that load by canonical names:", sum(map(sum, found["canonical"])))
assert found["names"] == {"body.up.weight"}
assert sum(map(sum, found["canonical"])) == 49, "each of them bit for bit"
assert other == found, "the other rank agrees"

# %%
import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 4.2))
cells = [(b, a) for a in range(7) for b in range(7)]
for kind, color, size in (("canonical", "C1", 150), ("raw", "C0", 50)):
    points = [(b, a) for b, a in cells if found[kind][a][b]]
    axes.scatter(
        *zip(*points, strict=True), size, color, label=f"{kind} names load"
    )
axes.set_yticks(range(7), [f"{way}  {n}" for n, way in enumerate(WAYS, 1)])
axes.set_xticks(range(7), range(1, 8))
axes.set(ylim=(6.6, -0.6), ylabel="saved from", xlabel="loaded into, by number")
figure.legend(loc="outside lower center", ncols=2)
plt.show()

# %%
# *Which wrapping loads what another one saved. By raw keys you stay on the diagonal: only the same
# wrapping loads it. By canonical names all 49 pairs load.*
#
# A layer that is really called module
# ------------------------------------
#
# Do not cut words out of keys by ``replace``: a key does not say which of its words is a wrapper's.
# The canonical name comes from the modules, and leaves out a word only where a wrapper stands.

model = nn.Sequential(OrderedDict(module=nn.Linear(2, 1), head=nn.Linear(1, 1)))
print("replace:  ", [key.replace("module.", "") for key in model.state_dict()])
print("canonical:", list(get_model_state_dict(compiled(model))))

# %%
# Remember
# --------
#
# - A wrapper adds its word to the keys, in front or in the middle. FSDP2 and tensor parallel leave
#   the keys alone and change the values.
# - The canonical name is the path through your own modules, the same in every wrapping.
# - Text does not say which word of a key is a wrapper's. Modules do.
#
# Use this when
# -------------
#
# - **You have a file with a wrapper's keys:** `torchlift.remap.strip` as ``rename=`` of
#   `torchlift.load`.
# - **You save from a wrapped model:** `torchlift.distributed.get_model_state_dict`; for one file
#   that everybody can read with ``full_state_dict`` and ``cpu_offload``.
# - **You load into one:** `torchlift.distributed.set_model_state_dict`. Or `torchlift.load` first,
#   and wrap afterwards.
# - **Somebody else's code calls** ``model.state_dict()``: patch the model once with
#   `torchlift.distributed.patch_model_state_dict`.

"""
LoRA: load an adapter beside its base, merge it while loading, save it alone
============================================================================

A base of many gigabytes, an adapter of a few megabytes: two libraries, two layouts of names. Does
it take the wrapped model and all its memory to put them together?

No: `torchlift.load` takes both files, or their sum, one weight at a time, with PEFT's own values.
"""

# %%
# In short
# --------

import tempfile

from peft import LoraConfig, get_peft_model
from torch.nn import TransformerEncoderLayer as Layer

import torchlift
from torchlift.integrations.peft import merge_lora

folder, lora = tempfile.mkdtemp(), LoraConfig(target_modules=["linear1", "linear2"])
torchlift.save(Layer(64, 4).state_dict(), f"{folder}/base.safetensors")
get_peft_model(Layer(64, 4), lora).save_pretrained(f"{folder}/adapter")

model = torchlift.skeleton(Layer, 64, 4)
merge = merge_lora(f"{folder}/adapter", model)
report = torchlift.load(model, f"{folder}/base.safetensors", transform=merge)
print(f"{len(report.loaded)} weights, {type(model).__name__}")

# %%
# ``model`` is the plain class, with base + B @ A * scale in place of each weight that the adapter
# changes. A model of transformers goes the same way.
#
# Missing keys: base_layer, lora_A.default
# ----------------------------------------
#
# To train on, you need the wrapped model. It has other names than either file:

base, adapter = f"{folder}/base.safetensors", f"{folder}/adapter"


def build():
    return get_peft_model(Layer(64, 4), lora)


wrapped = torchlift.skeleton(build)
try:
    torchlift.load(wrapped, [base, adapter])
except torchlift.MismatchError as error:
    print(
        len(error.missing_keys),
        "missing,",
        len(error.unexpected_keys),
        "unexpected",
    )

# %%
# ``peft_names`` asks PEFT for the names of the adapter, and takes off those of the base what its
# wrappers add. The report says which file gave each key:

from torchlift.integrations.peft import peft_names

report = torchlift.load(wrapped, [base, adapter], rename=peft_names(wrapped))
for key, item in report.loaded.items():
    if "linear1" in key:
        print(
            key.removeprefix("base_model.model."), "from", item.path.split("/")[-1]
        )

# %%
# The adapter alone goes into a live model with ``allow_missing=["*"]``: the base's weights stay.
#
# Save the adapter alone
# ----------------------
#
# PEFT's names and PEFT's configuration make a folder that ``PeftModel.from_pretrained`` reads:

from peft import PeftModel, get_peft_model_state_dict

state = get_peft_model_state_dict(wrapped)
torchlift.save(state, f"{folder}/mine/adapter_model.safetensors")
wrapped.peft_config["default"].save_pretrained(f"{folder}/mine")


def by_peft(place):
    live = Layer(64, 4)
    torchlift.load(live, base)
    return PeftModel.from_pretrained(live, place)


assert torchlift.diff(
    by_peft(f"{folder}/mine").state_dict(), wrapped.state_dict()
).equal

# %%
# Merge into a file
# -----------------
#
# For a server that knows no adapters, in the memory of some weights:

merge = merge_lora(adapter, base)
torchlift.convert(base, f"{folder}/merged.safetensors", transform=merge)
expected = by_peft(adapter).merge_and_unload().state_dict()
print(torchlift.diff(f"{folder}/merged.safetensors", expected).equal)
assert torchlift.diff(model.state_dict(), expected).equal

# %%
# Equal to the bit. What is no plain LoRA (DoRA, PiSSA, QA-LoRA) is refused by name.
#
# Proof
# -----
#
# Twelve layers, 150 MB, an adapter for 24 of their matrices, a new process each.

# fold: How it is measured
import time

import torch


def stack():
    return torch.nn.Sequential(*[Layer(512, 8) for _ in range(12)])


torch.manual_seed(0)
every = LoraConfig(target_modules=["linear1", "linear2"], init_lora_weights=False)
get_peft_model(stack(), every).save_pretrained(f"{folder}/changes")
large, changes = f"{folder}/large.safetensors", f"{folder}/changes"
torchlift.save(stack().state_dict(), large)


def merge_and_unload():
    model = torchlift.skeleton(stack)
    torchlift.load(model, large)
    return PeftModel.from_pretrained(model, changes).merge_and_unload()


def merge_while_loading():
    model = torchlift.skeleton(stack)
    torchlift.load(model, large, transform=merge_lora(changes, model))
    return model


def merge_into_a_file():
    merge = merge_lora(changes, large)
    torchlift.convert(large, f"{folder}/sum.safetensors", transform=merge)
    return torchlift.open(f"{folder}/sum.safetensors")


def timed(way):
    start = time.perf_counter()
    tensors = way().state_dict().values()
    seconds = time.perf_counter() - start
    return seconds, sum(tensor.view(torch.int32).sum().item() for tensor in tensors)


owned, sums = {}, set()
for way in merge_and_unload, merge_while_loading, merge_into_a_file:
    child = torchlift.measure.in_child(timed, way)
    name, (seconds, total) = way.__name__, child.value
    owned[name] = child.memory.added_anonymous / 2**20
    sums.add(total)
    print(f"{name:<20} {seconds:.2f} s, anonymous peak: {owned[name]:.0f} MiB")
assert len(sums) == 1, "one result"

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 2.4))
labels = [name.replace("_", " ") for name in owned]
bars = axes.barh(labels, list(owned.values()), color=["C0", "C1", "C2"])
axes.bar_label(bars, [f"{peak:.0f} MiB" for peak in owned.values()], padding=4)
axes.axvline(torchlift.open(large).nbytes / 2**20, color="C0", linestyle=":")
axes.invert_yaxis()
axes.set(
    xlim=(0, 1.25 * max(owned.values())), xlabel="peak of anonymous memory (MiB)"
)
plt.show()

# %%
# *The most memory that a process owns while it merges an adapter; the dotted line is the size of
# the weights. A model that is merged owns what was changed; a file takes that of some weights.*
#
# Remember
# --------
#
# - Merged: ``transform=merge_lora(adapter, model)``. Beside it: ``rename=peft_names(model)``.
# - A list of files is one checkpoint, and the report says which gave each key.
# - Saved alone: PEFT's state dict and PEFT's configuration, in one folder.
#
# Use this when
# -------------
#
# - **You serve one adapter:** merge it, while loading or into a file by `torchlift.convert`.
# - **You train it, or switch between several:** `torchlift.load` with both files.
# - **Other names:** *Rename, split and merge the weights of a checkpoint, and back again*.

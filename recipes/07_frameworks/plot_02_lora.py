"""
LoRA: load an adapter beside its base, merge it while loading, save it alone
============================================================================

A base of many gigabytes and an adapter of a few megabytes come from two libraries with two layouts
of names. Do you need the wrapped model and all its memory to put them together?

No: `torchlift.load` takes both files, and a ``transform`` of a few lines adds one to the other.
"""

# %%
# In short
# --------

import tempfile

from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn import TransformerEncoderLayer as Layer

import torchlift
from torchlift.integrations.peft import peft_names

lora = LoraConfig(target_modules=r".*linear\d", init_lora_weights=False)
base, adapter = (tempfile.mkdtemp() + name for name in ("/base.pt", "/adapter"))
torchlift.save(Layer(64, 4), base)
get_peft_model(Layer(64, 4), lora).save_pretrained(adapter)

wrapped = torchlift.skeleton(lambda: get_peft_model(Layer(64, 4), lora))
report = torchlift.load(wrapped, [base, adapter], rename=peft_names(wrapped))
print(f"{len(report.loaded)} weights, {type(wrapped).__name__}")

# %%
# ``wrapped`` is PEFT's model, with the base and the adapter side by side.
#
# Missing keys: base_layer, lora_A.default
# ----------------------------------------
#
# The names of the wrapped model differ from those of both files. Without ``rename``, no name
# matches:

try:
    torchlift.load(wrapped, [base, adapter])
except torchlift.MismatchError as error:
    print(len(error.missing_keys), "names are missing")

# %%
# ``peft_names`` gets the names of the adapter from PEFT. For the base it removes the words that
# PEFT's wrappers add. The report lists the file of each key:

for key, item in report.loaded.items():
    if "linear1" in key:
        place = item.path.split("/")[-1]
        print(key.removeprefix("base_model.model."), "from", place)

# %%
# To load only the adapter into a live model, pass ``allow_missing=["*"]``. The weights of the base
# stay.
#
# LoraConfig.from_pretrained leaves nothing to train
# --------------------------------------------------
#
# The folder of an adapter also contains its configuration, so you can read it instead of writing it
# again. But PEFT marks each adapter that it saves as one for inference. Its weights are then
# frozen, and an optimizer gets no parameters, unless you set ``config.inference_mode = False``
# before you build the model:

# fold: Build it with the configuration of the folder
config = LoraConfig.from_pretrained(adapter)


def load_both():
    model = torchlift.skeleton(lambda: get_peft_model(Layer(64, 4), config))
    torchlift.load(model, [base, adapter], rename=peft_names(model))
    return sum(weight.requires_grad for weight in model.parameters())


print("to train, as it was saved:", load_both())
config.inference_mode = False
print("to train, with the mark cleared:", load_both())

# %%
# Merge the adapter while the base is loaded
# ------------------------------------------
#
# A server without support for adapters needs their sum. A plain LoRA of linear layers adds B @ A *
# scale:

import json


def lora_sum(adapter):
    """Return a transform that adds a plain LoRA to linear weights."""
    with open(f"{adapter}/adapter_config.json") as file:
        config = json.load(file)
    changes = torchlift.open(f"{adapter}/adapter_model.safetensors")
    odd = [config[k] for k in ("use_rslora", "alpha_pattern", "fan_in_fan_out")]
    odd += [k for k in changes if not k.endswith(("_A.weight", "_B.weight"))]
    if any(odd) or config["init_lora_weights"] not in (True, False):
        raise ValueError("not a plain LoRA: call merge_and_unload of PEFT")

    def add(name, weight):
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{key}A.weight" not in changes:
            return weight
        b, a = changes[f"{key}B.weight"], changes[f"{key}A.weight"]
        return weight + b @ a * (config["lora_alpha"] / len(a))

    return add


model = torchlift.skeleton(Layer, 64, 4)
report = torchlift.load(model, base, transform=lora_sum(adapter))
print(f"{len(report.loaded)} tensors loaded")

# %%
# The same transform merges into a file, in the memory of a few weights. The result equals PEFT's:


# fold: PEFT's own way, to compare with
def by_peft(place):
    live = Layer(64, 4)
    torchlift.load(live, base)
    return PeftModel.from_pretrained(live, place)


# %%

torchlift.convert(base, f"{adapter}/merged.pt", transform=lora_sum(adapter))
expected = by_peft(adapter).merge_and_unload().state_dict()
print(torchlift.diff(f"{adapter}/merged.pt", expected).equal)
assert torchlift.diff(model.state_dict(), expected).equal

# %%
# The values are equal to the bit. These lines support linear layers only. They raise an error for
# DoRA, PiSSA, embeddings and trained biases. ``merge_and_unload`` of PEFT merges those.
#
# Save the adapter alone
# ----------------------
#
# PEFT's names and PEFT's configuration make a folder that ``PeftModel.from_pretrained`` reads:

from peft import get_peft_model_state_dict

state = get_peft_model_state_dict(wrapped)
torchlift.save(state, f"{adapter}/mine/adapter_model.safetensors")
wrapped.peft_config["default"].save_pretrained(f"{adapter}/mine")
assert torchlift.diff(
    by_peft(f"{adapter}/mine").state_dict(), wrapped.state_dict()
).equal

# %%
# Proof
# -----
#
# The base has twelve layers and 150 MB, and the adapter changes 24 of its matrices. Each way runs
# in a new process.

# fold: How it is measured
import time

import torch


def stack():
    return torch.nn.Sequential(*[Layer(512, 8) for _ in range(12)])


torch.manual_seed(0)
large, changes = f"{adapter}/large.safetensors", f"{adapter}/changes"
get_peft_model(stack(), lora).save_pretrained(changes)
torchlift.save(stack().state_dict(), large)


def merge_and_unload():
    model = torchlift.skeleton(stack)
    torchlift.load(model, large)
    return PeftModel.from_pretrained(model, changes).merge_and_unload()


def merge_while_loading():
    model = torchlift.skeleton(stack)
    torchlift.load(model, large, transform=lora_sum(changes))
    return model


def merge_into_a_file():
    merged = f"{adapter}/sum.safetensors"
    torchlift.convert(large, merged, transform=lora_sum(changes))
    return torchlift.open(merged)


def timed(way):
    start = time.perf_counter()
    tensors = way().state_dict().values()
    seconds = time.perf_counter() - start
    bits = (tensor.view(torch.int32).sum().item() for tensor in tensors)
    return seconds, sum(bits)


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
texts = [f"{peak:.0f} MiB" for peak in owned.values()]
axes.bar_label(bars, texts, label_type="center", color="white")
axes.axvline(torchlift.open(large).nbytes / 2**20, color="C0", linestyle=":")
axes.invert_yaxis()
axes.set_xlabel("peak of anonymous memory (MiB)")
plt.show()

# %%
# *The bars show the most memory that a process owns while it merges an adapter. The dotted line is
# the size of the weights. A merged model owns its changed weights. Merging into a file needs only a
# few weights at a time, so it also works on a machine that cannot hold the model.*
#
# Remember
# --------
#
# - To merge: ``transform=lora_sum(adapter)``, written here. To keep both:
#   ``rename=peft_names(model)``.
# - A list of files is one checkpoint. Set ``inference_mode = False`` to train an adapter from it.
# - To save the adapter alone, put PEFT's state dict and PEFT's configuration into one folder.
#
# Use this when
# -------------
#
# - **You serve one adapter:** merge it, while loading or into a file by `torchlift.convert`.
# - **You train it, or switch between several:** `torchlift.load` with both files.
# - **Other names:** *Rename, split and merge the weights of a checkpoint, and back again*.

# %%
# Question
# --------
#
# You merge the adapter into a file that was merged already. Does an error tell you?

# fold: Answer to the question
# No. The names are those of the base again, so the change is added twice.
once, twice = f"{adapter}/merged.pt", f"{adapter}/twice.pt"
torchlift.convert(once, twice, transform=lora_sum(adapter))
key = "linear1.weight"
first, second = torchlift.open(once)[key], torchlift.open(twice)[key]
change = first - torchlift.open(base)[key]
off = (second - first - change).abs().max().item()
print(f"the change is added again, up to rounding of ~{off:.7f}")
assert off < 1e-5 < change.abs().max()

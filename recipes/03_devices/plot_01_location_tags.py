"""
The checkpoint that would not load here
=======================================

A colleague sends you a checkpoint. On your laptop, ``torch.load`` says that it needs a GPU. Why
would a file full of numbers need one, and how do you read it without?

You find the word in the file that causes it, try every form of ``map_location`` against it, and see
which of them survive a file from another machine.
"""

# %%
# A file from a machine with four GPUs
# ------------------------------------
#
# First you need such a file, and no GPU to make it. When `torch.save` meets a tensor, it asks a
# list of functions where the tensor is. Each backend has one there. The first answer is written
# into the file: the *location tag*. `torch.serialization.register_package` puts a function of
# your own in front. This one says what you want it to say.
#
# It runs in a fresh process, which ends afterwards and takes the function with it. The process
# saves a small model many times, with one tag at a time, and once with two tags. Last come two
# large files, for the measurement at the end.

import pickletools
import tempfile
import textwrap
import zipfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import torchlift
from torchlift import remap
from torchlift.measure import in_child

SAVE = """
import torch
from torch import nn

where = {}  # address of a tensor -> tag; what is not in there gets the other one
other = None

def tag(storage):
    return where.get(storage.data_ptr(), other)

def restore(storage, tag):
    return None  # the next function of the list shall see to it

torch.serialization.register_package(0, tag, restore)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
state = model.state_dict()

for other in args[1]:
    torch.save(state, f"{args[0]}/{other.replace(':', '-')}.pt")

where = {tensor.data_ptr(): "cuda:0" for tensor in model[0].parameters()}
other = "cuda:3"
torch.save(state, f"{args[0]}/two-gpus.pt")

where = {}
state = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)]).state_dict()
for other in "cpu", "cuda:3":
    torch.save(state, f"{args[0]}/large-{other.replace(':', '-')}.pt")
"""

TAGS = ["cpu", "cuda:0", "cuda:3", "mps", "xpu:0", "hpu", "npu:3"]

scratch = tempfile.TemporaryDirectory(prefix="torchlift-")
folder = Path(scratch.name)
in_child(SAVE, str(folder), TAGS)


def build():
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def file_of(tag):
    return folder / f"{tag.replace(':', '-')}.pt"


names = sorted(path.name for path in folder.iterdir())
print(textwrap.fill(", ".join(names), 76))

# %%
# These are tags as the backends write them: NVIDIA's and AMD's cards (both say ``cuda``), Apple's,
# Intel's, and two accelerators that come with packages of their own.
#
# It does not load here
# ---------------------


def show(error):
    """Print the type and the message of an error, in short lines."""
    text = f"{type(error).__name__}: {error}".replace(f"{folder}/", "")
    print(textwrap.fill(text, 76, subsequent_indent="  "))


try:
    state = torch.load(file_of("cuda:3"))
    print("This machine has such a GPU:", state["0.bias"].device)
except RuntimeError as error:
    show(error)

# %%
# `torch.load` does what the file says. It reads a tensor into host memory, as it must, and then
# puts it where it was when it was saved. On a machine with one GPU you would read another
# message, about a device number that is too high.
#
# One word per tensor
# -------------------
#
# A ``.pt`` file is a zip archive. Compare the one with the tag ``cuda:3`` to the one with the tag
# ``cpu``, record by record; one record is left out, an identifier made from the others. Then look
# for the word. ``pickletools`` lists what a pickle says without executing it.


def records(path):
    with zipfile.ZipFile(path) as archive:
        names = [
            name for name in archive.namelist() if "serialization_id" not in name
        ]
        return {name.partition("/")[2]: archive.read(name) for name in names}


here, there = records(file_of("cpu")), records(file_of("cuda:3"))
differ = [name for name in here if here[name] != there[name]]
print("same records:", here.keys() == there.keys())
print("they differ in:", differ)


def words(found):
    return [word for _, word, _ in pickletools.genops(found["data.pkl"])]


changed = [(a, b) for a, b in zip(words(here), words(there), strict=True) if a != b]
print("words that differ:", changed)

# %%
# The numbers are the same, byte for byte. One word differs. It stands beside the first storage,
# and the others refer back to it: a note of where the tensors once were. `torchlift.open` lists
# it as what it is, and touches no device.

with torchlift.open(folder / "two-gpus.pt") as ckpt:
    for entry in ckpt.entries.values():
        print(f"{entry.key:<9} {entry.shape!s:<7} saved on {entry.location}")
    print("the numbers are there:", bool(torch.isfinite(ckpt["0.weight"]).all()))

# %%
# A safetensors file has no such word. The trap exists in ``.pt`` files only.
#
# map_location, in all its forms
# ------------------------------
#
# ``map_location`` overrules the tags. It takes five kinds of values. Here is each of them together
# with what you write for `torchlift.load`. The file has two tags, ``cuda:0`` and ``cuda:3``. Every
# pair is executed, the first into a state dict and the second into a skeleton. Then all names,
# values and devices are compared.

FORMS = [
    ("None", "None"),
    ("'cpu'", "'cpu'"),
    ("torch.device('cpu')", "torch.device('cpu')"),
    (
        "{'cuda:0': 'cpu', 'cuda:3': 'cpu'}",
        "remap.by_location({'cuda:0': 'cpu', 'cuda:3': 'cpu'})",
    ),
    ("lambda storage, tag: storage", "lambda entry: 'cpu'"),
]


def by_torch(path, **options):
    return torch.load(path, **options)


def by_torchlift(path, **options):
    model = torchlift.skeleton(build)
    torchlift.load(model, path, **options)
    return model.state_dict()


def attempt(load, path, **options):
    """The state dict, or the name of the error."""
    try:
        return load(path, **options)
    except Exception as error:
        return type(error).__name__


def same(one, two):
    if isinstance(one, str) or isinstance(two, str) or one.keys() != two.keys():
        return False
    pairs = [(one[key], two[key]) for key in one]
    return all(a.device == b.device and torch.equal(a, b) for a, b in pairs)


two_gpus = folder / "two-gpus.pt"
equal = []
for form, ours in FORMS:
    one = attempt(by_torch, two_gpus, map_location=eval(form))
    two = attempt(by_torchlift, two_gpus, device=eval(ours))
    equal.append(same(one, two))
    outcome = one if isinstance(one, str) else f"equal: {equal[-1]}"
    print(f"map_location={form}\n      device={ours}\n      {outcome}")

reference = torch.load(file_of("cpu"))
ours = by_torchlift(two_gpus)
print("\nall forms but None give equal results:", all(equal[1:]))
print("no argument, torchlift: what was saved:", same(reference, ours))

# %%
# Only the first pair differs, and it is the one that you write most often. Without an argument
# torchlift takes a tag for what it is, a note. A live tensor stays on its device, and one on meta
# goes to the CPU.
#
# The callables differ in what they are told. ``map_location`` gets a storage and a tag. A
# torchlift rule gets a `torchlift.TensorEntry`: the name, the type, the shape and the bytes
# besides. So it can send a layer somewhere *by name*, which ``map_location`` cannot.
#
# Does a rule send each tensor where ``map_location`` would? With the CPU alone you cannot tell.
# But every machine has a second device, ``meta``. It holds no values, so torchlift refuses to
# load there. You can still ask a rule about an entry.


def on_meta(storage):
    return torch.UntypedStorage(storage.nbytes(), device="meta")


SPLITS = [
    (
        "{'cuda:0': 'cpu', 'cuda:3': 'meta'}",
        "remap.by_location({'cuda:0': 'cpu', 'cuda:3': 'meta'})",
    ),
    (
        "lambda storage, tag: on_meta(storage) if tag == 'cuda:3' else storage",
        "lambda entry: 'meta' if entry.location == 'cuda:3' else 'cpu'",
    ),
]

with torchlift.open(two_gpus) as ckpt:
    for form, ours in SPLITS:
        state, rule = torch.load(ckpt.path, map_location=eval(form)), eval(ours)
        went = [str(state[key].device) for key in ckpt]
        told = [rule(entry) for entry in ckpt.entries.values()]
        print(form)
        print("   ", sorted(set(went)), "the rule says the same:", told == went)

# %%
# Two forms that look right
# -------------------------
#
# A dict has to name every tag, whole. ``"cuda"`` is not short for ``"cuda:3"``. And a function
# that returns nothing does not mean "leave it": the tag is obeyed after all.

TRAPS = {
    "{'cuda': 'cpu'}": {"cuda": "cpu"},
    "lambda storage, tag: None": lambda storage, tag: None,
}
for form, map_location in TRAPS.items():
    state = attempt(by_torch, file_of("cuda:3"), map_location=map_location)
    print(f"{form}: {state if isinstance(state, str) else 'loaded'}")

rule = remap.by_location({"cuda": "cpu"})
ours = by_torchlift(file_of("cuda:3"), device=rule)
print(f"{rule}: loaded, equal: {same(ours, reference)}")

# %%
# In `torchlift.remap.by_location` the most specific tag wins, and ``"cuda"`` is about all GPUs
# that have no entry of their own. What no entry is about gets the default, and never the tag.
#
# Which spelling survives which file?
# -----------------------------------
#
# Each file in turn, in each way.

WAYS = {
    "torch.load(file)": (by_torch, {}),
    "… {'cuda': 'cpu'}": (by_torch, {"map_location": {"cuda": "cpu"}}),
    "… {'cuda:3': 'cpu'}": (by_torch, {"map_location": {"cuda:3": "cpu"}}),
    "… lambda": (by_torch, {"map_location": lambda storage, tag: storage}),
    "… 'cpu'": (by_torch, {"map_location": "cpu"}),
    "torchlift.load(model, file)": (by_torchlift, {}),
}

survives = {}
for way, (load, options) in WAYS.items():
    found = [attempt(load, file_of(tag), **options) for tag in TAGS]
    survives[way] = [same(state, reference) for state in found]
    loaded = [tag for tag, good in zip(TAGS, survives[way], strict=True) if good]
    print(f"{way:<28}", *(["all"] if loaded == TAGS else loaded))

# %%

GRAY, TEAL, RUST = "#5b6470", "#2b6f77", "#b83a16"
plt.rcParams.update({"figure.facecolor": "white", "font.size": 12})

figure, axes = plt.subplots(figsize=(7.2, 4.5), layout="constrained")
for row, good in enumerate(survives.values()):
    for column, loads in enumerate(good):
        color, text = (TEAL, "loads") if loads else (RUST, "error")
        box = plt.Rectangle(
            (column - 0.46, row - 0.42),
            0.92,
            0.84,
            color=color,
            alpha=1 if loads else 0.16,
            linewidth=0,
        )
        axes.add_patch(box)
        ink = "white" if loads else RUST
        axes.text(column, row, text, color=ink, ha="center", va="center", size=11)
axes.set(
    xlim=(-0.5, len(TAGS) - 0.5),
    ylim=(len(WAYS) - 0.5, -0.5),
    xlabel="location tag of the file",
    ylabel="how you load it",
)
axes.set_xticks(range(len(TAGS)), TAGS)
axes.set_yticks(range(len(WAYS)), WAYS)
axes.get_yticklabels()[-1].set_weight("bold")
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plt.show()

# %%
# *Seven files with the same numbers and different tags, loaded on a machine without accelerators.
# The dots stand for* ``torch.load(file, map_location=...)``. *Without an argument,*
# ``torch.load`` *needs the device that the tag names.* Only what ignores the tags works for every
# file.
#
# Why everybody writes "cpu", then moves
# --------------------------------------
#
# First ``torch.load(file, map_location="cpu")``, then ``load_state_dict`` into a model on its
# device. This has been the answer for years, for three reasons.
#
# 1. Every machine has a CPU.
# 2. On a GPU the state dict would stand *beside* the model, in the memory that you have least of.
# 3. Started on eight ranks, a file with the tag ``cuda:0`` sends all eight copies to the first
#    GPU.
#
# It works. But a copy of the checkpoint stands in host memory, only to be copied on. You can
# measure that here, with 64 MiB and a model that is there before the clock starts. Beside it:
# does a tag change what torchlift takes? The file says ``cuda:3``. A twin with the same numbers
# says ``cpu``.

SETUP = """
import torch
import torchlift
from torch import nn

def build():
    return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)])

torchlift.load, torchlift.skeleton
live = build() if args[1] == "live" else None
"""

FIRST_CPU = """
state = torch.load(args[0], map_location="cpu")
live.load_state_dict(state)
"""

LIVE = """
torchlift.load(live, args[0])
"""

READ = """
model = torchlift.skeleton(build)
torchlift.load(model, args[0], source="read")
"""

tagged, twin = str(folder / "large-cuda-3.pt"), str(folder / "large-cpu.pt")
RUNS = {
    "a live model, CPU first": (FIRST_CPU, tagged, "live"),
    "a live model, torchlift": (LIVE, tagged, "live"),
    "a skeleton, read, cuda:3": (READ, tagged, "skeleton"),
    "a skeleton, read, cpu": (READ, twin, "skeleton"),
}

MIB = 2**20
with torchlift.open(tagged) as ckpt:
    size = ckpt.nbytes
    print(
        f"checkpoint: {size / MIB:.0f} MiB,",
        {e.location for e in ckpt.entries.values()},
    )

peak = {}
for run, (code, *arguments) in RUNS.items():
    peak[run] = in_child(code, *arguments, setup=SETUP).memory.added_anonymous
    print(f"{run:<24} anonymous peak: {peak[run] / MIB:5.1f} MiB")

first, live, read, read_twin = peak.values()
print("CPU first takes one copy on top of the model:", 0.95 < first / size < 1.2)
print("torchlift takes below 0.1x on top of it:", live / size < 0.1)
print("read into a skeleton, below 1.1x:", read / size < 1.1)
print("the tag changes that by less than 4 MiB:", abs(read - read_twin) < 4 * MIB)
scratch.cleanup()

# %%
# A live model is filled from the mapped file, one tensor after the other, so there is no state
# dict to wait in between. And a tag costs nothing, because nobody obeys it.
#
# What to remember
# ----------------
#
# - A location tag is one word per storage: where it was when it was saved. The numbers are the
#   same whatever it says.
# - ``torch.load`` obeys the tag unless you say otherwise. That is why the same line works on one
#   machine and fails on another.
# - A dict for ``map_location`` matches whole tags only, and a function that returns None obeys
#   the tag.
# - "CPU first, then move" is safe, and takes one copy of the checkpoint in host memory.
#
# What to use when
# ----------------
#
# - **Plain PyTorch, a file from anywhere:** ``map_location="cpu"``, together with ``mmap=True``.
# - **A model to load into:** `torchlift.load`, with no argument about devices.
# - **You want to know where a file comes from:** `torchlift.open`, and look at ``location`` of
#   its entries.
# - **You want to keep a layout, on other devices:** `torchlift.remap.by_location`. The next
#   recipe shows it.
# - **You save for others:** safetensors, which has no tags.

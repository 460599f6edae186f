"""
Linear memory by hand, and where it breaks
==========================================

You read somewhere that loading needs no second copy: put the model on the meta device, walk over
the checkpoint, set one parameter after the other. A few lines, no library. Is that all there is?

For memory, yes. For everything else that a module is made of, no. You write the loop, measure it,
and then see eight small models on which it fails.
"""

# %%
# The loop
# --------
#
# A key such as ``layers.3.weight`` is a path: everything before the last dot is the submodule that
# owns the tensor, the rest is its name there. So the loop writes itself. The model goes to the meta
# device, which keeps shapes and drops the memory. The checkpoint is mapped, so that nothing is read
# before its turn. Each tensor is copied out of the map and set.

import inspect
import tempfile
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import torchlift
from torchlift.bench import Stack, make_checkpoint
from torchlift.measure import in_child


def load_by_hand(make, path):
    model = make().to("meta")
    state = torch.load(path, mmap=True)
    for key, tensor in state.items():
        owner, name = key.rsplit(".", 1)
        setattr(model.get_submodule(owner), name, nn.Parameter(tensor.clone()))
    return model


# %%
# Try it on a stack of linear layers.

scratch = tempfile.TemporaryDirectory(prefix="torchlift-")
folder = Path(scratch.name)

size = make_checkpoint(folder / "stack.pt", nbytes=256 << 20, tensors=6)
nbytes = torchlift.open(folder / "stack.pt").nbytes

model = load_by_hand(lambda: Stack(*size), folder / "stack.pt")
state = torch.load(folder / "stack.pt", mmap=True)

print(f"checkpoint: {nbytes / 2**20:.0f} MiB in {len(state)} tensors")
pairs = zip(model.state_dict().values(), state.values(), strict=True)
print(
    "every weight is there:", all(torch.equal(one, other) for one, other in pairs)
)
del model, state, pairs

# %%
# Its memory
# ----------
#
# Now the same in fresh processes, with the memory that each one owns sampled from outside. Plain
# loading is there to compare with, and so are the two lines that this recipe ends with. The child
# gets the source of the very function that you just read.

ways = {
    "plain": """
        model = Stack(*size)
        use.mark("built")
        model.load_state_dict(torch.load(path))
    """,
    "by hand": "model = load_by_hand(lambda: Stack(*size), path)",
    "torchlift, read": """
        model = torchlift.skeleton(Stack, *size)
        torchlift.load(model, path, source="read")
    """,
    "torchlift, mmap": """
        model = torchlift.skeleton(Stack, *size)
        torchlift.load(model, path)
    """,
}
setup = f"""
import torch, torchlift
from torch import nn
from torchlift.bench import Stack

path, size = args
torchlift.load, torchlift.skeleton  # imports that shall not be measured

{inspect.getsource(load_by_hand)}
"""

path = str(folder / "stack.pt")
runs = {}
for way, code in ways.items():
    runs[way] = in_child(textwrap.dedent(code), path, size, setup=setup)

for way, run in runs.items():
    print(f"{way:16} anonymous peak: {run.memory.added_anonymous / 2**20:5.0f} MiB")

peak = {way: run.memory.added_anonymous / nbytes for way, run in runs.items()}
print()
print("plain: peak above 1.9x the checkpoint:", peak["plain"] > 1.9)
print("by hand: peak below 1.2x the checkpoint:", peak["by hand"] < 1.2)
print(
    "torchlift, read: peak below 1.2x the checkpoint:",
    peak["torchlift, read"] < 1.2,
)
print(
    "torchlift, mmap: peak below 0.1x the checkpoint:",
    peak["torchlift, mmap"] < 0.1,
)

# %%

GRAY, INK, TEAL, RUST = "#5b6470", "#20262e", "#2b6f77", "#b83a16"
plt.rcParams.update({"figure.facecolor": "white", "font.size": 12})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})
style = {
    "plain": {"color": GRAY, "linewidth": 2},
    "by hand": {"color": INK, "linewidth": 3},
    "torchlift, read": {"color": TEAL, "linewidth": 2.5},
    "torchlift, mmap": {"color": RUST, "linewidth": 3.5},
}

MIB = 2**20
figure, axes = plt.subplots(figsize=(7.2, 4.5), layout="constrained")
end = 1.05 * max(run.memory.seconds for run in runs.values())
for way, run in runs.items():
    base = run.memory.baseline.anonymous
    seconds = [sample.seconds for sample in run.memory.timeline]
    added = [(sample.anonymous - base) / MIB for sample in run.memory.timeline]
    axes.plot(
        seconds[-1:], added[-1:], "o", markersize=9, color=style[way]["color"]
    )
    # What the process has at the end it keeps: go on to the edge of the picture.
    axes.plot([*seconds, end], [*added, added[-1]], label=way, **style[way])
axes.set(
    xlabel="time since the start (s)",
    ylabel="anonymous memory added (MiB)",
    xlim=(-0.01 * end, end),
    ylim=(-16, 2.6 * nbytes / MIB),
    yticks=[0, nbytes / MIB, 2 * nbytes / MIB],
)
axes.grid(axis="y", color="#dddddd")
axes.legend(frameon=False, loc="upper left", ncols=2)
plt.show()

# %%
# *Memory that the process owns, over time; a dot is a finished load.* Plain loading climbs to one
# copy while it builds, and to two while the state dict lies beside the model. The loop climbs to
# one copy twice: construction takes it once, for initial values that ``.to("meta")`` throws away,
# and then the weights grow into the freed space, one parameter at a time. A `torchlift.skeleton`
# leaves the first hill out, and with the weights mapped there is no hill at all.
#
# So the loop keeps its promise. Now look at what it does to the model.
#
# One tiny model per case
# -----------------------
#
# Each model below has one property that real models have. Its weights are saved, loaded both ways,
# and checked. A check says what it found, and whether that is right.


def load_with_torchlift(make, path, **options):
    model = torchlift.skeleton(make)
    torchlift.load(model, path, **options)
    return model


def show(error):
    text = f"{type(error).__name__}: {error}".replace(f"{folder}/", "")
    return textwrap.fill(text.splitlines()[0], 76, subsequent_indent=" " * 4)


def on_meta(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, tensor in tensors if tensor.is_meta]


matrix = {}


def try_both(case, make, check, **options):
    saved = make()
    path = folder / "case.pt"
    torch.save(saved.state_dict(), path)
    for way, load in {
        "by hand": load_by_hand,
        "torchlift": load_with_torchlift,
    }.items():
        try:
            model = load(make, path, **(options if way == "torchlift" else {}))
            right, found = check(model, saved)
        except Exception as error:
            right, found = False, show(error)
        matrix.setdefault(case, {})[way] = right
        print(f"{way}: {'right' if right else 'WRONG'}\n    {found}")


# %%
# A parameter of the root module
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
#
# Its key has no dot, so the loop stops there.


class Rooted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.rand(2))


def scale_is_loaded(model, saved):
    right = torch.equal(model.scale, saved.scale)
    return right, f"scale is on {model.scale.device}"


try_both("parameter of the root", Rooted, scale_is_loaded)

# %%
# You can patch that one: ``rpartition`` instead of ``rsplit`` gives an empty owner, and
# ``get_submodule("")`` is the model itself. Do it, so that the next cases get their chance.


def load_by_hand(make, path):
    model = make().to("meta")
    state = torch.load(path, mmap=True)
    for key, tensor in state.items():
        owner, _, name = key.rpartition(".")
        setattr(model.get_submodule(owner), name, nn.Parameter(tensor.clone()))
    return model


patched = load_by_hand(Rooted, folder / "case.pt")
print("patched, the loop loads the root's parameter:", not on_meta(patched))

# %%
# A persistent buffer
# ~~~~~~~~~~~~~~~~~~~
#
# Running statistics, masks and position tables are in the state dict, but they are not parameters.
# The loop makes them parameters, and nothing complains. From then on an optimizer trains your
# running mean.


class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.rand(2))

    def forward(self, x):
        return self.linear(x - self.mean)


def mean_is_a_buffer(model, saved):
    kind = "parameter" if "mean" in dict(model.named_parameters()) else "buffer"
    right = kind == "buffer" and torch.equal(model.mean, saved.mean)
    return right, f"mean is a {kind}"


try_both("persistent buffer", Centered, mean_is_a_buffer)

# %%
# A non-persistent buffer
# ~~~~~~~~~~~~~~~~~~~~~~~
#
# Rotary frequencies and causal masks are computed by the constructor and kept out of the
# checkpoint. ``.to("meta")`` destroyed them, and no key brings them back. A skeleton remembers how
# each tensor was made, so `torchlift.load` makes them again.


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        inv_freq = 10_000.0 ** -(torch.arange(0, 4) / 4)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x):
        return self.linear(x) * self.inv_freq


def it_computes_the_same(model, saved):
    x = torch.ones(1, 4)
    equal = torch.equal(model(x), saved(x))
    return equal, f"output equals the saved model's: {equal}"


try_both("non-persistent buffer", Rotary, it_computes_the_same)

# %%
# Tied weights
# ~~~~~~~~~~~~
#
# An output layer that shares its weight with the embedding is one tensor under two names. The file
# holds both names. The loop makes two parameters, and the first training step drives them apart.


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 2)
        self.head = nn.Linear(2, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, token):
        return self.head(self.embed(token))


def it_stays_tied_in_training(model, saved):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    equal = torch.equal(model.embed.weight, model.head.weight)
    count = len(list(model.parameters()))
    found = f"number of parameters: {count}, equal after one step: {equal}"
    return equal and count == 1, found


try_both("tied weights", Tied, it_stays_tied_in_training)

# %%
# requires_grad
# ~~~~~~~~~~~~~
#
# You freeze a part of the model, then you load. ``nn.Parameter(...)`` asks for gradients unless
# told otherwise, so the frozen part thaws. Whether a parameter is trained is a property of the
# model, not of the file: the model's answer has to survive.


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(2, 2).requires_grad_(False)
        self.head = nn.Linear(2, 2)


def the_backbone_is_frozen(model, saved):
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    right = trained == ["head.weight", "head.bias"]
    return right, f"trained: {', '.join(trained)}"


try_both("requires_grad", Frozen, the_backbone_is_frozen)

# %%
# Integer tensors
# ~~~~~~~~~~~~~~~
#
# Counters, token ids and quantized weights cannot have gradients, so the loop cannot even wrap
# them. Every batch norm has such a tensor.


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.norm.num_batches_tracked.fill_(7)


def the_counter_is_loaded(model, saved):
    count = model.norm.num_batches_tracked
    return (
        count.dtype == torch.int64 and count.item() == 7,
        f"counter: {count.item()}, {count.dtype}",
    )


try_both("integer tensor", Counted, the_counter_is_loaded)

# %%
# A key that the file lacks
# ~~~~~~~~~~~~~~~~~~~~~~~~~
#
# You add a head for a new task, and load what you have. The loop walks over the file, so it never
# learns that a parameter of the model got nothing. It returns without a word, and the model fails
# when you use it.


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 2)


class WithHead(Backbone):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 1)


torch.save(Backbone().state_dict(), folder / "backbone.pt")

model = load_by_hand(WithHead, folder / "backbone.pt")
print("by hand: returns, and leaves on meta:", ", ".join(on_meta(model)))
matrix["missing key"] = {"by hand": not on_meta(model)}
try:
    model.to("cpu")
except NotImplementedError as error:
    print(f"    {show(error)}")

# %%
# `torchlift.load` compares the names first. By default it refuses, before anything has changed,
# with one error that lists all that is missing. With ``allow_missing`` you say which names you
# know of: it loads what is there, and makes the rest as the constructor would have.

model = torchlift.skeleton(WithHead)
try:
    torchlift.load(model, folder / "backbone.pt")
except torchlift.MismatchError as error:
    print(show(error))
    refused = len(on_meta(model)) == 4
print("refused, and nothing has changed:", refused)

report = torchlift.load(model, folder / "backbone.pt", allow_missing=["head.*"])
print("allow_missing replays:", ", ".join(report.replayed))
print("nothing is left on meta:", not on_meta(model))
matrix["missing key"]["torchlift"] = refused and not on_meta(model)

# %%
# A wrong shape
# ~~~~~~~~~~~~~
#
# The loop sets whatever comes. A layer that says it has 2 outputs now holds 3.

torch.save(nn.Sequential(nn.Linear(2, 3)).state_dict(), folder / "wider.pt")


def make():
    return nn.Sequential(nn.Linear(2, 2))


model = load_by_hand(make, folder / "wider.pt")
layer = model[0]
shape = list(layer.weight.shape)
print(f"by hand: out_features={layer.out_features}, weight of shape {shape}")
matrix["wrong shape"] = {"by hand": layer.weight.shape == (2, 2)}

model = torchlift.skeleton(make)
try:
    torchlift.load(model, folder / "wider.pt")
except torchlift.MismatchError as error:
    print(show(error))
    matrix["wrong shape"]["torchlift"] = model[0].weight.shape == (2, 2)

# %%
# All of it at a glance
# ---------------------
#
# The picture is drawn from the checks above.

# sphinx_gallery_thumbnail_number = 2
figure, axes = plt.subplots(figsize=(7.2, 4.5), layout="constrained")
columns = ["by hand", "torchlift"]
for row, outcome in enumerate(matrix.values()):
    if row % 2 == 0:
        axes.axhspan(row - 0.5, row + 0.5, color="#f3f1ee", linewidth=0)
    for column, way in enumerate(columns):
        sign, color = ("✓", TEAL) if outcome[way] else ("✗", RUST)
        axes.text(column, row, sign, color=color, size=24, ha="center", va="center")
axes.set(
    xlim=(-0.5, 1.5),
    ylim=(len(matrix) - 0.5, -0.5),
    xlabel="way to load",
    ylabel="case",
)
axes.set_xticks(range(len(columns)), columns, weight="bold", size=14)
axes.set_yticks(range(len(matrix)), matrix, size=13)
axes.xaxis.tick_top()
axes.xaxis.set_label_position("top")
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
plt.show()

# %%
# *What each way does with each case: ✓ loads it right, or refuses before anything changes; ✗ does
# neither.*

for way in columns:
    right = sum(outcome[way] for outcome in matrix.values())
    print(f"{way}: {right} of {len(matrix)} cases right")

# %%
# None of these is exotic. A language model with rotary positions and a tied head has three of them
# before you fine-tune it.
#
# What to remember
# ----------------
#
# - A loop over a mapped checkpoint needs the memory of one copy. That part is easy.
# - Each case has a patch. All the patches together are a loader.
# - Half of the failures are silent: a buffer becomes a parameter, a tie comes apart, frozen weights
#   thaw, a shape is wrong. The model runs, and trains wrong.
# - A checkpoint does not hold a whole model. Names, ties, ``requires_grad`` and non-persistent
#   buffers live in the code, so whoever loads has to look at the model, not only at the file.
#
# What to use when
# ----------------
#
# - **You load a model of your own that has parameters only, all in submodules, untied:** the loop
#   is fine.
# - **Anything else:** `torchlift.skeleton` and `torchlift.load`. Two lines, one copy or none, and
#   all of it or nothing.
# - **You want to know first:** `torchlift.plan` lists names, ties and what would be replayed, and
#   changes nothing.

scratch.cleanup()

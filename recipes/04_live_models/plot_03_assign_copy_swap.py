"""
assign, copy or swap?
=====================

There are three ways to get a value into a parameter, and both torch and torchlift offer all of
them. Your model is live: it has an optimizer, gradients, a tied weight. Which way keeps what?

You put eight ways of loading through the same checks, measure their memory in fresh processes, and
get one picture to decide by.
"""

# %%
# The three ways
# --------------
#
# - **copy** writes the new values into the memory of the parameter.
# - **assign** puts a new parameter into the module.
# - **swap** gives the parameter, which stays the same Python object, the memory of the new one.
#
# Torch has copy by default, assign as ``assign=True``, and swap behind a flag, in two variants:
# `torchlift.swap.preserving_references` sets the flag. In `torchlift.load` they are three modes,
# and ``"auto"`` chooses for each tensor.

import tempfile
import textwrap
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import torchlift
from torchlift import swap


def by_torch(model, path, *, flag=False, assign=False, dtype=None):
    state = torch.load(path, mmap=True)
    if flag:
        with swap.preserving_references():
            model.load_state_dict(state, assign=assign)
    else:
        model.load_state_dict(state, assign=assign)


def by_torchlift(model, path, **options):
    torchlift.load(model, path, **options)


WAYS = {
    "torch copy": (by_torch, {}),
    "torch assign": (by_torch, {"assign": True}),
    "torch swap": (by_torch, {"flag": True}),
    "torch swap, assign": (by_torch, {"flag": True, "assign": True}),
    "torchlift copy": (by_torchlift, {"mode": "copy"}),
    "torchlift assign": (by_torchlift, {"mode": "assign"}),
    "torchlift swap": (by_torchlift, {"mode": "swap"}),
    "torchlift auto": (by_torchlift, {"mode": "auto"}),
}

# %%
# A model with a past
# -------------------
#
# Small, and with everything that a load can break: two names for one weight, gradients, and an
# optimizer that has taken a step.


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, token):
        return self.head(torch.tanh(self.mix(self.embed(token))))


def live():
    """A model in the middle of training, and its optimizer."""
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    return model, optimizer


def backward(model):
    model(torch.arange(8)).square().sum().backward()


scratch = tempfile.TemporaryDirectory(prefix="torchlift-")
folder = Path(scratch.name)
torch.manual_seed(0)
saved = Language().state_dict()
torch.save(saved, folder / "model.pt")

halved = {key: tensor.to(torch.bfloat16) for key, tensor in saved.items()}
torch.save(halved, folder / "bfloat16.pt")

wrong = {**saved, "mix.bias": torch.zeros(5)}  # four numbers in the model
torch.save(wrong, folder / "wrong.pt")

# %%
# The checks
# ----------
#
# Each check makes a new model, loads, and looks. It returns whether what you would hope for came
# true. The first one is about the values, which every way has to get right.


def loads_the_values(load):
    model, _ = live()
    load(model, folder / "model.pt")
    now = model.state_dict()
    return all(torch.equal(now[key], tensor) for key, tensor in saved.items())


def same_objects(load):
    model, _ = live()
    before = list(model.parameters())
    load(model, folder / "model.pt")
    pairs = zip(before, model.parameters(), strict=True)
    return all(one is two for one, two in pairs)


def optimizer_trains_it(load):
    model, optimizer = live()
    load(model, folder / "model.pt")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    pairs = zip(before, model.parameters(), strict=True)
    return not any(torch.equal(old, new) for old, new in pairs)


def tie_holds(load):
    model, _ = live()
    load(model, folder / "model.pt")
    return model.head.weight is model.embed.weight


def gradient_stays(load):
    model, _ = live()
    load(model, folder / "model.pt")
    return all(parameter.grad is not None for parameter in model.parameters())


def hooks_stay(load):
    model, _ = live()
    called = []
    for parameter in model.parameters():
        parameter.register_hook(called.append)
    load(model, folder / "model.pt")
    backward(model)
    return len(called) == 3


def view_follows(load):
    """Somebody has three rows of the embedding, and wants the new values."""
    model, _ = live()
    rows = model.embed.weight.detach()[:3]
    load(model, folder / "model.pt")
    return torch.equal(rows, saved["embed.weight"][:3])


def dtype_changes(load):
    """The model is float32, the file is bfloat16, and you want bfloat16."""
    model, _ = live()
    load(model, folder / "bfloat16.pt", dtype=torch.bfloat16)
    return all(p.dtype == torch.bfloat16 for p in model.parameters())


def fills_meta(load):
    with torch.device("meta"):
        model = Language()
    load(model, folder / "model.pt")
    return not any(parameter.is_meta for parameter in model.parameters())


def all_or_nothing(load):
    """One shape in the file is wrong."""
    model, _ = live()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        load(model, folder / "wrong.pt")
    except (RuntimeError, torchlift.MismatchError):
        now = model.state_dict()
        return all(torch.equal(now[key], before[key]) for key in before)
    return False


CHECKS = [
    same_objects,
    optimizer_trains_it,
    tie_holds,
    gradient_stays,
    hooks_stay,
    view_follows,
    dtype_changes,
    fills_meta,
    all_or_nothing,
]

# %%
# There are two kinds of no. A way may refuse, with an error and before it has changed anything. Or
# it does something else than you hoped for, and you find out later. The table tells them apart:
# ``refuses`` is the first kind, and ``-`` is the second one.


def run(check, way):
    function, options = WAYS[way]

    def load(model, path, **more):
        function(model, path, **options, **more)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns for meta, and goes on
            good = check(load)
    except torchlift.PlacementError as error:
        reasons[way, check.__name__] = error
        return "refuses"
    return "yes" if good else "-"


reasons = {}
right = [run(loads_the_values, way) == "yes" for way in WAYS]
print("all eight load the values:", all(right))

table = {}
for way in WAYS:
    table[way] = {check.__name__: run(check, way) for check in CHECKS}
width = max(len(check.__name__) for check in CHECKS)
for group in ("torch", "torchlift"):
    ways = [way for way in WAYS if way.split()[0] == group]
    names = [way.removeprefix(f"{group} ") for way in ways]
    header = "".join(f"{name:<9}" for name in names)
    print(f"\n{group:<{width + 1}}{header}".rstrip())
    for check in CHECKS:
        row = "".join(f"{table[way][check.__name__]:<9}" for way in ways)
        print(f"{check.__name__:<{width + 1}}{row}".rstrip())

# %%
# Read it line by line.
#
# - **Assign** makes new objects, so all that hangs on an object is lost: the optimizer, the
#   gradient, the hooks. Torch's also unties. That is no fault of assign in a script that builds the
#   optimizer afterwards.
# - **Torch's swap** keeps the objects, but the gradient and the hooks go with the old content.
#   Without ``assign=True`` it copies first, and then exchanges the parameter with itself: this is
#   why a view follows, and why the dtype does not change.
# - **A failed load** of torch leaves a model that is neither the old nor the new one, in every
#   variant. It loads what fits, and raises at the end.
#
# What refuses, says why:

for (way, check), error in reasons.items():
    print(f"{way}, {check}:")
    text = str(error).partition("; found")[0]
    print(textwrap.indent(textwrap.fill(text, 72), "    "))

# %%
# Auto is never among them. It decides for each tensor, and the report tells you how:


def modes(model, path, **options):
    report = torchlift.load(model, folder / path, **options)
    return ", ".join(sorted(set(report.mode.values())))


model, _ = live()
print("a live model:", modes(model, "model.pt"))
print("another dtype:", modes(model, "bfloat16.pt", dtype=torch.bfloat16))
print("on meta:", modes(torchlift.skeleton(Language), "model.pt"))

# %%
# What it costs
# -------------
#
# Now 128 MiB of weights. Each process builds the model, keeps a list of its parameters as an
# optimizer does, and loads. The peak counts from before the model is built. What is left after the
# load is the second number: a swapped or assigned weight is mapped from the file, and the memory of
# the old one is free, unless somebody holds it. For a live model torchlift maps nothing by itself,
# because a file that is overwritten in place takes what is mapped with it: ask for it, with
# ``source="mmap"``.

SETUP = """
import torch
from torch import nn
import torchlift
from torchlift import load, swap

torch.set_num_threads(1)  # two processes share the machine

def build():
    layers = [nn.Linear(2048, 2048, bias=False) for _ in range(8)]
    return nn.Sequential(*layers)
"""

BUILD = """
path, options = args
model = build()
held = list(model.parameters())
"""

LOAD = {
    by_torch: """
flag = options.pop("flag", False)
state = torch.load(path, mmap=True)
if flag:
    with swap.preserving_references():
        model.load_state_dict(state, **options)
else:
    model.load_state_dict(state, **options)
del state
use.mark("loaded")
""",
    by_torchlift: """
load(model, path, source="mmap", **options)
use.mark("loaded")
""",
}

MIB = 2**20
large = str(folder / "large.pt")
weights = {f"{row}.weight": torch.full((2048, 2048), 0.5) for row in range(8)}
torch.save(weights, large)
size = sum(tensor.nbytes for tensor in weights.values())
del weights


def measure(way):
    function, options = WAYS[way]
    code = BUILD + LOAD[function]
    finish = "result = sum(p.eq(0.5).all().item() for p in model.parameters())"
    return torchlift.measure.in_child(
        code,
        large,
        options,
        setup=SETUP,
        finish=finish,
    )


with ThreadPoolExecutor(2) as pool:  # each measures its own process
    children = dict(zip(WAYS, pool.map(measure, WAYS), strict=True))

peak, left = {}, {}
for way, child in children.items():
    use = child.memory
    peak[way] = use.added_anonymous / size
    left[way] = (use.marks[0].anonymous - use.baseline.anonymous) / size
    after = abs(left[way]) * size / MIB
    print(f"{way:<19} anonymous peak: {peak[way] * size / MIB:5.1f} MiB", end="   ")
    print(f"anonymous after: {after:5.1f} MiB")

print("all loaded the same:", {child.value for child in children.values()} == {8})
print("no way needs a second copy:", max(peak.values()) < 1.25)
for way in ("torch swap, assign", "torchlift swap"):
    print(f"{way}, nothing is left:", left[way] < 0.1)
for way in ("torch assign", "torchlift assign"):
    print(f"{way}, the ghosts are left:", 0.9 < left[way] < 1.1)

# %%
# With a mapped file no way takes a second copy. The differences are in what is left. After an
# assign the optimizer still holds the old weights, and with them their memory: ghosts have a
# weight. Swapped weights are in the file, and your process owns nothing, until somebody writes to
# them, as training does:

WRITE = """
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(1)
use.mark("written")
"""

code = BUILD + LOAD[by_torchlift] + WRITE
use = torchlift.measure.in_child(code, large, {"mode": "swap"}, setup=SETUP).memory
before = use.baseline.anonymous
swapped, written = ((mark.anonymous - before) / size for mark in use.marks)
print(f"swapped, anonymous after: {abs(swapped) * size / MIB:5.1f} MiB")
print(f"written, anonymous after: {written * size / MIB:5.1f} MiB")
print("the copy comes back when it is written to:", swapped < 0.1 < 0.9 < written)

# %%
# So for training copy and swap end alike. For a model that only computes, a mapped swap is the way
# that frees memory, as long as nobody overwrites the file.
#
# The picture
# -----------

GRAY, TEAL, RUST = "#5b6470", "#2b6f77", "#b83a16"
plt.rcParams.update({"figure.facecolor": "white", "font.size": 12})

MARKS = {"yes": ("o", TEAL), "refuses": ("D", GRAY), "-": ("x", RUST)}
MEANS = {
    "yes": "yes",
    "refuses": "refuses, changes nothing",
    "-": "no",
}

figure, (grid, bars) = plt.subplots(
    1,
    2,
    figsize=(7.2, 4.8),
    width_ratios=[2.2, 1],
    sharey=True,
    layout="constrained",
)
for answer, (marker, color) in MARKS.items():
    cells = [
        (column, row)
        for row, way in enumerate(WAYS)
        for column, check in enumerate(CHECKS)
        if table[way][check.__name__] == answer
    ]
    grid.scatter(
        *zip(*cells, strict=True),
        marker=marker,
        color=color,
        s=90,
        linewidth=3 if marker == "x" else 0,
        label=MEANS[answer],
    )
grid.axhline(3.5, color=GRAY, linewidth=1, linestyle=":")
labels = [check.__name__.replace("_", " ") for check in CHECKS]
turned = {"rotation": 45, "ha": "left", "rotation_mode": "anchor"}
grid.set_xticks(range(len(CHECKS)), labels, **turned)
grid.xaxis.tick_top()
for label in grid.get_xticklabels()[-3:]:
    label.set_in_layout(False)  # they may lean over the bars
grid.set_yticks(range(len(WAYS)), list(WAYS))
grid.set(xlim=(-0.6, len(CHECKS) - 0.4), ylim=(len(WAYS) - 0.5, -0.5))
grid.set_xlabel("what you would hope for")
grid.tick_params(length=0)

bars.barh(list(WAYS), peak.values(), color=GRAY, alpha=0.35, height=0.6)
bars.barh(list(WAYS), left.values(), color=GRAY, height=0.6)
bars.axhline(3.5, color=GRAY, linewidth=1, linestyle=":")
bars.set(xlim=(0, 1.2), xticks=[0, 1], xlabel="memory (copies)")
bars.tick_params(axis="y", length=0)
for axes in (grid, bars):
    axes.spines[:].set_visible(False)
bars.spines["bottom"].set_visible(True)
figure.legend(loc="outside lower left", ncols=3, frameon=False, columnspacing=1)
plt.show()
scratch.cleanup()

# %%
# *Left: nine checks for each way to load. Right: memory that the process owns, in copies of the
# checkpoint; the lighter shade is the peak, the darker one what is left after the load.* There is
# one row without a cross and without a diamond.

spotless = [way for way in WAYS if set(table[way].values()) == {"yes"}]
silent = [way for way in WAYS if "-" not in table[way].values()]
print("yes to everything:", ", ".join(spotless))
print("no cross:", ", ".join(silent))

# %%
# What to remember
# ----------------
#
# - Copy keeps everything, and cannot change a dtype, a device, or fill meta by itself.
# - Assign keeps nothing that hangs on an object. It needs no memory of its own, and it frees none
#   as long as an optimizer holds the old weights.
# - Swap keeps the object and changes all of its content. It is the only way that takes a new dtype
#   and keeps the optimizer.
# - A load that fails must not change the model. Torch's does, in every variant.
#
# What to use when
# ----------------
#
# - **You do not want to think about it:** ``mode="auto"``, the default.
# - **A live model, memory to be freed or a new dtype:** ``mode="swap"``. It refuses what it cannot
#   keep.
# - **The memory must stay where it is,** because a graph, a view or another process has its
#   address: ``mode="copy"``.
# - **Nobody holds the model yet, or you want new objects:** ``mode="assign"``.

"""
Quantise while loading
======================

Your weights are float32, and you want to serve them in int8, a quarter of the size. The code that
you write first loads the whole model in float32, and shrinks it afterwards. So you need the memory
that you wanted to save. Can the weights become small on the way in?

You write a small tensor subclass, tell torchlift how it is loaded, and measure memory and error
against the usual way.
"""

# %%
# A weight in int8
# ----------------
#
# The idea is old. Each row of a weight gets a scale, its largest value divided by 127. Divide by
# the scale, round, and each number fits into one byte. To compute, multiply again.
#
# In torch, such a weight is a *wrapper subclass*: a tensor that says it has a shape and a dtype,
# and keeps its data in two other tensors. This is about the smallest one that works in a layer.
#
# - ``__new__`` makes the outside: a tensor without memory of its own.
# - ``__torch_dispatch__`` is asked whenever torch computes with it. Detaching and cloning keep it
#   int8. Whatever else comes gets floats, made for this one operation.
#
# The definitions are functions, so that the processes that are measured later can be given the same
# text.

import inspect
import tempfile
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import torchlift
from torchlift import swap


def define():
    class Int8(torch.Tensor):
        @staticmethod
        def __new__(cls, levels, scale):
            return torch.Tensor._make_wrapper_subclass(
                cls, levels.shape, dtype=scale.dtype, device=scale.device
            )

        def __init__(self, levels, scale):
            self.levels, self.scale = levels, scale

        def floats(self):
            return self.levels * self.scale

        __torch_function__ = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            aten = torch.ops.aten
            if func in (aten.detach.default, aten.clone.default):
                return cls(func(args[0].levels), func(args[0].scale))
            args = [a.floats() if isinstance(a, cls) else a for a in args]
            return func(*args, **(kwargs or {}))

    return Int8


def quantise(weight):
    """A scale for each row; the largest number of a row becomes 127 or -127."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return Int8((weight / scale).round_().to(torch.int8), scale)


Int8 = define()


def off(small, weight):
    """The largest error, in levels."""
    return ((small.floats() - weight).abs() / small.scale).max().item()


weight = torch.tensor([[0.304, -1.27, 0.022], [0.003, 0.0127, 0.001]])
small = quantise(weight)
print(small.levels)
print("off by half a level at most:", off(small, weight) <= 0.501)

# %%
# A skeleton that is int8
# -----------------------
#
# `torchlift.skeleton` gives you the model without memory. Replace the weights of its linear layers
# by int8 ones, still without memory. The biases stay what they are: they are small, and they are
# added, not multiplied.


def int8_skeleton(build):
    model = torchlift.skeleton(build)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            rows, columns = layer.weight.shape
            blank = Int8(
                torch.empty(rows, columns, dtype=torch.int8, device="meta"),
                torch.empty(rows, 1, device="meta"),
            )
            layer.weight = nn.Parameter(blank, requires_grad=False)
    return model


# %%
# The file is a plain float32 checkpoint, from a network that learned a wavy surface. Nobody who
# wrote it thought of int8.

torch.set_num_threads(1)  # small tensors: more threads would only wait
torch.manual_seed(0)
points = 2 * torch.rand(4096, 2) - 1
height = torch.sin(4 * points[:, :1]) * torch.cos(3 * points[:, 1:])


def surface():
    return nn.Sequential(
        nn.Linear(2, 128),
        nn.Tanh(),
        nn.Linear(128, 128),
        nn.Tanh(),
        nn.Linear(128, 1),
    )


scratch = tempfile.TemporaryDirectory(prefix="torchlift-")
path = Path(scratch.name, "surface.pt")

floats = surface()
optimizer = torch.optim.Adam(floats.parameters(), lr=0.003)
for _ in range(300):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(floats(points[:512]), height[:512])
    loss.backward()
    optimizer.step()
torch.save(floats.state_dict(), path)
with torchlift.open(path) as ckpt:
    dtypes = {entry.dtype for entry in ckpt.entries.values()}
    print(f"{ckpt.format}, {ckpt.nbytes} bytes,", *dtypes)

# %%
# Load them together, and torchlift refuses. It cannot know what a float is to your class. To fill
# the slot with floats would be a model that is no longer small, without a word.


def show(error):
    text = f"{type(error).__name__}: {error}".replace(f"{scratch.name}/", "")
    print(textwrap.fill(text, 76, subsequent_indent="    "))


model = int8_skeleton(surface)
try:
    torchlift.load(model, path)
except torchlift.PlacementError as error:
    show(error)

# %%
# Say how it is loaded
# --------------------
#
# A *handler* gets the tensor that is in the model and the tensor that comes from the file. It
# returns what shall be in the model. `torchlift.swap.module_load` registers it for your class, here
# until the end of the ``with`` block.


def load_int8(destination, source, assign):
    return quantise(source)


with swap.module_load(Int8, load_int8):
    report = torchlift.load(model, path)

loaded = dict(model.named_parameters())
for key, tensor in loaded.items():
    kind = type(tensor).__name__
    print(f"{key:<9}{kind:<10}{report.mode[key]} from {report.source[key]}")

state = torchlift.open(path).state_dict()
biases = [key for key in state if key.endswith("bias")]
same = [torch.equal(loaded[key], state[key]) for key in biases]
print("biases are those of the file:", all(same))
errors = [off(loaded[key], state[key]) for key in state.keys() - biases]
print("weights are off by half a level at most:", max(errors) <= 0.501)

# %%
# That is the extension point of torch itself: `torch.Tensor.module_load`. Written by hand, it is a
# ``__torch_function__`` that knows all methods of a tensor and answers to one. With the handler
# registered, torch's ``load_state_dict`` asks it too. Here into a live model, whose parameter
# objects stay:

held = model[2].weight
with swap.module_load(Int8, load_int8), swap.preserving_references():
    model.load_state_dict({key: 2 * tensor for key, tensor in state.items()})
print("same object, still int8:", model[2].weight is held and type(held) is Int8)
double = quantise(2 * state["2.weight"])
print("twice the values:", torch.equal(held.floats(), double.floats()))

# %%
# A handler is easy to get wrong. So what it returns is checked, before anything in the model
# changes.


def load_floats(destination, source, assign):
    return source


def load_transposed(destination, source, assign):
    return quantise(source.T)


before = held.levels.clone()
for handler in (load_floats, load_transposed):
    with swap.module_load(Int8, handler):
        try:
            torchlift.load(model, path)
        except torchlift.PlacementError as error:
            show(torchlift.PlacementError(error.reason, entry=error.entry))
print("the model is as it was:", torch.equal(model[2].weight.levels, before))

# %%
# What it costs in memory
# -----------------------
#
# Now a model that is worth it: eight layers of 16 MiB each, 128 MiB in float32 and 32 MiB in int8.
# Each way runs in a fresh process.
#
# - **afterwards**: build, load, quantise layer by layer. This is what you write first.
# - **mapped by hand**: the same on a mapped checkpoint, with no memory behind the floats.
# - **while loading**: as above.

SETUP = """
import torch
import torchlift
from torch import nn
from torchlift import swap

def build():
    return nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)])

"""
for definition in (define, quantise, int8_skeleton, load_int8):
    SETUP += inspect.getsource(definition) + "\n"
SETUP += """
Int8 = define()
int8_skeleton(lambda: nn.Linear(2, 2))  # the first use of meta imports much
nn.Parameter(quantise(torch.ones(2, 2)), requires_grad=False)
torchlift.load
"""

QUANTISE = """
use.mark("loaded")
for layer in model:
    weight = quantise(layer.weight.detach())
    layer.weight = nn.Parameter(weight, requires_grad=False)
"""

WAYS = {
    "afterwards": """
model = build()
model.load_state_dict(torch.load(args[0]))
"""
    + QUANTISE,
    "mapped by hand": """
with torch.device("meta"):
    model = build()
model.load_state_dict(torch.load(args[0], mmap=True), assign=True)
"""
    + QUANTISE,
    "while loading": """
model = int8_skeleton(build)
with swap.module_load(Int8, load_int8):
    torchlift.load(model, args[0])
""",
}

CHECK = """
weights = [layer.weight for layer in model]
kinds = {type(weight).__name__ for weight in weights}
levels = sum(weight.levels.sum(dtype=torch.int64).item() for weight in weights)
result = [*kinds, levels]
"""

MIB = 2**20
large = str(Path(scratch.name, "large.pt"))
torchlift.measure.in_child(
    "torch.save(build().state_dict(), args[0])",
    large,
    setup=SETUP,
)
with torchlift.open(large) as ckpt:
    size = ckpt.nbytes

runs = {}
for name, code in WAYS.items():
    runs[name] = torchlift.measure.in_child(code, large, setup=SETUP, finish=CHECK)
    peak = runs[name].memory.added_anonymous
    print(f"{name:<15} anonymous peak: {peak / MIB:5.1f} MiB")

peaks = {name: child.memory.added_anonymous for name, child in runs.items()}
result = size / 4
found = {tuple(child.value) for child in runs.values()}
print("the same levels in each:", len(found) == 1)
print("afterwards, above 1.8x the checkpoint:", peaks["afterwards"] > 1.8 * size)
print("while loading, below the checkpoint:", peaks["while loading"] < size)
over = peaks["while loading"] - result
print("while loading, at most 80 MiB above the result:", over < 80 * MIB)

# %%
# The full-precision model never exists. What there is on top of the result is one tensor at a time:
# the weight as floats, divided and rounded, and the buffers of the load.
#
# The middle way has the same idea, and what you get from it depends on the C library. The floats of
# one layer are freed and the int8 of the same layer is kept, which may keep the freed memory from
# going back. torchlift asks for it back while it works. By hand you can set a variable before
# Python starts:

GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(MIB)}
by_hand = WAYS["mapped by hand"]
again = torchlift.measure.in_child(by_hand, large, setup=SETUP, env=GIVE_BACK)
peak = again.memory.added_anonymous
print(f"mapped by hand, given back, anonymous peak: {peak / MIB:.1f} MiB")
print("below the checkpoint:", peak < size)

# %%
# So if you load once, into a model that nobody holds, then a map and a loop come as far. You write
# the loop for your model, its ties and its missing names. And each weight is a new object.
#
# What it costs in quality
# ------------------------
#
# Rounding is an error, and your outputs show it. How much depends on the scale. Take one scale for
# the whole tensor, as the shortest code would, and the row with the largest number spoils all other
# rows. That is a second handler, and nothing else changes.


def one_scale(destination, source, assign):
    scale = (source.abs().max() / 127).expand(len(source), 1).clone()
    return Int8((source / scale).round_().to(torch.int8), scale)


def outputs(handler):
    model = int8_skeleton(surface)
    with swap.module_load(Int8, handler):
        torchlift.load(model, path)
    with torch.no_grad():
        return model(points)


with torch.no_grad():
    exact = floats(points)
spread = (exact.max() - exact.min()).item()
HANDLERS = {"a scale for each row": load_int8, "one for the tensor": one_scale}
errors, typical = {}, {}
for name, handler in HANDLERS.items():
    errors[name] = 100 * (outputs(handler) - exact).flatten() / spread
    typical[name] = errors[name].square().mean().sqrt().item()
    print(f"{name:<21} typical error ~{typical[name]:.2f} % of the output's range")

print("for each row, below 1 %:", typical["a scale for each row"] < 1)
ratio = typical["one for the tensor"] / typical["a scale for each row"]
print("one for the tensor is at least 1.5x worse:", ratio > 1.5)

# %%
# The picture
# -----------

GRAY, TEAL, RUST = "#5b6470", "#2b6f77", "#b83a16"
plt.rcParams.update({"figure.facecolor": "white", "font.size": 12})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})

figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 4.5), layout="constrained")
for name, color in (("afterwards", GRAY), ("while loading", RUST)):
    use = runs[name].memory
    samples = use.timeline
    time = [1000 * sample.seconds for sample in samples]
    before = use.baseline.anonymous
    owned = [(sample.anonymous - before) / MIB for sample in samples]
    left.fill_between(time, owned, color=color, alpha=0.12, linewidth=0)
    left.plot(time, owned, color=color, linewidth=2.5, label=name)
for level, label in ((size, "float32"), (result, "int8")):
    left.axhline(level / MIB, color=GRAY, linewidth=1, linestyle=":")
    left.annotate(
        label,
        (1, level / MIB),
        xycoords=left.get_yaxis_transform(),
        color=GRAY,
        ha="right",
        va="bottom",
    )
left.set(
    xlim=(0, 1.2 * left.get_xlim()[1]),
    ylim=(0, None),
    xlabel="time (ms)",
    ylabel="memory added (MiB)",
)
left.locator_params(axis="x", nbins=4)

limit = 4 * max(typical.values())
for (name, error), color in zip(errors.items(), (RUST, TEAL), strict=True):
    right.hist(
        error.clamp(-limit, limit).numpy(),
        bins=60,
        range=(-limit, limit),
        histtype="stepfilled",
        color=color,
        alpha=0.6,
        label=name,
    )
right.set(xlabel="output error (% of range)", ylabel="points")
for axes in (left, right):
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
plt.show()
scratch.cleanup()

# %%
# *Left: memory that the process owns, while the model is loaded and quantised; the dotted lines are
# the model in float32 and in int8. Right: the error of the network's output for 4,096 points, with
# a scale for each row and with one for the whole tensor.* Quantised afterwards, the gray line
# climbs to two copies of what you do not want. Quantised while loading, the rust line climbs to the
# result, with a tooth for each tensor on the way.
#
# What to remember
# ----------------
#
# - A weight can be small before the model is there. The floats need to exist one tensor at a time.
# - ``__torch_dispatch__`` says how a subclass computes, ``module_load`` says how it is loaded.
# - The handler is asked for your class only. Biases and all other tensors load as ever.
# - A scale for each row is worth its four bytes.
#
# What to use when
# ----------------
#
# - **A subclass of your own, to be loaded from plain files:** `torchlift.swap.module_load`, into a
#   skeleton or into a live model.
# - **Only another dtype, such as bfloat16:** ``dtype=`` of `torchlift.load` is enough.
# - **Work on values, with plain tensors as result:** ``transform=``.
# - **A library's quantised tensors:** try without a handler. A class may bring a ``module_load`` of
#   its own, and torchlift asks it.

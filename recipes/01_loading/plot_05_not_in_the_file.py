"""
Buffers missing after loading on meta: rotary tables and masks are not in the file
==================================================================================

Every key matches, nothing is missing, and the model computes nonsense. Or it stops at a tensor on
meta, although you loaded the complete file. What does a model have that its file lacks?

Buffers with ``persistent=False``: the constructor computes them, and ``state_dict()`` skips them. A
`torchlift.skeleton` runs the constructor and puts only what a file contains on meta.
"""

# %%
# In short
# --------

from tempfile import mkdtemp

import torch

import torchlift


class Rotary(torch.nn.Linear):
    def __init__(self):
        super().__init__(512, 512)
        table = 10_000.0 ** -(torch.arange(0, 512, 2) / 512)
        self.register_buffer("inv_freq", table, persistent=False)


path = mkdtemp() + "/rotary.pt"
torch.save(Rotary().state_dict(), path)
report = torchlift.load(torchlift.skeleton(Rotary), path)
print("read:", *report.loaded, "- computed:", *report.replayed)

# %%
# ``inv_freq`` is not in the file. The constructor of the skeleton has computed it, and the report
# lists it under *replayed*.
#
# NotImplementedError: Cannot copy out of meta tensor
# ---------------------------------------------------
#
# Here is a model with two such buffers. A rotary table turns each pair of numbers by an angle that
# grows with the position. A mask hides the tokens that come later.

# fold: The model: attention with a rotary table and a mask
from torch import nn

WIDTH, TOKENS = 128, 16


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        table = 10_000.0 ** -(torch.arange(0, WIDTH, 2) / WIDTH)
        mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)
        self.register_buffer("inv_freq", table, persistent=False)
        self.register_buffer("mask", mask, persistent=False)

    def angles(self, tokens):
        return torch.outer(torch.arange(tokens), self.inv_freq.float())

    def turn(self, x):
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        turned = pairs * torch.polar(torch.ones(()), self.angles(x.shape[-2]))
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = self.turn(q) @ self.turn(k).mT / WIDTH**0.5
        return (scores + self.mask.to(x.dtype)).softmax(dim=-1) @ v


torch.manual_seed(0)
saved = Attention()
torch.save(saved.state_dict(), path)
x = torch.randn(1, TOKENS, WIDTH)

# %%
# On the meta device the constructor runs and computes nothing. ``load_state_dict`` fills in the
# tensors of the file and reports success.

with torch.device("meta"):
    model = Attention()
print(model.load_state_dict(torch.load(path, mmap=True), assign=True))
try:
    model.to("cpu")
except NotImplementedError as error:
    print(f"{type(error).__name__}: {error}")

# %%
# This error is late, but it is clear. Its advice hides the problem.
#
# to_empty: wrong values without an error
# ---------------------------------------
#
# ``to_empty`` gives every tensor memory and does not initialize it. You load the weights on top,
# and the two buffers keep old bytes of other tensors, zeros, or sometimes NaN. The model looks fine
# in one run and strange in the next. In its deterministic mode PyTorch fills uninitialized memory
# with NaN, so you can see it:

with torch.device("meta"):
    empty = Attention()
torch.use_deterministic_algorithms(True)
empty.to_empty(device="cpu")
torch.use_deterministic_algorithms(False)
print(empty.load_state_dict(torch.load(path)))
for name, tensor in [*empty.named_parameters(), *empty.named_buffers()]:
    never = tensor.isnan().sum()
    print(f"{name:<11} never written: {never:>5} of {tensor.numel()} numbers")

# %%
# model.to(bfloat16) rounds the rotary table
# ------------------------------------------
#
# The third way to lose the table needs no meta device. ``model.to(torch.bfloat16)`` casts buffers
# like weights, and bfloat16 keeps 8 significant bits. A weight tolerates that. A frequency is
# multiplied by the position, and so is its error.

cast = Attention()
cast.load_state_dict(torch.load(path))
cast.to(torch.bfloat16)
off = (cast.angles(4096) - saved.angles(4096)).abs()
for position in (1, 64, 1024, 4095):
    most = off[position].max().item()
    print(f"at position {position:>4}, angles are off by up to {most:.3f} rad")
assert most > torch.pi, (
    "half a turn: two neighbours look as if they stood elsewhere"
)

# %%
# Proof
# -----
#
# The weights of a skeleton are on meta too, but its buffers are real. Here is the same load, once
# as it is and once in bfloat16. ``dtype`` casts weights, and the buffers keep their type.

model = torchlift.skeleton(Attention)
torchlift.load(model, path)
assert torch.equal(model(x), saved(x))

half = torchlift.skeleton(Attention)
torchlift.load(half, path, dtype=torch.bfloat16)
for name, tensor in [*half.named_parameters(), *half.named_buffers()]:
    print(f"{name:<11} {tensor.dtype}")
print(f"the output  {half(x.to(torch.bfloat16)).dtype}")
assert torch.equal(half.inv_freq, saved.inv_freq)
assert torch.equal(half.mask, saved.mask)

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, panels = plt.subplots(1, 2, sharey=True)
pair = off[-1].argmax()
for axes, start in zip(panels, (0, 2560), strict=True):
    positions = torch.arange(start, start + 20.1, 0.1, dtype=torch.float64)
    for model, look, label in (
        (cast, "C0-", "model.to(bfloat16)"),
        (half, "C1-", "torchlift, in bfloat16"),
        (saved, "C3-.", "as constructed"),
    ):
        cosine = (positions * model.inv_freq[pair].double()).cos()
        axes.plot(positions, cosine, look, label=label)
    axes.set(xlim=(start, start + 20), xticks=[start, start + 10])
panels[0].set_ylabel("cosine of the angle")
figure.supxlabel("position in the text (tokens)", fontsize=12)
figure.legend(
    *axes.get_legend_handles_labels(),
    loc="outside upper center",
    ncols=3,
    fontsize=10,
)
plt.show()

# %%
# *The lines show the cosine of one pair's angle in a rotary table, left at the start of a text and
# right 2,560 tokens later. The table is a buffer that the file does not contain. Loaded in bfloat16
# by torchlift, the pair follows the model as constructed. After a cast of the complete model it
# goes up where it should go down, so far positions are read wrong.*
#
# Users of transformers met uninitialised rotary tables in `issue 34234
# <https://github.com/huggingface/transformers/issues/34234>`_ and again in `issue 45902
# <https://github.com/huggingface/transformers/issues/45902>`_.
#
# Remember
# --------
#
# - "All keys matched" describes the file. It does not cover tensors that were never saved.
# - On meta such a tensor is lost. ``to_empty`` replaces it with arbitrary numbers and hides the
#   error.
# - A cast of everything rounds tables that have to be exact. The damage grows with the position.
#
# Use this when
# -------------
#
# - **You build on meta to save memory:** `torchlift.skeleton` and `torchlift.load`.
# - **You need another dtype:** `torchlift.load` with ``dtype=``, instead of ``model.to(dtype)``.
# - **You want to know which tensors these are:** `torchlift.plan` lists them under *replayed*.
# - **A framework calls to_empty for you:** compute the buffers again afterwards. Run once in
#   deterministic mode to see which ones you forgot.

# %%
# Question
# --------
#
# A newer version of the class has a *persistent* buffer that your old file lacks. What does a
# strict load do?


# fold: Answer to the question
# It raises an error that names the buffer. Allow it to be missing, and the
# constructor makes it.
class Newer(Attention):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(2))


newer = torchlift.skeleton(Newer)
try:
    torchlift.load(newer, path)
except torchlift.MismatchError as error:
    print("missing:", *error.missing_keys)
torchlift.load(newer, path, allow_missing=["mean"])
print("mean:", newer.mean.tolist())
assert torch.equal(newer.mean, torch.ones(2))

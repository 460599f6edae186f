"""
What swap_tensors exchanges
===========================

PyTorch can give a live parameter another content and keep the object, so that an optimizer goes on
with it. What exactly stays, what goes, and when does it refuse?

You exchange two tensors that differ in everything, and look at every part before and after. Then
you put something in its way, in four different forms, and see who notices.
"""

# %%
# Two tensors that differ in everything
# -------------------------------------
#
# ``held`` is the weight of a layer, and an optimizer has it. It has a class of its own, a Python
# attribute, a slot, a gradient and a hook. ``fresh`` is what you want in its place: another class,
# dtype, shape and storage.

import tempfile
import textwrap
import time
import weakref
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import torchlift
from torchlift import swap


class Old(nn.Parameter):
    __slots__ = ("rank",)


class New(nn.Parameter):
    __slots__ = ("rank",)


layer = nn.Linear(3, 2, bias=False)
layer.weight = held = Old(torch.zeros(2, 3))
held.note, held.rank = "live", 1
held.grad = torch.ones(2, 3)
optimizer = torch.optim.SGD([held], lr=0.1)
in_optimizer = optimizer.param_groups[0]["params"]

fresh = New(torch.ones(4, dtype=torch.bfloat16), requires_grad=False)
fresh.note, fresh.rank = "loaded", 2

called = []
handle = held.register_hook(lambda gradient: called.append("live"))

# %%
# What can you ask of a tensor? Each entry is one question. Identities and addresses would be
# different on your machine, so the picture later shows whose they *were*.

HOLDERS = {
    "id(tensor)": id,
    "weight of the layer": lambda tensor: layer.weight is tensor,
    "in the optimizer": lambda tensor: in_optimizer[0] is tensor,
}
CONTENT = {
    "__class__": lambda tensor: type(tensor).__name__,
    "__dict__": lambda tensor: tensor.note,
    "slot": lambda tensor: tensor.rank,
    "data_ptr()": lambda tensor: tensor.data_ptr(),
    "values": lambda tensor: tensor.detach().sum().item(),
    "dtype": lambda tensor: str(tensor.dtype).removeprefix("torch."),
    "shape": lambda tensor: list(tensor.shape),
    "requires_grad": lambda tensor: tensor.requires_grad,
    "grad": lambda tensor: tensor.grad is not None,
}
QUESTIONS = HOLDERS | CONTENT


def ask(tensor):
    return {name: question(tensor) for name, question in QUESTIONS.items()}


before = {"held": ask(held), "fresh": ask(fresh)}
different = [before["held"][name] != before["fresh"][name] for name in QUESTIONS]
print("the two differ in everything:", all(different))

torch.utils.swap_tensors(held, fresh)

after = {"held": ask(held), "fresh": ask(fresh)}
now = after["held"]
stayed = [name for name in QUESTIONS if now[name] == before["held"][name]]
went = [name for name in QUESTIONS if now[name] == before["fresh"][name]]
print("stayed:", ", ".join(stayed))
print(textwrap.fill(f"went:   {', '.join(went)}", 72, subsequent_indent=8 * " "))
complete = len(stayed + went) == len(QUESTIONS)
print("every answer is the old or the new one:", complete)
print("who holds the object did not change:", stayed == list(HOLDERS))

# %%
# The picture
# -----------

GRAY, TEAL, RUST = "#5b6470", "#2b6f77", "#b83a16"
plt.rcParams.update({"figure.facecolor": "white", "font.size": 12})
SAID = {"id(tensor)": "A B", "data_ptr()": "A B"}  # addresses get letters


def said(name, value):
    """What to write for an answer: short, and the same on every machine."""
    if name in SAID:
        return SAID[name].split()[value == before["fresh"][name]]
    return ("no", "yes")[value] if isinstance(value, bool) else value


plt.rcParams.update({"figure.constrained_layout.use": True})
figure, panels = plt.subplots(1, 2, figsize=(7.2, 4.8), sharey=True)
drawn = {"before": before, "after": after}
for axes, (title, answers) in zip(panels, drawn.items(), strict=True):
    for column, tensor in enumerate(("held", "fresh")):
        for row, name in enumerate(QUESTIONS):
            value = answers[tensor][name]
            color = TEAL if value == before["held"][name] else RUST
            corner = column + 0.04, row + 0.06
            axes.add_patch(plt.Rectangle(corner, 0.92, 0.88, color=color))
            axes.text(
                column + 0.5, row + 0.5, said(name, value),
                color="white", ha="center", va="center", fontsize=11,
            )  # fmt: skip
    axes.axhline(len(HOLDERS), color=GRAY, linewidth=1, linestyle=":")
    axes.set(xlim=(0, 2), ylim=(len(QUESTIONS), 0), title=title)
    axes.set_xticks([0.5, 1.5], ["held", "fresh"])
    axes.set_yticks([row + 0.5 for row in range(len(QUESTIONS))], list(QUESTIONS))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
figure.supxlabel("Python object", fontsize=12)
figure.supylabel("what you ask it", fontsize=12)
plt.show()

# %%
# *Teal is what belonged to the live weight, rust is what belonged to the new tensor.* Above the
# dotted line is what others know of the object. It stays. All that the object *is* lies below, and
# it is exchanged, down to the class. The two objects change their lives, and nobody who holds one
# of them is asked.
#
# So dtype and shape may differ, which no in-place copy could do. And nothing is copied: the address
# moved, not the bytes.
#
# The gradient goes too
# ---------------------
#
# Look at the last row. The gradient left with the old content. So did the hook that you registered.
# The layer's weight does not call it any more; the other object does.

layer.weight.requires_grad_(True)
layer.weight.sum().backward()
print("the weight calls its hook:", called == ["live"])
called.clear()
fresh.sum().backward()
print("the tensor that you throw away does:", called == ["live"])

# %%
# A hook that clips or logs gradients is silent from then on. `torchlift.load` takes gradient and
# hooks out of the exchange and gives them back to the object. Here is the same in a load that
# changes nothing but the values; a weight in the file is swapped in.

scratch = tempfile.TemporaryDirectory(prefix="torchlift-")
path = Path(scratch.name, "model.pt")
torch.manual_seed(0)
torch.save(nn.Linear(3, 2).state_dict(), path)


def with_torch(model):
    for name, tensor in torch.load(path).items():
        torch.utils.swap_tensors(getattr(model, name), nn.Parameter(tensor))


def with_torchlift(model):
    torchlift.load(model, path, mode="swap")


for name, load in {"swap_tensors": with_torch, "torchlift": with_torchlift}.items():
    model, called = nn.Linear(3, 2), []
    weight = model.weight
    weight.register_hook(lambda gradient, called=called: called.append("live"))
    model(torch.ones(1, 3)).sum().backward()
    called.clear()
    load(model)
    print(f"{name:<13}same object: {model.weight is weight}")
    print(f"{name:<13}gradient is there: {model.weight.grad is not None}")
    model(torch.ones(1, 3)).sum().backward()
    print(f"{name:<13}hook is called: {called == ['live']}")

# %%
# What it refuses, and what it should
# -----------------------------------
#
# An exchange is right if everybody who holds the *object* wants the new content. Somebody may hold
# something else: the memory, a graph that was recorded with the old values, or a weak reference,
# whose owner may keep facts about the old content. ``Keeper`` holds one of these, at an attribute.


class Keeper:
    def __init__(self, kept):
        self.kept = kept


HOLDS = {
    "a weak reference": lambda model: weakref.ref(model.weight),
    "a view": lambda model: model.weight[:1],
    "a detached tensor": lambda model: model.weight.detach(),
    "a loss": lambda model: model(torch.ones(1, 3)).sum(),
}


def show(label, text):
    print(textwrap.fill(f"{label}: {text}", 76, subsequent_indent="    "))


def attempt(action):
    """Run it; say what came of it."""
    try:
        action()
    except (RuntimeError, torchlift.PlacementError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


refused = {}
for name, hold in HOLDS.items():
    model = nn.Linear(3, 2)
    keeper = Keeper(hold(model))
    other = nn.Parameter(torch.ones(2, 3))
    outcome = attempt(partial(torch.utils.swap_tensors, model.weight, other))
    refused[name] = outcome != "no error"
    show(name, outcome)

# %%
# Torch refuses two of four. For the view, the message counts references and does not say whose they
# are. The other two pass without a word. Here is what they lead to.

model = nn.Linear(3, 2)
keeper = Keeper(model.weight.detach())
torch.utils.swap_tensors(model.weight, nn.Parameter(torch.ones(2, 3)))
print("the detached tensor sees the new values:", bool(keeper.kept.eq(1).all()))

model = nn.Linear(3, 2)
keeper = Keeper(model(torch.ones(1, 3)).sum())
torch.utils.swap_tensors(model.weight, nn.Parameter(torch.ones(2, 3)))
show("the loss", attempt(keeper.kept.backward))

# %%
# The first one is stale from now on. The second one fails, at a line that is far away from the
# exchange.
#
# Ask beforehand
# --------------
#
# `torchlift.swap.preflight` looks at a module, changes nothing, and returns a
# `torchlift.swap.Blocker` for each tensor that is held: its name, the reason, and who holds it.

for name, hold in HOLDS.items():
    model = nn.Linear(3, 2)
    keeper = Keeper(hold(model))
    blocker = swap.preflight(model)[0]
    show(name, blocker)
    refused[name] = [refused[name], bool(blocker)]

by_torch, by_preflight = zip(*refused.values(), strict=True)
print("torch refuses:", sum(by_torch), "of", len(HOLDS))
print("preflight refuses:", sum(by_preflight), "of", len(HOLDS))

# %%
# What is *not* in the way is as important. An optimizer is not, nor is a list of parameters, a tie,
# a gradient, or a graph that went backward and is gone.

embed, lstm, head = nn.Embedding(5, 4), nn.LSTM(4, 4), nn.Linear(4, 5, bias=False)
head.weight = embed.weight
model = nn.Sequential(embed, lstm, head)
listed = list(model.parameters())
optimizer = torch.optim.Adam(listed)
head(lstm(embed(torch.arange(5)))[0]).sum().backward()
optimizer.step()
print("blockers in a tied model after a step:", len(swap.preflight(model)))

many = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(10_000)])
start = time.perf_counter()
found = swap.preflight(many)
seconds = time.perf_counter() - start
print(f"10,000 parameters, examined in {1000 * seconds:.0f} ms")
print("blockers:", len(found), "- in less than a second:", seconds < 1)

# %%
# All of them, or half of them
# ----------------------------
#
# Torch exchanges one parameter after the other. If the third one refuses, then the first two are
# done. Here a keeper holds the second layer, and you convert the model.
#
# `torchlift.swap.preserving_references` sets torch's own flag for this path, for the time of the
# block.


def two_layers():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, Keeper(weakref.ref(model[1].weight))


def dtypes(model):
    found = [str(parameter.dtype) for parameter in model.parameters()]
    return ", ".join(found).replace("torch.", "")


def convert(model, **options):
    with swap.preserving_references(**options):
        model.half()


model, keeper = two_layers()
show("torch", attempt(lambda: convert(model)))
print("after:", dtypes(model))
show("a forward pass", attempt(lambda: model(torch.ones(1, 3))))

# %%
# The model is of no use now, and nothing takes the first half back. With ``check=model`` the block
# starts with a preflight. `torchlift.load` always does.

model, keeper = two_layers()
show("checked", attempt(lambda: convert(model, check=model)))
print("after:", dtypes(model))

torch.save({key: value.half() for key, value in model.state_dict().items()}, path)


def load():
    torchlift.load(model, path, mode="swap", dtype=torch.float16)


show("loaded", attempt(load))
print("after:", dtypes(model))

# %%
# Let go of the weak reference, and it works. If you cannot, ``mode="auto"`` takes another way for
# the one tensor that is held, and tells you.

report = torchlift.load(model, path, dtype=torch.float16)
print("after:", dtypes(model))
for key, item in report.loaded.items():
    if item.note:
        show(key, item.note)

del keeper
convert(model.float(), check=model)
print("nobody holds it any more:", dtypes(model))

# %%
# When you need the block
# -----------------------
#
# Not for every conversion. Torch sets the data of a parameter in place where it can, and that keeps
# the object, too. It cannot when the kind of tensor changes, as from the meta device to a real one.
# There is a second flag with a similar name, ``set_overwrite_module_params_on_conversion``, which
# does the opposite: it always puts new parameters.

CONVERSIONS = {
    ".half()": ("cpu", nn.Module.half),
    ".to(torch.float64)": ("cpu", lambda model: model.to(torch.float64)),
    ".to_empty(), from meta": ("meta", lambda model: model.to_empty(device="cpu")),
}
flag = torch.__future__.set_overwrite_module_params_on_conversion


def keeps(device, conversion):
    model = nn.Linear(3, 2, device=device)
    before = list(model.parameters())
    conversion(model)
    pairs = zip(before, model.parameters(), strict=True)
    return all(one is two for one, two in pairs)


print(f"{'same objects':<24}{'default':<10}{'overwrite':<11}preserving")
for name, case in CONVERSIONS.items():
    default = keeps(*case)
    flag(True)
    overwritten = keeps(*case)
    flag(False)
    with swap.preserving_references():
        preserved = keeps(*case)
    print(f"{name:<24}{default!s:<10}{overwritten!s:<11}{preserved}")
scratch.cleanup()

# %%
# What to remember
# ----------------
#
# - Who holds an object is above the line, what the object is lies below. ``swap_tensors`` exchanges
#   all that is below: class, attributes, slots, storage, dtype, shape, gradient and hooks.
# - It refuses weak references and views. It lets pass a second tensor over the same memory, and a
#   graph that is still to go backward.
# - It works on one tensor. Over a module, it can stop half-way.
# - An optimizer is never in the way.
#
# What to use when
# ----------------
#
# - **Loading:** `torchlift.load`. It looks first, changes all or nothing, and keeps hooks and
#   gradients.
# - **Converting, with an optimizer built:** `torchlift.swap.preserving_references`, with
#   ``check=model``.
# - **Something refuses, and you want to know who it is:** `torchlift.swap.preflight`.
# - **One tensor, and you know who holds it:** `torch.utils.swap_tensors`.

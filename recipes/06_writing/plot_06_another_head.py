"""
Resume training with a new head, or from an older checkpoint
============================================================

You resume a run, but the model has changed since the save: another head, a layer with another name,
an average that the checkpoint lacks. Must everything match?

No: ``resume`` of a `torchlift.Keeper` takes the rules of `torchlift.load`, by the checkpoint's
names. An optimizer's moments follow their weights.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
keeper = torchlift.Keeper(tempfile.mkdtemp())
keeper.save(5, model=model, optimizer=torch.optim.Adam(model.parameters()))
model[1] = torch.nn.Linear(8, 3)
optimizer = torch.optim.Adam(model.parameters())
step = keeper.resume(model=model, optimizer=optimizer, exclude=["model.1.*"])
print("after step", step, "with moments:", len(optimizer.state), "parameters")

# %%
# The rules use the names of the checkpoint, such as ``model.1.weight`` for a tensor of the model.
# Any other object has one name, ``optimizer`` or ``schedule``, and the random numbers are ``rng``.
#
# StateDictMismatch: the state dict does not fit the model
# --------------------------------------------------------
#
# Without a rule, everything in the checkpoint has to match. The error lists the mismatches and the
# rules that would allow them. Nothing has changed then.

try:
    keeper.resume(model=model, optimizer=optimizer)
except torchlift.MismatchError as error:
    print(type(error).__name__, "-", str(error).partition(": ")[2])

# %%
# A rule that matches nothing is an error too, because its name is probably misspelled.

try:
    keeper.resume(model=model, optimizer=optimizer, exclude=["model.haed.*"])
except torchlift.MismatchError as error:
    print(type(error).__name__, "-", str(error).partition(": ")[2])

# %%
# An object that an older checkpoint lacks
# ----------------------------------------
#
# An average of the weights was added after the checkpoint was saved. Allow it to be missing by its
# name. Then it keeps the values that you gave it.

average = torch.optim.swa_utils.AveragedModel(model)
state = {"model": model, "optimizer": optimizer, "average": average}
rules = {"exclude": ["model.1.*"], "allow_missing": ["average"]}
print("resumed after step", keeper.resume(state, **rules))

# %%
# An object that you do not pass is not loaded: ``keeper.resume(model=model)`` leaves the optimizer
# alone.
#
# A layer with another name
# -------------------------
#
# A dict, a function or a rule of `torchlift.remap` gives the new name. The moments are renamed with
# their weights.

names = {f"model.0.{kind}": f"model.body.{kind}" for kind in ("weight", "bias")}
renamed = torch.nn.Sequential()
renamed.add_module("body", torch.nn.Linear(4, 8))
moments = torch.optim.Adam(renamed.parameters())
keeper.resume(
    model=renamed, optimizer=moments, rename=names, exclude=["model.1.*"]
)
print(len(moments.state), "parameters with moments:", *renamed.state_dict())
assert torch.equal(renamed.body.weight, model[0].weight)
keeper.close()

# %%
# Proof
# -----
#
# Are the resumed moments equal to the bit? Train a network, then add a frozen branch of zeros, as a
# new adapter is. Resume in two new processes: with weights and moments, and with the weights alone.
# Compare each loss with that of the run that never stopped.


# fold: The network, its training, and how the losses are compared
class Network(torch.nn.Module):
    def __init__(self, branch=False):
        super().__init__()
        self.body = torch.nn.Sequential(
            *(torch.nn.Linear(16, 16) for _ in range(3))
        )
        self.branch = (
            torch.nn.Linear(16, 16, bias=False).requires_grad_(False)
            if branch
            else None
        )
        if branch:
            torch.nn.init.zeros_(self.branch.weight)

    def forward(self, x):
        added = 0 if self.branch is None else self.branch(x)
        return self.body(x).tanh() + added


def train(model, optimizer, steps):
    torch.manual_seed(0)
    x, losses = torch.randn(256, 16) * torch.logspace(-2, 1, 16), []
    for _ in range(steps):
        loss = (model(x) - (x @ torch.eye(16).flip(0)).sin()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def distances(way, folder):
    torch.manual_seed(0)
    first = Network()
    optimizer = torch.optim.Adam(first.parameters(), lr=0.01)
    train(first, optimizer, 400)
    with torchlift.Keeper(folder, background=False) as keeper:
        keeper.save(400, model=first, optimizer=optimizer)
        never = train(first, optimizer, 60)
        model = Network(branch=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        state = (
            {"model": model, "optimizer": optimizer}
            if way == "weights and moments"
            else {"model": model}
        )
        keeper.resume(state, allow_missing=["model.branch.*"])
    kept, losses = len(optimizer.state), train(model, optimizer, 60)
    return kept, [abs(x - y) for x, y in zip(losses, never, strict=True)]


found = {}
for way in ("weights and moments", "weights alone"):
    with tempfile.TemporaryDirectory() as folder:
        found[way] = torchlift.measure.in_child(distances, way, folder).value
    kept, far = found[way]
    print(
        f"{way:<19} {kept} parameters with moments, "
        f"losses differ by at most ~{max(far):.3f}"
    )
assert max(found["weights and moments"][1]) == 0
assert max(found["weights alone"][1]) > 0.001

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots()
for (way, (_, far)), look in zip(found.items(), ("C1-", "C0:"), strict=True):
    axes.plot(far, look, label=way)
axes.set(xlabel="step after the resume", ylabel="distance of the losses")
figure.legend(loc="outside upper center", ncols=2)
plt.show()

# %%
# *The lines show the distance between the loss of a resumed run and that of the run that never
# stopped. The resumed model has a new part without an effect yet. With the optimizer's moments the
# two runs are equal, to the bit. With the weights alone Adam starts again and takes another path.*
#
# Remember
# --------
#
# - Names in a rule are the checkpoint's, with the object first: ``model.head.*``.
# - Excluded parameters keep their current weights and moments.
# - Name every part that may be missing or unexpected. Everything else still has to match.
#
# Use this when
# -------------
#
# - **A run resumes with a new part:** ``exclude`` and ``allow_missing`` of ``resume``.
# - **You load only weights, from any file:** `torchlift.load`, as in *Fine-tune with a new head:
#   size mismatch and missing keys*.
# - **Nothing has changed:** *Save while training goes on, and resume after a kill*.

# %%
# Question
# --------
#
# A resume excludes the old head. Which step does Adam count for the head after the next step?


# fold: Answer to the question
# The first one, because its moments were left out with its weights.
def make_job(classes):
    body, head = torch.nn.Linear(4, 8), torch.nn.Linear(8, classes)
    model = torch.nn.Sequential(body, head)
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}


def take_step(job):
    job["model"](torch.ones(4)).sum().backward()
    job["optimizer"].step()


job, again = make_job(2), make_job(3)
take_step(job)
with torchlift.Keeper(tempfile.mkdtemp()) as keeper:
    keeper.save(1, job)
    keeper.resume(again, exclude=["model.1.*"])
take_step(again)
states = again["optimizer"].state
steps = {
    n: int(states[p]["step"]) for n, p in again["model"].named_parameters()
}
print(steps)
assert list(steps.values()) == [2, 2, 1, 1]

"""
Resume training with a new head, or from an older checkpoint
============================================================

You resume a run, but the model has changed since the save: another head, a layer with another name,
an average that the checkpoint lacks. Must everything match?

Yes: ``resume`` of a `torchlift.Keeper` loads all objects that you pass, or none. For a part, load
the model and the optimizer yourself from ``keeper.latest()``, with the patterns of
`torchlift.load`. The moments of a parameter have its name.
"""

# %%
# In short
# --------

import tempfile

import torch

import torchlift

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
keeper = torchlift.Keeper(tempfile.mkdtemp(), background=False)
keeper.save(5, model=model, optimizer=torch.optim.Adam(model.parameters()))
model[1] = torch.nn.Linear(8, 3)
optimizer = torch.optim.Adam(model.parameters())
path, load = keeper.latest(), torchlift.distributed.load_optimizer
torchlift.load(model, path, root="model", exclude=["1.*"])
load(model, optimizer, path, root="optimizer", exclude=["1.*"])
print("moments of", len(optimizer.state), "parameters")

# %%
# ``root`` is the name under which you saved the object. The patterns use the names in it:
# ``1.weight``, not ``model.1.weight``.
#
# StateDictMismatch: the state dict does not fit the model
# --------------------------------------------------------
#
# ``resume`` needs everything to match. The error lists the mismatches and the two calls that load
# the rest. Nothing has changed then.

try:
    keeper.resume(model=model, optimizer=optimizer)
except torchlift.MismatchError as error:
    print(
        type(error).__name__,
        "-",
        str(error).partition(": ")[2].replace(path, "path"),
    )

# %%
# A pattern that matches nothing is an error too, because the name is probably misspelled.

try:
    torchlift.load(model, path, root="model", exclude=["haed.*"])
except torchlift.MismatchError as error:
    print(type(error).__name__, "-", str(error).partition(": ")[2])

# %%
# An object that an older checkpoint lacks
# ----------------------------------------
#
# An average of the weights was added after the checkpoint was saved. Do not pass it to ``resume``.
# Then it keeps the values that you gave it.

same = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
average = torch.optim.swa_utils.AveragedModel(same)
print("resumed after step", keeper.resume(model=same))

# %%
# An object that you do not pass is not loaded: this call leaves the optimizer alone, too.
#
# A layer with another name
# -------------------------
#
# A dict, a function or a rule of `torchlift.remap` gives the new name in the model. The optimizer's
# state is a dict by the same names, which you can change before you load it.

names = {f"0.{kind}": f"body.{kind}" for kind in ("weight", "bias")}
renamed = torch.nn.Sequential()
renamed.add_module("body", torch.nn.Linear(4, 8))
moments = torch.optim.Adam(renamed.parameters())
torchlift.load(renamed, path, root="model", rename=names, exclude=["1.*"])
saved = torchlift.open(path).tree("optimizer")
(group,) = saved["param_groups"]
saved["state"] = {
    names.get(name, name): state for name, state in saved["state"].items()
}
group["params"] = [names.get(name, name) for name in group["params"]]
load(renamed, moments, saved)
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
        path, rules = keeper.latest(), {"allow_missing": ["branch.*"]}
        torchlift.load(model, path, root="model", **rules)
        if way == "weights and moments":
            torchlift.distributed.load_optimizer(
                model, optimizer, path, root="optimizer", **rules
            )
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
# - ``resume`` loads all objects that you pass, or none.
# - For a part, call ``load`` and ``load_optimizer`` with ``keeper.latest()`` and ``root=``.
# - Excluded parameters keep their current weights and moments. Name every part that may be missing.
#
# Use this when
# -------------
#
# - **A run resumes with a new part:** ``exclude`` and ``allow_missing`` of these two functions.
# - **You load only weights, from any file:** `torchlift.load`, as in *Fine-tune with a new head:
#   size mismatch and missing keys*.
# - **Nothing has changed:** *Save while training goes on, and resume after a kill*.

# %%
# Question
# --------
#
# A load excludes the old head. Which step does Adam count for the head after the next step?


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
path, without = keeper.latest(), {"exclude": ["1.*"]}
torchlift.load(again["model"], path, root="model", **without)
load(*again.values(), path, root="optimizer", **without)
take_step(again)
states = again["optimizer"].state
steps = {
    n: int(states[p]["step"]) for n, p in again["model"].named_parameters()
}
print(steps)
assert list(steps.values()) == [2, 2, 1, 1]

"""
Resume on another number of GPUs: where was each rank in its data?
==================================================================

The job had 8 GPUs, and tomorrow there are 6. The weights load on any number of them. But where was
each rank's data loader?

A `torchlift.Keeper` stores the own state of each rank. The same number of ranks gets it back. For
another number you pass a function that divides the states, and nothing is dropped silently.
"""

# %%
# In short
# --------

from tempfile import mkdtemp
from types import SimpleNamespace as Loader

import torch.distributed as dist

import torchlift


def run(folder, start, rules=None):
    at = {"next": start + dist.get_rank()}
    state = {"loader": Loader(state_dict=at.copy, load_state_dict=at.update)}
    with torchlift.Keeper(folder) as keeper:
        keeper.resume(state, on_other_ranks=rules) or keeper.save(5, state)
    return at["next"]


folder, on_ranks = mkdtemp(), torchlift.distributed.on_ranks
print(on_ranks(2, run, folder, 10), on_ranks(2, run, folder, 0))

# %%
# Two ranks have read ten samples. Rank 0 would read sample 10 next, and rank 1 sample 11. They
# save. Two new ranks, which would start at 0 and 1, resume at 10 and 11.
#
# DCP loses the data loader of one rank
# -------------------------------------
#
# ``dcp.save`` stores one object for each name. If you pass it the loaders of two ranks, it silently
# loses one, as it does with tensors (`issue 146566
# <https://github.com/pytorch/pytorch/issues/146566>`__ of PyTorch). With the rank in the name, as
# torchtitan does it, both are kept, but for two ranks only.

import torch.distributed.checkpoint as dcp


def by_dcp(folder, start, name):
    place = {"next": start + dist.get_rank()}
    loader = Loader(state_dict=place.copy, load_state_dict=place.update)
    state = {name.format(dist.get_rank()): loader}
    (dcp.save if start else dcp.load)(state, checkpoint_id=folder)
    return place["next"]


dcp_places = {}
for name in "loader", "loader.{}":
    place = mkdtemp()
    on_ranks(2, by_dcp, place, 10, name)
    dcp_places[name] = on_ranks(2, by_dcp, place, 0, name)
    print(f"{name:<10} resumed: {dcp_places[name]}")
try:
    on_ranks(3, by_dcp, place, 0, "loader.{}")
except RuntimeError as error:
    print("on three ranks:", str(error).splitlines()[-1])

# %%
# A Keeper keeps both. On three ranks it does not guess, and each rank raises an error:


def refused(folder):
    try:
        run(folder, 0)
    except torchlift.CheckpointError as error:
        return f"{error.reason}. {error.hint}"


texts = on_ranks(3, refused, folder)
assert len({*texts}) == 1
print(texts[0])

# %%
# Nothing has changed then. Only you know the right position. Here the ranks read every third
# sample, from the earliest one on.


def divide_again(states):
    return {"next": min(state["next"] for state in states) + dist.get_rank()}


three_places = on_ranks(3, run, folder, 0, {"loader": divide_again})
print(three_places)
assert three_places == [10, 11, 12]

# %%
# Proof
# -----
#
# How often is each of 24 samples read, by the two ranks before the stop and by the ranks that
# resume?


# fold: How the reads are counted
def times_read(places, samples=24):
    read = [1] * 10 + [0] * (samples - 10)  # by the two ranks before
    for place in places:
        for sample in range(place, samples, len(places)):
            read[sample] += 1
    return read


ways = {
    "DCP, 2 ranks": times_read(dcp_places["loader"]),
    "DCP, rank in name": times_read(dcp_places["loader.{}"]),
    "Keeper, 2 ranks": times_read(on_ranks(2, run, folder, 0)),
    "Keeper, 3 ranks": times_read(three_places),
}
for way, read in ways.items():
    print(f"{way:<18}never: {read.count(0)}, twice: {read.count(2)}")
assert {*ways["Keeper, 2 ranks"]} == {*ways["Keeper, 3 ranks"]} == {1}

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 2.6))
for (way, read), color in zip(
    ways.items(), ("C0", "C3", "C1", "C1"), strict=True
):
    once, twice, never = (read.count(times) for times in (1, 2, 0))
    axes.barh(way, once, color=color)
    axes.barh(way, twice, left=once, color="white", ec=color, hatch="//")
    axes.barh(way, never, left=once + twice, color="white", ec=color, ls=":")
axes.set_title(
    "filled: read once, hatched: twice, empty: never", fontsize=11, loc="right"
)
axes.set(xlabel="samples (of 24)", xlim=(0, 24.2), xticks=range(0, 25, 6))
axes.invert_yaxis()
plt.show()

# %%
# *Each bar counts how many of 24 samples are read once, twice or never, when two ranks stop after
# ten samples and others resume. With one state for both data loaders, torch's DCP reads seven
# samples twice and seven never. With one state for each rank (the rank in its name, or a Keeper)
# every sample is read once. A Keeper also does that on another number of ranks.*
#
# Ranks may have other state of their own. Random number generators return to the same number of
# ranks. A rank without a saved generator keeps its current one. State that is equal on all ranks,
# such as a schedule, is stored once. It loads on any number of ranks, as models and optimizers do.
# Every rank ends the same way: if a save or a resume fails on one, all ranks raise an error within
# seconds.
#
# Remember
# --------
#
# - Weights belong to the model. The position in the data belongs to the rank.
# - DCP stores one object for each name. If several ranks write it, all but one are lost.
# - A Keeper does not guess. Pass ``resume(on_other_ranks={name: function})``.
#
# Use this when
# -------------
#
# - **Ranks have loaders, or other states of their own:** pass them to `torchlift.Keeper`.
# - **You need the complete loop, with signals and launchers:** the page *On a cluster*.
# - **Only weights go to another number of GPUs:** the recipe *Load a DCP checkpoint on another
#   number of GPUs, or on none*.

# %%
# Question
# --------
#
# Your function takes the *latest* position in place of the earliest. What happens to the data?


# fold: Answer to the question
# Samples between the two positions are never read, and no error says so.
def from_the_latest(states):
    return {"next": max(state["next"] for state in states) + dist.get_rank()}


places = on_ranks(3, run, folder, 0, {"loader": from_the_latest})
print("resumed at", places, "- never read:", times_read(places).count(0))
assert times_read(places).count(0) == 1

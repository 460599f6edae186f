"""
Resume on another number of GPUs: where was each rank in its data?
==================================================================

The job had 8 GPUs, and tomorrow there are 6. The weights fit any number of them. But where was each
rank's data loader?

A `torchlift.Keeper` keeps for each rank what is its own. As many ranks get it back; of another
number you say what becomes of the list, and nothing is dropped without a word.
"""

# %%
# In short
# --------

from tempfile import mkdtemp
from types import SimpleNamespace as Loader

import torch.distributed as dist

import torchlift


def run(folder, start, rules=None):
    place = {"next": start + dist.get_rank()}
    state = {"loader": Loader(state_dict=place.copy, load_state_dict=place.update)}
    with torchlift.Keeper(folder) as keeper:
        keeper.resume(state, on_other_ranks=rules) or keeper.save(5, state)
    return place["next"]


folder, on_ranks = mkdtemp(), torchlift.distributed.on_ranks
print(on_ranks(2, run, folder, 10), on_ranks(2, run, folder, 0))

# %%
# Two ranks have read ten samples; the first goes on at sample 10, the other at 11. They save, and
# two new ones, which would begin at 0 and 1, go on there.
#
# One loader is lost
# ------------------
#
# ``dcp.save`` stores one object for each name. Give it the loaders of two ranks, and one is lost
# without a word. With the rank in the name, as torchtitan has it, both are kept, for two ranks
# only.

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
# A keeper keeps both. On three ranks it does not guess, and each rank is told:


def refused(folder):
    try:
        run(folder, 0)
    except torchlift.CheckpointError as error:
        return f"{error.reason}. {error.hint}"


texts = on_ranks(3, refused, folder)
assert len({*texts}) == 1
print(texts[0])

# %%
# Nothing has changed then. Which place is right only you know: here the ranks read every third
# sample, from the earliest one on.


def dealt_anew(states):
    return {"next": min(state["next"] for state in states) + dist.get_rank()}


three_places = on_ranks(3, run, folder, 0, {"loader": dealt_anew})
print(three_places)
assert three_places == [10, 11, 12]

# %%
# Proof
# -----
#
# How often is each of 24 samples read, by the two ranks before and by those that go on?


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
for (way, read), color in zip(ways.items(), ("C0", "C3", "C1", "C1"), strict=True):
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
# *Two ranks stop after ten of 24 samples, and others go on: how often each sample is read in all.
# Where torch's DCP has one state for the data loaders of both ranks, seven samples are read twice
# and seven never. With a state of each rank (the rank in its name, or by a Keeper) all are read
# once; a Keeper does that on another number of ranks, too.*
#
# What else ranks have of their own: generators of random numbers go back to as many ranks, and a
# rank without any keeps those that it has. What is equal on all ranks, such as a schedule, is
# stored once and goes to any number of them, as models and optimizers do. And every rank ends the
# same way: what fails on one, in a save or a resume, is within seconds an error on all.
#
# Remember
# --------
#
# - Weights have a place in the model; a data loader has one on its rank.
# - One name, one object: where several ranks write it, somebody's is lost.
# - What cannot be decided is asked: ``resume(on_other_ranks={name: function})``.
#
# Use this when
# -------------
#
# - **Ranks have loaders, or other states of their own:** pass them to `torchlift.Keeper`.
# - **The whole loop, with signals and launchers:** the page *On a cluster*.
# - **Only weights go to another number of GPUs:** the recipe *Load a DCP checkpoint on
#   another number of GPUs, or on none*.

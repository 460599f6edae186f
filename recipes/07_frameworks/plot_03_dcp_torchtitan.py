"""
dcp.load and dcp.save by one argument: faster, checked, from any format
=======================================================================

Your loop calls ``torch.distributed.checkpoint`` (DCP), or torchtitan does it for you. DCP's reader
unpickles, compares no checksums, and knows only its own folders. Must you write another loop?

No: pass `torchlift.distributed.CheckpointReader` to ``dcp.load``, and
`torchlift.distributed.CheckpointWriter` to ``dcp.save``, as one argument each.
"""

# %%
# In short
# --------

import tempfile

import torch
import torch.distributed.checkpoint as dcp

from torchlift.distributed import CheckpointReader, CheckpointWriter, on_ranks


def save_and_load(path):
    torch.manual_seed(0)  # each rank has the same replica
    state = {"model": torch.nn.Linear(512, 512).state_dict()}
    dcp.save(state, storage_writer=CheckpointWriter(path))
    dcp.load(state, storage_reader=CheckpointReader(path))
    return f"{state['model']['weight'].nbytes:,} bytes"


print(on_ranks(2, save_and_load, tempfile.mkdtemp() + "/step-1"))

# %%
# DCP still decides which rank reads and writes which bytes. It still handles replicas, planners and
# DTensors. torchlift only moves the bytes. It reads folders that torch has written, and torch reads
# the folders of this writer.
#
# metadata is None; global metadata read failed
# ---------------------------------------------
#
# DCP does not recognise a file of ``torch.save``. ``dcp.load`` looks for a folder of its own:

from pathlib import Path

folder = Path(tempfile.mkdtemp())
torch.save(
    {"model": torch.nn.Linear(512, 512).state_dict()}, folder / "model.pt"
)


def load_file(path):
    state = {"model": torch.nn.Linear(512, 512).state_dict()}
    reason = ""
    try:
        dcp.load(state, checkpoint_id=path)
    except dcp.api.CheckpointException as error:
        reason = str(error.failures[0][0]).split(";")[0]
    dcp.load(state, storage_reader=CheckpointReader(path))
    bias = torch.load(path)["model"]["bias"]
    return reason, bias.equal(state["model"]["bias"])


print(on_ranks(2, load_file, str(folder / "model.pt"))[0])

# %%
# The reader also accepts safetensors, sharded or not, a DeepSpeed folder or a URL. ``root=``
# selects the state inside it: ``CheckpointReader(path, root="model")``.
#
# Proof
# -----
#
# Two ranks load 64 MB in 400 tensors, sharded as by FSDP2. They load a DCP folder by torch's reader
# and by torchlift's. They load safetensors by torch's reader of Hugging Face's files and by
# torchlift's. Then they save and flush. Each time is the median of five, after one run that does
# not count.
#
# By arithmetic, a load copies 64 MB in memory at least once. That time is printed first. The time
# above it is work on 400 tensors: names, plans, and messages between the ranks.

# fold: How it is measured
import time
import timeit
from statistics import median

from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    HuggingFaceStorageReader,
)
from torch.distributed.fsdp import fully_shard

import torchlift


def build():
    return torch.nn.Sequential(*[torch.nn.Linear(282, 282) for _ in range(200)])


def seconds(call, state, **how):
    torch.distributed.barrier()
    start = time.perf_counter()
    call(state, **how)
    torch.distributed.barrier()
    return time.perf_counter() - start


def measured(folder):
    torch.set_num_threads(1)
    state, times, sums = fully_shard(build()).state_dict(), {}, set()
    for name, make, place in (
        ("load DCP: FileSystemReader", FileSystemReader, "dcp"),
        ("load DCP: CheckpointReader", CheckpointReader, "dcp"),
        ("load HF: HuggingFaceStorageReader", HuggingFaceStorageReader, "hf"),
        ("load HF: CheckpointReader", CheckpointReader, "hf"),
    ):
        readers = [make(f"{folder}/{place}") for _ in range(6)]
        times[name] = [
            seconds(dcp.load, state, storage_reader=r) for r in readers
        ]
        sums.add(
            sum(t.to_local().double().sum().item() for t in state.values())
        )
    for name, make, more in (
        ("save DCP: FileSystemWriter", FileSystemWriter, {"sync_files": True}),
        ("save DCP: CheckpointWriter", CheckpointWriter, {}),
    ):
        writers = [
            make(f"{folder}/{make.__name__}{n}", **more) for n in range(6)
        ]
        times[name] = [
            seconds(dcp.save, state, storage_writer=w) for w in writers
        ]
    return {name: each[1:] for name, each in times.items()}, sums


state = build().state_dict()
torchlift.save(state, folder / "dcp", format="dcp")
torchlift.save(state, folder / "hf" / "model.safetensors")
copies = torch.ones(2, 16_000_000)  # two states of 64 MB
copied = min(timeit.repeat(lambda: copies[0].copy_(copies[1]), number=1))
print(f"expected: at least one copy of 64 MB, which takes {copied:.3f} s")
found, sums = on_ranks(2, measured, str(folder))[0]
for name, times in found.items():
    print(
        f"{name:<34} {median(times):.3f} s ({min(times):.3f} s to "
        f"{max(times):.3f} s), ~{median(times) / copied:.0f} copies"
    )
    assert median(times) > copied, "no way is faster than a copy"
assert len(sums) == 1, "all readers read the same"

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 3.2))
labels = [name.replace(": ", ":\n") for name in found]
middles = [median(times) for times in found.values()]
bars = axes.barh(labels, middles, color=["C0", "C1"] * 3)
axes.bar_label(bars, [f"{middle:.2f} s" for middle in middles], padding=4)
axes.tick_params(axis="y", labelsize=9)
axes.invert_yaxis()
axes.set(xlim=(0, 1.2 * max(middles)), xlabel="seconds, median of five")
plt.show()

# %%
# *The bars show the seconds that two ranks take for 64 MB, in pairs: torch's own reader or writer
# above, torchlift's below. Both writers flush to the disk. A shorter lower bar is the time that you
# save by changing one argument.*
#
# torchtitan takes ``torchlift.integrations.torchtitan`` in its configuration. The page *Inside your
# framework* has the line.
#
# Remember
# --------
#
# - ``dcp.load(state, storage_reader=CheckpointReader(path))``: any format, any mesh.
# - ``dcp.save(state, storage_writer=CheckpointWriter(path))``: complete or absent, with checksums.
# - torchlift executes nothing in a checkpoint. Torch unpickles ``.metadata``, which can run code.
#
# Use this when
# -------------
#
# - **A loop or a framework calls DCP:** these two arguments.
# - **The loop is yours:** `torchlift.load` needs no state dict before it, and lists the missing
#   keys.
# - **You save again and again:** `torchlift.Keeper`.

# %%
# Question
# --------
#
# A loop asks for a tensor that the folder lacks. Which of the two readers returns without an error?


# fold: Answer to the question
# Neither. DCP's planner compares the names before a reader gets to work.
def ask_for_more(reader):
    state = build().state_dict() | {"extra": torch.zeros(2)}
    try:
        dcp.load(state, storage_reader=reader(folder / "dcp"))
    except dcp.api.CheckpointException as error:
        return str(error.failures[0][0])


for reader in FileSystemReader, CheckpointReader:
    (text,) = on_ranks(1, ask_for_more, reader)
    print(reader.__name__, "-", text)
    assert "extra" in text

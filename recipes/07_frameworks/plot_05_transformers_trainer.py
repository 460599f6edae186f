"""
transformers Trainer: save in the background, resume to the bit
===============================================================

At each ``save_steps`` the Trainer stops until its folder of files is written. A kill during that
time leaves an incomplete folder, and the Trainer will resume from it. Can it save complete
checkpoints in the background?

Yes: one callback saves in its place, through a `torchlift.Keeper`.
"""

# %%
# In short
# --------

import tempfile

import transformers as hf

from torchlift.integrations.transformers import KeeperCallback

model = hf.BertForSequenceClassification(hf.BertConfig(hidden_size=48))
rows = [{"input_ids": [n] * 8, "labels": n % 2} for n in range(64)]
run = {"max_steps": 4, "save_steps": 2, "disable_tqdm": True, "use_cpu": True}
arguments = hf.TrainingArguments(tempfile.mkdtemp(), **run)
callback = KeeperCallback(tempfile.mkdtemp(), keep=2)
trainer = hf.Trainer(model, arguments, train_dataset=rows, callbacks=[callback])
trainer.remove_callback(hf.PrinterCallback)
trainer.train(resume_from_checkpoint=callback.resume(trainer))
print("steps:", trainer.state.global_step)

# %%
# With a folder that stays, the same program resumes after the last checkpoint. ``save_strategy``
# and ``save_steps`` decide when to save. ``keep=``, ``every=`` and ``best=`` of the callback decide
# what to keep.
#
# Resume from an incomplete checkpoint
# ------------------------------------
#
# The Trainer chooses its last checkpoint by the number in its name (`issue 35782
# <https://github.com/huggingface/transformers/issues/35782>`__). Here a kill left an incomplete
# one:

from pathlib import Path

from transformers.trainer_utils import get_last_checkpoint

import torchlift

folder = Path(arguments.output_dir)
(folder / "checkpoint-6").mkdir()
(folder / "checkpoint-6" / "model.safetensors").write_bytes(b"\0" * 100)
print(Path(get_last_checkpoint(str(folder))).name)

# %%
# A Keeper names a file only after it is complete. It also stores checksums and checks them:

kept = torchlift.Keeper(callback.directory)
print(kept.steps(), torchlift.verify(kept.latest()).ok)

# %%
# Proof
# -----
#
# A network of 16 MB with a dropout, and moments of twice as much, is saved at every tenth step. How
# long does a step with a save wait? By arithmetic, the Trainer writes 48 MB to the disk during that
# step. The callback copies them in memory, so its step waits for a copy. Weights, gradients and
# moments are 64 MB (61 MiB), and with the copy 112 MB (107 MiB). The process owns at least that.
#
# Each way runs in a new process. Then each resumes from step 30, with other random numbers, and
# every loss must equal that of the run that never stopped.

# fold: How it is measured
import shutil
import time
import timeit
from statistics import median

import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        first, second = torch.nn.Linear(16, 2000), torch.nn.Linear(2000, 2000)
        last = torch.nn.Linear(2000, 1)
        self.net = torch.nn.Sequential(first, torch.nn.Dropout(), second, last)
        self.losses, self.starts = [], []

    def forward(self, x, labels):
        loss = (self.net(x)[:, 0] - labels).square().mean()
        self.losses.append(loss.item())
        self.starts.append(time.perf_counter())
        return {"loss": loss}


def train(way, folder, again):
    run = {
        "max_steps": 60,
        "save_steps": 10,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    arguments = hf.TrainingArguments(f"{folder}/out", **run)
    data = torch.linspace(-1, 1, 64 * 16).view(64, 16).sin()
    rows = [{"x": row, "labels": row.sum()} for row in data]
    callback = KeeperCallback(f"{folder}/kept", keep=None)
    callbacks = [callback] if way == "torchlift" else []
    torch.manual_seed(5 if again else 0)
    trainer = hf.Trainer(
        Net(), arguments, train_dataset=rows, callbacks=callbacks
    )
    trainer.remove_callback(hf.PrinterCallback)
    last = f"{folder}/out/checkpoint-30" if again else None
    if way == "torchlift":
        last = callback.resume(trainer)
    trainer.train(resume_from_checkpoint=last)
    return trainer.model


def resume(way, folder):
    torch.set_num_threads(1)
    first = train(way, folder, False)
    steps = [
        b - a for a, b in zip(first.starts, first.starts[1:], strict=False)
    ]
    for path in Path(f"{folder}/kept").glob("step-*"):
        if int(path.name[5:14]) > 30:
            path.unlink() if path.is_file() else shutil.rmtree(path)
    again = train(way, folder, True)
    saving = steps[19::10]  # the first save allocates memory and does not count
    others = [each for at, each in enumerate(steps[10:], 11) if at % 10]
    return saving, others, again.losses == first.losses[30:]


copies = torch.ones(2, 12_000_000)  # two states of 48 MB
copied = min(timeit.repeat(lambda: copies[0].copy_(copies[1]), number=1))
print(f"expected: a copy of 48 MB, which takes {copied:.3f} s")
found, expected = {}, {"Trainer": 61, "torchlift": 107}
for way in expected:
    with tempfile.TemporaryDirectory() as place:
        child = torchlift.measure.in_child(resume, way, place)
    saving, others, is_equal = child.value
    found[way] = (others, saving)
    peak = child.memory.added_anonymous / 2**20
    print(
        f"{way:<9} a step {median(others):.3f} s, "
        f"one that saves {median(saving):.3f} s"
    )
    print(f"{'':<9} at least {expected[way]} expected", end=", ")
    print(f"anonymous peak: {peak:.0f} MiB")
    assert 0.9 < peak / expected[way] < 3
    assert is_equal, "to the bit"

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots(figsize=(5.6, 2.8))
names = [f"{way},\n{kind}" for way in found for kind in ("no save", "saves")]
times = [median(each) for pair in found.values() for each in pair]
bars = axes.barh(names, times, color=["C3", "C0", "C3", "C1"])
axes.bar_label(bars, [f"{each:.2f} s" for each in times], padding=4)
axes.invert_yaxis()
axes.set(
    xlim=(0, 1.25 * max(times)), xlabel="seconds of a training step, median"
)
plt.show()

# %%
# *The bars show the median seconds of a training step, without a save and with one. The Trainer
# writes its own checkpoint before the next step begins. The callback only copies in memory and
# writes in the background, so a step with a save does not wait for the disk.*
#
# Both resume to the bit here. The snapshot is a second copy of the state in memory. Frozen weights
# need not be in a checkpoint: see ``ignore_frozen_params`` on the page *Inside your framework*.
#
# Remember
# --------
#
# - ``trainer.train(resume_from_checkpoint=callback.resume(trainer))`` is the same for the first run
#   and the next.
# - ``save_steps`` decides when to save. ``keep=``, ``every=`` and ``best="eval_loss"`` decide what
#   to keep.
# - Model, optimizer, schedule, ``GradScaler``, callbacks and each rank's random numbers are
#   resumed.
#
# Use this when
# -------------
#
# - **The Trainer owns the loop:** ``KeeperCallback``.
# - **The loop is yours:** *Save while training goes on, and resume after a kill*.
# - **You need the weights of a kept checkpoint:** `torchlift.load` with ``root="model"``.

# %%
# Question
# --------
#
# The training is over. How do you get the weights of step 4 into a model, without a Trainer?

# fold: Answer to the question
# A kept checkpoint is an ordinary file, and its weights are below "model".
fresh = torchlift.skeleton(hf.BertForSequenceClassification, model.config)
report = torchlift.load(fresh, kept.latest(), root="model")
print(len(report.loaded), "tensors of step", kept.steps()[-1])
assert torchlift.diff(fresh.state_dict(), model.state_dict()).equal

"""
Lightning: resume a Trainer or Fabric to the bit, in the middle of an epoch
===========================================================================

``trainer.fit(ckpt_path=...)`` resumes, and the losses differ from those of an uninterrupted run.
What was lost?

The random numbers were lost. ``torchlift.integrations.lightning`` has a plugin that writes and
reads the checkpoints, and a callback that adds each rank's own state.
"""

# %%
# In short
# --------

import tempfile

import torch
from lightning_fabric import Fabric

import torchlift
from torchlift.integrations.lightning import CheckpointIO

path = tempfile.mkdtemp() + "/last.ckpt"
fabric = Fabric(accelerator="cpu", plugins=[CheckpointIO()])
state = {"model": fabric.setup(torch.nn.Linear(8, 1)), "step": 7}
fabric.save(path, state)
fabric.load(path, state)
print("in the file:", dict(torchlift.open(path).objects))

# %%
# A Trainer also takes ``plugins=[CheckpointIO()]``, and the callback ``RankStates()``. The plugin
# writes a complete file or none, and checks its checksums before a load. It executes nothing in a
# file, and ``torch.load`` reads its files.
#
# The loss after a resume
# -----------------------
#
# This network has a dropout, its loader has a position, and its learning rate follows a schedule.
# The checkpoint of step 10 is in the middle of an epoch.

# fold: A loader with a position, a network with a dropout, a trainer
import logging
import warnings

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint

from torchlift.integrations.lightning import RankStates

logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
# Lightning 2.6 imports a class of torch's pytree by its old name.
warnings.filterwarnings("ignore", ".*treespec, LeafSpec", FutureWarning)


class Stream:
    def __init__(self):
        self.at = 0

    def __iter__(self):
        self.at %= 16
        while self.at < 16:
            self.at += 1
            yield torch.linspace(0, self.at, 32 * 16).view(32, 16).sin()

    def __len__(self):
        return 16

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        first, last = torch.nn.Linear(16, 512), torch.nn.Linear(512, 1)
        self.net = torch.nn.Sequential(first, torch.nn.Dropout(), last)
        self.losses = []

    def training_step(self, batch, index):
        loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.003)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def fit(folder, more, path=None):
    saves = ModelCheckpoint(
        folder, "{step}", save_top_k=-1, every_n_train_steps=10
    )
    callbacks = [saves, *([RankStates()] if more else [])]
    trainer = pl.Trainer(
        max_steps=40, callbacks=callbacks, accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False, **more,
    )  # fmt: skip
    model = Net()
    trainer.fit(model, Stream(), ckpt_path=path)
    return model.losses


# %%
# Proof
# -----
#
# Each way runs in a new process: a run that never stops, and a run that resumes from its checkpoint
# of step 10. Compare the two losses at each step.

# fold: How it is measured
import time


def resume(way, folder):
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # in the measured process
    torch.set_num_threads(1)
    more = {"plugins": [CheckpointIO()]} if way == "torchlift" else {}
    torch.manual_seed(0)
    straight = fit(folder, more)
    torch.manual_seed(5)  # another process has other random numbers
    start = time.perf_counter()
    resumed = fit(folder, more, f"{folder}/step=10.ckpt")
    seconds = time.perf_counter() - start
    return seconds, [
        abs(a - b) for a, b in zip(straight[10:], resumed, strict=True)
    ]


far = {}
for way in ("Lightning", "torchlift"):
    with tempfile.TemporaryDirectory() as folder:
        child = torchlift.measure.in_child(resume, way, folder)
        is_ok = torchlift.verify(f"{folder}/step=40.ckpt").ok
    seconds, far[way] = child.value
    peak = child.memory.added_anonymous / 2**20
    print(f"{way:<10} losses differ by at most ~{max(far[way]):.4f}")
    print(f"{'':<10} resume and 30 steps: {seconds:.2f} s")
    print(f"{'':<10} anonymous peak: {peak:.0f} MiB")
assert is_ok
assert max(far["torchlift"]) == 0
assert max(far["Lightning"]) > 0.001

# %%

import matplotlib.pyplot as plt

plt.style.use("torchlift.measure.figures")
figure, axes = plt.subplots()
for way, look in (("torchlift", "C1-"), ("Lightning", "C0:")):
    axes.plot(range(11, 41), far[way], look, label=way)
axes.set(xlabel="step", ylabel="distance of the losses")
figure.legend(loc="outside upper center", ncols=2)
plt.show()

# %%
# *The lines show the distance between the loss after a resume from step 10 and the loss of the run
# that never stopped. With the plugin and the callback it is zero, to the bit. Lightning alone
# resumes with other random numbers, so its run cannot be reproduced.*
#
# Some loaders lack a ``state_dict``. Such a loader restarts its epoch after a resume, with any
# callback. Save at the end of an epoch then. An average of the weights (EMA) is a submodule, or a
# callback with a state. The checkpoint contains it in both cases.
#
# Remember
# --------
#
# - ``Trainer(plugins=[CheckpointIO()], callbacks=[RankStates()])``, and the same for the resume.
# - ``ModelCheckpoint`` still decides when to save and what to keep.
#   ``AsyncCheckpointIO(CheckpointIO())`` writes in a thread.
# - FSDP, ``ModelParallelStrategy`` and DeepSpeed write their own files and ignore the plugin.
#
# Use this when
# -------------
#
# - **A Trainer or a Fabric owns the loop:** this line.
# - **You want Lightning's weights without Lightning:** ``root="state_dict.net"``, as in *Resume
#   training: model, optimizer, step and random state*.
# - **The loop is yours:** `torchlift.Keeper`.

# %%
# Question
# --------
#
# Does plain ``torch.load`` read a file of the plugin?

# fold: Answer to the question
# Yes: it is an ordinary torch file, and weights_only=True is enough.
plain = torch.load(path)
print(*plain["model"], "- step", plain["step"])
assert plain["step"] == 7

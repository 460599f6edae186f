"""Lightning's checkpoints as torchlift writes and reads them: `CheckpointIO` and `RankStates`.

For ``pytorch_lightning`` and ``lightning``, whichever is imported.
"""

from __future__ import annotations

import copy
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

import torchlift
from torchlift.distributed import Generators
from torchlift.errors import IntegrityError, PlacementError

#: Of a checkpoint of Lightning: what each rank has of its own.
_RANKS = "torchlift_ranks"


def _classes(place: str, name: str) -> Iterator[type]:
    """Yield the class of that name of each Lightning that is imported, or else installed.

    The two packages hold two copies of one source, and each knows its own classes only.
    """
    packages = [
        ("lightning.fabric", "lightning.pytorch"),
        ("lightning_fabric", "pytorch_lightning"),
    ]
    imported = [each for each in packages if each[0] in sys.modules]
    installed = [each for each in packages if find_spec(each[1].partition(".")[0])]
    for fabric, trainer in imported or installed or packages[1:]:  # the last: which is missing
        yield getattr(import_module(place.format(fabric=fabric, trainer=trainer)), name)


_IO: Any = type("_IO", tuple(_classes("{fabric}.plugins.io.checkpoint_io", "CheckpointIO")), {})
_Callback: Any = type("_Callback", tuple(_classes("{trainer}.callbacks", "Callback")), {})


class CheckpointIO(_IO):
    """Writes and reads the checkpoints of a Trainer or a Fabric: ``plugins=[CheckpointIO()]``.

    A checkpoint is a file that ``torch.load`` reads. It appears whole or not at all, its checksums
    are compared before it is loaded, and nothing in it is executed. A state that no file holds so
    that it comes back (an object of your own in the hyperparameters) is refused by name when it is
    saved. The weights are mapped until the module has copied them: in memory is what the trainer
    keeps.

    Not for strategies that write by themselves and ignore the plugin: ``ModelParallelStrategy``,
    FSDP and DeepSpeed.

    Args:
        verify: read all of a checkpoint once first, to compare its checksums.
        allow_classes: tensor subclasses that may be rebuilt; see `torchlift.open`.
    """

    def __init__(self, *, verify: bool = True, allow_classes: Iterable[Any] = ()) -> None:
        self.verify, self.allow_classes = verify, allow_classes

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint, all or nothing.

        Raises:
            CheckpointError: it cannot be written, or has what no file can hold.
            TypeError: there are storage options.
        """
        if storage_options is not None:
            raise TypeError("torchlift writes to a file system, which takes no storage_options=")
        torchlift.save(checkpoint, path, format="torch-zip")

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return a checkpoint on the CPU, from where the trainer copies it; nothing is executed.

        Raises:
            CheckpointError: it cannot be read, or a checksum is wrong.
        """
        if self.verify and (failed := torchlift.verify(path).failed):
            raise IntegrityError(
                "the checkpoint is damaged",
                file=os.fspath(path),
                entry=failed[0].name,
                found=f"{len(failed)} wrong checksums",
            )
        with torchlift.open(path, allow_classes=self.allow_classes) as ckpt:
            found = ckpt.tree()
        # An optimizer keeps the tensors that it gets, and the file may be removed: no maps.
        return {
            name: value if name == "state_dict" else copy.deepcopy(value)
            for name, value in found.items()
        }

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint; of one that is not there, do nothing."""
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)


class RankStates(_Callback):
    """Keeps what each rank has of its own in a trainer's checkpoints: ``callbacks=[RankStates()]``.

    Its random number generators, and the places of data loaders with ``state_dict``: Lightning
    keeps no generators, and of the loaders the first rank's. With as many ranks as there were each
    gets its own; with another number the generators stay as they are, and places that differ are an
    error. A loader without ``state_dict`` begins its epoch anew, with any callback.

    Raises:
        PlacementError: other ranks saved, and their loaders were not at one place.
    """

    def __init__(self) -> None:
        self._saved: Any = None

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add what each rank has; all ranks call it."""
        own = {"rng": Generators().state_dict(), "loaders": _loop(checkpoint).get(_LOADERS)}
        every: list[Any] = [own]
        if trainer.world_size > 1:
            every = [None] * trainer.world_size
            torch.distributed.all_gather_object(every, own)
        checkpoint[_RANKS] = every

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take this rank's part, before the loops take theirs."""
        every = checkpoint.get(_RANKS)
        if not every:
            return
        places = [each["loaders"] for each in every]
        if len(every) == trainer.world_size:
            self._saved = every[trainer.global_rank]["rng"]
            if places[trainer.global_rank] is not None:
                _loop(checkpoint)[_LOADERS] = places[trainer.global_rank]
        elif any(str(place) != str(places[0]) for place in places):
            raise PlacementError(
                "the data loader of each rank was at a place of its own, and now there are other "
                "ranks",
                expected=f"{len(every)} ranks",
                found=str(trainer.world_size),
                hint="Leave the callback out to go on at the place of the first rank.",
            )

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the generators at the start of an epoch, from where its loader draws."""
        done = trainer.fit_loop.epoch_loop.batch_progress
        if self._saved is not None and (done.is_last_batch or not done.current.ready):
            self._set()
            # Which the trainer has begun before the first hook that comes after a resume.
            iter(trainer.fit_loop._data_fetcher)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        """Set the generators in the middle of an epoch."""
        if self._saved is not None:
            self._set()

    def _set(self) -> None:
        Generators().load_state_dict(self._saved)
        self._saved = None


#: What Lightning calls the places of data loaders.
_LOADERS = "combined_loader"


def _loop(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the loop over epochs."""
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state

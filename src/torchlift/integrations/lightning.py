"""Write and read Lightning's checkpoints with torchlift: `CheckpointIO` and `RankStates`.

They work with ``pytorch_lightning`` and ``lightning``, whichever is imported.
"""

from __future__ import annotations

import copy
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

import torchlift
from torchlift._system.containers import leaves
from torchlift.distributed import Generators
from torchlift.errors import IntegrityError, PlacementError

#: The key of the states of each rank in a checkpoint of Lightning.
_RANKS = "torchlift_ranks"


def _classes(place: str, name: str) -> Iterator[type]:
    """Yield a class of each Lightning package that is imported, or else installed.

    The two packages contain copies of the same source, and each accepts its own classes only.
    """
    packages = [
        ("lightning.fabric", "lightning.pytorch"),
        ("lightning_fabric", "pytorch_lightning"),
    ]
    imported = [each for each in packages if each[0] in sys.modules]
    installed = [each for each in packages if find_spec(each[1].partition(".")[0])]
    for fabric, trainer in imported or installed or packages[1:]:  # the import error names the last
        yield getattr(import_module(place.format(fabric=fabric, trainer=trainer)), name)


_IO: Any = type("_IO", tuple(_classes("{fabric}.plugins.io.torch_io", "TorchCheckpointIO")), {})
_Callback: Any = type("_Callback", tuple(_classes("{trainer}.callbacks", "Callback")), {})


class CheckpointIO(_IO):
    """Write and read the checkpoints of a Trainer or a Fabric: ``plugins=[CheckpointIO()]``.

    Strategies that write by themselves ignore the plugin: ``ModelParallelStrategy``, FSDP and
    DeepSpeed.

    A checkpoint is a file that ``torch.load`` can read. It is saved atomically. Its checksums are
    compared before the load, and no code in it runs. A save raises an error if the state contains
    an object that could not be loaded, such as a loss or your own class in the hyperparameters. The
    weights stay mapped until the module has copied them.

    Args:
        verify: Compare all checksums before a load.
        allow_classes: Tensor subclasses that may be rebuilt. See :ref:`arg-allow-classes`.
    """

    def __init__(self, *, verify: bool = True, allow_classes: Iterable[Any] = ()) -> None:
        self.verify, self.allow_classes = verify, allow_classes

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint atomically.

        Raises:
            CheckpointError: If it cannot be written, or has an object that a file cannot store.
            TypeError: If there are storage options.
        """
        for keys, value in leaves(checkpoint).items():
            # `save` would write its state dict, and a load would pass that to ``__init__``.
            if callable(getattr(value, "state_dict", None)):
                raise PlacementError(
                    "a checkpoint of Lightning cannot contain a module or another object with a "
                    "state",
                    file=os.fspath(path),
                    entry=".".join(map(str, keys)),
                    found=type(value).__name__,
                    hint=f"Call self.save_hyperparameters(ignore=[{keys[-1]!r}]), and pass it to "
                    "load_from_checkpoint.",
                )
        if storage_options is not None:
            raise TypeError(
                "storage_options= is not supported: this plugin writes to a file system"
            )
        torchlift.save(checkpoint, path, format="torch-zip")

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return a checkpoint on the CPU. The trainer copies it. No code runs.

        Raises:
            CheckpointError: If it cannot be read, or a checksum is wrong.
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
        # Copies in memory: an optimizer keeps the tensors, and the file may be removed.
        return {
            name: value if name == "state_dict" else copy.deepcopy(value)
            for name, value in found.items()
        }


class RankStates(_Callback):
    """Save each rank's own state in a trainer's checkpoints: ``callbacks=[RankStates()]``.

    Lightning does not save random number generators, and saves the first rank's data loaders only.
    This callback saves the generators and the positions of loaders with ``state_dict``, for each
    rank. On another number of ranks the generators stay as they are, and different positions are an
    error. A loader without ``state_dict`` restarts its epoch. If ``every_n_train_steps`` saves at
    the last step of an epoch, a warning says that Lightning leaves out the end of the epoch.

    Raises:
        PlacementError: If the number of ranks differs, and so did the positions of their loaders.
    """

    def __init__(self) -> None:
        self._saved: Any = None
        self._has_warned = False

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the state of each rank. All ranks call it."""
        done = trainer.fit_loop.epoch_loop.batch_progress
        is_before_end = done.is_last_batch and done.current.completed < done.current.ready
        if is_before_end and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "a checkpoint is saved at the last step of an epoch, before its validation. If it "
                "resumes from there, Lightning leaves the validation out, and the numbers differ. "
                "Save with every_n_epochs=1, or another every_n_train_steps.",
                RuntimeWarning,
                stacklevel=2,
            )
        own = {"rng": Generators().state_dict(), "loaders": _loop(checkpoint).get(_LOADERS)}
        every: list[Any] = [own]
        if trainer.world_size > 1:
            every = [None] * trainer.world_size
            torch.distributed.all_gather_object(every, own)
        checkpoint[_RANKS] = every

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Select the state of this rank, before the loops load theirs."""
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
                "each rank saved another position of its data loader, and the number of ranks "
                "differs",
                expected=f"{len(every)} ranks",
                found=str(trainer.world_size),
                hint="Leave the callback out to resume from the position of the first rank.",
            )

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the generators at the start of an epoch, before its loader draws from them."""
        loop = trainer.fit_loop
        done = loop.epoch_loop.batch_progress
        if self._saved is not None and (done.is_last_batch or not done.current.ready):
            self._set()
            # The trainer makes the first iterator before any hook after the resume. The saved epoch
            # used that one if it was at its end, and then the trainer makes another one.
            if loop.is_resuming or loop.epoch_loop.restarting or not trainer.current_epoch:
                iter(loop._data_fetcher)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        """Set the generators in the middle of an epoch."""
        if self._saved is not None:
            self._set()

    def _set(self) -> None:
        Generators().load_state_dict(self._saved)
        self._saved = None


#: Lightning's key of the positions of data loaders.
_LOADERS = "combined_loader"


def _loop(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the loop over epochs."""
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state

"""Checkpoints of the objects of an ``accelerate.Accelerator``: `AcceleratorKeeper`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler

from torchlift import Keeper
from torchlift.distributed import Generators


class AcceleratorKeeper:
    """Save and resume all objects that an accelerator has prepared or registered.

    Use it in place of ``accelerator.save_state`` and ``load_state``. It saves models, optimizers,
    schedulers, data loaders, the gradient scaler, the objects of ``register_for_checkpointing``,
    and each rank's random number generators. The names are ``model``, ``optimizer``,
    ``scheduler``, ``loader``, ``scaler`` and ``object``. A second model is ``model_1``.

    The state of a loader is its epoch and the seed of its order. A ``StatefulDataLoader``
    (``use_stateful_dataloader=True``) also has its position. For other loaders, `remaining` skips
    the batches that are done. Call ``loader.set_epoch(epoch)`` at each epoch, as in accelerate.

    Args:
        accelerator: The accelerator. Prepare the objects before the first `save` or `resume`.
        directory: See `torchlift.Keeper`.
        **options: Options of `torchlift.Keeper`, such as ``keep``, ``every`` and ``best``.

    Attributes:
        keeper: The keeper, for ``steps()``, ``latest()`` and ``best()``.
    """

    def __init__(
        self, accelerator: Accelerator, directory: str | os.PathLike[str], **options: Any
    ) -> None:
        self.accelerator = accelerator
        self.keeper = Keeper(directory, **options)
        self._generators: dict[str, Any] | None = None  # as they were saved

    def save(
        self, step: int, *, metrics: Mapping[str, float] | None = None, **objects: object
    ) -> bool:
        """Save everything, and more objects by name. See `torchlift.Keeper.save`."""
        return self.keeper.save(step, dict(self._objects()), metrics=metrics, **objects)

    def resume(self, **arguments: Any) -> int | None:
        """Load everything from the last checkpoint. See `torchlift.Keeper.resume`.

        Args:
            **arguments: Its keywords, such as ``step``, and more objects by name.

        Returns:
            The step that was saved, or None if there is no checkpoint.
        """
        step = self.keeper.resume(dict(self._objects()), **arguments)
        self._generators = None if step is None else Generators().state_dict()
        return step

    def remaining(self, loader: Any, batches: int) -> Iterator[Any]:
        """Yield the remaining batches of an epoch after a resume.

        ``accelerator.skip_first_batches`` draws from the random number generators again. This
        method restores their saved states before the first batch.

        Args:
            loader: A prepared loader that is not a ``StatefulDataLoader``.
            batches: The number of batches of the epoch that are done.
        """
        left = self.accelerator.skip_first_batches(loader, batches)
        left.set_epoch(loader.iteration)
        for number, batch in enumerate(left):
            if batches and not number and self._generators is not None:
                Generators().load_state_dict(self._generators)
                self._generators = None
            yield batch
        loader.iteration = left.iteration

    def close(self) -> None:
        """Wait for the last save. See `torchlift.Keeper.close`."""
        self.keeper.close()

    def __enter__(self) -> AcceleratorKeeper:
        return self

    def __exit__(self, *error: Any) -> None:
        self.keeper.__exit__(*error)

    def _objects(self) -> Iterator[tuple[str, object]]:
        """Yield all objects by name."""
        prepared = self.accelerator
        kinds = {
            "model": prepared._models,
            # The inner optimizers: accelerate's wrapper does not have ``_init_group``.
            "optimizer": [each.optimizer for each in prepared._optimizers],
            "scheduler": prepared._schedulers,
            "loader": [_Place(each) for each in prepared._dataloaders],
            "object": prepared._custom_objects,
            "scaler": [prepared.scaler] if prepared.scaler is not None else [],
        }
        for kind, found in kinds.items():
            for number, each in enumerate(found):
                yield f"{kind}_{number}" if number else kind, each


class _Place:
    """The position of a prepared data loader, as an object with a state."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
        self.sampler = sampler if isinstance(sampler, SeedableRandomSampler) else None

    def state_dict(self) -> dict[str, Any]:
        state = {"iteration": self.loader.iteration}
        if self.loader.use_stateful_dataloader:
            state["place"] = self.loader.state_dict()
        if self.sampler is not None:
            state |= {"epoch": self.sampler.epoch, "seed": self.sampler.initial_seed}
        if self.loader.synchronized_generator is not None:
            state["generator"] = self.loader.synchronized_generator.get_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.iteration = state["iteration"]
        if "place" in state:
            self.loader.load_state_dict(state["place"])
        if self.sampler is not None and "seed" in state:
            self.sampler.epoch, self.sampler.initial_seed = state["epoch"], state["seed"]
        if self.loader.synchronized_generator is not None and "generator" in state:
            self.loader.synchronized_generator.set_state(state["generator"])

"""Save the checkpoints of transformers' ``Trainer`` with a Keeper: `KeeperCallback`."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from torchlift import Keeper

#: The file from which a Trainer reads its own state.
_STATE_FILE = "trainer_state.json"


class KeeperCallback(TrainerCallback):
    """Save the checkpoints of a ``Trainer`` with a `torchlift.Keeper`, and resume.

    It replaces the Trainer's own saves (``save_strategy="steps"`` or ``"epoch"``). It saves the
    model, the optimizer, the scheduler, the gradient scaler, the state of the Trainer and of its
    callbacks, and each rank's random number generators. ``save_total_limit`` has no effect: pass
    ``keep=`` and ``best=``. The Trainer skips the batches that are done. All ranks create the
    callback.

    Args:
        directory: See `torchlift.Keeper`.
        **options: Options of `torchlift.Keeper`, such as ``keep`` and ``every``. ``best`` is a
            metric of the evaluation, such as ``"eval_loss"``.

    Example:
        >>> callback = KeeperCallback("checkpoints")  # doctest: +SKIP
        >>> trainer = Trainer(model, arguments, callbacks=[callback])  # doctest: +SKIP
        >>> trainer.train(resume_from_checkpoint=callback.resume(trainer))  # doctest: +SKIP
    """

    def __init__(self, directory: str | os.PathLike[str], **options: Any) -> None:
        self.directory, self.options = directory, options
        self.keeper: Keeper | None = None
        self._trainer: Any = None
        self._step: int | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._metrics: dict[str, float] = {}
        self._sets_generators = False

    def resume(self, trainer: Any) -> str | None:
        """Prepare a Trainer to resume from the last checkpoint. All ranks call it.

        Args:
            trainer: The Trainer. Call its ``train`` next. Its method that reads weights from a
                folder is replaced until then.

        Returns:
            The value for ``resume_from_checkpoint`` of ``train``, or None without a checkpoint.

        Raises:
            CheckpointError: If the checkpoint cannot be read.
        """
        if self.keeper is not None:  # a training that failed left it with the folder's lock
            self.keeper.close()
        self._trainer, self.keeper = trainer, Keeper(self.directory, **self.options)
        state = _TrainerState(trainer)
        # Each rank logs its own evaluation times. On other ranks, all get the first rank's log.
        merged = {"trainer": lambda states: states[0]}
        self._step = self.keeper.resume(trainer=state, on_other_ranks=merged)
        if self._step is None:
            return None
        self._folder = tempfile.TemporaryDirectory()
        with open(os.path.join(self._folder.name, _STATE_FILE), "w", encoding="utf-8") as file:
            file.write(state.saved)
        trainer._load_from_checkpoint = lambda *_: None
        return self._folder.name

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Load everything into the objects that the Trainer has prepared.

        Raises:
            RuntimeError: If `resume` was not called, or its result was not passed to ``train``.
            ValueError: If the arguments have ``save_strategy="best"``.
        """
        if self.keeper is None:
            raise RuntimeError(
                "the callback has no keeper: call "
                "trainer.train(resume_from_checkpoint=callback.resume(trainer))"
            )
        if args.save_strategy == SaveStrategy.BEST:
            raise ValueError('save_strategy="best": pass best= to the callback, and "steps" here')
        if self._folder is not None and self._step is not None:
            del self._trainer._load_from_checkpoint  # the next train may be without this callback
            self._folder.cleanup()
            if state.global_step != self._step:
                raise RuntimeError(
                    "the Trainer does not resume: pass the result of callback.resume to train, as "
                    "resume_from_checkpoint"
                )
            self.keeper.resume(self._objects(), step=self._step, verify=False)
            self._folder, self._sets_generators = None, True

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the generators before an epoch draws the order of its data."""
        if state.epoch == int(state.epoch):
            self._set_generators()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the generators after the Trainer has skipped batches."""
        self._set_generators()

    def _set_generators(self) -> None:
        if self._sets_generators and self.keeper is not None:
            self.keeper.resume(step=self._step, verify=False)
            self._sets_generators = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save if the Trainer would save now, and will not log or evaluate before."""
        is_last = not (control.should_log or control.should_evaluate)
        if self.keeper is not None and control.should_save and is_last:
            trainer = _TrainerState(self._trainer)
            self.keeper.save(
                state.global_step, self._objects(), trainer=trainer, metrics=self._metrics
            )
            control.should_save = False

    on_epoch_end = on_log = on_step_end

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Save after the evaluation, with its metrics."""
        numbers = {k: v for k, v in more["metrics"].items() if isinstance(v, (int, float))}
        self._metrics = numbers
        self.on_step_end(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the last save.

        Raises:
            CheckpointError: If it failed.
        """
        if self.keeper is not None:
            self.keeper.close()
            self.keeper = None

    def _objects(self) -> dict[str, object]:
        trainer = self._trainer
        optimizer = trainer.optimizer
        objects = {
            "model": trainer.model,
            "optimizer": getattr(optimizer, "optimizer", optimizer),  # inside accelerate's wrapper
            "scheduler": trainer.lr_scheduler,
        }
        scaler = trainer.accelerator.scaler
        return objects if scaler is None else {**objects, "scaler": scaler}


class _TrainerState:
    """The state of a Trainer and of its callbacks, as JSON, as the Trainer itself saves it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.saved = trainer, ""

    def state_dict(self) -> dict[str, str]:
        trainer = self.trainer
        own: dict[str, list[Any]] = {}
        for each in [*trainer.callback_handler.callbacks, trainer.control]:
            if isinstance(each, ExportableState):
                own.setdefault(type(each).__name__, []).append(each.state())
        callbacks = {name: all_ if len(all_) > 1 else all_[0] for name, all_ in own.items()}
        facts = {**asdict(trainer.state), "stateful_callbacks": callbacks}
        # Without the rank, so that the state is equal on all ranks.
        for name in ("is_local_process_zero", "is_world_process_zero"):
            del facts[name]
        return {"json": json.dumps(facts, sort_keys=True)}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        self.saved = state["json"]

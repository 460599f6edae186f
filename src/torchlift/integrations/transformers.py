"""Checkpoints of transformers' ``Trainer`` through a Keeper: `KeeperCallback`."""

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

#: The file in which a Trainer looks for its own state.
_STATE_FILE = "trainer_state.json"


class KeeperCallback(TrainerCallback):
    """Keeps the checkpoints of a ``Trainer`` through a `torchlift.Keeper`, and resumes.

    It saves when the Trainer would (``save_strategy="steps"`` or ``"epoch"``), in its place: model,
    optimizer, scheduler, gradient scaler, the Trainer's own state with that of its callbacks, and
    each rank's random number generators. ``save_total_limit`` does nothing then: ``keep=`` and
    ``best=`` say what stays. The Trainer skips the batches of the epoch that are done. On several
    ranks all of them make the callback.

    Args:
        directory: see `torchlift.Keeper`.
        **options: of `torchlift.Keeper`, such as ``keep``, ``every`` and ``best``: the name of a
            metric of the evaluation, ``"eval_loss"``.

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
        """Prepare a Trainer to go on from the last checkpoint; all ranks call it.

        Args:
            trainer: whose ``train`` is called next. The weights come from the checkpoint then: its
                method that reads them from a folder is replaced.

        Returns:
            What to pass to ``train`` as ``resume_from_checkpoint``; None where there is none.

        Raises:
            CheckpointError: the checkpoint cannot be read.
        """
        if self.keeper is not None:  # of a training that failed: it still has the folder
            self.keeper.close()
        self._trainer, self.keeper = trainer, Keeper(self.directory, **self.options)
        state = _TrainerState(trainer)
        # Ranks time their evaluations each for itself: the first one's log is all ranks' then.
        merged = {"trainer": lambda states: states[0]}
        self._step = self.keeper.resume(trainer=state, include=["trainer"], on_other_ranks=merged)
        if self._step is None:
            return None
        self._folder = tempfile.TemporaryDirectory()
        with open(os.path.join(self._folder.name, _STATE_FILE), "w", encoding="utf-8") as file:
            file.write(state.saved)
        trainer._load_from_checkpoint = lambda *_: None
        return self._folder.name

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Load everything into what the Trainer has prepared.

        Raises:
            RuntimeError: `resume` was not called, or its result was not passed on.
            ValueError: the arguments say to save by what is known after the evaluation only.
        """
        if self.keeper is None:
            raise RuntimeError(
                "trainer.train(resume_from_checkpoint=callback.resume(trainer)) makes the keeper"
            )
        if args.save_strategy == SaveStrategy.BEST:
            raise ValueError('save_strategy="best": pass best= to the callback, and "steps" here')
        if self._folder is not None and self._step is not None:
            del self._trainer._load_from_checkpoint  # the next call of train may be another's
            self._folder.cleanup()
            if state.global_step != self._step:
                raise RuntimeError(
                    "the Trainer begins anew: pass what callback.resume returns to train, as "
                    "resume_from_checkpoint"
                )
            self.keeper.resume(self._objects(), step=self._step, verify=False)
            self._folder, self._sets_generators = None, True

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the generators before an epoch draws the order of its data."""
        if state.epoch == int(state.epoch):
            self._set_generators()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the generators behind the batches of an epoch that were skipped."""
        self._set_generators()

    def _set_generators(self) -> None:
        if self._sets_generators and self.keeper is not None:
            self.keeper.resume(step=self._step, include=["rng"], verify=False)
            self._sets_generators = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save, if the Trainer is about to, and will neither log nor evaluate before."""
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
            CheckpointError: it failed.
        """
        if self.keeper is not None:
            self.keeper.close()
            self.keeper = None

    def _objects(self) -> dict[str, object]:
        trainer = self._trainer
        optimizer = trainer.optimizer
        objects = {
            "model": trainer.model,
            "optimizer": getattr(optimizer, "optimizer", optimizer),  # out of accelerate's wrapper
            "scheduler": trainer.lr_scheduler,
        }
        scaler = trainer.accelerator.scaler
        return objects if scaler is None else {**objects, "scaler": scaler}


class _TrainerState:
    """A Trainer's state and that of its callbacks, as text, as the Trainer itself keeps it."""

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
        # The same on all ranks: a Trainer says for itself which it is.
        for name in ("is_local_process_zero", "is_world_process_zero"):
            del facts[name]
        return {"json": json.dumps(facts, sort_keys=True)}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        self.saved = state["json"]

"""Save the checkpoints of transformers' ``Trainer`` with a Keeper: `KeeperCallback`."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import HubStrategy, IntervalStrategy

from torchlift import Keeper
from torchlift.distributed import Generators

#: The file from which a Trainer reads its own state.
_STATE_FILE = "trainer_state.json"


class KeeperCallback(TrainerCallback):
    """Save the checkpoints of a ``Trainer`` with a `torchlift.Keeper`, and resume.

    The Trainer saves at the same steps as before, but through the Keeper: the model, the optimizer,
    the scheduler, the gradient scaler, the states of the Trainer and of its callbacks, and each
    rank's random number generators. The Trainer skips the batches that are done. All ranks create
    the callback. "Frameworks" in the guide lists the arguments that it refuses or ignores.

    Args:
        directory: See `torchlift.Keeper`.
        **options: Options of `torchlift.Keeper`, such as ``keep`` and ``every``. ``best`` is a
            metric of the evaluation, such as ``"eval_loss"``. A checkpoint of a step without an
            evaluation has no metrics, and is never the best.

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
        self._measured_at: int | None = None
        self._generators: dict[str, Any] | None = None  # as they were saved, until they are set

    def resume(self, trainer: Any) -> str | None:
        """Prepare a Trainer to resume from the last checkpoint. All ranks call it.

        Args:
            trainer: The Trainer. Call its ``train`` next. Its method that saves a checkpoint is
                replaced until the training ends, and that which loads weights until it begins.

        Returns:
            The value for ``resume_from_checkpoint`` of ``train``, or None without a checkpoint.

        Raises:
            CheckpointError: If the checkpoint cannot be read.
        """
        if self.keeper is not None:  # a training that failed left it with the folder's lock
            self.keeper.close()
        self._trainer, self.keeper = trainer, Keeper(self.directory, **self.options)
        trainer._save_checkpoint = lambda *_, **__: self._save()
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
            ValueError: If the Trainer has an argument that this callback does not support.
        """
        if self.keeper is None:
            raise RuntimeError(
                "the callback does not have a keeper yet: call "
                "trainer.train(resume_from_checkpoint=callback.resume(trainer))"
            )
        self._check_arguments(args)
        if self._folder is not None and self._step is not None:
            del self._trainer._load_from_checkpoint
            self._folder.cleanup()
            if state.global_step != self._step:
                raise RuntimeError(
                    "the Trainer does not resume: pass the result of callback.resume to train, as "
                    "resume_from_checkpoint"
                )
            self.keeper.resume(self._objects(), step=self._step, verify=False)
            self._folder, self._generators = None, Generators().state_dict()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the generators before an epoch draws the order of its data."""
        if state.epoch == int(state.epoch):
            self._set_generators()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the generators after the Trainer has skipped batches."""
        self._set_generators()

    def _set_generators(self) -> None:
        if self._generators is not None:
            Generators().load_state_dict(self._generators)
            self._generators = None

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Keep the metrics of the step, also of several datasets."""
        if self._measured_at != state.global_step:
            self._metrics, self._measured_at = {}, state.global_step
        self._metrics |= {k: v for k, v in more["metrics"].items() if isinstance(v, (int, float))}

    def _save(self) -> None:
        """Save in place of the Trainer: after the evaluation, the schedule and the best metric."""
        assert self.keeper is not None
        trainer = self._trainer
        trainer.store_flos()
        step = trainer.state.global_step
        metrics = self._metrics if self._measured_at == step else None
        self.keeper.save(step, self._objects(), trainer=_TrainerState(trainer), metrics=metrics)

    def _check_arguments(self, args: Any) -> None:
        """Refuse arguments that need the Trainer's own files, and warn of those without effect.

        Raises:
            ValueError: If there is one.
        """
        best = self.options.get("best")
        refused = {
            "load_best_model_at_end=True": (
                args.load_best_model_at_end,
                "leave it out. Pass best= to the callback, and after train() call torchlift.load("
                "trainer.model, torchlift.distributed.RunFolder(folder, best=...).best(), "
                'root="model")',
            ),
            "enable_jit_checkpoint=True": (
                getattr(args, "enable_jit_checkpoint", False),
                "leave it out. Save more often, with save_steps",
            ),
            "deepspeed=": (
                self._trainer.is_deepspeed_enabled,
                "leave the callback out. DeepSpeed writes its own folders",
            ),
            f"best={best!r}": (
                best is not None and args.eval_strategy == IntervalStrategy.NO,
                'pass eval_strategy="steps" or "epoch" to TrainingArguments',
            ),
        }
        for name, (is_set, way_out) in refused.items():
            if is_set:
                raise ValueError(f"{name} does not work with the KeeperCallback: {way_out}")
        pushes = args.push_to_hub and args.hub_strategy != HubStrategy.END
        ignored = {
            "save_total_limit (pass keep= to the callback)": args.save_total_limit is not None,
            "save_only_model": args.save_only_model,
            f"hub_strategy={args.hub_strategy.value!r} (nothing is pushed at a save)": pushes,
        }
        if names := [name for name, is_set in ignored.items() if is_set]:
            warnings.warn(
                f"without effect with the KeeperCallback: {', '.join(names)}",
                RuntimeWarning,
                stacklevel=2,
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Wait for the last save.

        Raises:
            CheckpointError: If it failed.
        """
        if self.keeper is not None:
            del self._trainer._save_checkpoint  # the next train may be without this callback
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

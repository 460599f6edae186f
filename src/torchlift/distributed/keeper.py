"""Keep the checkpoints of a training run: save in the background, keep some, find the last, resume.

The policies are those of orbax's ``CheckpointManager``; the machinery on a mesh (the snapshot, the
planner, the files) is that of ``torch.distributed.checkpoint``.
"""

from __future__ import annotations

import copy
import operator
import os
import random
import re
import shutil
import sys
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import reduce
from operator import and_
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from torchlift._checkpoint import Checkpoint
from torchlift._checkpoint import open as open_checkpoint
from torchlift._model import RankGroup, has_group, is_closed, is_dtensor, uses_fsdp1, world_of
from torchlift._save import make_folders, require_savable, save
from torchlift._system import clipped_list, leaves, map_leaves
from torchlift._transfer import make_durable, remove_debris
from torchlift.distributed.options import StateDictMismatch, StateDictOptions, model_misfit
from torchlift.distributed.reader import CheckpointReader
from torchlift.distributed.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_state_dict,
)
from torchlift.distributed.writer import CheckpointWriter
from torchlift.errors import CheckpointError, FormatError, IntegrityError, PlacementError
from torchlift.formats import DCP_METADATA
from torchlift.formats import verify as verify_file

#: What a checkpoint is called: its step, and its generation from the second one on.
_NAME = re.compile(r"step-([0-9]{9,})(?:-([0-9]+))?(\.pt)?")
#: What a process that was killed leaves of one: its temporary file.
_BEGUN = re.compile(r"\.(step-[\d-]+\.pt)\.torchlift-\w{8}\.part")
#: Beside the shards of a mesh: what is no tensor of a model, and what each rank has of its own.
_REST, _RNG = "rest.pt", "rng-{}.pt"
#: Names that a checkpoint needs for itself.
_OWN = ("step", "metrics", "rng")


class _Kept(NamedTuple):
    """A complete checkpoint.

    Attributes:
        generation: how many times the run has gone back to an earlier step before.
        step, path: its own.
    """

    generation: int
    step: int
    path: str


class _Misfit(NamedTuple):
    """What of a model and a checkpoint does not fit on a rank.

    Attributes:
        missing: names that the checkpoint lacks.
        unexpected: a bit for each name of the checkpoint that the rank does not have.
        mismatched: name -> (shape in the model, in the checkpoint).
    """

    missing: list[str]
    unexpected: int
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


class Keeper:
    """Keeps the checkpoints of one run in a folder, which no other program writes to.

    On one process a checkpoint is a torch file, ``step-000000100.pt``, which appears whole or not
    at all. On several it is a folder, ``step-000000100``, in the format of
    ``torch.distributed.checkpoint``; its ``.metadata``, which is written last, says that it is
    complete. `torchlift.open` and `torchlift.load` read both (``root="model"``).

    A save takes a snapshot in memory, which is all that training waits for, and writes it in a
    thread of its own. One save is on its way at a time. What goes wrong there is raised by the next
    call of `save`, `wait` or `close`; a program that makes none is warned at its end. A tensor that
    is a view takes the memory that it looks into, in the snapshot.

    In a process group all ranks make their keeper, and call its methods, in the same order.

    Args:
        directory: where; created where it is not there.
        keep: how many of the last checkpoints to keep, without those of steps that the run has gone
            back on; None keeps all. One that cannot be removed is warned of.
        every: keep those too whose step is a multiple of it.
        best: keep the one too whose metric of that name is the best.
        best_is: whether the lowest or the highest metric is.
        background: False writes before `save` returns.
        busy: what `save` does while the last one is on its way: ``"wait"`` for it, or ``"skip"``.

    Raises:
        ValueError: an argument is not what it can be.

    Example:
        >>> import tempfile, torch, torchlift
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> state = {"model": model, "optimizer": optimizer}
        >>> folder = tempfile.mkdtemp()
        >>> with torchlift.Keeper(folder, keep=2) as keeper:
        ...     for step in range(keeper.resume(**state) or 0, 5):
        ...         keeper.save(step + 1, **state)
        True
        True
        True
        True
        True
        >>> keeper.steps(), keeper.resume(**state)
        ([4, 5], 5)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | None = 3,
        every: int | None = None,
        best: str | None = None,
        best_is: Literal["lowest", "highest"] = "lowest",
        background: bool = True,
        busy: Literal["wait", "skip"] = "wait",
    ) -> None:
        for name, number in (("keep", keep), ("every", every)):
            if number is not None and (type(number) is not int or number < 1):
                raise ValueError(f"{name}={number!r}: expected a number from 1 on, or None")
        for name, word, words in (
            ("best_is", best_is, ("lowest", "highest")),
            ("busy", busy, ("wait", "skip")),
        ):
            if word not in words:
                raise ValueError(f"{name}={word!r}: expected one of {', '.join(words)}")
        self.directory = os.path.abspath(os.fspath(directory))
        self._keep, self._every, self._best, self._best_is = keep, every, best, best_is
        self._background, self._skips = background, busy == "skip"
        self._rank = world_of()[0]
        # One process of a process group may have DTensors, too.
        self._alone = not has_group()
        # Two of its own: what a save in the background agrees on must not meet what the calls of
        # this class do, nor what training does.
        front, back = [
            [] if self._alone else [torch.distributed.new_group(backend="gloo")] for _ in "ab"
        ]
        self._ranks, self._writers = RankGroup(front), RankGroup(back)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torchlift-keeper")
        self._in_flight: list[Future[list[str]] | None] = [None]
        weakref.finalize(self, _lost, self._in_flight)
        self._closed = False
        self._stager: DefaultStager | None = None
        self._base: int | None = None  # the step that was last resumed or saved
        self._metrics: dict[str, tuple[object, float | None]] = {}  # path -> stamp, that of best=
        self._ranks.run(self._make_folder)

    def _make_folder(self) -> tuple[None, None]:
        try:
            make_folders(self.directory, [])
            os.listdir(self.directory)
        except OSError as error:
            raise CheckpointError(
                "cannot be made a folder", file=self.directory, found=str(error)
            ) from error
        return None, None

    # ---- save

    def save(
        self,
        step: int,
        state: Mapping[str, object] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        **objects: object,
    ) -> bool:
        """Save the state of a run; on a mesh all ranks call it.

        Beside the state a checkpoint has the states of the random number generators of torch, of
        Python and, where it is loaded, of NumPy: of each rank its own.

        Args:
            step: number of steps that the state is the result of.
            state: name -> object: a module; an optimizer of the parameters of one of the modules;
                anything with ``state_dict`` and ``load_state_dict``; or plain data and tensors.
            metrics: name -> number, to tell the best by; on a mesh rank 0's count.
            **objects: more of the state.

        Returns:
            Whether it is being saved; False where the last save is not done, and not waited for.

        Raises:
            CheckpointError: the last one could not be saved; without `background`, this one.
            PlacementError: an object has what no file can hold so that it is resumed from there.
            TypeError, ValueError: an argument is not what it can be.
        """

        def check() -> tuple[tuple[int, dict[str, object], dict[str, float]], tuple[int, bool]]:
            number = _step(step)
            if self._closed:
                raise ValueError("the keeper is closed")
            named = _named(state, objects)
            values = {name: float(value) for name, value in (metrics or {}).items()}
            if self._rank == 0 and self._best is not None and self._best not in values:
                raise ValueError(
                    f"metrics has no {self._best!r}, by which the best checkpoint is told (best=)"
                )
            return (number, named, values), (number, self._is_done)

        (step, named, numbers), told = self._ranks.run(check)
        if len({number for number, _ in told.values()}) > 1:
            raise ValueError(f"the ranks save different steps: {[n for n, _ in told.values()]}")
        if self._skips and not all(done for _, done in told.values()):
            return False
        self.wait()

        def take() -> tuple[tuple[dict[str, Any], dict[str, Any]], tuple[str, int] | None]:
            tensors, rest = self._snapshot(named)
            require_savable({**rest, **tensors}, self.directory)
            return (tensors, rest), self._new_path(step) if self._rank == 0 else None

        (tensors, rest), told = self._ranks.run(take)
        path, before = told[0]
        rest = {"step": step, "metrics": numbers, **rest}
        self._in_flight[0] = self._thread.submit(
            self._write, path, before, tensors, rest, _generators()
        )
        self._base = step
        if not self._background:
            self.wait()
        return True

    def wait(self) -> None:
        """Return when nothing is being saved any more; on a mesh all ranks call it.

        Raises:
            CheckpointError: the last save failed; what was complete before it still is.
        """

        def end() -> tuple[None, None]:
            (saving,) = self._in_flight
            error = None if saving is None else saving.exception()
            # Not before: an interrupted wait must not let the next snapshot into the same memory.
            self._in_flight[0] = None
            if error is not None:
                raise error
            if saving is not None and saving.result():
                warnings.warn(
                    f"older checkpoints cannot be removed; the next save tries again: "
                    f"{clipped_list(saving.result())}",
                    RuntimeWarning,
                    stacklevel=4,
                )
            return None, None

        # All ranks raise, or one would go on alone into the next collective.
        self._ranks.run(end)

    def close(self) -> None:
        """Wait for the last save, and free the memory of the snapshot; on a mesh on all ranks.

        Raises:
            CheckpointError: see `wait`.
        """
        try:
            self.wait()
        finally:
            self._free()

    def _free(self) -> None:
        self._closed = True
        self._thread.shutdown()
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        else:  # other ranks may be elsewhere: what this one was writing is finished, no more
            self._free()

    @property
    def _is_done(self) -> bool:
        (saving,) = self._in_flight
        return saving is None or saving.done()

    def _snapshot(self, objects: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return copies on the host of the states of models and optimizers, and of all else."""
        tensors: dict[str, Any] = {}
        for module, name, optimizers in _models(objects):
            tensors |= _states_of(module, name, optimizers)
        rest = {
            name: getattr(obj, "state_dict")() if _is_stateful(obj) else obj  # noqa: B009
            for name, obj in objects.items()
            if name not in tensors
        }
        for name, value in rest.items():
            if not self._alone and any(map(is_dtensor, leaves(value).values())):
                raise TypeError(
                    f"{name}: rank 0 saves what is no module and no optimizer, and it has DTensors"
                )
        is_new = self._stager is None or is_closed(self._stager)
        if self._stager is None or is_new:
            pinned = torch.cuda.is_available()
            self._stager = DefaultStager(StagingOptions(pinned, False, False, pinned))
        state = {"tensors": _resolved(tensors), "rest": _resolved(rest)}
        try:
            copied: Any = self._stager.stage(state)
        except AssertionError:  # a storage has another size than at the last save
            if is_new:  # or an object of the caller raises it when it is copied
                raise
            self._stager.close()
            return self._snapshot(objects)
        return copied["tensors"], copied["rest"]

    def _write(
        self,
        path: str,
        before: int,
        tensors: dict[str, Any],
        rest: dict[str, Any],
        rng: dict[str, Any],
    ) -> list[str]:
        """Write a checkpoint, and remove those that are no longer to be kept.

        Returns:
            Which of these could not be removed, and why.
        """
        if self._alone:
            save({**rest, "rng": rng, **tensors}, path)
        else:
            self._write_shards(path, tensors, rest, rng)
        return self._sweep(path, before) if self._rank == 0 else []

    def _write_shards(
        self, path: str, tensors: dict[str, Any], rest: dict[str, Any], rng: dict[str, Any]
    ) -> None:
        def begin() -> tuple[None, None]:
            if self._rank == 0:
                # What a save that was killed left, such as a rank's random numbers of then, must
                # not become a part of this one.
                if os.path.isdir(path) and not os.path.exists(os.path.join(path, DCP_METADATA)):
                    shutil.rmtree(path)
                os.makedirs(path, exist_ok=True)
                make_durable(self.directory)
            return None, None

        def save_own() -> tuple[None, None]:
            if not os.path.isdir(path):
                raise PlacementError(
                    "the ranks do not save to the same folder",
                    file=path,
                    expected="the folder that rank 0 has made",
                    found=f"none on rank {self._rank}",
                    hint="Pass a directory on a file system that all machines share.",
                )
            save(rng, os.path.join(path, _RNG.format(self._rank)))
            if self._rank == 0:
                save(rest, os.path.join(path, _REST))
            return None, None

        writer = CheckpointWriter(path, format="dcp")
        try:
            self._writers.run(begin)
            self._writers.run(save_own)
            state_dict_saver.save(
                tensors,
                storage_writer=writer,
                # Of what all have, such as DDP's statistics, the values are one rank's.
                planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
                process_group=self._writers.groups[0],
            )
        except (CheckpointException, CheckpointError, OSError) as error:
            writer.reset()
            # All ranks are out of it by now. On a full disk, what is left of it would be in the way
            # of every later one.
            if self._rank == 0 and not os.path.exists(os.path.join(path, DCP_METADATA)):
                shutil.rmtree(path, ignore_errors=True)
            if isinstance(error, CheckpointError):
                raise
            raise _cause(error, "could not be saved", path) from error

    # ---- find

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, in the order of saving."""
        return [kept.step for kept in self._kept()]

    def latest(self) -> str | None:
        """Return the path of the last complete checkpoint, or None."""
        kept = self._kept()
        return kept[-1].path if kept else None

    def best(self) -> str | None:
        """Return the path of the complete checkpoint with the best metric, or None."""
        return self._best_of(self._kept())[0]

    def _kept(self) -> list[_Kept]:
        """Return the complete checkpoints in the order of saving, of each step the last one.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        found: dict[int, _Kept] = {}
        try:
            names = os.listdir(self.directory)
        except OSError as error:  # somebody has removed it, or its file system is not there
            raise CheckpointError(
                "the folder of the checkpoints cannot be read",
                file=self.directory,
                found=str(error),
            ) from error
        for name in names:
            match, path = _NAME.fullmatch(name), os.path.join(self.directory, name)
            # Which DCP renames to its name when all ranks have written their files.
            complete = match and (match[3] or os.path.exists(os.path.join(path, DCP_METADATA)))
            if match and complete:
                kept = _Kept(int(match[2] or 0), int(match[1]), path)
                found[kept.step] = max(kept, found.get(kept.step, kept))
        return sorted(found.values())

    def _best_of(self, kept: list[_Kept]) -> tuple[str | None, set[str]]:
        """Return the path of the best, and the paths of those whose metric cannot be read."""
        values: dict[str, float] = {}
        unknown: set[str] = set()
        for one in kept if self._best is not None else ():
            try:
                value = self._metric_of(one.path)
            except (CheckpointError, OSError):
                unknown.add(one.path)
                continue
            if value is not None and value == value:  # a loss that is NaN is never the best
                values[one.path] = value if self._best_is == "lowest" else -value
        return min(reversed(values), key=values.__getitem__, default=None), unknown

    def _metric_of(self, path: str) -> float | None:
        """Return the metric of a checkpoint; None where it has none that is a number.

        Raises:
            CheckpointError: the file cannot be read.
            OSError: it is gone.
        """
        file = path if os.path.isfile(path) else os.path.join(path, _REST)
        facts = os.stat(file)
        stamp = facts.st_ino, facts.st_size, facts.st_mtime_ns
        known, value = self._metrics.get(path, (None, None))
        if known != stamp:  # each is opened once, not all of them at each save
            with open_checkpoint(file) as ckpt:
                found = ckpt.objects.get(f"metrics.{self._best}")
            value = float(found) if isinstance(found, (int, float)) else None
            self._metrics[path] = stamp, value
        return value

    def _new_path(self, step: int) -> tuple[str, int]:
        """Return where to save a step, and the last step that may have led to it."""
        kept = self._kept()
        before = step - 1 if self._base is None else min(step - 1, self._base)
        generation = 0
        if kept:
            last = kept[-1]
            is_replaced = step == last.step and self._alone and last.path.endswith(".pt")
            # A run that went back; or a folder, which stays until the new one is complete.
            generation = last.generation + (last.step > before and not is_replaced)
        name = f"step-{step:09d}" + (f"-{generation}" if generation else "")
        return os.path.join(self.directory, name + (".pt" if self._alone else "")), before

    def _sweep(self, newest: str, before: int) -> list[str]:
        """Remove what is no longer to be kept, and what saves that were interrupted left.

        Returns:
            What could not be removed, and why.
        """
        kept = self._kept()
        # Backwards, without the steps that a run did which went back behind them.
        branch = [newest]
        for one in reversed(kept):
            if one.step <= before and one.path != newest:
                branch.append(one.path)
                before = one.step - 1
        last = [one.path for one in kept] if self._keep is None else branch[: self._keep]
        stays: set[str | None] = {*last}
        stays |= {one.path for one in kept if self._every and one.step % self._every == 0}
        best, unknown = self._best_of(kept)
        stays |= {newest, best} | unknown  # one that cannot be read today may be the best
        left = []
        for name in os.listdir(self.directory):
            path = os.path.join(self.directory, name)
            if begun := _BEGUN.fullmatch(name):
                remove_debris(os.path.join(self.directory, begun[1]))
            if not _NAME.fullmatch(name) or path in stays:
                continue
            try:
                _remove(path)
            except OSError as error:
                left.append(str(error))
        return left

    # ---- resume

    def resume(
        self,
        state: Mapping[str, object] | None = None,
        *,
        step: int | None = None,
        verify: bool = True,
        **objects: object,
    ) -> int | None:
        """Load the last complete checkpoint; on a mesh all ranks call it.

        A model and its optimizers are loaded together, both or neither; then the next model, the
        other objects and last the random number generators: after an error, what was loaded before
        it stays. All ranks raise, or none. Another number of ranks may have saved: then a rank
        without a state of its own for its generators keeps what it has.

        After a resume from an earlier step, what you save is the latest, not what came after that
        step the first time.

        Args:
            state: name -> object, as for `save`: modules, optimizers, and others that have
                ``load_state_dict``.
            step: of another checkpoint than the last one.
            verify: read all of the checkpoint once first, to compare its checksums.
            **objects: more of the state.

        Returns:
            The step that was saved, or None where there is no checkpoint.

        Raises:
            CheckpointError: it does not fit.
            IntegrityError: a checksum is wrong; nothing has changed.
            TypeError: an object has no ``load_state_dict``; plain data is in
                ``torchlift.open(keeper.latest()).tree()``, or beside the shards in ``rest.pt``.
        """
        self.wait()

        def find() -> tuple[dict[str, object], tuple[str, list[int]] | None]:
            named = _named(state, objects)
            for name, obj in named.items():
                if not _is_stateful(obj):
                    raise TypeError(
                        f"{name}: a {type(obj).__name__} has no load_state_dict; plain data is in "
                        "torchlift.open(path).tree()"
                    )
            kept = self._kept() if self._rank == 0 else []
            at = next((n for n in reversed(range(len(kept))) if step in (None, kept[n].step)), None)
            before = [one.step for one in kept[:at]]
            return named, None if at is None else (kept[at].path, before)

        named, told = self._ranks.run(find)
        if told[0] is None:
            if step is None:
                return None
            raise FormatError(
                "has no complete checkpoint of that step",
                file=self.directory,
                expected=f"one of {self.steps()}",
                found=step,
            )
        path, before = told[0]
        whole = os.path.isfile(path)
        # What several ranks kept one process reads as whole tensors.
        together = not whole and not self._alone
        rest = {
            name: obj
            for name, obj in named.items()
            if not isinstance(obj, (nn.Module, torch.optim.Optimizer))
        }
        with ExitStack() as stack:

            def read() -> tuple[tuple[list[_Model], dict[str, Any], Any], None]:
                models = list(_models(named))
                if verify and self._rank == 0:
                    _verify(path, before)
                file = path if whole else os.path.join(path, _REST)
                saved = stack.enter_context(open_checkpoint(file)).tree()
                if self._alone and not whole:
                    saved |= {name: {} for module, name, _ in models if not module.state_dict()}
                    saved |= stack.enter_context(open_checkpoint(path)).tree()
                _require(saved, rest if together else named, path)
                _require(saved, ["step"], path)
                _check_step(saved["step"], path)
                rng = saved.get("rng") if whole else _own_generators(path, self._rank)
                return (models, saved, _checked(rng, path)), None

            (models, saved, rng), _ = self._ranks.run(read)
            for module, name, optimizers in models:
                try:
                    if together:
                        saved |= self._read_shards(path, module, name, optimizers)
                    set_state_dict(
                        module,
                        [*optimizers.values()],
                        model_state_dict=saved[name],
                        optim_state_dict=_merged([saved[other] for other in optimizers]),
                        options=StateDictOptions(full_state_dict=not together),
                        process_group=self._ranks.groups[0] if self._ranks.groups else None,
                    )
                except StateDictMismatch as error:
                    error.file = error.file or path
                    if error.missing_keys or error.unexpected_keys or error.mismatched:
                        error.hint = (  # of resume all has to fit
                            f"To load what fits, call torchlift.load with root={name!r}, which "
                            "takes rename=, strict=False and ignore_mismatched=True, and "
                            "torchlift.load_optimizer."
                        )
                    raise

            def load() -> tuple[int, None]:
                for name, obj in rest.items():
                    # The object may keep what it gets, and a sweep removes the file: no maps.
                    getattr(obj, "load_state_dict")(copy.deepcopy(saved[name]))  # noqa: B009
                _set_generators(rng)
                self._base = _step(saved["step"])
                return self._base, None

            return self._ranks.run(load)[0]

    def _read_shards(
        self,
        path: str,
        module: nn.Module,
        name: str,
        optimizers: Mapping[str, torch.optim.Optimizer],
    ) -> dict[str, Any]:
        """Read this rank's shards of a model's and its optimizers' states into new memory.

        Raises:
            StateDictMismatch: names and shapes of the model do not fit; on all ranks, all of them.
            CheckpointError: something else is missing, or could not be read.
        """
        states: dict[str, Any] = _blank(_states_of(module, name, optimizers))
        with ExitStack() as stack:

            def compare() -> tuple[tuple[Checkpoint, list[str]], _Misfit]:
                ckpt = stack.enter_context(open_checkpoint(path))
                shapes = {
                    ".".join(map(str, at)): tuple(leaf.shape)
                    for at, leaf in leaves(states[name]).items()
                    if isinstance(leaf, torch.Tensor)
                }
                saved = {
                    key.removeprefix(f"{name}."): entry.shape
                    for key, entry in ckpt.entries.items()
                    if key.startswith(f"{name}.")
                }
                others = {
                    key: (shape, saved[key])
                    for key, shape in shapes.items()
                    if saved.get(key, shape) != shape
                }
                nobodys = sum(1 << at for at, key in enumerate(saved) if key not in shapes)
                missing = [key for key in shapes if key not in saved]
                return (ckpt, list(saved)), _Misfit(missing, nobodys, others)

            # DCP's planner would tell one of them, and of what the model lacks nothing.
            (ckpt, names), told = self._ranks.run(compare)
            missing = list(dict.fromkeys(key for each in told.values() for key in each.missing))
            others = {key: both for each in told.values() for key, both in each.mismatched.items()}
            # Unexpected is what no rank takes: the stages of a pipeline share one checkpoint.
            nobodys = reduce(and_, (each.unexpected for each in told.values()))
            unexpected = [key for at, key in enumerate(names) if nobodys >> at & 1]
            if missing or unexpected or others:
                raise model_misfit(missing, unexpected, others)
            try:
                state_dict_loader.load(states, storage_reader=CheckpointReader(ckpt))
            except CheckpointException as error:
                raise _cause(error, "could not be loaded", path) from error
        return states


def _cause(error: BaseException, reason: str, path: str) -> CheckpointError:
    """Return what a rank met; the text of DCP's own error is mostly tracebacks."""
    if isinstance(error, CheckpointException):
        met, _ = next(iter(error.failures.values()))
        if isinstance(met, CheckpointError):
            return met
        return CheckpointError(reason, file=path, found=str(met))
    return CheckpointError(reason, file=path, found=str(error))


def _named(state: Mapping[str, object] | None, more: Mapping[str, object]) -> dict[str, object]:
    """Return all objects by name.

    Raises:
        ValueError: a name that a checkpoint needs for itself, or one with a dot.
    """
    found: dict[Any, object] = {**(state or {}), **more}
    for name in found:
        if not isinstance(name, str) or not name or "." in name or name in _OWN:
            raise ValueError(
                f"{name!r} cannot name an object: expected a word other than {', '.join(_OWN)}"
            )
    return found


def _step(step: object) -> int:
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0 or isinstance(step, bool):
        raise ValueError(f"step={step!r}: expected a number from 0 on")
    return number


def _check_step(step: object, path: str) -> None:
    """Refuse a file that was not written by a keeper.

    Raises:
        FormatError: it has another kind of step.
    """
    try:
        _step(step)
    except ValueError as error:
        raise FormatError("has no step", file=path, entry="step", found=repr(step)) from error


def _remove(path: str) -> None:
    """Remove a checkpoint; of a link, which somebody made, the link alone.

    Raises:
        OSError: it is still there.
    """
    if os.path.islink(path) or not os.path.isdir(path):
        os.unlink(path)
        return
    # First the marker: what a crash leaves of it here is no complete checkpoint.
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(path, DCP_METADATA))
    shutil.rmtree(path)


def _verify(path: str, before: list[int]) -> None:
    """Compare all checksums of a checkpoint.

    Raises:
        FormatError: a file is cut.
        IntegrityError: one is wrong.
    """
    hint = f"There are complete ones of the steps {before}: resume(step=...)." if before else None
    files = [path]
    if os.path.isdir(path):
        files += [os.path.join(path, name) for name in os.listdir(path) if name.endswith(".pt")]
    for file in files:
        try:
            report = verify_file(file)
        except FormatError as error:
            error.hint = hint or error.hint
            raise
        if not report.ok:
            raise IntegrityError(
                "the checkpoint is damaged",
                file=file,
                entry=report.failed[0].name,
                found=f"{len(report.failed)} wrong checksums",
                hint=hint,
            )


def _lost(saving: list[Future[list[str]] | None]) -> None:
    """Warn of a save that failed, if nobody has asked."""
    error = saving[0].exception() if saving[0] is not None and saving[0].done() else None
    if error is not None:
        warnings.warn(f"the last save of a Keeper failed: {error}", RuntimeWarning, stacklevel=2)


def _is_stateful(obj: object) -> bool:
    return all(callable(getattr(obj, name, None)) for name in ("state_dict", "load_state_dict"))


#: A module, its name, and the optimizers of its parameters by theirs.
_Model = tuple[nn.Module, str, dict[str, torch.optim.Optimizer]]


def _models(objects: Mapping[str, object]) -> Iterator[_Model]:
    """Yield each module with its name and the optimizers of its parameters.

    Raises:
        PlacementError: one is a FullyShardedDataParallel.
        ValueError: no module has the parameters of an optimizer.
    """
    modules = {name: obj for name, obj in objects.items() if isinstance(obj, nn.Module)}
    for name, module in modules.items():
        if uses_fsdp1(module):
            raise PlacementError(
                "a Keeper does not keep a FullyShardedDataParallel, of whose state each rank has "
                "flat pieces",
                entry=name,
                expected="a module of whole tensors or of DTensors",
                hint="Shard the model with fully_shard; or torchlift.save what "
                "torchlift.distributed.get_state_dict returns with full_state_dict=True.",
            )
    owned: dict[str, dict[str, torch.optim.Optimizer]] = {name: {} for name in modules}
    ids = {name: set(map(id, module.parameters())) for name, module in modules.items()}
    for name, obj in objects.items():
        if isinstance(obj, torch.optim.Optimizer):
            params = {id(param) for group in obj.param_groups for param in group["params"]}
            owner = next((each for each in modules if params <= ids[each]), None)
            if owner is None:
                raise ValueError(f"{name}: no module among the objects has all of its parameters")
            owned[owner][name] = obj
    for name, module in modules.items():
        yield module, name, owned[name]


def _require(saved: Mapping[str, object], names: Iterable[str], path: str) -> None:
    for name in names:
        if name not in saved:
            raise FormatError(
                "has no state for an object",
                file=path,
                entry=name,
                expected=f"one of {', '.join(map(repr, saved))}",
            )


def _merged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the states of several optimizers of one module as one."""
    return {
        # DCP leaves an empty dict out.
        "state": {name: each for state in states for name, each in state.get("state", {}).items()},
        "param_groups": [group for state in states for group in state["param_groups"]],
    } if states else {}  # fmt: skip


def _states_of(
    module: nn.Module, name: str, optimizers: Mapping[str, torch.optim.Optimizer]
) -> dict[str, Any]:
    """Return the states of a model and its optimizers by their names."""
    states = {other: get_optimizer_state_dict(module, each) for other, each in optimizers.items()}
    return {name: get_model_state_dict(module), **states}


def _resolved(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return states without conjugate and negative views.

    torch's stager copies the memory below them and forgets that it has to be negated.
    """

    def dense(leaf: Any, _: object) -> Any:
        return leaf.resolve_conj().resolve_neg() if isinstance(leaf, torch.Tensor) else leaf

    def is_view(leaf: object) -> bool:
        return isinstance(leaf, torch.Tensor) and (leaf.is_conj() or leaf.is_neg())

    # Only these: containers of other classes would become plain ones.
    return {
        name: map_leaves(state, dense) if any(map(is_view, leaves(state).values())) else state
        for name, state in states.items()
    }


def _blank(value: Any) -> Any:
    """Return containers with memory of their own in place of live tensors."""
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value)
    if isinstance(value, Mapping):
        return {key: _blank(item) for key, item in value.items()}
    return type(value)(map(_blank, value)) if isinstance(value, (list, tuple)) else value


# ---- random number generators


def _generators() -> dict[str, Any]:
    """Return the states of this process's generators."""
    version, numbers, gauss = random.getstate()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "numbers": list(numbers), "gauss": gauss},
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state_all()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, at, has_gauss, gauss = numpy.random.get_state()
        if kind == "MT19937":
            numbers = keys.tolist()
            found["numpy"] = {"numbers": numbers, "at": at, "gauss": (has_gauss, gauss)}
    return found


def _own_generators(path: str, rank: int) -> dict[str, Any] | None:
    """Return what a rank saved of its own; None where fewer ranks saved."""
    file = os.path.join(path, _RNG.format(rank))
    if not os.path.exists(file):
        return None
    with open_checkpoint(file) as ckpt:
        found: dict[str, Any] = copy.deepcopy(ckpt.tree())
        return found


def _checked(states: Mapping[str, Any] | None, path: str) -> Mapping[str, Any] | None:
    """Return the states if generators take them.

    Raises:
        FormatError: they do not.
    """
    if states is None:
        return None
    try:
        torch.Generator().set_state(states["torch"].clone())
        python = states["python"]
        random.Random().setstate((python["version"], tuple(python["numbers"]), python["gauss"]))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FormatError(
            "no states of random number generators", file=path, entry="rng", found=str(error)
        ) from error
    return states


def _set_generators(states: Mapping[str, Any] | None) -> None:
    if states is None:
        return
    torch.set_rng_state(states["torch"].clone())
    python = states["python"]
    random.setstate((python["version"], tuple(python["numbers"]), python["gauss"]))
    if "cuda" in states and torch.cuda.is_available():
        for device, state in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
            torch.cuda.set_rng_state(state.clone(), device)
    numpy: Any = sys.modules.get("numpy")
    if "numpy" in states and numpy is not None:
        legacy = states["numpy"]
        numpy.random.set_state(("MT19937", legacy["numbers"], legacy["at"], *legacy["gauss"]))

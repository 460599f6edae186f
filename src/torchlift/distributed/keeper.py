"""Save the checkpoints of a training run in the background, keep some of them, and resume.

The policies are those of orbax's ``CheckpointManager``. `Snapshot` copies the state and writes it,
`RunToLoad` loads it.
"""

from __future__ import annotations

import operator
import os
import warnings
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial, reduce
from operator import and_
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch

from torchlift._checkpoint.checkpoint import Checkpoint
from torchlift._checkpoint.checkpoint import open as open_checkpoint
from torchlift._checkpoint.kinds import Allow
from torchlift._load.checks import find_checksums, require_equal
from torchlift._model.commit import Commit
from torchlift._model.ranks import RankGroup, StepResult, has_group, new_gloo_group, rank, ranks_of
from torchlift._save.files import make_folders
from torchlift._save.saving import SaveReport
from torchlift._store.places import inside, is_url, name_of, place_of
from torchlift._store.uploads import require_writable
from torchlift._system.interrupts import Interruptible, uninterrupted
from torchlift._system.text import clipped_list
from torchlift.distributed.folder import KeptFolder, Policy
from torchlift.distributed.folder_lock import FolderLock
from torchlift.distributed.run_state import RunObjects, Snapshot
from torchlift.distributed.saved_run import OnOtherRanks, RunToLoad, SavedRun
from torchlift.distributed.signals import STOPS, StopSignals
from torchlift.distributed.staging import Staging
from torchlift.errors import CheckpointError, FormatError, IntegrityError
from torchlift.formats.integrity import Checksum, sums_of

#: Names in errors of what must be equal on all ranks.
_METHOD, _MODELS = "the method that they call", "their models and optimizers"
#: Arguments of `torchlift.load`, which would be names of objects here.
_RULES = ("include", "exclude", "allow_missing", "allow_unexpected", "rename")


class _Call(NamedTuple):
    """The message of a method.

    Attributes:
        same: The facts that must be equal on all ranks, by their name in an error.
        value: More facts, which may differ between ranks.
    """

    same: Mapping[str, object]
    value: Any = None


class _Written(NamedTuple):
    """The result of a save.

    Attributes:
        report: The report of the files.
        problems: Problems with older checkpoints, as sentences.
    """

    report: SaveReport
    problems: list[str]


class Keeper:
    """Save the checkpoints of a training run in the background, keep some, and resume.

    One process writes a torch file for each step, ``step-000000100.pt``. The ranks of a process
    group write a DCP folder, ``step-000000100``, with one file each. `torchlift.open` and
    `torchlift.load` read both (``root="model"``), on any number of processes.

    A save copies the state to host memory. A thread then writes the copy, while training goes on.
    The next `save`, `wait` or `close` raises an error of that thread. A lock file keeps a second
    job out of the folder. A URL has no lock, so give each job a folder of its own.

    All ranks create the keeper and call its methods in the same order. An error on one rank is
    raised on all. See "On a cluster" for what each rank keeps, for signals, and for faults.

    Args:
        directory: A folder or a URL. It is created if it does not exist.
        keep: The number of latest checkpoints to keep, or None for all. Or a function of the kept
            checkpoints (`torchlift.distributed.Kept`) that returns those to keep.
        every: Also keep each checkpoint whose step is a multiple of this number.
        best: Also keep the checkpoint with the best metric of this name.
        best_is: Whether the ``"lowest"`` or the ``"highest"`` metric is the best.
        background: False writes the checkpoint before `save` returns.
        busy: If the last save is still being written, ``"wait"`` for it, or ``"skip"`` this save
            and return False.
        timeout: Seconds that ranks wait for each other, also for the slowest one to write. None:
            as long as the process group does.
        process_group: The ranks that save. Default: all ranks.
        storage_options: Options of a URL. See `torchlift.open`.

    Raises:
        CheckpointError: If the folder cannot be created, another job uses it, or a rank failed.
        ValueError: If an argument has a wrong value.

    Example:
        >>> import tempfile, torch, torchlift
        >>> model, folder = torch.nn.Linear(2, 1), tempfile.mkdtemp()
        >>> with torchlift.Keeper(folder, keep=2, background=False) as keeper:
        ...     for step in range(keeper.resume(model=model) or 0, 3):
        ...         saved = keeper.save(step + 1, model=model)
        >>> keeper.steps()
        [2, 3]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int | Policy | None = 3,
        every: int | None = None,
        best: str | None = None,
        best_is: Literal["lowest", "highest"] = "lowest",
        background: bool = True,
        busy: Literal["wait", "skip"] = "wait",
        timeout: float | None = None,
        process_group: Any = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.directory = place_of(directory, storage_options)
        self._background, self._skips = background, busy == "skip"
        ranks = ranks_of(process_group)
        self._rank, self._count = ranks.index(rank()), len(ranks)
        self._process = os.getpid()
        self._folder: KeptFolder
        self._staging = Staging()
        self._lock = FolderLock(self.directory)
        # A keeper that is never closed must not keep the next one of this process out.
        weakref.finalize(self, self._lock.release)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torchlift-keeper")
        self._in_flight: list[Future[_Written] | None] = [None]
        weakref.finalize(self, _warn_of_failure, self._in_flight)
        self._closed = False
        self._signals: StopSignals | None = None
        self._report: SaveReport | None = None
        self._blocked = 0.0
        # Two groups of their own: an exchange of a background save must not mix with those of the
        # methods, or of the training.
        self._ranks = self._writers = RankGroup([])
        is_time = isinstance(timeout, (int, float)) and timeout > 0
        limit = timedelta(seconds=float(timeout or 0)) if is_time else None
        everyone = RankGroup.of_all(process_group=process_group)

        def make_group() -> RankGroup:
            members = None if process_group is None else ranks
            return RankGroup([new_gloo_group(limit, members)] if has_group() else [])

        def validate_arguments() -> StepResult[None, _Call]:
            if busy not in ("wait", "skip"):
                raise ValueError(f"busy={busy!r}: expected 'wait' or 'skip'")
            if timeout is not None and not is_time:
                raise ValueError(f"timeout={timeout!r}: expected seconds, or None")
            self._folder = KeptFolder(self.directory, keep, every, best, best_is)
            named = {"background=": background, "busy=": busy, "best=": best, "timeout=": timeout}
            return StepResult(None, _Call(named))

        try:
            _await_all(everyone.groups, limit)
            with _together(everyone):
                everyone.run(validate_arguments, _require_same)
                self._ranks, self._writers = make_group(), make_group()
                everyone.run(self._open_folder)
        except BaseException:
            self._free()
            raise

    def _open_folder(self) -> StepResult[None, None]:
        if is_url(self.directory):
            require_writable(self.directory)
        else:
            self._folder.use(lambda path: make_folders(path, []), self.directory)
            if self._rank == 0:
                self._folder.use(lambda _: self._lock.acquire(), self.directory)
        self._folder.latest()  # of a URL, two requests
        # A rank that cannot start the thread must fail here. Later, the others would wait for it.
        self._thread.submit(int).result()
        return StepResult(None, None)

    # ---- save

    def save(
        self,
        step: int,
        state: Mapping[str, object] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        **objects: object,
    ) -> bool:
        """Save the state of a run. All ranks call it.

        The checkpoint also contains the states of the random number generators of torch, of Python
        and, if it is loaded, of NumPy: those of each rank.

        Args:
            step: The number of steps that led to the state.
            state: A dict of objects by name: modules, optimizers of their parameters, anything with
                ``state_dict`` and ``load_state_dict``, plain data and tensors. Pass each of several
                models by its own name.
            metrics: Numbers by name, to find the best checkpoint. Those of rank 0 count.
            **objects: More objects by name.

        Returns:
            True if the state is being saved. False if the last save is not complete, with
            ``busy="skip"``.

        Raises:
            CheckpointError: If the last save failed, or this one without `background`.
            PlacementError: If `resume` could not put an object back.
            ValueError: If an argument has a wrong value.
        """
        began = perf_counter()
        self._require_usable()
        with uninterrupted() as deliver:
            write = self._prepare_save(step, {**(state or {}), **objects}, metrics, deliver)
            if write is None:
                return False
            # No interrupt may stop this: the writers of all ranks wait for each other.
            self._in_flight[0] = self._thread.submit(write)
            self._blocked = perf_counter() - began
        if not self._background:
            self.wait()
            assert self._report is not None
            self._report = replace(self._report, blocked=perf_counter() - began)
        return True

    def _prepare_save(
        self,
        step: int,
        objects: Mapping[str, object],
        metrics: Mapping[str, float] | None,
        deliver: Callable[[], None],
    ) -> Callable[[], _Written] | None:
        """Take a snapshot on all ranks. Return the call that writes it in the thread.

        Returns:
            None if the last save is not complete.
        """

        def check_arguments() -> StepResult[RunObjects, _Call]:
            number, measured, best = _require_step(step), _numbers(metrics), self._folder.metric
            # Without metrics, the checkpoint is no candidate: nothing was measured at this step.
            if self._rank == 0 and measured and best not in (None, *measured):
                raise ValueError(f"metrics= lacks {best!r}, which best= needs")
            run = RunObjects.of(objects, {"step": number, "metrics": measured})
            same = {_METHOD: "save", "step=": number, _MODELS: run.models}
            (saving,) = self._in_flight
            return StepResult(run, _Call(same, saving is None or saving.done()))

        # Before the snapshot: a `state_dict` that communicates would wait for a rank that raised.
        run, calls = self._ranks.run(check_arguments, _require_same)
        if self._skips and not all(call.value for call in calls.values()):
            return None
        alone = self._count == 1

        def take_snapshot() -> StepResult[Snapshot, str]:
            # The snapshot uses the memory of the last one, so that one must be written.
            self._await_save()
            snapshot = Snapshot.of(run, self._staging, self.directory, is_alone=alone)
            new_name = partial(self._folder.new_name, run.head["step"], is_file=alone)
            name = new_name() if self._rank == 0 else ""
            deliver()  # the last moment at which an interrupt ends the save on all ranks
            return StepResult(snapshot, name)

        snapshot, names = self._ranks.run(take_snapshot)
        return partial(self._write, snapshot, inside(self.directory, names[min(names)]))

    def _write(self, snapshot: Snapshot, path: str) -> _Written:
        """Write a checkpoint, and remove those that are not kept any more."""
        try:
            report = snapshot.write(path, self._writers, self._rank, self._count)
        except Exception as error:  # torch raises what it happens to meet
            if self._lost_group:
                raise self._destroyed_error() from error
            raise
        try:
            problems = self._folder.sweep(path) if self._rank == 0 else []
        except (CheckpointError, OSError) as error:  # the new one is complete
            problems = [
                f"older checkpoints are not removed, and the next save tries again: {error}"
            ]
        return _Written(report, problems)

    @property
    def report(self) -> SaveReport | None:
        """Return the report of the last complete save, or None. It does not wait."""
        (saving,) = self._in_flight
        if saving is None or not saving.done() or saving.exception() is not None:
            return self._report
        return replace(saving.result().report, blocked=self._blocked)

    def should_stop(self, *, on: Iterable[int] = STOPS) -> bool:
        """Return whether any rank received a signal that asks it to stop. All ranks call it.

        The first call installs the handlers, so call it before the first step, as a ``while`` does.
        They call the handlers that were there, which `close` restores. The ranks exchange a few
        bytes: if steps are short, call it at every tenth.

        Args:
            on: Signals, for the first call. Default: SIGTERM, and the SIGUSR1 that a scheduler can
                send some minutes before it.

        Raises:
            CheckpointError: If the first call is not made in the main thread.
            ValueError: If the keeper is closed.

        Example:
            >>> import tempfile, torch, torchlift
            >>> model, step = torch.nn.Linear(2, 1), 0
            >>> with torchlift.Keeper(tempfile.mkdtemp()) as keeper:
            ...     while step < 3 and not keeper.should_stop():
            ...         step += 1
            ...     keeper.save(step, model=model)
            True
        """

        def poll_signals() -> StepResult[None, _Call]:
            if self._signals is None:
                self._signals = StopSignals(on)
                weakref.finalize(self, self._signals.close)
            return StepResult(None, _Call({_METHOD: "should_stop"}, self._signals.received))

        self._require_usable()
        calls = self._ranks.run(poll_signals, _require_same).by_rank
        return any(call.value for call in calls.values())

    def wait(self) -> None:
        """Wait until nothing is being saved or removed. All ranks call it.

        Raises:
            CheckpointError: If the last save failed. Earlier checkpoints are unchanged.
        """

        def await_save() -> StepResult[None, _Call]:
            self._await_save()
            return StepResult(None, _Call({_METHOD: "wait"}))

        self._require_process()
        if self._lost_group:
            self._await_save()
            return
        # On all ranks: one that did not raise would wait alone in the next collective.
        self._ranks.run(await_save, _require_same)

    def _await_save(self) -> None:
        """Wait for the last save of this rank, and warn of its problems.

        Raises:
            CheckpointError: If it failed.
        """
        (saving,) = self._in_flight
        if saving is None:
            return
        with Interruptible():
            error = saving.exception()
        self._report = self.report
        # Not earlier: after an interrupted wait, the next snapshot would overwrite this one.
        self._in_flight[0] = None
        if error is not None:
            raise error
        for sentence in saving.result().problems:
            warnings.warn(sentence, RuntimeWarning, stacklevel=6)

    def close(self) -> None:
        """Wait for the last save, and free the snapshot and the folder. All ranks call it.

        Afterwards `steps`, `latest` and `best` still work, and no other method does.

        Raises:
            CheckpointError: If the last save failed.
        """
        try:
            self.wait()
        finally:
            self._free()

    def _free(self) -> None:
        self._lock.is_used = False  # another Keeper may take it, even if interrupts end this
        if os.getpid() != self._process:
            return  # the parent saves, and its thread is not here
        self._closed = True
        if self._signals is not None:
            self._signals.close()
        try:
            self._thread.shutdown()
        finally:
            groups = [*self._ranks.groups, *self._writers.groups] if has_group() else []
            self._ranks = self._writers = RankGroup([])
            with ExitStack() as stack:
                stack.callback(self._lock.release)
                for group in groups:  # otherwise their threads and sockets stay
                    stack.callback(torch.distributed.destroy_process_group, group)
                stack.callback(self._staging.close)

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        else:  # other ranks may not come here, so only this rank's write is finished
            self._free()

    def _require_process(self) -> None:
        """Refuse to work in a fork: the thread that writes is in the parent.

        Raises:
            CheckpointError: If this is another process.
        """
        if os.getpid() != self._process:
            raise CheckpointError(
                "the keeper is that of another process, which forked this one",
                file=self.directory,
                expected=f"process {self._process}",
                found=f"process {os.getpid()}",
                hint="Let that process save, or create a Keeper in a folder of its own here.",
            )

    @property
    def _lost_group(self) -> bool:
        return bool(self._ranks.groups) and not has_group()

    def _require_usable(self, *, saves: bool = True) -> None:
        """Refuse to work in a fork, when it is closed, and without the process group.

        Args:
            saves: False: a process without a group may resume after it has closed the keeper.

        Raises:
            CheckpointError: If this is a fork, or the program has destroyed the group.
            ValueError: If the keeper is closed.
        """
        self._require_process()
        if self._closed and (saves or has_group()):
            raise ValueError("the keeper is closed")
        if self._lost_group:
            raise self._destroyed_error()

    def _destroyed_error(self) -> CheckpointError:
        return CheckpointError(
            "the process group was destroyed before the keeper was closed",
            file=self.directory,
            hint="Call keeper.close() before torch.distributed.destroy_process_group().",
        )

    # ---- find

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, in the order of saving."""
        return self._folder.steps()

    def latest(self) -> str | None:
        """Return the path of the last complete checkpoint, or None."""
        return self._folder.latest()

    def best(self) -> str | None:
        """Return the path of the complete checkpoint with the best metric, or None."""
        return self._folder.best()

    # ---- resume

    def resume(
        self,
        state: Mapping[str, object] | None = None,
        *,
        step: int | None = None,
        verify: bool = True,
        on_other_ranks: OnOtherRanks | None = None,
        allow_classes: Allow = (),
        **objects: object,
    ) -> int | None:
        """Load the last complete checkpoint. All ranks call it.

        All objects are loaded on all ranks, or none: an error leaves them as they were. Only an
        object whose ``state_dict`` fails before cannot be given back. It is loaded last, and an
        error names it. Objects that you do not pass are not loaded.

        To load a part of a model, such as all but its head, call `torchlift.load` with
        ``keeper.latest()``, ``root="model"`` and its patterns, and
        `torchlift.distributed.load_optimizer` with ``root="optimizer"``. After a resume from an
        earlier step, your next save is the latest.

        Args:
            state: A dict of objects by name, as for `save`. Plain data stays as it is. A warning
                says if it was saved with another value.
            step: The step to load. Default: the last one.
            verify: Compare all checksums first. Each rank reads a part of the checkpoint.
            on_other_ranks: Functions by name of an object, for another number of ranks. A function
                gets the list of the states of all ranks that saved, and returns that of this rank.
                Models, optimizers, schedules and gradient scalers do not need one.
            allow_classes: Tensor subclasses in the file of one process, such as 8-bit optimizer
                state. See :ref:`arg-allow-classes`.
            **objects: More objects by name.

        Returns:
            The step that was saved, or None if there is no checkpoint.

        Raises:
            CheckpointError: If a state does not fit, or was saved for another number of ranks.
            IntegrityError: If a checksum is wrong.
        """
        if rules := [name for name in _RULES if name in objects]:
            raise TypeError(
                f"resume does not take {rules[0]}=. Call torchlift.load(model, keeper.latest(), "
                "root='model') and torchlift.distributed.load_optimizer, which take patterns"
            )
        self._require_usable(saves=False)
        # An interrupt waits until all ranks are done. An error undoes the load on all of them.
        with uninterrupted(), Commit() as commit, _together(self._ranks) as deliver:

            def select_checkpoint() -> StepResult[RunObjects, _Call]:
                run = RunObjects.of({**(state or {}), **objects})
                self._await_save()
                # The first rank alone, because a checkpoint may expire in between.
                kept = self._folder.kept() if self._rank == 0 else []
                found = [name_of(one.path) for one in kept if step in (None, one.step)][-1:]
                same = {_METHOD: "resume", "step=": repr(step), "verify=": bool(verify)}
                return StepResult(run, _Call({**same, _MODELS: run.models}, found))

            run, calls = self._ranks.run(select_checkpoint, _require_same)
            if not calls[min(calls)].value:
                if step is None:  # a new run
                    self._folder.is_ours = True
                    return None
                raise FormatError(
                    "the folder does not have a complete checkpoint of that step",
                    file=self.directory,
                    expected=f"one of {self.steps()}",
                    found=step,
                )
            (name,) = calls[min(calls)].value
            with self._opened(name, allow_classes, verify=verify) as ckpt:

                def read_states() -> StepResult[RunToLoad, int]:
                    saved = SavedRun(ckpt, self._rank, self._count)
                    found = RunToLoad.of(saved, run, on_other_ranks or {})
                    return StepResult(found, found.find_unexpected())

                loaded, unexpected = self._ranks.run(read_states)
                unused = reduce(and_, unexpected.values())
                self._ranks.run(partial(loaded.put_states, unused, commit))
                last = self._ranks.run(partial(loaded.load_objects, commit, deliver)).value
                commit.finish()
                self._folder.is_ours = True
                loaded.load_last(last)
        if loaded.changed:
            warnings.warn(
                f"{clipped_list(loaded.changed)}: resume does not change plain data. The saved "
                "values are in torchlift.open(path).tree()",
                RuntimeWarning,
                stacklevel=2,
            )
        return loaded.step

    @contextmanager
    def _opened(self, name: str, allow: Allow, *, verify: bool) -> Iterator[Checkpoint]:
        """Open a checkpoint on all ranks, and compare its checksums. Each rank reads a part."""
        path = inside(self.directory, name)
        with ExitStack() as stack:

            def open_and_sum_up() -> StepResult[tuple[Checkpoint, list[Checksum]], _Call]:
                ckpt = stack.enter_context(open_checkpoint(path, allow_classes=allow))
                known = find_checksums(ckpt) if verify else []
                sums = sums_of(ckpt._index, known, part=(self._rank, self._count))
                return StepResult((ckpt, known), _Call({"their checksums": len(known)}, sums))

            try:
                (ckpt, known), found = self._ranks.run(open_and_sum_up, _require_same)
                require_equal(ckpt, known, ChainMap(*(each.value for each in found.values())))
            except (FormatError, IntegrityError) as error:
                others = [one for one in self._folder.kept() if name_of(one.path) != name]
                if steps := [one.step for one in others]:
                    error.hint = (
                        f"The file is damaged. Pass step= for another of the steps {steps}."
                    )
                raise
            yield ckpt


def _require_same(by_rank: Mapping[int, _Call]) -> None:
    """Refuse calls that differ. One rank alone may have caught an error and gone on.

    Raises:
        ValueError: If ranks call different methods, or pass different arguments.
    """
    calls = [call.same for call in by_rank.values()]
    for name, expected in calls[0].items():
        if any(call.get(name) != expected for call in calls):
            raise ValueError(f"the ranks differ in {name}: {[call.get(name) for call in calls]}")


def _await_all(groups: Sequence[Any], limit: timedelta | None) -> None:
    """Wait until all ranks create a Keeper, as far as a group can wait for some time only.

    Raises:
        CheckpointError: If one does not.
    """
    for group in groups:
        if torch.distributed.get_backend(group) != "gloo":
            continue
        try:
            torch.distributed.monitored_barrier(group, timeout=limit)
        except RuntimeError as error:
            raise CheckpointError(
                "some ranks do not create the Keeper",
                found=str(error).partition("\n")[0],
                hint="Create it on all ranks, or pass process_group= with the ranks that do.",
            ) from error


@contextmanager
def _together(ranks: RankGroup) -> Iterator[Callable[[], None]]:
    """Raise an error of one rank in the block on all ranks.

    Interrupts wait until the block ends. The block gets a function that delivers them earlier.
    """
    with uninterrupted() as deliver, ranks.together() as agree:
        yield deliver
        deliver()  # an interrupt here is reported to the other ranks
        agree(False)


def _require_step(step: object) -> int:
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0 or isinstance(step, bool):
        raise ValueError(f"step={step!r}: expected a number from 0 on")
    return number


def _numbers(metrics: Mapping[str, float] | None) -> dict[str, float]:
    found = {}
    for name, value in (metrics or {}).items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            text = f"a {type(value).__name__}" if isinstance(value, int) else repr(value)
            raise ValueError(f"metrics[{name!r}]: expected a number, found {text}") from error
    return found


def _warn_of_failure(saving: list[Future[_Written] | None]) -> None:
    """Warn of a failed save that no method has reported."""
    error = saving[0].exception() if saving[0] is not None and saving[0].done() else None
    if error is not None:
        warnings.warn(f"the last save of a Keeper failed: {error}", RuntimeWarning, stacklevel=2)

"""Keep the checkpoints of a training run: save in the background, keep some, find the last, resume.

The policies are those of orbax's ``CheckpointManager``; the snapshot is made by torch's stager. On
a mesh and on one process it is `torchlift.save` that writes, and what `torchlift.load` does that
reads.
"""

from __future__ import annotations

import copy
import io
import operator
import os
import socket
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial, reduce
from glob import escape
from hashlib import sha256
from operator import and_
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from torchlift._checkpoint import Checkpoint, array_of, diff
from torchlift._checkpoint import open as open_checkpoint
from torchlift._load import require_intact
from torchlift._model import (
    ModuleTree,
    Names,
    RankGroup,
    has_group,
    is_dtensor,
    new_gloo_group,
    ranks_of,
    uses_fsdp1,
    versioned,
    world_of,
)
from torchlift._plan import Options, Patterns, Rename, Rewriting, allowed
from torchlift._save import (
    SaveReport,
    is_array,
    make_folders,
    memory_of,
    require_savable,
    savable_names,
    save,
)
from torchlift._sources import FileTensor
from torchlift._store import inside, is_url, name_of, place_of, require_writable
from torchlift._system.containers import leaves, map_leaves
from torchlift._system.interrupts import Interruptible, uninterrupted
from torchlift._system.text import clipped_list
from torchlift._transfer import file_system
from torchlift.distributed.choice import GENERATORS, Choice, choose
from torchlift.distributed.folder import KeptFolder, Policy, policies_of
from torchlift.distributed.generators import Generators
from torchlift.distributed.optimizer_state import PLACE, name_by_place, require_known
from torchlift.distributed.options import (
    LoadCall,
    Part,
    StateDictMismatch,
    StateDictOptions,
    model_misfit,
)
from torchlift.distributed.signals import STOPS, StopSignals
from torchlift.distributed.staging import Staging
from torchlift.distributed.state_dict import (
    load_states,
    read_states,
    slices_of,
)
from torchlift.errors import CheckpointError, FormatError, IntegrityError, PlacementError
from torchlift.formats import Array, errors_name

#: Of a dict in place of an array of numpy: its dtype and shape.
_ARRAY = "numpy.ndarray"
#: Names that a checkpoint needs for itself; in a folder what is no tensor is packed into some.
_OWN = ("step", "metrics", "rng", "ranks", "packed")
#: Each would not take its part of a model that another one passes.
_OTHERS = "the ranks pass different models and optimizers"
#: Of which several machines may write one file: what one of them caches the others know of.
_COHERENT = {"lustre", "gpfs"}


class _Misfit(NamedTuple):
    """What of a model and a checkpoint does not fit on a rank.

    Attributes:
        missing: names that the checkpoint lacks.
        unexpected: a bit for each name of the checkpoint that the rank does not have.
        mismatched: name -> (shape in the model, in the checkpoint).
        excused: names that may be missing.
    """

    missing: list[str]
    unexpected: int
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    excused: set[str]


class Keeper:
    """Keeps the checkpoints of one run in a folder, which no other program should write to.

    A checkpoint is a torch file, ``step-000000100.pt``, which appears whole or not at all; of
    several processes, too, each of which writes its own bytes. Where these are on several machines,
    whose file system may not keep apart what two of them write into one file (all but Lustre and
    GPFS), it is a folder, ``step-000000100``, in the format of ``torch.distributed.checkpoint``
    with a file a rank; its ``.metadata``, which is written last, says that it is complete.
    `torchlift.open` and `torchlift.load` read both (``root="model"``), on any number of processes.

    On a URL (``s3://bucket/run``) one process keeps files, and several a folder, of which each rank
    sends objects of its own. What a killed job has left there the next one removes with its first
    save, if it was there when that resumed: nothing in a store tells a dead writer from a slow one.
    Two jobs in one folder claim names before they look, so that neither replaces what the other
    has, but one that resumes removes what the other is just sending, whose save is an error then.

    What is no longer to be kept loses its name first, and is removed in a thread of its own, which
    delays no save; what a kill leaves, a later keeper removes. Other programs look into the folder
    with `torchlift.distributed.RunFolder`. A job that has not resumed removes nothing that it finds
    of later steps, and no job what another one has saved there meanwhile; it is warned of both.

    A save takes a snapshot in memory, which is all that training waits for, and writes it in a
    thread of its own. One save is on its way at a time. What goes wrong there is raised by the next
    call of `Keeper.save`, `wait` or `close`; a program that makes none is warned at its end. A
    tensor that is a view takes the memory that it looks into, in the snapshot.

    In a process group all ranks make their keeper, and call its methods, in the same order; those
    that look (`steps`, `latest`, `best`) need no other rank. Of what the ranks have under one name:

    - shards of a DTensor: each rank's, as one tensor, for any mesh;
    - parameters, buffers and moments that are no shards: the first rank's;
    - other objects and plain data: once, where they are equal on all ranks; else each rank's, such
      as the place in its data, for as many ranks as there were (see `resume`);
    - the random number generators: each rank's.

    What is raised on one rank, in any of these calls or while one writes, is raised on all: within
    seconds, or within `timeout` where one hangs. What was complete before stays so. A job that is
    asked to end tells all its ranks by `should_stop`; what a save took is in `report`.

    Args:
        directory: where, or a URL; created where it is not there.
        keep: how many of the last checkpoints to keep, without those of steps that the run has gone
            back on; None keeps all. Or policies, of which any may keep one: `LatestN`, `BestN`,
            `EveryNSteps` and `EveryNSeconds` of `torchlift.distributed`, or functions, each of
            which takes the list of what is kept (see `Kept`) and returns what stays, in a thread of
            rank 0. The newest stays. One that cannot be removed is warned of.
        every: keep those too whose step is a multiple of it.
        best: keep the one too whose metric of that name is the best.
        best_is: whether the lowest or the highest metric is.
        background: False writes before `Keeper.save` returns.
        busy: what `Keeper.save` does while the last one is on its way: ``"wait"`` for it, or
            ``"skip"``.
        timeout: seconds that ranks wait for each other, in which the slowest has to be written;
            None: as long as the process group does.
        storage_options: of a URL, as in `torchlift.open`.

    Raises:
        CheckpointError: the directory cannot be made, or a rank has met an error.
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
        keep: int | Policy | Sequence[Policy] | None = 3,
        every: int | None = None,
        best: str | None = None,
        best_is: Literal["lowest", "highest"] = "lowest",
        background: bool = True,
        busy: Literal["wait", "skip"] = "wait",
        timeout: float | None = None,
        overlap: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.directory = place_of(directory, storage_options)
        self._background, self._skips = background, busy == "skip"
        self._staging = Staging(overlap)
        self._rank = world_of()[0]
        is_policy = callable(keep) or (isinstance(keep, (list, tuple)) and all(map(callable, keep)))
        numbers: dict[str, Any] = {"keep": None if is_policy else keep, "every": every}
        words = {"best_is": (best_is, "lowest", "highest"), "busy": (busy, "wait", "skip")}
        alike = background, busy, best, overlap, timeout
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torchlift-keeper")
        self._in_flight: list[Future[tuple[SaveReport, list[str]]] | None] = [None]
        weakref.finalize(self, _lost, self._in_flight)
        self._closed = False
        self._signals: StopSignals | None = None
        self._report: SaveReport | None = None
        self._blocked = 0.0
        self._savable: object = None  # the names in states of which it is known
        self._base: int | None = None  # the step that was last resumed or saved
        # Two of its own: what a save in the background agrees on must not meet what the calls of
        # this class do, nor what training does.
        self._ranks = self._writers = RankGroup([])
        everyone = RankGroup.of_all()
        try:
            with _together(everyone):
                _, told = everyone.run(partial(_checked_arguments, numbers, words, alike))
                names = "background=, busy=, best= and timeout="
                _require_same(f"the ranks do not pass the same {names}", told.values())
                self._folder = KeptFolder(self.directory, policies_of(keep, every, best, best_is))
                self._ranks = RankGroup(_new_groups(timeout))
                self._writers = RankGroup(_new_groups(timeout))
                _, places = everyone.run(self._make_folder)
        except BaseException:
            self._leave()
            raise
        machines, kinds = zip(*places.values(), strict=True)
        #: Whether all write one file.
        self._is_one = len({*machines}) == 1 or {*kinds} <= _COHERENT
        if is_url(self.directory):  # no store lets several write one object
            self._is_one = len(places) == 1

    def _make_folder(self) -> tuple[None, tuple[str, str]]:
        if is_url(self.directory):
            require_writable(self.directory)
            self._folder.steps()
            self._thread.submit(int).result()
            return None, (_machine(), "")
        try:
            make_folders(self.directory, [])
            os.listdir(self.directory)
        except OSError as error:
            raise CheckpointError(
                "cannot be made a folder", file=self.directory, found=str(error)
            ) from error
        # Now: what starts none later would leave the others to wait for what it is to write.
        self._thread.submit(int).result()
        return None, (_machine(), file_system(self.directory))

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
            state: name -> object: a module; an optimizer of the parameters of some of the modules,
                and perhaps of others; anything with ``state_dict`` and ``load_state_dict``; or
                plain data and tensors.
            metrics: name -> number, to tell the best by; on a mesh rank 0's count.
            **objects: more of the state.

        Returns:
            Whether it is being saved; False where the last save is not done, and not waited for.
            `report` says what became of it.

        Raises:
            CheckpointError: the last one could not be saved; without `background`, this one.
            PlacementError: an object has what no file can hold so that it is resumed from there.
            TypeError, ValueError: an argument is not what it can be.
        """
        began = perf_counter()
        with uninterrupted():
            with _together(self._ranks):
                write = self._begun(step, {**(state or {}), **objects}, metrics)
            if write is None:
                return False
            # When all go on, and before an interrupt: what one writes waits for the others.
            self._staging.begin()
            self._in_flight[0] = self._thread.submit(write)
            self._base, self._blocked = _step(step), perf_counter() - began
        if not self._background:
            self.wait()
            assert self._report is not None
            self._report = replace(self._report, blocked=perf_counter() - began)
        return True

    def _begun(
        self, step: int, objects: Mapping[str, object], metrics: Mapping[str, float] | None
    ) -> Callable[[], tuple[SaveReport, list[str]]] | None:
        """Take a snapshot on all ranks, and return what writes it; None: the last one is not done.

        Raises:
            CheckpointError: see `Keeper.save`.
        """

        def check() -> tuple[
            tuple[int, dict[str, object], dict[str, float]], tuple[str, int, bool, list[str]]
        ]:
            number = _step(step)
            if self._closed:
                raise ValueError("the keeper is closed")
            named = _named(objects)
            values = {name: float(value) for name, value in (metrics or {}).items()}
            missing = [name for name in self._folder.metrics if name not in values]
            if self._rank == 0 and missing:
                raise ValueError(
                    f"metrics has no {missing[0]!r}, by which the best checkpoint is told (best=)"
                )
            told = "save", number, self._is_done, _model_names(named)
            return (number, named, values), told

        (step, named, numbers), told = self._ranks.run(check, _require_same_call)
        _require_same("the ranks save different steps", [n for _, n, *_ in told.values()])
        _require_same(_OTHERS, [names for *_, names in told.values()])
        if self._skips and not all(done for *_, done, _ in told.values()):
            return None
        self._finish()

        def take() -> tuple[
            tuple[dict[str, Any], dict[str, Any]],
            tuple[tuple[str, int] | None, dict[str, bytes], bytes],
        ]:
            tensors, rest = self._snapshot(named)
            names = savable_names(tensors, self.directory)
            if names != self._savable:  # for 800 tensors it takes 30 ms
                require_savable(tensors, self.directory)
                self._savable = names
            digests = {name: self._digest({name: value}) for name, value in rest.items()}
            place = (
                self._folder.new_path(step, self._base, self._is_one) if self._rank == 0 else None
            )
            params = repr([group["params"] for group in _groups_of(tensors, named).values()])
            return (tensors, rest), (place, digests, sha256(params.encode()).digest())

        (tensors, rest), placed = self._ranks.run(take)
        if len({params for *_, params in placed.values()}) > 1:  # stages of a pipeline
            groups_here = _groups_of(tensors, named)
            _, groups = self._ranks.run(lambda: (None, groups_here))
            every = {at: group for each in reversed(groups.values()) for at, group in each.items()}
            for name in {name for name, _ in groups_here}:
                found = [group for (other, _), group in sorted(every.items()) if other == name]
                tensors[name] = {**tensors[name], "param_groups": found}
        each_own = [digests for _, digests, _ in placed.values()]
        equal = {
            name: rest.pop(name)
            for name, digest in each_own[0].items()
            if all(digests.get(name) == digest for digests in each_own)
        }
        name, before = placed[0][0]
        state = {"step": step, "metrics": numbers} if self._rank == 0 else {}
        own = {GENERATORS: Generators().state_dict(), **rest}
        return partial(self._write, name, before, state, tensors, equal, own)

    @property
    def report(self) -> SaveReport | None:
        """Return what the last save that is complete wrote, and how long it took; None before.

        It waits for nobody: in a loop it may be that of the save before the last one.
        """
        (saving,) = self._in_flight
        if saving is None or not saving.done() or saving.exception() is not None:
            return self._report
        return replace(saving.result()[0], blocked=self._blocked + self._staging.gate.waited)

    def should_stop(self, *, on: Iterable[int] = STOPS) -> bool:
        """Tell whether a signal has asked any rank to stop; on a mesh all ranks call it.

        The first call is what listens, so make one before the first step, as a ``while`` does. It
        calls the handlers that were there, and `close` restores them; a keeper that is never asked
        installs none. The ranks exchange a few bytes: where steps are short, ask at every tenth.

        Args:
            on: the signals, at the first call: SIGTERM, and the SIGUSR1 that a scheduler may be
                told to send some minutes before it.

        Raises:
            CheckpointError: the first call is not made in the main thread.
            ValueError: the keeper is closed.

        Example:
            >>> import tempfile, torch, torchlift
            >>> model, step = torch.nn.Linear(2, 1), 0
            >>> with torchlift.Keeper(tempfile.mkdtemp()) as keeper:
            ...     while step < 3 and not keeper.should_stop():
            ...         step += 1
            ...     keeper.save(step, model=model)
            True
        """

        def look() -> tuple[None, tuple[str, bool]]:
            if self._closed:
                raise ValueError("the keeper is closed")
            if self._signals is None:
                self._signals = StopSignals(on)
                weakref.finalize(self, self._signals.close)
            return None, ("should_stop", self._signals.met)

        _, told = self._ranks.run(look, _require_same_call)
        return any(met for _, met in told.values())

    def wait(self) -> None:
        """Return when nothing is being saved or removed any more; on a mesh all ranks call it.

        Raises:
            CheckpointError: the last save failed; what was complete before it still is.
        """
        self._finish(self._folder.removed)

    def _finish(self, more: Callable[[], list[str]] = list) -> None:
        """Wait for the last save; warn of what it and `more` tell.

        Raises:
            CheckpointError: it failed.
        """

        def end() -> tuple[None, tuple[str]]:
            (saving,) = self._in_flight
            with Interruptible():
                error = None if saving is None else saving.exception()
            self._report = self.report
            # Not before: an interrupted wait must not let the next snapshot into the same memory.
            self._in_flight[0] = None
            if error is not None:
                raise error
            for sentence in [*(() if saving is None else saving.result()[1]), *more()]:
                warnings.warn(sentence, RuntimeWarning, stacklevel=6)
            return None, ("wait",)

        # All ranks raise, or one would go on alone into the next collective.
        self._ranks.run(end, _require_same_call)

    def close(self) -> None:
        """Wait for the last save, and free the memory of the snapshot; on a mesh on all ranks.

        These then look (`steps`, `latest`, `best`), and neither save nor resume.

        Raises:
            CheckpointError: see `wait`.
        """
        try:
            self.wait()
        finally:
            self._free()

    def _free(self) -> None:
        self._closed = True
        if self._signals is not None:
            self._signals.close()
        try:
            self._thread.shutdown()
        finally:
            with ExitStack() as stack:
                stack.callback(self._folder.close)
                stack.callback(self._leave)
                stack.callback(self._staging.close)

    def _leave(self) -> None:
        """End the groups: else their threads and sockets stay, and who waits here waits on."""
        groups = [*self._ranks.groups, *self._writers.groups]
        self._ranks = self._writers = RankGroup([])
        with ExitStack() as stack:
            for group in groups:
                stack.callback(torch.distributed.destroy_process_group, group)

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
        for model in _models(objects):
            tensors |= model.states()
        rest = {
            name: _with_tensors(getattr(obj, "state_dict")() if _is_stateful(obj) else obj)  # noqa: B009
            for name, obj in objects.items()
            if name not in tensors
        }
        for name, value in rest.items():
            if self._ranks.groups and any(map(is_dtensor, leaves(value).values())):
                raise TypeError(
                    f"{name}: what is no module and no optimizer is a rank's, and it has DTensors"
                )
        return self._staging.take(tensors, rest, objects)

    def _write(
        self,
        name: str,
        before: int,
        state: dict[str, Any],
        tensors: dict[str, Any],
        equal: dict[str, Any],
        own: dict[str, Any],
    ) -> tuple[SaveReport, list[str]]:
        """Write a checkpoint, and remove those that are no longer to be kept.

        Args:
            name: of the file or folder.
            before: the last step that may have led to this one.
            state: the step and the metrics, on rank 0.
            tensors: states of models and optimizers.
            equal: states of what is equal on all ranks.
            own: states of what is this rank's.

        Returns:
            What was written, and what went wrong with those, in sentences.
        """
        path, rank = inside(self.directory, name), str(self._rank)
        group = self._writers.groups[0] if self._writers.groups else None
        try:
            with self._writers.together() as agree:  # what is not `save`'s stops the others, too
                tensors = self._staging.finish(tensors)
                if self._is_one:
                    state, format = {**state, **equal, "ranks": {rank: own}, **tensors}, None
                else:
                    packed, _ = self._writers.run(partial(self._packed, equal, own))
                    state, format = {**state, **packed, **tensors}, "dcp"
                report = save(state, path, format=format, replicated="rank0", process_group=group)
                agree(False)
        finally:
            self._staging.end()
            self._folder.release()
        try:
            return report, self._folder.sweep(path, before) if rank == "0" else []
        except (CheckpointError, OSError) as error:  # the new one is complete
            return report, [
                f"older checkpoints are not removed; the next save tries again: {error}"
            ]

    def _digest(self, state: Mapping[str, Any]) -> bytes:
        """Return what is equal where ranks have the same state of an object.

        Raises:
            PlacementError: it cannot be saved so that it is resumed.
        """
        output, made = require_savable(state, self.directory), sha256()
        for place, data in output.data() if self._ranks.groups else ():
            made.update(b"%d" % place)
            made.update(data)
        return made.digest()

    def _packed(
        self, equal: Mapping[str, Any], own: Mapping[str, Any]
    ) -> tuple[dict[str, Any], None]:
        """Return torch files as the bytes of tensors: the names in a folder of DCP are text."""
        packed = []
        for state in (equal, own):
            output = require_savable(state, self.directory)
            ((section,),) = output.files.values()
            packed.append(torch.empty(section.layout.nbytes, dtype=torch.uint8))
            room = memory_of(packed[-1])
            for place, data in output.data():
                room[place : place + len(data)] = data
        each_own = {"ranks": {str(self._rank): packed[1]}}
        return {"packed": packed[0], **each_own} if self._rank == 0 else each_own, None

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
        on_other_ranks: Mapping[str, Callable[[list[Any]], Any]] | None = None,
        include: Patterns = ("*",),
        exclude: Patterns = (),
        allow_missing: Patterns = (),
        allow_unexpected: Patterns = (),
        rename: Rename | None = None,
        **objects: object,
    ) -> int | None:
        """Load the last complete checkpoint; on a mesh all ranks call it.

        What is not passed is not loaded. Rules as in `torchlift.load` say more, by names such as
        ``model.head.weight`` of a model's tensors, ``optimizer`` or ``scheduler`` of any other
        object, and ``rng`` of the generators. An optimizer's state of a parameter follows that
        parameter: with ``exclude=["model.head.*"]`` a new head keeps its weights and its moments.

        Nothing changes where a name or a shape of any model does not fit. A model and its
        optimizers are loaded together, both or neither; then the next model, the other objects and
        last the random number generators: after another error, what was loaded before it stays. All
        ranks raise, or none. Another number of ranks may have saved: then models, optimizers and
        what was equal on all of them are resumed, and a rank without a state of its own for its
        generators keeps what it has. An object of which each had a state of its own, such as a data
        loader, is an error then, before anything changes, unless you say what becomes of them.

        After a resume from an earlier step, what you save is the latest, not what came after that
        step the first time.

        Args:
            state: name -> object, as for `Keeper.save`. Plain data and tensors stay what they are,
                with a warning where something else was saved: that is in
                ``torchlift.open(keeper.latest()).tree()``.
            step: of another checkpoint than the last one.
            verify: read all of the checkpoint once first, each rank its part, to compare its
                checksums.
            on_other_ranks: name -> function, which on another number of ranks makes the state of
                this one out of the list of those that were saved.
            include: patterns of the checkpoint's names of which one must fit; ``*`` stands for any
                text, dots included. One that fits nothing is an error.
            exclude: patterns of names to leave out: what has them stays as it is.
            allow_missing: patterns of a model's names, or of whole objects, that the checkpoint may
                lack: these stay as they are.
            allow_unexpected: patterns of names that no model needs to have.
            rename: a dict of names, a function or a rule of `torchlift.remap` that gives the name
                in the model, or None for one to drop; not one that merges or splits tensors.
            **objects: more of the state.

        Returns:
            The step that was saved, or None where there is no checkpoint.

        Raises:
            CheckpointError: it does not fit, or other ranks saved what each had of its own.
            IntegrityError: a checksum is wrong; nothing has changed.
            MismatchError: a pattern fits nothing, or nothing is left.
        """
        rules = partial(
            Options, include=include, exclude=exclude, allow_missing=allow_missing,
            allow_unexpected=allow_unexpected, rename=rename,
        )  # fmt: skip
        with _together(self._ranks):
            self._finish()
            return self._resume(
                {**(state or {}), **objects}, step, on_other_ranks or {}, rules, verify=verify
            )

    def _resume(
        self,
        objects: Mapping[str, object],
        step: int | None,
        on_other_ranks: Mapping[str, Callable[[list[Any]], Any]],
        asked: Callable[[], Options],
        *,
        verify: bool,
    ) -> int | None:
        """Do what `resume` does; what is asked for gives its rules, and checks their types."""

        def find() -> tuple[
            tuple[dict[str, object], Options], tuple[str, tuple[str, list[int]] | None, list[str]]
        ]:
            if self._closed and has_group():
                raise ValueError("the keeper is closed: its ranks do not wait for each other")
            named, rules = _named(objects), asked()
            if isinstance(rules.rename, Rewriting):
                raise TypeError(
                    f"rename={rules.rename!r}: resume gives names, and neither merges nor splits"
                )
            kept = self._folder.adopt() if self._rank == 0 else []
            at = next((n for n in reversed(range(len(kept))) if step in (None, kept[n].step)), None)
            before = [one.step for one in kept[:at]]
            place = None if at is None else (name_of(kept[at].path), before)
            return (named, rules), ("resume", place, _model_names(named))

        (named, rules), told = self._ranks.run(find, _require_same_call)
        _require_same(_OTHERS, [names for *_, names in told.values()])
        place = told[0][1]
        if place is None:
            if step is None:
                return None
            raise FormatError(
                "has no complete checkpoint of that step",
                file=self.directory,
                expected=f"one of {self.steps()}",
                found=step,
            )
        path, before = inside(self.directory, place[0]), place[1]
        with ExitStack() as stack:
            try:
                ckpt, _ = self._ranks.run(
                    lambda: (stack.enter_context(open_checkpoint(path)), None)
                )
                require_intact([ckpt] if verify else [], self._ranks)
            except (FormatError, IntegrityError) as error:
                if before:
                    error.hint = (
                        "The file is damaged; there are complete ones of the steps "
                        f"{before}: resume(step=...)."
                    )
                raise
            read = partial(self._read, ckpt, named, on_other_ranks, rules)
            (models, choice, rng), told_by = self._ranks.run(read)
            if len({names for _, names in told_by.values()}) > 1:
                raise ValueError("the ranks do not choose and rename the same names")
            name, fitting = "", list[tuple[_Model, dict[str, Any], set[str], set[str]]]()
            try:
                for each in models:  # of all of them, before one is loaded
                    model, given = each.without(choice.stays), dict[str, Any]()
                    gone, excused = set[str](), set[str]()
                    for one in model.modules:
                        name, saved = f"{one}.", choice.states[one]
                        misfits = {rank: found[one] for rank, (found, _) in told_by.items()}
                        given[one] = _shared(one, saved, misfits, self._rank, rules)
                        gone |= model.keys_in_holder(one, choice.gone[one])
                        excused |= model.keys_in_holder(one, misfits[self._rank].excused)
                    fitting.append((model, given, gone, excused))
                for model, given, gone, excused in fitting:
                    name = "".join(f"{n}." for n in model.modules if len(model.modules) == 1)
                    moments = model.merged(choice.states)
                    load_states(
                        LoadCall(
                            Part.BOTH,
                            model.holder(),
                            [*model.optimizers.values()],
                            model.joined(given),
                            moments,
                            StateDictOptions(full_state_dict=True),
                            process_group=self._ranks.groups[0] if self._ranks.groups else None,
                            exclude=[*map(escape, gone & _parameters_of(moments))],
                            allow_missing=[*map(escape, excused)],
                        )
                    )
            except StateDictMismatch as error:
                error.file = error.file or path
                keys = [*error.mismatched], error.missing_keys, error.unexpected_keys
                ways = zip(("exclude", "allow_missing", "allow_unexpected"), keys, strict=True)
                texts = [f"{way}=[{f'{name}{of[0]}'!r}, ...]" for way, of in ways if of]
                loose = next(filter(PLACE.match, [*error.mismatched, *error.missing_keys]), None)
                if loose is not None and model.optimizers:  # no pattern of a model's names fits it
                    at = int(loose.partition(".")[0]) if len(model.optimizers) > 1 else 0
                    error.hint = f"Pass exclude={[[*model.optimizers][at]]}: it begins anew."
                elif texts:  # not strict=False: of resume all has to fit but by name
                    error.hint = f"Pass {', '.join(texts)} or rename=."
                raise

            def load() -> tuple[int, None]:
                for name, obj in named.items():
                    is_loaded = isinstance(obj, (nn.Module, torch.optim.Optimizer))
                    if is_loaded or name in choice.stays or name not in choice.states:
                        continue
                    # The object may keep what it gets, and a sweep removes the file: no maps.
                    state = copy.deepcopy(_with_values(choice.states[name]))
                    if _is_stateful(obj):
                        getattr(obj, "load_state_dict")(state)  # noqa: B009
                    elif not diff({name: obj}, {name: state}).equal:
                        stale.append(name)
                if rng is not None:
                    Generators().load_state_dict(rng)
                self._base = _step(choice.states["step"])
                return self._base, None

            stale: list[str] = []
            loaded, _ = self._ranks.run(load)
        if stale:
            warnings.warn(
                f"{clipped_list(stale)}: plain data stays what it is; what was saved is in "
                "torchlift.open(path).tree()",
                RuntimeWarning,
                stacklevel=3,
            )
        return loaded

    def _read(
        self,
        ckpt: Checkpoint,
        named: Mapping[str, object],
        on_other_ranks: Mapping[str, Callable[[list[Any]], Any]],
        rules: Options,
    ) -> tuple[tuple[list[_Model], Choice, Any], tuple[dict[str, _Misfit], bytes]]:
        """Read what a checkpoint has for some objects on this rank; nothing changes yet.

        Args:
            ckpt: the checkpoint.
            named: the objects.
            on_other_ranks: see `resume`.
            rules: which names to load, and what these are in the models.

        Returns:
            The models, what the rules choose for them, and states of the generators; and what does
            not fit, with a digest of the names that are loaded.

        Raises:
            CheckpointError: there is no state for an object.
        """
        path, models = ckpt.path, _models(named)
        modules = {name: module for model in models for name, module in model.modules.items()}
        named = {name: obj for name, obj in named.items() if _is_stateful(obj)}
        saved = ckpt._tree(None, partial(slices_of, ckpt))
        _require(saved, ["step", "ranks"], path)
        try:
            _step(saved["step"])
        except ValueError as error:
            found = repr(saved["step"])
            raise FormatError("has no step", file=path, entry="step", found=found) from error
        # Which DCP leaves out.
        saved = {**{name: {} for name, each in modules.items() if not each.state_dict()}, **saved}
        ranks, own_number = saved.pop("ranks"), str(self._rank)
        is_same = len(ranks) == len(ranks_of())
        if "packed" in saved:
            saved |= _unpacked(saved.pop("packed"))
            needed = {own_number} & {*ranks} if is_same else ranks
            ranks |= {rank: _unpacked(ranks[rank]) for rank in needed}
        own, lost = ranks.get(own_number, {}), list[str]()
        if is_same:
            saved |= own
        else:
            numbers = sorted(ranks, key=int)
            for name in on_other_ranks.keys() - saved.keys():
                states = [ranks[number][name] for number in numbers if name in ranks[number]]
                saved[name] = on_other_ranks[name](copy.deepcopy(_with_values(states)))
            lost = [name for name in named if name not in saved]
        owners = {name: each for model in models for name, each in model.owners.items()}
        choice = choose(rules, named, [*modules], owners, saved, path)
        lost = [name for name in lost if any(name in each for each in ranks.values())]
        if lost := [name for name in lost if name not in choice.stays]:
            raise PlacementError(
                "each rank that saved has a state of its own for some objects, and now there are "
                "other ranks",
                file=path,
                entry=", ".join(lost),
                expected=f"{len(ranks)} ranks",
                found=f"{len(ranks_of())}",
                hint=f"Pass on_other_ranks={{{lost[0]!r}: function}}, which makes the state of a "
                "rank out of the list of theirs.",
            )
        _require(saved, [name for name in named if name not in choice.stays], path)
        for model in models:
            for name, optimizer in model.without(choice.stays).optimizers.items():
                known = Names(ModuleTree(model.holder(model.owners[name])))
                with errors_name(path):
                    name_by_place(known, [optimizer])
                    require_known(known, [optimizer], _parameters_of(choice.states[name]))
        rng = None if GENERATORS in choice.stays else _with_values(own.get(GENERATORS))
        try:
            if rng is not None:
                Generators().check(rng)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise FormatError(
                "no states of random number generators", file=path, entry="rng", found=str(error)
            ) from error
        misfits = {name: _misfit(each, name, choice, rules) for name, each in modules.items()}
        chosen = {name: [*choice.states[name]] for name in modules}
        names = sha256(repr([*chosen.items(), *sorted(choice.stays)]).encode()).digest()
        return (models, choice, rng), (misfits, names)


def _misfit(module: nn.Module, name: str, choice: Choice, rules: Options) -> _Misfit:
    """Return what of a model and its saved state does not fit on this rank."""
    state, saved = read_states(module, part=Part.MODEL)[0], choice.states[name]
    shapes = {key: tuple(t.shape) for key, t in state.items() if isinstance(t, torch.Tensor)}
    mismatched = {
        key: (shape, tuple(saved[key].shape))
        for key, shape in shapes.items()
        if hasattr(saved.get(key), "shape") and tuple(saved[key].shape) != shape
    }
    nobodys = sum(1 << at for at, key in enumerate(saved) if key not in state)
    excused = choice.excused(rules, name, state)
    missing = [key for key in state if key not in saved and key not in excused]
    return _Misfit(missing, nobodys, mismatched, excused)


def _shared(
    name: str,
    saved: Mapping[str, Any],
    misfits: Mapping[int, _Misfit],
    rank: int,
    rules: Options,
) -> dict[str, Any]:
    """Return what a rank takes of a model's saved state.

    Raises:
        StateDictMismatch: it does not fit; on all ranks, all of them.
    """
    every = misfits.values()
    missing = list(dict.fromkeys(key for each in every for key in each.missing))
    mismatched = {key: both for each in every for key, both in each.mismatched.items()}
    # Unexpected is what no rank takes: the stages of a pipeline share one checkpoint.
    nobodys = reduce(and_, (each.unexpected for each in every))
    unexpected = [key for at, key in enumerate(saved) if nobodys >> at & 1]
    may = allowed([f"{name}.{key}" for key in unexpected], rules.allow_unexpected)
    unexpected = [key for key in unexpected if f"{name}.{key}" not in may]
    if missing or unexpected or mismatched:
        raise model_misfit(missing, unexpected, mismatched)
    others = misfits[rank].unexpected
    own = {key: value for at, (key, value) in enumerate(saved.items()) if not others >> at & 1}
    return versioned(own, getattr(saved, "_metadata", None))


@contextmanager
def _together(ranks: RankGroup) -> Iterator[None]:
    """Let all ranks end the block, or none: of what is raised on one all others are told."""
    with uninterrupted() as deliver, ranks.together() as agree:
        yield
        deliver()  # an interrupt: here the others are told of it
        agree(False)


def _checked_arguments(
    numbers: Mapping[str, int | None],
    words: Mapping[str, tuple[str, str, str]],
    alike: tuple[bool, str, str | None, bool, float | None],
) -> tuple[None, object]:
    """Refuse arguments that make no sense.

    Args:
        numbers: name -> a count, or None.
        words: name -> what was passed, and what may be.
        alike: what has to be the same on all ranks; the last is the timeout.

    Raises:
        ValueError: one does not.
    """
    for name, number in numbers.items():
        if number is not None and (type(number) is not int or number < 1):
            raise ValueError(f"{name}={number!r}: expected a number from 1 on, or None")
    for name, (word, *known) in words.items():
        if word not in known:
            raise ValueError(f"{name}={word!r}: expected one of {', '.join(known)}")
    *_, timeout = alike
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout={timeout!r}: expected seconds, or None")
    return None, alike


def _new_groups(timeout: float | None) -> list[Any]:
    """Return a process group of all ranks, if there are any, that waits as long as the job does."""
    limit = None if timeout is None else timedelta(seconds=timeout)
    return [new_gloo_group(limit)] if has_group() else []


def _named(objects: Mapping[Any, object]) -> dict[str, object]:
    """Return the objects by name.

    Raises:
        ValueError: a name that a checkpoint needs for itself, or one with a dot.
    """
    for name in objects:
        if not isinstance(name, str) or not name or "." in name or name in _OWN:
            raise ValueError(
                f"{name!r} cannot name an object: expected a word other than {', '.join(_OWN)}"
            )
    return {**objects}


def _groups_of(
    states: Mapping[str, Any], objects: Mapping[str, object]
) -> dict[tuple[str, tuple[str, ...]], dict[str, Any]]:
    """Return the groups of optimizers, by the optimizer's name and those of its parameters."""
    return {
        (name, tuple(group["params"])): group
        for name, obj in objects.items()
        if isinstance(obj, torch.optim.Optimizer)
        for group in states[name]["param_groups"]
    }


def _model_names(objects: Mapping[str, object]) -> list[str]:
    """Return the names of models and optimizers, in whose states all ranks have a part."""
    return sorted(
        name for name, obj in objects.items() if isinstance(obj, (nn.Module, torch.optim.Optimizer))
    )


def _require_same(what: str, told: Iterable[object]) -> None:
    """Refuse what differs from rank to rank.

    Raises:
        ValueError: it does.
    """
    each = [*told]
    if any(one != each[0] for one in each):
        raise ValueError(f"{what}: {each}")


def _require_same_call(told: Mapping[int, tuple[Any, ...]]) -> None:
    """Refuse a call of one method on one rank, and of another one elsewhere.

    Raises:
        ValueError: there are such, as after an error that one rank alone has met and caught.
    """
    names = [name for name, *_ in told.values()]
    _require_same("the ranks call different methods of the keeper", names)


def _step(step: object) -> int:
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0 or isinstance(step, bool):
        raise ValueError(f"step={step!r}: expected a number from 0 on")
    return number


def _lost(saving: list[Future[tuple[SaveReport, list[str]]] | None]) -> None:
    """Warn of a save that failed, if nobody has asked."""
    error = saving[0].exception() if saving[0] is not None and saving[0].done() else None
    if error is not None:
        warnings.warn(f"the last save of a Keeper failed: {error}", RuntimeWarning, stacklevel=2)


def _is_stateful(obj: object) -> bool:
    return all(callable(getattr(obj, name, None)) for name in ("state_dict", "load_state_dict"))


class _Model(NamedTuple):
    """Modules whose parameters some optimizers have together, and these.

    Attributes:
        modules, optimizers: by name.
        owners: name of an optimizer -> those of the modules that it has parameters of.
    """

    modules: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    owners: dict[str, list[str]]

    def holder(self, names: Collection[str] | None = None) -> nn.Module:
        """Return what has the modules of some names: of one itself."""
        found = {n: module for n, module in self.modules.items() if names is None or n in names}
        if len(found) == 1:
            return next(iter(found.values()))
        made = nn.ModuleDict()
        made._modules.update(found)  # under any name
        return made

    def without(self, names: Collection[str]) -> _Model:
        """Return this without the optimizers of some names."""
        return self._replace(
            optimizers={n: each for n, each in self.optimizers.items() if n not in names}
        )

    def keys_in_holder(self, name: str, keys: Iterable[str]) -> set[str]:
        """Return what the holder calls the tensors of a module."""
        return {*keys} if len(self.modules) == 1 else {f"{name}.{key}" for key in keys}

    def states(self) -> dict[str, Any]:
        """Return the states of all by their names."""
        return {
            **{name: read_states(each, part=Part.MODEL)[0] for name, each in self.modules.items()},
            **{
                name: read_states(self.holder(self.owners[name]), optimizer)[1]
                for name, optimizer in self.optimizers.items()
            },
        }

    def joined(self, states: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """Return the state of the holder out of those of the modules."""
        if len(states) == 1:
            return next(iter(states.values()))
        state = {f"{name}.{key}": v for name, each in states.items() for key, v in each.items()}
        versions = {
            f"{name}.{path}".removesuffix("."): told
            for name, each in states.items()
            for path, told in getattr(each, "_metadata", {}).items()
        }
        return versioned(state, versions)

    def merged(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states of the optimizers as one, of the parameters of the holder."""
        state: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        for number, name in enumerate(self.optimizers):
            owners = self.owners[name]
            prefix = f"{owners[0]}." if len(owners) == 1 < len(self.modules) else ""
            place = f"{number}." if len(self.optimizers) > 1 else ""

            def renamed(key: str, prefix: str = prefix, place: str = place) -> str:
                return (place if PLACE.fullmatch(key) else prefix) + key

            # DCP leaves an empty dict out.
            state |= {renamed(key): each for key, each in saved[name].get("state", {}).items()}
            groups += [
                {**group, "params": [*map(renamed, group["params"])]}
                for group in saved[name]["param_groups"]
            ]
        return {"state": state, "param_groups": groups} if self.optimizers else {}


def _models(objects: Mapping[str, object]) -> list[_Model]:
    """Return the modules with the optimizers of their parameters.

    Raises:
        PlacementError: one is a FullyShardedDataParallel.
        ValueError: there is an optimizer, and no module.
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
    models = [_Model({name: module}, {}, {}) for name, module in modules.items()]
    ids = {name: set(map(id, module.parameters())) for name, module in modules.items()}
    for name, obj in objects.items():
        if isinstance(obj, torch.optim.Optimizer):
            params = {id(param) for group in obj.param_groups for param in group["params"]}
            # Of tied ones the first that has all of them; or several, or none, have some.
            whole = [each for each in modules if params and params <= ids[each]][:1]
            owners = whole or [each for each in modules if params & ids[each]]
            if not modules:
                raise ValueError(f"{name}: no module among the objects has its parameters")
            joined = [model for model in models if not model.modules.keys().isdisjoint(owners)]
            together = _Model({}, {name: obj}, {name: owners})
            for model in joined:
                together.modules.update(model.modules)
                together.optimizers.update(model.optimizers)
                together.owners.update(model.owners)
            models = [*(model for model in models if model not in joined), together]
    return models


def _parameters_of(state: Mapping[str, Any]) -> set[str]:
    """Return the names of parameters in the state of optimizers."""
    listed = {key for group in state.get("param_groups", ()) for key in group["params"]}
    return listed | {*state.get("state", {})}


def _require(saved: Mapping[str, object], names: Iterable[str], path: str) -> None:
    for name in names:
        if name not in saved:
            raise FormatError(
                "has no state for an object",
                file=path,
                entry=name,
                expected=f"one of {', '.join(map(repr, saved))}",
            )


def _with_tensors(state: Any) -> Any:
    """Return a state with tensors of bytes for numpy's arrays, which files have as lists else."""

    def stored(leaf: Any, _: object) -> Any:
        if not is_array(leaf):
            return leaf
        values = torch.frombuffer(bytearray(leaf.tobytes() or b"0"), dtype=torch.uint8)
        return {_ARRAY: [leaf.dtype.str, list(leaf.shape)], "bytes": values[: leaf.nbytes]}

    return map_leaves(state, stored) if any(map(is_array, leaves(state).values())) else state


def _with_values(state: Any) -> Any:
    """Return a state with the arrays that `_with_tensors` found in it, and tensors for slices."""
    if isinstance(state, FileTensor):
        return state.tensor()
    if isinstance(state, dict) and _ARRAY in state:
        (code, shape), values = state[_ARRAY], _with_values(state["bytes"])
        return array_of(Array(code, tuple(shape), False, bytes(memory_of(values.contiguous()))))
    if type(state) in (dict, OrderedDict):
        return type(state)((name, _with_values(item)) for name, item in state.items())
    if type(state) in (list, tuple):
        return type(state)(map(_with_values, state))
    return state


def _machine() -> str:
    """Return what is equal where processes share one kernel, and what it caches of files."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read()
    except OSError:
        return socket.gethostname()


def _unpacked(packed: Any) -> dict[str, Any]:
    """Return what was packed.

    Raises:
        FormatError: it is no such tensor.
    """
    values = packed.tensor() if isinstance(packed, FileTensor) else packed
    with open_checkpoint(io.BytesIO(memory_of(values.contiguous()))) as ckpt:
        found: dict[str, Any] = ckpt.tree()
    return found

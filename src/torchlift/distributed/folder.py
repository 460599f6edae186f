"""The folder of a run: which checkpoints are complete, which are kept, and which are removed.

Any process may read it. Only the first rank of the Keeper removes checkpoints, and only those that
a Keeper wrote. Nothing here waits for another rank.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

from torchlift._checkpoint.checkpoint import open as open_checkpoint
from torchlift._save.layouts import DCP_FILES
from torchlift._store.places import Stamp, inside, is_url, name_of, place_of, stamp_now
from torchlift._store.uploads import list_names, remove
from torchlift._system.text import clipped_list
from torchlift._transfer.write import is_there, make_durable, remove_debris
from torchlift.errors import CheckpointError
from torchlift.formats.table import DCP_METADATA

T = TypeVar("T")

#: The name of a checkpoint: its step, and its turn if that is not the first one.
_NAME = re.compile(r"step-([0-9]{9,})(?:-([0-9]+))?(\.pt)?")
#: The temporary file of a checkpoint, which a killed process leaves.
_TEMPORARY = re.compile(r"\.(step-[\d-]+\.pt)\.torchlift-\w{8}\.part")
#: The names of the files that a Keeper writes into the folder of a checkpoint.
_WRITTEN = re.compile(rf"{re.escape(DCP_METADATA)}|{DCP_FILES.ours}|\..+\.torchlift-\w{{8}}\.part")


@dataclass(frozen=True, order=True)
class Kept:
    """A complete checkpoint. The latest one has the highest turn and step.

    Attributes:
        turn: How many times the run had gone back to an earlier step, or saved a step again.
        step: The number of steps that led to it.
        path: Its file, folder or URL.
    """

    turn: int
    step: int
    path: str

    @property
    def metrics(self) -> Mapping[str, float]:
        """Return its metrics by name.

        Raises:
            CheckpointError, OSError: If the checkpoint cannot be read.
        """
        return _read_head(self.path).metrics


class _Head(NamedTuple):
    """The facts that a checkpoint states about itself.

    Attributes:
        is_ours: Whether a Keeper wrote it.
        metrics: Its metrics by name.
    """

    is_ours: bool
    metrics: Mapping[str, float]


def _read_head(path: str) -> _Head:
    return _read_stamped(path, stamp_now(_last_written(path)))


def _last_written(path: str) -> str:
    """Return the place of the file that makes a checkpoint complete."""
    return path if path.endswith(".pt") else inside(path, DCP_METADATA)


@lru_cache(1 << 14)  # each checkpoint is opened once, and not at every save
def _read_stamped(path: str, _: Stamp) -> _Head:
    with open_checkpoint(path) as ckpt:
        keys = (*ckpt.entries, *ckpt.objects, *ckpt._index.hidden)
        names = {key.partition(".")[0] for key in keys}
        metrics = {
            key.removeprefix("metrics."): float(value)
            for key, value in ckpt.objects.items()
            if key.startswith("metrics.") and isinstance(value, (int, float))
        }
        return _Head({"step", "metrics", "ranks"} <= names, metrics)


#: A function of the complete checkpoints, the latest one last. It returns those to keep.
Policy = Callable[[Sequence[Kept]], Iterable[Kept]]


class RunFolder:
    """Read the folder of a `torchlift.Keeper` from another process, such as an evaluation.

    The keeper may remove a checkpoint at any time, and to open it is a `CheckpointError` then. So
    let the keeper keep the checkpoints that you evaluate. This object names complete checkpoints
    only. It writes nothing, removes nothing, and needs no process group.

    Args:
        directory: The keeper's folder or URL.
        best: The name of the metric for `best`.
        best_is: Whether the ``"lowest"`` or the ``"highest"`` metric is the best.
        storage_options: Options of a URL. See :ref:`arg-storage-options`.

    Raises:
        ValueError: If an argument has a wrong value.

    Example:
        >>> import tempfile, torch, torchlift
        >>> folder = tempfile.mkdtemp()
        >>> with torchlift.Keeper(folder) as keeper:
        ...     keeper.save(1, model=torch.nn.Linear(2, 1))
        True
        >>> run = torchlift.distributed.RunFolder(folder)
        >>> run.steps(), run.latest()[-17:]
        ([1], 'step-000000001.pt')
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        best: str | None = None,
        best_is: Literal["lowest", "highest"] = "lowest",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if best_is not in ("lowest", "highest"):
            raise ValueError(f"best_is={best_is!r}: expected one of lowest, highest")
        self.directory, self.metric = place_of(directory, storage_options), best
        self._sign = 1 if best_is == "lowest" else -1
        self._complete: set[str] = set()  # URLs of folders that were complete when last listed

    def kept(self) -> list[Kept]:
        """Return the complete checkpoints, the latest one last, and of each step the last one.

        Raises:
            CheckpointError: If the folder cannot be read.
        """
        return self._kept(self._list(self.directory))

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, the latest one last.

        Raises:
            CheckpointError: If the folder cannot be read.
        """
        return [one.step for one in self.kept()]

    def latest(self) -> str | None:
        """Return the path of the latest complete checkpoint, or None.

        Raises:
            CheckpointError: If the folder cannot be read.
        """
        named = reversed(self._named(self._list(self.directory)))
        return next((one.path for one in named if self._is_complete(one.path)), None)

    def best(self) -> str | None:
        """Return the path of the complete checkpoint with the best metric, or None.

        A checkpoint without that metric, or with NaN, is never the best. If two are equal, the
        later one is better. A warning lists checkpoints that cannot be read.

        Raises:
            CheckpointError: If the folder cannot be read.
        """
        if self.metric is None:
            return None
        found, unread = self._find_best(self.kept())
        # The keeper may have removed a checkpoint since.
        left = {*unread}.intersection(one.path for one in self.kept()) if unread else ()
        if left:
            warnings.warn(
                f"metrics cannot be read, so another may be the best: {clipped_list(sorted(left))}",
                RuntimeWarning,
                stacklevel=2,
            )
        return found

    def _find_best(self, kept: Sequence[Kept]) -> tuple[str | None, list[str]]:
        """Find the best checkpoint.

        Returns:
            Its path, and the paths of checkpoints that cannot be read.
        """
        ranked, unread = list[tuple[float, str]](), list[str]()
        for one in reversed(kept):
            try:
                value = one.metrics.get(str(self.metric), float("nan"))
            except (CheckpointError, OSError):
                unread.append(one.path)
                continue
            if value == value:
                ranked.append((self._sign * value, one.path))
        return min(ranked, key=lambda pair: pair[0], default=(0.0, None))[1], unread

    def _kept(self, names: Iterable[str]) -> list[Kept]:
        named = [one for one in self._named(names) if self._is_complete(one.path)]
        return sorted({one.step: one for one in named}.values())

    def _named(self, names: Iterable[str]) -> list[Kept]:
        """Return what has the name of a checkpoint, complete or not."""
        matches = filter(None, map(_NAME.fullmatch, names))
        return sorted(Kept(int(m[2] or 0), int(m[1]), self._path(m[0])) for m in matches)

    def _path(self, name: str) -> str:
        return inside(self.directory, name)

    def _is_complete(self, path: str) -> bool:
        """Return whether a checkpoint is complete. A folder gets its ``.metadata`` last."""
        if path.endswith(".pt"):
            return True
        if not is_url(path):
            return self.use(is_there, inside(path, DCP_METADATA))
        # One request for each folder, and not one at every call.
        if path not in self._complete and DCP_METADATA in self._list(path):
            self._complete.add(path)
        return path in self._complete

    def _list(self, path: str) -> list[str]:
        return self.use(list_names if is_url(path) else os.listdir, path)

    def use(self, function: Callable[[str], T], path: str) -> T:
        """Return the result of a function of the folder, or of a path in it.

        Raises:
            CheckpointError: If the folder was removed, or its file system is not mounted.
        """
        try:
            return function(path)
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                "the folder of the checkpoints cannot be used",
                file=self.directory,
                found=str(error),
            ) from error


class KeptFolder(RunFolder):
    """The folder as its keeper uses it: it names checkpoints, and removes those that expire.

    Args:
        directory: Its absolute path, or a URL.
        keep: The number of latest checkpoints to keep, or a function, or None for all.
        every: Also keep the multiples of this step.
        best: Also keep the checkpoint with the best metric of this name.
        best_is: Which metric is the best.

    Attributes:
        is_ours: Whether the checkpoints in the folder are those of this run.

    Raises:
        ValueError: If an argument has a wrong value.
    """

    is_ours = False

    def __init__(
        self,
        directory: str,
        keep: int | Policy | None = None,
        every: int | None = None,
        best: str | None = None,
        best_is: Literal["lowest", "highest"] = "lowest",
    ) -> None:
        super().__init__(directory, best=best, best_is=best_is)
        if not callable(keep):
            _require_number("keep", keep, "a number from 1 on, a function, or None")
        _require_number("every", every, "a number from 1 on, or None")
        self._keep, self._every = keep, every

    def new_name(self, step: int, *, is_file: bool) -> str:
        """Return the name of the next checkpoint, and remove a killed save of that name.

        Args:
            step: The step.
            is_file: Whether the checkpoint is a file and not a folder.

        Raises:
            CheckpointError: If the folder contains checkpoints, and this run did not resume.
        """
        names = self._list(self.directory)
        kept, turn = self._kept(names), 0
        if kept and not self.is_ours:
            raise CheckpointError(
                "the folder contains the checkpoints of another run",
                file=self.directory,
                found=name_of(kept[-1].path),
                hint="To continue that run, call resume() before the first save. Otherwise give "
                "this run a folder of its own.",
            )
        self.is_ours = True
        if kept:
            # A file of the last step is replaced. A folder stays until the new one is complete.
            last = kept[-1]
            turn = last.turn + (step < last.step or (step == last.step and not is_file))
        while True:
            name = f"step-{step:09d}" + (f"-{turn}" if turn else "") + (".pt" if is_file else "")
            # Files of a killed save must not become a part of this one.
            replaces = self._is_ours if is_file else self._remove
            if name not in names or replaces(self._path(name)):
                return name
            turn += 1  # another program wrote something of that name

    def sweep(self, newest: str) -> list[str]:
        """Remove the checkpoints that are not kept, and the files of interrupted saves.

        Args:
            newest: The path of the checkpoint that was saved last.

        Returns:
            Problems, as sentences.
        """
        names, failed = self._list(self.directory), list[str]()
        kept = self._kept(names)
        stays = {newest, *(one.path for one in kept if self._every and not one.step % self._every)}
        if self.metric is not None:
            stays.add(self._find_best(kept)[0] or newest)
        try:
            if callable(self._keep):
                stays |= {one.path for one in self._keep(kept)}
            else:
                stays |= {one.path for one in kept[-(self._keep or len(kept)) :]}
        except Exception as error:  # the caller's function failed, after a complete save
            return [f"keep= failed, so nothing is removed: {type(error).__name__}: {error}"]
        for name in names:
            path, temporary = self._path(name), _TEMPORARY.fullmatch(name)
            if temporary and not is_url(path):
                remove_debris(self._path(temporary[1]))
            elif _NAME.fullmatch(name) and path not in stays:
                try:
                    self._remove(path)
                except (CheckpointError, OSError) as error:
                    failed.append(str(error))
        if failed:
            text = "older checkpoints cannot be removed, and the next save tries again: "
            return [text + clipped_list(dict.fromkeys(failed))]
        return []

    def _remove(self, path: str) -> bool:
        """Remove a checkpoint of a Keeper, or what a killed save or removal left of one.

        Files of other programs stay, also next to those of a checkpoint. The file that makes a
        checkpoint complete is removed first, so that nobody uses half of one.

        Returns:
            Whether nothing is left.

        Raises:
            CheckpointError, OSError: If it cannot be read or removed.
        """
        if not self._is_ours(path):
            return False
        delete = remove if is_url(path) else os.unlink
        self._complete.discard(path)
        with suppress(FileNotFoundError):  # of a killed save, or another process removed it
            delete(_last_written(path))
        if path.endswith(".pt"):
            return True
        if not is_url(path):
            make_durable(path)  # a crash of the machine must not undo this alone
        others = [name for name in self._list(path) if _WRITTEN.fullmatch(name)]
        for name in others:
            delete(inside(path, name))
        if not is_url(path):
            with suppress(OSError):  # another program's files stay
                os.rmdir(path)
            return not os.path.lexists(path)
        return not self._list(path)

    def _is_ours(self, path: str) -> bool:
        """Return whether a Keeper wrote something that has the name of a checkpoint.

        Raises:
            CheckpointError, OSError: If it cannot be read.
        """
        is_file = path.endswith(".pt")
        if not is_url(path) and (os.path.islink(path) or os.path.isdir(path) == is_file):
            return False
        if self._is_complete(path):
            return _read_head(path).is_ours
        return all(map(_WRITTEN.fullmatch, self._list(path)))


def _require_number(name: str, number: object, expected: str) -> None:
    """Refuse a value that is not None or a number from 1 on.

    Raises:
        ValueError: If it is not.
    """
    if number is not None and (type(number) is not int or number < 1):
        raise ValueError(f"{name}={number!r}: expected {expected}")

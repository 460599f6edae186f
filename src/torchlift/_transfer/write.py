"""Write a file that appears whole: until the disk has all of it, the older one keeps the name.

It is written under the name ``.NAME.torchlift-RANDOM.part``, in the folder of its path, and then
renamed. Its owner holds a lock (``flock``) on it for as long as it lives. An error removes it. What
a process that was killed has left, the next writer of the same path removes: nobody locks it any
more. POSIX only, as ``os.pwrite`` is.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import secrets
import stat
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN, flock
from functools import partial
from hashlib import sha256
from threading import Thread, get_ident
from time import localtime, monotonic, sleep, strftime, time
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

from torchlift._system.interrupts import Running, deliver_interrupt, uninterrupted
from torchlift._system.memory import c_function
from torchlift.errors import CheckpointError
from torchlift.formats.crc import PartialCrc

_MARK = ".torchlift-"  # without it, somebody's own unfinished download could be taken for ours
_LONGEST = 200  # bytes of NAME in the name of a temporary file, which may have 255 in all
_CLIPPED = 180  # of a longer one, of which a hash follows
#: Bytes given to the kernel at a time. Of more, it makes larger pages for its cache, which the host
#: of a virtual machine has to find first: 2 GiB with fsync took 1.5 s by 128 KiB, 6.3 s by 16 MiB.
_BLOCK = 128 << 10
_POLL = 0.01  # seconds
_PATIENCE = 10.0  # seconds for which a writer waits for another one without a word
_WRITEBACK = 16 << 20  # bytes
_SYNC_FILE_RANGE_WRITE = 2  # start, and wait for nothing
#: Bytes that take longer to sum up (0.6 ms) than a thread takes to start (0.1 ms).
_WORTH_A_THREAD = 2 << 20


_T = TypeVar("_T")


class NotDurable(OSError):
    """The new file is in place and whole, but the disk may not yet know its name."""


class NotRemoved(OSError):
    """The new checkpoint is in place, and an older one that readers may take could not go."""


class LockedFile:
    """A file, or a folder, that is open and locked; it is there before that, and knows.

    So that no interrupt comes between a descriptor and its owner: one that nobody closes keeps its
    lock, and the next writer in this process waits for it, or takes the file for a live writer's.

    Attributes:
        descriptor: -1 if it is closed.
        can_lock: whether its file system has locks, as far as is known.
        path: of it, if it was waited for.
        running: the call that unlocks it.
    """

    descriptor = -1
    can_lock = True
    path = ""
    running: Running | None = None

    def open(self, path: str, flags: int, mode: int = 0o777) -> None:
        """Open it, unless it is open."""
        if self.descriptor < 0:
            with uninterrupted():
                self.descriptor = os.open(path, flags, mode)

    def lock(self, path: str, running: Running | None = None) -> None:
        """Wait for the lock; Ctrl-C ends that, and after ten seconds a warning names the holder.

        Args:
            path: of the file.
            running: the call that unlocks it before it ends; None: nobody knows who does.

        Raises:
            CheckpointError: this thread has it, and would wait for ever.
        """
        self.path, self.running = path, running
        _held[id(self)] = self
        begun, is_told = monotonic(), False
        # A file system without locks: nobody can lock there, so nobody takes the file for debris.
        while self.can_lock and not self.try_lock():
            deliver_interrupt()
            for other in _unlock_left():
                if other is not self and other.path == path and other.is_of_this_thread:
                    raise CheckpointError(
                        "a signal handler saves to the folder of a save that it interrupts",
                        file=path,
                        hint="Set a flag in the handler, and save when the other save has ended.",
                    )
            if not is_told and monotonic() - begun >= _PATIENCE:
                is_told = True
                warnings.warn(_waiting(path, self.descriptor, begun), RuntimeWarning, 2)
            sleep(_POLL)

    def try_lock(self) -> bool:
        """Take the lock if nobody has it and there are locks; say whether it is taken."""
        try:
            flock(self.descriptor, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            self.can_lock = False
            return False
        return True

    @property
    def is_of_this_thread(self) -> bool:
        """Return whether it is locked by a call of this thread."""
        return self.running is not None and self.running.thread == get_ident()

    def run(self, call: Callable[[], _T]) -> _T:
        """Call something that may lock this; however it ends, unlock and close it."""
        try:
            try:
                return call()
            finally:
                # First a function of C. Python delivers an interrupt when it enters one of its own:
                # a traceback that a notebook keeps would keep the lock, and other processes wait.
                if self.descriptor >= 0 and self.can_lock:
                    flock(self.descriptor, LOCK_UN)
        finally:
            self.close()

    def close(self) -> None:
        """Unlock and close it; may be called twice."""
        if self.descriptor < 0:
            return
        with uninterrupted():
            # A child that was forked meanwhile, such as a DataLoader's worker, has the lock too: it
            # would keep it for as long as it lives.
            with suppress(OSError):
                flock(self.descriptor, LOCK_UN)
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def __del__(self) -> None:
        # An owner that a second interrupt has ended. The lock of a child's copy is its parent's.
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def __enter__(self) -> LockedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


#: What this process has locked, or waits for, as long as something refers to it.
_held: WeakValueDictionary[int, LockedFile] = WeakValueDictionary()


def _unlock_left() -> list[LockedFile]:
    """Unlock what calls of this process left locked when they ended; return what else is locked."""
    held = [file for each in _held.valuerefs() if (file := each()) is not None]
    for file in held:
        is_left = file.running is not None and file.running.is_over()
        if is_left and _held.pop(id(file), None) is not None:  # of two threads one gets it
            LockedFile.close(file)
    return [file for file in held if file.descriptor >= 0]


def _waiting(path: str, descriptor: int, begun: float) -> str:
    """Return the warning of a writer that waits: for what, since when, and for whom.

    Args:
        path: of the file or folder.
        descriptor: of it.
        begun: when the wait began, on the monotonic clock.
    """
    found = os.fstat(descriptor)
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    holder = "not known, and may run on another machine"
    # Linux: "1: FLOCK  ADVISORY  WRITE 4711 08:01:1835012 0 EOF", of this machine only.
    with suppress(OSError), open("/proc/locks", encoding="ascii") as lines:
        for words in map(str.split, lines):
            if words[1] == "FLOCK" and words[5] == place and int(words[4]) > 0:
                holder = f"process {words[4]} on {os.uname().nodename}"
    since = strftime("%H:%M:%S", localtime(time() - monotonic() + begun))
    return (
        f"{path}: this save has waited for a lock since {since}. The holder is {holder}. "
        "Let it finish, or end it. Ctrl-C ends this save."
    )


class AtomicFile(LockedFile):
    """The owner's side of a file that is being written; others open it by its name.

    Attributes:
        temporary: path of the file until it is committed.
        is_in_place: whether it has its name.

    Example:
        >>> import os, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> file = AtomicFile(os.path.join(folder, "x"))
        >>> os.write(file.descriptor, b"abc")
        3
        >>> file.commit(); file.close()
        >>> os.listdir(folder)
        ['x']
    """

    def __init__(self, path: str, *, alone: bool = True, running: Running | None = None) -> None:
        """Create it, and remove what dead writers of the same path left.

        Args:
            alone: whether what they left is worth nothing; else it stays.
            path: absolute, of the file to be. Where a link has that name, what it leads to is
                replaced, not the link; and a file that is replaced passes its mode on.
            running: the call that closes it before it ends; None: nobody knows who does.

        Raises:
            OSError: it cannot be created.
        """
        self._mode = _mode_of(path)
        self._path = os.path.realpath(path)
        self.temporary, self.is_in_place = "", False
        if alone:
            remove_debris(self._path)
        # A new file gets what open() would give it. Whom the older one shuts out cannot read the
        # new one while it is written; its owner can always open it, on other ranks too.
        mode = 0o666 if self._mode is None else self._mode | stat.S_IRUSR | stat.S_IWUSR
        try:
            # Between the creation and the lock, another writer may take the file for a dead one's.
            while self.descriptor < 0 or not os.path.exists(self.temporary):
                super().close()
                self.temporary = f"{_prefix(self._path)}{secrets.token_hex(4)}.part"
                self.open(self.temporary, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode)
                self.lock(self.temporary, running)
        except BaseException:
            self.close()
            raise

    def commit(self, *, durable: bool = True) -> None:
        """Make everything durable and let the file appear under its name, replacing another.

        Args:
            durable: whether to wait until the disk knows its name; else its set does, once for all.

        Raises:
            NotDurable: it has appeared, but a crash of the machine may bring the older one back.
            OSError: it does not appear.
        """
        if self._mode is not None:
            os.chmod(self.descriptor, self._mode)
        os.fsync(self.descriptor)
        os.replace(self.temporary, self._path)
        self.is_in_place = True
        try:
            if durable:
                make_durable(os.path.dirname(self._path))
        except OSError as error:
            raise NotDurable(*error.args) from error

    def close(self, *, keep: bool = False) -> None:
        """Remove the file unless it was committed or is to stay; may be called twice."""
        if self.descriptor >= 0 and not keep:
            with suppress(OSError):  # it has its new name
                os.unlink(self.temporary)
        super().close()


class SetKind(NamedTuple):
    """What tells the files of one checkpoint in several from all else in their folder.

    Attributes:
        named: path of a head -> the names of the files in its folder that it names.
        is_head: whether a name is that of a head, of which a folder may have several.
        ours: pattern of the names that a head may have given to its files: an old head or a journal
            may name anything, and what no program names so is not removed.
    """

    named: Callable[[str], set[str]]
    is_head: Callable[[str], object]
    ours: str


class AtomicSet:
    """Files in one folder that appear together, when the last of them, the head, names the others.

    Until then the head is the old one, and what it names is in place. Before a file is made, its
    name is in a journal beside the head, which is locked for as long as its owner lives: so an
    error, or else the next writer of the head, removes what no head names in the end.

    Attributes:
        names: those of the files, which the folder had not.
    """

    def __init__(
        self,
        head: str,
        names: Sequence[str],
        kind: SetKind,
        replaces: Sequence[str] = (),
        running: Running | None = None,
    ) -> None:
        """Find names, and remove what dead writers of the same head left.

        Args:
            head: absolute path.
            names: those that the files should have; where there is one of them, or a head, all get
                others.
            kind: of the head.
            replaces: paths of files that the new head supersedes.
            running: as of `AtomicFile`.

        Raises:
            OSError: the folder cannot be written to.
        """
        # Where the head is a link, its readers look for the others beside the link.
        self._folder, self._kind = os.path.realpath(os.path.dirname(head)), kind
        self._replaces, self._running = replaces, running
        self._head = self._path(os.path.basename(head))
        self._is_committed = self._is_clean = False
        self._journals = self._head + ".files"
        _mode_of(self._head)
        self._in_turn(lambda: self._find_names(names))

    def _find_names(self, names: Sequence[str]) -> None:
        """Choose the names of the files, and note them in a journal."""
        taken = self._recover()
        self.names = list(names)
        # Beside an older head, too: who has read that one must not find other values there.
        there = any(name in taken or is_there(self._path(name)) for name in names)
        if there or is_there(self._head):
            token = secrets.token_hex(4)
            self.names = [with_token(name, token) for name in names]
        self._journal = AtomicFile(self._journals, alone=False, running=self._running)
        self._known: list[str] = []
        try:
            self._note(self.names)
        except BaseException:
            self._journal.close()
            raise

    def file(self, number: int) -> AtomicFile:
        """Return one of the files, to be written and committed.

        Raises:
            OSError: it cannot be created.
        """
        return AtomicFile(self._path(self.names[number]), running=self._running)

    def commit(self, content: bytes) -> None:
        """Write the head, from which on all of them are in place; then remove what the old one had.

        Raises:
            NotRemoved: they are in place, and so is something that they supersede.
            NotDurable: they are in place, but a crash of the machine may bring the old ones back.
            OSError: they are not.
        """
        make_durable(self._folder)  # so that no crash leaves a head without what it names
        head = AtomicFile(self._head, running=self._running)
        try:
            write_at(head.descriptor, content, 0)
            self._in_turn(lambda: self._replace_head(head))
        finally:
            head.close()

    def _replace_head(self, head: AtomicFile) -> None:
        """Put the new head in the place of the old one, and remove what that named."""
        self._note(self._old(self._head) or ())
        try:
            head.commit()
        finally:
            self._is_committed = head.is_in_place
            if self._is_committed:  # never before: until then they are the checkpoint
                self._supersede(filter(os.path.isfile, self._replaces))

    def remove(self) -> None:
        """Remove the head, and then what it named.

        Raises:
            NotRemoved: it is still there.
        """
        self._in_turn(self._remove_head)

    def _remove_head(self) -> None:
        self._note(self._old(self._head) or ())
        self._is_committed = True
        self._supersede([self._head])

    def close(self) -> None:
        """Remove the files that the head does not name; may be called twice.

        What cannot be removed, the next writer of the head does.
        """
        if self._journal.descriptor < 0:
            return
        try:
            with suppress(OSError):
                self._in_turn(self._remove_unnamed)
        finally:
            self._journal.close(keep=not self._is_clean)

    def _remove_unnamed(self) -> None:
        if not self._is_committed:
            self._is_clean = self._clean(self._known) or self._remove(self.names)

    def _supersede(self, heads: Iterable[str]) -> None:
        """Remove older heads, and what no head names any more.

        Raises:
            NotRemoved: some of it is still there.
        """
        try:
            for path in heads:
                os.unlink(path)
            self._clean(self._known)
            self._is_clean = True
        except OSError as error:
            raise NotRemoved(*error.args) from error

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def _old(self, head: str) -> set[str] | None:
        """Return what a head names; None where nobody can tell."""
        try:
            return self._kind.named(head) if is_there(head) else set()
        except (CheckpointError, OSError, ValueError, AttributeError, KeyError):
            return None

    def _note(self, names: Iterable[str]) -> None:
        new = [name for name in names if name not in self._known]
        end = os.fstat(self._journal.descriptor).st_size
        data = "".join(f"{json.dumps(name)}\n" for name in new).encode()
        write_at(self._journal.descriptor, data, end)
        os.fsync(self._journal.descriptor)
        self._known += new

    def _needed(self) -> set[str] | None:
        """Return what the heads of the folder name; None where nobody can tell."""
        needed: set[str] = set()
        others = filter(self._kind.is_head, os.listdir(self._folder))
        for head in {self._head, *map(self._path, others)}:
            found = self._old(head)
            if found is None:
                return None
            needed |= found
        return needed

    def _clean(self, names: Iterable[str]) -> bool:
        """Remove files that no head of the folder names; say whether none of them is left."""
        needed = self._needed()
        if needed is None:  # nobody can tell
            return False
        return self._remove(name for name in names if name not in needed)

    def _remove(self, names: Iterable[str]) -> bool:
        """Remove files; say whether none is left, as one that an interrupt has left locked is."""
        left: list[str] = []
        for name in filter(re.compile(self._kind.ours).fullmatch, names):
            remove_debris(self._path(name), live=left.append)
            with suppress(FileNotFoundError):  # it may never have been made
                os.unlink(self._path(name))
        return not left

    def _recover(self) -> set[str]:
        """Remove what dead writers left; return the names that live ones are about to use."""
        taken: set[str] = set()
        remove_debris(
            self._journals,
            dead=lambda path: self._clean(_noted(path)),
            live=lambda path: taken.update(_noted(path)),
        )
        return taken

    def _in_turn(self, change: Callable[[], None]) -> None:
        """Let one writer after the other look at the folder and change what is in it."""
        folder, running = LockedFile(), Running(sys._getframe())

        def wait_and_change() -> None:
            folder.open(self._folder, os.O_RDONLY)
            folder.lock(self._folder, running)  # whoever has it may take its time
            change()

        folder.run(wait_and_change)


def _noted(path: str) -> list[str]:
    """Return the names that are in a journal."""
    names: list[str] = []
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            # A crash of the machine may leave zeros, or a line that is cut off, for names of which
            # nothing was made.
            with suppress(ValueError):
                found = json.loads(line) if line.endswith("\n") else None
                names += [found] if isinstance(found, str) and os.sep not in found else []
    return names


def with_token(name: str, token: str) -> str:
    """Return a name like another one: ``a-TOKEN-00001-of-00002.x`` for ``a-00001-of-00002.x``."""
    match = re.fullmatch(r"(.*?)((?:-\d{5,}-of-\d{5,})?\.[^.]*)", name)
    stem, rest = match.groups() if match else (name, "")
    return f"{stem}-{token}{rest}"


def remove_debris(
    path: str,
    *,
    dead: Callable[[str], bool] = lambda _: True,
    live: Callable[[str], object] = lambda _: None,
) -> None:
    """Remove temporary files of a path whose writers are dead.

    Args:
        path: absolute, of the finished file, where it is and not where a link to it is.
        dead: called with the path of each that is to be removed; says whether it may be.
        live: called with the path of each that has a writer.
    """
    _unlock_left()
    folder, prefix = os.path.split(_prefix(path))
    pattern = re.compile(re.escape(prefix) + r"[a-z0-9_]{8}\.part")
    for name in filter(pattern.fullmatch, os.listdir(folder)):
        # Not allowed to open, or locked by a live writer: neither is ours to remove.
        with suppress(OSError):
            file = LockedFile()
            file.run(partial(_remove_if_dead, file, os.path.join(folder, name), dead, live))


def _remove_if_dead(
    file: LockedFile, path: str, dead: Callable[[str], bool], live: Callable[[str], object]
) -> None:
    file.open(path, os.O_RDWR | os.O_NOFOLLOW)
    if file.try_lock():
        if dead(path):
            os.unlink(path)
    elif file.can_lock:
        live(path)


def is_there(path: str) -> bool:
    """Say whether something has that name.

    Not `os.path.lexists`, for which a disk that fails for a moment has no file at all: what such a
    head names would be removed.

    Raises:
        OSError: nobody can tell.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def make_durable(folder: str) -> None:
    """Wait until the disk knows the names in a folder.

    Raises:
        OSError: it may not.
    """
    with LockedFile() as file:  # open, and not locked
        file.open(folder, os.O_RDONLY)
        os.fsync(file.descriptor)


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of the data.

    Raises:
        OSError: it cannot be written.
    """
    view = memoryview(data)
    while view:
        done = os.pwrite(descriptor, view[:_BLOCK], offset)
        if done <= 0:
            raise OSError("nothing was written")
        view, offset = view[done:], offset + done


#: Callable from bytes and where they are in a file.
Put = Callable[[bytes | memoryview, int], object]


class Runs:
    """What a process writes of a file: small neighbours together, and large runs as they come.

    20,000 tensors of 1 KB, and what a torch file has between them, took 40,000 calls of the system,
    and take 204.

    Attributes:
        nbytes: how many bytes came.
    """

    def __init__(self, descriptor: int, put: Put | None = None) -> None:
        """Nothing yet, for a file that is open, or for what takes bytes in their order."""
        self._put = put or partial(write_at, descriptor)
        self._descriptor = -1 if put else descriptor
        self.nbytes = self._begun = 0
        self._start = self._end = 0  # of `_data` in the file
        self._data: list[bytes | bytearray] = []

    def add(self, offset: int, data: bytes | bytearray) -> None:
        """Take a few bytes, which nobody changes any more, to write them with their neighbours.

        Raises:
            OSError: they cannot be written.
        """
        if offset != self._end or offset + len(data) - self._start > _BLOCK:
            self.flush()
            self._start = offset
        self._data.append(data)
        self._end = offset + len(data)
        self._count(len(data))

    def flush(self) -> None:
        """Write what was taken.

        Raises:
            OSError: it cannot be written.
        """
        if self._data:
            data, self._data = b"".join(self._data), []
            self._put(data, self._start)

    def write(
        self, start: int, runs: Iterable[tuple[int, memoryview]], crc: PartialCrc | None
    ) -> None:
        """Write runs of a payload's bytes, and sum them up.

        Args:
            start: where the payload begins in the file.
            runs: (offset in the payload, bytes).
            crc: the sum of the payload, where there is to be one.

        Raises:
            OSError: they cannot be written.
        """
        if self._descriptor < 0:
            self.flush()  # what takes bytes in their order has to get those before
        for offset, run in runs:
            thread = None if crc is None else _started(crc, offset, run)
            try:
                self._put(run, start + offset)
            finally:
                if thread is not None:
                    thread.join()
            self._count(len(run))

    def _count(self, nbytes: int) -> None:
        """Let the disk begin with what was written, so that an fsync has less to wait for.

        Every 16 MiB: 2 GiB with fsync took 0.94 s instead of 1.43. Linux has a call for that.
        """
        self.nbytes += nbytes
        if self.nbytes - self._begun >= _WRITEBACK and self._descriptor >= 0:
            everything = ctypes.c_int64(0)  # from the first byte, to the end
            call = c_function("sync_file_range")
            call(self._descriptor, everything, everything, _SYNC_FILE_RANGE_WRITE)
            self._begun = self.nbytes


def _started(crc: PartialCrc, offset: int, run: memoryview) -> Thread | None:
    """Sum a run up, on another thread where that is worth it; return the thread."""
    if len(run) >= _WORTH_A_THREAD:
        thread = Thread(target=crc.add, args=(offset, run), daemon=True)
        with suppress(RuntimeError):  # no thread is to be had, as while Python shuts down
            thread.start()
            return thread
    crc.add(offset, run)
    return None


def _mode_of(path: str) -> int | None:
    """Return the permissions of the file that has this name, or None where there is none.

    Raises:
        OSError: a file cannot take its place.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(f"{path} is a directory")
    if not stat.S_ISREG(mode):
        raise FileExistsError(f"{path} is a device or a pipe, which a file must not replace")
    return stat.S_IMODE(mode) & 0o777


def _prefix(path: str) -> str:
    """Return what the paths of a file's temporary files begin with."""
    folder, name = os.path.split(path)
    encoded = os.fsencode(name)
    if len(encoded) > _LONGEST:
        # Two names that begin alike are two: a file's and its journal's, for one.
        name = f"{encoded[:_CLIPPED].decode(errors='ignore')}-{sha256(encoded).hexdigest()[:8]}"
    return os.path.join(folder, f".{name}{_MARK}")

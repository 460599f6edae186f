"""Write the files of a checkpoint under temporary names, and make them appear together."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from torchlift._model.ranks import rank
from torchlift._save.blocks import BLOCK, Workspace
from torchlift._save.layouts import Section, end_of
from torchlift._store.places import inside, is_url, parent
from torchlift._store.uploads import Upload, is_object, list_names, remove
from torchlift._system.interrupts import Running, deliver_interrupt, uninterrupted
from torchlift._transfer.write import (
    AtomicFile,
    AtomicSet,
    LockedFile,
    NotDurable,
    NotRemoved,
    Runs,
    SetKind,
    make_durable,
    remove_debris,
    with_token,
)
from torchlift.errors import Argument, CheckpointError, Hint, IntegrityError, PlacementError
from torchlift.formats.index import TensorEntry

_BLOCK = BLOCK
Advance = Callable[[int], object]


class Files:
    """The files of a checkpoint on a file system. One process creates them and makes them appear.

    Attributes:
        head: path of the only file, or of the file that lists the others.
        temporary: name of each file as it was laid out -> its name until it appears.
    """

    def __init__(
        self,
        head: str,
        names: Sequence[str],
        kind: SetKind | None,
        running: Running | None = None,
    ) -> None:
        """Note what will be created.

        Args:
            head: path of the only file, or of the file that lists the others.
            names: of the files.
            kind: of the set, or None for one file.
            running: see `AtomicFile`.
        """
        self.head, self._names, self._kind, self._running = head, names, kind, running
        self._made: list[str] = []
        self._files: list[AtomicFile] = []
        self._set: AtomicSet | None = None
        self.temporary: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        """Return the final names of the files."""
        return [*self._names] if self._set is None else self._set.names

    def create(self) -> None:
        """Create missing folders, and the files under temporary names.

        It also removes files of dead writers.

        Raises:
            OSError: If a folder or a file cannot be created. `close` removes the others.
        """
        make_folders(os.path.dirname(self.head), self._made)
        if self._kind is not None:
            self._set = AtomicSet(self.head, self._names, self._kind, self._running)
            remove_debris(*map(self._set.path_of, self.names))
        for laid_out, name in zip(self._names, self.names, strict=True):
            path = self.head if self._set is None else self._set.path_of(name)
            file = AtomicFile(path, alone=self._set is None, running=self._running)
            self._files.append(file)
            self.temporary[laid_out] = os.path.basename(file.temporary)
            if self._set is not None:
                # A process may not have as many descriptors as there are files. The lock of the
                # set keeps other writers off without the locks of these.
                LockedFile.close(file)

    def commit(self, sizes: Sequence[int], content: bytes | None) -> list[str]:
        """Make the checkpoint appear. Return the paths of its files.

        Args:
            sizes: bytes of each file.
            content: of the head, or None for one file.

        Raises:
            PlacementError: If a file does not exist or has another size.
            OSError: If it does not appear. `NotDurable` and `NotRemoved`: If it does.
        """
        names = [os.path.basename(file.temporary) for file in self._files]
        folder = os.path.dirname(place_of_head(self.head, self._kind))
        require_sizes(folder, dict(zip(names, sizes, strict=True)))
        for file in self._files:
            file.open(file.temporary, os.O_RDWR)
            file.commit(durable=self._set is None)
            file.close()
        if self._set is None or content is None:
            return [self.head]
        self._set.commit(content)
        folder = os.path.dirname(self.head)
        return [*(os.path.join(folder, name) for name in self._set.names), self.head]

    def close(self) -> None:
        """Remove what did not become part of the checkpoint. You may call it twice."""
        with uninterrupted():
            for file in self._files:
                file.close()
            if self._set is not None:
                self._set.close()
            remove_empty(self._made)


class Objects:
    """The objects of a checkpoint in a store, which has no locks and no temporary names.

    An object appears when it is complete. Objects of a set get names that are new, so the objects
    of the old head stay in place. Two writers of one head share nothing but the head: the later
    head counts, and all of its objects exist.

    Attributes:
        head: URL of the only object, or of the object that lists the others.
        names: of the objects in their folder.
        temporary: name of each object as it was laid out -> its name, which it has from the start.
        upload: the only object, until it is committed.
    """

    def __init__(self, head: str, names: Sequence[str], kind: SetKind | None) -> None:
        self.head, self._kind = head, kind
        self.upload: Upload | None = None
        self._is_committed = False
        token = secrets.token_hex(4)
        self.names = [*names] if kind is None else [with_token(name, token) for name in names]
        self.temporary = dict(zip(names, self.names, strict=True))

    def create(self) -> None:
        """Do nothing: an object is created when its first bytes are sent."""

    def commit(self, _: Sequence[int], content: bytes | None) -> list[str]:
        """Make the checkpoint appear. Return the URLs of its objects.

        Args:
            content: of the head, or None for one object.

        Raises:
            PlacementError: If an object does not exist.
            NotRemoved: If it appears, and an older object cannot be removed.
            CheckpointError: If it does not appear.
        """
        folder, kind, old = parent(self.head), self._kind, set[str]()
        gone = {*self.names}.difference(list_names(folder)) if kind else ()
        if gone:
            raise PlacementError(
                "an object that a rank has written does not exist",
                file=inside(folder, min(gone)),
                hint="Pass one URL on all ranks, and let no other job write to it.",
            )
        if kind is not None and is_object(self.head):
            old = _read_names(self.head, kind) or set()
        if content is None:
            assert self.upload is not None
            self.upload.commit()
        else:
            with Upload(self.head) as head:
                head.write(content)
                head.commit()
        self._is_committed = True
        try:
            if kind is not None and old:
                _remove_unnamed(folder, old, kind)
        except CheckpointError as error:
            raise NotRemoved(str(error)) from None
        names = self.names if content is not None else []
        return [*(inside(folder, name) for name in names), self.head]

    def close(self) -> None:
        """Remove what did not become part of the checkpoint. You may call it twice."""
        if self.upload is not None:
            self.upload.close()
        if not self._is_committed and self._kind:
            remove_files(self.head, self.names, self._kind)


def new_files(
    head: str,
    names: Sequence[str],
    kind: SetKind | None,
    running: Running | None = None,
) -> Files | Objects:
    """Return the files of a checkpoint on a file system, or its objects in a store. See `Files`."""
    if is_url(head):
        return Objects(head, names, kind)
    return Files(head, names, kind, running)


def remove_files(head: str, names: Iterable[str], kind: SetKind | None) -> None:
    """Remove what is left of a failed save, as far as that is possible."""
    with uninterrupted():
        if not is_url(head):
            place = place_of_head(head, kind)
            for name in names:
                with suppress(OSError):
                    os.unlink(os.path.join(os.path.dirname(place), name))
            if kind is None:  # the first rank may have died while it made one file of those
                with suppress(OSError):
                    remove_debris(place)
        elif kind is not None:
            with suppress(CheckpointError):
                _remove_unnamed(parent(head), names, kind)


def _read_names(head: str, kind: SetKind) -> set[str] | None:
    """Return what a head in a store lists, or None if the head cannot be read."""
    try:
        return kind.list_files(head)
    except (CheckpointError, OSError, ValueError, AttributeError, KeyError):
        return None


def _remove_unnamed(folder: str, names: Iterable[str], kind: SetKind) -> None:
    """Remove objects that no head of their folder lists, or none if a head cannot be read.

    Raises:
        CheckpointError: If one cannot be removed.
    """
    there = list_names(folder)
    each = [_read_names(inside(folder, name), kind) for name in filter(kind.is_head, there)]
    if None in each:
        return
    needed = set().union(*filter(None, each))
    for name in {*names}.intersection(there) - needed:
        if re.fullmatch(kind.ours, name):  # an old head may list any name
            remove(inside(folder, name))


def require_sizes(folder: str, sizes: Mapping[str, int]) -> None:
    """Refuse files of other ranks that this machine does not see, or sees with another size.

    Raises:
        PlacementError: If there is one.
        OSError: If the folder cannot be read.
    """
    # Listed, not looked up by name: NFS may remember for a while that a name did not exist.
    there = set(os.listdir(folder))
    for name, nbytes in sizes.items():
        path, found = os.path.join(folder, name), None
        if name in there:
            with open(path, "rb") as file:  # NFS asks its server again when a file is opened
                found = os.fstat(file.fileno()).st_size
        if found != nbytes:
            raise PlacementError(
                "a file that a rank has written does not exist, or is not complete",
                file=path,
                expected=f"{nbytes} bytes",
                found="no file" if found is None else f"{found} bytes",
                hint="Pass a path on a file system that all machines share.",
            )


def place_of_head(head: str, kind: SetKind | None) -> str:
    """Return the path of a head, links followed. Of a set the head itself may be a link."""
    if is_url(head):
        return head
    if kind is None:
        return os.path.realpath(head)
    folder, name = os.path.split(head)
    return os.path.join(os.path.realpath(folder), name)


def make_folders(path: str, made: list[str]) -> None:
    """Create missing folders durably, and add them to `made`, outermost first."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    make_folders(parent, made)
    with suppress(FileExistsError):  # another saver made it; a file there is an error later
        os.mkdir(path)
        made.append(path)
    make_durable(parent)


def remove_empty(made: Sequence[str]) -> None:
    """Remove the folders that were made and stayed empty."""
    for path in reversed(made):
        with suppress(OSError):  # it contains the new files
            os.rmdir(path)


# ---- write


def write_own_files(
    head: str,
    kind: SetKind | None,
    temporary: Mapping[str, str],
    files: Mapping[str, Sequence[Section]],
    advance: Advance,
    objects: Objects | None = None,
) -> None:
    """Write the files of this process among those that the first rank has created.

    The temporary names are random. A rank that sees them is in the same folder, whatever the
    folder is called there.

    Args:
        head: path of the head on this rank.
        kind: of the set, or None for one file.
        temporary: the names of the files that the first rank has created.
        files: name -> sections, of the files that this process writes.
        advance: called with a number of bytes as they are read.
        objects: those of a checkpoint in one object, which is not committed here.

    Raises:
        PlacementError: If this rank does not see the files.
        CheckpointError, OSError: If they cannot be written.
    """
    folder = parent(place_of_head(head, kind))
    paths = {name: inside(folder, temporary[name]) for name in files}

    def advance_or_stop(nbytes: int) -> None:
        deliver_interrupt()
        advance(nbytes)

    if not is_url(head):
        for name, sections in files.items():
            if not os.path.exists(paths[name]):
                raise PlacementError(
                    "the ranks do not save to the same path",
                    found=f"{head} on rank {rank()}, where the file of the first rank is missing",
                    hint="Pass one path on all ranks, on a file system that all machines share. "
                    "A relative path depends on the current folder.",
                )
            with LockedFile() as file:  # its owner has the lock
                file.open(paths[name], os.O_WRONLY)
                write_sections(Runs(file.descriptor), sections, advance_or_stop)
                os.truncate(file.descriptor, end_of(sections))
                os.fsync(file.descriptor)
    elif objects is not None and kind is None:
        ((name, sections),) = files.items()
        objects.upload = Upload(paths[name], end_of(sections))
        write_sections(Runs(-1, objects.upload.write), sections, advance_or_stop)
    else:
        for name, sections in files.items():  # each appears when it is complete
            with Upload(paths[name], end_of(sections)) as made:
                to = Runs(-1, made.write)
                write_sections(to, sections, advance_or_stop)
                made.commit()
    deliver_interrupt()  # the last one that ends the save: the other ranks learn of it


def with_sums(section: Section) -> Section:
    """Return a section whose checksums are known before it is written. This reads its values.

    Raises:
        IntegrityError: If a source file contains other bytes than its checksum says.
    """
    sums = [*_write_payloads(Runs(-1, lambda *_: None), section, lambda _: None)]
    frame = section.layout.frame
    layout = replace(section.layout, checked=False, frame=lambda _: frame(sums))
    return section._replace(layout=layout)


def write_sections(to: Runs, sections: Sequence[Section], advance: Advance) -> None:
    """Write a file from its first byte to its last, but for headers that contain checksums.

    Args:
        to: the file.
        sections: of the file.
        advance: called with a number of bytes as they are read.

    Raises:
        IntegrityError: If a source file contains other bytes than its checksum says.
        OSError: If it cannot be written.
    """
    end = 0
    for section in sections:
        base, layout, _ = section
        written = _write_payloads(to, section, advance)
        to.add(end, bytes(base - end))
        for at, data in layout.frame(written if layout.checked else (0 for _ in written)):
            to.add(base + at, data)
        for _ in written:  # those whose checksum the layout does not take
            pass
        end = section.end
    to.flush()


def _write_payloads(to: Runs, section: Section, advance: Advance) -> Iterator[int]:
    """Write one tensor after the other, and yield the CRC-32 of each.

    Raises:
        IntegrityError: If a known checksum is another one.
    """
    work = Workspace(_BLOCK)
    base, layout, values = section
    for (_, start), value in zip(layout.payloads, values, strict=True):
        known = value.crc32
        needs_sum = layout.checked or known is not None
        found, at = 0, base + start
        for data in value.blocks(work):
            found = to.write(at, data, found if needs_sum else None)
            at += len(data)
            advance(len(data))
        if value.views is not None and known not in (None, found):
            raise IntegrityError(
                "the checksum of its bytes is wrong",
                file=value.views.index.path,
                entry=value.source.key if isinstance(value.source, TensorEntry) else value.key,
                expected=f"crc32 {known:08x}",
                found=f"crc32 {found:08x}",
                hint=Hint(
                    "The file is damaged: download it again, or restore it from a copy. ",
                    Argument("verify", "False"),
                    " takes the bytes as they are.",
                ),
            )
        yield found


@contextmanager
def write_errors(path: str) -> Iterator[None]:
    """Turn an error of the system into one that says what became of the file.

    Raises:
        CheckpointError: If there was one.
    """
    try:
        yield
    except OSError as cause:
        if isinstance(cause, CheckpointError):  # ours is an OSError of Python, too
            raise
        reason, hint = "the file cannot be written", None
        if isinstance(cause, NotDurable):
            reason = "the new file is in place, but its folder is not durable"
            hint = "Save again: a crash of the machine may bring the older file back."
        if isinstance(cause, NotRemoved):
            reason = (
                "the new checkpoint is in place, but an older one, or a file of it, cannot be "
                "removed"
            )
            hint = "Remove it, or save again: a reader may take the older one."
        found = str(cause).partition("\n")[0]
        raise CheckpointError(reason, file=path, found=found, hint=hint) from cause

"""Write an object of a store in the order of its bytes, so that it appears when it is whole."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress
from queue import Full, Queue
from threading import Thread
from typing import Any, Self

from torchlift._store.objects import object_store
from torchlift._store.others import Others
from torchlift._store.places import names_in, stamp_now
from torchlift._store.url import Url
from torchlift._system.interrupts import Interruptible
from torchlift.errors import CheckpointError, NotFound, PlacementError

#: Bytes of a part, unless an object had more than `_MOST` of them then: S3 takes 10,000 at most. To
#: convert 1 GiB takes 59 MiB of memory with such parts by s3fs (with 8 MiB: 73), 99 by obstore
#: (115), which sends several at once and took 0.4 times as long on the loopback.
PART = 6 << 20
_MOST = 9_000
#: Parts that wait for the thread that sends them, and that obstore has on their way.
_WAITING, _AT_ONCE = 1, 4
#: Seconds that an upload which is given up has to delete its parts; after that it goes on alone.
_PATIENCE = 10.0
#: Schemes of which fsspec's files are in parts, which become an object when they are committed.
_COMMITS = ("s3", "s3a", "gs", "gcs")


def upload(place: str, nbytes: int = 0) -> Upload:
    """Return an object on its way to a URL, of about so many bytes."""
    assert isinstance(place, Url)
    return Upload(place, nbytes)


class _Left(Exception):
    """Whoever gave the parts has gone, and there will be no more."""


class Upload:
    """An object on its way, which another thread sends; whoever leaves it uncommitted gives it up.

    Example:
        >>> from torchlift._store.places import place_of
        >>> from torchlift._store.uploads import upload
        >>> with upload(place_of("memory://docs/x", None)) as made:
        ...     made.write(b"abc")
        ...     made.commit()
    """

    def __init__(self, place: Url, nbytes: int = 0) -> None:
        """Prepare an object of about so many bytes; nothing is sent yet."""
        self.place = place
        self.nbytes = 0
        self._size = max(PART, (nbytes // _MOST >> 20) + 1 << 20)  # gcsfs takes whole 256 KiB
        self._part = bytearray()
        self._parts: Queue[bytearray | None] = Queue(_WAITING)
        self._is_whole = self._is_left = False
        self._error: BaseException | None = None
        self._thread: Thread | None = None

    def write(self, data: bytes | bytearray | memoryview, offset: int | None = None) -> None:
        """Take the next bytes.

        Args:
            data: which may change afterwards.
            offset: where they are in the object: no earlier than the end of what came; zeros fill
                what is between.

        Raises:
            CheckpointError: what came before cannot be sent.
            PlacementError: they are not the next ones.
        """
        if offset is not None and offset != self.nbytes:
            if offset < self.nbytes:
                raise PlacementError(
                    "an object of a store is written from its first byte to its last, and some "
                    "values come in another order",
                    file=self.place,
                    hint="Save to a file, and copy it.",
                )
            self.write(bytes(offset - self.nbytes))
        left = memoryview(data)
        self.nbytes += len(left)
        while left:
            if len(self._part) == self._size:  # not before more comes: what is small is sent so
                self._give()
            room = self._size - len(self._part)
            self._part += left[:room]
            left = left[room:]

    def end(self) -> None:
        """Begin to commit it, beside whatever comes next.

        Raises:
            CheckpointError: what came before cannot be sent.
        """
        self._give(last=True)
        self._is_whole = True
        self._put(None)

    def commit(self) -> None:
        """Return when it is there.

        Raises:
            CheckpointError: it cannot be.
        """
        if not self._is_whole:
            self.end()
        assert self._thread is not None
        with Interruptible():
            self._thread.join()
        self._raise()

    def close(self) -> None:
        """Give it up unless it is there, and delete its parts; may be called twice."""
        thread, self._is_left = self._thread, True
        if thread is not None and thread.is_alive():
            with suppress(Full):  # then it finds that it is left when it comes to what waits
                self._parts.put(None, timeout=_PATIENCE)
            thread.join(_PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _give(self, *, last: bool = False) -> None:
        self._raise()
        if self._thread is None:
            thread = Thread(target=self._run, args=(last,), name="torchlift-upload", daemon=True)
            thread.start()
            self._thread = thread
        part, self._part = self._part, bytearray()
        self._put(part)

    def _put(self, part: bytearray | None) -> None:
        with Interruptible():
            self._parts.put(part)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self, is_small: bool) -> None:
        """Send what comes until that is all; after an error only take it."""
        is_taken = False

        def parts() -> Iterator[bytearray]:
            nonlocal is_taken
            while (part := self._parts.get()) is not None and not self._is_left:
                yield part
            is_taken = True
            if self._is_left:
                raise _Left

        sent = parts()
        try:
            _send(self.place, sent, self._size, is_small)
        except BaseException as error:
            if not isinstance(error, CheckpointError):
                error, _ = _others(self.place).failure(self.place, error)
            self._error = error
        while not is_taken and self._parts.get() is not None and not self._is_left:
            pass  # or whoever waits to give the next one would wait for ever


def require_writable(place: str) -> None:
    """Refuse a URL to which nothing can be written in parts.

    Raises:
        PlacementError: it is one of HTTP, or of a hub.
    """
    if isinstance(place, Url) and place.startswith(("http://", "https://", "hf://")):
        raise PlacementError(
            "nothing is written over HTTP, or to a hub, which have no uploads in parts",
            file=place,
            expected="a path, or a URL such as s3://bucket/model.safetensors",
            hint="Save to a file, and send that with a client of the server.",
        )


def listed(folder: str) -> list[str]:
    """Return the names in a folder of a store, which has no folder where nothing is."""
    try:
        return names_in(folder)
    except NotFound:
        return []


def is_object(place: str) -> bool:
    """Return whether an object is there now, whatever was known of it."""
    try:
        stamp_now(place)
    except NotFound:
        return False
    return True


def remove(place: str) -> None:
    """Remove an object of a store; one that is not there is gone.

    Raises:
        CheckpointError: it cannot be removed.
    """
    assert isinstance(place, Url)
    with suppress(NotFound):
        place.store.patiently(
            place, lambda: _others(place).call(place, lambda fs, path: fs.rm_file(path))
        )


def _others(place: Url) -> Others:
    transport = place.store.transport
    assert isinstance(transport, Others)
    return transport


def _send(place: Url, parts: Iterator[bytearray], size: int, is_small: bool) -> None:
    """Send parts, and let them be an object when they end; where they raise, leave nothing.

    Args:
        place: of the object.
        parts: its bytes.
        size: of all of them but the last one.
        is_small: whether there is no other than the last one.
    """
    if (found := object_store(place)) is not None:
        from obstore import put

        what = next(parts) if is_small else parts
        # After an error of what it iterates over it deletes its parts.
        put(*found, what, use_multipart=not is_small, chunk_size=size, max_concurrency=_AT_ONCE)
        return
    fs, scheme = _others(place).file_system(place), place.partition("://")[0]
    path = fs._strip_protocol(place.target)
    (_send_by_commit if scheme in _COMMITS else _send_by_move)(fs, path, parts, size, is_small)


def _send_by_commit(
    fs: Any, path: str, parts: Iterator[bytearray], size: int, is_small: bool
) -> None:
    """Write a file of fsspec in parts, which become an object when they are committed."""
    # What fits into one part is one request, and so it commits itself.
    file = fs.open(path, "wb", block_size=size + is_small, autocommit=is_small)
    try:
        for part in parts:
            file.write(part)
        file.close()
        if not is_small:
            file.commit()
    except BaseException:
        file.closed = True  # or it would be sent when it is collected
        if not is_small:
            file.discard()
        raise


def _send_by_move(
    fs: Any, path: str, parts: Iterator[bytearray], size: int, is_small: bool
) -> None:
    """Write a file of fsspec that has another name until it is whole."""
    from fsspec.spec import AbstractFileSystem

    folder, _, name = path.rpartition("/")
    temporary = f"{folder}/.{name}.torchlift-{secrets.token_hex(4)}.part"
    fs.makedirs(folder, exist_ok=True)
    try:
        with fs.open(temporary, "wb") as file:
            for part in parts:
                file.write(part)
        if type(fs).mv is AbstractFileSystem.mv:  # which takes "[1]" in a name for a pattern
            fs.cp_file(temporary, path)
            fs.rm_file(temporary)
        else:
            fs.mv(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            fs.rm_file(temporary)
        raise

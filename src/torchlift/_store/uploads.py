"""Upload an object in the order of its bytes. It appears when it is complete."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress
from queue import Full, Queue
from threading import Thread
from typing import Any, Self

from torchlift._store.objects import VERSION, object_store
from torchlift._store.others import Others
from torchlift._store.places import names_in, stamp_now
from torchlift._store.url import Url
from torchlift._system.interrupts import Interruptible
from torchlift.errors import CheckpointError, NotFound, PlacementError

#: Bytes of a part. To convert 1 GiB took 59 MiB of memory with s3fs (73 with parts of 8 MiB) and 99
#: with obstore (115). obstore sends several parts at once, and took 0.4 of the time on a loopback.
PART = 6 << 20
#: Parts of one object. Larger objects have larger parts, because S3 accepts at most 10,000.
_MOST = 9_000
#: Parts that wait for the sending thread, and parts that obstore sends in parallel.
_WAITING, _AT_ONCE = 1, 4
#: Seconds to wait for a cancelled upload to delete its parts. After that its thread runs alone.
_PATIENCE = 10.0
#: Schemes whose fsspec files are uploaded in parts and become an object on commit.
_COMMITS = ("s3", "s3a", "gs", "gcs")


class _Cancelled(Exception):
    """The writer left without a commit, so that no more parts arrive."""


class Upload:
    """An upload in a thread of its own. It is cancelled unless it is committed.

    Example:
        >>> from torchlift._store.places import place_of
        >>> from torchlift._store.uploads import Upload
        >>> with Upload(place_of("memory://docs/x", None)) as made:
        ...     made.write(b"abc")
        ...     made.commit()
    """

    def __init__(self, place: str, nbytes: int = 0) -> None:
        """Prepare the upload of about `nbytes` bytes to a URL. Nothing is sent yet."""
        assert isinstance(place, Url)
        self.place = place
        self.nbytes = 0
        # gcsfs accepts multiples of 256 KiB only.
        self._size = max(PART, (nbytes // _MOST >> 20) + 1 << 20)
        self._part = bytearray()
        self._parts: Queue[bytearray | None] = Queue(_WAITING)
        self._is_complete = self._is_cancelled = False
        self._error: BaseException | None = None
        self._thread: Thread | None = None

    def write(self, data: bytes | bytearray | memoryview, offset: int | None = None) -> None:
        """Copy the next bytes to the upload.

        Args:
            data: The bytes. They may change after the call.
            offset: Where they are in the object. Zeros fill a gap after the bytes before.

        Raises:
            CheckpointError: If earlier bytes could not be sent.
        """
        if offset is not None and offset != self.nbytes:
            assert offset > self.nbytes  # a save writes its bytes in order
            self.write(bytes(offset - self.nbytes))
        left = memoryview(data)
        self.nbytes += len(left)
        while left:
            # Only when more bytes follow: a small object is then one request without parts.
            if len(self._part) == self._size:
                self._send_part()
            room = self._size - len(self._part)
            self._part += left[:room]
            left = left[room:]

    def end(self) -> None:
        """Start the commit, without waiting for it.

        Raises:
            CheckpointError: If earlier bytes could not be sent.
        """
        self._send_part(last=True)
        self._is_complete = True
        self._put(None)

    def commit(self) -> None:
        """Wait until the object exists.

        Raises:
            CheckpointError: If the upload failed.
        """
        if not self._is_complete:
            self.end()
        assert self._thread is not None
        with Interruptible():
            self._thread.join()
        self._raise()

    def close(self) -> None:
        """Cancel the upload unless it is committed, and delete its parts. May be called twice."""
        thread, self._is_cancelled = self._thread, True
        if thread is not None and thread.is_alive():
            with suppress(Full):  # the thread sees the flag when it takes the part that waits
                self._parts.put(None, timeout=_PATIENCE)
            thread.join(_PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send_part(self, *, last: bool = False) -> None:
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
        """Send parts until the last one. After an error, drop the remaining parts."""
        is_drained = False

        def parts() -> Iterator[bytearray]:
            nonlocal is_drained
            while (part := self._parts.get()) is not None and not self._is_cancelled:
                yield part
            is_drained = True
            if self._is_cancelled:
                raise _Cancelled

        sent = parts()
        try:
            _send(self.place, sent, self._size, is_small)
        except BaseException as error:
            if not isinstance(error, CheckpointError):
                error, _ = _others(self.place).failure(self.place, error)
            self._error = error
        # Without this the writer would wait forever for room in the queue.
        while not is_drained and self._parts.get() is not None and not self._is_cancelled:
            pass


def require_writable(place: str) -> None:
    """Raise an error if nothing can be written to a URL.

    Raises:
        PlacementError: If the URL is an HTTP or a ``hf://`` URL, or names a version of an object.
    """
    if isinstance(place, Url) and VERSION in place.target:
        raise PlacementError(
            "cannot write to a version of an object: the store makes a new one",
            file=place,
            hint=f"Leave {VERSION}... out of the URL.",
        )
    if isinstance(place, Url) and place.startswith(("http://", "https://", "hf://")):
        raise PlacementError(
            "cannot write over HTTP or to a hub: they do not accept uploads in parts",
            file=place,
            expected="a path, or a URL such as s3://bucket/model.safetensors",
            hint="Save to a file, and upload it with the server's own client.",
        )


def list_names(folder: str) -> list[str]:
    """Return the names in a folder, or nothing if it does not exist. Stores lack empty folders."""
    try:
        return names_in(folder)
    except NotFound:
        return []


def is_object(place: str) -> bool:
    """Return whether an object exists now. Facts from earlier requests are not used."""
    try:
        stamp_now(place)
    except NotFound:
        return False
    return True


def remove(place: str) -> None:
    """Remove an object if it exists.

    Raises:
        CheckpointError: If the object cannot be removed.
    """
    assert isinstance(place, Url)
    with suppress(NotFound):
        place.store.retry(
            place, lambda: _others(place).call(place, lambda fs, path: fs.rm_file(path))
        )


def _others(place: Url) -> Others:
    transport = place.store.transport
    assert isinstance(transport, Others)
    return transport


def _send(place: Url, parts: Iterator[bytearray], size: int, is_small: bool) -> None:
    """Send parts and commit them as an object. If the iterator raises, remove the parts.

    Args:
        place: The URL of the object.
        parts: The bytes in order.
        size: Bytes of each part except the last one.
        is_small: Whether there is one part only.
    """
    if (found := object_store(place)) is not None:
        from obstore import put

        data = next(parts) if is_small else parts
        # obstore deletes the parts if the iterator raises.
        put(*found, data, use_multipart=not is_small, chunk_size=size, max_concurrency=_AT_ONCE)
        return
    fs, scheme = _others(place).file_system(place), place.partition("://")[0]
    path = fs._strip_protocol(place.target)
    (_send_by_commit if scheme in _COMMITS else _send_by_move)(fs, path, parts, size, is_small)


def _send_by_commit(
    fs: Any, path: str, parts: Iterator[bytearray], size: int, is_small: bool
) -> None:
    """Write a file of fsspec in parts and commit them as an object."""
    # A file of one part is one request, which commits itself.
    file = fs.open(path, "wb", block_size=size + is_small, autocommit=is_small)
    try:
        for part in parts:
            file.write(part)
        file.close()
        if not is_small:
            file.commit()
    except BaseException:
        file.closed = True  # else the garbage collector would close it, and so send it
        if not is_small:
            file.discard()
        raise


def _send_by_move(
    fs: Any, path: str, parts: Iterator[bytearray], size: int, is_small: bool
) -> None:
    """Write a file of fsspec under a temporary name, then rename it."""
    from fsspec.spec import AbstractFileSystem

    folder, _, name = path.rpartition("/")
    temporary = f"{folder}/.{name}.torchlift-{secrets.token_hex(4)}.part"
    fs.makedirs(folder, exist_ok=True)
    try:
        with fs.open(temporary, "wb") as file:
            for part in parts:
                file.write(part)
        if type(fs).mv is AbstractFileSystem.mv:  # this one takes "[1]" in a name as a pattern
            fs.cp_file(temporary, path)
            fs.rm_file(temporary)
        else:
            fs.mv(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            fs.rm_file(temporary)
        raise

"""Read objects behind URLs: text without secrets, detection of changes, and retries.

A transport makes the requests: `http` for HTTP, `others` for the schemes of obstore and fsspec.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torchlift._store.files import Opened, change_error
from torchlift.errors import (
    CheckpointError,
    FormatError,
    IntegrityError,
    NotFound,
    Unreachable,
    did_you_mean,
)

if TYPE_CHECKING:
    from urllib.parse import SplitResult

_T = TypeVar("_T")

#: Bytes of the first request. Most files have their complete header, or its offset, in them.
HEAD = 1 << 16

#: Schemes with a container or a repository before the @. Other schemes have a user name there.
_CONTAINERS = ("abfs", "abfss", "hf", "wasb", "wasbs")
#: Seconds before the second try, and the longest pause. Each pause is twice the one before.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 10.0
#: Seconds of failures and pauses after which a request is not tried again.
_PATIENCE = 60.0
#: Our own options and their defaults.
_DEFAULTS: dict[str, Any] = {"tries": 5, "timeout": 30.0, "headers": {}}


class Url(str):
    """A URL as text without its user, password, query and fragment.

    Messages, reports and indexes use this text, so that they never contain a secret.

    Attributes:
        target: The complete URL.
        store: Reads the URL. All URLs from one `open` share it.
    """

    target: str
    store: Store

    def __new__(cls, target: str, store: Store) -> Url:
        """Make the text without secrets from a complete URL."""
        made = super().__new__(cls, remove_private_parts(target))
        made.target, made.store = target, store
        return made

    def __reduce__(self) -> tuple[object, ...]:
        return Url, (self.target, self.store)

    # Two files can differ in the hidden parts only, such as ?id=1 and ?id=2.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Url):
            return str.__eq__(self, other) is True
        same = self.target == other.target and self.store.has_options_of(other.store)
        return self is other or same

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: str) -> bool:
        if str.__eq__(self, other) and isinstance(other, Url):  # a stable order for equal texts
            return (self.target, id(self.store)) < (other.target, id(other.store))
        return str.__lt__(self, other)

    __hash__ = str.__hash__

    def inside(self, name: str) -> Url:
        """Return the URL of a file in this folder, with the same query and store."""
        from urllib.parse import quote

        return self._at(lambda path: f"{path}/{quote(name) if _is_http(self) else name}")

    @property
    def parent(self) -> Url:
        """Return the folder that contains this URL."""
        return self._at(lambda path: path.rpartition("/")[0])

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        from urllib.parse import unquote

        name = self.rstrip("/").rpartition("/")[2]
        return unquote(name) if _is_http(self) else name

    def _at(self, change: Callable[[str], str]) -> Url:
        parts = _split(self.target)
        path = change(parts.path.rstrip("/"))
        return Url(parts._replace(path=path, fragment="").geturl(), self.store)


def _split(target: str) -> SplitResult:
    # Imported here: it takes 10 ms, and paths of files do not need it.
    from urllib.parse import urlsplit

    return urlsplit(target, allow_fragments=_is_http(target))


def _is_http(url: str) -> bool:
    return url[:4].lower() == "http"


def remove_private_parts(target: str) -> str:
    """Return a URL without user, password, query and fragment.

    Example:
        >>> remove_private_parts("https://me:secret@host:8000/a/b.pt?X-Signature=abc#top")
        'https://host:8000/a/b.pt'
    """
    try:
        parts = _split(target)
        is_valid = not _is_http(target) or bool(parts.port != 0 and parts.hostname)
    except ValueError:
        is_valid = False
    if not is_valid:
        scheme = target.partition("://")[0]
        raise FormatError("the URL is not valid", file=f"{scheme}://...")
    host = parts.netloc
    if parts.scheme not in _CONTAINERS:
        host = host.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


@dataclass(frozen=True, slots=True)
class UrlStamp:
    """The size, version and time of an object when it was indexed.

    Attributes:
        size: In bytes. -1 before the first request.
        version: The ETag, or another version of the store. Empty if the store sends none.
        modified: When the object last changed, in the store's own format. Can be empty.
        host: The host that answered. Two hosts can have different versions of one object.
        shown: The name in errors, or None.
    """

    size: int
    version: str = field(default="", repr=False)
    modified: str = field(default="", repr=False)
    host: str = field(default="", compare=False, repr=False)
    shown: str | None = field(default=None, compare=False, repr=False)

    def check(self, file: str, descriptor: int | None = None) -> None:
        """Raise an error unless the object is the one that was indexed. This takes a request.

        Raises:
            IntegrityError: If the object changed.
        """
        assert isinstance(file, Url)
        store = file.store
        if self.size >= 0:  # else nothing was read yet
            store.retry(file, lambda: store.transport.check(file, self))

    def open(self, file: str) -> Opened:
        """Open the object that was indexed. Each read checks that it has not changed."""
        assert isinstance(file, Url)
        return RemoteFile(file, self)

    def change_error(self, file: str, found: str) -> IntegrityError:
        """Return the error for an object that changed."""
        return change_error(self.shown or file, str(self), found)

    def __str__(self) -> str:
        from hashlib import sha256

        # Not as it came: a server can repeat the signed query in it.
        version = sha256(f"{self.version} {self.modified}".encode()).hexdigest()[:8]
        return f"{self.size} bytes, version {version}"


class Failed(Exception):
    """One try has failed.

    Attributes:
        error: The error to raise if no other try succeeds.
        after: Seconds to wait before the next try. None if another try would fail too.
    """

    def __init__(self, error: CheckpointError, after: float | None = 0.0) -> None:
        super().__init__()
        self.error, self.after = error, after


class Seen(NamedTuple):
    """The answer of a store to a look at a URL.

    Attributes:
        stamp: The stamp of an object. None if the URL is a folder.
        head: The first bytes of the object, if they came with the stamp.
    """

    stamp: UrlStamp | None
    head: bytes = b""


class Transport:
    """Makes requests. Each method tries once, and can be called from any thread.

    Attributes:
        is_exact: Whether each answer contains the version, so that no final check is needed.
        at_once: Large ranges to request in parallel. A transport that copies each answer needs a
            small number to stay in its memory budget.
        options: Names in ``storage_options`` beside those of `Store`. None if fsspec checks them.
    """

    is_exact = False
    at_once: int
    options: tuple[str, ...] | None = None

    def __init__(self, store: Store) -> None:
        self._store = store

    def look(self, url: Url) -> Seen:
        """Return what is at a URL now.

        Raises:
            Failed: If nothing is there, or the store does not answer.
        """
        raise NotImplementedError

    def read_into(
        self, url: Url, stamp: UrlStamp, buffers: Sequence[memoryview], offset: int
    ) -> int:
        """Fill buffers with the bytes at an offset. Return the number of bytes that arrived."""
        raise NotImplementedError

    def check(self, url: Url, stamp: UrlStamp) -> None:
        """Raise an error unless the object has this stamp."""
        if (found := self.look(url).stamp) != stamp:
            raise stamp.change_error(url, str(found or "a folder"))

    def stamps_in(self, url: Url) -> dict[str, UrlStamp | None]:
        """Return the names in a folder, with the stamps of objects. A size of -1 is not known.

        Raises:
            FormatError: If the store cannot list a folder.
        """
        raise NotImplementedError

    def cancel(self) -> None:
        """End the requests that other threads wait for, if the client can."""


class Store:
    """Reads the URLs of one `open` with the same options, and counts requests and bytes.

    Attributes:
        timeout: Seconds without a byte after which a request fails.
        headers: Added to each request to the URL's own host. No other host receives them.
        rest: Options for fsspec.
        requests: The number of requests so far.
        received: The number of bytes received so far.
        seen: Complete URL -> what is known of it, until it is opened.
        transport: Makes the requests.
    """

    def __init__(self, transport: type[Transport], options: Mapping[str, Any]) -> None:
        self._made_by = transport, dict(options)
        self.rest = dict(options)
        self.tries, self.timeout, self.headers = (
            self.rest.pop(*each) for each in _DEFAULTS.items()
        )
        if type(self.tries) is not int or self.tries < 1:
            what = "must be an integer from 1"
            raise ValueError(f'storage_options["tries"] {what}, not {self.tries!r}')
        if not isinstance(self.timeout, (int, float)) or not self.timeout > 0:
            what = "must be a positive number of seconds"
            raise ValueError(f'storage_options["timeout"] {what}, not {self.timeout!r}')
        texts = (*self.headers, *self.headers.values()) if isinstance(self.headers, dict) else [0]
        if not all(type(text) is str for text in texts):
            raise TypeError('storage_options["headers"] must be a dict of strings')
        known = (*_DEFAULTS, *(self.rest if transport.options is None else transport.options))
        for name in self.rest.keys() - {*known}:
            what = f"storage_options has no {name!r} for this URL, only {', '.join(known)}"
            raise TypeError(f"{what}. {did_you_mean(name, known)}".rstrip())
        self.requests = self.received = 0
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self.seen: dict[str, Seen] = {}
        self._names: dict[str, list[str]] = {}  # of the folders that were listed
        self.transport = transport(self)

    def __reduce__(self) -> tuple[object, ...]:
        return Store, self._made_by

    def has_options_of(self, other: Store) -> bool:
        """Return whether another store has the same transport and options."""
        return self is other or self._made_by == other._made_by

    def count(self, requests: int, received: int) -> None:
        """Add to the numbers of requests and of bytes received."""
        with self._lock:
            self.requests += requests
            self.received += received

    def look(self, url: Url) -> Seen:
        """Look at a URL, and keep the answer until the URL is opened."""
        found = self.seen.get(url.target) or self.retry(url, lambda: self.transport.look(url))
        if found.stamp is not None:  # a folder is never opened, and may be removed
            self.seen[url.target] = found
        return found

    def names(self, folder: Url) -> list[str]:
        """Return the names in a folder, and keep the stamps of its objects."""
        stamps = self.retry(folder, lambda: self.transport.stamps_in(folder))
        # Forget older facts of this folder: a training run may have written or removed files.
        # Compared without queries, which stand behind the names.
        start = str(folder.inside(""))
        kept = (at for at in self.seen if not remove_private_parts(at).startswith(start))
        self.seen = {at: self.seen[at] for at in kept}
        for name, stamp in stamps.items():
            if stamp is not None and stamp.size >= 0:
                self.seen[folder.inside(name).target] = Seen(stamp)
        self._names[folder.inside("x").parent.target] = [*stamps]
        return [*stamps]

    def exists(self, url: Url) -> bool:
        """Return whether an object or folder exists. This takes no request in a listed folder."""
        if (names := self._names.get(url.parent.target)) is not None:
            return url.name in names
        try:
            self.look(url)
        except NotFound:
            return False
        return True

    def retry(self, url: Url, call: Callable[[], _T]) -> _T:
        """Call a function until it succeeds or cannot succeed, and return its result.

        Raises:
            CheckpointError: If the last try failed.
        """
        started, pause, cancelled = time.monotonic(), _FIRST_PAUSE, self._cancelled
        for tried in range(1, self.tries + 1):
            try:
                return call()
            except Failed as failed:
                trouble = failed
            if tried == self.tries or trouble.after is None:
                break
            import random

            # A random pause, so that a thousand readers do not all come back at the same moment.
            wait = max(trouble.after, pause * random.uniform(0.5, 1.0))
            if time.monotonic() + wait > started + _PATIENCE or cancelled.wait(wait):
                break
            pause = min(2 * pause, _LONGEST_PAUSE)
        if cancelled.is_set():
            raise Unreachable("the read was cancelled", file=url)
        # Raised outside of the except block: the context of the error could show the signed URL.
        raise trouble.error

    def cancel(self) -> None:
        """End the reads that run in other threads. Later reads work."""
        cancelled, self._cancelled = self._cancelled, threading.Event()
        cancelled.set()
        self.transport.cancel()


class RemoteFile(Opened):
    """An object behind a URL, open for reading."""

    def __init__(self, url: Url, stamp: UrlStamp | None = None) -> None:
        self.place = self._url = url
        seen = Seen(stamp)
        if stamp is None or stamp.size < 0:
            seen = url.store.look(url)
            url.store.seen.pop(url.target, None)
        if seen.stamp is None:
            raise FormatError("the URL is a folder", file=url)
        self.stamp, self.size = seen.stamp, seen.stamp.size
        if seen.stamp is not stamp:
            self.head = seen.head or self.read(0, HEAD)

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill the buffers in order with the bytes that start at an offset.

        Raises:
            IntegrityError: If the object changed.
            CheckpointError: If the object cannot be read.
        """
        url, stamp = self._url, self.stamp
        room = min(sum(map(len, buffers)), self.size - offset)
        if room <= 0:
            return 0
        buffers, store = clip(buffers, room), url.store
        return store.retry(url, lambda: store.transport.read_into(url, stamp, buffers, offset))

    def check(self) -> None:
        """Raise an error if the object changed, unless each answer was checked already."""
        if not self._url.store.transport.is_exact:
            self.stamp.check(self._url)


def clip(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """Return buffers for the first `nbytes` bytes only."""
    found = []
    for buffer in buffers:
        found.append(buffer[:nbytes])
        nbytes -= len(found[-1])
    return [buffer for buffer in found if len(buffer)]

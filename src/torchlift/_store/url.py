"""URLs as places: what may be shown of them, what identifies what they lead to, patient reads.

How bytes are had is a transport's business: `http`, or `others` for what fsspec knows.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torchlift._store.files import Opened
from torchlift.errors import CheckpointError, FormatError, IntegrityError, Unreachable

if TYPE_CHECKING:
    from urllib.parse import SplitResult

_T = TypeVar("_T")

#: Bytes of the first request: a header, or where one is, without a second request for most files.
HEAD = 1 << 16

#: Schemes in which what stands before an @ is the name of a container.
_CONTAINERS = ("abfs", "abfss", "wasb", "wasbs")
#: Seconds before the second try, and the longest pause; in between each is twice the last one.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 10.0
#: Seconds after which what does not get better is an error.
_PATIENCE = 60.0
#: Options of ours -> what they are without being given.
_DEFAULTS: dict[str, Any] = {"tries": 5, "timeout": 30.0, "headers": {}}


class Url(str):
    """The URL of a file or a folder, as text that may be shown: no user, password, query, fragment.

    Where it is used as text, as in messages, reports, names of files in an index, nothing of what
    is secret can come along.

    Attributes:
        target: the URL as it was given.
        store: how what is there is read; shared by all that is found through one `open`.
    """

    target: str
    store: Store

    def __new__(cls, target: str, store: Store) -> Url:
        """Return the text of a URL that may be shown."""
        made = super().__new__(cls, shown(target))
        made.target, made.store = target, store
        return made

    def __reduce__(self) -> tuple[object, ...]:
        return Url, (self.target, self.store)

    # What is not shown may be what tells two files apart: ?id=1 and ?id=2, or two servers.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Url):
            return str.__eq__(self, other) is True
        same = self.target == other.target and self.store.reads_as(other.store)
        return self is other or same

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: str) -> bool:
        if str.__eq__(self, other) and isinstance(other, Url):  # so that each has its own place
            return (self.target, id(self.store)) < (other.target, id(other.store))
        return str.__lt__(self, other)

    __hash__ = str.__hash__

    def inside(self, name: str) -> Url:
        """Return the place of a name in this folder, at the same server with the same signature."""
        from urllib.parse import quote

        return self._at(lambda path: f"{path}/{quote(name) if _is_http(self) else name}")

    @property
    def parent(self) -> Url:
        """Return the folder that it is in."""
        return self._at(lambda path: path.rpartition("/")[0])

    @property
    def name(self) -> str:
        """Return the last name of its path."""
        from urllib.parse import unquote

        name = self.rstrip("/").rpartition("/")[2]
        return unquote(name) if _is_http(self) else name

    def _at(self, change: Callable[[str], str]) -> Url:
        parts = _split(self.target)
        path = change(parts.path.rstrip("/"))
        return Url(parts._replace(path=path, fragment="").geturl(), self.store)


def _split(target: str) -> SplitResult:
    # 10 ms, and `random` below 5, which paths of files do without.
    from urllib.parse import urlsplit

    return urlsplit(target, allow_fragments=_is_http(target))


def _is_http(url: str) -> bool:
    return url[:4].lower() == "http"


def shown(target: str) -> str:
    """Return what may be shown of a URL.

    Example:
        >>> shown("https://me:secret@host:8000/a/b.pt?X-Signature=abc#top")
        'https://host:8000/a/b.pt'
    """
    try:
        parts = _split(target)
        makes_sense = not _is_http(target) or (parts.port != 0 and parts.hostname)
    except ValueError:
        makes_sense = None
    if not makes_sense:
        scheme = target.partition("://")[0]
        raise FormatError("a URL that makes no sense", file=f"{scheme}://...")
    host = parts.netloc
    if parts.scheme not in _CONTAINERS:
        host = host.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


@dataclass(frozen=True, slots=True)
class UrlStamp:
    """What identifies the object that a URL led to when it was indexed.

    Attributes:
        size: in bytes; -1: nothing is known before the first request.
        version: a strong ETag, or what else the store calls a version; empty where it has none.
        modified: when it was changed last, as the store writes it; empty where it does not say.
        host: who said so: another one that the URL leads to may call the same object otherwise.
        shown: what errors call it, or None.
    """

    size: int
    version: str = ""
    modified: str = ""
    host: str = field(default="", compare=False)
    shown: str | None = field(default=None, compare=False, repr=False)

    @property
    def time(self) -> float:
        """Return when it was changed last, in seconds since 1970, or 0 where that is not known."""
        with suppress(ValueError):
            return float(self.modified)
        return 0.0

    def check(self, file: str, descriptor: int | None = None) -> None:
        """Refuse an object that is not the one that was indexed; asks the store.

        Raises:
            IntegrityError: it has changed, or is another one under the same name.
        """
        assert isinstance(file, Url)
        store = file.store
        if self.size >= 0:  # what nobody has asked for yet cannot have changed
            store.patiently(file, lambda: store.transport.check(file, self))

    def open(self, file: str) -> Opened:
        """Open the object that was indexed; each read looks at whether it still is."""
        assert isinstance(file, Url)
        return RemoteFile(file, self)

    def changed(self, file: str, found: UrlStamp) -> IntegrityError:
        """Return the error for an object that is now another one."""
        return IntegrityError(
            "the object changed after it was opened",
            file=self.shown or file,
            expected=self._text(),
            found=found._text(),
            hint="Open the checkpoint again once nobody writes to it.",
        )

    def _text(self) -> str:
        version = f", version {self.version}" if self.version else ""
        return f"{self.size} bytes{version}{f', modified {self.modified}' * bool(self.modified)}"


class Failed(Exception):
    """One try has failed.

    Attributes:
        error: what a caller is told in the end.
        after: seconds to wait before the next try; None: another one would fail as well.
    """

    def __init__(self, error: CheckpointError, after: float | None = 0.0) -> None:
        super().__init__()
        self.error, self.after = error, after


class Transport(Protocol):
    """How the bytes behind URLs are had: one try, for any thread."""

    #: Whether each answer says of which version it is.
    is_exact: bool
    #: Large ranges that are asked for at a time: where they come straight to where they belong,
    #: as many as a server that is far away takes; else those that memory is left for.
    at_once: int

    def __init__(self, store: Store) -> None: ...

    @property
    def etags(self) -> Mapping[str, str]:
        """Return target of a URL -> what the Hub calls its content."""

    def head(self, url: Url) -> tuple[UrlStamp, bytes]:
        """Return what identifies an object, and its first bytes."""

    def read_into(
        self, url: Url, stamp: UrlStamp, buffers: Sequence[memoryview], offset: int
    ) -> int:
        """Fill buffers with bytes of an object from a place on; return how many came."""

    def stamp(self, url: Url) -> UrlStamp:
        """Return what identifies an object now."""

    def check(self, url: Url, stamp: UrlStamp) -> None:
        """Refuse an object that is not the one that was indexed."""

    def known(self, url: Url) -> UrlStamp | None:
        """Return what identifies an object, where that was listed."""

    def exists(self, url: Url) -> bool:
        """Return whether an object is there, which may be opened next."""

    def is_folder(self, url: Url) -> bool:
        """Return whether a URL is that of a folder; raise `NotFound` where it is nothing."""

    def names(self, url: Url) -> list[str]:
        """Return the names in a folder; raise `FormatError` if it cannot be listed."""

    def cancel(self) -> None:
        """End requests that wait in other threads."""


class Store:
    """How URLs that belong together are read, and what it has taken so far.

    Attributes:
        timeout: seconds without a byte after which a server is given up.
        headers: of every request to the host of the URL; no other host sees them.
        rest: options for fsspec.
        requests: how many were made.
        received: bytes that came.
        transport: how the bytes are had.
    """

    def __init__(self, transport: Callable[[Store], Transport], options: Mapping[str, Any]) -> None:
        self._made_by = transport, dict(options)
        ours = {name: options.get(name, default) for name, default in _DEFAULTS.items()}
        self.tries, self.timeout = ours["tries"], ours["timeout"]
        self.headers = ours["headers"]
        if type(self.tries) is not int or self.tries < 1:
            raise ValueError(f'storage_options["tries"] is a number from 1 on, not {self.tries!r}')
        if not isinstance(self.timeout, (int, float)) or not self.timeout > 0:
            raise ValueError(f'storage_options["timeout"] is seconds, not {self.timeout!r}')
        texts = (*self.headers, *self.headers.values()) if isinstance(self.headers, dict) else [0]
        if not all(type(text) is str for text in texts):
            raise TypeError('storage_options["headers"] is a dict of texts')
        self.rest = {name: value for name, value in options.items() if name not in _DEFAULTS}
        self.requests = self.received = 0
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._heads: dict[str, tuple[UrlStamp, bytes]] = {}
        self.transport = transport(self)

    def __reduce__(self) -> tuple[object, ...]:
        return Store, self._made_by

    def reads_as(self, other: Store) -> bool:
        """Return whether another store reads the same behind a URL."""
        return self is other or self._made_by == other._made_by

    def count(self, requests: int, received: int) -> None:
        """Note requests that were made, and bytes that came."""
        with self._lock:
            self.requests += requests
            self.received += received

    def head(self, url: Url) -> tuple[UrlStamp, bytes]:
        """Return what identifies an object, and its first bytes, at most `HEAD`."""
        known = self._heads.pop(url.target, None)
        return known or self.patiently(url, lambda: self.transport.head(url))

    def stamp(self, url: Url) -> UrlStamp:
        """Return what identifies an object now."""
        return self.patiently(url, lambda: self.transport.stamp(url))

    def keep_head(self, url: Url) -> bytes:
        """Return the head of an object, which is there for whoever opens it next."""
        # Another thread may take it from there at once.
        found = self._heads[url.target] = self.head(url)
        return found[1]

    def patiently(self, url: Url, call: Callable[[], _T]) -> _T:
        """Return what a call returns, which is tried again where its failure may pass.

        Raises:
            CheckpointError: it does not.
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

            # Not all of a thousand readers at the same moment.
            wait = max(trouble.after, pause * random.uniform(0.5, 1.0))
            if time.monotonic() + wait > started + _PATIENCE or cancelled.wait(wait):
                break
            pause = min(2 * pause, _LONGEST_PAUSE)
        if cancelled.is_set():
            raise Unreachable("the read was cancelled", file=url)
        # Out of the block above: with what was caught there as its context, it could show more of
        # the URL than it says itself.
        raise trouble.error

    def cancel(self) -> None:
        """End all reads that are in progress in other threads; later ones work."""
        cancelled, self._cancelled = self._cancelled, threading.Event()
        cancelled.set()
        self.transport.cancel()

    def cleaned(self, url: Url, text: str) -> str:
        """Return a text of somebody else's without what is secret of a URL and of the options."""
        text = text.replace(url.target, url)
        parts = _split(url.target)
        pairs, user = parts.query.split("&"), parts.netloc.rpartition("@")[0]
        secrets = [*pairs, *(pair.partition("=")[2] for pair in pairs), *user.split(":")]
        secrets += [*_texts(self.rest), *_texts(self.headers)]
        for secret in sorted((s for s in secrets if len(s) > 3), key=len, reverse=True):
            text = text.replace(secret, "...")
        # Of other URLs in it, which may be signed too, what they would show.
        return re.sub(r"(\w://)(?:[^/\s@]*@)?([^\s?'\"]*)(?:\?[^\s'\"]*)?", r"\1\2", text)


def _texts(options: object) -> list[str]:
    """Return all texts in nested options."""
    if isinstance(options, Mapping):
        return [text for value in options.values() for text in _texts(value)]
    if isinstance(options, (list, tuple)):
        return [text for value in options for text in _texts(value)]
    return [options] if isinstance(options, str) else []


class RemoteFile(Opened):
    """An object behind a URL, as it was when its stamp was taken."""

    def __init__(self, url: Url, stamp: UrlStamp | None = None) -> None:
        self.place = self._url = url
        if stamp is None or stamp.size < 0:
            stamp, self.head = url.store.head(url)
        self.stamp, self.size = stamp, stamp.size

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers, one after the other, with the bytes from a place on.

        Raises:
            IntegrityError: the object is another one now.
            CheckpointError: it cannot be read.
        """
        url, stamp = self._url, self.stamp
        room = min(sum(map(len, buffers)), self.size - offset)
        if room <= 0:
            return 0
        if room < sum(map(len, buffers)):
            buffers = _first(buffers, room)
        store = url.store
        return store.patiently(url, lambda: store.transport.read_into(url, stamp, buffers, offset))

    def check(self) -> None:
        """Refuse it where it is not what it was, and where what was read does not say so."""
        if not self._url.store.transport.is_exact:
            self.stamp.check(self._url)


def _first(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """Return buffers for the first bytes only."""
    found = []
    for buffer in buffers:
        found.append(buffer[:nbytes])
        nbytes -= len(found[-1])
    return [buffer for buffer in found if len(buffer)]

"""HTTP: ranges of objects, by the standard library's client, into memory that is there already."""

from __future__ import annotations

import base64
import http.client
import os
import re
import socket
import ssl
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import BinaryIO
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from torchlift._store.url import HEAD, Failed, Store, Url, UrlStamp
from torchlift.errors import (
    CheckpointError,
    FormatError,
    NotAllowed,
    NotFound,
    TimedOut,
    Unreachable,
    UnsafeError,
)

_MOST_REDIRECTS = 10
_REDIRECTS = (301, 302, 303, 307, 308)
#: What passes: too many requests, a server or what is behind it that is busy or just starts.
_PASSING = (408, 425, 429, 500, 502, 503, 504)
#: What a server may answer to a signed URL that is no longer valid.
_EXPIRED = (400, 401, 403, 404, 410)
_MOST_SECONDS = 30.0  # that a server can ask to wait
#: Bytes that are lost at most where a connection breaks in the middle of them.
_BLOCK = 1 << 18
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")

#: What a folder may hold, which HTTP cannot list, in the order in which it counts.
_KNOWN = (
    ".metadata", "model.safetensors.index.json", "model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors",
    "pytorch_model.bin.index.json", "pytorch_model.bin", "adapter_model.safetensors",
)  # fmt: skip


class Http:
    """Reads over HTTP and HTTPS.

    A connection is one thread's while a request is made, and of this process; in between it is kept
    for the next request of whichever thread.
    """

    is_exact = True
    at_once = 32

    def __init__(self, store: Store) -> None:
        self._store = store
        self._idle: dict[tuple[str, str], list[http.client.HTTPConnection]] = {}
        self._busy: set[http.client.HTTPConnection] = set()
        self._process, self._lock = os.getpid(), threading.Lock()
        self._cancelled = 0  # how often
        self._tls: ssl.SSLContext | None = None
        self._located: dict[str, str] = {}  # where redirects led
        self._versions: dict[tuple[str, str], str] = {}  # of a URL, as a host calls it
        self._copies: dict[str, tuple[UrlStamp, BinaryIO]] = {}
        self._received: list[BinaryIO] = []
        self._folders: dict[str, list[str]] = {}
        self.etags: dict[str, str] = {}

    def __del__(self) -> None:
        self._drop_idle()
        for copy in (*self._received, *(copy for _, copy in self._copies.values())):
            copy.close()

    def head(self, url: Url) -> tuple[UrlStamp, bytes]:
        """Return what identifies an object, and its first bytes."""
        if (copy := self._copies.pop(url.target, None)) is not None:
            self._received.append(copy[1])  # of an earlier look; a thread may be reading it
        data = bytearray(HEAD)
        stamp, got = self._ranged(url, None, [memoryview(data)], 0)
        return stamp, bytes(memoryview(data)[:got])

    def read_into(
        self, url: Url, stamp: UrlStamp, buffers: Sequence[memoryview], offset: int
    ) -> int:
        """Fill buffers with bytes of an object from a place on; return how many came."""
        return self._ranged(url, stamp, buffers, offset)[1]

    def stamp(self, url: Url) -> UrlStamp:
        """Return what identifies an object now."""
        return self.head(url)[0]

    def check(self, url: Url, stamp: UrlStamp) -> None:
        """Refuse an object that is not the one that was indexed."""
        self._ranged(url, stamp, [memoryview(bytearray(1))], 0)

    def known(self, url: Url) -> UrlStamp | None:
        """Return nothing: HTTP lists nothing."""
        return None

    def exists(self, url: Url) -> bool:
        """Return whether an object is there; its head is kept for whoever opens it."""
        try:
            self._store.keep_head(url)
        except NotFound:
            return False
        return True

    def is_folder(self, url: Url) -> bool:
        """Return whether a URL has a name of a folder's content below it, and no file itself."""
        if url.endswith("/"):
            return True
        failure: CheckpointError
        try:
            self._store.keep_head(url)
            return False
        except (NotFound, FormatError) as error:
            failure = error
        try:
            if self.names(url):
                return True
        except FormatError as error:
            # What is refused in one way and the other is what was asked for.
            failure = failure if type(failure) is type(error) else error
        raise failure

    def names(self, url: Url) -> list[str]:
        """Return the first one that is there of the names that count in a folder."""
        found = self._folders.get(url.target)
        if found is None:
            found = self._folders[url.target] = []
            for name in _KNOWN:
                with suppress(NotFound):
                    self._store.keep_head(url.inside(name))
                    found.append(name)
                    break
        return found

    def cancel(self) -> None:
        """End requests that wait in other threads."""
        with self._lock:
            self._cancelled += 1
            for connection in self._busy:
                if connection.sock is not None:
                    with suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def address(self, url: Url) -> str:
        """Return the URL that is asked for."""
        return url.target

    def secrets(self, url: Url) -> dict[str, str]:
        """Return headers that only the host of that URL may see."""
        user, at, _ = urlsplit(url.target).netloc.rpartition("@")
        basic = {"Authorization": f"Basic {_basic(user)}"} if at else {}
        return {**basic, **self._store.headers}

    def _ranged(
        self, url: Url, stamp: UrlStamp | None, buffers: Sequence[memoryview], offset: int
    ) -> tuple[UrlStamp, int]:
        """Fill buffers from a place on; return what the object is now, and how many bytes came."""
        if url.target in self._copies:
            found, copy = self._copies[url.target]
            if stamp is not None and not self._is_same(url, stamp, found):
                raise stamp.changed(url, found)
            return found, os.preadv(copy.fileno(), buffers, offset)
        nbytes = sum(map(len, buffers))
        with self._answer(url, stamp, f"bytes={offset}-{offset + nbytes - 1}") as (response, host):
            status, size, length = response.status, 0, 0
            if response.getheader("Content-Encoding", "identity").lower() != "identity":
                raise _wrong(
                    url,
                    "the server compresses what it sends",
                    "bytes as they are in the file",
                    response.getheader("Content-Encoding"),
                )
            if status == 206:
                size, length = _range_of(url, response, offset, nbytes)
            elif status == 200:
                if not self._store.stream:
                    raise _whole_body(url, response)
                size = -1
            found = UrlStamp(
                size,
                response.getheader("ETag", ""),
                response.getheader("Last-Modified", ""),
                host,
            )
            if status == 200:
                self._copies[url.target] = self._copied(url, response, found)
            elif stamp is not None and not self._is_same(url, stamp, found):
                raise stamp.changed(url, found)
            else:
                got = self._fill(url, response, buffers, length)
                return found, got
        return self._ranged(url, stamp, buffers, offset)

    def noted(self, url: Url, response: http.client.HTTPResponse) -> None:
        """Take note of what the host of the URL itself says of it, before a redirect."""

    def _is_same(self, url: Url, stamp: UrlStamp, found: UrlStamp) -> bool:
        """Return whether an answer is of the object that was indexed.

        Two hosts that a URL leads to may call the same object otherwise: each is held to its own
        words.
        """
        known = self._version(url, stamp, found.host)
        if not known:
            self._versions[url.target, found.host] = found.version
        if found.size != stamp.size:
            return False
        if known and found.version:
            return known == found.version
        return found.host != stamp.host or found.modified == stamp.modified

    def _version(self, url: Url, stamp: UrlStamp | None, host: str) -> str:
        if stamp is not None and host == stamp.host:
            return stamp.version
        return self._versions.get((url.target, host), "")

    def _fill(
        self,
        url: Url,
        response: http.client.HTTPResponse,
        buffers: Sequence[memoryview],
        nbytes: int,
    ) -> int:
        """Receive bytes where they belong, until they are all there or the connection ends.

        1 GiB from the loopback in ranges of 8 MiB, beside the server on two cores, each at its best
        number of threads: 0.69 GB/s by 16 (median of eight, 0.51 to 1.00), obstore 0.83 by 8
        (eight, 0.52 to 0.95), fsspec 0.55 by 8 (three); one call of the system for all of a range
        (MSG_WAITALL) 0.49 by 16 (five).
        """
        done, problem = 0, "the connection ended early"
        for buffer in buffers:
            at = 0
            while at < len(buffer) and done < nbytes:
                room = min(len(buffer) - at, nbytes - done, _BLOCK)
                try:
                    got = response.readinto(buffer[at : at + room])
                except (OSError, http.client.HTTPException) as error:
                    got, problem = 0, _cause(error)
                if not got:
                    self._store.count(0, done)
                    if done or nbytes == 0:
                        return done
                    raise Failed(Unreachable(problem, file=url, hint=_LATER))
                at, done = at + got, done + got
        self._store.count(0, done)
        return done

    def _copied(
        self, url: Url, response: http.client.HTTPResponse, stamp: UrlStamp
    ) -> tuple[UrlStamp, BinaryIO]:
        """Receive a whole body into a file without a name."""
        copy, expected = tempfile.TemporaryFile(), response.length  # noqa: SIM115 - see __del__
        block, size = memoryview(bytearray(_BLOCK)), 0
        with _failing(self._store, url):
            while got := response.readinto(block):
                copy.write(block[:got])
                size += got
        copy.flush()
        self._store.count(0, size)
        if expected is not None and size != expected:
            copy.close()
            raise Failed(Unreachable("the connection ended early", file=url, hint=_LATER))
        return UrlStamp(size, stamp.version, stamp.modified, stamp.host), copy

    @contextmanager
    def _answer(
        self, url: Url, stamp: UrlStamp | None, asked: str
    ) -> Iterator[tuple[http.client.HTTPResponse, str]]:
        """Ask for a range; yield the answer and the host that gave it, wherever that is."""
        origin = self.address(url)
        known = self._located.get(origin)
        at = known or origin
        for _ in range(_MOST_REDIRECTS + 2):
            connection, response, key = self._sent(url, origin, at, stamp, asked)
            try:
                if key == _origin(origin):
                    self.noted(url, response)
                location = response.getheader("Location")
                if response.status in _REDIRECTS and location:
                    at = _redirected(url, at, location)
                elif response.status in _EXPIRED and known is not None:
                    # What a redirect signed is valid for minutes, a load may take hours.
                    self._located.pop(origin, None)
                    known, at = None, origin
                elif response.status in (200, 206) or (stamp is None and _is_empty(response)):
                    if at != origin:
                        self._located[origin] = at
                    yield response, urlsplit(at).netloc
                    return
                else:
                    self._refuse(url, response, stamp)
            finally:
                self._finish(connection, response, key)
        raise FormatError("a URL that leads from redirect to redirect", file=url)

    def _refuse(self, url: Url, response: http.client.HTTPResponse, stamp: UrlStamp | None) -> None:
        """Raise the error for an answer that has no bytes; an empty object has none either."""
        status, found = response.status, f"HTTP {response.status} {response.reason}"[:80]
        if status in (412, 416) and stamp is not None:
            raise stamp.changed(url, UrlStamp(-1))
        if status in _PASSING:
            error: CheckpointError = Unreachable(
                "the server cannot answer now", file=url, found=found, hint=_LATER
            )
            raise Failed(error, _seconds(response.getheader("Retry-After", "")))
        if status in (401, 403, 407):
            raise Failed(
                NotAllowed(
                    "the server refuses access", file=url, found=found,
                    hint="Pass credentials, such as a token in "
                    'storage_options={"headers": {"Authorization": ...}}; a signed URL may have '
                    "expired.",
                ),
                None,
            )  # fmt: skip
        if status in (404, 410):
            hint = "Check the URL; some servers answer so where a token is missing, too."
            raise Failed(NotFound("nothing is there", file=url, found=found, hint=hint), None)
        raise Failed(Unreachable("the server cannot answer", file=url, found=found), None)

    def _sent(
        self, url: Url, origin: str, at: str, stamp: UrlStamp | None, asked: str
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse, tuple[str, str]]:
        """Send a request, over a connection that was kept or another one; return the answer."""
        parts, key = urlsplit(at), _origin(at)
        proxy = _proxy(parts)
        headers = {
            "Range": asked, "Accept-Encoding": "identity", "Accept": "*/*",
            "User-Agent": "torchlift",
        }  # fmt: skip
        if key == _origin(origin):
            headers |= self.secrets(url)
        version = self._version(url, stamp, parts.netloc)
        if version and not version.startswith("W/"):
            headers["If-Match"] = version
        path = f"{parts.path or '/'}{'?' * bool(parts.query)}{parts.query}"
        path = re.sub("[^!-~]+", lambda found: quote(found[0]), path)  # as a browser does it
        if proxy is not None and parts.scheme == "http":
            path = f"http://{parts.netloc.rpartition('@')[2]}{path}"
            headers |= _proxy_headers(proxy)
        cancelled = self._cancelled
        while True:
            connection, is_kept = self._take(key), True
            if connection is None:
                with _failing(self._store, url):
                    connection, is_kept = self._connection(parts, proxy), False
            assert connection is not None
            with self._lock:
                self._busy.add(connection)
            try:
                self._store.count(1, 0)
                with _failing(self._store, url, passing=is_kept):
                    connection.request("GET", path, headers=headers)
                    return connection, connection.getresponse(), key
            except _Stale:
                self._drop(connection)  # the server has closed what was kept: no failure of it
                if self._cancelled != cancelled:
                    raise Failed(Unreachable("the read was cancelled", file=url)) from None
            except BaseException:
                self._drop(connection)
                raise

    def _connection(
        self, parts: SplitResult, proxy: SplitResult | None
    ) -> http.client.HTTPConnection:
        host, port = parts.hostname or "", parts.port
        timeout = self._store.timeout
        to = (host, port) if proxy is None else (proxy.hostname or "", proxy.port or 80)
        if parts.scheme == "http":
            return http.client.HTTPConnection(*to, timeout=timeout)
        self._tls = self._tls or ssl.create_default_context()
        connection = http.client.HTTPSConnection(*to, timeout=timeout, context=self._tls)
        if proxy is not None:
            connection.set_tunnel(host, port, _proxy_headers(proxy))
        return connection

    def _take(self, key: tuple[str, str]) -> http.client.HTTPConnection | None:
        """Return a connection that was kept, which is the caller's alone from then on."""
        if self._process != os.getpid():  # two processes on one connection would mix up answers
            self._drop_idle()  # before another thread takes one of them
            self._busy.clear()
            self._process, self._lock = os.getpid(), threading.Lock()
        with self._lock:
            kept = self._idle.get(key)
            return kept.pop() if kept else None

    def _finish(
        self,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        key: tuple[str, str],
    ) -> None:
        """Keep a connection whose answer was read, or is nearly; close another one."""
        if not response.isclosed() and response.length is not None and response.length <= HEAD:
            with suppress(OSError, http.client.HTTPException):
                response.read()
        if not response.isclosed() or connection.sock is None:
            response.close()
            self._drop(connection)
            return
        with self._lock:
            self._busy.discard(connection)
            self._idle.setdefault(key, []).append(connection)

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
        connection.close()

    def _drop_idle(self) -> None:
        for key in [*self._idle]:
            for connection in self._idle.pop(key, ()):
                connection.close()


_LATER = "Try again later."


class _Stale(Exception):
    """A connection that was kept had been closed by the server."""


@contextmanager
def _failing(store: Store, url: Url, passing: bool = False) -> Iterator[None]:
    """Say of an error of the system or of the protocol what it means for a URL."""
    try:
        yield
    except (OSError, ValueError, http.client.HTTPException) as error:
        if passing and isinstance(error, (ConnectionError, http.client.BadStatusLine)):
            raise _Stale from None
        raise _failed(store, url, error) from None


def _failed(store: Store, url: Url, error: Exception) -> Failed:
    host = urlsplit(url).netloc
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = "Where it is your own authority's, name its certificates in SSL_CERT_FILE."
        what = "the server's certificate is not trusted"
        return Failed(Unreachable(what, file=url, found=error.verify_message, hint=hint), None)
    if isinstance(error, (ValueError, http.client.InvalidURL)):
        # Its text has the header, which is a token that somebody read with the end of its line.
        what = "a URL, or a header for it, that HTTP cannot carry"
        hint = "Percent-encode the URL; a header is one line of Latin-1, so strip() what is read."
        return Failed(Unreachable(what, file=url, hint=hint), None)
    if isinstance(error, socket.gaierror):
        what = "the name of the host cannot be resolved"
        hint = "Check the URL, and the network."
        after = 0.0 if error.errno == socket.EAI_AGAIN else None
        return Failed(Unreachable(what, file=url, found=host, hint=hint), after)
    if isinstance(error, TimeoutError):
        what = f"no byte came for {store.timeout:g} seconds"
        hint = 'Wait longer with storage_options={"timeout": seconds}.'
        return Failed(TimedOut(what, file=url, hint=hint))
    found = store.cleaned(url, _cause(error))
    return Failed(Unreachable("the server cannot be reached", file=url, found=found, hint=_LATER))


def _cause(error: Exception) -> str:
    """Return what has happened, without texts that may hold a URL."""
    if isinstance(error, OSError):
        return error.strerror or str(error.args[0] if error.args else type(error).__name__)
    return type(error).__name__


def _range_of(
    url: Url, response: http.client.HTTPResponse, offset: int, nbytes: int
) -> tuple[int, int]:
    """Return the size of an object and the number of bytes that come, which must be those asked.

    Raises:
        FormatError: the answer is of other bytes, or contradicts itself.
    """
    text = response.getheader("Content-Range", "")
    match = _RANGE.fullmatch(text.strip())
    if match is not None:
        first, last, size = map(int, match.groups())
        length = last - first + 1
        fits = first == offset <= last < min(offset + nbytes, size)
        if fits and response.length in (None, length):
            return size, length
    raise _wrong(
        url,
        "the server answers with other bytes than it was asked for",
        f"bytes {offset}-{offset + nbytes - 1}",
        f"Content-Range {text or 'missing'}, Content-Length {response.length}",
    )


def _is_empty(response: http.client.HTTPResponse) -> bool:
    """Return whether no range can be had since there are no bytes."""
    text = response.getheader("Content-Range", "").replace(" ", "")
    return response.status == 416 and text == "bytes*/0"


def _wrong(url: Url, what: str, expected: str, found: object) -> FormatError:
    hint = "What is between here and the server may change what it sends: fetch the file whole."
    return FormatError(what, file=url, expected=expected, found=found, hint=hint)


def _whole_body(url: Url, response: http.client.HTTPResponse) -> FormatError:
    """Return the error for a server that sends all where a part was asked for."""
    kind = response.getheader("Content-Type", "")
    if kind.startswith("text/html"):
        return FormatError(
            "a web page instead of a file",
            file=url,
            found=kind,
            hint="It may ask to log in: check the URL, and pass what it needs in "
            'storage_options={"headers": ...}.',
        )
    return FormatError(
        "the server ignores ranges and sends the whole file",
        file=url,
        expected="HTTP 206 with a part of it",
        found=f"HTTP 200 with {response.length} bytes",
        hint="Download it first, or let it be received whole, into a temporary file: "
        'storage_options={"stream": True}.',
    )


def _redirected(url: Url, at: str, location: str) -> str:
    """Return where a redirect leads, which is neither a file nor less safe than before."""
    try:
        led = urljoin(at, location)
        scheme = urlsplit(led).scheme
    except ValueError:
        led, scheme = "", ""
    if scheme == "https" or (scheme == "http" == urlsplit(at).scheme):
        return led
    raise UnsafeError(
        "the server redirects to what must not be followed",
        file=url,
        expected="an http or https URL, and https from https",
        found=f"{scheme[:20]}://",
    )


def _origin(at: str) -> tuple[str, str]:
    parts = urlsplit(at)
    return parts.scheme.lower(), parts.netloc.rpartition("@")[2].lower()


def _proxy(parts: SplitResult) -> SplitResult | None:
    """Return the proxy that the environment names for a URL."""
    found = urllib.request.getproxies()
    proxy = found.get(parts.scheme) or found.get("all")
    if not proxy or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    return urlsplit(proxy if "://" in proxy else f"http://{proxy}")


def _proxy_headers(proxy: SplitResult) -> dict[str, str]:
    user, at, _ = proxy.netloc.rpartition("@")
    return {"Proxy-Authorization": f"Basic {_basic(user)}"} if at else {}


def _basic(user: str) -> str:
    name, colon, password = user.partition(":")
    return base64.b64encode(f"{unquote(name)}{colon or ':'}{unquote(password)}".encode()).decode()


def _seconds(text: str) -> float:
    """Return how long a server asks to wait, in seconds, as a number or as a date."""
    if text.strip().isdecimal():
        return min(float(text), _MOST_SECONDS)
    try:
        wait = (parsedate_to_datetime(text) - datetime.now(UTC)).total_seconds()
    except (TypeError, ValueError):
        return 0.0
    return min(max(wait, 0.0), _MOST_SECONDS)

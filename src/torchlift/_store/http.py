"""HTTP: ranges of objects, by the standard library's client, into memory that is there already.

obstore 0.12.1 cannot replace it. Measured beside the server of the tests: it sends headers such as
``X-Api-Key`` on to the host of a redirect; it returns compressed answers, and answers of another
length than their ``Content-Range``, as the bytes of the file; every error text has the signed
query, and only that text has the status; each range asks the origin of a redirect again; a request
cannot be interrupted, and hangs in a forked process.
"""

from __future__ import annotations

import base64
import http.client
import os
import re
import socket
import ssl
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from torchlift._store.url import HEAD, Failed, Store, Url, UrlStamp
from torchlift.errors import FormatError, NotAllowed, NotFound, TimedOut, Unreachable, UnsafeError

_MOST_REDIRECTS = 10
_REDIRECTS = (301, 302, 303, 307, 308)
#: Failures that may pass: too many requests, or a server that is busy or starts.
_PASSING = (408, 425, 429, 500, 502, 503, 504)
#: Answers to a signed URL that is no longer valid.
_EXPIRED = (400, 401, 403, 404, 410)
_MOST_SECONDS = 30.0  # that a server can make a client wait
#: Bytes that are lost at most if a connection breaks.
_BLOCK = 1 << 18
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_LATER = "Try again later."
_NAME_A_FILE = (
    "HTTP cannot list a folder: add the name of a file in it, such as model.safetensors, "
    "model.safetensors.index.json or .metadata."
)

#: Process, scheme and host that a connection belongs to. Two processes on one connection would mix
#: up answers.
_Key = tuple[int, str, str]


class Http:
    """Reads over HTTP and HTTPS. A connection is kept for the next request of any thread."""

    is_exact = True
    at_once = 32

    def __init__(self, store: Store) -> None:
        self._store = store
        # A list's append and pop, and a dict's copy, need no lock.
        self._idle: dict[_Key, list[http.client.HTTPConnection]] = {}
        self._busy: dict[http.client.HTTPConnection, int] = {}  # of which process
        self._cancelled = 0  # times
        self._tls: ssl.SSLContext | None = None  # 20 ms to make
        self._located: dict[str, str] = {}  # URL -> target of its redirects
        self._seen: dict[tuple[str, str], UrlStamp] = {}  # URL, host -> first answer
        self.etags: dict[str, str] = {}

    def __del__(self) -> None:
        for kept in self._idle.values():
            for connection in kept:
                connection.close()

    def head(self, url: Url) -> tuple[UrlStamp, bytes]:
        """Return what identifies an object, and its first bytes."""
        data = bytearray(HEAD)
        stamp, got = self._read(url, None, [memoryview(data)], 0)
        return stamp, bytes(memoryview(data)[:got])

    def read_into(
        self, url: Url, stamp: UrlStamp, buffers: Sequence[memoryview], offset: int
    ) -> int:
        """Fill buffers with bytes of an object from a place on; return how many came."""
        return self._read(url, stamp, buffers, offset)[1]

    def stamp(self, url: Url) -> UrlStamp:
        """Return what identifies an object now."""
        return self.head(url)[0]

    def check(self, url: Url, stamp: UrlStamp) -> None:
        """Refuse an object that is not the one that was indexed."""
        self._read(url, stamp, [memoryview(bytearray(1))], 0)

    def known(self, url: Url) -> UrlStamp | None:
        """Return nothing: HTTP lists nothing."""
        return None

    def exists(self, url: Url) -> bool:
        """Return whether an object is there, and keep its head for the next open."""
        try:
            self._store.keep_head(url)
        except NotFound:
            return False
        return True

    def is_folder(self, url: Url) -> bool:
        """Return False, or refuse a URL that can only be a folder."""
        if url.endswith("/"):
            self.names(url)
        return False

    def names(self, url: Url) -> list[str]:
        """Refuse to list a folder."""
        raise FormatError("the URL is that of a folder", file=url, hint=_NAME_A_FILE)

    def cancel(self) -> None:
        """End requests that wait in other threads."""
        self._cancelled += 1
        for connection, process in self._busy.copy().items():
            sock = connection.sock
            if sock is not None and process == os.getpid():  # it ends a parent's connection, too
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def address(self, url: Url) -> str:
        """Return the URL to request."""
        return url.target

    def secrets(self, url: Url) -> dict[str, str]:
        """Return headers that only the host of that URL may see."""
        user, at, _ = urlsplit(url.target).netloc.rpartition("@")
        return {**(_basic("Authorization", user) if at else {}), **self._store.headers}

    def noted(self, url: Url, response: http.client.HTTPResponse) -> None:
        """Note the headers of the URL's own host, before a redirect."""

    def _read(
        self, url: Url, stamp: UrlStamp | None, buffers: Sequence[memoryview], offset: int
    ) -> tuple[UrlStamp, int]:
        """Fill buffers from a place on; return what the object is now, and how many bytes came."""
        nbytes = sum(map(len, buffers))
        asked = f"bytes={offset}-{offset + nbytes - 1}"
        with self._answer(url, stamp, asked) as (response, host):
            size, length = _range_of(url, response, offset, nbytes)
            version, modified = (response.getheader(n, "") for n in ("ETag", "Last-Modified"))
            found = UrlStamp(size, version, modified, host)
            if stamp is not None:
                known = self._known(url, stamp, host)
                known = known or self._seen.setdefault((url.target, host), found)
                is_same = modified == known.modified
                if version and known.version:
                    is_same = version == known.version
                if size != stamp.size or not is_same:
                    raise stamp.changed(url, found)
            return found, self._fill(url, response, buffers, length)

    def _known(self, url: Url, stamp: UrlStamp | None, host: str) -> UrlStamp | None:
        """Return what a host said before: two hosts may have two versions for one object."""
        if stamp is None or stamp.host == host:
            return stamp
        return self._seen.get((url.target, host))

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
        done, got = 0, 1
        try:
            for buffer in buffers:
                at = 0
                while got and at < len(buffer) and done < nbytes:
                    end = at + min(len(buffer) - at, nbytes - done, _BLOCK)
                    got = response.readinto(buffer[at:end])
                    at, done = at + got, done + got
        except (OSError, http.client.HTTPException) as error:
            if not done:
                raise _failure(self._store, url, error) from None
        finally:
            self._store.count(0, done)
        if nbytes and not done:
            raise Failed(Unreachable("the connection ended early", file=url, hint=_LATER))
        return done

    @contextmanager
    def _answer(
        self, url: Url, stamp: UrlStamp | None, asked: str
    ) -> Iterator[tuple[http.client.HTTPResponse, str]]:
        """Request a range; yield the answer and the host that gave it, after all redirects."""
        origin = self.address(url)
        known = self._located.get(origin)
        at = known or origin
        for _ in range(_MOST_REDIRECTS + 2):
            host = _host(at)  # without a password, since stamps are shown
            is_own = host == _host(origin)
            headers = {"Range": asked, "Accept-Encoding": "identity", "Accept": "*/*"}
            headers["User-Agent"] = "torchlift"
            if is_own:
                headers |= self.secrets(url)
            before = self._known(url, stamp, host[1])
            if before is not None and before.version[:1] == '"':  # a weak one matches nothing
                headers["If-Match"] = before.version
            key = os.getpid(), *host
            connection, response = self._send(url, urlsplit(at), key, headers)
            try:
                if is_own:
                    self.noted(url, response)
                status, location = response.status, response.getheader("Location")
                if status in _REDIRECTS and location:
                    at = _redirected(url, at, location)
                    with suppress(OSError, http.client.HTTPException):
                        response.read(HEAD)  # so that the connection can be kept
                elif status in _EXPIRED and known is not None:
                    # A redirect is signed for minutes, and a load may take hours.
                    self._located.pop(origin, None)
                    known, at = None, origin
                elif status in (200, 206) or (stamp is None and _is_empty(response)):
                    if at != origin:
                        self._located[origin] = at
                    yield response, host[1]
                    return
                else:
                    _refuse(url, response, stamp)
            finally:
                self._busy.pop(connection, None)
                if response.isclosed() and connection.sock is not None:
                    self._idle.setdefault(key, []).append(connection)
                else:
                    response.close()
                    connection.close()
        raise FormatError("the URL redirects too often", file=url)

    def _send(
        self, url: Url, parts: SplitResult, key: _Key, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request over a connection that was kept, or another one; return the answer."""
        proxy = _proxy(parts)
        path = f"{parts.path or '/'}{'?' * bool(parts.query)}{parts.query}"
        path = re.sub("[^!-~]+", lambda found: quote(found[0]), path)  # as browsers do
        if proxy is not None and parts.scheme == "http":
            path = f"http://{parts.netloc.rpartition('@')[2]}{path}"
            headers = {**headers, **_proxy_headers(proxy)}
        cancelled = self._cancelled
        while True:
            connection, is_kept = None, True
            try:
                try:
                    connection = self._idle[key].pop()
                except LookupError:
                    connection, is_kept = self._connection(parts, proxy), False
                self._busy[connection] = key[0]
                self._store.count(1, 0)
                connection.request("GET", path, headers=dict(headers))
                return connection, connection.getresponse()
            except BaseException as error:
                if connection is not None:
                    self._busy.pop(connection, None)
                    connection.close()
                if not isinstance(error, (OSError, ValueError, http.client.HTTPException)):
                    raise
                # A server that has closed a kept connection has not failed.
                is_stale = isinstance(error, (ConnectionError, http.client.BadStatusLine))
                if not (is_kept and is_stale and cancelled == self._cancelled):
                    raise _failure(self._store, url, error) from None

    def _connection(
        self, parts: SplitResult, proxy: SplitResult | None
    ) -> http.client.HTTPConnection:
        host, port, timeout = parts.hostname or "", parts.port, self._store.timeout
        to = (host, port) if proxy is None else (proxy.hostname or "", proxy.port or 80)
        if parts.scheme == "http":
            return http.client.HTTPConnection(*to, timeout=timeout)
        self._tls = self._tls or ssl.create_default_context()
        connection = http.client.HTTPSConnection(*to, timeout=timeout, context=self._tls)
        if proxy is not None:
            connection.set_tunnel(host, port, _proxy_headers(proxy))
        return connection


def _failure(store: Store, url: Url, error: Exception) -> Failed:
    """Return our error for one of the system or of the protocol."""
    if isinstance(error, ssl.SSLCertVerificationError):
        hint = "If an authority of your own has signed it, name its file in SSL_CERT_FILE."
        what = "the server's certificate is not trusted"
        return Failed(Unreachable(what, file=url, found=error.verify_message, hint=hint), None)
    if isinstance(error, (ValueError, http.client.InvalidURL)):
        # Its text has the header, such as a token that was read with the end of its line.
        what = "the URL or a header has characters that HTTP cannot carry"
        hint = "Percent-encode the URL. A header is one line of Latin-1: strip() what you read."
        return Failed(Unreachable(what, file=url, hint=hint), None)
    if isinstance(error, socket.gaierror):
        found, hint = urlsplit(url).netloc, "Check the URL and the network."
        after = 0.0 if error.errno == socket.EAI_AGAIN else None
        what = "the name of the host cannot be resolved"
        return Failed(Unreachable(what, file=url, found=found, hint=hint), after)
    if isinstance(error, TimeoutError):
        what = f"the server sent nothing for {store.timeout:g} seconds"
        hint = 'Wait longer with storage_options={"timeout": seconds}.'
        return Failed(TimedOut(what, file=url, hint=hint))
    cause = type(error).__name__  # not its text, which may hold a URL
    if isinstance(error, OSError):
        cause = error.strerror or str(error.args[0] if error.args else cause)
    found = store.cleaned(url, cause)
    return Failed(Unreachable("the server cannot be reached", file=url, found=found, hint=_LATER))


def _refuse(url: Url, response: http.client.HTTPResponse, stamp: UrlStamp | None) -> NoReturn:
    """Raise the error for an answer without bytes."""
    status, found = response.status, f"HTTP {response.status} {response.reason}"[:80]
    if status in (412, 416) and stamp is not None:
        raise stamp.changed(url, UrlStamp(-1))
    if status in _PASSING:
        text = response.getheader("Retry-After", "").strip()
        after = min(float(text), _MOST_SECONDS) if text.isdecimal() else 0.0
        what = "the server cannot answer now"
        raise Failed(Unreachable(what, file=url, found=found, hint=_LATER), after)
    if status in (401, 403, 407):
        what = "the server refuses access"
        hint = (
            "Pass credentials, such as a token in "
            'storage_options={"headers": {"Authorization": ...}}. A signed URL may have expired.'
        )
        raise Failed(NotAllowed(what, file=url, found=found, hint=hint), None)
    if status in (404, 410):
        hint = f"Check the URL. Some servers answer so if a token is missing. {_NAME_A_FILE}"
        raise Failed(NotFound("nothing is there", file=url, found=found, hint=hint), None)
    raise Failed(Unreachable("the server cannot answer", file=url, found=found), None)


def _range_of(
    url: Url, response: http.client.HTTPResponse, offset: int, nbytes: int
) -> tuple[int, int]:
    """Return the size of an object and the number of bytes that come, which must be those asked.

    Raises:
        FormatError: If the server ignores the range, compresses, or contradicts itself.
    """
    if response.status == 416:  # an empty object
        return 0, 0
    what = "the server answers with other bytes than it was asked for"
    expected, hint = f"bytes {offset}-{offset + nbytes - 1}", "Download the file first."
    text, encoding = (response.getheader(n, "") for n in ("Content-Range", "Content-Encoding"))
    found = f"Content-Range {text or 'missing'}, Content-Length {response.length}"
    match = _RANGE.fullmatch(text.strip())
    if encoding.lower() not in ("", "identity"):
        what, found = "the server compresses what it sends", f"Content-Encoding {encoding}"
    elif response.status == 200:
        what = "the server ignores ranges and sends the whole file"
        found = f"HTTP 200 with {response.length} bytes"
        if response.getheader("Content-Type", "").startswith("text/html"):
            what = "the server sends a web page instead of a file"
            hint = (
                "If it asks to log in, check the URL, and pass credentials in "
                f'storage_options={{"headers": ...}}. {_NAME_A_FILE}'
            )
    elif match is not None:
        first, last, size = map(int, match.groups())
        length = last - first + 1
        fits = first == offset <= last < min(offset + nbytes, size)
        if fits and response.length in (None, length):
            return size, length
    raise FormatError(what, file=url, expected=expected, found=found, hint=hint)


def _is_empty(response: http.client.HTTPResponse) -> bool:
    """Return whether the server has no range to send because the object has no bytes."""
    text = response.getheader("Content-Range", "").replace(" ", "")
    return response.status == 416 and text == "bytes*/0"


def _redirected(url: Url, at: str, location: str) -> str:
    """Return the target of a redirect, which is neither a file nor less safe than before."""
    try:
        target = urljoin(at, location)
        scheme = urlsplit(target).scheme
    except ValueError:
        target, scheme = "", ""
    if scheme == "https" or (scheme == "http" == urlsplit(at).scheme):
        return target
    raise UnsafeError(
        "the server redirects to a URL that is not safe to follow",
        file=url,
        expected="an http or https URL, and https from https",
        found=f"{scheme[:20]}://",
    )


def _host(at: str) -> tuple[str, str]:
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
    return _basic("Proxy-Authorization", user) if at else {}


def _basic(header: str, user: str) -> dict[str, str]:
    name, _, password = user.partition(":")
    text = base64.b64encode(f"{unquote(name)}:{unquote(password)}".encode()).decode()
    return {header: f"Basic {text}"}

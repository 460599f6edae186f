"""Read ranges over HTTP by urllib3, which keeps the connections.

Two things that urllib3 can do are done here instead:

- Tries. urllib3 logs the complete URL before each new one, so a log would show its signature.
- Redirects. urllib3 also follows one that leads from ``https`` to ``http``.
"""

from __future__ import annotations

import base64
import http.client
import io
import logging
import os
import re
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeAlias
from urllib.parse import unquote, urljoin, urlsplit

import urllib3
from urllib3 import BaseHTTPResponse, connection, connectionpool, exceptions

from torchlift._store.url import HEAD, Failed, Seen, Store, Transport, Url, UrlStamp, clip
from torchlift.errors import (
    Argument,
    CheckpointError,
    FormatError,
    Hint,
    NotAllowed,
    NotFound,
    TimedOut,
    Unreachable,
    UnsafeError,
)

_MOST_REDIRECTS = 10
#: Failures that may pass: too many requests, or a server that is busy or is starting.
_PASSING = (408, 425, 429, 500, 502, 503, 504)
#: Answers to a signed URL that is no longer valid.
_EXPIRED = (400, 401, 403, 404, 410)
_MOST_SECONDS = 30.0  # the longest wait that a server can ask for with Retry-After
#: Bytes of one receive. A broken connection loses at most this many.
_BLOCK = 1 << 18
#: A server must send this many bytes in two timeouts, and may send as many before the body.
_LEAST = 1 << 16
_KEPT = 64  # connections to one host
_PORTS = {"http": 80, "https": 443}
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
_PAST_END = re.compile(r"bytes ?\*/(\d{1,18})")
_LATER = "Try again later."
_NAME_A_FILE = (
    "HTTP cannot list a folder: add the name of a file in it, such as model.safetensors, "
    "model.safetensors.index.json or .metadata."
)

#: (process, thread) -> the connection that the thread waits for.
_Busy: TypeAlias = "dict[tuple[int, int], _Connection]"
#: Set while this thread makes a request.
_asking: ContextVar[_Busy] = ContextVar("_asking")


class Http(Transport):
    """Reads over HTTP and HTTPS. Connections are kept and reused by all threads."""

    is_exact = True
    at_once = 32
    options: tuple[str, ...] | None = ()

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        # Two processes on one connection would mix up answers.
        self._pools: dict[tuple[int, str, str | None], urllib3.PoolManager] = {}
        self._busy: _Busy = {}
        self._redirects: dict[str, str] = {}  # URL -> target of its redirects
        self._first_stamps: dict[tuple[str, str], UrlStamp] = {}  # (URL, host) -> first answer

    def look(self, url: Url) -> Seen:
        """Return the stamp of an object and its first bytes."""
        data = bytearray(HEAD)
        stamp, got = self._read(url, None, [memoryview(data)], 0)
        return Seen(stamp, bytes(memoryview(data)[:got]))

    def read_into(
        self, url: Url, stamp: UrlStamp, buffers: Sequence[memoryview], offset: int
    ) -> int:
        """Fill buffers with the bytes at an offset. Return the number of bytes that arrived."""
        return self._read(url, stamp, buffers, offset)[1]

    def check(self, url: Url, stamp: UrlStamp) -> None:
        """Raise an error unless the object has this stamp."""
        self._read(url, stamp, [memoryview(bytearray(1))], 0)

    def stamps_in(self, url: Url) -> dict[str, UrlStamp | None]:
        """Raise `FormatError`, because HTTP cannot list a folder."""
        raise FormatError("the URL is a folder", file=url, hint=_NAME_A_FILE)

    def cancel(self) -> None:
        """End the requests that other threads wait for."""
        for (process, _), waiting in self._busy.copy().items():
            # Only our own: `shutdown` in a forked child would end the parent's connection too.
            if (sock := waiting.sock) is not None and process == os.getpid():
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def address(self, url: Url) -> str:
        """Return the URL to request."""
        return url.target

    def private_headers(self, url: Url) -> dict[str, str]:
        """Return the headers that only the URL's own host may receive."""
        return {**_basic("Authorization", url.target), **self._store.headers}

    def _read(
        self, url: Url, stamp: UrlStamp | None, buffers: Sequence[memoryview], offset: int
    ) -> tuple[UrlStamp, int]:
        """Fill buffers from an offset. Return the current stamp and the number of bytes read."""
        nbytes = sum(map(len, buffers))
        with self._request(url, stamp, f"bytes={offset}-{offset + nbytes - 1}") as (answer, host):
            size, length = _check_range(url, answer, offset, nbytes)
            version, modified = (answer.headers.get(n, "") for n in ("ETag", "Last-Modified"))
            found = UrlStamp(size, version, modified, host)
            if stamp is not None:
                known = stamp
                if host != stamp.host:  # two hosts can give different versions of one object
                    known = self._first_stamps.setdefault((url.target, host), found)
                is_same = modified == known.modified
                if version and known.version:
                    is_same = version == known.version
                if size != stamp.size or not is_same:
                    raise stamp.change_error(url, str(found))
            return found, self._receive(url, answer, buffers, length)

    def _receive(
        self, url: Url, answer: BaseHTTPResponse, buffers: Sequence[memoryview], nbytes: int
    ) -> int:
        """Receive bytes into the buffers until all arrived or the connection ends."""
        done, error = 0, None
        body = self._busy[os.getpid(), threading.get_ident()].answer
        try:
            for left in clip(buffers, nbytes):
                # urllib3's own read takes a third more of the CPU's time, because it copies.
                while left and (got := body.readinto(left[:_BLOCK])):
                    left, done = left[got:], done + got
        except (OSError, http.client.HTTPException) as raised:
            error = raised
        finally:
            self._store.count(0, done)
        if body.isclosed():
            answer.release_conn()
        # A few bytes are no progress: a server could send one in each answer.
        if done < min(nbytes, max(nbytes // 2, 1), _LEAST):
            raise _failure(self._store, url, error or EOFError(), "the connection ended early")
        return done

    @contextmanager
    def _request(
        self, url: Url, stamp: UrlStamp | None, wanted: str
    ) -> Iterator[tuple[BaseHTTPResponse, str]]:
        """Request a range and follow redirects. Yield the answer and the host that sent it."""
        origin = self.address(url)
        known = self._redirects.get(origin)
        at = known or origin
        for _ in range(_MOST_REDIRECTS + 2):
            host = _host(at)  # without a password, because stamps are shown
            headers = {"Range": wanted, "Accept-Encoding": "identity", "Accept": "*/*"}
            headers["User-Agent"] = "torchlift"
            if host == _host(origin):
                headers |= self.private_headers(url)
            answer = self._send(url, at, headers)
            try:
                if location := answer.get_redirect_location():
                    at = _follow(url, at, location)
                    with suppress(exceptions.HTTPError):
                        answer.read(HEAD, False)  # an unread body would make the connection useless
                elif answer.status in _EXPIRED and known is not None:
                    # A signed redirect is valid for minutes, but a load can take hours.
                    self._redirects.pop(origin, None)
                    known, at = None, origin
                elif answer.status in (200, 206) or (stamp is None and _read_size(answer) == 0):
                    if at != origin:
                        self._redirects[origin] = at
                    yield answer, host
                    return
                elif answer.status == 416 and stamp is not None:
                    size = _read_size(answer)
                    now = "a shorter file" if size is None else f"{size} bytes"
                    raise stamp.change_error(url, now)
                else:
                    raise _refusal(url, answer)
            finally:
                self._busy.pop((os.getpid(), threading.get_ident()), None)
                answer.close()
        raise FormatError("the URL redirects too many times", file=url)

    def _send(self, url: Url, at: str, headers: dict[str, str]) -> BaseHTTPResponse:
        """Request an address of a URL. Return the answer, whose body is not read."""
        parts = urlsplit(at)
        scheme, host = parts.scheme.lower(), parts.netloc.rpartition("@")[2]
        key = os.getpid(), scheme, _proxy(scheme, host)
        self._store.count(1, 0)
        token = _asking.set(self._busy)
        try:
            pool = self._pools.get(key) or self._pools.setdefault(key, self._make_pool(*key[1:]))
            address = parts._replace(netloc=host).geturl()
            return pool.urlopen(
                "GET", address, headers=headers, redirect=False, preload_content=False
            )
        except (exceptions.HTTPError, http.client.HTTPException, OSError, ValueError) as error:
            raise _failure(self._store, url, error, "the server cannot be reached") from None
        finally:
            _asking.reset(token)

    def _make_pool(self, scheme: str, proxy: str | None) -> urllib3.PoolManager:
        options: dict[str, Any] = {"timeout": self._store.timeout, "retries": False}
        if scheme == "https":  # made once, because it takes 20 ms
            options["ssl_context"] = ssl.create_default_context()
        if proxy is None:
            pool = urllib3.PoolManager(maxsize=_KEPT, **options)
        else:
            user = _basic("Proxy-Authorization", proxy)
            pool = urllib3.ProxyManager(proxy, proxy_headers=user, maxsize=_KEPT, **options)
        pool.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
        return pool


def _is_of_others(record: logging.LogRecord) -> bool:
    """Return whether a log record is not about a request of ours. It would show the query."""
    return _asking.get(None) is None


for _name in ("urllib3.connection", "urllib3.connectionpool"):
    logging.getLogger(_name).addFilter(_is_of_others)


class _StalledError(TimeoutError):
    """The server sends too few bytes, or does not end what comes before the body."""


class _PacedBytes(io.RawIOBase):
    """The bytes of an answer, from a server that must keep a pace."""

    def __init__(self, raw: io.RawIOBase, seconds: float) -> None:
        self._raw, self._seconds, self.is_body = raw, seconds, False
        self._left, self._end = _LEAST, time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        now = time.monotonic()
        if self._left <= 0 and self.is_body:
            self._left, self._end = _LEAST, now + self._seconds
        if self._left <= 0 or now > self._end:
            raise _StalledError
        got = self._raw.readinto(buffer)
        self._left -= got or 0
        return got

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self._paced = _PacedBytes(self.fp.detach(), 2 * (sock.gettimeout() or 0.0))
        self.fp = io.BufferedReader(self._paced)
        _asking.get()[os.getpid(), threading.get_ident()].answer = self

    def begin(self, **options: Any) -> None:  # newer Pythons pass a limit
        super().begin(**options)
        self._paced.is_body = True


class _Connection(connection.HTTPConnection):
    """A connection that `Http.cancel` finds."""

    response_class = _Answer
    answer: _Answer

    def connect(self) -> None:
        _asking.get()[os.getpid(), threading.get_ident()] = self
        super().connect()

    def request(self, *args: Any, **options: Any) -> None:
        _asking.get()[os.getpid(), threading.get_ident()] = self
        super().request(*args, **options)


class _TlsConnection(_Connection, connection.HTTPSConnection): ...


class _Pool(connectionpool.HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(connectionpool.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


def _failure(store: Store, url: Url, error: Exception, what: str) -> Failed:
    """Translate an error of the system or the protocol. Its text can contain a secret."""
    # urllib3 wraps errors, some of them twice.
    while inner := [e for e in (*error.args, error.__cause__) if isinstance(e, Exception)]:
        error = inner[0]
    kind: type[CheckpointError] = Unreachable
    after: float | None = 0.0  # None: another try would fail, too
    found, hint = type(error).__name__, _LATER
    match error:
        case ssl.SSLCertVerificationError():
            what, after = "the server's certificate is not trusted", None
            found = error.verify_message
            hint = "If your own authority signed it, set SSL_CERT_FILE to the authority's file."
        case exceptions.ProxySchemeUnknown():
            what, after = "the proxy of the environment is not an HTTP proxy", None
            hint = "Set the variable, such as HTTPS_PROXY, to an http:// URL, or set NO_PROXY."
        case ValueError():
            what, after = "the URL or a header contains characters that HTTP cannot carry", None
            hint = "Percent-encode the URL. A header is one line of Latin-1, without a newline."
        case socket.gaierror():
            what, found = "the name of the host cannot be resolved", urlsplit(url).netloc
            after = 0.0 if error.errno == socket.EAI_AGAIN else None
            hint = "Check the URL and the network."
        case TimeoutError():
            kind, what = TimedOut, f"the server sent nothing for {store.timeout:g} seconds"
            if isinstance(error, _StalledError):
                what = f"the server sent no answer, or less than {_LEAST >> 10} KiB in two timeouts"
            options = Argument("storage_options", '{"timeout": seconds}')
            hint = Hint("Pass ", options, " to wait longer.")
        case ssl.SSLError():
            found = error.reason or found
        case OSError(errno=int()):
            found = os.strerror(error.errno or 0)
        case OSError() if type(error) is OSError:
            what = "the proxy of the environment refuses the connection"
    return Failed(kind(what, file=url, found=found, hint=hint), after)


def _refusal(url: Url, answer: BaseHTTPResponse) -> Failed:
    """Return the error for the status of an answer without bytes."""
    kind: type[CheckpointError] = Unreachable
    what, hint, after = "the server cannot answer", None, None
    if answer.status in _PASSING:
        what, hint, after = "the server cannot answer now", _LATER, 0.0
        with suppress(exceptions.InvalidHeader, ValueError, OverflowError):
            after = min(urllib3.Retry().get_retry_after(answer) or 0.0, _MOST_SECONDS)
    elif answer.status in (401, 403, 407):
        kind, what = NotAllowed, "the server refuses access"
        hint = (
            "Pass credentials, such as a token in "
            'storage_options={"headers": {"Authorization": ...}}. A signed URL may have expired.'
        )
    elif answer.status in (404, 410):
        kind, what = NotFound, "nothing is there"
        hint = f"Check the URL, and pass a token if the file is private. {_NAME_A_FILE}"
    return Failed(kind(what, file=url, found=_phrase(answer), hint=hint), after)


def _phrase(answer: BaseHTTPResponse) -> str:
    """Return the status of an answer, without the text that the server sent with it."""
    return f"HTTP {answer.status} {http.client.responses.get(answer.status, '')}".rstrip()


def _check_range(url: Url, answer: BaseHTTPResponse, offset: int, nbytes: int) -> tuple[int, int]:
    """Check that an answer has the requested range. Return the object's size and the bytes sent.

    Raises:
        FormatError: If the server ignores the range, compresses, or contradicts itself.
    """
    if answer.status == 416:  # an empty object
        return 0, 0
    headers, total = answer.headers, answer.length_remaining
    match = _RANGE.fullmatch(headers.get("Content-Range", "").strip())
    is_plain = headers.get("Content-Encoding", "").lower() in ("", "identity")
    if answer.status == 206 and match is not None and is_plain:
        first, last, size = map(int, match.groups())
        length = last - first + 1
        fits = first == offset <= last < min(offset + nbytes, size)
        if fits and total in (None, length):
            return size, length
    is_page = headers.get("Content-Type", "").lower().startswith("text/html")
    # Numbers and our own words only: a text of the server can repeat a secret.
    facts = {
        f"Content-Range {match and match[0]}": match,
        f"Content-Length {total}": total is not None,
        "a Content-Encoding": not is_plain,
        "Content-Type text/html": is_page,
    }
    raise FormatError(
        "the server ignores ranges, compresses, or sends other bytes than requested",
        file=url,
        expected=f"HTTP 206 with bytes {offset}-{offset + nbytes - 1}",
        found=", ".join([_phrase(answer), *(fact for fact, is_so in facts.items() if is_so)]),
        hint="This is a web page. If it asks you to log in, pass credentials in "
        f'storage_options={{"headers": ...}}. {_NAME_A_FILE}'
        if is_page
        else "Download the file, and pass its path.",
    )


def _read_size(answer: BaseHTTPResponse) -> int | None:
    """Return the size of an object that ends before the range, if the server sends it."""
    match = _PAST_END.fullmatch(answer.headers.get("Content-Range", "").strip())
    return int(match[1]) if match and answer.status == 416 else None


def _follow(url: Url, at: str, location: str) -> str:
    """Return the target of a redirect. Raise `UnsafeError` if it leaves HTTP or drops TLS."""
    with suppress(ValueError):  # such as a port that is not a number
        target = urljoin(at, location)
        scheme, before = (_host(each).partition(":")[0] for each in (target, at))
        if scheme == "https" or scheme == before == "http":
            return target
    raise UnsafeError(
        "the server redirects to a URL that is not safe to follow",
        file=url,
        expected="an http or https URL, and https from https",
    )


def _host(at: str) -> str:
    """Return the scheme, host and port of a URL."""
    parts = urlsplit(at)
    return f"{parts.scheme}://{parts.hostname}:{parts.port or _PORTS.get(parts.scheme)}"


def _proxy(scheme: str, host: str) -> str | None:
    """Return the proxy for a host from the environment, or None."""
    found = urllib.request.getproxies()
    proxy = found.get(scheme) or found.get("all")
    if not proxy or urllib.request.proxy_bypass(host):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _basic(header: str, at: str) -> dict[str, str]:
    """Return a header with the user and the password of a URL, if it has them."""
    user, sign, _ = urlsplit(at).netloc.rpartition("@")
    name, _, password = user.partition(":")
    text = base64.b64encode(f"{unquote(name)}:{unquote(password)}".encode()).decode()
    return {header: f"Basic {text}"} if sign else {}

"""An HTTP server over a folder: serves ranges, counts what it sends, and fails as it is told."""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import re
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from torchlift.formats.index import Index


@dataclass
class Asked:
    """A request, as it came.

    Attributes:
        path: decoded, without the query.
        query: of the URL.
        headers: by their names in small letters.
        start: first byte of the range.
        stop: the byte behind it; None: to the end.
        number: how many came before.
    """

    path: str
    query: str
    headers: dict[str, str]
    start: int
    stop: int | None
    number: int


@dataclass
class Answer:
    """What is answered, which a fault may change before it is sent.

    Attributes:
        status: of HTTP.
        headers: of the answer.
        body: its bytes.
        sent: bytes after which the connection ends; None: all of them.
        reason: the phrase after the status; None: the usual one.
    """

    status: int
    headers: dict[str, str]
    body: memoryview
    sent: int | None = None
    reason: str | None = None


#: Changes an answer to a request, or says that there is none.
Fault = Callable[[Asked, Answer], None]


@dataclass
class RangeServer:
    """A server and what it was asked.

    Attributes:
        folder: whose files it serves.
        fault: changes answers.
        etags: whether answers have an ETag; a function of the file's content.
        asked: all requests, in order.
        sent: bytes of bodies that were sent.
    """

    folder: Path
    fault: Fault | None = None
    etags: bool = True
    asked: list[Asked] = field(default_factory=list)
    sent: int = 0
    port: int = 0
    scheme: str = "http"
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def requests(self) -> int:
        """How many requests came."""
        return len(self.asked)

    def url(self, name: str = "") -> str:
        """Return the URL of a file."""
        return f"{self.scheme}://127.0.0.1:{self.port}/{name}"

    def forget(self) -> None:
        """Count from here on."""
        with self.lock:
            self.asked.clear()
            self.sent = 0


def _version(path: Path) -> str:
    stat = path.stat()
    text = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
    return f'"{hashlib.sha256(text.encode()).hexdigest()[:16]}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve(only_head=True)

    def do_GET(self) -> None:
        self._serve(only_head=False)

    def _serve(self, only_head: bool) -> None:
        state = self.server.state
        headers = {name.lower(): value for name, value in self.headers.items()}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
        parts = urlsplit(self.path)
        with state.lock:
            asked = Asked(
                unquote(parts.path).lstrip("/"),
                parts.query,
                headers,
                int(match[1]) if match else 0,
                int(match[2]) + 1 if match and match[2] else None,
                len(state.asked),
            )
            state.asked.append(asked)
        answer = self._answer(state, asked, ranged=match is not None)
        if state.fault is not None:
            state.fault(asked, answer)
        body = answer.body[:0] if only_head else answer.body
        answer.headers.setdefault("Content-Length", str(len(answer.body)))
        with contextlib.suppress(ConnectionError):
            self.send_response(answer.status, answer.reason)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
            end = len(body) if answer.sent is None else min(answer.sent, len(body))
            for at in range(0, end, 1 << 20):
                self.wfile.write(part := body[at : min(at + (1 << 20), end)])
                with state.lock:
                    state.sent += len(part)
            if answer.sent is not None:
                # A reset, and not the end of the stream: SO_LINGER of no seconds.
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.close_connection = True

    def _answer(self, state: RangeServer, asked: Asked, *, ranged: bool) -> Answer:
        path = state.folder / asked.path
        if not path.is_file():
            return Answer(404, {}, memoryview(b"no such file"))
        version = _version(path)
        headers = {
            "Accept-Ranges": "bytes",
            "Last-Modified": email.utils.formatdate(path.stat().st_mtime, usegmt=True),
        }
        if state.etags:
            headers["ETag"] = version
            if asked.headers.get("if-match", version) != version:
                return Answer(412, headers, memoryview(b""))
        size = path.stat().st_size
        if not ranged:
            return Answer(200, headers, memoryview(path.read_bytes()))
        if asked.start >= size:
            return Answer(416, {**headers, "Content-Range": f"bytes */{size}"}, memoryview(b""))
        stop = min(size if asked.stop is None else asked.stop, size)
        headers["Content-Range"] = f"bytes {asked.start}-{stop - 1}/{size}"
        with path.open("rb") as file:
            file.seek(asked.start)
            return Answer(206, headers, memoryview(file.read(stop - asked.start)))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, state: RangeServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.state = state
        self.open: set[socket.socket] = set()

    def process_request(self, request: socket.socket, client_address: object) -> None:
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:
        self.open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is no error of the server's."""


@contextlib.contextmanager
def serving(
    folder: Path, fault: Fault | None = None, certificate: Path | None = None
) -> Iterator[RangeServer]:
    """Serve a folder, from threads of this process, until the block ends; over TLS, if it can."""
    state = RangeServer(folder, fault)
    server = _Server(state)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        state.scheme = "https"
    state.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), name="range-server")
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        for request in list(server.open):
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)
        server.server_close()


def facts(index: Index) -> object:
    """What an index says, without the place of its files."""
    entries = [
        (e.key, e.dtype, e.shape, e.stride, e.nbytes, e.storage, [c.offset for c in e.chunks])
        for e in index.entries.values()
    ]
    return index.format, entries, dict(index.objects), dict(index.metadata), index.blocked

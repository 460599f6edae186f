"""Servers that fail, lie or change: the same as from the file, or one error that says why."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import socket
import socketserver
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from limits import limits
from range_server import Answer, Asked, RangeServer, facts, serving
from valid_files import write_valid

import torchlift
from torchlift._store.places import open_place, place_of
from torchlift.errors import (
    CheckpointError,
    FormatError,
    IntegrityError,
    NotAllowed,
    NotFound,
    TimedOut,
    Unreachable,
    UnsafeError,
)
from torchlift.formats.dcp import resolved
from torchlift.formats.detect import read_index

pytestmark = pytest.mark.slow


SECRET = "s3cr3t-value"
OPTIONS = {"tries": 3, "timeout": 5.0, "headers": {"Authorization": f"Bearer {SECRET}"}}


@pytest.fixture(autouse=True)
def small_ranges() -> Iterator[None]:
    """Ask for little at a time, so that small files take many requests, and do not wait long."""
    with limits(first_request=512, pause=0.001, window=64, behind=0, gap=0):
        yield


@pytest.fixture(params=["torch-zip", "safetensors", "dcp"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file that is read from its end, one that is read from its start, and a folder."""
    path = write_valid(tmp_path / "served" / "d", request.param)
    return path / ".metadata" if path.is_dir() else path


def read(server: RangeServer, place: Path, **options: object) -> object:
    """Return what a URL says, all of it, and verify its bytes."""
    url = f"{server.url(str(place.relative_to(server.folder)))}?sig={SECRET}"
    index = resolved(read_index(url, storage_options={**OPTIONS, **options}))
    return facts(index)


def refused(
    server: RangeServer, place: Path, kind: type[CheckpointError], **options: object
) -> CheckpointError:
    """Return the error for a URL, which shows nothing that is secret."""
    with pytest.raises(kind) as caught:
        read(server, place, **options)
    shows_no_secret(caught.value)
    assert caught.value.file is not None
    assert caught.value.file.startswith(server.url()[:-1])
    return caught.value


def shows_no_secret(error: BaseException | None) -> None:
    """Look at an error and at what led to it."""
    while error is not None:
        assert SECRET not in f"{error} {error!r} {vars(error)} {error.args}"
        assert error.__context__ is None or error.__cause__ is error.__context__
        error = error.__cause__


def once(fault: Callable[[Asked, Answer], None]) -> Callable[[Asked, Answer], None]:
    """Return a fault of the first answer about each range."""
    seen: set[tuple[str, int]] = set()

    def some(asked: Asked, answer: Answer) -> None:
        if (asked.path, asked.start) not in seen and answer.status == 206:
            seen.add((asked.path, asked.start))
            fault(asked, answer)

    return some


def redirected(
    to: Callable[[Asked], str], only: Callable[[Asked], bool] = lambda _: True
) -> Callable[[Asked, Answer], None]:
    """Return a fault that sends a client to another URL."""

    def fault(asked: Asked, answer: Answer) -> None:
        if only(asked):
            answer.status, answer.body = 302, memoryview(b"")
            answer.headers = {"Location": to(asked)}

    return fault


def opened(server: RangeServer, content: bytes, **options: object) -> Any:
    """Serve some bytes, and open their URL."""
    (server.folder / "f").write_bytes(content)
    return open_place(place_of(server.url("f"), options))


def busy(status: int) -> Callable[[Asked, Answer], None]:
    def fault(asked: Asked, answer: Answer) -> None:
        answer.status, answer.body = status, memoryview(b"busy")
        answer.headers = {"Retry-After": "0"}

    return fault


def dropped(asked: Asked, answer: Answer) -> None:
    answer.sent = len(answer.body) // 2


def cut(asked: Asked, answer: Answer) -> None:
    answer.sent = 0


@pytest.mark.parametrize("fault", [busy(429), busy(500), busy(503), dropped, cut])
def test_what_passes_is_tried_again(
    server: RangeServer, place: Path, fault: Callable[[Asked, Answer], None]
) -> None:
    """Too many requests, a busy server, a connection that ends early: the same in the end."""
    server.fault = once(fault)
    assert read(server, place) == facts(resolved(read_index(place)))


@pytest.mark.parametrize("fault", [busy(503), cut])
def test_what_does_not_pass_is_an_error_after_some_tries(
    server: RangeServer, place: Path, fault: Callable[[Asked, Answer], None]
) -> None:
    """As many as were asked for, and no index of half a file."""
    server.fault = lambda asked, answer: fault(asked, answer) if answer.status == 206 else None
    refused(server, place, Unreachable, tries=2)
    assert sum(asked.path == server.asked[-1].path for asked in server.asked) == 2


def lies(name: str, change: Callable[[str], str]) -> Callable[[Asked, Answer], None]:
    def fault(asked: Asked, answer: Answer) -> None:
        if answer.status == 206:
            answer.headers[name] = change(answer.headers.get(name, ""))

    return fault


def compressed(asked: Asked, answer: Answer) -> None:
    answer.headers["Content-Encoding"] = "gzip"
    answer.body = memoryview(gzip.compress(bytes(answer.body)))


def other_bytes(asked: Asked, answer: Answer) -> None:
    if answer.status == 206:
        answer.body = memoryview(bytes(answer.body) + b"!")


#: A fault of every answer, the classes of the error, and words of it.
REFUSED: dict[str, tuple[Callable[[Asked, Answer], None], type[CheckpointError], type, str]] = {
    "another range": (lies("Content-Range", lambda text: text.replace("bytes ", "bytes 1")),
        FormatError, Exception, "other bytes"),
    "no size": (lies("Content-Range", lambda text: text.partition("/")[0] + "/*"),
        FormatError, Exception, "other bytes"),
    "no range": (lies("Content-Range", lambda text: ""), FormatError, Exception, "other bytes"),
    "more bytes": (other_bytes, FormatError, Exception, "other bytes"),
    "compressed": (compressed, FormatError, Exception, "compresses, or sends other bytes"),
    "a circle": (redirected(lambda asked: f"/{asked.path}"), FormatError, Exception, "redirect"),
    **{f"status {status}": (busy(status), kind, own, f"HTTP {status}")
       for status, kind, own in (
           (401, NotAllowed, PermissionError), (403, NotAllowed, PermissionError),
           (404, NotFound, FileNotFoundError), (410, NotFound, FileNotFoundError),
           (400, Unreachable, ConnectionError))},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_an_answer_that_is_not_the_range_is_refused(
    server: RangeServer, place: Path, name: str
) -> None:
    """A server that lies, leads in a circle, or says that there is nothing: an error of Python."""
    server.fault, kind, own, words = REFUSED[name]
    error = refused(server, place, kind)
    assert isinstance(error, own)
    assert words in str(error)
    assert error.file == server.url(str(place.relative_to(server.folder)))


def test_a_server_without_ranges_is_refused_with_a_way_out(
    server: RangeServer, tmp_path: Path
) -> None:
    """It sends the whole file for each range. A file that was downloaded first can be opened."""
    np.savez(path := server.folder / "m.npz", w=np.arange(3.0))

    def whole(asked: Asked, answer: Answer) -> None:
        if answer.status in (206, 416):
            answer.status, answer.body = 200, memoryview(path.read_bytes())
            del answer.headers["Content-Range"]

    server.fault = whole
    error = refused(server, path, FormatError)
    assert "ignores ranges" in error.reason
    assert str(error.hint) == "Download the file, and pass its path."
    with urllib.request.urlopen(server.url("m.npz")) as answer:
        (tmp_path / "copy.npz").write_bytes(answer.read())
    assert torchlift.open(tmp_path / "copy.npz")["w"].tolist() == [0.0, 1.0, 2.0]


def test_a_page_that_asks_to_log_in_is_refused_for_what_it_is(server: RangeServer) -> None:
    """Servers send one with status 200, and credentials are the way out."""

    def page(asked: Asked, answer: Answer) -> None:
        if asked.headers.get("x-api-key") != SECRET:
            answer.status, answer.body = 200, memoryview(b"<html>log in</html>")
            answer.headers = {"Content-Type": "text/html; charset=utf-8"}

    np.savez(path := server.folder / "m.npz", w=np.ones(3))
    server.fault = page
    error = refused(server, path, FormatError)
    assert "Content-Type text/html" in str(error.found)
    assert "web page" in str(error.hint)
    assert "headers" in str(error.hint)
    found = torchlift.open(server.url("m.npz"), storage_options={"headers": {"X-Api-Key": SECRET}})
    assert found["w"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("has_ranges", [True, False])
def test_the_page_of_a_file_names_the_address_of_its_bytes(
    server: RangeServer, has_ranges: bool
) -> None:
    """As a browser shows it for a file of a hub. The address of the hint is opened."""
    for kind, content in ("resolve", None), ("blob", b"<!doctype html><html>a page</html>"):
        path = server.folder / "org/name" / kind / "main/m.npz"
        path.parent.mkdir(parents=True)
        np.savez(path, w=np.ones(3))
        if content:
            path.write_bytes(content)

    def page(asked: Asked, answer: Answer) -> None:
        if "/blob/" in asked.path and not has_ranges:
            answer.status, answer.headers = 200, {"Content-Type": "text/html; charset=utf-8"}

    server.fault = page
    for call in torchlift.open, torchlift.verify, torchlift.digest:
        with pytest.raises(FormatError) as caught:
            call(server.url("org/name/blob/main/m.npz?download=true"))
        url = str(caught.value.hint).rpartition(" ")[2]
        assert url == server.url("org/name/resolve/main/m.npz")
    assert torchlift.open(url)["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("etags", [True, False])
def test_an_object_that_changes_between_two_ranges_is_refused(
    server: RangeServer, etags: bool
) -> None:
    """By its ETag, or where a server has none by when it was modified."""
    server.etags = etags
    path = server.folder / "model.pt"
    torch.save({f"w{n}": torch.ones(1) for n in range(1_500)}, path)
    left = 2

    def replace(asked: Asked, answer: Answer) -> None:
        nonlocal left
        left -= answer.status == 206
        if left == 0:
            answer.body = memoryview(bytes(answer.body))
            (new := path.with_suffix(".new")).write_bytes(path.read_bytes())
            os.utime(new, (1_000_000_000, 1_000_000_000))
            new.replace(path)

    server.fault = replace
    assert "changed" in refused(server, path, IntegrityError).reason


def test_a_redirect_is_followed_without_credentials(
    server: RangeServer, place: Path, tmp_path: Path
) -> None:
    """Another host gets neither the token nor other headers, and is asked at once from then on."""
    with serving(tmp_path / "served") as other:
        server.fault = redirected(lambda asked: f"{other.url(asked.path)}?signed=1")
        headers = {"Authorization": f"Bearer {SECRET}", "X-Api-Key": SECRET, "Cookie": SECRET}
        assert read(server, place, headers=headers) == facts(resolved(read_index(place)))
        names = {name.lower() for name in headers}
        assert all(names <= asked.headers.keys() for asked in server.asked)
        assert not any(names & asked.headers.keys() for asked in other.asked)
        assert {asked.query for asked in other.asked} == {"signed=1"}
        files = {asked.path for asked in other.asked}
        assert len([asked for asked in server.asked if asked.path in files]) == len(files)


def test_a_signed_redirect_that_expires_is_asked_for_again(
    server: RangeServer, tmp_path: Path
) -> None:
    """At its origin: each signature here is good for one range."""
    path = tmp_path / "served" / "model.pt"
    torch.save({f"w{n}": torch.ones(1) for n in range(1_500)}, path)
    with serving(tmp_path / "served") as other:
        used: set[str] = set()

        def expires(asked: Asked, answer: Answer) -> None:
            if asked.query in used:
                answer.status, answer.headers, answer.body = 403, {}, memoryview(b"expired")
            used.add(asked.query)

        server.fault = redirected(lambda a: f"{other.url(a.path)}?sig={SECRET}{a.number}")
        other.fault = expires
        assert read(server, path) == facts(read_index(path))
        assert len(used) > 2
        other.fault = busy(403)
        refused(server, path, NotAllowed)


@pytest.mark.parametrize(
    ("location", "kind"),
    [*((url, UnsafeError) for url in ("file:///etc/passwd", "ftp://host/x", "http://[")),
     *((url, CheckpointError) for url in (f"{SECRET}://", f"http://{SECRET}.invalid/",
                                          f"http://h:{SECRET}/", f"//{SECRET}@["))],
)  # fmt: skip
def test_a_redirect_to_elsewhere_is_refused_and_shows_nothing_of_its_target(
    server: RangeServer, location: str, kind: type[CheckpointError]
) -> None:
    """A server must not choose a file of this machine, nor a text of our message."""
    (server.folder / "model.pt").write_bytes(bytes(2_000))
    server.fault = redirected(lambda _: location)
    refused(server, server.folder / "model.pt", kind, tries=1)


def test_a_name_that_nobody_knows_and_a_port_where_nobody_is() -> None:
    """Both are a `ConnectionError`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for url in (
        f"http://127.0.0.1:{port}/a",
        "http://nowhere.invalid/a",
        "https://nowhere.invalid",
    ):
        with pytest.raises(Unreachable) as caught:
            torchlift.open(f"{url}?sig={SECRET}", storage_options={"tries": 2})
        assert isinstance(caught.value, ConnectionError)
        shows_no_secret(caught.value)


def test_what_http_cannot_carry_is_not_shown(server: RangeServer) -> None:
    """A token with the end of the line of its file, say, which http.client puts into an error."""
    options = {"tries": 3, "headers": {"Authorization": f"{SECRET}\n"}}
    with pytest.raises(CheckpointError, match="HTTP cannot carry") as caught:
        torchlift.open(server.url("m.safetensors"), storage_options=options)
    shows_no_secret(caught.value)
    assert not server.requests


def test_a_forked_process_has_connections_of_its_own(server: RangeServer, tmp_path: Path) -> None:
    """Two processes that read answers from one connection would mix them up."""
    content = os.urandom(1 << 16)
    file = opened(server, content)
    assert file.read(100, 50) == content[100:150]
    child = os.fork()
    if not child:  # pragma: no cover
        status = 1
        with contextlib.suppress(BaseException):
            status = int(file.read(200, 50) != content[200:250])
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert file.read(300, 50) == content[300:350]


def test_the_proxy_of_the_environment_is_asked(
    server: RangeServer, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not for hosts that need none."""
    monkeypatch.setenv("http_proxy", server.url().replace("//", f"//me:{SECRET}@"))
    monkeypatch.delenv("no_proxy", raising=False)
    name = str(place.relative_to(server.folder))
    found = resolved(read_index(f"http://nowhere.invalid/{name}", storage_options=OPTIONS))
    assert facts(found) == facts(resolved(read_index(place)))
    assert all("proxy-authorization" in asked.headers for asked in server.asked)
    monkeypatch.setenv("no_proxy", "nowhere.invalid")
    with pytest.raises(Unreachable):
        read_index(f"http://nowhere.invalid/{name}", storage_options={"tries": 1})


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate and its key, for 127.0.0.1 and host.invalid."""
    made = tmp_path / "certificate.pem"
    names = "subjectAltName=IP:127.0.0.1,DNS:host.invalid"
    command = ["openssl", "req", "-x509", "-days", "2", "-subj", "/CN=host.invalid", "-addext"]
    command += [names, "-newkey", "rsa:2048", "-nodes", "-keyout", str(made)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    with made.open("a") as file:
        file.write(done.stdout)
    return made


def test_a_certificate_is_trusted_when_the_environment_says_so(
    certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And refused otherwise, with the way out; a redirect from https to http is not followed."""
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "w.npy").write_bytes(b"\x93NUMPY")
    with serving(folder, certificate=certificate) as server:
        url = f"{server.url('w.npy')}?sig={SECRET}"
        with pytest.raises(Unreachable, match="not trusted") as caught:
            torchlift.open(url)
        shows_no_secret(caught.value)
        assert "SSL_CERT_FILE" in str(caught.value.hint)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert ssl.get_default_verify_paths().cafile == str(certificate)
        with pytest.raises(FormatError, match="not a NumPy array"):
            torchlift.open(url)
        server.fault = redirected(lambda _: "http://127.0.0.1/w.npy")
        with pytest.raises(UnsafeError):
            torchlift.open(url)


def test_an_option_that_nobody_knows_is_refused(server: RangeServer) -> None:
    """A token under a wrong name would not be sent. The hint is followed, and no value is shown."""
    np.save(server.folder / "w.npy", np.ones(3))
    url = server.url("w.npy")
    for place, name, hint in ((url, "header", "headers"), ("hf://org/name", "tokn", "token")):
        for call in torchlift.open, torchlift.verify, torchlift.digest:
            with pytest.raises(TypeError, match=f"has no '{name}'.*mean '{hint}'") as caught:
                call(place, storage_options={name: SECRET})
            shows_no_secret(caught.value)
    with pytest.raises(TypeError, match="only tries, timeout, headers"):
        torchlift.open(url, storage_options={"anon": True})
    torchlift.open(url, storage_options={"headers": {"Authorization": SECRET}})
    assert {asked.headers["authorization"] for asked in server.asked} == {SECRET}


# ---- texts of a server


def echo(asked: Asked) -> str:
    """Everything secret of a request, as a server may repeat it."""
    return f"{asked.query} {asked.headers.get('authorization')} {SECRET.upper()}"


@pytest.mark.parametrize(
    ("name", "status"),
    [("reason", 206), ("reason", 404), ("Content-Type", 206), ("Content-Type", 403),
     ("Content-Encoding", 206), ("Content-Encoding", 416), ("Content-Range", 206),
     ("Content-Range", 416), ("Retry-After", 500), ("Retry-After", 599), ("X-Any", 500)],
)  # fmt: skip
def test_no_text_of_a_server_stands_in_an_error(
    server: RangeServer, tmp_path: Path, name: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that repeats what it was asked would put a secret into our message, or a log."""
    (tmp_path / "served" / "model.pt").write_bytes(bytes(2_000))

    def repeats(asked: Asked, answer: Answer) -> None:
        answer.status, answer.reason = status, echo(asked)
        answer.headers["Content-Range"] = "bytes 7-9/5"
        if name != "reason":
            answer.headers[name] = echo(asked)

    server.fault = repeats
    with caplog.at_level(logging.DEBUG):
        error = refused(server, tmp_path / "served" / "model.pt", CheckpointError, tries=2)
    assert f"HTTP {status}" in str(error.found)
    assert SECRET.upper() not in f"{error} {vars(error)}"
    assert SECRET not in caplog.text


# ---- servers without an end


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
PARTIAL = b"HTTP/1.1 206 OK\r\nContent-Range: bytes 0-511/512\r\nContent-Length: 512\r\n\r\n"


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Call a function with each connection after its request, and yield the URL."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                self.request.recv(1 << 16)
                answer(self.request)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize(
    ("start", "again", "pause"),
    [(b"", CONTINUE, 0.0), (b"", CONTINUE, 0.05), (b"HTTP/1.1 206 ", b"x", 0.05),
     (b"HTTP/1.1 206 OK\r\nX-Any: ", b"x", 0.05), (PARTIAL, b"x", 0.05)],
    ids=["interim answers", "slow ones", "a slow status", "a slow header", "a slow body"],
)  # fmt: skip
def test_a_server_without_progress_is_given_up(start: bytes, again: bytes, pause: float) -> None:
    """Something arrives all the time, and never the answer: one error, in a few timeouts."""
    over = threading.Event()

    def endless(connection: socket.socket) -> None:
        connection.sendall(start)
        while not over.wait(pause):
            connection.sendall(again)

    options, began = {"tries": 2, "timeout": 0.3}, time.monotonic()
    with answering(endless) as url:
        with pytest.raises(TimedOut, match="less than 64 KiB") as caught:
            torchlift.open(f"{url}/m.pt?sig={SECRET}", storage_options=options)
        over.set()
    shows_no_secret(caught.value)
    assert "timeout" in str(caught.value.hint)
    assert time.monotonic() - began < 20


# ---- connections and proxies


def test_a_kept_connection_that_the_server_closed_is_not_a_failed_try(server: RangeServer) -> None:
    """Servers close idle ones after some seconds. The next request takes a new one."""
    file = opened(server, bytes(1_000), tries=1)
    server.fault = lambda asked, answer: setattr(answer, "sent", len(answer.body))
    for number in range(3):
        assert file.read(number, 10) == bytes(10)
        time.sleep(0.1)


@pytest.mark.parametrize("text", ["1", "Wed, 21 Oct 2015 07:28:00 GMT", "9" * 5_000, "soon"])
def test_a_pause_that_a_server_asks_for_is_kept_or_ignored(server: RangeServer, text: str) -> None:
    """Seconds, or a date, which is over here. What is neither counts as no wish."""
    np.save(server.folder / "w.npy", np.ones(3))

    def waits(asked: Asked, answer: Answer) -> None:
        if asked.number == 0:
            answer.status, answer.headers = 503, {"Retry-After": text}

    server.fault, began = waits, time.monotonic()
    assert torchlift.open(server.url("w.npy"))["tensor"].tolist() == [1, 1, 1]
    assert (time.monotonic() - began >= 1) == (text == "1")


def test_names_in_an_index_stay_inside_its_folder(server: RangeServer, tmp_path: Path) -> None:
    """Neither another URL nor a folder above, however it is written."""
    index = tmp_path / "served" / "model.safetensors.index.json"
    for name in ("http://other.invalid/a.safetensors", "../a.safetensors", "/a.safetensors",
                 "s3://bucket/a.safetensors"):  # fmt: skip
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(UnsafeError):
            torchlift.open(server.url(index.name))
    index.write_text('{"weight_map": {"w": "%2e%2e/a.safetensors?x#y"}}')
    server.forget()
    with pytest.raises(FormatError, match="a shard is missing"):
        torchlift.open(server.url(index.name))
    assert server.asked[-1].path == "%2e%2e/a.safetensors?x#y"

"""Stores to write to: fsspec's memory, and moto's server of S3's protocol, which fails if told."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import pytest


@dataclass
class Bucket:
    """A place of its own in a store.

    Attributes:
        url: of the place.
        options: that it is reached with.
        unfinished: returns the keys of uploads that are neither complete nor aborted.
        requests: (method, query, bytes sent) of each request to a server.
        broken: of a server, tells from (method, query, bytes of uploads so far) what to refuse.
    """

    url: str
    options: dict[str, Any] = field(default_factory=dict)
    unfinished: Callable[[], list[str]] = list
    requests: list[tuple[str, str, int]] = field(default_factory=list)
    broken: Callable[[str, str, int], bool] = lambda *_: False

    def __truediv__(self, name: str) -> str:
        return f"{self.url}/{name}"

    @property
    def _fs(self) -> tuple[Any, str]:
        fs, path = fsspec.core.url_to_fs(self.url, use_listings_cache=False, **self.options)
        return fs, path

    def names(self) -> list[str]:
        """Return the names of all objects, folders in them included."""
        fs, path = self._fs
        return sorted(name.removeprefix(path).lstrip("/") for name in fs.find(path))

    def data(self, name: str) -> bytes:
        """Return the bytes of an object."""
        fs, path = self._fs
        found: bytes = fs.cat_file(f"{path}/{name}")
        return found

    def put(self, name: str, data: bytes) -> None:
        """Write an object as somebody else does."""
        fs, path = self._fs
        fs.pipe_file(f"{path}/{name}", data)

    def fetched(self, name: str, folder: Path) -> str:
        """Return the path of a copy of an object, or of all that is in a folder."""
        found = [each for each in self.names() if each == name or each.startswith(f"{name}/")]
        for each in found:
            (folder / each).parent.mkdir(parents=True, exist_ok=True)
            (folder / each).write_bytes(self.data(each))
        assert found
        return str(folder / name)


def memory_bucket() -> Bucket:
    """Return a folder of fsspec's memory."""
    return Bucket(f"memory://{uuid.uuid4().hex}/run")


class S3Server:
    """Moto's server, in threads of this process."""

    def __init__(self) -> None:
        pytest.importorskip("moto", reason="moto is not installed, which has a server of S3")
        pytest.importorskip("flask", reason="flask is not installed, which moto's server needs")
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._app = DomainDispatcherApplication(create_backend_app)
        self._buckets: dict[str, Bucket] = {}
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def bucket(self, by: str = "s3fs") -> Bucket:
        """Return a new bucket, written to by that package."""
        import s3fs

        name = uuid.uuid4().hex
        options = {"key": "someone", "secret": "a-secret-of-theirs", "endpoint_url": self.url}
        if by == "s3fs":
            options["use_ssl"] = False  # which obstore does not know
        else:
            pytest.importorskip(by, reason="obstore is not installed: it asks for Python 3.11")
        fs = s3fs.S3FileSystem(**options)
        fs.mkdir(name)

        def unfinished() -> list[str]:
            found = fs.call_s3("list_multipart_uploads", Bucket=name)
            return [each["Key"] for each in found.get("Uploads", [])]

        made = self._buckets[name] = Bucket(f"s3://{name}/run", options, unfinished)
        return made

    def _answer(self, environ: Mapping[str, Any], start: Callable[..., Any]) -> Any:
        bucket = self._buckets.get(environ["PATH_INFO"].split("/")[1])
        if bucket is None:
            return self._app(environ, start)
        nbytes = int(environ.get("CONTENT_LENGTH") or 0)
        method, query = environ["REQUEST_METHOD"], environ["QUERY_STRING"]
        sent = sum(nbytes for _, _, nbytes in bucket.requests)
        bucket.requests.append((method, query, nbytes))
        if bucket.broken(method, query, sent):
            environ["wsgi.input"].read(nbytes)
            start("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code><Message>no more</Message></Error>"]
        return self._app(environ, start)


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Run a server, without the configuration that somebody may have for the real one."""
    pytest.importorskip("s3fs", reason="s3fs is not installed, by which fsspec writes to S3")
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_CONFIG_FILE": "/dev/null"}
    server = S3Server()
    try:
        yield server
    finally:
        server.close()
        os.environ.clear()
        os.environ.update(before)

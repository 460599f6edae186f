"""Read every scheme except HTTP, by fsspec or obstore.

obstore reads the ranges of object stores if it is configured. fsspec's file systems receive all
answers in one Python thread, and this includes ``obstore.fsspec``. 0.5 GB over the loopback, in
ranges of 4 MiB on four threads, took 0.24 s with obstore, 0.35 with ``obstore.fsspec`` (processor
time 0.29 and 0.45), and 0.53 with s3fs: medians of 5, alternated.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from torchlift._store.objects import object_store
from torchlift._store.url import Failed, Seen, Store, Transport, Url, UrlStamp
from torchlift.errors import (
    CheckpointError,
    FormatError,
    NotAllowed,
    NotFound,
    TimedOut,
    Unreachable,
)

_T = TypeVar("_T")

#: Errors of obstore for a refused access.
_REFUSED = ("PermissionDeniedError", "UnauthenticatedError", "NoCredentialsError")

#: Fields of fsspec's file systems for the version of an object, and for the time of its change.
_VERSIONS = "ETag", "etag", "VersionId", "version_id", "generation", "oid", "blob_id", "md5Hash"
_TIMES = "LastModified", "last_modified", "mtime", "updated", "modified", "created"


class Others(Transport):
    """Reads by a file system of fsspec, or by obstore."""

    at_once = 4  # each answer is copied, and s3fs holds it twice for a moment

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._process, self._lock = os.getpid(), threading.Lock()
        self._made: dict[str, Any] = {}
        self._objects: dict[str, Any] = {}

    def look(self, url: Url) -> Seen:
        """Return the stamp of an object, or that the URL is a folder."""
        stamp = _stamp_of(self.call(url, lambda fs, path: fs.info(path)))
        if stamp is not None and stamp.size < 0:
            raise FormatError("the store does not report the size of the object", file=url)
        return Seen(stamp)

    def stamps_in(self, url: Url) -> dict[str, UrlStamp | None]:
        """Return the names in a folder, with the stamps of objects."""
        listed = self.call(url, lambda fs, path: fs.ls(path, detail=True))
        names = [info["name"].rstrip("/").rpartition("/")[2] for info in listed]
        return dict(zip(names, map(_stamp_of, listed), strict=True))

    def read_into(
        self, url: Url, stamp: UrlStamp, buffers: Sequence[memoryview], offset: int
    ) -> int:
        """Fill buffers with the bytes at an offset. Return the number of bytes that arrived."""
        end = offset + sum(map(len, buffers))
        data = self._read_range(url, offset, end)
        self._store.count(0, len(data))
        if len(data) > end - offset:
            what = "the store sends other bytes than requested"
            raise FormatError(what, file=url, expected=end - offset, found=len(data))
        if not data:
            error = Unreachable("the store sends no bytes", file=url, hint="Try again later.")
            raise Failed(error)
        at = 0
        for buffer in buffers:
            part = data[at : at + len(buffer)]
            buffer[: len(part)] = part
            at += len(part)
        return len(data)

    def _read_range(self, url: Url, start: int, end: int) -> bytes | memoryview:
        bucket = url.target.partition("://")[2].partition("/")[0]
        self._reset_after_fork()
        with self._lock:
            if bucket not in self._objects:
                self._objects[bucket] = (object_store(url, reads=True) or [None])[0]
            store = self._objects[bucket]
        if store is None:
            return self.call(url, lambda fs, path: bytes(fs.cat_file(path, start=start, end=end)))
        import obstore

        def get(fs: Any, path: str) -> memoryview:
            return memoryview(
                obstore.get_range(store, path.partition("/")[2], start=start, end=end)
            )

        return self.call(url, get)

    def call(self, url: Url, call: Callable[[Any, str], _T]) -> _T:
        """Call a method of the file system and translate its errors.

        Raises:
            Failed: If the call raises.
        """
        failure: CheckpointError
        try:
            fs = self.file_system(url)
            self._store.count(1, 0)
            return call(fs, fs._strip_protocol(url.target))
        except Exception as error:
            failure, after = self.failure(url, error)
        raise Failed(failure, after)

    def file_system(self, url: Url) -> Any:
        """Return fsspec's file system for a URL, made in this process."""
        scheme = url.partition("://")[0]
        self._reset_after_fork()
        with self._lock:
            if scheme not in self._made:
                from fsspec.core import url_to_fs

                # A cached listing would hide files that other processes wrote since.
                options = {"use_listings_cache": False, **self._store.rest}
                self._made[scheme] = url_to_fs(url.target, **options)[0]
            return self._made[scheme]

    def _reset_after_fork(self) -> None:
        """Forget file systems and clients in a forked child: their threads are in the parent."""
        if self._process != os.getpid():
            self._process, self._lock = os.getpid(), threading.Lock()
            self._made.clear()
            self._objects.clear()

    def failure(self, url: Url, error: BaseException) -> tuple[CheckpointError, float | None]:
        """Translate an error of a file system. Also return the pause before the next try."""
        scheme = url.partition("://")[0]
        found = remove_secrets(url, f"{type(error).__name__}: {error}")
        if isinstance(error, FileNotFoundError):
            return NotFound("nothing is there", file=url, hint="Check the URL."), None
        if isinstance(error, PermissionError) or type(error).__name__ in _REFUSED:
            hint = "Pass credentials in the environment or in storage_options."
            return NotAllowed("the store refuses access", file=url, found=found, hint=hint), None
        is_made = scheme in self._made
        if isinstance(error, ImportError) or (isinstance(error, ValueError) and not is_made):
            what = f"fsspec cannot open {scheme}:// URLs, or refuses the options"
            hint = "Install the package that the message names, or correct storage_options."
            return FormatError(what, file=url, found=found, hint=hint), None
        if isinstance(error, TimeoutError):
            return TimedOut("the store does not answer", file=url, found=found), 0.0
        after = (
            0.0 if isinstance(error, OSError) or "client" in type(error).__name__.lower() else None
        )
        return Unreachable("the store cannot be used", file=url, found=found), after


def remove_secrets(url: Url, text: str) -> str:
    """Remove the secrets of a URL and of its options from a text of another library."""
    text = text.replace(url.target, url)
    parts = urlsplit(url.target)
    pairs, user = parts.query.split("&"), parts.netloc.rpartition("@")[0]
    secrets = [*pairs, *(pair.partition("=")[2] for pair in pairs), *user.split(":")]
    secrets += _texts(url.store.rest)
    for secret in sorted((s for s in secrets if len(s) > 3), key=len, reverse=True):
        text = text.replace(secret, "...")
    # Other URLs in the text may be signed too: remove their users and queries.
    return re.sub(r"(\w://)(?:[^/\s@]*@)?([^\s?'\"]*)(?:\?[^\s'\"]*)?", r"\1\2", text)


def _texts(options: object) -> list[str]:
    """Return all texts in nested options."""
    if isinstance(options, Mapping):
        return [text for value in options.values() for text in _texts(value)]
    if isinstance(options, (list, tuple)):
        return [text for value in options for text in _texts(value)]
    return [options] if isinstance(options, str) else []


def _stamp_of(info: Mapping[str, Any]) -> UrlStamp | None:
    """Return the stamp of an object from its description by fsspec. None for a folder."""
    if info.get("type") == "directory":
        return None
    size = info.get("size")
    version = next((str(info[name]) for name in _VERSIONS if info.get(name)), "")
    modified = next((info[name] for name in _TIMES if info.get(name)), "")
    # A listing and a single look can write one time in two ways: a date or a number, with or
    # without fractions of a second.
    modified = modified.timestamp() if hasattr(modified, "timestamp") else modified
    if version and isinstance(modified, float):
        modified = int(modified)
    return UrlStamp(size if type(size) is int else -1, version, str(modified))

"""Every scheme but HTTP: by fsspec, one `cat_file` a range, from whichever thread asks.

Ranges of object stores by obstore, where that has what it needs: fsspec's file systems receive all
answers in one thread of Python: 2.1 GB over the loopback take 2.0 to 2.5 s, by s3fs 3.3 to 6.8.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torchlift._store.objects import object_store
from torchlift._store.url import HEAD, Failed, Store, Url, UrlStamp
from torchlift.errors import (
    CheckpointError,
    FormatError,
    NotAllowed,
    NotFound,
    TimedOut,
    Unreachable,
)

_T = TypeVar("_T")

#: Classes of obstore.
_REFUSED = ("PermissionDeniedError", "UnauthenticatedError", "NoCredentialsError")

#: What file systems call the version of an object, and the time of its change.
_VERSIONS = "ETag", "etag", "VersionId", "version_id", "generation", "oid", "blob_id", "md5Hash"
_TIMES = "LastModified", "last_modified", "mtime", "updated", "modified", "created"


class Others:
    """Reads by a file system of fsspec, which has a thread of its own for what is asynchronous."""

    is_exact = False
    etags: Mapping[str, str] = {}
    at_once = 4  # each is in memory beside where it goes, and in s3fs twice for a moment

    def __init__(self, store: Store) -> None:
        self._store = store
        self._process, self._lock = os.getpid(), threading.Lock()
        self._made: dict[str, Any] = {}
        self._objects: dict[str, Any] = {}
        self._infos: dict[str, Mapping[str, Any]] = {}
        self._listed: set[str] = set()

    def head(self, url: Url) -> tuple[UrlStamp, bytes]:
        """Return what identifies an object, and its first bytes."""
        stamp = self._stamp(url, self._infos.get(url.target) or self._info(url))
        data = bytearray(min(HEAD, stamp.size))
        got = self.read_into(url, stamp, [memoryview(data)], 0) if data else 0
        return stamp, bytes(memoryview(data)[:got])

    def check(self, url: Url, stamp: UrlStamp) -> None:
        """Refuse an object that is not the one that was indexed."""
        if (found := self.stamp(url)) != stamp:
            raise stamp.changed(url, found)

    def stamp(self, url: Url) -> UrlStamp:
        """Return what identifies an object now."""
        return self._stamp(url, self._info(url))

    def read_into(
        self, url: Url, stamp: UrlStamp, buffers: Sequence[memoryview], offset: int
    ) -> int:
        """Fill buffers with bytes of an object from a place on; return how many came."""
        end = offset + sum(map(len, buffers))
        data = self._range(url, offset, end)
        self._store.count(0, len(data))
        if len(data) > end - offset:
            what = "the store answers with other bytes than it was asked for"
            raise FormatError(what, file=url, expected=end - offset, found=len(data))
        if not data:
            error = Unreachable("the store gives no bytes", file=url, hint="Try again later.")
            raise Failed(error)
        at = 0
        for buffer in buffers:
            part = data[at : at + len(buffer)]
            buffer[: len(part)] = part
            at += len(part)
        return len(data)

    def _range(self, url: Url, start: int, end: int) -> bytes | memoryview:
        bucket = url.target.partition("://")[2].partition("/")[0]
        self._look_for_process()
        with self._lock:
            store = self._objects.get(bucket, self)
            if store is self:  # not looked for yet
                store = self._objects[bucket] = (object_store(url, reads=True) or [None])[0]
        if store is None:
            return self.call(url, lambda fs, path: bytes(fs.cat_file(path, start=start, end=end)))
        import obstore

        def get(fs: Any, path: str) -> memoryview:
            return memoryview(
                obstore.get_range(store, path.partition("/")[2], start=start, end=end)
            )

        return self.call(url, get)

    def known(self, url: Url) -> UrlStamp | None:
        """Return what identifies an object, where that was listed."""
        info = self._infos.get(url.target)
        return None if info is None else self._stamp(url, info)

    def exists(self, url: Url) -> bool:
        """Return whether an object is there, or in what was listed of its folder."""
        if url.target in self._infos:
            return True
        return url.parent.target not in self._listed and self.is_there(url)

    def is_there(self, url: Url) -> bool:
        """Return whether anything is at a URL, a file or a folder."""
        try:
            self._infos[url.target] = self._info(url)
        except Failed as failed:
            if isinstance(failed.error, NotFound):
                return False
            raise
        return True

    def is_folder(self, url: Url) -> bool:
        """Return whether a URL is that of a folder; raise `NotFound` where it is nothing."""
        info = self._info(url)
        if info.get("type") == "directory":
            return True
        self._infos[url.target] = info
        return False

    def names(self, url: Url) -> list[str]:
        """Return the names in a folder."""
        listed = self.call(url, lambda fs, path: fs.ls(path, detail=True))
        # What was known of what is in it, and deeper, may be gone: a run writes for months.
        folder = url.inside("x").parent.target
        self._infos = {at: i for at, i in self._infos.items() if not at.startswith(f"{folder}/")}
        self._listed = {at for at in self._listed if not at.startswith(f"{folder}/")} | {folder}
        found = []
        for info in listed:
            name = info["name"].rstrip("/").rpartition("/")[2]
            if info.get("type") != "directory":
                self._infos[url.inside(name).target] = info
            found.append(name)
        return found

    def cancel(self) -> None:
        """End nothing: fsspec has no way to."""

    def _info(self, url: Url) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.call(url, lambda fs, path: fs.info(path))
        return found

    def _stamp(self, url: Url, info: Mapping[str, Any]) -> UrlStamp:
        size = info.get("size")
        if type(size) is not int:
            raise FormatError("the store does not say how large it is", file=url)
        version = next((str(info[name]) for name in _VERSIONS if info.get(name)), "")
        modified = next((info[name] for name in _TIMES if info.get(name)), "")
        # Of one object a list and a look at it may have a date and a number, or more of its digits.
        modified = modified.timestamp() if hasattr(modified, "timestamp") else modified
        if version and isinstance(modified, float):
            modified = int(modified)
        return UrlStamp(size, version, str(modified))

    def call(self, url: Url, call: Callable[[Any, str], _T]) -> _T:
        """Return what a call of the file system returns.

        Raises:
            Failed: it raises.
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
        """Return fsspec's, of this process."""
        scheme = url.partition("://")[0]
        self._look_for_process()
        with self._lock:
            if scheme not in self._made:
                from fsspec.core import url_to_fs

                # What other processes have written and removed since is not what was listed once.
                options = {"use_listings_cache": False, **self._store.rest}
                self._made[scheme] = url_to_fs(url.target, **options)[0]
            return self._made[scheme]

    def _look_for_process(self) -> None:
        """Forget, in a process that was forked off, what has its threads in the other one."""
        if self._process != os.getpid():
            self._process, self._lock = os.getpid(), threading.Lock()
            self._made.clear()
            self._objects.clear()

    def failure(self, url: Url, error: BaseException) -> tuple[CheckpointError, float | None]:
        """Return our error for one of a file system, and after how many seconds it may pass."""
        scheme = url.partition("://")[0]
        found = self._store.cleaned(url, f"{type(error).__name__}: {error}")
        if isinstance(error, FileNotFoundError):
            return NotFound("nothing is there", file=url, hint="Check the URL."), None
        if isinstance(error, PermissionError) or type(error).__name__ in _REFUSED:
            hint = "Pass credentials: in the environment, or in storage_options."
            return NotAllowed("the store refuses access", file=url, found=found, hint=hint), None
        if isinstance(error, ImportError):
            hint = "Install the package that it names."
            what = f"{scheme}:// takes a package that is not installed"
            return FormatError(what, file=url, found=found, hint=hint), None
        if isinstance(error, ValueError) and scheme not in self._made:
            what = f"a URL that nothing here reads, or options that {scheme}:// has not"
            return FormatError(what, file=url, found=found), None
        if isinstance(error, TimeoutError):
            return TimedOut("the store does not answer", file=url, found=found), 0.0
        after = (
            0.0 if isinstance(error, OSError) or "client" in type(error).__name__.lower() else None
        )
        return Unreachable("the store cannot be used", file=url, found=found), after

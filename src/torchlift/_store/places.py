"""Functions for a *place*: a string that is either a path or a `Url`."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torchlift._store.files import FileStamp, LocalFile, Opened
from torchlift._store.url import RemoteFile, Seen, Store, Transport, Url, UrlStamp
from torchlift.errors import FormatError

_A = TypeVar("_A")
_T = TypeVar("_T")

#: Identifies the content of a place, so that a change is detected.
Stamp = FileStamp | UrlStamp

#: Requests in parallel while an index is read.
_AT_ONCE = 32
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://", re.ASCII)


def is_url(path: object) -> bool:
    """Return whether a path is a URL of any scheme but ``file``.

    Example:
        >>> is_url("s3://bucket/model.pt"), is_url("model.pt"), is_url("file:///model.pt")
        (True, False, False)
    """
    match = _URL.match(path) if isinstance(path, str) else None
    return match is not None and match[1].lower() != "file"


def place_of(
    path: str | bytes | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> str:
    """Return the absolute path of a file or a folder, or its `Url`.

    Args:
        path: A path or a URL.
        storage_options: Options for URLs: ``tries``, ``timeout`` (seconds), ``headers``, and the
            options of fsspec for the scheme.

    Raises:
        FormatError: If the URL cannot be parsed, or a ``file`` URL names another machine.
        TypeError, ValueError: If an option has a wrong type or value.
    """
    name = os.fsdecode(path)
    if isinstance(name, Url):
        return name if storage_options is None else _url(name.target, storage_options)
    if is_url(name):
        return _url(name, storage_options or {})
    if match := _URL.match(name):
        from urllib.parse import unquote

        # Not by urlsplit: a file's name may contain "?" and "#".
        host, slash, path = name[match.end() :].partition("/")
        if host.lower() not in ("", "localhost") or not path:
            raise FormatError(
                "the URL does not name a file of this machine",
                file=name,
                expected="file:/// and an absolute path",
                found=f"the host {host!r}" if host else "only a folder that contains everything",
                hint=f"Pass the path without {name[: match.end()]}, or write three slashes.",
            )
        name = slash + unquote(path)
    return os.path.abspath(name)


def readable(place: str) -> str:
    """Return the place whose bytes are read: the hub's cache for ``hf``, if that is offline.

    Raises:
        NotFound: If the cache does not contain it.
    """
    if isinstance(place, Url) and place.startswith("hf://"):
        from torchlift._store.hub import cached

        return cached(place) or place
    return place


def _url(target: str, options: Mapping[str, Any]) -> Url:
    scheme, _, rest = target.partition("://")
    if scheme.lower() == "hf":  # without an owner, a revision separates repository and file
        rest = re.sub(r"^((?:datasets/|spaces/|models/)?[^/@]+)/?$", r"\1@main", rest)
    return Url(f"{scheme.lower()}://{rest}", Store(transport_of(scheme.lower()), options))


def transport_of(scheme: str) -> type[Transport]:
    """Return the class that reads URLs of a scheme."""
    if scheme in ("http", "https"):
        from torchlift._store.http import Http

        return Http
    if scheme == "hf":
        from torchlift._store.hub import Hub

        return Hub
    from torchlift._store.others import Others

    return Others


def open_place(place: str) -> Opened:
    """Open a place for reading.

    Raises:
        FormatError: If the place is not a regular file.
        NotFound: If the URL does not exist.
        CheckpointError, OSError: If the place cannot be read.
    """
    return RemoteFile(place) if isinstance(place, Url) else LocalFile(place)


def inside(folder: str, name: str) -> str:
    """Return the place of a file in a folder."""
    if isinstance(folder, Url):
        return folder.inside(posixpath.normpath(name))
    return os.path.join(folder, name)


def parent(place: str) -> str:
    """Return the folder that contains a place."""
    return place.parent if isinstance(place, Url) else os.path.dirname(place)


def name_of(place: str) -> str:
    """Return the last part of a path or URL."""
    return place.name if isinstance(place, Url) else os.path.basename(place)


def relative(place: str, folder: str) -> str:
    """Return the path of a place relative to a folder."""
    if isinstance(place, Url):
        return posixpath.relpath(place, folder)
    return os.path.relpath(place, folder)


def is_folder(place: str) -> bool:
    """Return whether a place is a folder. HTTP has files only.

    Raises:
        NotFound: If the URL does not exist.
    """
    if isinstance(place, Url):
        return place.store.look(place).stamp is None
    return os.path.isdir(place)


def exists(place: str) -> bool:
    """Return whether a place exists."""
    return place.store.exists(place) if isinstance(place, Url) else os.path.exists(place)


def stamp_of(place: str) -> Stamp:
    """Return the stamp of a place, without a request. The stamp of a URL may be empty."""
    if isinstance(place, Url):
        return place.store.seen.get(place.target, Seen(None)).stamp or UrlStamp(-1)
    return FileStamp.of(place)


def head_of(place: str, nbytes: int) -> bytes:
    """Return the first bytes of a place. Those of a URL are kept for the next open."""
    if isinstance(place, Url):
        opened = RemoteFile(place)
        place.store.seen[place.target] = Seen(opened.stamp, opened.head)
        return opened.head[:nbytes]
    with open(place, "rb", buffering=0) as file:
        return file.read(nbytes)


def in_parallel(place: str, function: Callable[[_A], _T], items: Sequence[_A]) -> list[_T]:
    """Call a function with each item and return the results. Use threads if the place is a URL."""
    if not isinstance(place, Url) or len(items) < 2:
        return [function(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(_AT_ONCE, len(items)), "torchlift-index") as pool:
        try:
            return list(pool.map(function, items))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            place.store.cancel()
            raise


def names_in(folder: str) -> list[str]:
    """Return the names in a folder."""
    if isinstance(folder, Url):
        return folder.store.names(folder)
    return os.listdir(folder)


def stamp_now(place: str) -> Stamp:
    """Return the stamp of a place as it is now. This takes a request for a URL.

    Raises:
        NotFound: If the URL does not exist.
        CheckpointError, OSError: If the place cannot be read.
    """
    if not isinstance(place, Url):
        return FileStamp.of(place)
    store = place.store
    return store.retry(place, lambda: store.transport.look(place)).stamp or UrlStamp(-1)

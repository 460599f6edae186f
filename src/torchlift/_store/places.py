"""Paths and URLs: one set of functions for both, for whoever has a place that may be either."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torchlift._store.files import FileStamp, LocalFile, Opened
from torchlift._store.url import RemoteFile, Store, Transport, Url, UrlStamp

_A = TypeVar("_A")
_T = TypeVar("_T")

#: What identifies the content of a place.
Stamp = FileStamp | UrlStamp

#: Requests for an index that are made at the same time.
_AT_ONCE = 32
#: What a hub calls a file, and by how many digits which of the two it is.
_ETAG = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_ALGORITHMS = {40: "git-sha1", 64: "sha256"}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://", re.ASCII)


def is_url(path: object) -> bool:
    """Return whether a path is a URL, of whatever scheme; those of files are paths.

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
        path: a path or a URL.
        storage_options: of URLs: ``tries``, ``timeout`` (seconds) and ``headers``; and
            what fsspec takes for the scheme.

    Raises:
        FormatError: a URL that makes no sense.
        TypeError, ValueError: options that do not.
    """
    name = os.fsdecode(path)
    if isinstance(name, Url):
        return name if storage_options is None else _url(name.target, storage_options)
    if is_url(name):
        return _url(name, storage_options or {})
    if match := _URL.match(name):
        from urllib.parse import unquote, urlsplit

        name = unquote(urlsplit(name[match.end() - 2 :]).path)
    return os.path.abspath(name)


def _url(target: str, options: Mapping[str, Any]) -> Url:
    scheme, _, rest = target.partition("://")
    return Url(f"{scheme.lower()}://{rest}", Store(transport_of(scheme.lower()), options))


def transport_of(scheme: str) -> type[Transport]:
    """Return what reads URLs of a scheme."""
    if scheme in ("http", "https"):
        from torchlift._store.http import Http

        return Http
    if scheme == "hf":
        from torchlift._store.hub import Hub

        return Hub
    from torchlift._store.others import Others

    return Others


def open_place(place: str) -> Opened:
    """Open what is at a place now; its stamp says what that is.

    Raises:
        FormatError: it is none that has bytes.
        NotFound: nothing is there.
        CheckpointError, OSError: it cannot be read.
    """
    return RemoteFile(place) if isinstance(place, Url) else LocalFile(place)


def inside(folder: str, name: str) -> str:
    """Return the place of a name in a folder."""
    if isinstance(folder, Url):
        return folder.inside(posixpath.normpath(name))
    return os.path.join(folder, name)


def parent(place: str) -> str:
    """Return the folder that a place is in."""
    return place.parent if isinstance(place, Url) else os.path.dirname(place)


def name_of(place: str) -> str:
    """Return the last name of a place."""
    return place.name if isinstance(place, Url) else os.path.basename(place)


def relative(place: str, folder: str) -> str:
    """Return the name of a place in a folder, with slashes where it is deeper."""
    if isinstance(place, Url):
        return posixpath.relpath(place, folder)
    return os.path.relpath(place, folder)


def shared_folder(places: Iterable[str]) -> str:
    """Return the deepest folder that all places are in."""
    first, *more = places
    if not isinstance(first, Url):
        return os.path.commonpath([first, *more]) if more else os.path.dirname(first)
    folder = first.parent
    while not all(place.startswith(f"{folder}/") for place in more):
        folder = folder.parent
    return folder


def is_folder(place: str) -> bool:
    """Return whether a place is that of a folder. HTTP has files only.

    Raises:
        FormatError: If the URL is that of a folder of HTTP.
        NotFound: If nothing is at that URL.
    """
    if isinstance(place, Url):
        store = place.store
        return store.patiently(place, lambda: store.transport.is_folder(place))
    return os.path.isdir(place)


def exists(place: str) -> bool:
    """Return whether something is at a place; of a URL, it is what is opened next."""
    if not isinstance(place, Url):
        return os.path.exists(place)
    store = place.store
    return store.patiently(place, lambda: store.transport.exists(place))


def stamp_of(place: str) -> Stamp:
    """Return what identifies what is at a place; of a URL, what is known without a request."""
    if isinstance(place, Url):
        return place.store.transport.known(place) or UrlStamp(-1)
    return FileStamp.of(place)


def head_of(place: str, nbytes: int) -> bytes:
    """Return the first bytes at a place, which is perhaps opened next."""
    if isinstance(place, Url):
        return place.store.keep_head(place)[:nbytes]
    with open(place, "rb", buffering=0) as file:
        return file.read(nbytes)


def in_parallel(place: str, function: Callable[[_A], _T], items: Sequence[_A]) -> list[_T]:
    """Return what a function makes of each item; at the same time where a place is a URL."""
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
        store = folder.store
        return store.patiently(folder, lambda: store.transport.names(folder))
    return os.listdir(folder)


def hub_checksum(place: str) -> tuple[str, str] | None:
    """Return ``"sha256"`` or ``"git-sha1"``, and that of a file, as a hub records it.

    In the cache of Hugging Face's libraries a name in a snapshot is a link to
    ``blobs/<ETag>``; of a ``hf://`` URL the Hub says it with its answer. An ETag is the SHA-256 of
    what git LFS has, and of smaller files what git calls them.
    """
    if isinstance(place, Url):
        etag = place.store.transport.etags.get(place.target, "")
    else:
        folder, etag = os.path.split(os.path.realpath(place))
        # A file of that name that nobody links to may be anything.
        if os.path.basename(folder) != "blobs" or not os.path.islink(place):
            return None
    return (_ALGORITHMS[len(etag)], etag) if _ETAG.fullmatch(etag) else None


def stamp_now(place: str) -> Stamp:
    """Return what identifies what is at a place now.

    Raises:
        NotFound: nothing is there.
        CheckpointError, OSError: it cannot be asked for.
    """
    return place.store.stamp(place) if isinstance(place, Url) else FileStamp.of(place)

"""Reach S3, Google Cloud Storage and Azure by obstore, if it is installed and configured."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

from torchlift._store.url import Url

#: Option of s3fs -> the same option of obstore.
_NAMES = {
    "key": "access_key_id", "secret": "secret_access_key", "token": "session_token",
    "endpoint_url": "endpoint", "anon": "skip_signature", "region_name": "region",
}  # fmt: skip
_SCHEMES = ("s3", "gs", "az")
#: A complete request may take this many timeouts, because 32 requests share one slow line.
_SLOWEST = 20
_first: dict[str, int] = {}
#: The query of an S3 URL for a version of an object. obstore would take it as a part of the key.
VERSION = "?versionId="


def object_store(url: Url, *, reads: bool = False) -> tuple[Any, str] | None:
    """Return obstore's store for a URL and the path in that store, or None to use fsspec.

    obstore does not read configuration files and does not look up the region of a bucket, as s3fs
    does. It is used only if options or the environment hold the credentials, and a region or an
    endpoint.

    Args:
        url: The URL of the object.
        reads: Whether the object is read. An answer that stalls then fails after the timeout.
    """
    scheme, _, rest = url.target.partition("://")
    if scheme not in _SCHEMES or VERSION in rest or find_spec("obstore") is None:
        return None
    bucket, _, path = rest.partition("/")
    options = _options(url.store.rest) if scheme == "s3" else None if url.store.rest else {}
    # obstore's threads do not survive a fork: a forked child would wait for them forever.
    if options is None or not path or _first.setdefault("process", os.getpid()) != os.getpid():
        return None
    from obstore.store import from_url

    client: Any = {"allow_http": str(options.get("endpoint", "")).startswith("http://")}
    client["timeout"] = timedelta(seconds=_SLOWEST * url.store.timeout)  # for a complete request
    if reads:
        client["read_timeout"] = timedelta(seconds=url.store.timeout)
    store = from_url(
        f"{scheme}://{bucket}",
        client_options=client,
        retry_config={"max_retries": url.store.tries, "retry_timeout": timedelta(seconds=60)},
        **options,
    )
    return store, path


def _options(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Translate options of s3fs to obstore, or return None if obstore cannot work with them."""
    given = {**given, **given.get("client_kwargs", {})}
    given.pop("client_kwargs", None)
    found = {_NAMES[name]: value for name, value in given.items() if name in _NAMES}
    names = os.environ
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):  # boto reads both
        if names.get(name) and "endpoint_url" not in given:
            found["endpoint"] = names[name]
    is_known = "AWS_ACCESS_KEY_ID" in names or {"access_key_id", "skip_signature"} & found.keys()
    is_placed = {"AWS_REGION", "AWS_DEFAULT_REGION"} & names.keys() or {"endpoint", "region"} & {
        *found
    }
    return found if given.keys() <= _NAMES.keys() and is_known and is_placed else None

"""S3, Google Cloud Storage and Azure by obstore, where that is installed and has all it needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

from torchlift._store.url import Url

#: What s3fs calls its options, and obstore.
_NAMES = {
    "key": "access_key_id", "secret": "secret_access_key", "token": "session_token",
    "endpoint_url": "endpoint", "anon": "skip_signature", "region_name": "region",
}  # fmt: skip
_SCHEMES = ("s3", "gs", "az")
#: Times that a request may take what a server may be silent: 32 of 8 MiB share a slow line.
_SLOWEST = 20
_first: dict[str, int] = {}


def object_store(url: Url, *, reads: bool = False) -> tuple[Any, str] | None:
    """Return obstore's store of a URL, and what the object is called in it; None: fsspec has it.

    s3fs reads configuration files, and finds out in which region a bucket is. obstore is asked only
    where it needs neither: options or the environment have the credentials, and a region or an
    endpoint.

    Args:
        url: of the object.
        reads: whether it is read: an answer that stalls is given up then, however long all of it
            takes.
    """
    scheme, _, rest = url.target.partition("://")
    if scheme not in _SCHEMES or find_spec("obstore") is None:
        return None
    bucket, _, path = rest.partition("/")
    options = _options(url.store.rest) if scheme == "s3" else None if url.store.rest else {}
    # Its threads are not in a process that was forked off from one which has used it.
    if options is None or not path or _first.setdefault("process", os.getpid()) != os.getpid():
        return None
    from obstore.store import from_url

    client: Any = {"allow_http": str(options.get("endpoint", "")).startswith("http://")}
    client["timeout"] = timedelta(seconds=_SLOWEST * url.store.timeout)  # of a whole request
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
    """Return what obstore calls options of s3fs; None where it has no such option, or too few."""
    given = {**given, **given.get("client_kwargs", {})}
    given.pop("client_kwargs", None)
    found = {_NAMES[name]: value for name, value in given.items() if name in _NAMES}
    names = os.environ
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):  # as boto's clients have it
        if names.get(name) and "endpoint_url" not in given:
            found["endpoint"] = names[name]
    is_known = "AWS_ACCESS_KEY_ID" in names or {"access_key_id", "skip_signature"} & found.keys()
    is_placed = {"AWS_REGION", "AWS_DEFAULT_REGION"} & names.keys() or {"endpoint", "region"} & {
        *found
    }
    return found if given.keys() <= _NAMES.keys() and is_known and is_placed else None

"""Read the Hugging Face Hub: huggingface_hub lists the names, `Http` reads the bytes."""

from __future__ import annotations

import importlib
import os
import re
from contextlib import suppress
from typing import Any, NamedTuple

from torchlift._store.http import Http
from torchlift._store.others import Others
from torchlift._store.url import Failed, Seen, Store, Url, UrlStamp
from torchlift.errors import FormatError, NotFound

_PATH = re.compile(
    r"hf://(?:(datasets|spaces|models)/)?([^/@]+/[^/@]+)"
    r"(?:@(refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(.*))?",
    re.DOTALL,
)


class Hub(Http):
    """Reads ``hf://org/name[@revision][/file]``. A URL without a file is a folder."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._names = Others(store)

    def address(self, url: Url) -> str:
        """Return the HTTP address of a file on the Hub."""
        parts = _parse(url)
        found: str = _import_hub(url).hf_hub_url(
            parts.repository,
            parts.name.strip("/"),
            repo_type=parts.kind.rstrip("s") or None,
            revision=parts.revision or None,
            endpoint=self._store.rest.get("endpoint"),
        )
        return found

    def private_headers(self, url: Url) -> dict[str, str]:
        """Return headers with the token from the options, else from the environment."""
        token = self._store.rest.get("token")
        if token is None or token is True:
            token = _import_hub(url).get_token()
        bearer = {"Authorization": f"Bearer {token}"} if token else {}
        return {**bearer, **self._store.headers}

    def look(self, url: Url) -> Seen:
        """Return the stamp of a file and its first bytes, or that the URL is a folder."""
        if not _parse(url).name.strip("/"):
            return Seen(None)
        try:
            return super().look(url)
        except Failed as failed:
            if isinstance(failed.error, NotFound) and self._is_folder(url):
                return Seen(None)
            raise

    def _is_folder(self, url: Url) -> bool:
        try:
            return self._names.look(url).stamp is None
        except Failed:
            return False

    def stamps_in(self, url: Url) -> dict[str, UrlStamp | None]:
        """Return the names in a folder. Their stamps differ from those of `Http`."""
        return dict.fromkeys(self._names.stamps_in(url))


def cached(url: Url) -> str | None:
    """Return the path of a file or folder in the hub's cache if ``HF_HUB_OFFLINE`` is set.

    Raises:
        NotFound: If the cache does not contain it.
    """
    hub, parts = _import_hub(url), _parse(url)
    kind = parts.kind.rstrip("s") or "model"
    constants, errors = (_import_hub(url, part) for part in (".constants", ".errors"))
    if not constants.HF_HUB_OFFLINE:
        return None
    with suppress(errors.LocalEntryNotFoundError, errors.HFValidationError):
        folder = hub.snapshot_download(
            parts.repository,
            repo_type=kind,
            revision=parts.revision or None,
            local_files_only=True,
        )
        path = os.path.join(folder, *filter(None, parts.name.split("/")))
        if os.path.exists(path):
            return path
    raise NotFound(
        "HF_HUB_OFFLINE is set, and the cache of the hub does not contain this",
        file=url,
        hint=f"Fetch it with HF_HUB_OFFLINE=0: hf download --repo-type {kind} {parts.repository}",
    )


class _HubPath(NamedTuple):
    """The parts of a ``hf://`` URL. Each can be empty, except `repository`."""

    kind: str  # datasets, spaces or models
    repository: str
    revision: str
    name: str  # of a file or folder in the repository


def _parse(url: Url) -> _HubPath:
    match = _PATH.fullmatch(url)
    if match is None:
        what = "the URL does not name a repository"
        raise FormatError(what, file=url, expected="hf://org/name[@revision]")
    kind, repository, revision, name = match.groups("")
    return _HubPath(kind, repository, revision.replace("%2F", "/"), name)


def _import_hub(url: Url, part: str = "") -> Any:
    try:
        return importlib.import_module(f"huggingface_hub{part}")
    except ImportError as error:
        what = "hf:// needs the package huggingface_hub"
        raise FormatError(what, file=url, hint="pip install huggingface_hub") from error

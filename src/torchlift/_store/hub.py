"""The Hugging Face Hub: names by huggingface_hub's file system, bytes by HTTP."""

from __future__ import annotations

import http.client
import importlib
import re
from typing import Any

from torchlift._store.http import Http
from torchlift._store.others import Others
from torchlift._store.url import Store, Url
from torchlift.errors import FormatError, NotFound

_PATH = re.compile(
    r"hf://(?:(datasets|spaces|models)/)?([^/@]+/[^/@]+)"
    r"(?:@(refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(.*))?",
    re.DOTALL,
)


class Hub(Http):
    """Reads ``hf://org/name[@revision][/file]``; alone it is the folder of the repository."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._names = Others(store)

    def address(self, url: Url) -> str:
        """Return where the Hub serves a file; a redirect leads on from there."""
        huggingface_hub, (kind, repository, revision, name) = _package(url), _parts(url)
        found: str = huggingface_hub.hf_hub_url(
            repository,
            name.strip("/"),
            repo_type=kind.rstrip("s") if kind else None,
            revision=revision or None,
            endpoint=self._store.rest.get("endpoint"),
        )
        return found

    def secrets(self, url: Url) -> dict[str, str]:
        """Return headers with the token: the one that was passed, or that of the environment."""
        token = self._store.rest.get("token")
        if token is None or token is True:
            token = _package(url).get_token()
        bearer = {"Authorization": f"Bearer {token}"} if token else {}
        return {**bearer, **self._store.headers}

    def noted(self, url: Url, response: http.client.HTTPResponse) -> None:
        """Take note of the SHA-256 of what git LFS has, and of what git calls a smaller file.

        Where the redirect leads, an ETag is that of the store's own.
        """
        etag = response.getheader("X-Linked-ETag") or response.getheader("ETag") or ""
        self.etags[url.target] = etag.strip('"')

    def is_folder(self, url: Url) -> bool:
        """Return whether a URL is that of a repository, or of a folder in it."""
        if not _parts(url)[3].strip("/"):
            return True
        try:
            self._store.keep_head(url)
            return False
        except NotFound as error:
            failure = error
        if not self._names.is_there(url):
            raise failure
        return True

    def names(self, url: Url) -> list[str]:
        """Return the names in a folder."""
        return self._names.names(url)


def _parts(url: Url) -> tuple[str, str, str, str]:
    match = _PATH.fullmatch(url)
    if match is None:
        raise FormatError("a URL of no repository", file=url, expected="hf://org/name[@revision]")
    kind, repository, revision, name = match.groups("")
    return kind, repository, revision.replace("%2F", "/"), name


def _package(url: Url) -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        what = "reading hf:// takes a package that is not installed"
        raise FormatError(what, file=url, hint="pip install huggingface_hub") from error

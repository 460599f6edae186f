"""Read the Hugging Face Hub: huggingface_hub lists the names, `Http` reads the bytes."""

from __future__ import annotations

import importlib
import os
import re
from contextlib import suppress
from typing import Any

from torchlift._store.http import Http
from torchlift._store.url import Failed, Seen, Url, UrlStamp
from torchlift.errors import FormatError, NotAllowed, NotFound, Unreachable

#: A repository without an owner always has a revision here. `place_of` adds it.
_PATH = re.compile(
    r"hf://(?:(dataset|space|model)s/)?([^/@]+/[^/@]+|[^/@]+(?=@))"
    r"(?:@(refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(.*))?",
    re.DOTALL,
)


class Hub(Http):
    """Reads ``hf://org/name[@revision][/file]``. A URL without a file is a folder."""

    options = ("endpoint", "token")

    def address(self, url: Url) -> str:
        """Return the HTTP address of a file on the Hub."""
        repository, name = _parse(url)
        endpoint = self._store.rest.get("endpoint")
        found: str = _import_hub(url).hf_hub_url(filename=name, endpoint=endpoint, **repository)
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
        if not _parse(url)[1]:
            return Seen(None)
        try:
            return super().look(url)
        except Failed as failed:
            with suppress(Failed):
                if isinstance(failed.error, NotFound) and self.stamps_in(url):
                    return Seen(None)
            raise

    def stamps_in(self, url: Url) -> dict[str, UrlStamp | None]:
        """Return the names in a folder. The Hub lists other stamps than those that `Http` reads."""
        repository, folder = _parse(url)
        hub = _import_hub(url)
        self._store.count(1, 0)
        try:
            tree = hub.HfApi(**self._store.rest).list_repo_tree(path_in_repo=folder, **repository)
            return {item.path.rpartition("/")[2]: None for item in tree}
        except Exception as error:
            # Not the text: a server can repeat the token in it.
            status = getattr(getattr(error, "response", None), "status_code", 0)
            found = f"HTTP {status}" if status else type(error).__name__
        # The Hub answers 401 for what does not exist, unless it gets a token.
        kind = {401: NotFound, 403: NotAllowed, 404: NotFound}.get(status, Unreachable)
        hint = "Check the URL, and pass a token if the repository is private."
        failure = kind("the hub does not list this folder", file=url, found=found, hint=hint)
        raise Failed(failure, None if 400 <= status < 500 else 0.0)


def cached(url: Url) -> str | None:
    """Return the path of a file or folder in the hub's cache if ``HF_HUB_OFFLINE`` is set.

    Raises:
        NotFound: If the cache does not contain it.
    """
    hub, (repository, name) = _import_hub(url), _parse(url)
    constants, errors = (_import_hub(url, part) for part in (".constants", ".errors"))
    if not constants.HF_HUB_OFFLINE:
        return None
    with suppress(errors.LocalEntryNotFoundError, errors.HFValidationError):
        folder = hub.snapshot_download(**repository, local_files_only=True)
        path = os.path.join(folder, *filter(None, name.split("/")))
        if os.path.exists(path):
            return path
    command = f"hf download --repo-type {repository['repo_type']} {repository['repo_id']}"
    raise NotFound(
        "HF_HUB_OFFLINE is set, and the cache of the hub does not contain this",
        file=url,
        hint=f"Fetch it with HF_HUB_OFFLINE=0: {command}",
    )


def _parse(url: Url) -> tuple[dict[str, str | None], str]:
    """Return the repository as arguments of huggingface_hub, and the name in it or ``""``."""
    if match := _PATH.fullmatch(url):
        kind, repository, revision, name = match.groups()
        revision = revision and revision.replace("%2F", "/")
        found = {"repo_id": repository, "repo_type": kind or "model", "revision": revision}
        return found, (name or "").strip("/")
    what = "the URL does not name a repository"
    raise FormatError(what, file=url, expected="hf://org/name[@revision]")


def _import_hub(url: Url, part: str = "") -> Any:
    try:
        return importlib.import_module(f"huggingface_hub{part}")
    except ImportError as error:
        what = "hf:// needs the package huggingface_hub"
        raise FormatError(what, file=url, hint="pip install huggingface_hub") from error

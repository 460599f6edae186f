"""Checkpoints behind URLs are what the same files are."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from range_server import RangeServer, facts, serving
from valid_files import FORMATS

import torchlift
from torchlift.errors import FormatError, NotFound
from torchlift.formats.dcp import resolved
from torchlift.formats.detect import read_index


@pytest.fixture(params=FORMATS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file, or a directory, of each format."""
    opened, make, seeds = FORMATS[request.param]
    folder = tmp_path / "served" / "d"
    folder.mkdir(parents=True)
    for name, content in make(next(iter(seeds(tmp_path / "made")))).items():
        (folder / name).write_bytes(content)
    return folder / opened


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    """A server of what is in a folder."""
    (tmp_path / "served").mkdir(exist_ok=True)
    with serving(tmp_path / "served") as state:
        yield state


def test_a_url_shows_only_what_may_be_shown(tmp_path: Path, server: RangeServer) -> None:
    """A signature, a password and a token are in no text, representation or key."""
    (tmp_path / "served" / "model.pt").write_bytes(b"")
    url = server.url("model.pt").replace("//", "//me:pass-word@") + "?X-Signature=sss#frag"
    with pytest.raises(FormatError, match="an empty file") as caught:
        torchlift.open(url)
    assert caught.value.file == server.url("model.pt")
    with pytest.raises(NotFound) as missing:
        torchlift.open(url.replace("model", "other"))
    assert isinstance(missing.value, FileNotFoundError)
    for error in (caught.value, missing.value):
        texts = f"{error} {error!r} {vars(error)} {error.__cause__!r} {error.__context__!r}"
        assert not any(secret in texts for secret in ("sss", "pass-word", "frag"))
        assert error.__context__ is None
    np.save(tmp_path / "served" / "w.npy", np.ones(3))
    found = read_index(url.replace("model.pt", "w.npy"))
    texts = f"{found!r} {found.files!r} {found.entries!r} {found.storages!r}"
    assert not any(secret in texts for secret in ("sss", "pass-word", "frag"))
    assert server.asked[0].headers["authorization"].startswith("Basic ")
    assert server.asked[0].query == "X-Signature=sss"


def test_every_format_is_the_same_from_a_url(
    place: Path, tmp_path: Path, server: RangeServer
) -> None:
    """Entries, offsets, objects and notes; a folder by its metadata."""
    name = str(place.relative_to(tmp_path / "served"))
    local = read_index(place)
    if place.is_dir():
        with pytest.raises(FormatError, match="HTTP cannot list a folder") as caught:
            read_index(server.url(f"{name}/"))
        assert ".metadata" in str(caught.value.hint)
        if not (place / ".metadata").exists():
            return
    remote = read_index(server.url(f"{name}/.metadata" if place.is_dir() else name))
    assert facts(resolved(remote)) == facts(local)
    assert remote.path == server.url(name)


def test_a_checkpoint_of_a_url_is_pickled_with_its_url(tmp_path: Path, server: RangeServer) -> None:
    """Another process opens it again, with the same credentials."""
    from safetensors.torch import save_file
    from torch import ones

    save_file({"w": ones(3)}, tmp_path / "served" / "model.safetensors")
    url = server.url("model.safetensors") + "?sig=abc"
    again = pickle.loads(pickle.dumps(torchlift.open(url)))
    assert again.entries["w"].shape == (3,)
    assert {asked.query for asked in server.asked} == {"sig=abc"}
    (tmp_path / "served" / "model.safetensors").write_bytes(b"other")
    with pytest.raises(torchlift.IntegrityError, match="the file changed"):
        pickle.loads(pickle.dumps(again))


def test_a_name_with_spaces_is_the_one_that_is_quoted(tmp_path: Path, server: RangeServer) -> None:
    """Both ways of writing it, and letters of any alphabet."""
    import torch

    for name in ("a b.pt", "\u03b1.pt"):
        torch.save({"w": torch.ones(2)}, tmp_path / "served" / name)
        assert list(torchlift.open(server.url() + name)) == ["w"]
    assert list(torchlift.open(server.url("a%20b.pt"))) == ["w"]


@pytest.mark.parametrize("url", ["http://host:99999/x.pt", "http://host:port/x", "https:///x.pt"])
def test_a_url_without_a_host_or_a_port_makes_no_sense(url: str) -> None:
    """It is no damaged file, and no server that may answer later."""
    with pytest.raises(FormatError, match="the URL is not valid"):
        torchlift.open(url)


def test_the_url_of_a_file_is_its_path(tmp_path: Path) -> None:
    """However many slashes and quoted characters are in it."""
    import torch

    torch.save({"w": torch.ones(2)}, tmp_path / "a b.pt")
    assert torchlift.open((tmp_path / "a b.pt").as_uri()).path == str(tmp_path / "a b.pt")


def test_verify_takes_the_options_of_open(tmp_path: Path, server: RangeServer) -> None:
    """Such as a token."""
    import torch

    torch.save({"w": torch.ones(2)}, tmp_path / "served" / "model.pt")
    options = {"headers": {"Authorization": "Bearer t"}}
    assert torchlift.verify(server.url("model.pt"), storage_options=options).ok
    assert all(asked.headers["authorization"] == "Bearer t" for asked in server.asked)


@pytest.mark.parametrize("call", [torchlift.open, torchlift.verify])
@pytest.mark.parametrize(
    ("path", "hint"),
    [("~/x.pt", "expand it"), ("org/name", "hf://org/name"), (Path("s3://b/x.pt"), "one slash")],
)
def test_a_path_that_means_something_else_says_what(
    call: Callable[[object], object], path: object, hint: str
) -> None:
    """A home, a repository, a URL that was made a path of."""
    with pytest.raises(NotFound, match=hint):
        call(path)

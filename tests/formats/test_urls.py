"""Checkpoints behind URLs are what the same files are."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from range_server import RangeServer

import torchlift
import torchlift.bench
import torchlift.distributed
from torchlift.errors import FormatError, NotFound
from torchlift.formats.detect import read_index


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


@pytest.mark.parametrize("start", ["file://", "file://localhost", "FILE://LocalHost"])
def test_the_url_of_a_file_is_its_path(tmp_path: Path, start: str) -> None:
    """Whatever characters are in it: what starts a query or a fragment elsewhere is a name here."""
    import torch

    for name in "a b.pt", "a?b.pt", "a#b.pt", "a%3Fb.pt":
        place = tmp_path / name
        url = start + str(place).replace("%", "%25")
        torchlift.save({"w": torch.ones(2)}, url)
        torchlift.convert(url, f"{url}.safetensors")
        assert torchlift.open(url).path == str(place)
        assert torchlift.open(place.as_uri()).path == str(place)
        assert torchlift.open(f"{url}.safetensors").path == f"{place}.safetensors"
        with torchlift.Keeper(f"{url}.runs") as keeper:
            keeper.save(1, model=_linear())
        assert list(Path(f"{place}.runs").glob("*.pt"))


#: Each way to pass a place.
DOORS: dict[str, Callable[[str], object]] = {
    "open": torchlift.open,
    "verify": torchlift.verify,
    "diff": lambda url: torchlift.diff(url, "model.pt"),
    "load from a list": lambda url: torchlift.load(_linear(), ["model.pt", url]),
    "convert from": lambda url: torchlift.convert(url, "new.safetensors"),
    "convert to": lambda url: torchlift.convert("model.pt", url, overwrite=True),
    "save a folder": lambda url: torchlift.save({"w": _linear().weight}, url, format="dcp"),
    "Keeper": torchlift.Keeper,
    "reader": lambda url: torchlift.distributed.CheckpointReader(url).read_metadata(),
}


def _linear() -> Any:
    import torch

    return torch.nn.Linear(2, 2)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("url", ["file://model.pt", "file://host/model.pt", "file://", "file:///"])
def test_the_url_of_a_file_on_another_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: str, url: str
) -> None:
    """The folder where a program runs has other files, which nobody means. The hint is followed."""
    monkeypatch.chdir(tmp_path)
    torchlift.save(_linear(), "model.pt")
    with pytest.raises(FormatError) as caught:
        DOORS[door](url)
    assert caught.value.file == url
    assert "three slashes" in str(caught.value.hint)
    assert os.listdir() == ["model.pt"]
    assert len(torchlift.open("model.pt")) == 2
    assert len(torchlift.open(f"file://{tmp_path}/model.pt")) == 2


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

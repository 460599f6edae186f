"""Loads from URLs: what the file has, in few requests, and nothing at all where bytes fail."""

from __future__ import annotations

import copy
import email.utils
import os
import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
import zoo
from failing_reads import readers
from in_code import in_code
from range_server import Answer, Asked, RangeServer, serving
from safetensors.torch import save_file
from small_models import state_of, unchanged
from torch import nn
from valid_files import FORMATS
from zoo import Holder, same

import torchlift
from torchlift.distributed import CheckpointReader, load_optimizer, on_ranks
from torchlift.errors import CheckpointError, IntegrityError, PlacementError

MIB = 1 << 20
#: What a first request of an object asks for.
HEAD = 1 << 16
#: What a load of a training leaves out.
ASIDE = ("optimizer.", "training.")
#: A fault is met at once, and not after a minute of trying.
QUICK = {"tries": 2, "timeout": 5}


@pytest.fixture(name="server")
def _server(tmp_path: Path) -> Iterator[RangeServer]:
    """A server of the files of a test."""
    with serving(tmp_path) as state:
        yield state


def model_of(width: int = 700) -> nn.Module:
    """A live model with layers of some size, a buffer, and a module with code of its own."""
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(300, width), nn.BatchNorm1d(width), nn.Linear(width, 900))


def on_meta() -> nn.Module:
    """The same without values."""
    return torchlift.skeleton(model_of)


def saved(folder: Path, name: str, state: Any = None) -> dict[str, torch.Tensor]:
    """Save the state of a model in whichever format a name is of; return the tensors."""
    state = dict(model_of().state_dict()) if state is None else state
    if name.endswith(".pt"):
        torch.save(state, folder / name)
    else:
        torchlift.save(state, folder / name)
    return state


def taken(server: RangeServer, path: Path) -> int:
    """How many bytes of a file were asked for since the server was told to forget."""
    size = path.stat().st_size
    return sum(min(asked.stop or size, size) - asked.start for asked in server.asked)


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_gives_from_a_url_what_the_file_gives(format, tmp_path, server):
    """By key, as a state dict, as containers, loaded into modules and by DCP, and in diffs."""
    opened, make, seeds = FORMATS[format]
    folder = tmp_path / "d"
    folder.mkdir()
    for name, content in make(next(iter(seeds(tmp_path / "made")))).items():
        (folder / name).write_bytes(content)
    path, url = folder / opened, server.url(f"d/{opened or '.metadata'}")
    if format in ("zero", "fsdp"):  # whose files have names of their own, and HTTP lists no folders
        url = f"memory://{uuid.uuid4().hex}/d"
        fsspec.filesystem("memory").put(str(folder), url, recursive=True)
    here, there = torchlift.open(path), torchlift.open(url)
    assert same({key: there[key] for key in there}, {key: here[key] for key in here})
    assert same(there.state_dict(), here.state_dict())
    assert same(there.tree(), here.tree())
    assert torchlift.diff(url, path).equal
    dense = [key for key in here if here.entries[key].kind is None]
    assert all(there.stats(key) == here.stats(key) for key in dense)
    for source in (path, url):
        with torchlift.open(source) as ckpt:
            model, keys = nn.Module(), [k for k in dense if not k.startswith(ASIDE)]
            model.values = nn.ParameterList(
                nn.Parameter(torch.empty_like(ckpt[key]), requires_grad=False) for key in keys
            )
            names = {key: f"values.{number}" for number, key in enumerate(keys)}
            torchlift.load(model, ckpt, rename=names.get, allow_unexpected=["*"], source="read")
            assert same(list(model.values), [here[key] for key in keys])
        state = {key: torch.zeros_like(here[key]) for key in dense}
        with pytest.warns(UserWarning, match="torch.distributed is"):
            dcp.load(state, storage_reader=CheckpointReader(source))
        assert same(state, {key: here[key] for key in dense})


@pytest.mark.parametrize("name", ["m.pt", "m.safetensors"])
@pytest.mark.parametrize("make", [model_of, on_meta])
@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": torch.bfloat16}, {"verify": True}, {"transform": lambda _, value: value}],
    ids=["as it is", "cast", "verified", "transformed"],
)
def test_a_plan_says_how_many_requests_a_load_makes(name, make, options, tmp_path, server):
    """The server counts what the report says, and beside the tensors only what opening takes."""
    want = saved(tmp_path, name)
    url, model = server.url(name), make()
    dtype = options.get("dtype")
    planning = {key: value for key, value in options.items() if key != "verify"}
    with unchanged(model):
        plan = torchlift.plan(model, url, **planning)
    server.forget()
    torchlift.open(url)
    opening, sent = server.requests, taken(server, tmp_path / name)
    server.forget()
    report = torchlift.load(model, url, **options)
    assert report.requests == server.requests - opening
    assert set(report.source.values()) <= {"read", "memory"}
    for key, value in model.state_dict().items():
        into = dtype if dtype and value.is_floating_point() else want[key].dtype
        assert torch.equal(value, want[key].to(into)), key
    if "verify" not in options:
        assert plan.requests == report.requests
        assert taken(server, tmp_path / name) <= sent + report.bytes_read + HEAD
        assert str(plan.requests) in str(plan)
        assert f"{report.requests:,} request" in str(report)


def test_of_many_tensors_a_few_take_their_own_bytes(tmp_path: Path, server: RangeServer) -> None:
    """64 of 4,000 neighbours: the bytes of them and of the index, in one request behind it."""
    saved(tmp_path, "m.safetensors", {f"t{i:04}": torch.full((500,), i) for i in range(4000)})
    url = server.url("m.safetensors")
    ckpt = torchlift.open(url)
    server.forget()
    zeros = torch.zeros(500, dtype=torch.int64)
    model = Holder({f"t{number + 100:04}": zeros.clone() for number in range(64)})
    report = torchlift.load(model, ckpt, include=["t01[0-5]*", "t016[0-3]"])
    assert report.requests == server.requests == 1
    assert 64 * 4000 <= taken(server, tmp_path / "m.safetensors") < 64 * 4000 + HEAD
    assert torch.equal(model.t0163, torch.full((500,), 163))


def test_what_a_url_has_is_never_mapped(tmp_path: Path, server: RangeServer) -> None:
    """Who asks for it learns what to do."""
    saved(tmp_path, "m.pt")
    for options in ({"source": "mmap"}, {"device": "disk"}):
        with pytest.raises(PlacementError, match=r'cannot be mapped.*source="read"'):
            torchlift.load(on_meta(), server.url("m.pt"), **options)


def test_aliases_of_a_url_stay_aliases_and_nothing_else_is_kept(tmp_path, server):
    """Two keys of one storage share memory, asked for alone or all together."""
    base = torch.arange(12.0)
    saved(tmp_path, "m.pt", {"a": base, "b": base[3:], "alone": torch.ones(4)})
    with torchlift.open(server.url("m.pt")) as ckpt:
        for found in (ckpt.state_dict(), ckpt):
            a, b = found["a"], found["b"]
            assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
            a[3] = 7
            assert b[0] == 7
        assert ckpt["alone"].data_ptr() != ckpt["alone"].data_ptr()


# ---- faults in the middle of the bytes


def _other(asked: Asked, answer: Answer) -> None:
    answer.headers["ETag"] = '"another"'


def _gone(asked: Asked, answer: Answer) -> None:
    answer.status, answer.body = 404, memoryview(b"")
    answer.headers.pop("Content-Range", None)


FAULTS = {"changed": _other, "gone": _gone}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("make", [model_of, on_meta])
def test_a_load_of_which_some_bytes_fail_leaves_the_model_as_it_was(fault, make, tmp_path, server):
    """One error, whatever the server does from the second range of the values on."""
    values = {f"w{i}": torch.randn(12 * MIB // 4) for i in range(2)}
    saved(tmp_path, "m.safetensors", values)
    model = (
        zoo.on_meta(values)
        if make is on_meta
        else Holder({k: torch.zeros_like(v) for k, v in values.items()})
    )
    ckpt = torchlift.open(server.url("m.safetensors"), storage_options=QUICK)

    def failing(asked: Asked, answer: Answer) -> None:
        if asked.start > 8 * MIB:
            FAULTS[fault](asked, answer)

    server.fault = failing
    with unchanged(model), pytest.raises(CheckpointError) as caught:
        torchlift.load(model, ckpt)
    assert caught.value.file == server.url("m.safetensors")
    assert isinstance(caught.value, IntegrityError) or fault != "changed"
    assert not readers()
    server.fault = None
    torchlift.load(model, ckpt)
    assert all(torch.equal(getattr(model, name), value) for name, value in values.items())


def test_an_optimizer_of_a_url_is_loaded_whole_or_not_at_all(tmp_path, server):
    """Its state comes in few requests; of a fault in the middle, nothing stays."""
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    model(torch.randn(4, 300)).sum().backward()
    optimizer.step()
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "training.pt")
    other = model_of()
    loaded = torch.optim.Adam(other.parameters(), lr=0.1)
    other(torch.randn(4, 300)).mean().backward()
    loaded.step()
    before = copy.deepcopy(loaded.state_dict())
    url = server.url("training.pt")
    ckpt = torchlift.open(url, storage_options=QUICK)
    server.fault = _gone
    with pytest.raises(CheckpointError, match=r"training\.pt"):
        load_optimizer(other, loaded, ckpt, root="optimizer")
    assert same(loaded.state_dict(), before)
    server.fault = None
    server.forget()
    load_optimizer(other, loaded, url, root="optimizer", storage_options=QUICK)
    assert server.requests <= 8
    assert same(loaded.state_dict(), optimizer.state_dict())


def test_an_interrupt_ends_a_load_while_the_server_is_silent(tmp_path, server):
    """No answer comes before the load is over, which leaves no thread and the model as it was."""
    saved(tmp_path, "m.safetensors", {"w": torch.randn(8 * MIB)})
    model = Holder({"w": torch.zeros(8 * MIB)})
    before, over, once = state_of(model), threading.Event(), threading.Lock()
    ckpt = torchlift.open(server.url("m.safetensors"))

    def silent(asked: Asked, answer: Answer) -> None:
        if once.acquire(blocking=False):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        over.wait(60)

    server.fault = silent
    with pytest.raises(KeyboardInterrupt):
        torchlift.load(model, ckpt)
    assert not over.is_set()
    over.set()
    assert state_of(model) == before
    assert not readers()


# ---- what is compared, and what memory it takes


def test_checksums_of_many_small_tensors_take_few_requests(tmp_path, server):
    """Neighbours are summed up out of one answer; a wrong byte is found behind a URL, too."""
    saved(tmp_path, "m.pt", {f"t{i}": torch.full((500,), i) for i in range(300)})
    ckpt = torchlift.open(server.url("m.pt"))
    opening = server.requests
    server.forget()
    report = torchlift.verify(server.url("m.pt"))
    assert (report.ok, len(report.checked)) == (True, 300)
    assert server.requests <= 2 * opening + 4
    offset = ckpt.entries["t7"].chunks[0].offset
    data = bytearray((tmp_path / "m.pt").read_bytes())
    data[offset] ^= 1
    (tmp_path / "m.pt").write_bytes(data)
    assert len(torchlift.verify(server.url("m.pt")).failed) == 1
    model = Holder({"t7": torch.zeros(500, dtype=torch.int64)})
    with pytest.raises(IntegrityError, match="checksums are wrong"):
        torchlift.load(model, server.url("m.pt"), allow_unexpected=["*"], verify=True)
    assert not model.t7.any()


@pytest.mark.parametrize("same", [False, True])
def test_an_etag_is_no_content_for_a_diff(tmp_path: Path, server: RangeServer, same: bool) -> None:
    """A server may give one of 64 digits to all of its files: values are compared all the same."""
    for name in "12":
        state = {"w": torch.full((5000,), 0.0 if same else float(name))}
        saved(tmp_path, f"{name}.safetensors", state)

    def one_for_all(asked: Asked, answer: Answer) -> None:
        answer.headers["ETag"] = f'"{"a1" * 32}"'

    server.fault, server.etags = one_for_all, False
    one, two = (torchlift.open(server.url(f"{name}.safetensors")) for name in "12")
    found = torchlift.diff(one, two)
    assert found.equal is same
    assert same or found.changed["w"].value.differing == 5000


CODE = """
import torch, torchlift
from torch import nn

url, way = args
size = 192 << 20
ckpt = torchlift.open(url)
model = nn.Module()
half = way == "cast"
model.w = nn.Parameter(torch.empty(size // 4, device="meta"))
model.v = nn.Parameter(torch.empty(1 << 20, device="meta"))
planned = torchlift.plan(model, ckpt, dtype=torch.bfloat16 if half else None).peak_bytes
"""
WORK = """
report = torchlift.load(model, ckpt, dtype=torch.bfloat16 if half else None)
result = report.bytes_read, planned
"""


@pytest.mark.parametrize(("way", "factor"), [("as it is", 1.0), ("cast", 0.5)])
def test_a_load_from_a_url_takes_its_destination_and_the_budget(way, factor, tmp_path, server):
    """However many ranges are on their way, 64 MiB beside the tensors are enough."""
    saved(tmp_path, "m.safetensors", {"w": torch.zeros(48 * MIB), "v": torch.ones(MIB)})
    child = in_code(WORK, server.url("m.safetensors"), way, setup=CODE)
    read, planned = child.value
    assert read == 196 * MIB
    assert child.memory.added_anonymous < 196 * MIB * factor + 64 * MIB
    assert abs(child.memory.added_anonymous - planned) < 24 * MIB


# ---- ranks


def _load_on_rank(url: str) -> list[Any]:
    """Load a model of which each rank has rows; return it whole, and what it took."""
    from torch.distributed.fsdp import fully_shard

    model = torchlift.skeleton(nn.Linear, 600, 1000)
    fully_shard(model)
    report = torchlift.load(model, url)
    state = {key: value.full_tensor() for key, value in model.state_dict().items()}
    return [state, report.bytes_read]


@pytest.mark.parametrize("name", ["m.pt", "m.safetensors"])
def test_two_ranks_read_what_each_of_them_needs(name, tmp_path, server):
    """Each its own rows, which together are asked for once."""
    want = saved(tmp_path, name, dict(nn.Linear(600, 1000).state_dict()))
    server.forget()
    torchlift.open(server.url(name))
    index, size = taken(server, tmp_path / name), (tmp_path / name).stat().st_size
    server.forget()
    found = on_ranks(2, _load_on_rank, server.url(name), timeout=60)
    assert size - index <= taken(server, tmp_path / name) - 2 * index <= size + HEAD
    assert all(same(state, want) for state, _ in found)
    assert sum(nbytes for _, nbytes in found) == 600 * 1000 * 4 + 1000 * 4


def _fail_on_rank(url: str, width: int) -> list[Any]:
    """Load what the server refuses; on the last rank, into a model of another width."""
    rank = torch.distributed.get_rank()
    model = nn.Linear(3000, width if rank else 2000)
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError) as caught:
        torchlift.load(model, url, collective=True, storage_options={"tries": 1, "timeout": 5})
    return [str(caught.value), torch.equal(model.weight, before)]


@pytest.mark.parametrize(
    ("width", "what"), [(2000, "nothing is there"), (10, "on rank 1: nothing in the che")]
)
def test_ranks_that_fetch_together_fail_together(width, what, tmp_path, server):
    """Of bytes that one asked for, or a model that does not fit, both hear; neither is changed."""
    saved(tmp_path, "m.safetensors", nn.Linear(3000, 2000).state_dict())

    def failing(asked: Asked, answer: Answer) -> None:
        if asked.start > 8 * MIB:
            _gone(asked, answer)

    server.fault = failing if width == 2000 else None
    found = on_ranks(2, _fail_on_rank, server.url("m.safetensors"), width, timeout=60)
    assert all(same for _, same in found)
    assert all(what in text for text, _ in found), found


def test_urls_that_differ_in_what_is_not_shown_are_two_files(tmp_path, server):
    """Of the same size and date, from a server that has no versions."""
    for number, name in enumerate(("one", "two")):
        save_file({name: torch.full((1000,), float(number))}, tmp_path / f"{name}.safetensors")
        os.utime(tmp_path / f"{name}.safetensors", (1e9, 1e9))

    def chosen(asked: Asked, answer: Answer) -> None:
        path = tmp_path / f"{asked.query}.safetensors"
        answer.status, size = 206, path.stat().st_size
        stop = min(size, asked.stop or size)
        answer.body = memoryview(path.read_bytes()[asked.start : stop])
        answer.headers["Content-Range"] = f"bytes {asked.start}-{stop - 1}/{size}"
        answer.headers["Last-Modified"] = email.utils.formatdate(1e9, usegmt=True)

    server.fault, server.etags = chosen, False
    urls = [server.url(f"download?{name}") for name in ("one", "two")]
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(1000) * 5) for name in ("one", "two")})
    torchlift.load(model, urls)
    torchlift.convert(urls, tmp_path / "both.safetensors")
    for found in (model.state_dict(), torchlift.open(tmp_path / "both.safetensors")):
        assert [float(found[name][0]) for name in ("one", "two")] == [0.0, 1.0]

"""The comparison of loaders: that like meets like, and how it reports failure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from generated import make_checkpoint

import torchlift
from torchlift import bench
from torchlift._system.text import parse_size
from torchlift.bench import WAYS, Comparison, Result, Way
from torchlift.bench.comparison import cached_bytes, drop_pages
from torchlift.cli import main

MIB = 2**20
FORMATS = ["torch-zip", "safetensors"]


@pytest.fixture(scope="module", params=FORMATS)
def generated(request, tmp_path_factory) -> Path:
    """A checkpoint of 8 MiB, with the suffix that libraries know a format by."""
    suffix = "pt" if request.param == "torch-zip" else "safetensors"
    path = tmp_path_factory.mktemp("bench") / f"generated.{suffix}"
    make_checkpoint(path, nbytes=8 * MIB, tensors=8, format=request.param)
    return path


@pytest.fixture
def small(tmp_path) -> Path:
    """A torch file of 1 MiB."""
    make_checkpoint(tmp_path / "small.pt", nbytes=MIB, tensors=4)
    return tmp_path / "small.pt"


# ---- comparing


def test_importing_the_comparison_does_not_import_torch() -> None:
    """The parent process stays small: everything heavy happens in the children."""
    code = "import sys, torchlift.bench, torchlift.cli.bench; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.slow
def test_a_comparison_runs_every_way_in_a_process_and_reports_it(generated) -> None:
    """No way fails, the values agree, and the text and the JSON say so."""
    comparison = bench.compare(generated, repeat=1)
    results = comparison.results
    assert len(results) >= 4
    assert not [result.error for result in results.values() if result.error]
    assert comparison.different == []
    assert comparison.speedup(next(iter(results))) == 1.0
    assert all(len(result.seconds) == 1 and result.digest for result in results.values())
    assert "all ways loaded equal values" in str(comparison)
    assert json.loads(json.dumps(comparison.to_dict()))["nbytes"] == 8 * MIB


def fake(name: str, digest: str, seconds: float = 1.0, **way) -> Result:
    """A finished result of a way that does not exist."""
    return Result(Way(name, name, name, **way), [seconds], [0.0], [float("nan")], digest)


def test_a_way_that_loads_other_values_is_named() -> None:
    """The table ends with the names of the ways whose values differ from the baseline's."""
    results = {r.way.name: r for r in (fake("good", "1"), fake("same", "1", 0.5), fake("bad", "2"))}
    comparison = Comparison("x.pt", "torch-zip", 1, 10**9, False, results)
    assert comparison.different == ["bad"]
    assert "different values loaded by: bad" in str(comparison)
    assert comparison.speedup("same") == 2.0
    assert comparison.to_dict()["results"]["same"]["bytes_per_second"] == 2e9


class Foreign:
    """Something that only unpickling can rebuild."""


def test_a_way_that_fails_is_a_row_with_its_reason(tmp_path, monkeypatch, capsys) -> None:
    """One way's failure is reported in place, does not stop the others, and is status 1."""
    monkeypatch.setattr(Foreign, "__module__", "builtins")
    monkeypatch.setattr("builtins.Foreign", Foreign, raising=False)
    path = tmp_path / "foreign.pt"
    torch.save({"weight": torch.ones(3), "extra": Foreign()}, path)
    other = bench.Way("other", "does nothing", lambda job: lambda: None)
    comparison = bench.compare(path, only=["torch-load", "other"], ways=[*WAYS, other], repeat=2)
    assert "Error" in comparison.results["torch-load"].error
    assert len(comparison.results["other"].seconds) == 2
    assert "failed: " in str(comparison)
    row = comparison.to_dict()["results"]["torch-load"]
    assert row["error"] == comparison.results["torch-load"].error
    assert main(["bench", str(path), "--only", "torch-load", "--repeat", "1"]) == 1
    assert "failed: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": ["nonsense"]}, "'nonsense' is not a known way. Known: torch-load"),
        ({"only": []}, "only= is empty"),
        ({"repeat": 0}, "at least 1, not 0"),
    ],
)
def test_a_comparison_that_makes_no_sense_is_refused(generated, options, message) -> None:
    """The message names what was asked for and what there is."""
    with pytest.raises(ValueError, match=message):
        bench.compare(generated, **options)


def test_a_way_that_needs_a_missing_package_is_refused_by_name(generated, request, monkeypatch):
    """Without safetensors the ways of torchlift still read its files; the others say what to do."""
    if request.node.callspec.params["generated"] == "torch-zip":
        pytest.skip("needs no package")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    names = [way.name for way in WAYS if not way.obstacle("safetensors")]
    assert names[0] == "torchlift-mmap"
    with pytest.raises(ValueError, match="package safetensors is not installed"):
        bench.compare(generated, only=["safetensors-file"])


# ---- what the machine can do, and what it has already


@pytest.mark.skipif(sys.platform != "linux", reason="the page cache is asked by Linux's calls")
def test_the_cached_bytes_of_a_file_are_counted(generated) -> None:
    """None after it was dropped, all after it was read; a file system may keep it all the same."""
    name, size = str(generated), generated.stat().st_size
    generated.read_bytes()
    assert cached_bytes([name]) == size
    drop_pages([name])
    if cached_bytes([name]) == size:
        pytest.skip("this file system keeps everything in memory")
    assert cached_bytes([name]) == 0
    with open(name, "rb") as file:
        file.seek(4 * MIB)
        file.read(1)
    assert 0 < cached_bytes([name]) < size


# ---- other libraries, a cast, a device


def test_a_folder_of_dcp_and_shards_of_torch_files_are_compared(tmp_path) -> None:
    """torch's own readers take part."""
    state = {f"w{n}": torch.randn(8, 8) for n in range(4)}
    torchlift.save(state, tmp_path / "dcp", format="dcp")
    (tmp_path / "set").mkdir()
    weight_map = {}
    for name, tensor in state.items():
        torch.save({name: tensor}, tmp_path / "set" / f"{name}.bin")
        weight_map[name] = f"{name}.bin"
    guide = tmp_path / "set" / "pytorch_model.bin.index.json"
    guide.write_text(json.dumps({"weight_map": weight_map}))
    for path, way in (tmp_path / "dcp", "torch-dcp"), (tmp_path / "set", "torch-assign"):
        comparison = bench.compare(path, only=[way, "torchlift-read"], repeat=1)
        assert comparison.different == []
        assert not [result.error for result in comparison.results.values() if result.error]


# ---- the command


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("2GiB", 2 << 30), ("500 MB", 500_000_000), ("1.5k", 1500), ("1mib", MIB)],
)
def test_sizes_are_read_as_people_write_them(text, nbytes) -> None:
    """Binary and decimal units, with or without B, in any case."""
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1TiBs", "0x10", "1 2"])
def test_what_is_no_size_is_refused(text) -> None:
    """The message shows a size as it should be."""
    with pytest.raises(ValueError, match="2GiB"):
        parse_size(text)


def test_the_command_prints_a_table_or_json(small, capsys) -> None:
    """`torchlift bench FILE --only ...` compares what was asked for; ``--json`` is one document."""
    words = ["bench", str(small), "--only", "torch-load,torchlift-read", "--repeat", "1"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "torch.load " in out
    assert 'torchlift.load(source="read")' in out
    assert "1.0 MB; warm page cache, 1 rounds" in out
    assert main([*words, "--cold", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["cold"], data["nbytes"]) == (True, MIB)
    assert list(data["results"]) == ["torch-load", "torchlift-read"]


@pytest.mark.parametrize(
    ("args", "status", "says"),
    [
        ([], 2, "the following arguments are required"),
        (["x", "--generate", "1MiB"], 2, "unrecognized arguments"),
        (["x", "--cast", "int8"], 2, "int8"),
        (["bad.pt", "--only", "limit-copy"], 1, "bad.pt"),
        (["small.pt", "--only", "limit-copy"], 2, "Known: torch-load"),
        (["small.pt", "--only", "limit-copy"], 2, "tools/bench.py in torchlift's repository has"),
    ],
)
def test_wrong_arguments_are_status_2_and_a_bad_file_is_1(
    args, status, says, small, capsys, monkeypatch
):
    """The command needs a file, a dtype that floats can have, and ways that there are."""
    monkeypatch.chdir(small.parent)
    small.with_name("bad.pt").write_bytes(b"junk")
    assert main(["bench", *args]) == status
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


def test_a_url_is_refused_without_its_query(capsys: pytest.CaptureFixture[str]) -> None:
    """Most loaders read no URLs, so that there is nothing to compare."""
    assert main(["bench", "http://localhost:9/m.pt?token=secret"]) != 0
    error = capsys.readouterr().err
    assert "http://localhost:9/m.pt: a URL cannot be compared" in error
    assert "secret" not in error

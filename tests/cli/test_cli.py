"""The command line: exit codes, what is on which stream, and what never happens."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_files import Call, tensor, write_zip
from damaged_files import flip
from safetensors.torch import save_file

from torchlift import cli
from torchlift import open as open_index
from torchlift.cli.output import print_json


def torchlift(*args: object) -> subprocess.CompletedProcess[str]:
    """Run the command in this process."""
    words = [*map(str, args)]
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        status = cli.main(words)
        texts = [(file.flush(), file.buffer.getvalue().decode())[1] for file in streams]
    return subprocess.CompletedProcess(words, status, *texts)


def vectors(path: Path, *keys: str) -> Path:
    """A safetensors file with a vector of two elements for each key."""
    save_file({key: torch.zeros(2) for key in keys}, path)
    return path


@pytest.fixture
def small(tmp_path) -> Path:
    """A checkpoint of three tensors."""
    return vectors(tmp_path / "small.safetensors", "a.bias", "a.weight", "b.weight")


def test_inspect_prints_every_tensor_and_the_totals(small) -> None:
    """The lines of tensors are on stdout, nothing is on stderr, the status is 0."""
    done = torchlift("inspect", small)
    assert done.returncode == 0
    assert done.stderr == ""
    assert (
        done.stdout
        == f"""{small}

format     safetensors
file size  {small.stat().st_size} B
tensors    3
elements   6
storage    24 B
dtypes     float32 (3)
locations  cpu (3)

key       size  dtype    shape
a.bias    8 B   float32  2
a.weight  8 B   float32  2
b.weight  8 B   float32  2
"""
    )


def table(*args: object) -> list[list[str]]:
    """The cells of the table that `inspect` prints last."""
    done = torchlift("inspect", *args)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.split("\n\n")[-1].splitlines()]


def test_inspect_chooses_sorts_and_descends(tmp_path) -> None:
    """--tensors, --filter, --sort and --root change what is listed, alone and together."""
    path, sizes = tmp_path / "m.pt", {"m.10.b": 1, "m.2.w": 3, "m.2.b": 1, "head": 9}
    torch.save({key: torch.zeros(size) for key, size in sizes.items()}, path)

    def keys(*args: str) -> list[str]:
        return [row[0] for row in table(path, *args)[1:]]

    assert keys("--tensors") == ["m.10.b", "m.2.w", "m.2.b", "head"]
    assert keys("--tensors", "--sort", "name") == ["head", "m.2.b", "m.2.w", "m.10.b"]
    assert keys("--tensors", "--sort", "size") == ["head", "m.2.w", "m.10.b", "m.2.b"]
    assert keys("--tensors", "--filter", "*.b") == ["m.10.b", "m.2.b"]
    assert keys("--filter", "*.b", "--filter", "head", "--tensors") == ["m.10.b", "m.2.b", "head"]
    assert keys("--sort", "size") == ["head", "m.2.w", "m.*.b"]
    assert keys("--root", "m", "--sort", "name") == ["*.b", "2.w"]
    assert table(path, "--root", "m.2")[1:] == [["w", "12", "B", "float32", "3"],
                                                ["b", "4", "B", "float32", "1"]]  # fmt: skip
    done = torchlift("inspect", path, "--root", "n", "--json")
    assert (done.returncode, done.stderr) == (1, f"torchlift: {path}: 'n': the checkpoint does not "
            "contain this container; found at the top: head, m. Pass one of these as --root, or "
            "leave --root out.\n")  # fmt: skip
    found = json.loads(done.stdout)["error"]
    assert (found["type"], found["entry"], found["file"]) == ("FormatError", "n", str(path))
    found = json.loads(torchlift("inspect", path, "--filter", "m.2*", "--json").stdout)
    assert [tensor["key"] for tensor in found["tensors"]] == ["m.2.w", "m.2.b"]
    assert found["nbytes"] == 16


def test_inspect_reads_the_values_when_it_is_asked_to(tmp_path) -> None:
    """--stats shows them as a table and as JSON, NaN and Inf apart."""
    path = tmp_path / "m.pt"
    values = torch.tensor([1.0, 3.0, math.nan, math.inf, -math.inf])
    torch.save({"w": values.bfloat16(), "nothing": torch.ones(0)}, path)
    assert table(path, "--stats", "--filter", "w")[:2] == [
        ["key", "size", "dtype", "shape", "min", "max", "mean", "std", "nan", "inf"],
        ["w", "10", "B", "bfloat16", "5", "1", "3", "2", "1", "1", "2"],
    ]
    found = json.loads(torchlift("inspect", path, "--stats", "--json").stdout)["tensors"]
    assert found[0]["stats"] == {"min": 1, "max": 3, "mean": 2, "std": 1, "nan": 1, "inf": 2}
    assert found[1]["stats"] == {
        "min": None, "max": None, "mean": None, "std": None, "nan": 0, "inf": 0
    }  # fmt: skip


def test_inspect_has_status_3_when_something_would_have_run_code(tmp_path) -> None:
    """Whatever is listed of it, and also where the whole file is refused; 0 for plain data."""
    path = tmp_path / "m.pt"
    torch.save({"model": {"w": torch.ones(2)}, "trap": Call(print, "called"), "step": 1}, path)
    for options in [], ["--json"], ["--root", "model"], ["--filter", "nothing"], ["--stats"]:
        done = torchlift("inspect", path, *options)
        shown = options in ([], ["--json"], ["--stats"])
        assert done.returncode == 3, options
        assert ("builtins.print" in done.stdout) == shown
        assert ("elsewhere in the file: builtins.print" in done.stderr) != shown, options
        assert ("no key matches 'nothing'" in done.stderr) == ("nothing" in options)
        assert "called" not in done.stdout
    torch.save(torch.nn.Linear(2, 2), path)
    done = torchlift("inspect", path)
    assert (done.returncode, done.stdout) == (3, "")
    torch.save({"w": torch.ones(2), "args": {"lr": 0.1}}, path)
    assert torchlift("inspect", path).returncode == 0
    for array, status, why in (
        (np.array(["a"]), 0, "for text"), (np.array([{}]), 3, "numpy.dtype"),
        (np.zeros(2, [("x", "f4")]), 0, ""), (np.zeros(2, [("x", "O")]), 3, ""),
    ):  # fmt: skip
        np.savez(tmp_path / "a.npz", array=array)
        done = torchlift("inspect", tmp_path / "a.npz")
        assert (done.returncode, why in done.stdout) == (status, True)


@pytest.mark.parametrize(
    ("options", "listed", "rest"),
    [([], 40, "... and 10 more lines\n"), (["--rows", "1"], 1, "... and 49 more lines\n"),
     (["--all"], 50, ""), (["--tensors"], 50, ""),
     (["--tensors", "--rows", "2"], 2, "... and 48 more tensors\n")],
    ids=str,
)  # fmt: skip
def test_inspect_lists_as_many_lines_as_asked_for(tmp_path, options, listed, rest) -> None:
    """As many as fit a screen, any number with --rows, everything with --all or --tensors."""
    path = vectors(tmp_path / "many.safetensors", *(f"layer{i:02}" for i in range(50)))
    found = torchlift("inspect", path, *options).stdout
    assert found.count("layer") == listed
    assert found.endswith(rest)
    assert ("more" in found) == bool(rest)


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04 and then junk", (2**64 - 1).to_bytes(8, "little") + b"{}", None]
)
def test_a_bad_file_is_one_line_on_stderr_and_status_1(tmp_path, content) -> None:
    """No traceback, nothing on stdout, and the line names the file, or says that there is none."""
    path = tmp_path / "bad.pt"
    if content is not None:
        path.write_bytes(content)
    done = torchlift("inspect", path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith("torchlift: ")
    assert str(path) in done.stderr
    assert ("no such file" in done.stderr) == (content is None)


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_explains_itself(name) -> None:
    """Each command has a help text of its own, and is named in the general one."""
    assert name in torchlift("--help").stdout
    done = torchlift(name, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: torchlift {name}")


def test_a_key_that_the_terminal_cannot_show_is_escaped(tmp_path) -> None:
    """With an ASCII terminal a Japanese key is printed as escapes, not as a traceback."""
    path = vectors(tmp_path / "utf8.safetensors", "重み")
    done = subprocess.run(
        [sys.executable, "-m", "torchlift", "inspect", str(path)], check=True, capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert rb"\u91cd\u307f" in done.stdout


def test_a_reader_that_leaves_early_causes_no_traceback(tmp_path) -> None:
    """`torchlift inspect ... | head` ends quietly, with the status of a broken pipe."""
    path = vectors(tmp_path / "many.safetensors", *(f"layer{i}" for i in range(20_000)))
    command = [sys.executable, "-m", "torchlift", "inspect", "--all", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_verify_says_which_bytes_are_wrong(tmp_path, small) -> None:
    """And what has no checksum; the status is for scripts, torch is not loaded."""
    path = write_zip(tmp_path / "m.pt", {"w": tensor()})
    done = torchlift("verify", path)
    assert (done.returncode, done.stderr) == (0, "")
    verdict = "every checksum is right\n  checked: 1 storage and 3 other records, 190 B"
    assert done.stdout == f"{path}: {verdict}\n"
    flip(path, "w")
    done = torchlift("verify", path, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert (found["ok"], found["failed"][0]["name"]) == (False, "data/0")
    assert "not checked: 3 storages, 24 B" in torchlift("verify", small).stdout
    assert torchlift("verify", tmp_path / "nothing").returncode == 1


def test_diff_has_the_exit_status_of_diff(tmp_path, small) -> None:
    """0 for equal, 1 for different, 2 for trouble; containers of the files can be compared."""
    other = vectors(tmp_path / "other.safetensors", "a.weight", "b.weight", "c")
    done = torchlift("diff", small, small)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "equal: 3 of 3 tensors alike, 24 B\n"
    done = torchlift("diff", small, other, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert (found["equal"], found["renamed"]) == (False, {"a.bias": "c"})
    assert torchlift("diff", small, other, "--root-a", "a", "--root-b", "b").returncode == 1
    flat = vectors(tmp_path / "flat.safetensors", "weight")
    assert "pass --root-a b or --root-b b" in torchlift("diff", small, flat, "--root", "b").stderr
    assert "Did you mean 'a'?" in torchlift("diff", small, flat, "--root", "aa").stderr
    assert torchlift("diff", small, flat, "--root-a", "b").returncode == 0
    done = torchlift("diff", small, tmp_path / "nothing")
    assert done.returncode == 2
    assert "no such file" in done.stderr
    done = torchlift("diff", small, tmp_path / "nothing", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["file"] == str(tmp_path / "nothing")
    assert torchlift("diff", small).returncode == 2


def test_an_error_is_json_too_when_json_is_asked_for(tmp_path) -> None:
    """Also where the words cannot be parsed, and where another file than the checkpoint is bad."""
    for words, status, kind in [
        (["inspect", "--json"], 2, "UsageError"),
        (["inspect", "x", "--sort", "beauty", "--json"], 2, "UsageError"),
        (["plan", "x", "--rename", "x", "--json"], 2, "UsageError"),
        (["plan", "x", "--device-map", str(tmp_path / "map"), "--json"], 1, "FileNotFoundError"),
        (["inspect", str(tmp_path / "x"), "--json"], 1, "NotFound"),
    ]:
        done = torchlift(*words)
        error = json.loads(done.stdout)["error"]
        assert (done.returncode, error["type"]) == (status, kind)
        assert error["message"] in done.stderr
        assert error.get("file") in (None, str(tmp_path / "map"), str(tmp_path / "x"))


def test_root_on_what_only_unpickling_could_rebuild_says_so(tmp_path) -> None:
    """With what is in it, and the status of a file that would run code."""
    torch.save({"model": {"w": torch.ones(2)}, "args": Namespace(w=torch.ones(2))},
               tmp_path / "x.pt")  # fmt: skip
    done = torchlift("inspect", tmp_path / "x.pt", "--root", "args")
    assert done.returncode == 3
    assert "'args': only unpickling could rebuild it, through argparse.Namespace" in done.stderr
    assert "found 1 tensor in it" in done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_a_script_with_all_commands(shell) -> None:
    """shtab makes it of the parser."""
    script = torchlift("completion", shell).stdout
    assert all(name in script for name in cli.COMMANDS)


def test_without_shtab_completion_says_what_to_install(monkeypatch, capsys) -> None:
    """It is a package of its own, and no other command needs it."""
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 2
    assert "pip install shtab" in capsys.readouterr().err


def test_a_hint_names_the_options_of_the_command_and_nothing_of_python(tmp_path, capsys) -> None:
    """What --overwrite, --exclude and --no-verify do is said in these words, and in those alone."""
    path, other = tmp_path / "a.pt", str(tmp_path / "b.pt")
    torch.save({"w": torch.ones(2), "the trap.": Call(print, "called")}, path)
    assert cli.main(["convert", str(path), other]) == 3
    assert "Leave it out: --exclude 'the trap.'." in capsys.readouterr().err
    assert cli.main(["convert", str(path), other, "--exclude", "the trap."]) == 0
    assert cli.main(["convert", str(path), other, "--exclude", "the trap."]) == 1
    assert "or pass --overwrite to replace it." in capsys.readouterr().err
    flip(path, "w")
    assert cli.main(["convert", str(path), other, "--exclude", "the trap.", "--overwrite"]) == 1
    assert "from a copy. --no-verify takes the bytes as they are." in capsys.readouterr().err


def test_a_hint_says_what_only_python_has(tmp_path) -> None:
    """A transform is no option."""
    torch.save({"w": torch.ones(2).to_sparse()}, tmp_path / "a.pt")
    done = torchlift("convert", tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert "Leave it out with --exclude w, or return tensor.to_dense() from transform= in" in (
        done.stderr
    )


def test_a_root_that_could_mean_two_containers_names_options_that_work(tmp_path) -> None:
    """The keys of both are converted as the error says."""
    state = {"a": {"x": torch.ones(2)}, "a.y": torch.ones(2)}
    torch.save(state, tmp_path / "x.pt")
    words = ["convert", tmp_path / "x.pt", tmp_path / "y.safetensors"]
    done = torchlift(*words, "--root", "a")
    assert done.returncode == 1
    assert "Leave --root out, and choose by keys: --include 'a.*' and --strip a." in done.stderr
    assert torchlift(*words, "--include", "a.*", "--strip", "a").returncode == 0
    assert list(open_index(tmp_path / "y.safetensors")) == ["x", "y"]


def test_convert_joins_several_sources(tmp_path):
    """As a shell expands a pattern. A later file wins, as in a list."""
    for name, keys in (("a", ("x", "y")), ("b", ("z",))):
        vectors(tmp_path / f"{name}.safetensors", *keys)
    sources = sorted(tmp_path.glob("*.safetensors"))
    made = torchlift("convert", *sources, tmp_path / "out.pt", "--json")
    assert made.returncode == 0, made.stderr
    assert {*open_index(tmp_path / "out.pt")} == {"x", "y", "z"}
    assert torchlift("convert", sources[0]).returncode == 2


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "--dtype", "int8"], ["convert", "--dtype", "nonsense"],
        ["convert", "--dtype", "a=cpu"], ["convert", "--format", "zip"],
        ["convert", "--max-shard-size", "abc"], ["convert", "--drop", "("],
        ["convert", "--check", "all"],
        ["inspect", "--sort", "abc"], ["inspect", "--rows", "-1"], ["inspect", "--what", "x"],
        ["diff", "--rtol", "abc"], ["bench", "--repeat", "abc"],
    ],
)  # fmt: skip
def test_a_wrong_value_of_an_option_is_wrong_usage(tmp_path, words):
    """Status 2, not the status of a bad file."""
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    command, option, value = words
    paths = [tmp_path / "m.pt"]
    paths += [tmp_path / "m.pt" if command == "diff" else tmp_path / "new.pt"] * (
        command in ("convert", "diff")
    )
    done = torchlift(command, *paths, option, value)
    assert done.returncode == 2, done.stderr
    assert value.rpartition("=")[2] in done.stderr
    assert "Traceback" not in done.stderr


def test_json_output_has_no_number_that_json_lacks(capsys) -> None:
    """nan and infinity become null, wherever they are."""
    print_json({"a": [float("nan"), 1.5, (float("inf"), 2)], "b": "é"})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5, [None, 2]], "b": "é"}


def test_inspect_sums_up_modules_to_a_depth(tmp_path: Path) -> None:
    """A line for each module, with the number and the bytes of its tensors."""
    path = tmp_path / "m.safetensors"
    save_file({f"m.{n}.w": torch.ones(2, 3) for n in range(3)} | {"head": torch.ones(1)}, path)
    lines = torchlift("inspect", path, "--depth", "1").stdout.rpartition("key")[2].split("\n")
    assert [line.split() for line in lines[1:] if line] == [
        ["head", "1", "4", "B", "float32", "1"], ["m", "3", "72", "B"],
    ]  # fmt: skip

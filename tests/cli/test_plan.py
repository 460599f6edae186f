"""``torchlift plan``: what goes where, from the shell, on a machine without the devices."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest
import torch
from small_models import saved
from torch import nn

from torchlift import cli

MODEL = """
from torch import nn

def make():
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

class Broken:
    def __init__(self):
        raise ValueError("no such thing")

def fails():
    raise RuntimeError("two\\nlines")

"""
LAYER = 16 * 17 * 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Four layers of 1088 bytes, as a wrapper saves them, beside something else."""
    state = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))).state_dict()
    model = {f"module.{key}": value for key, value in state.items()}
    return saved({"model": model, "step": 3}, tmp_path)


@pytest.fixture
def run(path: Path, capsys, monkeypatch):
    """Run the command in the file's folder, with --root and --strip; (status, output, errors)."""
    for name, text in {"mymodel": MODEL, "nosyntax": "x = 1\ndef (:\n"}.items():
        path.with_name(f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(path.parent)

    def call(*words: object, wrapped: bool = True) -> tuple[int, str, str]:
        unwrap = ["--root", "model", "--strip", "module"] if wrapped else []
        status = cli.main(["plan", *map(str, words), *unwrap])
        found = capsys.readouterr()
        return status, found.out, found.err

    return call


def test_a_checkpoint_alone_is_planned_into_budgets(run, path) -> None:
    """The table names devices that are nowhere near, with what they hold of their budgets."""
    status, out, err = run(path, "--budget", "cuda:0=4352B", "--budget", "hpu:1=1.1KB",
                           "--budget", "disk")  # fmt: skip
    assert (status, err) == (0, "")
    assert "8 tensors, 4.2 KiB: float32 (8)" in out
    assert "cuda:0: 4.2 KiB of 4.2 KiB\n    everything" in out


def test_json_has_every_number(run, path) -> None:
    """Bytes, so that a script can draw them."""
    status, out, _ = run(path, "--budget", f"cuda:0={3 * LAYER}", "--budget", "cpu=1MiB", "--json")
    data = json.loads(out)
    assert status == 0
    assert data["nbytes"] == 4 * LAYER
    assert data["devices"]["cuda:0"] == {
        "used": 2 * LAYER, "budget": 3 * LAYER, "reserved": LAYER,
    }  # fmt: skip
    assert data["device_map"] == {"0": "cuda:0", "1": "cuda:0", "2": "cpu", "3": "cpu"}
    assert data["main_device"] == "cuda:0"
    assert "plan" not in data


def test_dtypes_are_those_after_casting(run, path) -> None:
    """In general and by pattern."""
    _, out, _ = run(path, "--dtype", "bf16", "--dtype", r"^3\.=float64", "--json")
    data = json.loads(out)
    assert data["dtypes"] == {"bfloat16": 6, "float64": 2}
    assert data["nbytes"] == 3 * LAYER // 2 + 2 * LAYER
    assert data["device_map"] == {"": "cpu"}


def test_memory_of_the_host_is_compared_with_what_is_free_here(run, path) -> None:
    """Unless a budget says what another machine has."""
    _, out, _ = run(path)
    free = json.loads(run(path, "--json")[1]).get("free_bytes")
    assert (
        (free is not None) == ("\n  free memory here: " in out) == os.path.exists("/proc/meminfo")
    )
    for other in ["--budget", "cpu=1GiB"], ["--device", "cuda:0"]:
        assert "free memory here" not in run(path, *other)[1]


@pytest.mark.parametrize("given_as", ["text", "file"])
def test_a_device_map_is_json_or_a_file_of_it(run, path, given_as) -> None:
    """The longest prefix wins, as everywhere."""
    text = '{"": "cpu", "3": "cuda:7", "2.bias": "disk"}'
    if given_as == "file":
        path.with_name("map.json").write_text(text, encoding="utf-8")
        text = "map.json"
    status, out, _ = run(path, "--device-map", text, "--json")
    assert status == 0
    used = {name: device["used"] for name, device in json.loads(out)["devices"].items()}
    assert used == {"cpu": 3 * LAYER - 64, "cuda:7": LAYER, "disk": 64}


def test_with_a_model_names_and_shapes_are_checked_and_the_memory_is_estimated(run, path) -> None:
    """The module of the working folder is found; none of the devices is."""
    status, out, err = run(path, "--model", "mymodel:make", "--device", "xpu:0", "--dtype",
                           "float16", "--json")  # fmt: skip
    assert (status, err) == (0, "")
    data = json.loads(out)
    assert data["devices"]["xpu:0"]["used"] == 2 * LAYER
    assert data["plan"]["loaded"] == 8
    assert data["plan"]["bytes_to_read"] == 4 * LAYER
    assert data["plan"]["peak_bytes"] > 0
    status, out, _ = run(path, "--model", "mymodel:make", "--budget", "cuda:0")
    assert "plan: 8 tensors" in out
    assert "renamed (8)" in out


def test_a_model_that_does_not_fit_the_names_is_told_so(run, path) -> None:
    """With the way out, also where nothing fits at all."""
    words = (path, "--root", "model", "--model", "mymodel:make")
    status, _, err = run(*words, wrapped=False)
    assert status == 1
    assert "missing (8)" in err
    status, _, err = run(*words, "--no-strict", wrapped=False)
    assert status == 1
    assert "nothing in the checkpoint fits the model" in err


def test_renames_are_applied_in_order_and_keys_can_be_dropped(run, path) -> None:
    """As the functions of remap do it; a pattern may hold an equals sign."""
    _, out, _ = run(path, "--rename", r"^(\d)(?=\.)=layers.\1", "--drop", "bias$", "--json")
    assert json.loads(out)["devices"]["cpu"]["used"] == 4 * 1024
    _, out, _ = run(path, "--rename", r"^(\d)(?=\.)=layers.\1", "--budget", f"cuda:0={LAYER}",
                    "--budget", "cpu=1MB", "--no-split", "layers", "--json")  # fmt: skip
    assert json.loads(out)["device_map"] == {"": "cpu"}


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (
            ["--budget", "cuda:0=1KiB"],
            1,
            "does not fit: the tensors take 4.2 KiB, the budgets are 1.0 KiB",
        ),
        (["--budget", "cdua=1KiB"], 2, "--budget 'cdua': expected a device"),
        (["--budget", "cpu", "--budget", "cpu=1GB"], 2, "--budget: a device occurs twice"),
        (["--budget", "cpu=1KiB"], 1, "pass a smaller --dtype, or add --budget disk"),
        (["--no-split", "3"], 2, "--no-split: pass --budget"),
        (["--device-map", '{"3": "gpu"}'], 2, "--device-map 'gpu': expected a device"),
        (["--device", "gpu"], 2, "--device 'gpu': expected a device"),
        (["--budget", "cuda:0=much"], 2, "not a size such as 2GiB or 500MB: 'much'"),
        (["--device-map", '{"33": "cpu"}'], 1, "Did you mean '3'?"),
        (["--device-map", "{"], 2, "Expecting property name"),
        (["--device-map", "nowhere.json"], 1, "nowhere.json: No such file"),
        (["--device", "cpu", "--budget", "cpu"], 2, "not allowed with argument"),
        (["--dtype", "int8"], 2, "--dtype 'int8': expected a dtype of floats"),
        (["--rename", "(=x"], 2, "'(' is not a regular expression"),
        (["--rename", "x"], 2, "expected REGEX=REPLACEMENT"),
        (["--model", "mymodel"], 2, "expected MODULE:FACTORY"),
        (["--model", "mymodel:nothing"], 2, "has no attribute 'nothing'"),
        (["--budget", "cpu=1GB", "--no-split", "9"], 1, "no_split matches no class"),
        *(
            (["--ranks", "4", *words], 2, message)
            for words, message in (
                (["--device", "cpu"], "--device: not allowed with argument --ranks"),
                (["--no-split", "0"], "--no-split: pass --budget too"),
                (["--no-strict"], "--no-strict: pass --model too"),
                (["--model-args", ""], "--model-args: pass --model too"),
                (["--model", "mymodel:make"], "--ranks: leave out --model and --dtype"),
                (["--dtype", "bf16"], "--ranks: leave out --model and --dtype"),
                (["--ranks", "x"], "argument --ranks: invalid int value: 'x'"),
                (["--ranks", "0"], "--ranks 0: expected a number from 1 to 1,048,576"),
                (["--ranks", "1048577"], "--ranks 1048577: expected a number from 1 to 1,048,576"),
            )
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_a_status(run, path, words, status, message) -> None:
    """2 for arguments that make no sense, 1 for a file that does not fit."""
    found, out, err = run(path, *words)
    assert (found, out) == (status, "")
    assert message in err
    assert "Traceback" not in err
    assert "--ranks" not in words or err.count("\n") == 1 or err.startswith("usage: torchlift plan")


TWO = ["--model", "torch.nn:Linear", "--model-args", '{"in_features": 2, "out_features": 2}']


@pytest.mark.parametrize(
    ("before", "words", "ways"),
    [
        ("module.", [], ["--strip module"]),
        ("ema.module.", ["--root", "ema"], ["--root ema.module", "--strip module"]),
        ("ema.module.", ["--root", "ema.module"], []),
    ],
)
def test_a_way_out_is_spelled_as_the_command_has_it_and_works(run, tmp_path, before, words, ways):
    """Each name of a list on a line of its own; the options that it names are taken as they are."""
    state = {f"{before}{key}": value for key, value in nn.Linear(2, 2).state_dict().items()}
    path = saved({**state, "ema.step.x": torch.ones(1)} if "ema" in before else state, tmp_path)
    found, _, err = run(path, *TWO, *words, wrapped=False)
    assert found == (1 if ways else 0)
    for way in ways:
        assert way in err
        assert "\n  missing (" in err
        assert "\n  unexpected (" in err
        assert "=remap" not in err
        assert "root=" not in err
        again = [*words[2 * way.startswith("--root") :], *shlex.split(way)]
        again += ["--no-strict"] * ("ema" in before)
        assert run(path, *TWO, *again, wrapped=False)[0] == 0


def test_what_the_command_has_no_option_for_is_said_to_be_python_s(run, tmp_path) -> None:
    """In JSON, too, where the hint has a field of its own."""
    path = saved(nn.Linear(3, 2).state_dict(), tmp_path)
    _, out, err = run(path, *TWO, "--json", wrapped=False)
    assert "Pass --ignore-mismatched and --allow-missing weight to skip" in err
    assert json.loads(out)["error"]["hint"] in err
    path = saved({**nn.Linear(2, 2).state_dict(), "other": torch.ones(1)}, tmp_path)
    found, _, err = run(path, *TWO, wrapped=False)
    assert "Pass --no-strict.\n  unexpected (1): other" in err
    _, _, err = run(path, "--root", "other", wrapped=False)
    assert "Leave --root out." in err
    assert cli.main(["inspect", str(path), "--root", "other"]) == found == 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("mymodel:fails", r"RuntimeError: two lines"),
        ("mymodel:Broken", r"ValueError: no such thing"),
        ("nosyntax:make", r"SyntaxError: .* \(nosyntax\.py, line 2\)"),
        ("nomodule:make", r"ModuleNotFoundError: No module named 'nomodule'"),
        ("..mymodel:make", r"ValueError: .*"),
    ],
)
def test_what_the_named_code_raises_is_one_line(run, path, model, message) -> None:
    """Whatever it is: its type and its message."""
    status, out, err = run(path, "--model", model)
    assert (status, out) == (2, "")
    assert re.fullmatch(f"torchlift plan: --model {re.escape(model)}: {message}\n", err), err


def test_ranks_say_what_each_would_read(run, path) -> None:
    """Bytes of what --root, --drop and the other names leave, as text and as JSON."""
    status, out, err = run(path, "--ranks", "4")
    assert (status, err) == (0, "")
    assert "4 ranks read 1.1 KiB to 1.1 KiB each" in out
    _, out, _ = run(path, "--ranks", "2", "--drop", "bias$", "--json")
    assert json.loads(out)["bytes"] == [4 * 1024 // 2] * 2


@pytest.mark.parametrize("shape", [(2, 3), (5, 2)])
def test_the_way_out_for_another_shape_works(run, tmp_path, shape) -> None:
    """With the names that the message lists; without --ignore-mismatched, a name may be missing."""
    state = {**nn.Linear(2, 2).state_dict(), "weight": torch.ones(shape)}
    words = (saved(state, tmp_path), *TWO)
    _, _, err = run(*words, wrapped=False)
    found = re.search("Pass (--.*) and (--.*) to skip what has another shape", err)
    assert found
    status, out, err = run(*words, *shlex.split(" ".join(found.groups())), wrapped=False)
    assert (status, err) == (0, "")
    assert "weight: model [2, 2], checkpoint" in out
    path = saved({"bias": torch.ones(2)}, tmp_path)
    assert run(path, *TWO, "--allow-missing", "weight", wrapped=False)[0] == 0
    assert run(path, *TWO, "--allow-missing", "wieght", wrapped=False)[0] == 1

"""Start a worker module on several gloo ranks and collect what each of its checks came to."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from forked import run
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Checks = dict[str, Callable[[], None]]
SAVE, LOAD = "save", "load"
#: When a rank that waits for another gives up: sooner than the test, so that it can say where; a
#: little before, each prints where it stands.
HANGS = timedelta(seconds=300)


def run_workers(
    module: Path | str, ranks: int, out: Path, worlds: Sequence[int] = (), *arguments: object
) -> dict[str, str]:
    """Run every check of `module` on `ranks` ranks, which find all the worlds by `worlds`.

    Returns:
        Check -> what went wrong on which rank, or an empty text.
    """
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "WORLD_SIZE": str(ranks)}
    done = run(module, out, *arguments, env={**quiet, "WORLDS": " ".join(map(str, worlds))})
    found: dict[str, str] = {}
    for rank in range(ranks):
        path = out / f"{rank}.json"
        running = path.with_suffix(".running")
        at = running.read_text(encoding="utf-8") if running.exists() else "the start"
        assert path.exists(), f"rank {rank} died in {at!r}:\n{done.stdout}\n{done.stderr}"
        for check, text in json.loads(path.read_text(encoding="utf-8")).items():
            found[check] = found.get(check, "") + (f"[rank {rank}] {text}" if text else "")
    assert done.returncode == 0, done.stderr
    return found


def on(*worlds: int) -> Callable[[Callable[..., None]], Any]:
    """Make a check on ranks a test: one for each number of ranks, with the check as its only body.

    Each rank runs the check in a process of its own, which imports the test file. All checks of a
    file that were chosen run in one world. A parameter `folder` is a folder that the ranks share.
    """

    def decorate(check: Callable[..., None]) -> Any:
        file, name = Path(check.__code__.co_filename), check.__name__

        def test(ranks: int, request: pytest.FixtureRequest) -> None:
            items = [item for item in request.session.items if item.path == request.path]
            chosen = {
                item.originalname: None
                for item in items
                if getattr(item.function, "check", None) and item.callspec.params["ranks"] == ranks
            }
            assert _results_of(file, ranks, tuple(chosen))[name] == ""

        test.__name__, test.__doc__, test.__module__ = name, check.__doc__, check.__module__
        test.check = check  # type: ignore[attr-defined]
        return pytest.mark.distributed(pytest.mark.parametrize("ranks", worlds)(test))

    return decorate


@cache
def _results_of(file: Path, ranks: int, names: tuple[str, ...]) -> dict[str, str]:
    with TemporaryDirectory() as folder:
        return run_workers(
            "import ranks; ranks.main_of_file()", ranks, Path(folder), (), file, *names
        )


def main_of_file() -> None:
    """The body of a worker process of `on`: the checks of a file by name."""
    folder, file, *names = sys.argv[1:]
    spec = spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    checks: Checks = {}
    for name in names:
        check = getattr(module, name).check
        takes_folder = "folder" in signature(check).parameters
        checks[name] = partial(check, folder=Path(folder)) if takes_folder else check
    main(checks)


def run_saves_then_loads(module: Path, worlds: Sequence[int]) -> dict[int, dict[str, str]]:
    """Let each number of ranks save, then each load what all of them saved.

    The largest world comes between the two and does both, since starting it takes longest.

    Returns:
        Ranks -> check -> what went wrong on which rank, or an empty text.
    """
    *smaller, largest = worlds
    turns = [(SAVE, ranks) for ranks in smaller]
    turns += [(SAVE + LOAD, largest), *((LOAD, ranks) for ranks in smaller)]
    found: dict[int, dict[str, str]] = {ranks: {} for ranks in worlds}
    with TemporaryDirectory() as folder:
        for phases, ranks in turns:
            out = Path(folder, f"{phases}-{ranks}")
            out.mkdir()
            found[ranks] |= run_workers(module, ranks, out, worlds)
    return found


def saved_then_loaded(module: Path, worlds: Sequence[int]) -> Any:
    """Return a fixture: every check on every number of ranks, see `run_saves_then_loads`.

    Worlds that are larger than those of all tests that are to run are left out. What goes wrong in
    a smaller world is told with the largest one: it loaded what that has saved.
    """

    @pytest.fixture(scope="module", name="results")
    def fixture(request: pytest.FixtureRequest) -> dict[int, dict[str, str]]:
        chosen = [item for item in request.session.items if item.path == request.path]
        asked = {item.callspec.params["ranks"] for item in chosen if "results" in item.fixturenames}
        *smaller, largest = [ranks for ranks in worlds if ranks <= max(asked)]
        found = run_saves_then_loads(module, [*smaller, largest])
        for ranks in smaller:
            for check, text in found[ranks].items():
                found[largest][check] = found[largest].get(check, "") + text
        return found

    return fixture


def on_ranks(worlds: Sequence[int], checks: Sequence[str]) -> Callable[[Any], Any]:
    """Mark a test of one check on some number of ranks."""
    marks = (
        pytest.mark.distributed,
        pytest.mark.parametrize("ranks", worlds),
        pytest.mark.parametrize("check", checks),
    )

    def marked(test: Any) -> Any:
        for mark in reversed(marks):
            test = mark(test)
        return test

    return marked


def worlds() -> list[int]:
    """The numbers of ranks that save, in a worker of `run_saves_then_loads`."""
    return [*map(int, os.environ["WORLDS"].split())]


@cache
def cpu_mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh of this shape, or a line of all ranks: made once, since each starts process groups."""
    return init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)


def main_saves_then_loads(*, saves: Checks, loads: Checks) -> None:
    """The body of a worker process whose checks save or load, as its turn is."""
    phases = Path(sys.argv[1]).name
    main({**(saves if SAVE in phases else {}), **(loads if LOAD in phases else {})})


def main(checks: Checks) -> None:
    """The body of a worker module: it forks one process for each rank."""
    torch.set_num_threads(1)
    listener = socket.create_server(("localhost", 0))
    port = listener.getsockname()[1]
    ranks = set()
    for rank in range(int(os.environ["WORLD_SIZE"])):
        pid = os.fork()
        if not pid:
            _be_rank(rank, port, checks)
        ranks.add(pid)
    # Not in a rank: the others may still need it when that one is done. And its threads start here.
    store = dist.TCPStore(
        "localhost", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    status = 0
    while ranks:
        pid, ended = os.wait()
        ranks.remove(pid)
        if ended and not status:  # the others may wait for it
            for other in ranks:
                os.kill(other, signal.SIGKILL)
        status = status or ended
    del store
    os._exit(bool(status))


def _be_rank(rank: int, port: int, checks: Checks) -> NoReturn:
    """Run the checks as one rank, and end the process."""
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        world = int(os.environ["WORLD_SIZE"])
        store = dist.TCPStore("localhost", port, timeout=HANGS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=HANGS)
        results = {}
        path = Path(sys.argv[1]) / f"{rank}.json"
        for name, check in checks.items():
            path.with_suffix(".running").write_text(name, encoding="utf-8")
            faulthandler.dump_traceback_later(0.9 * HANGS.total_seconds())
            torch.manual_seed(0)
            try:
                check()
                results[name] = ""
            except Exception:
                results[name] = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        path.write_text(json.dumps(results), encoding="utf-8")
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # The threads of gloo and DDP may still run when the interpreter is torn down, and then abort.
    os._exit(0)

"""Start a worker module on several gloo ranks and collect what each of its checks came to."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
import torch.distributed as dist
from forked import run
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Checks = dict[str, Callable[[], None]]
#: When a rank that waits for another gives up: sooner than the test, so that it can say where; a
#: little before, each prints where it stands.
HANGS = timedelta(seconds=300)


def require_same_end(first: Any, again: Any, after: int) -> None:
    """Check that a resumed model went on as the first one, and that each rank had its own losses.

    Args:
        first: The model of the complete run, with its losses.
        again: The model that was resumed, with the losses since then.
        after: The number of losses before it was resumed.
    """
    assert again.losses == first.losses[after:]
    for one, other in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    losses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(losses, first.losses)
    assert losses[0] != losses[1]


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


def on(*worlds: int, **cases: Iterable[object]) -> Callable[[Callable[..., None]], Any]:
    """Make a check on ranks a test: one for each number of ranks, with the check as its only body.

    Each rank runs the check in a process of its own, which imports the test file. All checks of a
    file that were chosen run in one world. A parameter `folder` is a folder of this test that the
    ranks share, and `saved` is that of the functions with `saves`.

    Write the decorator twice for numbers of ranks that have other cases.

    Args:
        *worlds: The numbers of ranks.
        **cases: More parameters of the check, and the values of each: a test for each combination.
    """
    rows = {
        "-".join(map(_id_of, row)): dict(zip(cases, row, strict=True))
        for row in product(*cases.values())
    }

    def decorate(decorated: Callable[..., None]) -> Any:
        check = getattr(decorated, "check", decorated)
        file = Path(check.__code__.co_filename)

        def test(ranks: int, case: str, request: pytest.FixtureRequest) -> None:
            items = [item for item in request.session.items if item.path == request.path]
            on_ranks = [item for item in items if hasattr(item.function, "check")]
            savers = _savers_of(request.module, on_ranks)
            names = dict.fromkeys(
                (each.originalname, each.callspec.params["case"])
                for each in on_ranks
                if each.callspec.params["ranks"] == ranks
            )
            failure = _results_of(file, ranks, tuple(names), savers)[_key(check.__name__, case)]
            assert not failure, failure

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        test.__module__ = check.__module__
        params = [
            pytest.param(ranks, case, id=f"{ranks}-{case}".removesuffix("-"))
            for ranks, case in product(worlds, rows)
        ]
        params += getattr(decorated, "params", [])
        known = {**rows, **getattr(decorated, "rows", {})}
        vars(test).update(check=check, rows=known, params=params)
        return pytest.mark.distributed(pytest.mark.parametrize(("ranks", "case"), params)(test))

    return decorate


def _id_of(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def saves(*worlds: int) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Run a function on each of these numbers of ranks before the tests of its file.

    It saves into the folder that it gets, which is the `saved` of each check. Worlds that are
    larger than those of the chosen tests are left out: see `worlds`.
    """

    def mark(function: Callable[[Path], None]) -> Callable[[Path], None]:
        function.saves_on = worlds  # type: ignore[attr-defined]
        return function

    return mark


class _Saver(NamedTuple):
    """A function with `saves`, by name, and a number of ranks that it runs on."""

    ranks: int
    name: str


def _savers_of(module: object, items: Sequence[Any]) -> tuple[_Saver, ...]:
    """The functions that must save before these tests, in worlds no larger than theirs."""
    readers = [item for item in items if "saved" in signature(item.function.check).parameters]
    most = max((item.callspec.params["ranks"] for item in readers), default=0)
    return tuple(
        _Saver(ranks, name)
        for name, value in vars(module).items()
        for ranks in getattr(value, "saves_on", ())
        if ranks <= most
    )


def _key(name: str, case: str) -> str:
    return f"{name}[{case}]"


@cache
def _results_of(
    file: Path, ranks: int, names: tuple[tuple[str, str], ...], savers: tuple[_Saver, ...]
) -> dict[str, str]:
    saved = Path(_saved_by(file, savers).name)
    worlds = sorted({saver.ranks for saver in savers})
    return _run_file(file, ranks, names, saved, worlds)


@cache
def _saved_by(file: Path, savers: tuple[_Saver, ...]) -> TemporaryDirectory[str]:
    """The folder that all functions with `saves` have saved into."""
    saved = TemporaryDirectory()
    worlds = sorted({saver.ranks for saver in savers})
    for world in worlds:
        names = tuple((name, "") for ranks, name in savers if ranks == world)
        results = _run_file(file, world, names, Path(saved.name), worlds)
        assert not any(results.values()), f"{world} ranks cannot save: {results}"
    return saved


def _run_file(
    file: Path, ranks: int, names: tuple[tuple[str, str], ...], saved: Path, worlds: Sequence[int]
) -> dict[str, str]:
    flat = [part for name in names for part in name]
    with TemporaryDirectory() as folder:
        for number in range(len(names)):
            Path(folder, str(number)).mkdir()
        return run_workers(
            "import ranks; ranks.main_of_file()", ranks, Path(folder), worlds, file, saved, *flat
        )


def main_of_file() -> None:
    """The body of a worker process of `on`: the checks of a file by name."""
    folder, file, saved, *flat = sys.argv[1:]
    sys.path.insert(0, str(Path(file).parent))
    spec = spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    checks: Checks = {}
    for number, (name, case) in enumerate(zip(flat[::2], flat[1::2], strict=True)):
        function = getattr(module, name)
        check = getattr(function, "check", function)
        words = dict(function.rows[case]) if hasattr(function, "rows") else {}
        folders = {"folder": Path(folder, str(number)), "saved": Path(saved)}
        words |= {key: folders[key] for key in signature(check).parameters if key in folders}
        checks[_key(name, case)] = partial(check, **words)
    main(checks)


def worlds() -> list[int]:
    """The numbers of ranks that saved, in a check: see `saves`."""
    return [*map(int, os.environ["WORLDS"].split())]


@cache
def cpu_mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh of this shape, or a line of all ranks: made once, since each starts process groups."""
    return init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)


def bytes_read() -> int:
    """The bytes that this process has asked the kernel for, by read calls of any kind."""
    return int(Path("/proc/self/io").read_text(encoding="ascii").split()[1])


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

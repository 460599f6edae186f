"""Processes that start at once: forked from one that has imported torch.

To import torch, and what the tests use of it, takes 3 s of a core: longer than most processes of
tests work. What is about an import, or about how an interpreter ends, starts a Python of its own.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from subprocess import PIPE
from typing import IO, Any, NoReturn

_LONGEST = 1 << 17  # bytes of a request, which has the environment


class Forked:
    """A process, and what the tests use of `subprocess.Popen`.

    Args:
        program: a script, or the source text of one.
        *arguments: what it finds in ``sys.argv``.
        env: variables that it has besides those of this process.
        stdin: a file, or ``PIPE``; None is an empty one.
        stdout: the same, where None goes nowhere.
        stderr: the same.
    """

    def __init__(
        self,
        program: Path | str,
        *arguments: object,
        env: Mapping[str, str] | None = None,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
    ) -> None:
        self.returncode: int | None = None
        self.stdin, *theirs = _opened(stdin, 0)
        self.stdout, *more = _opened(stdout, 1)
        self.stderr, *last = _opened(stderr, 1)
        given = [*theirs, *more, *last]
        environment = {**os.environ, **(env or {})}
        of_file = isinstance(program, Path)
        asked = [str(program), of_file, [*map(str, arguments)], environment, os.getcwd()]
        socket.send_fds(_server(), [json.dumps(asked).encode()], given)
        for descriptor in given:
            os.close(descriptor)
        self.pid = int(_server().recv(_LONGEST))
        self._ended = os.pidfd_open(self.pid)  # nobody has waited for it yet

    def poll(self, timeout: float | None = 0) -> int | None:
        """Return the status with which it ended; None where it goes on."""
        if self.returncode is None and select.select([self._ended], [], [], timeout)[0]:
            _server().send(json.dumps(self.pid).encode())
            self.returncode = int(_server().recv(_LONGEST))
            os.close(self._ended)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return its status."""
        status = self.poll(timeout)
        if status is None:
            raise TimeoutError(f"process {self.pid} goes on after {timeout} s")
        return status

    def kill(self) -> None:
        """End it, and the processes that it has started."""
        os.killpg(self.pid, signal.SIGKILL)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self.returncode is None:
            self.kill()
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()
        self.wait()


def run(
    program: Path | str, *arguments: object, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; return its status and what it printed."""
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
        with Forked(program, *arguments, env=env, stdout=printed, stderr=errors) as process:
            process.wait()  # if the time of the test is up in it, nothing is left
        texts = [file.seek(0) or file.read() for file in (printed, errors)]
    assert process.returncode is not None
    return subprocess.CompletedProcess([str(program)], process.returncode, *texts)


def _opened(file: Any, writes: int) -> tuple[IO[str] | None, int]:
    """The end of a pipe that is ours, and the descriptor that the process gets."""
    if file is None:
        return None, os.open(os.devnull, os.O_RDWR)
    if file != PIPE:
        return None, os.dup(file.fileno())
    ends = os.pipe()
    mine, theirs = ends if writes else ends[::-1]
    return open(mine, "r" if writes else "w", encoding="utf-8"), theirs


@cache
def _server() -> socket.socket:
    """The process that forks, and ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(filter(None, path))},
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # else Ctrl-C would end it before what it has started
        )

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# ---- in that process


def _serve(asks: socket.socket) -> None:
    """Fork a process, or tell how one ended, for each request."""

    import torchlift.distributed

    torchlift.load, torchlift.save, torchlift.convert, torchlift.Keeper  # noqa: B018
    gc.collect()
    gc.freeze()  # what is imported is not walked through again and again
    warnings.resetwarnings()
    warnings.simplefilter("default")
    while True:
        request, given, *_ = socket.recv_fds(asks, _LONGEST, 3)
        if not request:
            return
        asked = json.loads(request)
        if isinstance(asked, int):
            status = os.waitpid(asked, 0)[1]
            asks.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer Pythons warn of threads, of which it has none
            pid = os.fork()
        if not pid:
            asks.close()
            _be(given, *asked)
        os.setpgid(pid, pid)
        asks.send(str(pid).encode())
        for descriptor in given:
            os.close(descriptor)


def _be(
    given: list[int],
    program: str,
    of_file: bool,
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
) -> NoReturn:
    """Be the process that runs a program."""
    status = 1
    try:
        for number, descriptor in enumerate(given):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None
        if environment.get("PYTHONWARNINGS") == "ignore":
            warnings.simplefilter("ignore")
        main = types.ModuleType("__main__")
        sys.modules["__main__"], sys.argv = main, [program if of_file else "-c", *arguments]
        source = program
        if of_file:
            main.__file__ = program
            sys.path.insert(0, str(Path(program).parent))
            source = Path(program).read_text(encoding="utf-8")
        exec(compile(source, program if of_file else "<string>", "exec"), vars(main))
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else error.code is not None
    except BaseException:
        traceback.print_exc()
    finally:
        for file in (sys.stdout, sys.stderr):
            file.flush()
        os._exit(status)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        _serve(requests)

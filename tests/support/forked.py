"""Programs in processes that start at once, forked by the zygote of `torchlift._system`.

A program that is about an import, or about how an interpreter ends, starts a Python of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from subprocess import PIPE
from typing import IO, Any, NoReturn

from torchlift._system import zygote


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
        self.stdin, self._read, name = None, None, ""
        if stdin is not None:
            self.stdin, self._read = _opened(stdin, 0)
            name = f"/proc/{os.getpid()}/fd/{self._read}"  # the process opens it by this name
        self.stdout, *more = _opened(stdout, 1)
        self.stderr, *last = _opened(stderr, 1)
        given = [*more, *last]
        variables = dict(env or {})
        filters = variables.pop("PYTHONWARNINGS", "default")  # else a new interpreter reads it
        of_file = isinstance(program, Path)
        self._child = zygote.start(
            "forked:_be", str(program), of_file, [*map(str, arguments)], filters,
            name,
            environment=variables, stdout=given[0], stderr=given[1],
        )  # fmt: skip
        for descriptor in given:
            os.close(descriptor)
        self.pid = self._child.pid
        self.returncode: int | None = None

    def poll(self, timeout: float | None = 0) -> int | None:
        """Return the status with which it ended; None where it goes on."""
        self.returncode = self._child.wait(timeout)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return its status."""
        status = self.poll(timeout)
        if status is None:
            raise TimeoutError(f"process {self.pid} goes on after {timeout} s")
        return status

    def kill(self) -> None:
        """End it, and the processes that it has started."""
        self._child.kill()

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.kill()
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()
        self.wait()
        if self._read is not None:
            os.close(self._read)


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


def _be(program: str, of_file: bool, arguments: list[str], filters: str, stdin: str) -> NoReturn:
    """Be the process that runs a program; its threads are not waited for."""
    status = 1
    if stdin:
        with open(stdin, "rb") as file:
            os.dup2(file.fileno(), 0)
    warnings.resetwarnings()
    warnings.simplefilter(filters)
    if filters != "default":  # for processes that the program starts
        os.environ["PYTHONWARNINGS"] = filters
    try:
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
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        for file in (sys.stdout, sys.stderr):
            file.flush()
        os._exit(status)

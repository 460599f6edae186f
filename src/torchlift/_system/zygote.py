"""Start child processes at once: a zygote that has imported torch forks them.

A new interpreter needs 1.4 to 4.7 s of a core to import torch, and most children work for less. The
zygote is a process that has imported torch, DTensor and DCP. It has no threads and no accelerator
in use, and forks a child in 20 ms.

A caller starts one zygote, when it first needs it. Both talk over a socket. The zygote ends when
its end of the socket closes, which happens whenever the caller ends, and takes all children along.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module, invalidate_caches
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from torchlift._system.interrupts import uninterrupted
from torchlift._system.memory import c_function, trim

#: What a zygote imports, besides all public names of torchlift.
_PRELOADED = (
    "torch",
    "torch._dynamo",  # which optimizers and FSDP2 import when they are first used: 0.4 s
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)
#: Children write UTF-8 without a buffer, so that what their own children print keeps its place.
_DEFAULTS = {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"}
#: Lines of ``/proc/thread-self/status`` that a process inherits and cannot undo.
_RIGHTS = (
    "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs",
    "Seccomp", "Seccomp_filters", "Mems_allowed_list", "THP_enabled",
)  # fmt: skip
_READY, _FORK, _REAP = b"ready", b"f", b"r"
_LONGEST = 64  # bytes of a message; a request lies in a file


class Settings(NamedTuple):
    """Settings of the caller that a forked child makes for itself. A new interpreter has them.

    Attributes:
        cores: The cores that it may use, which may be fewer than the zygote's.
        limits: Names of resource limits -> soft and hard limit.
        umask: The permissions that new files do not get.
        blocked: The signals that are held back.
        ignored: The signals that are ignored.
    """

    cores: set[int]
    limits: dict[str, tuple[int, int]]
    umask: int
    blocked: set[int]
    ignored: set[int]

    @classmethod
    def read(cls) -> Settings:
        """Return the settings of this thread."""
        return cls(
            os.sched_getaffinity(0),
            _read_limits(),
            int(_read_status()["Umask"], 8),  # os.umask would change it for all threads
            signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            {each for each in signal.valid_signals() if signal.getsignal(each) == signal.SIG_IGN},
        )


class Request(NamedTuple):
    """The request for a child process.

    Attributes:
        target: ``"module:function"``, which the child imports and calls.
        arguments: Arguments of the function, which plain pickle must be able to send.
        environment: All variables of the child.
        path: The ``sys.path`` of the child.
        folder: The working directory of the child.
        settings: The settings of a forked child. None for a new interpreter.
    """

    target: str
    arguments: tuple[Any, ...]
    environment: dict[str, str]
    path: list[str]
    folder: str
    settings: Settings | None


class Child:
    """A process that was started here. Leaving its block ends the process if it still runs."""

    pid: int

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit status, negative for a signal, or None if the child still runs.

        Args:
            timeout: Seconds to wait for the end. None waits without limit.
        """
        raise NotImplementedError

    def kill(self) -> None:
        """End the child and all that it has started, if it still runs."""
        if self.wait(0) is None:
            with suppress(ProcessLookupError):
                kill_group = getattr(os, "killpg", os.kill)  # Windows has no groups
                kill_group(self.pid, getattr(signal, "SIGKILL", signal.SIGTERM))
            self.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def start(
    target: str,
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    stdout: int,
    stderr: int,
    fork: bool = True,
    timeout: float | None = None,
) -> Child:
    """Start a process that calls a function. Its standard input is empty.

    It has the rights, the limits and the masks of this thread at the time of the call.

    Args:
        target: ``"module:function"``, which the child imports and calls.
        *arguments: Arguments of the function, sent with plain pickle.
        environment: Variables in addition to those of this process.
        stdout: A file descriptor.
        stderr: A file descriptor.
        fork: Whether the zygote may fork it. Libraries of a forked child do not read its variables
            again. A new interpreter starts all the same outside of Linux, or with an accelerator,
            which a forked process cannot use. It also starts if this thread has other rights or
            hard limits than the zygote.
        timeout: Seconds to wait until the zygote can fork. None waits without limit.

    Raises:
        TimeoutError: If the zygote is not ready in time. It will be for a later call.
    """
    variables = {**os.environ, **_DEFAULTS, **(environment or {})}
    path = [*map(str, sys.path)]  # some notebooks put a Path there
    zygote = _find_zygote(timeout) if fork else None
    settings = None if zygote is None else Settings.read()
    request = Request(target, arguments, variables, path, os.getcwd(), settings)
    if zygote is None:
        return _NewInterpreter(request, stdout, stderr)
    return _Forked(zygote, request, stdout, stderr)


def _read_limits() -> dict[str, tuple[int, int]]:
    """Return the resource limits of this process by their names."""
    import resource

    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def _read_status() -> dict[str, str]:
    """Return what the system shows of this thread. Threads may have different rights."""
    lines = _read_own("status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _read_own(name: str) -> str:
    with open(f"/proc/thread-self/{name}", encoding="utf-8") as file:
        return file.read()


def _read_rights() -> tuple[object, ...]:
    """Return what this thread passes to its children, and what a child of the zygote cannot set.

    Raises:
        OSError: If the system does not show it.
    """
    status, root, spaces = _read_status(), os.stat("/"), "/proc/thread-self/ns"
    return (
        [status.get(name) for name in _RIGHTS],
        [os.readlink(os.path.join(spaces, name)) for name in sorted(os.listdir(spaces))],
        [_read_own(name) for name in ("cgroup", "oom_score_adj")],
        (root.st_dev, root.st_ino),
        (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), os.sched_getparam(0)),
        [hard for _, hard in _read_limits().values()],
    )


def packed(content: object, what: str) -> bytes:
    """Return what another process unpickles, functions and all that they refer to by value.

    Raises:
        TypeError: some of it cannot be sent.
    """
    with io.BytesIO() as file:
        try:
            _pickler(file).dump(content)
        except Exception as error:
            raise TypeError(
                f"{what} cannot be sent to another process: {type(error).__name__}: {error}"
            ) from None
        return file.getvalue()


def _pickler(file: io.BytesIO) -> pickle.Pickler:
    """Return cloudpickle's pickler, which also sends modules of torch's own class by name.

    A function that uses `torch.distributed` and a global with the name of one of its submodules,
    such as ``config``, refers to that submodule for cloudpickle.
    """
    from cloudpickle import CloudPickler

    class Pickler(CloudPickler):  # type: ignore[misc]
        def reducer_override(self, item: object) -> object:
            if isinstance(item, ModuleType) and type(item) is not ModuleType:
                return import_module, (item.__name__,)
            return super().reducer_override(item)

    pickler: pickle.Pickler = Pickler(file)
    return pickler


def format_error(error: BaseException, *files: str) -> str:
    """Return a traceback without its first frames, as long as they are of this file or of these."""
    frames, ours = error.__traceback__, (__file__, *files)
    while frames and frames.tb_frame.f_code.co_filename in ours:
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))


# ---- the caller


class _Zygote:
    """The caller's end: it requests forks, and the exit statuses of what was forked."""

    def __init__(self, rights: tuple[object, ...]) -> None:
        self.rights = rights
        self._lock = threading.Lock()
        self._can_fork: bool | None = None  # None until it has started
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # NumPy's BLAS starts its threads when it is imported, and a fork needs a process without.
        variables = {**os.environ, **_DEFAULTS, "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                _command("serve", theirs.fileno()),
                env=variables,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the caller, which then ends the children
            )

    def await_start(self, timeout: float | None) -> bool:
        """Wait until it has started, and return whether it can fork.

        Raises:
            TimeoutError: If it has not started in time. It goes on.
        """
        end = None if timeout is None else time.monotonic() + timeout
        # Not one long wait: another thread may read the message.
        while self._can_fork is None and not _is_readable(self._socket.fileno(), 0.05):
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"the process that forks has not started within {timeout:g} s")
        with self._lock, uninterrupted():
            if self._can_fork is None:
                self._can_fork = self._socket.recv(_LONGEST) == _READY
                if not self._can_fork:
                    self.close()
        return self._can_fork

    def exchange(self, message: bytes, descriptors: list[int]) -> int:
        """Send a message with descriptors, and return the number that answers it."""
        with self._lock, uninterrupted():
            try:
                socket.send_fds(self._socket, [message], descriptors)
                answer = self._socket.recv(_LONGEST)
            except BaseException:  # the answer would be taken for that of the next message
                self.close()
                raise
        if not answer:
            raise ConnectionError("the process that forks children was killed")
        return int(answer)

    @property
    def was_killed(self) -> bool:
        """Whether it could fork, and somebody has ended it."""
        return bool(self._can_fork) and self._process.poll() is not None

    def close(self) -> None:
        """End the zygote, and with it all that it has forked."""
        self._socket.close()
        if not self._can_fork:  # it reads the socket when it has imported everything
            self._process.kill()
        self._process.wait()

    def leave(self) -> None:
        """Close this end in a fork of the caller: the zygote belongs to the caller alone."""
        self._socket.close()
        self._process.returncode = 0  # it is no child of this process, so nobody waits for it


class _Forked(Child):
    """A child of the zygote."""

    def __init__(self, zygote: _Zygote, request: Request, stdout: int, stderr: int) -> None:
        self._zygote = zygote
        self._status: int | None = None
        with tempfile.TemporaryFile() as file:
            pickle.dump(request, file)
            file.flush()
            with uninterrupted():
                self.pid = zygote.exchange(_FORK, [stdout, stderr, file.fileno()])
                if self.pid < 0:
                    raise OSError(-self.pid, os.strerror(-self.pid))
                # The number cannot be used again before the zygote reaps the child.
                self._ended = os.pidfd_open(self.pid)

    def wait(self, timeout: float | None = None) -> int | None:
        if self._status is None and _is_readable(self._ended, timeout):
            try:
                self._status = self._zygote.exchange(b"%s%d" % (_REAP, self.pid), [])
            except OSError:  # the zygote and its children are killed, not what they started
                self._status = -signal.SIGKILL
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
            os.close(self._ended)
        return self._status


def _is_readable(descriptor: int, timeout: float | None) -> bool:
    """Wait until a descriptor can be read, and return whether it can."""
    poll = select.poll()  # select() takes no descriptor above 1023
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if timeout is None else max(0, 1000 * timeout)))


class _NewInterpreter(Child):
    """A child that imports everything anew.

    Its request arrives through a pipe, which stays open: when it closes, the caller is gone.
    """

    def __init__(self, request: Request, stdout: int, stderr: int) -> None:
        self._process = subprocess.Popen(
            _command("serve_one"),
            env=request.environment,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died already, and its status tells how
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()

    def wait(self, timeout: float | None = None) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(timeout)
            assert self._process.stdin is not None
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            return status
        return None


_zygote: _Zygote | None = None
_making = threading.Lock()


def _find_zygote(timeout: float | None) -> _Zygote | None:
    """Return the zygote of this process, or None if it cannot fork. Start it if needed.

    Raises:
        TimeoutError: If it has not started in time.
    """
    global _zygote
    if sys.platform != "linux":
        return None
    try:
        rights = _read_rights()
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # a kernel from before 5.3, or a sandbox
        return None
    with _making:
        if _zygote is not None and _zygote.was_killed:
            _zygote.close()
            _zygote = None
        if _zygote is None:
            _zygote = _Zygote(rights)
            atexit.register(_end_zygote)
        zygote = _zygote
    # A child would have rights that this thread has given up, or limits that it has not.
    return zygote if zygote.rights == rights and zygote.await_start(timeout) else None


def _end_zygote() -> None:
    if _zygote is not None:
        _zygote.close()


def _leave_zygote() -> None:
    global _zygote, _making
    _making = threading.Lock()
    if _zygote is not None:
        zygote, _zygote = _zygote, None
        zygote.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_zygote)


def _command(function: str, *arguments: int) -> list[str]:
    """Return a command that calls a function of this file, found as the caller found it."""
    code = (
        f"import sys; sys.path[:] = {[*map(str, sys.path)]!r}; sys.argv = ['-c']; "
        f"from {__name__} import {function}; {function}({', '.join(map(str, arguments))})"
    )
    return [sys.executable, "-c", code]


# ---- the zygote


def serve(descriptor: int) -> NoReturn:
    """Fork a child for each request, until the socket closes."""
    import torch

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, children would leave no status
    requests = socket.socket(fileno=descriptor)
    if torch.accelerator.is_available():  # asking already makes it unusable after a fork
        os._exit(1)
    _preload()
    requests.send(_READY)
    running: set[int] = set()
    try:
        while (given := _answer(requests, running)) is None:
            pass
    except OSError:  # the caller has ended
        given = []
    if given:
        _be_child(given)
    for pid in running:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)


def _answer(requests: socket.socket, running: set[int]) -> list[int] | None:
    """Handle one message.

    Returns:
        In a new child the descriptors of its request. After the last message an empty list.
        Otherwise None.
    """
    zygote = os.getpid()
    message, descriptors, *_ = socket.recv_fds(requests, _LONGEST, 3)
    if not message:
        return []
    if message.startswith(_REAP):
        pid = int(message[1:])
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        running.discard(pid)
        requests.send(str(status).encode())
        return None
    try:
        pid = os.fork()
    except OSError as error:
        pid = -(error.errno or 1)
    if pid > 0:
        with suppress(PermissionError):  # the child has done so, and runs another program already
            os.setpgid(pid, pid)
        running.add(pid)
    elif pid == 0:
        os.setpgid(0, 0)
        requests.close()
        c_function("prctl")(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die when the zygote dies
        if os.getppid() != zygote:
            os._exit(1)
        return descriptors
    for each in descriptors:
        os.close(each)
    requests.send(str(pid).encode())
    return None


def _preload() -> None:
    """Import what most children need, and put it where no collection looks at it again."""
    for name in _PRELOADED:
        import_module(name)
    package = import_module(__name__.partition(".")[0])
    for name in dir(package):
        getattr(package, name)
    for name in dir(package.distributed):
        getattr(package.distributed, name)
    gc.collect()
    gc.freeze()
    trim()


def _be_child(descriptors: list[int]) -> NoReturn:
    """Be the process that was requested, after the fork."""
    import resource

    import torch

    *standard, file = descriptors
    for number, given in enumerate(standard, 1):
        os.dup2(given, number)
        os.close(given)
    with open(file, "rb") as opened:
        opened.seek(0)
        request: Request = pickle.load(opened)
    assert request.settings is not None
    cores, limits, umask, blocked, ignored = request.settings
    os.sched_setaffinity(0, cores)
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, name), limit)
    os.umask(umask)
    for number in ignored ^ Settings.read().ignored:
        heard = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else heard)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    os.environ.clear()
    os.environ.update(request.environment)
    time.tzset()
    tempfile.tempdir = None
    sys.modules["__main__"] = ModuleType("__main__")
    # As in new processes, no two of which draw the same numbers. Python's own does it by itself.
    torch.default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    threads = request.environment.get("OMP_NUM_THREADS", "")  # which torch read in the zygote
    count = int(threads) if threads.isdecimal() else 0
    torch.set_num_threads(min(count or len(cores), len(cores)))
    _end(_call(request))


def _end(status: int) -> NoReturn:
    """End as an interpreter does, but for freeing its memory.

    To free what it shares with the zygote takes 0.2 s, because each reference that goes copies its
    page.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # closed, or nobody reads it
            stream.flush()
    os._exit(status)


# ---- a new interpreter


def serve_one() -> None:
    """Handle the request on stdin, and end when the caller ends."""
    pipe = os.dup(0)
    request = pickle.load(sys.stdin.buffer)
    with open(os.devnull, "rb") as empty:  # the function is to see nothing of the pipe
        os.dup2(empty.fileno(), 0)
    threading.Thread(target=_leave_with_the_caller, args=[pipe], daemon=True).start()
    sys.exit(_call(request))


def _leave_with_the_caller(pipe: int) -> NoReturn:
    os.read(pipe, 1)
    if hasattr(os, "killpg"):
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _call(request: Request) -> int:
    """Call the function and return the exit status. An error prints its traceback on stderr."""
    os.chdir(request.folder)
    sys.path[:] = request.path
    invalidate_caches()
    module, _, name = request.target.partition(":")
    try:
        getattr(import_module(module), name)(*request.arguments)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        print(format_error(error), end="", file=sys.stderr)
        return 1
    return 0

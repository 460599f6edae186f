"""Let a shell start the `torchlift` command as a fork of a process that has imported torch.

The pages run it 26 times, and each new interpreter would import torch for 1.3 s.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from torchlift._system.memory import c_function
from torchlift.cli import main

CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect({name!r})
    request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)])
    socket.send_fds(server, [request.encode()], [0, 1, 2])
    sys.exit(int(server.recv(8) or 1))
"""
LONGEST = 1 << 17  # bytes of a request: its words, and all variables


def put_first_in_path(folder: Path) -> None:
    """Write the command into a folder, and serve it until this process ends."""
    name = f"\0torchlift-{os.getpid()}"  # of no file, whose name could be too long
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.bind(name)
    server.listen()
    caller = os.getpid()
    if not os.fork():
        _serve(server, caller)
    server.close()
    command = folder / "torchlift"
    command.write_text(CLIENT.format(python=sys.executable, name=name), encoding="utf-8")
    command.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([str(folder), os.environ["PATH"]])


def _serve(server: socket.socket, caller: int) -> NoReturn:
    """Fork a command for each connection."""
    c_function("prctl")(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die when the caller dies
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a command
    while os.getppid() == caller:
        connection, _ = server.accept()
        if not os.fork():
            _be_command(connection)
        connection.close()
    os._exit(0)


def _be_command(connection: socket.socket) -> NoReturn:
    """Be the process of a command, with the folder, variables and descriptors of the shell's."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    status = 1
    try:
        request, descriptors, *_ = socket.recv_fds(connection, LONGEST, 3)
        words, folder, variables = json.loads(request)
        for number, given in enumerate(descriptors):
            os.dup2(given, number)
            os.close(given)
        # Of the caller's own, Python remembers whether they can seek.
        sys.stdin = os.fdopen(0, encoding="utf-8")
        sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8") for number in (1, 2))
        os.chdir(folder)
        os.environ.clear()
        os.environ |= variables
        sys.argv = ["torchlift", *words]
        status = main(words)
        threading._shutdown()  # type: ignore[attr-defined]
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(BrokenPipeError):
                stream.flush()
        connection.send(str(status).encode())
        os._exit(status)

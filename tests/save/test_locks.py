"""A save that waits says for whom, ends with Ctrl-C, and never waits for this process itself."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

import pytest
from forked import Forked
from limits import limits
from save_states import number_of, state_of

import torchlift
from torchlift import CheckpointError

INDEX = "x.safetensors.index.json"
#: Holds the lock of a folder until its standard input ends.
HOLDER = """
import fcntl, os, sys
folder = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(folder, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def save_sharded(number: float, folder: Path) -> None:
    """Save into several files of one folder."""
    torchlift.save(state_of(number), folder / INDEX, max_shard_size=40)


def save_dcp(number: float, folder: Path) -> None:
    """Save a DCP checkpoint."""
    torchlift.save(state_of(number), folder, format="dcp")


def convert(number: float, folder: Path) -> None:
    """Convert a file of another folder."""
    source = folder.with_suffix(".pt")
    torchlift.save(state_of(number), source)
    torchlift.convert(source, folder / INDEX, max_shard_size=40, overwrite=True)


Save = Callable[[float, Path], None]
SAVES = [save_sharded, save_dcp, convert]


def parts(folder: Path) -> list[str]:
    """Names of temporary files."""
    return [name for name in os.listdir(folder) if name.endswith(".part")]


@contextmanager
def told(tell: Callable[[str], object]) -> Iterator[None]:
    """Call something with each warning, when it comes."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: tell(str(message))
        yield


@limits(patience=0.05)
@pytest.mark.parametrize("save", SAVES)
def test_a_save_that_waits_for_another_process_names_it(save: Save, tmp_path: Path) -> None:
    """Once: folder, time, process and host; it ends when that process unlocks."""
    folder = tmp_path / "run"
    save(1, folder)
    seen: list[str] = []
    with Forked(HOLDER, folder, stdin=PIPE, stdout=PIPE) as holder:
        assert holder.stdout.readline() == "locked\n"

        def tell(message: str) -> None:
            seen.append(message)
            holder.stdin.close()

        with told(tell):
            save(2, folder)
    (message,) = seen
    for word in (f"{folder}:", "since ", f"process {holder.pid} on {os.uname().nodename}"):
        assert word in message
    assert number_of(folder) == 2
    assert not parts(folder)


@limits(patience=0.05)
@pytest.mark.parametrize("save", SAVES)
def test_ctrl_c_ends_a_wait_and_the_next_save_works(save: Save, tmp_path: Path) -> None:
    """The older checkpoint is in place, and what was begun is gone after the next save."""
    folder = tmp_path / "run"
    save(1, folder)
    kept = []
    with Forked(HOLDER, folder, stdin=PIPE, stdout=PIPE) as holder:
        assert holder.stdout.readline() == "locked\n"
        with told(lambda _: signal.raise_signal(signal.SIGINT)):
            try:
                save(2, folder)
            except KeyboardInterrupt as interrupt:
                kept.append(interrupt)
        holder.stdin.close()
    assert kept
    assert number_of(folder) == 1
    save(3, folder)
    assert number_of(folder) == 3
    assert not parts(folder)


def test_threads_that_save_to_one_folder_take_turns(tmp_path: Path) -> None:
    """All of them end, and the last one's checkpoint is whole."""
    start = threading.Barrier(3)

    def run(number: int) -> None:
        start.wait()
        for _ in range(4):
            save_sharded(number, tmp_path)

    with ThreadPoolExecutor(3) as pool:
        assert [*pool.map(run, range(3))] == [None] * 3
    assert number_of(tmp_path) in (0, 1, 2)
    assert not parts(tmp_path)


def test_a_signal_handler_that_interrupts_a_save_to_its_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for itself. The way out: it sets a flag, and the program saves later."""
    errors: list[str] = []

    def handle(*_: object) -> None:
        try:
            save_sharded(2, tmp_path)
        except CheckpointError as error:
            errors.append(str(error))

    replace, before = os.replace, signal.signal(signal.SIGUSR1, handle)

    def signalled(old: str, new: str) -> None:
        if str(new).endswith(INDEX):
            signal.raise_signal(signal.SIGUSR1)
        replace(old, new)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", signalled)
            save_sharded(1, tmp_path)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "Set a flag in the handler, and save after the first save has ended." in errors[0]
    assert number_of(tmp_path) == 1
    save_sharded(3, tmp_path)
    assert number_of(tmp_path) == 3
    assert not parts(tmp_path)

"""The script of docs/cluster.md, started as the page says, killed, and started again."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import torchlift

pytestmark = pytest.mark.slow


DOCS = Path(__file__).resolve().parents[2] / "docs"
#: The program that torchrun is for, and what SLURM has: one node, which needs no other program.
BIN = {
    "torchrun": f'exec "{sys.executable}" -m torch.distributed.run "$@"',
    "srun": 'exec "$@"',
    "scontrol": "echo localhost",
}
STEPS, EVERY, BATCH, WIDTH, LAYERS = 60, 5, 16, 32, 2


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the page, as a reader saves them, and a full checkpoint."""
    folder = tmp_path_factory.mktemp("cluster")
    for path in DOCS.glob("cluster*"):
        shutil.copy(path, folder)
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    for name, line in BIN.items():
        (bin_folder / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (bin_folder / name).chmod(0o755)
    return folder


def launch(
    place: Path, command: str, until: int = STEPS, end: Callable[[int], None] | None = None
) -> tuple[list[str], int]:
    """Run a line of the page until a step is printed, end it in some way, and wait.

    Returns:
        The lines that it printed, and its exit status.
    """
    path = [str(place / "bin"), os.environ.get("PATH", "")]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port: int = free.getsockname()[1]
    env = {
        **os.environ,
        "PATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "OUT": "run",
        "SLURM_JOB_ID": str(port - 20000),
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NNODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
    }
    with (
        open(place / "stderr", "w+", encoding="utf-8") as errors,
        subprocess.Popen(
            ["bash", "-c", f"exec {command}"],
            cwd=place,
            env=env,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip())
            if end is not None and line.startswith(f"step {until} "):
                end(process.pid)
        status = process.wait(60)
        errors.seek(0)
        assert end is not None or status == 0, errors.read()
    return lines, status


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill_all(pid: int) -> None:
    """End torchrun and its ranks as the loss of a machine does: without a word."""
    for each in (pid, *children(pid)):
        os.kill(each, signal.SIGKILL)


def preempt(pid: int, number: int = signal.SIGTERM) -> None:
    """Send what a scheduler sends before it takes a machine, to all processes of the job's step.

    The workers of the loaders get it first. The ranks stand still until they have got it: else they
    might be done before.
    """
    while b"torch.distributed.run" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        (pid,) = children(pid)
    ranks = children(pid)
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    # Of two signals that wait, the kernel delivers the one with the lower number first.
    wait_for(ranks, r"^State:\s*T")
    workers = [worker for rank in ranks for worker in children(rank)]
    assert len(workers) == 2 * len(ranks)
    for each in (*workers, *ranks, pid):
        os.kill(each, number)
    bits = {signal.SIGTERM: r"[4-7c-f]\w{3}", signal.SIGUSR1: r"[2367abef]\w{2}"}  # 14 and 9
    wait_for(ranks, rf"^ShdPnd:\s*\w*{bits[signal.Signals(number)]}$")
    for rank in ranks:
        os.kill(rank, signal.SIGCONT)


def wait_for(processes: list[int], pattern: str) -> None:
    """Return when the status of each process has a line that matches."""
    paths = [Path(f"/proc/{pid}/status") for pid in processes]
    while not all(re.search(pattern, path.read_text(), re.MULTILINE) for path in paths):
        time.sleep(0.01)


def losses(lines: list[str]) -> dict[int, float]:
    found = [line.split() for line in lines if line.startswith("step ")]
    return {int(step): float(loss) for _, step, _, loss in found}


@pytest.mark.distributed
def test_a_run_that_is_killed_and_preempted_ends_as_one_that_never_stopped(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed on two ranks, preempted under SLURM's script, ended on one, read by one process."""
    monkeypatch.syspath_prepend(str(place))
    import cluster_train

    page = DOCS.joinpath("cluster.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^(torchrun --standalone (?:.*\\\n)*.*)$", page, re.MULTILINE)
    line = " ".join(lines.replace("\\\n", " ").split())
    sizes = f"--steps {STEPS} --every {EVERY} --show 1"
    sizes += f" --batch {BATCH} --width {WIDTH} --layers {LAYERS}"
    assert line.endswith(f"cluster_train.py --out run {sizes}")
    torch.manual_seed(1)
    model = cluster_train.build(WIDTH, LAYERS)
    torch.save(model.state_dict(), place / "full.pt")

    killed, status = launch(place, f"{line} --weights full.pt", 13, kill_all)
    assert status == -signal.SIGKILL
    assert killed[0] == "from step 0 on 2 x cpu"

    script = f"bash cluster.sbatch {sizes} --weights full.pt"
    preempted, status = launch(place, script, 24, preempt)
    assert status != 0
    first = re.fullmatch(r"from step (5|10) on 2 x cpu", preempted[0])
    assert first
    before, after = losses(killed), losses(preempted)
    both = before.keys() & after.keys()
    assert both >= {11, 12, 13}
    assert {step: before[step] for step in both} == {step: after[step] for step in both}

    alone = line.replace("--nproc-per-node 2", "--nproc-per-node 1")
    ended, _ = launch(place, f"{alone} --weights full.pt")
    last = max(after)
    assert ended[0] == f"from step {last} on 1 x cpu"
    assert 24 <= last < STEPS

    straight = {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(STEPS):
        inputs, targets = cluster_train.batch(step, BATCH, WIDTH)
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        straight[step + 1] = loss.item()
    assert before | after | losses(ended) == pytest.approx(straight, rel=1e-5)

    found = torchlift.skeleton(cluster_train.build, WIDTH, LAYERS)
    torchlift.load(found, place / "run" / "model.safetensors")
    for got, expected in zip(found.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    monkeypatch.chdir(place)
    read = runpy.run_path("cluster_read.py")["model"]
    assert torchlift.diff(read.state_dict(), found.state_dict()).equal


@pytest.mark.distributed
def test_a_run_that_gets_sigusr1_saves_and_resumes(place: Path) -> None:
    """To all processes, as some clusters send it: torchrun must handle it, as the page says."""
    page = DOCS.joinpath("cluster.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"^(torchrun --signals-to-handle (?:.*\\\n)*.*)$", page, re.MULTILINE)
    sizes = f"--steps {STEPS} --every 50 --show 1 --workers 2"
    sizes += f" --batch {BATCH} --width {WIDTH} --layers {LAYERS}"
    line = " ".join(lines.replace("\\\n", " ").split()).replace("--out run", f"--out usr1 {sizes}")
    stopped, status = launch(place, line, 12, partial(preempt, number=signal.SIGUSR1))
    assert status != 0
    last = max(losses(stopped))
    assert 12 <= last < 50
    resumed, status = launch(place, line)
    assert status == 0
    assert resumed[0] == f"from step {last} on 2 x cpu"

"""How much memory is free: the machine's, or less where a container or a job has a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchlift._system.memory import free_memory

MIB = 2**20


def make(root: Path, files: dict[str, str]) -> str:
    """Write the files that a kernel would show."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def machine(available: int, groups: str) -> dict[str, str]:
    """A machine with so many MiB available, and the line of its cgroup."""
    meminfo = f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable:   {available * 1024} kB\n"
    return {"proc/meminfo": meminfo, "proc/self/cgroup": groups}


def group(folder: str, limit: str, used: int, cached: int = 0) -> dict[str, str]:
    """A cgroup of version 2, sizes in MiB."""
    stat = f"anon 5\nfile 7\ninactive_file {cached * MIB}\nactive_file {MIB}\n"
    files = {"memory.max": limit, "memory.current": str(used * MIB), "memory.stat": stat}
    return {f"sys/fs/cgroup/{folder}{name}": text for name, text in files.items()}


_TOP = "sys/fs/cgroup/memory/memory"
#: What holds -> the files of a kernel, and the free memory in MiB.
MACHINES: dict[str, tuple[dict[str, str], int]] = {
    "without a limit it is what the machine has": (
        machine(900, "0::/job\n") | group("job/", "max\n", 10), 900
    ),
    "a limit counts": (machine(900, "0::/\n") | group("", str(500 * MIB), 300), 201),
    "the page cache of a limit is free": (
        machine(900, "0::/\n") | group("", str(500 * MIB), 300, 100), 301
    ),
    "the machine may still have less": (
        machine(150, "0::/\n") | group("", str(500 * MIB), 300, 100), 150
    ),
    "the tightest group around the process counts": (  # SLURM limits the job, not its steps
        machine(900, "0::/slurm/job/step\n") | group("slurm/job/", str(100 * MIB), 40)
        | group("slurm/job/step/", "max", 30) | group("slurm/", str(400 * MIB), 350), 51,
    ),
    "a path of the host is the container's own folder": (  # Docker, version 1, without namespaces
        machine(900, "9:name=systemd:/x\n4:memory:/docker/0123\n3:cpu:/docker/0123\n") | {
            f"{_TOP}.limit_in_bytes": f"{200 * MIB}\n", f"{_TOP}.usage_in_bytes": f"{150 * MIB}\n",
            f"{_TOP}.stat": f"inactive_file 0\ntotal_inactive_file {20 * MIB}\n",
        }, 70,
    ),
    "more in use than a limit that was lowered leaves nothing": (
        machine(900, "0::/\n") | group("", str(100 * MIB), 300), 0
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", MACHINES)
def test_what_is_free_is_what_the_process_may_still_take(what: str, tmp_path: Path) -> None:
    """The kernel drops pages of files before it kills."""
    files, free = MACHINES[what]
    assert free_memory(make(tmp_path, files)) == free * MIB


def test_a_system_that_does_not_say_is_not_guessed(tmp_path: Path) -> None:
    """Without ``/proc``; and without cgroups the machine's number is the answer."""
    assert free_memory(str(tmp_path)) is None
    files = machine(900, "")
    del files["proc/self/cgroup"]
    assert free_memory(make(tmp_path, files)) == 900 * MIB


def test_this_machine_says(tmp_path: Path) -> None:
    """The real files, where there are any."""
    found = free_memory()
    if not Path("/proc/meminfo").exists():
        assert found is None
    else:
        assert found is not None
        assert 0 < found < 2**50

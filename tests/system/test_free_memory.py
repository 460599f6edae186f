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


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    """The group at the top has no file of a limit, and that of the job has none that counts."""
    files = machine(900, "0::/job\n") | group("job/", "max\n", 10)
    assert free_memory(make(tmp_path, files)) == 900 * MIB


@pytest.mark.parametrize(
    ("available", "cached", "free"), [(900, 0, 201), (900, 100, 301), (150, 100, 150)]
)
def test_a_limit_counts_and_its_page_cache_is_free(
    tmp_path: Path, available: int, cached: int, free: int
) -> None:
    """The kernel drops pages of files before it kills; the machine may still have less."""
    files = machine(available, "0::/\n") | group("", str(500 * MIB), 300, cached)
    assert free_memory(make(tmp_path, files)) == free * MIB


def test_the_tightest_of_the_groups_around_the_process_counts(tmp_path: Path) -> None:
    """SLURM limits the job, and leaves its steps free."""
    files = machine(900, "0::/slurm/job/step\n")
    files |= group("slurm/job/", str(100 * MIB), 40) | group("slurm/job/step/", "max", 30)
    files |= group("slurm/", str(400 * MIB), 350)
    assert free_memory(make(tmp_path, files)) == 51 * MIB


def test_a_path_of_the_host_is_the_container_s_own_folder(tmp_path: Path) -> None:
    """Docker without a namespace for cgroups, version 1: its limit is at the top."""
    top = "sys/fs/cgroup/memory/memory"
    files = machine(900, "9:name=systemd:/x\n4:memory:/docker/0123\n3:cpu:/docker/0123\n")
    files |= {f"{top}.limit_in_bytes": f"{200 * MIB}\n", f"{top}.usage_in_bytes": f"{150 * MIB}\n"}
    files |= {f"{top}.stat": f"inactive_file 0\ntotal_inactive_file {20 * MIB}\n"}
    assert free_memory(make(tmp_path, files)) == 70 * MIB


def test_more_in_use_than_the_limit_leaves_nothing(tmp_path: Path) -> None:
    """A limit that was lowered."""
    files = machine(900, "0::/\n") | group("", str(100 * MIB), 300)
    assert free_memory(make(tmp_path, files)) == 0


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

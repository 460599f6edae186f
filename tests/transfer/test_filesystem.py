"""`is_network`: local disks map, network file systems read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from small_models import saved
from torch import nn

import torchlift
from torchlift._plan import decide as steps
from torchlift._transfer import files as filesystem

LINE = "36 25 {device} / {mount} rw,relatime shared:1 master:2 - {kind} server:/export rw\n"


@pytest.fixture
def mounted(tmp_path, monkeypatch):
    """Pretend that a folder lies on a file system of some kind."""

    def mount(kind: str, *, broken: str = "") -> Path:
        number = os.stat(tmp_path).st_dev
        device = f"{os.major(number)}:{os.minor(number)}"
        table = tmp_path / "mountinfo"
        table.write_text(LINE.format(device=device, mount=tmp_path, kind=kind) + broken)
        monkeypatch.setattr(filesystem, "_MOUNTS", str(table))
        filesystem.is_network.cache_clear()
        return tmp_path

    yield mount
    filesystem.is_network.cache_clear()


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "lustre", "cifs", "ceph", "fuse", "fuse.sshfs"])
def test_network_file_systems_are_recognised(mounted, kind):
    """Kernel clients and everything in user space count as a network."""
    assert filesystem.is_network(mounted(kind))


@pytest.mark.parametrize("kind", ["ext4", "xfs", "tmpfs", "overlay", "fuseblk", "nfsd", "btrfs"])
def test_local_file_systems_are_recognised(mounted, kind):
    """Disks, memory and a local disk that is driven from user space count as local."""
    assert not filesystem.is_network(mounted(kind))


def test_automatic_source_reads_on_a_network_and_maps_on_a_disk(mounted):
    """A page fault over a network is a round trip, so there the weights are read."""
    path = saved(nn.Linear(2, 2).state_dict(), mounted("ext4"))
    model = torchlift.skeleton(nn.Linear, 2, 2)
    assert set(torchlift.plan(model, path).source.values()) == {"mmap"}
    mounted("nfs4")
    made = torchlift.plan(model, path)
    assert set(made.source.values()) == {"read"}
    assert made.bytes_to_read == 24
    assert set(torchlift.plan(model, path, source="mmap").source.values()) == {"mmap"}
    torchlift.load(model, path)
    assert torch.equal(model.weight, torch.load(path)["weight"])


def test_a_link_to_another_file_system_counts_as_what_it_leads_to(tmp_path, monkeypatch):
    """As the caches of model hubs have them: links on a disk, files behind a network."""
    (tmp_path / "far").mkdir()
    link = tmp_path / "link.pt"
    link.symlink_to(saved(nn.Linear(2, 2).state_dict(), tmp_path / "far"))
    far = os.path.realpath(tmp_path / "far")
    monkeypatch.setattr(steps, "is_network", lambda path: os.path.realpath(path).startswith(far))
    plan = torchlift.plan(torchlift.skeleton(nn.Linear, 2, 2), link)
    assert set(plan.source.values()) == {"read"}

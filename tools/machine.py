"""Describe the machine that a measurement ran on."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def describe(packages: Sequence[str]) -> dict[str, Any]:
    """Describe the machine as plain data: cores, memory, system and versions."""
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not everywhere
        memory = 0
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    system = f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}"
    return {"cores": cores, "memory": memory, "system": system, "versions": versions}

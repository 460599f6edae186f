"""Intersphinx inventories from the readable lists in ``docs/_inventories``.

The site is built without a network and with every unresolved name an error. So the names of other
projects that we may refer to are listed by hand, one per line, and packed here into the format that
intersphinx reads.
"""

from __future__ import annotations

import zlib
from pathlib import Path


def pack(source: Path, target_dir: Path) -> str:
    """Write ``source`` as an inventory into ``target_dir`` and return its path."""
    lines = []
    for number, line in enumerate(source.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        fields = line.split()
        if len(fields) != 3:
            raise ValueError(f"{source.name}:{number}: expected 'role name uri', found {line!r}")
        role, name, uri = fields
        lines.append(f"{name} py:{role} 1 {uri.replace('@', name)} -\n")
    header = (
        "# Sphinx inventory version 2\n"
        f"# Project: {source.stem}\n"
        "# Version: \n"
        "# The remainder of this file is compressed using zlib.\n"
    )
    target_dir.mkdir(parents=True, exist_ok=True)
    target = target_dir / f"{source.stem}.inv"
    target.write_bytes(header.encode() + zlib.compress("".join(lines).encode()))
    return str(target)

"""A server that tests of several formats ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from range_server import RangeServer, serving


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    """A server of what is in the folder ``served``."""
    (tmp_path / "served").mkdir(exist_ok=True)
    with serving(tmp_path / "served") as state:
        yield state

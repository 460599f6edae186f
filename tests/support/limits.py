"""The sizes and times at which the package changes its way, so that a test can use small ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

#: Name -> where the package keeps it.
PLACES = {
    "staged": "torchlift._transfer.reading._STAGED",  # bytes of one read of values that are cast
    "direct": "torchlift._transfer.reading._DIRECT",  # bytes of one read into the destination
    "close": "torchlift._transfer.reading._CLOSE",  # bytes between rows that are mapped together
    "past_cache": "torchlift._transfer.direct._SMALL",  # bytes from which O_DIRECT is tried
    "slow_page": "torchlift._transfer.pages._SLOW",  # seconds for one huge page
    "together": "torchlift._load.fetch._BATCH",  # bytes that are read before they are placed
    "at_once": "torchlift._save.blocks.FEW",  # bytes of a tensor that is not written in blocks
    "patience": "torchlift._transfer.write._PATIENCE",  # seconds until a wait for a lock is told
    "written": "torchlift._save.files._BLOCK",  # bytes of one write into a file of a mesh
    "verified": "torchlift.formats.integrity._BATCH",  # bytes that a thread verifies at a time
    "first_request": "torchlift._store.http.HEAD",  # bytes of the first request to a URL
    "pause": "torchlift._store.url._FIRST_PAUSE",  # seconds before a second try
    "window": "torchlift.formats.source._WINDOW",  # bytes of a request for a header
    "behind": "torchlift.formats.source._BEHIND",  # bytes behind a range that are requested, too
    "gap": "torchlift.formats.source._GAP",  # bytes between ranges that one request joins
}


@contextmanager
def limits(**values: float) -> Iterator[None]:
    """Replace some of them in a block, or in a test that this decorates."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(PLACES[name], value)
        yield

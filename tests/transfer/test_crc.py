"""The sum of many bytes: the one that zlib has of them, however they are divided."""

from __future__ import annotations

import random
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchlift._transfer import Folder
from torchlift._transfer import crc as crc_module
from torchlift.formats import register_of, whole_crc

_RING = 8 * 91_639
CONTENT = random.Random(0).randbytes(4 * _RING + 13)


def crc32(folder: Folder, content: bytes, block: int) -> int:
    """The checksum of bytes that come in blocks."""
    whole = memoryview(content)
    blocks = [whole[start : start + block] for start in range(0, len(content), block)]
    return whole_crc(len(content), [folder(blocks)])


@pytest.mark.parametrize(
    "nbytes", [0, 1, _RING - 1, _RING, _RING + 1, 8 * 41_678 + _RING, 3 * _RING + 8, len(CONTENT)]
)
@pytest.mark.parametrize("block", [_RING, _RING + 8, _RING + 3, 2 << 20, 8 << 20, 1000])
def test_any_bytes_have_the_sum_of_zlib(nbytes, block) -> None:
    """Also where a block ends within a word; and one object sums up many, one after the other."""
    folder = Folder()
    for start in (0, 5):
        content = CONTENT[start : start + nbytes]
        assert crc32(folder, content, block) == zlib.crc32(content)


def test_threads_share_one_object() -> None:
    """Each has its own ring."""
    folder, whole = Folder(), memoryview(CONTENT)
    ranges = [whole[n : n + 3 * _RING] for n in range(0, 16 * 999, 999)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda each: folder([each]), ranges))
    assert found == [register_of([each]) for each in ranges]


def test_without_numpy_zlib_sums_up(monkeypatch) -> None:
    """torch runs without it, too."""
    monkeypatch.setattr(crc_module, "np", None)
    assert crc32(Folder(), CONTENT, 2 << 20) == zlib.crc32(CONTENT)


def test_what_is_left_by_an_error_counts_for_nothing_that_follows() -> None:
    """A file that ends early is one error, and the next one is summed up anew."""
    folder, whole = Folder(), memoryview(CONTENT)

    def ending():
        yield whole[:_RING]
        raise OSError("the file ends early")

    with pytest.raises(OSError, match="ends early"):
        folder(ending())
    assert folder([whole]) == register_of([whole])

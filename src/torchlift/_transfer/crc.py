"""Sums up many bytes with NumPy's exclusive or, four times as fast as zlib does.

The polynomial of CRC-32 divides x^91639 + x^41678 + 1. Squares over GF(2) have no mixed terms, so
squared six times it divides the same of words of 64 bits in place of bits: a word may be left out
where it is added to those 49,961 and 91,639 places behind it. What remains of any number of bytes
are 91,639 words, and zlib sums up these. Such sparse multiples in place of tables: S. Russell,
"Chorba" (2024).

Measured on 2 cores, 2 MiB in the cache: zlib 6.6 GB/s on one and 12.7 on both, like this 24 and 36.
With torch's operation, which takes on 0.26 MB at most without a team of threads, 12 and 10: threads
then wait for Python's lock. A load of 2.1 GB with its checksums: 1.55 times the time of one without
by zlib, 1.26 like this.
"""

from __future__ import annotations

from collections.abc import Iterable

from torchlift.formats import register_of

try:
    import numpy as np
except ImportError:  # torch needs none
    np = None  # type: ignore[assignment]

_WORDS, _MIDDLE = 91_639, 41_678


class Folder:
    """Sums up blocks of bytes, as `register_of` does; safe to use from several threads."""

    def __init__(self) -> None:
        self._free: list[_Ring] = []  # a new one costs the page faults of 0.7 MB

    def __call__(self, blocks: Iterable[memoryview]) -> int:
        """Return the register after the blocks, all but the last of which have whole words."""
        register, ring = 0, None
        for block in blocks:
            if ring is None and not register and len(block) >= 8 * _WORDS and np is not None:
                ring = self._free.pop() if self._free else _Ring()
            rest = block if ring is None else ring.add(block)
            if len(rest):
                register, ring = register_of([rest], self._finish(ring, register)), None
        return self._finish(ring, register)

    def _finish(self, ring: _Ring | None, register: int) -> int:
        if ring is not None:
            register = ring.finish()
            self._free.append(ring)
        return register


class _Ring:
    """What remains of words: each in the place of its number modulo the length."""

    def __init__(self) -> None:
        self._memory = bytearray(8 * _WORDS)
        self._words = words = np.frombuffer(self._memory, np.uint64)
        # What is worked on at once, and where the words that leave the ring there are added.
        self._runs = [
            (words[:_MIDDLE], words[-_MIDDLE:]),
            (words[_MIDDLE : 2 * _MIDDLE], words[:_MIDDLE]),
            (words[2 * _MIDDLE :], words[_MIDDLE : _WORDS - _MIDDLE]),
        ]
        self._run = self._at = 0

    def add(self, block: memoryview) -> memoryview:
        """Take in the whole words of a block; return what comes behind them."""
        xor, nbytes = np.bitwise_xor, len(block) // 8 * 8
        data, done = np.frombuffer(block[:nbytes], np.uint64), 0
        while done < len(data):
            last, middle = self._runs[self._run]
            some = data[done : done + len(last) - self._at]
            done, start, self._at = done + len(some), self._at, self._at + len(some)
            if self._at == len(last):
                self._run, self._at = (self._run + 1) % 3, 0
            if len(some) < len(last):
                stop = start + len(some)
                last, middle = last[start:stop], middle[start:stop]
            xor(middle, last, middle)
            xor(last, some, last)
        return block[nbytes:]

    def finish(self) -> int:
        """Return the register after all the words, and forget them."""
        whole, at = memoryview(self._memory), 8 * (self._run * _MIDDLE + self._at)
        register = register_of([whole[at:], whole[:at]])
        self._words[:] = 0
        self._run = self._at = 0
        return register

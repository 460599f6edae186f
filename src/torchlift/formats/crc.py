"""CRC-32 of a payload whose ranges come from several writers, or in any order.

The CRC register is linear over GF(2). Split a message into messages that each have some of its
bytes and zeros elsewhere: its register is the XOR of theirs. Every writer therefore sums up its own
ranges in linear time, and the sums of all writers are XORed. Passing over k zero bytes multiplies
the register by x^8k modulo the polynomial (M. Adler, zlib, ``crc32_combine``).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # bit-reversed: the highest bit is x^0
_ONES = 0xFFFFFFFF


class PartialCrc:
    """The sum of one writer's ranges of a payload.

    Example:
        >>> import zlib
        >>> head, tail = PartialCrc(9), PartialCrc(9)
        >>> head.add(0, b"1234"); tail.add(4, b"56789")
        >>> whole_crc(9, [head.value(), tail.value()]) == zlib.crc32(b"123456789")
        True
    """

    def __init__(self, nbytes: int) -> None:
        """Start the sum of a payload of `nbytes` bytes."""
        self._nbytes = nbytes
        self._total = 0  # sum of the finished ranges, extended by zeros to the end of the payload
        self._register = 0  # register of the open ranges, up to the byte before `_at`
        self._at = 0

    def add(self, offset: int, data: bytes | memoryview) -> None:
        """Add bytes at an offset of the payload. Each byte is added once, in any order.

        Ranges in ascending order cost least.
        """
        if offset < self._at:
            self._total = self.value()
            self._register, self._at = 0, offset
        gap = offset - self._at
        register = _past_zeros(self._register, gap) if self._register else 0
        self._register = register_of([data], register)
        self._at = offset + len(data)

    def value(self) -> int:
        """Return the sum so far. It is 0 before the first call of `add`."""
        return self._total ^ _past_zeros(self._register, self._nbytes - self._at)


def register_of(blocks: Iterable[bytes | bytearray | memoryview], register: int = 0) -> int:
    """Return the register after consecutive blocks, from the register before them."""
    for block in blocks:
        # zlib inverts the register before and after. Leading zeros would change the sum otherwise.
        register = zlib.crc32(block, register ^ _ONES) ^ _ONES
    return register


def whole_crc(nbytes: int, sums: Iterable[int]) -> int:
    """Return the CRC-32 of a payload from the sums of all its writers."""
    register = _empty(nbytes)
    for one in sums:
        register ^= one
    return register ^ _ONES


@lru_cache(maxsize=1024)  # a model has few sizes: 100,000 storages took 0.9 s
def _empty(nbytes: int) -> int:
    return _past_zeros(_ONES, nbytes)


def _past_zeros(register: int, count: int) -> int:
    return _multiply(_zeros(count), register) if register and count else register


def _multiply(a: int, b: int) -> int:
    """Return the product of two polynomials modulo the CRC's."""
    product, bit = 0, 1 << 31
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=1024)  # a shard's gaps are all alike
def _zeros(count: int) -> int:
    """Return x^(8 * count)."""
    result, power = 1 << 31, 1 << 23  # 1, and x^8
    while count:
        if count & 1:
            result = _multiply(power, result)
        power = _multiply(power, power)
        count >>= 1
    return result

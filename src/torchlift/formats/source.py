"""Read untrusted files: complete reads, strict JSON and valid numbers, or an error."""

from __future__ import annotations

import bisect
import codecs
import copy
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

from torchlift._store.files import Opened
from torchlift._store.places import Stamp, in_parallel, open_place
from torchlift.errors import CheckpointError, FormatError
from torchlift.formats.unpickle import Budget

#: Least bytes of a request to a URL.
_WINDOW = 1 << 16
#: For a URL: bytes that are read after a requested range, and largest gap between two ranges that
#: one request reads. A request takes as long as several megabytes, but reads little of the weights.
_BEHIND, _GAP = 1 << 12, 1 << 16


class Source:
    """An open file, or a window of one, with its size and stamp.

    Args:
        path: Path of the file.
        budget: Budget for reading, or None for a new one.
        stamp: Stamp that the file must have, or None.

    Attributes:
        path: Absolute path of the file, or its URL.
        descriptor: File descriptor of a local file.
        start: First byte of the window in the file. Reads count from here.
        size: Size of the window, in bytes.
        stamp: Identity of the file.
        budget: Budget for reading it, shared by the files of one checkpoint.
    """

    def __init__(self, path: str, budget: Budget | None = None, stamp: Stamp | None = None) -> None:
        self._opened = opened = open_place(path) if stamp is None else stamp.open(path)
        self._windows = None if opened.is_local else Windows(opened)
        self._read = opened.read if self._windows is None else self._windows.read
        self.budget = budget or Budget()
        self.path, self.descriptor, self.stamp = path, opened.descriptor, opened.stamp
        self.start, self.size = 0, opened.size

    def window(self, start: int, size: int) -> Source:
        """Return a part of the file as a source, over the same descriptor.

        Raises:
            FormatError: If it reaches past the end.
        """
        self.check(start, size, "an item")
        made = copy.copy(self)
        made.start, made.size = self.start + start, size
        return made

    @property
    def is_remote(self) -> bool:
        """Return whether each read may be a request."""
        return self._windows is not None

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch ranges (first byte, end) of a URL in parallel, because they are needed next."""
        if self._windows is not None:
            at, most = self.start, self.size
            self._windows.expect((at + max(a, 0), at + min(b, most)) for a, b in ranges)

    def check(self, offset: int, nbytes: int, what: str, entry: str | None = None) -> None:
        """Refuse bytes that are not inside the file. An error calls them `what`."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise FormatError(
                f"{what} reaches past the end of the file",
                entry=entry,
                expected=f"at most {self.size} bytes",
                found=f"bytes {offset} to {offset + nbytes}",
                hint="The file is truncated, or its header is damaged. Fetch it again.",
            )

    def read(self, offset: int, nbytes: int, entry: str | None = None) -> bytes:
        """Read exactly `nbytes` bytes at `offset`.

        Raises:
            FormatError: If the range is not inside the file, or the file shrank.
        """
        self.check(offset, nbytes, "a byte range", entry)
        self.budget.grow(nbytes)
        data = self._read(self.start + offset, nbytes)
        if len(data) < nbytes:
            raise FormatError("the file shrank while it was read", entry=entry)
        return data

    def read_all(self, limit: int, what: str) -> bytes:
        """Read the whole file, or refuse it as `what` if it has more than `limit` bytes."""
        if self.size > limit:
            raise FormatError(f"{what} is too large", expected=f"at most {limit} bytes")
        return self.read(0, self.size)

    def close(self) -> None:
        """Close the file. Its stamp and size stay known."""
        self._opened.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Windows:
    """The bytes that were read from a URL. Near ranges share a request.

    Args:
        opened: The open URL.
    """

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._windows = [(0, opened.head)]  # (first byte, bytes), in order

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return bytes at an offset, and keep a window of them."""
        found = self._known(offset, nbytes)
        if found is None:
            # The bytes after a range are often needed next, such as torch's notes.
            self.expect([(offset, offset + max(nbytes + _BEHIND, _WINDOW))])
            found = self._known(offset, nbytes)
        return found or b""

    def _known(self, offset: int, nbytes: int) -> bytes | None:
        at = bisect.bisect_right(self._windows, offset, key=itemgetter(0)) - 1
        start, data = self._windows[at]
        is_there = 0 <= offset - start <= len(data) - min(nbytes, self._opened.size - offset)
        return data[offset - start : offset - start + nbytes] if is_there else None

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Fetch ranges in parallel. Ranges near each other share a request."""
        lacking: list[list[int]] = []
        size = self._opened.size
        for start, stop in sorted((max(start, 0), min(stop, size)) for start, stop in ranges):
            if start >= stop or self._known(start, stop - start) is not None:
                continue
            if lacking and start <= lacking[-1][1] + _GAP:
                lacking[-1][1] = max(lacking[-1][1], stop)
            else:
                lacking.append([start, stop])
        if not lacking:
            return
        spans = [(start, stop - start) for start, stop in lacking]
        read = in_parallel(self._opened.place, lambda span: self._opened.read(*span), spans)
        every = [*self._windows, *zip((start for start, _ in spans), read, strict=True)]
        self._windows, end = [], -1
        for start, data in sorted(every, key=lambda window: (window[0], -len(window[1]))):
            # Without windows inside of others, the last one that begins before a range has it all,
            # if any window has.
            if start + len(data) > end:
                self._windows.append((start, data))
                end = start + len(data)


@contextmanager
def errors_name(file: str, entry: str | None = None) -> Iterator[None]:
    """Add a file, and an entry, to every `CheckpointError` of the block that names none."""
    try:
        yield
    except CheckpointError as error:
        error.file = error.file or file
        error.entry = entry if error.entry is None else error.entry
        raise


def whole_numbers(values: object, key: str, what: str, kind: str = "list") -> tuple[int, ...]:
    """Return sizes, strides or offsets as a tuple.

    Args:
        values: The values in the file.
        key: Key of the tensor.
        what: Name of the values in an error.
        kind: Type that the format stores them as.

    Raises:
        FormatError: If they are not whole, are negative, or exceed the limits of torch.
    """
    is_list = isinstance(values, (tuple, list)) and len(values) <= 64
    numbers: Any = values if is_list else (values,)
    for value in numbers:
        # True is an int, but not a size.
        if not is_list or type(value) is not int or not 0 <= value < 1 << 63:
            raise FormatError(
                f"a tensor has an invalid {what}",
                entry=key,
                expected=f"a {kind} of at most 64 whole numbers from 0 to 2**63",
                # Python refuses to print more than 4,300 decimal digits.
                found=hex(value) if type(value) is int else f"a {type(value).__name__}",
            )
    return tuple(numbers)


def dense_shape(values: object, key: str, what: str, kind: str = "list") -> tuple[int, ...]:
    """Return the sizes of a tensor as a tuple, checked like `whole_numbers`.

    Raises:
        FormatError: If the strides of an empty tensor would exceed the limits of torch.
    """
    shape = whole_numbers(values, key, what, kind)
    if 0 in shape and math.prod(filter(None, shape)) >= 1 << 63:
        raise FormatError(
            f"a tensor has an invalid {what}",
            entry=key,
            expected="strides below 2**63",
            found=f"{list(shape)}, which has none",
        )
    return shape


def parse_json(
    data: bytes, what: str, hook: Callable[[list[tuple[str, Any]]], object] | None = None
) -> dict[str, Any]:
    """Parse a JSON object strictly.

    Args:
        data: UTF-8 text.
        what: Name of the text in an error, such as ``"the header"``.
        hook: Makes an object of its pairs. Default: `unique`.

    Raises:
        FormatError: If it is not JSON, not an object, nests too deep, or repeats a name in one
            object. Programs disagree on which of two values counts.
    """
    if encoding := marked_encoding(data):
        raise FormatError(
            f"{what} starts with a byte order mark",
            expected="UTF-8 without one",
            found=encoding,
            hint="Write it again without the mark: "
            f"path.write_text(path.read_text({encoding!r}), 'utf-8').",
        )
    try:
        found = json.loads(
            data.decode(), object_pairs_hook=hook or unique, parse_constant=_no_constant
        )
        if b"\\u" in data:
            # Escapes can spell half of a surrogate pair, which no terminal or file can store.
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError as error:
        raise FormatError(f"{what} nests too deep") from error
    except ValueError as error:
        raise FormatError(f"{what} is not valid JSON", found=str(error)) from error
    if not isinstance(found, dict):
        raise FormatError(f"{what} is not a JSON object", found=f"a {type(found).__name__}")
    return found


def marked_encoding(data: bytes) -> str | None:
    """Return the encoding of text that starts with a byte order mark, or None without one."""
    marks = (codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_LE, "utf-16"), (codecs.BOM_BE, "utf-16")
    return next((encoding for mark, encoding in marks if data.startswith(mark)), None)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of pairs whose names must differ."""
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        (twice, _), *_ = counts.most_common(1)
        raise FormatError("a name occurs twice in one JSON object", entry=twice)
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")

"""A file opened for looking: positional reads that are either complete or an error."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any

from torchlift.errors import FormatError
from torchlift.formats.index import FileStamp


class Source:
    """One open file with its size and stamp, both taken from the descriptor that is read.

    A stamp taken from the path could describe another file, moved into place in between.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close() / __exit__
        self.stamp = FileStamp.of(self._file.fileno())
        self.size = self.stamp.size

    def read(self, offset: int, nbytes: int, entry: str | None = None) -> bytes:
        """Read exactly `nbytes` bytes at `offset`.

        Raises:
            FormatError: the range is not inside the file, or the file shrank while it was read.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise FormatError(
                "a byte range lies outside the file",
                entry=entry,
                expected=f"at most {self.size} bytes",
                found=f"bytes {offset} to {offset + nbytes}",
                hint="The file is truncated or its header is damaged.",
            )
        self._file.seek(offset)
        data = self._file.read(nbytes)
        while len(data) < nbytes:  # a raw read may stop early: on signals, pipes, network mounts
            more = self._file.read(nbytes - len(data))
            if not more:
                raise FormatError("the file shrank while it was read", entry=entry)
            data += more
        return data

    def close(self) -> None:
        """Close the descriptor; the stamp and the size stay."""
        self._file.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Window:
    """A part of an open file that is a file of its own; positions count from its start."""

    def __init__(self, source: Source, offset: int, size: int) -> None:
        self.path = source.path
        self.stamp = source.stamp
        self.size = size
        self._source = source
        self._offset = offset

    def read(self, offset: int, nbytes: int, entry: str | None = None) -> bytes:
        """Read exactly `nbytes` bytes at `offset` of the window.

        Raises:
            FormatError: the range is not inside the window.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise FormatError(
                "a byte range lies outside the item",
                entry=entry,
                expected=f"at most {self.size} bytes",
                found=f"bytes {offset} to {offset + nbytes}",
            )
        return self._source.read(self._offset + offset, nbytes, entry)


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object strictly.

    Args:
        data: UTF-8 text.
        what: what it is called in an error, such as ``"the header"``.

    Raises:
        FormatError: not JSON, not an object, nested too deep, or a name that occurs twice in one
            object (programs disagree on which of the two counts).
    """
    try:
        found = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
        if b"\\u" in data:
            # Escapes can make half of a character, which no terminal or file can take.
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise FormatError(f"{what} nests too deep") from error
    except ValueError as error:
        raise FormatError(f"{what} is not valid JSON", found=str(error)) from error
    if not isinstance(found, dict):
        raise FormatError(f"{what} is not a JSON object", found=f"a {type(found).__name__}")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise FormatError("a name occurs twice in a JSON object", entry=name)
            seen.add(name)
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")

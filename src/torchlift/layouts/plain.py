"""What a file may hold beside tensors: data that every reader reads back without running code."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NoReturn

from torchlift.errors import FormatError, PlacementError
from torchlift.formats.flatten import flatten
from torchlift.formats.pickle_machine import MAX_INT, check_key
from torchlift.formats.torch_globals import TorchWorld
from torchlift.formats.torch_records import read_torch_pickle

#: What values that are not tensors may consist of: what ``weights_only=True`` and torchlift read.
_LEAVES = (type(None), bool, int, float, str, bytes)
_CONTAINERS = (list, tuple, dict, OrderedDict)
_MAX_BITS = 8 * (MAX_INT - 1)
_MAX_DEPTH = 90  # torchlift reads 100 levels, and a state dict and its templates are some of them


def require_plain(key: str, value: object) -> None:
    """Return when torch, with ``weights_only=True``, and torchlift can read the value back.

    Raises:
        PlacementError: they cannot.

    Example:
        >>> require_plain("extra", {"steps": [1, 2], "name": None})
        >>> require_plain("extra", {1, 2})
        Traceback (most recent call last):
        torchlift.errors.PlacementError: 'extra': cannot be stored in a torch file so that ...
    """
    _Walk(key).height(value, 0)


def require_readable(pickled: bytes) -> None:
    """Return when torchlift reads the pickle of a torch file back.

    Raises:
        PlacementError: it does not: two of its values would get one name, say.
    """
    try:
        flatten(read_torch_pickle(pickled, TorchWorld()), len(pickled))
    except FormatError as error:
        raise PlacementError(
            f"cannot be stored in a torch file so that it can be read back: {error.reason}",
            entry=error.entry,
            expected=error.expected,
            found=error.found,
        ) from error


def is_unicode(text: str) -> bool:
    """Whether a text can be written in UTF-8: half of a surrogate pair cannot.

    Example:
        >>> is_unicode(chr(0x1F600)), is_unicode(chr(0xD83D))
        (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Walk:
    """One look at everything inside a value."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._open: set[int] = set()
        self._heights: dict[int, int] = {}  # many may hold one container: look inside it once

    def height(self, item: Any, depth: int) -> int:
        """Levels of containers in a value that is itself `depth` levels deep."""
        if type(item) in _LEAVES:
            self._leaf(item)
            return 0
        if type(item) not in _CONTAINERS:
            found = f"a {type(item).__module__}.{type(item).__qualname__}"
            self._refuse("tensors as values of the state dict, or plain data", found)
        if id(item) in self._open:
            self._refuse("containers that do not contain themselves", f"a {type(item).__name__}")
        known = self._heights.get(id(item), 0)
        if depth + max(known, 1) > _MAX_DEPTH:
            self._refuse(f"at most {_MAX_DEPTH} levels of containers", "more")
        if not known:
            self._open.add(id(item))
            known = 1 + max((self.height(part, depth + 1) for part in self._parts(item)), default=0)
            self._open.remove(id(item))
            self._heights[id(item)] = known
        return known

    def _parts(self, item: Any) -> list[Any]:
        if not isinstance(item, dict):
            return list(item)
        for key in item:
            try:
                check_key(key)
            except FormatError as error:
                self._refuse("short keys of dictionaries", error.reason)
        return [*item, *item.values()]

    def _leaf(self, item: object) -> None:
        if isinstance(item, str) and not is_unicode(item):
            self._refuse("text", "a lone surrogate, which UTF-8 cannot write")
        if isinstance(item, int) and item.bit_length() >= _MAX_BITS:
            self._refuse(f"integers of less than {_MAX_BITS} bits", f"{item.bit_length()} bits")

    def _refuse(self, expected: str, found: str) -> NoReturn:
        raise PlacementError(
            "cannot be stored in a torch file so that it can be read back without running code",
            entry=self._key,
            expected=expected,
            found=found,
            hint="Take it out of what is saved, or flatten what holds it.",
        )

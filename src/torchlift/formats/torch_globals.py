"""What the globals of a torch pickle stand for: names from an allow-list, answered by records.

Nothing here imports or calls what a name means. A name that is not listed becomes a `Blocked`
record, so that the rest of the file can still be looked at.
"""

from __future__ import annotations

from typing import Any

from torchlift.errors import FormatError
from torchlift.formats.stand_ins import (
    STORAGE_DTYPES,
    UNTYPED,
    Blocked,
    Global,
    NumpyDtype,
    OrderedRecord,
    StorageRef,
    TensorRef,
)
from torchlift.formats.torch_calls import CALLS, VALUES

#: Python 2 names of modules, which pickle protocols up to 2 write to this day.
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}

_MAX_BLOCKED = 10_000


class TorchWorld:
    """The `World` of pickles written by ``torch.save``.

    Attributes:
        blocked: names that are not in the allow-list, in order of appearance.
    """

    def __init__(self) -> None:
        self.blocked: dict[str, None] = {}
        self._globals: dict[str, Global | Blocked] = {}

    def find(self, module: str, name: str) -> Global | Blocked:
        """A stand-in for the global ``module.name``; the same object every time."""
        dotted = f"{_RENAMED.get(module, module)}.{name}"
        found = self._globals.get(dotted)
        if found is None:
            known = dotted in CALLS or dotted in VALUES
            found = Global(dotted) if known else self.block(dotted)
            self._globals[dotted] = found
        return found

    def block(self, name: str) -> Blocked:
        """Note a name as blocked."""
        if len(self.blocked) >= _MAX_BLOCKED:
            raise FormatError("the pickle names too many globals", found=f"{_MAX_BLOCKED} or more")
        self.blocked[name] = None
        return Blocked(name)

    def call(self, function: object, arguments: object) -> object:
        """A record of a call."""
        if not isinstance(arguments, tuple):
            raise FormatError("the pickle calls something with arguments that are not a tuple")
        if isinstance(function, Blocked):
            return Blocked(function.name, called=True)
        if not isinstance(function, Global):
            raise FormatError("the pickle calls something that is not a global")
        handler = CALLS.get(function.name)
        if handler is None:
            return self.refuse(function.name)
        try:
            return handler(self, *arguments)
        except (TypeError, ValueError, UnicodeError, OverflowError) as error:
            raise FormatError(
                "a global is called with arguments it does not take", entry=function.name
            ) from error

    def refuse(self, name: str) -> Blocked:
        """Note a name as blocked, and stand for what calling it would have made."""
        self.block(name)
        return Blocked(name, called=True)

    def persistent(self, identity: object) -> StorageRef | Blocked:
        """The storage that a persistent id describes."""
        if type(identity) is not tuple or len(identity) != 5:
            raise FormatError(
                "a persistent id is not a storage",
                expected="('storage', type, key, location, numel)",
                found=f"a {type(identity).__name__}",
            )
        kind, storage_type, key, location, numel = identity
        if kind != "storage" or type(key) is not str or type(location) is not str:
            raise FormatError(
                "a persistent id is not a storage",
                expected="('storage', type, key, location, numel)",
            )
        if isinstance(storage_type, Blocked):
            return Blocked(storage_type.name, called=True)
        name = storage_type.name if isinstance(storage_type, Global) else ""
        if name not in STORAGE_DTYPES and name not in UNTYPED:
            raise FormatError("a persistent id names no storage type", entry=key, found=name)
        if type(numel) is not int or not 0 <= numel < 1 << 62:
            raise FormatError(
                "a storage has an impossible number of elements",
                entry=key,
                expected="a whole number from 0 to 2**62",
                found=numel if isinstance(numel, (int, float)) else type(numel).__name__,
            )
        return StorageRef(STORAGE_DTYPES.get(name), key, location, numel)

    def build(self, target: object, state: object) -> None:
        """Keep the state that means something: torch's metadata and what a module holds."""
        if isinstance(target, OrderedRecord):
            if isinstance(state, dict):
                target.metadata = state.get("_metadata")
        elif isinstance(target, Blocked):
            if isinstance(state, dict):
                target.state = state
        elif isinstance(target, NumpyDtype):
            if isinstance(state, tuple) and len(state) > 1 and isinstance(state[1], str):
                target.order = state[1]
        elif not isinstance(target, TensorRef):
            raise FormatError(
                "the pickle gives a state to something that has none",
                found=f"a {type(target).__name__}",
            )

    def extend(self, target: object, items: list[Any]) -> None:
        """Ignore what is put into a blocked container; nothing else takes items."""
        if not isinstance(target, Blocked):
            raise FormatError(
                "the pickle puts items into something that takes none",
                found=f"a {type(target).__name__}",
            )

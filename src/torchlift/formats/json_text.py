"""JSON from a stranger: no duplicate names, no NaN, no depth that breaks the parser."""

from __future__ import annotations

import json
from typing import Any

from torchlift.errors import FormatError


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

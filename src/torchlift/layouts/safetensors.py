"""The layout of a safetensors file: the header's length, the header, all data without gaps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torchlift.errors import PlacementError
from torchlift.formats import ITEMSIZE
from torchlift.formats.safetensors import DTYPES, MAX_HEADER
from torchlift.layouts import Layout, Payload, Stored
from torchlift.layouts.plain import is_unicode

_ALIGNMENT = 64
_CODES = {name: code for code, name in DTYPES.items()}


def safetensors_layout(tensors: Iterable[Stored], metadata: Mapping[str, str] | int) -> Layout:
    """Lay out a safetensors file; widest items first, so that each tensor is aligned to its items.

    Args:
        tensors: what to store; every name has bytes of its own.
        metadata: text for the header; or the bytes in front of the data, where only the offsets
            are wanted and not the frame.

    Raises:
        PlacementError: a dtype has no name in the format, or the header is longer than it allows.
        TypeError: the metadata is not text.
        ValueError: it is, but not such as a file can hold.

    Example:
        >>> layout = safetensors_layout([Stored("w", "int8", (2,)), Stored("v", "float32", ())], {})
        >>> [(place.tensor.key, place.offset) for place in layout.payloads], layout.nbytes
        ([('v', 128), ('w', 132)], 134)
    """
    described: dict[str, Any] = {}
    places, at = [], 0
    for tensor in sorted(tensors, key=lambda tensor: (-ITEMSIZE[tensor.dtype], tensor.key)):
        if tensor.dtype not in _CODES or tensor.key == "__metadata__":
            raise PlacementError(
                "cannot be stored in a safetensors file",
                entry=tensor.key,
                expected=f"one of {', '.join(DTYPES.values())}",
                found=tensor.dtype,
                hint='A torch file can hold it: save with format="torch-zip".',
            )
        stop = at + tensor.nbytes
        described[tensor.key] = {
            "dtype": _CODES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [at, stop],
        }
        places.append((tensor, at))
        at = stop
    head = b"" if isinstance(metadata, int) else _head(described, metadata)
    length = metadata if isinstance(metadata, int) else len(head)

    def frame(sums: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        yield 0, head

    payloads = tuple(Payload(tensor, length + start) for tensor, start in places)
    return Layout(length + at, payloads, False, frame)


def _head(described: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """What stands before the data."""
    for name, value in metadata.items():
        for part in (name, value):
            if not isinstance(part, str):
                raise TypeError(
                    f"metadata[{name!r}] = {value!r}: a safetensors file has text only, in names "
                    "and values; use str() or json.dumps()"
                )
            if not is_unicode(part):
                raise ValueError(f"metadata[{name!r}] = {value!r}: lone surrogates are not text")
    if metadata:
        described = {"__metadata__": dict(metadata), **described}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise PlacementError(
            "too many tensors for one safetensors file",
            expected=f"a header of at most {MAX_HEADER} bytes",
            found=f"{len(text)} bytes",
            hint='A torch file can hold them: save with format="torch-zip".',
        )
    return len(text).to_bytes(8, "little") + text

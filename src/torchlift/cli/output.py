"""JSON that every parser accepts."""

from __future__ import annotations

import json
import math
from typing import Any


def print_json(data: Any) -> None:
    """Print one JSON document, ASCII only; a number that is not finite becomes null."""
    print(json.dumps(_finite(data), indent=2, ensure_ascii=True, allow_nan=False))


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return data

"""Where tensors go, what they become, what they are called: rules for `torchlift.load`.

- For ``device=``, and for ``dtype=`` with dtypes as values: `by_key`, `by_pattern`, `first_of`; for
  ``device=`` alone `by_location`, and `fit`, which makes a `by_key` map within budgets of memory.
- For ``rename=``: `strip` and `rules`, `merge` and `split`, which compose with ``|``;
  `transformers`, the conversions that library makes while it loads a model; and `from_to`, from
  the tensors of a GGUF file to its own.

Rules are plain values: they print as the call that makes them, and they can be pickled.
"""

from __future__ import annotations

from torchlift.remap.between import from_to
from torchlift.remap.conversion_table import transformers
from torchlift.remap.fitting import Fit, fit
from torchlift.remap.maps import (
    ByKey,
    ByLocation,
    ByPattern,
    FirstOf,
    by_key,
    by_location,
    by_pattern,
    first_of,
)
from torchlift.remap.merging import merge, split
from torchlift.remap.names import Renaming, rules, strip

__all__ = [
    "by_location", "by_key", "by_pattern", "first_of", "fit", "strip", "rules",
    "merge", "split", "transformers", "from_to",
    "ByKey", "ByLocation", "ByPattern", "FirstOf", "Fit", "Renaming",
]  # fmt: skip

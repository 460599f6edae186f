"""Rules for the devices, dtypes and names of the tensors that `torchlift.load` loads.

- For ``device=`` and ``dtype=``: `by_key`, `by_pattern` and `first_of`.
- For ``device=`` only: `by_location`, and `fit`, which makes a `by_key` map within memory budgets.
- For ``rename=``: `strip`, `rules`, `merge` and `split`. They compose with ``|``.
- For ``rename=`` with Hugging Face models: `transformers` applies that library's own conversions.
  `from_to` converts the tensors of a GGUF file.

A rule is a plain value. It prints as the call that makes it, and it can be pickled.
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

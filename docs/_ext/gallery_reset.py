"""What sphinx-gallery does around each recipe, so that no recipe depends on the one before."""

from __future__ import annotations

import gc
import random
import warnings
from pathlib import Path
from typing import Any

import numpy
import torch
from sphinx.util import logging

_logger = logging.getLogger(__name__)
_threads = torch.get_num_threads()
_filters = list(warnings.filters)
with torch.device("meta"):
    # Now torch notes which functions a device changes. If it did that while transformers has
    # another torch.linspace there, `with torch.device("meta")` would leave linspace on the CPU.
    torch.empty(0)


def reset(gallery_conf: dict[str, Any], fname: str | Path | None, when: str) -> None:
    """Put seeds, defaults and warning filters where a fresh process has them."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_num_threads(_threads)
    torch.set_grad_enabled(True)
    torch.__future__.set_swap_module_params_on_conversion(False)
    torch.__future__.set_overwrite_module_params_on_conversion(False)
    gc.collect()
    if when == "before":
        gc.freeze()  # Sphinx has millions of objects, and a recipe may collect many times
    _reset_warnings(fname, when)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        _logger.warning("%s leaves its process group open", fname)


def _reset_warnings(fname: str | Path | None, when: str) -> None:
    warnings.filters[:] = _filters
    # Cached "already shown" entries would hide a warning from every recipe but the first.
    warnings._filters_mutated()  # type: ignore[attr-defined]
    if when == "before" and fname is not None and Path(fname).is_file():
        warnings.simplefilter("error")

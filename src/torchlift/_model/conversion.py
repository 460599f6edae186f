"""`preserving_references`: torch's own swap path, for a while, and for a module that allows it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from torchlift._model.holders import blocked_by, refusal
from torchlift._model.slots import collect

_lock = threading.Lock()
_inside = 0
_before = False


@contextmanager
def preserving_references(*, check: nn.Module | None = None) -> Iterator[None]:
    """Inside the block, torch's conversions keep every parameter the same Python object.

    ``module.to()``, ``.half()``, ``.double()``, ``.cuda()``, ``.to_empty()`` and
    ``load_state_dict`` then exchange content with ``torch.utils.swap_tensors``, and tensor
    subclasses decide in ``Tensor.module_load`` how they are loaded. This sets
    ``torch.__future__.set_swap_module_params_on_conversion``, which takes precedence over
    ``set_overwrite_module_params_on_conversion``: that one puts *new* parameters in the module, and
    an optimizer made before goes on updating the old ones.

    The flag is restored on any exit. It is one flag for the whole process: blocks may be nested and
    may overlap in threads, and the last one to end restores what the first one found; other
    threads see it meanwhile. torch converts one parameter after the other and stops at the first
    that it cannot exchange (in ``load_state_dict`` it goes on with the next), which leaves a module
    half converted. With ``check`` nothing starts in that case. `torchlift.load` needs neither: it
    is all or nothing by itself.

    Args:
        check: a module to examine first, as `preflight` does. Weak references that its recurrent
            layers keep to their own weights, for which torch refuses ``load_state_dict``, are
            released for the time of the block.

    Raises:
        PlacementError: a tensor of ``check`` cannot be exchanged; names it and its holders.

    Example:
        >>> import torch, torchlift
        >>> model = torch.nn.Linear(3, 2)
        >>> held = model.weight
        >>> with torchlift.swap.preserving_references():
        ...     model = model.double()
        >>> model.weight is held, held.dtype
        (True, torch.float64)
    """
    global _inside, _before
    if check is not None:
        found = blocked_by(collect(check))
        if found:
            raise refusal(found, hint="Release them first.")
    with _lock:
        if _inside == 0:
            _before = torch.__future__.get_swap_module_params_on_conversion()
        _inside += 1
        torch.__future__.set_swap_module_params_on_conversion(True)
    recurrent = [] if check is None else [m for m in check.modules() if isinstance(m, nn.RNNBase)]
    for layer in recurrent:
        layer._flat_weight_refs = [None] * len(layer._flat_weights)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                torch.__future__.set_swap_module_params_on_conversion(_before)
        for layer in recurrent:
            weights = layer._flat_weights
            layer._flat_weight_refs = [None if w is None else weakref.ref(w) for w in weights]

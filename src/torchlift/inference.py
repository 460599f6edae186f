"""Tensors that can be trained, made inside inference mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Leave inference mode inside the block, without turning autograd on.

    A tensor made in inference mode can never be trained, and does not count what is written to it:
    a live model given such content would silently get no gradients any more.

    Example:
        >>> with torch.inference_mode(), ordinary_tensors():
        ...     torch.zeros(1).is_inference(), torch.is_grad_enabled()
        (False, False)
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield

"""The parts of torch that a `Tape` cannot see, made visible while something is recorded.

These are Python functions that no torch-function mode is told about. They are replaced while at
least one skeleton is being built, in whatever thread, and for everybody else do what they did.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.overrides import (
    _get_current_function_mode_stack,
    handle_torch_function,
    has_torch_function_unary,
)

from torchlift.tape import Tape

_lock = threading.Lock()
_recording = 0
_originals: list[tuple[Any, str, Any]] = []


@contextmanager
def recordable() -> Iterator[None]:
    """Let truncated normal initialisers and seeds be recorded inside the block."""
    global _recording
    with _lock:
        if _recording == 0:
            _patch()
        _recording += 1
    try:
        yield
    finally:
        with _lock:
            _recording -= 1
            if _recording == 0:
                while _originals:
                    setattr(*_originals.pop())


def _patch() -> None:
    _replace(nn.init, "_no_grad_trunc_normal_", _overridable)
    for holder in (torch, torch.random):
        _replace(holder, "manual_seed", _seeds)
        _replace(holder, "set_rng_state", _restores)


def _replace(holder: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    original = getattr(holder, name)
    _originals.append((holder, name, original))
    setattr(holder, name, wrapper(original))


def _overridable(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Let `trunc_normal_` be recorded like the other initialisers, which are overridable.

    It samples until no value lies outside the bounds. Recorded call by call that is a question
    about data in a loop; recorded as one call it is one call.
    """

    @wraps(function)
    def initialise(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if has_torch_function_unary(tensor):
            made: torch.Tensor = handle_torch_function(
                initialise, (tensor,), tensor, *args, **kwargs
            )
            return made
        return function(tensor, *args, **kwargs)

    initialise.__name__ = "trunc_normal_"
    return initialise


def _seeds(function: Callable[[int], torch.Generator]) -> Callable[[int], torch.Generator]:
    """A constructor that seeds makes the same numbers every time, so its replay must."""

    @wraps(function)
    def manual_seed(seed: int) -> torch.Generator:
        for tape in _tapes():
            tape.randomness.seed(int(seed))
        return function(seed)

    return manual_seed


def _restores(function: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """`torch.random.fork_rng` ends by going back to the numbers of before."""

    @wraps(function)
    def set_rng_state(new_state: torch.Tensor) -> None:
        for tape in _tapes():
            tape.randomness.seed(None)
        function(new_state)

    return set_rng_state


def _tapes() -> list[Tape]:
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return [mode for mode in modes if isinstance(mode, Tape)]

"""States of the random number generators of a process."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from torchlift._save.blocks import memory_of


class Generators:
    """The random number generators of this process, as an object with a state.

    These are torch's, those of GPUs in use, Python's and, if it is loaded, NumPy's. A
    `torchlift.Keeper` saves them by itself. Use this class where a framework saves objects with
    ``state_dict`` and ``load_state_dict``.

    Example:
        >>> import torch
        >>> from torchlift.distributed import Generators
        >>> saved = Generators().state_dict()
        >>> drawn = torch.rand(2)
        >>> Generators().load_state_dict(saved)
        >>> torch.equal(torch.rand(2), drawn)
        True
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states: bytes, numbers and lists of them."""
        version, numbers, gauss = random.getstate()
        found: dict[str, Any] = {
            "torch": _to_bytes(torch.get_rng_state()),
            "python": {"version": version, "numbers": list(numbers), "gauss": gauss},
        }
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            found["cuda"] = [*map(_to_bytes, torch.cuda.get_rng_state_all())]
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            kind, keys, at, has_gauss, gauss = numpy.random.get_state()
            if kind == "MT19937":
                numbers = keys.tolist()
                found["numpy"] = {"numbers": numbers, "at": at, "gauss": (has_gauss, gauss)}
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the states. Those of GPUs and NumPy are set if this process uses them."""
        torch.set_rng_state(_to_tensor(state_dict["torch"]))
        python = state_dict["python"]
        random.setstate((python["version"], tuple(python["numbers"]), python["gauss"]))
        if "cuda" in state_dict and torch.cuda.is_available():
            every = range(torch.cuda.device_count())
            for device, state in zip(every, state_dict["cuda"], strict=False):
                torch.cuda.set_rng_state(_to_tensor(state), device)
        numpy: Any = sys.modules.get("numpy")
        if "numpy" in state_dict and numpy is not None:
            legacy = state_dict["numpy"]
            numpy.random.set_state(("MT19937", legacy["numbers"], legacy["at"], *legacy["gauss"]))


def _to_bytes(state: torch.Tensor) -> bytes:
    # A tensor would look like a weight in a checkpoint.
    return bytes(memory_of(state))


def _to_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)

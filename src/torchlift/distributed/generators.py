"""States of the random number generators of a process."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


class Generators:
    """The random number generators of this process, as an object whose state can be kept.

    Those of torch, of its GPUs once they are in use, of Python and, where it is loaded, of NumPy. A
    `torchlift.Keeper` keeps them by itself; this is for other places that take objects with
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
        """Return the states: tensors, numbers and lists of them."""
        version, numbers, gauss = random.getstate()
        found: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": {"version": version, "numbers": list(numbers), "gauss": gauss},
        }
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            found["cuda"] = torch.cuda.get_rng_state_all()
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            kind, keys, at, has_gauss, gauss = numpy.random.get_state()
            if kind == "MT19937":
                numbers = keys.tolist()
                found["numpy"] = {"numbers": numbers, "at": at, "gauss": (has_gauss, gauss)}
        return found

    @staticmethod
    def check(states: Mapping[str, Any]) -> None:
        """Let generators of nobody take the states.

        Raises:
            KeyError, TypeError, ValueError, RuntimeError: they do not.
        """
        torch.Generator().set_state(states["torch"].clone())
        random.Random().setstate(_python(states))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the states; of GPUs and of NumPy where both the state and this process have them."""
        torch.set_rng_state(state_dict["torch"].clone())
        random.setstate(_python(state_dict))
        if "cuda" in state_dict and torch.cuda.is_available():
            every = range(torch.cuda.device_count())
            for device, state in zip(every, state_dict["cuda"], strict=False):
                torch.cuda.set_rng_state(state.clone(), device)
        numpy: Any = sys.modules.get("numpy")
        if "numpy" in state_dict and numpy is not None:
            legacy = state_dict["numpy"]
            numpy.random.set_state(("MT19937", legacy["numbers"], legacy["at"], *legacy["gauss"]))


def _python(states: Mapping[str, Any]) -> tuple[Any, ...]:
    python = states["python"]
    return python["version"], tuple(python["numbers"]), python["gauss"]

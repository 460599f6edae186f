"""What a type checker says of arguments that are passed on; `make types` checks this file.

An ignored error that is none is an error of its own, so every comment is an assertion.
"""

from __future__ import annotations

from torch import nn

import torchlift
from torchlift.distributed import on_ranks


class Net(nn.Module):
    """A model with arguments of two kinds."""

    def __init__(self, width: int, *, bias: bool = True) -> None:
        super().__init__()


def add(one: int, other: int = 1) -> int:
    """A function of one argument or two."""
    return one + other


def are_right() -> None:
    """These calls are right, and what they return is known."""
    net: Net = torchlift.skeleton(Net, width=4)
    net = torchlift.skeleton(Net, 4, bias=False)
    net = torchlift.skeleton(lambda: Net(4))
    sums: list[int] = on_ranks(2, add, 1)
    sums = on_ranks(2, add, 1, 2, timeout=4.0)
    del net, sums


def are_wrong() -> None:
    """Misspelled, of another type, too few, too many; not a module."""
    torchlift.skeleton(Net, widht=4)  # type: ignore[call-arg]
    torchlift.skeleton(Net, "4")  # type: ignore[arg-type]
    torchlift.skeleton(Net)  # type: ignore[call-arg]
    torchlift.skeleton(add, 4)  # type: ignore[type-var]
    on_ranks(2, add, "1")  # type: ignore[arg-type]
    on_ranks(2, add)  # type: ignore[arg-type]
    on_ranks(2, add, 1, 2, 3)  # type: ignore[arg-type]

"""The messages that the ranks of a Keeper exchange, and the checks that compare them.

A message is a few bytes that one rank sends to all others. Each step has a record for it. A check
gets the messages of all ranks, so it raises on all ranks, or on none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torchlift._model.ranks import RankGroup
from torchlift._system.interrupts import uninterrupted

#: Name of an optimizer -> its parameter groups.
Groups = Mapping[str, list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Call:
    """The message of a method.

    Attributes:
        method: The name of the method.
        step: The step to save.
        models: The names of models and optimizers to save or load.
        is_done: Whether the last save of this rank is complete.
        received: Whether this rank received a signal that asks it to stop.
        checkpoint: The name of the checkpoint to load, on the first rank.
    """

    method: Literal["save", "wait", "resume", "should_stop"]
    step: int | None = None
    models: tuple[str, ...] = ()
    is_done: bool = True
    received: bool = False
    checkpoint: str | None = None


@dataclass(frozen=True, slots=True)
class SelectionMessage:
    """The match between a selection of a checkpoint and the models of one rank.

    Attributes:
        selected: Digest of the names to load. It must be equal on all ranks.
        unexpected: A bit for each saved name, in order, that no model of this rank has.
        separate: Optimizers that this rank cannot load in one call with the models.
    """

    selected: bytes
    unexpected: int
    separate: tuple[str, ...]


def require_same(what: str, values: Iterable[object]) -> None:
    """Refuse values that differ between ranks.

    Raises:
        ValueError: If they differ.
    """
    each = [*values]
    if any(one != each[0] for one in each):
        raise ValueError(f"{what}: {each}")


def require_same_call(by_rank: Mapping[int, Call]) -> None:
    """Refuse different methods. One rank alone may have caught an error and gone on.

    Raises:
        ValueError: If the ranks call different methods, with other steps or for other models.
    """
    calls = by_rank.values()
    require_same("the ranks call different methods of the keeper", [call.method for call in calls])
    require_same("the ranks save different steps", [call.step for call in calls])
    models = [call.models for call in calls]
    require_same("the ranks pass different models and optimizers", models)


@contextmanager
def together(ranks: RankGroup) -> Iterator[Callable[[], None]]:
    """Raise an error of one rank in the block on all ranks.

    Interrupts wait until the block ends. The block gets a function that delivers them earlier.
    """
    with uninterrupted() as deliver, ranks.together() as agree:
        yield deliver
        deliver()  # an interrupt here is reported to the other ranks
        agree(False)


def merge_groups(by_rank: Iterable[Groups]) -> Groups:
    """Return the parameter groups of all ranks, such as the stages of a pipeline.

    Args:
        by_rank: The groups of each rank. If two ranks have the same one, the first rank's counts.
    """
    found: dict[str, dict[tuple[str, ...], Any]] = {}
    for each in reversed([*by_rank]):
        for name, groups in each.items():
            found.setdefault(name, {}).update({tuple(one["params"]): one for one in groups})
    return {name: [groups[key] for key in sorted(groups)] for name, groups in found.items()}

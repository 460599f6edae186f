"""What the ranks of a Keeper agree on: the message of each step, and what makes all ranks refuse.

A message is a few bytes that one rank sends to all others. Each step has a record for it. A check
gets the messages of all ranks, so it raises on all ranks, or on none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from torchlift._model.ranks import RankGroup
from torchlift._system.interrupts import uninterrupted
from torchlift.distributed.folder import NewCheckpoint

_OTHER_OBJECTS = "the ranks pass different models and optimizers"


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of a Keeper that must be equal on all ranks."""

    background: bool
    busy: str
    best: str | None
    timeout: float | None


@dataclass(frozen=True, slots=True)
class Call:
    """The first message of a method.

    Attributes:
        method: its name.
    """

    method: Literal["save", "wait", "resume", "should_stop"]


@dataclass(frozen=True, slots=True)
class SaveCall(Call):
    """The first message of `Keeper.save`.

    Attributes:
        step: its argument.
        is_done: whether the last save of this rank is complete.
        models: names of models and optimizers.
    """

    step: int
    is_done: bool
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StopCall(Call):
    """The first message of `Keeper.should_stop`.

    Attributes:
        received: whether this rank received a signal.
    """

    received: bool


@dataclass(frozen=True, slots=True)
class SelectedCheckpoint:
    """A complete checkpoint to resume from.

    Attributes:
        name: of its file or folder.
        earlier: the steps of the complete checkpoints before it.
    """

    name: str
    earlier: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ResumeCall(Call):
    """The first message of `Keeper.resume`.

    Attributes:
        checkpoint: what this rank selects; the first rank's counts.
        models: names of models and optimizers.
    """

    checkpoint: SelectedCheckpoint | None
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SnapshotMessage:
    """The message after a rank has copied its state.

    Attributes:
        target: where the checkpoint goes, on the first rank.
        digests: name of an object that is no model -> digest of its state.
        groups: digest of the parameter groups of all optimizers.
    """

    target: NewCheckpoint | None
    digests: dict[str, bytes]
    groups: bytes

    @staticmethod
    def equal_names(messages: Iterable[SnapshotMessage]) -> set[str]:
        """Return the names of objects whose states are equal on all ranks."""
        pairs = [set(message.digests.items()) for message in messages]
        return {name for name, _ in set.intersection(*pairs)}


@dataclass(frozen=True, slots=True)
class FitMessage:
    """How a selection of a checkpoint fits the models of one rank.

    Attributes:
        selected: digest of the names to load. It is the same on all ranks.
        unexpected: a bit for each saved name, in order, that no model of this rank has.
        apart: optimizers that this rank cannot load with the models in one call.
    """

    selected: bytes
    unexpected: int
    apart: tuple[str, ...]


def require_same(what: str, values: Iterable[object]) -> None:
    """Refuse values that differ from rank to rank.

    Raises:
        ValueError: If they do.
    """
    each = [*values]
    if any(one != each[0] for one in each):
        raise ValueError(f"{what}: {each}")


def require_same_call(by_rank: Mapping[int, Call]) -> None:
    """Refuse different methods, as after an error that one rank alone met and caught.

    Raises:
        ValueError: If the ranks call different methods, with other steps or for other models.
    """
    calls = by_rank.values()
    require_same("the ranks call different methods of the keeper", [call.method for call in calls])
    for name, what in (("step", "the ranks save different steps"), ("models", _OTHER_OBJECTS)):
        if all(hasattr(call, name) for call in calls):
            require_same(what, map(attrgetter(name), calls))


@contextmanager
def together(ranks: RankGroup) -> Iterator[Callable[[], None]]:
    """Let all ranks end the block, or none: an error on one rank is raised on all of them.

    The block gets a function that delivers an interrupt, which is held back otherwise.
    """
    with uninterrupted() as deliver, ranks.together() as agree:
        yield deliver
        deliver()  # an interrupt: here the other ranks learn of it
        agree(False)


def merge_groups(by_rank: Iterable[Mapping[tuple[str, tuple[str, ...]], Any]]) -> dict[str, Any]:
    """Return optimizer -> the parameter groups of all ranks, such as the stages of a pipeline.

    Args:
        by_rank: for each rank (optimizer, names of its parameters) -> group. If two ranks have one
            group, that of the first rank counts.
    """
    every = {key: group for each in reversed([*by_rank]) for key, group in each.items()}
    merged: dict[str, list[Any]] = {}
    for name, params in sorted(every):
        merged.setdefault(name, []).append(every[name, params])
    return merged

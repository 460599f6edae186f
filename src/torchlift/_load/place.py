"""Place fetched values into a model: put new tensors into slots, then copy into live tensors.

All that can fail comes first, and a commit undoes it. Only copies of plain numbers are left when
the ranks have agreed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from torchlift._load.fetch import Fetched, Prepared, not_taken_error
from torchlift._model.commit import Commit
from torchlift._model.dtensor import everything, is_dtensor, local_tensor
from torchlift._model.handlers import is_plain, oddity
from torchlift._model.slots import is_lazy
from torchlift._plan.rules import Advance
from torchlift._sources.tensors import (
    Copy,
    FileTensor,
    copy_overlapping_sources,
    copy_values,
    count_cast,
)


class InPlace(NamedTuple):
    """The copies of plain numbers into live tensors, which come last.

    Attributes:
        steps: The steps with their values.
        copies: Their copies.
        needed: Those that change something. The sources are not the targets of others.
    """

    steps: list[Prepared]
    copies: list[Copy]
    needed: list[Copy]


def put_new(fetched: Fetched, commit: Commit) -> InPlace:
    """Put new tensors into their slots, and values into live tensors of a class.

    Args:
        fetched: All values of a load.
        commit: Undoes all of it.

    Returns:
        The copies that are left. A commit cannot undo them without a backup.

    Raises:
        PlacementError: If a class does not take its values, or somebody has got hold of a tensor.
    """
    # Sorted before anything is placed: a tensor on meta is live as soon as it has its content.
    copied, new = list[Prepared](), list[Prepared]()
    for item in fetched.steps:
        (copied if item[0].in_place else new).append(item)
    ways = {"assign": commit.assign, "swap": commit.swap}
    for making, tensor in fetched.made:
        ways[making.mode](making.group, tensor)
    commit.fill([(step.group, value) for step, value in fetched.plain if step.mode == "swap"])
    new += [one for one in fetched.plain if one[0].mode != "swap"]
    for step, value in new:
        assert isinstance(value, torch.Tensor)
        ways[step.mode](step.group, _reshape_like(step.group.tensor, value))
    copies = list[Copy]()
    for step, value in copied:
        local = local_tensor(step.group.tensor)
        copies.append(Copy(value, local, step.spans or everything(local.shape)))
    needed = copy_overlapping_sources(copies)
    for (step, _), copy in zip(copied, needed, strict=True):
        # These may fail on one rank alone, so they come before the ranks agree, with a backup.
        if copy is not None and _may_fail(copy):
            commit.keep_values(step.group.tensor, step.key)
            try:
                copy_values([copy])
            except Exception as error:
                raise not_taken_error(step, copy.source, fetched.path, error) from error
    plain = [copy for copy in needed if copy is not None and not _may_fail(copy)]
    return InPlace(copied, copies, plain)


def copy_in_place(
    last: InPlace, commit: Commit, *, backup: bool = False, advance: Advance
) -> dict[str, int]:
    """Copy values in place. Return key -> the number of values that overflowed in the cast.

    Args:
        last: The copies.
        commit: Keeps the values from before, if it is to.
        backup: Whether something that may fail comes after this.
        advance: Called with a number of bytes as they are copied.

    Raises:
        IntegrityError: If a file was overwritten meanwhile. The tensors then have mixed values.
    """
    for (step, _), copy in zip(last.steps, last.copies, strict=True) if backup else ():
        if not _may_fail(copy):
            commit.keep_values(step.group.tensor, step.key)
    copy_values(last.needed)
    for views in {step.one.views for step, _ in last.steps if isinstance(step.one, FileTensor)}:
        views.files.check()
    for step, _ in last.steps:
        advance(0 if step.owned else step.span)
    pairs = ((step.key, copy) for (step, _), copy in zip(last.steps, last.copies, strict=True))
    counts = {key: count_cast(copy) for key, copy in pairs if is_plain(copy.target)}
    return {key: count for key, count in counts.items() if count}


def _may_fail(copy: Copy) -> bool:
    """Return whether a copy runs code of a class, or is one that torch may refuse."""
    ends = [copy.target, *([copy.source] if isinstance(copy.source, torch.Tensor) else [])]
    return not all(is_plain(end) and oddity(end) is None for end in ends)


def _reshape_like(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the model's shape: an empty shard may have another shape."""
    slot = like if is_dtensor(tensor) else local_tensor(like)
    return tensor if is_lazy(slot) or tensor.shape == slot.shape else tensor.view(slot.shape)

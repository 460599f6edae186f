"""One small exchange of who is well, so that every rank goes on or none does.

A load prepares everything before it changes anything. Between the two, the ranks that hold parts of
one model tell each other whether they are ready: a rank that lacks a file then stops all of them,
with the same error, instead of leaving the others to train beside a model that was not loaded.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchlift.distributed.layout import is_dtensor
from torchlift.errors import CheckpointError

#: rank -> what it met, or None.
Problems = dict[int, "CheckpointError | None"]


@contextmanager
def together(
    tensors: Iterable[torch.Tensor], collective: bool | None = None
) -> Iterator[Callable[[], None]]:
    """Let the ranks that share tensors enter the second half of the block together or not at all.

    The block gets a function to call once, when nothing has changed yet. It returns when every rank
    has called it. If one left the block with an error before that, it raises on all others, and
    the block raises on that one, the same error with the rank in its text.

    Args:
        tensors: what the ranks share; those of its DTensors' meshes take part.
        collective: None: when there are DTensors among the tensors. True: also when there are none,
            and then over the whole process group. False: never.

    Example:
        >>> with together([]) as agree:  # no process group: nobody to agree with
        ...     agree()
    """
    groups = _groups(tensors, collective)
    if not groups:
        yield lambda: None
        return
    asked = False

    def agree() -> None:
        nonlocal asked
        asked = True
        settle(_exchange(groups, None), None)

    try:
        yield agree
    except BaseException as error:
        if not asked:
            settle(_exchange(groups, error), error)
        raise


def tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Every parameter and buffer."""
    yield from model.parameters()
    yield from model.buffers()


def _groups(tensors: Iterable[torch.Tensor], collective: bool | None) -> list[Any]:
    """The process groups over which the ranks' states spread to all of them."""
    # Looked up, so that a process without torch.distributed does not import it.
    dist: Any = sys.modules.get("torch.distributed")
    if collective is False or dist is None or not dist.is_available() or not dist.is_initialized():
        return []
    meshes = list(dict.fromkeys(t.device_mesh for t in tensors if is_dtensor(t)))
    world = dist.get_world_size()
    if not meshes and not collective:
        return []
    if not meshes or any(mesh.size() == world for mesh in meshes):
        return [dist.group.WORLD]
    inside = [mesh for mesh in meshes if mesh.get_coordinate() is not None]
    groups = [mesh.get_group(axis) for mesh in inside for axis in range(mesh.ndim)]
    # One sweep over the dimensions of a mesh reaches all of it; what goes from one mesh to
    # another may have to come back.
    return groups * (2 if len(inside) > 1 else 1)


def _exchange(groups: list[Any], error: BaseException | None) -> Problems:
    """What every rank met."""
    dist = torch.distributed
    known: Problems = {dist.get_rank(): None if error is None else _portable(error)}
    for group in groups:
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, known, group=group)
        for part in parts:
            known.update(part)
    return known


def world_of() -> tuple[int, int]:
    """(this process's rank, number of processes); (0, 1) without a process group.

    Example:
        >>> world_of()
        (0, 1)
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def exchange(error: BaseException | None, value: object) -> tuple[Problems, dict[int, Any]]:
    """What every rank of the process group met, and a small value of each."""
    dist = torch.distributed
    mine = (dist.get_rank(), None if error is None else _portable(error), value)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return {rank: met for rank, met, _ in parts}, {rank: value for rank, _, value in parts}


def _portable(error: BaseException) -> CheckpointError:
    """The error as another process can have it."""
    if isinstance(error, CheckpointError):
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return CheckpointError(str(error))
        return error
    return CheckpointError(f"{type(error).__name__}: {error}")


def settle(problems: Problems, own: BaseException | None) -> None:
    """Return when nobody met anything; else raise the error of the first rank that did.

    Raises:
        CheckpointError: that error, with the rank in front. Where all met the same one, each has
            its own. An error that is not about a checkpoint, such as a wrong argument, stays what
            it is on the rank that made it.
    """
    met = {rank: error for rank, error in sorted(problems.items()) if error is not None}
    if not met:
        return
    if own is not None:
        same = len(met) == len(problems) and len(set(map(str, met.values()))) == 1
        if same or not isinstance(own, CheckpointError):
            return  # the caller raises it
    rank, first = next(iter(met.items()))
    others = len(met) - 1
    more = f" (and {others} other{'s' if others > 1 else ''})" if others else ""
    error = copy.copy(first)
    error.reason = f"on rank {rank}{more}: {first.reason}"
    error.args = (error.reason,)
    raise error from own

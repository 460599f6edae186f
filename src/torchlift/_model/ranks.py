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

from torchlift._model.dtensor import is_dtensor
from torchlift._model.names import is_fsdp1, wrapped_by
from torchlift._model.torch_private import object_device
from torchlift.errors import CheckpointError

#: rank -> what it met, or None.
Problems = dict[int, "CheckpointError | None"]


def has_group() -> bool:
    """Whether a default process group exists.

    Example:
        >>> has_group()
        False
    """
    # Looked up, so that a process without torch.distributed does not import it.
    dist: Any = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def world_of() -> tuple[int, int]:
    """(this process's rank, number of processes); (0, 1) without a process group.

    Example:
        >>> world_of()
        (0, 1)
    """
    if not has_group():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def rank() -> int:
    """This process's rank, 0 where there is no process group.

    Example:
        >>> rank()
        0
    """
    return world_of()[0]


class Circle:
    """The processes that do something together, and all of it or nothing.

    A process group may hold processes that have nothing to do with a model, so a collective over
    all of it could wait for ever for one that never loads.

    Args:
        groups: process groups over which what a process knows spreads to all of them.
        kind: what is raised for another's error is one of these; here a caller's ``except`` says.

    Example:
        >>> Circle([]).agree(None, "well")  # nobody else
        {0: 'well'}
    """

    def __init__(self, groups: list[Any], kind: type[CheckpointError] = CheckpointError) -> None:
        self.groups = groups
        self._kind = kind

    @classmethod
    def of_all(cls, kind: type[CheckpointError] = CheckpointError) -> Circle:
        """Every process of the default process group."""
        return cls([torch.distributed.group.WORLD] if has_group() else [], kind)

    @classmethod
    def of_model(
        cls,
        tensors: Iterable[torch.Tensor],
        modules: Iterable[nn.Module] = (),
        kind: type[CheckpointError] = CheckpointError,
    ) -> Circle:
        """The processes of the meshes of DTensors, and of DDP and FSDP1 among the modules."""
        return cls(_groups(tensors, modules) if has_group() else [], kind)

    @property
    def is_everybody(self) -> bool:
        """Whether all processes of the default process group are told directly."""
        return has_group() and self.groups == [torch.distributed.group.WORLD]

    def exchange(
        self, error: BaseException | None, value: object = None
    ) -> tuple[Problems, dict[int, Any]]:
        """What every process met, and a small value of each."""
        met = error if error is None or not self.groups else portable(error)
        known: dict[int, Any] = {rank(): (met, value)}
        for group in self.groups:
            size = torch.distributed.get_world_size(group)
            parts: list[Any] = [known] * size
            if size > 1:
                torch.distributed.all_gather_object(parts, known, group=group)
            known = {who: found for part in parts for who, found in part.items()}
        return {who: m for who, (m, _) in known.items()}, {who: v for who, (_, v) in known.items()}

    def agree(self, error: BaseException | None, value: object = None) -> dict[int, Any]:
        """Return the values of all when none met an error; else raise on every process.

        Raises:
            CheckpointError: see `settle`. On a process that met an error itself it may be that one.
        """
        try:
            problems, values = self.exchange(error, value)
        except BaseException as lost:
            if error is not None:
                raise error from lost  # what went wrong first is what has to be mended
            raise
        settle(problems, error, self._kind)
        if error is not None:
            raise error
        return values

    def all_well(self, error: BaseException | None, again: bool = False) -> bool:
        """What `agree` without values does; one number per process where none met an error.

        Measured on 2 ranks with gloo: 0.15 ms, against 0.8 ms for exchanging objects.

        Args:
            error: what this process met.
            again: whether this process wants to be asked once more.

        Returns:
            Whether any process wants that.
        """
        if len(self.groups) != 1:
            # What one group tells may reach some processes of another and not yet all.
            return any(self.agree(error, again).values())
        state = _FAILED if error is not None else int(again)
        (group,) = self.groups
        device = object_device(group)
        shared = torch.tensor([state], device=device)
        torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX, group)
        state = int(shared.item())
        if state == _FAILED:
            self.agree(error)
        return bool(state)

    @contextmanager
    def together(self) -> Iterator[Agree]:
        """Let the processes go through a block together or not at all; see `together`."""
        if not self.groups:
            yield lambda again: again
            return
        expected = True

        def agree(again: bool) -> bool:
            nonlocal expected
            expected = False
            expected = self.all_well(None, again)
            return expected

        try:
            yield agree
        except BaseException as error:
            if expected:
                self.all_well(error)
            raise


_FAILED = 2

#: Called with whether this process wants to be asked again; says whether any does.
Agree = Callable[[bool], bool]


@contextmanager
def together(tensors: Iterable[torch.Tensor], collective: bool | None = None) -> Iterator[Agree]:
    """Let the ranks that share tensors enter the second half of the block together or not at all.

    The block gets a function to call when nothing has changed yet. It returns when every rank has
    called it. If one left the block with an error before that, it raises on all others, and the
    block raises on that one, the same error with the rank in its text. Where any rank asks for it,
    all are asked again, and so on: by then something has changed that can be taken back.

    Args:
        tensors: what the ranks share; those of its DTensors' meshes take part.
        collective: None: when there are DTensors among the tensors. True: also when there are none,
            and then over the whole process group. False: never.

    Example:
        >>> with together([]) as agree:  # no process group: nobody to agree with
        ...     agree(False)
        False
    """
    circle = Circle([]) if collective is False else Circle.of_model(tensors)
    if collective and not circle.groups:
        circle = Circle.of_all()
    with circle.together() as agree:
        yield agree


def tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Every parameter and buffer."""
    yield from model.parameters()
    yield from model.buffers()


def _groups(tensors: Iterable[torch.Tensor], modules: Iterable[nn.Module]) -> list[Any]:
    """The process groups over which the ranks' states spread to all of them."""
    dist = torch.distributed
    meshes = list(dict.fromkeys(t.device_mesh for t in tensors if is_dtensor(t)))
    replicas = [group for module in modules for group in _groups_of(module)]
    world = dist.get_world_size()
    sizes = [mesh.size() for mesh in meshes] + [dist.get_world_size(group) for group in replicas]
    if world in sizes:
        return [dist.group.WORLD]
    inside = [mesh for mesh in meshes if mesh.get_coordinate() is not None]
    groups = [mesh.get_group(axis) for mesh in inside for axis in range(mesh.ndim)] + replicas
    # One sweep over the dimensions of a mesh reaches all of it; what goes from one mesh to another
    # may have to come back. Always twice: a process inside one mesh does not know whether another
    # of its processes is inside two.
    return groups * 2


def _groups_of(module: nn.Module) -> list[Any]:
    """The process groups of a module that wraps another for all of its processes."""
    if wrapped_by(module)[0] == "module":
        return [module.process_group]
    if not is_fsdp1(module):
        return []
    # A hybrid one shards over the first and repeats over the second.
    both = [module.process_group, getattr(module, "_inter_node_pg", None)]
    return [group for group in both if group is not None]


def portable(
    error: BaseException, kind: type[CheckpointError] = CheckpointError
) -> CheckpointError:
    """The error as another process can have it: a `kind`, if it is not one already.

    Example:
        >>> portable(KeyError("x"))
        CheckpointError("KeyError: 'x'")
    """
    if not isinstance(error, CheckpointError):
        return kind(f"{type(error).__name__}: {error}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return kind(str(error))
    if isinstance(error, kind):
        return error
    made = kind(error.reason)
    made.__dict__.update(vars(error))
    return made


def settle(
    problems: Problems, own: BaseException | None, kind: type[CheckpointError] = CheckpointError
) -> None:
    """Return when nobody met anything; else raise the error of the first rank that did.

    Raises:
        CheckpointError: that error, with the rank in front, as a `kind`. Where all met the same
            one, each has its own. An error that is not about a checkpoint, such as a wrong
            argument, stays what it is on the rank that made it.
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
    error = copy.copy(portable(first, kind))
    error.reason = f"on rank {rank}{more}: {first.reason}"
    error.args = (error.reason,)
    raise error from own

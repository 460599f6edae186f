"""Exchange small messages between ranks, so that all continue or none does.

A load prepares everything before it changes anything. Between the two, the ranks that share a model
exchange whether they are ready. If one rank lacks a file, all ranks stop with the same error.
"""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from torchlift._model.dtensor import is_dtensor
from torchlift._model.names import is_fsdp1, wrapped_by
from torchlift._model.torch_private import set_timeout, timeout_of
from torchlift._system.interrupts import uninterrupted
from torchlift._system.text import clipped_list
from torchlift.errors import CheckpointError

T = TypeVar("T")
M = TypeVar("M")

#: For each thread: the error of the last exchange and its process groups, by their identity.
_LAST = threading.local()

#: Seconds in which processes that come at one time make a group; of thousands, 0.1 more for each.
_MEETING = 15

#: Called with whether this process is to be asked again; says whether any is.
Agree = Callable[[bool], bool]


class StepResult(NamedTuple, Generic[T, M]):
    """The result of one step of a collective on one rank.

    Attributes:
        value: what the step made. It stays on this rank.
        message: what all ranks receive: a few bytes that can be pickled.
    """

    value: T
    message: M


class Exchange(NamedTuple, Generic[T, M]):
    """The result of one step of a collective on all ranks.

    Attributes:
        value: what the step made on this rank.
        by_rank: rank -> its message, in the order of ranks.
    """

    value: T
    by_rank: dict[int, M]


def has_group() -> bool:
    """Say whether a default process group exists.

    Example:
        >>> has_group()
        False
    """
    # Looked up, so that a process without torch.distributed does not import it.
    dist: Any = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def world_of() -> tuple[int, int]:
    """Return (this process's rank, number of processes), or (0, 1) without a process group.

    Example:
        >>> world_of()
        (0, 1)
    """
    if not has_group():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def ranks_of(process_group: Any = None) -> list[int]:
    """Return the ranks of a process group in order, by default of all processes.

    Example:
        >>> ranks_of()
        [0]
    """
    if process_group is None or not has_group():
        return list(range(world_of()[1]))
    return sorted(torch.distributed.get_process_group_ranks(process_group))


def rank() -> int:
    """Return this process's rank, or 0 without a process group.

    Example:
        >>> rank()
        0
    """
    return world_of()[0]


class _Answer(NamedTuple):
    """The message of one rank in an exchange.

    Attributes:
        error: The error that its step raised, or None.
        message: The message that its step returned.
    """

    error: CheckpointError | None
    message: Any


class RankGroup:
    """Run steps on several processes, all or none.

    Only processes that share the model take part. A collective over all processes could wait
    forever for one that never loads.

    Args:
        groups: Process groups. In their order, messages of each process reach all of them.
        kind: The class of the error that is raised for another rank's error.

    Example:
        >>> RankGroup([]).run(lambda: StepResult("stays here", "is sent"))  # no other process
        Exchange(value='stays here', by_rank={0: 'is sent'})
    """

    def __init__(self, groups: list[Any], kind: type[CheckpointError] = CheckpointError) -> None:
        self.groups = groups
        self._kind = kind

    @classmethod
    def of_all(
        cls, kind: type[CheckpointError] = CheckpointError, process_group: Any = None
    ) -> RankGroup:
        """Take every process of a process group: of the default one where none is named."""
        return cls([process_group or torch.distributed.group.WORLD] if has_group() else [], kind)

    @classmethod
    def of_model(
        cls,
        tensors: Iterable[torch.Tensor],
        modules: Iterable[nn.Module] = (),
        kind: type[CheckpointError] = CheckpointError,
        *,
        collective: bool | None = None,
        process_group: Any = None,
    ) -> RankGroup:
        """Take the processes of the meshes of DTensors, and of DDP and FSDP1 among the modules.

        Args:
            tensors: of the model.
            modules: of the model.
            kind: see the class.
            collective: False: this process alone. True: all, where nothing ties the model to any.
            process_group: its processes instead.

        Raises:
            ValueError: a process group, and nobody to talk to.
        """
        if collective is False or not has_group():
            if process_group is not None:
                raise ValueError(
                    "process_group= is for a call that all its ranks make: leave it out, or "
                    "collective=False"
                )
            return cls([], kind)
        if process_group is not None:
            return cls([process_group], kind)
        found = cls(_groups(tensors, modules), kind)
        return cls.of_all(kind) if collective and not found.groups else found

    @cached_property
    def _talking(self) -> list[Any]:
        return [_on_cpu(group) for group in self.groups]

    def run(
        self,
        step: Callable[[], tuple[T, M]],
        validate: Callable[[dict[int, M]], None] = lambda _: None,
    ) -> Exchange[T, M]:
        """Run a step on every rank. If it raises on any rank, raise one error on all of them.

        Args:
            step: returns a `StepResult`.
            validate: called with the messages of all ranks. It raises on all ranks, or on none.

        Raises:
            CheckpointError: If the step raised on a rank (see `raise_first`), or a rank does not
                answer. A rank whose own step raised may raise its own error.
        """
        groups, _LAST.heard = self._talking, (None, [])
        problem: BaseException | None = None
        done: tuple[T, M] | None = None
        try:
            done = step()
        except BaseException as error:
            problem = error
        # An interrupt between two messages of one exchange would make the next one a wrong one.
        with uninterrupted():
            try:
                by_rank = self._exchange_messages(groups, problem, done and done[1])
                validate(by_rank)
            except BaseException as error:
                # Of this thread alone; the error itself would keep alive all that it has seen.
                _LAST.heard = id(error), [*map(id, self.groups)]
                raise
        assert done is not None
        return Exchange(done[0], by_rank)

    def _has_heard(self, error: BaseException | None) -> bool:
        """Say whether all have met an error, or one that it was made of, in an exchange."""
        heard, groups = _LAST.heard
        while error is not None and groups == [*map(id, self.groups)]:
            if id(error) == heard:
                return True
            error = error.__cause__ or error.__context__
        return False

    def _exchange_messages(
        self, groups: list[Any], problem: BaseException | None, message: Any
    ) -> dict[int, Any]:
        """Return the messages of all ranks. Raise on all ranks if one of them has a problem."""
        known = {rank(): _Answer(None if problem is None else portable(problem), message)}
        try:
            for group in groups:
                known = _gather(known, group)
        except BaseException as lost:
            if problem is not None:
                raise problem from lost  # what went wrong first is what has to be mended
            if not isinstance(lost, RuntimeError):
                raise
            raise self._lost_error(lost) from lost
        raise_first({who: answer.error for who, answer in known.items()}, problem, self._kind)
        if problem is not None:
            raise problem
        return {who: known[who].message for who in sorted(known)}

    def gather(self, value: T) -> list[T]:
        """Send a value to the first rank alone. All ranks call this.

        Returns:
            The values of all ranks on the first rank, and nothing on the others.

        Raises:
            CheckpointError: If a rank does not answer.
        """
        if not self.groups:
            return [value]
        (group,) = self._talking
        first, *others = ranks_of(group)
        rows = [value, *(value for _ in others)] if rank() == first else None
        try:
            _call_again(torch.distributed.gather_object, value, rows, dst=first, group=group)
        except RuntimeError as lost:
            raise self._lost_error(lost) from lost
        return rows or []

    def _lost_error(self, lost: RuntimeError) -> CheckpointError:
        ranks = sorted({who for group in self.groups for who in ranks_of(group)})
        return self._kind(
            "another rank died or does not answer",
            expected=f"the same call on the ranks {clipped_list(map(str, ranks))}",
            found=str(lost).partition("\n")[0],
            hint="Nothing has changed here; of a save the file is the old one, or the complete "
            "new one if that rank was last.",
        )

    @contextmanager
    def together(self) -> Iterator[Agree]:
        """Let the processes enter the second half of the block together or not at all.

        The block receives a function, `agree`, and calls it before it changes anything. The
        function returns when every rank has called it. If a rank leaves the block with an error
        before that, all ranks raise this error with the rank in its text. If a rank passes True,
        all ranks must call the function again later.

        Example:
            >>> with RankGroup([]).together() as agree:  # nobody to agree with
            ...     agree(False)
            False
        """
        expected = bool(self.groups)
        # What an earlier block has raised may be raised again, or have left its place to another.
        _LAST.heard = None, []

        def agree(again: bool) -> bool:
            nonlocal expected
            expected = False
            again = any(self.run(lambda: StepResult(None, again)).by_rank.values())
            expected = again and bool(self.groups)
            return again

        def leave(error: BaseException) -> StepResult[None, None]:
            raise error

        try:
            yield agree
        except BaseException as error:
            # Of what `run` raised all have heard, and nobody would answer.
            if expected and not self._has_heard(error):
                self.run(partial(leave, error))
            raise


def _gather(known: dict[int, _Answer], group: Any) -> dict[int, _Answer]:
    """Return the answers that all ranks of a group know together."""
    found: list[Any] = [known] * torch.distributed.get_world_size(group)
    if len(found) > 1:
        _call_again(torch.distributed.all_gather_object, found, known, group=group)
    return {who: answer for each in found for who, answer in each.items()}


def _call_again(collective: Callable[..., object], *args: Any, **options: Any) -> None:
    """Call a collective, and again if it fails on this rank, such as without memory for a message.

    The others wait for the message. If ranks are lost, or the time is up, it fails again at once.
    """
    try:
        collective(*args, **options)
    except Exception:
        collective(*args, **options)


def tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield every parameter and buffer."""
    yield from model.parameters()
    yield from model.buffers()


#: Process group of all ranks without a backend for the CPU -> one that has one.
_COMPANIONS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _on_cpu(group: Any) -> Any:
    """Return a process group of the same ranks over which a rank may wait for another.

    NCCL's watchdog ends processes that wait longer than its timeout, such as for a slow fsync of
    another, and every agreement would take memory of the accelerator. Only where all processes come
    to the agreement, as to every save: of some, each would have to have made as many groups before,
    since torch names a group by how many there are.
    """
    dist = torch.distributed
    has_cpu = "cpu:" in dist.get_backend_config(group) or not dist.is_gloo_available()
    if has_cpu or dist.get_world_size(group) < dist.get_world_size():
        return group
    if group not in _COMPANIONS:
        limit = timeout_of(dist.group.WORLD)
        _COMPANIONS[group] = dist.new_group(backend="gloo", timeout=limit)
    return _COMPANIONS[group]


def new_gloo_group(limit: timedelta | None = None, ranks: list[int] | None = None) -> Any:
    """Make a gloo group of all or some processes, which call this together.

    Args:
        limit: The timeout of the group. None: the timeout of the job.
        ranks: Its processes. None: all.

    Raises:
        CheckpointError: If a process does not call this.
    """
    dist = torch.distributed
    limit = limit or timeout_of(dist.group.WORLD)
    # Who has met an error does not come, and cannot tell those that wait.
    soon = timedelta(seconds=_MEETING + dist.get_world_size() / 10)
    try:
        timeout = min(soon, limit or soon)
        is_part = ranks is not None and len(ranks) < dist.get_world_size()
        group = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=is_part)
    except RuntimeError as error:
        raise CheckpointError(
            "the ranks cannot make a process group: one has failed, died, or does not answer",
            found=str(error).partition("\n")[0],
        ) from error
    set_timeout(group, limit)
    return group


def _groups(tensors: Iterable[torch.Tensor], modules: Iterable[nn.Module]) -> list[Any]:
    """Return the process groups over which the ranks' states spread to all of them."""
    dist = torch.distributed
    meshes = list(dict.fromkeys(t.device_mesh for t in tensors if is_dtensor(t)))
    replicas = [group for module in modules for group in _groups_of(module)]
    sizes = [mesh.size() for mesh in meshes] + [dist.get_world_size(group) for group in replicas]
    if dist.get_world_size() in sizes:
        return [dist.group.WORLD]
    inside = [mesh for mesh in meshes if mesh.get_coordinate() is not None]
    groups = [mesh.get_group(axis) for mesh in inside for axis in range(mesh.ndim)] + replicas
    # One sweep over the dimensions of a mesh reaches all of it; what goes from one mesh to another
    # may have to come back. Always twice: a process inside one mesh does not know whether another
    # of its processes is inside two.
    return groups * 2


def _groups_of(module: nn.Module) -> list[Any]:
    """Return the process groups of a module that wraps another for all of its processes."""
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
    """Return the error as another process can have it: a `kind`, if it is not one already.

    Example:
        >>> portable(KeyError("x"))
        CheckpointError("KeyError: 'x'")
    """
    if not isinstance(error, CheckpointError):
        try:
            text = f"{type(error).__name__}: {error}"
        except Exception:  # of its own `__str__`: the other ranks would wait for this one
            text = type(error).__name__
        return kind(text)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return kind(str(error))
    if isinstance(error, kind):
        return error
    made = kind(error.reason)
    made.__dict__.update(vars(error))
    return made


def raise_first(
    problems: dict[int, CheckpointError | None],
    own: BaseException | None,
    kind: type[CheckpointError] = CheckpointError,
) -> None:
    """Raise the error of the first rank that has one, unless this rank should raise its own.

    Args:
        problems: Rank -> its error, or None.
        own: The error of this rank, or None.
        kind: The class of the error to raise.

    Raises:
        CheckpointError: If a rank has an error. The text begins with the rank. A rank raises its
            own error if all ranks have the same one, or if it is not about a checkpoint.
    """
    raised = {rank: error for rank, error in sorted(problems.items()) if error is not None}
    if not raised:
        return
    if own is not None:
        same = len(raised) == len(problems) and len(set(map(str, raised.values()))) == 1
        if same or not isinstance(own, CheckpointError):
            return  # the caller raises it
    rank, first = next(iter(raised.items()))
    others = len(raised) - 1
    more = f" (and {others} other{'s' if others > 1 else ''})" if others else ""
    error = copy.copy(portable(first, kind))
    error.reason = f"on rank {rank}{more}: {first.reason}"
    error.args = (error.reason,)
    raise error from own

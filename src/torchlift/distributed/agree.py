"""Every rank raises or none does: problems are exchanged before anything changes."""

from __future__ import annotations

import pickle
from collections.abc import Iterable

import torch
from torch import nn

from torchlift.distributed.layout import is_dtensor
from torchlift.distributed.names import wrapped_by
from torchlift.distributed.options import StateDictMismatch
from torchlift.errors import CheckpointError


def has_group() -> bool:
    """Whether a default process group exists.

    Example:
        >>> has_group()
        False
    """
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def rank() -> int:
    """This process's rank, 0 where there is no process group.

    Example:
        >>> rank()
        0
    """
    return torch.distributed.get_rank() if has_group() else 0


class Circle:
    """The processes that load a model together: those of its meshes and of DDP.

    A process group may hold processes that have nothing to do with a model, so a collective over
    all of it could wait for ever for one that never loads.
    """

    def __init__(self, model: nn.Module, tensors: Iterable[torch.Tensor | None]) -> None:
        self._groups: list[torch.distributed.ProcessGroup] = []
        if not has_group():
            return
        meshes = {t.device_mesh: None for t in tensors if t is not None and is_dtensor(t)}
        for mesh in meshes:
            self._groups += [mesh.get_group(axis) for axis in range(mesh.ndim)]
        for module in model.modules():
            if wrapped_by(module)[0] == "module":
                self._groups.append(module.process_group)  # type: ignore[arg-type]
        # One sweep over the dimensions of a mesh reaches all of it; what travels from one mesh to
        # another may need to come back.
        self._groups *= 2 if len(meshes) > 1 else 1

    def agree(self, problem: Exception | None) -> None:
        """Raise on every process what any of them met; return only when none met anything."""
        problems = {} if problem is None else {rank(): problem}
        for group in self._groups:
            problems = _merge(problems, group)
        raise_any(problems)


def agree_everywhere(problem: Exception | None) -> None:
    """The same over the whole process group."""
    problems = {} if problem is None else {rank(): problem}
    raise_any(_merge(problems, None) if has_group() else problems)


def _merge(
    problems: dict[int, Exception], group: torch.distributed.ProcessGroup | None
) -> dict[int, Exception]:
    size = torch.distributed.get_world_size(group)
    if size == 1:
        return problems
    gathered: list[dict[int, Exception] | None] = [None] * size
    sent = {who: _portable(problem) for who, problem in problems.items()}
    torch.distributed.all_gather_object(gathered, sent, group=group)
    return {who: error for part in gathered for who, error in (part or {}).items()}


def _portable(problem: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(problem))
    except Exception:
        return RuntimeError(f"{type(problem).__name__}: {problem}")
    return problem


def raise_any(problems: dict[int, Exception]) -> None:
    """Raise the one problem that all ranks share, or one error that says which rank met what.

    Example:
        >>> raise_any({})
        >>> raise_any({0: StateDictMismatch("bad"), 3: StateDictMismatch("bad")})
        Traceback (most recent call last):
        torchlift.distributed.options.StateDictMismatch: on ranks 0, 3: bad
    """
    if not problems:
        return
    texts: dict[str, list[int]] = {}
    for who, problem in sorted(problems.items()):
        texts.setdefault(str(problem), []).append(who)
    first = problems[min(problems)]
    everyone = torch.distributed.get_world_size() if has_group() else 1
    if len(texts) == 1 and len(problems) == everyone:
        raise first
    said = "; ".join(f"on {_ranks(ranks)}: {text}" for text, ranks in texts.items())
    if isinstance(first, CheckpointError):
        error = StateDictMismatch(said)
        found = {key: value for key, value in vars(first).items() if key not in _SAID}
        error.__dict__.update(found)
        raise error from first
    raise RuntimeError(said) from first


_SAID = {"reason", "file", "entry", "expected", "found", "hint"}


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"

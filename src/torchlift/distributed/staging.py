"""Copy the state of a training run to the host: at once, or beside the steps that do not change it.

torch's stager copies, into the memory of the copy before.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from torchlift._model import is_closed, is_dtensor, local_tensor, memory_of, wrap
from torchlift._system.containers import leaves, map_leaves
from torchlift.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.staging import DefaultStager


class Staging:
    """Copies of states on the host, each in the memory of the one before.

    Args:
        overlap: copy beside training what only the steps of optimizers change: their parameters,
            and what they have of each. The next step waits for the copy.
    """

    def __init__(self, overlap: bool) -> None:
        self._overlap = overlap
        self._stager: DefaultStager | None = None
        self.gate = _Gate()
        self._hooks: WeakKeyDictionary[torch.optim.Optimizer, Any] = WeakKeyDictionary()
        self._later: dict[int, torch.Tensor] = {}
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._ready: Any = None

    def take(
        self, states: Mapping[str, Any], rest: Mapping[str, Any], objects: Mapping[str, object]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Copy what may not wait.

        Args:
            states: of models and optimizers, in containers of their own.
            rest: states of all else.
            objects: all of them.

        Returns:
            The states, copied but for what `finish` copies, and all else.
        """
        states = _resolved(states)
        found = _tensors(states)
        self._later = self._waiting(states, objects) if self._overlap else {}
        self._versions = [(each, each._version) for each in map(local_tensor, self._later.values())]
        now = [leaf for leaf in found if id(leaf) not in self._later]
        made, others = self._stage(now, rest)
        return copy.deepcopy(states, {**self._later, **made}), others

    def begin(self) -> None:
        """Let optimizers wait from now on, until `finish` or `end`."""
        if self._later:
            if torch.accelerator.is_available():
                self._ready = torch.accelerator.current_stream().record_event()
            self.gate.open.clear()
            self.gate.waited = 0.0

    def finish(self, states: dict[str, Any]) -> dict[str, Any]:
        """Return the states with copies of what `take` has left; in another thread.

        Raises:
            CheckpointError: something else than an optimizer wrote to it meanwhile.
        """
        if not self._later:
            return states
        with ExitStack() as stack:
            stack.callback(self.end)
            if self._ready is not None:
                stream = torch.Stream()
                stream.wait_event(self._ready)
                stack.enter_context(stream)
            made, _ = self._stage([*self._later.values()], {})
            changed = sum(tensor._version != version for tensor, version in self._versions)
            count, self._versions = len(self._versions), []
        if changed:
            raise CheckpointError(
                "tensors were written to while they were copied beside training",
                expected="no change but by the next step of an optimizer that is saved with them",
                found=f"{changed} of {count} tensors changed",
                hint="Write to them after that step, or make the Keeper without overlap=True.",
            )
        return copy.deepcopy(states, {**{id(leaf): leaf for leaf in _tensors(states)}, **made})

    def end(self) -> None:
        """Let no optimizer wait any more."""
        self._later, self._ready = {}, None
        self.gate.open.set()

    def close(self) -> None:
        """Free the memory."""
        for handle in self._hooks.values():
            handle.remove()
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def _waiting(
        self, states: Mapping[str, Any], objects: Mapping[str, object]
    ) -> dict[int, torch.Tensor]:
        """Return, by their identity, the tensors that only the steps of optimizers change."""
        found, changing = [], set()
        for name, optimizer in objects.items():
            if isinstance(optimizer, torch.optim.Optimizer):
                if optimizer not in self._hooks:
                    self._hooks[optimizer] = optimizer.register_step_pre_hook(self.gate)
                found += _tensors(states[name]["state"])
                for group in optimizer.param_groups:
                    changing |= {*map(_memory, group["params"])} - {None}
        found += [leaf for leaf in _tensors(states) if _memory(leaf) in changing]
        return {id(leaf): leaf for leaf in found}

    def _stage(
        self, tensors: Sequence[torch.Tensor], rest: Mapping[str, Any]
    ) -> tuple[dict[int, torch.Tensor], Any]:
        """Return copies, in the memory of the last ones where they fit, by what they are of."""
        # A second of imports, which a program that only resumes does without.
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        is_new = self._stager is None or is_closed(self._stager)
        if self._stager is None or is_new:
            pinned = torch.cuda.is_available()
            self._stager = DefaultStager(StagingOptions(pinned, False, False, pinned))
        try:
            # Of DTensors what they hold: with their layouts torch's stager takes ten times as long,
            # which for 200 of them is the time that 500 MiB take.
            state: Any = [[local_tensor(leaf) for leaf in tensors], _resolved(rest)]
            state = self._stager.stage(state)
        except AssertionError:  # a storage has another size than at the last save
            if is_new:  # or an object of the caller raises it when it is copied
                raise
            self._stager.close()
            return self._stage(tensors, rest)
        made = {
            id(leaf): wrap(leaf, copied) if is_dtensor(leaf) else copied
            for leaf, copied in zip(tensors, state[0], strict=True)
        }
        return made, state[1]


def _tensors(states: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(states).values() if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int | None:
    return memory_of(local_tensor(tensor))


class _Gate:
    """A hook before the steps of optimizers, which keeps nothing of a `Staging`.

    Attributes:
        open: whether they may go on.
        waited: seconds that they waited for the last copy.
    """

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.waited = 0.0

    def __call__(self, *_: object) -> None:
        began = perf_counter()
        self.open.wait()
        self.waited += perf_counter() - began


class _Apart:
    """A sparse or quantised tensor, of which torch's stager makes no copy."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __deepcopy__(self, memo: object) -> torch.Tensor:
        return self.tensor.detach().clone().cpu()


def _is_apart(leaf: object) -> bool:
    is_plain = not isinstance(leaf, torch.Tensor) or is_dtensor(leaf) or leaf.is_nested
    return not is_plain and (leaf.is_quantized or leaf.layout is not torch.strided)  # type: ignore[attr-defined]


def _resolved(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return states as torch's stager copies them.

    Of conjugate and negative views it copies the memory below, and forgets to negate it.
    """

    def dense(leaf: Any, _: object) -> Any:
        if _is_apart(leaf):
            return _Apart(leaf)
        return leaf.resolve_conj().resolve_neg() if isinstance(leaf, torch.Tensor) else leaf

    def changes(leaf: object) -> bool:
        is_view = isinstance(leaf, torch.Tensor) and (leaf.is_conj() or leaf.is_neg())
        return is_view or _is_apart(leaf)

    # Only these: containers of other classes would become plain ones.
    return {
        name: map_leaves(state, dense) if any(map(changes, leaves(state).values())) else state
        for name, state in states.items()
    }

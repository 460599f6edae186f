"""Copy the state of a training run to host memory, into the memory of the last copy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchlift._model.dtensor import is_dtensor, local_tensor, wrap
from torchlift._model.torch_private import is_closed
from torchlift._system.containers import leaves, map_leaves

if TYPE_CHECKING:
    from torch.distributed.checkpoint.staging import DefaultStager


class Copies(NamedTuple):
    """Copies of the states of a run in host memory.

    Attributes:
        models: States of models and optimizers.
        others: States of all other objects.
    """

    models: dict[str, Any]
    others: dict[str, Any]


class Staging:
    """Copies states to host memory. Each copy overwrites the one before."""

    def __init__(self) -> None:
        self._stager: DefaultStager | None = None

    def copy(self, models: Mapping[str, Any], others: Mapping[str, Any]) -> Copies:
        """Copy all states.

        Args:
            models: States of models and optimizers, which may contain DTensors.
            others: States of all other objects.
        """
        models, rest = _prepare(models), _prepare(others)
        tensors = [leaf for leaf in leaves(models).values() if isinstance(leaf, torch.Tensor)]
        # Local tensors in place of DTensors: torch's stager takes ten times as long with layouts.
        # For 200 DTensors, that is the time to copy 500 MiB.
        copied, rest = self._stage([[local_tensor(leaf) for leaf in tensors], rest])
        made = {
            id(leaf): wrap(leaf, local) if is_dtensor(leaf) else local
            for leaf, local in zip(tensors, copied, strict=True)
        }
        return Copies(copy.deepcopy(models, made), rest)

    def close(self) -> None:
        """Free the memory."""
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def _stage(self, state: Any) -> Any:
        # Here, because a program that only resumes needs no second of imports.
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        is_new = self._stager is None or is_closed(self._stager)
        if self._stager is None or is_new:
            pinned = torch.cuda.is_available()
            self._stager = DefaultStager(StagingOptions(pinned, False, False, pinned))
        try:
            return self._stager.stage(state)
        except AssertionError:  # a storage has another size than at the last save
            if is_new:  # then it is an error of the caller's object
                raise
            self._stager.close()
            return self._stage(state)


class _Cloned:
    """A sparse or quantised tensor, which torch's stager does not copy."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __deepcopy__(self, memo: object) -> torch.Tensor:
        return self.tensor.detach().clone().cpu()


def _needs_clone(leaf: object) -> bool:
    is_plain = not isinstance(leaf, torch.Tensor) or is_dtensor(leaf) or leaf.is_nested
    return not is_plain and (leaf.is_quantized or leaf.layout is not torch.strided)  # type: ignore[attr-defined]


def _prepare(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return states that torch's stager can copy.

    For a conjugate or negative view it copies the memory, and does not negate it.
    """

    def dense(leaf: Any, _: object) -> Any:
        if _needs_clone(leaf):
            return _Cloned(leaf)
        return leaf.resolve_conj().resolve_neg() if isinstance(leaf, torch.Tensor) else leaf

    def changes(leaf: object) -> bool:
        is_view = isinstance(leaf, torch.Tensor) and (leaf.is_conj() or leaf.is_neg())
        return is_view or _needs_clone(leaf)

    # Only states that need it: map_leaves turns containers of other classes into plain ones.
    return {
        name: map_leaves(state, dense) if any(map(changes, leaves(state).values())) else state
        for name, state in states.items()
    }

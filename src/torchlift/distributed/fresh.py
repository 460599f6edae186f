"""The state an optimizer would start a parameter with, found out without stepping it.

torch makes that state in the first ``step()``, so its ``get_optimizer_state_dict`` takes a step
with zero gradients, which leaves Adam's counter at 1 and every later update wrong
(pytorch/pytorch#164929). Here a stand-in takes the parameter's place, in a shadow of the optimizer
that shares its code and its hyperparameters but nothing that can change.
"""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict, defaultdict
from typing import Any

import torch

from torchlift.distributed.gather import map_tensors

#: Tensors that only a state dict holds so far: an optimizer that loads them may keep them.
_unowned: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def adopt(tensor: torch.Tensor) -> bool:
    """Whether `tensor` came from `fresh_state` and nobody uses it yet; it is then taken.

    ``get_optimizer_state_dict`` on a new optimizer, ``dcp.load`` into the result and
    ``set_optimizer_state_dict`` is how a job resumes: without this, the last would hold the state
    twice for a while.
    """
    return _unowned.pop(id(tensor), None) is tensor


class FreshStates:
    """Initial states for the parameters of one optimizer.

    Args:
        optimizer: it is not changed.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.Adam([weight])
        >>> FreshStates(optimizer).of(weight)["step"]
        tensor(0.)
        >>> len(optimizer.state)
        0
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self._stateless: set[tuple[object, ...]] = set()

    @torch.no_grad()
    def of(self, param: torch.Tensor) -> dict[Any, Any]:
        """The state of `param` before its first step; empty when there is none to know of."""
        group = self._groups[id(param)]
        # Momentum-free SGD keeps no state for any parameter: one try per kind is enough.
        kind = (id(group), param.dtype, param.ndim, type(param))
        if kind in self._stateless or not param.requires_grad:
            return {}
        stand_in = torch.zeros_like(param, requires_grad=False)
        stand_in.requires_grad_()
        stand_in.grad = torch.zeros_like(stand_in, requires_grad=False)
        state = self._initialised(stand_in, group)
        if not state:
            self._stateless.add(kind)
        map_tensors(state, self._remember)
        return state

    def _remember(self, tensor: torch.Tensor) -> None:
        _unowned[id(tensor)] = tensor

    def _initialised(self, stand_in: torch.Tensor, group: dict[str, Any]) -> dict[Any, Any]:
        shadow = self._shadow(stand_in, group)
        init: Any = getattr(shadow, "_init_group", None)
        if init is not None:
            lists = list(inspect.signature(init).parameters)[1:]
            init(shadow.param_groups[0], *([] for _ in lists))
            state = dict(shadow.state.get(stand_in, {}))
            if any(value is not None for value in state.values()):
                return state
        return self._before_first_step(stand_in, group)

    def _before_first_step(self, stand_in: torch.Tensor, group: dict[str, Any]) -> dict[Any, Any]:
        """State that only a step makes: take two, and undo what counts them."""
        shadow = self._shadow(stand_in, group)
        if "lr" in shadow.param_groups[0]:
            # What follows from the learning rate must not move the stand-in's zeros.
            lr = shadow.param_groups[0]["lr"]
            shadow.param_groups[0]["lr"] = torch.zeros_like(lr) if torch.is_tensor(lr) else 0.0
        step: Any = type(shadow).step
        step = step.__wrapped__ if getattr(step, "hooked", None) else step
        try:
            step(shadow)
            first = map_tensors(dict(shadow.state.get(stand_in, {})), torch.clone)
            step(shadow)
        except (TypeError, RuntimeError):  # LBFGS wants a closure, SparseAdam sparse gradients
            return {}
        second = shadow.state.get(stand_in, {})
        return {key: _undo(value, second.get(key)) for key, value in first.items()}

    def _shadow(self, stand_in: torch.Tensor, group: dict[str, Any]) -> torch.optim.Optimizer:
        original = self._optimizer
        shadow: torch.optim.Optimizer = object.__new__(type(original))
        shadow.__dict__.update(original.__dict__)
        shadow.__dict__.pop("step", None)  # a learning rate scheduler counts calls of it
        shadow.__dict__.update(
            state=defaultdict(dict),
            param_groups=[{**group, "params": [stand_in]}],
            _optimizer_step_pre_hooks=OrderedDict(),
            _optimizer_step_post_hooks=OrderedDict(),
        )
        self._seed(shadow, stand_in, group)
        return shadow

    def _seed(
        self, shadow: torch.optim.Optimizer, stand_in: torch.Tensor, group: dict[str, Any]
    ) -> None:
        """Adagrad makes its state in the constructor: what it would be, its group says."""
        if isinstance(shadow, torch.optim.Adagrad):
            value = group["initial_accumulator_value"]
            shadow.state[stand_in] = {
                "step": torch.tensor(0.0, dtype=torch.float32),
                "sum": torch.full_like(stand_in, value, requires_grad=False),
            }


def _undo(first: Any, second: Any) -> Any:
    """What a value was before the first of two steps, where it grew by one in the second."""
    counts = isinstance(first, (int, float, torch.Tensor)) and not isinstance(first, bool)
    if not counts or (isinstance(first, torch.Tensor) and first.dim() > 0):
        return first
    return first - 1 if second is not None and second == first + 1 else first

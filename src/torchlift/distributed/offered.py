"""What there is to load from state dicts, and how rank 0 tells the others of it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from torchlift._model.dtensor import is_dtensor
from torchlift._model.names import Names
from torchlift.distributed.gather import map_tensors
from torchlift.distributed.model_state import by_name, metadata_of, tensors
from torchlift.distributed.moves import Sent, sendable
from torchlift.distributed.optimizer_state import Saved, normalised
from torchlift.distributed.options import Part, StateDictMismatch


@dataclass
class Offer:
    """What there is to load.

    Attributes:
        model: canonical name -> value; None when the model is not to be loaded.
        optimizer: the optimizers' part; None when they are not to be loaded.
        metadata: module versions of the model's part.
        tensors: with ``broadcast_from_rank0`` what rank 0 sends, elsewhere its descriptions.
        kind: device type of rank 0's model.
    """

    model: dict[str, Any] | None = None
    optimizer: Saved | None = None
    metadata: Any = None
    tensors: list[torch.Tensor | Sent] = field(default_factory=list)
    kind: str = "cpu"

    @property
    def parts(self) -> tuple[bool, bool]:
        """Whether there is a model's part, and an optimizer's."""
        return self.model is not None, self.optimizer is not None


def make_offer(
    part: Part,
    model_state: Any,
    optim_state: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    names: Names,
    strict: bool,
) -> Offer:
    """What this rank's state dicts offer to its model and optimizers.

    Raises:
        TypeError: what should be a state dict is something else.
        StateDictMismatch: there is none where one is needed.
    """
    offer = Offer(kind=_kind(names))
    # With optimizers torch takes no model state, or an empty one, for a model to leave alone.
    if part is Part.MODEL or (part is Part.BOTH and not is_nothing(model_state)):
        given = state_dict(model_state, "model_state_dict", strict)
        offer.model = by_name(given, names)
        offer.metadata = metadata_of(given, names)
    if optimizers:
        given = state_dict(optim_state, "optim_state_dict", strict)
        offer.optimizer = normalised(given, optimizers, names)
    return offer


def is_nothing(state: Any) -> bool:
    """Whether an argument is no state dict, or an empty one.

    Example:
        >>> is_nothing({}), is_nothing([])
        (True, False)
    """
    return state is None or (isinstance(state, Mapping) and not state)


def state_dict(state: Any, argument: str, strict: bool) -> Mapping[Any, Any]:
    """A state dict as it was passed, when it is one; nothing at all only where that is allowed.

    torch takes None for an empty dict, which is an error for it too unless ``strict`` is False
    (``_verify_state_dict`` in ``torch/distributed/checkpoint/state_dict.py``).

    Raises:
        TypeError: it is something else.
        StateDictMismatch: it is None, and the load is strict.

    Example:
        >>> state_dict(None, "model_state_dict", strict=False)
        {}
    """
    if state is None and strict:
        raise StateDictMismatch(
            f"{argument} is None: there is nothing to load",
            hint="Only ranks that rank 0 sends to (broadcast_from_rank0=True) need none.",
        )
    if state is not None and not isinstance(state, Mapping):
        raise TypeError(f"{argument} must be a dict, not {type(state).__name__}")
    return {} if state is None else state


def _kind(names: Names) -> str:
    for tensor in tensors(names):
        if is_dtensor(tensor):
            return tensor.device_mesh.device_type
        if not tensor.is_meta:
            return tensor.device.type
    return "cpu"


def packed(offer: Offer) -> bytes:
    """A described offer as it travels.

    Raises:
        StateDictMismatch: an object in it cannot be pickled.
    """
    # Not left to the broadcast, where what cannot be packed stops rank 0 alone.
    try:
        return pickle.dumps(offer)
    except Exception as error:
        raise StateDictMismatch(
            "an object in the state dict cannot be sent to other processes",
            found=f"{type(error).__name__}: {error}",
        ) from error


def described(offer: Offer, offered: list[torch.Tensor | Sent]) -> Offer:
    """The offer, its tensors moved to `offered` and their descriptions in their place."""

    def describe(tensor: torch.Tensor, name: str = "a tensor of the state dict") -> Sent:
        offered.append(sendable(tensor, name))
        return Sent(len(offered) - 1, tensor.shape, tensor.dtype)

    if offer.model is not None:
        offer.model = {
            name: describe(value, name) if isinstance(value, torch.Tensor) else value
            for name, value in offer.model.items()
        }
    if offer.optimizer is not None:
        saved = offer.optimizer
        changed: dict[str, Any] = {f.name: getattr(saved, f.name) for f in fields(saved)}
        changed["state"] = map_tensors(saved.state, describe)
        for part in ("hyper", "empty", "other"):
            changed[part] = map_tensors(changed[part], lambda tensor: tensor.detach().cpu())
        offer.optimizer = Saved(**changed)
    offer.tensors = [Sent(n, tensor.shape, tensor.dtype) for n, tensor in enumerate(offered)]
    return offer

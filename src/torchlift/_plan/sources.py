"""Where the values of a load come from: a checkpoint's files, or a state dict in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from torchlift._checkpoint import Checkpoint, MappedViews
from torchlift._model.dtensor import (
    Span,
    everything,
    is_sharded,
    overlaps,
    shard_of_value,
    wrap,
)
from torchlift._model.handlers import is_wrapper, slice_of
from torchlift._plan.steps import Candidate, Copy, Sent
from torchlift.errors import CheckpointError


class Origin:
    """Where the values of a load come from.

    Attributes:
        path: for errors and reports.
        candidates: key -> where its values are.
        objects: key -> leaf that is no tensor.
        blocked: key -> global that its value would need: only unpickling could rebuild it.
        versions: path of a module -> what its state dict says of it (``_metadata``).
        templates: key of a nested extra state -> its containers as they were saved.
        collective: whether other ranks take part in `fill`.
        views: tensors over the files, where there are any.
    """

    views: MappedViews
    path = "the state dict"
    blocked: Mapping[str, str] = {}
    templates: Mapping[str, object] = {}
    collective = False

    def __init__(
        self,
        candidates: Mapping[str, Candidate],
        objects: Mapping[str, object],
        versions: Mapping[str, Mapping[str, object]],
    ) -> None:
        self.candidates = candidates
        self.objects = objects
        self.versions = versions

    def tensor(self, candidate: Candidate, like: torch.Tensor | None = None) -> torch.Tensor:
        """Return a candidate's tensor, for code that looks at values.

        Args:
            candidate: of this source, or one that the model's own code made.
            like: the model's tensor that it is for, where there is one.
        """
        assert isinstance(candidate.value, torch.Tensor)
        return candidate.value

    def receive(self, keys: Sequence[str]) -> None:
        """Have the tensors of these keys at hand, for code that looks at values."""

    def reserve(self) -> None:
        """Take the memory that `fill` needs beside its targets."""

    def fill(self, copies: Sequence[Copy]) -> None:
        """Execute the copies."""
        copy_values(apart(copies))

    def refusal(self, key: str) -> CheckpointError:
        """Return the error that says why `key` cannot be had."""
        raise NotImplementedError

    def close(self) -> None:
        """Close files, where there are any; tensors over them stay valid."""


class FileSource(Origin):
    """The tensors and objects of a checkpoint's files."""

    def __init__(self, ckpt: Checkpoint) -> None:
        candidates = {key: Candidate(key, entry) for key, entry in ckpt.entries.items()}
        super().__init__(candidates, ckpt.objects, ckpt.index.module_versions)
        self.path = ckpt.path
        self.blocked = ckpt.blocked_keys
        self.templates = ckpt.index.templates
        self.views = MappedViews(ckpt.index)
        self._ckpt = ckpt

    def tensor(self, candidate: Candidate, like: torch.Tensor | None = None) -> torch.Tensor:
        if candidate.value is not None:
            return super().tensor(candidate)
        assert candidate.entry is not None
        return self.views.view(candidate.entry)

    def refusal(self, key: str) -> CheckpointError:
        return self._ckpt.refusal(key)

    def close(self) -> None:
        self.views.close()


class StateSource(Origin):
    """The values of a state dict in memory, which stays as it is.

    Args:
        state: key -> tensor, or a value that is none.
        versions: path of a module -> its version and the like (``_metadata``).
        whole: whether plain tensors stand for DTensors, of which each rank takes its own slice.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        versions: Mapping[str, Mapping[str, object]] | None = None,
        *,
        whole: bool = False,
    ) -> None:
        tensors = {
            key: value for key, value in state.items() if isinstance(value, (torch.Tensor, Sent))
        }
        candidates = {key: Candidate(key, value=value) for key, value in tensors.items()}
        objects = {key: value for key, value in state.items() if key not in tensors}
        super().__init__(candidates, objects, versions or {})
        self._whole = whole

    def tensor(self, candidate: Candidate, like: torch.Tensor | None = None) -> torch.Tensor:
        value = super().tensor(candidate)
        if not self._whole or like is None or not is_sharded(like):
            return value
        if is_sharded(value) or value.shape != like.shape:
            return value
        # As in torch: a module's own code gets a DTensor where the model has one.
        return wrap(like, shard_of_value(value, like, candidate.key))


def copy_values(copies: Iterable[Copy]) -> None:
    """Fill every target from tensors in memory; each rank touches only its own slices."""
    with torch.no_grad():
        for item in copies:
            assert isinstance(item.source, torch.Tensor)
            place(item.source, tuple((0, size) for size in item.source.shape), item)


def place(values: torch.Tensor, block: Sequence[Span], item: Copy) -> None:
    """Copy what `values` (the `block` of the whole tensor) and the target have in common."""
    target = item.target
    # A scalar may have been saved with shape [1]; and a slice of a subclass need not be a view.
    if target.dim() != values.dim() or (
        target.shape == values.shape and item.spans == tuple((span,) for span in block)
    ):
        # Not reshaped where it need not be: a subclass may not know how.
        target.copy_(values if values.shape == target.shape else values.reshape(target.shape))
        return
    for into, out_of in overlaps(item.spans, block):
        part = slice_of(values, out_of)
        (target if target.shape == part.shape else target[into]).copy_(part)


def whole_copy(source: Any, target: torch.Tensor) -> Copy:
    """Return a copy into a plain tensor of the same shape."""
    return Copy(source, target, everything(target.shape))


def apart(copies: Iterable[Copy]) -> list[Copy]:
    """Return the copies, where none reads from memory that another one writes to.

    Two states may trade places: the second would otherwise read what the first has written. What is
    in its place already is left out.
    """
    needed, written = [], set()
    for item in copies:
        one, two = _memory(item.source), _memory(item.target)
        if one is None or one != two or not _is_in_place(item):
            needed.append((one, item))
            written.add(two)
    return [
        item
        if one is None or one not in written or not isinstance(item.source, torch.Tensor)
        else Copy(item.source.clone(), item.target, item.spans)
        for one, item in needed
    ]


def _memory(tensor: torch.Tensor | Sent) -> int | None:
    if not isinstance(tensor, torch.Tensor) or is_wrapper(tensor) or not tensor.numel():
        return None
    return tensor.untyped_storage().data_ptr()


def _is_in_place(item: Copy) -> bool:
    one, two = item.source, item.target
    return (
        isinstance(one, torch.Tensor)
        and one.data_ptr() == two.data_ptr()
        and (one.dtype, one.device, one.shape, one.stride())
        == (two.dtype, two.device, two.shape, two.stride())
        and (one.is_conj(), one.is_neg()) == (two.is_conj(), two.is_neg())
    )

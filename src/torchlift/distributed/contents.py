"""What goes into a consolidated file: checked, described to the other ranks, and laid out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchlift._model.dtensor import held
from torchlift._save import Shared, torch_pickle
from torchlift.distributed.outline import Outline, outline_of, require_same, shared_positions
from torchlift.errors import PlacementError
from torchlift.formats import ITEMSIZE
from torchlift.formats.layout import Layout, Stored, format_for, is_unicode
from torchlift.formats.safetensors import safetensors_layout
from torchlift.formats.torch_zip import torch_zip_layout


class Contents:
    """A state dict and how it is going to be stored.

    Attributes:
        state: name -> tensor, or a value that is none.
        format: of the file.

    Example:
        >>> contents = Contents({"a": torch.zeros(2), "b": torch.ones(2)}, "x.pt", None, {})
        >>> contents.agree([contents.describe()])
        >>> [place.tensor.key for place in contents.lay_out()[0].payloads]
        ['a', 'b']
    """

    def __init__(
        self,
        obj: nn.Module | Mapping[str, torch.Tensor],
        path: str,
        format: str | None,
        metadata: Mapping[str, str],
    ) -> None:
        """Check what can be checked on this rank alone.

        Raises:
            TypeError: it is neither a module nor a mapping; or the metadata is not text.
            ValueError: see `format_for`; or a torch file is to hold metadata.
            PlacementError: the format cannot hold a name or a value.
        """
        if not isinstance(obj, (nn.Module, Mapping)):
            raise TypeError(
                f"expected a module, or a mapping from name to tensor; found a {type(obj).__name__}"
            )
        if not isinstance(metadata, Mapping):
            raise TypeError(f"metadata: expected a mapping, found a {type(metadata).__name__}")
        self.format = format_for(path, format)
        if metadata and self.format != "safetensors":
            raise ValueError(
                "a torch file has no place for metadata: save as safetensors, or put the text into "
                "the state dict"
            )
        state = obj.state_dict() if isinstance(obj, nn.Module) else obj
        self.state: Mapping[str, object] = state
        self._metadata = dict(metadata)
        self._owners: dict[str, str] = {}
        for key in self.state:
            _require_name(key)
        self._stored = {
            key: _stored(key, value, self.format)
            for key, value in self.state.items()
            if isinstance(value, torch.Tensor) or self.format == "safetensors"
        }
        if self.format == "safetensors":
            safetensors_layout(self._stored.values(), self._metadata)

    def describe(self) -> Outline:
        """What the other ranks have to know of it."""
        return outline_of(self.state, self.format)

    def agree(self, outlines: Sequence[Outline]) -> None:
        """Take in what all ranks have described.

        Raises:
            PlacementError: they do not save the same.
        """
        require_same(outlines)
        names = list(self.state)
        if self.format != "safetensors":
            pairs = shared_positions(outlines).items()
            self._owners = {names[at]: names[first] for at, first in pairs}

    def lay_out(self, length: int | None = None) -> tuple[Layout, int]:
        """The file.

        Args:
            length: what another rank got, which makes the frame; only the offsets are wanted here.

        Returns:
            The layout, and the length in bytes of what the ranks may see differently and of which
            the offsets depend: a header with metadata, a pickle with plain values.

        Raises:
            PlacementError: a value cannot be read back, or only by running code.
        """
        if self.format == "safetensors":
            tensors = self._stored.values()
            layout = safetensors_layout(tensors, self._metadata if length is None else length)
            return layout, min((start for _, start in layout.payloads), default=layout.nbytes)
        return self._lay_out_torch(length)

    def _lay_out_torch(self, pickled: int | None) -> tuple[Layout, int]:
        own = [key for key in self._stored if key not in self._owners]
        tensors = [self._stored[key] for key in own]
        if pickled is not None:
            return torch_zip_layout(tensors, pickled), pickled
        number = {key: at for at, key in enumerate(own)}
        values = {
            key: Shared(number[self._owners.get(key, key)]) if key in self._stored else value
            for key, value in self.state.items()
        }
        notes: Mapping[str, Any] | None = getattr(self.state, "_metadata", None)
        ordered = isinstance(self.state, OrderedDict)
        data = torch_pickle(values, tensors, metadata=notes, ordered=ordered)
        return torch_zip_layout(tensors, data), len(data)


def _require_name(key: object) -> None:
    """Refuse a name that readers cannot read, such as a member of an Enum."""
    if type(key) is str and is_unicode(key):
        return
    found = f"a {type(key).__name__}" if type(key) is not str else "a lone surrogate in it"
    raise PlacementError(
        "cannot be the name of a tensor in a file",
        entry=str(key),
        expected="a str that UTF-8 can write",
        found=found,
        hint="Rename it in what is saved.",
    )


def _stored(key: str, value: object, format: str) -> Stored:
    found = type(value).__name__
    if isinstance(value, torch.Tensor) and is_lazy(value):
        found += ", which gets its shape when the module is first called"
    elif isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        is_dense = value.layout == torch.strided and not value.is_nested and not value.is_meta
        if is_dense and name in ITEMSIZE and not is_traceable_wrapper_subclass(held(value)):
            return Stored(key, name, tuple(value.shape))
        found = f"{found}, {name}, {value.layout}, on {value.device}"
    raise PlacementError(
        f"cannot be stored in a {'safetensors' if format == 'safetensors' else 'torch'} file",
        entry=key,
        expected="a dense tensor with values",
        found=found,
    )

"""Check and lay out what one file of a mesh will hold, of which each rank has some."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchlift._model.dtensor import first_rank, held
from torchlift._save.pickling import Shared, require_plain, torch_pickle
from torchlift.errors import PlacementError
from torchlift.formats import ITEMSIZE
from torchlift.formats.layout import Layout, Stored, format_for, is_unicode
from torchlift.formats.safetensors import safetensors_layout
from torchlift.formats.torch_zip import torch_zip_layout


class Described(NamedTuple):
    """What one process has to save, without the values of its tensors.

    Attributes:
        tensors: name -> what is stored of it, and the first rank of its mesh; None if it has none.
        plain: name -> value that is no tensor.
        notes: ``_metadata`` of the state dict, where it has one.
        order: all names.
    """

    tensors: dict[str, tuple[Stored, int | None]]
    plain: dict[str, object]
    notes: Mapping[str, Any] | None
    order: list[str]


class Contents:
    """A state dict and how one file is going to hold it.

    Attributes:
        state: name -> tensor, or plain data.
        format: of the file.
        tensors: name -> the tensor as it is stored, in the order of `state`.

    Example:
        >>> contents = Contents({"a": torch.zeros(2), "b": torch.ones(2)}, "x.pt", None, {})
        >>> [place.tensor.key for place in contents.lay_out({})[0].payloads]
        ['a', 'b']
    """

    def __init__(
        self,
        obj: nn.Module | Mapping[str, torch.Tensor],
        path: str,
        format: str | None,
        metadata: Mapping[str, str],
    ) -> None:
        """Check all that this process can check alone.

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
        self._metadata = dict(metadata)
        self.state: Mapping[str, Any] = obj.state_dict() if isinstance(obj, nn.Module) else obj
        for key in self.state:
            require_name(key)
        self.tensors = {
            key: stored_as(key, value, self.format)
            for key, value in self.state.items()
            if isinstance(value, torch.Tensor) or self.format == "safetensors"
        }
        if self.format == "safetensors":
            safetensors_layout(self.tensors.values(), self._metadata)

    def describe(self) -> Described:
        """Return what another process needs to know to save with this one.

        Raises:
            PlacementError: a value cannot be read back, or only by running code.
        """
        plain = {key: value for key, value in self.state.items() if key not in self.tensors}
        for key, value in plain.items():
            require_plain(key, value)
        notes = getattr(self.state, "_metadata", None)
        if notes is not None:
            require_plain("_metadata", notes)
        tensors = {k: (stored, first_rank(self.state[k])) for k, stored in self.tensors.items()}
        return Described(tensors, plain, notes, list(self.state))

    def merge(self, everything: Sequence[Described]) -> None:
        """Take in what all processes have, in the same order on each of them.

        Of plain values the first process that has the name counts; a tensor that is none of this
        process's is None in `state`.
        """
        state: OrderedDict[str, Any] = OrderedDict()
        tensors: dict[str, Stored] = {}
        notes: OrderedDict[str, Any] = OrderedDict()
        for told in everything:
            for key in told.order:
                if key in told.tensors:
                    tensors.setdefault(key, told.tensors[key][0])
                state.setdefault(key, told.plain.get(key, self.state.get(key)))
            notes = OrderedDict({**(told.notes or {}), **notes})
        if any(told.notes is not None for told in everything):
            state._metadata = notes  # type: ignore[attr-defined]
        self.state, self.tensors = state, tensors

    def lay_out(self, owners: Mapping[str, str], length: int | None = None) -> tuple[Layout, int]:
        """Lay the file out.

        Args:
            owners: name -> the name whose storage it shares, which a torch file keeps.
            length: what another process got, which writes the frame; only the offsets of the
                tensors are needed here.

        Returns:
            The layout, and the length in bytes of what processes may see differently and of which
            the offsets depend: a header with metadata, a pickle with plain values.

        Raises:
            PlacementError: a value cannot be read back, or only by running code.
        """
        if self.format == "safetensors":
            source = self._metadata if length is None else length
            layout = safetensors_layout(self.tensors.values(), source)
            return layout, min((start for _, start in layout.payloads), default=layout.nbytes)
        own = [key for key in self.tensors if key not in owners]
        tensors = [self.tensors[key] for key in own]
        if length is not None:
            return torch_zip_layout(tensors, length), length
        number = {key: at for at, key in enumerate(own)}
        values = {
            key: Shared(number[owners.get(key, key)]) if key in self.tensors else value
            for key, value in self.state.items()
        }
        notes = getattr(self.state, "_metadata", None)
        ordered = isinstance(self.state, OrderedDict)
        data = torch_pickle(values, tensors, metadata=notes, ordered=ordered)
        return torch_zip_layout(tensors, data), len(data)


def require_name(key: object) -> None:
    """Refuse a name that readers cannot read, such as a member of an Enum."""
    if type(key) is str and is_unicode(key):
        return
    raise PlacementError(
        "cannot be the name of a tensor in a file",
        entry=str(key),
        expected="a str that UTF-8 can write",
        found="a lone surrogate in it" if type(key) is str else f"a {type(key).__name__}",
        hint="Rename it in what is saved.",
    )


def stored_as(key: str, value: object, format: str) -> Stored:
    """Describe a tensor as it is going to be stored; refuse what has no values to store."""
    found = type(value).__name__
    if isinstance(value, torch.Tensor) and is_lazy(value):
        found += ", which gets its shape when the module is first called"
    elif isinstance(value, torch.Tensor):
        name = str(value.dtype).removeprefix("torch.")
        is_dense = value.layout == torch.strided and not value.is_nested and not value.is_meta
        if is_dense and name in ITEMSIZE and not is_traceable_wrapper_subclass(held(value)):
            return Stored(key, name, tuple(value.shape))
        found += f", {name}, {value.layout}, on {value.device}"
    raise PlacementError(
        f"cannot be stored in a {'safetensors' if format == 'safetensors' else 'torch'} file",
        entry=key,
        expected="a dense tensor with values",
        found=found,
    )

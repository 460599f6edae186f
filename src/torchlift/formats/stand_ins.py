"""Records that stand for what a torch pickle names or makes; none of them can do anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

STORAGE_DTYPES: dict[str, str] = {
    "torch.FloatStorage": "float32", "torch.DoubleStorage": "float64",
    "torch.HalfStorage": "float16", "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64", "torch.IntStorage": "int32", "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8", "torch.ByteStorage": "uint8", "torch.BoolStorage": "bool",
    "torch.ComplexFloatStorage": "complex64", "torch.ComplexDoubleStorage": "complex128",
}  # fmt: skip

#: Storages that say nothing about their elements; their length is in bytes.
UNTYPED = ("torch.storage.UntypedStorage", "torch.UntypedStorage")

#: Types whose instances are plain tensors, whatever attributes were set on them.
PLAIN_TYPES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


class Global:
    """A name from the allow-list."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Blocked:
    """A name that only an unpickler could use, or what it would have made of it.

    Attributes:
        name: dotted name.
        called: whether this is the result of a call rather than the name itself.
        state: what ``__setstate__`` would have received, if it was a dict.
    """

    __slots__ = ("called", "name", "state")

    def __init__(self, name: str, called: bool = False) -> None:
        self.name = name
        self.called = called
        self.state: dict[Any, Any] | None = None


class OrderedRecord(dict[Any, Any]):
    """An ``OrderedDict``, with the ``_metadata`` that torch attaches to state dicts."""

    __slots__ = ("metadata",)

    def __init__(self) -> None:
        super().__init__()
        self.metadata: object = None


@dataclass(slots=True, eq=False)
class StorageRef:
    """A persistent id: the storage that holds a tensor's bytes."""

    dtype: str | None
    key: str
    location: str
    numel: int


@dataclass(slots=True, eq=False)
class TensorRef:
    """The arguments of a rebuilder, unchecked: whoever knows the tensor's key checks them."""

    storage: StorageRef
    dtype: str
    offset: object
    size: object
    stride: object
    requires_grad: object = False
    is_parameter: bool = False


@dataclass(slots=True, eq=False)
class NumpyDtype:
    """A numpy dtype: its code, such as ``"f8"``, and byte order."""

    code: str
    order: str = field(default="<")

"""What the ``.metadata`` of a distributed checkpoint says, read without an unpickler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchlift.errors import FormatError, UnsafeError
from torchlift.formats.index import ITEMSIZE
from torchlift.formats.pickle_opcodes import read_pickle
from torchlift.formats.source import Source
from torchlift.formats.stand_ins import Blocked, Global
from torchlift.formats.torch_globals import TorchWorld

#: Most bytes of metadata: a million chunks take some 300 MB.
_MAX_METADATA = 1 << 30

_DCP = "torch.distributed.checkpoint."
#: Classes of which only the attributes matter, by every name they have had.
_RECORDS = {
    f"{_DCP}metadata.{name}": name
    for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )
} | {
    f"{_DCP}filesystem._StorageInfo": "_StorageInfo",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": "TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": "_MEM_FORMAT_ENCODING",
}  # fmt: skip
_PATHS = {
    f"pathlib{inner}.{kind}"
    for inner in ("", "._local")
    for kind in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
}


@dataclass(frozen=True, slots=True)
class Box:
    """A chunk's place in its tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(slots=True)
class Tensor:
    """One tensor of the checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool
    boxes: list[Box]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Item:
    """A run of bytes in one file that holds one chunk or object as a torch archive."""

    file: str
    offset: int
    nbytes: int


@dataclass(slots=True)
class Description:
    """What one metadata file says, or several together.

    Attributes:
        tensors: key -> tensor.
        objects: keys of what is not a tensor, in order.
        items: (key, first index of the chunk or None) -> where it is stored.
        version: of the format, where it is recorded.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    objects: dict[str, None] = field(default_factory=dict)
    items: dict[tuple[str, tuple[int, ...] | None], Item] = field(default_factory=dict)
    version: str | None = None

    def merge(self, other: Description) -> None:
        """Add what the metadata of another rank says; what both have is the same replica.

        Raises:
            FormatError: the two disagree about a tensor.
        """
        for key, tensor in other.tensors.items():
            mine = self.tensors.setdefault(key, tensor)
            if mine is tensor:
                continue
            if (mine.dtype, mine.shape) != (tensor.dtype, tensor.shape):
                raise FormatError(
                    "the metadata of two ranks disagree",
                    entry=key,
                    expected=f"{mine.dtype} {list(mine.shape)}",
                    found=f"{tensor.dtype} {list(tensor.shape)}",
                )
            known = set(mine.boxes)
            mine.boxes += [box for box in tensor.boxes if box not in known]
        self.objects.update(other.objects)
        self.items = {**other.items, **self.items}
        self.version = self.version or other.version


class _Record:
    """An instance of one of the classes: its attributes, and nothing that could act."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: object = {}

    def get(self, name: str) -> Any:
        """An attribute, or None."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _World(TorchWorld):
    """Globals of DCP metadata; any other name is refused at once, since none is needed."""

    def find(self, module: str, name: str) -> Global | Blocked:
        dotted = f"{module}.{name}"
        if dotted in _RECORDS or dotted in _PATHS:
            return Global(dotted)
        found = super().find(module, name)
        if isinstance(found, Blocked):
            raise UnsafeError(
                "the metadata names a global that describes no checkpoint; torch would import and "
                "could run it",
                entry=dotted,
                hint="Do not load this directory with torch either, unless you trust its source.",
            )
        return found

    def call(self, function: object, arguments: object) -> object:
        if isinstance(function, Global):
            kind = _RECORDS.get(function.name)
            if kind is not None:
                return _Record(kind)
            if function.name in _PATHS:
                return "/".join(map(str, arguments)) if isinstance(arguments, tuple) else ""
        return super().call(function, arguments)

    def build(self, target: object, state: object) -> None:
        if isinstance(target, _Record):
            # Dataclasses with slots, and old pickles, wrap the dict: (None, attributes).
            if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
                state = state[1]
            target.state = state
        else:
            super().build(target, state)


def read_metadata(source: Source) -> Description:
    """Read one metadata file.

    Raises:
        FormatError: malformed.
        UnsafeError: it names a global that has no business there.
    """
    if source.size > _MAX_METADATA:
        raise FormatError("the metadata is too large", expected=f"at most {_MAX_METADATA} bytes")
    data = source.read(0, source.size)
    root, end = read_pickle(data, _World())
    if end != len(data):
        raise FormatError("bytes after the end of the metadata", expected=end, found=len(data))
    if not isinstance(root, _Record) or root.kind != "Metadata":
        raise FormatError("the metadata is not that of a distributed checkpoint")
    described = _mapping(root.get("state_dict_metadata"), "state_dict_metadata")
    stored = _mapping(root.get("storage_data"), "storage_data")
    made = Description()
    version = root.get("version")
    made.version = version if isinstance(version, str) else None
    for key, value in described.items():
        if type(key) is not str or not isinstance(value, _Record):
            raise FormatError("the metadata has a key that is not text", found=_kind(key))
        if value.kind == "BytesStorageMetadata":
            made.objects[key] = None
        else:
            made.tensors[key] = _tensor(key, value)
    for place, info in stored.items():
        made.items[_place(place)] = _item(place, info)
    return made


def _tensor(key: str, record: _Record) -> Tensor:
    properties, chunks = record.get("properties"), record.get("chunks")
    if record.kind != "TensorStorageMetadata" or not isinstance(chunks, list):
        raise FormatError("the metadata of a tensor is malformed", entry=key, found=record.kind)
    state = properties.state if isinstance(properties, _Record) else None
    if isinstance(state, dict):
        state = (state.get("dtype"), None, state.get("requires_grad"))
    dtype = state[0] if isinstance(state, tuple) and len(state) > 2 else None
    name = dtype.name.removeprefix("torch.") if isinstance(dtype, Global) else ""
    if name not in ITEMSIZE:
        raise FormatError("a tensor has a dtype that nobody knows", entry=key, found=_kind(dtype))
    shape = _numbers(record.get("size"), key)
    boxes = []
    for chunk in chunks:
        if not isinstance(chunk, _Record) or chunk.kind != "ChunkStorageMetadata":
            raise FormatError("the chunks of a tensor are malformed", entry=key)
        box = Box(_numbers(chunk.get("offsets"), key), _numbers(chunk.get("sizes"), key))
        if not len(box.start) == len(box.shape) == len(shape):
            raise FormatError(
                "a chunk has not the dimensions of its tensor",
                entry=key,
                expected=f"{len(shape)} dimensions",
                found=f"{list(box.shape)} at {list(box.start)}",
            )
        boxes.append(box)
    assert isinstance(state, tuple)
    return Tensor(name, shape, state[2] is True, list(dict.fromkeys(boxes)))


def _place(record: object) -> tuple[str, tuple[int, ...] | None]:
    key = record.get("fqn") if isinstance(record, _Record) else None
    if not isinstance(record, _Record) or type(key) is not str:
        raise FormatError("the metadata of a file's content is malformed", found=_kind(record))
    offset = record.get("offset")
    return key, None if offset is None else _numbers(offset, key)


def _item(place: object, record: object) -> Item:
    key = _place(place)[0]
    if not isinstance(record, _Record) or record.kind != "_StorageInfo":
        raise FormatError(
            "the metadata was written by a storage that torchlift does not know",
            entry=key,
            found=_kind(record),
        )
    file = record.get("relative_path")
    if type(file) is not str:
        raise FormatError("an item's file is not a name", entry=key, found=_kind(file))
    transforms = record.get("transform_descriptors")
    if transforms:
        raise FormatError(
            "an item was transformed as it was written, so its bytes are not its numbers",
            entry=key,
            found=transforms,
            hint="Load it with the extension that wrote it, and save it without.",
        )
    offset, nbytes = _numbers((record.get("offset"), record.get("length")), key)
    return Item(file, offset, nbytes)


def _numbers(values: object, key: str) -> tuple[int, ...]:
    """Check sizes or offsets: whole, not negative, not too large for torch."""
    if not isinstance(values, (tuple, list)) or len(values) > 64:
        raise FormatError("the metadata has no sizes where it must", entry=key, found=_kind(values))
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 62:
            raise FormatError(
                "the metadata has an impossible size or offset",
                entry=key,
                expected="whole numbers from 0 to 2**62",
                found=value if isinstance(value, (int, float)) else _kind(value),
            )
    return tuple(values)


def _mapping(value: object, name: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise FormatError("the metadata is incomplete", entry=name, found=_kind(value))
    return value


def _kind(value: object) -> str:
    return value.kind if isinstance(value, _Record) else f"a {type(value).__name__}"

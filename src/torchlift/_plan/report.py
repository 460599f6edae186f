"""The report of a load, key by key: the results of `plan` and `load`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torchlift._system.text import Facts, Summary, clipped_list, count_of, human, printable

Mode = Literal["assign", "copy", "swap"]
Source = Literal["mmap", "read", "memory"]
#: How values get into memory. view: they stay in the file's map, or in a tensor of the caller.
#: read: by parallel reads into new memory. compute: from tensors in memory, or by the class of the
#: model's tensor.
Route = Literal["view", "read", "compute"]


@dataclass(frozen=True, slots=True)
class KeyReport:
    """How one tensor of the model is loaded.

    Attributes:
        key: Its name in the model.
        entry: Its name in the checkpoint. If it is made of several, the first.
        path: The checkpoint that it comes from.
        nbytes: Bytes of the tensor in the checkpoint.
        mode: ``"assign"``, ``"copy"`` or ``"swap"``.
        source: ``"mmap"``: mapped. ``"read"``: read into memory that the process owns.
            ``"memory"``: in memory before the load.
        route: ``"view"``, ``"read"`` or ``"compute"``: how the values get into memory.
        device: Its device after the load.
        dtype: Its dtype after the load.
        cast_from: Its dtype in the checkpoint if that differs, else None.
        note: The reason if it is loaded in another way than you want, else None.
        entries: All its names in the checkpoint.
        is_made: Whether a rename merged or split tensors to make it.
    """

    key: str
    entry: str
    path: str
    nbytes: int
    mode: Mode
    source: Source
    route: Route
    device: str
    dtype: str
    cast_from: str | None = None
    note: str | None = None
    entries: tuple[str, ...] = ()
    is_made: bool = False

    @property
    def is_mapped(self) -> bool:
        """Whether the model's tensor is mapped from the file."""
        return (self.source, self.route) == ("mmap", "view") and self.mode != "copy"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A key with different shapes in the model and in the checkpoint.

    Attributes:
        key: Its name.
        expected: Its shape in the model. ``()`` if it is not a tensor there.
        found: Its shape in the checkpoint. ``()`` if it is not a tensor there.
        note: Which of the two is not a tensor, or None.
    """

    key: str
    expected: tuple[int, ...]
    found: tuple[int, ...]
    note: str | None = None

    def __str__(self) -> str:
        shapes = f"{self.key}: model {list(self.expected)}, checkpoint {list(self.found)}"
        return f"{self.key}: {self.note}" if self.note else shapes


@dataclass(frozen=True, repr=False)
class LoadReport(Summary):
    """The report of a load.

    Attributes:
        path: The checkpoint.
        loaded: Name in the model -> `KeyReport`, for each name with a value from the checkpoint.
            Values that a module's own loading code keeps, such as packed weights, count.
        missing_keys: Names of the model that the checkpoint lacks.
        unexpected_keys: Names of the checkpoint that the model lacks.
        dropped: Names of the checkpoint that are non-persistent buffers of the model, or constants
            and attributes of a TorchScript program.
        mismatched: Name -> `Mismatch`, for keys that ``ignore_mismatched=True`` skipped.
        tied: Groups of names that are one tensor in the model.
        replayed: Names of a skeleton's tensors whose value is the constructor's.
        deferred: Names that the device rule left for a later load, with ``"meta"``.
        renamed: Name in the checkpoint -> name in the model, if they differ.
        hint: The change that would match more names, or None.
        seconds: Wall time of the load.
        bytes_read: Bytes copied out of the files. Mapped bytes do not count.
        requests: Range requests to URLs after the checkpoint was opened.
        unchecked_nbytes: Bytes for which ``verify=True`` found no checksum.
        overflowed: Name in the model -> the number of finite values that its cast made infinite or
            NaN. ``check="finite"`` refuses them.
    """

    path: str
    loaded: Mapping[str, KeyReport]
    missing_keys: list[str] = field(default_factory=list)
    unexpected_keys: list[str] = field(default_factory=list)
    mismatched: Mapping[str, Mismatch] = field(default_factory=dict)
    tied: tuple[tuple[str, ...], ...] = ()
    dropped: list[str] = field(default_factory=list)
    replayed: list[str] = field(default_factory=list)
    deferred: list[str] = field(default_factory=list)
    renamed: Mapping[str, str] = field(default_factory=dict)
    hint: str | None = None
    seconds: float = 0.0
    bytes_read: int = 0
    unchecked_nbytes: int = 0
    requests: int = 0
    overflowed: Mapping[str, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all loaded tensors in the checkpoint. A tie counts once."""
        return _bytes_of(self.loaded.values())

    @property
    def merged(self) -> dict[str, tuple[str, ...]]:
        """Name in the model -> the names in the checkpoint that were joined."""
        return {key: item.entries for key, item in self._own if len(item.entries) > 1}

    @property
    def split(self) -> dict[str, tuple[str, ...]]:
        """Name in the checkpoint -> the names in the model that share its values."""
        found: dict[str, list[str]] = {}
        for key, item in self._own:
            for entry in item.entries if item.is_made else ():
                found.setdefault(entry, []).append(key)
        return {entry: tuple(keys) for entry, keys in found.items() if len(keys) > 1}

    @property
    def _own(self) -> list[tuple[str, KeyReport]]:
        """Each tensor once, under the name that the checkpoint has for it."""
        return [(key, item) for key, item in self.loaded.items() if item.key == key]

    @property
    def bytes(self) -> dict[str, int]:
        """Name -> bytes in the checkpoint."""
        return {key: item.nbytes for key, item in self.loaded.items()}

    @property
    def mode(self) -> dict[str, Mode]:
        """Name -> ``"assign"``, ``"copy"`` or ``"swap"``."""
        return {key: item.mode for key, item in self.loaded.items()}

    @property
    def source(self) -> dict[str, Source]:
        """Name -> ``"mmap"``, ``"read"`` or ``"memory"``."""
        return {key: item.source for key, item in self.loaded.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the lists of names as plain data, as ``torchlift plan --json`` prints them."""
        return {
            "loaded": len(self.loaded),
            "missing_keys": self.missing_keys,
            "unexpected_keys": self.unexpected_keys,
            "dropped": self.dropped,
            "mismatched": {
                item.key: {"expected": item.expected, "found": item.found}
                for item in self.mismatched.values()
            },
            "replayed": self.replayed,
            "deferred": self.deferred,
            "tied": [list(names) for names in self.tied],
            "renamed": dict(self.renamed),
            "merged": {name: list(keys) for name, keys in self.merged.items()},
            "split": {key: list(names) for key, names in self.split.items()},
        }

    @property
    def _from(self) -> str:
        paths = dict.fromkeys(item.path for item in self.loaded.values())
        return ", ".join(paths) or self.path

    @property
    def _size(self) -> str:
        return f"{count_of(len(self.loaded), 'tensor')}, {human(self.nbytes)}, from {self._from}"

    def _summary(self) -> tuple[str, Facts]:
        read = f"in {self.seconds:.3f} s, {human(self.bytes_read)} read"
        read += f" in {count_of(self.requests, 'request')}" if self.requests else ""
        facts: Facts = [("", read)]
        if self.unchecked_nbytes:
            size = human(self.unchecked_nbytes)
            facts.append(("not verified", f"{size}: the file records no checksum of these bytes"))
        facts += list_overflows(self.overflowed)
        return f"loaded {self._size}", [*facts, *summarise(self)]


_SOURCES: Mapping[Source, str] = {"mmap": "mapped", "read": "read", "memory": "from memory"}
_MODES: Mapping[Mode, str] = {
    "swap": "kept as the same objects",
    "copy": "copied into the model's tensors",
    "assign": "put in as new objects",
}


def summarise(report: LoadReport) -> Facts:
    """Return the facts that a plan and a report have in common."""
    facts: Facts = []
    ways = Counter((item.mode, item.source) for item in report.loaded.values())
    facts += [
        ("how", f"{n} {_SOURCES[source]}, {_MODES[mode]}")
        for (mode, source), n in sorted(ways.items())
    ]
    mapped = [item for item in report.loaded.values() if item.is_mapped]
    if mapped:
        size = f"{count_of(len(mapped), 'tensor')}, {human(_bytes_of(mapped))}"
        warning = "these bytes are the file's; never overwrite it in place, or load with"
        facts.append(("mapped", f'{size}: {warning} source="read"'))
    casts = Counter(
        f"{item.cast_from} to {item.dtype}" for item in report.loaded.values() if item.cast_from
    )
    facts += [(f"cast {what}", str(n)) for what, n in sorted(casts.items())]
    paths = Counter(item.path for item in report.loaded.values())
    if len(paths) > 1:
        facts += [(f"from {path}", str(n)) for path, n in paths.items()]
    facts += list_names("missing", report.missing_keys)
    facts += list_names("unexpected", report.unexpected_keys)
    facts += list_names("dropped, not a part of the model's state", report.dropped)
    facts += list_names("mismatched", [str(item) for item in report.mismatched.values()])
    facts += list_names("replayed", report.replayed)
    facts += list_names("left for later", report.deferred)
    facts += list_names("tied", [" = ".join(names) for names in report.tied])
    facts += list_names("renamed", [f"{old} -> {new}" for old, new in report.renamed.items()])
    merged = [f"{new} of {_brief(old)}" for new, old in report.merged.items()]
    facts += list_names("merged", merged)
    facts += list_names("split", [f"{old} into {_brief(new)}" for old, new in report.split.items()])
    if report.hint:
        facts.append(("hint", report.hint))
    notes = Counter(item.note for item in report.loaded.values() if item.note)
    facts += [("note", f"{note} ({count_of(n, 'tensor')})") for note, n in notes.items()]
    return facts


def _brief(names: tuple[str, ...]) -> str:
    if len(names) < 4:
        return " + ".join(printable(name, 200) for name in names)
    return f"{len(names)} ({printable(names[0], 200)} ... {printable(names[-1], 200)})"


def _bytes_of(reports: Iterable[KeyReport]) -> int:
    """Return bytes in the checkpoint. A tie counts once."""
    return sum({id(item): item.nbytes for item in reports}.values())


def list_names(title: str, items: list[str]) -> Facts:
    """Return a fact with the number of names and the first of them, or nothing without names."""
    return [(f"{title} ({len(items)})", clipped_list(items))] if items else []


def list_overflows(counts: Mapping[str, int]) -> Facts:
    """Return a fact with the tensors whose values overflowed in a cast, or nothing."""
    lines = [f"{name}: {count_of(count, 'value')}" for name, count in counts.items()]
    return list_names("overflowed in the cast", lines)

"""The report of a load, key by key: the results of `plan` and `load`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from torchlift._model.slots import Group, is_lazy
from torchlift._plan.decide import Decided, Making, Step
from torchlift._plan.match import Mismatch
from torchlift._plan.rules import Mode, Route, Source
from torchlift._skeleton.construction import is_of_constructor
from torchlift._sources.opening import Origin
from torchlift._sources.tensors import FileTensor, MemoryTensor, SourceTensor
from torchlift._system.text import Facts, Summary, clipped_list, count_of, human, printable


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
    ways = Counter((item.mode, _origin_of(item)) for item in report.loaded.values())
    facts += [
        ("how", f"{n} {origin}, {_MODES[mode]}") for (mode, origin), n in sorted(ways.items())
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


def _origin_of(item: KeyReport) -> str:
    """Return how a tensor gets its values, in one word. A class may convert mapped values."""
    if (item.source, item.route) == ("mmap", "compute"):
        return "computed"
    return _SOURCES[item.source]


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


def describe(decided: Decided, source: Origin) -> dict[str, Any]:
    """Return the fields that the plan of a load and its report have in common."""
    matched, makings = decided.matched, decided.makings
    made = {id(item.group.tensor) for item in makings if item.is_constructed}
    replayed = [g for g in matched.unmatched if id(g.tensor) in made or is_of_constructor(g)]
    kept = {name: _describe_kept(name, one, source) for name, one in matched.kept.items()}
    return {
        "path": source.path,
        "loaded": {**_describe_steps(decided.steps, source), **kept},
        # A mismatch that ignore_mismatched allows counts as missing, too.
        "missing_keys": [*matched.missing, *matched.mismatched],
        "unexpected_keys": matched.unexpected,
        "dropped": matched.dropped,
        "mismatched": matched.mismatched,
        "hint": matched.hint,
        "tied": tuple(group.names for group in matched.groups if len(group.slots) > 1),
        "replayed": [name for group in replayed for name in group.names],
        "renamed": matched.renamed,
        "deferred": [name for group in _left_on_meta(decided) for name in group.names],
    }


def _describe_kept(name: str, one: SourceTensor, source: Origin) -> KeyReport:
    """Report a tensor that a module's own code keeps, such as a packed weight."""
    device = one.value.device if isinstance(one, MemoryTensor) else torch.device("cpu")
    return KeyReport(
        name, one.key, _path_of(one, source), one.nbytes, "assign",
        "mmap" if isinstance(one, FileTensor) else "memory", "compute", str(device),
        str(one.dtype).removeprefix("torch."), None, "kept by its module's own loading code",
        one.keys or (one.key,), bool(one.keys),
    )  # fmt: skip


def _describe_steps(steps: Sequence[Step], source: Origin) -> dict[str, KeyReport]:
    """Return name in the model -> how its tensor is loaded."""
    loaded: dict[str, KeyReport] = {}
    text = cache(lambda kind: str(kind).removeprefix("torch."))  # few kinds, many steps
    for step in steps:
        one = step.one
        # An entry has the name of its dtype.
        seen = one.entry if isinstance(one, FileTensor) else one
        route: Route = "compute" if step.is_handled and step.route == "view" else step.route
        becomes, stored = text(step.dtype), text(seen.dtype)
        report = KeyReport(
            step.key, one.key, _path_of(one, source), seen.nbytes, step.mode,
            step.source, route, text(step.device), becomes, None if stored == becomes else stored,
            step.note, one.keys or (one.key,), bool(one.keys),
        )  # fmt: skip
        for slot in step.group.slots:
            loaded[slot.fqn] = report
    return loaded


def _left_on_meta(decided: Decided) -> list[Group]:
    """Return the tensors that are left for a later load."""
    matched = decided.matched
    decisions: list[Step | Making] = [*decided.steps, *decided.makings]
    done = {id(item.group.tensor) for item in decisions}
    left = [g for g in matched.groups if id(g.tensor) not in done and not is_lazy(g.tensor)]
    paired = {id(pair.group.tensor) for pair in matched.pairs} if left else set()
    # A live tensor with a value in the source is left, too, if the device rule returns "meta".
    return [group for group in left if group.tensor.is_meta or id(group.tensor) in paired]


def _path_of(one: SourceTensor, origin: Origin) -> str:
    """Return the path of the checkpoint that a tensor comes from, or the paths of several."""
    if not origin.paths:
        return origin.path
    paths = (origin.paths.get(key, origin.path) for key in one.keys or (one.key,))
    return ", ".join(dict.fromkeys(paths))

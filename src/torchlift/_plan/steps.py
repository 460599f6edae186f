"""The records of a plan: what there is, where it goes, and how. No code walks over them here.

Of what a plan has one of per tensor, nothing is changed and nothing is frozen: a frozen record of
fourteen fields takes 3.1 us to make, and another one 0.8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import nn

from torchlift._model.dtensor import Spans
from torchlift._model.names import Names
from torchlift._model.own_loading import OwnLoading
from torchlift._model.slots import Group, is_blank
from torchlift._plan.report import Mismatch, Mode, Route, Source
from torchlift._sources.tensors import FileTensor, SourceTensor
from torchlift.formats.index import TensorEntry

Rename = Callable[[str], str | None] | Mapping[str, str | None]
Transform = Callable[[str, torch.Tensor], torch.Tensor]
#: Called with a number of bytes as they arrive.
Advance = Callable[[int], object]


class Named(NamedTuple):
    """What a source has, by its names in the model.

    Attributes:
        candidates: name -> where its values are.
        objects: key -> name of what is not a tensor.
        values: key -> value of what is not a tensor.
        templates: key of a container -> the container as it was saved.
        noted: name that a file notes as tied to one of its tensors -> that tensor.
        left_out: names whose keys the caller left out: they may be missing.
        ignored: names of values that are blocked, and that the model does not need.
        naming: names of a wrapped model.
        hooked: (prefix, module) with loading code of its own for these names.
        own_loaders: (prefix, module) whose class overrides `load_state_dict`.
    """

    candidates: Mapping[str, SourceTensor]
    objects: Mapping[str, str]
    values: Mapping[str, object]
    templates: Mapping[str, object]
    noted: Mapping[str, SourceTensor]
    left_out: set[str]
    ignored: list[str]
    naming: Names | None
    hooked: Sequence[tuple[str, nn.Module]]
    own_loaders: Sequence[tuple[str, nn.Module]]


@dataclass(slots=True)
class Match:
    """A model's tensors paired with what a source has.

    Attributes:
        pairs: (group, name under which the source has it, the candidates of all its names).
        unmatched: groups of the model that get nothing.
        missing, unexpected, dropped, mismatched: as in `LoadReport`.
        fits: how many pairs there are; 0 where none of them has anything of the source.
        open: whether code of the model, which sees the result, may still excuse names.
        left_out: names of the model whose keys the caller left out: they may be missing.
        hint: what would make more names fit, else None.
    """

    pairs: list[tuple[Group, str, list[SourceTensor]]] = field(default_factory=list)
    unmatched: list[Group] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    mismatched: dict[str, Mismatch] = field(default_factory=dict)
    fits: int = 0
    open: bool = False
    hint: str | None = None
    left_out: set[str] = field(default_factory=set)

    def rename(self, name_of: Callable[[str], str]) -> None:
        """Give the names that are reported other ones."""
        self.missing = [name_of(name) for name in self.missing]
        self.unexpected = [name_of(name) for name in self.unexpected]
        self.dropped = [name_of(name) for name in self.dropped]
        self.mismatched = {
            name_of(key): replace(item, key=name_of(key)) for key, item in self.mismatched.items()
        }


@dataclass(slots=True, eq=False)
class Step:
    """One tensor of the model and the values that it gets.

    Attributes:
        group: where they go.
        key: the model's name under which the source has them.
        candidate: what the source has, of a sharded tensor this rank's slice of an entry.
        spans: which slice of the candidate's value this rank takes; None: all of it.
        alternatives: candidates under the group's other names, which must hold the same values.
        mode: how the tensor is placed.
        source: where its bytes come from.
        route: how they get from there to where they are placed from; see `Route`.
        device, dtype: what the tensor becomes.
        dtype_is_fixed: whether that dtype was asked for, or is a live tensor's.
        handled: whether the class of the model's tensor says how it is loaded.
        raw: whether it is fetched as the source has it: a class or a transform makes the rest.
        note: why it is done this way, where that is not what was asked for.
        stride: strides that it gets, in elements, where they are not those of the source.
        plain: whether it is a dense tensor of a file, as it is, for a plain one on meta and of its
            shape: what is looked for in all others is not there.
    """

    group: Group
    key: str
    candidate: SourceTensor
    spans: Spans | None
    alternatives: tuple[SourceTensor, ...]
    mode: Mode
    source: Source
    route: Route
    device: torch.device
    dtype: torch.dtype
    dtype_is_fixed: bool
    handled: bool = False
    raw: bool = False
    note: str | None = None
    stride: tuple[int, ...] | None = None
    plain: bool = False

    @property
    def entry(self) -> TensorEntry | None:
        """The entry to read; None for a value in memory."""
        return self.candidate.entry if isinstance(self.candidate, FileTensor) else None

    @property
    def owned(self) -> bool:
        """Whether new memory is filled for it."""
        return self.handled or self.route != "view"

    @property
    def span(self) -> int:
        """Bytes that are taken out of the file for it, gaps between its elements included."""
        if self.entry is None:
            made_of = self.candidate.entry
            return made_of.nbytes if made_of is not None and made_of.kind is not None else 0
        if self.entry.needs_assembly:
            return self.entry.nbytes
        return sum(chunk.nbytes for chunk in self.entry.chunks)

    @property
    def in_place(self) -> bool:
        """Whether a live tensor's memory is written to."""
        return self.mode == "copy" and not is_blank(self.group.tensor)

    @property
    def memory(self) -> torch.device:
        """Where new memory for it is taken: values for a copy in place wait on the host."""
        return torch.device("cpu") if self.in_place else self.device

    @property
    def fetched_as(self) -> tuple[torch.device, torch.dtype]:
        """The device and the dtype with which its values come out of the source."""
        if self.raw:
            return torch.device("cpu"), self.candidate.dtype
        return self.memory, self.dtype


@dataclass(frozen=True, slots=True)
class Making:
    """A tensor that no source has: replayed from its construction, or live and to be moved."""

    group: Group
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Work:
    """All that a load is to do.

    Attributes:
        steps: tensors that the source has.
        makings: tensors that it does not have and that are made or moved.
        extra: (module, state) for ``set_extra_state``.
        hooked: whether the model's own code looks at the result, and may refuse it.
        given: names of the model for which there are values.
        match: the names on which that code has a say.
        naming: what the code of a wrapped model calls the names, which are canonical here.
        own_calls: calls of a class's own `load_state_dict`, which wait for the result.
    """

    steps: tuple[Step, ...] = ()
    makings: tuple[Making, ...] = ()
    extra: tuple[tuple[nn.Module, object], ...] = ()
    hooked: bool = False
    given: frozenset[str] = frozenset()
    match: Match = field(default_factory=Match)
    naming: Names | None = None
    own_calls: tuple[OwnLoading, ...] = ()

    @property
    def replayed(self) -> list[Group]:
        """What is made by replaying its construction."""
        return [item.group for item in self.makings if item.group.tensor.is_meta]

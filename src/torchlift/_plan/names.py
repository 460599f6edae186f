"""Which tensors of a checkpoint make which of a model: renames, merges and splits.

A merged tensor is an entry of more boxes than the ones that it is made of, and a split one of fewer
(`torchlift.formats.boxes`): a plan counts and reads both as it does what a distributed writer has
left in several files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from torchlift._checkpoint import MappedViews
from torchlift._model.dtensor import is_sharded
from torchlift._model.handlers import is_wrapper, oddity
from torchlift._plan.rules import named, renamed
from torchlift._plan.sources import Origin, StateSource, extra_state
from torchlift._plan.steps import Candidate, Joined, Rename
from torchlift._system import clipped_list
from torchlift.errors import MismatchError
from torchlift.formats import Chunk, Index, TensorEntry, row_major, steps_in_file

#: Stands before a key in place of a file, for a tensor in memory: no path has this character.
_MEMORY = "\0"


class Made(NamedTuple):
    """A tensor as a rename makes it.

    Attributes:
        entry: where its values are.
        keys: whose values they are, in their order.
    """

    entry: TensorEntry
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Rewriting:
    """A rename that makes one tensor of many, or many of one."""

    def __call__(self, key: str) -> str | None:
        """Return the name of the first tensor that values of `key` go to."""
        raise NotImplementedError

    def rewrite(self, items: Mapping[str, Made], path: str) -> dict[str, Made]:
        """Return name in the model -> tensor.

        Args:
            items: name in the checkpoint, or after the rename before this one -> tensor.
            path: of the checkpoint, for errors.

        Raises:
            MismatchError: they do not fit the rule.
        """
        raise NotImplementedError


def rewritten(
    entries: Mapping[str, TensorEntry], rename: Rename | None, path: str
) -> dict[str, Made]:
    """Return name in the model -> the tensor that a rename, a merge or a split makes for it.

    Raises:
        MismatchError: two keys get the same name, or what is to be merged does not fit together.
    """
    items = {key: Made(entry, (key,)) for key, entry in entries.items()}
    if isinstance(rename, Rewriting):
        return rename.rewrite(items, path)
    return {name: items[key] for key, name in renamed(entries, rename, path).items()}


def others(
    keys: Iterable[str], rename: Rename | None, path: str, made: Container[str] = ()
) -> dict[str, str]:
    """Return key -> name of leaves that are no tensors, and that a rule can therefore not merge.

    Args:
        keys: theirs.
        rename: that of the tensors.
        path: of the checkpoint, for errors.
        made: names of tensors. A leaf for which a rule that merges has one of them, or the name of
            another leaf, keeps its key.

    Raises:
        MismatchError: two get the same name of another rename.
    """
    if not isinstance(rename, Rewriting):
        return renamed(keys, rename, path)
    names = named(keys, rename)
    counts = Counter(names.values())
    taken = {name for name, count in counts.items() if count > 1 or name in made}
    return {key: key if name in taken else name for key, name in names.items()}


def names_of_left_out(
    gone: Mapping[str, Candidate | None], rename: Rename | None, path: str
) -> set[str]:
    """Return the names that keys would have had, which a caller has left out."""
    names = set(named(gone, rename).values())
    names |= {whole for name in names if (whole := extra_state(name))}
    if isinstance(rename, Rewriting):
        tensors = {key: one for key, one in gone.items() if one is not None}
        entries = {key: one.entry or _described(one) for key, one in tensors.items()}
        try:
            return names | rewritten(entries, rename, path).keys()
        except MismatchError:  # a part without the others makes nothing that could be missing
            return names
    return names


def assembled(origin: Origin, rename: Rewriting) -> tuple[dict[str, str], dict[str, Candidate]]:
    """Return key -> name of what stays as it is, and name -> candidate of what a rule makes.

    Raises:
        MismatchError: see `rewritten`.
    """
    candidates = {k: v for k, v in origin.candidates.items() if k not in origin.blocked}
    entries = {key: one.entry or _described(one) for key, one in candidates.items()}
    names: dict[str, str] = {}
    made: dict[str, Candidate] = {}
    try:
        tensors = rewritten(entries, rename, origin.path)
    except MismatchError as error:
        if no_tensors := [key for key in error.missing_keys if key in origin.objects]:
            error.hint = f"In the checkpoint this is no tensor: {clipped_list(no_tensors)}."
        raise
    for name, (entry, keys) in tensors.items():
        if entry is entries[keys[0]]:
            names[keys[0]] = name
        elif candidates[keys[0]].entry is None or any(
            chunk.file.startswith(_MEMORY) for chunk in entry.chunks
        ):
            slices = tuple(_slices(entry, origin))
            dtype = getattr(torch, entry.dtype)
            value = Joined(slices, torch.Size(entry.shape), dtype)
            made[name] = Candidate(keys[0], value=value, keys=keys)
        else:
            made[name] = Candidate(keys[0], entry, keys=keys)
    return names, made


def as_index(source: StateSource) -> Index:
    """Return the index of a state dict in memory: each tensor as if its storage were a file."""
    return Index(
        source.path,
        "memory",
        {key: _described(one) for key, one in source.candidates.items()},
        {},
        {},
        objects=source.objects,
        blocked_keys=source.blocked,
    )


def in_memory(
    entry: TensorEntry, state: Mapping[str, torch.Tensor], views: MappedViews
) -> torch.Tensor | None:
    """Return the tensor of an entry of `as_index`, or of one that a rename made of some.

    Args:
        entry: of any index.
        state: key -> tensor.
        views: of the files that have slices of it, too.

    Returns:
        None: its values are in files.
    """
    if not any(chunk.file.startswith(_MEMORY) for chunk in entry.chunks):
        return None
    key = entry.chunks[0].file.removeprefix(_MEMORY)
    one = state.get(key)
    if one is not None and (tuple(one.shape), len(entry.chunks)) == (entry.shape, 1):
        return one
    origin = StateSource(state)
    origin.views = views
    slices = tuple(_slices(entry, origin))
    return Joined(slices, torch.Size(entry.shape), getattr(torch, entry.dtype)).whole()


def _described(candidate: Candidate) -> TensorEntry:
    """Return the entry of a tensor in memory: as if its storage were a file."""
    value, shape, dtype = candidate.value, candidate.shape, candidate.dtype
    odd = "a whole tensor of rank 0"
    offset, stride = 0, row_major(shape)
    if isinstance(value, torch.Tensor):
        odd = oddity(value) or ""
        if is_sharded(value) or is_wrapper(value):
            odd = type(value).__name__
        elif not odd:
            offset, stride = int(value.storage_offset()), value.stride()
    encoding = (odd,) if odd else ()
    entry = TensorEntry(
        candidate.key, dtype, shape, stride, candidate.nbytes, "", "", (), encoding=encoding
    )
    file, zeros = _MEMORY + candidate.key, (0,) * len(shape)
    chunk = Chunk(file, offset * entry.itemsize, entry.nbytes, zeros, shape)
    return replace(entry, chunks=(chunk,) if entry.numel else ())


def _slices(
    entry: TensorEntry, origin: Origin
) -> Iterator[tuple[torch.Tensor, tuple[tuple[int, int], ...]]]:
    """Yield what is in each box of an entry, as a view, and where in it that goes."""
    for chunk in entry.chunks:
        spans = zip(chunk.start, chunk.shape, strict=True)
        block = tuple((start, start + size) for start, size in spans)
        steps = steps_in_file(entry, chunk)
        if chunk.file.startswith(_MEMORY):
            value = origin.candidates[chunk.file.removeprefix(_MEMORY)].value
            assert isinstance(value, torch.Tensor)
            offset = chunk.offset // entry.itemsize
            yield value.detach().as_strided(chunk.shape, steps, offset), block
        else:
            alone = replace(chunk, start=(0,) * len(chunk.start), stride=None)
            box = replace(entry, shape=chunk.shape, stride=steps, chunks=(alone,))
            yield origin.views.view(box), block

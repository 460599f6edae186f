"""Directories of DeepSpeed's ZeRO: every rank stores its share of the model as flat vectors.

Facts: deepspeed, ``utils/zero_to_fp32.py`` and the optimizers' ``state_dict`` in ``runtime``. In
stages 1 and 2, the concatenated vectors of all ranks are the parameters of a group. In stage 3,
each parameter is cut into equal shares, and the last one is padded. The concatenated vectors of one
rank are its shares of all parameters. ``param_shapes`` has their order. Objects of deepspeed's
classes in the files are not needed. The weights are read, as ``zero_to_fp32`` gives them. The state
of the optimizer is blocked.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from torchlift._store.places import name_of
from torchlift.errors import FormatError
from torchlift.formats.boxes import flat_entry
from torchlift.formats.flattening import under
from torchlift.formats.index import PARTITIONED, Index, TensorEntry, used_by
from torchlift.formats.sharded import ReadFile, claimed, locate, require_files
from torchlift.formats.source import dense_shape
from torchlift.formats.unpickle import ENTRY, STEP, Budget

_FILE = re.compile(
    r"(?:(?:bf16_|fp16_)?(zero_pp_rank_)(\d{1,9})_)?mp_rank_(\d{1,9})_(model|optim)_states\.pt",
    re.ASCII,
)
#: The number of a rank in such a name.
_RANK = re.compile(r"(zero_pp_rank_)\d+")
_OPTIM = "optimizer_state_dict"
#: Keys of a rank's vectors of weights, in stages 1 and 2 and in stage 3.
_WEIGHTS = "single_partition_of_fp32_groups.", "fp32_flat_groups."
#: The key of the optimizer's state, which is blocked.
_ASIDE = "optimizer"


def zero_files(names: Iterable[str]) -> list[str]:
    """Return the names of ranks' files in a folder."""
    return [name for name in names if (match := _FILE.fullmatch(name)) and match[1]]


def read_zero(path: str, names: Iterable[str], read_file: ReadFile) -> Index:
    """Read the index of a ZeRO checkpoint of stage 1, 2 or 3.

    Weights and buffers have the model's names. The key ``optimizer`` stands for the optimizer's
    state, which is blocked. Its error names DeepSpeed's universal checkpoint.

    Raises:
        FormatError: If a rank's file is missing, the model is also split in another way, or the
            length of a vector does not match the shapes.
        UnsafeError: If a file is a link that leaves the directory.
    """
    budget = Budget()
    kinds: dict[str, dict[int, str]] = {"model": {}, "optim": {}}
    for match in filter(None, map(_FILE.fullmatch, names)):
        if int(match[3]):
            raise _split("by tensor or pipeline parallelism", match[0])
        kinds[match[4]][int(match[2] or 0)] = match[0]

    def read(kind: str, ranks: Sequence[int]) -> list[Index]:
        files = [locate(path, kinds[kind][rank]) for rank in ranks]
        return [claimed(name_of(file), read_file(file, budget), {}) for file in files]

    def check(kind: str, ranks: int) -> None:
        like = next(iter(kinds[kind].values()), f"*mp_rank_00_{kind}_states.pt")
        require_files(
            kinds[kind], range(ranks), ranks, lambda rank: _RANK.sub(rf"\g<1>{rank}", like)
        )

    def read_optims(ranks: Sequence[int]) -> list[Index]:
        optims = read("optim", ranks)
        budget.grow(sum(optim.nbytes for optim in optims))  # they may hold that many shares
        return [under(optim, _OPTIM) or optim for optim in optims]

    ranks = sorted(kinds["optim"])
    optims = read_optims(ranks[:1])  # the first one says how many ranks there were
    found = optims[0].objects.get("partition_count") if optims else None
    counts = found if isinstance(found, list) else [found]
    stated = [count for count in counts if type(count) is int]
    check("optim", max(1, *stated, *(rank + 1 for rank in ranks)))
    optims += read_optims(ranks[1:])
    if wrong := [count for count in counts if count != len(optims)]:
        raise _split("by expert parallelism", found=f"partitions in {str(wrong[0])[:20]}")

    def read_models(ranks: int) -> list[Index]:
        check("model", ranks)
        return read("model", range(ranks))

    return _Reader(optims, read_models, budget).index(path)


def _split(how: str, entry: str | None = None, found: str | None = None) -> FormatError:
    return FormatError(
        f"the model of this ZeRO checkpoint is also split {how}",
        entry=entry,
        found=found,
        hint="Join it with DeepSpeed's ds_to_universal.py.",
    )


class _Vector:
    """Consecutive flat tensors.

    Attributes:
        parts: The tensors.
        ends: Index of the first element after each tensor.
    """

    def __init__(self, parts: Iterable[TensorEntry]) -> None:
        self.parts, self.ends = list(parts), list[int]()
        for part in self.parts:
            if len(part.shape) != 1 or not part.is_contiguous or part.encoding or part.kind:
                raise FormatError(
                    "a partition is not a flat vector", entry=part.key, found=part.shape
                )
            self.ends.append(part.shape[0] + self.numel)

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.ends[-1] if self.ends else 0

    def runs(self, start: int, numel: int) -> Iterator[tuple[TensorEntry, int, int]]:
        """Yield (tensor, first element in it, number of elements) for a range of the vector."""
        at, stop = bisect.bisect_right(self.ends, start), start + numel
        if stop > self.numel:
            raise _unequal(self, stop)
        while start < stop:
            part, end = self.parts[at], min(self.ends[at], stop)
            if end > start:
                yield part, start - self.ends[at] + part.shape[0], end - start
            start, at = end, at + 1


def _check_length(vector: _Vector, numel: int, align: int) -> None:
    """Refuse a vector that its parameters do not fill, apart from padding to `align`."""
    if -(-numel // align) != -(-vector.numel // align):
        raise _unequal(vector, numel)


def _unequal(vector: _Vector, numel: int) -> FormatError:
    return FormatError(
        "the length of a vector does not match the shapes of its parameters",
        entry=vector.parts[0].key if vector.parts else None,
        expected=f"{numel} elements",
        found=f"{vector.numel}",
        hint="The files are of different checkpoints, or one was not saved completely.",
    )


class _Parameter(NamedTuple):
    """The place of a parameter.

    Attributes:
        shape: Shape of the parameter.
        group: Number of the flat tensor in which it starts.
        start: First element in the vector. In stage 3, the first element of each rank's share.
    """

    shape: tuple[int, ...]
    group: int
    start: int


class _Reader:
    """A checkpoint whose optimizer files have been read.

    Args:
        optims: Index of each rank's optimizer file.
        read_models: Number of ranks -> the indexes of their model files.
        budget: Budget for reading the directory.
    """

    def __init__(
        self, optims: list[Index], read_models: Callable[[int], list[Index]], budget: Budget
    ) -> None:
        self.optims, self.budget, self.world = optims, budget, len(optims)
        self.models, self.read_models = read_models(1), read_models
        self.model = self.models[0]
        first = optims[0]
        self.is_stage_3 = _WEIGHTS[1] + "0" in first.entries
        self.weights = _WEIGHTS[self.is_stage_3]
        numbered = (f"{self.weights}{at}" for at in itertools.count())
        self.groups = sum(1 for _ in itertools.takewhile(first.entries.__contains__, numbered))

    def index(self, path: str) -> Index:
        """Return the index of the whole."""
        module = under(self.model, "module")
        if module is None or not self.groups:
            raise FormatError(
                "the ZeRO checkpoint lacks its module or its weights",
                hint="If it is a pipeline, join its layers with DeepSpeed's ds_to_universal.py.",
            )
        keys = (*module.entries, *module.objects, *module.blocked_keys)
        has_own = any(key.partition(".")[0] == _ASIDE for key in keys)
        vectors = self._vectors()
        layout = self._layout(vectors)
        entries = self._module(module, layout, vectors)
        entries = {key: entry._replace(key=key) for key, entry in entries.items()}
        files = [*self.models, *self.optims]
        stage = "3" if self.is_stage_3 else "1 or 2"
        metadata = {"stage": stage, "ranks": str(self.world)}
        if isinstance(version := self.model.objects.get("ds_version"), str):
            metadata["deepspeed"] = version
        return replace(
            module,
            path=path,
            format="zero",
            entries=entries,
            storages=used_by(entries, {k: v for f in files for k, v in f.storages.items()}),
            files={name: stamp for file in files for name, stamp in file.files.items()},
            blocked_keys={**({} if has_own else {_ASIDE: PARTITIONED}), **module.blocked_keys},
            metadata=metadata,
            aside=() if has_own else (_ASIDE,),
        )

    def _vectors(self) -> list[_Vector]:
        """Return the vectors of the weights: one per group, or in stage 3 one per rank.

        Raises:
            FormatError: If a rank lacks one.
        """
        self.budget.spend(STEP * self.groups * self.world)
        table = []
        for optim in self.optims:
            keys = [f"{self.weights}{group}" for group in range(self.groups)]
            row = [optim.entries.get(key) for key in keys]
            if None in row:
                what = "a rank lacks one of the vectors of weights"
                raise FormatError(what, entry=keys[row.index(None)], file=optim.path)
            table.append(list(filter(None, row)))
        return [_Vector(row) for row in (table if self.is_stage_3 else zip(*table, strict=True))]

    def _layout(self, vectors: Sequence[_Vector]) -> dict[str, _Parameter]:
        """Return the place of each parameter.

        Raises:
            FormatError: If the length of a vector does not match the shapes.
        """
        shapes = self.model.objects.get("param_shapes")
        shapes = shapes if isinstance(shapes, list) else [shapes]
        if not all(isinstance(group, dict) for group in shapes):
            raise FormatError("the shapes of the parameters are missing", entry="param_shapes")
        if not self.is_stage_3 and len(shapes) != self.groups:
            raise FormatError(
                "the numbers of parameter groups and vectors differ",
                entry="param_shapes",
                expected=self.groups,
                found=len(shapes),
            )
        paddings = self.optims[0].objects.get("param_alignment_paddings")
        layout: dict[str, _Parameter] = {}
        start = 0
        for group, named in enumerate(shapes):
            pads = iter(paddings[group] if isinstance(paddings, list) else ())
            for name, size in named.items():
                if type(name) is not str or name in layout:
                    raise FormatError(
                        "a parameter's name is missing or repeated", entry=str(name)[:100]
                    )
                shape = dense_shape(size, name, "shape", "tuple")
                numel = math.prod(shape)
                if self.is_stage_3:
                    group = bisect.bisect_right(vectors[0].ends, start)
                    layout[name] = _Parameter(shape, group, start)
                    start += -(-numel // self.world)
                else:
                    layout[name] = _Parameter(shape, group, start)
                    start += numel + max(0, int(next(pads, 0)))
            if not self.is_stage_3:
                # The padding is not recorded. zero_to_fp32 uses the same bound.
                _check_length(vectors[group], start, 2 * self.world)
                start = 0
        for vector in vectors if self.is_stage_3 else ():
            _check_length(vector, start, 1)
        return layout

    def _flat(self, key: str, place: _Parameter, vectors: Sequence[_Vector]) -> TensorEntry:
        """Return the entry of a parameter."""
        shares = [(place.group, math.prod(place.shape))]
        if self.is_stage_3:
            numel = math.prod(place.shape)
            share = max(1, -(-numel // self.world))
            shares = [
                (at, min(share, numel - first)) for at, first in enumerate(range(0, numel, share))
            ]
        places, kinds = [], set[tuple[str, str]]()
        for number, count in shares:
            for part, first, numel in vectors[number].runs(place.start, count):
                (chunk,) = part.chunks
                places.append((chunk.file, chunk.offset + first * part.itemsize, numel))
                kinds.add((part.dtype, part.location))
        dtypes = {dtype for dtype, _ in kinds} or {vectors[0].parts[0].dtype}
        if len(dtypes) > 1:
            raise FormatError(
                "the shares of a parameter have several dtypes", entry=key, found=sorted(dtypes)
            )
        location = min((location for _, location in kinds), default="cpu")
        entry = flat_entry(key, dtypes.pop(), place.shape, places, key, location)
        self.budget.spend(ENTRY + len(key) + 4 * STEP * len(entry.chunks), key)
        return entry

    def _module(
        self, module: Index, layout: dict[str, _Parameter], vectors: Sequence[_Vector]
    ) -> dict[str, TensorEntry]:
        """Return the weights and buffers of the model, in the order of its state dict."""
        found = {name: self._flat(name, place, vectors) for name, place in layout.items()}
        found.update(self._frozen())
        shared = under(self.model, "shared_params")
        for name, first in shared.objects.items() if shared else ():
            if isinstance(first, str) and first in found:
                self.budget.spend(ENTRY + len(name) + 4 * STEP * len(found[first].chunks), name)
                found.setdefault(name, found[first])
        named = self.model.objects.get("buffer_names")
        buffers = {name for name in (named if isinstance(named, list) else ()) if type(name) is str}
        for name, entry in module.entries.items():
            # In stage 3, everything but a buffer is an empty stand-in for a parameter.
            if not self.is_stage_3 or name in buffers:
                found.setdefault(name, entry)
        order = dict.fromkeys((*module.entries, *found))
        return {name: found[name] for name in order if name in found}

    def _frozen(self) -> Iterator[tuple[str, TensorEntry]]:
        """Yield (name, entry) of the parameters that are not trained."""
        shapes = under(self.model, "frozen_param_shapes")
        if shapes is None:
            return
        if self.is_stage_3 and shapes.objects:
            self.models = self.read_models(self.world)
        for name, size in shapes.objects.items():
            shape, key = dense_shape(size, name, "shape", "tuple"), f"frozen_param_fragments.{name}"
            parts = [model.entries.get(key) for model in self.models]
            whole = parts[0]
            if self.is_stage_3 and None not in parts:
                vectors = [_Vector([part]) for part in filter(None, parts)]
                yield name, self._flat(name, _Parameter(shape, 0, 0), vectors)
            elif whole is None or whole.shape != shape:
                raise FormatError(
                    "the values of a frozen parameter are missing",
                    entry=name,
                    expected=shape,
                    found=whole and whole.shape,
                )
            else:
                yield name, whole

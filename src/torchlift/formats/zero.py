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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torchlift._store.places import name_of
from torchlift.errors import FormatError
from torchlift.formats.boxes import flat_entry
from torchlift.formats.detect import read_file
from torchlift.formats.flattening import under
from torchlift.formats.index import (
    Index,
    Lack,
    TensorEntry,
    free_name,
    still_checked,
    used_by,
)
from torchlift.formats.sharded import by_number, claimed, locate, require_files
from torchlift.formats.source import dense_shape
from torchlift.formats.table import ZERO_FILE
from torchlift.formats.unpickle import ENTRY, STEP, Budget

#: The number of a rank in such a name.
_RANK = re.compile(r"(zero_pp_rank_)\d+")
_OPTIM = "optimizer_state_dict"
#: Keys of a rank's vectors of weights, in stages 1 and 2 and in stage 3.
_WEIGHTS = "single_partition_of_fp32_groups.", "fp32_flat_groups."


def read_zero(path: str, names: Iterable[str]) -> Index:
    """Read the index of a ZeRO checkpoint of stage 1, 2 or 3.

    Weights and buffers have the model's names. The key ``optimizer`` stands for the optimizer's
    state, which is blocked. Its error names DeepSpeed's universal checkpoint.

    Raises:
        FormatError: If a rank has no file or two, the model is also split in another way, or the
            length of a vector does not match the shapes.
        UnsafeError: If a file is a link that leaves the directory.
    """
    budget = Budget()
    matches = [*filter(None, map(ZERO_FILE.fullmatch, names))]
    if other := next((match[0] for match in matches if int(match[3])), None):
        raise _split("by tensor or pipeline parallelism", other)
    kinds = {
        kind: by_number((int(match[2] or 0), match[0]) for match in matches if match[4] == kind)
        for kind in ("model", "optim")
    }

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
    world = len(optims)
    if wrong := [count for count in counts if count != world]:
        raise _split("by expert parallelism", found=f"partitions in {str(wrong[0])[:20]}")
    check("model", 1)
    models = read("model", [0])
    is_stage_3 = _WEIGHTS[1] + "0" in optims[0].entries
    frozen = under(models[0], "frozen_param_shapes")
    if is_stage_3 and frozen is not None and frozen.objects:
        check("model", world)
        models += read("model", range(1, world))
    return _join(path, models, optims, is_stage_3, budget)


def _split(how: str, entry: str | None = None, found: str | None = None) -> FormatError:
    return FormatError(
        f"the model of this ZeRO checkpoint is also split {how}",
        entry=entry,
        found=found,
        hint="Join it with DeepSpeed's ds_to_universal.py.",
    )


def _join(
    path: str, models: list[Index], optims: list[Index], is_stage_3: bool, budget: Budget
) -> Index:
    """Return the index of the whole."""
    model, module = models[0], under(models[0], "module")
    numbered = (f"{_WEIGHTS[is_stage_3]}{at}" for at in itertools.count())
    keys = [*itertools.takewhile(optims[0].entries.__contains__, numbered)]
    if module is None or not keys:
        raise FormatError(
            "the ZeRO checkpoint lacks its module or its weights",
            hint="If it is a pipeline, join its layers with DeepSpeed's ds_to_universal.py.",
        )
    found = _trained(model, optims, keys, is_stage_3, budget)
    found |= _frozen(models, is_stage_3, budget)
    shared = under(model, "shared_params")
    for name, first in shared.objects.items() if shared else ():
        if isinstance(first, str) and first in found:
            budget.spend(ENTRY + len(name) + 4 * STEP * len(found[first].chunks), name)
            found.setdefault(name, found[first])
    named = model.objects.get("buffer_names")
    buffers = {name for name in (named if isinstance(named, list) else ()) if type(name) is str}
    for name, entry in module.entries.items():
        # In stage 3, everything but a buffer is an empty stand-in for a parameter.
        if not is_stage_3 or name in buffers:
            found.setdefault(name, entry)
    order = dict.fromkeys((*module.entries, *found))
    entries = {name: found[name]._replace(key=name) for name in order if name in found}
    aside, files = free_name(module, "optimizer"), [*models, *optims]
    used = used_by(entries, {k: v for f in files for k, v in f.storages.items()})
    return replace(
        module,
        path=path,
        format="zero",
        tensors=entries,
        storages=used,
        records=still_checked(used, files),
        files={name: stamp for file in files for name, stamp in file.files.items()},
        blocked_keys={aside: Lack.PARTITIONED, **module.blocked_keys},
        metadata={"stage": "3" if is_stage_3 else "1 or 2", "ranks": str(len(optims))},
        aside=(aside,),
    )


def _trained(
    model: Index, optims: Sequence[Index], keys: Sequence[str], is_stage_3: bool, budget: Budget
) -> dict[str, TensorEntry]:
    """Return the parameters that are trained.

    Args:
        model: The model file.
        optims: The optimizer file of each rank.
        keys: Keys of the vectors of one rank.
        is_stage_3: Whether all vectors of all ranks hold each parameter.
        budget: Budget for reading the directory.

    Raises:
        FormatError: If a rank lacks a vector, or the length of one does not match the shapes.
    """
    budget.spend(STEP * len(keys) * len(optims))
    table: list[list[TensorEntry]] = []
    for optim in optims:
        row = [optim.entries.get(key) for key in keys]
        if None in row:
            what = "a rank lacks one of the vectors of weights"
            raise FormatError(what, entry=keys[row.index(None)], file=optim.path)
        table.append(list(filter(None, row)))
    noted = model.objects.get("param_shapes")
    shapes: list[Any] = noted if isinstance(noted, list) else [noted]
    if not all(isinstance(group, dict) for group in shapes):
        raise FormatError("the shapes of the parameters are missing", entry="param_shapes")
    found: dict[str, TensorEntry] = {}
    if is_stage_3:
        named = [pair for group in shapes for pair in group.items()]
        _take_all(found, named, _vectors(table), (), 1, budget)
        return found
    if len(shapes) != len(keys):
        raise FormatError(
            "the numbers of parameter groups and vectors differ",
            entry="param_shapes",
            expected=len(keys),
            found=len(shapes),
        )
    paddings = optims[0].objects.get("param_alignment_paddings")
    for at, column in enumerate(zip(*table, strict=True)):
        pads = paddings[at] if isinstance(paddings, list) else ()
        # The padding at the end is not recorded. zero_to_fp32 uses the same bound.
        alignment = 2 * len(optims)
        _take_all(found, shapes[at].items(), _vectors([column]), pads, alignment, budget)
    return found


def _take_all(
    found: dict[str, TensorEntry],
    named: Iterable[tuple[object, object]],
    vectors: Sequence[_Vector],
    paddings: Iterable[Any],
    alignment: int,
    budget: Budget,
) -> None:
    """Add the entries of parameters that lie one after the other in vectors, in equal shares.

    Args:
        found: Name -> entry.
        named: Names and shapes of the parameters, as the file has them.
        vectors: The vectors.
        paddings: Number of elements after each parameter, if there are any.
        alignment: The end of the vectors may be padded to a multiple of this.
        budget: Budget for reading the directory.
    """
    start, pads = 0, iter(paddings)
    for name, size in named:
        if type(name) is not str or name in found:
            raise FormatError("a parameter's name is missing or repeated", entry=str(name)[:100])
        shape = dense_shape(size, name, "shape", "tuple")
        found[name] = _flat(name, shape, vectors, start, budget)
        start += _share(shape, vectors) + max(0, int(next(pads, 0)))
    for vector in vectors:
        if -(-start // alignment) != -(-vector.numel // alignment):
            raise vector.length_error(start)


class _Vector:
    """Flat tensors of several files, one after the other.

    Attributes:
        parts: The tensors.
        numel: Number of elements of all.
    """

    def __init__(self, parts: Sequence[TensorEntry]) -> None:
        for part in parts:
            if len(part.shape) != 1 or not part.is_contiguous or part.encoding or part.kind:
                what = "a partition is not a flat vector"
                raise FormatError(what, entry=part.key, found=part.shape)
        self.parts = parts
        self._starts = [*itertools.accumulate((part.numel for part in parts), initial=0)]
        self.numel = self._starts[-1]

    def places(self, start: int, count: int) -> Iterator[tuple[str, int, int]]:
        """Yield (file, first byte, number of elements) of some consecutive elements."""
        if start + count > self.numel:
            raise self.length_error(start + count)
        # Not by a search from the first part: 384 ranks with 3,000 parameters have a million pairs.
        at = bisect.bisect_right(self._starts, start) - 1
        while count:
            part, first = self.parts[at], start - self._starts[at]
            some = min(count, part.numel - first)
            for chunk in part.chunks if some else ():
                yield chunk.file, chunk.offset + first * part.itemsize, some
            start, count, at = start + some, count - some, at + 1

    def length_error(self, numel: int) -> FormatError:
        """Return the error for parameters that need another number of elements."""
        return FormatError(
            "the length of a vector does not match the shapes of its parameters",
            entry=self.parts[0].key,
            expected=f"{numel} elements",
            found=f"{self.numel}",
            hint="The files are of different checkpoints, or one was not saved completely.",
        )


def _vectors(rows: Iterable[Sequence[TensorEntry]]) -> list[_Vector]:
    """Return a vector for each row of tensors, which must all have one dtype."""
    found = [_Vector(row) for row in rows]
    parts = [part for vector in found for part in vector.parts]
    if len(dtypes := {part.dtype for part in parts}) > 1:
        what = "the shares have several dtypes"
        raise FormatError(what, entry=parts[0].key, found=sorted(dtypes))
    return found


def _share(shape: tuple[int, ...], vectors: Sequence[_Vector]) -> int:
    """Return the number of a parameter's elements in each vector."""
    return -(-math.prod(shape) // len(vectors))


def _flat(
    key: str, shape: tuple[int, ...], vectors: Sequence[_Vector], start: int, budget: Budget
) -> TensorEntry:
    """Return the entry of a parameter that starts at one element of all vectors."""
    left, places = math.prod(shape), list[tuple[str, int, int]]()
    budget.spend(STEP * len(vectors), key)
    for vector in vectors:
        count = min(left, _share(shape, vectors))  # without the padding of the last share
        left -= count
        places += vector.places(start, count)
    budget.spend(2 * STEP * len(places), key)
    first = vectors[0].parts[0]
    entry = flat_entry(key, first.dtype, shape, places, key, first.location)
    budget.spend(ENTRY + len(key) + 4 * STEP * len(entry.chunks), key)
    return entry


def _frozen(
    models: Sequence[Index], is_stage_3: bool, budget: Budget
) -> Iterator[tuple[str, TensorEntry]]:
    """Yield (name, entry) of the parameters that are not trained."""
    shapes = under(models[0], "frozen_param_shapes")
    for name, size in shapes.objects.items() if shapes else ():
        shape, key = dense_shape(size, name, "shape", "tuple"), f"frozen_param_fragments.{name}"
        parts = [model.entries.get(key) for model in models]
        whole = parts[0]
        if is_stage_3 and None not in parts:
            yield name, _flat(name, shape, _vectors([part] for part in parts if part), 0, budget)
        elif whole is None or whole.shape != shape:
            raise FormatError(
                "the values of a frozen parameter are missing",
                entry=name,
                expected=shape,
                found=whole and whole.shape,
            )
        else:
            yield name, whole

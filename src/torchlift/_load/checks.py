"""Refuse damaged files, and values that are not finite, before a load changes anything."""

from __future__ import annotations

import hashlib
from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from torchlift._checkpoint.checkpoint import Checkpoint
from torchlift._checkpoint.kinds import dense_of
from torchlift._load.fetch import Fetched
from torchlift._model.dtensor import blocks, local_tensor
from torchlift._model.ranks import RankGroup, StepResult, rank
from torchlift._sources.tensors import JoinedTensor
from torchlift._system.text import count_of
from torchlift._transfer.casting import NotFinite, count_not_finite, count_overflows
from torchlift.errors import Argument, Hint, IntegrityError
from torchlift.formats.integrity import Checksum, VerifyReport, checksums, compared, sums_of

#: Values that are checked at a time, and how many tensors an error lists.
_VALUES, _SHOWN = 1 << 20, 20


def require_finite(fetched: Fetched, path: str) -> None:
    """Refuse NaN and infinite values, after the cast of a copy in place.

    Raises:
        IntegrityError: If there are such values.
    """
    found: dict[str, NotFinite] = {}
    for step, value in (*fetched.plain, *fetched.steps):
        slices = [one for one, _ in value.slices] if isinstance(value, JoinedTensor) else [value]
        dtype = local_tensor(step.group.tensor).dtype if step.in_place else None
        nan = inf = 0
        for each in slices:
            assert isinstance(each, torch.Tensor)  # `load` does not broadcast
            for dense in dense_of(local_tensor(each).detach(), indices=False):
                for block in blocks(dense.shape, _VALUES):
                    part = dense[tuple(slice(*span) for span in block)]
                    # The cast comes first: integers and complex numbers may become infinite, too.
                    made = part.to(dtype or part.dtype)
                    some = count_not_finite(made)
                    # Some dtypes have no infinity.
                    lost = 0 if any(some) else count_overflows(part, made)
                    nan, inf = nan + some.nan, inf + some.inf + lost
        inf = inf if nan or inf else fetched.overflowed.get(step.key, 0)
        if nan or inf:
            found[step.key] = NotFinite(nan, inf)
    if found:
        raise not_finite_error(found, path, "load")


def not_finite_error(found: Mapping[str, NotFinite], path: str, verb: str) -> IntegrityError:
    """Return the error for values that are not finite.

    Args:
        found: Name -> the numbers of such values.
        path: The source.
        verb: ``"load"`` or ``"convert"``.
    """
    lines = [f"{key}: {nan:,} NaN, {inf:,} infinite" for key, (nan, inf) in found.items()]
    more = len(lines) - _SHOWN
    error = IntegrityError(
        f"{count_of(len(found), 'tensor')} to {verb} with NaN or infinite values",
        file=path,
        hint=Hint(
            "If torchlift.open(path).stats(key) shows finite values, pass a larger ",
            Argument("dtype"),
            f". Otherwise {verb} an older checkpoint. To {verb} these values, leave ",
            Argument("check"),
            " out.",
        ),
        lists=lines if more <= 0 else [*lines[:_SHOWN], f"and {more:,} more"],
    )
    error.not_finite = found
    return error


def require_intact(
    ckpts: Sequence[Checkpoint],
    group: RankGroup | None = None,
    *,
    only: Collection[str] | None = None,
) -> int:
    """Verify all checksums. Return the number of bytes without a checksum.

    Args:
        ckpts: The checkpoints.
        group: Ranks that all call this. Ranks with the same checkpoints read a part each.
        only: The storages to verify. None: all.

    Raises:
        IntegrityError: If a checksum is wrong.
    """
    ranks = group or RankGroup([])

    def list_checksums() -> StepResult[list[list[Checksum]], str]:
        found = [find_checksums(ckpt, only) for ckpt in ckpts]
        # Ranks may load different files: only equal ones share the work.
        digest = hashlib.sha256(repr(found).encode()).hexdigest() if ckpts else ""
        return StepResult(found, digest)

    known, digests = ranks.run(list_checksums)
    if not any(digests.values()):
        return 0
    peers = [who for who, digest in digests.items() if digest == digests[rank()]]
    part = peers.index(rank()), len(peers)

    def compute() -> StepResult[None, list[dict[int, int | None]]]:
        pairs = zip(ckpts, known, strict=True)
        return StepResult(None, [sums_of(ckpt._index, some, part=part) for ckpt, some in pairs])

    by_rank, unchecked = ranks.run(compute).by_rank, 0
    for number, (ckpt, some) in enumerate(zip(ckpts, known, strict=True)):
        sums = ChainMap(*(by_rank[who][number] for who in peers))
        unchecked += require_equal(ckpt, some, sums)
    return unchecked


def require_equal(ckpt: Checkpoint, known: Sequence[Checksum], sums: Mapping[int, Any]) -> int:
    """Compare checksums. Return the number of bytes without one.

    Args:
        ckpt: The checkpoint.
        known: Its checksums, or some of them.
        sums: Their `sums_of`.

    Raises:
        IntegrityError: If a checksum is wrong.
    """
    report = compared(ckpt._index, known, sums)
    if not report.ok:
        raise _damage_error(ckpt, report)
    return report.unchecked_nbytes


def find_checksums(ckpt: Checkpoint, only: Collection[str] | None = None) -> list[Checksum]:
    """Return the checksums of all or some storages, and of other records.

    A file is hashed for the hub only if one of the storages lacks a checksum of its own. This reads
    the file again.
    """
    known, storages = checksums(ckpt._index), ckpt._index.storages
    names = {*(storages if only is None else only)}
    own = {each.name for each in known if each.kind == "storage"}
    bare = {storages[name].file for name in names - own}
    return [
        each
        for each in known
        if each.kind == "record" or each.name in (names if each.kind == "storage" else bare)
    ]


def _damage_error(ckpt: Checkpoint, report: VerifyReport) -> IntegrityError:
    first, total = report.failed[0], len(report.checked) + len(report.records)
    storage = ckpt._index.storages.get(first.name)
    where = storage.file if storage is not None else ckpt.path
    stamp = ckpt._index.files.get(where)
    of_file = first.algorithm == "sha256"
    wrong = f"checksums are wrong in {len(report.failed)} of {total} records"
    return IntegrityError(
        "the checksum of the whole file, as the hub records it, is wrong" if of_file else wrong,
        file=first.name if of_file else (stamp and stamp.shown) or where,
        entry=None if of_file else first.name,
        expected=first.right,
        found=first.what,
        hint="The file is damaged: fetch it again, or restore it from a copy.",
    )

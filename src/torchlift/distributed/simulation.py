"""The bytes that each rank of FSDP reads, by arithmetic: without processes, a model or a GPU."""

from __future__ import annotations

import os

from torchlift._checkpoint.checkpoint import Checkpoint
from torchlift._plan.rules import Rename, check_rename, rename_keys
from torchlift._sources.opening import checkpoint

_MOST_RANKS = 1 << 20


def simulate(
    source: Checkpoint | str | os.PathLike[str],
    ranks: int,
    *,
    root: str | None = None,
    rename: Rename | None = None,
) -> tuple[int, ...]:
    """Compute how many bytes each rank reads when it loads its shards of a model.

    It cuts all tensors of the checkpoint as ``fully_shard`` cuts parameters: the rows (dimension 0)
    in chunks of equal size. The last ranks may get fewer rows or none. Every rank reads a tensor
    without dimensions, and tied keys are read once. Replicas read the same bytes again. In a load
    every rank reads a buffer completely, which a file does not tell from a parameter. Tensor
    parallelism is not counted.

    Args:
        source: A checkpoint or its path.
        ranks: The number of ranks that share the rows.
        root: The container of the checkpoint that holds the model. See `torchlift.load`.
        rename: New names for the keys, or None for a key to leave out. See `torchlift.load`.

    Returns:
        The bytes of each rank.

    Raises:
        ValueError: If `ranks` is not a number from 1 to 1,048,576.
        MismatchError: If `rename` or `root` matches no key.

    Example:
        >>> import os, tempfile, torch, torchlift
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> torch.save(torch.nn.Linear(1024, 1024, bias=False).state_dict(), path)
        >>> torchlift.distributed.simulate(path, 4)
        (1048576, 1048576, 1048576, 1048576)
    """
    if type(ranks) is not int or not 1 <= ranks <= _MOST_RANKS:
        raise ValueError(f"ranks={ranks!r}: expected a number from 1 to {_MOST_RANKS:,}")
    with checkpoint(source, root) as ckpt:
        check_rename(rename, ckpt.entries, ckpt.path)
        kept = [ckpt.entries[key] for key in rename_keys(ckpt.entries, rename, ckpt.path)]
    found = [0] * ranks
    for entry in {(entry.storage, entry.chunks or entry.key): entry for entry in kept}.values():
        rows = entry.shape[0] if entry.shape else ranks
        chunk, row = -(-rows // ranks), entry.nbytes // max(rows if entry.shape else 1, 1)
        for rank in range(min(ranks, rows)):
            found[rank] += max(0, min(chunk, rows - rank * chunk)) * row
    return tuple(found)

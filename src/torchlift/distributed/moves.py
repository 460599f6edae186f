"""Values of whole tensors put into the local tensors of each rank, from memory or from rank 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from torchlift._model.dtensor import Span, Spans, blocks, everything, held, overlaps
from torchlift.errors import PlacementError

#: Bytes in flight at once, in two buffers of half the size: one is filled while the other travels.
BUDGET = 64 * 2**20
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Sent:
    """A whole tensor that rank 0 holds: what the other ranks know of it before it arrives.

    Attributes:
        index: its place in the order in which rank 0 offers tensors.
        shape, dtype: of the whole tensor.
    """

    index: int
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Move:
    """One whole tensor on its way into one local tensor.

    Attributes:
        source: the whole tensor, or its description where rank 0 sends it.
        target: a plain tensor in this process; it keeps its dtype.
        spans: which part of the whole tensor `target` is.
    """

    source: torch.Tensor | Sent
    target: torch.Tensor
    spans: Spans


def apart(moves: Sequence[Move], others: Iterable[torch.Tensor] = ()) -> list[Move]:
    """The moves, where none reads from memory that another writes to, or that `others` are in.

    Two states may trade places: the second would otherwise read what the first has written.
    """
    written = {move.target.untyped_storage().data_ptr() for move in moves}
    written |= {held(t).untyped_storage().data_ptr() for t in others if not t.is_meta}
    found = []
    for move in moves:
        source = move.source
        if isinstance(source, torch.Tensor) and source.untyped_storage().data_ptr() in written:
            move = replace(move, source=source.clone())
        found.append(move)
    return found


def copy(moves: Sequence[Move]) -> None:
    """Fill every target from tensors in memory; each rank touches only its own slices."""
    for move in moves:
        source = move.source
        assert isinstance(source, torch.Tensor)
        _place(source, tuple((0, size) for size in source.shape), move)


def broadcast(
    moves: Sequence[Move],
    offered: Sequence[torch.Tensor | Sent],
    kind: str = "cpu",
) -> None:
    """Fill every target with what rank 0 sends; all ranks of the process group take part.

    Small tensors share a bucket and large ones are cut, so that a rank never holds more than
    `BUDGET` bytes beside its own slices, and the number of messages depends on the bytes only.
    torch sends tensors one by one and each one whole (pytorch/pytorch#149640).

    Args:
        moves: what this rank wants; other ranks may want something else.
        offered: what rank 0 offers: the tensors there, their descriptions elsewhere.
        kind: device type of the model.
    """
    device = wire(kind)
    wanted = torch.zeros(len(offered), dtype=torch.uint8, device=device)
    by_index: dict[int, list[Move]] = {}
    for move in moves:
        assert isinstance(move.source, Sent)
        by_index.setdefault(move.source.index, []).append(move)
    wanted[list(by_index)] = 1
    torch.distributed.all_reduce(wanted, torch.distributed.ReduceOp.MAX)
    chosen = [index for index, flag in enumerate(wanted.tolist()) if flag]
    _exchange(list(_buckets(chosen, offered, BUDGET // 2)), offered, by_index, device)


@dataclass(frozen=True, slots=True)
class _Piece:
    index: int
    block: tuple[Span, ...]
    start: int
    nbytes: int


def _exchange(
    buckets: list[list[_Piece]],
    offered: Sequence[torch.Tensor | Sent],
    wanted: dict[int, list[Move]],
    device: torch.device,
) -> None:
    size = max((bucket[-1].start + bucket[-1].nbytes for bucket in buckets), default=0)
    stages = [torch.empty(size, dtype=torch.uint8, device=device) for _ in buckets[:2]]
    pending: tuple[torch.distributed.Work | None, list[_Piece], torch.Tensor] | None = None
    for turn, bucket in enumerate(buckets):
        stage = stages[turn % 2]
        if torch.distributed.get_rank() == 0:
            for piece in bucket:
                source = offered[piece.index]
                assert isinstance(source, torch.Tensor)
                _view(stage, piece, source.dtype).copy_(source[_slices(piece.block)])
        used = stage[: bucket[-1].start + bucket[-1].nbytes]
        work = torch.distributed.broadcast(used, src=0, async_op=True)
        if pending:
            _receive(*pending, offered, wanted)
        pending = (work, bucket, stage)
    if pending:
        _receive(*pending, offered, wanted)


def _receive(
    work: torch.distributed.Work | None,
    bucket: list[_Piece],
    stage: torch.Tensor,
    offered: Sequence[torch.Tensor | Sent],
    wanted: dict[int, list[Move]],
) -> None:
    if work is not None:
        work.wait()
    for piece in bucket:
        for move in wanted.get(piece.index, ()):
            _place(_view(stage, piece, offered[piece.index].dtype), piece.block, move)


def _buckets(
    chosen: Sequence[int], offered: Sequence[torch.Tensor | Sent], limit: int
) -> Iterator[list[_Piece]]:
    """The same on every rank, because it follows from shapes and dtypes alone."""
    bucket: list[_Piece] = []
    used = 0
    for index in chosen:
        item = offered[index].dtype.itemsize
        for block in blocks(offered[index].shape, limit // item):
            nbytes = item
            for start, stop in block:
                nbytes *= stop - start
            used += -used % _ALIGNMENT
            if bucket and used + nbytes > limit:
                yield bucket
                bucket, used = [], 0
            bucket.append(_Piece(index, block, used, nbytes))
            used += nbytes
    if bucket:
        yield bucket


def _place(values: torch.Tensor, block: Sequence[Span], move: Move) -> None:
    """Copy what `values` (the `block` of the whole tensor) and the target have in common."""
    for into, out_of in overlaps(move.spans, block):
        move.target[into].copy_(values[out_of])


def _view(stage: torch.Tensor, piece: _Piece, dtype: torch.dtype) -> torch.Tensor:
    flat = stage[piece.start : piece.start + piece.nbytes].view(dtype)
    return flat.view([stop - start for start, stop in piece.block])


def _slices(block: Sequence[Span]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in block)


def wire(kind: str) -> torch.device:
    """The device on which the process group takes tensors of a model that lives on `kind`."""
    kinds = [part.partition(":")[0] for part in torch.distributed.get_backend_config().split(",")]
    if kind not in kinds:
        kind = kinds[0]
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, torch.accelerator.current_device_index())


def sendable(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Check that a tensor can travel as bytes.

    Raises:
        PlacementError: it is sparse, quantized or a subclass such as DTensor.

    Example:
        >>> sendable(torch.ones(2), "weight")
        tensor([1., 1.])
    """
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if not plain or tensor.layout is not torch.strided or tensor.is_quantized:
        raise PlacementError(
            "broadcast_from_rank0 sends whole plain tensors",
            entry=name,
            found=f"{type(tensor).__name__} with layout {tensor.layout}",
            hint="Load it without broadcast_from_rank0, or make it a plain tensor first.",
        )
    return tensor.detach()


def whole_move(source: torch.Tensor | Sent, target: torch.Tensor) -> Move:
    """A move into a plain tensor of the same shape."""
    return Move(source, target, everything(target.shape))

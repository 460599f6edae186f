"""`digest`: one number for weights, the same on any mesh, in any wrapper and format."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import nn

from torchlift._checkpoint.checkpoint import Checkpoint, dtype_of
from torchlift._checkpoint.kinds import readable_parts
from torchlift._model.dtensor import blocks, is_dtensor, spans_of
from torchlift._model.names import uses_fsdp1
from torchlift._model.ranks import RankGroup, StepResult, rank, tensors_of
from torchlift._model.slots import is_lazy
from torchlift._save.blocks import Workspace
from torchlift._save.pickling import is_array
from torchlift._save.values import Value, take_apart
from torchlift._sources.opening import IN_MEMORY, checkpoint, container
from torchlift._system.containers import leaves
from torchlift._system.memory import collection_paused
from torchlift.errors import FormatError, PlacementError, explain_calls
from torchlift.formats.flattening import ROOT_OBJECT
from torchlift.formats.index import Leaf
from torchlift.formats.source import errors_name

#: Words with one multiplier each: as many as stay in the cache of the processor.
_ROW = 1 << 12
#: Words that are summed at a time, as 8 bytes each. torch starts its own threads for more words: on
#: two busy cores these took 30 times as long as one thread (0.04 GB/s instead of 1.2).
_CHUNK = 7 * _ROW
#: A smaller tensor is summed by one thread.
_MOST_ALONE = 4 << 20
#: Bytes of a tensor that are in memory at a time.
_BLOCK = 16 << 20
_MASK = (1 << 64) - 1


class _Part(NamedTuple):
    """The part of a tensor on one rank.

    Attributes:
        ranks: The ranks of its mesh, in order. This rank alone for a plain tensor.
        value: The sum of a plain tensor. 0 for a DTensor, which is gathered later.
    """

    ranks: tuple[int, ...]
    value: int


@explain_calls
def digest(
    obj: nn.Module | Mapping[str, Any] | Checkpoint | str | os.PathLike[str] | BinaryIO | Any,
    *,
    root: str | None = None,
    process_group: torch.distributed.ProcessGroup | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> str:
    """Return one number for weights: equal if names, dtypes, shapes and all bits are equal.

    The number does not depend on the format of a file, the mesh, the device, the strides, or the
    order of names. Wrappers such as DDP, FSDP and ``torch.compile`` do not change it. Only tensors
    and arrays of numbers count, so step counts and hyperparameters do not. Each of two tied names
    counts.

    On a mesh, call it on every rank. DTensors are gathered one at a time.

    The digest protects from mistakes, but not from a forger. It is Carter and Wegman's multilinear
    hash. Two different sets of weights get one digest by chance once in 2^33 or less.

    Args:
        obj: A model, a state dict, a `Checkpoint`, or a path, a URL or a file object.
        root: The container to use, such as ``"model"``. See :ref:`arg-root`.
        process_group: The ranks that call this together if the state has no DTensors, such as
            pipeline stages. If several ranks have one name, the value of the first rank counts.
        storage_options: Options for the store of a URL. See :ref:`arg-storage-options`.

    Returns:
        16 hexadecimal digits. ``int(found, 16)`` is the number.

    Raises:
        PlacementError: If a tensor has no values, for example on meta, or only partial sums.
        UnsafeError: If a tensor of the file would need code from the file.
        FormatError: If there is no tensor, or the file is damaged.
        TypeError: If the tensors have no names, as in an iterator of parameters.

    Example:
        >>> import torch, torchlift, tempfile, os
        >>> model = torch.nn.Linear(2, 1)
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> report = torchlift.save(model, path)
        >>> torchlift.digest(path) == torchlift.digest(torch.nn.DataParallel(model))
        True
        >>> with torch.no_grad():
        ...     _ = model.weight.neg_()
        >>> torchlift.digest(path) == torchlift.digest(model)
        False
        >>> torchlift.digest({"step": torch.tensor(7)})
        '83eb7c73c311e647'
    """
    if isinstance(obj, (Checkpoint, str, bytes, os.PathLike)) or hasattr(obj, "read"):
        if process_group is not None:
            raise ValueError(
                "process_group= is for models and state dicts: each rank reads a file by itself"
            )
        given: Any = obj
        with checkpoint(given, root, whole=True, storage_options=storage_options) as ckpt:
            found = [*_sum_files(ckpt)]
            if not found:
                raise _no_tensors_error(ckpt.path)
            total = sum(found)
    else:
        total = _sum_memory(obj, root, process_group)
    # Without this, a change of the highest bits would change the first digits only.
    mixed = _mix(torch.tensor(_to_signed(total & _MASK), device="cpu"))
    return f"{int(mixed) & _MASK:016x}"


def _sum_files(ckpt: Checkpoint) -> Iterator[int]:
    """Yield what each tensor of a checkpoint adds to the sum.

    Raises:
        UnsafeError, FormatError: If a tensor cannot be read.
    """
    for key in ckpt.blocked_tensors:
        raise ckpt._refusal(key)
    views, work, values = ckpt._mapped(), Workspace(), list[Value]()
    dtype = partial(dtype_of, path=ckpt.path)
    for key, array in _find_arrays(ckpt.objects, ckpt.path).items():
        yield sum(_sum_tensor(key, array, ckpt.path))
    for entry in ckpt.entries.values():
        if entry.kind is None:
            values.append(Value.of_entry(entry.key, entry, views, dtype))
        else:
            yield sum(_sum_tensor(entry.key, views.view(entry), ckpt.path))
    for value in values:
        arrived = (torch.frombuffer(each, dtype=torch.uint8) for each in value.blocks(work))
        yield _weigh(_Name(value.key, value.dtype, value.shape), _sum_blocks(arrived))


def _sum_memory(obj: Any, root: str | None, process_group: Any) -> int:
    """Return the sum over the tensors of this process, or of all ranks that share them."""
    inside = [tensor for leaf in leaves(obj).values() for tensor in _list_tensors(leaf)]
    # FSDP1's state dict is a collective, in which some ranks may get nothing.
    modules = [*obj.modules()] if uses_fsdp1(obj) else []
    ranks = RankGroup.of_model(inside, modules, process_group=process_group)

    def sum_plain() -> StepResult[dict[str, torch.Tensor], dict[str, _Part]]:
        with errors_name(IN_MEMORY), collection_paused():
            taken = take_apart(container(obj, root), plain=False, lists=False)
            if root is None and isinstance(taken.template, Leaf) and ROOT_OBJECT in taken.objects:
                raise TypeError(
                    "expected a model, a state dict, a path or a Checkpoint, not "
                    f"{type(obj).__name__}. Pass tensors with names, such as "
                    "dict(model.named_parameters())"
                )
            tensors = {**taken.tensors, **_find_arrays(taken.objects, IN_MEMORY)}
            parts = {key: _sum_part(key, tensor) for key, tensor in tensors.items()}
            return StepResult(tensors, parts)

    def require_same_names(reports: Mapping[int, Mapping[str, _Part]]) -> None:
        if not any(reports.values()):
            raise _no_tensors_error(IN_MEMORY, f"a {type(obj).__name__}")
        for who, parts in reports.items():
            for key, part in parts.items():
                # Otherwise the peers would wait for a rank that does not gather it.
                for peer in reports.keys() & set(part.ranks):
                    if key not in reports[peer] or reports[peer][key].ranks != part.ranks:
                        raise PlacementError(
                            "a sharded tensor is not on all ranks of its mesh",
                            file=IN_MEMORY,
                            entry=key,
                            expected=f"a tensor on ranks {list(part.ranks)}, as rank {who} has it",
                            found=f"another one, or none, on rank {peer}",
                            hint="Pass the same state on each rank of the mesh.",
                        )

    tensors, reports = ranks.run(sum_plain, require_same_names)
    owners: dict[str, int] = {}
    for parts in reports.values():
        for key, part in parts.items():
            owners[key] = min(part.ranks[0], owners.get(key, part.ranks[0]))

    def sum_gathered() -> StepResult[None, int]:
        total = 0
        for key in sorted(tensors):  # the order of names may differ between ranks
            tensor, mesh = tensors[key], reports[rank()][key].ranks
            if is_dtensor(tensor) and rank() in mesh and owners[key] in mesh:
                whole = _gather(tensor)
                total += sum(_sum_tensor(key, whole, IN_MEMORY)) if owners[key] == rank() else 0
                del whole  # before the next one is gathered
        return StepResult(None, total & _MASK)

    total: int = sum(ranks.run(sum_gathered).by_rank.values())
    for who, parts in reports.items():
        total += sum(part.value for key, part in parts.items() if owners[key] == who)
    return total


def _sum_part(key: str, tensor: torch.Tensor) -> _Part:
    """Return the part of a tensor that this rank has before any tensor is gathered."""
    if not is_dtensor(tensor):
        return _Part((rank(),), sum(_sum_tensor(key, tensor, IN_MEMORY)) & _MASK)
    _require_values(key, tensor, IN_MEMORY)
    spans_of(tensor, key)  # raises an error for partial sums
    return _Part(tuple(sorted(tensor.device_mesh.mesh.flatten().tolist())), 0)


def _gather(tensor: Any) -> torch.Tensor:
    """Gather a DTensor. All ranks of its mesh call this."""
    with torch.no_grad():
        # FSDP2 may offload parameters to the host. The collective needs them on the mesh.
        moved = tensor.detach().to(tensor.device_mesh.device_type)
        whole: torch.Tensor = moved.full_tensor()
    return whole


def _list_tensors(leaf: object) -> Iterable[torch.Tensor]:
    """Return the tensors of a part of a state. Their meshes tell which ranks take part."""
    if isinstance(leaf, nn.Module):
        return tensors_of(leaf)
    if isinstance(leaf, torch.optim.Optimizer):
        return (parameter for group in leaf.param_groups for parameter in group["params"])
    return [leaf] if isinstance(leaf, torch.Tensor) else []


def _no_tensors_error(path: str, found: str | None = None) -> FormatError:
    return FormatError(
        "nothing to digest: it contains no tensors",
        file=path,
        found=found,
        hint="Pass a model, its state dict, or a file with weights.",
    )


def _find_arrays(objects: Mapping[str, Any], path: str) -> dict[str, torch.Tensor]:
    """Return the NumPy arrays of numbers among non-tensor values, as tensors.

    Raises:
        PlacementError: If torch does not have the dtype.
    """
    numpy, found = sys.modules.get("numpy"), dict[str, torch.Tensor]()
    for key, value in objects.items():
        if numpy is None or not is_array(value) or value.dtype.kind in "SU":
            continue
        # torch needs writable arrays in native byte order, without negative strides.
        array = numpy.require(value, value.dtype.newbyteorder("="), "CW")
        try:
            found[key] = torch.from_numpy(array)
        except TypeError as error:
            raise PlacementError(
                "torch does not have the dtype of an array",
                file=path,
                entry=key,
                found=str(value.dtype),
                hint='Convert it first: array.astype("float64").',
            ) from error
    return found


def _sum_tensor(key: str, tensor: torch.Tensor, path: str) -> Iterator[int]:
    """Yield what a tensor in memory adds to the sum, or each of the tensors it is made of."""
    _require_values(key, tensor, path)
    tensor = tensor.detach()
    dense = readable_parts(tensor, path, key)
    alone = len(dense) == 1 and dense[0] is tensor
    if not alone:
        # Its parts alone do not tell its layout and shape, and there may be no part.
        shape = () if tensor.is_nested else tuple(tensor.shape)
        yield _Name(key, f"{tensor.dtype} {tensor.layout}", shape).term
    for number, each in enumerate(dense):
        name = _Name(key if alone else f"{key}\0{number}", each.dtype, tuple(each.shape))
        yield _weigh(name, _sum_blocks(_split_blocks(each)))


def _require_values(key: str, tensor: torch.Tensor, path: str) -> None:
    """Refuse a tensor on meta and a lazy tensor."""
    odd = "a lazy tensor, which has no shape yet" if is_lazy(tensor) else ""
    if odd or tensor.is_meta:
        raise PlacementError(
            "a tensor without values cannot be digested",
            file=path,
            entry=key,
            found=odd or "a tensor on meta",
            hint="Load the model first. Run it once if a module is lazy.",
        )


class _Name:
    """A factor and a term for the sum over bytes, from a name, a dtype and a shape.

    Without the term, a tensor of zeros and an empty tensor would add nothing.
    """

    def __init__(self, key: str, dtype: torch.dtype | str, shape: tuple[int, ...]) -> None:
        text = repr((key, str(dtype), shape)).encode()
        two = hashlib.blake2b(text, digest_size=16).digest()
        self.factor = int.from_bytes(two[:8], "little") | 1
        self.term = int.from_bytes(two[8:], "little")


def _weigh(name: _Name, total: int) -> int:
    return (name.factor * total + name.term) & _MASK


def _split_blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bytes of a tensor in row-major order. At most one block is copied at a time."""
    for block in blocks(tensor.shape, _BLOCK // tensor.itemsize):
        yield _bytes_of(tensor[tuple(slice(*span) for span in block)])


def _bytes_of(block: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a block, flat."""
    flat = block.resolve_conj().resolve_neg().contiguous().view(-1)
    # A single element may have any stride, and torch then refuses the view as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def _sum_blocks(arrived: Iterator[torch.Tensor]) -> int:
    """Return the sum over all bytes of a tensor, from blocks in order."""
    total, at = 0, 0
    for data in arrived:
        total += _sum_block(data, at)
        at += data.numel()
    return total


def _sum_block(data: torch.Tensor, at: int) -> int:
    """Return the sum over a block of bytes that starts at a place of the tensor.

    A word is four bytes of the tensor. If a word continues in another block, its missing bytes are
    zeros here. They add nothing, so each block can be summed alone.

    Two threads on two busy cores sum 64 MiB in memory at 2.1 GB/s a core. zlib.crc32 does 2.6.
    """
    before, after = at % 4, -(at + data.numel()) % 4
    if before or after or (data.data_ptr() | int(data.storage_offset())) % 4:
        data = nn.functional.pad(data, (before, after))
    words, number = data.view(torch.int32), at // 4
    count = torch.get_num_threads() if data.is_cpu else 1
    if count == 1 or data.nbytes < _MOST_ALONE:
        return _sum_words(words, number)
    step = -(-len(words) // (count * _ROW)) * _ROW
    with ThreadPoolExecutor(count) as pool:
        starts = range(0, len(words), step)
        return sum(
            pool.map(lambda start: _sum_words(words[start : start + step], number + start), starts)
        )


def _sum_words(words: torch.Tensor, number: int) -> int:
    """Return the sum over words, from the place of the first word in the tensor."""
    found, first = list[torch.Tensor](), number // _ROW
    keys, most = _make_keys(words.device), _CHUNK if words.is_cpu else len(words)
    # One buffer for all: with new memory for each, page faults took twice the time of the sum.
    room = torch.empty(min(most, len(words)), dtype=torch.int64, device=words.device)
    while len(words):
        inside = number % _ROW
        if inside or len(words) < _ROW:
            count = min(_ROW - inside, len(words))
        else:
            count = min(most, len(words)) // _ROW * _ROW
        rows = room[:count].copy_(words[:count]).view(max(1, count // _ROW), -1)
        some = keys[inside : inside + rows.shape[1]]
        # CUDA does not support a matrix-vector product of integers.
        found.append(rows.mv(some) if words.is_cpu else rows.mul_(some).sum(1))
        words, number = words[count:], number + count
    if not found:
        return 0
    sums = torch.cat(found)
    return int((sums * _make_factors(first, len(sums), sums.device)).sum())


def _mix(numbers: torch.Tensor) -> torch.Tensor:
    """Return 64 pseudo-random bits for each number: splitmix64 (Steele, Lea, Flood, 2014)."""
    numbers = (numbers + 1) * _to_signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        # `>>` repeats the sign bit, so the bits above are set to zero.
        numbers = (numbers ^ ((numbers >> shift) & ((1 << 64 - shift) - 1))) * _to_signed(factor)
    return numbers


def _to_signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


@lru_cache(8)
def _make_keys(device: torch.device) -> torch.Tensor:
    """Return the multiplier of each place in a row."""
    return _mix(torch.arange(_ROW, device=device))


@lru_cache(64)
def _make_factors(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the multiplier of each row: odd, so that no bit of a sum is lost."""
    # These numbers come from another part of the sequence than the keys.
    return _mix(torch.arange(first, first + count, device=device) - (1 << 62)) | 1

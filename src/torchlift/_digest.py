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
from torchlift._model.ranks import RankGroup, rank, tensors_of
from torchlift._model.slots import is_lazy
from torchlift._save.blocks import Workspace
from torchlift._save.files import few_of
from torchlift._save.pickling import is_array
from torchlift._save.values import Value, take_apart
from torchlift._sources.opening import IN_MEMORY, checkpoint, container
from torchlift._system.containers import leaves
from torchlift._system.memory import collection_paused
from torchlift.errors import FormatError, PlacementError, explain_calls
from torchlift.formats.flattening import ROOT_OBJECT
from torchlift.formats.index import Leaf
from torchlift.formats.source import errors_name

#: Words that share a multiplier: as many keys as stay in the processor's cache.
_ROW = 1 << 12
#: Words that are summed up at a time, as 8 bytes each: more are torch's own threads' to do, which
#: on two cores that others use, too, took 30 times as long as one (0.04 GB/s for 1.2).
_CHUNK = 7 * _ROW
#: Bytes for which it is not worth to start threads.
_MOST_ALONE = 4 << 20
#: Bytes of a tensor that are looked at at a time.
_BLOCK = 16 << 20
_MASK = (1 << 64) - 1


class _Part(NamedTuple):
    """What one rank holds of a tensor.

    Attributes:
        ranks: those of its mesh, in order; of a plain tensor, this rank alone.
        value: what a plain tensor adds to the sum; of a DTensor, which is gathered later, 0.
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
            found = [*_of_files(ckpt)]
            if not found:
                raise _empty(ckpt.path)
            total = sum(found)
    else:
        total = _of_memory(obj, root, process_group)
    # One to one: a change of the highest bits alone would show in the first digits only.
    mixed = _mixed(torch.tensor(_signed(total & _MASK), device="cpu"))
    return f"{int(mixed) & _MASK:016x}"


def _of_files(ckpt: Checkpoint) -> Iterator[int]:
    """Yield what each tensor of a checkpoint adds.

    Raises:
        UnsafeError, FormatError: one cannot be had.
    """
    for key in ckpt.blocked_tensors:
        raise ckpt._refusal(key)
    views, work, values = ckpt._mapped(), Workspace(), list[Value]()
    dtype = partial(dtype_of, path=ckpt.path)
    for key, array in _arrays(ckpt.objects, ckpt.path).items():
        yield sum(_of_tensor(key, array, ckpt.path))
    for entry in ckpt.entries.values():
        if entry.kind is None:
            values.append(Value.of_entry(entry.key, entry, views, dtype))
        else:
            yield sum(_of_tensor(entry.key, views.view(entry), ckpt.path))
    for value, few in zip(values, few_of(values), strict=True):
        # A copy: torch warns of memory that it could not write to.
        read = [memoryview(bytearray(few))] if few else []
        found = value.blocks(work) if few is None else read
        arrived = (torch.frombuffer(each, dtype=torch.uint8) for each in found)
        yield _weighted(_Name(value.key, value.dtype, value.shape), _in_order(arrived))


def _of_memory(obj: Any, root: str | None, process_group: Any) -> int:
    """Return the sum over what this process holds, or all ranks that share its tensors."""
    inside = [tensor for leaf in leaves(obj).values() for tensor in _inside(leaf)]
    # FSDP1's state dict is a collective, in which some ranks may get nothing.
    modules = [*obj.modules()] if uses_fsdp1(obj) else []
    ranks = RankGroup.of_model(inside, modules, process_group=process_group)

    def sum_plain() -> tuple[dict[str, torch.Tensor], dict[str, _Part]]:
        with errors_name(IN_MEMORY), collection_paused():
            taken = take_apart(container(obj, root), plain=False, lists=False)
            if root is None and isinstance(taken.template, Leaf) and ROOT_OBJECT in taken.objects:
                raise TypeError(
                    "expected a model, a state dict, a path or a Checkpoint, not "
                    f"{type(obj).__name__}. Pass tensors with names, such as "
                    "dict(model.named_parameters())"
                )
            tensors = {**taken.tensors, **_arrays(taken.objects, IN_MEMORY)}
            return tensors, {key: _part_of(key, tensor) for key, tensor in tensors.items()}

    def require_same_names(reports: Mapping[int, Mapping[str, _Part]]) -> None:
        if not any(reports.values()):
            raise _empty(IN_MEMORY, f"a {type(obj).__name__}")
        for who, parts in reports.items():
            for key, part in parts.items():
                # Its peers would wait for a rank that does not take part in gathering it.
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

    def sum_gathered() -> tuple[None, int]:
        total = 0
        for key in sorted(tensors):  # the order of names may differ between ranks
            tensor, mesh = tensors[key], reports[rank()][key].ranks
            if is_dtensor(tensor) and rank() in mesh and owners[key] in mesh:
                whole = _gathered(tensor)
                total += sum(_of_tensor(key, whole, IN_MEMORY)) if owners[key] == rank() else 0
                del whole  # before the next one is gathered
        return None, total & _MASK

    _, sums = ranks.run(sum_gathered)
    total: int = sum(sums.values())
    for who, parts in reports.items():
        total += sum(part.value for key, part in parts.items() if owners[key] == who)
    return total


def _part_of(key: str, tensor: torch.Tensor) -> _Part:
    """Return what this process knows of a tensor before any is gathered."""
    if not is_dtensor(tensor):
        return _Part((rank(),), sum(_of_tensor(key, tensor, IN_MEMORY)) & _MASK)
    _require_values(key, tensor, IN_MEMORY)
    spans_of(tensor, key)  # which refuses partial sums
    return _Part(tuple(sorted(tensor.device_mesh.mesh.flatten().tolist())), 0)


def _gathered(tensor: Any) -> torch.Tensor:
    """Return the whole of a DTensor; all ranks of its mesh call this."""
    with torch.no_grad():
        # Parameters that FSDP2 has offloaded are on the host, and its mesh is not.
        moved = tensor.detach().to(tensor.device_mesh.device_type)
        whole: torch.Tensor = moved.full_tensor()
    return whole


def _inside(leaf: object) -> Iterable[torch.Tensor]:
    """Return the tensors by whose meshes the ranks of a part of a state are known."""
    if isinstance(leaf, nn.Module):
        return tensors_of(leaf)
    if isinstance(leaf, torch.optim.Optimizer):
        return (parameter for group in leaf.param_groups for parameter in group["params"])
    return [leaf] if isinstance(leaf, torch.Tensor) else []


def _empty(path: str, found: str | None = None) -> FormatError:
    return FormatError(
        "nothing to digest: it contains no tensors",
        file=path,
        found=found,
        hint="Pass a model, its state dict, or a file with weights.",
    )


def _arrays(objects: Mapping[str, Any], path: str) -> dict[str, torch.Tensor]:
    """Return the arrays of numpy among objects, those of texts left out, as tensors.

    Raises:
        PlacementError: torch has no such dtype.
    """
    numpy, found = sys.modules.get("numpy"), dict[str, torch.Tensor]()
    for key, value in objects.items():
        if numpy is None or not is_array(value) or value.dtype.kind in "SU":
            continue
        # As torch takes them: not read-only, of another byte order, or with negative strides.
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


def _of_tensor(key: str, tensor: torch.Tensor, path: str) -> Iterator[int]:
    """Yield what this process adds for a tensor in memory, or for each of those it is made of."""
    _require_values(key, tensor, path)
    tensor = tensor.detach()
    dense = readable_parts(tensor, path, key)
    alone = len(dense) == 1 and dense[0] is tensor
    if not alone:
        # There may be none, and they are those of another layout or shape, too.
        shape = () if tensor.is_nested else tuple(tensor.shape)
        yield _Name(key, f"{tensor.dtype} {tensor.layout}", shape).term
    for number, each in enumerate(dense):
        name = _Name(key if alone else f"{key}\0{number}", each.dtype, tuple(each.shape))
        yield _weighted(name, _in_order(_blocks(each)))


def _require_values(key: str, tensor: torch.Tensor, path: str) -> None:
    """Refuse a tensor on meta, and a lazy one."""
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
    """What a name, a dtype and a shape make of the sum over bytes: a factor, and a term.

    The term tells a tensor of zeros, or of nothing, from none.
    """

    def __init__(self, key: str, dtype: torch.dtype | str, shape: tuple[int, ...]) -> None:
        text = repr((key, str(dtype), shape)).encode()
        two = hashlib.blake2b(text, digest_size=16).digest()
        self.factor = int.from_bytes(two[:8], "little") | 1
        self.term = int.from_bytes(two[8:], "little")


def _weighted(name: _Name, total: int) -> int:
    return (name.factor * total + name.term) & _MASK


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bytes of a tensor in row-major order; no more than a block is ever copied."""
    for block in blocks(tensor.shape, _BLOCK // tensor.itemsize):
        yield _bytes_of(tensor[tuple(slice(*span) for span in block)])


def _bytes_of(block: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a block, flat."""
    flat = block.resolve_conj().resolve_neg().contiguous().view(-1)
    # The stride of a single element may be any number, which torch does not view as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def _in_order(arrived: Iterator[torch.Tensor]) -> int:
    """Return the sum over bytes that follow each other from the start of a tensor."""
    total, at = 0, 0
    for data in arrived:
        total += _summed(data, at)
        at += data.numel()
    return total


def _summed(data: torch.Tensor, at: int) -> int:
    """Return the sum over bytes from a place of the tensor on.

    A word is four bytes of the tensor. Its bytes in another block are zeros here, which add
    nothing, so that each block is summed up by itself.

    64 MiB in memory, by the processor's time that two threads took on two cores that others used:
    2.1 GB/s and core of float32 and of bfloat16; zlib.crc32 2.6.
    """
    before, after = at % 4, -(at + data.numel()) % 4
    if before or after or (data.data_ptr() | int(data.storage_offset())) % 4:
        data = nn.functional.pad(data, (before, after))
    words, number = data.view(torch.int32), at // 4
    count = torch.get_num_threads() if data.is_cpu else 1
    if count == 1 or data.nbytes < _MOST_ALONE:
        return _run(words, number)
    step = -(-len(words) // (count * _ROW)) * _ROW
    with ThreadPoolExecutor(count) as pool:
        starts = range(0, len(words), step)
        return sum(
            pool.map(lambda start: _run(words[start : start + step], number + start), starts)
        )


def _run(words: torch.Tensor, number: int) -> int:
    """Return the sum over words, of which the first has this number in the tensor."""
    found, first = list[torch.Tensor](), number // _ROW
    keys, most = _keys(words.device), _CHUNK if words.is_cpu else len(words)
    # Not new memory for each: in a thread of its own, page faults took twice the time of the sum.
    room = torch.empty(min(most, len(words)), dtype=torch.int64, device=words.device)
    while len(words):
        inside = number % _ROW
        if inside or len(words) < _ROW:
            count = min(_ROW - inside, len(words))
        else:
            count = min(most, len(words)) // _ROW * _ROW
        rows = room[:count].copy_(words[:count]).view(max(1, count // _ROW), -1)
        some = keys[inside : inside + rows.shape[1]]
        # CUDA has no product with a vector of integers.
        found.append(rows.mv(some) if words.is_cpu else rows.mul_(some).sum(1))
        words, number = words[count:], number + count
    if not found:
        return 0
    sums = torch.cat(found)
    return int((sums * _factors(first, len(sums), sums.device)).sum())


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Return 64 bits for each number that look random: splitmix64 (Steele, Lea, Flood, 2014)."""
    numbers = (numbers + 1) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        # Bits come in from above as zeros, where `>>` repeats the sign.
        numbers = (numbers ^ ((numbers >> shift) & ((1 << 64 - shift) - 1))) * _signed(factor)
    return numbers


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


@lru_cache(8)
def _keys(device: torch.device) -> torch.Tensor:
    """Return what words are multiplied with, by their place in a row."""
    return _mixed(torch.arange(_ROW, device=device))


@lru_cache(64)
def _factors(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return what the sums of rows are multiplied with: odd, so that no bit of them is lost."""
    # From another end of the sequence than the keys.
    return _mixed(torch.arange(first, first + count, device=device) - (1 << 62)) | 1

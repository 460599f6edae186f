"""`digest`: one number for weights, the same on any mesh, in any wrapper and format."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import nn

from torchlift._checkpoint.checkpoint import Checkpoint
from torchlift._checkpoint.comparison import hash_content, in_transfers
from torchlift._checkpoint.kinds import meta_error, readable_parts
from torchlift._model.dtensor import is_dtensor, spans_of
from torchlift._model.gathering import Gatherer
from torchlift._model.names import uses_fsdp1
from torchlift._model.ranks import RankGroup, StepResult
from torchlift._model.slots import read_tree
from torchlift._save.pickling import is_array
from torchlift._save.values import take_apart
from torchlift._sources.opening import IN_MEMORY, checkpoint, container
from torchlift._system.containers import leaves
from torchlift._system.memory import collection_paused
from torchlift.errors import FormatError, PlacementError, explain_calls
from torchlift.formats.flattening import ROOT_OBJECT
from torchlift.formats.index import Leaf
from torchlift.formats.source import errors_name

#: Key -> hash of a tensor: of its name, dtype, shape and bytes.
_Hashes = dict[str, bytes]


class _PlainMessage(NamedTuple):
    """The message of a rank before it gathers tensors.

    Attributes:
        hashes: Key of a plain tensor -> its hash.
        meshes: Key of a DTensor -> the ranks of its mesh, in order.
    """

    hashes: _Hashes
    meshes: dict[str, tuple[int, ...]]


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

    The digest protects from mistakes, but not from a forger: it is a BLAKE2b hash of 64 bits.

    Args:
        obj: A model, a state dict, a `Checkpoint`, or a path, a URL or a file object.
        root: The container to use, such as ``"model"``. See :ref:`arg-root`.
        process_group: The ranks that call this together if the state does not have DTensors, such
            as pipeline stages. If several ranks have one name, the value of the first rank counts.
        storage_options: Options for the store of a URL. See :ref:`arg-storage-options`.

    Returns:
        16 hexadecimal digits. ``int(found, 16)`` is the number.

    Raises:
        PlacementError: If a tensor does not have values, such as on meta, or has partial sums only.
        UnsafeError: If a tensor of the file would need code from the file.
        FormatError: If it does not contain a tensor, or the file is damaged.
        TypeError: If the tensors do not have names, as in an iterator of parameters.

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
        '2b42e57d4bc8a23d'
    """
    if isinstance(obj, (Checkpoint, str, bytes, os.PathLike)) or hasattr(obj, "read"):
        if process_group is not None:
            raise ValueError(
                "process_group= is for models and state dicts: each rank reads a file by itself"
            )
        given: Any = obj
        with checkpoint(given, root, whole=True, storage_options=storage_options) as ckpt:
            found, path = _hash_file(ckpt), ckpt.path
    else:
        found, path = _hash_memory(obj, root, process_group), IN_MEMORY
    if not found:
        raise FormatError(
            "nothing to digest: it contains no tensors",
            file=path,
            found=f"a {type(obj).__name__}" if path == IN_MEMORY else None,
            hint="Pass a model, its state dict, or a file with weights.",
        )
    # Each hash covers its key, so this does not depend on the order of keys.
    return blake2b(b"".join(sorted(found.values())), digest_size=8).hexdigest()


def _hash_file(ckpt: Checkpoint) -> _Hashes:
    for key in ckpt.blocked_tensors:
        raise ckpt._refusal(key)
    arrays = _find_arrays(ckpt.objects, ckpt.path)
    found = {key: _hash_tensor(key, array, ckpt.path) for key, array in arrays.items()}
    for key in in_transfers(ckpt, [ckpt]):
        found[key] = _hash_tensor(key, ckpt[key], ckpt.path)
    ckpt._mapped().files.check()
    return found


def _hash_memory(obj: Any, root: str | None, process_group: Any) -> _Hashes:
    """Return the hashes of the tensors of this process, or of all ranks that share them."""
    inside = [tensor for leaf in leaves(obj).values() for tensor in _list_tensors(leaf)]
    # FSDP1's state dict is a collective, in which some ranks may get nothing.
    modules = [*obj.modules()] if uses_fsdp1(obj) else []
    ranks = RankGroup.of_model(inside, modules, process_group=process_group)

    def hash_plain() -> StepResult[Gatherer, _PlainMessage]:
        with errors_name(IN_MEMORY), collection_paused():
            taken = take_apart(container(obj, root), plain=False)
            if root is None and isinstance(taken.template, Leaf) and ROOT_OBJECT in taken.objects:
                raise TypeError(
                    "expected a model, a state dict, a path or a Checkpoint, not "
                    f"{type(obj).__name__}. Pass tensors with names, such as "
                    "dict(model.named_parameters())"
                )
            sharded = {key: each for key, each in taken.tensors.items() if is_dtensor(each)}
            meshes = {}
            for key, tensor in sharded.items():
                if tensor.is_meta:
                    raise meta_error(key, IN_MEMORY)
                spans_of(tensor, key)  # raises an error for partial sums
                meshes[key] = tuple(sorted(tensor.device_mesh.mesh.flatten().tolist()))
            plain = {**taken.tensors, **_find_arrays(taken.objects, IN_MEMORY)}
            hashes = {
                key: _hash_tensor(key, tensor, IN_MEMORY)
                for key, tensor in plain.items()
                if key not in sharded
            }
            # The order of names may differ between ranks.
            here = [
                (key, sharded[key])
                for key in sorted(sharded)
                if sharded[key].device_mesh.get_coordinate() is not None
            ]
            return StepResult(Gatherer(here, keeps="one"), _PlainMessage(hashes, meshes))

    gatherer, messages = ranks.run(hash_plain, _require_same_names)

    def hash_gathered() -> StepResult[None, _Hashes]:
        found, failed = _Hashes(), list[Exception]()
        for key, whole in zip(gatherer.keys, gatherer, strict=True):
            assert whole is not None
            try:
                found[key] = _hash_tensor(key, whole, IN_MEMORY)
            except Exception as error:  # the other ranks still gather with this one
                failed.append(error)
        if failed:
            raise failed[0]
        return StepResult(None, found)

    gathered, found = ranks.run(hash_gathered).by_rank, _Hashes()
    for who in sorted(messages, reverse=True):  # under one name, the first rank's value counts
        found |= messages[who].hashes | gathered[who]
    return found


def _require_same_names(messages: Mapping[int, _PlainMessage]) -> None:
    """Refuse a DTensor that one rank of its mesh lacks: the others would wait to gather it."""
    for who, message in messages.items():
        for key, mesh in message.meshes.items():
            for peer in messages.keys() & set(mesh):
                if messages[peer].meshes.get(key) != mesh:
                    raise PlacementError(
                        "a sharded tensor is not on all ranks of its mesh",
                        file=IN_MEMORY,
                        entry=key,
                        expected=f"a tensor on ranks {list(mesh)}, as rank {who} has it",
                        found=f"another one, or none, on rank {peer}",
                        hint="Pass the same state on each rank of the mesh.",
                    )


def _list_tensors(leaf: object) -> Iterable[torch.Tensor]:
    """Return the tensors of a part of a state. Their meshes tell which ranks take part."""
    if isinstance(leaf, nn.Module):
        return [group.tensor for group in read_tree(leaf).groups]
    if isinstance(leaf, torch.optim.Optimizer):
        return (parameter for group in leaf.param_groups for parameter in group["params"])
    return [leaf] if isinstance(leaf, torch.Tensor) else []


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


def _hash_tensor(key: str, tensor: torch.Tensor, path: str) -> bytes:
    """Return the hash of a tensor that is not a DTensor."""
    parts = readable_parts(tensor, path, key)
    # The parts of a sparse tensor do not tell its layout and shape, and there may be no part.
    shape = () if tensor.is_nested else tuple(tensor.shape)
    parts_of = [(str(part.dtype), tuple(part.shape)) for part in parts]
    text = repr((key, str(tensor.dtype), str(tensor.layout), shape, parts_of))
    return blake2b(text.encode() + hash_content(parts), digest_size=16).digest()

"""The tensors that the ranks of a mesh are to share out: of a model, of a file, or of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from torchlift._checkpoint import Checkpoint, dtype_of
from torchlift._model.slots import Group, collect, is_lazy
from torchlift._plan import (
    DtypeRule,
    LoadPlan,
    Rename,
    check_rule,
    entry_like,
    renamed,
    target_dtype,
)
from torchlift.distributed.shares import Want
from torchlift.formats import Chunk, TensorEntry
from torchlift.formats.boxes import row_major


def of_plan(model: nn.Module, made: LoadPlan) -> Iterator[Want]:
    """The tensors of a model, with the bytes that a plan loads."""
    steps = {id(step.group.tensor): step for step in made.work.steps}
    becomes = {id(making.group.tensor): making.dtype for making in made.work.makings}
    for group in collect(model):
        step = steps.get(id(group.tensor))
        if step is not None:
            shape = step.candidate.shape if is_lazy(group.tensor) else tuple(group.tensor.shape)
            yield _want(group, shape, step.dtype, step.entry, step.span)
        elif not is_lazy(group.tensor):
            dtype = becomes.get(id(group.tensor), group.tensor.dtype)
            yield _want(group, tuple(group.tensor.shape), dtype, None, 0)


def of_module(model: nn.Module, dtype: DtypeRule) -> Iterator[Want]:
    """The tensors of a module, as if one file held them all."""
    at = 0
    groups = [group for group in collect(model) if not is_lazy(group.tensor)]
    check_rule(dtype, [name for group in groups for name in group.names], present=False)
    for group in groups:
        tensor, shape = group.tensor, tuple(group.tensor.shape)
        if not group.persistent:
            yield _want(group, shape, tensor.dtype, None, 0)
            continue
        seen = entry_like(group.fqn, group)
        chunk = Chunk("model", at, seen.nbytes, (0,) * len(shape), shape)
        chunks = (chunk,) if seen.nbytes else ()
        entry = replace(seen, stride=row_major(shape), storage=group.fqn, chunks=chunks)
        becomes = target_dtype(dtype, seen, tensor, tensor.dtype)
        yield _want(group, shape, becomes, entry, seen.nbytes)
        at += seen.nbytes


def _want(
    group: Group, shape: tuple[int, ...], dtype: torch.dtype, entry: TensorEntry | None, span: int
) -> Want:
    embedding = isinstance(group.slots[0].module, nn.Embedding | nn.EmbeddingBag)
    others = tuple(name for name in group.names if name != group.fqn)
    return Want(
        group.fqn, shape, dtype.itemsize, entry, span, group.is_parameter, embedding, others
    )


def of_checkpoint(ckpt: Checkpoint, rename: Rename | None, dtype: DtypeRule) -> list[Want]:
    """The tensors of a checkpoint, two keys of one tensor once."""
    found: dict[object, Want] = {}
    for key, name in renamed(ckpt.entries, rename, ckpt.path).items():
        entry = ckpt.entries[key]
        spot: object = (entry.storage, entry.chunks[:1], entry.shape, entry.stride, entry.dtype)
        spot = spot if entry.chunks else key
        if spot in found:
            found[spot] = replace(found[spot], others=(*found[spot].others, name))
            continue
        stored = dtype_of(entry, ckpt.path)
        blank = torch.empty(0, dtype=stored, device="meta")
        becomes = target_dtype(dtype, replace(entry, key=name), blank, stored)
        span = sum(chunk.nbytes for chunk in entry.chunks)
        found[spot] = Want(name, entry.shape, becomes.itemsize, entry, span)
    return list(found.values())

"""torchtitan's checkpoint manager with torchlift's writer and reader: `CheckpointManager`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    async_save,
    save,
)
from torchtitan.components import checkpoint as titan
from torchtitan.tools.utils import GarbageCollection

from torchlift.distributed import CheckpointReader, CheckpointWriter, Generators


class CheckpointManager(titan.CheckpointManager):
    """torchtitan's ``CheckpointManager`` with atomic, verified checkpoints.

    Pass ``CheckpointManager.Config(...)`` in place of torchtitan's. Fields, folders, modes and
    retention are the same. Checkpoints are saved atomically, with checksums that
    `torchlift.verify` compares. No code in a checkpoint runs. Each rank's random number generators
    are saved, too. A rank that has none in the checkpoint keeps its own. torchtitan itself writes
    the last model in Hugging Face's format.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(titan.CheckpointManager.Config):
        """The fields of torchtitan's own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.enable:
            # The rank is in the name, because DCP stores one object for each name.
            self._generators = f"generators_{dist.get_rank()}"
            self.states[self._generators] = Generators()

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: titan.AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save with `torchlift.distributed.CheckpointWriter`."""
        if to_hf:
            return super().dcp_save(
                state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf
            )
        writer, saved = CheckpointWriter(checkpoint_id), None
        if async_mode is titan.AsyncMode.DISABLED:
            save(state_dict, storage_writer=writer)
        elif async_mode is titan.AsyncMode.ASYNC:
            saved = async_save(state_dict, storage_writer=writer, process_group=self.pg)
        else:
            saved = async_save(
                state_dict,
                storage_writer=writer,
                process_group=self.pg,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=self.stager,
            )
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return saved

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load with `torchlift.distributed.CheckpointReader`."""
        if from_hf or "://" in checkpoint_id:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        reader = CheckpointReader(os.fspath(checkpoint_id))
        saved = reader.read_metadata().state_dict_metadata
        if not any(name.startswith(f"{self._generators}.") for name in saved):
            state_dict = {k: v for k, v in state_dict.items() if k != self._generators}
        load(state_dict, storage_reader=reader)
        if titan.MODEL in self.states:
            self.states[titan.MODEL].load_state_dict(state_dict)

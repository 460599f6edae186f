"""ZeRO checkpoints as DeepSpeed 0.19 lays them out; what they are is in `Zero`, made without it."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_CLASSES = {
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler",
    "deepspeed.utils.tensor_fragment": "fragment_address",
}


@dataclass
class Zero:
    """What a training has, and how it is saved.

    Attributes:
        groups: of the optimizer, or in stage 3 the parts of them that are stored in one piece:
            name -> value.
        frozen: parameters that are not trained.
        buffers: of the model.
        tied: name -> name of the parameter that it is.
        prefix: of the files of ranks.
        alignment: elements that parameters start at multiples of (``parameter_alignment``).
    """

    stage: int
    world: int
    groups: Sequence[dict[str, torch.Tensor]]
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    prefix: str = ""
    alignment: int = 1

    def weights(self) -> dict[str, torch.Tensor]:
        """Return what a model loads."""
        found = {**self.frozen, **self.buffers}
        for group in self.groups:
            found.update(group)
        return {**found, **{name: found[first] for name, first in self.tied.items()}}

    def write(self, path: Path, edit: Callable[[str, Any], None] | None = None) -> Path:
        """Write the folder of a step into a directory, and return its path.

        Args:
            path: the directory.
            edit: called with the name of each file and what goes into it.
        """
        folder = path / "global_step3"
        folder.mkdir(parents=True)
        (path / "latest").write_text("global_step3")
        with _foreign_classes() as made:
            for name, content in self._files(made):
                if edit is not None:
                    edit(name, content)
                torch.save(content, folder / name)
        return folder

    def _files(self, made: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        for rank in range(self.world if self.stage == 3 else 1):
            start = f"zero_pp_rank_{rank}_" if self.stage == 3 else ""
            yield f"{start}mp_rank_00_model_states.pt", self._model(rank)
        for rank in range(self.world):
            name = f"{self.prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            yield (
                name,
                {
                    "optimizer_state_dict": self._optimizer(rank, made),
                    "ds_config": {"train_batch_size": 4},
                    "ds_version": "0.19.8",
                },
            )

    def _model(self, rank: int) -> dict[str, Any]:
        module = OrderedDict()
        for name, value in self.weights().items():
            is_empty = self.stage == 3 and name not in self.buffers
            module[name] = torch.empty(0) if is_empty else value.clone()
            if not is_empty and value.is_floating_point():
                module[name] = value.bfloat16() if name not in self.frozen else value.clone()
        frozen = dict(self.frozen)
        if self.stage == 3:
            frozen = {name: share(value, rank, self.world) for name, value in frozen.items()}
        saved = self.stage > 1
        return {
            "module": module,
            "buffer_names": list(self.buffers),
            "optimizer": None,
            "param_shapes": [
                OrderedDict((name, value.shape) for name, value in group.items())
                for group in self.groups
            ],
            "frozen_param_shapes": {k: v.shape for k, v in self.frozen.items()} if saved else None,
            "frozen_param_fragments": frozen if saved else None,
            "shared_params": dict(self.tied) if rank == 0 else {},
            "lr_scheduler": {"last_epoch": 3},
            "global_steps": 3,
            "dp_world_size": self.world,
            "ds_version": "0.19.8",
            "epoch": 7,
        }

    def _optimizer(self, rank: int, made: dict[str, Any]) -> dict[str, Any]:
        vectors = [self._vectors(group, rank) for group in self.groups]
        state = {
            at: {"step": torch.tensor(3.0), "exp_avg": -0.5 * vector, "exp_avg_sq": 3 * vector}
            for at, vector in enumerate(padded for _, padded in vectors)
        }
        hyper = [{"lr": 0.1 + at, "betas": (0.9, 0.99), "params": [at]} for at in state]
        base = {"state": state, "param_groups": hyper}
        weights = [vector for vector, _ in vectors]
        common = {
            "loss_scaler": made["LossScaler"](),
            "zero_stage": made["ZeroStageEnum"](),
            "overflow": False,
        }
        if self.stage == 3:
            return {**common, "partition_count": self.world, "optimizer_state_dict": base,
                    "fp32_flat_groups": weights}  # fmt: skip
        return {
            **common,
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": weights,
            "group_paddings": [0] * len(weights),
            "param_alignment_paddings": [self._paddings(group) for group in self.groups],
            "partition_count": [self.world] * len(weights),
            "param_slice_mappings": [OrderedDict(w=made["fragment_address"]())],
        }

    def _paddings(self, group: dict[str, torch.Tensor]) -> list[int]:
        gaps = [-value.numel() % self.alignment for value in group.values()]
        return [*gaps[:-1], 0]

    def _vectors(
        self, group: dict[str, torch.Tensor], rank: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a rank's flat tensor of a group, without the padding at its end and with it."""
        if self.stage == 3:
            flat = torch.cat([share(value, rank, self.world) for value in group.values()])
            return flat, flat
        pairs = zip(group.values(), self._paddings(group), strict=True)
        joined = torch.cat([padded_by(value, padding) for value, padding in pairs])
        size = 2 * math.ceil(joined.numel() / (2 * self.world))
        padded = padded_by(joined, size * self.world - joined.numel())
        mine = padded[rank * size : (rank + 1) * size]
        left = max(0, min(size, joined.numel() - rank * size))
        return mine[:left], mine


def padded_by(value: torch.Tensor, count: int) -> torch.Tensor:
    """Return a flat tensor with values behind it that nobody may read."""
    return torch.nn.functional.pad(value.reshape(-1), (0, count), value=9e9)


def share(value: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Return a rank's part of a parameter, as stage 3 cuts it."""
    size = math.ceil(value.numel() / world)
    return padded_by(value, size * world - value.numel())[rank * size : (rank + 1) * size].clone()


@contextmanager
def _foreign_classes() -> Iterator[dict[str, Any]]:
    """Let classes be pickled under deepspeed's names, and be gone again afterwards."""
    made, before = {}, set(sys.modules)
    try:
        for module, name in _CLASSES.items():
            parts = module.split(".")
            for at in range(1, len(parts) + 1):
                sys.modules.setdefault(".".join(parts[:at]), ModuleType(".".join(parts[:at])))
            made[name] = type(name, (), {"__module__": module})
            setattr(sys.modules[module], name, made[name])
        yield made
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "deepspeed":
                del sys.modules[name]

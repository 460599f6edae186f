"""Low-bit moments of sharded parameters; started by ``torch.distributed.run``."""

from __future__ import annotations

import torch
from ranks import cpu_mesh, main
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchao.optim.subclass_8bit import OptimState8bit

import torchlift.distributed as ours


class Moments(torch.optim.Optimizer):
    """Keeps 8-bit moments laid out as the parameters, as torchao's optimizers do."""

    def __init__(self, params, value: int) -> None:
        super().__init__(params, {"lr": 0.1})
        for param in self.param_groups[0]["params"]:
            local = OptimState8bit.zeros(param.to_local().shape, True, 256, "cpu")
            local.codes.copy_(torch.arange(local.codes.numel()).view_as(local.codes) % 100 + value)
            moment = DTensor.from_local(local, param.device_mesh, param.placements)
            self.state[param]["exp_avg"] = moment


def made(value: int):
    model = fully_shard(nn.Linear(64, 64, bias=False), mesh=cpu_mesh())
    return model, Moments(model.parameters(), value)


def codes(optimizer) -> torch.Tensor:
    (state,) = optimizer.state.values()
    return state["exp_avg"].to_local().codes


def moments_go_from_mesh_to_mesh() -> None:
    for options in ({}, {"full_state_dict": True}):
        chosen = ours.StateDictOptions(**options)
        model, source = made(1)
        saved = ours.get_optimizer_state_dict(model, source, options=chosen)
        found = saved["state"]["weight"]["exp_avg"]
        assert isinstance(found, OptimState8bit if options else DTensor), type(found)
        other, target = made(7)
        assert not torch.equal(codes(target), codes(source))
        ours.set_optimizer_state_dict(other, target, saved, options=chosen)
        assert torch.equal(codes(target), codes(source))


def whole_moments_are_on_rank_0_alone_when_offloaded() -> None:
    model, source = made(1)
    chosen = ours.StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved = ours.get_optimizer_state_dict(model, source, options=chosen)
    if torch.distributed.get_rank() == 0:
        assert isinstance(saved["state"]["weight"]["exp_avg"], OptimState8bit)
    else:
        assert saved == {}


if __name__ == "__main__":
    main(
        {
            check.__name__: check
            for check in (
                moments_go_from_mesh_to_mesh,
                whole_moments_are_on_rank_0_alone_when_offloaded,
            )
        }
    )

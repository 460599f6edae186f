"""Low-bit moments and quantised weights on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import cpu_mesh, main
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.quantization import Int8Tensor, Int8WeightOnlyConfig, quantize_, to_nf4
from torchao.quantization.quantize_.workflows import NF4Tensor

import torchlift.distributed as ours

WHOLE = ours.StateDictOptions(full_state_dict=True)
FROM_0 = ours.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


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


def weights(seed: int, kind: Any) -> nn.Sequential:
    torch.manual_seed(seed)
    layer = nn.Linear(128, 256)
    if kind is NF4Tensor:
        layer.weight = nn.Parameter(to_nf4(layer.weight.detach()), requires_grad=False)
    if kind is Int8Tensor:
        quantize_(layer, Int8WeightOnlyConfig())
    return nn.Sequential(layer)


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert type(a) is type(b), f"{type(a)}, {type(b)}"
    for name in a.__tensor_flatten__()[0]:
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def nf4_weights_are_read_and_set_as_shards_and_as_a_whole() -> None:
    whole = weights(1, NF4Tensor)
    sharded, *others = (fully_shard(weights(n, NF4Tensor), mesh=cpu_mesh()) for n in (1, 2, 3))
    local = sharded[0].weight.to_local()
    gathered = ours.get_model_state_dict(sharded, options=WHOLE)
    same(gathered["0.weight"], whole[0].weight.detach())
    for state, options in ((ours.get_model_state_dict(sharded), None), (gathered, WHOLE)):
        target = others.pop()
        assert ours.set_model_state_dict(target, state, options=options) == ([], [])
        same(target[0].weight.to_local(), local)


def rank_0_sends_plain_values_and_each_class_takes_or_refuses_them() -> None:
    """All values at once: a class may have no slices to write to."""
    plain = weights(1, None).state_dict() if dist.get_rank() == 0 else {}
    target = weights(2, NF4Tensor)
    ours.set_model_state_dict(target, plain, options=FROM_0)
    same(target[0].weight.detach(), weights(1, NF4Tensor)[0].weight.detach())
    target = weights(2, Int8Tensor)
    with pytest.raises(ours.StateDictMismatch, match=r"'0\.weight'.*does not take such values"):
        ours.set_model_state_dict(target, plain, options=FROM_0)
    same(target[0].weight.detach(), weights(2, Int8Tensor)[0].weight.detach())


def rank_0_sends_no_wrapper() -> None:
    """Only its class could slice it for the others, and each would have to have all of it."""
    state = weights(1, NF4Tensor).state_dict() if dist.get_rank() == 0 else {}
    target = weights(2, NF4Tensor)
    with pytest.raises(
        ours.StateDictMismatch, match=r"'0\.weight'.*can send complete plain tensors only; fo"
    ):
        ours.set_model_state_dict(target, state, options=FROM_0)
    same(target[0].weight.detach(), weights(2, NF4Tensor)[0].weight.detach())


if __name__ == "__main__":
    main(
        {
            check.__name__: check
            for check in (
                moments_go_from_mesh_to_mesh,
                whole_moments_are_on_rank_0_alone_when_offloaded,
                nf4_weights_are_read_and_set_as_shards_and_as_a_whole,
                rank_0_sends_plain_values_and_each_class_takes_or_refuses_them,
                rank_0_sends_no_wrapper,
            )
        }
    )

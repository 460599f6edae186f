"""A run on an accelerator: loaded there, trained, saved, resumed, also as shards on a mesh."""

from __future__ import annotations

import copy
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small_models import Mixed, Tied, Two, randomised, saved, tensors_of
from state_models import same
from torch import nn
from torch.distributed.fsdp import fully_shard
from zoo import same as same_bits

import torchlift
from torchlift.distributed import StateDictOptions, get_state_dict, set_model_state_dict

pytestmark = pytest.mark.gpu

_MIB = 1 << 20
_WAYS = {"adamw": {}, "fused": {"fused": True}, "capturable": {"capturable": True}}
_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@pytest.fixture
def mesh(accelerator: torch.device) -> Iterator[Any]:
    """A mesh of this one accelerator, whose default process group serves CPU tensors as well."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    dist.init_process_group(init_method=address, rank=0, world_size=1, device_id=accelerator)
    yield dist.init_device_mesh(accelerator.type, (1,))
    dist.destroy_process_group()


def large() -> nn.Module:
    """Weights of 72 MiB in all, and small ones between them."""
    return nn.Sequential(*(nn.Linear(1536, 1536) for _ in range(8)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, times: int = 2) -> None:
    device = next(model.parameters()).device
    for _ in range(times):
        x = torch.randn(4, next(model.parameters()).shape[-1], device=device)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["torch-zip", "safetensors", "dcp"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("verify", [False, True])
def test_a_load_takes_one_copy_on_the_device(tmp_path, accelerator, kind, dtype, verify) -> None:
    """Each tensor has its final dtype from the start; nothing is there twice."""
    state = randomised(large())
    path = tmp_path / "model"
    torchlift.save(state, path, format=kind)
    model = torchlift.skeleton(large)
    torch.accelerator.memory.empty_cache()
    torch.accelerator.memory.reset_peak_memory_stats()
    before = torch.accelerator.memory.memory_allocated()
    torchlift.load(model, path, device=accelerator, dtype=dtype, verify=verify)
    added = torch.accelerator.memory.max_memory_allocated() - before
    for key, value in tensors_of(model).items():
        assert value.device == accelerator
        assert same_bits(value.cpu(), state[key].to(dtype or value.dtype))
    assert added <= sum(value.nbytes for value in tensors_of(model).values()) + 9 * _MIB


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2"]
)
def test_what_is_cast_on_the_device_is_cast_as_on_the_host(tmp_path, accelerator, dtype) -> None:
    """All kinds of numbers: tiny, rounded to even, too large, infinite, and random bits."""
    numbers = torch.randint(-(2**31), 2**31, (6 * _MIB,), dtype=torch.int32).view(torch.float32)
    path = saved({"a": numbers.view(2, -1), "b": numbers.view(2, -1) * 2}, tmp_path)
    found, expected = (torchlift.skeleton(Two, 2, 3 * _MIB) for _ in range(2))
    torchlift.load(found, path, dtype=dtype, device=accelerator)
    torchlift.load(expected, path, dtype=dtype)
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        one = one.detach().cpu()
        same = one.view(torch.uint8) == other.detach().view(torch.uint8)
        assert same.view(one.numel(), -1).all(1).logical_or(one.float().isnan().flatten()).all()
        assert torch.equal(one.float().isnan(), other.float().isnan())


def test_a_live_model_is_filled_where_it_is(tmp_path, accelerator) -> None:
    """In its own memory, with the ties, the gradients and the optimizer that it has."""
    path = saved(Tied().state_dict(), tmp_path)
    model = Tied().to(accelerator)
    places = {key: value.data_ptr() for key, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torchlift.load(model, path)
    assert {key: value.data_ptr() for key, value in model.state_dict().items()} == places
    assert model.head.weight is model.embed.weight
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(model.embed.weight)}
    for key, value in torch.load(path).items():
        assert same_bits(model.state_dict()[key].cpu(), value)


class Odd(nn.Module):
    """Large weights: of whole and of broken pieces, strided, in two dtypes; and a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Parameter(torch.randn(4, _MIB))
        self.uneven = nn.Parameter(torch.randn(2 * _MIB + 3))
        self.strided = nn.Parameter(torch.randn(1024, 2048).T)
        self.numbers = nn.Buffer(torch.arange(_MIB + 1))
        self.small = nn.Parameter(torch.randn(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("given", ["file", "state dict"])
def test_large_live_weights_are_filled_in_pieces(tmp_path, accelerator, given, dtype) -> None:
    """As torch's own load_state_dict fills them, cast on the way."""
    state = randomised(Odd())
    model, expected = (Odd().to(accelerator, dtype) for _ in range(2))
    expected.load_state_dict(state)
    torch.accelerator.memory.empty_cache()
    torch.accelerator.memory.reset_peak_memory_stats()
    before = torch.accelerator.memory.memory_allocated()
    torchlift.load(model, saved(state, tmp_path) if given == "file" else state)
    assert same(model.state_dict(), expected.state_dict())
    added = torch.accelerator.memory.max_memory_allocated() - before
    assert added <= model.strided.nbytes + 5 * _MIB  # which torch sends whole


def test_what_lies_in_a_large_weight_is_written_after_it(tmp_path, accelerator) -> None:
    """As torch's own load_state_dict does, which goes by the order of the names."""

    class Overlapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.full = nn.Buffer(torch.zeros(4 * _MIB, device=accelerator))
            self.head = nn.Buffer(self.full[:16])

    state = {"full": torch.ones(4 * _MIB), "head": torch.full((16,), 2.0)}
    model = Overlapping()
    torchlift.load(model, saved(state, tmp_path))
    assert model.full[:18].tolist() == [2.0] * 16 + [1.0] * 2


def test_numbers_become_integers_as_on_the_host(tmp_path, accelerator) -> None:
    """A device gives other integers for what is none."""
    values = torch.tensor([float("nan"), float("inf"), 1e30, -1e30, 2.7, -2.7]).repeat(_MIB)

    class Numbers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.numbers = nn.Buffer(torch.zeros(6 * _MIB, dtype=torch.int64, device=accelerator))

    model, expected = Numbers(), Numbers()
    torchlift.load(model, saved({"numbers": values}, tmp_path))
    expected.load_state_dict({"numbers": values})
    assert same_bits(model.numbers.cpu(), expected.numbers.cpu())


def test_values_that_are_on_their_way_to_the_host_arrive_first(accelerator) -> None:
    """A copy to pinned memory that the stream has not done yet."""
    state = {key: value.to(accelerator) for key, value in randomised(large()).items()}
    model = large().to(accelerator)
    for _ in range(200):
        state["0.weight"] = state["0.weight"] @ torch.eye(1536, device=accelerator)
    torchlift.load(model, {k: v.to("cpu", non_blocking=True) for k, v in state.items()})
    assert all(same_bits(v, state[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("mode", ["assign", "copy", "swap"])
def test_a_load_is_in_order_with_a_stream_of_the_caller(tmp_path, accelerator, mode) -> None:
    """What was queued before reads the old weights, what comes after the new ones."""
    state = randomised(large())
    path = saved(state, tmp_path)
    model = large().to(accelerator)
    old = copy.deepcopy(model)
    x = torch.randn(512, 1536, device=accelerator)
    torch.accelerator.synchronize()
    with torch.Stream(accelerator), torch.no_grad():
        for _ in range(50):  # keeps the stream busy while the load begins
            product = x.T @ x
        before = model[0](x)
        torchlift.load(model, path, mode=mode)
        after = model[0](x)
        expected = old[0](x)
        new = nn.functional.linear(
            x, state["0.weight"].to(accelerator), state["0.bias"].to(accelerator)
        )
    torch.accelerator.synchronize()
    assert product.isfinite().all()
    assert torch.equal(before, expected)
    assert torch.equal(after, new)


def test_a_failed_load_changes_nothing_on_the_device(tmp_path, accelerator) -> None:
    """A flipped bit in the last tensor, and a check of every checksum."""
    path = tmp_path / "model.pt"
    torchlift.save(randomised(large()), path)
    data = bytearray(path.read_bytes())
    with torchlift.open(path) as ckpt:
        chunk = ckpt.entries["7.weight"].chunks[0]
    data[chunk.offset + 5] ^= 1
    path.write_bytes(data)
    model = large().to(accelerator)
    old = copy.deepcopy(model.state_dict())
    with pytest.raises(torchlift.IntegrityError, match="checksums are wrong in 1 of"):
        torchlift.load(model, path, verify=True)
    assert same(model.state_dict(), old)


@pytest.mark.parametrize("way", _WAYS)
def test_an_optimizer_goes_on_from_a_file(tmp_path, accelerator, way) -> None:
    """As after torch's own load_state_dict: devices, dtypes and bits, and the steps that follow."""
    model = Mixed().inner[0].to(accelerator).requires_grad_()
    optimizer = torch.optim.AdamW(model.parameters(), **_WAYS[way])
    step(model, optimizer)
    path = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    loaded, expected = copy.deepcopy(model), copy.deepcopy(model)
    torchs = torch.optim.AdamW(expected.parameters(), **_WAYS[way])
    torchs.load_state_dict(torch.load(path)["optimizer"])
    ours = torch.optim.AdamW(loaded.parameters(), **_WAYS[way])
    torchlift.load(loaded, path, root="model")
    torchlift.load_optimizer(loaded, ours, path, root="optimizer")
    assert same(ours.state_dict(), torchs.state_dict())
    for one, other in zip(ours.state.values(), torchs.state.values(), strict=True):
        assert {k: v.device for k, v in one.items()} == {k: v.device for k, v in other.items()}
    for one, optimizer in ((loaded, ours), (expected, torchs)):
        torch.manual_seed(0)
        step(one, optimizer)
    assert same(loaded.state_dict(), expected.state_dict())


@pytest.mark.parametrize("kind", ["torch-zip", "safetensors", "dcp"])
def test_a_model_on_the_device_is_saved(tmp_path, accelerator, kind) -> None:
    """Through a copy of one tensor at a time, and as a file that loads where there is none."""
    model = large().to(accelerator)
    path = tmp_path / "model"
    torchlift.save(model, path, format=kind)
    with torchlift.open(path) as ckpt:
        assert ckpt.keys() == model.state_dict().keys()
        for key, value in model.state_dict().items():
            assert same_bits(ckpt[key], value.cpu())
        if kind == "torch-zip":
            assert torch.load(path)["0.weight"].device.type == "cpu"
    assert torchlift.verify(path).ok


def test_a_keeper_saves_while_training_goes_on(tmp_path, accelerator) -> None:
    """Of the moment of the call, with the accelerator's random numbers."""

    def run_of() -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.Linear(64, 64)).to(accelerator)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    torch.manual_seed(0)
    run = run_of()
    step(**run)
    with torchlift.Keeper(tmp_path) as keeper:
        keeper.save(1, run)
        step(**run)
        keeper.save(2, run)
        step(**run)
        expected = copy.deepcopy(run["model"].state_dict())
        keeper.wait()
        other = run_of()
        torch.manual_seed(7)
        assert keeper.resume(other) == 2
    step(**other)
    assert same(other["model"].state_dict(), expected)
    assert {value.device for value in tensors_of(other["model"]).values()} == {accelerator}


def test_shards_on_the_device_are_loaded_saved_and_resumed(tmp_path, accelerator, mesh) -> None:
    """FSDP2, its full state, a folder of DCP, and a keeper."""
    state = randomised(large())
    path = saved(state, tmp_path)
    model = torchlift.skeleton(large)
    fully_shard(model, mesh=mesh)
    torchlift.load(model, path, device=accelerator)
    for key, value in model.state_dict().items():
        assert value.device.type == accelerator.type
        assert same_bits(value.full_tensor().cpu(), state[key])
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    full, _ = get_state_dict(model, optimizer, options=_FULL)
    assert {value.device.type for value in full.values()} == {"cpu"}
    dcp.save({"model": model.state_dict()}, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"))
    with torchlift.Keeper(tmp_path / "kept") as keeper:
        keeper.save(1, {"model": model, "optimizer": optimizer})
    for options in (_FULL, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)):
        other = large().to(accelerator)
        fully_shard(other, mesh=mesh)
        set_model_state_dict(other, full, options=options)
        assert all(same_bits(v.full_tensor().cpu(), full[k]) for k, v in other.state_dict().items())
    torchlift.load(other, tmp_path / "dcp", root="model")
    resumed = torch.optim.AdamW(other.parameters())
    with torchlift.Keeper(tmp_path / "kept") as keeper:
        assert keeper.resume({"model": other, "optimizer": resumed}) == 1
    for one, opt in ((model, optimizer), (other, resumed)):
        torch.manual_seed(0)
        step(one, opt)
    for key, value in model.state_dict().items():
        assert same_bits(value.full_tensor(), other.state_dict()[key].full_tensor())

"""Loading into tensors that are spread over ranks, from files that any number of ranks wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import bytes_read, cpu_mesh, on, saves, worlds
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from wrapped_models import MESHES, WRAPPERS, Net, net
from zoo import Tied

import torchlift
from torchlift import measure
from torchlift.distributed import StateDictOptions, set_model_state_dict
from torchlift.distributed.reader import CheckpointReader
from torchlift.distributed.save import save_consolidated
from torchlift.errors import CheckpointError, FormatError, MismatchError, PlacementError

pytestmark = pytest.mark.every_world

WORLDS = (1, 2, 4)  # of two and four ranks the shards of odd sizes overlap, and some are empty


def made(kind: type[nn.Module], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return kind()


def meta() -> Any:
    with torch.device("meta"):
        model: Any = Net()
    model.hidden = torch.zeros(3)
    return model


STARTS: dict[str, Callable[[], Any]] = {
    "live": lambda: net(seed=1),
    "meta": meta,
    "skeleton": lambda: torchlift.skeleton(Net),
}


WRAPS = {
    "fsdp": WRAPPERS["fsdp blocks"],
    "tp": WRAPPERS["tensor parallel"],
    "hsdp": MESHES["hybrid fsdp"],
    "two_d": MESHES["fsdp over tensor parallel"],
}
X = torch.linspace(-1, 1, 20).view(4, 5)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def require_equal(model: nn.Module, expected: dict[str, torch.Tensor], what: object) -> None:
    """Every tensor, put together from all ranks, is the expected one."""
    state = model.state_dict()
    assert set(state) == set(expected), what
    for key, value in state.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert not value.is_meta, (what, key)
        assert whole.dtype == expected[key].dtype, (what, key)
        assert torch.equal(whole, expected[key]), (what, key)


def everywhere(value: object) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


# ---- one file from which everybody reads ----------------------------------------------------


def full_file(folder: Path, kind: type[nn.Module] = Net) -> Path:
    path = folder / f"{kind.__name__}.pt"
    if dist.get_rank() == 0:
        torch.save(made(kind).state_dict(), path)
    dist.barrier()
    return path


@on(*WORLDS, wrap=WRAPS)
def test_each_rank_loads_its_shards(wrap: str, folder: Path) -> None:
    """Live, meta and skeleton models, every mode and source: equal to what torch distributes."""
    path, expected = full_file(folder), net().state_dict()
    modes = ("auto", "assign", "copy", "swap") if wrap in ("fsdp", "two_d") else ("auto", "copy")
    if dist.get_world_size() == 4:  # which show other shards, and no other mode
        modes = ("auto",)
    for start, make in STARTS.items():
        for number, mode in enumerate(modes):
            for source in ("mmap", "read") if number < 2 else ("read",):
                model: Any = WRAPS[wrap](make())
                report = torchlift.load(model, path, mode=mode, source=source)
                what = (wrap, start, mode, source)
                require_equal(model, expected, what)
                local = sum(local_of(value).nbytes for value in model.state_dict().values())
                assert report.nbytes == local, what
                assert not model.hidden.is_meta, what
                assert torch.allclose(local_of(model(X)), net()(X), atol=1e-5), what
                model(X).sum().backward()


@on(*WORLDS)
def test_a_tie_stays_one_tensor(folder: Path) -> None:
    path = full_file(folder, Tied)
    model: Any = fully_shard(torchlift.skeleton(Tied))
    torchlift.load(model, path)
    assert model.head.weight is model.embed.weight
    require_equal(model, made(Tied).state_dict(), "tied")


HALF = "blocks.0.up.weight"


class Doubling(Net):
    """Its files have halves of one weight, and it sums up what was loaded."""

    total = 0.0

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        doubled = {**state_dict, HALF: state_dict[HALF] * 2}
        found = super().load_state_dict(doubled, *args, **kwargs)
        self.total = float(local_of(self.inp.bias.detach()).sum())
        return found


@on(*WORLDS)
def test_a_class_s_own_load_state_dict_is_called_on_every_rank(folder: Path) -> None:
    path, expected = folder / "halved.pt", made(Doubling).state_dict()
    if dist.get_rank() == 0:
        torch.save({**expected, HALF: expected[HALF] / 2}, path)
    dist.barrier()
    for wrap in ("fsdp", "tp"):
        for start in (Doubling, lambda: torchlift.skeleton(Doubling)):
            model: Any = WRAPS[wrap](start())
            torchlift.load(model, path)
            require_equal(model, expected, (wrap, start))
            assert model.total == float(local_of(model.inp.bias.detach()).sum())
    for broadcast in (False, True):
        model = WRAPS["fsdp"](Doubling())
        state = torchlift.open(path).state_dict() if dist.get_rank() == 0 or not broadcast else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(model, state, options=options)
        require_equal(model, expected, broadcast)
    # Of a state dict that is sharded, the method gets DTensors, as in torch.
    state = WRAPS["fsdp"](made(Doubling)).state_dict()
    state[HALF] = state[HALF] / 2
    model = WRAPS["fsdp"](Doubling())
    set_model_state_dict(model, state)
    require_equal(model, expected, "sharded")


class One(nn.Module):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())


def meshes() -> Iterator[tuple[DeviceMesh, list[list[Any]]]]:
    world = dist.get_world_size()
    line = cpu_mesh()
    yield line, [[Shard(0)], [Shard(1)], [Shard(2)], [Replicate()]]
    if world % 2 == 0:
        grid = cpu_mesh(world // 2, 2, names=("a", "b"))
        pairs = [Shard(0), Shard(1), Shard(2), Replicate()]
        yield (
            grid,
            [[a, b] for a in pairs for b in pairs] + [[_StridedShard(0, split_factor=2), Shard(0)]],
        )


# Each choice with each one of another kind, in half as many loads as all of them together.
PAIRS_OF_CHOICES: list[tuple[bool, Any, torch.dtype | None]] = [
    (True, "mmap", None),
    (True, "read", torch.float64),
    (False, "mmap", torch.float64),
    (False, "read", None),
]


@on(*WORLDS)
def test_loads_every_placement(folder: Path) -> None:
    """Uneven and empty shards on any dimension, several mesh dimensions, strided ones."""
    for shape in ((5, 3, 7), (1, 2, 3), (64, 8, 2048)):
        whole = torch.randn(shape)
        path = folder / "one.pt"
        if dist.get_rank() == 0:
            torch.save({"w": whole}, path)
        dist.barrier()
        for mesh, layouts in meshes():
            for placements in layouts:
                strided = any(isinstance(p, _StridedShard) for p in placements)
                if strided and shape[0] % mesh.size():
                    continue
                expected = distribute_tensor(whole, mesh, placements)
                for live, source, dtype in PAIRS_OF_CHOICES:
                    start = torch.empty(shape, device="cpu" if live else "meta")
                    model = One(distribute_tensor(start, mesh, placements, src_data_rank=None))
                    torchlift.load(model, path, source=source, dtype=dtype)
                    local = model.w.to_local()
                    want = expected.to_local().to(dtype or torch.float32)
                    what = (shape, placements, source, dtype)
                    assert local.is_contiguous(), what
                    assert torch.equal(local, want), what
                    assert model.w.placements == tuple(placements), what
        dist.barrier()


@on(*WORLDS)
def test_refuses_partial_sums(folder: Path) -> None:
    path = full_file(folder, Big)
    mesh = cpu_mesh()
    model = One(DTensor.from_local(torch.zeros(4, 4), mesh, [Partial()], run_check=False))
    with pytest.raises(PlacementError, match=r"'layers.0.weight': .*partial sum"):
        torchlift.load(model, path, rename=lambda key: key.replace("layers.0.weight", "w"))


class Big(nn.Module):
    """64 MiB in eight matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8192, 256, bias=False) for _ in range(8)])


@on(*WORLDS)
def test_reads_its_shards_and_no_more(folder: Path) -> None:
    """Bytes within one percent; anonymous memory within the budget; not one collective."""
    path = full_file(folder, Big)
    for wrap in (lambda model: fully_shard(model), split_columns):
        for source in ("read", "mmap"):
            model = wrap(torchlift.skeleton(Big))
            with CommDebugMode() as comm, measure.memory() as use:
                before = bytes_read()
                report = torchlift.load(model, path, source=source, collective=False)
                asked = bytes_read() - before
            shards = sum(local_of(p).nbytes for p in model.parameters())
            assert comm.get_total_counts() == 0, comm.get_comm_counts()
            contiguous = wrap is not split_columns
            if source == "read":
                assert report.bytes_read == shards, (report.bytes_read, shards)
                # The rest is copied from a map of the file.
                assert asked < 1.01 * shards + (1 << 16), (asked, shards)
                assert use.added_anonymous < shards + (64 << 20), use
            elif contiguous:
                assert report.bytes_read == 0, report
                if 256 % dist.get_world_size():
                    continue  # FSDP pads uneven shards, in memory of its own
                assert use.added_anonymous < 8 << 20, use


def split_columns(model: nn.Module) -> nn.Module:
    mesh = cpu_mesh()
    for layer in model.layers:
        layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(1)]))
    return model


@on(*WORLDS)
def test_a_transform_gets_a_tensor_of_the_same_layout(folder: Path) -> None:
    path, expected = full_file(folder), net().state_dict()
    seen: list[bool] = []

    def double(key: str, tensor: torch.Tensor) -> torch.Tensor:
        seen.append(isinstance(tensor, DTensor) and tensor.shape == expected[key].shape)
        return tensor * 2

    for make in STARTS.values():
        seen.clear()
        model = WRAPS["fsdp"](make())
        torchlift.load(model, path, transform=double)
        assert sum(seen) == 13, seen
        require_equal(model, {key: value * 2 for key, value in expected.items()}, "transform")
    with pytest.raises((PlacementError, MismatchError), match="transform"):
        torchlift.load(model, path, transform=lambda key, t: local_of(t).clone())
    with pytest.raises(PlacementError, match="transform got a DTensor and returned another layout"):
        torchlift.load(
            model, path, transform=lambda key, t: t.redistribute(placements=[Replicate()])
        )


@on(*WORLDS)
def test_what_the_file_lacks_is_replayed_in_shards(folder: Path) -> None:
    path = folder / "saved.pt"
    whole = net().state_dict()
    if dist.get_rank() == 0:
        torch.save({k: v for k, v in whole.items() if not k.startswith("inp.")}, path)
    dist.barrier()
    model = WRAPS["fsdp"](torchlift.skeleton(Net))
    torch.manual_seed(7)
    report = torchlift.load(model, path, strict=False)
    assert set(report.replayed) == {"inp.weight", "inp.bias", "hidden"}, report
    state = model.state_dict()
    weight = state["inp.weight"].full_tensor()
    assert weight.abs().max() <= 5**-0.5
    assert weight.std() > 0.1
    assert torch.equal(state["scale"].full_tensor(), whole["scale"])


@on(*WORLDS)
def test_loads_after_a_forward_pass(folder: Path) -> None:
    """FSDP may have left whole parameters in the slots; the next pass uses what was loaded."""
    path = full_file(folder)
    for mode in ("copy", "assign", "swap", "auto"):
        model: Any = fully_shard(net(seed=1), reshard_after_forward=False)
        with torch.no_grad():
            model(X)
        torchlift.load(model, path, mode=mode)
        require_equal(model, net().state_dict(), mode)
        assert torch.allclose(model(X), net()(X), atol=1e-5), mode


# ---- one rank fails --------------------------------------------------------------------------


def broken_file(folder: Path, how: str) -> Path:
    good, bad = full_file(folder), folder / f"bad-{dist.get_rank()}.pt"
    if how == "missing":
        return folder / "nowhere.pt"
    data = good.read_bytes()
    if how == "cut":
        bad.write_bytes(data[: len(data) // 2])
    else:
        state = net().state_dict()
        state["inp.weight"] = torch.zeros(3, 3)
        torch.save(state, bad)
    return bad


@on(*WORLDS)
def test_one_rank_that_fails_stops_all(folder: Path) -> None:
    """The same error everywhere, with the rank in it; nothing has changed anywhere."""
    good, last = full_file(folder), dist.get_world_size() - 1
    for how, kind in (("missing", FormatError), ("cut", FormatError), ("shape", MismatchError)):
        for wrap in ("fsdp", "two_d", "replica"):  # which loads together when asked
            model = WRAPS.get(wrap, lambda model: model)(net(seed=1))
            before = {key: local_of(value).clone() for key, value in model.state_dict().items()}
            bad = broken_file(folder, how)
            path = bad if dist.get_rank() == last else good
            with pytest.raises(kind) as caught:
                torchlift.load(model, path, collective=True if wrap == "replica" else None)
            text = str(caught.value)
            assert f"on rank {last}: " in text or last == 0, text
            assert len(set(everywhere(text))) == 1, everywhere(text)
            for key, value in model.state_dict().items():
                assert torch.equal(local_of(value), before[key]), (how, key)


@on(*WORLDS)
def test_a_wrong_argument_on_one_rank_stops_all(folder: Path) -> None:
    good, last = full_file(folder), dist.get_world_size() - 1
    model = WRAPS["fsdp"](net(seed=1))
    rename: Any = (lambda key: 5) if dist.get_rank() == last else None
    failed = dist.get_rank() == last
    with pytest.raises(TypeError if failed else CheckpointError) as caught:
        torchlift.load(model, good, rename=rename)
    assert failed or f"on rank {last}: TypeError" in str(caught.value)


# ---- from any number of ranks to any other ---------------------------------------------------


def files_of(saved: Path, name: str) -> list[Path]:
    return sorted(saved.glob(f"{name}-from-*"))


@saves(*WORLDS)
def writes_checkpoints(saved: Path) -> None:
    world = dist.get_world_size()
    for wrap in ("fsdp", "two_d"):
        model = WRAPS[wrap](net())
        dcp.save(model.state_dict(), checkpoint_id=saved / f"dcp-from-{world}-{wrap}")
        wrote = save_consolidated(
            model, saved / f"one-from-{world}-{wrap}.safetensors", metadata={"a": "b"}
        )
        total = sum(v.numel() * v.itemsize for v in net().state_dict().values())
        assert sum(everywhere(wrote)) == total, wrote


@on(*WORLDS)
def test_loads_what_any_number_of_ranks_saved(saved: Path) -> None:
    expected = net().state_dict()
    paths = files_of(saved, "dcp") + files_of(saved, "one")
    assert len(paths) == 4 * len(worlds()), paths
    # Each choice with each one of another kind.
    ways: list[tuple[bool, Any, str]] = [
        (True, "mmap", "fsdp"),
        (True, "read", "two_d"),
        (False, "mmap", "two_d"),
        (False, "read", "fsdp"),
    ]
    for path in paths:
        for live, source, wrap in ways:
            start = net(1) if live else torchlift.skeleton(Net)
            model = WRAPS[wrap](start)
            report = torchlift.load(model, path, source=source)
            require_equal(model, expected, (path.name, source, wrap))
            if source == "read":
                local = sum(local_of(v).nbytes for v in model.state_dict().values())
                assert report.bytes_read == local, (path.name, report)


@on(*WORLDS)
def test_the_reader_serves_dcp(saved: Path) -> None:
    """dcp.load through CheckpointReader: from a torch file, safetensors and DCP, onto this mesh."""
    expected = net().state_dict()
    wrapped = saved / "wrapped.pt"
    if dist.get_rank() == 0:
        torch.save({"model": expected, "step": 7}, wrapped)
    dist.barrier()
    paths = files_of(saved, "dcp") + files_of(saved, "one")
    sources = [(wrapped, "model"), *((path, None) for path in paths)]
    for path, root in sources:
        for wrap in ("fsdp", "two_d"):
            model = WRAPS[wrap](net(1))
            state = model.state_dict()
            dcp.load(state, storage_reader=CheckpointReader(path, root=root))
            require_equal(model, expected, (path.name, wrap))
    found = {"step": 0}
    dcp.load(found, storage_reader=CheckpointReader(wrapped))
    assert found == {"step": 7}


@on(*WORLDS)
def test_every_kind_of_shard_comes_through_dcp_and_convert(folder: Path) -> None:
    """Rows, columns, experts, replicated and strided ones: saved, put together, loaded as others.

    Into memory of its own, and into a view with gaps between its rows.
    """
    whole = torch.randn((4, 16, 2048), generator=torch.Generator().manual_seed(1))
    kinds = [(mesh, found) for mesh, layouts in meshes() for found in layouts]
    for number, (mesh, placements) in enumerate(kinds):
        path = folder / f"kind-{number}"
        file = path.with_suffix(".safetensors")
        dcp.save({"w": distribute_tensor(whole, mesh, placements)}, checkpoint_id=path)
        if dist.get_rank() == 0:
            torchlift.convert(path, file)
            with torchlift.open(file) as ckpt:
                assert torch.equal(ckpt["w"], whole), placements
        dist.barrier()
        for gap, (target, onto) in enumerate((kinds[number - 1], kinds[(number + 5) % len(kinds)])):
            expected = distribute_tensor(whole, target, onto)
            local = expected.to_local()
            for source in (path, file):
                wide = torch.zeros(*local.shape[:-1], local.shape[-1] + 3 * gap)
                made = wide[..., : local.shape[-1]]
                layout = {"shape": whole.shape, "stride": whole.stride(), "run_check": False}
                state = {"w": DTensor.from_local(made, target, onto, **layout)}
                dcp.load(state, storage_reader=CheckpointReader(source))
                assert torch.equal(made, local), (placements, onto, source)
                assert not wide[..., local.shape[-1] :].any(), (placements, onto, source)

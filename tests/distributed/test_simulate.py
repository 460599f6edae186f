"""What a mesh would read, computed without one."""

from __future__ import annotations

import json
import math
import time
from functools import partial
from pathlib import Path

import pytest
import sharded_models
import torch
import torch.distributed as dist
from ranks import run_workers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

import torchlift
from torchlift._checkpoint.checkpoint import Checkpoint
from torchlift.distributed import simulate
from torchlift.distributed.simulation import parse_mesh
from torchlift.formats.index import Chunk, Index, TensorEntry

WORKERS = Path(__file__).with_name("workers_simulate.py")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width)
        self.up_proj = nn.Linear(width, 4 * width, bias=False)
        self.down_proj = nn.Linear(4 * width, width, bias=False)
        self.norm = nn.LayerNorm(width)


class Model(nn.Module):
    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(128, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(depth)])
        self.register_buffer("count", torch.zeros(4))


def parallelize(model, mesh) -> None:
    """What a training script has: each layer in its columns and rows, then FSDP over those."""
    dims = mesh.mesh_dim_names
    if "pp" in dims:
        stage, depth = mesh["pp"].get_local_rank(), len(model.layers)
        for n in range(depth):
            if n * mesh["pp"].size() // depth != stage:
                model.layers[n] = None
        if stage > 0:
            del model.embed_tokens, model.count
    for layer in filter(None, model.layers):
        if "tp" in dims:
            plan = {name: ColwiseParallel() for name in ("q_proj", "up_proj")}
            plan |= {name: RowwiseParallel() for name in ("o_proj", "down_proj")}
            parallelize_module(layer, mesh["tp"], plan)
        if "fsdp" in dims:
            fully_shard(layer, mesh=mesh["fsdp"])
    if "fsdp" in dims:
        fully_shard(model, mesh=mesh["fsdp"])


def test_fsdp_reads_every_byte_once_and_buffers_on_every_rank() -> None:
    """Parameters are cut; a buffer is read by all."""
    model = torchlift.skeleton(Model)
    found = simulate(model, "fsdp=8")
    parameters = sum(p.nbytes for p in model.parameters())
    assert sum(found.bytes) == parameters + 8 * 16
    assert found.ranks == 8
    assert found.amplification == pytest.approx(1.0, abs=0.01)


def test_replicas_read_as_often_as_there_are() -> None:
    """Data parallel multiplies what is read, and the amplification says so."""
    model = torchlift.skeleton(Model)
    assert simulate(model, "dp=4,fsdp=2").amplification == pytest.approx(4, abs=0.01)
    assert (
        simulate(model, {"dp": 3}).bytes
        == (sum(t.nbytes for t in model.state_dict().values()),) * 3
    )


def test_tensor_parallel_is_what_the_function_says() -> None:
    """Columns of what multiplies, rows of what is multiplied, norms and late biases whole."""
    model = torchlift.skeleton(Model)
    found = simulate(model, "tp=4", parallelize=parallelize)
    state = model.state_dict()
    whole = sum(
        t.nbytes
        for k, t in state.items()
        if "norm" in k or k == "count" or "o_proj.bias" in k or "embed" in k
    )
    rest = sum(t.nbytes for t in state.values()) - whole
    assert found.bytes == (whole + rest // 4,) * 4
    # Rows of a matrix sharded along its second dimension are byte ranges of their own.
    assert found.requests[0] > len(state)
    own = simulate(model, "tp=4", parallelize=lambda model, mesh: None)
    assert own.bytes == (sum(t.nbytes for t in state.values()),) * 4


def test_each_stage_of_a_pipeline_is_made_by_the_function() -> None:
    """It runs once per stage; what it leaves of the model is what the ranks of that stage read."""
    model = torchlift.skeleton(Model)
    found = simulate(model, "pp=4", parallelize=parallelize)
    assert found.bytes[1] == found.bytes[2]
    first = model.embed_tokens.weight.nbytes + model.count.nbytes
    assert found.bytes[0] - found.bytes[1] == first
    assert sum(found.bytes) == sum(t.nbytes for t in model.state_dict().values())


@pytest.mark.timed
def test_thousands_of_ranks_take_seconds() -> None:
    """A three-dimensional mesh of 4096 ranks and a model that fits nowhere here."""
    model = torchlift.skeleton(Model, 8192, 24)
    start = time.perf_counter()
    found = simulate(model, "pp=4,fsdp=128,tp=8", parallelize=parallelize)
    assert time.perf_counter() - start < 20
    assert found.ranks == 4096
    assert max(found.bytes) < 2 * found.nbytes / 4096 + 2**22


def test_the_model_and_the_process_stay_as_they_were() -> None:
    """The function gets a copy; the fake process group is gone, also after an error."""
    model = torchlift.skeleton(Model)
    simulate(model, "fsdp=2", parallelize=parallelize)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert not dist.is_initialized()

    def fails(model: nn.Module, mesh: object) -> None:
        assert dist.get_world_size() == 6
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        simulate(model, "a=2,b=3", parallelize=fails)
    assert not dist.is_initialized()
    torchlift.materialize(model)


def test_a_function_may_return_another_module_or_wrap_layers() -> None:
    """Wrappers add to the path of a parameter, not to its name."""

    def wraps(model: nn.Module, mesh: object) -> nn.Module:
        parallelize(model, mesh)
        for n, layer in enumerate(model.layers):
            model.layers[n] = checkpoint_wrapper(layer)
        return torch.compile(model, backend="eager")

    model = torchlift.skeleton(Model)
    plain = simulate(model, "fsdp=2,tp=2", parallelize=parallelize)
    assert simulate(model, "fsdp=2,tp=2", parallelize=wraps) == plain


def test_fsdp_shards_where_it_is_told_and_nothing_that_it_ignores() -> None:
    """Rows of a shard along the second dimension are byte ranges of their own."""
    model = torchlift.skeleton(nn.Linear, 8, 6)
    assert simulate(model, "fsdp=4").bytes == (72, 72, 72, 0)

    def along_columns(model, mesh) -> None:
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1))

    found = simulate(model, "fsdp=4", parallelize=along_columns)
    assert found.bytes == (48 + 8, 48 + 8, 48 + 8, 48)
    assert found.requests == (7, 7, 7, 6)

    def leaves_the_weight(model, mesh) -> None:
        fully_shard(model, mesh=mesh, ignored_params={model.weight})

    found = simulate(model, "fsdp=4", parallelize=leaves_the_weight)
    assert found.bytes == (200, 200, 200, 192)


def test_of_two_matrices_in_one_a_rank_reads_a_part_of_each() -> None:
    """The gates and what they gate of every expert are byte ranges of their own."""

    def experts(model, mesh) -> None:
        both = [_StridedShard(1, split_factor=2)]
        model.gate_up = nn.Parameter(distribute_tensor(model.gate_up, mesh, both))
        model.down = nn.Parameter(distribute_tensor(model.down, mesh, [Shard(2)]))

    def build() -> nn.Module:
        model = nn.Module()
        model.gate_up = nn.Parameter(torch.zeros(3, 12, 4))
        model.down = nn.Parameter(torch.zeros(3, 4, 6))
        return model

    found = simulate(torchlift.skeleton(build), "tp=2", parallelize=experts)
    assert found.bytes == (4 * 3 * (4 * 6 + 4 * 3),) * 2
    assert found.requests == (3 * 2 + 12, 3 * 2 + 12)


def test_each_stage_with_a_name_of_a_tie_reads_it(tmp_path: Path) -> None:
    """The first and the last stage have a copy each; a table that no file has is held by all."""
    model = torchlift.skeleton(sharded_models.Staged)
    found = simulate(model, "pp=5", parallelize=sharded_models.keep_stage)
    layers = [4 * 7 * (7 + n) + 12 for n in range(5)]
    tie, norm = 4 * 11 * 6, 4 * 12
    assert found.bytes == (layers[0] + tie, *layers[1:4], layers[4] + norm + tie)
    assert found.local_bytes == tuple(nbytes + 20 for nbytes in found.bytes)
    assert found.nbytes == sum(layers) + norm + tie


def _renames(model, mesh) -> None:
    model.added = model.layers
    del model.layers


def _shards_by_hand(model, mesh) -> None:
    model.embed_tokens.weight = nn.Parameter(torch.empty(64, 64, device="meta"))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_renames, r"leaves nothing with the name layers\.0\.q_proj\.weight \(32 names lost\)"),
        (_shards_by_hand, r"embed_tokens\.weight is now \[64, 64\], and no DTensor"),
        (lambda model, mesh: (model,), "parallelize= returned <class 'tuple'>: expected the model"),
    ],
)
def test_what_no_dtensor_tells_is_refused(function, message: str) -> None:
    """Bytes that nobody seems to read would make every number wrong."""
    with pytest.raises(ValueError, match=message):
        simulate(torchlift.skeleton(Model), "fsdp=2", parallelize=function)


def test_a_model_that_is_distributed_already_has_a_mesh() -> None:
    """It is on the process group that it was made on, and needs no function."""
    found = []

    def looks(model, mesh) -> None:
        parallelize(model, mesh)
        found.append(simulate(model))
        with pytest.raises(ValueError, match="not distributed yet"):
            simulate(model, "fsdp=8")

    plain = simulate(torchlift.skeleton(Model), "fsdp=2,tp=4", parallelize=looks)
    assert (found, plain.mesh) == ([plain], {"fsdp": 2, "tp": 4})


def test_a_function_needs_a_model_and_a_mesh(tmp_path: Path) -> None:
    """A file alone has names, and no modules."""
    torch.save({"w": torch.zeros(8, 8)}, tmp_path / "m.pt")
    with pytest.raises(ValueError, match="parallelize= needs the model"):
        simulate(tmp_path / "m.pt", "tp=4", parallelize=parallelize)
    with pytest.raises(ValueError, match="a mesh needs at least one dimension"):
        simulate(torchlift.skeleton(Model), parallelize=parallelize)


@pytest.mark.parametrize("dim", ["tp", "pp", "warp"])
def test_dimensions_that_no_name_explains_need_a_function(dim: str) -> None:
    """What a dimension does to each tensor, only the user's code knows."""
    with pytest.raises(
        ValueError, match=f"mesh dimension '{dim}' needs a model and your own function"
    ):
        simulate(torchlift.skeleton(nn.Linear, 2, 2), {"fsdp": 2, dim: 2})


def test_files_are_counted_apart(tmp_path: Path) -> None:
    """Bytes and byte ranges per file add up to those of all ranks."""
    torch.save({"w": torch.zeros(8, 8), "b": torch.zeros(8)}, tmp_path / "m.pt")
    found = simulate(tmp_path / "m.pt", "fsdp=4")
    ((nbytes, count),) = found.files.values()
    assert nbytes == sum(found.bytes) == 72 * 4
    assert count == sum(found.requests) == 8
    assert found.to_dict()["ranks"] == 4
    assert "4 ranks" in str(found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a mesh dimension such as fsdp=8"),
        ("fsdp", "'fsdp' is not a mesh dimension such as fsdp=8"),
        ("fsdp=2,", "'' is not a mesh dimension"),
        ("fsdp=x", "'fsdp=x' is not a mesh dimension"),
        ("fsdp=\u00b2", "is not a mesh dimension"),
        ("fsdp=0", "mesh dimension 'fsdp' has size 0"),
        ("fsdp=-1", "mesh dimension 'fsdp' has size -1"),
        ("tp=2, tp =2", "mesh dimension 'tp' is given twice"),
        ("fsdp=1000000000", "a mesh of more than 1,048,576 ranks"),
        ("fsdp=2000,tp=2000", "a mesh of more than 1,048,576 ranks"),
        ("fsdp=" + "9" * 5000, "a mesh of more than 1,048,576 ranks"),
    ],
)
def test_a_mesh_that_means_nothing_is_refused(text: str, message: str) -> None:
    """The message says what was not understood."""
    with pytest.raises(ValueError, match="mesh") as caught:
        parse_mesh(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("mesh", [{}, {"fsdp": 2.0}, {"fsdp": "2"}, {3: 2}])
def test_a_mapping_that_is_no_mesh_is_refused(mesh) -> None:
    """As its text would be."""
    with pytest.raises(ValueError, match="mesh"):
        simulate(torchlift.skeleton(nn.Linear, 2, 2), mesh)


def test_uneven_shards_are_torch_s() -> None:
    """Ten rows over four ranks are 3, 3, 3 and 1."""
    found = simulate(torchlift.skeleton(nn.Linear, 1, 10, bias=False), "fsdp=4")
    assert found.bytes == (12, 12, 12, 4)
    assert math.fsum(found.bytes) == 40


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_rank_reads_and_holds_what_was_foretold(tmp_path: Path, ranks: int) -> None:
    """On meshes of one to three dimensions: FSDP, HSDP, TP and FSDP over TP, on uneven sizes."""
    out = tmp_path / str(ranks)
    out.mkdir()
    checks = run_workers(WORKERS, ranks, out)
    assert len(checks) >= 7  # none was skipped
    assert {check: text for check, text in checks.items() if text} == {}
    records = json.loads((out / "records").read_text(encoding="utf-8"))
    assert len(records) > len(checks)
    for real in records:
        staged = "pp" in real["mesh"]
        model = torchlift.skeleton(sharded_models.Staged if staged else sharded_models.Odd)
        dtype = getattr(torch, real["dtype"]) if real.get("dtype") else None
        function = sharded_models.keep_stage
        if not staged:
            function = partial(
                sharded_models.distribute, shard=real["shard"], ignored=real["ignored"]
            )
        found = simulate(real["path"], real["mesh"], model=model, parallelize=function, dtype=dtype)
        assert list(found.bytes) == real["bytes"], real
        assert list(found.local_bytes) == real["local_bytes"], real
        assert sum(found.bytes) == sum(nbytes for nbytes, _ in found.files.values()), real
        assert sum(found.requests) == sum(count for _, count in found.files.values()), real
        assert not dist.is_initialized()


def test_several_sharded_dimensions_are_one(tmp_path: Path) -> None:
    """Ten rows over two times two are 3, 3, 3 and 1, as over four."""
    model = torchlift.skeleton(nn.Linear, 1, 10, bias=False)
    assert simulate(model, "dp_shard=2,cp=2").bytes == (12, 12, 12, 4)
    assert simulate(model, "dp_shard=2,replicate=2,cp=2").bytes == (12, 12, 12, 12, 12, 4, 12, 4)


def _written_by(ranks: int, rows: int, columns: int) -> Checkpoint:
    """A checkpoint of which every tensor lies in as many files as ranks wrote it."""
    step = -(-rows // ranks)
    chunks = tuple(
        Chunk(f"/nowhere/{n}", 0, step * columns * 2, (n * step, 0), (step, columns))
        for n in range(rows // step)
    )
    entries = {
        key: TensorEntry(key, "bfloat16", (rows, columns), (columns, 1), rows * columns * 2, "cpu",
                         key, chunks)
        for key in (f"layers.{n}.q_proj.weight" for n in range(80))
    }  # fmt: skip
    return Checkpoint(Index("/nowhere", "dcp", entries, {}, {}))


@pytest.mark.timed
def test_files_of_several_ranks_are_counted_exactly() -> None:
    """Each rank reads from the files that hold its rows; all files are read once."""
    found = simulate(_written_by(4, 16, 4), "fsdp=3")
    assert found.bytes == (80 * 48, 80 * 48, 80 * 32)
    assert found.requests == (160, 160, 80)
    assert list(found.files.values()) == [
        (80 * 32, 80),
        (80 * 32, 160),
        (80 * 32, 80),
        (80 * 32, 80),
    ]
    start = time.perf_counter()
    found = simulate(_written_by(1024, 8192, 64), "dp=8,fsdp=1024")
    assert time.perf_counter() - start < 20
    assert sum(nbytes for nbytes, _ in found.files.values()) == sum(found.bytes) == 8 * found.nbytes

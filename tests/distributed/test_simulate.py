"""The bytes that each rank of a mesh reads, planned without the mesh."""

from __future__ import annotations

import json
import math
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
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchlift
from torchlift import remap
from torchlift.distributed import simulate
from torchlift.distributed.simulation import parse_mesh
from torchlift.errors import MismatchError

WORKERS = Path(__file__).with_name("workers_simulate.py")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)


class Model(nn.Module):
    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(128, width)
        self.layers = nn.ModuleList([Block(width) for _ in range(depth)])
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("mask", torch.zeros(3), persistent=False)


def parallelize(model, mesh) -> None:
    """Do what a training script does: a stage, columns and rows of each layer, then FSDP."""
    dims = mesh.mesh_dim_names
    if "pp" in dims:
        stage, depth = mesh["pp"].get_local_rank(), len(model.layers)
        for n in range(depth):
            if n * mesh["pp"].size() // depth != stage:
                model.layers[n] = None
        if stage > 0:
            del model.embed_tokens, model.count, model.mask
    for layer in filter(None, model.layers):
        if "tp" in dims:
            parallelize_module(
                layer, mesh["tp"], {"q_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
            )
        if "fsdp" in dims:
            fully_shard(layer, mesh=mesh["fsdp"])
    if "fsdp" in dims:
        fully_shard(model, mesh=mesh["fsdp"])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of `Model` with a prefix, and other tensors next to it."""
    state = {f"module.{key}": value for key, value in Model().state_dict().items()}
    torch.save({"model": state, "moments": torch.zeros(1000)}, tmp_path / "saved.pt")
    return tmp_path / "saved.pt"


@pytest.fixture
def planned(saved: Path):
    """`simulate` of that checkpoint for a skeleton of the model."""
    return partial(
        simulate, saved, model=torchlift.skeleton(Model), root="model", rename=remap.strip("module")
    )


PARAMETERS = sum(parameter.nbytes for parameter in Model().parameters())


def test_fsdp_reads_every_byte_once_and_buffers_on_every_rank(planned) -> None:
    """Parameters are cut, a buffer is read by all, and one that no file has is held only."""
    found = planned("fsdp=3")
    assert found.ranks == (0, 1, 2)
    assert sum(found.bytes) == PARAMETERS + 3 * 16
    assert sum(found.local_bytes) == PARAMETERS + 3 * (16 + 12)
    assert found.plan.replayed == ["mask"]
    assert found.to_dict()["plan"]["replayed"] == ["mask"]
    assert "mesh: fsdp 3, 3 ranks" in str(found)


def test_replicas_read_the_same(planned) -> None:
    """Of two dimensions the first one replicates, as in `fully_shard`."""
    found = planned({"dp": 2, "fsdp": 2})
    assert found.bytes[:2] == found.bytes[2:]
    assert sum(found.bytes) == 2 * PARAMETERS + 4 * 16


def test_tensor_parallel_is_what_the_function_does(planned) -> None:
    """Columns and rows of what it names; all other tensors are read by every rank."""
    found = planned("tp=4", parallelize=parallelize, ranks=[0, 3])
    state = Model().state_dict()
    names = [key for key in state if "proj" in key and "o_proj.bias" not in key]
    cut = sum(state[key].nbytes for key in names)
    whole = sum(value.nbytes for value in state.values()) - cut
    assert found.bytes == (whole + cut // 4,) * 2


def test_each_stage_of_a_pipeline_reads_what_the_function_leaves(planned) -> None:
    """The checkpoint has the names of all stages, and none of them is an error."""
    found = planned("pp=4", parallelize=parallelize)
    state = Model().state_dict()
    assert found.bytes[1] == found.bytes[2] == found.bytes[3]
    first = state["embed_tokens.weight"].nbytes + state["count"].nbytes
    assert found.bytes[0] - found.bytes[1] == first
    assert sum(found.bytes) == sum(value.nbytes for value in state.values())


def test_a_large_mesh_is_simulated_at_its_corners(planned) -> None:
    """The first and the last rank along each dimension, or those that the caller names."""
    found = planned("fsdp=128,tp=8", parallelize=parallelize)
    assert found.ranks == (0, 7, 1016, 1023)
    assert max(found.bytes) > min(found.bytes) > 0  # the last ranks have no rows of the weights
    assert "ranks 0, 7, 1016, 1023 read" in str(found)
    assert planned("fsdp=128,tp=8", parallelize=parallelize, ranks=[7]).bytes == found.bytes[1:2]


def test_the_model_and_the_process_stay_as_they_were(planned) -> None:
    """Each rank is another process, whose error is raised here as it is."""
    model = torchlift.skeleton(Model)
    planned("fsdp=2", model=model, parallelize=parallelize)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert all(tensor.is_meta for tensor in model.state_dict().values())

    def fails(model: nn.Module, mesh: object) -> None:
        raise KeyError(f"rank {dist.get_rank()} of {dist.get_world_size()}")

    with pytest.raises(KeyError, match="rank 0 of 6"):
        planned("a=2,b=3", parallelize=fails, ranks=[0])
    assert not dist.is_initialized()
    torchlift.materialize(model)


def test_a_function_may_return_another_module_or_wrap_layers(planned) -> None:
    """Wrappers add to the path of a parameter, not to its name."""

    def wraps(model: nn.Module, mesh: object) -> nn.Module:
        parallelize(model, mesh)
        for n, layer in enumerate(model.layers):
            model.layers[n] = checkpoint_wrapper(layer)
        return torch.compile(model, backend="eager")

    for dtype in (None, torch.float16):
        plain = planned("fsdp=2,tp=2", parallelize=parallelize, dtype=dtype, ranks=[0])
        wrapped = planned("fsdp=2,tp=2", parallelize=wraps, dtype=dtype, ranks=[0])
        assert wrapped.local_bytes == plain.local_bytes


def test_fsdp_shards_where_it_is_told(tmp_path: Path) -> None:
    """Uneven shards, another dimension and ignored parameters are those of `fully_shard`."""
    path, model = tmp_path / "linear.pt", torchlift.skeleton(nn.Linear, 8, 6)
    torch.save(nn.Linear(8, 6).state_dict(), path)
    assert simulate(path, "fsdp=4", model=model).bytes == (72, 72, 72, 0)

    def along_columns(model, mesh) -> None:
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1))

    found = simulate(path, "fsdp=4", model=model, parallelize=along_columns)
    assert found.bytes == (48 + 8, 48 + 8, 48 + 8, 48)

    def leaves_the_weight(model, mesh) -> None:
        fully_shard(model, mesh=mesh, ignored_params={model.weight})

    found = simulate(path, "fsdp=4", model=model, parallelize=leaves_the_weight)
    assert found.bytes == (200, 200, 200, 192)


def test_without_a_model_all_tensors_of_the_file_are_sharded(saved: Path) -> None:
    """Below the root, under the new names, and without the keys that are dropped."""
    found = simulate(saved, "fsdp=2", root="model")
    assert sum(found.bytes) == PARAMETERS + 16
    half = simulate(saved, "fsdp=2", root="model", dtype=torch.float16)
    assert (half.bytes, sum(half.local_bytes)) == (found.bytes, (PARAMETERS + 16) // 2)
    fewer = simulate(
        saved, "fsdp=2", root="model", rename=lambda key: None if "norm" in key else key
    )
    assert sum(fewer.bytes) == PARAMETERS + 16 - 8 * 256


def test_names_and_shapes_that_do_not_match_are_the_plans_error(saved: Path) -> None:
    """One strict error before any rank starts; else the plan lists them."""
    model = torchlift.skeleton(Model)
    with pytest.raises(MismatchError, match=r"remap\.strip"):
        simulate(saved, "fsdp=2", model=model, root="model")

    class Wider(Model):
        def __init__(self) -> None:
            super().__init__()
            self.layers[0].norm = nn.LayerNorm(6)

    given = {"model": torchlift.skeleton(Wider), "root": "model", "rename": remap.strip("module")}
    with pytest.raises(MismatchError, match="mismatched"):
        simulate(saved, "fsdp=2", **given)
    found = simulate(saved, "fsdp=2", **given, strict=False, ignore_mismatched=True)
    assert list(found.plan.mismatched) == ["layers.0.norm.weight", "layers.0.norm.bias"]
    assert sum(found.bytes) == PARAMETERS + 2 * 16 - 2 * 256


def _renames(model, mesh) -> None:
    model.added = model.layers
    del model.layers


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (_renames, MismatchError, r"missing \(24\): added\.0\.q_proj\.weight"),
        (lambda model, mesh: (model,), ValueError, "parallelize= returned <class 'tuple'>"),
    ],
)
def test_a_function_that_makes_another_model_is_refused(planned, function, error, message) -> None:
    """Its names are compared with the checkpoint's on every rank."""
    with pytest.raises(error, match=message):
        planned("fsdp=2", parallelize=function, ranks=[1])


def test_arguments_that_do_not_go_together_are_refused(saved: Path, planned) -> None:
    """A function needs a model, and the ranks must be of the mesh."""
    with pytest.raises(ValueError, match="parallelize= needs the model"):
        simulate(saved, "tp=4", parallelize=parallelize)
    for ranks in ([], [4], [-1]):
        with pytest.raises(ValueError, match="expected ranks below 4"):
            planned("fsdp=4", ranks=ranks)


@pytest.mark.parametrize("mesh", ["tp=2", "fsdp=2,tp=2", "pp=2,fsdp=2", "dp=2", "a=2,dp=2,fsdp=2"])
def test_dimensions_that_no_name_explains_need_a_function(planned, mesh: str) -> None:
    """Only the user's code knows what such a dimension does to each tensor."""
    with pytest.raises(ValueError, match="pass a model and your own function"):
        planned(mesh)


@pytest.mark.parametrize(
    ("mesh", "message"),
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
        ({}, "at least one dimension"),
        ({"fsdp": 2.0}, "has size 2.0"),
        ({"fsdp": "2"}, "has size '2'"),
    ],
)
def test_a_mesh_that_is_not_valid_is_refused(mesh, message: str) -> None:
    """The message names the part that was not understood."""
    with pytest.raises(ValueError, match="mesh") as caught:
        parse_mesh(mesh)
    assert message in str(caught.value)


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_simulation_equals_what_every_rank_reads_and_holds(tmp_path: Path, ranks: int) -> None:
    """On meshes of one to three dimensions: FSDP, HSDP, TP and FSDP over TP, on uneven sizes."""
    out = tmp_path / str(ranks)
    out.mkdir()
    checks = run_workers(WORKERS, ranks, out)
    assert len(checks) >= 7  # none was skipped
    assert {check: text for check, text in checks.items() if text} == {}
    records = json.loads((out / "records").read_text(encoding="utf-8"))
    assert len(records) >= len(checks) - 1
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
        assert len(found.ranks) == math.prod(found.mesh.values())
        assert list(found.bytes) == real["bytes"], real
        assert list(found.local_bytes) == real["local_bytes"], real

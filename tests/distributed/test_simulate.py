"""What a mesh would read, computed without one."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch
from ranks import run_workers
from torch import nn

import torchlift
from torchlift._checkpoint import Checkpoint
from torchlift.distributed.meshes import parse_mesh, stages
from torchlift.distributed.simulation import simulate
from torchlift.formats import Chunk, Index, TensorEntry

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


def test_tensor_parallel_cuts_by_name() -> None:
    """Columns of what multiplies, rows of what is multiplied, norms and late biases whole."""
    model = torchlift.skeleton(Model)
    found = simulate(model, "tp=4")
    state = model.state_dict()
    whole = sum(
        t.nbytes for k, t in state.items() if "norm" in k or k == "count" or "o_proj.bias" in k
    )
    rest = sum(t.nbytes for t in state.values()) - whole
    assert found.bytes == (whole + rest // 4,) * 4
    # Rows of a matrix cut along its second dimension are byte ranges of their own.
    assert found.requests[0] > len(state)
    own = simulate(model, "tp=4", tp=lambda key, shape: None)
    assert own.bytes == (sum(t.nbytes for t in state.values()),) * 4


def test_pipeline_stages_share_out_the_layers() -> None:
    """Each stage reads its layers; what comes before the first belongs to the first."""
    model = torchlift.skeleton(Model)
    found = simulate(model, "pp=4")
    assert found.bytes[1] == found.bytes[2]
    first = model.embed_tokens.weight.nbytes + model.count.nbytes
    assert found.bytes[0] - found.bytes[1] == first
    assert sum(found.bytes) == sum(t.nbytes for t in model.state_dict().values())


def test_thousands_of_ranks_take_seconds() -> None:
    """A three-dimensional mesh of 4096 ranks and a model that fits nowhere here."""
    model = torchlift.skeleton(Model, 8192, 24)
    start = time.perf_counter()
    found = simulate(model, "pp=4,fsdp=128,tp=8")
    assert time.perf_counter() - start < 20
    assert found.ranks == 4096
    assert max(found.bytes) < 2 * found.nbytes / 4096 + 2**22


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
    ("text", "said"),
    [
        ("", "'' is not a mesh dimension such as fsdp=8"),
        ("fsdp", "'fsdp' is not a mesh dimension such as fsdp=8"),
        ("fsdp=2,", "'' is not a mesh dimension"),
        ("fsdp=x", "'fsdp=x' is not a mesh dimension"),
        ("fsdp=\u00b2", "is not a mesh dimension"),
        ("fsdp=0", "mesh dimension 'fsdp' has size 0"),
        ("fsdp=-1", "mesh dimension 'fsdp' has size -1"),
        ("warp=4", "'warp' is not a mesh dimension; known are fsdp, dp_shard, shard, cp, ep, dp,"),
        ("tp=2, tp =2", "mesh dimension 'tp' is given twice"),
        ("fsdp=1000000000", "a mesh of more than 1,048,576 ranks"),
        ("fsdp=2000,tp=2000", "a mesh of more than 1,048,576 ranks"),
        ("fsdp=" + "9" * 5000, "a mesh of more than 1,048,576 ranks"),
    ],
)
def test_a_mesh_that_means_nothing_is_refused(text: str, said: str) -> None:
    """The message says what was not understood."""
    with pytest.raises(ValueError, match="mesh") as caught:
        parse_mesh(text)
    assert said in str(caught.value)


@pytest.mark.parametrize("mesh", [{}, {"fsdp": 2.0}, {"fsdp": "2"}, {3: 2}])
def test_a_mapping_that_is_no_mesh_is_refused(mesh) -> None:
    """As its text would be."""
    with pytest.raises(ValueError, match="mesh"):
        simulate(torchlift.skeleton(nn.Linear, 2, 2), mesh)


def test_an_unknown_style_is_refused() -> None:
    """A style that nobody knows would silently count as replicated."""
    with pytest.raises(ValueError, match="'diagonal' is not a tensor-parallel style"):
        simulate(torchlift.skeleton(nn.Linear, 2, 2), "tp=2", tp={"*": "diagonal"})


def test_uneven_shards_are_torch_s() -> None:
    """Ten rows over four ranks are 3, 3, 3 and 1."""
    found = simulate(torchlift.skeleton(nn.Linear, 1, 10, bias=False), "fsdp=4")
    assert found.bytes == (12, 12, 12, 4)
    assert math.fsum(found.bytes) == 40


@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_rank_reads_and_holds_what_was_foretold(tmp_path: Path, ranks: int) -> None:
    """On meshes of one to three dimensions: FSDP, HSDP, TP and FSDP over TP, on uneven sizes."""
    out = tmp_path / str(ranks)
    out.mkdir()
    found = run_workers(WORKERS, ranks, out)
    assert len(found) >= 7  # none was skipped
    assert {check: text for check, text in found.items() if text} == {}


def test_several_sharded_dimensions_are_one(tmp_path: Path) -> None:
    """Ten rows over two times two are 3, 3, 3 and 1, as over four."""
    model = torchlift.skeleton(nn.Linear, 1, 10, bias=False)
    assert simulate(model, "dp_shard=2,cp=2").bytes == (12, 12, 12, 4)
    assert simulate(model, "dp_shard=2,replicate=2,cp=2").bytes == (12, 12, 12, 12, 12, 4, 12, 4)


def test_an_embedding_lies_the_other_way_round() -> None:
    """Rowwise cuts its vocabulary in torch: 10 words over 4 ranks, not 3 columns."""
    model = torchlift.skeleton(nn.Sequential, nn.Embedding(10, 3), nn.Linear(3, 10, bias=False))
    rows = {"0": "rowwise", "1": None}
    assert simulate(model, "tp=4", tp=rows).bytes == (156, 156, 156, 132)
    assert simulate(model, "tp=4", tp={"0": "colwise", "1": None}).bytes == (160, 160, 160, 120)
    assert simulate(model, "tp=4", tp={"*": "embedding_rowwise"}).bytes == (72, 72, 72, 24)


def test_a_tensor_without_that_dimension_stays_whole() -> None:
    """The bias of a layer whose matrix is cut along dimension 1."""
    model = torchlift.skeleton(nn.Linear, 8, 4)
    assert simulate(model, "tp=4", tp={"*": 1}).bytes == (48,) * 4
    assert simulate(model, "tp=4", tp=lambda key, shape: 1).bytes == (48,) * 4


def test_the_head_belongs_to_the_last_stage_in_any_order() -> None:
    """A safetensors file has it before the first layer; a number may have any length."""
    names = ["lm_head.weight", "model.embed_tokens.weight", "model.layers.0.w", "model.layers.3.w"]
    assert stages([*names, "model.norm.weight"], 4) == [3, 0, 0, 3, 3]
    assert stages(["w." + "9" * 5000 + ".b", "w.0.b"], 2) == [1, 0]


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
    found = simulate(_written_by(1024, 8192, 64), "fsdp=1024,tp=8")
    assert time.perf_counter() - start < 20
    assert sum(nbytes for nbytes, _ in found.files.values()) == sum(found.bytes) == found.nbytes

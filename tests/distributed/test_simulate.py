"""What a mesh would read, computed without one."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import torchlift
from torchlift.distributed.simulation import parse_mesh, simulate


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
    "text", ["fsdp", "fsdp=0", "fsdp=x", "warp=4", "tp=2,tp=2", "fsdp=2000000"]
)
def test_a_mesh_that_means_nothing_is_refused(text: str) -> None:
    """The message says what was not understood."""
    with pytest.raises(ValueError, match="mesh"):
        parse_mesh(text)


def test_an_unknown_style_is_refused() -> None:
    """A style that nobody knows would silently count as replicated."""
    with pytest.raises(ValueError, match="'diagonal' is not a tensor-parallel style"):
        simulate(torchlift.skeleton(nn.Linear, 2, 2), "tp=2", tp={"*": "diagonal"})


def test_uneven_shards_are_torch_s() -> None:
    """Ten rows over four ranks are 3, 3, 3 and 1."""
    found = simulate(torchlift.skeleton(nn.Linear, 1, 10, bias=False), "fsdp=4")
    assert found.bytes == (12, 12, 12, 4)
    assert math.fsum(found.bytes) == 40

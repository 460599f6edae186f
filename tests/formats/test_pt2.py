"""Exported programs: the state dict that torch.export.load gives, without the program."""

from __future__ import annotations

import io
import subprocess
import sys
import warnings
import zipfile

import pytest
import torch
from checkpoint_files import same_as
from torch import nn

import torchlift

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.export, about its own use of torch


class Model(nn.Module):
    """Ties, views, a non-persistent buffer, constants and a dtype of half precision."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight
        self.bf = nn.Parameter(torch.randn(4, dtype=torch.bfloat16)[1:3])
        self.register_buffer("t", torch.arange(12.0).reshape(3, 4).t())
        self.register_buffer("passing", torch.ones(2), persistent=False)
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("count", torch.tensor(3))
        self.plain = torch.full((3,), 2.0)

    def forward(self, x):
        """Use them all."""
        total = self.passing.sum() + self.t.sum() + self.bf.sum() + self.count + self.empty.sum()
        return self.one(x) + self.two(x) + self.plain + total + torch.tensor([1.0, 2.0, 3.0])


@pytest.fixture(scope="module")
def program():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(Model(), (torch.ones(3),))


@pytest.fixture
def path(program, tmp_path):
    torch.export.save(program, tmp_path / "m.pt2")
    return tmp_path / "m.pt2"


def compare(ckpt, program):
    """Whether a file has the tensors of a program."""
    expected = program.state_dict
    assert sorted(ckpt) == sorted(expected)
    return all(same_as(value.detach(), ckpt[key]) for key, value in expected.items())


def test_weights_are_those_of_torch(path, program):
    """Names, values, strides, ties and which are parameters."""
    ckpt = torchlift.open(path)
    assert ckpt.format == "pt2"
    assert compare(ckpt, torch.export.load(path))
    assert ("one.weight", "two.weight") in ckpt.aliases
    parameters = {key for key, entry in ckpt.entries.items() if entry.is_parameter}
    assert parameters == dict(Model().named_parameters(remove_duplicate=False)).keys()
    assert ckpt.entries["bf"].chunks[0].nbytes == 4
    assert torchlift.verify(path).ok


def test_a_model_loads_from_a_program(path, program):
    """Into the Python class, whose constants are its own."""
    model = Model()
    torchlift.load(model, path)
    assert all(torch.equal(program.state_dict[k], v) for k, v in model.state_dict().items())


def old(program, path, inner):
    """The same weights as torch before 2.8 or 2.9 wrote them: whole files inside the archive."""

    def saved(values):
        buffer = io.BytesIO()
        torch.save(values, buffer)
        return buffer.getvalue()

    state, constants = saved(program.state_dict), saved(program.constants)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in inner(state, constants).items():
            archive.writestr(name, data)
    return torchlift.open(path)


def test_files_inside_the_archive_are_read_where_they_are(program, tmp_path):
    """As torch 2.5 and 2.8 wrote them."""
    flat = old(program, tmp_path / "a", lambda state, constants: {
        "serialized_exported_program.json": b"{}", "serialized_state_dict.pt": state,
        "serialized_constants.pt": constants, "version": b"8.2",
    })  # fmt: skip
    nested = old(program, tmp_path / "b", lambda state, constants: {
        "m/archive_format": b"pt2", "m/.data/version": b"6", "m/models/model.json": b"{}",
        "m/data/weights/model.pt": state, "m/data/constants/model.pt": constants,
    })  # fmt: skip
    for ckpt in (flat, nested):
        assert ckpt.format == "pt2"
        assert compare(ckpt, program)
        assert ("one.weight", "two.weight") in ckpt.aliases


def test_several_programs_come_under_their_names(tmp_path):
    """One archive, two programs."""
    from torch.export.pt2_archive._package import package_pt2

    programs = {
        name: torch.export.export(nn.Linear(2, size), (torch.ones(2),))
        for name, size in (("small", 1), ("large", 3))
    }
    package_pt2(str(tmp_path / "m.pt2"), exported_programs=programs)
    ckpt = torchlift.open(tmp_path / "m.pt2")
    assert sorted(ckpt) == ["large.bias", "large.weight", "small.bias", "small.weight"]
    assert torch.equal(ckpt["large.weight"], programs["large"].state_dict["weight"])
    assert list(torchlift.open(tmp_path / "m.pt2", root="small")) == ["weight", "bias"]


def test_reading_a_program_does_without_torch(path):
    """Neither torch nor an unpickler is loaded."""
    code = (
        "import sys, torchlift.formats.detect\n"
        "assert torchlift.formats.detect.read_index(sys.argv[1]).entries\n"
        "assert not {'torch', 'pickle', '_pickle', 'zipfile'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, path], check=True)

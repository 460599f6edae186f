"""`remap.dispatch`: a module that is spread over devices runs and gives what it gave before.

Without an accelerator the only device with values is the host. What an accelerator would do is
tested with it in both roles (weights come for a call and go again), and with meta, which takes
inputs and gives no values, as the other device. tests/gpu has the real thing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from in_code import in_code
from small_models import saved, state_of
from torch import nn

import torchlift
from torchlift import remap
from torchlift._model.slots import Group, collect
from torchlift.errors import PlacementError
from torchlift.remap.dispatching import Spread, run, stops

hooks = pytest.importorskip("accelerate.hooks")


class Block(nn.Module):
    """A residual, a parameter of its own, a hidden buffer and an argument in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.fc = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4))
        self.register_buffer("shift", torch.rand(4), persistent=False)

    def forward(self, x: torch.Tensor, *, more: dict[str, torch.Tensor]) -> torch.Tensor:
        return x + self.fc(self.norm(x)) * self.scale + self.shift + more["x"]


class Model(nn.Module):
    """Blocks, an attention that reads a weight of a layer it does not call, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, more={"x": x})
        return self.head(self.attention(x, x, x)[0])


IDS = torch.tensor([[1, 2, 3]])


class Streamed(Spread):
    """What is on disk comes to the main device for a call, as if that were an accelerator."""

    def is_away(self, group: Group) -> bool:
        return self.kept[id(group)] == "disk"


def spread(
    model: nn.Module, device: Callable[[str], str], kind: type[Spread] = Spread, main: str = "cpu"
) -> Spread:
    """A spread by name."""
    groups = collect(model)
    return kind(groups, {id(group): device(group.fqn) for group in groups}, main)


@pytest.fixture
def model() -> Model:
    """In evaluation mode, with weights that are the same every time."""
    torch.manual_seed(0)
    return Model().eval()


@pytest.mark.parametrize(
    "device",
    [
        lambda name: "disk",
        lambda name: "disk" if name.startswith("blocks.1") else "cpu",
        lambda name: "disk" if "fc" in name else "cpu",
    ],
    ids=["everything", "a block", "layers of blocks"],
)
def test_weights_come_for_a_call_and_go_again(model, device) -> None:
    """The output is the same bit by bit; between calls nothing of them stays."""
    expected = model(IDS)
    away = [name for name, _ in model.named_parameters() if device(name) == "disk"]
    run(model, spread(model, device, Streamed))
    for _ in range(2):
        assert torch.equal(model(IDS), expected)
        assert all(model.get_parameter(name).is_meta for name in away)
    hooks.remove_hook_from_module(model, recurse=True)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model(IDS), expected)


def test_inputs_go_to_where_a_part_of_the_module_is(model) -> None:
    """Residuals and what a dict holds too, from block to block, once a part begins."""
    devices: dict[str, set[str]] = {}
    for name, module in model.named_modules():

        def note(_: nn.Module, args: tuple[object, ...], kwargs: dict, name: str = name) -> None:
            found = [*args, *kwargs.get("more", {}).values()]
            devices[name] = {str(a.device) for a in found if isinstance(a, torch.Tensor)}

        module.register_forward_pre_hook(note, with_kwargs=True)
    run(model, spread(model, lambda name: "meta" if name.startswith("blocks.2") else "cpu"))
    with pytest.raises(NotImplementedError, match="meta"):  # no values come back from there
        model(IDS)
    assert devices["blocks.1"] == devices["blocks.1.fc"] == {"cpu"}
    assert devices["blocks.2.norm"] == devices["blocks.2.fc"] == {"meta"}


def test_hooks_are_where_tensors_are_and_where_a_part_begins(model) -> None:
    """A container that runs on one device gets one; lists and the root of a mixture get none."""
    spread_out = spread(model, lambda name: "cuda:1" if name.startswith("blocks.2") else "cuda:0")
    found = stops(model, spread_out, (nn.MultiheadAttention,))
    assert "" not in found
    assert "blocks." not in found
    assert found["blocks.2."].device == "cuda:1"
    assert found["attention."].device == found["head."].device == "cuda:0"
    assert not any(name.startswith("attention.out_proj") for name in found)


def test_a_map_without_an_accelerator_needs_no_hooks(model, tmp_path) -> None:
    """What is on disk is paged in as it is used; the tensors stay the ones that were loaded."""
    expected = model(IDS)
    path = saved(model.state_dict(), tmp_path)
    loaded = torchlift.skeleton(Model).eval()
    device_map = remap.by_key({"": "cpu", "blocks": "disk"})
    torchlift.load(loaded, path, device=device_map)
    for block, original in zip(loaded.blocks, model.blocks, strict=True):
        block.shift.copy_(original.shift)  # hidden buffers are made anew, with random numbers
    before = state_of(loaded)
    assert remap.dispatch(loaded, device_map) is loaded
    assert state_of(loaded) == before
    assert not hasattr(loaded, "_hf_hook")
    assert torch.equal(loaded(IDS), expected)


def test_without_a_map_the_tensors_say_where_they_are(model) -> None:
    """All on the host: nothing to do."""
    assert not hasattr(remap.dispatch(model), "_hf_hook")


def test_a_module_on_meta_has_nothing_to_run_with() -> None:
    """The way out is named."""
    with pytest.raises(PlacementError, match=r"2 tensors are on meta .* torchlift\.load"):
        remap.dispatch(torchlift.skeleton(nn.Linear, 3, 2), {"": "cpu"})


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"blocks": "cpu", "bloks.1": "disk"}, "'bloks.1': is mapped, but no tensor"),
        ({"blocks": "nochip:0"}, "'blocks': cannot go"),
    ],
)
def test_a_map_that_cannot_be_followed_changes_nothing(model, device_map, message) -> None:
    """As for load."""
    before = state_of(model)
    with pytest.raises(PlacementError, match=message):
        remap.dispatch(model, device_map)
    assert state_of(model) == before


@pytest.mark.parametrize(
    ("model", "device", "message"),
    [
        (
            nn.Sequential(nn.Linear(2, 2)),
            lambda name: "meta" if name.endswith("bias") else "cpu",
            r"'0': .* own tensors on several devices; .* weight on cpu, bias on meta\. Map the mod",
        ),
        (nn.LSTM(2, 2), lambda name: "disk", "a recurrent layer holds on to its weights"),
    ],
)
def test_a_module_that_cannot_run_so_is_refused_and_left_alone(model, device, message) -> None:
    """Before the first tensor is moved."""
    before = state_of(model)
    with pytest.raises(PlacementError, match=message):
        run(model, spread(model, device, Streamed))
    assert state_of(model) == before


def test_accelerate_is_named_where_it_is_needed_and_missing() -> None:
    """With the extra that brings it; what needs no hooks works without it."""
    code = (
        "import sys; sys.modules['accelerate'] = None\n"
        "from torch import nn\n"
        "from torchlift import remap\n"
        "from torchlift.remap.dispatching import Spread, run\n"
        "from torchlift._model.slots import collect\n"
        "model = remap.dispatch(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), {'': 'cpu'})\n"
        "groups = collect(model)\n"
        "kept = {id(g): 'meta' if g.fqn < '1' else 'cpu' for g in groups}\n"
        "try: run(model, Spread(groups, kept, 'cpu'))\n"
        "except ModuleNotFoundError as error: print(error)\n"
        "print(model[0].weight.device)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'torchlift[accelerate]'" in done.stdout, done.stderr
    assert done.stdout.endswith("cpu\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["llama-tied", "gemma3", "mixtral", "gpt2", "bert", "t5", "whisper", "vit", "resnet"]
)
def test_real_architectures_give_the_same_with_every_weight_on_disk(family) -> None:
    """The reference is the same module before."""
    from model_families import FAMILIES

    factory, config, inputs = FAMILIES[family]
    torch.manual_seed(0)
    model, given = factory(config).eval(), inputs()
    skip = getattr(model, "_skip_keys_device_placement", None)
    with torch.no_grad():
        expected = model(**given)
        run(model, spread(model, lambda name: "disk", Streamed), skip_keys=skip)
        found = model(**given)
    assert all(parameter.is_meta for parameter in model.parameters())
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[key], value), key


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is told by /proc")
def test_what_is_on_disk_is_never_held_in_memory(tmp_path: Path) -> None:
    """128 MiB of weights run with less than 32 MiB of anonymous memory."""
    path = str(tmp_path / "model.pt")
    make = """
import torch
from torch import nn
make = lambda: nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))
"""
    # In a process of its own, whose freed memory the measured one cannot use again.
    in_code("torch.save(make().state_dict(), args[0])", path, setup=make)
    setup = (
        make
        + """
import torchlift
from torchlift import remap
import torchlift._plan.fetch
torch.set_num_threads(1)
remap.dispatch
with torch.no_grad(): nn.Linear(8, 8)(torch.ones(1, 8))
"""
    )
    code = """
model = torchlift.skeleton(make)
device_map = remap.fit(model, {"cpu": "20MiB", "disk": None})
torchlift.load(model, args[0], device=remap.by_key({"": "disk"}))
remap.dispatch(model, device_map)
with torch.no_grad(): result = list(model(torch.ones(1, 2048)).shape)
"""
    child = in_code(code, path, setup=setup)
    assert child.value == [1, 2048]
    assert child.memory.added_anonymous < 32 * 2**20

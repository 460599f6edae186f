"""The state dict functions on several processes: as torch's where torch's are right, else right."""

from __future__ import annotations

import itertools
import random
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as theirs
from ranks import cpu_mesh, on
from state_models import FROM_0, ON_0, WHOLE, set_both
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from wrapped_models import (
    MESHES,
    NOT_SHARDED,
    OPTIMIZERS,
    WRAPPERS,
    Net,
    built,
    cloned,
    containers,
    fsdp,
    fsdp1,
    net,
    same,
    train,
)
from zoo import same as same_bits

import torchlift
import torchlift.distributed as ours
from torchlift._model.slots import read_tree
from torchlift.errors import CheckpointError, PlacementError

READ = (
    {},
    {"full_state_dict": True},
    {"full_state_dict": True, "cpu_offload": True},
    {"cpu_offload": True},
    {"flatten_optimizer_state_dict": True},
    {"flatten_optimizer_state_dict": True, "full_state_dict": True},
)
LOAD = (
    {},
    {"full_state_dict": True},
    {"full_state_dict": True, "broadcast_from_rank0": True},
    {"flatten_optimizer_state_dict": True},
)


def reads_as_torch_does(wrap: str, optimizer: str) -> None:
    model, optim = built(wrap, optimizer)
    for options in READ:
        mine = ours.get_state_dict(model, optim, options=ours.StateDictOptions(**options))
        other = theirs.get_state_dict(model, optim, options=theirs.StateDictOptions(**options))
        same(containers(mine[0]), containers(other[0]), f"{options} model")
        same(mine[1], other[1], f"{options} optimizer")


def loads_as_torch_does(wrap: str, optimizer: str) -> None:
    source = built(wrap, optimizer)
    for options in LOAD if optimizer == "adamw" else LOAD[:3:2]:
        read = {k: v for k, v in options.items() if k != "broadcast_from_rank0"}
        states = theirs.get_state_dict(*source, options=theirs.StateDictOptions(**read))
        states = cloned(states)
        if options.get("broadcast_from_rank0") and dist.get_rank():
            states = ({}, {})
        results = []
        for api in (ours, theirs):
            model, optim = built(wrap, optimizer, seed=3, steps=1)
            given = containers(states)
            chosen = api.StateDictOptions(**options)
            # One by one: torch's set_state_dict takes an empty model state dict for "no model",
            # on the ranks that are to receive it as well.
            api.set_model_state_dict(model, given[0], options=chosen)
            api.set_optimizer_state_dict(model, optim, given[1], options=chosen)
            if api is ours:
                same(given, containers(states), "the caller's dict")
            results.append((containers(model.state_dict()), optim.state_dict()))
        same(results[0][0], results[1][0], f"{options} model")
        same(results[0][1]["state"], results[1][1]["state"], f"{options} optimizer")
        groups = [result[1]["param_groups"] for result in results]
        same(*groups, f"{options} groups")


WRAPPED = ("ddp", "fsdp blocks", "tensor parallel")
# A wrapping decides on names and layouts, an optimizer on the states of a parameter. What one
# makes of the other, one wrapping of each kind shows.
PAIRS = {(wrap, "adamw") for wrap in WRAPPERS}
PAIRS |= {
    (wrap, optimizer)
    for wrap in WRAPPED
    for optimizer in OPTIMIZERS.keys() - (() if wrap == "ddp" else NOT_SHARDED)
}


@on(1, pair=[(wrap, "adam") for wrap in WRAPPERS])
@on(2, pair=sorted(PAIRS))
@on(4, pair=[(wrap, "adamw") for wrap in (*MESHES, "fsdp blocks", "tensor parallel")])
def test_states_are_read_and_loaded_as_by_torch(pair: tuple[str, str]) -> None:
    """In every wrapping, for every optimizer in one of each kind, with every option."""
    reads_as_torch_does(*pair)
    loads_as_torch_does(*pair)


def raises(call: Callable[[], object], *words: str) -> None:
    """Every rank raises an error with these words in it."""
    with pytest.raises(ours.StateDictMismatch) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


class Own(nn.Linear):
    """Looks at what it gets, as code that converts an older format does."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.got = {key: (type(value), tuple(value.shape)) for key, value in state.items()}
        super()._load_from_state_dict(state, prefix, *rest)


def with_code(kind: str, meta: bool) -> Any:
    torch.manual_seed(dist.get_rank())
    with torch.device("meta" if meta else "cpu"):
        model = nn.Sequential(nn.Linear(3, 5), Own(5, 7), nn.BatchNorm1d(7))
    if kind == "hook":
        model.register_load_state_dict_pre_hook(lambda *_: None)
    if kind == "tensor parallel":
        mesh = cpu_mesh()
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model[1])
    return fully_shard(model)


@on(2, 4)
def test_a_module_that_loads_itself_gets_what_it_gets_from_torch() -> None:
    """A DTensor with this rank's part of each whole tensor, where it holds DTensors."""
    torch.manual_seed(5)
    source = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7), nn.BatchNorm1d(7)).state_dict()
    for kind, meta, broadcast in itertools.product(
        ("override", "hook", "tensor parallel"), (False, True), (False, True)
    ):
        results = []
        for api in (ours, theirs):
            model = with_code(kind, meta)
            params = list(model.parameters())
            options = api.StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
            given = cloned(dict(source)) if not broadcast or dist.get_rank() == 0 else {}
            assert api.set_model_state_dict(model, given, options=options) == ([], [])
            assert meta or list(map(id, model.parameters())) == list(map(id, params))
            assert all(isinstance(param, nn.Parameter) for param in model.parameters())
            results.append((containers(model.state_dict()), model[1].got))
        same(results[0][0], results[1][0], f"{kind} {meta} {broadcast}")
        assert results[0][1]["1.weight"] == results[1][1]["1.weight"]
        for key, value in results[0][0].items():
            same(value.full_tensor() if hasattr(value, "full_tensor") else value, source[key], key)


@on(2)
def test_offloading_a_broadcast_without_strict_skips_what_the_model_lacks() -> None:
    """pytorch/pytorch#149516: torch raises a KeyError."""
    options = ours.StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True, strict=False
    )
    source = built("fsdp blocks", seed=5)[0]
    full = ours.get_model_state_dict(source, options=WHOLE)
    full = {**full, "nobody.knows": torch.ones(3)}
    del full["inp.bias"]
    model = built("fsdp blocks")[0]
    kept = cloned(model.state_dict()["inp.bias"])
    found = ours.set_model_state_dict(model, full if dist.get_rank() == 0 else {}, options=options)
    assert found == (["inp.bias"], ["nobody.knows"]), found
    same(model.state_dict()["inp.bias"], kept)
    same(model.state_dict()["inp.weight"], source.state_dict()["inp.weight"])


@on(2)
def test_ties_of_what_rank_0_sends_are_those_of_the_model() -> None:
    """Two values for one tensor are refused, and one value for two tensors is copied for each."""
    tied = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    tied["b"].weight = tied["a"].weight
    before = tied["a"].weight.detach().clone()
    state = {"a.weight": torch.ones(2, 2), "b.weight": torch.zeros(2, 2)}
    given = state if dist.get_rank() == 0 else {}
    raises(partial(ours.set_model_state_dict, tied, given, options=FROM_0), "different values")
    same(tied["a"].weight.detach(), before)
    state["b.weight"] = state["a.weight"]
    for model in (tied, nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})):
        model.to("meta")
        for layer in model.values():
            layer.bias = None
        ours.set_model_state_dict(model, given and state, options=FROM_0)
        same(dict(model.state_dict()), {key: torch.ones(2, 2) for key in state})
    assert model["a"].weight.data_ptr() != model["b"].weight.data_ptr()


@on(2)
def test_each_stage_of_a_pipeline_takes_its_own_part() -> None:
    """The state dict of rank 0 holds the stages of all ranks."""
    whole = nn.ModuleDict({"0": nn.Linear(3, 4), "1": nn.Linear(4, 5)})
    mine = nn.ModuleDict({str(dist.get_rank()): nn.Linear(*((3, 4), (4, 5))[dist.get_rank()])})
    optim = torch.optim.Adam(mine.parameters())
    other = torch.optim.Adam(whole.parameters())
    train(other)
    states = ours.get_state_dict(whole, other)
    set_both(mine, optim, states if dist.get_rank() == 0 else ({}, {}), options=FROM_0)
    for name, value in mine.state_dict().items():
        same(value, states[0][name], name)
    found = ours.get_optimizer_state_dict(mine, optim)["state"]
    for name, value in found.items():
        same(value, states[1]["state"][name], name)


@on(2, 4)
def test_a_sharded_meta_model_receives_what_it_lacks() -> None:
    source = built("fsdp blocks", seed=5)[0]
    full = ours.get_model_state_dict(source, options=WHOLE)
    for broadcast in (False, True):
        with torch.device("meta"):
            model = Net()
        model = fsdp(model)
        options = ours.StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        given = cloned(full) if not broadcast or dist.get_rank() == 0 else {}
        # No state dict has a buffer that is not persistent: torch leaves it on meta in silence.
        call = partial(ours.set_model_state_dict, model, given, options=options)
        raises(call, "1 tensor is on meta", "hidden")
        assert all(tensor.is_meta for tensor in model.parameters())
        model.hidden = torch.zeros(3)
        call()
        same(containers(model.state_dict()), containers(source.state_dict()))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(4, 5)).sum().backward()
        optim.step()


@on(2)
def test_whole_moments_without_full_state_dict_are_an_error() -> None:
    model, optim = built("fsdp blocks")
    states = ours.get_optimizer_state_dict(model, optim, options=WHOLE)
    raises(lambda: ours.set_optimizer_state_dict(model, optim, states), "full_state_dict=True")


@on(2)
def test_state_dicts_work_between_forward_and_backward() -> None:
    """FSDP2 then holds whole parameters, which the optimizer does not know."""
    model = fully_shard(net(), reshard_after_forward=False)
    optim = torch.optim.Adam(model.parameters())
    train(optim)
    loss = model(torch.ones(4, 5)).sum()
    states = cloned(ours.get_state_dict(model, optim))
    model(torch.ones(4, 5))
    set_both(model, optim, states)
    same(containers(model.state_dict()), containers(states[0]))
    del loss


def parts() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))


def trained_by(model: nn.Module, optim: torch.optim.Optimizer) -> torch.optim.Optimizer:
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    return optim


@on(2)
def test_a_keeper_saves_moments_under_their_names_after_a_validation(folder: Path) -> None:
    """FSDP2 leaves other parameter objects in the model, so no name was found for any moment."""
    model = fully_shard(parts())
    optim = trained_by(model, torch.optim.AdamW(model.parameters()))
    with torch.no_grad():
        model(torch.ones(2, 4))
        keeper = torchlift.Keeper(folder)
        keeper.save(1, model=model, optimizer=optim)
        keeper.wait()
        keys = torchlift.open(keeper.latest()).keys()
        moments = [key for key in keys if key.endswith("exp_avg")]
        assert moments == [f"optimizer.state.{name}.exp_avg" for name in parts().state_dict()]
        model(torch.ones(2, 4))
        again = torch.optim.AdamW(list(read_tree(model).model.parameters()))
        model(torch.ones(2, 4))
        keeper.resume(model=model, optimizer=again)
        same(again.state_dict()["state"], optim.state_dict()["state"])
        keeper.close()


@on(2)
def test_parameters_that_the_model_does_not_use_any_more_are_refused(folder: Path) -> None:
    """Gathered ones ended the process, and replaced ones were saved without a name."""
    gathered = parts()
    for block in gathered[1:]:
        fully_shard(block)
    gathered(torch.ones(2, 4))
    cases = [(gathered, torch.optim.AdamW(gathered.parameters()), "gathered for a forward")]
    for part in ([], [1, 2]):
        model = parts()
        optim = trained_by(model, torch.optim.AdamW(model.parameters()))
        for block in [model[at] for at in part] or [model]:
            fully_shard(block)
        cases.append((model, optim, "does not have any more"))
    for model, optim, words in cases:
        raises(partial(ours.get_optimizer_state_dict, model, optim), words, "after wrapping it")
        empty = {"state": {}, "param_groups": []}
        raises(partial(ours.set_optimizer_state_dict, model, optim, empty), words)
        with torchlift.Keeper(folder) as keeper:
            raises(partial(keeper.save, 1, model=model, optimizer=optim), words)
        optim = torch.optim.AdamW([*read_tree(model).model.parameters()])  # the hint
        names = list(parts().state_dict())
        assert list(ours.get_optimizer_state_dict(model, optim)["state"]) == names


@on(2, 4)
def test_gathered_tensors_are_those_of_torch_on_random_meshes() -> None:
    """Any placements, sizes that ranks do not divide, and dtypes that gloo does not send."""
    count, draw = dist.get_world_size(), random.Random(1)
    shapes = ((2,), (1, 2), (2, 1)) if count == 2 else ((4,), (2, 2), (1, 4), (2, 1, 2))
    meshes = [cpu_mesh(*shape) for shape in shapes]
    dtypes = (torch.float32, torch.int16, torch.bool, torch.float8_e4m3fn, torch.complex64)
    sharded, expected = nn.Module(), {}
    for number in range(60):
        mesh, shape = draw.choice(meshes), draw.choices((0, 1, 2, 3, 5, 8), k=draw.randint(0, 3))
        places = [Replicate(), *map(Shard, range(len(shape)))]
        whole = (torch.randn(shape) * 5).to(draw.choice(dtypes))
        chosen = [draw.choice(places) for _ in range(mesh.ndim)]
        made = distribute_tensor(whole, mesh, chosen, src_data_rank=None)
        sharded.register_buffer(str(number), made)
        expected[str(number)] = whole
    for options in (WHOLE, ON_0):
        found = ours.get_model_state_dict(sharded, options=options)
        assert len(found) == (60 if options is WHOLE or dist.get_rank() == 0 else 0)
        for key, value in found.items():
            assert same_bits(value, expected[key]), key


@on(2)
def test_a_rank_without_memory_stops_all_ranks_before_they_gather() -> None:
    """gloo ended the process with SIGABRT, and on NCCL the other rank waited."""
    mesh = cpu_mesh()
    whole = torch.empty(48, 2**20)  # 192 MiB, which nobody touches
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
    other = {"weight": distribute_tensor(whole, mesh, [Shard(1)], src_data_rank=None)}
    sent = {} if dist.get_rank() else {"weight": whole}
    calls = [
        partial(ours.get_model_state_dict, model, options=WHOLE),
        partial(torchlift.digest, model),
        partial(ours.set_model_state_dict, model, other),
        partial(ours.set_model_state_dict, model, sent, options=FROM_0),
    ]
    torchlift.digest({"ready": torch.ones(1)})
    limits = resource.getrlimit(resource.RLIMIT_AS)
    for call in calls:
        if dist.get_rank() == 1:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + 2**25, limits[1]))
        try:
            with pytest.raises(RuntimeError if dist.get_rank() else CheckpointError) as caught:
                call()
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)
        assert "can't allocate memory" in str(caught.value)
        if dist.get_rank() == 0:
            assert "on rank 1" in str(caught.value)
        dist.barrier()


@on(4)
def test_experts_of_one_group_do_not_stand_for_those_of_another() -> None:
    """The dict of rank 0 had the values of its own group, and the others were lost."""
    mesh = cpu_mesh(2, 2, names=("ep", "dp"))
    torch.manual_seed(dist.get_rank() // 2)
    expert = fully_shard(nn.Linear(4, 2), mesh=mesh["dp"])
    model = nn.ModuleDict({"dense": fully_shard(parts()), "expert": expert})
    optim = torch.optim.AdamW(model.parameters())
    expected = ours.get_state_dict(model, optim, options=WHOLE)
    call = partial(ours.get_state_dict, model, optim, options=ON_0)
    raises(call, "'expert.weight'", "different values", "process_group=")
    found = call(process_group=mesh["dp"].get_group())  # the hint
    same(found, expected if dist.get_rank() % 2 == 0 else ({}, {}))
    for param in expert.parameters():
        nn.init.ones_(param)
    found = ours.get_model_state_dict(model, options=ON_0)
    same(found.get("expert.bias"), None if dist.get_rank() else torch.ones(2))


@on(2)
def test_tensors_of_another_layout_are_passed_whole() -> None:
    """`load` named an option that it lacks."""
    model, target = fully_shard(parts()), fully_shard(parts())
    other = distribute_tensor(torch.ones(4, 4), cpu_mesh(2, 1), [Shard(0), Replicate()])
    state = {**ours.get_model_state_dict(model), "0.weight": other}
    words = "has another layout", "those of get_state_dict with full_state_dict=True"
    with pytest.raises(PlacementError, match=words[0]) as caught:
        torchlift.load(target, state)
    assert words[1] in str(caught.value)
    raises(partial(ours.set_model_state_dict, target, state), *words)
    whole = ours.get_model_state_dict(model, options=WHOLE)
    torchlift.load(target, whole)
    raises(partial(ours.set_model_state_dict, target, whole), "Pass full_state_dict=True")
    ours.set_model_state_dict(target, whole, options=WHOLE)
    same(target.state_dict(), model.state_dict())


class Versioned(nn.Linear):
    _version = 2
    seen: ClassVar[list[object]] = []

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *more: Any) -> None:
        self.seen.append(metadata.get("version"))
        super()._load_from_state_dict(state, prefix, metadata, *more)


@on(2)
def test_fully_sharded_data_parallel_goes_through_torch() -> None:
    source, target = fsdp1(0, Versioned), fsdp1(1, Versioned)
    mine = ours.get_state_dict(*source, options=WHOLE)
    same(
        mine, theirs.get_state_dict(*source, options=theirs.StateDictOptions(full_state_dict=True))
    )
    given = containers(mine)
    set_both(*target, given, options=WHOLE)
    same(given, containers(mine))
    same(ours.get_state_dict(*target, options=WHOLE), mine)
    for chosen in (ours.StateDictOptions(), WHOLE):
        Versioned.seen.clear()
        state = ours.get_model_state_dict(source[0], options=chosen)
        ours.set_model_state_dict(target[0], state, options=chosen)
        assert Versioned.seen == [2], Versioned.seen


@on(2)
def test_no_step_is_taken_for_fully_sharded_data_parallel() -> None:
    """torch's own function takes one for an optimizer without state, hooks included."""
    steps: list[object] = []

    class Foreign(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            steps.append(1)

    model, stepped = fsdp1()
    for make in (torch.optim.Adam, torch.optim.SGD, lambda params: Foreign(params, {"lr": 0.1})):
        optim = make(model.parameters())
        optim.register_step_pre_hook(lambda *_: steps.append(1))
        scheduler = torch.optim.lr_scheduler.ConstantLR(optim)
        before = cloned((dict(model.named_parameters()), optim.state_dict()))
        patched = vars(optim)["step"]
        found = ours.get_optimizer_state_dict(model, optim, options=WHOLE)
        same(cloned((dict(model.named_parameters()), optim.state_dict())), before)
        assert not optim.state
        assert vars(optim)["step"] is patched
        assert all(param.grad is None for param in model.parameters())
        for state in found["state"].values():
            assert state["step"] == 0, state
        assert bool(found["state"]) == isinstance(optim, torch.optim.Adam)
        ours.set_optimizer_state_dict(model, optim, found, options=WHOLE)
        del scheduler
    assert not steps
    saved = ours.get_optimizer_state_dict(model, stepped, options=WHOLE)
    other = torch.optim.Adam(model.parameters())
    ours.set_optimizer_state_dict(model, other, containers(saved), options=WHOLE)
    same(ours.get_optimizer_state_dict(model, other, options=WHOLE)["state"], saved["state"])

"""Every private name of torch that the library uses: a test fails with the name that moved."""

from __future__ import annotations

import ast
import io
import pickletools
import zipfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from int8_weights import Int8
from torch import nn

import torchlift
from torchlift._model import torch_private as private


def test_use_count_counts_who_holds_the_content() -> None:
    """A view does."""
    tensor = torch.zeros(2)
    before = private.use_count(tensor)
    view = tensor.view(1, 2)
    assert private.use_count(tensor) == before + 1
    assert view.shape == (1, 2)


def test_storage_key_and_uses_tell_who_shares_memory() -> None:
    """Two tensors over one memory have one key, and count twice."""
    tensor = torch.zeros(2)
    key = private.storage_key(tensor)
    before = private.storage_uses(key)
    other = tensor.detach()
    assert private.key_of(tensor.untyped_storage()) == key
    assert private.storage_key(other) == key != private.storage_key(torch.zeros(2))
    assert private.memory_of(other) == key
    assert private.memory_of(torch.eye(2).to_sparse()) is None
    assert private.storage_uses(key) == before + 1


def test_a_hollow_storage_is_pickled_as_one_on_the_cpu() -> None:
    """It has a size and no memory; torch.save leaves a hole for it."""
    storage = private.hollow_storage(1 << 50)
    assert storage.nbytes() == 1 << 50
    assert storage.data_ptr() == 0
    typed = private.typed_storage(private.hollow_storage(8), torch.float32)
    file = io.BytesIO()
    with torch.serialization.skip_data():
        torch.save([typed, private.hollow_storage(3)], file)
    with zipfile.ZipFile(file) as archive:
        assert [archive.getinfo(f"archive/data/{n}").file_size for n in range(2)] == [8, 3]
        pickled = archive.read("archive/data.pkl")
    names = [argument for op, argument, _ in pickletools.genops(pickled) if "UNICODE" in op.name]
    assert names == ["storage", "0", "cpu", "1"]
    assert b"torch\nFloatStorage\n" in pickled


def test_fits_data_says_what_data_can_be_set() -> None:
    """A dense tensor does not take a sparse one's."""
    assert private.fits_data(torch.zeros(2), torch.zeros(3))
    assert not private.fits_data(torch.zeros(2), torch.zeros(2).to_sparse())


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", sorted(private.COMPRESSED, key=str))
def test_data_of_a_compressed_sparse_tensor_cannot_be_set(layout: torch.layout) -> None:
    """torch raises no error, and leaves the values as they are."""
    blocks = (1, 1) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    old, new = (
        (torch.eye(2) * number).to_sparse(layout=layout, blocksize=blocks) for number in (1, 3)
    )
    assert not private.fits_data(old, new)
    old.data = new
    assert old.values().flatten().tolist() == [1, 1]


def test_make_subclass_keeps_the_memory() -> None:
    """The parameter is over the tensor's own bytes."""
    tensor = torch.zeros(2)
    made = private.make_subclass(nn.Parameter, tensor, True)
    assert type(made) is nn.Parameter
    assert made.requires_grad
    assert made.data_ptr() == tensor.data_ptr()


def test_a_wrapper_is_made_without_memory() -> None:
    """Of the sizes that it is to show, by what a class's own constructor calls."""
    wrapper = private.make_wrapper(Int8, (2, 3), (1, 2), torch.float16, True)
    found = type(wrapper), wrapper.shape, wrapper.stride(), wrapper.dtype, wrapper.requires_grad
    assert found == (Int8, (2, 3), (1, 2), torch.float16, True)


def test_flat_references_are_a_recurrent_layer_s_own() -> None:
    """One weak reference for each weight, in the same order."""
    layer = nn.LSTM(2, 3)
    references = getattr(layer, private.FLAT_REFERENCES)
    weights = getattr(layer, private.FLAT_WEIGHTS)
    assert [reference() for reference in references] == weights


def test_lazy_and_lazy_hook_are_those_of_lazy_modules() -> None:
    """The hook gives a parameter its shape from the state dict."""
    layer = nn.LazyLinear(2)
    assert isinstance(layer.weight, private.LAZY)
    hooks = layer._load_state_dict_pre_hooks.values()
    assert any(
        getattr(getattr(hook, "hook", hook), "__func__", None) is private.LAZY_HOOK
        for hook in hooks
    )


def test_norm_base_is_that_of_batch_norm() -> None:
    """It adds a counter to old files."""
    assert isinstance(nn.BatchNorm1d(2), private.NormBase)


def test_incompatible_keys_is_what_load_state_dict_returns() -> None:
    """A tuple of two lists."""
    found = nn.Linear(1, 1).load_state_dict({}, strict=False)
    assert type(found) is private.IncompatibleKeys


def test_compiled_and_checkpointed_modules_are_children_by_these_names() -> None:
    """Under another name the state dict of a wrapped model would get other keys in silence."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Linear(1, 1)
    compiled = torch.compile(model, backend="eager")
    assert compiled._modules == {private.COMPILED: model}
    assert checkpoint_wrapper(model)._modules == {private.CHECKPOINTED: model}
    # It cannot be made without a process group; its attribute by that name is public.
    names = FullyShardedDataParallel.module.fget.__code__.co_names  # type: ignore[attr-defined]
    assert private.FULLY_SHARDED in names


def test_flattened_parameters_have_this_attribute() -> None:
    """Without it one rank's piece of an optimizer would be saved for the whole."""
    from torch.distributed.fsdp import _common_utils

    assert private.FLATTENED == _common_utils.FSDP_FLATTENED


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_dtensors_are_taken_apart_and_put_together() -> None:
    """The local tensor, one like it of another dtype, and the order of mesh dimensions."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 1))
    whole = distribute_tensor(torch.arange(4.0), mesh, (Shard(0), Shard(0)))
    local = private.local_of(whole)
    assert torch.equal(local, torch.arange(4.0))
    made = private.dtensor_like(whole, local.half(), grad=True, parameter=True)
    assert isinstance(made, DTensor)
    assert isinstance(made, nn.Parameter)
    assert (made.dtype, made.requires_grad) == (torch.float16, True)
    assert made.placements == whole.placements
    assert private.shard_order(whole) == ((0, 1),)
    assert private.shard_order(distribute_tensor(torch.ones(1), mesh, (Replicate(),) * 2)) == ()


def test_without_subclasses_and_disabled_are_about_torch_function() -> None:
    """A parameter's class asks for none; inside the block no subclass is asked."""

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    assert nn.Parameter.__torch_function__ is private.DISABLED
    tensor = torch.zeros(1).as_subclass(Loud)
    with private.without_subclasses():
        assert tensor.add(1) == 1


def test_rebuild_v2_and_v3_are_what_a_checkpoint_calls() -> None:
    """The second for a dtype that has no storage class."""
    assert torch.zeros(1)._reduce_ex_internal(2)[0] is private.REBUILD_V2
    assert torch.zeros(1, dtype=torch.uint16)._reduce_ex_internal(2)[0] is private.REBUILD_V3


@pytest.mark.parametrize("strict", [True, False])
def test_strict_of_caller_tells_what_load_state_dict_was_asked_for(strict: bool) -> None:
    """Called by a module's `_load_from_state_dict`, which gets True in any case."""
    seen: list[bool] = []

    class Asking(nn.Linear):
        def _load_from_state_dict(self, *args: Any) -> None:
            seen.append(private.strict_of_caller())
            super()._load_from_state_dict(*args)

    nn.Sequential(Asking(1, 1)).load_state_dict(
        {"0.weight": torch.ones(1, 1), "0.bias": torch.ones(1)}, strict=strict
    )
    assert seen == [strict]
    assert private.strict_of_caller()


def test_no_other_file_uses_these_names() -> None:
    """So that there is one place to look when torch moves one."""
    source = Path(torchlift.__file__).parent
    tree = ast.parse((source / "_model" / "torch_private.py").read_text(encoding="utf-8"))
    names = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_")
    }
    names |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name.startswith("_")
    }
    names -= {"_C", "_replace", "_version"}  # a module has one, too
    assert len(names) > 12
    for path in source.rglob("*.py"):
        if path.name != "torch_private.py":
            used = {
                node.attr
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(node, ast.Attribute)
            }
            assert not used & names, path


def test_dcp_item_is_what_a_distributed_checkpoint_says_of_an_item() -> None:
    """With the attributes that torch's own reader looks at."""
    item = private.dcp_item("__0_0.distcp", 64, 128)
    assert (item.relative_path, item.offset, item.length) == ("__0_0.distcp", 64, 128)
    assert item.transform_descriptors is None


def test_version_of_counts_writes_and_knows_what_is_not_counted() -> None:
    """Neither a lazy parameter nor a tensor of inference mode has a count."""
    tensor = torch.ones(2)
    version = private.version_of(tensor)
    tensor.add_(1)
    assert private.version_of(tensor) == version + 1
    with torch.inference_mode():
        assert private.version_of(torch.ones(2)) == -1
    assert private.version_of(nn.LazyLinear(2).weight) == -1


def test_set_version_takes_writes_back_from_the_count() -> None:
    """Of the tensor, and of every view of it."""
    tensor = torch.zeros(2)
    view, version = tensor[:1], tensor._version
    tensor.add_(1)
    private.set_version(tensor, version)
    assert tensor._version == view._version == version


@pytest.mark.parametrize(("given", "expected"), [(5, 5), (1800, None)])
def test_timeout_of_a_group_is_what_the_job_was_told(given: int, expected: int | None) -> None:
    """None where that is torch's own."""
    store = dist.HashStore()
    dist.init_process_group(
        "gloo", rank=0, world_size=1, store=store, timeout=timedelta(seconds=given)
    )
    try:
        found = private.timeout_of(dist.group.WORLD)
        assert found == (expected and timedelta(seconds=expected))
        for limit in (timedelta(seconds=7), None):
            private.set_timeout(dist.group.WORLD, limit)
            assert private.timeout_of(dist.group.WORLD) == limit
    finally:
        dist.destroy_process_group()


def test_require_fsdp1_state_finds_what_a_state_dict_lacks() -> None:
    """Nested under names, and flat."""
    from torch.distributed.checkpoint import state_dict as own

    model = nn.Linear(1, 1, bias=False)
    optimizers = (torch.optim.SGD(model.parameters(), momentum=0.9),)
    nested: dict[str, object] = {"state": {"weight": {}}, "param_groups": [{"params": ["weight"]}]}
    options = own.StateDictOptions()
    private.require_fsdp1_state(model, optimizers, nested, options)
    with pytest.raises(RuntimeError, match="'weight'"):
        private.require_fsdp1_state(model, optimizers, {**nested, "state": {"a": {}}}, options)
    with pytest.raises(KeyError, match=r"param_groups\.weight\.lr"):
        private.require_fsdp1_state(model, optimizers, {"a": 1}, options)


def test_swap_content_exchanges_what_two_objects_stand_for() -> None:
    """Each object keeps its class and its attributes."""
    one, two = nn.Parameter(torch.zeros(2), requires_grad=False), torch.ones(3)
    one.note = "mine"
    private.swap_content(one, two)
    assert type(one) is nn.Parameter
    assert (one.tolist(), one.note, two.tolist()) == ([1.0, 1.0, 1.0], "mine", [0.0, 0.0])


def test_forbid_address_makes_every_question_for_the_address_an_error() -> None:
    """Of the tensor and of its storage, on meta too; the next kernel works all the same."""
    tensor = torch.empty(2, device="meta")
    private.forbid_address(tensor)
    for ask in (tensor.data_ptr, tensor.untyped_storage().data_ptr, tensor[1:].data_ptr):
        with pytest.raises(RuntimeError, match="data pointer"):
            ask()
    assert tensor.add_(1).is_meta

"""Loading code of a model, a `load_state_dict` of its class included: it ends as in torch."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pairwise import pairwise
from small_models import tensors_of
from torch import nn
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import weight_norm
from zoo import same

import torchlift
from torchlift.distributed import get_model_state_dict, set_model_state_dict

LOCAL, LOCK = threading.local(), threading.RLock()
STATE = dict[str, Any]

# ---- models


class ReadsItsThread(nn.Linear):
    """Scales by a number that the caller has set for this thread."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        scale = getattr(LOCAL, "scale", 1.0)
        scaled = {key: value * scale for key, value in state_dict.items()}
        return super().load_state_dict(scaled, strict)


class Computes(nn.Linear):
    """Multiplies matrices, which autocast changes."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        weight = state_dict["weight"]
        return super().load_state_dict({**state_dict, "weight": (weight @ weight).float()}, strict)


class TakesALock(nn.Linear):
    """Takes a lock that the caller has."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        with LOCK:
            return super().load_state_dict(state_dict, strict)


class DropsMetadata(nn.Module):
    """Passes a plain dict on, so that hooks hear of no version."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.seen = nn.BatchNorm1d(2), []
        self.norm.register_load_state_dict_pre_hook(
            lambda m, s, p, metadata, *_: self.seen.append(metadata.get("version"))
        )

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        return super().load_state_dict(dict(state_dict), strict)


class Assigns(nn.Linear):
    """Lets torch assign."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        return super().load_state_dict(state_dict, strict=strict, assign=True)


class OnlyInner(nn.Module):
    """Calls the method of a child, so that its own hooks do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.calls = nn.Linear(2, 2), 0
        self.register_load_state_dict_pre_hook(self.count)

    def count(self, *_: Any) -> None:
        self.calls += 1

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        inner = {key.removeprefix("module."): value for key, value in state_dict.items()}
        return self.module.load_state_dict(inner, strict)


class Aliases(nn.Module):
    """Gives one tensor two names, and writes to the first one afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        state = dict(state_dict)
        state["b"] = state["a"]
        found = super().load_state_dict(state, strict)
        with torch.no_grad():
            self.a.mul_(2)
        return found


class FillsAHead(nn.Module):
    """A pre-hook drops the keys of a head, which a hook after the load fills."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 3)
        self.register_load_state_dict_pre_hook(self.drop)
        self.register_load_state_dict_post_hook(self.fill)

    @staticmethod
    def drop(module: Any, state: STATE, prefix: str, *_: Any) -> None:
        for key in [key for key in state if key.startswith(prefix + "head.")]:
            del state[key]

    @staticmethod
    def fill(module: Any, keys: Any) -> None:
        keys.missing_keys[:] = [name for name in keys.missing_keys if "head" not in name]
        with torch.no_grad():
            module.head.weight.fill_(3)
            module.head.bias.zero_()


class ClearsItsOwn(nn.Module):
    """A hook of a child clears all names that are missing by then."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.first.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.clear())


class ShapesItself(nn.Module):
    """Gets its shape in a pre-hook, as the lazy `Linear` of PyTorch Geometric does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.parameter.UninitializedParameter()
        self.register_load_state_dict_pre_hook(self.shape_it)

    def shape_it(self, module: Any, state: STATE, prefix: str, *_: Any) -> None:
        if nn.parameter.is_lazy(self.weight):
            self.channels = state[prefix + "weight"].size(-1)
            self.weight.materialize((3, self.channels))


class LoadsTwice(nn.Linear):
    """Loads, changes what it got, and loads again."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        super().load_state_dict(state_dict, strict)
        with torch.no_grad():
            self.weight.mul_(2)
        return super().load_state_dict(state_dict, strict)


class Halves(nn.Sequential):
    """Halves the model that it has loaded."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        found = super().load_state_dict(state_dict, strict)
        self.half()
        return found


class LooksAtNames(nn.Linear):
    """Fills a bias of its own if torch says that it is missing."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        found = super().load_state_dict(state_dict, strict=False)
        if "bias" in found.missing_keys:
            nn.init.constant_(self.bias, 5)
        return found


class TiesItself(nn.Module):
    """Ties its head in a hook after the load."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(2, 2), nn.Linear(2, 2, bias=False)
        self.register_load_state_dict_post_hook(self.tie)

    @staticmethod
    def tie(module: Any, _: Any) -> None:
        module.head.weight = module.emb.weight


class Grows(nn.Module):
    """Makes as many layers as the state has."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.register_load_state_dict_pre_hook(self.grow)

    @staticmethod
    def grow(module: Any, state: STATE, prefix: str, *_: Any) -> None:
        count = sum(name.startswith(f"{prefix}layers.") for name in state)
        module.layers = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(count)])


class WritesOneOfTwo(nn.Module):
    """Changes one of two parameters over one memory after the load."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        self.two.data = self.one.data
        self.register_load_state_dict_post_hook(self.write)

    @staticmethod
    def write(module: Any, _: Any) -> None:
        module.one.data.add_(1)


class WritesAChild(nn.Sequential):
    """Adds to what a child of its first child has loaded, before the next child is loaded."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(2, 2, bias=False)), nn.Linear(2, 2, bias=False))
        self.register_load_state_dict_pre_hook(lambda *_: None)
        self[0].register_load_state_dict_post_hook(self.write)

    @staticmethod
    def write(module: Any, _: Any) -> None:
        module[0].weight.data.add_(1)


class Permuting(nn.Module):
    """Saves the rows of one weight in the order of an older release."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 6), nn.Linear(6, 2)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        found["qkv.weight"] = found["qkv.weight"].flip(0)
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        found = OrderedDict(state_dict)
        found["qkv.weight"] = found["qkv.weight"].flip(0)
        return super().load_state_dict(found, strict, assign)


class Table(nn.Module):
    """Takes the size of its table from the state, and sums the table up at the end."""

    def __init__(self, rows: int = 2) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(rows * 3.0).view(rows, 3))
        self.register_buffer("ends", torch.arange(float(rows)))
        self.total = 0.0

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        self.table = nn.Parameter(torch.empty_like(state_dict["table"]))
        self.ends.resize_(state_dict["ends"].shape)
        found = nn.Module.load_state_dict(self, state_dict, strict=strict)
        self.total = float(self.table.detach().sum())
        return found


class Renaming(nn.Module):
    """Tries the names of an older release when the new ones do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Linear(2, 2)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        try:
            return super().load_state_dict(state_dict, strict)
        except RuntimeError:
            old = {key.replace("old.", "new."): value for key, value in state_dict.items()}
            return super().load_state_dict(old, strict)


class Delegating(nn.Module):
    """Has the state of the module inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Permuting(), nn.Linear(2, 2)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return self.inner.load_state_dict(state_dict, *args, **kwargs)


class Extra(nn.Module):
    """Drops a key, reads the module versions, and has an extra state that is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.seen, self.versions = nn.BatchNorm1d(3), {}, {}

    def get_extra_state(self) -> Any:
        return {"steps": 3, "scale": torch.ones(2)}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        self.versions = dict(state_dict._metadata)
        assert isinstance(state_dict["_extra_state"], dict)
        return super().load_state_dict(
            {key: value for key, value in state_dict.items() if key != "stale"}, strict
        )


class Keeps(nn.Module):
    """Has extra state of any kind."""

    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.weight, self.extra = nn.Parameter(torch.zeros(3)), extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class WritesWithoutATrace(nn.Linear):
    """Changes the state through `.data` and NumPy, where torch counts no write."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        state_dict["weight"].data.mul_(2)
        state_dict["bias"].numpy()[:] = 5
        return super().load_state_dict(state_dict, strict)


class CopiesByItself(nn.Module):
    """Writes to what its `state_dict` returns, as old recipes do, and into a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.tied = nn.Linear(2, 2), nn.Linear(2, 2)
        self.tied.weight = self.one.weight

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:  # type: ignore[override]
        own = self.state_dict()
        for name, value in state_dict.items():
            own[name].copy_(value)
            own[name].data.add_(1)


class LoadsPartByPart(nn.Module):
    """Calls the method of each child."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:  # type: ignore[override]
        for name, child in self.named_children():
            part = {k[4:]: v for k, v in state_dict.items() if k.startswith(name)}
            child.load_state_dict(part, strict)


class LoadsInAThread(nn.Linear):
    """Waits for a thread of its own."""

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(super().load_state_dict, state_dict, strict).result()


class UpdatesItsOwn(nn.Module):
    """Passes on its own values where those of the file have another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Parameter(torch.full((3,), 7.0))

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        own = self.state_dict()
        own.update({k: v for k, v in state_dict.items() if own[k].shape == v.shape})
        return super().load_state_dict(own, strict)


class WritesAPart(nn.Module):
    """Writes one weight of a child by itself, resizes a buffer, and passes on the rest."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("bank", torch.zeros(1))
        self.way = way

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        rest = dict(state_dict)
        value = rest.pop("inner.weight")
        if self.way == "made of one":
            rest["inner.weight"] = self.inner.weight + 1
        elif self.way == "data":
            self.inner.weight.data.copy_(value * 2)
        else:
            self.inner.weight.detach().copy_(value * 2)
        if self.way == "resize":
            self.bank.resize_(rest["bank"].shape)
        return super().load_state_dict(rest, strict=False)


class Versioned(nn.Module):
    """Reads files of its first version, in which the weight had another name and half the size."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("offset", torch.zeros(2))
        self.seen: object = None

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        self.seen = local_metadata.get("version")
        if (self.seen or 1) < 2 and prefix + "kernel" in state_dict:
            state_dict[prefix + "weight"] = state_dict.pop(prefix + "kernel") * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Split(nn.Module):
    """Two projections that older files hold as one."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 4, bias=False)
        self.k = nn.Linear(4, 4, bias=False)
        self.register_load_state_dict_pre_hook(split)


def split(module: nn.Module, state_dict: Any, prefix: str, *rest: Any) -> None:
    """Split what is fused."""
    fused = state_dict.pop(prefix + "qk", None)
    if fused is not None:
        state_dict[prefix + "q.weight"] = fused[:4]
        state_dict[prefix + "k.weight"] = fused[4:]


class Weighted(nn.Module):
    """A weight; the subclasses derive something from it while it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


class Doubled(Weighted):
    """Assigns a buffer that no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("derived", torch.zeros(2), persistent=False)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.derived = self.weight.detach() * 2


class KeepsTheValue(Doubled):
    """The buffer is the value of the state dict itself."""

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        nn.Module._load_from_state_dict(self, state, prefix, *rest)
        self.derived = state[prefix + "weight"]


class Stated(Weighted):
    """Derives a buffer where it gets its extra state."""

    def get_extra_state(self) -> Any:
        return {"factor": 3}

    def set_extra_state(self, state: Any) -> None:
        value = self.weight.detach() * state["factor"]
        self.register_buffer("derived", value, persistent=False)


class StatedFilled(Doubled):
    """Writes to a buffer that the constructor has made."""

    _load_from_state_dict = nn.Module._load_from_state_dict

    def get_extra_state(self) -> Any:
        return {"factor": 3}

    def set_extra_state(self, state: Any) -> None:
        self.derived.copy_(self.weight.detach() * state["factor"])


class StatedAttribute(Stated):
    """Keeps a plain attribute."""

    def set_extra_state(self, state: Any) -> None:
        self.derived = torch.full((2,), float(state["factor"]), device=self.weight.device)


class Prepared(Weighted):
    """A pre-hook registers a buffer like the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(Prepared.prepare)

    @staticmethod
    def prepare(module: nn.Module, *_: Any) -> None:
        module.register_buffer("derived", torch.zeros_like(module.weight), persistent=False)


class PreparedChild(nn.Sequential):
    """The same for a child."""

    def __init__(self) -> None:
        super().__init__(Weighted())
        self.register_load_state_dict_pre_hook(lambda module, *_: Prepared.prepare(module[0]))


class Bank(nn.Module):
    """A memory bank that becomes as large as the one that is loaded."""

    def __init__(self, size: int = 0, how: str = "assign") -> None:
        super().__init__()
        self.register_buffer("bank", torch.zeros(size, 2))
        self.how = how

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        shape = state[prefix + "bank"].shape
        if self.how == "assign":
            self.bank = torch.zeros(shape)
        else:
            self.bank.resize_(shape)
        super()._load_from_state_dict(state, prefix, *rest)


class Prepares(nn.Module):
    """A hook gives the module what the checkpoint needs: a size, a tensor, a child, a number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.other = nn.Parameter(torch.zeros(2))
        self.register_buffer("scale", None)
        self.calls = 0
        self.register_load_state_dict_pre_hook(self.prepare)

    @staticmethod
    def prepare(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        module.weight = nn.Parameter(torch.zeros(state[prefix + "weight"].shape))
        module.scale = torch.zeros_like(state[prefix + "scale"])
        module.child = nn.Linear(2, 2, bias=False)
        module.calls += 1


class Hooked(nn.Module):
    """Two parameters, and a hook that changes what is loaded."""

    def __init__(self, change: Callable[[dict[str, Any], str], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5000, dtype=torch.complex64))
        self.alias = nn.Parameter(torch.zeros(5000, dtype=torch.complex64))
        self.register_load_state_dict_pre_hook(
            lambda module, state, prefix, *_: change(state, prefix + "weight")
        )


def data_copy(module: Any, value: torch.Tensor) -> None:
    module.weight.data.copy_(value)


def copied(module: Any, value: torch.Tensor) -> None:
    with torch.no_grad():
        module.weight.copy_(value)


def data_set(module: Any, value: torch.Tensor) -> None:
    module.weight.data = value


def numpy_copy(module: Any, value: torch.Tensor) -> None:
    module.weight.detach().numpy()[:] = value.numpy()


class LoadsItself(nn.Module):
    """A module that loads twice the values by itself."""

    def __init__(self, how: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 7.0))
        self.how = how

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        self.how(self, state.pop(prefix + "weight") * 2)


def lazy() -> nn.Module:
    """Modules that learn their shape from their first input."""
    return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Linear(4, 2))


def shaped() -> nn.Module:
    """The same with their shapes known."""
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


CHANGES: dict[str, Callable[[dict[str, Any], str], None]] = {
    "in place": lambda state, key: state[key].mul_(2),
    "through .data": lambda state, key: state[key].data.mul_(2),
    "through NumPy": lambda state, key: state[key].numpy().__imul__(2),
    "of an alias": lambda state, key: state["alias"].data.mul_(2),
    "another tensor": lambda state, key: state.update({key: state[key] * 2}),
    "a conjugate": lambda state, key: state.update({key: state[key].conj()}),
    "nothing": lambda state, key: None,
}


@contextmanager
def setting() -> Iterator[None]:
    """What a caller may have set, which code of a model must find."""
    LOCAL.scale = 3.0
    with LOCK, torch.autocast("cpu", dtype=torch.bfloat16):
        yield
    del LOCAL.scale


class Case(NamedTuple):
    """A model with loading code, and what is loaded.

    Attributes:
        make: Makes the model.
        state: What is loaded.
        lacks: Names of the model that the state may lack.
        on_meta: Whether a skeleton is loaded. If not, the error names `torchlift.materialize`, and
            that works. None: A skeleton is not tried.
    """

    make: Callable[[], nn.Module]
    state: Mapping[str, Any]
    lacks: tuple[str, ...] = ()
    on_meta: bool | None = True


def _with_rows(rows: int) -> Table:
    made = Table(rows)
    nn.init.normal_(made.table)
    return made


def _part(way: str, bank: int = 1) -> Case:
    values = {key: torch.rand(value.shape) for key, value in WritesAPart(way).state_dict().items()}
    make = partial(WritesAPart, way)
    return Case(make, {**values, "bank": torch.rand(bank)}, on_meta=False)


def _of_version_1() -> Any:
    state: Any = OrderedDict({"0.kernel": torch.arange(3.0), "0.offset": torch.ones(2)})
    state._metadata = OrderedDict({"": {"version": 1}, "0": {"version": 1}})
    return state


def _of_today() -> Any:
    return nn.Sequential(Versioned()).state_dict()


def _observed() -> Any:
    seen = torch.ao.quantization.PerChannelMinMaxObserver()
    seen(torch.randn(4, 3))
    return seen.state_dict()


def _old_weight_norm() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return old_weight_norm(nn.Linear(3, 4)).state_dict()


LINEAR: STATE = {"weight": torch.rand(2, 2), "bias": torch.ones(2)}
WEIGHT: STATE = {"weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
LAYERS = {
    **nn.Linear(2, 2).state_dict(prefix="first."),
    **{f"layers.{n}.weight": torch.full((2, 2), float(n)) for n in range(3)},
}

CASES: dict[str, Case] = {
    **{
        kind.__name__: Case(partial(kind, 2, 2), LINEAR)
        for kind in (ReadsItsThread, Computes, TakesALock, Assigns, WritesWithoutATrace,
                     LoadsInAThread)
    },
    **{
        kind.__name__: Case(kind, kind().state_dict())
        for kind in (DropsMetadata, OnlyInner, ClearsItsOwn, Permuting, Extra, LoadsPartByPart)
    },
    "FillsAHead": Case(FillsAHead, FillsAHead().state_dict(), on_meta=False),
    "CopiesByItself": Case(CopiesByItself, CopiesByItself().state_dict(), on_meta=False),
    "Aliases": Case(Aliases, {"a": torch.ones(2), "b": torch.zeros(2)}),
    "ShapesItself": Case(ShapesItself, {"weight": torch.rand(3, 5)}),
    "LoadsTwice": Case(partial(LoadsTwice, 2, 2, bias=False), WEIGHT, on_meta=False),
    "Halves": Case(
        lambda: Halves(nn.Linear(2, 2, bias=False)), {"0.weight": torch.eye(2)}, on_meta=None
    ),
    "LooksAtNames": Case(partial(LooksAtNames, 2, 2), WEIGHT, ("bias",), on_meta=None),
    "TiesItself": Case(
        TiesItself, {"emb.weight": torch.eye(2), "head.weight": torch.eye(2)}, on_meta=None
    ),
    "Grows": Case(Grows, LAYERS, on_meta=None),
    "WritesOneOfTwo": Case(
        WritesOneOfTwo, {"one": torch.tensor([1.0, 2.0]), "two": torch.tensor([3.0, 4.0])},
        on_meta=None,
    ),
    "WritesAChild": Case(
        WritesAChild, dict.fromkeys(["0.0.weight", "1.weight"], torch.eye(2)), on_meta=None
    ),
    "Table": Case(Table, _with_rows(5).state_dict()),
    "Renaming": Case(Renaming, {"old.weight": torch.rand(2, 2), "old.bias": torch.rand(2)}),
    "Delegating": Case(Delegating, Delegating().state_dict(), ("head.*",), on_meta=None),
    "UpdatesItsOwn": Case(
        UpdatesItsOwn, {**UpdatesItsOwn().state_dict(), "head": torch.zeros(9)}, ("head",)
    ),
    **{
        f"Keeps {kind}": Case(
            lambda: nn.Sequential(nn.Linear(2, 2), Keeps()),
            nn.Sequential(nn.Linear(2, 2), Keeps(extra)).state_dict(),
        )
        for kind, extra in {
            "a dict": {"step": 3, "name": "x", "deep": {"rate": 0.5}},
            "a tensor": torch.arange(4.0),
            "tensors": {"scale": torch.ones(2), "amax": {"history": torch.zeros(3)}},
            "a number": 17,
            "a text": "text",
            "nothing": None,
            "odd keys": {"l": [1, torch.arange(3)], "a.b": {0: torch.ones(1), "x": (2, {})}},
            "lists": [torch.ones(1), {"k": [torch.zeros(2)]}],
        }.items()
    },
    "Versioned": Case(lambda: nn.Sequential(Versioned()), _of_version_1()),
    "Versioned of today": Case(lambda: nn.Sequential(Versioned()), _of_today()),
    "Versioned without a version": Case(lambda: nn.Sequential(Versioned()), {**_of_today()}),
    "Prepared": Case(Prepared, {"weight": torch.full((2,), 5.0)}, on_meta=False),
    "PreparedChild": Case(PreparedChild, {"0.weight": torch.full((2,), 5.0)}, on_meta=False),
    "an observer": Case(torch.ao.quantization.PerChannelMinMaxObserver, _observed()),
    "Split": Case(lambda: nn.ModuleDict({"at": Split()}), {"at.qk": torch.arange(32.0).view(8, 4)}),
    "old weight_norm": Case(lambda: weight_norm(nn.Linear(3, 4)), _old_weight_norm()),
    "old batch norm": Case(
        lambda: nn.Sequential(nn.BatchNorm1d(3)),
        {f"0.{key}": value + 2 for key, value in nn.BatchNorm1d(3).state_dict().items()
         if key != "num_batches_tracked"},
    ),
    "lazy modules": Case(lazy, shaped().state_dict()),
    "Bank": Case(Bank, {"bank": torch.rand(5, 2)}),
    "Bank resizes": Case(partial(Bank, 0, "resize"), {"bank": torch.rand(5, 2)}),
    "Prepares": Case(
        Prepares,
        {"weight": torch.arange(5.0), "other": torch.ones(2), "scale": torch.ones(1),
         "child.weight": torch.ones(2, 2)},
    ),
    **{
        kind.__name__: Case(kind, {**kind().state_dict(), "weight": torch.tensor([5.0, 7.0])})
        for kind in (Doubled, KeepsTheValue, Stated, StatedFilled, StatedAttribute)
    },
    **{
        f"a hook writes {how}": Case(
            partial(Hooked, change), dict.fromkeys(["weight", "alias"], torch.full((5000,), 1 + 1j))
        )
        for how, change in CHANGES.items()
    },
    **{
        f"an override writes by {how.__name__}": Case(
            partial(LoadsItself, how), {"weight": torch.arange(3.0)},
            on_meta=False if how in (copied, data_copy) else None,
        )
        for how in (copied, data_copy, data_set, numpy_copy)
    },
    "WritesAPart": _part("copy"),
    "WritesAPart through .data": _part("data"),
    "WritesAPart and resizes": _part("resize", 3),
    "WritesAPart of its own": _part("made of one"),
}  # fmt: skip


def look(model: nn.Module) -> list[Any]:
    """Values and dtypes, ties, and what the code has noted."""
    tensors = tensors_of(model)
    noted = ("seen", "calls", "channels", "total", "derived", "extra")
    facts = [
        (name, key, value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key in noted
    ]
    ties = [[at is each for at in tensors.values()] for each in tensors.values()]
    return [[(name, t.dtype, t.tolist()) for name, t in tensors.items()], ties, str(facts)]


def given_by(door: str, state: Mapping[str, Any], folder: Path) -> Any:
    """The state in memory, or in a file or folder."""
    if door == "memory":
        return copy.deepcopy(state)
    if door == "pt":
        torch.save(state, folder / "a.pt")
    elif door == "safetensors":
        torchlift.save(dict(state), folder / "a.safetensors")
    else:
        torchlift.save(state, folder / "a.dcp", format="dcp")
    return folder / f"a.{door}"


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pairwise(
    kind=CASES,
    start=["live", "skeleton", "meta"],
    door=["pt", "safetensors", "memory", "dcp"],
    mode=["auto", "assign", "copy", "swap"],
)
def test_a_model_ends_as_in_torch(
    kind: str, start: str, door: str, mode: Any, tmp_path: Path
) -> None:
    """Its code runs in the thread of the caller, with everything that the caller has set."""
    case = CASES[kind]
    if not all(isinstance(value, torch.Tensor) for value in case.state.values()):
        door = door.replace("safetensors", "pt")
    if kind.startswith(("a hook writes", "Versioned", "Keeps")) and door != "memory":
        door = "pt"  # others store neither shared memory nor versions nor each kind of key
    # What only a constructor gives a value is not in a model that is made on meta.
    lacks = case.lacks or not case.on_meta or kind == "StatedFilled"
    if case.on_meta is None or (start == "meta" and lacks):
        start = "live"
    given = given_by(door, case.state, tmp_path)
    torch.manual_seed(0)
    right = case.make()
    torch.manual_seed(0)
    with torch.device("meta") if start == "meta" else nullcontext():
        model = torchlift.skeleton(case.make) if start == "skeleton" else case.make()
    held = tensors_of(model)
    with setting():
        right.load_state_dict(copy.deepcopy(case.state))
        if start == "skeleton" and not case.on_meta:
            with pytest.raises(
                torchlift.PlacementError, match=r"\.materialize\(model|'head\.weight'"
            ):
                torchlift.load(model, given)
            torchlift.materialize(model)
        torchlift.load(model, given, allow_missing=case.lacks, mode=mode)
    assert look(model) == look(right)
    assert not {"load_state_dict"} & {thread.name for thread in threading.enumerate()}
    if start == "live" and kind in ("CopiesByItself", "WritesAPart", "WritesAPart and resizes"):
        assert all(now is held[name] for name, now in tensors_of(model).items())


#: A buffer of its own that `set_extra_state` writes in place keeps the new values.
@pytest.mark.parametrize("kind", CASES)
def test_a_plan_and_a_failed_load_change_nothing(kind: str) -> None:
    """Parameters, buffers, attributes and the caller's state are as before."""
    case = CASES[kind]
    model, state = case.make(), copy.deepcopy(case.state)
    tensors = {
        name: (id(t), None if nn.parameter.is_lazy(t) else t.clone())
        for name, t in tensors_of(model).items()
    }
    attributes = {name: id(value) for name, value in vars(model).items()}
    assert torchlift.plan(model, state, allow_missing=case.lacks).loaded

    def fails(key: str, _: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"no {key}")

    with pytest.raises(ValueError, match="no "):
        torchlift.load(model, state, allow_missing=case.lacks, transform=fails)
    now = tensors_of(model)
    assert now.keys() == tensors.keys()
    for name, (identity, value) in tensors.items():
        assert id(now[name]) == identity
        assert value is None or same(now[name].detach(), value.detach()), name
    assert attributes == {name: id(value) for name, value in vars(model).items()}
    assert same(state, case.state)


@pytest.mark.parametrize("live", [True, False], ids=["live", "skeleton"])
def test_a_hook_that_clears_names_excuses_those_that_are_missing_by_then(live: bool) -> None:
    """Names of a later module are missing, as in torch."""
    make = ClearsItsOwn
    model = make() if live else torchlift.skeleton(make)
    with pytest.raises(torchlift.MismatchError, match=r"missing \(1\): second\.bias"):
        torchlift.load(model, {"first.weight": torch.ones(2, 2), "second.weight": torch.ones(2, 2)})
    state = {"first.weight": torch.ones(2, 2), **make().second.state_dict(prefix="second.")}
    report = torchlift.load(model, state)
    assert report.missing_keys == []
    assert model.first.weight.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("way", ["inference mode", "swap flag", "neither"])
@pytest.mark.parametrize(
    "kind", ["FillsAHead", "Aliases", "ReadsItsThread", "DropsMetadata", "ClearsItsOwn"]
)
@pytest.mark.parametrize("live", [True, False], ids=["live", "skeleton"])
def test_a_partial_load_ends_as_in_torch(way: str, kind: str, live: bool) -> None:
    """Also of a skeleton that was made in inference mode, or while torch swaps on conversion."""
    case = CASES[kind]
    make, state = case.make, dict(case.state)
    state.pop(gone := next(reversed(state)))
    before = torch.__future__.get_swap_module_params_on_conversion()
    context: Any = torch.inference_mode() if way == "inference mode" else nullcontext()
    try:
        torch.__future__.set_swap_module_params_on_conversion(way == "swap flag")
        with context:
            model = make() if live else torchlift.skeleton(make)
            if not live and kind == "FillsAHead":
                torchlift.materialize(model, names="head")
            report = torchlift.load(model, state, strict=False, allow_missing=["*"])
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    (right := make()).load_state_dict(copy.deepcopy(state), strict=False)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    found, expected = model.state_dict(), right.state_dict()
    assert all(found[name].tolist() == expected[name].tolist() for name in report.loaded)
    # Of these, the code gives the missing name a value.
    assert gone not in report.loaded or kind in ("Aliases", "FillsAHead", "DropsMetadata")


def test_a_file_of_which_code_drops_every_key_fits_nothing(tmp_path: Path) -> None:
    """An attribute that the code sets does not mean that it has kept a tensor."""

    class Drops(nn.Linear):
        loads = 0

        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
            self.loads += 1
            own = self.state_dict()
            known = {key: value for key, value in state_dict.items() if key in own}
            return super().load_state_dict(known, strict=False)

    torch.save({"junk": torch.ones(2), "other": torch.ones(2)}, path := tmp_path / "model.pt")
    for model in (Drops(2, 2), torchlift.skeleton(Drops, 2, 2)):
        with pytest.raises(torchlift.MismatchError, match="nothing in the checkpoint fits"):
            torchlift.load(model, path)
        assert model.loads == 0


def test_a_dtype_of_the_caller_is_not_rounded_through_the_models() -> None:
    """The live model is in float16, which has no 70000."""
    model = nn.Linear(2, 1, bias=False).half()
    model.register_load_state_dict_post_hook(lambda *_: None)
    value = torch.tensor([[70000.0, 1e-9]])
    report = torchlift.load(model, {"weight": value}, dtype=torch.float32, check="finite")
    assert torch.equal(model.weight, value)
    assert report.overflowed == {}


def test_values_that_overlap_in_the_state_are_apart_in_a_skeleton() -> None:
    """A hook that writes to one of them does not change the other."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
            self.register_load_state_dict_post_hook(lambda m, _: (m.a.detach().mul_(2), None)[1])

    whole = torch.tensor([1.0, 2.0, 3.0])
    for model in (Both(), torchlift.skeleton(Both)):
        torchlift.load(model, {"a": whole, "b": whole[1:]})
        assert (model.a.tolist(), model.b.tolist()) == ([2, 4, 6], [2, 3])


@pytest.mark.parametrize("where", ["", "emb", "head"])
@pytest.mark.parametrize("live", [True, False], ids=["live", "skeleton"])
def test_one_name_of_a_tie_is_enough_beside_a_hook(where: str, live: bool) -> None:
    """As without one: safetensors writes one name of a tie."""

    def make() -> nn.Module:
        model = nn.ModuleDict({"emb": nn.Embedding(2, 2), "head": nn.Linear(2, 2, bias=False)})
        model["head"].weight = model["emb"].weight
        model.get_submodule(where).register_load_state_dict_post_hook(lambda *_: None)
        return model

    model = make() if live else torchlift.skeleton(make)
    report = torchlift.load(model, {"emb.weight": torch.eye(2)})
    assert report.missing_keys == []
    assert model["head"].weight.tolist() == [[1, 0], [0, 1]]
    with pytest.raises(torchlift.MismatchError):
        torchlift.load(model, {"other": torch.eye(2)})


def test_a_copy_that_code_makes_of_a_module_has_no_part_in_the_load() -> None:
    """A target network is copied while the model loads. It can be loaded and saved afterwards."""

    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 2, bias=False)
            self.register_load_state_dict_post_hook(self.copy_it)

        @staticmethod
        def copy_it(module: Any, _: Any) -> None:
            object.__setattr__(module, "target", copy.deepcopy(module.net))

    torchlift.load(model := Copies(), {"net.weight": torch.eye(2)})
    assert model.target.weight.tolist() == [[1, 0], [0, 1]]
    with pytest.raises(RuntimeError, match="junk"):
        model.target.load_state_dict({"weight": torch.ones(2, 2), "junk": torch.ones(1)})
    copied = pickle.loads(pickle.dumps(model.target))
    torchlift.load(copied, {"weight": torch.zeros(2, 2)})
    assert copied.weight.tolist() == [[0, 0], [0, 0]]


def test_attributes_of_modules_inside_are_given_back() -> None:
    """A hook of the model writes to a table that a child keeps as a plain tensor."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    model[0].table = torch.zeros(2)
    model.register_load_state_dict_post_hook(lambda m, _: (m[0].table.add_(1), None)[1])
    torchlift.plan(model, {"0.weight": torch.eye(2)})
    with pytest.raises(torchlift.MismatchError):
        torchlift.load(model, {"0.weight": torch.eye(2), "junk": torch.ones(1)})
    assert model[0].table.tolist() == [0, 0]
    torchlift.load(model, {"0.weight": torch.eye(2)})
    assert model[0].table.tolist() == [1, 1]


@pytest.mark.parametrize("kind", [Stated, StatedFilled])
def test_extra_state_that_fails_gives_back_the_weights_that_it_saw(kind: type[Weighted]) -> None:
    """They were copied in place before it; the rest was not."""

    class Refusing(kind):  # type: ignore[misc, valid-type]
        def set_extra_state(self, state: Any) -> None:
            assert self.weight.tolist() == [5.0, 7.0]
            self.weight.data.mul_(2)
            if state["factor"] == 4:
                raise ValueError("no")

    model = Refusing()
    state = {"weight": torch.tensor([5.0, 7.0]), "_extra_state": {"factor": 4}}
    before = model.weight
    with pytest.raises(ValueError, match="no"):
        torchlift.load(model, state)
    assert model.weight is before
    assert before.tolist() == [1.0, 1.0]


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="the kernel does not tell")
def test_what_a_hook_only_reads_stays_mapped(tmp_path):
    """It costs no memory that the module has loading code of its own."""
    torch.save({"weight": torch.ones(5000, dtype=torch.complex64)}, path := tmp_path / "x.pt")
    model = Hooked(lambda state, key: state[key].sum())
    del model.alias
    report = torchlift.load(model.to("meta"), path)
    assert (report.loaded["weight"].route, report.bytes_read) == ("view", 0)
    assert model.weight.sum() == 5000


# ---- a `load_state_dict` that a class overrides


def test_a_state_in_memory_stays_as_it_is_after_a_failed_load() -> None:
    """A method that writes into the caller's tensors is undone with the rest."""

    class Scaling(nn.Linear):
        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
            state_dict["weight"].mul_(2)
            return super().load_state_dict(state_dict, strict)

    state = {"weight": torch.ones(2, 2), "wrong": torch.ones(2)}
    with pytest.raises(torchlift.MismatchError):
        torchlift.load(Scaling(2, 2), state)
    assert state["weight"].sum() == 4
    model = Scaling(2, 2, bias=False)
    torchlift.load(model, {"weight": torch.ones(2, 2)})
    assert float(model.weight.detach().sum()) == 8


def test_unchanged_tensors_still_come_from_the_file(tmp_path: Path) -> None:
    """Only what the method changed is in memory: a skeleton maps the rest."""
    torchlift.save(Permuting(), path := tmp_path / "a.safetensors")
    report = torchlift.load(torchlift.skeleton(Permuting), path)
    assert {key: report.source[key] for key in report.loaded} == {
        "qkv.weight": "memory", "qkv.bias": "mmap", "out.weight": "mmap", "out.bias": "mmap",
    }  # fmt: skip


def test_what_fails_after_the_values_are_placed_is_undone() -> None:
    """The second half of the method raises, and writes before: the model is as it was."""

    class Failing(nn.Linear):
        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
            super().load_state_dict(state_dict, strict)
            self.weight.data.zero_()
            raise ValueError("the table is too old")

    model = Failing(2, 2)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="too old"):
        torchlift.load(model, nn.Linear(2, 2).state_dict())
    assert same(model.state_dict(), before)


def test_a_method_that_loads_by_itself_is_believed(tmp_path: Path) -> None:
    """It never calls the method of nn.Module. On meta its values would be lost."""

    class Manual(nn.Linear):
        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
            with torch.no_grad():
                for name, parameter in self.named_parameters():
                    parameter.copy_(state_dict[name])

    torchlift.save(other := nn.Linear(2, 2), path := tmp_path / "a.pt")
    model = Manual(2, 2)
    before, objects = copy.deepcopy(model.state_dict()), [*model.parameters()]
    assert [*torchlift.plan(model, path).loaded] == ["weight", "bias"]
    assert same(model.state_dict(), before)
    torchlift.load(model, path)
    assert same(model, other)
    assert all(one is two for one, two in zip(objects, model.parameters(), strict=True))
    skeleton = torchlift.skeleton(Manual, 2, 2)
    with pytest.raises(torchlift.PlacementError, match=r"torchlift\.materialize\(model"):
        torchlift.load(skeleton, path)
    torchlift.materialize(skeleton)
    torchlift.load(skeleton, path)
    assert same(skeleton, other)


class Two(nn.Module):
    """Saves and loads a dict of two state dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {name: child.state_dict() for name, child in self.named_children()}

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> None:  # type: ignore[override]
        for name, child in self.named_children():
            child.load_state_dict(state_dict[name], strict)


def test_the_error_of_a_method_says_what_it_got_and_the_way_out(tmp_path: Path) -> None:
    """It expects containers, and gets dotted names; or it lacks what was left out."""
    torchlift.save(other := Two(), path := tmp_path / "a.pt")
    model = Two()
    with pytest.raises(KeyError, match="one") as caught:
        torchlift.load(model, path)
    (note,) = caught.value.__notes__
    assert "load_state_dict of Two raised this. It got one.weight, one.bias, two.weight" in note
    assert "model.load_state_dict(torchlift.open(path).tree())" in note
    model.load_state_dict(torchlift.open(path).tree())
    assert same(model, other)


def test_two_loads_of_one_model_at_once_are_refused(tmp_path: Path) -> None:
    """The second names the first; neither waits for the other's events."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow(nn.Linear):
        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
            inside.set()
            assert go_on.wait(60)
            return super().load_state_dict(state_dict, strict)

    torchlift.save(other := nn.Linear(2, 2), path := tmp_path / "a.pt")
    model = Slow(2, 2)
    first = threading.Thread(target=torchlift.load, args=(model, path))
    first.start()
    assert inside.wait(60)
    with pytest.raises(torchlift.PlacementError, match="another load"):
        torchlift.load(model, path)
    go_on.set()
    first.join()
    assert same(model, other)
    torchlift.load(model, path)


def test_a_method_that_calls_load_is_refused_with_a_way_out(tmp_path: Path) -> None:
    """It would call itself; the method of nn.Module is what it has to call."""

    class Calling(nn.Linear):
        through: Any = staticmethod(torchlift.load)

        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
            return self.through(self, state_dict)

    torchlift.save(other := nn.Linear(2, 2), path := tmp_path / "a.pt")
    model = Calling(2, 2)
    with pytest.raises(torchlift.PlacementError, match=r"super\(\)\.load_state_dict"):
        torchlift.load(model, path)
    Calling.through = staticmethod(nn.Module.load_state_dict)
    torchlift.load(model, path)
    assert same(model, other)


def test_a_method_may_be_more_lenient_than_the_call() -> None:
    """It passes strict=False on: what it drops stays, and a warning names it."""

    class Lenient(nn.Linear):
        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
            found = super().load_state_dict({"weight": state_dict["weight"]}, strict=False)
            self.lacking = list(found.missing_keys)
            return found

    model, other = Lenient(2, 2), nn.Linear(2, 2)
    bias = model.bias.detach().clone()
    with pytest.warns(UserWarning, match="bias"):
        torchlift.load(model, other.state_dict())
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, bias)
    assert model.lacking == ["bias"]


def test_hooks_and_submodules_see_what_torch_lets_them_see() -> None:
    """Hooks run once, after the method's first half; the method of a child does not run."""
    calls: list[str] = []

    class Child(nn.Linear):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("child")
            return super().load_state_dict(*args, **kwargs)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Child(2, 2)
            self.child.register_load_state_dict_post_hook(lambda *_: calls.append("post"))
            self.child.register_load_state_dict_pre_hook(lambda *_: calls.append("pre"))

        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
            calls.append("first half")
            found = super().load_state_dict(state_dict, strict)
            calls.append("second half")
            return found

    model, state = Root(), Root().state_dict()
    model.load_state_dict(state)
    by_torch = [*calls]
    calls.clear()
    torchlift.load(model, state)
    assert calls == by_torch == ["first half", "pre", "post", "second half"]
    assert len(model.child._load_state_dict_post_hooks) == 1


def test_wrapped_models_use_the_method_of_what_they_wrap(tmp_path: Path) -> None:
    """A compiled model loads the file of a bare one; under its own names it loads as in torch."""
    torchlift.save(right := Permuting(), path := tmp_path / "a.pt")
    compiled = torch.compile(Permuting(), backend="eager")
    torchlift.load(compiled, path)
    assert same(compiled._orig_mod, right)
    state = {f"_orig_mod.{name}": value for name, value in right.state_dict().items()}
    torchlift.load(one := torch.compile(Permuting(), backend="eager"), state)
    (two := torch.compile(Permuting(), backend="eager")).load_state_dict(state)
    assert same(one._orig_mod, two._orig_mod)


def test_the_distributed_functions_call_it_as_torch_s_do() -> None:
    """What `get_model_state_dict` gives, `set_model_state_dict` takes back."""
    right, model = Permuting(), Permuting()
    set_model_state_dict(model, get_model_state_dict(right))
    assert same(model, right)

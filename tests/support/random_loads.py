"""Random models whose own code takes part in a load, and state dicts that fit them or do not."""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from small_models import Two
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import torchlift
from torchlift.errors import CheckpointError


class Own(nn.Module):
    """Loads itself: an old name, a buffer of the file's size, a count."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))
        self.register_buffer("bank", torch.zeros(1))
        self.loads = 0
        self.log: list[str] = []

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.loads += 1
        self.log.append(prefix)
        if prefix + "old" in state:
            state[prefix + "weight"] = state.pop(prefix + "old") * 2
        if prefix + "bank" in state:
            self.bank = torch.zeros(state[prefix + "bank"].shape)
        super()._load_from_state_dict(state, prefix, *rest)


class InPlace(nn.Module):
    """Loads itself by writing to its tensors."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))
        self.register_buffer("seen", torch.zeros(2), persistent=False)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        missing = rest[2]
        if prefix + "weight" in state:
            self.weight.data.copy_(state[prefix + "weight"] + 1)
        else:
            missing.append(prefix + "weight")
        self.seen.add_(1)


def leaf(choose: random.Random) -> nn.Module:
    size = choose.choice((2, 3))
    return choose.choice(
        [
            lambda: nn.Linear(size, 2),
            lambda: nn.Linear(size, 2, bias=False),
            lambda: nn.BatchNorm1d(size),
            lambda: Two(2, size),
            lambda: Own(size),
            lambda: InPlace(size),
            lambda: weight_norm(nn.Linear(2, size)),
            lambda: nn.LazyLinear(2),
            lambda: nn.LSTM(2, size),
        ]
    )()


def writing_hook(choose: random.Random, root: Any, *, before: bool) -> Callable[[Any], None]:
    """Return what a hook does to its module, or to a tensor of the model through a closure.

    Before a module is loaded, nobody sees a write through `.data` into a live tensor of another
    module, so a pre-hook writes in that way to tensors of its own module only. Its `how` says what
    it does.
    """
    how = choose.choice(["add", "data", "attribute", "list", "parameter", "closure", "grad"])
    paths = [choose.random() for _ in range(2)]

    def act(module: Any) -> None:
        deep = how != "data" or not before
        tensors = [*module.parameters(deep), *module.buffers(deep)]
        tensors = [t for t in tensors if not nn.parameter.is_lazy(t) and t.is_floating_point()]
        if how == "attribute":
            module.count = getattr(module, "count", 0) + 1
        elif how == "list":
            module.__dict__.setdefault("events", []).append(1)
        elif not tensors:
            return
        elif how == "closure":
            closed = [t for t in root().buffers() if t.is_floating_point()]
            if closed:
                closed[int(paths[0] * len(closed))].add_(1)
        else:
            tensor = tensors[int(paths[1] * len(tensors))]
            if how == "add":
                with torch.no_grad():
                    tensor.add_(1)
            elif how == "data":
                tensor.data[() if tensor.dim() == 0 else (..., slice(1))] += 5
            elif how == "grad":
                if isinstance(tensor, nn.Parameter):
                    tensor.requires_grad_(not tensor.requires_grad)
            elif how == "parameter":
                for owner in module.modules():
                    for name, one in list(owner._parameters.items()):
                        if one is tensor and type(owner) in (nn.Linear, Two, Own):
                            made = nn.Parameter(one.detach() * 3)
                            setattr(owner, name, made)

    act.how = how  # type: ignore[attr-defined]
    return act


def excuse(module: nn.Module, keys: Any) -> None:
    """Excuse what is called bias."""
    keys.missing_keys[:] = [name for name in keys.missing_keys if not name.endswith("bias")]


def build(seed: int) -> nn.Module:
    """Make the model of a seed: the same one each time."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    children = [leaf(choose) for _ in range(choose.randint(1, 3))]
    if choose.random() < 0.3:
        children.append(choose.choice(children))  # one module under two names
    if choose.random() < 0.3:
        children.append(nn.Sequential(*[leaf(choose) for _ in range(2)]))
    model = nn.Sequential(*children)
    linear = [m for m in model.modules() if type(m) is nn.Linear and "weight" in m._parameters]
    for one in linear[1:]:
        if one.weight.shape == linear[0].weight.shape and choose.random() < 0.3:
            one.weight = linear[0].weight
    modules = list(dict.fromkeys(model.modules()))
    for module in modules:
        if choose.random() < 0.25:
            act = writing_hook(choose, lambda: model, before=False)
            module.register_load_state_dict_post_hook(lambda m, keys, act=act: act(m))
        if choose.random() < 0.2:
            act = writing_hook(choose, lambda: model, before=True)
            module.register_load_state_dict_pre_hook(lambda m, *_, act=act: act(m))
    if choose.random() < 0.2:  # the root's, which runs last: others see fewer names in torch
        model.register_load_state_dict_post_hook(excuse)
    return model


def state_for(seed: int, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a state dict for the model of a seed, often with names and shapes that do not fit."""
    choose = random.Random(seed + 1)
    torch.manual_seed(seed + 1)
    made: dict[int, torch.Tensor] = {}
    state: Any = OrderedDict()
    for key, tensor in model.state_dict(keep_vars=True).items():
        lazy = nn.parameter.is_lazy(tensor)
        shape = ((2, 3) if key.endswith("weight") else (2,)) if lazy else tensor.shape
        dtype = tensor.dtype
        state[key] = made.setdefault(id(tensor), torch.rand(shape).to(dtype))
    state._metadata = model.state_dict()._metadata
    fates: dict[int, float] = {}
    for key in list(state):  # one fate for all names of a tensor: torchlift takes any of them
        fate = fates.setdefault(id(state[key]), choose.random())
        if fate < 0.04:
            del state[key]
        elif fate < 0.06:
            state[key] = made.setdefault(-id(state[key]), torch.rand(7))
        elif fate < 0.09 and key.endswith(("weight", "bank")):
            state[key.replace("weight", "old").replace("bank", "bonk")] = state.pop(key)
        elif key.endswith("bank") and fate < 0.5:
            state[key] = torch.rand(4)
    return state


def look(model: nn.Module) -> list[Any]:
    """Everything of a model: objects, bytes, versions, flags, attributes."""
    found: list[Any] = []
    for name, module in model.named_modules(remove_duplicate=False):
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers"):
                for at, tensor in value.items():
                    found.append((name, at, id(tensor), _bytes(tensor)))
            elif key != "_modules":
                found.append((name, key, copy.copy(value) if key == "events" else str(value)))
        found.append((name, list(module._modules)))
    return found


def _bytes(tensor: torch.Tensor | None) -> Any:
    if tensor is None or nn.parameter.is_lazy(tensor):
        return type(tensor)
    facts = tensor._version, tensor.requires_grad, tensor.dtype, tuple(tensor.shape)
    return facts, tensor.detach().numpy().tobytes()


def values(model: nn.Module) -> dict[str, Any]:
    """What two models have in common that were loaded alike."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers"):
                for at, tensor in value.items():
                    found[name, at] = facts = _bytes(tensor)
                    if isinstance(facts, tuple):  # how often it was written to is our own
                        found[name, at] = facts[0][1:], facts[1]
            elif key in ("count", "loads", "log", "events"):
                found[name, key] = value
    return found


def run(seed: int) -> str:
    """Load one random state dict into one random model; say how it ended.

    Raises:
        AssertionError: not as in `load_state_dict`, or a failed load left a trace.
    """
    ours, theirs = build(seed), build(seed)
    state = state_for(seed, ours)
    strict = random.Random(seed + 2).random() < 0.7
    before = look(ours)
    planned = None
    try:
        planned = torchlift.plan(ours, dict_of(state), strict=strict)
    except (CheckpointError, RuntimeError) as error:  # an override's own one, of a copy in place
        planned = error
    # Code that writes into a live tensor before the verdict is refused, and its write stays.
    writes = "writes into" in str(planned) and "before the load is decided" in str(planned)
    assert writes or look(ours) == before, (seed, "a plan changed the model")
    keys = problem = refused = None
    try:
        keys = theirs.load_state_dict(dict_of(state), strict=strict)
    except RuntimeError as error:
        problem = error
    try:
        report = torchlift.load(ours, dict_of(state), strict=strict)
    except (CheckpointError, RuntimeError) as error:
        refused = error
    if refused is not None:
        assert writes or look(ours) == before, (seed, "a failed load changed it", refused)
        if problem is None:
            # What nothing can place as torch does is refused by name; so is what fits nowhere.
            words = (
                "writes into this tensor",
                "writes into it, and load_state_dict would load it after that",
                "nothing in the checkpoint fits",
                "different values in the checkpoint",
            )
            assert any(word in str(refused) for word in words), (seed, refused)
        return "refused"
    assert problem is None, (seed, problem, report)
    assert not isinstance(planned, Exception), (seed, planned)
    assert keys is not None
    assert sorted(report.missing_keys) == sorted(keys.missing_keys), (seed, keys)
    assert sorted(report.unexpected_keys) == sorted(keys.unexpected_keys), (seed, keys)
    found, expected = values(ours), values(theirs)
    differ = [key for key in expected if found.get(key) != expected[key]]
    assert not differ, (seed, differ)
    assert found.keys() == expected.keys(), seed
    return "loaded"


def dict_of(state: Any) -> Any:
    """A copy with tensors of its own: a hook may write to what it is given."""
    made: Any = OrderedDict()
    memo: dict[int, torch.Tensor] = {}
    for key, value in state.items():
        made[key] = memo.setdefault(id(value), value.clone())
    made._metadata = copy.deepcopy(state._metadata)
    return made


if __name__ == "__main__":  # python random_loads.py FIRST COUNT
    import collections
    import warnings

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    first, count = map(int, sys.argv[1:])
    ends: collections.Counter[str] = collections.Counter()
    for one in range(first, first + count):
        try:
            ends[run(one)] += 1
        except Exception as error:
            ends["wrong"] += 1
            if ends["wrong"] < 20:
                print(one, type(error).__name__, str(error)[:300], flush=True)
        if one % 1000 == 0:
            print(one, dict(ends), flush=True)
    print(dict(ends))

"""Random models through every door of `load`, compared with torch's `load_state_dict`.

Models have modules with code of their own, odd tensors, ties, shared memory, extra state and
gradients. Each model is loaded live and as a skeleton, by each mode, from memory and from files.
"""

from __future__ import annotations

import collections
import copy
import random
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
import torch.distributed as dist
from small_models import Two
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrizations import weight_norm
from zoo import Stated, same

import torchlift
import torchlift.distributed
from torchlift.errors import CheckpointError

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)
COUNTS = (torch.int64, torch.uint8, torch.bool, torch.int32)


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
    how = choose.choice(["add", "data", "attribute", "attribute", "add", "closure", "data"])
    paths = [choose.random() for _ in range(2)]

    def act(module: Any) -> None:
        deep = how != "data" or not before
        tensors = [*module.parameters(deep), *module.buffers(deep)]
        tensors = [t for t in tensors if not nn.parameter.is_lazy(t) and t.is_floating_point()]
        if how == "attribute":
            module.count = getattr(module, "count", 0) + 1
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

    act.how = how  # type: ignore[attr-defined]
    return act


class Odd(nn.Module):
    """Parameters and buffers of any dtype, shape and strides."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        for number in range(choose.randint(1, 4)):
            shape = choose.choice([(), (1,), (3,), (0, 2), (2, 3), (2, 1, 3)])
            value = torch.rand(shape).to(choose.choice(DTYPES))
            if len(shape) > 1 and choose.random() < 0.4:
                value = value.transpose(0, 1).contiguous().transpose(0, 1)
            grad = choose.random() < 0.7
            self.register_parameter(f"p{number}", nn.Parameter(value, requires_grad=grad))
        for number in range(choose.randint(0, 3)):
            shape = choose.choice([(), (2,), (2, 2)])
            value = torch.randint(0, 2, shape).to(choose.choice((*DTYPES, *COUNTS)))
            self.register_buffer(f"b{number}", value, persistent=choose.random() < 0.7)
        self.register_parameter("absent", None)


class Extra(Stated):
    """Has extra state: plain data, a tensor, or both."""

    def __init__(self, kind: int) -> None:
        super().__init__([3, torch.rand(2), {"a": 1, "b": torch.rand(1)}][kind])
        nn.init.uniform_(self.weight)


class Shared(nn.Module):
    """Two parameters over one memory, as older models tie their heads."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.rand(2, 2))
        self.two = nn.Parameter(torch.rand(2, 2))
        self.two.data = self.one.data


class Renames(nn.Module):
    """Takes an older prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Linear(2, 2)
        self.register_load_state_dict_pre_hook(self.rename)

    @staticmethod
    def rename(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}older.")]:
            state[key.replace(f"{prefix}older.", f"{prefix}new.")] = state.pop(key)


class Root(nn.Sequential):
    """Has a `load_state_dict` of its own."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        changed = copy.copy(state_dict)
        for key in list(changed):
            if key.endswith("bonus"):
                del changed[key]
        return super().load_state_dict(changed, strict=strict, assign=assign)


def _child(choose: random.Random, *, code: bool) -> nn.Module:
    kinds: list[Callable[[], nn.Module]] = [
        lambda: Odd(choose),
        lambda: Odd(choose),
        lambda: Shared(),
        lambda: nn.Embedding(4, 2, padding_idx=0),
        lambda: nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last),
        lambda: nn.MultiheadAttention(2, 1),
        lambda: nn.ParameterList([torch.rand(2), torch.rand(3)]),
        lambda: nn.ParameterDict({"x": nn.Parameter(torch.rand(2)), "y": torch.rand(1)}),
        lambda: nn.Linear(2, 2),
        lambda: nn.Linear(2, 2).requires_grad_(False),
        lambda: nn.Linear(2, 2).half(),
        lambda: nn.BatchNorm1d(2),
    ]
    own: list[Callable[[], nn.Module]] = [
        lambda: Extra(choose.randrange(3)),
        Renames,
        lambda: leaf(choose),
        lambda: leaf(choose),
    ]
    return choose.choice([*kinds, *own] if code else kinds)()


def excuse_biases(module: nn.Module, keys: Any) -> None:
    """Excuse what is called bias."""
    keys.missing_keys[:] = [name for name in keys.missing_keys if not name.endswith("bias")]


def build(seed: int) -> nn.Module:
    """Make the model of a seed: the same one each time. Two of three have code of their own."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    code = seed % 3 > 0
    children = [_child(choose, code=code) for _ in range(choose.randint(1, 4))]
    if choose.random() < 0.2:
        children.append(choose.choice(children))
    if choose.random() < 0.3:
        children.append(nn.Sequential(*[_child(choose, code=code) for _ in range(2)]))
    model = (Root if code and choose.random() < 0.15 else nn.Sequential)(*children)
    _tie(model, choose)
    kinds = model.__dict__["kinds"] = list[str]()
    for module in list(dict.fromkeys(model.modules())) if code else ():
        if choose.random() < 0.1:
            act = writing_hook(choose, lambda: model, before=False)
            kinds.append(act.how)
            module.register_load_state_dict_post_hook(lambda m, keys, act=act: act(m))
        if choose.random() < 0.1:
            act = writing_hook(choose, lambda: model, before=True)
            kinds.append(act.how)
            module.register_load_state_dict_pre_hook(lambda m, *_, act=act: act(m))
    if code and choose.random() < 0.1:  # of the root, which runs last: others see fewer names
        model.register_load_state_dict_post_hook(excuse_biases)
    return model


def _tie(model: nn.Module, choose: random.Random) -> None:
    """Give some slots of equal shape and dtype one tensor, and some parameters one memory."""
    for kind in ("_parameters", "_buffers"):
        slots = [
            (module, name, value)
            for module in dict.fromkeys(model.modules())
            if isinstance(module, (nn.Linear, nn.Embedding, Odd))
            for name, value in getattr(module, kind).items()
            if value is not None and not nn.parameter.is_lazy(value)
        ]
        for module, name, value in slots:
            others = [
                one
                for *_, one in slots
                if one.shape == value.shape and one.dtype == value.dtype and one is not value
                if getattr(module, kind)[name] is value
            ]
            if others and choose.random() < 0.15:
                getattr(module, kind)[name] = choose.choice(others)


def state_for(seed: int, model: nn.Module, *, casts: bool) -> Any:
    """Return a state dict for the model of a seed. A part of them does not fit.

    Args:
        seed: The seed.
        model: The model.
        casts: Whether some values have another dtype.
    """
    choose = random.Random(seed + 1)
    torch.manual_seed(seed + 1)
    made: dict[object, Any] = {}
    state: Any = OrderedDict()
    for key, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, torch.Tensor):
            state[key] = copy.deepcopy(tensor)
        else:
            if id(tensor) not in made:
                made[id(tensor)] = _value_for(tensor, key, choose, casts=casts)
            state[key] = made[id(tensor)]
    if choose.random() < 0.7:
        state._metadata = model.state_dict()._metadata
    fates: dict[int, float] = {}
    rough = choose.random() < 0.3
    for key in list(state):
        fate = fates.setdefault(id(state[key]), choose.random())
        if not rough:
            break
        if fate < 0.08:
            del state[key]
        elif fate < 0.1:
            state[key] = made.setdefault((7, id(state[key])), torch.rand(7))
        elif fate < 0.14 and ".new." in key:
            state[key.replace(".new.", ".older.")] = state.pop(key)
        elif fate < 0.18 and key.endswith(("weight", "bank")):
            state[key.replace("weight", "old").replace("bank", "bonk")] = state.pop(key)
        elif key.endswith("bank") and fate < 0.5:
            state[key] = torch.rand(4)
    if choose.random() < 0.1:
        state["0.bonus"] = torch.rand(2)
    if choose.random() < 0.1:
        state["surplus"] = torch.rand(2)
    if choose.random() < 0.2 and len(state) > 1:  # one memory for two keys
        one, two = choose.sample(list(state), 2)
        both = state[one], state[two]
        if (
            all(isinstance(v, torch.Tensor) and v.numel() for v in both)
            and both[0].dtype == both[1].dtype
            and both[0].numel() == both[1].numel()
            and sum(v is both[1] for v in state.values()) == 1
        ):
            state[two] = both[0].detach().reshape(both[1].shape)
    return state


def _value_for(tensor: Any, key: str, choose: random.Random, *, casts: bool) -> torch.Tensor:
    lazy = nn.parameter.is_lazy(tensor)
    shape = ((2, 3) if key.endswith("weight") else (2,)) if lazy else tuple(tensor.shape)
    dtype = torch.float32 if lazy else tensor.dtype
    shares = key.endswith(("one", "two"))
    if casts and not shares and dtype in DTYPES[:4] and choose.random() < 0.2:
        dtype = choose.choice(DTYPES[:4])
    if shape == () and choose.random() < 0.2:
        shape = (1,)
    value = torch.rand(shape) if dtype in DTYPES else torch.randint(0, 2, shape)
    value = value.to(dtype)
    fate = choose.random()
    if len(shape) > 1 and fate < 0.2:
        value = value.transpose(0, 1).contiguous().transpose(0, 1)
    elif fate < 0.3 and shape:
        value = torch.cat([value, value])[: shape[0]]  # a view of a larger storage
    elif fate < 0.4 and dtype in DTYPES and isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=choose.random() < 0.5)
    return value


# ---- what a model is


class Door(NamedTuple):
    """One way to load.

    Attributes:
        is_blank: Whether the model is a skeleton.
        mode: The mode of `load`.
        source: ``"memory"``, ``"pt"`` or ``"safetensors"``.
        how: The `source` of `load`.
    """

    is_blank: bool
    mode: str
    source: str
    how: str = "auto"

    @property
    def keeps_strides(self) -> bool:
        """Whether strides are those of the file."""
        return self.is_blank and (self.mode == "assign" or self.how == "mmap")


class Facts(NamedTuple):
    """All of a model that a load may change.

    Attributes:
        slots: (module, slot) -> class, shape, dtype, strides, requires_grad, bytes and gradient.
        tensors: (module, slot) -> the tensor.
        ties: Groups of slots with one tensor.
        shared: Groups of slots with overlapping memory.
        attributes: (module, attribute) -> its value.
    """

    slots: dict[tuple[str, str], Any]
    tensors: dict[tuple[str, str], torch.Tensor]
    ties: set[frozenset[tuple[str, str]]]
    shared: set[frozenset[tuple[str, str]]]
    attributes: dict[tuple[str, str], Any]


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _show(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, tuple(value.shape), _raw(value)
    if isinstance(value, dict):
        return {key: _show(one) for key, one in value.items()}
    return copy.copy(value)


def facts_of(model: nn.Module) -> Facts:
    """Return what a model holds."""
    slots: dict[tuple[str, str], Any] = {}
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    attributes: dict[tuple[str, str], Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for at, value in (*module._parameters.items(), *module._buffers.items()):
            if value is not None:
                slots[name, at], tensors[name, at] = _slot(value), value
        for at in ("count", "loads", "log", "extra"):
            if at in module.__dict__:
                attributes[name, at] = _show(module.__dict__[at])
    return Facts(
        slots,
        tensors,
        _groups(tensors, id),
        _groups(
            {k: t for k, t in tensors.items() if not nn.parameter.is_lazy(t) and t.numel()},
            lambda t: t.untyped_storage().data_ptr() if not t.is_meta else id(t),
        ),
        attributes,
    )


def _slot(tensor: torch.Tensor) -> Any:
    if nn.parameter.is_lazy(tensor):
        return {"class": type(tensor), "grad": tensor.requires_grad}
    return {
        "class": type(tensor),
        "shape": tuple(tensor.shape),
        "dtype": tensor.dtype,
        "stride": _strides(tensor),
        "grad": tensor.requires_grad,
        "is_leaf": tensor.is_leaf,
        "values": tensor.detach().clone(),
        "gradient": None if tensor.grad is None else _raw(tensor.grad),
    }


def _strides(tensor: torch.Tensor) -> Any:
    """Strides that mean something: not of empty tensors, nor of sizes of 1."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [n if size > 1 else 0 for size, n in pairs] if tensor.numel() else []


def _groups(
    tensors: dict[tuple[str, str], torch.Tensor], key: Callable[[torch.Tensor], object]
) -> set[frozenset[tuple[str, str]]]:
    found = collections.defaultdict(set)
    for slot, tensor in tensors.items():
        found[key(tensor)].add(slot)
    return {frozenset(slots) for slots in found.values() if len(slots) > 1}


def look(model: nn.Module) -> list[Any]:
    """Everything of a model: objects, bytes, versions, flags, attributes."""
    found: list[Any] = []
    for name, module in model.named_modules(remove_duplicate=False):
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers"):
                for at, tensor in value.items():
                    found.append((name, at, id(tensor), _facts_of(tensor)))
            elif key != "_modules":
                found.append((name, key, str(value)))
        found.append((name, list(module._modules)))
    return found


def _facts_of(tensor: torch.Tensor | None) -> Any:
    if tensor is None or nn.parameter.is_lazy(tensor):
        return type(tensor)
    facts = tensor._version, tensor.requires_grad, tensor.dtype, tuple(tensor.shape)
    return facts, None if tensor.is_meta else _raw(tensor)


class Difference(NamedTuple):
    """What differs: of a slot, or of all of the model."""

    slot: tuple[str, str] | None
    fact: str
    found: Any
    expected: Any


def differences(
    ours: Facts, theirs: Facts, door: Door, other: Facts | None = None
) -> Iterator[Difference]:
    """Yield how two models differ, except for what is decided to differ.

    A tensor of a skeleton gets the dtype of the file, and with ``mode="assign"`` or
    ``source="mmap"`` its strides. torch's ``assign=True`` parts ties, and joins what a state dict
    shares.

    Args:
        ours: Loaded by torchlift.
        theirs: Loaded by torch.
        door: How ours was loaded.
        other: With ``mode="assign"``, loaded in torch's other way. Loading code of a live model
            writes to copies, but with torch's ``assign=True`` to what the caller passed. Values and
            flags may be those of either way, and strides those of the model.
    """
    is_assigned = door.mode == "assign" and not door.is_blank
    if ours.slots.keys() != theirs.slots.keys():
        yield Difference(None, "slots", ours.slots.keys(), theirs.slots.keys())
    for slot, facts in theirs.slots.items():
        have = ours.slots.get(slot, {})
        either = other.slots.get(slot, {}) if other is not None else {}
        for fact, value in facts.items():
            found = have.get(fact)
            if other is not None and (
                fact in ("stride", "gradient") or same(found, either.get(fact), kinds=True)
            ):
                continue
            if fact == "dtype" and (door.is_blank or is_assigned):
                continue
            if fact == "stride" and door.keeps_strides:
                continue
            if fact == "values" and found is not None:
                # torch's assign=True takes the dtype of the file, `load` that of the live model.
                value = value.to(found.dtype) if is_assigned else value
                if same(found if found.is_meta else found.to(value.dtype), value):
                    continue
            elif found == value:
                continue
            yield Difference(slot, fact, found, value)
    if door.mode != "assign":
        for fact in ("ties", "shared"):
            if getattr(ours, fact) != getattr(theirs, fact):
                yield Difference(None, fact, getattr(ours, fact), getattr(theirs, fact))
    if ours.attributes != theirs.attributes:
        yield Difference(None, "attributes", ours.attributes, theirs.attributes)


# ---- the doors


DOORS = (
    Door(False, "auto", "memory"),
    Door(False, "auto", "pt"),
    Door(False, "copy", "pt"),
    Door(False, "swap", "memory"),
    Door(False, "swap", "safetensors"),
    Door(False, "assign", "memory"),
    Door(False, "assign", "pt", "mmap"),
    Door(True, "auto", "memory"),
    Door(True, "auto", "pt"),
    Door(True, "auto", "safetensors", "mmap"),
    Door(True, "auto", "pt", "read"),
    Door(True, "assign", "memory"),
)

#: Refusals of what torch loads, each a decision that the guide explains.
REFUSED = {
    "the values of a tie differ": "different values in the checkpoint",
    "a write before the verdict": "writes into",
    "nothing fits": "nothing in the checkpoint fits",
    "a write to what is loaded twice": "writes to what it has loaded, and loads it once more",
    "one of two over one memory is swapped": "cannot be swapped",
}


def excuse(
    seed: int, wrong: list[Difference], model: nn.Module, theirs: Facts, door: Door
) -> str | None:
    """Return the decision that is the reason for differences, or None."""
    facts, kinds = {one.fact for one in wrong}, set(model.__dict__["kinds"])
    if not facts:
        return "loaded"
    slots = {one.slot for one in wrong}
    ours = facts_of(model)
    if door.mode == "assign" and not door.is_blank and facts <= {"values", "stride"}:
        if all(any(slot in tie for tie in ours.ties) for slot in slots):
            return "a tie is kept where torch's assign=True parts it"
        shares = facts_of(build(seed)).shared
        if kinds and all(any(slot in two for two in shares) for slot in slots):
            return "a hook sees the ties of modules without code parted"
    if facts != {"values"}:
        return None
    if kinds and door.is_blank and all(any(s in two for two in theirs.shared) for s in slots):
        return "a hook writes to one of two over one memory of a skeleton"
    if "data" in kinds and door.is_blank:
        return "a hook writes through .data to a tie of a skeleton"
    pairs = ((one.found.to(one.expected.dtype), one.expected) for one in wrong)
    if kinds and all(torch.allclose(*pair, rtol=0.02, atol=0.02) for pair in pairs):
        return "a hook sees the values before the cast"
    return None


def fresh(state: Any) -> Any:
    """Return the state dict with tensors of its own that share memory as before."""
    made: Any = copy.deepcopy(state)
    if hasattr(state, "_metadata"):
        made._metadata = copy.deepcopy(state._metadata)
    return made


def run(seed: int, door: Door, folder: Path) -> str:
    """Load one random state dict into one random model. Return how it ended.

    Raises:
        AssertionError: If the model is not as torch makes it, or a failed load changed it.
    """
    theirs = build(seed)
    casts = not ((door.is_blank or door.mode == "assign") and seed % 3)
    state = state_for(seed, theirs, casts=casts)
    is_plain = all(isinstance(value, torch.Tensor) for value in state.values())
    if door.source == "safetensors" and not is_plain:
        return "no safetensors"
    choose = random.Random(seed + 2)
    strict = choose.random() < 0.6
    ours = torchlift.skeleton(build, seed) if door.is_blank else build(seed)
    if not door.is_blank and choose.random() < 0.3:
        for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
            if one.requires_grad and one.is_leaf and not nn.parameter.is_lazy(one):
                one.grad, two.grad = torch.ones_like(one), torch.ones_like(two)
    source: Any = fresh(state)
    values = fresh(state)
    if door.source != "memory":
        source = folder / f"x.{door.source}"
        if door.source == "pt":
            torch.save(values, source)
            values = torch.load(source, weights_only=False)
        else:
            safetensors.torch.save_file(
                {k: v.detach().clone().contiguous() for k, v in values.items()}, source
            )
            values = OrderedDict(safetensors.torch.load_file(source))
    assign = door.mode == "assign" and not door.is_blank
    before, look_before = facts_of(ours), look(ours)
    start = facts_of(theirs).tensors
    problem = refused = keys = report = planned = None
    options: dict[str, Any] = {"strict": strict, "mode": door.mode, "source": door.how}
    try:
        torchlift.plan(ours, source, **options)
    except (CheckpointError, RuntimeError) as error:  # an override's own one, of a copy in place
        planned = error
    # Code that writes into a live tensor before the verdict is refused, and its write stays.
    writes = REFUSED["a write before the verdict"] in str(planned)
    assert writes or look(ours) == look_before, "a plan changed the model"
    try:
        keys = theirs.load_state_dict(values, strict=strict, assign=assign)
    except RuntimeError as error:
        problem = error
    try:
        report = torchlift.load(ours, source, **options)
    except (CheckpointError, RuntimeError) as error:
        refused = error
    after = facts_of(ours)
    if refused is not None:
        assert writes or look(ours) == look_before, f"a failed load changed it ({refused})"
        if problem is None:
            reasons = [name for name, words in REFUSED.items() if words in str(refused)]
            assert reasons, f"refused, torch loads it: {refused}"
            return reasons[0]
        return "refused by both"
    assert problem is None, f"torch refuses it: {problem}"
    assert planned is None, f"the plan refuses it: {planned}"
    assert keys is not None
    assert report is not None
    assert sorted(report.missing_keys) == sorted(keys.missing_keys), (report.missing_keys, keys)
    assert sorted(report.unexpected_keys) == sorted(keys.unexpected_keys), (
        report.unexpected_keys,
        keys,
    )
    expected = facts_of(theirs)
    other = None
    if door.mode == "assign" and (door.is_blank or seed % 3):
        again = build(seed)
        again.load_state_dict(fresh(state), strict=strict, assign=door.is_blank)
        other = facts_of(again)
    wrong = [*differences(after, expected, door, other)]
    end = excuse(seed, wrong, ours, expected, door)
    assert end is not None, wrong
    if not assign and not door.is_blank:  # the same objects stay
        for slot, tensor in expected.tensors.items():
            stays = start.get(slot) is tensor, before.tensors.get(slot) is after.tensors[slot]
            assert stays[1] or not stays[0], (slot, "object stays in torch, and here", stays)
    return end


# ---- FSDP2


def _shardable(seed: int) -> nn.Module:
    """Make a model that FSDP2 takes: parameters of one dtype with dimensions, one memory each."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    kinds: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(2, 3),
        lambda: nn.Linear(3, 2, bias=False),
        lambda: nn.Embedding(5, 2),
        lambda: nn.BatchNorm1d(3),
        lambda: nn.Linear(2, 3).requires_grad_(False),
        lambda: Extra(choose.randrange(3)),
        Renames,
    ]
    children = [choose.choice(kinds)() for _ in range(choose.randint(2, 5))]
    model = nn.Sequential(*children)
    linear = [m for m in children if isinstance(m, nn.Linear)]
    if len(linear) > 1 and linear[0].weight.shape == linear[1].weight.shape:
        linear[1].weight = linear[0].weight
    if seed % 3 == 1:
        model.register_load_state_dict_pre_hook(_halve)
    return model


def _halve(_: nn.Module, state: Any, *__: Any) -> None:
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            state[key] = value / 2


def run_sharded(seed: int, folder: Path) -> str:
    """Load into a model of FSDP2 on all ranks, and into a bare one with torch. See `run`."""
    theirs, ours = _shardable(seed), _shardable(seed)
    state = state_for(seed, theirs, casts=False)
    choose = random.Random(seed + 2)
    strict, is_blank, door = choose.random() < 0.6, choose.random() < 0.5, choose.randrange(3)
    if is_blank:
        ours = torchlift.skeleton(_shardable, seed)
    tied = len({id(p) for p in ours.parameters()}) < len([*ours.named_parameters("", True, False)])
    for child in () if tied else ours.children():  # a tie belongs into one group
        if choose.random() < 0.5 and [*child.parameters()]:
            fully_shard(child)
    fully_shard(ours)
    source: Any = fresh(state)
    if door:
        source = folder / f"{seed}.pt"
        if dist.get_rank() == 0:
            torch.save(state, source)
        dist.barrier()
    problem = refused = keys = report = None
    try:
        keys = theirs.load_state_dict(fresh(state), strict=strict)
    except RuntimeError as error:
        problem = error
    try:
        how = "read" if door == 2 else "auto"
        report = torchlift.load(ours, source, strict=strict, source=how)
    except (CheckpointError, RuntimeError) as error:
        refused = error
    assert (problem is None) == (refused is None), (seed, problem, refused)
    if report is None or keys is None:
        return "refused by both"
    assert sorted(report.missing_keys) == sorted(keys.missing_keys), (seed, keys)
    assert sorted(report.unexpected_keys) == sorted(keys.unexpected_keys), (seed, keys)
    whole = {name: _whole(tensor) for name, tensor in ours.state_dict(keep_vars=True).items()}
    for name, tensor in theirs.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            found, flag = whole[name]
            assert same(found, tensor.detach()), (seed, name, found, tensor)
            assert flag == tensor.requires_grad, (seed, name)
    attributes = facts_of(theirs).attributes
    for (path, name), value in attributes.items():
        assert _show(getattr(ours.get_submodule(path), name)) == value, (seed, path, name)
    return "loaded"


def _whole(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach(), tensor.requires_grad


def run_shards(seeds: list[int], folder: str) -> dict[str, int]:
    """Load many random models of FSDP2. Called on each rank. Return how they ended."""
    warnings.simplefilter("ignore")
    ends: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        ends[run_sharded(seed, Path(folder))] += 1
    return dict(ends)

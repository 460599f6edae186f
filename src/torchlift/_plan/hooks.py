"""What a module's own loading code makes of a checkpoint: hooks, overrides, extra state.

Modules may change the state dict they are loaded from (``register_load_state_dict_pre_hook``), load
themselves (``_load_from_state_dict``), keep state that is not a tensor (``set_extra_state``), or
look at the result (``register_load_state_dict_post_hook``). torch runs all of it while it writes.
Here it runs before anything is written: on a dict of mapped tensors, and for overrides on a
stand-in of the module, so that what it decides becomes part of the plan.
"""

from __future__ import annotations

import bisect
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.module import _IncompatibleKeys
from torch.overrides import TorchFunctionMode

from torchlift._checkpoint import MappedViews
from torchlift._model.commit import is_plain
from torchlift._model.devices import ordinary_tensors
from torchlift._model.fsdp import is_fsdp
from torchlift._model.slots import is_lazy, modules_of, walk
from torchlift._plan.match import Candidate
from torchlift._skeleton.recording import version_of
from torchlift.errors import MismatchError, PlacementError
from torchlift.formats import Index, TensorEntry
from torchlift.formats.index import Leaf

_EXTRA = "_extra_state"


@dataclass(slots=True)
class Outcome:
    """What the modules' code decided.

    Attributes:
        candidates: name in the model -> value on offer, after all hooks.
        silent: names of the model that get nothing and are not to be called missing.
        missing, unexpected: names that the code itself reported.
        attributes: (module, name, value) that an override set besides its tensors.
        extra: (module, state) for `set_extra_state`.
    """

    candidates: dict[str, Candidate] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    attributes: list[tuple[nn.Module, str, object]] = field(default_factory=list)
    extra: list[tuple[nn.Module, object]] = field(default_factory=list)


def run_hooks(
    model: nn.Module,
    index: Index,
    names: Mapping[str, str],
    objects: Mapping[str, str],
    strict: bool,
) -> Outcome | None:
    """Run the loading code of every module that has some, as `load_state_dict` would.

    Args:
        model: the module; its parameters and buffers are not changed.
        index: the checkpoint.
        names: key of a tensor in the checkpoint -> its name in the model.
        objects: the same for leaves that are not tensors.
        strict: passed on to the code.

    Returns:
        None when no module has code of its own: then names alone decide.
    """
    offered = set(names.values())
    modules = [
        (prefix, module) for prefix, module in walk(model) if _has_code(module, prefix, offered)
    ]
    if not modules:
        return None
    with ordinary_tensors(), closing(_Run(index, names, objects, strict)) as run:
        for prefix, module in modules:
            run.visit(prefix, module)
        return run.finish()


def _has_code(module: nn.Module, prefix: str, offered: set[str]) -> bool:
    hooks = module._load_state_dict_pre_hooks
    hooked = bool(hooks) and not all(is_fsdp(h) or _is_lazy_hook(h) for h in hooks.values())
    if type(module)._load_from_state_dict is _NormBase._load_from_state_dict:
        # Batch norm adds a counter to files of torch < 0.4.1, and otherwise loads as any module.
        own = prefix + "num_batches_tracked" not in offered
    else:
        own = _overrides_load(module)
    return own or _takes_extra(module) or hooked


def _overrides_load(module: nn.Module) -> bool:
    return type(module)._load_from_state_dict is not nn.Module._load_from_state_dict


def _is_lazy_hook(hook: Any) -> bool:
    # It gives an uninitialised parameter its shape, which placing the tensor does anyway.
    inner = getattr(hook, "hook", hook)
    return getattr(inner, "__func__", None) is LazyModuleMixin._lazy_load_hook


class _Run:
    """A state dict of mapped tensors on its way through the modules."""

    def __init__(
        self,
        index: Index,
        names: Mapping[str, str],
        objects: Mapping[str, str],
        strict: bool,
    ) -> None:
        self.index = index
        self.strict = strict
        self.views = MappedViews(index)
        self.written = Written(index)
        self.templates = templates_by_name(index, {**names, **objects})
        self.outcome = Outcome()
        self.state: dict[str, Any] = {}
        self.origin: dict[tuple[object, ...], tuple[str, int]] = {}
        self.versions: dict[str, Mapping[str, object]] = {}
        for key, name in names.items():
            view = self.views.view(index.entries[key])
            self.state[name] = view
            self.origin[_identity(view)] = (key, view._version)
            old, new = key.rpartition(".")[0], name.rpartition(".")[0]
            if old in index.module_versions:
                self.versions[new] = index.module_versions[old]
        for key, name in objects.items():
            self.state[name] = index.objects[key]
        self.order = sorted(self.state)

    def visit(self, prefix: str, module: nn.Module) -> None:
        """Run one module's code on its part of the state dict."""
        local = OrderedDict((name, self.state[name]) for name in self._under(prefix))
        metadata = dict(self.versions.get(prefix[:-1], {}))
        metadata["assign_to_params_buffers"] = True
        if _takes_extra(module):
            gather(local, prefix + _EXTRA, self.templates)
        if _overrides_load(module):
            self._override(prefix, module, local, metadata)
        else:
            errors: list[str] = []
            for hook in module._load_state_dict_pre_hooks.values():
                if not _is_lazy_hook(hook) and not is_fsdp(hook):
                    found = (self.outcome.missing, self.outcome.unexpected, errors)
                    hook(local, prefix, metadata, self.strict, *found)
            self._raise(errors, prefix)
            self._take_extra(prefix, module, local)
        self._replace(prefix, local)

    def _override(
        self, prefix: str, module: nn.Module, local: OrderedDict[str, Any], metadata: dict[str, Any]
    ) -> None:
        stand_in, before = stand_in_for(module)
        missing: list[str] = []
        unexpected: list[str] = []
        errors: list[str] = []
        extras: list[object] = []
        if _takes_extra(module):
            object.__setattr__(stand_in, "set_extra_state", extras.append)
        # Strict in any case: torch's own code lists no missing name otherwise, and a name that is
        # not listed counts as settled. What becomes of the lists is for the plan to say.
        with DataTaken() as taken:
            stand_in._load_from_state_dict(
                local, prefix, metadata, True, missing, unexpected, errors
            )
        # torch's own words for a shape that differs; the plan has its own, with all of them.
        self._raise([text for text in errors if "size mismatch" not in text], prefix)
        self.outcome.extra += [(module, state) for state in extras]
        for name, tensor in tensors_of(stand_in):
            full = prefix + name
            old, offered = before.get(name), local.get(full)
            changed = old is None or old.is_changed(tensor)
            if old is not None:
                taken.require_memory(old, tensor, full, self.index.path)
            if changed:
                self.outcome.candidates[full] = self._candidate(full, tensor.detach())
            elif isinstance(offered, torch.Tensor) and offered.shape != tensor.shape:
                self.outcome.candidates[full] = self._candidate(full, offered)  # to be reported
            elif full not in missing:
                self.outcome.silent.add(full)
        self.outcome.missing += [name for name in missing if name[len(prefix) :] not in before]
        self.outcome.unexpected += unexpected
        self._keep_attributes(module, stand_in)
        children = tuple(prefix + name + "." for name in module._modules)
        for name in [name for name in local if not name.startswith(children)]:
            del local[name]  # its own level is settled; the rest is its children's

    def _keep_attributes(self, module: nn.Module, stand_in: nn.Module) -> None:
        for name, value in vars(stand_in).items():
            if name in ("_parameters", "_buffers", "_modules", "set_extra_state"):
                continue
            if name not in vars(module) or vars(module)[name] is not value:
                self.outcome.attributes.append((module, name, value))

    def _take_extra(self, prefix: str, module: nn.Module, local: OrderedDict[str, Any]) -> None:
        if not _takes_extra(module):
            return
        name = prefix + _EXTRA
        if name in local:
            self.outcome.extra.append((module, local.pop(name)))
        else:
            self.outcome.missing.append(name)

    def _under(self, prefix: str) -> list[str]:
        if not prefix:
            return list(self.order)
        start = bisect.bisect_left(self.order, prefix)
        stop = start
        while stop < len(self.order) and self.order[stop].startswith(prefix):
            stop += 1
        return self.order[start:stop]

    def _replace(self, prefix: str, local: Mapping[str, Any]) -> None:
        """Put what the code left of its part of the dict back into the whole."""
        old = self._under(prefix)
        for name in old:
            if name not in local:
                del self.state[name]
        # Names outside the prefix are nobody's: torch gives each child a filtered copy.
        kept = {name: value for name, value in local.items() if name.startswith(prefix)}
        self.state.update(kept)
        if kept.keys() != set(old):
            self.order = sorted(self.state)

    def _candidate(self, name: str, value: torch.Tensor) -> Candidate:
        key, version = self.origin.get(_identity(value), ("", 0))
        # A hook that wrote to it did so in this private map: the file still has the old values.
        if key and value._version == version:
            entry = self.index.entries[key]
            if not self.written.differs(value, entry):
                return Candidate(key, entry)
        return Candidate(name, value=value)

    def _raise(self, errors: Iterable[str], prefix: str) -> None:
        texts = list(errors)
        if texts:
            raise MismatchError(
                f"a module's own loading code refused: {'; '.join(texts)}",
                file=self.index.path,
                entry=prefix[:-1] or None,
            )

    def finish(self) -> Outcome:
        """The outcome, with everything that no override settled."""
        for name, value in self.state.items():
            if isinstance(value, torch.Tensor):
                self.outcome.candidates.setdefault(name, self._candidate(name, value))
            else:
                self.outcome.unexpected.append(name)
        return self.outcome

    def close(self) -> None:
        """Close the files; the tensors stay valid."""
        self.views.close()
        self.written.close()


def _identity(tensor: torch.Tensor) -> tuple[object, ...]:
    # A conjugate is the same numbers in the same place, shown otherwise.
    shown = tensor.is_conj(), tensor.is_neg()
    return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), shown)


def _takes_extra(module: nn.Module) -> bool:
    return type(module).set_extra_state is not nn.Module.set_extra_state


def run_post_hooks(model: nn.Module, missing: list[str], unexpected: list[str]) -> None:
    """Call the modules' post-hooks, which may remove names from the two lists.

    Children come before their parents, as in `load_state_dict`.
    """
    if not has_post_hooks(model, of_fsdp=True):
        return
    keys = _IncompatibleKeys(missing, unexpected)
    for _, module in reversed(list(walk(model))):
        for hook in module._load_state_dict_post_hooks.values():
            if hook(module, keys) is not None:
                raise TypeError(
                    "a hook of register_load_state_dict_post_hook returned a value; it changes "
                    "the lists that it gets in place"
                )


def has_post_hooks(model: nn.Module, *, of_fsdp: bool = False) -> bool:
    """Whether any module wants to see the result of a load, and could refuse it.

    Args:
        model: the module.
        of_fsdp: count FSDP2's hook too, which takes note of new shards and refuses nothing.
    """
    return any(
        of_fsdp or not is_fsdp(hook)
        for module in modules_of(model)
        if module._load_state_dict_post_hooks
        for hook in module._load_state_dict_post_hooks.values()
    )


def templates_by_name(index: Index, names: Mapping[str, str]) -> dict[str, object]:
    """Name of an extra state in the model -> its containers as they were saved.

    Args:
        index: the checkpoint.
        names: key in the checkpoint -> name in the model, for tensors and other leaves.
    """
    found: dict[str, object] = {}
    for key, tree in index.templates.items():
        for leaf in _leaves(tree):
            name, rest = names.get(leaf), leaf[len(key) :]
            if name is not None and name.endswith(rest):
                found[name[: len(name) - len(rest)]] = _moved(tree, key, name[: -len(rest) or None])
                break
    return found


def gather(local: MutableMapping[str, Any], name: str, templates: Mapping[str, object]) -> None:
    """Put the parts of the extra state called `name` together again, under its name."""
    inside = [key for key in local if key.startswith(name + ".")]
    if name in local or not inside:
        return
    tree = templates.get(name)
    if tree is not None and all(leaf in local for leaf in _leaves(tree)):
        local[name] = _filled(tree, local)
    else:
        local[name] = _nested(local, inside, name + ".")


def _leaves(tree: object) -> list[str]:
    if isinstance(tree, Leaf):
        return [tree.key]
    parts = tree.values() if isinstance(tree, dict) else tree
    assert not isinstance(parts, (str, Leaf))
    return [leaf for part in parts for leaf in _leaves(part)]  # type: ignore[attr-defined]


def _moved(tree: object, old: str, new: str) -> object:
    if isinstance(tree, Leaf):
        return Leaf(new + tree.key[len(old) :])
    if isinstance(tree, dict):
        return {key: _moved(part, old, new) for key, part in tree.items()}
    assert isinstance(tree, (list, tuple))
    return type(tree)([_moved(part, old, new) for part in tree])


def _filled(tree: object, local: MutableMapping[str, Any]) -> object:
    if isinstance(tree, Leaf):
        return local.pop(tree.key)
    if isinstance(tree, dict):
        return {key: _filled(part, local) for key, part in tree.items()}
    assert isinstance(tree, (list, tuple))
    return type(tree)([_filled(part, local) for part in tree])


def _nested(local: MutableMapping[str, Any], keys: list[str], prefix: str) -> dict[str, object]:
    """What the dotted keys tell: for formats without containers, and for changed state dicts."""
    state: dict[str, Any] = {}
    for key in keys:
        *path, last = key[len(prefix) :].split(".")
        place = state
        for part in path:
            place = place.setdefault(part, {})
        place[last] = local.pop(key)
    return state


@dataclass(frozen=True, slots=True)
class Before:
    """A stand-in's tensor as it was.

    Attributes:
        tensor: the tensor itself.
        version: how often it had been written to.
        memory: where its values were; None on meta.
        live: the tensor of the real module, which it is a copy of.
    """

    tensor: torch.Tensor
    version: int
    memory: int | None
    live: torch.Tensor

    def is_changed(self, now: torch.Tensor) -> bool:
        """Whether an override put another tensor or other values in its place."""
        if now is not self.tensor:
            return True
        if is_lazy(now):
            return False
        if version_of(now) != self.version:
            return True
        if _memory_of(now) != self.memory or now.shape != self.live.shape:
            return True
        # What is written through `.data` or NumPy is counted nowhere.
        return not now.is_meta and is_plain(self.live) and not same_bits(now, self.live)


class DataTaken(TorchFunctionMode):
    """Notes whose ``.data`` is taken: on meta, what is written there leaves no trace."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func == _DATA:
            self.tensors.append(args[0])
        return func(*args, **(kwargs or {}))

    def require_memory(self, before: Before, now: torch.Tensor, name: str, path: str) -> None:
        """Refuse what an override wrote into a tensor on meta: it would be lost without a word.

        Raises:
            PlacementError: the override did so.
        """
        if now is not before.tensor or not now.is_meta:
            return
        if before.is_changed(now) or any(item is now for item in self.tensors):
            raise PlacementError(
                "its module's own loading code writes into it, and on meta nothing can be written",
                file=path,
                entry=name,
                hint="Make it first, with torchlift.materialize(model, names=...).",
            )


_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


def stand_in_for(module: nn.Module) -> tuple[nn.Module, dict[str, Before]]:
    """A module that an override can load into, and its tensors as they are before.

    It shares everything with the real one but the registries of tensors, which hold copies.
    """
    made = object.__new__(type(module))
    made.__dict__.update(vars(module))
    parameters: dict[str, Any] = {}
    for name, parameter in module._parameters.items():
        parameters[name] = None if parameter is None else _copy_of(parameter)
    buffers = {
        name: None if buffer is None else _copy_of(buffer)
        for name, buffer in module._buffers.items()
    }
    made.__dict__.update(_parameters=parameters, _buffers=buffers)
    real = dict(tensors_of(module))
    return made, {
        name: Before(tensor, _version_of(tensor), _memory_of(tensor), real[name])
        for name, tensor in tensors_of(made)
    }


def _version_of(tensor: torch.Tensor) -> int:
    return -1 if is_lazy(tensor) else version_of(tensor)


def _memory_of(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_meta or is_lazy(tensor) else tensor.data_ptr()


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    if is_lazy(tensor):
        return tensor
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
    return tensor.detach().clone()


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's own parameters and persistent buffers."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


_PAGEMAP = "/proc/self/pagemap"
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_WORD = 8  # bytes per page in the page map
_PIECE = 1 << 17  # words per read: the pages of 512 MiB


class Written:
    """Finds the tensors of an index's views that somebody wrote to."""

    def __init__(self, index: Index) -> None:
        self._index = index
        try:
            self._pagemap: int | None = os.open(_PAGEMAP, os.O_RDONLY)
        except OSError:
            self._pagemap = None

    def close(self) -> None:
        """Close what was opened to find out."""
        if self._pagemap is not None:
            os.close(self._pagemap)
            self._pagemap = None

    def differs(self, tensor: torch.Tensor, entry: TensorEntry) -> bool:
        """Whether a view of the entry holds other values than the file."""
        if self._is_untouched(tensor):
            return False
        views = MappedViews(self._index)
        try:
            return not same_bits(tensor, views.view(entry))
        finally:
            views.close()

    def _is_untouched(self, tensor: torch.Tensor) -> bool:
        """Whether all pages are the file's for sure; False where that cannot be found out."""
        if not tensor.numel():
            return True
        if self._pagemap is None:
            return False
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        span = (sum((size - 1) * step for size, step in steps) + 1) * tensor.itemsize
        first = tensor.data_ptr() // _PAGE
        stop = (tensor.data_ptr() + span - 1) // _PAGE + 1
        for at in range(first, stop, _PIECE):
            count = min(_PIECE, stop - at)
            try:
                words = os.pread(self._pagemap, count * _WORD, at * _WORD)
            except OSError:
                return False
            if len(words) != count * _WORD or _has_own_pages(words):
                return False
        return True


def _has_own_pages(words: bytes) -> bool:
    if words.count(0) == len(words):
        return False  # none was looked at yet, let alone written to
    pages = torch.frombuffer(bytearray(words), dtype=torch.int64)
    # Bits 63 and 62: in memory, or swapped out. Bit 61: it belongs to the file.
    exists, of_file = (pages >> 62) & 3 != 0, (pages >> 61) & 1 == 1
    return bool((exists & ~of_file).any())


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal, a NaN to itself too.

    Example:
        >>> same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
        False
    """
    return torch.equal(_bytes_of(one), _bytes_of(two))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    # Not flatten(): a single element may keep a stride that a view as bytes refuses.
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)

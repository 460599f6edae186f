"""What a module's own loading code makes of a checkpoint: hooks, overrides, extra state.

Modules may change the state dict they are loaded from (``register_load_state_dict_pre_hook``), load
themselves (``_load_from_state_dict``), keep state that is not a tensor (``set_extra_state``), or
look at the result (``register_load_state_dict_post_hook``). torch runs all of it while it writes.
Here it runs before anything is written: on a dict of mapped tensors, and for overrides on a
stand-in of the module, so that what it decides becomes part of the plan.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.module import _IncompatibleKeys

from torchlift.checkpoint import MappedViews
from torchlift.distributed.fsdp import is_fsdp
from torchlift.errors import MismatchError
from torchlift.extra_state import gather, templates_by_name
from torchlift.formats import Index
from torchlift.inference import ordinary_tensors
from torchlift.match import Candidate
from torchlift.slots import modules_of, walk
from torchlift.understudy import DataTaken, stand_in_for, tensors_of
from torchlift.written import Written

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

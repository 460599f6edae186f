"""Call a `load_state_dict` that a model's class overrides, once, as torch does.

Such a method may reorder rows, rename keys or resize a table. Then it calls the method of
`nn.Module`, and may compute something from the values afterwards. The method runs in a thread of
its own. There it waits inside of the method of `nn.Module` until torchlift has loaded the state
that it passed on. torch calls the override of the root only, and so does torchlift.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from torchlift._model.commit import Commit
from torchlift._model.names import wrapped_by
from torchlift._model.slots import ModuleTree, walk
from torchlift._model.stand_ins import Change, StandIns
from torchlift._model.state import own
from torchlift._model.torch_private import strict_of_caller
from torchlift._system.text import clipped_list
from torchlift.errors import CheckpointError, MismatchError, PlacementError, note

#: Attributes of a module in which torch looks for these.
_LOAD, _POST_HOOKS = "_load_from_state_dict", "_load_state_dict_post_hooks"
#: Torch's own way, which is right for any class. A method may expect the containers of the file.
_CALL_IT = "model.load_state_dict(torchlift.open(path).tree()), or with the state dict in memory."
#: Identity of a module -> the call that loads it now.
_RUNNING: dict[int, OwnLoading] = {}


class ModuleHolder(nn.ModuleDict):
    """Several models under any names. Each is saved and loaded as a root."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._modules.update(modules)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state of each model under its name, from a call without a prefix."""
        found: OrderedDict[str, Any] = OrderedDict()
        metadata: OrderedDict[str, Any] = OrderedDict()
        for name, module in self._modules.items():
            assert module is not None
            state = own(module, "state_dict")()
            found.update({f"{name}.{key}": value for key, value in state.items()})
            for path, version in (getattr(state, "_metadata", None) or {}).items():
                metadata[f"{name}.{path}".removesuffix(".")] = version
        found._metadata = metadata  # type: ignore[attr-defined]
        return found


@dataclass(frozen=True, slots=True)
class PassedState:
    """The arguments that a class's own `load_state_dict` passes to the method of `nn.Module`.

    Attributes:
        module: The module whose method it calls: the model, or a module inside of it.
        values: Name in that module -> tensor or other value.
        strict: Whether names must match.
    """

    module: nn.Module
    values: Mapping[str, Any]
    strict: bool


class _Refused(RuntimeError):
    """Names do not match. It is a RuntimeError, as in torch, because some classes catch that."""


class _Abandoned(BaseException):
    """The load has ended, so the waiting method must end, too."""


class OwnLoading:
    """One call of a class's own `load_state_dict`, which waits while torchlift loads.

    Until everything is in place, all tensors of the module are copies that the method may write to.

    Args:
        prefix: how the names of the module's state begin in the model's state dict.
        module: the module whose class overrides the method.
        commit: ends the method where it waits, if the load fails.

    Attributes:
        changes: what the method did to the copies so far.
    """

    def __init__(self, prefix: str, module: nn.Module, commit: Commit) -> None:
        self.prefix = prefix
        self.changes: list[Change] = []
        self._module = module
        self._events: SimpleQueue[PassedState | BaseException | None] = SimpleQueue()
        self._replies: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._placed = self._ended = False
        self._reported: tuple[list[str], list[str]] = [], []
        commit.when_undone(self.abandon)

    def start(self, values: Mapping[str, Any], strict: bool) -> PassedState:
        """Run the method until it calls the method of `nn.Module`.

        Args:
            values: The state dict.
            strict: Whether names must match.

        Raises:
            PlacementError: If it never calls that.
        """
        grad, device = torch.is_grad_enabled(), torch.get_default_device()
        default_device = nullcontext() if device.type == "cpu" else device
        accelerator, names = torch.accelerator.is_available(), [*values]
        index = torch.accelerator.current_device_index() if accelerator else -1

        def run() -> None:
            # Torch keeps these for each thread.
            if index >= 0:
                torch.accelerator.set_device_index(index)
            try:
                with torch.set_grad_enabled(grad), default_device:
                    method = own(self._module, "load_state_dict")
                    method(values) if strict else method(values, strict=False)
                self._events.put(None)
            except BaseException as error:
                if not isinstance(error, (CheckpointError, _Refused, _Abandoned)):
                    note(
                        error,
                        f"{self._name} raised this. It got {clipped_list(names)}, under "
                        f"dotted names, as the arguments of the load leave them. {self._hint()}",
                    )
                self._events.put(error)

        # A daemon: a method that never ends does not keep the program from ending.
        self._thread = threading.Thread(
            target=copy_context().run, args=(run,), name="load_state_dict", daemon=True
        )
        # Two loads of one model would take each other's events, and wait for ever.
        if _RUNNING.setdefault(id(self._module), self) is not self:
            self._ended = True
            raise self._refusal(
                "runs already, for another load of the model",
                "Wait until that load has ended. Inside of the method, call that of nn.Module: "
                "super().load_state_dict(state_dict).",
            )
        self._stand_ins = StandIns((self.prefix + path, each) for path, each in walk(self._module))
        self._stand_ins.put_on()
        self._intercept()
        self._thread.start()
        return self._require(self._take_off(self._wait()))

    def refuse(self, error: MismatchError) -> PassedState:
        """Raise the error in the method, and return the state of its next attempt.

        Raises:
            MismatchError: If it does not try again.
        """
        self._stand_ins.put_on()
        found = self._take_off(self._resume(_Refused(str(error))))
        if found is None:
            raise error
        return found

    def _take_off(self, passed: PassedState | None) -> PassedState | None:
        self.changes = [*self._stand_ins.take_off().values()]
        return passed

    def finish(self, missing: Sequence[str], unexpected: Sequence[str]) -> None:
        """Return from the method of `nn.Module`, and run the rest of the override.

        Args:
            missing: Names of the model without a value.
            unexpected: Names of the source that the model does not have.

        Raises:
            PlacementError: If the override calls the method of `nn.Module` again.
        """
        self._placed, self._reported = True, ([*missing], [*unexpected])
        # Torch would call them once more, without what torchlift lets them see.
        hooks = [(module, vars(module)[_POST_HOOKS]) for module in self._modules()]
        try:
            for module, _ in hooks:
                vars(module)[_POST_HOOKS] = OrderedDict()
            self._resume(None)
        finally:
            for module, kept in hooks:
                vars(module)[_POST_HOOKS] = kept

    def abandon(self) -> None:
        """End the method where it waits, if it still does."""
        while self._thread is not None and not self._ended:
            try:
                self._resume(_Abandoned())
            except (_Abandoned, Exception):
                continue  # its own code may turn one error into another

    def path_of(self, module: nn.Module) -> str:
        """Return where a module is inside of this one, with a dot at the end."""
        return next(path for path, each in walk(self._module) if each is module)

    def _modules(self) -> Iterable[nn.Module]:
        return {id(module): module for _, module in walk(self._module)}.values()

    def _intercept(self) -> None:
        for module in self._modules():
            vars(module)[_LOAD] = partial(self._receive, module)

    def _resume(self, reply: BaseException | None) -> PassedState | None:
        self._intercept()
        self._replies.put(reply)
        return self._wait()

    def _wait(self) -> PassedState | None:
        """Return what the method passes on next, or None when it has returned."""
        try:
            event = self._events.get()
        finally:
            for module in self._modules():
                vars(module).pop(_LOAD, None)
        if isinstance(event, PassedState):
            return event
        self._ended = True
        _RUNNING.pop(id(self._module), None)
        if self._thread is not None:
            self._thread.join()
        if event is not None and not isinstance(event, _Refused):
            raise event
        return None

    def _require(self, found: PassedState | None) -> PassedState:
        if found is not None:
            return found
        raise self._refusal("loads without the method of nn.Module, which is where torchlift loads")

    @property
    def _name(self) -> str:
        return f"the load_state_dict of {type(self._module).__name__}"

    def _hint(self) -> str:
        # Torch copies nothing into what is on meta.
        first = any(t.is_meta for t in self._module.parameters())
        return f"Load as torch does: {'torchlift.materialize(model), then ' * first}{_CALL_IT}"

    def _refusal(self, what: str, hint: str = "") -> PlacementError:
        return PlacementError(
            f"{self._name} {what}", entry=self.prefix[:-1] or None, hint=hint or self._hint()
        )

    def _receive(
        self, module: nn.Module, values: dict[str, Any], prefix: str, _metadata: object,
        _strict: bool, missing: list[str], unexpected: list[str], _errors: list[str],
    ) -> None:  # fmt: skip
        """Stand in for `_load_from_state_dict` of each module, in the thread of the method."""
        if prefix:
            return  # torch has come to the children, which torchlift loads with the module
        if self._placed:
            raise self._refusal(
                "calls the method of nn.Module more than once, and torchlift loads everything in "
                "the first call"
            )
        strict = strict_of_caller()
        self._events.put(PassedState(module, OrderedDict(values), strict))
        values.clear()  # torch's own copy, which it would filter anew for each child
        reply = self._replies.get()
        if reply is not None:
            raise reply
        if not strict:  # otherwise what is missing was allowed
            missing += self._reported[0]
            unexpected += self._reported[1]


def own_loaders(tree: ModuleTree, *, inside: bool = False) -> list[tuple[str, nn.Module]]:
    """Return (prefix of its names, module) of each root whose class overrides `load_state_dict`.

    Args:
        tree: the model.
        inside: whether a model inside of DDP or ``torch.compile`` counts as a root, too.
    """
    if isinstance(tree.model, ModuleHolder):
        roots = [(f"{name}.", module) for name, module in tree.model.items()]
    else:
        roots = [("", tree.model)]
    found = []
    for prefix, module in roots:
        while inside and not _is_overridden(module):
            inner, in_keys = wrapped_by(module)
            if inner is None:
                break
            prefix += f"{inner}." if in_keys else ""
            module = getattr(module, inner)
        if _is_overridden(module):
            found.append((prefix, module))
    return found


def _is_overridden(module: nn.Module) -> bool:
    if module.load_state_dict == nn.Module.load_state_dict.__get__(module):
        return False
    method = own(module, "load_state_dict")
    return getattr(method, "__func__", method) is not nn.Module.load_state_dict

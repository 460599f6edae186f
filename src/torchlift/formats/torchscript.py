"""TorchScript archives: the tensors of the module tree, without the program.

``data.pkl`` holds the tree: objects whose classes are source text in the archive, each with a dict
of attributes. Which attributes are parameters and which are buffers stands only in that text, in
lines that the printer writes at the top of each class, with the name of every attribute that torch
takes out of the pickle; they are matched, and nothing of the text is parsed or run.
``constants.pkl`` holds what the program refers to as ``CONSTANTS.c0``.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

from torchlift.errors import FormatError
from torchlift.formats.index import Index, Record
from torchlift.formats.reader import Content, Reader
from torchlift.formats.source import Source, errors_name
from torchlift.formats.torch_pickle import (
    Blocked,
    Global,
    TensorRef,
    TorchWorld,
    read_torch_pickle,
)
from torchlift.formats.torch_zip import (
    index_of,
    read_content,
    read_notes,
    top_directory,
    zip_resolver,
)
from torchlift.formats.unpickle import Budget
from torchlift.formats.zip_archive import expect_records

#: Under which the tensors come that are neither parameters nor buffers.
CONSTANTS, ATTRIBUTES = "CONSTANTS", "ATTRIBUTES"

#: Attributes that every module has, of torch itself.
_OF_TORCH = ("training", "_is_full_backward_hook")

_MAX_DEPTH = 100
_CLASS = re.compile(
    r'^class (\w+)\(Module\):\n  __parameters__ = \[(.*)\]\n(?:  __buffers__ = \[(.*)\]\n)?',
    re.MULTILINE,
)  # fmt: skip
_NAME = re.compile(r'"([^"\\]*)"')
#: An attribute, of which each has a line, and what stands behind the last of them.
_ATTRIBUTE = re.compile(
    r'^  (?:(\w+) : (?!Final\[)|__annotations__\["([^"\\]*)"\] = )', re.MULTILINE
)
_BEHIND = re.compile(r"^(?:  def |class |\Z)", re.MULTILINE)

#: Calls that only say of what type a list is.
_TYPED = "torch.jit._pickle."
_LISTS = ("intlist", "tensorlist", "doublelist", "boollist")
_TYPED_CALLS = ("restore_type_tag", *(f"build_{kind}" for kind in _LISTS))


#: Layouts of sparse tensors, as C++ numbers them (c10/core/Layout.h).
_LAYOUTS = {
    1: "torch.sparse_coo", 2: "torch.sparse_csr", 4: "torch.sparse_csc", 5: "torch.sparse_bsr",
    6: "torch.sparse_bsc",
}  # fmt: skip


class _Class(NamedTuple):
    """What the text of a class lists; buffers None: each tensor that is no parameter is one.

    Attributes:
        declared: what torch takes out of the pickle; None of a class without text, for all of it.
    """

    is_module: bool
    parameters: frozenset[str] = frozenset()
    buffers: frozenset[str] | None = None
    declared: frozenset[str] | None = None


class _Object(dict[Any, Any]):
    """An object: its attributes by name."""

    __slots__ = ("kind",)

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind


class _ScriptWorld(TorchWorld):
    """The names in a TorchScript archive's pickles.

    Attributes:
        folder: where the storages of the pickle are that is being read.
    """

    def __init__(self, folder: str, budget: Budget) -> None:
        super().__init__(budget)
        self.folder = folder
        self._classes: dict[str, Global] = {}

    def find(self, module: str, name: str) -> Global | Blocked:
        """Return a stand-in; classes whose text is in the archive are not blocked."""
        dotted = f"{module}.{name}"
        is_typed = dotted.removeprefix(_TYPED) in _TYPED_CALLS
        if is_typed or (dotted.startswith("__torch__.") and ".torch.classes." not in dotted):
            return self._classes.setdefault(dotted, Global(dotted))
        return super().find(module, name)

    def call(self, function: object, arguments: object, keywords: object = None) -> object:
        """Return a record of a call."""
        name = function.name if isinstance(function, Global) else ""
        if name.startswith("__torch__."):  # of an enum, only the value follows
            return _Object(name) if arguments == () else arguments
        if name.startswith(_TYPED) and isinstance(arguments, tuple) and arguments:
            return arguments[0]
        if name == "torch._utils._rebuild_sparse_tensor" and isinstance(arguments, tuple):
            # Other arguments than torch.save gives: a number, the size, and more than it needs.
            layout, size, _, *tensors = (*arguments[:-1], None, None, None)[:6]
            known = _LAYOUTS.get(layout) if type(layout) is int else None
            inner = [tensor for tensor in tensors if tensor is not None]
            arguments = known, (*inner, size)
        return super().call(function, arguments, keywords)

    def persistent(self, identity: object) -> object:
        """Return the storage that a persistent id describes."""
        if type(identity) is tuple and len(identity) == 5 and type(identity[2]) is str:
            identity = (*identity[:2], self.folder + identity[2], *identity[3:])
        return super().persistent(identity)

    def build(self, target: object, state: object) -> None:
        """Give an object its attributes."""
        if isinstance(target, _Object):
            state = state if isinstance(state, dict) else {"__getstate__": state}
            for name in state:  # which many objects may share, and each has a copy
                self.budget.hash(name)
            target.update(state)
        else:
            super().build(target, state)


def read_torchscript(content: Content) -> Index:
    """Read the index of a TorchScript archive.

    Returns:
        The state dict of the module tree under its own names; below ``CONSTANTS`` the tensors that
        the program names, and below ``ATTRIBUTES`` those of other attributes.

    Raises:
        FormatError: not such an archive, damaged, or inconsistent.
    """
    source, records = content.source, content.records
    top = top_directory(records)
    needed = (".py", "data.pkl", "constants.pkl", "version")
    expect_records(source, [at for name, at in records.items() if name.endswith(needed)])
    notes = read_notes(source, records, top)
    data = read_content(source, records[top + "data.pkl"])
    world = _ScriptWorld("data/", source.budget)
    root = read_torch_pickle(data, world)
    if not isinstance(root, _Object):
        raise FormatError("a TorchScript archive without a module", entry=top + "data.pkl")
    state, attributes = _Splitter(source, records, top).split(root)
    world.folder = "constants/"
    with errors_name(source.path, top + "constants.pkl"):
        pickled = read_content(source, records[top + "constants.pkl"])
        constants = read_torch_pickle(pickled, world)
    if not isinstance(constants, (tuple, list)):
        raise FormatError("the constants are not a tuple", entry=top + "constants.pkl")
    named = {f"c{number}": value for number, value in enumerate(constants)}
    for name, values in ((CONSTANTS, named), (ATTRIBUTES, attributes)):
        if name in state:
            raise FormatError("a module has a name that stands for something else", entry=name)
        if values:
            state[name] = values
    resolver = zip_resolver(source, records, top, "", notes)
    return index_of(source, "torchscript", state, world, resolver, notes)


class _Splitter:
    """Tells the state dict of a module tree from all else that its modules hold."""

    def __init__(self, source: Source, records: dict[str, Record], top: str) -> None:
        self.source = source
        self.records = records
        self.top = top
        self._files: dict[str, dict[str, _Class] | None] = {}
        self._split: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {}

    def split(self, module: _Object, depth: int = 0) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Return (parameters, buffers and modules; all other attributes) by name.

        Each module is looked at once: how often others refer to it is limited by `flatten`.
        """
        found = self._split.get(id(module))
        if found is not None:
            return found
        if depth > _MAX_DEPTH:
            raise FormatError("modules nest too deep", expected=f"at most {_MAX_DEPTH} levels")
        state, other = self._split[id(module)] = {}, {}
        listed = self._class(module.kind)
        for name, value in module.items():
            if listed.declared is not None and name not in listed.declared:
                continue  # as torch drops it
            if isinstance(value, _Object) and self._class(value.kind).is_module:
                inner, rest = self.split(value, depth + 1)
                if inner:
                    state[name] = inner
                if rest:
                    other[name] = rest
                continue
            is_parameter = name in listed.parameters
            is_listed = is_parameter or listed.buffers is None or name in listed.buffers
            if isinstance(value, TensorRef) and is_parameter:
                value = replace(value, is_parameter=True)
            is_state = is_listed and isinstance(value, (TensorRef, Blocked))
            if is_state or name not in _OF_TORCH:
                (state if is_state else other)[name] = value
        return state, other

    def _class(self, kind: str) -> _Class:
        """Return what the text of a class lists; of one without text, every tensor counts."""
        path, _, name = kind.rpartition(".")
        file = f"{self.top}code/{path.replace('.', '/')}.py"
        if file not in self._files:
            self._files[file] = self._read(file)
        classes = self._files[file]
        if classes is None:
            return _Class(True)
        return classes.get(name, _Class(False, buffers=frozenset()))

    def _read(self, file: str) -> dict[str, _Class] | None:
        if file not in self.records:
            return None
        text = read_content(self.source, self.records[file]).decode("utf-8", "replace")
        found = {}
        for match in _CLASS.finditer(text):
            name, parameters, buffers = match.groups()
            behind = _BEHIND.search(text, match.end())
            lines = text[match.end() : behind.start() if behind else None]
            found[name] = _Class(
                True,
                frozenset(_NAME.findall(parameters)),
                None if buffers is None else frozenset(_NAME.findall(buffers)),
                frozenset("".join(names) for names in _ATTRIBUTE.findall(lines)),
            )
        return found


READER = Reader(lambda content: f"{content.top}constants.pkl" in content.records, read_torchscript)

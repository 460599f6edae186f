"""TorchScript archives: every tensor of the module tree by its path, without the program.

``data.pkl`` holds the tree: objects with a dict of attributes each. Their classes are source text
in the archive, which is not read. It alone says which tensors are parameters, which are buffers and
which are other attributes. ``constants.pkl`` holds the constants of the program. A module of
``torch.jit.freeze`` keeps its weights there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torchlift.errors import FormatError
from torchlift.formats.index import Index, Record
from torchlift.formats.source import Source, errors_name
from torchlift.formats.torch_pickle import (
    Blocked,
    Global,
    TorchWorld,
    read_torch_pickle,
)
from torchlift.formats.torch_zip import (
    Again,
    index_of,
    read_notes,
    top_directory,
    zip_resolver,
)
from torchlift.formats.unpickle import Budget
from torchlift.formats.zip_archive import expect_records, read_record

#: The container of the tensors that the program names.
CONSTANTS = "CONSTANTS"

_AGAIN = Again(
    "Save it once more: torch.jit.save(torch.jit.load(path), new).",
    "torch.jit.load does not swap its bytes. On a machine like the one that saved it, save its "
    "state dict as safetensors.",
)

#: Attributes that torch gives to every module.
_OF_TORCH = ("training", "_is_full_backward_hook")

#: Calls that only state the type of a list.
_TYPED = "torch.jit._pickle."
_LISTS = ("intlist", "tensorlist", "doublelist", "boollist")
_TYPED_CALLS = ("restore_type_tag", *(f"build_{kind}" for kind in _LISTS))


class _Object(dict[Any, Any]):
    """A module or another object: its attributes by name."""


class _ScriptWorld(TorchWorld):
    """The names in a TorchScript archive's pickles.

    Attributes:
        folder: Folder of the storages of the current pickle.
    """

    def __init__(self, folder: str, budget: Budget) -> None:
        super().__init__(budget)
        self.folder = folder
        self._classes: dict[str, Global] = {}

    def find(self, module: str, name: str) -> Global | Blocked:
        """Return a stand-in. Classes of the archive itself are not blocked."""
        dotted = f"{module}.{name}"
        is_typed = dotted.removeprefix(_TYPED) in _TYPED_CALLS
        if is_typed or (dotted.startswith("__torch__.") and ".torch.classes." not in dotted):
            return self._classes.setdefault(dotted, Global(dotted))
        return super().find(module, name)

    def call(self, function: object, arguments: object, keywords: object = None) -> object:
        """Return a record of a call."""
        name = function.name if isinstance(function, Global) else ""
        if name.startswith("__torch__."):  # the value of an enum comes as the argument
            return _Object() if arguments == () else arguments
        if name.startswith(_TYPED) and isinstance(arguments, tuple) and arguments:
            return arguments[0]
        if name == "torch._utils._rebuild_sparse_tensor" and isinstance(arguments, tuple):
            # TorchScript passes the layout as a number, and the arguments in another order.
            return self.block(name, True, arguments)
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
            for name in state:  # many objects may share one state, and each gets a copy
                self.budget.hash(name)
            for name, value in state.items():
                is_empty = isinstance(value, _Object) and not value  # such as a ReLU
                if name not in _OF_TORCH and not is_empty:
                    target[name] = value
        else:
            super().build(target, state)


def read_torchscript(source: Source, records: dict[str, Record]) -> Index:
    """Read the index of a TorchScript archive.

    Returns:
        All tensors of the module tree by their path, and the constants of the program below
        ``CONSTANTS``.

    Raises:
        FormatError: If it is not such an archive, or is damaged or inconsistent.
    """
    top = top_directory(records)
    needed = ("data.pkl", "constants.pkl", "version")
    expect_records(source, [at for name, at in records.items() if name.endswith(needed)])
    notes = read_notes(source, records, top, _AGAIN)
    data = read_record(source, records[top + "data.pkl"])
    world = _ScriptWorld("data/", source.budget)
    root = read_torch_pickle(data, world)
    if not isinstance(root, _Object):
        raise FormatError(
            "the TorchScript archive does not contain a module", entry=top + "data.pkl"
        )
    world.folder = "constants/"
    with errors_name(source.path, top + "constants.pkl"):
        pickled = read_record(source, records[top + "constants.pkl"])
        constants = read_torch_pickle(pickled, world)
    if not isinstance(constants, (tuple, list)):
        raise FormatError("the constants are not a tuple", entry=top + "constants.pkl")
    if CONSTANTS in root:
        raise FormatError("a module has the name of the program's constants", entry=CONSTANTS)
    if constants:
        root[CONSTANTS] = {f"c{number}": value for number, value in enumerate(constants)}
    resolver = zip_resolver(source, records, top, "")
    index = index_of(source, "torchscript", root, world, resolver, notes)
    return replace(index, records=resolver.others())

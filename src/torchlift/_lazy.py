"""Public names that are imported when they are first used (PEP 562)."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy(
    package: str, modules: Mapping[str, str], *, with_torch: str = ""
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    Args:
        package: Its name.
        modules: Module of the package -> the public names that it defines. A public module has
            its own name.
        with_torch: Names to import at once if torch is imported. They take 45 ms. A program with
            torch is about to load something, and the first load should take 4 ms, not 49.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}
    public = sorted(module_of)

    def get(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} does not define {name!r}")
        module = import_module(f"{package}.{module_of[name]}")
        value: object = module if name == module_of[name] else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    if "torch" in sys.modules:
        for name in with_torch.split():
            get(name)
    # A star import must not take Python's own open away.
    return get, lambda: public, [name for name in public if not hasattr(builtins, name)]

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
        package: its name.
        modules: module of the package -> the public names that it defines; its
            own name, where it is public itself.
        with_torch: names to import at once where torch is imported already. Who has torch is about
            to load something: these take 45 ms, which belong beside torch's own 700 and not inside
            the first load, which takes 4.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}
    public = sorted(module_of)

    def get(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{module_of[name]}")
        value: object = module if name == module_of[name] else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    if "torch" in sys.modules:
        for name in with_torch.split():
            get(name)
    # A star import must not take Python's own open away.
    return get, lambda: public, [name for name in public if not hasattr(builtins, name)]

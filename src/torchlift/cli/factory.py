"""Import and call the user's factory that ``--model`` names (MODULE:FACTORY)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

from torch import nn

import torchlift
from torchlift.cli import UsageError


def make_model(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Make a skeleton with the user's factory.

    Args:
        name: ``MODULE:FACTORY``.
        arguments: Its keyword arguments.

    Raises:
        UsageError: If the factory does not exist, or if it or its module raised an error.

    Example:
        >>> make_model("torch.nn:Linear", {"in_features": 2, "out_features": 1})
        Linear(in_features=2, out_features=1, bias=True)
    """
    try:
        with search_working_folder():
            model: nn.Module = torchlift.skeleton(resolve_name(name), **arguments)
            return model
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UsageError(f"--model {name}: {text}") from error


@contextmanager
def search_working_folder() -> Iterator[None]:
    """Look for modules in the working folder first. Processes that start here do it, too."""
    folder = os.getcwd()
    sys.path.insert(0, folder)  # Python put the command's own folder there
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)

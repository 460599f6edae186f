"""What ``--model`` and ``--parallelize`` name, MODULE:NAME, from code that may do anything."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import torchlift
from torchlift.cli import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def make_model(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Return a skeleton of what a factory makes.

    Args:
        name: ``MODULE:FACTORY``.
        arguments: what it is called with, by name.

    Raises:
        UsageError: there is no such factory, or its module or itself raised an error.

    Example:
        >>> make_model("torch.nn:Linear", {"in_features": 2, "out_features": 1})
        Linear(in_features=2, out_features=1, bias=True)
    """
    with _user_code("--model", name):
        model: nn.Module = torchlift.skeleton(resolve_name(name), **arguments)
        return model


def make_parallelize(name: str) -> Callable[[nn.Module, DeviceMesh], nn.Module | None]:
    """Return the function ``MODULE:FUNCTION``; what it raises becomes a `UsageError` too."""
    with _user_code("--parallelize", name):
        function = resolve_name(name)

    # Not a nested function: it is sent to other processes.
    return partial(_parallelize, name, function)


def _parallelize(
    name: str, function: Callable[..., nn.Module | None], model: nn.Module, mesh: DeviceMesh
) -> nn.Module | None:
    with _user_code("--parallelize", name):
        return function(model, mesh)


@contextmanager
def _user_code(option: str, name: str) -> Iterator[None]:
    """Run what an option names, and turn its error into a `UsageError`."""
    try:
        with search_working_folder():
            yield
    except Exception as error:
        raise UsageError(f"{option} {name}: {_told(error)}") from error


@contextmanager
def search_working_folder() -> Iterator[None]:
    """Look for modules in the working folder first. Processes that start here do it, too."""
    folder = os.getcwd()
    sys.path.insert(0, folder)  # the command's own folder is there instead
    try:
        yield
    finally:
        # What else the command line names means the folder that the command was started in.
        os.chdir(folder)
        if folder in sys.path:
            sys.path.remove(folder)


def _told(error: Exception) -> str:
    """An error in one line: its type, its message, and where the user's code raised it."""
    where = _where(error)
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    line = f"{type(error).__name__}: {' '.join(text.split())}".removesuffix(": ")
    return f"{line} ({where})" if where else line


def _where(error: Exception) -> str | None:
    """``file:line`` of the innermost call that is neither torch's, torchlift's nor Python's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not _is_inner(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return None


def _is_inner(file: str) -> bool:
    folders = [
        os.path.join(path, "") for package in (torch, torchlift) for path in package.__path__
    ]
    if file.startswith(("<frozen ", *folders)):
        return True
    # What is installed lies below the standard library where there is no virtual environment.
    return file.startswith(os.path.dirname(os.__file__)) and "-packages" not in file

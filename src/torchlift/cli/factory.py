"""Import and call the user's code that ``--model`` and ``--parallelize`` name (MODULE:NAME)."""

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
    with _user_code("--model", name):
        model: nn.Module = torchlift.skeleton(resolve_name(name), **arguments)
        return model


def make_parallelize(name: str) -> Callable[[nn.Module, DeviceMesh], nn.Module | None]:
    """Import the function ``MODULE:FUNCTION``. An error inside it becomes a `UsageError`."""
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
    """Run user code, and turn its error into a `UsageError`."""
    try:
        with search_working_folder():
            yield
    except Exception as error:
        raise UsageError(f"{option} {name}: {_describe_error(error)}") from error


@contextmanager
def search_working_folder() -> Iterator[None]:
    """Look for modules in the working folder first. Processes that start here do it, too."""
    folder = os.getcwd()
    sys.path.insert(0, folder)  # Python put the command's own folder there
    try:
        yield
    finally:
        # Other paths of the command line are relative to the folder that the command started in.
        os.chdir(folder)
        if folder in sys.path:
            sys.path.remove(folder)


def _describe_error(error: Exception) -> str:
    """Describe an error in one line: type, message, and the line of the user's code."""
    where = _find_user_line(error)
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    line = f"{type(error).__name__}: {' '.join(text.split())}".removesuffix(": ")
    return f"{line} ({where})" if where else line


def _find_user_line(error: Exception) -> str | None:
    """Return ``file:line`` of the innermost call in the user's code."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not _is_library_code(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return None


def _is_library_code(file: str) -> bool:
    folders = [
        os.path.join(path, "") for package in (torch, torchlift) for path in package.__path__
    ]
    if file.startswith(("<frozen ", *folders)):
        return True
    # Without a virtual environment, packages are installed below the standard library.
    return file.startswith(os.path.dirname(os.__file__)) and "-packages" not in file

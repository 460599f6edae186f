"""The model that ``--model MODULE:FACTORY`` names, from code that may do anything."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

import torch
from torch import nn

import torchlift
from torchlift._skeleton.skeleton import skeleton
from torchlift.cli import UsageError


def make_model(name: str) -> nn.Module:
    """A skeleton of what a factory makes; the working folder is where its module is looked for.

    Args:
        name: ``MODULE:FACTORY``.

    Raises:
        UsageError: there is no such factory, or its module or itself raised an error.

    Example:
        >>> make_model("torch.nn:Identity")
        Identity()
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UsageError(f"--model {name!r}: expected MODULE:FACTORY")
    folder = os.getcwd()
    sys.path.insert(0, folder)  # the command's own folder is there instead
    try:
        factory: Any = importlib.import_module(module)
        for part in attribute.split("."):
            factory = getattr(factory, part)
        model: nn.Module = skeleton(factory)
    except Exception as error:
        raise UsageError(f"--model {name}: {_told(error)}") from error
    finally:
        # What else the command line names means the folder that the command was started in.
        os.chdir(folder)
        if folder in sys.path:
            sys.path.remove(folder)
    return model


def _told(error: Exception) -> str:
    """An error in one line: its type, its message, and where the user's code raised it."""
    where = _where(error)
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    said = f"{type(error).__name__}: {' '.join(text.split())}".removesuffix(": ")
    return f"{said} ({where})" if where else said


def _where(error: Exception) -> str | None:
    """``file:line`` of the innermost call that is neither torch's, torchlift's nor Python's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not _is_inner(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return None


def _is_inner(file: str) -> bool:
    homes = [os.path.join(path, "") for home in (torch, torchlift) for path in home.__path__]
    if file.startswith(("<frozen ", *homes)):
        return True
    # What is installed lies below the standard library where there is no virtual environment.
    return file.startswith(os.path.dirname(os.__file__)) and "-packages" not in file

"""The exceptions torchlift raises for a bad file, a bad match or a bad placement.

Every message names, in this order, the file, the entry, what is wrong, what was expected, what was
found, and the fix. Lists of names come last, after the fix. Each part is also an attribute, so a
program need not parse the text.
"""

from __future__ import annotations

import difflib
import errno
import heapq
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from itertools import chain
from typing import Any, ParamSpec, TypeVar

from torchlift._system.text import printable

_P = ParamSpec("_P")
_T = TypeVar("_T")
_LONGEST = 300  # characters of one name or value in a message
_MOST_COMPARED = 200  # names, with one that does not exist


@dataclass(frozen=True)
class Argument:
    """An argument that a hint names, shown as Python code.

    Attributes:
        name: The name, such as ``"rename"``.
        value: The text after the equals sign.
        steps: The value as data, for the command line. For ``rename``: prefixes to strip, or
            pairs of a pattern and its replacement.
    """

    name: str
    value: str = ""
    steps: tuple[str | tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


class Hint(str):
    """A fix that names arguments.

    Attributes:
        fragments: The texts and arguments that it consists of.

    Example:
        >>> hint = Hint("Leave ", Argument("root"), " out.")
        >>> print(hint, hint.spelled(lambda argument: f"--{argument.name}"), sep="; ")
        Leave root= out.; Leave --root out.
    """

    fragments: tuple[str | Argument, ...]

    def __new__(cls, *fragments: str | Argument) -> Hint:
        """Join the fragments; arguments are spelled as in Python."""
        made = super().__new__(cls, "".join(map(str, fragments)))
        inner = ((f.fragments if isinstance(f, Hint) else (f,)) for f in fragments)
        made.fragments = tuple(chain.from_iterable(inner))
        return made

    def spelled(self, spell: Callable[[Argument], str]) -> str:
        """Return the text with every argument spelled by a function."""
        return "".join(spell(f) if isinstance(f, Argument) else f for f in self.fragments)


class CheckpointError(Exception):
    """Base of every error torchlift raises about a checkpoint.

    Attributes:
        reason: What is wrong, in a short phrase.
        file: The file, or None.
        entry: The key, record or module name, or None.
        expected: The expected value, or None.
        found: The value that was found, or None.
        hint: The fix, or None.
        lists: Lines of names, one for each kind of problem.

    Example:
        >>> import os, tempfile, torchlift
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> with open(path, "w") as file:
        ...     _ = file.write("<html>Not found</html>")
        >>> try:
        ...     torchlift.open(path)
        ... except torchlift.CheckpointError as error:
        ...     print(str(error).replace(path, "model.safetensors"))
        model.safetensors: this is a web page or another XML text; expected a file of torch
        (TorchScript, too), safetensors, GGUF or numpy, or an *.index.json. A login or error
        page was saved instead of the file; fetch it again.
    """

    def __init__(
        self,
        reason: str,
        *,
        file: str | os.PathLike[str] | None = None,
        entry: str | None = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
        lists: Iterable[str] = (),
    ) -> None:
        self.reason = reason
        # The text of a URL only: a `Url` object may carry credentials, which no error may show.
        self.file = None if file is None else str(os.fspath(file))
        self.entry = entry
        self.expected = expected
        self.found = found
        self.hint = hint
        self.lists = list(lists)
        super().__init__(reason)

    def __str__(self) -> str:
        file = "" if self.file is None else f"{self.file}: "
        entry = "" if self.entry is None else f"'{printable(self.entry, _LONGEST)}': "
        text = f"{file}{entry}{self.reason}"
        if self.expected is not None:
            text += f"; expected {printable(str(self.expected), _LONGEST)}"
        if self.found is not None:
            text += f"; found {printable(str(self.found), _LONGEST)}"
        text = printable(text if self.hint is None else f"{text}. {self.hint}")
        return "\n  ".join([text, *map(printable, self.lists)])

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions travel between processes (ranks, data loader workers) by pickle; the default
        # would call __init__ with the message alone and lose the attributes.
        return (type(self), (self.reason,), self.__dict__)


class FormatError(CheckpointError):
    """The file is malformed, truncated, or not a checkpoint that torchlift reads.

    Example:
        >>> import os, tempfile, torch, torchlift
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> torch.save(torch.ones(1000), path)
        >>> os.truncate(path, 2000)
        >>> try:
        ...     torchlift.open(path)
        ... except torchlift.FormatError as error:
        ...     print(error.reason, error.hint, sep="; ")
        the zip archive lacks its directory; The file is truncated: an interrupted save or
        download. Fetch it again.
    """


class _OfSystem(CheckpointError):
    """An error that is also one of Python's own, with the attributes of that one."""

    strerror: str | None

    @property
    def filename(self) -> str | None:
        """The file concerned, or None."""
        return self.file

    def __init__(self, reason: str, **fields: Any) -> None:
        super().__init__(reason, **fields)
        self.strerror = reason


class NotFound(_OfSystem, FormatError, FileNotFoundError):
    """A path or a URL does not exist.

    Like the three errors below it is also one of Python's own errors. A program that catches
    Python's error keeps working when a path becomes a URL.

    Example:
        >>> import torchlift
        >>> try:
        ...     torchlift.open("/nowhere/model.pt")
        ... except FileNotFoundError as error:
        ...     print(error)
        /nowhere/model.pt: no such file or directory. The file does not exist: check the path.
    """

    errno = errno.ENOENT


class NotAllowed(_OfSystem, FormatError, PermissionError):
    """The system or the server refuses access because of permissions or credentials."""

    errno = errno.EACCES


class TimedOut(_OfSystem, TimeoutError):
    """No byte arrived before the timeout."""

    errno = errno.ETIMEDOUT


class Unreachable(_OfSystem, ConnectionError):
    """A server cannot be reached, or cannot answer, because of its name, the network or TLS."""

    errno = errno.ECONNABORTED


class UnsafeError(CheckpointError):
    """Using the file would run code, or read outside of its directory.

    Example:
        >>> import fractions, os, tempfile, torch, torchlift
        >>> path = os.path.join(tempfile.mkdtemp(), "sent.pt")
        >>> torch.save({"weight": torch.ones(2), "ratio": fractions.Fraction(1, 2)}, path)
        >>> try:
        ...     torchlift.open(path)["ratio"]
        ... except torchlift.UnsafeError as error:
        ...     print(error.entry, error.reason, sep=": ")
        ratio: only unpickling could rebuild it, through fractions.Fraction, and that can
        run code
    """


class MismatchError(CheckpointError):
    """The checkpoint does not match the model.

    Attributes:
        missing_keys: Names that the model has and the checkpoint lacks.
        unexpected_keys: Names that the checkpoint has and the model lacks.
        mismatched: Name -> (shape in the model, shape in the checkpoint).
        lists: These names, one line for each kind.

    Example:
        >>> import os, tempfile, torch, torchlift
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> torch.save({"module.weight": torch.ones(2, 3), "module.bias": torch.ones(2)}, path)
        >>> try:
        ...     torchlift.load(torch.nn.Linear(3, 2), path)
        ... except torchlift.MismatchError as error:
        ...     print(str(error).replace(path, "model.pt"))
        ...     print(error.missing_keys)
        model.pt: nothing in the checkpoint fits the model. The checkpoint's names start
        with 'module.': pass rename=remap.strip('module.').
          missing (2): weight, bias
          unexpected (2): module.weight, module.bias
        ['weight', 'bias']
    """

    def __init__(
        self,
        reason: str,
        *,
        missing_keys: Iterable[str] = (),
        unexpected_keys: Iterable[str] = (),
        mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] | None = None,
        **context: Any,
    ) -> None:
        super().__init__(reason, **context)
        self.missing_keys = list(missing_keys)
        self.unexpected_keys = list(unexpected_keys)
        self.mismatched = dict(mismatched or {})


class StateDictMismatch(MismatchError, RuntimeError):
    """A state dict does not match the model or the optimizer.

    It is a `RuntimeError`, too, as ``torch.distributed.checkpoint.state_dict`` raises one. A
    program that catches `RuntimeError` keeps working after you change the import.
    """


class PlacementError(CheckpointError):
    """A tensor cannot be placed as requested, on this device, in this mode or in this module.

    Example:
        >>> import os, tempfile, torch, torchlift
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> model = torch.nn.Linear(3, 2)
        >>> torch.save(model.state_dict(), path)
        >>> try:
        ...     torchlift.load(model, path, dtype="float16", mode="copy")
        ... except torchlift.PlacementError as error:
        ...     print(error)
        'weight': cannot be copied in place, because its dtype or device would change; expected
        torch.float32 on cpu; found torch.float16 on cpu. Load with mode="swap" or mode="auto".
    """


class IntegrityError(CheckpointError):
    """A checksum is wrong, or the file changed after it was opened.

    ``torchlift.load(check="finite")`` raises this, too, if values are not finite.

    Attributes:
        not_finite: Name in the model -> (number of NaN values, number of infinite values).

    Example:
        >>> import os, tempfile, torch, torchlift
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt")
        >>> torch.save({"weight": torch.ones(4)}, path)
        >>> with open(path, "r+b") as file:
        ...     _ = file.seek(torchlift.open(path).entries["weight"].chunks[0].offset)
        ...     _ = file.write(b"!")
        >>> try:
        ...     torchlift.convert(path, path.replace("model", "new"))
        ... except torchlift.IntegrityError as error:
        ...     print(error.entry, error.reason, error.expected, error.found, sep="; ")
        weight; the checksum of its bytes is wrong; crc32 e8681456; crc32 513ffeba
    """

    not_finite: Mapping[str, tuple[int, int]] = {}


#: Keywords of torch's and other libraries' functions -> what there is in their place.
_ELSEWHERE = {
    "_use_new_zipfile_serialization": "leave it out: a torch file is the zip archive",
    "assign": 'pass mode="assign" to load',
    "device_map": "pass device= to load: remap.by_key takes such a dict, remap.fit makes one",
    "key_mapping": "pass rename= to load: remap.rules takes such pairs",
    "map_location": "no location in a file is obeyed: pass device= to load, a device or a rule "
    "such as remap.by_location",
    "max_memory": "pass device=remap.fit(model, max_memory) to load",
    "mmap": 'pass source="mmap" or source="read" to load',
    "overwrite": "leave it out: a checkpoint that is there is replaced",
    "pickle_module": "leave it out: nothing is unpickled",
    "pickle_protocol": "leave it out: torch files are written as torch writes them by itself",
    "torch_dtype": "pass dtype= to load",
    "weights_only": "leave it out: nothing of a file is ever run; allow_classes= names tensor "
    "subclasses to rebuild",
}


#: Function -> its arguments in their order, and how to call it.
_CALLS = {
    "convert": "a source, then a destination: torchlift.convert(source, destination)",
    "diff": "two checkpoints: torchlift.diff(a, b)",
    "digest": "a model, a state dict or a path: torchlift.digest(model)",
    "load": "a model, then a checkpoint: torchlift.load(model, path). If you need the tensors "
    "alone, call torchlift.open(path).state_dict()",
    "load_optimizer": "a model, its optimizer, then a checkpoint: "
    "torchlift.load_optimizer(model, optimizer, path)",
    "open": "a path: torchlift.open(path)",
    "plan": "a model, then a checkpoint: torchlift.plan(model, path). If you need the names "
    "alone, call print(torchlift.open(path))",
    "save": "a model or a state, then a path: torchlift.save(model, path)",
}


def wrong_call(name: str, problem: str) -> TypeError:
    """Return the error for a call whose arguments are missing, swapped or of another type.

    Example:
        >>> print(wrong_call("diff", "an argument is missing: b"))
        an argument is missing: b. torchlift.diff takes two checkpoints: torchlift.diff(a, b)
    """
    return TypeError(f"{problem}. torchlift.{name} takes {_CALLS[name]}")


def explain_calls(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make a function explain a missing argument, and keywords of other libraries."""
    parameters = signature(function).parameters
    required = [name for name, each in parameters.items() if each.default is each.empty]

    @wraps(function)
    def call(*args: _P.args, **keywords: _P.kwargs) -> _T:
        for name in keywords:
            if name in _ELSEWHERE and name not in parameters:
                raise TypeError(f"{function.__name__}() does not take {name}=: {_ELSEWHERE[name]}")
        if missing := [name for name in required[len(args) :] if name not in keywords]:
            lack = "an argument is" if len(missing) == 1 else "arguments are"
            raise wrong_call(function.__name__, f"{lack} missing: {', '.join(missing)}")
        return function(*args, **keywords)

    return call


def note(error: BaseException, text: str) -> None:
    """Add a line to the traceback of an error that a caller's own code raised."""
    error.add_note(printable(text, _LONGEST))


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return a question that names at most three of `words` near a word, or an empty string.

    difflib takes 0.1 ms to compare two names, which is 11 s for 100,000. It therefore gets only the
    names that share the most components with the word.
    """
    components = set(word.split("."))
    short = (other for other in words if len(other) < _LONGEST > len(word))
    compared = heapq.nlargest(
        _MOST_COMPARED, short, lambda other: len(components.intersection(other.split(".")))
    )
    near = difflib.get_close_matches(word, compared, n=3)
    return f"Did you mean {', '.join(map(repr, near))}?" if near else ""

"""The exceptions torchlift raises for a bad file, a bad match or a bad placement.

Every message answers five questions in one sentence each, in this order: which file, which entry,
what was expected, what was found, and what to do; lists of names come last, so that nobody has to
look for the way out behind them. All of it is in attributes too, so a program can react to them
without parsing text.
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
_MOST_COMPARED = 50  # names, with one that does not exist


@dataclass(frozen=True)
class Argument:
    """An argument that a hint names; it shows as Python has it.

    Attributes:
        name: such as ``"rename"``.
        value: what is behind the equals sign.
        steps: the value as data, for who spells it otherwise: of ``rename`` a prefix to strip, or a
            pattern and its replacement.
    """

    name: str
    value: str = ""
    steps: tuple[str | tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


class Hint(str):
    """A way out that names arguments.

    Attributes:
        fragments: what it is made of, in this order.

    Example:
        >>> hint = Hint("Leave ", Argument("root"), " out.")
        >>> print(hint, hint.spelled(lambda argument: f"--{argument.name}"), sep="; ")
        Leave root= out.; Leave --root out.
    """

    fragments: tuple[str | Argument, ...]

    def __new__(cls, *fragments: str | Argument) -> Hint:
        """Return the text of all fragments, as Python has them."""
        made = super().__new__(cls, "".join(map(str, fragments)))
        inner = ((f.fragments if isinstance(f, Hint) else (f,)) for f in fragments)
        made.fragments = tuple(chain.from_iterable(inner))
        return made

    def spelled(self, spell: Callable[[Argument], str]) -> str:
        """Return the text with every argument as somebody else writes it."""
        return "".join(spell(f) if isinstance(f, Argument) else f for f in self.fragments)


class CheckpointError(Exception):
    """Base of every error torchlift raises about a checkpoint.

    Attributes:
        reason: what is wrong, in a short phrase.
        file: the file concerned, or None.
        entry: the key, record or module name concerned, or None.
        expected: what would have been right, or None.
        found: what was there instead, or None.
        hint: the way out, or None.
        lists: what there is more than one of, a line for each.

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
        (TorchScript and pt2, too), safetensors, GGUF or numpy, or an *.index.json. A login
        or error page was saved instead of the file; fetch it again.
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
        # Of a URL only the text: what travels with it is nobody's business who reads errors.
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
    """An error that is Python's own, too, with what programs read of that one."""

    strerror: str | None

    @property
    def filename(self) -> str | None:
        """The file concerned, or None."""
        return self.file

    def __init__(self, reason: str, **fields: Any) -> None:
        super().__init__(reason, **fields)
        self.strerror = reason


class NotFound(_OfSystem, FormatError, FileNotFoundError):
    """Nothing is there, under a path or a URL.

    Like the three errors below it is Python's own, too: a program that catches that keeps working
    when a path becomes a URL.

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
    """The system or the server refuses access: permissions, or credentials."""

    errno = errno.EACCES


class TimedOut(_OfSystem, TimeoutError):
    """No byte came for as long as one waits."""

    errno = errno.ETIMEDOUT


class Unreachable(_OfSystem, ConnectionError):
    """A server cannot be reached, or cannot answer: name, network, TLS, its own state."""

    errno = errno.ECONNABORTED


class UnsafeError(CheckpointError):
    """Refused: using the file would run code or read outside its directory.

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
    """The checkpoint and the model do not fit together.

    Attributes:
        missing_keys: names the model has and the checkpoint lacks.
        unexpected_keys: names the checkpoint has and the model lacks.
        mismatched: name -> (shape in the model, shape in the checkpoint).
        lists: the names of these kinds, a line for each kind.

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
    """A state dict does not fit the model or the optimizer.

    It is a `RuntimeError` too, because that is what ``torch.distributed.checkpoint.state_dict``
    raises: a program that catches it keeps working after the import is changed.
    """


class PlacementError(CheckpointError):
    """A tensor cannot be put where it was asked to go (device, mode, live module).

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
        torch.float32 on cpu; found torch.float16 on cpu asked for. Load with mode="swap" or
        mode="auto".
    """


class IntegrityError(CheckpointError):
    """Bytes are not what a checksum, or the file as it was opened, says they should be.

    Or values are not what ``torchlift.load(check="finite")`` asks for.

    Attributes:
        not_finite: name in the model -> how many of its values are NaN, and how many infinite.

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
    """Return the function, which explains a missing argument and other libraries' keywords."""
    parameters = signature(function).parameters
    required = [name for name, each in parameters.items() if each.default is each.empty]

    @wraps(function)
    def call(*args: _P.args, **keywords: _P.kwargs) -> _T:
        for name in keywords:
            if name in _ELSEWHERE and name not in parameters:
                raise TypeError(f"{function.__name__}() has no {name}=: {_ELSEWHERE[name]}")
        if missing := [name for name in required[len(args) :] if name not in keywords]:
            lack = "an argument is" if len(missing) == 1 else "arguments are"
            raise wrong_call(function.__name__, f"{lack} missing: {', '.join(missing)}")
        return function(*args, **keywords)

    return call


def note(error: BaseException, text: str) -> None:
    """Add a line to what a traceback shows of an error that a caller's own code raised."""
    error.add_note(printable(text, _LONGEST))


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return a question that names the nearest of `words`, or an empty string."""
    near = nearest(word, words)
    return f"Did you mean {', '.join(map(repr, near))}?" if near else ""


def nearest(word: str, words: Iterable[str]) -> list[str]:
    """Return at most three of `words` that are spelled like a word, the nearest first.

    difflib compares every letter with every letter, 0.1 ms for two names: 11 s for 100,000. So it
    sees only the names that share most components with the word, and of those the most of its ends.
    """
    components = set(word.split("."))

    def alike(other: str) -> tuple[int, int]:
        shared = len(components.intersection(other.split(".")))
        ends = _common(word, other) + _common(word[::-1], other[::-1])
        return shared, ends - abs(len(other) - len(word))

    short = (other for other in words if len(other) < _LONGEST > len(word))
    return difflib.get_close_matches(word, heapq.nlargest(_MOST_COMPARED, short, alike), n=3)


def _common(a: str, b: str) -> int:
    """Return how many letters two texts have in common at their starts."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
